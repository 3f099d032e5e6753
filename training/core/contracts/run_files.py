"""Other files of a run directory: data.json, supervisor.json, summary.json, checkpoint manifest,
SLURM job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

from training.core.contracts.events import RestartFacts
from training.core.contracts.kinds import FieldValues, NotifyStatus, SummaryStatus
from training.core.contracts.plan import LostRank, TaskRecord

if TYPE_CHECKING:
    from typing_extensions import NotRequired


class DataRecord(TypedDict, total=False):
    """data.json: the prepared text (training.data.prepared_corpus.PreparedCorpus) and the resulting
    length of the training."""

    failed: int  # exit code of a failed preparation; the other fields are missing
    folder: str
    name: str
    documents: int
    train_tokens: int
    val_tokens: int
    tokenizer: str
    vocab: int
    token_bytes: int  # 2 or 4
    bos: int
    shard_tokens: int
    bytes_per_token: float
    total_steps: int
    steps_per_epoch: int
    epochs: int


class ProcessRecord(TypedDict):
    rank: int | None  # None: torchrun, which starts the ranks
    pid: int
    ticks: int  # of its start, since boot: identifies the process


class SupervisorRecord(TypedDict, total=False):
    """supervisor.json."""

    pid: int
    host: str
    boot: str  # ID of its boot; missing in early 0.1, like the next two
    pid_namespace: str  # of all PIDs
    launch: str  # of the plan
    started: float  # unix s
    ticks: int  # of its start, since boot: identifies the process
    ranks: list[ProcessRecord]  # of this machine; [] before they are started
    found: int  # ranks of a watched command that ran at the same time, at most


class ReplicaRecord(TypedDict):
    """replica.json: the newest checkpoint of which this machine has a copy. Those of an earlier
    launch may be of another training."""

    launch: str
    checkpoint: str  # name of its folder


class SummaryRecord(TypedDict):
    """summary.json of a training that finished or was stopped on request; in addition
    val_NAME_first and val_NAME_last of each score."""

    status: SummaryStatus
    exit_code: int
    launch: NotRequired[str]  # of the plan; missing in early 0.1
    time: float  # unix s
    seconds: float  # since begun_at
    begun_at: int  # last step before this start
    steps: int
    tokens: NotRequired[int]
    samples: NotRequired[int]
    parameters: int
    gradient_bytes: NotRequired[int]  # that a rank exchanges in a step; missing in early 0.1
    loss_first: float
    loss_last: float
    loss_begin: float  # mean over the first steps
    loss_end: float  # mean over the last steps
    bytes_per_token: float | None
    # medians of the last start; of all steps if it had no second one
    tokens_per_s: NotRequired[float]  # all ranks together
    samples_per_s: NotRequired[float]
    step_ms: float  # NaN without a recorded step
    mfu: float | None  # 0 to 1
    joules_per_unit: NotRequired[float | None]  # of all GPUs; missing in early 0.1
    memory_bytes: int | None  # peak of the last start, maximum over ranks
    skipped_steps: NotRequired[int]  # of fp16
    checkpoint: str  # folder
    sample: str | None  # generated text
    restarts: NotRequired[list[RestartFacts]]
    lost: NotRequired[list[LostRank]]  # at the end, of a run with --min_ranks
    val_bpb_first: NotRequired[float]  # bits per byte
    val_bpb_last: NotRequired[float]


class SweepRun(TypedDict):
    """One run of a sweep."""

    name: str  # of the run directory
    args: list[str]  # config and flags
    values: FieldValues  # of the fields in which the runs differ
    device: NotRequired[str]  # of its first plan: cuda or cpu
    config_sha256: NotRequired[str]  # of its config file; '' without one
    init_from: NotRequired[str]  # the file that --init_from meant; '' without


class SweepRecord(TypedDict):
    """sweep.json, which never changes: states of the runs are in their directories."""

    schema_version: int
    duet_version: str
    created: float  # unix s
    command: list[str]  # arguments of ./duet sweep
    cwd: str  # to which paths in `args` are relative
    ranks: int  # of each run
    device: str  # cuda if any of the runs uses GPUs, else cpu
    runs: list[SweepRun]


class PrintedFigures(TypedDict):
    """What a user script has printed until its end or failure; of the evaluations the best one, if
    it is known whether more is better, else the last one. None: unknown."""

    step: int | None
    loss: float | None
    loss_unit: str | None
    eval_name: str | None
    eval_unit: str | None
    eval: float | None
    eval_step: int | None
    tokens_per_s: NotRequired[float | None]  # median, all ranks together
    samples_per_s: NotRequired[float | None]


class ScriptSummary(TypedDict):
    """summary.json of a user script."""

    status: SummaryStatus
    ranks: int
    launch: NotRequired[str]  # of the plan; missing in early 0.1
    time: NotRequired[float]  # unix s
    seconds: float
    exit_code: int
    figures: NotRequired[PrintedFigures]
    restarts: NotRequired[list[RestartFacts]]
    lost: NotRequired[list[LostRank]]  # at the end, of a run with --min_ranks


class LossScaleRecord(TypedDict):
    """Loss scale of fp16 in the state of a checkpoint; missing with other precisions."""

    scale: float
    good_steps: int  # since it was changed
    skipped: int  # steps of the run


class ProfileEntry(TypedDict):
    """A kernel of a GPU, or an operator without those that it calls."""

    name: str
    count: float  # in a step
    ms: float  # in a step
    share: float  # of the step; kernels may run at the same time


class ProfileWait(TypedDict):
    """A call in which the host waits for its GPU; without a GPU, a collective."""

    name: str
    operator: str  # that makes the call; ''
    part: str  # as in `shares`
    count: float  # in a step
    ms: float  # in a step


class ProfileRecord(TypedDict):
    """profile/rank<r>.json: the digest of a trace (training.trainer.profile_digest)."""

    rank: int
    device: str  # cuda, cpu
    timeline: str  # gpu; host: of the rank, because no work of a GPU was recorded
    first_step: int
    last_step: int
    step_ms: float  # mean, with the profiler on
    # data, forward, backward, optimizer, communication, other, and idle of a GPU: their sum is 1
    shares: dict[str, float]
    overlapped: float  # share of the step with communication beside other work
    longest: list[ProfileEntry]
    waits: list[ProfileWait]
    trace: str  # file beside this one


class ScoreRecord(TypedDict):
    """The score that evaluations are compared by (training.core.metric_units.main_score)."""

    name: str  # val_NAME
    value: float


class ManifestRecord(TypedDict, total=False):
    """manifest.json of a checkpoint: position, model, data and checksums."""

    format: int
    step: int
    epoch: int  # from 0
    used: int  # sequences of this epoch used by all ranks together
    tokens: int
    shape: dict[str, Any]  # of the model, task-specific; compared on resume
    optimizer: str
    optimizer_package: str  # that defines its class, "": no installed one; missing in early 0.1
    world_size: int
    # task-specific; gpt: {folder, tokens_sha256}; video_restoration: a digest of each part, one of
    # both in early 0.1
    data: Any
    samples: int  # of the training data; missing in early 0.1
    # of the validation data: samples, and of video_restoration frames of each clip; missing without
    # a validation and in early 0.1
    measured: dict[str, int]
    seed: int  # of the order of an epoch; missing in early 0.1
    tokenizer: str | None
    task: str  # missing in checkpoints that predate tasks: gpt
    task_sha256: str  # of a user's task file, as it was run
    run: str
    # of the evaluation at this step; None: there was none; missing in early 0.1
    score: ScoreRecord | None
    unevaluated: bool  # a stop request came before the evaluation at this step; else missing
    ema: float  # decay of the average in state.pt; only with --ema
    used_s: float  # of --max_time, over all starts; only with such a limit
    bytes: int  # of state.pt
    sha256: str
    own_sha256: str  # of all other fields


class ExportRecord(TypedDict):
    """duet.json of an exported model (training.tasks.weights)."""

    format: int
    duet_version: str
    task: TaskRecord  # the file of a user's task is relative to the folder
    config: FieldValues  # fields that may matter to the model
    shape: FieldValues
    tokenizer: str | None  # as in ManifestRecord
    run: str
    step: int
    ema: NotRequired[float]  # the weights are a moving average with this decay
    precision: NotRequired[str]  # this and the next as decided by the plan; missing in early 0.1
    tf32: NotRequired[bool]
    weights: str  # file, with its size and checksum
    bytes: int
    sha256: str


class ArchivedFile(TypedDict):
    bytes: int
    sha256: str


class ArchiveIndex(TypedDict):
    """The first member of an archived run (training.core.archive)."""

    version: int
    duet_version: str
    name: str  # of the run: the folder of all members
    created: float  # unix s
    files: dict[str, ArchivedFile]  # by member name
    left_out: list[str]  # links and other special files; checkpoints, if they were not wanted


class JobStart(TypedDict):
    job: str
    start: int  # from 1
    time: float  # unix s
    step: int  # last one saved before
    nodes: int


class CodeRecord(TypedDict):
    """The frozen copy of the code of a SLURM job."""

    revision: str | None
    changed: bool | None  # differs from the revision
    files: int
    left_out: list[str]
    folders: NotRequired[dict[str, int]]  # of data → number of files not copied
    sentence: str


class ElasticJob(TypedDict):
    """A SLURM job that continues without a lost node."""

    min_ranks: int
    no_kill: bool  # submitted so that SLURM does not end it when a node fails; False: unknown
    rejoin: bool  # the launcher of a node that has left the run is started again


class JobRecord(TypedDict):
    """code.json of a SLURM job."""

    created: float  # unix s
    name: str  # what selects the run without --out_dir: its name or path
    typed: list[str]
    again: NotRequired[list[str]]  # flags that a resume does not keep
    code: CodeRecord
    new_run: bool
    nodes: int
    ranks_per_node: int
    elastic: NotRequired[ElasticJob | None]
    flags: list[str]
    linked: NotRequired[list[str]]  # what is not frozen beside the task file
    live_task: NotRequired[str | None]  # a task file that is not frozen
    out_dir: str
    log_dir: str
    job: str | None
    cluster: NotRequired[str]  # of the job, once it has begun
    starts: list[JobStart]


class NotificationRecord(TypedDict):
    """The standard input of the --notify command, without secrets."""

    name: str
    status: NotifyStatus
    exit_code: int
    title: str
    text: str
    cause: str | None
    rank: int | None
    advice: list[str]
    steps: int | None
    loss: float | None
    eval: dict[str, float] | None  # val_NAME; of a script as printed
    seconds: float  # since the run was planned
    restarts: int
    host: str
    run_dir: str | None
    report: str | None  # file
    log: str | None  # file
