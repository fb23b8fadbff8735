"""The page of a measurement says how even the cores were, if that was measured."""

import json
import shutil

from recycle.evaluate.hardware.evaluation_folder import read_setup
from recycle.evaluate.hardware.variants import chosen_variants
from recycle.evaluate.results.cluster_page import write_results
from tests.evaluate.results.published_pages import RESULTS

FOUND = [0.95, 0.98, 0.91, 0.7, 0.97, 0.93, 0.6, 0.96]
BROKEN_OFF = [0.1, 0.1]  # turns of a round that is not whole
SAYS = (
    "After a turn the slowest of these cores had 94% of the highest speed at the median, and 60% at worst. A turn with less than "
    "75% is done once more, and the better one counts: 2 of 8 were below that both times."
)


def test_the_page_says_how_even_the_cores_were_after_each_turn(tmp_path):
    folder = shutil.copytree(RESULTS / "elastic-cores", tmp_path / "measured")
    rows = [json.loads(line) for line in (folder / "measured.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [row | {"evenness": share} for row, share in zip(rows, FOUND + BROKEN_OFF, strict=True)]
    (folder / "measured.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    setup = read_setup(folder)
    assert "a core of its own" not in (folder / "results.md").read_text(encoding="utf-8")  # it was not measured then
    assert SAYS in write_results(folder, setup, chosen_variants(setup, "all"))  # the variant with a picture is not among them
