"""The disk without room for a file that a rank has written."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from training.core import cause_ids, find_run

if TYPE_CHECKING:
    from training.core.contracts.verdict import EndRecord, RankErrorRecord
    from training.core.rundir import RunDir

_SAVES = re.compile(r"torch[./]save\b|/torch/serialization\.py|safetensors|save_|checkpoint", re.I)


def folder(error: RankErrorRecord) -> Path | None:
    """The innermost existing folder of the file; None where the error names no file."""
    file = error.get("file")
    return next((p for p in Path(file).parents if find_run.is_folder(p)), None) if file else None


def elsewhere(error: RankErrorRecord, run: RunDir) -> bool:
    """Is the file known to be on another disk than the run directory?"""
    try:
        found = folder(error)
        return found is not None and found.stat().st_dev != run.path.stat().st_dev
    except OSError:  # moved or removed
        return False


def note(end: EndRecord, error: RankErrorRecord | None, run: RunDir, *, known: bool) -> None:
    """Note the folder of the file. `known`: it is a training of Duet, which writes to its run
    directory."""
    if error is None or not error["disk_full"] or end["cause"] != cause_ids.DISK_FULL:
        return
    if (found := folder(error)) and (not known or elsewhere(error, run)):
        end["full_folder"] = str(found)


def values(end: EndRecord) -> dict[str, str]:
    """For the sentences of advice."""
    if "full_folder" not in end:
        return {}
    found = {"full_folder": shlex.quote(end["full_folder"])}
    if any(map(_SAVES.search, end["evidence"])):
        found["checkpoint"] = "checkpoint"
    return found
