"""The contract of a gradient compressor, and the types of its arguments and results.

A compressor is a pure codec over one flat float32 tensor. It never communicates, never asks for a
device, keeps no state and touches no global random generator; workers, residuals and collectives
belong to the engine. Its hyper-parameters are the fields of a frozen dataclass.

Large results are written to buffers of the caller (`out`), because allocating memory takes longer
than most codecs; an exchange keeps its buffers for the life of a run. What a method claims about
its errors is in a separate object (`gcbench.core.claims`), which checks read and no engine needs.
"""

from __future__ import annotations

import inspect
import itertools
import math
import operator
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from gcbench.core.claims import Claims
from gcbench.core.errors import GcbenchError, PayloadError, UsageError

T = TypeVar("T")
COLLECTIVES = ("allreduce", "allgather", "twoshot")
UPDATE_RULE = ("optimizer", "momentum", "nesterov")
"""Settings of a `recipe` by which a run is marked if it has others: they say what is done with the
decoded result."""
TILE = 1024
"""Elements of a tile, the unit in which codes are packed and random numbers drawn; shards of a
bucket start at multiples of it."""

Layout = tuple[tuple[torch.dtype, int], ...]
"""The wire format of one payload: dtype and element count of each part, in order."""


class Key(NamedTuple):
    """The address of random numbers in a counter-based generator, which keeps no state.

    A draw is a function of seed, step, rank, stream and the element's index in the bucket. So the
    way a bucket is cut into shards, the backend and the number of processes change no bit.
    """

    seed: int
    step: int
    rank: int
    offset: int = 0
    """Index in the bucket of the first element of the tensor that is drawn for."""
    stream: int = 0
    """The purpose of the numbers: one of the constants of `gcbench.core.purposes`."""

    def words(self) -> tuple[tuple[int, int], int, int]:
        """Return Philox's two 32-bit key words, and the two counter words that no index enters.

        The latter are the step, and the stream in 8 bits above the rank in 24.

        Raises:
            ValueError: step, rank or stream is out of range.
        """
        if not (0 <= self.step < 2**32 and 0 <= self.rank < 2**24 and 0 <= self.stream < 2**8):
            raise ValueError(
                f"{self}: step below 2^32, rank below 2^24 and stream below 2^8 allowed"
            )
        seed = self.seed & 0xFFFFFFFFFFFFFFFF
        return (seed & 0xFFFFFFFF, seed >> 32), self.step, self.stream << 24 | self.rank


class Payload(NamedTuple):
    """What one worker hands to a collective: packed, contiguous tensors."""

    parts: tuple[Tensor, ...]
    count: int = 1  # type: ignore[assignment]  # the field hides tuple.count, which nobody needs
    """The number of workers whose gradients are merged into it."""

    @property
    def nbytes(self) -> int:
        """Bytes of all parts; this number is counted as sent."""
        return sum(part.numel() * part.element_size() for part in self.parts)

    @property
    def layout(self) -> Layout:
        """Dtype and element count of each part."""
        return tuple((part.dtype, part.numel()) for part in self.parts)

    def to_bytes(self) -> Tensor:
        """Return all parts as one uint8 tensor, shape (nbytes,), on their device."""
        views = [part.contiguous().view(-1).view(torch.uint8) for part in self.parts]
        return torch.cat(views) if len(views) != 1 else views[0]

    @classmethod
    def from_bytes(cls, data: Tensor, layout: Layout, count: int = 1) -> Payload:
        """Cut a uint8 tensor into the parts of `layout`.

        Raises:
            PayloadError: `data` is longer or shorter than the layout.
        """
        sizes = [numel * dtype.itemsize for dtype, numel in layout]
        if data.dtype != torch.uint8 or data.numel() != sum(sizes):
            raise PayloadError(
                f"payload of {data.numel()} {data.dtype} elements: {sum(sizes)} bytes expected"
            )
        # A part may begin at any byte; a copy aligns it, as `view` refuses an unaligned one.
        parts = tuple(
            (piece.clone() if dtype.itemsize > 1 else piece).view(dtype)
            for piece, (dtype, _) in zip(torch.split(data, sizes), layout, strict=True)
        )
        return cls(parts, count)

    @classmethod
    def over(cls, buffer: Tensor, layout: Layout, count: int = 1) -> Payload:
        """Return the payload whose bytes are `buffer`, uint8, 1-D; its parts are views of it.

        Parts with the widest elements come first, so that all parts are aligned if the buffer is
        (see `aligned`); a part that is not aligned is a copy.

        Raises:
            PayloadError: the buffer is longer or shorter than the layout, or not uint8.
        """
        if buffer.dtype != torch.uint8 or buffer.numel() != layout_bytes(layout):
            raise PayloadError(
                f"payload of {buffer.numel()} {buffer.dtype} elements: "
                f"{layout_bytes(layout)} bytes expected for {layout}"
            )
        parts = [buffer] * len(layout)
        for i, start, stop in _places(layout):
            piece, dtype = buffer[start:stop], layout[i][0]
            parts[i] = (piece.clone() if piece.storage_offset() % dtype.itemsize else piece).view(
                dtype
            )
        return cls(tuple(parts), count)

    def write(self, buffer: Tensor) -> None:
        """Copy the parts to `buffer`, uint8, shape (nbytes,), in the order that `over` reads."""
        for i, start, stop in _places(self.layout):
            buffer[start:stop].copy_(self.parts[i].contiguous().view(torch.uint8))


