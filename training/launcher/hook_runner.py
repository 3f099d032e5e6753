"""Run one program after a run, with a time limit; it cannot change how the run ended."""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO

from training.core import exit_status
from training.core.messages import msg
from training.core.redact import masked
from training.host import process
from training.launcher import stop_signals
from training.launcher.reaper import Guardian
from training.launcher.stop_signals import StopSignals

KEPT_BYTES = 1 << 16  # of its output, the last ones
LEAVE_S = 5.0


def run(
    argv: Sequence[str],
    env: Mapping[str, str],
    given: bytes,
    limit_s: float,
    signals: StopSignals,
    *,
    nice: int = 0,
) -> tuple[str, str]:
    """(error or '', output). `given` is its standard input; a stop signal ends it. `nice`: added to
    the niceness of this process. No process of it is left afterwards, even if this process is
    killed meanwhile."""
    try:
        with Guardian() as token, signals, _holding(given) as stdin:
            with process.passing_on(token):
                child = subprocess.Popen(
                    argv,
                    env={**env, process.TOKEN: token},
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            if nice:  # on top of the launcher's own, which only root may go below
                own = os.getpriority(os.PRIO_PROCESS, 0)
                os.setpriority(os.PRIO_PROCESS, child.pid, own + nice)
            return _watched(child, limit_s, signals)
    except OSError as error:
        return msg("launcher.hook.cannot_start", program=argv[0], strerror=error.strerror), ""


def _holding(given: bytes) -> IO[bytes]:
    """A file to read it from. A program that does not read it blocks nothing: it is in a pipe only
    if it fits. A full disk does not prevent that."""
    if not given:
        return open(os.devnull, "rb")
    reader, writer = os.pipe()
    with open(writer, "wb", buffering=0) as pipe:
        if len(given) <= fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ):
            pipe.write(given)
            return open(reader, "rb")
    os.close(reader)
    file = tempfile.TemporaryFile()  # noqa: SIM115  closed by the caller
    file.write(given)
    file.seek(0)
    return file


def _watched(
    child: subprocess.Popen[bytes], limit_s: float, signals: StopSignals
) -> tuple[str, str]:
    assert child.stdout
    pipe, output, wrong = child.stdout.fileno(), b"", ""
    os.set_blocking(pipe, False)
    pidfd, end = process.exit_fd(child.pid), time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector:
        for fd in (pidfd, signals.fd, pipe):
            selector.register(fd, selectors.EVENT_READ)
        while not wrong:
            ready = {key.fd for key, _ in selector.select(max(0.0, end - time.monotonic()))}
            if pipe in ready:
                chunk = os.read(pipe, KEPT_BYTES)
                output = (output + chunk)[-KEPT_BYTES:]
                if not chunk:
                    selector.unregister(pipe)
            if pidfd in ready:
                break
            if signals.fd in ready and (number := signals.wait(0.0)):
                wrong = msg("launcher.hook.stopped", name=stop_signals.name(number))
            elif time.monotonic() >= end:
                wrong = msg("launcher.hook.timeout", limit_s=limit_s)
    os.close(pidfd)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # before the wait, which frees its PID
    try:
        status = child.wait(LEAVE_S)
    except subprocess.TimeoutExpired:  # blocked in the kernel, on a dead disk
        return wrong, output.decode("utf-8", "replace")
    with contextlib.suppress(BlockingIOError):  # the rest of its output
        while chunk := os.read(pipe, KEPT_BYTES):
            output = (output + chunk)[-KEPT_BYTES:]
    child.stdout.close()
    return wrong or (exit_status.how(status) if status else ""), output.decode("utf-8", "replace")


def with_reason(error: str, output: str) -> str:
    """The first problem that the program reports, else its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    problem = next((line.partition("[ERROR] ")[2] for line in lines if "[ERROR] " in line), "")
    problem = " ".join(problem.split()[2:])  # without date and time
    return f"{error}: {masked(problem or lines[-1])[:200]}" if lines else error
