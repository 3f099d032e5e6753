"""Queries of NVIDIA's driver, by the names of NVML's functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any


@contextmanager
def held() -> Iterator[None]:
    """The driver stays loaded, for several inventories: loading takes seconds for each GPU where
    it is not kept loaded. Only after an answer of the driver; one with a dead GPU may hang."""
    with ExitStack() as stack:
        with suppress(ModuleNotFoundError):  # before the installation
            import pynvml

            with suppress(pynvml.NVMLError):
                pynvml.nvmlInit()
                stack.callback(pynvml.nvmlShutdown)
        yield


def ask(function: str, *args: Any) -> Any:
    """The answer of the driver; None if it is unsupported (old driver, MIG, many workstation cards)
    or the installed pynvml does not know the function. Bytes, of a pynvml before 11.5, become
    text."""
    import pynvml

    query = getattr(pynvml, function, None)
    if query is None:
        return None
    # for an unversioned name whose newest version the driver lacks; it derives from Exception
    mismatch = getattr(pynvml, "NVMLLibraryMismatchError", pynvml.NVMLError)
    try:
        found = query(*args)
    except (pynvml.NVMLError, mismatch):
        return None
    return found.decode("utf-8", "replace") if isinstance(found, bytes) else found
