"""Where frames are written: a video file, a folder of PNG pictures or one PNG. Each appears
complete or not at all."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any

from training.core import umask
from training.core.errors import Problem
from training.core.messages import msg
from training.core.work_folder import WorkFolder, sync
from training.data.frames import pyav
from training.data.frames.source import FILM, FOLDER, PICTURE, Frame, Source
from training.host import packages

PNG = ".png"
FASTER = 1  # zlib's level: a third of the time of Pillow's default, files 10 % larger


@dataclass(frozen=True)
class Target:
    """Checked output. `kind`: as of a Source; `rate`: of a video, None: the input's."""

    path: Path
    kind: str
    rate: Fraction | None = None


def find(
    path: Path, source: Source | None, overwrite: bool, rate: float | None, problems: list[Problem]
) -> Target:
    """The target at this path; problems are added."""
    suffix = path.suffix.lower()
    kind = FILM if suffix in pyav.CODECS else PICTURE if suffix == PNG else FOLDER
    allowed = msg("data.frames.target_wanted")
    # os.path: Path.is_dir and Path.exists raise for a place that may not be examined
    if suffix and kind == FOLDER and not os.path.isdir(path):
        usual = PNG if source and source.total == 1 else ".mp4"
        fixes = [f"--out={shlex.quote(str(path.with_suffix(usual)))}"]
        what = msg("data.frames.suffix", path=path, suffix=path.suffix)
        problems.append(Problem("output.suffix", what, allowed, fixes, "out"))
    elif source and kind == PICTURE and source.total != 1:
        fixes = [f"--out={shlex.quote(str(path.with_suffix('')))}"]
        what = msg("data.frames.one_picture", path=path)
        problems.append(Problem("output.suffix", what, allowed, fixes, "out"))
    elif not os.path.isdir(path.parent):
        fixes = [f"mkdir -p {shlex.quote(str(path.parent))}"]
        what = msg("data.frames.missing", path=path.parent)
        problems.append(Problem("output.no_folder", what, allowed, fixes, "out"))
    elif source and _inside(path, source):
        what = msg("data.frames.inside", path=path, source=source.path)
        problems.append(Problem("output.exists", what, allowed, field="out"))
    elif os.path.lexists(path):
        problems += _existing(path, kind, overwrite, allowed)
    if kind == FILM and not packages.found("av") and not (source and source.kind == FILM):
        what = msg("data.frames.needs_package", path=path, package="av")
        problems.append(Problem("package.missing", what, "", packages.add(["av"])))
    if rate and (kind != FILM or (source and source.kind == FILM)):
        what = msg("data.frames.fps", rate=f"{rate:g}")
        problems.append(Problem("flag.contradiction", what, msg("data.frames.fps_wanted")))
    return Target(path, kind, Fraction(rate).limit_denominator(1001) if rate else None)


def _inside(path: Path, source: Source) -> bool:
    """Whether the output would replace the input or be in the input folder."""
    out, given = path.resolve(), source.path.resolve()
    return out == given or given in out.parents or out in given.parents


def _existing(path: Path, kind: str, overwrite: bool, allowed: str) -> list[Problem]:
    replace = ["--overwrite"]
    if kind != FOLDER:
        if os.path.isdir(path):
            what = msg("data.frames.is_folder", path=path)
            return [Problem("output.is_folder", what, allowed, field="out")]
        what = msg("data.frames.exists", path=path)
        return [] if overwrite else [Problem("output.exists", what, allowed, replace, "out")]
    if not os.path.isdir(path):
        what = msg("data.frames.no_folder", path=path)
        return [Problem("output.exists", what, allowed, field="out")]
    try:
        names = os.listdir(path)
    except OSError as error:
        what = msg("cli.report.unwritable", out=path, error=error.strerror)
        return [Problem("output.unwritable", what, allowed, field="out")]
    others = [n for n in names if not n.lower().endswith(PNG) or os.path.isdir(path / n)]
    if others:  # never deleted, whatever the flags
        what = msg("data.frames.other_files", path=path, name=min(others))
        return [Problem("output.not_empty", what, allowed, field="out")]
    what = msg("data.frames.not_empty", path=path)
    return (
        [Problem("output.not_empty", what, allowed, replace, "out")]
        if names and not overwrite
        else []
    )


class Writer:
    """Context manager: the output is complete after it, unchanged after an exception. Raises
    OSError. `size`: of the frames written."""

    def __init__(self, target: Target, source: Source, size: tuple[int, int]) -> None:
        self.target, self.source, self.size = target, source, size
        self.written = 0
        self.encoder: pyav.Encoder | None = None
        self.sound = False

    def __enter__(self) -> Writer:
        out = self.target.path
        self._folder = WorkFolder(out)
        try:
            self.work = self._folder.path
            self.result = self.work if self.target.kind == FOLDER else self.work / out.name
            if self.target.kind == FILM:
                self._encode()
        except BaseException:
            self._folder.remove()
            raise
        return self

    def _encode(self) -> None:
        source, facts = self.source, self.source.facts
        rate = self.target.rate or source.rate or pyav.RATE
        self.sound = bool(facts and facts.audio and source.whole)
        sound = source.path if self.sound else None
        suffix = self.target.path.suffix.lower()
        self.encoder = pyav.Encoder(self.result, suffix, self.size, rate, facts, sound)

    def frame(self, frame: Frame, pixels: Any) -> None:
        """Write the restored pixels, uint8 (h, w, 3), of a frame of the source."""
        self.written += 1
        if self.encoder:
            self.encoder.frame(pixels, frame.time)
            return
        from PIL import Image

        picture = Image.fromarray(pixels)
        file = self.result / f"{frame.name}{PNG}" if self.target.kind == FOLDER else self.result
        picture.save(file, compress_level=FASTER)

    def packet(self, packet: Any) -> None:
        """Copy a packet of the source's sound."""
        if self.encoder:
            self.encoder.sound(packet)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self.encoder:
                self.encoder.abandon() if error else self.encoder.finish()
            if error is None:
                self._publish()
        finally:
            self._folder.remove()

    def _publish(self) -> None:
        out = self.target.path
        for file in sorted(self.work.iterdir()):
            umask.use(file)
            sync(file)
        if self.target.kind != FOLDER:
            os.replace(self.result, out)
        else:
            umask.use(self.work)
            sync(self.work)
            self._replace(out)
        sync(out.parent)

    def _replace(self, out: Path) -> None:
        """Rename the finished folder; an old one of PNG files (checked by find()) makes way and
        returns if that fails."""
        old = None
        try:
            if out.is_dir() and any(out.iterdir()):
                old = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.old-"))
                out.rename(old)
            self.work.rename(out)
        finally:
            if old and not out.exists():
                old.rename(out)
            elif old:
                shutil.rmtree(old, ignore_errors=True)
