"""Which rank computes on which GPU, from the driver's list of processes."""

from __future__ import annotations

from training.core.jsonl import dig, text
from training.host import gpus
from training.host.gpus import Gpu, GpuInventory
from training.monitor import host_stats
from training.monitor.health.check import BAD, OK, UNKNOWN, WARN, HealthCheck, alike, numbers
from training.monitor.health.target import Target
from training.watchdog.probes import procfs

NAME = "GPUs"
GIB = 1 << 30
# rank → index of a GPU → bytes that it and its children hold there
Places = dict[int, dict[int, int]]


def find_placement(target: Target, seen: GpuInventory) -> Places:
    """Ranks with a process on a GPU."""
    found: Places = {}
    for gpu in seen.gpus:
        for process in gpu.processes:
            rank = next(
                (r for r, pid in target.pids.items() if host_stats.belongs(process.pid, {pid})),
                None,
            )
            if rank is not None:
                held = found.setdefault(rank, {})
                held[gpu.index] = held.get(gpu.index, 0) + (process.used_bytes or 0)
    return dict(sorted(found.items()))


def expected(target: Target, seen: GpuInventory) -> dict[int, int]:
    """rank → index of its expected GPU: from the plan, else from CUDA_VISIBLE_DEVICES and
    LOCAL_RANK."""
    index = {gpu.uuid: gpu.index for gpu in seen.gpus}
    out: dict[int, int] = {}
    for rank in target.pids:
        local, known = target.local(rank), target.variables.get(rank, {})
        if target.run is not None:
            if (
                len(target.planned) >= (target.here or len(target.pids))
                and target.planned[local] in index
            ):
                out[rank] = index[target.planned[local]]
        elif "LOCAL_RANK" in known:
            chosen, _ = gpus.visible(list(seen.gpus), known.get("CUDA_VISIBLE_DEVICES"))
            if len(chosen) == 1 or local < len(chosen):
                out[rank] = chosen[0 if len(chosen) == 1 else local].index
    return out


def own(target: Target, places: Places, wanted: dict[int, int]) -> dict[int, int]:
    """rank → index of the GPU on which it computes: the expected one if it has memory there, else
    the one with most of its memory."""
    return {
        rank: wanted[rank] if wanted.get(rank) in held else max(held, key=lambda i: held[i])
        for rank, held in places.items()
    }


def check(target: Target, seen: GpuInventory, *, begun: bool) -> HealthCheck:
    """`begun`: the ranks already train, so each should be on its GPU."""
    device = text(dig(target.plan, "device", "value"))
    if device == "cpu":
        return HealthCheck(
            NAME,
            OK,
            f"none: on the CPU ({text(dig(target.plan, 'device', 'reason')) or 'by the plan'})",
        )
    places, wanted = find_placement(target, seen), expected(target, seen)
    if not places:
        return _no_placement(target, seen, device == "cuda" and target.beats, begun)
    on = own(target, places, wanted)
    names = {gpu.index: gpu for gpu in seen.gpus}
    shown = alike({rank: f"on GPU {index}{_use(names[index])}" for rank, index in on.items()})
    empty = sorted(set(wanted.values()) - set(on.values()))
    absent = [rank for rank in target.pids if rank not in on]
    crowded = {i: [rank for rank, index in on.items() if index == i] for i in on.values()}
    crowded = {i: ranks for i, ranks in crowded.items() if len(ranks) > 1}
    if crowded:
        index, ranks = next(iter(crowded.items()))
        headline = f"{numbers(ranks)} compute on the same GPU {index}" + (
            f", no rank uses GPU {empty[0]}" if empty else ""
        )
        # More ranks than GPUs: sharing was intended.
        status = BAD if len(target.pids) <= len(seen.gpus) else WARN
        return HealthCheck(NAME, status, f"{headline}: {shown}", tuple(ranks), headline)
    if absent:
        idle = f", no rank uses GPU {', '.join(map(str, empty))}" if empty else ""
        headline = (
            f"{numbers(absent)} {'has' if len(absent) == 1 else 'have'} no process on a GPU{idle}"
        )
        return HealthCheck(
            NAME, BAD if begun else UNKNOWN, f"{headline}: {shown}", tuple(absent), headline
        )
    wrong = [rank for rank, index in on.items() if rank in wanted and wanted[rank] != index]
    if wrong:
        rank = wrong[0]
        by = (
            "the plan assigns"
            if target.run is not None
            else "LOCAL_RANK and CUDA_VISIBLE_DEVICES select"
        )
        headline = f"rank {rank} computes on GPU {on[rank]}, but {by} GPU {wanted[rank]}"
        return HealthCheck(
            NAME,
            BAD if target.run is not None else WARN,
            f"{headline}: {shown}",
            tuple(wrong),
            headline,
        )
    return _placed(target, seen, places, on, shown)


