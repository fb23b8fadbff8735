"""The site builds without a warning: every link, every anchor and every name of the Python interface is there.

It is one test, because several would each build the site on a process of their own.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import recycle
from recycle.cli.main import make_parser
from recycle.core import errors
from tests.docs.snippets import ROOT

LOADED = re.compile(
    r'<(?:script|img|iframe)[^>]+src="?(https?:[^" >]+)|<link[^>]+rel="?(?:stylesheet|preconnect)[^>]+href="?(https?:[^" >]+)'
)


@pytest.mark.slow
def test_the_site_builds_whole_and_by_itself(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert built.returncode == 0, built.stderr
    pages = {path.relative_to(tmp_path).as_posix(): path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")}
    problems = [
        *(f"{name}: {problem}" for name, text in pages.items() for problem in foreign(text)),
        *missing_names(pages["reference/python.html"]),
        *missing_commands(pages["reference/cli.html"]),
        *missing_codes(pages["reference/exit-codes.html"]),
    ]
    assert problems == []


def foreign(text: str) -> Iterator[str]:
    """What belongs to this machine, to another host, or to the tests."""
    yield from (f"shows {path}" for path in (str(ROOT), sys.prefix) if path in text)
    yield from (f"loads {found}" for found in LOADED.findall(text))
    yield from (f"shows {mark}" for mark in ("<!-- test:", "<!-- generated:") if mark in text)


def missing_names(text: str) -> list[str]:
    return [name for name in recycle.__all__ if not re.search(rf'<h2[^>]* id="?recycle\.{name}["\s>]', text)]


def missing_commands(text: str) -> list[str]:
    actions = make_parser()._actions
    names = [name for action in actions if isinstance(action, argparse._SubParsersAction) for name in action.choices]
    assert "train" in names
    return [name for name in names if f"usage: recycle {name}" not in text]


def missing_codes(text: str) -> list[int]:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.UserError)]
    return [kind.exit_code for kind in kinds if f">{kind.exit_code}</td>" not in text]
