"""Helpers for tests of prepared data: prepare a corpus, read its documents back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from training.core.errors import Exit, Problem, UserError
from training.data.corpus import CorpusSource, find
from training.data.prepare import ensure
from training.data.prepared_corpus import PreparedCorpus
from training.data.tokenizer_base import BOS


def source(data: str) -> CorpusSource:
    found, problem = find(data)
    assert found, problem
    return found


def made(data: str, cache: Path, text_field: str = "text") -> PreparedCorpus:
    return ensure(source(data), text_field, cache)


def shard(paths: list[Path]) -> list[int]:
    return [token for path in paths for token in np.fromfile(path, "<u2").tolist()]


def documents(tokens: list[int]) -> list[bytes]:
    """The texts between separators."""
    parts: list[list[int]] = []
    for token in tokens:
        if token == BOS:
            parts.append([])
        else:
            parts[-1].append(token)
    return [bytes(p) for p in parts]


def refused(data: str, cache: Path, text_field: str = "text") -> Problem:
    with pytest.raises(UserError) as caught:
        made(data, cache, text_field)
    assert caught.value.code == Exit.CONFIG
    (problem,) = caught.value.problems
    assert not [p for p in cache.iterdir() if p.is_dir()], "no partial folder"
    return problem
