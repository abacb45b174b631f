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

import numpy as np
import torch
from torch import Tensor

from gcbench.core import purposes
from gcbench.core.errors import PayloadError, UsageError

TILE = 1024
"""Elements per tile. Codes are packed and random numbers are drawn tile by tile, and shards of a
bucket start at tile boundaries."""

Layout = tuple[tuple[torch.dtype, int], ...]
"""The wire format of one payload: dtype and element count of each part, in order."""
State = dict[str, Tensor]
"""Buffers carried from step to step, by name."""


class Key(NamedTuple):
    """The address of random numbers in a counter-based, stateless generator.

    A draw is a function of seed, step, rank, stream and the element's index in the bucket, so the
    bits do not depend on shard boundaries, backend or number of processes.
    """

    seed: int
    step: int
    rank: int
    offset: int = 0
    """Index in the bucket of the tensor's first element."""
    stream: int = 0
    """The purpose of the numbers: one of the constants of `gcbench.core.purposes`."""
    workers: int = 1
    """The number of workers among which this element's draws are correlated, see
    `gcbench.ops.random`; 1: independent."""

    def words(self) -> tuple[tuple[int, int], int, int]:
        """Return Philox's two 32-bit key words, and its two counter words without an index.

        The latter are the step, and the stream in the upper 8 bits with the rank in the lower 24.

        Raises:
            ValueError: step, rank, stream or workers is out of range.
        """
        if not 1 <= self.workers < 2**20:
            raise ValueError(f"{self}: expected 1 to 2^20 - 1 workers")
        if not (0 <= self.step < 2**32 and 0 <= self.rank < 2**24 and 0 <= self.stream < 2**8):
            raise ValueError(
                f"{self}: expected step below 2^32, rank below 2^24 and stream below 2^8"
            )
        seed = self.seed & 0xFFFFFFFFFFFFFFFF
        return (seed & 0xFFFFFFFF, seed >> 32), self.step, self.stream << 24 | self.rank


