"""Memories: what is carried from step to step, such as error feedback or momentum.

A memory turns the gradient g of a worker into the tensor that is compressed, and receives what was
sent: the decoding of the worker's own payload. It may also turn the mean of what was sent into what
is applied (a running average, the estimate of EF21). Its buffers are float32 tensors of the
gradient's shape, in gradient units; the engine owns them.

The built-in memories are the files of compressors/memories. Another one is a frozen dataclass
derived from `Memory`, in a file of its own, beside a method, or registered under the entry-point
group `gcbench.memories`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gcbench.core import registry
from gcbench.core.compressor import Compressor, Context
from gcbench.core.errors import UsageError
from gcbench.core.payload import State


@dataclass(frozen=True)
class Memory:
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
    def carries(self) -> bool:
        """Whether the memory offers something else than the gradient."""
        return type(self).offer is not Memory.offer

    @property
    def fusible(self) -> bool:
        """Whether `Compressor.encode_feedback` on the buffer "residual" does all of its work.

        The engine then calls that in place of `offer`, `encode` and `keep`, if a method has it.
        """
        return False

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

    def offer(self, gradient: Tensor, ctx: Context) -> Tensor:
        """Return the tensor to compress, float32, (n,), and update the buffers in `ctx.state`.

        `gradient`, shape (n,), must not be changed. The result may be one of the buffers; the
        engine does not write to it. `ctx.joint` is not to be changed here.
        """
        return gradient

    def keep(self, offered: Tensor, sent: Tensor, ctx: Context) -> None:
        """Update `ctx.state`, given what `offer` returned and `sent`, the decoding of its payload.

        Called if `feedback` is true. `sent` is a buffer of the engine, which reuses it after the
        call.
        """

    def apply(self, mean: Tensor, ctx: Context) -> Tensor:
        """Return the gradient that all workers apply, shape (n,), given the mean of what they sent.

        `ctx.joint`: the buffers that the class attribute `joint` names, zeros before the first
        step. The result may be one of them, or `mean`, which may be changed in place.
        """
        return mean

    def dense(self) -> Memory:
        """Return the memory for exact communication: of tensors kept dense, and of dense steps."""
        return Memory()

    def rescale(self, state: State, factor: float) -> None:
        """Multiply the residuals by `factor` = old / new learning rate.

        A residual e, in gradient units, stands for the update eta * e, which is what Karimireddy et
        al. 2019 carry. When eta changes, e is rescaled so that the update stays the same.
        """
        for name in self.residuals:
            state[name].mul_(factor)


FORCED = "forced-residual"
"""The name by which a user asks for error feedback around a code that does not contract."""


def make(name: str, options: Mapping[str, Any]) -> Memory:
    """Return the memory of this name; UsageError for an unknown name, field or value."""
    return registry.make(f"memory {name!r}", registry.memory_class(name), dict(options))


def of(method: Compressor, options: Mapping[str, Any] | None = None) -> Memory:
    """Return the memory of the published method; `options` replace some of its fields."""
    chosen = {**method.memory_options, **(options or {})}
    if method.own_memory is None:
        return make(method.memory, chosen)
    made: Memory = registry.make(f"memory of {method!r}", method.own_memory, chosen)
    return made


def check_legal(name: str, method: Compressor) -> None:
    """Refuse combinations of memory `name` and method that do not converge.

    These are error feedback around a code that does not contract, and a memory with joint buffers
    around a method that aggregates otherwise than by the mean.

    Raises:
        UsageError: the message says what would happen, and what to use instead.
    """
    if name == FORCED:
        return
    cls: type[Memory]
    if name == method.memory and method.own_memory is not None:
        cls = method.own_memory
    else:
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
