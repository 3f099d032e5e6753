from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import muon_variants
from benchmarks.ablation import CHANGES, build, child, table
from benchmarks.muon_variants import Ideas
from benchmarks.variants import Choices, Variant
from tests.cases import each
from training.config.schema import Config
from training.core.rundir import write_json
from training.tasks.gpt.fake_memory import Slice
from training.tasks.gpt.model import GPT
from training.tasks.gpt.model_dims import ModelDims


@each(
    "shape",
    [
        ModelDims(2, 64, 16),
        ModelDims(2, 64, 16, key_offset=False),
        Slice(1, 64, 16, full_depth=7),
    ],
)
def test_the_default_variant_is_the_gpt_model(shape: ModelDims) -> None:
    torch.manual_seed(0)
    gpt, variant = GPT(shape), Variant(shape, Choices(key_offset=shape.key_offset))
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


def test_muon_without_ideas_is_torchs() -> None:
    """Whose iteration is in bf16."""
    torch.manual_seed(0)
    initial = [torch.randn(12, 30), torch.randn(30, 12)]
    found = []
    for make in (
        lambda m: torch.optim.Muon(m, 0.02, 0.1),
        lambda m: muon_variants.Muon(m, 0.02, 0.1, Ideas(), torch.bfloat16),
        lambda m: muon_variants.Muon(m, 0.02, 0.1, Ideas(), torch.float32),
    ):
        matrices = [nn.Parameter(one.clone()) for one in initial]
        optimizer = make(matrices)
        for step in range(3):
            for matrix in matrices:
                matrix.grad = (matrix.detach() + step).sin()
            optimizer.step()
        found.append([m.detach() for m in matrices])
    for theirs, same, fp32 in zip(*found, strict=True):
        torch.testing.assert_close(same, theirs, atol=1e-6, rtol=0)
        torch.testing.assert_close(fp32, theirs, atol=2e-3, rtol=0)


@each("bf16", [True, False])
def test_an_idea_is_compared_with_a_muon_of_the_same_precision(bf16: bool) -> None:
    """Ideas that change nothing here: the same weights after a step."""
    found = []
    for change in (CHANGES["duet"], replace(CHANGES["duet"], muon=Ideas(cautious_decay=True))):
        torch.manual_seed(0)
        model = Variant(ModelDims(1, 64, 16), Choices())
        optimizer = build(model, change, Config(), bf16)
        for matrix in model.parameters():
            matrix.grad = torch.randn_like(matrix)
        optimizer.step()
        found.append(model.matrices)
    for duet, own in zip(*found, strict=True):
        torch.testing.assert_close(own, duet, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@each("ideas", [Ideas(), Ideas(polar_express=5), Ideas(5, True, True, True, True)])
def test_ideas_keep_the_update_nearly_orthogonal(ideas: Ideas, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    matrix = nn.Parameter(torch.zeros(24, 60))
    matrix.grad = torch.randn(24, 60)
    muon_variants.Muon([matrix], 1.0, 0.1, ideas, dtype).step()
    assert matrix.dtype == torch.float32
    values = torch.linalg.svdvals(matrix.detach())
    assert values.min() > 0.5 and values.max() < 1.5


def test_every_change_changes_something() -> None:
    for name, change in CHANGES.items():
        assert name == "duet" or change != CHANGES["duet"], name
        Choices(**change.model)


def test_changes_are_compared_seed_by_seed() -> None:
    def one(bpb: float) -> dict[str, float]:
        return {"bpb": bpb, "ms": 100.0, "parameters": 1e6}

    found = {"duet": {1: one(2.0), 2: one(3.0)}, "smear": {1: one(1.9), 2: one(2.7), 3: one(9.0)}}
    *_, row = table(found | {"backout": {3: one(1.0)}})
    assert row.split()[:7] == ["smear", "2.3000", "-0.2000", "-0.3000", "-0.1000", "1.00", "100"]


def test_a_variant_that_has_diverged_is_in_the_table_of_a_later_call(tmp_path: Path) -> None:
    args = argparse.Namespace(depth=4, precision="bf16", steps=3, sequences=8, results=tmp_path)
    for name, bpb in (("duet", 2.0), ("no_clip", math.nan)):
        file = tmp_path / f"{name}-depth4-bf16-3x8-seed1.json"
        write_json(file, {"bpb": bpb, "ms": 1.0, "parameters": 1000, "commit": "abc"})
    found = {name: {1: child(args, name, 1) or {}} for name in ("duet", "no_clip")}
    assert table(found)[2].split()[:3] == ["no_clip", "nan", "+nan"]
