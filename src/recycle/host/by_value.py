"""Objects that other processes get by value, wherever their functions and classes are defined: lambdas and notebook cells, too.

`cloudpickle` does that. Without it, functions and classes are sent by their names, and a process must import the script that
defines them.
"""

import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

HAS_CLOUDPICKLE = find_spec("cloudpickle") is not None
_MAIN = "__main__"
# What multiprocessing looks at, to find the script that a process imports.
_OF_SCRIPT = "__file__", "__spec__"


def dumps_by_value(value: Any) -> bytes:
    """The pickle of a value, which `pickle.loads` reads; functions and classes of `__main__` and inner ones are in it."""
    if not HAS_CLOUDPICKLE:
        return pickle.dumps(value)
    import cloudpickle

    made: bytes = cloudpickle.dumps(value)
    return made


class ByValue:
    """Sends a value to a process by value: the process gets the value itself."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (dumps_by_value(self._value),)


@contextmanager
def without_script() -> Iterator[None]:
    """Processes that start inside do not import the script of this one, if they need nothing of it."""
    main = sys.modules.get(_MAIN)
    if not HAS_CLOUDPICKLE or main is None:
        yield
        return
    kept = {name: main.__dict__[name] for name in _OF_SCRIPT if name in main.__dict__}
    try:
        main.__dict__.pop("__file__", None)
        main.__spec__ = None
        yield
    finally:
        main.__dict__.update(kept)
