"""./duet restore: real videos, folders and pictures through a network; what it rejects."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image

from tests.unit.conftest import ROOT
from tests.unit.films import (
    HEIGHT,
    RATE,
    WIDTH,
    apart,
    content,
    film,
    moving,
    network,
    pictures,
    trained,
)
from tests.unit.trained_runs import gpt, made
from training import tasks
from training.cli import restore, weights_argument
from training.core import args
from training.core.errors import UserError
from training.data.frames import pyav, source
from training.tasks.video_restoration import inference

# The display matrix of a track in an .mp4: upright, and turned by 90 degrees.
UPRIGHT = b"".join(n.to_bytes(4, "big") for n in (1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30))
TURNED = b"".join(
    n.to_bytes(4, "big") for n in (0, 1 << 16, 0, (1 << 32) - (1 << 16), 0, 0, 0, 0, 1 << 30)
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(trained(tmp_path_factory.mktemp("restore") / "run").path)


def restored(run: str, given: Path, out: Path, *flags: str) -> None:
    assert restore.main([run, str(given), f"--out={out}", "--device=cpu", *flags]) == 0


def codes(*argv: object) -> list[str]:
    with pytest.raises(UserError) as caught:
        restore.parse([str(word) for word in argv])
    return [problem.code for problem in caught.value.problems]


def whole(pixels: Any) -> Any:
    """The network's answer to all frames at once, as pictures."""
    clip = torch.tensor(pixels).permute(0, 3, 1, 2)[None].float() / 255
    with torch.no_grad():
        found = network()(clip)[0]
    return found.clamp(0, 1).mul(255).round().byte().permute(0, 2, 3, 1).numpy()


