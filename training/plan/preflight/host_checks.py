"""What a run stands in: the name of this machine, and its clock."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from training.core.project import ROOT
from training.host import network
from training.plan.preflight.report import OK, WARNING, Check

NAME_LIMIT_S = 1.0
SLOW_NAME_S = 0.3
CLOCK_SLACK_S = 120.0  # file servers have clocks of their own
FIRST_YEAR, LAST_YEAR = 2025, 2100
OURS = ("training", "lib", "configs")


def host_name(several_machines: bool) -> Check:
    """This machine's own name resolves, and soon: torchrun, gloo and several machines ask for it,
    and then wait."""
    name = socket.gethostname()
    answer: list[str | None] = []
    started = time.monotonic()
    # A resolver that gets no answer can not be interrupted: the thread is left behind, and ends
    # with the process.
    thread = threading.Thread(target=lambda: answer.append(network.resolve(name)), daemon=True)
    thread.start()
    thread.join(NAME_LIMIT_S)
    took = time.monotonic() - started
    needed = (
        "the machines find each other by it"
        if several_machines
        else "a run on one machine does without, torchrun does not"
    )
    fixes = (
        [f"echo '127.0.1.1 {name}' | sudo tee -a /etc/hosts"]
        if not several_machines
        else ["ask who runs the name server"]
    )
    if not answer:
        return Check(
            "host name",
            WARNING,
            f"{name}: no answer within {NAME_LIMIT_S:g} s from the name server; {needed}",
            fixes,
        )
    if answer[0] is None:
        return Check("host name", WARNING, f"{name} does not resolve; {needed}", fixes)
    if took > SLOW_NAME_S:
        return Check(
            "host name",
            WARNING,
            f"{name} is {answer[0]}, but it took {took:.1f} s to find out; {needed}",
            fixes,
        )
    return Check("host name", OK, f"{name} is {answer[0]}")


def clock(now: float | None = None, files: Iterator[float] | None = None) -> Check:
    """A plausible year, and no file of ours from the future: `--resume=latest` and W&B's
    certificates go by it."""
    now = time.time() if now is None else now
    shown = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    newest = max(_times() if files is None else files, default=0.0)
    fixes = ["sudo timedatectl set-ntp true"]
    if not FIRST_YEAR <= time.localtime(now).tm_year <= LAST_YEAR:
        return Check(
            "clock", WARNING, f"it is {shown} by the clock: certificates are refused", fixes
        )
    if newest > now + CLOCK_SLACK_S:
        later = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(newest))
        return Check(
            "clock",
            WARNING,
            f"it is {shown} by the clock, but a file of the project is from {later}: the clock is "
            f"behind",
            fixes,
        )
    return Check("clock", OK, shown)


def _times() -> Iterator[float]:
    for name in OURS:
        for folder, inner, files in os.walk(ROOT / name):
            inner[:] = [d for d in inner if d != "__pycache__"]
            for file in files:
                try:
                    yield Path(folder, file).stat().st_mtime
                except OSError:  # a link to nowhere
                    continue
