"""Gradient compression inside FSDP2: `gcbench.shard_hook(...).register(model)`.

A module that went through `torch.distributed.fsdp.fully_shard` ends its backward pass with one
reduce-scatter: each rank hands every other rank the chunks of its gradients that the other keeps,
and gets the mean of its own. That is the first half of a two-shot exchange. Here the chunks travel
compressed; the rank that keeps them decodes them and takes their mean in float32, which is not
encoded again. The exchange is `gcbench.core.exchange.Exchange.lane_shards`, in FSDP's own process
group and at its place in the order of collectives.

With hybrid sharding every shard has replicas on other nodes, and their mean is a second level: by
default an all-reduce in fp32, with `between` an exchange of its own by any method
(`Exchange.lane_mean`), after which all replicas of a shard have the same bits.

FSDP's input carries no parameter's name: per rank, then per parameter, it has a chunk of whole
rows, of which the last ones are shorter and padded with zeros. `gcbench.integrations.layout` finds
the chunks again; padding is not sent, and no scale is shared by two ranks' chunks.

Tried: torch 2.13, gloo on a CPU. With streams on a GPU it never ran.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from gcbench.core.clock import Totals
from gcbench.core.compressor import Compressor, Segments
from gcbench.core.errors import GcbenchError, UsageError
from gcbench.core.exchange import (
    Buffers,
    Exchange,
    Lane,
    check_legal,
    checked_rate,
    exact_or,
    lane_of,
)
from gcbench.core.memory import Memory
from gcbench.core.world import DistributedWorld, Traffic
from gcbench.integrations import check, chosen, handshake, sharded
from gcbench.integrations.layout import Layout
from gcbench.integrations.sharded import Sharded

FORMAT = 2
"""Version of what `ShardHook.state_dict` returns."""
SHARDS = "shard of each module, which replicas have in common"
"""By what name replicas tell each other which shards they hold."""


@dataclass(frozen=True)
class Between:
    """How the replicas of a shard exchange it."""

    compressor: Compressor
    collective: str
    memory: Memory


@dataclass(frozen=True)
class Settings:
    """What `shard_hook` was asked for."""

    compressor: Compressor
    memory: Memory
    dense_below: int
    start_step: int
    seed: int
    between: Between | None = None
    """None: the replicas' mean is taken in fp32."""


