"""Memories, what is carried from step to step: error feedback, momentum, DGC, EF21, LoCo.

A memory turns the gradient g of a worker into the tensor that is compressed, and is told what was
sent: the decoding of the worker's own payload. It may also turn the mean of what was sent into what
is applied (a running average, the estimate of EF21). Its buffers are float32 tensors of the
gradient's shape, in gradient units; the engine owns them.

A third party's memory is a frozen dataclass derived from `Memory`, registered under the entry-point
group `gcbench.memories`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gcbench.core import registry
from gcbench.core.compressor import Compressor
from gcbench.core.errors import UsageError

State = dict[str, Tensor]


class Memory(ABC):
    """A rule for what is carried from step to step; `--memory-set name=value` sets its fields."""

    buffers: ClassVar[tuple[str, ...]] = ()
    """Names of the buffers of each worker."""
    residuals: ClassVar[tuple[str, ...]] = ()
    """The buffers that hold updates still to be applied: they follow the learning rate."""
    joint: ClassVar[tuple[str, ...]] = ()
    """Names of the buffers that `apply` keeps: every worker computes the same values for them."""
    contracting: ClassVar[bool] = False
    """Whether the memory converges only for a code that contracts, though it has no residuals."""
    has_momentum: ClassVar[bool] = False
    """Whether the memory applies the momentum, so that the optimizer must add none."""

    @property
    def lossy(self) -> bool:
        """Whether part of the error is dropped on purpose.

        Applied means and residuals then do not add up to the gradients.
        """
        return False

    @property
    def feedback(self) -> bool:
        """Whether `keep` is called with what was sent; by default if there are residuals."""
        return bool(self.residuals)

    @property
    def masks(self) -> bool:
        """Whether `keep` clears a buffer wherever `sent` is not 0.

        Such a memory needs a sparse code (see `check_masking`). In steps in which the code is
        exact, `dense()` is used instead.
        """
        return False

    @property
    def owner(self) -> bool:
        """Whether the owner of a shard keeps the error of encoding the mean (two-shot exchange)."""
        return self.feedback

    @property
    def owner_decay(self) -> float:
        """Share of an owner's residual that is offered again, with the next mean of its shard."""
        return 1.0

    def state(self, like: Tensor) -> State:
        """Return the buffers before the first step, by name: zeros with the shape of `like`."""
        return {name: torch.zeros_like(like) for name in self.buffers}

    @abstractmethod
    def offer(self, gradient: Tensor, state: State, workers: int) -> Tensor:
        """Return the tensor to compress, float32, shape (n,), and update the buffers in `state`.

        `gradient`, shape (n,), must not be changed; `workers`: their number. The result may be a
        buffer of `state`; the engine does not write to it.
        """

    def keep(self, offered: Tensor, sent: Tensor, state: State) -> None:  # noqa: B027 - optional
        """Update `state`, given what `offer` returned and `sent`, the decoding of its payload.

        Called if `feedback` is true. `sent` is a buffer of the engine, which reuses it after the
        call.
        """

    def apply(self, mean: Tensor, joint: State) -> Tensor:
        """Return the gradient that all workers apply, shape (n,), given the mean of what they sent.

        `joint`: the buffers that the class attribute `joint` names, zeros before the first step.
        The result may be one of them, or `mean`, which may be changed in place.
        """
        return mean

    def dense(self) -> Memory:
        """Return the memory for exact communication: of tensors kept dense, and of dense steps."""
        return NoMemory()

    def rescale(self, state: State, factor: float) -> None:
        """Multiply the residuals by `factor` = old / new learning rate.

        A residual e, in gradient units, stands for the update eta * e, which is what Karimireddy et
        al. 2019 carry. When eta changes, e is rescaled so that the update stays the same.
        """
        for name in self.residuals:
            state[name].mul_(factor)


@dataclass(frozen=True)
class NoMemory(Memory):
    """Nothing is carried."""

    def offer(self, gradient: Tensor, state: State, workers: int) -> Tensor:  # noqa: D102
        return gradient


@dataclass(frozen=True)
class Residual(Memory):
    """Error feedback: p = g + decay * e; e = p - what was sent of p.

    Seide et al. 2014 (with the carried term that their formula leaves out), Karimireddy et al.
    2019. On the owner of a shard: the same, decay included, with the mean of all workers in place
    of g.
    """

    decay: float = 1.0  # share of the residual that is offered again
    at_owner: bool = True  # two-shot: the owner keeps the error of encoding the mean, too

    buffers: ClassVar[tuple[str, ...]] = ("residual",)
    residuals: ClassVar[tuple[str, ...]] = ("residual",)

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay={self.decay}: above 0 and at most 1 allowed")

    @property
    def lossy(self) -> bool:  # noqa: D102
        return self.decay != 1

    @property
    def owner(self) -> bool:  # noqa: D102
        return self.at_owner

    @property
    def owner_decay(self) -> float:  # noqa: D102
        return self.decay

    def offer(self, gradient: Tensor, state: State, workers: int) -> Tensor:  # noqa: D102
        residual = state["residual"]
        return torch.add(gradient, residual, alpha=self.decay, out=residual)

    def keep(self, offered: Tensor, sent: Tensor, state: State) -> None:  # noqa: D102
        torch.sub(offered, sent, out=state["residual"])


