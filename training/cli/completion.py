"""Print the tab completion of commands, flags and paths for a shell.

Usage:
  ./duet completion bash|zsh

In this shell:
  source <(./duet completion bash)

In every shell: this line in ~/.bashrc or ~/.zshrc, with the path of the project."""

from __future__ import annotations

import re
import subprocess
import sys

from training.cli.commands import COMMANDS, OWN, Command
from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.core.project import ROOT, script, typed

# A line of the help that describes flags begins with them: '-m, --module', '--a=N, --b  text'.
# Other lines mention flags of other commands.
OPTIONS = re.compile(r"^ {0,4}(?:-\w, )?(--[a-z].*)", re.MULTILINE)
OPTION = re.compile(r"(--[a-z][\w-]*=?)\S*?(, (?=--)|\s|$)")
# $1: the command as typed: ./duet, a path, or a name on PATH.
BASH = """\
_duet() {
  local current=${COMP_WORDS[COMP_CWORD]}
  if ((COMP_CWORD == 1)); then
    mapfile -t COMPREPLY < <(compgen -W "$("$1" completion commands)" -- "$current")
  elif [[ $current == -* ]]; then
    mapfile -t COMPREPLY < <(compgen -W "$("$1" completion flags "${COMP_WORDS[1]}")" -- "$current")
    [[ ${COMPREPLY[0]-} != *= ]] || compopt -o nospace
  else
    compopt -o default
    COMPREPLY=()
  fi
}
complete -F _duet duet ./duet
"""
# bashcompinit has no compopt: paths are the default of an empty answer.
ZSH = "autoload -U +X bashcompinit && bashcompinit\n" + re.sub(r".*compopt .*\n", "", BASH).replace(
    "mapfile -t COMPREPLY < <(", "COMPREPLY=($("
).replace('-- "$current")', '-- "$current"))').replace("complete -F", "complete -o default -F")


def text(words: list[str]) -> str:
    """The output of `./duet completion WORDS`. Raises UserError."""
    what = words[0] if words else ""
    if what == "commands":
        return "\n".join([*COMMANDS, *OWN])
    if what == "flags":
        command = COMMANDS.get(words[1]) if len(words) > 1 else None
        return "\n".join(flags(command)) if command else ""
    if {"-h", "--help"} & set(words):
        return typed(__doc__)
    if what in ("bash", "zsh"):
        return BASH if what == "bash" else ZSH
    raise UserError(
        Problem(
            "completion.shell",
            msg("cli.completion.no_shell_of_that_name", what=what)
            if what
            else msg("cli.completion.needs_a_shell"),
            msg("cli.completion.shells"),
            ["./duet completion bash"],
        )
    )


def flags(command: Command) -> list[str]:
    """The flags that a command's help describes; flags with a value end in `=`."""
    if command.script:
        argv = [*script(command.script), "--help"]
    else:
        argv = [
            sys.executable,
            str(ROOT / "lib/run_module.py"),
            f"training.cli.{command.module}",
            *command.first,
            "--help",
        ]
    text = subprocess.run(
        argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    ).stdout
    return sorted({"--help", "--lang=", *described(text)})


def described(text: str) -> set[str]:
    """The flags described in a help text."""
    found = set[str]()
    for line in OPTIONS.findall(text):
        at = 0
        while option := OPTION.match(line, at):
            found.add(option[1])
            at = option.end() if option[2].startswith(",") else len(line)
    return found - {"--key="}  # --key=value: any field
