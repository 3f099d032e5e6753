"""Muon's orthogonal matrices by a quintic Newton-Schulz iteration, with torch's products or those
of muon_kernels.py.

A step multiplies X by p(G) = aI + bG + cG² with G = XXᵀ. Several steps in a row need X only at
their start and end: the next G is p(G)²G, since polynomials in G commute. If one side of X is much
longer, products of G are much smaller than those of X (Gram Newton-Schulz, Zhang, Amsel, Chen and
Dao 2026, dao-lab.ai/blog/2026/gram-newton-schulz). Rounding errors of such a G grow with each step,
so it is computed from X again once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# The constants of torch.optim.Muon, which computes the same one matrix at a time.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS, EPSILON = 5, 1e-7
# Steps that share a G computed from X. In fp16 the error is less than with a G for each step in
# bf16, unless columns differ by four decades, where it is the same. bf16 has too few digits to
# share one. With one for all five, fp32 loses ten times as much.
SHARED = (2, 3)
ASPECT = 2.0  # least ratio of the sides for it; below 1.5 it is more arithmetic


@dataclass(frozen=True)
class Products:
    """The products of an iteration. X: (…, rows, columns); G and H are symmetric and commute."""

    gram: Callable[[Tensor, bool], Tensor]  # X, tall: XXᵀ, or XᵀX if tall
    small: Callable[[Tensor, Tensor, float, float, float], Tensor]  # G, H, a, b, c: aI + bG + cGH
    apply: Callable[[Tensor, Tensor, float, bool], Tensor]  # X, G, a, tall: aX + GX, or aX + XG


def _gram(matrices: Tensor, tall: bool) -> Tensor:
    return matrices.mT @ matrices if tall else matrices @ matrices.mT


def _small(gram: Tensor, other: Tensor, identity: float, own: float, factor: float) -> Tensor:
    # On a GPU what is added is copied first.
    out = _add_product(gram)(gram, gram, other, beta=own, alpha=factor) if own else gram @ other
    if identity:
        out.diagonal(dim1=-2, dim2=-1).add_(identity)
    return out


def _apply(matrices: Tensor, gram: Tensor, own: float, tall: bool) -> Tensor:
    pair = (matrices, gram) if tall else (gram, matrices)
    return _add_product(gram)(matrices, *pair, beta=own)


def _add_product(matrices: Tensor) -> Callable[..., Tensor]:
    return torch.addmm if matrices.dim() == 2 else torch.baddbmm


TORCH = Products(_gram, _small, _apply)


def norms(matrices: Tensor) -> Tensor:
    return torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True).clamp(min=EPSILON)


def iterate(matrices: Tensor, products: Products = TORCH) -> Tensor:
    """X ← aX + (bG + cG²)X with G = XXᵀ, or from the right with G = XᵀX if that is smaller."""
    for steps in shared(matrices):
        matrices = _steps(matrices, steps, products)
    return matrices


def shared(matrices: Tensor) -> Sequence[int]:
    """Numbers of steps that share a G computed from X."""
    short, long = sorted(matrices.shape[-2:])
    alone = long < ASPECT * short or matrices.dtype == torch.bfloat16
    return (1,) * STEPS if alone else SHARED


def _steps(matrices: Tensor, count: int, products: Products) -> Tensor:
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    gram = products.gram(matrices, tall)
    if count == 1:
        gram = products.small(gram, gram, 0.0, b, c)
        return products.apply(matrices, gram, a, tall)
    return products.apply(matrices, _polynomial(gram, count, products), 0.0, tall)


def _polynomial(gram: Tensor, count: int, products: Products) -> Tensor:
    """The product of the polynomials of `count` steps."""

    def times(one: Tensor, other: Tensor) -> Tensor:
        return products.small(one, other, 0.0, 0.0, 1.0)

    product = None
    for left in reversed(range(count)):
        one = products.small(gram, gram, *COEFFICIENTS)
        product = one if product is None else times(product, one)
        if left:  # in two lines, so that the first G is freed before the third
            gram = times(gram, one)
            gram = times(gram, one)
    assert product is not None, "at least one step"
    return product


def scaled(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Matrices of norm 1 in `dtype`, without a copy of them in their own."""
    out = torch.empty_like(matrices, dtype=dtype)
    return torch.div(matrices, norms(matrices), out=out)


def orthogonal(matrices: Tensor, products: Products = TORCH) -> Tensor:
    """Approximate nearest orthogonal matrices of (…, rows, columns)."""
    return iterate(scaled(matrices, matrices.dtype), products)
