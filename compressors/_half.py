"""Common base of the 16-bit floating-point formats, whose methods are fp16.py and bf16.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gcbench import ops
from gcbench.core.claims import Claims
from gcbench.core.compressor import Compressor, Context, Layout, Parts, Payload, Segments


@dataclass(frozen=True)
class HalfPrecision(Compressor):
    """The gradient rounded to a floating-point format of 16 bits, clipped to its largest value."""

    dtype: ClassVar[torch.dtype]
    unit: ClassVar[float]  # unit roundoff
    half_step: ClassVar[float]  # half the distance between adjacent denormals

    collectives: ClassVar[tuple[str, ...]] = ("twoshot", "allgather", "ring")

    def encode(self, x: Tensor, ctx: Context) -> Parts:
        return ops.half.encode(x, self.dtype, out=ctx.part(0))

    def decode(self, payload: Payload, ctx: Context) -> Tensor:
        return ops.half.decode(payload.parts[0], self.name, out=ctx.out)

    def mean(self, payloads: Sequence[Payload], ctx: Context) -> Tensor:
        parts = [(payload.parts[0], payload.count) for payload in payloads]
        return ops.half.mean(parts, self.name, out=ctx.out)

    def layout(self, segments: Segments, count: int = 1) -> Layout | None:
        return ((self.dtype, segments.numel),)


class HalfPrecisionClaims(Claims[HalfPrecision], of=HalfPrecision):
    """Contractive: the error is at most u |x|, and below |x| for denormal and clipped elements."""

    contractive = True
    exact_for = ("signs", "ternary", "integers", "bytes", "sparse")
    nominal_bits = 16.0

    @property
    def gaussian_error(self) -> float:
        """Return u^2 / (8 ln 2): u^2 / 3 times the mean of 4^-f, f uniform on [0, 1).

        f is the fractional part of log2 |x|, which is nearly uniform for normal values.
        """
        return self.codec.unit**2 / (8 * math.log(2))

    def error_bound(self, x: Tensor, ctx: Context) -> float | None:
        """Return the sum over elements of the square of the bound in the method's docstring."""
        size = x.double().abs()
        rounding = torch.maximum(self.codec.unit * size, size.clamp(max=self.codec.half_step))
        return float(
            torch.maximum(rounding, size - torch.finfo(self.codec.dtype).max).square().sum()
        )

    def delta(self, segments: Segments) -> float | None:
        """Return 1 - u^2; None if normal values of float32 are denormal or 0 in the format."""
        wide = torch.finfo(self.codec.dtype).tiny <= torch.finfo(torch.float32).tiny
        return 1 - self.codec.unit**2 if wide else None
