"""plan.json: all decisions of a run, made before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from training.core.contracts.kinds import FieldValues, PlaceKind

if TYPE_CHECKING:
    from typing_extensions import NotRequired


class DecisionRecord(TypedDict):
    """A decided value and its reason (training.host.decisions); subclasses narrow the type."""

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
    "selective_checkpointing",
    "loss_chunks",
]


class CommandRecord(TypedDict):
    """The user's command."""

    script: str  # file name of the entry script, or train.py
    args: list[str]
    cwd: str


class PlaceRecord(TypedDict):
    """The role of the planning process (training.host.placement.Topology)."""

    kind: PlaceKind
    source: str  # who has started the ranks: training.host.topology
    reason: str
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int  # 0: unknown
    nnodes: int  # machines, from 1
    node_rank: int  # 0 to nnodes - 1
    master_addr: str  # '' on one machine
    master_port: int  # 0: any free one
    leftovers: Sequence[str]  # ignored variables of another launcher
    # the node that coordinates the run; missing in plans of early 0.1
    leader: NotRequired[int]


class GpuProcessRecord(TypedDict):
    pid: int
    used_bytes: int | None
    user: str  # '-': unknown
    command: str
    known: NotRequired[bool]  # False: a pid of the host, seen from a container


class GpuRecord(TypedDict):
    """A GPU when the run was planned (training.host.gpus.Gpu); None: not reported by the driver."""

    index: int  # among all GPUs of the machine, in PCI order
    uuid: str
    name: str
    total_bytes: int | None
    free_bytes: int | None
    use_percent: int | None  # 0 to 100
    temperature_c: int | None
    power_w: float | None
    capability: Sequence[int] | None  # major, minor
    processes: Sequence[GpuProcessRecord]  # that compute
    compute_mode: str | None
    mig: bool | None
    power_limit_w: float | None
    fan_percent: int | None  # 0 to 100
    slowdowns: Sequence[str] | None  # abnormal reasons for low clocks
    numa_node: NotRequired[int | None]  # this and the next two are missing in early 0.1
    pci: NotRequired[str | None]  # address
    nvlinks: NotRequired[int | None]  # active ones
    virtual: NotRequired[bool]  # vGPU; this and the next ones are missing in early 0.1
    peers: NotRequired[int | None]  # other GPUs of the machine that copy directly
    lanes: NotRequired[int | None]  # of PCIe, which card and slot have in common
    displays: NotRequired[Sequence[GpuProcessRecord]]  # processes that only draw


class VariableRecord(TypedDict):
    """An environment variable of the ranks."""

    name: str
    value: str
    why: str
    origin: str  # 'set here', 'kept', 'from the environment'


class TaskRecord(TypedDict):
    """The task that is trained."""

    name: str
    unit: str  # of batches and speed: tokens or samples
    file: str | None  # absolute path of a user's own task
    options: FieldValues


class InitRecord(TypedDict):
    """The weights that a run starts from."""

    file: str  # absolute path
    title: str
    bytes: int | None  # this and the next: None for a file of another program
    sha256: str | None
    averaged: NotRequired[bool]  # the moving average of --ema; missing in early 0.1


class BatchRecord(TypedDict):
    """One optimizer step (training.config.batch.Batch)."""

    device_sequences: int  # sequences per rank and micro-batch, from 1
    seq_len: int  # tokens; 1 if a sample is not a sequence
    world_size: int  # ranks
    accumulation: int  # micro-batches per rank and step, from 1


