"""The ranks of this machine: their command, their variables, their rendezvous address."""

from __future__ import annotations

import errno
import os
import random
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from training.config.fault_spec import ATTEMPT
from training.core import run_reader, rundir
from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg
from training.core.project import ENTRYPOINT, ROOT
from training.host import network, ports
from training.host.placement import LOOPBACK
from training.launcher import seats
from training.plan.script_words import WATCH

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan


@dataclass
class LocalRanks:
    """`store`: the listening socket of the rendezvous, which rank 0 inherits."""

    ranks: range  # of this machine
    world_size: int
    address: str = ""
    port: int = 0
    store: socket.socket | None = None
    group: int = 0  # number of this machine among those with ranks
    groups: int = 1

    def variables(self, rank: int, *, ours: bool) -> dict[str, str]:
        """Variables as torchrun sets them. A single rank of Duet's own training has no process
        group, and gets none."""
        if ours and self.world_size == 1:
            return {}
        local = len(self.ranks)
        numbers = {
            "RANK": rank,
            "LOCAL_RANK": rank - self.ranks.start,
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": local,
            "GROUP_RANK": self.group,
            "MASTER_PORT": self.port,
        }
        if not ours:
            numbers |= {
                "ROLE_RANK": rank,
                "ROLE_WORLD_SIZE": self.world_size,
                "GROUP_WORLD_SIZE": self.groups,
            }
        return {name: str(value) for name, value in numbers.items()} | {"MASTER_ADDR": self.address}

    def close(self) -> None:
        if self.store:
            self.store.close()


def alone(plan: Plan) -> LocalRanks:
    """All ranks on this machine. Raises UserError when the requested port and the following ones
    are taken."""
    count, wanted = plan["ranks"], plan["master_port"]
    if count == 1 and not is_script(plan):
        return LocalRanks(range(1), 1)
    if is_script(plan) or plan["launcher"]["value"] == "torchrun":
        return LocalRanks(range(count), count, LOOPBACK, wanted or free_port(LOOPBACK))
    store = listen(LOOPBACK, wanted, 2 * count)
    return LocalRanks(range(count), count, LOOPBACK, store.getsockname()[1], store)


def of_node(plan: Plan, address: str, port: int, store: socket.socket | None = None) -> LocalRanks:
    """The ranks of this machine, one of several."""
    nodes, node = seats.nodes(plan), plan["place"]["node_rank"]
    group = nodes.index(node) if node in nodes else 0
    return LocalRanks(seats.ranks(plan), plan["ranks"], address, port, store, group, len(nodes))


def is_script(plan: Plan) -> bool:
    """A user script rather than a task of Duet's own training."""
    return plan.get("script") is not None


def watched(plan: Plan) -> str:
    """Name of the command that starts the ranks (./duet watch); '' where Duet starts them."""
    return Path(plan["script"]["path"]).name if plan["launcher"]["value"] == WATCH else ""


def found(run: rundir.RunDir) -> int | None:
    """Number of ranks of a watched command, which its plan does not know."""
    return (run_reader.read_supervisor(run.supervisor) or {}).get("found")


def shown(plan: Plan, ranks: range) -> list[int]:
    """The ranks of this machine whose output the console shows (--show_ranks)."""
    asked = plan["config"].get("show_ranks", "0")
    if asked == "all":
        return list(ranks)
    return [ranks[int(i)] for i in asked.split(",") if int(i) < len(ranks)]


def command(run: rundir.RunDir, plan: Plan) -> list[str]:
    """Command line of every rank."""
    if not is_script(plan):
        return [sys.executable, str(ROOT / ENTRYPOINT)]
    script = plan["script"]
    words = [*(["-m"] if script.get("module") else []), script["path"], *script["args"]]
    if script["python"] is None:
        return words
    return [script["python"], "-u", str(ROOT / "lib/run_script.py"), str(run.ranks), *words]


def restarts(plan: Plan) -> dict[str, str]:
    """What torchrun does not know of a restart by Duet; {} at the first start."""
    found = _restarts(plan)
    return found if found["TORCHELASTIC_RESTART_COUNT"] != "0" else {}


def _restarts(plan: Plan) -> dict[str, str]:
    return {
        "TORCHELASTIC_RESTART_COUNT": str(int(os.environ.get(ATTEMPT, "1")) - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(plan["retries"]["value"]),
    }


def torchelastic(run: rundir.RunDir, plan: Plan, rank: int) -> dict[str, str]:
    """The other variables that torchrun sets for a script. Lightning recognises its launcher by
    them, scripts read the number of restarts, and `@record` writes the error file.

    Source: torch/distributed/elastic/agent/server/local_elastic_agent.py of torch 2.13.
    """
    return {
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": run.name,
        **_restarts(plan),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": str(run.elastic_error(rank)),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def listen(address: str, wanted: int, backlog: int) -> socket.socket:
    """A socket that listens at the requested port or, when that is taken, at one of the next; 0 is
    any. No other process can take the port before the ranks start. Raises UserError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in ports.following(wanted) if wanted else (0,):
        store = socket.socket(family)
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address == network.BOTH:
            store.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            store.bind((address, port))
            store.listen(backlog)
        except OSError as error:
            store.close()
            if error.errno != errno.EADDRINUSE:
                everywhere = address in network.ALL
                where = msg("launcher.port.this_machine") if everywhere else address
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
    more = len(ports.following(wanted)) - 1
    text = msg("launcher.port.taken", wanted=wanted, more=more, owner=ports.owner(wanted))
    raise UserError(
        Problem("port.taken", text, "", [msg("plan.port.omit")]),
        Exit.RESOURCES,
    )


def free_port(address: str) -> int:
    """A free port for a script, whose rank 0 opens it itself."""
    choice = random.Random(os.urandom(8))
    return next(
        p for p in choice.sample(ports.QUIET, len(ports.QUIET)) if ports.is_free(p, address)
    )
