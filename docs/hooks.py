"""Hooks of the site: pages made from root files, and the parts of the reference that are made from the code.

A page says where a generated part goes with a comment such as `<!-- generated: exit codes -->`.
"""

import argparse
import ast
import inspect
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

from mkdocs.structure.files import File, Files

import recycle
from recycle.cli.main import make_parser
from recycle.control.decide.phases import TRANSITIONS
from recycle.core import errors
from recycle.core.events import record

ROOT = Path(__file__).resolve().parents[1]
HELP_COLUMNS = 100
# Files at the root of the repository that are pages of the site, and where the site has them.
ROOT_PAGES = {"CONTRIBUTING.md": "contributing/index.md", "CHANGELOG.md": "contributing/changelog.md"}
_MARK = re.compile(r"<!-- generated: (.+?) -->")
_TEST_DIRECTIVE = re.compile(r"^<!-- test: .*?-->\n", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are files at the root of the repository, with their links as seen from the page."""
    for name, page in ROOT_PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=moved_links(text)))
    return files


def moved_links(text: str) -> str:
    """`text` of a file at the root, with links that hold from docs/contributing/."""
    for name, page in ROOT_PAGES.items():
        text = text.replace(f"]({name})", f"]({Path(page).name})")
    # Files that the site does not have stay as their names.
    text = re.sub(r"\[([^\]]+)\]\((?:LICENSE|README\.md|examples/[^)]*)\)", r"\1", text)
    return text.replace("](docs/", "](../")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in the generated parts, and leave out the directives for the test that runs the snippets."""
    return _MARK.sub(lambda mark: GENERATED[mark.group(1)](), _TEST_DIRECTIVE.sub("", markdown))


def commands() -> str:
    """The help of every command, as the parser prints it."""
    os.environ["COLUMNS"] = str(HELP_COLUMNS)
    lines = []
    for name, parser in parsers(make_parser()):
        lines += [f"## {name}", "", "```text", parser.format_help().rstrip(), "```", ""]
    return "\n".join(lines)


def parsers(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every parser by its command, the given one first."""
    yield parser.prog, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from parsers(child)


def configuration() -> str:
    """Every section of the configuration with its keys, from the flags of `recycle train`."""
    train = dict(parsers(make_parser()))["recycle train"]
    lines = []
    for group in train._action_groups:
        if not (group.title or "").startswith("["):
            continue
        lines += [f"## {group.title}", "", f"{group.description}", "", "| key | value | what it is |", "|---|---|---|"]
        for action in group._group_actions:
            key = action.option_strings[0].removeprefix("--").replace("-", "_")
            value = action.metavar or "true, false"
            lines.append(f"| `{key}` | `{str(value).replace('|', '`, `')}` | {(action.help or '').replace('%%', '%')} |")
        lines.append("")
    return "\n".join(lines)


def exit_codes() -> str:
    """The exit code of every kind of user error."""
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.UserError)]
    own = sorted((kind for kind in kinds if "exit_code" in vars(kind)), key=lambda kind: kind.exit_code)
    lines = ["| code | exception | meaning |", "|---:|---|---|"]
    return "\n".join([*lines, *(f"| {kind.exit_code} | `{kind.__name__}` | {first_sentence(kind)} |" for kind in own)])


def record_events() -> str:
    """Every event of a record with its fields."""
    lines = ["| event | meaning | fields |", "|---|---|---|"]
    for kind in get_args(record.Event):
        names = ", ".join(f"`{name}`" for name in kind.__struct_fields__)
        lines.append(f"| `{record.name_of(kind)}` | {first_sentence(kind)} | {names} |")
    return "\n".join(lines)


def phases() -> str:
    """The transitions between the phases of the coordinator."""
    lines = ["| phase | trigger | next phase | reason |", "|---|---|---|---|"]
    for phase, transitions in TRANSITIONS.items():
        lines += [f"| {phase} | {trigger} | {after.phase} | {after.reason} |" for trigger, after in transitions.items()]
    return "\n".join(lines)


def public_names() -> str:
    """An entry of the API reference for every name of `recycle.__all__`."""
    return "\n\n".join(f"::: recycle.{name}" for name in sorted(recycle.__all__, key=str.lower))


def modules() -> str:
    """Every package with its modules, each with the first line of its docstring."""
    source = Path(recycle.__file__).parent
    lines = []
    for package in sorted(path.parent for path in source.glob("*/__init__.py")):
        lines += [f"### {package.name}", "", first_line(package / "__init__.py"), "", "| file | contents |", "|---|---|"]
        for path in sorted(package.rglob("*.py")):
            if path.name != "__init__.py":
                name = path.relative_to(package).as_posix()
                lines.append(f"| `{name}` | {first_line(path)} |")
        lines.append("")
    return "\n".join(lines)


def first_line(path: Path) -> str:
    """The first line of the docstring of a module."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.split("\n")[0].replace("|", "\\|")


def first_sentence(kind: type) -> str:
    """The first paragraph of a docstring as one line."""
    return " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split()).replace("|", "\\|")


GENERATED: dict[str, Callable[[], str]] = {
    "commands": commands,
    "configuration": configuration,
    "exit codes": exit_codes,
    "events": record_events,
    "modules": modules,
    "public names": public_names,
    "phases": phases,
}
