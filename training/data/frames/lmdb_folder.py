"""Frames packed as LMDB in the layout of BasicSR and KAIR: NAME.lmdb/ contains data.mdb, lock.mdb
and meta_info.txt with a line "CLIP/FRAME.png (h,w,c) level" for each frame. The key is CLIP/FRAME,
the value the bytes of a picture. A frame's address is NAME.lmdb:CLIP/FRAME.png.

Importing this does not load lmdb. Databases are opened read-only, without lock files and
read-ahead, once in each process: an environment must not be used after a fork.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from training.core import find_run
from training.core.messages import msg
from training.core.units import plural

if TYPE_CHECKING:
    import lmdb

SUFFIX, DATA, META = ".lmdb", "data.mdb", "meta_info.txt"
MARK = f"{SUFFIX}:"
SIZE = re.compile(r"\s*(\d{1,9})\s*,\s*(\d{1,9})\s*,")  # height, width
Meta = tuple[dict[str, dict[str, str]], dict[str, tuple[int, int]]]
_environments: dict[str, lmdb.Environment] = {}  # real path → environment of this process
_lock = threading.Lock()


def is_packed(root: Path) -> bool:
    return root.suffix == SUFFIX


def lacking(root: Path) -> list[str]:
    """Names of missing files."""
    return [name for name in (DATA, META) if not find_run.is_file(root / name)]


def clips(root: Path) -> dict[str, dict[str, str]]:
    """Clip → name of a frame → its address, as listed in meta_info.txt. Raises OSError; ValueError
    for a line in another format."""
    return _meta(root)[0]


def sizes(root: Path) -> dict[str, tuple[int, int]]:
    """Address → (width, height), as far as meta_info.txt has them. Raises as clips() does."""
    return _meta(root)[1]


def _meta(root: Path) -> Meta:
    return _listed(str(root), (root / META).stat().st_mtime_ns)


@functools.lru_cache(8)
def _listed(root: str, changed: int) -> Meta:
    found: dict[str, dict[str, str]] = {}
    of: dict[str, tuple[int, int]] = {}
    text = Path(root, META).read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(), 1):
        name, bracket, size = line.rpartition(" (")  # a clip may be called "clip (1)"
        if not line.strip():
            continue
        if not bracket or not name.strip():
            raise ValueError(msg("data.frames.meta_line", number=number, line=line[:80]))
        clip, _, frame = name.strip().rpartition("/")
        address = found.setdefault(clip, {})[Path(frame).stem] = f"{root}:{name.strip()}"
        if numbers := SIZE.match(size):
            of[address] = int(numbers[2]), int(numbers[1])
    return found, of


def picture(address: str) -> bytes | None:
    """The picture at this address; None if the key is missing. Raises OSError."""
    with _value(address) as found:
        return None if found is None else bytes(found)


def length(address: str) -> int | None:
    """Bytes of the picture at this address, which is not read; None if the key is missing. Raises
    OSError."""
    with _value(address) as found:
        return None if found is None else len(found)


@contextmanager
def _value(address: str) -> Iterator[memoryview | None]:
    """The mapped picture. Raises OSError."""
    import lmdb

    root, key = _split(address)
    try:
        with _environment(root).begin(buffers=True) as reading:
            yield reading.get(key.encode())
    except lmdb.Error as error:
        raise OSError(None, str(error)) from None


def damage(root: Path) -> str:
    """What is wrong with the database, or "". Reads the keys, not the pictures."""
    import lmdb

    try:
        wanted = {_split(address)[1] for clip in clips(root).values() for address in clip.values()}
        environment = _environment(str(root))
        size = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
        there = (root / DATA).stat().st_size
        if there < size:  # reading beyond its end would kill the process
            return msg("data.frames.lmdb_cut", there=there, size=size)
        with environment.begin() as reading:
            keys = reading.cursor().iternext(values=False)
            absent = wanted - {key.decode("utf-8", "replace") for key in keys}
    except (lmdb.Error, OSError, ValueError) as error:
        return str(error)
    if not absent:
        return ""
    return msg("data.frames.lmdb_keys", keys=plural(len(absent), "key"), first=min(absent))


def _split(address: str) -> tuple[str, str]:
    """Root and key."""
    root, _, name = address.partition(MARK)
    folder, slash, frame = name.rpartition("/")
    return root + SUFFIX, folder + slash + Path(frame).stem


def _environment(root: str) -> lmdb.Environment:
    """Raises lmdb.Error."""
    import lmdb

    place = os.path.realpath(root)  # lmdb refuses to open the same file twice
    with _lock:
        if place not in _environments:
            _environments[place] = lmdb.open(
                place, readonly=True, create=False, lock=False, readahead=False, meminit=False
            )
        return _environments[place]


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    for environment in _environments.values():
        environment.close()
    _environments.clear()


os.register_at_fork(after_in_child=_after_fork)
