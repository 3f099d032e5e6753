"""Lists the clips: folders of paired frames, with optional spike files. Only names are read; no
picture is opened.

KAIR: dataroot_gt/CLIP/FRAME.png and dataroot_lq/CLIP/FRAME.png. GoPro:
dataroot_gt/CLIP/sharp/FRAME.png and CLIP/blur/FRAME.png. Spikes: dataroot_spike/CLIP/FRAME.dat
(.npy, .png) or CLIP/spike/FRAME.dat. Pictures may be packed as LMDB: dataroot_gt/CLIP/FRAME is
then a key.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.core import heartbeat
from training.core.errors import Problem
from training.core.messages import msg
from training.data.frames import lmdb_folder, pictures
from training.data.frames.pictures import Unreadable
from training.tasks.video_restoration import roots as clip_roots
from training.tasks.video_restoration.roots import INNER, LAYOUT, MAKE, expanded

PARTS = {"train": "", "val": "test_"}  # part → prefix of its options


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
                self.problems += clip_roots.missing(
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
        unreadable: list[str] = []
        try:
            names = (
                sorted(wanted, key=pictures.natural) if wanted else clip_roots.clips(roots["gt"])
            )
        except OSError as error:
            names = []
            unreadable.append(_why(error, roots["gt"]))
        alone: dict[str, list[str]] = {"gt": [], "lq": [], "spike": []}
        uneven: dict[str, list[str]] = {"lq": [], "spike": []}
        same_name: list[str] = []
        for name in names:
            heartbeat.current.again()  # a network file system may take minutes for all
            try:
                found = {kind: clip_roots.frames(root, name, kind) for kind, root in roots.items()}
            except Unreadable as error:
                same_name.append(str(error))
                continue
            except OSError as error:
                unreadable.append(_why(error, name))
                continue
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
                    if first <= number_of(stem) < first + count
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
        if same_name:
            wanted_files = msg("tasks.video.clips.one_file")
            self.problems.append(Problem("video.no_clips", some(same_name), wanted_files))
        if unreadable:
            allowed = msg("tasks.video.clips.readable")
            self.problems.append(Problem("video.clip_unreadable", some(unreadable), allowed))
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
        elif not self.clips and not uneven.get("meta") and not self.problems:
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
        packed = lmdb_folder.is_packed(root)
        inner = [] if packed else [root / name for name in clip_roots.folders(root)]
        return [
            f"--{self.prefix}dataroot_gt={shlex.quote(str(f))}"
            for f in inner
            if any(clip_roots.has_sharp_frames(f, n) for n in clip_roots.folders(f)[:3])
        ][:2]

    def _near(self, root: Path, name: str) -> list[str]:
        near = difflib.get_close_matches(name, clip_roots.clips(root), n=1)
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


def shown(options: Any, name: str, origins: Mapping[str, str]) -> str:
    """An option with its value and origin."""
    value, origin = getattr(options, name), origins.get(name, "")
    return (
        msg("tasks.video.clips.given_by", name=name, value=value, origin=origin)
        if origin
        else msg("tasks.video.clips.given", name=name, value=value)
    )


def _why(error: OSError, place: str | Path) -> str:
    file = error.filename or place
    return msg("data.frames.unreadable", file=file, error=error.strerror or error)


def some(names: list[str], limit: int = 3) -> str:
    rest, first = len(names) - limit, ", ".join(names[:limit])
    return msg("tasks.video.clips.more", first=first, rest=rest) if rest > 0 else first


def number_of(stem: str) -> int:
    """Number of a frame: the last number in its name; -1 if there is none."""
    digits = re.findall(r"\d+", stem)
    return int(digits[-1]) if digits else -1
