"""No compression: the gradient as it is, the baseline of every comparison.

x' = x; exact.
Wire: 32 bits an element (float32), up and down.
Source: none. Payloads are summed, and the sum is divided by the number of workers once, after the
reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gcbench.core.claims import Claims
from gcbench.core.compressor import Compressor, Key, Layout, Payload, Segments, fill


@dataclass(frozen=True)
class NoCompression(Compressor):
    """The gradient in float32. A payload of `count` workers holds their sum."""

    collectives: ClassVar[tuple[str, ...]] = ("allreduce", "allgather", "twoshot")
    requantizes = False

    def encode(
        self,
        x: Tensor,
        segments: Segments,
        shared: Tensor,
        key: Key,
        *,
        prepared: Any = None,
        out: Payload | None = None,
    ) -> Payload:
        return Payload((x.contiguous(),))  # x itself is the payload: nothing is copied to `out`

    def decode(
        self, payload: Payload, segments: Segments, shared: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        self.check(payload, segments)
        return self.check_finite(torch.div(payload.parts[0], payload.count, out=out))

    def merge(
        self,
        payloads: Sequence[Payload],
        segments: Segments,
        shared: Tensor,
        key: Key,
        *,
        out: Payload | None = None,
    ) -> Payload:
        for payload in payloads:
            self.check(payload, segments)
        total = fill(out, payloads[0].parts[0] if out else payloads[0].parts[0].clone())
        for payload in payloads[1:]:
            total.parts[0].add_(payload.parts[0])
        return total._replace(count=sum(payload.count for payload in payloads))

    def mean(
        self,
        payloads: Sequence[Payload],
        segments: Segments,
        shared: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        for payload in payloads:
            self.check(payload, segments)
        first = payloads[0].parts[0]
        total = first.clone() if out is None else out.copy_(first)
        for payload in payloads[1:]:
            total += payload.parts[0]
        return self.check_finite(total.div_(sum(payload.count for payload in payloads)))

    def layout(self, segments: Segments, count: int = 1) -> Layout:
        return ((torch.float32, segments.numel),)

    @property
    def claims(self) -> NoCompressionClaims:
        return NoCompressionClaims(self)


class NoCompressionClaims(Claims[NoCompression]):
    """Exact."""

    unbiased = True
    two_levels = True
    contractive = True
    exact_for = ("ternary", "integers", "bytes", "sparse", "signs")

    def nominal_bits(self) -> float:
        return 32.0

    def error_bound(self, x: Tensor, segments: Segments) -> float:
        return 0.0

    def delta(self, segments: Segments) -> float:
        return 1.0

    def omega(self, segments: Segments) -> float:
        return 0.0

    def variance(self, x: Tensor, segments: Segments, shared: Tensor) -> Tensor:
        return torch.zeros_like(x, dtype=torch.float64)
