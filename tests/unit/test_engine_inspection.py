from __future__ import annotations

import json
import os
import signal
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from training.config.schema import Config
from training.core.errors import Exit
from training.inspector import checksum
from training.inspector.distributed import World
from training.tasks.gpt.model import GPT
from training.tasks.gpt.model_dims import ModelDims
from training.tasks.gpt.task import LanguageModel
from training.trainer import sanity_checks
from training.trainer.checkpoint import TrainProgress
from training.trainer.step_stats import (
    NO_CHECKSUM,
    NO_MEMORY,
    NO_TIME,
    LocalStep,
    MemoryUse,
    RankStep,
    StepAllReduce,
    StepReport,
    StopRequest,
)

WORLD = World(0, 0, 1, torch.device("cpu"), "none", "-")
BEGUN = TrainProgress(6, 1, 48)
NORM = torch.tensor(0.25)


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(ModelDims(1, 64, 8))


def session(**more: object) -> Any:
    batches = SimpleNamespace(indices=lambda epoch, used, rank: np.arange(4) + 10 * rank + used)
    config = Config(**more)  # type: ignore[arg-type]
    return SimpleNamespace(
        raw=gpt(), world=WORLD, batches=batches, config=config, task=LanguageModel
    )


def look(*shares: RankStep, norm: float = 1.0, stop: int = 0) -> None:
    sanity_checks.check_step(session(), StepReport(list(shares), stop, norm), BEGUN)


GOOD = RankStep(7, 4, 2.5, NO_CHECKSUM)


def test_a_good_step_passes() -> None:
    look(GOOD, GOOD)
    look(RankStep(7, 4, 2.5, 5.0), RankStep(7, 4, 2.4, 5.0))


