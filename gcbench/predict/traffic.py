"""The messages of an exchange, computed from declared wire formats, without workers.

The messages are those of `gcbench.core.exchange` and `gcbench.core.world`; tests compare the bytes
with their counts. To keep large numbers of workers cheap, sizes of a two-shot exchange are taken
from at most `SAMPLED` evenly spaced shards. A payload whose size depends on the data is measured by
encoding a normal gradient of at most `WEIGHED` elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from gcbench.core import codec, purposes, registry
from gcbench.core.compressor import (
    TILE,
    Compressor,
    Context,
    Key,
    MultiRoundCompressor,
    Payload,
    Segments,
    layout_bytes,
)
from gcbench.core.errors import UsageError
from gcbench.core.exchange import check_legal
from gcbench.core.sparse import DIGIT, SHIFTS, WORDS
from gcbench.predict.networks import Shapes
from gcbench.predict.transport import Transport

SAMPLED = 256
WEIGHED = 3907 * TILE
"""About 4e6 elements; a prime number of tiles, because FFTs favour powers of two."""
FIRST_BUCKET = 2**20
BUCKET = 25 * 2**20
"""Limits of DDP's first bucket and of the others, in bytes."""
HEADER = 8
"""Bytes of the size sent before each part of a payload without a declared layout."""


@dataclass(frozen=True)
class Message:
    """One call of a collective by all workers."""

    kind: str
    """allreduce, reducescatter, allgather, alltoall, or hops: N - 1 messages to the next worker."""
    nbytes: float
    """Bytes that a worker contributes, mean over workers; "hops" send (N - 1) / N of them."""
    aggregated: bool = False
    """Whether it carries merged shards from their owners to all workers."""
    ordered: bool = False
    """Whether it is a sum of floats, which on the CPU is added in the order of the ranks."""

    def calls(self, library: Transport, workers: int) -> list[tuple[str, float]]:
        """Return the collectives that carry it out, and what each worker contributes to them.

        Over gloo an `ordered` sum is an all-to-all and an all-gather (`World`).
        """
        if self.ordered and library.name == "gloo":
            return [("alltoall", self.nbytes), ("allgather", self.nbytes / workers)]
        return [(self.kind, self.nbytes)]

    def payload(self, workers: int) -> tuple[float, float]:
        """Return the bytes of a worker up and down, as `World` counts them."""
        if self.kind == "allreduce":
            return self.nbytes, self.nbytes
        if self.kind == "reducescatter":
            return self.nbytes, self.nbytes / workers
        if self.kind == "alltoall":
            return self.nbytes, 0.0
        if self.kind == "hops":
            return self.nbytes * (workers - 1) / workers, 0.0
        return 0.0 if self.aggregated else self.nbytes, self.nbytes * workers

    def wire(self, workers: int) -> float:
        """Return the bytes that a worker sends to others, as `World` counts them."""
        once = (workers - 1) / workers
        shared = dict.fromkeys(("reducescatter", "alltoall", "hops"), once)
        return {"allreduce": 2 * once, "allgather": workers - 1, **shared}[self.kind] * self.nbytes


@dataclass(frozen=True)
class Traffic:
    """Bytes per worker and step."""

    up: float
    down: float
    wire: float


def total(messages: Sequence[Message], workers: int) -> Traffic:
    """Return the total bytes of the messages of a step."""
    pairs = [message.payload(workers) for message in messages]
    return Traffic(
        sum(up for up, _ in pairs),
        sum(down for _, down in pairs),
        sum(message.wire(workers) for message in messages),
    )


def _normal(method: Compressor, segments: Segments, scale: float = 1.0) -> Payload:
    """Return the payload of a normal gradient with the standard deviation `scale`."""
    x = scale * torch.randn(segments.numel, generator=torch.Generator().manual_seed(0))
    ctx = Context(segments, key=Key(0, 0, 0, 0, purposes.ENCODE))
    shared, _ = codec.agree(method, [x], ctx)
    return codec.encode(method, x, ctx._replace(shared=shared))


def _weigh(method: Compressor, segments: Segments) -> tuple[Payload, Segments, float]:
    """Return a sample payload, its segments, and the factor to the size of all segments.

    The sample is a normal gradient of at most `WEIGHED` elements.
    """
    part = segments if segments.numel <= WEIGHED else segments.shard(0, WEIGHED)[0]
    return _normal(method, part), part, segments.numel / max(1, part.numel)


