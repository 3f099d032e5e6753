"""Encoding of text: UTF-8 is verified; any other is guessed from the bytes and only suggested to
the user.

The guess decodes the bytes with each candidate and counts the characters typical of its language:
a wrong candidate gives rare characters, and the message shows a sample so that the user can check.
"""

from __future__ import annotations

import codecs
import io
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from training.core.errors import Problem
from training.core.messages import msg

UTF8 = "utf-8"
ALLOWED = msg("data.encoding.allowed")
SAMPLE = 1 << 16  # bytes examined by a guess
SHOWN = 5  # files named in a message
CONTEXT = 24  # characters of text quoted in a message
CONTROLS = bytes(range(9))
DAMAGED = 0.1  # share of broken non-ASCII characters below which text counts as UTF-8

_HAN = (
    "的一是不了在人有我他中大上到就出会可也你生能而子那得下自之年"
    "作里用道行所然家事成方多去法如都同看天好小心本前只想日意它明三文"
)
_HANS = (
    _HAN + "这个们来为国说时要对于着过发后种经么学现当没动面起定分还进部"
    "其些主样理她开但因从实军者无力与长把机十民第此已工使情性知"
)
_HANT = (
    _HAN + "這個們來為國說時要對於著過發後種經麼學現當沒動面起定分還進部"
    "其些主樣理她開但因從實軍者無力與長把機十民第此已工使情性知"
)
_KANA = "".join(map(chr, range(0x3041, 0x30FF)))
_HANGUL = (
    "이다는의에을가은를고하기지로사도한자어리시대인스일과나아그해"
    "으서정수보부제전만라있것없었여니게면장성때우원"
)
_CYRILLIC = "".join(map(chr, range(ord("а"), ord("я") + 1))) + "ё"
_PUNCTUATION = "‘’“”„–—…€°§«» "
_WEST = "äöüßéèêëàáâãåæçñíìîïóòôõøœúùûýÄÖÜÉÈÀÁÇÑÓÅØ¿¡£" + _PUNCTUATION
_CENTRAL = "ąćęłńóśźżčďěňřšťůžáéíýőűăâîșțĄĆĘŁŃŚŹŻČŘŠŽ" + _PUNCTUATION
_UTF16 = _HANS + _HANT + _KANA + _HANGUL + _CYRILLIC + _WEST


@dataclass(frozen=True)
class Candidate:
    """An encoding to guess. `share`: of the non-ASCII characters, those in `typical` for text in
    this encoding; `chance`: the same for other bytes; `latin`: whether ASCII letters surround
    them."""

    codec: str
    typical: frozenset[str]
    share: float
    chance: float
    latin: bool | None = None


CANDIDATES = (
    Candidate("gbk", frozenset(_HANS), 0.5, 0.02),
    Candidate("gb18030", frozenset(_HANS), 0.5, 0.02),
    Candidate("big5", frozenset(_HANT), 0.5, 0.02),
    Candidate("shift_jis", frozenset(_KANA), 0.5, 0.05),
    Candidate("euc-jp", frozenset(_KANA), 0.5, 0.05),
    Candidate("cp949", frozenset(_HANGUL), 0.4, 0.01),
    Candidate("cp1251", frozenset(_CYRILLIC), 0.9, 0.26, False),
    Candidate("koi8-r", frozenset(_CYRILLIC), 0.9, 0.26, False),
    Candidate("latin-1", frozenset(_WEST), 0.95, 0.5, True),
    Candidate("cp1252", frozenset(_WEST), 0.95, 0.5, True),
    Candidate("cp1250", frozenset(_CENTRAL), 0.95, 0.5, True),
    *(Candidate(f"utf-16-{order}", frozenset(_UTF16), 0.5, 0.01) for order in ("le", "be")),
)
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def check(name: str, origin: str) -> list[Problem]:
    """Problems of a value of --encoding. `origin`: where it was set."""
    try:
        # rejects codecs that bytes.decode() does not accept: base64, rot13
        fine = codecs.lookup(name)._is_text_encoding
    except LookupError:
        fine = False
    return (
        []
        if fine
        else [
            Problem(
                "data.encoding_name",
                msg("data.encoding.given", name=name, origin=origin),
                ALLOWED,
                ["--encoding=gbk", "--encoding=latin-1"],
            )
        ]
    )


