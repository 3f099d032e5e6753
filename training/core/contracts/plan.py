"""plan.json: everything that will be done, decided before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from training.core.contracts.kinds import CheckStatus, FieldValues, PlaceKind

if TYPE_CHECKING:
    from typing_extensions import NotRequired


class DecisionRecord(TypedDict):
    """A decided value and why (training.host.decisions). Which type the value has depends on what
    is decided: the plan says it."""

    value: Any
    reason: str


class TextDecision(TypedDict):
    value: str
    reason: str


class NumberDecision(TypedDict):
    value: int
    reason: str


class SwitchDecision(TypedDict):
    value: bool
    reason: str


DecisionName = Literal[
    "launcher",
    "device",
    "precision",
    "compile",
    "device_batch_size",
    "activation_checkpointing",
    "loss_chunks",
]


class CommandRecord(TypedDict):
    """How the user has started it."""

    script: str  # file name of the entry script, or train.py
    args: list[str]
    cwd: str


class PlaceRecord(TypedDict):
    """Where the planning process stands in the training (training.host.placement.Topology)."""

    kind: PlaceKind
    source: str  # who told: nobody, flags, torchrun, platform, slurm
    reason: str
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int  # 0: unknown
    nnodes: int  # machines, from 1
    node_rank: int  # 0 to nnodes - 1
    master_addr: str  # '' on one machine
    master_port: int  # 0: any free one
    leftovers: Sequence[str]  # variables of another launcher that are not followed


class GpuProcessRecord(TypedDict):
    pid: int
    used_bytes: int | None
    user: str  # '-': unknown
    command: str


class GpuRecord(TypedDict):
    """A GPU when the run was planned (training.host.gpus.Gpu); None where the driver does not
    say."""

    index: int  # among all GPUs of the machine, in PCI order
    uuid: str
    name: str
    total_bytes: int | None
    free_bytes: int | None
    use_percent: int | None  # 0 to 100
    temperature_c: int | None
    power_w: float | None
    capability: Sequence[int] | None  # major, minor
    processes: Sequence[GpuProcessRecord]
    compute_mode: str | None
    mig: bool | None
    power_limit_w: float | None
    fan_percent: int | None  # 0 to 100
    slowdowns: Sequence[str] | None  # why its clocks are low, where that means trouble


class VariableRecord(TypedDict):
    """An environment variable of the ranks."""

    name: str
    value: str
    why: str
    origin: str  # 'set here', 'kept', 'from the environment'


class TaskRecord(TypedDict):
    """What is trained."""

    name: str
    unit: str  # what its batches and speed count: tokens or samples
    file: str | None  # absolute path of a user's own task
    options: FieldValues


class BatchRecord(TypedDict):
    """One optimizer step (training.config.batch.Batch)."""

    device_sequences: int  # sequences per rank and micro-batch, from 1
    seq_len: int  # tokens; 1 where a sample is no sequence
    world_size: int  # ranks
    accumulation: int  # micro-batches per rank and step, from 1


class MemoryRecord(TypedDict):
    """Estimated bytes per rank at the peak of a step; the parts as far as the task knows them."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    weight_copies_bytes: NotRequired[int]
    activations_bytes: int
    logits_bytes: NotRequired[int]
    block_bytes: NotRequired[int]
    context_bytes: int
    saved_bytes: int
    total_bytes: int
    needed_bytes: int  # with the margin that decides
    tight_bytes: int  # with room to spare


class StepRecord(MemoryRecord):
    """With what it was estimated for, in the task's own terms (training.tasks.spec.TaskSpec.step
    reads it)."""

    load: FieldValues


class PlannedMemory(StepRecord):
    free_bytes: int | None  # for one rank; None: unknown


class CorpusRecord(TypedDict):
    """The text that a run trains on, before it is prepared."""

    name: str
    files: int
    bytes: int


class ScriptRecord(TypedDict):
    """A user script that is launched unchanged."""

    path: str
    args: list[str]
    python: str | None  # None: a program that is executed directly
    python_reason: str


class RanksPlan(TypedDict):
    """What the communication test needs of a plan."""

    local_ranks: int  # on this machine, from 1
    device: TextDecision  # cpu, cuda
    variables: list[VariableRecord]
    gpus: list[GpuRecord]  # in rank order, of this machine; [] on CPUs
    driver: str | None  # version
    torch: str | None  # version; None: not installed, or not this interpreter's


class PlanStart(RanksPlan):
    """A plan before its configuration is in it. `NotRequired` fields: of a training where no other
    word stands behind them, missing in the plan of a script."""

    # run_reader.PLAN_VERSION; missing where a SLURM job has not started
    schema_version: NotRequired[int]
    duet_version: NotRequired[str]  # which wrote it; missing before 0.1 was released
    created: float  # unix s
    launch: str  # 16 hex digits: the same on every machine of a start
    command: CommandRecord
    origins: dict[str, str]  # configuration field → where its value comes from; 'default'
    place: PlaceRecord
    ranks: int  # on all machines, from 1
    launcher: TextDecision  # spawn, torchrun, env
    retries: NumberDecision  # restarts in a row without progress, from 0
    master_port: int  # 0: any free one
    resume: bool
    notes: list[str]  # warnings, for people
    text: list[str]  # the plan in sentences, for people
    run_name: NotRequired[str]  # this and the next two: once the run directory is made
    run_dir: NotRequired[str]
    log_file: NotRequired[str]
    script: NotRequired[ScriptRecord]  # of a script only
    login_file: NotRequired[str | None]  # option file with the key for W&B
    task: NotRequired[TaskRecord]  # missing in a plan from before there were several: gpt
    precision: NotRequired[TextDecision]  # bf16, fp32
    compile: NotRequired[SwitchDecision]
    static_graph: NotRequired[SwitchDecision]
    batch: NotRequired[BatchRecord]
    # sequences; this and the rest: of gpt, and after a recovery
    device_batch_size: NotRequired[NumberDecision]
    activation_checkpointing: NotRequired[NumberDecision]  # blocks
    loss_chunks: NotRequired[NumberDecision]  # parts
    memory: NotRequired[PlannedMemory]
    data: NotRequired[CorpusRecord]


class Plan(PlanStart):
    """plan.json."""

    config_file: str | None
    config: FieldValues


class TaskFields(TypedDict, total=False):
    """The fields of a plan that its task decides (training.tasks.planning.Decided)."""

    device_batch_size: NumberDecision
    activation_checkpointing: NumberDecision
    loss_chunks: NumberDecision
    memory: PlannedMemory
    data: CorpusRecord


class FrozenPlan(TypedDict):
    """plan.json of a SLURM job that has not started yet: what does not depend on the machine."""

    created: float  # unix s
    command: CommandRecord
    config_file: str | None
    task: TaskRecord
    config: FieldValues
    login_file: str | None
    origins: dict[str, str]
    ranks: int
    run_name: str
    run_dir: str


class CheckRecord(TypedDict):
    """A line of the resource report (preflight.json)."""

    code: NotRequired[str]  # docs/codes.md; missing in early 0.1
    name: str
    status: CheckStatus
    text: str
    fixes: list[str]  # commands


class PreflightRecord(TypedDict):
    """preflight.json."""

    checks: list[CheckRecord]
