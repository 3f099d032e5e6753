"""Hang detection for user scripts: no output of any rank for a long time, and stacks that do not
move.

Silence alone is never a hang: a script may train, evaluate, compile, download or sleep silently. It
only decides when the ranks are examined. A run is ended only on a finding of
training.watchdog.stall_detector from samples of the second half of the silence: a rank waits for
the others, and one that does not is idle, stopped, or in an endless loop.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from training.core import log
from training.core.messages import msg
from training.core.phase_timeouts import SHARE, TIMES  # of the silences so far
from training.watchdog import gpu_waits, stall_detector, traced
from training.watchdog.hang_report import (
    ADVANCES,
    BLIND,
    BLOCKED,
    FAILED,
    GPU_WORKS,
    HANG,
    LOCKED,
    LOOPS,
    QUIET,
    SHORT,
    SINGLE,
    STOPPED,
    WORKS,
    HangFinding,
    NoFinding,
)
from training.watchdog.heartbeat_watchdog import STOPPED_S
from training.watchdog.probes import procfs, stacks, system_calls, waits
from training.watchdog.probes.sampling import NewestCall, Sample, take
from training.watchdog.probes.stacks import Stack, Thread

GAPS = 500  # number of gaps that are kept
BURST_S = 0.001  # lines this close together are one output
FEW = 10  # from this many gaps on, the largest one is ignored
SAMPLES = 3  # the minimum for a finding
PER_PATIENCE = 12  # samples in that time
LEAST_S = 0.3  # minimum interval of samples
ALONE_TIMES = 5.0  # no rank waits for another, or the one they wait for may be working
# Limits of silence after which a reason for no finding is a warning, once: it may be wrong.
WARN_TIMES = {LOCKED: 1.0, QUIET: ALONE_TIMES} | dict.fromkeys(
    (WORKS, GPU_WORKS, ADVANCES, SINGLE), 2 * ALONE_TIMES
)
# long work in Python looks like an endless loop; before the first step it counts as work
SPIN_TIMES = ALONE_TIMES
SPIN_LOOKS = 6  # consecutive findings before it is reported
KEPT = 200  # samples
REACH = 0.7  # part of the window that the samples must span
NOTHING_YET = NoFinding(SHORT, msg("watchdog.script.too_short"))
# look() was not called: the machine was suspended, or this process was stopped with the ranks
ASLEEP_S = 10.0


class ScriptWatch:
    """For one attempt. `floor_s` is --hang_timeout, 0: off; `elsewhere`: other machines have ranks
    too; `pending`: has this rank an unfinished collective (None: unknown)? `begun`: has its GPU
    begun one of them? `newest_call`: when did it call its newest one, or one end? `trains`: has the
    script printed a step, or a loss? `warn`: logs a warning."""

    def __init__(
        self,
        floor_s: float,
        *,
        elsewhere: bool = False,
        pending: Callable[[int], bool | None] = lambda rank: None,
        begun: Callable[[int], bool | None] = lambda rank: None,
        newest_call: NewestCall = lambda rank: None,
        trains: Callable[[], bool] = lambda: True,
        warn: Callable[[str], None] = log.warning,
    ) -> None:
        self.floor_s, self.others_elsewhere, self._pending, self._log = (
            floor_s,
            elsewhere,
            pending,
            warn,
        )
        self._begun, self._newest_call = begun, newest_call
        self._trains, self._training = trains, False
        self.joining = False  # see stall_detector
        self._gaps: deque[float] = deque(maxlen=GAPS)
        self._heard: float | None = None  # time of the last output
        self._quiet_since = self._looked = time.monotonic()
        self._samples: list[Sample] = []  # of this silence; filled by the thread
        self._sampler: threading.Thread | None = None
        self._closing = threading.Event()
        self._sampled_at = 0.0
        self._verdict: tuple[list[Sample], HangFinding | NoFinding] | None = None
        self._loops = 0  # consecutive findings of a loop
        self._stopped: dict[int, float] = {}  # rank → since when
        self._reported: set[str] = set()
        waits.forget_lines()
        self._read_scripts: set[int] = set()  # of these processes

    def output(self, at: float | None = None, *, training: bool = True) -> None:
        """A rank has printed something; `at`: then, rather than now. `training`: False for its
        launcher, before the ranks were found."""
        now = time.monotonic() if at is None else at
        # The time before the first output is the start (imports), not a usual gap.
        if self._heard is not None and now - self._heard > BURST_S:
            self._gaps.append(now - self._heard)
        self._heard = now if training else None
        self._begin(now)

    def patience_s(self) -> float:
        """A silence of this length is examined."""
        gaps = sorted(self._gaps)
        if len(gaps) >= FEW:
            gaps.pop()
        usual = gaps[min(len(gaps) - 1, int(SHARE * len(gaps)))] if gaps else 0.0
        return max(self.floor_s, TIMES * usual)

    def look(
        self, pids: Mapping[int, int], ended: Mapping[int, int | None] | None = None
    ) -> HangFinding | None:
        """Called a few times a second with the running ranks (rank → PID) and those that have
        exited (rank → status, None: unknown). Samples are taken in a thread. A finding is certain:
        its run can be ended."""
        now = time.monotonic()
        asleep, self._looked = now - self._looked > ASLEEP_S, now
        if not self.floor_s or not pids:
            return None
        if asleep:
            self._stopped.clear()
            self._begin(now)
        if new := set(pids.values()) - self._read_scripts:
            self._read_scripts |= new
            waits.remember_lines(dict.fromkeys(file for pid in new for file in procfs.scripts(pid)))
        stopped = self._look_for_stopped(pids, now)
        patience, silent = self.patience_s(), now - self._quiet_since
        if not stopped and silent < patience / 2:
            return None
        every_s = LEAST_S if stopped else max(LEAST_S, patience / PER_PATIENCE)
        due = now - self._sampled_at > every_s and not (self._sampler and self._sampler.is_alive())
        found = self._result(silent, patience, stopped)
        # not at each look: it reads a file for each of hundreds of threads
        if (due or found) and self._read_input(pids):
            self._begin(now)
            return None
        if due:
            self._sampled_at = now
            facts = (self._samples, dict(pids), dict(ended or {}), silent, patience, stopped)
            self._closing.clear()
            self._sampler = threading.Thread(target=self._examine, args=facts, daemon=True)
            self._sampler.start()
        if found:
            self.close()
        return found

    def _read_input(self, pids: Mapping[int, int]) -> bool:
        """Does the main thread of a rank wait for the user? The others wait for the user then."""
        for rank, pid in pids.items():
            debugged = any(waits.in_debugger(main) for main in self._last_main(rank))
            if system_calls.reads_input(pid) or (debugged and system_calls.prompts(pid)):
                self._warn(msg("watchdog.script.reads_input", rank=rank), "input")
                return True
        return False

    def _last_main(self, rank: int) -> list[Thread]:
        """Its main thread in the newest sample, if there is one."""
        looks = [sample.looks[rank] for sample in self._samples[-1:] if rank in sample.looks]
        return [look.main for look in looks if look.main]

    def close(self) -> None:
        """Wait for the thread: processes must be started from a process with one thread."""
        self._closing.set()
        if self._sampler:
            self._sampler.join()

    def _result(self, silent: float, patience: float, stopped: bool) -> HangFinding | None:
        of, found = self._verdict or (None, NOTHING_YET)
        if of is not self._samples or (silent < patience and not stopped):
            return None
        if isinstance(found, NoFinding):
            if found.code in (BLIND, FAILED):
                self._warn(msg("watchdog.script.not_possible", found=found), found.code)
            elif found.code == LOOPS and self._loops >= SPIN_LOOKS:
                end = (
                    msg("watchdog.script.ended_after", limit_s=SPIN_TIMES * patience)
                    if self._training
                    else msg("watchdog.script.no_step_yet")
                )
                self._warn(
                    msg("watchdog.script.silent_end", silent=silent, found=found, end=end),
                    f"{LOOPS} {self._training}",
                )
            elif silent > WARN_TIMES.get(found.code, math.inf) * patience:
                self._warn(msg("watchdog.script.silent", silent=silent, found=found), found.code)
            return None
        if found.kind == STOPPED:
            since = self._stopped.get(found.rank or 0)
            return replace(found, since_s=time.monotonic() - since) if stopped and since else None
        return replace(found, how=msg("watchdog.script.how", how=found.how, silent=silent))

    def _begin(self, now: float) -> None:
        self._quiet_since, self._samples, self._verdict, self._loops = now, [], None, 0

    def _warn(self, text: str, key: str) -> None:
        if key not in self._reported:
            self._reported.add(key)
            self._log(text)

    def _look_for_stopped(self, pids: Mapping[int, int], now: float) -> bool:
        """Is a rank stopped for long, but not all of them? It does not resume by itself; all of
        them are stopped only on purpose. While a debugger holds one, no time counts."""
        debugged, limit_s = False, max(STOPPED_S, self.floor_s)
        for rank, pid in pids.items():
            process = procfs.read_process(pid)
            if process is None or process.state not in "Tt":
                self._stopped.pop(rank, None)
            elif now - self._stopped.setdefault(rank, now) > STOPPED_S and process.state == "t":
                debugged, text = True, traced.text(rank, pid)
                self._warn(text, text)
        self._stopped = {rank: since for rank, since in self._stopped.items() if rank in pids}
        if debugged:
            self._begin(now)
            return False
        some_run = len(self._stopped) < len(pids)
        for rank, since in self._stopped.items():
            if now - since > STOPPED_S and (some_run or self.others_elsewhere):
                text = msg("watchdog.script.stopped", rank=rank, pid=pids[rank])
                if some_run:
                    text = msg("watchdog.heartbeat.ended_after", text=text, limit_s=limit_s)
                self._warn(text, text)
        longest = max((now - since for since in self._stopped.values()), default=0.0)
        return longest > limit_s and some_run

    def _examine(
        self,
        samples: list[Sample],
        pids: dict[int, int],
        ended: dict[int, int | None],
        silent: float,
        patience: float,
        stopped: bool,
    ) -> None:
        """Runs in the thread, which owns `samples` until an output begins another list."""
        try:
            result = self._judged(samples, pids, ended, silent, patience, stopped)
            if isinstance(result, NoFinding) and result.code == LOOPS:
                self._training = self._training or self._trains()
        except Exception as error:  # the next look follows soon
            result = NoFinding(
                FAILED,
                msg("watchdog.script.sampling_failed", name=type(error).__name__, error=error),
            )
        loops = isinstance(result, NoFinding) and result.code == LOOPS
        self._loops = self._loops + 1 if loops else 0
        self._verdict = (samples, result)

    def _judged(
        self,
        samples: list[Sample],
        pids: dict[int, int],
        ended: dict[int, int | None],
        silent: float,
        patience: float,
        stopped: bool,
    ) -> HangFinding | NoFinding:
        samples.append(take(pids, self._newest_call, samples[-1] if samples else None))
        if _pids(samples[-1]) != _pids(samples[0]):
            del samples[:-1]  # a rank has exited, or its training was found below it
        del samples[: -(KEPT + 1)]
        # Half the patience at first, growing with the silence to the whole of it.
        window = 2 * LEAST_S if stopped else min(patience, max(silent - patience / 2, patience / 2))
        burst = (
            functools.cache(self._burst)
            if silent > SPIN_TIMES * patience and self._training
            else None
        )
        result: HangFinding | NoFinding = NOTHING_YET
        windows = [(window, False)] + (
            [(ALONE_TIMES * patience, True)] if silent > ALONE_TIMES * patience else []
        )
        for seconds, alone in windows:
            if isinstance(result, NoFinding) and (part := last(samples, seconds)):
                result = stall_detector.detect_stall(
                    part,
                    ended,
                    burst=burst,
                    elsewhere=self.others_elsewhere,
                    joining=self.joining,
                    alone=alone,
                )
                gpus = [rank for rank, look in samples[-1].looks.items() if look.gpu]
                result = self._doubted(result, alone, gpus)
        return result

    def _doubted(
        self, found: HangFinding | NoFinding, alone: bool, gpus: Collection[int]
    ) -> HangFinding | NoFinding:
        """A rank that waits for its GPU, or in a backward there, waits for other ranks only if a
        collective is pending; otherwise the GPU computes. One that may wait for a place in the
        queue proves nothing by itself. `gpus`: the ranks that use one."""
        if isinstance(found, NoFinding) or found.kind == STOPPED:
            return found
        for rank in gpu_waits.on_gpu(found, gpu_waits.QUEUE):
            if found.rank is None or not self._pending(rank):
                return NoFinding(
                    WORKS, msg("watchdog.script.may_work", place=found.waiting[rank], rank=rank)
                )
        stuck = found.rank is not None and found.kind in (HANG, BLOCKED) and not found.may_end
        # beside a stuck rank, a backward waits for that
        doubtful = gpu_waits.may_compute(found, gpus if found.rank is None else ())
        for rank in gpu_waits.may_compute(found, gpus):
            pending = self._pending(rank)
            if pending is False:
                # Collectives in a CUDA graph are not recorded.
                if alone and stuck:
                    return replace(found, may_end=True)
                return NoFinding(GPU_WORKS, msg("watchdog.script.gpu_computes", rank=rank))
            if pending is None and not alone and rank in doubtful:
                return NoFinding(GPU_WORKS, msg("watchdog.script.gpu_may_compute", rank=rank))
        return self._before_collectives(found) or found

    def _before_collectives(self, found: HangFinding) -> NoFinding | None:
        """All ranks wait for their GPUs, or in barriers, whose collectives are queued behind other
        work. One GPU alone that does not reach the collective of the others is stuck."""
        if found.rank is not None:
            return None
        begun = {rank: self._begun(rank) for rank in sorted(found.waiting)}
        queued = [rank for rank, reached in begun.items() if reached is False]
        unknown = any(begun[rank] is None for rank in gpu_waits.on_gpu(found))
        if not queued or unknown or any(begun.values()):
            return None
        return NoFinding(GPU_WORKS, msg("watchdog.script.gpu_computes_before", rank=queued[0]))

    def _burst(self, pid: int) -> list[Stack | str]:
        taken: list[Stack | str] = []
        end = time.monotonic() + stall_detector.BURST_LIMIT_S
        while (
            len(taken) < stall_detector.BURST
            and not self._closing.is_set()
            and (left := end - time.monotonic()) > 0
        ):
            taken.append(stacks.dump([pid], left)[pid])
        return taken


def _pids(sample: Sample) -> dict[int, int]:
    return {rank: look.process.pid for rank, look in sample.looks.items()}


def last(samples: Sequence[Sample], seconds: float) -> Sequence[Sample]:
    """Samples of the last `seconds`; none when they are too few or do not span that time (except
    for one sample). On a busy machine, where each sample takes long, they are the last few all the
    same."""
    within = sum(samples[-1].at - sample.at <= seconds for sample in samples)
    part = samples[-max(within, SAMPLES) :]
    reach = part[-1].at - part[0].at if part else 0.0
    return part if len(part) >= SAMPLES and reach > REACH * seconds else []
