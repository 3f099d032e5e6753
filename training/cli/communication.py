"""Test communication between ranks on this machine: rendezvous, all_reduce and
broadcast with every element verified, and bandwidth. Takes a few seconds.

Usage: ./duet communication RANKS [--device=auto|cpu|cuda] [--limit=20]

  RANKS           number of ranks
  --device=auto   cuda: NCCL, a GPU per rank; cpu: gloo; auto: cuda if there are
                  enough GPUs
  --limit=20      seconds per attempt after all ranks have imported torch (the
                  import may take three times as long); if GPUs hang, a second
                  attempt runs without peer-to-peer copies

Exit codes: 0 communication works; 2 invalid command line; 3 it does not: the
report names the ranks that hang and where; 130 Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from training.config.schema import Config
from training.core import args, log, units
from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg
from training.core.project import typed
from training.host import decisions, env_vars, gpus, program, torch_build
from training.launcher.communication import stages
from training.launcher.communication.run import BACKENDS, run
from training.plan import preflight
from training.plan.cli_args import MAX_RANKS
from training.plan.communication import command

if TYPE_CHECKING:
    from training.core.contracts.plan import RanksPlan

DEVICES = ("auto", "cpu", "cuda")
LONGEST_S = 3600
COMMAND = "./duet communication"
LIMIT = replace(
    args.whole(1, LONGEST_S, 0),
    allowed=msg("cli.communication.limit_allowed", longest=LONGEST_S),
    near=lambda text: [f"{stages.LIMIT_S:g}"],
)
FLAGS = {"device": args.one_of(*DEVICES), "limit": LIMIT, "help": args.SWITCH}


@dataclass
class CommunicationOptions:
    ranks: int = 2
    device: str = "auto"
    limit_s: float = stages.LIMIT_S
    help: bool = False


def parse(argv: list[str]) -> CommunicationOptions:
    """Raises UserError with all problems."""
    line = args.parse(argv, FLAGS, COMMAND)
    words, problems = line.words, line.problems
    if "help" in line.values:
        return CommunicationOptions(help=True)
    ranks = words[0] if len(words) == 1 else ""
    if not args.is_whole(ranks) or not 1 <= int(ranks) <= MAX_RANKS:
        given = (
            msg("cli.communication.ranks_wrong", words=" ".join(words))
            if words
            else msg("cli.communication.ranks_missing")
        )
        problems.append(
            Problem(
                "ranks.value",
                given,
                msg("cli.communication.ranks_allowed", most=MAX_RANKS),
                [f"{COMMAND} 2"],
            )
        )
    if problems:
        raise UserError(problems)
    values = line.values
    return CommunicationOptions(
        int(ranks), values.get("device", "auto"), float(values.get("limit", stages.LIMIT_S))
    )


def plan(options: CommunicationOptions) -> RanksPlan:
    """The parts of a plan that the test needs. Raises UserError if there are too few GPUs, or parts
    of them."""
    machine = (
        gpus.inventory_at_start(os.environ)
        if options.device != "cpu"
        else gpus.GpuInventory((), "not asked")
    )
    torch = torch_build.installed()
    device = decisions.device(Config(device=options.device), options.ranks, machine, torch)
    have = len(machine.gpus)
    problem = None
    if device.value == "cuda" and have < options.ranks:
        problem = msg(
            "cli.communication.too_few_gpus",
            gpus=units.plural(options.ranks, "GPU is", "GPUs are"),
            have=have,
            reason=machine.reason,
        )
    elif device.value == "cuda" and torch and torch.cuda is None:
        problem = msg("cli.communication.cpu_torch", version=torch.version)
    if problem:
        raise UserError(
            Problem("gpu.too_few", problem, "", [command(options.ranks, "cpu")]), Exit.RESOURCES
        )
    chosen = env_vars.choose(
        os.environ, device=device.value, ranks=options.ranks, local_ranks=options.ranks, debug=False
    )
    used = machine.gpus[: options.ranks] if device.value == "cuda" else ()
    parts = {gpu.index: gpu for gpu in used if gpu.mig} if options.ranks > 1 else {}
    if parts:
        on_cpu = command(options.ranks, "cpu")
        raise UserError(
            [preflight.in_parts(gpu, options.ranks, on_cpu).problem() for gpu in parts.values()],
            Exit.RESOURCES,
        )
    version = torch.version if torch else None
    # Without the cached NCCL_P2P_DISABLE=1: this test finds out whether the copies work now.
    return {
        "local_ranks": options.ranks,
        "device": device.record(),
        "variables": [v.record() for v in chosen],
        "gpus": [g.record() for g in used],
        "driver": machine.driver,
        "torch": version,
    }


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    try:
        options = parse(argv)
        if options.help:
            print(typed(__doc__.rstrip()))
            return int(Exit.DONE)
        made = plan(options)
        device = made["device"]
        count = units.plural(options.ranks, "rank")
        log.info(
            msg(
                "cli.communication.begins",
                count=count,
                device=device["value"],
                reason=device["reason"],
                backend=BACKENDS[device["value"]],
            )
        )
        result = run(made, options.limit_s)
    except UserError as error:
        log.report(error, closing=msg("cli.communication.nothing_tested"))
        return int(error.code)
    except KeyboardInterrupt:
        log.warning(msg("cli.interrupted"))
        return int(Exit.INTERRUPTED)
    checks = result.checks()
    print(preflight.table([c.record() for c in checks]).rstrip("\n"))
    return int(Exit.DONE if result.ok else Exit.RESOURCES)


if __name__ == "__main__":
    sys.exit(program.run(main, __doc__, needs=("torch", "numpy")))
