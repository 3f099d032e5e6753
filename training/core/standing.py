"""Selection of a run's valid plan and results. A resume keeps those of the previous start until it
has its own; if it ends before its first step, the previous ones remain valid.

Needs only the standard library: the command line is checked before anything is installed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

from training.core import run_reader, rundir
from training.core.jsonl import Record, mtime, number, read_figures
from training.core.messages import msg

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan, StarterRecord
    from training.core.contracts.run_files import SummaryRecord, SupervisorRecord
    from training.core.contracts.verdict import FailureRecord

STARTED_WITHIN_S = 60.0  # a supervisor writes its PID soon after its start
# A run on another machine, whose processes cannot be checked, counts as active until it has written
# nothing for this time.
ELSEWHERE_S = 24 * 3600.0
PID_NAMESPACE = Path("/proc/self/ns/pid")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
TICKS = 19  # starttime in proc_pid_stat(5), without the first two fields
TAIL = 1 << 16  # bytes of metrics.jsonl


def plan_file(run: rundir.RunDir) -> Path:
    """plan.json, or the previous plan if a resume has ended without a step."""
    # os.path, since Path raises for names that the file system rejects.
    plan = rundir.read_json(run.plan) if os.path.exists(run.plan_before) else None
    if plan is None:
        return run.plan
    created = number(plan.get("created", 0.0))
    if created is None:  # damaged
        return run.plan
    lives = has_stepped(run, plan, created) or _may_live(run, plan, created)
    # A copy of an earlier version may have been cut by a power failure.
    return run.plan if lives or rundir.read_json(run.plan_before) is None else run.plan_before


def data_file(run: rundir.RunDir) -> Path:
    """data.json of the same start."""
    return run.data_before if plan_file(run) == run.plan_before else run.data


def read_plan(run: rundir.RunDir) -> Plan | None:
    """The valid plan. Raises UserError for a plan of a later version."""
    return run_reader.read_plan(plan_file(run))


def plan_of_start(run: rundir.RunDir | None) -> Plan | None:
    """As read_plan(), but None for the plan of a SLURM job before its first start, which has
    decided nothing yet."""
    plan = read_plan(run) if run else None
    return plan if plan and "device" in plan else None


def is_frozen(plan: Mapping[str, object] | None) -> bool:
    """Whether this is the plan of a SLURM job before its first start."""
    return plan is not None and "submission" in plan and "device" not in plan


def log_file(run: rundir.RunDir, plan: Mapping[str, object] | None) -> Path | None:
    """The log of the launch; None if it is unknown, or a path of the machine that an archive is
    from: here that may be any file."""
    name = (plan or {}).get("log_file")
    return Path(name) if name and isinstance(name, str) and not run.is_archived else None


def ends(run: rundir.RunDir) -> tuple[SummaryRecord | None, FailureRecord | None]:
    """(summary, failure) of the start with the valid plan; those of earlier starts are ignored."""
    plan = rundir.read_json(plan_file(run)) or {}
    found = ends_of(run, plan, number(plan.get("created")) or 0.0)
    return cast("tuple[SummaryRecord | None, FailureRecord | None]", found)


def ends_of(run: rundir.RunDir, plan: Record, since: float) -> tuple[Record | None, Record | None]:
    """(summary, failure) of the start of `plan`. `since`: as in is_of_start."""
    summary, failure = (
        record
        if (record := read_figures(file)) and rundir.is_of_start(record, plan, file, since)
        else None
        for file in (run.summary, run.failure)
    )
    return summary, failure


def has_ended(run: rundir.RunDir, plan: Record) -> bool:
    """Whether the start of `plan`, as in plan.json, has ended; an earlier one may have."""
    return any(ends_of(run, plan, number(plan.get("created")) or 0.0))


def launch_of(run: rundir.RunDir) -> str:
    """The ID of the newest start; '' where it has none, as a SLURM job that waits."""
    return str((rundir.read_json(run.plan) or {}).get("launch", ""))


def supervisor_of(run: rundir.RunDir, plan: Mapping[str, object]) -> Record:
    """supervisor.json of the start of `plan`; {} if it is of an earlier one."""
    return _of_start(run.supervisor, plan)


def _of_start(file: Path, plan: Mapping[str, object]) -> Record:
    record = rundir.read_json(file) or {}
    started, created = number(record.get("started")) or 0.0, number(plan.get("created")) or 0.0
    own, wanted = record.get("launch"), plan.get("launch")
    return record if (own == wanted if own and wanted else started >= created) else {}


def supervisors(run: rundir.RunDir, plan: Record, supervisor: Record) -> list[tuple[Path, Record]]:
    """The supervisor.json of all machines with this disk, with their files, the newest last.
    `supervisor`: that of the first machine."""
    found = [(run.supervisor, supervisor)] if supervisor else []
    for file in run.path.glob("node*/supervisor.json"):
        if record := _of_start(file, plan):
            found.append((file, record))
    return sorted(found, key=lambda pair: mtime(pair[0]) or 0.0)


def other_host(plan: Record | None, supervisor: Record) -> str | None:
    """The machine or container that started the run, if it is another one: its processes cannot be
    checked."""
    known = supervisor if supervisor.get("host") else (plan or {}).get("starter")
    return elsewhere(known) if isinstance(known, dict) else None


def elsewhere(known: Mapping[str, object]) -> str | None:
    """Where a process (`pid`, `host`, …) is whose PID is not one of this process's machine and PID
    namespace. Containers may have the host name of their machine, and two machines the same one:
    what was started after this one has booted, under another boot, is not of this machine."""
    host = known.get("host")
    if not isinstance(host, str):
        return None
    if host != os.uname().nodename:
        return host
    boot, booted = known.get("boot"), time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    if boot and boot != boot_id() and (number(known.get("started")) or 0.0) > booted:
        return msg("core.standing.namesake", host=host)
    namespace = known.get("pid_namespace")
    if namespace is None or namespace == pid_namespace():
        return None
    return msg("core.standing.namespace", host=host)


def is_here(known: Mapping[str, object]) -> bool:
    """Whether the PID of a process is one of this machine and PID namespace."""
    return isinstance(known.get("host"), str) and elsewhere(known) is None


def pid_namespace() -> str:
    """Of this process; empty without /proc."""
    try:
        return str(PID_NAMESPACE.readlink())
    except OSError:
        return ""


def boot_id() -> str:
    """Of this boot of this machine; empty without /proc."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def lives(supervisor: SupervisorRecord) -> bool:
    return runs_here(supervisor, number(supervisor.get("started")) or 0.0)


