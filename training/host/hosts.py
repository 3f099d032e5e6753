"""The machines of `--hosts` and `--hostfile`: parsing, which of them is this one, and the address
at which the others reach the first."""

from __future__ import annotations

import os
import pwd
import random
import re
import shlex
import signal
import socket
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from training.core.errors import Problem, UserError
from training.core.find_run import path_of
from training.core.messages import msg
from training.host import network, ports
from training.host.placement import LOCAL, LOOPBACK, NODE, LauncherOptions, Topology

# Set by the launcher of several machines (training.launcher.hosts) in the environment of the launch
# command of each: 'NODE_RANK NNODES MASTER_ADDR MASTER_PORT'.
VARIABLE = "DUET_NODE"
AGENT = "DUET_AGENT"  # set by lib/host_agent.py, whose child the launch command is: its PID
HEAD = "hosts"  # source of a Topology: this process starts the machines
SSH_PORT = "22"
SSH_ASKS_S = 10
# [user@]name or [user@]address; never a leading '-', which ssh would take for an option
_NAME = re.compile(r"(?:[\w][\w.+-]*@)?(?:\w[\w.-]*|\[[0-9A-Fa-f:.]+\])", re.ASCII)
_SLOTS = re.compile(r"slots=(\d{1,4})", re.ASCII)


@dataclass(frozen=True)
class Host:
    """`name`: as ssh gets it; `slots`: ranks of this machine, 0 if not given."""

    name: str
    slots: int = 0


@dataclass(frozen=True)
class Target:
    """Where ssh connects to, according to its configuration."""

    hostname: str
    port: str = SSH_PORT
    user: str = ""

    def is_here(self) -> bool:
        """Whether this is this machine and user. A port of its own may lead to another machine (a
        container, a tunnel)."""
        if self.port != SSH_PORT or self.user not in ("", _own_name()):
            return False
        if self.hostname in ("localhost", socket.gethostname()):
            return True
        address = network.resolve(self.hostname)
        return address is not None and network.is_own(address)


def _own_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container with any user ID
        return ""


def outlive_launcher() -> None:
    """The run continues without the machine that coordinated it, also if the launcher of several
    machines was there."""
    if os.environ.get(AGENT) == str(agent := os.getppid()):
        os.kill(agent, signal.SIGUSR2)


def given(asked: LauncherOptions) -> bool:
    return bool(asked.hosts or asked.hostfile)


def read(asked: LauncherOptions) -> tuple[list[Host], list[Problem]]:
    """The machines in the order of their node ranks, and all problems of the list."""
    if asked.hosts and asked.hostfile:
        text = msg("host.hosts.both", hosts=asked.hosts, hostfile=asked.hostfile)
        return [], [Problem("flag.contradiction", text, "", [f"--hosts={asked.hosts}"], "hosts")]
    found, problems = _of_list(asked.hosts) if asked.hosts else _of_file(asked.hostfile)
    names = [host.name for host in found]
    for name in sorted({name for name in names if names.count(name) > 1}):
        text, allowed = msg("host.hosts.twice", name=name), msg("host.hosts.each_once")
        problems.append(Problem("hosts.twice", text, allowed, [], "hosts"))
    return found, problems


def with_first(asked: LauncherOptions, rank: int) -> str:
    """The value of --hosts that makes this machine the first; '' if the list cannot be read."""
    found, problems = read(asked) if given(asked) else ([], [])
    if problems or not rank < len(found):
        return ""
    return written((found[rank], *found[:rank], *found[rank + 1 :]))


def first(asked: LauncherOptions, most: int) -> str:
    """The value of --hosts for the first machines; '' if there are none or the list cannot be
    read."""
    found, problems = read(asked) if given(asked) else ([], [])
    return "" if problems else written(found[:most])


def written(machines: Iterable[Host]) -> str:
    """The value of --hosts for these machines."""
    return ",".join(map(_entry, machines))


def _entry(host: Host) -> str:
    name = re.sub(r"(?<=@)[^@]*:[^@]*$|^[^@]*:[^@]*$", r"[\g<0>]", host.name)  # IPv6
    return f"{name}:{host.slots}" if host.slots else name


def _of_list(text: str) -> tuple[list[Host], list[Problem]]:
    found, problems = [], []
    for entry in (word.strip() for word in text.split(",")):
        name, colon, slots = entry.rpartition(":") if _ends_in_slots(entry) else (entry, "", "")
        if not _NAME.fullmatch(name) or (colon and int(slots) == 0):
            what = msg("host.hosts.entry", entry=entry, text=text)
            problems.append(
                Problem("hosts.value", what, msg("host.hosts.entries"), ["--hosts=a,b"], "hosts")
            )
            continue
        found.append(Host(_plain(name), int(slots or 0)))
    return found, problems


def _ends_in_slots(entry: str) -> bool:
    return re.search(r":\d{1,4}$", entry, re.ASCII) is not None


def _plain(name: str) -> str:
    """An IPv6 address without its brackets, as ssh expects it."""
    return name.replace("[", "").replace("]", "")


