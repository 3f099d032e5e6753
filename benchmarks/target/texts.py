"""The corpora: both are there wherever the comparison can run."""

from __future__ import annotations

import json
import os
import sysconfig
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from benchmarks.common import found
from benchmarks.target.plan import SOURCES, STDLIB
from training.trainer.prepared_cache import CACHE


def data(name: str) -> str:
    """The value of --data for a corpus; makes the file of `sources` if there is none.

    `sources`: a document for each Python file of the standard library and of torch, 5 times the
    tokens of `stdlib` alone."""
    if name == STDLIB:
        return name
    python, torch = sysconfig.get_python_version(), version("torch").partition("+")[0]
    path = CACHE / f"{SOURCES}-python{python}-torch{torch}.jsonl"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # of two programs at once, each writes its own
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        with unfinished.open("w") as file:
            for source in _files():
                file.write(json.dumps({"text": source.read_text(errors="replace")}) + "\n")
        unfinished.replace(path)
    return str(path)


def _files() -> list[Path]:
    package = find_spec("torch")
    assert package and package.origin
    return [*found(STDLIB).files, *sorted(Path(package.origin).parent.rglob("*.py"))]
