"""make_blur_video: the rendered clips, its two layouts, and command-line errors without a
traceback."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import ROOT
from tests.unit.conftest import python
from tests.unit.video_data import gopro, rendered
from training.core.errors import Problem, UserError
from training.tasks import make_blur_video
from training.tasks.video_restoration import folders, making, scenes
from training.tasks.video_restoration.options import VideoOptions


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()
    }


def problems(*words: str) -> list[Problem]:
    with pytest.raises(UserError) as caught:
        making.parse(list(words))
    return caught.value.problems


def test_the_same_seed_gives_the_same_pictures(tmp_path: Path) -> None:
    one, same = (
        files(rendered(tmp_path / "a", clips=1, frames=2)),
        files(rendered(tmp_path / "b", clips=1, frames=2)),
    )
    assert one == same
    assert one != files(rendered(tmp_path / "c", clips=1, frames=2, seed=2))
    assert set(one) == {
        f"{part}/clip_000/{kind}/00000{n}.png"
        for part in ("train", "test")
        for kind in ("blur", "sharp")
        for n in (0, 1)
    }
    longer = files(rendered(tmp_path / "d", clips=2, frames=3))
    # more clips do not change the first ones
    assert all(longer[name] == content for name, content in one.items())


def test_a_blurred_frame_is_the_mean_of_the_light() -> None:
    scene = scenes.Scene(np.random.default_rng(3), 48, 64)
    blurred, sharp, lights = scene.frame(4)
    assert blurred.shape == (48, 64, 3) and lights.shape == (scenes.MOMENTS, 48, 64, 3)
    assert np.allclose(blurred, lights.mean(0)) and np.array_equal(sharp, scene.at(4.0))
    assert lights.min() >= 0 and lights.max() <= 1
    # Motion, and less of it with a shorter shutter.
    assert np.abs(lights[0] - lights[-1]).mean() > 2 * np.abs(lights[5] - lights[4]).mean() > 0
    picture = scenes.encoded(sharp)
    assert (
        picture.dtype == np.uint8 and np.abs((picture / 255.0) ** scenes.GAMMA - sharp).max() < 0.01
    )


def test_blurred_frames_are_clearly_worse(tmp_path: Path) -> None:
    folder = rendered(tmp_path / "a", clips=4, frames=4, size=(64, 64))
    found = []
    for file in sorted(folder.glob("*/*/sharp/*.png")):
        sharp, blurred = (
            np.asarray(Image.open(f)).astype(float) / 255
            for f in (file, file.parents[1] / "blur" / file.name)
        )
        found.append(-10 * np.log10(np.square(sharp - blurred).mean()))
    assert len(found) == 20 and 22 < np.mean(found) < 32


def test_spikes_are_proportional_to_light(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    lights = np.repeat(random.random((1, 8, 8, 1)).astype(np.float32), 11, 0).repeat(3, -1)
    camera = scenes.SpikeCamera(random, 8, 8)
    planes = np.concatenate([camera.planes(lights, 32) for _ in range(8)])
    assert planes.shape == (256, 8, 8) and np.abs(planes.mean(0) - lights[0, :, :, 0]).max() < 0.01
    folder = rendered(tmp_path / "a", clips=1, frames=2, spikes=True)
    assert (
        folder / "train" / "clip_000" / "spike" / "000001.dat"
    ).stat().st_size == making.PLANES * 32 * 32 // 8


@pytest.mark.parametrize("layout", ["gopro", "kair"])
@pytest.mark.parametrize("spikes", [False, True])
def test_the_next_command_trains_on_it(tmp_path: Path, layout: str, spikes: bool) -> None:
    folder = tmp_path / "with a space"
    text = making.make(
        making.Chosen(folder, clips=2, frames=6, size=(48, 32), layout=layout, spikes=spikes)
    )
    assert (
        text.startswith("2 clips for training and 1 for validation, 6 frames of 48 × 32 each")
        and str(folder) in text
    )
    command = shlex.split(text.rpartition("next: ")[2])
    assert command[:3] == ["./launch_train.sh", "2", "configs/video/quickstart.py"]
    given = dict(word.removeprefix("--").split("=", 1) for word in command[3:])
    options = VideoOptions(
        **{name: int(value) if value.isdigit() else value for name, value in given.items()},
        gt_size=32,
    )  # type: ignore[arg-type]
    assert folders.check(options, {}) == []
    assert len(folders.clips(options, "train")) == 2 and len(folders.clips(options, "val")) == 1
    assert bool(folders.clips(options, "val")[0].spike) == spikes
    if layout == "kair":
        listed = replace(options, meta_info_file=str(folder / "meta_info_train_GT.txt"))
        assert folders.check(listed, {}) == [] and len(folders.clips(listed, "train")) == 2


def test_a_folder_that_is_not_empty_is_not_replaced(tmp_path: Path) -> None:
    folder = rendered(tmp_path / "a", clips=1, frames=2)
    (problem,) = problems(str(folder))
    assert "is not empty" in problem.what and problem.fixes[0].endswith(f"{folder} --force")
    before = folders.content(gopro(folder))
    chosen = making.parse(
        [str(folder), "--force", "--clips=1", "--frames=3", "--size=32", "--seed=9"]
    )
    making.make(chosen)
    assert folders.content(gopro(folder)) != before
    assert [f.name for f in tmp_path.iterdir()] == ["a"]  # nothing is left beside it
    (folder / "thesis.txt").write_text("mine")
    (problem,) = problems(str(folder), "--force")
    assert "'thesis.txt', which make_blur_video did not create" in problem.what
    (problem,) = problems(str(folder / "thesis.txt"))
    assert "is not a folder" in problem.what


def test_no_partial_folder_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(making, "_clip", full)
    assert make_blur_video.main([str(tmp_path / "a"), "--clips=1"]) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--clips=0", "a whole number from 1 to 1000"),
        ("--frames=1", "a whole number from 2 to 1000"),
        ("--seed=-1", "a whole number from 0"),
        ("--size=33", "a multiple of 8"),
        ("--size=32x", "a multiple of 8"),
        ("--size=32x32x32", "a multiple of 8"),
        ("--layout=gopr", "gopro or kair"),
        ("--clips", "a whole number from 1 to 1000"),
        ("--spikes=1", "no value"),
    ],
)
def test_invalid_values(tmp_path: Path, word: str, message: str) -> None:
    (problem,) = problems(str(tmp_path), word)
    assert message in problem.allowed


def test_invalid_arguments(tmp_path: Path) -> None:
    found = problems("--frame=3", str(tmp_path), "other", "-x", "--clips=2", "--clips=3")
    assert [p.what.split()[0] for p in found] == ["--frame", "-x", "--clips", "'other'"]
    assert found[0].fixes == [
        f"python -m training.tasks.make_blur_video {tmp_path} other --frames=3"
    ]
    chosen = making.parse(["--size=64x32", "--clips", "3", str(tmp_path)])
    assert (chosen.size, chosen.clips, chosen.folder) == ((64, 32), 3, tmp_path)
    assert making.parse(["-h", "a", "b"]).help


def test_the_command(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    done = python(
        "-m", "training.tasks.make_blur_video", str(folder), "--clips=2", "--frames=2", "--size=32"
    )
    assert done.returncode == 0, done.stderr
    assert "next: ./launch_train.sh 2" in done.stdout and "clip 3 of 3" in done.stderr
    assert sorted(f.name for f in folder.iterdir()) == ["test", "train"]
    done = python("-m", "training.tasks.make_blur_video", str(folder), "--size=1")
    assert (
        done.returncode == 2
        and "Traceback" not in done.stderr
        and "nothing was written" in done.stderr
    )
    done = python("-m", "training.tasks.make_blur_video", "--help")
    assert done.returncode == 0 and "--layout" in done.stdout


def test_a_python_without_the_packages_shows_a_fix_or_switches(tmp_path: Path) -> None:
    """In a project without an environment, and next to the project's own."""
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    module = ["-m", "training.tasks.make_blur_video", str(tmp_path / "made")]
    command = [str(bare / "bin/python"), *module, "--clips=1", "--frames=4", "--size=32"]
    copy = tmp_path / "project"
    shutil.copytree(
        ROOT / "training", copy / "training", ignore=shutil.ignore_patterns("__pycache__")
    )
    alone = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    assert alone.returncode == 2 and "has no numpy and no pillow" in alone.stderr
    assert f"{bare}/bin/python -m pip install numpy pillow" in alone.stderr
    assert "Traceback" not in alone.stderr and not (tmp_path / "made").exists()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and (tmp_path / "made/train").is_dir(), done.stderr
