"""Analysis of what the ranks report at their start: models, data sets, and the samples that they
train, which have to differ from rank to rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .messages import msg
from .reporting import MANY, Finding, joined, listed, ranks
from .sample_tracker import SHOWN

if TYPE_CHECKING:
    from training.inspector.exchange import SampledReport, SeenReport, StartReport

    Report = Callable[..., None]
    Find = Callable[[Finding], None]

SAME = 0.5  # share of common samples of two ranks that is not a coincidence


def report_start(reports: list[StartReport], report: Report, find: Find) -> None:
    """Reports the data of each rank, whether models can be compared, and uneven epochs."""
    world = len(reports)
    for rank, r in enumerate(reports[:MANY]):
        facts = {key: r[key] for key in ("dataset", "batches", "sampler", "first")}
        report(
            msg("inspector.start.rank", rank=rank, world=world, data=_data(r)),
            rank=rank,
            world_size=world,
            **facts,
        )
    reasons = sorted({r["left_out"] for r in reports if r["left_out"]})
    if len({r["structure"] for r in reports}) > 1:
        report(msg("inspector.start.different_models"))
    elif world > 1 and reasons:
        left = joined(reasons)
        report(
            msg("inspector.start.not_compared", reasons=left)
            if any(r["compared"] for r in reports)
            else msg("inspector.start.none_compared", reasons=left)
        )
    if world > 1 and not any(r["wrapped"] for r in reports):
        report(msg("inspector.start.not_wrapped"))
    counts = [r["batches"] for r in reports]
    if len({c for c in counts if c is not None}) > 1:
        least = min(c for c in counts if c is not None)
        few = [rank for rank, count in enumerate(counts) if count == least]
        most = max(c for c in counts if c is not None)
        find(
            Finding(
                "uneven",
                msg("inspector.uneven_one", ranks=ranks(few), least=1, most=most)
                if least == 1
                else msg("inspector.uneven", ranks=ranks(few), least=least, most=most),
                few[0],
            )
        )


def compare_samples(
    starts: list[StartReport], seen: list[SeenReport], report: Report, find: Find
) -> None:
    """Reports whether ranks train the same samples."""
    pairs = (
        [(a, b) for a in range(len(seen)) for b in range(a + 1, len(seen))]
        if len(seen) <= MANY
        else [(0, b) for b in range(1, len(seen))]
    )
    same: list[tuple[int, int, str]] = []
    notes: list[tuple[int, int, str]] = []
    for a, b in pairs:
        evidence, certain = _overlap({**starts[a], **seen[a]}, {**starts[b], **seen[b]})
        if evidence:
            (same if certain else notes).append((a, b, evidence))
    if same:
        guilty = sorted({rank for a, b, _ in same for rank in (a, b)})
        find(
            Finding(
                "overlap",
                msg("inspector.overlap.same_samples", ranks=ranks(guilty), evidence=same[0][2]),
                None,
                None,
            )
        )
    elif notes:
        report(f"{ranks([notes[0][0], notes[0][1]])}: {notes[0][2]}")
    elif all(s["digests"] or s["indices"] for s in seen):
        count = min(len(s["indices"] or s["digests"]) for s in seen)
        report(msg("inspector.overlap.disjoint", count=count))
    else:
        report(msg("inspector.overlap.unknown"))


def _data(r: StartReport) -> str:
    if not r["sampler"]:
        return msg("inspector.data.no_loader")
    parts = [
        msg("inspector.data.samples_unknown")
        if r["dataset"] is None
        else msg("inspector.data.sample", samples=1)
        if r["dataset"] == 1
        else msg("inspector.data.samples", samples=r["dataset"]),
        msg("inspector.data.batches_unknown")
        if r["batches"] is None
        else msg("inspector.data.batch", batches=1)
        if r["batches"] == 1
        else msg("inspector.data.batches", batches=r["batches"]),
        r["sampler"],
    ]
    if r["first"]:
        parts.append(
            msg(
                "inspector.data.first",
                indices=listed([i for batch in r["first"] for i in batch], SHOWN),
            )
        )
    return ", ".join(parts)


def _overlap(a: SampledReport, b: SampledReport) -> tuple[str, bool]:
    """(evidence of common samples of two ranks or '', whether it is certain)."""
    one, other = set(a["digests"]), set(b["digests"])
    # Samples that repeat often within a rank prove nothing.
    known = all(len(s) >= 2 and 2 * len(s) >= len(r["digests"]) for s, r in ((one, a), (other, b)))
    common = len(one & other)
    if known and common >= SAME * min(len(one), len(other)):
        return msg(
            "inspector.overlap.by_content", common=common, count=min(len(one), len(other))
        ), True
    if not a["fingerprint"] or a["fingerprint"] != b["fingerprint"] or a["dataset"] != b["dataset"]:
        return "", False  # different datasets
    mine, its = set(a["indices"] or ()), set(b["indices"] or ())
    shared = len(mine & its)
    alike = bool(shared) and shared >= SAME * min(len(mine), len(its))
    if alike and known:
        return (
            msg("inspector.overlap.same_indices"),
            False,
        )
    if a["whole_dataset"] and b["whole_dataset"]:
        return (
            msg("inspector.overlap.whole_dataset", samples=a["dataset"]),
            True,
        )
    return (
        (msg("inspector.overlap.by_index", shared=shared, count=min(len(mine), len(its))), True)
        if alike
        else ("", False)
    )
