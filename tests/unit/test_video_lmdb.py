"""Frames packed as LMDB, written as BasicSR and KAIR do: the same samples as from folders, and
what is wrong with a database."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import lmdb
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.unit.trained_runs import checkpoint, gpt, made
from tests.unit.video_data import pairs
from training import tasks
from training.cli import evaluate
from training.core import rundir
from training.core.errors import Problem
from training.data.frames import lmdb_folder
from training.host import packages
from training.tasks.video_restoration import dataset, folders
from training.tasks.video_restoration.options import VideoOptions


def pack(folder: Path, clips: Mapping[str, Path] | None = None) -> Path:
    """A database of a folder of clips, beside it. `clips`: name → folder."""
    root = folder.with_name(f"{folder.name}.lmdb")
    lines = []
    with (
        lmdb.open(str(root), map_size=1 << 24) as environment,
        environment.begin(write=True) as writing,
    ):
        for name, clip in (clips or {f.name: f for f in folder.iterdir()}).items():
            for file in sorted(clip.iterdir()):
                writing.put(f"{name}/{file.stem}".encode(), file.read_bytes())
                lines.append(f"{name}/{file.stem}.png (12,16,3) 1\n")
    (root / "meta_info.txt").write_text("".join(lines))
    return root


@pytest.fixture
def plain(tmp_path: Path) -> VideoOptions:
    return pairs(tmp_path)


@pytest.fixture
def packed(plain: VideoOptions, tmp_path: Path) -> VideoOptions:
    gt, lq = pack(tmp_path / "gt"), pack(tmp_path / "lq")
    return replace(plain, dataroot_gt=str(gt), dataroot_lq=str(lq))


def problems(options: VideoOptions) -> list[Problem]:
    return folders.check(options, {})


def test_samples_equal_those_of_folders_also_in_workers(
    plain: VideoOptions, packed: VideoOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert problems(packed) == []
    with monkeypatch.context() as patched:
        patched.setattr(lmdb_folder, "picture", None)  # the digest reads no pictures
        assert folders.content(packed) == folders.content(plain)
    wanted = dataset.Training(plain)
    found = dataset.Training(packed)
    assert torch.equal(found[5]["gt"], wanted[5]["gt"])  # opened here, before the fork
    loader = DataLoader(found, num_workers=2, batch_size=None, multiprocessing_context="fork")
    for index, sample in enumerate(loader):
        for kind in ("gt", "lq"):
            assert torch.equal(sample[kind], wanted[index][kind])
    one = replace(plain, dataroot_gt=packed.dataroot_gt)  # one database, one folder
    assert np.array_equal(dataset.Training(one)[3]["lq"], wanted[3]["lq"])


def test_a_clip_with_a_number_in_brackets(plain: VideoOptions, tmp_path: Path) -> None:
    for kind in ("gt", "lq"):
        (tmp_path / kind / "c0").rename(tmp_path / kind / "clip (1)")
    roots = {f"dataroot_{kind}": str(pack(tmp_path / kind)) for kind in ("gt", "lq")}
    packed = replace(plain, **roots)
    assert problems(packed) == []
    assert [clip.name for clip in folders.clips(packed, "train")] == ["c1", "clip (1)"]
    assert len(lmdb_folder.sizes(Path(packed.dataroot_gt))) == 12


def test_clips_of_two_levels_and_a_list(plain: VideoOptions, tmp_path: Path) -> None:
    """As Vimeo's and REDS's."""
    gt = pack(tmp_path / "gt", {f"00001/000{n}": tmp_path / f"gt/c{n}" for n in range(2)})
    lq = pack(tmp_path / "lq", {f"00001/000{n}": tmp_path / f"lq/c{n}" for n in range(2)})
    options = replace(plain, dataroot_gt=str(gt), dataroot_lq=str(lq))
    assert [clip.name for clip in folders.clips(options, "train")] == ["00001/0000", "00001/0001"]
    listed = tmp_path / "meta.txt"
    listed.write_text("00001/0001 4 (12,16,3) 2\n")
    (clip,) = folders.clips(replace(options, meta_info_file=str(listed)), "train")
    assert clip.gt[0] == f"{gt}:00001/0001/000002.png" and len(clip.lq) == 4
    kinds = {"sharp": "gt", "blur": "lq"}
    inner = {f"c1/{name}": tmp_path / kind / "c1" for name, kind in kinds.items()}
    both = pack(tmp_path / "both", inner)
    (clip,) = folders.clips(replace(plain, dataroot_gt=str(both), dataroot_lq=""), "train")
    assert clip.name == "c1" and clip.lq[0] == f"{both}:c1/blur/000000.png"


def test_what_is_wrong_with_a_database(
    packed: VideoOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(packed.dataroot_gt)
    meta, data = root / "meta_info.txt", root / "data.mdb"
    listed = meta.read_text()

    def only() -> Problem:
        (problem,) = problems(packed)
        return problem

    meta.write_text(listed + "c1/000099.png (12,16,3) 1\n")
    lq = Path(packed.dataroot_lq) / "meta_info.txt"
    before = lq.read_text()
    lq.write_text(before + "c1/000099.png (12,16,3) 1\n")
    os.utime(lq, ns=(1, 1))
    both = problems(packed)
    assert [p.code for p in both] == ["video.lmdb"] * 2 and "c1/000099" in both[0].what
    lq.write_text(before)
    meta.write_text("c0\n")
    assert only().code == "video.lmdb" and "line 1" in only().what
    meta.unlink()
    assert only().code == "video.lmdb" and "meta_info.txt" in only().what
    assert only().fixes == [f"--dataroot_gt={tmp_path}/gt"]
    meta.write_text(listed)
    whole = data.read_bytes()
    for name, content in (("cut", whole[: len(whole) // 2]), ("other", b"no database" * 1000)):
        damaged = tmp_path / f"{name}.lmdb"
        damaged.mkdir()
        (damaged / "meta_info.txt").write_text(listed)
        (damaged / "data.mdb").write_bytes(content)
        (found,) = problems(replace(packed, dataroot_gt=str(damaged)))
        assert found.code == "video.lmdb" and damaged.name in found.what
    spikes = replace(packed, dataroot_spike=str(root))
    assert [p.code for p in problems(spikes)] == ["video.lmdb"]
    exists = packages.found
    monkeypatch.setattr(packages, "found", lambda module: module != "lmdb" and exists(module))
    assert [p.code for p in folders.needs_lmdb(packed)] == ["package.missing"]


def test_sizes_in_a_database_are_those_of_its_list(packed: VideoOptions) -> None:
    """Each frame is checked without reading the pictures; a list without sizes is fine."""
    meta = Path(packed.dataroot_gt) / "meta_info.txt"
    listed = meta.read_text()
    for size in ("(20,16,3)", "(8,16,3)"):
        meta.write_text(listed.replace("c1/000006.png (12,16,3)", f"c1/000006.png {size}"))
        os.utime(meta, ns=(1, len(size)))
        (problem,) = problems(packed)
        assert problem.code == "video.frame_sizes" and "c1/000006.png" in problem.what
    meta.write_text(listed.replace("(12,16,3)", "(image)"))
    os.utime(meta, ns=(1, 2))
    assert problems(packed) == []


def test_evaluate_reads_databases(
    plain: VideoOptions,
    packed: VideoOptions,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = made(tmp_path / "run", gpt(1))
    plan = json.loads(run.plan.read_text())
    task = {"name": "video_restoration", "unit": "samples", "file": None}
    scores = []
    for each in (packed, plain):
        chosen = {"test_dataroot_gt": each.dataroot_gt, "test_dataroot_lq": each.dataroot_lq}
        task["options"] = vars(VideoOptions(embed_dim=4, num_blocks=1, **chosen))  # type: ignore[assignment]
        rundir.write_json(run.plan, plan | {"task": task})
        if not scores:
            model = tasks.make(plan | {"task": task}, torch.device("cpu"), None).model()
            checkpoint(run, model.state_dict(), {}, 9)
        assert evaluate.main([str(run.path), "--json", "--device=cpu"]) == 0
        scores.append(json.loads(capsys.readouterr().out)["evaluations"][0]["psnr"])
    assert scores[0] == scores[1]