def _measured_size(method: Compressor, segments: Segments) -> tuple[float, int]:
    """Return bytes and parts of a payload whose layout is not declared."""
    payload, _, factor = _weigh(method, segments)
    return payload.nbytes * factor, len(payload.parts)


def depends_on_scale(method: Compressor) -> bool:
    """Return whether a payload's size changes by over 10 % if the gradient is 1,000 times smaller.

    Such as that of a threshold: no prediction knows its size.
    """
    tile = Segments((0, TILE))
    if method.layout(tile) is not None:
        return False
    large, small = (_normal(method, tile, scale).nbytes for scale in (1.0, 1e-3))
    return not 0.9 * large <= small <= 1.1 * large


def payload_bytes(method: Compressor, segments: Segments, count: int = 1) -> tuple[float, int]:
    """Return the bytes of a payload merged from `count` workers, and its number of parts.

    The number is 0 if the layout is declared, because then no sizes are sent.
    """
    layout = method.layout(segments, count)
    return _measured_size(method, segments) if layout is None else (float(layout_bytes(layout)), 0)


def agreement(method: Compressor, segments: Segments) -> list[Message]:
    """Return the message in which the workers agree on a statistic, if there is one."""
    tiny = Segments((0, 1, 2))
    if method.draw_shared(Context(tiny, key=Key(0, 0, 0))) is not None:
        return []
    each = codec.prepare(method, torch.ones(2), Context(tiny)).statistic.numel() / 2
    return [Message("allreduce", 4 * each * len(segments))] if each else []


def _rounds(method: MultiRoundCompressor, segments: Segments) -> list[Message]:
    layout = method.layout(segments)
    if layout is None:
        nbytes, parts = _measured_size(method, segments)
        return [Message("allreduce", nbytes / parts, ordered=True)] * parts
    return [Message("allreduce", float(layout_bytes((part,))), ordered=True) for part in layout]


def _summed(method: Compressor, segments: Segments, workers: int) -> Message:
    """Return the all-reduce of payloads."""
    if type(method).summand is Compressor.summand:
        tile = _normal(method, Segments((0, TILE)))
        nbytes, _ = payload_bytes(method, segments)
        return Message("allreduce", nbytes, ordered=tile.parts[0].is_floating_point())
    payload, part, factor = _weigh(method, segments)
    summand = method.summand(payload, Context(part, workers=workers))
    floats = summand.parts[0].is_floating_point()
    return Message("allreduce", summand.nbytes * factor, ordered=floats)


def _try_merge(method: Compressor, workers: int) -> None:
    """Merge one payload of one tile per worker, to check that the method allows it.

    Raises:
        ValueError: the method refuses this many workers.
    """
    tile = Segments((0, TILE))
    shared = codec.prepare(method, torch.ones(TILE), Context(tile)).statistic
    power, merged = _normal(method, tile), None
    while True:  # by doubling: about log2(workers) merges
        if workers & power.count:
            both = [power] if merged is None else [merged, power]
            merged = codec.merge(method, both, Context(tile, shared, Key(0, 0, 0)))
        if 2 * power.count > workers:
            break
        power = codec.merge(method, [power, power], Context(tile, shared, Key(0, 0, 0)))
    assert merged is not None
    codec.decode(method, merged, Context(tile, shared))


