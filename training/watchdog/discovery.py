"""Find the processes of the ranks of a run directory, or of a process that belongs to a
training."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import NamedTuple

from training.core import find_run, heartbeat, rundir, standing
from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg
from training.host.process import LAUNCHERS
from training.watchdog import rank_process, rank_variables, spawned, wrapped
from training.watchdog.probes import procfs

COMMAND = "./duet attach"


def of_run(path: Path) -> dict[int, int]:
    """Rank → PID, of this machine's running ranks. Raises UserError."""
    run = rundir.RunDir(path)
    if not run.plan.exists():
        newest = find_run.newest(path) if path.is_dir() else find_run.newest(path.parent)
        fixes = (
            [f"{COMMAND} --run={shlex.quote(str(newest.path))}"]
            if newest
            else [f"{COMMAND} --pid=PID"]
        )
        raise UserError(
            Problem(
                "run.not_a_run",
                msg("watchdog.find.not_a_run", path=path),
                msg("watchdog.find.with_plan"),
                fixes,
            )
        )
    elsewhere, machines = set(), set()
    found: dict[int, int] = {}
    for file in [run.supervisor, *path.glob("node*/supervisor.json")]:
        facts = rundir.read_json(file) or {}
        if where := standing.elsewhere(facts):
            elsewhere.add(where)
            if where == facts["host"]:  # not another container of this machine
                machines.add(where)
            continue
        for entry in facts.get("ranks", []):
            process = procfs.read_process(entry["pid"])
            # The PID may have been reused: the ranks are children of the supervisor.
            if process is None or process.state in "ZX" or process.parent != facts["pid"]:
                continue
            found |= (
                {entry["rank"]: entry["pid"]}
                if entry["rank"] is not None
                else started_by(entry["pid"], settled=True).ranks
            )
    # started by the user's torchrun
    for beat in heartbeat.read_all(run.heartbeats) if not found else []:
        process = procfs.read_process(beat.pid)
        if (
            process
            and process.state not in "ZX"
            and beat.phase != heartbeat.FINISHED
            and rank_process.writes(beat, run)
        ):
            found[beat.rank] = beat.pid
    if len(found) == 1:
        (only,) = found.values()
        found = own_ranks(only, settled=True).ranks or found
    if not found:
        where = msg("watchdog.find.no_ranks", path=path)
        if elsewhere:
            raise UserError(
                Problem(
                    "run.elsewhere",
                    msg(
                        "watchdog.find.elsewhere",
                        where=where,
                        elsewhere=", ".join(sorted(elsewhere)),
                    ),
                    "",
                    [f"ssh {min(machines)}"] if machines else [],
                )
            )
        raise UserError(
            Problem(
                "run.no_ranks",
                where,
                msg("watchdog.find.in_progress"),
                [msg("watchdog.find.how_it_ended", path=shlex.quote(str(path)))],
            )
        )
    return wrapped.trainings(dict(sorted(found.items())))


def of_process(pid: int) -> dict[int, int]:
    """Rank → PID, of the training to which this process belongs: a rank, one of its workers, or the
    launcher of the ranks. A single Python process without ranks is rank 0. Raises UserError."""
    process = procfs.read_process(pid)
    if process is None or process.state in "ZX":
        raise UserError(
            Problem(
                "process.missing",
                msg("watchdog.find.no_process", pid=pid),
                "",
                [msg("core.args.list_pythons")],
            )
        )
    if process.parent != 0 and procfs.is_closed(pid):
        text = msg("watchdog.find.not_allowed", pid=pid)
        raise UserError(
            Problem(
                "process.not_allowed",
                text,
                msg("watchdog.find.own_process"),
                [f"sudo {COMMAND} --pid={pid}"],
            ),
            Exit.RESOURCES,
        )
    top = _top(pid)
    if top is None:
        found = _below(pid) or {
            rank: [one] for rank, one in spawned.ranks(pid, settled=True)[0].items()
        }
        if not found and procfs.is_python(pid):
            return {0: pid}
    else:
        # Its siblings with the same rendezvous address: below the same parent, or further up where
        # each rank has its own shell.
        mine, found, above = rank_variables.rendezvous(top), {}, procfs.read_process(top)
        found = {rank_variables.number(top): [top]}
        while above and above.parent > 1 and len(found) < rank_variables.world(top):
            found = {
                r: p
                for r, pids in _below(above.parent).items()
                if (p := [q for q in pids if rank_variables.rendezvous(q) == mine])
            } or found
            above = procfs.read_process(above.parent)
    alone = [pids[0] for pids in found.values() if len(found) == len(pids) == 1]
    if alone:
        found = _own_ranks(alone[0], settled=True)[0] or found
    if not found:
        fixes = [msg("core.args.list_pythons")]
        raise UserError(
            Problem(
                "process.not_python",
                msg("watchdog.find.not_python", pid=pid, command=process.command[:80]),
                "",
                fixes,
            )
        )
    several = [pids for pids in found.values() if len(pids) > 1]
    if several:
        fixes = [f"{COMMAND} --pid={one}" for one in several[0]]
        raise UserError(
            Problem(
                "process.several",
                msg("watchdog.find.several", pid=pid),
                msg("watchdog.find.one_rank"),
                fixes,
            )
        )
    return wrapped.trainings({rank: pids[0] for rank, pids in sorted(found.items())})


