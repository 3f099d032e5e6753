"""The child processes of one attempt: ranks, or one torchrun."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from training.core import log, redact, rundir
from training.core.errors import Exit
from training.core.messages import msg
from training.host import process
from training.host.cgroups import oom_kills
from training.launcher import kernel_evidence, local_ranks, orphans, spawn, timeouts
from training.launcher.adopted_ranks import AdoptedRanks
from training.launcher.asked_processes import AskedProcesses, targets, understood
from training.launcher.attempt_state import AttemptState
from training.launcher.child import Child
from training.launcher.outputs import Outputs
from training.trainer import flight_recorder_server
from training.watchdog.probes import procfs
from training.watchdog.probes.signal_masks import catches

if TYPE_CHECKING:
    from training.core.contracts.run_files import ProcessRecord

LOOK_S = 1.0  # interval of the search for what a script has started after a stop request


class ChildProcesses:
    """Starts, signals, kills and reaps them. `on_exit` gets each child and its wait status, unless
    this process has killed it."""

    def __init__(
        self,
        state: AttemptState,
        selector: selectors.BaseSelector,
        outputs: Outputs,
        token: str,
        on_exit: Callable[[Child, int], None],
    ) -> None:
        self._state, self._selector, self._outputs = state, selector, outputs
        self._token, self._on_exit = token, on_exit
        self.alive: dict[int, Child] = {}  # by pidfd
        self.killing = False  # from now on exits are caused by this process
        self._killed_at: float | None = None
        self._adopted: dict[int, int] = {}
        self.adopted = AdoptedRanks(selector)
        self._killed: set[int] = set()  # with their rank: they may take a moment to die
        self._stop: signal.Signals | None = None  # that a script has been asked to stop with
        self._asked, self._next_look = AskedProcesses(), 0.0
        self._survived: set[int] = set()  # pidfds of wrappers that ended before their training

    def start(self) -> None:
        """Start all of them; their PIDs are written to supervisor.json. Raises UserError if the log
        of a rank cannot be written."""
        state = self._state
        state.outcome.oom_kills = oom_kills()
        kernel_evidence.begin(state.outcome, state.plan)
        spawn.remove_stale(state.run, self._stale)
        command, ours = local_ranks.command(state.run, state.plan), state.outcome.ours
        if state.outcome.watched:
            children = [spawn.start_watched(command, self._token)]
        elif state.plan["launcher"]["value"] == "torchrun":
            children = [
                spawn.start_torchrun(
                    state.team,
                    command,
                    self._token,
                    state.run.ranks,
                    ours=ours,
                    more={} if ours else local_ranks.restarts(state.plan),
                )
            ]
        else:
            children = spawn.start_ranks(
                state.team,
                command,
                self._token,
                ours=ours,
                labelled=self._outputs.labelled,
                bound=state.plan.get("numa"),
                more=self._variables,
            )
        state.team.close()
        self.alive = {child.pidfd: child for child in children}  # first: reap() kills these
        for child in children:
            path, begins = self._outputs.add(child)
            state.outcome.log_from[path] = begins
            self._selector.register(child.pidfd, selectors.EVENT_READ, self._on_pidfd)
        known = rundir.read_json(state.run.supervisor) or {}
        rundir.keep_json(
            state.run.supervisor,
            known | {"ranks": [_record(c.rank, c.popen.pid) for c in children]},
        )

    def _stale(self, rank: int) -> bool:
        """Whether files of this rank are from an earlier attempt. On a common disk, ranks of other
        machines may have written theirs already."""
        team, shared = self._state.team, self._state.plan.get("shared", True)
        return not shared or rank in team.ranks or rank >= team.world_size

    def adopt(self, ranks: Mapping[int, int]) -> None:
        """Follow ranks (rank → PID) that a watched command has started, and record them for the
        monitor."""
        if ranks == self._adopted:
            return
        self._adopted = dict(ranks)
        self.adopted.follow(ranks)
        known = rundir.read_json(self._state.run.supervisor) or {}
        own = [entry for entry in known.get("ranks", []) if entry["rank"] is None]
        found = [_record(rank, pid) for rank, pid in sorted(ranks.items())]
        most = max(known.get("found", 0), len(found))  # they end before the run does
        record = known | {"ranks": [*own, *found], "found": most}
        rundir.keep_json(self._state.run.supervisor, record)

    def _variables(self, rank: int) -> dict[str, str]:
        """Further variables of a rank."""
        if self._state.outcome.ours:
            return {}
        return local_ranks.torchelastic(self._state.run, self._state.plan, rank)

    def _on_pidfd(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        if not self.killing and self._asked.outlive(self.alive[pidfd].popen.pid):
            self._survived.add(pidfd)  # the training saves
        else:
            self._reap(pidfd)

    def _reap(self, pidfd: int) -> None:
        """Reap one child; its process group (data-loader workers, helpers) is killed. After the
        regular end of a script that may cut off its work, such as an upload in the background."""
        child = self.alive.pop(pidfd)
        os.close(pidfd)
        left = process.end_group(child.popen.pid)  # before the wait, which frees its PID
        status = child.popen.wait()
        self._killed |= left.keys()
        if status == 0 and not self._state.outcome.ours and not self.killing:
            for pid, command in left.items():
                self._warn_of_left(pid, command)
        self._state.outcome.ended.append((child.rank, status))
        if not self.killing:
            self._on_exit(child, status)

    def pids(self) -> dict[int | None, int]:
        """Rank → PID of the children that run; torchrun is None."""
        return {child.rank: child.popen.pid for child in self.alive.values()}

    def pass_on(self, number: int) -> None:
        """Send a signal that does not stop anything to each rank that has a handler for it, or to
        the processes below it that have one: it would end others."""
        if number == signal.SIGWINCH:
            for child in self.alive.values():
                child.follow_terminal()
            return
        outcome = self._state.outcome
        found = {} if outcome.ours or outcome.watched else self._targets(number)
        for child in self.alive.values():
            family = found.get(child.popen.pid, {child.popen.pid})
            if takers := {one for one in family if catches(one, number)}:
                child.signal(signal.Signals(number), takers)

    def ask_to_leave(self, failed: int | None) -> set[int]:
        """SIGTERM to each rank of a script that has a handler for it, whatever it exits with, but
        the one that has failed; which ranks these are."""
        self.killing = True
        found, asked = self._targets(signal.SIGTERM), set[int]()
        for child in self.alive.values():
            family = found.get(child.popen.pid, ())
            takers = {one for one in family if catches(one, signal.SIGTERM)}
            if takers and child.rank not in (None, failed):
                child.signal(signal.SIGTERM, takers)
                asked.add(child.rank)
        return asked

    def kill_all_but(self, ranks: Collection[int]) -> None:
        for child in self.alive.values():
            if child.rank not in ranks:
                child.signal_group(signal.SIGKILL)

    def ask_to_stop(self, number: int) -> None:
        """Pass a stop signal on to each rank, or to a watched command as to the only rank of a
        script; torchrun and all its processes get SIGTERM."""
        ours, watched = self._state.outcome.ours, self._state.outcome.watched
        for child in self.alive.values():
            if child.rank is None and not watched:
                child.signal_group(signal.SIGTERM)  # torchrun knows SIGTERM only
            elif ours or self.killing:  # a script that ends already, to start with other ranks
                child.signal(signal.Signals(number))
        if not ours:
            self._stop, self._next_look = signal.Signals(number), 0.0
            self.follow_stop()

    def follow_stop(self) -> None:
        """A few times a second: pass the stop signal on to what a script has started since, and
        reap ranks whose training has ended after them."""
        for pidfd in [*self._survived]:
            if self.killing or not self._asked.outlive(self.alive[pidfd].popen.pid):
                self._survived.discard(pidfd)
                self._reap(pidfd)
        now = time.monotonic()
        if self._stop is None or self.killing or now < self._next_look:
            return
        self._next_look = now + LOOK_S
        new = self._asked.new(self._targets(self._stop, watch=True))
        for child in self.alive.values():
            for number, processes in understood(new.get(child.popen.pid, ()), self._stop):
                child.signal(number, processes)

    def _targets(self, number: int, *, watch: bool = False) -> dict[int, set[int]]:
        """See targets(). Where these cannot be found, a rank gets the first signal itself. `watch`:
        it is a stop signal, see AskedProcesses."""
        watched = self._state.outcome.watched
        ranks = {r or 0: pid for r, pid in self.pids().items() if r is not None or watched}
        alone = self._state.team.world_size == 1
        found = {pid: {pid} for pid in ranks.values() if pid not in self._asked}

        def search() -> None:
            found.update(targets(ranks, number, alone=alone))
            if watch:
                self._asked.watch(ranks, alone=alone)

        self._state.best_effort(msg("launcher.effort.signals"), search)
        return found

    def terminate(self) -> None:
        """SIGTERM to the process groups."""
        self._stop = None
        for child in self.alive.values():
            child.signal_group(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the process groups; a run that was asked to stop counts as killed."""
        outcome = self._state.outcome
        if outcome.asked != Exit.DONE:
            outcome.killed = True
            outcome.idle = outcome.ours and not any(beat.step for beat in self._state.beats())
        self.kill_finished()

    def kill_finished(self) -> None:
        """SIGKILL to the process groups, for another reason than a request to stop."""
        self.killing = True
        self._killed_at = self._killed_at or time.monotonic()
        for child in self.alive.values():
            child.signal_group(signal.SIGKILL)

    def blocked(self) -> bool:
        """Have processes survived SIGKILL for UNKILLABLE_S? Those in uninterruptible sleep (a dead
        disk or device) and those of another user are left behind."""
        if self._killed_at is None or time.monotonic() - self._killed_at < timeouts.UNKILLABLE_S:
            return False
        self._state.outcome.blocked = "; ".join(one.unkillable for one in self.alive.values())
        log.error(self._state.outcome.blocked)
        return True

    def reap(self) -> None:
        """Kill what still runs and wait for it, at most UNKILLABLE_S each."""
        self.adopted.close()
        for child in self.alive.values():
            child.signal_group(signal.SIGKILL)
        limit_s = 1.0 if self._state.outcome.blocked else timeouts.UNKILLABLE_S
        for child in self.alive.values():
            # blocked in the kernel: reported already
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.popen.wait(timeout=limit_s)

    def sweep(self) -> None:
        """Kill the descendants of ranks that still run, also those in sessions of their own."""
        blocked = set(self.pids().values()) if self._state.outcome.blocked else set()
        for pid, command in process.sweep(self._token).items():
            # ranks that another launcher has started have sessions of their own
            adopted = self._state.outcome.watched or self._state.watch.adopted
            killed = adopted and self._killed_at is not None
            if pid not in blocked | self._killed and not killed:
                self._warn_of_left(pid, command)
        orphans.reap()

    def _warn_of_left(self, pid: int, command: str) -> None:
        shown = redact.running(command, 100)
        log.warning(msg("launcher.limits.left_behind", pid=pid, command=shown))

    def remove_sockets(self) -> None:
        """Sockets of the ranks: a run directory that contains one cannot be copied."""
        for rank in self._state.team.ranks:
            flight_recorder_server.address(self._state.run.ranks, rank).unlink(missing_ok=True)


def _record(rank: int | None, pid: int) -> ProcessRecord:
    return {"rank": rank, "pid": pid, "ticks": procfs.began(pid)}
