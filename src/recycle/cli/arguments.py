"""Parts of the argument parser that several commands share: adding a command, and options of the same meaning."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
_Options: TypeAlias = "argparse._ActionsContainer"


def output_path(text: str) -> Path:
    """The path of an output; an empty one would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty: name a file or folder")
    return Path(text)


def add_command(
    subparsers: Subparsers,
    name: str,
    run: Callable[[argparse.Namespace], int | None] | None,
    summary: str,
    description: str,
    epilog: str,
    usage: str | None = None,
) -> argparse.ArgumentParser:
    """Add a command that calls `run`, which returns an exit code, or None for 0; the texts of its help keep their line breaks."""
    parser = subparsers.add_parser(
        name,
        usage=usage,
        help=summary,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def add_file_options(options: _Options, **texts: str) -> None:
    """Add an option `--NAME FILE` for each name; its help is the text."""
    for name, text in texts.items():
        options.add_argument(f"--{name}", type=Path, metavar="FILE", help=text)


def add_set_option(options: _Options, about: str) -> None:
    """Add `--set NAME=VALUE`, which may be repeated."""
    options.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help=about)


def add_shape_options(options: _Options) -> None:
    options.add_argument("--pipelines", type=int, required=True, metavar="D", help="data-parallel pipelines")
    options.add_argument("--stages", type=int, required=True, metavar="S", help="stages of each pipeline")
    about = "micro-batches of each pipeline in an iteration"
    options.add_argument("--microbatches", type=int, required=True, metavar="M", help=about)


def add_rows_option(options: _Options) -> None:
    options.add_argument("--rows", choices=("auto", "all"), default="auto", help="auto leaves workers of big plans out of charts")


def add_width_option(options: _Options) -> None:
    """Add `--width`, which `terminal.chosen_width` reads."""
    options.add_argument("--width", type=int, metavar="N", help="columns of the chart (default: the terminal's)")
