"""Machines and ranks in the flags of accelerate and DeepSpeed, as `duet run` takes them."""

from __future__ import annotations

import string

from training.config import flags
from training.config.schema import FIELDS
from training.config.translate import RANKS, Changes
from training.host import hosts
from training.host.placement import LauncherOptions
from training.plan import launcher_flags

TOTAL = "num_processes"  # accelerate's: the ranks of all machines together
MACHINES = ("num_machines", "num_nodes")  # nnodes elsewhere


def listed(line: flags.CommandLine) -> LauncherOptions:
    """The machines of the command line."""
    found = {name: line.flags.get(name, ("", ""))[0] for name in ("hosts", "hostfile")}
    return LauncherOptions(hosts=found["hosts"], hostfile=found["hostfile"])


def number(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) < 6 else 0


def total(line: flags.CommandLine) -> int:
    """The ranks of all machines, as accelerate counts them; 0 without."""
    return next((number(one.text) for one in line.unknown if one.name == TOTAL), 0)


def machines(line: flags.CommandLine) -> int:
    texts = [line.flags.get("nnodes", ("", ""))[0]]
    texts += [one.text or "" for one in line.unknown if one.name in MACHINES]
    return next(filter(None, map(number, texts)), 1)


def translated(line: flags.CommandLine, one: flags.Unknown) -> Changes:
    """What replaces a flag of another launcher."""
    from training.config import meant

    if launcher_flags.find(one):
        return launcher_flags.changes(one)
    if one.name == "num_nodes" and (first := hosts.first(listed(line), number(one.text))):
        return {"hosts": first}  # DeepSpeed uses the first of the hostfile
    found: Changes = next(iter(meant.name(one.name, one.text, FIELDS).changes), {})
    if one.name == TOTAL and RANKS in found and (ranks := total(line)):
        found = found | {RANKS: str(max(1, ranks // machines(line)))}
    return {n: v for n, v in found.items() if n != "retries"}


def with_address(line: flags.CommandLine, changes: Changes) -> Changes:
    """The number of machines of another launcher with what `duet run` needs to reach them; the
    other launcher has that from a file of its own."""
    nnodes, names = number(changes.get("nnodes")), string.ascii_lowercase
    known = {*line.flags, *changes}
    if nnodes < 2 or known & {"hosts", "hostfile", "master_addr"}:
        return changes
    if "node_rank" in known or nnodes > len(names):
        return changes | {"master_addr": "ADDRESS"}
    return {n: v for n, v in changes.items() if n != "nnodes"} | {"hosts": ",".join(names[:nnodes])}
