"""Orthonormal cosine transforms (DCT-II) of chunks of tensors in two dimensions, and inverses.

C[k, i] = sqrt((2 - [k = 0]) / n) cos(pi (2 i + 1) k / (2 n)): Ahmed, Natarajan and Rao 1974.

A chunk of height x width elements has the coefficients C_height X C_width^T. They are stored chunk
by chunk, left to right and then down, each chunk row by row. NaN becomes 0, and values beyond
float32 become the largest float.

On the CPU a column of n elements, n even, is transformed by halves, because C[k, n - 1 - i] is
C[k, i] for even k and -C[k, i] for odd k: odd coefficients are sums of n / 2 products of the
differences x_i - x_n-1-i, and even ones the transform of the n / 2 sums. Products are added in
order. Other devices multiply matrices, and the last bits depend on their library.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gcbench.ops.dispatch import operation, output, vector

LONGEST = 256
"""The longest side of a chunk."""


class Chunks(NamedTuple):
    """One tensor's chunks: `down` x `across` of them, each of `height` x `width` elements."""

    start: int
    """Index of the tensor's first element in the bucket, and of its first coefficient."""
    down: int
    height: int
    across: int
    width: int

    @property
    def place(self) -> slice:
        """The tensor's range in the bucket, and that of its coefficients."""
        return slice(self.start, self.start + self.down * self.height * self.across * self.width)


@functools.cache
def matrix(n: int) -> Tensor:
    """Return C, rounded from float64 to float32, (n, n), on the CPU; cached, do not modify it."""
    # The angle is reduced in integers, because a large float angle would lose precision.
    angle = [[math.pi * ((2 * i + 1) * k % (4 * n)) / (2 * n) for i in range(n)] for k in range(n)]
    table = torch.tensor(angle, dtype=torch.float64).cos() * math.sqrt(2 / n)
    table[0] = math.sqrt(1 / n)
    return table.float()


class _Table(NamedTuple):
    """Arguments of kernels: a row per tensor with positions of its matrices, and the matrices."""

    rows: tuple[tuple[int, ...], ...]
    matrices: Tensor


