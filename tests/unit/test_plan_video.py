"""The plan of an option file: which GPUs its gpu_ids mean, what is known of its data, how its batch
follows from the ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.conftest import ROOT
from tests.unit.option_files import KEY
from training.host.gpus import VISIBLE, Gpu, GpuInventory, visible
from training.host.torch_build import TorchBuild
from training.plan import request
from training.plan import training_plan as planner
from training.tasks import measurement
from training.tasks.measurement import Answer

GIB = 1 << 30


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """CUDA_VISIBLE_DEVICES chooses among them, as the driver's answer is read."""
    cards = [
        Gpu(n, f"GPU-{n}", f"Card {n}", 32 * GIB, 31 * GIB, 0, 40, 70.0, (12, 0)) for n in range(4)
    ]

    def look(environ: dict[str, str], **_: object) -> GpuInventory:
        chosen, reason = visible(cards, environ.get(VISIBLE))
        return GpuInventory(tuple(chosen), reason, "580", "13.0")

    monkeypatch.setattr(planner.gpus, "inventory", look)
    monkeypatch.setattr(planner.torch_build, "installed", lambda: TorchBuild("2.99.0", "13.0"))
    monkeypatch.setattr(planner.env_vars, "cpu_count", lambda: 8)
    monkeypatch.setattr(measurement, "ask", lambda question: Answer(None, "not in this test"))
    monkeypatch.setattr(planner.toolchain, "missing", lambda *_: {})
    monkeypatch.chdir(ROOT)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    for kind in ("blur", "sharp"):
        folder = tmp_path / "video/clip_1" / kind
        folder.mkdir(parents=True)
        for number in range(6):
            Image.new("RGB", (64, 48)).save(folder / f"{number:06d}.png")
    data = {
        "dataroot_gt": f"{tmp_path}/video",
        "num_frame": 3,
        "gt_size": 32,
        "dataloader_batch_size": 2,
    }
    options = {
        "task": "a",
        "model": "vrt",
        "gpu_ids": [2, 3],
        "datasets": {"train": data},
        "netG": {"net_type": "recurrent"},
    }
    path = tmp_path / "options.json"
    path.write_text(json.dumps(options | {"train": {"total_iter": 3}}))
    return path


def made(file: Path, ranks: int, **environ: str) -> dict[str, Any]:
    return planner.make(
        "launch_train.sh",
        [str(ranks), str(file), f"--log_dir={file.parent}/logs", f"--out_dir={file.parent}/runs"],
        environ,
    )[1]


def chosen(plan: dict[str, Any]) -> list[str]:
    return [
        v["value"] for v in plan["variables"] if v["name"] == VISIBLE and v["origin"] == "set here"
    ]


def test_gpu_ids_count_for_a_single_process(four_gpus: None, file: Path) -> None:
    plan = made(file, 1)
    assert [g["name"] for g in plan["gpus"]] == ["Card 2"] and chosen(plan) == ["2"]


def test_several_ranks_have_the_gpus_that_there_are(four_gpus: None, file: Path) -> None:
    plan = made(file, 2)
    assert [g["name"] for g in plan["gpus"]] == ["Card 0", "Card 1"] and chosen(plan) == []


def test_the_environment_wins(four_gpus: None, file: Path) -> None:
    plan = made(file, 1, CUDA_VISIBLE_DEVICES="1")
    assert [g["name"] for g in plan["gpus"]] == ["Card 1"] and chosen(plan) == []


def test_only_a_key_that_logs_in_to_wandb_has_a_note(four_gpus: None, file: Path) -> None:
    def notes(wanted: bool, *flags: str, **environ: str) -> int:
        logging = {"use_wandb": wanted, "wandb_api_key": KEY}
        file.write_text(json.dumps(tree | {"logging": logging}))
        args = ["2", str(file), *flags]
        found = request.read("launch_train.sh", args, environ, installed=False).notes
        return sum("WANDB_API_KEY" in note and str(file) in note for note in found)

    tree = json.loads(file.read_text())
    assert notes(True) == notes(False, "--use_dummy_wandb=false", "--wandb_mode=online") == 1
    assert notes(False) == notes(True, WANDB_API_KEY="x") == 0
    assert notes(True, "--wandb_mode=disabled") == notes(True, "--wandb_mode=offline") == 0


def test_the_sentences_of_the_plan(four_gpus: None, file: Path) -> None:
    plan = made(file, 2)
    assert f"data: {file.parent}/video, 1 clip with 6 frames; no validation" in plan["text"]
    assert plan["config"]["total_batch_size"] == 4 and "depth" not in plan["config"]
    assert "batch: 2 samples × 2 ranks × 1 accumulation step = 4 samples per step" in plan["text"]
    assert made(file, 4)["config"]["total_batch_size"] == 8


def test_the_first_launch_of_all_has_no_packages_yet(file: Path, home: Path) -> None:
    """The request is checked by whatever Python there is, before an environment is made."""
    script = [
        sys.executable,
        "-S",
        str(ROOT / "lib/run_module.py"),
        "training.cli.check_request",
        "launch_train.sh",
        "2",
        str(file),
    ]
    fine, wrong = (
        subprocess.run([*script, *more], capture_output=True, text=True, check=False)
        for more in ((), ("--num_frame=9",))
    )
    assert (fine.returncode, fine.stderr) == (0, "")
    assert (
        wrong.returncode == 2
        and "num_frame is 9" in wrong.stderr
        and "Traceback" not in wrong.stderr
    )
