"""events.jsonl: the events of a run, one line each, written by any of its processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

from training.core.contracts.kinds import FailureKind, VerdictKind
from training.core.contracts.plan import LostRank

if TYPE_CHECKING:
    from typing_extensions import NotRequired

EventKind = Literal[
    "start", "resume", "eval", "checkpoint", "shards", "end", "warning", "injected", "verdict",
    "failure", "restart", "recovered", "pace", "given_up", "takeover", "submitted", "requeue",
    "inspection", "replica",
]  # fmt: skip


class StartLength(TypedDict):
    """Length of the training; 0: only the time ends it."""

    total_steps: int
    steps_per_epoch: int
    epochs: int


class StartFacts(StartLength):
    """The ranks begin to train."""

    step: int  # completed before
    world_size: int


class CheckpointFacts(TypedDict):
    """'checkpoint': the saved one; 'resume': the one to resume from."""

    step: int
    path: str


class EndFacts(TypedDict):
    step: int
    exit_code: int


class ShardReport(TypedDict):
    """The sequences of an epoch assigned to one rank."""

    rank: int
    world_size: int
    dataset_sequences: int
    batches: int
    first_sequences: list[int]
    count: int
    digest: int  # 0 to 2**64 - 1; the sum over all ranks is the digest of the whole


class ShardsFacts(TypedDict):
    """The shares of all ranks, compared: no sample twice, none left out."""

    epoch: int  # from 1
    proven_sequences: int
    pieces: str  # sequences, samples
    ranks: list[ShardReport]


class WarningFacts(TypedDict):
    code: str  # training.core.codes
    text: str
    rank: NotRequired[int]
    by: NotRequired[Literal["supervisor"]]  # the observer, if not the rank itself


class InjectedFacts(TypedDict):
    """A fault is about to be injected."""

    fault: str
    rank: int
    text: str  # as in --inject
    pid: int


class VerdictFacts(TypedDict):
    """A verdict of a watchdog or the supervisor, before the failure card."""

    kind: VerdictKind
    rank: int | None  # None: no single rank
    where: str | None  # file:line
    phase: str | None
    text: str  # one line of text
    since_s: NotRequired[float]
    waiting: NotRequired[dict[str, str]]  # rank → where it waits
    folder: NotRequired[str]  # stacks of all ranks
    final: NotRequired[bool]  # False: the run continues


class FailureFacts(TypedDict):
    cause: str  # catalogue ID (training.diagnose.signatures)
    rank: int | None
    text: str


class RestartFacts(TypedDict):
    """The supervisor restarts all ranks; also in `restarts` of summary.json."""

    attempt: int  # from 2
    cause: str
    kind: FailureKind
    rank: int | None
    step: int  # last one begun
    resumes_at: int  # step of the checkpoint
    steps_lost: int
    seconds_lost: float
    changes: dict[str, list[Any]]  # configuration field → [before, after]
    ranks: NotRequired[list[int]]  # [before, after], if they differ; with the next two
    lost: NotRequired[list[LostRank]]  # by this failure
    back: NotRequired[list[int]]  # planned numbers of ranks whose GPUs work again
    expected_slowdown: NotRequired[float]  # time of a step after / before
    text: str


class RecoveredFacts(TypedDict):
    """The first step after a restart."""

    attempt: int
    step: int
    seconds: float  # since the failure
    resumes_at: int  # step of the checkpoint that was loaded: earlier if the newest is damaged
    steps_lost: int
    text: NotRequired[str]  # where these two differ from those of the restart


class PaceFacts(TypedDict):
    """The measured time of a step after a restart with another number of ranks."""

    attempt: int
    ranks: list[int]  # before, after
    step_ms: list[float]  # median before, after
    expected_slowdown: float  # time of a step after / before
    slowdown: float
    text: str


class TextFacts(TypedDict):
    """'given_up'."""

    text: str


class ReplicaFacts(TypedDict):
    """Another machine, with a disk of its own, has a verified copy of this checkpoint."""

    step: int
    node: int
    seconds: float
    bytes: int  # sent, with the records of the run


class TakeoverFacts(TypedDict):
    """Another machine coordinates the run from now on."""

    node: int
    text: str


class SubmittedFacts(TypedDict):
    job: str  # SLURM job ID
    cluster: str  # "": the one that commands use by default


class RequeueFacts(TypedDict):
    job: str
    step: int  # saved


class EventRecord(TypedDict, total=False):
    """A line of events.jsonl as read: always `event` and `time`; other fields depend on the kind
    (above)."""

    time: float  # unix s
    event: str  # EventKind, or a kind of a later version
    text: str
    code: str  # of a warning
    step: int
    rank: int | None
    cause: str
    total_steps: int
    steps_per_epoch: int
    epochs: int
