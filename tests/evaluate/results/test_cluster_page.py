"""The page of a measurement says how even the cores were, if that was measured."""

import json
import shutil

from recycle.evaluate.hardware.evaluation_folder import read_setup
from recycle.evaluate.hardware.variants import chosen_variants
from recycle.evaluate.results.cluster_page import write_results
from tests.evaluate.results.published_pages import RESULTS


def test_the_page_says_how_even_the_cores_were_after_each_turn(tmp_path):
    folder = shutil.copytree(RESULTS / "elastic-cores", tmp_path / "measured")
    setup = read_setup(folder)
    shown, *others = chosen_variants(setup, "all,rerouted,cut,slow-cut")
    rows = [json.loads(line) for line in (folder / "measured.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if row["round"] < 2]
    evenness = {(0, shown.name): 0.96, (1, shown.name): 0.6} | {
        (number, other.name): 0.1 for number in (0, 1) for other in others
    }

    def page(broken_off, found):
        told = [row | {"evenness": found.get((row["round"], row["variant"]))} for row in rows] + broken_off
        (folder / "measured.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told), encoding="utf-8")
        return write_results(folder, setup, [shown])

    assert "core of its own" not in page([], {})
    says = (
        "The speeds of the workers' cores were measured after 2 turns, each worker with a core of its own. The slowest core had "
        "78% of the highest speed at the median, and 60% at worst. A turn with less than 75% is done once more, and the one on "
        "the more even cores counts; 1 of these 2 had less both times."
    )
    assert says in page([rows[0] | {"round": 2, "evenness": 0.2}], evenness)
