"""NUMA nodes of this machine: cores of a node, node of a GPU, and the binding of a rank to the node
of its GPU."""

from __future__ import annotations

import ctypes
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from training.core.errors import Problem
from training.core.messages import msg
from training.host.gpus import Gpu

if TYPE_CHECKING:
    from training.core.contracts.plan import BindingRecord, NumaRecord

NODES = Path("/sys/devices/system/node")
AUTO, OFF = "auto", "off"
SPAWN = "spawn"  # the launcher that binds its ranks
# numbers of the system calls
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
DEFAULT_POLICY, PREFERRED = 0, 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class NumaPlan:
    """The binding of each rank of this machine, None: not bound; `memory`: allocations prefer the
    node too."""

    bindings: tuple[BindingRecord | None, ...]
    memory: bool
    reason: str

    def record(self) -> NumaRecord:
        return {"value": list(self.bindings), "memory": self.memory, "reason": self.reason}

    @property
    def threads(self) -> int | None:
        """Cores for each rank if the ranks of a node share its cores; None: not all are bound."""
        bound = [binding for binding in self.bindings if binding]
        if not bound or len(bound) < len(self.bindings):
            return None
        ranks = Counter(binding["node"] for binding in bound)
        return max(1, min(len(b["cores"]) // ranks[b["node"]] for b in bound))

    def sentence(self, first_rank: int = 0) -> str:
        """`first_rank`: the first one of this machine."""
        bound = [
            msg("host.numa.rank", rank=rank, node=b["node"], cores=spans(b["cores"]))
            for rank, b in enumerate(self.bindings, first_rank)
            if b
        ]
        what = msg("host.numa.comma").join(bound) or msg("host.numa.none")
        return msg("host.numa.sentence", what=what, reason=self.reason)


def choose(
    asked: int | str,
    launcher: str,
    device: str,
    gpus: Sequence[Gpu],
    ranks: int,
    origin: str,
) -> NumaPlan:
    """`asked`: --numa, set at `origin`, without problems(); `gpus`: of these ranks, in order."""
    unbound = (None,) * ranks
    if asked == OFF:
        return NumaPlan(unbound, False, msg("host.decision.as_asked"))
    if launcher != SPAWN:
        return NumaPlan(unbound, False, msg("host.numa.other_launcher", launcher=launcher))
    whole = cores_of_nodes()
    nodes = allowed(whole)
    if isinstance(asked, int):
        if not nodes.get(asked):  # a node of the machines that this one starts
            return NumaPlan(unbound, False, msg("host.numa.no_cores", node=asked, origin=origin))
        one: BindingRecord = {"node": asked, "cores": sorted(nodes[asked])}
        return _bound((one,) * ranks, msg("host.decision.as_asked"))
    if device != "cuda":
        return NumaPlan(unbound, False, msg("host.numa.no_gpu"))
    if len(nodes) < 2:
        return NumaPlan(unbound, False, msg("host.numa.one_node"))
    bindings = tuple(_of_gpu(gpu, nodes) for gpu in gpus[:ranks])
    if not any(bindings):
        return NumaPlan(unbound, False, msg("host.numa.unknown"))
    if why := _uneven(bindings, whole, nodes):
        return NumaPlan(unbound, False, why)
    return _bound(bindings + unbound[len(bindings) :], msg("host.numa.of_the_gpu"))


def _uneven(
    bindings: Sequence[BindingRecord | None],
    whole: Mapping[int, set[int]],
    nodes: Mapping[int, set[int]],
) -> str:
    """A node of these with less than half of its share of the allowed cores (`nodes`), which would
    leave its ranks with a few and the others idle; ''. A node of many in a machine that is all
    allowed has its share."""
    every, own = (sum(map(len, one.values())) for one in (whole, nodes))
    for node in sorted({binding["node"] for binding in bindings if binding}):
        if 2 * len(nodes[node]) * every < own * len(whole[node]):
            return msg("host.numa.uneven", node=node, cores=len(nodes[node]), allowed=own)
    return ""


def _of_gpu(gpu: Gpu, nodes: Mapping[int, set[int]]) -> BindingRecord | None:
    node = gpu.numa_node
    if node is None or not nodes.get(node):
        return None
    return {"node": node, "cores": sorted(nodes[node])}


def _bound(bindings: tuple[BindingRecord | None, ...], reason: str) -> NumaPlan:
    policy = memory_policy()
    if policy is None:
        also = msg("host.numa.no_memory_policy")
    elif policy == DEFAULT_POLICY:
        also = msg("host.numa.memory")
    else:
        also = msg("host.numa.own_policy")
    memory = policy == DEFAULT_POLICY
    return NumaPlan(bindings, memory, msg("host.numa.with_memory", reason=reason, memory=also))


def problems(asked: int | str, launcher: str, origin: str) -> list[Problem]:
    """A node without cores for this process, which `launcher` would bind its ranks to."""
    if launcher != SPAWN or not isinstance(asked, int):
        return []
    known = [node for node, cores in allowed(cores_of_nodes()).items() if cores]
    if asked in known:
        return []
    what = msg("host.numa.no_cores", node=asked, origin=origin)
    nodes = msg("host.numa.nodes", nodes=", ".join(map(str, known)) or "-")
    fixes = [f"--numa={value}" for value in (AUTO, *known[:1])]
    return [Problem("numa.node", what, nodes, fixes, "numa")]


def cores_of_nodes() -> dict[int, set[int]]:
    """Node → its cores; {} where the kernel reports no nodes. A node may have memory only."""
    out = {}
    for folder in NODES.glob("node[0-9]*"):
        try:
            out[int(folder.name.removeprefix("node"))] = numbers(
                (folder / "cpulist").read_text().strip()
            )
        except (OSError, ValueError):  # taken offline meanwhile
            continue
    return out


def allowed(nodes: Mapping[int, set[int]]) -> dict[int, set[int]]:
    """The same with the cores that this process may use (cpuset of the control group, taskset)."""
    own = os.sched_getaffinity(0)
    return {node: cores & own for node, cores in sorted(nodes.items())}


def bind(cores: Sequence[int], node: int, *, memory: bool) -> bool:
    """Bind this process and the children that it will have to these cores; with `memory`, they
    allocate on this node while it has some: False if the kernel has refused that. Raises OSError if
    the cores cannot be used."""
    os.sched_setaffinity(0, cores)
    return not memory or prefer_memory(node)


def memory_policy() -> int | None:
    """The memory policy of this process; None if the kernel refuses to read it. Containers without
    CAP_SYS_NICE may neither read nor set one."""
    number, mode = GET_MEMPOLICY.get(platform.machine()), ctypes.c_int()
    if number is None:
        return None
    zero = ctypes.c_ulong(0)
    failed = _libc.syscall(number, ctypes.byref(mode), None, zero, None, zero)
    return None if failed else mode.value


def prefer_memory(node: int) -> bool:
    """Whether the kernel has accepted the policy."""
    number = SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return False
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << node % bits
    # The kernel reads one bit less than this number.
    most = ctypes.c_ulong(bits * len(mask) + 1)
    return _libc.syscall(number, PREFERRED, ctypes.byref(mask), most) == 0


def numbers(text: str) -> set[int]:
    """'0-3,8' → {0, 1, 2, 3, 8}. Raises ValueError."""
    out: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        out.update(range(int(first), int(last or first) + 1))
    return out


def spans(found: Sequence[int]) -> str:
    """The reverse of `numbers`: [0, 1, 2, 8] → '0-2,8'."""
    out: list[list[int]] = []
    for number in sorted(found):
        if out and number == out[-1][-1] + 1:
            out[-1][1:] = [number]
        else:
            out.append([number])
    return ",".join("-".join(map(str, span)) for span in out)
