"""What the plan decides by itself, each decision with its reason: device, precision, compile,
launcher, restarts; training/tasks/gpt/memory_fit.py
decides what fits the memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.config.schema import Config
from training.core.project import ENTRYPOINT
from training.host import cgroups
from training.host.gpus import GpuInventory
from training.host.placement import RANK, Topology
from training.host.torch_build import TorchBuild

if TYPE_CHECKING:
    from training.core.contracts.plan import DecisionRecord

# where `--retries=auto` restarts, and how often
RECOVERS, RETRIES = (
    "train_dual_gpu_enhanced.sh",
    2,
)


@dataclass(frozen=True)
class Decision:
    """A decided value and why."""

    value: Any
    reason: str

    def record(self) -> DecisionRecord:
        return {"value": self.value, "reason": self.reason}


def device(config: Config, ranks: int, machine: GpuInventory, torch: TorchBuild | None) -> Decision:
    gpus = len(machine.gpus)
    if config.device != "auto":
        return Decision(config.device, "as asked")
    if gpus >= ranks and torch and torch.cuda is None:
        return Decision(
            "cpu",
            f"there are {gpus} GPUs, but the installed torch {torch.version} is built for the CPU "
            f"only",
        )
    if gpus >= ranks:
        return Decision(
            "cuda",
            f"a GPU for each of {ranks} ranks ({machine.reason})"
            if ranks > 1
            else f"a GPU ({machine.reason})",
        )
    counted = f"{gpus} GPU{'s' if gpus != 1 else ''} for {ranks} rank{'s' if ranks > 1 else ''}"
    return Decision("cpu", f"{counted} ({machine.reason})")


def precision(config: Config, on: str, ranks: int, machine: GpuInventory) -> Decision:
    if config.precision != "auto":
        return Decision(config.precision, "as asked")
    if on == "cuda":
        old = [
            g.name
            for g in machine.gpus[:ranks]
            if g.capability is not None and g.capability < (8, 0)
        ]
        return (
            Decision("fp32", f"{old[0]} has no bf16")
            if old
            else Decision("bf16", "the GPU has bf16 matrix units")
        )
    flags = cpu_bf16()
    if flags:
        return Decision(
            "bf16", f"this CPU has bf16 matrix instructions ({', '.join(sorted(flags))})"
        )
    return Decision("fp32", "this CPU has no bf16 matrix instructions")


def cpu_bf16() -> set[str]:
    """The bf16 matrix instructions of this CPU."""
    return cpu_flags() & {"avx512_bf16", "amx_bf16"}


def cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    line = next((row for row in text.splitlines() if row.startswith("flags")), "")
    return set(line.partition(":")[2].split())


def compiled(config: Config, on: str) -> Decision:
    if config.compile != "auto":
        return Decision(config.compile == "1", "as asked")
    if on == "cuda":
        return Decision(True, "on a GPU it pays after a few steps")
    return Decision(False, "on a CPU it pays after about 600 steps only")


def budget(on: str, ranks: int, machine: GpuInventory) -> int | None:
    """Free bytes for one rank: of the fullest GPU, or its share of the host memory; None when
    unknown."""
    if on == "cpu":
        return cgroups.available_memory() // ranks
    free = [g.free_bytes for g in machine.gpus[:ranks] if g.free_bytes is not None]
    return min(free) if free else None


def static_graph(config: Config, accumulation: int) -> Decision:
    if not config.use_static_graph:
        return Decision(False, "not asked for")
    if accumulation > 1:
        # pytorch#143580, pytorch#187732: it asserts at the first no_sync backward, and would stop
        # exchanging gradients after.
        return Decision(
            False,
            f"torch's static graph is broken with gradient accumulation (here {accumulation} "
            f"steps): not used",
        )
    return Decision(True, "as asked")


def launcher(config: Config, place: Topology, script: str, ranks: int) -> Decision:
    """Who starts the ranks of this machine: 'env' somebody else, 'spawn' we, 'torchrun' for us."""
    if place.kind == RANK:
        return Decision("env", "the ranks are started already")
    if ranks == 1:
        return Decision(
            "env" if script == ENTRYPOINT else "spawn", "one rank: plain python, no process group"
        )
    if config.launcher == "torchrun":
        return Decision("torchrun", "as asked")
    return Decision(
        "spawn", "direct start of the ranks is faster than torchrun and gives true exit statuses"
    )


def retries(config: Config, started_by: Decision, script: str) -> Decision:
    """How many restarts in a row without progress; see training.launcher.recovery_policy."""
    if started_by.value == "env":
        return Decision(0, "only what has started the ranks can start them again")
    if isinstance(config.retries, int):
        return Decision(config.retries, "as asked")
    if script == RECOVERS:
        return Decision(RETRIES, f"the default of {RECOVERS}")
    return Decision(0, "--retries=N starts the ranks again after a failure of the machine")


def left_over(place: Topology) -> list[str]:
    """What the environment holds of another launcher, for the notes."""
    names = ", ".join(place.leftovers)
    return (
        [
            f"not followed, since nothing has started ranks: {names} (left by a shell profile or "
            f"an outer run)"
        ]
        if names
        else []
    )
