"""Folders and files of clips that cannot be read, or only slowly."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.unit.video_data import deep_png, pairs, pixels
from training.core import heartbeat
from training.core.errors import UserError
from training.data.frames import pictures
from training.tasks.video_restoration import folders
from training.tasks.video_restoration.options import VideoOptions


@pytest.fixture
def options(tmp_path: Path) -> VideoOptions:
    return pairs(tmp_path)


def codes(options: VideoOptions) -> list[str]:
    return [problem.code for problem in folders.check(options, {})]


def test_a_folder_that_cannot_be_read(
    options: VideoOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read everything, so the error is one of os.scandir."""
    scan = os.scandir

    def denied(path: Any) -> Any:
        if str(path) == place:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", denied)
    for place in (f"{tmp_path}/gt/c1", f"{tmp_path}/lq/c0", f"{tmp_path}/gt/c1/sharp"):
        (problem,) = folders.check(options, {})
        assert problem.code == "video.clip_unreadable" and place in problem.what
        with pytest.raises(UserError):
            folders.clips(options, "train")
    place = f"{tmp_path}/gt/lost+found"
    Path(place).mkdir()
    assert codes(options) == []
    place = f"{tmp_path}/gt/c0"  # while other roots are suggested
    assert codes(replace(options, dataroot_gt=str(tmp_path), dataroot_lq="")) == ["video.no_clips"]


def test_a_link_to_itself(options: VideoOptions, tmp_path: Path) -> None:
    (tmp_path / "gt" / "c2").symlink_to("c2")
    assert codes(options) == [] and len(folders.clips(options, "train")) == 2
    (tmp_path / "meta.txt").write_text("c1\nc2\n")
    listed = replace(options, meta_info_file=f"{tmp_path}/meta.txt")
    assert codes(listed) == ["video.clip_unreadable"]
    frame = tmp_path / "gt" / "c1" / "000002.png"
    frame.unlink()
    frame.symlink_to(frame.name)
    (problem,) = folders.check(options, {})
    assert problem.code == "video.frame_unreadable" and str(frame) in problem.what


def test_a_link_to_a_clip_that_is_not_there(options: VideoOptions, tmp_path: Path) -> None:
    """As of a disk that is not mounted. Without an error the clip is not trained on."""
    for link in ("gt/c2", "gt/c2/sharp"):
        place = tmp_path / link
        place.parent.mkdir(exist_ok=True)
        place.symlink_to("/mnt/not mounted/clip")
        (problem,) = folders.check(options, {})
        assert problem.code == "video.clip_unreadable" and str(place) in problem.what
        place.unlink()
    (tmp_path / "gt" / "notes.txt").symlink_to("nowhere")
    assert codes(options) == []


def test_every_clip_counts_as_progress(
    options: VideoOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats: list[None] = []
    monkeypatch.setattr(heartbeat.current, "again", lambda: beats.append(None), raising=False)
    found = folders.clips(options, "train")
    assert len(beats) == len(found)
    folders.content(options, "train")
    assert len(beats) == 3 * len(found)  # names, then sizes


def test_the_depth_of_colours_is_known_to_every_pillow(tmp_path: Path) -> None:
    """Before version 11 its tiles are plain tuples."""
    file = tmp_path / "frame.png"
    Image.fromarray(pixels(0, 0)).save(file)
    with Image.open(file) as plain:
        plain.tile = [tuple(one) for one in plain.tile]  # type: ignore[misc]
        assert pictures.deep_mode(plain) == ""
    deep_png(file, 16, 12)
    with Image.open(file) as deep:
        deep.tile = [tuple(one) for one in deep.tile]  # type: ignore[misc]
        assert pictures.deep_mode(deep) == "RGB;16B"
