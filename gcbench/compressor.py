"""The contract of a gradient compressor, and the types that it speaks in.

A compressor is a pure codec over one flat float32 tensor. It never communicates, never asks for a
device, keeps no state and touches no global random generator; workers, residuals and collectives
belong to the engine. Its hyper-parameters are the fields of a frozen dataclass.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from gcbench.errors import PayloadError, UsageError

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
    """What the numbers are for: one of the constants of `gcbench.streams`."""

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
        if any(a > b for a, b in zip(self.offsets, self.offsets[1:], strict=False)):
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
        offsets = [0]
        for length in lengths:
            offsets.append(offsets[-1] + length)
        return cls(tuple(offsets), kept)

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
        edges = [min(max(self.offsets[i], start), stop) - start for i in which]
        return Segments((*edges, stop - start)), which


class Compressor(ABC):
    """One method of gradient compression: a pure codec over a flat float32 tensor.

    Subclasses are frozen dataclasses; each of their fields is a hyper-parameter and can be set on
    the command line (`--set name=value`). In what follows `x` is a float32 tensor of shape (n,)
    with finite values, `segments` covers it, and m = len(segments).
    """

    name: ClassVar[str] = ""
    """The name on the command line; the registry fills it in from the file's name."""
    collectives: ClassVar[tuple[str, ...]] = ("allgather",)
    """Collectives that compute this method's mean correctly, the default first."""
    memory: ClassVar[str] = "none"
    """What the published method carries from step to step: a name of `gcbench.memory`."""
    memory_options: ClassVar[Mapping[str, Any]] = {}
    """Fields of that memory where the published method differs from the memory's defaults."""
    granularity: str | int = "tensor"
    """Where scales live, see `Segments.of`; a field where a method lets the user choose."""

    # Declarations, which the contract test holds a method to. Plain attributes in a subclass, or
    # properties where they depend on its fields.

    @property
    def unbiased(self) -> bool:
        """Whether the expectation of `decode(encode(x))` is `target(x)`."""
        return False

    @property
    def contractive(self) -> bool:
        """Whether the error stays below the input, see `error_bound`: error feedback converges."""
        return False

    @property
    def requantizes(self) -> bool:
        """Whether an owner encodes the mean again (`merge` by default), losing some of it.

        A residual memory then keeps on the owner what this loses. A method that overrides `merge`
        with one that loses nothing more says False: then all collectives give the same mean.
        """
        return True

    @property
    def aggregate(self) -> str:
        """What `mean` is: "mean" of the decoded payloads, their majority "vote", or "other"."""
        return "mean"

    @property
    def signs(self) -> bool:
        """Whether a worker sends exactly sign(x), with +1 or -1 for 0, and `mean` is the majority.

        The theorems of signSGD are then about this method. It implies `aggregate` "vote".
        """
        return False

    @property
    def portable(self) -> bool:
        """Whether the same input gives the same bytes on every machine.

        False where a library's Fourier transform or matrix product decides the last bits.
        """
        return True

    @property
    def exact_for(self) -> tuple[str, ...]:
        """Families of inputs that arrive exactly: names of `gcbench.verify.FAMILIES`."""
        return ()

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

    def legal_collectives(self) -> tuple[str, ...]:
        """Return the collectives of this configuration; fields may narrow the class's list."""
        return self.collectives

    def nominal_bits(self) -> float | None:
        """Return the bits an element that the source quotes for the way up (None: it has none)."""
        return None

    def gaussian_error(self) -> float | None:
        """Return ||x - decode||^2 / ||x||^2 for long segments of independent normal values.

        None: not known in closed form.
        """
        return None

    def error_bound(self, x: Tensor, segments: Segments) -> float | None:
        """Return a proven bound on ||x - decode(encode(x))||^2 of a contractive method.

        It is below ||x||^2 unless x = 0. A bound that holds in expectation is tested on a mean.
        """
        return None

    def delta(self, segments: Segments) -> float | None:
        """Return the contraction delta, above 0, that holds whatever x is.

        ||x - decode(encode(x))||^2 <= (1 - delta) ||x||^2 for every x of these segments, or its
        expectation over the draws; values that are denormal in float32 or near its largest are
        excepted. None: the method contracts by no such constant.
        """
        return None

    def omega(self, segments: Segments) -> float | None:
        """Return the relative variance that holds whatever x is, of a method unbiased for x.

        E||decode(encode(x)) - x||^2 <= omega ||x||^2 for every x of these segments, of a worker
        that is alone. None: no such constant, or the method is unbiased for another target.
        """
        return None

    def with_error(self, alpha: float) -> Compressor | None:
        """Return this method set to a relative error of about `alpha`, in (0, 1).

        For theorems in which the error falls to 0 with the steps; the `delta` of what is returned
        says what the error is at most. None: no field sets it.
        """
        return None

    def variance(self, x: Tensor, segments: Segments, shared: Tensor) -> Tensor | None:
        """Return the exact variance of each decoded element of an unbiased method.

        float64, shape (n,); None: not known.
        """
        return None

    def variance_bound(self, x: Tensor, segments: Segments, shared: Tensor) -> float | None:
        """Return the source's bound on the sum of `variance`, if it has one."""
        return None

    def target(self, x: Tensor, segments: Segments, shared: Tensor) -> Tensor:
        """Return what an unbiased method is unbiased for, shape (n,); `x` itself by default."""
        return x

    def statistic(self, x: Tensor, segments: Segments) -> Tensor:
        """Return what the workers agree on first, float32, first axis m, or empty for nothing.

        The element-wise maximum over all workers is handed to the other methods as `shared`.
        """
        return x.new_empty(0)

    def draw_shared(self, segments: Segments, key: Key) -> Tensor | None:
        """Return what all workers draw alike from the shared seed, with no message: as `shared`.

        `key` is the same on every worker. None (the default): `statistic` decides. A method that
        draws so needs no `statistic` and no two-shot exchange.
        """
        return None

    @abstractmethod
    def encode(self, x: Tensor, segments: Segments, shared: Tensor, key: Key) -> Payload:
        """Return the payload of one worker (`count` is 1)."""

    def encode_feedback(
        self, x: Tensor, residual: Tensor, segments: Segments, shared: Tensor, key: Key
    ) -> Payload:
        """Encode x + residual, and leave in `residual`, shape (n,), what the payload loses of it.

        A method may override it with an operation that does all in one pass; same bits.
        """
        offered = residual + x  # apart from the residual: a payload may hold what was encoded
        payload = self.encode(offered, segments, shared, key)
        torch.sub(offered, self.decode(payload, segments, shared), out=residual)
        return payload

    def encode_shards(
        self, x: Tensor, segments: Segments, shared: Tensor, key: Key, bounds: Sequence[int]
    ) -> list[Payload]:
        """Return one payload for each shard `[bounds[k], bounds[k + 1])` of the bucket.

        By default each shard is encoded as a bucket of its own, so a segment that a bound cuts has
        a scale on each side. Bounds are multiples of `TILE`, or the bucket's end: a method whose
        packed words can be cut there encodes once instead.
        """

        def encode(start: int, stop: int, *rest: Any) -> Payload:
            return self.encode(x[start:stop], *rest)

        return _each_shard(encode, segments, shared, key, bounds)

    def feedback_shards(
        self,
        x: Tensor,
        residual: Tensor,
        segments: Segments,
        shared: Tensor,
        key: Key,
        bounds: Sequence[int],
    ) -> list[Payload]:
        """Return what `encode_feedback` returns for each shard, encoded as a bucket of its own."""

        def encode(start: int, stop: int, *rest: Any) -> Payload:
            return self.encode_feedback(x[start:stop], residual[start:stop], *rest)

        return _each_shard(encode, segments, shared, key, bounds)

    @abstractmethod
    def decode(self, payload: Payload, segments: Segments, shared: Tensor) -> Tensor:
        """Return the mean over the payload's `count` workers, float32, shape (n,).

        Raises:
            PayloadError: no encoder of this configuration can have produced `payload`.
        """

    def mean(self, payloads: Sequence[Payload], segments: Segments, shared: Tensor) -> Tensor:
        """Return the mean of what the payloads of different workers stand for, shape (n,).

        By default each is decoded and they are added in the order of ranks. A method may override
        it with an operation that does so in one pass; same bits.
        """
        # The product is a tensor of its own; what was decoded may be the payload's.
        total = self.decode(payloads[0], segments, shared) * payloads[0].count
        for payload in payloads[1:]:
            self.decode_onto(payload, segments, shared, total)
        workers = float(sum(payload.count for payload in payloads))
        return total.div_(total.new_tensor(workers))  # by a number, a GPU takes its reciprocal

    def decode_onto(
        self, payload: Payload, segments: Segments, shared: Tensor, total: Tensor
    ) -> None:
        """Add the sum over the payload's workers, `decode` times its count, to `total`, (n,).

        A method may override it with an operation that writes no decoded tensor; same bits.
        """
        decoded = self.decode(payload, segments, shared)
        total += decoded * payload.count if payload.count > 1 else decoded

    def merge(
        self, payloads: Sequence[Payload], segments: Segments, shared: Tensor, key: Key
    ) -> Payload:
        """Return one payload for the mean of several: the parameter server's step.

        By default the mean is encoded again, as one more worker would encode it.
        """
        merged = self.encode(self.mean(payloads, segments, shared), segments, shared, key)
        return merged._replace(count=sum(payload.count for payload in payloads))

    def summand(self, payload: Payload, workers: int, segments: Segments) -> Payload:
        """Return the payload in a form whose parts can be added over `workers` element by element.

        Only for methods that list "allreduce"; by default the payload is such a form already.
        """
        return payload

    def decode_sum(self, payload: Payload, segments: Segments, shared: Tensor) -> Tensor:
        """Return the mean, shape (n,), from the sum of `payload.count` workers' summands."""
        return self.decode(payload, segments, shared)

    def layout(self, segments: Segments, count: int = 1) -> Layout | None:
        """Return the declared wire format of a payload merged from `count` workers.

        None (the default) says that sizes depend on the data; the engine then sends them along,
        and counts them.
        """
        return None

    def bits(self, segments: Segments, count: int = 1) -> int | None:
        """Return the declared size of a payload in bits; tests compare the real one."""
        layout = self.layout(segments, count)
        if layout is None:
            return None
        return 8 * sum(dtype.itemsize * numel for dtype, numel in layout)

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


