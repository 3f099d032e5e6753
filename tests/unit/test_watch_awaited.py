"""What ends the wait of a main thread for another thread, or for the processes of a pool."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.unit import targets
from tests.unit.test_watch_scripts import FLOOR_S, stuck
from training.watchdog import loader_workers, pool_workers, script_watchdog
from training.watchdog.hang_report import HANG
from training.watchdog.probes import procfs, system_calls
from training.watchdog.probes.sampling import take
from training.watchdog.probes.system_calls import CHILD, PEER, TIMEOUT
from training.watchdog.probes.trace import RankTrace, courses

pytestmark = pytest.mark.skipif(
    os.uname().machine not in system_calls._NAMES, reason="unknown system calls"
)
PROGRAM = """
import asyncio, multiprocessing, os, select, socket, subprocess, sys, threading, time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing.pool import Pool, ThreadPool
sys.path.insert(0, os.path.dirname(__file__) + "/site-packages")
from wandb import serves

server = socket.create_server(("127.0.0.1", 0))
lock = threading.Lock()
lock.acquire()

def ask(seconds=None):
    service = socket.create_connection(server.getsockname())
    service.settimeout(seconds)
    service.recv(1)

def locks(_=None):
    lock.acquire()

async def sleeps():
    await asyncio.sleep(1000)

def background(function, *args):
    thread = threading.Thread(target=lambda: function(*args), daemon=True)
    thread.start()
    return thread

def named(name):
    with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as file:
        file.write(name)
    lock.acquire()

def polls():
    poll = select.poll()
    poll.register(os.eventfd(0), select.POLLIN)
    poll.poll()

pool = ThreadPoolExecutor(3)
forever = threading.Event()
"""


@pytest.mark.parametrize(
    ("code", "by"),
    [
        ("pool.submit(ask).result()", PEER),
        ("list(pool.map(ask, [1000, 1000]))", TIMEOUT),
        ("pool.submit(time.sleep, 1000).result()", TIMEOUT),
        ("ThreadPool(2).map(ask, [None])", PEER),
        ("asyncio.run(asyncio.to_thread(ask))", PEER),
        ("background(ask).join()", PEER),
        ("background(ask, 1000).join()", TIMEOUT),
        ("background(subprocess.run, ['sleep', '1000']).join()", CHILD),
        ("subprocess.run(['sleep', '1000'], capture_output=True)", CHILD),
        ("background(named, 'ZMQbg/IO/0'); polls()", PEER),
        ("polls()", ""),
        # deadlocks beside threads in the background
        ("background(ask); lock.acquire()", ""),
        ("threading.Thread(target=serves, daemon=True).start(); forever.wait()", ""),
        ("background(time.sleep, 1000); forever.wait()", ""),
        ("background(asyncio.run, sleeps()); forever.wait()", ""),
        ("pool.submit(int).result(); forever.wait()", ""),
        ("pool.submit(locks).result()", ""),
        ("ThreadPool(2).map(locks, [1])", ""),
        ("asyncio.run(asyncio.to_thread(locks))", ""),
        ("background(pool.submit(int).result); asyncio.new_event_loop().run_forever()", ""),
    ],
)
def test_what_ends_a_wait_for_a_thread(tmp_path: Path, code: str, by: str) -> None:
    targets.tracker(tmp_path)
    program = f"{PROGRAM}\nprint('ready', flush=True)\n{code}"
    with targets.running(tmp_path, program) as (pid, *_):
        targets.asleep(pid)
        wait_until(lambda: take({0: pid}).looks[0].ends_by == by, 20, by or "nothing")


def trace(pid: int) -> RankTrace:
    return courses([take({0: pid}), take({0: pid})])[0]


@pytest.mark.parametrize(
    ("code", "ends"),
    [
        ("Pool(2).map(ask, [None])", True),
        ("Pool(2).map(ask, [1000])", True),
        ("ProcessPoolExecutor(2).submit(ask).result()", True),
        ("Pool(2).map(locks, [None])", False),
        ("ProcessPoolExecutor(2).submit(locks).result()", False),
        ("started = Pool(2); started.map(abs, [1]); forever.wait()", False),
    ],
)
def test_what_ends_a_wait_for_a_pool(tmp_path: Path, code: str, ends: bool) -> None:
    """Its idle processes wait for tasks at the other end of a pipe."""
    targets.tracker(tmp_path)
    program = f"multiprocessing.set_start_method('fork')\nprint('ready', flush=True)\n{code}"
    with targets.running(tmp_path, f"{PROGRAM}\n{program}") as (pid, *_):
        targets.asleep(pid, "futex")
        wait_until(lambda: len(procfs.workers(pid)) == 2, 20, "the processes")
        for worker in procfs.workers(pid):
            targets.asleep(worker)
        wait_until(lambda: pool_workers.may_end(trace(pid)) == ends, 20, str(ends))


@pytest.mark.parametrize(("function", "ends"), [("ask", True), ("locks", False)])
def test_a_data_loader_worker_that_waits_for_a_thread(
    tmp_path: Path, function: str, ends: bool
) -> None:
    targets.tracker(tmp_path)
    work = f"lambda: ThreadPoolExecutor().submit({function}).result()"
    program = (
        "child = multiprocessing.get_context('fork').Process(target={})\n"
        "child.start()\nprint('ready', child.pid, flush=True)\nchild.join()"
    )
    with targets.running(tmp_path, f"{PROGRAM}\n{program.format(work)}") as (pid, _, output):
        wait_until(lambda: len(procfs.threads_of(int(output[1]))) == 2, 20, "the thread")
        targets.asleep(int(output[1]), "futex")
        wait_until(lambda: loader_workers.may_end(trace(pid)) == ends, 20, str(ends))


@pytest.mark.parametrize(("role", "slow"), [("asks", True), ("tracks", False)])
def test_a_rank_that_waits_for_a_service_in_a_thread(tmp_path: Path, role: str, slow: bool) -> None:
    with targets.ranks(tmp_path, role, "waits") as (pids, _):
        begin, found = time.monotonic(), stuck(pids)
    assert (found.kind, found.rank, found.may_end) == (HANG, 0, slow)
    if slow:
        assert time.monotonic() - begin > script_watchdog.ALONE_TIMES * FLOOR_S
