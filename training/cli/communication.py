"""./duet communication RANKS [--device=auto|cpu|cuda] [--limit=20]

Starts so many ranks on this machine, as a run would, and lets them talk: they meet, add up and broadcast data that is checked
element by element, and measure. Some seconds.

  RANKS           number of ranks
  --device=auto   cuda: a GPU for each rank, by NCCL; cpu: gloo; auto: cuda where there are so many GPUs
  --limit=20      seconds that a try may take, torch's import included; GPUs that hang get a second try without peer-to-peer copies

Exit code: 0 they can talk; 2 wrong command line; 3 they can not, and the report says who hangs where; 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Any

from training.config.schema import Config
from training.core import log, suggest, units
from training.core.errors import Exit, Problem, UserError
from training.core.project import typed
from training.host import decisions, env_vars, gpus, p2p_cache, program, torch_build
from training.launcher.communication import stages
from training.launcher.communication.result import command
from training.launcher.communication.run import BACKENDS, run
from training.plan import preflight
from training.plan.cli_args import MAX_RANKS

DEVICES = ("auto", "cpu", "cuda")
LONGEST_S = 3600


@dataclass
class CommunicationOptions:
    ranks: int = 2
    device: str = "auto"
    limit_s: float = stages.LIMIT_S
    help: bool = False
    problems: list[Problem] = field(default_factory=list)


def parse(argv: list[str]) -> CommunicationOptions:
    """Raises UserError with all problems."""
    options, positional, words = CommunicationOptions(), [], list(argv)
    while words:
        name, equals, value = (word := words.pop(0)).partition("=")
        if name in ("--device", "--limit") and not equals and words:
            value = words.pop(0)
        if word in ("-h", "--help"):
            options.help = True
        elif not word.startswith("-"):
            positional.append(word)
        elif name == "--device":
            if value not in DEVICES:
                options.problems.append(Problem(f"--device is {value!r}", "one of " + ", ".join(DEVICES), ["--device=auto"]))
            options.device = value
        elif name == "--limit":
            if _whole(value, LONGEST_S):
                options.limit_s = float(value)
            else:
                allowed = f"a whole number of seconds from 1 to {LONGEST_S}"
                options.problems.append(Problem(f"--limit is {value!r}", allowed, [f"--limit={stages.LIMIT_S:g}"]))
        else:
            near = suggest.suggest(name.lstrip("-"), ["device", "limit", "help"])
            fixes = [f"--{n}{equals}{value}" for n in near] or ["--help lists every flag"]
            options.problems.append(Problem(f"{name} is not a known flag", "", fixes))
    if len(positional) == 1 and _whole(positional[0], MAX_RANKS):
        options.ranks = int(positional[0])
    elif not options.help:
        given = f"the number of ranks is {' '.join(positional)!r}" if positional else "the number of ranks is missing"
        fix = "./duet communication 2"
        options.problems.append(Problem(given, f"one whole number from 1 to {MAX_RANKS}", [fix]))
    if options.problems:
        raise UserError(options.problems)
    return options


def _whole(text: str, high: int) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10 and 1 <= int(text) <= high


def plan(options: CommunicationOptions) -> dict[str, Any]:
    """What the test needs of a plan, for so many ranks on this machine. Raises UserError when they have no GPUs."""
    machine = gpus.inventory(os.environ) if options.device != "cpu" else gpus.GpuInventory((), "not asked")
    torch = torch_build.installed()
    device = decisions.device(Config(device=options.device), options.ranks, machine, torch)
    have = len(machine.gpus)
    problem = None
    if device.value == "cuda" and have < options.ranks:
        problem = f"{units.plural(options.ranks, 'GPU is', 'GPUs are')} needed, {have} visible: {machine.reason}"
    elif device.value == "cuda" and torch and torch.cuda is None:
        problem = f"torch {torch.version} is built for the CPU only: it can not use a GPU"
    if problem:
        raise UserError(Problem(problem, "", [command(options.ranks, "cpu")]), Exit.RESOURCES)
    chosen = env_vars.choose(os.environ, device=device.value, ranks=options.ranks, local_ranks=options.ranks, debug=False)
    used = machine.gpus[: options.ranks] if device.value == "cuda" else ()
    version = torch.version if torch else None
    chosen += p2p_cache.variables([g.uuid for g in used], machine.driver, version, os.environ)
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
            print(typed(__doc__))
            return int(Exit.DONE)
        made = plan(options)
        device = made["device"]
        count = f"{options.ranks} rank{'s' if options.ranks > 1 else ''}"
        log.info(f"communication test: {count} on {device['value']} ({device['reason']}) by {BACKENDS[device['value']]}")
        result = run(made, options.limit_s)
    except UserError as error:
        log.report(error, closing="nothing was tested")
        return int(error.code)
    except KeyboardInterrupt:
        log.warning("Ctrl-C: stopped, nothing is left behind")
        return int(Exit.INTERRUPTED)
    checks = result.checks()
    print(preflight.table([c.record() for c in checks]).rstrip("\n"))
    return int(Exit.DONE if result.ok else Exit.RESOURCES)


if __name__ == "__main__":
    sys.exit(program.run(main, __doc__, needs=("torch", "numpy")))
