"""Validation of a language model: bits per byte over its share of the sequences."""

from __future__ import annotations

import functools
import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.cases import each
from training.config.batch import Batch
from training.config.schema import Config
from training.core import heartbeat
from training.core.rundir import write_json
from training.data.prepared_corpus import PreparedCorpus
from training.data.tokenizer_base import BOS
from training.inspector.distributed import World
from training.tasks.gpt.model import GPT, MemorySavings
from training.tasks.gpt.model_dims import ModelDims
from training.tasks.gpt.task import LanguageModel
from training.trainer.evaluate import Scores, evaluate, why_not

WORLD = World(0, 0, 1, torch.device("cpu"), "none", "-")


def corpus(folder: Path, tokens: list[int]) -> PreparedCorpus:
    """These tokens as prepared text for validation."""
    data = PreparedCorpus(str(folder), "text", 1, 0, len(tokens))
    np.array(tokens, "<u2").tofile(data.val[0])
    write_json(folder / "index.json", {"tokenizer_file": ""})
    return data


def gpt() -> GPT:
    torch.manual_seed(0)
    model = GPT(ModelDims(1, 320, 8))
    with torch.no_grad():
        model.head.weight.normal_()
    return model


def task_of(data: PreparedCorpus, **config: Any) -> LanguageModel:
    return LanguageModel(
        Config(depth=1, max_seq_len=8, **config), torch.device("cpu"), data, MemorySavings()
    )


def score(
    model: GPT, data: PreparedCorpus, batch: int = 4, tokens: int = 1000, tokenizer: Any = None
) -> Scores:
    found = evaluate(session_of(model, data, batch, tokens, tokenizer))
    assert found
    return found


def session_of(
    model: GPT,
    data: PreparedCorpus,
    batch: int = 4,
    tokens: int = 1000,
    tokenizer: Any = None,
    **config: Any,
) -> Any:
    task = task_of(data, eval_tokens=tokens, **config)
    task.tokenizer = tokenizer or task.tokenizer
    return SimpleNamespace(
        raw=model,
        validation=task.rows("val"),
        world=WORLD,
        batch=Batch(batch, 8, 1, 1),
        config=task.config,
        task=task,
        autocast=torch.autocast("cpu", torch.bfloat16, enabled=False),
        compiled=False,
    )


def test_a_guess_costs_log2_of_the_vocabulary(tmp_path: Path) -> None:
    found = score(GPT(ModelDims(1, 320, 8)), corpus(tmp_path, list(range(100))))
    assert found == pytest.approx({"bpb": math.log2(320), "loss": math.log(320)}, rel=1e-5)


def test_separators_are_not_predicted(tmp_path: Path) -> None:
    model, data = gpt(), corpus(tmp_path, [BOS if i % 5 == 0 else i for i in range(97)])
    found = score(model, data)
    inputs, targets = task_of(data).val_data().batch(list(range(12)))
    bytes_only = model(inputs, targets.masked_fill(targets == BOS, -1)).item()
    assert found["loss"] == pytest.approx(bytes_only, rel=1e-5)
    assert found["loss"] != pytest.approx(model(inputs, targets).item(), rel=1e-3)


def test_bits_count_per_byte_and_not_per_token(tmp_path: Path) -> None:
    """A tokenizer with three bytes per token."""
    data = corpus(tmp_path, [i % 200 for i in range(97)])
    three = SimpleNamespace(byte_lengths=lambda: np.full(320, 3))
    one, found = score(gpt(), data), score(gpt(), data, tokenizer=three)
    assert found["loss"] == one["loss"] and found["bpb"] == pytest.approx(one["bpb"] / 3)


