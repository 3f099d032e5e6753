"""The verdict of benchmarks.gpu_memory on peaks that are given."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import gpu_memory, null_gpus
from tests.null_gpu import programs
from training.tasks.gpt.memory import StepWorkload, estimate

# formula ÷ allocated of the three rows: one for each vocabulary, the same step on both GPUs
RATIOS = {320: 1.02, 32768: 0.98, 65536: 1.0}


@pytest.mark.parametrize("off", [None, 1.031, 0.969])
def test_a_row_beyond_the_limit_is_named(
    off: float | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ratios = RATIOS | ({32768: off} if off else {})

    def measured(loads: list[StepWorkload], environ: dict[str, str]) -> Iterator[dict[str, int]]:
        for load in loads:
            own = estimate(load).total - estimate(load).context
            yield dict.fromkeys(("allocated", "reserved"), round(own / ratios[load.vocab]))

    (tmp_path / "torch").mkdir()
    monkeypatch.setattr(programs, "CUDA_TORCH", tmp_path)
    monkeypatch.setattr(null_gpus, "build", lambda *_: None)
    monkeypatch.setattr(gpu_memory, "measured", measured)
    monkeypatch.setattr(
        sys, "argv", ["gpu_memory", "--configs=conservative", "--gpus=24,80", "--compiled=0"]
    )
    if off is None:
        gpu_memory.main()
        return
    with pytest.raises(SystemExit) as ended:
        gpu_memory.main()
    _, *rows = str(ended.value.code).splitlines()
    assert [[*row.split(", ")[:4], row.rsplit(" ", 1)[1]] for row in rows] == [
        ["conservative", "vocabulary 32768", "24", "80 GiB", f"{off:.3f}"]
    ]
