"""What a state says as metrics for Prometheus.

METRICS is the one list of them: what is served (training.monitor.prometheus), the table in
docs/prometheus.md and the tests follow from it. What is unknown has no sample: a 0 would be a
measurement. Metrics of a run carry its name in the label `run`; those of the machine do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from training.core import heartbeat
from training.core.jsonl import dig, items, number
from training.monitor.run_status import ENDED, RUNNING, STARTING

LABEL_CHARACTERS = 300  # a name from a file may be of any length
STATES = (STARTING, RUNNING, *ENDED)
# values of the labels, and the value: None where it is not known
Row = tuple[tuple[str, ...], float | None]
AnyState = Mapping[str, object]  # of a run or of all of them: what it does not have has no sample
Rows = Callable[[AnyState], Iterable[Row]]


@dataclass(frozen=True)
class Metric:
    """`rows`: what a state says of it. `kind`: a type of Prometheus; of 'info' the labels are all
    that matters, the value is 1."""

    name: str
    labels: tuple[str, ...]
    help: str
    rows: Rows
    kind: str = "gauge"


def _run(*keys: str, times: float = 1.0) -> Rows:
    return lambda state: [((), _times(dig(state, *keys), times))]


def _each(part: str, by: str, key: str, times: float = 1.0) -> Rows:
    """One row for each rank or GPU."""
    return lambda state: [
        ((label(row.get(by)),), _times(row.get(key), times)) for row in items(state.get(part))
    ]


def _times(value: object, times: float) -> float | None:
    known = int(value) if isinstance(value, bool) else number(value)
    return None if known is None else known * times


def _info(*values: object) -> Row:
    return tuple(label(v) for v in values), 1


def label(value: object) -> str:
    """A label: whatever a file holds, as text that can be encoded."""
    return (
        "" if value is None else str(value)[:LABEL_CHARACTERS].encode("utf-8", "replace").decode()
    )


def _run_info(state: AnyState) -> list[Row]:
    return [
        _info(*(dig(state, "run", name) for name in ("script", "device", "precision", "state")))
    ]


def _states(state: AnyState) -> list[Row]:
    now = dig(state, "run", "state")
    return [((name,), float(name == now)) for name in dict.fromkeys((*STATES, label(now)))]


def _failure(state: AnyState) -> list[Row]:
    failure = state.get("failure")
    return [_info(dig(failure, "cause"), dig(failure, "rank"))] if failure else []


def _evaluation(key: str) -> Rows:
    return lambda state: [
        (
            (
                label(dig(state, "training", "eval_name")),
                label(dig(state, "training", "eval_unit")),
            ),
            _times(dig(state, "training", key), 1),
        )
    ]


def _step_seconds(state: AnyState) -> list[Row]:
    return [
        ((q,), _times(dig(state, "training", key), 1e-3))
        for q, key in (("0.5", "step_ms_median"), ("0.95", "step_ms_p95"))
    ]


def _living(rows: Rows) -> Rows:
    """Of a run that has ended the age of a beat says only how long ago that was, and its GPUs are
    no longer its own."""
    return lambda state: [] if dig(state, "run", "state") in ENDED else rows(state)


def _late(state: AnyState) -> list[Row]:
    """Of a rank that has not been heard yet nobody knows."""
    return [
        ((label(r.get("rank")),), _times(r.get("late"), 1))
        for r in items(state.get("ranks"))
        if r.get("beat_age_s") is not None
    ]


def _phases(state: AnyState) -> list[Row]:
    """By kind: a series for each number of an epoch would never end."""
    return [
        _info(r.get("rank"), heartbeat.kind(r["phase"]))
        for r in items(state.get("ranks"))
        if r.get("phase")
    ]


def _gpu_info(state: AnyState) -> list[Row]:
    return [_info(g.get("index"), g.get("uuid"), g.get("name")) for g in items(state.get("gpus"))]


def _throttled(state: AnyState) -> list[Row]:
    """One for each reason; a GPU that runs freely has a 0 without a reason, one that does not say
    has nothing."""
    rows: list[Row] = []
    for gpu in items(state.get("gpus")):
        reasons = gpu.get("throttle_reasons")
        if reasons is not None:
            rows += [((label(gpu.get("index")), label(reason)), 1) for reason in reasons] or [
                ((label(gpu.get("index")), ""), 0)
            ]
    return rows


def _alerts(state: AnyState) -> list[Row]:
    told = state.get("alerts")
    return [] if told is None else [((), len(items(told)))]


# name, labels beside `run`, help, what a state says of it, kind
OF_A_RUN = [
    Metric(
        "duet_run_info",
        ("script", "device", "precision", "state"),
        "What this run is.",
        _run_info,
        "info",
    ),
    Metric(
        "duet_run_state",
        ("state",),
        "1 for the state that the run is in, 0 for the others.",
        _states,
    ),
    Metric(
        "duet_run_failure_info",
        ("cause", "rank"),
        "Why a failed run failed, and on which rank.",
        _failure,
        "info",
    ),
    Metric(
        "duet_run_alerts",
        (),
        "Number of things that the monitor warns of now: its screen says which.",
        _alerts,
    ),
    Metric(
        "duet_last_update_timestamp_seconds",
        (),
        "When the monitor looked: what is told is of that moment.",
        _run("time_unix_s"),
    ),
    Metric(
        "duet_run_start_timestamp_seconds",
        (),
        "When the run was planned.",
        _run("run", "started_unix_s"),
    ),
    Metric(
        "duet_run_end_timestamp_seconds", (), "When the run ended.", _run("run", "ended_unix_s")
    ),
    Metric("duet_ranks", (), "Number of ranks.", _run("run", "ranks")),
    Metric(
        "duet_restarts_total",
        (),
        "How often the ranks were started again after a failure.",
        _run("run", "restarts"),
        "counter",
    ),
    Metric("duet_warnings_total", (), "Warnings so far.", _run("run", "warnings"), "counter"),
    Metric("duet_step", (), "Optimizer steps done.", _run("progress", "step")),
    Metric(
        "duet_total_steps", (), "Optimizer steps of the whole run.", _run("progress", "total_steps")
    ),
    Metric("duet_epoch", (), "The epoch of the last step, from 1.", _run("progress", "epoch")),
    Metric("duet_epochs", (), "Epochs of the whole run.", _run("progress", "epochs")),
    Metric(
        "duet_elapsed_seconds",
        (),
        "Time since the run was planned, or until its end.",
        _run("progress", "elapsed_s"),
    ),
    Metric(
        "duet_eta_seconds",
        (),
        "Time left at the pace of the last 1000 steps, while running.",
        _run("progress", "eta_s"),
    ),
    Metric(
        "duet_loss",
        (),
        "Training loss of the last step; NaN and infinity are told.",
        _run("training", "loss"),
    ),
    Metric(
        "duet_eval",
        ("name", "unit"),
        "The figure of the last evaluation.",
        _evaluation("eval_last"),
    ),
    Metric(
        "duet_eval_best",
        ("name", "unit"),
        "The best figure of all evaluations.",
        _evaluation("eval_best"),
    ),
    Metric(
        "duet_eval_best_step",
        ("name", "unit"),
        "The step of the best evaluation.",
        _evaluation("eval_best_step"),
    ),
    Metric("duet_learning_rate", (), "Learning rate of the last step.", _run("training", "lr")),
    Metric(
        "duet_grad_norm",
        (),
        "Norm of the gradient at the last step, before clipping.",
        _run("training", "grad_norm"),
    ),
    Metric(
        "duet_tokens_total",
        (),
        "Tokens trained on; stands still while a restarted run repeats steps.",
        _run("training", "tokens"),
        "counter",
    ),
    Metric(
        "duet_tokens_per_second",
        (),
        "Median of the last 100 steps, all ranks together.",
        _run("training", "tokens_per_s"),
    ),
    Metric(
        "duet_samples_total",
        (),
        "Samples trained on, by any task but gpt; stands still like duet_tokens_total.",
        _run("training", "samples"),
        "counter",
    ),
    Metric(
        "duet_samples_per_second",
        (),
        "Median of the last 100 steps, all ranks together.",
        _run("training", "samples_per_s"),
    ),
    Metric(
        "duet_step_seconds",
        ("quantile",),
        "Time of a step, over the last 100 steps.",
        _step_seconds,
        "summary",
    ),
    Metric(
        "duet_mfu_ratio",
        (),
        "Share of the GPUs' peak arithmetic that training uses, 0 to 1.",
        _run("training", "mfu"),
    ),
    Metric(
        "duet_last_step_timestamp_seconds",
        (),
        "When the last step ended.",
        _run("training", "last_step_unix_s"),
    ),
    Metric(
        "duet_checkpoint_timestamp_seconds",
        (),
        "When the newest checkpoint was written.",
        _run("checkpoint", "time_unix_s"),
    ),
    Metric(
        "duet_checkpoint_step", (), "The step of the newest checkpoint.", _run("checkpoint", "step")
    ),
    Metric(
        "duet_rank_heartbeat_age_seconds",
        ("rank",),
        "Time since this rank went on to another phase, until the end.",
        _living(_each("ranks", "rank", "beat_age_s")),
    ),
    Metric(
        "duet_rank_step",
        ("rank",),
        "The step that this rank is in.",
        _each("ranks", "rank", "step"),
    ),
    Metric(
        "duet_rank_alive",
        ("rank",),
        "1 when the process of this rank lives.",
        _each("ranks", "rank", "alive"),
    ),
    Metric(
        "duet_rank_late", ("rank",), "1 when this rank has been in one phase for over 30 s.", _late
    ),
    Metric(
        "duet_rank_phase_info",
        ("rank", "phase"),
        "What this rank is doing, numbers left out.",
        _phases,
        "info",
    ),
    Metric(
        "duet_rank_own_seconds",
        ("rank",),
        "This rank's own time in a step, without waiting for others: median of 100.",
        _each("ranks", "rank", "compute_ms_median", 1e-3),
    ),
    Metric(
        "duet_rank_memory_bytes",
        ("rank",),
        "Peak GPU memory of this rank; on the CPU its memory.",
        _each("ranks", "rank", "memory_bytes"),
    ),
    Metric(
        "duet_gpu_in_plan",
        ("gpu",),
        "1 for the GPUs that this run uses, until its end.",
        _living(_each("gpus", "index", "in_plan")),
    ),
]
OF_THE_MACHINE = [
    Metric(
        "duet_gpu_info",
        ("gpu", "uuid", "name"),
        "The GPUs of this machine, by their index in PCI order.",
        _gpu_info,
        "info",
    ),
    Metric(
        "duet_gpu_use_ratio",
        ("gpu",),
        "Share of the time in which a kernel ran, 0 to 1.",
        _each("gpus", "index", "use_percent", 1e-2),
    ),
    Metric(
        "duet_gpu_memory_used_bytes",
        ("gpu",),
        "GPU memory in use, by anybody.",
        _each("gpus", "index", "memory_used_bytes"),
    ),
    Metric(
        "duet_gpu_memory_total_bytes",
        ("gpu",),
        "GPU memory.",
        _each("gpus", "index", "memory_total_bytes"),
    ),
    Metric(
        "duet_gpu_temperature_celsius",
        ("gpu",),
        "Temperature of the GPU.",
        _each("gpus", "index", "temperature_c"),
    ),
    Metric(
        "duet_gpu_power_watts",
        ("gpu",),
        "Power that the GPU draws.",
        _each("gpus", "index", "power_w"),
    ),
    Metric(
        "duet_gpu_power_limit_watts",
        ("gpu",),
        "Power that it may draw.",
        _each("gpus", "index", "power_limit_w"),
    ),
    Metric(
        "duet_gpu_fan_ratio",
        ("gpu",),
        "Speed of its fan, 0 to 1.",
        _each("gpus", "index", "fan_percent", 1e-2),
    ),
    Metric(
        "duet_gpu_throttled",
        ("gpu", "reason"),
        "1 for each reason that slows it down; 0 without a reason when none does.",
        _throttled,
    ),
    Metric("duet_host_cpu_cores", (), "Cores of this machine.", _run("system", "cpu_cores")),
    Metric(
        "duet_host_cpu_use_ratio",
        (),
        "Share of all cores in use, 0 to 1, since the look before.",
        _run("system", "cpu_percent", times=1e-2),
    ),
    Metric("duet_host_load1", (), "Load of the last minute.", _run("system", "load_1min")),
    Metric(
        "duet_host_memory_used_bytes",
        (),
        "Memory that could not be given to a new process.",
        _run("system", "ram_used_bytes"),
    ),
    Metric(
        "duet_host_memory_total_bytes",
        (),
        "Memory of this machine.",
        _run("system", "ram_total_bytes"),
    ),
    Metric("duet_host_shm_used_bytes", (), "Used of /dev/shm.", _run("system", "shm_used_bytes")),
    Metric("duet_host_shm_total_bytes", (), "Size of /dev/shm.", _run("system", "shm_total_bytes")),
    Metric(
        "duet_host_disk_used_bytes",
        (),
        "Used of the disk that the run is written to.",
        _run("system", "disk_used_bytes"),
    ),
    Metric(
        "duet_host_disk_total_bytes",
        (),
        "Size of the disk that the run is written to.",
        _run("system", "disk_total_bytes"),
    ),
]
METRICS = [
    Metric(m.name, ("run", *m.labels), m.help, m.rows, m.kind) for m in OF_A_RUN
] + OF_THE_MACHINE


def table() -> str:
    """METRICS for docs/prometheus.md: `python lib/run_module.py training.monitor.prom_metrics`."""
    rows = [
        f"| `{m.name}` | {m.kind} | {', '.join(m.labels) or '-'} | {m.help.rstrip('.')} |"
        for m in METRICS
    ]
    return "\n".join(["| metric | kind | labels | |", "|---|---|---|---|", *rows])


if __name__ == "__main__":
    print(table())
