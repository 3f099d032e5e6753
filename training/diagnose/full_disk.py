"""The disk without room for a file that a rank has written."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from training.core import cause_ids, find_run
from training.core.errors import DISK_FULL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from training.core.contracts.verdict import EndRecord, RankErrorRecord
    from training.core.rundir import RunDir

# the error of the operating system in another exception
_QUOTED = re.compile("|".join(rf"\[Errno {number}\]" for number in DISK_FULL))
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
    directory, and its compiler to a temporary one."""
    if error is None or end["cause"] != cause_ids.DISK_FULL:
        return
    if (found := folder(error)) and (not known or elsewhere(error, run)):
        end["full_folder"] = str(found)
    elif not found and not error["disk_full"] and _QUOTED.search(error["message"]):
        end["full_folder"] = ""


def with_folder(end: EndRecord, run_values: Mapping[str, str]) -> dict[str, str]:
    """The values for the sentences of advice, without the run's disk if it may be another one."""
    found = dict(run_values)
    if not (name := end.get("full_folder")):
        if name is not None:
            found.pop("parent", None)
        return found
    found["full_folder"] = shlex.quote(name)
    if any(map(_SAVES.search, end["evidence"])):
        found["checkpoint"] = "checkpoint"
    return found
