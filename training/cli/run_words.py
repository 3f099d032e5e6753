"""The words of `duet run`: its flags, which are those of torchrun and of launch_train.sh, and the
program."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from training.config import flags
from training.config import program as config
from training.config.schema import FIELDS, kind
from training.core.messages import LANGUAGES, VARIABLE
from training.core.project import shipped
from training.host.platform_env import SHUTDOWN
from training.plan import launcher_flags
from training.plan.script_words import PROGRAM, SEPARATOR, USED, asked_for

RANKS = "nproc_per_node"
TEE = re.compile(r"[0-3]|\d{1,4}:[0-3](,\d{1,4}:[0-3])*", re.ASCII)
# an IPv6 address with a port has brackets
ENDPOINT = re.compile(r"(\[.*\]|[^:]*)(?::(\d+))?", re.ASCII)
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
    known = ENDPOINT.fullmatch(text)
    host, port = known.groups() if known else (text, None)
    return [*_address(host), *([f"--master_port={port}"] if port not in (None, "0") else [])]


def _conf(text: str) -> list[str]:
    """How long the machines wait for each other: join_timeout of c10d, timeout of static."""
    given = dict(pair.strip().partition("=")[::2] for pair in text.split(","))
    seconds = given.get("join_timeout") or given.get("timeout")
    return [f"--rendezvous_timeout={seconds}"] if seconds else []


def _address(text: str) -> list[str]:
    return [f"--master_addr={text.removeprefix('[').removesuffix(']')}"]


def _field(name: str) -> Callable[[str], list[str]]:
    return lambda text: [f"--{name}={text}"]


def nothing(text: str) -> list[str]:
    return []


# torchrun's flags with a value → words of launch_train.sh. Source: torch/distributed/run.py of
# torch 2.13. Every rank has a log file and a rendezvous, so some are not needed.
TORCHRUN: dict[str, Callable[[str], list[str]]] = {
    "nnodes": _field("nnodes"),
    "node_rank": _field("node_rank"),
    "master_addr": _address,
    "master_port": _field("master_port"),
    "rdzv_endpoint": _endpoint,
    "rdzv_conf": _conf,
    "max_restarts": _field("retries"),
    "log_dir": _field("log_dir"),
    "tee": _show,
    "local_ranks_filter": _field("show_ranks"),
    "numa_binding": lambda text: ["--numa=auto"],
    "shutdown_timeout": lambda text: [],  # a variable, see set_shutdown
    **dict.fromkeys(
        (
            *("rdzv_backend", "rdzv_id", "local_addr", "redirects", "role"),
            *("monitor_interval", "start_method", "log_line_prefix_template", "logs_specs"),
            *("signals_to_handle", "event_log_handler"),
            *("duplicate_stdout_filters", "duplicate_stderr_filters"),
        ),
        nothing,
    ),
}
SHORT = {"-n": RANKS, "-m": "module", "-t": "tee", "-r": "redirects", **launcher_flags.SHORT}
IGNORED_SWITCHES = ("standalone", "run_path", "use_env")
# What torchrun does if both are given.
OVERRIDDEN = {"tee": "local_ranks_filter"} | dict.fromkeys(
    ("master_addr", "master_port"), "rdzv_endpoint"
)


def is_meant(argv: list[str]) -> bool:
    """Whether the arguments of `duet launch` are those of `duet run`: a flag that only this command
    has precedes a program."""
    given, rest = parse(argv)
    only = {RANKS, "module", "no_python", *TORCHRUN, *IGNORED_SWITCHES} - FIELDS.keys()
    names = {name for name, _, _ in given}
    if not names & only or not rest or asked_for(argv):
        return False
    path = shipped(Path(rest[0]))
    known = os.path.isfile(path)  # noqa: PTH113 – Path.is_file raises for a name that is too long
    reads = path.suffix in (".py", ".json") and known and "module" not in names
    return not reads or config.kind(path, FIELDS) != config.CONFIG


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


def set_language(given: list[Flag]) -> None:
    """--lang of `given`, for the messages of this process; launch_train.sh rejects other values."""
    for name, value, _ in given:
        if name == "lang" and value in LANGUAGES:
            os.environ[VARIABLE] = value


def set_shutdown(given: list[Flag]) -> None:
    """--shutdown-timeout of `given`, for the launcher of each machine."""
    for name, value, _ in given:
        if name == "shutdown_timeout" and value:
            os.environ[SHUTDOWN] = value


def _whole(name: str) -> str:
    """A flag of torchrun may be abbreviated, as long as it is clear which one is meant."""
    own = (*FIELDS, *USED, *PROGRAM, *flags.SWITCHES, *launcher_flags.FLAGS)
    names = {RANKS, "module", "no_python", *TORCHRUN, *IGNORED_SWITCHES}
    if name in names or name in own or name.removeprefix("no_") in FIELDS:
        return name
    meant = [one for one in names if one.startswith(name)]
    return meant[0] if name and len(meant) == 1 else name


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
    return bool(rest) and not rest[0].startswith("-") and not os.path.exists(rest[0])
