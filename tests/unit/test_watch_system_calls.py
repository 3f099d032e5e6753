"""What ends the wait of real processes."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.unit import targets
from training.watchdog.probes import procfs, system_calls
from training.watchdog.probes.sampling import take
from training.watchdog.probes.system_calls import CHILD, PEER, TIMEOUT

pytestmark = pytest.mark.skipif(
    os.uname().machine not in system_calls._NAMES, reason="unknown system calls"
)
READY = (
    "import os, socket, subprocess, threading, time\n{setup}\nprint('ready', flush=True)\n{wait}"
)


@pytest.mark.parametrize(
    ("setup", "wait", "by"),
    [
        ("", "time.sleep(1000)", TIMEOUT),
        ("", "threading.Event().wait(1000)", TIMEOUT),
        ("import asyncio", "asyncio.run(asyncio.sleep(1000))", TIMEOUT),
        ("a, b = socket.socketpair(); a.settimeout(1000)", "a.recv(1)", TIMEOUT),
        ("a, b = socket.socketpair()", "a.recv(1)", PEER),
        ("a = socket.create_server(('127.0.0.1', 0))", "a.accept()", PEER),
        ("import multiprocessing; a, b = multiprocessing.Pipe(duplex=False)", "a.recv()", PEER),
        ("", "subprocess.run(['sleep', '1000'])", CHILD),
        ("", "threading.Event().wait()", ""),
        ("import asyncio", "asyncio.new_event_loop().run_forever()", ""),
        ("a, b = os.pipe()", "while True: os.write(b, bytes(4096))", ""),
    ],
)
def test_what_ends_a_wait(tmp_path: Path, setup: str, wait: str, by: str) -> None:
    with targets.running(tmp_path, READY.format(setup=setup, wait=wait)) as (pid, _, _):
        targets.asleep(pid)
        wait_until(lambda: system_calls.ends_by(pid) == by, 20, by or "nothing")


SAVES = """
import threading, time

def save(file):
    time.sleep(1000) or file.write("")

saver = threading.Thread(target=save, args=(None,), daemon=True)
saver.start()
print("ready", flush=True)
saver.join()
"""


def test_a_main_thread_waits_for_one_that_saves(tmp_path: Path) -> None:
    with targets.running(tmp_path, SAVES) as (pid, *_):
        targets.asleep(pid)
        wait_until(
            lambda: (
                (main := (seen := take({0: pid}).looks[0]).main)
                and (main.frames[0].function, main.frames[-1].function, seen.ends_by)
                == ("save", "<module>", TIMEOUT)
            ),
            20,
            "the saver decides",
        )
        assert system_calls.ends_by(pid) == ""


def test_a_process_that_is_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
        assert system_calls.ends_by(process.pid) == ""


CONNECTS = """
import os, socket
there = socket.create_connection(("127.0.0.1", int(os.environ["PORT"])))
print("ready", flush=True)
there.recv(1)
"""


@pytest.mark.parametrize("rank", [True, False])
def test_a_connection_to_a_rank_is_not_to_another_process(tmp_path: Path, rank: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        with (
            targets.running(tmp_path, CONNECTS, env={"PORT": port}) as (pid, _, _),
            server.accept()[0],
        ):
            targets.asleep(pid)
            pids = {0: pid, 1: os.getpid()} if rank else {0: pid}
            if not procfs.open_files(pid) or not (look := take(pids).looks[0]).sockets:
                pytest.skip("the kernel does not report connections")
            assert look.ends_by == ("" if rank else PEER)
            assert len(look.outside) == (not rank)


def test_the_connection_to_torchs_store_is_not_to_another_process(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        env = {"PORT": port, "MASTER_PORT": port}
        with (
            targets.running(tmp_path, CONNECTS, env=env) as (pid, _, _),
            server.accept()[0],
        ):
            targets.asleep(pid)
            if not (look := take({0: pid}).looks[0]).sockets:
                pytest.skip("the kernel does not report connections")
            assert (look.ends_by, look.outside, look.group_sockets) == (
                "",
                frozenset(),
                frozenset(),
            )
            assert len(look.own_sockets) == 1


FLOCK = """
import fcntl, os
lock = open(os.environ["LOCK"], "w")
child = os.environ["CHILD"] and os.fork()
print("ready", flush=True)
child and os.waitpid(child, 0)
fcntl.flock(lock, fcntl.LOCK_EX)
"""


@pytest.mark.parametrize("child", ["", "1"], ids=["itself", "its_child"])
def test_the_lock_of_a_file_that_another_program_holds(tmp_path: Path, child: str) -> None:
    env = {"LOCK": str(tmp_path / "lock"), "CHILD": child}
    with (tmp_path / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with targets.running(tmp_path, FLOCK, env=env) as (pid, _, _):
            wait_until(lambda: take({0: pid}).looks[0].locked_out != "", 20)
            lock = take({0: pid}).looks[0].locked_out
            assert str(tmp_path / "lock") in lock and f"pid {os.getpid()})" in lock
            assert not take({0: pid, 1: os.getpid()}).looks[0].locked_out, "of a rank"
