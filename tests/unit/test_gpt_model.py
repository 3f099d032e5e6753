from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cases import each
from training.tasks.gpt.fake_memory import Slice
from training.tasks.gpt.generate import Sampling, generate
from training.tasks.gpt.model import GPT, MemorySavings, offset, rotate, rotations
from training.tasks.gpt.model_dims import ModelDims
from training.tasks.gpt.recompute import ATTENTION, PRODUCTS


def gpt(depth: int = 2, vocab: int = 64, length: int = 16, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    model = GPT(ModelDims(depth, vocab, length))
    with torch.no_grad():  # zero initial weights hide errors in the attention
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_the_first_loss_is_that_of_a_guess(depth: int) -> None:
    model = GPT(ModelDims(depth, 320, 8))
    tokens = torch.randint(0, 320, (2, 8))
    assert model(tokens, tokens).item() == pytest.approx(math.log(320), abs=1e-5)


def test_the_number_of_parameters_matches_the_estimate() -> None:
    model = GPT(ModelDims(3, 320, 8))
    assert sum(p.numel() for p in model.parameters()) == ModelDims(3, 320, 8).weights


def test_heads_divide_the_width_at_every_depth() -> None:
    for depth in range(1, 257):  # all that the field accepts
        shape = ModelDims(depth, 320, 8)
        size, rest = divmod(shape.width, shape.heads)
        assert rest == 0 and size % 2 == 0 and 64 <= size <= 192, depth
        # Checkpoints of earlier versions, which store only the depth, need the heads of these.
        if depth % 2 == 0 or depth in (1, 3, 5, 9, 17, 33, 65):
            assert shape.heads == max(1, shape.width // 128), depth
        else:
            assert size % 8 == 0, depth


@each(("size", "taken"), [(8, [2, 3, 6, 7]), (6, [2, 5])])
def test_half_of_a_key_is_that_of_the_token_before(size: int, taken: list[int]) -> None:
    keys = torch.zeros(1, 3, 2, size)
    found = offset(keys, keys + 1)
    assert {tuple(row.nonzero().flatten().tolist()) for row in found.flatten(0, 2)} == {
        tuple(taken)
    }


def test_no_key_is_that_of_a_later_token() -> None:
    model, tokens = gpt(), torch.randint(0, 64, (1, 16))
    other = tokens.clone()
    other[0, -1] = (tokens[0, -1] + 1) % 64
    torch.testing.assert_close(model(other)[:, :-1], model(tokens)[:, :-1], rtol=0, atol=0)


@each(("depth", "heads"), [(7, 4), (11, 8)])
def test_a_step_at_depths_whose_width_128_does_not_divide(depth: int, heads: int) -> None:
    model = GPT(Slice(2, 64, 16, full_depth=depth))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    tokens = torch.randint(0, 64, (2, 16))
    model(tokens, tokens).backward()
    assert model.shape.heads == heads
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    # The text of `./duet sample` is made with kept keys and values.
    assert len(list(generate(model, [1, 2], Sampling(3)))) == 3


def test_later_tokens_do_not_change_earlier_predictions() -> None:
    model, tokens = gpt(), torch.randint(0, 64, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 64
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :10], after[0, :10])
    assert not torch.allclose(before[0, 10:], after[0, 10:])


def test_position_matters() -> None:
    """Without position information a permutation of the past would change nothing."""
    model = gpt()
    tokens = torch.tensor([[1, 2, 3, 4]])
    swapped = torch.tensor([[2, 1, 3, 4]])
    assert not torch.allclose(model(tokens)[0, -1], model(swapped)[0, -1], atol=1e-5)


def test_rotation_is_a_product_of_complex_numbers() -> None:
    x = torch.randn(2, 3, 5, 8)  # the first half real, the second imaginary
    cos, sin = rotations(5, 8)
    angles = torch.outer(torch.arange(5), 10000.0 ** -(torch.arange(4) / 4))
    turned = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones(5, 4), -angles)
    torch.testing.assert_close(rotate(x, cos, sin), torch.cat((turned.real, turned.imag), dim=-1))


@each(
    ("precision", "stream"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),  # whose range is too small
        (None, torch.float32),
    ],
)
def test_the_residual_stream_is_bf16_only_with_bf16(
    precision: torch.dtype | None, stream: torch.dtype
) -> None:
    model, seen = gpt(), []
    for block in model.blocks:
        block.register_forward_hook(
            lambda _, inputs, out: seen.append((inputs[0].dtype, out.dtype))
        )
    tokens = torch.randint(0, 64, (2, 16))
    with torch.autocast("cpu", precision, enabled=precision is not None):
        loss = model(tokens, tokens)
    assert seen == [(stream, stream)] * 2
    assert loss.item() == pytest.approx(model(tokens, tokens).item(), rel=0.01)


def test_ignored_targets() -> None:
    model, tokens = gpt(), torch.randint(0, 64, (2, 16))
    targets = tokens.clone()
    targets[:, 8:] = -1
    assert model(tokens, targets).item() == pytest.approx(
        model(tokens[:, :8], tokens[:, :8]).item(), rel=1e-5
    )


def test_every_parameter_gets_a_gradient() -> None:
    model, tokens = gpt(), torch.randint(0, 64, (2, 16))
    model(tokens, tokens).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def gradients(model: GPT, tokens: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(5)  # for the dropout
    model.zero_grad()
    loss = model(tokens, tokens)
    loss.backward()
    return loss.item(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.slow
@each(
    "frugal",
    [
        MemorySavings(1, 1),
        MemorySavings(3, 1),
        MemorySavings(0, 4),
        MemorySavings(0, 5),
        MemorySavings(3, 7),
        MemorySavings(0, 1, selective=3),
        MemorySavings(1, 4, selective=1),
    ],
)
@each("dropout", [0.0, 0.3])
def test_saving_memory_does_not_change_the_arithmetic(
    frugal: MemorySavings, dropout: float
) -> None:
    model, tokens = gpt(depth=3), torch.randint(0, 64, (3, 16))
    for block in model.blocks:
        block.dropout = dropout
    model.dropout = dropout
    plain, wanted = gradients(model, tokens)
    model.frugal = frugal
    loss, got = gradients(model, tokens)
    assert loss == pytest.approx(plain, rel=1e-6)
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@each("dropout", [0.0, 0.3])
def test_selective_recomputation_gives_the_same_bits(dropout: float) -> None:
    model, tokens = gpt(depth=3), torch.randint(0, 64, (3, 16))
    for block in model.blocks:
        block.dropout = dropout
    model.dropout = dropout
    plain, wanted = gradients(model, tokens)
    for frugal in (MemorySavings(0, 1, selective=3), MemorySavings(1, 1, selective=1)):
        model.frugal = frugal
        loss, got = gradients(model, tokens)
        assert loss == plain
        assert all(torch.equal(got[name], wanted[name]) for name in wanted), frugal


class Products(TorchDispatchMode):
    """Counts matrix products and attention, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func in PRODUCTS | ATTENTION
        return func(*args, **kwargs or {})


@each("bf16", [False, True])
def test_selective_recomputation_repeats_no_product(bf16: bool) -> None:
    model, tokens = gpt(depth=3), torch.randint(0, 64, (3, 16))
    counts = []
    for frugal in (MemorySavings(), MemorySavings(0, 1, selective=3), MemorySavings(3, 1)):
        model.frugal = frugal
        with Products() as products:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = model(tokens, tokens)
            loss.backward()
        counts.append(products.count)
    plain, selective, whole = counts
    assert selective == plain > 3 * 8
    # query, key, value, attention, projection, gate, up
    assert whole >= plain + 3 * 7


def saved_bytes(model: GPT, tokens: torch.Tensor) -> int:
    """Bytes that the forward pass keeps for the backward pass, without weights."""
    weights, kept = {p.data_ptr() for p in model.parameters()}, {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.data_ptr() not in weights:
            kept[x.data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(tokens, tokens)
    return sum(kept.values())


def test_memory_settings_save_memory() -> None:
    model, tokens = gpt(depth=4, vocab=4096), torch.randint(0, 64, (4, 16))
    plain = saved_bytes(model, tokens)
    model.frugal = MemorySavings(0, 8)
    chunked = saved_bytes(model, tokens)
    model.frugal = MemorySavings(4, 8)
    both = saved_bytes(model, tokens)
    assert plain - chunked > 64 * 4096 * 4, "the logits of all 64 positions"
    assert both < 0.2 * chunked


def test_dropout_is_off_in_evaluation() -> None:
    torch.manual_seed(0)
    model = GPT(ModelDims(2, 64, 16), dropout=0.5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    tokens = torch.randint(0, 64, (2, 16))
    assert model(tokens, tokens).item() != model(tokens, tokens).item()
    model.eval()
    assert model(tokens, tokens).item() == model(tokens, tokens).item()
