"""One start of all ranks of the communication test, supervised until the last one has exited. No
torch."""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from training.core import heartbeat
from training.core.jsonl import Record
from training.core.project import ROOT
from training.core.tail import tail
from training.host import process, topology
from training.host.placement import LOOPBACK
from training.launcher.communication import stages

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PREFIX = "duet-communication-"
PEER_GRACE_S = 0.3  # after the first failure: others may have failed before and are reaped later
STACK_S = 1.0  # for the stacks of ranks that hang
KILL_S = 5.0  # a process blocked in a driver cannot be killed
POLL_S = 0.02
# The limit of the start of Python and the import of torch, which a busy machine slows down; that of
# the GPUs' start follows, and only then the limit of the test begins.
START_FACTOR = 3
READY_S = 0.1  # between looks at the ranks that start
MEETING_FACTOR = 10  # the launcher's limit is shorter, so that hanging ranks are seen to hang
KEPT_LINES = 30  # of a rank's output


@dataclass
class CommunicationOutcome:
    """Result of the ranks; a rank that never wrote its stage is at the start of Python."""

    ranks: int
    limit_s: float
    patient: bool = False  # ranks that moved got more time
    seconds: float = 0.0
    # rank → its stage at its end, at the first failure or at the limit
    reached: dict[int, str] = field(default_factory=dict)
    # for how long it had been in that stage
    since_s: dict[int, float] = field(default_factory=dict)
    # of ranks that exited by themselves, as in Popen.returncode; first exit first
    statuses: dict[int, int] = field(default_factory=dict)
    died_at: dict[int, float] = field(default_factory=dict)  # monotonic
    # their results, see training.launcher.communication.worker
    records: dict[int, Record] = field(default_factory=dict)
    output: dict[int, list[str]] = field(default_factory=dict)  # their last lines
    # of those that hung, innermost frame first
    stacks: dict[int, list[str]] = field(default_factory=dict)
    pids: dict[int, int] = field(default_factory=dict)  # → rank
    # rank → pid of those that could not be killed
    stuck: dict[int, int] = field(default_factory=dict)
    timed_out: bool = False
    signal: int | None = None  # stop signal to this process

    def regular(self, rank: int) -> bool:
        return self.statuses.get(rank) == 0 and "wrong" in self.records.get(rank, {})

    @property
    def completed(self) -> bool:
        return all(self.regular(rank) for rank in range(self.ranks))


def run(
    ranks: int,
    device: str,
    variables: Mapping[str, str],
    limit_s: float,
    patience_s: float = 0.0,
) -> CommunicationOutcome:
    """Run the test once. No process and no file of it is left afterwards; then a stop signal is
    delivered again. For the main thread only. `patience_s`: beyond the limit, for ranks that are
    slow but do not hang.

    Raises OSError when the temporary folder or the processes cannot be created.
    """
    with _noted_signals() as (arrived, reader):
        with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
            outcome = _Trial(
                ranks, device, variables, limit_s, stages.Files(folder), arrived, reader
            ).go(patience_s)
        outcome.signal = arrived[0] if arrived else None
    return outcome


@contextlib.contextmanager
def _noted_signals() -> Iterator[tuple[list[int], int]]:
    """Collect stop signals in a list, and as bytes in a pipe that wakes up the watching loop."""
    arrived: list[int] = []
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    # Ignored signals (nohup, a background job) stay ignored.
    numbers = [n for n in STOP_SIGNALS if signal.getsignal(n) != signal.SIG_IGN]
    before = {n: signal.signal(n, lambda number, frame: arrived.append(number)) for n in numbers}
    previous = signal.set_wakeup_fd(writer)
    try:
        yield arrived, reader
    finally:
        signal.set_wakeup_fd(previous)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)
        if arrived:
            os.kill(os.getpid(), arrived[0])


