"""Cheap checks before every start for problems that would end the run or slow it down."""

from __future__ import annotations

import os
import shutil
import tempfile
import time

from training.config import resolve
from training.core import log, rundir, standing, units
from training.core.jsonl import mtime
from training.core.messages import msg
from training.host import cgroups, decisions, ports, process
from training.plan import running
from training.plan.preflight.report import ERROR, OK, WARNING, Check
from training.plan.request import LaunchRequest
from training.tasks import memory
from training.tasks.memory import StepNeeds

WORKER_SHM_BYTES = 64 << 20
NCCL_SHM_BYTES = 256 << 20  # without peer-to-peer copies; containers get 64 MiB by default
RANK_FILES, WORKER_FILES = 256, 32
# A run that is running writes at least that often, unless its steps are longer.
WRITTEN_S, POLL_S = 60.0, 0.5


def not_running(run: rundir.RunDir, *, waits: bool, launch: str | None = None) -> list[Check]:
    """The run to resume is not running: two starts would overwrite each other's files.
    `waits`: also until it is clear whether another machine runs it, unlike a dry run. `launch`: of
    the plan when it was read; another one by now is that of a start on another machine."""
    if pid := running.pid_of(run):
        text = msg("plan.run.still_running", name=run.name, pid=pid)
        return [Check("run", ERROR, text, running.fixes(run, pid))]
    if resolve.RESTARTED in os.environ:  # torchrun has ended its ranks, on all machines
        return []
    plan = rundir.read_json(run.plan) or {}
    # under torchrun or srun there is no supervisor
    host = standing.other_host(plan, standing.supervisor_of(run, plan))
    if not host or run.is_archived or standing.has_ended(run, plan):
        return []
    if launch is not None and launch != plan.get("launch", ""):
        return [_runs_on(run, host)]
    return _not_elsewhere(run, host, waits=waits)


def _not_elsewhere(run: rundir.RunDir, host: str, *, waits: bool) -> list[Check]:
    """The processes of another machine cannot be seen, what they write on a common disk can. One
    that was killed, as in a job that is requeued, writes no more."""
    written = _written(run)
    since = max(0.0, time.time() - written)  # the clocks may differ
    if since > WRITTEN_S and written:
        since = max(0.0, _disk_time(run) - written)
    if since > WRITTEN_S:
        return []
    text = msg("plan.run.written_elsewhere", name=run.name, seconds=since, host=host)
    if not waits:
        return [Check("run", WARNING, text, [running.monitor(run)])]
    log.info(msg("plan.run.waits", text=text, seconds=WRITTEN_S - since))
    end = time.monotonic() + WRITTEN_S - since
    with process.stoppable():
        while time.monotonic() < end and _written(run) == written:
            time.sleep(POLL_S)
    return [] if _written(run) == written else [_runs_on(run, host)]


def _runs_on(run: rundir.RunDir, host: str) -> Check:
    text = msg("plan.run.runs_on", name=run.name, host=host)
    return Check("run", ERROR, text, [running.monitor(run)])


def _disk_time(run: rundir.RunDir) -> float:
    """The time by the clock of the run's disk, as of a server (NFS); else of this machine."""
    try:
        with tempfile.TemporaryFile(dir=run.path) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


def _written(run: rundir.RunDir) -> float:
    files = (*standing.written_files(run), *run.heartbeats.glob("*.bin"))
    return max(mtime(file) or 0.0 for file in files)


def host_memory(
    room: int | None, estimate: memory.Estimate, request: LaunchRequest, smaller: list[str]
) -> Check:
    """Host memory for training on the CPU."""
    ranks, limit = request.local_ranks, cgroups.says_who()
    shown = (
        msg("plan.memory.free_each", room=memory.gib(room), ranks=ranks)
        if ranks > 1
        else msg("plan.memory.free", room=memory.gib(room))
    )
    if room is not None and room < estimate.needed:
        fixes = smaller or [msg("plan.memory.larger", needed=memory.gib(ranks * estimate.needed))]
        return Check(
            "host memory",
            ERROR,
            msg("plan.memory.needs", shown=shown, needed=memory.gib(estimate.needed), limit=limit),
            fixes,
        )
    if room is not None and room < estimate.tight:
        return Check(
            "host memory",
            WARNING,
            # a step is measured after these checks; what it may need is then in that check alone
            msg("plan.memory.tight_step", shown=shown, limit=limit)
            if request.check
            else msg(
                "plan.memory.tight", shown=shown, tight=memory.gib(estimate.tight), limit=limit
            ),
        )
    return Check(
        "host memory",
        OK,
        msg("plan.memory.fits", shown=shown, needed=memory.gib(estimate.needed), limit=limit),
    )


