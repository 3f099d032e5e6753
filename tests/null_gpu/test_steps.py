"""What a training step asks of a GPU: calls counted by the null GPU."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks.launches import bare, duet
from tests.conftest import TOKEN
from tests.null_gpu import counters, host_time, programs
from tests.null_gpu.conftest import NullGpus

STEPS = 104  # the logger of DDP would time the 100th, and the host wait for it in the next
DDP_LOGS = 11  # … as it does the first ten, for which it has no setting
# CPU time for an optimizer step, in launches of empty kernels: 430 to 600 in Duet at depth 12, 1,130
# on two ranks, 930 to 1,090 compiled; with torch's Muon, of 2,858 launches, 5,200, on two ranks 6,300.
HOST_LIMIT = 18.0 * host_time.LAUNCHES
KERNEL_US = 3000  # longer than the host needs for a launch, on busy cores too
LIMIT_S = 600  # two imports of the CUDA build take minutes on busy cores
FLAGS = {
    "depth": 2,
    "max_seq_len": 64,
    "device_batch_size": 4,
    "total_batch_size": 512,
    "num_iterations": STEPS,
    "eval_every": 0,
    "sample_tokens": 0,
    "inspect_every": 0,  # checksums that nothing computes are what the memory contained
    "compile": 0,
    "run_name": "counted",
    "report": "false",
    "tensorboard": "false",
}


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, {"precision": "bf16"}),
        (1, {"precision": "fp16", "ema": 0.9, "dropout": 0.1, "inspect_every": 1}),
        (2, {"precision": "bf16"}),
        (2, {"precision": "fp16"}),
        (2, {"precision": "bf16", "gradient_compression": "bf16"}),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_a_step_waits_for_nothing(
    gpus: NullGpus, tmp_path: Path, token: str, ranks: int, flags: dict[str, object]
) -> None:
    steps = counted(gpus.environ | {TOKEN: token}, tmp_path, ranks, **flags)
    assert len(steps) == STEPS
    steps = steps[1 if ranks == 1 else DDP_LOGS : -1]
    # One rank's device has always ended the step before. That of two may wait for the other rank.
    assert_no_waits(steps, late=ranks == 2)
    for step in steps:
        # Two shapes of matrices with two and eight of them: batches, not matrices, are launched.
        assert counters.launches(step["optimizer"]) <= 120


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_slow_gpu_is_waited_for_once_in_a_step(
    gpus: NullGpus, tmp_path: Path, token: str, ranks: int
) -> None:
    for device in range(ranks):
        gpus.slow_down(device, KERNEL_US)
    environ = gpus.environ | {TOKEN: token}
    steps = counted(environ, tmp_path, ranks, precision="bf16", num_iterations=DDP_LOGS + 4)
    steps = steps[DDP_LOGS:-1]
    assert_no_waits(steps, late=True)
    assert any(counters.waits(step["report"]) for step in steps), "the GPU is slower than the host"


@pytest.mark.timeout(4 * LIMIT_S)
@pytest.mark.parametrize(
    ("depth", "ranks", "compiled", "precision"),
    [
        (12, 1, 0, "bf16"),
        (12, 1, 0, "fp16"),
        (12, 2, 0, "bf16"),
        (20, 1, 0, "bf16"),
        pytest.param(20, 2, 0, "bf16", marks=pytest.mark.soak),
        pytest.param(12, 1, 1, "bf16", marks=pytest.mark.soak),
    ],
)
def test_a_large_model_needs_as_few_launches_as_a_bare_loop(
    gpus: NullGpus, depth: int, ranks: int, compiled: int, precision: str
) -> None:
    def median(steps: list[dict[str, Any]], part: str) -> float:
        return statistics.median(counters.launches(step[part]) for step in steps)

    steps = duet(gpus.environ, depth, ranks, compiled, precision)
    others = bare(gpus.environ, depth, ranks, compiled)
    assert_no_waits(steps, late=ranks == 2)
    assert median(steps, "other") <= 1.15 * median(others, "other")
    assert median(steps, "optimizer") <= 120 < median(others, "optimizer")
    assert host_launches(steps) <= HOST_LIMIT < host_launches(others)


def counted(
    environ: dict[str, str], folder: Path, ranks: int, **flags: object
) -> list[dict[str, Any]]:
    text = folder / "text.txt"
    text.write_text("".join(f"line {i} of the text\n" for i in range(4000)))
    own = {"data": text, "out_dir": folder / "experiments", "log_dir": folder}
    return programs.counted(environ, folder, ranks, FLAGS | own | flags, LIMIT_S)


def assert_no_waits(steps: list[dict[str, Any]], *, late: bool) -> None:
    """`late`: the device may not have ended the step before. Then the host waits for that, once,
    while the GPU has this one to do."""
    for step in steps:
        assert not counters.waits(step["other"])
        assert not counters.waits(step["optimizer"])
        waits = counters.waits(step["report"])
        assert not waits or (late and waits == {"SYNC event": 1})


def host_launches(steps: list[dict[str, Any]]) -> float:
    """The host's time for an optimizer step, in launches of empty kernels by the same process. The
    least of each, since other programs only add to a time."""
    optimizer = min(step["optimizer_cpu_ms"] for step in steps)
    return host_time.LAUNCHES * float(optimizer / min(step["launches_ms"] for step in steps))
