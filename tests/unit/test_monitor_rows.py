"""Rows of the monitor: ranks, warnings, GPUs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.exported_metrics import names, of
from tests.unit.monitor_runs import GIB, PATIENCE_S, ROOT, Made, look, text_of
from training.core import rundir
from training.core.messages import msg
from training.host import gpu_processes, gpus
from training.monitor import host_stats, log_watch, screen, sections, state
from training.monitor.screen import View


def test_late_rank_is_marked_only_while_running(made: Made) -> None:
    made.supervisor(os.getpid()).steps(10).beats("progress bar", ranks=[0])
    made.beats("barrier: before iteration", ranks=[1], age_s=41)
    assert [r["late"] for r in look(made.run)["ranks"]] == [False, True]
    line = next(row for row in text_of(made.run).splitlines() if "barrier" in row)
    assert "41." in line and "LATE" in line
    made.summary()
    assert "LATE" not in text_of(made.run)


@pytest.mark.parametrize(
    ("phase", "compiled", "expected"),
    [
        ("evaluation", False, [False, False]),
        ("evaluation", True, [False, False]),
        ("first pass", False, [True, True]),
        ("first pass", True, [False, False]),
        ("progress bar", False, [False, True]),
    ],
)
def test_ranks_are_late_after_the_limit_of_a_long_phase(
    made: Made, phase: str, compiled: bool, expected: list[bool]
) -> None:
    """Rank 1 waits for rank 0."""
    rundir.write_json(made.run.plan, made.plan | {"compile": {"value": compiled}})
    age_s = 400.0 if phase == "first pass" else 75.0 if phase == "evaluation" else 5.0
    made.supervisor(os.getpid()).steps(10).beats(phase, 10, [0], age_s)
    made.beats("barrier: end of training", 10, [1], max(age_s, 75.0))
    assert [r["late"] for r in look(made.run)["ranks"]] == expected


def test_warnings_are_shown_without_control_sequences(made: Made) -> None:
    made.supervisor(os.getpid()).steps(5)
    made.run.event("warning", text="the disk is \x1b[31mnearly\x1b[0m full\x07")
    made.log.write_text("one\rtwo\x1b[2J\n\x1b]0;title\x07three\tcolumns\n")
    shown = text_of(made.run)
    assert "the disk is nearly full" in shown and "two\nthree columns" in shown
    assert all(c.isprintable() or c == "\n" for c in shown)


def gpu(index: int, *processes: gpu_processes.GpuProcess) -> gpus.Gpu:
    return gpus.Gpu(
        index,
        f"GPU-{index}",
        "NVIDIA GeForce RTX 5090",
        32 * GIB,
        4 * GIB,
        97,
        71,
        431.2,
        (12, 0),
        processes,
    )


def test_gpu_rows_mark_processes_of_this_run(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = made.plan | {
        "device": {"value": "cuda", "reason": "-"},
        "gpus": [{"uuid": "GPU-0"}, {"uuid": "GPU-1"}],
    }
    rundir.write_json(made.run.plan, plan)
    made.supervisor(os.getpid()).steps(5)
    worker = subprocess.Popen(["sleep", "60"])  # children of ranks belong to the run too
    try:
        found = (
            gpu(
                0,
                gpu_processes.GpuProcess(1, 2 * GIB, "bob", "jupyter"),
                gpu_processes.GpuProcess(os.getpid(), 21 * GIB, "ann", "python"),
            ),
            gpu(1, gpu_processes.GpuProcess(worker.pid, None)),
            gpus.Gpu(2, "GPU-2", "NVIDIA A2", None, None, None, None, None),
        )
        monkeypatch.setattr(gpus, "inventory", lambda *_, **__: gpus.GpuInventory(found, "3"))
        seen = look(made.run)
        assert [[p["this_run"] for p in g["processes"]] for g in seen["gpus"]] == [
            [False, True],
            [True],
            [],
        ]
        shown, wide = text_of(made.run), text_of(made.run, 120)
    finally:
        worker.kill()
        worker.wait()
    assert re.search(
        rf"0\* RTX 5090 +97 % +28\.0 / 32\.0 +71 °C +431 W +\*{os.getpid()} 21\.0, bob 1", shown
    )
    assert f"*rank 1 {os.getpid()} 21.0, bob 1 2.0" in wide
    assert re.search(r"2  A2 +- +- / - +- +-", shown)


def test_the_instance_of_a_gpu_on_which_a_run_trains(
    made: Made, fake_driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole GPU was shown as one that the run does not use, with the memory of another
    instance."""
    monkeypatch.setenv("FAKE_NVML_MIG", "1")
    monkeypatch.setenv("FAKE_NVML_MIG_GIB", "10")
    monkeypatch.setenv("FAKE_NVML_NAME", "NVIDIA H100 80GB HBM3")
    code = (
        "import json, sys; from training.host import gpus; from dataclasses import asdict\n"
        "print(json.dumps([asdict(g) for g in gpus.inventory({}, {'MIG-00000001'}).gpus]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "LD_LIBRARY_PATH": str(fake_driver)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = [gpus.Gpu(**{**facts, "processes": ()}) for facts in json.loads(done.stdout)]
    assert [g.uuid[:4] for g in found] == ["GPU-", "MIG-"]
    asked: list[object] = []

    def inventory(environ: object, instances: object, *, displays: bool) -> gpus.GpuInventory:
        asked.append((instances, displays))
        return gpus.GpuInventory(tuple(found), "")

    monkeypatch.setattr(host_stats.gpus, "inventory", inventory)
    made.plan["gpus"] = [{"index": 1, "uuid": "MIG-00000001", "mig": True}]
    made.plan["device"] = {"value": "cuda"}
    rundir.write_json(made.run.plan, made.plan)
    seen = look(made.run)
    assert asked == [({"MIG-00000001"}, False)]
    assert [g["in_plan"] for g in seen["gpus"]] == [False, True]
    rows = text_of(made.run, 100).splitlines()
    (row,) = (row for row in rows if row.startswith(" 1* "))
    assert "1g.10gb" in row and "0.0 / 10.0" in row


def test_hanging_or_failing_driver_does_not_block_the_monitor(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir.write_json(made.run.plan, made.plan | {"device": {"value": "cuda", "reason": "-"}})
    released = threading.Event()

    def hanging(*_: object, **__: object) -> gpus.GpuInventory:
        released.wait(PATIENCE_S)
        raise OSError("Xid 79")

    monkeypatch.setattr(gpus, "inventory", hanging)
    watch = state.RunWatch(made.run)
    seen = watch.read(0.01)
    assert "has not answered for" in seen["gpus_reason"]
    assert "has not answered for" in "\n".join(screen.screen(seen, View(80, 24)))
    released.set()
    assert "Xid 79" in watch.read(PATIENCE_S)["gpus_reason"]


def test_measurements_of_a_driver_that_hangs_become_unknown(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot change is kept; also `--prometheus` exports no measurement then."""
    process = gpu_processes.GpuProcess(os.getpid(), GIB)
    gpu = gpus.Gpu(0, "GPU-0", "H200", 8 * GIB, 2 * GIB, 97, 71, 650.0)
    gpu = replace(gpu, fan_percent=30, slowdowns=("too hot",), processes=(process,))
    answers, released = iter([gpus.GpuInventory((gpu,), "")]), threading.Event()

    def inventory(*_: object, **__: object) -> gpus.GpuInventory:
        for answer in answers:
            return answer
        released.wait(PATIENCE_S)
        return gpus.GpuInventory((gpu,), "")

    monkeypatch.setattr(gpus, "inventory", inventory)
    watch = state.RunWatch(made.run)
    before = watch.read(PATIENCE_S)
    assert watch.read(0.01)["gpus"] == before["gpus"], "it may be slow"
    monkeypatch.setattr(host_stats, "STALE_S", 0.0)
    seen = watch.read(0.01)
    unknown = ("use_percent", "memory_used_bytes", "temperature_c", "power_w", "fan_percent")
    changed = dict.fromkeys((*unknown, "throttle_reasons")) | {"processes": []}
    assert seen["gpus"] == [{**before["gpus"][0], **changed}]
    assert names(of(seen)) & {n for n in names(of(before)) if n.startswith("duet_gpu")} == {
        "duet_gpu_info",
        "duet_gpu_in_plan",
        "duet_gpu_memory_total_bytes",
    }
    assert "H200" in "\n".join(screen.screen(seen, View(80, 24)))
    released.set()
    assert watch.read(PATIENCE_S)["gpus"] == before["gpus"]


def test_many_ranks_in_few_rows_show_the_worst(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = (
        Made(tmp_path / "experiments" / "wide", ranks=64).supervisor(os.getpid()).steps(10).beats()
    )
    seen = look(made.run)
    seen["ranks"][41] |= {"late": True, "beat_age_s": 99.0, "doing": "barrier: end of epoch"}
    shown = "\n".join(screen.screen(seen, View(80, 24)))
    assert re.search(r"\n +41 .* 99\.0 s LATE  barrier: end of epoch\n", shown) and re.search(
        r"the other (\d+) ranks, \1 alive", shown
    )


@pytest.mark.parametrize(("scale", "shown"), [(2.0**20, "1,048,576"), (0.5, "0.5")])
def test_the_loss_scale_has_all_digits(made: Made, scale: float, shown: str) -> None:
    made.supervisor(os.getpid()).steps(5)
    made.step(6, 2.0, loss_scale=scale)
    label = msg("monitor.screen.loss_scale")
    assert re.search(rf"{label}{shown}\s", text_of(made.run, 140, 40))


@pytest.mark.parametrize("recorded", [{"loss": None}, {}])
def test_numbers_are_shown_while_no_loss_is_finite(made: Made, recorded: dict[str, None]) -> None:
    """fp16 skips such steps."""
    assert sections.numbers(look(made.run), 80, 4) == []
    for step in range(1, 4):
        facts = {"time": time.time(), "step": step, "epoch": 1, "step_ms": 100.0, **recorded}
        rundir.append_json(made.run.metrics, facts | {"loss_scale": 64.0, "skipped_steps": step})
    shown = "".join(text for row in sections.numbers(look(made.run), 80, 4) for text, _ in row)
    label, skipped = msg("monitor.screen.loss_scale"), msg("monitor.screen.skipped")
    assert shown.startswith("loss -") and f"{label}64" in shown and f"3{skipped}" in shown


@pytest.mark.parametrize("script", [True, False])
def test_output_without_a_loss_has_none_in_its_numbers(tmp_path: Path, script: bool) -> None:
    printed = "".join(f"step: {n}/90 iter time (s): 0.100 samples/s: 12.5\n" for n in range(1, 9))
    made = Made(tmp_path / "experiments/other", script={"path": "main.py", "args": []})
    made.run.ranks.mkdir(parents=True, exist_ok=True)
    log = made.run.ranks / "rank0.log"
    log.write_text(printed)
    seen = look(made.run) if script else log_watch.LogWatch(log).read(PATIENCE_S)
    shown = "".join(text for row in sections.numbers(seen, 80, 4) for text, _ in row)
    assert "12.5 samples/s" in shown and "loss" not in shown
