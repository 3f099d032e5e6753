"""An option file as a job: frozen with its batch and trained; its key is in none of the frozen
files."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.slurm.conftest import User, losses
from training.core.rundir import read_json

pytestmark = pytest.mark.slow
KEY = secrets.token_hex(20)  # in no file: the project, with its tests, is frozen too


@pytest.mark.soak
def test_an_option_file_trains_as_a_job(user: User) -> None:
    video = user.project / "data/a video"
    command = [
        sys.executable,
        "examples/make_blur_video.py",
        str(video),
        "--clips=2",
        "--frames=6",
        "--size=64",
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    data = {
        "dataroot_gt": f"{video}/train",
        "num_frame": 3,
        "gt_size": 32,
        "dataloader_batch_size": 2,
    }
    tree = {
        "task": "deblur as a job",
        "model": "vrt",
        "datasets": {"train": data},
        "netG": {"net_type": "recurrent", "embed_dim": 8, "num_blocks": 1},
        "train": {"total_iter": 8, "checkpoint_save": 4},
        "logging": {"use_wandb": False, "use_tensorboard": False, "wandb_api_key": KEY},
        "duet": {"device": "cpu", "report": False},
    }
    options = user.project / "options/mine.json"
    options.write_text(json.dumps(tree))
    job = user.sbatch("--gres=none", args=("--ranks_per_node=2", "options/mine.json"))
    user.end(job)
    run = user.run()
    assert run.name.startswith("deblur_as_a_job") and sorted(losses(run)) == list(range(1, 9)), (
        user.log(job)
    )
    plan = read_json(run.plan) or {}
    assert plan["config"]["total_batch_size"] == 4 and plan["task"]["options"]["embed_dim"] == 8
    assert (run.path / "code/options/vrt").is_dir() and not (
        run.path / "code/options/mine.json"
    ).exists()
    for path in (
        p for p in (*run.path.rglob("*"), *(user.project / "logs").rglob("*")) if p.is_file()
    ):
        assert KEY.encode() not in path.read_bytes(), f"the key is in {path}"
