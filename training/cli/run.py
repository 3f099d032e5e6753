"""Run your own program with N processes, unchanged; its arguments follow it.

Usage:
  ./duet run [-n N] [FLAGS] FILE [ARGS…]          a Python file, a folder or an archive
  ./duet run [-n N] [FLAGS] -m MODULE [ARGS…]     a module, as for python -m
  ./duet run [-n N] [FLAGS] PROGRAM [ARGS…]       any other program, also one on PATH

  -n N                   processes on this machine: a number, gpu (one for each GPU), cpu (one for
                         each core) or auto (gpu, else cpu); default: one for each GPU, else one
  -m, --module           FILE is the name of a module
  --no-python            execute the program directly, without Python
  --show_ranks=0,1|all   show the output of these ranks of this machine, each line with its rank
  --retries=N            restarts after failures of a rank or of the machine
  --min_ranks=K          after the loss of a GPU or a machine, continue with the others, at least K
  --hosts=a,b            start it on these machines by ssh (a:2: 2 processes); or --hostfile=FILE

torchrun's flags have the same meaning here: --nproc-per-node, --nnodes, --node-rank, --master-addr,
--master-port, --rdzv-endpoint, --max-restarts, --log-dir, --tee, --redirects, --local-ranks-filter,
--standalone. --nnodes=1:4 starts on 4 machines and continues with those that are left, at least 1.
The other flags of ./duet launch apply as well, such as --run_name, --hang_timeout, --numa,
--dry_run and --check.

Examples:
  ./duet run -n 2 train.py --epochs=3
  ./duet run -n gpu -m package.train --epochs=3
  ./duet run -n 2 --max-restarts=3 train.py       # restarts, as with torchrun
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from training.cli import torchrun_nodes
from training.config import flags
from training.config.resolve import PREFIX
from training.config.schema import FIELDS, kind
from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg
from training.core.project import ROOT, typed
from training.host import gpus, hosts, program
from training.host.placement import LauncherOptions
from training.plan import launcher_flags
from training.plan.script_words import PROGRAM, RUN, SEPARATOR, USED

SCRIPT = "launch_train.sh"
RANKS = "nproc_per_node"
LIMITS = ("min_ranks", "retries")
TEE = re.compile(r"[0-3]|\d{1,4}:[0-3](,\d{1,4}:[0-3])*", re.ASCII)
Flag = tuple[str, str | None, str]  # name, value, first word as typed


def _show(text: str) -> list[str]:
    """--tee: streams of all ranks (1: stdout, 2: stderr, 3: both), or of each: 0:3,1:2."""
    if ":" not in text:
        return [] if text == "0" else ["--show_ranks=all"]
    streams = {"0": ""}  # rank 0 keeps the console, unless --tee is off for it
    streams |= {rank: stream for rank, _, stream in (p.partition(":") for p in text.split(","))}
    ranks = [rank for rank, stream in streams.items() if stream != "0"]
    return [f"--show_ranks={','.join(ranks)}"] if ranks else []


def _endpoint(text: str) -> list[str]:
    known = re.fullmatch(r"(\[.*\]|[^:]*)(?::(\d+))?", text)  # an IPv6 address has brackets
    host, port = known.groups() if known else (text, None)
    return [*_address(host), *([f"--master_port={port}"] if port not in (None, "0") else [])]


def _address(text: str) -> list[str]:
    return [f"--master_addr={text.removeprefix('[').removesuffix(']')}"]


def _field(name: str) -> Callable[[str], list[str]]:
    return lambda text: [f"--{name}={text}"]


def _nothing(text: str) -> list[str]:
    return []


# torchrun's flags with a value → words of launch_train.sh. Source: torch/distributed/run.py of
# torch 2.13. Every rank has a log file and a rendezvous, so some are not needed.
TORCHRUN: dict[str, Callable[[str], list[str]]] = {
    "nnodes": _field("nnodes"),
    "node_rank": _field("node_rank"),
    "master_addr": _address,
    "master_port": _field("master_port"),
    "rdzv_endpoint": _endpoint,
    "max_restarts": _field("retries"),
    "log_dir": _field("log_dir"),
    "tee": _show,
    "local_ranks_filter": _field("show_ranks"),
    "numa_binding": lambda text: ["--numa=auto"],
    **dict.fromkeys(
        (
            *("rdzv_backend", "rdzv_id", "rdzv_conf", "local_addr", "redirects", "role"),
            *("monitor_interval", "start_method", "log_line_prefix_template", "logs_specs"),
            *("signals_to_handle", "shutdown_timeout", "event_log_handler"),
            *("duplicate_stdout_filters", "duplicate_stderr_filters"),
        ),
        _nothing,
    ),
}
SHORT = {"-n": RANKS, "-m": "module", "-t": "tee", "-r": "redirects", **launcher_flags.SHORT}
IGNORED_SWITCHES = ("standalone", "run_path", "use_env")
# What torchrun does if both are given.
OVERRIDDEN = {"tee": "local_ranks_filter"} | dict.fromkeys(
    ("master_addr", "master_port"), "rdzv_endpoint"
)


def main(argv: list[str]) -> int:
    flags_given, rest = parse(argv)
    if not argv or any(name in ("h", "help") for name, _, _ in flags_given):
        print(typed((__doc__ or "").strip()))
        return int(Exit.DONE if argv else Exit.CONFIG)
    words = translate(flags_given, rest, os.environ)
    os.environ["DUET_COMMAND"] = RUN
    os.execv(ROOT / SCRIPT, [str(ROOT / SCRIPT), *words])


def parse(argv: list[str]) -> tuple[list[Flag], list[str]]:
    """The flags, and what follows them: the program and its arguments."""
    found: list[Flag] = []
    rest = list(argv)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", SEPARATOR):
        word = rest.pop(0)
        name, equals, text = word.partition("=")
        if word[:2] in ("-n", "-t", "-r") and word[2:].isdecimal():  # -n2
            name, equals, text = word[:2], "=", word[2:]
        if name in SHORT:
            name, word = SHORT[name], f"--{SHORT[name]}{equals}{text}"
        name = _whole(name.lstrip("-").replace("-", "_"))
        value: str | None = text if equals else None
        if not equals and _takes_value(name, rest):
            value = rest.pop(0) if rest else ""
        found.append((name, value, word))
    return found, rest[1:] if rest[:1] == [SEPARATOR] else rest


def _whole(name: str) -> str:
    """A flag of torchrun may be abbreviated, as long as it is clear which one is meant."""
    own = (*FIELDS, *USED, *PROGRAM, *flags.SWITCHES, *launcher_flags.FLAGS)
    names = {RANKS, "module", "no_python", *TORCHRUN, *IGNORED_SWITCHES}
    if name in names or name in own or name.removeprefix("no_") in FIELDS:
        return name
    meant = [one for one in names if one.startswith(name)]
    return meant[0] if name and len(meant) == 1 else name


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
    if not rest:
        raise UserError(
            Problem(
                "run.no_program",
                msg("cli.run.no_program"),
                msg("plan.script.allowed"),
                [f"./duet run -n {number or 2} train.py"],
            )
        )
    _check(given, rest)
    number = number or _slots(given)
    set_by = "" if number else torchrun_nodes.ranks_variable(words, environ)
    own = rest[2:] if rest[1:2] == [SEPARATOR] else rest[1:]  # torchrun drops it too
    tail = [SEPARATOR, *own] if own else []
    count = processes(environ[set_by] if set_by else number, environ, set_by)
    words = _elastic(words, count, environ)
    words = [count, *words, f"--script={rest[0]}", *tail]
    backend = next((value for name, value, _ in reversed(given) if name == "rdzv_backend"), "")
    torchrun_nodes.check(backend or "", words, environ)
    return words


def _check(given: list[Flag], rest: list[str]) -> None:
    """Raises UserError for flags of torchrun with a value that would silently count as none."""
    problems = []
    for name, value, _ in given:
        if name == RANKS and not value:
            fix = _again(given, rest, RANKS, ["-n", "2"])
            problems.append(
                Problem("ranks.value", msg("cli.run.no_ranks"), msg("cli.run.counts"), [fix])
            )
        elif not value and TORCHRUN.get(name, _nothing) is not _nothing:
            problems.append(flags.no_value(name))
        elif name == "tee" and not TEE.fullmatch(value or ""):
            fix = _again(given, rest, name, ["--tee=3"])
            what = msg("cli.run.tee", text=value)
            problems.append(Problem("script.show_ranks", what, msg("cli.run.tee_allowed"), [fix]))
    if problems:
        raise UserError(problems)


def _again(given: list[Flag], rest: list[str], name: str, words: list[str]) -> str:
    """The command with `words` in place of a flag."""
    for one, value, word in given:
        if one == RANKS != name:
            words = ["-n", value or "", *words]
        elif one != name:
            words = [*words, word if value is None or "=" in word else f"{word}={value}"]
    return shlex.join(["./duet", "run", *words, *rest])


def _elastic(words: list[str], count: str, environ: Mapping[str, str]) -> list[str]:
    """torchrun's --nnodes=MIN:MAX, also from a platform: start on MAX machines and continue with
    MIN, unless --min_ranks is given or nothing is restarted. `count`: processes of a machine."""
    given = {name: value for name, (value, _) in flags.parse(words).flags.items()}
    few = torchrun_nodes.fewest(words, environ)
    if found := re.fullmatch(r"(\d+):(\d+)", given.get("nnodes", "")):
        few, most = int(found[1]), int(found[2])
        if not 0 < few <= most or not count.isdecimal():
            return words
        words = [f"--nnodes={most}" if word.startswith("--nnodes=") else word for word in words]
        few = few if few < most else 0
    settings = {name: given.get(name) or environ.get(f"{PREFIX}{name.upper()}") for name in LIMITS}
    limited = settings["min_ranks"] or settings["retries"] == "0"
    return (
        words
        if limited or not few or not count.isdecimal()
        else [*words, f"--min_ranks={few * int(count)}"]
    )


def _slots(given: list[Flag]) -> str:
    """The most slots of a machine of --hosts or --hostfile; '' without. The plan reports machines
    with fewer, and the problems of the list."""
    values = {name: value or "" for name, value, _ in given}
    asked = LauncherOptions(hosts=values.get("hosts", ""), hostfile=values.get("hostfile", ""))
    most = (
        max((host.slots for host in hosts.read(asked)[0]), default=0) if hosts.given(asked) else 0
    )
    return str(most) if most else ""


def processes(text: str, environ: Mapping[str, str], set_by: str = "") -> str:
    """The number of processes. A text that is none is returned, and reported by the plan. Raises
    UserError for `gpu` without a GPU. `set_by`: the variable that has this text, '' for -n."""
    if text and text not in torchrun_nodes.COUNTS:
        return text
    machine = gpus.inventory(environ) if text != "cpu" else None
    found = len(machine.gpus) if machine else 0
    if text == "gpu" and machine and not found:
        asked = msg("cli.run.set_by", name=set_by, text=text) if set_by else "-n gpu"
        what = msg("cli.run.no_gpu", asked=asked, reason=machine.reason)
        fix = "./duet run -n 2 train.py"
        raise UserError(Problem("run.no_gpu", what, msg("cli.run.counts"), [fix]))
    return str(found or (len(os.sched_getaffinity(0)) if text else 1))


def _takes_value(name: str, rest: list[str]) -> bool:
    """Whether the next word belongs to this flag. An unknown flag takes it unless it may be the
    program."""
    field = name.removeprefix("no_")
    if name in (*IGNORED_SWITCHES, *launcher_flags.SWITCHES, *flags.SWITCHES, "h"):
        return False
    if name in (RANKS, "lang", *TORCHRUN, *launcher_flags.FLAGS):
        return True
    if name in USED and kind(name) != "bool":
        return True
    if field in FIELDS and kind(field) == "bool":
        return False
    return bool(rest) and not rest[0].startswith("-") and not Path(rest[0]).exists()


if __name__ == "__main__":
    sys.exit(program.run(main, __doc__, internal=True))
