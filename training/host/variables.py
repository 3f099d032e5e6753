"""Environment variables of a run: only those with an effect, never over the user's own, each with its reason."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

# Variables that people set and that do nothing in torch ≥ 2.9, with what does (read off torch's sources).
WITHOUT_EFFECT = {
    "NCCL_TIMEOUT": "does not exist: the time limit of collectives is an argument of init_process_group (here --hang_timeout)",
    "NCCL_ASYNC_ERROR_HANDLING": "is the old name of TORCH_NCCL_ASYNC_ERROR_HANDLING, which is on by default",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "is the old name of TORCH_FR_BUFFER_SIZE, which is 2000 by default",
}


@dataclass(frozen=True)
class Variable:
    name: str
    value: str
    why: str
    origin: str  # "set here", or "kept" when the user's own value stays

    def record(self) -> dict[str, Any]:
        return asdict(self)


def cpu_count() -> int:
    """Cores this process may use (taskset, cgroup cpusets)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose(environ: Mapping[str, str], *, device: str, ranks: int, local_ranks: int, debug: bool) -> list[Variable]:
    """The variables of the ranks; `local_ranks` of `ranks` are on this machine."""
    alone = local_ranks == ranks
    wanted: list[tuple[str, str, str]] = [("PYTHONUNBUFFERED", "1", "a rank's last words reach its log")]
    if ranks > 1:
        threads = max(1, cpu_count() // local_ranks)
        wanted.append(("OMP_NUM_THREADS", str(threads), f"{cpu_count()} cores shared by {local_ranks} ranks"))
    if ranks > 1 and alone:
        wanted.append(("GLOO_SOCKET_IFNAME", "lo", "one machine: no name look-up, nothing listens outside"))
    if device == "cuda":
        wanted.append(("CUDA_DEVICE_ORDER", "PCI_BUS_ID", "the same numbering as nvidia-smi"))
        if ranks > 1 and alone:
            wanted.append(("NCCL_SOCKET_IFNAME", "lo", "one machine: no name look-up, nothing listens outside"))
        if "PYTORCH_CUDA_ALLOC_CONF" not in environ:  # the older name wins where both are set
            wanted.append(("PYTORCH_ALLOC_CONF", "expandable_segments:True", "less fragmentation, fewer out-of-memory errors"))
        home = environ.get("CUDA_HOME") or _cuda_home()
        if home:
            wanted.append(("CUDA_HOME", home, "compiled extensions find CUDA"))
    if debug:
        # Not DETAIL: with gloo it makes every DDP model crash in torch 2.13 (SIGSEGV, with bare torchrun too).
        wanted.append(("TORCH_DISTRIBUTED_DEBUG", "INFO", "--debug: DDP tells its buckets and unused parameters"))
        wanted.append(("TORCH_CPP_LOG_LEVEL", "INFO", "--debug: torch.distributed tells what it does"))
        if device == "cuda":
            wanted.append(("NCCL_DEBUG", "INFO", "--debug: NCCL tells what it does"))
    return [
        Variable(name, environ[name], "your own value stays", "kept") if environ.get(name) else Variable(name, value, why, "set here")
        for name, value, why in wanted
    ]


def useless(environ: Mapping[str, str]) -> list[str]:
    """Warnings about variables that the user set and that do nothing."""
    return [f"{name}={environ[name]} has no effect: it {why}" for name, why in WITHOUT_EFFECT.items() if name in environ]


def _cuda_home() -> str | None:
    import shutil

    nvcc = shutil.which("nvcc")
    candidates = [os.path.dirname(os.path.dirname(os.path.realpath(nvcc)))] if nvcc else []
    return next((c for c in [*candidates, "/usr/local/cuda"] if os.path.exists(f"{c}/include/cuda_runtime.h")), None)
