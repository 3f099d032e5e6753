"""Files behind a `data` value, and the problem if there are none."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cases import each
from tests.unit.conftest import wrong
from training.core import find_run
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


def test_the_standard_library_is_found_without_its_tests() -> None:
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


def test_a_folder_is_listed_in_a_fixed_order_without_hidden_and_other_files(
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


def test_a_named_file_of_plain_text_needs_no_suffix(write: Write, home: Path) -> None:
    for name, stem in (("notes.md", "notes"), ("README", "README"), ("v1.2/main.c", "main")):
        write(name, "text")
        assert (found(name).files, found(name).name) == ((Path(name),), stem)
    for suffix in corpus.NOT_ONE_TEXT:
        problem = refused(write(f"a{suffix}", "text"))
        assert (problem.code, suffix in problem.allowed) == ("data.suffix", True)
    (home / "weights.bin").write_bytes(b"text\0")
    assert refused("weights.bin").code == "data.suffix"


def test_the_home_folder_is_expanded(
    write: Write, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("a.txt", "x")
    monkeypatch.setenv("HOME", str(home))
    assert found("~/a.txt").files == (home / "a.txt",)


def test_values_that_are_not_a_corpus(write: Write, home: Path) -> None:
    write("a.csv", "x")
    write("a.txt.bz2", "x")
    write("b.gz", "x")
    write("empty.txt", "")
    write("empty/a.txt", "")
    write("other/a.md", "x")
    (home / "none").mkdir()
    (home / "link.txt").symlink_to("nowhere")
    message = {
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
    for data, words in message.items():
        problem = refused(data)
        assert problem.what.endswith(words)
        assert problem.allowed
        assert not [fix for fix in problem.fixes if "--data" in fix], "other data is not a fix"


def test_an_unreadable_file_in_the_folder(write: Write, home: Path) -> None:
    write("corpus/a.txt", "x")
    (home / "corpus/b c.txt").symlink_to("nowhere")
    problem = refused("corpus")
    assert problem.what.endswith("corpus/b c.txt cannot be read: No such file or directory")
    # Every fix is one command with one file name.
    for fix in (f for f in problem.fixes if f.startswith("chmod")):
        assert "'corpus/b c.txt'" in fix


def test_a_link_to_a_place_that_cannot_be_examined(write: Write, home: Path) -> None:
    """As in a folder of another user, which root may read: here of an impossible name."""
    write("corpus/a.txt", "x")
    (home / "corpus/b.txt").symlink_to("x" * 300)
    problem = refused("corpus")
    assert problem.code == "data.unreadable" and "corpus/b.txt" in problem.what


def test_a_named_pipe_in_the_folder_is_ignored(write: Write, home: Path) -> None:
    write("corpus/a.txt", "x")
    os.mkfifo(home / "corpus/pipe.txt")
    # Held open at both ends, so that a reader does not block for ever and the test can fail.
    handle = os.open(home / "corpus/pipe.txt", os.O_RDWR)
    try:
        assert found("corpus").files == (Path("corpus/a.txt"),)
    finally:
        os.close(handle)


def test_a_python_without_library_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(tmp_path))
    source, problem = find("stdlib")
    assert source is None
    assert problem
    assert f"{tmp_path} contains only 0 bytes of source code" in problem.what


def test_the_suggested_fix_works(home: Path, write: Write) -> None:
    write("texts/shakespeare.txt", "x")
    (problem,) = wrong("--data=texts/shakespear.txt", "--seed=2")
    done = subprocess.run(
        ["bash", "-c", problem.fixes[0]], capture_output=True, text=True, check=True
    )
    assert done.stdout == "shakespeare.txt\n"


def test_linked_folders_are_read_once(write: Write, home: Path) -> None:
    write("corpus/a/x.txt", "x")
    write("elsewhere/y.txt", "y")
    (home / "corpus/books").symlink_to(home / "elsewhere")
    (home / "corpus/again").symlink_to(home / "elsewhere")
    (home / "corpus/a/loop").symlink_to(home / "corpus")
    assert [f.name for f in found("corpus").files] == ["x.txt", "y.txt"]


def test_a_folder_that_cannot_be_read_is_not_left_out(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read everything: the error is that of a disk."""
    write("corpus/a.txt", "some text")
    write("corpus/sub/b.txt", "some text")
    listed = os.scandir

    def scandir(folder: str) -> object:
        if Path(folder).name in ("sub", "lost+found"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), folder)
        return listed(folder)

    monkeypatch.setattr(corpus.os, "scandir", scandir)
    problem = refused("corpus")
    assert problem.code == "data.unreadable" and "corpus/sub" in problem.what
    assert "/dev" not in problem.what and not problem.fixes
    Path("corpus/sub").rename("corpus/lost+found")
    assert [file.name for file in found("corpus").files] == ["a.txt"]


def test_a_file_behind_several_links_is_read_once(write: Write, home: Path) -> None:
    """As in the cache of the Hugging Face hub: a revision is a folder of links."""
    write("hub/blobs/1f", "x")
    write("hub/blobs/2f", "y")
    for revision, names in (("r1", {"a.txt": "1f"}), ("r2", {"a.txt": "1f", "b.txt": "2f"})):
        (home / "hub/snapshots" / revision).mkdir(parents=True)
        for name, blob in names.items():
            (home / "hub/snapshots" / revision / name).symlink_to(home / "hub/blobs" / blob)
    assert [str(f) for f in found("hub").files] == [
        "hub/snapshots/r1/a.txt",
        "hub/snapshots/r2/b.txt",
    ]
    assert found("hub").total_bytes == 2


