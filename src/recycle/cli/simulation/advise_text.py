"""The advice as Markdown: the verdict, the choices in tables, what would change it, and the assumptions."""

from collections import Counter
from collections.abc import Sequence

from recycle.core.units import count_text, format_bytes, format_duration
from recycle.report.record.prices import cost_per_million
from recycle.report.record.tables import markdown
from recycle.sim.advise.advice import Advice
from recycle.sim.advise.choices import CUTS_BY_ITSELF, ELASTIC, SystemChoice
from recycle.sim.advise.search import MARGIN, FoundChoice
from recycle.sim.advise.verdict import FACTORS, FAILURES, PAUSES, REPAIRS, TIE, Crossing, threshold_text
from recycle.sim.measured_model import MeasuredModel

_AXIS_NAMES = {FAILURES: "failure rate", REPAIRS: "repair time", PAUSES: "pauses of the first choice"}


def title_of(advice: Advice) -> str:
    question = advice.question
    return f"{question.model.name} on {question.num_gpus:,} {question.gpu.name}"


def choice_name(choice: SystemChoice) -> str:
    """A choice in a few words: `recycle 16 x 8, tp 8`."""
    if choice.system.startswith(CUTS_BY_ITSELF):
        return f"{choice.system}, tp {choice.tensor_parallel}"
    shared = f", {choice.shared_layers} shared" if choice.shared_layers else ""
    return f"{choice.system} {choice.shape.num_pipelines} x {choice.shape.num_stages}, tp {choice.tensor_parallel}{shared}"


def advice_page(advice: Advice, command: str, price: float | None, picture: str = "", notes: Sequence[str] = ()) -> str:
    """Return the whole page; `notes` are further assumptions."""
    lines = [f"# Advice: {title_of(advice)}", "", f"Made by `{command}`.", "", *_verdict(advice, price), ""]
    if picture:
        lines += [f"![best of each system, and over the failure rate]({picture})", ""]
    lines += ["## First choice and closest alternatives", "", markdown(_shape_rows(advice, price)), ""]
    lines += ["## Best of every system", "", markdown(_system_rows(advice, price)), "", *_unproven(advice)]
    lines += ["## What would change the verdict", "", markdown(_threshold_rows(advice)), "", _threshold_notes(), ""]
    lines += ["## Assumptions", "", *(f"- {text}" for text in (*_assumptions(advice), *notes))]
    return "\n".join(lines) + "\n"


def _verdict(advice: Advice, price: float | None) -> list[str]:
    first, choice = advice.first, advice.first.choice
    facts = advice.facts[choice]
    where = f"{_layout_text(facts.depths)}, tensor-parallel degree {choice.tensor_parallel}, {_microbatch_text(advice, choice)}"
    shared = f", {count_text(choice.shared_layers, 'shared layer')}" if choice.shared_layers else ""
    lines = [
        (
            f"**{choice.system}: {where}{shared}; {facts.spare_gpus} spare GPUs; {format_bytes(facts.memory_bytes)} of a GPU's "
            f"{format_bytes(advice.question.gpu.memory_bytes)}.**"
        ),
        "",
        f"It is expected to train {_rate(advice, first)} {advice.question.unit} a second, "
        f"{_share(first, first.fault_free)} of its own fault-free throughput and "
        f"{_share(first, advice.best_fault_free)} of the best fault-free one"
        + (f", at {_cost(advice, first, price)} for a million {advice.question.unit}" if price is not None else "")
        + ".",
    ]
    if advice.alternatives:
        second = advice.alternatives[0]
        gap = 1 - second.runs.mean / first.runs.mean
        lines += ["", f"Next is {choice_name(second.choice)}, {gap:.2%} slower. {closeness(first, second)}"]
    return lines


def _layout_text(depths: Sequence[int]) -> str:
    """The pipelines in words: `45 pipelines of 82 stages and 5 of 81`."""
    (depth, number), *others = sorted(Counter(depths).items(), reverse=True)
    first = f"{count_text(number, 'pipeline')} of {count_text(depth, 'stage')}"
    return " and ".join([first, *(f"{number} of {depth}" for depth, number in others)])


