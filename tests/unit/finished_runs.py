"""A run of training.trainer as its summary finds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.conftest import SIMPLE
from training.config.schema import FIELDS, Config
from training.core.rundir import RunDir, write_json


@pytest.fixture
def run(home: Path) -> RunDir:
    """A run in the default folder, as plan and training leave it."""
    run = RunDir(home / "experiments/my run")
    run.create()
    write_json(run.plan, plan())
    return run


def plan(script: str = SIMPLE, ranks: int = 2, **config: Any) -> dict[str, Any]:
    origins = {n: "from --x on the command line" if n in config else "default" for n in FIELDS}
    return {
        "command": {"script": script, "args": []},
        "config": vars(Config(**{"num_iterations": 400} | config)),
        "origins": origins,
        "ranks": ranks,
        "device": {"value": "cpu"},
        "data": {"name": "stdlib"},
        "log_file": "/logs/x.log",
        "created": 0.0,
    }
