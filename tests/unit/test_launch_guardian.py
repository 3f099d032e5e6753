"""The guardian, which outlives a killed supervisor, must not delay the end of a finished run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import wait_until
from training.host import process
from training.launcher import reaper
from training.launcher.reaper import Guardian
from training.watchdog.probes import procfs


def test_a_stopped_guardian_is_continued() -> None:
    with Guardian() as token:
        pid = next(one for one in procfs.family(os.getpid()) if token in procfs.command(one))
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: (now := procfs.read_process(pid)) and now.state == "T")
        began = time.monotonic()
    assert procfs.read_process(pid) is None
    assert time.monotonic() - began < reaper.LEAVES_S, "it exited by itself"


def test_a_guardian_that_does_not_exit_is_killed_and_its_work_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reaper, "LEAVES_S", 0.3)
    keeper = Guardian()
    with (
        keeper as token,
        subprocess.Popen(
            ["sleep", "1000"], env={process.TOKEN: token}, start_new_session=True
        ) as left,
    ):
        real = keeper._popen
        keeper._popen = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        keeper.__exit__()
        assert keeper._popen.returncode == -signal.SIGKILL and left.wait(10) == -signal.SIGKILL
        keeper._popen = real
        _, keeper._writer = os.pipe()
