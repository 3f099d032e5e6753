"""Types of the flags of several benchmarks."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

NANOCHAT_DIR = "NANOCHAT_DIR"  # the user's checkout of nanochat
MOST = 1_000_000
T = TypeVar("T")


def number(least: int, most: int) -> Callable[[str], int]:
    def one(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} to {most}")
        return int(text)

    return one


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0, up to {MOST}")
    return value


def known(names: Collection[str]) -> Callable[[str], str]:
    def one(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(names)}")
        return text

    return one


def several(one: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Values separated by commas, each once."""
    return lambda text: list(dict.fromkeys(one(word.strip()) for word in text.split(",")))


def nanochat_checkout(text: str) -> Path:
    """The folder of a flag: programs that need it run in another one."""
    folder = Path(text).expanduser().resolve()
    if not (folder / "nanochat/gpt.py").is_file():
        raise argparse.ArgumentTypeError(f"{text} has no nanochat/gpt.py")
    return folder
