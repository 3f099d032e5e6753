"""Prepared data of a run: made by one process of each machine (supervisor or rank) and published in
data.json for the others."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.config import flags, origin, resolve
from training.config.batch import Batch
from training.config.schema import FIELDS, Config
from training.core import log, manifest, rundir, units
from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg
from training.core.project import NOT_WRITABLE, WORK
from training.data import corpus, duration, optional_deps, tokenizer, tokenizer_base
from training.data.prepare import (
    CHECKING,
    LEARNING,
    MERGING,
    TOKENIZING,
    ensure,
    folder_of,
)
from training.data.prepared_corpus import PreparedCorpus, own_copy
from training.plan import corrections, resume_checks

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan

CACHE = WORK / "data"
# Variable: the contents of data.json on a machine whose run directory has that of the machine that
# coordinates.
OWN = "DUET_OWN_DATA"
SAY_EVERY_S = 5.0


def prepare(run: rundir.RunDir, plan: Plan, cache: Path = CACHE) -> PreparedCorpus:
    """Prepare (or find) the data and publish it. Raises UserError; a failure is published too, so
    that no process waits."""
    config, batch = Config(**plan["config"]), Batch(**plan["batch"])
    try:
        source, problem = corpus.find(config.data, plan["origins"]["data"], config.encoding)
        if source is None:
            assert problem
            raise UserError(problem)
        # Also checked with the request; a resumed run may have lost a package or file since
        # then.
        if problems := tokenizer.check(
            config.tokenizer, plan["origins"]["tokenizer"]
        ) + optional_deps.missing(source.files, config.tokenizer):
            raise UserError(problems)
        shown, field, vocab = _Shown(source.name), config.text_field, config.vocab_size
        saved = _of_node_0(run, plan)
        chosen = config.tokenizer
        if learned := _learned(run, saved, chosen):
            there = tokenizer.file_in(folder_of(source, field, cache, chosen, vocab))
            if not there or tokenizer.checksum(there) != tokenizer.checksum(learned):
                chosen = str(learned)
        data = ensure(source, field, cache, shown, chosen=chosen, vocab_size=vocab)
        if note := tokenizer.fewer(chosen, vocab, data.vocab):
            log.info(note)
        line = flags.parse(plan["command"]["args"])
        of_tokens = resume_checks.OF_TOKENS
        given = origin.given(resolve.command_origins(of_tokens, line, os.environ), of_tokens)
        if warning := resume_checks.check_data(saved, data, given):
            log.warning(warning)
        if file := tokenizer.file_in(Path(data.folder)):
            # The run stays usable without the prepared data.
            run.tokenizer.mkdir(exist_ok=True)
            rundir.write_bytes(run.tokenizer / file.name, file.read_bytes())
        position = resume_checks.position(saved, data, config, batch)
        steps = duration.of_text(config, batch, data, **position)
    except OSError as error:
        _publish(run, plan, {"failed": int(Exit.RESOURCES)})
        what = msg("trainer.data.unwritable", cache=cache, strerror=error.strerror)
        fixes = [own_copy()] if error.errno in NOT_WRITABLE else []
        raise UserError(
            Problem("data.unwritable", what, msg("trainer.data.folder_wanted"), fixes),
            Exit.RESOURCES,
        ) from None
    except UserError as error:
        _publish(run, plan, {"failed": int(error.code)})
        by, problems = plan["command"], error.problems
        error.problems = corrections.later(by["script"], by["args"], FIELDS, problems)
        raise
    facts = {name: count for name, count in steps.record().items() if count}
    _publish(run, plan, asdict(data) | facts)
    return data


def _publish(run: rundir.RunDir, plan: Plan, facts: Mapping[str, object]) -> None:
    """Write data.json, if the machine that coordinates does not write the same one."""
    place = plan["place"]
    if plan.get("shared", True) and place["node_rank"] != place.get("leader", 0):
        os.environ[OWN] = json.dumps(facts)
    else:
        os.environ.pop(OWN, None)
        rundir.write_json(run.data, facts)


def _of_node_0(run: rundir.RunDir, plan: Plan) -> rundir.RunDir:
    """The run with node 0's checkpoints, as far as this machine has them: a disk of its own may
    have older ones."""
    return run if plan.get("shared", True) else rundir.RunDir(run.received)


def _learned(run: rundir.RunDir, saved: rundir.RunDir, chosen: str) -> Path | None:
    """The vocabulary that the newest checkpoint in `saved` was trained with, if the run has learned
    it: another text would give another one."""
    facts = manifest.newest(saved.checkpoints) if chosen == tokenizer_base.BPE else None
    file = tokenizer.file_in(run.tokenizer) if facts else None
    return file if facts and file and tokenizer.checksum(file) == facts["tokenizer"] else None


def published(run: rundir.RunDir) -> PreparedCorpus | None:
    """What prepare() published, or None while it is running. Raises UserError (already reported) if
    it failed."""
    facts = _facts(run)
    if facts is None:
        return None
    if "failed" in facts:
        raise UserError([], Exit(facts["failed"]), said_by_another=True)
    return _corpus(facts)


def _facts(run: rundir.RunDir) -> Mapping[str, Any] | None:
    own = os.environ.get(OWN)
    return json.loads(own) if own else rundir.read_json(run.data)


def _corpus(facts: Mapping[str, Any]) -> PreparedCorpus:
    return PreparedCorpus(**{name: facts[name] for name in PreparedCorpus.__dataclass_fields__})


def changed(run: rundir.RunDir) -> str:
    """The first shard of the run whose size changed: if truncated while ranks have it mapped, it
    kills them with SIGBUS."""
    facts = _facts(run) or {}
    if any(name not in facts for name in PreparedCorpus.__dataclass_fields__):
        return ""
    data = _corpus(facts)
    for part, paths in (("train", data.train), ("val", data.val)):
        for path, tokens in zip(paths, data.sizes(part), strict=True):
            size = path.stat().st_size if path.exists() else 0
            if size != tokens * data.token_bytes:
                return msg(
                    "trainer.data.shard_changed",
                    path=path,
                    size=size,
                    expected=tokens * data.token_bytes,
                )
    return ""


class _Shown:
    """Progress of preparing or checking, logged every few seconds; nothing if it is fast."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.begun = self.last = time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self.last >= SAY_EVERY_S:
            self.last = now
            far = (
                msg("trainer.data.so_far", seconds=now - self.begun)
                if what == MERGING
                else msg(
                    "trainer.data.part",
                    done=units.size(done),
                    total=units.size(total),
                    percent=100 * done // max(1, total),
                )
            )
            said = {
                TOKENIZING: msg("trainer.data.preparing", name=self.name, far=far),
                CHECKING: msg("trainer.data.checking", name=self.name, far=far),
                LEARNING: msg("trainer.data.learning", name=self.name, far=far),
                MERGING: msg("trainer.data.merging", name=self.name, far=far),
            }
            log.info(said[what])
            sys.stderr.flush()