def _each_shard(
    encode: Callable[..., Payload],
    segments: Segments,
    shared: Tensor,
    key: Key,
    bounds: Sequence[int],
) -> list[Payload]:
    """Call `encode(start, stop, segments, shared, key)` for each shard, with its scales and key."""
    payloads: list[Payload] = []
    for start, stop in itertools.pairwise(bounds):
        if payloads and stop == start == bounds[-1] and bounds[len(payloads) - 1] == start:
            payloads.append(payloads[-1])  # empty shards are alike; with many workers, many
            continue
        shard, which = segments.shard(start, stop)
        scales = shared[which.start : which.stop] if shared.numel() else shared
        place = key._replace(offset=key.offset + start)
        payloads.append(encode(start, stop, shard, scales, place))
    return payloads


class MultiRoundCompressor(Compressor):
    """A method in rounds of all-reduce: what a worker adds depends on the means of earlier rounds.

    Every round's summand is a float32 vector. Nothing is sent but these, so all workers end with
    the same means; `state` is what is carried to the next step, the same on all workers.
    """

    collectives: ClassVar[tuple[str, ...]] = ("allreduce",)
    rounds: ClassVar[int] = 1

    @property
    def requantizes(self) -> bool:  # noqa: D102
        return False

    @abstractmethod
    def initial_state(self, segments: Segments, key: Key) -> Tensor:
        """Return the state before the first step; `key` is the same on every worker."""

    @abstractmethod
    def contribute(
        self, x: Tensor, segments: Segments, state: Tensor, means: Sequence[Tensor]
    ) -> Tensor:
        """Return this worker's summand of round len(means), float32, 1-D."""

    @abstractmethod
    def reconstruct(self, means: Sequence[Tensor], segments: Segments) -> Tensor:
        """Return the approximate mean gradient, float32, shape (n,), from the rounds' means."""

    @abstractmethod
    def next_state(self, means: Sequence[Tensor], segments: Segments, key: Key) -> Tensor:
        """Return the state for the next step, whose shared `key` this is."""

    def encode(self, x: Tensor, segments: Segments, shared: Tensor, key: Key) -> Payload:
        """Return the summands of a worker that is alone, from the initial state."""
        state = self.initial_state(segments, key._replace(rank=0))
        means: list[Tensor] = []
        for _ in range(self.rounds):
            means.append(self.contribute(x, segments, state, means))
        return Payload(tuple(means))

    def decode(self, payload: Payload, segments: Segments, shared: Tensor) -> Tensor:  # noqa: D102
        self.check(payload, segments)
        return self.reconstruct(payload.parts, segments)
