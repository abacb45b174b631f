"""Gradient compression inside FSDP2: `gcbench.shard_hook(...).register(model)`.

A module that went through `torch.distributed.fsdp.fully_shard` ends its backward pass with one
reduce-scatter: each rank hands every other rank the chunks of its gradients that the other keeps,
and gets the mean of its own. That is the first half of a two-shot exchange. Here the chunks travel
compressed; the rank that keeps them decodes them and takes their mean in float32, which is not
encoded again. The exchange is `gcbench.core.exchange.Exchange.lane_shards`.

The hook has a process group of its own for each group of ranks, in which FSDP's all-gathers of
parameters run as well, in FSDP's order. A rank that fails ends its groups, so that the others stop
at their next collective, wherever they are in a forward or backward pass.

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
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from gcbench.core import sealed
from gcbench.core.clock import Totals
from gcbench.core.compressor import Compressor, Segments
from gcbench.core.errors import DivergedError, GcbenchError, UsageError
from gcbench.core.exchange import Buffers, Exchange, Lane, check_legal, exact_or, lane_of
from gcbench.core.memory import Memory
from gcbench.core.payload import State
from gcbench.core.world import DistributedWorld, Traffic
from gcbench.integrations import agreement, arguments, check, chosen, handshake, sharded
from gcbench.integrations.agreement import Common, Fault
from gcbench.integrations.chosen import Stages
from gcbench.integrations.handshake import Roster
from gcbench.integrations.hook import (
    NONFINITE,
    RESIZE,
    AfterForward,
    BeforeForward,
    Hook,
    HookWorld,
    RankState,
)
from gcbench.integrations.layout import Layout, Parameter
from gcbench.integrations.rates import Rates
from gcbench.integrations.sharded import Sharded
from gcbench.integrations.watch import Watch

SHARDS = "shard of each module, which replicas have in common"
"""Name under which replicas compare which shards they hold."""


@dataclass(frozen=True)
class Between:
    """How the replicas of a shard exchange it."""

    compressor: Compressor
    """The one that holds from step 0 on."""
    collective: str
    memory: Memory
    later: Stages = field(default_factory=dict)
    """The compressors that hold from later exchanges on."""

    @property
    def methods(self) -> Stages:
        """The compressor that holds from each exchange on."""
        return {0: self.compressor, **self.later}


@dataclass(frozen=True)
class Settings:
    """What `shard_hook` was asked for."""

    compressor: Compressor
    """The one that holds from step 0 on."""
    memory: Memory
    dense_below: int
    start_step: int
    seed: int
    between: Between | None = None
    """None: the replicas' mean is taken in fp32."""
    later: Stages = field(default_factory=dict)
    """The compressors that hold from later exchanges on."""
    on_nonfinite: str = "stop"
    timeout: float = 1800.0

    @property
    def methods(self) -> Stages:
        """The compressor that holds from each exchange on."""
        return {0: self.compressor, **self.later}

    @property
    def stages(self) -> list[int]:
        """The exchanges from which lanes are exchanged in another way than before, and 0."""
        between = {} if self.between is None else self.between.later
        return sorted({0, self.start_step, *self.later, *between})


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
    timeout: float = 1800.0,
    optimizer: Any = None,
    scaler: Any = None,
    on_nonfinite: str | None = None,
    on_resize: str = "refuse",
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
        timeout: seconds that a rank waits for the others in a collective, also where FSDP gathers
            parameters.
        optimizer: the optimizer of the model's parameters, or a list of them: residuals follow the
            learning rate of their parameter's group. It may be given to `register` instead. Without
            it set `hook.lr` at each step, if the rate changes.
        scaler: the torch.amp.GradScaler that scales the loss: residuals follow its scale.
        on_nonfinite: what to do where a rank's gradient is not finite. "stop": every rank raises
            DivergedError, which names that rank and the parameter. "skip": residuals stay as they
            were before this backward pass, and the module's gradients are NaN on every rank, as
            are those of the modules after it, so that the optimizer's step can be skipped on all
            ranks. Default: "skip" with a scaler, else "stop".
        on_resize: "refuse": a state that was saved with another number of ranks is refused. Only
            `comm_hook` can redistribute one.
        options: fields of the compressor, each a value or a schedule by step: "0:0.25/100:0.01" or
            {0: 0.25, 100: 0.01}.

    Raises:
        gcbench.core.errors.UsageError: an unknown name, field or value, or a method or memory that
            cannot work where each rank keeps a shard alone.
    """
    arguments.optional_text("memory", memory)
    arguments.optional_text("between_memory", between_memory)
    for name, value in (
        ("memory_options", memory_options),
        ("between_options", between_options),
        ("between_memory_options", between_memory_options),
    ):
        arguments.optional_mapping(name, value)
    methods = chosen.stages(compressor, options)
    for method in methods.values():
        legal = method.legal_collectives()
        if "twoshot" not in legal:
            raise UsageError(
                f"{method!r} is exchanged by {', '.join(legal)}, where every rank gets every "
                "element. With FSDP each rank gets its shard alone, which is half of a twoshot "
                "exchange. Take a method that gcbench list compressors shows with twoshot"
            )
        _check_rule(method)
    carried = chosen.memory(memory, memory_options, methods)
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
    if on_nonfinite is None:
        on_nonfinite = "stop" if scaler is None else "skip"
    if arguments.choice("on_resize", on_resize, RESIZE) != "refuse":
        raise UsageError(
            f"on_resize={on_resize!r}: with FSDP other ranks cut parameters in other places, and "
            'residuals are not redistributed. "refuse" is allowed: go on with as many ranks as '
            "before, or register a hook without a state"
        )
    settings = Settings(
        methods[0],
        carried,
        arguments.integer("dense_below", dense_below),
        arguments.integer("start_step", start_step, sealed.STEPS),
        arguments.integer("seed", seed, arguments.SEEDS),
        second,
        {start: method for start, method in methods.items() if start},
        arguments.choice("on_nonfinite", on_nonfinite, NONFINITE),
        arguments.number("timeout", timeout, 0.001, finite=True),
    )
    return ShardHook(settings, Rates(optimizer, scaler))


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
    methods, collective = chosen.stages(name, options or {}), None
    for method in methods.values():
        collective = check_legal(method, collective)
        _check_rule(method)
    carried = chosen.memory(memory, memory_options, methods)
    later = {start: method for start, method in methods.items() if start}
    return Between(methods[0], collective or "", carried, later)


def lanes(settings: Settings, layout: Layout, start: int, step: int) -> list[Lane]:
    """Return how the ranks that shard a module exchange its lanes from `step` on.

    `start`: number of the module's first element among all that the model exchanges, by which
    random numbers are addressed.
    """
    made = []
    for parameters in layout.lanes():
        exact = layout.is_dense(parameters) or step < settings.start_step
        at = chosen.at(settings.methods, step)
        method, memory = exact_or(at, settings.memory, exact=exact)
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
    made = []
    way = (chosen.at(between.methods, step), between.collective, between.memory)
    for parameters in layout.lanes():
        shapes = [p.chunks[rank] for p in parameters if math.prod(p.chunks[rank])]
        exact = layout.is_dense(parameters) or step < settings.start_step
        made.append(lane_of(shapes, start, *way, exact=exact))
        start += made[-1].segments.numel
    return made


class ShardHook(Hook):
    """One FSDP2 model's compressed reduce-scatters, made by `shard_hook`."""

    CALL = "gcbench.shard_hook"
    FORMAT = 3

    def __init__(self, settings: Settings, rates: Rates) -> None:
        super().__init__(settings, rates)
        self._modules: list[_Module] = []
        self._skipped = 0
        self._skipping: Fault | None = None
        """Why nothing is exchanged until the next forward pass."""
        self._undo: list[Callable[[], None]] = []
        """What takes back the exchanges since the last forward pass, if steps may be skipped."""
        self._reduced: set[str] = set()
        """Names of the modules that were exchanged since then: one comes once in a step."""
        self._root: Callable[[], nn.Module | None] = lambda: None
        self._in_forward = False
        """Whether a forward pass of the model has begun and has not ended."""
        self._groups: dict[str, HookWorld] = {}
        """This rank's place in each process group, by the name of torch's group."""

    # -- for the user ------------------------------------------------------------------------------

    def register(
        self,
        model: nn.Module,
        *,
        replicas: dist.ProcessGroup | DeviceMesh | None = None,
        optimizer: Any = None,
        scaler: Any = None,
    ) -> Self:
        """Exchange the gradients of `model` from its next backward on. All ranks call it.

        Args:
            model: its modules that `fully_shard` was called on are served, each by itself.
            replicas: for hybrid sharding, the ranks that hold the same shard: shard over one
                dimension of a mesh, `fully_shard(..., mesh=mesh["shard"])`, and give the other,
                `mesh["replicate"]`. After the compressed reduce-scatter they take the mean of
                their shards as `between` says.
            optimizer: as for `shard_hook`, if it was not given there.
            scaler: as for `shard_hook`, if it was not given there. `on_nonfinite` stays as it is.

        Raises:
            gcbench.core.errors.UsageError: what this model has cannot be compressed, or the ranks
                differ in what they registered: on every rank, with what to do.
            gcbench.core.errors.PeerLostError: another rank did not come.
        """
        if self._registered:
            raise UsageError("this hook is registered already: make one for each model")
        found, group = sharded.modules(model), sharded.group_of(replicas)
        layouts, refused = [each.layout(self.settings.dense_below) for each in found], ""
        self._size = dist.get_world_size()
        try:
            self._rates.add(optimizer, scaler)
            self._examine(found, group)
            self._summary = self._summarize(found, layouts, group)
            self._prepare(found, layouts, group)
            if self._loaded is not None:
                self._adopt(self._loaded)
                self._summary["step"] = self.step
            names = [parameter.name for each in found for parameter in each.parameters]
            tensors = [tensor for each in found for tensor in each.tensors]
            self._follow_steps(dict(zip(names, tensors, strict=True)))
        except UsageError as error:
            refused, self._summary, self._modules = str(error), {}, []
        stores, roster = self._meet(found, group, refused)
        self._registered, self._loaded = True, None
        self._root = weakref.ref(model)
        self._begin(model, found, group, stores, roster)
        for each in {id(m): m for m in (model, *(each.module for each in found))}.values():
            each.register_forward_pre_hook(BeforeForward(self), prepend=True)
        model.register_forward_hook(AfterForward(self))
        return self

    def _world(self, group: dist.ProcessGroup, device: torch.device) -> HookWorld:
        """Return this rank's place in a group of the ranks of torch's `group`."""
        members, limit = dist.get_process_group_ranks(group), "shard_hook(timeout=...)"
        return HookWorld(
            *(device, members, group.rank()), timedelta(seconds=self.settings.timeout), limit
        )

    def _begin(
        self,
        model: nn.Module,
        found: Sequence[Sharded],
        replicas: dist.ProcessGroup | None,
        stores: Mapping[str, Store],
        roster: Roster,
    ) -> None:
        """Make a process group for each group of ranks, and let FSDP call the hook.

        FSDP gathers its parameters in the same groups, so that a rank that waits there stops as
        well when another one fails.
        """
        device = found[0].device
        groups = {each.group.group_name: each.group for each in found if each.group.size() > 1}
        if replicas is not None and replicas.size() > 1:
            groups[replicas.group_name] = replicas
        self._groups = {name: self._world(theirs, device) for name, theirs in groups.items()}
        try:
            for name, world in self._groups.items():
                world.connect(stores[name], roster)
        except BaseException as error:
            self._fail(error)
            raise
        for module in self._modules:
            for level, theirs in module.places(replicas):
                level.world.join(self._groups[theirs.group_name])
            module.begin()
        for each, known in sharded.gathering(model):
            theirs = known.mesh_info.shard_process_group
            if theirs.group_name in self._groups:
                gather = _Gather(self, self._groups[theirs.group_name], known._all_gather_comm)
                each.set_custom_all_gather(gather)

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

    @property
    def skipped(self) -> int:
        """Backward passes at which a gradient was not finite, since `register`."""
        return self._skipped

    @property
    def agreement(self) -> Traffic:
        """The part of `traffic` by which ranks agree around each exchange of a module."""
        total = Traffic()
        for module in self._modules:
            for level in module.levels:
                _add(total, level.exchange.agreement)
        return total

    def state_dict(self) -> RankState:
        """Return what this rank carries, under "rank R of N": for `torch.save` and for DCP.

        Numbers, strings and tensors, by module. Every rank has its own and saves its own; between
        steps, after backward.
        """
        if not self._registered:
            return RankState(self._loaded or {})
        modules = {module.name: module.state() for module in self._modules}
        return self._sealed(dist.get_rank(), {"modules": modules})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Carry on from a `state_dict` of the same rank, before `register` or after it.

        All ranks load theirs, of the same step: they compare it when they register, or at the next
        exchange.

        Raises:
            gcbench.core.errors.UsageError: not such a state, or of another rank, world size or
                configuration.
        """
        self._keep(state)
        if not self._registered or self._loaded is None:
            return
        loaded, self._loaded = self._loaded, None
        self._adopt(loaded)
        self._loads += 1

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

    def _summarize(
        self,
        found: Sequence[Sharded],
        layouts: Sequence[Layout],
        replicas: dist.ProcessGroup | None,
    ) -> dict[str, Any]:
        """Return what must be the same on all ranks, by a readable name."""
        settings = self.settings
        words = repr([(each.name, each.dtypes) for each in found]) + repr(layouts)
        digest = hashlib.sha256(words.encode()).hexdigest()[:12]
        count = sum(len(layout.parameters) for layout in layouts)
        numel = sum(layout.numel for layout in layouts)
        second: dict[str, Any] = {}
        if settings.between is not None:
            way = settings.between
            second = chosen.summary(way.methods, way.collective, way.memory)
        return {
            **chosen.summary(settings.methods, "twoshot", settings.memory),
            **{
                f"between {name}": second.get(name)
                for name in ("compressor", "code of compressor", "collective", "memory")
            },
            "dense_below": settings.dense_below,
            "start_step": settings.start_step,
            "seed": settings.seed,
            "replicas": 1 if replicas is None else replicas.size(),
            "parameters": f"{count} with {numel} elements, layout {digest}",
            "on_nonfinite": settings.on_nonfinite,
            "rates": ("optimizer" if self._rates.optimizers else "hook.lr")
            + (" and scaler" if self._rates.scaler is not None else ""),
            "step": self.step,
        }

    def _meet(
        self, found: Sequence[Sharded], replicas: dist.ProcessGroup | None, refused: str
    ) -> tuple[dict[str, Store], Roster]:
        """Compare the settings of all ranks, in every process group; return a store for each group.

        Replicas also compare which shard of each module they hold. The roster has all ranks.
        """
        groups = {each.group.group_name: each.group for each in found}
        meetings = [(group, self._summary) for group in groups.values()]
        if replicas is not None:
            shards = [each.group.rank() for each in found]
            meetings.append((replicas, {**self._summary, SHARDS: shards}))
        stores: dict[str, Store] = {}
        first: GcbenchError | None = None
        roster = Roster.alone()
        for number, (group, summary) in enumerate(meetings):
            # Ranks that waited in vain in an earlier meeting come to the next one later.
            seconds = (number + 1) * min(self.settings.timeout, handshake.PATIENCE)
            try:
                store, roster = handshake.meet(group, summary, refused, seconds, roster)
                stores[group.group_name] = store
            except GcbenchError as error:  # the ranks of the other groups hear of it, too
                first, refused = first or error, refused or str(error)
        if first is not None:
            raise first
        return stores, roster

    def _prepare(
        self,
        found: Sequence[Sharded],
        layouts: Sequence[Layout],
        replicas: dist.ProcessGroup | None,
    ) -> None:
        """Make the exchanges of each module, but for their process groups.

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
                names = [
                    [(p.name, math.prod(p.chunks[r])) for r in range(layout.ranks) for p in lane]
                    for lane in layout.lanes()
                ]
                seed = settings.seed + (number << 32)
                world = self._world(each.group, each.device)
                module.inside = _Level(
                    *(world, plan, settings.stages, seed, module.clock, buffers[0], names),
                    owns_shards=False,
                )
            if replicas is not None and count > 1:
                plan = partial(replica_lanes, settings, layout, rank, start)
                names = []
                if settings.between is not None:
                    names = [
                        [(p.name, math.prod(p.chunks[rank])) for p in lane]
                        for lane in layout.lanes()
                    ]
                seed = settings.seed + (count + rank << 32)
                world = self._world(replicas, each.device)
                module.between = _Level(
                    *(world, plan, settings.stages, seed, module.clock, buffers[1], names),
                    owns_shards=True,
                )
            self._modules.append(module)
            start += layout.numel

    def _adopt(self, state: Mapping[str, Any]) -> None:
        """Carry on from a state, whose every entry is checked before anything changes."""
        entry = self._entry(state, dist.get_rank(), dist.get_world_size())
        modules = sealed.entry(entry, "modules")
        made = [module.loaded(sealed.entry(modules, module.name)) for module in self._modules]
        for module, (step, exchanges) in zip(self._modules, made, strict=True):
            module.step = step
            for level, exchange in zip(module.levels, exchanges, strict=True):
                level.replace(exchange)

    # -- training ----------------------------------------------------------------------------------

    def _before_forward(self, model: nn.Module) -> None:
        """Raise what broke the last exchange off; a new step begins.

        Raises:
            GcbenchError: what broke the last exchange off.
            UsageError: the last pass of this rank broke off.
        """
        root = model is self._root()
        if torch.is_grad_enabled() or (root and self._failed is not None):
            self.raise_failure()
        if not root:
            return
        broken = "forward" if self._in_forward else "backward"
        if self._in_forward or sharded.in_backward(model):
            # Collectives of FSDP itself were left out, so the next ones would not match.
            error = UsageError(
                f"rank {dist.get_rank()}: the last {broken} pass broke off, so the ranks cannot "
                "continue together. Was an error caught there? Restart from a checkpoint"
            )
            self._fail(error)
            raise error
        self._in_forward = True
        self._new_step()

    def _after_forward(self) -> None:
        self._in_forward = False

    def _worlds(self) -> list[HookWorld]:
        levels = [level.world for module in self._modules for level in module.levels]
        return [*levels, *self._groups.values()]

    def _new_step(self) -> None:
        self._skipping, self._undo, self._reduced = None, [], set()

    def _stepped(self) -> None:
        for module in self._modules:
            for level in module.levels:
                level.exchange.assume(level.rates(self._rates))

    def _skip(self, fault: Fault) -> None:
        """Take back what was exchanged since the last forward pass; exchange nothing until then."""
        if self._skipping is None:
            self._skipping = fault
            self._skipped += 1
            for undo in self._undo:
                undo()
            self._undo = []

    @contextmanager
    def _exchanging(self, module: _Module | None = None) -> Iterator[None]:
        """Communicate; after an error nothing else is begun, which would wait in vain.

        Raises:
            GcbenchError: what broke an earlier exchange off.
        """
        self.raise_failure()
        if module is not None:
            module.agreed = False
        try:
            with torch.no_grad():
                yield
        except BaseException as error:
            self._fail(error, agreed=module is not None and module.agreed)
            raise


