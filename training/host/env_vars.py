"""Environment variables of the ranks, each with its reason. Values set by the user are never
overridden."""

from __future__ import annotations

import math
import os
import pwd
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from training.core import redact
from training.core.messages import msg
from training.core.plain_text import one_line
from training.core.units import plural
from training.host import cgroups, env_catalog, network, numa, process, toolchain
from training.host.gpus import Gpu
from training.host.placement import RANK, Topology

if TYPE_CHECKING:
    from training.core.contracts.plan import VariableRecord

HERE, KEPT, FOUND = "set here", "kept", "from the environment"
_ORIGINS = {
    HERE: msg("host.variable.set_here"),
    KEPT: msg("host.variable.kept"),
    FOUND: msg("host.variable.found"),
}
BINDING = ("slurm", "mpi")  # launchers that bind each of their ranks to cores
TEGRA = Path("/etc/nv_tegra_release")
# GPUs, by a part of their name (also of an RTX 4000), that accelerate refuses with an older driver
# unless these variables are set
NO_COPIES, COPIES_SINCE = "RTX 40", (550, 40, 7)
WITHOUT_COPIES = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")
NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME")  # of the user, for getpass.getuser()
SHOWN = 100  # characters of a value in a line


@dataclass(frozen=True)
class Variable:
    name: str
    value: str
    why: str
    origin: str  # HERE; KEPT: the user's value of a variable that Duet sets; FOUND: any other one

    def record(self) -> VariableRecord:
        return cast("VariableRecord", asdict(self))

    def line(self) -> str:
        """One line of text: value, origin, reason and a short description."""
        value = one_line(self.value if len(self.value) <= SHOWN else f"{self.value[: SHOWN - 1]}…")
        does = "" if self.origin == FOUND else explain(self.name, self.value, "cuda")
        origin = _ORIGINS.get(self.origin, self.origin)
        return msg(
            "host.variable.line", name=self.name, value=value, origin=origin, why=self.why
        ) + (msg("host.variable.does", does=does) if does else "")


def cpu_count() -> int:
    """Cores available to this process (taskset, cpusets, CPU quota of a container)."""
    if hasattr(os, "sched_getaffinity"):
        return _within_quota(len(os.sched_getaffinity(0)))
    return _within_quota(os.cpu_count() or 1)


def _within_quota(cores: int) -> int:
    quota = cgroups.cpu_quota()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def cores_of_ranks(place: Topology, environ: Mapping[str, str]) -> int:
    """Cores for all ranks on this machine. srun and mpirun may bind each rank to its part of
    them."""
    if place.kind != RANK or place.source not in BINDING:
        return cpu_count()
    on_node = environ.get("SLURM_CPUS_ON_NODE", "")
    if on_node.isdecimal() and int(on_node):
        return int(on_node)
    return cores_of_machine()


def cores_of_machine() -> int:
    """Cores available on this machine, also if this process is bound to some of them."""
    return _within_quota(len(numa.numbers(cgroups.cpuset())) or os.cpu_count() or 1)


