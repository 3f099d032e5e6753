"""Checks before every start: the hardware and the packages have the precision."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable

from training.core.messages import msg
from training.host import decisions, packages
from training.host.gpus import GpuInventory
from training.host.torch_build import TorchBuild
from training.plan.preflight.report import ERROR, WARNING, Check
from training.plan.request import LaunchRequest

# Earlier ones lack its workaround for a Triton bug that can put NaN into compiled backward passes
# (triton#11111); this one needs torch 2.11.
TORCHAO, OLDEST_TORCHAO = "torchao", (0, 18)
OLDEST_TORCH = (2, 11)


def precision_works(
    precision: str,
    machine: GpuInventory,
    device: str,
    torch: TorchBuild | None,
    request: LaunchRequest,
) -> Iterable[Check]:
    """A precision that the hardware only emulates or does not have, and fp8 without its
    packages."""
    fix = request.command(precision="auto")
    if device == "cpu" and precision == "fp16":
        yield Check("precision", ERROR, _given(request, msg("plan.precision.fp16_cpu")), [fix])
    if device == "cpu" and precision == "bf16" and not decisions.cpu_bf16():
        yield Check("precision", WARNING, msg("plan.precision.bf16_cpu"), [fix])
    if device == "cuda" and (slow := _slow(precision, machine, request.gpu_ranks)):
        yield Check("precision", WARNING, slow, [fix])
    if precision == "fp8":
        hardware = _no_fp8(machine, device, request.gpu_ranks)
        if hardware:
            yield Check("precision", ERROR, _given(request, hardware), [fix])
        # Nothing to install for hardware that cannot use it, or before the first installation.
        elif request.installed:
            yield from _fp8_packages(torch, fix)


def _given(request: LaunchRequest, why: str) -> str:
    """Why the precision cannot be used, after the place where it was set."""
    value, origin = request.config.precision, request.origins["precision"]
    return msg("plan.precision.given", value=value, origin=origin, why=why)


def _slow(precision: str, machine: GpuInventory, ranks: int) -> str:
    """Why a half precision is slow on the first GPU without matrix units for it; ''."""
    for gpu in machine.gpus[:ranks]:
        if precision == "bf16" and not decisions.has_bf16(gpu):
            return msg("plan.precision.no_bf16", name=gpu.name)
        if precision == "fp16" and decisions.best_type(gpu.capability, gpu.name) == "fp32":
            return msg("plan.precision.no_fp16", name=gpu.name)
    return ""


def _no_fp8(machine: GpuInventory, device: str, ranks: int) -> str:
    """Why this hardware has no fp8; '' if it has."""
    oldest = _shown(decisions.FP8_CAPABILITY)
    if device == "cpu":
        return msg("plan.precision.fp8_cpu", oldest=oldest)
    for gpu in machine.gpus[:ranks]:
        if gpu.capability and not decisions.has_fp8(gpu):
            capability = _shown(gpu.capability)
            return msg("plan.precision.no_fp8", name=gpu.name, capability=capability, oldest=oldest)
    return ""


def _fp8_packages(torch: TorchBuild | None, fix: str) -> Iterable[Check]:
    oldest = f"{TORCHAO}>={_shown(OLDEST_TORCHAO)}"
    if not packages.found(TORCHAO):
        text = msg("plan.precision.fp8_missing", package=TORCHAO)
        yield Check("precision", ERROR, text, [*packages.add([oldest]), fix])
    elif (version := _version(TORCHAO)) and _older(version, OLDEST_TORCHAO):
        text = msg("plan.precision.fp8_old", package=f"{TORCHAO} {version}", oldest=oldest)
        yield Check("precision", ERROR, text, [*packages.add([oldest]), fix])
    if torch and _older(torch.version, OLDEST_TORCH):
        newer = f"torch>={_shown(OLDEST_TORCH)}"
        text = msg("plan.precision.fp8_old", package=f"torch {torch.version}", oldest=newer)
        yield Check("precision", ERROR, text, [packages.install([newer]), fix])


def _version(package: str) -> str:
    """'' if it was not installed as a package: a local build counts as the newest."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _older(version: str, oldest: tuple[int, int]) -> bool:
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and (int(found[1]), int(found[2])) < oldest


def _shown(version: tuple[int, int]) -> str:
    return "{}.{}".format(*version)
