"""Automatic decisions of the plan, each with its reason: device, precision, compile, launcher,
restarts. training/tasks/gpt/memory_fit.py decides what fits into memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.config.schema import Config
from training.core.project import ENTRYPOINT
from training.core.units import plural
from training.host import cgroups
from training.host.gpus import GpuInventory
from training.host.placement import RANK, Topology
from training.host.torch_build import TorchBuild

if TYPE_CHECKING:
    from training.core.contracts.plan import DecisionRecord

# The script for which --retries=auto restarts, and the number of restarts.
RECOVERS, RETRIES = (
    "train_dual_gpu_enhanced.sh",
    2,
)


@dataclass(frozen=True)
class Decision:
    """A decided value and its reason."""

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
    counted = f"{plural(gpus, 'GPU')} for {plural(ranks, 'rank')}"
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
        return Decision(True, "pays off after a few steps on a GPU")
    return Decision(False, "pays off only after about 600 steps on a CPU")


def budget(on: str, ranks: int, machine: GpuInventory) -> int | None:
    """Free bytes for one rank: those of the fullest GPU, or its share of the host memory; None if
    unknown."""
    if on == "cpu":
        return cgroups.available_memory() // ranks
    free = [g.free_bytes for g in machine.gpus[:ranks] if g.free_bytes is not None]
    return min(free) if free else None


def static_graph(config: Config, accumulation: int) -> Decision:
    if not config.use_static_graph:
        return Decision(False, "not requested")
    if accumulation > 1:
        # pytorch#143580, pytorch#187732: an assertion fails in the first no_sync backward; without
        # it gradients would no longer be exchanged.
        return Decision(
            False,
            f"the static graph of torch is broken with gradient accumulation (here {accumulation} "
            f"steps): not used",
        )
    return Decision(True, "as asked")


def launcher(config: Config, place: Topology, script: str, ranks: int) -> Decision:
    """The launcher of this machine's ranks: 'spawn' (Duet itself), 'torchrun', or 'env' (started
    from outside)."""
    if place.kind == RANK:
        return Decision("env", "the ranks are already started")
    if ranks == 1:
        return Decision(
            "env" if script == ENTRYPOINT else "spawn", "one rank: plain python, no process group"
        )
    if config.launcher == "torchrun":
        return Decision("torchrun", "as asked")
    return Decision(
        "spawn", "a direct start is faster than torchrun and reports true exit statuses"
    )


def retries(config: Config, started_by: Decision, script: str) -> Decision:
    """The number of consecutive restarts without progress (training.launcher.recovery_policy)."""
    if started_by.value == "env":
        return Decision(0, "only the launcher of the ranks can restart them")
    if isinstance(config.retries, int):
        return Decision(config.retries, "as asked")
    if script == RECOVERS:
        return Decision(RETRIES, f"the default of {RECOVERS}")
    return Decision(0, "--retries=N restarts the ranks after a failure of the machine")


def left_over(place: Topology) -> list[str]:
    """Plan note about ignored variables of another launcher; [] without any."""
    names = ", ".join(place.leftovers)
    return (
        [
            f"ignored, since no launcher has started ranks: {names} (left by a shell profile or an "
            f"outer run)"
        ]
        if names
        else []
    )