def below(pid: int) -> dict[int, int]:
    """Rank → PID of the ranks started by a launcher such as torchrun."""
    return {rank: pids[0] for rank, pids in sorted(_below(pid).items())}


class Started(NamedTuple):
    """The ranks that a command has started: rank → PID, their number on this machine, on all
    machines. `maybe`: further processes of this machine that may still join them."""

    ranks: dict[int, int]
    local: int = 0
    world: int = 0
    maybe: int = 0


def started_by(pid: int, settled: bool = False) -> Started:
    """`settled`: see spawned.ranks."""
    found, main = below(pid), python_of(pid)
    if not found:
        found, maybe = _spawned(main, settled)
        return Started(found, len(found), len(found), maybe)
    one = next(iter(found.values()))
    first = rank_variables.first(one)
    # Lightning: the program itself is the first rank, and starts itself again for each of the
    # others. A launcher executes another program; its first rank may have ended.
    again = one in procfs.family(main) and procfs.program(one) == procfs.program(main) != ""
    if again and first not in found:
        found = {first: main, **found}
    local, world, maybe = rank_variables.sizes(found.values())
    before = rank_variables.uncounted(one, local)
    return Started({before + rank: pid for rank, pid in found.items()}, local, world, maybe)


def own_ranks(pid: int, settled: bool = False) -> Started:
    """The ranks that the only rank of a training has started itself, by a launcher or by
    torch.multiprocessing; none of several trainings. `settled`: see spawned.ranks."""
    several, maybe = _own_ranks(pid, settled)
    if any(len(pids) > 1 for pids in several.values()):
        return Started({})
    found = {rank: pids[0] for rank, pids in sorted(several.items())}
    local, world, further = rank_variables.sizes(found.values())
    return Started(found, local, world, max(maybe, further))


def _own_ranks(pid: int, settled: bool) -> tuple[dict[int, list[int]], int]:
    """Rank → PIDs, at least two ranks or none; how many processes may still join them. Workers
    inherit the variables of their rank: ranks below it have others. A rank that has joined a
    process group trains itself, and what it starts beside that is another training."""
    if procfs.environment(pid).get("WORLD_SIZE", "1") != "1":
        return {}, 0
    found, maybe, main = _below(pid, rank_variables.seat(pid)), 0, python_of(pid)
    if not found:
        connected, maybe = _spawned(main, settled)
        # other processes may have connections too, such as a server and its client
        if all(map(spawned.in_group, connected.values())):
            found = {rank: [one] for rank, one in connected.items()}
    elif spawned.in_group(main):
        found = {}
    return (found, maybe) if len(found) > 1 else ({}, 0)


def _spawned(main: int, settled: bool) -> tuple[dict[int, int], int]:
    """Ranks without variables that this Python process or one below it has started; how many
    processes may still join them."""
    tree = procfs.tree()
    for one in (main, *(one for one in procfs.family(main, tree) if procfs.is_python(one))):
        found, possible = spawned.ranks(one, tree, settled)
        if found:
            return found, possible - len(found)
    return {}, 0


def python_of(pid: int) -> int:
    """The topmost Python process below a shell script or another program; that itself where there
    is none. Of several beside each other, such as a logger and the training, the first one that has
    loaded torch, if one has."""
    if procfs.is_python(pid):
        return pid
    tree = procfs.tree()
    top: list[int] = []
    below = set[int]()
    for child in procfs.family(pid, tree):
        if child not in below and procfs.is_python(child):
            top.append(child)
            below.update(procfs.family(child, tree))
    if len(top) < 2:
        return top[0] if top else pid
    return next((one for one in top if procfs.maps(one, wrapped.TORCH)), top[0])


def _below(pid: int, without: rank_variables.Seat | None = None) -> dict[int, list[int]]:
    """The topmost Python process of each rank; its workers inherit its variables. `without`:
    processes with these variables are not ranks."""
    found: dict[int, list[int]] = {}
    inside: set[int] = set()
    tree = procfs.tree()
    for child in procfs.family(pid, tree):
        if child in inside or not _is_rank(child, tree) or rank_variables.seat(child) == without:
            continue
        inside.update(procfs.family(child, tree))
        found.setdefault(rank_variables.number(child), []).append(child)
    return found


def _is_rank(pid: int, tree: dict[int, list[int]]) -> bool:
    variables = procfs.environment(pid)
    return (
        ("RANK" in variables or "LOCAL_RANK" in variables)
        and procfs.is_python(pid)
        and not _starts_ranks(pid, tree)
    )


def _starts_ranks(pid: int, tree: dict[int, list[int]] | None = None) -> bool:
    """Is this a launcher in an environment where a platform has set rank variables? LOCAL_RANK is
    set by launchers alone."""
    return procfs.program(pid) in LAUNCHERS or (
        "LOCAL_RANK" not in procfs.environment(pid)
        and any("LOCAL_RANK" in procfs.environment(child) for child in procfs.family(pid, tree))
    )


def _top(pid: int) -> int | None:
    """The rank that is this process or above it; None without one."""
    found, now = None, procfs.read_process(pid)
    number = rank_variables.number(pid) if rank_variables.has_number(pid) else None
    while now and now.pid > 1 and number is not None:
        if (
            not rank_variables.has_number(now.pid)
            or rank_variables.number(now.pid) != number
            or _starts_ranks(now.pid)
        ):
            break
        if procfs.is_python(now.pid):
            found = now.pid
        now = procfs.read_process(now.parent)
    return found
