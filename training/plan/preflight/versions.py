"""Installed versions, read without importing the packages."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib import metadata

import training
from training.core.messages import msg
from training.host import torch_build
from training.host.gpus import GpuInventory
from training.host.torch_build import TorchBuild
from training.plan.preflight.report import OK, Check

NAME = "versions"
TITLES = {
    "duet": "Duet",
    "python": "Python",
    "torch_cuda": msg("plan.versions.for_cuda"),
    "nccl": "NCCL",
    "driver": msg("plan.versions.driver"),
    "driver_cuda": msg("plan.versions.up_to_cuda"),
    "kernel": "Linux",
}


def read(torch: TorchBuild | None, machine: GpuInventory) -> dict[str, str | None]:
    """Versions by name; None: not installed or unknown."""
    return {
        "duet": training.__version__,
        "python": platform.python_version(),
        "torch": torch.version if torch else None,
        "torch_cuda": torch.cuda if torch else None,
        "nccl": torch_build.nccl(),
        "numpy": _version("numpy"),
        "driver": machine.driver,
        "driver_cuda": machine.cuda,
        "kernel": os.uname().release,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check(torch: TorchBuild | None, machine: GpuInventory) -> Check:
    versions = read(torch, machine)
    return Check(NAME, OK, sentence(versions), facts=versions)


def sentence(versions: Mapping[str, str | None]) -> str:
    return ", ".join(f"{TITLES.get(name, name)} {value or '-'}" for name, value in versions.items())
