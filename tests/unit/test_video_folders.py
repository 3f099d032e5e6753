"""Paired folders of frames: the clips found, and all problems, reported before anything starts."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.unit.conftest import ROOT, python
from tests.unit.video_data import deep_png, pairs, pixels, write
from training.core.errors import UserError
from training.data.frames import pictures
from training.data.frames.pictures import Unreadable
from training.tasks.video_restoration import folders, headers
from training.tasks.video_restoration.options import VideoOptions


def shown(options: VideoOptions, **changed: Any) -> str:
    """All problems of changed options, as displayed."""
    return "\n".join(
        line
        for p in folders.check(replace(options, **changed), {n: f"--{n}" for n in changed})
        for line in p.lines()
    )


@pytest.fixture
def options(tmp_path: Path) -> VideoOptions:
    return pairs(tmp_path)


def test_two_roots(options: VideoOptions) -> None:
    assert shown(options) == ""
    first, second = folders.clips(options, "train")
    assert (first.name, len(first.gt), second.name, len(second.lq)) == ("c0", 5, "c1", 7)
    assert first.gt[2].endswith("gt/c0/000002.png") and first.lq[2].endswith("lq/c0/000002.png")
    assert first.spike == () and folders.clips(options, "val") == []


def test_the_layout_of_gopro(tmp_path: Path) -> None:
    for name in ("sharp", "blur", "blur_gamma"):
        write(tmp_path / "train" / "GOPR0372_07_00" / name, 0, 4, first=47)
    (tmp_path / "train" / "notes").mkdir()  # a folder without frames is ignored
    options = VideoOptions(dataroot_gt=str(tmp_path / "train"), num_frame=3, gt_size=8)
    assert shown(options) == ""
    (clip,) = folders.clips(options, "train")
    assert clip.gt[0].endswith("sharp/000047.png") and clip.lq[0].endswith("blur/000047.png")


def test_relative_to_the_current_folder(
    options: VideoOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert shown(options, dataroot_gt="gt", dataroot_lq="lq") == ""


def test_numbers_without_leading_zeros_are_sorted(tmp_path: Path) -> None:
    for root in ("gt", "lq"):
        folder = write(tmp_path / root / "c", 0, 11)
        for file in sorted(folder.iterdir()):
            file.rename(folder / f"im{int(file.stem)}.png")
    (clip,) = folders.clips(
        VideoOptions(dataroot_gt=f"{tmp_path}/gt", dataroot_lq=f"{tmp_path}/lq"), "train"
    )
    assert [Path(f).stem for f in clip.lq] == [f"im{n}" for n in range(11)]


def test_clips_and_frames_in_a_list(options: VideoOptions, tmp_path: Path) -> None:
    listed = tmp_path / "meta.txt"
    listed.write_text("c1 4 (12,16,3) 2\n\n")
    chosen = replace(options, meta_info_file=str(listed))
    assert shown(chosen) == ""
    (clip,) = folders.clips(chosen, "train")
    assert (
        [Path(f).stem for f in clip.gt]
        == [Path(f).stem for f in clip.lq]
        == ["000002", "000003", "000004", "000005"]
    )
    listed.write_text("c0\n")
    assert [len(c.gt) for c in folders.clips(chosen, "train")] == [5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file"),
        ("", "no clips in this file"),
        ("c0 five (12,16,3) 0", "line 1 is 'c0 five (12,16,3) 0'"),
        ("c0\n../c1", "line 2 is '../c1'"),
        ("c00", "lists clips that are not in"),
        ("c0 9 (12,16,3) 0", "c0 (9 listed from 0, 5 there)"),
    ],
)
def test_invalid_lists(
    options: VideoOptions, tmp_path: Path, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / "meta.txt").write_text(text)
    found = shown(options, meta_info_file=str(tmp_path / "meta.txt"))
    assert message in found and "(--meta_info_file)" in found


def test_a_missing_folder(options: VideoOptions) -> None:
    found = shown(
        options, dataroot_gt=options.dataroot_gt.replace("/gt", "/gtt"), dataroot_lq="nowhere"
    )
    assert (
        f"try:     --dataroot_gt={options.dataroot_gt}" in found
        and "(--dataroot_gt): no such folder" in found
    )
    assert "dataroot_lq is 'nowhere' (--dataroot_lq): no such folder" in found  # both at once
    advice = shown(options, dataroot_gt="elsewhere/blur_video/train").rpartition("try:")[2]
    command = shlex.split(advice)
    assert command == [sys.executable, str(ROOT / "examples/make_blur_video.py")]
    assert Path(command[1]).is_file()
    assert "nothing to train on" in shown(options, dataroot_gt="")


def test_a_missing_database(options: VideoOptions, tmp_path: Path) -> None:
    found = shown(options, dataroot_gt=f"{tmp_path}/gt.lmdb", dataroot_lq="x/train_GT_blurred.lmdb")
    assert found.count("no such folder") == 2 and f"--dataroot_gt={tmp_path}/gt\n" in found


def test_no_clips(options: VideoOptions, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no clips in this folder" in shown(options, dataroot_gt=f"{tmp_path}/empty")
    # the parent folder
    assert f"--dataroot_gt={tmp_path}/gt" in shown(
        options, dataroot_gt=str(tmp_path), dataroot_lq=""
    )
    file = tmp_path / "gt" / "c0" / "000000.png"
    assert "a file, not a folder" in shown(options, dataroot_gt=str(file))


def test_frames_without_a_partner(options: VideoOptions, tmp_path: Path) -> None:
    (tmp_path / "lq" / "c1" / "000003.png").unlink()
    assert "c1 (7 and 6 frames; not in both: 000003)" in shown(options)
    write(tmp_path / "gt" / "c2", 2, 4)
    assert "no blurred frames for c2" in shown(options)
    # sharp frames are not used as blurred ones
    assert "no blurred frames for c0, c1, c2" in shown(options, dataroot_lq="")
    with pytest.raises(UserError, match="no blurred frames"):
        folders.clips(options, "train")


def test_two_files_of_one_frame(options: VideoOptions, tmp_path: Path) -> None:
    preview = tmp_path / "gt" / "c0" / "000003.jpg"
    preview.write_bytes(b"")
    (tmp_path / "lq" / "c1" / "000003.png").unlink()
    found = shown(options)
    assert f"{preview.parent}: 000003.jpg and 000003.png have the same name" in found
    assert "not in both: 000003" in found  # both at once
    # a suggestion needs only the name of the clip
    assert f"--dataroot_gt={tmp_path}/gt" in shown(
        options, dataroot_gt=str(tmp_path), dataroot_lq=""
    )


def test_clips_that_are_too_short(options: VideoOptions) -> None:
    assert "a sample needs 6 frames, but 1 of 2 clips have fewer: c0 (5)" in shown(
        options, num_frame=6
    )
    found = shown(options, num_frame=3, interval_list="1,3")
    assert (
        "3 steps apart (interval_list): a sample needs 7 frames" in found
        and "try:     --num_frame=2" in found
    )


def test_sizes(options: VideoOptions, tmp_path: Path) -> None:
    found = shown(options, gt_size=14)
    assert (
        "gt_size is 14 (--gt_size), but frames are smaller: c0 (16 × 12), c1 (16 × 12)" in found
        and "try:     --gt_size=12" in found
    )
    found = shown(options, scale="2")
    assert (
        "scale is '2' (--scale), but sharp and blurred" in found
        and "c0 (16 × 12 and 16 × 12)" in found
        and "--scale=1" in found
    )
    for root in ("gt", "lq"):
        shutil.rmtree(tmp_path / root / "c1")
        write(tmp_path / root / "c1", 1, 5, width=20)
    assert "different sizes: c0 16 × 12, c1 20 × 12" in shown(options, gt_size=0)
    assert shown(options) == ""
    for root in ("gt", "lq"):
        write(tmp_path / "val" / root / "c", 1, 5, height=8)
    found = shown(
        options, test_dataroot_gt=f"{tmp_path}/val/gt", test_dataroot_lq=f"{tmp_path}/val/lq"
    )
    assert "frames of 8 pixels are smaller than SSIM's window" in found


def codes(options: VideoOptions) -> list[str]:
    return [problem.code for problem in folders.check(options, {})]


@pytest.mark.parametrize(("root", "size"), [("gt", (20, 14)), ("lq", (10, 9))])
def test_frames_of_several_sizes_in_a_clip(
    root: str, size: tuple[int, int], options: VideoOptions, tmp_path: Path
) -> None:
    Image.fromarray(pixels(0, 4, *size)).save(tmp_path / root / "c1" / "000004.png")
    (problem,) = folders.check(options, {})
    assert problem.code == "video.frame_sizes" and "c1/000004.png" in problem.what
    assert f"dataroot_{root} is" in problem.what and f"{size[0]} × {size[1]}" in problem.what


def test_a_sample_of_many_frames_reaches_every_long_clip(
    options: VideoOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headers, "FRAMES", 4)  # of 12: every third one
    Image.fromarray(pixels(0, 3, 20, 14)).save(tmp_path / "gt" / "c0" / "000003.png")
    assert codes(options) == ["video.frame_sizes"]
    write(tmp_path / "all" / "c0", 8, 5)
    shutil.copytree(tmp_path / "all" / "c0", tmp_path / "gt" / "c0", dirs_exist_ok=True)
    Image.fromarray(pixels(0, 4, 20, 14)).save(tmp_path / "gt" / "c1" / "000004.png")
    assert codes(options) == ["video.frame_sizes"]  # the tenth of all frames
    Image.fromarray(pixels(1, 4)).save(tmp_path / "gt" / "c1" / "000004.png")
    Image.fromarray(pixels(0, 3, 20, 14)).save(tmp_path / "gt" / "c1" / "000003.png")
    assert codes(options) == []


def test_pictures_must_have_eight_bits(options: VideoOptions, tmp_path: Path) -> None:
    file = tmp_path / "gt" / "c0" / "000000.png"
    Image.fromarray(np.zeros((12, 16), np.uint16)).save(file)
    assert f"{file} has pixel mode I;16" in shown(options)
    deep_png(file, 16, 12)
    assert f"{file} has pixel mode RGB;16B" in shown(options)
    with pytest.raises(Unreadable, match="RGB;16B"):
        pictures.pixels(str(file))
    file.write_bytes(b"no picture")
    assert f"{file}: not a picture that Pillow can read" in shown(options)


def test_the_format_of_every_checked_frame_is_checked(
    options: VideoOptions, tmp_path: Path
) -> None:
    """Not only that of the first frames."""
    file = tmp_path / "gt" / "c0" / "000003.png"
    Image.fromarray(np.zeros((12, 16), np.uint16)).save(file)
    assert codes(options) == ["video.pixel_format"]
    deep_png(file, 16, 12)
    assert codes(options) == ["video.pixel_format"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("interval_list", ""),
        ("interval_list", "1,x"),
        ("interval_list", "0"),
        ("G_optimizer_betas", "0.9"),
        ("G_optimizer_betas", "0.9,nan"),
        ("G_scheduler_periods", "10,-1"),
        ("G_scheduler_restart_weights", "1,2"),
        ("G_scheduler_milestones", "5,3"),
        ("gt_size", 7),
        ("embed_dim", 7),
        ("test_num_frame", 0),
        ("num_frame_testing", 2),
        ("size_patch_testing", 30),
    ],
)
def test_invalid_values(options: VideoOptions, name: str, value: Any) -> None:
    found = folders.check(
        replace(options, **{name: value} | ({"scale": "2"} if name == "gt_size" else {})),
        {name: "the file"},
    )
    shown = "num_frame_overlapping" if name == "num_frame_testing" else name
    (problem,) = [p for p in found if p.what.startswith(f"{shown} is")]
    assert problem.allowed and problem.fixes
    if shown == name:
        assert f"{name} is {value!r} (the file)" in problem.what


def test_all_problems_at_once(options: VideoOptions) -> None:
    assert (
        len(
            folders.check(
                replace(
                    options,
                    interval_list="x",
                    embed_dim=5,
                    dataroot_lq="nowhere",
                    test_dataroot_lq="x",
                ),
                {},
            )
        )
        == 4
    )


# ── the spike channel
# ────────────────────────────────────────────────────────────────────────────────────────────────


def spikes(options: VideoOptions, tmp_path: Path, write_one: Any, suffix: str) -> VideoOptions:
    for number, frames in enumerate((5, 7)):
        folder = tmp_path / "spikes" / f"c{number}" / "spike"
        folder.mkdir(parents=True)
        for frame in range(frames):
            write_one(folder / f"{frame:06d}{suffix}")
    return replace(options, dataroot_spike=f"{tmp_path}/spikes")


def test_raw_spikes(options: VideoOptions, tmp_path: Path) -> None:
    raw = spikes(options, tmp_path, lambda file: file.write_bytes(bytes(20 * 3)), ".dat")
    size = {"spike_h": 10, "spike_w": 16, "spike_channels": 3}
    assert shown(raw, **size) == ""
    assert folders.clips(raw, "train")[0].spike[4].endswith("spikes/c0/spike/000004.dat")
    assert "spike_h is 0" in shown(raw)
    assert "60 bytes, not a multiple of 18, the size of a plane of 9 × 16" in shown(
        raw, **size | {"spike_h": 9}
    )
    assert "not a whole number of bytes" in shown(raw, **size | {"spike_h": 9, "spike_w": 15})
    assert "spike_channels is 4" in shown(raw, **size | {"spike_channels": 4})
    write(tmp_path / "val" / "lq" / "c", 1, 5)
    write(tmp_path / "val" / "gt" / "c", 1, 5)
    val = {"test_dataroot_gt": f"{tmp_path}/val/gt", "test_dataroot_lq": f"{tmp_path}/val/lq"}
    assert "but test_dataroot_spike is empty" in shown(raw, **size, **val)
    (tmp_path / "spikes" / "c1" / "spike" / "000006.dat").unlink()
    assert "not in both: 000006" in shown(raw, **size)
    shutil.rmtree(tmp_path / "spikes" / "c0")
    assert "no spikes for c0" in shown(raw, **size)


def test_arrays_of_spikes(options: VideoOptions, tmp_path: Path) -> None:
    arrays = spikes(
        options, tmp_path, lambda file: np.save(file, np.zeros((3, 12, 16), np.float32)), ".npy"
    )
    assert shown(arrays, spike_channels=3) == ""
    assert "spike_channels is 4" in shown(arrays, spike_channels=4)
    file = tmp_path / "spikes" / "c0" / "spike" / "000000.npy"
    np.save(file, np.array(["text"]))
    assert f"{file} is not an array of numbers" in shown(arrays)
    file.write_bytes(b"\x93NUMPY\x01\x00garbage")
    assert f"{file} is not an array of numbers" in shown(arrays)


# ── the digest, and the duration of the checks
# ──────────────────────────────────────────────────────────────────────────


def test_the_digest_depends_on_the_frames_and_not_their_location(
    options: VideoOptions, tmp_path: Path
) -> None:
    before = folders.content(options)
    shutil.move(tmp_path / "gt", tmp_path / "elsewhere")
    moved = replace(options, dataroot_gt=f"{tmp_path}/elsewhere")
    assert folders.content(moved) == before
    with (tmp_path / "elsewhere" / "c0" / "000001.png").open("ab") as file:
        file.write(b" ")
    assert folders.content(moved) != before


def test_thousands_of_frames_are_checked_quickly(tmp_path: Path) -> None:
    for root in ("gt", "lq"):
        for clip in range(30):
            folder = write(tmp_path / root / f"c{clip:02d}", 0, 1)
            for frame in range(1, 100):
                os.link(folder / "000000.png", folder / f"{frame:06d}.png")
    options = VideoOptions(dataroot_gt=f"{tmp_path}/gt", dataroot_lq=f"{tmp_path}/lq", gt_size=8)
    assert folders.check(options, {}) == []  # imports Pillow
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        assert folders.check(options, {}) == []
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.3


def test_checks_import_neither_torch_nor_numpy(options: VideoOptions) -> None:
    code = (
        "import sys; from training.tasks.video_restoration import folders, options; "
        f"o = options.VideoOptions(dataroot_gt={options.dataroot_gt!r}, "
        f"dataroot_lq={options.dataroot_lq!r}, num_frame=3, gt_size=8); "
        "print(folders.check(o, {}), [m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = python("-c", code)
    assert (done.stdout.strip(), done.stderr) == ("[] []", "")


def test_names_that_are_not_utf8(options: VideoOptions, tmp_path: Path) -> None:
    before = folders.content(options)
    for root in ("gt", "lq"):
        for old in sorted((tmp_path / root / "c0").iterdir()):
            old.rename(old.with_name(os.fsdecode(b"caf\xe9") + old.name))
    assert folders.content(options) != before
