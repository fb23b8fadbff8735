"""What is asked of elastic cuts on a measured cluster: what they keep, and how much more than re-routing."""

from collections.abc import Iterator, Mapping

from recycle.evaluate.hardware.setup import CPU_CORES, EMULATED, GPU_SLICES, PACED_CORES, Setup
from recycle.evaluate.hardware.variants import CUT, FAULT_FREE, REROUTED, SLOW_CUT
from recycle.evaluate.results.cluster_tables import FULL, PREDICTION_STEPS, Requirement, VariantResult, share_text

_LEAST_KEPT, _LEAST_SLOW = 0.88, 0.92
_MANY = 24
"""So many micro-batches leave few bubbles: there re-routing has no room to hide the work of a dead worker."""
_LEAST_OVER_REROUTING = {CPU_CORES: 1.2, PACED_CORES: 1.2, GPU_SLICES: 1.1, EMULATED: 1.2}


def elastic_requirements(by_name: Mapping[str, VariantResult], setup: Setup) -> Iterator[Requirement]:
    """Check what was asked, for the variants that were measured."""
    base = by_name[FAULT_FREE]
    for name, what, least in (
        (CUT, "one dead, cut, of nobody dead", _LEAST_KEPT),
        (SLOW_CUT, "one slow, cut, of nobody slow", _LEAST_SLOW),
    ):
        if name in by_name:
            share = by_name[name].share_of(base)
            yield Requirement(what, f"≥ {least:.0%}", share_text(by_name[name], base), share >= least)
    if {CUT, REROUTED} <= set(by_name) and setup.microbatches >= _MANY:
        cut, rerouted, least = by_name[CUT], by_name[REROUTED], _LEAST_OVER_REROUTING[setup.backend]
        yield Requirement(
            "one dead, cut over re-routed", f"≥ {least:.0%}", share_text(cut, rerouted), cut.share_of(rerouted) >= least
        )


def without_contention(by_name: Mapping[str, VariantResult]) -> list[list[str]]:
    """What each variant keeps as measured, as predicted, and as it would on machines of their own, without contention."""
    links = PREDICTION_STEPS["+ links"]
    base = by_name[FAULT_FREE]
    rows = [
        [
            result.title,
            f"{result.share_of(base):.1%}",
            f"{base.predicted_us(FULL) / result.predicted_us(FULL):.1%}",
            f"{base.predicted_us(links) / result.predicted_us(links):.1%}",
        ]
        for result in by_name.values()
        if result.is_predicted
    ]
    return [["variant", "kept", "predicted", "predicted without contention"], *rows]
