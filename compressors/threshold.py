"""Threshold-v: the elements of magnitude v or more, and their positions.

x'_i = x_i where |x_i| >= min(v, max |x|) in its tensor and x_i != 0, else 0.

v is absolute, so the number of elements sent follows the gradient: it is large early in training
and falls with the gradient's norm. With error feedback (the default) an element waits in the
residual until it reaches v. The largest element of a tensor is always sent; without this rule a
tensor below v would send nothing.

Biased; ||x - x'||^2 <= (1 - 1/d) ||x||^2 for a tensor of d elements, with equality if one element
reaches the limit by a hair and all others miss it by one. It is below d v^2, too, whatever x is:
Sahu et al. show that of all sparsifiers with the same bytes in a whole run, this one has the
smallest sum of errors.
Wire: 32 bits per value and about 2 + log2(d/K) per position for K elements sent of d (Elias-Fano
coding, `gcbench.ops.selection`), 8.6 bits at K = d / 100. Sizes depend on the data and are sent
first. Two-shot: the owner applies the threshold to the mean, too.
Source: Dutta et al., AAAI 2020, arXiv:1911.08250 (the name); Sahu et al., NeurIPS 2021,
arXiv:2108.00951 (with error feedback); GRACE's code, github.com/sands-lab/grace.
Differs: GRACE's class for torch.distributed has the limit min(v, max x), without the magnitude, so
a tensor of negative elements sends all; its class for Horovod has no such rule. It sends positions
in 32 bits.

>>> import gcbench, torch
>>> method = gcbench.get_compressor("threshold", threshold=2.0)
>>> packed = method.compress(torch.tensor([4.0, -1.0, 0.5, -2.5]))
>>> packed.payload.nbytes
12
>>> method.decompress(packed)
tensor([ 4.0000,  0.0000,  0.0000, -2.5000])
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

import torch
from torch import Tensor

from gcbench import ops
from gcbench.core.claims import Claims
from gcbench.core.compressor import Compressor, Context, Payload, Segments
from gcbench.core.errors import PayloadError
from gcbench.ops.selection import KeptRun


@dataclass(frozen=True)
class Threshold(Compressor):
    """Elements above a fixed magnitude; parts are the positions, in two tensors, and the values."""

    threshold: float = 0.01  # v, the smallest magnitude that is always sent

    collectives: ClassVar[tuple[str, ...]] = ("allgather", "twoshot")
    memory: ClassVar[str] = "residual"
    scratch = True
    variants = ({}, {"threshold": 1.0})

    def __post_init__(self) -> None:
        if not (math.isfinite(self.threshold) and self.threshold > 0):
            raise ValueError(f"threshold={self.threshold}: expected a finite number above 0")

    def encode(self, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        positions, values = ops.selection.reaching(x, ctx.segments, self.threshold)
        return (*ops.selection.pack_positions(positions, x.numel(), "gaps"), values)

    def _open(self, payload: Payload, n: int) -> tuple[Tensor, Tensor]:
        """Return positions, int64, and values, float32, shape (K,) each."""
        if len(payload.parts) != 3:
            raise PayloadError(f"{self.name}: payload has {len(payload.parts)} parts: expected 3")
        total = payload.parts[-1].numel()
        layout = (*ops.selection.position_layout("gaps", n, total), (torch.float32, total))
        if total > n or payload.layout != layout:
            raise PayloadError(f"{self.name}: {total} values of {n} in parts {payload.layout}")
        run = (KeptRun(0, 1, n, total),)
        return ops.selection.sparse_unpack(payload.parts, n, run, "gaps", "fp32", self.name)

    def decode(self, payload: Payload, ctx: Context) -> Tensor:
        positions, values = self._open(payload, ctx.segments.numel)
        return ops.selection.scatter(values, positions, ctx.segments.numel, out=ctx.out)

    def mean(self, payloads: Sequence[Payload], ctx: Context) -> Tensor:
        n = ctx.segments.numel
        return ops.selection.mean([(*self._open(p, n), p.count) for p in payloads], n, out=ctx.out)


class ThresholdClaims(Claims[Threshold], of=Threshold):
    """Contractive: the error is the energy of the elements below the limit."""

    contractive = True
    exact_for = ("signs", "ternary", "sparse")

    @property
    def gaussian_error(self) -> float | None:
        """Return the energy of |x| < v; None if few elements are below it, or few above."""
        normal, v = NormalDist(), self.codec.threshold
        error = normal.cdf(v) - normal.cdf(-v) - 2 * v * normal.pdf(v)
        return error if 0.01 < error < 0.99 else None

    def error_bound(self, x: Tensor, ctx: Context) -> float:
        left = x.double()
        left[ops.selection.reaching(x, ctx.segments, self.codec.threshold)[0]] = 0
        return float(left.square().sum())

    def delta(self, segments: Segments) -> float:
        """Return 1/d for the longest tensor, attained if all magnitudes are almost equal."""
        return 1 / max(1, *segments.lengths, 1)