def python_name(name: str) -> str:
    """Python's name of an encoding: "gbk" of GBK and of cp936."""
    return codecs.lookup(name).name


def is_plain(name: str) -> bool:
    """Whether this value of --encoding allows UTF-8 only."""
    return python_name(name) == UTF8


def is_utf8(text: bytes) -> bool:
    """Whether `text` is UTF-8. Control characters rule out UTF-16 that would also be valid."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return not _zeros(text)


def _zeros(text: bytes) -> str:
    """The UTF-16 codec of ASCII text or of one other alphabet: every other byte is zero, or one
    that text does not contain."""
    if len(text) < 4 or len(text.translate(None, CONTROLS)) == len(text):
        return ""
    many, few = len(text) // 2 * 0.5, len(text) // 2 * 0.02
    for code in CONTROLS:
        even, odd = text[::2].count(code), text[1::2].count(code)
        if max(even, odd) > many and min(even, odd) <= few:
            return "utf-16-le" if odd > even else "utf-16-be"
    return ""


def guess(text: bytes) -> str:
    """The codec of text that is not UTF-8; UTF8 if only some bytes are damaged; "" if no
    candidate fits."""
    if found := next((name for mark, name in _MARKS if text.startswith(mark)), "") or _zeros(
        text[: SAMPLE * 4]
    ):
        return found
    sample = _interesting(text)
    decoded = sample.decode(UTF8, "replace")
    broken = decoded.count("\ufffd")
    if broken <= DAMAGED * sum(c > "\x7f" for c in decoded):
        return UTF8
    scores = {one.codec: _score(sample, one) for one in CANDIDATES}
    best = max(scores, key=lambda name: scores[name])
    return best if scores[best] > 0 else ""


def _interesting(text: bytes) -> bytes:
    """A part from the start of the line with the first non-ASCII byte, at an even offset."""
    first = next((at for at, byte in enumerate(text) if byte > 0x7F), 0)
    begin = (text.rfind(b"\n", 0, first) + 1) & ~1
    return text[begin : begin + SAMPLE]


def _score(sample: bytes, of: Candidate) -> float:
    """Log-likelihood ratio of these characters: in this encoding against chance."""
    try:
        # the last character may be incomplete
        decoded = codecs.getincrementaldecoder(of.codec)().decode(sample)
    except UnicodeDecodeError:
        return -math.inf
    hits = misses = 0
    around = f" {decoded} "
    for at, c in enumerate(decoded, 1):
        if c <= "\x7f":
            misses += c < "\t"
            continue
        fits = c in of.typical
        if fits and of.latin is not None and c.isalpha():
            beside = [o for o in (around[at - 1], around[at + 1]) if o.isalpha()]
            fits = (
                any(o.isascii() or o in of.typical for o in beside)
                if of.latin
                else not any(map(str.isascii, beside))
            )
        hits, misses = hits + fits, misses + (not fits)
    return hits * math.log(of.share / of.chance) + misses * math.log(
        (1 - of.share) / (1 - of.chance)
    )


@dataclass
class NotUtf8(Exception):
    """`text`: a part of the file with the first bytes that are not UTF-8; `where`: the file,
    possibly with a line; `before`, `lines`: bytes and lines before `text`."""

    file: Path
    where: str
    text: bytes
    before: int = 0
    lines: int = 0

    def place(self) -> str:
        """Line and offset of the first wrong byte."""
        try:
            self.text.decode()
            at = 0  # UTF-16
        except UnicodeDecodeError as error:
            at = error.start
        line = self.lines + self.text.count(b"\n", 0, at) + 1
        return msg("data.encoding.place", file=self.file, line=line, byte=self.before + at)


def problems(found: Sequence[NotUtf8]) -> list[Problem]:
    """One problem per detected encoding, with its files."""
    groups: dict[str, list[NotUtf8]] = {}
    for one in found:
        groups.setdefault(guess(one.text), []).append(one)
    return [_problem(name, ones) for name, ones in groups.items()]


def _problem(name: str, found: Sequence[NotUtf8]) -> Problem:
    places = [one.place() if name in ("", UTF8) else one.where for one in found[:SHOWN]]
    shown = ", ".join(places) + (
        msg("data.reader.and_more", count=len(found) - SHOWN) if len(found) > SHOWN else ""
    )
    what = msg("data.encoding.not_utf8", shown=shown)
    files = [one.file for one in found[:SHOWN]]
    if not name:
        return Problem(
            "data.encoding",
            msg("data.encoding.unknown", what=what),
            msg("data.encoding.utf8_or_named"),
            [f"file {shlex.quote(str(files[0]))}"],
        )
    if name == UTF8:
        return Problem(
            "data.encoding_damaged",
            msg("data.encoding.damaged", what=what),
            "UTF-8",
            [_converted(UTF8, files, drop=True) + msg("data.encoding.drops")],
        )
    what = msg(
        "data.encoding.looks_like", what=what, name=name, excerpt=_excerpt(found[0].text, name)
    )
    return Problem(
        "data.encoding",
        what,
        msg("data.encoding.utf8_or_named"),
        [f"--encoding={name}", _converted(name, files)],
    )


def _excerpt(text: bytes, name: str) -> str:
    """Decoded text around the first non-ASCII character."""
    part = text if name.startswith(("utf-16", "utf-32")) else _interesting(text)
    decoded = part[: SAMPLE // 16 * 4].decode(name, "replace").lstrip("\ufeff")
    at = next((at for at, c in enumerate(decoded) if c > "\x7f"), 0)
    return " ".join(decoded[max(0, at - CONTEXT // 3) :].split())[:CONTEXT]


def _converted(name: str, files: Sequence[Path], *, drop: bool = False) -> str:
    """The command that converts the files to UTF-8 in place."""
    known = name.upper().replace("-LE", "LE").replace("-BE", "BE")
    names = [shlex.quote(str(file)) for file in files]
    tool = {".gz": ("gzip -dc", "| gzip "), ".zst": ("zstd -dc", "| zstd ")}.get(
        files[0].suffix.lower()
    )
    convert = f"iconv {'-c ' if drop else ''}-f {known} -t UTF-8"
    one = '"$f"' if len(names) > 1 else names[0]
    target = '"$f.utf8"' if len(names) > 1 else shlex.quote(f"{files[0]}.utf8")
    step = (
        f"{tool[0]} {one} | {convert} {tool[1]}> {target}"
        if tool
        else f"{convert} {one} > {target}"
    )
    step += f" && mv {target} {one}"
    return f"for f in {' '.join(names)}; do {step}; done" if len(names) > 1 else step


class Decoded(io.RawIOBase):
    """A file in some encoding, read as UTF-8. Reading raises UnicodeDecodeError."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file, self._name = file, name
        self._decoder = codecs.getincrementaldecoder(name)()
        self._begun, self._ready = False, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            block = self._file.read(len(buffer))
            try:
                text = self._decoder.decode(block, not block)
            except UnicodeError as error:  # as of utf-16 without a byte-order mark
                raise UnicodeDecodeError(self._name, block, 0, len(block), str(error)) from None
            if text and not self._begun:
                self._begun, text = True, text.removeprefix("\ufeff")
            self._ready = memoryview(text.encode("utf-8", "replace"))
            if not block:
                break
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count
