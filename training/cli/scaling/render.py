"""The report as text and as JSON."""

from __future__ import annotations

from training.cli.scaling import analysis
from training.cli.scaling.analysis import ScalingReport, ScalingResult
from training.cli.scaling.experiment import THREADS, WARM_UP_STEPS, Experiment
from training.core import metric_units, units

SCHEMA_VERSION = 1
VERDICTS = {
    analysis.REFERENCE: "the reference",
    analysis.BELOW: "below the expected band",
    analysis.WITHIN: "in the expected band",
    analysis.BETTER: "better than expected",
    analysis.NO_BAND: "no band known",
}
SMALL = 0.01  # fraction of a step: a smaller loss is not significant


def introduction(experiment: Experiment) -> list[str]:
    """The description of the measurement, logged before it starts."""
    numbers = ", ".join(map(str, experiment.ranks))
    return [
        f"scaling check of {experiment.config}: {numbers} ranks on {experiment.device} "
        f"({experiment.device_reason}), "
        f"{experiment.precision}",
        f"each rank: {_samples(experiment)} × {experiment.accumulation} accumulation "
        f"step{'s' if experiment.accumulation > 1 else ''} "
        f"= {experiment.tokens_per_rank} {experiment.unit} per step for any number of ranks (weak "
        f"scaling)",
        *([_threads(experiment)] if experiment.device == "cpu" else []),
        f"{experiment.rounds} rounds, {experiment.steps} steps per run after {WARM_UP_STEPS} of "
        f"warm-up",
    ]


def _samples(experiment: Experiment) -> str:
    if experiment.unit == metric_units.TOKENS:
        return f"{experiment.sequences} sequences × {experiment.seq_len} tokens"
    return f"{experiment.sequences} {experiment.unit}"


def _threads(experiment: Experiment) -> str:
    if experiment.threads == 1:
        return f"one thread per rank ({THREADS}=1): compares ranks, not threads"
    return f"{experiment.threads} threads per rank, from your {THREADS}"


def text(report: ScalingReport) -> str:
    """The table, and the limits of each number of ranks."""
    lines = [
        f"{'ranks':>5} {'step ms':>9} {report.experiment.unit + '/s':>11} {'speed-up':>9} "
        f"{'efficiency':>11}  {'expected':<10}  verdict"
    ]
    for r in report.results:
        expected = f"{r.band[0]:.2f}–{r.band[1]:.2f}" if r.band else "-"
        shared = " (ranks share cores)" if r.share_cores else ""
        figures = (
            f"{r.ranks:>5} {r.step_ms:>9.1f} {r.tokens_per_s:>11,.0f} {r.speed_up:>9.2f} "
            f"{100 * r.efficiency:>9.1f} %"
        )
        lines.append(f"{figures}  {expected:<10}  {VERDICTS[r.verdict]}{shared}")
    for r in report.results:
        if r.ranks > 1:
            lines += ["", *limits(r, report)]
    return "\n".join(
        [*lines, *([""] if notes(report) else []), *(f"note: {n}" for n in notes(report))]
    )


def limits(result: ScalingResult, report: ScalingReport) -> list[str]:
    """The limits of one number of ranks."""
    if result.machine_ms is None or result.exchange_ms is None:
        return [
            f"What limits {result.ranks} ranks: unknown, {result.ranks} independent runs hardly "
            f"overlapped; use --rounds={max(3, report.experiment.rounds + 1)} or more --steps"
        ]
    return [
        f"What limits {result.ranks} ranks: {main_limit(result)}",
        f"  machine   {_cost(result.machine_ms, result)}  {result.ranks} independent runs at the "
        f"same time, without exchange, take "
        f"{result.apart_ms:.1f} ms per step: {_machine(result, report)}",
        f"  exchange  {_cost(result.exchange_ms, result)}  {_exchange(result, report)}",
    ]


def main_limit(result: ScalingResult) -> str:
    assert result.machine_ms is not None and result.exchange_ms is not None
    machine, exchange = (max(0.0, ms) for ms in (result.machine_ms, result.exchange_ms))
    if result.speed_up >= result.ranks:
        return (
            "nothing, the speed-up is super-linear: an optimizer whose work is shared by the "
            "ranks, or noise"
        )
    if machine + exchange < SMALL * result.step_ms:
        return "nothing measurable"
    missing = f"{result.ranks - result.speed_up:.2f} of {result.ranks} missing"
    share = machine / (machine + exchange)
    if 0.4 < share < 0.6:
        return f"{missing}, machine and exchange equally"
    return f"{missing}, mostly {'the machine' if share > 0.5 else 'the exchange of gradients'}"


