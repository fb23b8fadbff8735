"""The name of a machine in a handshake: nobody kills by the process ids of another container of the same machine."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from recycle.control.net.handshake import this_host

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not os.path.lexists("/proc/self/ns/pid"), reason="asks Linux's /proc for a namespace"),
]
NAME_OF_HOST = "from recycle.control.net.handshake import this_host; print(this_host())"


def test_the_name_of_a_machine_has_its_boot_and_the_namespace_of_process_ids() -> None:
    boot, processes = Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")
    assert this_host().split()[-2:] == [boot, processes]


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="only root makes a namespace, by unshare")
def test_a_container_with_process_ids_of_its_own_has_another_name() -> None:
    words = ["unshare", "--pid", "--fork", sys.executable, "-c", NAME_OF_HOST]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    if "Operation not permitted" in ended.stderr:
        pytest.skip("root may make no namespace here")
    assert ended.returncode == 0, ended.stderr
    inside, outside = ended.stdout.strip(), this_host()
    assert inside.rpartition(" ")[0] == outside.rpartition(" ")[0]
    assert inside != outside
