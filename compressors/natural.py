"""Natural compression: sign and exponent, the mantissa rounded away at random.

|x| = 2^a (1 + f), 0 <= f < 1, goes to 2^(a+1) with probability f and to 2^a otherwise: f is the
mantissa of the float, so nothing is computed but a comparison. Denormals, below 2^-126, go to 0.

Bias and variance: unbiased; the variance of an element is (|x| - 2^a) (2^(a+1) - |x|), at most
x^2 / 8, so it contracts, too. Normal input of any scale loses (3/4 - ln 2) / ln 2 = .0820 of its
squared norm. Above 2^127 nothing is rounded up: the next power is no float32.
Wire: 9 bits an element, up and down, no scale; two-shot draws again for the mean.
Source: Horvath et al. 2019, arXiv:1905.10988: natural compression, omega = 1/8. 0 has one code,
and a payload with infinity, NaN or -0 is refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gcbench import ops
from gcbench.compressor import Compressor, Key, Layout, Payload, Segments
from gcbench.errors import PayloadError

BITS = 9
TOP = 254  # the exponent's code of 2^127; 255 are infinity and NaN


@dataclass(frozen=True)
class Natural(Compressor):
    """Powers of two; a code is the sign and the 8 bits of a float32's exponent."""

    collectives: ClassVar[tuple[str, ...]] = ("allgather", "twoshot")
    unbiased = True
    contractive = True
    exact_for = ("signs", "ternary")

    def nominal_bits(self) -> float:
        return 9.0

    def gaussian_error(self) -> float:
        return (0.75 - math.log(2)) / math.log(2)

    def error_bound(self, x: Tensor, segments: Segments) -> float:
        """Return ||x||^2 / 8, of the mean over draws; denormals and beyond 2^127 count full."""
        size = x.double().abs()
        share = torch.where((size >= 2.0**-126) & (size <= 2.0**127), 1 / 8, 1.0)
        return float((share * size.square()).sum())

    def variance(self, x: Tensor, segments: Segments, shared: Tensor) -> Tensor:
        size, low = x.double().abs(), self._power(self._bits(x) >> 23).double()
        return (size - low) * (2 * low - size).clamp_(min=0)

    def variance_bound(self, x: Tensor, segments: Segments, shared: Tensor) -> float:
        return float(x.double().square().sum()) / 8

    def _bits(self, x: Tensor) -> Tensor:
        return x.view(torch.int32) & 0x7FFFFFFF

    def _power(self, exponent: Tensor) -> Tensor:
        return (exponent << 23).view(torch.float32)

    def encode(self, x: Tensor, segments: Segments, shared: Tensor, key: Key) -> Payload:
        bits = self._bits(x)
        up = ops.draws24(key, x.numel(), x.device) < (bits & 0x7FFFFF) << 1
        exponent = bits >> 23
        exponent = (exponent + (up & (exponent > 0))).clamp_(max=TOP)
        sign = ((x < 0) & (exponent > 0)).int()
        return Payload((ops.pack(sign << 8 | exponent, BITS),))

    def decode(self, payload: Payload, segments: Segments, shared: Tensor) -> Tensor:
        self.check(payload, segments)
        codes = ops.unpack(payload.parts[0], BITS, segments.numel)
        exponent = codes & 0xFF
        if ((exponent > TOP) | (codes == 1 << 8)).any():
            raise PayloadError(f"{self.name}: a code of infinity, of NaN or of a negative zero")
        return torch.where(codes >> 8 == 1, -self._power(exponent), self._power(exponent))

    def layout(self, segments: Segments, count: int = 1) -> Layout:
        return ((torch.int32, ops.packed_words(segments.numel, BITS)),)
