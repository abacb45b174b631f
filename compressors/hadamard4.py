"""Four bits per element of a rotated block: a Walsh-Hadamard transform, then linear quantization.

Each block of d elements is rotated, y = H x, by the orthonormal Hadamard matrix of Sylvester
(entries +-1 / sqrt(d)); if d is not a power of two, it is split by its binary digits. Then
a = max |y|,  c = round(7 y / a), an integer in -7..7;  y' = (c / 7) a;  x' = H y', as H H = 1.

The rotation spreads an outlier over its block, so one large element does not reduce the resolution
of the others; a block with a single nonzero element is exact up to rounding. Nearest, ties to even:
biased; ||x - x'|| = ||y - y'|| (H is orthonormal), at most a / 14 per element, and 0 for the
largest: ||x - x'||^2 <= (d - 1) / 196 ||x||^2, contractive at d = 128. Normal input in blocks of
128 loses 1.38 % of its energy, with or without rotation.
Wire: 4 bits per element, packed, and one float32 (a) per block: 4.25 bits at 128, up and down; the
owner adds in float32 and encodes the mean again.
Source: Jia et al., NeurIPS 2024, arXiv:2410.15526 (SDP4Bit): a Hadamard transform before 4 bits in
groups of 128. They use 8 bits between the GPUs of a node and these 4 bits between nodes. Here the
two levels are those of hybrid sharding, `gcbench.shard_hook("int8", between="hadamard4")`, where
the replicas' mean is encoded again
(test_fsdp.py::test_two_levels_send_eight_bits_inside_and_four_between); as the only compressor of a
run it uses 4 bits everywhere.
The transform adds and subtracts in butterflies of a fixed order, so the last bits do not depend on
a matrix product (test_hadamard4.py::test_the_rotation_is_the_matrix).

>>> import gcbench, torch
>>> method = gcbench.get_compressor("hadamard4", granularity=4)
>>> packed = method.compress(torch.tensor([4.0, -1.0, 0.5, -2.5]))
>>> ops.hadamard.rotate(torch.tensor([4.0, 0.0, 0.0, 0.0]), packed.context.segments)
tensor([2., 2., 2., 2.])
>>> method.decompress(packed)
tensor([ 4.0000, -1.1429,  0.5714, -2.2857])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gcbench import ops
from gcbench.core.claims import Claims
from gcbench.core.compressor import Compressor, Context, Layout, Parts, Payload, Segments
from gcbench.ops.hadamard import TOP


@dataclass(frozen=True)
class Hadamard4(Compressor):
    """Blockwise rotation and 4 bits. A merged payload is the encoded mean."""

    granularity: str | int = 128  # elements per block; or "tensor", "model", "column"

    collectives: ClassVar[tuple[str, ...]] = ("twoshot", "allgather", "ring")
    scratch = True
    variants = ({}, {"granularity": 100})

    def encode(self, x: Tensor, ctx: Context) -> Parts:
        return ops.hadamard.encode(x, ctx.segments, out=ctx.parts)

    def decode(self, payload: Payload, ctx: Context) -> Tensor:
        words, scales = payload.parts
        return ops.hadamard.decode(words, scales, ctx.segments, self.name, out=ctx.out)

    def layout(self, segments: Segments, count: int = 1) -> Layout:
        words = ops.packing.packed_words(segments.numel, ops.hadamard.BITS)
        return ((torch.int32, words), (torch.float32, len(segments)))


class Hadamard4Claims(Claims[Hadamard4], of=Hadamard4):
    """Contractive in blocks of at most 196 elements; the error is that of the rotated block."""

    @property
    def contractive(self) -> bool:
        """Whether d - 1 < 14^2, so that d - 1 errors of at most a / 14 stay below a."""
        size = self.codec.granularity
        return isinstance(size, int) and size <= (2 * TOP) ** 2

    nominal_bits = 4.0

    def error_bound(self, x: Tensor, ctx: Context) -> float:
        """Return the sum of the bounds of the blocks, with a margin for rounding in float32."""
        square = ops.statistics.moments(x, ctx.segments)[1]
        lengths = square.new_tensor([float(n) for n in ctx.segments.lengths])
        share = ((lengths - 1).clamp_(min=0) / (2 * TOP) ** 2 + 2.0**-18).clamp_(max=1)
        nonzero = square >= ops.statistics.TINY**2 * lengths  # smaller blocks may become zeros
        return float((torch.where(nonzero, share, 1.0) * square).sum())

    def delta(self, segments: Segments) -> float | None:
        """Return 1 - (d - 1) / 196 for the longest block, less rounding; None for d > 196."""
        longest = max(segments.lengths, default=0)
        delta = 1 - max(0, longest - 1) / (2 * TOP) ** 2 - 2.0**-18
        return delta if delta > 0 else None
