"""What is known of the ranks of a user script, which has no heartbeat: its processes, and what each
rank has printed."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from training.core import rundir
from training.core.jsonl import mtime
from training.core.tail import tail
from training.watchdog.probes import procfs

if TYPE_CHECKING:
    from training.core.contracts.state import GpuState, RankState
    from training.diagnose.log_parsers.log_metrics import LogMetrics

PAGE = os.sysconf("SC_PAGE_SIZE")


class ScriptRanks:
    """CPU use is measured between two reads."""

    def __init__(self, run: rundir.RunDir) -> None:
        self._run = run
        self._cpu: dict[int, tuple[float, float]] = {}  # PID → monotonic s, CPU s

    def add(
        self, ranks: list[RankState], printed: LogMetrics | None, gpus: Sequence[GpuState]
    ) -> None:
        """Adds the CPU use and memory of each rank with its children, its step, the age of its
        output, and the last line of it."""
        tree = procfs.tree() if any(r["alive"] for r in ranks) else {}
        for rank in ranks:
            log = self._run.rank_log(rank["rank"])
            if printed and printed.text.path == log:
                rank["step"] = printed.progress(running=True)["step"]
            if (written := mtime(log)) is not None:
                rank["output_age_s"] = max(0.0, time.time() - written)
                rank["last_line"] = next(iter(tail(log, 1)), None)
            if rank["alive"] and rank["pid"]:
                family = {rank["pid"], *procfs.family(rank["pid"], tree)}
                rank["cpu_percent"] = self._cpu_percent(rank["pid"], family)
                rank["rss_bytes"] = sum(_resident(pid) for pid in family)
                rank["gpu_bytes"] = _on_gpus(family, gpus)

    def _cpu_percent(self, pid: int, family: Collection[int]) -> float | None:
        """100: one core; None at the first read."""
        seen = (procfs.read_process(one) for one in family)
        now, used = time.monotonic(), sum(process.cpu_s for process in seen if process)
        before = self._cpu.get(pid)
        self._cpu[pid] = now, used
        if before is None or now <= before[0]:
            return None
        return max(0.0, 100 * (used - before[1]) / (now - before[0]))


def _resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * PAGE
    except (OSError, IndexError, ValueError):  # it has exited
        return 0


def _on_gpus(family: Collection[int], gpus: Sequence[GpuState]) -> int | None:
    """None where the driver lists no process of the rank."""
    used = [
        process["used_bytes"]
        for gpu in gpus
        for process in gpu["processes"]
        if process["pid"] in family and process["used_bytes"] is not None
    ]
    return sum(used) if used else None
