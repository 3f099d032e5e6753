"""Sends one copy of the newest checkpoint and of the records of a run: a child process of node 0's
supervisor (training.launcher.replica.sender). Prints one JSON line: what was sent, or why not."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from training.core import evaluations, manifest
from training.core.errors import Exit
from training.core.jsonl import Record
from training.core.rundir import RunDir
from training.host import program
from training.launcher.replica import records
from training.launcher.replica.link import HELLO_S, Link, LinkError
from training.launcher.replica.receive_program import BLOCK, NICE
from training.launcher.replica.store import SYNCED

UNREACHABLE, SOURCE = "unreachable", "source"  # codes of an error beside those of the receiver


class Refused(Exception):
    """The answer of the other side is an error."""

    def __init__(self, answer: Record) -> None:
        super().__init__(answer)
        self.answer = answer


class Copy:
    """Over one connection. Raises LinkError, Refused, OSError (of this machine's disk)."""

    def __init__(self, run: RunDir, link: Link) -> None:
        self._run, self._link = run, link
        self.bytes, self.steps = 0, list[int]()
        self.aside = ""  # the last checkpoint of another state of the run, which was there

    def make(self, launch: str, *, best: bool, last: bool) -> None:
        self._ask({"launch": launch})
        while not self._made(best=best, last=last):
            continue

    def _made(self, *, best: bool, last: bool) -> bool:
        """False when the run has deleted the newest checkpoint meanwhile. The records follow the
        list of checkpoints, so that they reach as far as the newest one."""
        present = manifest.all_in(self._run.checkpoints)
        facts = {path: found for path in present if (found := manifest.read(path)[0])}
        names = records.names(self._run, last=last)
        there = self._ask({"files": names})
        if not self._continued(there):
            self.aside = max(there["checkpoints"], default="")
            self._ask({"set_aside": {path.name: f["own_sha256"] for path, f in facts.items()}})
            there = self._ask({"files": names})
        for name in names:
            self._file(name, *there["files"].get(name, (0, "")))
        self.steps, wanted = [], list(facts)[-1:]
        scored = evaluations.best_checkpoint(facts) if best else None
        if scored and scored[0] not in wanted:
            wanted.append(scored[0])
        for path in wanted:
            there = self._ask({"files": []})  # one that was sent may have replaced another
            if there["checkpoints"].get(path.name) != facts[path]["own_sha256"]:
                try:
                    self._checkpoint(path, facts[path]["bytes"])
                except FileNotFoundError:
                    if path.exists():
                        raise
                    if not self.steps:
                        return False
                    continue  # the best one: the next copy sends a better one
            self.steps.append(facts[path]["step"])
        self._ask({"keep": [path.name for path in facts]})
        return True

    def _continued(self, there: Record) -> bool:
        """Is the copy that is there an earlier state of this run?"""
        name = self._run.metrics.name
        size, mark = there["files"].get(name, (0, ""))
        return self._same(name, size, mark) if size else not there["checkpoints"]

    def _same(self, name: str, size: int, mark: str) -> bool:
        path = self._run.path / name
        return size <= records.size(path) and records.mark(path, size) == mark

    def _file(self, name: str, at: int, mark: str) -> None:
        path = self._run.path / name
        if not self._same(name, at, mark):
            at = 0
        # what is appended meanwhile is part of the next copy
        end = records.size(path)
        while at < end and (part := records.part(path, at)):
            checksum = hashlib.sha256(part).hexdigest()
            self._link.send({"file": name, "at": at, "sha256": checksum})
            self._link.send_block(part)
            self._answer()
            at += len(part)
            self.bytes += len(part)

    def _checkpoint(self, path: Path, size: int) -> None:
        # opened before it is announced: the run may delete it meanwhile
        with (path / manifest.STATE).open("rb") as file:
            text = (path / manifest.NAME).read_text(encoding="utf-8")
            at = int(self._ask({"checkpoint": path.name, "manifest": text})["at"])
            file.seek(at)
            while at < size and (block := file.read(BLOCK)):
                self._block(block)
                self.bytes += len(block)
                before, at = at, at + len(block)
                if before // SYNCED != at // SYNCED:
                    # the ranks' memory does not need it in the cache
                    os.posix_fadvise(file.fileno(), 0, at, os.POSIX_FADV_DONTNEED)
        self._answer()

    def _block(self, block: bytes) -> None:
        try:
            self._link.send_block(block)
        except LinkError:
            self._answer()  # if the other side has sent the reason before it closed
            raise

    def _ask(self, message: Record) -> Record:
        self._link.send(message)
        return self._answer()

    def _answer(self) -> Record:
        while "alive" in (answer := self._link.receive()):
            continue
        if "error" in answer:
            raise Refused(answer)
        return answer


def copied(task: Mapping[str, object]) -> Record:
    """What was sent, or {"error": …}."""
    try:
        connected = socket.create_connection(
            (str(task["address"]), int(str(task["port"]))), HELLO_S
        )
    except OSError as error:  # a timeout has no strerror
        return {"error": UNREACHABLE, "text": error.strerror or ""}
    try:
        with connected, Link(connected, str(task["secret"]).encode(), accepted=False) as link:
            copy = Copy(RunDir(str(task["run_dir"])), link)
            copy.make(str(task["launch"]), best=bool(task["best"]), last=bool(task["last"]))
    except LinkError as error:
        return {"error": error.code, "text": error.text}
    except Refused as refused:
        return refused.answer
    except OSError as error:
        return {"error": SOURCE, "text": error.strerror or str(error)}
    aside = {"aside": copy.aside} if copy.aside else {}
    return {"steps": copy.steps, "bytes": copy.bytes, **aside}


def main(argv: list[str]) -> int:
    if argv:
        print((__doc__ or "").strip())
        return int(Exit.DONE)
    os.nice(NICE)
    print(json.dumps(copied(json.loads(sys.stdin.readline()))))
    return int(Exit.DONE)


if __name__ == "__main__":
    sys.exit(program.run(main, __doc__, pipe=False))