def test_batch_size_does_not_matter(tmp_path: Path) -> None:
    data = corpus(tmp_path, torch.randint(0, 256, (20 * 8 + 1,)).tolist())
    losses = [score(gpt(), data, batch, 10_000)["loss"] for batch in (1, 3, 64)]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def test_the_number_of_evaluated_tokens_is_limited(tmp_path: Path) -> None:
    data = corpus(tmp_path, torch.randint(0, 256, (20 * 8 + 1,)).tolist())
    some, whole = score(gpt(), data, tokens=16), score(gpt(), data)
    inputs, targets = task_of(data).val_data().batch([0, 10])
    assert (
        some["loss"] == pytest.approx(gpt()(inputs, targets).item(), rel=1e-5)
        and some["loss"] != whole["loss"]
    )


@each(
    ("count", "tokens", "measured"),
    [
        (1000, 8 * 64, [n * 1000 // 64 for n in range(64)]),
        (7, 8 * 4, [0, 1, 3, 5]),
        (5, 8 * 64, [0, 1, 2, 3, 4]),
        (20, 3, [0]),
        (0, 64, []),
    ],
)
def test_any_number_of_ranks_measures_the_same_sequences(
    count: int, tokens: int, measured: list[int], tmp_path: Path
) -> None:
    """A run that continues on fewer GPUs, and --keep_best, compare scores of the same text. They
    are of the whole text: its first part may be one of several sources."""
    task = task_of(corpus(tmp_path, [1]), eval_tokens=tokens)
    part = {"of": count} if len(measured) < count else {}  # before, it was the first part
    assert task.measured(count) == {"samples": len(measured)} | part
    for ranks in range(1, 9):
        shares = [task.share(count, rank, ranks) for rank in range(ranks)]
        assert sorted(itertools.chain(*shares)) == measured
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_too_little_text_gives_no_score(tmp_path: Path) -> None:
    assert evaluate(session_of(gpt(), corpus(tmp_path, [1, 2, 3]))) is None


def test_missing_validation_is_explained(tmp_path: Path) -> None:
    one_sequence = corpus(tmp_path, list(range(12)))
    assert why_not(session_of(gpt(), one_sequence)) == ""
    none = corpus(tmp_path, [1, 2])
    assert "0 sequences of 8 tokens, fewer than one;" in why_not(session_of(gpt(), none))
    assert why_not(session_of(gpt(), none, eval_every=0)) == "", "validation is disabled"


def test_a_long_evaluation_is_not_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heartbeat changes with each micro-batch."""
    heartbeat.start(tmp_path / "beat.bin", 0)
    monkeypatch.setattr(heartbeat, "current", heartbeat.current)  # restored afterwards
    heartbeat.current.beat("evaluation")
    score(gpt(), corpus(tmp_path, list(range(97))), batch=4)
    beat = heartbeat.read(tmp_path / "beat.bin")
    assert beat and beat.beats == 1 + 3 and beat.phase == "evaluation"


def test_a_compiled_model_is_validated_in_one_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """11 sequences in batches of 4, as in training: with gradients on, and the same score."""
    data = corpus(tmp_path, torch.randint(0, 256, (11 * 8 + 1,)).tolist())
    model = gpt()
    seen: list[tuple[torch.Size, bool]] = []
    plain = model.forward

    def forward(inputs: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        seen.append((inputs.shape, torch.is_grad_enabled()))
        return plain(inputs, *args, **named)

    monkeypatch.setattr(model, "forward", forward)
    made = session_of(model, data)
    eager = evaluate(made)
    assert seen == [((4, 8), False), ((4, 8), False), ((3, 8), False)]
    seen.clear()
    made.compiled = True
    assert evaluate(made) == eager
    assert seen == [((4, 8), True)] * 3
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.slow  # 7 s: imports the compiler
def test_a_validation_compiles_no_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = corpus(tmp_path, torch.randint(0, 256, (11 * 8 + 1,)).tolist())
    model = gpt()
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=keep))
    model.compile_parts()
    model(*task_of(data).val_data().batch([0, 1, 2, 3])).backward()
    assert len(graphs) == 2, "a block, the loss"
    made = session_of(model, data)
    made.compiled = True
    evaluate(made)
    assert len(graphs) == 2
