"""The exchange: from every worker's gradient to the mean that all replicas apply.

A bucket is one flat gradient. It consists of lanes: the compressed tensors first, then those that
a policy keeps dense. Each lane has a compressor and a collective:

allreduce: the collective sums payloads in an addable form; the sum is decoded once.
allgather: every worker receives all payloads and computes their mean.
twoshot: shards go to their owners (all-to-all); each owner merges its shard and all-gathers the
    result: a sharded parameter server.
ring: a shard travels from worker to worker; each decodes the partial sum, adds its own gradient and
    encodes again. The last one, the owner, all-gathers the sum. All workers, the owner included,
    decode that payload, so their bits are equal. With an unbiased code of relative error D and
    independent gradients of equal norm, the sum has the relative error D (N + 1) / 2; two-shot has
    2 D. Each worker encodes each shard once: its payloads together have the size of one payload.
sparse: the k entries that a worker selected go to the owners of their regions, which add them. Of
    all sums the k largest remain, exactly; they are divided equally among the owners, and
    all-gathered. Regions are cut at every step where the workers' entries, on average, are divided
    equally. An entry contributes to the mean if its worker sent it and its sum remained. A worker
    sends about 4 k words of 32 bits and at most 6 k, whatever the number of workers N is, and with
    them 8 KiB of histograms and 40 N bytes of cuts and sizes (Ok-Topk: Li and Hoefler, PPoPP 2022).

The memory of a lane (`gcbench.core.memory`) transforms the gradient before it is encoded. It
receives the decoded form of the payload that was actually sent, which only this module computes; in
a ring, the decoded partial sum that it sent less the one that it received; in a sparse all-reduce,
the entries that contribute to the mean. With a memory that has residuals, an owner that encodes the
mean again keeps that error, too.

Buffers live as long as the exchange: after the first steps it allocates no large tensor. A worker's
payloads are views of one send buffer, so they are neither concatenated before sending nor copied
after receiving.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from gcbench.core import codec, faults, purposes, registry, sealed, sparse
from gcbench.core.clock import Clock
from gcbench.core.compressor import (
    COLLECTIVES,
    Compressor,
    MultiRoundCompressor,
    check_collectives,
    cuttable,
    fuses_feedback,
    overrides,
    requantizes,
)
from gcbench.core.errors import UsageError
from gcbench.core.memory import Memory, for_method, of
from gcbench.core.payload import (
    TILE,
    Context,
    Key,
    Layout,
    Payload,
    Segments,
    State,
    aligned,
    check_finite,
    layout_bytes,
)
from gcbench.core.rule import UpdateRule
from gcbench.core.sparse import Entries
from gcbench.core.world import Traffic, World

T = TypeVar("T")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Lane:
    """The range `[start, start + segments.numel)` of the bucket, and how it is exchanged."""

    compressor: Compressor
    collective: str
    start: int
    segments: Segments
    memory: Memory = field(default_factory=Memory)
    edges: tuple[int, ...] = ()
    """Start of each owner's shard, then the lane's length; all at segment boundaries.

    Empty: the tiles of the lane are distributed evenly (`shard_bounds`).
    """
    rule: UpdateRule = field(default_factory=UpdateRule)
    trim: int = 0
    """Values of each element that the mean leaves out at both ends (`codec.trimmed_mean`)."""

    def __post_init__(self) -> None:
        if not {*self.edges} <= {*self.segments.offsets}:
            raise ValueError(f"edges {self.edges}: expected segment boundaries")
        for names, reserved in ((self.memory.buffers, "owner"), (self.joint, "state")):
            users = [*names, reserved]
            if twice := [name for name in names if users.count(name) > 1]:
                raise UsageError(
                    f"the buffer {twice[0]!r} would have two users: a memory's joint buffers and "
                    "those of an update rule need different names, and the exchange itself uses "
                    f"`owner` and `state`. Rename it in {self.memory!r} or {self.rule!r}"
                )

    def bounds(self, workers: int) -> Sequence[int]:
        """Return the start of each owner's shard, then the lane's length."""
        return self.edges or shard_bounds(self.segments.numel, workers)

    @property
    def joint(self) -> tuple[str, ...]:
        """Names of the memory's and update rule's buffers that are equal on all workers."""
        return (*self.memory.joint, *self.rule.buffers)

    @property
    def fused(self) -> bool:
        """Whether the method encodes and updates the residual in one operation."""
        alone = self.collective != "sparse"  # there, the other workers decide what was sent
        # a statistic would be that of the gradient without the residual
        alone = alone and type(self.compressor).prepare is Compressor.prepare
        return alone and self.memory.fusible and fuses_feedback(self.compressor)


def exact_or(method: Compressor, memory: Memory, *, exact: bool) -> tuple[Compressor, Memory]:
    """Return the method and the memory to exchange tensors with.

    `exact`: exchange in fp32 (tensors that stay dense, and all tensors before `start_step`), with
    the memory's form for exact communication.
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
    trim: int = 0,
) -> Lane:
    """Return the lane of tensors of these shapes, laid out consecutively from `start`.

    `exact`: exchange them in fp32 by an all-reduce (by an all-gather if `trim` is not 0), see
    `exact_or`, not by method and collective.
    """
    compressor, carried = exact_or(method, memory, exact=exact)
    way, rule = collective, method.rule
    if exact:
        way, rule = "allgather" if trim else "allreduce", method.rule.dense()
    segments = Segments.of(shapes, compressor.granularity)
    return Lane(compressor, way, start, segments, carried, rule=rule, trim=trim)


def check_trim(
    trim: int, method: Compressor, collective: str, memory: Memory, workers: int
) -> None:
    """Check that a trimmed mean is defined for this exchange.

    Raises:
        UsageError: a value is out of range, or payloads are added before one can be left out.
    """
    if not trim:
        return
    if 2 * trim >= workers:
        raise UsageError(
            f"trim={trim} leaves no values of {workers} workers: expected at most "
            f"{(workers - 1) // 2}"
        )
    if method.claims.aggregate != "mean" or not method.rule.plain or memory.joint:
        raise UsageError(
            f"trim={trim}: {method!r} with this memory applies something other than a mean of "
            "payloads. Leave trim out, or use another method"
        )
    if collective != "allgather" and not (collective == "twoshot" and requantizes(method)):
        raise UsageError(
            f"trim={trim}: {method!r} by {collective} adds payloads before any can be left out. "
            "Use --collective allgather"
        )


def check_legal(compressor: Compressor, collective: str | None = None) -> str:
    """Return the collective to use, by default the method's first.

    Raises:
        UsageError: the collective is unknown, or would compute a wrong mean for this method.
    """
    legal = compressor.legal_collectives()
    check_collectives(f"{compressor!r}.legal_collectives", legal)
    if collective is None:
        return legal[0]
    if collective not in COLLECTIVES:
        raise UsageError(f"collective {collective!r}: allowed are {', '.join(COLLECTIVES)}")
    if collective not in legal:
        why = {
            "ring": _why_no_ring(compressor),
            "sparse": "it does not send selected elements as 32-bit positions and fp32 values",
        }.get(collective, "its mean would be wrong")
        raise UsageError(
            f"{compressor!r} does not support collective {collective}: {why}. "
            f"Legal: {', '.join(legal)}"
        )
    return collective


