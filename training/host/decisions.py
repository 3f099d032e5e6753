"""Automatic decisions of the plan, each with its reason: device, precision, compile, launcher,
restarts. training/tasks/gpt/memory_fit.py decides what fits into memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.config.schema import Config
from training.core.messages import msg
from training.core.project import ENTRYPOINT
from training.core.units import plural
from training.host import cgroups
from training.host.gpus import GpuInventory
from training.host.placement import RANK, Topology
from training.host.torch_build import TorchBuild

if TYPE_CHECKING:
    from training.core.contracts.plan import DecisionRecord

AS_ASKED = msg("host.decision.as_asked")  # reason of a value that the user has set
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
        return Decision(config.device, AS_ASKED)
    if gpus >= ranks and torch and torch.cuda is None:
        return Decision(
            "cpu",
            msg("host.decision.cpu_build", gpus=gpus, version=torch.version),
        )
    if gpus >= ranks:
        return Decision(
            "cuda",
            msg("host.decision.gpu_each", ranks=ranks, reason=machine.reason)
            if ranks > 1
            else msg("host.decision.one_gpu", reason=machine.reason),
        )
    counted = msg("host.decision.too_few", gpus=plural(gpus, "GPU"), ranks=plural(ranks, "rank"))
    return Decision("cpu", msg("host.decision.too_few_why", counted=counted, reason=machine.reason))


def precision(config: Config, on: str, ranks: int, machine: GpuInventory) -> Decision:
    if config.precision != "auto":
        return Decision(config.precision, AS_ASKED)
    if on == "cuda":
        old = [
            g.name
            for g in machine.gpus[:ranks]
            if g.capability is not None and g.capability < (8, 0)
        ]
        return (
            Decision("fp32", msg("host.decision.no_bf16", name=old[0]))
            if old
            else Decision("bf16", msg("host.decision.gpu_bf16"))
        )
    flags = cpu_bf16()
    if flags:
        return Decision("bf16", msg("host.decision.cpu_bf16", flags=", ".join(sorted(flags))))
    return Decision("fp32", msg("host.decision.cpu_no_bf16"))


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


def compiled(config: Config, on: str, missing: Iterable[str] = ()) -> Decision:
    """`missing`: what torch.compile needs and this machine lacks."""
    if config.compile != "auto":
        return Decision(config.compile == "1", AS_ASKED)
    if on == "cuda" and (lacks := ", ".join(missing)):
        return Decision(False, msg("host.decision.compile_lacks", lacks=lacks))
    if on == "cuda":
        return Decision(True, msg("host.decision.compile_gpu"))
    return Decision(False, msg("host.decision.compile_cpu"))


def budget(on: str, ranks: int, machine: GpuInventory) -> int | None:
    """Free bytes for one rank: those of the fullest GPU, or its share of the host memory; None if
    unknown."""
    if on == "cpu":
        return cgroups.available_memory() // ranks
    free = [g.free_bytes for g in machine.gpus[:ranks] if g.free_bytes is not None]
    return min(free) if free else None


def static_graph(config: Config, accumulation: int) -> Decision:
    if not config.use_static_graph:
        return Decision(False, msg("host.decision.not_requested"))
    if accumulation > 1:
        # pytorch#143580, pytorch#187732: an assertion fails in the first no_sync backward; without
        # it gradients would no longer be exchanged.
        return Decision(
            False,
            msg("host.decision.static_graph", accumulation=accumulation),
        )
    return Decision(True, AS_ASKED)


def launcher(config: Config, place: Topology, script: str, ranks: int) -> Decision:
    """The launcher of this machine's ranks: 'spawn' (Duet itself), 'torchrun', or 'env' (started
    from outside)."""
    if place.kind == RANK:
        return Decision("env", msg("host.decision.started"))
    if ranks == 1:
        return Decision("env" if script == ENTRYPOINT else "spawn", msg("host.decision.one_rank"))
    if config.launcher == "torchrun":
        return Decision("torchrun", AS_ASKED)
    return Decision("spawn", msg("host.decision.spawn"))


def retries(config: Config, started_by: Decision, script: str) -> Decision:
    """The number of consecutive restarts without progress (training.launcher.recovery_policy)."""
    if started_by.value == "env":
        return Decision(0, msg("host.decision.only_launcher"))
    if isinstance(config.retries, int):
        return Decision(config.retries, AS_ASKED)
    if script == RECOVERS:
        return Decision(RETRIES, msg("host.decision.default_of", script=RECOVERS))
    return Decision(0, msg("host.decision.retries"))


def left_over(place: Topology) -> list[str]:
    """Plan note about ignored variables of another launcher; [] without any."""
    names = ", ".join(place.leftovers)
    return [msg("host.decision.leftovers", names=names)] if names else []
