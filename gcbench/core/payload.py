"""The data of the contract: keys, payloads, segments, and the context of a call."""

from __future__ import annotations

import itertools
import math
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gcbench.core.errors import PayloadError, UsageError

TILE = 1024
"""Elements of a tile, the unit in which codes are packed and random numbers drawn; shards of a
bucket start at multiples of it."""

Layout = tuple[tuple[torch.dtype, int], ...]
"""The wire format of one payload: dtype and element count of each part, in order."""
State = dict[str, Tensor]
"""Buffers that are carried from step to step, by name."""


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

    @cached_property
    def layouts(self) -> dict[tuple[int, int], tuple[Any, Layout | None]]:
        """Layouts of payloads of these segments, which `gcbench.core.codec` computes once."""
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


NOTHING = torch.empty(0)
"""What the workers agreed on if the method has no statistic."""


class Context(NamedTuple):
    """What every function of a method receives besides the tensors it works on.

    `encode(x, ctx)`, `decode(payload, ctx)`, `mean(payloads, ctx)` and all the others take one. It
    cannot be changed; `ctx._replace(key=...)` returns a changed copy.
    """

    segments: Segments
    """How the flat tensor of n elements is cut into segments."""
    shared: Tensor = NOTHING
    """What the workers agreed on: the maximum of their statistics, or what all drew; or empty."""
    key: Key = Key(0, 0, 0)
    """The address of random numbers: those of this worker, or of the owner that merges."""
    workers: int = 1
    """The world size."""
    lr: float = 1.0
    """The learning rate that the mean will be applied with."""
    prepared: Any = None
    """What `prepare` kept for `encode`, with the same x and segments; None: compute it again."""
    layout: Layout | None = None
    """The declared layout of one worker's payload; None: sizes depend on the data."""
    parts: tuple[Tensor, ...] | None = None
    """Where `encode` and `merge` may write the parts of the payload; None: return new tensors."""
    out: Tensor | None = None
    """Where `decode` and `mean` may write, float32, shape (n,); None: return a new tensor."""
    state: State = {}  # noqa: RUF012 - only the engine makes contexts with buffers
    """The worker's buffers of the memory, by name."""
    joint: State = {}  # noqa: RUF012
    """The buffers of memory and update rule that are equal on all workers, by name."""

    @property
    def rank(self) -> int:
        """The worker's rank."""
        return self.key.rank

    @property
    def step(self) -> int:
        """The step, counted from 0."""
        return self.key.step

    def part(self, number: int) -> Tensor | None:
        """Return where to write part `number` of the payload; None: return a new tensor."""
        return None if self.parts is None else self.parts[number]


def check_finite(values: Tensor) -> Tensor:
    """Return `values` of a payload, float of any shape, if all are finite.

    Raises:
        PayloadError: one is NaN or infinite, which no encoder sends.
    """
    if not math.isfinite(float(values.sum())) and not values.isfinite().all():
        raise PayloadError("a payload's values are not finite")
    return values
