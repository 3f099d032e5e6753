"""The copy of the run's checkpoints and records on this machine, which has a disk of its own."""

from __future__ import annotations

import subprocess
import time
from typing import TYPE_CHECKING

from training.core import log, rundir
from training.core.errors import Exit, UserError
from training.core.messages import msg
from training.core.rundir import RunDir
from training.launcher import local_ranks
from training.launcher.peer_link import PeerLink
from training.launcher.replica import child
from training.launcher.stop_signals import StopSignals
from training.launcher.waiting import Waiting

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan

PROGRAM = "training.launcher.replica.receive_program"
PAUSE_S = 5.0  # before a receiver that has ended is started again
LAST_S = 120.0  # for the report and the last copy
REGULAR = (Exit.DONE, Exit.PREEMPTED, Exit.INTERRUPTED)  # ends with a last checkpoint


def wanted(plan: Plan) -> bool:
    """Whether another machine may need a copy to take over the run. The checkpoints of a user
    script are unknown."""
    return "elastic" in plan and plan["place"]["nnodes"] > 1 and not local_ranks.is_script(plan)


def copied(run: RunDir, launch: str) -> str:
    """Name of the newest checkpoint that was copied to this machine in this launch; '' if there is
    none."""
    done = rundir.read_json(run.replica) or {}
    return str(done["checkpoint"]) if done.get("launch") == launch else ""


class ReplicaReceiver:
    """Listens from the start, on the interface that leads to the machine that coordinates; `port`
    is 0 where no copy is wanted: the run needs all machines, or this one has the same disk. The
    socket belongs to the supervisor, so a new child takes over the port of one that has ended."""

    def __init__(self, run: RunDir, plan: Plan, line: PeerLink) -> None:
        self._run, self._line = run, line
        self._popen: subprocess.Popen[bytes] | None = None
        self._task = {
            "run_dir": str(run.path),
            "node": plan["place"]["node_rank"],
            "launch": plan["launch"],
            "secret": line.secret,
        }
        self._started, self._told = 0.0, False
        self._socket = None
        leader = line.wires.get(line.place.leader)
        if wanted(plan) and not plan.get("shared", True) and line.secret and leader:
            address = leader.socket.getsockname()[0]
            try:
                self._socket = local_ranks.listen(address, 0, 8)
            except UserError as error:
                log.warning(msg("launcher.replica.no_receiver", why=error))
        line.replica_ports[plan["place"]["node_rank"]] = self.port
        self.look()

    @property
    def port(self) -> int:
        return self._socket.getsockname()[1] if self._socket else 0

    def look(self) -> None:
        """Called repeatedly: is the child alive? Never blocks."""
        if self._socket is None or (self._popen and self._popen.poll() is None):
            return
        if self._popen:
            if not self._told:
                self._told = True
                why = child.why(self._popen, child.output(self._popen))
                log.warning(msg("launcher.replica.receiver_ended", why=why))
            child.end(self._popen)
            self._popen = None
        if self._started and time.monotonic() - self._started < PAUSE_S:
            return
        self._started, fd = time.monotonic(), self._socket.fileno()
        try:
            self._popen = child.start(PROGRAM, {**self._task, "fd": fd}, (fd,))
        except OSError as error:
            if not self._told:
                self._told = True
                log.warning(msg("launcher.replica.no_receiver", why=error.strerror))

    def finish(self, code: int, signals: StopSignals) -> None:
        """After the end of the run: the last checkpoint arrives, then the sender disconnects."""
        if self._socket is None or code not in REGULAR:
            return
        waiting, leader = Waiting(), self._line.place.leader
        text = msg("launcher.replica.last_one", name=self._line.name(leader))
        while leader in self._line.wires and waiting.seconds < LAST_S and signals.wait(0.1) is None:
            self.look()
            self._line.read(leader)
            waiting.report(text, level=log.info)

    def close(self) -> None:
        if self._popen:
            child.end(self._popen)
        if self._socket:
            self._socket.close()
        self._popen = self._socket = None
