"""Memories: state carried from step to step, such as error feedback or momentum.

A memory computes the tensor to compress from a worker's gradient, and then receives the decoded
form of the payload that was sent. It may also transform the mean of what was sent before it is
applied (a running average, the estimate of EF21). Its buffers are float32 tensors of the gradient's
shape, in gradient units; the engine owns them.

The built-in memories are the files of compressors/memories. To add one, derive a frozen dataclass
from `Memory`: in a separate file, next to a method, or registered under the entry-point group
`gcbench.memories`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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
    """State carried from step to step, and its updates; `--memory-set name=value` sets a field."""

    buffers: ClassVar[tuple[str, ...]] = ()
    """Names of the buffers of each worker."""
    residuals: ClassVar[tuple[str, ...]] = ()
    """Buffers of updates not applied yet; they are rescaled with the learning rate."""
    joint: ClassVar[tuple[str, ...]] = ()
    """Names of the buffers of `apply`, whose values are equal on all workers."""
    contracting: ClassVar[bool] = False
    """Whether the memory needs a contractive code though it has no residuals."""
    has_momentum: ClassVar[bool] = False
    """Whether the memory applies momentum, so that the optimizer must not."""

    @property
    def lossy(self) -> bool:
        """Whether part of the error is dropped: means and residuals do not sum to the gradients."""
        return False

    @property
    def averages(self) -> bool:
        """Whether a weighted average of the gradients of several steps is applied.

        Weights are not negative and add up to at most 1. Unlike with `has_momentum`, the optimizer
        may apply momentum, too. Exact communication may leave the average out.
        """
        return False

    @property
    def feedback(self) -> bool:
        """Whether `keep` is called with the decoded payload; by default if there are residuals."""
        return bool(self.residuals)

    @property
    def carries(self) -> bool:
        """Whether `offer` returns something other than the gradient."""
        return type(self).offer is not Memory.offer

    @property
    def fusible(self) -> bool:
        """Whether `Compressor.encode_feedback` with the buffer "residual" is equivalent to it.

        If a method has it, the engine calls it instead of `offer`, `encode` and `keep`.
        """
        return False

    @property
    def masks(self) -> bool:
        """Whether `keep` clears a buffer wherever `sent` is not 0.

        Such a memory needs a sparse code (see `check_masking`); with an exact code, `dense()`
        replaces it.
        """
        return False

    @property
    def owner(self) -> bool:
        """Whether a shard's owner keeps the error of encoding the mean (two-shot exchange)."""
        return self.feedback

    @property
    def owner_decay(self) -> float:
        """Factor of an owner's residual when it is added to the next mean of its shard."""
        return 1.0

    def state(self, like: Tensor) -> State:
        """Return the initial buffers, by name: zeros with the shape of `like`."""
        return {name: torch.zeros_like(like) for name in self.buffers}

    def offer(self, gradient: Tensor, ctx: Context) -> Tensor:
        """Return the tensor to compress, float32, (n,), and update the buffers in `ctx.state`.

        Do not modify `gradient`, shape (n,), or `ctx.joint`. The result may be one of the buffers;
        the engine does not write to it.
        """
        return gradient

    def keep(self, offered: Tensor, sent: Tensor, ctx: Context) -> None:
        """Update `ctx.state`, given the result of `offer` and `sent`, its decoded payload.

        Called if `feedback` is true. `sent` is a buffer that the engine reuses after the call.
        """

    def apply(self, mean: Tensor, ctx: Context) -> Tensor:
        """Return the gradient that all workers apply, shape (n,), given the mean of what they sent.

        `ctx.joint` has the buffers named by the class attribute `joint`, initially zeros. `mean`
        may be modified in place. The result may be `mean` or one of the buffers.
        """
        return mean

    def dense(self) -> Memory:
        """Return the memory for exact communication: tensors kept dense, and fp32 steps."""
        return Memory()

    def rescale(self, state: State, factor: float) -> None:
        """Multiply the residuals by `factor` = old / new learning rate.

        A residual e, in gradient units, represents the update eta * e, which Karimireddy et al.
        2019 carry. When eta changes, e is rescaled so that the update stays the same.
        """
        for name in self.residuals:
            state[name].mul_(factor)


FORCED = "forced-residual"
"""The name that requests error feedback with a code that is not contractive."""


