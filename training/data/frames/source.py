"""What frames are read from: a video file, a folder of pictures or one picture."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.core.errors import Problem
from training.core.messages import msg
from training.data.frames import pictures, pyav
from training.data.frames.pictures import Unreadable
from training.host import packages

if TYPE_CHECKING:
    from training.data.frames.pictures import Planes

FILM, FOLDER, PICTURE = "video", "folder", "picture"  # kinds of sources and targets


@dataclass(frozen=True)
class Frame:
    """`name`: without suffix; `time`: s since the start of the video, or since the first frame of
    a chosen part; None outside of a video."""

    name: str
    time: Fraction | None = None


@dataclass(frozen=True)
class Source:
    """Checked input. `size`: width, height; `count`: frames, None if the file does not state it;
    `rate`: frames per second of a video; `first`, `last`: the chosen frames, without `last`."""

    path: Path
    kind: str
    size: tuple[int, int]
    count: int | None
    rate: Fraction | None = None
    files: tuple[str, ...] = ()
    first: int = 0
    last: int | None = None
    facts: pyav.Facts | None = None

    @property
    def total(self) -> int | None:
        """Chosen frames."""
        end = self.count if self.last is None else min(self.last, self.count or self.last)
        return None if end is None else max(0, end - self.first)

    @property
    def whole(self) -> bool:
        return self.first == 0 and self.last is None

    def frames(self, audio: Callable[[Any], None] | None = None) -> Iterator[tuple[Frame, Planes]]:
        """The chosen frames in order, pixels uint8 (h, w, 3). `audio`: called with each packet of
        the sound. Raises Unreadable."""
        if self.kind == FILM:
            yield from self._decoded(audio)
            return
        for file in self.files[self.first : self.last]:
            found = pictures.pixels(file, upright=True)
            if (found.shape[1], found.shape[0]) != self.size:
                raise Unreadable(msg("data.frames.other_size", file=file, first=self.files[0]))
            yield Frame(Path(file).stem), found

    def _decoded(self, audio: Callable[[Any], None] | None) -> Iterator[tuple[Frame, Planes]]:
        number, begin = -1, Fraction(0)
        for number, (pixels, time) in enumerate(pyav.decoded(self.path, audio)):
            if self.last is not None and number >= self.last:
                return
            if number < self.first:
                continue
            if number == self.first and not self.whole:
                begin = time
            if (found := (pixels.shape[1], pixels.shape[0])) != self.size:
                what = msg(
                    "data.frames.resized",
                    path=self.path,
                    number=number,
                    size=sized(found),
                    first=sized(self.size),
                )
                raise Unreadable(what)
            yield Frame(f"{number:08d}", time - begin), pixels
        if number < self.first:
            raise Unreadable(_outside(self, f"{self.first}:{self.last or ''}", str(number + 1)))


def find(path: Path, command: str, rest: str, problems: list[Problem]) -> Source | None:
    """The source at this path; None with a problem. `command`, `rest`: around the path."""
    allowed = msg("data.frames.source_wanted")

    if not os.path.exists(path):
        what = msg("data.frames.missing", path=path)
        problems.append(Problem("input.missing", what, allowed))
        return None
    is_video = path.is_file() and path.suffix.lower() not in pictures.SUFFIXES
    package, module = ("av", "av") if is_video else ("pillow", "PIL")
    if not packages.found(module):
        what = msg("data.frames.needs_package", path=path, package=package)
        fixes = packages.add([package]) if is_video else [packages.install([package])]
        problems.append(Problem("package.missing", what, "", fixes))
        return None
    try:
        if path.is_dir():
            files = tuple(pictures.in_folder(path).values())
            if not files:
                fixes = [f"{command} {shlex.quote(str(p))} {rest}" for p in _inside(path)]
                what = msg("data.frames.empty", path=path)
                problems.append(Problem("input.no_frames", what, allowed, fixes))
                return None
            size = pictures.size(files[0], upright=True)
            return Source(path, FOLDER, size, len(files), files=files)
        if not is_video:
            size = pictures.size(str(path), upright=True)
            return Source(path, PICTURE, size, 1, files=(str(path),))
        facts = pyav.facts(path)
        return Source(path, FILM, facts.size, facts.count, facts.rate, facts=facts)
    except (Unreadable, OSError) as error:
        problems.append(Problem("input.unreadable", str(error), allowed))
        return None


def _inside(folder: Path, most: int = 2) -> list[Path]:
    """Folders of pictures at the next two levels."""
    levels = (sorted(folder.glob("*/")), sorted(folder.glob("*/*/")))
    inner = (p for level in levels for p in level if p.is_dir() and pictures.any_in_folder(p))
    return list(islice(inner, most))


def chosen(source: Source, text: str, problems: list[Problem]) -> Source:
    """`source` with the frames A:B of `text`, without B; both are optional."""
    begin, colon, end = text.partition(":")
    words = [begin or "0", *([end] if end else [])]
    if not colon or not all(w.isascii() and w.isdecimal() and len(w) < 10 for w in words):
        problems.append(
            Problem(
                "flag.value",
                msg("data.frames.range", text=text),
                msg("data.frames.range_wanted"),
                ["--frames=0:100"],
                "frames",
            )
        )
        return source
    found = replace(source, first=int(words[0]), last=int(end) if end else None)
    if found.total == 0 or (found.last is not None and found.last <= found.first):
        count = msg("data.frames.unknown_count") if source.count is None else str(source.count)
        problems.append(
            Problem(
                "flag.value",
                _outside(source, text, count),
                msg("data.frames.range_wanted"),
                [f"--frames=0:{source.count or 100}"],
                "frames",
            )
        )
    return found


def _outside(source: Source, range_: str, count: str) -> str:
    return msg("data.frames.outside", text=range_, path=source.path, count=count)


def uneven(source: Source) -> list[Problem]:
    """Problems of the chosen pictures, by their headers: otherwise they would stop a restoration
    after hours."""
    others = []
    for file in source.files[source.first : source.last]:
        try:
            size = pictures.size(file, upright=True)
        except (Unreadable, OSError) as error:
            return [Problem("input.unreadable", str(error))]
        if size != source.size:
            others.append(f"{Path(file).name} ({sized(size)})")
    if not others:
        return []
    what = msg(
        "data.frames.uneven",
        path=source.path,
        count=len(others),
        total=len(source.files[source.first : source.last]),
        first=others[0],
        wanted=f"{Path(source.files[0]).name} ({sized(source.size)})",
    )
    return [Problem("input.sizes", what, msg("data.frames.one_size"))]


def sized(size: tuple[int, int]) -> str:
    return f"{size[0]} × {size[1]}"
