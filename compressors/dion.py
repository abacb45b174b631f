"""Dion: low-rank factors of the momentum are exchanged; orthonormalized, they are the update.

Worker i has a momentum M_i, n x m, of each matrix, a tensor of shape[0] x rest. The rank is
ceil(rank_fraction min(n, m)), and the first Q is N(0, 1) from the shared seed:
    M_i <- M_i + G_i;   P = orthonormalize(mean_i(M_i Q));   R = mean_i(M_i^T P);
    M_i <- M_i - (1 - mu) P R^T;   Q <- R, each column divided by its norm + 1e-8;
    theta <- theta - lr (sqrt(n / m) P Q^T + weight_decay theta).
orthonormal=True takes Q = orthonormalize(R) instead (Orth-Dion).

Biased. Linear: P and R are those of the mean M of the M_i, so the parameters equal, up to rounding,
those of Dion on averaged gradients, while the M_i differ. At full rank P Q^T spans M.
Contractive: P R^T = P P^T M is a projection of M.
Tensors of fewer than two dimensions, and those that stay dense, follow sign(M) with M <- mu M + G:
Lion with both betas equal to mu. Embeddings are matrices here.
Wire: two all-reduces of float32, with r n (P) and r m (R) values per matrix; other tensors are sent
uncompressed in the first.
Source: Ahn et al. 2025, arXiv:2504.05295; code: microsoft/dion, dion_simple.py. Orth-Dion: Nakamori
et al. 2026, arXiv:2605.16341.
A matrix whose mean momentum is 0 does not move and keeps its Q.
Differs: the authors' distributed code transposes matrices with n < m, averages gradients where
r (n + m) >= n m, and refuses tensors of more than two dimensions; here factors always travel. The
authors give embeddings and the last layer (here: --dense-last) to Lion or AdamW.

>>> import gcbench, torch
>>> method = gcbench.get_compressor("dion")
>>> x = torch.tensor([4.0, -1.0, 0.5, -2.5])
>>> packed = method.compress(torch.outer(x, x))
>>> packed.payload.nbytes, torch.outer(x, x).nbytes
(32, 64)
>>> torch.allclose(method.decompress(packed), torch.outer(x, x), atol=1e-5)
True
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gcbench import ops
from gcbench.core.claims import Claims
from gcbench.core.compressor import Context, Key, Segments
from gcbench.core.memory import Memory
from gcbench.core.rule import UpdateRule
from gcbench.ops.random import normal

from .powersgd import LowRank, Matrix, right


@dataclass(frozen=True)
class DecoupledMomentum(Memory):
    """A momentum per worker, of which only the part that was sent decays."""

    mu: float = 0.95

    buffers: ClassVar[tuple[str, ...]] = ("momentum",)
    feedback: ClassVar[bool] = True
    contracting: ClassVar[bool] = True
    has_momentum: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.mu < 1:
            raise ValueError(f"mu={self.mu}: expected at least 0, below 1")

    def offer(self, gradient: Tensor, ctx: Context) -> Tensor:
        return ctx.state["momentum"].add_(gradient)

    def keep(self, offered: Tensor, sent: Tensor, ctx: Context) -> None:
        ctx.state["momentum"].sub_(sent, alpha=1 - self.mu)

    def dense(self) -> Memory:
        return self


@dataclass(frozen=True)
class Orthonormalized(UpdateRule):
    """sqrt(n / m) P Q^T of each matrix, and the signs of tensors without factors."""

    codec: Dion

    of_factors: ClassVar[bool] = True

    def update(self, mean: Tensor, ctx: Context) -> Tensor:
        direction = mean.sign_()
        if "state" not in ctx.joint:  # all tensors are dense
            return direction
        matrices = self.codec.matrices(ctx.segments)
        for t, p, q in zip(matrices, *factors(ctx.joint["state"], matrices), strict=True):
            update = ops.lowrank.product(p.view(t.rank, t.n), q, out=direction[t.place])
            update.mul_(math.sqrt(t.n / t.m))
        return direction


@dataclass(frozen=True)
class Dion(LowRank):
    """Low-rank factors of the momentum; the state is Q of all matrices, then P."""

    rank_fraction: float = 0.25  # the source: 1/4 nearly equals full rank at 3B parameters
    mu: float = 0.95
    orthonormal: bool = False

    memory: ClassVar[Any] = DecoupledMomentum
    recipe: ClassVar[Mapping[str, Any]] = {"lr": 0.01, "decay": "update"}
    variants = ({}, {"orthonormal": True})

    def __post_init__(self) -> None:
        if not 0 < self.rank_fraction <= 1:
            raise ValueError(f"rank_fraction={self.rank_fraction}: expected more than 0, at most 1")
        if not 0 <= self.mu < 1:
            raise ValueError(f"mu={self.mu}: expected at least 0, below 1")

    @property
    def memory_options(self) -> Mapping[str, Any]:
        return {"mu": self.mu}

    @property
    def rule(self) -> UpdateRule:
        return Orthonormalized(self)

    def rank_of(self, shape: Sequence[int]) -> int:
        return math.ceil(self.rank_fraction * min(shape))

    def initial_state(self, ctx: Context) -> Tensor:
        """Return N(0, 1) draws for all Q, which depend on seed and shape, and zeros for all P."""
        matrices, key = self.matrices(ctx.segments), ctx.key._replace(offset=0)
        q = [normal(key, t.rank * t.m) for t in matrices]
        p = torch.zeros(sum(t.rank * t.n for t in matrices), dtype=torch.float32)
        return torch.cat([*q, p])

    def in_rounds(
        self, x: Tensor, state: Tensor, ctx: Context
    ) -> Generator[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Run the rounds; a matrix without a gradient does not move, and its Q waits."""
        mean, new = yield from super().in_rounds(x, state, ctx)
        matrices = self.matrices(ctx.segments)
        for old, p, q in zip(right(state, matrices), *factors(new, matrices), strict=True):
            if not q.any():
                q.copy_(old)
                p.zero_()
        return mean, new

    def following(self, p: Sequence[Tensor], q: Sequence[Tensor], ctx: Context) -> Sequence[Tensor]:
        return [*map(self._unit, q), *p]

    def _unit(self, r: Tensor) -> Tensor:
        """Return Q^T, (r, m), of R^T; rows of zeros do not change."""
        rows = Segments.of([r.shape[1:]] * len(r))
        norms = ops.statistics.moments(r.view(-1), rows)[1].sqrt().unsqueeze(1)
        unit = self.basis(r) if self.orthonormal else r / (norms + 1e-8)
        return torch.where(norms > 0, unit, 0.0).float()

    def basis(self, rows: Tensor) -> Tensor:
        """By LAPACK's QR: Gram-Schmidt, which suits a few rows, takes seconds for hundreds.

        Normal draws replace rows of zeros, so that a matrix without gradients moves later.
        """
        filled = rows.any(dim=1, keepdim=True)
        if not filled.all():
            draws = normal(Key(0, 0, 0), rows.numel()).to(rows.device).view_as(rows)
            rows = torch.where(filled, rows, draws)
        columns, upper = torch.linalg.qr(rows.T.double())
        columns[:, upper.diagonal() < 0] *= -1  # as Gram-Schmidt: in the direction of the rows
        basis: Tensor = columns.T.float().contiguous()
        return basis


