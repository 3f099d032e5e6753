"""A run on several machines: when a rank fails anywhere, every machine stops, and one of them
decides what to do next. With `--min_ranks` the run continues without a lost machine, and takes it
back when its launcher is started again; if it was the one that decides, another one takes over."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from training.core import log, rundir
from training.core.errors import Exit
from training.core.messages import msg
from training.host import hosts
from training.launcher import endings, failure_report, fewer_ranks, stop_signals
from training.launcher.attempt import Attempt
from training.launcher.coordinator import Coordinator
from training.launcher.json_socket import Message
from training.launcher.leader import Leader, take_over
from training.launcher.machine import Launch, Machine
from training.launcher.outcome import Outcome
from training.launcher.peer import Peer
from training.launcher.peer_link import PeerLink, RunEnded, Stopped
from training.launcher.post_run import PostRun
from training.launcher.reach import Reach
from training.launcher.replica.receiver import ReplicaReceiver
from training.launcher.succession import Succession
from training.trainer import prepared_cache

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan


def train(run: rundir.RunDir, plan: Plan, ending: PostRun, line: PeerLink, token: str) -> int:
    """To the end of the run; the exit code of this machine."""
    launch = Launch(run, plan, ending, token)
    ending.restarts = launch.recovery.restarts
    machine: Machine
    if isinstance(line, Coordinator):
        machine = Leader(launch, line)
    else:
        assert isinstance(line, Peer)
        machine = Follower(launch, line)
    code = int(Exit.TRAINING)
    with launch.stack:
        try:
            while (ended := machine.once()) is None:
                machine = machine.next
                if prepared_cache.changed(launch.run):
                    machine.unless_asked(lambda: prepared_cache.prepare(launch.run, plan))
            code = ended
            if not ending.left:
                machine.copies.finish(code, launch.signals)
        except RunEnded as over:
            code = over.code
            if launch.begun and code in (Exit.PREEMPTED, Exit.INTERRUPTED):
                ranks = msg("launcher.end.node", ranks=run.ranks)
                log.warning(msg("launcher.end.node_stopped", how="", code=code, text=ranks))
            elif launch.begun:
                log.error(msg("launcher.nodes.ended_for_all", code=code))
            else:
                log.info(msg("launcher.nodes.run_ended"))
        except Stopped as asked:
            machine.line.stop(asked.number)
            if not launch.begun:
                raise
            code = launch.recovery.stop(asked.number)
        except KeyboardInterrupt as signalled:  # before the first start
            machine.line.stop(stop_signals.number_of(signalled))
            raise
        finally:
            if not ending.left:
                machine.line.dismiss(code)
                rundir.discard(launch.run.machines)
    return code


class Follower(Machine):
    """A machine for which another one decides."""

    def __init__(self, launch: Launch, line: Peer) -> None:
        super().__init__(launch, ReplicaReceiver(launch.run, launch.plan, line))
        self._line = line
        self._reach = Reach()
        launch.stack.callback(self._reach.close)

    @property
    def line(self) -> Peer:
        return self._line

    def once(self) -> int | None:
        launch = self.launch
        run, plan = launch.run, launch.plan
        team = self._team()
        if team is None:  # another machine was lost, or this one joins a running run
            lost = self.line.lost_leader
            return self._recover(self._without_start(lost)) if lost else self._join()
        attempt = Attempt(run, plan, team, launch.token, self.line, launch.signals)
        self.rejoin.begin(self.line.saved)
        own, leader = plan["place"]["node_rank"], self.line.leader
        machines = self.line.machines.items()
        self._reach.begin({node: at for node, at in machines if node not in (own, leader)})
        attempt.each_pass = lambda: self._look(attempt)
        outcome = attempt.go()
        if endings.folder_lost(run, plan, outcome):
            return int(Exit.TRAINING)
        code = failure_report.exit_code(outcome)
        if not outcome.guilty and not outcome.killed:
            if outcome.resized and (order := self._order()):
                return self._follow(order)
            if outcome.resized and (lost := self.line.lost_leader):
                return self._recover(self._without_start(lost))
            return endings.node_end(run, code, outcome)
        return self._recover(outcome)

    def _look(self, attempt: Attempt) -> None:
        # how long the ranks of a script have waited is unknown
        if self._reach.look(attempt.waited_s() if attempt.outcome.ours else math.inf):
            if cut := sorted(self._reach.lost):
                log.warning(msg("launcher.reach.cut", names=self.line.names(cut)))
            self.line.send_all({"cut": cut})
        self.line.greet()
        self.copies.look()
        plan = self.launch.plan
        if back := self.rejoin.look(plan, self.line.saved):
            log.info(msg("launcher.rejoin.back", names=fewer_ranks.names(plan, back)))
            self.line.send_all({"works": back})

    def _join(self) -> int | None:
        order = self._order()
        return int(Exit.TRAINING) if order is None else self._follow(order)

    def _follow(self, order: Message) -> int | None:
        """A restart without a failure. None: the ranks are to be started again, else the exit
        code."""
        if self.launch.recovery.follow(order, None):
            return None
        log.error(self.launch.recovery.given_up)
        return int(Exit.TRAINING)

    def _recover(self, outcome: Outcome) -> int | None:
        """After a failure. None: the ranks are to be started again, else the exit code."""
        launch, line = self.launch, self.line
        record = self._failure(outcome)
        self._keep(record)
        while True:
            if order := self._order():
                if launch.recovery.follow(order, record):
                    return None
                break
            if line.stopped:
                return int(line.stopped)
            if (lost := line.lost_leader) is None:
                break
            line.forget(lost.node)  # it may only be frozen, and wake up
            succession = Succession(
                launch.run, launch.plan, line, lost, launch.recovery.attempt + 1
            )
            next_line = self.unless_asked(succession.next_line)
            if next_line:
                hosts.outlive_launcher()
            if launch.plan.get("shared"):  # with the machine that decides now
                self.copies.close()
                line.replica_ports[launch.plan["place"]["node_rank"]] = 0
            if isinstance(next_line, Coordinator):
                self.copies.close()  # the machine before may wake up
                try:
                    leader = take_over(launch, next_line, lost.node)
                except OSError as error:
                    path = launch.run.path
                    log.error(msg("core.rundir.unwritable", file=path, strerror=error.strerror))
                    return int(Exit.TRAINING)
                self.next = leader
                return leader.recover(outcome, record)
            if next_line is None:
                launch.ending.leave(succession.alone)
                code = int(Exit.LEFT)
                log.error(msg("launcher.end.left", text=record["summary"], code=code))
                return code
        endings.report_end(launch.run, launch.plan, outcome, record, launch.recovery.given_up)
        return int(record["exit_code"])

    def _order(self) -> Message | None:
        return self.unless_asked(lambda: self.line.decide(None))
