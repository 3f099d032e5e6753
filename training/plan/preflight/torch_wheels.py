"""Published builds of torch for these GPUs and this driver. Standard library only: also used before
anything is installed."""

from __future__ import annotations

import platform
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence

from training.core.messages import msg
from training.core.project import ROOT
from training.host import package_sources, packages
from training.host.gpus import Gpu, GpuInventory
from training.host.torch_build import TorchBuild
from training.plan.preflight.report import WARNING, Check
from training.plan.preflight.torch_kernels import runs
from training.plan.request import LaunchRequest

NAME = "torch build"
# PyPI's build of the version in requirements.lock, which .venv gets on a machine with GPUs.
PINNED_CUDA = "13.0"
PINNED_KERNELS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
PINNED_KERNELS_ARM = ("sm_80", "sm_90", "sm_100", "sm_110", "sm_120")
# The build for older GPUs and drivers, which torch 2.14 has for the last time (pytorch#172352,
# pytorch#190385).
OLDER_CUDA, OLDER_TAG, OLDER_INDEX = "12.6", "cu126", "URL"
OLDER_KERNELS = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
OLDER_KERNELS_ARM = ("sm_80", "sm_90")
OLDER_VERSIONS = (2, 6), (2, 14)
INDEXES = "https://pytorch.org/get-started/previous-versions/"


def older(
    machine: GpuInventory, version: str, request: LaunchRequest, chosen_by: str = ""
) -> list[str]:
    """The command that installs the build for older GPUs and drivers. `version`: such as
    2.13.0+cu130; [] if that release has no older build, or if the GPUs or the driver cannot use
    it. `chosen_by`: the variable that selects the torch of this run, which would hide the installed
    one."""
    number = re.match(r"(\d+)\.(\d+)[.\d]*", version)
    first, last = OLDER_VERSIONS
    if not number or not first <= (int(number[1]), int(number[2])) <= last:
        return []
    gpus = machine.gpus[: request.gpu_ranks]
    older_kernels = OLDER_KERNELS_ARM if _on_arm() else OLDER_KERNELS
    if not all(gpu.capability and runs(gpu.capability, older_kernels) for gpu in gpus):
        return []
    if machine.cuda and _major(machine.cuda) < _major(OLDER_CUDA):
        return []
    if request.installed and sys.prefix != str(ROOT / ".venv"):
        wanted = [f"torch=={number[0]}", f"--index-url={OLDER_INDEX}"]
        command = shlex.join([*packages.installer(), *wanted])
        then = f"; env -u {chosen_by} {request.command()}" if chosen_by else ""
        return [_explained(command + then)]
    unset = f"env -u {chosen_by} " if chosen_by else ""
    again = _explained(f"{unset}PIP_EXTRA_INDEX_URL={OLDER_INDEX} {request.command()}")
    return [f"rm -r {shlex.quote(str(ROOT / '.venv'))}; {again}" if request.installed else again]


def _explained(command: str) -> str:
    return msg("plan.torch.index", command=command, index=OLDER_INDEX, tag=OLDER_TAG, page=INDEXES)


def before_install(
    machine: GpuInventory,
    torch: TorchBuild | None,
    request: LaunchRequest,
    environ: Mapping[str, str],
) -> Iterable[Check]:
    """Whether the torch that is about to be installed can use these GPUs. No check where the user
    has chosen other sources of packages."""
    gpus = machine.gpus[: request.gpu_ranks]
    if request.installed or torch or not gpus or package_sources.other_sources(environ):
        return
    version = next(pin for pin in packages.locked("run") if pin.startswith("torch=="))[7:]
    why = _too_old(gpus) or _driver(machine)
    if why:
        text = msg("plan.torch.will_not_work", version=version, cuda=PINNED_CUDA, why=why)
        fixes = older(machine, version, request) or [msg("plan.torch.update_driver")]
        yield Check(NAME, WARNING, text, fixes)


def _too_old(gpus: Sequence[Gpu]) -> str:
    """The first GPU that lacks kernels; ''."""
    pinned = PINNED_KERNELS_ARM if _on_arm() else PINNED_KERNELS
    for gpu in gpus:
        if gpu.capability and not runs(gpu.capability, pinned):
            needed = "sm_{}{}".format(*gpu.capability)
            return msg("plan.torch.no_kernels", index=gpu.index, name=gpu.name, needed=needed)
    return ""


def _on_arm() -> bool:
    """Whether torch's builds are those for aarch64, which have kernels for other GPUs."""
    return platform.machine() == "aarch64"


def _driver(machine: GpuInventory) -> str:
    """The driver, if it is too old; ''."""
    if machine.cuda is None or _major(machine.cuda) >= _major(PINNED_CUDA):
        return ""
    return msg("plan.torch.old_driver", driver=machine.driver, supported=machine.cuda)


def _major(cuda: str) -> int:
    return int(cuda.partition(".")[0])
