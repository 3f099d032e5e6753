"""KAIR's option files under the real launcher: video restoration on folders of frames, with every
way to start it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.e2e.conftest import Launched
from tests.unit.wandb_server import WandbServer
from training.launcher.local_ranks import free_port

Launch = Callable[..., Launched]
KEY = "fedcba9876543210fedcba9876543210fedcba98"
QUIET = {"device": "cpu", "use_dummy_wandb": True, "tensorboard": False, "report": False}


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small blurred video, made as in the documentation, with files of a spike camera."""
    folder = tmp_path_factory.mktemp("a video") / "blur video"
    command = [
        sys.executable,
        "examples/make_blur_video.py",
        str(folder),
        "--clips=4",
        "--frames=8",
        "--size=64",
        "--spikes",
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    return folder


@pytest.fixture
def options(video: Path, tmp_path: Path) -> Callable[..., Path]:
    """An option file for the video, with comments; `more`: section → keys."""

    def write(**more: dict[str, Any]) -> Path:
        train = {
            "dataroot_gt": f"{video}/train",
            "num_frame": 3,
            "gt_size": 32,
            "dataloader_batch_size": 2,
            "dataloader_num_workers": 1,
        }
        tree: dict[str, Any] = {
            "task": "a small deblurring",
            "model": "vrt",
            "gpu_ids": [0],
            "dist": True,
            "scale": 1,
            "n_channels": 3,
            "path": {"root": "experiments", "pretrained_netG": None},
            "datasets": {
                "train": train | more.pop("data", {}),
                "test": {"dataroot_gt": f"{video}/test", "num_frame": 4},
            },
            "netG": {"net_type": "recurrent", "upscale": 1, "embed_dim": 8, "num_blocks": 1},
            "train": {
                "G_optimizer_lr": 2e-3,
                "total_iter": 12,
                "checkpoint_test": 6,
                "checkpoint_save": 6,
                "checkpoint_print": 3,
            },
        }
        path = tmp_path / "options of mine.json"
        text = json.dumps(tree | more, indent=1)
        path.write_text(
            f"// made by a test: https://example.org/not//a//problem\n{text}  // the end\n"
        )
        return path

    return write


@pytest.mark.slow
def test_two_ranks_train(launch: Launch, options: Callable[..., Path], tmp_path: Path) -> None:
    flags = [
        f"--{name}={value}"
        for name, value in {
            **QUIET,
            "report": True,
            "out_dir": tmp_path / "runs",
            "log_dir": tmp_path,
        }.items()
    ]
    run = launch("./launch_train.sh", "2", str(options()), *flags, bare=True).ok()
    (made,) = (tmp_path / "runs").iterdir()
    assert made.name.startswith("a_small_deblurring"), run.output
    plan = json.loads((made / "plan.json").read_text())
    assert plan["task"]["name"] == "video_restoration" and plan["task"]["options"]["gt_size"] == 32
    assert (
        plan["config"]["num_iterations"] == 12
        and plan["config"]["eval_every"] == 6
        and plan["config"]["num_workers"] == 1
    )
    assert plan["batch"]["device_sequences"] == 2 and plan["batch"]["world_size"] == 2, (
        "the batch is of each rank"
    )
    summary = json.loads((made / "summary.json").read_text())
    assert summary["status"] == "done" and summary["samples"] == 48
    assert summary["val_psnr_last"] > 15 and 0 < summary["val_ssim_last"] <= 1
    pictures = list((made / "samples").glob("*.png"))
    report = (made / "report.html").read_text()
    assert pictures and all(path.stem in report for path in pictures)


@pytest.mark.soak
@pytest.mark.parametrize("how", ["train.py", "torchrun", "platform"])
def test_other_ways_to_start_it(how: str, launch: Launch, options: Callable[..., Path]) -> None:
    flags = {"tiny": False, **QUIET, "opt": options()}
    if how == "torchrun":
        run = launch(
            sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "train.py", **flags
        )
    elif how == "platform":
        ranks = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port("127.0.0.1")),
        }
        run = launch("./launch_train.sh", "1", env=ranks, **flags)
    else:
        run = launch(sys.executable, "train.py", **flags)
    assert run.wait() == 0, run.output[-3000:]
    assert run.summary["steps"] == 12 and run.summary["samples"] == (
        48 if how == "torchrun" else 24
    )


@pytest.mark.soak
def test_a_spike_camera_is_a_fourth_channel(
    launch: Launch, options: Callable[..., Path], video: Path
) -> None:
    spikes = {"dataroot_spike": f"{video}/train", "spike_channels": 2, "spike_h": 64, "spike_w": 64}
    flags = {"test_dataroot_spike": f"{video}/test", "num_iterations": 4, **QUIET}
    run = launch("./launch_train.sh", "2", str(options(data=spikes)), tiny=False, **flags).ok()
    without = launch(
        "./launch_train.sh", "2", str(options()), tiny=False, num_iterations=4, **QUIET
    ).ok()
    assert run.summary["parameters"] > without.summary["parameters"]


def test_all_errors_are_reported_at_once(launch: Launch, options: Callable[..., Path]) -> None:
    wrong = options(
        netG={"net_type": "vrt", "spynet_path": "model_zoo/spynet.pth"},
        data={"gt_sise": 64, "io_backend": {"type": "lmdb"}},
    )
    run = launch("./launch_train.sh", "4", str(wrong), tiny=False)
    assert run.wait() == 2
    said = run.output
    assert "gt_sise" in said and "gt_size" in said and "LMDB" in said
    assert "./launch_train.sh 4 --script main_train_vrt.py -- --opt" in said
    assert "nothing was launched" in said and "Traceback" not in said


@pytest.mark.parametrize(
    "name",
    ["vrt/006_train_vrt_videodeblurring_gopro", "rvrt/001_train_rvrt_videosr_bi_reds_30frames"],
)
def test_published_files_get_a_report(name: str, launch: Launch) -> None:
    run = launch(
        "./launch_train.sh", "8", str(ROOT / f"tests/fixtures/kair/options/{name}.json"), tiny=False
    )
    assert run.wait() == 2
    assert "./launch_train.sh 8 --script main_train_vrt.py -- --opt" in run.output
    assert "is not known" not in run.output and "Traceback" not in run.output


@pytest.fixture
def server() -> Iterator[WandbServer]:
    with WandbServer() as made:
        yield made


@pytest.mark.slow
def test_a_key_in_an_option_file_is_used_and_written_nowhere(
    launch: Launch, options: Callable[..., Path], server: WandbServer, tmp_path: Path
) -> None:
    logging = {"use_wandb": True, "wandb_project": "deblurring", "wandb_api_key": KEY}
    env = {"HOME": str(tmp_path / "home"), "WANDB_BASE_URL": server.address}
    file = options(logging=logging)
    flags = {key: value for key, value in QUIET.items() if key != "use_dummy_wandb"}
    run = launch("./launch_train.sh", "2", str(file), tiny=False, env=env, **flags).ok()
    assert KEY not in run.output
    (sent,) = server.runs.values()
    assert len(sent.losses) == 12 and server.keys == {KEY}, "the server got the key"
    for path in (p for p in tmp_path.rglob("*") if p.is_file() and p != file):
        assert KEY.encode() not in path.read_bytes(), f"the key is in {path}"
