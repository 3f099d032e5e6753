"""State of a run or a log at one moment, printed by `monitor --json` and shown on every screen.
None: unknown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, final

from training.core.contracts.kinds import RunStatus

if TYPE_CHECKING:
    from typing_extensions import NotRequired, ReadOnly


class RunFacts(TypedDict):
    kind: Literal["run", "log"]
    source: str | None  # of a log and of a script: the framework whose log lines are parsed
    name: str
    dir: str | None
    script: str | None  # entry script
    program: str | None  # user script
    task: str | None
    ranks: int | None
    planned_ranks: NotRequired[int]  # only of a run that has lost ranks
    device: str | None
    precision: str | None
    state: RunStatus
    reason: str | None  # explanation of an unclear state
    exit_code: int | None
    restarts: int
    warnings: int
    first_event_unix_s: float | None  # the same for all starts of a run
    started_unix_s: float | None
    ended_unix_s: float | None
    supervisor_pid: int | None
    supervisor_alive: bool | None


class ProgressState(TypedDict):
    scope: NotRequired[Literal["epoch", "run"]]  # of a log: what steps and times refer to
    step: int | None
    total_steps: int | None
    percent: float | None  # 0 to 100
    epoch: float | None
    epochs: int | None
    elapsed_s: float | None
    eta_s: float | None


class EvaluationState(TypedDict):
    """The metric that evaluations are compared by."""

    eval_name: str | None
    eval_unit: str | None
    eval_last: float | None
    eval_best: float | None
    eval_best_step: int | None
    eval_averaged: bool  # whether eval_last is of the averaged weights (--ema)


class LogTraining(EvaluationState):
    """Metrics available from a log and from the records of a run."""

    loss: float | None
    loss_unit: str | None
    bytes_per_token: float | None
    loss_is_finite: bool | None
    lr: float | None
    grad_norm: float | None
    unit: str | None
    tokens: NotRequired[int | None]
    samples: NotRequired[int | None]
    tokens_per_s: NotRequired[float | None]
    samples_per_s: NotRequired[float | None]
    tokens_per_s_of: NotRequired[Literal["device", "run"] | None]  # of a log
    mfu: float | None  # 0 to 1
    joules_per_unit: float | None  # of all GPUs, for a token or sample; None in a log
    memory_bytes: float | None  # maximum over ranks
    step_ms_median: float | None
    step_ms_p95: float | None
    steps_measured: int  # of this start
    told_every_s: NotRequired[float | None]  # of a log: usual time between two lines of progress


class TrainingState(LogTraining):
    last_step_unix_s: float | None  # of this start
    loss_scale: float | None  # of fp16; this and the next: None of a log
    skipped_steps: int | None


class CurveState(TypedDict):
    over: NotRequired[str]  # of a log without steps: the unit of the x-axis
    points: list[dict[str, float]]  # step, and loss or speed


class RankState(TypedDict):
    rank: int
    pid: int | None
    alive: bool | None
    epoch: int | None
    step: int | None
    phase: str | None
    doing: str | None  # phase and step as text
    beat_age_s: float | None
    beat_unix_s: float | None
    late: NotRequired[bool]  # this and the next two are added after the analysis of the run
    compute_ms_median: NotRequired[float | None]
    memory_bytes: NotRequired[float | None]
    output_age_s: NotRequired[float]  # this and the next: of a user script
    last_line: NotRequired[str | None]
    # with its children
    cpu_percent: NotRequired[float | None]  # 100: one core
    rss_bytes: NotRequired[int]
    gpu_bytes: NotRequired[int | None]


class GpuProcessState(TypedDict):
    pid: int
    user: str
    command: str
    used_bytes: int | None
    this_run: bool
    known: NotRequired[bool]  # False: a pid of the host, seen from a container


class GpuState(TypedDict):
    index: int
    uuid: str
    name: str
    in_plan: bool
    use_percent: int | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    temperature_c: int | None
    power_w: float | None
    power_limit_w: float | None
    fan_percent: int | None
    throttle_reasons: list[str] | None
    processes: list[GpuProcessState]


class HostState(TypedDict):
    cpu_cores: int | None
    cpu_percent: float | None
    load_1min: float
    ram_used_bytes: int | None
    ram_total_bytes: int | None
    disk_used_bytes: NotRequired[int | None]
    disk_total_bytes: NotRequired[int | None]
    shm_used_bytes: NotRequired[int | None]
    shm_total_bytes: NotRequired[int | None]


class AlertState(TypedDict):
    code: str  # training.core.codes
    text: str
    rank: int | None
    gpu: int | None


class WarningState(TypedDict):
    time_unix_s: float | None
    text: str


class LogState(TypedDict):
    file: str | None
    last_lines: list[str]
    read_whole: NotRequired[bool]  # of a log


class CheckpointState(TypedDict):
    path: str
    step: int
    time_unix_s: float | None


class DeviceFacts(TypedDict):
    device: str | None


class GpuTable(TypedDict):
    """The part of a state that the GPU table needs."""

    gpus: list[GpuState]
    gpus_reason: str
    ranks: list[RankState]
    run: ReadOnly[DeviceFacts]


class MachineState(TypedDict):
    """Fields common to the state of a run and of all runs."""

    schema_version: int  # training.monitor.state.SCHEMA_VERSION
    time_unix_s: float
    gpus: list[GpuState]
    gpus_reason: str
    system: HostState


class FiguresState(TypedDict):
    """Metrics recorded by a run or parsed from a log."""

    progress: ProgressState
    training: TrainingState
    loss_curve: CurveState
    speed_curve: CurveState


@final
class RunState(MachineState, FiguresState):
    """One run, or one log."""

    run: RunFacts
    ranks: list[RankState]
    warnings: list[WarningState]
    log: LogState
    checkpoint: CheckpointState | None
    summary: dict[str, Any] | None  # summary.json of any version, unchanged
    failure: dict[str, Any] | None  # failure.json of any version, unchanged
    alerts: list[AlertState]  # derived from the other fields


@final
class RunsState(MachineState):
    """All runs of a folder."""

    runs_there: int
    runs: list[RunState]


class HealthRow(TypedDict):
    """A rank, as shown by `inspect`; a run that has ended has only the required fields."""

    rank: int
    pid: int | None
    phase: str | None
    epoch: int | None
    step: int | None
    memory_bytes: float | None
    here: NotRequired[bool]  # on this machine
    state: NotRequired[str | None]  # of its process
    phase_s: NotRequired[float | None]
    step_before: NotRequired[int | None]  # in the first of two samples
    where: NotRequired[str | None]  # file:line
    waits_in: NotRequired[str | None]  # collective
    collectives_before: NotRequired[int | None]  # calls so far, in the first of two samples
    collectives: NotRequired[int | None]
    cpu: NotRequired[float | None]  # cores
    gpu: NotRequired[int | None]  # index
    gpu_memory_bytes: NotRequired[int | None]
    compute_ms_median: NotRequired[float | None]
    variables: NotRequired[dict[str, str]]


class HealthCheckRecord(TypedDict):
    name: str
    status: str  # training.monitor.health.check
    text: str
    ranks: list[int]


class HealthRun(TypedDict):
    name: str
    dir: str
    state: RunStatus | None


class HealthRecord(TypedDict):
    """The output of `inspect --json`."""

    schema_version: int
    time_unix_s: float
    answer: str  # yes, no, unknown, ended
    text: str
    exit_code: int
    looked_s: float
    run: HealthRun | None
    ranks_expected: int | None
    ranks_here: int
    checks: list[HealthCheckRecord]
    ranks: list[HealthRow]


class WorkerState(TypedDict):
    pid: int
    state: str


class AttachedRank(TypedDict):
    """A rank as observed from outside by `attach`."""

    rank: int
    pid: int
    state: str  # of the process
    phase: str | None
    epoch: int | None
    age_s: float | None  # of the phase
    where: str | None  # file:line
    function: str | None
    waits_in: str | None  # collective
    moves: bool  # its stack has changed
    holds_gil: bool
    kernel: str | None  # kernel function that it waits in
    cpu: float  # cores
    workers: list[WorkerState]  # Python children
    workers_cpu: float  # cores
    stack: list[str]
    problem: str | None  # reason for a missing stack