class _Trial:
    def __init__(
        self,
        ranks: int,
        device: str,
        variables: Mapping[str, str],
        limit_s: float,
        files: stages.Files,
        arrived: list[int],
        wakeup: int,
    ) -> None:
        self.outcome, self.files = CommunicationOutcome(ranks, limit_s), files
        self._device, self._variables, self._arrived = device, variables, arrived
        self._popens: list[subprocess.Popen[bytes]] = []
        self._alive: dict[int, int] = {}  # pidfd → rank
        self._selector = selectors.DefaultSelector()
        self._wakeup = wakeup
        self._selector.register(wakeup, selectors.EVENT_READ)

    def go(self, patience_s: float) -> CommunicationOutcome:
        begin = time.monotonic()
        self.outcome.patient = patience_s > 0
        try:
            self._start()
            self._watch(begin, patience_s)
        finally:
            self._end()
        self._read()
        self.outcome.seconds = time.monotonic() - begin
        return self.outcome

    def _start(self) -> None:
        count = self.outcome.ranks
        # listening already: rank 0 inherits it, see training.inspector.distributed.setup
        with socket.socket() as store:
            store.bind((LOOPBACK, 0))
            store.listen(2 * count)
            shared = topology.clean(os.environ) | dict(self._variables)
            shared |= {
                "WORLD_SIZE": str(count),
                "LOCAL_WORLD_SIZE": str(count),
                "MASTER_ADDR": LOOPBACK,
            }
            shared["MASTER_PORT"] = str(store.getsockname()[1])
            for rank in range(count):
                env = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                inherited: tuple[int, ...] = ()
                if rank == 0:
                    env["DUET_STORE_FD"], inherited = str(store.fileno()), (store.fileno(),)
                self._popens.append(self._start_one(rank, env, inherited))
                self.outcome.pids[self._popens[-1].pid] = rank
                pidfd = process.exit_fd(self._popens[-1].pid)
                self._alive[pidfd] = rank
                self._selector.register(pidfd, selectors.EVENT_READ)

    def _start_one(
        self, rank: int, env: dict[str, str], inherited: tuple[int, ...]
    ) -> subprocess.Popen[bytes]:
        timeout = str(MEETING_FACTOR * self.outcome.limit_s + stages.GPU_S)
        program = [
            sys.executable,
            str(ROOT / "lib/run_module.py"),
            "training.launcher.communication.worker",
        ]
        with self.files.log(rank).open("wb") as output:
            return subprocess.Popen(
                [*program, str(self.files.folder), self._device, timeout],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C reaches the launcher alone
                pass_fds=inherited,
                # The launcher has one thread, so code between fork and exec is safe.
                preexec_fn=functools.partial(process.die_with_parent, os.getpid()),  # noqa: PLW1509
            )

    def _watch(self, begin: float, patience_s: float) -> None:
        """Wait until all have exited; a failure, a signal or the limit ends the wait sooner. Ranks
        that move get up to `patience_s` more."""
        ready, imported, failed = False, False, False
        start_s = START_FACTOR * self.outcome.limit_s + patience_s
        end = longest = begin + start_s
        while self._alive and not self._arrived:
            starting = set() if ready or failed else self._starting()
            if not ready and not failed and not starting:
                ready, end = True, time.monotonic() + self.outcome.limit_s
                longest = end + patience_s
            elif not imported and starting == {stages.GPU}:
                imported, start_s = True, stages.GPU_S
                end = time.monotonic() + start_s
            left = end - time.monotonic()
            pause = left if ready else min(left, READY_S)
            # also past the limit: this process may have been stopped itself
            for key, _ in self._selector.select(max(0.0, pause)):
                if key.fd == self._wakeup:
                    os.read(self._wakeup, 64)
                else:
                    self._reap(key.fd)
            if not failed and self._failed():
                failed = True
                self._note_stages()
                end = min(end, time.monotonic() + PEER_GRACE_S)
            elif left <= 0:
                moving = ready and not failed
                more = min(self._moving_s(), longest - time.monotonic()) if moving else 0.0
                if more <= 0:
                    break
                end = time.monotonic() + more
                self.outcome.limit_s += round(more)
        if self._alive and not self._arrived and not failed:
            self.outcome.timed_out = True
            if not ready:
                self.outcome.limit_s = start_s
            self._note_stages()
            self._take_stacks()

    def _starting(self) -> set[str]:
        """Stages of the ranks that have not imported torch or started their GPU yet."""
        beats = [heartbeat.read(self.files.heartbeat(r)) for r in range(self.outcome.ranks)]
        reached = {beat.phase if beat else stages.START for beat in beats}
        return reached.intersection(stages.STARTING)

    def _reap(self, pidfd: int) -> None:
        rank = self._alive.pop(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        # its descendants; its PID is reused only after the wait
        self._kill(rank)
        self.outcome.statuses[rank] = self._popens[rank].wait()
        self.outcome.died_at[rank] = time.monotonic()
        self.outcome.records[rank] = self.files.read_record(rank)

    def _failed(self) -> bool:
        return any(not self.outcome.regular(rank) for rank in self.outcome.statuses)

    def _moving_s(self) -> float:
        """Seconds until every rank would have been in its stage for STILL_S; a rank that does not
        communicate yet may take any time."""
        self._note_stages()
        waits = [
            stages.STILL_S - self.outcome.since_s[rank]
            if stages.is_communication(self.outcome.reached[rank])
            else stages.STILL_S
            for rank in self._alive.values()
        ]
        return max(waits, default=0.0)

    def _note_stages(self) -> None:
        for rank in range(self.outcome.ranks):
            beat = heartbeat.read(self.files.heartbeat(rank))
            phase = beat.phase if beat else stages.START
            # training.inspector.distributed has its own phases: during the rendezvous, and at the
            # final barrier.
            own = stages.END if phase.startswith("barrier: ") else stages.RENDEZVOUS
            self.outcome.reached[rank] = phase if phase in stages.stages_for(self._device) else own
            self.outcome.since_s[rank] = beat.age_s if beat else self.outcome.limit_s

    def _take_stacks(self) -> None:
        """Ask each rank for its stack; one that has not registered the handler yet dies of the
        signal, which is acceptable."""
        for rank in self._alive.values():
            self._popens[rank].send_signal(signal.SIGUSR2)
        end = time.monotonic() + STACK_S
        asked = [r for r in self._alive.values() if self.files.stack(r).exists()]
        while time.monotonic() < end and not all(
            self.files.stack(r).read_text().count("\n") > 1 for r in asked
        ):
            time.sleep(POLL_S)

    def _end(self) -> None:
        for rank in range(len(self._popens)):
            if rank not in self.outcome.statuses:
                self._kill(rank)
        end = time.monotonic() + KILL_S
        for rank, popen in enumerate(self._popens):
            try:
                popen.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.outcome.stuck[rank] = popen.pid
        for pidfd in self._alive:
            os.close(pidfd)
        self._selector.close()

    def _kill(self, rank: int) -> None:
        """Kill the rank and its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popens[rank].pid, signal.SIGKILL)

    def _read(self) -> None:
        if not self.outcome.reached:
            self._note_stages()
        for rank in range(self.outcome.ranks):
            self.outcome.output[rank] = tail(self.files.log(rank), KEPT_LINES)
            if self.outcome.timed_out:
                self.outcome.stacks[rank] = [
                    line.strip()
                    for line in tail(self.files.stack(rank), 100)
                    if line.strip().startswith("File ")
                ]
