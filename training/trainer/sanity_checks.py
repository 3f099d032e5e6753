"""Checks that all ranks train, on different data and with the same weights. (`--debug_ddp` shows
the results of every rank.)

At the start of each epoch the ranks' shards are verified to be disjoint and complete; in each step
every rank's share is checked; every `inspect_every` steps the parameters are compared. The step
checks use the reduction of the loss: no further collective.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import TYPE_CHECKING

from training.core import log, metric_units, units
from training.core.messages import msg
from training.data.permutation import digest
from training.inspector.checksum import checksums, shared
from training.inspector.distributed import exchange_texts
from training.trainer.loss_scale import BACKOFF, MINIMUM, PATIENCE
from training.trainer.step_stats import NO_CHECKSUM, RankStep, StepReport

if TYPE_CHECKING:
    from training.core.contracts.events import ShardReport
    from training.trainer.checkpoint import TrainProgress
    from training.trainer.train_state import TrainState

PROVEN_SEQUENCES = 1 << 18  # maximum per epoch: some ten milliseconds
SHOWN_INDICES = 8


class SanityCheckError(RuntimeError):
    """Ranks have inconsistent data, weights or steps. Raised on all ranks; `rank`: the guilty
    one."""

    of_code = False  # the line that raised it is that of the check

    def __init__(self, text: str, rank: int | None) -> None:
        super().__init__(text)
        self.rank = rank


class NotFinite(SanityCheckError):
    """A loss or gradient is NaN or infinite, with fp16 in many steps in a row."""


class EmptyBatch(SanityCheckError):
    """A rank had no samples in a batch."""


class ShardsOverlap(SanityCheckError):
    """Ranks would train on the same data or skip some."""


class ParametersDiffer(SanityCheckError):
    """The ranks' weights differ."""


