"""Eight bits per element: linear quantization in blocks, each scaled by its largest magnitude.

a = max |x| of the block;  c = round(127 x / a), an integer in -127..127;  x' = (c / 127) a.

Nearest (ties to even): biased, |x - x'| <= a / 254 per element. The largest element is exact and
elements below a / 254 become 0, so the error is below the input for blocks of any length.
Stochastic: |c| is one of the two integers around y = 127 |x| / a, the upper one with probability
p = y - floor(y): unbiased, variance (a / 127)^2 p (1 - p). For normal input in blocks of 256 the
error is E[a^2] / (12 * 127^2) = 4.8e-5 of the energy with nearest, twice that with stochastic.
With `noise="correlated"` the errors of N workers partly cancel (Suresh et al., ICML 2022,
arXiv:2203.04925; `gcbench.ops.random`): each worker has the same bytes, mean and variance, and the
mean of equal inputs has a variance of at most step^2 / (4 N^2) per element instead of up to
step^2 / (4 N); the step is
a / 127.
Wire: 8 bits per element and one float32 (a) per block: 8.125 bits at 256, up and down; the owner
adds in float32 and encodes the mean again. For normal input, blocks of 64 have 27 % less error and
cost 0.375 bits more; blocks of 4096 save 0.117 bits and have 55 % more. Code -128 is never sent.
Source: Dettmers, ICLR 2016, arXiv:1511.04561: the linear 8-bit quantization compared there, with
blocks as in Dettmers et al., ICLR 2022, arXiv:2110.02861, section 2.1.
Differs from code that sends the scale a / 127: sending a keeps the block's largest element exact,
and blocks near the maximum of float32 finite (test_int8.py::test_block_maxima_are_exact).

>>> import gcbench, torch
>>> method = gcbench.get_compressor("int8")
>>> packed = method.compress(torch.tensor([4.0, -1.0, 0.5, -2.5]))
>>> packed.payload.parts
(tensor([127, -32,  16, -79], dtype=torch.int8), tensor([4.]))
>>> method.decompress(packed)
tensor([ 4.0000, -1.0079,  0.5039, -2.4882])
"""

from __future__ import annotations

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
from gcbench.core.errors import PayloadError
from gcbench.core.registry import LATER

TOP = 127
CORRELATED = {"rounding": "stochastic", "noise": "correlated"}


@dataclass(frozen=True)
class Int8(Compressor):
    """Blockwise absmax quantization to 8 bits. A merged payload is the encoded mean."""

    rounding: str = "nearest"  # or "stochastic"
    granularity: str | int = 256  # elements per block; or "tensor", "model", "column"
    noise: str = field(default="independent", metadata=LATER)  # or "correlated" among workers

    collectives: ClassVar[tuple[str, ...]] = ("twoshot", "allgather", "ring")
    variants = ({}, {"rounding": "stochastic"}, {"granularity": "tensor"}, CORRELATED)

    def __post_init__(self) -> None:
        if self.rounding not in ops.int8.ROUNDINGS:
            raise ValueError(f"rounding={self.rounding!r}: expected 'nearest' or 'stochastic'")
        check_noise(self.noise, self.rounding)

    def encode(self, x: Tensor, ctx: Context) -> Parts:
        draws = ctx.draws(self.noise)
        return ops.int8.encode(x, ctx.segments, self.rounding, draws, out=ctx.parts)

    def _opened(self, payload: Payload, segments: Segments) -> tuple[Tensor, Tensor, int]:
        """Return codes, scales and count; PayloadError for nonzero codes in a block of scale 0."""
        codes, scales = payload.parts
        zero = scales == 0
        if bool(zero.any()):
            silent = ops.statistics.scale_(
                torch.ones_like(codes, dtype=scales.dtype), zero.float(), segments
            )
            if bool(codes[silent != 0].any()):
                raise PayloadError("nonzero codes in a block of scale 0")
        return codes, scales, payload.count

    def decode(self, payload: Payload, ctx: Context) -> Tensor:
        codes, scales, _ = self._opened(payload, ctx.segments)
        return ops.int8.decode(codes, scales, ctx.segments, out=ctx.out)

    def mean(self, payloads: Sequence[Payload], ctx: Context) -> Tensor:
        parts = [self._opened(payload, ctx.segments) for payload in payloads]
        return ops.int8.mean(parts, ctx.segments, out=ctx.out)

    def layout(self, segments: Segments, count: int = 1) -> Layout:
        return ((torch.int8, segments.numel), (torch.float32, len(segments)))


class Int8Claims(Claims[Int8], of=Int8):
    """Rounding to nearest is contractive; stochastic rounding is unbiased."""

    exact_for = ("signs", "ternary", "bytes", "sparse")
    two_levels = True

    @property
    def unbiased(self) -> bool:
        return self.codec.rounding == "stochastic"

    @property
    def contractive(self) -> bool:
        """True for "nearest", and for stochastic rounding in blocks of up to 127^2 - 127 elements.

        The squared norm of n errors below a / 127 is below a^2 if n < 127^2.
        """
        short = isinstance(self.codec.granularity, int) and self.codec.granularity <= TOP**2 - TOP
        return self.codec.rounding == "nearest" or short

    nominal_bits = 8.0

    def _steps(self, x: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        """Return |x| and the step a / 127 of each element's block, float64, (n,) each.

        The step is infinite in a block that is sent as zeros.
        """
        top = ops.statistics.absmax(x, segments).double()
        step = torch.where(top < ops.statistics.TINY, torch.inf, top / TOP)
        return x.double().abs(), ops.statistics.scale_(
            torch.ones_like(x, dtype=step.dtype), step, segments
        )

    def error_bound(self, x: Tensor, ctx: Context) -> float:
        """Return the sum of squared bounds, with a margin for four roundings of 2^-17 of a step."""
        size, step = self._steps(x, ctx.segments)
        if self.unbiased:
            worst = torch.where((size > 0) & (size < TOP * step), (1 + 2**-14) * step, 0.0)
            return float(torch.where(step.isinf(), size, worst).square().sum())
        lost = size < (0.5 - 2**-14) * step  # these become 0
        return float(torch.where(lost, size, (0.5 + 2**-15) * step).square().sum())

    def delta(self, segments: Segments) -> float | None:
        """Return 1 - (d - 1) / 254^2 for the longest block of d elements; None if not above 0.

        The largest element is exact; the others have an error of at most half a step, or with
        stochastic rounding an expected squared error of p (1 - p) <= 1/4 of a squared step.
        """
        longest = max(segments.lengths, default=0)
        delta = 1 - (1 + 2.0**-13) * max(0, longest - 1) / (2 * TOP) ** 2
        return delta if delta > 0 else None

    def omega(self, segments: Segments) -> float | None:
        """Return (d - 1) / 254^2 for the longest block of d elements, as p (1 - p) <= 1/4."""
        if not self.unbiased:
            return None
        return max(0, max(segments.lengths, default=0) - 1) / (2 * TOP) ** 2

    def variance(self, x: Tensor, ctx: Context) -> Tensor:
        size, step = self._steps(x, ctx.segments)
        part = (size / step).frac()
        return torch.where(step.isinf(), 0.0, step.square() * part * (1 - part))