def _why_no_ring(method: Compressor) -> str:
    if why := no_partial_sums(method):
        return why
    if not requantizes(method):
        return "it has its own merge of payloads; a ring would encode partial sums again"
    return "it does not declare that partial sums can be encoded again"


def no_partial_sums(method: Compressor) -> str:
    """Return why partial sums of a method's payloads cannot be encoded at each hop; "" if they may.

    `gcbench verify` refuses methods that declare a ring nevertheless.
    """
    if method.claims.aggregate != "mean" or not method.rule.plain:
        return "it does not apply a mean, so it has no partial sums"
    if isinstance(method, MultiRoundCompressor):
        return "it exchanges in rounds of all-reduce"
    if of(method).feedback:
        return "its error feedback is for gradients, and each hop would drop most of a partial sum"
    if method.claims.correlated:
        return "with correlated noise, the rounding of a partial sum would be biased"
    if overrides(method, "prepare"):
        return "its workers agree on a statistic of their gradients, which partial sums may exceed"
    return ""


def shard_bounds(n: int, workers: int) -> list[int]:
    """Return the start of each owner's shard of n elements, then n.

    Shards consist of whole tiles; their numbers of tiles differ by at most 1.
    """
    tiles = -(-n // TILE)
    share, extra = divmod(tiles, workers)
    edges = [(share * k + min(k, extra)) * TILE for k in range(workers + 1)]
    return [min(edge, n) for edge in edges]


def dense_tensors(
    names: Sequence[str], shapes: Sequence[Sequence[int]], below: int, last: Sequence[str]
) -> list[bool]:
    """Return whether each tensor stays dense: it has fewer than `below` elements or is in `last`.

    Raises:
        UsageError: `last` is not empty and names no tensor.
    """
    if last and not {*last} & {*names}:
        raise UsageError(
            f"dense_last: the last layer, {', '.join(last)}, is not trained. Remove dense_last, or "
            "unfreeze the layer"
        )
    return [
        math.prod(shape) < below or name in last for name, shape in zip(names, shapes, strict=True)
    ]


def classifier(model: nn.Module) -> list[str]:
    """Return the parameter names of the last module that has direct parameters.

    Names are those of `model.named_parameters()`: a shared weight has its name in the first layer.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    last: list[str] = []
    for module in model.modules():
        directs = [names[id(parameter)] for parameter in module.parameters(recurse=False)]
        last = directs or last
    return last


def checked_rate(lr: float) -> float:
    """Return a learning rate as a float; UsageError if it is negative or not finite."""
    try:
        rate = float(lr)
    except (TypeError, ValueError):
        rate = math.nan
    if not (math.isfinite(rate) and rate >= 0):
        raise UsageError(f"learning rate {lr!r}: expected a finite number, at least 0")
    return rate


class MixedContext(Context):
    """The context of a lane whose tensors follow different learning rates; it has no `lr`."""

    @property
    def lr(self) -> float:
        """Refuse to return one of the rates.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "the method, its memory or its update rule reads ctx.lr, and the tensors that are "
            "exchanged together have different learning rates. Give all parameter groups of the "
            "optimizer the same rate, or use a method that does not read ctx.lr"
        )


class Piece(NamedTuple):
    """A part of a lane that is encoded as one unit: the whole lane, or an owner's shard."""

    ctx: Context
    """The context common to all workers; its key is that of rank 0 and of the first element."""
    start: int = 0
    """Index in the lane of the first element."""

    @property
    def segments(self) -> Segments:
        """The segments of this part."""
        return self.ctx.segments

    @property
    def place(self) -> slice:
        """Its range in the lane."""
        return slice(self.start, self.start + self.segments.numel)

    def shard(self, start: int, stop: int) -> Piece:
        """Return the part [start, stop) of a whole lane."""
        segments, which = self.segments.shard(start, stop)
        shared, key = self.ctx.shared, self.ctx.key
        shared = shared[which.start : which.stop] if shared.numel() else shared
        key = key._replace(offset=key.offset + start)
        return Piece(self.ctx._replace(segments=segments, shared=shared, key=key), start)

    def of(self, rank: int, stream: int = purposes.ENCODE) -> Context:
        """Return the context of one worker; `stream` is the purpose of its random numbers."""
        return self.ctx._replace(key=self.ctx.key._replace(rank=rank, stream=stream))


