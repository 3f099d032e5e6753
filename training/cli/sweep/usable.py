"""Which slots of a running sweep get runs: not those with a lost GPU, nor, for a while, those whose
GPUs someone else uses."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from training.cli.sweep.slots import Slot, taken
from training.host import gpus
from training.host.gpu_choice import NOISE_BYTES
from training.host.gpus import Gpu

LOOK_S = 60.0  # between two looks at a slot that is set aside


@dataclass
class _Aside:
    """A slot that gets no run until its GPUs are emptier than `before`."""

    before: tuple[Gpu, ...]
    looked: float


class Usable:
    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = slots
        self._lost: set[int] = set()
        self._aside: dict[int, _Aside] = {}
        self._refused: dict[int, set[int]] = {}  # run → slots on which it was refused

    def __contains__(self, slot: int) -> bool:
        """Looks at a slot that is set aside, every LOOK_S."""
        if slot in self._lost or (aside := self._aside.get(slot)) is None:
            return slot not in self._lost
        if time.monotonic() < aside.looked + LOOK_S:
            return False
        aside.looked = time.monotonic()
        if _emptier(self._look(slot).gpus, aside.before):
            del self._aside[slot]
        return slot not in self._aside

    @property
    def fewer(self) -> bool:
        """Whether a slot gets no run."""
        return bool(self._lost or self._aside)

    @property
    def none(self) -> bool:
        """Whether no slot gets a run."""
        return not any(slot in self for slot in range(len(self.slots)))

    def lose(self, slot: int) -> None:
        self._lost.add(slot)

    def lacks_a_gpu(self, slot: int) -> bool:
        seen, expected = self._look(slot), self.slots[slot].indices
        return bool(expected) and (seen.driver is None or len(seen.gpus) < len(expected))

    def refuse(self, run: int, slot: int) -> bool:
        """Set aside a slot whose plan refused a run; False: the run itself is at fault, because
        these GPUs are unused, or others refused it too and these are half empty."""
        now = self._look(slot).gpus
        others = self._refused.setdefault(run, set()) - {slot}
        self._refused[run].add(slot)
        if not taken(now) and (others or not any(gpu.processes for gpu in now)):
            for other in others:
                self._aside.pop(other, None)
            return False
        self._aside[slot] = _Aside(now, time.monotonic())
        return True

    def _look(self, slot: int) -> gpus.GpuInventory:
        return gpus.inventory({gpus.VISIBLE: self.slots[slot].visible})


def _emptier(now: Sequence[Gpu], before: Sequence[Gpu]) -> bool:
    """Whether memory was freed or a process has ended."""
    return len(now) == len(before) and any(
        {one.pid for one in old.processes} - {one.pid for one in new.processes}
        or (new.free_bytes or 0) >= (old.free_bytes or 0) + NOISE_BYTES
        for old, new in zip(before, now, strict=True)
    )
