from __future__ import annotations

import torch

from benchmarks.ablation import CHANGES
from benchmarks.variants import Choices, Variant
from training.tasks.gpt.model import GPT
from training.tasks.gpt.model_dims import ModelDims


def test_the_default_variant_is_the_gpt_model() -> None:
    shape = ModelDims(2, 64, 16)
    torch.manual_seed(0)
    gpt, variant = GPT(shape), Variant(shape, Choices())
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    names = {
        "attention.query": "qkv.0",
        "attention.key": "qkv.1",
        "attention.value": "qkv.2",
        "attention.proj": "proj",
    }
    state = {}
    for name, value in gpt.state_dict().items():
        for old, new in names.items():
            name = name.replace(old, new)  # noqa: PLW2901
        state[name] = value
    missing, unexpected = variant.load_state_dict(state, strict=False)
    assert set(missing) == {"cos", "sin"} and not unexpected
    tokens = torch.randint(0, 64, (2, 16))
    torch.testing.assert_close(variant(tokens, tokens), gpt(tokens, tokens))
    initial = Variant(shape, Choices())
    assert {n: p.std().item() == 0 for n, p in initial.named_parameters()}["head.weight"]


def test_every_change_changes_something() -> None:
    for name, change in CHANGES.items():
        assert name == "duet" or change != CHANGES["duet"], name
        Choices(**change.model)
