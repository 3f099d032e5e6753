"""`--run_name=NAME --resume=auto`: one command for the first start and for each restart, as the
restart policy of a container repeats it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from training.config.resolve import Resolved
from training.core import rundir
from training.core.errors import Problem
from training.core.messages import msg

AUTO = "auto"


def settle(
    resolved: Resolved, experiments: Path, again: Callable[..., str], problems: list[Problem]
) -> Resolved:
    """With the run of this name in place of `auto`, or with none, if this is its first start.
    `again`: the user's own command with these flags changed."""
    config = resolved.config
    if config.resume != AUTO:
        return resolved
    if not config.run_name:
        problems.append(
            Problem(
                "resume.no_name",
                msg("plan.resume.no_name"),
                msg("plan.resume.with_name"),
                [again(run_name="NAME")],
                "run_name",
            )
        )
    elif config.nnodes > 1 or config.hosts:  # the others would find the run that node 0 has begun
        problems.append(
            Problem(
                "resume.several_machines",
                msg("plan.resume.auto_machines"),
                msg("plan.resume.allowed"),
                [again(resume="latest")],
                "resume",
            )
        )
    run = experiments / config.run_name
    named = config.run_name and os.path.lexists(rundir.RunDir(run).plan)
    return replace(resolved, config=replace(config, resume=str(run) if named else ""))
