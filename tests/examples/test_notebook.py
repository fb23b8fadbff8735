"""The example notebook runs in a Jupyter kernel, as its reader runs it; a shorter test runs its cells without a kernel."""

import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
TRAINS = "trained = recycle.train("


@pytest.fixture
def executed(tmp_path, monkeypatch):
    """The code cells after a run in a kernel, in a folder of its own. The cell that trains is there twice."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    trains = next(number for number, cell in enumerate(notebook.cells) if TRAINS in cell.source)
    notebook.cells.insert(trains + 1, nbformat.v4.new_code_cell(notebook.cells[trains].source))
    (tmp_path / "work").mkdir()
    resources = {"metadata": {"path": str(tmp_path / "work")}}
    nbclient.NotebookClient(notebook, timeout=200, kernel_name="python3", resources=resources).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell):
    """What a cell printed on the output stream."""
    return "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")


def shown(cell):
    """The lines of progress, which a notebook shows as they come."""
    return [output.data["text/plain"] for output in cell.outputs if output.output_type == "display_data"]


def losses(cell):
    return list(map(float, re.search(r"loss (\S+) at first, (\S+) at last", printed(cell)).groups()))


def test_the_notebook_trains_in_a_kernel_twice_and_shows_how_far_it_is(executed, tmp_path):
    assert [output for cell in executed for output in cell.outputs if output.output_type == "error"] == []
    trained = [cell for cell in executed if TRAINS in cell.source]
    for number, cell in enumerate(trained, 1):
        first, last = losses(cell)
        assert last < 0.8 * first
        lines = shown(cell)
        assert lines[0].startswith(f"the run is recorded in runs/waves-{number}: ")
        tenths = [match[1] for line in lines if (match := re.match(r"step (\d+) of 30  loss ", line))]
        assert tenths == [str(step) for step in range(3, 31, 3)]
        assert (tmp_path / "work" / "runs" / f"waves-{number}" / "record.jsonl").exists()
    assert losses(trained[0]) == pytest.approx(losses(trained[1]), abs=0.01)
    assert re.fullmatch(r"wave \S+, model \S+\n", printed(executed[-1]))
    assert [output for cell in executed for output in cell.outputs if output.get("name") == "stderr"] == []
