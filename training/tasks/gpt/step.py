"""Planned step of a GPT: memory by formula, verified by fake tensors."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from training.config.schema import Config
from training.core import log
from training.core.messages import msg
from training.core.metric_units import memory_word
from training.tasks.gpt import memory, memory_fit
from training.tasks.gpt.model_dims import BLOCKS_PER_GRAPH, flops_per_token
from training.tasks.memory import CompiledBlocks, Measured, StepNeeds

if TYPE_CHECKING:
    from training.core.contracts.kinds import FieldValues
    from training.core.contracts.plan import StepRecord


@dataclass(frozen=True)
class GptStep(StepNeeds):
    load: memory.StepWorkload

    MODEL = frozenset({"depth"})

    @property
    def estimate(self) -> memory.Estimate:
        return memory.estimate(self.load)

    @property
    def on_gpu(self) -> bool:
        return self.load.cuda

    @property
    def source(self) -> str:
        return msg(
            "tasks.gpt.step.source",
            mode="compiled" if self.load.compiled else "eager",
            precision="16-bit" if self.load.bf16 else "fp32",
        )

    @property
    def gradient_bytes(self) -> int:
        return 4 * self.load.shape.weights

    @property
    def update_bytes(self) -> int:
        """Assumes updates of 16 bits: fp32 ones, of GPUs without tensor cores, take twice this."""
        shape = self.load.shape
        return memory.UPDATE * self.load.depth * shape.block_weights if self.load.muon else 0

    @property
    def compiled_blocks(self) -> CompiledBlocks | None:
        if not (self.load.compiled and self.load.cuda):
            return None
        shape = self.load.shape
        return CompiledBlocks(shape.depth, 4 * shape.block_weights, BLOCKS_PER_GRAPH)

    @property
    def elsewhere(self) -> int:
        return self.load.elsewhere

    @property
    def saving(self) -> int:
        return self.load.saving

    def resized(self, sequences: int | None = None, ranks: int | None = None) -> GptStep:
        load = self.load
        return GptStep(
            replace(load, sequences=sequences or load.sequences, ranks=ranks or load.ranks)
        )

    def suggestions(self, config: Config, ranks: int, room: int) -> list[FieldValues]:
        return memory_fit.suggestions(self.load, config, ranks, room)

    def record(self) -> StepRecord:
        return {**self.estimate.record(), "load": asdict(self.load)}

    def flops(self, steps: int) -> float:
        tokens = steps * (self.load.total_tokens or self.load.tokens * self.load.ranks)
        return float(flops_per_token(self.load.shape) * tokens)

    def measure(self) -> Measured:
        log.info(msg("tasks.measure.begins", memory=memory_word(self.on_gpu)))
        started = time.perf_counter()
        from training.tasks.gpt.fake_memory import peak

        # Pinned memory for checkpoints is none of the step's tensors.
        load = replace(self.load, copy=self.load.copy and not self.load.cuda)
        fake = peak(load)
        # fake tensors are of the bf16 model
        same = memory.estimate(replace(load, compiled=False, cuda=False, fp8=False))
        return Measured(fake, same.total, time.perf_counter() - started)
