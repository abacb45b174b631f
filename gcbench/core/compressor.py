"""The contract of a gradient compressor.

A compressor is a pure codec over one flat float32 tensor. It never communicates, never asks for a
device, keeps no state and touches no global random generator; workers, residuals and collectives
belong to the engine. Its hyper-parameters are the fields of a frozen dataclass.

Callers do not call a method's functions directly: `gcbench.core.codec` checks what goes in and
comes out, and provides output buffers. What a method claims about its errors is in a separate
object (`gcbench.core.claims`), which checks read and no engine needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gcbench.core import codec
from gcbench.core.claims import Claims
from gcbench.core.errors import GcbenchError, PayloadError, UsageError
from gcbench.core.payload import (
    TILE,
    Context,
    Key,
    Layout,
    Payload,
    Prepared,
    Segments,
    aligned,
    check_finite,
    layout_bytes,
)
from gcbench.core.rule import UpdateRule

__all__ = [
    "COLLECTIVES",
    "TILE",
    "Compressed",
    "Compressor",
    "Context",
    "Key",
    "Layout",
    "MultiRoundCompressor",
    "Parts",
    "Payload",
    "Prepared",
    "Segments",
    "aligned",
    "check_finite",
    "cuttable",
    "fuses_feedback",
    "layout_bytes",
    "overrides",
    "requantizes",
]

COLLECTIVES = ("allreduce", "allgather", "twoshot")
Parts: TypeAlias = Tensor | tuple[Tensor, ...] | Payload
"""What an encoder returns: the parts of a payload, 1-D tensors; or one tensor, if there is one."""


def check_collectives(name: str, declared: object) -> None:
    """Check the collectives that a method declares.

    Raises:
        GcbenchError: they are no tuple, an empty one, or one is unknown or listed twice.
    """
    names = declared if isinstance(declared, tuple) else ()
    if not names or len({*names}) < len(names) or not {*names} <= {*COLLECTIVES}:
        raise GcbenchError(
            f"{name} declares collectives = {declared!r}: a tuple of some of {COLLECTIVES} is "
            "expected, the default first"
        )


def claims_property(name: str, declared: object) -> property:
    """Return the property for the claims that a method declares: a class, or a property already.

    Raises:
        GcbenchError: it is something else; the message shows the right form.
    """
    if isinstance(declared, property):
        return declared
    if isinstance(declared, type) and issubclass(declared, Claims):
        return property(declared)
    raise GcbenchError(
        f"{name} declares claims = {declared!r}: a class derived from gcbench.Claims is expected, "
        "such as `class claims(gcbench.Claims): unbiased = True`, or a property that returns "
        "MyClaims(self)"
    )


class Compressor(ABC):
    """One method of gradient compression: a pure codec over a flat float32 tensor.

    A method defines `encode`, `decode` and, where sizes do not depend on the data, `layout`. All
    other functions have a default that uses these; a subclass overrides one to compute the same
    bits faster, or to aggregate in another way than by the mean.

    Subclasses are frozen dataclasses; each of their fields is a hyper-parameter and can be set on
    the command line (`--set name=value`). In what follows `x` is a float32 tensor of shape (n,)
    with finite values, `ctx.segments` covers it, and m = len(ctx.segments).

    The engine checks dtypes, lengths and layouts before and after each call. A function may return
    new tensors, or write to `ctx.parts` or `ctx.out` and return these. That values are finite is up
    to the caller, because the check takes as long as some encoders; `compress` and the training
    loop check. If x was not finite, `decode` raises PayloadError or returns finite values, never
    NaN.
    """

    name: ClassVar[str] = ""
    """The name on the command line; the registry fills it in from the file's name."""
    collectives: ClassVar[tuple[str, ...]] = ("allgather",)
    """Collectives that compute this method's mean correctly, the default first."""
    memory: ClassVar[Any] = "none"
    """What the published method carries from step to step: the name of a memory, or its class, if
    it is defined beside the method. It then has the method's name, and `memory` is that name."""
    own_memory: ClassVar[type[Any] | None] = None
    """The class of the memory that is defined beside the method; the engine fills it in."""
    granularity: str | int = "tensor"
    """What has a scale of its own, see `Segments.of`; a dataclass field if the user may choose."""
    scratch: ClassVar[bool] = False
    """Whether encoding or decoding allocates tensors of the size of x, as transforms and methods in
    plain torch do. An exchange itself allocates none."""

    @property
    def memory_options(self) -> Mapping[str, Any]:
        """Fields of that memory where the published method differs from the memory's defaults."""
        return {}

    @property
    def recipe(self) -> Mapping[str, Any]:
        """Settings of the optimizer that belong to the published method, by their names in a run.

        They are the defaults of a run with this method. Those named in `UPDATE_RULE` say how its
        source applies the update. A run may be given others, and is then marked: it says so when it
        starts, and so does `gcbench compare`. `lr` and all else are mere defaults.
        """
        return {}

    @property
    def rule(self) -> UpdateRule:
        """What the method does with the decoded mean; by default any optimizer applies it."""
        return UpdateRule()

    @property
    def variants(self) -> tuple[Mapping[str, Any], ...]:
        """Configurations that the contract test runs and that have golden bytes; {}: default."""
        return ({},)

    @property
    def claims(self) -> Claims[Any]:
        """What the method claims about its errors, its mean and its size: for checks and tables."""
        return Claims(self)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = vars(cls)
        if "collectives" in own:
            check_collectives(cls.__name__, own["collectives"])
        if "claims" in own:
            cls.claims = claims_property(cls.__name__, own["claims"])  # type: ignore[assignment]
        if "memory" in own:
            cls.own_memory = own["memory"] if isinstance(own["memory"], type) else None
            if cls.own_memory is not None:
                cls.memory = cls.name or cls.__name__

    def legal_collectives(self) -> tuple[str, ...]:
        """Return the collectives that are correct for this configuration, the default first.

        They are some of `collectives`, as not every field allows all of them.
        """
        return self.collectives

    # One worker's gradient.

    def prepare(self, x: Tensor, ctx: Context) -> Prepared:
        """Return the statistic that the workers agree on, and what `encode` need not compute again.

        The element-wise maximum of the statistic over all workers is `ctx.shared` of the other
        functions. By default there is no statistic, and `ctx.shared` is empty.
        """
        return Prepared(x.new_empty(0))

    def draw_shared(self, ctx: Context) -> Tensor | None:
        """Return `ctx.shared` as all workers draw it from the shared seed, without communication.

        `ctx.key` is the same on every worker. None (the default): it comes from `prepare`. A method
        that draws it has no statistic and does not list "twoshot".
        """
        return None

    @abstractmethod
    def encode(self, x: Tensor, ctx: Context) -> Parts:
        """Return the payload of one worker: its parts, 1-D tensors."""

    def encode_feedback(self, x: Tensor, residual: Tensor, ctx: Context) -> Parts:
        """Encode x + residual, and set `residual`, (n,), to x + residual - decode of the payload.

        A residual memory uses it in place of `encode` if a method overrides it, with an operation
        that returns the same bits as this default.
        """
        offered = residual + x
        payload = codec.encode(self, offered, ctx)
        torch.sub(offered, self.decode(payload, ctx), out=residual)
        return payload

    def cut(self, payload: Payload, bounds: Sequence[int]) -> list[Payload]:
        """Return the payload of each shard `[bounds[k], bounds[k + 1])` of the bucket.

        A method that overrides it has its bucket encoded once for a two-shot exchange; otherwise
        each shard is encoded as a bucket of its own, and a segment that lies in two shards has a
        scale in each. Bounds are multiples of `TILE`, or the bucket's end; the bytes of the shards,
        concatenated, are those of the payload.
        """
        raise NotImplementedError(f"{self.name}: payloads cannot be cut into shards")

    @abstractmethod
    def decode(self, payload: Payload, ctx: Context) -> Tensor:
        """Return the mean over the payload's `count` workers, float32, shape (n,).

        Raises:
            PayloadError: no encoder of this configuration can have produced `payload`.
        """

    # The workers' payloads together.

    def mean(self, payloads: Sequence[Payload], ctx: Context) -> Tensor:
        """Return the mean of the decoded payloads of different workers, float32, shape (n,).

        By default the payloads are decoded one after the other and added in the order of ranks. A
        method may override it with an operation of the same bits that does so in one pass, or with
        an aggregate of its own, such as a vote.
        """
        first, apart = payloads[0], ctx._replace(out=None)
        total = self.decode(first, ctx)
        if total is not ctx.out:
            total = total.clone() if ctx.out is None else ctx.out.copy_(total)
        if first.count > 1:
            total *= first.count
        for payload in payloads[1:]:
            decoded = self.decode(payload, apart)
            total += decoded * payload.count if payload.count > 1 else decoded
        workers = float(sum(payload.count for payload in payloads))
        return total.div_(total.new_tensor(workers))  # a GPU multiplies by a number's reciprocal

    def merge(self, payloads: Sequence[Payload], ctx: Context) -> Parts:
        """Return one payload that stands for the mean of several: the parameter server's step.

        By default the mean is encoded again, as the gradient of a worker is, with an error that a
        residual memory keeps on the owner of the shard. A method overrides it where its merge is
        exact: all collectives then give the same mean.
        """
        return self.encode(self.mean(payloads, ctx), ctx)

    def summand(self, payload: Payload, ctx: Context) -> Payload:
        """Return the payload in a form whose parts can be summed over `ctx.workers` workers.

        Only for methods that list "allreduce"; by default the payload as it is.
        """
        return payload

    def decode_sum(self, payload: Payload, ctx: Context) -> Tensor:
        """Return the mean, shape (n,), from the sum of `payload.count` workers' summands."""
        return self.decode(payload, ctx)

    # The wire format.

    def layout(self, segments: Segments, count: int = 1) -> Layout | None:
        """Return the declared wire format of a payload merged from `count` workers.

        None (the default): sizes depend on the data; the engine then sends them as a header, which
        counts as traffic.
        """
        return None

    # A tensor of any shape.

    def compress(self, x: Tensor, seed: int = 0, step: int = 0) -> Compressed:
        """Compress `x`, a floating-point tensor of any shape, as the only worker.

        `seed` and `step` address the random numbers: the same ones give the same bytes.

        >>> import gcbench, torch
        >>> method = gcbench.get_compressor("terngrad", clip=0)
        >>> packed = method.compress(torch.tensor([[1.0, -1.0], [0.0, 1.0]]))
        >>> packed.payload.nbytes
        8
        >>> method.decompress(packed)
        tensor([[ 1., -1.],
                [ 0.,  1.]])

        Raises:
            UsageError: `x` holds a NaN or an infinity, or no floating-point numbers.
        """
        if not x.is_floating_point() or not x.isfinite().all():
            raise UsageError(f"tensor of {x.dtype}: finite floating-point values expected")
        flat = x.detach().to(torch.float32).reshape(-1).contiguous()
        ctx = Context(Segments.of([x.shape], self.granularity), key=Key(seed, step, 0))
        shared, (prepared,) = codec.agree(self, [flat], ctx)
        ctx = ctx._replace(shared=shared, prepared=prepared)
        return Compressed(codec.encode(self, flat, ctx), ctx, tuple(x.shape), x.dtype)

    def decompress(self, compressed: Compressed) -> Tensor:
        """Return the decoded tensor, in the shape and dtype of the one that was compressed.

        `compressed`: what `compress` of the same configuration returned.

        Raises:
            PayloadError: another configuration compressed it, or its bytes were changed.
        """
        flat = codec.decode(self, compressed.payload, compressed.context)
        return flat.view(compressed.shape).to(compressed.dtype)


