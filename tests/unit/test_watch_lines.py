"""Output without progress: torch reports every ten seconds that it still waits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.test_watch_start import PLAN, SCRIPT
from training.core.rundir import RunDir
from training.watchdog import waiting_lines
from training.watchdog.script_watchdog import ScriptWatch
from training.watchdog.start import RanksWatch
from training.watchdog.waiting_lines import WaitingLines

VLLM = "No available shared memory broadcast block found in"
WAITS = (
    "[rank0]:[W1127 19:54:33.624071313 socket.cpp:469] [c10d] waitForInput: poll for socket "
    "SocketImpl(fd=15, addr=[::ffff:127.0.0.1]:38870) returned 0, likely a timeout\n"
    "[rank0]:[W1127 19:54:33.628123167 socket.cpp:494] [c10d] waitForInput: socket "
    "SocketImpl(fd=15, addr=[::ffff:127.0.0.1]:38870) timed out after 10002ms\n"
)


def test_a_log_that_is_rotated_meanwhile_is_not_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "rank0.log"
    log.write_text("step 1\n")
    lines = WaitingLines(tmp_path)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [log, tmp_path / "gone.log"])
    lines.remember()
    run = RunDir(tmp_path / "run")
    RanksWatch(run, PLAN | SCRIPT, range(2), 2)  # which looks where this attempt begins
    with log.open("a") as file:
        file.write(WAITS)
    assert lines.only() and lines.remembers
    sizes = {log: log.stat().st_size, tmp_path / "gone.log": 10}
    monkeypatch.setattr(waiting_lines, "log_sizes", lambda folder: sizes)
    assert not lines.only()


def test_a_report_of_torchs_store_is_not_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, heard = [1000.0], list[float]()
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr(ScriptWatch, "output", lambda self, at, training: heard.append(at))
    monkeypatch.setattr(ScriptWatch, "look", lambda self, pids, ended: None)
    run = RunDir(tmp_path)
    run.create()
    watch = RanksWatch(run, PLAN | SCRIPT, range(2), 2)
    pids = {0: os.getpid(), 1: os.getpid()}

    def prints(text: str, rank: int = 0) -> list[float]:
        """The output that counts, after ten seconds of silence before this one."""
        for _ in range(10):
            clock[0] += 1.0
            watch.look(pids, {})
        heard.clear()
        with run.rank_log(rank).open("a") as log:
            log.write(text)
        watch.output()
        clock[0] += 0.25
        watch.look(pids, {})
        return list(heard)

    assert prints("step 1 loss 0.5\n") == [1010.0]
    assert prints(WAITS) == [] and prints(WAITS) == []
    assert prints(f"INFO shm_broadcast.py:501] {VLLM} 60 seconds.\n") == []
    assert prints(f"{WAITS}evaluating\n") == [1051.0]
    assert prints(WAITS, 1) == []
    watch.output()
    assert heard == [], "read at the next look"
    assert prints("") == [1071.5], "the log cannot be written"
    heard.clear()
    watch.output()
    assert heard == [clock[0]], "at once, where lines follow each other"
