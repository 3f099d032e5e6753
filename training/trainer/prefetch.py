"""Batches on a GPU before they are needed: the next one is copied on a stream of its own while the
GPU works on the current one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from training.tasks.base import mapped


def ahead(
    batches: Iterator[Any], arrive: Callable[[Any], Any], device: torch.device
) -> Iterator[Any]:
    """Every batch as `arrive` returns it on `device`, a GPU."""
    copies = torch.cuda.Stream(device)

    def copied() -> Any:
        one = next(batches, None)
        if one is None:
            return None
        with torch.cuda.stream(copies):
            return arrive(one)

    coming = copied()
    while coming is not None:
        using = torch.cuda.current_stream(device)
        using.wait_stream(copies)
        # Its memory belongs to the other stream, which must not reuse it before this one is done.
        mapped(coming, lambda tensor: tensor.record_stream(using))  # noqa: B023 – called at once
        batch, coming = coming, copied()
        yield batch
