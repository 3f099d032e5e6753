"""The newest checkpoint that a user script has written, for the message of a restart.

Recognised: files of torch.save and Lightning (.pt, .pth, .ckpt), safetensors, folders of torch's
distributed checkpoints (.metadata) and of Hugging Face's Trainer (trainer_state.json). Files are
read without torch, and nothing in them is executed.
"""

from __future__ import annotations

import json
import os
import pickletools
import re
import time
import zipfile
import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.core.messages import msg
from training.core.units import duration

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan

SUFFIXES = (".pt", ".pth", ".ckpt", ".safetensors")
FOLDERS = ("trainer_state.json", ".metadata")  # a checkpoint is the folder of such a file
SKIPPED = {"node_modules", "site-packages", "__pycache__", "wandb"}
DEPTH = 8  # of folders below the working directory
CROWDED = 2_000  # files: data, not checkpoints
MOST_ENTRIES = 50_000  # a crowded folder counts as CROWDED
MOST_PICKLE = 1 << 20  # bytes; the tensors of a torch file are not in its pickle
COUNTERS = re.compile(
    r"(epochs?(_run|s_run)?|current_epoch|(global_)?steps?|iter(ation|_num)?s?)", re.IGNORECASE
)
STORED = ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT")  # operations of a pickle, to its memo
READ = ("GET", "BINGET", "LONG_BINGET")
NUMBERS = ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1")
UNITS = ("epoch", "step", "iter")
NUMBER = re.compile(r"\d+")
TOLD = re.compile(r"(\w+) (-?\d+)")  # in Snapshot.progress
IN_NAME = re.compile(r"(epoch|step|iter|checkpoint)[-_=]?(\d+)", re.IGNORECASE)
# Folders of a new start (YOLO, Lightning, Hydra, W&B) or of a selected checkpoint, and times: three
# groups of two digits, or at least eight digits in all; never a part of a number.
OF_A_START = re.compile(
    r"(?<![^/])(?:best|last|latest|(?:exp|run|train|version)[-_]?\d*)(?![^/])"
    r"|(?<![^/])(?=[a-z]*\d+[a-z])[a-z\d]{8}(?=/checkpoints(?![^/]))"
    r"|(?<!\d)(?:\d\d[-_.:]\d\d[-_.:]\d\d(?!\d)|(?=(?:[-_.:T]?\d){8})\d{2,})(?:[-_.:T]\d+)*",
    re.IGNORECASE,
)
# The end of a path before the number of a fold or phase.
OF_A_PART = re.compile(
    r"(?<![a-z])(?:k?fold|phase|stage|split|task|cv)s?[^a-z]*\Z",
    re.IGNORECASE,
)
# Reading a file may fail with these if it is unfinished, damaged, or another program's.
UNREADABLE = (
    *(OSError, ValueError, LookupError, TypeError, EOFError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error),
)


@dataclass(frozen=True)
class Snapshot:
    path: Path
    written: float  # seconds since the epoch
    progress: str  # such as `epoch 3, step 40`; "" if unknown

    def __str__(self) -> str:
        seconds = max(0.0, time.time() - self.written)
        age = f"{seconds:.0f} s" if seconds < 100 else duration(seconds)
        if self.progress:
            return msg("launcher.snapshot.at", name=self.path.name, progress=self.progress, age=age)
        return msg("launcher.snapshot.written", name=self.path.name, age=age)


def moved(before: Snapshot | None, now: Snapshot | None) -> bool:
    """Has the script made progress in between? One that starts from nothing writes the same
    checkpoint again. Larger counters are progress, and so is a folder of a later fold or phase,
    each of which counts from the beginning: one with larger numbers or another name. With the same
    counters it must be called a fold or phase, since scripts number the folders of their starts
    too. Parts of a name that are known to differ with each start do not count."""
    if before is None or now is None:
        return now is not None
    if not (before.progress and now.progress):
        return now.written > before.written
    old, new = _counters(before), _counters(now)
    old_folder, new_folder = _folder(before), _folder(now)
    if old.keys() != new.keys() or NUMBER.sub("", old_folder) != NUMBER.sub("", new_folder):
        return old != new
    order = sorted(new, key=(*UNITS, *new).index)
    if [new[unit] for unit in order] > [old[unit] for unit in order]:
        return True
    if _numbers(new_folder) <= _numbers(old_folder):
        return False
    common = os.path.commonprefix([old_folder, new_folder])  # noqa: RUF071 – ends within a name
    return old != new or bool(OF_A_PART.search(common))


def _folder(snapshot: Snapshot) -> str:
    """Without what names a start or a checkpoint."""
    parent = IN_NAME.sub("", str(snapshot.path.parent))
    return str(Path(OF_A_START.sub("", parent)))


def _numbers(folder: str) -> list[int]:
    return [int(number) for number in NUMBER.findall(folder)]


def _counters(snapshot: Snapshot) -> dict[str, int]:
    return {unit: int(number) for unit, number in TOLD.findall(snapshot.progress)}


