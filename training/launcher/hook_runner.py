"""A program that is run once when everything is done, and can neither delay nor change the end of a
run for longer than its limit."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence

from training.core import exit_status
from training.host import process
from training.launcher import stop_signals
from training.launcher.reaper import Guardian
from training.launcher.stop_signals import StopSignals

KEPT_BYTES = 1 << 16  # of what it says, the last
LEAVE_S = 5.0


def run(
    argv: Sequence[str],
    env: Mapping[str, str],
    given: bytes,
    limit_s: float,
    wanted: StopSignals,
    *,
    nice: int = 0,
) -> tuple[str, str]:
    """(what went wrong or '', what it said). `given` is its standard input; a wish to stop ends it.
    It and what it has started are gone afterwards, also when this process is killed meanwhile."""
    try:
        with Guardian() as token, wanted, tempfile.TemporaryFile() as stdin:
            stdin.write(given)
            stdin.seek(0)  # a file, not a pipe: whoever does not read it blocks nobody
            child = subprocess.Popen(
                argv,
                env={**env, process.TOKEN: token},
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            if nice:
                os.setpriority(os.PRIO_PROCESS, child.pid, nice)
            return _watched(child, limit_s, wanted)
    except OSError as error:
        return f"{argv[0]} can not be started: {error.strerror}", ""


def _watched(
    child: subprocess.Popen[bytes], limit_s: float, wanted: StopSignals
) -> tuple[str, str]:
    assert child.stdout
    output, said, wrong = child.stdout.fileno(), b"", ""
    os.set_blocking(output, False)
    pidfd, end = os.pidfd_open(child.pid), time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector:
        for fd in (pidfd, wanted.fd, output):
            selector.register(fd, selectors.EVENT_READ)
        while not wrong:
            ready = {key.fd for key, _ in selector.select(max(0.0, end - time.monotonic()))}
            if output in ready:
                chunk = os.read(output, KEPT_BYTES)
                said = (said + chunk)[-KEPT_BYTES:]
                if not chunk:
                    selector.unregister(output)
            if pidfd in ready:
                break
            if wanted.fd in ready and (numbers := wanted.read()):
                wrong = f"{stop_signals.name(numbers[0])}: ended"
            elif time.monotonic() >= end:
                wrong = f"not done within {limit_s:g} s: ended"
    os.close(pidfd)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # before it is waited for: its number is still its own
    try:
        status = child.wait(LEAVE_S)
    except subprocess.TimeoutExpired:  # blocked in the kernel, on a dead disk: it is not waited for
        return wrong, said.decode("utf-8", "replace")
    with contextlib.suppress(BlockingIOError):  # its last words
        while chunk := os.read(output, KEPT_BYTES):
            said = (said + chunk)[-KEPT_BYTES:]
    child.stdout.close()
    return wrong or (exit_status.how(status) if status else ""), said.decode("utf-8", "replace")