def shared_memory(num_workers: int, ranks: int, nccl: bool = False) -> Check | None:
    """Room in /dev/shm, used by data-loader workers, and by NCCL without peer-to-peer copies."""
    workers = num_workers * ranks
    nccl = nccl and ranks > 1
    if not (workers or nccl) or not os.path.isdir("/dev/shm"):
        return None
    free, needed = (
        shutil.disk_usage("/dev/shm").free,
        max(workers * WORKER_SHM_BYTES, NCCL_SHM_BYTES if nccl else 0),
    )
    if free < needed:
        users = units.plural(workers, "worker")
        if nccl:
            between = msg("plan.shm.nccl", ranks=ranks)
            users = msg("plan.word.and", first=users, second=between) if workers else between
        container = msg("plan.shm.container")
        fixes = [
            f"docker run --shm-size=8g …   # {container}",
            "sudo mount -o remount,size=8g /dev/shm",
        ]
        return Check(
            "/dev/shm",
            WARNING,
            msg("plan.shm.free_for", free=memory.gib(free), users=users),
            (["--num_workers=0"] if workers else []) + fixes,
        )
    return Check("/dev/shm", OK, msg("plan.memory.free", room=memory.gib(free)))


def open_files(num_workers: int, ranks: int) -> Check:
    """The limit of open files: a rank with torch, data and trackers opens some hundred, the
    supervisor several per rank."""
    most, raisable = cgroups.open_files()
    needed = max(RANK_FILES + WORKER_FILES * num_workers, 64 + 8 * ranks)
    if most >= needed:
        return Check(
            "open files",
            OK,
            msg("plan.files.no_limit")
            if most >= cgroups.UNLIMITED
            else msg("plan.files.limit", most=most),
        )
    fix = f"ulimit -n {min(4096, raisable)}" if raisable >= needed else msg("plan.files.raise")
    return Check("open files", WARNING, msg("plan.files.too_few", most=most, needed=needed), [fix])


def ram_beside_gpus(
    estimate: memory.Estimate, step: StepNeeds | None, ranks: int, *, resumes: bool
) -> Check:
    """Host memory for training on GPUs: torch, and rank 0's copy of a checkpoint during a save. To
    resume, each rank first reads a whole checkpoint."""
    free = cgroups.available_memory()
    whole = step.stored if step else estimate.parameters + estimate.optimizer
    copies = max(step.saving if step else whole, ranks * whole if resumes else 0)
    needed = ranks * decisions.RANK_RAM_BYTES + copies
    if free < needed:
        text = msg(
            "plan.memory.beside_limit",
            free=memory.gib(free),
            needed=memory.gib(needed),
            limit=cgroups.says_who(),
        )
        return Check(
            "host memory",
            WARNING,
            text,
            [msg("plan.memory.close_programs"), msg("plan.memory.more")],
        )
    return Check(
        "host memory",
        OK,
        msg("plan.memory.beside", free=memory.gib(free), needed=memory.gib(needed)),
    )


def port(wanted: int) -> tuple[int, Check | None]:
    """The master port, or the next free one if it is in use. 0: any."""
    if not wanted or ports.is_free(wanted):
        return wanted, None
    owner, other = ports.owner(wanted), ports.next_free(wanted)
    if other is None:
        tries = len(ports.following(wanted)) - 1
        text = msg("plan.port.all_taken", wanted=wanted, owner=owner, tries=tries)
        return wanted, Check("port", ERROR, text, [msg("plan.port.omit")])
    return other, Check(
        "port", WARNING, msg("plan.port.taken", wanted=wanted, owner=owner, other=other)
    )
