"""Which files a `data` value means, and what is said when it means none."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.conftest import wrong
from training.core.errors import Problem
from training.data import corpus
from training.data.corpus import CorpusSource, find

Write = Callable[..., str]


def found(data: str) -> CorpusSource:
    source, problem = find(data, "from --data on the command line")
    assert problem is None
    assert source
    return source


def refused(data: str) -> Problem:
    source, problem = find(data, "from --data on the command line")
    assert source is None
    assert problem
    assert problem.what.startswith(f"data is {data!r} (from --data on the command line): ")
    return problem


def test_the_standard_library_is_there_and_without_tests() -> None:
    source = found("stdlib")
    assert source.name == "stdlib"
    assert source.total_bytes == sum(f.stat().st_size for f in source.files) > 1 << 20
    names = {str(f.relative_to(sysconfig.get_path("stdlib"))) for f in source.files}
    assert {"os.py", "json/decoder.py"} <= names
    assert not [
        n
        for n in names
        if "site-packages" in n or "/test" in n or n.startswith("test") or not n.endswith(".py")
    ]
    assert list(source.files) == list(found("stdlib").files)


def test_one_file(write: Write) -> None:
    source = found(write("My Book.v2.txt", "häh"))
    assert (source.name, source.files, source.total_bytes) == (
        "My Book.v2",
        (Path("My Book.v2.txt"),),
        4,
    )
    assert found(write("a.jsonl", "{}")).files == (Path("a.jsonl"),)
    for name in ("book.txt", "book.txt.gz", "book.jsonl.zst", "book.parquet"):
        assert found(write(name, "x")).name == "book"


def test_a_folder_in_a_fixed_order_without_what_is_hidden_or_not_text(
    write: Write, home: Path
) -> None:
    for name in (
        "b.txt",
        "a/z.jsonl",
        "a/b.txt",
        "a.txt",
        ".hidden.txt",
        ".git/x.txt",
        "a/b.md",
        "empty.txt",
    ):
        write(f"corpus/{name}", "" if name == "empty.txt" else "x")
    source = found("corpus")
    assert [str(f) for f in source.files] == [
        f"corpus/{n}" for n in ("a.txt", "b.txt", "empty.txt", "a/b.txt", "a/z.jsonl")
    ]
    assert (source.name, source.total_bytes) == ("corpus", 4)
    assert found(str(home / "corpus")).name == "corpus"
    assert found("corpus/../corpus/").name == "corpus"
    names = [f"many/{n}/a.txt" for n in ("q", "b", "zz", "m", "a", "x", "c", "k", "d", "y")]
    for name in names:
        write(name, "x")
    assert [str(f) for f in found("many").files] == sorted(names)


def test_where_the_user_is_at_home(
    write: Write, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("a.txt", "x")
    monkeypatch.setenv("HOME", str(home))
    assert found("~/a.txt").files == (home / "a.txt",)


def test_what_is_no_corpus(write: Write, home: Path) -> None:
    write("a.csv", "x")
    write("a.txt.bz2", "x")
    write("b.gz", "x")
    write("empty.txt", "")
    write("empty/a.txt", "")
    write("other/a.md", "x")
    (home / "none").mkdir()
    (home / "link.txt").symlink_to("nowhere")
    said = {
        "missing.txt": "no such file or folder",
        "link.txt": "no such file or folder",
        "a.csv/x.txt": "no such file or folder",
        "a.csv": f"not a {corpus.NAMED} file",
        "a.txt.bz2": f"not a {corpus.NAMED} file",
        "b.gz": f"not a {corpus.NAMED} file",
        "empty.txt": "empty",
        "empty": "empty",
        "none": f"no {corpus.NAMED} file in this folder",
        "other": f"no {corpus.NAMED} file in this folder",
        "/dev/null": f"not a {corpus.NAMED} file",
    }
    for data, words in said.items():
        problem = refused(data)
        assert problem.what.endswith(words)
        assert problem.allowed
        assert not [fix for fix in problem.fixes if "--data" in fix], "other data is no answer"


def test_a_file_of_the_folder_that_can_not_be_read(write: Write, home: Path) -> None:
    write("corpus/a.txt", "x")
    (home / "corpus/b c.txt").symlink_to("nowhere")
    problem = refused("corpus")
    assert problem.what.endswith("corpus/b c.txt can not be read: No such file or directory")
    # Whatever is advised is one command with one file name.
    for fix in (f for f in problem.fixes if f.startswith("chmod")):
        assert "'corpus/b c.txt'" in fix


def test_a_named_pipe_in_the_folder_is_not_waited_for(write: Write, home: Path) -> None:
    write("corpus/a.txt", "x")
    os.mkfifo(home / "corpus/pipe.txt")
    # Held open at both ends, so that a reader does not block for ever and the test can fail.
    handle = os.open(home / "corpus/pipe.txt", os.O_RDWR)
    try:
        assert found("corpus").files == (Path("corpus/a.txt"),)
    finally:
        os.close(handle)


def test_a_python_without_its_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(tmp_path))
    source, problem = find("stdlib")
    assert source is None
    assert problem
    assert f"{tmp_path} holds only 0 bytes of sources" in problem.what


def test_the_advice_works(home: Path, write: Write) -> None:
    write("texts/shakespeare.txt", "x")
    (problem,) = wrong("--data=texts/shakespear.txt", "--seed=2")
    done = subprocess.run(
        ["bash", "-c", problem.fixes[0]], capture_output=True, text=True, check=True
    )
    assert done.stdout == "shakespeare.txt\n"
