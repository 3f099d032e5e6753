"""A Zstandard file as a stream."""

from __future__ import annotations

import io
from importlib import import_module
from typing import Any, BinaryIO

from training.core.messages import msg


class Damaged(Exception):
    """A compressed file that ends too early or does not have the format of its suffix."""


class Decompressed(io.RawIOBase):
    """Zstandard stream that rejects a truncated file; the library's own reader accepts one."""

    INPUT = 1 << 14  # small, since it may expand a thousandfold

    def __init__(self, raw: BinaryIO) -> None:
        self.zstandard: Any = import_module("zstandard")
        self.raw = raw
        self.frame: Any = None
        self.ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.ready:
            block = self.frame.unused_data if self.frame and self.frame.eof else b""
            block = block or self.raw.read(self.INPUT)
            if not block:
                if self.frame and not self.frame.eof:
                    raise Damaged(msg("data.reader.too_early"))
                return 0
            if self.frame is None or self.frame.eof:
                # also frames of `zstd --long=31`
                reader = self.zstandard.ZstdDecompressor(max_window_size=1 << 31)
                self.frame = reader.decompressobj()
            try:
                self.ready = memoryview(self.frame.decompress(block))
            except self.zstandard.ZstdError as error:
                raise Damaged(str(error)) from None
        count = min(len(buffer), len(self.ready))
        buffer[:count] = self.ready[:count]
        self.ready = self.ready[count:]
        return count
