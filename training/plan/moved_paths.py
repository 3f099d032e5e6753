"""Paths in the configuration of a resumed run: relative ones are those of its first start, and it
has a copy of its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from training.core import find_run, manifest
from training.core.rundir import RunDir
from training.data import corpus, tokenizer, tokenizer_base

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan

FIELDS = {  # with the values that are not paths
    "data": (corpus.STDLIB,),
    "tokenizer": (tokenizer_base.BYTES, tokenizer_base.BPE),
}


def changes(run: RunDir, plan: Plan, experiments: Path) -> dict[str, str]:
    """The fields that need another path now. `experiments`: has the tokenizer of the run, also
    where `run` is what node 0 has sent of it."""
    found = {}
    for name, words in FIELDS.items():
        typed = plan["config"].get(name)
        if not isinstance(typed, str) or typed in words:
            continue
        path = find_run.path_of(find_run.as_started(typed, plan))
        if name == "tokenizer" and not find_run.is_file(path):
            path = _own_tokenizer((run, RunDir(experiments / run.name))) or path
        if path != find_run.path_of(typed):
            found[name] = str(path)
    return found


def _own_tokenizer(runs: tuple[RunDir, ...]) -> Path | None:
    """The copy of the tokenizer that the newest checkpoint was trained with."""
    saved = manifest.newest(runs[0].checkpoints)
    files = [file for run in runs if (file := tokenizer.file_in(run.tokenizer))]
    return next((f for f in files if saved and tokenizer.checksum(f) == saved["tokenizer"]), None)
