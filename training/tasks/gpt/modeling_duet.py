"""Duet's GPT for transformers: copied into exported folders, where

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

runs it. It needs torch and transformers only; names and arithmetic of the weights are those of
training/tasks/gpt/model.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class DuetConfig(PretrainedConfig):
    model_type = "duet_gpt"

    def __init__(
        self,
        vocab_size: int = 320,
        hidden_size: int = 64,
        intermediate_size: int = 192,
        num_hidden_layers: int = 1,
        num_attention_heads: int = 1,
        max_position_embeddings: int = 64,
        rope_base: float = 10000.0,
        softcap: float = 15.0,
        key_offset: bool = False,
        **more: Any,
    ) -> None:
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.intermediate_size, self.num_hidden_layers = intermediate_size, num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        self.rope_base, self.softcap = rope_base, softcap
        self.key_offset = key_offset
        super().__init__(**{"tie_word_embeddings": False, **more})


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)


def offset(keys: Tensor, before: Tensor) -> Tensor:
    """Keys (batch, heads, length, head_dim), whose half of the rotated pairs that turns slowest is
    that of the token before. `before` (batch, length): the number of that token."""
    half = keys.size(-1) // 2
    pairs = keys.unflatten(-1, (2, half))
    fast, slow = pairs.split((half - half // 2, half // 2), dim=-1)
    # Row by row: an index of whole vectors, four times as fast as one of their elements.
    slow = torch.stack([keys.index_select(1, at) for keys, at in zip(slow, before, strict=True)])
    return torch.cat((fast, slow), dim=-1).flatten(-2)


class Attention(nn.Module):
    def __init__(self, config: DuetConfig, layer: int) -> None:
        super().__init__()
        self.heads, self.layer, width = config.num_attention_heads, layer, config.hidden_size
        self.key_offset = config.key_offset
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)

    def forward(
        self, x: Tensor, angles: tuple[Tensor, Tensor], before: Tensor, mask: Tensor, past: Any
    ) -> Tensor:
        """`before` (batch, total): of all tokens, of which x has the last ones. `past` has keys
        without the offset, since the next token needs them."""
        batch, length, width = x.shape
        q, k, v = (
            part(x).view(batch, length, self.heads, -1).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        q, k = norm(rotate(q, *angles)).to(v.dtype), norm(rotate(k, *angles)).to(v.dtype)
        if past is not None:
            k, v = past.update(k, v, self.layer)
        if self.key_offset:
            k = offset(k, before)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.proj(out.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, config: DuetConfig, layer: int) -> None:
        super().__init__()
        self.attention = Attention(config, layer)
        self.gate = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(
        self, x: Tensor, angles: tuple[Tensor, Tensor], before: Tensor, mask: Tensor, past: Any
    ) -> Tensor:
        x = x + self.attention(norm(x), angles, before, mask, past)
        y = norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class DuetForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = DuetConfig
    _no_split_modules = ["Block"]  # noqa: RUF012 – as in transformers
    _supports_sdpa = True
    supports_gradient_checkpointing = True

    def __init__(self, config: DuetConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(
            Block(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embedding = value

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.head = new_embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **more: Any,
    ) -> CausalLMOutputWithPast:
        """`attention_mask`: 0 for padding, anywhere; labels of -100 are ignored.

        `more` has num_items_in_batch of transformers' Trainer: the labels of all micro-batches of
        a step, by whose number the sum of the losses is divided."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        x = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        checkpointing = self.gradient_checkpointing and self.training
        use_cache = use_cache and not checkpointing  # a block that runs again would extend it again
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        start = past_key_values.get_seq_length() if past_key_values is not None else 0
        batch, length = x.shape[:2]
        total = start + length
        if attention_mask is None:
            attention_mask = torch.ones(batch, total, dtype=torch.long, device=x.device)
        real = attention_mask.bool()
        places = (real.long().cumsum(-1) - 1).clamp(min=0)
        order = torch.arange(total, device=x.device)
        mask = (order <= order[start:, None]) & real[:, None, None, :]
        # padding sees itself: a row without any key would be NaN
        mask = mask | (order == order[start:, None])
        angles = self._angles(places[:, start:])
        last = (order * real).cummax(-1).values  # real token up to each; padding may lie between
        before = torch.where(places > 0, F.pad(last, (1, -1)), order)
        x = norm(x)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        states = [x]
        for block in self.blocks:
            inputs = (x, angles, before, mask, past_key_values)
            if checkpointing and past_key_values is None:
                x = self._gradient_checkpointing_func(block.__call__, *inputs)
            else:
                x = block(*inputs)
            if output_hidden_states:
                states.append(x)
        states[-1] = x = norm(x)
        cap = self.config.softcap
        logits = cap * torch.tanh(self.head(x).float() / cap)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **more)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=tuple(states) if output_hidden_states else None,
        )

    def _angles(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, (batch, 1, length, head_dim / 2) each."""
        half = self.config.hidden_size // self.config.num_attention_heads // 2
        exponents = torch.arange(half, device=places.device, dtype=torch.float32) / half
        angles = places[:, None, :, None].float() * self.config.rope_base**-exponents
        return angles.cos(), angles.sin()
