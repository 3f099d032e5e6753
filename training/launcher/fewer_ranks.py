"""Continue with fewer ranks (`--min_ranks`): which GPU or machine is lost, which ranks remain, and
the batch with which they take the same steps."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from training import tasks
from training.config import batch
from training.core import cause_ids, phases
from training.core.failure_kinds import SILENT
from training.core.messages import msg
from training.core.units import plural
from training.launcher import replan, script_snapshot, seats
from training.launcher.restart import Failure, GiveUp, Restart, Team, killed
from training.watchdog.hang_report import BLOCKED, HANG
from training.watchdog.rank_exit import ERROR

if TYPE_CHECKING:
    from training.core.contracts.plan import LostRank, Plan

# what the other ranks report when a machine is lost
OF_PEERS = {
    *(cause_ids.PEER_DIED, cause_ids.NCCL_NETWORK),
    *(cause_ids.COLLECTIVE_TIMEOUT, cause_ids.RENDEZVOUS_TIMEOUT),
}
# Before a restart without a machine: one that runs without its connection has noticed the same and
# killed its ranks by then. They may write logs and heartbeats to the common disk.
SILENT_PAUSE_S, GONE_PAUSE_S = 5.0, 2.0


def remedy(failure: Failure, plan: Plan, before: Sequence[Failure]) -> Restart | GiveUp | None:
    """`before`: earlier failures of this launch, oldest first. None: no rank is lost, or the run
    needs all of its ranks."""
    if "elastic" not in plan:
        return None
    gone, why = _lost(failure, plan, before)
    if not gone:
        whole = Restart(0, why=failure.summary, pause_s=GONE_PAUSE_S)
        return whole if failure.returned else None
    chosen = _without(gone, why, failure, plan)
    if isinstance(chosen, GiveUp) and not (failure.nodes or _by_hardware(failure, before)):
        return None  # a suspect may be tried again with all ranks
    return chosen


def with_machines(chosen: Restart, failure: Failure, plan: Plan) -> Restart | GiveUp:
    """A restart for another reason, without the machines that are lost by now, and with those that
    have joined again."""
    if chosen.team or not (failure.nodes or failure.back):
        return chosen
    gone = _of_machines(failure, plan)
    changed = replan.with_changes(plan, chosen)
    found = _without(gone, chosen.why or failure.summary, failure, changed)
    if isinstance(found, GiveUp):
        return found
    label = f"{chosen.label}, {found.label}" if chosen.label else found.label
    return replace(chosen, why=found.why, label=label, team=found.team)


def _without(gone: Sequence[int], why: str, failure: Failure, plan: Plan) -> Restart | GiveUp:
    # a machine that is lost with the failure of a rank has not had that failure
    others = {*_of_machines(failure, plan)}.difference(_own(failure, plan))
    of_others = failure.cause if failure.cause in OF_PEERS else cause_ids.PEER_DIED
    lost = tuple(
        _new(plan, seat, of_others if seat in others else failure.cause, failure.step, why)
        for seat in gone
    )
    team = choose(plan, lost, failure.back)
    if isinstance(team, GiveUp):
        return team
    # the headline has the summary of the failure
    short = "" if why == failure.summary else msg("launcher.elastic.because", why=why)
    pause_s = SILENT_PAUSE_S if failure.kind == SILENT else GONE_PAUSE_S if failure.nodes else 0.0
    without, again = named(plan, lost), names(plan, failure.back)
    changes = [msg("launcher.elastic.without", names=without, why=short)] if lost else []
    changes += [msg("launcher.rejoin.with", names=again)] if again else []
    return Restart(
        0,
        {},
        msg("launcher.elastic.why", names=without, why=why)
        if lost
        else msg("launcher.rejoin.why", names=again),
        label(plan, team, msg("launcher.elastic.comma").join(changes)),
        pause_s,
        team=team,
    )


def at_start(plan: Plan, absent: Sequence[int], why: str) -> Team | GiveUp:
    """The ranks of the first start without these machines."""
    gone = seats.on(plan["elastic"], absent)
    return choose(plan, [_new(plan, seat, cause_ids.RENDEZVOUS_TIMEOUT, 0, why) for seat in gone])


def choose(plan: Plan, lost: Sequence[LostRank] = (), back: Sequence[int] = ()) -> Team | GiveUp:
    """The ranks of the next start after losing `lost` and getting the seats `back`: as many as the
    tokens per step can be divided among, with the largest device_batch_size that fits."""
    elastic = plan["elastic"]
    away = {one["seat"] for one in (*elastic["lost"], *lost)} - set(back)
    left = [seat for seat in seats.in_order(plan) if seat not in away]
    least, limit = elastic["min_ranks"], elastic["device_batch_size"]
    if len(left) < least:
        few = plural(len(left), "rank")
        return GiveUp(msg("launcher.elastic.too_few", left=few, least=least), too_few=True)
    if seats.node_of(elastic, left[0]) != seats.leader(plan):
        return GiveUp(msg("launcher.elastic.leader", node=seats.leader(plan)), hand_over=True)
    if limit is None:
        return Team(tuple(left), tuple(lost), back=tuple(back))
    for count in range(len(left), least - 1, -1):
        sizes = batch.device_choices(
            plan["batch"]["seq_len"], count, plan["config"]["total_batch_size"]
        )
        sizes = [size for size in sizes if size <= limit]
        fitting = [size for size in sizes if _fits(plan, size, count)]
        # where no estimate fits, the first failure for lack of memory takes a smaller one
        if sizes:
            size = (fitting or sizes)[-1]
            return Team(tuple(left[:count]), tuple(lost), size, tuple(back))
    return GiveUp(
        msg(
            "launcher.elastic.indivisible",
            total=plan["config"]["total_batch_size"],
            unit=tasks.task_of(plan)["unit"],
            least=least,
            most=len(left),
        )
    )


def label(plan: Plan, team: Team, change: str) -> str:
    """The change of a restart for the console: ranks, batch, expected duration of a step."""
    now, then = plan["ranks"], len(team.seats)
    if team.size is None:
        return msg("launcher.elastic.label_script", now=now, then=then, change=change)
    text = msg(
        "launcher.elastic.label", now=now, then=then, change=change, factor=slower(now, then)
    )
    config, unit = plan["config"], tasks.task_of(plan)["unit"]
    split = batch.split(team.size, plan["batch"]["seq_len"], then, config["total_batch_size"])
    assert split
    text += msg("launcher.elastic.batch", sentence=split.sentence(unit))
    away = {one["seat"] for one in (*plan["elastic"]["lost"], *team.lost)} - set(team.back)
    if (spare := plan["elastic"]["ranks"] - len(away | set(team.seats))) > 0:
        text += msg(
            "launcher.elastic.spare",
            spare=plural(spare, "rank"),
            total=config["total_batch_size"],
            unit=unit,
            count=then + spare,
        )
    return text


def slower(now: int, then: int) -> float:
    """Expected time of a step, as a multiple of the present one: the same work on other ranks."""
    return now / then


def shown(plan: Plan, team: Team, ranks: tuple[int, int]) -> str:
    """For the restart event."""
    now, then = ranks
    if not team.lost:
        return msg("launcher.elastic.event_back", now=now, then=then)
    return msg("launcher.elastic.event", now=now, then=then, names=named(plan, team.lost))


def at_end(plan: Plan) -> str:
    """The ranks that a run lacks at its end; '' if it has all."""
    if "elastic" not in plan or not plan["elastic"]["lost"]:
        return ""
    lost = named(plan, plan["elastic"]["lost"])
    ranks = plural(plan["ranks"], "rank")
    return msg("launcher.elastic.at_end", ranks=ranks, of=plan["elastic"]["ranks"], names=lost)


def names(plan: Plan, wanted: Sequence[int]) -> str:
    """Of lost ranks, by their planned numbers."""
    return named(plan, [one for one in plan["elastic"]["lost"] if one["seat"] in wanted])


def named(plan: Plan, lost: Sequence[LostRank]) -> str:
    """GPUs, ranks, and machines of which every rank is lost."""
    count = seats.per_node(plan["elastic"])
    by_node = Counter(one["node"] for one in lost if "node" in one)
    found = [
        msg("launcher.node", node=one["node"])
        if "node" in one and by_node[one["node"]] == count
        else name(one)
        for one in lost
    ]
    return msg("launcher.elastic.comma").join(dict.fromkeys(found))


def name(lost: LostRank) -> str:
    own = (
        msg("launcher.retry.rank", rank=lost["seat"])
        if lost["gpu"] is None
        else f"GPU {lost['gpu']}"
    )
    if "node" not in lost:
        return own
    return own + msg("launcher.failure.on_node", node=lost["node"])


def _lost(failure: Failure, plan: Plan, before: Sequence[Failure]) -> tuple[list[int], str]:
    """(planned numbers of the ranks, reason)."""
    elastic, machines = plan["elastic"], _of_machines(failure, plan)
    own = _own(failure, plan)
    if _by_hardware(failure, before):
        return sorted({*own, *machines}), failure.summary
    if machines and (failure.kind != ERROR or failure.cause in OF_PEERS):
        return machines, failure.summary
    last = before[-1] if before else None
    if (
        last is None
        or last.changed
        or not (_of_one_rank(failure) and _of_one_rank(last))
        or last.rank != failure.rank
    ):
        return [], ""
    # the same step fails again whatever the device, unless that was lost before
    if _same_step(last, failure) and not set(own) & set(elastic["rejoined"]):
        return [], ""
    if elastic["device_batch_size"] is None:
        return own, msg("launcher.elastic.twice_script")
    return own, msg("launcher.elastic.twice", first=last.step, second=failure.step)


def _own(failure: Failure, plan: Plan) -> list[int]:
    """Planned numbers of the ranks that have failed."""
    ranks = failure.gone or (() if failure.rank is None else (failure.rank,))
    return [plan["elastic"]["seats"][rank] for rank in ranks]


def _same_step(last: Failure, failure: Failure) -> bool:
    """A script has no steps that Duet knows: its checkpoints show progress. Errors of a GPU are
    noticed up to a step later."""
    if script_snapshot.moved(last.snapshot, failure.snapshot):
        return False
    return abs(last.step - failure.step) <= (last.suspect_gpu or failure.suspect_gpu)


def may_be_gpu(failure: Failure, plan: Plan) -> bool:
    """An error of a kernel that a defective GPU may have caused, in a run that can continue without
    that GPU."""
    return "elastic" in plan and failure.suspect_gpu


def _of_machines(failure: Failure, plan: Plan) -> list[int]:
    away = {one["seat"] for one in plan["elastic"]["lost"]}
    return [seat for seat in seats.on(plan["elastic"], failure.nodes) if seat not in away]


def _by_hardware(failure: Failure, before: Sequence[Failure]) -> bool:
    """Is a GPU lost or faulty? One that is unavailable at the first start is a mistake of the
    launch, later it has been lost."""
    return bool(
        failure.gone
        or failure.cause == cause_ids.GPU_HARDWARE
        # also torch's message for a GPU that no longer accepts a context
        or (failure.cause == cause_ids.NO_GPU and before)
    )


def _of_one_rank(failure: Failure) -> bool:
    """A failure that a defective device could explain."""
    hangs = failure.cause == cause_ids.HANG and failure.kind in (HANG, BLOCKED)
    stuck = hangs and not phases.off_gpu(failure.phase)
    explained = failure.cause in (cause_ids.HOST_OOM_KILLED, cause_ids.CUDA_DEVICE_ASSERT)
    crashed = killed(failure) and not explained
    return failure.rank is not None and (stuck or crashed or failure.suspect_gpu)


def _new(plan: Plan, seat: int, cause: str, step: int, why: str) -> LostRank:
    elastic, here = plan["elastic"], seats.here(plan)
    gpu = elastic["gpus"][seat - here.start] if elastic["gpus"] and seat in here else None
    made: LostRank = {
        "seat": seat,
        "gpu": gpu["index"] if gpu else None,
        "uuid": gpu["uuid"] if gpu else "",
        "cause": cause,
        "step": step,
        "time": time.time(),
        "text": why,
    }
    return made | {"node": seats.node_of(elastic, seat)} if "per_node" in elastic else made


def _fits(plan: Plan, size: int, count: int) -> bool:
    """Is the estimated memory of a rank available? It grows with fewer ranks, which share Muon's
    state."""
    step = tasks.step_of(plan, size, count)
    free = plan["memory"]["free_bytes"] if "memory" in plan else None
    if step is None or free is None:
        return True
    # the ranks share the memory of the machine
    if plan["device"]["value"] == "cpu" and "per_node" not in plan["elastic"]:
        free = free * plan["elastic"]["ranks"] // count
    return step.estimate.needed <= free