class MemoryRecord(TypedDict):
    """Estimated bytes per rank at the peak of a step, with the parts that the task knows."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    weight_copies_bytes: NotRequired[int]
    activations_bytes: int
    logits_bytes: NotRequired[int]
    block_bytes: NotRequired[int]
    updates_bytes: NotRequired[int]
    context_bytes: int
    saved_bytes: int
    average_bytes: NotRequired[int]  # of the weights; missing in early 0.1
    total_bytes: int
    needed_bytes: int  # with the required margin
    tight_bytes: int  # with a comfortable margin


class StepRecord(MemoryRecord):
    """The estimate with its inputs, in a task-specific format (read by
    training.tasks.spec.TaskSpec.step)."""

    load: FieldValues


class PlannedMemory(StepRecord):
    free_bytes: int | None  # for one rank; None: unknown


class CorpusRecord(TypedDict):
    """The training text before its preparation."""

    name: str
    files: int
    bytes: int


class ScriptRecord(TypedDict):
    """A user script that is launched unchanged."""

    path: str  # of a file as typed, or the name of a module
    args: list[str]
    python: str | None  # interpreter; None: a program that is executed directly
    python_reason: str
    module: NotRequired[bool]  # `path` is a module; missing in plans of early 0.1


class BindingRecord(TypedDict):
    """A rank that runs on the cores of one NUMA node."""

    node: int
    cores: list[int]  # logical ones that the launch may use


class NumaRecord(TypedDict):
    """training.host.numa.NumaPlan."""

    value: list[BindingRecord | None]  # of each rank of this machine; None: not bound
    memory: bool  # bound ranks prefer the memory of their node
    reason: str


class LostRank(TypedDict):
    """A rank whose GPU the run no longer uses."""

    seat: int  # its number among all planned ranks
    gpu: int | None  # index in PCI order; None: on the CPU
    uuid: str  # '': on the CPU
    cause: str  # catalogue ID
    step: int  # that had been started
    time: float  # unix s
    text: str  # one line
    node: NotRequired[int]  # of a run on several machines


class ElasticRecord(TypedDict):
    """What a run with --min_ranks was planned with, and what is left of it."""

    min_ranks: int
    ranks: int  # planned
    per_node: NotRequired[int]  # planned ranks of each machine, of a run on several
    device_batch_size: int | None  # planned; the current one is in the configuration
    # of this machine's planned ranks, then those of a script without a rank; [] on CPUs
    gpus: list[GpuRecord]
    bindings: list[BindingRecord | None]  # of this machine's planned ranks
    seats: list[int]  # planned numbers of the current ranks, in the order of ranks
    lost: list[LostRank]
    rejoined: list[int]  # planned numbers of ranks that were lost and came back
    defective: NotRequired[list[int]]  # those of them whose GPU was defective
    hosts: NotRequired[str]  # --hosts of a resume after a takeover, with the newest state first


class RanksPlan(TypedDict):
    """The part of a plan that the communication test needs."""

    local_ranks: int  # on this machine, from 1
    device: TextDecision  # cpu, cuda
    variables: list[VariableRecord]
    gpus: list[GpuRecord]  # in rank order, of this machine; [] on CPUs
    driver: str | None  # version
    torch: str | None  # version; None: not installed, or the ranks use another interpreter


class CommunicationRecord(TypedDict):
    """Measured communication between the GPUs of this machine."""

    gb_per_s: float  # size / time of a large all_reduce
    small_ms: float  # of an all_reduce of 1 KiB
    time: float  # of the test, unix s
    p2p: bool  # with peer-to-peer copies as far as NCCL uses them


class ExchangeRecord(TypedDict):
    """Predicted exchange of gradients in a step (training.plan.exchange)."""

    bytes: int  # of the gradients of a rank, before compression
    total_ms: float
    exposed_ms: float  # not hidden by the backward pass
    compute_ms: float | None  # of a rank; None: unknown, as the next two
    share: float | None  # of a step, 0 to 1: exposed
    speed_up: float | None  # over the fastest GPU alone


class StarterRecord(TypedDict):
    """The process that becomes the supervisor of this plan, or rank 0 of another launcher."""

    pid: int
    host: str
    boot: NotRequired[str]  # ID of its boot; missing in plans of early 0.1, like the next
    pid_namespace: NotRequired[str]  # of the PID
    ticks: NotRequired[int]  # of its start, since boot
    started: NotRequired[float]  # unix s: it ran then; only in `starter`


class PlanStart(RanksPlan):
    """A plan without its configuration. `NotRequired` fields are missing in the plan of a script,
    unless stated otherwise."""

    # run_reader.PLAN_VERSION; missing until a SLURM job starts
    schema_version: NotRequired[int]
    duet_version: NotRequired[str]  # that wrote the plan; missing before the release of 0.1
    created: float  # unix s
    launch: str  # 16 hex digits: the same on every machine of a start
    # only on a machine other than the first: whether it sees node 0's run directory
    shared: NotRequired[bool]
    command: CommandRecord
    origins: dict[str, str]  # configuration field → origin of its value, such as 'default'
    place: PlaceRecord
    ranks: int  # on all machines, from 1
    launcher: TextDecision  # spawn, torchrun, env
    numa: NotRequired[NumaRecord]  # missing in early 0.1
    retries: NumberDecision  # restarts in a row without progress, from 0
    master_port: int  # 0: any free one
    resume: bool
    notes: list[str]  # warnings as text
    text: list[str]  # the plan as text
    headline: list[str]  # sentences of it that the console of a local run shows
    run_name: NotRequired[str]  # this and the next two: once the run directory exists
    run_dir: NotRequired[str]
    log_file: NotRequired[str]
    starter: NotRequired[StarterRecord]  # missing in older plans, and in that of a queued job
    # of ranks that torchrun has started: its process on each machine (training.cli.restarted)
    agents: NotRequired[list[StarterRecord]]
    torchrun_id: NotRequired[str]  # its run ID; missing in plans of early 0.1
    submission: NotRequired[str]  # of a SLURM job: its folder of frozen code, such as code_2
    elastic: NotRequired[ElasticRecord]  # only of a run that may lose ranks
    script: NotRequired[ScriptRecord]  # only in the plan of a script
    communication: NotRequired[CommunicationRecord]  # of several GPUs, if it is known
    login_file: NotRequired[str | None]  # option file with the W&B key
    init_from: NotRequired[InitRecord]  # only of a run that starts from trained weights
    task: NotRequired[TaskRecord]  # missing in plans that predate tasks: gpt
    precision: NotRequired[TextDecision]  # bf16, fp16, fp8, fp32
    tf32: NotRequired[SwitchDecision]  # this and the next: missing in plans of early 0.1
    cudnn_benchmark: NotRequired[SwitchDecision]
    compile: NotRequired[SwitchDecision]
    static_graph: NotRequired[SwitchDecision]
    # bf16, none; this and the next three: missing in plans of early 0.1 and of one rank
    gradient_compression: NotRequired[TextDecision]
    bucket_mib: NotRequired[NumberDecision]  # DDP's buckets of gradients
    # of a compiled model on several GPUs of known bandwidth, or kept by a resume; else the task's
    blocks_per_graph: NotRequired[NumberDecision]
    exchange: NotRequired[ExchangeRecord]  # of GPUs whose bandwidth is known
    batch: NotRequired[BatchRecord]
    # sequences; this and the rest: only of gpt, and after a recovery
    device_batch_size: NotRequired[NumberDecision]
    activation_checkpointing: NotRequired[NumberDecision]  # whole blocks
    selective_checkpointing: NotRequired[NumberDecision]  # further blocks; not in earlier versions
    loss_chunks: NotRequired[NumberDecision]  # parts
    # of a run that was out of memory: a resume has at least these savings (with --deterministic
    # every resume has them)
    keeps_savings: NotRequired[bool]
    reported_memory: NotRequired[str]  # for this config, by its original authors
    memory: NotRequired[PlannedMemory]
    data: NotRequired[CorpusRecord]


class Plan(PlanStart):
    """plan.json."""

    config_file: str | None
    config: FieldValues


class TaskFields(TypedDict, total=False):
    """The fields of a plan decided by its task (training.tasks.planning.Decided)."""

    device_batch_size: NumberDecision
    activation_checkpointing: NumberDecision
    selective_checkpointing: NumberDecision
    loss_chunks: NumberDecision
    keeps_savings: bool
    memory: PlannedMemory
    reported_memory: str
    data: CorpusRecord


class GradientFields(TypedDict, total=False):
    """The fields of a plan about the exchange of gradients (training.plan.gradients)."""

    gradient_compression: TextDecision
    bucket_mib: NumberDecision
    blocks_per_graph: NumberDecision
    exchange: ExchangeRecord


class FrozenPlan(TypedDict):
    """plan.json of a SLURM job before its start: everything that does not depend on the machine."""

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
    submission: str
    init_from: NotRequired[InitRecord]
