"""Error feedback: the compression error is added to the next gradient.

p = g + decay * e is compressed; e = p - decoded payload. The owner of a shard does the same,
including the decay, with the mean of all workers instead of g.

Source: Seide et al. 2014 (with the carried term that their formula omits); Karimireddy et al. 2019,
arXiv:1901.09847.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gcbench.core.memory import Memory
from gcbench.core.payload import Context


@dataclass(frozen=True)
class Residual(Memory):
    """Error feedback, with an optional decay."""

    decay: float = 1.0  # factor of the residual when it is added to the next gradient
    at_owner: bool = True  # two-shot: owners have a residual for the encoded mean

    buffers: ClassVar[tuple[str, ...]] = ("residual",)
    residuals: ClassVar[tuple[str, ...]] = ("residual",)

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay={self.decay}: expected above 0 and at most 1")

    @property
    def fusible(self) -> bool:
        return type(self) is Residual and self.decay == 1

    @property
    def lossy(self) -> bool:
        return self.decay != 1

    @property
    def owner(self) -> bool:
        return self.at_owner

    @property
    def owner_decay(self) -> float:
        return self.decay

    def offer(self, gradient: Tensor, ctx: Context) -> Tensor:
        residual = ctx.state["residual"]
        return torch.add(gradient, residual, alpha=self.decay, out=residual)

    def keep(self, offered: Tensor, sent: Tensor, ctx: Context) -> None:
        torch.sub(offered, sent, out=ctx.state["residual"])