class Compressed(NamedTuple):
    """A compressed tensor: what `Compressor.compress` returns."""

    payload: Payload
    context: Context
    shape: tuple[int, ...]
    dtype: torch.dtype


def overrides(method: Compressor, function: str) -> bool:
    """Return whether the method defines a function that has a default."""
    return getattr(type(method), function) is not getattr(Compressor, function)


def requantizes(method: Compressor) -> bool:
    """Return whether a merge encodes the mean again, with an error of its own, as by default."""
    return not (overrides(method, "merge") or isinstance(method, MultiRoundCompressor))


def cuttable(method: Compressor) -> bool:
    """Return whether a two-shot exchange encodes the bucket once, and cuts the payload."""
    return overrides(method, "cut")


def fuses_feedback(method: Compressor) -> bool:
    """Return whether the method encodes and updates the residual in one operation."""
    return overrides(method, "encode_feedback")


class MultiRoundCompressor(Compressor):
    """A method in rounds of all-reduce, in which a summand depends on the means of earlier rounds.

    All workers receive the same means, so they compute the same approximation and the same state,
    which is carried to the next step. `layout` has one float32 part for each round.
    """

    collectives: ClassVar[tuple[str, ...]] = ("allreduce",)

    @abstractmethod
    def initial_state(self, ctx: Context) -> Tensor:
        """Return the first step's state, float32, 1-D; `ctx.key` is the same on every worker."""

    @abstractmethod
    def in_rounds(
        self, x: Tensor, state: Tensor, ctx: Context
    ) -> Generator[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Run the rounds of one step, as a generator.

        It yields this worker's summand of each round, float32, 1-D, and receives the mean over all
        workers, which is not overwritten before the end of the step. After the last mean it returns
        the approximate mean gradient, float32, shape (n,), which it may write to `ctx.out`, and the
        state for the next step; both depend on nothing but the means and `state`. `ctx.key` is the
        same on every worker. Of several simulated workers only one runs to the end.
        """

    def draw_shared(self, ctx: Context) -> Tensor | None:
        """Return the initial state."""
        return self.initial_state(ctx)

    def _begin(self, x: Tensor, ctx: Context) -> Generator[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Begin the rounds from the shared state, or from the initial one if there is none."""
        common = ctx._replace(key=ctx.key._replace(rank=0))
        state = ctx.shared if ctx.shared.numel() else self.initial_state(common)
        return self.in_rounds(x, state, common)

    def encode(self, x: Tensor, ctx: Context) -> Parts:
        """Return the summands of a single worker; `ctx.shared`: the state, or empty at first."""
        rounds = self._begin(x, ctx)
        parts = [next(rounds)]
        while len(parts) < len(self.layout(ctx.segments) or ()):
            parts.append(rounds.send(parts[-1]))
        rounds.close()
        return tuple(parts)

    def decode(self, payload: Payload, ctx: Context) -> Tensor:
        """Return the approximation that the rounds end with, given the means as payload parts."""
        rounds = self._begin(payload.parts[0].new_zeros(ctx.segments.numel), ctx)
        next(rounds)
        try:
            for part in payload.parts:
                rounds.send(part)
        except StopIteration as end:
            approximation: Tensor = end.value[0]
            return approximation
        raise PayloadError(f"payload of {len(payload.parts)} parts; the method has more rounds")
