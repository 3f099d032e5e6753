"""What is judged of stuck or failed ranks: hangs/<time>/verdict.json, ranks/rank<r>.error.json,
failure.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from training.core.contracts.kinds import FailureKind, HangKind

if TYPE_CHECKING:
    from typing_extensions import NotRequired


class VerdictRecord(TypedDict):
    """verdict.json beside the stacks of all ranks: a watch has found that nobody makes progress."""

    kind: HangKind
    rank: int | None  # the guilty one; None: no single rank
    where: str | None  # file:line of its own code
    phase: str | None  # of a training by heartbeats: what it was doing
    text: str  # one line, for people
    since_s: float
    waiting: dict[str, str]  # the other ranks → where they wait


class ChainedError(TypedDict):
    type: str  # class name of the exception
    message: str


class ReportedError(ChainedError):
    """An exception, and what it followed from."""

    before: NotRequired[list[ChainedError]]  # of a script


class RankErrorRecord(ReportedError):
    """ranks/rank<r>.error.json: the exception that ended a rank, by the rank itself
    (training.trainer.error_file, lib/run_script.py). `type` is SystemExit where a script left by
    sys.exit."""

    rank: int
    guilty_rank: int  # what another rank did can be noticed here
    time: float  # unix s
    where: str  # file:line of the user's own code; '' unknown
    code: str | None  # that line
    phase: str | None
    disk_full: bool
    traceback: list[str]
    stopped: NotRequired[str]  # of a run that stops itself: what it has said


class EndedRecord(TypedDict):
    """ranks/rank<r>.ended: a script came to its end, or called sys.exit with 0, 75 or 130."""

    time: float  # unix s
    where: str  # file:line of the sys.exit; ''
    status: NotRequired[int]  # 0 where an earlier version wrote the record


class EndRecord(TypedDict):
    """How a run has ended, as far as its summary or its failure tells."""

    # id of the catalogue (training.diagnose.signatures), 'unknown', 'exception', 'exit_status',
    # 'none'
    cause: str
    kind: FailureKind
    rank: int | None  # the guilty one
    status: int  # of the guilty process: exit status, or minus the signal
    summary: str  # one line
    where: str | None  # file:line
    evidence: list[str]
    stacks: str | None  # folder


class FailureRecord(EndRecord):
    """failure.json: how a start has failed, or that it was stopped at once; the card that a person
    reads is drawn from it."""

    node: NotRequired[int]  # machine, where it was another one, or one of several
    victim: bool  # the rank only lost another one
    step: int  # that had been begun; 0 before the first
    phase: str | None
    phases: dict[str, str]  # rank → what it was doing
    since_s: float | None  # of a hang
    waiting: dict[str, str]  # of a hang: rank → where it waits
    exit_code: int  # of the launcher, 0 to 255
    log: str
    torn_down: bool  # a script had done its work
    time: float  # unix s
    advice: NotRequired[list[str]]  # added last, from the rest


class DiagnosisRecord(TypedDict):
    """What `diagnose --json` prints."""

    schema_version: int  # training.diagnose.result.SCHEMA_VERSION
    cause: str  # id of the catalogue
    rank: int | None
    line: int | None  # number in `file`, from 1
    evidence: str
    confidence: str  # high, medium, low
    summary: str
    advice: list[str]
    also: list[str]  # other causes
    title: str
    file: str | None
    where: str | None  # file:line
    lines: list[str]  # the proof
    signature: str | None  # its id
    source: str  # what the catalogue cites
    run: str | None  # its directory
