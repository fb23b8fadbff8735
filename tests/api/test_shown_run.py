"""What `recycle.train` shows and serves besides the live view, as the command line does; none of that can end a run."""

import json
import re
import urllib.error
import urllib.request
from functools import partial

import pytest
import torch

import recycle
from recycle.core.errors import CallbackFailed, UserError
from recycle.core.events.record import Stepped
from tests.api.test_train_defaults import train
from tests.cli.live.test_otlp import Receiver
from tests.cli.machines.test_coordinator import free_port

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(180)
QUIET = recycle.TrainOptions(quiet=True)


def fail(event):
    raise ZeroDivisionError("from outside")


def shown(**options):
    return recycle.TrainOptions(show=recycle.ShowOptions(**options))


# Errors.


def test_a_watch_that_raises_is_a_warning_and_training_goes_on(capfd):
    made = train(out=None, watch=fail)
    assert len(made.losses) == 4
    sentence = "watch raised ZeroDivisionError: from outside; training goes on"
    assert made.warnings.count(sentence) == 1
    assert capfd.readouterr().err.count(f"warning: {sentence}") == 1


def test_a_watch_that_raises_in_a_quiet_run_is_a_warning_of_python():
    with pytest.warns(UserWarning, match="^watch raised ZeroDivisionError: from outside; training goes on$"):
        assert len(train(out=None, watch=fail, options=QUIET).losses) == 4


def test_a_live_view_that_raises_ends_nothing(monkeypatch):
    from recycle.cli.live.live_view import LiveView

    monkeypatch.setattr(LiveView, "observe", lambda view, event: fail(event))
    seen = []
    made = train(out=None, watch=seen.append)
    assert "the live view raised ZeroDivisionError: from outside; training goes on" in made.warnings
    assert sum(isinstance(event, Stepped) for event in seen) == 4


def test_a_live_view_that_cannot_even_print_its_warning_ends_nothing(monkeypatch):
    """As where the error stream leads to a program that has ended."""
    from recycle.cli.live.live_view import LiveView

    def broken(view, given):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(LiveView, "observe", broken)
    monkeypatch.setattr(LiveView, "say", lambda view, text: broken(view, text) if "warning" in text else None)
    made = train(out=None)
    assert len(made.losses) == 4
    assert "the live view raised BrokenPipeError: [Errno 32] Broken pipe; training goes on" in made.warnings


def test_a_callback_that_is_required_still_ends_the_run():
    class Required(recycle.Callback):
        is_required = True

        def on_step(self, step):
            fail(step)

    with pytest.raises(CallbackFailed, match="from outside"):
        train(out=None, steps=4000, callbacks=[Required()], watch=fail, options=QUIET)


# What is shown.


def test_progress_comes_as_lines_of_json(capfd):
    train(out=None, watch=fail, options=shown(json_lines=True))
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [line["iteration"] for line in lines if line["event"] == "step"] == [0, 1, 2, 3]
    (warning,) = [line["text"] for line in lines if line["event"] == "message"]
    assert warning.startswith("warning: watch raised")


def test_metrics_are_answered_at_the_address_that_was_asked_for():
    port, seen = free_port(), []

    def ask(host, event):
        if isinstance(event, Stepped) and event.iteration == 2:
            with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=20) as answer:
                seen.append(answer.read().decode())

    train(out=None, watch=partial(ask, "127.0.0.2"), options=shown(metrics_port=port, metrics_host="127.0.0.2"))
    assert re.search(r"^recycle_step [123]\.0$", seen[0], re.MULTILINE)
    refused = train(out=None, watch=partial(ask, "127.0.0.1"), options=shown(metrics_port=port, metrics_host="127.0.0.2"))
    assert any("watch raised URLError" in warning for warning in refused.warnings)


def test_a_collector_of_opentelemetry_gets_the_run():
    receiver = Receiver()
    try:
        train(out=None, options=shown(otlp=receiver.url))
        (point,) = receiver.metrics()["recycle_step"]["gauge"]["dataPoints"]
        assert point["asDouble"] == 4
    finally:
        receiver.close()


def test_the_page_of_a_run_is_served_while_it_goes_on_and_may_inject(tmp_path, capfd):
    found = []

    def ask(event):
        if isinstance(event, Stepped) and event.iteration == 2:
            line = next(line for line in capfd.readouterr().err.splitlines() if "the page of this run" in line)
            address, _, token = line.split(": ", 1)[1].partition("?token=")
            asked = urllib.request.Request(f"{address}api/session", headers={"Authorization": f"Bearer {token}"})
            with urllib.request.urlopen(asked, timeout=20) as answer:
                found.append((asked, json.load(answer)))

    made = train(out=tmp_path / "run", watch=ask, options=shown(dashboard=0, allow_injection=True))
    assert made.warnings == ()
    ((asked, session),) = found
    assert "kill" in session["actions"]
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(asked, timeout=5)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dashboard": 0}, "dashboard shows what a run records: name a folder with out"),
        ({"allow_injection": True}, "give the port of the page with dashboard, too"),
        ({"metrics_port": -1}, "the port for Prometheus is -1"),
        ({"otlp": "nowhere"}, "'nowhere' is no address of a collector"),
        ({"dashboard": 70_000}, "70000 is not a port: ports go up to 65535"),
        ({"dashboard_names": "pages.example"}, "dashboard_names is 'pages.example', but it must be a list of names"),
    ],
)
def test_what_cannot_be_shown_is_refused(options, sentence):
    with pytest.raises(UserError, match=sentence):
        train(out=None, options=shown(**options))


@pytest.mark.parametrize("options", [{"dashboard": 0}, {"json_lines": True}])
def test_a_quiet_run_has_nowhere_to_say_where_its_page_is(options, tmp_path):
    wanted = recycle.TrainOptions(quiet=True, show=recycle.ShowOptions(**options))
    with pytest.raises(UserError, match="quiet prints nothing, neither the address of the page nor JSON lines"):
        train(out=tmp_path / "run", options=wanted)
