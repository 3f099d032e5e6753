"""A launcher for a user script, started in a process that another launcher has made a rank."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping

from training.config import flags
from training.core.errors import Problem
from training.core.messages import msg
from training.host import mpi_env
from training.host.placement import Topology
from training.plan.cli_args import command
from training.plan.script_words import split


def problem(
    program: str, args: list[str], script: str, place: Topology, environ: Mapping[str, str]
) -> Problem:
    """`script`: its path. The first fix is one launcher for each machine; torchrun and platforms
    give the ranks the variables that a script needs without a launcher."""
    if place.source in (mpi_env.SOURCE, "slurm"):
        fix = _one_per_machine(program, args, place, environ)
    else:
        fix = f"python {shlex.quote(script)} …   # {msg('plan.nested.is_rank')}"
    separate = f"--launcher=spawn   # {msg('plan.nested.separate')}"
    what = msg("plan.nested.script", reason=place.reason)
    return Problem("launch.nested", what, msg("plan.nested.one_launcher"), [fix, separate])


def _one_per_machine(
    program: str, args: list[str], place: Topology, environ: Mapping[str, str]
) -> str:
    local = place.local_world_size
    if not local:  # SLURM: the machines differ
        nodes = environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES", "1")
        local = math.ceil(place.world_size / int(nodes))
    machines = math.ceil(place.world_size / local)
    own = split(args)[0]
    at = next((i for i in range(len(own)) if flags.parse(own[: i + 1]).positional), -1)
    launch = command(program, [*args[: max(0, at)], str(local), *args[at + 1 :]])
    if place.source != mpi_env.SOURCE:
        return f"srun --ntasks={machines} --ntasks-per-node=1 {launch}"
    if machines == 1:
        return f"{launch}   # {msg('plan.nested.without_mpirun')}"
    return f"mpirun -n {machines} {mpi_env.one_per_machine(environ)} … {launch}"
