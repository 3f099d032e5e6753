"""Loss and bits per byte of a language model on text."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn


def sums(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Nats, tokens and bytes of a batch. `lengths`: bytes of text per token; separators are not
    text: they have no bytes and are not predicted."""
    told = lengths[targets]
    targets = targets.masked_fill(told == 0, -1)
    nats = model(inputs, targets, reduction="sum")
    return {
        "nats": nats.double(),
        "tokens": (targets != -1).sum().double(),
        "bytes": told.sum().double(),
    }


def each(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor
) -> dict[str, torch.Tensor]:
    """As sums(), for each token, (batch, T) each: `tokens` is 0 or 1."""
    told = lengths[targets]
    targets = targets.masked_fill(told == 0, -1)
    return {
        "nats": model(inputs, targets, reduction="none"),
        "tokens": targets != -1,
        "bytes": told,
    }


def scores(total: Mapping[str, float]) -> dict[str, float]:
    """loss: nats per token; bpb: bits per byte; NaN for data of separators alone."""
    nats, tokens, text = total["nats"], total["tokens"], total["bytes"]
    return {
        "loss": nats / tokens if tokens else math.nan,
        "bpb": nats / math.log(2) / text if text else math.nan,
    }
