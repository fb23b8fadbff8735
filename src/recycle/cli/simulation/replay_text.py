"""Texts of `recycle replay`: the JSON object, the summary, and the subtitle of a picture."""

from typing import Any

from recycle.core.time_shares import TimeShares, bubble_share
from recycle.core.units import format_bytes, format_us
from recycle.sim.replay.critical_path import CriticalPath, critical_path
from recycle.sim.replay.replay import Conditions
from recycle.sim.replay.replay_result import ReplayResult
from recycle.sim.replay.time_shares import memory_curve, peak_memory, time_shares

MOST_OPS = 50
_MOST_WORKERS = 16
_MOST_CURVES = 16
_CURVE_COLUMNS = 48
_PARTS = ("busy", "bubble", "reduce", "optimizer", "span")
_LEVELS = " ▁▂▃▄▅▆▇█"
_NAMES = {"F": "F", "B": "B", "I": "I", "W": "W", "transfer": "transfers", "reduce": "reduction", "optimizer": "step"}
_NAMES["wait"] = "waits for the planned start"


def replay_facts(result: ReplayResult, eager: ReplayResult, conditions: Conditions) -> dict[str, Any]:
    """The JSON object of `--json`; times in µs, shares of 1."""
    iteration = result.steady_iteration
    unit, peaks = peak_memory(result)
    shares = time_shares(result)
    return {
        "plan_period": result.plan.period_us,
        "period": _number(result.steady_period_us),
        "periods": result.periods_us,
        "eager_period": _number(eager.steady_period_us),
        "makespan": result.makespan_us(iteration),
        "bubble_share": {
            "mean": round(bubble_share(shares), 6),
            "workers": {str(share.worker): round(share.bubble, 6) for share in shares},
        },
        "time": {str(share.worker): {part: getattr(share, f"{part}_us") for part in _PARTS} for share in shares},
        "peak_memory": {"unit": unit, "stages": peaks},
        "critical_path": _path_facts(critical_path(result, iteration)),
        "iterations": result.num_iterations,
        "steady_iteration": iteration,
        "num_ops": result.graph.num_ops,
        "conditions": {
            "jitter": conditions.jitter,
            "slow": {str(worker): factor for worker, factor in sorted(conditions.slow.items())},
            "contention": conditions.contention,
            "eager": conditions.eager,
            "seed": conditions.seed,
        },
    }


def _path_facts(path: CriticalPath) -> dict[str, Any]:
    ops = [segment for segment in path.segments if segment.worker is not None]
    return {
        "iteration": path.iteration,
        "length": path.length_us,
        "by_kind": path.by_kind,
        "workers": [str(worker) for worker in path.workers],
        "num_ops": len(ops),
        "ops": [
            {"op": segment.label, "worker": str(segment.worker), "start": segment.start_us, "end": segment.end_us}
            for segment in ops[:MOST_OPS]
        ],
    }


def _number(value: float) -> int | float:
    return int(value) if value == int(value) else round(value, 3)


def replay_summary(result: ReplayResult, eager: ReplayResult, conditions: Conditions) -> list[str]:
    periods, plan = result.periods_us, result.plan
    makespan = format_us(result.makespan_us(result.steady_iteration))
    shown = ", ".join(map(str, periods[:12])) + (f" and {len(periods) - 12} more" if len(periods) > 12 else "")
    lines = [
        f"replayed  {len(periods)} iteration{'s' * (len(periods) > 1)} of {result.graph.num_ops:,} ops; {_noise(conditions)}",
        f"period    {_against(result.steady_period_us, plan.period_us)}; by iteration {shown} µs",
        f"eager     {_against(eager.steady_period_us, plan.period_us)}, where the order of each row alone decides",
        f"makespan  {makespan}  (from the first op to the last step of one iteration)",
        *_time_lines(time_shares(result)),
        *_memory_lines(result),
        *_path_lines(critical_path(result, result.steady_iteration)),
    ]
    return lines if not conditions.eager else [line for line in lines if not line.startswith("eager ")]


