"""KAIR's option files: what they set, what is answered before anything starts, and that a key in
one is never shown."""

from __future__ import annotations

import copy
import json
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.cases import each
from tests.unit.conftest import ROOT, clean_environment, only
from training.config import resolve
from training.config.flags import CommandLine
from training.config.loader import ConfigFile
from training.config.schema import FIELDS
from training.core.errors import Problem
from training.tasks.video_restoration.kair import keys
from training.tasks.video_restoration.kair.keys import KEYS, leaf
from training.tasks.video_restoration.kair.loader import is_option_file, load
from training.tasks.video_restoration.options import NAME as VIDEO
from training.tasks.video_restoration.options import VideoOptions

KAIR = sorted((ROOT / "tests/fixtures/kair/options").glob("*/*.json"))
OURS = sorted((ROOT / "options/vrt").glob("*.json"))
KNOWN = dict(FIELDS) | {f.name: f for f in fields(VideoOptions)}
KEY = "0123456789abcdef" * 2 + "01234567"

SMALL: dict[str, Any] = {
    "task": "small",
    "model": "vrt",
    "datasets": {"train": {"dataroot_gt": "gt", "dataroot_lq": "lq", "dataloader_batch_size": 2}},
    "netG": {"net_type": "recurrent"},
    "train": {"total_iter": 10},
}


def small(**changes: Any) -> dict[str, Any]:
    """SMALL with dotted keys changed: train__total_iter=5."""
    tree = copy.deepcopy(SMALL)
    for name, value in changes.items():
        *sections, last = name.split("__")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return tree


def read(tree: Any, ranks: int = 2) -> ConfigFile:
    return load(
        Path("o.json"), tree if isinstance(tree, str) else json.dumps(tree, indent=1), ranks
    )


def values(tree: Any) -> dict[str, Any]:
    loaded = read(tree)
    assert loaded.problems == []
    return {name: value for name, (value, _) in loaded.values.items()}


def refused(**changes: Any) -> Problem:
    return only(read(small(**changes)).problems)


def said(loaded: ConfigFile) -> str:
    """Everything of it that people or files see."""
    lines = [line for problem in loaded.problems for line in problem.lines()]
    return "\n".join([*lines, *loaded.notes, loaded.title, repr(loaded.values)])


# What a file sets.


def test_every_key_that_sets_something_sets_it_with_its_line() -> None:
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
    "G_optimizer_lr": 4e-4, "G_optimizer_betas": [0.9, 0.99], "G_optimizer_clipgrad": 0.5, "G_optimizer_wd": 0,
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


