"""Ranks of a training: their processes, their expected number, and their Duet run, if any."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass, field

from training.core import rundir
from training.core.errors import Problem, UserError
from training.core.jsonl import Record, dig, items, read_object, text, whole
from training.core.rundir import RunDir
from training.host import proc_memory, visible_devices
from training.monitor.health.options import COMMAND
from training.watchdog import discovery
from training.watchdog.probes import procfs

# The only variables taken from the environment of a process: others may hold secrets.
VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
)
_HEARTBEAT = re.compile(r"\s(/\S.*)/heartbeat/rank\d+\.bin$")
_STACKS = re.compile(r"(/.+)/ranks/rank\d+\.stacks$")


@dataclass(frozen=True)
class Target:
    """The training under inspection. `world` and `here`: expected number of ranks, in total and on
    this machine; None: unknown."""

    run: RunDir | None
    plan: Record  # as its file has it
    pids: dict[int, int]  # rank → pid, of this machine
    world: int | None
    here: int | None
    known_by: str  # source of `world`
    # VARIABLES of each rank of this machine
    variables: dict[int, dict[str, str]] = field(default_factory=dict)
    # uuids of this machine's GPUs in the plan, one for each of its ranks
    planned: tuple[str, ...] = ()

    @property
    def beats(self) -> bool:
        """Whether the ranks have heartbeats: those of a Duet task do, those of a user script do
        not."""
        return self.run is not None and "script" not in self.plan

    @property
    def selected(self) -> tuple[str, ...]:
        """UUIDs of the GPUs, or instances of one (MIG), that the plan or the ranks name."""
        lists = (known.get("CUDA_VISIBLE_DEVICES", "") for known in self.variables.values())
        named = (entry for listed in lists for entry in visible_devices.entries(listed))
        return (*self.planned, *(entry for entry in named if isinstance(entry, str)))

    @property
    def elsewhere(self) -> tuple[int, ...]:
        """Ranks of other machines, derived from the rank numbers here."""
        if self.world is None or self.here is None or self.here >= self.world:
            return ()
        first = min(self.pids, default=0) - min((self.local(rank) for rank in self.pids), default=0)
        return tuple(rank for rank in range(self.world) if not first <= rank < first + self.here)

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks expected on this machine that have no process."""
        if self.world is None or self.here is None:
            return ()
        return tuple(
            rank
            for rank in range(self.world)
            if rank not in self.pids and rank not in self.elsewhere
        )

    def local(self, rank: int) -> int:
        """Local rank of `rank` on this machine."""
        text = self.variables.get(rank, {}).get("LOCAL_RANK", "")
        return int(text) if text.isdecimal() else sorted(self.pids).index(rank)


def variables(pid: int) -> dict[str, str]:
    """VARIABLES in the environment of the process."""
    found = procfs.environment(pid)
    return {name: found[name] for name in VARIABLES if name in found}


def of_run(run: RunDir) -> Target:
    """A run with live ranks. Raises UserError if no rank runs on this machine."""
    plan = read_object(run.plan) or {}
    pids = discovery.of_run(run.path)
    own, world = _own_plan(run, set(pids.values())) or plan, whole(plan.get("ranks"))
    # with SLURM's srun each rank has its own plan
    here = max(whole(own.get("local_ranks")) or world or 0, len(pids))
    known = {rank: variables(pid) for rank, pid in pids.items()}
    if world == 1 < len(pids):  # which the script has started itself
        return Target(run, plan, pids, *_expected(known), known)
    planned = tuple(text(dig(gpu, "uuid")) or "" for gpu in items(own.get("gpus")))
    return Target(run, plan, pids, world, here, "plan.json", known, planned)


def elsewhere(run: RunDir) -> Target:
    """A run without a rank on this machine, whose folder (with its heartbeats) may be shared."""
    plan = read_object(run.plan) or {}
    return Target(run, plan, {}, whole(plan.get("ranks")), 0, "plan.json")


def of_process(pid: int) -> Target:
    """The training to which this process belongs, with its Duet run, if any. Raises UserError."""
    try:
        pids = discovery.of_process(pid)
    except UserError as error:
        raise UserError([_for_inspect(one) for one in error.problems], error.code) from None
    for process in pids.values():
        if (run := _run_of(process)) is not None:
            return of_run(run)
    known = {rank: variables(process) for rank, process in pids.items()}
    return Target(None, {}, pids, *_expected(known), known)


def _expected(known: dict[int, dict[str, str]]) -> tuple[int | None, int | None, str]:
    """`world`, `here` and `known_by` of ranks without a plan, by their variables. Those that
    torch.multiprocessing has started inherit the ones of their launcher."""
    world, here = (_most(known, name) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if world is None or world < len(known):
        return None, None, ""
    if here is None and (
        len(known) >= world or all(_is_here(v.get("MASTER_ADDR", "")) for v in known.values())
    ):
        here = world
    return world, here, "WORLD_SIZE"


def _most(known: dict[int, dict[str, str]], name: str) -> int | None:
    return max((int(v[name]) for v in known.values() if v.get(name, "").isdecimal()), default=None)


def _is_here(address: str) -> bool:
    """Whether MASTER_ADDR is reachable only from this machine."""
    return address in ("localhost", "::1", socket.gethostname()) or address.startswith("127.")


def _own_plan(run: RunDir, pids: set[int]) -> Record | None:
    """Plan of this machine: in a run on several machines each has its own folder."""
    for file in run.path.glob("node*/supervisor.json"):
        listed = {
            whole(dig(entry, "pid")) for entry in (rundir.read_json(file) or {}).get("ranks", [])
        }
        if pids & listed:
            return read_object(file.parent / "plan.json")
    return None


def _run_of(pid: int) -> RunDir | None:
    """The run of a rank, found by the heartbeat file that it maps into memory; that of a rank of a
    script by the file for its stacks, which it holds open."""
    try:
        mapped = proc_memory.read(pid, "maps").decode(errors="replace").splitlines()
    except OSError:
        return None
    found = next((match for line in mapped if (match := _HEARTBEAT.search(line))), None) or next(
        (match for file in procfs.open_files(pid) if (match := _STACKS.match(file))), None
    )
    run = RunDir(found[1]) if found else None
    return run if run and run.plan.exists() else None


def _for_inspect(problem: Problem) -> Problem:
    """The problem with fixes for `./duet inspect` instead of `./duet attach`."""
    fixes = [fix.replace(discovery.COMMAND, COMMAND) for fix in problem.fixes]
    return Problem(problem.code, problem.what, problem.allowed, fixes)