def make(name: str, options: Mapping[str, Any]) -> Memory:
    """Return the memory of this name; UsageError for an unknown name, field or value."""
    return registry.make(f"memory {name!r}", registry.memory_class(name), dict(options))


def of(method: Compressor, options: Mapping[str, Any] | None = None) -> Memory:
    """Return the memory of the published method; `options` replace some of its fields."""
    chosen = {**method.memory_options, **(options or {})}
    if method.own_memory is None:
        return make(method.memory, chosen)
    memory: Memory = registry.make(f"memory of {method!r}", method.own_memory, chosen)
    return memory


def defaults(name: str, stages: Sequence[Compressor]) -> Mapping[str, Any]:
    """Return the fields that a method sets in its published memory; none in another memory `name`.

    `stages`: the method with the fields of each stage of a schedule.

    Raises:
        UsageError: a stage changes such a field, but the memory has one value for all steps.
    """
    first = stages[0]
    if name != first.memory:
        return {}
    for field, value in first.memory_options.items():
        later = [stage.memory_options.get(field) for stage in stages]
        if any(each != value for each in later):
            raise UsageError(
                f"{field} changes from {value} to {next(x for x in later if x != value)}: memory "
                f"{name!r} has the same field, whose value cannot change by step. Set {field} to "
                "one value"
            )
    return first.memory_options


def check_legal(name: str, method: Compressor) -> None:
    """Check that the combination of memory `name` and method can converge.

    Error feedback needs a contractive code, and a memory with joint buffers needs a method that
    aggregates by the mean.

    Raises:
        UsageError: one of these does not hold; the message names an alternative.
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
            f"memory {name!r} accumulates the means of payloads, but {method!r} does not apply "
            f"such a mean. Use --memory {method.memory}"
        )
    if (cls.residuals or cls.contracting) and not method.claims.contractive:
        raise UsageError(
            f"memory {name!r} feeds the error of {method!r} back, but the method is not "
            "contractive: its error may exceed the gradient, so residuals can grow without bound. "
            f"Use --memory none, or force it with --memory {FORCED}"
        )


def _round_trips(method: Compressor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield matrices of irregular values, of three magnitudes and two sizes, and what arrives."""
    probes = ((40, 51, 1.0), (40, 51, 2.0**-20), (40, 51, 2.0**20), (300, 400, 1.0))
    for rows, columns, scale in probes:
        count = torch.arange(rows * columns, dtype=torch.float64).view(rows, columns)
        signs = torch.where((count * math.sqrt(2)).frac() < 0.5, scale, -scale)
        probe = (signs * (1 + (count * math.sqrt(3)).frac())).float()
        yield probe, method.decompress(method.compress(probe))


def for_method(memory: Memory, method: Compressor) -> Memory:
    """Return the memory to use with this method: without masking if the method is exact."""
    exact = memory.masks and all(torch.equal(*pair) for pair in _round_trips(method))
    return memory.dense() if exact else memory


def check_masking(name: str, memory: Memory, method: Compressor) -> None:
    """Check that a memory that masks has a sparse or exact code.

    Raises:
        UsageError: it has not; the message names an alternative.
    """
    if not memory.masks:
        return
    if any(
        bool((arrived != 0).all()) and not torch.equal(probe, arrived)
        for probe, arrived in _round_trips(method)
    ):
        raise UsageError(
            f"memory {name!r} clears its momentum wherever an element was sent, and {method!r} "
            "sends every element, so no momentum would remain. Use --memory residual, or keep the "
            "momentum with --memory-set masking=false"
        )


def check_shared(name: str, memory: Memory, method: Compressor) -> None:
    """Check that a method and its published memory agree in the fields that they share.

    Raises:
        UsageError: a field has another value in the memory, which the method would not know.
    """
    if name != method.memory:
        return
    fields = registry.fields(type(method))
    for field in (each for each in method.memory_options if each in fields):
        value, expected = getattr(memory, field), getattr(method, field)
        if value != expected:
            raise UsageError(
                f"memory {name!r} has {field}={value}, but {method!r} has {field}={expected}, and "
                f"the update uses both. Set {field} in the method, which sets it in the memory: "
                f"--set {field}={value}, or options={{{field!r}: {value}}}"
            )
