"""Functions and classes of `__main__`, of functions and of notebook cells reach the workers; scripts need no guard."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from recycle.host.by_value import ByValue, dumps_by_value, without_script

pytest.importorskip("cloudpickle")
pytestmark = pytest.mark.timeout(240)
ROOT = Path(__file__).parents[2]

SCRIPT = """
import torch
from torch import nn
import recycle

SCALE = 0.5
print("this line runs once")

def run():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x) * SCALE

    class Points:
        def __len__(self):
            return 64

        def __getitem__(self, number):
            return torch.full((4,), number / 64), torch.ones(4)

    torch.manual_seed(0)
    stages = [Inner(), nn.Sequential(Inner(), Inner())]
    loss, optimizer = lambda made, targets: (made - targets).square().mean(), lambda parameters: torch.optim.SGD(parameters, 0.1)
    options = recycle.TrainOptions(schedule=lambda iteration: 0.9**iteration, quiet=True)
    return recycle.train((2, 2, 2), stages, Points(), loss, optimizer, steps=3, samples=2, out=None, options=options)

print("steps", len(run().losses))
"""


def run(arguments, folder, **options):
    """Run Python in a folder, and return what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    made = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        **options,
    )
    assert made.returncode == 0, made.stderr
    return made


def test_a_script_without_a_guard_trains_what_it_defines_in_functions(tmp_path):
    (tmp_path / "mine.py").write_text(SCRIPT, encoding="utf-8")
    assert run(["mine.py"], tmp_path).stdout == "this line runs once\nsteps 3\n"


def test_the_cells_of_the_notebook_run_one_after_the_other(tmp_path):
    notebook = json.loads((ROOT / "examples" / "notebook.ipynb").read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) == 4
    # As in a kernel, there is no file of which the functions are.
    made = run(["-c", f"for cell in {cells!r}:\n    exec(compile(cell, '<cell>', 'exec'), globals())"], tmp_path)
    first, last = map(float, re.search(r"loss (\S+) at first, (\S+) at last", made.stdout).groups())
    assert last < 0.8 * first
    assert re.search(r"^wave \S+, model \S+$", made.stdout, re.MULTILINE)
    assert "step 30 of 30" in made.stderr
    assert (tmp_path / "runs" / "waves-1" / "record.jsonl").exists()


def test_a_value_arrives_as_itself_and_the_script_is_hidden_only_inside(monkeypatch):
    import pickle

    inner = pickle.loads(pickle.dumps(ByValue(lambda x: x + 1)))
    assert inner(2) == 3
    assert pickle.loads(dumps_by_value({"a": 1})) == {"a": 1}
    main = sys.modules["__main__"]
    before = main.__dict__.get("__file__"), main.__spec__
    with without_script():
        assert not hasattr(main, "__file__")
        assert main.__spec__ is None
    assert (main.__dict__.get("__file__"), main.__spec__) == before
