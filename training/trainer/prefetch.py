"""Batches on a GPU before they are needed: the next one is copied on a stream of its own while the
GPU works on the current one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


def ahead(
    batches: Iterator[Any], arrive: Callable[[Any], Any], device: torch.device
) -> Iterator[Any]:
    """Every batch as `arrive` returns it for `device`, a GPU."""
    copies = torch.cuda.Stream(device)

    def copied() -> tuple[Any, Any] | None:
        """The next batch as it is read and as it arrives."""
        read = next(batches, None)
        # After the read, which only queues work if the data set is on the GPU. The memory of an
        # earlier batch, which queued work may still read, is taken by this one, or returned to the
        # driver behind the last one.
        copies.wait_stream(torch.cuda.current_stream(device))
        if read is None:
            return None
        with torch.cuda.stream(copies):
            return read, arrive(read)

    coming = copied()
    while coming:
        torch.cuda.current_stream(device).wait_stream(copies)
        # Releases the batch before, whose memory is for the next one, and this one as it was read:
        # until now the copies needed it.
        batch, coming = coming[1], None
        try:
            coming = copied()
        except Exception:
            yield batch  # its step comes first, and a checkpoint may follow it
            raise
        yield batch
