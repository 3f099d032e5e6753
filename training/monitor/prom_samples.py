"""Samples of the metrics of one or several runs, for one answer to Prometheus."""

from __future__ import annotations

from collections.abc import Sequence

from training.core.jsonl import dig, number
from training.monitor.prom_metrics import METRICS, AnyState, Metric, label

Sample = tuple[dict[str, str], float]


class Collected:
    """Samples of all metrics. Remembers counters, so that they never decrease."""

    def __init__(self) -> None:
        self._most: dict[tuple[str, ...], float] = {}  # by metric, run and other labels
        self._first_events: dict[str, float] = {}  # unix s, by run

    def samples(self, states: Sequence[AnyState]) -> list[tuple[Metric, list[Sample]]]:
        """Samples for each metric; those of the machine from the newest state."""
        runs = _names([state for state in states if state.get("run")])
        newest = max(states, key=lambda state: number(state.get("time_unix_s")) or 0.0, default={})
        kept = self._kept(runs)
        self._most = {key: most for key, most in self._most.items() if key[1] in kept}
        out = []
        for metric in METRICS:
            of_a_run = metric.labels[:1] == ("run",)
            found: dict[tuple[str, ...], float] = {}
            for of, state in (
                (((name,), state) for name, state in runs) if of_a_run else [((), newest)]
            ):
                found |= {
                    (*of, *labels): value
                    for labels, value in metric.rows(state)
                    if value is not None
                }
            if metric.kind == "counter":
                found = {
                    labels: self._never_less((metric.name, *labels), value)
                    for labels, value in found.items()
                }
            out.append(
                (
                    metric,
                    [
                        (dict(zip(metric.labels, labels, strict=True)), value)
                        for labels, value in found.items()
                    ],
                )
            )
        return out

    def _kept(self, runs: Sequence[tuple[str, AnyState]]) -> set[str]:
        """The names that are still those of the same runs: another run may have the name of one
        that was removed."""
        firsts = {
            name: first
            for name, state in runs
            if (first := number(dig(state, "run", "first_event_unix_s"))) is not None
        }
        before, names = self._first_events, {name for name, _ in runs}
        self._first_events = {n: at for n, at in (before | firsts).items() if n in names}
        return {name for name in names if before.get(name) in (None, self._first_events.get(name))}

    def _never_less(self, key: tuple[str, ...], value: float) -> float:
        """Largest value so far: a restarted run resumes at its checkpoint, and Prometheus would
        take a lower value for a reset counter and add it again."""
        self._most[key] = max(value, self._most.get(key, value))
        return self._most[key]


def _names(states: Sequence[AnyState]) -> list[tuple[str, AnyState]]:
    """(label, state) for each run: its name, or its folder if several runs share the name."""
    names = [label(dig(state, "run", "name")) for state in states]
    return [
        (
            name if names.count(name) == 1 else label(dig(state, "run", "dir")) or f"{name} {i}",
            state,
        )
        for i, (name, state) in enumerate(zip(names, states, strict=True))
    ]