@functools.cache
def _packed(n: int, inverse: bool) -> Tensor:
    """Return the matrices that transform a column of n elements, in order of use, 1-D.

    Each is stored term by term: the factors of the first term for all results, then of the second.
    """
    c, levels, m, step = matrix(n), [], n, 1
    while m % 2 == 0:
        levels.append(c[step :: 2 * step, : m // 2])
        m, step = m // 2, 2 * step
    levels.append(c[::step, :m])
    if inverse:
        return torch.cat([level.reshape(-1) for level in reversed(levels)])
    return torch.cat([level.T.reshape(-1) for level in levels])


@functools.lru_cache(maxsize=32)
def _table(chunks: tuple[Chunks, ...], inverse: bool) -> _Table:
    sizes = sorted({n for one in chunks for n in (one.height, one.width)})
    packed = [_packed(n, inverse) for n in sizes]
    starts = itertools.accumulate((len(one) for one in packed), initial=0)
    places = dict(zip(sizes, starts, strict=False))
    rows = tuple((*one, places[one.height], places[one.width]) for one in chunks)
    return _Table(rows, torch.cat([torch.empty(0, dtype=torch.float32), *packed]))


# ---- the definitions -----------------------------------------------------------------------------


def _products(factors: Tensor, terms: Tensor) -> Tensor:
    """Return factors @ terms, (r, t) @ (..., t, c), with the products added in order."""
    total = factors[:, 0:1] * terms[..., 0:1, :]
    for t in range(1, terms.shape[-2]):
        total = total + factors[:, t : t + 1] * terms[..., t : t + 1, :]
    return total


def _forward_columns(x: Tensor) -> Tensor:
    """Transform the second-last axis of `x`, shape (..., n, columns)."""
    n = x.shape[-2]
    c, out, step = matrix(n), torch.empty_like(x), 1
    while x.shape[-2] % 2 == 0:
        half = x.shape[-2] // 2
        low, high = x[..., :half, :], x[..., half:, :].flip(-2)
        out[..., step :: 2 * step, :] = _products(c[step :: 2 * step, :half], low - high)
        x, step = low + high, 2 * step
    out[..., ::step, :] = _products(c[::step, : x.shape[-2]], x)
    return out


def _inverse_columns(x: Tensor) -> Tensor:
    """Return the inverse of `_forward_columns`."""
    n = m = x.shape[-2]
    c, step = matrix(n), 1
    while m % 2 == 0:
        m, step = m // 2, 2 * step
    out = _products(c[::step, :m].T, x[..., ::step, :])
    while m < n:
        step //= 2
        odd = _products(c[step :: 2 * step, :m].T, x[..., step :: 2 * step, :])
        out = torch.cat((out + odd, (out - odd).flip(-2)), -2)
        m *= 2
    return out


@operation()
def _forward(x: Tensor, chunks: Sequence[Sequence[int]], matrices: Tensor, out: Tensor) -> None:
    for one in (Chunks(*row[:5]) for row in chunks):
        blocks = x[one.place].view(one.down, one.height, one.across, one.width).transpose(1, 2)
        if one.width > 1:
            blocks = _forward_columns(blocks.transpose(2, 3)).transpose(2, 3)
        if one.height > 1:
            blocks = _forward_columns(blocks)
        out[one.place].view(blocks.shape).copy_(blocks)
    out.nan_to_num_()


@operation()
def _inverse(x: Tensor, chunks: Sequence[Sequence[int]], matrices: Tensor, out: Tensor) -> None:
    for one in (Chunks(*row[:5]) for row in chunks):
        blocks = x[one.place].view(one.down, one.across, one.height, one.width)
        if one.height > 1:
            blocks = _inverse_columns(blocks)
        if one.width > 1:
            blocks = _inverse_columns(blocks.transpose(2, 3)).transpose(2, 3)
        blocks = blocks.transpose(1, 2)
        out[one.place].view(blocks.shape).copy_(blocks)
    out.nan_to_num_()


# ---- by matrix products --------------------------------------------------------------------------


def _multiplied(x: Tensor, chunks: Sequence[Chunks], inverse: bool, out: Tensor) -> None:
    for one in chunks:
        tall, wide = matrix(one.height).to(x.device), matrix(one.width).to(x.device)
        if inverse:
            blocks = x[one.place].view(one.down, one.across, one.height, one.width)
            blocks = (tall.T @ blocks @ wide).transpose(1, 2)
        else:
            blocks = x[one.place].view(one.down, one.height, one.across, one.width)
            blocks = tall @ (blocks @ wide.T).transpose(1, 2)
        out[one.place].view(blocks.shape).copy_(blocks)
    out.nan_to_num_()


# ---- what callers use ----------------------------------------------------------------------------


def forward(x: Tensor, chunks: Sequence[Chunks], *, out: Tensor | None = None) -> Tensor:
    """Return the coefficients of `x`, float32, shape (n,), rows first and then columns.

    `chunks`: cover `x` once, of at most `LONGEST` x `LONGEST` elements. `out`: the output tensor.
    """
    return _transformed(x, chunks, False, out)


def inverse(x: Tensor, chunks: Sequence[Chunks], *, out: Tensor | None = None) -> Tensor:
    """Return the elements with the coefficients `x`, float32, shape (n,); see `forward`."""
    return _transformed(x, chunks, True, out)


def _transformed(x: Tensor, chunks: Sequence[Chunks], inverse: bool, out: Tensor | None) -> Tensor:
    chunks, n = tuple(chunks), sum(one.place.stop - one.place.start for one in chunks)
    for one in chunks:
        if max(one.height, one.width) > LONGEST:
            raise ValueError(
                f"chunks of {one.height} x {one.width} elements: at most {LONGEST} x {LONGEST}"
            )
    x = vector(x, torch.float32, n)
    out = output(out, torch.float32, n, x.device)
    if not x.is_cpu:
        _multiplied(x, chunks, inverse, out)
        return out
    rows, matrices = _table(chunks, inverse)
    (_inverse if inverse else _forward)(x, rows, matrices, out)
    return out
