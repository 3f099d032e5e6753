"""The command that continues a run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from training.core import find_run, rundir
from training.core.project import LAUNCH_SCRIPT, SUBMIT_SCRIPT, typed

if TYPE_CHECKING:
    from training.core.contracts.kinds import FieldValues
    from training.core.contracts.plan import PlaceRecord, Plan
    from training.core.contracts.run_files import JobRecord


# Fields of a start on several machines, which is typed with the number of ranks of one machine.
HOSTS = ("hosts", "hostfile", "ssh_args")
BY_HAND = ("nnodes", "node_rank", "master_addr", "master_port")


def next_command(plan: Plan, run: rundir.RunDir, **changes: object) -> str:
    """The command that resumes `run`, with flags from `changes`. The run keeps its configuration,
    so the command is short."""
    if job := submission_of(plan, run):
        name = str(run.path.absolute()) if "/" in job["name"] else known_as(plan, run)
        return submit_command({**job, "name": name}, **_all_ranks(plan) | changes)
    script, origins = plan["command"]["script"], plan["origins"]
    by_hand = BY_HAND if plan["config"].get("nnodes", 1) > 1 else ()
    machines = [n for n in (*HOSTS, *by_hand) if origins.get(n, "default") != "default"]
    elastic, place = plan.get("elastic"), plan.get("place") or {}
    # also of nodes that a scheduler or a platform has counted
    several = bool(machines) or place.get("nnodes", 1) > 1
    if elastic:  # some of its ranks may be lost
        ranks = elastic.get("per_node", elastic["ranks"]) if several else elastic["ranks"]
    else:
        ranks = plan["local_ranks"] if several else plan["ranks"]
    program = {
        LAUNCH_SCRIPT: f"./{LAUNCH_SCRIPT} {ranks}",
        "train.py": _of_ranks(plan["ranks"], place),
    }.get(script, f"./{script}")
    named = _is_named(plan, run)
    folders = ("out_dir", "log_dir") if named else ("log_dir",)
    kept = [n for n in folders if origins[n] != "default"] + machines
    flags = {n: plan["config"][n] for n in kept}
    if elastic and (order := elastic.get("hosts")):
        flags.pop("hostfile", None)
        flags["hosts"] = order
    flags["resume"] = known_as(plan, run)
    flags |= _all_ranks(plan)
    if by_hand and place.get("leader"):  # it has taken over the run
        flags |= {"node_rank": 0, "master_addr": place["master_addr"]}
    return typed(_with_flags(program, flags | changes))


def submission_of(plan: Plan, run: rundir.RunDir) -> JobRecord | None:
    """The SLURM job that trains by this plan; None without one, or if its record is gone."""
    name = plan.get("submission")
    return cast("JobRecord | None", rundir.read_json(run.path / f"{name}.json")) if name else None


def submit_command(job: JobRecord, **changes: object) -> str:
    """The command that submits another job, which resumes the run of this one."""
    program = f"./{SUBMIT_SCRIPT} {shlex.join([*job['typed'], *job.get('again', [])])}".rstrip()
    return typed(_with_flags(program, {"resume": job["name"]} | changes))


def _with_flags(program: str, flags: Mapping[str, object]) -> str:
    return " ".join([program, *(f"--{n}={shlex.quote(str(value))}" for n, value in flags.items())])


def _of_ranks(ranks: int, place: PlaceRecord | Mapping[str, Any]) -> str:
    """The start of train.py, whose ranks another launcher has started."""
    if ranks == 1:
        return "python train.py"
    if place.get("source") == "slurm":
        return "srun python -u train.py"
    if place.get("kind") == "node":  # it starts its ranks itself
        return "python train.py"
    local = place.get("local_world_size", 0)  # 0: unknown
    nodes = f"--nnodes={ranks // local} " if 0 < local < ranks else ""
    return f"torchrun {nodes}--nproc_per_node={local if nodes else ranks} train.py"


def known_as(plan: Plan, run: rundir.RunDir) -> str:
    """What selects the run: its name beside --out_dir, or its path."""
    return run.name if _is_named(plan, run) else str(run.path.absolute())


def _is_named(plan: Plan, run: rundir.RunDir) -> bool:
    """Whether its name selects the run: it is in the folder of its plan, from which it may have
    been moved or copied. An archived one is resumed where it was trained."""
    default = plan["origins"]["out_dir"] == "default"
    typed = find_run.EXPERIMENTS if default else plan["config"]["out_dir"]
    folder = find_run.folder(typed, default=default)
    return run.is_archived or run.path.parent.resolve() == folder.resolve()


def _all_ranks(plan: Plan) -> FieldValues:
    """Flags of a start with all planned ranks, if some were lost: the smaller device_batch_size of
    fewer ranks may not divide the batch of all of them."""
    config, elastic = plan["config"], plan.get("elastic")
    if not elastic or not elastic["lost"]:
        return {}
    flags: FieldValues = {"min_ranks": elastic["min_ranks"]}
    size = elastic["device_batch_size"]
    if size is not None and size != config["device_batch_size"]:
        flags["device_batch_size"] = size
    return flags
