"""Prometheus metrics: names, labels, help, and their values in a state.

METRICS is the only list of them: training.monitor.prometheus, the table in docs/prometheus.md and
the tests follow from it. An unknown value has no sample: a 0 would be a measurement. Metrics of a
run carry its name in the label `run`; those of the machine do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from training.core import heartbeat
from training.core.jsonl import dig, items, number
from training.monitor.run_status import ENDED, RUNNING, STARTING

LABEL_CHARACTERS = 300  # names from files may be of any length
STATES = (STARTING, RUNNING, *ENDED)
# values of the labels, value or None if unknown
Row = tuple[tuple[str, ...], float | None]
AnyState = Mapping[str, object]  # of one run or of all runs; missing parts have no sample
Rows = Callable[[AnyState], Iterable[Row]]


@dataclass(frozen=True)
class Metric:
    """`rows`: its rows in a state. `kind`: Prometheus type; the value of an 'info' is always 1."""

    name: str
    labels: tuple[str, ...]
    help: str
    rows: Rows
    kind: str = "gauge"


def _run(*keys: str, times: float = 1.0) -> Rows:
    return lambda state: [((), _times(dig(state, *keys), times))]


def _each(
    part: str, by: str, key: str, times: float = 1.0, *, join: Callable[[list[float]], float] = max
) -> Rows:
    """One row for each key `by` of the entries of `part` (ranks, GPUs), its label. `join`: one
    value of several: runs on instances of one GPU (MIG) show it once for each instance."""

    def rows(state: AnyState) -> list[Row]:
        found: dict[str, list[float | None]] = {}
        for row in items(state.get(part)):
            found.setdefault(label(row.get(by)), []).append(_times(row.get(key), times))
        known = {name: [one for one in some if one is not None] for name, some in found.items()}
        return [((name,), join(values)) for name, values in known.items() if values]

    return rows


def _times(value: object, times: float) -> float | None:
    known = int(value) if isinstance(value, bool) else number(value)
    return None if known is None else known * times


def _info(*values: object) -> Row:
    return tuple(label(v) for v in values), 1


def label(value: object) -> str:
    """The value of a file as an encodable label."""
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
    """No rows for a run that has ended: heartbeat ages would only measure the time since, and its
    GPUs are released."""
    return lambda state: [] if dig(state, "run", "state") in ENDED else rows(state)


def _late(state: AnyState) -> list[Row]:
    """No row for a rank without a heartbeat yet."""
    return [
        ((label(r.get("rank")),), _times(r.get("late"), 1))
        for r in items(state.get("ranks"))
        if r.get("beat_age_s") is not None
    ]


def _phases(state: AnyState) -> list[Row]:
    """Kinds of phases: with epoch numbers the number of series would grow without limit."""
    return [
        _info(r.get("rank"), heartbeat.kind(r["phase"]))
        for r in items(state.get("ranks"))
        if r.get("phase")
    ]


def _memory(state: AnyState) -> list[Row]:
    """For a user script as in the rank table."""
    keys = ("memory_bytes", "gpu_bytes", "rss_bytes")
    return [
        ((label(r.get("rank")),), next(filter(None, (number(r.get(key)) for key in keys)), None))
        for r in items(state.get("ranks"))
    ]


def _gpu_info(state: AnyState) -> list[Row]:
    return [_info(g.get("index"), g.get("uuid"), g.get("name")) for g in items(state.get("gpus"))]


def _throttled(state: AnyState) -> list[Row]:
    """One row for each reason; without throttling a single 0 without a reason; no row if
    unknown."""
    rows: list[Row] = []
    for gpu in items(state.get("gpus")):
        reasons = gpu.get("throttle_reasons")
        if reasons is not None:
            rows += [((label(gpu.get("index")), label(reason)), 1) for reason in reasons] or [
                ((label(gpu.get("index")), ""), 0)
            ]
    return rows


def _alerts(state: AnyState) -> list[Row]:
    alerts = state.get("alerts")
    return [] if alerts is None else [((), len(items(alerts)))]


# name, labels besides `run`, help, rows, kind
OF_A_RUN = [
    Metric(
        "duet_run_info",
        ("script", "device", "precision", "state"),
        "Entry script, device, precision and state of the run.",
        _run_info,
        "info",
    ),
    Metric(
        "duet_run_state",
        ("state",),
        "1 for the current state of the run, 0 for the others.",
        _states,
    ),
    Metric(
        "duet_run_failure_info",
        ("cause", "rank"),
        "Cause of a failed run, and the rank at fault.",
        _failure,
        "info",
    ),
    Metric(
        "duet_run_supervised",
        (),
        "1 while the supervisor of the run exists: it may restart the ranks of a failed run.",
        _run("run", "supervisor_alive"),
    ),
    Metric(
        "duet_run_alerts",
        (),
        "Number of active alerts, as the monitor's screen lists them.",
        _alerts,
    ),
    Metric(
        "duet_last_update_timestamp_seconds",
        (),
        "Time at which the monitor read these values.",
        _run("time_unix_s"),
    ),
    Metric(
        "duet_run_start_timestamp_seconds",
        (),
        "Time at which the run was planned.",
        _run("run", "started_unix_s"),
    ),
    Metric(
        "duet_run_end_timestamp_seconds",
        (),
        "Time at which the run ended.",
        _run("run", "ended_unix_s"),
    ),
    Metric("duet_ranks", (), "Number of ranks.", _run("run", "ranks")),
    Metric(
        "duet_restarts_total",
        (),
        "Restarts of the ranks after a failure.",
        _run("run", "restarts"),
        "counter",
    ),
    Metric(
        "duet_warnings_total", (), "Warnings of the run so far.", _run("run", "warnings"), "counter"
    ),
    Metric("duet_step", (), "Completed optimizer steps.", _run("progress", "step")),
    Metric(
        "duet_total_steps", (), "Optimizer steps of the whole run.", _run("progress", "total_steps")
    ),
    Metric("duet_epoch", (), "Epoch of the last step, from 1.", _run("progress", "epoch")),
    Metric("duet_epochs", (), "Epochs of the whole run.", _run("progress", "epochs")),
    Metric(
        "duet_elapsed_seconds",
        (),
        "Time from the first start to the end or now, without the pauses before resumes.",
        _run("progress", "elapsed_s"),
    ),
    Metric(
        "duet_eta_seconds",
        (),
        "Remaining time at the pace of the last 1000 steps; only while running.",
        _run("progress", "eta_s"),
    ),
    Metric(
        "duet_loss",
        (),
        "Training loss of the last step; may be NaN or infinite.",
        _run("training", "loss"),
    ),
    Metric(
        "duet_eval",
        ("name", "unit"),
        "Result of the last evaluation.",
        _evaluation("eval_last"),
    ),
    Metric(
        "duet_eval_best",
        ("name", "unit"),
        "Best result of all evaluations.",
        _evaluation("eval_best"),
    ),
    Metric(
        "duet_eval_best_step",
        ("name", "unit"),
        "Step of the best evaluation.",
        _evaluation("eval_best_step"),
    ),
    Metric("duet_learning_rate", (), "Learning rate of the last step.", _run("training", "lr")),
    Metric(
        "duet_grad_norm",
        (),
        "Gradient norm of the last step, before clipping.",
        _run("training", "grad_norm"),
    ),
    Metric(
        "duet_loss_scale",
        (),
        "Loss scale of the last step; only with fp16.",
        _run("training", "loss_scale"),
    ),
    Metric(
        "duet_skipped_steps_total",
        (),
        "Steps that changed nothing, since a gradient was not finite; only with fp16.",
        _run("training", "skipped_steps"),
        "counter",
    ),
    Metric(
        "duet_tokens_total",
        (),
        "Tokens trained on; constant while a restarted run repeats steps.",
        _run("training", "tokens"),
        "counter",
    ),
    Metric(
        "duet_tokens_per_second",
        (),
        "Tokens per second of all ranks: median of the last 100 steps.",
        _run("training", "tokens_per_s"),
    ),
    Metric(
        "duet_samples_total",
        (),
        "Samples trained on (tasks other than gpt); constant while a restarted run repeats steps.",
        _run("training", "samples"),
        "counter",
    ),
    Metric(
        "duet_samples_per_second",
        (),
        "Samples per second of all ranks: median of the last 100 steps.",
        _run("training", "samples_per_s"),
    ),
    Metric(
        "duet_step_seconds",
        ("quantile",),
        "Step time over the last 100 steps.",
        _step_seconds,
        "summary",
    ),
    Metric(
        "duet_mfu_ratio",
        (),
        "Model FLOPs utilization of the GPUs, 0 to 1.",
        _run("training", "mfu"),
    ),
    Metric(
        "duet_last_step_timestamp_seconds",
        (),
        "Time at which the last step ended; after a restart only from its first step.",
        _run("training", "last_step_unix_s"),
    ),
    Metric(
        "duet_checkpoint_timestamp_seconds",
        (),
        "Time at which the newest checkpoint was written.",
        _run("checkpoint", "time_unix_s"),
    ),
    Metric(
        "duet_checkpoint_step", (), "Step of the newest checkpoint.", _run("checkpoint", "step")
    ),
    Metric(
        "duet_rank_heartbeat_age_seconds",
        ("rank",),
        "Time since the rank entered its phase; until the run ends.",
        _living(_each("ranks", "rank", "beat_age_s")),
    ),
    Metric(
        "duet_rank_step",
        ("rank",),
        "Current step of the rank.",
        _each("ranks", "rank", "step"),
    ),
    Metric(
        "duet_rank_alive",
        ("rank",),
        "1 if the process of the rank is alive.",
        _each("ranks", "rank", "alive"),
    ),
    Metric(
        "duet_rank_late",
        ("rank",),
        "1 if the rank has been in one phase for over 30 s, or the limit of a long phase.",
        _late,
    ),
    Metric(
        "duet_rank_phase_info",
        ("rank", "phase"),
        "Phase of the rank, without numbers.",
        _phases,
        "info",
    ),
    Metric(
        "duet_rank_own_seconds",
        ("rank",),
        "Compute time of the rank in a step, without waiting for others: median of 100 steps.",
        _each("ranks", "rank", "compute_ms_median", 1e-3),
    ),
    Metric(
        "duet_rank_memory_bytes",
        ("rank",),
        "Peak GPU memory of the rank; on the CPU, memory of its process. For a user script: memory "
        "in use now, with the children of the rank.",
        _memory,
    ),
    Metric(
        "duet_rank_cpu_cores",
        ("rank",),
        "CPU cores in use by the rank of a user script and its children.",
        _each("ranks", "rank", "cpu_percent", 1e-2),
    ),
    Metric(
        "duet_gpu_in_plan",
        ("gpu",),
        "1 for each GPU of the run, until it ends.",
        _living(_each("gpus", "index", "in_plan")),
    ),
]
OF_THE_MACHINE = [
    Metric(
        "duet_gpu_info",
        ("gpu", "uuid", "name"),
        "GPUs of the machine, by index in PCI order.",
        _gpu_info,
        "info",
    ),
    Metric(
        "duet_gpu_use_ratio",
        ("gpu",),
        "Share of time during which a kernel ran, 0 to 1.",
        _each("gpus", "index", "use_percent", 1e-2),
    ),
    Metric(
        "duet_gpu_memory_used_bytes",
        ("gpu",),
        "GPU memory in use by all processes.",
        _each("gpus", "index", "memory_used_bytes", join=sum),
    ),
    Metric(
        "duet_gpu_memory_total_bytes",
        ("gpu",),
        "Total GPU memory.",
        _each("gpus", "index", "memory_total_bytes", join=sum),
    ),
    Metric(
        "duet_gpu_temperature_celsius",
        ("gpu",),
        "GPU temperature.",
        _each("gpus", "index", "temperature_c"),
    ),
    Metric(
        "duet_gpu_power_watts",
        ("gpu",),
        "GPU power draw.",
        _each("gpus", "index", "power_w"),
    ),
    Metric(
        "duet_gpu_power_limit_watts",
        ("gpu",),
        "GPU power limit.",
        _each("gpus", "index", "power_limit_w"),
    ),
    Metric(
        "duet_gpu_fan_ratio",
        ("gpu",),
        "GPU fan speed, 0 to 1.",
        _each("gpus", "index", "fan_percent", 1e-2),
    ),
    Metric(
        "duet_gpu_throttled",
        ("gpu", "reason"),
        "1 for each reason for throttling; a single 0 without a reason if there is none.",
        _throttled,
    ),
    Metric("duet_host_cpu_cores", (), "CPU cores of the machine.", _run("system", "cpu_cores")),
    Metric(
        "duet_host_cpu_use_ratio",
        (),
        "Utilization of all cores since the previous reading, 0 to 1.",
        _run("system", "cpu_percent", times=1e-2),
    ),
    Metric("duet_host_load1", (), "Load average over 1 minute.", _run("system", "load_1min")),
    Metric(
        "duet_host_memory_used_bytes",
        (),
        "Memory unavailable to new processes, of that total.",
        _run("system", "ram_used_bytes"),
    ),
    Metric(
        "duet_host_memory_total_bytes",
        (),
        "Total memory of the machine, or the limit of a control group with less room.",
        _run("system", "ram_total_bytes"),
    ),
    Metric(
        "duet_host_shm_used_bytes", (), "Used space of /dev/shm.", _run("system", "shm_used_bytes")
    ),
    Metric("duet_host_shm_total_bytes", (), "Size of /dev/shm.", _run("system", "shm_total_bytes")),
    Metric(
        "duet_host_disk_used_bytes",
        (),
        "Used space of the disk with the run directory.",
        _run("system", "disk_used_bytes"),
    ),
    Metric(
        "duet_host_disk_total_bytes",
        (),
        "Size of the disk with the run directory.",
        _run("system", "disk_total_bytes"),
    ),
]
METRICS = [
    Metric(m.name, ("run", *m.labels), m.help, m.rows, m.kind) for m in OF_A_RUN
] + OF_THE_MACHINE


def table() -> str:
    """METRICS as a Markdown table for docs/prometheus.md, printed by
    `python lib/run_module.py training.monitor.prom_metrics`."""
    rows = [
        f"| `{m.name}` | {m.kind} | {', '.join(m.labels) or '-'} | {m.help.rstrip('.')} |"
        for m in METRICS
    ]
    return "\n".join(["| metric | kind | labels | |", "|---|---|---|---|", *rows])


if __name__ == "__main__":
    print(table())