def is_active(run: rundir.RunDir, supervisor: SupervisorRecord) -> bool:
    """Whether a run without a recorded end is still running, as far as this machine can know."""
    if run.is_archived:
        return False
    if elsewhere(supervisor):
        return quiet_s(run) < ELSEWHERE_S
    return lives(supervisor) and not is_copy(run, rundir.read_json(run.plan))


def quiet_s(run: rundir.RunDir) -> float:
    """The time since a run has written anything."""
    from training.core import heartbeat

    written = [mtime(file) or 0.0 for file in written_files(run)]
    written += [beat.wall_time for beat in heartbeat.read_all(run.heartbeats)]
    return max(0.0, time.time() - max(written))


def written_files(run: rundir.RunDir) -> list[Path]:
    """The files that a run writes from its start on, apart from its heartbeats."""
    return [run.plan, run.metrics, run.events, run.supervisor, *run.ranks.glob("*.log")]


def identity(pid: int) -> StarterRecord:
    """A process of this machine, as runs_here recognises it, also if it has ended by now."""
    ticks = 0
    with suppress(OSError, ValueError, IndexError):
        ticks = int(_fields(pid)[TICKS])
    return {
        "pid": pid,
        "host": os.uname().nodename,
        "boot": boot_id(),
        "pid_namespace": pid_namespace(),
        "ticks": ticks,
    }