def _of_file(path: str) -> tuple[list[Host], list[Problem]]:
    """`host slots=N` lines, as deepspeed and Open MPI write them; slots may be missing."""
    try:
        lines = path_of(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or msg("host.hosts.no_text")
        text = msg("host.hosts.file", path=path, why=why)
        if "," in path and not _of_list(path)[1]:  # mpirun's -H
            fixes = [f"--hosts={path}"]
        else:
            fixes = [f"printf 'a slots=2\\nb slots=2\\n' > {shlex.quote(path)}", "--hosts=a,b"]
        return [], [Problem("hosts.file", text, msg("host.hosts.lines"), fixes, "hostfile")]
    found, problems = [], []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = _SLOTS.fullmatch(words[1]) if words[1:] else None
        if not _NAME.fullmatch(words[0]) or words[2:] or (words[1:] and not slots):
            what = msg("host.hosts.line", path=path, number=number, line=line.strip())
            problems.append(
                Problem("hosts.line", what, msg("host.hosts.lines"), ["a slots=2"], "hostfile")
            )
            continue
        found.append(Host(_plain(words[0]), int(slots[1]) if slots else 0))
    if not found and not problems:
        text = msg("host.hosts.empty", path=path)
        problems.append(Problem("hosts.file", text, msg("host.hosts.lines"), [], "hostfile"))
    return found, problems


def find(environ: Mapping[str, str], asked: LauncherOptions, *, starts_ranks: bool) -> Topology:
    """The role of this process: it starts the machines, or has been started as one of them. Raises
    UserError with all problems."""
    if started := re.fullmatch(r"(\d+) (\d+) (\S+) (\d+)", environ.get(VARIABLE, ""), re.ASCII):
        rank, count, address, port = started.groups()
        reason = msg("host.place.host", nnodes=int(count))
        return Topology(
            NODE if int(count) > 1 else LOCAL,
            "flags",
            reason,
            nnodes=int(count),
            node_rank=int(rank),
            master_addr=address,
            master_port=int(port),
        )
    found, problems = read(asked)
    count = len(found)
    if not starts_ranks:
        text = msg("host.hosts.entrypoint")
        fix = f"./launch_train.sh 2 --hosts={asked.hosts or 'a,b'}"
        problems.append(Problem("hosts.entrypoint", text, "", [fix], "hosts"))
    if asked.launcher in ("env", "slurm"):
        text = msg("host.hosts.launcher", launcher=asked.launcher)
        problems.append(
            Problem("flag.contradiction", text, "auto, spawn, torchrun", ["--launcher=auto"])
        )
    if found and asked.nnodes not in (1, count):
        text = msg("host.hosts.nnodes", nnodes=asked.nnodes, count=count)
        problems.append(Problem("hosts.nnodes", text, str(count), [f"--nnodes={count}"]))
    if asked.node_rank:
        text = msg("host.hosts.node_rank", node_rank=asked.node_rank)
        problems.append(Problem("flag.contradiction", text, "0", ["--node_rank=0"]))
    try:
        shlex.split(asked.ssh_args)
    except ValueError as error:
        text = msg("host.hosts.ssh_args", text=asked.ssh_args, why=error)
        problems.append(Problem("hosts.ssh_args", text, "", ["--ssh_args='-p 2222'"], "ssh_args"))
    if problems:
        raise UserError(problems)
    address = asked.master_addr or first_address([target(h.name, asked.ssh_args) for h in found])
    reason = msg("host.place.hosts", nnodes=count)
    # two launches with the same first machine must not meet each other's machines
    port = asked.master_port or random.Random(os.urandom(8)).choice(ports.QUIET)
    return Topology(NODE, HEAD, reason, nnodes=count, master_addr=address, master_port=port)


def include_this(asked: LauncherOptions) -> bool:
    return any(target(host.name, asked.ssh_args).is_here() for host in read(asked)[0])


def too_few_slots(asked: LauncherOptions, ranks: int) -> list[Problem]:
    """Machines with fewer slots than ranks."""
    return [
        Problem(
            "hosts.slots",
            msg("host.hosts.slots", name=host.name, slots=host.slots, ranks=ranks),
            msg("host.hosts.same_ranks"),
            [f"N={host.slots}"],
        )
        for host in read(asked)[0]
        if 0 < host.slots < ranks
    ]


def target(name: str, ssh_args: str = "") -> Target:
    """Where ssh connects to; without ssh the name itself."""
    user, _, hostname = name.rpartition("@")
    try:
        done = subprocess.run(
            ["ssh", *shlex.split(ssh_args), "-G", name],
            capture_output=True,
            text=True,
            timeout=SSH_ASKS_S,
            check=False,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return Target(hostname, user=user)
    lines = (line.partition(" ") for line in done.stdout.splitlines())
    values = {key: value for key, _, value in lines}
    return Target(
        values.get("hostname", hostname), values.get("port", SSH_PORT), values.get("user", user)
    )


def first_address(targets: list[Target]) -> str:
    """The address of the first machine for the others: its own, or that of the interface that
    leads from here to the first of the others."""
    first = targets[0]
    if not first.is_here():
        return network.resolve(first.hostname) or first.hostname
    others = [one for one in targets[1:] if not one.is_here()]
    if not others:
        return LOOPBACK
    sources = [network.source_towards(one.hostname) for one in others]
    return next(filter(None, sources), socket.gethostname())
