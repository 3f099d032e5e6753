"""torch.autocast of a GPU for fake CPU tensors: on a GPU it computes more functions in fp32, and
their inputs and results take twice the memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

HALF = (torch.bfloat16, torch.float16)
# Of torch/include/ATen/autocast_mode.h: only the type of the result is fp32, by an argument.
RESULT = frozenset({"sum", "prod", "cumsum", "cumprod"})
# And the arguments; with functions of Python that consist of them.
_NAMES = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
    pow __pow__ __rpow__ __rdiv__ __rtruediv__ softplus softmax softmin log_softmax logsumexp
    layer_norm native_layer_norm rms_norm group_norm frobenius_norm nuclear_norm norm normalize
    vector_norm matrix_norm linalg_vector_norm linalg_matrix_norm dist pdist cdist renorm
    cosine_similarity cross_entropy nll_loss nll_loss2d poisson_nll_loss gaussian_nll_loss
    cosine_embedding_loss hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
    margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
    multi_margin_loss binary_cross_entropy_with_logits interpolate upsample
    upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d
    upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
    _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
"""
FP32 = frozenset(_NAMES.split())


class CudaAutocast(TorchFunctionMode):
    """Wherever autocast of the CPU is on."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name in RESULT and _halved(args) and torch.is_autocast_enabled("cpu"):
            if not any(isinstance(one, torch.dtype) for one in (*args, *given.values())):
                given["dtype"] = torch.float32
        elif name in FP32 and torch.is_autocast_enabled("cpu"):
            args, given = tree_map(_fp32, (args, given))
            with torch.autocast("cpu", enabled=False):
                return func(*args, **given)
        return func(*args, **given)


def _halved(args: tuple[Any, ...]) -> bool:
    return bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype in HALF


def _fp32(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in HALF else value
