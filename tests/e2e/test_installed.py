"""Duet as an installed package: `pip install` in a clean environment, then the command `duet` and
`import training.inspector` from any folder, without a checkout on the path. Required packages come
from the tested environment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT, TOKEN

pytestmark = pytest.mark.slow
SCRIPT = """
import torch.distributed as dist
from training.inspector import DDPInspector
from training.inspector.distributed import all_reduce_mean, cleanup, setup
setup()
# One write, since two ranks of torchrun share the stream.
print(f"mean {all_reduce_mean(float(dist.get_rank()))}\\n", end="", flush=True)
cleanup()
"""


def environment(folder: Path, project: Path, *options: str) -> Path:
    """A clean environment with only the project installed by pip."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    command = [
        folder / "bin/python",
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "-c",
        project / "requirements.lock",
        *options,
        project,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory, project: Path) -> Path:
    return environment(tmp_path_factory.mktemp("clean") / "en v", project)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, project: Path) -> Path:
    """The same environment with the required packages."""
    folder = environment(tmp_path_factory.mktemp("clean") / "en v", project)
    tested = next((ROOT / ".venv").glob("lib/python3*/site-packages"))
    (next(folder.glob("lib/python3*/site-packages")) / "tested.pth").write_text(f"{tested}\n")
    return folder


@pytest.fixture
def call(tmp_path: Path, token: str) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a program of an environment in an empty folder."""
    hidden = ("VIRTUAL_ENV", "CONDA_PREFIX", "TORCH_LOCAL_PATH", "PYTHONPATH")
    env = {k: v for k, v in os.environ.items() if k not in hidden and not k.startswith("DUET_")} | {
        TOKEN: token
    }
    (tmp_path / "my work").mkdir()

    def run(folder: Path, program: str, *args: str) -> subprocess.CompletedProcess[str]:
        command = [folder / "bin" / program, *args]
        return subprocess.run(
            command,
            env=env,
            cwd=tmp_path / "my work",
            capture_output=True,
            text=True,
            check=False,
            timeout=250,
        )

    return run


Call = Callable[..., subprocess.CompletedProcess[str]]


def test_commands_without_dependencies_work_without_packages(bare: Path, call: Call) -> None:
    assert call(bare, "duet", "--version").stdout == "duet 0.1.0\n"
    for words in (["help"], ["launch", "--help"], ["diagnose", "--help"]):
        done = call(bare, "duet", *words)
        assert (done.returncode, done.stderr) == (0, "")
        assert (
            "duet " in done.stdout
            and "./duet" not in done.stdout
            and "./launch_train.sh" not in done.stdout
        )
    log = ROOT / "tests/fixtures/logs/checkpoint_corrupt/01.log"
    assert "checkpoint_corrupt" in call(bare, "duet", "diagnose", str(log)).stdout
    done = call(bare, "duet", "inspect")
    assert (
        done.returncode == 2 and "try:     duet train configs/dual_gpu/quickstart.py" in done.stderr
    )
    # No separate .venv inside the user's environment.
    done = call(bare, "duet", "train", "configs/dual_gpu/quickstart.py", "--device=cpu")
    assert done.returncode == 3 and "lacks: no torch" in done.stderr
    assert (
        "install numpy psutil nvidia-ml-py tqdm torch" in done.stderr and str(bare) in done.stderr
    )


@pytest.mark.soak
def test_a_training_writes_to_the_current_folder(
    installed: Path, call: Call, tmp_path: Path
) -> None:
    done = call(
        installed,
        "duet",
        "train",
        "configs/dual_gpu/quickstart.py",
        "--device=cpu",
        "--num_iterations=3",
        "--eval_every=3",
    )
    assert done.returncode == 0, done.stderr
    assert (
        "Resume     duet train --resume=quickstart_" in done.stderr
        and "Monitor    duet monitor --run=" in done.stderr
    )
    assert sorted(p.name for p in (tmp_path / "my work").iterdir()) == [
        "data",
        "experiments",
        "logs",
    ]
    home = next(installed.glob("lib/python3*/site-packages/duet_home"))
    assert not {"data", "experiments", "logs", ".venv"} & {p.name for p in home.iterdir()}
    shown = call(installed, "duet", "inspect")
    assert "finished at step 3 of 3" in shown.stdout


def test_a_script_under_duet_and_under_torchrun(
    installed: Path, call: Call, tmp_path: Path
) -> None:
    (tmp_path / "my work/main.py").write_text(SCRIPT)
    done = call(installed, "duet", "launch", "2", "--script", "main.py")
    assert done.returncode == 0 and "mean 0.5" in done.stdout + done.stderr, done.stderr
    done = call(installed, "python", "-m", "torch.distributed.run", "--nproc_per_node=2", "main.py")
    assert done.returncode == 0 and done.stdout.count("mean 0.5") == 2, done.stderr


@pytest.mark.parametrize("own", ["a folder", "a package"])
def test_the_users_own_training_package_is_not_hidden(
    installed: Path, call: Call, tmp_path: Path, own: str
) -> None:
    folder = tmp_path / "my work/training"
    folder.mkdir()
    (folder / "loop.py").write_text("mine = True\n")
    if own == "a package":
        (folder / "__init__.py").touch()
    code = (
        "from training.loop import mine; import training.inspector.distributed, "
        "duet_inspector; "
        "training.inspector.DDPInspector"
    )
    done = call(installed, "python", "-c", f"{code}; print(mine, training.__path__)")
    assert done.returncode == 0 and str(folder) in done.stdout, done.stderr


def test_an_editable_install_is_the_checkout(project: Path, call: Call, tmp_path: Path) -> None:
    folder = environment(tmp_path / "en v", project, "-e")
    done = call(
        folder, "python", "-c", "import training.core.project as p; print(p.ROOT, p.INSTALLED)"
    )
    assert done.stdout == f"{project} False\n", done.stderr
    assert call(folder, "duet", "--version").stdout == "duet 0.1.0\n"
    for words in (["help"], ["launch", "--help"]):  # outside the checkout
        shown = call(folder, "duet", *words).stdout
        assert "  duet " in shown or "Usage: duet " in shown
        assert "./duet" not in shown and "/launch_train.sh" not in shown
