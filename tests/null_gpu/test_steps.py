"""What a training step asks of a GPU: calls counted by the null GPU."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks.launches import bare, duet
from tests.conftest import TOKEN
from tests.null_gpu import counters, programs
from tests.null_gpu.conftest import NullGpus

STEPS = 16
DDP_LOGS = 11  # the logger of DDP waits for the GPU in its first passes, and in every 100th
LIMIT_S = 600  # two imports of the CUDA build take minutes on busy cores
FLAGS = {
    "depth": 2,
    "max_seq_len": 64,
    "device_batch_size": 4,
    "total_batch_size": 512,
    "num_iterations": STEPS,
    "eval_every": 0,
    "sample_tokens": 0,
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
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i} of the text\n" for i in range(4000)))
    own = {"data": text, "out_dir": tmp_path / "experiments", "log_dir": tmp_path}
    every = FLAGS | own | flags
    steps = programs.counted(gpus.environ | {TOKEN: token}, tmp_path, ranks, every, LIMIT_S)
    assert len(steps) == STEPS
    for step in steps[DDP_LOGS:-1]:
        for part in (step["other"], step["optimizer"]):
            # With two ranks the step before may not have ended: its event limits how far the host
            # is ahead, while the GPU has this step to do.
            waits = {n: c for n, c in part.items() if n.startswith("SYNC") and c}
            assert not waits or (ranks == 2 and waits == {"SYNC event": 1})
        # Two shapes of matrices with two and eight of them: batches, not matrices, are launched.
        # Those of fp16 may do nothing.
        limit = 120 if flags["precision"] == "bf16" else 140
        assert counters.launches(step["optimizer"]) <= limit


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize(("depth", "ranks"), [(12, 1), (12, 2), (20, 1)])
def test_a_large_model_needs_as_few_launches_as_a_bare_loop(
    gpus: NullGpus, depth: int, ranks: int
) -> None:
    def median(steps: list[dict[str, Any]], part: str) -> float:
        return statistics.median(counters.launches(step[part]) for step in steps)

    steps = duet(gpus.environ, depth, ranks, 0)
    others = bare(gpus.environ, "same", depth, ranks, 0)
    assert median(steps, "other") <= 1.15 * median(others, "other")
    assert median(steps, "optimizer") <= 120 < median(others, "optimizer")