def _placed(
    target: Target, seen: GpuInventory, places: Places, on: dict[int, int], shown: str
) -> HealthCheck:
    """Every rank is on its GPU: checks for further memory and for other processes."""
    also = {r: [i for i in held if i != on[r]] for r, held in places.items() if len(held) > 1}
    notes = [
        f"rank {rank} also holds {places[rank][i] / GIB:.1f} GiB on GPU {i} "
        f"(torch.cuda.set_device called too late?)"
        for rank, others in also.items()
        for i in others
    ]
    for gpu in seen.gpus:
        for process in gpu.processes if gpu.index in on.values() else ():
            if not host_stats.belongs(process.pid, set(target.pids.values())):
                size = (
                    f" with {process.used_bytes / GIB:.1f} GiB"
                    if process.used_bytes is not None
                    else ""
                )
                owner = f" of user {process.user}" if process.user != "-" else ""
                notes.append(f"GPU {gpu.index}: another process{owner}, pid {process.pid}{size}")
    if notes:
        return HealthCheck(NAME, WARN, f"{shown}; {'; '.join(notes)}", tuple(also))
    return HealthCheck(NAME, OK, f"a GPU for each rank: {shown}")


def _no_placement(target: Target, seen: GpuInventory, needed: bool, begun: bool) -> HealthCheck:
    if not seen.gpus:
        return HealthCheck(
            NAME,
            UNKNOWN if needed else OK,
            f"none: {seen.reason}" if not needed else f"unknown: {seen.reason}",
        )
    visible = [process for gpu in seen.gpus for process in gpu.processes]
    if any(gpu.mig for gpu in seen.gpus) or all(gpu.use_percent is None for gpu in seen.gpus):
        return HealthCheck(
            NAME,
            UNKNOWN,
            "unknown: the driver does not list processes (MIG, or an old driver)",
        )
    if visible and not any(procfs.read_process(process.pid) for process in visible):
        return HealthCheck(
            NAME,
            UNKNOWN,
            "unknown: the driver reports the host's pids, which differ in this container",
        )
    opened = any(procfs.uses_gpu(pid) for pid in target.pids.values())
    if opened:
        return HealthCheck(
            NAME, UNKNOWN, "unknown: the ranks have a GPU open, but the driver does not list them"
        )
    if needed and begun:
        headline = f"no rank has a process on a GPU, but the plan has {len(target.planned)} GPUs"
        return HealthCheck(NAME, BAD, headline, tuple(target.pids))
    count = len(seen.gpus)
    return HealthCheck(
        NAME, UNKNOWN if needed else WARN, f"no rank uses a GPU, but this machine has {count}"
    )


def _use(gpu: Gpu) -> str:
    facts = [f"{gpu.use_percent} %"] if gpu.use_percent is not None else []
    facts += [f"{gpu.power_w:.0f} W"] if gpu.power_w is not None else []
    return f" ({', '.join(facts)})" if facts else ""
