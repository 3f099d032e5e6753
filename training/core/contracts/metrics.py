"""metrics.jsonl: a line for each step and each evaluation, written by rank 0."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from typing_extensions import NotRequired

# A line as written and read: besides the fields below, tasks add their own metrics, val_NAME in an
# evaluation, UNIT and UNIT_per_s if samples have another name (training.core.metric_units).
Figures = dict[str, Any]


class StepRecord(TypedDict):
    """An optimizer step."""

    time: float  # unix s
    step: int  # from 1
    epoch: int  # from 1
    # mean over the batches of all ranks; nats per token of gpt; None: not finite in a skipped step
    loss: float | None
    lr: float  # of the first parameter group
    grad_norm: float | None  # before clipping; None: of a skipped step
    loss_scale: NotRequired[float]  # with which the step was computed; this and the next: fp16
    skipped_steps: NotRequired[int]  # since step 1, over all starts
    tokens: NotRequired[int]  # since step 1, over all starts; this or samples
    samples: NotRequired[int]
    tokens_per_s: NotRequired[float]  # all ranks together
    samples_per_s: NotRequired[float]
    used_s: NotRequired[float]  # of --max_time, over all starts; only with such a limit
    step_ms: float  # wall time, without evaluation and checkpoint
    mfu: float | None  # 0 to 1, share of the GPU's peak; None: peak unknown
    power_w: NotRequired[float]  # all GPUs together; this and the next one: only if known
    joules_per_unit: NotRequired[float]  # of the GPUs for a token or sample
    # By rank, as the next one; None: unknown. Data loading and forward pass, without communication;
    # 'own_ms' in early 0.1.
    compute_ms: list[float | None]
    memory_bytes: list[int | None]  # peak so far


class EvaluationRecord(TypedDict):
    """An evaluation; in addition one val_NAME for each score."""

    time: float  # unix s
    step: int
    epoch: int
    eval_ms: float
    weights: NotRequired[str]  # ema: the scores are those of the averaged weights (--ema)
    val_loss: NotRequired[float]
    val_bpb: NotRequired[float]  # bits per byte
