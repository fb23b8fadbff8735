"""Code blocks of a Markdown page: found, read with their test directives, and run in one session a page.

A directive is a comment directly above a block. CONTRIBUTING.md, "Documents", lists the directives.
"""

import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.warm_processes import WarmProcess

ROOT = Path(__file__).parents[2]
RUNNABLE = ("bash", "console", "python")
TIMEOUT_S = 240

_FENCE = re.compile(r"^```(\S*)$")
_DIRECTIVE = re.compile(r"^<!-- test: (.+) -->$")
_PAIR = r'"([^"]+)" with "([^"]*)"'
_CLAUSE = re.compile(
    r"in the background(?:, (?P<times>\d+) times)?|(?P<continues>continue the script above)|saved as (?P<file>\w+\.py)|"
    r'replace (?P<pairs>".+")',
)


@dataclass(frozen=True, slots=True)
class Directive:
    """How a test runs a block; a `reason` says why it does not. A script that is only `saved_as` a file is for later blocks."""

    reason: str = ""
    replacements: tuple[tuple[str, str], ...] = ()
    num_background: int = 0
    continues: bool = False
    saved_as: str = ""

    @staticmethod
    def parse(text: str) -> "Directive":
        if reason := re.fullmatch(r"not run, because (.+)", text):
            return Directive(reason=reason.group(1))
        clauses = re.split(r"; (?=in the|continue|saved|replace)", text)
        found = [_CLAUSE.fullmatch(clause) for clause in clauses]
        if None in found:
            raise ValueError(f"the directive {text!r} is none of those that CONTRIBUTING.md lists")
        made = Directive()
        for clause, match in zip(clauses, found, strict=True):
            assert match is not None
            if clause.startswith("in the background"):
                made = replace(made, num_background=int(match["times"] or 1))
            elif match["continues"]:
                made = replace(made, continues=True)
            elif match["file"]:
                made = replace(made, saved_as=match["file"])
            else:
                made = replace(made, replacements=_pairs(match["pairs"]))
        return made


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    if not re.fullmatch(rf"{_PAIR}(?:; {_PAIR})*", text):
        raise ValueError(f'{text!r} is not a list of "A" with "B"')
    return tuple(re.findall(_PAIR, text))


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced code block: where it begins, its language, its text, and how it is tested."""

    line: int
    language: str
    text: str
    directive: Directive

    @property
    def shrunk(self) -> str:
        """The text as it is run, a command on one line. A replacement of something that the block does not have is a mistake."""
        text = self.text if self.language == "python" else re.sub(r" *\\\n *", " ", self.text)
        for old, new in self.directive.replacements:
            if old not in text:
                raise ValueError(f"line {self.line}: the directive replaces {old!r}, which the block does not have")
            text = text.replace(old, new)
        return text


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a page in order."""
    lines = page.splitlines()
    number = 0
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        if fence is None:
            number += 1
            continue
        end = lines.index("```", number + 1)
        above = _DIRECTIVE.match(lines[number - 1]) if number else None
        directive = Directive.parse(above.group(1)) if above else Directive()
        yield Block(number + 1, fence.group(1), "\n".join(lines[number + 1 : end]) + "\n", directive)
        number = end + 1


def runnable(page: str) -> list[Block]:
    """The blocks that are run: those that continue a script are joined to it."""
    found: list[Block] = []
    for block in blocks(page):
        if block.language not in RUNNABLE or block.directive.reason:
            continue
        if block.directive.continues:
            script = next(one for one in reversed(found) if one.language == "python")
            body = "".join(f"    {line}\n" if line else "\n" for line in block.shrunk.splitlines())
            found[found.index(script)] = Block(script.line, "python", script.shrunk + "\n" + body, Directive())
        else:
            found.append(block)
    return found


def commands(console: str) -> list[tuple[str, list[str]]]:
    """The commands of a console block, each with the lines of output below it."""
    found: list[tuple[str, list[str]]] = []
    for line in console.splitlines():
        if line.startswith("$ "):
            found.append((line.removeprefix("$ "), []))
        elif found:
            found[-1][1].append(line)
        else:
            raise ValueError(f"a console block begins with a command, not with {line!r}")
    return found


