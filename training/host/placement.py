"""The role of this process in a training: alone, one node of several, or a rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, cast

from training.core.errors import Problem, UserError
from training.core.messages import msg

if TYPE_CHECKING:
    from training.core.contracts.kinds import PlaceKind
    from training.core.contracts.plan import PlaceRecord

LOCAL: Final = "local"
NODE: Final = "node"
RANK: Final = "rank"
LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 12355  # of several machines, which cannot agree on a free port
OFF = "--launcher=spawn"


@dataclass(frozen=True)
class LauncherOptions:
    """Configuration fields that determine the role."""

    launcher: str = "auto"
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = ""
    master_port: int = 0
    hosts: str = ""
    hostfile: str = ""
    ssh_args: str = ""


@dataclass(frozen=True)
class Topology:
    """`kind`: LOCAL and NODE start ranks, a RANK is one of them."""

    kind: PlaceKind
    source: str  # nobody, flags, hosts, torchrun, platform, slurm, mpi  # language: quoted
    reason: str
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1  # 0: unknown
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = ""
    master_port: int = 0
    leftovers: Sequence[str] = ()  # ignored variables of another launcher
    leader: int = 0  # the node that coordinates the run: another one once node 0 is lost

    def record(self) -> PlaceRecord:
        return cast("PlaceRecord", asdict(self))

    @property
    def leads(self) -> bool:
        """Whether this node coordinates the run, or there is no other."""
        return self.node_rank == self.leader

    def sentence(self) -> str:
        where = {
            LOCAL: msg("host.place.local"),
            NODE: msg(
                "host.place.node",
                node_rank=self.node_rank,
                nnodes=self.nnodes,
                master_addr=self.master_addr,
                master_port=self.master_port,
            ),
            RANK: msg("host.place.rank", rank=self.rank, world_size=self.world_size),
        }[self.kind]
        return msg("host.place.sentence", where=where, reason=self.reason)

    def variables(self) -> dict[str, str]:
        """The environment variables of a rank (SLURM uses different names)."""
        if self.kind != RANK:
            return {}
        numbers = {"RANK": self.rank, "LOCAL_RANK": self.local_rank, "WORLD_SIZE": self.world_size}
        numbers |= {"LOCAL_WORLD_SIZE": self.local_world_size} if self.local_world_size else {}
        numbers |= {"MASTER_PORT": self.master_port} if self.master_port else {}
        texts = {"MASTER_ADDR": self.master_addr} if self.master_addr else {}
        return {name: str(value) for name, value in numbers.items()} | texts


def on_one_machine(place: PlaceRecord) -> bool:
    """Whether all ranks of this plan are known to run on the same machine."""
    if place["kind"] == RANK:
        return place["local_world_size"] == place["world_size"]
    return place["nnodes"] == 1


def numbers(environ: Mapping[str, str], names: Iterable[str], reason: str) -> list[int]:
    """Whole numbers from the environment. Raises UserError with all invalid ones."""
    bad = [name for name in names if not environ.get(name, "").isdecimal()]
    if bad:
        raise UserError(
            [
                Problem(
                    "environment.rank_variable",
                    msg(
                        "host.place.no_number",
                        name=name,
                        value=environ.get(name, ""),
                        reason=reason,
                    ),
                    msg("host.place.whole_number"),
                    [f"unset {name}", OFF],
                )
                for name in bad
            ]
        )
    return [int(environ[name]) for name in names]


def inside(name: str, value: int, limit_name: str, limit: int) -> None:
    if value >= limit:
        raise UserError(
            Problem(
                "environment.rank_range",
                msg(
                    "host.place.out_of_range",
                    name=name,
                    value=value,
                    limit_name=limit_name,
                    limit=limit,
                ),
                msg("host.place.range", name=name, last=limit - 1),
                [
                    msg("host.place.unset", name=name, limit_name=limit_name),
                    msg("host.place.ignore", OFF=OFF),
                ],
            )
        )
