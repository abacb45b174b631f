"""The contract of a gradient compressor, and the types that it speaks in.

A compressor is a pure codec over one flat float32 tensor. It never communicates, never asks for a
device, keeps no state and touches no global random generator; workers, residuals and collectives
belong to the engine. Its hyper-parameters are the fields of a frozen dataclass.

Large results are written where the caller says (`out`), because fresh memory costs more than most
codecs: an exchange owns its buffers for the life of a run. What a method claims about its errors
stands in an object of its own (`gcbench.core.claims`), which checks read and no engine needs.
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

from gcbench.core import legacy
from gcbench.core.claims import Claims
from gcbench.core.errors import GcbenchError, PayloadError, UsageError

T = TypeVar("T")
COLLECTIVES = ("allreduce", "allgather", "twoshot")
TILE = 1024
"""Elements of one packing and drawing tile; shards of a bucket start at multiples of it."""

Layout = tuple[tuple[torch.dtype, int], ...]
"""The wire format of one payload: dtype and element count of each part, in order."""


class Key(NamedTuple):
    """The address of one stream of random numbers (counter-based, nothing is stored).

    The draw of an element depends on these five numbers and its index alone, so bucketing,
    sharding, the backend and the number of processes change no bit.
    """

    seed: int
    step: int
    rank: int
    offset: int = 0
    """Index in the bucket of the first element of the tensor at hand."""
    stream: int = 0
    """What the numbers are for: one of the constants of `gcbench.core.purposes`."""

    def words(self) -> tuple[tuple[int, int], int, int]:
        """Return Philox's two 32-bit key words, and the counter's two that are the same for all.

        Raises:
            ValueError: step, rank or stream do not fit.
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
    """How many workers' gradients are merged into it."""

    @property
    def nbytes(self) -> int:
        """Bytes of all parts: the number that is counted as sent."""
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
        # Parts may lie at any byte; a copy aligns the ones that a dtype view would refuse.
        parts = tuple(
            (piece.clone() if dtype.itemsize > 1 else piece).view(dtype)
            for piece, (dtype, _) in zip(torch.split(data, sizes), layout, strict=True)
        )
        return cls(parts, count)

    @classmethod
    def over(cls, buffer: Tensor, layout: Layout, count: int = 1) -> Payload:
        """Return the payload that lies in `buffer`, uint8, as long as the layout: parts are views.

        Parts of wide elements lie first, so that all are aligned if the buffer's first byte is. A
        part that is not is a copy: see `aligned`.

        Raises:
            PayloadError: the buffer is longer or shorter than the layout.
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
        """Copy the parts to where `over` finds them; uint8, shape (nbytes,)."""
        for i, start, stop in _places(self.layout):
            buffer[start:stop].copy_(self.parts[i].contiguous().view(torch.uint8))


def _places(layout: Layout) -> Iterator[tuple[int, int, int]]:
    """Yield each part's number, first byte and last byte in a buffer, in the order of the bytes."""
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
    """Return where an encoder writes part number `part`, or None for a tensor of its own."""
    return None if out is None else out.parts[part]


def slots(out: Payload | None) -> tuple[Tensor, ...] | None:
    """Return where an encoder writes its parts, or None for tensors of its own."""
    return None if out is None else out.parts


def fill(out: Payload | None, *parts: Tensor, count: int = 1) -> Payload:
    """Return the payload of these parts, which lie in `out` already or are copied there.

    Raises:
        ValueError: a part has another length or dtype than the slot.
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
    """Return `out`, with the result in it."""
    return out if result is out else out.copy_(result)


def check_collectives(name: str, declared: object) -> None:
    """Check the collectives that a method declares.

    Raises:
        GcbenchError: they are no tuple, none, or one of them does not exist or comes twice.
    """
    names = declared if isinstance(declared, tuple) else ()
    if not names or len({*names}) < len(names) or not {*names} <= {*COLLECTIVES}:
        raise GcbenchError(
            f"{name} declares collectives = {declared!r}: a tuple of some of {COLLECTIVES} is "
            "expected, the default first"
        )


def _checked(function: Callable[..., T]) -> Callable[..., T]:
    """Have a method refuse an x that is not float32, or not as long as its segments."""
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
    """What one look at a worker's gradient gives, before the workers agree."""

    statistic: Tensor
    """What the workers agree on, float32, first axis m, or empty for nothing."""
    kept: Any = None
    """What the same worker's `encode` would compute again."""


