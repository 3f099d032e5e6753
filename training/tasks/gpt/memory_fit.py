"""Settings with which a step fits the memory: micro-batch, loss in parts, checkpointed blocks; and
suggestions if nothing fits.

The fastest of all settings estimated to fit is chosen. Recomputing the head (loss in parts) and
blocks costs their multiplications; each micro-batch costs OVERHEAD_TOKENS in addition to its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from training.config import batch
from training.config.schema import Config
from training.core.messages import msg
from training.core.metric_units import memory_word
from training.core.units import plural
from training.host.decisions import AS_ASKED, Decision
from training.tasks.gpt.memory import Estimate, StepWorkload, estimate
from training.tasks.memory import gib

if TYPE_CHECKING:
    from training.core.contracts.kinds import FieldValues

CHUNKS = (1, 2, 4, 8, 16, 32, 64, 128)
CHEAP = 0.03  # share of extra time accepted to avoid a tight fit
# an estimate: kernel launches and partial last waves of a micro-batch on a GPU
OVERHEAD_TOKENS = 1024
WORTH_IT = 0.03  # share of time saved from which a larger micro-batch is suggested
AUTO, SELECTIVE = "auto", "selective"
Limit = Callable[[Estimate], int]


@dataclass(frozen=True)
class MemoryPlan:
    """The chosen load, each part with its reason; `load` has the values."""

    load: StepWorkload
    sequences: Decision
    blocks: Decision
    selective: Decision
    chunks: Decision

    def sentence(self) -> str:
        """The plan line about activation checkpointing."""
        load, savings = self.load, []
        if load.blocks:
            savings.append(msg("tasks.gpt.fit.blocks", blocks=load.blocks, depth=load.depth))
        if load.selective:
            savings.append(msg("tasks.gpt.fit.selective", blocks=load.selective, depth=load.depth))
        blocks = self.blocks if load.blocks else self.selective
        reason = blocks.reason if savings else self.chunks.reason
        if load.chunks > 1:
            savings.append(msg("tasks.gpt.fit.chunks", chunks=load.chunks))
        if not savings:
            return msg("tasks.gpt.fit.no_savings", reason=reason)
        return msg(
            "tasks.gpt.fit.savings",
            savings=msg("tasks.gpt.fit.and").join(savings),
            reason=reason,
            percent=max(1, round(100 * load.extra_time)),
        )


def choose(
    load: StepWorkload, config: Config, ranks: int, room: int | None, *, exact: bool = False
) -> MemoryPlan | None:
    """Choose the values of `auto`. The savings of `load` are the least that it gets; with `exact`
    it gets no others unless they are too few. `room`: free bytes for one rank, None if unknown.
    None if no micro-batch divides the batch."""
    size = _sequences(load, config, ranks, room)
    if size is None:
        return None
    found, saves, idle = _frugal(replace(load, sequences=size.value), config, room, exact)
    kept = msg("tasks.gpt.fit.kept_exactly") if exact else msg("tasks.gpt.fit.kept")

    def decided(asked: int | str, value: int, unused: int, least: int) -> Decision:
        if asked != AUTO:
            return Decision(value, AS_ASKED)
        if value == unused:
            return Decision(value, idle)
        return Decision(value, kept if value == least else saves)

    return MemoryPlan(
        found,
        size,
        decided(config.activation_checkpointing, found.blocks, 0, load.blocks),
        decided(config.activation_checkpointing, found.selective, 0, load.selective),
        decided(config.loss_chunks, found.chunks, 1, load.chunks),
    )


def _sequences(load: StepWorkload, config: Config, ranks: int, room: int | None) -> Decision | None:
    if isinstance(config.device_batch_size, int):
        return Decision(config.device_batch_size, AS_ASKED)
    sizes = batch.device_choices(config.max_seq_len, ranks, config.total_batch_size)
    if not sizes:
        return None
    if room is None:
        return Decision(
            sizes[-1],
            msg("tasks.gpt.fit.largest_unknown", sizes=len(sizes), memory=memory_word(load.cuda)),
        )
    fitting = [
        one for size in sizes if (one := cheapest(replace(load, sequences=size), config, room))
    ]
    if not fitting:
        return Decision(sizes[0], msg("tasks.gpt.fit.smallest"))
    best = min(fitting, key=_time)
    if best is fitting[-1]:
        return Decision(best.sequences, msg("tasks.gpt.fit.largest", sizes=len(sizes)))
    return Decision(
        best.sequences,
        msg("tasks.gpt.fit.fastest", sizes=len(sizes)),
    )


def larger(
    load: StepWorkload, config: Config, ranks: int, room: int | None
) -> tuple[int, float] | None:
    """Sequences of the larger micro-batch that `auto` chooses instead of the given one, and the
    share of time that it saves, with the savings that `auto` would give it; None if the given one
    does not fit, or if that is not worth a suggestion. (`auto` may also choose a smaller one, for
    less recomputation.)"""
    if room is None or config.device_batch_size == AUTO or estimate(load).needed > room:
        return None
    best = choose(_plain(load), replace(config, device_batch_size=AUTO), ranks, room)
    found = best.load if best else load
    if found.sequences <= load.sequences or estimate(found).needed > room:
        return None
    saved = 1 - _time(found) / _time(load)
    return (found.sequences, saved) if saved >= WORTH_IT else None


def _time(load: StepWorkload) -> float:
    """Time per token, relative to no recomputation in an infinite micro-batch."""
    return (1 + load.extra_time) * (1 + OVERHEAD_TOKENS / load.tokens)


def _frugal(
    load: StepWorkload, config: Config, room: int | None, exact: bool
) -> tuple[StepWorkload, str, str]:
    """The load with its savings, the reason of those, and of the ones it does without."""
    if room is None:
        reason = msg("tasks.gpt.fit.not_chosen", memory=memory_word(load.cuda))
        return next(_candidates(load, config)), reason, reason
    found = cheapest(load, config, room)
    sequences = plural(load.sequences, "sequence")
    if found is None:
        least = _least(load, config)
        blocks_asked = config.activation_checkpointing != AUTO
        given = blocks_asked and (config.loss_chunks != AUTO or least.chunks == 1)
        reason = (
            msg("tasks.gpt.fit.asked_too_large", sequences=sequences, room=gib(room))
            if given
            else msg("tasks.gpt.fit.savings_too_large", sequences=sequences, room=gib(room))
        )
        return least, reason, reason
    roomy = cheapest(load, config, room, lambda one: one.tight)
    if roomy and not exact and roomy.extra_time - found.extra_time <= CHEAP:
        found = roomy
    return (
        found,
        msg("tasks.gpt.fit.needed", sequences=sequences, room=gib(room)),
        msg("tasks.gpt.fit.not_needed", sequences=sequences, room=gib(room)),
    )


def _least(load: StepWorkload, config: Config) -> StepWorkload:
    """With all savings that `config` allows."""
    return min(_candidates(load, config, everything=True), key=lambda one: estimate(one).total)


def lightest(load: StepWorkload) -> FieldValues:
    """The fields that save the most memory of this model and micro-batch, with values that force
    it; {} if nothing is left to save."""
    forced = (
        one
        for one in _candidates(_plain(load), Config(), everything=True)
        if AUTO not in settings(one).values()
    )
    found, now = min(forced, key=lambda one: estimate(one).total), settings(load)
    if estimate(found).total >= estimate(load).total:
        return {}
    return {name: value for name, value in settings(found).items() if value != now[name]}


def cheapest(
    load: StepWorkload, config: Config, room: int, limit: Limit = lambda one: one.needed
) -> StepWorkload | None:
    """The least recomputation that fits, from that of `load` on; explicit values are not
    changed."""

    def fits(one: StepWorkload) -> bool:
        return limit(estimate(one)) <= room

    found = []
    for plain in _candidates(load, config):
        if config.activation_checkpointing != AUTO:
            found += [plain] if fits(plain) else []
            continue
        # Memory decreases with each stage up to the last but one; the last is a special case
        # (memory.estimate).
        low, high = _number(plain), 2 * load.depth
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(_stage(plain, middle)) else (middle + 1, high)
        if fits(one := _stage(plain, low)):
            found.append(one)
    return min(found, key=lambda one: (one.extra_time, one.chunks), default=None)


def _stage(load: StepWorkload, number: int) -> StepWorkload:
    """The load with the first `number` of 2 × depth savings of `auto`, in the order of their cost
    per byte: each block selectively, then each as a whole."""
    whole = max(0, number - load.depth)
    return replace(load, blocks=whole, selective=min(number, load.depth) - whole)


def _number(load: StepWorkload) -> int:
    """The stage of a load with savings of `auto`."""
    return min(2 * load.blocks + load.selective, 2 * load.depth)


def _plain(load: StepWorkload) -> StepWorkload:
    return replace(load, blocks=0, selective=0, chunks=1)


def _candidates(
    load: StepWorkload, config: Config, everything: bool = False
) -> Iterator[StepWorkload]:
    """Loads with every allowed number of parts, ascending, from the savings of `load` on; with
    `everything`, all blocks are checkpointed too."""
    asked = config.activation_checkpointing
    if asked == AUTO:
        stages = (2 * load.depth - 1, 2 * load.depth) if everything else (_number(load),)
        blocks = [_stage(load, number) for number in stages]
    elif asked == SELECTIVE:
        blocks = [_stage(load, load.depth)]
    else:
        blocks = [replace(load, blocks=asked if isinstance(asked, int) else 0, selective=0)]
    possible = [n for n in CHUNKS if n <= load.tokens]
    chunks = (
        [config.loss_chunks]
        if isinstance(config.loss_chunks, int)
        else [n for n in possible if n >= load.chunks] or possible[-1:]
    )
    for number in chunks:
        for one in blocks:
            yield replace(one, chunks=number)


def suggestions(load: StepWorkload, config: Config, ranks: int, room: int) -> list[FieldValues]:
    """Configuration changes estimated to fit, the smallest change of each kind."""
    load = _plain(load)
    free = replace(config, activation_checkpointing=AUTO, loss_chunks=AUTO)
    out = []
    if free != config and (found := cheapest(load, free, room)):
        out.append(_settings(found, config))
    sizes = batch.device_choices(config.max_seq_len, ranks, config.total_batch_size)
    for size in (s for s in reversed(sizes) if s < load.sequences):
        smaller = replace(load, sequences=size)
        if cheapest(smaller, config, room):
            out.append({"device_batch_size": size})
            break
        if found := cheapest(smaller, free, room):
            out.append({"device_batch_size": size, **_settings(found, config)})
            break
    low, high = 0, load.depth  # range of the greatest depth that fits with the same micro-batch
    while low < high - 1:
        middle = (low + high) // 2
        low, high = (
            (middle, high) if cheapest(replace(load, depth=middle), free, room) else (low, middle)
        )
    if low and (found := cheapest(replace(load, depth=low), free, room)):
        size_too = {"device_batch_size": load.sequences} if config.device_batch_size == AUTO else {}
        out.append({"depth": low, **size_too, **_settings(found, config)})
    return out


def fixed(load: StepWorkload, config: Config, room: int) -> FieldValues:
    """Values in place of `auto` with which this micro-batch fits: those of `load`, or in place of a
    mixture the fastest ones."""
    if config.activation_checkpointing == AUTO == settings(load)["activation_checkpointing"]:
        values = (SELECTIVE, *range(1, load.depth + 1))
        options = (replace(config, activation_checkpointing=one) for one in values)
        fitting = [one for each in options if (one := cheapest(_plain(load), each, room))]
        load = min(fitting, key=_time, default=load)
    found = {"device_batch_size": load.sequences, **settings(load)}
    return {name: value for name, value in found.items() if getattr(config, name) == AUTO != value}


def _settings(found: StepWorkload, config: Config) -> FieldValues:
    """Flags for `found`, for the values that the user set; the rest stays `auto`."""
    return {name: value for name, value in settings(found).items() if getattr(config, name) != AUTO}


def settings(found: StepWorkload) -> FieldValues:
    """The fields that repeat these savings. A mixture of selective and whole blocks has no value:
    `auto` finds it again."""
    blocks: int | str = AUTO
    if not found.selective:
        blocks = found.blocks or "none"
    elif found.selective == found.depth:
        blocks = SELECTIVE
    return {"activation_checkpointing": blocks, "loss_chunks": found.chunks}
