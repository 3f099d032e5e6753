"""The role of this process in a training: alone, one node of several, or a rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, cast

from training.core.errors import Problem, UserError

if TYPE_CHECKING:
    from training.core.contracts.kinds import PlaceKind
    from training.core.contracts.plan import PlaceRecord

LOCAL: Final = "local"
NODE: Final = "node"
RANK: Final = "rank"
LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 12355  # of several machines, which cannot agree on a free port
ON, OFF = "--launcher=env", "--launcher=spawn"


@dataclass(frozen=True)
class LauncherOptions:
    """Configuration fields that determine the role."""

    launcher: str = "auto"
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = ""
    master_port: int = 0


@dataclass(frozen=True)
class Topology:
    """`kind`: LOCAL and NODE start ranks, a RANK is one of them."""

    kind: PlaceKind
    source: str  # nobody, flags, torchrun, platform, slurm  # language: quoted
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

    def record(self) -> PlaceRecord:
        return cast("PlaceRecord", asdict(self))

    @property
    def first_node(self) -> bool:
        return self.node_rank == 0

    def sentence(self) -> str:
        where = {
            LOCAL: "local",
            NODE: f"node {self.node_rank} of {self.nnodes}, the first is "
            f"{self.master_addr}:{self.master_port}",
            RANK: f"rank {self.rank} of {self.world_size}",
        }[self.kind]
        return f"mode {where}: {self.reason}"

    def variables(self) -> dict[str, str]:
        """The environment variables of a rank (SLURM uses different names)."""
        if self.kind != RANK:
            return {}
        numbers = {"RANK": self.rank, "LOCAL_RANK": self.local_rank, "WORLD_SIZE": self.world_size}
        numbers |= {"LOCAL_WORLD_SIZE": self.local_world_size} if self.local_world_size else {}
        numbers |= {"MASTER_PORT": self.master_port} if self.master_port else {}
        texts = {"MASTER_ADDR": self.master_addr} if self.master_addr else {}
        return {name: str(value) for name, value in numbers.items()} | texts


def numbers(environ: Mapping[str, str], names: Iterable[str], reason: str) -> list[int]:
    """Whole numbers from the environment. Raises UserError with all invalid ones."""
    bad = [name for name in names if not environ.get(name, "").isdecimal()]
    if bad:
        raise UserError(
            [
                Problem(
                    "environment.rank_variable",
                    f"{name} is {environ.get(name, '')!r} (environment), but {reason}",
                    "a whole number from 0",
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
                f"{name} is {value} (environment), but {limit_name} is {limit}",
                f"{name} from 0 to {limit - 1}",
                [
                    f"unset {name} {limit_name}   # if another program has set them",
                    f"{OFF}   # to ignore them",
                ],
            )
        )
