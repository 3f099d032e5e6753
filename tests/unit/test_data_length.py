"""Length of a run, and the suggestion if the text is too short for one step."""

from __future__ import annotations

import random
import shlex
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.cases import each
from tests.unit.conftest import ENHANCED, Shell, with_flag
from training.config.batch import Batch, split
from training.config.schema import Config
from training.core.errors import Exit, UserError
from training.data.duration import UNLIMITED, TrainingLength, of_text, plan_length
from training.data.prepared_corpus import PreparedCorpus
from training.inspector.distributed import World
from training.tasks.base import Task
from training.trainer import train_state


def data(tokens: int) -> PreparedCorpus:
    return PreparedCorpus("/nowhere", "book", 1, tokens, 0)


def length(tokens: int, batch: Batch, **config: Any) -> TrainingLength:
    return of_text(Config(**config), batch, data(tokens))


BATCH = Batch(device_sequences=4, seq_len=10, world_size=2, accumulation=3)  # 240 tokens per step


def test_steps_per_epoch_count_whole_steps_of_all_ranks() -> None:
    for tokens, steps in ((241, 1), (480, 1), (481, 2), (24_001, 100), (24_000, 99)):
        assert length(tokens, BATCH).steps_per_epoch == steps
    # The same total batch for 1, 2, 3 and 6 ranks: the same epoch.
    assert {
        length(24_001, Batch(24 // world // 2, 10, world, 2)).steps_per_epoch
        for world in (1, 2, 3, 6)
    } == {100}


@pytest.mark.parametrize(
    ("config", "total"),
    [
        ({}, 100),
        ({"num_epochs": 3}, 300),
        ({"num_iterations": 7}, 7),
        ({"num_iterations": 250}, 250),
        ({"num_iterations": 250, "num_epochs": 2}, 200),
        ({"num_iterations": 150, "num_epochs": 2}, 150),
        ({"num_iterations": 2 * UNLIMITED}, UNLIMITED - 1),
        ({"num_epochs": 10**30}, UNLIMITED - 1),
    ],
)
def test_iterations_or_epochs_whichever_ends_first(config: dict[str, int], total: int) -> None:
    assert length(24_001, BATCH, **config) == TrainingLength(total, 100, -(-total // 100))


@pytest.mark.parametrize(("total", "epochs"), [(1, 1), (100, 1), (101, 2), (300, 3)])
def test_started_epochs_are_counted(total: int, epochs: int) -> None:
    assert length(24_001, BATCH, num_iterations=total).epochs == epochs


@each("step", [0, 1, 99, 100, 101, 250, 299, 300])
@each(
    "config", [{"num_epochs": 3}, {"num_epochs": 3, "num_iterations": 280}, {"num_iterations": 300}]
)
def test_a_resume_with_the_same_batch_has_the_same_length(
    step: int, config: dict[str, int]
) -> None:
    whole = length(24_001, BATCH, **config)
    epoch, done = divmod(step, 100)
    # the end of one epoch is the start of the next
    at = [(epoch, done)] + ([(epoch - 1, 100)] if epoch and not done else [])
    for number, steps in at:
        found = of_text(
            Config(**config), BATCH, data(24_001), step=step, epoch=number, used=24 * steps
        )
        assert found.total_steps == whole.total_steps and found.steps_per_epoch == 100
        assert found.epochs == (
            whole.epochs if step <= whole.total_steps and number < 3 else number + 1
        )


@pytest.mark.parametrize(
    ("world", "accumulation", "tokens", "left"),
    [
        # twice the batch: 2400 - 15 * 24 sequences are left, and one more epoch
        (
            2,
            6,
            24_001,
            42 + 50,
        ),
        (1, 3, 24_001, 170 + 200),
        (2, 3, 48_001, 185 + 200),  # more text
        (2, 3, 3_601, 15),  # less than already used: only the next epoch
    ],
)
def test_a_resume_with_another_batch_or_text_trains_the_rest(
    world: int, accumulation: int, tokens: int, left: int
) -> None:
    batch = Batch(4, 10, world, accumulation)
    found = of_text(Config(num_epochs=2), batch, data(tokens), step=15, epoch=0, used=15 * 24)
    assert found.total_steps == 15 + left and found.epochs == 2
    again = of_text(
        Config(num_epochs=2, num_iterations=20), batch, data(tokens), step=15, epoch=0, used=15 * 24
    )
    assert again.total_steps == 20, "completed steps are kept"
    over = of_text(Config(num_epochs=1), batch, data(tokens), step=15, epoch=1, used=0)
    assert over.total_steps == 15, "nothing is left"


def test_samples_of_any_kind() -> None:
    # 24 samples per step
    pictures = Batch(device_sequences=4, seq_len=1, world_size=2, accumulation=3)
    assert plan_length(Config(), pictures, 23) is None
    assert plan_length(Config(num_epochs=2), pictures, 50) == TrainingLength(4, 2, 2)


@pytest.mark.parametrize("tokens", [0, 1, 10, 240])
def test_too_few_tokens_for_one_step(tokens: int) -> None:
    with pytest.raises(UserError) as caught:
        length(tokens, BATCH)
    (problem,) = caught.value.problems
    assert caught.value.code == Exit.CONFIG
    assert problem.what.startswith(
        f"data book has {tokens} training tokens; one step needs 241 (4 sequences × 10 tokens × 2 "
        f"ranks"
    )
    assert "more text" in problem.allowed


def test_the_suggestion_for_a_short_text_is_accepted_and_sufficient(
    home: Path, shell: Shell
) -> None:
    chance, seen = random.Random(9), 0
    for _ in range(200):
        batch = Batch(chance.randint(1, 32), chance.choice([8, 64, 1536]), 2, chance.randint(1, 8))
        tokens = chance.choice(
            [0, 1, 9, 17, 33, 100, 129, 1000, chance.randint(0, batch.total_tokens)]
        )
        args = [f"--max_seq_len={batch.seq_len}", f"--device_batch_size={batch.device_sequences}"]
        args.append(f"--total_batch_size={batch.total_tokens}")
        try:
            length(tokens, batch)
            continue
        except UserError as error:
            (problem,) = error.problems
        for fix in problem.fixes:
            changed = args
            for flag in shlex.split(fix):
                changed = with_flag(changed, flag)
            script_args = [*changed, "--data=stdlib"]
            from tests.unit.conftest import ask

            config = ask(*script_args, script=ENHANCED).config
            assert isinstance(config.device_batch_size, int)
            smaller = split(
                config.device_batch_size, config.max_seq_len, 2, config.total_batch_size
            )
            assert smaller
            assert of_text(config, smaller, data(tokens)).steps_per_epoch >= 1
            seen += 1
    assert seen > 50


@each("count, ranks, total", [(40, 2, 40), (41, 2, 40), (5, 4, 4), (3, 4, 0), (0, 1, 0)])
def test_a_batch_for_few_samples(count: int, ranks: int, total: int) -> None:
    """Also if --total_batch_size was given."""
    world = World(0, 0, ranks, torch.device("cpu"), "none", "-")
    task = cast("Task", Task)
    (problem,) = train_state._too_short(count, task, Batch(8, 1, ranks, 4), world).problems
    assert problem.code == "data.too_short"
    flags = dict(word.lstrip("-").split("=") for fix in problem.fixes for word in fix.split())
    assert int(flags.get("total_batch_size", 0)) == total
    if flags:
        smaller = split(int(flags["device_batch_size"]), 1, ranks, total)
        assert smaller and plan_length(Config(), smaller, count)
