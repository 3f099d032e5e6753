"""Problems with the words of `duet run` that launch_train.sh could not explain: those of torchrun's
flags."""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
from dataclasses import replace

from training.cli.run_words import ENDPOINT, RANKS, TEE, TORCHRUN, Flag, nothing
from training.config import flags, foreign_names
from training.core import suggest
from training.core.errors import Problem
from training.core.messages import msg
from training.plan import launcher_flags
from training.plan.script_words import PROGRAM, USED

MACHINES = re.compile(r"(\d+):(\d+)", re.ASCII)  # --nnodes=MIN:MAX


def problems(given: list[Flag], rest: list[str]) -> list[Problem]:
    """All of them: no program, a number of processes in its place, and flags of torchrun that are
    misspelled or have a value that would silently count as none, as a flag, or as a name."""
    found = []
    names = {name for name, _, _ in given}
    program = rest if rest and rest[0] else ["main.py"]
    if program is not rest:
        number = next((value for name, value, _ in reversed(given) if name == RANKS), "")
        usable = number if number and not number.startswith("-") else "2"
        fix = again(given, program, RANKS, ["-n", usable])
        what = msg("cli.run.no_program")
        found.append(Problem("run.no_program", what, msg("plan.script.allowed"), [fix]))
    elif (
        rest[1:]
        and rest[0].isdecimal()
        and not names & {RANKS, "module"}
        and not os.path.exists(rest[0])
    ):
        what = msg("plan.script.missing", path=rest[0])
        fix = again(given, rest[1:], "", ["-n", rest[0]])
        found.append(Problem("script.file", what, msg("plan.script.allowed"), [fix]))
    for one in given:
        if problem := _problem(one, given, program):
            found.append(problem)
    return found


def _problem(one: Flag, given: list[Flag], rest: list[str]) -> Problem | None:
    name, value, word = one
    if name == RANKS and (not value or value.startswith("-")):
        fix = again(given, rest, RANKS, ["-n", "2"])
        what = msg("cli.run.no_ranks", text=value)
        return Problem("ranks.value", what, msg("cli.run.counts"), [fix])
    if not value and TORCHRUN.get(name, nothing) is not nothing:
        problem = flags.no_value(name)
        fixes = [again(given, rest, name, [fix]) for fix in problem.fixes]
        return replace(problem, fixes=fixes)
    if name == "tee" and not TEE.fullmatch(value or ""):
        fix = again(given, rest, name, ["--tee=3"])
        what = msg("cli.run.tee", text=value)
        return Problem("script.show_ranks", what, msg("cli.run.tee_allowed"), [fix])
    if name == "shutdown_timeout" and not (value or "").isdecimal():
        fix = again(given, rest, name, ["--shutdown-timeout=30"])
        what = msg("cli.run.shutdown", text=value)
        return Problem("field.value", what, msg("cli.run.shutdown_allowed"), [fix])
    if name == "nnodes" and (both := MACHINES.fullmatch(value or "")):
        few, most = sorted(map(int, both.groups()))
        if few == int(both[1]) and few > 0:
            return None
        fix = again(given, rest, name, [f"--nnodes={max(few, 1)}:{most}"])
        what = msg("cli.run.nnodes", text=value)
        return Problem("field.value", what, msg("cli.run.nnodes_allowed"), [fix])
    if name in ("rdzv_endpoint", "master_addr") and value and not _is_address(name, value):
        with_port, flag = name == "rdzv_endpoint", name.replace("_", "-")
        host = value.partition(":")[0] or "10.0.0.1"
        fix = again(given, rest, name, [f"--{flag}={host}{':29500' * with_port}"])
        what = msg("cli.run.address", flag=flag, text=value)
        allowed = msg("cli.run.endpoint_allowed") if with_port else msg("cli.run.address_allowed")
        return Problem("field.value", what, allowed, [fix])
    return _misspelled(one, given, rest) if word.startswith("--") else None


def _is_address(name: str, text: str) -> bool:
    """Whether this may be the name or the address of a machine, with a port for --rdzv-endpoint."""
    if name == "rdzv_endpoint" and ENDPOINT.fullmatch(text):
        return True
    try:
        return ":" not in text or bool(ipaddress.IPv6Address(text.strip("[]")))
    except ValueError:
        return False


def _misspelled(one: Flag, given: list[Flag], rest: list[str]) -> Problem | None:
    """A flag that is nearly one of torchrun's. Those of launch_train.sh are found by the plan."""
    name, value, word = one
    own = {RANKS, *TORCHRUN} - {"role"}  # too short: similar to other words
    known = {*own, *USED, *PROGRAM, *flags.SWITCHES, *launcher_flags.FLAGS}
    explained = name in known or foreign_names.row_of(name)  # by the plan, if it is wrong here
    near = [] if explained else suggest.suggest(name, sorted(known))[:1]
    if not near or near[0] not in own:
        return None
    text = f"={value}" if value else ""
    fix = again(given, rest, name, [f"--{near[0].replace('_', '-')}{text}"])
    what = msg("plan.script.not_launcher_flag", typed=word.partition("=")[0])
    return Problem("script.own_flag", what, msg("plan.script.arguments_of_run"), [fix])


def again(given: list[Flag], rest: list[str], name: str, words: list[str]) -> str:
    """The command with `words` in place of a flag."""
    for one, value, word in given:
        if one == RANKS != name:
            words = ["-n", value or "", *words]
        elif one != name:
            words = [*words, word if value is None or "=" in word else f"{word}={value}"]
    return shlex.join(["./duet", "run", *words, *rest])
