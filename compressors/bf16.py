"""Brain float: bfloat16, the exponent of float32 and 7 bits of fraction.

x' = flb16(max(-L, min(L, x))), L = (2 - 2^-7) 2^127 = 3.39e38, rounded to nearest, ties to even;
denormals are kept. `rounding="stochastic"` rounds the magnitude up with probability r / 2^16, r the
16 truncated bits, and down otherwise.

Nearest: biased; per element |x - x'| <= max(u |x|, min(|x|, 2^-134), |x| - L), u = 2^-8: rounding,
the denormal range, clipping. Normally distributed input has a relative squared error of
u^2 / (8 ln 2) = 2.75e-6 to within 0.5 %, 64 times float16's. Stochastic: unbiased up to L; an
element between adjacent values l < |x| < h has variance (|x| - l) (h - |x|), at most u^2 x^2 except
for denormals, whose error may exceed their magnitude. Error feedback is therefore refused.
With `noise="correlated"` the errors of N workers partly cancel (Suresh et al., ICML 2022,
arXiv:2203.04925; `gcbench.ops.random`): each worker has the same bytes, mean and variance, and the
mean of equal inputs has a variance of at most step^2 / (4 N^2) per element instead of up to
step^2 / (4 N); the step is
h - l.
Wire: 16 bits per element, up and down. Two-shot and all-gather add in float32; two-shot rounds the
mean again. All-reduce is not supported: 16-bit sums would be rounded at every addition, an error
that no residual contains.
Source: Kalamkar et al. 2019, arXiv:1905.12322: the upper half of a float32; stochastic rounding
as in Gupta et al., ICML 2015, arXiv:1502.02551, section 3.
Differs from a plain cast, which maps values above 3.396e38 to infinity
(test_half.py::test_nothing_infinite_is_sent).

>>> import gcbench, torch
>>> method = gcbench.get_compressor("bf16")
>>> packed = method.compress(torch.tensor([1.0, 0.1, -3.14159, 1e-39]))
>>> packed.payload.nbytes
8
>>> method.decompress(packed).tolist()
[1.0, 0.10009765625, -3.140625, 1.0101904577379033e-39]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from gcbench import ops
from gcbench.core.claims import Claims
from gcbench.core.compressor import Context, Parts, Segments, check_noise
from gcbench.core.registry import LATER

from ._half import HalfPrecision, HalfPrecisionClaims

CORRELATED = {"rounding": "stochastic", "noise": "correlated"}


@dataclass(frozen=True)
class BFloat16(HalfPrecision):
    """The gradient rounded to bfloat16."""

    rounding: str = "nearest"  # or "stochastic"
    noise: str = field(default="independent", metadata=LATER)  # or "correlated" among workers

    dtype: ClassVar[torch.dtype] = torch.bfloat16
    unit: ClassVar[float] = 2.0**-8
    half_step: ClassVar[float] = 2.0**-134
    variants = ({}, {"rounding": "stochastic"}, CORRELATED)

    def __post_init__(self) -> None:
        if self.rounding not in ops.int8.ROUNDINGS:
            raise ValueError(f"rounding={self.rounding!r}: expected 'nearest' or 'stochastic'")
        check_noise(self.noise, self.rounding)

    def encode(self, x: Tensor, ctx: Context) -> Parts:
        if self.rounding == "nearest":
            return super().encode(x, ctx)
        largest = torch.finfo(self.dtype).max
        bits = x.clamp(-largest, largest).view(torch.int32)
        # The sum carries into the upper half with probability r / 2^16, r the lower half. A carry
        # cannot reach the sign bit, because the lower half of the largest value is 0.
        bits = bits + (ops.random.draws_for(x, ctx.draws(self.noise)) >> 8)
        return (bits >> 16).to(torch.int16).view(self.dtype)

    @property
    def claims(self) -> Claims[Any]:
        return StochasticClaims(self) if self.rounding == "stochastic" else super().claims


class StochasticClaims(HalfPrecisionClaims):
    """Unbiased; not contractive, as the error of a denormal may exceed its magnitude."""

    unbiased = True
    two_levels = True
    contractive = False

    @property
    def gaussian_error(self) -> float:
        """Return twice the error of rounding to nearest.

        The means for a step s are s^2 / 12 (nearest) and, over uniform p, E[s^2 p (1 - p)] = s^2/6.
        """
        return 2 * super().gaussian_error

    def error_bound(self, x: Tensor, ctx: Context) -> float | None:
        return None

    def delta(self, segments: Segments) -> float | None:
        return None

    def omega(self, segments: Segments) -> float:
        """Return u^2: p (1 - p) <= 1/4 and a step is at most 2 u |x|, except for denormals."""
        return self.codec.unit**2

    def variance(self, x: Tensor, ctx: Context) -> Tensor:
        size = x.abs().clamp(max=torch.finfo(self.codec.dtype).max)
        low = (size.view(torch.int32) & ~0xFFFF).view(torch.float32)
        high = ((size.view(torch.int32) & ~0xFFFF) + 0x10000).view(torch.float32)
        below, above = size.double() - low.double(), high.double() - size.double()
        return torch.where(below == 0, 0.0, below * above)
