"""Gradient compression inside FSDP2: `gcbench.shard_hook(...).register(model)`.

A module after `torch.distributed.fsdp.fully_shard` ends its backward pass with one reduce-scatter:
each rank sends every other rank the chunks of its gradients that the other one owns, and receives
the mean of its own. That is the first half of a two-shot exchange. Here the chunks are sent
compressed; their owner decodes them and computes their mean in float32, which is not encoded again.
The exchange is `gcbench.core.exchange.Exchange.lane_shards`.

The hook has a process group of its own for each group of ranks. FSDP's all-gathers of parameters
use it as well, in FSDP's order. A rank that fails ends its groups, so the others stop at their next
collective, wherever they are in a forward or backward pass.

With hybrid sharding every shard has replicas on other nodes, and their mean is a second level: by
default an all-reduce in fp32, with `between` an exchange by any method (`Exchange.lane_mean`),
after which all replicas of a shard have the same bits.

FSDP's input has no names of parameters: per rank, then per parameter, it has a chunk of whole rows,
the last ones shorter and padded with zeros. `gcbench.integrations.layout` finds the chunks; padding
is not sent, and chunks of two ranks share no scale.

Tested with torch 2.13 and gloo on a CPU. It has never run with streams on a GPU.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from gcbench.core import sealed
from gcbench.core.clock import Totals
from gcbench.core.compressor import Compressor, Segments
from gcbench.core.errors import DivergedError, GcbenchError, UsageError
from gcbench.core.exchange import Buffers, Exchange, Lane, exact_or, lane_of
from gcbench.core.memory import Memory
from gcbench.core.world import Traffic
from gcbench.integrations import agreement, arguments, check, handshake, sharded
from gcbench.integrations.agreement import Common
from gcbench.integrations.handshake import Roster
from gcbench.integrations.hook import (
    Hook,
    HookSettings,
    Observer,
    RankState,
    observe_loads,
    total,
)
from gcbench.integrations.hook_world import HookWorld
from gcbench.integrations.layout import Layout
from gcbench.integrations.level import Level
from gcbench.integrations.rates import Rates
from gcbench.integrations.scheme import Scheme
from gcbench.integrations.sharded import Sharded

UNFREEZE_FIRST = "Set requires_grad first, then shard the module and register a new hook"
"""What to do if a parameter began to require a gradient after `register`."""
SHARDS = "shard of each module, equal on replicas"
"""Name under which replicas compare which shards they have."""


@dataclass(frozen=True, kw_only=True)
class Settings(HookSettings):
    """The arguments of `shard_hook`."""

    between: Scheme | None
    """How the replicas of a shard exchange it; None: in fp32."""

    @property
    def stages(self) -> list[int]:
        """The exchanges, from 0 on, at which the exchange of a lane may change."""
        later = {} if self.between is None else self.between.later
        return sorted({*super().stages, *later})

    @property
    def momentum(self) -> Memory | None:
        """The memory that applies momentum, at either level, if any."""
        second = None if self.between is None else self.between.memory
        return super().momentum or (second if second and second.has_momentum else None)


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

    Call `hook.register(model)` on every rank, after `fully_shard` on the model and those of its
    modules that need their own reduce-scatter. The all-gathers of parameters do not change.

    Error feedback stores on every rank the error of its whole gradient: 4 bytes per element of the
    unsharded model; `memory="none"` stores nothing. Error feedback between replicas stores the
    error of the rank's shard: 4 bytes per element of the shard.

    Args:
        compressor: a registered name that `gcbench list compressors` shows with the collective
            twoshot, or such a compressor, or a file with one (./mine.py).
        memory: name or file of the memory; default the method's. With `momentum` and `dgc` the
            optimizer must not have a momentum.
        memory_options: fields of the memory.
        dense_below: parameters of fewer elements, in all chunks together, stay in fp32, also
            between replicas.
        start_step: exchanges of a module before it are in fp32, also between replicas.
        seed: of random numbers; models trained at the same time should have different ones.
        between: for hybrid sharding, the compressor with which the replicas of a shard exchange
            it, by the first of its collectives: a name, a file or a compressor. SDP4Bit's two
            levels are `shard_hook("int8", between="hadamard4")`. Default: fp32.
        between_options: fields of `between`.
        between_memory: as `memory`, for the exchange between replicas. Error feedback may be used
            at both levels; each stores its own error.
        between_memory_options: fields of `between_memory`.
        timeout: seconds that a rank waits for the others in `register` and in a collective, also
            when FSDP gathers parameters.
        optimizer: the optimizer of the model's parameters, or a list of them: residuals follow the
            learning rate of their parameter's group. You may pass it to `register` instead. Without
            it set `hook.lr` at each step, if the rate changes.
        scaler: the torch.amp.GradScaler that scales the loss. The exchange divides gradients by
            its scale and multiplies their mean by it, so that training is the same as without one.
        on_nonfinite: what to do if a rank's gradient is not finite. "stop": every rank raises
            DivergedError, which names that rank and the parameter. "skip": residuals return to
            their values before this backward pass, and the gradients of this module and the
            following ones are NaN on every rank, so that all ranks can skip the optimizer's step.
            Default: "skip" with an enabled scaler, else "stop".
        on_resize: only "refuse": refuse a state that was saved with another number of ranks. Only
            `comm_hook` can redistribute one.
        options: fields of the compressor, each a value or a schedule by step: "0:0.25/100:0.01" or
            {0: 0.25, 100: 0.01}.

    Raises:
        gcbench.core.errors.UsageError: an unknown name, field or value, or a method or memory that
            needs more than each rank's shard.
    """
    call = locals()
    if arguments.checked(call)["on_resize"] != "refuse":
        raise UsageError(
            f"on_resize={on_resize!r}: with FSDP another number of ranks splits parameters at "
            'other positions, and residuals are not redistributed. Only "refuse" is allowed: '
            "continue with the same number of ranks, or register a hook without a state"
        )
    second = None
    if between is not None:
        second = Scheme.of(between, between_options, between_memory, between_memory_options)
    for name in ("between_options", "between_memory", "between_memory_options"):
        if second is None and call[name] is not None:
            raise UsageError(
                f"{name}={call[name]!r} without between: name the method by which replicas "
                'exchange their shards, between="hadamard4", or leave it out'
            )
    settings = Settings.of_call(call, collective="twoshot", between=second)
    for method in settings.methods.values():
        legal = method.legal_collectives()
        if "twoshot" not in legal:
            raise UsageError(
                f"{method!r} is exchanged by {', '.join(legal)}, where every rank gets every "
                "element. With FSDP each rank gets only its shard, which is half of a twoshot "
                "exchange. Use a method that gcbench list compressors shows with twoshot"
            )
    for method in (*settings.methods.values(), *(second.methods.values() if second else ())):
        if not method.rule.plain:
            raise UsageError(
                f"the update rule of {method!r} needs the whole mean on every rank, and with FSDP "
                "each rank has only its shard. Use DistributedDataParallel and gcbench.comm_hook"
            )
    if settings.memory.joint:
        raise UsageError(
            f"{settings.memory!r} stores {', '.join(settings.memory.joint)} of the whole mean on "
            "every rank, and with FSDP each rank has only its shard. Use another memory"
        )
    if second is not None and settings.memory.has_momentum and second.memory.has_momentum:
        raise UsageError(
            f"memory {settings.memory!r} and between_memory {second.memory!r} would both apply "
            "momentum. Leave one of them out"
        )
    return ShardHook(settings, Rates(optimizer, scaler, settings.unsuitable))


