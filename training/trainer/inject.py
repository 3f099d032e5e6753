"""Fault injection in a rank: a fault happens right after a phase is published. Ranks without a
fault never import this."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from training.config.fault_spec import ATTEMPT, MISSED, Spec, parse
from training.config.fault_table import CREATING
from training.core import heartbeat, log, rundir
from training.core.messages import msg
from training.trainer.faults import ACTS, FaultContext
from training.trainer.faults.context import subclasses

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan


def arm(plan: Plan, run: rundir.RunDir, rank: int, environ: Mapping[str, str]) -> None:
    """Replace the rank's heartbeat by one that triggers the faults of this rank and start. Called
    once the heartbeat has begun."""
    attempt = int(environ.get(ATTEMPT, 1))
    specs = [
        s
        for s in parse(plan["config"].get("inject", ""), plan["ranks"])[0]
        if s.rank == rank and s.attempt in (None, attempt)
    ]
    if specs:
        heartbeat.current = Armed(run, rank, plan, specs)


class Armed(heartbeat.Heartbeat):
    """Heartbeat of a rank with faults: they happen right after a phase is published."""

    def __init__(self, run: rundir.RunDir, rank: int, plan: Plan, specs: list[Spec]) -> None:
        super().__init__(run.heartbeat(rank), rank)
        self._run, self._plan, self._seen = run, plan, dict.fromkeys(specs, 0)
        # The epoch, shared with data-loader workers, which were forked earlier.
        self._shared = mmap.mmap(-1, 8)
        self._workers = [s for s in specs if s.fault.worker]
        self._waiting = [s for s in specs if not s.fault.worker]

    def beat(self, phase: str) -> None:
        super().beat(phase)
        struct.pack_into("q", self._shared, 0, self.epoch)
        if self._workers and CREATING in phase:
            self._arm_workers()
        for spec in list(self._waiting):
            if spec.now(phase, self.epoch, self.step):
                self._seen[spec] += 1
                if self._seen[spec] == spec.call:
                    self._waiting.remove(spec)
                    self._happen(spec)
        if phase == heartbeat.FINISHED:
            for spec in self._waiting:
                text = msg("trainer.inject.missed", text=spec.text, rank=self.rank)
                log.warning(text)
                self._run.event("warning", code=MISSED, text=text, rank=self.rank)

    def _happen(self, spec: Spec) -> None:
        size = self._plan["config"].get("device_batch_size")
        size = size if isinstance(size, int) else 0
        if spec.above and size <= spec.above:
            return

        def tell() -> None:
            self._run.event(
                "injected", fault=spec.fault.name, rank=self.rank, text=spec.text, pid=os.getpid()
            )

        device = self._plan["device"]["value"]
        here = FaultContext(
            self._run.ranks, self.rank, device, size, spec.seconds, spec.code, spec.above, tell
        )
        if spec.fault.tells:
            tell()
        ACTS[spec.fault.name](here)

    def _arm_workers(self) -> None:
        """Patch the dataset just before workers are started: faults happen only in workers, not in
        the rank itself."""
        from torch.utils.data import get_worker_info

        from training.data.batch_dataset import BatchDataset

        specs, self._workers = self._workers, []

        def armed(real: Any) -> Any:
            def rows(dataset: Any, indices: Any, number: int = 0) -> Any:
                worker = get_worker_info()
                (epoch,) = struct.unpack_from("q", self._shared)
                for spec in specs if worker is not None else ():
                    if (
                        worker is not None
                        and worker.id == spec.worker
                        and spec.epoch in (None, epoch)
                    ):
                        self._seen[spec] += 1
                        if self._seen[spec] == spec.call:
                            self._happen(spec)
                return real(dataset, indices, number)

            return rows

        for kind in subclasses(BatchDataset):
            if "rows" in vars(kind):
                kind.rows = armed(vars(kind)["rows"])