class _Gather:
    """Gathers parameters in FSDP's place, in the hook's process group."""

    def __init__(self, hook: ShardHook, world: HookWorld, theirs: Any) -> None:
        """`theirs`: torch's own all-gather, which does the work."""
        self.hook, self.world, self.theirs = hook, world, theirs

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for FSDP's input or output."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Write all ranks' inputs to the output, by rank.

        Raises:
            GcbenchError: a rank failed, here or in an earlier exchange.
        """
        same = (group.rank(), group.size()) == (self.world.ranks[0], self.world.size)
        with self.hook._exchanging(), self.world.together():
            return self.theirs(
                output_tensor,
                input_tensor,
                group=self.world.group if same else group,
                async_op=async_op,
            )


class _Level:
    """A module's exchange in one process group: of its shards, or of the replicas of one."""

    def __init__(
        self,
        world: HookWorld,
        lanes: Callable[[int], list[Lane]],
        stages: Sequence[int],
        seed: int,
        clock: Totals,
        buffers: Buffers,
        names: Sequence[Sequence[tuple[str, int]]],
        *,
        owns_shards: bool,
    ) -> None:
        """`lanes`: returns how lanes are exchanged from a step on, which may change at `stages`.

        `names`: of each lane the parameters that its parts are of, and their numbers of elements.
        """
        self.world, self.lanes, self.stages, self.names = world, lanes, stages, names
        self._words, self._owns_shards, self._buffers = (seed, clock), owns_shards, buffers
        self.watch = Watch()
        self.exchange = self.made(0)

    def made(self, step: int) -> Exchange:
        """Return a new exchange, as it is before that of `step`, at which a stage may begin.

        It passes through all stages first, so that states have the same entries at every step.
        """
        lanes = [self.lanes(start) for start in self.stages]
        made = Exchange(self.world, lanes[0], *self._words, owns_shards=self._owns_shards)
        parts = []
        for lane in self.names:
            edges = [0]
            for _, size in lane:
                edges.append(edges[-1] + size)
            parts.append([slice(*pair) for pair in pairwise(edges)])
        made.divide(parts)
        for each in [*lanes[1:], self.lanes(max(0, step - 1))]:
            made.change(each)
        made.buffers = self._buffers
        return made

    def replace(self, exchange: Exchange) -> None:
        """Carry on with an exchange that `made` returned."""
        self.exchange = exchange

    def rates(self, rates: Rates) -> list[list[float | None]]:
        """Return the learning rates of the parts of each lane."""
        return [rates.of([name for name, _ in lane]) for lane in self.names]

    def undo(self) -> Callable[[], None]:
        """Return a function that puts back what is carried now."""
        exchange = self.exchange
        kept = sealed.copied(exchange.workers[0]), sealed.copied(exchange.joint)

        def restore() -> None:
            for carried, before in zip((exchange.workers[0], exchange.joint), kept, strict=True):
                for own, old in zip(carried, before, strict=True):
                    own.clear()
                    own.update(old)

        return restore


