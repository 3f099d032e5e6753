"""events.jsonl: what happened to a run, one line each, by any of its processes. The facts of each
kind of event."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

from training.core.contracts.kinds import FailureKind, VerdictKind

if TYPE_CHECKING:
    from typing_extensions import NotRequired

EventKind = Literal[
    "start", "resume", "eval", "checkpoint", "shards", "end", "warning", "injected", "verdict",
    "failure", "restart", "recovered", "given_up", "submitted", "requeue", "inspection",
]  # fmt: skip


class StartFacts(TypedDict):
    """The ranks train from here."""

    step: int  # done before
    world_size: int
    total_steps: int
    steps_per_epoch: int
    epochs: int


class CheckpointFacts(TypedDict):
    """'checkpoint': written; 'resume': continued from."""

    step: int
    path: str


class EndFacts(TypedDict):
    step: int
    exit_code: int


class ShardReport(TypedDict):
    """What a rank says of the sequences that it will take."""

    rank: int
    world_size: int
    dataset_sequences: int
    batches: int
    first_sequences: list[int]
    count: int
    digest: int  # 0 to 2**64 - 1: those of all ranks add up to that of the whole


class ShardsFacts(TypedDict):
    """What every rank has read of an epoch, compared: no sample twice, none left out."""

    epoch: int  # from 1
    proven_sequences: int
    pieces: str  # sequences, samples
    ranks: list[ShardReport]


class WarningFacts(TypedDict):
    code: str  # training.core.codes
    text: str
    rank: NotRequired[int]
    by: NotRequired[Literal["supervisor"]]  # who has seen it, where it was not the rank itself


class InjectedFacts(TypedDict):
    """A fault on purpose is about to happen."""

    fault: str
    rank: int
    text: str  # as in --inject
    pid: int


class VerdictFacts(TypedDict):
    """What a watch or the supervisor has judged, before the card."""

    kind: VerdictKind
    rank: int | None  # None: no single rank
    where: str | None  # file:line
    phase: str | None
    text: str  # one line, for people
    since_s: NotRequired[float]
    waiting: NotRequired[dict[str, str]]  # rank → where it waits
    folder: NotRequired[str]  # stacks of all ranks
    final: NotRequired[bool]  # False: the run goes on


class FailureFacts(TypedDict):
    cause: str  # id of the catalogue (training.diagnose.signatures)
    rank: int | None
    text: str


class RestartFacts(TypedDict):
    """The supervisor starts all ranks again; also in `restarts` of summary.json."""

    attempt: int  # from 2
    cause: str
    kind: FailureKind
    rank: int | None
    step: int  # that had been begun
    resumes_at: int  # step of the checkpoint
    steps_lost: int
    seconds_lost: float
    changes: dict[str, list[Any]]  # configuration field → [before, after]
    text: str


class RecoveredFacts(TypedDict):
    """Ranks train again after a restart."""

    attempt: int
    step: int
    seconds: float  # since the failure


class TextFacts(TypedDict):
    """'given_up'."""

    text: str


class SubmittedFacts(TypedDict):
    job: str  # SLURM's number


class RequeueFacts(TypedDict):
    job: str
    step: int  # saved


class EventRecord(TypedDict, total=False):
    """A line of events.jsonl as a reader finds it: `event` and `time` always, the rest by kind
    (above)."""

    time: float  # unix s
    event: str  # EventKind, or a kind of a later version
    text: str
    step: int
    rank: int | None
    cause: str
    total_steps: int
    steps_per_epoch: int
    epochs: int
