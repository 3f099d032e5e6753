"""The agent of one machine (lib/host_agent.py): which signals its command gets."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cases import each
from tests.conftest import TOKEN, wait_until
from training.core.project import ROOT
from training.launcher.hosts import ssh

AGENT = runpy.run_path(ssh.AGENT)
BEGIN_S = AGENT["BEGIN_S"]
COMMAND = """
import os, signal, sys
reader, writer = os.pipe()
os.set_blocking(writer, False)
signal.set_wakeup_fd(writer)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: None)
print("ready", flush=True)
while True:
    number = os.read(reader, 1)[0]
    print(number, flush=True)
    if number == signal.SIGINT:
        sys.exit(3)
"""


@dataclass
class Agent:
    process: subprocess.Popen[bytes]
    control: int
    out: Path

    def order(self, number: int) -> None:
        os.write(self.control, json.dumps({"signal": number}).encode() + b"\n")

    def shown(self, *lines: object) -> None:
        expected = "".join(f"{line}\n" for line in lines)
        wait_until(lambda: self.out.read_text() == expected, 10, expected)


@pytest.fixture
def agent(tmp_path: Path, token: str) -> Iterator[Agent]:
    """With the terminal of the launcher: in one process group with its command."""
    out = tmp_path / "out"
    reader, control = os.pipe()
    with out.open("wb") as file:
        process = subprocess.Popen(
            ssh.local_agent(str(reader)),
            pass_fds=[reader],
            stdout=file,
            env={**os.environ, TOKEN: token},
            start_new_session=True,
        )
    os.close(reader)
    order = {"folder": str(tmp_path), "command": [sys.executable, "-c", COMMAND], "environ": {}}
    began = time.monotonic()
    os.write(control, json.dumps(order).encode() + b"\n")
    made = Agent(process, control, out)
    made.shown("ready")
    wait_until(lambda: time.monotonic() - began > 2 * BEGIN_S, 10, "the start is over")
    yield made
    os.close(control)
    process.kill()
    process.wait()


def test_a_signal_to_the_whole_group_reaches_the_command_once(agent: Agent) -> None:
    """As by `timeout`, or the end of a systemd service."""
    os.killpg(agent.process.pid, signal.SIGTERM)
    agent.shown("ready", 15)
    agent.order(signal.SIGTERM)  # from the launcher, which is in the group too
    agent.order(signal.SIGINT)  # to the launcher alone
    assert agent.process.wait(10) == 3
    agent.shown("ready", 15, 2)


def test_each_signal_to_the_launcher_alone_is_passed_on(agent: Agent) -> None:
    agent.order(signal.SIGTERM)
    agent.shown("ready", 15)
    agent.order(signal.SIGTERM)
    agent.shown("ready", 15, 15)
    agent.order(signal.SIGINT)
    assert agent.process.wait(10) == 3


@pytest.mark.parametrize("here", [True, False])
def test_a_ctrl_c_that_was_ignored_at_the_start(tmp_path: Path, token: str, here: bool) -> None:
    """It stays ignored in the terminal's process group, and elsewhere the launcher decides."""
    shows = "import signal; print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)"
    order = {"folder": str(tmp_path), "command": [sys.executable, "-c", shows], "environ": {}}
    reader, control = os.pipe()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process = subprocess.Popen(
        ssh.local_agent(str(reader) if here else "0"),
        pass_fds=[reader],
        stdin=reader,
        stdout=subprocess.PIPE,
        env={**os.environ, TOKEN: token},
        start_new_session=True,
    )
    if here:
        stopped = Path(f"/proc/{process.pid}/status").read_text
        wait_until(lambda: "SigBlk:\t0000000000000000" not in stopped(), 10, "its start")
        os.killpg(process.pid, signal.SIGINT)
    os.write(control, json.dumps(order).encode() + b"\n")
    out, _ = process.communicate(timeout=30)
    os.close(reader)
    os.close(control)
    assert (process.returncode, out) == (0, f"{here}\n".encode())


@each(
    "name, value, kept",
    [
        ("NCCL_SOCKET_IFNAME", "=absent0", False),
        ("NCCL_SOCKET_IFNAME", "absent0,l", True),  # a prefix of lo
        ("NCCL_SOCKET_IFNAME", "=l", False),
        ("NCCL_SOCKET_IFNAME", "absent0,", False),
        ("NCCL_SOCKET_IFNAME", ",", True),  # names none
        ("NCCL_SOCKET_IFNAME", "=absent0,lo:1", True),
        ("NCCL_SOCKET_IFNAME", "^absent", True),
        ("GLOO_SOCKET_IFNAME", "l", False),
        ("GLOO_SOCKET_IFNAME", "lo", True),
        ("GLOO_SOCKET_IFNAME", "absent0,lo", False),  # Gloo needs all of them
        ("TP_SOCKET_IFNAME", "", True),
        ("MY_DATA", "absent0", True),
    ],
)
def test_a_network_interface_of_another_machine_is_not_used(
    name: str, value: str, kept: bool
) -> None:
    assert AGENT["meant_here"]({name: value, "A": "b"}).get(name) == (value if kept else None)


def test_the_own_network_interface_stays(tmp_path: Path, token: str) -> None:
    shows = "import os; print(os.environ['NCCL_SOCKET_IFNAME'], os.environ['A'])"
    order = {"folder": str(tmp_path), "command": [sys.executable, "-c", shows]}
    sent = {"NCCL_SOCKET_IFNAME": "=absent0", "A": "b"}
    done = subprocess.run(
        ssh.local_agent(),
        input=json.dumps({**order, "environ": sent, "lone": True}).encode() + b"\n",
        stdout=subprocess.PIPE,
        env={**os.environ, TOKEN: token, "NCCL_SOCKET_IFNAME": "=own0"},
        check=True,
    )
    assert done.stdout == b"=own0 b\n"


LONE = f"""
import signal, sys
sys.path.insert(0, {str(ROOT / "lib")!r})
import host_agent
host_agent.LONE = ((0.2, signal.SIGKILL),)
sys.exit(host_agent.run(0))
"""
FOLLOWS = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from training.host import hosts
if sys.argv[1] == "follows":
    hosts.outlive_launcher()
print("ready", flush=True)
while not os.path.exists(sys.argv[2]):
    time.sleep(0.01)
time.sleep(3)
sys.exit(3)
"""


@pytest.mark.parametrize(
    ("does", "alive", "status"),
    [
        ("stays", False, 137),
        ("follows", False, 3),
        ("follows", True, 137),  # only the connection to this machine is lost later
    ],
)
def test_a_machine_outlives_a_launcher_that_is_lost_with_the_coordinator(
    tmp_path: Path, token: str, does: str, alive: bool, status: int
) -> None:
    closed = tmp_path / "closed"
    command = [sys.executable, "-c", FOLLOWS, does, str(closed)]
    order = {"folder": str(tmp_path), "command": command, "environ": {}, "lone": True}
    process = subprocess.Popen(
        [sys.executable, "-c", LONE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, TOKEN: token},
    )
    assert process.stdin and process.stdout
    with process, process.stdin as control:
        control.write(json.dumps(order).encode() + b"\n")
        control.flush()
        assert process.stdout.readline() == b"ready\n"
        if alive:
            control.write(b"\n")
            control.flush()
            time.sleep(0.5)
        control.close()
        closed.touch()
    assert process.returncode == status
