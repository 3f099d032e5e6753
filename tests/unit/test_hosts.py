"""--hosts: the list of machines, which of them is this one, and what they get."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cases import each
from tests.conftest import wait_until
from training.cli import doctor
from training.core.errors import UserError
from training.core.project import ROOT
from training.host import hosts, network, topology
from training.host.hosts import Host, Target
from training.host.placement import LOCAL, LOOPBACK, NODE, LauncherOptions, Topology
from training.launcher.hosts import node, probe, ssh
from training.launcher.hosts.node import Node, passed_on
from training.launcher.hosts.probe import Machine
from training.plan import preflight
from training.plan.request import read
from training.plan.training_plan import build

AWAY = {"alpha": Target("192.0.2.7"), "beta": Target("192.0.2.8")}


def codes(asked: LauncherOptions, environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(UserError) as caught:
        hosts.find(environ or {}, asked, starts_ranks=True)
    return [problem.code for problem in caught.value.problems]


@each(
    "text, found",
    [
        ("a,b", [Host("a"), Host("b")]),
        ("user@a:8, 10.0.0.2", [Host("user@a", 8), Host("10.0.0.2")]),
        ("[fd00::2]:4", [Host("fd00::2", 4)]),
        ("gpu-01.example.org", [Host("gpu-01.example.org")]),
    ],
)
def test_a_list_of_machines(text: str, found: list[Host]) -> None:
    assert hosts.read(LauncherOptions(hosts=text)) == (found, [])


@each(
    "text, found",
    [
        ("a,,b", ["hosts.value"]),
        ("a:0", ["hosts.value"]),
        ("-oProxyCommand=x,a b", ["hosts.value", "hosts.value"]),
        ("a:x", ["hosts.value"]),
        ("a,b,a:2", ["hosts.twice"]),
    ],
)
def test_all_problems_of_a_list(text: str, found: list[str]) -> None:
    assert [problem.code for problem in hosts.read(LauncherOptions(hosts=text))[1]] == found


def test_a_hostfile(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("\ufeff# two machines\r\n\na slots=8   # the first\nuser@b\n")
    assert hosts.read(LauncherOptions(hostfile=str(path))) == ([Host("a", 8), Host("user@b")], [])
    path.write_text("a slots=x\nb slots=2 max_slots=4\n-a\nc\nc\n")
    found = [problem.code for problem in hosts.read(LauncherOptions(hostfile=str(path)))[1]]
    assert found == [*["hosts.line"] * 3, "hosts.twice"]
    path.write_text("# none\n")
    assert codes(LauncherOptions(hostfile=str(path))) == ["hosts.file"]
    assert codes(LauncherOptions(hostfile=str(tmp_path / "missing"))) == ["hosts.file"]
    assert codes(LauncherOptions(hostfile=str(path), hosts="a")) == ["flag.contradiction"]


def test_another_machine_becomes_the_first(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    asked = LauncherOptions(hostfile=str(path))
    path.write_text("a slots=8\nuser@b\n[2001:db8::1] slots=4\n")
    assert hosts.with_first(asked, 1) == "user@b,a:8,[2001:db8::1]:4"
    again = LauncherOptions(hosts=hosts.with_first(asked, 2))
    assert hosts.read(again) == ([Host("2001:db8::1", 4), Host("a", 8), Host("user@b")], [])
    assert hosts.with_first(LauncherOptions(), 1) == ""
    path.unlink()
    assert hosts.with_first(asked, 1) == ""


def test_contradicting_flags_are_reported_at_once() -> None:
    asked = LauncherOptions(
        hosts="a,b", nnodes=3, node_rank=1, launcher="slurm", ssh_args="'unclosed"
    )
    expected = ["flag.contradiction", "hosts.nnodes", "flag.contradiction", "hosts.ssh_args"]
    assert codes(asked) == expected
    with pytest.raises(UserError) as caught:
        hosts.find({}, LauncherOptions(hosts="a"), starts_ranks=False)
    assert [problem.code for problem in caught.value.problems] == ["hosts.entrypoint"]
    few = hosts.too_few_slots(LauncherOptions(hosts="a:1,b,c:4"), 2)
    assert [(problem.code, problem.fixes) for problem in few] == [("hosts.slots", ["N=1"])]


def test_the_head_and_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = LauncherOptions(hosts="alpha,beta", launcher="torchrun")
    monkeypatch.setattr(hosts, "target", lambda name, ssh_args: AWAY[name])
    head = topology.find({}, asked, starts_ranks=True)
    assert (head.kind, head.source, head.nnodes, head.node_rank) == (NODE, hosts.HEAD, 2, 0)
    others = [topology.find({}, asked, starts_ranks=True).master_port for _ in range(3)]
    assert head.master_addr == "192.0.2.7"
    assert {*others} != {head.master_port}, "another launch does not meet these machines"
    fixed = replace(asked, master_port=4000)
    assert topology.find({}, fixed, starts_ranks=True).master_port == 4000
    # also where variables of another launcher are set on that machine
    environ = {
        hosts.VARIABLE: "1 2 192.0.2.7 23456",
        "RANK": "3",
        "WORLD_SIZE": "8",
        "MASTER_ADDR": "x",
    }
    node = topology.find(environ, asked, starts_ranks=True)
    assert (node.kind, node.nnodes, node.node_rank) == (NODE, 2, 1)
    assert (node.source, node.master_addr, node.master_port) == ("flags", "192.0.2.7", 23456)
    alone = topology.find(
        {hosts.VARIABLE: "0 1 x 23456"}, LauncherOptions(hosts="a"), starts_ranks=True
    )
    assert alone.kind == LOCAL
    # without --hosts it is a leftover, which no rank inherits
    left = topology.find({hosts.VARIABLE: "1 2 x 23456"}, LauncherOptions(), starts_ranks=True)
    assert (left.kind, left.leftovers) == (LOCAL, (hosts.VARIABLE,))
    assert topology.clean({hosts.VARIABLE: "1 2 x 23456"}) == {}


@each(
    "first, names", [("alpha", {"machine", "data", "W&B"}), ("localhost", {"GPUs", "CPU", "data"})]
)
def test_a_machine_without_ranks_is_not_checked(
    first: str, names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "target", lambda name, ssh_args: AWAY.get(name, Target(name)))
    config = str(ROOT / "configs/dual_gpu/quickstart.py")
    words = [f"--hosts={first},beta", "--total_batch_size=8192", "--device=cuda", "--check"]
    request = read("launch_train.sh", ["2", config, *words], {})
    plan, checks = build(request, {})
    found = {check.name for check in checks}
    assert found == names if first == "alpha" else found > names
    assert preflight.worst(checks) == (preflight.OK if first == "alpha" else preflight.ERROR)
    assert (plan["ranks"], plan["local_ranks"]) == (4, 2)
    assert not doctor.communication(request, plan, checks) or first != "alpha"


def test_this_machine_needs_no_ssh() -> None:
    assert Target("localhost").is_here() and Target(LOOPBACK).is_here()
    assert Target(socket.gethostname()).is_here()
    assert not Target(LOOPBACK, "2222").is_here(), "a tunnel or a container"
    assert not Target(LOOPBACK, user="someone-else").is_here()
    assert not Target("192.0.2.7").is_here()
    found = probe.machines([Host("localhost"), Host(LOOPBACK)], "")
    assert [machine.here for machine in found] == [True, False], "one launch command per machine"


def test_the_address_of_the_first_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    here, away = Target("localhost"), Target("192.0.2.8")
    monkeypatch.setattr(network, "source_towards", {"192.0.2.8": "192.0.2.1"}.get)
    assert hosts.first_address([here, away]) == "192.0.2.1", "the interface that leads there"
    assert hosts.first_address([here, Target("unknown.invalid")]) == socket.gethostname()
    assert hosts.first_address([here]) == LOOPBACK
    assert hosts.first_address([away, here]) == "192.0.2.8"
    assert hosts.first_address([Target("behind.jump.invalid"), here]) == "behind.jump.invalid"


def test_machines_get_the_variables_that_mean_the_same_there() -> None:
    kept = {
        "PATH": "/bin",
        "NCCL_DEBUG": "INFO",
        "WANDB_API_KEY": "secret",
        "MY_DATA": "a b",
        "DUET_SEED": "3",
        "DUET_HOSTS": "a,b",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    own = {
        "HOME": "/root",
        "SSH_AUTH_SOCK": "/tmp/x",
        "KRB5CCNAME": "FILE:/tmp/krb5cc_0",
        "SLURM_JOB_ID": "1",
        "RANK": "0",
        "PET_NNODES": "2",
        "DUET_TOKEN": "x",
        hosts.VARIABLE: "0 2 a",
        "OMPI_COMM_WORLD_RANK": "0",
        "KUBERNETES_SERVICE_HOST": "x",
    }
    assert passed_on(kept | own) == kept
    assert passed_on({"CUDA_VISIBLE_DEVICES": "GPU-8f1c"}) == {}, "of this machine"


def test_the_ssh_command() -> None:
    words = ssh.command("user@a", "-p 2222 -o 'ProxyJump x'", ssh.agent("/a b/python"))
    assert words[:4] == ["ssh", "-T", "-o", "BatchMode=yes"]
    assert words[4:8] == ["-p", "2222", "-o", "ProxyJump x"]
    assert words[-2] == "user@a"
    assert shlex.split(words[-1]) == ["exec", "/a b/python", "-I", "-S", ssh.AGENT]


@each(
    "error, code",
    [
        ("ssh: Could not resolve hostname a: Name or service not known", "hosts.unknown"),
        (
            "No ED25519 host key is known for a\r\nHost key verification failed.",
            "hosts.key_unknown",
        ),
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key", "hosts.key_changed"),
        ("u@a: Permission denied (publickey,password).", "hosts.denied"),
        ("ssh: connect to host a port 22: Connection refused", "hosts.refused"),
        ("ssh: connect to host a port 22: Connection timed out", "hosts.unreachable"),
        ("ssh: connect to host a port 22: No route to host", "hosts.unreachable"),
        ("kex_exchange_identification: Connection closed by remote host", "hosts.ssh"),
        ("", "hosts.ssh"),
    ],
)
def test_errors_of_ssh(error: str, code: str) -> None:
    problem = ssh.problem("a", "-p 2222", error)
    assert problem.code == code and problem.fixes


@pytest.mark.parametrize(("answer", "found"), [("", []), ("exit 255", ["hosts.ssh"])])
def test_a_process_that_ssh_leaves_behind_does_not_delay_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, found: list[str]
) -> None:
    """As a master with ControlPersist, or a helper of a ProxyCommand, may: it keeps the streams of
    ssh. Pythons of uv and conda have no os.memfd_create."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    pid = tmp_path / "pid"
    (tmp_path / "ssh").write_text(
        f"#!/bin/sh\nsleep 60 &\necho $! >'{pid}'\n{answer}\nexec sh -s\n"
    )
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    one = Machine(1, Host("a"), here=False)
    try:
        probe.look([one], "", os.environ)
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)
    assert [problem.code for problem in one.problems] == found
    assert "no answer" not in str(one.problems) and bool(one.python) == (not found)


