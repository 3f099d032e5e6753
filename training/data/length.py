"""How long a run is: steps per epoch from the data, total steps from iterations or epochs, whichever ends first."""

from __future__ import annotations

from dataclasses import dataclass

from training.config.batch import Batch
from training.config.schema import FIELDS, Config
from training.data.prepare import Prepared
from training.errors import Problem, UserError


@dataclass(frozen=True)
class Length:
    total_steps: int
    steps_per_epoch: int

    @property
    def epochs(self) -> int:
        """Epochs that are begun."""
        return -(-self.total_steps // self.steps_per_epoch)


def plan_length(config: Config, batch: Batch, data: Prepared) -> Length:
    """Raises UserError when the data has not enough tokens for one step."""
    # Whole steps of all ranks together: the same for every number of ranks, and uneven data can not hang.
    steps = max(0, data.train_tokens - 1) // batch.seq_len // (batch.total_tokens // batch.seq_len)
    if not steps:
        needed = batch.total_tokens + 1
        what = f"data {data.name} has {data.train_tokens} training tokens; one step needs {needed} ({batch.sentence()})"
        seq = min(batch.seq_len, data.train_tokens // batch.world_size // 8)
        flags = f"--max_seq_len={seq} --device_batch_size=1 --total_batch_size={seq * batch.world_size}"
        fixes = [flags] if seq >= FIELDS["max_seq_len"].metadata["low"] else []
        raise UserError(Problem(what, "more text, or a smaller total_batch_size", fixes))
    limits = [config.num_iterations] if config.num_iterations else []
    if config.num_epochs or not limits:
        limits.append(max(1, config.num_epochs) * steps)
    return Length(min(limits), steps)