@dataclass(frozen=True, eq=False)
class Segments:
    """Where the scales live: consecutive groups of one flat tensor.

    `offsets` has one entry more than there are segments: segment i is `[offsets[i],
    offsets[i + 1])`, and `offsets[-1]` is the length of the flat tensor. Segments may be empty.
    `shapes` are those of the tensors that lie one after the other in the flat tensor, whatever the
    segments are; a shard has none, and then each segment stands for a vector.
    """

    offsets: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if not self.offsets or self.offsets[0] != 0:
            raise ValueError(f"offsets must start at 0, not {self.offsets[:1]}")
        if any(map(operator.gt, self.offsets, self.offsets[1:])):  # there may be millions
            raise ValueError("offsets must not decrease")
        if self.shapes and sum(map(math.prod, self.shapes)) != self.offsets[-1]:
            raise ValueError(f"tensors of shapes {self.shapes} for {self.offsets[-1]} elements")

    @classmethod
    def of(cls, shapes: Sequence[Sequence[int]], granularity: str | int = "tensor") -> Segments:
        """Lay segments over the concatenation of tensors of the given `shapes`.

        `granularity` is "tensor"; "model" (one segment); "column": one segment per entry of a
        tensor's first axis, which is contiguous (the incoming weights of one output unit), vectors
        and scalars being one column; or a number d: groups of d inside each tensor, the last one
        short.

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
        """Neighbouring segments of one length, as (which segments, first element, length)."""
        runs: list[tuple[slice, int, int]] = []
        for i, (start, length) in enumerate(zip(self.offsets, self.lengths, strict=False)):
            if runs and runs[-1][2] == length:
                runs[-1] = (slice(runs[-1][0].start, i + 1), *runs[-1][1:])
            else:
                runs.append((slice(i, i + 1), start, length))
        return tuple(runs)

    @cached_property
    def table(self) -> Tensor:
        """Return what kernels walk by, int64, shape (2, m + 1), on the CPU.

        Row 0 has the offsets; row 1 how many tiles of 1024 elements, each inside one segment, lie
        before each segment, and in all.
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
        """Yield each run of `x`, shape (n,), as a matrix view: its segments, (segments, length)."""
        for which, start, length in self.runs:
            count = which.stop - which.start
            yield which, x[start : start + count * length].view(count, length)

    def shard(self, start: int, stop: int) -> tuple[Segments, range]:
        """Return the segments of the shard `[start, stop)`, and which of these segments they are.

        A segment that the shard cuts appears with the part that lies inside; scales of the whole
        are handed on by indexing with the returned range. The same shard is the same object, so
        that what is derived from it is computed once.
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

    A method defines `encode`, `decode` and, where sizes do not depend on the data, `layout`; the
    rest has a definition in these terms, which a method replaces where it can do better: the same
    bits by a faster operation, or an aggregate of its own.

    Subclasses are frozen dataclasses; each of their fields is a hyper-parameter and can be set on
    the command line (`--set name=value`). In what follows `x` is a float32 tensor of shape (n,)
    with finite values, `segments` covers it, and m = len(segments). Another dtype or length is
    refused by every encoder (UsageError). For finite values the caller answers, as a look at all of
    them costs as much as some encoders: `compress` and the training loop do look, and of a payload
    of something else no method decodes a NaN: it raises PayloadError, or returns finite values.
    `out` is where a result belongs, and never overlaps an argument; a method may return tensors of
    its own all the same, which cost a copy.
    """

    name: ClassVar[str] = ""
    """The name on the command line; the registry fills it in from the file's name."""
    collectives: ClassVar[tuple[str, ...]] = ("allgather",)
    """Collectives that compute this method's mean correctly, the default first."""
    memory: ClassVar[str] = "none"
    """What the published method carries from step to step: the name of a memory."""
    memory_options: ClassVar[Mapping[str, Any]] = {}
    """Fields of that memory where the published method differs from the memory's defaults."""
    added: ClassVar[Mapping[str, Any]] = {}
    """Fields that earlier versions of the method did not have, with the values that do what those
    did: stored runs of those versions are this method with these values."""
    granularity: str | int = "tensor"
    """Where scales live, see `Segments.of`; a field where a method lets the user choose."""

    scratch: ClassVar[bool] = False
    """Whether encoding or decoding makes tensors of the size of x besides those that are handed
    in: transforms, and methods in plain torch. An exchange itself makes none."""

    # What the method can do. Plain attributes in a subclass, or properties where fields decide.

    @property
    def requantizes(self) -> bool:
        """Whether an owner encodes the mean again (`merge` by default), losing some of it.

        A residual memory then keeps on the owner what this loses. A method whose `merge` loses
        nothing more says False: then all collectives give the same mean.
        """
        return True

    @property
    def cuttable(self) -> bool:
        """Whether a payload can be cut where shards begin, by `cut`.

        Then a two-shot exchange encodes a bucket once. Otherwise each shard is encoded as a bucket
        of its own, and a segment that a bound cuts has a scale on each side.
        """
        return False

    @property
    def fused_feedback(self) -> bool:
        """Whether `encode_feedback` is an operation of the method's own."""
        return False

    @property
    def recipe(self) -> Mapping[str, Any]:
        """Settings of the optimizer that belong to the published method, by their names in a run.

        They are the defaults of a run with this method; a run with other values is marked.
        """
        return {}

    @property
    def variants(self) -> tuple[Mapping[str, Any], ...]:
        """Configurations that the contract test runs and that have golden bytes; {} is default."""
        return ({},)

    @property
    def claims(self) -> Claims[Any]:
        """What the method claims of its errors, its mean and its size: for checks and tables."""
        return Claims(self)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        legacy.adapt(cls)
        own = vars(cls)
        if "collectives" in own:
            check_collectives(cls.__name__, own["collectives"])
        for name in ("prepare", "encode", "encode_feedback"):
            if inspect.isfunction(own.get(name)):
                setattr(cls, name, _checked(own[name]))

    def legal_collectives(self) -> tuple[str, ...]:
        """Return the collectives of this configuration; fields may narrow the class's list."""
        return self.collectives

    # One worker's gradient.

    def prepare(self, x: Tensor, segments: Segments) -> Prepared:
        """Return what the workers agree on first, and what `encode` need not compute again.

        The element-wise maximum of the statistic over all workers is handed to the other methods
        as `shared`; by default there is none, and `shared` is empty.
        """
        return Prepared(x.new_empty(0))

    def draw_shared(self, segments: Segments, key: Key) -> Tensor | None:
        """Return what all workers draw alike from the shared seed, with no message: as `shared`.

        `key` is the same on every worker. None (the default): `prepare` decides. A method that
        draws so needs no statistic and no two-shot exchange.
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

        `prepared`: what `prepare` kept of the same x and segments; None: nothing is at hand.
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
        """Encode x + residual, and leave in `residual`, shape (n,), what the payload loses of it.

        Used where `fused_feedback` says so; this definition has the bits that it must have.
        """
        offered = residual + x
        payload = self.encode(offered, segments, shared, key, out=out)
        torch.sub(offered, self.decode(payload, segments, shared), out=residual)
        return payload

    def cut(self, payload: Payload, bounds: Sequence[int]) -> list[Payload]:
        """Return the payload of each shard `[bounds[k], bounds[k + 1])` of the bucket.

        Only of methods that are `cuttable`. Bounds are multiples of `TILE`, or the bucket's end;
        the shards' bytes, one after the other, are those of the payload.
        """
        raise NotImplementedError(f"{self.name}: payloads cannot be cut into shards")

    @abstractmethod
    def decode(
        self, payload: Payload, segments: Segments, shared: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        """Return the mean over the payload's `count` workers, float32, shape (n,).

        Raises:
            PayloadError: no encoder of this configuration can have produced `payload`.
        """

    def decode_onto(
        self, payload: Payload, segments: Segments, shared: Tensor, total: Tensor
    ) -> None:
        """Add the sum over the payload's workers, `decode` times its count, to `total`, (n,).

        A method may override it with an operation that writes no decoded tensor; same bits.
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
        """Return the mean of what the payloads of different workers stand for, shape (n,).

        By default each is decoded and they are added in the order of ranks. A method may override
        it with an operation that does so in one pass; same bits.
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
        return total.div_(total.new_tensor(workers))  # by a number, a GPU takes its reciprocal

    def merge(
        self,
        payloads: Sequence[Payload],
        segments: Segments,
        shared: Tensor,
        key: Key,
        *,
        out: Payload | None = None,
    ) -> Payload:
        """Return one payload for the mean of several: the parameter server's step.

        Where the method `requantizes`, it is this: the mean is encoded again, as one more worker
        would encode it.
        """
        mean = self.mean(payloads, segments, shared)
        merged = self.encode(mean, segments, shared, key, out=out)
        return merged._replace(count=sum(payload.count for payload in payloads))

    def summand(self, payload: Payload, workers: int, segments: Segments) -> Payload:
        """Return the payload in a form whose parts can be added over `workers` element by element.

        Only for methods that list "allreduce"; by default the payload is such a form already.
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

        None (the default) says that sizes depend on the data; the engine then sends them along,
        and counts them.
        """
        return None

    def bits(self, segments: Segments, count: int = 1) -> int | None:
        """Return the declared size of a payload in bits; tests compare the real one."""
        layout = self.layout(segments, count)
        return None if layout is None else 8 * layout_bytes(layout)

    def check(self, payload: Payload, segments: Segments) -> None:
        """Compare a payload with the declared layout.

        Raises:
            PayloadError: another number of parts, another dtype, too long or too short.
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
        """Return `values`, decoded or about to be.

        Raises:
            PayloadError: one is NaN or infinite, which no encoder sends.
        """
        if not math.isfinite(float(values.sum())) and not values.isfinite().all():
            raise PayloadError(f"{self.name}: a payload's values are not finite")
        return values

    # A tensor of any shape.

    def compress(self, x: Tensor, seed: int = 0, step: int = 0) -> Compressed:
        """Return `x`, a floating-point tensor of any shape, compressed by a worker that is alone.

        The same seed and step give the same bytes.

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
        """Return what arrives of a tensor that `compress` of the same configuration took.

        Raises:
            PayloadError: another configuration compressed it, or its bytes were changed.
        """
        flat = self.decode(compressed.payload, compressed.segments, compressed.shared)
        return flat.view(compressed.shape).to(compressed.dtype)


class Compressed(NamedTuple):
    """A tensor as `Compressor.compress` leaves it."""

    payload: Payload
    segments: Segments
    shared: Tensor
    """What the workers would have agreed on, see `Compressor.prepare`."""
    shape: tuple[int, ...]
    dtype: torch.dtype


class MultiRoundCompressor(Compressor):
    """A method in rounds of all-reduce: what a worker adds depends on the means of earlier rounds.

    Nothing is sent but the summands of the rounds, so all workers end with the same means, the
    same approximation and the same state, which is carried to the next step. `layout` has one
    float32 part for each round.
    """

    collectives: ClassVar[tuple[str, ...]] = ("allreduce",)

    @property
    def requantizes(self) -> bool:  # noqa: D102
        return False

    @abstractmethod
    def initial_state(self, segments: Segments, key: Key) -> Tensor:
        """Return the state before the first step; `key` is the same on every worker."""

    @abstractmethod
    def in_rounds(
        self, x: Tensor, segments: Segments, state: Tensor, key: Key, out: Tensor
    ) -> Generator[Tensor, Tensor, Tensor]:
        """Go through the rounds of one step.

        Yields this worker's summand of each round, float32, 1-D, and receives the mean over all
        workers, which stays as it is until the end. At the end it writes the approximate mean
        gradient to `out`, float32, shape (n,), from nothing but the means and `state`, and returns
        the state of the next step, whose shared key `key` is. Where several workers are simulated,
        one of them goes to the end.
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
        """Return the summands of a worker that is alone; `shared` is the state, or the first."""
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
        """Return what the rounds end with, the payload's parts being the means."""
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
        raise PayloadError(f"{self.name}: {len(payload.parts)} rounds, and the method wants more")
