"""What the Chinese texts call memory: of a GPU 显存, of the host 内存, by the device of the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.unit.report_runs import planned, trained
from training.cli import doctor, restore
from training.config.schema import Config
from training.core.contracts.plan import Plan
from training.core.errors import Exit, UserError
from training.monitor.health import health, render
from training.monitor.health.health import HealthReport
from training.monitor.report import run, run_page
from training.plan.preflight import bug_report
from training.plan.preflight.report import Check
from training.tasks.gpt import memory_fit
from training.tasks.gpt.memory import StepWorkload
from training.tasks.gpt.step import GptStep

LOAD = StepWorkload(4, 2, 64, 320, bf16=True, compiled=False, cuda=False)
WORDS = {"cuda": ("显存", "内存"), "cpu": ("内存", "显存")}
VERSIONS: dict[str, str | None] = {}


@pytest.fixture(autouse=True)
def chinese(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUET_LANG", "zh")


@pytest.mark.parametrize("device", WORDS)
def test_memory_of_a_planned_step(device: str) -> None:
    word, other = WORDS[device]
    load = replace(LOAD, cuda=device == "cuda")
    chosen = memory_fit.choose(load, replace(Config(), device_batch_size="auto"), 1, None)
    assert chosen
    step = doctor.StepMemory(GptStep(load), None, None)
    for text in (chosen.sequences.reason, chosen.sentence(), step.sentence):
        assert word in text and other not in text


@pytest.mark.parametrize("device", WORDS)
def test_memory_for_the_frames_of_a_film(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> int:
        raise MemoryError

    monkeypatch.setattr(restore, "_written", fails)
    model: Any = SimpleNamespace(device=torch.device(device))
    chosen: Any = SimpleNamespace(source=SimpleNamespace(size=(64, 48)))
    pieces: Any = SimpleNamespace(tile=0, window=8)
    with pytest.raises(UserError) as caught:
        restore._restore(model, chosen, pieces)
    (problem,) = caught.value.problems
    assert (problem.code, caught.value.code) == ("restore.memory", Exit.RESOURCES)
    assert WORDS[device][0] in problem.what and WORDS[device][1] not in problem.what


@pytest.mark.parametrize("device", WORDS)
def test_memory_in_a_bug_report(device: str) -> None:
    plan: dict[str, Any] = {
        "command": {"script": "train.sh", "args": []},
        "device": {"value": device},
        "ranks": 1,
        "gpus": [],
        "variables": [],
        "notes": [],
    }
    checks = [Check("memory of a step", "error", "放不下")]
    for verdict, many in (("未知", 1), ("", 0)):
        block = bug_report.block(cast("Plan", plan), checks, VERSIONS, verdict)
        assert block.count(f"一步所需的{WORDS[device][0]}：未知") == many


@pytest.mark.parametrize("device", WORDS)
def test_memory_in_a_report(tmp_path: Path, device: str) -> None:
    word, other = WORDS[device]
    made = trained(planned(tmp_path / "run", device={"value": device}))
    html = run_page.page(run.read_run(made.run)).html()
    for title in ("{}峰值", "各 rank 的{}", ">{}<"):
        assert title.format(word) in html and title.format(other) not in html


@pytest.mark.parametrize("device", WORDS)
def test_memory_in_the_table_of_ranks(device: str) -> None:
    row: Any = {"rank": 0, "pid": 1, "memory_bytes": 1 << 30, "gpu_memory_bytes": 2 << 30}
    row |= {"step": 1, "phase": None}
    state: Any = {"run": {"device": device}}
    report = HealthReport(health.YES, "x", Exit.DONE, [], [row], state=state)
    heading = next(line for line in render.screen(report) if "rank" in line)
    assert heading.split()[3:5] == (
        ["已分配显存", "显存"] if device == "cuda" else ["内存", "显存"]
    )
