"""Metrics of one line of a training log."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class LogRecord:
    """Metrics of one line."""

    offset: int = 0
    rank: int | None = None
    number: int | None = None  # before a loss without a step: a rank, or the step
    time: float | None = None  # timestamp of the line, for differences only
    source: str | None = None
    step: int | None = None
    total: int | None = None
    epoch: float | None = None
    epochs: int | None = None
    epoch_steps: int | None = None  # of each epoch, if the line is its heading
    loss: float | None = None
    bits: bool = False  # the loss is in bits per byte
    lr: float | None = None
    grad_norm: float | None = None
    tokens: int | None = None
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    step_ms: float | None = None
    mfu: float | None = None  # 0..1
    memory_bytes: int | None = None
    elapsed_s: float | None = None
    eta_s: float | None = None
    percent: float | None = None  # if given beside the step
    scores: dict[str, float] = field(default_factory=dict)  # of an evaluation
    validates: bool = False  # a batch of an evaluation, whose score is not known yet
    bar: bool = False
    behind_bar: bool = False  # printed after a bar, without a line end between them
    heading: bool = False  # of an epoch, for the lines below it
    trained: bool = False  # the last line of a training of Hugging Face
    whole_epoch: bool = False  # step and total are counted within an epoch

    @property
    def tells(self) -> bool:
        """Whether it shows the progress of the training."""
        return self.step is not None or self.loss is not None or bool(self.scores) or self.validates

    @property
    def complete(self) -> bool:
        """Whether it is a bar at its end, which programs redraw repeatedly."""
        return self.bar and self.total is not None and self.step == self.total
