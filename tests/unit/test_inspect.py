"""Health check of made-up runs whose ranks are real processes."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.unit import targets
from tests.unit.monitor_runs import Made, dead_pid, old
from training.core import rundir
from training.core.errors import Exit
from training.core.heartbeat import Heartbeat
from training.monitor.health import activity, health, render
from training.monitor.health.check import OK, WARN, HealthCheck
from training.monitor.health.health import HealthReport
from training.monitor.health.target import of_process
from training.watchdog.probes import procfs

SHARDS = {"world_size": 2, "dataset_sequences": 1000, "batches": 125, "count": 500}


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("LEAST_S", 0.1), ("LOOK_S", 0.4), ("MORE_S", 0.4), ("EVERY_S", 0.02)):
        monkeypatch.setattr(activity, name, seconds)


class Trains:
    """A made-up run in progress: its ranks are processes, and a thread writes their heartbeats."""

    def __init__(self, made: Made, pids: dict[int, int]) -> None:
        self.made, self.pids, self._stop = made, pids, threading.Event()
        self.moving = set(pids)
        self.pulses = {rank: self._pulse(rank, pid) for rank, pid in pids.items()}
        started = [{"rank": rank, "pid": pid} for rank, pid in pids.items()]
        facts_ = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": made.at + 1,
            "ranks": started,
        }
        rundir.write_json(made.run.supervisor, facts_)
        made.run.event("start", step=0, total_steps=400, world_size=2)
        ranks = [{"rank": rank, "first_sequences": [rank, rank + 10]} | SHARDS for rank in pids]
        made.run.event("shards", epoch=1, proven_sequences=1000, ranks=ranks)
        self._thread = threading.Thread(target=self._go, daemon=True)

    def _pulse(self, rank: int, pid: int) -> Heartbeat:
        pulse = Heartbeat(self.made.run.heartbeat(rank), rank, pid)
        pulse.epoch, pulse.step = 1, 101
        pulse.beat("forward")
        return pulse

    def _go(self) -> None:
        while not self._stop.wait(0.02):
            for rank in self.moving:
                self.pulses[rank].step += 1
                self.pulses[rank].beat("forward")

    def __enter__(self) -> Trains:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture
def run(tmp_path: Path) -> Made:
    config = {"num_iterations": 400, "inspect_every": 50, "save_every": 100, "hang_timeout": 60}
    plan = {
        "config": config,
        "compile": {"value": False},
        "local_ranks": 2,
        "batch": {"device_sequences": 4},
    }
    made = Made(tmp_path / "experiments" / "small run", age_s=15.0, **plan).steps(100)
    made.step(100, 2.1, time.time(), compute_ms=[10.0, 11.0], memory_bytes=[1 << 30, 1 << 30])
    (made.run.checkpoints / "step_00000100").mkdir()
    return made


@contextlib.contextmanager
def trains(
    made: Made, folder: Path, roles: tuple[str, ...] = ("sleeps", "sleeps")
) -> Iterator[Trains]:
    (folder / "ranks").mkdir()
    with targets.ranks(folder / "ranks", *roles) as (pids, _), Trains(made, pids) as going:
        yield going


def check(report: HealthReport, name: str) -> HealthCheck:
    return next(c for c in report.checks if c.name == name)


def test_all_ranks_train(run: Made, tmp_path: Path) -> None:
    with trains(run, tmp_path) as going:
        report = health.of_run(run.run)
        # the process does not map its heartbeat file
        assert health.of_process(going.pids[1]).run is None
    assert (report.answer, report.code) == ("yes", Exit.DONE), report
    assert report.text.startswith("all 2 ranks train (step 100, ") and report.text.endswith(" ago)")
    assert {c.name: c.status for c in report.checks} == dict.fromkeys(
        (
            "processes",
            "steps",
            "GPUs",
            "speed",
            "data",
            "parameters",
            "loss",
            "memory",
            "checkpoint",
            "findings",
        ),
        OK,
    )
    record = render.record(report)
    assert (
        record["schema_version"],
        record["answer"],
        record["exit_code"],
        record["ranks_expected"],
        record["ranks_here"],
    ) == (1, "yes", 0, 2, 2)
    assert [(r["rank"], r["pid"], r["step"] > r["step_before"]) for r in record["ranks"]] == [
        (r, p, True) for r, p in going.pids.items()
    ]
    assert record["ranks"][0]["variables"].keys() == {
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
    text = "\n".join(render.screen(report))
    assert text.startswith("YES: all 2 ranks train (step 100, ") and len(text.splitlines()) <= 24


def test_stopped_rank(run: Made, tmp_path: Path) -> None:
    with trains(run, tmp_path) as going:
        targets.stopped(going.pids[1])
        going.moving.clear()
        report = health.of_run(run.run)
        text = f"rank 1 is stopped (SIGSTOP); resume: kill -CONT {going.pids[1]}"
        assert (report.answer, report.code, report.text) == ("no", Exit.HANG, text)
        assert check(report, "steps").ranks == (1,) and report.ranks[1]["state"] == "stopped"
        os.kill(going.pids[1], signal.SIGCONT)
        going.moving = {0, 1}
        assert health.of_run(run.run).answer == "yes"


def test_rank_that_is_gone(run: Made, tmp_path: Path) -> None:
    with trains(run, tmp_path) as going:
        os.kill(going.pids[1], signal.SIGKILL)
        wait_until(
            lambda: (now := procfs.read_process(going.pids[1])) is None or now.state == "Z",
            20,
            "it is gone",
        )
        report = health.of_run(run.run)
    assert (report.answer, report.code, report.text) == ("no", Exit.HANG, "rank 1 has no process")
    assert [row["pid"] for row in report.ranks] == [going.pids[0], None]


def test_slow_rank_is_not_stuck(run: Made, tmp_path: Path) -> None:
    with trains(run, tmp_path) as going:
        going.moving = {0}
        report = health.of_run(run.run)
    assert (report.answer, report.code) == ("unknown", Exit.RESOURCES), report
    assert re.match(
        r"no progress for \d s, but no rank is overdue: rank 1 in 'step 101: forward' for ",
        report.text,
    ), report.text
    assert "no activity on rank 1, but not yet overdue" in check(report, "steps").text


def test_overdue_rank(run: Made, tmp_path: Path) -> None:
    with trains(run, tmp_path, ("waits", "locks")) as going:
        wait_until(lambda: going.pulses[1].step > 110, 20, "steps after those that warm up")
        going.moving.clear()
        last = max(pulse.step for pulse in going.pulses.values())
        for rank, phases in ((1, ["fetch"]), (0, ["fetch", "forward", "backward"])):
            going.pulses[rank].step = last + 1
            for phase in phases:
                going.pulses[rank].beat(phase)
        report = health.of_run(run.run)
    assert (report.answer, report.code) == ("no", Exit.HANG), report
    assert (
        report.text.startswith(f"rank 1 in 'step {last + 1}: fetch' ") and "rank.py:" in report.text
    )


def test_ranks_that_are_starting(run: Made, tmp_path: Path) -> None:
    with trains(run, tmp_path) as going:
        going.moving.clear()
        for pulse in going.pulses.values():
            pulse.step = pulse._first_step = 0
            pulse.beat("building the model")
        report = health.of_run(run.run)
    assert (report.answer, report.code) == ("unknown", Exit.RESOURCES)
    text = r"training has not begun: ranks 0 and 1 in 'building the model' for (less than )?\d s"
    assert re.fullmatch(text, report.text), report.text


def test_between_two_steps(run: Made, tmp_path: Path) -> None:
    with trains(run, tmp_path, ("works", "sleeps")) as going:
        going.moving.clear()
        going.pulses[0].beat("evaluation")
        going.pulses[1].beat("barrier: before iteration")
        report = health.of_run(run.run)
    assert (report.answer, report.code) == ("yes", Exit.DONE), report
    assert check(report, "steps").text.startswith("between two steps: rank 0 in 'evaluation' for ")


def test_at_the_end_of_a_run(run: Made, tmp_path: Path) -> None:
    with trains(run, tmp_path) as going:
        going.moving.clear()
        for pulse in going.pulses.values():
            pulse.beat("finished")
        os.kill(going.pids[1], signal.SIGKILL)
        report = health.of_run(run.run)
    assert (report.answer, report.code) == ("unknown", Exit.RESOURCES)
    assert report.text == "the run is about to end: ranks 0 and 1 finished"


def test_no_rank_yet(made: Made) -> None:
    rundir.write_json(
        made.run.supervisor,
        {"pid": os.getpid(), "host": socket.gethostname(), "started": made.at + 1, "ranks": []},
    )
    report = health.of_run(made.run)
    assert (report.answer, report.code) == ("unknown", Exit.RESOURCES)
    assert (
        report.text
        == f"its supervisor (pid {os.getpid()}) is running, but no rank is: it is starting or "
        f"restarting them"
    )


def test_run_on_another_machine_is_judged_by_heartbeats(run: Made, tmp_path: Path) -> None:
    with trains(run, tmp_path) as going:
        supervisor = rundir.read_json(run.run.supervisor) or {}
        rundir.write_json(run.run.supervisor, supervisor | {"host": "far-away", "pid": 1 << 22})
        assert health.of_run(run.run).answer == "yes"
        going.moving.clear()
        report = health.of_run(run.run)
        assert report.answer == "unknown" and report.text.startswith("no progress for ")
    for rank in (0, 1):
        run.run.heartbeat(rank).unlink()
    report = health.of_run(run.run)
    assert (
        report.answer == "unknown"
        and report.text
        == "ranks 0 and 1: on another machine, whose heartbeats are not visible here"
    )


@pytest.mark.parametrize(
    ("end", "code", "text"),
    [
        ("summary", Exit.DONE, "finished at step 100 of 400, "),
        ("stopped", Exit.HANG, "stopped at step 100 of 400, "),
        ("failure", Exit.HANG, "failed at step 100 of 400, "),
        ("died", Exit.HANG, "died at step 100 of 400, "),
    ],
)
def test_run_that_has_ended(run: Made, end: str, code: Exit, text: str) -> None:
    run.supervisor(dead_pid()).beats("finished", 100)
    if end == "summary":
        run.summary()
    elif end == "stopped":
        run.summary(status="stopped", exit_code=75)
    elif end == "failure":
        run.failure()
    report = health.of_run(run.run)
    assert (report.answer, report.code) == ("ended", code) and report.text.startswith(text), report
    if end == "failure":
        assert report.text.endswith("gpu_oom on rank 1: CUDA out of memory")
    assert render.screen(report)[0].startswith("IT HAS ENDED: ")


def test_failed_run_whose_supervisor_may_restart_it(run: Made) -> None:
    run.supervisor(os.getpid(), dead_pid()).failure()
    report = health.of_run(run.run)
    assert (report.answer, report.code) == ("unknown", Exit.RESOURCES)
    assert report.text.startswith("failed at step 100 of 400, ") and report.text.endswith(
        f"its supervisor (pid {os.getpid()}) is still running and may restart the ranks"
    )


def test_non_finite_loss(run: Made, tmp_path: Path) -> None:
    run.step(101, math.nan)
    with trains(run, tmp_path):
        report = health.of_run(run.run)
    assert (report.answer, report.code, report.text) == (
        "no",
        Exit.HANG,
        "the loss is nan at step 101",
    )


def test_warnings_that_do_not_change_the_answer(run: Made, tmp_path: Path) -> None:
    for step in range(101, 320):
        run.step(step, 2.0, time.time(), compute_ms=[10.0, 30.0])
    old(run.run.checkpoints / "step_00000100", 7200)
    with trains(run, tmp_path):
        run.run.event("inspection", text="step 300: parameters equal")
        run.run.event("warning", text="rank 1: slow disk", rank=1, step=300)
        report = health.of_run(run.run)
    assert (report.answer, report.code) == ("yes", Exit.DONE)
    assert report.text.endswith("; 3 warnings: speed, checkpoint, findings")
    assert check(report, "speed").text.startswith("rank 1 is slow: 30 ms ")
    assert check(report, "checkpoint").text == "step 100, 2 h old, 219 steps ago; every 100 steps"
    assert check(report, "inspector") == HealthCheck("inspector", OK, "step 300: parameters equal")
    assert check(report, "findings") == HealthCheck(
        "findings", WARN, "rank 1: slow disk (step 300)", (1,)
    )


def test_run_is_found_by_its_process(run: Made, tmp_path: Path) -> None:
    program = """
import sys, time
from pathlib import Path
from training.core import heartbeat
heartbeat.start(Path(sys.argv[0]).parent / "experiments/small run/heartbeat/rank0.bin", 0)
heartbeat.current.step = 1
heartbeat.current.beat("forward")
print("ready", flush=True)
time.sleep(1000)
"""
    variables = {
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "RANK": "0",
        "WORLD_SIZE": "1",
    }
    with targets.running(tmp_path, program, env=variables) as (pid, _, _):
        found = of_process(pid)
        assert (found.run and found.run.path, found.pids, found.missing) == (
            run.run.path,
            {0: pid},
            (1,),
        )
        report = health.of_process(pid)
    assert (report.answer, report.text) == ("no", "rank 1 has no process")