class Payload(NamedTuple):
    """One worker's contribution to a collective: packed, contiguous tensors."""

    parts: tuple[Tensor, ...]
    count: int = 1  # type: ignore[assignment]  # hides tuple.count
    """The number of workers whose gradients it contains."""

    @property
    def nbytes(self) -> int:
        """Bytes of all parts, the number that traffic counts."""
        return sum(part.nbytes for part in self.parts)

    @property
    def layout(self) -> Layout:
        """Dtype and element count of each part."""
        return tuple((part.dtype, part.numel()) for part in self.parts)

    def to_bytes(self) -> Tensor:
        """Return all parts as one uint8 tensor, shape (nbytes,), on the same device."""
        views = [part.contiguous().view(-1).view(torch.uint8) for part in self.parts]
        return torch.cat(views) if len(views) != 1 else views[0]

    @classmethod
    def from_bytes(cls, data: Tensor, layout: Layout, count: int = 1) -> Payload:
        """Split a uint8 tensor into the parts of `layout`.

        Raises:
            PayloadError: `data` is not uint8, or its length differs from that of the layout.
        """
        sizes = [numel * dtype.itemsize for dtype, numel in layout]
        if data.dtype != torch.uint8 or data.numel() != sum(sizes):
            raise PayloadError(
                f"payload has {data.numel()} elements of {data.dtype}: expected {sum(sizes)} bytes"
            )
        # A part may begin at any byte; `view` needs alignment, which a copy provides.
        parts = tuple(
            (piece.clone() if dtype.itemsize > 1 else piece).view(dtype)
            for piece, (dtype, _) in zip(torch.split(data, sizes), layout, strict=True)
        )
        return cls(parts, count)

    @classmethod
    def over(cls, buffer: Tensor, layout: Layout, count: int = 1) -> Payload:
        """Return the payload whose parts are views of `buffer`, uint8, 1-D.

        Parts with the widest elements come first, so all parts are aligned if the buffer is (see
        `aligned`). An unaligned part is copied.

        Raises:
            PayloadError: the buffer is not uint8, or its length differs from that of the layout.
        """
        if buffer.dtype != torch.uint8 or buffer.numel() != layout_bytes(layout):
            raise PayloadError(
                f"payload has {buffer.numel()} elements of {buffer.dtype}: expected "
                f"{layout_bytes(layout)} bytes for {layout}"
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
    """Yield the index, first byte and end of each part, in the order of the bytes."""
    start = 0
    for i in sorted(range(len(layout)), key=lambda i: -layout[i][0].itemsize):
        dtype, numel = layout[i]
        yield i, start, start + numel * dtype.itemsize
        start += numel * dtype.itemsize


def aligned(buffer: Tensor, layout: Layout) -> bool:
    """Return whether all parts of this layout can be views of the uint8 tensor `buffer`."""
    widest = max((dtype.itemsize for dtype, _ in layout), default=1)
    return buffer.storage_offset() % widest == 0


def layout_bytes(layout: Layout) -> int:
    """Return the bytes of a payload of this layout."""
    return sum(dtype.itemsize * numel for dtype, numel in layout)


class Prepared(NamedTuple):
    """The result of `Compressor.prepare` for one worker's gradient."""

    statistic: Tensor
    """The statistic whose maximum the workers share, float32, first axis m; empty: none."""
    cached: Any = None
    """Intermediate results that the same worker's `encode` reuses."""


@dataclass(frozen=True, eq=False)
class Segments:
    """The division of a flat tensor into segments, consecutive groups with one scale each.

    Segment i is `[offsets[i], offsets[i + 1])`; it may be empty. `offsets[-1]` is the length of the
    flat tensor. `shapes` are the shapes of the tensors concatenated in the flat tensor; tensor and
    segment boundaries may differ. A shard has no shapes: each of its segments counts as a vector.
    """

    offsets: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if not self.offsets or self.offsets[0] != 0:
            raise ValueError(f"offsets must start at 0, not {self.offsets[:1]}")
        if any(map(operator.gt, self.offsets, self.offsets[1:])):  # fast: there may be millions
            raise ValueError("offsets must not decrease")
        if self.shapes and sum(map(math.prod, self.shapes)) != self.offsets[-1]:
            raise ValueError(f"shapes {self.shapes} do not have {self.offsets[-1]} elements in all")

    @classmethod
    def of(cls, shapes: Sequence[Sequence[int]], granularity: str | int = "tensor") -> Segments:
        """Return the segments of the concatenation of tensors of the given `shapes`.

        `granularity`: "tensor", one segment per tensor; "model", one in all; "column", one per
        index of a tensor's first axis (the contiguous incoming weights of one output unit), where
        vectors and scalars are one column; or an integer d, groups of d elements inside each
        tensor, the last of which may be shorter.

        Raises:
            UsageError: another `granularity`.
        """
        sizes = [math.prod(shape) for shape in shapes]
        dims = tuple(tuple(shape) for shape in shapes)
        if granularity == "model":
            return cls((0, sum(sizes)), dims)
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
                    f"granularity {granularity!r}: expected 'tensor', 'column', 'model' or a group "
                    "size of at least 1"
                )
            count, rest = divmod(size, width) if width else (1, 0)
            lengths += [width] * count
            if rest:
                lengths.append(rest)
        return cls(tuple(itertools.accumulate(lengths, initial=0)), dims)

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
        """Runs of adjacent segments of equal length: (slice of segments, first element, length)."""
        runs: list[tuple[slice, int, int]] = []
        index = 0
        for length, alike in itertools.groupby(self.lengths):
            stop = index + sum(1 for _ in alike)
            runs.append((slice(index, stop), self.offsets[index], length))
            index = stop
        return tuple(runs)

    @cached_property
    def binary(self) -> Segments:
        """The parts of these segments by the binary digits of their lengths, the largest first.

        A segment of 100 elements becomes three, of 64, 32 and 4. These have no shapes.
        """
        lengths: list[int] = []
        for which, _, length in self.runs:
            digits = [1 << bit for bit in reversed(range(length.bit_length())) if length >> bit & 1]
            lengths += (digits or [0]) * (which.stop - which.start)
        if len(lengths) == len(self):
            return self
        return Segments(tuple(itertools.accumulate(lengths, initial=0)))

    @cached_property
    def table(self) -> Tensor:
        """The segment table of kernels, int64, shape (2, m + 1), on the CPU.

        Row 0 has the offsets. Row 1 has the number of tiles before each segment, then their total,
        where each segment is cut into tiles of 1024 elements from its first element.
        """
        offsets = np.array(self.offsets, np.int64)
        tiles = (np.diff(offsets) + TILE - 1) // TILE
        return torch.from_numpy(np.stack([offsets, np.insert(tiles.cumsum(), 0, 0)]))

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
        """Return the segments of the shard `[start, stop)`, and their indices in these segments.

        If the shard cuts a segment, the part inside becomes a segment of the shard. The range of
        indices selects the shard's scales from all scales. Equal arguments return the same object,
        so its cached properties are computed once.
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
        """Cache of payload layouts for `gcbench.core.codec`."""
        return {}

    def _cut(self, start: int, stop: int) -> tuple[Segments, range]:
        if not 0 <= start <= stop <= self.numel:
            raise ValueError(f"shard [{start}, {stop}) is not within {self.numel} elements")
        if (start, stop) == (0, self.numel):
            return self, range(len(self))
        first = bisect_right(self.offsets, start, lo=1) - 1
        which = range(first, bisect_left(self.offsets, stop, hi=len(self)))
        if not which:
            return Segments((0,)), range(0)
        inner = [offset - start for offset in self.offsets[first + 1 : which.stop]]
        return Segments((0, *inner, stop - start)), which


NOISES = ("independent", "correlated")
"""How the random numbers of different workers for the same element relate."""


def check_noise(noise: str, rounding: str = "stochastic") -> None:
    """Check a method's field `noise`.

    Raises:
        ValueError: it is not one of `NOISES`, or "correlated" with another rounding.
    """
    if noise not in NOISES:
        raise ValueError(f"noise={noise!r}: expected {' or '.join(NOISES)}")
    if noise == "correlated" and rounding != "stochastic":
        raise ValueError(f"noise='correlated' needs rounding='stochastic', not {rounding!r}")


NOTHING = torch.empty(0, dtype=torch.float32)
"""`Context.shared` of a method without a statistic."""


class Context(NamedTuple):
    """The second argument of every function of a method, such as `encode(x, ctx)`.

    It is immutable; `ctx._replace(key=...)` returns a modified copy.
    """

    segments: Segments
    """The division of the flat tensor of n elements into segments."""
    shared: Tensor = NOTHING
    """The value that all workers share: the maximum of their statistics, or a common draw."""
    key: Key = Key(0, 0, 0)
    """The address of the random numbers of this worker, or of the owner that merges."""
    workers: int = 1
    """The world size."""
    lr: float = 1.0
    """The learning rate that the mean will be applied with; while it is 0, the last positive one,
    or 1. Reading it raises UsageError in a hook whose tensors have different rates."""
    prepared: Any = None
    """`Prepared.cached` for the same x and segments; None: `encode` computes it."""
    layout: Layout | None = None
    """The declared layout of one worker's payload; None: sizes depend on the data."""
    parts: tuple[Tensor, ...] | None = None
    """Buffers for the results of `encode` and `merge`; None: return new tensors."""
    out: Tensor | None = None
    """Buffer for the result of `decode` and `mean`, float32, shape (n,); None: return a new one."""
    state: State = {}  # noqa: RUF012 - only the engine makes contexts with buffers
    """The memory's buffers of this worker, by name."""
    joint: State = {}  # noqa: RUF012
    """The buffers of memory and update rule that are equal on all workers, by name."""
    skipped: int = 0
    """Earlier steps whose mean was never computed, because a gradient was not finite."""

    @property
    def rank(self) -> int:
        """The worker's rank."""
        return self.key.rank

    @property
    def step(self) -> int:
        """The step, counted from 0."""
        return self.key.step

    def draws(self, noise: str) -> Key:
        """Return the address of the random numbers for `noise`, one of `NOISES`.

        "correlated": the workers' draws of an element are correlated. An owner that merges is the
        only one to encode an element, so its draws are independent.
        """
        correlated = noise == "correlated" and self.key.stream == purposes.ENCODE
        return self.key._replace(workers=self.workers) if correlated else self.key

    def part(self, number: int) -> Tensor | None:
        """Return the buffer for part `number` of the payload; None: return a new tensor."""
        return None if self.parts is None else self.parts[number]


def all_finite(values: Tensor) -> bool:
    """Return whether no element is NaN or infinite.

    Their sum, a tenth of the time of `isfinite`, decides unless it overflows.
    """
    return math.isfinite(float(values.sum())) or bool(values.isfinite().all())


def check_finite(values: Tensor) -> Tensor:
    """Return `values` of a payload, float of any shape, unchanged if all are finite.

    Raises:
        PayloadError: one is NaN or infinite, which no encoder sends.
    """
    if not all_finite(values):
        raise PayloadError("a payload contains values that are not finite")
    return values
