"""The pages of docs/results, as the numbers that they were made from."""

import json
from pathlib import Path

from recycle.evaluate.hardware.evaluation_folder import read_setup
from recycle.evaluate.hardware.race import read_trials
from recycle.evaluate.hardware.variants import variants
from recycle.evaluate.results.cluster_page import whole_rounds
from recycle.evaluate.results.cluster_tables import Line, Prediction

RESULTS = Path(__file__).parents[3] / "docs/results"


def shown(folder):
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def lines(folder):
    """The variants as they were measured, with the predictions that are shown: making them again takes a while."""
    setup, heats = read_setup(folder), whole_rounds(list(read_trials(folder)))
    titles = {variant.name: variant for variant in variants(setup)}
    made = []
    for line in shown(folder)["lines"]:
        variant, own = titles[line["name"]], [heat for heat in heats if heat.variant == line["name"]]
        predictions = {int(number): Prediction(**told) for number, told in line["predictions"].items()}
        times_us = {heat.round: heat.iterations_us for heat in own}
        beforehand = Prediction(**line["beforehand"]) if line["beforehand"] else None
        samples = variant.num_samples(setup)
        losses = {heat.round: heat.losses for heat in own}
        made.append(Line(variant.name, variant.title, variant.dead, times_us, samples, losses, predictions, beforehand))
    return made
