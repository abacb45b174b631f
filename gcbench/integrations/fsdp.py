"""Gradient compression inside FSDP2: `gcbench.shard_hook(...).register(model)`.

A module that went through `torch.distributed.fsdp.fully_shard` ends its backward pass with one
reduce-scatter: each rank hands every other the chunks of its gradients that the other keeps, and
gets the mean of its own. That is the first half of a two-shot exchange. So here the chunks travel
compressed; the rank that keeps them decodes them and takes their mean in float32, which is not
encoded again. The exchange is `gcbench.core.exchange.Exchange.lane_shards`, in FSDP's own process
group and at its place in the order of collectives.

FSDP's input carries no parameter's name: per rank, then per parameter, a chunk of whole rows, the
last ones shorter and padded with zeros. `Layout` finds the chunks again from the module's
parameters; padding is not sent, and scales never reach over a chunk's end.

Torch offers the place, `FSDPModule.set_custom_reduce_scatter`, but not the parameters behind it:
those are read from attributes that may change. Tried: torch 2.13, gloo on a CPU. With streams on a
GPU it never ran.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from gcbench.core import registry
from gcbench.core.clock import Totals
from gcbench.core.compressor import Compressor, Segments
from gcbench.core.errors import DivergedError, GcbenchError, UsageError
from gcbench.core.exchange import Buffers, Exchange, Lane
from gcbench.core.memory import Memory
from gcbench.core.world import DistributedWorld, Traffic
from gcbench.integrations import chosen, handshake
from gcbench.integrations.ddp import BACKENDS

TRIED = "2.13"
"""Versions of torch whose internals are known here."""
DTYPES = (torch.float32, torch.bfloat16)
"""In which FSDP may reduce; gradients are exchanged in float32, which holds both exactly."""
FORMAT = 1
"""Version of what `ShardHook.state_dict` returns."""


@dataclass(frozen=True)
class Settings:
    """What `shard_hook` was asked for."""

    compressor: Compressor
    memory: Memory
    dense_below: int
    start_step: int
    seed: int


def shard_hook(
    compressor: str | Compressor,
    *,
    memory: str | None = None,
    memory_options: Mapping[str, Any] | None = None,
    dense_below: int = 0,
    start_step: int = 0,
    seed: int = 0,
    **options: Any,
) -> ShardHook:
    """Return a hook that compresses the reduce-scatters of an FSDP2 model.

    `hook.register(model)` on every rank, after `fully_shard` was called on the model and those of
    its modules that have a reduce-scatter of their own. Parameters travel to the ranks as before.

    Error feedback keeps on every rank what that rank lost of its whole gradient: 4 bytes for each
    element of the model, unsharded. `memory="none"` carries nothing.

    Args:
        compressor: a registered name that `gcbench list compressors` shows with the collective
            twoshot, or such a compressor.
        memory: what is carried from step to step, by name; default what the method published. With
            `momentum` and `dgc` the optimizer must have none of its own.
        memory_options: fields of the memory.
        dense_below: parameters of fewer elements, all ranks' chunks together, stay fp32.
        start_step: exchanges of a module before it are in fp32.
        seed: of random numbers; models trained at the same time should have different ones.
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
    if carried.joint:
        raise UsageError(
            f"{carried!r} keeps {', '.join(carried.joint)} of the whole mean on every rank, and "
            "with FSDP each rank sees its shard alone. Take another memory"
        )
    return ShardHook(Settings(method, carried, dense_below, start_step, seed))