def fits(expected: Sequence[str], output: str) -> bool:
    """Whether output is as expected; `...` is anything in a line, or any lines where it is a line by itself."""
    pattern = "".join(
        r"(?:.*\n)*" if line == "..." else ".*".join(map(re.escape, line.rstrip().split("..."))) + r"[ \t]*\n"
        for line in expected
    )
    return re.fullmatch(pattern, output) is not None


def is_plain(line: str) -> bool:
    """Whether a line is one `recycle` command that needs no shell: at most its output goes to a file."""
    command = re.sub(r" > [\w.-]+$", "", line)
    return line.startswith("recycle ") and not re.search(r"[|&;<>$`*?~(){}!]|\\$", command)


@dataclass
class Session:
    """An empty folder in which the blocks of one page run one after the other."""

    folder: Path
    port: int = field(init=False)
    _background: list["subprocess.Popen[bytes] | WarmProcess"] = field(default_factory=list)
    _num_scripts: int = 0

    def __post_init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        programs = self.folder / ".bin"
        programs.mkdir()
        python = shlex.quote(sys.executable)
        for name, start in (("python", f"exec {python}"), ("recycle", f"exec {python} -m recycle")):
            (programs / name).write_text(f'#!/bin/sh\n{start} "$@"\n')
            (programs / name).chmod(0o755)
        self._environment = {
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            "XDG_CACHE_HOME": str(self.folder / ".cache"),
            "COLUMNS": "130",
        }

    def run(self, block: Block) -> None:
        text = block.shrunk.replace("{port}", str(self.port))
        if block.directive.num_background:
            self._start(text, block.directive.num_background)
        elif block.language == "console":
            for command, expected in commands(text):
                output = self._output_of(command)
                assert fits(expected, output), f"{command} prints\n{output}\nbut the page shows\n" + "\n".join(expected)
        elif block.language == "bash":
            self._output_of(text)
        elif block.directive.saved_as:
            (self.folder / block.directive.saved_as).write_text(text, encoding="utf-8")
        else:
            self._num_scripts += 1
            script = self.folder / f"snippet_{self._num_scripts}.py"
            script.write_text(text, encoding="utf-8")
            self._end(WarmProcess([script], self.folder, self._environment, is_script=True), text)

    def _output_of(self, text: str) -> str:
        """Run shell commands to their end, which must be a good one, and return what they printed."""
        if all(is_plain(line) for line in text.splitlines()):
            return "".join(map(self._output_of_plain, text.splitlines()))
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        shell = ["bash", "-euo", "pipefail", "-c", text]
        return self._end(subprocess.Popen(shell, cwd=self.folder, env=self._environment, text=True, **pipes), text)

    def _output_of_plain(self, line: str) -> str:
        command, _, file = line.partition(" > ")
        output = self._end(self._warm(command), line)
        if not file:
            return output
        (self.folder / file.strip()).write_text(output, encoding="utf-8")
        return ""

    def _warm(self, line: str) -> WarmProcess:
        return WarmProcess(shlex.split(line, comments=True)[1:], self.folder, self._environment)

    def _end(self, process: "subprocess.Popen[str] | WarmProcess", text: str) -> str:
        try:
            out, err = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
        assert process.returncode == 0, f"{text}\nends with {process.returncode}:\n{out}\n{err}"
        return out

    def _start(self, text: str, times: int) -> None:
        if self._background:
            self._wait_for_port()
        if is_plain(text.strip()):
            self._background += [self._warm(text) for _ in range(times)]
            return
        for _ in range(times):
            self._background.append(
                subprocess.Popen(
                    ["bash", "-euo", "pipefail", "-c", f"exec {text}"],
                    cwd=self.folder,
                    env=self._environment,
                    stdout=subprocess.DEVNULL,
                )
            )

    def _wait_for_port(self) -> None:
        """Return when something listens at the port of this session."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            assert time.monotonic() < deadline_s, f"nothing listens at port {self.port}"
            assert all(process.poll() is None for process in self._background), "a command in the background has ended"
            time.sleep(0.05)

    def finish(self) -> None:
        """Wait for the commands in the background, which must end well."""
        codes = [process.wait(TIMEOUT_S) for process in self._background]
        assert not any(codes), f"commands in the background end with {codes}"

    def stop(self) -> None:
        """End whatever still runs."""
        for process in self._background:
            process.kill()
            process.wait()
