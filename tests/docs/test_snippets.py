"""Every command and snippet of the README and the site runs; a page is one session in an empty folder."""

import re
import shlex
from pathlib import Path

import pytest

from recycle.cli.main import make_parser
from tests.docs.snippets import ROOT, RUNNABLE, Directive, Session, blocks, commands, fits, is_plain, runnable

PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("examples/*.md"), *ROOT.glob("docs/**/*.md")])
}

# tests/examples runs this page as one script, without smaller numbers, and looks at what the model has learned.
RUN_AS_AN_EXAMPLE = "docs/guides/own-model.md"

# They train and plan for long. Other tests run the same commands, and other pages are quick.
LONG = {
    *(f"docs/guides/{name}.md" for name in ("advise", "data", "measure", "plan", "reports", "several-machines", "simulate")),
    *(f"docs/concepts/{name}.md" for name in ("cuts", "slow-workers")),
}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in LONG))
        for name, text in PAGES.items()
        if runnable(text) and name != RUN_AS_AN_EXAMPLE
    ],
)
def test_every_snippet_of_a_page_runs(page: str, tmp_path: Path) -> None:
    session = Session(tmp_path)
    try:
        for block in runnable(PAGES[page]):
            session.run(block)
        session.finish()
    finally:
        session.stop()


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_its_language(page: str) -> None:
    unnamed = [block.line for block in blocks(PAGES[page]) if not block.language]
    assert not unnamed, f"{page}: the blocks at lines {unnamed} name no language"


@pytest.mark.parametrize("page", PAGES)
def test_commands_that_are_not_run_are_commands(page: str) -> None:
    parser = make_parser()
    for block in blocks(PAGES[page]):
        if block.language in RUNNABLE and block.directive.reason:
            for line in block.text.replace("\\\n", " ").splitlines():
                words = shlex.split(line.removeprefix("$ "), comments=True)
                if words[:1] == ["recycle"]:
                    parser.parse_args(words[1:])


@pytest.mark.parametrize("page", PAGES)
def test_no_command_hides_in_a_block_that_is_not_run(page: str) -> None:
    for block in blocks(PAGES[page]):
        if block.language == "text":
            assert not re.search(r"^(\$ |recycle [a-z]+ -)", block.text, re.MULTILINE), f"{page}, line {block.line}"


def test_a_directive_is_read() -> None:
    assert Directive.parse("not run, because it takes an hour").reason == "it takes an hour"
    both = Directive.parse('in the background, 4 times; replace "a b" with "c"; "d" with ""')
    assert both == Directive(replacements=(("a b", "c"), ("d", "")), num_background=4)
    assert Directive.parse('continue the script above; replace "1" with "2"').continues


@pytest.mark.parametrize("text", ["not run", "replace a with b", 'replace "a" by "b"', "later", 'in the background, "4" times'])
def test_an_unknown_directive_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"directive|list of"):
        Directive.parse(text)


def test_a_replacement_of_something_else_is_refused() -> None:
    page = '<!-- test: replace "--steps 9" with "--steps 1" -->\n```bash\nrecycle train --steps 8\n```\n'
    with pytest.raises(ValueError, match="which the block does not have"):
        runnable(page)[0].shrunk  # noqa: B018


def test_a_replacement_sees_a_command_on_one_line() -> None:
    page = '<!-- test: replace "--steps 9 --exact" with "--exact" -->\n```bash\nrecycle train --steps 9 \\\n    --exact\n```\n'
    assert runnable(page)[0].shrunk == "recycle train --exact\n"


def test_lines_that_continue_a_script_go_under_its_guard() -> None:
    page = (
        "```python\nif True:\n    a = 1\n```\ntext\n<!-- test: continue the script above -->\n```python\nb = a\n\nprint(b)\n```\n"
    )
    (script,) = runnable(page)
    assert script.text == "if True:\n    a = 1\n\n    b = a\n\n    print(b)\n"


def test_only_a_recycle_command_without_shell_syntax_runs_without_a_shell() -> None:
    assert all(map(is_plain, ["recycle check plan.json", "recycle train --json > one.json"]))
    shell = [
        "ls",
        "recycle show a | head",
        "recycle show *.json",
        "recycle show $PLAN",
        "recycle a && recycle b",
        "recycle a > b > c",
    ]
    assert not any(map(is_plain, shell))


def test_output_is_compared_where_it_is_shown() -> None:
    assert commands("$ one two\nout\n$ three\n") == [("one two", ["out"]), ("three", [])]
    assert fits(["period 27 µs", "..."], "period 27 µs\nmade in 3 s\n")
    assert fits(["made in ... s"], "made in 3.1 s \n")
    assert not fits(["period 27 µs", "..."], "period 28 µs\n")
    assert not fits(["period 27 µs"], "period 27 µs\nand more\n")
