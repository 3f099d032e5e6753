"""Kernels of the installed torch for the GPUs of this machine, without importing torch."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from training.core.messages import msg
from training.host.gpus import Gpu
from training.host.torch_build import TorchBuild
from training.plan.preflight.gpu_checks import on_cpu
from training.plan.preflight.report import ERROR, OK, Check
from training.plan.request import LaunchRequest
from training.tasks.memory import StepNeeds

# The result of torch.cuda.get_arch_list() is a string in this library: 'sm_80 sm_90 compute_90'.
ARCHITECTURES = re.compile(rb"(?:\b(?:sm|compute)_\d{2,3}[af]?(?: |\0)){1,40}")
# Jetson Thor in CUDA 12 → since CUDA 13. The kernels of other GPUs of 10.x do not run on it.
RENAMED = {(10, 1): (11, 0)}
LIBRARY = "lib/libtorch_python.so"  # 32 MB, read in 20 ms


def kernels(
    gpus: Sequence[Gpu],
    torch: TorchBuild | None,
    request: LaunchRequest,
    step: StepNeeds | None = None,
    other: Sequence[str] = (),
) -> Iterable[Check]:
    """The installed torch has kernels for these GPUs; no check where that is unknown without
    importing it. `other`: commands that install another build (torch_wheels)."""
    built = architectures(Path(torch.folder) / LIBRARY) if torch and torch.folder else []
    if torch is None or not built:
        return
    for gpu in gpus:
        if gpu.capability is None or runs(gpu.capability, built):
            continue
        needed = "sm_{}{}".format(*gpu.capability)
        text = msg(
            "plan.gpu.needs_kernels",
            index=gpu.index,
            name=gpu.name,
            needed=needed,
            version=torch.version,
            built=" ".join(built),
        )
        fixes = [*(other or [msg("plan.gpu.install_kernels")]), *on_cpu(request, step)]
        yield Check("torch kernels", ERROR, text, fixes)
        return
    yield Check("torch kernels", OK, msg("plan.gpu.kernels", built=" ".join(built)))


def architectures(library: Path) -> list[str]:
    """The architectures that torch was built for, read from its library; [] if unknown."""
    try:
        with (
            library.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            at = -1
            while (at := content.find(b"sm_", at + 1)) >= 0:
                found = ARCHITECTURES.match(content, at)
                if found and found[0].endswith(b"\0"):
                    return found[0].rstrip(b"\0 ").decode().split(" ")
    except (OSError, ValueError):  # no such file; an empty file cannot be mapped
        pass
    return []


def runs(capability: tuple[int, int], built: Sequence[str]) -> bool:
    """sm_XY runs on the same major version from its minor version on; compute_XY is compiled at run
    time for any later version. Of integrated GPUs (Jetson Orin, 8.7) this is true of recent drivers
    only: with an older one the first kernel fails, which is better than to refuse a recent one."""
    gpu = RENAMED.get(capability, capability)
    return any(_fits(gpu, *name.split("_", 1)) for name in built)


def _fits(capability: tuple[int, int], kind: str, number: str) -> bool:
    digits = number.rstrip("af")
    own = int(digits[:-1]), int(digits[-1])
    its = RENAMED.get(own, own)
    if number.endswith("a"):  # for this version only
        return its == capability
    if its[0] == capability[0] and its[1] <= capability[1]:
        return True
    return kind == "compute" and not number.endswith("f") and its <= capability
