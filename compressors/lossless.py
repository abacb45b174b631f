"""bfloat16 with coded exponents: the values of `bf16`, bit for bit, in about 11.3 bits.

    x' = bf16(x)    sent as sign and fraction (8 bits) and min(e_max - e, 7) (3 bits);
                    where that is 7, the exponent e follows (8 bits)

e_max is the largest exponent of a block of 4,096. Rounded as in `bf16`: to nearest, ties to even. A
run with it equals one with `bf16`, parameter for parameter (test_lossless.py::test_whole_runs).
Size: 11 + 8 p bits, p = P(e_max - e >= 7), .03 for normal values: 11.25 bits, 1.42 times smaller
than bf16. The exponents of normal values have an entropy of 2.545 bits, whatever their variance, so
no code can be more than 1.517 times smaller (test_lossless.py::test_the_size). Zeros cost 19 bits.
Wire: as above, and 8 bits (e_max) per block. Sizes depend on the data and are sent first. The owner
adds in float32 and encodes the mean again.
Source: this layout is our own. Coded exponents on the wire: Lin et al. 2026, arXiv:2604.27844
(ZipCCL), whose code follows a Gaussian model without statistics.

>>> import gcbench, torch
>>> method = gcbench.get_compressor("lossless")
>>> method.decompress(method.compress(torch.tensor([1.0, 0.1, -3.14159, 1e-3])))
tensor([ 1.0000e+00,  1.0010e-01, -3.1406e+00,  9.9945e-04])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gcbench import ops
from gcbench.core.compressor import Context, Parts, Payload, Segments

from ._half import HalfPrecision, HalfPrecisionClaims


@dataclass(frozen=True)
class Lossless(HalfPrecision):
    """The gradient rounded to bfloat16, with coded exponents."""

    granularity: int | str = 4096  # elements per block; or "tensor", "model", "column"

    dtype: ClassVar[torch.dtype] = torch.bfloat16
    unit: ClassVar[float] = 2.0**-8
    half_step: ClassVar[float] = 2.0**-134
    scratch = True
    variants = ({}, {"granularity": 100})

    def encode(self, x: Tensor, ctx: Context) -> Parts:
        return ops.lossless.encode(x, ctx.segments)

    def decode(self, payload: Payload, ctx: Context) -> Tensor:
        code = payload.parts, ctx.segments, self.name, torch.float32
        return ops.lossless.decode(*code, out=ctx.out)

    def mean(self, payloads: Sequence[Payload], ctx: Context) -> Tensor:
        parts = [
            (ops.lossless.decode(payload.parts, ctx.segments, self.name), payload.count)
            for payload in payloads
        ]
        return ops.half.mean(parts, self.name, out=ctx.out)

    def layout(self, segments: Segments, count: int = 1) -> None:
        """Return None: sizes depend on the data."""


class LosslessClaims(HalfPrecisionClaims, of=Lossless):
    """Those of `bf16`, of which it is a code."""

    nominal_bits = 11.25
