"""Checkpoint manifest: position, model shape, data and checksums. Without torch, since the plan
reads it too."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from training.core import json_text, rundir
from training.core.messages import msg

if TYPE_CHECKING:
    from training.core.contracts.run_files import ManifestRecord
    from training.core.jsonl import Record

FORMAT = 2
NAME = "manifest.json"
TEMPORARY = ".writing-"  # prefix of a folder that is being written or removed
REPLACED = ".replaced-"  # of a checkpoint while another one gets its name
STATE = "state.pt"
CHUNK = 1 << 20
OWN = re.compile(rf"({re.escape(REPLACED)})?step_\d{{8,}}")
OWN_SHA256 = "own_sha256"  # key of the checksum of all other facts
# Required keys.
KEYS = (
    "format",
    "step",
    "epoch",
    "used",
    "shape",
    "optimizer",
    "world_size",
    "data",
    "tokenizer",
    "bytes",
    "sha256",
    OWN_SHA256,
)


def write(folder: Path, facts: ManifestRecord) -> None:
    """The checksum is that of the facts as read() gets them."""
    stored = json_text.as_stored({"format": FORMAT, **facts})
    rundir.write_json(folder / NAME, {**stored, OWN_SHA256: _checksum(stored)})


def rewrite(folder: Path, found: Record) -> None:
    """Write a manifest that another machine has read: an early one has a bare NaN, which is written
    as a string, so that its checksum changes. Facts without their own checksum become a file that
    read() rejects."""
    if intact(found):
        write(folder, cast("ManifestRecord", _others(found)))
    else:
        rundir.write_json(folder / NAME, found)


def read(folder: Path) -> tuple[ManifestRecord | None, str]:
    """(manifest of a checkpoint folder, error text): one of the two."""
    found = rundir.read_json(folder / NAME)
    if found is None:
        return None, msg("core.manifest.damaged", file=NAME)
    if found.get("format") != FORMAT:
        return None, msg("core.manifest.format", found=found.get("format"), readable=FORMAT)
    if missing := [key for key in KEYS if key not in found]:
        return None, msg("core.manifest.lacks", file=NAME, missing=", ".join(missing))
    if not intact(found):
        return None, msg("core.manifest.checksum", file=NAME)
    name = folder_name(found["step"])
    if folder.name.removeprefix(REPLACED) != name:
        return None, msg("core.manifest.other_step", file=NAME, step=found["step"], name=name)
    return cast("ManifestRecord", found), ""


def intact(found: Record) -> bool:
    """Whether the checksum of a manifest is that of its other facts. Early 0.1 computed it before
    NaN and infinity got their names in the file."""
    checksum, facts = found.get(OWN_SHA256), _others(found)
    return checksum in (_checksum(facts), _checksum(json_text.as_given(facts)))


def _others(found: Record) -> Record:
    return {name: value for name, value in found.items() if name != OWN_SHA256}


def folder_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(folder: Path) -> int:
    """The inverse of folder_name()."""
    return int(folder.name.rpartition("step_")[2])


def all_in(checkpoints: Path) -> list[Path]:
    """As listed(); [] for a folder that cannot be read."""
    try:
        return listed(checkpoints)
    except OSError:
        return []


def listed(checkpoints: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first; other folders are ignored. One that was to be
    replaced counts while nothing has its name. Raises OSError, but not for a missing folder."""
    try:
        with os.scandir(checkpoints) as entries:
            names = {one.name for one in entries if OWN.fullmatch(one.name) and one.is_dir()}
    except (FileNotFoundError, NotADirectoryError):
        return []
    replaced = {n for n in names if n.startswith(REPLACED) and n.removeprefix(REPLACED) in names}
    return sorted((checkpoints / name for name in names - replaced), key=step_of)


def newest(checkpoints: Path) -> ManifestRecord | None:
    """The newest valid manifest; the state of its checkpoint is not verified."""
    return next((found for path in reversed(all_in(checkpoints)) if (found := read(path)[0])), None)


def newest_step(checkpoints: Path) -> int:
    """The step of the newest valid manifest; 0 without one."""
    return int((newest(checkpoints) or {"step": 0})["step"])


def damage(state: Path, size: int, checksum: str, moved: Callable[[], None] = lambda: None) -> str:
    """What is wrong with a file of weights that should have this size and sha256, or "". `moved()`
    is called for each piece that is read."""
    try:
        return read_damage(state, size, checksum, moved)
    except OSError as error:
        return unreadable(state, error)


def read_damage(
    state: Path, size: int, checksum: str, moved: Callable[[], None] = lambda: None
) -> str:
    """As damage(). Raises OSError for a file that may be intact but cannot be read now."""
    try:
        wrong = _other_size(state, size)
    except FileNotFoundError as error:
        wrong = unreadable(state, error)
    if wrong:
        return wrong
    intact = sha256(state, moved) == checksum
    return "" if intact else msg("core.manifest.state_checksum", file=state.name)


def incomplete(state: Path, size: int) -> str:
    """As damage(), without reading the file."""
    try:
        return _other_size(state, size)
    except OSError as error:
        return unreadable(state, error)


def _other_size(state: Path, size: int) -> str:
    found = state.stat().st_size
    if found == size:
        return ""
    return msg("core.manifest.size", file=state.name, size=found, bytes=size)


def unreadable(state: Path, error: OSError) -> str:
    return msg("core.manifest.unreadable", file=state.name, strerror=error.strerror)


def sha256(path: Path, moved: Callable[[], None] = lambda: None) -> str:
    """`moved()` is called for each piece that is read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            moved()
    return digest.hexdigest()


def _checksum(facts: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
