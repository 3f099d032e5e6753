"""The last words of a rank whose data-loader worker was killed: torch's own, and whole."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from types import FrameType

import pytest

from training.trainer import error_file

KILLED = "DataLoader worker (pid 7) is killed by signal: Killed."


def handler(number: int, frame: FrameType | None) -> None:
    """As torch.utils.data has it."""
    raise RuntimeError(KILLED)


@pytest.fixture
def torchs_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGCHLD, handler)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("torchs_handler")
def test_a_broken_connection_waits_for_who_was_killed() -> None:
    with pytest.raises(RuntimeError, match="killed by signal"):  # the moment itself may be early
        child = subprocess.Popen(["sleep", "0.05"])
        lost = ConnectionResetError(104, "Connection reset by peer")
        told = error_file._last_word(lost)
        assert str(told) == KILLED and told.__context__ is lost
        raise told
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child.wait()


@pytest.mark.usefixtures("torchs_handler")
def test_nothing_is_raised_in_the_middle_of_what_is_written() -> None:
    error = ValueError("planted")
    assert error_file._last_word(error) is error
    assert subprocess.run(["true"], check=False).returncode == 0
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL
