"""Locks between processes, also of two users and of two machines."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import pytest

from training.core import file_lock


def refuse_opening(monkeypatch: pytest.MonkeyPatch, *modes: str) -> None:
    """As another user's file, or any in a folder that may only be read."""
    real = Path.open

    def opened(path: Path, mode: str = "r") -> object:
        if mode in modes:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, mode)

    monkeypatch.setattr(Path, "open", opened)


@pytest.mark.parametrize("call", ["flock", "fstat"])
def test_a_lock_file_that_another_machine_has_removed(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS the open file is stale then."""
    module = {"flock": file_lock.fcntl, "fstat": file_lock.os}[call]
    real, failed = getattr(module, call), list[str]()

    def stale(*given: int) -> object:
        if not failed:
            failed.append(call)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(*given)

    monkeypatch.setattr(module, call, stale)
    path = tmp_path / "lock"
    with file_lock.alone(path) as locked:
        assert locked and path.exists() and failed == [call]
    assert not path.exists()


def test_a_lock_file_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be read, but neither written nor removed, as in a sticky folder."""

    def refused(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    path = tmp_path / "lock"
    refuse_opening(monkeypatch, "a", "w")
    with pytest.raises(PermissionError), file_lock.alone(path):
        pass
    path.touch()
    monkeypatch.setattr(Path, "unlink", refused)
    for _ in range(2):
        with file_lock.alone(path) as locked:
            assert locked
            other = os.open(path, os.O_RDONLY)
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(other)
        assert path.exists()


@pytest.mark.parametrize("why", ["mode", "NFS"])
def test_a_lock_file_that_this_user_cannot_lock(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner may hold it."""

    def flock(*_: object) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    path = tmp_path / "lock"
    path.touch()
    refuse_opening(monkeypatch, "a", "w", *(["r"] if why == "mode" else []))
    monkeypatch.setattr(file_lock.fcntl, "flock", flock)
    with file_lock.alone(path) as locked:
        assert not locked
    assert path.exists()


def test_a_folder_is_held_for_other_machines_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS locks a folder for one machine only."""
    real = fcntl.flock

    def of_nfs(lock: IO[str] | int, operation: int) -> None:
        number = lock if isinstance(lock, int) else lock.fileno()
        if not stat.S_ISDIR(os.fstat(number).st_mode):
            real(lock, operation)

    monkeypatch.setattr(file_lock.fcntl, "flock", of_nfs)
    inside, most = 0, 0
    lock = threading.Lock()

    def hold() -> None:
        nonlocal inside, most
        with file_lock.held(tmp_path):
            with lock:
                inside += 1
                most = max(most, inside)
            time.sleep(0.02)
            with lock:
                inside -= 1

    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(hold) for _ in range(4)]:
            done.result()
    assert most == 1 and not list(tmp_path.iterdir())
