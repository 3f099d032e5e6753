"""`./duet completion bash|zsh`: what a shell needs to complete commands, flags and paths."""

from __future__ import annotations

import re
import subprocess
import sys

from training.cli.commands import COMMANDS, OWN, Command
from training.core.errors import Problem, UserError
from training.core.project import ROOT

FLAG = re.compile(r"--[a-z][\w-]*=?")
# `duet` as it was typed: ./duet, a path, or a name on PATH.
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
ZSH = "autoload -U +X bashcompinit && bashcompinit\n" + BASH.replace(
    "mapfile -t COMPREPLY < <(", "COMPREPLY=($("
).replace('-- "$current")', '-- "$current"))')


def text(words: list[str]) -> str:
    """What this completion prints. Raises UserError."""
    what = words[0] if words else ""
    if what == "commands":
        return "\n".join([*COMMANDS, *OWN])
    if what == "flags":
        command = COMMANDS.get(words[1]) if len(words) > 1 else None
        return "\n".join(flags(command)) if command else ""
    if what in ("bash", "zsh"):
        return BASH if what == "bash" else ZSH
    raise UserError(
        Problem(
            "completion.shell",
            f"completion is for {what!r}" if what else "completion needs a shell",
            "bash or zsh",
            ["./duet completion bash"],
        )
    )


def flags(command: Command) -> list[str]:
    """The flags that a command's own help names, those with a value with their equals sign."""
    if command.script:
        argv = [str(ROOT / command.script), "--help"]
    else:
        argv = [
            sys.executable,
            str(ROOT / "lib/run_module.py"),
            f"training.cli.{command.module}",
            *command.first,
            "--help",
        ]
    said = subprocess.run(
        argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    ).stdout
    return sorted(set(FLAG.findall(said)))
