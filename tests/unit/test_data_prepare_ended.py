"""Preparations of data that end early, and what they leave."""

from __future__ import annotations

import errno
import io
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cases import each
from tests.unit.conftest import clean_environment
from tests.unit.corpora import made, source
from training.core import file_lock, mounts
from training.core.errors import Exit, UserError
from training.data import prepare, work_folders
from training.data.prepare import ensure
from training.data.prepared_corpus import own_copy

Write = Callable[..., str]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, OSError(28, "No space left on device"), MemoryError]
)
def test_an_interrupted_preparation_leaves_nothing_and_is_repeated(
    error: BaseException, write: Write, cache: Path
) -> None:
    for n in range(5):
        write(f"corpus/{n}.txt", "x" * 100)

    def stop(what: str, done: int, total: int) -> None:
        if done >= 300:
            raise error

    with pytest.raises(type(error) if isinstance(error, BaseException) else error):
        ensure(source("corpus"), "text", cache, stop)
    assert not [p for p in cache.iterdir() if p.is_dir()]
    assert made("corpus", cache).documents == 5


def test_a_full_disk_leaves_nothing(
    on_small_disk: Callable[..., subprocess.CompletedProcess[str]], write: Write, home: Path
) -> None:
    name = write("a.md", "x" * 3_000_000)
    code = (
        "import sys; from pathlib import Path; from training.data import corpus, prepare\n"
        "try: prepare.ensure(corpus.find(sys.argv[1])[0], 'text', Path('cache'))\n"
        "except OSError as error: print(error.strerror, [p.name for p in Path('cache').iterdir() "
        "if p.is_dir()])"
    )
    done = on_small_disk("-c", code, str(home / name), options="size=2m")
    assert done.stdout == "No space left on device []\n", done.stderr


