"""Tokenizers: text is decoded unchanged, and every byte is counted once."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from training.config.schema import Config
from training.core import manifest
from training.core.errors import UserError
from training.data import bpe, tokenizer, tokenizer_base
from training.data.corpus import find
from training.data.prepare import MERGING, ensure
from training.data.readers import DocumentPart
from training.data.tokenizer_base import Bytes, Tokenizer
from training.host import env_vars
from training.tasks.gpt import validation

Write = Callable[..., str]
TEXTS = [
    "",
    "a",
    "hello\n",
    "  two  spaces\t\n\n\nlines ",
    "训练模型 日本語",
    "Привет, мир",
    "हिन्दी العربية",
    "naïve café 🙂👩‍👩‍👧",
    "a\0b",
    "x" * 5000,
]
TEXTS += [
    "a text with <|bos|> and <|endoftext|> in it",
    "12345678 it's 3.14; def f(x): return x[1:]\r\n",
]


def ranks(folder: Path) -> Path:
    tokens = [bytes([n]) for n in range(256)] + [b"th", b"the", b" the", b"in", "训".encode()]
    path = folder / "some.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % n for n, t in enumerate(tokens)))
    return path


@pytest.fixture(params=["bytes", "bpe", "tiktoken"])
def words(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    if request.param == "bpe":
        return bpe.train(TEXTS * 3, 400, tmp_path)
    return tokenizer.load(str(ranks(tmp_path)) if request.param == "tiktoken" else "bytes")


def test_text_is_decoded_unchanged_and_every_byte_counts_once(words: Tokenizer) -> None:
    lengths = words.byte_lengths()
    assert lengths.shape == (words.vocab,) and lengths[words.bos] == 0
    for text, ids in zip(TEXTS, words.encode_documents(TEXTS), strict=True):
        assert ids[0] == words.bos and (ids == words.bos).sum() == 1
        assert words.decode(ids.tolist()) == text
        assert lengths[ids].sum() == len(text.encode())
        assert ids.max() < words.vocab <= words.padded_vocab and words.padded_vocab % 64 == 0
        assert ids.dtype == np.dtype("<u2")


def test_pieces_have_one_separator_per_document(words: Tokenizer) -> None:
    pieces = [
        DocumentPart(b"one\n"),
        DocumentPart(b"two\n", first=False),
        DocumentPart(b""),
        DocumentPart("drei é".encode()),
    ]
    found = list(words.encode_pieces(pieces))
    assert [int((ids == words.bos).sum()) for ids in found] == [1, 0, 1, 1]
    assert words.decode(np.concatenate(found).tolist()) == "one\ntwo\ndrei é"


def test_ids_beyond_the_vocabulary_and_separators_are_dropped(words: Tokenizer) -> None:
    (ids,) = words.encode_documents(["hi"])
    assert words.decode([words.padded_vocab - 1, *ids.tolist(), words.bos]) == "hi"


def test_the_byte_tokenizer_decodes_any_bytes_unchanged() -> None:
    chance = random.Random(1)
    for text in (b"", b"\0", bytes(range(256)), chance.randbytes(10_000)):
        (ids,) = Bytes().encode_documents([text])
        assert bytes(ids[1:].tolist()) == text
    assert Bytes().decode(list("é".encode())[:1]) == "\ufffd"
    assert (tokenizer_base.VOCAB, tokenizer_base.BOS, tokenizer_base.PADDED_VOCAB) == (
        257,
        256,
        320,
    )


@pytest.mark.parametrize("chosen", ["bytes", "bpe", "json", "tiktoken"])
def test_a_prepared_folder_is_sufficient(
    chosen: str, write: Write, tmp_path: Path, home: Path
) -> None:
    write("a.txt", "\n".join(TEXTS) * 20)
    if chosen == "json":
        bpe.train(TEXTS, 300, home)
        chosen = "tokenizer.json"
    elif chosen == "tiktoken":
        chosen = str(ranks(home).name)
    source, _ = find("a.txt")
    assert source
    data = ensure(source, "text", tmp_path / "cache", chosen=chosen, vocab_size=350)
    for file in home.iterdir():
        file.unlink()
    words = tokenizer.for_corpus(data)
    tokens = np.concatenate(
        [np.fromfile(p, f"<u{data.token_bytes}") for p in (*data.train, *data.val)]
    )
    assert words.decode(tokens.tolist()) == "\n".join(TEXTS) * 20
    assert (words.padded_vocab, words.bos, words.name) == (data.vocab, data.bos, data.tokenizer)
    assert words.byte_lengths()[tokens].sum() == source.total_bytes


def test_a_short_text_gives_a_small_model(tmp_path: Path) -> None:
    words = bpe.train(["the cat sat on the mat"] * 9, 200_000, tmp_path)
    assert words.vocab < 320 and words.padded_vocab == tokenizer_base.padded(words.vocab) == 320
    assert tokenizer.vocab_of("bpe", 200_000) == 200_000, "the maximum"
    assert "--vocab_size is 200000" in tokenizer.fewer("bpe", 200_000, words.padded_vocab)
    assert not tokenizer.fewer("bpe", 320, 320) and not tokenizer.fewer("bytes", 8192, 320)


@pytest.mark.parametrize(
    "text",
    ["abc" * 100_000, "训练模型" * 70_000, "+-*/" * 70_000, " " * 300_000],
    ids=["letters", "han", "signs", "spaces"],
)
def test_a_line_without_words_is_learned_in_time(text: str, tmp_path: Path) -> None:
    words = bpe.train([text], 300, tmp_path)
    (ids,) = words.encode_documents([text])
    assert words.decode(ids.tolist()) == text and len(ids) < len(text.encode())


def test_merging_reports_progress(write: Write, tmp_path: Path) -> None:
    chance, calls = random.Random(1), []
    source, _ = find(write("a.txt", "".join(chance.choices("abcdefgh", k=200_000))))
    assert source
    ensure(
        source,
        "text",
        tmp_path / "cache",
        lambda what, done, total: calls.append((what, done, total)),
        chosen="bpe",
        vocab_size=300,
    )
    assert (MERGING, 200_000, 200_000) in calls


def test_the_planned_vocabulary_matches_the_trained_one(tmp_path: Path, home: Path) -> None:
    assert tokenizer.vocab_of("bytes", 0) == Bytes().padded_vocab
    bpe.train(["too short"], 5000, home)
    for path in (home / "tokenizer.json", ranks(home)):
        assert tokenizer.vocab_of(str(path), 0) == tokenizer.load(str(path)).padded_vocab


def test_a_tokenizer_json_from_elsewhere(tmp_path: Path) -> None:
    bpe.train(TEXTS, 300, tmp_path)
    path = tmp_path / "tokenizer.json"
    made = json.loads(path.read_text())
    made["truncation"] = {
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
        "direction": "Right",
    }
    plain = tokenizer.load(str(path)).vocab
    for name, ids in (("<|endoftext|>", plain), ("<|unheard of|>", plain + 1)):
        made["added_tokens"][0]["content"] = name
        made["model"]["vocab"] = {
            name if n == 0 else t: n for t, n in made["model"]["vocab"].items()
        }
        path.write_text(json.dumps(made))
        words = tokenizer.load(str(path))
        assert words.vocab == ids and words.bos == (0 if ids == plain else plain)
        (found,) = words.encode_documents(["some words, more than four tokens, all of them"])
        assert words.decode(found.tolist()) == "some words, more than four tokens, all of them"
        assert tokenizer.vocab_of(str(path), 0) == words.padded_vocab


def test_a_vocabulary_beyond_16_bits_has_four_bytes(tmp_path: Path) -> None:
    path = ranks(tmp_path)
    path.write_bytes(path.read_bytes() + base64.b64encode(b"zzz") + b" 65535\n")
    words = tokenizer.load(str(path))
    assert (words.vocab, words.token_bytes) == (65537, 4)
    assert next(iter(words.encode_documents(["zzz"]))).dtype == np.dtype("<u4")


WRONG = {
    "missing.json": (None, "no such file"),
    "a.model": ("x", "not a .json or .tiktoken file"),
    "a.json": ('{"cut', "not a tokenizer.json of Hugging Face"),
    "b.json": ('{"model": {}}', "it has no vocabulary"),
    "c.json": ("[1]", "it has no vocabulary"),
    "a.tiktoken": ("YQ== 0\nno\n", "line 2 is not 'base64 rank': 'no'"),
    "b.tiktoken": ("", "empty file"),
}


@pytest.mark.parametrize("name", WRONG)
def test_values_that_are_not_a_tokenizer(name: str, write: Write) -> None:
    content, message = WRONG[name]
    if content is not None:
        write(name, content)
    (problem,) = tokenizer.check(name, "from --tokenizer on the command line")
    assert (
        problem.what.startswith(f"tokenizer is {name!r} (from --tokenizer on the command line): ")
        and message in problem.what
    )
    assert problem.allowed and problem.fixes
    with pytest.raises(UserError):
        tokenizer.vocab_of(name, 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("YQ== 0\n", "255 of the 256 single bytes"),
        ("YQ== 0\nYQ== 1\n", "line 2"),
        ("YQ== 0\nYg== 0\n", "line 2"),
    ],
)
def test_invalid_ranks(content: str, message: str, write: Write) -> None:
    with pytest.raises(UserError, match=message):
        tokenizer.load(write("a.tiktoken", content))


def test_the_tokenizer_in_a_folder_is_suggested(write: Write, home: Path) -> None:
    write("my model/tokenizer.json", "{}")
    (problem,) = tokenizer.check("my model")
    assert problem.fixes == ["--tokenizer='my model/tokenizer.json'"]
    assert tokenizer.check("bytes") == tokenizer.check("bpe") == []


def test_a_bad_line_ends_training_with_its_position(write: Write, tmp_path: Path) -> None:
    source, _ = find(write("a.jsonl", '{"text": "fine"}\nbad\n'))
    assert source
    with pytest.raises(UserError, match=r"a\.jsonl:2: not JSON"):
        ensure(source, "text", tmp_path / "cache", chosen="bpe", vocab_size=300)


def test_a_resumed_run_is_planned_with_its_own_vocabulary(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints" / "step_00000004"
    folder.mkdir(parents=True)
    manifest.write(
        folder,
        dict.fromkeys(manifest.KEYS[:-1], 0)
        | {"format": manifest.FORMAT, "step": 4, "shape": {"vocab": 384}},
    )

    def planned(**now: object) -> int:
        asked = {"tokenizer": "bpe", "vocab_size": 200_000}
        resumed = {name: (value, "the run") for name, value in asked.items()}
        saved = manifest.newest(tmp_path / "run/checkpoints")
        return validation.vocab(Config(**asked | now), saved, resumed)  # type: ignore[arg-type]

    assert planned() == 384
    assert planned(vocab_size=1000) == tokenizer_base.padded(1000)
    assert planned(tokenizer="bytes") == 320


def test_threads_are_limited_by_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_vars, "cpu_count", lambda: 3)
    ranks = object.__new__(bpe.Ranks)
    ranks.inner = SimpleNamespace(
        encode_ordinary_batch=lambda texts, num_threads: [[num_threads] for _ in texts]
    )
    assert ranks._ids(["a", "b"]) == [[3], [3]]
