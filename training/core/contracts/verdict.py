"""Records of stuck or failed ranks: hangs/<time>/verdict.json, ranks/rank<r>.error.json,
failure.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from training.core.contracts.kinds import FailureKind, HangKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import NotRequired

    from training.core.contracts.plan import GpuProcessRecord, LostRank
    from training.core.contracts.run_files import PrintedFigures


class VerdictRecord(TypedDict):
    """verdict.json: the verdict of a watchdog on a hang, stored with the stacks of all ranks."""

    kind: HangKind
    rank: int | None  # the guilty one; None: no single rank
    where: str | None  # file:line of the user's code
    phase: str | None  # by the heartbeat of a training
    text: str  # one line of text
    since_s: float
    waiting: dict[str, str]  # the other ranks → where they wait


class ChainedError(TypedDict):
    type: str  # class name of the exception
    message: str


class ReportedError(ChainedError):
    """An exception and its causes."""

    before: NotRequired[list[ChainedError]]  # only in a script
    traceback: NotRequired[list[str]]


class BlockRecord(TypedDict):
    bytes: int  # of one
    count: int


class ExhaustedMemoryRecord(TypedDict):
    """The memory of a GPU when an allocation failed (training.trainer.memory_snapshot)."""

    file: NotRequired[str]  # the whole snapshot, for pytorch.org/memory_viz
    requested_bytes: NotRequired[int]
    allocated_bytes: int
    reserved_bytes: int  # including free parts
    largest_free_bytes: int  # in one piece
    largest: list[BlockRecord]  # by total size


class OccupiedRecord(TypedDict):
    """A GPU whose memory other processes have exhausted (training.launcher.exhausted_gpu)."""

    gpu: int  # index on its machine
    held_bytes: int  # after the ranks had ended
    total_bytes: int
    processes: Sequence[GpuProcessRecord]  # by memory; [] if the driver lists none


class KernelRecord(TypedDict):
    """Messages of the kernel during an attempt (training.launcher.kernel_evidence)."""

    source: str  # where they were read; "": nowhere, for `reason`
    lines: list[str]  # about the processes and GPUs of the run
    reason: NotRequired[str]


class RejectedRecord(TypedDict):
    """A problem of the input."""

    code: str  # training.core.codes; '' where it could only be printed
    text: str  # its lines, as printed


class RankErrorRecord(ReportedError):
    """ranks/rank<r>.error.json: the exception that ended a rank, written by the rank itself
    (training.trainer.error_file, lib/run_script.py). `type` is SystemExit if a script called
    sys.exit."""

    rank: int
    guilty_rank: int  # another rank if this one only noticed its failure
    time: float  # unix s
    where: str  # file:line of the user's code; '' unknown
    code: str | None  # that line
    phase: str | None
    disk_full: bool
    file: NotRequired[str]  # absolute path, of an error of the operating system that has one
    stopped: NotRequired[str]  # message of a run that stopped itself
    rejected: NotRequired[list[RejectedRecord]]  # what this rank alone reports
    exit_code: NotRequired[int]  # of a rank that has stopped or rejected its input
    memory: NotRequired[ExhaustedMemoryRecord]  # the GPU had none left
    collective: NotRequired[dict[str, object]]  # the newest one: an entry of torch's recorder
    process: NotRequired[int]  # of mp.spawn in that rank, which raised it; not in the file
    pid: NotRequired[int]  # of that process


class EndRecord(TypedDict):
    """The end of a run, from its summary or failure."""

    # catalogue ID (training.diagnose.signatures), 'unknown', 'exception', 'exit_status' or 'none'
    cause: str
    kind: FailureKind
    rank: int | None  # the guilty one
    status: int  # exit status of the guilty process, or minus the signal number
    summary: str  # one line
    where: str | None  # file:line
    evidence: list[str]
    stacks: str | None  # folder
    memory: NotRequired[ExhaustedMemoryRecord]  # the GPU of `rank` had none left
    occupied: NotRequired[OccupiedRecord]  # the GPU of `rank`, by others: the reason of a gpu_oom
    kernel: NotRequired[KernelRecord]  # if it may explain the cause
    full_folder: NotRequired[str]  # on the full disk, if not the run directory's; "": unknown
    advice: NotRequired[list[str]]  # derived from the other fields, and the kernel's messages


class FailureRecord(EndRecord):
    """failure.json: the failure of a start, or its immediate stop on request; source of the
    failure card."""

    node: NotRequired[int]  # index of the machine, if it is another one or one of several
    process: NotRequired[int]  # of mp.spawn in `rank`, which raised the exception
    spawns: NotRequired[bool]  # each of several ranks of a machine has started all ranks itself
    ranks: NotRequired[list[int]]  # several have the same error as `rank`, which is one of them
    victim: bool  # the rank only lost its connection to another one
    step: int  # last one begun; 0 before the first
    phase: str | None
    phases: dict[str, str]  # rank → its phase
    since_s: float | None  # of a hang
    waiting: dict[str, str]  # of a hang: rank → where it waits
    may_end: NotRequired[bool]  # of a hang: the guilty rank may only be slow
    exit_code: int  # of the launcher, 0 to 255
    log: str
    torn_down: bool  # a script had finished its work
    launch: NotRequired[str]  # of the plan; missing in early 0.1
    time: float  # unix s
    gpu: NotRequired[int]  # index of that GPU on its machine, if torch's message has another one
    threads: NotRequired[dict[str, str]]  # rank → exception that has ended a thread of it
    lost_ranks: NotRequired[list[int]]  # whose GPUs the driver no longer lists
    lost: NotRequired[list[LostRank]]  # before this failure, of a run with --min_ranks
    figures: NotRequired[PrintedFigures]  # of a user script, as in its summary
    suspect_gpu: NotRequired[bool]  # a defective GPU of `rank` may be the cause
    rejected: NotRequired[list[RejectedRecord]]  # reported by another rank than 0
    blocked: NotRequired[str]  # ranks that even SIGKILL does not end, on one of several machines
    worker: NotRequired[bool]  # a data-loader worker of `rank` lacked memory, not the rank itself
    oom_kill: NotRequired[bool]  # the kernel killed the rank, or a process below it, for memory


class DiagnosisRecord(TypedDict):
    """The output of `diagnose --json`."""

    schema_version: int  # training.diagnose.result.SCHEMA_VERSION
    cause: str  # catalogue ID
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
    lines: list[str]  # evidence in the log
    signature: str | None  # signature ID
    source: str  # cited by the catalogue
    run: str | None  # run directory
    ranks: NotRequired[list[int]]  # as in the run's own record
    phase: NotRequired[str]  # of the rank, by the run's own record
    gpu: NotRequired[int]  # the same
    process: NotRequired[int]  # the same
    memory: NotRequired[ExhaustedMemoryRecord]  # the same
    occupied: NotRequired[OccupiedRecord]  # the same
    jobs: NotRequired[int]  # separate jobs in `file`, of which the last one is diagnosed
    jobs_at_least: NotRequired[bool]  # `jobs` is a lower bound