@each(
    ("tokenizer", "suffix", "needed"),
    [
        ("bytes", ".txt", 2000),
        ("bytes", ".jsonl", 62),  # may contain other fields
        ("bpe", ".txt", 125),
        ("bytes", ".txt.gz", 0),  # unknown
    ],
)
def test_a_disk_that_is_too_small_is_refused_at_once(
    tokenizer: str,
    suffix: str,
    needed: int,
    write: Write,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    corpus = source(write(f"{tokenizer}/a{suffix}", "x" * 1000))
    assert work_folders.least_bytes(corpus, tokenizer) == needed
    if not needed:
        return
    used: Any = SimpleNamespace(free=needed - 1)
    monkeypatch.setattr(mounts, "file_system", lambda folder: "ext4")
    monkeypatch.setattr(work_folders.shutil, "disk_usage", lambda path: used)
    with pytest.raises(UserError) as caught:
        ensure(corpus, "text", cache, chosen=tokenizer, vocab_size=300)
    (problem,) = caught.value.problems
    assert (problem.code, caught.value.code) == ("data.no_room", Exit.RESOURCES)
    assert not any(cache.iterdir())
    used.free = needed
    work_folders.check_room(cache, corpus, tokenizer)


@each("kind", ["zfs", "overlay", ""])
def test_a_disk_that_may_compress_is_a_warning(
    kind: str,
    write: Write,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    corpus = source(write("a.txt", "x" * 1000))
    listed, device = tmp_path / "mountinfo", tmp_path.stat().st_dev
    mounted = f"1 0 {os.major(device)}:{os.minor(device)} / /mnt rw shared:1 - {kind} pool rw\n"
    listed.write_text("2 0 0:99999 / /proc rw - proc proc rw\n" + (mounted if kind else ""))
    monkeypatch.setattr(mounts, "MOUNTS", listed)
    assert mounts.file_system(tmp_path) == kind
    for free, lines in ((1999, 1), (2000, 0)):
        used = SimpleNamespace(free=free)
        monkeypatch.setattr(work_folders.shutil, "disk_usage", lambda path, used=used: used)
        work_folders.check_room(tmp_path, corpus, "bytes")
        assert len(capsys.readouterr().err.splitlines()) == lines


def test_what_a_killed_preparation_leaves_is_room_for_the_next(
    write: Write, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was killed while this one waited for its lock."""
    corpus = source(write("a.txt", "x" * 1000))
    name = prepare.folder_of(corpus, "text", cache).name
    left = cache / f".{name}.{socket.gethostname()}.work"
    left.mkdir(parents=True)
    (left / "train_00000.bin").write_bytes(b"x" * 2000)

    def usage(path: Path) -> Any:
        used = sum(file.stat().st_size for file in path.rglob("*.bin"))
        return SimpleNamespace(free=3000 - used)

    monkeypatch.setattr(work_folders.shutil, "disk_usage", usage)
    monkeypatch.setattr(work_folders, "remove_abandoned", lambda cache: None)
    assert ensure(corpus, "text", cache).documents == 1


def test_the_least_room_is_no_more_than_the_tokens_take(write: Write, cache: Path) -> None:
    """Cyrillic letters have two bytes each; a frequent word is one token."""
    pytest.importorskip("tokenizers")
    words = [chr(0x430 + n % 32) * 3 + chr(0x430 + n // 32) * 2 for n in range(320)]
    corpus = source(write("a.txt", " ".join(words[n * n % 320] for n in range(20_000))))
    data = ensure(corpus, "text", cache, chosen="bpe", vocab_size=2000)
    taken = sum(file.stat().st_size for file in Path(data.folder).glob("*.bin"))
    assert work_folders.least_bytes(corpus, "bpe") <= taken < corpus.total_bytes / 8 * 2


@pytest.mark.parametrize(
    ("name", "error"),
    [("index.json", errno.EACCES), ("index.json", errno.EIO), ("train_00000.bin", errno.EACCES)],
)
def test_a_folder_that_cannot_be_read_is_refused_before_any_work(
    name: str, error: int, write: Write, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = write("a.txt", "some text" * 100), set[str]()
    folder = Path(made(path, cache).folder)
    opened = io.open

    def denied(file: Any, *mode: Any, **more: Any) -> Any:
        if file == folder / name:
            raise OSError(error, os.strerror(error), str(file))
        return opened(file, *mode, **more)

    monkeypatch.setattr(io, "open", denied)
    monkeypatch.setattr("builtins.open", denied)
    with pytest.raises(UserError) as caught:
        ensure(source(path), "text", cache, lambda what, done, total: seen.add(what))
    (problem,) = caught.value.problems
    assert (problem.code, caught.value.code) == ("data.unreadable", Exit.RESOURCES)
    assert str(folder) in problem.what and folder.owner() in problem.what
    commands = [f"chmod -R a+rX {folder}   # as {folder.owner()}", own_copy()]
    assert problem.fixes == (commands if error == errno.EACCES else [])
    assert prepare.TOKENIZING not in seen


def test_work_folders_of_killed_preparations_are_removed(
    write: Write, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of machines that are gone. One in use stays new, whatever takes long."""
    monkeypatch.setattr(work_folders, "TOUCH_S", 0.0)
    old, new = cache / ".a-0123.gone.work", cache / ".a-0123.other.work"
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "train_00000.bin").touch()
    os.utime(old, (1, 1))
    ages = []

    def shown(what: str, done: int, total: int) -> None:
        for own in {*cache.glob(".*.work")} - {new}:
            ages.append(own.stat().st_mtime)
            os.utime(own, (1, 1))

    for name in "bc":
        write(f"corpus/{name}.txt", "some text" * 100)
    data = ensure(source("corpus"), "text", cache, shown)
    assert len(ages) > 1 and min(ages) > work_folders.ABANDONED_S
    assert sorted(p.name for p in cache.iterdir()) == [new.name, Path(data.folder).name]


def test_what_a_killed_preparation_of_this_machine_leaves_is_removed_at_once(
    cache: Path,
) -> None:
    """It may fill the disk that the next one needs. Its lock is free."""
    host, of_a, of_b = socket.gethostname(), "a-0123456789ab", "b-0123456789ab"
    dead, used, unlocked, other = (
        cache / f".{name}.work"
        for name in (f"{of_a}.{host}", f"{of_b}.{host}", f"{of_a}.x8_ra", f"{of_a}.c01.{host}")
    )
    for folder in (dead, used, unlocked, other):
        folder.mkdir(parents=True)
    (cache / f".{of_a}.lock").touch()
    with file_lock.alone(cache / f".{of_b}.lock") as locked:
        assert locked
        work_folders.remove_abandoned(cache)
        kept = {used.name, f".{of_b}.lock", unlocked.name, other.name}
        assert {p.name for p in cache.iterdir()} == kept


LEARNING = """
import sys
from pathlib import Path
from training.data.corpus import find
from training.data.prepare import LEARNING, ensure
from training.host import program
def shown(what, done, total):
    if what == LEARNING:
        print(done, flush=True)
def main(arguments):
    ensure(find("a.txt")[0], "text", Path(arguments[0]), shown, chosen="bpe", vocab_size=2000)
program.leave(program.run(main, None))
"""


def test_ctrl_c_while_a_vocabulary_is_learned(write: Write, cache: Path) -> None:
    """The library calls Python in a thread while the interpreter ends."""
    pytest.importorskip("tokenizers")
    write("a.txt", "".join(f"{n * n:x} " for n in range(1_000_000)))
    for _ in range(5):
        with subprocess.Popen(
            [sys.executable, "-c", LEARNING, str(cache)],
            stdout=subprocess.PIPE,
            env=clean_environment(),
        ) as process:
            assert process.stdout and process.stdout.readline()
            process.send_signal(signal.SIGINT)
            process.communicate()
        assert process.returncode == Exit.INTERRUPTED
        assert not any(cache.iterdir())
