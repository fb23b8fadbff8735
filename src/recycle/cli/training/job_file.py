"""A job file: a Python file whose function `job` returns the `recycle.Job` to train; it is the same on every machine."""

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recycle.core.errors import FileProblem, UserError

if TYPE_CHECKING:
    from recycle.runtime.job import Job

_FUNCTION = "job"
_EXAMPLE = f"define it as: def {_FUNCTION}() -> recycle.Job"


@dataclass(frozen=True, slots=True)
class LoadedJob:
    """The job of a file, and the SHA-256 of that file and of the modules beside it that it imports, by their paths from there."""

    job: "Job"
    code: Mapping[str, str]


def load_job_file(path: Path) -> LoadedJob:
    """Load a job file, and call its function `job`; every problem with it is one sentence that names the file and the line.

    Workers import the file by its name to unpickle what it defines, so its folder comes first in the module search path.
    """
    from recycle.runtime.job import Job

    path = path.resolve()
    module = _import(path)
    function = getattr(module, _FUNCTION, None)
    if not callable(function):
        raise UserError(f"{path} has no function {_FUNCTION}: {_EXAMPLE}")
    made = _call(path, f"{_FUNCTION}()", function)
    if not isinstance(made, Job):
        raise UserError(f"{_FUNCTION}() of {path} returns {type(made).__name__}, and no recycle.Job: {_EXAMPLE}")
    return LoadedJob(made, _code_beside(path.parent))


def _import(path: Path) -> Any:
    name, folder = path.stem, str(path.parent)
    if not path.is_file():
        raise FileProblem(f"there is no job file {path}: name a Python file with a function {_FUNCTION}")
    if not name.isidentifier():
        raise UserError(f"{path} cannot be imported by its name: give it a name of letters, digits and underscores")
    loaded = sys.modules.get(name)
    if loaded is not None and _file_of(loaded) == path:
        return loaded
    if loaded is not None or (name in sys.stdlib_module_names):
        raise UserError(f"{path} has the name of the module {name}, which is another one: rename the file")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        _call(path, "it", lambda: spec.loader.exec_module(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _call(path: Path, what: str, function: Any) -> Any:
    """Call a function of the file; an exception becomes a sentence, with the line of the file in which it was raised."""
    try:
        return function()
    except UserError:
        raise
    except (Exception, SystemExit) as problem:
        if isinstance(problem, SyntaxError):
            raise UserError(f"{path} is no Python: line {problem.lineno}: {problem.msg}") from None
        frames = [frame.lineno for frame in traceback.extract_tb(problem.__traceback__) if frame.filename == str(path)]
        where = f" in line {frames[-1]}" if frames else ""
        text = str(problem).strip().partition("\n")[0]
        raise UserError(f"{path}: {what} failed{where}: {type(problem).__name__}{f': {text}' if text else ''}") from None


def _code_beside(folder: Path) -> dict[str, str]:
    """The SHA-256 of each loaded module's file in the folder or below, apart from installed packages."""
    found: dict[str, str] = {}
    for module in list(sys.modules.values()):
        file = _file_of(module)
        if file is None or not file.is_relative_to(folder):
            continue
        name = file.relative_to(folder)
        if "site-packages" not in name.parts and file.is_file():
            found[name.as_posix()] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def _file_of(module: Any) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if isinstance(file, str) else None
