"""Which rank computes on which GPU, from the driver's list of processes."""

from __future__ import annotations

from training.core.jsonl import dig, text
from training.core.messages import msg
from training.core.units import GIB
from training.host import gpu_choice, gpu_processes, gpus
from training.host.gpus import Gpu, GpuInventory
from training.monitor import alerts, host_stats
from training.monitor.health.check import (
    BAD,
    OK,
    UNKNOWN,
    WARN,
    HealthCheck,
    alike,
    numbers,
    separated,
)
from training.monitor.health.target import Target
from training.watchdog.probes import procfs

NAME = "GPUs"
# rank → key of a GPU → bytes that it and its children hold there
Places = dict[int, dict[str, int]]


def key(uuid: str, index: int) -> str:
    """The key of a GPU: instances (MIG) of one GPU share its index, which may be another GPU
    later. The index where the driver reports no UUID."""
    return str(index) if uuid in ("", "-") else uuid


def by_key(seen: GpuInventory) -> dict[str, Gpu]:
    return {key(gpu.uuid, gpu.index): gpu for gpu in seen.gpus}


def find_placement(target: Target, seen: GpuInventory) -> Places:
    """Ranks with a process on a GPU."""
    found: Places = {}
    for name, gpu in by_key(seen).items():
        for process in (one for one in gpu.processes if one.known):
            rank = next(
                (r for r, pid in target.pids.items() if host_stats.belongs(process.pid, {pid})),
                None,
            )
            if rank is not None:
                held = found.setdefault(rank, {})
                held[name] = held.get(name, 0) + (process.used_bytes or 0)
    return dict(sorted(found.items()))


def expected(target: Target, seen: GpuInventory) -> dict[int, str]:
    """rank → key of its expected GPU: from the plan, else from CUDA_VISIBLE_DEVICES and
    LOCAL_RANK, unless the numbers of CUDA are unknown."""
    there, out = by_key(seen), dict[int, str]()
    for rank in target.pids:
        local, known = target.local(rank), target.variables.get(rank, {})
        if target.run is not None:
            if (
                len(target.planned) >= (target.here or len(target.pids))
                and target.planned[local] in there
            ):
                out[rank] = target.planned[local]
        elif "LOCAL_RANK" in known and not gpu_choice.reorders(seen, known):
            chosen, _ = gpus.visible(list(seen.gpus), known.get("CUDA_VISIBLE_DEVICES"))
            if len(chosen) == 1 or local < len(chosen):
                gpu = chosen[0 if len(chosen) == 1 else local]
                out[rank] = key(gpu.uuid, gpu.index)
    return out


def own(places: Places, wanted: dict[int, str]) -> dict[int, str]:
    """rank → key of the GPU on which it computes: the expected one if it has memory there, else
    the one with most of its memory."""
    return {
        rank: wanted[rank] if wanted.get(rank) in held else max(held, key=lambda name: held[name])
        for rank, held in places.items()
    }


def check(target: Target, seen: GpuInventory, *, begun: bool) -> HealthCheck:
    """`begun`: the ranks already train, so each should be on its GPU."""
    device = text(dig(target.plan, "device", "value"))
    if device == "cpu":
        return HealthCheck(
            NAME,
            OK,
            msg(
                "monitor.health.gpus.on_cpu",
                reason=text(dig(target.plan, "device", "reason"))
                or msg("monitor.health.gpus.by_plan"),
            ),
        )
    places, wanted = find_placement(target, seen), expected(target, seen)
    if not places:
        return _no_placement(target, seen, device == "cuda" and target.beats, begun)
    on = own(places, wanted)
    cards = by_key(seen)
    shown = alike(
        {
            rank: msg("monitor.health.gpus.on", gpu=cards[name].index, use=_use(cards[name]))
            for rank, name in on.items()
        }
    )
    empty = sorted(cards[name].index for name in set(wanted.values()) - set(on.values()))
    absent = [rank for rank in target.pids if rank not in on]
    crowded = {name: [rank for rank in on if on[rank] == name] for name in on.values()}
    crowded = {name: ranks for name, ranks in crowded.items() if len(ranks) > 1}
    if crowded:
        name, ranks = next(iter(crowded.items()))
        headline = msg("monitor.health.gpus.shared", ranks=numbers(ranks), gpu=cards[name].index)
        headline += msg("monitor.health.gpus.unused", gpus=empty[0]) if empty else ""
        # More ranks than GPUs: sharing was intended.
        status = BAD if len(target.pids) <= len(seen.gpus) else WARN
        return HealthCheck(NAME, status, _with(headline, shown), tuple(ranks), headline)
    if absent:
        headline = (
            msg("monitor.health.gpus.rank_without", rank=numbers(absent))
            if len(absent) == 1
            else msg("monitor.health.gpus.ranks_without", ranks=numbers(absent))
        )
        if empty:
            headline += msg("monitor.health.gpus.unused", gpus=", ".join(map(str, empty)))
        return HealthCheck(
            NAME, BAD if begun else UNKNOWN, _with(headline, shown), tuple(absent), headline
        )
    wrong = [rank for rank, name in on.items() if rank in wanted and wanted[rank] != name]
    if wrong:
        rank = wrong[0]
        gpu, by_plan = cards[on[rank]].index, cards[wanted[rank]].index
        headline = (
            msg("monitor.health.gpus.not_by_plan", rank=rank, gpu=gpu, planned=by_plan)
            if target.run is not None
            else msg("monitor.health.gpus.not_by_variables", rank=rank, gpu=gpu, chosen=by_plan)
        )
        return HealthCheck(
            NAME,
            BAD if target.run is not None else WARN,
            _with(headline, shown),
            tuple(wrong),
            headline,
        )
    return _placed(target, seen, places, on, shown)


