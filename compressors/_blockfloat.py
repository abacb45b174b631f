"""Common bases of the block floating-point formats, mxfp8.py, mxfp4.py and nvfp4.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from gcbench import ops
from gcbench.core.claims import Claims
from gcbench.core.compressor import Compressor, Context, Key, Layout, Parts, Payload, Segments
from gcbench.ops.blockfloat import BLOCK, Element

ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True)
class BlockFloat(Compressor):
    """Small floats in blocks with a scale. A merged payload is the encoded mean."""

    rounding: str = "nearest"  # or "stochastic"

    collectives: ClassVar[tuple[str, ...]] = ("twoshot", "allgather", "ring")
    scratch = True
    element: ClassVar[Element]
    variants = ({}, {"rounding": "stochastic"})

    def __post_init__(self) -> None:
        if self.rounding not in ROUNDINGS:
            raise ValueError(f"rounding={self.rounding!r}: expected {' or '.join(ROUNDINGS)}")

    def draws(self, ctx: Context) -> Key | None:
        """Return the address of the random numbers, None for rounding to nearest."""
        return ctx.key if self.rounding == "stochastic" else None

    def scales(self, x: Tensor, segments: Segments) -> Tensor:
        """Return the scale of each element, float64, shape (n,); 0 where zeros are sent."""
        raise NotImplementedError


@dataclass(frozen=True)
class Microscaling(BlockFloat):
    """Blocks of 32, each with a power of two as its scale."""

    granularity = BLOCK["mx"]

    def encode(self, x: Tensor, ctx: Context) -> Parts:
        draws = self.draws(ctx)
        return ops.blockfloat.encode_mx(x, self.element, ctx.segments, draws, out=ctx.parts)

    def decode(self, payload: Payload, ctx: Context) -> Tensor:
        code = payload.parts, self.element, ctx.segments, self.name
        return ops.blockfloat.decode_mx(*code, out=ctx.out)

    def layout(self, segments: Segments, count: int = 1) -> Layout:
        codes = ops.blockfloat.code_words(segments.numel, self.element)
        return codes, (torch.uint8, len(segments))

    def scales(self, x: Tensor, segments: Segments) -> Tensor:
        """Return each element's 2^(floor(log2 max |x|) - exponent), float64, shape (n,)."""
        top = ops.statistics.absmax(x, segments).double()
        power = torch.ldexp(torch.ones_like(top), torch.frexp(top)[1] - 1 - self.element.exponent)
        power = torch.where(top < ops.statistics.TINY, 0.0, power)
        return ops.statistics.scale_(torch.ones_like(x, dtype=torch.float64), power, segments)


B = TypeVar("B", bound=BlockFloat, covariant=True)


class BlockFloatClaims(Claims[B]):
    """Nearest: contractive. Stochastic: unbiased for the x whose elements saturate."""

    @property
    def unbiased(self) -> bool:
        return self.codec.rounding == "stochastic"

    @property
    def two_levels(self) -> bool:
        return self.codec.rounding == "stochastic"

    @property
    def contractive(self) -> bool:
        return self.codec.rounding == "nearest"

    def target(self, x: Tensor, ctx: Context) -> Tensor:
        """Return x, for stochastic rounding clamped to the largest value of its block."""
        if not self.unbiased:
            return x
        top = (self.codec.scales(x, ctx.segments) * self.codec.element.top).float()
        return torch.clamp(x, -top, top)

    def variance(self, x: Tensor, ctx: Context) -> Tensor | None:
        """Return (high - x)(x - low) of the values around each element, for stochastic rounding."""
        if not self.unbiased:
            return None
        scale = self.codec.scales(x, ctx.segments)
        table = self.codec.element.table(x.device).double()
        v = (x.double().abs() / torch.where(scale > 0, scale, torch.inf)).clamp(max=table[-1])
        below = torch.bucketize(v, table[1:-1], right=True)
        return (table[below + 1] - v) * (v - table[below]) * scale.square()

    def error_bound(self, x: Tensor, ctx: Context) -> float | None:
        """Return the sum of the squared bounds on each element, with a margin for rounding.

        In units of the scale: v - top where v saturates, else half the distance of the values
        around v, and at most v.
        """
        if not self.contractive:
            return None
        scale = self.codec.scales(x, ctx.segments)
        table = self.codec.element.table(x.device).double()
        v = x.double().abs() / torch.where(scale > 0, scale, torch.inf)
        below = torch.bucketize(v, table[1:-1], right=True)
        half = (table[below + 1] - table[below]) / 2 * (1 + 2.0**-18)
        error = torch.where(v > table[-1], v - table[-1], torch.minimum(v, half)) * scale
        margin = 2.0**-18 * v * scale
        lost = torch.minimum(error + margin, x.double().abs())
        return float(torch.where(scale > 0, lost, x.double().abs()).square().sum())
