"""The products of Muon's iteration in Triton: one kernel each, and little more than half of the
arithmetic where the result is symmetric.

XXᵀ and products of its polynomials are symmetric: only tiles on and below the diagonal are
computed, each stored twice (as in github.com/KellerJordan/modded-nanogpt). torch.baddbmm copies
what it adds; these kernels read it when a tile is complete. Imported only by compiled runs on GPUs,
which have Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from training.tasks.gpt.newton_schulz import TORCH, Products

# The fastest of five settings each on an H200, for the matrices of depths 12 and 20.
TILE, STEP, STAGES, WARPS = 128, 64, 3, 8
WIDE = 256  # columns of a tile of GX, where the shared memory suffices
GROUP = 8  # rows of tiles computed together, so that they find their inputs in the cache
CAPABILITY = (8, 0)  # has matrix units for bf16


def products(device: torch.device) -> Products:
    """The fastest for matrices in 16 bits on this device."""
    found = torch.cuda.get_device_properties(device)
    room = found.shared_memory_per_block_optin
    fits = [columns for columns in (WIDE, TILE) if _shared_memory(columns) <= room]
    if not fits or (found.major, found.minor) < CAPABILITY:
        return TORCH
    return in_triton(fits[0])


def in_triton(columns: int) -> Products:
    """`columns` of a tile of GX. Matrices with another form than those of a model: by torch."""

    def gram(matrices: Tensor, tall: bool) -> Tensor:
        if not _takes(matrices):
            return TORCH.gram(matrices, tall)
        rows = matrices.mT if tall else matrices
        return _symmetric(rows, rows, 0.0, 0.0, 1.0)

    def small(gram: Tensor, other: Tensor, identity: float, own: float, factor: float) -> Tensor:
        take = _symmetric if _takes(gram) else TORCH.small
        return take(gram, other, identity, own, factor)

    def apply(matrices: Tensor, gram: Tensor, own: float, tall: bool) -> Tensor:
        if not _takes(matrices):
            return TORCH.apply(matrices, gram, own, tall)
        return _add_product(matrices, gram, own, tall, columns)

    return Products(gram, small, apply)


def _shared_memory(columns: int) -> int:
    """Bytes that a product needs of a multiprocessor."""
    return 2 * (TILE + columns) * STEP * STAGES


def _takes(matrices: Tensor) -> bool:
    """The kernels' inner loops have no rest."""
    rows, columns = matrices.shape[-2:]
    return matrices.dim() == 3 and not (rows % STEP or columns % STEP)


def _symmetric(
    matrices: Tensor, others: Tensor, identity: float, own: float, factor: float
) -> Tensor:
    """identity·I + own·M + factor·MNᵀ, which must be symmetric, for each M, N (rows, columns)."""
    count, rows, columns = matrices.shape
    out = matrices.new_empty((count, rows, rows))
    tiles = triton.cdiv(rows, TILE)
    _symmetric_kernel[(tiles * (tiles + 1) // 2, count)](
        matrices,
        others,
        out,
        rows,
        columns,
        *matrices.stride(),
        *others.stride(),
        IDENTITY=identity,
        OWN=own,
        FACTOR=factor,
        TILE=TILE,
        STEP=STEP,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return out


def _add_product(matrices: Tensor, gram: Tensor, own: float, tall: bool, columns: int) -> Tensor:
    count, height, width = matrices.shape
    out = matrices.new_empty(matrices.shape)
    left, right = (matrices, gram) if tall else (gram, matrices)
    tiles = triton.cdiv(height, TILE) * triton.cdiv(width, columns)
    _add_product_kernel[(tiles, count)](
        left,
        right,
        matrices,
        out,
        height,
        width,
        gram.shape[-1],
        *left.stride(),
        *right.stride(),
        *matrices.stride(),
        OWN=own,
        ROWS=TILE,
        COLUMNS=columns,
        STEP=STEP,
        GROUP=GROUP,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return out


@triton.jit
def _symmetric_kernel(  # type: ignore[no-untyped-def]
    x,
    y,
    out,
    rows,
    columns,
    x_batch,
    x_row,
    x_column,
    y_batch,
    y_row,
    y_column,
    IDENTITY: tl.constexpr,  # numbers of Python, which torch.compile would pass as fp64
    OWN: tl.constexpr,
    FACTOR: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    # Tile t of the triangle 0; 1 2; 3 4 5; …
    tile, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    below = ((tl.sqrt(8.0 * tile.to(tl.float32) + 1.0) - 1.0) / 2.0).to(tl.int32)
    below = tl.where(below * (below + 1) // 2 > tile, below - 1, below)  # the root is rounded
    below = tl.where((below + 1) * (below + 2) // 2 <= tile, below + 1, below)
    across = tile - below * (below + 1) // 2
    x += batch * x_batch
    y += batch * y_batch
    out += batch * rows * rows
    i, j = below * TILE + tl.arange(0, TILE), across * TILE + tl.arange(0, TILE)
    steps = tl.arange(0, STEP)
    left = x + (i % rows)[:, None] * x_row + steps[None, :] * x_column
    right = y + (j % rows)[None, :] * y_row + steps[:, None] * y_column
    total = tl.zeros((TILE, TILE), tl.float32)
    for _ in range(0, columns, STEP):
        total = tl.dot(tl.load(left), tl.load(right), total)
        left += STEP * x_column
        right += STEP * y_column
    if OWN != 0:
        added = tl.load(x + (i % rows)[:, None] * x_row + (j % rows)[None, :] * x_column)
        total = FACTOR * total + OWN * added.to(tl.float32)
    if IDENTITY != 0:
        total += tl.where(i[:, None] == j[None, :], IDENTITY, 0.0)
    result = total.to(out.dtype.element_ty)
    # Also within a tile: the next product assumes exact symmetry.
    inside = (i < rows)[:, None] & (i[:, None] >= j[None, :])
    tl.store(out + i[:, None] * rows + j[None, :], result, mask=inside)
    tl.store(out + j[None, :] * rows + i[:, None], result, mask=inside)


@triton.jit
def _add_product_kernel(  # type: ignore[no-untyped-def]
    left,
    right,
    added,
    out,
    height,
    width,
    inner,
    left_batch,
    left_row,
    left_column,
    right_batch,
    right_row,
    right_column,
    added_batch,
    added_row,
    added_column,
    OWN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
):
    tile, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    down, along = tl.cdiv(height, ROWS), tl.cdiv(width, COLUMNS)
    first = tile // (GROUP * along) * GROUP
    size = tl.minimum(down - first, GROUP)
    i = (first + tile % (GROUP * along) % size) * ROWS + tl.arange(0, ROWS)
    j = tile % (GROUP * along) // size * COLUMNS + tl.arange(0, COLUMNS)
    steps = tl.arange(0, STEP)
    left += batch * left_batch
    right += batch * right_batch
    a = left + (i % height)[:, None] * left_row + steps[None, :] * left_column
    b = right + (j % width)[None, :] * right_column + steps[:, None] * right_row
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for _ in range(0, inner, STEP):
        total = tl.dot(tl.load(a), tl.load(b), total)
        a += STEP * left_column
        b += STEP * right_row
    inside = (i < height)[:, None] & (j < width)[None, :]
    if OWN != 0:
        added += batch * added_batch + i[:, None] * added_row + j[None, :] * added_column
        total += OWN * tl.load(added, mask=inside, other=0.0).to(tl.float32)
    out += batch * height * width + i[:, None] * width + j[None, :]
    tl.store(out, total.to(out.dtype.element_ty), mask=inside)