def _places(layout: Layout) -> Iterator[tuple[int, int, int]]:
    """Yield each part's index, first byte and end in a buffer, in the order of the bytes."""
    start = 0
    for i in sorted(range(len(layout)), key=lambda i: -layout[i][0].itemsize):
        dtype, numel = layout[i]
        yield i, start, start + numel * dtype.itemsize
        start += numel * dtype.itemsize


def aligned(buffer: Tensor, layout: Layout) -> bool:
    """Return whether parts of this layout can be views of the uint8 tensor `buffer`."""
    widest = max((dtype.itemsize for dtype, _ in layout), default=1)
    return buffer.storage_offset() % widest == 0


def slot(out: Payload | None, part: int) -> Tensor | None:
    """Return the tensor of `out` to write part number `part` to; None if there is no `out`."""
    return None if out is None else out.parts[part]


def slots(out: Payload | None) -> tuple[Tensor, ...] | None:
    """Return the tensors of `out` to write the parts to; None if there is no `out`."""
    return None if out is None else out.parts


def fill(out: Payload | None, *parts: Tensor, count: int = 1) -> Payload:
    """Return the payload of these parts; with `out`, parts that are not its own are copied there.

    Raises:
        ValueError: a part has another length or dtype than that of `out`.
    """
    if out is None:
        return Payload(parts, count)
    for place, part in zip(out.parts, parts, strict=True):
        if place is not part:
            if place.shape != part.shape or place.dtype != part.dtype:
                raise ValueError(
                    f"part of {part.numel()} {part.dtype}: the slot has {place.numel()} "
                    f"{place.dtype}"
                )
            place.copy_(part)
    return out._replace(count=count)


def written(result: Tensor, out: Tensor) -> Tensor:
    """Copy `result` to `out` unless it is that tensor already, and return `out`."""
    return out if result is out else out.copy_(result)


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


