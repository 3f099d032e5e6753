"""The machine that decides for all: node 0, or the one that has taken over."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING

from training.core import cause_ids, log, rundir
from training.core.errors import Exit
from training.core.messages import msg
from training.launcher import (
    endings,
    failure_report,
    fewer_ranks,
    leadership,
    live_run,
    reach,
    rejoin,
    seats,
    spawn,
)
from training.launcher.attempt import Attempt
from training.launcher.coordinator import Coordinator
from training.launcher.json_socket import Message
from training.launcher.machine import Launch, Machine
from training.launcher.outcome import Outcome
from training.launcher.peer_link import PING_S
from training.launcher.replica.sender import ReplicaSender
from training.launcher.restart import Restart, Team
from training.launcher.saved import Saved
from training.launcher.waiting import Waiting

if TYPE_CHECKING:
    from training.core.contracts.verdict import FailureRecord


class Leader(Machine):
    def __init__(self, launch: Launch, line: Coordinator) -> None:
        super().__init__(launch, ReplicaSender(launch.run, launch.plan, line))
        self._line = line
        self._saved = Saved(launch.run, launch.plan)
        self._before = ""  # name of the newest checkpoint when the ranks were started
        self._more: Team | None = None  # of the next start
        self._working: set[int] = set()  # lost ranks whose GPUs passed a test, as logged
        self._cut_at = 0.0  # when machines first reported that they do not reach others

    @property
    def line(self) -> Coordinator:
        return self._line

    def once(self) -> int | None:
        launch, recovery = self.launch, self.launch.recovery
        run, plan = launch.run, launch.plan
        team = self._team()
        if team is None:  # another machine was lost before the start
            outcome = self._without_start(self.line.lost_peer)
        else:
            attempt = Attempt(run, plan, team, launch.token, self.line, launch.signals)
            outcome = self._attempt(attempt)
        if endings.folder_lost(run, plan, outcome):
            return int(Exit.TRAINING)
        code = failure_report.exit_code(outcome)
        if not outcome.guilty and not outcome.killed:
            if (grown := self._grows(outcome, code)) is False:
                return self._leave(msg("launcher.succession.superseded"))
            if grown:
                return None
            return endings.regular_end(run, plan, launch.ending, outcome, recovery)
        return self.recover(outcome, self._failure(outcome))

    def recover(self, outcome: Outcome, record: FailureRecord) -> int | None:
        """After a failure. None: the ranks are to be started again, else the exit code."""
        launch, line, recovery = self.launch, self.line, self.launch.recovery
        run, plan = launch.run, launch.plan
        if self._superseded():
            return self._leave(msg("launcher.succession.superseded"))
        self._keep(record)
        by_peers = record["cause"] in (cause_ids.HANG, *fewer_ranks.OF_PEERS)
        if not outcome.ours and by_peers and (lost := reach.leave_out(line)):
            log.warning(lost.text)
        waiting = Waiting()
        chosen = (
            recovery.choose(record, outcome, line, lambda why: self._joined(why, waiting, record))
            if endings.may_help(run, outcome, record)
            else None
        )
        if not chosen and self._superseded():  # it may have waited for another machine
            return self._leave(msg("launcher.succession.superseded"))
        if recovery.hand_over and line.wires:
            return self._leave(msg("launcher.succession.hands_over", reason=recovery.given_up))
        if chosen and "elastic" in plan:
            if why := self._too_few():
                return self._leave(why, alone=True)
            leadership.announce(run, plan, recovery.attempt + 1)
        if chosen and self._pause(chosen):
            chosen = None
        # After the pause: a machine that is lost in it must not keep the others from the start.
        claimed = self._claim() if chosen and "elastic" in plan else True
        if claimed is False:
            return self._leave(msg("launcher.succession.superseded"))
        if claimed is None:
            recovery.give_up(msg("launcher.restart.unwritable", path=run.path))
        order = self._begin(chosen) if chosen and claimed else None
        if chosen and order is None and "elastic" in plan and line.other_disks():
            why = msg("launcher.succession.hands_over", reason=recovery.given_up)
            return self._leave(why, alone=True)
        line.decide(order, self._code(record))
        if order is not None:
            return None
        if recovery.stopped:
            return int(recovery.stopped)
        endings.report_end(run, plan, outcome, record, recovery.given_up)
        return int(record["exit_code"])

    def _pause(self, chosen: Restart) -> bool:
        """Before a restart: has a stop signal arrived? The pause may be longer than the others wait
        for a silent machine."""
        end = time.monotonic() + chosen.pause_s
        why = msg("launcher.nodes.pauses", pause_s=chosen.pause_s)
        while (left_s := max(0.0, end - time.monotonic())) > 0:
            self.line.hold(why)
            if self.launch.recovery.asked_to_stop(min(PING_S, left_s)):
                return True
        return self.launch.recovery.asked_to_stop()

    def _superseded(self) -> bool:
        """Whether another machine has decided on the next start."""
        launch = self.launch
        attempt = launch.recovery.attempt + 1
        return "elastic" in launch.plan and leadership.superseded(launch.run, launch.plan, attempt)

    def _begin(self, chosen: Restart) -> Message | None:
        """The order for the other machines, which they get only once this one has its plan; None:
        the run ends (`given_up`)."""
        plan, line, recovery = self.launch.plan, self.line, self.launch.recovery
        if "elastic" not in plan and (missing := line.missing()):
            recovery.give_up(msg("launcher.restart.unreachable", missing=line.names(missing)))
            return None
        order = recovery.order(chosen)
        return order if recovery.begin(chosen) else None

    def _joined(self, why: str, waiting: Waiting, record: FailureRecord) -> bool:
        """Too few ranks are left (`why`): has another machine joined? The run has not failed
        before."""
        run, seconds = self.launch.run, self.launch.plan["config"]["rendezvous_timeout"]
        rundir.discard(run.failure)
        joined = self.unless_asked(lambda: self.line.await_machine(why, waiting, seconds))
        if not joined:
            self._keep(record)
        return joined

    def _code(self, record: FailureRecord) -> int:
        """For the other machines: they know by it whether the run was asked to stop."""
        if self.launch.recovery.stopped:
            return int(self.launch.recovery.stopped)
        stops = (Exit.PREEMPTED, Exit.INTERRUPTED)
        return 0 if record["exit_code"] in stops else int(record["exit_code"])

    def _too_few(self) -> str:
        """Why the machines that are connected must not continue; '' if they may. All that have
        started the ranks together count: one that was left out since then has not confirmed it,
        and may continue with others."""
        line = self.line
        leader = line.place.node_rank
        back = line.ready_again
        known = sorted(line.confirmed - {leader, *back})
        missing = [node for node in known if not line.there(node)]
        if not all(line.shares.get(node, True) for node in missing):
            side = line.confirmed - set(missing)
            alive = line.confirmed - line.dead(missing)
            if not leadership.has_majority(side, alive, leader):
                names, count = line.names(missing), len(alive)
                return msg("launcher.succession.few", names=names, side=len(side), count=count)
        return ""

    def _claim(self) -> bool | None:
        """Whether this machine decides on the next start; None: the disk is full or cannot be
        written."""
        launch = self.launch
        try:
            return leadership.claim(launch.run, launch.plan, launch.recovery.attempt + 1)
        except OSError as error:
            path = launch.run.path
            log.error(msg("core.rundir.unwritable", file=path, strerror=error.strerror))
            return None

    def _leave(self, why: str, *, alone: bool = False) -> int:
        """End here without ending the run: another machine continues it, or may. It writes the
        run. `alone`: it is not known whether there is one."""
        log.error(why)
        self.launch.ending.leave(why if alone else "")
        return int(Exit.LEFT)

    def _attempt(self, attempt: Attempt) -> Outcome:
        self._remove_moved()
        self._before, self._more, self._working = self._saved.begin(), None, set()
        self.rejoin.begin(self._before)
        attempt.each_pass = lambda: self._look(attempt)
        return attempt.go()

    def _remove_moved(self) -> None:
        """Remove the files of ranks that this machine had before, and one with its own disk has
        now."""
        plan, shares = self.launch.plan, self.line.shares
        moved = {r for r in range(plan["ranks"]) if not shares.get(seats.machine_of(plan, r), True)}
        spawn.remove_stale(self.launch.run, moved.__contains__)

    def _look(self, attempt: Attempt) -> None:
        """Called repeatedly while ranks run: is a lost machine or GPU back, and the next checkpoint
        written? Then the ranks are asked to save and exit. Those of a script are ended as soon as
        a machine is back, as by torchrun."""
        plan, recovery = self.launch.plan, self.launch.recovery
        recovery.look()
        self.copies.look()
        outcome = attempt.outcome
        if not any(self.line.cuts.values()):
            self._cut_at = time.monotonic()
        elif (
            outcome.ours
            and time.monotonic() - self._cut_at > reach.REPORTS_S
            and (lost := reach.leave_out(self.line))
        ):
            attempt.failure.of_lost_peer(lost)
        if "elastic" not in plan:
            return
        self.line.greet_late()
        saved = self._test_gpus()
        asked = outcome.asked != Exit.DONE
        if self._more and not outcome.resized and not asked:  # the others got the message before
            attempt.stop.for_other_ranks()
            return
        if (
            not rejoin.wanted(plan)
            or not (back := rejoin.back(plan, self.line))
            or not recovery.trains
            or outcome.resized
            or outcome.failed_at is not None
            or asked
            or (outcome.ours and (saved == self._before or attempt.ending()))
            or not (self._saved.rests or self.line.ready_again)
        ):
            return
        team = fewer_ranks.choose(plan, (), back)
        # otherwise it replaces the next lost one
        if isinstance(team, Team) and len(team.seats) > plan["ranks"]:
            self._more = team
            self.line.send_all({"resize": True})

    def _test_gpus(self) -> str:
        """After each checkpoint every machine tests its lost GPUs; the name of the newest one."""
        plan, line = self.launch.plan, self.line
        if not rejoin.wanted(plan) or not plan["elastic"]["lost"]:
            return self._before
        saved = self._saved.newest()
        if saved not in (self._before, line.saved):
            line.saved = saved
            line.send_all({"saved": saved})
        known = line.works | set(self.rejoin.look(plan, saved))
        if new := known - self._working:
            log.info(msg("launcher.rejoin.back", names=fewer_ranks.names(plan, sorted(new))))
        line.works, self._working = known, set(known)
        return saved

    def _grows(self, outcome: Outcome, code: int) -> bool | None:
        """After a start without a failure: True: the ranks are to be started again, because there
        are more; False: another machine decides on that; None: the run has ended."""
        if not outcome.resized:
            if self._more:  # the ranks ended before they were asked; the others wait for a decision
                self.line.decide(None)
            return None
        plan, recovery = self.launch.plan, self.launch.recovery
        team, self._more = self._more, None
        # a script may exit with any status when it is ended
        stopped = not outcome.ours or code == Exit.PREEMPTED
        wanted = bool(team) and outcome.asked == Exit.DONE and stopped
        claimed = self._claim() if wanted else None
        if claimed is False:
            return False
        if not team or not claimed:
            self.line.decide(None)  # the others wait for it
            return None
        names = fewer_ranks.names(plan, team.back)
        why = (
            msg("launcher.rejoin.joined", names=names)
            if self.line.ready_again
            else msg("launcher.rejoin.why", names=names)
        )
        change = msg("launcher.rejoin.with", names=names)
        label = fewer_ranks.label(plan, team, change)
        text = rejoin.restart_text(label, script=not outcome.ours)
        order = recovery.order(Restart(0, {}, why, team=team))
        grown = recovery.grow(team, why, text)
        self.line.decide(order if grown else None)
        return grown or None


def take_over(launch: Launch, line: Coordinator, lost: int) -> Leader:
    """This machine coordinates the run from now on. `lost`: the machine before it."""
    old, plan = launch.run, launch.plan
    run = launch.run = rundir.RunDir(old.path)
    run.create()
    known = rundir.read_json(old.supervisor) or {"pid": os.getpid(), "started": time.time()}
    rundir.write_json(run.supervisor, {**known, "host": socket.gethostname()})
    for path in (old.supervisor, old.machines, old.failure):
        rundir.discard(path)
    plan["shared"] = True  # the run directory is the one of this machine
    rundir.write_json(run.plan, plan)
    launch.ending.run = run
    launch.recovery.take_over(run)
    name = line.name(lost)
    text = msg("launcher.succession.leads", node=plan["place"]["node_rank"], lost=name)
    log.warning(text)
    flags = live_run.join_flags(line.place, lost)
    log.info(msg("launcher.succession.join", lost=name, flags=flags))
    run.event("takeover", node=plan["place"]["node_rank"], text=text)
    launch.stack.enter_context(line)
    return Leader(launch, line)
