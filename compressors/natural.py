"""Natural compression: stochastic rounding to a power of two, sent as sign and exponent.

|x| = 2^a (1 + f), 0 <= f < 1, is rounded to 2^(a+1) with probability f and to 2^a otherwise. f is
the fraction of the float, so encoding only compares it with a draw. Denormals, below 2^-126, become
0.

Unbiased; the variance per element is (|x| - 2^a) (2^(a+1) - |x|), at most x^2 / 8, so the method is
contractive, too. For normally distributed input the squared error is (3/4 - ln 2) / ln 2 = .0820 of
the squared norm. Values above 2^127 are rounded down, as 2^128 exceeds float32.
With `noise="correlated"` the errors of N workers partly cancel (Suresh et al., ICML 2022,
arXiv:2203.04925; `gcbench.ops.random`): each worker has the same bytes, mean and variance, and the
mean of equal inputs has a variance of at most step^2 / (4 N^2) per element instead of up to
step^2 / (4 N); the step is
2^a.
Wire: 9 bits per element, without scales. All-gather sends the payloads of all workers down;
two-shot rounds the mean at random again.
Source: Horvath et al. 2019, arXiv:1905.10988: natural compression, omega = 1/8. 0 has one code,
and a payload with infinity, NaN or -0 is refused.

>>> import gcbench, torch
>>> method = gcbench.get_compressor("natural")
>>> packed = method.compress(torch.tensor([4.0, -1.0, 0.75, -2.5]))
>>> method.decompress(packed)
tensor([ 4., -1.,  1., -2.])
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
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
    check_noise,
)
from gcbench.core.registry import LATER


@dataclass(frozen=True)
class Natural(Compressor):
    """Powers of two; a code is the sign and the 8 bits of a float32's exponent."""

    noise: str = field(default="independent", metadata=LATER)  # or "correlated" among workers

    collectives: ClassVar[tuple[str, ...]] = ("allgather", "twoshot", "ring")
    variants = ({}, {"noise": "correlated"})

    def __post_init__(self) -> None:
        check_noise(self.noise)

    def encode(self, x: Tensor, ctx: Context) -> Parts:
        return ops.natural.encode(x, ctx.draws(self.noise), out=ctx.part(0))

    def decode(self, payload: Payload, ctx: Context) -> Tensor:
        return ops.natural.decode(payload.parts[0], ctx.segments.numel, self.name, out=ctx.out)

    def mean(self, payloads: Sequence[Payload], ctx: Context) -> Tensor:
        words = [(payload.parts[0], payload.count) for payload in payloads]
        return ops.natural.mean(words, ctx.segments.numel, self.name, out=ctx.out)

    def layout(self, segments: Segments, count: int = 1) -> Layout:
        return ((torch.int32, ops.packing.packed_words(segments.numel, ops.natural.BITS)),)


class NaturalClaims(Claims[Natural], of=Natural):
    """Unbiased and contractive: the variance is at most x^2 / 8."""

    unbiased = True
    two_levels = True
    contractive = True
    exact_for = ("signs", "ternary")
    nominal_bits = 9.0
    gaussian_error = (0.75 - math.log(2)) / math.log(2)

    def error_bound(self, x: Tensor, ctx: Context) -> float:
        """Return ||x||^2 / 8, in expectation; denormals and values above 2^127 count fully."""
        size = x.double().abs()
        share = torch.where((size >= 2.0**-126) & (size <= 2.0**127), 1 / 8, 1.0)
        return float((share * size.square()).sum())

    def delta(self, segments: Segments) -> float:
        return 7 / 8

    def omega(self, segments: Segments) -> float:
        return 1 / 8

    def variance(self, x: Tensor, ctx: Context) -> Tensor:
        size = x.double().abs()
        low = ops.natural.power((x.view(torch.int32) & 0x7FFFFFFF) >> 23).double()
        return (size - low) * (2 * low - size).clamp_(min=0)

    def variance_bound(self, x: Tensor, ctx: Context) -> float:
        return float(x.double().square().sum()) / 8
