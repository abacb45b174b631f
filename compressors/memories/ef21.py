"""EF21: every worker sends the compressed difference between gradient and estimate.

c = C(g - h), h <- h + c on each worker, and H <- H + mean of the workers' c; all workers apply H,
the mean of the estimates h. For constant gradients every h converges to g and H to the mean
gradient, unlike error feedback with a biased code. h and H start at 0; the source allows any start,
and sends the first gradient uncompressed. In a two-shot exchange the owner of a shard adds the
error of encoding the mean to the next mean, so that H plus the owners' residuals is the mean of
the h.

Source: Richtarik, Sokolov and Fatkhullin, NeurIPS 2021, arXiv:2110.03294, algorithm 2.
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

    buffers: ClassVar[tuple[str, ...]] = ("estimate",)
    joint: ClassVar[tuple[str, ...]] = ("mean estimate",)
    contracting: ClassVar[bool] = True

    @property
    def feedback(self) -> bool:
        return True

    def offer(self, gradient: Tensor, ctx: Context) -> Tensor:
        return gradient - ctx.state["estimate"]

    def keep(self, offered: Tensor, sent: Tensor, ctx: Context) -> None:
        ctx.state["estimate"] += sent

    def apply(self, mean: Tensor, ctx: Context) -> Tensor:
        return ctx.joint["mean estimate"].add_(mean)
