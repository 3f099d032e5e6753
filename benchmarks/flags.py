"""Types of the flags of several benchmarks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

NANOCHAT_DIR = "NANOCHAT_DIR"  # the user's checkout of nanochat
T = TypeVar("T")


def number(least: int, most: int) -> Callable[[str], int]:
    def one(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} to {most}")
        return int(text)

    return one


def known(names: Collection[str]) -> Callable[[str], str]:
    def one(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(names)}")
        return text

    return one


def several(one: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Values separated by commas."""
    return lambda text: [one(word) for word in text.split(",")]


def nanochat_checkout(text: str) -> Path:
    """The folder of a flag: programs that need it run in another one."""
    folder = Path(text).expanduser().resolve()
    if not (folder / "nanochat/gpt.py").is_file():
        raise argparse.ArgumentTypeError(f"{text} has no nanochat/gpt.py")
    return folder
