"""The copy on the disk of the second machine. Everything that it is asked to write comes from a
network: names, sizes and checksums are verified."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from training.core import checkpoint_folder, manifest, rundir
from training.core.jsonl import Record
from training.core.rundir import RunDir
from training.launcher.replica import records

if TYPE_CHECKING:
    from training.core.contracts.run_files import ReplicaRecord

WORK = f"{manifest.TEMPORARY}replica"  # folder of the checkpoint that is being received
SYNCED = 1 << 26  # bytes: no more of them wait in memory for the disk
SPARE = 1 << 26  # bytes left free for the ranks of this machine


class Invalid(Exception):
    """What has arrived is not a part of a run."""


class NoSpace(Exception):
    """`needed` bytes do not fit into the `free` ones."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(needed, free)
        self.needed, self.free = needed, free


class Store:
    """Raises Invalid, NoSpace, OSError."""

    def __init__(self, run: RunDir, launch: str) -> None:
        self._run, self.launch = run, launch
        # This machine's ranks append to events.jsonl too: the position and the last bytes are those
        # of node 0's file.
        self._events_at, self._events_tail = 0, b""

    def facts(self, names: Iterable[object]) -> Record:
        """What is there: size and mark of each file, and the checkpoints."""
        files = {}
        for name in names:
            path = self._path(name)
            if path == self._run.events:
                files[name] = (self._events_at, records.mark_of(self._events_tail))
            elif size := records.size(path):
                files[name] = (size, records.mark(path, size))
        return {"files": files, "checkpoints": self._checkpoints()}

    def _checkpoints(self) -> dict[str, str]:
        found = {path.name: manifest.read(path)[0] for path in self._all()}
        return {name: facts["own_sha256"] if facts else "" for name, facts in found.items()}

    def _all(self) -> list[Path]:
        return manifest.all_in(self._run.checkpoints)

    def _path(self, name: object) -> Path:
        path = records.path_of(self._run, name)
        if path is None:
            raise Invalid(f"file {name!r:.100}")
        return path

    def set_aside(self, known: Mapping[str, str]) -> None:
        """Keep the files of another training that has the same name, except the `known`
        checkpoints."""
        run = self._run
        run.replaced.mkdir(parents=True, exist_ok=True)
        prefix = time.strftime("%Y%m%d_%H%M%S_")
        aside = Path(tempfile.mkdtemp(dir=run.replaced, prefix=prefix))
        (aside / run.checkpoints.name).mkdir()
        single = (run.metrics, run.events, run.summary, run.wandb_id, run.samples, run.tensorboard)
        for path in single:
            if path.exists():
                path.rename(aside / path.name)
        for path, before in ((run.plan, run.plan_before), (run.data, run.data_before)):
            if before.exists():  # this launch has written its own in their place
                before.rename(aside / path.name)
        for name, checksum in self._checkpoints().items():
            if known.get(name) != checksum:
                (run.checkpoints / name).rename(aside / run.checkpoints.name / name)
        self._events_at, self._events_tail = 0, b""

    def write(self, name: object, at: object, content: bytes, checksum: object) -> None:
        """A part of a file: from 0 on it replaces the file."""
        path = self._path(name)
        if hashlib.sha256(content).hexdigest() != checksum:
            raise Invalid(f"checksum of {name}")
        if path == self._run.events:
            self._add_events(at, content)
        elif at == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            rundir.write_bytes(path, content)
        elif at == records.size(path):
            _append(path, content)
        else:
            raise Invalid(f"position {at!r:.100} of {name}")

    def _add_events(self, at: object, content: bytes) -> None:
        if at == 0:  # an earlier launch may have copied some
            file = self._run.events
            there = set(file.read_bytes().splitlines(keepends=True)) if file.exists() else set()
            lines = [line for line in content.splitlines(keepends=True) if line not in there]
            self._events_at, self._events_tail = 0, b""
        elif at == self._events_at:
            lines = [content]
        else:
            raise Invalid(f"position {at!r:.100} of {self._run.events.name}")
        _append(self._run.events, b"".join(lines))
        self._events_at += len(content)
        self._events_tail = (self._events_tail + content)[-records.MARK :]

    def begin(self, name: object, text: object) -> Checkpoint:
        """A checkpoint with this manifest; one that was cut before is continued."""
        if (
            not isinstance(name, str)
            or not isinstance(text, str)
            or not manifest.OWN.fullmatch(name)
        ):
            raise Invalid(f"checkpoint {name!r:.100}")
        folder = self._run.checkpoints / WORK / name
        facts_file = folder / manifest.NAME
        if not facts_file.exists() or facts_file.read_bytes() != text.encode():
            shutil.rmtree(folder.parent, ignore_errors=True)
            folder.mkdir(parents=True)
            rundir.write_bytes(facts_file, text.encode())
        facts, wrong = manifest.read(folder)
        if facts is None or not isinstance(facts["bytes"], int) or facts["bytes"] < 0:
            shutil.rmtree(folder.parent)
            raise Invalid(wrong or f"size of {name}")
        there = records.size(folder / manifest.STATE)
        if there > facts["bytes"]:
            (folder / manifest.STATE).unlink()
            there = 0
        needed = facts["bytes"] - there
        for old in self._all_but_the_newest():
            if needed <= self._free(folder):
                break
            checkpoint_folder.remove(old)
        if needed > (free := self._free(folder)):
            shutil.rmtree(folder.parent)
            raise NoSpace(needed, free)
        return Checkpoint(
            folder, self._run.checkpoints / name, there, facts["bytes"], facts["sha256"]
        )

    def _free(self, folder: Path) -> int:
        return max(0, shutil.disk_usage(folder).free - SPARE)

    def _all_but_the_newest(self) -> list[Path]:
        """On a small disk a new copy is worth more than an old one. The newest stays until the new
        one is complete."""
        whole = [path for path in self._all() if manifest.read(path)[0]]
        return [path for path in self._all() if path not in whole[-1:]]

    def forget_cut(self) -> None:
        """Free the disk: the rest of a checkpoint would not fit either."""
        shutil.rmtree(self._run.checkpoints / WORK, ignore_errors=True)

    def keep(self, names: Iterable[object]) -> None:
        """Remove the checkpoints that node 0 has not, once the newest one is here."""
        kept = list(names)
        there = self._all()
        if kept and any(path.name == kept[-1] for path in there):
            done: ReplicaRecord = {"launch": self.launch, "checkpoint": str(kept[-1])}
            rundir.write_json(self._run.replica, done)
            for path in there:
                if path.name not in kept:
                    checkpoint_folder.remove(path)
            self.forget_cut()


