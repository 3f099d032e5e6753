"""Null GPUs for a benchmark: torch's CUDA build on GPUs that compute nothing (tests/null_gpu)."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.null_gpu import programs
from tests.null_gpu.build import build


@contextlib.contextmanager
def environment(**changes: str) -> Iterator[dict[str, str]]:
    """Variables of the programs on them. Raises SystemExit without torch's CUDA build."""
    if not (programs.CUDA_TORCH / "torch").is_dir():
        sys.exit("no CUDA build of torch in .tools/cuda: make gpu-path installs it")
    with tempfile.TemporaryDirectory() as name:
        libraries = Path(name)
        build(programs.CUDA_TORCH / "torch", libraries)
        yield programs.environment(libraries, libraries / "state") | changes