def prove_shards(session: TrainState, position: TrainProgress) -> None:
    """Compare the sequences that all ranks will take with the complete set, on rank 0. Raises
    ShardsOverlap there."""
    world, batches = session.world, session.batches
    steps = min(session.steps_left(position), max(1, PROVEN_SEQUENCES // batches.step_sequences))
    own = batches.indices(position.epoch, position.used, steps=steps)
    report: ShardReport = {
        "rank": world.rank,
        "world_size": world.world_size,
        "dataset_sequences": len(batches.dataset),
        "batches": session.steps_left(position) * session.batch.accumulation,
        "first_sequences": own[:SHOWN_INDICES].tolist(),
        "count": len(own),
        "digest": digest(own),
    }
    texts = exchange_texts(f"shards/{position.epoch}/{position.used}", json.dumps(report))
    if world.rank != 0:
        return
    reports: list[ShardReport] = [json.loads(text) for text in texts]
    whole = batches.order(position.epoch).indices(
        position.used, position.used + steps * batches.step_sequences
    )
    wrong = [
        r["rank"]
        for r in reports
        if r["count"] * world.world_size != len(whole)
        or r["dataset_sequences"] != len(batches.dataset)
    ]
    total = sum(r["digest"] for r in reports) % (1 << 64)
    if wrong or total != digest(whole):
        first = wrong[0] if wrong else _first_wrong(session, position, steps, reports)
        _log_reports(session, reports)
        text = msg(
            "trainer.sanity.shards",
            epoch=position.epoch + 1,
            first=first,
            share=_shard(session, reports[first or 0]),
            main=_shard(session, reports[0]),
        )
        raise ShardsOverlap(text, first)
    pieces = session.task.pieces
    session.run.event(
        "shards",
        epoch=position.epoch + 1,
        proven_sequences=len(whole),
        pieces=pieces,
        ranks=reports,
    )
    if position.epoch == 0 or session.config.debug_ddp:
        piece, ranks, epoch = pieces.removesuffix("s"), world.world_size, position.epoch + 1
        much, checked = (units.plural(count, piece) for count in (len(batches.dataset), len(whole)))
        left = units.plural(session.steps_left(position), "step")
        log.info(
            msg(
                "trainer.sanity.data",
                epoch=epoch,
                much=much,
                left=left,
                ranks=ranks,
                checked=checked,
            )
            if ranks > 1
            else msg(
                "trainer.sanity.data_alone", epoch=epoch, much=much, left=left, checked=checked
            )
        )
    if session.config.debug_ddp:
        _log_reports(session, reports)


def _log_reports(session: TrainState, reports: list[ShardReport]) -> None:
    for r in reports:
        log.info(
            msg(
                "trainer.sanity.rank_data",
                rank=r["rank"],
                world_size=r["world_size"],
                dataset_sequences=r["dataset_sequences"],
                pieces=metric_units.piece_word(session.task.pieces),
                batches=r["batches"],
                first_sequences=r["first_sequences"],
            )
        )


def _shard(session: TrainState, report: ShardReport) -> str:
    size = report["dataset_sequences"]
    pieces = metric_units.piece_word(session.task.pieces, size)
    return msg("trainer.sanity.shard", count=report["count"], size=size, pieces=pieces)


def _first_wrong(
    session: TrainState, position: TrainProgress, steps: int, reports: list[ShardReport]
) -> int | None:
    """The first rank whose digest does not match the sequences assigned to it."""
    for r in reports:
        if r["digest"] != digest(
            session.batches.indices(position.epoch, position.used, r["rank"], steps)
        ):
            return r["rank"]
    return None


def check_step(session: TrainState, report: StepReport, position: TrainProgress) -> None:
    """Check a finished step that began at `position`. Raises a SanityCheckError on all ranks."""
    step = position.step + 1
    for rank, share in enumerate(report.shares):
        if share.step != step:
            raise SanityCheckError(
                msg("trainer.sanity.other_step", rank=rank, step=share.step, own=step), rank
            )
        if share.sequences <= 0:
            raise EmptyBatch(
                msg(
                    "trainer.sanity.empty_batch",
                    rank=rank,
                    step=step,
                    samples=_samples(session, position, rank),
                ),
                rank,
            )
        if not math.isfinite(share.loss) and not report.skipped:
            raise NotFinite(
                f"loss is {share.loss} on rank {rank} at step {step} "
                f"({_samples(session, position, rank)})",
                rank,
            )
    if report.skipped:
        _check_overflow(session, report, position)
    elif not math.isfinite(report.norm):
        raise NotFinite(
            f"the gradient norm is {report.norm} at step {step}, while every rank's loss is finite",
            None,
        )
    if report.shares[0].checksum != NO_CHECKSUM:
        _compare(session, report, step)
        if session.config.debug_ddp and session.world.rank == 0:
            shown = "; ".join(_share(session, r, s) for r, s in enumerate(report.shares))
            log.info(
                msg(
                    "trainer.sanity.all_train",
                    step=step,
                    shown=shown,
                    checksum=int(report.shares[0].checksum),
                )
            )


def _share(session: TrainState, rank: int, share: RankStep) -> str:
    pieces = metric_units.piece_word(session.task.pieces, share.sequences)
    return msg(
        "trainer.sanity.rank",
        r=rank,
        sequences=share.sequences,
        pieces=pieces,
        loss=units.decimal(share.loss),
    )


def _check_overflow(session: TrainState, report: StepReport, position: TrainProgress) -> None:
    """A step of fp16 was skipped. Raises NotFinite if a smaller loss scale did not help."""
    scale, step = session.loss_scale, position.step + 1
    assert scale and report.scale is not None
    if scale.stuck < PATIENCE:
        if session.world.rank == 0:
            following = max(report.scale * BACKOFF, MINIMUM)
            log.info(msg("trainer.sanity.skipped", step=step, scale=report.scale, next=following))
        return
    text = msg("trainer.sanity.overflow", count=scale.stuck, scale=report.scale, step=step)
    guilty = [rank for rank, s in enumerate(report.shares) if not math.isfinite(s.loss)]
    if guilty:
        loss, place = report.shares[guilty[0]].loss, _samples(session, position, guilty[0])
        text = msg(
            "trainer.sanity.overflow_loss", text=text, loss=loss, rank=guilty[0], samples=place
        )
    raise NotFinite(text, guilty[0] if guilty else None)


def _samples(session: TrainState, position: TrainProgress, rank: int) -> str:
    """The sequences of a rank; computable on every rank, since the order is arithmetic."""
    indices = [int(i) for i in session.batches.indices(position.epoch, position.used, rank)]
    shown = ", ".join(map(str, indices[: 2 * SHOWN_INDICES]))
    pieces = metric_units.piece_word(session.task.pieces, len(indices))
    place = msg("trainer.sanity.place", epoch=position.epoch + 1, pieces=pieces, shown=shown)
    return (
        msg("trainer.sanity.place_more", place=place, indices=len(indices))
        if len(indices) > 2 * SHOWN_INDICES
        else place
    )


def _compare(session: TrainState, report: StepReport, step: int) -> None:
    """Raises ParametersDiffer, with the first parameter that differs."""
    seen = [share.checksum for share in report.shares]
    common, votes = Counter(seen).most_common(1)[0]
    if votes == len(seen):
        return
    texts = exchange_texts(
        f"parameters/{step}", json.dumps(checksums(session.raw).tolist()), everybody=True
    )
    columns = zip(*(json.loads(text) for text in texts), strict=True)
    names = [
        name
        for name, column in zip(shared(session.raw), columns, strict=True)
        if len(set(column)) > 1
    ]
    # With two ranks there is no majority: both are named.
    guilty = (
        [r for r, value in enumerate(seen) if value != common]
        if votes > len(seen) / 2
        else list(range(len(seen)))
    )
    who = (
        f"rank {', '.join(map(str, guilty))}"
        if len(guilty) < len(seen)
        else f"ranks {', '.join(map(str, guilty))} (no majority)"
    )
    text = (
        f"parameters differ at step {step}: {who}; {len(names)} parameters, first "
        f"{names[0] if names else '(equal by now)'}"
    )
    raise ParametersDiffer(text, guilty[0] if len(guilty) < len(seen) else None)
