"""Whether a run that is to be resumed is running on other machines (`--min_ranks`). They are asked
where they listen (machines.json)."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

from training.core import log, rundir, standing
from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg
from training.host.placement import NODE, Topology
from training.launcher import leadership, rendezvous
from training.launcher.admission import PROTOCOL
from training.launcher.waiting import Waiting

RETRY_S = 1.0
BUSY_S = 20.0  # a machine that ends its ranks answers late; another program does not answer at all


class _Machine(NamedTuple):
    """`launch`: the one in which this node listened at `at`."""

    node: int
    at: tuple[str, int]
    launch: object


def join_flags(place: Topology, node: object) -> str:
    """For the launch command of this node, which then joins the run that `place` coordinates."""
    at = f"--master_addr={place.master_addr} --master_port={place.master_port}"
    return f"--nnodes={place.nnodes} --node_rank={node} {at}"


def refuse(run: rundir.RunDir) -> None:
    """Raises UserError if a machine of the run answers. A warning names those that may be running
    although they do not answer."""
    plan = standing.read_plan(run)
    place = plan.get("place") if plan else None  # a job that has not begun has none
    nnodes = place["nnodes"] if place else 1
    everyone = Topology(NODE, "", "", nnodes=nnodes, node_rank=-1)
    machines, waiting = _listeners(run, everyone), Waiting()
    unknown: list[_Machine] = []
    while machines:
        with ThreadPoolExecutor(len(machines)) as pool:
            states = [pool.submit(_state, one, everyone) for one in machines]
        answers = list(zip(machines, (state.result() for state in states), strict=True))
        for _, (_, leader) in answers:
            if leader:
                raise UserError(_problem(run, leader), Exit.RESOURCES)
        machines = [one for one, (state, _) in answers if state == "silent"]
        unknown += [one for one, (state, _) in answers if state == "unknown"]
        if waiting.seconds > BUSY_S:
            unknown += machines
            break
        if machines:
            waiting.report(_names(machines))
            time.sleep(RETRY_S)
    if unknown:
        log.warning(msg("launcher.nodes.may_run", run=run.name, names=_names(unknown)))


def _listeners(run: rundir.RunDir, everyone: Topology) -> list[_Machine]:
    """What the machines of the run on this disk knew about all of them."""
    found = set[_Machine]()
    for file in (run.machines, *run.path.glob("node*/machines.json")):
        known = rundir.read_json(file) or {}
        for node, at in rendezvous.machines(known.get("machines"), everyone).items():
            found.add(_Machine(node, at, str(known.get("launch"))))
    return sorted(found)


def _state(machine: _Machine, everyone: Topology) -> tuple[leadership.State, Topology | None]:
    """With the role of the machine that coordinates the run, where this one belongs to it."""
    other = 0 if machine.node else 1  # a machine that coordinates answers only another node
    hello = {"duet": PROTOCOL, "want": "leader", "node": other}
    state, answer = leadership.ask(machine.at, hello)
    if state != "answers":
        return state, None
    if "refused" in answer:  # perhaps another version of Duet
        return "unknown", None
    leader = answer.get("leader")
    if answer.get("launch") != machine.launch or not isinstance(leader, int):
        return "dead", None  # another run listens there now
    found = rendezvous.machines({str(leader): answer.get("at")}, everyone)
    address, port = found.get(leader, machine.at)
    return state, replace(everyone, leader=leader, master_addr=address, master_port=port)


def _problem(run: rundir.RunDir, leader: Topology) -> Problem:
    at = f"{leader.master_addr}:{leader.master_port}"
    text = msg("launcher.nodes.live", run=run.name, leader=leader.leader, at=at)
    fixes = [msg("launcher.nodes.join_lost", flags=join_flags(leader, "…"))]
    return Problem("run.live", text, "", fixes)


def _names(machines: list[_Machine]) -> str:
    return ", ".join(
        msg("launcher.nodes.name", node=one.node, place=f" ({one.at[0]}:{one.at[1]})")
        for one in machines
    )
