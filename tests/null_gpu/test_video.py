"""Video restoration on two null GPUs: training, restored pictures, an export. Pixels mean nothing,
and an evaluation cannot divide by a count that no GPU has summed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import HOOK, Launched
from tests.e2e.hooks import at_import
from tests.null_gpu.conftest import NullGpus, duet
from tests.unit.films import HEIGHT, WIDTH, pictures
from tests.unit.video_data import rendered
from training.core.rundir import read_json

QUICKSTART = "configs/video/quickstart.py"
# cuDNN refuses a device that computes nothing; torch has convolutions of its own.
WITHOUT_CUDNN = at_import(
    "training.tasks.video_restoration.network",
    "import torch; torch.backends.cudnn.enabled = False",
)


@pytest.mark.timeout(900)
def test_training_restoration_and_export(
    train: Callable[..., Launched], gpus: NullGpus, project: Path, tmp_path: Path
) -> None:
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / HOOK).write_text(WITHOUT_CUDNN)
    gpus.environ["PYTHONPATH"] = str(hook)
    data = rendered(tmp_path / "clips")
    flags = {"data": None, "sample_tokens": None, "tiny": False, "num_workers": 0, "gt_size": 16}
    flags |= {"dataroot_gt": data / "train", "test_dataroot_gt": data / "test", "num_frame": 3}
    often = {"eval_every": 0, "save_every": 2, "num_iterations": 4, "precision": "bf16"}
    run = train(config=QUICKSTART, **flags | often).ok()
    plan = read_json(run.run.plan) or {}
    assert (plan["device"]["value"], plan["ranks"]) == ("cuda", 2)
    assert sorted(run.steps) == [1, 2, 3, 4]
    given, restored = pictures(tmp_path / "frames", 5), tmp_path / "restored"
    command = ("./duet", "restore", run.run.path, given, f"--out={restored}", "--device=cuda")
    found = json.loads(duet(gpus, project, *command, "--json"))
    assert found["frames"] == 5 and found["device"].startswith("cuda"), found
    assert (found["width"], found["height"]) == (WIDTH, HEIGHT)
    assert len(list(restored.glob("*.png"))) == 5
    duet(gpus, project, "./duet", "export", run.run.path, f"--out={tmp_path / 'model'}")
    assert (tmp_path / "model/model.safetensors").exists()
