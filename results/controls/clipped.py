"""Clipping alone: the gradient in float32, clipped as `terngrad` clips it.

x'_k = max(-c sigma, min(c sigma, x_k)), sigma the standard deviation of the tensor.
Wire: 32 bits per element. Source: TernGrad, arXiv:1705.07878, eq. (21), without the ternary codes.

A control, no method: what of a difference between `terngrad` and fp32 is its clipping.
"""

import itertools
from dataclasses import dataclass
from typing import ClassVar

import torch

from gcbench.core.compressor import Compressor, Payload, check_finite


@dataclass(frozen=True)
class Clipped(Compressor):
    """The clipped gradient in float32."""

    clip: float = 2.5  # standard deviations

    collectives: ClassVar[tuple[str, ...]] = ("allgather",)

    def encode(self, x, ctx):
        """Return the clipped elements, float32, shape (n,)."""
        clipped = torch.empty_like(x)
        for start, stop in itertools.pairwise(ctx.segments.offsets):
            tensor = x[start:stop]
            limit = self.clip * float(tensor.std(correction=0))
            torch.clamp(tensor, -limit, limit, out=clipped[start:stop])
        return Payload((clipped,))

    def decode(self, payload, ctx):
        """Return what was sent."""
        return check_finite(payload.parts[0])

    def layout(self, segments, count=1):
        """Return the payload's one part: n float32."""
        return ((torch.float32, segments.numel),)
