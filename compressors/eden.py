"""EDEN: b bits per element of a randomly rotated block, as the nearest centroids of N(0, 1).

    r = H D_R ... H D_1 x,   z = r sqrt(d) / ||r||,   q = nearest centroid of each z
    S = ||r||^2 / <q, r>   (scale="unbiased"), or   S = <q, r> / ||q||^2   (scale="least")
    x' = D_1 H ... D_R H (S q)

D_j multiplies by random signs, H is the orthonormal Walsh-Hadamard transform of a block of d, a
power of two: a last one of 100 elements is divided into blocks of 64, 32 and 4. After the rotation
the elements are nearly normal, whatever x was, so the centroids of Lloyd and Max for N(0, 1) fit
them. One bit is DRIVE.
Error, with cos = <q, r> / (||q|| ||r||): least ||x - x'||^2 = (1 - cos^2) ||x||^2, contractive;
unbiased (1 / cos^2 - 1) ||x||^2. For d -> infinity, at 1 to 5 bits: .3634, .1175, .0345, .0095 and
.0025, the distortion D of the quantizer of N(0, 1); unbiased D / (1 - D), so .5708 at one bit.
E[x'] = x holds exactly for a uniformly random rotation, and only nearly for R of these: it is not
claimed (test_eden.py::test_the_mean_of_many_codings). After one rotation, half of the elements are
0 if a block has two equal nonzero ones, with an unbiased error of 1.0 at one bit; after two, .57.
Wire: b bits per element, packed; one float32 (S) per block; the address of the signs in four words,
so that each worker has a rotation of its own: b + 32 / d + 128 / n bits, up and down. The owner
adds in float32 and encodes the mean again.
Source: Vargaftik et al., NeurIPS 2021, arXiv:2105.08339 (DRIVE, one bit); ICML 2022,
arXiv:2108.08842 (EDEN); two rotations: Ben-Basat et al. 2026, arXiv:2605.06014. Theirs rotate the
whole vector; here blocks of 1024. Their fractional bits are left out.

>>> import gcbench, torch
>>> method = gcbench.get_compressor("eden", bits=1, scale="least", granularity=4)
>>> packed = method.compress(torch.tensor([4.0, -1.0, 0.5, -2.5]))
>>> method.decompress(packed)
tensor([ 2., -2.,  2., -2.])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gcbench import ops
from gcbench.core.claims import Claims
from gcbench.core.compressor import Compressor, Context, Layout, Parts, Payload, Segments
from gcbench.ops.eden import MAX_BITS, POSITIVE, SCALES

DISTORTION = (0.36338023, 0.11748185, 0.03454776, 0.00950101, 0.00250467)
"""E (z - q)^2 of z ~ N(0, 1), for 1 to 5 bits (test_eden.py::test_the_centroids)."""


@dataclass(frozen=True)
class Eden(Compressor):
    """Random rotations and centroids. A merged payload is the encoded mean."""

    bits: int = 4  # per element, 1 to 5
    rotations: int = 2  # 1 or 2
    scale: str = "unbiased"  # or "least", the least error
    granularity: int | str = 1024  # elements per block; or "tensor", "model", "column"

    collectives: ClassVar[tuple[str, ...]] = ("twoshot", "allgather", "ring")
    scratch = True
    variants = (
        {},
        {"bits": 1, "scale": "least"},
        {"bits": 2, "rotations": 1, "granularity": 100},
    )

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= MAX_BITS:
            raise ValueError(f"bits={self.bits}: expected 1 to {MAX_BITS}")
        if self.rotations not in (1, 2):
            raise ValueError(f"rotations={self.rotations}: expected 1 or 2")
        if self.scale not in SCALES:
            raise ValueError(f"scale={self.scale!r}: expected {' or '.join(SCALES)}")

    def encode(self, x: Tensor, ctx: Context) -> Parts:
        least = self.scale == "least"
        code = x, self.bits, self.rotations, least, ctx.segments.binary, ctx.key
        return ops.eden.encode(*code, out=ctx.parts)

    def decode(self, payload: Payload, ctx: Context) -> Tensor:
        code = payload.parts, self.bits, self.rotations, ctx.segments.binary, self.name
        return ops.eden.decode(*code, out=ctx.out)

    def layout(self, segments: Segments, count: int = 1) -> Layout:
        words = ops.packing.packed_words(segments.numel, self.bits)
        return (torch.int32, words), (torch.float32, len(segments.binary)), (torch.int32, 4)


class EdenClaims(Claims[Eden], of=Eden):
    """Least: contractive, as cos > 0. Both: the error of normal input is that of the centroids."""

    @property
    def contractive(self) -> bool:
        return self.codec.scale == "least"

    @property
    def smallest(self) -> float:
        """Return the magnitude of a lone element whose block's S is 2^-100, with a margin of 16."""
        size = self.codec.granularity
        return 16 * ops.statistics.TINY * (size**0.5 if isinstance(size, int) else 2.0**20)

    @property
    def nominal_bits(self) -> float:
        size = self.codec.granularity
        return self.codec.bits + (32 / size if isinstance(size, int) else 0.0)

    @property
    def gaussian_error(self) -> float | None:
        """Return the limit for long blocks; None for shorter ones."""
        size = self.codec.granularity
        if isinstance(size, int) and size < 1024:
            return None
        lost = DISTORTION[self.codec.bits - 1]
        return lost if self.codec.scale == "least" else lost / (1 - lost)

    def error_bound(self, x: Tensor, ctx: Context) -> float | None:
        """Return the sum of (1 - delta) ||x||^2 over the blocks."""
        if not self.contractive:
            return None
        blocks = ctx.segments.binary
        square = ops.statistics.moments(x, blocks)[1]
        lengths = square.new_tensor([float(n) for n in blocks.lengths])
        share = 1 - self._least_share(lengths)
        tiny = square < lengths * self.smallest**2  # may become zeros
        return float((torch.where(tiny, 1.0, share) * square).sum())

    def _least_share(self, lengths: Tensor) -> Tensor:
        """Return a lower bound on cos^2, less rounding.

        <q, r> >= c_1 ||r||_1 >= c_1 ||r|| and ||q||^2 <= d c_max^2.
        """
        least, most = POSITIVE[self.codec.bits - 1][0], POSITIVE[self.codec.bits - 1][-1]
        return (least / most) ** 2 / lengths.clamp(min=1) * (1 - 2.0**-10)

    def delta(self, segments: Segments) -> float | None:
        longest = max(segments.binary.lengths, default=1)
        if not self.contractive:
            return None
        return float(self._least_share(torch.tensor(float(longest), dtype=torch.float64)))
