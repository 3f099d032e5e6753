"""Text to shards: complete or not at all, with every byte of the text."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.conftest import ENHANCED, Shell, ask
from tests.unit.corpora import documents, made, refused, shard
from training.core.errors import UserError
from training.data.corpus import find
from training.data.prepare import ensure

Write = Callable[..., str]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


# ── content ───────────────────────────────────────────────────────────────────────────────────────


def test_every_byte_of_every_document_is_in_one_of_the_two_shards(
    write: Write, cache: Path
) -> None:
    chance = random.Random(5)
    texts = [
        "".join(chance.choices("ab é训🙂\n", k=chance.randint(0, 300))).encode() for _ in range(300)
    ]
    for n, text in enumerate(texts):
        write(f"corpus/{n:03}.txt", text)
    data = made("corpus", cache)
    train, val = documents(shard(data.train)), documents(shard(data.val))
    assert sorted(train + val) == sorted(texts)
    assert data.documents == 300
    assert (data.train_tokens, data.val_tokens) == (len(shard(data.train)), len(shard(data.val)))
    assert data.train_tokens + data.val_tokens == sum(map(len, texts)) + 300
    # Whole documents, in order.
    order = {t: n for n, t in enumerate(texts)}
    for part in (train, val):
        positions = [order[t] for t in part if len(t) > 8]
        assert positions == sorted(positions)


@pytest.mark.parametrize("text", ["训练 🙂\r\n".encode(), b"\n", b"\0" * 50])
def test_one_unusual_file(text: bytes, write: Write, cache: Path) -> None:
    data = made(write("a.txt", text * 20), cache)
    assert documents(shard(data.train) + shard(data.val)) == [text * 20]


def test_files_that_grow_while_they_are_read_are_refused(write: Write, cache: Path) -> None:
    write("corpus/a.txt", "one " * 500)
    growing = Path(write("corpus/b.txt", "two " * 500))
    source, _ = find("corpus")
    assert source

    def read(what: str, done: int, total: int) -> None:
        if done == total:
            with growing.open("a") as file:
                file.write("two ")

    with pytest.raises(UserError) as caught:
        ensure(source, "text", cache, read)
    (problem,) = caught.value.problems
    assert problem.code == "data.changed"
    assert problem.what.startswith(f"{growing} ") and "2000 bytes" in problem.what
    assert not [path for path in cache.iterdir() if path.is_dir()]
    assert ensure(source, "text", cache).documents == 2


@pytest.mark.parametrize("count", [1, 2, 1000])
@pytest.mark.parametrize("form", ["txt", "jsonl"])
def test_a_sensible_share_is_for_validation(
    count: int, form: str, write: Write, cache: Path
) -> None:
    texts = [f"document {n} " * 50 for n in range(count)]
    if form == "jsonl":
        name = write("a.jsonl", "".join(json.dumps({"text": t}) + "\n" for t in texts))
    else:
        for n, text in enumerate(texts):
            write(f"corpus/{n:04}.txt", text)
        name = "corpus"
    data = made(name, cache)
    share = data.val_tokens / (data.train_tokens + data.val_tokens)
    assert 0.01 <= share <= 0.20
    assert data.documents == count
    if count < 3:  # cut within a document: the tail of all tokens
        assert documents(shard(data.train) + shard(data.val)) == [t.encode() for t in texts]
    assert data.train_tokens + data.val_tokens == sum(map(len, texts)) + count


def test_one_huge_document_among_small_ones_does_not_become_the_validation_part(
    write: Write, cache: Path
) -> None:
    # At any position.
    for position in range(12):
        for n in range(12):
            write(f"corpus{position}/{n:02}.txt", "x" * (100_000 if n == position else 10))
        data = made(f"corpus{position}", cache)
        assert 0.01 <= data.val_tokens / (data.train_tokens + data.val_tokens) <= 0.20


def test_a_very_short_text(write: Write, cache: Path) -> None:
    data = made(write("a.txt", "hi"), cache)
    assert (data.train_tokens, data.val_tokens, data.documents) == (3, 0, 1)
    assert shard(data.val) == []


def test_json_lines(write: Write, cache: Path) -> None:
    lines = [{"text": "one", "id": 1}, {"text": ""}, {"text": "zwölf\n\0"}, {"text": "🙂"}]
    name = write("a.jsonl", "\n\n".join(json.dumps(x) for x in lines) + "\n  \n")
    data = made(name, cache)
    assert documents(shard(data.train) + shard(data.val)) == [
        b"one",
        b"",
        "zwölf\n\0".encode(),
        "🙂".encode(),
    ]
    assert data.documents == 4


def test_another_field(write: Write, cache: Path) -> None:
    name = write("a.jsonl", '{"text": "no", "body": "yes"}\n' * 30)
    data = made(name, cache, "body")
    assert set(documents(shard(data.train) + shard(data.val))) == {b"yes"}
    assert made(name, cache).folder != data.folder


# ── unusable text
# ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{not json", "not JSON"),
        (b'{"text": "cut', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"body": "x"}', "no text in field 'text'"),
        (b'{"text": 5}', "no text in field 'text'"),
        (b'{"text": null}', "no text in field 'text'"),
        (b'{"text": ["x"]}', "no text in field 'text'"),
        (b'["text"]', "no text in field 'text'"),
        (b"12", "no text in field 'text'"),
        (b'"text"', "no text in field 'text'"),
    ],
    ids=["word", "cut", "deep", "key", "number", "null", "list", "array", "12", "string"],
)
def test_a_bad_line_is_reported_with_file_and_line(
    line: bytes, message: str, write: Write, cache: Path
) -> None:
    write("corpus/a.jsonl", b'{"text": "fine"}\n')
    write("corpus/b.jsonl", b'{"text": "fine"}\n\n' + line + b'\n{"text": "fine"}\n')
    problem = refused("corpus", cache)
    assert problem.what.startswith(f"corpus/b.jsonl:3: {message}")
    assert "JSON object" in problem.allowed


def test_a_line_that_is_not_json_has_one_position(write: Write, cache: Path) -> None:
    problem = refused(write("a.jsonl", '{"text": "fine"}\n{"text": 1 2}\n'), cache)
    assert problem.code == "data.not_json"
    assert re.findall(r"\d+", problem.what) == ["2", "12"]  # line and column


def test_text_fields_are_suggested(write: Write, cache: Path, home: Path, shell: Shell) -> None:
    name = write("a.jsonl", '{"id": 7, "my body": "x", "title": "y"}\n')
    problem = refused(name, cache)
    assert len(problem.fixes) == 2
    for fix, field in zip(problem.fixes, ("my body", "title"), strict=True):
        asked = shell.read(f"./{ENHANCED} --data={name} {fix}")
        assert asked.config.text_field == field
        assert made(name, cache, asked.config.text_field).documents == 1


def test_only_blank_lines(write: Write, cache: Path) -> None:
    assert "no text" in refused(write("a.jsonl", "\n \n"), cache).what


def test_a_file_name_of_maximum_length(write: Write, cache: Path) -> None:
    name = write("x" * 251 + ".txt", "some text")
    ask(f"--data={name}")
    assert made(name, cache).train_tokens == 10


def test_a_file_name_that_is_not_utf8(write: Write, cache: Path) -> None:
    name = write(os.fsdecode(b"caf\xe9.txt"), "some text")
    assert made(name, cache).train_tokens == 10


def test_records_with_empty_texts(write: Write, cache: Path) -> None:
    problem = refused(write("a.jsonl", '{"text": ""}\n' * 600), cache)
    assert problem.code == "data.no_text" and problem.fixes == ["--text_field=NAME"]
