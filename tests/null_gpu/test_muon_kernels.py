"""Muon's kernels by Triton's interpreter, on the CPU: their arithmetic. tests/gpu has them on a GPU.

In fp16: the interpreter does not multiply in bf16.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.null_gpu.programs import CUDA_TORCH

# Whole tiles, parts of tiles, tall and wide, with a shared Gram matrix from 1:2; 48 rows do not fit a
# step: by torch.
SHAPES = (
    *((1, 256, 256), (2, 192, 320), (2, 320, 192)),
    *((1, 192, 512), (1, 512, 192), (2, 64, 192), (2, 48, 192)),
)
PROGRAM = """
import json, sys
import torch
from training.tasks.gpt.muon_kernels import in_triton
from training.tasks.gpt.newton_schulz import orthogonal

torch.manual_seed(0)
for shape in json.loads(sys.argv[1]):
    matrices = torch.randn(shape)
    exact = orthogonal(matrices.double())
    for columns in (128, 256):
        half = matrices.half()
        kernels = orthogonal(half, in_triton(columns))
        errors = [float((x.double() - exact).norm() / exact.norm()) for x in (kernels, orthogonal(half))]
        print(json.dumps(errors))
"""


@pytest.mark.skipif(not (CUDA_TORCH / "torch").is_dir(), reason="make gpu-path installs Triton")
def test_the_kernels_are_as_exact_as_torch_s_products() -> None:
    env = os.environ | {"PYTHONPATH": f"{CUDA_TORCH}:{ROOT}", "TRITON_INTERPRET": "1"}
    argv = [sys.executable, "-c", PROGRAM, json.dumps(SHAPES)]
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 2 * len(SHAPES)
    for kernels, with_torch in rows:
        assert kernels < 1.05 * with_torch < 0.01
