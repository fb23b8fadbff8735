"""All parts of `recycle bench cluster` in order: profile, plan, race, deaths, report. Finished parts are not repeated."""

from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path

from recycle.core.errors import UserError
from recycle.core.profile import Profile
from recycle.evaluate.hardware.evaluation_folder import PROFILE, Say, begin_evaluation, hardware, measure_part
from recycle.evaluate.hardware.measurement_size import MeasurementSize
from recycle.evaluate.hardware.setup import CPU_CORES, ELASTIC, Setup
from recycle.evaluate.hardware.variants import Variant
from recycle.evaluate.results.cluster_page import PICTURE, RESULTS, write_results
from recycle.evaluate.variant_plans import make_plans
from recycle.profiling.machine import num_cores
from recycle.profiling.worker_pool import any_core
from recycle.report.record.contention_text import oversubscription_note


def run_cluster_benchmark(
    folder: Path, setup: Setup, parts: Collection[str], size: MeasurementSize, say: Say, variants: list[Variant]
) -> str | None:
    """Run these parts in their order, for these variants; return the page of results if the part report is among them."""
    if "profile" not in parts and {"plan", "report"} & set(parts) and not (folder / PROFILE).exists():
        raise UserError(f"there is no profile in {folder} to plan from or to report on: run the part profile first")
    begin_evaluation(folder, setup)
    if setup.study == ELASTIC:  # it compares steady throughput
        parts = [part for part in parts if part != "deaths"]
    measured = {"profile", "race", "deaths"} & set(parts)
    with hardware(setup) if measured else nullcontext(any_core) as choose_cores:
        if "race" in parts and setup.backend == CPU_CORES and (note := oversubscription_note(setup.num_workers, num_cores())):
            say(note)
        for part in ("profile", "plan", "race", "deaths"):
            if part in measured:
                measure_part(part, folder, setup, size, say, variants, choose_cores)
            elif part in parts:
                make_plans(folder, setup, variants, Profile.load(folder / PROFILE), say)
    if "report" not in parts:
        return None
    page = write_results(folder, setup, variants)
    say(f"wrote {folder / RESULTS}.md and {folder / PICTURE}")
    return page