@pytest.mark.parametrize(
    ("bad", "kind", "message"),
    [
        (
            RankStep(7, 4, float("nan"), NO_CHECKSUM),
            sanity_checks.NotFinite,
            "loss is nan on rank 1 at step 7 (epoch 2, sequences 58, 59, 60, 61)",
        ),
        (
            RankStep(7, 4, float("inf"), NO_CHECKSUM),
            sanity_checks.NotFinite,
            "loss is inf on rank 1 at step 7",
        ),
        (
            RankStep(7, 0, float("nan"), NO_CHECKSUM),
            sanity_checks.EmptyBatch,
            "rank 1 had an empty batch at step 7",
        ),
        (
            RankStep(8, 4, 2.5, NO_CHECKSUM),
            sanity_checks.SanityCheckError,
            "rank 1 is at step 8, this rank at 7",
        ),
    ],
)
def test_a_bad_share_is_named(bad: RankStep, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        look(GOOD, bad)
    assert message in str(caught.value) and caught.value.rank == 1  # type: ignore[attr-defined]


def test_a_share_of_one_sequence_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = session(debug_ddp=True)
    one.batches.indices = lambda epoch, used, rank: np.array([5])
    bad = StepReport([RankStep(7, 1, float("nan"), NO_CHECKSUM)], 0, 1.0)
    with pytest.raises(sanity_checks.NotFinite, match=r"\(epoch 2, sequence 5\)$"):
        sanity_checks.check_step(one, bad, BEGUN)
    sanity_checks.check_step(one, StepReport([RankStep(7, 1, 2.5, 5.0)], 0, 1.0), BEGUN)
    assert "rank 0: 1 sequence, loss 2.5000" in capsys.readouterr().err
    monkeypatch.setenv("DUET_LANG", "zh")
    with pytest.raises(sanity_checks.NotFinite, match=r"序列 5"):
        sanity_checks.check_step(one, bad, BEGUN)


def test_a_gradient_norm_that_is_not_finite_names_no_rank() -> None:
    with pytest.raises(sanity_checks.NotFinite, match="gradient norm is inf at step 7") as caught:
        look(GOOD, norm=float("inf"))
    assert caught.value.rank is None


def test_the_rank_against_the_majority_is_named() -> None:
    with pytest.raises(
        sanity_checks.ParametersDiffer, match="parameters differ at step 7: rank 2;"
    ) as caught:
        look(*(RankStep(7, 4, 2.5, c) for c in (5.0, 5.0, 6.0)))
    assert caught.value.rank == 2


def test_with_two_ranks_no_rank_is_blamed() -> None:
    with pytest.raises(
        sanity_checks.ParametersDiffer, match=r"ranks 0, 1 \(no majority\)"
    ) as caught:
        look(RankStep(7, 4, 2.5, 5.0), RankStep(7, 4, 2.5, 6.0))
    assert caught.value.rank is None


def test_the_checksum_depends_on_every_bit_and_the_order_of_parameters() -> None:
    model, other = gpt(), gpt()
    assert checksum.checksum(model) == checksum.checksum(other)
    with torch.no_grad():
        bits = other.head.weight.view(torch.int32)
        bits[3, 5] ^= 1
        assert checksum.checksum(model) != checksum.checksum(other)
        bits[3, 5] ^= 1
        assert checksum.checksum(model) == checksum.checksum(other)
        query, key = other.blocks[0].attention.query.weight, other.blocks[0].attention.key.weight
        kept = query.clone()
        query.copy_(key)
        key.copy_(kept)
    assert checksum.checksum(model) != checksum.checksum(other)
    value = checksum.checksum(model).item()
    assert value == int(value) and 0 <= value < 1 << checksum.BITS, (
        "exact in the reduction's float64"
    )


@pytest.mark.parametrize(
    "change", ["rows reversed", "two rows", "two signs", "two values far apart", "moved by one"]
)
def test_the_checksum_depends_on_the_position_of_a_value(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same values in other places have the same plain sum."""
    monkeypatch.setattr(checksum, "PIECE", 1000)  # so that a matrix has several pieces
    model, other = gpt(), gpt()
    weight = other.blocks[0].up.weight
    with torch.no_grad():
        old = weight.clone()
        if change == "rows reversed":
            weight.copy_(old.flip(0))
        elif change == "two rows":
            weight[[3, 100]] = old[[100, 3]]
        elif change == "moved by one":
            weight.copy_(old.flatten().roll(1).view_as(old))
        elif change == "two signs":  # differ only in the highest bit
            for model_, places in ((model, (5, 7)), (other, (7, 5))):
                flat = model_.blocks[0].up.weight.view(-1)
                flat[places[0]], flat[places[1]] = 0.25, -0.25
        else:
            flat = weight.view(-1)
            # the same position in different pieces
            flat[1], flat[5001] = (
                old.view(-1)[5001],
                old.view(-1)[1],
            )
    names = [name for name, _ in model.named_parameters()]
    assert different(names, checksum.checksums(other), checksum.checksums(model)) == [
        "blocks.0.up.weight"
    ]
    # A GPU's passes: a matrix in several of them, and with others in one.
    for values in (2048, 1 << 20):
        monkeypatch.setattr(checksum, "PASS", values)
        sums = [checksum._by_passes(list(one.parameters())) for one in (other, model)]
        assert different(names, *(total >> 16 for total in sums)) == ["blocks.0.up.weight"]


def different(names: list[str], some: torch.Tensor, others: torch.Tensor) -> list[str]:
    return [n for n, a, b in zip(names, some.tolist(), others.tolist(), strict=True) if a != b]


def test_weights_that_a_task_excludes_from_ddp_are_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = [session(), session()]
    for rank, one in enumerate(ranks):
        one.raw._ddp_params_and_buffers_to_ignore = ["head.weight"]
        with torch.no_grad():
            one.raw.head.weight.fill_(rank)
    assert len({checksum.checksum(one.raw).item() for one in ranks}) == 1
    with torch.no_grad():
        ranks[1].raw.blocks[0].up.weight.fill_(1)
    own = [checksum.checksum(one.raw).item() for one in ranks]
    assert own[0] != own[1]
    texts = [json.dumps(checksum.checksums(one.raw).tolist()) for one in ranks]
    monkeypatch.setattr(sanity_checks, "exchange_texts", lambda *_, **__: texts)
    report = StepReport([RankStep(7, 4, 2.5, value) for value in own], 0, 1.0)
    with pytest.raises(sanity_checks.ParametersDiffer, match=r"1 parameters, first blocks\.0\.up"):
        sanity_checks.check_step(ranks[0], report, BEGUN)


def test_the_exchange_of_a_single_rank() -> None:
    exchange = StepAllReduce(WORLD)
    exchange.start(3, LocalStep(torch.tensor(1.5), 8, 2.25), None, 0)
    report = exchange.finish(NORM).read()
    (share,) = report.shares
    assert (
        report == StepReport([RankStep(3, 8, 1.5, NO_CHECKSUM, 2.25, share.memory)], 0, 0.25)
        and report.loss == 1.5
    )
    assert share.memory is not None
    assert share.memory == pytest.approx(psutil.Process().memory_info().rss, rel=0.2), (
        "the resident set"
    )
    exchange.start(
        4,
        LocalStep(torch.tensor(float("nan")), 8, 0.0),
        torch.tensor(float(1 << 47), dtype=torch.float64),
        Exit.PREEMPTED,
    )
    report = exchange.finish(NORM).read()
    assert (
        report.stop == Exit.PREEMPTED
        and report.shares[0].checksum == 1 << 47
        and report.shares[0].step == 4
    )


def test_the_gpu_memory_peak_is_read_in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading it takes some ten microseconds; the first value does not include the optimizer."""
    asked: list[int] = []
    monkeypatch.setattr(
        torch.cuda,
        "max_memory_allocated",
        lambda device: asked.append(len(asked)) or 100 + len(asked),
    )
    memory = MemoryUse(torch.device("cuda", 0))
    assert [memory.now() for _ in range(12)] == [101, *[102] * 9, 103, 103]


def test_unreadable_memory_use_and_a_time_that_is_still_measured_are_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(FileNotFoundError("/proc")))
    exchange = StepAllReduce(WORLD)
    assert exchange._memory.now() == NO_MEMORY
    exchange.start(1, LocalStep(torch.tensor(1.0), 1, NO_TIME), None, 0)
    (share,) = exchange.finish(NORM).read().shares
    assert share.memory is None and share.compute_ms is None


def test_an_interruption_takes_precedence_over_preemption() -> None:
    exchange = StepAllReduce(WORLD)
    exchange.start(1, LocalStep(torch.tensor(1.0), 1, 0.0), None, Exit.INTERRUPTED)
    exchange._values[-2] = 1.0  # added by another rank
    assert exchange.finish(NORM).read().stop == Exit.INTERRUPTED
    assert StopRequest().code == Exit.DONE


def test_a_ctrl_c_that_was_ignored_at_the_start_does_not_stop_the_run() -> None:
    """As in `python train.py &` of a script."""
    request = StopRequest()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    request.listen()
    os.kill(os.getpid(), signal.SIGINT)
    assert request.code == Exit.DONE
    os.kill(os.getpid(), signal.SIGTERM)
    assert request.code == Exit.PREEMPTED
