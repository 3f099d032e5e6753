"""Plan of a GPT: the settings with which it fits the memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from training.config import batch
from training.config.origin import DEFAULT, asked_for
from training.core import cause_ids, manifest, standing
from training.core.messages import msg
from training.core.metric_units import memory_word
from training.data.tokenizer_base import BPE
from training.host.decisions import Decision
from training.tasks.gpt import memory, memory_fit, validation
from training.tasks.gpt.memory_fit import AUTO
from training.tasks.gpt.model_dims import FP8_MULTIPLE, ModelDims
from training.tasks.gpt.step import GptStep
from training.tasks.memory import may_compress
from training.tasks.planning import Decided, PlanRequest, Situation

if TYPE_CHECKING:
    from training.config.schema import Config
    from training.core.contracts.kinds import FieldValues
    from training.core.contracts.plan import Plan, TaskFields


def _fp8(shape: ModelDims, tokens: int, compiled: bool) -> tuple[list[str], list[str]]:
    """Text and notes of a plan in fp8. `tokens`: of a micro-batch."""
    notes = []
    if tokens % FP8_MULTIPLE:
        notes.append(msg("tasks.gpt.plan.fp8_padded", tokens=tokens, multiple=FP8_MULTIPLE))
    if not compiled:
        notes.append(msg("tasks.gpt.plan.fp8_eager"))
    sizes = msg(
        "tasks.gpt.plan.fp8",
        layers=7 * shape.depth,
        width=shape.width,
        inner=shape.inner,
        multiple=FP8_MULTIPLE,
    )
    return [sizes], notes


def larger(load: memory.StepWorkload, config: Config, ranks: int, room: int | None) -> list[str]:
    """A suggestion if a GPU has room for a larger micro-batch than the given one."""
    if not load.cuda:
        return []
    found = memory_fit.larger(load, config, ranks, room)
    if not found:
        return []
    size, saved = found
    return [
        msg(
            "tasks.gpt.plan.larger",
            size=size,
            few=config.total_batch_size // (size * config.max_seq_len * ranks),
            many=config.total_batch_size // (load.tokens * ranks),
            percent=round(100 * saved),
        )
    ]


def memory_text(plan: Plan | TaskFields) -> list[str]:
    """Lines about memory and what saves it."""
    load = memory.StepWorkload(**plan["memory"]["load"])
    estimated, word = memory.estimate(load).sentence(), memory_word(load.cuda)
    size, blocks, chunks = (
        Decision(**plan[name])
        for name in ("device_batch_size", "activation_checkpointing", "loss_chunks")
    )
    # plans of earlier versions have no selective one
    selective = Decision(**plan.get("selective_checkpointing", plan["activation_checkpointing"]))
    promise = plan.get("reported_memory")
    return [
        msg("tasks.gpt.plan.memory_promise", memory=word, estimated=estimated, promise=promise)
        if promise
        else msg("tasks.gpt.plan.memory", memory=word, estimated=estimated),
        memory_fit.MemoryPlan(load, size, blocks, selective, chunks).sentence(),
    ]


@dataclass(frozen=True)
class _Kept:
    """What a resumed run keeps of its savings, as fields of StepWorkload. `exhausted`: because it
    was out of memory: with fewer, its smaller micro-batch would need as much as the one before.
    `exact`: because others would change its bits."""

    savings: FieldValues = field(default_factory=dict)
    exhausted: bool = False
    exact: bool = False


def _kept_savings(request: PlanRequest) -> _Kept:
    """Without savings: the plan decides again."""
    run, before = request.resume_from, standing.plan_of_start(request.resume_from)
    if run is None or before is None or "loss_chunks" not in before:
        return _Kept()
    failure = standing.ends(run)[1]
    now = (
        failure is not None
        and failure.get("cause") == cause_ids.GPU_OOM
        and "occupied" not in failure
    )
    exhausted, exact = now or before.get("keeps_savings", False), request.config.deterministic
    if not (exhausted or exact):
        return _Kept()
    found: FieldValues = {}
    if not asked_for(request.origins["activation_checkpointing"]):
        found["blocks"] = before["activation_checkpointing"]["value"]
        # plans of earlier versions have no selective ones
        found["selective"] = before.get("selective_checkpointing", {"value": 0})["value"]
    if not asked_for(request.origins["loss_chunks"]):
        found["chunks"] = before["loss_chunks"]["value"]
    return _Kept(found, exhausted, exact and not now)


def _may_differ(load: memory.StepWorkload, config: Config, room: int | None) -> list[str]:
    """A note where the bits of a new run with --deterministic depend on the free memory at its
    start."""
    if not (config.deterministic and load.cuda) or room is None:
        return []
    saves = load.compiled and load.plain < load.depth  # eager blocks are recomputed identically
    chosen = (
        config.device_batch_size == AUTO
        or (config.activation_checkpointing == AUTO and saves)
        or (config.loss_chunks == AUTO and load.chunks > 1)
    )
    if not chosen:
        return []
    found = memory_fit.fixed(load, config, room)
    flags = " ".join(f"--{name}={value}" for name, value in found.items())
    return [msg("tasks.gpt.plan.may_differ", flags=flags)]


def decide(request: PlanRequest, machine: Situation) -> Decided:
    config, ranks = request.config, request.ranks
    fp8 = machine.precision.value == "fp8"
    run = request.resume_from
    saved = manifest.newest(run.checkpoints) if run else None
    vocab = validation.vocab(config, saved, request.resumed)
    asked = memory.StepWorkload(
        config.depth,
        0,
        config.max_seq_len,
        vocab,
        bf16=machine.half,
        fp8=fp8,
        fp16=machine.precision.value == "fp16",
        compiled=machine.compiled.value,
        cuda=machine.device == "cuda",
        muon=config.optimizer == "muon",
        ranks=ranks,
        total_tokens=config.total_batch_size,
        ema=config.ema > 0,
        copy=machine.device == "cpu" or machine.shared,
        compressed=may_compress(config),
        dropout=config.dropout,
    )
    kept = _kept_savings(request) if asked.cuda else _Kept()
    least = replace(asked, **kept.savings)
    fitting = memory_fit.choose(least, config, ranks, machine.room, exact=kept.exact)
    split = (
        batch.split(fitting.load.sequences, config.max_seq_len, ranks, config.total_batch_size)
        if fitting
        else None
    )
    assert fitting and split and request.source, "checked with the request"
    step = GptStep(fitting.load)
    promise = memory.PROMISE.get(Path(request.config_file).stem) if request.config_file else None
    fields: TaskFields = {
        "device_batch_size": fitting.sequences.record(),
        "activation_checkpointing": fitting.blocks.record(),
        "selective_checkpointing": fitting.selective.record(),
        "loss_chunks": fitting.chunks.record(),
        "memory": {**step.record(), "free_bytes": machine.room},
        "data": {
            "name": request.source.name,
            "files": len(request.source.files),
            "bytes": request.source.total_bytes,
        },
    }
    if kept.savings and kept.exhausted:
        fields["keeps_savings"] = True
    if promise:
        fields["reported_memory"] = promise
    text = memory_text(fields)
    # A run that is resumed may have the smaller batch for a reason: it ran out of memory.
    begun = standing.plan_of_start(request.resume_from) is not None
    notes = []
    if not begun:
        notes += larger(fitting.load, config, ranks, machine.room)
        notes += _may_differ(fitting.load, config, machine.room)
    if fp8:
        more, padded = _fp8(step.load.shape, step.load.tokens, machine.compiled.value)
        text, notes = text + more, notes + padded
    # A file of another program has no record of its model.
    set_by = request.origins["vocab_size"]
    if asked_for(set_by) and config.tokenizer != BPE:
        notes.append(
            msg(
                "tasks.gpt.plan.vocabulary_of_file",
                flag=set_by.name,
                tokenizer=config.tokenizer,
                origin=request.origins["tokenizer"],
            )
        )
    if request.start and not request.start.plan and request.origins["key_offset"] == DEFAULT:
        notes.append(msg("tasks.gpt.plan.keys_unknown", file=request.start.file.name))
    return Decided(split, text, notes, fields=fields, step=step)
