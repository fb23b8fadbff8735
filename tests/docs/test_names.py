"""What the documents name is there: code of the glossary, files and links, and the table of packages."""

import re
from importlib import import_module
from pathlib import Path

import pytest

import recycle
from tests.docs.snippets import ROOT
from tests.test_layers import TABLE

SOURCE = Path(recycle.__file__).parent
GLOSSARY = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
ROWS = [line.strip("| ").split(" | ") for line in GLOSSARY.splitlines() if line.startswith("| **")]
LINKED = [*ROOT.glob("*.md"), *ROOT.glob("examples/*.md")]
DOCUMENTS = sorted([*LINKED, *(path for path in ROOT.glob("docs/**/*.md") if not path.name[0].isdigit())])


def exists(name: str) -> bool:
    """Whether `name` is a module below the package, or something at the top level of one."""
    module, _, last = name.rpartition(".")
    try:
        return hasattr(import_module(f"recycle.{module}"), last) or bool(import_module(f"recycle.{name}"))
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize(("word", "code"), [(row[0], row[-1]) for row in ROWS], ids=[row[0] for row in ROWS])
def test_the_code_of_a_term_exists(word: str, code: str) -> None:
    names = re.findall(r"`([^`]+)`", code)
    assert names, f"{word} names no code"
    assert [name for name in names if not exists(name)] == []


def test_a_term_has_one_meaning() -> None:
    words = [word for row in ROWS for word in re.findall(r"\*\*(.+?)\*\*", row[0])]
    assert len(words) == len(set(words)) > 80


def test_a_name_that_is_not_there_is_found() -> None:
    assert exists("core.cluster.Worker")
    assert exists("core.events.record")
    assert not exists("core.cluster.Seat")
    assert not exists("core.furniture")


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_links_of_the_pages_at_the_root_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not link.startswith("http") and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_source_files_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"`(?:src/recycle/)?((?:[a-z_]+/)+(?:[a-z_]+\.py)?)`", page.read_text(encoding="utf-8"))
    ours = [name for name in named if name.split("/")[0] in TABLE]
    assert [name for name in ours if not (SOURCE / name).exists()] == []
    others = [name for name in named if name.split("/")[0] in ("tests", "benchmarks", "docs", "examples")]
    assert [name for name in others if not (ROOT / name).exists()] == []


def test_the_architecture_has_the_table_of_packages() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if re.match(r"\| `[a-z]+` \|", line)]
    found = {name.strip("`"): (ours, outside) for name, _, ours, outside in rows}
    assert set(found) == {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    for name, (ours, outside) in found.items():
        if name != "cli":
            assert set(ours.replace("–", "").split(", ")) - {""} == TABLE[name][0], name
            assert set(outside.replace("none", "").split(", ")) - {""} == TABLE[name][1], name


def test_the_tests_that_the_page_on_failures_names_exist() -> None:
    page = (ROOT / "docs" / "concepts" / "failures.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", page)
    assert len(named) > 15
    for file, name in named:
        assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(encoding="utf-8"), re.MULTILINE), f"{file}::{name}"
