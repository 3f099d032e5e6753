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
from tests.unit.test_launch_fewer_machines import Line, node_plan
from tests.unit.test_launch_fewer_ranks import after, failed, figures, plan
from training.core.rundir import RunDir
from training.host import gpus
from training.launcher import fewer_ranks, gpu_trial, rejoin, replan
from training.launcher.rejoin import Rejoin, candidates
from training.launcher.restart import Team
from training.launcher.saved import Saved

WORKS = """
import os, sys
wrong = os.environ["CUDA_VISIBLE_DEVICES"] != "GPU-000000a1"
print("the reason" if wrong else "")
sys.exit(wrong)
"""


def lost(*seats: int, **config: Any) -> dict[str, Any]:
    """The plan of four ranks without these; their GPUs are not tested unless `rejoin`."""
    found = plan(4)
    found["config"] |= config
    for seat in seats:
        found = after(found, failed(found["elastic"]["seats"].index(seat)))
    return found


def ended(tests: Rejoin, made: dict[str, Any], saved: str) -> tuple[int, ...]:
    """The result of the tests that run."""
    back: list[tuple[int, ...]] = []

    def look() -> bool:
        back.append(tests.look(made, saved))  # type: ignore[arg-type]
        return not tests._trials

    wait_until(look, 20, "the tests")
    return back[-1]


def program(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(rejoin, "PROGRAM", (sys.executable, "-c", code))


def test_each_lost_gpu_is_tested_once_after_each_checkpoint(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    program(monkeypatch, WORKS)
    made, tests = lost(1, 2), Rejoin()
    tests.begin("step_20")
    assert tests.look(made, "step_20") == () and not tests._trials  # type: ignore
    assert tests.look(made, "step_40") == () and len(tests._trials) == 2  # type: ignore
    assert ended(tests, made, "step_40") == (1,), "each sees its own GPU alone"
    assert tests.look(made, "step_40") == () and not tests._trials  # type: ignore
    assert tests.look(made, "step_60") == ()  # type: ignore[arg-type]
    assert [trial.lost["seat"] for trial in tests._trials] == [2], "the other one works"
    assert ended(tests, made, "step_60") == ()
    assert capfd.readouterr().err.count("the reason") == 1


def test_a_test_that_never_ends_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    program(monkeypatch, "import time; time.sleep(3600)")
    made, tests = lost(1), Rejoin()
    tests.begin("")
    tests.look(made, "step_20")  # type: ignore[arg-type]
    (trial,) = tests._trials
    trial.until = time.monotonic()
    assert ended(tests, made, "step_20") == () and trial.popen.returncode is not None
    tests.look(made, "step_40")  # type: ignore[arg-type]
    (trial,) = tests._trials
    tests.close()
    assert trial.popen.returncode is not None and not tests._trials


def test_a_gpu_is_not_tested_again_while_a_test_cannot_be_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, tests, stuck = lost(1), Rejoin(), _Stuck()
    monkeypatch.setattr(rejoin, "_start", lambda lost: stuck)
    tests.begin("")
    tests.look(made, "step_20")  # type: ignore[arg-type]
    tests._trials[0].until = time.monotonic()
    assert ended(tests, made, "step_20") == ()
    assert tests.look(made, "step_40") == () and not tests._trials  # type: ignore[arg-type]
    stuck.status = -9
    tests.look(made, "step_40")  # type: ignore[arg-type]
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
    again["elastic"]["defective"] = []  # it came back with its machine
    (one,) = again["elastic"]["lost"]
    for cause, seats in (("gpu_hardware", [1]), ("killed", [])):
        one["cause"] = cause
        assert [found["seat"] for found in candidates(again)] == seats  # type: ignore[arg-type]


def test_a_machine_tests_its_own_gpus() -> None:
    """Whichever machine has noted the loss."""
    at_0, at_1 = (after(node_plan(node), failed(3)) for node in (0, 1))
    assert candidates(at_0) == []  # type: ignore[arg-type]
    for made in (at_1, {**at_1, "elastic": {**at_1["elastic"], "lost": at_0["elastic"]["lost"]}}):
        (one,) = candidates(made)  # type: ignore[arg-type]
        assert (one["seat"], one["gpu"], one["uuid"]) == (3, 1, "GPU-000000a1")


def test_what_other_machines_report_counts_while_they_are_connected() -> None:
    made: Any = after(after(node_plan(0), failed(3)), failed(1))
    assert rejoin.of_machine(made, 1, [3, 0, 99]) == {3}
    assert rejoin.of_machine(made, 1, {"3": 3}) == rejoin.of_machine(made, 1, 3) == set()
    line: Any = Line((), (), (1, 3, 4))
    assert rejoin.back(made, line) == [1, 3], "4 was not lost"
    line.away = (1,)
    assert rejoin.back(made, line) == [1]
    line.ready_again = (1,)
    assert rejoin.back(made, line) == [1, 3]


def test_a_script_has_saved_what_this_start_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "run")
    made: Any = {
        "command": {"cwd": str(tmp_path)},
        "script": {"path": "a.py", "args": []},
        "created": 0,
    }
    folder = tmp_path / "checkpoint-100"
    folder.mkdir()
    names = ("model.safetensors", "optimizer.pt", "trainer_state.json")
    model, optimizer, state = (folder / name for name in names)
    model.touch()
    os.utime(model, (1, 1))
    saved = Saved(run, made)
    assert saved.begin() == ""
    monkeypatch.setattr("training.launcher.saved.LOOK_S", -1)
    assert saved.newest() == ""
    # not os.utime(model): the clock of the kernel's file times is a few milliseconds late
    at = time.time()
    for number, path in enumerate((model, optimizer, state)):  # written one after the other
        path.touch()
        os.utime(path, (at + number,) * 2)
        assert (saved.newest(), saved.rests) == ("", False)
    first = saved.newest()
    assert saved.rests and first and saved.newest() == first
    os.utime(model, (at + 9,) * 2)  # over the last one
    assert (saved.newest(), saved.rests) == (first, False)
    assert saved.newest() not in ("", first) and saved.rests
    monkeypatch.setattr("training.launcher.saved.LOOK_S", 99)
    assert saved.newest() and not saved.rests, "it may be writing by now"


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


@pytest.mark.parametrize(("listed", "found"), [(1, ""), (0, "the driver does not list it")])
def test_a_driver_that_reports_no_state_is_not_against_a_gpu(
    listed: int, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before pynvml is installed."""
    one = gpus.Gpu(0, "GPU-0", "-", None, None, None, None, None)
    monkeypatch.setattr(gpus, "inventory", lambda environ: gpus.GpuInventory((one,) * listed, ""))
    monkeypatch.setattr(gpu_trial.gpu_state, "read_state", lambda every: ([], []))
    assert gpu_trial.wrong() == found
