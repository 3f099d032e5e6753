"""Tests of lost GPUs after each checkpoint (`--rejoin`)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cases import each
from tests.conftest import wait_until
from tests.unit.test_launch_fewer_ranks import after, failed, figures, plan
from training.core.rundir import RunDir
from training.launcher import fewer_ranks, rejoin, replan
from training.launcher.rejoin import Rejoin, candidates
from training.launcher.restart import Team

WORKS = """
import os, sys
wrong = os.environ["CUDA_VISIBLE_DEVICES"] != "GPU-000000a1"
print("the reason" if wrong else "")
sys.exit(wrong)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    return made


def save(run: RunDir, step: int) -> None:
    (run.checkpoints / f"step_{step:08d}").mkdir()


def lost(*seats: int, **config: Any) -> dict[str, Any]:
    """The plan of four ranks without these; their GPUs are not tested unless `rejoin`."""
    found = plan(4)
    found["config"] |= config
    for seat in seats:
        found = after(found, failed(found["elastic"]["seats"].index(seat)))
    return found


def ended(tests: Rejoin, made: dict[str, Any]) -> tuple[int, ...]:
    """The result of the tests that run."""
    back: list[tuple[int, ...]] = []

    def look() -> bool:
        back.append(tests.look(made))  # type: ignore[arg-type]
        return not tests._trials

    wait_until(look, 20, "the tests")
    return back[-1]


def program(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(rejoin, "PROGRAM", (sys.executable, "-c", code))


def test_each_lost_gpu_is_tested_once_after_each_checkpoint(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    program(monkeypatch, WORKS)
    made, tests = lost(1, 2), Rejoin(run)
    save(run, 20)
    tests.begin()
    assert tests.look(made) == () and not tests._trials, "no new checkpoint"  # type: ignore
    for step in (40, 60):
        save(run, step)
        assert tests.look(made) == () and len(tests._trials) == 2  # type: ignore
        assert ended(tests, made) == (1,), "each sees its own GPU alone"
        assert tests.look(made) == () and not tests._trials  # type: ignore
    assert capfd.readouterr().err.count("the reason") == 1


def test_a_test_that_never_ends_is_killed(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    program(monkeypatch, "import time; time.sleep(3600)")
    made, tests = lost(1), Rejoin(run)
    tests.begin()
    save(run, 20)
    tests.look(made)  # type: ignore[arg-type]
    (trial,) = tests._trials
    trial.until = time.monotonic()
    assert ended(tests, made) == () and trial.popen.returncode is not None
    save(run, 40)
    tests.look(made)  # type: ignore[arg-type]
    (trial,) = tests._trials
    tests.close()
    assert trial.popen.returncode is not None and not tests._trials


def test_a_gpu_is_not_tested_again_while_a_test_cannot_be_killed(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, tests, stuck = lost(1), Rejoin(run), _Stuck()
    monkeypatch.setattr(rejoin, "_start", lambda lost: stuck)
    tests.begin()
    save(run, 20)
    tests.look(made)  # type: ignore[arg-type]
    tests._trials[0].until = time.monotonic()
    assert ended(tests, made) == ()
    save(run, 40)
    assert tests.look(made) == () and not tests._trials  # type: ignore[arg-type]
    stuck.status = -9
    tests.look(made)  # type: ignore[arg-type]
    assert tests._trials, "the driver has let it go"


class _Stuck:
    """A process that waits in the driver."""

    stdout = None
    status: int | None = None

    def poll(self) -> int | None:
        return self.status

    def kill(self) -> None:
        """Without effect."""

    def wait(self, timeout: float) -> int:
        raise subprocess.TimeoutExpired("test", timeout)


def test_what_is_tested() -> None:
    assert [one["seat"] for one in candidates(lost(1, 2))] == [1, 2]  # type: ignore[arg-type]
    assert candidates(lost(1, rejoin=False)) == []  # type: ignore[arg-type]
    assert candidates(plan(4)) == []  # type: ignore[arg-type]
    again = grown(lost(1), 1)
    again = after(again, failed(1))
    assert candidates(again) == [], "lost a second time"  # type: ignore[arg-type]


def grown(made: dict[str, Any], *seats: int) -> dict[str, Any]:
    team = fewer_ranks.choose(made, (), seats)  # type: ignore[arg-type]
    assert isinstance(team, Team)
    return dict(replan.with_team(made, team, "back"))  # type: ignore[arg-type]


def test_a_gpu_that_is_back_has_its_old_rank() -> None:
    whole, found = plan(4), grown(lost(1, 3), 1)
    assert figures(found) == (3, 4, 4, [0, 1, 2])
    found = grown(found, 3)
    assert figures(found) == figures(whole)
    assert found["batch"] == whole["batch"] and found["elastic"]["lost"] == []


@each(
    ("state", "count", "fine"),
    [
        ({}, 2, True),
        ({}, 1, False),  # not listed
        ({"FAKE_NVML_ECC": "0,3"}, 2, False),
        ({"FAKE_NVML_ECC": "3,0"}, 2, True),  # another GPU
        ({"FAKE_NVML_REMAP": "0,1"}, 2, False),
    ],
    ids=str,
)
def test_what_the_driver_reports_against_a_gpu(
    state: dict[str, str], count: int, fine: bool, fake_driver: Path
) -> None:
    environ = {
        **os.environ,
        "LD_LIBRARY_PATH": str(fake_driver),
        "FAKE_NVML_COUNT": str(count),
        "CUDA_VISIBLE_DEVICES": "GPU-000000a1",
        **state,
    }
    code = "from training.launcher import gpu_trial; print(bool(gpu_trial.wrong()))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(not fine), done.stderr
