"""The problems reported for a KAIR option file."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cases import each
from tests.unit.conftest import only
from tests.unit.option_files import KEY, SMALL, read, refused, small
from training.tasks.video_restoration.options import NAME as VIDEO


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
            {"train__G_regularizer_orthstep": 5},
            "train has G_regularizer_orthstep 5 (o.json:16)",
            '"G_regularizer_orthstep": 0',
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
            {"path__pretrained_optimizerG": "m.pth"},
            'path has pretrained_optimizerG "m.pth" (o.json:18)',
            '"pretrained_optimizerG": null',
        ),
        (
            {"netG__net_type": "recurent"},
            'netG.net_type is "recurent" (o.json:12)',
            '"net_type": "recurrent"',
        ),
        (
            {"datasets__train__io_backend": {"type": "lmdb"}},
            "datasets.train is read as LMDB (o.json:10), but has a folder: dataroot_gt",
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
def test_one_error_is_one_problem(changes: dict[str, Any], what: str, fix: str) -> None:
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
def test_keys_without_effect_are_accepted(changes: dict[str, Any]) -> None:
    assert read(small(**changes)).problems == []


def test_frozen_parts_and_skipped_clips_are_rejected() -> None:
    assert "fix_keys" in refused(train__fix_iter=100, train__fix_keys=["conv"]).what
    assert (
        "REDS" in refused(datasets__train__name="REDS", datasets__train__val_partition="REDS4").what
    )


def test_all_problems_at_once_in_the_order_of_the_file() -> None:
    text = (
        '{"netG": {"net_type": "vrt"},\n "train": {"total_itr": 1,\n "use_lora": 1, '
        '"use_lora": '
        '2},\n "xx": 1, "n_channels": 4}'
    )
    found = [problem.what.split(" (")[0] for problem in read(text, 3).problems]
    assert [what.split(" is")[0] for what in found] == [
        "netG.net_type",
        "unknown key train.total_itr",
        "train.use_lora",
        "train has use_lora 2",
        "unknown key xx",
        "n_channels",
    ]


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
def test_other_content_is_a_problem_without_a_crash(text: str) -> None:
    loaded = read(text)
    assert only(loaded.problems).what.startswith("o.json")
    assert loaded.values == {"task": (VIDEO, "o.json")}


def test_a_json_error_is_shown_with_its_line() -> None:
    problem = only(
        read('{\n  "train": {\n    "total_iter": 5 // steps\n    "E_decay": 0\n}}').problems
    )
    assert problem.what == 'o.json:4:5: missing comma or }: "E_decay": 0'
    assert read("\ufeff" + json.dumps(SMALL)).problems == []
    hostile = only(read('{"a": \x1b[31m}').problems).what
    assert hostile.isprintable()


def test_names_from_a_file_are_printable() -> None:
    for name in ("\x1b[31mred", "a\nb", "\u202egnp", "k" * 5000):
        what = only(read(small(**{name: 1})).problems).what
        assert what.isprintable()
        assert len(what) < 200
    dotted = only(read({"datasets.train": {"gt_size": 5}, "model": "vrt"}).problems)
    assert dotted.what == "unknown key datasets.train (o.json:2)"
