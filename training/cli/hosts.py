"""Starts the machines of --hosts: `run_module.py training.cli.hosts SCRIPT ARGS`, by lib/run.sh.

The plan has found the command line correct; each machine makes its own plan.
"""

from __future__ import annotations

import os
import sys

from training.core import log
from training.core.errors import Exit, UserError
from training.core.messages import msg
from training.host import hosts, program
from training.launcher import stop_signals
from training.launcher.hosts import probe
from training.launcher.hosts.conductor import Conductor
from training.launcher.hosts.node import Node
from training.launcher.hosts.probe import Machine
from training.plan import script_request, script_words
from training.plan.request import read
from training.plan.roles import launcher_options


def main(argv: list[str]) -> int:
    log.of_launcher()
    script, args = argv[0], argv[1:]
    of_script = script_words.asked_for(args)
    ask = script_request.read if of_script else read
    request = ask(script, args, os.environ)
    asked = launcher_options(request.config)
    machines = probe.machines(hosts.read(asked)[0], asked.ssh_args)
    probe.look(machines, asked.ssh_args, os.environ, of_script=of_script)
    if problems := [problem for machine in machines for problem in machine.problems]:
        raise UserError(problems, Exit.RESOURCES)
    place = request.place
    log.info(
        msg(
            "launcher.hosts.starting",
            hosts=", ".join(machine.name for machine in machines),
            address=f"{place.master_addr}:{place.master_port}",
        )
    )
    elastic = isinstance(request.config.min_ranks, int)

    def start(machine: Machine, *, joins: bool = False) -> Node:
        given = (machine, place, script, args, os.environ, asked.ssh_args)
        return Node(*given, elastic=elastic, joins=joins)

    rejoins = elastic and request.config.rejoin
    again = (lambda node: start(node.machine, joins=True)) if rejoins else None
    with Conductor(elastic=elastic, again=again) as conductor:
        for machine in machines:
            conductor.add(start(machine))
        return conductor.run()


if __name__ == "__main__":
    code = program.run(main, __doc__, internal=True, pipe=False)
    stop_signals.show_the_rest()
    sys.exit(code)