@pytest.mark.parametrize(
    ("own", "python", "script", "codes"),
    [
        (True, "elsewhere", False, ["hosts.no_environment"]),
        (True, "same", False, []),
        (True, "elsewhere", True, []),  # which may have its own Python there
        (False, "elsewhere", False, []),  # reported as no Python
    ],
)
def test_a_machine_has_the_environment_before_the_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: bool,
    python: str,
    script: bool,
    codes: list[str],
) -> None:
    (tmp_path / "ssh").write_text(
        f"#!/bin/sh\nPATH='{tmp_path}:{os.environ['PATH']}'\nexec sh -s\n"
    )
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "python3").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(probe, "_is_own", lambda: own)
    if python == "elsewhere":
        monkeypatch.setattr(sys, "executable", str(ROOT / ".venv/not yet/python"))
        monkeypatch.setattr(probe, "_PYTHONS", ("python3",))
    one = Machine(1, Host("a"), here=False)
    probe.look([one], "-p 22", os.environ, of_script=script)
    found = [problem.code for problem in one.problems]
    assert found == (codes if own else ["hosts.no_python"])
    if codes:
        (fix,) = one.problems[0].fixes
        words = shlex.split(fix)
        assert words[:4] == ["ssh", "-p", "22", "a"]
        assert words[4].startswith(f"cd {shlex.quote(str(ROOT))} && ./train_dual_gpu.sh ")


@pytest.mark.parametrize(
    ("rank", "elastic", "joins", "lone"),
    [
        (0, False, False, False),
        (1, False, False, False),
        (0, True, False, False),  # it coordinates the run
        (1, True, False, True),
        (0, True, True, True),  # another machine has taken over
    ],
)
def test_a_machine_that_the_run_can_lose_does_not_stop_it(
    monkeypatch: pytest.MonkeyPatch, rank: int, elastic: bool, joins: bool, lone: bool
) -> None:
    """Its agent sends no SIGTERM when its connection is lost: that would end the run for all. Here
    the order that it gets."""
    monkeypatch.setattr(node, "start", lambda *_: ["cat"])
    machine, place = Machine(rank, Host("a"), here=False), Topology(NODE, "hosts", "", nnodes=2)
    made = Node(machine, place, "x.sh", [], {}, "", elastic=elastic, joins=joins)
    try:
        assert made.output and json.loads(made.output.readline())["lone"] is lone
        made.becomes_first()
        assert json.loads(made.output.readline())["lone"] is False
    finally:
        made.close()
        wait_until(made.ended, 10)
