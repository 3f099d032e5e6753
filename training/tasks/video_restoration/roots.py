"""The roots of the clips: folders, or LMDB databases. Only names are read; no picture is opened."""

from __future__ import annotations

import difflib
import errno
import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

from training.core import find_run
from training.core.errors import Problem
from training.core.messages import msg
from training.core.project import ROOT
from training.data.frames import lmdb_folder, pictures

SPIKES = (".dat", ".npy", ".png")
# a folder in CLIP that may contain the frames
INNER = {"gt": "sharp", "lq": "blur", "spike": "spike"}
# The full path, as it is right from any directory and in the installed package.
MAKE = shlex.join([sys.executable, str(ROOT / "examples/make_blur_video.py")])
LAYOUT = msg("tasks.video.clips.layout")
# Folders of the file system itself, readable by root only.
SYSTEM = ("lost+found", "System Volume Information")
Frames = dict[str, str]  # a frame's name without suffix → its file or address, in order


def expanded(root: str) -> Path:
    return Path(os.path.expanduser(root))  # noqa: PTH111 – Path.expanduser raises for an unknown user


def clips(root: Path) -> list[str]:
    """Names of the clips, in order. Raises OSError."""
    if lmdb_folder.is_packed(root):
        return sorted(
            {_outer(name) for name in lmdb_folder.clips(root)} - {""}, key=pictures.natural
        )
    with os.scandir(root) as entries:
        return _in_order(entries)


def frames(root: Path, clip: str, kind: str) -> Frames:
    """The frames of a clip: in its folder or, if it exists, in its inner folder. Raises
    Unreadable, OSError."""
    if lmdb_folder.is_packed(root):
        listed = lmdb_folder.clips(root)
        found = listed.get(f"{clip}/{INNER[kind]}") or listed.get(clip, {})
        return {stem: found[stem] for stem in pictures.in_order(found)}
    suffixes = SPIKES if kind == "spike" else pictures.SUFFIXES
    for folder in _places(root, clip, kind):
        try:
            found = pictures.in_folder(folder, suffixes)
        except (FileNotFoundError, NotADirectoryError):
            if find_run.is_lost_folder(folder, root):
                raise
            continue
        if found:
            return found
    return {}


def has_sharp_frames(root: Path, clip: str) -> bool:
    """False also for folders that cannot be read. `root` is not packed."""
    places = (place for place in _places(root, clip, "gt") if find_run.is_folder(place))
    try:
        return any(map(pictures.any_in_folder, places))
    except OSError:
        return False


def _places(root: Path, clip: str, kind: str) -> tuple[Path, Path]:
    return root / clip / INNER[kind], root / clip


def _outer(name: str) -> str:
    """CLIP of CLIP/sharp; other names unchanged."""
    clip, _, last = name.rpartition("/")
    return clip if clip and last in INNER.values() else name


def folders(root: Path) -> list[str]:
    """Those to suggest: none in a folder that is missing or cannot be read."""
    try:
        with os.scandir(root) as entries:
            return _in_order(entries)
    except OSError:
        return []


def _in_order(entries: Iterable[os.DirEntry[str]]) -> list[str]:
    """Names of the folders."""
    names = (e.name for e in entries if e.name[0] != "." and e.name not in SYSTEM and _is_folder(e))
    return sorted(names, key=pictures.natural)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """True also for a link that cannot be followed: reading it gives the error. A link to itself is
    none."""
    try:
        path = Path(entry.path)
        return entry.is_dir() or find_run.is_lost_folder(path, path.parent)
    except OSError as error:
        return error.errno != errno.ELOOP


def missing(given: str, option: str, root: str) -> list[Problem]:
    """Problems of a root that contains no frames. `given`: the option as shown."""
    path = expanded(root)
    if find_run.is_folder(path):
        try:
            with os.scandir(path):
                return _database(given, option, path) if lmdb_folder.is_packed(path) else []
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


def _database(given: str, option: str, path: Path) -> list[Problem]:
    what = ""
    if option.endswith("_spike"):
        what = msg("tasks.video.clips.lmdb_spikes", given=given)
    elif lacks := lmdb_folder.lacking(path):
        what = msg("tasks.video.clips.lmdb_lacks", given=given, names=", ".join(lacks))
    else:
        try:
            lmdb_folder.clips(path)
        except (OSError, ValueError) as error:
            what = f"{given}: {getattr(error, 'strerror', None) or error}"
    if not what:
        return []
    plain = path.with_suffix("")
    fixes = [f"--{option}={shlex.quote(str(plain))}"] if find_run.is_folder(plain) else []
    return [Problem("video.lmdb", what, msg("tasks.video.clips.lmdb_wanted"), fixes)]


def _nearest(option: str, path: Path) -> list[str]:
    """Folders with a similar path: one name along the path may be misspelled."""
    fixes = [MAKE] if "blur_video" in path.parts else []
    if lmdb_folder.is_packed(path) and find_run.is_folder(path.with_suffix("")):
        return [f"--{option}={shlex.quote(str(path.with_suffix('')))}"]
    parent = path.absolute()
    while not find_run.is_folder(parent.parent):
        parent = parent.parent
    near = difflib.get_close_matches(parent.name, folders(parent.parent), n=1, cutoff=0.6)
    if near:
        found = parent.parent / near[0] / path.absolute().relative_to(parent)
        if find_run.is_folder(found):
            shown = str(found) if path.is_absolute() else os.path.relpath(found)
            return [f"--{option}={shlex.quote(shown)}", *fixes]
    return fixes
