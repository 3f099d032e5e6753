"""Samples of paired clips: the right frames, the same crop in both, and random draws that depend only
on the generator."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from tests.cases import each
from tests.unit.video_data import pairs, pixels, write
from training.tasks.base import Samples
from training.tasks.video_restoration import folders
from training.tasks.video_restoration.dataset import Training, Unreadable, Validation
from training.tasks.video_restoration.options import VideoOptions

PLAIN = {"use_hflip": False, "use_rot": False}


def drawn(options: VideoOptions, index: int, seed: int = 0) -> tuple[Any, Any]:
    """(lq, gt) of a sample as integers, (T, h, w, C)."""
    sample = Training(options).draw(index, np.random.default_rng(seed))
    assert sample["lq"].dtype == sample["gt"].dtype == torch.float32
    lq, gt = (
        (sample[name] * 255).round().int().permute(0, 2, 3, 1).numpy() for name in ("lq", "gt")
    )
    return lq, gt


def test_every_frame_starts_a_sample(tmp_path: Path) -> None:
    options = pairs(tmp_path, gt_size=0, **PLAIN)
    data = Training(options)
    assert len(data) == 12
    lq, gt = drawn(options, 6)  # the second frame of the second clip
    for step in range(3):
        assert (lq[step] == pixels(1, 1 + step)).all() and (gt[step] == pixels(9, 1 + step)).all()
    for seed in range(20):  # too close to the end of the clip: another start
        lq, _ = drawn(options, 11, seed)
        first = lq[0, 0, 0, 2] - 16
        assert 0 <= first <= 4 and [f[0, 0, 2] for f in lq] == [16 + first, 17 + first, 18 + first]


def test_steps_between_frames(tmp_path: Path) -> None:
    options = pairs(tmp_path, (7, 7), gt_size=0, interval_list="1,3", random_reverse=True, **PLAIN)
    seen = set()
    for seed in range(60):
        lq, gt = drawn(options, 0, seed)
        numbers = lq[:, 0, 0, 2]
        assert (gt[:, 0, 0, 2] == numbers + 128).all()
        seen.add(tuple(int(n) for n in np.diff(numbers)))
    assert seen == {(1, 1), (3, 3), (-1, -1), (-3, -3)}


def test_both_pictures_have_the_same_crop_and_flips(tmp_path: Path) -> None:
    options = pairs(tmp_path)
    corners, ways = set(), set()
    for seed in range(80):
        lq, gt = drawn(options, 0, seed)
        assert lq.shape == gt.shape == (3, 8, 8, 3)
        assert (lq[..., :2] == gt[..., :2]).all()
        picture = lq[0]
        corners.add((int(picture[..., 0].min()), int(picture[..., 1].min())))
        ways.add(
            (
                *(int(n) for n in picture[0, 1, :2] - picture[0, 0, :2]),
                *(int(n) for n in picture[1, 0, :2] - picture[0, 0, :2]),
            )
        )
    assert len(corners) > 20 and max(c[0] for c in corners) == 8 and max(c[1] for c in corners) == 4
    assert len(ways) == 8  # every flip and rotation
    assert all(
        (drawn(replace(options, **PLAIN), 0, seed)[0][0, 0, 1, :2] != 0).any() for seed in range(3)
    )


def test_frames_that_are_not_square_keep_their_orientation(tmp_path: Path) -> None:
    options = pairs(tmp_path, gt_size=0)
    assert {drawn(options, 0, seed)[0].shape for seed in range(20)} == {(3, 12, 16, 3)}


def test_sharp_frames_larger_than_blurred_ones(tmp_path: Path) -> None:
    write(tmp_path / "lq" / "c", 0, 3)
    folder = tmp_path / "gt" / "c"
    folder.mkdir(parents=True)
    for frame in range(3):
        Image.fromarray(pixels(0, frame).repeat(2, 0).repeat(2, 1)).save(
            folder / f"{frame:06d}.png"
        )
    options = VideoOptions(
        dataroot_gt=f"{tmp_path}/gt",
        dataroot_lq=f"{tmp_path}/lq",
        num_frame=2,
        gt_size=8,
        scale="2",
    )
    for seed in range(10):
        lq, gt = drawn(options, 0, seed)
        assert gt.shape == (2, 8, 8, 3) and (gt == lq.repeat(2, 1).repeat(2, 2)).all()


def test_the_same_generator_the_same_sample(tmp_path: Path) -> None:
    options = pairs(tmp_path, interval_list="1,2", random_reverse=True)
    data = Training(options)
    np.random.seed(1)
    one = data.draw(3, np.random.default_rng([1, 0, 3]))
    np.random.seed(2)
    same, other = (
        pickle.loads(pickle.dumps(data)).draw(3, np.random.default_rng([1, 0, 3])),
        data.draw(3, np.random.default_rng([1, 1, 3])),
    )
    assert torch.equal(one["lq"], same["lq"]) and torch.equal(one["gt"], same["gt"])
    assert not torch.equal(one["lq"], other["lq"])


def test_batches_of_the_trainer_with_and_without_workers(tmp_path: Path) -> None:
    rows = Samples(Training(pairs(tmp_path)), 7, drawn=True)

    def batches(workers: int) -> list[Any]:
        loader = DataLoader(Whole(rows), batch_size=None, sampler=[0, 1, 2], num_workers=workers)
        return [batch["lq"] for batch in loader]

    alone = batches(0)
    assert alone[0].shape == (2, 3, 3, 8, 8)
    assert all(torch.equal(a, b) for a, b in zip(alone, batches(2), strict=True))


class Whole(torch.utils.data.Dataset[Any]):
    """Two samples per batch, of epoch 4."""

    def __init__(self, rows: Samples) -> None:
        self.rows = rows

    def __getitem__(self, index: int) -> Any:
        return self.rows.rows([2 * index, 2 * index + 1], 4)


def test_validation_has_whole_clips(tmp_path: Path) -> None:
    options = pairs(tmp_path)
    options = VideoOptions(
        test_dataroot_gt=options.dataroot_gt, test_dataroot_lq=options.dataroot_lq
    )
    data = Validation(options)
    assert len(data) == 2 and data[1]["lq"].shape == (7, 3, 12, 16)
    assert torch.equal(data[1]["gt"], data[1]["gt"])
    assert Validation(replace(options, test_num_frame=6))[0]["gt"].shape[0] == 5
    assert Validation(replace(options, test_num_frame=2))[0]["gt"].shape[0] == 2


def test_grey_pictures_and_palettes(tmp_path: Path) -> None:
    options = pairs(tmp_path, gt_size=0, **PLAIN)
    file = tmp_path / "lq" / "c0" / "000000.png"
    Image.fromarray(pixels(0, 0)[..., 0]).save(file)
    lq, _ = drawn(options, 0)
    assert (lq[0] == pixels(0, 0)[..., :1]).all()


def test_an_unreadable_frame_is_named(tmp_path: Path) -> None:
    options = pairs(tmp_path)
    file = tmp_path / "lq" / "c0" / "000001.png"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Unreadable, match=f"{file} cannot be read"):
        drawn(options, 0)
    rows = Samples(Training(options), 7, drawn=True)
    with pytest.raises(Unreadable, match=str(file)):  # also from a worker
        next(iter(DataLoader(Whole(rows), batch_size=None, sampler=[0], num_workers=1)))
    large = tmp_path / "gt" / "c0" / "000001.png"
    for one, size, wanted in ((file, (10, 7), "10 × 7"), (large, (20, 15), "20 × 15")):
        before = one.read_bytes()
        Image.fromarray(pixels(0, 1, *size)).save(one)
        with pytest.raises(Unreadable, match=f"{one} is {wanted} and should be 16 × 12"):
            drawn(options, 0)
        with pytest.raises(Unreadable, match="does not have the size of"):
            drawn(replace(options, gt_size=0), 0)
        one.write_bytes(before)
    data = Training(options)
    file.unlink()
    with pytest.raises(Unreadable, match=f"{file} cannot be read"):
        data.draw(0, np.random.default_rng(0))


# ── the spike channel
# ────────────────────────────────────────────────────────────────────────────────────────────────


def packed(planes: Any) -> bytes:
    """Bits as written by a spike camera: upside down, the first pixel in the lowest bit of a
    byte."""
    out = bytearray()
    for plane in planes:
        pixels = [int(value) for row in plane[::-1] for value in row]
        out += bytes(
            sum(bit << place for place, bit in enumerate(pixels[i : i + 8]))
            for i in range(0, len(pixels), 8)
        )
    return bytes(out)


def with_spikes(tmp_path: Path, planes: Any, suffix: str, **facts: Any) -> VideoOptions:
    folder = tmp_path / "spikes" / "c0"
    folder.mkdir(parents=True)
    for frame in range(3):
        file = folder / f"{frame:06d}{suffix}"
        file.write_bytes(packed(planes)) if suffix == ".dat" else np.save(file, planes)
    return pairs(
        tmp_path, (3,), dataroot_spike=f"{tmp_path}/spikes", **{"gt_size": 0} | PLAIN | facts
    )


def test_raw_spikes_are_averaged_into_channels(tmp_path: Path) -> None:
    planes = np.random.default_rng(0).random((6, 12, 16)) < 0.3
    options = with_spikes(tmp_path, planes, ".dat", spike_h=12, spike_w=16, spike_channels=2)
    sample = Training(options).draw(0, np.random.default_rng(0))
    assert sample["lq"].shape == (3, 5, 12, 16) and sample["gt"].shape == (3, 3, 12, 16)
    wanted = np.stack([planes[:3].mean(0), planes[3:].mean(0)]).astype(np.float32)
    assert np.allclose(sample["lq"][1, 3:], wanted)
    upright = Training(replace(options, spike_flipud=False)).draw(0, np.random.default_rng(0))
    assert np.allclose(upright["lq"][1, 3:], wanted[:, ::-1])


def test_the_names_of_spike_files_may_end_in_capitals(tmp_path: Path) -> None:
    planes = np.random.default_rng(0).random((6, 12, 16)) < 0.3
    raw = with_spikes(tmp_path, planes, ".dat", spike_h=12, spike_w=16, spike_channels=2)
    seen = Training(raw).draw(0, np.random.default_rng(0))["lq"]
    for suffix, wanted in ((".DAT", packed(planes)), (".NPY", None)):
        for file in (tmp_path / "spikes" / "c0").iterdir():
            if wanted is None:
                with file.open("wb") as array:
                    np.save(array, planes)
            file.rename(file.with_suffix(suffix))
        assert folders.check(raw, {}) == []
        assert torch.equal(Training(raw).draw(0, np.random.default_rng(0))["lq"], seen)


@each("array", [np.zeros((1, 3, 12, 16), np.float32), np.full((12, 16), "text")])
def test_an_array_that_is_not_of_planes_is_named(array: Any, tmp_path: Path) -> None:
    options = with_spikes(tmp_path, np.zeros((12, 16), np.float32), ".npy")
    training, file = Training(options), tmp_path / "spikes" / "c0" / "000001.npy"
    np.save(file, array)
    with pytest.raises(Unreadable, match=f"{file} is not an array of numbers"):
        training.draw(0, np.random.default_rng(0))


def test_spikes_have_the_same_crop_and_flips(tmp_path: Path) -> None:
    columns, rows = np.meshgrid(np.arange(16), np.arange(12))
    options = with_spikes(
        tmp_path,
        (columns / 255).astype(np.float32),
        ".npy",
        gt_size=8,
        use_hflip=True,
        use_rot=True,
    )
    for seed in range(10):
        sample = Training(options).draw(0, np.random.default_rng(seed))["lq"]
        # the red channel of these pictures is the position
        assert torch.allclose(sample[:, 3], sample[:, 0], atol=1e-6)
    assert rows.shape == (12, 16)


def test_spikes_of_another_size_are_stretched(tmp_path: Path) -> None:
    ramp = np.broadcast_to(np.arange(32, dtype=np.float32), (24, 32)).copy()
    options = with_spikes(tmp_path, ramp, ".npy")
    whole = Training(options).draw(0, np.random.default_rng(0))["lq"][0, 3]
    assert whole.shape == (12, 16)
    assert np.allclose(whole[5, 2:-2], 2 * np.arange(16)[2:-2] + 0.5)  # pixel x covers 2x and 2x+1
    crop = Training(replace(options, gt_size=8)).draw(0, np.random.default_rng(1))["lq"][0]
    left = int((crop[0, 0, 0] * 255).round())
    assert np.allclose(crop[3], whole[:8, left : left + 8], atol=1e-4)
