"""Ranks and nodes of a SLURM step. Only steps of srun have SLURM_STEP_ID; a plain batch script has
SLURM_PROCID=0 too."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace

from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.host import ports
from training.host.placement import LOOPBACK, NODE, RANK, LauncherOptions, Topology, inside, numbers

LIMIT_S = 10


@dataclass(frozen=True)
class SlurmStep:
    tasks: int
    nodes: int

    @property
    def one_per_node(self) -> bool:
        return self.tasks == self.nodes


def tasks(environ: Mapping[str, str]) -> SlurmStep | None:
    """The step of this process; None outside of a step and in a step with a single task (srun --pty
    bash, the shell of salloc)."""
    words = [
        environ.get(name, "")
        for name in ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", _size(environ))
    ]
    if not all(word.isdecimal() for word in words) or words[3] in ("0", "1"):
        return None
    nodes = environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES", "1")
    return SlurmStep(int(words[3]), int(nodes))


def with_address(environ: Mapping[str, str], asked: LauncherOptions) -> LauncherOptions:
    """`asked`, completed by the address that the user has exported for the ranks."""
    port = environ.get("MASTER_PORT", "")
    return replace(
        asked,
        master_addr=asked.master_addr or environ["MASTER_ADDR"],
        master_port=asked.master_port or (int(port) if port.isdecimal() else 0),
    )


def rank(
    environ: Mapping[str, str],
    asked: LauncherOptions,
    reason: str,
    variable: str = "SLURM_PROCID",
) -> Topology:
    """This task is a rank, whose number is in `variable`."""
    of_step = _size(environ)
    number, local_rank, size = numbers(environ, (variable, "SLURM_LOCALID", of_step), reason)
    inside(variable, number, of_step, size)
    nodes = int(environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES", "1"))
    return Topology(
        RANK,
        "slurm",
        reason,
        rank=number,
        local_rank=local_rank,
        world_size=size,
        local_world_size=_tasks_here(environ) or (size if nodes == 1 else 0),
        master_addr=LOOPBACK if nodes == 1 else asked.master_addr or first_node(environ),
        master_port=asked.master_port or port(environ),
    )


def node(environ: Mapping[str, str], asked: LauncherOptions, step: SlurmStep) -> Topology:
    """This task is a node: the ranks are started here."""
    reason = msg("host.place.slurm_nodes", nodes=step.nodes)
    (number,) = numbers(environ, ("SLURM_PROCID",), reason)
    return Topology(
        NODE,
        "slurm",
        reason,
        nnodes=step.nodes,
        node_rank=number,
        master_addr=asked.master_addr or first_node(environ),
        master_port=asked.master_port or port(environ),
    )


def _size(environ: Mapping[str, str]) -> str:
    """The variable with the number of tasks of the step. In the shell of salloc
    (use_interactive_step) SLURM_NTASKS is that of the allocation."""
    return "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"


def _tasks_here(environ: Mapping[str, str]) -> int:
    """Number of tasks on this node, from a list such as '2(x3),1'; 0 if unknown."""
    counts: list[int] = []
    for word in (
        environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    ).split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word)
        if match is None:
            return 0
        counts += [int(match[1])] * int(match[2] or 1)
    index = environ.get("SLURM_NODEID", "")
    return counts[int(index)] if index.isdecimal() and int(index) < len(counts) else 0


def port(environ: Mapping[str, str]) -> int:
    """A port that every node of a step computes alike, different for each job and step."""
    job, step = (environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    number = (int(job) if job.isdecimal() else 0) * 31 + (int(step) if step.isdecimal() else 0)
    return ports.QUIET[number % len(ports.QUIET)]


def first_node(environ: Mapping[str, str]) -> str:
    """The address of the first node of the step, from SLURM since node names need not resolve.
    Raises UserError."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    name = _scontrol("show", "hostnames", nodes).split("\n")[0].strip() or (
        nodes if "[" not in nodes and "," not in nodes else ""
    )
    if not name:
        raise UserError(
            Problem(
                "slurm.first_node",
                msg("host.place.slurm_first_node", nodes=nodes),
                msg("host.place.slurm_address"),
                ["--master_addr=ADDRESS"],
            )
        )
    found = re.search(r"\bNodeAddr=(\S+)", _scontrol("show", "node", name))
    return found[1] if found else name


def _scontrol(*words: str) -> str:
    """The output of scontrol; '' if it is missing or fails."""
    try:
        done = subprocess.run(
            ["scontrol", *words], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
