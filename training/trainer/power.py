"""Power of the run's GPUs, read from the driver beside the training."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from training.host.nvml import ask
from training.host.placement import RANK, on_one_machine

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan

EVERY_S = 1.0  # the driver updates its figures about ten times a second
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
    """Samples in a thread of its own, because a driver may hang. NVML's counter of energy has the
    exact mean between two samples; GPUs without it report their present power. `uuids`: of the
    GPUs, whose numbers may change when another one is lost."""

    def __init__(self, uuids: Sequence[str]) -> None:
        self._uuids = uuids
        self._watts: float | None = None
        self._at = 0.0
        self._ended = threading.Event()
        self.thread = threading.Thread(target=self._sample, name="power", daemon=True)
        self.thread.start()

    @property
    def watts(self) -> float | None:
        """Sum over all GPUs, mean of the last second; None: unknown."""
        return self._watts if time.monotonic() - self._at < STALE_S else None

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
            found = [gpu.watts() for gpu in meters]
            known = [watts for watts in found if watts is not None]
            self._watts = sum(known) if len(known) == len(found) else None
            self._at = time.monotonic()


class _Gpu:
    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._before = self._energy()

    def _energy(self) -> tuple[float, float] | None:
        """(seconds, joules since the driver was loaded)."""
        millijoules = ask("nvmlDeviceGetTotalEnergyConsumption", self._handle)
        return None if millijoules is None else (time.monotonic(), millijoules / 1000)

    def watts(self) -> float | None:
        before, now = self._before, self._energy()
        self._before = now
        if before and now and now[0] > before[0] and now[1] >= before[1]:
            return (now[1] - before[1]) / (now[0] - before[0])
        milliwatts = ask("nvmlDeviceGetPowerUsage", self._handle)
        return None if milliwatts is None else milliwatts / 1000
