"""Every input format gives the same complete documents, or a problem with the damaged place."""

from __future__ import annotations

import gzip
import json
import shlex
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from tests.cases import each
from tests.unit.conftest import python
from training.core.errors import Problem, UserError
from training.data import optional_deps, parquet_file, readers
from training.data.corpus import SUFFIXES, find
from training.data.prepare import ensure
from training.host import packages

Write = Callable[..., str]
TEXTS = ["one", "", "zwölf\nLinien\n", "训练 🙂", "x" * 1000, "long line\n" * 60_000, "é" * 300_000]


def squeeze(name: str, content: bytes) -> bytes:
    if name.endswith(".gz"):
        return gzip.compress(content)
    if name.endswith(".zst"):  # with a checksum, like the zstd command
        return bytes(
            import_module("zstandard").ZstdCompressor(write_checksum=True).compress(content)
        )
    return content


def put(write: Write, home: Path, name: str, texts: list[str], field: str = "text") -> str:
    """Files in this format with these texts."""
    if name.endswith(".parquet"):
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
        parquet.write_table(
            arrow.table({"id": list(range(len(texts))), field: texts}),
            home / name,
            row_group_size=3,
            write_page_checksum=True,
        )
    elif ".jsonl" in name:
        write(name, squeeze(name, "".join(json.dumps({field: t}) + "\n" for t in texts).encode()))
    else:
        for number, text in enumerate(texts):
            write(f"{name}.d/{number}{name[name.index('.') :]}", squeeze(name, text.encode()))
        return f"{name}.d"
    return name


def pieces(data: str, field: str = "text") -> list[readers.DocumentPart]:
    source, problem = find(data)
    assert source, problem
    return list(readers.documents(source, field))


def refused(data: str, field: str = "text") -> Problem:
    with pytest.raises(UserError) as caught:
        pieces(data, field)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_form_gives_the_same(suffix: str, write: Write, home: Path) -> None:
    found = pieces(put(write, home, f"a{suffix}", TEXTS))
    plain = pieces(put(write, home, "b.txt", TEXTS))
    assert [p[:2] for p in found] == [p[:2] for p in plain]
    documents: list[bytes] = []
    for content, first, _ in found:
        assert len(content) <= readers.PIECE
        content.decode()  # no character is split
        documents[-1:] = (
            [content]
            if first and not documents
            else [documents[-1], content]
            if first
            else [documents[-1] + content]
        )
    assert documents == [t.encode() for t in TEXTS]
    done = [p.done for p in found]
    source, _ = find(f"a{suffix}" if "txt" not in suffix else f"a{suffix}.d")
    assert source and done == sorted(done) and done[-1] <= source.total_bytes


def test_a_folder_of_all_forms(write: Write, home: Path, tmp_path: Path) -> None:
    (home / "mixed").mkdir()
    for number, suffix in enumerate(SUFFIXES):
        put(write, home, f"mixed/{number}{suffix}", ["same text"] * 3)
    source, _ = find("mixed")
    assert source
    data = ensure(source, "text", tmp_path / "cache")
    assert data.documents == 3 * len(SUFFIXES)
    assert data.train_tokens + data.val_tokens == 10 * data.documents


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst", "a.jsonl"])
def test_a_byte_order_mark_is_not_text(name: str, write: Write) -> None:
    long = "line 🙂\n" * 60_000
    for text in (long, "", "\ufeffkept", "x"):
        content = json.dumps({"text": text}) if "jsonl" in name else text
        write(name, squeeze(name, f"\ufeff{content}".encode()))
        marked = [p.content for p in pieces(name)]
        assert b"".join(marked) == text.encode(), text[:9]
        if len(marked) > 1:  # cut at the same places as without the mark
            assert marked == [p.content for p in pieces(write("plain.txt", text))]


def test_half_of_a_character_is_named(write: Write) -> None:
    problem = refused(write("a.jsonl", '{"text": "ok 🙂"}\n{"text": "\\ud83d lone"}\n'))
    assert problem.code == "data.not_unicode"
    assert problem.what.startswith("a.jsonl:2: ") and "\\ud83d" in problem.what
    write("a.jsonl", '{"text": "\\ud83d\\ude42"}\n')
    assert [p.content.decode() for p in pieces("a.jsonl")] == ["🙂"]