def _shards(method: Compressor, collective: str, segments: Segments, workers: int) -> list[Message]:
    """Return the messages of a two-shot exchange or of a ring.

    They send shards to their owners, at once or from worker to worker, and merged shards to all.
    """
    n = segments.numel
    tiles = -(-n // TILE)
    share, extra = divmod(tiles, workers)

    def shard(k: int) -> Segments:
        """Return the segments of the k-th owner's shard, cut as by `exchange.shard_bounds`."""
        start, stop = ((share * e + min(e, extra)) * TILE for e in (k, k + 1))
        return segments.shard(min(start, n), min(stop, n))[0]

    filled = min(workers, tiles)
    if collective == "twoshot":
        _try_merge(method, workers)
    looked = min(filled, SAMPLED if method.layout(segments) is not None else 4)
    up = down = 0.0
    parts = 0
    for k in range(looked):
        piece = shard(k * filled // looked)
        sent, parts = payload_bytes(method, piece)
        merged, _ = payload_bytes(method, piece, workers)
        up, down = up + sent, down + merged
    if looked:
        up, down = up * filled / looked, down * filled / looked
    if filled < workers:  # more workers than tiles: some shards are empty
        empty = segments.shard(n, n)[0]
        up += (workers - filled) * payload_bytes(method, empty)[0]
        down += (workers - filled) * payload_bytes(method, empty, workers)[0]
    headers = float(HEADER * parts)
    if collective == "ring":
        gather = [Message("allgather", headers)] if parts else []
        hops = [Message("hops", up)] + ([Message("hops", headers * workers)] if parts else [])
        return [*hops, *gather, Message("allgather", up / workers)]
    messages = [
        Message("alltoall", up),
        Message("allgather", down / workers, aggregated=True),
    ]
    if parts:  # their sizes are sent first
        messages.insert(0, Message("alltoall", headers * workers))
        messages.insert(2, Message("allgather", headers, aggregated=True))
    return messages


def _sparse(method: Compressor, segments: Segments, workers: int) -> list[Message]:
    """Return the messages of a sparse all-reduce of k entries of 8 bytes per worker.

    To balance the owners, at most k entries are moved in all; how many depends on the gradients.
    """
    entries = 4.0 * WORDS * codec.entry_count(method, segments)
    if not entries:
        return []
    cuts = [Message("allreduce", 8.0 * (workers - 1))] if workers > 1 else []
    return [
        *cuts,
        Message("alltoall", 8.0 * workers),
        Message("alltoall", entries),
        *[Message("allreduce", 4.0 * 2**DIGIT)] * len(SHIFTS),
        Message("allgather", 16.0),
        Message("alltoall", entries / workers),
        Message("allgather", entries / workers, aggregated=True),
    ]


@lru_cache(maxsize=4096)
def lane(method: Compressor, collective: str, shapes: Shapes, workers: int) -> tuple[Message, ...]:
    """Return the messages in which tensors of these shapes are exchanged.

    Raises:
        UsageError: the mean is wrong under this collective, or the method refuses this many
            workers.
    """
    check_legal(method, collective)
    segments = _segments(shapes, method.granularity)
    try:
        return tuple(_messages(method, collective, segments, workers))
    except ValueError as error:
        raise UsageError(
            f"{method.name} by {collective} among {workers:,} workers: {error}"
        ) from None


def _messages(
    method: Compressor, collective: str, segments: Segments, workers: int
) -> list[Message]:
    if isinstance(method, MultiRoundCompressor):
        return _rounds(method, segments)
    messages = agreement(method, segments)
    if collective == "allreduce":
        messages.append(_summed(method, segments, workers))
    elif collective == "allgather":
        nbytes, parts = payload_bytes(method, segments)
        if parts:
            messages.append(Message("allgather", float(HEADER * parts)))
        messages.append(Message("allgather", nbytes))
    elif collective == "sparse":
        messages += _sparse(method, segments, workers)
    else:
        messages += _shards(method, collective, segments, workers)
    return messages


@lru_cache(maxsize=8)  # a large model has millions of blocks
def _segments(shapes: Shapes, granularity: str | int) -> Segments:
    return Segments.of(shapes, granularity)


@lru_cache(maxsize=4096)
def gradient_bytes(method: Compressor, shapes: Shapes, count: int = 1) -> float:
    """Return the bytes of a payload of tensors of these shapes, merged from `count` workers."""
    return payload_bytes(method, _segments(shapes, method.granularity), count)[0]


def exchange(
    method: Compressor, collective: str, lanes: tuple[Shapes, Shapes], workers: int
) -> list[Message]:
    """Return the messages of a step. `lanes`: the shapes compressed, and those sent in fp32.

    Raises:
        UsageError: see `lane`.
    """
    compressed, dense = lanes
    messages: list[Message] = []
    if compressed:
        messages += lane(method, collective, compressed, workers)
    if dense:
        messages += lane(registry.compressor("none"), "allreduce", dense, workers)
    return messages


@lru_cache(maxsize=64)
def buckets(arrival: Shapes) -> tuple[float, ...]:
    """Return the bytes of the buckets in which DDP sends float32 gradients, in order.

    DDP fills a bucket with whole tensors in the order in which the backward pass computes their
    gradients (`arrival`: their shapes). A bucket is full once it reaches its limit: 1 MiB for the
    first, 25 MiB (`bucket_cap_mb`) for the others.
    """
    sizes, limit, filled = list[float](), FIRST_BUCKET, 0.0
    for shape in arrival:
        filled += 4.0 * math.prod(shape)
        if filled >= limit:
            sizes.append(filled)
            limit, filled = BUCKET, 0.0
    return (*sizes, filled) if filled else tuple(sizes)


def dense_bytes(shapes: Shapes) -> float:
    """Return the bytes of a float32 gradient."""
    return 4.0 * sum(map(math.prod, shapes))
