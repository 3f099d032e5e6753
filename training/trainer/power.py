"""Power of the run's GPUs, read from the driver beside the training."""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from training.host.nvml import ask
from training.host.placement import RANK, on_one_machine

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan

EVERY_S = 0.25  # the driver updates its figures about ten times a second
LEAST_S = 1.0  # shorter steps are measured together
KEPT = 2400  # samples: ten minutes, for long steps
STALE_S = 10.0  # the driver does not answer: unknown


def meter(plan: Plan, world_size: int) -> PowerMeter | None:
    """The meter of a run whose GPUs are all in this machine; None: some would be missing, or only
    an instance of a GPU (MIG) is used, of which the driver knows the power of the whole."""
    gpus, place = plan["gpus"], plan["place"]
    # Of several machines, one may have been left. A rank of another launcher may not know.
    alone = plan["local_ranks"] == world_size and (place["kind"] != RANK or on_one_machine(place))
    if plan["device"]["value"] != "cuda" or not alone or len(gpus) != world_size:
        return None
    if any(gpu["mig"] for gpu in gpus):
        return None
    return PowerMeter([gpu["uuid"] for gpu in gpus])


class PowerMeter:
    """Samples in a thread of its own, because a driver may hang. NVML's counter of energy is exact
    between two samples; GPUs without it report their present power. `uuids`: of the GPUs, whose
    numbers may change when another one is lost."""

    def __init__(self, uuids: Sequence[str]) -> None:
        self._uuids = uuids
        self._samples: deque[tuple[float, float]] = deque(maxlen=KEPT)  # (time, joules so far)
        self._lock, self._ended = threading.Lock(), threading.Event()
        self.thread = threading.Thread(target=self._sample, name="power", daemon=True)
        self.thread.start()

    def watts(self, step_s: float) -> float | None:
        """Mean power of all GPUs together since a step of this duration began, or since several
        such steps did; None: unknown. Whole steps, since power differs between their phases."""
        with self._lock:
            samples = list(self._samples)
        if not samples or time.monotonic() - samples[-1][0] > STALE_S:
            return None
        end, joules = samples[-1]
        begin = max(end - step_s * math.ceil(LEAST_S / step_s), samples[0][0])
        return (joules - _at(begin, samples)) / (end - begin) if end - begin >= LEAST_S else None

    def close(self) -> None:
        self._ended.set()

    def _sample(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # no driver or no package: the figure is optional
            return
        handles = [ask("nvmlDeviceGetHandleByUUID", uuid) for uuid in self._uuids]
        meters = [_Gpu(handle) for handle in handles if handle is not None]
        while len(meters) == len(self._uuids) and not self._ended.wait(EVERY_S):
            self._add([gpu.joules() for gpu in meters])

    def _add(self, used: list[float | None]) -> None:
        """`used`: of each GPU since the last sample."""
        known = [joules for joules in used if joules is not None]
        with self._lock:
            if len(known) < len(used):
                self._samples.clear()
            else:
                before = self._samples[-1][1] if self._samples else 0.0
                self._samples.append((time.monotonic(), before + sum(known)))


def _at(moment: float, samples: Sequence[tuple[float, float]]) -> float:
    """Joules at this moment, between the first and the last sample."""
    after = max(1, bisect_left(samples, moment, key=itemgetter(0)))
    (begin, least), (end, most) = samples[after - 1 : after + 1]
    return least + (most - least) * (moment - begin) / (end - begin)


class _Gpu:
    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._counted, self._read_at = self._count(), time.monotonic()

    def _count(self) -> float | None:
        """Joules since the driver was loaded."""
        millijoules = ask("nvmlDeviceGetTotalEnergyConsumption", self._handle)
        return None if millijoules is None else millijoules / 1000

    def joules(self) -> float | None:
        """Since the last call."""
        before, self._counted = self._counted, self._count()
        last, self._read_at = self._read_at, time.monotonic()
        if before is not None and self._counted is not None and self._counted >= before:
            return self._counted - before
        milliwatts = ask("nvmlDeviceGetPowerUsage", self._handle)
        return None if milliwatts is None else milliwatts / 1000 * (self._read_at - last)
