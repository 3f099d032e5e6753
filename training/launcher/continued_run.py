"""Runs with `--min_ranks` that continue without this machine. It finds the one that coordinates
such a run at the address of its command, by what it knew about the others when it was lost
(machines.json), or by an invitation."""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from training.core import log, rundir
from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg
from training.host.placement import NODE, Topology
from training.launcher import invited, leadership, live_run, rendezvous
from training.launcher.admission import PROTOCOL
from training.launcher.json_socket import Message
from training.launcher.live_run import BUSY_S, RETRY_S
from training.launcher.peer_link import PeerLink
from training.launcher.same_settings import facts

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan

JOINS = "DUET_JOINS"  # variable: this launch must not begin a run of its own
At = tuple[str, int]  # address and port
RUNS = 2  # the newest ones
DECIDED_S = 80.0  # longer than a succession takes


def keep(run: rundir.RunDir, line: PeerLink) -> None:
    """Write where the machines of a run listen. A disk error is a warning."""
    known = {str(node): list(at) for node, at in line.machines.items()}
    if line.place.leads:  # a lost machine with the same disk reads the file too
        known[str(line.place.node_rank)] = [line.place.master_addr, line.port]
    leader, launch = line.place.leader, line.plan["launch"]
    rundir.keep_json(run.machines, {"leader": leader, "launch": launch, "machines": known})


def of_plan(plan: Plan, experiments: Path, resumed: rundir.RunDir | None = None) -> Topology | None:
    """The role of this machine in a run that continues without it, with the settings of this plan.
    Raises UserError if there must be one, or if the `resumed` run is running elsewhere."""
    place = Topology(**plan["place"])
    found = _joined(plan, place, experiments) if "elastic" in plan and place.kind == NODE else None
    if resumed and place.leads and not found:
        live_run.refuse(resumed)
    return found


def _joined(plan: Plan, place: Topology, experiments: Path) -> Topology | None:
    hello = _hello("run", place) | {"facts": facts(plan)}
    joins = place.leads and bool(os.environ.get(JOINS))
    for found in chain(_found(place, experiments), _invited(plan, place, joins=joins)):
        at = found.master_addr, found.master_port
        run = leadership.ask(at, hello)[1].get("run")
        if rundir.is_name(run):
            text = f"{at[0]}:{at[1]}"
            log.info(msg("launcher.nodes.continued", run=run, leader=found.leader, at=text))
            return found
    if joins:
        raise UserError(
            Problem("nodes.nothing_to_join", msg("launcher.nodes.nothing_to_join")), Exit.RESOURCES
        )
    return None


def of_place(place: Topology, experiments: Path, resumed: str) -> Topology | None:
    """The same before there is a plan: its settings may differ from those of the run. `resumed`:
    the value of --resume."""
    run = Path(resumed).name
    known = bool(run) and (experiments / run).is_dir()
    return next(_found(place, experiments, glob.escape(run) if known else "*"), None)


def _hello(want: str, place: Topology) -> Message:
    return {"duet": PROTOCOL, "want": want, "node": place.node_rank}


def _found(place: Topology, experiments: Path, runs: str = "*") -> Iterator[Topology]:
    """Runs that continue: the one at the address of this command, then those that this disk knows,
    the newest first. `runs`: a pattern of their names."""
    if found := _at_own_address(place):
        yield found
    ends = ("machines.json", "node*/machines.json")
    files = [file for end in ends for file in experiments.glob(f"{runs}/{end}")]
    files.sort(key=_written, reverse=True)
    asked = set[tuple[str, int]]()
    for file in files[: RUNS * place.nnodes]:
        known = rundir.read_json(file) or {}
        machines = rendezvous.machines(known.get("machines"), place)
        new = [at for at in machines.values() if at not in asked]
        asked.update(new)
        if found := _decided(new, place, known.get("launch")):
            yield found


def _at_own_address(place: Topology) -> Topology | None:
    """The machine at the address of this command, if it has taken over: a new machine joins so."""
    at = place.master_addr, place.master_port
    leader = leadership.ask(at, _hello("leader", place))[1].get("leader")
    usual = leader in (place.leader, place.node_rank)
    if usual or not isinstance(leader, int) or not 0 <= leader < place.nnodes:
        return None
    return replace(place, leader=leader)


def _invited(plan: Plan, place: Topology, *, joins: bool) -> Iterator[Topology]:
    found = invited.wait(plan, joins=joins) if place.leads else None
    if found:
        yield found


def _decided(machines: list[At], place: Topology, launch: object) -> Topology | None:
    """The role of this machine as one of these answers. Where it has coordinated the run itself,
    the others may still decide who takes over."""
    begun, waits = time.monotonic(), False
    with ThreadPoolExecutor(max(1, len(machines))) as pool:
        while machines:
            answers = list(pool.map(lambda at: (at, *_leader(at, place, launch)), machines))
            for at, _, leader, where in answers:
                if leader not in (None, place.node_rank):
                    address, port = where or at
                    return replace(place, leader=leader, master_addr=address, master_port=port)
            waited = time.monotonic() - begun
            machines = [
                at
                for at, state, leader, _ in answers
                if leader is not None or (state == "silent" and waited < BUSY_S)
            ]
            if not machines or waited > DECIDED_S:
                break
            if not waits:
                waits = True
                log.info(msg("launcher.nodes.decide", seconds=DECIDED_S))
            time.sleep(RETRY_S)
    return None


def _leader(
    at: At, place: Topology, launch: object
) -> tuple[leadership.State, int | None, At | None]:
    """(state, machine that coordinates this launch, where it listens if elsewhere) as another one
    answers."""
    state, answer = leadership.ask(at, _hello("leader", place))
    leader, where = answer.get("leader"), answer.get("at")
    if not isinstance(leader, int) or not 0 <= leader < place.nnodes:
        return state, None, None
    if answer.get("launch") != launch:  # another run listens there now
        return state, None, None
    if leader == place.node_rank and isinstance(where, list) and len(where) == 2:
        other = {str(leader): where}
        for here in rendezvous.machines(other, replace(place, node_rank=-1)).values():
            if leadership.ask(here, _hello("leader", place))[0] == "answers":
                return state, None, None  # it runs, so it is not this one
    return state, leader, rendezvous.machines({str(leader): where}, place).get(leader)


def _written(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