def starter(run: rundir.RunDir) -> int | None:
    """PID of the process that was given the newest plan, while it lives on this machine and that
    start has not ended: soon its supervisor, or rank 0 of another launcher."""
    plan = rundir.read_json(run.plan) or {}
    known, created = plan.get("starter"), number(plan.get("created")) or 0.0
    if not isinstance(known, dict) or not is_here(known):
        return None
    if not runs_here(known, created) or has_ended(run, plan):
        return None
    return None if is_copy(run, plan) else int(known["pid"])


def is_copy(run: rundir.RunDir, plan: Mapping[str, object] | None) -> bool:
    """Whether the files of the run were copied from a run that still exists, so that the processes
    on this machine that they name are not its own. A run that was moved keeps them."""
    origin = (plan or {}).get("run_dir")
    if not isinstance(origin, str) or run.is_archived or str(run.path) == origin:
        return False
    try:
        if run.path.samefile(origin):
            return False
    except (OSError, ValueError):
        return False
    there = rundir.read_json(rundir.RunDir(Path(origin)).plan)
    # else another run has the name of this one, which was moved
    return (there or {}).get("created") == (plan or {}).get("created")


def runs_here(known: Mapping[str, object], since: float) -> bool:
    """Whether a process (`pid`, `host`), known since `since` (unix s), is alive and its PID was not
    reused. True for one of another machine or container, which cannot be checked."""
    if not is_here(known):
        return True
    try:
        pid = int(str(known["pid"]))
        fields = _fields(pid)
        if fields[0] in ("Z", "X"):
            return False
        if "ticks" in known:  # unlike a time, they do not move with the clock
            return int(fields[TICKS]) == known["ticks"]
        began = Path(f"/proc/{pid}").stat().st_ctime
    except (OSError, KeyError, ValueError, IndexError):
        return False
    return began <= since + STARTED_WITHIN_S


def _fields(pid: int) -> list[str]:
    """Of /proc/PID/stat, from the state on."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return text.rpartition(")")[2].split()


def has_stepped(run: rundir.RunDir, plan: Mapping[str, object], created: float) -> bool:
    """Whether the start of `plan`, made at `created` (unix s), has completed a step: by its
    heartbeats, since the clock may have been set back, or by a step recorded since then."""
    from training.core import heartbeat

    # the heartbeats of an earlier start are removed before ranks are started
    of_start = supervisor_of(run, plan).get("ranks")
    beats = heartbeat.read_all(run.heartbeats) if of_start else []
    return any(beat.stepped for beat in beats) or _stepped_since(run, created)


def _stepped_since(run: rundir.RunDir, since: float) -> bool:
    """Whether a step was recorded at or after `since` (unix s)."""
    try:
        with run.metrics.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            lines = file.read().splitlines()
    except OSError:
        return False
    for line in reversed(lines):
        try:
            record = json.loads(line)
            return float(record["time"]) >= since
        except (ValueError, KeyError, TypeError):  # cut in the middle
            continue
    return False


def _may_live(run: rundir.RunDir, plan: Record, created: float) -> bool:
    """Whether the start of `plan`, made at `created` (unix s), may be alive: True for the first
    STARTED_WITHIN_S without a supervisor or a rank."""
    if supervisor := supervisor_of(run, plan):
        return lives(cast("SupervisorRecord", supervisor))
    if (alive := ranks_may_live(run, plan, created)) is not None:
        return alive
    known = plan.get("starter")
    if isinstance(known, dict) and not runs_here(known, created):
        return False  # the launch script was killed before it became the supervisor
    return time.time() - created < STARTED_WITHIN_S


def ranks_may_live(run: rundir.RunDir, plan: Record, created: float) -> bool | None:
    """Whether ranks of the start of `plan`, made at `created` (unix s), may be alive if no
    supervisor lists them, as under another launcher; None without any."""
    from training.core import heartbeat

    beats = [beat for beat in heartbeat.read_all(run.heartbeats) if beat.wall_time >= created]
    if not beats:
        return None
    if other_host(plan, {}):
        return True
    here = any(os.path.exists(f"/proc/{beat.pid}") for beat in beats)
    return here and not is_copy(run, plan)
