"""Text to shards: once, whole or not at all, and every byte of it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import wait_until
from tests.unit.conftest import ENHANCED, Shell, ask, clean_environment
from training.data import prepare
from training.data.corpus import Source, find
from training.data.prepare import Prepared, ensure
from training.data.tokenizer import BOS
from training.errors import Exit, Problem, UserError

Write = Callable[..., str]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def source(data: str) -> Source:
    found, problem = find(data)
    assert found, problem
    return found


def made(data: str, cache: Path, text_field: str = "text") -> Prepared:
    return ensure(source(data), text_field, cache)


def shard(path: Path) -> list[int]:
    return np.fromfile(path, "<u2").tolist() if path.stat().st_size else []


def documents(tokens: list[int]) -> list[bytes]:
    """The texts between the separators."""
    parts: list[list[int]] = []
    for token in tokens:
        if token == BOS:
            parts.append([])
        else:
            parts[-1].append(token)
    return [bytes(p) for p in parts]


def refused(data: str, cache: Path, text_field: str = "text") -> Problem:
    with pytest.raises(UserError) as caught:
        made(data, cache, text_field)
    assert caught.value.code == Exit.CONFIG
    (problem,) = caught.value.problems
    assert not [p for p in cache.iterdir() if p.is_dir()], "no half folder"
    return problem


# ── content ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_byte_of_every_document_is_in_one_of_the_two_shards(write: Write, cache: Path) -> None:
    chance = random.Random(5)
    texts = [chance.randbytes(chance.randint(0, 400)) for _ in range(300)]
    for n, text in enumerate(texts):
        write(f"corpus/{n:03}.txt", text)
    data = made("corpus", cache)
    train, val = documents(shard(data.train)), documents(shard(data.val))
    assert sorted(train + val) == sorted(texts)
    assert data.documents == 300
    assert (data.train_tokens, data.val_tokens) == (len(shard(data.train)), len(shard(data.val)))
    assert data.train_tokens + data.val_tokens == sum(map(len, texts)) + 300
    # Whole documents, in their order.
    order = {t: n for n, t in enumerate(texts)}
    for part in (train, val):
        positions = [order[t] for t in part if len(t) > 8]
        assert positions == sorted(positions)


@pytest.mark.parametrize("text", [b"\xff\xfe\x00binary\x80", "训练 🙂\r\n".encode(), b"\n", b"\0" * 50])
def test_one_odd_file(text: bytes, write: Write, cache: Path) -> None:
    data = made(write("a.txt", text * 20), cache)
    assert documents(shard(data.train) + shard(data.val)) == [text * 20]


@pytest.mark.parametrize("count", [1, 2, 3, 10, 1000])
@pytest.mark.parametrize("form", ["txt", "jsonl"])
def test_a_sensible_share_is_for_validation(count: int, form: str, write: Write, cache: Path) -> None:
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


def test_one_huge_document_among_small_ones_does_not_become_the_validation_part(write: Write, cache: Path) -> None:
    # Whichever position it has.
    for position in range(12):
        for n in range(12):
            write(f"corpus{position}/{n:02}.txt", "x" * (100_000 if n == position else 10))
        data = made(f"corpus{position}", cache)
        assert 0.01 <= data.val_tokens / (data.train_tokens + data.val_tokens) <= 0.20


def test_a_tiny_text(write: Write, cache: Path) -> None:
    data = made(write("a.txt", "hi"), cache)
    assert (data.train_tokens, data.val_tokens, data.documents) == (3, 0, 1)
    assert shard(data.val) == []


def test_json_lines(write: Write, cache: Path) -> None:
    lines = [{"text": "one", "id": 1}, {"text": ""}, {"text": "zwölf\n\0"}, {"text": "\ud800"}]
    name = write("a.jsonl", "\n\n".join(json.dumps(x) for x in lines) + "\n  \n")
    data = made(name, cache)
    assert documents(shard(data.train) + shard(data.val)) == [b"one", b"", "zwölf\n\0".encode(), b"?"]
    assert data.documents == 4


def test_another_field(write: Write, cache: Path) -> None:
    name = write("a.jsonl", '{"text": "no", "body": "yes"}\n' * 30)
    data = made(name, cache, "body")
    assert set(documents(shard(data.train) + shard(data.val))) == {b"yes"}
    assert made(name, cache).folder != data.folder


# ── text that can not be used ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{not json", "not JSON"),
        (b'{"text": "cut', "not JSON"),
        (b'{"text": "\xff"}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"body": "x"}', "no text under 'text'"),
        (b'{"text": 5}', "no text under 'text'"),
        (b'{"text": null}', "no text under 'text'"),
        (b'{"text": ["x"]}', "no text under 'text'"),
        (b'["text"]', "no text under 'text'"),
        (b"12", "no text under 'text'"),
        (b'"text"', "no text under 'text'"),
    ],
    ids=["word", "cut", "bytes", "deep", "key", "number", "null", "list", "array", "12", "string"],
)
def test_a_bad_line_is_told_with_file_and_line(line: bytes, said: str, write: Write, cache: Path) -> None:
    write("corpus/a.jsonl", b'{"text": "fine"}\n')
    write("corpus/b.jsonl", b'{"text": "fine"}\n\n' + line + b'\n{"text": "fine"}\n')
    problem = refused("corpus", cache)
    assert problem.what.startswith(f"corpus/b.jsonl:3: {said}")
    assert "JSON object" in problem.allowed


def test_the_field_that_may_be_meant_is_offered(write: Write, cache: Path, home: Path, shell: Shell) -> None:
    name = write("a.jsonl", '{"id": 7, "my body": "x", "title": "y"}\n')
    problem = refused(name, cache)
    assert len(problem.fixes) == 2
    for fix, field in zip(problem.fixes, ("my body", "title"), strict=True):
        asked = shell.read(f"./{ENHANCED} --data={name} {fix}")
        assert asked.config.text_field == field
        assert made(name, cache, asked.config.text_field).documents == 1


def test_nothing_but_blank_lines(write: Write, cache: Path) -> None:
    assert "no text" in refused(write("a.jsonl", "\n \n"), cache).what


def test_a_name_as_long_as_names_may_be(write: Write, cache: Path) -> None:
    name = write("x" * 251 + ".txt", "some text")
    ask(f"--data={name}")
    assert made(name, cache).train_tokens == 10


def test_a_name_that_is_no_utf8(write: Write, cache: Path) -> None:
    name = write(os.fsdecode(b"caf\xe9.txt"), "some text")
    assert made(name, cache).train_tokens == 10


# ── once, whole, and by one ──────────────────────────────────────────────────────────────────────────────────────────


def test_the_second_time_it_is_found(write: Write, cache: Path) -> None:
    name = write("a.txt", "some text" * 100)
    first, seen = made(name, cache), []
    assert ensure(source(name), "text", cache, lambda done, total: seen.append(done)) == first
    assert seen == []
    assert Path(first.folder).parent == cache
    assert Path(first.folder).name.startswith("a-")


def test_progress_ends_at_the_whole(write: Write, cache: Path) -> None:
    for n in range(5):
        write(f"corpus/{n}.txt", "x" * 100)
    seen: list[tuple[int, int]] = []
    ensure(source("corpus"), "text", cache, lambda done, total: seen.append((done, total)))
    assert seen == [(100 * n, 500) for n in range(1, 6)]


def test_the_folder_appears_whole_by_a_rename(write: Write, cache: Path) -> None:
    name, inside = write("a.txt", "some text"), []

    def look(done: int, total: int) -> None:
        inside.extend((p.parent.name, p.stat().st_ino) for p in cache.glob("**/train.bin"))

    data = ensure(source(name), "text", cache, look)
    ((folder, inode),) = inside
    assert folder != Path(data.folder).name
    assert data.train.stat().st_ino == inode


def test_a_changed_corpus_is_prepared_again(write: Write, cache: Path, home: Path) -> None:
    name = write("a.txt", "first")
    first = made(name, cache)
    write("a.txt", "other")  # the same size
    os.utime(home / "a.txt", (1, 1))
    second = made(name, cache)
    assert second.folder != first.folder
    assert documents(shard(second.train)) == [b"other"]
    write("b/a.txt", "first")
    assert made("b/a.txt", cache).folder not in (first.folder, second.folder)


def test_what_is_beside_the_shards(write: Write, cache: Path) -> None:
    import hashlib

    data = made(write("a.txt", "some text" * 100), cache)
    folder = Path(data.folder)
    assert sorted(p.name for p in folder.iterdir()) == ["index.json", "train.bin", "val.bin"]
    index = json.loads((folder / "index.json").read_text())
    assert index["train_tokens"] == data.train_tokens
    assert index["train_sha256"] == hashlib.sha256(data.train.read_bytes()).hexdigest()
    assert folder.stat().st_mode & 0o777 == 0o755


def damage_cut(folder: Path) -> None:
    os.truncate(folder / "train.bin", (folder / "train.bin").stat().st_size - 2)


def damage_lost(folder: Path) -> None:
    (folder / "val.bin").unlink()


def damage_index(folder: Path) -> None:
    (folder / "index.json").write_text('{"format": 1, "na')


def damage_format(folder: Path) -> None:
    (folder / "index.json").write_text('{"format": 0}')


@pytest.mark.parametrize("damage", [damage_cut, damage_lost, damage_index, damage_format])
def test_a_damaged_folder_is_made_again(damage: Callable[[Path], None], write: Write, cache: Path) -> None:
    name = write("a.txt", "some text" * 100)
    first = made(name, cache)
    whole = first.train.read_bytes(), first.val.read_bytes()
    damage(Path(first.folder))
    second = made(name, cache)
    assert second == first
    assert (second.train.read_bytes(), second.val.read_bytes()) == whole


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device"), MemoryError])
def test_an_interrupted_preparation_leaves_nothing_and_is_done_again(error: BaseException, write: Write, cache: Path) -> None:
    for n in range(5):
        write(f"corpus/{n}.txt", "x" * 100)

    def stop(done: int, total: int) -> None:
        if done >= 300:
            raise error

    with pytest.raises(type(error) if isinstance(error, BaseException) else error):
        ensure(source("corpus"), "text", cache, stop)
    assert not [p for p in cache.iterdir() if p.is_dir()]
    assert made("corpus", cache).documents == 5


WAITING = """
import signal, sys
from pathlib import Path
from training.data.corpus import find
from training.data.prepare import ensure
def shown(done, total):
    print(done, flush=True)
    {after}
