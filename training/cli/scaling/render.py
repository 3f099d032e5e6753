"""The report as text and as JSON."""

from __future__ import annotations

from training.cli.scaling import analysis
from training.cli.scaling.analysis import ScalingReport, ScalingResult
from training.cli.scaling.experiment import THREADS, WARM_UP_STEPS, Experiment
from training.core import metric_units, units
from training.core.messages import msg

SCHEMA_VERSION = 1
SMALL = 0.01  # fraction of a step: a smaller loss is not significant


def _verdicts() -> dict[str, str]:
    return {
        analysis.REFERENCE: msg("cli.scaling.verdict.reference"),
        analysis.BELOW: msg("cli.scaling.verdict.below"),
        analysis.WITHIN: msg("cli.scaling.verdict.within"),
        analysis.BETTER: msg("cli.scaling.verdict.better"),
        analysis.NO_BAND: msg("cli.scaling.verdict.no_band"),
    }


def introduction(experiment: Experiment) -> list[str]:
    """The description of the measurement, logged before it starts."""
    numbers = ", ".join(map(str, experiment.ranks))
    return [
        msg(
            "cli.scaling.begins",
            config=experiment.config,
            ranks=numbers,
            device=experiment.device,
            reason=experiment.device_reason,
            precision=experiment.precision,
        ),
        msg(
            "cli.scaling.work_per_rank",
            samples=_samples(experiment),
            accumulation_steps=units.plural(experiment.accumulation, "accumulation step"),
            amount=experiment.tokens_per_rank,
            unit=experiment.unit,
        ),
        *([_threads(experiment)] if experiment.device == "cpu" else []),
        msg(
            "cli.scaling.rounds",
            rounds=experiment.rounds,
            steps=experiment.steps,
            warm_up=WARM_UP_STEPS,
        ),
    ]


def _samples(experiment: Experiment) -> str:
    if experiment.unit == metric_units.TOKENS:
        return msg(
            "cli.scaling.samples", sequences=experiment.sequences, seq_len=experiment.seq_len
        )
    return f"{experiment.sequences} {experiment.unit}"


def _threads(experiment: Experiment) -> str:
    if experiment.threads == 1:
        return msg("cli.scaling.one_thread", variable=THREADS)
    return msg("cli.scaling.your_threads", threads=experiment.threads, variable=THREADS)


def text(report: ScalingReport) -> str:
    """The table, and the limits of each number of ranks."""
    lines = [
        f"{'ranks':>5} {'step ms':>9} {report.experiment.unit + '/s':>11} {'speed-up':>9} "
        f"{'efficiency':>11}  {'expected':<10}  verdict"
    ]
    for r in report.results:
        expected = f"{r.band[0]:.2f}–{r.band[1]:.2f}" if r.band else "-"
        verdict = _verdicts()[r.verdict]
        if r.share_cores:
            verdict = msg("cli.scaling.cores_shared", verdict=verdict)
        figures = (
            f"{r.ranks:>5} {r.step_ms:>9.1f} {r.tokens_per_s:>11,.0f} {r.speed_up:>9.2f} "
            f"{100 * r.efficiency:>9.1f} %"
        )
        lines.append(f"{figures}  {expected:<10}  {verdict}")
    for r in report.results:
        if r.ranks > 1:
            lines += ["", *limits(r, report)]
    return "\n".join(
        [
            *lines,
            *([""] if notes(report) else []),
            *(msg("cli.scaling.note", text=n) for n in notes(report)),
        ]
    )


def limits(result: ScalingResult, report: ScalingReport) -> list[str]:
    """The limits of one number of ranks."""
    if result.machine_ms is None or result.exchange_ms is None:
        return [
            msg(
                "cli.scaling.limit_unknown",
                ranks=result.ranks,
                rounds=max(3, report.experiment.rounds + 1),
            )
        ]
    return [
        msg("cli.scaling.limit", ranks=result.ranks, limit=main_limit(result)),
        msg(
            "cli.scaling.limit_machine",
            cost=_cost(result.machine_ms, result),
            ranks=result.ranks,
            apart_ms=result.apart_ms,
            machine=_machine(result, report),
        ),
        msg(
            "cli.scaling.limit_exchange",
            cost=_cost(result.exchange_ms, result),
            exchange=_exchange(result),
        ),
    ]


def main_limit(result: ScalingResult) -> str:
    assert result.machine_ms is not None and result.exchange_ms is not None
    machine, exchange = (max(0.0, ms) for ms in (result.machine_ms, result.exchange_ms))
    if result.speed_up >= result.ranks:
        return msg("cli.scaling.super_linear")
    if machine + exchange < SMALL * result.step_ms:
        return msg("cli.scaling.nothing_measurable")
    missing = msg("cli.scaling.missing", missing=result.ranks - result.speed_up, ranks=result.ranks)
    share = machine / (machine + exchange)
    if 0.4 < share < 0.6:
        return msg("cli.scaling.mostly_both", missing=missing)
    if share > 0.5:
        return msg("cli.scaling.mostly_machine", missing=missing)
    return msg("cli.scaling.mostly_exchange", missing=missing)


def _cost(ms: float, result: ScalingResult) -> str:
    # negative: noise, or work of the optimizer that independent runs do not share
    sign = "+" if ms >= 0 else "−"
    return msg("cli.scaling.cost", sign=sign, ms=abs(ms), percent=100 * abs(ms) / result.step_ms)


def _machine(result: ScalingResult, report: ScalingReport) -> str:
    experiment = report.experiment
    if result.share_cores:
        threads = units.plural(experiment.threads, "thread")
        most = experiment.cores / experiment.threads
        return msg(
            "cli.scaling.shared_cores",
            ranks=result.ranks,
            threads=threads,
            cores=experiment.cores,
            most=most,
        )
    if experiment.device == "cuda":
        return msg("cli.scaling.shared_gpu_host")
    if report.busy:
        return msg("cli.scaling.shared_busy")
    return msg("cli.scaling.shared")


def _exchange(result: ScalingResult) -> str:
    if not result.gradient_bytes or result.gigabytes_per_s is None:
        return msg("cli.scaling.gradients")
    return msg(
        "cli.scaling.gradients_of",
        megabytes=result.gradient_bytes / 1e6,
        gigabytes_per_s=result.gigabytes_per_s,
    )


def notes(report: ScalingReport) -> list[str]:
    """Caveats of the figures."""
    out = list(report.experiment.warnings)
    if report.busy:
        taken = msg(
            "cli.scaling.cores_taken", taken=report.other_work, cores=report.experiment.cores
        )
        out.append(msg("cli.scaling.others_busy", taken=taken))
    for r in report.results:
        if r.noisy:
            low, high = r.speed_up_range
            out.append(msg("cli.scaling.noisy", ranks=r.ranks, low=low, high=high))
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
        "gradients_mb_per_rank_and_step": None
        if r.gradient_bytes is None
        else _rounded(r.gradient_bytes / 1e6),
        "gradients_gb_per_s_at_least": _rounded(r.gigabytes_per_s),
        "limited_by": main_limit(r) if separated else None,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
