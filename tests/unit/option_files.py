"""Helpers for tests of KAIR's option files."""

from __future__ import annotations

import copy
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from tests.unit.conftest import only
from training.config.loader import ConfigFile
from training.config.schema import FIELDS
from training.core.errors import Problem
from training.tasks.video_restoration.kair.loader import load
from training.tasks.video_restoration.options import VideoOptions

KNOWN = dict(FIELDS) | {f.name: f for f in fields(VideoOptions)}
KEY = "0123456789abcdef" * 2 + "01234567"
SMALL: dict[str, Any] = {
    "task": "small",
    "model": "vrt",
    "datasets": {"train": {"dataroot_gt": "gt", "dataroot_lq": "lq", "dataloader_batch_size": 2}},
    "netG": {"net_type": "recurrent"},
    "train": {"total_iter": 10},
}


def small(**changes: Any) -> dict[str, Any]:
    """SMALL with dotted keys changed: train__total_iter=5."""
    tree = copy.deepcopy(SMALL)
    for name, value in changes.items():
        *sections, last = name.split("__")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return tree


def read(tree: Any, ranks: int = 2) -> ConfigFile:
    return load(
        Path("o.json"), tree if isinstance(tree, str) else json.dumps(tree, indent=1), ranks
    )


def values(tree: Any) -> dict[str, Any]:
    loaded = read(tree)
    assert loaded.problems == []
    return {name: value for name, (value, _) in loaded.values.items()}


def refused(**changes: Any) -> Problem:
    return only(read(small(**changes)).problems)


def visible(loaded: ConfigFile) -> str:
    """Everything of a loaded file that is shown or written."""
    lines = [line for problem in loaded.problems for line in problem.lines()]
    return "\n".join([*lines, *loaded.notes, loaded.title, repr(loaded.values)])
