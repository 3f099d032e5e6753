"""The time of a step before and after a restart with another number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.unit.monitor_runs import Made, look
from training.core.contracts.events import RestartFacts
from training.core.heartbeat import Heartbeat
from training.core.rundir import RunDir, read_records
from training.launcher.resumption import Resumption


def train(run: RunDir, first: int, last: int, step_ms: float, ranks: int = 1) -> None:
    """A start that has trained these steps; the first ones are slower."""
    with run.metrics.open("a") as file:
        for step in range(first, last + 1):
            slow = 50 if step < first + 2 else 0
            record = {"step": step, "loss": 1.0, "step_ms": step_ms + slow}
            file.write(json.dumps(record | {"compute_ms": [33.25] * ranks}) + "\n")
        file.write(json.dumps({"step": last, "eval_ms": 7.0}) + "\n")
    beat = Heartbeat(run.heartbeat(0), 0)
    for beat.step in (first, last):
        beat.beat("forward")


def events(run: RunDir, kind: str) -> list[dict[str, Any]]:
    return [r for r in read_records(run.events) if r["event"] == kind]


def restart(attempt: int, step: int, saved: int) -> RestartFacts:
    """After a failure in `step`, with this newest checkpoint."""
    return {
        "attempt": attempt,
        "cause": "unknown",
        "kind": "died",
        "rank": 0,
        "step": step,
        "resumes_at": saved,
        "steps_lost": step - saved,
        "seconds_lost": 0.0,
        "changes": {},
        "text": "restarted",
    }


def test_a_skipped_checkpoint_corrects_the_restart(made: Made) -> None:
    """The newest one was damaged: its manifest is valid, its weights are not."""
    watched, planned, damaged = Resumption(made.run), restart(2, 11, 8), restart(3, 11, 8)
    watched.begin(planned, 0.0, (1, 1))
    train(made.run, 9, 10, 100.0)
    watched.look()
    assert planned == restart(2, 11, 8)
    watched.begin(damaged, 0.0, (1, 1))
    train(made.run, 5, 7, 100.0)
    watched.look()
    assert (damaged["resumes_at"], damaged["steps_lost"]) == (4, 7)
    found = events(made.run, "recovered")
    assert [(e["step"], e["resumes_at"], e["steps_lost"]) for e in found] == [(9, 8, 3), (5, 4, 7)]
    assert "text" not in found[0]
    shown = [warning["text"] for warning in look(made.run)["warnings"]]
    assert shown == [found[1]["text"]] and damaged["text"].endswith(shown[0])


def test_each_start_is_compared_with_the_one_before(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    watched = Resumption(run)
    train(run, 1, 60, 100.0)
    watched.look()
    assert not events(run, "recovered"), "no restart"
    watched.begin(restart(2, 60, 50), 0.0, (4, 2))
    assert not watched.trains
    train(run, 51, 53, 180.0)
    watched.look()
    assert watched.trains and [e["step"] for e in events(run, "recovered")] == [51]
    train(run, 51, 90, 180.0)
    watched.look()
    watched.look()
    (pace,) = events(run, "pace")
    assert (pace["ranks"], pace["step_ms"]) == ([4, 2], [100.0, 180.0])
    assert (pace["slowdown"], pace["expected_slowdown"]) == (1.8, 2.0)
    watched.begin(restart(3, 90, 90), 0.0, (2, 4))
    train(run, 91, 110, 100.0)
    watched.look()
    assert events(run, "pace")[-1]["step_ms"] == [180.0, 100.0]
    # two failures without a step between them: nothing to compare with
    watched.begin(restart(4, 110, 110), 0.0, (4, 3))
    watched.begin(restart(5, 110, 110), 0.0, (3, 2))
    train(run, 111, 140, 150.0)
    watched.look()
    assert len(events(run, "pace")) == 2 and len(events(run, "recovered")) == 3


def test_records_of_many_ranks_are_long(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    watched = Resumption(run)
    train(run, 1, 20, 100.0, ranks=4096)
    watched.begin(restart(2, 20, 20), 0.0, (4096, 2048))
    train(run, 21, 40, 180.0, ranks=2048)
    watched.look()
    assert [one["step_ms"] for one in events(run, "pace")] == [[100.0, 180.0]]
