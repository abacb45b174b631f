"""PowerSGD: each matrix of the gradient as a product of two thin ones, by one power iteration.

M = a tensor of at least two dimensions as shape[0] x rest, n x m.
P = mean_i(M_i Q);  P^ = orthonormalize(P);  Q' = mean_i(M_i^T P^);  M' = P^ Q'^T.
Q' starts the next step; the first Q is N(0, 1) from the shared seed.

Biased, linear: the same for workers {M_i} as for their mean M. P^ has orthonormal columns and
M' = P^ P^^T M is a projection, so ||M - M'|| <= ||M||, and never below the best rank r
approximation; exact once r >= rank(M). For a normal Q, E||M - M'||^2 <= (1 - r / min(n, m))
||M||^2: the share of Q's image along the i-th singular vector rises with sigma_i, by symmetry and
the convexity of log det in log sigma, and the shares sum to r.
Wire: two all-reduces of float32, r n and then r m values a matrix: r vectors of n (P), r of m (Q').
Vectors, scalars and matrices with r (n + m) >= n m travel as they are in the first.
Source: Vogels et al., NeurIPS 2019, arXiv:1905.13727, algorithms 1 and 2; error feedback takes
the residual from the global reconstruction, as in algorithm 2.
The authors' code divides each column of P by its norm plus an epsilon, and a gradient of zeros
ends its warm start for good: Q stays 0. Here a collapsed column is replaced, so P^ is orthonormal
in every case (tests/test_powersgd.py::test_warm_start_survives_zeros), and Q is orthonormalized
between steps, which leaves its span as it is and P in the range of the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gcbench import ops
from gcbench.compressor import Key, Layout, MultiRoundCompressor, Segments

LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class PowerSGD(MultiRoundCompressor):
    """Low-rank approximation in two rounds. The state is Q of all matrices, r vectors of m each."""

    rank: int = 2  # columns of P and Q; the paper takes 2 for images, 4 for language
    warm_start: bool = True  # False draws Q anew at every step

    rounds: ClassVar[int] = 2
    memory: ClassVar[str] = "residual"
    contractive = True
    portable = False
    variants = ({}, {"rank": 1}, {"rank": 4}, {"warm_start": False})

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank={self.rank}: a number of columns, at least 1")

    def _tensors(self, segments: Segments) -> Iterator[tuple[slice, int, int]]:
        """Yield each tensor's place in the bucket, and its n and m; (size, 0) if sent as it is."""
        for start, shape in segments.tensors:
            n, m = shape[0] if shape else 1, math.prod(shape[1:])
            thin = len(shape) > 1 and self.rank * (n + m) < n * m
            yield (slice(start, start + n * m), *((n, m) if thin else (n * m, 0)))

    def _sizes(self, segments: Segments, part: int) -> list[int]:
        """Return how many values of round `part` belong to each tensor."""
        shapes = [(n, m) for _, n, m in self._tensors(segments)]
        return [self.rank * m if part else self.rank * n if m else n for n, m in shapes]

    def _cut(self, values: Tensor, segments: Segments, part: int) -> tuple[Tensor, ...]:
        return torch.split(values, self._sizes(segments, part))

    def error_bound(self, x: Tensor, segments: Segments) -> float:
        """Return the bound on the mean over the draws of Q, with room for float32's rounding."""
        return sum(
            (1 - self.rank / min(n, m) + 2**-18) * float(x[place].double().square().sum())
            for place, n, m in self._tensors(segments)
            if m
        )

    def delta(self, segments: Segments) -> float | None:
        """Return the least r / min(n, m), of the mean over Q; None with a warm start.

        The share holds for a Q that is drawn afresh; for one that an earlier gradient has turned
        nothing is proved: the new gradient may be orthogonal to it.
        """
        if self.warm_start:
            return None
        shapes = [(n, m) for _, n, m in self._tensors(segments) if m]
        return min((self.rank / min(shape) for shape in shapes), default=1.0) - 2.0**-18

    def initial_state(self, segments: Segments, key: Key) -> Tensor:
        """Return N(0, 1) draws for all Q, float32, 1-D."""
        return ops.normal(key, sum(self._sizes(segments, 1)))

    def contribute(
        self, x: Tensor, segments: Segments, state: Tensor, means: Sequence[Tensor]
    ) -> Tensor:
        given = means[0] if means else state
        factors = self._cut(given, segments, 0 if means else 1)
        pieces = [x.new_empty(0)]
        for (place, n, m), factor in zip(self._tensors(segments), factors, strict=True):
            if not m:
                pieces += [] if means else [x[place]]
                continue
            matrix = x[place].view(n, m)
            vectors = factor.view(self.rank, -1)
            product = ops.orthonormalize(vectors) @ matrix if means else vectors @ matrix.T
            # Sums beyond float32 saturate; NaN is infinity less infinity.
            pieces.append(product.view(-1).nan_to_num_())
        return torch.cat(pieces)

    def reconstruct(self, means: Sequence[Tensor], segments: Segments) -> Tensor:
        out = means[0].new_empty(segments.numel)
        lefts, rights = (self._cut(self.check_finite(m), segments, i) for i, m in enumerate(means))
        for (place, n, m), p, q in zip(self._tensors(segments), lefts, rights, strict=True):
            if m:
                left = ops.orthonormalize(p.view(self.rank, n))
                torch.mm(left.T, q.view(self.rank, m), out=out[place].view(n, m))
            else:
                out[place] = p
        return out.clamp_(-LARGEST, LARGEST)

    def next_state(self, means: Sequence[Tensor], segments: Segments, key: Key) -> Tensor:
        if not self.warm_start:
            return self.initial_state(segments, key)
        factors = [q.view(self.rank, -1) for q in self._cut(means[1], segments, 1) if len(q)]
        rows = [ops.orthonormalize(factor).view(-1) for factor in factors]
        return torch.cat([means[1].new_empty(0), *rows])

    def layout(self, segments: Segments, count: int = 1) -> Layout:
        first, second = (sum(self._sizes(segments, part)) for part in (0, 1))
        return ((torch.float32, first), (torch.float32, second))
