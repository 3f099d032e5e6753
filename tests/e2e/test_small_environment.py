"""An active environment with only torch and the four small packages that every run needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from benchmarks.gpu.bench import STAND_INS
from tests.conftest import ROOT, TOKEN
from tests.e2e.conftest import Launcher
from training.core.rundir import read_json
from training.host import packages

# Including the dependencies of torch.
WANTED = [
    *packages.REQUIRED,
    "typing-extensions",
    "sympy",
    "mpmath",
    "networkx",
    "jinja2",
    "markupsafe",
    "fsspec",
    "filelock",
]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    folder = tmp_path / "small"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = next(folder.glob("lib/python3*/site-packages"))
    tested = next((ROOT / ".venv").glob("lib/python3*/site-packages"))
    for name in WANTED:
        for part in {
            path.parts[0]
            for path in metadata.files(name) or []
            if path.parts[0] not in ("..", "__pycache__")
        }:
            (site / part).symlink_to(tested / part)
    if (tested / "torch.libs").exists():
        (site / "torch.libs").symlink_to(tested / "torch.libs")
    return folder


@pytest.mark.slow
def test_it_trains_and_one_line_lists_disabled_features(
    launch: Launcher, small: Path, tmp_path: Path
) -> None:
    env = {"VIRTUAL_ENV": str(small)}
    done = launch(
        "./train_dual_gpu.sh",
        "configs/dual_gpu/quickstart.py",
        env=env,
        tensorboard=True,
        report=True,
        use_dummy_wandb=None,
    )
    assert done.wait() == 2, "a tracker requested by a flag"
    assert "tensorboard is not installed" in done.output and "install tensorboard==" in done.output
    done = launch(
        "./train_dual_gpu.sh",
        "configs/dual_gpu/quickstart.py",
        env=env,
        tensorboard=None,
        report=True,
        use_dummy_wandb=None,
    ).ok()
    plan = read_json(done.run.plan) or {}
    assert len(done.losses) == 12 and done.run.report.exists()
    (line,) = [line for line in done.output.splitlines() if "missing optional packages" in line]
    for package in ("py-spy", "google-re2", "vl-convert-python", "tensorboard"):
        assert f"({package})" in line and f"{package}==" in line
    assert f"{small}/bin/python" in line and " install " in line and "Traceback" not in done.output
    assert (done.run.argv.read_bytes().split(b"\0")[0]).decode() == f"{small}/bin/python", plan[
        "command"
    ]
    # A hang without py-spy, and a diagnosis without google-re2.
    hung = launch("./train_dual_gpu.sh", "configs/dual_gpu/quickstart.py", env=env, tensorboard=None, use_dummy_wandb=None, hang_timeout=3,
                  retries=0, inject="sleep@rank=1,step=5")  # fmt: skip
    assert hung.wait() == 5, hung.output
    assert hung.failure["rank"] == 1 and "Traceback" not in hung.output
    assert hung.output.count("py-spy is not installed") <= 1
    command = [small / "bin/python", "-m", "training.cli.diagnose", str(hung.run.path), "--json"]
    told = subprocess.run(command, cwd=launch.project, capture_output=True, text=True, check=True)
    assert '"cause": "hang"' in told.stdout


@pytest.mark.slow
def test_it_trains_with_what_make_gpu_puts_in_place_of_packages(launch: Launcher) -> None:
    """A lent machine may have torch and numpy only, and no network."""
    config = "configs/dual_gpu/quickstart.py"
    done = launch(sys.executable, "train.py", config, env={"PYTHONPATH": str(STAND_INS)}).ok()
    assert len(done.losses) == 12


@pytest.mark.parametrize(
    "variable",
    [
        pytest.param("VIRTUAL_ENV", marks=pytest.mark.slow),
        pytest.param("CONDA_PREFIX", marks=pytest.mark.soak),
    ],
)
def test_a_script_needs_only_torch_and_creates_no_environment(
    project: Path, tmp_path: Path, token: str, variable: str
) -> None:
    """torch is a package without contents here, since only the script imports it."""
    own = tmp_path / "own"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", own], check=True)
    torch = next(own.glob("lib/python3*/site-packages")) / "torch"
    torch.mkdir()
    (torch / "version.py").write_text("__version__ = '2.13.0'\n")
    (torch / "__init__.py").write_text("from .version import __version__\n")
    (tmp_path / "main.py").write_text("import sys, torch; print(sys.prefix, torch.__version__)\n")
    copy = tmp_path / "duet"
    shutil.copytree(project, copy, symlinks=True, ignore=shutil.ignore_patterns(".venv*"))
    env = {k: v for k, v in os.environ.items() if not k.startswith("DUET_")}
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        env.pop(name, None)
    env |= {TOKEN: token, variable: str(own)}
    ended = subprocess.run(
        [copy / "duet", "run", "-n", "2", "main.py"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, f"{own} 2.13.0\n"), ended.stderr
    assert not (copy / ".venv").exists()