made = ensure(find(sys.argv[1])[0], "text", Path(sys.argv[2]), shown)
print("made", made.folder, flush=True)
"""


def preparing(data: str, cache: Path, after: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WAITING.format(after=after), data, str(cache)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, env=clean_environment())


def test_a_killed_preparation_leaves_no_half_folder_and_is_done_again(write: Write, cache: Path) -> None:
    for n in range(5):
        write(f"corpus/{n}.txt", "x" * 100)
    with preparing("corpus", cache, "signal.pause()") as process:
        assert process.stdout
        assert process.stdout.readline() == "100\n"
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert not [p for p in cache.iterdir() if p.is_dir() and not p.name.startswith(".")]
    data = made("corpus", cache)
    assert data.documents == 5
    # What the killed one had written is gone too: a large corpus would fill the disk bit by bit.
    assert [p for p in cache.iterdir() if p.is_dir()] == [Path(data.folder)]


def waits_for_a_lock(process: subprocess.Popen[str]) -> bool:
    """A waiting process stands in /proc/locks as '7: -> FLOCK ADVISORY WRITE <pid> …'."""
    return any(line.split()[1:2] == ["->"] and str(process.pid) in line.split() for line in Path("/proc/locks").read_text().splitlines())


def test_two_at_once_make_one(write: Write, cache: Path) -> None:
    for n in range(3):
        write(f"corpus/{n}.txt", "x" * 100)
    with preparing("corpus", cache, "sys.stdin.readline()") as first:
        assert first.stdout and first.stdin
        assert first.stdout.readline() == "100\n"  # it has the lock and waits for us
        with preparing("corpus", cache, "pass") as second:
            locks = Path("/proc/locks")
            if locks.exists():
                wait_until(lambda: waits_for_a_lock(second) or second.poll() is not None, 30, "the second waits for the lock")
            first.stdin.write("\n" * 3)
            first.stdin.flush()
            lines = [first.communicate()[0].splitlines(), second.communicate()[0].splitlines()]
    assert lines[0][:-1] == ["200", "300"]
    assert lines[1] == [lines[0][-1]], "the second makes nothing"
    assert lines[1][0].startswith("made ")
    assert [p.name for p in cache.iterdir() if p.is_dir()] == [Path(lines[1][0].removeprefix("made ")).name]


def test_a_full_disk_leaves_nothing(on_small_disk: Callable[..., subprocess.CompletedProcess[str]], write: Write, home: Path) -> None:
    name = write("a.txt", "x" * 3_000_000)
    code = (
        "import sys; from pathlib import Path; from training.data import corpus, prepare\n"
        "try: prepare.ensure(corpus.find(sys.argv[1])[0], 'text', Path('cache'))\n"
        "except OSError as error: print(error.strerror, [p.name for p in Path('cache').iterdir() if p.is_dir()])"
    )
    done = on_small_disk("-c", code, str(home / name), options="size=2m")
    assert done.stdout == "No space left on device []\n", done.stderr


def test_the_share_is_what_it_says() -> None:
    assert prepare.SENSIBLE_SHARE[0] < 1 / prepare.VALIDATION_ONE_IN < prepare.SENSIBLE_SHARE[1]
