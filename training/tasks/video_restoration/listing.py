"""Lists the clips: folders of paired frames, with optional spike files. Only names are read; no
picture is opened.

KAIR: dataroot_gt/CLIP/FRAME.png and dataroot_lq/CLIP/FRAME.png. GoPro:
dataroot_gt/CLIP/sharp/FRAME.png and CLIP/blur/FRAME.png. Spikes: dataroot_spike/CLIP/FRAME.dat
(.npy, .png) or CLIP/spike/FRAME.dat.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.core.errors import Problem
from training.core.messages import msg
from training.core.project import ROOT

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")
SPIKES = (".dat", ".npy", ".png")
PARTS = {"train": "", "val": "test_"}  # part → prefix of its options
# a folder in CLIP that may contain the frames
INNER = {"gt": "sharp", "lq": "blur", "spike": "spike"}
# The full path, as it is right from any directory and in the installed package.
MAKE = shlex.join([sys.executable, str(ROOT / "examples/make_blur_video.py")])
LAYOUT = msg("tasks.video.clips.layout")
Frames = dict[str, str]  # a frame's name without suffix → its file, in order


@dataclass(frozen=True)
class Clip:
    """One clip: files of the same frames, in order. `spike` is empty without a spike channel."""

    name: str
    gt: tuple[str, ...]
    lq: tuple[str, ...]
    spike: tuple[str, ...]


class Scan:
    """The clips of a part ("train" or "val"), and the problems of its folders."""

    def __init__(self, options: Any, part: str, origins: Mapping[str, str] | None = None) -> None:
        self.options, self.prefix, self.origins = options, PARTS[part], origins or {}
        self.clips: list[Clip] = []
        self.problems: list[Problem] = []
        gt, lq, spike = (
            getattr(options, self.prefix + name)
            for name in ("dataroot_gt", "dataroot_lq", "dataroot_spike")
        )
        if not gt:
            self._nothing(part, lq, spike)
            return
        roots = {"gt": gt, "lq": lq or gt} | ({"spike": spike} if spike else {})
        for kind, root in roots.items():
            if kind != "lq" or lq:
                self.problems += missing(
                    self.shown(f"dataroot_{kind}"), self.prefix + f"dataroot_{kind}", root
                )
        if not self.problems:
            self._pairs({kind: expanded(root) for kind, root in roots.items()}, part)

    def shown(self, name: str) -> str:
        """An option with its value and origin."""
        return shown(self.options, self.prefix + name, self.origins)

    def _nothing(self, part: str, lq: str, spike: str) -> None:
        if part == "train":
            fixes = [MAKE, "--dataroot_gt=data/blur_video/train"]
            self.problems.append(
                Problem(
                    "video.no_data",
                    msg("tasks.video.clips.nothing", given=self.shown("dataroot_gt")),
                    LAYOUT,
                    fixes,
                )
            )
        elif lq or spike:
            name = "dataroot_lq" if lq else "dataroot_spike"
            what = msg("tasks.video.clips.gt_empty", given=self.shown(name), prefix=self.prefix)
            self.problems.append(
                Problem(
                    "video.no_data",
                    what,
                    msg("tasks.video.clips.both_or_neither"),
                    [f"--{self.prefix}dataroot_gt=FOLDER"],
                )
            )

    def _pairs(self, roots: dict[str, Path], part: str) -> None:
        wanted = self._listed() if part == "train" and self.options.meta_info_file else None
        if self.problems:
            return
        names = sorted(wanted, key=_natural) if wanted else _folders(roots["gt"])
        alone: dict[str, list[str]] = {"gt": [], "lq": [], "spike": []}
        uneven: dict[str, list[str]] = {"lq": [], "spike": []}
        for name in names:
            found = {kind: _frames(root / name, kind) for kind, root in roots.items()}
            if not found["gt"]:
                alone["gt"] += [name] if wanted else []  # not a clip folder
                continue
            if found["lq"] == found["gt"]:  # same root, no folder of blurred frames in the clip
                found["lq"] = {}
            if wanted and wanted[name] is not None:
                count, first = wanted[name] or (0, 0)
                found["gt"] = {
                    stem: file
                    for stem, file in found["gt"].items()
                    if first <= _number(stem) < first + count
                }
                if len(found["gt"]) != count:
                    uneven.setdefault("meta", []).append(
                        msg(
                            "tasks.video.clips.listed",
                            name=name,
                            count=count,
                            first=first,
                            found=len(found["gt"]),
                        )
                    )
                    continue
                found["lq"] = {
                    stem: file for stem, file in found["lq"].items() if stem in found["gt"]
                }
            for kind in set(found) - {"gt"}:
                # A spike camera may record more planes than there are pictures.
                absent = found["gt"].keys() - found[kind].keys() or (
                    found[kind].keys() - found["gt"].keys() if kind == "lq" else set()
                )
                if not found[kind]:
                    alone[kind].append(name)
                elif absent:
                    uneven[kind].append(
                        msg(
                            "tasks.video.clips.uneven",
                            name=name,
                            wanted=len(found["gt"]),
                            found=len(found[kind]),
                            absent=min(absent),
                        )
                    )
            spikes = (
                tuple(found["spike"].get(stem, "") for stem in found["gt"])
                if "spike" in found
                else ()
            )
            self.clips.append(
                Clip(
                    name,
                    tuple(found["gt"].values()),
                    tuple(found["lq"].get(s, "") for s in found["gt"]),
                    spikes,
                )
            )
        self._report(roots, alone, uneven)

    def _report(
        self, roots: dict[str, Path], alone: dict[str, list[str]], uneven: dict[str, list[str]]
    ) -> None:
        """Report what is wrong with the pairs; the clips are then unusable."""
        lq = "dataroot_lq" if getattr(self.options, self.prefix + "dataroot_lq") else "dataroot_gt"
        where = {"lq": lq, "spike": "dataroot_spike"}
        if alone["gt"]:
            what = msg(
                "tasks.video.clips.not_there",
                given=shown(self.options, "meta_info_file", self.origins),
                root=roots["gt"],
                names=some(alone["gt"]),
            )
            self.problems.append(
                Problem(
                    "video.no_clips",
                    what,
                    msg("tasks.video.clips.clips_wanted"),
                    self._near(roots["gt"], alone["gt"][0]),
                )
            )
        elif not self.clips and not uneven.get("meta"):
            self.problems.append(
                Problem(
                    "video.no_clips",
                    msg("tasks.video.clips.no_clips", given=self.shown("dataroot_gt")),
                    LAYOUT,
                    self._inside(roots["gt"]),
                )
            )
        if uneven.get("meta"):
            what = msg(
                "tasks.video.clips.meta_mismatch",
                given=shown(self.options, "meta_info_file", self.origins),
                names=some(uneven["meta"]),
            )
            self.problems.append(
                Problem(
                    "video.no_clips",
                    what,
                    msg("tasks.video.clips.line_wanted"),
                    ["--meta_info_file="],
                )
            )
        for kind, option in where.items():
            if alone[kind]:
                fixes = [f"--{self.prefix}dataroot_{kind}=FOLDER"]
                what = (
                    msg(
                        "tasks.video.clips.no_blurred",
                        given=self.shown(option),
                        names=some(alone[kind]),
                    )
                    if kind == "lq"
                    else msg(
                        "tasks.video.clips.no_spikes",
                        given=self.shown(option),
                        names=some(alone[kind]),
                    )
                )
                self.problems.append(
                    Problem(
                        "video.no_clips",
                        what,
                        msg("tasks.video.clips.folder_wanted", inner=INNER[kind]),
                        fixes,
                    )
                )
            if uneven[kind]:
                what = msg(
                    "tasks.video.clips.different",
                    given=self.shown(option),
                    prefix=self.prefix,
                    names=some(uneven[kind]),
                )
                self.problems.append(
                    Problem("video.no_clips", what, msg("tasks.video.clips.same_name"))
                )
        if self.problems:
            self.clips = []

    def _inside(self, root: Path) -> list[str]:
        """Subfolders with clips: the user may have given GOPRO_Large instead of its train
        folder."""
        inner = [root / name for name in _folders(root)]
        return [
            f"--{self.prefix}dataroot_gt={shlex.quote(str(f))}"
            for f in inner
            if any(_frames(f / n, "gt") for n in _folders(f)[:3])
        ][:2]

    def _near(self, root: Path, name: str) -> list[str]:
        near = difflib.get_close_matches(name, _folders(root), n=1)
        return (
            [msg("tasks.video.clips.near", near=near[0], name=name)]
            if near
            else ["--meta_info_file="]
        )

    def _listed(self) -> dict[str, tuple[int, int] | None]:
        """The clips of meta_info_file: name → (frames, number of the first), or None if the line
        has only a name."""
        file, given = (
            expanded(self.options.meta_info_file),
            shown(self.options, "meta_info_file", self.origins),
        )
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            what = (
                error.strerror if isinstance(error, OSError) else msg("tasks.video.clips.not_text")
            )
            self.problems.append(
                Problem(
                    "video.list_unreadable",
                    msg("tasks.video.clips.unreadable", given=given, what=what),
                    msg("tasks.video.clips.list_wanted"),
                    ["--meta_info_file="],
                )
            )
            return {}
        found: dict[str, tuple[int, int] | None] = {}
        for number, line in enumerate(lines, 1):
            words = line.split()
            if not words:
                continue
            counts = (
                [words[1], words[3]]
                if len(words) == 4
                else [words[1], "0"]
                if len(words) > 1
                else []
            )
            if (
                len(words) > 4
                or not all(w.isascii() and w.isdecimal() for w in counts)
                or words[0].startswith(("/", ".."))
            ):
                allowed = msg("tasks.video.clips.line_wanted")
                self.problems.append(
                    Problem(
                        "video.list_line",
                        msg("tasks.video.clips.line", given=given, number=number, line=line[:80]),
                        allowed,
                    )
                )
                return {}
            found[words[0]] = (int(counts[0]), int(counts[1])) if len(words) == 4 else None
        if not found:
            self.problems.append(
                Problem(
                    "video.list_empty",
                    msg("tasks.video.clips.list_empty", given=given),
                    msg("tasks.video.clips.list_wanted"),
                    ["--meta_info_file="],
                )
            )
        return found


def expanded(root: str) -> Path:
    return Path(os.path.expanduser(root))  # noqa: PTH111 – Path.expanduser raises for an unknown user


def shown(options: Any, name: str, origins: Mapping[str, str]) -> str:
    """An option with its value and origin."""
    value, origin = getattr(options, name), origins.get(name, "")
    return (
        msg("tasks.video.clips.given_by", name=name, value=value, origin=origin)
        if origin
        else msg("tasks.video.clips.given", name=name, value=value)
    )


def some(names: list[str], limit: int = 3) -> str:
    rest, first = len(names) - limit, ", ".join(names[:limit])
    return msg("tasks.video.clips.more", first=first, rest=rest) if rest > 0 else first


def missing(given: str, option: str, root: str) -> list[Problem]:
    """Problems of a root that is not a folder of frames."""
    path = expanded(root)
    if path.suffix == ".lmdb":
        there = (
            [f"--{option}={shlex.quote(str(path.with_suffix('')))}"]
            if path.with_suffix("").is_dir()
            else []
        )
        return [
            Problem(
                "video.lmdb",
                msg("tasks.video.clips.lmdb", given=given),
                msg("tasks.video.clips.folders", layout=LAYOUT),
                there or [f"--{option}=FOLDER"],
            )
        ]
    if path.is_dir():
        try:
            with os.scandir(path):
                return []
        except OSError as error:
            return [
                Problem(
                    "video.folder_missing",
                    f"{given}: {error.strerror}",
                    msg("tasks.video.clips.readable"),
                    [f"chmod u+rx {shlex.quote(str(path))}"],
                )
            ]
    if os.path.exists(path):
        return [Problem("video.folder_missing", msg("tasks.video.clips.file", given=given), LAYOUT)]
    return [
        Problem(
            "video.folder_missing",
            msg("tasks.video.clips.missing", given=given),
            LAYOUT,
            _nearest(option, path),
        )
    ]


def _nearest(option: str, path: Path) -> list[str]:
    """Folders with a similar path: one name along the path may be misspelled."""
    fixes = [MAKE] if "blur_video" in path.parts else []
    parent = path.absolute()
    while not parent.parent.is_dir():
        parent = parent.parent
    near = difflib.get_close_matches(parent.name, _folders(parent.parent), n=1, cutoff=0.6)
    if near:
        found = parent.parent / near[0] / path.absolute().relative_to(parent)
        if found.is_dir():
            shown = str(found) if path.is_absolute() else os.path.relpath(found)
            return [f"--{option}={shlex.quote(shown)}", *fixes]
    return fixes


def _folders(root: Path) -> list[str]:
    try:
        with os.scandir(root) as entries:
            return sorted(
                (e.name for e in entries if not e.name.startswith(".") and e.is_dir()), key=_natural
            )
    except OSError:  # missing or unreadable: treated as empty, which is reported
        return []


def _frames(clip: Path, kind: str) -> Frames:
    """The frames in a clip's folder or, if it exists, in its inner folder."""
    suffixes = SPIKES if kind == "spike" else PICTURES
    for folder in (clip / INNER[kind], clip):
        try:
            with os.scandir(folder) as entries:
                names = [e.name for e in entries if not e.name.startswith(".")]
        except OSError:  # not a folder
            continue
        parts = (name.rpartition(".") for name in names)
        found = {
            stem: f"{folder}/{stem}.{suffix}"
            for stem, _, suffix in parts
            if f".{suffix.lower()}" in suffixes
        }
        if found:
            return {stem: found[stem] for stem in _sorted(found)}
    return {}


def _sorted(stems: Iterable[str]) -> list[str]:
    """Sort by name; by number if names are numbers of different lengths."""
    plain = sorted(stems)
    return plain if len({len(stem) for stem in plain}) == 1 else sorted(plain, key=_natural)


def _natural(name: str) -> list[tuple[int, str]]:
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]


def _number(stem: str) -> int:
    """Number of a frame: the last number in its name; -1 if there is none."""
    digits = re.findall(r"\d+", stem)
    return int(digits[-1]) if digits else -1
