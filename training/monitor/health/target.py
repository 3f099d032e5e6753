"""Which processes are the ranks, how many there should be, and which run of ours it is, if it is
one."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass, field
from pathlib import Path

from training.core import rundir
from training.core.errors import Exit, Problem, UserError
from training.core.jsonl import Record, dig, items, read_object, text, whole
from training.core.rundir import RunDir
from training.monitor.health.options import COMMAND
from training.watchdog import discovery
from training.watchdog.probes import procfs

# All that is ever taken from the environment of a process: others may hold secrets.
VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES",
)
_HEARTBEAT = re.compile(r"\s(/\S.*)/heartbeat/rank\d+\.bin$")


@dataclass(frozen=True)
class Target:
    """What is looked at. `world` and `here`: so many ranks there should be, in all and on this
    machine; None: nobody says."""

    run: RunDir | None
    plan: Record  # as its file has it
    pids: dict[int, int]  # rank → pid, of this machine
    world: int | None
    here: int | None
    said_by: str  # who says how many
    # VARIABLES of each rank of this machine
    variables: dict[int, dict[str, str]] = field(default_factory=dict)
    # uuids of this machine's GPUs in the plan, one for each of its ranks
    planned: tuple[str, ...] = ()

    @property
    def beats(self) -> bool:
        """A training of ours publishes every phase; a script that knows nothing of us does not."""
        return self.run is not None and "script" not in self.plan

    @property
    def elsewhere(self) -> tuple[int, ...]:
        """Ranks of other machines, as far as their number tells."""
        if self.world is None or self.here is None or self.here >= self.world:
            return ()
        first = min(self.pids, default=0) - min((self.local(rank) for rank in self.pids), default=0)
        return tuple(rank for rank in range(self.world) if not first <= rank < first + self.here)

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that should be on this machine, and have no process."""
        if self.world is None or self.here is None:
            return ()
        return tuple(
            rank
            for rank in range(self.world)
            if rank not in self.pids and rank not in self.elsewhere
        )

    def local(self, rank: int) -> int:
        """Which of this machine's ranks it is."""
        text = self.variables.get(rank, {}).get("LOCAL_RANK", "")
        return int(text) if text.isdecimal() else sorted(self.pids).index(rank)


def variables(pid: int) -> dict[str, str]:
    """Those of VARIABLES that the process was started with."""
    found = procfs.environment(pid)
    return {name: found[name] for name in VARIABLES if name in found}


def of_run(run: RunDir) -> Target:
    """A run with living ranks. Raises UserError when none lives on this machine."""
    plan = read_object(run.plan) or {}
    pids = discovery.of_run(run.path)
    own, world = _own_plan(run, set(pids.values())) or plan, whole(plan.get("ranks"))
    # where SLURM starts each rank, each has planned for itself
    here = max(whole(own.get("local_ranks")) or world or 0, len(pids))
    told = {rank: variables(pid) for rank, pid in pids.items()}
    planned = tuple(text(dig(gpu, "uuid")) or "" for gpu in items(own.get("gpus")))
    return Target(run, plan, pids, world, here, "plan.json", told, planned)


def other_host(run: RunDir) -> str | None:
    """The machine where it was started, when that is another one than this."""
    host = text((rundir.read_json(run.supervisor) or {}).get("host"))
    return host if host and host != socket.gethostname() else None


def elsewhere(run: RunDir) -> Target:
    """A run without a rank on this machine: its folder may be shared, and the heartbeats in it."""
    plan = read_object(run.plan) or {}
    return Target(run, plan, {}, whole(plan.get("ranks")), 0, "plan.json")


def of_process(pid: int) -> Target:
    """The training to which this process belongs; a run of ours is recognised. Raises UserError."""
    try:
        pids = discovery.of_process(pid)
    except UserError as error:
        protected = procfs.read_process(pid) is not None and not os.access(
            f"/proc/{pid}/environ", os.R_OK
        )
        raise UserError(
            [_ours(problem) for problem in error.problems],
            Exit.RESOURCES if protected else error.code,
        ) from None
    for process in pids.values():
        if (run := _run_of(process)) is not None:
            return of_run(run)
    told = {rank: variables(process) for rank, process in pids.items()}
    world, here = (_most(told, name) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if world is None:
        return Target(None, {}, pids, None, None, "nobody", told)
    if here is None and (
        len(pids) >= world or all(_is_here(v.get("MASTER_ADDR", "")) for v in told.values())
    ):
        here = world
    return Target(None, {}, pids, world, here, "WORLD_SIZE", told)


def _most(told: dict[int, dict[str, str]], name: str) -> int | None:
    return max((int(v[name]) for v in told.values() if v.get(name, "").isdecimal()), default=None)


def _is_here(address: str) -> bool:
    """Do the ranks meet where only those of this machine can?"""
    return address in ("localhost", "::1", socket.gethostname()) or address.startswith("127.")


def _own_plan(run: RunDir, pids: set[int]) -> Record | None:
    """What this machine has decided itself: of several, each has a folder of its own."""
    for file in run.path.glob("node*/supervisor.json"):
        listed = {
            whole(dig(entry, "pid")) for entry in (rundir.read_json(file) or {}).get("ranks", [])
        }
        if pids & listed:
            return read_object(file.parent / "plan.json")
    return None


def _run_of(pid: int) -> RunDir | None:
    """A rank of ours has its heartbeat in its memory."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return None
    found = next((match for line in lines if (match := _HEARTBEAT.search(line))), None)
    run = RunDir(found[1]) if found else None
    return run if run and run.plan.exists() else None


def _ours(problem: Problem) -> Problem:
    fixes = [fix.replace(discovery.COMMAND, COMMAND) for fix in problem.fixes]
    return Problem(problem.code, problem.what, problem.allowed, fixes)
