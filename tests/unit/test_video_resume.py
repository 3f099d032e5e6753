"""Relative folders of a resumed run of video restoration."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.unit.conftest import ask, make_run, only, wrong
from tests.unit.video_data import rendered
from training.core.errors import NothingToDo
from training.core.rundir import write_json
from training.tasks.video_restoration.options import NAME, VideoOptions


def test_relative_folders_are_those_of_the_first_start(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, listed = tmp_path / "first", "meta.txt"
    train = rendered(first / "clips") / "train"
    (first / listed).write_text("clip_000\nclip_001\n")
    options = VideoOptions(
        dataroot_gt="clips/train", test_dataroot_gt=str(first / "clips/test"),
        meta_info_file=listed, num_frame=3, gt_size=16,
    )  # fmt: skip
    run = make_run(home / "experiments", "r1")
    task = {"name": NAME, "unit": "samples", "file": None, "options": vars(options)}
    command = {"script": "", "args": [], "cwd": str(first)}
    config = {"task": NAME, "num_iterations": 9, "num_epochs": 1}
    write_json(run.plan, {"config": config, "task": task, "command": command})
    monkeypatch.chdir(first)
    there = f"--out_dir={home}/experiments"
    assert ask("--resume=r1", there).options == vars(options)
    shutil.copytree(first, tmp_path / "now")  # other data of the same names
    monkeypatch.chdir(tmp_path / "now")
    found = ask("--resume=r1", there)
    moved = {"dataroot_gt": str(train), "meta_info_file": str(first / listed)}
    assert found.options == vars(options) | moved and not found.notes
    assert found.origins["dataroot_gt"] == "from resumed run r1"
    write_json(run.summary, {"status": "done", "steps": 7})  # finished there, and here
    with pytest.raises(NothingToDo):
        ask("--resume=r1", there)
    run.summary.unlink()
    assert ask("--resume=r1", there, "--dataroot_gt=clips/train").options["dataroot_gt"] == (
        "clips/train"
    )
    shutil.rmtree(first / "clips/train")  # moved along with the command
    assert ask("--resume=r1", there).options["dataroot_gt"] == "clips/train"
    shutil.rmtree("clips/train")
    assert only(wrong("--resume=r1", there)).code == "video.folder_missing"