def _microbatch_text(advice: Advice, choice: SystemChoice) -> str:
    samples = advice.question.model.microbatch
    if choice.system.startswith(CUTS_BY_ITSELF):
        return f"{choice.shape.num_chains:,} micro-batches of {samples} in all"
    return f"{choice.shape.num_microbatches} micro-batches of {samples} in each pipeline"


def closeness(first: FoundChoice, second: FoundChoice) -> str:
    """Whether the order of the first two is certain: they saw the same failures, so that seeds are compared one by one."""
    wins = sum(one > two for one, two in zip(first.runs.rates, second.runs.rates, strict=True))
    faster = f"The first choice is faster in {wins} of {len(first.runs.rates)} seeds"
    if second.runs.mean >= (1 - TIE) * first.runs.mean:
        return f"{faster}, but take this for a tie: estimates of op times are not as exact as that."
    return f"{faster}."


def _rate(advice: Advice, one: FoundChoice) -> str:
    each = advice.question.units_per_sample
    digits = 0 if one.runs.mean * each >= 1000 else 2
    return f"{one.runs.mean * each:,.{digits}f} ± {one.runs.half_width * each:,.{digits}f}"


def _cost(advice: Advice, one: FoundChoice, price: float | None) -> str:
    """The cost at the mean throughput, and half of its interval: cost and throughput have the same relative one."""
    cost = cost_per_million(advice.throughput(one), advice.question.num_gpus, price) if price is not None else None
    if cost is None:
        return "–"
    return f"{cost:,.4g} ± {cost * one.runs.half_width / one.runs.mean:.2g}"


def _share(one: FoundChoice, rate: float) -> str:
    """The throughput as a share of a fault-free one, and half of its interval over seeds."""
    return f"{one.runs.mean / rate:.2%} ± {one.runs.half_width / rate:.2%}"


def _shape_rows(advice: Advice, price: float | None) -> list[list[str]]:
    head = ["choice", "pipelines x stages", "tp", "micro-batches", "shared layers", "spare GPUs", "memory"]
    head.append(f"{advice.question.unit}/s (90 %)")
    rows = [[*head, "goodput", "of best fault-free", *(["cost/million"] if price is not None else [])]]
    return rows + [_shape_row(advice, one, price) for one in (advice.first, *advice.alternatives)]


def _shape_row(advice: Advice, one: FoundChoice, price: float | None) -> list[str]:
    choice, facts = one.choice, advice.facts[one.choice]
    return [
        choice.system,
        _layout(facts.depths),
        str(choice.tensor_parallel),
        _microbatches(choice),
        str(choice.shared_layers) if choice.system == ELASTIC else "–",
        str(facts.spare_gpus),
        format_bytes(facts.memory_bytes),
        *_result_cells(advice, one, price),
    ]


def _microbatches(choice: SystemChoice) -> str:
    """Micro-batches of each pipeline; a system that cuts the model by itself divides all of them as it likes."""
    if choice.system.startswith(CUTS_BY_ITSELF):
        return f"{choice.shape.num_chains} in all"
    return str(choice.shape.num_microbatches)


def _result_cells(advice: Advice, one: FoundChoice, price: float | None) -> list[str]:
    shares = [_share(one, one.fault_free), _share(one, advice.best_fault_free)]
    return [_rate(advice, one), *shares, *([_cost(advice, one, price)] if price is not None else [])]


def _layout(depths: Sequence[int]) -> str:
    """The pipelines of a choice; a system that cuts the model by itself may have pipelines of several depths."""
    counts = Counter(depths)
    return ", ".join(f"{number} x {depth}" for depth, number in sorted(counts.items(), reverse=True)) or "–"