def _cost(ms: float, result: ScalingResult) -> str:
    # negative: noise, or work of the optimizer that independent runs do not share
    sign = "+" if ms >= 0 else "−"
    return f"{sign}{abs(ms):.1f} ms ({sign}{100 * abs(ms) / result.step_ms:.0f} % of a step)"


def _machine(result: ScalingResult, report: ScalingReport) -> str:
    experiment = report.experiment
    if result.share_cores:
        threads = units.plural(experiment.threads, "thread")
        most = experiment.cores / experiment.threads
        return (
            f"{result.ranks} ranks × {threads} on {experiment.cores} cores, so at most {most:.2f} ×"
        )
    if experiment.device == "cuda":
        return "power, cooling, PCIe and the host's cores are shared, or one GPU is slower"
    return (
        f"{'other processes on the cores; ' if report.busy else ''}memory bandwidth, caches and "
        f"the clock of the cores are shared"
    )


def _exchange(result: ScalingResult, report: ScalingReport) -> str:
    waiting = "and waiting for the slower rank"
    if report.gradient_mb is None or result.gigabytes_per_s is None or report.parameters is None:
        return f"gradients, {waiting}"
    return (
        f"gradients of {units.millions(report.parameters)} parameters, {report.gradient_mb:.1f} MB "
        f"per rank and step, "
        f"at least {result.gigabytes_per_s:.2f} GB/s; {waiting}"
    )


def notes(report: ScalingReport) -> list[str]:
    """Caveats of the figures."""
    out = []
    if report.busy:
        taken = f"{report.other_work:.1f} of {report.experiment.cores} cores"
        out.append(
            f"other processes used {taken}: the figures are too low, measure again without them"
        )
    for r in report.results:
        if r.noisy:
            low, high = r.speed_up_range
            out.append(
                f"{r.ranks} ranks: {low:.2f} to {high:.2f} × across rounds, the second digit is "
                f"not reliable; use more --rounds"
            )
    return out


def record(report: ScalingReport) -> dict[str, object]:
    """The report as JSON; units are in the keys, unknown values are null."""
    e = report.experiment
    return {
        "schema_version": SCHEMA_VERSION,
        "config": e.config,
        "device": e.device,
        "device_reason": e.device_reason,
        "precision": e.precision,
        "cores": e.cores,
        "threads_per_rank": e.threads if e.device == "cpu" else None,
        "sequences_per_rank": e.sequences,
        "unit": e.unit,
        "tokens_per_sequence": e.seq_len if e.unit == metric_units.TOKENS else None,
        "accumulation_steps": e.accumulation,
        "measured_steps_per_run": e.steps,
        "warm_up_steps_per_run": WARM_UP_STEPS,
        "rounds": e.rounds,
        "other_work_cores": _rounded(report.other_work),
        "parameters": report.parameters,
        "gradients_mb_per_rank_and_step": _rounded(report.gradient_mb),
        "results": [_row(r, e.unit) for r in report.results],
        "notes": notes(report),
    }


def _row(r: ScalingResult, unit: str) -> dict[str, object]:
    separated = r.machine_ms is not None and r.exchange_ms is not None
    return {
        "ranks": r.ranks,
        "step_ms": _rounded(r.step_ms),
        metric_units.SPEEDS[unit]: _rounded(r.tokens_per_s),
        "speed_up_factor": _rounded(r.speed_up),
        "speed_up_factor_min": _rounded(r.speed_up_range[0]),
        "speed_up_factor_max": _rounded(r.speed_up_range[1]),
        "efficiency_fraction": _rounded(r.efficiency),
        "expected_speed_up_factor": list(r.band) if r.band else None,
        "verdict": r.verdict,
        "ranks_share_cores": r.share_cores,
        "independent_runs_step_ms": _rounded(r.apart_ms),
        "machine_ms_per_step": _rounded(r.machine_ms),
        "exchange_ms_per_step": _rounded(r.exchange_ms),
        "gradients_gb_per_s_at_least": _rounded(r.gigabytes_per_s),
        "limited_by": main_limit(r) if separated else None,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
