"""Brain float: bfloat16, the exponent of float32 and 7 bits of fraction.

x' = flb16(max(-L, min(L, x))), L = (2 - 2^-7) 2^127 = 3.39e38, rounded to nearest, ties to even;
denormals are kept.

Biased; per element |x - x'| <= max(u |x|, min(|x|, 2^-134), |x| - L), u = 2^-8: rounding, the
denormal range, clipping. Normal input of any scale has a relative squared error of u^2 / (8 ln 2)
= 2.75e-6 to within 0.5 %, 64 times float16's.
Wire: 16 bits an element, up and down. Two-shot and all-gather add in float32, and two-shot rounds
the mean once more on the way down. There is no all-reduce: halves that are added as halves lose a
bit at every worker, which no residual sees.
Source: Kalamkar et al. 2019, arXiv:1905.12322: the upper half of a float32.
A plain cast sends infinity above 3.396e38; here nothing infinite is ever sent
(tests/test_half.py::test_nothing_infinite_is_sent).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gcbench.compressor import Compressor, Key, Layout, Payload, Segments

LARGEST = torch.finfo(torch.bfloat16).max
UNIT = 2.0**-8  # unit roundoff
HALF_STEP = 2.0**-134  # half the distance of denormals


@dataclass(frozen=True)
class BFloat16(Compressor):
    """The gradient rounded to bfloat16."""

    collectives: ClassVar[tuple[str, ...]] = ("twoshot", "allgather")
    contractive = True
    exact_for = ("signs", "ternary", "integers", "bytes", "sparse")

    def nominal_bits(self) -> float:
        return 16.0

    def gaussian_error(self) -> float:
        """Return u^2 / 3 times the mean of 4^-f, f uniform on [0, 1): the place in a binade."""
        return UNIT**2 / (8 * math.log(2))

    def error_bound(self, x: Tensor, segments: Segments) -> float:
        """Return the sum of the squared bounds; an element up to 2^-134 is lost: it counts full."""
        size = x.double().abs()
        rounding = torch.maximum(UNIT * size, size.clamp(max=HALF_STEP))
        return float(torch.maximum(rounding, size - LARGEST).square().sum())

    def encode(self, x: Tensor, segments: Segments, shared: Tensor, key: Key) -> Payload:
        return Payload((x.clamp(-LARGEST, LARGEST).to(torch.bfloat16),))

    def decode(self, payload: Payload, segments: Segments, shared: Tensor) -> Tensor:
        self.check(payload, segments)
        return self.check_finite(payload.parts[0].float())

    def layout(self, segments: Segments, count: int = 1) -> Layout:
        return ((torch.bfloat16, segments.numel),)