class Buffers:
    """Buffers by name, reallocated only when a larger one is requested."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[Hashable, Tensor] = {}

    def bytes(self, name: Hashable, count: int) -> Tensor:
        """Return a uint8 buffer of shape (count,), with its previous content."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < count:
            buffer = self._buffers[name] = torch.empty(count, dtype=torch.uint8, device=self.device)
        return buffer[:count]

    def floats(self, name: Hashable, count: int) -> Tensor:
        """Return a float32 buffer of shape (count,), with its previous content."""
        return self.bytes(name, 4 * count).view(torch.float32)

    def row(self, name: Hashable, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        """Return consecutive uint8 views of these sizes of one buffer."""
        return torch.split(self.bytes(name, sum(sizes)), list(sizes))

    def fill(self, byte: int) -> None:
        """Overwrite all buffers with a byte, to check that no result relies on their content."""
        for buffer in self._buffers.values():
            buffer.fill_(byte)

    def clear(self) -> None:
        """Free all buffers."""
        self._buffers.clear()


class Exchange:
    """Computes the mean over all workers from the local workers' buckets.

    State carried from step to step is in `workers` (per local worker, one dict per lane) and in
    `joint` (per lane, equal on all workers): the state of a method in rounds ("state"), and the
    joint buffers of memory and update rule.
    """

    def __init__(
        self,
        world: World,
        lanes: Sequence[Lane],
        seed: int,
        clock: Clock,
        *,
        owns_shards: bool = True,
    ) -> None:
        """`owns_shards`: whether owners may keep residuals; False if `lane_shards` is used."""
        self.world, self.seed, self.clock = world, seed, clock
        self.lanes = tuple(lanes)
        self.parts: list[Sequence[slice]] = [[slice(0, lane.segments.numel)] for lane in lanes]
        """Per lane, the ranges whose residuals may follow different learning rates."""
        self.rates: list[list[float | None]] = [[None] for _ in lanes]
        """The last positive learning rate of each part; None before the first."""
        self.owns_shards = owns_shards
        self.owned = [False] * len(lanes)
        """Per lane, whether owners keep a residual at this or an earlier stage."""
        self.in_rounds: list[MultiRoundCompressor | None] = [None] * len(lanes)
        """Per lane, its most recent method in rounds."""
        self.agreement = Traffic()
        """Traffic of `agree`, a part of the only local worker's traffic."""
        self.resting: list[list[slice]] = [[] for _ in lanes]
        """Per lane, the parts whose next mean will be applied at the rate 0."""
        self.skipped = 0
        """Steps without an exchange because a gradient was not finite; the caller counts them."""
        self.workers: list[list[State]] = [[{} for _ in lanes] for _ in world.ranks]
        self.joint: list[State] = [{} for _ in lanes]
        self.buffers = Buffers(world.device)
        self.change(lanes)

    def change(self, lanes: Sequence[Lane]) -> None:
        """Replace the lanes' compressors and memories; workers keep their states.

        Raises:
            ValueError: a lane's range in the bucket changed.
        """
        places = [(lane.start, lane.segments.numel) for lane in lanes]
        if places != [(lane.start, lane.segments.numel) for lane in self.lanes]:
            raise ValueError("lanes may change their compressor, but not their range")
        for i, lane in enumerate(lanes):
            two = lane.collective == "twoshot" and requantizes(lane.compressor)
            self.owned[i] |= self.owns_shards and two and lane.memory.owner
            if isinstance(lane.compressor, MultiRoundCompressor):
                self.in_rounds[i] = lane.compressor
            numel, device = lane.segments.numel, self.world.device
            like = torch.zeros(numel, dtype=torch.float32, device=device)
            fresh = {name: torch.zeros_like(like) for name in lane.joint}
            self.joint[i] = fresh | self.joint[i]
            for states in self.workers:
                states[i] = lane.memory.state(like) | states[i]
        for i, (old, new) in enumerate(zip(self.lanes, lanes, strict=True)):
            if old.compressor != new.compressor:
                self.joint[i].pop("state", None)
        self.lanes = tuple(lanes)
        self.buffers.clear()

    def mean(
        self,
        buckets: Sequence[Tensor],
        step: int,
        lr: float = 1.0,
        which: Sequence[int] | None = None,
    ) -> Tensor:
        """Return the mean gradient, float32, shape (n,), with equal bits on every replica.

        If the method has an update rule, it is the direction that the rule computes from the mean.
        The result is a buffer of the exchange, valid until the next call.

        `buckets`: one float32 tensor of shape (n,) per local worker. `lr`: the learning rate that
        the mean will be applied with; residuals are rescaled to it. `which`: the lanes to exchange;
        None: all. The result has the mean of these lanes only.

        Raises:
            PayloadError: a payload is corrupt. A GPU reports this after all kernels were launched,
                so states may already contain values of the corrupt payload.
        """
        self.follow(lr)
        with faults.together():
            for number in range(len(self.lanes)) if which is None else which:
                lane = self.lanes[number]
                place = slice(lane.start, lane.start + lane.segments.numel)
                self.lane_mean(number, [bucket[place] for bucket in buckets], step)
        return self._means()[0]

    @property
    def lr(self) -> float | None:
        """The last positive learning rate of the residuals; None if it differs between parts."""
        rates = {rate for lane in self.rates for rate in lane}
        return rates.pop() if len(rates) == 1 else None

    def divide(self, parts: Sequence[Sequence[slice]]) -> None:
        """Give consecutive parts of each lane separate learning rates."""
        self.parts = list(parts)
        self.rates = [[None] * len(lane) for lane in parts]

    def follow(self, lr: float | Sequence[Sequence[float | None]]) -> None:
        """Rescale the residuals to the learning rate that the next means will be applied with.

        The factor is the last positive rate over the next positive rate, so the first rate changes
        nothing. At a rate of 0 residuals are not sent, since the step would not apply them; the
        error of this mean, which a momentum may apply later, is added to them. `lr`: one rate, or
        one per part of each lane, where None leaves the part unchanged.

        Raises:
            UsageError: a rate is negative or not finite.
        """
        rates = self._rates(lr)
        for number, lane in enumerate(rates):
            factors = [
                old / new if old and new else 1.0
                for old, new in zip(self.rates[number], lane, strict=True)
            ]
            self._rescale(number, factors)
            self.resting[number] = [
                part for part, rate in zip(self.parts[number], lane, strict=True) if rate == 0
            ]
        self.assume(rates)

    def assume(self, lr: float | Sequence[Sequence[float | None]]) -> None:
        """Record the rates that the optimizer applied to the last mean; residuals do not change."""
        for rates, lane in zip(self.rates, self._rates(lr), strict=True):
            rates[:] = [new or old for old, new in zip(rates, lane, strict=True)]

    def _rates(
        self, lr: float | Sequence[Sequence[float | None]]
    ) -> Sequence[Sequence[float | None]]:
        if isinstance(lr, Sequence) and not isinstance(lr, str):
            return lr
        rate = checked_rate(lr)
        return [[rate] * len(parts) for parts in self.parts]

    def _rescale(self, number: int, factors: Sequence[float]) -> None:
        """Multiply the residuals of each part of a lane by its factor; merge equal neighbours."""
        lane, parts = self.lanes[number], self.parts[number]
        first = 0
        for i in range(1, len(parts) + 1):
            if i < len(parts) and factors[i] == factors[first]:
                continue
            start, stop, factor = parts[first].start, parts[i - 1].stop, factors[first]
            first = i
            if factor == 1 or not lane.memory.residuals:
                continue
            for worker in range(len(self.workers)):
                views = self.views(number, worker, slice(start, stop))
                owner = views.pop("owner", None)
                lane.memory.rescale(views, factor)
                if owner is not None:
                    owner.mul_(factor)

    @contextmanager
    def _resting(self, number: int) -> Iterator[None]:
        """Set the residuals of parts that rest aside, and add them again after the exchange."""
        parts, residuals = self.resting[number], {*self.lanes[number].memory.residuals, "owner"}
        saved: list[tuple[int, slice, str, Tensor]] = []
        for worker, part in itertools.product(range(len(self.workers)), parts):
            for name, view in self.views(number, worker, part).items():
                if name in residuals:
                    saved.append((worker, part, name, view.clone()))
                    view.zero_()
        try:
            yield
        finally:  # an exchange may replace a buffer
            for worker, part, name, residual in saved:
                self.views(number, worker, part)[name].add_(residual)

    def views(self, number: int, worker: int, part: slice) -> dict[str, Tensor]:
        """Return views of a local worker's buffers of a part of a lane, 1-D, by name.

        "owner": the residual of the elements of the part that this worker owns, if there are any.
        """
        mine = self.workers[worker][number]
        views = {name: buffer[part] for name, buffer in mine.items() if name != "owner"}
        if "owner" in mine:
            rank = self.world.ranks[worker]
            begin, end = self.lanes[number].bounds(self.world.size)[rank : rank + 2]
            low, high = max(part.start, begin), min(part.stop, end)
            if low < high:
                views["owner"] = mine["owner"][low - begin : high - begin]
        return views

    def agree(self, row: Sequence[int]) -> list[list[int]]:
        """Return every worker's row of integers, by rank; for one local worker.

        It costs 8 bytes per integer and worker, counted as traffic and in `agreement`.
        """
        traffic = self.world.traffic[0]
        before = replace(traffic)
        sent = torch.tensor(row, dtype=torch.int64, device=self.world.device)
        rows = self.world.all_gather([sent], [len(row)] * self.world.size)
        for name in ("payload_up", "payload_down", "wire"):
            spent = getattr(traffic, name) - getattr(before, name)
            setattr(self.agreement, name, getattr(self.agreement, name) + spent)
        gathered: list[list[int]] = torch.stack(rows).tolist()
        return gathered

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self, worker: int = 0, *, copy: bool = True) -> dict[str, Any]:
        """Return the state of a local worker and its traffic so far, sealed by a digest.

        It contains numbers, strings, and float32 tensors on the CPU, with the same entries at every
        step. `copy=False` returns tensors that are on the CPU without a copy.
        """
        keep: Callable[[Any], Any] = sealed.copied if copy else lambda value: value
        rank, traffic = self.world.ranks[worker], self.world.traffic[worker]
        memory = [dict(state) for state in self.workers[worker]]
        joint = [dict(state) for state in self.joint]
        for number, lane in enumerate(self.lanes):
            if "owner" not in memory[number] and self.owned[number]:
                begin, end = lane.bounds(self.world.size)[rank : rank + 2]
                memory[number]["owner"] = torch.zeros(end - begin, dtype=torch.float32)
            method = self.in_rounds[number]
            if "state" not in joint[number] and method is not None:
                first = method.initial_state(self._context(number, 0))
                joint[number]["state"] = torch.zeros(first.shape, dtype=torch.float32)
        tensors = {
            f"{kind} {number} {name}": keep(value.cpu())
            for kind, lanes in (("memory", memory), ("joint", joint))
            for number, states in enumerate(lanes)
            for name, value in states.items()
        }
        return sealed.seal(
            {
                **({"tensors": tensors} if tensors else {}),  # empty dicts are lost in a DCP file
                "rank": rank,
                "world_size": self.world.size,
                "places": [[lane.start, lane.segments.numel] for lane in self.lanes],
                "rates": [list(lane) for lane in self.rates],
                "begun": ["state" in state for state in self.joint],
                "traffic": list(astuple(traffic)),
                "agreement": list(astuple(self.agreement)),
                "skipped": self.skipped,
            }
        )

    def load_state_dict(self, saved: Mapping[str, Any], worker: int = 0) -> None:
        """Restore `state_dict` of the same worker and lanes; an invalid state changes nothing.

        Raises:
            UsageError: the state of another worker or exchange, or an invalid value.
        """
        rank, size, device = self.world.ranks[worker], self.world.size, self.world.device
        place = sealed.entry(saved, "rank"), sealed.entry(saved, "world_size")
        if place != (rank, size):
            raise sealed.malformed(
                f"it is of rank {place[0]} of {place[1]}, but this is rank {rank} of {size}"
            )
        places = [[lane.start, lane.segments.numel] for lane in self.lanes]
        if [
            list(each) for each in sealed.sequence("places", saved["places"], len(places))
        ] != places:
            raise sealed.malformed(
                f"its lanes are (start, length) {saved['places']!r:.80}; expected {places!r:.80}"
            )
        rates = [
            [
                None if rate is None else sealed.number(f"rate of lane {i}", rate, positive=True)
                for rate in sealed.sequence(f"rates of lane {i}", row, len(self.rates[i]))
            ]
            for i, row in enumerate(
                sealed.sequence("rates", sealed.entry(saved, "rates"), len(self.rates))
            )
        ]
        counts = {
            name: Traffic(
                *(
                    sealed.number(name, count)
                    for count in sealed.sequence(name, sealed.entry(saved, name), 3)
                )
            )
            for name in ("traffic", "agreement")
        }
        skipped = int(sealed.number("skipped", saved.get("skipped", 0)))  # older states have none
        memory, joint = self._checked_buffers(saved, worker)
        sealed.check_seal(saved)
        self.skipped = skipped
        self.rates = rates
        self.world.traffic[worker], self.agreement = counts["traffic"], counts["agreement"]
        for mine, restored in ((self.workers[worker], memory), (self.joint, joint)):
            for state, new in zip(mine, restored, strict=True):
                state.clear()
                state.update({name: value.to(device, copy=True) for name, value in new.items()})

    def _checked_buffers(
        self, saved: Mapping[str, Any], worker: int
    ) -> tuple[list[State], list[State]]:
        """Return the worker's tensors and the joint tensors of a saved state, checked, per lane."""
        rank = self.world.ranks[worker]
        memory, joint = by_lane(saved, len(self.lanes))
        begun = sealed.sequence("begun", sealed.entry(saved, "begun"), len(self.lanes))
        for number, lane in enumerate(self.lanes):
            where, whole = f"lane {number}", (lane.segments.numel,)
            begin, end = lane.bounds(self.world.size)[rank : rank + 2]
            must: dict[str, Shape]
            must = dict.fromkeys({*self.workers[worker][number]} - {"owner"}, whole)
            may = {"owner": (end - begin,)} if self.owns_shards else {}
            _check_tensors(where, memory[number], must, may)
            must = dict.fromkeys({*self.joint[number]} - {"state"}, whole)
            if not begun[number]:
                joint[number].pop("state", None)
            elif isinstance(lane.compressor, MultiRoundCompressor):
                first = lane.compressor.initial_state(self._context(number, 0))
                must["state"] = tuple(first.shape)
            else:
                raise sealed.malformed(f"begun is true for {where}, whose method has no rounds")
            _check_tensors(where, joint[number], must, {})
        return memory, joint

    def lane_mean(self, number: int, gradients: Sequence[Tensor], step: int) -> Tensor:
        """Return the mean of lane `number`, float32, shape (n of the lane,).

        For gradients that become ready lane by lane; call `follow` before. Lanes may be exchanged
        in any order that is the same on all workers; it does not change the means. The result is a
        buffer of the exchange, valid until the lane's next call.

        `gradients`: each local worker's gradient of this lane, float32, shape (n of the lane,).
        """
        out = self._means()[1][number]
        with faults.together(), self._resting(number):
            self._lane(number, gradients, step, out)
        return out

    def lane_shards(self, number: int, gradients: Sequence[Tensor], step: int) -> list[Tensor]:
        """Return the mean of each local worker's shard, float32, 1-D.

        The first half of a two-shot exchange, for workers that need only their shard (FSDP). The
        mean is not encoded again, so it has no second error and owners have no residuals. The
        lane's memory must not change the mean (`Memory.joint` is empty).

        `gradients`: each local worker's gradient of this lane, float32, shape (n of the lane,).
        Call `follow` before. A shard is valid until the next call for the lane.
        """
        ranks = self.world.ranks
        with faults.together(), self._resting(number):
            ctx = self._context(number, step)
            xs = self._offered(number, gradients, ctx)
            whole, prepared = self._agree(number, xs, ctx)
            shards, received = self._to_owners(number, whole, xs, prepared)
            means = self._workers(
                "decode", lambda i: self._owned(number, i, received[i], shards[ranks[i]])
            )
            rule = self.lanes[number].rule
            return means if rule.plain else [rule.update(mean, ctx) for mean in means]

    def offered(self, number: int, gradient: Tensor, step: int) -> Tensor:
        """Return the input of lane `number`'s encoder, (n,), without changing any buffer.

        `gradient`: the first local worker's, float32, shape (n of the lane,).
        """
        ctx = self._of_memory(number, 0, self._context(number, step))
        state = {name: buffer.clone() for name, buffer in ctx.state.items()}
        return self.lanes[number].memory.offer(gradient, ctx._replace(state=state))

    def _context(self, number: int, step: int) -> Context:
        """Return the context of a lane that is common to all workers."""
        lane = self.lanes[number]
        key = Key(self.seed, step, 0, lane.start, purposes.ENCODE)
        rates = [*{rate for rate in self.rates[number] if rate is not None}] or [1.0]
        kind = Context if len(rates) == 1 else MixedContext
        return kind(
            lane.segments,
            key=key,
            workers=self.world.size,
            lr=rates[0],
            joint=self.joint[number],
            skipped=self.skipped,
        )

    def _of_memory(self, number: int, i: int, ctx: Context) -> Context:
        """Return the context for the memory of local worker i."""
        key = ctx.key._replace(rank=self.world.ranks[i])
        return ctx._replace(key=key, state=self.workers[i][number])

    def _offered(self, number: int, gradients: Sequence[Tensor], ctx: Context) -> list[Tensor]:
        """Return the local workers' gradients of one lane as their memories transform them."""
        lane = self.lanes[number]
        if not lane.memory.carries or lane.fused:
            return list(gradients)
        return self._workers(
            "encode",
            lambda i: lane.memory.offer(gradients[i], self._of_memory(number, i, ctx)),
        )

    def _means(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the buffer for the means of all lanes, and its view for each lane."""
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
        lane, ctx = self.lanes[number], self._context(number, step)
        xs = self._offered(number, gradients, ctx)
        if isinstance(lane.compressor, MultiRoundCompressor):
            self._rounds(number, lane.compressor, xs, ctx, out)
        else:
            whole, prepared = self._agree(number, xs, ctx)
            match lane.collective:
                case "allreduce":
                    sent = self._encode(number, xs, [whole], prepared, settle=False)
                    self._allreduce(number, whole, [payloads[0] for payloads in sent], out)
                case "allgather":
                    sent = self._encode(number, xs, [whole], prepared)
                    self._allgather(number, whole, [payloads[0] for payloads in sent], out)
                case "twoshot":
                    self._twoshot(number, whole, xs, prepared, out)
                case "ring":
                    self._ring(number, whole, xs, out)
                case "sparse":
                    self._sparse(number, whole, xs, out)
                case other:
                    raise ValueError(f"collective {other!r}: expected {', '.join(COLLECTIVES)}")
        with self.clock.phase("decode"):
            applied = lane.memory.apply(out, ctx)
            if not lane.rule.plain:
                if applied is not out:  # a buffer of the memory, and the rule may overwrite it
                    applied = out.copy_(applied)
                applied = lane.rule.update(applied, ctx)
            if applied is not out:
                out.copy_(applied)

    def _agree(self, number: int, xs: Sequence[Tensor], ctx: Context) -> tuple[Piece, list[Any]]:
        """Return the whole lane with `ctx.shared`, and what `prepare` cached for each encoder."""
        method = self.lanes[number].compressor
        with self.clock.phase("statistic"):
            drawn = method.draw_shared(ctx)
        if drawn is not None:
            return Piece(ctx._replace(shared=drawn.to(self.world.device))), [None] * len(xs)
        results = self._workers("statistic", lambda i: codec.prepare(method, xs[i], ctx))
        shared, prepared = results[0].statistic, [each.cached for each in results]
        if shared.numel():
            with self.clock.phase("communicate"):
                shared = self.world.all_reduce([each.statistic for each in results], "max")
        return Piece(ctx._replace(shared=shared)), prepared

    # -- one worker's payloads ---------------------------------------------------------------------

    def _encode(
        self,
        number: int,
        xs: Sequence[Tensor],
        pieces: Sequence[Piece],
        prepared: Sequence[Any],
        *,
        settle: bool = True,
    ) -> list[list[Payload]]:
        """Return each local worker's payloads of these pieces, if `settle` in its send buffer."""
        ranks, lane = self.world.ranks, self.lanes[number]

        def encode(i: int) -> list[Payload]:
            name = (number, "sent", i)
            contexts = [piece.of(ranks[i])._replace(prepared=prepared[i]) for piece in pieces]
            parts = [xs[i][piece.place] for piece in pieces]
            if lane.fused:
                residual = self.workers[i][number]["residual"]
                left = [residual[piece.place] for piece in pieces]
                return self._payloads(lane, name, parts, contexts, residuals=left)
            # `keep` may change the buffer that `offer` returned: the payload must not be its view.
            apart = settle or lane.memory.feedback
            sent = self._payloads(lane, name, parts, contexts, settle=apart)
            if lane.memory.feedback:
                ctx = self._of_memory(number, i, pieces[0].ctx._replace(segments=lane.segments))
                lane.memory.keep(xs[i], self._decoded(lane, sent, contexts), ctx)
            return sent

        return self._workers("encode", encode)

    def _payloads(
        self,
        lane: Lane,
        name: Hashable,
        xs: Sequence[Tensor],
        contexts: Sequence[Context],
        *,
        residuals: Sequence[Tensor] | None = None,
        settle: bool = True,
    ) -> list[Payload]:
        """Return the payloads of `xs`, or of x + residual; each residual becomes the new error.

        `settle`: store their bytes consecutively in the buffer `name`.
        """
        method = lane.compressor
        layouts = [codec.layout(method, ctx.segments) for ctx in contexts]
        slots, payloads = self._slots(name, layouts), []
        for i, (x, ctx, slot) in enumerate(zip(xs, contexts, slots, strict=True)):
            if slot is not None and not slot.nbytes:
                payloads.append(slot)  # most shards are empty if there are fewer tiles than workers
                continue
            there = ctx
            if slot is not None:
                there = ctx._replace(parts=slot.parts, layout=layouts[i])
            if residuals is None:
                payloads.append(codec.encode(method, x, there, copy=settle))
            else:
                payloads.append(codec.feedback(method, x, residuals[i], there))
        return self._settled(name, payloads, slots) if settle else payloads

    def _slots(self, name: Hashable, layouts: Sequence[Layout | None]) -> list[Payload | None]:
        """Return payloads as consecutive views of the buffer `name`.

        All are None if a layout is not declared; one is None if its parts would not be aligned.
        """
        declared = [layout for layout in layouts if layout is not None]
        if len(declared) < len(layouts):
            return [None] * len(layouts)
        places = self.buffers.row(name, [*map(layout_bytes, declared)])
        return [
            Payload.over(place, layout) if aligned(place, layout) else None
            for place, layout in zip(places, declared, strict=True)
        ]

    def _settled(
        self, name: Hashable, payloads: list[Payload], slots: Sequence[Payload | None]
    ) -> list[Payload]:
        """Put the bytes of the payloads in the buffer of this name; return the payloads."""
        places = self.buffers.row(name, [payload.nbytes for payload in payloads])
        for payload, slot, place in zip(payloads, slots, places, strict=True):
            if slot is None:
                payload.write(place)
        return payloads

    def _decoded(
        self, lane: Lane, payloads: Sequence[Payload], contexts: Sequence[Context]
    ) -> Tensor:
        """Decode a worker's payloads to a buffer of this thread, valid until its next call."""
        sizes = [ctx.segments.numel for ctx in contexts]
        decoded = self.buffers.floats(("decoded", threading.get_ident()), sum(sizes))
        places = torch.split(decoded, sizes)
        for out, payload, ctx in zip(places, payloads, contexts, strict=True):
            codec.decode(lane.compressor, payload, ctx._replace(out=out))
        return decoded

    # -- collectives -------------------------------------------------------------------------------

    def _allreduce(
        self, number: int, whole: Piece, payloads: Sequence[Payload], out: Tensor
    ) -> None:
        world, method = self.world, self.lanes[number].compressor

        def widen(i: int) -> Payload:
            return method.summand(payloads[i], whole.ctx)

        summands = self._workers("encode", widen)
        with self.clock.phase("communicate"):
            layout = summands[0].layout
            total = Payload.over(self.buffers.bytes((number, "sum"), layout_bytes(layout)), layout)
            columns = zip(*(summand.parts for summand in summands), strict=True)
            for place, column in zip(total.parts, columns, strict=True):
                world.all_reduce(column, "sum", out=place)
        with self.clock.phase("decode"):
            total = total._replace(count=world.size)
            codec.decode_sum(method, total, whole.ctx._replace(out=out))

    def _allgather(
        self, number: int, whole: Piece, payloads: Sequence[Payload], out: Tensor
    ) -> None:
        world, method = self.world, self.lanes[number].compressor
        with self.clock.phase("communicate"):
            layouts = [codec.layout(method, whole.segments)] * world.size
            gathered = self._gather(number, "sent", payloads, layouts, [1] * world.size)
        with self.clock.phase("decode"):
            self._average(number, gathered, whole.ctx._replace(out=out))

    def _twoshot(
        self,
        number: int,
        whole: Piece,
        xs: Sequence[Tensor],
        prepared: Sequence[Any],
        out: Tensor,
    ) -> None:
        world, method = self.world, self.lanes[number].compressor
        shards, received = self._to_owners(number, whole, xs, prepared)
        ranks = world.ranks
        merged = self._workers(
            "decode", lambda i: self._merge(number, i, received[i], shards[ranks[i]])
        )
        with self.clock.phase("communicate"):
            layouts = [codec.layout(method, shard.segments, world.size) for shard in shards]
            counts = [world.size] * world.size
            gathered = self._gather(number, "merged", merged, layouts, counts, aggregated=True)
        with self.clock.phase("decode"):
            for payload, shard in zip(gathered, shards, strict=True):
                codec.decode(method, payload, shard.ctx._replace(out=out[shard.place]))

    def _ring(self, number: int, whole: Piece, xs: Sequence[Tensor], out: Tensor) -> None:
        world, lane = self.world, self.lanes[number]
        if whole.ctx.shared.numel():
            raise UsageError(
                f"{lane.compressor!r} shares a statistic of the gradients, which partial sums "
                "exceed: it cannot declare collective ring"
            )
        size, bounds = world.size, lane.bounds(world.size)
        shards = [whole.shard(*edges) for edges in pairwise(bounds)]
        received: list[Payload | None] = [None] * len(xs)

        def encode(hop: int) -> list[Payload]:
            return self._workers(
                "encode", lambda i: self._hop(number, i, hop, xs[i], shards, received[i])
            )

        for hop in range(1, size):
            sent = encode(hop)
            with self.clock.phase("communicate"):
                received[:] = self._pass_on(number, hop, sent, shards)
        finished = encode(size)
        if lane.memory.feedback and not lane.fused:
            ctx = whole.ctx._replace(segments=lane.segments)
            self._workers(
                "encode",
                lambda i: lane.memory.keep(
                    xs[i],
                    self.buffers.floats((number, "contributed", i), xs[i].numel()),
                    self._of_memory(number, i, ctx),
                ),
            )
        with self.clock.phase("communicate"):
            layouts = [codec.layout(lane.compressor, shard.segments) for shard in shards]
            gathered = self._gather(number, ("hop", size % 2), finished, layouts, [1] * size)
        with self.clock.phase("decode"):
            for payload, shard in zip(gathered, shards, strict=True):
                codec.decode(lane.compressor, payload, shard.ctx._replace(out=out[shard.place]))
            out.div_(out.new_tensor(float(size)))  # as in `Compressor.mean`

    def _hop(
        self,
        number: int,
        i: int,
        hop: int,
        x: Tensor,
        shards: Sequence[Piece],
        received: Payload | None,
    ) -> Payload:
        """Return local worker i's payload in a hop from 1 to N; that of hop N is the whole sum.

        `received`: the previous hop's payload, a sum without worker i's gradient; None in hop 1.
        """
        world, lane = self.world, self.lanes[number]
        rank, state = world.ranks[i], self.workers[i][number]
        shard = shards[(rank - hop) % world.size]
        name = (number, ("hop", hop % 2), i)  # the next worker still reads the previous payload
        ctx, added = shard.of(rank), x[shard.place]
        if received is not None:
            partial = self.buffers.floats((number, "partial", i), shard.segments.numel)
            added = codec.decode(lane.compressor, received, shard.ctx._replace(out=partial)) + added
        if lane.fused:
            left = state["residual"][shard.place]
            return self._payloads(lane, name, [added], [ctx], residuals=[left])[0]
        payload = self._payloads(lane, name, [added], [ctx])[0]
        if lane.memory.feedback:
            whole = self.buffers.floats((number, "contributed", i), x.numel())
            torch.sub(self._decoded(lane, [payload], [ctx]), added, out=whole[shard.place])
            whole[shard.place] += x[shard.place]
        return payload

    def _pass_on(
        self, number: int, hop: int, sent: Sequence[Payload], shards: Sequence[Piece]
    ) -> list[Payload]:
        """Send each local worker's payload to the next worker; return those received."""
        world, method = self.world, self.lanes[number].compressor
        arriving = [shards[(rank - 1 - hop) % world.size] for rank in world.ranks]
        declared = [codec.layout(method, shard.segments) for shard in arriving]

        def headers() -> list[Tensor]:
            mine = self._headers(sent)
            return world.shift(mine, [*map(len, mine)])

        layouts = _agreed(declared, sent[0], headers)
        sizes = [*map(layout_bytes, layouts)]
        room = self._room((number, "passed on"), sizes[0])
        contributions = self._sent_bytes((number, ("hop", hop % 2)), sent)
        received = world.shift(contributions, sizes, out=room)
        return [*map(Payload.over, received, layouts)]

    def _sparse(self, number: int, whole: Piece, xs: Sequence[Tensor], out: Tensor) -> None:
        lane, n = self.lanes[number], whole.segments.numel
        if n > 2**31:
            raise UsageError(f"collective sparse: {n} elements; expected at most 2^31")
        method, ranks = lane.compressor, self.world.ranks
        sent = self._workers("encode", lambda i: codec.entries(method, xs[i], whole.of(ranks[i])))
        positions, sums = self._largest_sums(number, sent, n)
        check_finite(sums)
        if lane.memory.feedback:
            remained = self.buffers.bytes((number, "remained"), n).view(torch.bool)
            remained.zero_()
            remained[positions] = True
            ctx = whole.ctx._replace(segments=lane.segments)

            def keep(i: int) -> None:
                places, values = sent[i]
                contributed = self.buffers.floats(("decoded", threading.get_ident()), n).zero_()
                contributed[places] = torch.where(remained[places], values, 0.0)
                lane.memory.keep(xs[i], contributed, self._of_memory(number, i, ctx))

            self._workers("encode", keep)
        with self.clock.phase("decode"):
            out.zero_()
            out[positions] = sums.div_(sums.new_tensor(float(self.world.size)))

    def _largest_sums(self, number: int, sent: Sequence[Entries], n: int) -> Entries:
        """Return the k sums of largest magnitude of the entries of all workers, k of each."""
        world, size, ranks = self.world, self.world.size, self.world.ranks
        k = sent[0].positions.numel()
        if not k:
            return sent[0]
        cuts: list[int] = []
        with self.clock.phase("communicate"):
            if size > 1:
                quantiles = [sparse.quantiles(entries.positions, size) for entries in sent]
                cuts = (world.all_reduce(quantiles, "sum") // size).tolist()
            counts, ones = [entries.counts(cuts) for entries in sent], [[1] * size] * len(sent)
            arriving = [torch.cat(row).tolist() for row in world.all_to_all(counts, ones, ones)]
        received = self._pass_entries(sent, [row.tolist() for row in counts], arriving)
        edges = [0, *cuts, n]

        def added(i: int) -> Entries:
            start, stop = edges[ranks[i] : ranks[i] + 2]
            sums = self.buffers.floats((number, "owned", i), stop - start)
            seen = self.buffers.bytes((number, "seen", i), stop - start).view(torch.bool)
            return sparse.add(received[i], start, sums, seen)

        def histograms(prefix: int, shift: int) -> list[Tensor]:
            count = sparse.histogram
            return self._workers("decode", lambda i: count(owned[i].values, prefix, shift))

        owned = self._workers("decode", added)
        limit, needed = 0, k
        for shift in sparse.SHIFTS:
            tables = histograms(limit, shift)
            with self.clock.phase("communicate"):
                total = world.all_reduce(tables, "sum").tolist()
            limit, needed = sparse.descend(total, limit, needed)
        rows = self._workers("decode", lambda i: owned[i].compared(limit))
        with self.clock.phase("communicate"):
            above, tied = torch.stack(world.all_gather(rows, [2] * size)).T.tolist()
        quotas = sparse.quotas(tied, needed)
        largest = self._workers("decode", lambda i: owned[i].largest(limit, quotas[ranks[i]]))
        moves = sparse.moves([a + ties for a, ties in zip(above, quotas, strict=True)])
        columns = [*zip(*moves, strict=True)]
        shares = self._pass_entries(
            largest, [moves[rank] for rank in ranks], [columns[rank] for rank in ranks]
        )
        with self.clock.phase("communicate"):
            sizes = [sparse.WORDS * sum(column) for column in columns]
            parts = world.all_gather([torch.cat(row) for row in shares], sizes, aggregated=True)
        return Entries.unpack(torch.cat(parts))

    def _pass_entries(
        self,
        sent: Sequence[Entries],
        counts: Sequence[Sequence[int]],
        arriving: Sequence[Sequence[int]],
    ) -> list[list[Tensor]]:
        """Send `counts[i][r]` entries of local worker i to rank r; return the messages received.

        `arriving[i][r]`: the number of entries that local worker i receives from rank r.
        """
        splits, sizes = (
            [[sparse.WORDS * count for count in row] for row in rows] for rows in (counts, arriving)
        )
        packed = self._workers("encode", lambda i: sent[i].pack())
        with self.clock.phase("communicate"):
            return self.world.all_to_all(packed, splits, sizes)

    def _to_owners(
        self, number: int, whole: Piece, xs: Sequence[Tensor], prepared: Sequence[Any]
    ) -> tuple[list[Piece], list[list[Payload]]]:
        """Send each shard to its owner; return the shards, and each local owner's payloads."""
        lane = self.lanes[number]
        method, bounds = lane.compressor, lane.bounds(self.world.size)
        shards = [whole.shard(*edges) for edges in pairwise(bounds)]
        if cuttable(method) and not lane.edges:  # `cut` needs edges between tiles
            encoded = self._encode(number, xs, [whole], prepared)
            sent = [method.cut(payload, bounds) for (payload,) in encoded]
        else:
            sent = self._encode(number, xs, shards, [None] * len(xs))
        with self.clock.phase("communicate"):
            layouts = [codec.layout(method, shard.segments) for shard in shards]
            return shards, self._scatter(number, sent, layouts)

    def _owned(self, number: int, i: int, payloads: Sequence[Payload], shard: Piece) -> Tensor:
        """Return the mean of local worker i's shard, float32, in a buffer of the exchange."""
        out = self.buffers.floats((number, "owned", i), shard.segments.numel)
        return self._average(number, payloads, shard.ctx._replace(out=out))

    def _average(self, number: int, payloads: Sequence[Payload], ctx: Context) -> Tensor:
        lane = self.lanes[number]
        if lane.trim:
            return codec.trimmed_mean(lane.compressor, payloads, lane.trim, ctx)
        return codec.mean(lane.compressor, payloads, ctx)

    def _merge(self, number: int, i: int, payloads: Sequence[Payload], shard: Piece) -> Payload:
        """Return local worker i's merged shard, stored in the worker's second send buffer."""
        world, lane, name = self.world, self.lanes[number], (number, "merged", i)
        method, state = lane.compressor, self.workers[i][number]
        ctx = shard.of(world.ranks[i], purposes.MERGE)
        if not requantizes(method):
            slots = self._slots(name, [codec.layout(method, shard.segments, world.size)])
            there = ctx if slots[0] is None else ctx._replace(parts=slots[0].parts)
            return self._settled(name, [codec.merge(method, payloads, there)], slots)[0]
        mean = self._owned(number, i, payloads, shard)
        if not lane.memory.owner:
            sent = self._payloads(lane, name, [mean], [ctx])
            return sent[0]._replace(count=world.size)
        if "owner" not in state:
            state["owner"] = torch.zeros_like(mean)
        left = state["owner"]  # the owner's residual
        if lane.memory.owner_decay != 1:
            left *= lane.memory.owner_decay
        if fuses_feedback(method):
            sent = self._payloads(lane, name, [mean], [ctx], residuals=[left])
        else:
            left += mean
            sent = self._payloads(lane, name, [left], [ctx])
            left -= self._decoded(lane, sent, [ctx])
        return sent[0]._replace(count=world.size)

    def _rounds(
        self,
        number: int,
        method: MultiRoundCompressor,
        xs: Sequence[Tensor],
        ctx: Context,
        out: Tensor,
    ) -> None:
        """Exchange by all-reduce in rounds; memories receive the approximation as what was sent."""
        world, lane, joint = self.world, self.lanes[number], self.joint[number]
        if "state" not in joint:
            joint["state"] = method.initial_state(ctx).to(world.device)
        layout = codec.layout(method, lane.segments)
        if not layout:
            raise UsageError(
                f"{method.name}: a method in rounds must declare a layout, one part per round"
            )
        rounds = [method.in_rounds(x, joint["state"], ctx._replace(out=out)) for x in xs]

        def summand(i: int, turn: int) -> Tensor:
            try:
                return rounds[i].send(means[-1]) if turn else next(rounds[i])
            except StopIteration:
                raise UsageError(
                    f"{method.name}: fewer rounds than the {len(layout)} of its layout"
                ) from None

        def received(turn: int) -> Tensor:
            """Return the mean over all workers of the summands of round `turn`."""
            summands = self._workers("encode", lambda i: summand(i, turn))
            with self.clock.phase("communicate"):
                room = self.buffers.floats((number, "round", turn), summands[0].numel())
                return world.all_reduce(summands, "sum", out=room).div_(world.size)

        means: list[Tensor] = []
        for turn in range(len(layout)):
            means.append(received(turn))  # noqa: PERF401 - `received` reads the earlier means
        with self.clock.phase("decode"):
            try:
                rounds[0].send(means[-1])
                raise UsageError(f"{method.name}: more rounds than the {len(layout)} of its layout")
            except StopIteration as end:
                approximation, following = end.value
                state = joint["state"]
                same = following.shape == state.shape
                joint["state"] = state.copy_(following) if same else following.clone()
                if approximation is not out:
                    out.copy_(approximation)
        for other in rounds[1:]:
            other.close()
        if lane.memory.feedback:
            keep = lane.memory.keep
            self._workers("encode", lambda i: keep(xs[i], out, self._of_memory(number, i, ctx)))

    # -- bytes -------------------------------------------------------------------------------------

    def _gather(
        self,
        number: int,
        what: Hashable,
        payloads: Sequence[Payload],
        declared: Sequence[Layout | None],
        counts: Sequence[int],
        *,
        aggregated: bool = False,
    ) -> list[Payload]:
        """All-gather one payload per worker; `declared[r]` is rank r's layout, None if unknown."""
        world = self.world

        def headers() -> list[Tensor]:
            mine = self._headers(payloads)
            return world.all_gather(mine, [len(mine[0])] * world.size, aggregated=aggregated)

        layouts = _agreed(declared, payloads[0], headers)
        sizes = [*map(layout_bytes, layouts)]
        room = self._room((number, what, "gathered"), sum(sizes))
        contributions = self._sent_bytes((number, what), payloads)
        received = world.all_gather(contributions, sizes, aggregated=aggregated, out=room)
        return [*map(Payload.over, received, layouts, counts)]

    def _headers(self, payloads: Sequence[Payload]) -> list[Tensor]:
        """Return the headers of payloads without a declared layout: the sizes of parts, int64."""
        return [
            torch.tensor([numel for _, numel in payload.layout], device=self.world.device)
            for payload in payloads
        ]

    def _sent_bytes(self, name: tuple[Hashable, ...], payloads: Sequence[Payload]) -> list[Tensor]:
        """Return the bytes of each local worker's payload, in its send buffer of this name."""
        return [
            self.buffers.bytes((*name, i), payload.nbytes) for i, payload in enumerate(payloads)
        ]

    def _room(self, name: Hashable, size: int) -> Tensor | None:
        """Return the receive buffer of a collective between processes; None in a simulation."""
        return self.buffers.bytes(name, size) if len(self.world.ranks) < self.world.size else None

    def _scatter(
        self,
        number: int,
        sent: Sequence[Sequence[Payload]],
        declared: Sequence[Layout | None],
    ) -> list[list[Payload]]:
        """Send shard r of each local worker to rank r; return each local owner's, by sender."""
        world = self.world

        def headers() -> list[Tensor]:
            rows = [torch.cat(self._headers(row)) for row in sent]
            width = [[len(rows[0]) // world.size] * world.size] * len(rows)
            return [header for row in world.all_to_all(rows, width, width) for header in row]

        expected = [declared[rank] for rank in world.ranks for _ in range(world.size)]
        flat = _agreed(expected, sent[0][0], headers)
        layouts = [flat[i : i + world.size] for i in range(0, len(flat), world.size)]
        splits = [[shard.nbytes for shard in row] for row in sent]
        contributions = [
            self.buffers.bytes((number, "sent", i), sum(split)) for i, split in enumerate(splits)
        ]
        sizes = [[*map(layout_bytes, row)] for row in layouts]
        room = self._room((number, "received"), sum(sizes[0]))
        received = world.all_to_all(contributions, splits, sizes, out=room)
        return [
            [*map(Payload.over, row, row_layouts)]
            for row, row_layouts in zip(received, layouts, strict=True)
        ]


def by_lane(saved: Mapping[str, Any], lanes: int) -> tuple[list[State], list[State]]:
    """Return the worker's tensors and the joint tensors, per lane, of a saved state.

    Raises:
        UsageError: a tensor's name is malformed or refers to a lane that does not exist.
    """
    result: dict[str, list[State]] = {
        kind: [{} for _ in range(lanes)] for kind in ("memory", "joint")
    }
    tensors = saved.get("tensors", {})
    if not isinstance(tensors, Mapping):
        raise sealed.malformed(f"tensors={tensors!r:.40}: expected a mapping by name")
    for key, value in tensors.items():
        kind, _, rest = str(key).partition(" ")
        number, _, name = rest.partition(" ")
        if kind not in result or not number.isdecimal() or int(number) >= lanes:
            raise sealed.malformed(f"unknown tensor {key!r}: expected e.g. 'memory 0 residual'")
        result[kind][int(number)][name] = value
    return result["memory"], result["joint"]


def _check_tensors(
    where: str, tensors: State, must: Mapping[str, Shape], may: Mapping[str, Shape]
) -> None:
    """Check the tensors of a lane: all of `must`, and no others than `may`, of these shapes."""
    shapes = {**must, **may}
    if not {*must} <= {*tensors} <= {*shapes}:
        raise sealed.malformed(f"{where} has {sorted(tensors)}: expected {sorted(must)}")
    for name, value in tensors.items():
        sealed.floats(f"{name} of {where}", value, shapes[name])


def _agreed(
    declared: Sequence[Layout | None], local: Payload, headers: Callable[[], Sequence[Tensor]]
) -> list[Layout]:
    """Return the declared layouts, or else those of `local` with the sizes in `headers()`."""
    layouts = [layout for layout in declared if layout is not None]
    if len(layouts) == len(declared):
        return layouts
    dtypes = [dtype for dtype, _ in local.layout]
    return [tuple(zip(dtypes, header.tolist(), strict=True)) for header in headers()]
