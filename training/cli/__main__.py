"""./duet COMMAND [ARGS…]"""

from __future__ import annotations

import os
import runpy
import signal
import sys

import training
from training.cli.commands import COMMANDS, OWN, Command
from training.core import log
from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg
from training.core.project import DOCTOR, by_name, script, typed
from training.core.suggest import suggest
from training.host import program

EXAMPLES = """\
Examples:
  ./duet train configs/dual_gpu/quickstart.py
  ./duet run -n 2 main.py --epochs=3
  ./duet inspect && echo all ranks train
  source <(./duet completion bash)                # tab completion; zsh too

Help for a command: ./duet COMMAND --help; version: ./duet --version
Messages in Chinese, for any command: --lang=zh"""
# The doctor is a script with a flag, whose own help is about training.
DOCTOR_HELP = """\
Check this machine for a training and measure the memory of a step.
Launches no training; writes nothing but the result of the communication test
of GPUs (~/.cache/duet).

Usage:
  ./duet doctor [CONFIG] [--key=value …] [--json]

Examples:
  ./duet doctor                                   # the defaults on two GPUs
  ./duet doctor configs/dual_gpu/balanced.py --device_batch_size=6
  ./duet doctor --json > machine.json             # one JSON object

Exit status 3: a check has failed, or the step does not fit."""


def main(argv: list[str]) -> int:
    name, rest = (argv[0], argv[1:]) if argv else ("help", [])
    if name in ("-h", "--help"):
        name = "help"
    if name == "help" and rest and rest[0] != "help" and not rest[0].startswith("-"):
        name, rest = rest[0], ["--help"]
    if name in ("--version", "version"):
        print(f"duet {training.__version__}")
        return int(Exit.DONE)
    if name in ("help", "completion"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # quiet under `… | head`
    if name == "help":
        print(overview())
        return int(Exit.DONE if argv else Exit.CONFIG)
    try:
        if name == "completion":
            from training.cli import completion

            print(completion.text(rest))
            return int(Exit.DONE)
        return run(_found(name, rest), rest)
    except UserError as error:
        log.report(error, closing=msg("cli.nothing_started"))
        return int(error.code)


def overview() -> str:
    width = max(map(len, COMMANDS))
    lines = []
    for c in COMMANDS.values():
        script = "" if by_name() or c.first else c.script
        lines.append(f"  {c.name:<{width}}  {c.text}{f' (./{script})' if script else ''}")
    return typed(
        "\n".join(["Usage: ./duet COMMAND [ARGS…]", "", "Commands:", *lines, "", EXAMPLES])
    )


def _found(name: str, rest: list[str]) -> Command:
    command = COMMANDS.get(name)
    if name == "launch":
        from training.cli import run_words

        command = COMMANDS["run"] if run_words.is_meant(rest) else command
    if command is None:
        fixes = [f"./duet {near}" for near in suggest(name, [*COMMANDS, *OWN])[:1]] or [
            "./duet help"
        ]
        raise UserError(
            Problem(
                "command.unknown", msg("cli.unknown_command", name=name), ", ".join(COMMANDS), fixes
            )
        )
    return command


def run(command: Command, rest: list[str]) -> int:
    """Run a command: a script replaces this process, a module runs in it."""
    argv = [*command.first, *rest]
    if command.name == "doctor":
        os.environ[DOCTOR] = "1"
        if {"-h", "--help"} & set(rest):
            from training.plan import option_help

            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            print(typed("\n".join([DOCTOR_HELP, *option_help.option_lines()])))
            return int(Exit.DONE)
    if command.script:
        os.execvp("bash", [*script(command.script), *argv])
    sys.argv[1:] = argv
    runpy.run_module(f"training.cli.{command.module}", run_name="__main__", alter_sys=True)
    return int(Exit.DONE)


if __name__ == "__main__":
    program.replace_unknown()
    try:
        code = main(sys.argv[1:])
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        code = program.unwritable(error)
    sys.exit(code)
