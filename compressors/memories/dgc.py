"""Deep gradient compression: momentum correction and factor masking.

u <- m u + g; v <- v + u (Nesterov: u <- m (u + g); v <- v + u + g). v is compressed, the decoded
payload is subtracted from v, and with masking u is set to 0 wherever an element was sent. The
optimizer applies no other momentum. First g is clipped to a 2-norm of clip / sqrt(N), with all
compressed tensors as one vector and all dense tensors as another. The hooks for DDP and FSDP2,
which send gradients before all are ready, clip each lane separately: about `bucket_mb` of tensors
in `comm_hook`, the tensors of a module in `shard_hook`.

Tensors that stay dense send u (with Nesterov u + g), which is plain momentum. So do all tensors in
exact steps: before `start_step`, or while a schedule's ratio keeps every element.

Source: Lin et al., ICLR 2018, arXiv:1712.01887.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gcbench.core.memory import Memory
from gcbench.core.payload import Context


@dataclass(frozen=True)
class Dgc(Memory):
    """Momentum correction and factor masking."""

    momentum: float = 0.9
    masking: bool = True
    nesterov: bool = False
    clip: float = 0.0  # threshold of the 2-norm of the mean gradient; 0: no clipping

    buffers: ClassVar[tuple[str, ...]] = ("velocity", "residual")
    has_momentum: ClassVar[bool] = True
    residuals: ClassVar[tuple[str, ...]] = ("residual",)

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum={self.momentum}: expected at least 0 and below 1")
        if not (math.isfinite(self.clip) and self.clip >= 0):
            raise ValueError(f"clip={self.clip}: expected a 2-norm, or 0 for none")

    @property
    def masks(self) -> bool:
        return self.masking

    def offer(self, gradient: Tensor, ctx: Context) -> Tensor:
        if self.clip:
            # float64: an overflow of the sum of squares would clip the gradient to zero.
            norm = float(gradient.double().square().sum().sqrt())
            limit = self.clip / math.sqrt(ctx.workers)
            if norm > limit:
                gradient = gradient * (limit / norm)
        u, v = ctx.state["velocity"], ctx.state["residual"]
        if self.nesterov:
            u.add_(gradient).mul_(self.momentum)
            v.add_(u).add_(gradient)
        else:
            u.mul_(self.momentum).add_(gradient)
            v.add_(u)
        return v

    def keep(self, offered: Tensor, sent: Tensor, ctx: Context) -> None:
        torch.sub(offered, sent, out=ctx.state["residual"])
        if self.masking:
            ctx.state["velocity"].masked_fill_(sent != 0, 0.0)

    def dense(self) -> Memory:
        # Every element is sent, so masking would clear the momentum at every step.
        return Dgc(self.momentum, masking=False, nesterov=self.nesterov, clip=self.clip)
