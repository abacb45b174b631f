"""1-bit Adam: the momentum of Adam is exchanged in one bit per element, after a warm-up in fp32.

Steps t <= T (`--start-step T`): Adam, with gradients exchanged in fp32. Then its second moment v
is frozen, and worker i with gradient g_i sends the momentum:
    p_i = b1 m + (1 - b1) g_i + e_i;   c_i = C(p_i);   e_i <- p_i - c_i;
owner of a shard:   s = mean_i c_i + E;   m <- C(s);   E <- s - m;
all:   theta <- theta - lr (m / (1 - b1^t)) / (sqrt(v) + eps).
C(x) = (||x||_1 / d) sign(x) for a tensor of d elements, as in `efsignsgd`. Error feedback needs an
update that is linear in the gradients, hence the constant v.

Biased; contractive: ||C(x) - x||^2 = (1 - phi) ||x||^2, phi the density of x: at least 1/d, and
2/pi for long normal x. Residuals are in units of the momentum, so the learning rate does not
rescale them.
refresh=k updates v as 0/1 Adam does, at steps t_1 = 1, t_2, ... and at no others, which exchange
gradients in fp32: t_(j+1) = t_j + 2^floor(j / k). It leaves out 0/1 Adam's local steps.
Wire: 1 bit per element and one float32 per tensor, up and down; 32 bits per element during the
warm-up (15 to 25 % of the steps in the source). Adam updates tensors that stay dense; with
`refresh`, their v changes at the steps t_j alone.
Source: Tang et al., ICML 2021, arXiv:2102.02888, algorithm 1. 0/1 Adam: Lu et al. 2022,
arXiv:2202.06009; code: DeepSpeed, zoadam.py.
Differs: v is frozen with its bias correction, so the step size does not jump after a short warm-up;
with `refresh` it counts updates. Skipped steps do not count, except in `refresh`.
An element whose gradient was 0 throughout the warm-up does not move afterwards, as with DeepSpeed's
momentum mask (test_onebitadam.py::test_elements_without_gradient_do_not_move). With `refresh`,
DeepSpeed compresses gradients, not momenta, between the updates of v, and corrects no bias.

>>> import gcbench, torch
>>> method = gcbench.get_compressor("onebitadam")
>>> method.decompress(method.compress(torch.tensor([4.0, -1.0, 0.5, -2.5])))
tensor([ 2., -2.,  2., -2.])
>>> method.rule
FrozenAdam(beta1=0.9, beta2=0.999, eps=1e-08, refresh=0, frozen=True)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from gcbench.core.memory import Memory
from gcbench.core.payload import Context
from gcbench.core.registry import LATER
from gcbench.core.rule import UpdateRule

from .efsignsgd import EFSignSGD, EFSignSGDClaims


def _check_beta(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{name}={value}: expected at least 0 and below 1")


@dataclass(frozen=True)
class ExchangedMomentum(Memory):
    """The momentum that all workers received last, and the error of compressing the next one."""

    beta1: float = 0.9
    warm_up: bool = False  # exchange gradients in fp32, and update the momentum by their mean

    buffers: ClassVar[tuple[str, ...]] = ("error",)
    joint: ClassVar[tuple[str, ...]] = ("momentum",)
    contracting: ClassVar[bool] = True
    has_momentum: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_beta("beta1", self.beta1)

    @property
    def feedback(self) -> bool:
        return not self.warm_up

    def offer(self, gradient: Tensor, ctx: Context) -> Tensor:
        if self.warm_up:
            return gradient
        return ctx.joint["momentum"].lerp(gradient, 1 - self.beta1) + ctx.state["error"]

    def keep(self, offered: Tensor, sent: Tensor, ctx: Context) -> None:
        torch.sub(offered, sent, out=ctx.state["error"])

    def apply(self, mean: Tensor, ctx: Context) -> Tensor:
        ctx.joint["momentum"].lerp_(mean, 1 - self.beta1 if self.warm_up else 1.0)
        return mean

    def dense(self) -> Memory:
        return replace(self, warm_up=True)


@dataclass(frozen=True)
class FrozenAdam(UpdateRule):
    """Adam whose second moment is updated by the gradients of the warm-up, then frozen."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    refresh: int = 0
    frozen: bool = True

    buffers: ClassVar[tuple[str, ...]] = ("variance",)  # the second moment, bias-corrected
    reads: ClassVar[tuple[str, ...]] = ("momentum",)
    needs_warm_up: ClassVar[bool] = True

    def update(self, mean: Tensor, ctx: Context) -> Tensor:
        t = ctx.step + 1 - ctx.skipped  # updates of the momentum
        variance, count = ctx.joint["variance"], self._updates(ctx.step) if self.refresh else t
        if count and not self.frozen:  # `mean` is the gradient
            variance.lerp_(mean * mean, (1 - self.beta2) / (1 - self.beta2**count))
        momentum = ctx.joint["momentum"] / (1 - self.beta1**t)
        return torch.where(variance > 0, momentum / (variance.sqrt() + self.eps), 0.0)

    def _updates(self, step: int) -> int:
        """Return how many updates of v there are up to this step, 0 if it is not one of them."""
        doublings = (step // self.refresh + 1).bit_length() - 1
        since = step + 1 - self.refresh * ((1 << doublings) - 1)
        return 0 if since % (1 << doublings) else self.refresh * doublings + (since >> doublings)

    def in_fp32(self, step: int) -> bool:
        return self.refresh > 0 and self._updates(step) > 0

    def dense(self) -> UpdateRule:
        return replace(self, frozen=False)


@dataclass(frozen=True)
class OneBitAdam(EFSignSGD):
    """The signs of the momentum, scaled by their mean magnitude."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    refresh: int = field(default=0, metadata=LATER)  # 0/1 Adam: 16; 0: v stays frozen

    collectives: ClassVar[tuple[str, ...]] = ("twoshot", "allgather")
    memory: ClassVar[Any] = ExchangedMomentum
    recipe: ClassVar[Mapping[str, Any]] = {"lr": 1e-3, "start_step": 100}

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_beta("beta1", self.beta1)
        _check_beta("beta2", self.beta2)
        if not 0 <= self.eps < math.inf:
            raise ValueError(f"eps={self.eps}: expected a finite number, at least 0")
        if self.refresh < 0:
            raise ValueError(f"refresh={self.refresh}: expected at least 0")

    @property
    def memory_options(self) -> Mapping[str, Any]:
        return {"beta1": self.beta1}

    @property
    def rule(self) -> UpdateRule:
        return FrozenAdam(self.beta1, self.beta2, self.eps, self.refresh)


class OneBitAdamClaims(EFSignSGDClaims, of=OneBitAdam):
    """Contractive; with one worker and an exact codec the method is Adam with a frozen v."""

    codec: OneBitAdam

    def uncompressed(self, gradients: Iterable[Tensor], warm_up: int) -> Iterator[Tensor]:
        b1, b2 = self.codec.beta1, self.codec.beta2
        m = v = torch.zeros(())
        for t, g in enumerate(gradients, 1):
            m = torch.lerp(m, g, 1 - b1)
            if t <= warm_up:
                v = torch.lerp(v, g * g, (1 - b2) / (1 - b2**t))
            yield torch.where(v > 0, m / (1 - b1**t) / (v.sqrt() + self.codec.eps), 0.0)
