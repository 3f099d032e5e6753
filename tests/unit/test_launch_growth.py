"""A start that ends because a lost GPU works again, and what follows it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.cases import each
from tests.unit.test_launch_fewer_ranks import failed, figures
from tests.unit.test_launch_recovery import run
from tests.unit.test_launch_rejoin import lost
from training.core.errors import Exit
from training.core.rundir import RunDir, read_json, read_records, write_json
from training.launcher import failure_report
from training.launcher.attempt import Attempt
from training.launcher.growth import Growth
from training.launcher.outcome import Outcome
from training.launcher.recovery import Recovery
from training.launcher.recovery_policy import remedy
from training.launcher.restart import Restart

__all__ = ["run"]  # a fixture


class Tests:
    """The tests of lost GPUs: all work."""

    def begin(self, saved: str) -> None: ...
    def close(self) -> None: ...
    def look(self, plan: Any, saved: str) -> tuple[int, ...]:
        return tuple(one["seat"] for one in plan["elastic"]["lost"])


def growth(run: RunDir, plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Growth:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # restored at the end of the test
    write_json(run.plan, plan)
    made = Growth(Recovery(run, plan))  # type: ignore[arg-type]
    made._rejoin = cast("Any", Tests())
    return made


def attempt(
    made: Growth,
    outcome: Outcome,
    *,
    ending: bool = False,
    meanwhile: Callable[[list[str]], None] = lambda done: None,
    passes: int = 2,
) -> list[str]:
    """One start, in which the tests have ended; what the ranks were asked for."""
    asked: list[str] = []

    def stop() -> None:
        asked.append("stop")
        outcome.resized = True

    one = SimpleNamespace(outcome=outcome, stop=SimpleNamespace(for_other_ranks=stop))
    one.ending = lambda: ending

    def go() -> Outcome:
        for _ in range(passes):
            meanwhile(asked)
            one.each_pass()
        return outcome

    one.go = go
    made.attempt(cast("Attempt", one))
    return asked


def test_the_ranks_are_stopped_once_and_started_with_the_gpu(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = lost(1)
    made, outcome = growth(run, plan, monkeypatch), Outcome()
    write_json(run.summary, {"status": "stopped"})
    assert attempt(made, outcome) == ["stop"]
    assert made.grows(outcome, Exit.PREEMPTED)
    assert figures(plan) == (4, 4, 3, [0, 1, 2, 3])
    assert (read_json(run.plan) or {})["elastic"] == plan["elastic"]
    assert (plan["elastic"]["lost"], plan["elastic"]["rejoined"]) == ([], [1])
    (event,) = [r for r in read_records(run.events) if r["event"] == "restart"]
    assert (event["ranks"], event["back"], event["steps_lost"]) == ([3, 4], [1], 0)
    assert event["resumes_at"] == 20 and not run.summary.exists()
    assert not made.grows(Outcome(), Exit.PREEMPTED), "once"


def test_a_script_is_not_stopped_while_it_saves(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped between two checkpoints, also if the test of the GPU has ended before."""
    monkeypatch.setattr("training.launcher.saved.LOOK_S", -1)
    plan = lost(1)
    plan |= {"script": {"path": "a.py", "args": []}, "command": {"cwd": str(tmp_path)}}
    made = growth(run, plan, monkeypatch)
    answers = iter([(1,)])
    made._rejoin.look = lambda plan, saved: next(answers, ())  # type: ignore[method-assign]

    def script(done: list[str]) -> None:
        if len(done) < 3:
            done.append("write")
            (tmp_path / "last.pt").touch()
            os.utime(tmp_path / "last.pt", (time.time() + len(done),) * 2)

    done = attempt(made, Outcome(), meanwhile=script, passes=6)
    assert done == ["write"] * 3 + ["stop"]


@each(
    ("outcome", "code"),
    [
        (Outcome(), Exit.DONE),  # finished meanwhile
        (Outcome(asked=Exit.INTERRUPTED), Exit.INTERRUPTED),
        (Outcome(asked=Exit.PREEMPTED), Exit.PREEMPTED),  # by a signal to the run
        (Outcome(guilty=(1, 1)), Exit.TRAINING),
    ],
    ids=str,
)
def test_other_ends_are_not_followed_by_more_ranks(
    outcome: Outcome, code: Exit, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = lost(1)
    made = growth(run, plan, monkeypatch)
    attempt(made, outcome)
    assert not made.grows(outcome, code)
    assert plan["ranks"] == 3


@each(
    "outcome",
    [
        Outcome(asked=Exit.INTERRUPTED),
        Outcome(asked=Exit.PREEMPTED),
        Outcome(guilty=(1, 1), failed_at=1.0),
    ],
    ids=str,
)
def test_ranks_that_stop_or_fail_are_not_asked_to_restart(
    outcome: Outcome, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = growth(run, lost(1), monkeypatch)
    assert attempt(made, outcome) == []


def test_ranks_that_have_completed_their_last_step_are_not_asked_to_restart(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = growth(run, lost(1), monkeypatch)
    assert attempt(made, Outcome(), ending=True) == []
    assert attempt(made, Outcome()) == ["stop"]


def test_a_stop_request_decides_the_exit_code_of_ranks_that_restart() -> None:
    ended: list[tuple[int | None, int]] = [(0, 75), (1, 75)]
    assert failure_report.exit_code(Outcome(resized=True, ended=ended)) == 75
    asked = Outcome(resized=True, asked=Exit.INTERRUPTED, ended=ended)
    assert failure_report.exit_code(asked) == 130
    asked.ended = [(0, 0), (1, 0)]
    assert failure_report.exit_code(asked) == 0, "finished meanwhile"


def test_after_more_ranks_a_rank_is_not_the_one_that_failed_before(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 was the third GPU, and is the second one again."""
    plan = lost(1)
    made = growth(run, plan, monkeypatch)
    recovery = made.recovery
    recovery._failures = [failed(1, "killed", 22)]
    attempt(made, outcome := Outcome())
    assert made.grows(outcome, Exit.PREEMPTED)
    chosen = remedy(failed(1, "killed", 33), plan, recovery._failures)  # type: ignore[arg-type]
    assert isinstance(chosen, Restart) and chosen.team is None


def test_a_gpu_without_a_use_replaces_the_next_lost_one(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight sequences: two ranks of three."""
    plan = lost(1, 2)
    plan["config"]["total_batch_size"] = 8 * 32
    plan["batch"]["accumulation"] = 1
    made, outcome = growth(run, plan, monkeypatch), Outcome()
    plan["elastic"]["lost"] = plan["elastic"]["lost"][:1]
    plan["elastic"]["seats"] = [0, 2]
    assert attempt(made, outcome) == ["stop"], "four ranks can divide it"
    plan["elastic"]["min_ranks"], plan["config"]["total_batch_size"] = 1, 2 * 32
    plan["elastic"]["device_batch_size"] = plan["batch"]["device_sequences"] = 1
    assert attempt(made, Outcome()) == []
    assert plan["elastic"]["lost"] == [] and plan["ranks"] == 2
