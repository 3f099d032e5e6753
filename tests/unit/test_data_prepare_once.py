"""Shards are prepared once, completely, by one process; and again if they are damaged."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.unit.conftest import clean_environment
from tests.unit.corpora import documents, made, shard, source
from training.core import file_lock
from training.data import prepare
from training.data.prepare import ensure
from training.data.prepared_corpus import PreparedCorpus

Write = Callable[..., str]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_prepared_data_is_reused(write: Write, cache: Path) -> None:
    name = write("a.txt", "some text" * 100)
    first, seen = made(name, cache), []
    assert ensure(source(name), "text", cache, lambda what, done, total: seen.append(what)) == first
    assert set(seen) <= {prepare.CHECKING}
    assert Path(first.folder).parent == cache
    assert Path(first.folder).name.startswith("a-")


def test_progress_ends_at_the_total(write: Write, cache: Path) -> None:
    for n in range(5):
        write(f"corpus/{n}.txt", "x" * 100)
    seen: list[tuple[int, int]] = []
    ensure(
        source("corpus"),
        "text",
        cache,
        lambda what, done, total: (
            seen.append((done, total)) if what == prepare.TOKENIZING else None
        ),
    )
    assert seen == [(100 * n, 500) for n in range(1, 6)]


def test_the_folder_appears_complete_by_a_rename(write: Write, cache: Path) -> None:
    name, inside = write("a.txt", "some text"), []

    def look(what: str, done: int, total: int) -> None:
        inside.extend((p.parent.name, p.stat().st_ino) for p in cache.glob("**/train_00000.bin"))

    data = ensure(source(name), "text", cache, look)
    ((folder, inode),) = inside
    assert folder != Path(data.folder).name
    assert data.train[0].stat().st_ino == inode


def test_a_changed_corpus_is_prepared_again(write: Write, cache: Path, home: Path) -> None:
    name = write("a.txt", "first")
    first = made(name, cache)
    write("a.txt", "other")  # of the same size
    os.utime(home / "a.txt", (1, 1))
    second = made(name, cache)
    assert second.folder != first.folder
    assert documents(shard(second.train)) == [b"other"]
    write("b/a.txt", "first")
    assert made("b/a.txt", cache).folder not in (first.folder, second.folder)


def test_files_beside_the_shards(write: Write, cache: Path) -> None:
    import hashlib

    data = made(write("a.txt", "some text" * 100), cache)
    folder = Path(data.folder)
    assert sorted(p.name for p in folder.iterdir()) == [
        "index.json",
        "train_00000.bin",
        "val_00000.bin",
    ]
    index = json.loads((folder / "index.json").read_text())
    assert index["train_tokens"] == data.train_tokens
    assert index["files"]["train_00000.bin"] == {
        "bytes": 2 * data.train_tokens,
        "sha256": hashlib.sha256(data.train[0].read_bytes()).hexdigest(),
        "tokens": data.train_tokens,
    }
    assert folder.stat().st_mode & 0o777 == 0o755


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (
        lambda f: os.truncate(f / "train_00001.bin", 100),
        "train_00001.bin has 100 bytes, not 400",
    ),
    "longer": (
        lambda f: os.truncate(f / "train_00001.bin", 402),
        "train_00001.bin has 402 bytes, not 400",
    ),
    "lost": (
        lambda f: (f / "val_00000.bin").unlink(),
        "val_00000.bin cannot be read: No such file",
    ),
    "bit": (
        lambda f: flip(f / "train_00002.bin"),
        "train_00002.bin was changed (sha256 ",
    ),
    "index": (
        lambda f: (f / "index.json").write_text('{"format": 2, "na'),
        "index.json is damaged",
    ),
    "format": (lambda f: (f / "index.json").write_text('{"format": 0}'), "index.json is damaged"),
    "facts": (
        lambda f: (f / "index.json").write_text('{"format": 2, "name": "a"}'),
        "index.json is damaged",
    ),
    "no index": (lambda f: (f / "index.json").unlink(), "index.json is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_reported_and_prepared_again(
    damage: str,
    write: Write,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 200)
    name = write("a.txt", "some text" * 100)
    first = made(name, cache)
    whole = [p.read_bytes() for p in (*first.train, *first.val)]
    assert len(whole) > 4
    assert made(name, cache) == first and capsys.readouterr().err == ""
    do, message = DAMAGES[damage]
    do(Path(first.folder))
    second = made(name, cache)
    assert second == first
    assert [p.read_bytes() for p in (*second.train, *second.val)] == whole
    (line,) = capsys.readouterr().err.splitlines()
    assert "[WARNING]" in line and f"{first.folder} is damaged: {message}" in line


@pytest.mark.parametrize("limit", [7, 100, 1000, 1001])
@pytest.mark.parametrize("count", [1, 50])
def test_shards_of_any_size_have_the_same_content(
    limit: int, count: int, write: Write, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(count):
        write(f"corpus/{n:02}.txt", f"{n} " * (1000 // count))
    one = made("corpus", cache)
    monkeypatch.setattr(prepare, "SHARD_TOKENS", limit)
    many = made("corpus", cache)
    assert (shard(many.train), shard(many.val)) == (shard(one.train), shard(one.val))
    for part, paths in (("train", many.train), ("val", many.val)):
        assert [p.stat().st_size // 2 for p in paths] == many.sizes(part)
        assert all(size == limit for size in many.sizes(part)[:-1]) and sum(
            many.sizes(part)
        ) == getattr(many, f"{part}_tokens")
    beside = {p.name for p in Path(many.folder).iterdir()} - {"index.json"}
    assert beside == {p.name for p in (*many.train, *many.val)}


WAITING = """
import signal, sys
from pathlib import Path
from training.data.corpus import find
from training.data.prepare import ensure
def shown(what, done, total):
    if what == 'tokenizing':
        print(done, flush=True)
        {after}
