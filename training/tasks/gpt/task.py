"""Language model task: a GPT trained on text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from training.config.schema import Config
from training.core import heartbeat, metric_units, units
from training.core.messages import msg
from training.data import token_dataset
from training.data.prepared_corpus import PreparedCorpus, content
from training.data.token_dataset import Pair, TokenDataset
from training.data.tokenizer import for_corpus as tokenizer_of
from training.data.tokenizer import identity
from training.tasks.base import Task
from training.tasks.gpt import evaluated, generate, optim, scores
from training.tasks.gpt.model import GPT, MemorySavings
from training.tasks.gpt.model_dims import ModelDims, blocks_per_graph, flops_per_token
from training.tasks.gpt.muon import Muon
from training.tasks.optim import Optimizers

if TYPE_CHECKING:
    from training.core.contracts.run_files import ManifestRecord

TEMPERATURE = 0.8


class LanguageModel(Task):
    """Validation in bits per byte: comparable between tokenizers and batch sizes."""

    unit = "tokens"
    pieces = "sequences"

    def __init__(
        self,
        config: Config,
        device: torch.device,
        data: PreparedCorpus,
        frugal: MemorySavings,
        *,
        fp8: bool = False,
        blocks_per_graph: int | None = None,
    ) -> None:
        """`blocks_per_graph`: of a compiled model; None: as suits device and ranks."""
        super().__init__(None, config, device)
        self.fp8, self.blocks_per_graph = fp8, blocks_per_graph
        self.data, self.frugal, self.tokenizer = data, frugal, tokenizer_of(data)
        self.shape = ModelDims(config.depth, data.vocab, config.max_seq_len, config.key_offset)
        self.random = config.dropout > 0

    def model(self) -> GPT:
        model = GPT(self.shape, self.frugal, self.config.dropout)
        if self.fp8:
            from training.tasks.gpt import fp8  # imports torchao, in seconds

            size = self.config.device_batch_size
            assert not isinstance(size, str), "decided by the plan"
            fp8.convert(model.blocks, size * self.config.max_seq_len)
        return model

    def optimizers(self, model: nn.Module) -> Optimizers:
        assert isinstance(model, GPT)
        self._optimizers = optim.build(model, self.config)
        return self._optimizers

    def compile(self, model: nn.Module) -> None:
        assert isinstance(model, GPT)
        shared = dist.is_available() and dist.is_initialized()
        ranks = dist.get_world_size() if shared else 1
        model.compile_parts(self.blocks_per_graph or blocks_per_graph(self.device.type, ranks))
        for part in self._optimizers.parts:
            if isinstance(part, Muon):
                part.compile()

    def train_data(self) -> TokenDataset:
        return token_dataset.dataset(self.data, "train", self.config.max_seq_len)

    def val_data(self) -> TokenDataset:
        return token_dataset.dataset(self.data, "val", self.config.max_seq_len)

    def rows(self, part: str) -> TokenDataset:
        return self.train_data() if part == "train" else self.val_data()

    def arrive(self, batch: torch.Tensor) -> Pair:
        return token_dataset.arrive(batch, self.device)

    def count(self, batch: Pair) -> int:
        return len(batch[0])

    def loss(self, model: nn.Module, batch: Pair) -> torch.Tensor:
        """Nats per token."""
        loss: torch.Tensor = model(*batch)
        return loss

    def share(self, count: int, rank: int, ranks: int) -> Sequence[int]:
        """The sequences of a rank: `eval_tokens` in all, for any number of ranks the same."""
        wanted = max(1, self.config.eval_tokens // self.config.max_seq_len)
        return evaluated.spread(count, wanted)[rank::ranks]

    def measured(self, count: int) -> dict[str, int]:
        """With `count` if that is more: earlier versions measured the first sequences."""
        found = super().measured(count)
        return found | ({"of": count} if found["samples"] < count else {})

    def why_not(self, count: int) -> str:
        if count:
            return ""
        found, length = units.plural(count, "sequence"), self.config.max_seq_len
        return msg("tasks.gpt.task.too_few", found=found, length=length)

    def measure(self, model: nn.Module, batch: Pair) -> dict[str, torch.Tensor]:
        return scores.sums(model, *batch, self._byte_lengths())

    def fill(self, rows: torch.Tensor, size: int) -> torch.Tensor:
        """Rows of separators have nothing to predict."""
        return F.pad(rows, (0, 0, 0, size - len(rows)), value=self.tokenizer.bos)

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        return scores.scores(sums)

    def shown_loss(self, loss: float) -> str:
        factor = metric_units.bits_per_byte(self.data.bytes_per_token)
        return f"{units.decimal(loss * factor)} {metric_units.BITS}"

    def shown(self, scores: Mapping[str, float]) -> str:
        return f"{units.decimal(scores['bpb'])} {metric_units.BITS}"

    def facts(self) -> ManifestRecord:
        return {
            "shape": asdict(self.shape),
            "optimizer": self.config.optimizer,
            "data": {"folder": Path(self.data.folder).name, "tokens_sha256": content(self.data)},
            "tokenizer": identity(self.data),
        }

    def same_data(self, saved: ManifestRecord) -> bool:
        return bool(saved["data"]["tokens_sha256"] == content(self.data))

    def describe(self, model: nn.Module) -> str:
        return msg(
            "tasks.gpt.task.describe", depth=self.config.depth, parameters=super().describe(model)
        )

    def flops(self, model: nn.Module) -> float:
        return flops_per_token(self.shape)

    def sample(self, model: nn.Module, folder: Path) -> str | None:
        """Text generated by the model, the same for the same weights and seed."""
        if not self.config.sample_tokens:
            return None
        assert isinstance(model, GPT)
        how = generate.Sampling(self.config.sample_tokens, TEMPERATURE, seed=self.config.seed)
        columns = generate.generate(
            model, [self.tokenizer.bos], how, lambda: heartbeat.current.beat("sample")
        )
        made = [token for (token,) in columns if token is not None]
        return self.tokenizer.decode(made)

    def _byte_lengths(self) -> torch.Tensor:
        if self._lengths is None:
            self._lengths = torch.from_numpy(
                np.asarray(self.tokenizer.byte_lengths(), np.int64)
            ).to(self.device)
        return self._lengths

    _lengths: torch.Tensor | None = None
