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
from abc import abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

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


class Matrix(NamedTuple):
    """A tensor's range in the bucket, its shape n x m, and its rank; 0 if it is not compressed."""

    place: slice
    n: int
    m: int
    rank: int


class LowRank(MultiRoundCompressor):
    """One power iteration per matrix in two rounds; the state begins with Q^T, r rows of m each."""

    scratch = True

    @abstractmethod
    def rank_of(self, shape: Sequence[int]) -> int:
        """Return the rank for a matrix of this shape, n x m; 0 sends it uncompressed."""

    @abstractmethod
    def following(self, p: Sequence[Tensor], q: Sequence[Tensor], ctx: Context) -> Sequence[Tensor]:
        """Return the parts of the next state, given P^, (r, n), and Q', (r, m), of each matrix."""

    def tensors(self, segments: Segments) -> list[Matrix]:
        """Return all tensors of the bucket; those of fewer than two dimensions have rank 0."""
        result = []
        for start, shape in segments.tensors:
            n, m = shape[0] if shape else 1, math.prod(shape[1:])
            rank = self.rank_of((n, m)) if len(shape) > 1 else 0
            result.append(Matrix(slice(start, start + n * m), n, m, rank))
        return result

    def matrices(self, segments: Segments) -> list[Matrix]:
        """Return the tensors that are compressed."""
        return [t for t in self.tensors(segments) if t.rank]

    def initial_state(self, ctx: Context) -> Tensor:
        """Return N(0, 1) draws for all Q, float32, 1-D."""
        return normal(ctx.key, sum(t.rank * t.m for t in self.matrices(ctx.segments)))

    def in_rounds(
        self, x: Tensor, state: Tensor, ctx: Context
    ) -> Generator[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Run one power iteration per matrix; `p` and `q` are P^T, (r, n), and Q^T, (r, m)."""
        chosen = self.matrices(ctx.segments)
        whole = [x[t.place].view(t.n, t.m) for t in chosen]

        products = (q @ matrix.T for q, matrix in zip(right(state, chosen), whole, strict=True))
        tensors = self.tensors(ctx.segments)
        mean = yield joined(x, [next(products) if t.rank else x[t.place] for t in tensors])

        first, p = mean, self._left(mean, ctx.segments)
        mean = yield joined(x, [p_i @ matrix for p_i, matrix in zip(p, whole, strict=True)])

        q = right(check_finite(mean), chosen)
        return self._rebuild(first, p, q, ctx), joined(x, self.following(p, q, ctx))

    def decode(self, payload: Payload, ctx: Context) -> Tensor:
        """Return the result of the rounds: P^ Q'^T, and the uncompressed tensors."""
        first, second = map(check_finite, payload.parts)
        p, q = self._left(first, ctx.segments), right(second, self.matrices(ctx.segments))
        return self._rebuild(first, p, q, ctx)

    def _pieces(self, mean: Tensor, segments: Segments) -> list[tuple[Tensor, Matrix]]:
        """Return the first round's mean of each tensor: P^T, (r, n), or the tensor."""
        tensors = self.tensors(segments)
        sizes = [t.rank * t.n if t.rank else t.n * t.m for t in tensors]
        return [*zip(torch.split(mean, sizes), tensors, strict=True)]

    def _left(self, mean: Tensor, segments: Segments) -> list[Tensor]:
        """Return P^T, (r, n), of each matrix, orthonormalized."""
        pieces = self._pieces(check_finite(mean), segments)
        return [self.basis(x.view(t.rank, t.n)) for x, t in pieces if t.rank]

    def basis(self, rows: Tensor) -> Tensor:
        """Return orthonormal rows, float32, (r, n), that span these, also if some are dependent."""
        return ops.lowrank.orthonormalize(rows)

    def _rebuild(
        self, mean: Tensor, p: Sequence[Tensor], q: Sequence[Tensor], ctx: Context
    ) -> Tensor:
        """Return P^ Q'^T of each matrix, and the other tensors from the first mean."""
        out = mean.new_empty(ctx.segments.numel) if ctx.out is None else ctx.out
        factors = zip(p, q, strict=True)
        for piece, t in self._pieces(mean, ctx.segments):
            if t.rank:
                ops.lowrank.product(*next(factors), out=out[t.place])
            else:
                torch.clamp(piece, -LARGEST, LARGEST, out=out[t.place])
        return out

    def layout(self, segments: Segments, count: int = 1) -> Layout:
        tensors = self.tensors(segments)
        first = sum(t.rank * t.n if t.rank else t.n * t.m for t in tensors)
        return ((torch.float32, first), (torch.float32, sum(t.rank * t.m for t in tensors)))


@dataclass(frozen=True)
class PowerSGD(LowRank):
    """Low-rank approximation in two rounds; the state is Q of all matrices, r rows of m each."""

    rank: int = 2  # columns of P and Q; the paper uses 2 for images, 4 for language
    warm_start: bool = True  # False: draw a new Q at every step

    memory: ClassVar[str] = "residual"
    variants = ({}, {"rank": 1}, {"rank": 4}, {"warm_start": False})

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank={self.rank}: expected at least 1 column")

    def rank_of(self, shape: Sequence[int]) -> int:
        n, m = shape
        return self.rank if self.rank * (n + m) < n * m else 0

    def following(self, p: Sequence[Tensor], q: Sequence[Tensor], ctx: Context) -> Sequence[Tensor]:
        if not self.warm_start:
            return [self.initial_state(ctx._replace(key=ctx.key._replace(step=ctx.step + 1)))]
        return [ops.lowrank.orthonormalize(q_i) for q_i in q]


def right(values: Tensor, matrices: Sequence[Matrix]) -> list[Tensor]:
    """Return Q^T, (r, m), of each matrix; they are the first values."""
    sizes = [t.rank * t.m for t in matrices]
    pieces = torch.split(values[: sum(sizes)], sizes)
    return [piece.view(t.rank, t.m) for piece, t in zip(pieces, matrices, strict=True)]


def joined(x: Tensor, pieces: Sequence[Tensor]) -> Tensor:
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
        for t in self.codec.matrices(ctx.segments):
            squares = torch.linalg.svdvals(x[t.place].double().view(t.n, t.m)).square()
            total += 1.01 * float(squares[t.rank :].sum()) + 1e-6 * float(squares.sum())
        return total

    def error_bound(self, x: Tensor, ctx: Context) -> float:
        """Return the bound in expectation over Q, with a margin for rounding."""
        return sum(
            (1 - t.rank / min(t.n, t.m) + 2**-18) * float(x[t.place].double().square().sum())
            for t in self.codec.matrices(ctx.segments)
        )

    def delta(self, segments: Segments) -> float | None:
        """Return the minimum r / min(n, m), in expectation over Q; None with a warm start.

        There is no bound for a Q of an earlier gradient: the new gradient may be orthogonal to it.
        """
        if self.codec.warm_start:
            return None
        matrices = self.codec.matrices(segments)
        return min((t.rank / min(t.n, t.m) for t in matrices), default=1.0) - 2.0**-18
