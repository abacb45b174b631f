"""Local momentum: each worker compresses m <- beta m + (1 - beta) g, without synchronizing m.

With the sign as compressor this is Signum.

Source: Bernstein et al., ICML 2018, arXiv:1802.04434, algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gcbench.core.memory import Memory
from gcbench.core.payload import Context


@dataclass(frozen=True)
class Momentum(Memory):
    """A momentum per worker."""

    beta: float = 0.9

    buffers: ClassVar[tuple[str, ...]] = ("momentum",)
    has_momentum: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1:
            raise ValueError(f"beta={self.beta}: expected at least 0 and below 1")

    def offer(self, gradient: Tensor, ctx: Context) -> Tensor:
        return ctx.state["momentum"].mul_(self.beta).add_(gradient, alpha=1 - self.beta)

    def dense(self) -> Memory:
        return self
