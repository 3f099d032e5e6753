"""The command line: every field is a flag, written `--a_b=1`, `--a-b=1`, `--a-b 1`, and `--flag` or `--no-flag` for bool."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field

from training.config.schema import FIELDS, Known, kind
from training.errors import Problem

# Flags that are no configuration: they choose what happens with it.
ACTIONS = {
    "config": "the config file (or simply its path)",
    "dry_run": "show the whole plan, launch nothing",
    "explain": "the same; every environment variable that matters, where its value is from and what it does",
    "check": "the same, with every check of the machine, and measure the memory of a step by fake tensors (some seconds)",
    "json": "with --check: one JSON object on standard output",
    "script": "launch_train.sh N --script main.py -- ARGS: a script of your own instead of our training",
    "help": "this text",
}
ALIASES = {"opt": "config"}  # as KAIR calls it
SWITCHES = ("dry_run", "explain", "check", "json", "help")
WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


@dataclass
class CommandLine:
    """What the user typed: `flags` name → (text, flag as typed), positional arguments in order."""

    flags: dict[str, tuple[str, str]] = field(default_factory=dict)
    positional: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def on(self, action: str) -> bool:
        text = self.flags.get(action, ("false", ""))[0].lower()
        return WORDS.get(text, False)


def suggest(name: str, known: list[str]) -> list[str]:
    """The names a person may have meant, nearest first."""
    import difflib  # only when something is wrong: help and plan answer sooner

    return difflib.get_close_matches(name, known, n=2, cutoff=0.6)


def parse(argv: list[str], fields: Known = FIELDS) -> CommandLine:
    """`fields`: what may be set; with a task's own options."""
    line = CommandLine()
    known = [*fields, *ACTIONS]
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            if word.startswith("-") and word not in ("-", "--"):
                line.problems.append(Problem(f"{word} is not known", "flags with two dashes, such as --depth=12"))
            elif word != "--":
                line.positional.append(word)
            continue
        typed, equals, text = word[2:].partition("=")
        name = ALIASES.get(typed, typed.replace("-", "_"))
        if name not in known and name.startswith("no_") and name[3:] in fields and kind(name[3:], fields) == "bool" and not equals:
            name, equals, text = name[3:], "=", "false"
        if name not in known:
            near = suggest(name, known)
            fixes = [f"--{n}{equals}{shlex.quote(text) if equals else ''}" for n in near] or ["--help lists every flag"]
            what = "is a field of gpt, which is not the task" if name in FIELDS else "is not a known flag"
            line.problems.append(Problem(f"--{typed} {what}", "", fixes))
            if not equals and rest and not rest[0].startswith("--") and not rest[0].endswith((".py", ".json")):
                rest.pop(0)  # its value, which is no config path
            continue
        is_switch = name in SWITCHES or (name in fields and kind(name, fields) == "bool")
        if not equals:
            if is_switch:
                # Not 0 and 1: in `./launch_train.sh --dry_run 1 CONFIG` that is the number of processes.
                text = rest.pop(0) if rest and rest[0].lower() in WORDS and not rest[0].isdigit() else "true"
            elif rest and not rest[0].startswith("--"):
                text = rest.pop(0)
            else:
                line.problems.append(Problem(f"--{typed} has no value", f"--{typed}=VALUE"))
                continue
        if name in ACTIONS and is_switch and text.lower() not in WORDS:
            line.problems.append(Problem(f"--{typed} is {text!r}", "true or false"))
            continue
        if name in line.flags and line.flags[name][0] != text:
            line.problems.append(Problem(f"--{typed} is given twice, as {line.flags[name][0]!r} and {text!r}", "once"))
        line.flags[name] = (text, f"--{typed}")
    if line.on("json") and not line.on("check"):
        line.problems.append(Problem("--json says how --check answers, and there is no --check", "", ["--check --json"]))
    return line
