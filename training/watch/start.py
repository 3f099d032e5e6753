"""The watch of one start: by heartbeats where the ranks are our own training, by stacks and silence where they are somebody's script."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from training import console, heartbeat, rundir
from training.launch.team import Team, is_script
from training.watch import collectives, proc, ranks, record
from training.watch.finding import DESYNC, HANG, UNEVEN, Finding
from training.watch.native import Watch
from training.watch.scripts import ScriptWatch


class RanksWatch:
    """Of the ranks of one machine; `look()` is called a few times a second."""

    def __init__(self, run: rundir.RunDir, plan: Mapping[str, Any], team: Team) -> None:
        self.run, self.team = run, team
        self._ours = self._script = None
        self._broken = False
        self._below: dict[int, int] = {}  # rank → pid, under torchrun
        if is_script(dict(plan)):
            self._script = ScriptWatch(float(plan["config"]["hang_timeout"]), elsewhere=len(team.ranks) < team.world_size)
        else:
            self._ours = Watch(run, plan, team.ranks)

    def output(self) -> None:
        """A rank has written something."""
        if self._script:
            self._script.output()

    def close(self) -> None:
        """Nothing of the watch runs any more: who starts ranks has one thread."""
        if self._script:
            self._script.close()

    def patience_s(self, beat: heartbeat.Beat) -> float:
        """For a rank that has been asked to stop: its phase may take so long."""
        return self._ours.patience_s(beat) if self._ours else 0.0

    def look(self, started: Mapping[int | None, int], ended: Mapping[int, int]) -> Finding | None:
        """`started`: rank → pid of what lives; torchrun, which has ranks of its own, is None. `ended`: rank → status. An error of
        the watch itself ends the watch, with its traceback in the run directory, and never the training."""
        if self._broken:
            return None
        try:
            return self._look(started, ended)
        except Exception as error:
            self._broken = True
            console.warning(f"hang detection is off for this start: {type(error).__name__}: {error} (see {self.run.watch_error})")
            with contextlib.suppress(OSError):
                self.run.watch_error.write_text(traceback.format_exc(), encoding="utf-8")
            return None

    def _look(self, started: Mapping[int | None, int], ended: Mapping[int, int]) -> Finding | None:
        pids = {rank: pid for rank, pid in started.items() if rank is not None}
        if self._ours:
            return self._ours.look(pids or {b.rank: b.pid for b in heartbeat.read_all(self.run.heartbeats, self.team.ranks)})
        assert self._script
        if not pids:
            pids = self._below = {r: p for r, p in self._below.items() if proc.look(p)} or ranks.below(started[None])
        found = self._script.look(pids, ended)
        return record.keep(self.run, self._compared(found, pids), found.texts()) if found else None

    def _compared(self, found: Finding, numbers: Iterable[int]) -> Finding:
        """A script whose ranks stand still, seen by what they have called."""
        calls = {rank: called for rank in numbers if (called := collectives.read(self.run.ranks, rank)) is not None}
        different = collectives.mismatch(calls) if found.kind in (HANG, UNEVEN) else None
        if different is None:
            return found
        where, waiting = (found.where, found.waiting) if different.rank == found.rank else (None, {})
        return replace(found, kind=DESYNC, rank=different.rank, where=where, waiting=waiting, how=str(different))
