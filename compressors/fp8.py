"""Eight-bit floating point: e4m3 values in blocks, each scaled by its largest magnitude.

a = max |x| of the block;  c = e4m3(448 x / a);  x' = (c / 448) a.

e4m3 has 4 bits of exponent and 3 of fraction; 448 is its largest value, 2^-6 its smallest normal
value, 2^-9 the spacing of its denormals. Rounded to nearest, ties to even: biased, per element
|x - x'| <= max(2^-4 |x|, min(|x|, 2^-10 a / 448)), so the error is below the input for blocks
shorter than 2^37. The relative error is constant over 14 binades; that of `int8`, which has the
same size, grows as elements get smaller. Normal input in blocks of 256 loses 6.8e-4 of its energy,
14 times as much as with int8; its fifth powers lose 2.8e-4, with half of the elements within 3 %,
and 3.1e-4 with int8, which sends most of them as 0 (test_fp8.py::test_beside_int8).
Wire: 8 bits per element and one float32 (a) per block: 8.125 bits at 256, up and down; the owner
adds in float32 and encodes the mean again. NaN's two codes are never sent.
Source: Micikevicius et al. 2022, arXiv:2209.05433, table 1: the format (e4m3 without infinities);
blocks with a scale as in `int8`.
It sends a rather than a / 448, so that the block's largest element is exact
(test_fp8.py::test_block_maxima_are_exact).

>>> import gcbench, torch
>>> method = gcbench.get_compressor("fp8")
>>> packed = method.compress(torch.tensor([4.0, -1.0, 0.5, -2.5]))
>>> packed.payload.nbytes
8
>>> method.decompress(packed)
tensor([ 4.0000, -1.0000,  0.5000, -2.5714])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gcbench import ops
from gcbench.core.claims import Claims
from gcbench.core.compressor import Compressor, Context, Layout, Parts, Payload, Segments
from gcbench.ops.fp8 import TOP

UNIT = 2.0**-4  # unit roundoff
HALF_STEP = 2.0**-10  # half the spacing of denormals


@dataclass(frozen=True)
class Fp8(Compressor):
    """Blockwise absmax scaling to e4m3. A merged payload is the encoded mean."""

    granularity: str | int = 256  # elements per block; or "tensor", "model", "column"

    collectives: ClassVar[tuple[str, ...]] = ("twoshot", "allgather", "ring")
    scratch = True
    variants = ({}, {"granularity": "tensor"})

    def encode(self, x: Tensor, ctx: Context) -> Parts:
        return ops.fp8.encode(x, ctx.segments, out=ctx.parts)

    def decode(self, payload: Payload, ctx: Context) -> Tensor:
        codes, scales = payload.parts
        return ops.fp8.decode(codes, scales, ctx.segments, self.name, out=ctx.out)

    def layout(self, segments: Segments, count: int = 1) -> Layout:
        return ((torch.uint8, segments.numel), (torch.float32, len(segments)))


class Fp8Claims(Claims[Fp8], of=Fp8):
    """Contractive: bounded by the unit roundoff, and by a small error below the normal range."""

    contractive = True
    exact_for = ("signs", "ternary", "integers", "sparse")
    nominal_bits = 8.0

    def error_bound(self, x: Tensor, ctx: Context) -> float:
        """Return the sum of the squared bounds, with a margin for four roundings in float32."""
        size = x.double().abs()
        top = ops.statistics.absmax(x, ctx.segments).double()
        top = ops.statistics.scale_(torch.ones_like(size), top, ctx.segments)
        low = torch.minimum(size, HALF_STEP * (1 + 2.0**-18) * top / TOP)
        rounding = torch.maximum(UNIT * (1 + 2.0**-18) * size, low)
        lost = torch.where(size == top, 0.0, rounding)  # the largest is exact
        return float(torch.where(top < ops.statistics.TINY, size, lost).square().sum())

    def delta(self, segments: Segments) -> float | None:
        """Return 1 - 2^-8 - d (2^-10 / 448)^2 for the longest block, less rounding; or None.

        The denormal part is relative to the block's largest element.
        """
        longest = max(segments.lengths, default=0)
        delta = 1 - (1 + 2.0**-16) * (UNIT**2 + longest * (HALF_STEP / TOP) ** 2)
        return delta if delta > 0 else None
