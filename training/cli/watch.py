"""Run the command of another launcher and watch over the ranks that it starts.

Usage:
  ./duet watch [FLAGS] [--] COMMAND [ARGS…]

COMMAND starts the ranks itself: accelerate launch, torchrun, deepspeed, a shell
script. Duet finds them by their variables (RANK, LOCAL_RANK) and adds hang
detection, the monitor, a report, the failure card and cleanup. COMMAND gets the
environment of this shell, and its exit status is passed on; 5 after a hang, 4
after a failed rank for which the others wait, 130 or 75 after a stop request.

  --hang_timeout=S       limit of silence before the ranks are examined
  --run_name=NAME        name of the run directory
  --retries=N            start COMMAND again after a failure
  --notify=COMMAND, --report=false, --out_dir=DIR, --log_dir=DIR, --dry_run

Examples:
  ./duet watch -- accelerate launch --num_processes=2 train.py
  ./duet watch --hang_timeout=300 -- torchrun --nproc-per-node=2 train.py
  ./duet watch -- deepspeed --num_gpus=2 train.py --deepspeed_config=ds.json
"""

from __future__ import annotations

import os
import shlex
import sys

from training.cli import run_words
from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg
from training.core.project import LAUNCH_SCRIPT, script, typed
from training.host import program
from training.plan.script_words import PROGRAM, RUN, SEPARATOR

# They belong to the launcher that starts the ranks.
OF_RANKS = {
    *(run_words.RANKS, "launcher", "numa", "show_ranks", *PROGRAM, *run_words.IGNORED_SWITCHES),
    *(name for name in run_words.TORCHRUN if name != "log_dir"),
}
EXAMPLE = "./duet watch -- accelerate launch train.py"


def main(argv: list[str]) -> int:
    given, command = run_words.parse(argv)
    if not argv or any(name in ("h", "help") for name, _, _ in given):
        print(typed((__doc__ or "").strip()))
        return int(Exit.DONE if argv else Exit.CONFIG)
    run_words.set_language(given)
    words = translate(given, command)
    os.environ["DUET_COMMAND"] = RUN
    os.execvp("bash", [*script(LAUNCH_SCRIPT), *words])


def translate(given: list[run_words.Flag], command: list[str]) -> list[str]:
    """The words of launch_train.sh. Raises UserError without a command, or for flags of a launcher
    that starts ranks."""
    problems = []
    words = [
        word if value is None or "=" in word else f"{word}={value}"
        for name, value, word in given
        if name not in OF_RANKS
    ]
    without = shlex.join(["./duet", "watch", *words, SEPARATOR, *command]) if command else EXAMPLE
    for name, _, word in given:
        if name in OF_RANKS:
            what = msg("cli.watch.flag", flag=word)
            problems.append(Problem("watch.flag", what, msg("cli.watch.after"), [without]))
    if not command:
        what = msg("cli.watch.no_command")
        problems.append(Problem("watch.no_command", what, msg("cli.watch.after"), [EXAMPLE]))
    if problems:
        raise UserError(problems)
    return ["1", *words, "--watch", f"--script={command[0]}", SEPARATOR, *command[1:]]


if __name__ == "__main__":
    sys.exit(program.run(main, __doc__, internal=True))
