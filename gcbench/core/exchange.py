"""The exchange: from every worker's gradient to the mean that all replicas apply.

A bucket is one flat gradient. Its tensors are laid out in lanes: the compressed ones first, then
those that a policy keeps dense. Each lane has its compressor and collective:

allreduce: payloads in a form that can be added, summed by the collective, decoded once.
allgather: every worker gets every payload and takes the mean of all.
twoshot: shards go to their owners (all-to-all), the owner merges its shard and all-gathers it: the
    sharded parameter server.

The memory of a lane (`gcbench.core.memory`) stands between gradient and encoder. What it is told of
the sent values is the decoding of the worker's own payload, computed here and nowhere else. An
owner that encodes the mean again keeps the error of that encoding.

An exchange keeps its buffers for the life of a run: after the first steps it allocates no large
one. The payloads of a worker are views of one send buffer, so nothing is concatenated before it is
sent, nor copied after it has been received.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from gcbench.core import faults, purposes, registry
from gcbench.core.clock import Clock
from gcbench.core.compressor import (
    COLLECTIVES,
    TILE,
    Compressor,
    Key,
    Layout,
    MultiRoundCompressor,
    Payload,
    Prepared,
    Segments,
    aligned,
    check_collectives,
    fill,
    layout_bytes,
    written,
)
from gcbench.core.errors import GcbenchError, PayloadError, UsageError
from gcbench.core.memory import Memory, NoMemory, Residual, State, for_method
from gcbench.core.world import World

T = TypeVar("T")


@dataclass(frozen=True)
class Lane:
    """A stretch of the bucket, `[start, start + segments.numel)`, and how it is exchanged."""

    compressor: Compressor
    collective: str
    start: int
    segments: Segments
    memory: Memory = field(default_factory=NoMemory)
    edges: tuple[int, ...] = ()
    """Where the owners' shards begin, and the lane's length; all of them between segments.

    Empty: the tiles of the lane are distributed evenly (`shard_bounds`).
    """

    def __post_init__(self) -> None:
        if not {*self.edges} <= {*self.segments.offsets}:
            raise ValueError(f"edges {self.edges}: expected where segments begin, and the end")

    def bounds(self, workers: int) -> Sequence[int]:
        """Return where the owners' shards of this lane begin, and its length."""
        return self.edges or shard_bounds(self.segments.numel, workers)

    @property
    def fused(self) -> bool:
        """Whether the method encodes and updates the residual in one operation."""
        plain = type(self.memory) is Residual and self.memory.decay == 1  # a subclass may differ
        return plain and self.compressor.fused_feedback


def exact_or(method: Compressor, memory: Memory, *, exact: bool) -> tuple[Compressor, Memory]:
    """Return the method and the memory by which tensors are exchanged.

    `exact`: in fp32, as tensors that stay dense and all tensors before `start_step`. The memory
    then takes its form for exact communication, as it does beside a method that loses nothing.
    """
    if exact:
        return registry.compressor("none"), memory.dense()
    return method, for_method(memory, method)


def lane_of(
    shapes: Sequence[Sequence[int]],
    start: int,
    method: Compressor,
    collective: str,
    memory: Memory,
    *,
    exact: bool,
) -> Lane:
    """Return how tensors of these shapes, one after the other from `start` on, are exchanged.

    `exact`: in fp32 by an all-reduce, see `exact_or`; otherwise by the method, the collective and
    the memory.
    """
    compressor, carried = exact_or(method, memory, exact=exact)
    way = "allreduce" if exact else collective
    return Lane(compressor, way, start, Segments.of(shapes, compressor.granularity), carried)


