"""Real training programs, unchanged: the same numbers, and an exit that means the same, under
torchrun and under `duet run`."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import PEERS, SCRIPTS
from training.core.rundir import RunDir, read_json

Train = Callable[..., tuple[int, str]]
OWN_LOOPS = ("like_nanogpt", "like_nanochat")
NEEDS_PEERS = ("with_accelerate", "with_fabric", "with_lightning", "with_transformers")


@pytest.fixture
def train(tmp_path: Path, token: str, project: Path) -> Train:
    """Runs a program in a folder of its own, by `launcher`; returns its status and output."""

    def run(launcher: str, name: str, *args: str) -> tuple[int, str]:
        if name in NEEDS_PEERS and not PEERS.is_dir():
            pytest.skip("accelerate, Lightning and transformers are missing: make peers")
        folder = tmp_path / launcher
        folder.mkdir(exist_ok=True)
        python = project / ".venv/bin/python"
        words = program(folder, name, python)
        command = {
            "torchrun": [
                *(str(python), "-m", "torch.distributed.run", "--standalone"),
                *("--local-addr=127.0.0.1", "--nproc-per-node=2"),
            ],
            "duet": [
                *(str(project / "duet"), "run", "-n", "2", "--report=false", "--run_name=one"),
                *(f"--out_dir={folder}/experiments", f"--log_dir={folder}/logs"),
            ],
        }[launcher]
        env = {k: v for k, v in os.environ.items() if not k.startswith("DUET_")}
        env |= {"DUET_TOKEN": token, "PYTHONPATH": str(PEERS)}
        ended = subprocess.run(
            [*command, *words, f"{folder}/end", *args],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=300,
        )
        return ended.returncode, ended.stdout

    return run


def program(folder: Path, name: str, python: Path) -> list[str]:
    """Puts the program there; how a launcher is given it."""
    if name == "like_nanochat":
        (folder / "scripts").mkdir(exist_ok=True)
        shutil.copy(SCRIPTS / f"{name}.py", folder / "scripts/train.py")
        return ["-m", "scripts.train"]
    source = "like_nanogpt" if name == "shell_script" else name
    shutil.copy(SCRIPTS / f"{source}.py", folder / "train.py")
    if name == "shell_script":
        start = folder / "start.sh"
        start.write_text(f'#!/bin/sh\n{shlex.quote(str(python))} -u train.py "$@"\n')
        start.chmod(0o755)
        return ["--no-python", "./start.sh"]
    return ["train.py"]


def ends(folder: Path) -> list[list[str]]:
    """(world size, local rank, a trained number) of every rank."""
    return [(folder / f"end{rank}").read_text().split() for rank in range(2)]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("ddp_tutorial", marks=pytest.mark.slow),
        *(
            pytest.param(name, marks=pytest.mark.soak)
            for name in (*OWN_LOOPS, "shell_script", *NEEDS_PEERS)
        ),
    ],
)
def test_a_program_trains_as_under_torchrun(train: Train, tmp_path: Path, name: str) -> None:
    status, output = train("torchrun", name, "train")
    # gloo aborts some processes after their end
    assert status == 0 or "terminate called without" in output, output[-4000:]
    status, output = train("duet", name, "train")
    assert status == 0, output[-4000:]
    ours = ends(tmp_path / "duet")
    assert [end[:2] for end in ours] == [["2", "0"], ["2", "1"]]
    assert ours == ends(tmp_path / "torchrun")


@pytest.mark.soak
@pytest.mark.parametrize("name", ["ddp_tutorial", *OWN_LOOPS, *NEEDS_PEERS])
def test_a_failed_program_is_a_failure_under_both(train: Train, tmp_path: Path, name: str) -> None:
    status, output = train("torchrun", name, "fail")
    assert status == 1, output[-4000:]
    status, output = train("duet", name, "fail")
    assert status == 4, output[-4000:]
    failure = read_json(RunDir(tmp_path / "duet/experiments/one").failure) or {}
    assert (failure["rank"], failure["summary"]) == (1, "RuntimeError: planted")
    source = (SCRIPTS / f"{name}.py").read_text().splitlines()
    line = next(i for i, text in enumerate(source, 1) if "planted" in text)
    assert failure["where"].endswith(f"train.py:{line}")


@pytest.mark.soak
@pytest.mark.parametrize("devices", ["auto", "1", "4"])
def test_lightning_with_another_number_of_devices(
    train: Train, tmp_path: Path, devices: str
) -> None:
    """On a CPU `auto` is one device."""
    status, output = train("torchrun", "with_lightning", "train", devices)
    assert status == 1, output[-4000:]
    status, output = train("duet", "with_lightning", "train", devices)
    assert status == 4, output[-4000:]
    failure = read_json(RunDir(tmp_path / "duet/experiments/one").failure) or {}
    assert failure["cause"] == "config_error"
    assert failure["summary"].startswith("ValueError: You set `devices=")
