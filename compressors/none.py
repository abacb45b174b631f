"""No compression: the gradient in float32, the baseline of every comparison.

x' = x; exact.
Wire: 32 bits per element (float32), up and down.
Source: none. The sum of the payloads is divided by the number of workers once, after the reduction.

>>> import gcbench, torch
>>> method = gcbench.get_compressor("none")
>>> packed = method.compress(torch.tensor([4.0, -1.0, 0.5, -2.5]))
>>> packed.payload.nbytes
16
>>> method.decompress(packed)
tensor([ 4.0000, -1.0000,  0.5000, -2.5000])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gcbench.core.claims import Claims
from gcbench.core.compressor import (
    Compressor,
    Context,
    Layout,
    Parts,
    Payload,
    Segments,
    check_finite,
)


@dataclass(frozen=True)
class NoCompression(Compressor):
    """The gradient in float32. A payload of `count` workers is their sum."""

    collectives: ClassVar[tuple[str, ...]] = ("allreduce", "allgather", "twoshot", "ring")

    def encode(self, x: Tensor, ctx: Context) -> Parts:
        return x.contiguous()

    def decode(self, payload: Payload, ctx: Context) -> Tensor:
        return check_finite(torch.div(payload.parts[0], payload.count, out=ctx.out))

    def merge(self, payloads: Sequence[Payload], ctx: Context) -> Parts:
        return _summed(payloads, ctx.part(0))

    def mean(self, payloads: Sequence[Payload], ctx: Context) -> Tensor:
        total = _summed(payloads, ctx.out)
        return check_finite(total.div_(sum(payload.count for payload in payloads)))

    def layout(self, segments: Segments, count: int = 1) -> Layout:
        return ((torch.float32, segments.numel),)


def _summed(payloads: Sequence[Payload], out: Tensor | None) -> Tensor:
    """Return the sum of the payloads, added in rank order."""
    first = payloads[0].parts[0]
    total = first.clone() if out is None else out.copy_(first)
    for payload in payloads[1:]:
        total += payload.parts[0]
    return total


class NoCompressionClaims(Claims[NoCompression], of=NoCompression):
    """Exact."""

    unbiased = True
    two_levels = True
    contractive = True
    exact_for = ("ternary", "integers", "bytes", "sparse", "signs")
    nominal_bits = 32.0

    def error_bound(self, x: Tensor, ctx: Context) -> float:
        return 0.0

    def delta(self, segments: Segments) -> float:
        return 1.0

    def omega(self, segments: Segments) -> float:
        return 0.0

    def variance(self, x: Tensor, ctx: Context) -> Tensor:
        return torch.zeros_like(x, dtype=torch.float64)