def choose(
    environ: Mapping[str, str],
    *,
    device: str,
    ranks: int,
    local_ranks: int,
    alone: bool = True,
    debug: bool,
    rendezvous: str = "",
    libuv: str = "auto",
    deterministic: bool = False,
    node_threads: int | None = None,
    cores: int | None = None,
    gpus: Sequence[Gpu] = (),
    task: bool = False,
    script: bool = False,
) -> list[Variable]:
    """The variables of the ranks, and others in the environment that affect them. `local_ranks` of
    `ranks` are on this machine; `alone`: all are, as far as is known; `rendezvous`: rendezvous
    address of several machines;
    `node_threads`: cores for a rank that is bound to a NUMA node; `cores`: of all ranks here, if
    they are not those of this process; `gpus`: those of the ranks;
    `task`: Duet starts them and they train a task; `script`: they run one of a user, whose
    allocator stays as under torchrun."""
    interface = _interface(alone, rendezvous) if ranks > 1 else None
    wanted: list[tuple[str, str, str]] = [
        ("PYTHONUNBUFFERED", "1", msg("host.variable.unbuffered"))
    ]
    if task:
        wanted.append((*process.HASH_SEED, msg("host.variable.same_sets")))
    if not _name(environ):
        wanted.append(("USER", toolchain.NAMELESS, msg("host.variable.no_name")))
    if ranks > 1:
        own = cpu_count()
        cores = own if cores is None else cores
        threads = max(1, min(own, cores // local_ranks))
        shared, sharing = plural(cores, "core"), plural(local_ranks, "rank")
        why = msg("host.variable.threads", cores=shared, ranks=sharing)
        if own < cores // local_ranks:
            why = msg("host.variable.own_cores", cores=plural(own, "core"))
        if node_threads is not None and node_threads <= threads:
            threads, why = node_threads, msg("host.variable.node_threads")
        wanted.append(("OMP_NUM_THREADS", str(threads), why))
    if interface:
        wanted.append(("GLOO_SOCKET_IFNAME", *interface))
    if libuv != "auto":
        wanted.append(("USE_LIBUV", libuv, f"--libuv={libuv}"))
    if device == "cuda":
        wanted.append(("CUDA_DEVICE_ORDER", "PCI_BUS_ID", msg("host.variable.device_order")))
        if interface:
            # a bare name is a prefix: eth1 is eth10, too
            wanted.append(("NCCL_SOCKET_IFNAME", f"={interface[0]}", interface[1]))
        if ranks > 1:
            wanted.append(("TORCH_NCCL_ENABLE_TIMING", "1", msg("host.variable.timing")))
        # Processes that share tensors on a GPU cannot map each other's segments in most containers;
        # the older name wins if both are set.
        if not script and "PYTORCH_CUDA_ALLOC_CONF" not in environ:
            plain = _plain_segments(gpus)
            value = f"expandable_segments:{not plain}"
            wanted.append(("PYTORCH_ALLOC_CONF", value, plain or msg("host.variable.segments")))
        if deterministic:
            # read when CUDA starts, and when the compiler is imported
            wanted += [
                ("CUBLAS_WORKSPACE_CONFIG", ":4096:8", msg("host.variable.same_products")),
                ("TORCHINDUCTOR_DETERMINISTIC", "1", msg("host.variable.same_kernels")),
            ]
        if folder := toolchain.triton_folder(environ, _name(environ)):
            wanted.append(("TRITON_CACHE_DIR", folder, msg("host.variable.no_home")))
        home = environ.get("CUDA_HOME") or _cuda_home()
        if home:
            wanted.append(("CUDA_HOME", home, msg("host.variable.extensions")))
    if debug:
        # Not DETAIL: with gloo every DDP model crashes in torch 2.13 (SIGSEGV, also with bare
        # torchrun).
        wanted.append(
            (
                "TORCH_DISTRIBUTED_DEBUG",
                "INFO",
                msg("host.variable.debug_ddp"),
            )
        )
        wanted.append(("TORCH_CPP_LOG_LEVEL", "INFO", msg("host.variable.debug_torch")))
        if device == "cuda":
            wanted.append(("NCCL_DEBUG", "INFO", msg("host.variable.debug_nccl")))
    chosen = [
        Variable(name, environ[name], msg("host.variable.yours"), KEPT)
        if environ.get(name)
        else Variable(name, value, why, HERE)
        for name, value, why in wanted
    ]
    decided = {v.name for v in chosen}
    found = [
        name for name in env_catalog.relevant(environ) if environ[name] and name not in decided
    ]
    return chosen + [
        Variable(n, redact.shown(n, environ[n]), explain(n, environ[n], device), FOUND)
        for n in found
    ]


def _name(environ: Mapping[str, str]) -> str:
    """That of this user by getpass.getuser(), by which torch names its folder of compiled code;
    torch before 2.13 fails without one."""
    if named := next(filter(None, map(environ.get, NAMES)), ""):
        return named
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container with any user ID
        return ""


def without_copies(
    gpus: Collection[str], driver: str | None, there: Collection[str]
) -> list[Variable]:
    """The variables that accelerate, and with it transformers' Trainer, demands with an old driver
    of these GPUs, as `accelerate launch` sets them for one machine. `gpus`: the names of all GPUs
    of the machine, also of those that no rank uses; `there`: variables that are set already."""
    version = tuple(map(int, re.findall(r"\d+", driver or "")))
    refused = len(gpus) > 1 and any(NO_COPIES in name for name in gpus)
    if not version or version >= COPIES_SINCE or not refused:
        return []
    why = msg("host.variable.no_copies", driver=driver)
    return [Variable(name, "1", why, HERE) for name in WITHOUT_COPIES if name not in there]


def under_wsl() -> bool:
    """Whether this is Linux in Windows (WSL), where the driver offers less."""
    return "microsoft" in os.uname().release.lower()


def _plain_segments(gpus: Sequence[Gpu]) -> str:
    """Why the allocator should not map memory into expandable segments; '' if it should."""
    if under_wsl():
        return msg("host.variable.plain_wsl")
    if TEGRA.exists():
        return msg("host.variable.plain_tegra")
    if any(gpu.virtual for gpu in gpus):
        return msg("host.variable.plain_vgpu")
    return msg("host.variable.plain_mig") if any(gpu.mig for gpu in gpus) else ""


def _interface(alone: bool, rendezvous: str) -> tuple[str, str] | None:
    """(network interface of the ranks, reason)."""
    if alone:
        return "lo", msg("host.variable.loopback")
    found = network.interface_towards(rendezvous) if rendezvous else None
    return (
        (found[0], msg("host.variable.interface", rendezvous=rendezvous, address=found[1]))
        if found
        else None
    )


def explain(name: str, value: str, device: str) -> str:
    """The effect of a variable in this run; '' if unknown."""
    entry = env_catalog.known().get(name)
    return entry.explain(value, device) if entry else env_catalog.unknown(name)


def useless(environ: Mapping[str, str]) -> list[str]:
    """Warnings about variables without effect. An unknown name is reported only if it is similar to
    a known one, since libraries other than NCCL use its prefix too."""
    out = []
    for name in env_catalog.relevant(environ):
        entry = env_catalog.known().get(name)
        if entry.wrong if entry else env_catalog.meant(name):
            out.append(
                f"{name}={redact.shown(name, environ[name])} {explain(name, environ[name], '')}"
            )
    return out


def _cuda_home() -> str | None:

    nvcc = shutil.which("nvcc")
    candidates = [os.path.dirname(os.path.dirname(os.path.realpath(nvcc)))] if nvcc else []
    return next(
        (
            c
            for c in [*candidates, "/usr/local/cuda"]
            if os.path.exists(f"{c}/include/cuda_runtime.h")
        ),
        None,
    )