class _Module:
    """One module's exchanges: what FSDP calls in the place of its reduce-scatter, and after it."""

    def __init__(self, hook: ShardHook, known: Sharded, layout: Layout, start: int) -> None:
        self.hook, self.known, self.name = hook, known, known.name
        self.layout, self.start = layout, start
        self.rank, self.clock, self.step = known.group.rank(), Totals(known.device), 0
        self.dtypes = {
            parameter.name: tensor.dtype
            for parameter, tensor in zip(known.parameters, known.tensors, strict=True)
        }
        self.agreed = False
        """Whether all ranks know of the error that is about to be raised."""
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

    def places(self, replicas: dist.ProcessGroup | None) -> list[tuple[_Level, dist.ProcessGroup]]:
        """Return each exchange with torch's process group of the same ranks."""
        pairs = ((self.inside, self.known.group), (self.between, replicas))
        return [(level, group) for level, group in pairs if level is not None and group is not None]

    def begin(self) -> None:
        """Let FSDP call the exchanges."""
        module = self.known.module
        if self.inside is not None:
            module.set_custom_reduce_scatter(self)
        if self.between is not None:
            module.set_all_reduce_hook(self.over_replicas)
        if not self.levels:
            self.theirs = self.known.known._all_reduce_hook
            module.set_all_reduce_hook(self.count)

    def state(self) -> dict[str, Any]:
        """Return what is carried."""
        return {"step": self.step, "levels": [each.exchange.state_dict() for each in self.levels]}

    def loaded(self, state: Mapping[str, Any]) -> tuple[int, list[Exchange]]:
        """Return the step and the exchanges of a state, whose every entry is checked."""
        step = sealed.integer(f"step of {self.name}", sealed.entry(state, "step"), 0, sealed.STEPS)
        levels = sealed.sequence("levels", sealed.entry(state, "levels"), len(self.levels))
        made = [level.made(step) for level in self.levels]
        before = [level.world.traffic[0] for level in self.levels]
        try:
            for exchange, each in zip(made, levels, strict=True):
                exchange.load_state_dict(each)
        except UsageError:
            for level, traffic in zip(self.levels, before, strict=True):
                level.world.traffic[0] = traffic
            raise
        return step, made

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
        assert self.inside is not None
        gradients: list[Tensor] = []

        def looked() -> None:
            self._check_call(input_tensor, group, op)
            gradients[:] = self.layout.take(input_tensor)
            self._check_finite(gradients, range(self.layout.ranks))

        with self.hook._exchanging(self):
            if self.name in self.hook._reduced:
                self.hook._new_step()
            self.hook._reduced.add(self.name)
            if self._agree("reduce-scatter", looked):
                self._reduce(self.inside, output_tensor, gradients, op)
            else:
                output_tensor.fill_(torch.nan)
            if self.between is None:
                self.step += 1

    def over_replicas(self, shard: Tensor) -> None:
        """Put the mean over the replicas in the place of this rank's row, shape (row,).

        Raises:
            GcbenchError: the exchange broke off, or FSDP asks for what cannot be compressed.
        """
        assert self.between is not None

        def looked() -> None:
            self._check_elements(shard.numel(), self.layout.row)
            self._check_finite(self.layout.own(shard, self.rank), [self.rank])

        with self.hook._exchanging(self):
            if self.hook._skipping is None and self._agree("exchange between replicas", looked):
                if self.hook.settings.between is None:
                    self._plain_mean(shard, self.between.world)
                else:
                    self._exchange(shard, self.between)
            else:
                shard.fill_(torch.nan)
            self.step += 1

    def count(self, shard: Tensor) -> None:
        """Count a step of one shard without replicas, whose gradient is the mean as it is."""
        if self.theirs is not None:
            self.theirs(shard)
        self.step += 1

    # -- exchanges ---------------------------------------------------------------------------------

    def _agree(self, position: str, look: Callable[[], None]) -> bool:
        """Return whether all ranks go on; False: the step is skipped.

        `position`: what this rank is about to do. `look`: raises what is wrong on this rank. The
        ranks that shard the module agree first, then the replicas of each shard, so that the ranks
        of all replicas know.

        Raises:
            GcbenchError: what a rank has found, on every rank.
        """
        hook, fault = self.hook, self.hook._skipping
        if fault is None:
            try:
                look()
            except GcbenchError as error:
                fault = Fault.of(error, self.step)
        names = [parameter.name for parameter in self.layout.parameters]
        position = f"{position} of {self.name}"
        common = hook._common(position, self.step, names, hook._rates.of(names))
        for level in self.levels:
            fault = agreement.agree(level.exchange, fault, common)
        if fault is None:
            return True
        if fault.kind == "diverged" and hook.settings.on_nonfinite == "skip":
            hook._skip(fault)
            return False
        self.agreed = True
        raise fault.error

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
            remedy = "use all of them, or take a newer torch"
            if sharded.takes_unused():
                remedy = "call model.set_reduce_scatter_unused_params(True)"
            raise UsageError(
                f"{self.name}: {came} elements came and {expected} are those of all its "
                f"parameters. Does the loss not use some of them? Then {remedy}. Freeze parameters "
                "before register"
            )

    def _reduce(
        self,
        level: _Level,
        output: Tensor,
        gradients: Sequence[Tensor],
        op: Any,
    ) -> None:
        """Exchange the gradients among the ranks that shard the module."""
        layout, world = self.layout, level.world
        exchange = self._ready(level, gradients)
        output.zero_()
        wrong: list[DivergedError] = []
        for number, parameters in enumerate(layout.lanes()):
            (shard,) = exchange.lane_shards(number, [gradients[number]], self.step)
            if op == dist.ReduceOp.SUM:
                shard.mul_(world.size)
            self._look_at_mean(exchange.lanes[number], parameters, shard, output.dtype, wrong)
            layout.give(parameters, shard, output, self.rank)
        self._agree_on_means(wrong)

    def _look_at_mean(
        self,
        lane: Lane,
        parameters: Sequence[Parameter],
        shard: Tensor,
        dtype: torch.dtype,
        wrong: list[DivergedError],
    ) -> None:
        """Add to `wrong` an error for each mean that the gradient's or parameter's dtype loses."""
        for parameter, piece in self.layout.pieces(parameters, shard, [self.rank]):
            for each in dict.fromkeys((dtype, self.dtypes[parameter.name])):
                if not check.fits(piece, each):
                    words = lane.compressor, parameter.name, piece, each, self.step
                    wrong.append(check.overflowed(*words))
                    break

    def _agree_on_means(self, wrong: Sequence[DivergedError], shared: Tensor | None = None) -> None:
        """Raise the first rank's error, on every rank: a mean that overflows is its owner's alone.

        `shared`: the mean that must have the same bits on all replicas.

        Raises:
            DivergedError: a mean does not fit its parameter's dtype.
            UsageError: the replicas decoded different means.
        """
        fault = Fault.of(wrong[0], self.step) if wrong else None
        for level in self.levels:
            values = {"position": f"means of {self.name}", "step": self.step}
            if level is self.between and shared is not None:
                values["mean"] = agreement.digest(shared)
            fault = agreement.agree(level.exchange, fault, Common.of(values))
        if fault is not None:
            self.agreed = True
            raise fault.error

    def _plain_mean(self, shard: Tensor, world: DistributedWorld) -> None:
        """Take the mean over the replicas in fp32."""
        with self.clock.phase("communicate"):
            shard.copy_(world.all_reduce([shard.float()], "sum").div_(world.size))

    def _exchange(self, shard: Tensor, level: _Level) -> None:
        """Exchange this rank's shard among its replicas; padding is not sent."""
        layout = self.layout
        own = layout.own(shard, self.rank)
        exchange = self._ready(level, own)
        wrong: list[DivergedError] = []
        for number, (parameters, x) in enumerate(zip(layout.lanes(), own, strict=True)):
            if x.numel():  # else it is empty on all replicas
                mean = exchange.lane_mean(number, [x], self.step)
                self._look_at_mean(exchange.lanes[number], parameters, mean, shard.dtype, wrong)
                layout.give(parameters, mean, shard, self.rank)
        self._agree_on_means(wrong, shard)

    def _ready(self, level: _Level, gradients: Sequence[Tensor]) -> Exchange:
        """Return the exchange of a level as it is at this step."""
        hook, exchange = self.hook, level.exchange
        if hook.settings.on_nonfinite == "skip":
            hook._undo.append(level.undo())
        if self.step in level.stages and self.step:
            exchange.change(level.lanes(self.step))
        rates, scale = level.rates(hook._rates), hook._rates.scale
        exchange.follow(rates, scale)
        by_name = {
            name: rate
            for lane, own in zip(level.names, rates, strict=True)
            for (name, _), rate in zip(lane, own, strict=True)
        }
        if level.watch.due(self.step, by_name, scale) and not hook._watch.warned:
            self._look(level, gradients)
        return exchange

    def _look(self, level: _Level, gradients: Sequence[Tensor]) -> None:
        """Warn if a residual is far larger than the gradient that it is about to be added to."""
        squares: dict[str, Tensor] = {}
        for number, names in enumerate(level.names):
            state: State = level.exchange.workers[0][number]
            for name in level.exchange.lanes[number].memory.residuals:
                for (parameter, _), part in zip(names, level.exchange.parts[number], strict=True):
                    both = torch.stack(
                        [x[part].double().square().sum() for x in (state[name], gradients[number])]
                    )
                    squares[parameter] = squares[parameter] + both if parameter in squares else both
        for parameter, both in squares.items():
            residual, gradient = both.sqrt().tolist()
            level.watch.look(parameter, residual, gradient)
        self.hook._watch.warned |= level.watch.warned

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


def _add(total: Traffic, own: Traffic) -> None:
    total.payload_up += own.payload_up
    total.payload_down += own.payload_down
    total.wire += own.wire


def _total(levels: Sequence[_Level]) -> Traffic:
    """Return the bytes of this rank in all of these exchanges."""
    total = Traffic()
    for level in levels:
        _add(total, level.world.traffic[0])
    return total
