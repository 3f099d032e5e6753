"""Memory-saving choices of the plan, and its advice if no choice fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.cases import each
from training.config import batch, loader
from training.config.schema import Config
from training.core.messages import msg
from training.core.units import GIB
from training.tasks.gpt import memory_fit
from training.tasks.gpt.memory import StepWorkload, estimate

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("conservative", "balanced", "aggressive")


def ready(name: str, **more: Any) -> Config:
    values, problems = loader.load(ROOT / f"configs/dual_gpu/{name}.py")
    assert not problems
    return Config(**{key: value for key, (value, _) in values.items()} | more)


def load_of(config: Config, vocab: int = 320, compiled: bool = True) -> StepWorkload:
    return StepWorkload(
        config.depth,
        0,
        config.max_seq_len,
        vocab,
        bf16=True,
        compiled=compiled,
        total_tokens=config.total_batch_size,
    )


def chosen(
    config: Config, gib: float | None, vocab: int = 320, compiled: bool = True
) -> memory_fit.MemoryPlan:
    found = memory_fit.choose(
        load_of(config, vocab, compiled), config, 2, None if gib is None else int(gib * GIB)
    )
    assert found is not None
    return found


@each("compiled", [True, False])
@each("vocab", [320, 32768, 65536])
@each("name", NAMES)
def test_the_three_configs_fit_two_cards_of_32_gb(name: str, vocab: int, compiled: bool) -> None:
    config = ready(name)
    found = chosen(config, 31, vocab, compiled)
    assert found.load.sequences == config.device_batch_size
    assert estimate(found.load).needed <= 31 * GIB
    assert found.load.extra_time < 0.34


def test_no_recomputation_without_need() -> None:
    for gib in (10.0, 31.0, 500.0):
        found = chosen(ready("conservative"), gib)
        assert (found.load.blocks, found.load.selective, found.load.chunks) == (0, 0, 1)
        assert (
            found.sentence()
            == f"activation checkpointing: none: not needed, 8 sequences fit in {gib:.1f} GiB free"
        )


def test_as_little_recomputation_as_possible() -> None:
    config = ready("aggressive")
    for gib in range(16, 64, 3):
        found = chosen(config, gib)
        assert estimate(found.load).needed <= gib * GIB
        last = found.load.blocks + (found.load.selective + found.load.blocks)
        cheaper = [memory_fit._stage(found.load, stage) for stage in range(last)]
        fitting = [one for one in cheaper if estimate(one).needed <= gib * GIB]
        assert all(found.load.extra_time - one.extra_time <= memory_fit.CHEAP for one in fitting), (
            "more only to be not tight, when cheap"
        )
        if len(fitting) > 0:
            assert estimate(found.load).tight <= gib * GIB


def test_the_reason_has_amounts() -> None:
    found = chosen(ready("aggressive"), 20, 65536)
    blocks, selective, chunks = found.load.blocks, found.load.selective, found.load.chunks
    assert 0 < blocks < 20 and selective == 20 - blocks and chunks > 1
    cost = round(100 * found.load.extra_time)
    assert found.sentence() == (
        f"activation checkpointing: {blocks} of 20 blocks, {selective} of 20 blocks selectively "
        "(matrix products and attention are kept), "
        f"loss in {chunks} parts: needed to fit 14 sequences in 20.0 GiB free; "
        f"costs about {cost} % time"
    )
    assert found.blocks.record() == {
        "value": blocks,
        "reason": "needed to fit 14 sequences in 20.0 GiB free",
    }
    assert (found.selective.value, found.chunks.value) == (selective, chunks)
    assert found.selective.reason == found.blocks.reason


def test_what_is_not_used_is_not_needed() -> None:
    found = chosen(ready("aggressive"), 40)
    assert (found.blocks.value, found.chunks.value) == (0, 1) and found.selective.value > 0
    texts = {"sequences": f"{found.load.sequences} sequences", "room": "40.0 GiB"}
    needed, idle = (msg(f"tasks.gpt.fit.{name}", **texts) for name in ("needed", "not_needed"))
    assert found.selective.reason == needed
    assert (found.blocks.reason, found.chunks.reason) == (idle, idle)
    assert needed in found.sentence()


def test_blocks_are_recomputed_as_a_whole_only_if_selectively_is_not_enough() -> None:
    config, load = ready("aggressive"), replace(load_of(ready("aggressive")), sequences=14)
    before = 0.0
    for gib in range(80, 16, -1):
        found = memory_fit.cheapest(load, config, gib * GIB)
        assert found
        assert found.blocks == 0 or found.blocks + found.selective == 20
        assert found.extra_time >= before, "less memory never costs less time"
        before = found.extra_time
    whole = replace(load, blocks=14)
    room = estimate(whole).needed
    found = memory_fit.cheapest(load, config, room)
    assert found and found.extra_time < 0.9 * whole.extra_time, "the same memory for less time"


def test_selective_as_asked_is_every_block_whatever_the_memory() -> None:
    for gib in (12, 31, 200, None):
        found = chosen(ready("aggressive", activation_checkpointing="selective"), gib)
        assert (found.load.blocks, found.load.selective) == (0, 20)
        assert found.selective.reason == "as asked"
    found = chosen(ready("aggressive", activation_checkpointing=3), 31)
    assert (found.load.blocks, found.load.selective) == (3, 0)


def test_explicit_values_are_kept() -> None:
    found = chosen(ready("aggressive", activation_checkpointing=3, loss_chunks=5), 31)
    assert (found.load.blocks, found.load.selective, found.load.chunks) == (3, 0, 5)
    assert (found.blocks.reason, found.chunks.reason) == ("as asked", "as asked")
    found = chosen(ready("aggressive", activation_checkpointing="none"), 31)
    assert (found.load.blocks, found.load.selective) == (0, 0)
    found = chosen(ready("aggressive", loss_chunks=1), 31, 65536)
    assert found.load.chunks == 1 and found.load.selective > 0


def test_unknown_free_memory_decides_nothing() -> None:
    found = chosen(ready("aggressive"), None)
    assert (found.load.blocks, found.load.selective, found.load.chunks) == (0, 0, 1)
    assert "unknown" in found.blocks.reason


def test_insufficient_memory_is_reported() -> None:
    found = chosen(ready("aggressive"), 3)
    assert "too small: 14 sequences, 3.0 GiB free" in found.blocks.reason
    least = min(
        estimate(replace(found.load, blocks=b, selective=0, chunks=c)).total
        for b in range(21)
        for c in memory_fit.CHUNKS
    )
    assert estimate(found.load).total <= 1.02 * least


def test_no_recomputation_as_asked_is_not_called_a_saving() -> None:
    asked = ready("aggressive", activation_checkpointing="none")
    assert "maximum savings" in chosen(asked, 3, 65536).sentence(), "the loss in parts is one"
    found = chosen(asked, 3)
    assert (found.load.blocks, found.load.selective, found.load.chunks) == (0, 0, 1)
    too_large = msg("tasks.gpt.fit.asked_too_large", sequences="14 sequences", room="3.0 GiB")
    assert found.sentence() == msg("tasks.gpt.fit.no_savings", reason=too_large)


@each("name", NAMES)
@each("gib", [12, 20, 31, 80, 200])
def test_an_automatic_device_batch_is_the_fastest_that_fits(name: str, gib: int) -> None:
    config = ready(name, device_batch_size="auto")
    found = chosen(config, gib)
    assert estimate(found.load).needed <= gib * GIB
    sizes = batch.device_choices(config.max_seq_len, 2, config.total_batch_size)
    assert found.load.sequences in sizes
    for size in (s for s in sizes if s > found.load.sequences):
        larger = memory_fit.cheapest(replace(found.load, sequences=size), config, gib * GIB)
        assert larger is None or larger.extra_time > found.load.extra_time
    if gib == 200:
        assert (found.load.sequences, found.load.blocks, found.load.chunks) == (sizes[-1], 0, 1)
        assert found.sequences.reason == msg("tasks.gpt.fit.largest", sizes=len(sizes))


def test_a_larger_device_batch_is_suggested_where_it_is_faster() -> None:
    config = ready("conservative")  # 8 sequences, two micro-batches on one rank
    load = replace(load_of(config), sequences=8)
    size, saved = memory_fit.larger(load, config, 1, 80 * GIB) or (0, 0.0)
    assert size == 16 and 0.03 < saved < 0.05
    assert memory_fit.larger(load, config, 2, 80 * GIB) is None, "no accumulation to avoid"
    assert memory_fit.larger(load, config, 1, 9 * GIB) is None, "no room"
    assert memory_fit.larger(load, config, 1, None) is None, "unknown room"
    auto = replace(config, device_batch_size="auto")
    assert memory_fit.larger(load, auto, 1, 80 * GIB) is None


@each("size", [1, 2, 3, 4, 6, 24])
@each("gib", [16, 24])
def test_the_suggestion_is_what_auto_chooses_with_its_time(gib: int, size: int) -> None:
    """In a tight GPU `auto` also recomputes a little more."""
    config = ready("balanced", device_batch_size=size)
    load = replace(load_of(config, 32768), ranks=2, total_tokens=config.total_batch_size)
    room = gib * GIB
    given = memory_fit.choose(load, config, 2, room)
    auto = memory_fit.choose(load, replace(config, device_batch_size="auto"), 2, room)
    assert given and auto
    saved = 1 - memory_fit._time(auto.load) / memory_fit._time(given.load)
    worth_it = auto.load.sequences > size and saved >= memory_fit.WORTH_IT
    wanted = (auto.load.sequences, saved) if worth_it else None
    assert memory_fit.larger(given.load, config, 2, room) == wanted


def test_only_a_larger_device_batch_is_suggested_and_only_if_the_given_one_fits() -> None:
    config = ready("balanced", device_batch_size=24)
    load = replace(load_of(config, 32768), ranks=2, sequences=24, blocks=config.depth)
    assert memory_fit.larger(load, config, 2, 10 * GIB) is None
    roomy = replace(load, sequences=8)  # as if all blocks were recomputed without need
    assert memory_fit.larger(roomy, config, 2, 200 * GIB)
    most = batch.device_choices(config.max_seq_len, 2, config.total_batch_size)[-1]
    assert memory_fit.larger(replace(load, sequences=most), config, 2, 200 * GIB) is None


def test_an_invalid_or_oversized_device_batch() -> None:
    config = ready("balanced", device_batch_size="auto")
    hopeless = chosen(config, 1)
    assert (hopeless.load.sequences, "does not fit" in hopeless.sequences.reason) == (1, True)
    unknown = chosen(config, None)
    assert unknown.load.sequences == 12
    odd = replace(config, total_batch_size=24577)
    assert memory_fit.choose(load_of(odd), odd, 2, None) is None


@each("gib", [4, 6, 9, 12, 20, 31])
@each(
    "more",
    [
        {},
        {"activation_checkpointing": "none"},
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": 5, "loss_chunks": 2},
        {"loss_chunks": 1},
    ],
    ids=lambda m: " ".join(map(str, m.values())) or "auto",
)
@each("name", NAMES)
@each("vocab", [320, 65536])
def test_suggestions_fit_and_divide(name: str, more: dict[str, Any], gib: int, vocab: int) -> None:
    config = ready(name, **more)
    found = chosen(config, gib, vocab)
    if estimate(found.load).needed <= gib * GIB:
        return
    changes = memory_fit.suggestions(found.load, config, 2, gib * GIB)
    assert changes
    for change in changes:
        changed = replace(config, **change)
        again = chosen(changed, gib, vocab)
        assert estimate(again.load).needed <= gib * GIB, change
        size = changed.device_batch_size
        assert isinstance(size, int)
        assert batch.split(size, changed.max_seq_len, 2, changed.total_batch_size)
        assert changed != config


def test_a_smaller_micro_batch_includes_the_cost_of_accumulation() -> None:
    """A smaller micro-batch adds a copy of the gradients, which must fit too."""
    config = ready("conservative", device_batch_size="auto")
    load = replace(load_of(config), ranks=2, total_tokens=config.total_batch_size)
    for gib in (5, 8, 12, 31):
        found = memory_fit.choose(load, config, 2, gib * GIB)
        assert found
        accumulates = config.total_batch_size > 2 * found.load.tokens
        assert estimate(found.load).gradients == 4 * load.shape.weights * (2 if accumulates else 1)