def test_consecutive_frames(write: Write) -> None:
    for name in ("a.txt.gz", "a.txt.zst"):
        write(name, squeeze(name, b"one ") + squeeze(name, b"two"))
        assert b"".join(p.content for p in pieces(name)) == b"one two"


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.txt.gz", "a.txt.zst"])
@pytest.mark.parametrize("damage", ["cut", "other", "middle"])
def test_a_damaged_file_is_reported(name: str, damage: str, write: Write) -> None:
    lines = b"".join(b'{"text": "document %d %x"}\n' % (n, n**9) for n in range(20_000))
    whole = squeeze(name, lines)
    content = {
        "cut": whole[:-100],
        "other": b"plain text",
        "middle": whole[:1000] + b"\xff" * 500 + whole[1500:],
    }[damage]
    problem = refused(write(name, content))
    assert problem.what.startswith(f"{name}: damaged ") or (
        damage == "middle" and f"{name}:" in problem.what
    )
    if damage == "cut" and "jsonl" in name:
        assert " after line " in problem.what


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.zst", "a.parquet"])
def test_an_empty_compressed_file_is_damaged(name: str, write: Write) -> None:
    write("corpus/0.txt", "fine")
    write(f"corpus/{name}", b"")
    assert refused("corpus").what.startswith(f"corpus/{name}: damaged file: an empty ")


def test_a_damaged_parquet_file(write: Write, home: Path) -> None:
    put(write, home, "a.parquet", [f"document {n}" for n in range(1000)])
    whole = (home / "a.parquet").read_bytes()
    for content in (b"plain", whole[:-50], whole[:40] + b"\xff" * 200 + whole[240:]):
        assert refused(write("b.parquet", content)).what.startswith("b.parquet: damaged ")


def test_all_unusable_parquet_files_are_reported_at_once(
    write: Write, home: Path, tmp_path: Path
) -> None:
    """Before any text is tokenized: a run of hours would find one of them."""
    (home / "corpus").mkdir()
    put(write, home, "corpus/0.parquet", ["fine"])
    put(write, home, "corpus/1.parquet", ["x"], field="body")
    for name in ("2.parquet", "4.PARQUET"):
        write(f"corpus/{name}", (home / "corpus/0.parquet").read_bytes()[:-50])
    write("corpus/3.parquet", b"")
    source, seen = find("corpus")[0], set[str]()
    assert source
    with pytest.raises(UserError) as caught:
        ensure(source, "text", tmp_path / "cache", lambda what, done, total: seen.add(what))
    column, damage = caught.value.problems
    assert (column.code, damage.code) == ("data.no_text_field", "data.damaged")
    assert column.what.startswith("corpus/1.parquet") and "corpus/2" not in column.what
    assert damage.what.startswith("corpus/2.parquet")
    assert "corpus/3.parquet" in damage.what and "corpus/4.PARQUET" in damage.what
    assert not seen


def test_a_wrong_column_of_many_files_is_one_problem(write: Write, home: Path) -> None:
    put(write, home, "0.parquet", ["x"], field="body")
    files = [Path(f"{number}.parquet") for number in range(30)]
    for file in files[1:]:
        write(file.name, (home / "0.parquet").read_bytes())
    (problem,) = parquet_file.check(files, "text")
    assert (problem.code, problem.fixes) == ("data.no_text_field", ["--text_field=body"])
    rest = len(files) - 1 - parquet_file.SHOWN
    assert problem.what.count(".parquet") + rest == 30 and f" {rest} " in problem.what


def test_text_columns_are_suggested(write: Write, home: Path) -> None:
    put(write, home, "a.parquet", ["x"], field="my body")
    problem = refused("a.parquet")
    assert problem.what == "a.parquet: no column 'text'; its columns: id (int64), my body (string)"
    assert problem.fixes == ["--text_field='my body'"]
    assert [p.content for p in pieces("a.parquet", "my body")] == [b"x"]
    assert "column 'id' has type int64, not text" in refused("a.parquet", "id").what


def test_a_row_without_text_is_named(write: Write, home: Path) -> None:
    put(write, home, "a.parquet", ["x", None, "y"])  # type: ignore[list-item]
    assert refused("a.parquet").what == "a.parquet: row 2: no text in column 'text'"


def test_invalid_text_in_a_row_is_named(home: Path) -> None:
    """Readers of other languages do not check it. The file is intact, so another copy would not help."""
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    texts = [b"one", b"tw\xff", b"three"]
    buffers = arrow.array(texts, arrow.binary()).buffers()
    column = arrow.StringArray.from_buffers(3, buffers[1], buffers[2])
    parquet.write_table(arrow.table({"text": column}), home / "a.parquet")
    problem = refused("a.parquet")
    assert (problem.code, problem.fixes) == ("data.encoding_damaged", [])
    assert problem.what == "a.parquet: row 2: the text in 'text' is not UTF-8"


