"""Detection of this process's role: alone, one node of several, or a rank started by another
launcher. Ranks are never started inside a rank.

Checked in this order: --hosts; torchrun; a platform that injects ranks; mpirun; a platform that
injects nodes; a SLURM step; SkyPilot; an Indexed Job of Kubernetes; --nnodes. Otherwise the role is
local, and variables of other launchers are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping

from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.host import hosts, mpi_env, platform_env, slurm_env
from training.host.placement import (
    DEFAULT_PORT,
    LOCAL,
    LOOPBACK,
    NODE,
    OFF,
    RANK,
    LauncherOptions,
    Topology,
    inside,
    numbers,
)

# Variables of a rank; removed from the environment of other child processes.
RANK_VARIABLES = (
    *(
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "ROLE_RANK",
        "NODE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    ),
    *("GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    hosts.VARIABLE,
)
RANK_PREFIXES = ("PET_", "TORCHELASTIC_")


def belongs_to_a_launcher(name: str) -> bool:
    return name in RANK_VARIABLES or name.startswith(RANK_PREFIXES)


def leftovers(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Launcher variables in `environ`; in a local run they come from a shell profile or an outer
    run."""
    return tuple(sorted(name for name in environ if belongs_to_a_launcher(name)))


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not belongs_to_a_launcher(name)}


def find(
    environ: Mapping[str, str],
    asked: LauncherOptions,
    *,
    starts_ranks: bool,
    several_gpus: bool = False,
) -> Topology:
    """`starts_ranks`: the caller is a launch script, which can start ranks; train.py starts them
    only if a platform assigns it a whole node (`several_gpus`: this machine has more than one).
    Raises UserError for inconsistent variables."""
    if hosts.given(asked):
        return hosts.find(environ, asked, starts_ranks=starts_ranks)
    if asked.launcher == "slurm":
        return slurm_env.rank(environ, asked, msg("host.place.asked_slurm"))
    if asked.launcher == "env":
        return _rank(environ, "platform", msg("host.place.asked_env"))
    if asked.launcher in ("spawn", "torchrun"):
        return _own(environ, asked, msg("host.place.asked", launcher=asked.launcher))
    has = {name for name in RANK_VARIABLES if environ.get(name)}
    if "TORCHELASTIC_RUN_ID" in environ and {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= has:
        return _rank(environ, "torchrun", msg("host.place.torchrun"))
    whole = {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= has and environ["WORLD_SIZE"] != "1"
    if whole and "LOCAL_RANK" in has:
        return _rank(environ, "platform", msg("host.place.platform"))
    if mpi := mpi_env.process(environ):
        one_per_node = mpi.one_per_node and (starts_ranks or several_gpus)
        return (mpi_env.node if one_per_node else mpi_env.rank)(environ, asked, mpi)
    if found := platform_env.torchrun_nodes(environ, asked.master_addr):
        if found[1] == 1:  # WORLD_SIZE counts the ranks of this machine
            return _own(environ, asked, "")
        return platform_env.torchrun_node(environ, asked, found)
    step = slurm_env.tasks(environ)
    if whole and step and not step.one_per_node and environ["WORLD_SIZE"] == str(step.tasks):
        reason = msg("host.place.slurm_tasks", tasks=step.tasks)  # RANK counts tasks
        return slurm_env.rank(environ, slurm_env.with_address(environ, asked), reason, "RANK")
    if whole:
        return _injected_node(environ, asked)
    if step:
        if step.one_per_node and (starts_ranks or several_gpus):
            return slurm_env.node(environ, asked, step)
        return slurm_env.rank(environ, asked, msg("host.place.slurm_tasks", tasks=step.tasks))
    if place := platform_env.node(environ, asked):
        return place
    platform_env.complete(environ, asked)
    return _own(environ, asked, "")


def _own(environ: Mapping[str, str], asked: LauncherOptions, reason: str) -> Topology:
    """Duet starts the ranks: on this machine only, or as one of several nodes given by flags.
    `reason`: "" if not requested."""
    left = leftovers(environ)
    if asked.nnodes == 1:
        reason = reason or msg("host.place.not_started")
        return Topology(LOCAL, "nobody", reason, leftovers=left)  # language: quoted
    problems = []
    if not asked.master_addr:
        fix = msg("host.place.first_machine")
        problems.append(
            Problem(
                "nodes.no_master_addr",
                msg("host.place.no_master_addr", nnodes=asked.nnodes),
                msg("host.place.address_of_node_0"),
                [fix],
            )
        )
    if asked.node_rank >= asked.nnodes:
        problems.append(
            Problem(
                "nodes.node_rank",
                msg("host.place.node_rank", node_rank=asked.node_rank, nnodes=asked.nnodes),
                msg("host.place.node_ranks", last=asked.nnodes - 1),
                [f"--node_rank={asked.nnodes - 1}"],
            )
        )
    if problems:
        raise UserError(problems)
    why = (
        msg("host.place.machines_why", nnodes=asked.nnodes, reason=reason)
        if reason
        else msg("host.place.machines", nnodes=asked.nnodes)
    )
    return Topology(
        NODE,
        "flags",
        why,
        nnodes=asked.nnodes,
        node_rank=asked.node_rank,
        master_addr=asked.master_addr,
        master_port=asked.master_port or DEFAULT_PORT,
        leftovers=left,
    )


def _rank(environ: Mapping[str, str], source: str, reason: str) -> Topology:
    found = numbers(environ, ("RANK", "LOCAL_RANK", "WORLD_SIZE"), reason)
    rank, local_rank, size = found
    local = environ.get("LOCAL_WORLD_SIZE", "")
    address = environ.get("MASTER_ADDR", "")
    inside("RANK", rank, "WORLD_SIZE", size)
    if size > 1 and not (address and environ.get("MASTER_PORT", "").isdecimal()):
        lacking = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)] or [
            "MASTER_PORT"
        ]
        raise UserError(
            Problem(
                "environment.rank_missing",
                msg("host.place.both_missing", reason=reason, first=lacking[0], second=lacking[1])
                if len(lacking) > 1
                else msg("host.place.one_missing", reason=reason, name=lacking[0]),
                msg("host.place.address_and_port"),
                [f"export MASTER_PORT={DEFAULT_PORT}", msg("host.place.start_here", OFF=OFF)],
            )
        )
    local_size = (
        int(local)
        if local.isdecimal()
        else size
        if address in (LOOPBACK, "localhost", "::1")
        else 0
    )
    port = int(environ["MASTER_PORT"]) if size > 1 else 0
    return Topology(
        RANK,
        source,
        reason,
        rank,
        local_rank,
        size,
        local_size,
        master_addr=address,
        master_port=port,
    )


def _injected_node(environ: Mapping[str, str], asked: LauncherOptions) -> Topology:
    """RANK and WORLD_SIZE without LOCAL_RANK count nodes (PyTorchJob of Kubeflow, and similar
    platforms)."""
    reason = msg("host.place.node_ranks_injected")
    node, nodes = numbers(environ, ("RANK", "WORLD_SIZE"), reason)
    inside("RANK", node, "WORLD_SIZE", nodes)
    port = environ.get("MASTER_PORT", "")
    return Topology(
        NODE,
        "platform",
        reason,
        nnodes=nodes,
        node_rank=node,
        master_addr=asked.master_addr or environ["MASTER_ADDR"],
        master_port=asked.master_port
        or (int(port) if port.isdecimal() and int(port) else DEFAULT_PORT),
    )
