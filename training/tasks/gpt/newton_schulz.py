"""Muon's orthogonal matrices by a quintic Newton-Schulz iteration, with torch's products or those
of muon_kernels.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# The constants of torch.optim.Muon, which computes the same one matrix at a time.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS, EPSILON = 5, 1e-7


@dataclass(frozen=True)
class Products:
    """The three products of an iteration; X: (…, rows, columns)."""

    gram: Callable[[Tensor, bool], Tensor]  # X, tall: XXᵀ, or XᵀX if tall
    square: Callable[[Tensor, float, float], Tensor]  # G, b, c: bG + cG²
    apply: Callable[[Tensor, Tensor, float, bool], Tensor]  # X, G, a, tall: aX + GX, or aX + XG


def _gram(matrices: Tensor, tall: bool) -> Tensor:
    return matrices.mT @ matrices if tall else matrices @ matrices.mT


def _square(gram: Tensor, own: float, factor: float) -> Tensor:
    return _add_product(gram)(gram, gram, gram, beta=own, alpha=factor)


def _apply(matrices: Tensor, gram: Tensor, own: float, tall: bool) -> Tensor:
    pair = (matrices, gram) if tall else (gram, matrices)
    return _add_product(gram)(matrices, *pair, beta=own)


def _add_product(matrices: Tensor) -> Callable[..., Tensor]:
    return torch.addmm if matrices.dim() == 2 else torch.baddbmm


TORCH = Products(_gram, _square, _apply)


def norms(matrices: Tensor) -> Tensor:
    return matrices.norm(dim=(-2, -1), keepdim=True).clamp(min=EPSILON)


def iterate(matrices: Tensor, products: Products = TORCH) -> Tensor:
    """X ← aX + (bG + cG²)X with G = XXᵀ, or from the right with G = XᵀX if that is smaller."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    for _ in range(STEPS):
        gram = products.square(products.gram(matrices, tall), b, c)
        matrices = products.apply(matrices, gram, a, tall)
    return matrices


def orthogonal(matrices: Tensor, iterate: Callable[[Tensor], Tensor] = iterate) -> Tensor:
    """Approximate nearest orthogonal matrices of (…, rows, columns)."""
    return iterate(matrices / norms(matrices))
