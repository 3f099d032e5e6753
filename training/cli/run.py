"""Run your own program with N processes, unchanged; its arguments follow it.

Usage:
  ./duet run [-n N] [FLAGS] FILE [ARGS…]        a Python file, folder or archive
  ./duet run [-n N] [FLAGS] -m MODULE [ARGS…]   a module, as for python -m
  ./duet run [-n N] [FLAGS] PROGRAM [ARGS…]     any other program, also on PATH

  -n N                   processes on this machine: a number, gpu (one for each
                         GPU), cpu (one for each core) or auto (gpu, else cpu);
                         default: one for each GPU, else one
  -m, --module           FILE is the name of a module
  --no-python            execute the program directly, without Python
  --show_ranks=0,1|all   show the output of these ranks of this machine, each
                         line with its rank
  --retries=N            restarts after failures of a rank or of the machine
  --min_ranks=K          after the loss of a GPU or a machine, continue with the
                         others, at least K
  --hosts=a,b, --hostfile=FILE
                         start it on these machines by ssh (a:2: 2 processes)

torchrun's flags are accepted (docs/migrating.md lists their effect):
  --nproc-per-node=N, --nnodes=N, --node-rank=N, --master-addr=HOST,
  --master-port=N, --rdzv-endpoint=HOST:PORT, --max-restarts=N, --log-dir=DIR,
  --tee=3, --redirects=3, --local-ranks-filter=0,1, --standalone
With --nnodes=1:4 it starts on 4 machines, or on fewer 30 s after one is ready,
and continues with those that are left.

The other flags of ./duet launch apply as well, such as
  --run_name=NAME, --hang_timeout=S, --numa=auto, --dry_run, --check

Examples:
  ./duet run -n 2 train.py --epochs=3
  ./duet run -n gpu -m package.train --epochs=3
  ./duet run -n 2 --max-restarts=3 train.py       # restarts, as with torchrun
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from training.cli import run_check, torchrun_nodes
from training.cli.run_words import (
    IGNORED_SWITCHES,
    OVERRIDDEN,
    RANKS,
    TORCHRUN,
    Flag,
    parse,
    set_language,
    set_shutdown,
)
from training.config import flags
from training.config.resolve import PREFIX
from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg
from training.core.project import LAUNCH_SCRIPT, script, typed
from training.host import gpus, program
from training.plan import launcher_flags
from training.plan.script_words import PROGRAM, RUN, SEPARATOR

LIMITS = ("min_ranks", "retries")


def main(argv: list[str]) -> int:
    flags_given, rest = parse(argv)
    if not argv or any(name in ("h", "help") for name, _, _ in flags_given):
        print(typed((__doc__ or "").strip()))
        return int(Exit.DONE if argv else Exit.CONFIG)
    set_language(flags_given)
    words = translate(flags_given, rest, os.environ)
    set_shutdown(flags_given)
    os.environ["DUET_COMMAND"] = RUN
    os.execvp("bash", [*script(LAUNCH_SCRIPT), *words])


def translate(given: list[Flag], rest: list[str], environ: Mapping[str, str]) -> list[str]:
    """The words of launch_train.sh. Raises UserError without a program."""
    number, words = "", []
    last = {name: place for place, (name, _, _) in enumerate(given)}
    for place, (name, value, word) in enumerate(given):
        if name == RANKS:
            number = value or ""
        elif name in TORCHRUN:  # the last one counts, as for torchrun
            if last[name] == place and OVERRIDDEN.get(name) not in last:
                words += TORCHRUN[name](value or "")
        elif name not in IGNORED_SWITCHES:
            whole = word if value is None or "=" in word else f"{word}={value}"
            words.append(f"--{name}" if name in PROGRAM else whole)
    if problems := run_check.problems(given, rest):
        raise UserError(problems)
    number = number or str(torchrun_nodes.slots(words, environ) or "")
    with_number = run_check.again(given, rest, RANKS, ["-n", "2"])
    set_by = "" if number else torchrun_nodes.ranks_variable(words, environ, with_number)
    own = rest[2:] if rest[1:2] == [SEPARATOR] else rest[1:]  # torchrun drops it too
    tail = [SEPARATOR, *own] if own else []
    number = environ[set_by] if set_by else number
    foreign = any(name in launcher_flags.FLAGS for name, _, _ in given)  # answered by the plan
    if not foreign and (not number or number in torchrun_nodes.COUNTS):
        torchrun_nodes.check_count(["8", *words, f"--script={rest[0]}", *tail], environ)
    count = processes(number, environ, set_by, with_number)
    words = _elastic(words, count, environ)
    words = [count, *words, f"--script={rest[0]}", *tail]
    backend = next((value for name, value, _ in reversed(given) if name == "rdzv_backend"), "")
    torchrun_nodes.check(backend or "", words, environ)
    return words


def _elastic(words: list[str], count: str, environ: Mapping[str, str]) -> list[str]:
    """torchrun's --nnodes=MIN:MAX, also from a platform: start on MAX machines and continue with
    MIN, unless --min_ranks is given or nothing is restarted. `count`: processes of a machine."""
    if not count.isdecimal():  # reported by the plan
        return words
    given = {name: value for name, (value, _) in flags.parse(words).flags.items()}
    few = torchrun_nodes.fewest(words, environ)
    if found := run_check.MACHINES.fullmatch(given.get("nnodes", "")):
        few, most = int(found[1]), int(found[2])
        words = [f"--nnodes={most}" if word.startswith("--nnodes=") else word for word in words]
        few = few if few < most else 0
    settings = {name: given.get(name) or environ.get(f"{PREFIX}{name.upper()}") for name in LIMITS}
    if not few or settings["min_ranks"] or settings["retries"] == "0":
        return words
    return [*words, f"--min_ranks={few * int(count)}"]


def processes(text: str, environ: Mapping[str, str], set_by: str, with_number: str) -> str:
    """The number of processes. A text that is none is returned, and reported by the plan. Raises
    UserError for `gpu` without a GPU. `set_by`: the variable that has this text, '' for -n;
    `with_number`: the command with a number."""
    if text and text not in torchrun_nodes.COUNTS:
        return text
    machine = gpus.inventory_at_start(environ) if text != "cpu" else None
    found = len(machine.gpus) if machine else 0
    if text == "gpu" and machine and not found:
        asked = msg("cli.run.set_by", name=set_by, text=text) if set_by else "-n gpu"
        what = msg("cli.run.no_gpu", asked=asked, reason=machine.reason)
        raise UserError(Problem("run.no_gpu", what, msg("cli.run.counts"), [with_number]))
    return str(found or (len(os.sched_getaffinity(0)) if text else 1))


if __name__ == "__main__":
    sys.exit(program.run(main, __doc__, internal=True))
