"""The coordinator's side of the copies: each new checkpoint is sent to the deputy, the lowest other
machine, if that has a disk of its own."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from training.core import log, manifest, units
from training.core.errors import Exit
from training.core.jsonl import Record
from training.core.messages import msg
from training.core.rundir import RunDir
from training.launcher.json_socket import JsonSocket
from training.launcher.peer_link import PeerLink
from training.launcher.replica import child
from training.launcher.replica.receiver import wanted
from training.launcher.stop_signals import StopSignals
from training.launcher.waiting import Waiting

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan

PROGRAM = "training.launcher.replica.send_program"
LOOK_S = 1.0
RETRY_S = 60.0  # after a failure, unless a newer checkpoint is there before
# for the last copy, by exit code; a stopped job may be killed soon
LAST_S = {Exit.DONE: 60.0, Exit.PREEMPTED: 10.0, Exit.INTERRUPTED: 10.0}


@dataclass(frozen=True)
class _Deputy:
    node: int
    wire: JsonSocket  # a machine that was lost and is back has another one, and maybe another disk
    port: int


@dataclass(frozen=True)
class _Copy:
    popen: subprocess.Popen[bytes]
    deputy: _Deputy
    name: str  # of the checkpoint
    since: float  # monotonic


class ReplicaSender:
    """For one launch. Copies are made beside the training and never block the supervisor."""

    def __init__(self, run: RunDir, plan: Plan, line: PeerLink) -> None:
        self._run, self._line = run, line
        self._wanted, self._launch = wanted(plan), plan["launch"]
        self._best = bool(plan["config"].get("keep_best"))
        self._copy: _Copy | None = None
        self._copied: tuple[_Deputy, str] | None = None
        self._failed: tuple[_Deputy, str, float] | None = None  # and when to try again
        self._looked = 0.0
        self._told: set[tuple[int, str]] = set()
        self._greeted: set[int] = set()

    def look(self) -> None:
        """Called repeatedly while ranks run. Never blocks."""
        now = time.monotonic()
        if not self._wanted or now - self._looked < LOOK_S:
            return
        self._looked, deputy = now, self._deputy()
        self._collect(deputy)
        name = self._newest() if deputy and not self._copy else ""
        if not deputy or not name or self._copied == (deputy, name):
            return
        if self._failed and self._failed[:2] == (deputy, name) and now < self._failed[2]:
            return
        self._start(deputy, name)

    def _deputy(self) -> _Deputy | None:
        # one that waits to join has a port, too, and gets its copies once it is connected
        for node in sorted(self._line.wires)[:1]:
            if port := self._line.replica_ports.get(node):
                return _Deputy(node, self._line.wires[node], port)
        return None

    def _newest(self) -> str:
        saved = manifest.all_in(self._run.checkpoints)
        return saved[-1].name if saved else ""

    def _start(self, deputy: _Deputy, name: str, *, last: bool = False) -> None:
        task: Record = {
            "run_dir": str(self._run.path),
            "launch": self._launch,
            "secret": self._line.secret,
            "port": deputy.port,
            "best": self._best,
            "last": last,
        }
        try:
            task["address"] = deputy.wire.socket.getpeername()[0]
            self._copy = _Copy(child.start(PROGRAM, task), deputy, name, time.monotonic())
        except OSError as error:
            self._fail(deputy, name, {"error": "ended", "text": error.strerror})

    def _collect(self, deputy: _Deputy | None) -> None:
        """The result of a copy that has ended; one for a lost machine is ended."""
        copy = self._copy
        if copy is None:
            return
        if copy.popen.poll() is None:
            if copy.deputy != deputy:
                copy.popen.terminate()
            return
        self._copy, line = None, child.output(copy.popen)
        try:
            result: Any = json.loads(line)
        except ValueError:
            result = None
        if not isinstance(result, dict) or copy.popen.returncode:
            result = {"error": "ended", "text": child.why(copy.popen, line)}
        child.end(copy.popen)
        if copy.deputy != deputy:
            return
        if "error" in result:
            self._fail(copy.deputy, copy.name, result)
        else:
            self._done(copy, result)

    def _done(self, copy: _Copy, result: Record) -> None:
        steps: list[int] = result["steps"]
        name = manifest.folder_name(steps[0]) if steps else copy.name
        self._failed, node = None, copy.deputy.node
        if theirs := result.get("aside"):
            self._warn_aside(node, theirs)
        if self._copied == (copy.deputy, name):  # nothing but records
            return
        self._copied = (copy.deputy, name)
        self._told = {told for told in self._told if told[0] != node}
        seconds, size = time.monotonic() - copy.since, result["bytes"]
        for step in steps[:1]:
            self._run.event("replica", step=step, node=node, seconds=seconds, bytes=size)
        if node not in self._greeted:
            self._greeted.add(node)
            text = msg(
                "launcher.replica.copied",
                name=self._line.name(node),
                checkpoint=name,
                size=units.size(size),
                seconds=seconds,
            )
            log.info(text)

    def _warn_aside(self, node: int, theirs: str) -> None:
        text = msg(
            "launcher.replica.aside",
            name=self._line.name(node),
            theirs=theirs,
            folder=RunDir(self._run.path, node).replaced,
        )
        log.warning(text)
        self._run.event("warning", code="warning.replica", text=text, by="supervisor")

    def _fail(self, deputy: _Deputy, name: str, result: Record) -> None:
        """A warning, once for each machine and reason until a copy succeeds."""
        self._failed = (deputy, name, time.monotonic() + RETRY_S)
        code = str(result["error"])
        if (deputy.node, code) in self._told:
            return
        self._told.add((deputy.node, code))
        text = msg(
            "launcher.replica.failed",
            name=self._line.name(deputy.node),
            checkpoint=name,
            why=_why(code, result, deputy.port),
        )
        log.warning(text)
        self._run.event("warning", code="warning.replica", text=text, by="supervisor")

    def finish(self, code: int, signals: StopSignals) -> None:
        """After the end of the run: the last checkpoint and the summary. A stop signal ends the
        wait."""
        deputy = self._deputy()
        if not self._wanted or deputy is None or code not in LAST_S or not self._newest():
            return
        waiting, limit_s = Waiting(), LAST_S[Exit(code)]
        last = False
        while self._copy or not last:
            if not self._copy:
                last = True
                self._start(deputy, self._newest(), last=True)
            stopped = signals.wait(0.05) is not None
            if stopped or waiting.seconds > limit_s:
                if self._copy and self._copy.popen.poll() is None:
                    late = {"error": "late", "text": units.duration(waiting.seconds)}
                    self._fail(deputy, self._newest(), late)
                break
            self._collect(deputy)
            waiting.report(
                msg("launcher.replica.last_copy", name=self._line.name(deputy.node)), level=log.info
            )

    def close(self) -> None:
        if self._copy:
            child.end(self._copy.popen)
        self._copy = None


def _why(code: str, result: Record, port: int) -> str:
    """The reason for a missing copy, and what to do about it."""
    text = str(result.get("text") or "")
    if code == "no_space":
        needed, free = units.size(result["needed"]), units.size(result["free"])
        return msg("launcher.replica.no_space", needed=needed, free=free)
    if code == "unreachable":
        return msg(
            "launcher.replica.unreachable", port=port, why=text or msg("launcher.nodes.answers_not")
        )
    return {
        "cut": msg("launcher.replica.cut", why=text or msg("launcher.socket.closed")),
        "stalled": msg("launcher.replica.cut", why=msg("launcher.nodes.answers_not")),
        "late": msg("launcher.replica.late", seconds=text),
        "disk": msg("launcher.replica.disk", why=text),
        "source": msg("launcher.replica.source", why=text),
        "invalid": msg("launcher.replica.invalid", why=text),
        "ended": msg("launcher.replica.ended", why=text),
    }.get(code) or msg("launcher.replica.other_program", port=port)
