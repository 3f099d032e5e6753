"""Stop signals to the supervisor, while ranks run and between two attempts."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Sequence

from training.core import console
from training.core.errors import Exit
from training.core.messages import msg
from training.host import hosts, process


def code(number: int) -> Exit:
    """Exit status of a run that this signal has ended."""
    return Exit.INTERRUPTED if number == signal.SIGINT else Exit.PREEMPTED


# These do not stop anything: one has a meaning for the script alone, one is of the terminal.
PASSED_ON = (signal.SIGUSR2, signal.SIGWINCH)
PAIR_S = 2.0  # `timeout` signals its child and then the whole group
# A rank that exits with such a status got this stop signal itself.
SIGNALS = {int(Exit.PREEMPTED): signal.SIGTERM, int(Exit.INTERRUPTED): signal.SIGINT}


def number_of(request: KeyboardInterrupt) -> int:
    return request.number if isinstance(request, process.StopAsked) else int(signal.SIGINT)


def insists(number: int) -> bool:
    """Is this signal a further request after an earlier one? Not TERM or USR1 in a batch job
    without a terminal: its scheduler sends several (LSF INT, TERM) and KILL itself, later. The
    agent of --hosts sends a second TERM on purpose."""
    in_job = process.BATCH_JOB & os.environ.keys() and not os.isatty(0)
    return number == signal.SIGINT or not in_job or hosts.AGENT in os.environ


class Requests:
    """Separates requests to stop from signals that only repeat one."""

    def __init__(self) -> None:
        self._made: dict[int, float] = {}  # signal → time of its last request

    def is_new(self, number: int) -> bool:
        now = time.monotonic()
        pair = number != signal.SIGINT and now - self._made.get(number, -PAIR_S) < PAIR_S
        if pair or (self._made and not insists(number)):
            return False
        self._made[number] = now
        return True


def raise_before_start(asked: Sequence[int] = ()) -> None:
    """Until StopSignals are entered, TERM and USR1 raise like Ctrl-C. `asked`: those remembered so
    far (process.remember_stops), which raise now."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, process.raise_stop)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if asked:
        raise process.StopAsked(asked[0])


def before_start(number: int) -> str:
    """What has happened, for the user."""
    if number == signal.SIGINT:
        return msg("launcher.end.interrupted_before")
    return msg("launcher.end.stopped_before", name=name(number))


def name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def show_the_rest() -> None:
    """The launcher's last call: a terminal that has missed something (Ctrl-S) is waited for until
    it shows how the run ended, after a stop request or a stop signal for a moment only."""
    if not (waiting := console.frozen()):
        return
    before = {n: signal.signal(n, lambda *_: console.hurry()) for n in process.STOP_SIGNALS}
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, process.STOP_SIGNALS)
    try:
        for one in waiting:
            with contextlib.suppress(OSError):  # it is gone
                one.finish()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)


def _too_late(number: int, frame: object) -> None:
    """For signals after the end, which do not change the result of the run."""
    console.hurry()


class StopSignals:
    """While entered, stop signals become bytes in a pipe (`fd`): none is lost, none interrupts an
    action. Re-entrant. After the first one, they are ignored on exit; in the launcher (see
    raise_before_start) they change nothing after it. To be made before the first one
    (process.obeyed_stops)."""

    def __init__(self) -> None:
        self._obeyed, self._requests = process.obeyed_stops(), Requests()
        self.fd = self._writer = self._previous = -1
        self._depth = 0
        self._asked = self._ends_work = False

    def __enter__(self) -> StopSignals:
        self._depth += 1
        if self._depth == 1:
            self.fd, self._writer = os.pipe()
            os.set_blocking(self.fd, False)
            os.set_blocking(self._writer, False)
            self._previous = signal.set_wakeup_fd(self._writer)
            self._before = {number: signal.signal(number, self._note) for number in self._obeyed}
            self._before |= {n: signal.signal(n, lambda *_: None) for n in PASSED_ON}
        return self

    def __exit__(self, *failure: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        in_launcher = process.raise_stop in self._before.values()
        for number, handler in self._before.items():
            ignored = self._asked or number in PASSED_ON
            after = _too_late if in_launcher else handler
            signal.signal(number, signal.SIG_IGN if ignored else after)
        signal.set_wakeup_fd(self._previous)
        os.close(self.fd)
        os.close(self._writer)

    def _note(self, number: int, frame: object) -> None:
        self._asked = True
        console.hurry()
        if self._ends_work:
            self._ends_work = False
            raise KeyboardInterrupt

    def read(self) -> list[int]:
        """Signals since the last call: requests to stop, and those for the ranks alone."""
        try:
            arrived = os.read(self.fd, 64)
        except BlockingIOError:
            return []
        return [
            n
            for n in arrived
            if n in PASSED_ON or (n in process.STOP_SIGNALS and self._requests.is_new(n))
        ]

    def wait(self, seconds: float) -> int | None:
        """The signal that has arrived, or arrives within `seconds`."""
        end = time.monotonic() + seconds
        while True:
            select.select([self.fd], [], [], max(0.0, end - time.monotonic()))
            if numbers := [n for n in self.read() if n not in PASSED_ON]:
                return numbers[0]
            if time.monotonic() >= end:
                return None

    def unless_asked(self, work: Callable[[], object]) -> bool:
        """Work that may take minutes: a stop signal interrupts it and can still be read. Returns
        whether the work was completed."""
        done = False
        self._ends_work = True
        try:
            with contextlib.suppress(KeyboardInterrupt):
                work()
                done = True
        finally:
            self._ends_work = False
        return done
