"""Text that is not UTF-8 is refused with file and encoding, or decoded with --encoding."""

from __future__ import annotations

import codecs
import gzip
import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from training.core.errors import Exit, Problem, UserError
from training.data import encoding, readers
from training.data.corpus import find
from training.data.prepare import ensure, fingerprint

Write = Callable[..., str]
TEXTS = {
    "gbk": "今天天气很好，我们一起去公园散步。训练模型需要大量的数据。\n",
    "big5": "今天天氣很好，我們一起去公園散步。訓練模型需要大量的資料。\n",
    "shift_jis": "今日は天気がいいので、公園を散歩します。\n",
    "euc-jp": "大規模な言語モデルの学習には、多くのデータが必要です。\n",
    "cp949": "오늘은 날씨가 좋아서 공원을 산책합니다. 많은 데이터가 필요합니다.\n",
    "cp1251": "Сегодня хорошая погода, и мы пойдём гулять в парк.\n",
    "koi8-r": "Для обучения больших моделей нужны данные.\n",
    "latin-1": "Über den Wäldern fällt der Schnee; un été très agréable.\n",
    "cp1252": "It’s a “plain” text — with a café.\n",
    "cp1250": "Zażółć gęślą jaźń. Příliš žluťoučký kůň.\n",
    "utf-16": "café, and plain words\n",
    "utf-16-le": "plain words and nothing else\n",
    "utf-16-be": "Сегодня хорошая погода\n",
    "utf-32": "plain words\n",
}


def texts(data: str, name: str = "") -> list[bytes]:
    source, problem = find(data, "", name)
    assert source, problem
    return [piece.content for piece in readers.documents(source, "text")]


def refused(data: str, name: str = "") -> list[Problem]:
    with pytest.raises(UserError) as caught:
        texts(data, name)
    assert caught.value.code == Exit.CONFIG
    return caught.value.problems


@pytest.mark.parametrize("name", TEXTS)
def test_every_encoding_is_detected_and_decoded(name: str, write: Write) -> None:
    path = write("a.txt", (TEXTS[name] * 3).encode(name))
    (problem,) = refused(path)
    assert problem.what.startswith(
        f"a.txt: not UTF-8, looks like {name} ('{TEXTS[name].split()[0][:3]}"
    )
    assert problem.fixes[0] == f"--encoding={name}" and "a.txt" in problem.fixes[1]
    assert b"".join(texts(path, name)) == (TEXTS[name] * 3).encode()


def test_the_suggested_command_converts_files(write: Write) -> None:
    text = TEXTS["gbk"] * 3
    for path, content in (
        ("my texts/a b.txt", text.encode("gbk")),
        ("my texts/c.txt", text.encode("gbk")),
    ):
        write(path, content)
    (problem,) = refused("my texts")
    assert problem.what.startswith("my texts/a b.txt, my texts/c.txt: not UTF-8")
    subprocess.run(["bash", "-c", problem.fixes[1]], check=True)
    assert texts("my texts") == [text.encode(), text.encode()]
    path = write("z.txt.gz", gzip.compress(text.encode("gbk")))
    subprocess.run(["bash", "-c", refused(path)[0].fixes[1]], check=True)
    assert texts(path) == [text.encode()]


@pytest.mark.parametrize("chosen", ["bytes", "bpe"])
def test_every_tokenizer_rejects_it(chosen: str, write: Write, tmp_path: Path) -> None:
    source, _ = find(write("a.txt", (TEXTS["latin-1"] * 30).encode("latin-1")))
    assert source
    with pytest.raises(UserError, match=r"a\.txt: not UTF-8, looks like latin-1"):
        ensure(source, "text", tmp_path / "cache", chosen=chosen, vocab_size=300)


