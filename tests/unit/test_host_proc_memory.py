"""A process that holds the lock of its memory for ever, as one that is stuck in a driver."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import wait_until
from training.host import proc_memory, process
from training.watchdog.probes import procfs


@pytest.fixture
def stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The PID of a running process of which these files have no answer."""
    child = subprocess.Popen(["sleep", "60"], env=os.environ | {process.TOKEN: "stuck"})
    folder = tmp_path / str(child.pid)
    folder.mkdir()
    for name in ("cmdline", "environ", "maps"):
        os.mkfifo(folder / name)  # open() waits for a writer
    monkeypatch.setattr(proc_memory, "PROC", str(tmp_path))
    monkeypatch.setattr(proc_memory, "ANSWER_S", 0.05)
    monkeypatch.setattr(proc_memory, "_blocked", {})
    yield child.pid
    child.kill()
    child.wait()
    for file in folder.iterdir():  # the threads end
        os.close(os.open(file, os.O_RDWR | os.O_NONBLOCK))


def test_it_is_seen_and_counts_as_running(stuck: int) -> None:
    seen = procfs.read_process(stuck)
    assert seen and seen.command == "sleep" and not seen.exits
    assert procfs.environment(stuck) == {} and not procfs.maps(stuck, "libcuda")
    assert process.children(os.getpid()) >= {stuck}


def test_it_is_asked_again_only_after_a_while(stuck: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    for _ in range(3):
        with pytest.raises(proc_memory.Blocked):
            proc_memory.read(stuck, "cmdline")
    assert threading.active_count() <= before + 1
    file = Path(proc_memory.PROC, str(stuck), "cmdline")
    file.rename(file.with_name("before"))
    file.write_bytes(b"sleep\x0060\0")
    assert procfs.command(stuck) == "sleep", "its name: not yet"
    monkeypatch.setattr(proc_memory, "AGAIN_S", 0.0)
    assert procfs.command(stuck) == "sleep 60"


def test_each_thread_has_its_own_answers_and_leaves_no_thread() -> None:
    """The samples of a silent script are taken by a new thread each."""
    own, read = proc_memory.read(os.getpid(), "cmdline"), []
    before = threading.active_count()
    for _ in range(5):
        thread = threading.Thread(
            target=lambda: read.append(proc_memory.read(os.getpid(), "cmdline"))
        )
        thread.start()
        thread.join()
    assert read == 5 * [own] and b"python" in own
    wait_until(lambda: threading.active_count() <= before, 10, "the readers end")
    with pytest.raises(FileNotFoundError):
        proc_memory.read(0, "cmdline")
