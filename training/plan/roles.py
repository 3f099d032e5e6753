"""The role of this process in a requested training, and its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields as fields_of

from training.config.schema import Config
from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.core.project import ENTRYPOINT
from training.host import decisions, hosts, numa, topology
from training.host.placement import NODE, RANK, LauncherOptions, Topology


def launcher_options(config: Config) -> LauncherOptions:
    return LauncherOptions(**{f.name: getattr(config, f.name) for f in fields_of(LauncherOptions)})


def place_of(
    script: str,
    config: Config,
    environ: Mapping[str, str],
    problems: list[Problem],
    gpus: int,
    typed: int,
) -> Topology | None:
    asked = launcher_options(config)
    if hosts.given(asked):
        problems += hosts.too_few_slots(asked, typed)
    try:
        return role(script, config, environ, gpus)
    except UserError as error:
        problems += error.problems
        return None


def role(script: str, config: Config, environ: Mapping[str, str], gpus: int) -> Topology:
    """Raises UserError for inconsistent variables."""
    asked, several = launcher_options(config), gpus > 1
    return topology.find(environ, asked, starts_ranks=script != ENTRYPOINT, several_gpus=several)


def not_bindable(
    script: str, config: Config, origins: Mapping[str, str], place: Topology, ranks: int
) -> list[Problem]:
    """A --numa that this machine does not have, where it has ranks."""
    if place.source == hosts.HEAD and not hosts.include_this(launcher_options(config)):
        return []
    launcher = decisions.launcher(config, place, script, ranks)
    return numa.problems(config.numa, launcher.value, origins["numa"])


def count(place: Topology, typed: int, script: str, gpus: int) -> tuple[int, int, list[str]]:
    """(total ranks, ranks on this machine, notes). The launcher's numbers override the typed
    one."""
    if place.kind == RANK:
        # the number of all ranks is not that of one machine of several
        own = typed if typed < place.world_size else 0
        likely = gpus if gpus > 1 else own  # each rank may see a GPU of its own only
        local = place.local_world_size or min(place.world_size, max(place.local_rank + 1, likely))
        differs = script != ENTRYPOINT and typed not in (0, place.world_size, local)
        return (
            place.world_size,
            local,
            [msg("plan.ranks.already_running", typed=typed, running=place.world_size)]
            if differs
            else [],
        )
    here = max(1, gpus) if place.kind == NODE and script == ENTRYPOINT else typed
    return here * place.nnodes, here, []
