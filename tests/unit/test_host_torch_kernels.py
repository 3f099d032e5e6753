"""Kernels of an installed torch for the GPUs of the machine."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cases import each
from tests.unit.conftest import ROOT, SIMPLE, ask, fake_torch, python
from training.host import packages, torch_build
from training.host.gpus import Gpu, GpuInventory
from training.host.torch_build import TorchBuild
from training.plan.preflight import gpu_checks, torch_kernels, torch_wheels

Nvidia = Callable[..., dict[str, Any]]
QUICKSTART = "configs/dual_gpu/quickstart.py"
PYPI = {"PIP_CONFIG_FILE": os.devnull}


@each(
    ("capability", "built", "works"),
    [
        ((9, 0), "sm_80 sm_90", True),
        ((8, 9), "sm_80 sm_90", True),
        ((8, 0), "sm_86 sm_90", False),
        ((7, 0), "sm_75 sm_80", False),
        ((12, 0), "sm_80 sm_90", False),
        ((12, 0), "sm_80 sm_90 compute_90", True),
        ((12, 1), "sm_120", True),
        ((8, 0), "compute_90", False),
        ((9, 0), "sm_90a", True),
        ((9, 1), "sm_90a", False),
        ((10, 3), "sm_100f", True),
        ((11, 0), "compute_100f", False),
        # Jetson Orin, with the drivers of JetPack 7
        ((8, 7), "sm_80 sm_86 sm_90", True),
        ((8, 7), "sm_89", False),
        ((8, 6), "sm_87 sm_89", False),
        ((8, 9), "sm_86", True),
        ((9, 0), "sm_86 compute_86", True),
        ((10, 3), "sm_100", True),
        ((10, 0), "sm_103", False),
        ((10, 0), "sm_100a", True),
        ((10, 3), "sm_100a", False),
        ((10, 3), "compute_100a", False),
        ((10, 3), "compute_100f", True),
        ((10, 0), "sm_103f", False),
        # Jetson Thor, 10.1 in CUDA 12, 11.0 since CUDA 13
        ((11, 0), "sm_101", True),
        ((11, 0), "sm_101a", True),
        ((10, 1), "sm_110", True),
        ((10, 1), "sm_100", False),
        ((11, 0), "sm_100 compute_100", True),
        ((12, 0), "sm_120a", True),
        ((12, 1), "sm_120a", False),
        ((12, 1), "sm_120f", True),
        ((12, 0), "sm_121", False),
        ((12, 0), "sm_121 compute_121", False),
    ],
)
def test_which_kernels_run_where(capability: tuple[int, int], built: str, works: bool) -> None:
    assert torch_kernels.runs(capability, built.split()) is works


@pytest.mark.parametrize(
    ("content", "built"),
    [
        (b"x\0_get_sm_carveout\0sm_75 sm_80 compute_90\0y", ["sm_75", "sm_80", "compute_90"]),
        (b"x\0sm_100 sm_120a\0", ["sm_100", "sm_120a"]),
        (b"x\0-arch sm_80 -O3\0sm_90\0", ["sm_90"]),
        (b"no such text, but sm_ and sm_carveout", []),
        (b"", []),
    ],
)
def test_architectures_of_a_torch_build(content: bytes, built: list[str], tmp_path: Path) -> None:
    (tmp_path / "lib").write_bytes(content)
    assert torch_kernels.architectures(tmp_path / "lib") == built


def test_unknown_architectures_are_not_reported(tmp_path: Path) -> None:
    assert torch_kernels.architectures(tmp_path / "not there") == []
    card = Gpu(0, "GPU-0", "Card", None, None, None, None, None, (9, 0))
    request = ask(QUICKSTART, script=SIMPLE)
    for torch in (None, TorchBuild("2.13.0", "13.0"), TorchBuild("2.13.0", "13.0", str(tmp_path))):
        assert list(torch_kernels.kernels([card], torch, request)) == []


def test_a_run_of_hours_is_not_offered_on_the_cpu(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / torch_kernels.LIBRARY).write_bytes(b"x\0sm_80 sm_90\0")
    card = Gpu(0, "GPU-0", "Card", None, None, None, None, None, (7, 0))
    torch, request = TorchBuild("2.13.0", "13.0", str(tmp_path)), ask(QUICKSTART, script=SIMPLE)
    for flops, offered in ((1e13, 1), (1e18, 0)):
        step: Any = SimpleNamespace(flops=lambda steps, flops=flops: flops)
        (check,) = torch_kernels.kernels([card], torch, request, step)
        assert check.status == "error"
        assert sum("--device=cpu" in fix for fix in check.fixes) == offered


@each(("precision", "auto"), [("fp16", 1), ("fp8", 1), ("fp32", 0)])
def test_the_command_for_the_cpu_has_a_precision_of_cpus(precision: str, auto: int) -> None:
    request = ask(QUICKSTART, f"--precision={precision}", script=SIMPLE)
    (command,) = gpu_checks.on_cpu(request, None)
    assert command.count("--precision=") == 1 and command.count("--precision=auto") == auto


@each(
    ("capability", "cuda", "version", "exists"),
    [
        ((7, 0), "13.0", "2.13.0+cu130", True),
        ((7, 0), None, "2.13.0", True),
        ((8, 9), "12.4", "2.13.0+cu130", True),
        ((7, 0), "11.8", "2.13.0", False),
        ((12, 0), "12.8", "2.13.0", False),
        ((7, 0), "13.0", "2.15.0", False),
        ((7, 0), "13.0", "unknown", False),
        (None, "13.0", "2.13.0", False),
    ],
)
def test_the_build_for_older_gpus_and_drivers(
    capability: tuple[int, int] | None, cuda: str | None, version: str, exists: bool
) -> None:
    card = Gpu(0, "GPU-0", "Card", None, None, None, None, None, capability)
    machine = GpuInventory((card, card), "", "550.1", cuda)
    found = torch_wheels.older(machine, version, ask(QUICKSTART, script=SIMPLE))
    assert bool(found) is exists
    assert all("torch==2.13.0 " in one or "rm -r " in one for one in found)
    assert all(f"/{torch_wheels.OLDER_TAG}" in one and torch_wheels.INDEXES in one for one in found)


@each(
    ("processor", "capability", "warned", "older"),
    [
        ("x86_64", (7, 5), False, True),
        ("x86_64", (7, 0), True, True),
        ("aarch64", (7, 5), True, False),  # T4G
        ("aarch64", (8, 7), False, True),
        ("aarch64", (11, 0), False, False),  # Jetson Thor
        ("aarch64", (12, 1), False, False),  # DGX Spark
    ],
)
def test_builds_for_arm_have_other_kernels(
    processor: str,
    capability: tuple[int, int],
    warned: bool,
    older: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: processor)
    card = Gpu(0, "GPU-0", "Card", None, None, None, None, None, capability)
    machine, request = GpuInventory((card,), "", "580.1", "13.0"), ask(QUICKSTART, script=SIMPLE)
    request = replace(request, installed=False)
    checks = list(torch_wheels.before_install(machine, None, request, PYPI))
    found = torch_wheels.older(machine, "2.13.0", request)
    assert (bool(checks), bool(found)) == (warned, older)


def test_an_older_build_is_not_installed_beside_a_chosen_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only without the variable does the run use what was installed."""
    card = Gpu(0, "GPU-0", "Card", None, None, None, None, None, (7, 0))
    machine, request = GpuInventory((card,), "", "550.1", "13.0"), ask(QUICKSTART, script=SIMPLE)
    build = TorchBuild("2.13.0+cu130", "13.0", str(tmp_path / "torch"))
    by = torch_build.chosen_by(build, {"TORCH_LOCAL_PATH": str(tmp_path)})
    for prefix, environment in ((str(ROOT / ".venv"), 0), ("/usr", 1)):
        monkeypatch.setattr(sys, "prefix", prefix)
        (plain,) = torch_wheels.older(machine, build.version, request)
        assert "env" not in shlex.split(plain)
        (fix,) = torch_wheels.older(machine, build.version, request, by)
        first, then = (shlex.split(part) for part in fix.partition("  #")[0].split("; "))
        assert first[0] == ("rm", packages.installer()[0])[environment]
        assert then[:3] == ["env", "-u", "TORCH_LOCAL_PATH"]
        assert shlex.join(then).endswith(request.command())