def check_legal(compressor: Compressor, collective: str | None = None) -> str:
    """Return the collective to use, by default the method's first.

    Raises:
        UsageError: the collective is unknown, or the method's mean would be wrong with it; the
            message names the legal ones.
    """
    legal = compressor.legal_collectives()
    check_collectives(f"{compressor!r}.legal_collectives", legal)
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
    """Return where the owners' shards of n elements begin, and n.

    Shards consist of whole tiles, and their numbers of tiles differ by at most 1.
    """
    tiles = -(-n // TILE)
    share, extra = divmod(tiles, workers)
    edges = [(share * k + min(k, extra)) * TILE for k in range(workers + 1)]
    return [min(edge, n) for edge in edges]


def dense_tensors(
    names: Sequence[str], shapes: Sequence[Sequence[int]], below: int, last: Sequence[str]
) -> list[bool]:
    """Return for each tensor whether it stays dense: below `below` elements, or named in `last`.

    Raises:
        UsageError: `last` has names, and none of them is that of a tensor.
    """
    if last and not {*last} & {*names}:
        raise UsageError(
            f"dense_last: the last layer is {', '.join(last)}, which is not trained. Leave "
            "dense_last out, or unfreeze the layer"
        )
    return [
        math.prod(shape) < below or name in last for name, shape in zip(names, shapes, strict=True)
    ]


def classifier(model: nn.Module) -> list[str]:
    """Return the parameter names of the last module that has parameters of its own.

    They are those of `model.named_parameters()`, where a weight that two layers share has the name
    that it has in the first of them.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    last: list[str] = []
    for module in model.modules():
        own = [names[id(parameter)] for parameter in module.parameters(recurse=False)]
        last = own or last
    return last


def checked_rate(lr: float) -> float:
    """Return a learning rate as a float; UsageError if it is negative or not finite."""
    try:
        rate = float(lr)
    except (TypeError, ValueError):
        rate = math.nan
    if not (math.isfinite(rate) and rate >= 0):
        raise UsageError(f"learning rate {lr!r}: a finite number, at least 0, is expected")
    return rate


class Piece(NamedTuple):
    """A stretch of a lane that is encoded as one: all of it, or an owner's shard."""

    segments: Segments
    shared: Tensor
    """What the workers agreed on, for these segments."""
    start: int
    """Index in the lane of the first element."""

    @property
    def place(self) -> slice:
        """Where it lies in the lane."""
        return slice(self.start, self.start + self.segments.numel)

    def shard(self, start: int, stop: int) -> Piece:
        """Return the part [start, stop) of a whole lane."""
        segments, which = self.segments.shard(start, stop)
        shared = self.shared[which.start : which.stop] if self.shared.numel() else self.shared
        return Piece(segments, shared, start)


class Buffers:
    """Buffers by name, allocated once and again when a larger one is asked for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kept: dict[Hashable, Tensor] = {}

    def bytes(self, name: Hashable, count: int) -> Tensor:
        """Return uint8, shape (count,), with the content that was last written to it."""
        kept = self._kept.get(name)
        if kept is None or kept.numel() < count:
            kept = self._kept[name] = torch.empty(count, dtype=torch.uint8, device=self.device)
        return kept[:count]

    def floats(self, name: Hashable, count: int) -> Tensor:
        """Return float32, shape (count,), with the content that was last written to it."""
        return self.bytes(name, 4 * count).view(torch.float32)

    def row(self, name: Hashable, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        """Return uint8 tensors of these sizes, one after the other in one buffer."""
        return torch.split(self.bytes(name, sum(sizes)), list(sizes))

    def fill(self, byte: int) -> None:
        """Overwrite all buffers with a byte; the check that no result is kept in one uses it."""
        for kept in self._kept.values():
            kept.fill_(byte)

    def clear(self) -> None:
        """Free all buffers."""
        self._kept.clear()


class Exchange:
    """Turns the local workers' buckets into the mean over all workers.

    What it carries from step to step is in `workers`, for each local worker one dict a lane, and in
    `joint`, for each lane what is the same on all workers: the state of a method in rounds
    ("state"), and the buffers that a memory keeps jointly.
    """

    def __init__(self, world: World, lanes: Sequence[Lane], seed: int, clock: Clock) -> None:
        self.world, self.seed, self.clock = world, seed, clock
        self.lanes: tuple[Lane, ...] = ()
        self.lr: float | None = None
        self.workers: list[list[State]] = [[] for _ in world.ranks]
        self.joint: list[State] = []
        self.buffers = Buffers(world.device)
        self.change(lanes)

    def change(self, lanes: Sequence[Lane]) -> None:
        """Replace the lanes' compressors and memories; the states of workers are kept.

        Raises:
            ValueError: a lane has another place in the bucket than before.
        """
        if self.lanes and [(a.start, a.segments.numel) for a in self.lanes] != [
            (b.start, b.segments.numel) for b in lanes
        ]:
            raise ValueError("lanes may change their compressor, not their place")
        if not self.lanes:
            self.joint = [{} for _ in lanes]
            self.workers = [[{} for _ in lanes] for _ in self.world.ranks]
        for i, lane in enumerate(lanes):
            like = torch.zeros(lane.segments.numel, device=self.world.device)
            fresh = {name: torch.zeros_like(like) for name in lane.memory.joint}
            self.joint[i] = fresh | self.joint[i]
            for states in self.workers:
                states[i] = lane.memory.state(like) | states[i]
        for i, (old, new) in enumerate(zip(self.lanes, lanes, strict=False)):
            if old.compressor != new.compressor:
                self.joint[i].pop("state", None)
        self.lanes = tuple(lanes)
        self.buffers.clear()

    def mean(self, buckets: Sequence[Tensor], step: int, lr: float = 1.0) -> Tensor:
        """Return the mean gradient, float32, shape (n,), the same bits on every replica.

        It is the exchange's own buffer and holds until the next call.

        `buckets`: one float32 tensor of shape (n,) for each local worker; `lr`: the learning rate
        that the mean will be applied with, which residuals follow.

        Raises:
            PayloadError: a payload is corrupt. On a GPU this is known only after all kernels have
                been launched, so the states may already hold values of the corrupt payload.
        """
        self.follow(lr)
        with faults.together():
            for number, lane in enumerate(self.lanes):
                place = slice(lane.start, lane.start + lane.segments.numel)
                self.lane_mean(number, [bucket[place] for bucket in buckets], step)
        return self._means()[0]

    def follow(self, lr: float) -> None:
        """Rescale the residuals to the learning rate that the next means will be applied with.

        A rate of 0 rescales nothing, and the next positive rate is compared with the last one.

        Raises:
            UsageError: the rate is negative or not finite.
        """
        lr = checked_rate(lr)
        if not lr:
            return
        if self.lr and lr != self.lr:
            for states in self.workers:
                for lane, state in zip(self.lanes, states, strict=True):
                    lane.memory.rescale(state, self.lr / lr)
                    if "owner" in state and lane.memory.residuals:
                        state["owner"].mul_(self.lr / lr)
        self.lr = lr

    def lane_mean(self, number: int, gradients: Sequence[Tensor], step: int) -> Tensor:
        """Return the mean of lane `number` alone, float32, shape (n of the lane,).

        For gradients that become ready lane by lane; call `follow` before. Lanes may be exchanged
        in any order, which must be the same on all workers; it does not change the means. The
        result is a buffer of the exchange, valid until the lane's next call.

        `gradients`: each local worker's of this lane alone, float32, shape (n of the lane,).
        """
        out = self._means()[1][number]
        with faults.together():
            self._lane(number, gradients, step, out)
        return out

    def lane_shards(self, number: int, gradients: Sequence[Tensor], step: int) -> list[Tensor]:
        """Return for each local worker the mean of the shard that it owns, float32, 1-D.

        The first half of a two-shot exchange, for workers that need only their shard (FSDP): the
        mean is not encoded again, so there is no second error, and no owner has a residual. The
        lane's memory must not change the mean (`Memory.joint` is empty).

        `gradients`: each local worker's gradient of this lane, float32, shape (n of the lane,).
        Call `follow` before. A shard is valid until the next call for the lane.
        """
        lane, ranks = self.lanes[number], self.world.ranks
        with faults.together():
            xs = self._offered(number, gradients)
            key = Key(self.seed, step, 0, lane.start, purposes.ENCODE)
            shared, kept = self._agree(lane, xs, key)
            shards, received = self._to_owners(
                number, Piece(lane.segments, shared, 0), xs, kept, key
            )
            return self._workers(
                "decode", lambda i: self._owned(number, i, received[i], shards[ranks[i]])
            )

    def _offered(self, number: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return what the local workers' memories offer for their gradients of one lane."""
        lane, states = self.lanes[number], [worker[number] for worker in self.workers]
        if isinstance(lane.memory, NoMemory) or lane.fused:
            return list(gradients)
        offer, size = lane.memory.offer, self.world.size
        return self._workers("encode", lambda i: offer(gradients[i], states[i], size))

    def _means(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the buffer for the means of all lanes, and each lane's part of it."""
        sizes = [lane.segments.numel for lane in self.lanes]
        mean = self.buffers.floats("mean", sum(sizes))
        return mean, torch.split(mean, sizes)

    def _workers(self, phase: str, call: Callable[[int], T]) -> list[T]:
        """Run `call(i)` for each local worker i; the clock adds its time to `phase`."""
        first = self.world.ranks[0]
        timed = self.clock.timed(lambda rank: call(rank - first))
        return self.clock.workers(phase, self.world.map(timed))

    def _lane(self, number: int, gradients: Sequence[Tensor], step: int, out: Tensor) -> None:
        """Write the mean of one lane to `out`."""
        lane, xs = self.lanes[number], self._offered(number, gradients)
        states = [worker[number] for worker in self.workers]
        key = Key(self.seed, step, 0, lane.start, purposes.ENCODE)
        if isinstance(lane.compressor, MultiRoundCompressor):
            self._rounds(number, lane.compressor, xs, states, key, out)
        else:
            shared, kept = self._agree(lane, xs, key)
            whole = Piece(lane.segments, shared, 0)
            match lane.collective:
                case "allreduce":
                    sent = self._encode(number, xs, states, [whole], kept, key, settle=False)
                    self._allreduce(number, whole, [own[0] for own in sent], out)
                case "allgather":
                    sent = self._encode(number, xs, states, [whole], kept, key)
                    self._allgather(number, whole, [own[0] for own in sent], out)
                case "twoshot":
                    self._twoshot(number, whole, xs, states, kept, key, out)
                case other:
                    raise ValueError(f"collective {other!r}: {', '.join(COLLECTIVES)} allowed")
        with self.clock.phase("decode"):
            written(lane.memory.apply(out, self.joint[number]), out)

    def _agree(self, lane: Lane, xs: Sequence[Tensor], key: Key) -> tuple[Tensor, list[Any]]:
        """Return `shared`, and what each local worker's `prepare` keeps for its encoder.

        `shared` is drawn from the shared seed, or the maximum of the workers' statistics, or empty.
        """
        with self.clock.phase("statistic"):
            drawn = lane.compressor.draw_shared(lane.segments, key)
        if drawn is not None:
            return drawn.to(self.world.device), [None] * len(xs)
        prepare = lane.compressor.prepare
        own: list[Prepared] = self._workers("statistic", lambda i: prepare(xs[i], lane.segments))
        kept = [each.kept for each in own]
        if not own[0].statistic.numel():
            return own[0].statistic, kept
        with self.clock.phase("communicate"):
            return self.world.all_reduce([each.statistic for each in own], "max"), kept

    # -- one worker's payloads ---------------------------------------------------------------------

    def _encode(
        self,
        number: int,
        xs: Sequence[Tensor],
        states: Sequence[State],
        pieces: Sequence[Piece],
        kept: Sequence[Any],
        key: Key,
        *,
        settle: bool = True,
    ) -> list[list[Payload]]:
        """Return each local worker's payloads of these pieces, drawn from its rank's numbers.

        `settle`: their bytes lie one after the other in the worker's send buffer.
        """
        ranks, lane = self.world.ranks, self.lanes[number]

        def encode(i: int) -> list[Payload]:
            place, name = key._replace(rank=ranks[i]), (number, "sent", i)
            if lane.fused:
                residual = states[i]["residual"]
                return self._payloads(lane, name, xs[i], pieces, place, residual=residual)
            # `offer` may return a buffer that `keep` changes: the payload must not be a view of it.
            apart = settle or lane.memory.feedback
            sent = self._payloads(lane, name, xs[i], pieces, place, kept=kept[i], settle=apart)
            if lane.memory.feedback:
                lane.memory.keep(xs[i], self._decoded(lane, sent, pieces), states[i])
            return sent

        return self._workers("encode", encode)

    def _payloads(
        self,
        lane: Lane,
        name: Hashable,
        x: Tensor,
        pieces: Sequence[Piece],
        key: Key,
        *,
        kept: Any = None,
        residual: Tensor | None = None,
        settle: bool = True,
    ) -> list[Payload]:
        """Return the payloads of the pieces of x, or of x + residual if there is a residual.

        `residual` is then replaced by the error of the payloads. `settle`: the bytes of the
        payloads are moved to the buffer of this name, one after the other.

        Raises:
            GcbenchError: `encode` returned something else than a payload.
            PayloadError: a payload does not have the layout that the method declares.
        """
        method = lane.compressor
        layouts = [method.layout(piece.segments) for piece in pieces]
        slots = self._slots(name, layouts)
        payloads = []
        for piece, layout, slot in zip(pieces, layouts, slots, strict=True):
            arguments = piece.segments, piece.shared, key._replace(offset=key.offset + piece.start)
            part = x[piece.place]
            if slot is not None and not slot.nbytes:
                payload = slot  # empty, as most shards are if there are more workers than tiles
            elif residual is None:
                payload = method.encode(part, *arguments, prepared=kept, out=slot)
            else:
                payload = method.encode_feedback(part, residual[piece.place], *arguments, out=slot)
            if not isinstance(payload, Payload):
                raise GcbenchError(
                    f"{method!r}: encode returned a {type(payload).__name__}; a Payload of 1-D "
                    "tensors is expected: gcbench.Payload((part, ...))"
                )
            if layout is not None and payload.layout != layout:
                raise PayloadError(
                    f"{method!r}: encode returned a payload of {payload.layout} for "
                    f"{piece.segments.numel} elements; its layout declares {layout}"
                )
            payloads.append(payload)
        return self._settled(name, payloads, slots) if settle else payloads

    def _slots(self, name: Hashable, layouts: Sequence[Layout | None]) -> list[Payload | None]:
        """Return where payloads of these layouts belong in a buffer, one after the other.

        None for all of them if one has no declared layout, as the places then depend on the data;
        None for one whose parts would not be aligned.
        """
        known = [layout for layout in layouts if layout is not None]
        if len(known) < len(layouts):
            return [None] * len(layouts)
        places = self.buffers.row(name, [*map(layout_bytes, known)])
        return [
            Payload.over(place, layout) if aligned(place, layout) else None
            for place, layout in zip(places, known, strict=True)
        ]

    def _settled(
        self, name: Hashable, payloads: Sequence[Payload], slots: Sequence[Payload | None]
    ) -> list[Payload]:
        """Return the payloads with their bytes in the buffer of this name."""
        places = self.buffers.row(name, [payload.nbytes for payload in payloads])
        settled = []
        for payload, slot, place in zip(payloads, slots, places, strict=True):
            if slot is None:
                payload.write(place)
                settled.append(payload)
            else:
                settled.append(fill(slot, *payload.parts, count=payload.count))
        return settled

    def _decoded(self, lane: Lane, payloads: Sequence[Payload], pieces: Sequence[Piece]) -> Tensor:
        """Return the decoding of a worker's payloads, in a buffer of this thread.

        The buffer is overwritten by the thread's next call.
        """
        sizes = [piece.segments.numel for piece in pieces]
        decoded = self.buffers.floats(("decoded", threading.get_ident()), sum(sizes))
        for out, payload, piece in zip(torch.split(decoded, sizes), payloads, pieces, strict=True):
            arrived = lane.compressor.decode(payload, piece.segments, piece.shared, out=out)
            written(_checked_decoding(lane.compressor, "decode", arrived, out), out)
        return decoded

    # -- collectives -------------------------------------------------------------------------------

    def _allreduce(
        self, number: int, whole: Piece, payloads: Sequence[Payload], out: Tensor
    ) -> None:
        world, method = self.world, self.lanes[number].compressor

        def widen(i: int) -> Payload:
            return method.summand(payloads[i], world.size, whole.segments)

        summands = self._workers("encode", widen)
        with self.clock.phase("communicate"):
            layout = summands[0].layout
            total = Payload.over(self.buffers.bytes((number, "sum"), layout_bytes(layout)), layout)
            columns = zip(*(summand.parts for summand in summands), strict=True)
            for place, column in zip(total.parts, columns, strict=True):
                world.all_reduce(column, "sum", out=place)
        with self.clock.phase("decode"):
            total = total._replace(count=world.size)
            mean = method.decode_sum(total, whole.segments, whole.shared, out=out)
            written(_checked_decoding(method, "decode_sum", mean, out), out)

    def _allgather(
        self, number: int, whole: Piece, payloads: Sequence[Payload], out: Tensor
    ) -> None:
        world, method = self.world, self.lanes[number].compressor
        with self.clock.phase("communicate"):
            layouts = [method.layout(whole.segments)] * world.size
            gathered = self._gather(number, "sent", payloads, layouts, [1] * world.size)
        with self.clock.phase("decode"):
            mean = method.mean(gathered, whole.segments, whole.shared, out=out)
            written(_checked_decoding(method, "mean", mean, out), out)

    def _twoshot(
        self,
        number: int,
        whole: Piece,
        xs: Sequence[Tensor],
        states: Sequence[State],
        kept: Sequence[Any],
        key: Key,
        out: Tensor,
    ) -> None:
        world, method = self.world, self.lanes[number].compressor
        shards, received = self._to_owners(number, whole, xs, kept, key)

        def merge(i: int) -> Payload:
            rank = world.ranks[i]
            there = Key(key.seed, key.step, rank, key.offset + shards[rank].start, purposes.MERGE)
            return self._merge(number, i, received[i], shards[rank], states[i], there)

        merged = self._workers("decode", merge)
        with self.clock.phase("communicate"):
            layouts = [method.layout(shard.segments, world.size) for shard in shards]
            counts = [world.size] * world.size
            gathered = self._gather(number, "merged", merged, layouts, counts, aggregated=True)
        with self.clock.phase("decode"):
            for payload, shard in zip(gathered, shards, strict=True):
                place = out[shard.place]
                mean = method.decode(payload, shard.segments, shard.shared, out=place)
                written(_checked_decoding(method, "decode", mean, place), place)

    def _to_owners(
        self, number: int, whole: Piece, xs: Sequence[Tensor], kept: Sequence[Any], key: Key
    ) -> tuple[list[Piece], list[list[Payload]]]:
        """Hand each shard to its owner; return the shards, and what each local owner got."""
        lane, states = self.lanes[number], [worker[number] for worker in self.workers]
        method, bounds = lane.compressor, lane.bounds(self.world.size)
        shards = [whole.shard(*edges) for edges in pairwise(bounds)]
        if method.cuttable and not lane.edges:  # `cut` needs edges between tiles
            encoded = self._encode(number, xs, states, [whole], kept, key)
            sent = [method.cut(payload, bounds) for (payload,) in encoded]
        else:
            sent = self._encode(number, xs, states, shards, [None] * len(xs), key)
        with self.clock.phase("communicate"):
            layouts = [method.layout(shard.segments) for shard in shards]
            return shards, self._scatter(number, sent, layouts)

    def _owned(self, number: int, i: int, payloads: Sequence[Payload], shard: Piece) -> Tensor:
        """Return the mean of local worker i's shard, float32, in the exchange's own buffer."""
        method = self.lanes[number].compressor
        out = self.buffers.floats((number, "owned", i), shard.segments.numel)
        mean = method.mean(payloads, shard.segments, shard.shared, out=out)
        return written(_checked_decoding(method, "mean", mean, out), out)

    def _merge(
        self,
        number: int,
        i: int,
        payloads: Sequence[Payload],
        shard: Piece,
        state: State,
        key: Key,
    ) -> Payload:
        """Return local worker i's merged shard, its bytes in the worker's second send buffer."""
        world, lane, name = self.world, self.lanes[number], (number, "merged", i)
        method, segments, shared = lane.compressor, shard.segments, shard.shared
        if not method.requantizes:
            slots = self._slots(name, [method.layout(segments, world.size)])
            merged = method.merge(payloads, segments, shared, key, out=slots[0])
            return self._settled(name, [merged], slots)[0]
        mean = self._owned(number, i, payloads, shard)
        alone = Piece(segments, shared, 0)
        if not lane.memory.owner:
            sent = self._payloads(lane, name, mean, [alone], key)
            return sent[0]._replace(count=world.size)
        if "owner" not in state:
            state["owner"] = torch.zeros_like(mean)
        left = state["owner"]  # the owner's residual
        if lane.memory.owner_decay != 1:
            left *= lane.memory.owner_decay
        if method.fused_feedback:
            sent = self._payloads(lane, name, mean, [alone], key, residual=left)
        else:
            left += mean
            sent = self._payloads(lane, name, left, [alone], key)
            left -= self._decoded(lane, sent, [alone])
        return sent[0]._replace(count=world.size)

    def _rounds(
        self,
        number: int,
        method: MultiRoundCompressor,
        xs: Sequence[Tensor],
        states: Sequence[State],
        key: Key,
        out: Tensor,
    ) -> None:
        """Exchange by all-reduce in rounds; memories are told that the approximation was sent."""
        world, lane, joint = self.world, self.lanes[number], self.joint[number]
        if "state" not in joint:
            joint["state"] = method.initial_state(lane.segments, key).to(world.device)
        layout, later = method.layout(lane.segments), key._replace(step=key.step + 1)
        if not layout:
            raise UsageError(f"{method.name}: a method in rounds declares a layout: a part a round")
        rounds = [method.in_rounds(x, lane.segments, joint["state"], later, out) for x in xs]

        def summand(i: int, turn: int) -> Tensor:
            try:
                return rounds[i].send(means[-1]) if turn else next(rounds[i])
            except StopIteration:
                said = f"{method.name}: fewer rounds than the {len(layout)} of its layout"
                raise UsageError(said) from None

        def received(turn: int) -> Tensor:
            """Return the mean over all workers of the summands of round `turn`."""
            summands = self._workers("encode", lambda i: summand(i, turn))
            with self.clock.phase("communicate"):
                room = self.buffers.floats((number, "round", turn), summands[0].numel())
                return world.all_reduce(summands, "sum", out=room).div_(world.size)

        means: list[Tensor] = []
        for turn in range(len(layout)):
            means.append(received(turn))  # noqa: PERF401 - `received` looks at those before
        with self.clock.phase("decode"):
            try:
                rounds[0].send(means[-1])
                raise UsageError(f"{method.name}: more rounds than the {len(layout)} of its layout")
            except StopIteration as end:
                state = joint["state"]
                same = end.value.shape == state.shape
                joint["state"] = state.copy_(end.value) if same else end.value.clone()
        for other in rounds[1:]:
            other.close()
        if lane.memory.feedback:
            self._workers("encode", lambda i: lane.memory.keep(xs[i], out, states[i]))

    # -- bytes -------------------------------------------------------------------------------------

    def _gather(
        self,
        number: int,
        what: str,
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
        sizes = [*map(layout_bytes, layouts)]
        own = [
            self.buffers.bytes((number, what, i), payload.nbytes)
            for i, payload in enumerate(payloads)
        ]
        room = self._room((number, what, "gathered"), sum(sizes))
        received = world.all_gather(own, sizes, aggregated=aggregated, out=room)
        return [*map(Payload.over, received, layouts, counts)]

    def _room(self, name: Hashable, size: int) -> Tensor | None:
        """Return the receive buffer of a collective between processes; None in a simulation."""
        return self.buffers.bytes(name, size) if len(self.world.ranks) < self.world.size else None

    def _scatter(
        self,
        number: int,
        sent: Sequence[Sequence[Payload]],
        declared: Sequence[Layout | None],
    ) -> list[list[Payload]]:
        """Hand shard r of each local worker to rank r; return each local owner's, by sender."""
        world = self.world
        layouts: list[list[Layout]] = []
        for rank in world.ranks:
            layout = declared[rank]
            if layout is not None:
                layouts.append([layout] * world.size)
        if len(layouts) < len(world.ranks):
            headers = [torch.cat([_header(shard, world.device) for shard in row]) for row in sent]
            width = [headers[0].numel() // world.size] * world.size
            gathered = world.all_to_all(headers, [width] * len(sent), [width] * len(sent))
            layouts = [[_layout(sent[0][0], header) for header in row] for row in gathered]
        splits = [[shard.nbytes for shard in row] for row in sent]
        own = [
            self.buffers.bytes((number, "sent", i), sum(split)) for i, split in enumerate(splits)
        ]
        sizes = [[*map(layout_bytes, row)] for row in layouts]
        room = self._room((number, "received"), sum(sizes[0]))
        received = world.all_to_all(own, splits, sizes, out=room)
        return [
            [*map(Payload.over, row, row_layouts)]
            for row, row_layouts in zip(received, layouts, strict=True)
        ]


def _checked_decoding(method: Compressor, what: str, result: Any, out: Tensor) -> Tensor:
    """Return what a method decoded; GcbenchError if it is no float32 tensor of the shape of `out`.

    A copy to `out` would convert another dtype and repeat a shorter tensor.
    """
    if not isinstance(result, Tensor):
        found = type(result).__name__
    elif result.dtype != torch.float32 or result.shape != out.shape:
        found = f"{result.dtype}, shape {tuple(result.shape)}"
    else:
        return result
    raise GcbenchError(
        f"{method!r}: {what} returned {found}; float32, shape {tuple(out.shape)}, is expected"
    )


def _header(payload: Payload, device: torch.device) -> Tensor:
    """Return the header of a payload without declared layout: the size of each part, int64."""
    return torch.tensor([numel for _, numel in payload.layout], device=device)


def _layout(own: Payload, header: Tensor) -> Layout:
    """Return another worker's layout: the dtypes of our own, with the sizes in its header."""
    sizes = header.tolist()
    return tuple((dtype, size) for (dtype, _), size in zip(own.layout, sizes, strict=True))
