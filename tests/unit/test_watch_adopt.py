"""Hang detection of the ranks that a watched command has started (./duet watch)."""

from __future__ import annotations

import os

import pytest

from tests.unit.test_watch_samples import reduce
from tests.unit.test_watch_start import PLAN, run
from training.core.rundir import RunDir
from training.watchdog import discovery, stall_detector
from training.watchdog.hang_report import HANG, UNEVEN, HangFinding
from training.watchdog.probes.sampling import Sample
from training.watchdog.script_watchdog import ScriptWatch
from training.watchdog.start import RanksWatch

__all__ = ["run"]  # a fixture

WATCHED = {
    "script": {"path": "bash", "python": "python3"},
    "launcher": {"value": "watch", "reason": ""},
}


@pytest.fixture
def watched(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> tuple[RanksWatch, list[dict[int, int | None]]]:
    """A watched command whose rank 1 of two has ended, which is a finding once both were seen; the
    statuses that were passed on."""
    passed: list[dict[int, int | None]] = []

    def look(self: ScriptWatch, pids: object, ended: dict[int, int | None]) -> HangFinding | None:
        passed.append(ended)
        how = "has ended (status unknown), the others wait for it"
        return HangFinding(UNEVEN, 1, None, how, {}, {}, 4.0) if ended else None

    found = {0: os.getpid(), 1: 1}
    monkeypatch.setattr(ScriptWatch, "look", look)
    monkeypatch.setattr(
        discovery, "started_by", lambda pid, settled: discovery.Started(found, 2, 2)
    )
    monkeypatch.setattr("training.watchdog.start._lives", lambda pid: pid != 1 or len(passed) < 1)
    run.launcher_log("bash").write_text("ValueError: of an earlier attempt\n")
    return RanksWatch(run, PLAN | WATCHED, range(2), 2), passed


def test_the_status_of_a_rank_of_a_watched_command_is_unknown(
    run: RunDir, watched: tuple[RanksWatch, list[dict[int, int | None]]]
) -> None:
    watch, passed = watched
    assert watch.look({None: 7}, {}) is None
    with run.launcher_log("bash").open("a") as log:
        log.write(
            'Traceback (most recent call last):\n  File "/x/train.py", line 8, in <module>\n'
            "    open(path)\nFileNotFoundError: [Errno 2] No such file: 'data.bin'\n"
        )
    found = watch.look({None: 7}, {})
    assert passed == [{}, {1: None}]
    assert found and (found.kind, found.rank) == (HANG, 1)
    assert found.how == (
        "has ended (status unknown), the others wait for it; its last error in the log: "
        "FileNotFoundError: [Errno 2] No such file: 'data.bin'"
    )


def test_without_a_failure_in_its_log_the_finding_stays(
    watched: tuple[RanksWatch, list[dict[int, int | None]]],
) -> None:
    watch, _ = watched
    watch.look({None: 7}, {})
    found = watch.look({None: 7}, {})
    assert found and found.kind == UNEVEN and "in the log" not in found.how


@pytest.mark.parametrize("found", [{}, {0: 1, 1: 1}])
def test_a_search_without_a_result_is_reported_after_the_last_attempt(
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    found: dict[int, int],
) -> None:
    """Some ranks are only recognised when the others have settled."""
    clock, asked = [1000.0], list[bool]()
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr(ScriptWatch, "look", lambda self, pids, ended: None)

    def started_by(pid: int, settled: bool) -> discovery.Started:
        asked.append(settled)
        return discovery.Started(found, 2, 2, 1) if found and settled else discovery.Started({})

    monkeypatch.setattr(discovery, "started_by", started_by)
    watch = RanksWatch(run, PLAN | WATCHED, range(2), 2)
    clock[0] += 59.5
    watch.look({None: 7}, {})
    clock[0] += 0.7
    watch.look({None: 7}, {})
    assert asked == [False] and "no ranks found" not in capsys.readouterr().err
    clock[0] += 0.4
    watch.look({None: 7}, {})
    assert asked == [False, True]
    assert ("no ranks found" in capsys.readouterr().err) is not bool(found)
    assert watch._script and watch._script.joining is bool(found)
    assert not watch._script.others_elsewhere


def test_a_rank_that_has_ended_with_an_unknown_status() -> None:
    samples = [Sample(float(at), {0: reduce()}) for at in (0, 1)]
    found = stall_detector.detect_stall(samples, {1: None, 2: 7})
    assert isinstance(found, HangFinding) and (found.kind, found.rank) == (UNEVEN, 1)
    assert found.how == "has ended (status unknown), the others wait for it"
    found = stall_detector.detect_stall(samples, {1: None, 2: 0})
    assert isinstance(found, HangFinding) and found.how == (
        "has ended (status unknown); the others wait for the ranks that have ended: 1, 2"
    )
