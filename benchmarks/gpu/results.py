"""gpu.json: the figures of all stages and what they belong to; gpu.html is drawn from it.

The benchmark remembers nothing else: with a copy of gpu.json it continues on another machine of the
same kind.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import Any

from benchmarks.gpu import page
from benchmarks.gpu.stages import STAGES, Record, Session, Stage
from training.core import file_lock
from training.core.rundir import read_json, write_bytes, write_json

FORMAT = 1
NANOCHAT = {"nanochat": None}  # in place of its version, to compare the rest of two keys


class Unusable(Exception):
    """Results cannot be kept in this folder."""


class Busy(Exception):
    """Another call measures into this folder."""


def refuse_unusable(folder: Path) -> None:
    """Raises Unusable. Writes nothing."""
    there = next(one for one in (folder, *folder.parents) if os.path.lexists(one))
    if not there.is_dir():
        raise Unusable(f"{there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise Unusable(f"{there} is not writable")
    file = _file(folder)
    if not all(_is_record(record) for record in _records(file)):
        raise Unusable(f"{file} is not a result of this benchmark")


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Only one call measures into a folder, if its file system has locks. Raises Busy, OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    with file_lock.opened(path := folder / "lock") as lock:
        try:
            file_lock.take(lock)
        except BlockingIOError:
            raise Busy(f"{path.read_text()} is measuring into {folder}") from None
        lock.truncate(0)
        print(f"PID {os.getpid()} on {platform.node()}", end="", file=lock, flush=True)
        yield


def _file(folder: Path) -> Path:
    return folder / "gpu.json"


def _records(file: Path) -> list[Any]:
    stages = (read_json(file) or {}).get("stages") or {}
    return list(stages.values()) if isinstance(stages, dict) else [stages]


def _is_record(found: Any) -> bool:
    return (
        isinstance(found, dict)
        and {"key", "status", "reason", "seconds", "figures", "checks"} <= found.keys()
        and isinstance(found["key"], dict)
        and {"smoke", "null_gpu"} <= found["key"].keys()
    )


class Results:
    """Records of the stages in the session's folder."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.json, self.html = _file(session.folder), session.folder / "gpu.html"
        self._is_set_aside = False

    def before(self, stage: Stage) -> Record | None:
        """The record of a stage, if it belongs to this machine and commit. One with nanochat is
        kept by a call that does not ask for it."""
        record, wanted = self._kept().get(stage.name), self.session.key(stage)
        return record if record and record["key"] | wanted == record["key"] else None

    def are_meant(self) -> bool:
        """Whether the folder has figures of real sizes on a real GPU."""
        return any(not (r["key"]["smoke"] or r["key"]["null_gpu"]) for r in self._kept().values())

    def _kept(self) -> dict[str, Record]:
        return (read_json(self.json) or {}).get("stages") or {}

    def _others(self) -> dict[str, Record]:
        """Records that stay: of this machine and commit, with whatever version of nanochat."""
        return {
            name: record
            for name, record in self._kept().items()
            if name in STAGES
            and record["key"] | self.session.key(STAGES[name]) | NANOCHAT
            == record["key"] | NANOCHAT
        }

    def _set_aside(self) -> None:
        """Keep a copy of the file: not all of its records stay. One suffices for a call, which
        measures nothing twice."""
        if self._is_set_aside:
            return
        self._is_set_aside = True
        commit = (read_json(self.json) or {}).get("commit", "unknown")
        names = chain([f"gpu-{commit}"], (f"gpu-{commit}-{number}" for number in count(2)))
        paths = (self.json.with_name(f"{name}.json") for name in names)
        free = next(path for path in paths if not path.exists())
        write_bytes(free, self.json.read_bytes())

    def keep(self, stage: Stage, record: Record | None) -> dict[str, Any]:
        """Write both files with this record of the stage; None: it is being measured. Real figures
        of another machine or commit, or those that are measured again, get a file of their own."""
        kept = self._others()
        lost = self._kept().keys() - kept.keys()
        if record is None and kept.get(stage.name, {}).get("figures"):  # also of a failed stage
            lost |= {stage.name}
        if lost and self.are_meant():
            self._set_aside()
        records = kept | {stage.name: record}
        machine = self.session.machine
        result = {
            "format": FORMAT,
            "created": time.time(),
            "name": machine.title,
            "machine": machine.record(),
            "commit": self.session.commit,
            "smoke": self.session.smoke,
            "stages": {name: records[name] for name in STAGES if records.get(name)},
        }
        self.session.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.json, result)
        write_bytes(self.html, page.html(result).encode())
        return result
