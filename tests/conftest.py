"""Settings of every test: where Hypothesis takes its examples from, how interrupts arrive, where processes come from."""

import os
import signal
import sys
from collections.abc import Iterator
from itertools import islice

import pytest
from hypothesis import HealthCheck, settings

# As in workers, and before torch is loaded: tests run beside each other, and threads that wait for a core would spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.warm_processes import warm_context

# Hypothesis tries new examples on every run of ours, and the same ones on every run of CI, so that a red CI means a change.
# On a machine that does something else as well, examples may be slow to make and to run.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("local", patient)
settings.register_profile("ci", patient, derandomize=True)
settings.load_profile("local")
if os.environ.get("CI"):
    settings.load_profile("ci")

# `make test` tries a part of the examples of each property; `make test-properties` tries all of them. Without the variable, all.
SHARE_OF_EXAMPLES = float(os.environ.get("SHARE_OF_EXAMPLES", "1"))
FEWEST_EXAMPLES = 10

# nohup, a shell's background job and many job runners start processes with SIGINT ignored, and children inherit that. Tests of
# Ctrl-C need the default: Python raises KeyboardInterrupt, and a child begins with its own default handler.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Start the fork server of the tests, before a training starts one without the planner; not where others run the tests."""
    runs_tests_itself = hasattr(session.config, "workerinput") or not session.config.getoption("numprocesses", None)
    if runs_tests_itself and not session.config.option.collectonly:
        warm_context()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Keep the names of tests that failed by an assertion or a crash: CI never runs these again, as it may others."""
    failed = [*terminalreporter.stats.get("failed", []), *terminalreporter.stats.get("error", [])]
    if (cache := getattr(config, "cache", None)) is not None:
        cache.set("recycle/failed_for_good", [report.nodeid for report in failed if not _is_late_or_broken_off(report)])


def _is_late_or_broken_off(report: pytest.TestReport) -> bool:
    """Whether a test was ended by its time limit, or by an exception that is no assertion, such as that of `depends_on_load`."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return False
    return crash.message.startswith("Failed: Timeout") or not crash.message.startswith(("assert", "AssertionError", "Failed"))


# The files that take longest. They come first in every worker's share, so that short tests fill the end.
LONG = (
    "docs/test_snippets.py",
    "runtime/test_data.py",
    "runtime/cutting/test_causal_training.py",
    "runtime/test_slow_links.py",
    "runtime/test_slow_workers.py",
    "api/test_defined_anywhere.py",
    "cli/measuring/test_dashboard.py",
    "runtime/test_recovery.py",
    "runtime/test_moved_layers.py",
    "runtime/execute/test_reference_executor.py",
    "runtime/test_stalls.py",
    "cli/training/test_resume.py",
    "cli/training/test_train.py",
    "cli/measuring/test_bench.py",
    "cli/measuring/test_report.py",
    "runtime/execute/test_elastic_training.py",
    "runtime/test_auxiliary_losses.py",
    "runtime/test_evaluation.py",
    "runtime/checkpoint/test_writer.py",
    "evaluate/hardware/test_elastic_study.py",
    "evaluate/hardware/test_kills.py",
    "runtime/launch/test_local_launcher.py",
    "examples/test_short_examples.py",
    "examples/test_examples.py",
    "examples/test_hugging_face.py",
    "sim/reproduce/test_reproduce.py",
    "chaos/test_kill_points.py",
    "chaos/test_resources.py",
    "cli/demo/test_demo.py",
    "cli/machines/test_coordinator.py",
    "planner/heuristic/test_order_search.py",
    "planner/exact/test_exact.py",
    "docs/test_site.py",
)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give a property its share of examples; the items of a parametrized test have one function."""
    function = getattr(item, "obj", None)
    every = getattr(function, "_hypothesis_internal_use_settings", None)
    if SHARE_OF_EXAMPLES < 1 and every is not None and not hasattr(function, "has_its_share"):
        number = max(min(FEWEST_EXAMPLES, every.max_examples), round(SHARE_OF_EXAMPLES * every.max_examples))
        function._hypothesis_internal_use_settings = settings(every, max_examples=number)
        function.has_its_share = True


# Last, so that it sees only what the words of the command have left.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Deal the long files to as many shares as there are workers, and fill the shares with the other tests.

    pytest-xdist gives each worker an equal part of the list, and later moves tests from busy workers to idle ones.
    """
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if num_workers == 1:
        return
    files = [[item for item in items if item.path.as_posix().endswith(f"/tests/{name}")] for name in LONG]
    shares = [[item for file in files[number::num_workers] for item in file] for number in range(num_workers)]
    long_items = {id(item) for share in shares for item in share}
    others = iter([item for item in items if id(item) not in long_items])
    for number, share in enumerate(shares):
        size = len(items) * (number + 1) // num_workers - len(items) * number // num_workers
        share.extend(islice(others, max(0, size - len(share))))
    items[:] = [*(item for share in shares for item in share), *others]


@pytest.fixture(autouse=True)
def _kernels_as_in_a_new_process() -> Iterator[None]:
    """Undo what a test may have done to torch: without a kernel for bfloat16, it turns oneDNN off for the whole process."""
    yield
    if (torch := sys.modules.get("torch")) is not None:
        torch._C._set_mkldnn_enabled(True)
