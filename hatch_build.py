"""What goes into a wheel of Duet (hatchling's hook): the product's files, below duet_home with the
layout of a checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HOME = (
    "duet",
    "train.py",
    "requirements.lock",
    "*.sh",
    "training",
    "configs",
    "options",
    "examples",
    "lib",
)
START = {"lib/site/duet.pth": "duet.pth"}  # makes it importable (lib/site/_duet.py)


class Wheel(BuildHookInterface):  # type: ignore[misc]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":  # the checkout itself; dev-mode-dirs names its lib/site
            build_data["force_include_editable"] = START
            return
        root = Path(self.root)
        parts = [str(path.relative_to(root)) for pattern in HOME for path in root.glob(pattern)]
        build_data["force_include"] |= START | {part: f"duet_home/{part}" for part in parts}
