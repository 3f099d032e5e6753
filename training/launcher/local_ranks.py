"""The ranks of this machine: their command, their variables, their rendezvous address."""

from __future__ import annotations

import errno
import os
import random
import socket
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from training.core import rundir
from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg
from training.core.project import ENTRYPOINT, ROOT
from training.host import ports
from training.host.placement import LOOPBACK

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan

# For a port that is named but not handed over: outside the kernel's range for outgoing connections
# (from 32768), so that no process takes it by chance before rank 0 does.
QUIET_PORTS = range(20000, 30000)


@dataclass
class LocalRanks:
    """`store`: the listening socket of the rendezvous, which rank 0 inherits."""

    ranks: range  # of this machine
    world_size: int
    address: str = ""
    port: int = 0
    store: socket.socket | None = None

    def variables(self, rank: int) -> dict[str, str]:
        """Variables as torchrun sets them; none for a single rank, which has no process group."""
        if self.world_size == 1:
            return {}
        numbers = {
            "RANK": rank,
            "LOCAL_RANK": rank - self.ranks.start,
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": len(self.ranks),
        }
        numbers |= {"GROUP_RANK": self.ranks.start // len(self.ranks), "MASTER_PORT": self.port}
        return {name: str(value) for name, value in numbers.items()} | {"MASTER_ADDR": self.address}

    def close(self) -> None:
        if self.store:
            self.store.close()


def alone(plan: Plan) -> LocalRanks:
    """All ranks on this machine. Raises UserError when the requested port and the following ones
    are taken."""
    count, wanted = plan["ranks"], plan["master_port"]
    if count == 1:
        return LocalRanks(range(1), 1)
    if is_script(plan) or plan["launcher"]["value"] == "torchrun":
        return LocalRanks(range(count), count, LOOPBACK, wanted or free_port(LOOPBACK))
    store = listen(LOOPBACK, wanted, 2 * count)
    return LocalRanks(range(count), count, LOOPBACK, store.getsockname()[1], store)


def is_script(plan: Plan) -> bool:
    """A user script rather than a task of Duet's own training."""
    return plan.get("script") is not None


def command(run: rundir.RunDir, plan: Plan) -> list[str]:
    """Command line of every rank."""
    if not is_script(plan):
        return [sys.executable, str(ROOT / ENTRYPOINT)]
    script = plan["script"]
    if script["python"] is None:
        return [script["path"], *script["args"]]
    return [
        script["python"],
        "-u",
        str(ROOT / "lib/run_script.py"),
        str(run.ranks),
        script["path"],
        *script["args"],
    ]


def listen(address: str, wanted: int, backlog: int) -> socket.socket:
    """A socket that listens at the requested port or, when that is taken, at one of the next; 0 is
    any. No other process can take the port before the ranks start. Raises UserError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in range(wanted, min(wanted + ports.TRIES, 65536)) if wanted else (0,):
        store = socket.socket(family)
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            store.bind((address, port))
            store.listen(backlog)
        except OSError as error:
            store.close()
            if error.errno != errno.EADDRINUSE:
                where = address or msg("launcher.port.this_machine")
                text = msg(
                    "launcher.port.unusable", where=where, port=port, strerror=error.strerror
                )
                raise UserError(
                    Problem(
                        "port.unusable",
                        text,
                        "",
                        [msg("launcher.port.above_1023")],
                    ),
                    Exit.RESOURCES,
                ) from error
        else:
            return store
    text = msg(
        "launcher.port.taken", wanted=wanted, more=ports.TRIES - 1, owner=ports.owner(wanted)
    )
    raise UserError(
        Problem("port.taken", text, "", [msg("plan.port.omit")]),
        Exit.RESOURCES,
    )


def free_port(address: str) -> int:
    """A free port for a script, whose rank 0 opens it itself."""
    choice = random.Random(os.urandom(8))
    return next(
        p for p in choice.sample(QUIET_PORTS, len(QUIET_PORTS)) if ports.is_free(p, address)
    )
