"""Low-rank matrices: products of factors, and orthonormalization.

Equal inputs give equal bits on every machine, because sums have a fixed order.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from gcbench.core.compressor import Key
from gcbench.ops.dispatch import operation, output, vector
from gcbench.ops.random import normal
from gcbench.ops.statistics import FLOAT_MAX


@operation()
def _product(left: Tensor, right: Tensor, rank: int, rows: int, columns: int, out: Tensor) -> None:
    total = left[0].unsqueeze(1) * right[0]
    for a, b in zip(left[1:], right[1:], strict=True):
        total = total + a.unsqueeze(1) * b
    torch.clamp(total, -FLOAT_MAX, FLOAT_MAX, out=out.view(rows, columns))


def product(left: Tensor, right: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return left^T right, float32, shape (n m,), clamped to the finite floats.

    `left`: float32, shape (r, n), `right`: shape (r, m), r at least 1; the r products of each
    element are added in order. `out`: the output tensor.
    """
    (rank, rows), columns = left.shape, right.shape[1]
    left = vector(left, torch.float32, rank * rows, "left")
    right = vector(right, torch.float32, rank * columns, "right")
    out = output(out, torch.float32, rows * columns, left.device)
    _product(left, right, rank, rows, columns, out)
    return out


# ---- orthonormal vectors -------------------------------------------------------------------------

COLLAPSED = 2.0**-80
"""A vector counts as linearly dependent if at most this fraction of its squared norm remains after
subtracting its projections on the earlier vectors. Inputs are float32, so a smaller rest is
rounding error of float64."""


def _dots(rows: Tensor, vector: Tensor) -> list[float]:
    """Return the product of each row, (k, n), with `vector`, (n,), float64.

    Terms are summed by halving, an order that depends on neither machine nor thread count.
    """
    terms = rows * vector
    width = 1 << max(0, terms.shape[1] - 1).bit_length()
    terms = torch.nn.functional.pad(terms, (0, width - terms.shape[1]))
    while width > 1:
        width //= 2
        terms = terms[:, :width] + terms[:, width:]
    values: list[float] = terms[:, 0].tolist()
    return values


def _subtract(vector: Tensor, basis: Tensor, shares: list[float]) -> Tensor:
    for row, share in zip(basis, shares, strict=True):
        vector = vector - row * share
    return vector


@operation()
def _orthonormalize(vectors: Tensor, r: int, n: int, collapsed: float, out: Tensor) -> None:
    basis = torch.empty((r, n), dtype=torch.float64, device=vectors.device)
    for j, source in enumerate(vectors.double()):
        done = basis[:j]
        for attempt in itertools.count():
            row = normal(Key(0, 0, attempt), n, vectors.device).double() if attempt else source
            *shares, energy = _dots(torch.cat([done, row[None]]), row)
            rest, left = row, energy
            if j:
                rest = _subtract(row, done, shares)
                rest = _subtract(rest, done, _dots(done, rest))
                [left] = _dots(rest[None], rest)
            if left > collapsed * energy:
                break
        torch.div(rest, math.sqrt(left), out=basis[j])
    out.copy_(basis)


def orthonormalize(vectors: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return orthonormal rows, float32, shape (r, n), r <= n, that span the rows of `vectors`.

    Gram-Schmidt in float64 with sums in a fixed order. Projections are subtracted twice; the second
    pass removes rounding errors of the first. A row that is zero, in the span of the previous rows,
    or not finite is replaced by orthogonalized normal draws with a fixed key, so the result always
    has rank r and no NaN. `out`: the output tensor.

    Raises:
        ValueError: r > n.
    """
    r, n = vectors.shape
    if r > n:
        raise ValueError(f"{r} vectors of {n} elements cannot be orthonormal")
    vectors = vector(vectors, torch.float32, r * n, "vectors")
    out = output(out, torch.float32, r * n, vectors.device).view(r, n)
    arguments = vectors, r, n, COLLAPSED, out
    if _orthonormalize(*arguments):  # kernels do not draw random rows
        _orthonormalize.definition(*arguments)
    return out
