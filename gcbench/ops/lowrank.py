"""Orthonormal vectors for low-rank factors, the same bits wherever the same bits come in."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from gcbench.core.compressor import Key
from gcbench.ops.random import normal

COLLAPSED = 2.0**-80
"""What is left of a vector's energy, as a share, when it lies in the span of the earlier ones: the
vectors come in float32, so anything smaller is the rounding of float64."""


def _dots(rows: Tensor, vector: Tensor) -> list[float]:
    """Return the product of each row, (k, n), with `vector`, (n,), float64.

    The second half of the terms is added to the first until one is left: an order that depends on
    neither machine nor thread count.
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


def orthonormalize(vectors: Tensor) -> Tensor:
    """Return orthonormal rows, float32, shape (r, n), r <= n, that span the rows of `vectors`.

    Gram and Schmidt in float64, sums in a fixed order, each projection taken out twice: the second
    pass removes what rounding left in the first, and two are enough. A row that is zero, in the
    span of the rows before it, or not finite is replaced by normal draws from a fixed stream, made
    orthogonal to them: the result always has rank r and no NaN.

    Raises:
        ValueError: more rows than elements in a row.
    """
    r, n = vectors.shape
    if r > n:
        raise ValueError(f"{r} vectors of {n} elements cannot be orthonormal")
    basis = torch.empty((r, n), dtype=torch.float64, device=vectors.device)
    for j, given in enumerate(vectors.double()):
        done = basis[:j]
        for attempt in itertools.count():
            row = normal(Key(0, 0, attempt), n, vectors.device).double() if attempt else given
            *shares, energy = _dots(torch.cat([done, row[None]]), row)
            rest, left = row, energy
            if j:
                rest = _subtract(row, done, shares)
                rest = _subtract(rest, done, _dots(done, rest))
                [left] = _dots(rest[None], rest)
            if left > COLLAPSED * energy:
                break
        torch.div(rest, left**0.5, out=basis[j])
    return basis.float()
