"""Automatic decisions of the plan, each with its reason: device, arithmetic, compile, launcher,
restarts. training/tasks/gpt/memory_fit.py decides what fits into memory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.config.schema import Config
from training.core.messages import msg
from training.core.project import ENTRYPOINT
from training.core.units import plural
from training.host import cgroups
from training.host.gpus import Gpu, GpuInventory
from training.host.placement import RANK, Topology
from training.host.torch_build import TorchBuild

if TYPE_CHECKING:
    from training.core.contracts.plan import DecisionRecord

AS_ASKED = msg("host.decision.as_asked")  # reason of a value that the user has set
BY_DEFAULT = msg("host.decision.by_default")
TF32_VARIABLE = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"  # of torch
NO_TF32_VARIABLE = "NVIDIA_TF32_OVERRIDE"  # of the CUDA libraries, for which it has precedence
# Names of GPUs that have the capability of the RTX 20xx, 7.5, but no tensor cores.
NO_TENSOR_CORES = re.compile(r"GTX 16|\bMX[45]50\b|\bT(400|500|550|600|1000|1200|2000)\b")
RANK_RAM_BYTES = 2 << 30  # host memory of a rank on a GPU: torch with CUDA, an estimate
FP8_CAPABILITY = (8, 9)  # compute capability of the first GPUs with matrix units for fp8
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


def device(
    config: Config,
    ranks: int,
    machine: GpuInventory,
    torch: TorchBuild | None,
    *,
    reason: str = AS_ASKED,
    resumed: bool = False,
) -> Decision:
    """`reason`: of a device that is not `auto`. `resumed`: the run that is continued has used GPUs,
    so that a lost driver or GPU is refused."""
    gpus = len(machine.gpus)
    if config.device != "auto":
        return Decision(config.device, reason)
    if resumed and (gpus < ranks or (torch and torch.cuda is None)):
        return Decision("cuda", msg("host.decision.resumed"))
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
    """The weakest GPU of the ranks decides: all ranks compute alike. fp8 changes the arithmetic, so
    it is never decided, only asked for."""
    if config.precision == "fp8":
        return Decision("fp8", msg("host.decision.fp8"))
    if config.precision != "auto":
        return Decision(config.precision, AS_ASKED)
    if on == "cuda":
        gpus = machine.gpus[:ranks]
        neither = [gpu for gpu in gpus if best_type(gpu.capability, gpu.name) == "fp32"]
        for gpu in neither or [gpu for gpu in gpus if not has_bf16(gpu)]:
            name, capability = gpu.name, "{}.{}".format(*gpu.capability or ("?", "?"))
            if neither:
                text = msg("host.decision.no_half", name=name, capability=capability)
                return Decision("fp32", text)
            text = msg("host.decision.gpu_fp16", name=name, capability=capability)
            return Decision("fp16", text)
        if not gpus:
            return Decision("bf16", msg("host.decision.gpu_assumed"))
        unknown = next((gpu for gpu in gpus if gpu.capability is None), None)
        if unknown:
            return Decision("bf16", msg("host.decision.gpu_bf16_assumed", name=unknown.name))
        return Decision("bf16", msg("host.decision.gpu_bf16"))
    flags = cpu_bf16()
    if flags:
        return Decision("bf16", msg("host.decision.cpu_bf16", flags=", ".join(sorted(flags))))
    return Decision("fp32", msg("host.decision.cpu_no_bf16"))


def has_bf16(gpu: Gpu) -> bool:
    return best_type(gpu.capability, gpu.name) == "bf16"


def has_fp8(gpu: Gpu) -> bool:
    return gpu.capability is None or gpu.capability >= FP8_CAPABILITY


def best_type(capability: tuple[int, int] | None, name: str) -> str:
    """The type for which a GPU has tensor cores: bf16 (then also for fp16), fp16, or fp32 for none;
    an unknown GPU is assumed to be recent."""
    if capability is None or capability >= (8, 0):
        return "bf16"
    return "fp16" if capability >= (7, 0) and not NO_TENSOR_CORES.search(name) else "fp32"


def tf32(
    chosen: Decision, on: str, ranks: int, machine: GpuInventory, environ: Mapping[str, str]
) -> Decision:
    """Whether products that stay in fp32 may round their factors to TF32; `chosen`: precision."""
    if on == "cpu":
        return Decision(False, msg("host.decision.only_gpus"))
    for gpu in machine.gpus[:ranks]:
        if not has_bf16(gpu):  # both came with compute capability 8.0
            return Decision(False, msg("host.decision.no_tf32", name=gpu.name))
    if environ.get(NO_TF32_VARIABLE) == "0":
        return Decision(False, f"{NO_TF32_VARIABLE}=0")
    if environ.get(TF32_VARIABLE) == "1":
        return Decision(True, f"{TF32_VARIABLE}=1")
    if chosen.value == "fp32":
        return Decision(False, msg("host.decision.tf32_fp32"))
    return Decision(True, msg("host.decision.tf32_half", precision=chosen.value))


def cudnn_benchmark(on: str) -> Decision:
    """Whether cuDNN times its convolution algorithms at every new shape."""
    if on == "cpu":
        return Decision(False, msg("host.decision.only_gpus"))
    return Decision(False, msg("host.decision.cudnn_benchmark"))


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


def without_bf16(precision: str, gpus: Iterable[Gpu]) -> str:
    """The first GPU that only emulates the bf16 of this run: torch compiles no bf16 for it and runs
    such code eagerly (torch/_inductor/compile_fx.py); ''."""
    return next((g.name for g in gpus if precision == "bf16" and not has_bf16(g)), "")


def may_compile(config: Config, on: str) -> bool:
    return config.compile == "1" or (config.compile == "auto" and on == "cuda")


def compiled(
    config: Config, on: str, missing: Iterable[str] = (), no_bf16_on: str = ""
) -> Decision:
    """`missing`: what torch.compile needs and this machine lacks. `no_bf16_on`: `without_bf16`."""
    if config.compile != "auto":
        return Decision(config.compile == "1", AS_ASKED)
    if on == "cuda" and (lacks := ", ".join(missing)):
        return Decision(False, msg("host.decision.compile_lacks", lacks=lacks))
    if no_bf16_on:
        return Decision(False, msg("host.decision.compile_no_bf16", name=no_bf16_on))
    if on == "cuda":
        return Decision(True, msg("host.decision.compile_gpu"))
    return Decision(False, msg("host.decision.compile_cpu"))


def budget(on: str, ranks: int, machine: GpuInventory) -> int | None:
    """Free bytes for one rank: those of the fullest GPU, or its share of the host memory; None if
    unknown."""
    share = cgroups.available_memory() // ranks
    if on == "cpu":
        return share
    free = [g.free_bytes for g in machine.gpus[:ranks] if g.free_bytes is not None]
    if shares_host_memory(on, ranks, machine):
        free.append(max(0, share - RANK_RAM_BYTES))
    return min(free) if free else None


def shares_host_memory(on: str, ranks: int, machine: GpuInventory) -> bool:
    """Whether a GPU has the memory of the host (GB10, Jetson): a whole one that reports none."""
    return on == "cuda" and any(g.free_bytes is None and not g.mig for g in machine.gpus[:ranks])


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
    if isinstance(config.min_ranks, int):
        return Decision(RETRIES, msg("host.decision.default_of", script="--min_ranks"))
    return Decision(0, msg("host.decision.retries"))


def left_over(place: Topology) -> list[str]:
    """Plan note about ignored variables of another launcher; [] without any."""
    names = ", ".join(place.leftovers)
    return [msg("host.decision.leftovers", names=names)] if names else []
