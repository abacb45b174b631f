"""NVIDIA's 4-bit floats: E2M1 elements in blocks of 16, with e4m3 scales below one float32.

    a = max |x| of the tensor,   g = a / (448 * 6)
    s = e4m3(max |block| / (6 g)), at least 2^-9;   c = e2m1(x / (s g));   x' = c s g

The scale adapts to its block within 6 %, where that of `mxfp4` may be twice too large. E2M1 has the
magnitudes 0, .5, 1, 1.5, 2, 3, 4 and 6. To nearest, ties to even: biased, and contractive.
With `rounding="stochastic"` the variance is (high - x)(x - low) per element, and only saturation is
biased.
NMSE of normal values .0090, Laplace .0086 (test_blockfloat.py::test_the_error).
Wire: 4 bits per element, packed, 8 bits per block and a float32 (a) per tensor: 4.5 bits, up and
down; the owner adds in float32 and encodes the mean again. A tensor below 2^-100 is sent as zeros.
Zeros lose their sign.
Source: NVIDIA 2025, arXiv:2509.25149 (pretraining in NVFP4): the format.

>>> import gcbench, torch
>>> method = gcbench.get_compressor("nvfp4")
>>> method.decompress(method.compress(torch.tensor([6.0, -1.0, 0.3, -2.6])))
tensor([ 6.0000, -1.0000,  0.5000, -3.0000])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gcbench import ops
from gcbench.core.compressor import Context, Layout, Parts, Payload, Segments
from gcbench.ops.blockfloat import E2M1, E4M3, Element

from ._blockfloat import BlockFloat, BlockFloatClaims


@dataclass(frozen=True)
class NVFP4(BlockFloat):
    """Blocks of 16 elements in 4 bits."""

    element: ClassVar[Element] = E2M1

    def encode(self, x: Tensor, ctx: Context) -> Parts:
        return ops.blockfloat.encode_nv(x, ctx.segments, self.draws(ctx), out=ctx.parts)

    def decode(self, payload: Payload, ctx: Context) -> Tensor:
        return ops.blockfloat.decode_nv(payload.parts, ctx.segments, self.name, out=ctx.out)

    def layout(self, segments: Segments, count: int = 1) -> Layout:
        codes = ops.blockfloat.code_words(segments.numel, E2M1)
        blocks = ops.blockfloat.block_count(segments)
        return codes, (torch.uint8, blocks), (torch.float32, len(segments))

    def scales(self, x: Tensor, segments: Segments) -> Tensor:
        """Return s g of each element's block, float64, shape (n,)."""
        _, codes, tops = ops.blockfloat.encode_nv(x, segments)
        unit = ops.blockfloat.per_block(tops.double() / (E4M3.top * E2M1.top), segments)
        blocks = ops.blockfloat.blocks_of(segments)
        share = E4M3.table(x.device).double()[codes.int()]
        ones = torch.ones_like(x, dtype=torch.float64)
        return ops.statistics.scale_(ones, share * unit, blocks)


class NVFP4Claims(BlockFloatClaims[NVFP4], of=NVFP4):
    """Contractive: the largest of a tensor is nearly exact."""

    nominal_bits = 4.5
