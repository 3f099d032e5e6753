"""Generation with cached keys and values."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import decoders

from tests.cases import each
from tests.unit.trained_runs import gpt
from training.data import tokenizer
from training.data.tokenizer_base import Bytes
from training.tasks.gpt.generate import Decoder, Sampling, generate, pick
from training.tasks.gpt.model import GPT
from training.tasks.gpt.model_dims import ModelDims
from training.tasks.gpt.trained import TextStream


@torch.no_grad()
def naive(model: GPT, prompt: list[int], count: int) -> list[int]:
    """The most likely tokens by whole forward passes, with the same windows."""
    context = model.shape.max_seq_len
    seen = prompt[-context:]
    out: list[int] = []
    for _ in range(count):
        out.append(int(model(torch.tensor([seen]))[0, -1].argmax()))
        seen.append(out[-1])
        if len(seen) > context:
            seen = seen[-(context // 2) :]
    return out


def first(model: GPT, prompt: list[int], how: Sampling) -> list[int]:
    return [column[0] for column in generate(model, prompt, how) if column[0] is not None]


@each(
    "depth, length, prompt, count",
    [(1, 16, 1, 15), (3, 16, 5, 11), (2, 16, 16, 1), (2, 16, 40, 30), (2, 8, 3, 50)],
)
def test_cached_tokens_equal_those_of_whole_passes(
    depth: int, length: int, prompt: int, count: int
) -> None:
    """Within the context, and with a context that becomes full several times."""
    model = gpt(depth, length=length, key_offset=depth > 1)
    given = torch.randint(0, 320, (prompt,)).tolist()
    assert first(model, given, Sampling(count, temperature=0)) == naive(model, given, count)


def test_logits_differ_by_rounding_only() -> None:
    model, tokens = gpt(3), torch.randint(0, 320, (1, 16))
    decoder = Decoder(model, 2, 16)
    with torch.no_grad():
        wanted = model(tokens)[0]
        found = [decoder.forward(tokens[:, :4])]
        found += [decoder.forward(tokens[:, n : n + 1].expand(2, -1)) for n in range(4, 16)]
    for logits, expected in zip(found, wanted[3:], strict=True):
        torch.testing.assert_close(logits, expected.expand(2, -1), rtol=1e-5, atol=1e-5)


def test_a_sample_depends_on_its_seed_only() -> None:
    model = gpt()
    columns = list(generate(model, [1, 2], Sampling(40, 1.0, seed=5, samples=3)))
    several = list(zip(*columns, strict=True))
    assert [list(one) for one in several] == [
        first(model, [1, 2], Sampling(40, 1.0, seed=5 + n)) for n in range(3)
    ]
    assert len(set(several)) == 3


def test_a_sample_ends_at_the_stop_token_and_the_others_continue() -> None:
    model = gpt()
    free = list(zip(*generate(model, [1], Sampling(20, 1.0, seed=3, samples=2)), strict=True))
    stop = free[0][4]
    assert stop is not None and stop not in free[0][:4] and stop not in free[1]
    columns = list(generate(model, [1], Sampling(20, 1.0, seed=3, samples=2, stop=stop)))
    assert [column[0] for column in columns] == [*free[0][:4], *[None] * 16]
    assert tuple(column[1] for column in columns) == free[1]
    (alone,) = zip(*generate(model, [1], Sampling(20, 1.0, seed=3, stop=stop)), strict=True)
    assert alone == free[0][:4]


def test_padding_of_the_vocabulary_is_never_drawn() -> None:
    model = gpt()
    with torch.no_grad():
        model.head.weight[257:] = model.head.weight[:63] * 5
    assert max(first(model, [1], Sampling(300, 2.0, known=257))) < 257


def test_tokens_are_drawn_with_their_probabilities() -> None:
    logits = torch.tensor([1.0, 3.0, 0.0, 2.0])
    chance = torch.rand(20000, generator=torch.Generator().manual_seed(1))
    for how, expected in (
        (Sampling(1, 0.5), torch.softmax(logits / 0.5, 0)),
        (Sampling(1, 1.0, top_k=2), torch.tensor([0.0, 1.0, 0.0, 1.0]) * torch.softmax(logits, 0)),
    ):
        drawn = pick(logits.expand(20000, -1), how, chance)
        found = torch.bincount(drawn, minlength=4) / 20000
        torch.testing.assert_close(found, expected / expected.sum(), rtol=0, atol=0.01)


def test_very_low_temperatures_take_the_most_likely_token() -> None:
    logits = torch.tensor([[3.0, 15.0, -2.0]])
    for temperature in (1e-7, 1e-45, 5e-324):
        assert pick(logits, Sampling(1, temperature), torch.tensor([0.99])).item() == 1


def test_the_last_token_can_be_drawn() -> None:
    """The sum of probabilities may be below 1, or above the largest chance."""
    logits = torch.zeros(1, 3)
    assert pick(logits, Sampling(1, 1.0), torch.tensor([1 - 2**-24])).item() == 2
    assert pick(logits, Sampling(1, 1.0), torch.tensor([0.0])).item() == 0


def test_text_is_streamed_in_whole_characters() -> None:
    stream, words = TextStream(Bytes()), "naïve 训练 🙂"
    parts = [stream.add(token) for token in words.encode()]
    assert "".join(parts) == words and "\ufffd" not in parts
    assert parts[:4] == ["n", "a", "", "ï"]


@pytest.mark.parametrize("seed", range(3))
def test_streamed_text_is_the_decoded_text(seed: int) -> None:
    """Also for invalid UTF-8."""
    drawn = random.Random(seed)
    ids = [drawn.randrange(257) for _ in range(300)]
    ids += list("é🙂".encode())[:-1]
    stream = TextStream(Bytes())
    assert "".join([*map(stream.add, ids), stream.end()]) == Bytes().decode(ids)


@each("kind", ["Metaspace", "SentencePiece", "WordPiece"])
def test_streamed_text_continues_the_prompt(kind: str, tmp_path: Path) -> None:
    """Their decoders drop the space before the first token, or mark it as the middle of a word."""
    known = ["<s>", "[UNK]"]
    known += ["the", "t", "##est", "##ing"] if kind == "WordPiece" else ["▁the", "▁t", "est", "ing"]
    ids = {name: number for number, name in enumerate(known)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, "[UNK]"))
    made.add_special_tokens(["<s>"])
    made.decoder = {
        "Metaspace": decoders.Metaspace(),
        "SentencePiece": decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
             decoders.Strip(" ", 1, 0)]
        ),
        "WordPiece": decoders.WordPiece(),
    }[kind]  # fmt: skip
    made.save(str(tmp_path / "tokenizer.json"))
    words, tokens = tokenizer.load(str(tmp_path / "tokenizer.json")), [0, *[2, 3, 4, 5] * 4]
    assert words.decode(tokens) == " ".join(["the testing"] * 4)
    for cut in range(1, len(tokens)):
        stream = TextStream(words, tokens[:cut])
        parts = [*map(stream.add, tokens[cut:]), stream.end()]
        assert words.decode(tokens[:cut]) + "".join(parts) == words.decode(tokens), cut


def test_streamed_text_continues_a_prompt_of_bytes(tmp_path: Path) -> None:
    """Rare characters are several tokens of one byte; if one is incomplete, all those beside it
    are unreadable."""
    known = ["<s>", "[UNK]", "a", *(f"<0x{byte:02X}>" for byte in range(256))]
    ids = {name: number for number, name in enumerate(known)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, "[UNK]"))
    made.add_special_tokens(["<s>"])
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    made.save(str(tmp_path / "tokenizer.json"))
    words = tokenizer.load(str(tmp_path / "tokenizer.json"))
    for prompt in ("鑫鑫鑫", "鑫" * 9, "é" * 5, "🙂🙂🙂"):
        stream = TextStream(words, [0, 2, *(byte + 3 for byte in prompt.encode())])
        parts = [stream.add(byte + 3) for byte in "淼淼".encode()]
        assert [part for part in [*parts, stream.add(2), stream.end()] if part] == [
            "淼",
            "淼",
            "a",
        ], prompt


def test_a_callback_runs_before_each_token() -> None:
    calls: list[int] = []
    made = generate(GPT(ModelDims(1, 64, 8)), [1], Sampling(5), lambda: calls.append(1))
    assert len(list(made)) == len(calls) == 5
