"""Error file of a rank whose data-loader worker was killed: torch's exception, complete."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from types import FrameType

import pytest

from training.trainer import error_file

KILLED = "DataLoader worker (pid 7) is killed by signal: Killed."


def handler(number: int, frame: FrameType | None) -> None:
    """The handler of torch.utils.data."""
    raise RuntimeError(KILLED)


@pytest.fixture
def torchs_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGCHLD, handler)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("torchs_handler")
def test_a_broken_connection_waits_for_the_killed_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        os.kill(
            os.getpid(), signal.SIGCHLD
        )  # the death of the worker is noticed while the rank waits

    monkeypatch.setattr(error_file.time, "sleep", sleep)
    lost = ConnectionResetError(104, "Connection reset by peer")
    found = error_file._final(lost)
    assert (str(found), found.__context__, waited) == (KILLED, lost, [error_file.SIGCHLD_S])
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL


@pytest.mark.usefixtures("torchs_handler")
def test_the_handler_is_removed_while_the_error_is_written() -> None:
    error = ValueError("planted")
    assert error_file._final(error) is error
    assert subprocess.run(["true"], check=False).returncode == 0
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL
