"""A compiled model and Muon's kernels on a GPU compute what they do without compilation."""

from __future__ import annotations

import pytest

from tests.gpu.conftest import need_compiler, need_gpus
from training.tasks.gpt.model import GPT
from training.tasks.gpt.model_dims import ModelDims


def test_a_compiled_model_has_the_gradients_of_an_eager_one() -> None:
    need_gpus(1)
    need_compiler()
    import torch

    torch.manual_seed(0)
    with torch.device("cuda"):
        eager, compiled = (GPT(ModelDims(4, 320, 256)) for _ in range(2))
        for weight in eager.parameters():  # the residual branches start at zero
            torch.nn.init.normal_(weight, std=0.05)
        tokens = torch.randint(0, 256, (4, 257))
    compiled.load_state_dict(eager.state_dict())
    compiled.compile_parts(2)
    for model in (eager, compiled):
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    for (name, one), other in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        error = (one.grad - other.grad).norm() / one.grad.norm()
        assert error < 1e-3, name  # fp32, in another order


@pytest.mark.parametrize(
    ("shape", "columns"),
    [((3, 768, 768), 256), ((2, 768, 2048), 128), ((2, 2048, 768), 256), ((2, 192, 100), 128)],
)
def test_muon_s_kernels_are_as_exact_as_torch_s_products(
    shape: tuple[int, int, int], columns: int
) -> None:
    need_gpus(1)
    need_compiler()
    import torch

    from training.tasks.gpt.muon import _compiled_update
    from training.tasks.gpt.muon_kernels import in_triton
    from training.tasks.gpt.newton_schulz import orthogonal

    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("the kernels need a GPU with bf16")
    torch.manual_seed(0)
    matrices = torch.randn(shape, device="cuda")
    exact = orthogonal(matrices.double())

    def error(found: torch.Tensor) -> float:
        return float((found.double() - exact).norm() / exact.norm())

    half = matrices.half()
    with_torch, in_bf16 = error(orthogonal(half)), error(orthogonal(matrices.bfloat16()))
    kernels = orthogonal(half, in_triton(columns))
    assert error(kernels) < 1.1 * with_torch and error(kernels) < in_bf16 < 0.02
    # As in a training, from an update in fp32 that one kernel writes in fp16.
    momentum, weight = torch.zeros_like(matrices), torch.tensor(0.1)
    update = torch.compile(_compiled_update(torch.float16), dynamic=False)
    written = update(matrices, momentum, weight)
    torch.testing.assert_close(momentum, 0.1 * matrices)
    assert error(orthogonal(written, in_triton(columns))) < 1.1 * with_torch