def test_a_video_keeps_its_rate_and_sound(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = film(tmp_path / "in.mp4", sound="aac")
    restored(run, given, tmp_path / "out.mkv", "--json")
    record = json.loads(capsys.readouterr().out)
    assert (record["step"], record["frames"], record["width"], record["tile"]) == (9, 12, 64, 0)
    with av.open(str(given)) as before, av.open(str(tmp_path / "out.mkv")) as after:
        assert after.streams.video[0].average_rate == RATE
        assert after.streams.video[0].codec_context.pix_fmt == "yuv420p"
        voices = [[bytes(p) for p in c.demux(audio=0) if p.size] for c in (before, after)]
        assert voices[0] == voices[1] != []
    assert apart(content(tmp_path / "out.mkv"), whole(content(given))) < 1.5
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.mp4", "out.mkv"]


def test_frames_of_a_folder_equal_the_network_s_own_answer(run: str, tmp_path: Path) -> None:
    given = pictures(tmp_path / "in", 11)  # im10 after im9
    restored(run, given, tmp_path / "out")
    found = [np.asarray(Image.open(tmp_path / "out" / f"im{n}.png")) for n in range(11)]
    wanted = whole(np.stack([moving(n) for n in range(11)]))
    assert np.abs(np.stack(found).astype(int) - wanted).max() <= 1
    restored(run, given, tmp_path / "out.mp4", "--fps=12.5", "--frames=2:6")
    with av.open(str(tmp_path / "out.mp4")) as container:
        assert container.streams.video[0].average_rate == Fraction(25, 2)
        assert container.streams.video[0].frames == 4
    restored(run, given / "im3.png", tmp_path / "one.png")
    assert Image.open(tmp_path / "one.png").size == (WIDTH, HEIGHT)


def test_super_resolution_of_odd_sizes(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", scale="2")
    restored(str(run.path), pictures(tmp_path / "in", 3, 33, 27), tmp_path / "out", "--tile=32")
    assert Image.open(tmp_path / "out/im0.png").size == (66, 54)
    given = pictures(tmp_path / "odd", 3, 33, 27)
    restored(str(trained(tmp_path / "one").path), given, tmp_path / "odd.mp4")
    assert content(tmp_path / "odd.mp4").shape == (3, 27, 33, 3)


def test_colours_and_rotation_are_kept(run: str, tmp_path: Path) -> None:
    for matrix, limits in ((1, 1), (5, 1), (2, 0)):
        given = film(tmp_path / "in.mkv", 2, colorspace=matrix, color_range=limits)
        restored(run, given, tmp_path / "out.mkv", "--overwrite")
        assert pyav.facts(tmp_path / "out.mkv").matrix == matrix
        assert apart(content(tmp_path / "out.mkv"), whole(content(given))) < 1.5
    plain = film(tmp_path / "in.mp4", 2).read_bytes()
    assert plain.count(UPRIGHT) == 2  # of the file and of the track
    turned = tmp_path / "turned.mp4"
    head, track = plain[: plain.rindex(UPRIGHT)], plain[plain.rindex(UPRIGHT) + 36 :]
    turned.write_bytes(head + TURNED + track)
    restored(run, turned, tmp_path / "out")
    (first, _) = (np.asarray(Image.open(p)) for p in sorted((tmp_path / "out").iterdir()))
    # the matrix turns clockwise by 90 degrees
    wanted = whole(np.ascontiguousarray(np.rot90(content(tmp_path / "in.mp4"), -1, (1, 2))))
    assert first.shape == (WIDTH, HEIGHT, 3) and apart(first, wanted[0]) < 1


@pytest.mark.parametrize(
    ("count", "steps", "overlap"), [(9, 4, 2), (10, 4, 1), (4, 4, 2), (5, 0, 2)]
)
def test_streamed_frames_equal_the_pieces_of_validation(
    count: int, steps: int, overlap: int
) -> None:
    """The mean of the overlapping pieces, whatever the length, with few frames in memory."""
    model, clip = network(), torch.rand(1, count, 3, 12, 16)
    read = most = 0

    def frames() -> Iterator[torch.Tensor]:
        nonlocal read
        for frame in clip.unbind(1):
            read += 1
            yield frame

    found = []
    options = {"scale": 1, "steps": steps, "overlap": overlap, "side": 0}
    for number, frame in enumerate(inference.streamed(model, frames(), **options)):
        most = max(most, read - number)
        found.append(frame)
    sums, times = torch.zeros_like(clip), torch.zeros(count, 1, 1, 1)
    size = steps or count
    with torch.no_grad():
        for first in inference.starts(count, size, max(1, size - overlap)):
            sums[:, first : first + size] += model(clip[:, first : first + size])
            times[first : first + size] += 1
    torch.testing.assert_close(torch.stack(found, 1), sums / times)
    assert not steps or most <= 2 * steps
    torch.testing.assert_close(inference.restored(model, clip, **options), torch.stack(found, 1))


def test_tiles_equal_whole_frames_where_they_overlap_by_the_reach() -> None:
    model, clip = network(), torch.rand(1, 3, 3, 40, 90)
    reach = model.reach(3)
    shared = 2 * reach
    assert reach == 1 + 2 + 3 * 2 * 3 + 2
    options: dict[str, Any] = {"scale": 1, "steps": 0, "overlap": 0}
    with torch.no_grad():
        found = inference.streamed(model, clip.unbind(1), side=64, shared=shared, **options)
        torch.testing.assert_close(torch.stack(list(found), 1), model(clip), atol=1e-5, rtol=1e-5)
        # and nothing further away matters
        other = clip.clone()
        other[..., 0] = 0
        changed = (model(other) - model(clip)).abs().amax((0, 1, 2, 3))
    assert changed[reach - 5] > 0 and float(changed[reach + 1 :].max()) == 0


def test_tiles_are_as_large_as_the_memory_allows(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from training.tasks.video_restoration import trained as video_trained

    (weights,) = [w for w in [restore.weights_argument.one([run], args.Args(), [])] if w]
    model = tasks.trained.load(tasks.spec_of(weights.plan), weights)
    assert isinstance(model, video_trained.VideoModel)
    assert model.pieces((1920, 1080), None, None, None).window == video_trained.WINDOW
    monkeypatch.setattr(video_trained.cgroups, "available_memory", lambda: 1 << 30)
    small = model.pieces((1920, 1080), 100, None, None)
    needs = model.network.step_bytes(small.window) * small.tile**2
    assert 0.3 * (1 << 30) < needs <= video_trained.MEMORY * (1 << 30)
    assert model.pieces((1920, 1080), 100, None, 128).tile == 128
    assert model.pieces((64, 64), 100, None, 128).tile == 0


def test_all_problems_at_once(run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, out = film(tmp_path / "in.mp4"), tmp_path / "out.mp4"
    monkeypatch.setattr(weights_argument, "WORK", tmp_path)
    assert codes() == ["run.none", "input.missing", "flag.no_value"]
    assert codes("nothing", tmp_path / "none.mp4", "--out=/nowhere/a.mp4", "--devise=cpu") == [
        "flag.unknown", "run.missing", "input.missing", "output.no_folder"
    ]  # fmt: skip
    text = tmp_path / "notes.txt"
    text.write_text("no video")
    folder = pictures(tmp_path / "folder", 2)
    out.write_bytes(b"old")
    wrong = {
        ("input.unreadable",): (text, "--out=new.mp4"),
        ("input.no_frames",): (tmp_path, f"--out={tmp_path.parent / 'new'}"),
        ("output.suffix",): (given, "--out=a.png"),
        ("flag.value",): (given, "--out=a.mp4", "--frames=9:3"),
        ("flag.value", "output.exists"): (given, f"--out={out}", "--frames=12:"),
        ("output.exists",): (given, f"--out={given}", "--overwrite"),
        ("output.exists", "flag.contradiction"): (folder, f"--out={folder}/new", "--fps=30"),
        ("output.not_empty",): (given, f"--out={folder}"),
    }
    for expected, (path, *flags) in wrong.items():
        assert codes(run, path, *flags) == list(expected), expected
    (folder / "notes.txt").write_text("kept")
    assert codes(run, given, f"--out={folder}", "--overwrite") == ["output.not_empty"]
    language = made(tmp_path / "language", gpt(1))
    spikes = trained(tmp_path / "spikes", dataroot_spike="/gone")
    for other in (language, spikes):
        assert codes(other.path, given, "--out=new.mp4") == ["task.unsupported"]


def test_without_pyav_and_without_torch(run: str, tmp_path: Path) -> None:
    """The problems come before torch is imported."""
    program = (
        "import sys\n"
        "from training.cli import restore\n"
        "from training.core.errors import UserError\n"
        "from training.host import packages\n"
        "found = packages.found\n"
        "packages.found = lambda module: module != 'av' and found(module)\n"
        "try:\n    restore.parse(sys.argv[1:])\n"
        "except UserError as error:\n"
        "    print(*(p.code for p in error.problems), 'torch' in sys.modules)\n"
    )
    words = [run, str(film(tmp_path / "in.mp4")), f"--out={tmp_path}/out"]
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["package.missing", "False"]


def test_damage_names_the_frame_and_leaves_nothing(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = film(tmp_path / "in.mp4", 40, gop_size=1)
    with av.open(str(given)) as container:
        damaged = [p for p in container.demux(video=0) if p.size][25]
        assert damaged.pos is not None
        start = damaged.pos
    data = bytearray(given.read_bytes())
    data[start : start + damaged.size] = b"\xff" * damaged.size
    given.write_bytes(bytes(data))
    assert restore.main([run, str(given), f"--out={tmp_path}/out.mp4", "--device=cpu"]) == 2
    assert "frame 25" in capsys.readouterr().err
    folder = pictures(tmp_path / "folder", 30)
    damaged_picture = folder / "im27.png"
    damaged_picture.write_bytes(damaged_picture.read_bytes()[:200])  # its header is intact
    assert restore.main([run, str(folder), f"--out={tmp_path}/out", "--device=cpu"]) == 2
    assert "im27.png" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "in.mp4"]


@pytest.mark.parametrize("out", ["out.mp4", "out"])
def test_a_full_disk_leaves_the_old_output(run: str, tmp_path: Path, out: str) -> None:
    given = pictures(tmp_path / "in", 8, 256, 192)
    old = tmp_path / out
    if old.suffix:
        old.write_bytes(b"old")
    before = sorted(p.name for p in tmp_path.iterdir())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # in place of a full disk
    try:
        words = [run, str(given), f"--out={old}", "--device=cpu", "--overwrite", "--window=2"]
        assert restore.main(words) == 3
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    assert not old.suffix or old.read_bytes() == b"old"


def test_overwriting_replaces_only_pictures(run: str, tmp_path: Path) -> None:
    given, out = pictures(tmp_path / "in", 2), pictures(tmp_path / "out", 5)
    restored(run, given, out, "--overwrite")
    assert sorted(p.name for p in out.iterdir()) == ["im0.png", "im1.png"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)]
)
def test_a_stop_leaves_nothing_half_written(
    run: str, tmp_path: Path, number: signal.Signals
) -> None:
    given = film(tmp_path / "in.mp4", 300)
    words = [sys.executable, "-m", "training.cli", "restore", run, str(given)]
    process = subprocess.Popen(
        [*words, f"--out={tmp_path}/out.mp4", "--device=cpu", "--window=4"],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 240
        while not list(tmp_path.glob(".out.mp4.writing-*")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(process.pid, number)
        assert process.wait(60) == (130 if number == signal.SIGINT else 128 + number)
    finally:
        process.kill()
        process.wait()
    assert [p.name for p in tmp_path.iterdir()] == ["in.mp4"]


def test_what_a_killed_process_has_left_is_removed_by_the_next_one(
    run: str, tmp_path: Path
) -> None:
    given = film(tmp_path / "in.mp4", 300)
    words = [sys.executable, "-m", "training.cli", "restore", run, str(given)]
    process = subprocess.Popen(
        [*words, f"--out={tmp_path}/out.mp4", "--device=cpu", "--window=4"],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )

    def left() -> list[Path]:
        return list(tmp_path.glob(".out.mp4.writing-*"))

    try:
        deadline = time.monotonic() + 240
        while not list(tmp_path.glob(".out.mp4.writing-*/out.mp4")):  # locked by then
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGSTOP)
        restored(run, given, tmp_path / "out.mp4", "--frames=0:2")
        assert len(left()) == 1, "the other process still writes"
    finally:
        process.kill()
        process.wait()
    assert len(left()) == 1
    restored(run, given, tmp_path / "out.mp4", "--frames=0:2", "--overwrite")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.mp4", "out.mp4"]


@pytest.mark.parametrize("sound", ["", "aac"])
def test_an_incomplete_video_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sound: str
) -> None:
    given = film(tmp_path / "in.mkv", 240, sound=sound)
    assert len(list(pyav.decoded(given))) == 240 and capsys.readouterr().err == ""
    data = given.read_bytes()
    given.write_bytes(data[: len(data) // 2])
    assert 0 < len(list(pyav.decoded(given))) < 240
    assert "the file is incomplete" in capsys.readouterr().err


def test_a_source_counts_its_frames(tmp_path: Path) -> None:
    problems: list[Any] = []
    found = source.find(film(tmp_path / "in.mkv"), "", "", problems)  # states no number of frames
    assert found and problems == [] and found.count in (12, 13) and found.rate is not None
    part = source.chosen(found, "3:7", problems)
    names = [frame.name for frame, _ in part.frames()]
    assert names == ["00000003", "00000004", "00000005", "00000006"] and part.total == 4