@dataclass(frozen=True)
class Parameter:
    """One parameter of a module: its name in the model, and the chunk that each rank keeps."""

    name: str
    chunks: tuple[tuple[int, ...], ...]
    """Shape of each rank's chunk, without padding."""
    padded: int
    """Elements of a chunk in FSDP's input: those of the first one."""

    @classmethod
    def of(cls, name: str, shape: Sequence[int], dim: int, ranks: int) -> Parameter:
        """Cut a parameter along `dim` as `torch.chunk` does."""
        rows = -(-shape[dim] // ranks)
        kept = [max(0, min(rows, shape[dim] - r * rows)) for r in range(ranks)]
        chunks = tuple((*shape[:dim], k, *shape[dim + 1 :]) for k in kept)
        return cls(name, chunks, math.prod(chunks[0]))

    @property
    def numel(self) -> int:
        """Elements of all chunks."""
        return sum(map(math.prod, self.chunks))


@dataclass(frozen=True)
class Layout:
    """Where the gradients of a module's parameters lie in the input of its reduce-scatter.

    The input has a row for each rank; a row has a padded chunk of each parameter, in their order.
    Compressed, and dense, are each one lane: the chunks of rank 0 without padding, of rank 1, ...
    """

    parameters: tuple[Parameter, ...]
    dense: tuple[bool, ...]
    ranks: int

    @property
    def row(self) -> int:
        """Elements of one rank's row of the input, padding included."""
        return sum(parameter.padded for parameter in self.parameters)

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    def lanes(self) -> list[list[Parameter]]:
        """Return the parameters of each lane."""
        pairs = [*zip(self.parameters, self.dense, strict=True)]
        dealt = [[p for p, dense in pairs if dense == kind] for kind in (False, True)]
        return [lane for lane in dealt if lane]

    def chunks(self, row: Tensor, rank: int) -> dict[str, Tensor]:
        """Return a rank's chunks in a row, 1-D, by the parameters' names: views."""
        pieces = torch.split(row, [parameter.padded for parameter in self.parameters])
        return {
            parameter.name: piece[: math.prod(parameter.chunks[rank])]
            for parameter, piece in zip(self.parameters, pieces, strict=True)
        }

    def take(self, given: Tensor) -> list[Tensor]:
        """Return the gradients of each lane, float32, 1-D, of the input, shape (ranks * row,)."""
        rows = [self.chunks(row, rank) for rank, row in enumerate(torch.split(given, self.row))]
        lanes = self.lanes()
        return [torch.cat([row[p.name] for row in rows for p in lane]).float() for lane in lanes]

    def pieces(self, lane: Sequence[Parameter], x: Tensor) -> Iterator[tuple[Parameter, Tensor]]:
        """Yield each chunk of a lane's gradients x, and whose it is."""
        whose = [parameter for _ in range(self.ranks) for parameter in lane]
        sizes = [math.prod(p.chunks[rank]) for rank in range(self.ranks) for p in lane]
        return zip(whose, torch.split(x, sizes), strict=True)

    def give(self, lane: Sequence[Parameter], shard: Tensor, own: Tensor, rank: int) -> None:
        """Copy the mean of a rank's shard of a lane to its row, shape (row,)."""
        places = self.chunks(own, rank)
        sizes = [math.prod(parameter.chunks[rank]) for parameter in lane]
        for parameter, mean in zip(lane, torch.split(shard, sizes), strict=True):
            places[parameter.name].copy_(mean)


def lanes(settings: Settings, layout: Layout, start: int, step: int) -> list[Lane]:
    """Return how the lanes of a module are exchanged from `step` on.

    `start`: number of the module's first element among all that the model exchanges, by which
    random numbers are addressed.
    """
    plain, made = registry.compressor("none"), []
    for parameters in layout.lanes():
        dense = layout.dense[layout.parameters.index(parameters[0])]
        memory = settings.memory.dense() if dense else settings.memory
        method = plain if dense or step < settings.start_step else settings.compressor
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


class ShardHook:
    """One FSDP2 model's compressed reduce-scatters, made by `shard_hook`.

    `lr` is the learning rate that the next mean is applied with: set it with your schedule, so that
    residuals stand for the same update after a change; left alone, residuals stay as they are.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.lr = 1.0
        self._modules: list[_Module] = []
        self._replicas: DistributedWorld | None = None
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
                `mesh["replicate"]`. Their mean is taken in fp32 after the compressed exchange.

        Raises:
            gcbench.core.errors.UsageError: what this model has cannot be compressed, or the ranks
                differ in what they registered: on every rank, with what to do.
            gcbench.core.errors.PeerLostError: another rank did not come.
        """
        if self._registered:
            raise UsageError("this hook is registered already: make one for each model")
        sharded, between = _sharded(model), _group(replicas)
        device, refused = sharded[0].device, ""
        layouts = [each.layout(self.settings.dense_below) for each in sharded]
        try:
            for each in sharded:
                each.examine(between)
            self._told = self._tell(sharded, layouts, between)
            if self._loaded is not None:
                place = dist.get_rank(), dist.get_world_size()
                chosen.check_state(self._loaded, *place, self._told)
        except UsageError as error:
            refused, self._told = str(error), {}
        stores = self._meet([each.group for each in sharded], between, device, refused)
        self._registered, self._buffers = True, Buffers(device)
        if between is not None and between.size() > 1:
            self._replicas = _world(between, stores[between.group_name], device)
        start, seed = 0, self.settings.seed
        if between is not None:
            seed += between.rank() << 32  # or else replicas would round alike
        for each, layout in zip(sharded, layouts, strict=True):
            if each.group.size() > 1:
                world = _world(each.group, stores[each.group.group_name], device)
                self._modules.append(_Module(self, each.name, layout, world, start, seed))
                each.module.set_custom_reduce_scatter(self._modules[-1])
            if self._replicas is not None:
                each.module.set_all_reduce_hook(self._over_replicas)
            start += layout.numel
        if self._loaded is not None:
            for module in self._modules:
                module.load(self._loaded["modules"][module.name])
        self._loaded = None
        return self

    @property
    def step(self) -> int:
        """The most exchanges that a module had: backward passes that reduce gradients."""
        return max((module.step for module in self._modules), default=0)

    @property
    def traffic(self) -> Traffic:
        """Bytes of this rank since the first step: reduce-scatters, and replicas' all-reduces."""
        worlds = [module.world for module in self._modules]
        worlds += [self._replicas] if self._replicas is not None else []
        total = Traffic()
        for world in worlds:
            own = world.traffic[0]
            total.payload_up += own.payload_up
            total.payload_down += own.payload_down
            total.wire += own.wire
        return total

    @property
    def plain_bytes(self) -> float:
        """Bytes that this rank would have handed to the same collectives in fp32."""
        replicated = 1 if self._replicas is not None else 0
        return sum(
            4.0 * module.step * (layout.numel + replicated * layout.row)
            for module in self._modules
            for layout in [module.layout]
        )

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of reduce-scatters by phase: statistic, encode, communicate, decode."""
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

    # -- registration ------------------------------------------------------------------------------

    def _tell(
        self,
        sharded: Sequence[_Sharded],
        layouts: Sequence[Layout],
        between: dist.ProcessGroup | None,
    ) -> dict[str, Any]:
        """Return what must be the same on all ranks, by a name for people."""
        settings = self.settings
        words = repr([(each.name, each.dtypes) for each in sharded]) + repr(layouts)
        digest = hashlib.sha256(words.encode()).hexdigest()[:12]
        count = sum(len(layout.parameters) for layout in layouts)
        numel = sum(layout.numel for layout in layouts)
        loaded = self._loaded["modules"] if self._loaded else {}
        return {
            **chosen.told(settings.compressor, "twoshot", settings.memory),
            "dense_below": settings.dense_below,
            "start_step": settings.start_step,
            "seed": settings.seed,
            "replicas": 1 if between is None else between.size(),
            "parameters": f"{count} with {numel} elements, layout {digest}",
            "step": max((each["step"] for each in loaded.values()), default=0),
        }

    def _meet(
        self,
        groups: Sequence[dist.ProcessGroup],
        between: dist.ProcessGroup | None,
        device: torch.device,
        refused: str,
    ) -> dict[str, Store]:
        """Compare what all ranks tell, in every process group; return a store for each group."""
        distinct = {group.group_name: group for group in (*groups, *filter(None, [between]))}
        stores: dict[str, Store] = {}
        first: GcbenchError | None = None
        for name, group in distinct.items():
            try:
                seconds = _timeout(group, device).total_seconds()
                stores[name] = handshake.meet(group, self._told, refused, seconds)
            except GcbenchError as error:  # the ranks of the other groups hear of it, too
                first, refused = first or error, refused or str(error)
        if first is not None:
            raise first
        return stores

    # -- called by FSDP ----------------------------------------------------------------------------

    def _over_replicas(self, shard: Tensor) -> None:
        """Put the mean over the replicas in the place of a module's shard."""
        world = self._replicas
        assert world is not None
        with torch.no_grad():
            mean = world.all_reduce([shard.float()], "sum").div_(world.size)
            shard.copy_(mean)


class _Module:
    """The reduce-scatter of one module: what FSDP calls in the place of its own."""

    def __init__(
        self,
        hook: ShardHook,
        name: str,
        layout: Layout,
        world: DistributedWorld,
        start: int,
        seed: int,
    ) -> None:
        self.hook, self.name, self.layout = hook, name, layout
        self.world, self.start, self.step = world, start, 0
        self.clock = Totals(world.device)
        plan = lanes(hook.settings, layout, start, 0)
        self.exchange = Exchange(world, plan, seed, self.clock)
        self.exchange.buffers = hook._buffers  # one module is exchanged after the other

    def state(self) -> dict[str, Any]:
        """Return what is carried: a dict of tensors for each lane, in the order of its elements."""
        own = self.world.traffic[0]
        return {
            "step": self.step,
            "lr": self.exchange.lr,
            "traffic": [own.payload_up, own.payload_down, own.wire],
            "lanes": [{k: v.clone() for k, v in lane.items()} for lane in self.exchange.workers[0]],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Carry on from what `state` returned for the same layout, settings and rank."""
        settings, self.step = self.hook.settings, state["step"]
        self.exchange.change(lanes(settings, self.layout, self.start, self.step))
        self.exchange.lr = state["lr"]
        self.world.traffic[0] = Traffic(*state["traffic"])
        for buffers, kept in zip(self.exchange.workers[0], state["lanes"], strict=True):
            for name, buffer in buffers.items():
                buffer.copy_(kept[name])

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
        """Write the mean of this rank's row over all ranks' inputs to the output.

        Raises:
            GcbenchError: the exchange broke off, or FSDP asks for what cannot be compressed.
        """
        hook = self.hook
        if hook._failed is not None:
            raise hook._failed
        try:
            with torch.no_grad():
                self._reduce(output_tensor, input_tensor, group, op)
        except BaseException as error:
            hook._failed = error
            raise

    def _reduce(self, output: Tensor, given: Tensor, group: dist.ProcessGroup, op: Any) -> None:
        layout, world, rank = self.layout, self.world, self.world.ranks[0]
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise UsageError(
                f"{self.name}: FSDP asks for neither a mean nor a sum of the ranks, as after "
                "set_gradient_divide_factor. Leave that out and scale the loss"
            )
        if (group.rank(), group.size()) != (rank, world.size):
            raise UsageError(
                f"{self.name}: a process group of {group.size()} ranks came, {world.size} expected"
            )
        if given.dtype not in DTYPES:
            raise UsageError(f"{self.name}: gradients of {given.dtype} came. {REDUCE}")
        if given.numel() != layout.ranks * layout.row:
            raise UsageError(
                f"{self.name}: {given.numel()} elements came and {layout.ranks * layout.row} are "
                "those of all its parameters. Does the loss not use some of them? Then call "
                "model.set_reduce_scatter_unused_params(True). Freeze parameters before register"
            )
        world.group = group  # set_separate_reduce_scatter_group may have changed it
        gradients = layout.take(given)
        self._check_finite(gradients)
        if self.step == self.hook.settings.start_step and self.step:
            self.exchange.change(lanes(self.hook.settings, layout, self.start, self.step))
        self.exchange.follow(self.hook.lr)
        output.zero_()
        for number, parameters in enumerate(layout.lanes()):
            (shard,) = self.exchange.lane_shards(number, [gradients[number]], self.step)
            if op == dist.ReduceOp.SUM:
                shard.mul_(world.size)
            layout.give(parameters, shard, output, rank)
        self.step += 1

    def _check_finite(self, gradients: Sequence[Tensor]) -> None:
        """Raise DivergedError, with a parameter's name, if a gradient is not finite."""
        if all(math.isfinite(float(x.sum())) or x.isfinite().all() for x in gradients):
            return
        name = next(
            parameter.name
            for lane, x in zip(self.layout.lanes(), gradients, strict=True)
            for parameter, piece in self.layout.pieces(lane, x)
            if not piece.isfinite().all()
        )
        raise DivergedError(
            f"rank {dist.get_rank()}: the gradient of {name} is not finite at step {self.step}. "
            "Lower the learning rate. A GradScaler looks for its scale by gradients that "
            "overflow, which are not compressed: use bfloat16 without one",
            self.step,
        )


# ---- what torch knows of a model -----------------------------------------------------------------


@dataclass(frozen=True)
class _Sharded:
    """One module that `fully_shard` was called on, or several that it was called on together."""

    name: str
    module: Any
    """torch.distributed.fsdp.FSDPModule."""
    known: Any
    """torch's own record of the module's parameters, a private FSDPParamGroup."""
    parameters: tuple[Parameter, ...]
    """Those that require a gradient."""
    dtypes: tuple[torch.dtype, ...]
    """In which they would be reduced."""
    group: dist.ProcessGroup
    """The ranks that hold a shard each."""
    device: torch.device
    tensor_parallel: bool

    def layout(self, dense_below: int) -> Layout:
        """Return where the parameters' gradients lie; those below so many elements stay dense."""
        dense = tuple(parameter.numel < dense_below for parameter in self.parameters)
        return Layout(self.parameters, dense, self.group.size())

    def examine(self, between: dist.ProcessGroup | None) -> None:
        """Raise UsageError for what cannot be carried."""
        if hasattr(self.known.mesh_info, "replicate_process_group"):
            raise UsageError(
                f"{self.name} is sharded over a mesh of two dimensions, where FSDP takes the mean "
                'over replicas itself. Call fully_shard(..., mesh=mesh["shard"]) and '
                'register(model, replicas=mesh["replicate"])'
            )
        if self.tensor_parallel:
            raise UsageError(
                f"{self.name} is tensor parallel (its parameters were DTensors before "
                "fully_shard), which was never tried. Shard the model by FSDP alone"
            )
        if len(set(self.dtypes)) > 1 or self.dtypes[0] not in DTYPES:
            found = ", ".join(sorted({str(dtype) for dtype in self.dtypes}))
            raise UsageError(f"{self.name}: gradients would be reduced in {found}. {REDUCE}")
        if not type(self.known._reduce_scatter_comm).__module__.startswith("torch."):
            raise UsageError(
                f"{self.name} has a reduce-scatter of its own already, and FSDP takes one. Call "
                "fully_shard on a new model to register another hook"
            )
        factor = self.known.gradient_divide_factor
        if factor is not None and factor != self.group.size():
            raise UsageError(
                f"{self.name}: set_gradient_divide_factor({factor}) asks for a scaled sum, and a "
                "mean is compressed here. Leave it out and scale the loss"
            )
        if between is not None and self.known._all_reduce_hook is not None:
            raise UsageError(
                f"{self.name} has an all-reduce hook, and FSDP takes one. Leave it out, or leave "
                "out replicas"
            )
        for group in (self.group, *([] if between is None else [between])):
            _check_backend(group, self.device)


REDUCE = (
    "All in float32 or all in bfloat16 can be compressed, and float16 overflows where sums are "
    "taken: fully_shard(..., mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))"
)


def _sharded(model: nn.Module) -> list[_Sharded]:
    """Return the modules of a model that have a reduce-scatter of their own.

    Raises:
        UsageError: there is none, torch has no place for a hook, or its internals are others.
    """
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:
        FSDPModule = None  # type: ignore[assignment, misc]
    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise UsageError(
            f"torch {torch.__version__} has no FSDPModule.set_custom_reduce_scatter. Tried here: "
            f"torch {TRIED}"
        )
    prefixes = {id(module): prefix for prefix, module in model.named_modules()}
    found: dict[int, _Sharded] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, FSDPModule):
            name = prefix or "the root module"
            try:
                state: Any = module._get_fsdp_state()
                if id(state) not in found and (each := _read(name, module, state, prefixes)):
                    found[id(state)] = each
            except AttributeError as error:
                raise UsageError(
                    f"FSDP2 of torch {torch.__version__} does not hold parameters where they are "
                    f"looked for ({error}). Tried here: torch {TRIED}"
                ) from error
    if not found:
        raise UsageError(
            f"a {type(model).__name__} came, of which no module with parameters that require a "
            "gradient went through torch.distributed.fsdp.fully_shard: call that first. For "
            "DistributedDataParallel there is gcbench.comm_hook; FSDP1 has no place for a hook"
        )
    return [*found.values()]


def _read(name: str, module: Any, state: Any, prefixes: Mapping[int, str]) -> _Sharded | None:
    """Return what torch's private state says of one module; None if it has nothing to train.

    Raises:
        AttributeError: the state is not that of a torch that is known here.
        UsageError: its parameters are not in one group of ranks, or in none.
    """
    groups = state._fsdp_param_groups
    if len(groups) > 1:
        raise UsageError(
            f"{name} has parameters on several meshes, of which torch takes no reduce-scatter from "
            "outside. Call fully_shard by module, each with one mesh"
        )
    trained = [p for group in groups for p in group.fsdp_params if p.sharded_param.requires_grad]
    if not trained:
        return None
    known = groups[0]
    if not hasattr(known.mesh_info, "shard_process_group"):
        raise UsageError(
            f"{name} is replicated and not sharded. Wrap the model in DistributedDataParallel and "
            "take gcbench.comm_hook"
        )
    group = known.mesh_info.shard_process_group
    policy, parameters, dtypes = known.mp_policy, [], []
    for each in trained:
        prefix = prefixes.get(id(each._module_info.module), "")
        full = ".".join(filter(None, [prefix, each._module_info.param_name]))
        dim = each.fsdp_placement.dim
        parameters.append(Parameter.of(full, each._orig_size, dim, group.size()))
        dtypes.append(policy.reduce_dtype or policy.param_dtype or each.sharded_param.dtype)
    parallel = any(each.is_dtensor for each in trained)
    return _Sharded(
        name, module, known, tuple(parameters), tuple(dtypes), group, known.device, parallel
    )


def _check_backend(group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise UsageError for a process group that cannot serve."""
    needed = BACKENDS.get(device.type)
    try:
        backend = group._get_backend(device).name()
    except RuntimeError:
        backend = "none"
    if backend != needed:
        raise UsageError(
            f"a process group has the backend {backend!r} for {device.type} tensors; tried are "
            f"{', '.join(map(repr, BACKENDS.values()))}: torch.distributed.init_process_group"
        )


def _group(given: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    """Return the process group of a mesh of one dimension, or what is one."""
    if not isinstance(given, DeviceMesh):
        return given
    if given.ndim != 1:
        raise UsageError(
            f'replicas is a mesh of {given.ndim} dimensions, and one is expected: mesh["replicate"]'
        )
    return given.get_group()


def _timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return how long a process group waits for its ranks."""
    limit: timedelta = group._get_backend(device).options._timeout
    return limit


def _world(group: dist.ProcessGroup, store: Store, device: torch.device) -> DistributedWorld:
    limit = "init_process_group(timeout=...)"
    return DistributedWorld(
        *(device, store, _timeout(group, device)), watched=False, group=group, limit=limit
    )