@dataclass(frozen=True)
class Loco(Memory):
    """LoCo: error feedback by a moving average of the errors, kept in 8 bits an element.

    p = g + e is compressed, q is its decoding, and e <- Q8(beta e + (1 - beta) (p - q)). Q8 rounds
    to nearest as `int8` does, in blocks of `BLOCK` elements. The owner of a shard in a two-shot
    exchange keeps no error.

    Xie, Lin, Toh and Zhou 2024, arXiv:2407.04480; beta = 0.8 is `err_beta` of the port in
    DeepSpeed. The buffer holds the values of the 8-bit codes as float32: updates are LoCo's, but no
    memory is saved. The source's periodic reset of e to zero is left out.
    """

    beta: float = 0.8  # weight of the errors of earlier steps

    BLOCK: ClassVar[int] = 256
    buffers: ClassVar[tuple[str, ...]] = ("error",)
    residuals: ClassVar[tuple[str, ...]] = ("error",)

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1:
            raise ValueError(f"beta={self.beta}: from 0 to below 1 allowed")

    @property
    def lossy(self) -> bool:  # noqa: D102
        return True

    @property
    def owner(self) -> bool:  # noqa: D102
        return False

    def offer(self, gradient: Tensor, state: State, workers: int) -> Tensor:  # noqa: D102
        return gradient + state["error"]

    def keep(self, offered: Tensor, sent: Tensor, state: State) -> None:  # noqa: D102
        error = state["error"].mul_(self.beta).add_(offered - sent, alpha=1 - self.beta)
        _to_eight_bits(error, self.BLOCK)


def _to_eight_bits(x: Tensor, block: int) -> None:
    """Replace x, float32, shape (n,), in place by its 8-bit quantization in blocks, decoded.

    It repeats `ops.int8`, because `gcbench.core` must not import the operations.
    """
    rows = nn.functional.pad(x, (0, -len(x) % block)).view(-1, block)
    top = rows.abs().amax(1, keepdim=True)
    divisor = torch.where(top < 2.0**-100, torch.inf, top)
    codes = torch.round(rows / divisor * 127)
    x.copy_((codes / 127 * top).view(-1)[: len(x)])


@dataclass(frozen=True)
class Ef21(Memory):
    """EF21: every worker sends the compressed difference to its gradient estimate.

    c = C(g - h), h <- h + c on each worker, and H <- H + mean of the workers' c, which all apply. H
    is the mean of the estimates h, though these are never sent. For fixed gradients every h
    converges to g and H to the mean gradient, which error feedback with a biased code does not
    achieve. h and H begin at 0; the source allows any beginning, and sends the first gradient
    uncompressed. The owner of a shard in a two-shot exchange adds the error of encoding the mean to
    the next mean, so that H plus what the owners keep is the mean of the h.

    Richtarik, Sokolov and Fatkhullin, NeurIPS 2021, arXiv:2110.03294, algorithm 2.
    """

    buffers: ClassVar[tuple[str, ...]] = ("estimate",)
    joint: ClassVar[tuple[str, ...]] = ("mean estimate",)
    contracting: ClassVar[bool] = True

    @property
    def feedback(self) -> bool:  # noqa: D102
        return True

    def offer(self, gradient: Tensor, state: State, workers: int) -> Tensor:  # noqa: D102
        return gradient - state["estimate"]

    def keep(self, offered: Tensor, sent: Tensor, state: State) -> None:  # noqa: D102
        state["estimate"] += sent

    def apply(self, mean: Tensor, joint: State) -> Tensor:  # noqa: D102
        return joint["mean estimate"].add_(mean)


@dataclass(frozen=True)
class Momentum(Memory):
    """Momentum on every worker: m <- beta m + (1 - beta) g is compressed; it is not synchronized.

    With the sign as compressor this is Signum (Bernstein et al. 2018, algorithm 2).
    """

    beta: float = 0.9

    buffers: ClassVar[tuple[str, ...]] = ("momentum",)
    has_momentum: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1:
            raise ValueError(f"beta={self.beta}: from 0 to below 1 allowed")

    def offer(self, gradient: Tensor, state: State, workers: int) -> Tensor:  # noqa: D102
        return state["momentum"].mul_(self.beta).add_(gradient, alpha=1 - self.beta)

    def dense(self) -> Memory:  # noqa: D102
        return self


