"""Checks of a GPT's request that do not examine the machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from training.config import batch
from training.config.loader import Values
from training.config.schema import Config
from training.core import units
from training.core.errors import Problem
from training.core.messages import msg
from training.data import corpus, encoding, optional_deps, tokenizer
from training.data.tokenizer_base import BPE

if TYPE_CHECKING:
    from training.core.contracts.run_files import ManifestRecord

SIZES = ("device_batch_size", "total_batch_size", "max_seq_len")


def check(
    config: Config, origins: Mapping[str, str], installed: bool
) -> tuple[corpus.CorpusSource | None, list[Problem]]:
    """The text to train on, and problems of the text or its tokenizer."""
    problems = encoding.check(config.encoding, origins["encoding"])
    source, problem = corpus.find(config.data, origins["data"], "" if problems else config.encoding)
    problems += ([problem] if problem else []) + tokenizer.check(
        config.tokenizer, origins["tokenizer"]
    )
    if installed:
        problems += optional_deps.missing(source.files if source else (), config.tokenizer)
    return source, problems


def vocab(config: Config, saved: ManifestRecord | None, resumed: Values) -> int:
    """Rows of the embedding. For a short text, a bpe vocabulary is smaller than planned: a run that
    continues from `saved` with the same --vocab_size keeps its vocabulary."""
    planned = tokenizer.vocab_of(config.tokenizer, config.vocab_size)
    same = config.tokenizer == BPE and all(
        resumed.get(name, (None,))[0] == getattr(config, name)
        for name in ("tokenizer", "vocab_size")
    )
    return min(planned, int(saved["shape"].get("vocab", planned))) if saved and same else planned


def divides(config: Config, origins: Mapping[str, str], ranks: int) -> list[Problem]:
    """A batch that is not divisible, with the nearest that are."""
    total, seq = config.total_batch_size, config.max_seq_len
    if isinstance(config.device_batch_size, str):
        if batch.device_choices(seq, ranks, total):
            return []
        device = 1
    else:
        device = config.device_batch_size
        if batch.split(device, seq, ranks, total):
            return []
    counted = units.plural(ranks, "rank")
    what = msg(
        "tasks.gpt.batch.not_divisible",
        total=total,
        total_origin=origins["total_batch_size"],
        size=config.device_batch_size,
        size_origin=origins["device_batch_size"],
        seq=seq,
        seq_origin=origins["max_seq_len"],
        counted=counted,
        product=device * seq * ranks,
    )
    fixes = [f"--{name}={value}" for name, value in batch.repairs(device, seq, ranks, total)]
    return [
        Problem(
            "batch.not_divisible",
            what,
            msg("tasks.gpt.batch.multiple", product=device * seq * ranks),
            fixes,
        )
    ]
