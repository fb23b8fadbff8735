"""Run `recycle` commands inside the test process, and look at how they end."""

import contextlib
import io
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from recycle.cli.main import main


@dataclass(frozen=True)
class Ended:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str

    @property
    def facts(self) -> dict[str, Any]:
        """Its JSON, by the letter of the standard: NaN is none."""
        assert self.code == 0, self.err
        assert self.out.count("\n") == 1
        facts: dict[str, Any] = json.loads(self.out, parse_constant=pytest.fail)
        return facts


def run(command: str) -> Ended:
    """Run `recycle <command>` in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(shlex.split(command))
        except SystemExit as stop:  # argparse leaves this way
            code = int(stop.code or 0)
        except BaseException as problem:  # a time limit too: how far did it come?
            problem.add_note(err.getvalue())
            raise
    return Ended(code, out.getvalue(), err.getvalue())


def output_of(command: str) -> str:
    """The output of `recycle <command>`, which must succeed without a word on standard error."""
    ended = run(command)
    assert (ended.code, ended.err) == (0, "")
    return ended.out


def refusal(command: str, code: int = 2) -> str:
    """The one sentence with which `recycle <command>` ends, having printed and written nothing else."""
    before = _files()
    ended = run(command)
    assert (ended.code, ended.out) == (code, ""), ended.err
    assert re.fullmatch(r"recycle( \w+)*: \S[^\n]*\n", ended.err), ended.err
    assert _files() == before
    return ended.err.rstrip("\n")


def _files() -> list[Path]:
    """The files of a test's own working folder; in the repository other tests write meanwhile."""
    return [] if Path("pyproject.toml").exists() else sorted(Path.cwd().rglob("*"))