def lanes(
    settings: Settings, layout: Layout, start: int, step: int, skipped: int = 0
) -> list[Lane]:
    """Return how the ranks that shard a module exchange its lanes from `step` on.

    `start`: index of the module's first element among all that the model exchanges, which addresses
    random numbers. `skipped`: skipped steps before it.
    """
    result = []
    for parameters in layout.lanes():
        exact = layout.is_dense(parameters) or settings.warms_up(step, skipped)
        compressor, collective, memory = settings.at(step)
        method, memory = exact_or(compressor, memory, exact=exact)
        offsets, edges = [0], [0]
        for rank in range(layout.ranks):
            # Each rank's chunks separately: no segment crosses the edge of a rank's chunks.
            segments = Segments.of(layout.shapes(parameters, rank), method.granularity)
            offsets += [edges[-1] + offset for offset in segments.offsets[1:]]
            edges.append(edges[-1] + segments.numel)
        whole = Segments(tuple(offsets))
        result.append(Lane(method, collective, start, whole, memory, tuple(edges)))
        start += whole.numel
    return result


def replica_lanes(
    settings: Settings, layout: Layout, rank: int, start: int, step: int, skipped: int = 0
) -> list[Lane]:
    """Return how the replicas of a module's shard exchange it from `step` on.

    They are the lanes of `lanes` with the chunks of one `rank`; one may be empty. `start` and
    `skipped` as there.
    """
    between = settings.between or Scheme.of("none", None, None, None)
    result = []
    for parameters in layout.lanes():
        exact = layout.is_dense(parameters) or settings.warms_up(step, skipped)
        shapes = layout.shapes(parameters, rank)
        result.append(lane_of(shapes, start, *between.at(step), exact=exact))
        start += result[-1].segments.numel
    return result


