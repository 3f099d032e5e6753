"""./duet restore with files as cameras, phones and other programs write them."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from tests.unit.films import apart, content, film, moving, network, pictures, trained
from tests.unit.video_data import deep_png
from training import tasks
from training.cli import restore
from training.core import args
from training.core.errors import Problem, UserError
from training.data.frames import output, pyav
from training.tasks.video_restoration import trained as video_trained


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(trained(tmp_path_factory.mktemp("restore") / "run").path)


def restored(run: str, given: Path, out: Path, *flags: str) -> int:
    return restore.main([run, str(given), f"--out={out}", "--device=cpu", *flags])


def problems(*argv: object) -> list[Problem]:
    with pytest.raises(UserError) as caught:
        restore.parse([str(word) for word in argv])
    return caught.value.problems


def times(file: Path, kind: str) -> list[float]:
    with av.open(str(file)) as container:
        (stream,) = getattr(container.streams, kind)
        stamps = [(p.pts, p.time_base) for p in container.demux(stream) if p.pts is not None]
    return sorted(float(pts * base) for pts, base in stamps)


def test_times_begin_with_zero_and_the_sound_stays_in_step(run: str, tmp_path: Path) -> None:
    given = film(tmp_path / "in.ts", 12, sound="aac", begin=3000)  # as of a camcorder
    assert times(given, "video")[0] > 2999
    late = times(given, "audio")[0] - times(given, "video")[0]
    assert restored(run, given, tmp_path / "out.mp4") == 0
    video, audio = (times(tmp_path / "out.mp4", kind) for kind in ("video", "audio"))
    assert video[0] < 0.1 and len(video) == 12
    assert audio[0] - video[0] == pytest.approx(late, abs=0.03)
    assert restored(run, given, tmp_path / "part.mp4", "--frames=2:6") == 0
    part = times(tmp_path / "part.mp4", "video")
    assert part[0] == 0 and len(part) == 4


def test_sound_that_a_container_cannot_contain_is_left_out(run: str, tmp_path: Path) -> None:
    raw = film(tmp_path / "raw.mkv", 3, sound="pcm_s16le")  # states "1 channels", not "mono"
    for out, streams in (("out.mp4", 2), ("out.webm", 1)):
        assert restored(run, raw, tmp_path / out) == 0
        with av.open(str(tmp_path / out)) as container:
            assert len(container.streams) == streams
    flac = film(tmp_path / "flac.mkv", 3, sound="flac")  # rejected by the header only
    assert restored(run, flac, tmp_path / "out.mov") == 0
    assert len(content(tmp_path / "out.mov")) == 3


def test_colour_primaries_and_transfer_are_kept(run: str, tmp_path: Path) -> None:
    given = film(tmp_path / "in.mp4", 2, colorspace=9, color_primaries=9, color_trc=16)  # HDR
    assert restored(run, given, tmp_path / "out.mp4") == 0
    found = pyav.facts(tmp_path / "out.mp4")
    assert (found.matrix, found.primaries, found.transfer) == (9, 9, 16)
    assert [pyav.pixel_format((64, 48), replace(found, pixel_format=form)) for form in (
        "yuva444p12le", "yuvj422p", "gray10le"
    )] == ["yuv444p", "yuv422p", "yuv420p"]  # fmt: skip


def test_names_that_ffmpeg_reads_as_addresses_or_patterns(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("12:30 é.mp4", "take %03d.mp4", "data:1.mkv"):
        given = film(Path(name), 3)
        assert restored(run, given, Path(f"out {name}")) == 0
        assert len(content(tmp_path / f"out {name}")) == 3


def test_photos_are_turned_upright(run: str, tmp_path: Path) -> None:
    held = Image.Exif()
    held[0x0112] = 6  # to be turned clockwise by 90 degrees
    photo = tmp_path / "photo.jpg"
    Image.fromarray(moving(0)).save(photo, exif=held, quality=97)
    assert restored(run, photo, tmp_path / "out.png") == 0
    found = np.asarray(Image.open(tmp_path / "out.png"))
    assert found.shape == (64, 48, 3) and apart(found, np.rot90(moving(0), -1)) < 6
    (wrong,) = problems(run, photo, f"--out={tmp_path}/out.jpg")
    assert wrong.code == "output.suffix" and wrong.fixes == [f"--out={tmp_path}/out.png"]


def test_pictures_are_checked_before_the_start(run: str, tmp_path: Path) -> None:
    folder = pictures(tmp_path / "in", 6)
    out = f"--out={tmp_path}/out"
    Image.fromarray(moving(0, 32, 32)).save(folder / "im4.png")
    (uneven,) = problems(run, folder, out)
    assert uneven.code == "input.sizes" and "im4.png (32 × 32)" in uneven.what
    assert restored(run, folder, tmp_path / "out", "--frames=0:4") == 0
    deep = moving(0)[..., 0].astype(np.uint16) * 256
    for save in (Image.fromarray(deep).save, lambda file: deep_png(file, 64, 48)):
        save(folder / "im5.png")  # 16 bits: Pillow would cut them
        (unreadable,) = problems(run, folder, out, "--frames=5:", "--overwrite")
        assert unreadable.code == "input.unreadable" and "im5.png" in unreadable.what
    (folder / "im3.jpg").write_bytes(b"a preview")
    (twice,) = problems(run, folder, out, "--frames=0:3", "--overwrite")
    assert twice.code == "input.unreadable" and "im3.jpg and im3.png" in twice.what
    (folder / "im3.jpg").unlink()
    text = tmp_path / "notes.txt"
    text.write_text("a line of text\n" * 100)  # FFmpeg would draw it
    assert [p.code for p in problems(run, text, f"--out={tmp_path}/new")] == ["input.unreadable"]
    (folder / "new.png").mkdir()  # not a picture
    (folder / "im5.png").write_bytes(b"no picture")
    (unreadable,) = problems(run, folder, out, "--frames=5:", "--overwrite")
    assert unreadable.code == "input.unreadable"


@pytest.mark.parametrize("out", ["out.mp4", "out", "out.png"])
def test_frames_beyond_the_end_write_nothing(run: str, tmp_path: Path, out: str) -> None:
    given = film(tmp_path / "in.h264", 5)  # states no number of frames
    assert restored(run, given, tmp_path / out, "--frames=5:6") == 2
    assert [p.name for p in tmp_path.iterdir()] == ["in.h264"]


def test_a_video_that_changes_its_size_names_the_frame(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = film(tmp_path / "a.h264", 3), film(tmp_path / "b.h264", 3, size=(32, 32))
    given = tmp_path / "in.h264"
    given.write_bytes(b"".join(part.read_bytes() for part in parts))
    assert restored(run, given, tmp_path / "out.mp4") == 2
    wrong = capsys.readouterr().err
    assert "frame 3" in wrong and "32 × 32" in wrong and "64 × 48" in wrong


def test_an_old_folder_returns_if_it_cannot_be_replaced(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, out = pictures(tmp_path / "in", 2), pictures(tmp_path / "out", 3)
    rename = Path.rename

    def fails(self: Path, target: Path) -> Path:
        if ".writing-" in self.name:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(output.Path, "rename", fails)
    assert restored(run, given, out, "--overwrite") == 3
    assert len(list(out.iterdir())) == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


def test_nohup_is_respected(run: str, tmp_path: Path) -> None:
    before = {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGHUP, signal.SIGTERM)}
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        assert restored(run, pictures(tmp_path / "in", 1), tmp_path / "out") == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_IGN, signal.SIG_DFL)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_restored_frames_of_a_window_fit_into_memory(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (weights,) = [w for w in [restore.weights_argument.one([run], args.Args(), [])] if w]
    model: Any = tasks.trained.load(tasks.spec_of(weights.plan), weights)
    monkeypatch.setattr(video_trained.cgroups, "available_memory", lambda: 2 << 30)
    large = model.pieces((3840, 2160), None, None, None)
    results = 2 * large.window * 3840 * 2160 * 3 * 4
    assert 0.2 * (2 << 30) < results <= video_trained.MEMORY * (2 << 30)
    assert large.window > large.shared
    assert model.pieces((640, 480), None, None, None).window == video_trained.WINDOW
    assert model.pieces((3840, 2160), None, 24, None).window == 24  # as asked
    assert network().scale == model.scale == 1


def test_an_output_that_cannot_be_examined(run: str, tmp_path: Path) -> None:
    given = pictures(tmp_path / "in", 2)
    long = tmp_path / ("x" * 300)
    for out in (long / "out", long / "out.mp4"):
        (problem,) = problems(run, given, f"--out={out}")
        assert problem.code == "output.no_folder"
    assert [p.code for p in problems(run, given, f"--out={long}.gif")] == ["output.suffix"]
    found: list[Problem] = []
    output.find(long, None, False, None, found)  # the system rejects it when it is written
    assert found == []
    (problem,) = problems(long, given, f"--out={tmp_path / 'out'}")
    assert problem.code == "run.missing"
