"""Check of the cores for ranks and data-loader workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from training.core import units
from training.core.messages import msg
from training.host import env_vars, mpi_env
from training.host.placement import NODE, Topology
from training.plan.preflight.report import OK, WARNING, Check


def cpu(
    num_workers: int,
    ranks: int,
    place: Topology,
    environ: Mapping[str, str],
    command_with: Callable[[int], str],
) -> Check:
    """A core for each rank and worker of this machine. `command_with`: the user's command for a
    number of ranks."""
    if bound := _bound_by_mpi(num_workers, ranks, place, environ):
        return bound
    cores, workers = env_vars.cores_of_ranks(place, environ), num_workers * ranks
    shown, users = _cores(cores, os.cpu_count() or cores), _users(ranks, workers)
    if ranks > cores:
        text = msg("plan.cpu.shared", ranks=ranks, cores=units.plural(cores, "CPU core"))
        return Check("CPU", WARNING, text, [command_with(cores)])
    if workers > cores:
        return Check(
            "CPU",
            WARNING,
            msg("plan.cpu.more_workers", shown=shown, users=users),
            [f"--num_workers={max(0, cores // ranks - 1)}"],
        )
    return Check("CPU", OK, msg("plan.cpu.fits", shown=shown, users=users))


def _bound_by_mpi(
    num_workers: int, ranks: int, place: Topology, environ: Mapping[str, str]
) -> Check | None:
    """Open MPI binds each of one or two processes to one core, with all that they start."""
    if place.source != mpi_env.SOURCE:
        return None
    here = ranks if place.kind == NODE else 1  # of this process
    own, machine = env_vars.cpu_count(), env_vars.cores_of_machine()
    if own >= min(here * (1 + num_workers), machine * here // ranks):
        return None
    shown, users = _cores(own, machine), _users(here, here * num_workers)
    fixes = [f"mpirun {options} …" for options in mpi_env.unbound(environ)]
    return Check("CPU", WARNING, msg("plan.cpu.bound", users=users, shown=shown), fixes)


def _cores(cores: int, machine: int) -> str:
    if machine == cores:
        return units.plural(cores, "core")
    return msg("plan.cpu.some", cores=cores, machine=machine)


def _users(ranks: int, workers: int) -> str:
    users = units.plural(ranks, "rank")
    if not workers:
        return users
    return msg("plan.word.and", first=users, second=units.plural(workers, "worker"))