@each("nested", [False, True])
def test_rows_are_read_by_size(nested: bool, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those of the text column count, whatever precedes it."""
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    columns = {"text": ["x" * 1000 + str(n) for n in range(100)]}
    first = [{"a": "y" * 9000, "b": n} for n in range(100)] if nested else list(range(100))
    parquet.write_table(
        arrow.table({"first": first} | columns), home / "a.parquet", use_dictionary=False
    )
    read: list[int] = []
    batches = parquet.ParquetFile.iter_batches
    monkeypatch.setattr(
        parquet.ParquetFile,
        "iter_batches",
        lambda table, rows, **more: read.append(rows) or batches(table, rows, **more),
    )
    assert [p.content.decode() for p in pieces("a.parquet")] == columns["text"]
    monkeypatch.setattr(parquet_file, "READ_BYTES", 10_500)
    assert [p.content.decode() for p in pieces("a.parquet")] == columns["text"]
    assert read == [parquet_file.ROWS, 10]


def test_lack_of_memory_is_not_damage(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyarrow's error for it is both."""
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": ["x"]}), home / "a.parquet")

    def fails(*args: object, **more: object) -> None:
        raise arrow.ArrowMemoryError("malloc of size 4294967296 failed")

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", fails)
    with pytest.raises(MemoryError):
        pieces("a.parquet")


def test_a_line_that_is_too_long(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MAX_LINE", 100)
    assert (
        refused(write("a.jsonl", '{"text": "a"}\n{"text": "' + "x" * 100 + '"}')).what
        == "a.jsonl:2: line longer than 100 bytes"
    )


MEMORY = """
import resource, sys
from pathlib import Path
from training.data import corpus, prepare
import numpy
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
prepare.ensure(corpus.find(sys.argv[1])[0], "text", Path(sys.argv[2]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize(
    "name",
    [
        "a.txt",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("a.jsonl.gz", "a.txt.zst")),
    ],
)
def test_memory_does_not_grow_with_the_text(
    name: str, write: Write, home: Path, tmp_path: Path
) -> None:
    line = b'{"text": "' + b"some words " * 80 + b'"}\n'
    write(name, squeeze(name, line * 70_000))  # 62 MB
    done = python("-c", MEMORY, str(home / name), str(tmp_path / "cache"))
    assert int(done.stdout) < 24_000, done.stderr  # KiB


# ── optional packages
# ────────────────────────────────────────────────────────────────────────────────────────────────


def test_missing_packages_are_one_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional_deps.importlib.util, "find_spec", lambda name: None)
    files = [Path("a.txt"), Path("b.parquet"), Path("c.parquet"), Path("d.jsonl.zst")]
    (problem,) = optional_deps.missing(files, "bpe")
    for message in (
        "b.parquet needs pyarrow",
        "d.jsonl.zst needs zstandard",
        "--tokenizer=bpe needs tokenizers",
    ):
        assert message in problem.what
    assert "c.parquet" not in problem.what
    assert problem.fixes == ["make extras"]
    monkeypatch.setattr(optional_deps.packages.sys, "prefix", "/an/environment/of/mine")
    (problem,) = optional_deps.missing(files, "bpe")
    assert problem.fixes[0] == f"{shlex.join(packages.installer())} tokenizers pyarrow zstandard"
    assert problem.fixes[1].startswith("make extras ")
    monkeypatch.setattr(optional_deps.packages, "INSTALLED", True)
    assert len(optional_deps.missing(files, "bpe")[0].fixes) == 1, (
        "an installed package has no Makefile"
    )
    assert "x.tiktoken needs tiktoken" in optional_deps.missing([], "x.tiktoken")[0].what
    assert (
        "t/tokenizer.json needs tokenizers" in optional_deps.missing([], "t/tokenizer.json")[0].what
    )
    assert optional_deps.missing([Path("a.txt"), Path("b.jsonl.gz")], "bytes") == []


def test_nothing_is_missing_and_nothing_is_imported() -> None:
    code = (
        "import sys; from pathlib import Path; from training.data import optional_deps;"
        "print(optional_deps.missing([Path('a.parquet'), Path('a.txt.zst')], 'bpe'), "
        "optional_deps.missing([], 'a.tiktoken'),"
        "[m for m in ('pyarrow', 'zstandard', 'tokenizers', 'tiktoken', 'numpy') if m in "
        "sys.modules])"
    )
    assert python("-c", code).stdout == "[] [] []\n"


def test_nothing_is_reported_missing_before_the_installation(write: Write, home: Path) -> None:
    write("a.parquet", "x")
    code = (
        "import sys; from training.cli import check_request; sys.argv[1:] = "
        "['train_dual_gpu_enhanced.sh', '--data=a.parquet'];"
        "print(check_request.main())"
    )
    assert python("-S", "-c", code, cwd=home).stdout == "0\n"


def test_a_frame_with_a_large_window(write: Write) -> None:
    """As written by `zstd --long=28`."""
    zstandard = import_module("zstandard")
    parameters = zstandard.ZstdCompressionParameters(window_log=28)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    write("a.txt.zst", packer.compress(b"one two") + packer.flush())
    assert b"".join(p.content for p in pieces("a.txt.zst")) == b"one two"
