"""The nodes of a job that continues without a lost one (`--min_ranks`).

Each node has a step of its own, so that its end affects no other, and another step can start its
launcher again. SLURM removes a failed node from the job for good (`--no-kill`). Without the first
node, which has the batch script, nothing would end or requeue the job: another node does so.
"""

from __future__ import annotations

import os
import re
import select
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping

from training.core import log
from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg
from training.core.rundir import RunDir
from training.core.units import plural
from training.host import process, slurm_env
from training.launcher.continued_run import JOINS
from training.launcher.hosts.conductor import AGAIN_S, KILLED, MOST_S, STEADY_S
from training.launcher.slurm import controller, job
from training.launcher.slurm.submission import FrozenJob

TURN_S = 0.2
CONNECT_S = 5.0
FOREVER = "2147483647"  # seconds; not every sleep knows infinity
LOOK_S = 10.0  # slurmctld takes SlurmdTimeout (300 s by default) to notice a failed node
BACKLOG = 64
# A node that rejects its first start, or was asked to stop, ends the run for all.
REJECTED = (Exit.CONFIG, Exit.RESOURCES)
STOPPED = (Exit.PREEMPTED, Exit.INTERRUPTED)
FAILED = (Exit.TRAINING, Exit.HANG)  # of the run, or only of this node

Start = Callable[[int, bool], "subprocess.Popen[bytes]"]


def run(frozen: FrozenJob, environ: Mapping[str, str]) -> int:
    """In the batch script, on the first node: the steps of all nodes, to their end. The exit code
    is that of the node that ended the run."""
    facts = frozen.facts()
    elastic = facts.get("elastic")
    assert elastic
    names = names_of(environ)
    address = slurm_env.first_node(environ)
    port = slurm_env.port(environ)
    with listener() as alive:

        def start(rank: int, joins: bool) -> subprocess.Popen[bytes]:
            place = [f"--nnodes={len(names)}", f"--node_rank={rank}", f"--master_addr={address}"]
            if not any(flag.startswith("--master_port=") for flag in facts["flags"]):
                place.append(f"--master_port={port}")
            launch = [*job.launch(frozen), *place]
            if rank:
                where = [str(frozen.code), names[0], address, str(alive.getsockname()[1])]
                launch = job.own_command("node", *where, *launch)
            step = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={names[rank]}", *job.STEP]
            more = {JOINS: "1"} if joins else {}
            return subprocess.Popen(
                [*step, *launch], stdin=subprocess.DEVNULL, env={**os.environ, **more}
            )

        steps = NodeSteps(
            start,
            names,
            lambda name: name in (nodes_of(environ["SLURM_JOB_ID"]) or [name]),
            again=elastic["rejoin"],
        )
        return steps.run(alive)


