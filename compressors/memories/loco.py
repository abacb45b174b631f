"""LoCo: error feedback by a moving average of the errors, rounded to 8 bits per element.

p = g + e is compressed to q, and e <- Q8(beta e + (1 - beta) (p - q)). Q8 rounds to nearest as
`int8` does, in blocks of 256 elements. In a two-shot exchange owners have no residual.

Source: Xie, Lin, Toh and Zhou 2024, arXiv:2407.04480; beta = 0.8 is `err_beta` of the port in
DeepSpeed. The buffer has the values of the 8-bit codes as float32: updates are LoCo's, but no
memory is saved. The source's periodic reset of e to zero is not implemented.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gcbench import ops
from gcbench.core.memory import Memory
from gcbench.core.payload import Context, Segments


@dataclass(frozen=True)
class Loco(Memory):
    """A moving average of the errors, rounded to 8 bits."""

    beta: float = 0.8  # weight of the errors of earlier steps

    BLOCK: ClassVar[int] = 256
    buffers: ClassVar[tuple[str, ...]] = ("error",)
    residuals: ClassVar[tuple[str, ...]] = ("error",)

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1:
            raise ValueError(f"beta={self.beta}: expected at least 0 and below 1")

    @property
    def lossy(self) -> bool:
        return True

    @property
    def owner(self) -> bool:
        return False

    def offer(self, gradient: Tensor, ctx: Context) -> Tensor:
        return gradient + ctx.state["error"]

    def keep(self, offered: Tensor, sent: Tensor, ctx: Context) -> None:
        error = ctx.state["error"].mul_(self.beta).add_(offered - sent, alpha=1 - self.beta)
        blocks = Segments.of([error.shape], self.BLOCK)
        codes, scales = ops.int8.encode(error, blocks, "nearest", ctx.key)
        ops.int8.decode(codes, scales, blocks, out=error)
