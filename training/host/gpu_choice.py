"""Choice of the GPUs of a launch where more are visible than it has ranks: the emptiest ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial

from training.core import units
from training.core.messages import msg
from training.host import gpu_damage, nvlink
from training.host.decisions import best_type
from training.host.gpus import EXCLUSIVE, PROHIBITED, VISIBLE, Gpu, GpuInventory
from training.host.visible_devices import WHOLE, entries

# Smaller differences do not count: of idle GPUs the first ones are used.
NOISE_BYTES, NOISE_PERCENT = 1 << 30, 10
DISPLAY_SHARE = 0.85
ORDER, PCI = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"  # the order of NVML's indices


@dataclass(frozen=True)
class GpuChoice:
    """`machine`: with the chosen GPUs first; `visible`: CUDA_VISIBLE_DEVICES of the ranks, None: as
    it is, with `why`."""

    machine: GpuInventory
    visible: str | None = None
    why: str = ""

    def environ(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        return environ if self.visible is None else {**environ, VISIBLE: self.visible}


def emptiest_gpus(
    machine: GpuInventory,
    ranks: int,
    environ: Mapping[str, str],
    *,
    hide: bool,
    claims: Mapping[str, int] | None = None,
) -> GpuChoice:
    """The `ranks` emptiest GPUs; those that the user has selected stay as they are. `hide`: the
    others become invisible, else they follow in the list. `claims`: as gpu_claims.others()."""
    every = machine.gpus
    usable = [gpu for gpu in every if gpu.free_bytes is not None and not gpu.mig]
    lost = [gpu.index for gpu in every] != list(range(len(every)))
    certain = len(usable) == len(every) and not lost  # which GPUs CUDA numbers from 0 on
    if VISIBLE in environ or environ.get(ORDER, PCI) != PCI or len(usable) < ranks:
        return GpuChoice(machine)
    if certain and len(every) == ranks:
        return GpuChoice(machine)
    bridged = ranks > 1 and sum(bool(gpu.nvlinks) for gpu in usable) > 1
    linked = nvlink.pairs(gpu.index for gpu in usable) if bridged else set()
    damaged = gpu_damage.damaged(gpu.index for gpu in usable)
    claimed = {gpu.index: claims[gpu.uuid] for gpu in usable if claims and gpu.uuid in claims}
    chosen = emptiest(usable, ranks, linked, damaged, claimed.keys())
    used = [*chosen, *(gpu for gpu in every if not hide and gpu not in chosen and not gpu.mig)]
    by_uuid = not certain and all(gpu.uuid.startswith(WHOLE) for gpu in used)
    same = chosen == list(every[:ranks])
    if same and not by_uuid:
        return GpuChoice(machine)
    why = (
        msg("host.gpus.by_uuid", chosen=_listed(chosen))
        if same
        else _why(every, usable, chosen, damaged, claimed)
    )
    visible = ",".join(gpu.uuid if by_uuid else str(gpu.index) for gpu in used)
    spare = len(every) - len(used)
    return GpuChoice(replace(machine, gpus=tuple(used), reason=why, spare=spare), visible, why)


def _why(
    every: Sequence[Gpu],
    usable: Sequence[Gpu],
    chosen: Sequence[Gpu],
    damaged: Set[int],
    claimed: Mapping[int, int],
) -> str:
    """Why not the first GPUs: what decided between GPUs that are as empty, if anything did."""
    first = every[: len(chosen)]
    shown, passed = _listed(chosen), _listed([gpu for gpu in first if gpu not in chosen])
    without_links = emptiest(usable, len(chosen), damaged=damaged, claimed=claimed.keys())
    if without_links != chosen:
        return msg("host.gpus.linked", count=len(every), chosen=shown, first=passed)
    if claimed and emptiest(usable, len(chosen), damaged=damaged) != chosen:
        avoided = ",".join(str(index) for index in claimed)
        pids = ",".join(str(pid) for pid in dict.fromkeys(claimed.values()))
        return msg("host.gpus.unclaimed", chosen=shown, first=passed, avoided=avoided, pids=pids)
    if damaged and emptiest(usable, len(chosen)) != chosen:
        avoided = ",".join(str(gpu.index) for gpu in usable if gpu.index in damaged)
        return msg("host.gpus.sound", chosen=shown, first=passed, avoided=avoided)
    alike = [replace(gpu, capability=None) for gpu in usable]
    found = emptiest(alike, len(chosen), damaged=damaged, claimed=claimed.keys())
    if [gpu.index for gpu in found] == [gpu.index for gpu in first]:
        return msg("host.gpus.newest", count=len(every), chosen=shown, first=passed)
    return msg("host.gpus.emptiest", count=len(every), chosen=shown, first=passed)


def _listed(gpus: Sequence[Gpu]) -> str:
    return msg("host.gpus.comma").join(map(_described, gpus))


def numbering(machine: GpuInventory, environ: Mapping[str, str]) -> list[str]:
    """A note where CUDA may number different GPUs in another order than NVML. Ranks of Duet have
    its order by default."""
    known = {ORDER: PCI, **environ}
    return [msg("host.gpus.numbering", order=known[ORDER])] if reorders(machine, known) else []


def reorders(machine: GpuInventory, environ: Mapping[str, str]) -> bool:
    """Whether CUDA may number the GPUs of a process with these variables in another order than
    NVML: by default it begins with the fastest one."""
    by_uuid = any(isinstance(one, str) for one in entries(environ.get(VISIBLE, "")))
    different = len({gpu.name for gpu in machine.gpus}) > 1
    return different and not by_uuid and environ.get(ORDER) != PCI


def emptiest(
    every: Sequence[Gpu],
    count: int,
    linked: Set[frozenset[int]] = frozenset(),
    damaged: Set[int] = frozenset(),
    claimed: Set[int] = frozenset(),
) -> list[Gpu]:
    """In PCI order: by free memory, then by utilisation, then the newest, then those that NVLink
    connects (`linked`: pairs of indices). A GPU that another process has for itself comes last; one
    of another launch (`claimed`: indices), a damaged one (`damaged`), or one whose weaker matrix
    units would decide the precision, after others that are at least half empty."""
    left, chosen = list(every), list[Gpu]()
    while len(chosen) < count:
        usable = [gpu for gpu in left if not closed(gpu)] or left
        roomy = list(filter(half_empty, usable))
        for avoided in (claimed, damaged):
            if any(gpu.index not in avoided for gpu in roomy):
                usable, roomy = (
                    [gpu for gpu in some if gpu.index not in avoided] for some in (usable, roomy)
                )
        needed = _needed_strength(roomy or usable, chosen, count)
        strong = [gpu for gpu in usable if _strength(gpu) >= needed]
        emptiest_one = max(strong, key=lambda gpu: gpu.free_bytes or 0)
        free = [gpu for gpu in strong if _as_empty(gpu, emptiest_one)]
        least = min(gpu.use_percent or 0 for gpu in free)
        idle = [gpu for gpu in free if (gpu.use_percent or 0) < least + NOISE_PERCENT]
        better = partial(_preference, partners=chosen or idle, linked=linked)
        chosen.append(max(idle, key=better))  # of equal ones the first
        left.remove(chosen[-1])
    return sorted(chosen, key=lambda gpu: gpu.index)


def half_empty(gpu: Gpu) -> bool:
    return 2 * (gpu.free_bytes or 0) >= (gpu.total_bytes or 0)


def _preference(
    gpu: Gpu, partners: Sequence[Gpu], linked: Set[frozenset[int]]
) -> tuple[tuple[int, ...], int]:
    connected = sum(frozenset((gpu.index, other.index)) in linked for other in partners)
    return _capability(gpu), connected


def _as_empty(gpu: Gpu, other: Gpu) -> bool:
    """Has as much free memory as the other, or little less and is newer: a display on it."""
    own, most = gpu.free_bytes or 0, other.free_bytes or 0
    newer = _capability(gpu) > _capability(other)
    return own > most - NOISE_BYTES or (newer and own >= DISPLAY_SHARE * most)


def _capability(gpu: Gpu) -> tuple[int, ...]:
    return tuple(gpu.capability or ())


def _needed_strength(some: Sequence[Gpu], chosen: Sequence[Gpu], count: int) -> int:
    """Strength of the weakest GPU in the best choice of `count`, which decides the precision of all
    ranks, as the smallest one decides their memory: stronger GPUs count if they have about half of
    what the choice of the most memory has."""
    sizes = sorted((gpu.free_bytes or 0 for gpu in (*chosen, *some)), reverse=True)
    least = DISPLAY_SHARE / 2 * sizes[:count][-1]
    large = [gpu for gpu in some if (gpu.free_bytes or 0) >= least]
    best = sorted(map(_strength, large), reverse=True)[: count - len(chosen)]
    return min([*best, *map(_strength, chosen)])


def _strength(gpu: Gpu) -> int:
    return ("fp32", "fp16", "bf16").index(best_type(gpu.capability, gpu.name))


def closed(gpu: Gpu) -> bool:
    """Does its compute mode keep a further process out?"""
    taken = bool(gpu.processes) and not gpu.by_mps
    return gpu.compute_mode == PROHIBITED or (gpu.compute_mode == EXCLUSIVE and taken)


def _described(gpu: Gpu) -> str:
    free = units.unknown() if gpu.free_bytes is None else f"{units.gib(gpu.free_bytes)} GiB"
    use = units.unknown() if gpu.use_percent is None else f"{gpu.use_percent} %"
    return msg("host.gpus.described", index=gpu.index, free=free, use=use)
