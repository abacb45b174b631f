"""No compression: the gradient as it is, the baseline of every comparison.

x' = x; exact.
Wire: 32 bits an element (float32), up and down.
Source: none. Payloads are added as they are; a sum over workers is divided once, after the
reduction, so that no precision is lost before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gcbench.compressor import Compressor, Key, Layout, Payload, Segments


@dataclass(frozen=True)
class NoCompression(Compressor):
    """The gradient in float32. A payload of `count` workers holds their sum."""

    collectives: ClassVar[tuple[str, ...]] = ("allreduce", "allgather", "twoshot")
    unbiased = True
    contractive = True
    requantizes = False
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

    def encode(self, x: Tensor, segments: Segments, shared: Tensor, key: Key) -> Payload:
        return Payload((x.contiguous(),))

    def decode(self, payload: Payload, segments: Segments, shared: Tensor) -> Tensor:
        self.check(payload, segments)
        return self.check_finite(payload.parts[0] / payload.count)

    def merge(
        self, payloads: Sequence[Payload], segments: Segments, shared: Tensor, key: Key
    ) -> Payload:
        total = payloads[0].parts[0].clone()
        for payload in payloads[1:]:
            total += payload.parts[0]
        return Payload((total,), sum(payload.count for payload in payloads))

    def mean(self, payloads: Sequence[Payload], segments: Segments, shared: Tensor) -> Tensor:
        key = Key(0, 0, 0)  # the sum draws no random numbers
        return self.decode(self.merge(payloads, segments, shared, key), segments, shared)

    def layout(self, segments: Segments, count: int = 1) -> Layout:
        return ((torch.float32, segments.numel),)