def listener() -> socket.socket:
    """At a free port of all addresses: the first node's may be one of IPv6."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=BACKLOG, dualstack_ipv6=both)


class NodeSteps:
    """`start`: the step of a node, which may have to join a run that continues; `has`: does the job
    still have this node? `again`: the launcher of a node that has left the run is started again."""

    def __init__(
        self, start: Start, names: list[str], has: Callable[[str], bool], *, again: bool
    ) -> None:
        self._start, self._names, self._has, self._again = start, names, has, again
        self._running: dict[int, subprocess.Popen[bytes]] = {}  # by node rank
        self._started: dict[int, float] = {}
        self._pauses: dict[int, float] = {}  # before the last start again
        self._due: dict[int, float] = {}  # when a node is started again
        self._over_at: float | None = None  # when the run ended
        self._asked = False  # to stop: nothing is started again
        self._terminated = False
        self._rejected = 0  # exit code of a node that rejected its first start
        self._code = 0
        self._first = 0  # the node whose end is that of the run

    def run(self, alive: socket.socket) -> int:
        # SLURM signals the launchers itself. The steps must not inherit that a signal is ignored.
        for number in process.STOP_SIGNALS:
            signal.signal(number, lambda *_: self._stop())
        for rank in range(len(self._names)):
            self._begin(rank)
        while self._running:
            if select.select([alive], [], [], TURN_S)[0]:
                alive.accept()[0].close()  # a node asks whether the first one is there
            for rank, step in list(self._running.items()):
                if (status := step.poll()) is not None:
                    del self._running[rank]
                    self._ended(rank, 128 - status if status < 0 else status)
            self._look()
        return self._code

    def _begin(self, rank: int) -> None:
        self._started[rank] = time.monotonic()
        self._running[rank] = self._start(rank, rank in self._pauses)

    def _ended(self, rank: int, status: int) -> None:
        others = [other for other in self._running if self._trains(other)]
        if status == Exit.DONE and not self._has(self._names[rank]):
            status = int(Exit.LEFT)  # the step of a failed node ends with 0
        left = status > KILLED or status == Exit.LEFT
        if rank == self._first and left and others:
            self._first = min(others)  # it takes over
        elif rank == self._first:
            self._over()
            self._code = self._rejected or status
        if self._over_at is not None or self._asked:
            return
        first, name = rank not in self._pauses, self._names[rank]
        if first and status in REJECTED:
            self._rejected = status
            self._over()
        elif status in STOPPED:
            self._over()
        elif not self._has(name):
            log.warning(msg("launcher.slurm.node_failed", name=name, rank=rank))
        elif status == Exit.DONE:
            self._over()
        elif self._again:
            self._plan_again(rank, first, status)
        else:
            log.warning(msg("launcher.hosts.without", host=name, rank=rank))

    def _trains(self, rank: int) -> bool:
        """May this node be running ranks? It was never lost, or is back for STEADY_S."""
        return rank not in self._pauses or time.monotonic() - self._started[rank] > STEADY_S

    def _plan_again(self, rank: int, first: bool, status: int) -> None:
        now = time.monotonic()
        steady = now - self._started[rank] > STEADY_S
        pause_s = AGAIN_S if first or steady else min(2 * self._pauses[rank], MOST_S)
        if status in FAILED:  # the first node of a failed run ends last: it reports and notifies
            pause_s = float(job.LAST_NODE_S)
        self._pauses[rank], self._due[rank] = min(pause_s, MOST_S), now + pause_s
        if (first or steady) and status not in FAILED:  # once, not at every attempt
            log.warning(msg("launcher.hosts.again", host=self._names[rank], rank=rank))

    def _stop(self) -> None:
        """The launchers save a checkpoint, however long that takes, and end by themselves."""
        self._asked = True

    def _over(self) -> None:
        """The other nodes end by themselves, or are ended later."""
        self._over_at = self._over_at or time.monotonic()

    def _look(self) -> None:
        now = time.monotonic()
        if self._over_at is not None or self._asked:
            self._due.clear()
        if self._over_at is not None:
            late = now - self._over_at - job.LAST_NODE_S
            if late > 0 and not self._terminated:
                self._terminated = True  # once: a second signal would not let the ranks save
                for step in self._running.values():
                    step.terminate()
            if late > job.LAST_NODE_S:
                for step in self._running.values():
                    step.kill()
        for rank in [rank for rank, at in self._due.items() if now > at]:
            del self._due[rank]
            self._begin(rank)


def names_of(environ: Mapping[str, str]) -> list[str]:
    """The nodes that this start of the job began with."""
    nodes, count = environ["SLURM_JOB_NODELIST"], int(environ["SLURM_JOB_NUM_NODES"])
    names, error = controller.hostnames(nodes)
    if len(names) == count:
        return names
    what = msg(
        "launcher.slurm.hostnames",
        nodes=nodes,
        found=", ".join(names) or error or "–",
        count=plural(count, "node"),
    )
    allowed = msg("launcher.slurm.hostnames_allowed")
    fix = shlex.join(["scontrol", "show", "hostnames", nodes])
    raise UserError(Problem("slurm.hostnames", what, allowed, [fix]), Exit.RESOURCES)


def nodes_of(number: str) -> list[str]:
    """The nodes that the job has now; [] without an answer."""
    found = re.search(r" NodeList=(\S+)", controller.ask("show", "job", "-o", number).out)
    return controller.hostnames(found[1])[0] if found else []


def other_node(
    frozen: FrozenJob,
    first: str,
    address: tuple[str, int],
    launch: list[str],
    environ: Mapping[str, str],
) -> int:
    """On a node other than the `first`: its launcher. If the batch script is lost, which listens at
    `address`, the job is requeued as soon as SLURM has noticed that its node failed. A SIGTERM
    after the end of the launcher is from the batch script, where a firewall closes its port."""
    status = _launched(launch)
    number = environ["SLURM_JOB_ID"]
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, _: told.append(signum))
    while not told and _may_be_lost(address, number):
        left = nodes_of(number)
        if left and first not in left and left[0] == environ["SLURMD_NODENAME"]:
            _end_job(frozen.run, number)
        time.sleep(LOOK_S)
    return 128 - status if status < 0 else status


def _launched(launch: list[str]) -> int:
    """Run the launcher; its status. With proctrack/cgroup, SLURM signals this process alone, and
    otherwise the launcher too, which would take a signal passed on for a second request. A process
    beside it, which the signal ends, shows whether it reaches the launcher."""
    arrived: list[int] = []
    beside = subprocess.Popen(["sleep", FOREVER], stdin=subprocess.DEVNULL)
    for signum in process.STOP_SIGNALS:
        signal.signal(signum, lambda number, _: arrived.append(number))
    launcher = subprocess.Popen(launch)
    try:
        while (status := launcher.poll()) is None:
            time.sleep(TURN_S)
            if not arrived:
                continue
            time.sleep(TURN_S)  # SLURM signals one process after the other
            numbers = list(arrived)
            del arrived[: len(numbers)]  # more may have arrived
            if -(beside.poll() or 0) not in process.STOP_SIGNALS:
                for number in numbers:
                    launcher.send_signal(number)
    finally:
        beside.kill()
        beside.wait()
    return status


def _may_be_lost(address: tuple[str, int], number: str) -> bool:
    """Has the running job perhaps no batch script?"""
    return not _answers(address) and job.state_of(number).name in (job.RUNNING, job.UNKNOWN)


def _answers(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, CONNECT_S).close()
    except OSError:
        return False
    return True


def _end_job(run: RunDir, number: str) -> None:
    """Requeue it; if that is not allowed, its nodes must not stay idle until the time limit."""
    if job.requeue(run, number, job.saved_step(run)):
        subprocess.run(["scancel", number], check=False)
