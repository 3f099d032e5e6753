"""`--run_name=NAME --resume=auto`: one command for the first start and for each restart, as the
restart policy of a container repeats it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from training.config.schema import Config
from training.core import rundir
from training.core.errors import Problem
from training.core.messages import msg
from training.host.placement import Topology

AUTO = "auto"


def wanted(config: Config, experiments: Path) -> str:
    """The run to resume, with that of --run_name in place of `auto`; '' for a new run."""
    if config.resume != AUTO:
        return config.resume
    run = experiments / config.run_name
    begun = config.run_name and os.path.lexists(rundir.RunDir(run).plan)
    return str(run) if begun else ""


def problems(
    config: Config, origins: Mapping[str, str], place: Topology | None, again: Callable[..., str]
) -> list[Problem]:
    """`again`: the user's own command with these flags changed."""
    if config.resume != AUTO:
        return []
    origin, found = origins["resume"], []
    if not config.run_name:
        found.append(
            Problem(
                "resume.no_name",
                msg("plan.resume.no_name", origin=origin),
                msg("plan.resume.with_name"),
                [again(run_name="NAME")],
                "run_name",
            )
        )
    # the others would find the run that node 0 has begun
    if config.hosts or (place and place.nnodes > 1):
        found.append(
            Problem(
                "resume.several_machines",
                msg("plan.resume.auto_machines", origin=origin),
                msg("plan.resume.allowed"),
                [again(resume="latest")],
                "resume",
            )
        )
    return found
