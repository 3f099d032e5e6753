"""Checks of the host name and the clock."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from training.core.messages import msg
from training.core.project import ROOT
from training.host import network
from training.plan.preflight.report import OK, WARNING, Check

NAME_LIMIT_S = 1.0
SLOW_NAME_S = 0.3
CLOCK_SLACK_S = 120.0  # file servers have their own clocks
FIRST_YEAR, LAST_YEAR = 2025, 2100
FOLDERS = ("training", "lib", "configs")


def host_name(several_machines: bool) -> Check:
    """This machine's name resolves, and quickly: torchrun, gloo and multi-node runs look it up and
    wait for the answer."""
    name = socket.gethostname()
    answer: list[str | None] = []
    started = time.monotonic()
    # A resolver cannot be interrupted: a daemon thread ends with the process.
    thread = threading.Thread(target=lambda: answer.append(network.resolve(name)), daemon=True)
    thread.start()
    thread.join(NAME_LIMIT_S)
    took = time.monotonic() - started
    needed = (
        msg("plan.host.machines_need_it")
        if several_machines
        else msg("plan.host.torchrun_needs_it")
    )
    fixes = (
        [f"echo '127.0.1.1 {name}' | sudo tee -a /etc/hosts"]
        if not several_machines
        else [msg("plan.host.ask_administrator")]
    )
    if not answer:
        return Check(
            "host name",
            WARNING,
            msg("plan.host.no_answer", name=name, limit=NAME_LIMIT_S, needed=needed),
            fixes,
        )
    if answer[0] is None:
        return Check(
            "host name", WARNING, msg("plan.host.not_resolved", name=name, needed=needed), fixes
        )
    if took > SLOW_NAME_S:
        return Check(
            "host name",
            WARNING,
            msg("plan.host.slow_name", name=name, answer=answer[0], took=took, needed=needed),
            fixes,
        )
    return Check("host name", OK, msg("plan.host.name", name=name, answer=answer[0]))


def clock(now: float | None = None, files: Iterator[float] | None = None) -> Check:
    """A plausible year and no project file from the future: `--resume=latest` and W&B's
    certificates depend on the clock."""
    now = time.time() if now is None else now
    shown = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    newest = max(_times() if files is None else files, default=0.0)
    fixes = ["sudo timedatectl set-ntp true"]
    if not FIRST_YEAR <= time.localtime(now).tm_year <= LAST_YEAR:
        return Check("clock", WARNING, msg("plan.host.clock_wrong", shown=shown), fixes)
    if newest > now + CLOCK_SLACK_S:
        later = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(newest))
        return Check(
            "clock",
            WARNING,
            msg("plan.host.clock_behind", shown=shown, later=later),
            fixes,
        )
    return Check("clock", OK, shown)


def _times() -> Iterator[float]:
    for name in FOLDERS:
        for folder, inner, files in os.walk(ROOT / name):
            inner[:] = [d for d in inner if d != "__pycache__"]
            for file in files:
                try:
                    yield Path(folder, file).stat().st_mtime
                except OSError:  # a broken link
                    continue