made = ensure(find(sys.argv[1])[0], "text", Path(sys.argv[2]), shown)
print("made", made.folder, flush=True)
"""


def preparing(data: str, cache: Path, after: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WAITING.format(after=after), data, str(cache)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, env=clean_environment()
    )


def test_a_killed_preparation_leaves_no_partial_folder_and_is_repeated(
    write: Write, cache: Path
) -> None:
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
    # Files of the killed process are removed too: otherwise a large corpus would slowly fill the disk.
    assert [p for p in cache.iterdir() if p.is_dir()] == [Path(data.folder)]


def waits_for_a_lock(process: subprocess.Popen[str]) -> bool:
    """A waiting process appears in /proc/locks as '7: -> FLOCK ADVISORY WRITE <pid> …'."""
    return any(
        line.split()[1:2] == ["->"] and str(process.pid) in line.split()
        for line in Path("/proc/locks").read_text().splitlines()
    )


def test_two_processes_prepare_one_folder(write: Write, cache: Path) -> None:
    for n in range(3):
        write(f"corpus/{n}.txt", "x" * 100)
    with preparing("corpus", cache, "sys.stdin.readline()") as first:
        assert first.stdout and first.stdin
        assert first.stdout.readline() == "100\n"  # it has the lock and waits for the test
        with preparing("corpus", cache, "pass") as second:
            locks = Path("/proc/locks")
            if locks.exists():
                wait_until(
                    lambda: waits_for_a_lock(second) or second.poll() is not None,
                    30,
                    "the second waits for the lock",
                )
            first.stdin.write("\n" * 3)
            first.stdin.flush()
            lines = [first.communicate()[0].splitlines(), second.communicate()[0].splitlines()]
    assert lines[0][:-1] == ["200", "300"]
    assert lines[1] == [lines[0][-1]], "the second prepares nothing"
    assert lines[1][0].startswith("made ")
    assert [p.name for p in cache.iterdir()] == [Path(lines[1][0].removeprefix("made ")).name], (
        "and no lock file is left"
    )


def test_the_validation_share() -> None:
    assert prepare.SENSIBLE_SHARE[0] < 1 / prepare.VALIDATION_ONE_IN < prepare.SENSIBLE_SHARE[1]


def no_locks(file: object, operation: int) -> None:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def locks_of_one_machine(file: object, operation: int) -> None:
    """For two processes on different machines."""


def test_what_another_user_leaves_does_not_block_the_next(
    write: Write, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder cannot be removed."""
    name = write("a.txt", "some text" * 100)
    final = prepare.folder_of(source(name), "text", cache)
    left = cache / f".{final.name}.{socket.gethostname()}.work"
    left.mkdir(parents=True)
    real = shutil.rmtree

    def removed(path: Path, *, ignore_errors: bool = False) -> None:
        if path != left:
            real(path, ignore_errors=ignore_errors)
        elif not ignore_errors:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(shutil, "rmtree", removed)
    assert Path(made(name, cache).folder) == final
    assert {*cache.iterdir()} == {final, left}
    assert final.stat().st_mode == cache.stat().st_mode


@pytest.mark.parametrize("flock", [no_locks, locks_of_one_machine])
def test_two_runs_prepare_the_same_without_common_locks(
    flock: Callable[[object, int], None],
    write: Write,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one to finish counts: its files, which may be in use, stay."""
    for n in range(3):
        write(f"corpus/{n}.txt", "some text" * 100)

    def other(what: str, done: int, total: int) -> None:
        if what == prepare.TOKENIZING and not finished:
            finished.append(None)
            with monkeypatch.context() as patch:
                patch.setattr(socket, "gethostname", lambda: "the other")
                finished.append(made("corpus", cache))
            inodes.extend(path.stat().st_ino for path in first_shards())

    def first_shards() -> list[Path]:
        return [path for path in cache.glob("*/*_00000.bin") if path.parent.name[0] != "."]

    finished: list[PreparedCorpus | None] = []
    inodes: list[int] = []
    monkeypatch.setattr(file_lock.fcntl, "flock", flock)
    first = ensure(source("corpus"), "text", cache, other)
    assert finished == [None, first] and first == made("corpus", cache)
    assert [path.stat().st_ino for path in first_shards()] == inodes and len(inodes) == 2
    assert [path.name for path in cache.iterdir()] == [Path(first.folder).name]
