"""KAIR's own option files, ready ones, and the recognition of option files."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import each
from tests.unit.conftest import ROOT, clean_environment, only
from tests.unit.option_files import KEY, KNOWN, SMALL, read, small, visible
from training.config import resolve
from training.config.flags import CommandLine
from training.tasks.video_restoration.kair import keys
from training.tasks.video_restoration.kair.keys import KEYS, leaf
from training.tasks.video_restoration.kair.loader import is_option_file, load
from training.tasks.video_restoration.options import NAME as VIDEO

KAIR = sorted((ROOT / "tests/fixtures/kair/options").glob("*/*.json"))
OURS = sorted((ROOT / "options/vrt").glob("*.json"))


@pytest.mark.parametrize("path", OURS, ids=lambda p: p.stem)
def test_ready_option_files_are_complete_configurations(path: Path) -> None:
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


@each("path", KAIR, ids=lambda p: p.stem)
def test_kairs_own_files_get_one_complete_report(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert is_option_file(text)
    loaded = load(path, text, 8)
    found = [p.what for p in loaded.problems]
    assert not [what for what in found if "unknown key" in what or "set twice" in what]
    network = next(p for p in loaded.problems if p.what.startswith("netG.net_type is"))
    assert ("pretrained flow network" in network.what) == ("videofi" not in path.name)
    assert (
        network.fixes[0].split("   #")[0]
        == f"./launch_train.sh 8 --script main_train_vrt.py -- --opt {shlex.quote(str(path))} "
        f"--dist True"
    )
    assert "recurrent" in network.fixes[1]
    others = [p.what for p in loaded.problems if p is not network]
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


def test_kairs_files_with_the_recurrent_network_are_configurations() -> None:
    """The change that the report proposes is enough, on its LMDB databases and on folders."""
    for path in (p for p in KAIR if "deblurring" in p.name):
        packed = path.read_text(encoding="utf-8")
        for kind in ("vrt", "rvrt"):
            packed = packed.replace(f'"net_type": "{kind}"', '"net_type": "recurrent"')
        packed = packed.replace('"num_blocks": [1, 2, 1]', '"num_blocks": 3')
        assert load(path, packed).values["dataroot_gt"][0].endswith(".lmdb")
        for text in (packed, packed.replace(".lmdb", "").replace('"lmdb"', '"disk"')):
            loaded = load(path, text)
            assert loaded.problems == []
            assert resolve.resolve(CommandLine(), loaded.values, {}, fields=KNOWN).problems == []
            assert any("spynet_path" in note for note in loaded.notes)
            assert any("per rank" in note for note in loaded.notes)
        assert len(load(path, packed.replace(".lmdb", "")).problems) == 1


def test_the_keys_of_files_with_spikes() -> None:
    """Keys of repositories derived from KAIR: those of S-VRT's file, with its values for a spike
    camera."""
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
    assert KEY not in visible(loaded)
    assert only(loaded.notes).startswith(
        "unused keys of o.json: datasets.train: dataset_type, filename_tmpl; "
    )
    tree["netG"] = {"net_type": "vrt", "in_chans": 4, "anything": {"of": "its own"}}
    assert (
        only(read(tree).problems).what
        == 'netG.net_type is "vrt" (o.json:37): that network is available only in KAIR\'s own program'
    )


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


def test_a_parsed_tree_is_recognised_too() -> None:
    assert is_option_file(SMALL)
    assert not is_option_file({"depth": 12})
    assert not is_option_file([SMALL])


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


def test_a_known_key_in_the_wrong_section_is_corrected() -> None:
    """The suggestion for a known key in the wrong section is the right section."""
    for dotted in KEYS:
        assert (
            dotted in keys.meant(f"wrong.{leaf(dotted)}")
            or len([k for k in KEYS if leaf(k) == leaf(dotted)]) > 2
        )