def _placed(
    target: Target, seen: GpuInventory, places: Places, on: dict[int, str], shown: str
) -> HealthCheck:
    """Every rank is on its GPU: checks for further memory and for other processes."""
    also = {r: [n for n in held if n != on[r]] for r, held in places.items() if len(held) > 1}
    cards = by_key(seen)
    notes = [
        msg(
            "monitor.health.gpus.also",
            rank=rank,
            gib=places[rank][name] / GIB,
            gpu=cards[name].index,
        )
        for rank, others in also.items()
        for name in others
    ]
    for name, gpu in cards.items():
        others = [p for p in gpu.processes if p.known and gpu_processes.MPS not in p.command]
        for process in others if name in on.values() else ():
            if not host_stats.belongs(process.pid, set(target.pids.values())):
                notes.append(
                    alerts.foreign_process(gpu.index, process.pid, process.user, process.used_bytes)
                )
    if notes:
        return HealthCheck(NAME, WARN, separated([shown, *notes]), tuple(also))
    return HealthCheck(NAME, OK, msg("monitor.health.gpus.each", ranks=shown))


def _with(headline: str, shown: str) -> str:
    return msg("monitor.health.gpus.with", headline=headline, ranks=shown)


def _no_placement(target: Target, seen: GpuInventory, needed: bool, begun: bool) -> HealthCheck:
    if not seen.gpus:
        return HealthCheck(
            NAME,
            UNKNOWN if needed else OK,
            msg("monitor.health.gpus.unknown", reason=seen.reason)
            if needed
            else msg("monitor.health.gpus.none", reason=seen.reason),
        )
    visible = [process for gpu in seen.gpus for process in gpu.processes]
    if any(gpu.mig for gpu in seen.gpus) or all(gpu.use_percent is None for gpu in seen.gpus):
        return HealthCheck(
            NAME,
            UNKNOWN,
            msg("monitor.health.gpus.no_list"),
        )
    if visible and not any(p.known and procfs.read_process(p.pid) for p in visible):
        return HealthCheck(
            NAME,
            UNKNOWN,
            msg("monitor.health.gpus.pids_of_host"),
        )
    opened = any(procfs.uses_gpu(pid) for pid in target.pids.values())
    if opened:
        return HealthCheck(NAME, UNKNOWN, msg("monitor.health.gpus.not_listed"))
    if needed and begun:
        headline = msg("monitor.health.gpus.none_of_plan", count=len(target.planned))
        return HealthCheck(NAME, BAD, headline, tuple(target.pids))
    count = len(seen.gpus)
    return HealthCheck(
        NAME, UNKNOWN if needed else WARN, msg("monitor.health.gpus.none_used", count=count)
    )


def _use(gpu: Gpu) -> str:
    facts = [f"{gpu.use_percent} %"] if gpu.use_percent is not None else []
    facts += [f"{gpu.power_w:.0f} W"] if gpu.power_w is not None else []
    return f" ({', '.join(facts)})" if facts else ""