def test_the_path_of_a_folder_is_resolved_once_for_its_files(
    write: Write, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a network disk each part of a path is a round trip."""
    for number in range(100):
        write(f"corpus/{number % 2}/{number}.txt", "x")
    (home / "corpus/link.txt").symlink_to("0/0.txt")
    resolved, real = list[object](), os.path.realpath

    def counted(path: str | Path, **more: bool) -> str:
        resolved.append(path)
        return real(path, **more)

    monkeypatch.setattr(os.path, "realpath", counted)
    files = corpus._walk(Path("corpus"), (".txt",), set())
    assert len(files) == 100 and files[0].name == "link.txt"
    assert len(resolved) <= 10


def test_a_file_system_without_inode_numbers(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.txt", "b.txt", "sub/c.txt", "sub/below/d.txt"):
        write(f"corpus/{name}", "x")

    def without_inode(status: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def found(*place: object, **more: object) -> os.stat_result:
            mode, _, *rest = status(*place, **more)
            return os.stat_result([mode, 0, *rest])

        return found

    for name in ("stat", "lstat", "fstat"):
        monkeypatch.setattr(os, name, without_inode(getattr(os, name)))
    assert Path("corpus/a.txt").stat().st_ino == Path("corpus/b.txt").lstat().st_ino == 0
    assert [file.name for file in found("corpus").files] == ["a.txt", "b.txt", "c.txt", "d.txt"]


def test_a_link_to_a_folder_that_is_not_there(write: Write, home: Path) -> None:
    """As of a disk that is not mounted: half of the text would be left out."""
    write("corpus/a.txt", "x")
    for other in ("README", "LICENSE", "latest", "wiki.v1", ".part3", "no.md"):
        (home / "corpus" / other).symlink_to("nowhere")  # the disk of the link is there
    (home / "corpus/loop").symlink_to("loop")
    (home / "corpus/logo.png").symlink_to(".git/annex/objects/not fetched/logo.png")
    assert found("corpus").files == (Path("corpus/a.txt"),)
    (home / "mount point").mkdir()
    (home / "media/USB1").mkdir(parents=True)
    (home / "link").symlink_to("/mnt/not mounted/corpus")
    for name, target in (
        ("part2", "/mnt/not mounted/corpus"),
        ("wiki.v2", "/mnt/not mounted/corpus"),
        ("part3", "../media/USB2"),
        ("data.2024-06", home / "mount point/corpus"),
        ("part4", home / "link"),
    ):
        link = home / "corpus" / name
        link.symlink_to(target)
        problem = refused("corpus")
        link.unlink()
        assert problem.code == "data.unreadable" and not problem.fixes
        assert f"corpus/{name}" in problem.what and os.strerror(errno.ENOENT) in problem.what


def test_a_removed_folder_of_a_corpus_of_folders(write: Write, home: Path) -> None:
    """Its disk is that of the corpus."""
    write("corpus/en/a.txt", "x")
    write("corpus/de/b.txt", "x")
    write("corpus/versions/2024-04/c.txt", "x")
    write("disk/text/de/d.txt", "x")
    for name, target in (
        ("corpus/latest", "2024-05"),
        ("corpus/de/latest", "../2024-05"),
        ("corpus/de/french", "../fr/2024-05"),
        ("corpus/newest", "versions/2024-05"),
        ("corpus/more", "../disk/text"),
        ("disk/text/de/latest", "../2024-05"),
    ):
        (home / name).symlink_to(target)
    names = [file.name for file in found("corpus").files]
    assert names == ["b.txt", "a.txt", "d.txt", "c.txt"]


@each("place", [".", "../other"])
def test_many_links_to_nothing_list_no_folder(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would list all of them."""
    root, there = tmp_path / "corpus", tmp_path / "other"
    for folder in (root, there):
        folder.mkdir()
    for n in range(50):
        (there / f"{n}.txt").touch()
    links = [root / f"{n:04}" for n in range(50)]
    for link in links:
        link.symlink_to(f"{place}/gone{link.name}")
    read, scan = list[str](), os.scandir

    @contextlib.contextmanager
    def counted(folder: Path) -> Iterator[Iterator[os.DirEntry[str]]]:
        with scan(folder) as entries:
            yield (read.append(entry.name) or entry for entry in entries)

    monkeypatch.setattr(os, "listdir", lambda folder: pytest.fail("lists a folder"))
    monkeypatch.setattr(os, "scandir", counted)
    assert not any(find_run.is_lost_folder(link, root) for link in links)
    assert len(read) == len(links)


@each(
    ("folder", "target", "empty"),
    [
        ("media/USB1/corpus", "../../USB2", ""),
        ("tank/corpus", "../extra", ""),  # ZFS, too, removes the mount point with the disk
        ("corpus", "/USB2", ""),  # `/` may have files
        ("corpus", "/USB2/corpus", ""),
        ("corpus", "disk/corpus", "corpus/disk"),
    ],
)
def test_a_mount_point_that_vanished_with_its_disk(
    folder: str, target: str, empty: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / folder
    root.mkdir(parents=True)
    (tmp_path / empty).mkdir(exist_ok=True)
    if target.startswith("/"):
        monkeypatch.setattr(find_run, "is_file", Path.exists)
    (root / "part2").symlink_to(target)
    assert find_run.is_lost_folder(root / "part2", root)
