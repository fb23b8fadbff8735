"""The commands of an engine are commands that `recycle` has."""

from dataclasses import replace
from pathlib import Path

import pytest

from recycle.cli.main import make_parser
from recycle.control.net.tls import TlsFiles
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


def test_coordinator_and_agents_get_the_files_of_tls_and_the_coordinator_alone_the_store():
    job = replace(
        JOB, tls=TlsFiles(Path("/c.pem"), Path("/k.pem"), Path("/a.pem")), store_flags=("--store", "etcd://h:2379/jobs/a")
    )
    coordinators, agent = (job.coordinator("0.0.0.0"), job.resumed_coordinator("0.0.0.0")), job.agent("one", "two")
    for command in (*coordinators, agent):
        args = make_parser().parse_args(command[1:])
        assert (args.tls_cert, args.tls_key, args.tls_ca) == (Path("/c.pem"), Path("/k.pem"), Path("/a.pem"))
    assert {make_parser().parse_args(command[1:]).store for command in coordinators} == {"etcd://h:2379/jobs/a"}
    assert make_parser().parse_args(agent[1:]).address == "one:29411,two:29411"
    assert "--store" not in agent


def test_a_run_goes_on_with_the_flags_with_which_it_began():
    commands = (JOB.coordinator("0.0.0.0"), JOB.resumed_coordinator("0.0.0.0"))
    assert [vars(make_parser().parse_args(command[1:]))["training.steps"] for command in commands] == [7, 7]


def test_an_agent_decides_itself_unless_it_is_told():
    args = make_parser().parse_args(JobCommands("train.py", "runs/a", "token").agent("h")[1:])
    assert args.workers is None
