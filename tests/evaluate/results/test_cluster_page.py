"""The page of a measurement says what its workers ran on, and is made of any variants that were measured."""

import shutil

import pytest

from recycle.evaluate.hardware.evaluation_folder import read_setup
from recycle.evaluate.hardware.variants import chosen_variants
from recycle.evaluate.results.cluster_page import write_results
from tests.evaluate.results.published_pages import RESULTS


@pytest.mark.parametrize(
    ("folder", "says"),
    [
        ("elastic-paced-6", "an op takes 2.2% longer than this pace at the median over stages and kinds, and 3.3% at most"),
        ("elastic-emulated-6", "Ops are computed for real, by a model that is too small to matter"),
        ("elastic-cores-6", "## Contention told apart"),
    ],
)
def test_the_page_says_what_the_workers_ran_on_also_without_the_variant_of_the_picture(tmp_path, folder, says):
    copied = shutil.copytree(RESULTS / folder, tmp_path / "measured")
    setup = read_setup(copied)
    page = write_results(copied, setup, chosen_variants(setup, "all"))
    assert says in page
    assert "one dead" not in page
