"""In place of a missing tqdm: a progress bar that is never drawn."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any


class tqdm:
    monitor_interval = 0
    disable = True

    def __init__(self, iterable: Iterable[Any] = (), **options: Any) -> None:
        self.iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        return iter(self.iterable)

    def __enter__(self) -> tqdm:
        return self

    def __exit__(self, *error: object) -> None: ...

    def update(self, n: int = 1) -> None: ...

    def set_postfix(self, **values: Any) -> None: ...

    def set_postfix_str(self, text: str) -> None: ...

    def set_description(self, text: str) -> None: ...

    def close(self) -> None: ...

    @staticmethod
    def write(text: str, file: Any = None) -> None:
        print(text, file=file or sys.stdout)
