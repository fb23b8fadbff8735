"""A preloaded library that makes the disk fail or slow, and moves the wall clock, for the processes of one job."""

import errno
import os
import shutil
import struct
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_suffix(".c")
_LAYOUT = "=ddii256s"
_CONTROL = "CHAOS_CONTROL"


def compile_library(folder: Path) -> dict[str, str]:
    """Compile the library into a folder; return the variables that load it into a process and all that this one starts."""
    library, control = folder / "faults.so", folder / "control"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, _SOURCE, "-ldl"], check=True, capture_output=True)
    control.write_bytes(bytes(struct.calcsize(_LAYOUT)))
    return {"LD_PRELOAD": str(library), _CONTROL: str(control)}


def refusal() -> str:
    """Why the library cannot be used here; empty if it can be."""
    return "" if shutil.which("cc") and Path("/proc/self/fd").is_dir() else "no C compiler, or no Linux"


class FaultLibrary:
    """The library that is loaded into this process and those that it starts: its faults begin and end by a mapped file."""

    def __init__(self) -> None:
        self._control = Path(os.environ[_CONTROL])

    @staticmethod
    def is_loaded() -> bool:
        return _CONTROL in os.environ

    def fail(self, text: str, number: int = errno.ENOSPC) -> None:
        """Have every change of a file whose path contains a text fail."""
        self._set(text=text, number=number)

    def slow_down(self, text: str, delay_s: float) -> None:
        self._set(text=text, delay_s=delay_s)

    def move_clock(self, offset_s: float, pid: int = 0) -> None:
        """Move the wall clock of one process, or of all of them."""
        self._set(offset_s=offset_s, pid=pid)

    def clear(self) -> None:
        self._set()

    def _set(self, offset_s: float = 0.0, delay_s: float = 0.0, pid: int = 0, number: int = 0, text: str = "") -> None:
        with self._control.open("r+b") as stream:  # in place: the processes have mapped the file
            stream.write(struct.pack(_LAYOUT, offset_s, delay_s, pid, number, text.encode()))