class ShardHook(Hook):
    """One FSDP2 model's compressed reduce-scatters, created by `shard_hook`."""

    CALL = "gcbench.shard_hook"
    FORMAT = 4
    BYPASSED = "not of another one, and not with set_requires_gradient_sync(False) at every step"
    REPLACED = (
        "call fully_shard on a new model and register a new hook; this one's state keeps the "
        "residuals"
    )

    def __init__(self, settings: Settings, rates: Rates) -> None:
        super().__init__(settings, rates)
        self._modules: list[_Module] = []
        self._skipping: GcbenchError | None = None
        """Why nothing is exchanged until the next step."""
        self._undo: list[Callable[[], None]] = []
        """Functions that revert the exchanges of this backward pass, if steps may be skipped."""
        self._reduced: dict[str, _Module] = {}
        """The modules exchanged in it, by name: each is exchanged once per step."""
        self._graphs: set[int] = set()
        """torch's numbers of the graphs that this backward pass has computed."""
        self._root: Callable[[], nn.Module | None] = lambda: None
        self._in_forward = False
        """Whether a forward pass of the model has begun and has not ended."""
        self._frozen_shards: list[tuple[str, Any]] = []
        """Sharded parameters that required no gradient at `register`, for `requires_grad`; without
        those of modules that are exchanged."""
        self._warned_momentum = False
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

        One shard exchanges nothing. A memory with momentum then applies none, and a warning says
        so.

        Args:
            model: the hook serves each of its modules that `fully_shard` was called on.
            replicas: for hybrid sharding, the ranks that have the same shard: shard over one
                dimension of a mesh, `fully_shard(..., mesh=mesh["shard"])`, and pass the other,
                `mesh["replicate"]`. After the compressed reduce-scatter they exchange their shards
                as `between` says.
            optimizer: as for `shard_hook`, if not passed there.
            scaler: as for `shard_hook`, if not passed there. `on_nonfinite` does not change.

        Raises:
            gcbench.core.errors.UsageError: this model cannot be compressed, or the ranks registered
                different settings: on every rank, with the remedy.
            gcbench.core.errors.PeerLostError: another rank did not register.
        """
        modules, group = sharded.modules(model), sharded.group_of(replicas)
        self._size = dist.get_world_size()
        stores, roster = self._prepare_and_meet(
            lambda: self._prepare(modules, group),
            lambda refused: self._meet(modules, group, refused),
            optimizer,
            scaler,
        )
        if replicas is None and (beside := modules[0].beside):
            warnings.warn(
                f"{modules[0].name} is sharded over one dimension of a mesh that also has "
                f"{', '.join(beside)}, and register received no replicas. If these ranks train the "
                "same model, nothing averages their gradients, and they drift apart: "
                f'hook.register(model, replicas=mesh["{beside[0]}"])',
                stacklevel=2,
            )
        self._warn_idle_momentum()
        # Each exchange checks those of its module.
        checked = {id(record) for each in modules for _, record in each.frozen}
        frozen = sharded.frozen(model)
        self._frozen_shards = [each for each in frozen if id(each[1]) not in checked]
        self._root = weakref.ref(model)
        self._begin(model, modules[0].device, group, stores, roster)
        for each in {id(m): m for m in (model, *(each.module for each in modules))}.values():
            each.register_forward_pre_hook(Observer(self._before_forward, warns=True), prepend=True)
        model.register_forward_hook(Observer(self._after_forward))
        observe_loads(model, self._before_load)
        return self

    @property
    def step(self) -> int:
        """Maximum number of exchanges of a module: backward passes that reduce gradients.

        One shard without replicas exchanges nothing, and its backward passes are counted.
        """
        return max((module.step for module in self._modules), default=0)

    @property
    def traffic_between(self) -> Traffic:
        """The part of `traffic` between replicas."""
        levels = (module.between for module in self._modules)
        return total(level.world.traffic[0] for level in levels if level is not None)

    @property
    def plain_bytes(self) -> float:
        """Bytes that this rank would have sent in fp32, without FSDP's padding."""
        pairs = ((module.step, level) for module in self._modules for level in module.levels)
        return 4.0 * sum(step * level.numel for step, level in pairs)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of all exchanges by phase: statistic, encode, communicate, decode."""
        seconds: dict[str, float] = {}
        for module in self._modules:
            for phase, each in module.clock.seconds.items():
                seconds[phase] = seconds.get(phase, 0.0) + each
        return seconds

    # -- registration ------------------------------------------------------------------------------

    def _prepare(
        self, modules: Sequence[Sharded], replicas: dist.ProcessGroup | None
    ) -> Mapping[str, Tensor]:
        """Make the exchanges, without their process groups; return the parameters by name.

        Seeds differ between shard groups, or replicas would round alike; and between the replicas
        of one shard and those of the next.
        """
        settings, start = self.settings, 0
        if settings.between is not None and replicas is None:
            raise UsageError(
                f"between={settings.between.compressor!r} defines how replicas exchange their "
                "shards, but register received no replicas: hook.register(model, "
                'replicas=mesh["replicate"]), or leave between out'
            )
        for each in modules:
            each.examine(replicas)
        layouts = [each.layout(settings.dense_below) for each in modules]
        self._summary = self._summarized(modules, layouts, replicas)
        number, count = (0, 1) if replicas is None else (replicas.rank(), replicas.size())
        # Exchanges of one kind run one after the other; on a GPU the two kinds have two streams.
        buffers = Buffers(modules[0].device), Buffers(modules[0].device)
        self._modules = []
        for each, layout in zip(modules, layouts, strict=True):
            module, rank = _Module(self, each, layout, start), each.group.rank()
            if each.group.size() > 1:
                module.inside = Level(
                    self._world_of(each.group, each.device),
                    partial(lanes, settings, layout, start),
                    settings.stages,
                    layout.parts(range(layout.ranks)),
                    settings.seed + (number << 32),
                    module.clock,
                    owns_shards=False,
                    buffers=buffers[0],
                )
            if replicas is not None and count > 1:
                module.between = Level(
                    self._world_of(replicas, each.device),
                    partial(replica_lanes, settings, layout, rank, start),
                    settings.stages,
                    layout.parts([rank]),
                    settings.seed + (count + rank << 32),
                    module.clock,
                    buffers=buffers[1],
                )
            self._modules.append(module)
            start += layout.numel
        self._module_of = {p.name: m for m in self._modules for p in m.target.parameters}
        return self._tensors()

    def _direction(self, parameter: Tensor) -> tuple[Tensor, Tensor, Compressor] | None:
        grad: Any = parameter.grad
        for vote, module in ((each.vote, each) for each in self._modules):
            if grad is not None and vote and module.target.named[vote.name] is parameter:
                return grad.to_local(), vote.value, vote.method
        return None

    def _tensors(self) -> dict[str, Any]:
        """Return the parameters by name, as optimizers have them."""
        return {n: shard for each in self._modules for n, shard in each.target.named.items()}

    def _summarized(
        self,
        modules: Sequence[Sharded],
        layouts: Sequence[Layout],
        replicas: dist.ProcessGroup | None,
    ) -> dict[str, Any]:
        """Return what must be the same on all ranks, by a readable name."""
        settings = self.settings
        between = {} if settings.between is None else settings.between.summary()
        numel = sum(layout.numel for layout in layouts)
        layout = [(each.name, each.dtypes) for each in modules], layouts
        count = sum(len(layout.parameters) for layout in layouts)
        return {
            **self._summarize(count, numel, layout),
            **{
                f"between {name}": between.get(name)
                for name in (
                    *("compressor", "code of compressor", "collective"),
                    *("memory", "code of memory"),
                )
            },
            "replicas": 1 if replicas is None else replicas.size(),
        }

    def _meet(
        self,
        modules: Sequence[Sharded],
        replicas: dist.ProcessGroup | None,
        refused: str,
    ) -> tuple[dict[str, Store], Roster]:
        """Compare the settings of all ranks in every process group; return a store per group.

        Replicas also compare which shard of each module they have, and its parameters. The roster
        has all ranks.
        """
        groups = {each.group.group_name: each.group for each in modules}
        meetings = [(group, self._summary) for group in groups.values()]
        if replicas is not None:  # first: the ranks of a shard group learn what one replica finds
            shared: dict[str, Any] = {SHARDS: [each.group.rank() for each in modules]}
            if not refused and not any(shard.is_meta for shard in self._watched()):
                shared["parameters (digest)"] = agreement.digest_of(self._watched())
            meetings.insert(0, (replicas, {**self._summary, **shared}))
        stores: dict[str, Store] = {}
        first: GcbenchError | None = None
        roster = Roster.alone()
        for number, (group, each) in enumerate(meetings):
            # Ranks that timed out in an earlier meeting arrive at the next one later.
            seconds = (number + 1) * self._patience
            try:
                store, roster = handshake.meet(group, each, refused, seconds, roster)
                stores[group.group_name] = store
            except GcbenchError as error:  # report it to the ranks of the other groups, too
                first, refused = first or error, refused or str(error)
        if first is not None:
            raise first
        return stores, roster

    def _begin(
        self,
        model: nn.Module,
        device: torch.device,
        replicas: dist.ProcessGroup | None,
        stores: Mapping[str, Store],
        roster: Roster,
    ) -> None:
        """Create a process group for each group of ranks, and let FSDP call the hook.

        FSDP gathers its parameters in the same groups, so a rank that waits there stops as well
        when another one fails.
        """
        groups = {
            group.group_name: group
            for module in self._modules
            for _, group in module.places(replicas)
        }
        self._groups = {name: self._world_of(group, device) for name, group in groups.items()}
        with self._exchanging():
            for name, world in self._groups.items():
                world.connect(stores[name], roster)
        for module in self._modules:
            for level, group in module.places(replicas):
                level.world.join(self._groups[group.group_name])
            module.begin()
        for each, param_group in sharded.gathering(model):
            name = param_group.mesh_info.shard_process_group.group_name
            if name in self._groups:
                gather = _Gather(self, self._groups[name], param_group._all_gather_comm)
                each.set_custom_all_gather(gather)

    def _fresh(self, name: str) -> int:
        return self._module_of[name].fresh

    def _levels(self) -> list[Level]:
        return [level for module in self._modules for level in module.levels]

    def _watched(self) -> list[Tensor]:
        return [shard.to_local() for shard in self._tensors().values()]

    def _worlds(self) -> list[HookWorld]:
        return [*(level.world for level in self._levels()), *self._groups.values()]

    # -- state -------------------------------------------------------------------------------------

    def _state(self) -> RankState:
        modules = {module.name: module.state() for module in self._modules}
        return self._sealed(dist.get_rank(), {"modules": modules})

    def _adopt(self, state: Mapping[str, Any]) -> None:
        entry = self._entry(state, dist.get_rank(), dist.get_world_size())
        modules = sealed.entry(entry, "modules")
        loaded = [module.loaded(sealed.entry(modules, module.name)) for module in self._modules]
        for module, (step, exchanges) in zip(self._modules, loaded, strict=True):
            module.step = step
            for level, exchange in zip(module.levels, exchanges, strict=True):
                level.exchange = exchange

    # -- training ----------------------------------------------------------------------------------

    def _before_forward(self, model: nn.Module) -> None:
        """Raise the error that ended the last exchange; else begin a step."""
        root = model is self._root()
        if torch.is_grad_enabled() or (root and self._failed is not None):
            self.raise_failure()
        if not root or torch._C._current_graph_task_id() != -1:
            return  # in a backward pass activation checkpointing computes the forward pass again
        if torch.is_grad_enabled():
            self._check_frozen()
            with self._exchanging():  # `load_state_dict(assign=True)` makes new parameters
                self._rates.locate(self._tensors())
            if model.training:
                self._compare_loaded()
        unfinished = "forward" if self._in_forward else "backward"
        if self._in_forward or sharded.in_backward(model):
            # FSDP skipped collectives, so the next ones would not match.
            error = UsageError(
                f"rank {dist.get_rank()}: the last {unfinished} pass did not finish, so the ranks "
                "cannot continue together. Was an error caught there? Restart from a checkpoint"
            )
            self._fail(error)
            raise error
        self._in_forward = True
        self._new_step()

    def _warn_idle_momentum(self) -> None:
        """Warn about a memory whose momentum is not applied, as a group has one rank."""
        memory = self.settings.momentum
        if memory is None:
            return
        inside = memory is self.settings.memory
        idle = [m.name for m in self._modules if (m.inside if inside else m.between) is None]
        if idle:
            what = "shard" if inside else "replica"
            warnings.warn(
                f"{idle[0]} has one {what}, so nothing is exchanged there and the memory "
                f"{memory!r} applies no momentum. Train such a job with another memory, and with "
                "an optimizer that has a momentum",
                stacklevel=3,
            )

    def _check_frozen(self) -> None:
        """Warn once about parameters that began to require a gradient after `register`."""
        names = [
            name for name, parameter in self._frozen_shards if sharded.requires_grad(parameter)
        ]
        if not names:
            return
        text = (
            f"{', '.join(names[:3])} did not require a gradient when the hook was registered and "
            "does now"
        )
        if any(module.between is not None for module in self._modules):
            error = UsageError(
                f"rank {dist.get_rank()}: {text}. Its gradient is not averaged over the replicas, "
                f"which would differ. {UNFREEZE_FIRST}"
            )
            self._fail(error)
            raise error
        self._frozen_shards = []
        warnings.warn(f"{text}. Its gradient is not compressed. {UNFREEZE_FIRST}", stacklevel=3)

    def _after_forward(self, model: nn.Module) -> None:
        self._in_forward = False

    def _new_step(self) -> None:
        self._skipping, self._undo = None, []
        self._reduced, self._graphs = {}, set()

    def _follow_pass(self, module: _Module) -> None:
        """Begin a step at the first exchange of a backward pass; add this one to it.

        The forward pass of `register`'s model also begins one. But a job may call only parts of it,
        such as a generator and a discriminator, whose backward passes follow each other.
        """
        graph, earlier = torch._C._current_graph_task_id(), self._reduced
        goes_on = graph in self._graphs or any(
            sharded.in_backward(each.target.module) for each in earlier.values()
        )  # activation checkpointing has graphs of its own inside a backward pass
        if module.name in earlier or not goes_on:
            self._new_step()
        self._graphs.add(graph)
        self._reduced[module.name] = module

    def _warn_momentum(self) -> None:
        """Warn, once, that a momentum advances at each of a step's backward passes."""
        memory = self.settings.momentum
        if memory is not None and not self._warned_momentum:
            self._warned_momentum = True
            warnings.warn(
                f"the memory {memory!r} advances its momentum at each of several backward passes "
                "per optimizer step, as if each were a step. Call "
                "model.set_requires_gradient_sync(False) before all of them but the last, and "
                "(True) before the last",
                stacklevel=2,
            )

    def _skip(self, error: GcbenchError) -> None:
        """Revert the exchanges of this backward pass; exchange nothing until the next step."""
        if self._skipping is None:
            self._skipping = error
            self._skipped += 1
            for undo in self._undo:
                undo()
            self._undo = []
            for module in self._reduced.values():
                module.added += not module.stale
                module.stale = True


