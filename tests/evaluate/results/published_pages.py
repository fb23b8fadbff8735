"""The measurements and predictions behind the pages of docs/results."""

import json
from pathlib import Path

from recycle.evaluate.hardware.evaluation_folder import read_setup
from recycle.evaluate.hardware.race import read_trials
from recycle.evaluate.hardware.variants import variants
from recycle.evaluate.results.cluster_page import complete_rounds
from recycle.evaluate.results.cluster_tables import VariantResult
from recycle.sim.replay.expected_iteration import ExpectedIteration

RESULTS = Path(__file__).parents[3] / "docs/results"


def shown(folder):
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def lines(folder):
    """The measured variants with the published predictions, because predicting again takes long."""
    setup, trials = read_setup(folder), complete_rounds(list(read_trials(folder)))
    titles = {variant.name: variant for variant in variants(setup)}
    made = []
    for line in shown(folder)["variants"]:
        variant, own = titles[line["name"]], [trial for trial in trials if trial.variant == line["name"]]
        predictions = {int(number): ExpectedIteration(**found) for number, found in line["predictions"].items()}
        times_us = {trial.round: trial.iterations_us for trial in own}
        beforehand = ExpectedIteration(**line["beforehand"]) if line["beforehand"] else None
        samples = variant.num_samples(setup)
        losses = {trial.round: trial.losses for trial in own}
        made.append(VariantResult(variant.name, variant.title, variant.dead, times_us, samples, losses, predictions, beforehand))
    return made
