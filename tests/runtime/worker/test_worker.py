"""The main thread of a worker: what its heartbeats say that it does, from the set-up of an epoch to the end."""

import socket
from types import SimpleNamespace

import pytest
from torch import nn

from recycle.control.decide.messages import FINISH, SET_UP, StartEpoch
from recycle.control.net.handshake import Endpoint
from recycle.core.cluster import Shape, Worker
from recycle.core.plans.row_programs import row_programs
from recycle.runtime.options import EvaluationOptions
from recycle.runtime.transport.activity import Doing
from recycle.runtime.transport.select import TransportChoice
from recycle.runtime.transport.specs import TransportBroken
from recycle.runtime.worker import worker
from recycle.runtime.worker.worker import MAY_RETRY, _WorkerProcess
from tests.plans import make_1f1b_plan

pytestmark = pytest.mark.timeout(60)


def test_a_worker_that_finds_no_coordinator_names_the_addresses(monkeypatch, capsys):
    monkeypatch.setattr(worker, "_JOIN_S", 0.1)
    with socket.socket() as bound:  # it does not listen
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        endpoint = Endpoint("127.0.0.1", port, "", others=(("::1", port),))
        with pytest.raises(SystemExit) as stop:
            _WorkerProcess(endpoint, "", lambda about: None, (), lambda sentence: None).run()
    assert stop.value.code == MAY_RETRY
    says = f"this worker ends: no coordinator answers at 127.0.0.1:{port}, [::1]:{port} (Connection refused): start"
    assert capsys.readouterr().err.startswith(says)


OWN = Worker(1, 0)
PROGRAM = row_programs(make_1f1b_plan(2, 2, 2))[OWN].dumps()
START = StartEpoch(2, str(OWN), (), PROGRAM, 5, sources={"W1_0": "W0_0"})


class Steps:
    """Fakes of all that a worker calls in an epoch; `seen` are the calls, each with what the worker did according to itself."""

    def __init__(self, monkeypatch, is_trained=True):
        self.seen = []
        self.process = _WorkerProcess(Endpoint("127.0.0.1", 1, ""), "W1_0", lambda about: None, (), lambda sentence: None)
        self.control = self.process._control
        self.control.link_address = lambda: "127.0.0.1:1"
        options = SimpleNamespace(device="cpu", evaluation=EvaluationOptions())
        self.process._spec = SimpleNamespace(num_steps=9, shape=Shape(2, 2, 2), ties=(), options=options, layers=None)
        self.process._data = SimpleNamespace(
            begin=lambda *_: None,
            end=lambda: None,
            exchange_positions=lambda *_: None,
            reads_streams=False,
            reader=lambda: None,
            waited_us=0,
            trained_us=0,
        )
        self.process._injector = SimpleNamespace(
            on_recovery=self.see("recovery"),
            on_progress=None,
            on_transfer=self.see("copy"),
            find_link_ends=lambda *_: None,
            delay_s_to=None,
            speed_in=None,
        )
        module = nn.Linear(2, 2)
        held = SimpleNamespace(module=module, parameters=module.parameters)
        self.stage = SimpleNamespace(
            place=OWN,
            number=0,
            origin=1,
            timer=None,
            set_program=lambda instructions: None,
            state=SimpleNamespace(stage=held),
            on_applied=None,
            spec=self.process._spec,
            held_layers=(),
            move_to=self.see("load"),
            transfer=self.see("transfer"),
            progress=self.see("progress"),
            finish_checkpoints=self.see("finish"),
        )
        executor = SimpleNamespace(stage=held, reset=lambda: None, clock=SimpleNamespace(collect=lambda: None))
        state = SimpleNamespace(held_bytes=0)
        trainer = SimpleNamespace(
            executor=executor, state=state, train=self.see("train", is_trained), activation_bytes=0, spans=[]
        )
        transport = SimpleNamespace(host=None, abort=lambda: None, close=lambda: None)
        for name, fake in {
            "set_title": lambda title: None,
            "meet": self.see("meet"),
            "connect": self.see("connect", (transport, TransportChoice("gloo"))),
            "make_trainer": lambda *_: trainer,
            "stage_digest": self.see("stage_digest", ""),
        }.items():
            monkeypatch.setattr(worker, name, fake)

    def see(self, call, result=None):
        def seen(*_, **__):
            now = self.control.activity.now
            self.seen.append((call, now.label, now.waits_for))
            return result

        return seen

    def run_epoch(self):
        self.control._react(START)
        self.process._run_epoch(START, self.stage)


def test_a_worker_says_that_it_sets_up_an_epoch_and_that_it_finishes_until_that_is_reported(monkeypatch):
    steps = Steps(monkeypatch)
    steps.run_epoch()
    assert steps.seen == [
        ("recovery", SET_UP, ""),
        ("load", SET_UP, ""),
        ("meet", SET_UP, "all"),
        ("connect", SET_UP, "all"),
        ("copy", SET_UP, ""),
        ("transfer", SET_UP, ""),
        ("train", SET_UP, ""),  # its ops say the rest
        ("finish", FINISH, ""),
        ("stage_digest", FINISH, ""),
    ]
    assert steps.control.activity.now == Doing()


@pytest.mark.parametrize("cause", ["all pause", "the state does not come"])
def test_a_worker_that_leaves_an_epoch_does_nothing_until_it_is_told_what_to_do_next(cause, monkeypatch):
    steps = Steps(monkeypatch, is_trained=False)

    def breaks(*_):
        raise TransportBroken("the peer is gone")

    if cause == "the state does not come":
        steps.stage.transfer = breaks
    steps.run_epoch()
    assert steps.seen[-1] == ("progress", "", "")
    assert steps.control.activity.now == Doing()