class _Vote(NamedTuple):
    """A result of an exchange that has a fixed length."""

    name: str
    """Of the parameter."""
    value: Tensor
    """This rank's part of it, as FSDP adds it to the gradient."""
    method: Compressor


class _Collective:
    """What FSDP calls instead of one of its collectives."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for FSDP's input or output."""
        return torch.empty(size, dtype=dtype, device=device)


class _Gather(_Collective):
    """Gathers parameters instead of FSDP, in the hook's process group."""

    def __init__(self, hook: ShardHook, world: HookWorld, original: Any) -> None:
        """`original`: torch's all-gather, which does the work."""
        self.hook, self.world, self.original = hook, world, original

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Write all ranks' inputs to the output, by rank."""
        same = (group.rank(), group.size()) == (self.world.ranks[0], self.world.size)
        with self.hook._exchanging(), self.world.together():
            return self.original(
                output_tensor,
                input_tensor,
                group=self.world.group if same else group,
                async_op=async_op,
            )


class _Module(_Collective):
    """One module's exchanges, which FSDP calls instead of its reduce-scatter, and after it."""

    def __init__(self, hook: ShardHook, target: Sharded, layout: Layout, start: int) -> None:
        """`start`: as for `lanes`."""
        self.start = start
        self.hook, self.target, self.name, self.layout = hook, target, target.name, layout
        self.rank, self.clock, self.step = target.group.rank(), Totals(target.device), 0
        self.dtypes = {name: shard.dtype for name, shard in target.named.items()}
        self.added = 0
        """Exchanges that were skipped, or whose mean FSDP added to one that no optimizer had
        applied."""
        self.stale = False
        """Whether the last exchange is one of them."""
        self.misfit: GcbenchError | None = None
        """Why a mean of the last exchange cannot be applied, on this rank."""
        self.divisor = 1
        """By what FSDP divides the result of the exchange."""
        self.vote: _Vote | None = None
        """Of the last exchange, before steps 1, 2, 4, ..., at which `Rates` looks at it."""
        self.inside: Level | None = None
        """None: the module has one shard."""
        self.between: Level | None = None
        """None: a shard has no replicas."""
        self.user_hook: Callable[[Tensor], None] | None = None
        """The user's all-reduce hook, which `count` replaces."""

    @property
    def fresh(self) -> int:
        """Exchanges without `added`."""
        return self.step - self.added

    @property
    def levels(self) -> list[Level]:
        """The exchanges of this module."""
        return [level for level in (self.inside, self.between) if level is not None]

    def places(self, replicas: dist.ProcessGroup | None) -> list[tuple[Level, dist.ProcessGroup]]:
        """Return each exchange with torch's process group of the same ranks."""
        pairs = ((self.inside, self.target.group), (self.between, replicas))
        return [(level, group) for level, group in pairs if level is not None and group is not None]

    def begin(self) -> None:
        """Let FSDP call the exchanges."""
        module = self.target.module
        if self.inside is not None:
            module.set_custom_reduce_scatter(self)
        if self.between is not None:
            module.set_all_reduce_hook(self.over_replicas)
        if not self.levels:
            self.user_hook = self.target.param_group._all_reduce_hook
            module.set_all_reduce_hook(self.count)

    def state(self) -> dict[str, Any]:
        """Return the state of the exchanges."""
        return {"step": self.step, "levels": [each.exchange.state_dict() for each in self.levels]}

    def loaded(self, state: Mapping[str, Any]) -> tuple[int, list[Exchange]]:
        """Return the step and the exchanges of a state, after all its entries are checked."""
        step = sealed.integer(f"step of {self.name}", sealed.entry(state, "step"), 0, sealed.STEPS)
        levels = sealed.sequence("levels", sealed.entry(state, "levels"), len(self.levels))
        exchanges = [level.make(step) for level in self.levels]
        before = [level.world.traffic[0] for level in self.levels]
        try:
            for exchange, each in zip(exchanges, levels, strict=True):
                exchange.load_state_dict(each)
        except UsageError:
            for level, traffic in zip(self.levels, before, strict=True):
                level.world.traffic[0] = traffic
            raise
        return step, exchanges

    # -- called by FSDP ----------------------------------------------------------------------------

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Write the mean of this rank's row over all ranks' inputs to the output, shape (row,)."""
        layout, level = self.layout, self.inside
        assert level is not None

        def gradients() -> list[Tensor]:
            self._check_call(level.world, input_tensor, group, op)
            return layout.take(input_tensor, range(layout.ranks))

        with self.hook._exchanging():
            self._count_exchange()
            taken = self._agree("reduce-scatter", level, gradients)
            output_tensor.fill_(torch.nan if taken is None else 0)  # zero in padding
            if taken is None:
                level.begin(self.step, self.hook._rates)  # a stage may begin at a skipped step
            else:
                self.divisor = level.world.size if op == dist.ReduceOp.SUM else 1

                def shard(number: int, x: Tensor) -> Tensor:
                    (mean,) = level.exchange.lane_shards(number, [x], self.step)
                    return mean.mul_(self.divisor)

                self._exchange(level, taken, output_tensor, shard)
                self._agree_on_means()
            if self.between is None:
                self.step += 1

    def over_replicas(self, row: Tensor) -> None:
        """Replace this rank's row, shape (row,), by the mean over the replicas."""
        level = self.between
        assert level is not None

        def gradients() -> list[Tensor]:
            self._check_elements(row.numel(), self.layout.row)
            return self.layout.take(row, [self.rank])

        with self.hook._exchanging():
            taken = None
            if self.inside is None:
                self._count_exchange()
            if self.hook._skipping is None:
                taken = self._agree("exchange between replicas", level, gradients)
            if taken is None:
                row.fill_(torch.nan)
                level.begin(self.step, self.hook._rates)
            else:

                def mean(number: int, x: Tensor) -> Tensor:
                    if not x.numel():
                        return x  # an empty lane is empty on all replicas
                    mean = level.exchange.lane_mean(number, [x.div_(self.divisor)], self.step)
                    return mean * self.divisor

                self._exchange(level, taken, row, mean)
                self._agree_on_means(row)
            self.step += 1

    def _count_exchange(self) -> None:
        """Begin a step, if this exchange is the first of a backward pass."""
        self.hook._follow_pass(self)
        accumulates = self.hook._skipping is None and self._accumulates()
        if accumulates:
            self.hook._warn_momentum()
        self.stale, self.vote = self.hook._skipping is not None or accumulates, None
        self.added += self.stale

    def _accumulates(self) -> bool:
        """Return whether FSDP will add this mean to one that no optimizer has applied."""
        return any(
            shard.grad is not None
            and self.hook._rates.waits(name, self.fresh)
            and bool(shard.grad.to_local().any())
            for name, shard in self.target.named.items()
        )

    def count(self, row: Tensor) -> None:
        """Count a step of one shard without replicas, whose gradient is the mean."""
        if self.user_hook is not None:
            self.user_hook(row)
        self.step += 1

    # -- exchanges ---------------------------------------------------------------------------------

    def _agree(
        self, position: str, level: Level, gradients: Callable[[], list[Tensor]]
    ) -> list[Tensor] | None:
        """Return the gradients of all lanes of a level; None: the step is skipped.

        The ranks that shard the module agree first, then the replicas of each shard, so that the
        ranks of all replicas learn of a fault.

        Args:
            position: the collective that this rank is about to call.
            level: the exchange whose gradients these are.
            gradients: returns them, or raises what is wrong on this rank.
        """
        hook, error, taken = self.hook, self.hook._skipping, None
        if error is None:
            try:
                taken = gradients()
            except GcbenchError as refused:
                error = refused.with_traceback(None)
        for number, x in enumerate(taken or []):
            error = error or level.diverged(number, x, self.step)
        common = hook._common(f"{position} of {self.name}", self.step, self.levels)
        error = hook._agree(self.levels, error, common)
        if error is None:
            return taken
        if isinstance(error, DivergedError) and hook.settings.on_nonfinite == "skip":
            hook._skip(error)
            return None
        raise error

    def _check_call(
        self, world: HookWorld, rows: Tensor, group: dist.ProcessGroup, op: Any
    ) -> None:
        """Raise UsageError if FSDP requests another reduce-scatter than was registered."""
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise UsageError(
                f"{self.name}: FSDP requests neither a mean nor a sum of the ranks, as after "
                "set_gradient_divide_factor. Leave that out and scale the loss"
            )
        if (group.rank(), group.size()) != (self.rank, world.size):
            raise UsageError(
                f"{self.name}: received a process group of {group.size()} ranks, expected "
                f"{world.size}"
            )
        if rows.dtype not in sharded.DTYPES:
            raise UsageError(f"{self.name}: received gradients of {rows.dtype}. {sharded.REDUCE}")
        self._check_elements(rows.numel(), self.layout.ranks * self.layout.row)

    def _check_elements(self, received: int, expected: int) -> None:
        """Raise UsageError if other parameters than those that were registered have a gradient."""
        if unfrozen := self.target.unfrozen:
            text = f"{', '.join(unfrozen[:3])} did not require a gradient when the hook was "
            text += "registered and does now"
            if frozen := self.target.newly_frozen:
                text += f", and {', '.join(frozen[:3])} did and does not now"
            raise UsageError(
                f"rank {dist.get_rank()}: {text}. The residuals of {self.name} belong to the "
                f"parameters that were registered. {UNFREEZE_FIRST}"
            )
        if received != expected:
            remedy = "use all of them, or a newer torch"
            if sharded.takes_unused():
                remedy = "call model.set_reduce_scatter_unused_params(True)"
            raise UsageError(
                f"{self.name}: received {received} elements of gradients, expected {expected} for "
                f"all its parameters. Does the loss not use some of them? Then {remedy}. Freeze "
                "parameters before register"
            )

    def _exchange(
        self,
        level: Level,
        gradients: Sequence[Tensor],
        row: Tensor,
        mean: Callable[[int, Tensor], Tensor],
    ) -> None:
        """Write the mean of this rank's chunks to its row, shape (row,).

        `mean`: exchanges a lane by its number, and returns the mean of this rank's chunks.
        """
        hook, layout, exchange = self.hook, self.layout, level.exchange
        looks, self.misfit = level.begin(self.step, hook._rates), None
        hook._due.update(name for names in level.names for name in names)
        if hook.settings.on_nonfinite == "skip":
            hook._undo.append(level.undo())
        for number, (lane, x) in enumerate(zip(layout.lanes(), gradients, strict=True)):
            level.unscale(x)
            if looks:
                hook._look(level, number, x)
            shard = level.rescale(mean(number, x))
            layout.give(lane, shard, row, self.rank)
            means = [*layout.pieces(lane, shard, self.rank)]
            self._keep_vote(number, means)
            dtypes = {p.name: [*{row.dtype, self.dtypes[p.name]}] for p in lane}
            method = exchange.lanes[number].compressor
            self.misfit = self.misfit or check.misfit(method, means, dtypes, self.step)

    def _keep_vote(self, number: int, means: Sequence[tuple[str, Tensor]]) -> None:
        """Keep the vote of a lane's first parameter that has a part on this rank, if it is a vote.

        `means`: name and result of each of the lane's parameters on this rank.
        """
        if self.stale or self.step & (self.step + 1):
            return
        methods = [level.exchange.lanes[number].compressor for level in self.levels]
        for method in (each for each in methods if each.claims.aggregate == "vote"):
            for name, value in ((name, value) for name, value in means if value.numel()):
                self.vote = _Vote(name, value / self.divisor, method)
                return

    def _agree_on_means(self, shared: Tensor | None = None) -> None:
        """Raise the first rank's error on every rank: a mean that overflows is only on its owner.

        `shared`: the mean that must have the same bits on all replicas.
        """
        error = self.misfit
        for level in self.levels:
            values = {"position": f"means of {self.name}", "step": self.step}
            if level is self.between and shared is not None:
                values["mean"] = agreement.digest(shared)
            error = self.hook._agree([level], error, Common(values))
        if error is not None:
            raise error