@dataclass(frozen=True)
class Dgc(Memory):
    """Deep gradient compression (Lin et al. 2018): momentum correction and factor masking.

    u <- m u + g; v <- v + u (Nesterov: u <- m (u + g); v <- v + u + g). v is compressed, what was
    sent is subtracted from v, and with masking u is set to 0 where something was sent. The
    optimizer adds no further momentum. First g is clipped to a 2-norm of clip / sqrt(N), where
    the compressed tensors count as one vector and the dense ones as another. In the hooks for DDP
    and FSDP2, which send gradients before all have come, each lane is clipped by itself: in
    `comm_hook` tensors of together about `bucket_mb`, in `shard_hook` those of a module.

    Tensors that stay dense send u (with Nesterov u + g), which is plain momentum. So do all tensors
    in exact steps: before `start_step`, or while the ratio of a schedule keeps every element.
    """

    momentum: float = 0.9
    masking: bool = True
    nesterov: bool = False
    clip: float = 0.0  # threshold of the 2-norm of the mean gradient; 0: no clipping

    buffers: ClassVar[tuple[str, ...]] = ("velocity", "residual")
    has_momentum: ClassVar[bool] = True
    residuals: ClassVar[tuple[str, ...]] = ("residual",)

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum={self.momentum}: from 0 to below 1 allowed")
        if not (math.isfinite(self.clip) and self.clip >= 0):
            raise ValueError(f"clip={self.clip}: a 2-norm, 0 for none")

    @property
    def masks(self) -> bool:  # noqa: D102
        return self.masking

    def offer(self, gradient: Tensor, state: State, workers: int) -> Tensor:  # noqa: D102
        if self.clip:
            # In float32 a sum of squares may overflow, and the gradient would be clipped to zero.
            norm = float(gradient.double().square().sum().sqrt())
            limit = self.clip / math.sqrt(workers)
            if norm > limit:
                gradient = gradient * (limit / norm)
        u, v = state["velocity"], state["residual"]
        if self.nesterov:
            u.add_(gradient).mul_(self.momentum)
            v.add_(u).add_(gradient)
        else:
            u.mul_(self.momentum).add_(gradient)
            v.add_(u)
        return v

    def keep(self, offered: Tensor, sent: Tensor, state: State) -> None:  # noqa: D102
        torch.sub(offered, sent, out=state["residual"])
        if self.masking:
            state["velocity"].masked_fill_(sent != 0, 0.0)

    def dense(self) -> Memory:  # noqa: D102
        # Everything is sent, so masking would clear the momentum at every step.
        return Dgc(self.momentum, masking=False, nesterov=self.nesterov, clip=self.clip)


FORCED = "forced-residual"
"""The name by which a user asks for error feedback around a code that does not contract."""
BUILT_IN: Mapping[str, type[Memory]] = {
    "none": NoMemory,
    "residual": Residual,
    FORCED: Residual,
    "momentum": Momentum,
    "dgc": Dgc,
    "ef21": Ef21,
    "loco": Loco,
}


def make(name: str, options: Mapping[str, Any]) -> Memory:
    """Return the memory of this name; UsageError for an unknown name, field or value."""
    return registry.make(f"memory {name!r}", registry.memory_class(name), dict(options))


def check_legal(name: str, method: Compressor) -> None:
    """Refuse combinations of memory `name` and method that do not converge.

    These are error feedback around a code that does not contract, and a memory with joint buffers
    around a method that aggregates otherwise than by the mean.

    Raises:
        UsageError: the message says what would happen, and what to use instead.
    """
    if name not in registry.memories() or name == FORCED:
        return
    cls = registry.memory_class(name)
    if cls.joint and method.claims.aggregate != "mean":
        raise UsageError(
            f"memory {name!r} adds up the means of what was sent, and what {method!r} applies is "
            f"no such mean. Use --memory {method.memory}"
        )
    if (cls.residuals or cls.contracting) and not method.claims.contractive:
        raise UsageError(
            f"memory {name!r} feeds the error of {method!r} back, but the method does not "
            "contract: its error may exceed the gradient, and nothing bounds what is carried. "
            f"Use --memory none, or ask for it by name: --memory {FORCED}"
        )


def _round_trip(method: Compressor) -> tuple[Tensor, Tensor]:
    """Return a matrix of irregular values, magnitudes from 1 to 2, and its decoding."""
    count = torch.arange(40 * 51, dtype=torch.float64).view(40, 51)
    signs = torch.where((count * math.sqrt(2)).frac() < 0.5, 1.0, -1.0)
    probe = (signs * (1 + (count * math.sqrt(3)).frac())).float()
    return probe, method.decompress(method.compress(probe))


def for_method(made: Memory, method: Compressor) -> Memory:
    """Return the memory to use with this method: without a mask if the method is exact."""
    return made.dense() if made.masks and torch.equal(*_round_trip(method)) else made


def check_masking(name: str, made: Memory, method: Compressor) -> None:
    """Refuse a memory that masks around a code that is neither sparse nor exact.

    Raises:
        UsageError: the message says what would happen, and what to use instead.
    """
    if not made.masks:
        return
    probe, arrived = _round_trip(method)
    if bool((arrived != 0).all()) and not torch.equal(probe, arrived):
        raise UsageError(
            f"memory {name!r} clears its momentum where something was sent, and {method!r} sends "
            "every element: no momentum would be left, and it would equal a plain residual. Use "
            "--memory residual, or keep the momentum: --memory-set masking=false"
        )
