"""Samples of the metrics of one or several runs, for one answer to Prometheus."""

from __future__ import annotations

from collections.abc import Sequence

from training.core.jsonl import dig, number
from training.monitor.prom_metrics import METRICS, AnyState, Metric, label

Sample = tuple[dict[str, str], float]


class Collected:
    """The samples of all states that are shown, metric by metric, each with labels of its own."""

    def __init__(self) -> None:
        self._most: dict[tuple[str, ...], float] = {}

    def samples(self, states: Sequence[AnyState]) -> list[tuple[Metric, list[Sample]]]:
        """A state without a run tells of the machine only; of several that do, the newest is
        believed."""
        runs = _names([state for state in states if state.get("run")])
        newest = max(states, key=lambda state: number(state.get("time_unix_s")) or 0.0, default={})
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

    def _never_less(self, key: tuple[str, ...], value: float) -> float:
        """A restarted run goes back to its checkpoint; Prometheus would take that for a new counter
        and add all of it again."""
        self._most[key] = max(value, self._most.get(key, value))
        return self._most[key]


def _names(states: Sequence[AnyState]) -> list[tuple[str, AnyState]]:
    """Two runs of one name, in different folders, are told apart by their folders."""
    names = [label(dig(state, "run", "name")) for state in states]
    return [
        (
            name if names.count(name) == 1 else label(dig(state, "run", "dir")) or f"{name} {i}",
            state,
        )
        for i, (name, state) in enumerate(zip(names, states, strict=True))
    ]
