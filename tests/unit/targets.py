"""Target processes: small Python programs in a known state, which end with their test."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import wait_until
from tests.unit.conftest import clean_environment
from training.watchdog.probes import procfs

LOCK = """
import threading

def helper():
    threading.Event().wait()

def takes_it_twice():
    lock = threading.Lock()
    lock.acquire()
    print("ready", flush=True)
    lock.acquire()

threading.Thread(target=helper, name="helper", daemon=True).start()
takes_it_twice()
"""
SPIN = """
def turns():
    count = 0
    while True:
        count += 1

print("ready", flush=True)
turns()
"""
GIL = """
import ctypes

def holds():
    ctypes.PyDLL(None).sleep(1000)

print("ready", flush=True)
holds()
"""
FORK = """
import os, time

def child():
    time.sleep(1000)

pid = os.fork()
if pid == 0:
    child()
print("ready", pid, flush=True)
time.sleep(1000)
"""


@contextlib.contextmanager
def running(
    folder: Path, program: str, *, env: dict[str, str] | None = None
) -> Iterator[tuple[int, Path, list[str]]]:
    """A process that has printed 'ready …': its pid, its file, its output. It and its descendants
    are killed at the end."""
    script = folder / "target.py"
    script.write_text(program)
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment() | (env or {}),
    )
    assert process.stdout
    output = process.stdout.readline().split()
    assert output, f"{script} did not start"
    try:
        yield process.pid, script, output
    finally:
        if process.poll() is None:  # a pool starts another process for each that is killed
            stopped(process.pid)
        for pid in [*procfs.family(process.pid), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def asleep(pid: int, function: str = "") -> None:
    """Wait until the main thread sleeps (in this kernel function)."""
    wait_until(
        lambda: (now := procfs.read_process(pid)) and now.state == "S" and function in now.waits_in,
        20,
        f"{pid} sleeps {function}",
    )


def stopped(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_until(
        lambda: (now := procfs.read_process(pid)) is None or now.state in "TZX",
        20,
        f"{pid} is stopped",
    )


def line_of(script: Path, text: str, function: str = "") -> int:
    """Number of the last line with this text in a program (in one of its functions)."""
    lines = list(enumerate(script.read_text().splitlines(), 1))
    if function:
        start = next(number for number, line in lines if line.startswith(f"def {function}("))
        end = next(
            (
                number
                for number, line in lines
                if number > start and line and not line.startswith(" ")
            ),
            len(lines) + 1,
        )
        lines = lines[start - 1 : end - 1]
    return max(number for number, line in lines if text in line)


# A rank without torch, in a known state. Its collective is in a file with the name of torch's.
COLLECTIVE = """
import threading

def all_reduce(place=0):
    lock = threading.Lock()
    lock.acquire()
    print("ready", flush=True)
    lock.acquire()
"""
LOADER = """
def _try_get_data(queue):
    return queue.get()
"""
RANK = """
import multiprocessing, os, socket, subprocess, sys, threading, time
sys.path[:0] = (os.path.dirname(__file__), os.path.dirname(__file__) + "/site-packages")
from torch.distributed.distributed_c10d import all_reduce

def ready():
    print("ready", flush=True)

def waits():
    all_reduce()

def waits_elsewhere():
    all_reduce()

def locks():
    lock = threading.Lock()
    lock.acquire()
    ready()
    lock.acquire()

def spins():
    ready()
    turns = 0
    while True:
        turns += 1

# as many as make it improbable that every look finds the same one
def first(n): return max(range(n))
def second(n): return max(range(n))
def third(n): return max(range(n))
def fourth(n): return max(range(n))
def fifth(n): return max(range(n))
def sixth(n): return max(range(n))
def seventh(n): return max(range(n))
def eighth(n): return max(range(n))

def works():
    ready()
    while True:
        for part in (first, second, third, fourth, fifth, sixth, seventh, eighth):
            part(3000)

def computes_in_c():
    import hashlib
    block = bytes(1 << 20)
    ready()
    while True:
        hashlib.sha256(block).digest()

def writes():
    ready()
    with open(__file__ + ".out", "wb", buffering=0) as file:
        while True:
            file.write(bytes(8192))
            file.seek(0)
            time.sleep(0.05)

def saves():
    end, other = os.pipe()
    ready()
    os.write(other, bytes(1 << 24))  # the kernel counts it after all of it is written

def uploads():
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    server.bind(("127.0.0.1", 0))
    server.listen()
    def receive():
        connection = server.accept()[0]
        while connection.recv(20000):
            time.sleep(0.05)
    threading.Thread(target=receive, daemon=True).start()
    client = socket.create_connection(server.getsockname())
    ready()
    client.sendall(bytes(1 << 30))

def compiles():
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    ready()
    child.wait()

def sleeps():
    ready()
    time.sleep(1000)

def stuck_in_the_dataset(barrier):
    lock = threading.Lock()
    lock.acquire()
    barrier.wait()
    lock.acquire()

def loads():
    from torch.utils.data.dataloader import _try_get_data
    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(2)
    fork.Process(target=stuck_in_the_dataset, args=(barrier,), daemon=True).start()
    barrier.wait()
    ready()
    _try_get_data(fork.Queue())

def asks():
    from concurrent.futures import ThreadPoolExecutor
    end, other = socket.socketpair()
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(end.recv, 1)
        ready()
        answer.result()

def tracks():
    from wandb import serves
    threading.Thread(target=serves, daemon=True).start()
    ready()
    threading.Event().wait()

globals()[sys.argv[1]]()
"""
TRACKER = """
import socket

def serves():
    end, other = socket.socketpair()
    end.recv(1)
"""


def tracker(folder: Path) -> None:
    """A package whose thread waits for another process all the time."""
    package = folder / "site-packages"
    package.mkdir()
    (package / "wandb.py").write_text(TRACKER)


@contextlib.contextmanager
def ranks(folder: Path, *roles: str) -> Iterator[tuple[dict[int, int], Path]]:
    """Ranks 0, 1, … in these roles, all running: rank → pid, and their script."""
    for name, text in {
        "distributed/distributed_c10d.py": COLLECTIVE,
        "utils/data/dataloader.py": LOADER,
    }.items():
        file = folder / "torch" / name
        file.parent.mkdir(parents=True)
        for package in (file.parent, *file.parent.parents):
            if package.is_relative_to(folder / "torch"):
                (package / "__init__.py").touch()
        file.write_text(text)
    tracker(folder)
    script = folder / "rank.py"
    script.write_text(RANK)
    started: list[subprocess.Popen[str]] = []
    try:
        for rank, role in enumerate(roles):
            variables = clean_environment() | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(len(roles)),
            }
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(os.getpid())}
            command = [sys.executable, "-u", str(script), role]
            started.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables)
            )
        for process in started:
            assert process.stdout and process.stdout.readline() == "ready\n"
        yield {rank: process.pid for rank, process in enumerate(started)}, script
    finally:
        for process in started:
            for pid in [*procfs.family(process.pid), process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
            assert process.stdout
            process.stdout.close()
