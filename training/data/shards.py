"""Files of tokens: written in parts of a fixed size and verified before they are read again."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.core.messages import msg
from training.host import env_vars

if TYPE_CHECKING:
    import numpy.typing as npt

CHUNK = 1 << 20
POLL_S = 0.2


def names(part: str, count: int) -> list[str]:
    return [f"{part}_{number:05d}.bin" for number in range(count)]


def sizes(tokens: int, limit: int) -> list[int]:
    """Tokens of each shard: all but the last are full; no shards for zero tokens."""
    return [min(limit, tokens - start) for start in range(0, tokens, limit)]


class Writer:
    """Appends tokens to `<part>_00000.bin`, `<part>_00001.bin`, …, each of at most `limit`
    tokens."""

    def __init__(self, folder: Path, part: str, token_bytes: int, limit: int) -> None:
        self.folder, self.part, self.token_bytes, self.limit = folder, part, token_bytes, limit
        self.tokens = 0
        self._file: Any = None

    @property
    def paths(self) -> list[Path]:
        return [self.folder / name for name in names(self.part, -(-self.tokens // self.limit))]

    def write(self, tokens: npt.NDArray[Any]) -> None:
        while len(tokens):
            room = self.limit - self.tokens % self.limit
            if room == self.limit:
                self.close()
            if self._file is None:
                number = self.tokens // self.limit
                self._file = open(self.folder / f"{self.part}_{number:05d}.bin", "ab", CHUNK)  # noqa: SIM115 – closed by close()
            self._file.write(tokens[:room].data)
            self.tokens += len(tokens[:room])
            tokens = tokens[room:]

    def close(self) -> None:
        """Flush everything to disk; writing may continue."""
        if self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def read(self, start: int = 0) -> Iterator[npt.NDArray[Any]]:
        """The tokens from `start` on, in pieces."""
        import numpy as np

        self.close()
        for number, path in enumerate(self.paths):
            skip = max(0, start - number * self.limit)
            with path.open("rb") as file:
                file.seek(skip * self.token_bytes)
                while chunk := file.read(CHUNK):
                    yield np.frombuffer(chunk, f"<u{self.token_bytes}")

    def truncate(self, tokens: int) -> None:
        """Keep only the first `tokens` tokens."""
        self.close()
        old = self.paths
        self.tokens = tokens
        for path in old[len(self.paths) :]:
            path.unlink()
        if tokens % self.limit:
            os.truncate(self.paths[-1], tokens % self.limit * self.token_bytes)

    def drop(self) -> None:
        """Close without error reports: the content is discarded."""
        if self._file:
            file, self._file = self._file, None
            with contextlib.suppress(OSError):  # a full disk is already reported
                file.close()


def sums(
    paths: list[Path], progress: Callable[[int, int], None] = lambda done, total: None
) -> list[str]:
    """The sha256 of each file, several in parallel, since hashing releases the GIL. Raises
    OSError."""
    total, done, stop = sum(path.stat().st_size for path in paths), [0] * len(paths), False

    def one(number: int) -> str:
        found, buffer = hashlib.sha256(), bytearray(CHUNK)
        view = memoryview(buffer)
        with paths[number].open("rb", 0) as file:
            while (count := file.readinto(buffer)) and not stop:  # type: ignore[attr-defined]
                found.update(view[:count])
                done[number] += count
        return found.hexdigest()

    with ThreadPoolExecutor(max(1, min(8, env_vars.cpu_count(), len(paths)))) as pool:
        try:
            waiting = {pool.submit(one, number): number for number in range(len(paths))}
            left = set(waiting)
            while left:
                left = wait(left, timeout=POLL_S).not_done
                if left:
                    progress(sum(done), total)
        except BaseException:
            stop = True  # Ctrl-C must not wait for gigabytes
            raise
    found = {number: future.result() for future, number in waiting.items()}
    return [found[number] for number in range(len(paths))]


def damage(
    folder: Path, files: Mapping[str, Mapping[str, Any]], progress: Callable[[int, int], None]
) -> str:
    """Problem of the first file that differs from `files` (name → bytes, sha256); "" if all are
    intact. Raises PermissionError."""
    paths = [folder / name for name in files]
    try:
        for path, facts in zip(paths, files.values(), strict=True):
            if (size := path.stat().st_size) != facts["bytes"]:
                return msg("data.shard.size", name=path.name, size=size, expected=facts["bytes"])
        for path, facts, found in zip(paths, files.values(), sums(paths, progress), strict=True):
            if found != facts["sha256"]:
                return msg(
                    "data.shard.sum", name=path.name, found=found[:12], sha256=facts["sha256"][:12]
                )
    except PermissionError:
        raise
    except OSError as error:
        return msg(
            "data.shard.unreadable",
            name=Path(str(error.filename or folder)).name,
            strerror=error.strerror,
        )
    return ""
