"""A rank that a debugger holds (gdb, cuda-gdb, strace): its user decides when it continues, and
`kill -CONT` has no effect."""

from __future__ import annotations

from training.core.messages import msg
from training.watchdog.probes import procfs


def text(rank: int, pid: int) -> str:
    """`pid`: of the held process. A debugger outside this container has no PID here."""
    tracer = procfs.tracer(pid)
    by = f"{procfs.name(tracer)} (pid {tracer})" if tracer else msg("watchdog.a_debugger")
    return msg("watchdog.held", rank=rank, pid=pid, by=by)