def _noise(conditions: Conditions) -> str:
    clauses = [f"jitter {100 * conditions.jitter:g}% (seed {conditions.seed})"] if conditions.jitter else []
    clauses += [f"{worker} takes {factor:g} times as long" for worker, factor in sorted(conditions.slow.items())]
    clauses += ["messages share links"] if conditions.contention else []
    clauses += ["row order alone decides" if conditions.eager else "no op before its planned start"]
    return ", ".join(clauses)


def _against(period_us: float, planned_us: int) -> str:
    text = format_us(round(period_us)) if period_us >= 1000 else f"{_number(period_us)} µs"
    if period_us == planned_us:
        return f"{text}, exactly as planned"
    side = "over" if period_us > planned_us else "under"
    return f"{text}, {abs(period_us / planned_us - 1):.2%} {side} the {format_us(planned_us)} planned"


def _time_lines(shares: list[TimeShares]) -> list[str]:
    span = sum(share.span_us for share in shares)
    finish = sum(share.reduce_us + share.optimizer_us for share in shares)
    busy = sum(share.busy_us for share in shares)
    ordered = sorted(shares, key=lambda share: (share.bubble, share.worker))
    least, most = (f"{share.bubble:.1%} ({share.worker})" for share in (ordered[0], ordered[-1]))
    mean = f"busy {busy / span:.1%}, bubble {bubble_share(shares):.1%}, reduction and step {finish / span:.1%}"
    lines = [f"workers   {mean}; bubbles from {least} to {most}"]
    if len(shares) <= _MOST_WORKERS:
        cells = [f"{share.worker} {share.bubble:.1%}" for share in shares]
        lines.append(f"          {'  '.join(cells)}")
    return lines


def _memory_lines(result: ReplayResult) -> list[str]:
    unit, peaks = peak_memory(result)
    texts = [format_bytes(peak) for peak in peaks] if unit == "bytes" else [str(peak) for peak in peaks]
    names = {"bytes": "bytes of the fullest worker", "layers": "layers of micro-batches in the fullest worker"}
    what = names.get(unit, "micro-batches in the fullest worker")
    if len(peaks) > _MOST_CURVES:
        return [f"memory    at most {texts[peaks.index(max(peaks))]} (stage {peaks.index(max(peaks))}), {what} of a stage"]
    width = max(map(len, texts))
    lines = [f"memory    {what} of each stage: the peak, and its curve over an iteration"]
    for stage, (text, peak) in enumerate(zip(texts, peaks, strict=True)):
        curve = memory_curve(result, stage, result.steady_iteration, _CURVE_COLUMNS)
        bars = "".join(_LEVELS[value * (len(_LEVELS) - 1) // max(1, peak)] for value in curve)
        lines.append(f"          stage {stage:<3} {text:>{width}}  {bars}".rstrip())
    return lines


def _path_lines(path: CriticalPath) -> list[str]:
    shares_of = ", ".join(f"{_NAMES[kind]} {time / path.length_us:.1%}" for kind, time in path.by_kind.items())
    ops = [segment.label for segment in path.segments if segment.worker is not None]
    names = [str(worker) for worker in path.workers]
    return [
        f"critical  path of iteration {path.iteration}: {format_us(path.length_us)}; {shares_of}",
        f"          {len(ops)} ops: {_some(ops, 4)}; on {len(names)} worker{'s' * (len(names) > 1)}: {_some(names, 6)}",
    ]


def _some(texts: list[str], num: int) -> str:
    """The first and the last `num` of a long list."""
    return ", ".join(texts) if len(texts) <= 2 * num else f"{', '.join(texts[:num])} … {', '.join(texts[-num:])}"


def replay_subtitle(result: ReplayResult) -> tuple[str, ...]:
    return (
        f"iteration {result.steady_iteration} of {result.num_iterations} as replayed",
        f"period {_against(result.steady_period_us, result.plan.period_us)}",
        f"workers in bubbles {bubble_share(time_shares(result)):.0%}",
    )
