"""The commands of an engine are commands that `recycle` has."""

import pytest

from recycle.cli.main import make_parser
from recycle.integrations.job_commands import JobCommands

JOB = JobCommands("train.py", "runs/a", "token", 29411, ("--steps", "7"), workers_per_machine=3, grace_s=40)


@pytest.mark.parametrize("command", [JOB.coordinator("0.0.0.0"), JOB.resumed_coordinator("0.0.0.0"), JOB.agent("node-1")])
def test_a_command_is_understood(command):
    args = make_parser().parse_args(command[1:])
    assert command[0] == "recycle"
    assert args.command == command[1]
    assert str(args.token_file) == "token"


def test_an_agent_gets_its_address_and_the_number_of_its_workers():
    args = make_parser().parse_args(JOB.agent("node-1")[1:])
    assert (args.address, args.workers, args.grace) == ("node-1:29411", 3, 40.0)


def test_a_run_goes_on_with_the_flags_with_which_it_began():
    commands = (JOB.coordinator("0.0.0.0"), JOB.resumed_coordinator("0.0.0.0"))
    assert [vars(make_parser().parse_args(command[1:]))["training.steps"] for command in commands] == [7, 7]


def test_an_agent_decides_itself_unless_it_is_told():
    args = make_parser().parse_args(JobCommands("train.py", "runs/a", "token").agent("h")[1:])
    assert args.workers is None
