"""`--check` with a torch that is installed but cannot be imported."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from tests.unit.conftest import LAUNCH, ROOT, ask, fake_torch, python
from training.core.errors import Exit
from training.host import packages
from training.host.torch_build import TorchBuild
from training.plan.preflight import torch_import

QUICKSTART = "configs/dual_gpu/quickstart.py"


def test_a_broken_torch_is_one_row_of_the_report(tmp_path: Path) -> None:
    site = fake_torch(tmp_path, None)
    (site / "torch/__init__.py").write_text("raise OSError('libcudart.so.13: no such\\nfile')\n")
    args = ["training.cli.plan", LAUNCH, "1", QUICKSTART, "--device=cpu", "--check", "--json"]
    done = python("-m", *args, cwd=ROOT, PYTHONPATH=f"{site}:{ROOT}")
    assert done.returncode == Exit.RESOURCES, done.stderr
    assert "Traceback" not in done.stderr
    found = json.loads(done.stdout)
    (row,) = [check for check in found["checks"] if check["name"] == "torch"]
    assert (row["status"], row["code"]) == ("error", "preflight.torch")
    assert row["text"] == "torch 2.99.0 cannot be imported: libcudart.so.13: no such"
    assert shlex.split(row["fixes"][0])[:4] == ["env", "-u", "PYTHONPATH", f"./{LAUNCH}"]
    assert {"CPU", "versions", "run folder"} <= {check["name"] for check in found["checks"]}
    assert found["memory"]["not_measured_because"] == row["text"]


def test_a_torch_that_is_too_old_is_refused_at_every_start(tmp_path: Path) -> None:
    """But not for a script."""
    site = fake_torch(tmp_path, None, "2.8.0a0+vendor")
    command = ["-m", "training.cli.plan", LAUNCH, "1", "--device=cpu", "--dry_run"]
    for more, code in ([QUICKSTART], Exit.RESOURCES), (["--script", "train.py"], Exit.DONE):
        done = python(*command, *more, cwd=ROOT, PYTHONPATH=f"{site}:{ROOT}")
        assert done.returncode == code, done.stderr
        assert ("torch 2.8.0a0+vendor" in done.stdout) == (code != Exit.DONE)
        assert (f"env -u PYTHONPATH ./{LAUNCH}" in done.stdout) == (code != Exit.DONE)
    build = TorchBuild("2.8.0", None, str(tmp_path / "torch"))
    fix = torch_import.fix(build, ask("--device=cpu"), {}, "/usr", "2.9")
    assert fix == packages.install(["torch>=2.9"])


def test_a_torch_of_this_python_is_installed_again(home: Path, tmp_path: Path) -> None:
    request = ask("--device=cpu")
    build = TorchBuild("2.99.0+cu130", "13.0", str(tmp_path / "torch"))
    fix = torch_import.fix(build, request, {}, prefix="/usr")
    pip = [*packages.installer(), "--force-reinstall"]
    assert shlex.split(fix) == [*pip, "torch==2.99.0"]
    fix = torch_import.fix(build, request, {}, prefix=str(ROOT / ".venv"))
    assert fix == f"rm -r {shlex.quote(str(ROOT / '.venv'))}; {request.command()}"
    fix = torch_import.fix(build, request, {"TORCH_LOCAL_PATH": str(tmp_path)}, prefix="/usr")
    assert fix == f"env -u TORCH_LOCAL_PATH {request.command()}"
