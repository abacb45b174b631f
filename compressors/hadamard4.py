"""Four bits an element of a rotated block: a Walsh-Hadamard transform, then linear quantization.

Each block of d elements is rotated, y = H x, by the orthonormal Hadamard matrix of Sylvester
(entries +-1 / sqrt(d); a d that is no power of two is rotated in parts, its binary digits). Then
a = max |y|,  c = round(7 y / a), an integer in -7..7;  y' = (c / 7) a;  x' = H y', as H H = 1.

The rotation spreads an outlier over its block, so that one large element does not take the others'
resolution: of a block with a single element every |y| is the same, and it arrives exactly but for
rounding. Nearest, ties to even: biased; ||x - x'|| = ||y - y'|| (H is orthonormal), at most a / 14
an element, the largest exact: ||x - x'||^2 <= (d - 1) / 196 ||x||^2, which contracts at d = 128.
Normal input in blocks of 128 loses 1.38 % of its energy, as it would unrotated.
Wire: 4 bits an element, packed, and one float32 (a) a block: 4.25 bits at 128, up and down; the
owner adds in float32 and encodes the mean again.
Source: Jia et al., NeurIPS 2024, arXiv:2410.15526 (SDP4Bit): the Hadamard transform before 4 bits
in groups of 128. Theirs has two levels, 8 bits between the GPUs of a node and these 4 between
nodes. Here the levels are those of hybrid sharding, `gcbench.shard_hook("int8",
between="hadamard4")`, where the replicas' mean is encoded again
(test_fsdp.py::test_two_levels_send_eight_bits_inside_and_four_between); as the one compressor of
a run it is 4 bits everywhere.
Ours adds and subtracts in butterflies of a fixed order, so that no matrix product decides the last
bits (test_hadamard4.py::test_the_rotation_is_the_matrix).

>>> import gcbench, torch
>>> method = gcbench.get_compressor("hadamard4", granularity=4)
>>> packed = method.compress(torch.tensor([4.0, -1.0, 0.5, -2.5]))
>>> rotate(torch.tensor([4.0, 0.0, 0.0, 0.0]), packed.context.segments)
tensor([2., 2., 2., 2.])
>>> method.decompress(packed)
tensor([ 4.0000, -1.1429,  0.5714, -2.2857])
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gcbench import ops
from gcbench.core.claims import Claims
from gcbench.core.compressor import Compressor, Context, Layout, Parts, Payload, Segments
from gcbench.core.errors import PayloadError
from gcbench.ops import packing

TOP = 7
BITS = 4


def rotate(x: Tensor, segments: Segments) -> Tensor:
    """Return H x of each segment, float32, shape (n,); twice is x. Beyond float32 it saturates.

    A segment's powers of two come from the left, the largest first: 100 elements are 64, 32, 4.
    """
    rotated = x.clone()
    for _, rows in segments.views(rotated):
        start, length = 0, rows.shape[1]
        for bit in reversed(range(length.bit_length())):
            size = 1 << bit
            if length & size:
                rows[:, start : start + size] = _butterflies(rows[:, start : start + size])
                start += size
    return rotated.nan_to_num_()


def _butterflies(rows: Tensor) -> Tensor:
    """Return the orthonormal transform of each row, shape (m, d), d a power of two."""
    m, d = rows.shape
    rows = rows * (1 / math.sqrt(d))
    half = 1
    while half < d:
        pairs = rows.view(m, d // (2 * half), 2, half)
        left, right = pairs[:, :, 0], pairs[:, :, 1]
        rows = torch.stack((left + right, left - right), 2).view(m, d)
        half *= 2
    return rows


@dataclass(frozen=True)
class Hadamard4(Compressor):
    """Blockwise rotation and 4 bits. A merged payload holds the encoded mean."""

    granularity: str | int = 128  # elements of a block; or "tensor", "model", "column"

    collectives: ClassVar[tuple[str, ...]] = ("twoshot", "allgather")
    scratch = True
    variants = ({}, {"granularity": 100})

    def encode(self, x: Tensor, ctx: Context) -> Parts:
        y = rotate(x, ctx.segments)
        top = ops.statistics.absmax(y, ctx.segments)
        divisor = torch.where(top >= ops.statistics.TINY, top, torch.inf)
        for which, rows in ctx.segments.views(y):
            rows.div_(divisor[which].unsqueeze(1))
        codes = y.mul_(TOP).round_().add_(TOP).to(torch.int32)
        scales = torch.where(top < ops.statistics.TINY, 0.0, top)
        return packing.pack(codes, BITS, out=ctx.part(0)), scales

    def decode(self, payload: Payload, ctx: Context) -> Tensor:
        words, scales = payload.parts
        if not (scales.isfinite() & ((scales == 0) | (scales >= ops.statistics.TINY))).all():
            raise PayloadError("a block's scale is 0, or finite and at least 2^-100")
        codes = packing.unpack(words, BITS, ctx.segments.numel)
        if codes.numel() and int(codes.amax()) > 2 * TOP:
            raise PayloadError("code 15 stands for nothing")
        # By a tensor: a device may turn the division by a number into a product.
        values = codes.sub_(TOP).float().div_(torch.tensor(float(TOP), device=codes.device))
        for which, rows in ctx.segments.views(values):
            if bool(((scales[which] == 0).unsqueeze(1) & (rows != 0)).any()):
                raise PayloadError("codes in a block whose scale is 0")
        return rotate(ops.statistics.scale_(values, scales, ctx.segments), ctx.segments)

    def layout(self, segments: Segments, count: int = 1) -> Layout:
        words = packing.packed_words(segments.numel, BITS)
        return ((torch.int32, words), (torch.float32, len(segments)))


class Hadamard4Claims(Claims[Hadamard4], of=Hadamard4):
    """Contracts in blocks of at most 196 elements; the error is that of the rotated block."""

    @property
    def contractive(self) -> bool:
        """d errors of at most a / 14 stay below a while d - 1 < 14^2."""
        size = self.codec.granularity
        return isinstance(size, int) and size <= (2 * TOP) ** 2

    nominal_bits = 4.0

    def error_bound(self, x: Tensor, ctx: Context) -> float:
        """Return the sum of the bounds of the blocks, with room for the roundings of float32."""
        square = ops.statistics.moments(x, ctx.segments)[1]
        lengths = square.new_tensor([float(n) for n in ctx.segments.lengths])
        share = ((lengths - 1).clamp_(min=0) / (2 * TOP) ** 2 + 2.0**-18).clamp_(max=1)
        kept = square >= ops.statistics.TINY**2 * lengths  # smaller blocks may be sent as zeros
        return float((torch.where(kept, share, 1.0) * square).sum())

    def delta(self, segments: Segments) -> float | None:
        """Return 1 - (d - 1) / 196 of the longest block, less the roundings; None from 197 on."""
        longest = max(segments.lengths, default=0)
        kept = 1 - max(0, longest - 1) / (2 * TOP) ** 2 - 2.0**-18
        return kept if kept > 0 else None
