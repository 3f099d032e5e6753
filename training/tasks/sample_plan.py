"""Plan of a task that counts samples: its micro-batch, from memory measured by fake tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from training.config import batch
from training.config.schema import FIELDS
from training.core import log
from training.core.messages import msg
from training.core.metric_units import memory_word
from training.host.decisions import Decision
from training.host.placement import RANK
from training.tasks import measurement, sample_batch
from training.tasks.measurement import Answer, Question
from training.tasks.planning import Decided, PlanRequest, Situation

if TYPE_CHECKING:
    from training.core.contracts.plan import TaskFields, TaskRecord

FALLBACK = int(str(FIELDS["device_batch_size"].default))


def decide(request: PlanRequest, machine: Situation, task: TaskRecord) -> Decided:
    """Measuring takes seconds, so it is done only if the user asked for it (dry run, check), if the
    batch depends on it, and on a GPU, where a step that is too large ends the run."""
    config, follows = request.config, request.origins["total_batch_size"] == "default"
    auto = isinstance(config.device_batch_size, str)
    split = sample_batch.split(config, request.origins, request.ranks)
    if not (auto or request.check or request.dry_run or machine.device == "cuda"):
        assert split, "checked by divides()"
        return Decided(split, [])
    total = 0 if follows else config.total_batch_size
    question = Question(
        task,
        request.values(),
        [split.device_sequences]
        if split
        else None
        if follows
        else batch.device_choices(1, request.ranks, total),
        machine.room,
        request.ranks,
        total,
        machine.half,
        machine.device == "cuda",
        machine.shared,
        fp16=machine.precision.value == "fp16",
    )
    if auto and machine.room is None:
        question = replace(question, sizes=[_fallback(question)])
    found = _answer(request, question)
    fields: TaskFields = {}
    if not split:
        size = _size(question, found)
        fields["device_batch_size"] = size.record()
        split = batch.split(size.value, 1, request.ranks, total or size.value * request.ranks)
        assert split, "chosen from those that divide"
    word = memory_word(question.cuda)
    if found.step is None:
        return Decided(
            split, [], [msg("tasks.sample.plan.not_measured", memory=word, why=found.why)], fields
        )
    fields["memory"] = {**found.step.record(), "free_bytes": machine.room}
    return Decided(split, [], [], fields, step=found.step)


def _answer(request: PlanRequest, question: Question) -> Answer:
    """Of ranks that plan together only rank 0 measures: its plan counts."""
    if request.place.kind == RANK and request.place.rank != 0:
        return Answer(None, msg("tasks.sample.plan.rank_0"))
    log.info(msg("tasks.measure.begins", memory=memory_word(question.cuda)))
    return measurement.ask(question)


def _size(question: Question, found: Answer) -> Decision:
    """The value chosen for `auto`."""
    word = memory_word(question.cuda)
    if question.room is None:
        return Decision(
            _fallback(question), msg("tasks.sample.plan.free_unknown", limit=FALLBACK, memory=word)
        )
    if found.step is None:
        return Decision(
            _fallback(question), msg("tasks.sample.plan.step_unknown", limit=FALLBACK, memory=word)
        )
    size, follows = found.step.load.sequences, not question.total
    if not found.fits:
        return Decision(
            size,
            msg("tasks.sample.plan.smallest") if follows else msg("tasks.gpt.fit.smallest"),
        )
    return Decision(
        size,
        msg("tasks.sample.plan.largest_power", of=found.of)
        if follows
        else msg("tasks.gpt.fit.largest", sizes=found.of),
    )


def _fallback(question: Question) -> int:
    return max(size for size in question.sizes or [FALLBACK] if size <= FALLBACK)
