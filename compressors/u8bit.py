"""u8bit: eight-bit numbers whose precision depends on their decade, scaled by the largest one.

a = max |x| of the tensor;  x' = sign(x) l a, l the nearest to |x| / a of 128 levels in [0, 1].

The levels are 0, 1, and per decade (10^(i-7), 10^(i-6)), i = 1..6, the centers of 2^i equal parts:
64 between .1 and 1, two between 1e-6 and 1e-5 ("dynamic tree": the zeros before a code's first 1
are the exponent, and the bits after it divide the decade). Halfway between two levels, the lower
one is sent.

Biased; |x - x'| <= min(|x|, half the distance between the two levels), at most 6.2 % of |x| above
a / 10 and 11 % above a / 100. The largest element is exact, elements up to 1.6e-6 a become 0. A
normal x of 2^20 elements loses 2.4e-4 of its energy, twice as much as with `int8` and the same
scale; its fifth powers lose 5.3e-4, and 9.9e-3 with int8 (test_u8bit.py::test_beside_int8).
Wire: 8 bits per element and one float32 (a) per tensor, up and down; the owner adds in float32 and
encodes the mean again. Code -128 is never sent.
Source: Dettmers, ICLR 2016, arXiv:1511.04561, dynamic tree; the table: GRACE's code,
github.com/sands-lab/grace, grace_dl/tensorflow/compressor/u8bit.py.
Differs: GRACE rounds down in its table and halves a decade at .45 of the next one, not .55. Its
largest level is .9957, so the largest element is not exact. It divides by 0 for a tensor of zeros.

>>> import gcbench, torch
>>> method = gcbench.get_compressor("u8bit")
>>> packed = method.compress(torch.tensor([4.0, -1.0, 0.5, -2.5e-3]))
>>> packed.payload.parts
(tensor([127, -73,  64, -11], dtype=torch.int8), tensor([4.]))
>>> method.decompress(packed)
tensor([ 4.0000e+00, -9.9063e-01,  4.8438e-01, -2.4250e-03])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gcbench import ops
from gcbench.core.claims import Claims
from gcbench.core.compressor import Compressor, Context, Layout, Parts, Payload, Segments
from gcbench.ops.statistics import TINY, absmax, scale_
from gcbench.ops.u8bit import LEVELS


@dataclass(frozen=True)
class U8bit(Compressor):
    """Sign and nearest of 128 levels. A merged payload is the encoded mean."""

    granularity: str | int = "tensor"  # what shares a scale; or "model", "column", or a block size

    collectives: ClassVar[tuple[str, ...]] = ("twoshot", "allgather", "ring")
    scratch = True
    variants = ({}, {"granularity": 256})

    def encode(self, x: Tensor, ctx: Context) -> Parts:
        return ops.u8bit.encode(x, ctx.segments, out=ctx.parts)

    def decode(self, payload: Payload, ctx: Context) -> Tensor:
        codes, scales = payload.parts
        return ops.u8bit.decode(codes, scales, ctx.segments, self.name, out=ctx.out)

    def layout(self, segments: Segments, count: int = 1) -> Layout:
        return ((torch.int8, segments.numel), (torch.float32, len(segments)))


class U8bitClaims(Claims[U8bit], of=U8bit):
    """Contractive: the error is the distance to the nearest level."""

    contractive = True
    exact_for = ("signs", "ternary", "sparse")
    nominal_bits = 8.0

    def error_bound(self, x: Tensor, ctx: Context) -> float:
        """Return the squared distance to the nearest levels, and a margin for rounding."""
        size = x.double().abs()
        top = absmax(x, ctx.segments).double()
        top = scale_(torch.ones_like(size), top, ctx.segments)
        levels = LEVELS.double()
        share = size / top
        above = torch.bucketize(share, levels).clamp_(1, 127)
        near = torch.minimum(levels[above] - share, share - levels[above - 1])
        lost = torch.minimum(size, near * top + 2.0**-22 * size)
        lost = torch.where(size == top, 0.0, lost)  # the largest is exact
        return float(torch.where(top < TINY, size, lost).square().sum())

    def delta(self, segments: Segments) -> float | None:
        """Return 1 - r^2 - (d - 1) e^2 for the longest block of d elements, or None if below 0.

        r bounds the relative error above a limit, e the error over a below it; the best of all
        limits between two levels is taken.
        """
        low, high = LEVELS[:-1].double(), LEVELS[1:].double()
        relative = ((high - low) / (high + low)).flip(0).cummax(0).values.flip(0)[1:]
        absolute = ((high - low) / 2).cummax(0).values[:-1]
        longest = max(segments.lengths, default=0)
        lost = relative.square() + max(0, longest - 1) * absolute.square()
        delta = 1 - (1 + 2.0**-16) * float(lost.min())
        return delta if delta > 0 else None