class Checkpoint:
    """A checkpoint that is being received."""

    def __init__(self, folder: Path, final: Path, at: int, size: int, checksum: str) -> None:
        self.at, self.size = at, size
        self._folder, self._final, self._checksum = folder, final, checksum

    def opened(self) -> BinaryIO:
        return (self._folder / manifest.STATE).open("ab")

    def write(self, file: BinaryIO, block: bytes) -> None:
        if not block or self.at + len(block) > self.size:
            raise Invalid(f"{self.at + len(block)} bytes of {self.size}")
        file.write(block)
        before, self.at = self.at, self.at + len(block)
        if before // SYNCED != self.at // SYNCED or self.at == self.size:
            file.flush()
            os.fsync(file.fileno())
            # neither the ranks' memory nor the check below needs them in the cache
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def verify(self, moved: Callable[[], None] = lambda: None) -> None:
        """Read it back and give it its name. `moved()` is called for each piece that is read."""
        state = self._folder / manifest.STATE
        if wrong := manifest.damage(state, self.size, self._checksum, moved):
            shutil.rmtree(self._folder.parent)
            raise Invalid(wrong)
        checkpoint_folder.publish(self._folder, self._final)


def _append(path: Path, content: bytes) -> None:
    """All or nothing, unless another process has appended meanwhile."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size, written = os.fstat(handle).st_size, 0
        try:
            while written < len(content):
                written += os.write(handle, content[written:])
        except OSError:
            if os.fstat(handle).st_size == size + written:
                os.ftruncate(handle, size)
            raise
    finally:
        os.close(handle)