def look(plan: Plan, since: float | None = None) -> tuple[Snapshot | None, str]:
    """What the script has saved in this launch, or `since` then, as far as it is recognised, and
    the text of that. No file of the script may prevent the restart."""
    command, script = plan["command"], plan["script"]
    try:
        since = plan["created"] if since is None else since
        found, stopped = search(command["cwd"], script["args"], since)
    except Exception as error:
        name = type(error).__name__
        return None, msg("launcher.snapshot.failed", name=name, error=error)
    if found:
        return found, str(found)
    if stopped:
        return None, msg("launcher.snapshot.stopped", folder=stopped, most=MOST_ENTRIES)
    return None, msg("launcher.snapshot.none")


def search(cwd: str, words: Sequence[str], since: float) -> tuple[Snapshot | None, str]:
    """The newest one below the working directory and the folders among the script's arguments,
    written after `since`; and the folder below which the search was stopped, as it has too many
    files, '' if none."""
    found: tuple[float, Path] | None = None
    stopped = ""
    for folder in _folders(cwd, words):
        written, complete = _checkpoints(folder)
        stopped = stopped or ("" if complete else str(folder))
        for path, at in written:
            if at >= since and (found is None or at > found[0]):
                found = at, path
    return Snapshot(found[1], found[0], progress(found[1])) if found else None, stopped


def _folders(cwd: str, words: Sequence[str]) -> list[Path]:
    # os.path.isdir: a word may be any text, also longer than a path may be
    named = [Path(cwd, word.rpartition("=")[2]) for word in words]
    around = [path if os.path.isdir(path) else path.parent for path in named]
    known = [path.resolve() for path in around if os.path.isdir(path)]
    return list(dict.fromkeys([Path(cwd).resolve(), *known]))


def _checkpoints(top: Path) -> tuple[list[tuple[Path, float]], bool]:
    """(path, time of writing) of those below this folder; whether all folders were searched. Upper
    folders first; of a crowded one, which has the data, only the folders in it."""
    found: list[tuple[Path, float]] = []
    waiting, seen = deque([(top, 0)]), 0
    while waiting:
        folder, depth = waiting.popleft()
        folders, names = _listed(folder)
        seen += min(len(names), CROWDED) + 1
        if seen > MOST_ENTRIES:
            return found, False
        if depth < DEPTH:
            waiting += [
                (folder / n, depth + 1) for n in folders if n[0] != "." and n not in SKIPPED
            ]
        for name in names if len(names) <= CROWDED else []:
            path = folder / name
            if name.endswith(SUFFIXES) or name in FOLDERS:
                try:
                    written = path.stat().st_mtime
                except OSError:  # removed in the meantime
                    continue
                found.append((path.parent if name in FOLDERS else path, written))
    return found, True


def _listed(folder: Path) -> tuple[list[str], list[str]]:
    """Names of the folders in it, without links, and of its files."""
    folders, names = list[str](), list[str]()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
                else:
                    names.append(entry.name)
    except OSError:  # not permitted, or removed in the meantime
        pass
    return folders, names


def progress(path: Path) -> str:
    """How far training had come: from the file, else from its name; "" if unknown."""
    try:
        inside = _of_trainer(path) if path.is_dir() else _of_torch(path)
    except UNREADABLE:
        inside = ""
    return inside or _told(
        [(found[1].lower(), int(found[2])) for found in IN_NAME.finditer(path.name)]
    )


def _told(counters: Iterable[tuple[str, int]]) -> str:
    """`epoch 0, step 40`, by the first counter of each unit: an epoch may have several
    checkpoints."""
    units: dict[str, int] = {}
    for unit, number in counters:
        units.setdefault(unit, number)
    return ", ".join(f"{unit} {number}" for unit, number in units.items())


def _of_trainer(folder: Path) -> str:
    state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    return f"step {int(state['global_step'])}"


def _of_torch(path: Path) -> str:
    """A counter at the top of the pickle, such as "EPOCHS_RUN": 3."""
    with zipfile.ZipFile(path) as archive:
        name = next((n for n in archive.namelist() if n.endswith("data.pkl")), None)
        if name is None:
            return ""
        with archive.open(name) as file:
            data = file.read(MOST_PICKLE)
    found: dict[str, int] = {}
    memo: dict[int, str] = {}  # a string that was pickled before is a reference to it
    key = word = ""
    value: Any
    for operation, value, _ in pickletools.genops(data):
        if operation.name in STORED:  # between a key and its value
            memo[len(memo) if value is None else value] = word
            continue
        if key and operation.name in NUMBERS:
            found[key] = value
        if operation.name in READ:
            word = memo.get(value, "")
        else:
            word = value if isinstance(value, str) else ""
        key = word if COUNTERS.fullmatch(word) else ""
    return _told((unit, found[name]) for unit in UNITS for name in found if unit in name.lower())