def test_the_pinned_build_is_the_one_in_the_tables() -> None:
    """Where `make gpu-path` has installed it."""
    folder = ROOT / ".tools/cuda/torch"
    if not folder.is_dir():
        pytest.skip("no CUDA build of torch in .tools/cuda")
    if platform.machine() != "x86_64":
        pytest.skip("the table is that of x86")
    built = tuple(torch_kernels.architectures(folder / torch_kernels.LIBRARY))
    assert built == torch_wheels.PINNED_KERNELS
    assert f"'{torch_wheels.PINNED_CUDA}'" in (folder / "version.py").read_text()


def test_missing_kernels_are_an_error(nvidia: Nvidia, tmp_path: Path) -> None:
    variables = nvidia(CAPABILITY="7.0")
    package = fake_torch(tmp_path) / "torch"
    (package / "lib").mkdir()
    (package / torch_kernels.LIBRARY).write_bytes(b"x\0sm_80 sm_90\0")
    variables["PYTHONPATH"] = f"{package.parent}:{ROOT}"
    code = (
        "import os\nfrom training.core.errors import UserError\n"
        "from training.plan import training_plan\n"
        f"try:\n training_plan.make('{SIMPLE}', ['{QUICKSTART}', '--device=cuda'], os.environ)\n"
        "except UserError as refused:\n"
        " for p in refused.problems: print(p.what, p.fixes)"
    )
    done = python("-c", code, cwd=ROOT, **variables)
    assert done.returncode == 0, done.stderr
    text = "GPU 0 (Fake GPU 0) needs sm_70; torch 2.99.0 has kernels for sm_80 sm_90 only"
    wheel = "install torch==2.99.0 --index-url=URL"
    assert wheel not in done.stdout, "there is none for this version"
    assert text in done.stdout and f"'./{SIMPLE} {QUICKSTART} --device=cpu'" in done.stdout
