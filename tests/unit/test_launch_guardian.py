"""The guardian, which outlives a killed supervisor, must not delay the end of a finished run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import wait_until
from training.core.project import ROOT
from training.host import process
from training.launcher import reaper
from training.launcher.reaper import Guardian
from training.watchdog.probes import procfs, signal_masks


def test_a_stopped_guardian_is_continued() -> None:
    with Guardian() as token:
        pid = next(one for one in procfs.family(os.getpid()) if token in procfs.command(one))
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: (now := procfs.read_process(pid)) and now.state == "T")
        began = time.monotonic()
    assert procfs.read_process(pid) is None
    assert time.monotonic() - began < reaper.LEAVES_S, "it exited by itself"


def test_a_hang_up_does_not_end_the_guardian() -> None:
    """systemd sends it to every process of a session that it ends."""
    keeper = Guardian()
    with keeper as token:
        pid = next(one for one in procfs.family(os.getpid()) if token in procfs.command(one))
        wait_until(lambda: signal_masks.ignores(pid, signal.SIGTERM), 20, "it has started")
        os.kill(pid, signal.SIGHUP)
    assert keeper._popen.returncode == 0


def test_only_processes_of_the_launch_are_killed_whatever_their_environment() -> None:
    """Those around it run on, such as the guardian of a launch that started this one."""
    with Guardian() as outer, process.passing_on(outer), Guardian() as token:
        with process.passing_on(token):
            code = "env -i setsid sleep 1000 & sleep 1001 & exec sleep 1002"
            subprocess.Popen(["sh", "-c", code], env={}, start_new_session=True)
        with subprocess.Popen(["sleep", "1003"], env={}) as other:
            wait_until(lambda: len(process.marked(token)) == 3)
            assert list(process.marked(outer)) == [other.pid], "not the inner guardian"
            left = process.sweep(token)
            assert sorted(left.values()) == [f"sleep {n}" for n in (1000, 1001, 1002)]
            assert other.poll() is None and not process.marked(token)
            other.kill()


@pytest.mark.parametrize("hard", [1000, -1])
def test_without_the_limit_the_environment_is_used(hard: int) -> None:
    """A container may allow fewer file locks than the token."""
    token = process.new_token()
    code = f"""
import os, resource, subprocess, sys
sys.path.insert(0, {str(ROOT)!r})
from training.core.project import ROOT
from training.host import process
resource.setrlimit(process.RLIMIT_LOCKS, ({hard}, {hard}))
env = os.environ | {{process.TOKEN: {token!r}}}
with process.passing_on({token!r}), subprocess.Popen(["sleep", "1000"], env=env) as child:
    while child.pid not in process.marked({token!r}):
        pass
    print(process.sweep({token!r}) == {{child.pid: "sleep 1000"}})
assert resource.getrlimit(process.RLIMIT_LOCKS) == ({hard}, {hard})
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, timeout=60
    )
    assert done.stdout == b"True\n"


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


@pytest.mark.parametrize(("libraries", "status"), [("/libs", 0), ("/others", 127)])
def test_a_python_that_needs_its_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, libraries: str, status: int
) -> None:
    """Where the guardian cannot start all the same, its work is done at the end."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\n[ "$LD_LIBRARY_PATH" = /libs ] || exit 127\nexec "{sys.executable}" "$@"\n'
    )
    python.chmod(0o755)
    monkeypatch.setenv("LD_LIBRARY_PATH", libraries)
    monkeypatch.setattr(reaper.sys, "executable", str(python))
    keeper = Guardian()
    with keeper as token:
        env = {process.TOKEN: token}
        left = subprocess.Popen(["sleep", "1000"], env=env, start_new_session=True)
    assert keeper._popen.returncode == status and left.wait(10) == -signal.SIGKILL
