"""The formula of the plan against the peak of a real step on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks.gpu import peaks
from tests.conftest import ROOT
from tests.gpu.conftest import need_compiler, need_gpus
from training.host.decisions import best_type
from training.tasks.gpt.memory import estimate


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    "change", [{}, {"blocks": 8}, {"vocab": 32768, "chunks": 8}], ids=["plain", "again", "parts"]
)
def test_the_formula_on_a_gpu(compiled: bool, change: dict[str, int]) -> None:
    need_gpus(1)
    if compiled:
        need_compiler()
    import torch

    gpu = torch.cuda.get_device_properties(0)
    half = best_type((gpu.major, gpu.minor), gpu.name)
    base = replace(peaks.BASE, fp16=half != "bf16")
    load = replace(base, compiled=compiled, **change)  # type: ignore[arg-type]  # numbers only
    if estimate(load).needed > gpu.total_memory:
        pytest.skip("does not fit into this GPU")
    code = (
        "import json, sys; from benchmarks.memory import StepWorkload, fresh; "
        "print(fresh(StepWorkload(**json.loads(sys.argv[1]))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(load.__dict__)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    formula = estimate(load)
    assert formula.total - formula.context == pytest.approx(
        int(done.stdout.split()[-1]), rel=peaks.LIMIT
    )
