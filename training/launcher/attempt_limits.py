"""Time limits of a running attempt."""

from __future__ import annotations

import functools
import time

from training.core import checkpoint_folder, heartbeat, log, phases
from training.core.errors import Exit
from training.core.messages import msg
from training.launcher import timeouts
from training.launcher.attempt_state import AttemptState
from training.launcher.child import Child
from training.launcher.child_processes import ChildProcesses
from training.launcher.first_failure import FirstFailure
from training.launcher.leaving_ranks import LeavingRanks
from training.launcher.raised_ranks import RaisedRanks
from training.launcher.stop_requests import StopRequests
from training.watchdog import hang_dump, stalled_ranks
from training.watchdog.hang_report import HangFinding

Beats = list[heartbeat.HeartbeatRecord]


class AttemptLimits:
    """`check()` is called a few times a second: peers of a failed rank, ranks that do not stop or
    do not exit, silent machines, hangs."""

    def __init__(
        self,
        state: AttemptState,
        children: ChildProcesses,
        failure: FirstFailure,
        stop: StopRequests,
    ) -> None:
        self._state, self._children, self._failure, self._stop = state, children, failure, stop
        self._raised = RaisedRanks(state.run, ours=state.outcome.ours)
        self._leaving = LeavingRanks(state, children)
        self._gone = timeouts.Gone(float(state.plan["config"]["hang_timeout"]))

    def check(self) -> None:
        state, outcome, now = self._state, self._state.outcome, time.monotonic()
        if not outcome.gone and state.run.is_gone():
            self._lose_folder()
        if outcome.gone and outcome.ours:
            return
        if exited := self._overdue_stop_exit(now):
            self._failure.of_rank(*exited)
        if outcome.guilty is None and self._stop.asked_at is None:
            self._end_after_exception()
        if outcome.failed_at is not None and now - outcome.failed_at > self._grace_s():
            asked_at = self._stop.asked_at
            if asked_at is not None and outcome.failed_at < asked_at:
                self._children.kill_finished()  # the failure came before the request to stop
            elif asked_at is not None or not self._leaving.wait():
                self._children.kill()
        beats = state.beats()
        if self._all_finished(beats):
            self._end_finished(beats)
        elif (asked_at := self._stop.asked_at) is not None:
            if outcome.resized and not outcome.ours:
                if now - asked_at > timeouts.RESIZE_S:
                    self._children.kill_finished()
            elif now - asked_at > timeouts.STALL_S and self._ignores_stop(beats):
                self._keep_stalled(beats)
                self._children.kill()
        for lost in state.link.watch(self.waiting_s(beats)) if state.link else []:
            self._failure.of_lost_peer(lost)
        # While another machine does not answer, the ranks may be waiting for that.
        answered = state.link is None or not state.link.overdue()
        if (
            outcome.guilty is None
            and (self._stop.asked_at is None or self._stops_by_itself())
            and answered
            and (found := self._find_hang())
        ):
            if self._stop.asked_at is None:
                self._failure.of_hang(found)
            else:
                outcome.stalled, outcome.phases = found, state.phases()
                self._stop.after_hang(found.sentence())

    def _grace_s(self) -> float:
        """The grace of the other ranks after a failure, with time for a checkpoint of rank 0."""
        outcome, usual = self._state.outcome, timeouts.grace_s(self._state.outcome.guilty)
        if not outcome.ours or 0 not in self._children.pids():
            return usual
        saves = checkpoint_folder.cut_saves(self._state.run.checkpoints)
        return max(usual, checkpoint_folder.LEAVE_S) if saves else usual

    def _keep_stalled(self, beats: Beats) -> None:
        """What ranks do that are killed because they ignore a stop request: perhaps the user has
        made it because they hang. Before the first step nothing is usual."""
        outcome, begun = self._state.outcome, any(beat.step for beat in beats)
        failed = outcome.guilty is not None or outcome.left is not None
        if not self._children.killing and outcome.ours and begun and not failed:
            self._state.best_effort(
                msg("launcher.effort.stalled"), functools.partial(self._find_stalled, beats)
            )

    def _find_stalled(self, beats: Beats) -> None:
        state = self._state
        state.outcome.phases = state.phases()
        state.outcome.stalled = stalled_ranks.find(state.run, beats)

    def _lose_folder(self) -> None:
        """Ranks of Duet's training could save nothing more. A script has its files elsewhere and
        continues."""
        run, outcome = self._state.run, self._state.outcome
        outcome.gone = True
        if outcome.ours:
            log.error(msg("launcher.limits.folder_lost", folder=run.own))
            self._children.kill()
        else:
            log.warning(msg("launcher.limits.folder_lost_script", folder=run.own))

    def _overdue_stop_exit(self, now: float) -> tuple[Child, int] | None:
        """The rank of a script that exited with the status of a stop request, and that status, if
        other ranks still run after PEER_GRACE_S."""
        if self._failure.stop_exit is None or self._stop.count:
            return None
        at, child, status = self._failure.stop_exit
        others_run = self._children.alive or self._state.others.running()
        return (child, status) if now - at > timeouts.PEER_GRACE_S and others_run else None

    def _end_after_exception(self) -> None:
        """The process of a rank that has raised may stay, and the others need not wait for it."""
        elsewhere = bool(self._state.others.running())
        for rank in self._raised.overdue(self._children.pids(), elsewhere=elsewhere):
            if self._failure.of_raised(rank):
                return

    def _all_finished(self, beats: Beats) -> bool:
        """Have all ranks of Duet's training finished? A script has no heartbeat."""
        return (
            self._state.outcome.ours
            and bool(beats)
            and len(beats) == len(self._state.team.ranks)
            and all(b.phase == heartbeat.FINISHED for b in beats)
        )

    def _end_finished(self, beats: Beats) -> None:
        """Kill processes that have not exited although all ranks have finished. The exit code is
        the one that rank 0 has written to the summary."""
        outcome, children = self._state.outcome, self._children
        since_s = min(b.age_s for b in beats)
        limit_s = timeouts.STALL_S if outcome.asked == Exit.INTERRUPTED else timeouts.CLOSING_S
        if children.killing or not children.alive or since_s <= limit_s:
            return
        names = [f"rank {b.rank}" for b in beats if not timeouts.has_left(b)] or [
            c.name for c in children.alive.values()
        ]
        log.warning(
            msg("launcher.limits.not_exited_several", names=", ".join(names), since_s=since_s)
            if len(names) > 1
            else msg("launcher.limits.not_exited", name=names[0], since_s=since_s)
        )
        outcome.closed = self.closed()
        children.kill_finished()

    def closed(self) -> Exit:
        """The exit code of finished ranks, as rank 0 has written it."""
        return Exit(self._state.summary().get("exit_code", self._state.outcome.asked))

    def _stops_by_itself(self) -> bool:
        """Is this a script after its first stop request? It may save for as long as it needs, and
        can only be judged by a hang."""
        return not self._state.outcome.ours and self._stop.count == 1 and not self._children.killing

    def _ignores_stop(self, beats: Beats) -> bool:
        """Do the ranks make no progress after a stop request? A script has no heartbeat: it has no
        limit until the second request, or a hang."""
        outcome, working = self._state.outcome, [b for b in beats if b.phase != heartbeat.FINISHED]
        if (
            outcome.ours
            and working
            and self._state.others.running()
            and all(phases.waits(b.phase) for b in working)
        ):
            # another machine may be saving a checkpoint
            return min(b.age_s for b in working) > timeouts.SAVING_S
        return (
            timeouts.silent(beats, outcome.asked, self._state.watch)
            if beats
            else outcome.ours or self._stop.count > 1
        )

    def waiting_s(self, beats: Beats) -> float:
        """For how long all ranks of this machine have waited for other machines."""
        if self._state.outcome.ours and all(beat.phase == heartbeat.FINISHED for beat in beats):
            return self._state.others.still_s()
        return timeouts.still_s(beats, self._state.watch)

    def _find_hang(self) -> HangFinding | None:
        state, started = self._state, self._children.pids()
        if not started:
            return None
        ended = {rank: status for rank, status in state.outcome.ended if rank is not None}
        if found := state.watch.look(started, ended):
            return found
        if not state.outcome.ours or None not in started:
            return None
        found = self._gone.look(
            [beat for beat in state.beats() if beat.rank not in state.readings.unread]
        )
        return hang_dump.keep(state.run, found, {}) if found else None
