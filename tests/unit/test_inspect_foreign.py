"""Health check of trainings of other launchers: real processes in known states."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.cases import each
from tests.conftest import wait_until
from tests.unit import targets
from training.core.errors import Exit
from training.core.messages import msg
from training.core.rundir import RunDir, write_json
from training.monitor.health import activity, health, progress_checks, render, target
from training.monitor.health.activity import ActivityWindow, RankActivity
from training.monitor.health.check import BAD, OK, UNKNOWN, HealthCheck
from training.monitor.health.target import Target, of_process
from training.watchdog import stall_detector
from training.watchdog.hang_report import BLIND, HangFinding, NoFinding
from training.watchdog.probes import procfs
from training.watchdog.probes.sampling import ProcessSample, Sample
from training.watchdog.probes.stacks import Frame, Stack, Thread
from training.watchdog.probes.trace import courses


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("LEAST_S", 0.1), ("LOOK_S", 0.4), ("MORE_S", 0.4), ("EVERY_S", 0.02)):
        monkeypatch.setattr(activity, name, seconds)


def test_only_known_variables_are_taken_from_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "a secret value")
    with targets.ranks(tmp_path, "works", "works") as (pids, _):
        report = health.of_process(pids[0])
    assert report.answer == "yes" and "a secret value" not in str(render.record(report)) + "".join(
        render.screen(report)
    )


def test_training_of_another_launcher(tmp_path: Path) -> None:
    with targets.ranks(tmp_path, "locks", "waits") as (pids, script):
        report = health.of_process(pids[1])
        target = of_process(pids[0])
    place = f"{script}:{targets.line_of(script, 'lock.acquire()', 'locks')} (locks)"
    assert (report.answer, report.code) == ("no", Exit.HANG)
    assert report.text.startswith("rank 0 ") and f"{place}, for " in report.text
    assert (report.ranks[1]["waits_in"], report.ranks[0]["where"]) == ("all_reduce", place)
    assert (
        target.pids,
        target.world,
        target.here,
        target.beats,
        target.missing,
        target.elsewhere,
    ) == (pids, 2, 2, False, (), ())


def test_one_rank_works_and_the_other_waits(tmp_path: Path) -> None:
    with targets.ranks(tmp_path, "works", "waits") as (pids, _):
        report = health.of_process(pids[1])
    assert (report.answer, report.code) == ("unknown", Exit.RESOURCES) and report.text.startswith(
        "one of them works: rank 0 is at "
    )


def test_missing_rank_of_another_launcher(tmp_path: Path) -> None:
    with targets.ranks(tmp_path, "works", "works", "works") as (pids, _):
        os.kill(pids[2], signal.SIGKILL)
        wait_until(
            lambda: (now := procfs.read_process(pids[2])) is None or now.state == "Z",
            20,
            "it is gone",
        )
        report = health.of_process(pids[0])
    assert (report.answer, report.code, report.text) == ("no", Exit.HANG, "rank 2 has no process")
    assert report.ranks[2]["pid"] is None


def test_ranks_of_several_machines() -> None:
    here = Target(
        None,
        {},
        {2: 10, 3: 11},
        6,
        2,
        "WORLD_SIZE",
        {2: {"LOCAL_RANK": "0"}, 3: {"LOCAL_RANK": "1"}},
    )
    assert (here.elsewhere, here.missing, here.local(3)) == ((0, 1, 4, 5), (), 1)
    assert Target(None, {}, {3: 11}, 6, 2, "WORLD_SIZE", {3: {"LOCAL_RANK": "1"}}).missing == (2,)


# Simulated, since the test machines lack them: waits for a GPU, uninspectable processes.


def on_gpu(
    script: Path,
    verdict: HangFinding | str = "",
    gpus: dict[int, dict[str, Any]] | None = None,
    *,
    logs_on: bool = False,
    call: Frame | None = None,
    other: Frame | None = None,
    uses_gpu: bool = True,
    cpu: float = 0.0,
) -> HealthCheck:
    """Two ranks, both in the same `call`, by default a line that waits for a GPU, in two
    samples. `other`: that of rank 1; `cpu`: seconds of computation between the samples."""
    script.write_text("print(loss.item())\n")
    frame = call or Frame(str(script), 1, "step")

    def seen(at: int, here: Frame) -> ProcessSample:
        used = 10.0 + at * cpu
        process = procfs.Process(1, 0, "R", "python train.py", used, used, 1000, "")
        threads = (Thread("MainThread", True, True, False, (here,)),)
        return ProcessSample(process, Stack(1, "py-spy", threads), uses_gpu)

    samples = [
        Sample(float(at), {0: seen(at, frame), 1: seen(at, other or frame)}) for at in (0, 1)
    ]
    motions = {
        rank: RankActivity(rank, 1, states="RR", cpu=1.0, course=course)
        for rank, course in courses(samples).items()
    }
    return progress_checks.of_processes(
        ActivityWindow(motions, 1.0, samples),
        verdict or stall_detector.detect_stall(samples, {}),
        gpus or {},
        logs_on=logs_on,
    )


def test_all_ranks_wait_for_their_gpus(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    found = on_gpu(script)
    assert (found.status, found.shown_headline) == (
        UNKNOWN,
        "all ranks have waited for their GPUs at the same line for 1 s: check again later",
    )
    gpu = {"index": 0, "use_percent": 100, "power_w": 431.0, "power_limit_w": 575.0}
    assert on_gpu(script, gpus={0: gpu, 1: gpu}).status == OK
    spins = gpu | {
        "power_w": 90.0
    }  # a kernel that waits for the other rank has full utilization too
    assert on_gpu(script, gpus={0: gpu, 1: spins}).status == UNKNOWN
    assert on_gpu(script, logs_on=True).status == OK


@each(
    ("call", "uses_gpu", "power_w", "status"),
    [
        (("torch/autograd/graph.py", "_engine_run_backward"), True, 431.0, OK),
        (("torch/autograd/graph.py", "_engine_run_backward"), True, 90.0, UNKNOWN),
        (("torch/distributed/distributed_c10d.py", "barrier"), True, 431.0, OK),
        (("torch/distributed/distributed_c10d.py", "barrier"), True, 90.0, BAD),
        (("torch/distributed/distributed_c10d.py", "barrier"), False, 431.0, BAD),
        (("torch/distributed/distributed_c10d.py", "all_reduce"), True, 431.0, BAD),
    ],
)
def test_a_backward_or_barrier_waits_for_the_gpu_that_computes(
    call: tuple[str, str], uses_gpu: bool, power_w: float, status: str, tmp_path: Path
) -> None:
    gpu = {"index": 0, "use_percent": 100, "power_w": power_w, "power_limit_w": 575.0}
    at = Frame(f"/u/site-packages/{call[0]}", 800, call[1])
    found = on_gpu(tmp_path / "train.py", gpus={0: gpu, 1: gpu}, call=at, uses_gpu=uses_gpu)
    assert found.status == status


FORWARD = Frame("/u/site-packages/torch/nn/modules/linear.py", 125, "forward")
OPTIMIZER = Frame("/u/site-packages/torch/optim/adamw.py", 5, "_multi_tensor_adamw")


@each("other", [FORWARD, OPTIMIZER])
@each(("power_w", "status"), [(431.0, OK), (90.0, UNKNOWN)])
def test_launches_may_wait_for_a_place_in_the_queue_of_the_gpu(
    other: Frame, power_w: float, status: str, tmp_path: Path
) -> None:
    """As usual where the script runs ahead of its GPU."""
    gpu = {"index": 0, "use_percent": 100, "power_w": power_w, "power_limit_w": 575.0}
    script = tmp_path / "train.py"
    gpus = {0: gpu, 1: gpu}
    assert on_gpu(script, gpus=gpus, call=FORWARD, other=other, cpu=1.0).status == status


def test_uninspectable_processes(tmp_path: Path) -> None:
    blind = NoFinding(BLIND, "no stack of rank 0: process 1 may not be inspected")
    found = on_gpu(tmp_path / "train.py", blind)
    assert found.status == UNKNOWN
    assert found.shown_headline.endswith("process 1 may not be inspected")


@each(
    ("cpu", "bytes_read", "idle"),
    [
        (0.01, 0, (0, 1)),  # a thread of it polls
        (1.0, 0, ()),
        (0.01, 1 << 20, ()),
    ],
)
def test_a_process_of_another_user_is_at_work_by_evidence_alone(
    cpu: float, bytes_read: int, idle: tuple[int, ...]
) -> None:
    """Without a stack, nothing is known of its functions."""
    why = "process 1 may not be inspected"

    def seen(at: int) -> ProcessSample:
        process = procfs.Process(1, 0, "S", "python x.py", at * cpu, at * cpu, at * bytes_read, "")
        return ProcessSample(process, why, False, turns=at)

    samples = [Sample(float(at), {0: seen(at), 1: seen(at)}) for at in (0, 1)]
    motions = {
        rank: RankActivity(rank, 1, states="SS", cpu=cpu, course=course)
        for rank, course in courses(samples).items()
    }
    verdict = stall_detector.detect_stall(samples, {})
    assert isinstance(verdict, NoFinding) and verdict.code == BLIND
    found = progress_checks.of_processes(ActivityWindow(motions, 1.0, samples), verdict, {})
    no_stacks = msg("monitor.health.steps.no_stacks", why=verdict)
    headline = no_stacks if cpu == 1.0 else str(verdict)
    assert (found.status, found.ranks, found.shown_headline) == (UNKNOWN, idle, headline)
    assert (msg("monitor.health.work.none") in found.text) == bool(idle)
    assert msg("monitor.health.work.loops") not in found.text


def test_the_run_of_a_rank_of_a_script_is_known_by_its_open_file(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "a run")
    run.create()
    file = run.ranks / "rank0.stacks"
    with file.open("w"):
        assert target._run_of(os.getpid()) is None  # without a plan
        write_json(run.plan, {})
        found = target._run_of(os.getpid())
        assert found is not None and found.path == run.path
        file.unlink()
        assert target._run_of(os.getpid()) is None
