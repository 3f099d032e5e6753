"""One health check: its status and its evidence."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from training.core.messages import msg

OK, WARN, BAD, UNKNOWN = "ok", "warn", "bad", "unknown"


@dataclass(frozen=True)
class HealthCheck:
    """`headline`: text for the first line of the answer if this check decides it; default: `text`.
    `ranks`: the ranks concerned, if not all."""

    name: str
    status: str  # OK, WARN, BAD, UNKNOWN
    text: str
    ranks: tuple[int, ...] = field(default=())
    headline: str = ""

    @property
    def shown_name(self) -> str:
        match self.name:
            case "processes":
                return msg("monitor.health.name.processes")
            case "steps":
                return msg("monitor.health.name.steps")
            case "GPUs":
                return msg("monitor.health.name.gpus")
            case "speed":
                return msg("monitor.health.name.speed")
            case "data":
                return msg("monitor.health.name.data")
            case "parameters":
                return msg("monitor.health.name.parameters")
            case "memory":
                return msg("monitor.health.name.memory")
            case "checkpoint":
                return msg("monitor.health.name.checkpoint")
            case "findings":
                return msg("monitor.health.name.findings")
            case "inspector":
                return msg("monitor.health.name.inspector")
            case "attention":
                return msg("monitor.health.name.attention")
            case "log":
                return msg("monitor.health.name.log")
        return self.name

    @property
    def shown_headline(self) -> str:
        return self.headline or self.text


def numbers(ranks: Collection[int]) -> str:
    """'rank 1', 'ranks 0 and 1', 'ranks 0-3, 6'."""
    listed = sorted(ranks)
    if len(listed) == 2:
        return msg("monitor.health.two_ranks", first=listed[0], second=listed[1])
    spans: list[list[int]] = []
    for rank in listed:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    if len(listed) > 1:
        return msg("monitor.health.ranks", ranks=words)
    return msg("monitor.health.rank", rank=words)


def alike(values: dict[int, str]) -> str:
    """Values by rank, ranks with equal values together: 'ranks 0-3 step 7 → 9; rank 4 step 7'."""
    together: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        together.setdefault(value, []).append(rank)
    return separated(f"{numbers(ranks)} {value}" for value, ranks in together.items())


def separated(parts: Iterable[str]) -> str:
    """'a; b'"""
    return msg("monitor.join.semicolon").join(parts)


def span(values: Iterable[float], unit: str, digits: int = 0) -> str:
    """'12 ms', or '12 to 14 ms'."""
    low, *_, high = [f"{v:.{digits}f}" for v in sorted([*values] * 2)]
    return (
        f"{low} {unit}"
        if low == high
        else msg("monitor.health.span", low=low, high=high, unit=unit)
    )
