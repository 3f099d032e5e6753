"""Hang detection for scripts that know nothing of us: no output of any rank for long, and stacks that do not move.

Silence alone is never a hang: a script may train, evaluate, compile, download or sleep without a word. It only decides when the
ranks are looked at. What ends a run is told by training.watch.standstill, from samples of the second half of the silence: a rank
waits for the others, and one that does not is idle, stopped, or in an endless loop.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from training import console
from training.watch import proc, stacks, standstill
from training.watch.finding import STOPPED, Finding
from training.watch.sampling import Sample, take
from training.watch.stacks import Stack

TIMES, SHARE = 5.0, 0.99  # of the silences so far
GAPS = 500  # that many are remembered
BURST_S = 0.001  # lines that come together are one output
FEW = 10  # gaps: from then on the largest one may be an accident
SAMPLES = 3  # the least that a finding stands on
PER_PATIENCE = 12  # samples in that time
LEAST_S = 0.3  # between samples
SPIN_TIMES = 1.5  # an endless loop looks like work for longer
ALONE_TIMES = 5.0  # nobody waits for another rank: a single one, or all at their data loaders
STOPPED_S = 2.0  # a process that is stopped for so long is told
KEPT = 200  # samples
REACH = 0.7  # of the time that is asked for
ASLEEP_S = 10.0  # look() itself was not called: the whole machine was asleep, or we were stopped with the ranks


class ScriptWatch:
    """Of one start. `floor_s` is --hang_timeout, 0: never; `elsewhere`: other machines have ranks too; `say`: a warning for people."""

    def __init__(self, floor_s: float, *, elsewhere: bool = False, say: Callable[[str], None] = console.warning) -> None:
        self.floor_s, self._elsewhere, self._say = floor_s, elsewhere, say
        self._gaps: deque[float] = deque(maxlen=GAPS)
        self._heard: float | None = None  # the last output
        self._quiet_since = self._looked = time.monotonic()
        self._samples: list[Sample] = []  # of this silence; filled by the thread
        self._sampler: threading.Thread | None = None
        self._sampled_at = 0.0
        self._verdict: tuple[list[Sample], Finding | str] | None = None
        self._stopped: dict[int, float] = {}  # rank → since when
        self._said: set[str] = set()

    def output(self) -> None:
        """A rank has written something."""
        now = time.monotonic()
        # What comes before the first output is the start: imports, not what is usual later.
        if self._heard is not None and now - self._heard > BURST_S:
            self._gaps.append(now - self._heard)
        self._heard = now
        self._begin(now)

    def patience_s(self) -> float:
        """A silence of this length is looked into."""
        gaps = sorted(self._gaps)
        if len(gaps) >= FEW:
            gaps.pop()
        usual = gaps[min(len(gaps) - 1, int(SHARE * len(gaps)))] if gaps else 0.0
        return max(self.floor_s, TIMES * usual)

    def look(self, pids: Mapping[int, int], ended: Mapping[int, int] | None = None) -> Finding | None:
        """Called a few times a second with the ranks that live (rank → pid) and those that do not (rank → status). Samples are taken
        by a thread of their own. A finding is certain: its run can be ended."""
        now = time.monotonic()
        asleep, self._looked = now - self._looked > ASLEEP_S, now
        if not self.floor_s or not pids:
            return None
        if asleep:
            self._stopped.clear()
            self._begin(now)
        stopped = self._look_for_stopped(pids, now)
        patience, silent = self.patience_s(), now - self._quiet_since
        if not stopped and silent < patience / 2:
            return None
        every_s = LEAST_S if stopped else max(LEAST_S, patience / PER_PATIENCE)
        if now - self._sampled_at > every_s and not (self._sampler and self._sampler.is_alive()):
            self._sampled_at = now
            facts = (self._samples, dict(pids), dict(ended or {}), silent, patience, stopped)
            self._sampler = threading.Thread(target=self._examine, args=facts, daemon=True)
            self._sampler.start()
        if found := self._told(silent, patience, stopped):
            self.close()
        return found

    def close(self) -> None:
        """Waits for the sample that is being taken: who starts processes next wants to be the only thread."""
        if self._sampler:
            self._sampler.join()

    def _told(self, silent: float, patience: float, stopped: bool) -> Finding | None:
        of, found = self._verdict or (None, "")
        if of is not self._samples or (silent < patience and not stopped):
            return None
        if isinstance(found, str):
            if found.startswith(standstill.BLIND):
                self._tell(f"no hang can be found: {found}", standstill.BLIND)
            elif silent > ALONE_TIMES * patience and found.startswith(standstill.QUIET):
                self._tell(f"no output for {silent:.0f} s: {found}", standstill.QUIET)
            return None
        if found.kind == STOPPED:
            since = self._stopped.get(found.rank or 0)
            return replace(found, since_s=time.monotonic() - since) if stopped and since else None
        return replace(found, how=f"{found.how} (no output for {silent:.1f} s)")

    def _begin(self, now: float) -> None:
        self._quiet_since, self._samples, self._verdict = now, [], None

    def _tell(self, text: str, key: str) -> None:
        if key not in self._said:
            self._said.add(key)
            self._say(text)

    def _look_for_stopped(self, pids: Mapping[int, int], now: float) -> bool:
        """Is a rank stopped for long, and not all of them? It does not come back by itself; who stops all has a reason."""
        for rank, pid in pids.items():
            process = proc.look(pid)
            if process is None or process.state not in "Tt":
                self._stopped.pop(rank, None)
            elif now - self._stopped.setdefault(rank, now) > STOPPED_S:
                by = "a debugger" if process.state == "t" else "SIGSTOP"
                self._tell(f"rank {rank} (pid {pid}) is stopped by {by}; go on: kill -CONT {pid}", f"stopped {rank}")
        self._stopped = {rank: since for rank, since in self._stopped.items() if rank in pids}
        longest = max((now - since for since in self._stopped.values()), default=0.0)
        return longest > max(STOPPED_S, self.floor_s) and len(self._stopped) < len(pids)

    def _examine(
        self, samples: list[Sample], pids: dict[int, int], ended: dict[int, int], silent: float, patience: float, stopped: bool
    ) -> None:
        """In the thread. `samples` belongs to it, until an output begins another list."""
        samples.append(take(pids))
        if samples[-1].looks.keys() != samples[0].looks.keys():
            del samples[:-1]  # a rank has ended
        del samples[: -(KEPT + 1)]
        # At first the second half of the silence, and as long as it takes once there is so much.
        window = 2 * LEAST_S if stopped else min(patience, max(silent - patience / 2, patience / 2))
        burst = _burst if silent > SPIN_TIMES * patience else None
        told: Finding | str = "not looked at for long enough"
        if part := last(samples, window):
            told = standstill.judge(part, ended, burst=burst, elsewhere=self._elsewhere)
        if isinstance(told, str) and (part := last(samples, ALONE_TIMES * patience)):
            told = standstill.judge(part, ended, burst=burst, elsewhere=self._elsewhere, alone=True)
        self._verdict = (samples, told)


def last(samples: Sequence[Sample], seconds: float) -> Sequence[Sample]:
    """Those of the last seconds; none when they do not reach back that far (a sample less does not matter) or are too few."""
    part = [sample for sample in samples if samples[-1].at - sample.at <= seconds]
    reach = part[-1].at - part[0].at if part else 0.0
    return part if len(part) >= SAMPLES and reach > REACH * seconds else []


def _burst(pid: int) -> list[Stack | str]:
    return [stacks.dump([pid])[pid] for _ in range(standstill.BURST)]
