"""Benchmarks: run as modules, print ratios from interleaved rounds. Not part of the tests."""

import argparse
from pathlib import Path

NANOCHAT_DIR = "NANOCHAT_DIR"  # the user's checkout of nanochat


def nanochat_checkout(text: str) -> Path:
    """The folder of a flag: programs that need it run in another one."""
    folder = Path(text).expanduser().resolve()
    if not (folder / "nanochat/gpt.py").is_file():
        raise argparse.ArgumentTypeError(f"{text} has no nanochat/gpt.py")
    return folder
