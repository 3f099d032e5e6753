"""Length of a run: steps per epoch and total steps, from iterations or epochs, whichever ends
first. The time (--max_time) is measured during the run (training.trainer.time_limit)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from training.config.batch import Batch
from training.config.schema import ENDLESS, FIELDS, Config
from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.data.prepared_corpus import PreparedCorpus

if TYPE_CHECKING:
    from training.core.contracts.run_files import ManifestRecord

UNLIMITED = ENDLESS


@dataclass(frozen=True)
class TrainingLength:
    total_steps: int  # UNLIMITED: until the time is up
    steps_per_epoch: int  # in a full epoch of this data with this batch
    epochs: int  # started, full or partial

    def record(self) -> dict[str, int]:
        """As in events.jsonl; 0: not known before the end."""
        if self.total_steps < UNLIMITED:
            return asdict(self)
        return {**asdict(self), "total_steps": 0, "epochs": 0}


def plan_length(
    config: Config, batch: Batch, samples: int, *, step: int = 0, epoch: int = 0, used: int = 0
) -> TrainingLength | None:
    """Length from `step` on, when `used` samples (sequences) of `epoch` (from 0) are already
    trained, possibly with another batch or data. None if there are too few samples for one step."""
    # Count whole steps of all ranks together: the result does not depend on the number of ranks,
    # and uneven data cannot hang.
    per_step = batch.total_tokens // batch.seq_len
    steps, left = samples // per_step, max(0, samples - used) // per_step
    if not steps:
        return None
    limits = [config.num_iterations] if config.num_iterations else []
    if config.max_time and not limits and not config.num_epochs:
        return TrainingLength(UNLIMITED, steps, UNLIMITED // steps)
    if config.num_epochs or not limits:
        more = max(1, config.num_epochs) - epoch  # this one and those not started
        limits.append(step + (left + (more - 1) * steps if more > 0 else 0))
    total = min(*limits, UNLIMITED - 1)  # a greater number would need a limit of time
    return TrainingLength(total, steps, epoch + 1 + -(-max(0, total - step - left) // steps))


def ended(saved: ManifestRecord, batch: Batch, samples: int) -> bool:
    """Whether the epoch of a checkpoint had no other whole step: the next one may have any data and
    order. `samples`: of the current data."""
    left = saved.get("samples", samples) - saved["used"]
    return left < batch.total_tokens // batch.seq_len


def sequences(data: PreparedCorpus, batch: Batch) -> int:
    """Samples of an epoch of a prepared text."""
    return max(0, data.train_tokens - 1) // batch.seq_len


def of_text(config: Config, batch: Batch, data: PreparedCorpus, **position: int) -> TrainingLength:
    """`plan_length` for a prepared text. Raises UserError if it is too short for one step."""
    found = plan_length(config, batch, sequences(data, batch), **position)
    if found is None:
        needed = batch.total_tokens + 1
        what = msg(
            "data.length.too_short",
            name=data.name,
            train_tokens=data.train_tokens,
            needed=needed,
            sentence=batch.sentence(),
        )
        seq = min(batch.seq_len, data.train_tokens // batch.world_size // 8)
        flags = (
            f"--max_seq_len={seq} --device_batch_size=1 --total_batch_size={seq * batch.world_size}"
        )
        fixes = [flags] if seq >= FIELDS["max_seq_len"].metadata["low"] else []
        raise UserError(Problem("data.too_short", what, msg("data.length.more_text"), fixes))
    return found
