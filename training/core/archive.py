"""A run in one file, as `./duet archive` writes it: a tar file, compressed by gzip or Zstandard.

Its first member lists size and SHA-256 of all others. Checkpoints come last, so that a reader of
everything else can stop before them. Opening a file unpacks it, without the states of checkpoints,
into a cache folder; every command that reads runs then takes it for a run directory.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import importlib.util
import io
import json
import os
import shlex
import shutil
import stat
import tarfile
import tempfile
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from training.core import rundir, units
from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg
from training.core.rundir import GZIP, ZSTANDARD, RunDir

if TYPE_CHECKING:
    from training.core.contracts.run_files import ArchiveIndex

INDEX = "duet-archive.json"
VERSION = 1
STATE = "state.pt"  # weights: not unpacked
CHUNK = 1 << 20
LARGEST_INDEX = 1 << 25  # bytes; they are parsed in memory, as is a header
LARGEST_HEADER = 1 << 20
KEPT_FREE = 1 << 28  # bytes of the cache's disk
ABANDONED_S = 24 * 3600.0  # what was unpacked by a process that was killed
UNPACKING = ".unpacking-"


class Unsafe(Exception):
    """A member outside of the run directory, or not a plain file."""


class _Member(tarfile.TarInfo):
    """Refuses headers that tarfile would read into memory whatever their size."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        found = super().frombuf(buf, encoding, errors)
        large = not found.isreg() and found.size > LARGEST_HEADER
        if large or found.type == tarfile.GNUTYPE_SPARSE:
            raise Unsafe(found.name)
        return found


def has_zstandard() -> bool:
    return importlib.util.find_spec("zstandard") is not None


@contextlib.contextmanager
def compressed(path: Path, file: IO[bytes]) -> Iterator[IO[bytes]]:
    """A writer into `file`, compressed by the suffix of `path`."""
    if path.name.endswith(ZSTANDARD):
        zstandard = importlib.import_module("zstandard")
        with zstandard.ZstdCompressor(level=3).stream_writer(file, closefd=False) as writer:
            yield writer
        return
    # level 1: weights hardly shrink at any level
    with gzip.GzipFile("", "wb", 1, file, mtime=0) as writer:
        yield writer  # type: ignore[misc]


@contextlib.contextmanager
def _members(path: Path) -> Iterator[tarfile.TarFile]:
    with path.open("rb") as file:
        if path.name.endswith(ZSTANDARD):
            zstandard = importlib.import_module("zstandard")
            with (
                zstandard.ZstdDecompressor().stream_reader(file) as reader,
                tarfile.open(fileobj=reader, mode="r|", tarinfo=_Member) as tar,
            ):
                yield tar
        else:
            with tarfile.open(fileobj=file, mode="r|gz", tarinfo=_Member) as tar:
                yield tar


def opened(path: Path) -> RunDir:
    """The run in an archive, unpacked into the cache unless it is there. Raises UserError for a
    damaged, unsafe or foreign file."""
    path = path.absolute()
    with _explained(path):
        found = path.stat()
        key = f"{path}\0{found.st_size}\0{found.st_mtime_ns}\0{found.st_ino}"
        place = _cache() / hashlib.sha256(os.fsencode(key)).hexdigest()[:16]
        if known := _unpacked(place):
            return known
        return _unpack(path, place)


def checked(path: Path) -> ArchiveIndex:
    """As verify(), for a file of the user. Raises UserError."""
    with _explained(path):
        return verify(path)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Raises UserError for what is wrong with this archive."""
    if path.name.endswith(ZSTANDARD) and not has_zstandard():
        what = msg("core.archive.no_zstandard", path=path)
        fix = f"zstd -dc {shlex.quote(str(path))} | gzip > RUN{GZIP}"
        raise UserError(Problem("archive.zstandard", what, "", [fix]), Exit.RESOURCES)
    try:
        yield
    except Unsafe as error:
        what = msg("core.archive.unsafe", path=path, member=_shown(error))
        raise UserError(Problem("archive.unsafe", what, msg("core.archive.safe"))) from None
    except OSError as error:
        text = str(error.strerror or error)
        if text == "empty file" and path.stat().st_size:  # so tarfile calls an incomplete block
            text = msg("core.archive.cut_off")
        what = msg("core.archive.unreadable", path=path, error=_shown(text))
        raise UserError(Problem("archive.damaged", what, msg("core.archive.intact"))) from None


def _shown(text: object) -> str:
    """Without control characters: names in a foreign file must not reach the terminal as they
    are."""
    return "".join(c if c.isprintable() else "?" for c in str(text))


def verify(path: Path, everything: bool = True) -> ArchiveIndex:
    """Read an archive and compare all checksums. Raises OSError, Unsafe."""
    return _read(path, None, everything=everything)


def _cache() -> Path:
    """A folder that no other user can write to: its contents are trusted. Raises OSError."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    for own in (Path(home) / "duet", Path(tempfile.gettempdir()) / f"duet-{os.getuid()}"):
        folder = own / "archives"
        if not own.is_absolute():  # `~` of a user without a home
            continue
        try:
            own.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.mkdir(exist_ok=True, mode=0o700)
            facts = [own.lstat(), folder.lstat()]
        except OSError:
            continue
        private = all(f.st_uid == os.getuid() and not f.st_mode & stat.S_IWOTH for f in facts)
        if private and os.access(folder, os.W_OK):
            return folder
    raise OSError(msg("core.archive.no_cache", folder=home))