@pytest.mark.parametrize("path", OURS, ids=lambda p: p.stem)
def test_our_own_files_are_whole_configurations(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert is_option_file(text)
    loaded = load(path, text)
    assert loaded.problems == []
    assert not [note for note in loaded.notes if "unused keys" in note]
    resolved = resolve.resolve(CommandLine(), loaded.values, {}, fields=KNOWN)
    assert resolved.problems == []
    assert resolved.config.task == VIDEO
    assert resolved.config.num_iterations > 0
    assert resolved.options["dataroot_gt"]


def test_every_option_of_the_task_can_be_set_and_every_key_sets_a_field() -> None:
    reached = {key.field for key in KEYS.values()}
    assert {f.name for f in fields(VideoOptions)} <= reached
    assert reached - {""} <= set(KNOWN)


def test_absent_keys_are_kairs_defaults_where_they_change_what_is_learnt() -> None:
    found = values(SMALL)
    assert found["grad_clip"] == 0.0
    assert found["G_optimizer_betas"] == "0.9,0.999"
    assert (found["use_hflip"], found["use_rot"], found["gt_size"]) == (False, False, 256)
    assert "out_dir" not in found
    assert "run_name" not in found
    assert values(small(train__G_optimizer_clipgrad=None)) == found


def test_a_wrong_value_is_told_with_file_line_and_key_like_any_other() -> None:
    loaded = read(small(train__total_iter="many", netG__embed_dim=1, datasets__train__num_frame=-1))
    assert loaded.problems == []
    told = {
        p.what for p in resolve.resolve(CommandLine(), loaded.values, {}, fields=KNOWN).problems
    }
    assert told == {
        "num_frame is -1 (from o.json:9: datasets.train.num_frame), too small",
        "embed_dim is 1 (from o.json:14: netG.embed_dim), too small",
        "num_iterations is 'many' (from o.json:17: train.total_iter), a str",
    }


@pytest.mark.parametrize(
    ("root", "out_dir"),
    [("experiments", None), ("superruns", "superruns"), ("~/x", "~/x"), (None, None)],
)
def test_the_root_is_the_folder_of_runs_if_it_is_no_default(
    root: str | None, out_dir: str | None
) -> None:
    assert values(small(path__root=root)).get("out_dir") == out_dir


def test_use_wandb() -> None:
    assert values(small(logging__use_wandb=False))["use_dummy_wandb"] is True
    found = values(small(logging__use_wandb=True, logging__wandb_mode="offline"))
    assert (found["use_dummy_wandb"], found["wandb_mode"]) == (False, "offline")
    assert refused(logging__use_wandb=1).what.startswith("logging.use_wandb is a number (o.json:")


def test_the_title_is_a_name_for_a_folder() -> None:
    assert read(small(task="../../etc/x y")).title == "etc_x_y"
    assert read(small(task="去模糊 1")).title == "去模糊_1"
    assert len(read(small(task="漢" * 500)).title.encode()) <= 100
    assert refused(task=["x"]).what == "task is a list (o.json:2)"


# What is answered.


@each("path", KAIR, ids=lambda p: p.stem)
def test_kairs_own_files_get_one_report_with_everything_in_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert is_option_file(text)
    loaded = load(path, text, 8)
    told = [p.what for p in loaded.problems]
    assert not [what for what in told if "unknown key" in what or "set twice" in what]
    assert sum("is packed as LMDB" in what for what in told) == 1
    network = next(p for p in loaded.problems if p.what.startswith("netG.net_type is"))
    assert ("pretrained flow network" in network.what) == ("videofi" not in path.name)
    assert (
        network.fixes[0].split("   #")[0]
        == f"./launch_train.sh 8 --script main_train_vrt.py -- --opt {shlex.quote(str(path))} "
        f"--dist True"
    )
    assert "recurrent" in network.fixes[1]
    others = [p.what for p in loaded.problems if "LMDB" not in p.what and p is not network]
    expected = {
        "denoising": ["sigma_max 50", "sigma 30"],
        "videofi": ["temporal_scale 2", "color_jitter true", "temporal_scale 2"],
    }
    expected |= {
        "rvrt_videosr_bi_vimeo": ["mirror_sequence true"],
        "rvrt_videosr_bd_vimeo": ["mirror_sequence true"],
    }
    expected |= {
        "_vrt_videosr_bi_vimeo": ["pad_sequence true"],
        "_vrt_videosr_bd_vimeo": ["pad_sequence true"],
    }
    wanted = next((w for part, w in expected.items() if part in path.name), [])
    assert len(others) == len(wanted)
    assert all(w in other for w, other in zip(wanted, others, strict=True))
    assert loaded.title == path.stem
    assert loaded.gpu_ids == list(range(8))
    assert loaded.values["num_iterations"][0] in (300_000, 600_000)
    assert len([note for note in loaded.notes if "unused keys" in note]) == 1


def test_kairs_files_with_our_network_on_folders_are_configurations() -> None:
    """The two changes that the answer proposes are enough."""
    for path in (p for p in KAIR if "deblurring" in p.name):
        text = path.read_text(encoding="utf-8").replace(".lmdb", "").replace('"lmdb"', '"disk"')
        text = text.replace('"net_type": "vrt"', '"net_type": "recurrent"').replace(
            '"net_type": "rvrt"', '"net_type": "recurrent"'
        )
        text = text.replace('"num_blocks": [1, 2, 1]', '"num_blocks": 3')
        loaded = load(path, text)
        assert loaded.problems == []
        assert resolve.resolve(CommandLine(), loaded.values, {}, fields=KNOWN).problems == []
        assert any("spynet_path" in note for note in loaded.notes)
        assert any("per rank" in note for note in loaded.notes)


def test_the_vocabulary_of_files_with_spikes() -> None:
    """What the repositories made from KAIR write; the names of S-VRT's file and its values for a
    spike camera."""
    part = {
        "spike_h": 250,
        "spike_w": 400,
        "spike_channels": 1,
        "spike_flipud": True,
        "filename_tmpl": "06d",
        "scale": 1,
    }
    loader = {"dataloader_shuffle": False, "dataloader_num_workers": 8, "dataloader_batch_size": 1}
    tree = small(
        netG__in_chans=4,
        logging__use_swanlab=True,
        logging__swanlab_api_key=KEY,
        logging__logfire_token=KEY,
    )
    tree["datasets"]["train"] |= {
        "dataset_type": "VideoRecurrentTrainDatasetRGBSpike",
        "dataroot_spike": "s",
        "test_mode": False,
        **part,
    }
    tree["datasets"]["test"] = {
        "dataroot_gt": "t",
        "io_backend": {"type": "disk"},
        "cache_data": False,
        **part,
        **loader,
    }
    loaded = read(tree)
    assert loaded.problems == []
    assert (
        loaded.values["spike_h"][0],
        loaded.values["spike_w"][0],
        loaded.values["dataroot_spike"][0],
    ) == (250, 400, "s")
    assert KEY not in said(loaded)
    assert only(loaded.notes).startswith(
        "unused keys of o.json: datasets.train: dataset_type, filename_tmpl; "
    )
    tree["netG"] = {"net_type": "vrt", "in_chans": 4, "anything": {"of": "its own"}}
    assert (
        only(read(tree).problems).what
        == 'netG.net_type is "vrt" (o.json:37): that network is available only in KAIR\'s own program'
    )


@each(
    ("changes", "what", "fix"),
    [
        (
            {"train__total_itr": 5},
            "unknown key train.total_itr (o.json:16)",
            "train.total_iter",
        ),
        (
            {"netG__gt_size": 5},
            "unknown key netG.gt_size (o.json:13)",
            "datasets.train.gt_size",
        ),
        ({"datsets": {}}, "unknown key datsets (o.json:17)", "datasets"),
        (
            {"train__device": "cpu"},
            "unknown key train.device (o.json:16)",
            "duet.device",
        ),
        (
            {"xyzzy": 1},
            "unknown key xyzzy (o.json:17)",
            "docs/option_files.md has all keys",
        ),
        ({"duet__depth": 1}, "unknown key duet.depth (o.json:18)", ""),
        (
            {"train__E_decay": 0.999},
            "train has E_decay 0.999 (o.json:16): weight averaging is not supported",
            '"E_decay": 0',
        ),
        (
            {"datasets__train__mirror_sequence": True},
            "datasets.train has mirror_sequence true (o.json:9)",
            '"mirror_sequence": false',
        ),
        (
            {"datasets__train__temporal_scale": 2},
            "datasets.train has temporal_scale 2 (o.json:9)",
            '"temporal_scale": 1',
        ),
        (
            {"path__pretrained_netG": "m.pth"},
            'path has pretrained_netG "m.pth" (o.json:18)',
            '"pretrained_netG": null',
        ),
        (
            {"netG__net_type": "recurent"},
            'netG.net_type is "recurent" (o.json:12)',
            '"net_type": "recurrent"',
        ),
        (
            {"datasets__train__io_backend": {"type": "lmdb"}},
            'datasets.train is packed as LMDB (io_backend "lmdb"; o.json:10)',
            '"disk"',
        ),
        (
            {"datasets__train__io_backend": {"type": "petrel"}},
            'datasets.train.io_backend.type is "petrel" (o.json:10)',
            '"disk"',
        ),
        ({"n_channels": 1}, "n_channels is 1 (o.json:17)", ""),
        ({"gpu_ids": "0,1"}, 'gpu_ids is "0,1" (o.json:17)', ""),
        ({"gpu_ids": [0, 0]}, "gpu_ids is [0, 0] (o.json:17)", ""),
        ({"gpu_ids": [True]}, "gpu_ids is [true] (o.json:17)", ""),
        ({"netG__in_chans": 4}, "netG.in_chans is 4 (o.json:13), but the input has 3 channels", ""),
        (
            {"scale": 4, "netG__upscale": 2},
            "scale is 4 (o.json:18), but 2 in o.json:13: netG.upscale",
            "",
        ),
        ({"train": [1]}, "train is a list (o.json:14)", ""),
        (
            {"train__manual_seed": {"wandb_api_key": KEY}},
            "train.manual_seed is an object (o.json:16)",
            "",
        ),
        (
            {"train__G_scheduler_periods": ["a"]},
            "train.G_scheduler_periods is a list (o.json:16)",
            "",
        ),
        ({"model": 3}, "model is a number (o.json:3)", ""),
        ({"model": "vtr"}, 'model is "vtr" (o.json:3)', '"model": "vrt"'),
        (
            {"model": "plain"},
            'model is "plain" (o.json:3): KAIR\'s model for single pictures, not video',
            "--script main_train_psnr.py",
        ),
        (
            {"duet__num_iterations": 5},
            "unknown key duet.num_iterations (o.json:18)",
            "train.total_iter",
        ),
        (
            {"datasets__train__wandb_name": 5},
            "unknown key datasets.train.wandb_name (o.json:9)",
            "logging.wandb_name",
        ),
    ],
)
def test_one_mistake_one_answer(changes: dict[str, Any], what: str, fix: str) -> None:
    problem = refused(**changes)
    assert problem.what.startswith(what)
    assert fix in "\n".join(problem.fixes)


@pytest.mark.parametrize(
    "changes",
    [
        {
            "train__E_decay": 0,
            "train__fix_iter": 20000,
            "train__fix_keys": ["spynet", "deform"],
            "train__fix_lr_mul": 0.125,
        },
        {
            "datasets__train__temporal_scale": 1,
            "datasets__train__sigma": None,
            "datasets__train__mirror_sequence": False,
        },
        {"train__fix_iter": 0, "train__fix_keys": ["conv"]},
        {"datasets__train__name": "train_dataset", "datasets__train__val_partition": "REDS4"},
        {"scale": 4, "netG__upscale": 4, "datasets__train__scale": 4},
        {"datasets": {"train": None, "test": None}, "logging": None},
        {"logging__wandb_name": "a", "logging__wandb_run_name": "a"},
    ],
)
def test_what_asks_for_nothing_is_no_problem(changes: dict[str, Any]) -> None:
    assert read(small(**changes)).problems == []


def test_parts_that_are_kept_still_and_clips_that_are_left_out() -> None:
    assert "fix_keys" in refused(train__fix_iter=100, train__fix_keys=["conv"]).what
    assert (
        "REDS" in refused(datasets__train__name="REDS", datasets__train__val_partition="REDS4").what
    )


def test_all_problems_at_once_in_the_order_of_the_file() -> None:
    text = (
        '{"netG": {"net_type": "vrt"},\n "train": {"total_itr": 1,\n "E_decay": 0.9, '
        '"E_decay": '
        '0.99},\n "xx": 1, "n_channels": 4}'
    )
    told = [problem.what.split(" (")[0] for problem in read(text, 3).problems]
    assert [what.split(" is")[0] for what in told] == [
        "netG.net_type",
        "unknown key train.total_itr",
        "train.E_decay",
        "train has E_decay 0.99",
        "unknown key xx",
        "n_channels",
    ]


def test_the_order_of_samples_is_always_drawn() -> None:
    loaded = read(small(datasets__train__dataloader_shuffle=False))
    assert (
        only(loaded.notes)
        == "datasets.train.dataloader_shuffle is false (o.json:9): training samples are always "
        "shuffled, by the seed"
    )
    assert read(small(datasets__train__dataloader_shuffle=True)).notes == []


@each(
    "text",
    [
        "[]",
        "3",
        '"x"',
        "null",
        "{",
        "",
        "\ufeff",
        '{"a": NaN}',
        "{" * 5000,
        '{"train": {"total_iter": 1e999}}',
    ],
)
def test_what_is_no_option_file_is_a_problem_and_no_crash(text: str) -> None:
    loaded = read(text)
    assert only(loaded.problems).what.startswith("o.json")
    assert loaded.values == {"task": (VIDEO, "o.json")}


def test_a_mistake_in_the_json_is_shown_with_its_line() -> None:
    problem = only(
        read('{\n  "train": {\n    "total_iter": 5 // steps\n    "E_decay": 0\n}}').problems
    )
    assert problem.what == 'o.json:4:5: a comma or } is missing before this: "E_decay": 0'
    assert read("\ufeff" + json.dumps(SMALL)).problems == []
    hostile = only(read('{"a": \x1b[31m}').problems).what
    assert hostile.isprintable()


def test_names_from_a_file_are_shown_as_text() -> None:
    for name in ("\x1b[31mred", "a\nb", "\u202egnp", "k" * 5000):
        what = only(read(small(**{name: 1})).problems).what
        assert what.isprintable()
        assert len(what) < 200
    dotted = only(read({"datasets.train": {"gt_size": 5}, "model": "vrt"}).problems)
    assert dotted.what == "unknown key datasets.train (o.json:2)"


# Is it one?


@each(
    ("text", "expected"),
    [
        ('{"depth": 12}', False),
        ('{"depth": 12, "data": "x//y"}', False),
        ('{"task": "video_restoration", "scale": "1", "gt_size": 64}', False),
        ('{"train": 5}', False),
        ('{"depth": {"a": 1}}', False),
        ("[]", False),
        ("", False),
        ('{"depth": 12 // x', False),
        ('{"datasets": {}}', True),
        ('{"datasts": {"train": {}}}', True),
        ('{"gpu_ids": [0], "task": "x"}', True),
        ('{"train": {"total_iter": 5}', True),
        ('{ // c\n "netG" : // c\n {"net_type": ', True),
    ],
)
def test_which_files_are_option_files(text: str, expected: bool) -> None:
    assert is_option_file(text) is expected


def test_a_tree_is_asked_too() -> None:
    assert is_option_file(SMALL)
    assert not is_option_file({"depth": 12})
    assert not is_option_file([SMALL])


# The house.


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, training.tasks.video_restoration.kair.loader; print(sorted({'torch', "
        "'numpy', 'difflib'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=clean_environment(),
        cwd=ROOT,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_every_word_has_somewhere_it_belongs() -> None:
    """A known key in the wrong section names the right one."""
    for dotted in KEYS:
        assert (
            dotted in keys.meant(f"wrong.{leaf(dotted)}")
            or len([k for k in KEYS if leaf(k) == leaf(dotted)]) > 2
        )
