"""Compression, bucket size and compiled graphs with which a predicted exchange of gradients
(training.plan.exchange) costs least, and the batch with which it costs little."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from training.core import units
from training.core.messages import msg
from training.host.decisions import Decision
from training.plan import exchange
from training.plan.exchange import Exchange
from training.tasks.memory import CompiledBlocks

BF16, NONE, AUTO = "bf16", "none", "auto"


@dataclass(frozen=True)
class Tuned:
    """An exchange with the best buckets and graphs for it, or those of the run to resume."""

    exchange: Exchange
    bucket: Decision
    graphs: Decision | None  # None: nothing is compiled in blocks


@dataclass(frozen=True)
class Choice:
    """What `tuned` sends as asked for, or as `auto` decides; `half`: the same compressed."""

    tuned: Tuned
    half: Exchange
    compression: Decision | None  # None: `auto`, and the arithmetic is unknown

    @property
    def exchange(self) -> Exchange:
        return self.tuned.exchange


def choose(
    wish: Decision,
    one: Exchange,
    blocks: CompiledBlocks | None,
    bucket: Decision | None = None,
    graphs: Decision | None = None,
) -> Choice:
    """`wish`: of --gradient_compression; `bucket`, `graphs`: of the run to resume."""
    plain, half = (
        _tuned(replace(one, compressed=compressed), blocks, bucket, graphs)
        for compressed in (False, True)
    )
    compression = (
        _compression(exchange.saved(plain.exchange, half.exchange)) if wish.value == AUTO else wish
    )
    compressed = compression is not None and compression.value == BF16
    return Choice(half if compressed else plain, half.exchange, compression)


def enough_accumulation(
    one: Exchange, choice: Callable[[Exchange], Choice], most: int = 16
) -> tuple[int, Exchange] | None:
    """(the smallest factor of accumulation, a power of two up to `most`, with which the GPUs wait
    little, the exchange with it); None: even the largest is not enough. Each factor has a choice of
    its own: with more arithmetic, compression and large graphs gain less or more."""
    factor = 2
    while factor <= most:
        then = choice(one.accumulated(factor)).exchange
        if then.waits_little:
            return factor, then
        factor *= 2
    return None


def _compression(saved: float | None) -> Decision | None:
    """`saved`: share of a step."""
    if saved is None:
        return None
    if saved >= exchange.PAYS:
        return Decision(BF16, msg("plan.gradients.pays", saved=100 * saved))
    least = 100 * exchange.PAYS
    little = msg("plan.gradients.little", saved=units.percent(100 * saved), least=least)
    return Decision(NONE, little)


def _tuned(
    one: Exchange, blocks: CompiledBlocks | None, bucket: Decision | None, graphs: Decision | None
) -> Tuned:
    bucket = bucket or _best_bucket(one)
    one = replace(one, bucket_mib=bucket.value)
    if blocks is None:
        return Tuned(one, bucket, None)
    graphs = graphs or _best_graphs(one, blocks)
    one = exchange.in_graphs(one, blocks.count, blocks.gradient_bytes, graphs.value)
    return Tuned(one, bucket, graphs)


def _best_bucket(one: Exchange) -> Decision:
    size, optimum = exchange.best_bucket(one)
    if size == exchange.BUCKET_MIB:
        return Decision(size, msg("plan.gradients.default_buckets", optimum=optimum))
    return Decision(size, msg("plan.gradients.buckets", optimum=optimum))


def _best_graphs(one: Exchange, blocks: CompiledBlocks) -> Decision:
    """Blocks per compiled graph: several where a slow host could not keep up with the GPUs, and the
    later exchange of their gradients costs less."""
    single, several = (
        exchange.in_graphs(one, blocks.count, blocks.gradient_bytes, count)
        for count in (1, blocks.together)
    )
    if one.compute_s is None:
        return Decision(1, msg("plan.gradients.graphs_unknown"))
    later = several.exposed_s - single.exposed_s
    # of the launches that the arithmetic does not hide
    saved = single.launches_s - max(several.launches_s, one.compute_s)
    if saved <= 0:
        return Decision(1, msg("plan.gradients.graphs_hidden"))
    return Decision(
        blocks.together if saved > later else 1,
        msg(
            "plan.gradients.graphs_cost",
            count=blocks.together,
            saved=saved * 1e3,
            later=later * 1e3,
        ),
    )
