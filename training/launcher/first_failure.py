"""The first failure of an attempt: recorded in the outcome, logged, sent to the other machines."""

from __future__ import annotations

import functools
import signal
import time

from training.core import exit_status, find_run, log
from training.core.errors import RANK_FAILED, Exit
from training.core.failure_kinds import SILENT
from training.core.messages import msg
from training.diagnose import error_reports
from training.diagnose.exception_cause import LEFT
from training.launcher import seats
from training.launcher.attempt_state import AttemptState
from training.launcher.child import Child
from training.launcher.child_processes import ChildProcesses
from training.launcher.peer_link import LostPeer
from training.watchdog import missing_rank, rank_exit
from training.watchdog.hang_report import HangFinding
from training.watchdog.rank_exit import RankExit

SIGNALS_S = 1.0  # within it, a request may have reached a rank before this process
STOPPED = (LEFT, KeyboardInterrupt.__name__)  # types that a request to stop raises


class FirstFailure:
    """Later failures count as its consequences. `stop_exit`: time, rank and status of a script's
    rank that exited as if asked to stop; a failure unless all its ranks do so."""

    def __init__(self, state: AttemptState, children: ChildProcesses) -> None:
        self._state, self._children = state, children
        self.stop_exit: tuple[float, Child, int] | None = None
        self._late: tuple[Child, int] | None = None  # the first that crashed at its exit
        # rank of a script that raised before this stop signal; None: one of another machine
        self._earlier: tuple[int | None, int] | None = None

    def of_rank(self, child: Child, status: int) -> None:
        """A child has exited unexpectedly."""
        state, outcome = self._state, self._state.outcome
        self.stop_exit = None
        if outcome.left is not None:
            return
        if self._children.alive and self._at_exit(child, status):
            self._late = self._late or (child, status)  # the others may still work
            return
        outcome.here = outcome.here or (child.rank, status)
        if outcome.guilty is None:
            outcome.guilty = outcome.here
            outcome.torn_down = self._at_exit(child, status)
            if not outcome.torn_down:
                state.best_effort(
                    msg("launcher.effort.earlier_exit"),
                    functools.partial(self._blame_earlier_exit, child),
                )
            outcome.phases = state.phases()
            state.best_effort(
                msg("launcher.effort.report"), functools.partial(self._report_exit, child, status)
            )
            self._record()

    def after_end(self, child: Child, status: int) -> None:
        """A rank of Duet's training was killed after its work: no failure."""
        how = exit_status.how(status)
        log.warning(msg("launcher.failure.after_end", name=child.name, how=how))

    def forget_if_complete(self) -> None:
        """No failure either, on one machine: a rank was killed after rank 0 had written the summary
        of a complete training. torchrun, which has no rank, reports only that something failed."""
        run, outcome = self._state.run, self._state.outcome
        if outcome.guilty is None or outcome.finding or outcome.killed or not outcome.ours:
            return
        if self._state.link:
            return
        rank, status = outcome.guilty
        raised = error_reports.of_all(run, outcome.unwritten) if rank is None else status >= 0
        if not raised and self._state.summary().get("status") == "done":
            name, how = "torchrun" if rank is None else f"rank {rank}", exit_status.how(status)
            log.warning(msg("launcher.failure.complete", name=name, how=how))
            outcome.guilty = outcome.here = outcome.failed_at = None
            outcome.closed = Exit.DONE

    def of_late_exit(self) -> None:
        """No rank of this machine is left: report a crash that came after the end of a script, if
        there is nothing else to report."""
        outcome = self._state.outcome
        quiet = outcome.guilty is None and outcome.asked == Exit.DONE and not outcome.resized
        if self._late and quiet:
            late, self._late = self._late, None
            self.of_rank(*late)

    def _at_exit(self, child: Child, status: int) -> bool:
        """Has its script ended, and then threads or libraries have crashed?"""
        ended = self._state.run.ranks / f"rank{child.rank}.ended"
        return -status in (signal.SIGABRT, signal.SIGSEGV) and find_run.exists(ended)

    def of_stop_exit(self, child: Child, status: int) -> None:
        """A rank of a script has exited with the status of a stop request, without one."""
        self.stop_exit = self.stop_exit or (time.monotonic(), child, status)

    def of_peer(self) -> None:
        """Another machine has failed."""
        outcome = self._state.outcome
        if outcome.guilty is None:
            outcome.elsewhere, outcome.guilty = True, (None, 0)
            self._record()

    def of_lost_peer(self, lost: LostPeer) -> None:
        """The connection to another machine is lost. If that machine is only silent, the ranks here
        would wait for it: they are killed."""
        state, outcome = self._state, self._state.outcome
        if lost.node in state.others.ended or outcome.failed_at is not None:
            return
        leader = seats.leader(state.plan)
        # it has no ranks at present
        if lost.node != leader and lost.node not in seats.nodes(state.plan):
            log.warning(lost.text)
            return
        self._error(lost.text)
        state.run.event(
            "verdict", kind=lost.kind, rank=None, where=None, phase=None, text=lost.text
        )
        outcome.lost, outcome.phases = lost, state.phases()
        self.of_peer()
        # It may continue without this machine, whose ranks must write nothing more.
        if lost.kind == SILENT or (lost.node == leader and "elastic" in state.plan):
            self._children.kill()

    def of_hang(self, found: HangFinding) -> None:
        """Logged while the ranks are still alive; then they are killed."""
        outcome = self._state.outcome
        rank = self._reported_first() if outcome.ours else found.rank
        if rank is not None and self.of_raised(rank):
            return
        if found.death is not None:
            self._of_death(found.death)
            return
        outcome.finding = found
        outcome.phases = self._state.phases()
        outcome.guilty = (found.rank, 0)
        self._error(
            found.sentence()
            + (msg("launcher.failure.others", others=found.others()) if found.waiting else "")
        )
        self._record()
        self._children.kill()

    def of_raised(self, rank: int, *, send: bool = True) -> bool:
        """Has this rank reported an exception? It has failed then, although something keeps its
        process: a thread or an atexit function of a script, the driver of a failed GPU."""
        outcome = self._state.outcome
        error = error_reports.of_rank(self._state.run, rank)
        if error is None:
            return False
        left = error["type"] == LEFT and error["message"].isdecimal()
        status = int(error["message"]) & 0xFF if left else RANK_FAILED
        outcome.guilty = outcome.here = (rank, error.get("exit_code", status))
        outcome.phases = self._state.phases()
        if "rejected" not in error:  # that report is all
            self._state.best_effort(
                msg("launcher.effort.report"), functools.partial(self._explain, *outcome.guilty)
            )
        self._record(send=send)
        return True

    def came_before(self, number: int, asked: float) -> bool:
        """Had a rank of a script raised an exception before this stop signal, at the time `asked`?
        It has failed then, although something keeps its process. The ranks may still save for as
        long as after any request: nothing but of_earlier() follows from it."""
        outcome = self._state.outcome
        if outcome.ours or outcome.resized or outcome.guilty is not None:
            return False
        ranks = self._children.pids().keys()
        old = [
            error
            for error in error_reports.of_all(self._state.run)
            if asked - error["time"] > SIGNALS_S
            and error["type"] not in STOPPED
            and error["rank"] in ranks
        ]
        if old:
            self._earlier = min(old, key=lambda error: error["time"])["rank"], number
        return bool(old)

    def came_before_elsewhere(self, number: int) -> None:
        """The same of a rank of another machine."""
        self._earlier = self._earlier or (None, number)

    def of_earlier(self) -> None:
        """No rank is left, or one that cannot be killed: record a failure that came before the
        request to stop. Other machines know it, and their ranks may still save."""
        outcome = self._state.outcome
        if self._earlier is None or outcome.guilty is not None or outcome.resized:
            return
        rank, number = self._earlier
        if rank is None:
            outcome.elsewhere, outcome.guilty = True, (None, 0)
            self._record(send=False)
        elif not self.of_raised(rank, send=False):
            return
        # that others did not stop follows
        outcome.late_stop, outcome.forced, outcome.killed = number, outcome.killed, False

    def _reported_first(self) -> int | None:
        """The rank of this machine with the first report, which the others may wait for."""
        errors = error_reports.of_all(self._state.run)
        here = [error for error in errors if error["rank"] in self._state.team.ranks]
        return min(here, key=lambda error: error["time"])["rank"] if here else None

    def _of_death(self, known: RankExit) -> None:
        """A rank of a watched command has failed, and its launcher lets the others wait."""
        outcome = self._state.outcome
        outcome.guilty = outcome.here = (known.rank, 1)  # only its launcher knows its status
        outcome.death = known
        self._report_death(known)
        self._record()
        self._children.kill()

    def _blame_earlier_exit(self, child: Child) -> None:
        """A script's rank that lost a peer is the victim of the rank that exited before it. Of a
        watched command, the order of the exits is known."""
        outcome = self._state.outcome
        run, exits = self._state.run, outcome.ended
        if outcome.watched and (rank := self._children.adopted.left_first()) is not None:
            if rank_exit.lost_peer(run.launcher_log(outcome.watched), rank, outcome.log_from):
                outcome.guilty = rank, 0
            return
        if outcome.ours or child.rank is None:
            return
        left = rank_exit.left_before(run, child.rank, exits, outcome.log_from)
        outcome.guilty = left or outcome.guilty

    def _report_exit(self, child: Child, status: int) -> None:
        """Logged at once: the failure card follows when all ranks have exited."""
        outcome = self._state.outcome
        if (
            outcome.torn_down
            or outcome.asked != Exit.DONE
            or (outcome.ours and status in (Exit.CONFIG, Exit.RESOURCES))
        ):
            return
        # perhaps another rank, which exited before
        rank, status = outcome.guilty or (child.rank, status)
        if rank is None:
            self._error(f"{child.name} {exit_status.how(status)}")
            return
        self._explain(rank, status)

    def _explain(self, rank: int, status: int) -> None:
        run, outcome = self._state.run, self._state.outcome
        lost_by = outcome.here[0] if outcome.here else None
        victim = None if lost_by == rank else lost_by
        death = rank_exit.explain(run, rank, status, self._running(), outcome.log_from, victim)
        if rank_exit.timed_out(run, rank, status, outcome.log_from):
            outcome.missing = missing_rank.of_timeout(
                run, self._running(), rank, death.where, outcome.unwritten, outcome.log_from
            )
            death = rank_exit.waited_for(outcome.missing, death, rank)
        outcome.death = death
        self._report_death(death)

    def _running(self) -> dict[int, int]:
        """Rank → PID."""
        return {rank: pid for rank, pid in self._children.pids().items() if rank is not None}

    def _report_death(self, known: RankExit) -> None:
        outcome, alive = self._state.outcome, self._children.alive
        phase = outcome.phases.get(known.rank) if known.rank is not None else None
        text = line(known, phase)
        self._error(msg("launcher.failure.stopping", text=text) if alive else text)
        self._state.run.event(
            "verdict", kind=known.kind, rank=known.rank, where=known.where, phase=phase, text=text
        )

    def _error(self, text: str) -> None:
        """To the console only where the run is not restarted: a restart has a message of its own,
        with the failure in it."""
        log.error(text, shown=not self._state.plan["retries"]["value"])

    def _record(self, *, send: bool = True) -> None:
        """`send`: to the other machines, which end their ranks."""
        outcome, link = self._state.outcome, self._state.link
        outcome.failed_at = time.monotonic()
        if outcome.kernel:
            outcome.kernel.hold()  # the end of the other ranks leaves messages as well
        if link:
            # unless the rank's own report explains it better (failure_report)
            outcome.lost = outcome.lost or link.overdue()
        # the other machines are connected to node 0 alone
        if link and send and (not outcome.elsewhere or outcome.lost or self._state.others.first):
            rank, status = outcome.guilty or (None, 0)
            link.send_all({"failed": {"rank": rank, "status": status}})


def line(known: RankExit, phase: str | None) -> str:
    """A failure in one line."""
    return msg(
        "launcher.failure.line",
        label=known.label,
        who=f" rank {known.rank}" if known.rank is not None else "",
        phase=msg("launcher.failure.in_phase", phase=phase) if phase else "",
        how=known.how,
        at=msg("launcher.failure.at", where=known.where) if known.where else "",
    )