def _unpacked(place: Path) -> RunDir | None:
    """The complete run in a cache folder."""
    try:
        runs = [folder for folder in place.iterdir() if RunDir(folder).archived.is_file()]
    except OSError:
        return None
    return RunDir(runs[0]) if len(runs) == 1 else None


def _unpack(path: Path, place: Path) -> RunDir:
    for old in place.parent.glob(f"{UNPACKING}*"):
        if not rundir.written_since(old, time.time() - ABANDONED_S):
            shutil.rmtree(old, ignore_errors=True)
    work = Path(tempfile.mkdtemp(dir=place.parent, prefix=UNPACKING))
    try:
        index = _read(path, work, everything=False)
        run = RunDir(work / index["name"])
        rundir.write_json(run.archived, {**index, "files": {}, "file": str(path)})
        try:
            work.rename(place)
        except OSError:  # another process was first
            shutil.rmtree(place, ignore_errors=True) if not _unpacked(place) else None
            if not place.exists():
                work.rename(place)
        return RunDir(place / index["name"])
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _read(path: Path, into: Path | None, *, everything: bool) -> ArchiveIndex:
    """Read and verify an archive; unpack it below `into`, without the states of checkpoints.
    `everything`: also read the members that are not unpacked. Raises OSError, Unsafe."""
    try:
        with _members(path) as tar:
            index = _index(tar)
            left = {
                name for name in index["files"] if everything or name.rpartition("/")[2] != STATE
            }
            if into:
                _fits(sum(index["files"][name]["bytes"] for name in left), into)
            while left:
                member = tar.next()
                if member is None:
                    raise OSError(msg("core.archive.lacks", name=min(left)))
                _one(tar, member, index, into)
                left.discard(member.name)
            return index
    except (OSError, Unsafe):
        raise
    except Exception as error:  # whatever the parsers raise for unchecked bytes
        raise OSError(str(error) or type(error).__name__) from None


def _fits(needed: int, folder: Path) -> None:
    """Raises OSError before a file of any size fills the disk."""
    free = max(0, shutil.disk_usage(folder).free - KEPT_FREE)
    if needed > free:
        needs, has = units.size(needed), units.size(free)
        raise OSError(msg("core.archive.space", needed=needs, free=has, folder=folder.parent))


def _index(tar: tarfile.TarFile) -> ArchiveIndex:
    """The first member. Raises OSError, Unsafe."""
    first = tar.next()
    file = tar.extractfile(first) if first and first.name == INDEX and first.isreg() else None
    if first is None or file is None or first.size > LARGEST_INDEX:
        raise OSError(msg("core.archive.foreign"))
    try:
        index: Any = json.loads(file.read())
        version, name, files = index["version"], index["name"], index["files"]
        known = isinstance(version, int) and bool(os.fsencode(name))
        known = known and all(f["bytes"] >= 0 and f["sha256"] for f in files.values())
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        known = False
    if not known:
        raise OSError(msg("core.archive.foreign"))
    if version > VERSION:
        raise OSError(msg("core.archive.later", version=version, readable=VERSION))
    # a name with control characters would reach the terminal wherever the run is shown
    if not _is_plain(name) or "/" in name or any(unicodedata.category(c) == "Cc" for c in name):
        raise Unsafe(name)
    found: ArchiveIndex = index
    return found


def _is_plain(part: str) -> bool:
    return part not in ("", ".", "..") and "\0" not in part


def _one(
    tar: tarfile.TarFile, member: tarfile.TarInfo, index: ArchiveIndex, into: Path | None
) -> None:
    """Verify one member, and unpack it below `into`."""
    parts = member.name.split("/")
    if (
        not member.isreg()
        or member.issparse()
        or parts[0] != index["name"]
        or not all(map(_is_plain, parts))
    ):
        raise Unsafe(member.name)
    listed = index["files"].get(member.name)
    file = tar.extractfile(member)
    if listed is None or file is None or member.size != listed["bytes"]:
        raise OSError(msg("core.archive.differs", name=member.name))
    digest = hashlib.sha256()
    target = into / member.name if into and parts[-1] != STATE else None
    if target:
        target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("xb") if target else io.BytesIO() as out:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            if target:
                out.write(chunk)
    if digest.hexdigest() != listed["sha256"]:
        raise OSError(msg("core.archive.differs", name=member.name))
    if target:  # a summary belongs to the start before its time
        os.utime(target, (member.mtime, member.mtime))