def shard_hook(
    compressor: str | Compressor,
    *,
    memory: str | None = None,
    memory_options: Mapping[str, Any] | None = None,
    dense_below: int = 0,
    start_step: int = 0,
    seed: int = 0,
    between: str | Compressor | None = None,
    between_options: Mapping[str, Any] | None = None,
    between_memory: str | None = None,
    between_memory_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> ShardHook:
    """Return a hook that compresses the reduce-scatters of an FSDP2 model.

    `hook.register(model)` on every rank, after `fully_shard` was called on the model and those of
    its modules that have a reduce-scatter of their own. Parameters travel to the ranks as before.

    Error feedback keeps on every rank what that rank lost of its whole gradient: 4 bytes for each
    element of the model, unsharded; `memory="none"` carries nothing. Error feedback between
    replicas keeps what was lost of the rank's own shard: 4 bytes for each element of that.

    Args:
        compressor: a registered name that `gcbench list compressors` shows with the collective
            twoshot, or such a compressor, or a file with one (./mine.py).
        memory: what is carried from step to step, by name; default what the method published. With
            `momentum` and `dgc` the optimizer must have none of its own.
        memory_options: fields of the memory.
        dense_below: parameters of fewer elements, all ranks' chunks together, stay fp32, between
            replicas, too.
        start_step: exchanges of a module before it are in fp32, between replicas, too.
        seed: of random numbers; models trained at the same time should have different ones.
        between: for hybrid sharding, what the replicas of a shard exchange it by: any registered
            name, or a compressor, by the first of its collectives. SDP4Bit's two levels are
            `shard_hook("int8", between="hadamard4")`. Default: fp32.
        between_options: fields of `between`.
        between_memory: as `memory`, of the exchange between replicas; default what `between`
            published. Error feedback may be used at both levels; each carries its own error.
        between_memory_options: fields of `between_memory`.
        options: fields of the compressor.

    Raises:
        gcbench.core.errors.UsageError: an unknown name, field or value, or a method or memory that
            cannot work where each rank keeps a shard alone.
    """
    method = chosen.compressor(compressor, options)
    for name, value in (("dense_below", dense_below), ("start_step", start_step)):
        if not value >= 0:
            raise UsageError(f"{name}={value!r}: at least 0 allowed")
    legal = method.legal_collectives()
    if "twoshot" not in legal:
        raise UsageError(
            f"{method!r} is exchanged by {', '.join(legal)}, where every rank gets every element. "
            "With FSDP each rank gets its shard alone, which is half of a twoshot exchange. Take a "
            "method that gcbench list compressors shows with twoshot"
        )
    carried = chosen.memory(memory, memory_options, method)
    _check_rule(method)
    if carried.joint:
        raise UsageError(
            f"{carried!r} keeps {', '.join(carried.joint)} of the whole mean on every rank, and "
            "with FSDP each rank sees its shard alone. Take another memory"
        )
    second = _between(between, between_options, between_memory, between_memory_options)
    if second is not None and carried.has_momentum and second.memory.has_momentum:
        raise UsageError(
            f"memory {carried!r} and between_memory {second.memory!r} would both apply momentum. "
            "Leave one of them out"
        )
    return ShardHook(Settings(method, carried, dense_below, start_step, seed, second))


def _check_rule(method: Compressor) -> None:
    """Refuse a method with an update rule of its own."""
    if not method.rule.plain:
        raise UsageError(
            f"the update rule of {method!r} needs the whole mean on every rank, and with FSDP each "
            "rank sees its shard alone. Use DistributedDataParallel and gcbench.comm_hook"
        )


def _between(
    name: str | Compressor | None,
    options: Mapping[str, Any] | None,
    memory: str | None,
    memory_options: Mapping[str, Any] | None,
) -> Between | None:
    """Return how replicas exchange their shards; None: in fp32.

    Raises:
        UsageError: an unknown name, field or value, or fields of what was not asked for.
    """
    if name is None:
        given = {
            "between_options": options,
            "between_memory": memory,
            "between_memory_options": memory_options,
        }
        for word, value in given.items():
            if value is not None:
                raise UsageError(
                    f"{word}={value!r} without between: name the method that replicas exchange "
                    'their shards by, between="hadamard4", or leave it out'
                )
        return None
    method = chosen.compressor(name, options or {})
    _check_rule(method)
    return Between(method, check_legal(method), chosen.memory(memory, memory_options, method))


def lanes(settings: Settings, layout: Layout, start: int, step: int) -> list[Lane]:
    """Return how the ranks that shard a module exchange its lanes from `step` on.

    `start`: number of the module's first element among all that the model exchanges, by which
    random numbers are addressed.
    """
    made = []
    for parameters in layout.lanes():
        exact = layout.is_dense(parameters) or step < settings.start_step
        method, memory = exact_or(settings.compressor, settings.memory, exact=exact)
        offsets, edges = [0], [0]
        for rank in range(layout.ranks):
            # A rank's chunks by themselves: no segment is cut where another rank's begin.
            shapes = [parameter.chunks[rank] for parameter in parameters]
            own = Segments.of([s for s in shapes if math.prod(s)], method.granularity)
            offsets += [edges[-1] + offset for offset in own.offsets[1:]]
            edges.append(edges[-1] + own.numel)
        segments = Segments(tuple(offsets))
        made.append(Lane(method, "twoshot", start, segments, memory, tuple(edges)))
        start += segments.numel
    return made


def replica_lanes(
    settings: Settings, layout: Layout, rank: int, start: int, step: int
) -> list[Lane]:
    """Return how the replicas of a module's shard exchange it from `step` on.

    The lanes are those of `lanes`, of which each has the chunks of this `rank` alone; one may be
    empty. `start` as there.
    """
    between = settings.between
    if between is None:
        return []
    made, way = [], (between.compressor, between.collective, between.memory)
    for parameters in layout.lanes():
        shapes = [p.chunks[rank] for p in parameters if math.prod(p.chunks[rank])]
        exact = layout.is_dense(parameters) or step < settings.start_step
        made.append(lane_of(shapes, start, *way, exact=exact))
        start += made[-1].segments.numel
    return made


class ShardHook:
    """One FSDP2 model's compressed reduce-scatters, made by `shard_hook`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._lr: float | None = None
        """None: nobody has set a learning rate, nor has a state that was loaded."""
        self._modules: list[_Module] = []
        self._told: dict[str, Any] = {}
        self._registered = False
        self._loaded: dict[str, Any] | None = None
        self._failed: BaseException | None = None

    # -- for the user ------------------------------------------------------------------------------

    def register(
        self, model: nn.Module, *, replicas: dist.ProcessGroup | DeviceMesh | None = None
    ) -> Self:
        """Exchange the gradients of `model` from its next backward on. All ranks call it.

        Args:
            model: its modules that `fully_shard` was called on are served, each by itself.
            replicas: for hybrid sharding, the ranks that hold the same shard: shard over one
                dimension of a mesh, `fully_shard(..., mesh=mesh["shard"])`, and give the other,
                `mesh["replicate"]`. After the compressed reduce-scatter they take the mean of
                their shards as `between` says.

        Raises:
            gcbench.core.errors.UsageError: what this model has cannot be compressed, or the ranks
                differ in what they registered: on every rank, with what to do.
            gcbench.core.errors.PeerLostError: another rank did not come.
        """
        if self._registered:
            raise UsageError("this hook is registered already: make one for each model")
        found, group = sharded.modules(model), sharded.group_of(replicas)
        layouts, refused = [each.layout(self.settings.dense_below) for each in found], ""
        try:
            self._examine(found, group)
            self._told = self._tell(found, layouts, group)
            if self._loaded is not None:
                place = dist.get_rank(), dist.get_world_size()
                chosen.check_state(self._loaded, *place, self._told)
        except UsageError as error:
            refused, self._told = str(error), {}
        stores = self._meet(found, group, refused)
        self._registered = True
        self._begin(found, layouts, group, stores)
        if self._loaded is not None:
            kept = self._loaded["modules"]
            for module in self._modules:
                if module.levels or module.name in kept:  # once steps of others were not counted
                    module.load(kept[module.name])
        self._loaded = None
        return self

    @property
    def lr(self) -> float:
        """The learning rate that the next mean is applied with; 1 at first.

        Set it with your schedule, so that residuals stand for the same update after a change; left
        alone, residuals stay as they are. A state that is loaded brings the rate that its residuals
        were told last, unless one was set before.
        """
        return 1.0 if self._lr is None else self._lr

    @lr.setter
    def lr(self, rate: float) -> None:
        self._lr = checked_rate(rate)

    @property
    def step(self) -> int:
        """The most exchanges that a module had: backward passes that reduce gradients.

        One shard without replicas exchanges nothing, and its backward passes are counted.
        """
        return max((module.step for module in self._modules), default=0)

    @property
    def traffic(self) -> Traffic:
        """Bytes of this rank since the first step: reduce-scatters, and exchanges of replicas."""
        return _total([level for module in self._modules for level in module.levels])

    @property
    def traffic_between(self) -> Traffic:
        """The part of `traffic` that went between replicas."""
        return _total([module.between for module in self._modules if module.between is not None])

    @property
    def plain_bytes(self) -> float:
        """Bytes that this rank would have handed over in fp32: gradients, and padded shards."""
        inside = sum(m.step * m.layout.numel for m in self._modules if m.inside is not None)
        between = sum(m.step * m.layout.row for m in self._modules if m.between is not None)
        return 4.0 * (inside + between)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of all exchanges by phase: statistic, encode, communicate, decode."""
        total: dict[str, float] = {}
        for module in self._modules:
            for phase, seconds in module.clock.seconds.items():
                total[phase] = total.get(phase, 0.0) + seconds
        return total

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank carries, by module: numbers, strings and tensors for `torch.save`.

        Every rank has its own and saves its own; between steps, after backward.
        """
        if not self._registered:
            return self._loaded or {}
        return {
            "format": FORMAT,
            "rank": dist.get_rank(),
            "world_size": dist.get_world_size(),
            "told": self._told,
            "modules": {module.name: module.state() for module in self._modules},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Carry on from a `state_dict` of the same rank. Before `register`, which compares it.

        Raises:
            gcbench.core.errors.UsageError: the hook is registered, or that is no such state.
        """
        if self._registered:
            raise UsageError(
                "load_state_dict after register: the ranks compare their states when they "
                "register. Make a hook, load the state, then register it on the model"
            )
        if state and state.get("format") != FORMAT:
            raise UsageError(
                f"state of format {state.get('format')!r}: {FORMAT} expected, as "
                "ShardHook.state_dict returns it"
            )
        self._loaded = dict(state) or None
        if self._lr is None and state:
            self._lr = _last_rate(state["modules"].values())

    # -- registration ------------------------------------------------------------------------------

    def _examine(self, found: Sequence[Sharded], replicas: dist.ProcessGroup | None) -> None:
        """Raise UsageError for what cannot be carried."""
        if self.settings.between is not None and replicas is None:
            raise UsageError(
                f"between={self.settings.between.compressor!r} says how replicas exchange their "
                "shards, and no replicas came: hook.register(model, "
                'replicas=mesh["replicate"]), or leave between out'
            )
        for each in found:
            each.examine(replicas)

    def _tell(
        self,
        found: Sequence[Sharded],
        layouts: Sequence[Layout],
        replicas: dist.ProcessGroup | None,
    ) -> dict[str, Any]:
        """Return what must be the same on all ranks, by a name for people."""
        settings = self.settings
        words = repr([(each.name, each.dtypes) for each in found]) + repr(layouts)
        digest = hashlib.sha256(words.encode()).hexdigest()[:12]
        count = sum(len(layout.parameters) for layout in layouts)
        numel = sum(layout.numel for layout in layouts)
        loaded = self._loaded["modules"] if self._loaded else {}
        second: dict[str, Any] = {}
        if settings.between is not None:
            way = settings.between
            second = chosen.told(way.compressor, way.collective, way.memory)
        return {
            **chosen.told(settings.compressor, "twoshot", settings.memory),
            **{
                f"between {name}": second.get(name)
                for name in ("compressor", "code of compressor", "collective", "memory")
            },
            "dense_below": settings.dense_below,
            "start_step": settings.start_step,
            "seed": settings.seed,
            "replicas": 1 if replicas is None else replicas.size(),
            "parameters": f"{count} with {numel} elements, layout {digest}",
            "step": max((each["step"] for each in loaded.values()), default=0),
        }

    def _meet(
        self, found: Sequence[Sharded], replicas: dist.ProcessGroup | None, refused: str
    ) -> dict[str, Store]:
        """Compare what all ranks tell, in every process group; return a store for each group.

        Replicas also compare which shard of each module they hold.
        """
        groups = {each.group.group_name: each.group for each in found}
        meetings = [(group, self._told) for group in groups.values()]
        if replicas is not None:
            shards = [each.group.rank() for each in found]
            meetings.append((replicas, {**self._told, SHARDS: shards}))
        stores: dict[str, Store] = {}
        first: GcbenchError | None = None
        for group, told in meetings:
            try:
                seconds = _timeout(group, found[0].device).total_seconds()
                stores[group.group_name] = handshake.meet(group, told, refused, seconds)
            except GcbenchError as error:  # the ranks of the other groups hear of it, too
                first, refused = first or error, refused or str(error)
        if first is not None:
            raise first
        return stores

    def _begin(
        self,
        found: Sequence[Sharded],
        layouts: Sequence[Layout],
        replicas: dist.ProcessGroup | None,
        stores: Mapping[str, Store],
    ) -> None:
        """Make the exchanges of each module, and give them to FSDP.

        Seeds differ from one shard group to the next, or else replicas would round alike; and from
        one shard's replicas to those of the next.
        """
        settings, start = self.settings, 0
        number, count = (0, 1) if replicas is None else (replicas.rank(), replicas.size())
        # Exchanges of one kind come one after the other; on a GPU the two kinds have two streams.
        buffers = Buffers(found[0].device), Buffers(found[0].device)
        for each, layout in zip(found, layouts, strict=True):
            module, rank = _Module(self, each, layout, start), each.group.rank()
            if each.group.size() > 1:
                plan = partial(lanes, settings, layout, start)
                world = _world(each.group, stores, each.device)
                seed = settings.seed + (number << 32)
                module.inside = _Level(world, plan, seed, module.clock, buffers[0])
                each.module.set_custom_reduce_scatter(module)
            if replicas is not None and count > 1:
                plan = partial(replica_lanes, settings, layout, rank, start)
                world = _world(replicas, stores, each.device)
                seed = settings.seed + (count + rank << 32)
                module.between = _Level(world, plan, seed, module.clock, buffers[1])
                each.module.set_all_reduce_hook(module.over_replicas)
            if not module.levels:
                module.theirs = each.known._all_reduce_hook
                each.module.set_all_reduce_hook(module.count)
            self._modules.append(module)
            start += layout.numel

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Run a part of an exchange; after an error no other is begun, which would wait in vain.

        Raises:
            GcbenchError: what broke an earlier exchange off.
        """
        if self._failed is not None:
            raise self._failed
        try:
            with torch.no_grad():
                yield
        except BaseException as error:
            self._failed = error
            raise


class _Level:
    """A module's exchange in one process group: of its shards, or of the replicas of one."""

    def __init__(
        self,
        world: DistributedWorld,
        lanes: Callable[[int], list[Lane]],
        seed: int,
        clock: Totals,
        buffers: Buffers,
    ) -> None:
        """`lanes`: returns how lanes are exchanged from a step on."""
        self.world, self.lanes = world, lanes
        self.exchange = Exchange(world, lanes(0), seed, clock)
        self.exchange.buffers = buffers

    def state(self) -> dict[str, Any]:
        """Return what is carried: dicts of tensors for each lane, in the order of its elements."""
        own, exchange = self.world.traffic[0], self.exchange
        return {
            "lr": exchange.lr,
            "traffic": [own.payload_up, own.payload_down, own.wire],
            "lanes": [{k: v.clone() for k, v in lane.items()} for lane in exchange.workers[0]],
            "joint": [{k: v.clone() for k, v in lane.items()} for lane in exchange.joint],
        }

    def load(self, state: Mapping[str, Any], step: int) -> None:
        """Carry on at `step` from what `state` returned for the same lanes and rank."""
        exchange, device = self.exchange, self.world.device
        exchange.change(self.lanes(step))
        exchange.lr = state["lr"]
        self.world.traffic[0] = Traffic(*state["traffic"])
        for name, carried in (("lanes", exchange.workers[0]), ("joint", exchange.joint)):
            for own, kept in zip(carried, state[name], strict=True):
                own.update({key: value.to(device, copy=True) for key, value in kept.items()})


class _Module:
    """One module's exchanges: what FSDP calls in the place of its reduce-scatter, and after it."""

    def __init__(self, hook: ShardHook, known: Sharded, layout: Layout, start: int) -> None:
        self.hook, self.name, self.layout, self.start = hook, known.name, layout, start
        self.rank, self.clock, self.step = known.group.rank(), Totals(known.device), 0
        self.inside: _Level | None = None
        """None: the module has one shard."""
        self.between: _Level | None = None
        """None: a shard has no replicas."""
        self.theirs: Callable[[Tensor], None] | None = None
        """The user's all-reduce hook, whose place is taken to count steps without an exchange."""

    @property
    def levels(self) -> list[_Level]:
        """The exchanges that there are."""
        return [level for level in (self.inside, self.between) if level is not None]

    def state(self) -> dict[str, Any]:
        """Return what is carried."""
        return {"step": self.step, "levels": [level.state() for level in self.levels]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Carry on from what `state` returned for the same layout, settings and rank."""
        self.step = state["step"]
        for level, kept in zip(self.levels, state["levels"], strict=True):
            level.load(kept, self.step)

    # -- called by FSDP ----------------------------------------------------------------------------

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for FSDP's input or output."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Write the mean of this rank's row over all ranks' inputs to the output, shape (row,).

        Raises:
            GcbenchError: the exchange broke off, or FSDP asks for what cannot be compressed.
        """
        with self.hook.exchanging():
            self._check_call(input_tensor, group, op)
            self._reduce(output_tensor, input_tensor, group, op)
            if self.between is None:
                self.step += 1

    def over_replicas(self, shard: Tensor) -> None:
        """Put the mean over the replicas in the place of this rank's row, shape (row,).

        Raises:
            GcbenchError: the exchange broke off, or FSDP asks for what cannot be compressed.
        """
        assert self.between is not None
        with self.hook.exchanging():
            self._check_elements(shard.numel(), self.layout.row)
            if self.hook.settings.between is None:
                self._plain_mean(shard, self.between.world)
            else:
                self._exchange(shard, self.between)
            self.step += 1

    def count(self, shard: Tensor) -> None:
        """Count a step of one shard without replicas, whose gradient is the mean as it is."""
        if self.theirs is not None:
            self.theirs(shard)
        self.step += 1

    # -- exchanges ---------------------------------------------------------------------------------

    def _check_call(self, given: Tensor, group: dist.ProcessGroup, op: Any) -> None:
        """Raise UsageError if FSDP asks for another reduce-scatter than was registered."""
        assert self.inside is not None
        world = self.inside.world
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise UsageError(
                f"{self.name}: FSDP asks for neither a mean nor a sum of the ranks, as after "
                "set_gradient_divide_factor. Leave that out and scale the loss"
            )
        if (group.rank(), group.size()) != (self.rank, world.size):
            raise UsageError(
                f"{self.name}: a process group of {group.size()} ranks came, {world.size} expected"
            )
        if given.dtype not in sharded.DTYPES:
            raise UsageError(f"{self.name}: gradients of {given.dtype} came. {sharded.REDUCE}")
        self._check_elements(given.numel(), self.layout.ranks * self.layout.row)

    def _check_elements(self, came: int, expected: int) -> None:
        """Raise UsageError if not all parameters that were registered have a gradient."""
        if came != expected:
            told = "use all of them, or take a newer torch"
            if sharded.takes_unused():
                told = "call model.set_reduce_scatter_unused_params(True)"
            raise UsageError(
                f"{self.name}: {came} elements came and {expected} are those of all its "
                f"parameters. Does the loss not use some of them? Then {told}. Freeze parameters "
                "before register"
            )

    def _reduce(self, output: Tensor, given: Tensor, group: dist.ProcessGroup, op: Any) -> None:
        """Exchange the gradients among the ranks that shard the module."""
        assert self.inside is not None
        layout, world = self.layout, self.inside.world
        world.group = group  # set_separate_reduce_scatter_group may have changed it
        gradients = layout.take(given)
        self._check_finite(gradients, range(layout.ranks))
        exchange = self._ready(self.inside)
        output.zero_()
        for number, parameters in enumerate(layout.lanes()):
            (shard,) = exchange.lane_shards(number, [gradients[number]], self.step)
            if op == dist.ReduceOp.SUM:
                shard.mul_(world.size)
            layout.give(parameters, shard, output, self.rank)

    def _plain_mean(self, shard: Tensor, world: DistributedWorld) -> None:
        """Take the mean over the replicas in fp32."""
        with self.clock.phase("communicate"):
            shard.copy_(world.all_reduce([shard.float()], "sum").div_(world.size))

    def _exchange(self, shard: Tensor, level: _Level) -> None:
        """Exchange this rank's shard among its replicas; padding is not sent."""
        layout = self.layout
        own = layout.own(shard, self.rank)
        self._check_finite(own, [self.rank])
        exchange = self._ready(level)
        for number, (parameters, x) in enumerate(zip(layout.lanes(), own, strict=True)):
            if x.numel():  # else it is empty on all replicas
                mean = exchange.lane_mean(number, [x], self.step)
                layout.give(parameters, mean, shard, self.rank)

    def _ready(self, level: _Level) -> Exchange:
        """Return the exchange of a level as it is at this step."""
        if self.step == self.hook.settings.start_step and self.step:
            level.exchange.change(level.lanes(self.step))
        level.exchange.follow(self.hook.lr)
        return level.exchange

    def _check_finite(self, gradients: Sequence[Tensor], ranks: Sequence[int]) -> None:
        """Raise DivergedError, with a parameter's name, if a gradient is not finite.

        `gradients`: of each lane the chunks that `ranks` keep, 1-D.
        """
        if all(math.isfinite(float(x.sum())) or x.isfinite().all() for x in gradients):
            return
        name = next(
            parameter.name
            for lane, x in zip(self.layout.lanes(), gradients, strict=True)
            for parameter, piece in self.layout.pieces(lane, x, ranks)
            if not piece.isfinite().all()
        )
        raise check.diverged(dist.get_rank(), name, self.step)


def _last_rate(modules: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the learning rate that the module with the most exchanges was told last, if any.

    `modules`: what `_Module.state` returned.
    """
    latest = max(modules, key=lambda module: module["step"], default=None)
    rates = [level["lr"] for level in latest["levels"]] if latest else []
    return next((rate for rate in rates if rate is not None), None)


def _total(levels: Sequence[_Level]) -> Traffic:
    """Return the bytes of this rank in all of these exchanges."""
    total = Traffic()
    for level in levels:
        own = level.world.traffic[0]
        total.payload_up += own.payload_up
        total.payload_down += own.payload_down
        total.wire += own.wire
    return total


def _timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return how long a process group waits for its ranks.

    Some backends do not tell it, and a group may have none for the device. Such a group is refused,
    which its ranks tell each other first.
    """
    try:
        limit: timedelta = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return timedelta(seconds=handshake.PATIENCE)
    return limit


def _world(
    group: dist.ProcessGroup, stores: Mapping[str, Store], device: torch.device
) -> DistributedWorld:
    limit = "init_process_group(timeout=...)"
    store, timeout = stores[group.group_name], _timeout(group, device)
    return DistributedWorld(device, store, timeout, watched=False, group=group, limit=limit)