def test_files_are_reported_by_encoding(write: Write) -> None:
    write("d/a.txt", "plain\n")
    # non-ASCII text not at its beginning
    write("d/b.txt", ("x\n" * 200_000).encode() + TEXTS["gbk"].encode("gbk") * 3)
    write("d/c.TXT", TEXTS["gbk"].encode("gbk") * 3)
    write("d/d.jsonl", b'{"text": "' + TEXTS["latin-1"].strip().encode("latin-1") + b'"}\n')
    write("d/e.txt", "\ufeffmarked\n".encode())
    first, second = refused("d")
    assert first.what.startswith("d/b.txt, d/c.TXT: not UTF-8, looks like gbk")
    assert second.what.startswith("d/d.jsonl: not UTF-8, looks like latin-1")


def test_utf8_files_are_not_decoded(write: Write, tmp_path: Path) -> None:
    """GBK would decode them too, to other characters."""
    write("d/a.txt", TEXTS["gbk"].encode())
    write("d/b.TXT", TEXTS["gbk"].encode("gbk"))
    write("d/c.jsonl", json.dumps({"text": TEXTS["gbk"]}, ensure_ascii=False).encode("gbk"))
    assert texts("d", "gbk") == [TEXTS["gbk"].encode()] * 3
    plain, given = find("d")[0], find("d", "", "gbk")[0]
    assert plain and given and find("d", "", "UTF8")[0] == plain
    assert fingerprint(plain, "text") != fingerprint(given, "text")
    prepared = {n: fingerprint(replace(given, encoding=n), "text") for n in ("GBK", "936", "big5")}
    assert prepared["GBK"] == prepared["936"] == fingerprint(given, "text") != prepared["big5"]


def test_a_wrong_encoding_and_a_damaged_file(write: Write) -> None:
    (problem,) = refused(write("a.txt", TEXTS["gbk"].encode("gbk")), "shift_jis")
    assert problem.what == "a.txt: neither UTF-8 nor shift_jis (--encoding)"
    for name in ("utf-16", "punycode", "undefined"):  # their errors have no position
        (problem,) = refused(write("u.txt", b"\xe9t\xe9\n" * 20), name)
        assert (problem.code, problem.what) == (
            "data.encoding",
            f"u.txt: neither UTF-8 nor {name} (--encoding)",
        )
    (problem,) = refused(write("b.txt", TEXTS["gbk"].encode() * 9 + b"\xff\n"))
    assert "damaged" in problem.what and problem.fixes[0].startswith(
        "iconv -c -f UTF-8 -t UTF-8 b.txt > b.txt.utf8 && mv "
    )
    (problem,) = refused(write("c.jsonl", b'{"text": "fine"}\n{"text": "\xff\xfe\x81"}\n'))
    assert problem.what.startswith("c.jsonl:2: not UTF-8") and problem.allowed


def test_the_first_wrong_byte_is_named(write: Write) -> None:
    text = "zwölf\n".encode()
    many = 100_000  # the text is read in pieces
    for name, content, place in (
        ("a.txt", text * many + b"x\xff" + text, f"a.txt:{many + 1} (byte {7 * many + 1})"),
        ("b.txt", codecs.BOM_UTF8 + text + b"\xff" + text * 20, "b.txt:2 (byte 10)"),
        (
            "c.jsonl",
            b'{"text": "fine"}\n\n{"text": "' + b"\xc3\xb6" * 20 + b'\xff"}',
            "c.jsonl:3 (byte 68)",
        ),
        ("d.txt.gz", gzip.compress(text * 20 + b"\xff"), "d.txt.gz:21 (byte 140)"),
    ):
        (problem,) = refused(write(name, content))
        assert problem.code == "data.encoding_damaged" and problem.what.startswith(place), name


def test_values_that_are_not_an_encoding() -> None:
    for name in ("gbkk", "base64", ""):
        (problem,) = encoding.check(name, "from --encoding on the command line")
        assert (
            problem.what == f"encoding is {name!r} (from --encoding on the command line)"
            and problem.fixes
        )
    assert encoding.check("GBK", "") == encoding.check("latin1", "") == []