def factors(state: Tensor, matrices: Sequence[Matrix]) -> tuple[Sequence[Tensor], list[Tensor]]:
    """Return views of P^T, 1-D, and of Q^T, (r, m), of each matrix."""
    q = right(state, matrices)
    return torch.split(state[sum(map(Tensor.numel, q)) :], [t.rank * t.n for t in matrices]), q


class DionClaims(Claims[Dion], of=Dion):
    """Contractive: the approximation is a projection."""

    contractive = True
    portable = False
    exact_for = ("rank 1",)

    def error_bound(self, x: Tensor, ctx: Context) -> float:
        """Return PowerSGD's bound in expectation over Q, with a margin for rounding."""
        return sum(
            (1 - t.rank / min(t.n, t.m) + 2**-14) * float(x[t.place].double().square().sum())
            for t in self.codec.matrices(ctx.segments)
        )

    def synchronized(self, means: Iterable[Tensor], ctx: Context) -> Iterator[Tensor]:
        """Yield the updates of dion_simple.py, and signed momentum for the other tensors."""
        codec, matrices = self.codec, self.codec.matrices(ctx.segments)
        q = right(codec.initial_state(ctx).double(), matrices)
        momentum = torch.zeros(ctx.segments.numel, dtype=torch.float64)
        for mean in means:
            momentum += mean
            update, sent = momentum.sign(), momentum.clone()
            for i, t in enumerate(matrices):
                whole = momentum[t.place].view(t.n, t.m)
                p = torch.linalg.qr(whole @ q[i].T)[0]
                r = whole.T @ p
                unit, upper = torch.linalg.qr(r)
                unit *= upper.diagonal().sign()
                q[i] = unit.T if codec.orthonormal else (r / (r.norm(dim=0) + 1e-8)).T
                update[t.place] = math.sqrt(t.n / t.m) * (p @ q[i]).view(-1)
                sent[t.place] = (p @ r.T).view(-1)
            momentum -= (1 - codec.mu) * sent
            yield update

    def uncompressed(self, gradients: Iterable[Tensor], warm_up: int) -> Iterator[Tensor]:
        """Yield signed momentum: without factors, all tensors are dense."""
        momentum = torch.zeros(())
        for g in gradients:
            momentum = momentum + g
            yield momentum.sign()
            momentum = momentum.sub(momentum, alpha=1 - self.codec.mu)
