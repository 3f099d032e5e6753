"""The project as a folder: where it is, and the script of one rank."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENTRYPOINT = "train.py"
