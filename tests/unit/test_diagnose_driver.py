"""Logs in which torch warns that it sees no GPU because of the driver, and then continues."""

from __future__ import annotations

from pathlib import Path

import pytest

from training.diagnose import card
from training.diagnose.result import diagnose

OLD = (
    "/opt/env/lib/python3.10/site-packages/torch/cuda/__init__.py:141: UserWarning: CUDA "
    "initialization: The NVIDIA driver on your system is too old (found version 11040). Please update "
    "your GPU driver by downloading and installing a new version from the URL: "
    "http://www.nvidia.com/Download/index.aspx Alternatively, go to: https://pytorch.org to install a "
    "PyTorch version that has been compiled with your version of the CUDA driver. (Triggered "
    "internally at ../c10/cuda/CUDAFunctions.cpp:108.)\n  return torch._C._cuda_getDeviceCount() > 0\n"
)
MIXED = (
    "/opt/env/lib/python3.10/site-packages/torch/cuda/__init__.py:141: UserWarning: CUDA "
    "initialization: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before "
    "calling NumCudaDevices() that might have already set an error? Error 803: system has unsupported "
    "display driver / cuda driver combination (Triggered internally at "
    "../c10/cuda/CUDAFunctions.cpp:108.)\n  return torch._C._cuda_getDeviceCount() > 0\n"
)
STEPS = "using device: cpu\n" + "".join(f"step {i} loss {3 - i / 1000:.3f}\n" for i in range(1, 40))


def raised(line: str) -> str:
    return f'Traceback (most recent call last):\n  File "/t/a.py", line 8, in <module>\n    f()\n{line}\n'


@pytest.mark.parametrize("warning", [OLD, MIXED])
@pytest.mark.parametrize(
    ("rest", "cause"),
    [
        (STEPS + "Training finished in 90 s\n", "none"),
        (STEPS, "none"),
        ("using device: cpu\nstep 1 loss 3.1\nstep 2 loss 3.0\n", "cuda_driver_too_old"),
        (STEPS + raised("ValueError: bad sample 17"), "exception"),
        (raised("FileNotFoundError: [Errno 2] No such file: '/data/train.bin'"), "file_not_found"),
        (raised("RuntimeError: No CUDA GPUs are available"), "cuda_driver_too_old"),
        (
            raised("RuntimeError: GPU required but torch.cuda.is_available() is False"),
            "cuda_driver_too_old",
        ),
        (
            raised("ValueError: fp16 mixed precision requires a GPU (not 'cpu')."),
            "cuda_driver_too_old",
        ),
        (
            raised(
                "RuntimeError: Attempting to deserialize object on a CUDA device but "
                "torch.cuda.is_available() is False. If you are running on a CPU-only machine, "
                "please use torch.load with map_location=torch.device('cpu')"
            ),
            "cuda_driver_too_old",
        ),
    ],
)
def test_the_cause_is_what_ended_the_training(
    warning: str, rest: str, cause: str, tmp_path: Path
) -> None:
    log = tmp_path / "train.log"
    log.write_text(warning + rest)
    record = diagnose([log])
    assert record["cause"] == cause
    if cause == "none":
        assert record["also"] == ["cuda_driver_too_old"]
        assert record["summary"].endswith(
            "so torch sees no GPU; training continued without it"
        ) and record["summary"] in card.draw(record)
