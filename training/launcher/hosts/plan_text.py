"""What `--dry_run` and `--check` show of the machines of `--hosts`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from training.core.messages import msg
from training.host import hosts
from training.host.placement import LauncherOptions
from training.launcher.hosts import node, probe
from training.plan import preflight

NAME = "hosts"  # of the check


def described(asked: LauncherOptions) -> str:
    """The machines, and the command that starts the agent of each. Connects to none of them."""
    lines = ["", msg("launcher.hosts.title")]
    for one in probe.machines(hosts.read(asked)[0], asked.ssh_args):
        command = (
            msg("launcher.hosts.here") if one.here else shlex.join(node.start(one, asked.ssh_args))
        )
        lines.append(f"  {one.rank}  {one.name}  {command}")
    return "\n".join(lines)


def checked(
    asked: LauncherOptions, environ: Mapping[str, str], *, of_script: bool
) -> list[preflight.Check]:
    """The check of every machine; connects to all of them."""
    machines = probe.machines(hosts.read(asked)[0], asked.ssh_args)
    probe.look(machines, asked.ssh_args, environ, of_script=of_script)
    found = [
        preflight.Check(NAME, preflight.ERROR, problem.what, problem.fixes)
        for one in machines
        for problem in one.problems
    ]
    names = ", ".join(one.name for one in machines)
    return found or [preflight.Check(NAME, preflight.OK, msg("launcher.hosts.ready", hosts=names))]
