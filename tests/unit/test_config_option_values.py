"""The values that a KAIR option file sets."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from tests.unit.conftest import only
from tests.unit.option_files import KNOWN, SMALL, read, refused, small, values
from training.config import resolve
from training.config.flags import CommandLine
from training.tasks.video_restoration import schedule
from training.tasks.video_restoration.kair.keys import KEYS, leaf
from training.tasks.video_restoration.options import NAME as VIDEO
from training.tasks.video_restoration.options import VideoOptions


def test_initial_weights() -> None:
    assert values(small(path__pretrained_netG="m.pth"))["init_from"] == "m.pth"


def test_every_key_sets_its_field_with_its_line_as_origin() -> None:
    text = """{ // a run
  "task": "my task/1", "gpu_ids": [0, 2], "dist": true,
  "find_unused_parameters": true, "use_static_graph": false, "scale": 1, "n_channels": 3,
  "path": {"root": "/disk//runs"}, // twice //
  "datasets": {
    "train": {"dataroot_gt": "a//gt", "dataroot_lq": "a//lq", "dataroot_spike": "s", "spike_channels": 2, "num_frame": 7, "gt_size": 96,
      "interval_list": [1, 2], "use_rot": true, "dataloader_batch_size": 3, "dataloader_num_workers": 4, "persistent_workers": true},
    "test": {"dataroot_gt": "t", "num_frame": -1, "spike_channels": 2}
  },
  "netG": {"net_type": "recurrent", "in_chans": 5, "embed_dim": 48, "upscale": 1},
  "train": {"total_iter": 3e5, "manual_seed": 7, "checkpoint_test": 11, "checkpoint_save": 12, "checkpoint_print": 13,
    "G_optimizer_lr": 4e-4, "G_optimizer_betas": [0.9, 0.99], "G_optimizer_clipgrad": 0.5, "G_optimizer_wd": 0, "E_decay": 0.999,
    "G_scheduler_periods": [100, 2e5], "G_scheduler_restart_weights": 1, "G_scheduler_milestones": [5]},
  "val": {"size_patch_testing": 64},
  "logging": {"use_tensorboard": false, "use_wandb": true, "wandb_project": "p", "wandb_name": "n", "wandb_entity": null},
  "duet": {"device": "auto"}
}"""
    loaded = read(text)
    assert loaded.problems == []
    assert (loaded.title, loaded.gpu_ids) == ("my_task_1", [0, 2])
    found = {name: value for name, (value, _) in loaded.values.items()}
    assert found == {
        **{
            "task": VIDEO,
            "find_unused_parameters": True,
            "use_static_graph": False,
            "scale": "1",
            "out_dir": "/disk//runs",
        },
        **{
            "dataroot_gt": "a//gt",
            "dataroot_lq": "a//lq",
            "dataroot_spike": "s",
            "spike_channels": 2,
            "num_frame": 7,
            "gt_size": 96,
        },
        **{
            "interval_list": "1,2",
            "use_rot": True,
            "use_hflip": False,
            "device_batch_size": 3,
            "num_workers": 4,
            "persistent_workers": True,
        },
        **{
            "test_dataroot_gt": "t",
            "test_num_frame": -1,
            "net_type": "recurrent",
            "embed_dim": 48,
            "num_iterations": 300_000,
            "seed": 7,
        },
        **{
            "eval_every": 11,
            "save_every": 12,
            "log_every": 13,
            "G_optimizer_lr": 4e-4,
            "G_optimizer_betas": "0.9,0.99",
            "grad_clip": 0.5,
            "ema": 0.999,
        },
        **{
            "G_optimizer_wd": 0,
            "G_scheduler_periods": "100,200000",
            "G_scheduler_restart_weights": "1",
            "G_scheduler_milestones": "5",
        },
        **{
            "size_patch_testing": 64,
            "tensorboard": False,
            "use_dummy_wandb": False,
            "wandb_mode": "online",
            "wandb_project": "p",
        },
        **{"wandb_run": "n", "device": "auto"},
    }
    lines = text.split("\n")
    for name, (_, origin) in loaded.values.items():
        if name not in ("task", "use_hflip"):
            file, line, key = origin.split(":", 2)
            assert file == "o.json"
            assert f'"{leaf(key.strip())}"' in lines[int(line) - 1]
    assert loaded.values["use_hflip"] == (
        False,
        "o.json: no datasets.train.use_hflip, so KAIR's default",
    )


def test_every_option_of_the_task_can_be_set_and_every_key_sets_a_field() -> None:
    reached = {key.field for key in KEYS.values()}
    assert {f.name for f in fields(VideoOptions)} <= reached
    assert reached - {""} <= set(KNOWN)


def test_absent_keys_that_affect_training_have_kairs_defaults() -> None:
    found = values(SMALL)
    assert found["grad_clip"] == 0.0
    assert found["G_optimizer_betas"] == "0.9,0.999"
    assert (found["use_hflip"], found["use_rot"], found["gt_size"]) == (False, False, 256)
    assert "out_dir" not in found
    assert "run_name" not in found
    assert values(small(train__G_optimizer_clipgrad=None)) == found


def test_a_wrong_value_is_reported_with_file_line_and_key() -> None:
    loaded = read(small(train__total_iter="many", netG__embed_dim=1, datasets__train__num_frame=-1))
    assert loaded.problems == []
    found = {
        p.what for p in resolve.resolve(CommandLine(), loaded.values, {}, fields=KNOWN).problems
    }
    assert found == {
        "num_frame is -1 (from o.json:9: datasets.train.num_frame), too small",
        "embed_dim is 1 (from o.json:14: netG.embed_dim), too small",
        "num_iterations is 'many' (from o.json:17: train.total_iter), a str",
    }


@pytest.mark.parametrize(
    ("root", "out_dir"),
    [("experiments", None), ("superruns", "superruns"), ("~/x", "~/x"), (None, None)],
)
def test_the_root_is_the_folder_of_runs_unless_it_is_the_default(
    root: str | None, out_dir: str | None
) -> None:
    assert values(small(path__root=root)).get("out_dir") == out_dir


def test_use_wandb() -> None:
    assert values(small(logging__use_wandb=False))["use_dummy_wandb"] is True
    found = values(small(logging__use_wandb=True, logging__wandb_mode="offline"))
    assert (found["use_dummy_wandb"], found["wandb_mode"]) == (False, "offline")
    assert refused(logging__use_wandb=1).what.startswith("logging.use_wandb is a number (o.json:")


def test_the_title_becomes_a_folder_name() -> None:
    assert read(small(task="../../etc/x y")).title == "etc_x_y"
    assert read(small(task="去模糊 1")).title == "去模糊_1"
    assert len(read(small(task="漢" * 500)).title.encode()) <= 100
    assert refused(task=["x"]).what == "task is a list (o.json:2)"


def test_samples_are_always_shuffled() -> None:
    loaded = read(small(datasets__train__dataloader_shuffle=False))
    assert (
        only(loaded.notes)
        == "datasets.train.dataloader_shuffle is false (o.json:9): training samples are always "
        "shuffled, by the seed"
    )
    assert read(small(datasets__train__dataloader_shuffle=True)).notes == []


def test_a_number_of_restart_weights_multiplies_the_periods_as_in_torch() -> None:
    loaded = read(small(train__G_scheduler_periods=10, train__G_scheduler_restart_weights=2))
    found = {
        name: value for name, (value, _) in loaded.values.items() if name.startswith("G_scheduler")
    }
    assert loaded.problems == [] and len(loaded.notes) == 1
    options = VideoOptions(**found, G_optimizer_lr=0.5, G_scheduler_eta_min=0.1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    torchs = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 10, 2, eta_min=0.1)
    wanted = []
    for _ in range(80):
        wanted.append(optimizer.param_groups[0]["lr"] / 0.5)
        optimizer.step()
        torchs.step()
    assert [schedule.share(options, step, 80) for step in range(80)] == pytest.approx(wanted)


@pytest.mark.parametrize(("periods", "weights"), [(10, 0.5), (10, 1.5), ([10, 20], 2), (None, 2)])
def test_a_number_that_torch_refuses_is_a_problem(periods: Any, weights: float) -> None:
    found = refused(train__G_scheduler_periods=periods, train__G_scheduler_restart_weights=weights)
    assert found.fixes == [f'"G_scheduler_restart_weights": [{weights}]']
    fixed = small(train__G_scheduler_periods=periods, train__G_scheduler_restart_weights=[weights])
    assert values(fixed)["G_scheduler_restart_weights"] == str(weights)


def test_the_weights_of_another_schedule_have_no_effect() -> None:
    found = values(
        small(train__G_scheduler_type="MultiStepLR", train__G_scheduler_restart_weights=2)
    )
    assert found["G_scheduler_restart_weights"] == "2"
