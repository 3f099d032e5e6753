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

    def copied() -> Any:
        # The memory of an earlier batch, which queued work may still read, is taken by this one, or
        # returned to the driver behind the last one.
        copies.wait_stream(torch.cuda.current_stream(device))
        one = next(batches, None)
        if one is None:
            return None
        with torch.cuda.stream(copies):
            return arrive(one)

    coming = copied()
    while coming is not None:
        torch.cuda.current_stream(device).wait_stream(copies)
        batch, coming = coming, None  # releases the batch before: its memory is for the next one
        coming = copied()
        yield batch
