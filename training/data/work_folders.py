"""The folders in which shards are prepared, before they get their name. Killed runs leave them:
one of this machine is removed once its lock is free, and any that was not touched for a day, since
its machine may be gone (containers)."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from training.core import file_lock, log, mounts, umask, units
from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg
from training.data.corpus import CorpusSource
from training.data.tokenizer_base import BYTES

END = ".work"  # of their names
CORPUS = r".+-[0-9a-f]{12}"  # the name of a folder of shards (prepare.folder_of)
# Text of a file by its size: lines of JSON may have other fields, and characters as escapes.
LEAST_TEXT = {".txt": 1.0, ".jsonl": 1 / 32}
MOST_PER_TOKEN, TOKEN_BYTES = 16, 2  # bytes of text, in the mean of a corpus, and of a token
PLAIN = ("ext2", "ext3", "ext4", "xfs", "tmpfs")  # file systems that store what is written
TOUCH_S, ABANDONED_S = 60.0, 86400.0


def create(cache: Path, name: str, *, locked: bool) -> Path:
    """A new one. Without locks another run may prepare the same, and with those that count on one
    machine only (BeeGFS, NFS with nolock) another machine. A fixed name for each machine if
    `locked`, since leftovers of a killed run are removed."""
    if locked:
        work = cache / f".{name}.{socket.gethostname()}{END}"
        shutil.rmtree(work, ignore_errors=True)
        with suppress(FileExistsError):  # another user's, whose files may not be removed
            work.mkdir()
            return work
    work = Path(tempfile.mkdtemp(dir=cache, prefix=f".{name}.", suffix=END))
    umask.use(work)
    return work


def check_room(cache: Path, source: CorpusSource, chosen: str) -> None:
    """Raises UserError if the tokens cannot fit: a full disk ends the preparation after hours. Only
    a warning where the disk may compress them: every second byte of the tokenizer `bytes` is 0."""
    needed, free = least_bytes(source, chosen), shutil.disk_usage(cache).free
    if free >= needed:
        return
    what = msg(
        "data.prepare.no_room",
        name=source.name,
        cache=cache,
        needed=units.size(needed),
        free=units.size(free),
    )
    if mounts.file_system(cache) not in PLAIN:
        log.warning(msg("data.prepare.unless_compressed", what=what))
        return
    allowed = msg("data.prepare.more_room")
    fixes = [f"df -h {shlex.quote(str(cache))}"]
    raise UserError(Problem("data.no_room", what, allowed, fixes), Exit.RESOURCES)


def least_bytes(source: CorpusSource, chosen: str) -> int:
    """Bytes that the tokens need at least; 0 where the size of the text is unknown."""
    if source.encoding:
        return 0
    text = sum(f.stat().st_size * LEAST_TEXT.get(f.suffix.lower(), 0) for f in source.files)
    return int(text / (1 if chosen == BYTES else MOST_PER_TOKEN) * TOKEN_BYTES)


def lock(cache: Path, name: str) -> Path:
    """Held while the folder of this name is prepared."""
    return cache / f".{name}.lock"


def remove_abandoned(cache: Path) -> None:
    own = f".{socket.gethostname()}{END}"
    for work in cache.glob(f".*{END}"):
        with suppress(OSError):
            if time.time() - work.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(work)
                continue
            name = work.name.removeprefix(".").removesuffix(own)
            # The end alone may be that of another machine: `hpc` and `c01.hpc`.
            if work.name.endswith(own) and re.fullmatch(CORPUS, name, re.DOTALL):
                with file_lock.alone(lock(cache, name), _in_use) as locked:
                    if locked:
                        shutil.rmtree(work)


def _in_use() -> None:
    raise BlockingIOError


def touching(
    work: Path, progress: Callable[[str, int, int], None]
) -> Callable[[str, int, int], None]:
    """`progress`, which also shows that the folder is in use."""
    touched = time.time()

    def shown(what: str, done: int, total: int) -> None:
        nonlocal touched
        if abs(time.time() - touched) >= TOUCH_S:  # the clock may be set back
            touched = time.time()
            with suppress(OSError):
                os.utime(work)
        progress(what, done, total)

    return shown
