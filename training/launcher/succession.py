"""The machine that coordinates a run is lost (`--min_ranks`): the lowest of the others takes over,
if it may (training.launcher.leadership), and the others follow it."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from training.core import log
from training.core.messages import msg
from training.core.rundir import RunDir, discard
from training.host import hosts
from training.host.placement import LauncherOptions
from training.launcher import leadership
from training.launcher.admission import PROTOCOL
from training.launcher.coordinator import RETRY_S, Coordinator
from training.launcher.json_socket import SILENT_S, ConnectionLost, JsonSocket, Message
from training.launcher.listener import ANSWER_S
from training.launcher.local_ranks import is_script
from training.launcher.peer import Peer
from training.launcher.peer_link import SETTLE_S, LostPeer, Stopped, stop_request
from training.launcher.replica.receiver import copied

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan

# The machines notice a silent one within a few seconds of each other.
HOLD_S = 8.0  # a coordinator that is alive after all claims the next start first
GATHER_S = SILENT_S + SETTLE_S  # for the other machines to notice the loss
# for the one that takes over to decide
FOLLOW_S = SILENT_S + SETTLE_S + GATHER_S + HOLD_S + leadership.ANNOUNCED_S


@dataclass
class Succession:
    """Of one machine, for one loss. `attempt`: of the ranks, the next one."""

    run: RunDir
    plan: Plan
    line: Peer
    lost: LostPeer
    attempt: int

    def __post_init__(self) -> None:
        self._own = self.line.place.node_rank
        self._begun = time.monotonic()
        self._dead: set[int] = set()
        self.alone = ""  # why this machine must not take over, if perhaps no other one does

    def next_line(self) -> Coordinator | Peer | None:
        """The connections of this machine from now on: it takes over, or follows another one. None:
        the run ends here, and the reason is logged. Raises Stopped: another machine was asked to
        stop."""
        leader, line = self.lost.node, self.line
        state = self._leader()
        if state == "answers":
            log.warning(msg("launcher.succession.answers", name=line.name(leader)))
            return None
        if state == "dead":
            self._dead.add(leader)
        for node in sorted(line.machines):
            if node > self._own:
                break
            if node != leader and (found := self._follow(node)) != "next":
                if found == "joined":
                    return line
                log.warning(msg("launcher.succession.claimed"))
                return None
        return self._lead()

    def _hello(self, want: str) -> Message:
        hello = {"duet": PROTOCOL, "want": want, "node": self._own, "launch": self.plan["launch"]}
        hello |= {"host": socket.gethostname(), "shared": self.plan.get("shared", True)}
        return {**hello, "copied": self._copied()}

    def _copied(self) -> str:
        return copied(self.run, self.plan["launch"])

    def _leader(self) -> leadership.State:
        """Whether the lost machine still coordinates the run."""
        place = self.line.place
        at = place.master_addr, place.master_port
        state, answer = leadership.ask(at, self._hello("leader"))
        # its launcher may have been started again already
        again = state == "answers" and answer.get("launch") != self.plan["launch"]
        return "dead" if again else state

    def _follow(self, node: int) -> str:
        """Wait for the decision of a machine that comes first: 'joined', 'ended', or 'next' if it
        is lost too. Raises Stopped."""
        at = self.line.machines[node]
        try:
            wire = JsonSocket(socket.create_connection(at, ANSWER_S))
        except ConnectionRefusedError:
            self._dead.add(node)
            return "next"
        except OSError:
            return "next"
        self.line.awaited = wire
        log.info(msg("launcher.succession.waits", name=self.line.name(node)))
        end = time.monotonic() + FOLLOW_S
        try:
            wire.send(self._hello("follow"))
            while time.monotonic() < end:
                self._greet()
                with suppress(TimeoutError):
                    answer = wire.receive(RETRY_S)
                    if number := stop_request(answer):
                        raise Stopped(number, node)
                    if "joined" not in answer:
                        break
                    self.line.awaited = None
                    self.line.follow(node, wire, at[0], answer)
                    self.plan["shared"] = self.run.claim(self.plan["launch"], self.attempt).exists()
                    log.warning(msg("launcher.succession.follows", name=self.line.name(node)))
                    return "joined"
        except ConnectionLost:
            self._unawaited(wire)
            return "next"
        self._unawaited(wire)
        return "ended"

    def _unawaited(self, wire: JsonSocket) -> None:
        wire.close()
        self.line.awaited = None

    def _greet(self) -> None:
        """Raises Stopped."""
        self.line.greet()
        self.line.unless_asked()

    def _lead(self) -> Coordinator | None:
        """Take over once the others have followed, or it is clear that they do not."""
        line, leader = self.line, self.lost.node
        others = set(line.machines) - {self._own, leader}
        log.info(msg("launcher.succession.gathers", names=line.names([leader])))
        while True:
            self._greet()
            waited = time.monotonic() - self._begun
            all_here = others <= line.followers.keys()
            if waited > GATHER_S or (all_here and (leader in self._dead or waited > HOLD_S)):
                break
            time.sleep(RETRY_S)
        for node in others - line.followers.keys():
            if leadership.ask(line.machines[node], self._hello("leader"))[0] == "dead":
                self._dead.add(node)
        if leader not in self._dead:
            state = self._leader()
            if state == "answers":
                self._not_me(msg("launcher.succession.answers", name=line.name(leader)))
                return None
            if state == "dead":  # by now
                self._dead.add(leader)
        run = RunDir(self.run.path)
        self._await_claim(run)
        self._greet()  # some may have ended meanwhile
        try:
            if why := self._reason_against(others):
                self.alone = "" if line.followers else why  # each follower decides for itself then
            elif not leadership.claim(run, self.plan, self.attempt, self._dead):
                why = msg("launcher.succession.claimed")
            elif self.plan.get("shared", True) and leadership.ended(run, self.plan):
                discard(run.claim(self.plan["launch"], self.attempt))
                why = msg("launcher.succession.ended")
        except OSError as error:
            why = self.alone = msg("core.rundir.unwritable", file=run.path, strerror=error.strerror)
        if why:
            self._not_me(why)
            return None
        return self._coordinator(others)

    def _await_claim(self, run: RunDir) -> None:
        """A machine that has announced its claim makes it now, or is lost."""
        end = time.monotonic() + leadership.ANNOUNCED_S
        while leadership.awaited(run, self.plan, self.attempt, self._dead):
            if time.monotonic() > end:
                break
            self._greet()
            time.sleep(RETRY_S)

    def _not_me(self, why: str) -> None:
        log.warning(why)
        self.line.dismiss_followers()

    def _reason_against(self, others: set[int]) -> str:
        """Why this machine must not take over, nor perhaps any other; '' if it may."""
        line, leader = self.line, self.lost.node
        name = line.name(leader)
        shared = self.plan.get("shared", True)
        if not (shared or is_script(self.plan)):
            if not (own := self._copied()):
                return msg("launcher.succession.no_checkpoint", name=name)
            for node, asker in sorted(line.followers.items()):
                if isinstance(newer := asker.hello.get("copied"), str) and newer > own:
                    return msg("launcher.succession.older", name=line.name(node), newer=newer)
        everyone = {self._own, leader, *others} - self._dead
        side = {self._own, *line.followers} & everyone
        if not shared and not leadership.has_majority(side, everyone, leader):
            count = len(everyone)
            return msg("launcher.succession.minority", name=name, side=len(side), count=count)
        return ""

    def _coordinator(self, others: set[int]) -> Coordinator:
        line, plan = self.line, self.plan
        assert line.listener, "a machine of a run with --min_ranks listens"
        address, port = line.listener.at
        plan["place"] |= {
            "leader": self._own,
            "master_addr": address,
            "master_port": port,
        }
        plan["master_port"] = port
        config = plan["config"]
        asked = LauncherOptions(hosts=config["hosts"], hostfile=config["hostfile"])
        if order := hosts.with_first(asked, self._own):
            plan["elastic"]["hosts"] = order
        made = Coordinator(plan, line.listener, {*others, self.lost.node})
        made.take_over(line, line.machines)
        made.token = f"{plan['launch']}.{self.attempt}"
        own = plan.get("shared", True)
        made.shares = dict.fromkeys(line.machines, own)
        line.listener = None
        for node, asker in line.followers.items():
            with suppress(ConnectionLost):  # the next read reports it
                asker.wire.send({"joined": True, "host": socket.gethostname(), "port": port})
            made.met(node, asker.wire, asker.address, asker.hello.get("host"))
            made.shares[node] = own and bool(asker.hello.get("shared", True))
        line.followers = {}
        return made
