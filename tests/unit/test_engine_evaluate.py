from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from training import heartbeat
from training.config.batch import Batch
from training.config.schema import Config
from training.data.loader import TokenDataset
from training.data.tokenizer import BOS, load
from training.distributed import World
from training.engine.evaluate import Score, evaluate, why_not
from training.engine.model import GPT
from training.engine.shape import Shape

WORLD = World(0, 0, 1, torch.device("cpu"), "none", "-")


def dataset(folder: Path, tokens: list[int], length: int = 8) -> TokenDataset:
    np.array(tokens, "<u2").tofile(folder / "val.bin")
    return TokenDataset([folder / "val.bin"], length)


def gpt() -> GPT:
    torch.manual_seed(0)
    model = GPT(Shape(1, 320, 8))
    with torch.no_grad():
        model.head.weight.normal_()
    return model


def score(model: GPT, data: TokenDataset, batch: int = 4, tokens: int = 1000, tokenizer: Any = None) -> Score | None:
    return evaluate(session_of(model, data, batch, tokens, tokenizer))


def session_of(
    model: GPT, data: TokenDataset, batch: int = 4, tokens: int = 1000, tokenizer: Any = None, world: World = WORLD, **config: Any
) -> Any:
    return SimpleNamespace(
        raw=model,
        validation=data,
        world=world,
        batch=Batch(batch, 8, 1, 1),
        config=Config(eval_tokens=tokens, **config),
        tokenizer=tokenizer or load("bytes"),
        autocast=torch.autocast("cpu", torch.bfloat16, enabled=False),
    )


def test_a_guess_costs_log2_of_the_vocabulary(tmp_path: Path) -> None:
    found = score(GPT(Shape(1, 320, 8)), dataset(tmp_path, list(range(100))))
    assert found and found.bpb == pytest.approx(math.log2(320), rel=1e-5) and found.loss == pytest.approx(math.log(320), rel=1e-5)


def test_separators_are_not_predicted(tmp_path: Path) -> None:
    model, data = gpt(), dataset(tmp_path, [BOS if i % 5 == 0 else i for i in range(97)])
    found = score(model, data)
    inputs, targets = data.batch(list(range(12)))
    bytes_only = model(inputs, targets.masked_fill(targets == BOS, -1)).item()
    assert found and found.loss == pytest.approx(bytes_only, rel=1e-5)
    assert found.loss != pytest.approx(model(inputs, targets).item(), rel=1e-3)


def test_bits_count_per_byte_and_not_per_token(tmp_path: Path) -> None:
    """A tokenizer whose tokens stand for three bytes each."""
    data = dataset(tmp_path, [i % 200 for i in range(97)])
    three = SimpleNamespace(byte_lengths=lambda: np.full(320, 3))
    one, found = score(gpt(), data), score(gpt(), data, tokenizer=three)
    assert one and found and found.loss == one.loss and found.bpb == pytest.approx(one.bpb / 3)


def test_batch_size_does_not_matter(tmp_path: Path) -> None:
    data = dataset(tmp_path, torch.randint(0, 256, (20 * 8 + 1,)).tolist())
    losses = [found.loss for batch in (1, 3, 64) if (found := score(gpt(), data, batch, 10_000))]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def test_only_so_many_tokens_are_looked_at(tmp_path: Path) -> None:
    data = dataset(tmp_path, torch.randint(0, 256, (20 * 8 + 1,)).tolist())
    first, whole = score(gpt(), data, tokens=16), score(gpt(), data)
    inputs, targets = data.batch([0, 1])
    assert first and whole and first.loss == pytest.approx(gpt()(inputs, targets).item(), rel=1e-5) and first.loss != whole.loss


def test_too_little_text_is_no_score(tmp_path: Path) -> None:
    assert score(gpt(), dataset(tmp_path, [1, 2, 3])) is None


def test_a_run_without_validation_says_why(tmp_path: Path) -> None:
    two = World(0, 0, 2, torch.device("cpu"), "gloo", "-")
    one_sequence = dataset(tmp_path, list(range(12)))
    assert why_not(session_of(gpt(), one_sequence)) == ""
    assert why_not(session_of(gpt(), one_sequence, world=two)) == (
        "no validation: the text for it makes 1 sequence of 8 tokens, fewer than one for each of 2 ranks; "
        "more text, or a smaller --max_seq_len"
    )
    assert why_not(session_of(gpt(), one_sequence, world=two, eval_every=0)) == "", "nobody wants it"
    assert "0 sequences of 8 tokens, fewer than one;" in why_not(session_of(gpt(), dataset(tmp_path, [1, 2])))


def test_a_long_evaluation_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heartbeat tells each micro-batch."""
    heartbeat.start(tmp_path / "beat.bin", 0)
    monkeypatch.setattr(heartbeat, "current", heartbeat.current)  # put back afterwards
    score(gpt(), dataset(tmp_path, list(range(97))), batch=4)
    beat = heartbeat.read(tmp_path / "beat.bin")
    assert beat and beat.beats == 3 and beat.phase == "evaluation"