def _checked(function: Callable[..., T]) -> Callable[..., T]:
    """Wrap a method so that it refuses an x that is not float32 or not as long as its segments."""
    names = list(inspect.signature(function).parameters)
    place = names.index("segments") if "segments" in names else len(names)

    @wraps(function)
    def call(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> T:
        segments = kwargs["segments"] if "segments" in kwargs else args[place - 2]
        if x.dtype != torch.float32 or x.shape != (segments.numel,):
            raise UsageError(
                f"{self.name or type(self).__name__}: {function.__name__} got x of {x.dtype}, "
                f"shape {tuple(x.shape)}; float32, shape ({segments.numel},), is expected, as long "
                "as its segments"
            )
        return function(self, x, *args, **kwargs)

    return call


def layout_bytes(layout: Layout) -> int:
    """Return the bytes of a payload of this layout."""
    return sum(dtype.itemsize * numel for dtype, numel in layout)


class Prepared(NamedTuple):
    """What `Compressor.prepare` computes from one worker's gradient."""

    statistic: Tensor
    """What the workers agree on by its maximum, float32, first axis m; empty: nothing."""
    kept: Any = None
    """Intermediate results that the same worker's `encode` would otherwise compute again."""


@dataclass(frozen=True, eq=False)
class Segments:
    """How a flat tensor is cut into segments, the consecutive groups that have one scale each.

    `offsets` has one entry more than there are segments: segment i is `[offsets[i],
    offsets[i + 1])`, and `offsets[-1]` is the length of the flat tensor. Segments may be empty.
    `shapes` are the shapes of the tensors whose concatenation the flat tensor is; they need not
    agree with the segments. A shard has no shapes: each of its segments then counts as a vector.
    """

    offsets: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if not self.offsets or self.offsets[0] != 0:
            raise ValueError(f"offsets must start at 0, not {self.offsets[:1]}")
        if any(map(operator.gt, self.offsets, self.offsets[1:])):  # fast: there may be millions
            raise ValueError("offsets must not decrease")
        if self.shapes and sum(map(math.prod, self.shapes)) != self.offsets[-1]:
            raise ValueError(f"tensors of shapes {self.shapes} for {self.offsets[-1]} elements")

    @classmethod
    def of(cls, shapes: Sequence[Sequence[int]], granularity: str | int = "tensor") -> Segments:
        """Return the segments of the concatenation of tensors of the given `shapes`.

        `granularity`: "tensor", one segment a tensor; "model", one in all; "column", one for each
        index of a tensor's first axis (the incoming weights of one output unit, which are
        contiguous), vectors and scalars being one column; or a number d, groups of d elements
        inside each tensor, the last of which may be shorter.

        Raises:
            UsageError: `granularity` is none of these.
        """
        sizes = [math.prod(shape) for shape in shapes]
        kept = tuple(tuple(shape) for shape in shapes)
        if granularity == "model":
            return cls((0, sum(sizes)), kept)
        lengths: list[int] = []
        for shape, size in zip(shapes, sizes, strict=True):
            if granularity == "tensor":
                width = size
            elif granularity == "column":
                width = size // shape[0] if len(shape) > 1 and shape[0] else size
            elif isinstance(granularity, int) and granularity > 0:
                width = granularity
            else:
                raise UsageError(
                    f"granularity {granularity!r}: allowed are 'tensor', 'column', 'model' or a "
                    "group size of at least 1"
                )
            if width:
                lengths += [width] * (size // width)
                if size % width:
                    lengths.append(size % width)
            else:
                lengths.append(0)
        return cls(tuple(itertools.accumulate(lengths, initial=0)), kept)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def numel(self) -> int:
        """Elements of the flat tensor."""
        return self.offsets[-1]

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Elements of each segment."""
        return tuple(b - a for a, b in zip(self.offsets, self.offsets[1:], strict=False))

    @cached_property
    def runs(self) -> tuple[tuple[slice, int, int], ...]:
        """Runs of neighbouring segments of one length: (their slice, first element, length)."""
        runs: list[tuple[slice, int, int]] = []
        for i, (start, length) in enumerate(zip(self.offsets, self.lengths, strict=False)):
            if runs and runs[-1][2] == length:
                runs[-1] = (slice(runs[-1][0].start, i + 1), *runs[-1][1:])
            else:
                runs.append((slice(i, i + 1), start, length))
        return tuple(runs)

    @cached_property
    def table(self) -> Tensor:
        """The table that kernels find segments by, int64, shape (2, m + 1), on the CPU.

        Row 0 has the offsets. Row 1 has the number of tiles before each segment, and in all, if
        every segment is cut into tiles of 1024 elements from its own beginning.
        """
        tiles = itertools.accumulate((-(-n // TILE) for n in self.lengths), initial=0)
        return torch.tensor([self.offsets, tuple(tiles)])

    @cached_property
    def tensors(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The tensors, as (first element, shape)."""
        shapes = self.shapes or tuple((length,) for length in self.lengths)
        starts = itertools.accumulate(map(math.prod, shapes), initial=0)
        return tuple(zip(starts, shapes, strict=False))

    def views(self, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield each run of `x`, shape (n,): slice of segments, and view (segments, length)."""
        for which, start, length in self.runs:
            count = which.stop - which.start
            yield which, x[start : start + count * length].view(count, length)

    def shard(self, start: int, stop: int) -> tuple[Segments, range]:
        """Return the segments of the shard `[start, stop)`, and their indices among these segments.

        Of a segment that the shard cuts, the part inside is a segment of the shard. The range of
        indices selects the shard's scales from those of the whole. The same shard gives the same
        object, so that its cached properties are computed once.
        """
        key = start, stop
        if key not in self._shards:
            self._shards[key] = self._cut(start, stop)
        return self._shards[key]

    @cached_property
    def _shards(self) -> dict[tuple[int, int], tuple[Segments, range]]:
        return {}

    def _cut(self, start: int, stop: int) -> tuple[Segments, range]:
        if not 0 <= start <= stop <= self.numel:
            raise ValueError(f"shard [{start}, {stop}) of {self.numel} elements")
        if (start, stop) == (0, self.numel):
            return self, range(len(self))
        first = bisect_right(self.offsets, start, lo=1) - 1
        which = range(first, bisect_left(self.offsets, stop, hi=len(self)))
        if not which:
            return Segments((0,)), range(0)
        inner = [offset - start for offset in self.offsets[first + 1 : which.stop]]
        return Segments((0, *inner, stop - start)), which


class Compressor(ABC):
    """One method of gradient compression: a pure codec over a flat float32 tensor.

    A method defines `encode`, `decode` and, where sizes do not depend on the data, `layout`. All
    other methods have a default that uses these; a subclass overrides one to compute the same bits
    faster, or to aggregate in another way than by the mean.

    Subclasses are frozen dataclasses; each of their fields is a hyper-parameter and can be set on
    the command line (`--set name=value`). In what follows `x` is a float32 tensor of shape (n,)
    with finite values, `segments` covers it, and m = len(segments).

    Every encoder refuses another dtype or length (UsageError). That values are finite is up to the
    caller, because the check takes as long as some encoders; `compress` and the training loop
    check. If x was not finite, `decode` raises PayloadError or returns finite values, never NaN.
    `out` is the buffer for a result and never overlaps an argument. A method may return a new
    tensor instead, which the caller then copies.
    """

    name: ClassVar[str] = ""
    """The name on the command line; the registry fills it in from the file's name."""
    collectives: ClassVar[tuple[str, ...]] = ("allgather",)
    """Collectives that compute this method's mean correctly, the default first."""
    memory: ClassVar[str] = "none"
    """What the published method carries from step to step: the name of a memory."""
    memory_options: ClassVar[Mapping[str, Any]] = {}
    """Fields of that memory where the published method differs from the memory's defaults."""
    granularity: str | int = "tensor"
    """What has a scale of its own, see `Segments.of`; a dataclass field if the user may choose."""

    scratch: ClassVar[bool] = False
    """Whether encoding or decoding allocates tensors of the size of x, as transforms and methods in
    plain torch do. An exchange itself allocates none."""

    # Capabilities: plain attributes in a subclass, or properties where they depend on fields.

    @property
    def requantizes(self) -> bool:
        """Whether `merge` encodes the mean again, with an error of its own, as it does by default.

        A residual memory then keeps this error on the owner of the shard. A method whose `merge` is
        exact returns False: all collectives then give the same mean.
        """
        return True

    @property
    def cuttable(self) -> bool:
        """Whether `cut` can cut a payload into shards.

        A two-shot exchange then encodes a bucket once. Otherwise it encodes each shard as a bucket
        of its own, and a segment that lies in two shards has a scale in each.
        """
        return False

    @property
    def fused_feedback(self) -> bool:
        """Whether the method overrides `encode_feedback`, which then replaces `encode`."""
        return False

    @property
    def recipe(self) -> Mapping[str, Any]:
        """Settings of the optimizer that belong to the published method, by their names in a run.

        They are the defaults of a run with this method. Those named in `UPDATE_RULE` say how its
        source applies the update. A run may be given others, and is then marked: it says so when it
        starts, and so does `gcbench compare`. `lr` and all else are mere defaults.
        """
        return {}

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
        for name in ("prepare", "encode", "encode_feedback"):
            if inspect.isfunction(own.get(name)):
                setattr(cls, name, _checked(own[name]))

    def legal_collectives(self) -> tuple[str, ...]:
        """Return the collectives that are correct for this configuration, the default first.

        They are some of `collectives`, as not every field allows all of them.
        """
        return self.collectives

    # One worker's gradient.

    def prepare(self, x: Tensor, segments: Segments) -> Prepared:
        """Return the statistic that the workers agree on, and what `encode` need not compute again.

        The element-wise maximum of the statistic over all workers is the argument `shared` of the
        other methods. By default there is no statistic, and `shared` is empty.
        """
        return Prepared(x.new_empty(0))

    def draw_shared(self, segments: Segments, key: Key) -> Tensor | None:
        """Return `shared` as all workers draw it from the shared seed, without communication.

        `key` is the same on every worker. None (the default): `shared` comes from `prepare`. A
        method that draws it has no statistic and does not list "twoshot".
        """
        return None

    @abstractmethod
    def encode(
        self,
        x: Tensor,
        segments: Segments,
        shared: Tensor,
        key: Key,
        *,
        prepared: Any = None,
        out: Payload | None = None,
    ) -> Payload:
        """Return the payload of one worker (`count` is 1).

        `shared`: what the workers agreed on. `key`: the address of this worker's random numbers.
        `prepared`: `Prepared.kept` for the same x and segments; None: compute it here. `out`: the
        payload to write to.
        """

    @_checked
    def encode_feedback(
        self,
        x: Tensor,
        residual: Tensor,
        segments: Segments,
        shared: Tensor,
        key: Key,
        *,
        out: Payload | None = None,
    ) -> Payload:
        """Encode x + residual, and set `residual`, (n,), to x + residual - decode of the payload.

        Called if `fused_feedback` is true. An override returns the same bits as this default.
        """
        offered = residual + x
        payload = self.encode(offered, segments, shared, key, out=out)
        torch.sub(offered, self.decode(payload, segments, shared), out=residual)
        return payload

    def cut(self, payload: Payload, bounds: Sequence[int]) -> list[Payload]:
        """Return the payload of each shard `[bounds[k], bounds[k + 1])` of the bucket.

        Only for methods that are `cuttable`. Bounds are multiples of `TILE`, or the bucket's end;
        the bytes of the shards, concatenated, are those of the payload.
        """
        raise NotImplementedError(f"{self.name}: payloads cannot be cut into shards")

    @abstractmethod
    def decode(
        self, payload: Payload, segments: Segments, shared: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        """Return the mean over the payload's `count` workers, float32, shape (n,).

        `out`: the tensor to write to.

        Raises:
            PayloadError: no encoder of this configuration can have produced `payload`.
        """

    def decode_onto(
        self, payload: Payload, segments: Segments, shared: Tensor, total: Tensor
    ) -> None:
        """Add the sum over the payload's workers, `decode` times its count, to `total`, (n,).

        A method may override it with an operation of the same bits that needs no decoded tensor.
        """
        decoded = self.decode(payload, segments, shared)
        total += decoded * payload.count if payload.count > 1 else decoded

    # The workers' payloads together.

    def mean(
        self,
        payloads: Sequence[Payload],
        segments: Segments,
        shared: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the mean of the decoded payloads of different workers, float32, shape (n,).

        By default the payloads are decoded one after the other and added in the order of ranks. A
        method may override it with an operation of the same bits that does so in one pass, or with
        an aggregate of its own, such as a vote.
        """
        first = payloads[0]
        total = (
            first.parts[0].new_empty(segments.numel, dtype=torch.float32) if out is None else out
        )
        written(self.decode(first, segments, shared, out=total), total)
        if first.count > 1:
            total *= first.count
        for payload in payloads[1:]:
            self.decode_onto(payload, segments, shared, total)
        workers = float(sum(payload.count for payload in payloads))
        return total.div_(total.new_tensor(workers))  # a GPU multiplies by a number's reciprocal

    def merge(
        self,
        payloads: Sequence[Payload],
        segments: Segments,
        shared: Tensor,
        key: Key,
        *,
        out: Payload | None = None,
    ) -> Payload:
        """Return one payload that stands for the mean of several: the parameter server's step.

        By default the mean is encoded again, as the gradient of a worker is. A method that does not
        `requantize` overrides it.
        """
        mean = self.mean(payloads, segments, shared)
        merged = self.encode(mean, segments, shared, key, out=out)
        return merged._replace(count=sum(payload.count for payload in payloads))

    def summand(self, payload: Payload, workers: int, segments: Segments) -> Payload:
        """Return the payload in a form whose parts can be summed over `workers` element by element.

        Only for methods that list "allreduce"; by default the payload as it is.
        """
        return payload

    def decode_sum(
        self, payload: Payload, segments: Segments, shared: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        """Return the mean, shape (n,), from the sum of `payload.count` workers' summands."""
        return self.decode(payload, segments, shared, out=out)

    # The wire format.

    def layout(self, segments: Segments, count: int = 1) -> Layout | None:
        """Return the declared wire format of a payload merged from `count` workers.

        None (the default): sizes depend on the data; the engine then sends them as a header, which
        counts as traffic.
        """
        return None

    def bits(self, segments: Segments, count: int = 1) -> int | None:
        """Return the size in bits that the layout declares; None if there is no layout."""
        layout = self.layout(segments, count)
        return None if layout is None else 8 * layout_bytes(layout)

    def check(self, payload: Payload, segments: Segments) -> None:
        """Check that a payload has the declared layout.

        Raises:
            PayloadError: it has another number of parts, another dtype or length, or no workers.
        """
        if payload.count < 1:
            raise PayloadError(f"{self.name}: payload of {payload.count} workers")
        declared = self.layout(segments, payload.count)
        if declared is not None and payload.layout != declared:
            raise PayloadError(
                f"{self.name or type(self).__name__}: payload {payload.layout} for "
                f"{segments.numel} elements of {payload.count} worker(s): {declared} expected"
            )

    def check_finite(self, values: Tensor) -> Tensor:
        """Return `values` of a payload, float of any shape, if all are finite.

        Raises:
            PayloadError: one is NaN or infinite, which no encoder sends.
        """
        if not math.isfinite(float(values.sum())) and not values.isfinite().all():
            raise PayloadError(f"{self.name}: a payload's values are not finite")
        return values

    # A tensor of any shape.

    def compress(self, x: Tensor, seed: int = 0, step: int = 0) -> Compressed:
        """Compress `x`, a floating-point tensor of any shape, as the only worker.

        `seed` and `step` address the random numbers: the same ones give the same bytes.

        >>> import gcbench, torch
        >>> codec = gcbench.get_compressor("terngrad", clip=0)
        >>> packed = codec.compress(torch.tensor([[1.0, -1.0], [0.0, 1.0]]))
        >>> packed.payload.nbytes
        8
        >>> codec.decompress(packed)
        tensor([[ 1., -1.],
                [ 0.,  1.]])

        Raises:
            UsageError: `x` holds a NaN or an infinity, or no floating-point numbers.
        """
        if not x.is_floating_point() or not x.isfinite().all():
            raise UsageError(f"tensor of {x.dtype}: finite floating-point values expected")
        flat = x.detach().to(torch.float32).reshape(-1).contiguous()
        segments = Segments.of([x.shape], self.granularity)
        key = Key(seed, step, 0)
        shared, kept = self.draw_shared(segments, key), None
        if shared is None:
            shared, kept = self.prepare(flat, segments)
        else:
            shared = shared.to(x.device)
        payload = self.encode(flat, segments, shared, key, prepared=kept)
        return Compressed(payload, segments, shared, tuple(x.shape), x.dtype)

    def decompress(self, compressed: Compressed) -> Tensor:
        """Return the decoded tensor, in the shape and dtype of the one that was compressed.

        `compressed`: what `compress` of the same configuration returned.

        Raises:
            PayloadError: another configuration compressed it, or its bytes were changed.
        """
        flat = self.decode(compressed.payload, compressed.segments, compressed.shared)
        return flat.view(compressed.shape).to(compressed.dtype)


class Compressed(NamedTuple):
    """A compressed tensor: what `Compressor.compress` returns."""

    payload: Payload
    segments: Segments
    shared: Tensor
    """What the single worker agreed on with itself, see `Compressor.prepare`."""
    shape: tuple[int, ...]
    dtype: torch.dtype


class MultiRoundCompressor(Compressor):
    """A method in rounds of all-reduce, in which a summand depends on the means of earlier rounds.

    All workers receive the same means, so they compute the same approximation and the same state,
    which is carried to the next step. `layout` has one float32 part for each round.
    """

    collectives: ClassVar[tuple[str, ...]] = ("allreduce",)

    @property
    def requantizes(self) -> bool:  # noqa: D102
        return False

    @abstractmethod
    def initial_state(self, segments: Segments, key: Key) -> Tensor:
        """Return the first step's state, float32, 1-D; `key` is the same on every worker."""

    @abstractmethod
    def in_rounds(
        self, x: Tensor, segments: Segments, state: Tensor, key: Key, out: Tensor
    ) -> Generator[Tensor, Tensor, Tensor]:
        """Run the rounds of one step, as a generator.

        It yields this worker's summand of each round, float32, 1-D, and receives the mean over all
        workers, which is not overwritten before the end of the step. After the last mean it writes
        the approximate mean gradient to `out`, float32, shape (n,), and returns the state for the
        next step; both depend on nothing but the means and `state`. `key` is the next step's, and
        the same on every worker. Of several simulated workers only one runs to the end.
        """

    def draw_shared(self, segments: Segments, key: Key) -> Tensor | None:
        """Return the initial state."""
        return self.initial_state(segments, key._replace(rank=0))

    def encode(
        self,
        x: Tensor,
        segments: Segments,
        shared: Tensor,
        key: Key,
        *,
        prepared: Any = None,
        out: Payload | None = None,
    ) -> Payload:
        """Return the summands of a single worker; `shared`: the state, or empty at first."""
        state = shared if shared.numel() else self.initial_state(segments, key._replace(rank=0))
        rounds = self.in_rounds(x, segments, state, key, x.new_empty(0))
        parts = [next(rounds)]
        while len(parts) < len(self.layout(segments) or ()):
            parts.append(rounds.send(parts[-1]))
        rounds.close()
        return fill(out, *parts)

    def decode(
        self, payload: Payload, segments: Segments, shared: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        """Return the approximation that the rounds end with, given the means as payload parts."""
        self.check(payload, segments)
        if out is None:
            out = payload.parts[0].new_empty(segments.numel)
        key = Key(0, 0, 0)
        state = shared if shared.numel() else self.initial_state(segments, key)
        rounds = self.in_rounds(torch.zeros_like(out), segments, state, key, out)
        next(rounds)
        try:
            for part in payload.parts:
                rounds.send(part)
        except StopIteration:
            return out
        raise PayloadError(
            f"{self.name}: payload of {len(payload.parts)} parts; the method has more rounds"
        )
