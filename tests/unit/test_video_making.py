"""examples/make_blur_video.py: its files, motion blur, layouts, and errors without a traceback."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.unit.conftest import python
from tests.unit.video_data import EXAMPLE, MAKER, rendered
from training.tasks.video_restoration import folders
from training.tasks.video_restoration.options import VideoOptions

SMALL = ("--clips=1", "--frames=2")


def files(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*.*") if f.is_file()}


def rejected(*words: object) -> str:
    """The only line of an error; exit status 2."""
    done = python(str(EXAMPLE), *map(str, words))
    assert done.returncode == 2 and done.stdout == "", done.stderr
    (line,) = done.stderr.splitlines()
    return line


def test_the_same_seed_gives_the_same_files(tmp_path: Path) -> None:
    one = files(rendered(tmp_path / "a", *SMALL))
    assert one == files(rendered(tmp_path / "b", *SMALL))
    other = files(rendered(tmp_path / "c", *SMALL, "--seed=2"))
    assert one.keys() == other.keys() and one != other
    frames = {
        f"{part}/clip_000/{kind}/00000{n}.png"
        for part in ("train", "test")
        for kind in ("blur", "sharp")
        for n in (0, 1)
    }
    assert set(one) - frames == {MAKER["MARK"]}
    longer = files(rendered(tmp_path / "d", "--clips=2", "--frames=3"))
    # more clips do not change the first ones
    assert all(longer[name] == content for name, content in one.items())


def test_a_blurred_frame_is_the_mean_of_the_light(tmp_path: Path) -> None:
    folder = rendered(tmp_path / "a", "--size=64x48")
    light = MAKER["scene"](np.random.default_rng([1, 0, 0]), 48, 64)
    lights = MAKER["exposure"](light, 4)
    assert lights.shape == (MAKER["MOMENTS"], 48, 64, 3) and 0 <= lights.min() < lights.max() <= 1
    assert np.array_equal(lights[MAKER["MOMENTS"] // 2], light(4))
    # Motion: the ends of an exposure differ more than its middle.
    assert np.abs(lights[0] - lights[-1]).mean() > 2 * np.abs(lights[5] - lights[4]).mean() > 0
    for kind, expected in (("blur", lights.mean(0)), ("sharp", light(4))):
        picture = np.asarray(Image.open(folder / f"train/clip_000/{kind}/000004.png"))
        assert np.abs((picture / 255.0) ** MAKER["GAMMA"] - expected).max() < 0.01


def test_blurred_frames_are_clearly_worse(tmp_path: Path) -> None:
    found = []
    for file in rendered(tmp_path / "a", "--size=64").glob("*/*/sharp/*.png"):
        sharp, blurred = (
            np.asarray(Image.open(f)) / 255.0 for f in (file, file.parents[1] / "blur" / file.name)
        )
        found.append(-10 * np.log10(np.square(sharp - blurred).mean()))
    assert len(found) == 30 and 22 < np.mean(found) < 32


def test_spikes_are_proportional_to_light() -> None:
    random = np.random.default_rng(1)
    lights = np.repeat(random.random((1, 8, 8, 1)).astype(np.float32), 11, 0).repeat(3, -1)
    charge = random.random((8, 8)).astype(np.float32)
    planes = np.concatenate([MAKER["spikes"](charge, lights) for _ in range(8)])
    assert planes.shape == (256, 8, 8) and np.abs(planes.mean(0) - lights[0, :, :, 0]).max() < 0.01


@pytest.mark.parametrize("layout", ["gopro", "kair"])
@pytest.mark.parametrize("spikes", [False, True])
def test_the_next_command_trains_on_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str, spikes: bool
) -> None:
    folder = rendered(
        tmp_path / "with a space", f"--layout={layout}", "--size=48x32", *["--spikes"] * spikes
    )
    made, command = capsys.readouterr().out.splitlines()
    assert made == f"4 clips for training, 1 for validation: {folder}"
    words = shlex.split(command.removeprefix("next: "))
    assert words[:3] == ["./launch_train.sh", "2", "configs/video/quickstart.py"]
    given = dict(word.removeprefix("--").split("=", 1) for word in words[3:])
    options = VideoOptions(
        **{name: int(value) if value.isdigit() else value for name, value in given.items()},
        gt_size=32,
    )  # type: ignore[arg-type]
    assert folders.check(options, {}) == []
    assert len(folders.clips(options, "train")) == 4 and len(folders.clips(options, "val")) == 1
    assert bool(folders.clips(options, "val")[0].spike) == spikes
    for file in folder.rglob("*.dat"):
        assert file.stat().st_size == MAKER["PLANES"] * 48 * 32 // 8
    if layout == "kair":
        listed = replace(options, meta_info_file=str(folder / "meta_info_train_GT.txt"))
        assert folders.check(listed, {}) == [] and len(folders.clips(listed, "train")) == 4


def test_force_replaces_only_what_it_made(tmp_path: Path) -> None:
    folder = rendered(tmp_path / "a", *SMALL)
    before = files(folder)
    assert "is not empty; --force replaces it" in rejected(folder)
    assert files(folder) == before
    rendered(folder, "--force", *SMALL, "--layout=kair")
    assert not (folder / "train").exists() and (folder / "train_GT/clip_000/000001.png").is_file()
    assert list(tmp_path.iterdir()) == [folder]  # nothing is left beside it
    (folder / "thesis.txt").write_text("mine")
    assert "has 'thesis.txt', not made here" in rejected(folder, "--force")
    assert "is not a folder" in rejected(folder / "thesis.txt", "--force")
    (tmp_path / "gopro/train").mkdir(parents=True)  # downloaded data
    assert "has 'train', not made here" in rejected(tmp_path / "gopro", "--force")


def test_the_default_folder_is_what_the_quickstart_trains_on(tmp_path: Path) -> None:
    done = python(str(EXAMPLE), *SMALL, "--size=32", cwd=tmp_path)
    assert done.returncode == 0 and (tmp_path / "data/blur_video/test").is_dir(), done.stderr
    assert done.stdout.endswith("next: ./launch_train.sh 2 configs/video/quickstart.py\n")


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, EXAMPLE, tmp_path / "a", "--clips=1000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        until = time.monotonic() + 60
        while not list(tmp_path.rglob("*.png")) and time.monotonic() < until:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and output == b"" and list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    assert MAKER["main"]([str(tmp_path / "a")]) == 2
    assert "nothing was made: [Errno 28] No space left" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--clips=0", "'0' is not a whole number from 1 to 1000"),
        ("--size=33", "'33' is not a multiple of 8 from 32 to 2048"),
        ("--size=32x", "'' is not a multiple of 8"),
        ("--layout=gopr", "'gopr'"),
        ("--frame=3", "unrecognized arguments: --frame=3"),
    ],
)
def test_invalid_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str, message: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        MAKER["main"]([str(tmp_path), word])
    (line,) = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2 and message in line


def test_missing_packages(tmp_path: Path) -> None:
    (tmp_path / "PIL.py").write_text("raise ModuleNotFoundError(\"No module named 'PIL'\")")
    done = python(str(EXAMPLE), PYTHONPATH=str(tmp_path))
    assert done.returncode == 2 and "No module named 'PIL'" in done.stderr
    assert done.stderr.endswith(f"{shlex.quote(sys.executable)} -m pip install numpy pillow\n")
