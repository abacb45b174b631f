"""How payloads meet: from every worker's gradient to the one mean that all replicas apply.

A bucket is one flat gradient. Its tensors are laid out in lanes: the compressed ones first, then
those that a policy keeps dense. Each lane has its compressor and collective:

allreduce: payloads in a form that can be added, summed by the collective, decoded once.
allgather: every worker gets every payload and takes the mean of all.
twoshot: shards go to their owners (all-to-all), the owner merges its shard and all-gathers it: the
    sharded parameter server.

The memory of a lane (`gcbench.memory`) stands between gradient and encoder. It learns what was
sent by decoding the worker's own payload, here and nowhere else; an owner that encodes the mean
again keeps what that loses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from gcbench import streams
from gcbench.clock import Clock
from gcbench.compressor import (
    COLLECTIVES,
    TILE,
    Compressor,
    Key,
    Layout,
    MultiRoundCompressor,
    Payload,
    Segments,
)
from gcbench.errors import UsageError
from gcbench.memory import Memory, NoMemory, Residual, State
from gcbench.world import World

T = TypeVar("T")


@dataclass(frozen=True)
class Lane:
    """A stretch of the bucket, `[start, start + segments.numel)`, and how it is exchanged."""

    compressor: Compressor
    collective: str
    start: int
    segments: Segments
    memory: Memory = field(default_factory=NoMemory)

    @property
    def fused(self) -> bool:
        """Whether adding the residual and keeping what is lost can be left to the method.

        Not where the residual decays, where the workers agree on a statistic of the sum first, or
        where the method cuts its own packed words into shards.
        """
        method = type(self.compressor)
        return (
            isinstance(self.memory, Residual)
            and self.memory.decay == 1
            and method.statistic is Compressor.statistic
            and method.encode_shards is Compressor.encode_shards
            and not issubclass(method, MultiRoundCompressor)
        )


Piece = tuple[Payload, Segments, Tensor]
"""A payload with the segments and the shared values that decode it."""


def check_legal(compressor: Compressor, collective: str | None = None) -> str:
    """Return the collective to use (the method's first by default).

    Raises:
        UsageError: the method's mean is wrong under this collective, with the legal ones.
    """
    legal = compressor.legal_collectives()
    if collective is None:
        return legal[0]
    if collective not in COLLECTIVES:
        raise UsageError(f"collective {collective!r}: allowed are {', '.join(COLLECTIVES)}")
    if collective not in legal:
        raise UsageError(
            f"{compressor!r} cannot be exchanged by {collective}: its mean would be wrong. "
            f"Legal: {', '.join(legal)}"
        )
    return collective


def shard_bounds(n: int, workers: int) -> list[int]:
    """Return where the owners' shards of n elements begin, and n: whole tiles, dealt evenly."""
    tiles = -(-n // TILE)
    share, extra = divmod(tiles, workers)
    edges = [(share * k + min(k, extra)) * TILE for k in range(workers + 1)]
    return [min(edge, n) for edge in edges]


def dense_tensors(
    names: Sequence[str], shapes: Sequence[Sequence[int]], below: int, last: Sequence[str]
) -> list[bool]:
    """Return which tensors stay dense: those below `below` elements, and those named in `last`."""
    return [
        math.prod(shape) < below or name in last for name, shape in zip(names, shapes, strict=True)
    ]


class Exchange:
    """Turns the local workers' buckets into the mean over all workers.

    What it carries from step to step is in `workers`, for each local worker one dict a lane, and in
    `joint`, a lane's state of a method in rounds, which is the same on all workers.
    """

    def __init__(self, world: World, lanes: Sequence[Lane], seed: int, clock: Clock) -> None:
        self.world, self.seed, self.clock = world, seed, clock
        self.lanes: tuple[Lane, ...] = ()
        self.lr: float | None = None
        self.workers: list[list[State]] = [[] for _ in world.ranks]
        self.joint: list[Tensor | None] = []
        self.change(lanes)

    def change(self, lanes: Sequence[Lane]) -> None:
        """Exchange by other compressors from here on; what is carried stays."""
        if self.lanes and [(a.start, a.segments.numel) for a in self.lanes] != [
            (b.start, b.segments.numel) for b in lanes
        ]:
            raise ValueError("lanes may change their compressor, not their place")
        if not self.lanes:
            self.joint = [None] * len(lanes)
            for states in self.workers:
                for lane in lanes:
                    like = torch.zeros(lane.segments.numel, device=self.world.device)
                    states.append(lane.memory.state(like))
        for i, (old, new) in enumerate(zip(self.lanes, lanes, strict=False)):
            if old.compressor != new.compressor:
                self.joint[i] = None
        self.lanes = tuple(lanes)

    def mean(self, buckets: Sequence[Tensor], step: int, lr: float = 1.0) -> Tensor:
        """Return the mean gradient, float32, shape (n,), the same bits on every replica.

        `buckets`: one float32 tensor of shape (n,) for each local worker; `lr`: the learning rate
        that the mean will be applied with, which residuals follow.
        """
        if self.lr is not None and lr != self.lr:
            for states in self.workers:
                for lane, state in zip(self.lanes, states, strict=True):
                    lane.memory.rescale(state, self.lr / lr)
                    if "owner" in state:
                        state["owner"].mul_(self.lr / lr)
        self.lr = lr
        means = []
        for number, lane in enumerate(self.lanes):
            stop = lane.start + lane.segments.numel
            xs = [bucket[lane.start : stop] for bucket in buckets]
            means.append(self._lane(number, xs, step))
        return torch.cat(means) if len(means) > 1 else means[0]

    def _workers(self, phase: str, call: Callable[[int], T]) -> list[T]:
        """Run `call(i)` for each local worker i, booked under `phase`."""
        first = self.world.ranks[0]
        timed = self.clock.timed(lambda rank: call(rank - first))
        return self.clock.workers(phase, self.world.map(timed))

    def _lane(self, number: int, gradients: Sequence[Tensor], step: int) -> Tensor:
        lane = self.lanes[number]
        states = [worker[number] for worker in self.workers]
        xs = list(gradients)
        if not (isinstance(lane.memory, NoMemory) or lane.fused):
            offer, size = lane.memory.offer, self.world.size
            xs = self._workers("encode", lambda i: offer(gradients[i], states[i], size))
        key = Key(self.seed, step, 0, lane.start, streams.ENCODE)
        if isinstance(lane.compressor, MultiRoundCompressor):
            return self._rounds(number, lane.compressor, xs, states, key)
        shared = self._agree(lane, xs, key)
        match lane.collective:
            case "allreduce":
                return self._allreduce(lane, xs, states, shared, key)
            case "allgather":
                return self._allgather(lane, xs, states, shared, key)
            case _:
                return self._twoshot(lane, xs, states, shared, key)

    def _agree(self, lane: Lane, xs: Sequence[Tensor], key: Key) -> Tensor:
        """Return what all workers draw alike, or the maximum of their statistics, or nothing."""
        with self.clock.phase("statistic"):
            drawn = lane.compressor.draw_shared(lane.segments, key)
        if drawn is not None:
            return drawn.to(self.world.device)
        statistic = lane.compressor.statistic
        own = self._workers("statistic", lambda i: statistic(xs[i], lane.segments))
        if not own[0].numel():
            return own[0]
        with self.clock.phase("communicate"):
            return self.world.all_reduce(own, "max")

    def _keep(self, lane: Lane, x: Tensor, state: State, pieces: Sequence[Piece]) -> None:
        """Tell a worker's memory what was sent of `x`: what others will decode."""
        if lane.memory.feedback:
            sent = torch.cat([lane.compressor.decode(*piece) for piece in pieces])
            lane.memory.keep(x, sent, state)

    def _encode(
        self, lane: Lane, xs: Sequence[Tensor], states: Sequence[State], shared: Tensor, key: Key
    ) -> list[Payload]:
        """Return the local workers' payloads, each drawn from its own rank's stream."""
        ranks = self.world.ranks

        def encode(i: int) -> Payload:
            place = key._replace(rank=ranks[i])
            if lane.fused:
                residual = states[i]["residual"]
                feed = lane.compressor.encode_feedback
                return feed(xs[i], residual, lane.segments, shared, place)
            payload = lane.compressor.encode(xs[i], lane.segments, shared, place)
            self._keep(lane, xs[i], states[i], [(payload, lane.segments, shared)])
            return payload

        return self._workers("encode", encode)

    def _allreduce(
        self, lane: Lane, xs: Sequence[Tensor], states: Sequence[State], shared: Tensor, key: Key
    ) -> Tensor:
        world, method = self.world, lane.compressor
        payloads = self._encode(lane, xs, states, shared, key)
        widen = method.summand
        summands = self._workers("encode", lambda i: widen(payloads[i], world.size, lane.segments))
        with self.clock.phase("communicate"):
            columns = zip(*(summand.parts for summand in summands), strict=True)
            total = tuple(world.all_reduce(column, "sum") for column in columns)
        with self.clock.phase("decode"):
            return method.decode_sum(Payload(total, world.size), lane.segments, shared)

    def _allgather(
        self, lane: Lane, xs: Sequence[Tensor], states: Sequence[State], shared: Tensor, key: Key
    ) -> Tensor:
        world, method = self.world, lane.compressor
        payloads = self._encode(lane, xs, states, shared, key)
        with self.clock.phase("communicate"):
            layouts = [method.layout(lane.segments)] * world.size
            gathered = self._gather(payloads, layouts, [1] * world.size)
        with self.clock.phase("decode"):
            return method.mean(gathered, lane.segments, shared)

    def _twoshot(
        self, lane: Lane, xs: Sequence[Tensor], states: Sequence[State], shared: Tensor, key: Key
    ) -> Tensor:
        world, method, ranks = self.world, lane.compressor, self.world.ranks
        bounds = shard_bounds(lane.segments.numel, world.size)
        cuts = [lane.segments.shard(*edge) for edge in pairwise(bounds)]
        shards = [segments for segments, _ in cuts]
        scales = [shared[w.start : w.stop] if shared.numel() else shared for _, w in cuts]

        def encode(i: int) -> list[Payload]:
            place = key._replace(rank=ranks[i])
            if lane.fused:
                residual = states[i]["residual"]
                feed = method.feedback_shards
                return feed(xs[i], residual, lane.segments, shared, place, bounds)
            payloads = method.encode_shards(xs[i], lane.segments, shared, place, bounds)
            pieces = list(zip(payloads, shards, scales, strict=True))
            self._keep(lane, xs[i], states[i], pieces)
            return payloads

        def merge(i: int) -> Payload:
            owner = ranks[i]
            place = Key(key.seed, key.step, owner, key.offset + bounds[owner], streams.MERGE)
            here = shards[owner], scales[owner]
            if not (lane.memory.owner and method.requantizes):
                return method.merge(received[i], *here, place)
            # As `Compressor.merge`, with what the owner lost at earlier steps.
            mean = method.mean(received[i], *here)
            if "owner" not in states[i]:
                states[i]["owner"] = torch.zeros_like(mean)
            merged = method.encode_feedback(mean, states[i]["owner"], *here, place)
            return merged._replace(count=world.size)

        sent = self._workers("encode", encode)
        with self.clock.phase("communicate"):
            received = self._scatter(sent, [method.layout(shard) for shard in shards])
        merged = self._workers("decode", merge)
        with self.clock.phase("communicate"):
            layouts = [method.layout(shard, world.size) for shard in shards]
            gathered = self._gather(merged, layouts, [world.size] * world.size, aggregated=True)
        with self.clock.phase("decode"):
            pieces = map(method.decode, gathered, shards, scales)
            return torch.cat(list(pieces))

    def _rounds(
        self,
        number: int,
        method: MultiRoundCompressor,
        xs: Sequence[Tensor],
        states: Sequence[State],
        key: Key,
    ) -> Tensor:
        """Exchange by all-reduce in rounds; what was sent is the common reconstruction."""
        world, lane = self.world, self.lanes[number]
        before = self.joint[number]
        state = method.initial_state(lane.segments, key) if before is None else before
        state = state.to(world.device)
        means: list[Tensor] = []

        def contribute(i: int) -> Tensor:
            return method.contribute(xs[i], lane.segments, state, means)

        for _ in range(method.rounds):
            parts = self._workers("encode", contribute)
            with self.clock.phase("communicate"):
                means.append(world.all_reduce(parts, "sum").div_(world.size))
        with self.clock.phase("decode"):
            mean = method.reconstruct(means, lane.segments)
            later = key._replace(step=key.step + 1)
            self.joint[number] = method.next_state(means, lane.segments, later)
        if lane.memory.feedback:
            self._workers("encode", lambda i: lane.memory.keep(xs[i], mean, states[i]))
        return mean

    def _gather(
        self,
        payloads: Sequence[Payload],
        declared: Sequence[Layout | None],
        counts: Sequence[int],
        *,
        aggregated: bool = False,
    ) -> list[Payload]:
        """All-gather one payload a worker; `declared[r]` is rank r's layout, None if unknown."""
        world = self.world
        layouts = [layout for layout in declared if layout is not None]
        if len(layouts) < world.size:
            headers = [_header(payload, world.device) for payload in payloads]
            sizes = [headers[0].numel()] * world.size
            gathered = world.all_gather(headers, sizes, aggregated=aggregated)
            layouts = [_layout(payloads[0], header) for header in gathered]
        data = [payload.to_bytes() for payload in payloads]
        received = world.all_gather(data, [*map(_nbytes, layouts)], aggregated=aggregated)
        return [*map(Payload.from_bytes, received, layouts, counts)]

    def _scatter(
        self, sent: Sequence[Sequence[Payload]], declared: Sequence[Layout | None]
    ) -> list[list[Payload]]:
        """Hand shard r of each local worker to rank r; return each local owner's, by sender."""
        world = self.world
        layouts: list[list[Layout]] = []
        for rank in world.ranks:
            layout = declared[rank]
            if layout is not None:
                layouts.append([layout] * world.size)
        if len(layouts) < len(world.ranks):
            headers = [[_header(shard, world.device) for shard in row] for row in sent]
            width = [headers[0][0].numel()] * world.size
            gathered = world.all_to_all(headers, [width] * len(sent))
            layouts = [[_layout(sent[0][0], header) for header in row] for row in gathered]
        data = [[shard.to_bytes() for shard in row] for row in sent]
        sizes = [[*map(_nbytes, row)] for row in layouts]
        received = world.all_to_all(data, sizes)
        return [
            [*map(Payload.from_bytes, row, row_layouts)]
            for row, row_layouts in zip(received, layouts, strict=True)
        ]


def _nbytes(layout: Layout) -> int:
    return sum(dtype.itemsize * numel for dtype, numel in layout)


def _header(payload: Payload, device: torch.device) -> Tensor:
    """Return the sizes that travel ahead of a payload of undeclared layout, int64, one a part."""
    return torch.tensor([numel for _, numel in payload.layout], device=device)


def _layout(own: Payload, header: Tensor) -> Layout:
    """Return another worker's layout: this method's dtypes with the sizes that it sent."""
    sizes = header.tolist()
    return tuple((dtype, size) for (dtype, _), size in zip(own.layout, sizes, strict=True))
