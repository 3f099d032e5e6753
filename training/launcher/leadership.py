"""Which machine may decide on the next start of the ranks (`--min_ranks` on several machines).

After a cut network each side could continue the run. Where all machines have the same disk, the
first to claim the start in the run directory does. Otherwise it is the side with more than half of
the machines that may be alive, or with exactly half of them and the one that coordinates. A machine
whose kernel refuses a connection to its supervisor's port is dead for certain.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

from training.core.rundir import RunDir, write_bytes
from training.launcher.json_socket import ConnectionLost, JsonSocket, Message
from training.launcher.listener import ANSWER_S

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan

# An announced claim follows within this time: longer than fewer_ranks.SILENT_PAUSE_S.
ANNOUNCED_S = 15.0
# 'silent': connected, but without an answer in time
State = Literal["dead", "unknown", "silent", "answers"]


def claim(run: RunDir, plan: Plan, attempt: int, dead: Collection[int] = ()) -> bool:
    """Claim the decision on this start of the ranks; False if another machine has it, unless that
    is one of the `dead`. Raises OSError if the run directory cannot be written."""
    path, own = run.claim(plan["launch"], attempt), str(plan["place"]["node_rank"])
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        known = path.read_text(errors="replace")
        if known in map(str, dead):
            write_bytes(path, own.encode())
            return True
        return known == own
    try:
        os.write(handle, own.encode())
    except OSError:  # an empty one would stop all machines
        path.unlink()
        raise
    finally:
        os.close(handle)
    return True


def announce(run: RunDir, plan: Plan, attempt: int) -> None:
    """Before the pause that precedes a claim: the others wait for it, and may claim this start
    themselves if it does not come, because this machine is lost in that pause."""
    with suppress(OSError):  # the claim reports it
        own = str(plan["place"]["node_rank"])
        write_bytes(run.announcement(plan["launch"], attempt), own.encode())


def awaited(run: RunDir, plan: Plan, attempt: int, dead: Collection[int]) -> bool:
    """Has another machine, which may be alive, announced a claim that it has not made yet?"""
    own_or_dead = {str(plan["place"]["node_rank"]), *map(str, dead)}
    with suppress(OSError):
        known = run.announcement(plan["launch"], attempt).read_text(errors="replace")
        return known not in own_or_dead and not run.claim(plan["launch"], attempt).exists()
    return False


def ended(run: RunDir, plan: Plan) -> bool:
    """Has another machine ended the run, on a common disk? To be asked after a claim: the end
    removes all claims, but after the token."""
    try:
        with run.token(plan["launch"]).open("rb"):  # NFS asks its server only when a file is opened
            return False
    except FileNotFoundError:
        return True


def superseded(run: RunDir, plan: Plan, attempt: int) -> bool:
    """Has another machine claimed this start? The file is empty for a moment. If it cannot be read,
    the claim of this machine decides."""
    with suppress(OSError):
        known = run.claim(plan["launch"], attempt).read_text(errors="replace")
        return known != str(plan["place"]["node_rank"])
    return False


def has_majority(side: Iterable[int], maybe_alive: Iterable[int], leader: int) -> bool:
    """Whether the machines of this side may continue without asking the others. `maybe_alive`: all
    machines of the run except those that are dead for certain."""
    here, there = set(side), set(maybe_alive) - set(side)
    return len(here) > len(there) or (len(here) == len(there) and leader in here)


def ask(at: tuple[str, int], hello: Message) -> tuple[State, Message]:
    """What the supervisor at this address answers within ANSWER_S; 'dead' if its machine refuses
    the connection."""
    try:
        wire = JsonSocket(socket.create_connection(at, ANSWER_S))
    except ConnectionRefusedError:
        return "dead", {}
    except (OSError, UnicodeError):  # the latter: not a valid name
        return "unknown", {}
    try:
        wire.send(hello)
        return "answers", wire.receive(ANSWER_S)
    except (ConnectionLost, TimeoutError):
        return "silent", {}
    finally:
        wire.close()
