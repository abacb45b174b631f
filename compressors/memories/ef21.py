"""EF21: every worker sends the compressed difference between gradient and estimate.

c = C(g - h), h <- h + c on each worker, and H <- H + mean of the workers' c; all workers apply H,
the mean of the estimates h. For constant gradients every h converges to g and H to the mean
gradient, unlike error feedback with a biased code. h and H start at 0; the source allows any start,
and sends the first gradient uncompressed. In a two-shot exchange the owner of a shard adds the
error of encoding the mean to the next mean, so that H plus the owners' residuals is the mean of
the h.

With `eta` below 1 every worker first averages its gradients, v <- (1 - eta) v + eta g, and sends
C(v - h): EF21-SGDM, whose theorem needs no large batch. v starts at 0; the source starts it at the
first gradient.

Source: Richtarik, Sokolov and Fatkhullin, NeurIPS 2021, arXiv:2110.03294, algorithm 2; with eta,
Fatkhullin, Tyurin and Richtarik, NeurIPS 2023, arXiv:2305.15155, algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gcbench.core.memory import Memory
from gcbench.core.payload import Context


@dataclass(frozen=True)
class Ef21(Memory):
    """Estimates of every worker's gradient, and their mean."""

    eta: float = 1.0  # weight of the newest gradient in the average; 1: no average

    joint: ClassVar[tuple[str, ...]] = ("mean estimate",)
    contracting: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.eta <= 1:
            raise ValueError(f"eta={self.eta}: expected a number above 0 and at most 1")

    @property
    def buffers(self) -> tuple[str, ...]:  # type: ignore[override]
        """The estimate, and with eta below 1 the average of the gradients."""
        return ("estimate",) if self.eta == 1 else ("estimate", "average")

    @property
    def averages(self) -> bool:
        return self.eta < 1

    @property
    def feedback(self) -> bool:
        return True

    def offer(self, gradient: Tensor, ctx: Context) -> Tensor:
        if self.eta < 1:
            gradient = ctx.state["average"].lerp_(gradient, self.eta)
        return gradient - ctx.state["estimate"]

    def keep(self, offered: Tensor, sent: Tensor, ctx: Context) -> None:
        ctx.state["estimate"] += sent

    def apply(self, mean: Tensor, ctx: Context) -> Tensor:
        return ctx.joint["mean estimate"].add_(mean)
