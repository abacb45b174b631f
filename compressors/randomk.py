"""Random-k: k random elements of each segment, the same on all workers, scaled to be unbiased.

x'_i = (d/k) x_i for k = max(1, ceil(rho d)) positions drawn uniformly without replacement in a
segment of d, else 0; with `scaled=False` x'_i = x_i there.

Scaled, E[x'] = x with variance (d/k - 1) x_i^2, so E||x' - x||^2 = (d/k - 1) ||x||^2 exactly, 99
times the energy of x at rho = .01. Averaging over workers does not reduce it, because all workers
keep the same positions. Unscaled, E||x' - x||^2 = (1 - k/d) ||x||^2: contractive in expectation,
for error feedback: `--set scaled=false --memory residual`.
Positions: each element draws a random 32-bit integer, and the k largest are kept, ties by lowest
position, so P(kept) is k/d to within 2^-32. Positions follow from seed, step and element, so no
index is sent.
Wire: 32 k bits, 32 rho per element, up and down. All workers have the same positions, so an
all-reduce can sum the values; the sum is divided and scaled once.
Source: Stich et al., NeurIPS 2018, arXiv:1809.07599, definition 2.2 and lemma A.1 (rand_k,
unscaled, with memory). Scaled, from a seed: the subsampling of Konecny et al. 2016,
arXiv:1610.05492, where positions differ between workers; here they are the same, as in Vogels et
al., NeurIPS 2019 (test_randomk.py::test_positions_are_shared_and_fresh).

>>> import gcbench, torch
>>> method = gcbench.get_compressor("randomk", ratio=0.5)
>>> packed = method.compress(torch.tensor([4.0, -1.0, 0.5, -2.5]))
>>> packed.context.shared
tensor([2, 3])
>>> method.decompress(packed)
tensor([ 0.,  0.,  1., -5.])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gcbench import ops
from gcbench.core.claims import Claims
from gcbench.core.compressor import (
    Compressor,
    Context,
    Layout,
    Parts,
    Payload,
    Segments,
    check_finite,
)

FLOAT_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class RandomK(Compressor):
    """Values at positions that all workers share; a payload of `count` workers is their sum."""

    ratio: float = 0.01  # fraction of a segment's elements to keep
    scaled: bool = True  # multiply by d/k: unbiased; False: for error feedback
    granularity: str | int = "tensor"  # or "model", "column", or a group size

    collectives: ClassVar[tuple[str, ...]] = ("allreduce", "allgather")
    variants = ({}, {"scaled": False}, {"ratio": 0.1, "granularity": "model"}, {"ratio": 1.0})

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio={self.ratio}: expected a number above 0 and at most 1")
        Segments.of([(1,)], self.granularity)  # raises UsageError if it is unknown

    def draw_shared(self, ctx: Context) -> Tensor:
        """Return the kept positions, int64, shape (K,), increasing."""
        runs = ops.selection.kept_runs(ctx.segments, self.ratio)
        return ops.selection.random_positions(ctx.key, runs)

    def encode(self, x: Tensor, ctx: Context) -> Parts:
        return ops.selection.gather(x, ctx.shared)

    def decode(self, payload: Payload, ctx: Context) -> Tensor:
        values = check_finite(payload.parts[0]) / payload.count
        if self.scaled:
            runs = ops.selection.kept_runs(ctx.segments, self.ratio)
            factor = ops.selection.kept_values([run.inverse for run in runs], runs)
            # Scaled values saturate instead of exceeding float32.
            values.mul_(factor.to(values.device)).clamp_(-FLOAT_MAX, FLOAT_MAX)
        return ops.selection.scatter(values, ctx.shared, ctx.segments.numel, out=ctx.out)

    def merge(self, payloads: Sequence[Payload], ctx: Context) -> Tensor:
        """Return the sum of the payloads, added in rank order: exact."""
        first, place = payloads[0].parts[0], ctx.part(0)
        total = first.clone() if place is None else place.copy_(first)
        for payload in payloads[1:]:
            total += payload.parts[0]
        return total

    def mean(self, payloads: Sequence[Payload], ctx: Context) -> Tensor:
        """Return the decoded sum, with the bits of an all-reduce in rank order."""
        merged, workers = self.merge(payloads, ctx), sum(payload.count for payload in payloads)
        return self.decode(Payload((merged,), workers), ctx)

    def layout(self, segments: Segments, count: int = 1) -> Layout:
        runs = ops.selection.kept_runs(segments, self.ratio)
        return ((torch.float32, ops.selection.kept_total(runs)),)


class RandomKClaims(Claims[RandomK], of=RandomK):
    """Unbiased if scaled; otherwise contractive in expectation."""

    two_levels = True

    @property
    def unbiased(self) -> bool:
        return self.codec.scaled

    @property
    def contractive(self) -> bool:
        return not self.codec.scaled

    @property
    def exact_for(self) -> tuple[str, ...]:
        return () if self.codec.ratio < 1 else ("signs", "ternary", "integers", "bytes", "sparse")

    @property
    def nominal_bits(self) -> float | None:
        return 32 * self.codec.ratio

    @property
    def gaussian_error(self) -> float | None:
        return 1 / self.codec.ratio - 1 if self.codec.scaled else 1 - self.codec.ratio

    def error_bound(self, x: Tensor, ctx: Context) -> float | None:
        """Return sum (1 - k/d) ||x||^2 over the segments, the expected unscaled error."""
        mean_error = ops.selection.dropped_energy(
            x, ctx.segments, ops.selection.kept_runs(ctx.segments, self.codec.ratio)
        )
        return None if self.codec.scaled else mean_error

    def delta(self, segments: Segments) -> float | None:
        """Return the minimum k/d over segments, in expectation; None for the scaled method."""
        runs = [run for run in ops.selection.kept_runs(segments, self.codec.ratio) if run.length]
        return (
            None if self.codec.scaled else min((run.keep / run.length for run in runs), default=1.0)
        )

    def omega(self, segments: Segments) -> float | None:
        """Return the maximum d/k - 1 over segments; None for the unscaled method."""
        runs = ops.selection.kept_runs(segments, self.codec.ratio)
        return max((run.inverse for run in runs), default=1.0) - 1 if self.codec.scaled else None

    def variance(self, x: Tensor, ctx: Context) -> Tensor | None:
        """Return (d/k - 1) x^2, float64, shape (n,); None for the unscaled method."""
        if not self.codec.scaled:
            return None
        out = x.double().square()
        runs = ops.selection.kept_runs(ctx.segments, self.codec.ratio)
        for (_, rows), run in zip(ctx.segments.views(out), runs, strict=True):
            rows.mul_(run.inverse - 1)
        return out