def _system_rows(advice: Advice, price: float | None) -> list[list[str]]:
    head = ["system", "spares", "pipelines x stages", "tp", "spare GPUs", f"{advice.question.unit}/s (90 %)"]
    head += ["goodput", "of best fault-free"]
    rows = [[*head, *(["cost/million"] if price is not None else [])]]
    groups = sorted(advice.found.groups.items(), key=lambda item: (-(item[1].best.runs.mean if item[1].best else 0), item[0]))
    for (system, has_spares), group in groups:
        spares = "with" if has_spares else "without"
        if group.best is None:
            rows.append([system, spares, f"does not run: {group.problem}", *[""] * (len(rows[0]) - 3)])
            continue
        choice, facts = group.best.choice, advice.facts[group.best.choice]
        layout = [_layout(facts.depths), str(choice.tensor_parallel), str(facts.spare_gpus)]
        rows.append([system, spares, *layout, *_result_cells(advice, group.best, price)])
    return rows


def _unproven(advice: Advice) -> list[str]:
    """A line for each group whose best choice is not proven to be within the margin of the best."""
    lines = [
        f"- {system} {'with' if has_spares else 'without'} spares: not all shapes were excluded; one could be up to "
        f"{group.left:.1%} better by its bound"
        for (system, has_spares), group in advice.found.groups.items()
        if group.best is not None and not group.is_proven
    ]
    return [*lines, ""] if lines else []


def _threshold_rows(advice: Advice) -> list[list[str]]:
    rows = [["rival", "slower by", *_AXIS_NAMES.values()]]
    rivals = dict.fromkeys(one.rival for one in advice.sensitivity.crossings)
    for rival in rivals:
        own = {one.axis: one for one in advice.sensitivity.crossings if one.rival == rival}
        rows.append([choice_name(rival), f"{own[FAILURES].slower:.2%}", *(_threshold(advice, own[axis]) for axis in _AXIS_NAMES)])
    return rows


def _threshold(advice: Advice, one: Crossing) -> str:
    factors, tie = FACTORS[one.axis], "a tie; " if one.is_tie else ""
    if one.factor is None:
        return f"{tie}does not win between {min(factors):g} and {max(factors):g} times"
    return f"{tie}wins where " + threshold_text(
        one.axis, one.factor, advice.question, advice.first.choice.system, format_duration
    )


def _threshold_notes() -> str:
    return (
        "Found by simulating both choices with the seeds of the verdict and bisecting. Each cell changes one quantity and keeps "
        f"both choices as they are. A rival wins where it is more than {TIE:.1%} faster; a smaller difference is a tie."
    )


def _assumptions(advice: Advice) -> list[str]:
    question, found = advice.question, advice.found
    servers = (
        f"a server of {question.gpus_per_server} GPUs fails as a whole, once in {format_duration(question.mtbf_us)} on average"
    )
    back = f"is back after {format_duration(question.repair_us)}: {question.failures_per_day:.2g} failures a day"
    tokens = f" of {question.model.sequence:,} tokens" if question.model.sequence else ""
    batch = f"{question.batch:,} samples{tokens}, give or take {question.batch_tolerance:.1%}"
    asked = f"{found.num_asked:,} were asked for their step, {found.num_screened:,} simulated over few seeds"
    others = f"the others are worse by their upper bound, or better by less than {MARGIN:.1%}"
    is_measured = isinstance(question.model, MeasuredModel)
    costs = (
        "op times and memory are those of the profile"
        if is_measured
        else "op times and memory are estimates (`recycle estimate`)"
    )
    return [
        f"{servers}, and {back}",
        *([f"causes and repairs by {question.failures.name}: {question.failures.source}"] if question.failures else []),
        f"{question.days:g} days, {question.num_seeds} seeds, the same failures for every choice; intervals are 90 % of the mean",
        f"a step has {batch}",
        f"of {found.num_choices:,} choices that fit, {asked} and {len(found.ranked)} over all; {others}",
        f"{costs}, pauses are constants (docs/simulator.md)",
        f"{question.memory_reserve:.0%} of a GPU's memory are kept free, {format_bytes(question.planned_gpu.memory_bytes)} used",
        f"the samples of a micro-batch are those of the {'profile' if is_measured else 'text of the model'}",
        "goodput is the throughput over the system's own fault-free throughput in the same shape; all intervals are over seeds",
        "-zb: with a schedule without bubbles, which the authors of a system do not have; oobleck-zb has a formula and no plan",
    ]
