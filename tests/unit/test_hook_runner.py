"""A program after a run (training.launcher.hook_runner), with real processes and signals."""

from __future__ import annotations

import errno
import os
import signal
import tempfile

import pytest

from training.launcher import hook_runner
from training.launcher.stop_signals import StopSignals


@pytest.mark.parametrize(
    ("name", "stopped"), [("USR2", False), ("TERM", True)], ids=["of the script", "a stop request"]
)
def test_signals_during_a_hook(name: str, stopped: bool) -> None:
    """SIGUSR2 has a meaning for the script of a run alone."""
    program = f"kill -{name} $0; sleep 0.3; echo done"
    before = signal.getsignal(signal.SIGTERM)
    try:
        wrong, output = hook_runner.run(
            ["bash", "-c", program, str(os.getpid())], os.environ, b"", 30.0, StopSignals()
        )
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    assert (bool(wrong), output.strip()) == ((True, "") if stopped else (False, "done"))


@pytest.mark.parametrize("size", [0, 1, 1 << 16, (1 << 16) + 1])
def test_the_input_needs_a_disk_only_if_it_is_large(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk may be what --notify reports. A program that does not read it blocks nothing."""

    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if size <= 1 << 16:
        monkeypatch.setattr(tempfile, "TemporaryFile", full)
    for program, found in (("wc -c", str(size)), ("true", "")):
        wrong, output = hook_runner.run(
            ["bash", "-c", program], os.environ, b"x" * size, 30.0, StopSignals()
        )
        assert (wrong, output.strip()) == ("", found)
