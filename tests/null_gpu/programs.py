"""Programs on null GPUs: their environment, and ranks that count their CUDA calls."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CUDA_TORCH = ROOT / ".tools/cuda"  # its own folder: .venv has the build that users get here
GPU = "NVIDIA GeForce RTX 4090"


def environment(libraries: Path, state: Path) -> dict[str, str]:
    """Two GPUs of 24 GiB; `libraries`: made by build()."""
    return {
        "TORCH_LOCAL_PATH": str(CUDA_TORCH),
        "LD_PRELOAD": str(libraries / "libcuda.so.1"),
        "LD_LIBRARY_PATH": str(libraries),
        "TRITON_LIBCUDA_PATH": str(libraries),
        "NULL_GPU_STATE": str(state),
        # what was found out about null GPUs is not for the user's own; kept for the session
        "XDG_CACHE_HOME": str(libraries / "cache"),
        "TMPDIR": str(libraries),
        "NULL_GPU_GIB": "24",
        "NULL_GPU_CAPABILITY": "8.9",
        "FAKE_NVML_CAPABILITY": "8.9",
        "NULL_GPU_PROCESSORS": "128",
        "NULL_GPU_NAME": GPU,
        "FAKE_NVML_NAME": GPU,
    }


def printed(environ: Mapping[str, str], program: str) -> str:
    """Output of this Python program, with torch's CUDA build and the modules of this repository."""
    path = os.pathsep.join(map(str, (CUDA_TORCH, ROOT)))
    own = os.environ | dict(environ) | {"PYTHONPATH": path}
    return subprocess.check_output([sys.executable, "-c", program], env=own, text=True)


def counted(
    environ: Mapping[str, str],
    folder: Path,
    ranks: int,
    flags: Mapping[str, object],
    limit_s: float,
) -> list[dict[str, Any]]:
    """The records of rank 0 (count_steps.py). Raises RuntimeError with the output of a rank that
    fails."""
    words = [f"--{name}={value}" for name, value in flags.items()]
    return recorded(environ, folder, ranks, "count_steps.py", words, limit_s)


def recorded(
    environ: Mapping[str, str],
    folder: Path,
    ranks: int,
    file: str,
    words: Sequence[str],
    limit_s: float,
) -> list[dict[str, Any]]:
    """What rank 0 of `file OUT.json WORDS…`, a program of this folder, has written."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    own = {k: v for k, v in os.environ.items() if not k.startswith("DUET_")} | dict(environ)
    path = os.pathsep.join(filter(None, (str(CUDA_TORCH), environ.get("PYTHONPATH"))))
    own |= {"PYTHONPATH": path, "WORLD_SIZE": str(ranks)}
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with ExitStack() as files:
        programs = [
            subprocess.Popen(
                [
                    sys.executable,
                    str(Path(__file__).with_name(file)),
                    str(folder / f"{rank}.json"),
                    *words,
                ],
                env=own | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=files.enter_context((folder / f"{rank}.txt").open("wb")),
                stderr=subprocess.STDOUT,
            )
            for rank in range(ranks)
        ]
        try:
            codes = [program.wait(limit_s) for program in programs]
        finally:
            for program in programs:
                program.kill()
                program.wait()
    for rank, code in enumerate(codes):
        if code:
            raise RuntimeError((folder / f"{rank}.txt").read_text()[-3000:])
    steps: list[dict[str, Any]] = json.loads((folder / "0.json").read_text())
    return steps
