"""`make gpu` on a machine that others use: which GPU is measured, and what is recorded of them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import in_use, machine, results, stages
from tests.unit.test_benchmark_gpu import figures, made, stage
from training.host.gpu_processes import GpuProcess
from training.host.gpus import VISIBLE, Gpu, GpuInventory

GIB = 1 << 30


def gpu(index: int, free_gib: int = 24, percent: int = 0, *pids: int) -> Gpu:
    others = tuple(GpuProcess(pid, None) for pid in pids)
    free, name = free_gib * GIB, "NVIDIA RTX 4090"
    return Gpu(index, f"GPU-{index}", name, 24 * GIB, free, percent, 40, 50.0, (8, 9), others)


@pytest.mark.parametrize(
    ("found", "first", "lines"),
    [
        ([gpu(0), gpu(1)], "0", []),
        ([gpu(0, 4, 0, 7), gpu(1)], "1", ["GPU 0: 20.0 GiB and 0 % in use, PID 7"]),
        ([gpu(0, 4), gpu(1), gpu(2)], "1", []),
        ([gpu(0, 24, 90)], "0", ["GPU 0: 0.0 GiB and 90 % in use"]),
        ([], "0", []),
    ],
    ids=["idle", "the other one", "more than two", "the only one", "without NVML"],
)
def test_the_emptiest_gpu_is_measured(
    found: list[Gpu], first: str, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VISIBLE, "")  # so that what is set below is undone
    monkeypatch.delenv(VISIBLE)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    monkeypatch.setattr(in_use.gpus, "inventory", lambda **_: GpuInventory(tuple(found), ""))
    monkeypatch.setattr(in_use.gpu_claims, "others", dict)
    assert in_use.choose() == {"first": first, "in_use": lines}
    assert os.environ.get(VISIBLE, "0").startswith(first), "CUDA's first one here"


def test_figures_of_a_gpu_that_others_use_are_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both, line = {"one": stage(lambda _: figures(1))}, "GPU 0: 20.0 GiB and 90 % in use, PID 7"
    monkeypatch.setattr(results, "STAGES", both)
    monkeypatch.setattr(stages, "STAGES", both)
    monkeypatch.setattr(machine, "find", lambda cache, python: made(in_use=[line]))
    assert command._measure(command.arguments([f"--out={tmp_path}"])) == 0
    assert f"[WARNING] {line}" in capsys.readouterr().out
    record = json.loads((tmp_path / "gpu.json").read_text())["stages"]["one"]
    assert record["in_use"] == [line]
    assert (
        f'<p class="banner">Measured beside other work. {line}'
        in (tmp_path / "gpu.html").read_text()
    )
