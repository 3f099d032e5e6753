"""The other files of a run directory: data.json, supervisor.json, summary.json, a checkpoint's
manifest, a job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

from training.core.contracts.events import RestartFacts
from training.core.contracts.kinds import NotifyStatus, SummaryStatus

if TYPE_CHECKING:
    from typing_extensions import NotRequired


class DataRecord(TypedDict, total=False):
    """data.json: the prepared text (training.data.prepare.PreparedCorpus) and the length that
    follows from it."""

    failed: int  # exit code: nothing was prepared, and the rest is missing
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
    rank: int | None  # None: torchrun, which has ranks of its own
    pid: int


class SupervisorRecord(TypedDict, total=False):
    """supervisor.json."""

    pid: int
    host: str
    started: float  # unix s
    ranks: list[ProcessRecord]  # of this machine; [] before they are started


class SummaryRecord(TypedDict):
    """summary.json of a training that has come to its end or was stopped on request; beside it
    val_NAME_first and val_NAME_last of each score."""

    status: SummaryStatus
    exit_code: int
    time: float  # unix s
    seconds: float  # since begun_at
    begun_at: int  # step that this start began after
    steps: int
    tokens: NotRequired[int]
    samples: NotRequired[int]
    parameters: int
    loss_first: float
    loss_last: float
    loss_begin: float  # mean over the first steps
    loss_end: float  # mean over the last steps
    bytes_per_token: float | None
    tokens_per_s: NotRequired[float]  # median, all ranks together
    samples_per_s: NotRequired[float]
    step_ms: float  # median
    mfu: float | None  # median, 0 to 1
    memory_bytes: int | None  # the most of any rank
    checkpoint: str  # its folder
    sample: str | None  # text
    restarts: NotRequired[list[RestartFacts]]
    val_bpb_first: NotRequired[float]  # bits per byte
    val_bpb_last: NotRequired[float]


class ScriptSummary(TypedDict):
    """summary.json of a user script."""

    status: SummaryStatus
    ranks: int
    seconds: float
    exit_code: int


class ManifestRecord(TypedDict, total=False):
    """manifest.json of a checkpoint: what it belongs to, and how to prove it whole."""

    format: int
    step: int
    epoch: int  # from 0
    used: int  # sequences of this epoch that all ranks together have used
    tokens: int
    shape: dict[str, Any]  # of the model, by the task: what a resume compares
    optimizer: str
    world_size: int
    data: Any  # of the task: what it was trained on; gpt's is {folder, tokens_sha256}
    tokenizer: str | None
    task: str  # missing in a checkpoint from before there were several: gpt
    run: str
    bytes: int  # of state.pt
    sha256: str
    own_sha256: str  # of everything else here


class JobStart(TypedDict):
    job: str
    start: int  # from 1
    time: float  # unix s
    step: int  # saved before
    nodes: int


class CodeRecord(TypedDict):
    """The frozen copy of the code."""

    revision: str | None
    changed: bool | None  # more than that revision
    files: int
    left_out: list[str]
    sentence: str


class JobRecord(TypedDict):
    """code.json of a SLURM job."""

    created: float  # unix s
    name: str
    typed: list[str]
    code: CodeRecord
    new_run: bool
    nodes: int
    ranks_per_node: int
    flags: list[str]
    out_dir: str
    log_dir: str
    job: str | None
    starts: list[JobStart]


class NotificationRecord(TypedDict):
    """What the command of --notify gets on its standard input: nothing in it is secret."""

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
    eval: dict[str, float] | None  # val_NAME
    seconds: float  # since it was planned
    restarts: int
    host: str
    run_dir: str | None
    report: str | None  # file
    log: str | None  # file
