"""PowerSGD: each matrix of the gradient as a product of rank r, by one step of power iteration.

M, n x m, is a tensor of at least two dimensions reshaped to shape[0] x rest.
P = mean_i(M_i Q);  P^ = orthonormalize(P);  Q' = mean_i(M_i^T P^);  M' = P^ Q'^T.
The next step starts from Q' (warm start); the first Q is N(0, 1) from the shared seed.

Biased. Linear: workers with gradients M_i compute the same M' as one worker with their mean M. P^
has orthonormal columns and M' = P^ P^^T M is a projection, so the error ||M - M'|| is at most
||M||, and at least that of the best approximation of rank r; it is 0 if r >= rank(M). For a normal
Q, E||M - M'||^2 <= (1 - r / min(n, m)) ||M||^2. Proof: let s_i be the expected squared length of
the projection of the i-th left singular vector on the span of P^. The s_i sum to r, and s_i
increases with the singular value sigma_i, by symmetry and the convexity of log det in log sigma.
Wire: two all-reduces of float32 with r n (P) and then r m (Q') values per matrix. Vectors, scalars
and matrices with r (n + m) >= n m are sent uncompressed in the first.
Source: Vogels et al., NeurIPS 2019, arXiv:1905.13727, algorithms 1 and 2; the residual is computed
from the global reconstruction, as in algorithm 2.
Differs: the authors' code divides each column of P by its norm plus an epsilon, so Q stays 0 after
one gradient of zeros. Here a column of P that depends on the others is replaced by a random one, so
P^ is always orthonormal (test_powersgd.py::test_warm_start_survives_zeros). Q is orthonormalized
between steps, which preserves its span and bounds the magnitude of P by that of the gradient.

>>> import gcbench, torch
>>> method = gcbench.get_compressor("powersgd", rank=1)
>>> x = torch.tensor([4.0, -1.0, 0.5, -2.5])
>>> packed = method.compress(torch.outer(x, x))
>>> packed.payload.nbytes, torch.outer(x, x).nbytes
(32, 64)
>>> torch.allclose(method.decompress(packed), torch.outer(x, x), atol=1e-5)
True
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gcbench import ops
from gcbench.core.claims import Claims
from gcbench.core.compressor import (
    Context,
    Layout,
    MultiRoundCompressor,
    Payload,
    Segments,
    check_finite,
)
from gcbench.ops.random import normal

LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class PowerSGD(MultiRoundCompressor):
    """Low-rank approximation in two rounds; the state is Q of all matrices, r rows of m each."""

    rank: int = 2  # columns of P and Q; the paper uses 2 for images, 4 for language
    warm_start: bool = True  # False: draw a new Q at every step

    memory: ClassVar[str] = "residual"
    scratch = True
    variants = ({}, {"rank": 1}, {"rank": 4}, {"warm_start": False})

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank={self.rank}: expected at least 1 column")

    def _tensors(self, segments: Segments) -> Iterator[tuple[slice, int, int]]:
        """Yield each tensor's range in the bucket, and n, m, or size, 0 if it is not compressed."""
        for start, shape in segments.tensors:
            n, m = shape[0] if shape else 1, math.prod(shape[1:])
            thin = len(shape) > 1 and self.rank * (n + m) < n * m
            yield (slice(start, start + n * m), *((n, m) if thin else (n * m, 0)))

    def _sizes(self, segments: Segments, part: int) -> list[int]:
        """Return the number of values of each tensor in round `part`."""
        shapes = [(n, m) for _, n, m in self._tensors(segments)]
        return [self.rank * m if part else self.rank * n if m else n for n, m in shapes]

    def initial_state(self, ctx: Context) -> Tensor:
        """Return N(0, 1) draws for all Q, float32, 1-D."""
        return normal(ctx.key, sum(self._sizes(ctx.segments, 1)))

    def in_rounds(
        self, x: Tensor, state: Tensor, ctx: Context
    ) -> Generator[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Run one power iteration per matrix; `p` and `q` are P^T, (r, n), and Q^T, (r, m)."""
        tensors = list(self._tensors(ctx.segments))
        matrices = [x[place].view(n, m) for place, n, m in tensors if m]

        q = self._factors(state, [m for _, _, m in tensors if m])
        p = [q_i @ matrix.T for q_i, matrix in zip(q, matrices, strict=True)]
        products = iter(p)
        mean = yield _joined(x, [next(products) if m else x[place] for place, _, m in tensors])

        pieces = torch.split(check_finite(mean), self._sizes(ctx.segments, 0))
        p = [
            ops.lowrank.orthonormalize(piece.view(self.rank, n))
            for piece, (_, n, m) in zip(pieces, tensors, strict=True)
            if m
        ]
        mean = yield _joined(x, [p_i @ matrix for p_i, matrix in zip(p, matrices, strict=True)])

        q = self._factors(check_finite(mean), [m for _, _, m in tensors if m])
        out = torch.empty_like(x) if ctx.out is None else ctx.out
        self._rebuild(pieces, p, q, ctx.segments, out)
        if not self.warm_start:
            return out, self.initial_state(ctx._replace(key=ctx.key._replace(step=ctx.step + 1)))
        return out, _joined(x, [ops.lowrank.orthonormalize(q_i) for q_i in q])

    def decode(self, payload: Payload, ctx: Context) -> Tensor:
        """Return the result of the rounds: P^ Q'^T, and the uncompressed tensors."""
        first, second = map(check_finite, payload.parts)
        shapes = [(n, m) for _, n, m in self._tensors(ctx.segments)]
        pieces = torch.split(first, self._sizes(ctx.segments, 0))
        p = [
            ops.lowrank.orthonormalize(piece.view(self.rank, n))
            for piece, (n, m) in zip(pieces, shapes, strict=True)
            if m
        ]
        q = self._factors(second, [m for _, m in shapes if m])
        out = first.new_empty(ctx.segments.numel) if ctx.out is None else ctx.out
        self._rebuild(pieces, p, q, ctx.segments, out)
        return out

    def _rebuild(
        self,
        pieces: Sequence[Tensor],
        p: Sequence[Tensor],
        q: Sequence[Tensor],
        segments: Segments,
        out: Tensor,
    ) -> None:
        """Write P^ Q'^T of each matrix, and the other tensors from the first mean, to `out`."""
        factors = zip(p, q, strict=True)
        for piece, (place, _, m) in zip(pieces, self._tensors(segments), strict=True):
            if m:
                ops.lowrank.product(*next(factors), out=out[place])
            else:
                torch.clamp(piece, -LARGEST, LARGEST, out=out[place])

    def _factors(self, values: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Split values into matrices of r rows of these lengths."""
        pieces = torch.split(values, [self.rank * length for length in lengths])
        return [piece.view(self.rank, -1) for piece in pieces]

    def layout(self, segments: Segments, count: int = 1) -> Layout:
        first, second = (sum(self._sizes(segments, part)) for part in (0, 1))
        return ((torch.float32, first), (torch.float32, second))


def _joined(x: Tensor, pieces: Sequence[Tensor]) -> Tensor:
    """Concatenate all values; infinities become the largest float32, NaN becomes 0."""
    return torch.cat([x.new_empty(0), *(piece.view(-1) for piece in pieces)]).nan_to_num_()


class PowerSGDClaims(Claims[PowerSGD], of=PowerSGD):
    """Contractive: the approximation is a projection."""

    contractive = True
    portable = False

    @property
    def exact_for(self) -> tuple[str, ...]:
        """Return the ranks of matrices that are exact: up to the method's rank."""
        return tuple(f"rank {rank}" for rank in (1, 2, 4) if rank <= self.codec.rank)

    def settled_error(self, x: Tensor, ctx: Context) -> float | None:
        """Return the error of the best approximation, to 1 % (Eckart and Young 1936).

        Power iteration converges to it if singular value r + 1 is well below the r-th; 1e-6 of the
        energy is a margin for rounding. None without a warm start.
        """
        if not self.codec.warm_start:
            return None
        total = 0.0
        for place, n, m in self.codec._tensors(ctx.segments):
            if m:
                squares = torch.linalg.svdvals(x[place].double().view(n, m)).square()
                best = float(squares[self.codec.rank :].sum())
                total += 1.01 * best + 1e-6 * float(squares.sum())
        return total

    def error_bound(self, x: Tensor, ctx: Context) -> float:
        """Return the bound in expectation over Q, with a margin for rounding."""
        return sum(
            (1 - self.codec.rank / min(n, m) + 2**-18) * float(x[place].double().square().sum())
            for place, n, m in self.codec._tensors(ctx.segments)
            if m
        )

    def delta(self, segments: Segments) -> float | None:
        """Return the minimum r / min(n, m), in expectation over Q; None with a warm start.

        There is no bound for a Q of an earlier gradient: the new gradient may be orthogonal to it.
        """
        if self.codec.warm_start:
            return None
        shapes = [(n, m) for _, n, m in self.codec._tensors(segments) if m]
        return min((self.codec.rank / min(shape) for shape in shapes), default=1.0) - 2.0**-18
