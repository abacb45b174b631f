"""The contract of a gradient compressor.

A compressor is a pure codec over one flat float32 tensor. It never communicates, never asks for a
device, keeps no state and touches no global random generator; workers, residuals and collectives
belong to the engine. Its hyper-parameters are the fields of a frozen dataclass.

Callers use a method through `gcbench.core.codec`, which checks inputs and outputs and provides
output buffers. Claims about a method's error are in a separate object (`gcbench.core.claims`);
only checks and tables read it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gcbench.core import codec
from gcbench.core.claims import Claims
from gcbench.core.errors import GcbenchError, PayloadError, UsageError
from gcbench.core.payload import TILE as TILE
from gcbench.core.payload import Context as Context
from gcbench.core.payload import Key as Key
from gcbench.core.payload import Layout as Layout
from gcbench.core.payload import Payload as Payload
from gcbench.core.payload import Prepared as Prepared
from gcbench.core.payload import Segments as Segments
from gcbench.core.payload import all_finite
from gcbench.core.payload import check_finite as check_finite
from gcbench.core.payload import check_noise as check_noise
from gcbench.core.payload import layout_bytes as layout_bytes
from gcbench.core.rule import UpdateRule

COLLECTIVES = ("allreduce", "allgather", "twoshot", "ring", "sparse")
Parts: TypeAlias = Tensor | tuple[Tensor, ...] | Payload
"""What an encoder returns: the parts of a payload, 1-D tensors; or one tensor, if there is one."""


def check_collectives(name: str, declared: object) -> None:
    """Check the collectives that a method declares.

    Raises:
        GcbenchError: `declared` is not a non-empty tuple of distinct known names.
    """
    names = declared if isinstance(declared, tuple) else ()
    if not names or len({*names}) < len(names) or not {*names} <= {*COLLECTIVES}:
        raise GcbenchError(
            f"{name} declares collectives = {declared!r}: expected a non-empty tuple from "
            f"{COLLECTIVES}, the default first"
        )


def claims_property(name: str, declared: object) -> property:
    """Return the property for a method's declared claims, given as a class or as a property.

    Raises:
        GcbenchError: `declared` is neither; the message shows the right form.
    """
    if isinstance(declared, property):
        return declared
    if isinstance(declared, type) and issubclass(declared, Claims):
        return property(declared)
    raise GcbenchError(
        f"{name} declares claims = {declared!r}: expected a subclass of gcbench.Claims, such as "
        "`class claims(gcbench.Claims): unbiased = True`, or a property that returns "
        "MyClaims(self)"
    )


class Compressor(ABC):
    """One method of gradient compression: a pure codec over a flat float32 tensor.

    A method defines `encode`, `decode` and, if payload sizes do not depend on the data, `layout`.
    All other functions have defaults built on these. Override one to compute the same bits faster,
    or to aggregate other than by the mean.

    Subclasses are frozen dataclasses; each field is a hyper-parameter and can be set on the command
    line (`--set name=value`). Below, `x` is a float32 tensor of shape (n,) with finite values,
    `ctx.segments` covers it, and m = len(ctx.segments).

    The engine checks dtypes, lengths and layouts before and after each call. A function may return
    new tensors, or write to `ctx.parts` or `ctx.out` and return those. The caller checks that
    values are finite (`compress` and the training loop do), because that takes as long as some
    encoders. If x was not finite, `decode` raises PayloadError or returns finite values, never NaN.
    """

    name: ClassVar[str] = ""
    """The name on the command line; the registry fills it in from the file's name."""
    collectives: ClassVar[tuple[str, ...]] = ("allgather",)
    """Collectives that compute this method's mean correctly, the default first."""
    memory: ClassVar[Any] = "none"
    """The memory of the published method: a registered name, or a class defined beside the method.
    Such a class takes the method's name, and `memory` becomes that name."""
    own_memory: ClassVar[type[Any] | None] = None
    """The memory class defined beside the method, if any; the engine sets it."""
    granularity: str | int = "tensor"
    """What shares one scale, see `Segments.of`; make it a dataclass field to let users choose."""
    scratch: ClassVar[bool] = False
    """Whether encoding or decoding allocates tensors as large as x, as transforms and methods in
    plain torch do. An exchange itself allocates none."""

    @property
    def memory_options(self) -> Mapping[str, Any]:
        """Values of the memory's fields in the published method, where they are not the default."""
        return {}

    @property
    def recipe(self) -> Mapping[str, Any]:
        """Optimizer settings of the published method, by their names in a run's config.

        They are the defaults of a run with this method. Those in `UPDATE_RULE` define how the
        source applies the update: overriding one flags the run, at its start and in
        `gcbench compare`. All others, such as `lr`, are plain defaults.
        """
        return {}

    @property
    def rule(self) -> UpdateRule:
        """The update rule: by default the optimizer applies the decoded mean as a gradient."""
        return UpdateRule()

    @property
    def variants(self) -> tuple[Mapping[str, Any], ...]:
        """Configurations that the contract test runs, each with golden bytes; {} is the default."""
        return ({},)

    @property
    def claims(self) -> Claims[Any]:
        """Claims about the method's error, mean and size, for checks and tables."""
        return Claims(self)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        declared = vars(cls)
        if "collectives" in declared:
            check_collectives(cls.__name__, declared["collectives"])
        if "claims" in declared:
            cls.claims = claims_property(cls.__name__, declared["claims"])  # type: ignore[assignment]
        if "memory" in declared:
            cls.own_memory = declared["memory"] if isinstance(declared["memory"], type) else None
            if cls.own_memory is not None:
                cls.memory = cls.name or cls.__name__

    def legal_collectives(self) -> tuple[str, ...]:
        """Return those of `collectives` that are correct for these fields, the default first.

        Without "ring" for correlated noise: a hop would round a sum that depends on its draws.
        """
        if not self.claims.correlated:
            return self.collectives
        return tuple(name for name in self.collectives if name != "ring")

    # One worker's gradient.

    def prepare(self, x: Tensor, ctx: Context) -> Prepared:
        """Return the statistic to share with other workers, and intermediate results for `encode`.

        `ctx.shared` of all other functions is the element-wise maximum of the statistic over the
        workers. By default there is no statistic, and `ctx.shared` is empty.
        """
        return Prepared(x.new_empty(0))

    def draw_shared(self, ctx: Context) -> Tensor | None:
        """Return `ctx.shared`, drawn by every worker from the shared seed without communication.

        `ctx.key` is the same on every worker. None (the default): `prepare` provides it. A method
        that draws it has no statistic and does not list "twoshot".
        """
        return None

    @abstractmethod
    def encode(self, x: Tensor, ctx: Context) -> Parts:
        """Return the payload of one worker: its parts, 1-D tensors."""

    def encode_feedback(self, x: Tensor, residual: Tensor, ctx: Context) -> Parts:
        """Encode x + residual, and set `residual`, (n,), to x + residual - decode(payload).

        Override it with a fused operation that returns the same bits; a residual memory then calls
        it instead of `encode`.
        """
        offered = residual + x
        payload = codec.encode(self, offered, ctx)
        torch.sub(offered, self.decode(payload, ctx), out=residual)
        return payload

    def cut(self, payload: Payload, bounds: Sequence[int]) -> list[Payload]:
        """Return the payload of each shard `[bounds[k], bounds[k + 1])` of the bucket.

        If a method overrides it, a two-shot exchange encodes the bucket once. Otherwise each shard
        is encoded separately, and a segment that spans two shards has one scale in each. Bounds are
        multiples of `TILE`, or the bucket's end. The bytes of the shards, concatenated, equal those
        of the payload.
        """
        raise NotImplementedError(f"{self.name}: payloads cannot be cut into shards")

    @abstractmethod
    def decode(self, payload: Payload, ctx: Context) -> Tensor:
        """Return the mean over the payload's `count` workers, float32, shape (n,).

        Raises:
            PayloadError: no encoder of this configuration can have produced `payload`.
        """

    def entries(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """Return the elements that a worker sends: positions and values, shape (k,) each.

        Only for methods that list "sparse". Positions are int64 and increasing, values float32; k
        is the length of the last part of `layout`.
        """
        raise NotImplementedError(f"{self.name}: it selects no elements")

    # Aggregation.

    def mean(self, payloads: Sequence[Payload], ctx: Context) -> Tensor:
        """Return the mean of the decoded payloads of different workers, float32, shape (n,).

        By default payloads are decoded one by one and added in rank order. Override it with a
        one-pass operation that returns the same bits, or with another aggregate, such as a vote.
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
        """Return one payload for the mean of several: the parameter server's step.

        By default the mean is encoded again, like a worker's gradient; with a residual memory, the
        owner of the shard keeps the error. A method overrides it if its merge is exact: all
        collectives then compute the same mean.
        """
        return self.encode(self.mean(payloads, ctx), ctx)

    def summand(self, payload: Payload, ctx: Context) -> Payload:
        """Return the payload in a form whose parts can be summed over `ctx.workers` workers.

        Only for methods that list "allreduce"; by default the payload itself.
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
        """Compress `x`, a floating-point tensor of any shape, as a single worker.

        `seed` and `step` address the random numbers: equal values give equal bytes.

        >>> import gcbench, torch
        >>> method = gcbench.get_compressor("terngrad", clip=0)
        >>> packed = method.compress(torch.tensor([[1.0, -1.0], [0.0, 1.0]]))
        >>> packed.payload.nbytes
        8
        >>> method.decompress(packed)
        tensor([[ 1., -1.],
                [ 0.,  1.]])

        Raises:
            UsageError: `x` is not a floating-point tensor, or contains a NaN, an infinity or a
                value beyond float32.
        """
        if not x.is_floating_point():
            raise UsageError(f"x has dtype {x.dtype}: expected a floating-point tensor")
        flat = x.detach().to(torch.float32).reshape(-1).contiguous()
        if not all_finite(flat):
            raise UsageError(
                "x contains a NaN or an infinity, or a value beyond float32: expected finite values"
            )
        divide = _segments if x.numel() <= CACHED else _segments.__wrapped__
        ctx = Context(divide(tuple(x.shape), self.granularity), key=Key(seed, step, 0))
        shared, (prepared,) = codec.agree(self, [flat], ctx)
        ctx = ctx._replace(shared=shared, prepared=prepared)
        return Compressed(codec.encode(self, flat, ctx), ctx, tuple(x.shape), x.dtype)

    def decompress(self, compressed: Compressed) -> Tensor:
        """Return the decoded tensor, with the shape and dtype of the original.

        Decoded values beyond the dtype become its largest: `randomk` sends 100 times an element.

        `compressed`: the result of `compress` with the same configuration.

        Raises:
            PayloadError: another configuration produced it, or its bytes were modified.
        """
        flat = codec.decode(self, compressed.payload, compressed.context)
        if compressed.dtype.itemsize < flat.dtype.itemsize:
            largest = torch.finfo(compressed.dtype).max
            flat = flat.clamp(-largest, largest)
        return flat.view(compressed.shape).to(compressed.dtype)


CACHED = 2**24
"""Elements of the largest tensors whose segments `compress` caches."""


@lru_cache(maxsize=8, typed=True)
def _segments(shape: tuple[int, ...], granularity: str | int) -> Segments:
    """Return a tensor's segments, which may take longer to compute than the encoding."""
    return Segments.of([shape], granularity)


class Compressed(NamedTuple):
    """A compressed tensor, the result of `Compressor.compress`."""

    payload: Payload
    context: Context
    shape: tuple[int, ...]
    dtype: torch.dtype


def overrides(method: Compressor, function: str) -> bool:
    """Return whether the method overrides the default of `function`."""
    return getattr(type(method), function) is not getattr(Compressor, function)


def requantizes(method: Compressor) -> bool:
    """Return whether `merge` encodes the mean again, which adds an error (the default)."""
    return not (overrides(method, "merge") or isinstance(method, MultiRoundCompressor))


def reencodes(method: Compressor, collective: str) -> bool:
    """Return whether this collective compresses means or partial sums, not only gradients."""
    return collective in ("ring", "sparse") or (collective == "twoshot" and requantizes(method))


def cuttable(method: Compressor) -> bool:
    """Return whether a two-shot exchange encodes the bucket once and cuts the payload."""
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
        workers, which stays valid until the end of the step. After the last mean it returns the
        approximate mean gradient, float32, shape (n,), which it may write to `ctx.out`, and the
        state for the next step, which the update rule may read. Both depend only on the means and
        `state`. `ctx.key` is the same on every worker. In a simulation, only one worker runs to the
        end.
        """

    def draw_shared(self, ctx: Context) -> Tensor | None:
        """Return the initial state."""
        return self.initial_state(ctx)

    def _begin(self, x: Tensor, ctx: Context) -> Generator[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Start the rounds from the shared state, or from the initial state if there is none."""
        common = ctx._replace(key=ctx.key._replace(rank=0))
        state = ctx.shared if ctx.shared.numel() else self.initial_state(common)
        return self.in_rounds(x, state, common)

    def encode(self, x: Tensor, ctx: Context) -> Parts:
        """Return the summands of a single worker; `ctx.shared` is the state, or empty at first."""
        rounds = self._begin(x, ctx)
        parts = [next(rounds)]
        while len(parts) < len(self.layout(ctx.segments) or ()):
            parts.append(rounds.send(parts[-1]))
        rounds.close()
        return tuple(parts)

    def decode(self, payload: Payload, ctx: Context) -> Tensor:
        """Return the result of the rounds, given their means as payload parts."""
        rounds = self._begin(payload.parts[0].new_zeros(ctx.segments.numel), ctx)
        next(rounds)
        try:
            for part in payload.parts:
                rounds.send(part)
        except StopIteration as end:
            approximation: Tensor = end.value[0]
            return approximation
        raise PayloadError(f"payload has {len(payload.parts)} parts; the method has more rounds")
