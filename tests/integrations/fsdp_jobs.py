"""Training jobs of two and four processes with FSDP2, as users write them, for `shard_hook`.

One start of the processes does many jobs, each of which returns what a test looks at.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import re
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ddp_jobs import batch, changed, flat, model, of_loss, refused, resumable, sgd, traits, warned
from gcbench.compressors.memories.none import NoMemory
from jobs import collection, digest
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import gcbench
from gcbench.core import registry, sealed
from gcbench.core.clock import Clock
from gcbench.core.exchange import Exchange, Lane
from gcbench.core.world import Link, SimulatedWorld
from gcbench.integrations import fsdp, handshake, scheme
from gcbench.integrations.sharded import takes_unused

STEPS = 4
DENSE = {"dense_below": 50}
"""Leaves biases and norms in fp32: a compressed and a dense lane in each module."""


def sharded(net: nn.Module | None = None, mesh: Any = None, **options: Any) -> Any:
    """Call `fully_shard` on two layers, and on the whole, to which the other layers belong."""
    net = model() if net is None else net
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if mesh is None else mesh
    for module in (net.hidden, net.branch, net):
        fully_shard(module, mesh=mesh, **options)
    return net


def up(hook: Any) -> float:
    """Return the bytes of gradients that this rank handed over, without those of agreements."""
    return hook.traffic.payload_up - hook.agreement.payload_up


def up_between(hook: Any) -> float:
    """Return the part of them that went between replicas."""
    agreed = sum(each.between.exchange.agreement.payload_up for each in hook._modules)
    return hook.traffic_between.payload_up - agreed


def schedule(step: int) -> float:
    """Return the learning rate of the tests in which it changes."""
    return 1.0 if step < 2 else 0.25


def train(net: nn.Module, steps: range, rank: int, hook: Any = None, optimizer: Any = None) -> Any:
    """Train as a user would; `hook`, if given, follows the rates of `schedule`."""
    optimizer = optimizer or sgd(net)
    for step in steps:
        if hook is not None:
            hook.lr = schedule(step)
        x, y = batch(step, rank)
        optimizer.zero_grad()
        cross_entropy(net(x).float(), y).backward()
        optimizer.step()
    return optimizer


def ended(net: nn.Module) -> Tensor:
    """Return all parameters, whole, 1-D."""
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]
    return torch.cat([p.detach().reshape(-1).float() for p in whole])


def gradients(net: nn.Module, step: int, rank: int) -> dict[str, Tensor]:
    x, y = batch(step, rank)
    return of_loss(net, cross_entropy(net(x).float(), y))


def alone(
    hook: Any,
    size: int,
    *,
    replicas: int = 1,
    of: Callable[[nn.Module, int, int], dict[str, Tensor]] = gradients,
    steps: int = STEPS,
    lrs: Callable[[int], float] = lambda step: 1.0,
) -> Tensor:
    """Return the parameters after the same training by gcbench's own exchange, in this process.

    Each parameter is cut into its ranks' chunks here, by `torch.chunk`, and put together again.
    """
    net, settings = model(), hook.settings
    named = dict(net.named_parameters())
    modules = [_Alone(settings, each.layout, each.start, size, replicas) for each in hook._modules]
    optimizer = sgd(net, hook)
    for step in range(steps):
        means = {name: torch.zeros_like(parameter) for name, parameter in named.items()}
        gradients_of = [of(net, step, rank) for rank in range(replicas * size)]
        for module in modules:
            module.exchange(gradients_of, means, step, lrs(step))
        for name, parameter in named.items():
            parameter.grad = means[name]
        optimizer.step()
    return flat(net)


class _Alone:
    """All ranks' exchanges of one module: of each replica, and then of each shard's replicas."""

    def __init__(self, settings: Any, layout: Any, start: int, size: int, replicas: int) -> None:
        self.settings, self.layout, self.start = settings, layout, start
        self.size, self.replicas = size, replicas
        plan, *plans = self.plans(0)
        self.inside = [self.make(size, number, plan) for number in range(replicas)]
        self.between = [self.make(replicas, replicas + k, plan) for k, plan in enumerate(plans)]

    def make(self, size: int, number: int, plan: list[Lane]) -> Exchange:
        device = torch.device("cpu")
        world = SimulatedWorld(size, device, Link(10.0, 50.0), 1, 1)
        return Exchange(world, plan, self.settings.seed + (number << 32), Clock(device))

    def plans(self, step: int) -> list[list[Lane]]:
        """Return the lanes inside a replica, and of the replicas of each keeper's shard."""
        words, shards = (self.settings, self.layout), range(self.size)
        plan = fsdp.lanes(*words, self.start, step)
        return [plan, *(fsdp.replica_lanes(*words, k, self.start, step) for k in shards)]

    def exchange(
        self, gradients_of: list[dict[str, Tensor]], means: dict[str, Tensor], step: int, lr: float
    ) -> None:
        if step == self.settings.start_step and step:
            plan, *plans = self.plans(step)
            for exchange in self.inside:
                exchange.change(plan)
            for exchange, plan in zip(self.between, plans, strict=True):
                exchange.change(plan)
        for exchange in (*self.inside, *self.between):
            exchange.follow(lr)
        for number, lane in enumerate(self.layout.lanes()):
            cut, shards = [self.cut(each, lane) for each in gradients_of], []
            for r, exchange in enumerate(self.inside):
                xs = cut[r * self.size : (r + 1) * self.size]
                result = exchange.lane_shards(number, xs, step)
                shards.append([shard.clone() for shard in result])
            for keeper in range(self.size):
                each = [row[keeper] for row in shards]
                if self.settings.between is None:
                    mean = torch.stack(each).sum(0) / self.replicas
                elif each[0].numel():
                    mean = self.between[keeper].lane_mean(number, each, step)
                self.put(mean, keeper, lane, means)

    def cut(self, gradients_of: dict[str, Tensor], lane: list[Any]) -> Tensor:
        """Return what a worker has of a lane: the first keeper's chunks, the second's, ..."""
        cut = [gradients_of[p.name].chunk(self.size) for p in lane]
        rows = [[each[k] for each in cut if k < len(each)] for k in range(self.size)]
        return torch.cat([chunk.reshape(-1) for row in rows for chunk in row]).float()

    def put(self, mean: Tensor, keeper: int, lane: list[Any], means: dict[str, Tensor]) -> None:
        """Write the mean of a keeper's chunks to its place in the gradients."""
        start = 0
        for p in lane:
            chunks = means[p.name].chunk(self.size)
            if keeper < len(chunks):
                chunk, end = chunks[keeper], start + chunks[keeper].numel()
                chunk.copy_(mean[start:end].view(chunk.shape))
                start = end


def hooked(rank: int, hook: Any, steps: int = STEPS, **options: Any) -> Tensor:
    net = sharded(**options)
    hook.register(net)
    train(net, range(steps), rank, optimizer=sgd(net, hook))
    return ended(net)


# ---- jobs ----------------------------------------------------------------------------------------


def method(rank: int, size: int, name: str) -> dict[str, Any]:
    """Compare a method with gcbench's own exchange, on rank 0; of each kind, resume one."""
    hook = gcbench.shard_hook(name, **DENSE)
    end = hooked(rank, hook)
    expected = end if rank else alone(hook, size)
    return {
        "end": digest(end),
        "equal": torch.equal(end, expected),
        "far": float((end - expected).abs().max()),
        "up": up(hook) / hook.plain_bytes,
        "modules": len(hook._modules),
        "resumed": name not in kinds() or torch.equal(end, resumed(rank, name)),
    }


def resumed(
    rank: int,
    name: str,
    mesh: Any = None,
    replicas: Any = None,
    lr: float | None = None,
    **options: Any,
) -> Tensor:
    """Return the parameters of a job that was saved after step 2 and resumed in new objects.

    `lr`: the rate of the first hook, which the second reads from the state.
    """
    net = sharded(mesh=mesh)
    hook = gcbench.shard_hook(name, **DENSE, **options)
    if lr is not None:
        hook.lr = lr
    hook.register(net, replicas=replicas)
    optimizer = train(net, range(2), rank)
    file = io.BytesIO()
    torch.save(hook.state_dict(), file)
    file.seek(0)
    again = sharded(mesh=mesh)
    with torch.no_grad():
        for new, old in zip(again.parameters(), net.parameters(), strict=True):
            new.to_local().copy_(old.to_local())
    hook = gcbench.shard_hook(name, **DENSE, **options)
    hook.load_state_dict(torch.load(file, weights_only=True))
    hook.register(again, replicas=replicas)
    later = sgd(again)
    later.load_state_dict(optimizer.state_dict())
    for step in range(2, STEPS):
        x, y = batch(step, rank)
        later.zero_grad()
        cross_entropy(again(x), y).backward()
        later.step()
    return ended(again)


JOBS, job = collection()


@job
def plain(rank: int, size: int) -> dict[str, Any]:
    """Train with the method `none` and without a hook: the largest difference, by kind of FSDP."""
    result = {}
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    kinds = {"float32": {}, "bfloat16": {"mp_policy": policy}, "sum": {}, "grouped": {}}
    for name, options in kinds.items():
        ends = []
        for hook in (None, gcbench.shard_hook("none")):
            net = model()
            if name == "grouped":  # one reduce-scatter for the gradients of both
                fully_shard([net.hidden, net.branch])
                fully_shard(net)
            else:
                sharded(net, **options)
            if name == "sum":
                summed(net)
            if hook is not None:
                hook.register(net)
            train(net, range(STEPS), rank)
            ends.append(ended(net))
        result[name] = float((ends[0] - ends[1]).abs().max())
    result["moved"] = float((ends[0] - flat(model())).norm())
    result["bytes"] = up(hook) == hook.plain_bytes
    return result


@job
def hybrid(rank: int, size: int) -> dict[str, Any]:
    """Two replicas of a model that is sharded over half of the ranks."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    native = sharded(mesh=mesh)
    train(native, range(STEPS), rank)
    result: dict[str, Any] = {}
    for name in ("none", "qsgd", "onebit"):
        hook = gcbench.shard_hook(name, **DENSE)
        net = sharded(mesh=mesh["shard"])
        hook.register(net, replicas=mesh["replicate"])
        train(net, range(STEPS), rank)
        end = ended(net)
        if name == "none":
            result["native"] = float((end - ended(native)).abs().max())
            result["bytes"] = up(hook) == hook.plain_bytes
        result[name] = torch.equal(end, alone(hook, size // 2, replicas=2))
    replicated = init_device_mesh("cpu", (size, 1), mesh_dim_names=("replicate", "shard"))
    single = sharded(mesh=replicated["shard"])
    gcbench.shard_hook("none").register(single, replicas=replicated["replicate"])
    train(single, range(STEPS), rank)
    result["shards of one rank"] = float((ended(single) - ended(native)).abs().max())
    hook = gcbench.shard_hook("none")
    result["two dimensions"] = refused(lambda: hook.register(sharded(mesh=mesh)))
    result["replicas of two dimensions"] = refused(
        lambda: hook.register(sharded(mesh=mesh["shard"]), replicas=mesh)
    )
    odd = gcbench.shard_hook("none", seed=int(rank == size - 1))
    result["odd"] = refused(
        lambda: odd.register(sharded(mesh=mesh["shard"]), replicas=mesh["replicate"])
    )
    return result


def kinds() -> list[str]:
    """Return one method for each way to be exchanged: of all, the first that declares it."""
    result: dict[Any, str] = {}
    for name in registry.compressors():
        method = registry.compressor(name)
        if method.rule.plain:
            result.setdefault((method.legal_collectives()[0], *traits(method)), name)
    return [*result.values()]


def grid(size: int) -> tuple[Any, Any]:
    """Return the meshes of shards and of replicas: two replicas."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    return mesh["shard"], mesh["replicate"]


def two(rank: int, hook: Any, shards: Any, replicas: Any) -> Tensor:
    net = sharded(mesh=shards)
    hook.register(net, replicas=replicas)
    train(net, range(STEPS), rank, optimizer=sgd(net, hook))
    return ended(net)


@job
def two_levels(rank: int, size: int) -> dict[str, Any]:
    """Train with each kind of method between replicas, and by gcbench's two exchanges.

    A method of `resumable` is resumed as well.
    """
    shards, replicas = grid(size)
    result: dict[str, Any] = {}
    plain = two(rank, gcbench.shard_hook("qsgd", **DENSE), shards, replicas)
    none = gcbench.shard_hook("qsgd", between="none", **DENSE)
    result["none"] = torch.equal(two(rank, none, shards, replicas), plain)
    result["none bytes"] = up_between(none)
    elements = sum(p.to_local().numel() for p in sharded(mesh=shards).parameters())
    result["own bytes"] = 4 * elements * STEPS
    result["methods"] = {}
    for name in kinds():
        hook = gcbench.shard_hook("int8", between=name, **DENSE)
        end = two(rank, hook, shards, replicas)
        result["methods"][name] = {
            "end": digest(end),
            "equal": bool(rank) or torch.equal(end, alone(hook, size // 2, replicas=2)),
            "differs": not torch.equal(end, plain),
        }
        if name in resumable():
            again = resumed(rank, "int8", shards, replicas, between=name)
            result["methods"][name]["resumed"] = torch.equal(end, again)
    return result


@job
def two_levels_options(rank: int, size: int) -> dict[str, Any]:
    """Train with SDP4Bit's two levels and further options; record bytes."""
    shards, replicas = grid(size)
    result: dict[str, Any] = {"ends": {}, "equal": {}}
    for name, fields in (
        ("sdp4bit", {}),
        ("start", {"start_step": 2}),
        ("field", {"between_options": {"granularity": 64}}),
        ("memory", {"between_memory": "residual"}),
        ("joint", {"between_memory": "ef21"}),
        ("decay", {"between_memory": "residual", "between_memory_options": {"decay": 0.5}}),
        ("momentum", {"between_memory": "momentum"}),
    ):
        hook = gcbench.shard_hook("int8", between="hadamard4", **DENSE, **fields)
        end = two(rank, hook, shards, replicas)
        result["ends"][name] = digest(end)
        result["equal"][name] = bool(rank) or torch.equal(end, alone(hook, size // 2, replicas=2))
        if name == "sdp4bit":
            result["chunks"] = {
                module.name: [parameter.chunks for parameter in module.layout.parameters]
                for module in hook._modules
            }
            result["up"] = up(hook), up_between(hook)
            result["phases"] = hook.seconds
            result["shard"] = shards.get_local_rank()
    net = sharded(mesh=shards)
    hook = gcbench.shard_hook("int8", between="onebit", **DENSE).register(net, replicas=replicas)
    train(net, range(STEPS), rank, hook)
    expected = alone(hook, size // 2, replicas=2, lrs=schedule)
    result["equal"]["learning rate"] = torch.equal(ended(net), expected)
    for name in ("votes", "votes, summed"):
        net = sharded(mesh=shards)
        if name == "votes, summed":
            summed(net)
        votes = gcbench.shard_hook("int8", between="signsgd").register(net, replicas=replicas)
        train(net, range(STEPS), rank)
        end = ended(net)
        result["equal"][name] = bool(rank) or torch.equal(end, alone(votes, size // 2, replicas=2))
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("replicate", "shard"))
    one = gcbench.shard_hook("none", between="qsgd", **DENSE)
    end = two(rank, one, mesh["shard"], mesh["replicate"])
    result["equal"]["shards of one rank"] = torch.equal(end, alone(one, 1, replicas=size))
    result["plain of one"] = one.plain_bytes == 4 * STEPS * end.numel()
    return result


@job
def two_levels_broken(rank: int, size: int) -> dict[str, Any]:
    """Break the exchange of replicas: other positions on each rank, draws shared with the first."""
    shards, replicas = grid(size)
    result: dict[str, Any] = {}
    for name in ("right", "seeds"):
        hook = gcbench.shard_hook("none", between="randomk", between_options={"ratio": 0.5})
        net = sharded(mesh=shards)
        hook.register(net, replicas=replicas.get_group())
        for module in hook._modules:
            module.between.exchange.seed += rank if name == "seeds" else 0
        if name == "right":
            train(net, range(STEPS), rank)
            result[name] = digest(ended(net))
        else:
            result[name] = refused(lambda net=net: train(net, range(STEPS), rank))
    hook = gcbench.shard_hook("none", between="qsgd")
    net = sharded(mesh=shards)
    hook.register(net, replicas=replicas)
    for module in hook._modules:
        module.between.exchange.seed = module.inside.exchange.seed
    train(net, range(STEPS), rank)
    result["shared draws"] = torch.equal(ended(net), alone(hook, size // 2, replicas=2))
    return result


class Weighted(nn.Module):
    """A sum of weights with these factors, which are its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 48))

    def forward(self, factors: Tensor) -> Tensor:
        return (self.weight * factors).sum()


@job
def autocast(rank: int, size: int) -> dict[str, Any]:
    """Call backward inside autocast, which applies to the products of matrices of a method."""
    mesh, ends = init_device_mesh("cpu", (size, 1), mesh_dim_names=("replicate", "shard")), []
    factors = torch.randn(64, 48, generator=torch.Generator().manual_seed(rank))
    for enabled in (False, True):
        net = Weighted()
        fully_shard(net, mesh=mesh["shard"])
        hook = gcbench.shard_hook("none", between="powersgd")
        hook.register(net, replicas=mesh["replicate"])
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            net(factors).backward()
        ends.append(net.weight.grad.to_local().clone())
    return {"equal": torch.equal(*ends)}


@job
def two_levels_refused(rank: int, size: int) -> dict[str, Any]:
    hook, result, odd = gcbench.shard_hook, {}, rank == size - 1
    shards, replicas = grid(size)

    def register(one: Any, others: Any = replicas) -> Any:
        return one.register(sharded(mesh=shards), replicas=others)

    result["no replicas"] = refused(lambda: register(hook("int8", between="qsgd"), None))
    result["forgotten"] = warned(lambda: register(hook("int8"), None))
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("pp", "shard"))
    result["stages"] = warned(lambda: hook("int8").register(sharded(mesh=mesh["shard"])))
    flat_mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "cp"))
    both = flat_mesh["dp", "cp"]._flatten("dp_cp")
    result["flattened"] = warned(lambda: hook("int8").register(sharded(mesh=both)))
    result["wrong replicas"] = refused(lambda: register(hook("int8"), shards))
    net = model()
    if odd:
        nn.init.zeros_(net.last.bias)
    net = sharded(net, shards)
    result["apart"] = refused(lambda: hook("int8").register(net, replicas=replicas))
    result["method"] = refused(
        lambda: register(hook("int8", between="qsgd" if odd else "hadamard4"))
    )
    result["absent"] = refused(lambda: register(hook("int8", between=None if odd else "hadamard4")))
    result["field"] = refused(
        lambda: register(hook("int8", between="qsgd", between_options={"levels": 3 + odd}))
    )
    memory = {"between_memory": "none" if odd else "residual"}
    result["memory"] = refused(lambda: register(hook("int8", between="hadamard4", **memory)))
    code = mock.patch.object(scheme, "_code", lambda cls: str(odd and cls is NoMemory))
    with code:
        one = hook("int8", memory="residual", between="hadamard4")
        result["code of memory"] = refused(lambda: register(one))
    state = register(hook("int8", between="hadamard4")).state_dict()

    def loaded(between: str | None) -> Any:
        one = hook("int8", between=between)
        one.load_state_dict(state)
        return register(one)

    result["state without"] = refused(lambda: loaded(None))
    result["state of another"] = refused(lambda: loaded("int8"))
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("replicate", "shard"))
    net = sharded(mesh=mesh["shard"])
    hook("int8", between="hadamard4").register(net, replicas=mesh["replicate"])
    x, _ = batch(0, rank)
    result["nan"] = refused(lambda: (net(x).sum() * float("nan")).backward())
    return result


@job
def options(rank: int, size: int) -> dict[str, Any]:
    """Train with each option of the hook, and by gcbench's own exchange."""
    result = {}
    for name, fields in (
        ("start", {"compressor": "onebit", "start_step": 2}),
        ("seed", {"compressor": "qsgd", "seed": 5}),
        ("field", {"compressor": "terngrad", "clip": 2.0}),
        ("model", {"compressor": "terngrad", "granularity": "model"}),
        ("memory", {"compressor": "signsgd", "memory": "momentum"}),
        ("decay", {"compressor": "topk", "memory_options": {"decay": 0.5}}),
    ):
        hook = gcbench.shard_hook(**fields)
        result[name] = torch.equal(hooked(rank, hook), alone(hook, size))
    end = hooked(rank, gcbench.shard_hook("onebit", start_step=2, **DENSE))
    result["resumed at the start"] = torch.equal(end, resumed(rank, "onebit", start_step=2))
    return result


@job
def broken(rank: int, size: int) -> dict[str, Any]:
    """Train with other random numbers, and with shards in a wrong place: neither may be equal."""
    hook = gcbench.shard_hook("qsgd")
    end = hooked(rank, hook)
    hook._settings = dataclasses.replace(hook.settings, seed=1)
    result = {"seed": torch.equal(end, alone(hook, size))}
    right = fsdp.Layout.give
    fsdp.Layout.give = lambda self, lane, shard, *words: right(self, lane, shard.roll(1), *words)
    hook = gcbench.shard_hook("none")
    result["place"] = torch.equal(hooked(rank, hook), alone(hook, size))
    fsdp.Layout.give = right
    return result


@job
def learning_rate(rank: int, size: int) -> dict[str, Any]:
    hook = gcbench.shard_hook("onebit")
    net = sharded()
    hook.register(net)
    train(net, range(STEPS), rank, hook)
    expected = alone(hook, size, lrs=schedule)
    constant = hooked(rank, gcbench.shard_hook("onebit", **DENSE))
    return {
        "equal": torch.equal(ended(net), expected),
        "resumed": torch.equal(resumed(rank, "onebit", lr=0.01), constant),
        "matters": not torch.equal(expected, alone(hook, size)),
    }


def summed(net: Any) -> Any:
    """Let FSDP request sums, which it divides by the number of ranks."""
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return net


@job
def directions(rank: int, size: int) -> dict[str, Any]:
    """Clip votes and means; add the votes of two backward passes."""
    result: dict[str, Any] = {}
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    low = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}
    for name, options, settings, variants in (
        ("signsgd", {}, {}, ("", "summed", "added", "clipped", "clipped, summed")),
        ("signsgd", {"scaler": scaler}, {}, ("summed", "clipped")),
        ("signsgd", {"start_step": STEPS}, {}, ("clipped",)),
        ("signsgd", DENSE, low, ("", "clipped")),
        ("terngrad", {}, {}, ("clipped",)),
    ):
        for variant in variants:
            net = sharded(**settings)
            if "summed" in variant:
                summed(net)
            hook = gcbench.shard_hook(name, **options).register(net)
            optimizer = sgd(net, hook)
            scaled = options.get("scaler")
            passes = 2 if variant == "added" else 1

            def steps(variant=variant, net=net, optimizer=optimizer, scaled=scaled, passes=passes):
                for step in range(STEPS):
                    optimizer.zero_grad()
                    for _ in range(passes):
                        x, y = batch(step, rank)
                        loss = cross_entropy(net(x).float(), y)
                        (scaled.scale(loss) if scaled else loss).backward()
                    if scaled:
                        scaled.unscale_(optimizer)
                    if "clipped" in variant:
                        nn.utils.clip_grad_norm_(net.parameters(), 0.01)
                    scaled.step(optimizer) if scaled else optimizer.step()
                    scaled.update() if scaled else None

            key = " ".join([name, *options, *settings, variant])
            result[key] = warned(steps)
    return result


@job
def one_shard(rank: int, size: int) -> dict[str, Any]:
    """A shard on each rank that is the whole: nothing is exchanged, and steps are counted."""
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("pp", "shard"))["shard"]
    without, net, seen = sharded(mesh=mesh), sharded(mesh=mesh), []
    net.hidden.set_all_reduce_hook(lambda shard: seen.append(shard.numel()))
    hook = gcbench.shard_hook("onebit").register(net)
    for each in (without, net):
        train(each, range(STEPS), rank)
    state = hook.state_dict()
    again = gcbench.shard_hook("onebit")
    again.load_state_dict(state)
    again.register(sharded(mesh=mesh))
    momentum = gcbench.shard_hook("none", memory="momentum")
    return {
        "momentum": warned(lambda: momentum.register(sharded(mesh=mesh))),
        "equal": torch.equal(ended(net), ended(without)),
        "bytes": [hook.traffic.payload_up, hook.plain_bytes],
        "steps": [hook.step, again.step],
        "theirs": len(seen),
    }


@job
def accumulation(rank: int, size: int) -> dict[str, Any]:
    """Two backward passes a step, of which FSDP reduces the second: the hook is called once."""
    hook = gcbench.shard_hook("onebit")
    net = sharded()
    hook.register(net)
    optimizer = sgd(net)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part, last in ((step + 100, False), (step, True)):
            net.set_requires_gradient_sync(last)
            x, y = batch(part, rank)
            cross_entropy(net(x), y).backward()
        optimizer.step()

    def both(net: nn.Module, step: int, rank: int) -> dict[str, Tensor]:
        first, second = gradients(net, step + 100, rank), gradients(net, step, rank)
        return {name: first[name] + second[name] for name in first}

    return {"equal": torch.equal(ended(net), alone(hook, size, of=both)), "steps": hook.step}


@job
def unused(rank: int, size: int) -> dict[str, Any]:
    """Train with a parameter that has no gradient: FSDP leaves it out, unless told not to."""
    result: dict[str, Any] = {}

    def leave_out(net: nn.Module, step: int, rank: int) -> dict[str, Tensor]:
        x, y = batch(step, rank)
        x = torch.relu(net.norm(net.conv(x))).flatten(1)
        return of_loss(net, cross_entropy(torch.relu(net.hidden(x))[:, :5], y))

    def run(hook: Any, *, unused: bool) -> Tensor:
        net = model()
        net.forward = lambda x: torch.relu(
            net.hidden(torch.relu(net.norm(net.conv(x))).flatten(1))
        )[:, :5].clone()
        sharded(net)
        if unused:
            net.set_reduce_scatter_unused_params(True)
        hook.register(net)
        train(net, range(STEPS), rank)
        return ended(net)

    one = gcbench.shard_hook("onebit")
    result["refused"] = refused(lambda: run(one, unused=False))
    if not takes_unused():
        return result
    other = gcbench.shard_hook("terngrad")
    end = run(other, unused=True)
    other._modules = [each for each in other._modules if each.step]
    result["equal"] = torch.equal(end, alone(other, size, of=leave_out))
    return result


@job
def placement(rank: int, size: int) -> dict[str, Any]:
    """Train with a weight that is cut along its second axis: without a hook, and by two methods."""
    ends = []
    for hook in (None, gcbench.shard_hook("none"), gcbench.shard_hook("int8")):
        net = sharded(shard_placement_fn=lambda p: Shard(1) if p.shape == (40, 128) else None)
        if hook is not None:
            hook.register(net)
        train(net, range(STEPS), rank)
        ends.append(ended(net))
    first = next(p for m in hook._modules for p in m.layout.parameters if p.name == "hidden.weight")
    return {
        "chunks": [list(chunk) for chunk in first.chunks],
        "none": float((ends[0] - ends[1]).abs().max()),
        "int8": float((ends[0] - ends[2]).abs().max()),
    }


@job
def refusals(rank: int, size: int) -> dict[str, Any]:
    hook, result = gcbench.shard_hook, {}
    result["no fsdp"] = refused(lambda: hook("none").register(model()))
    frozen = model()
    frozen.requires_grad_(False)
    result["frozen"] = refused(lambda: hook("none").register(sharded(frozen)))
    result["double"] = refused(lambda: hook("none").register(sharded(model().double())))
    half = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    result["half"] = refused(lambda: hook("none").register(sharded(mp_policy=half)))
    mixed = model()
    mixed.hidden.bfloat16()
    mixed.hidden.bias = nn.Parameter(mixed.hidden.bias.detach().float())
    result["mixed"] = refused(lambda: hook("none").register(sharded(mixed)))
    net = sharded()
    one = hook("none").register(net)
    result["second hook"] = refused(lambda: hook("none").register(net))
    result["same hook"] = refused(lambda: one.register(sharded()))
    state = one.state_dict()

    def loaded(**changes: Any) -> Any:
        one = hook("none", seed=changes.pop("seed", 0))
        one.load_state_dict(changed(state, **changes))
        return one.register(sharded())

    odd, half_of = hook("none"), sharded(mp_policy=half)
    optimizer = sgd(half_of)
    result["half again"] = refused(lambda: odd.register(half_of, optimizer=optimizer))
    net = sharded()
    result["corrected"] = refused(lambda: odd.register(net, optimizer=sgd(net)))
    result["corrected"]["observers"] = len(optimizer._optimizer_step_post_hooks)
    result["state of another rank"] = refused(lambda: loaded(rank=size))
    result["state of other settings"] = refused(lambda: loaded(seed=3))
    result["state of another format"] = refused(lambda: loaded(format=99))
    result["state of another rank alone"] = refused(lambda: loaded(rank=size if rank else 0))
    factor = sharded()
    factor.hidden.set_gradient_divide_factor(3.0)
    result["factor"] = refused(lambda: hook("none").register(factor))
    factor = sharded()
    hook("none").register(factor)
    factor.set_gradient_divide_factor(3.0)
    result["factor later"] = refused(lambda: train(factor, range(1), rank))
    part = dist.new_group([rank], use_local_synchronization=True)
    net = sharded()
    one = hook("none").register(net)
    row = torch.zeros(one._modules[0].layout.row)
    words = row.repeat(size), part, dist.ReduceOp.AVG
    result["another group"] = refused(lambda: one._modules[0](row, *words))
    return result


@job
def checkpointed(rank: int, size: int) -> dict[str, Any]:
    """Activation checkpointing: backward runs the forward pass of a part, or of all, again."""
    result: dict[str, Any] = {}
    for name in ("none", "part", "root", "root, reentrant"):
        net = sharded()
        hook = gcbench.shard_hook("onebit").register(net)
        optimizer, forward = sgd(net), net.hidden.forward
        again = partial(checkpoint, use_reentrant="reentrant" in name)
        if name == "part":
            net.hidden.forward = partial(again, forward)
        call = partial(again, net) if "root" in name else net

        def run(call: Any = call, optimizer: Any = optimizer) -> None:
            for step in range(STEPS):
                x, y = batch(step, rank)
                optimizer.zero_grad()
                cross_entropy(call(x.requires_grad_()).float(), y).backward()
                optimizer.step()

        result[name] = refused(run) | {"end": digest(ended(net)), "steps": hook.step}
    return result


@job
def repeated(rank: int, size: int) -> dict[str, Any]:
    """Exchange twice per optimizer step: FSDP adds the means, or the first ones are discarded."""
    result: dict[str, Any] = {}
    for name, acts in {
        "accumulated": "zbbs" * 3,
        "discarded": "zbzbs" * 3,
        "discarded later": "zbsb" * 3,
        "momentum": "zbs" * 3,
        "momentum, accumulated": "zbbs" * 3,
    }.items():
        net = sharded()
        hook = gcbench.shard_hook("onebit", memory="momentum" if "momentum" in name else None)
        hook.register(net)
        optimizer = sgd(net, hook)

        def act(acts: str = acts, net: Any = net, optimizer: Any = optimizer) -> None:
            x, y = batch(0, rank)
            for each in acts:
                if each == "z":
                    optimizer.zero_grad()
                elif each == "s":
                    optimizer.step()
                else:
                    cross_entropy(net(x), y).backward()

        result[name] = warned(act)
        result[f"{name}, saved"] = warned(hook.state_dict)
    return result


@job
def replaced(rank: int, size: int) -> dict[str, Any]:
    """Another optimizer replaces the followed one, then makes steps without a backward pass."""
    net = sharded()
    hook = gcbench.shard_hook("onebit").register(net, optimizer=sgd(net))
    other = torch.optim.SGD(net.parameters(), lr=0.01)
    texts = warned(partial(train, net, range(1), rank, optimizer=other))
    texts += warned(lambda: [other.step() for _ in range(2)])
    calls = [call for text in texts for call in re.findall(r"hook\.(\w+)\(", text)]
    return {"texts": texts, "missing": [call for call in calls if not hasattr(hook, call)]}


@job
def rolled_back(rank: int, size: int) -> dict[str, Any]:
    """Return to an earlier step, with the hook's state and without."""
    result: dict[str, Any] = {}
    for name in ("model", "model, hook"):
        net = sharded()
        hook = gcbench.shard_hook("onebit").register(net)
        optimizer = train(net, range(2), rank)
        saved, state = copy.deepcopy(net.state_dict()), hook.state_dict()
        train(net, range(2, 3), rank, optimizer=optimizer)
        net.load_state_dict(saved)
        if name == "model, hook":
            hook.load_state_dict(state)
        result[name] = warned(partial(train, net, range(2, 4), rank, optimizer=optimizer))
    return result


@job
def parts(rank: int, size: int) -> dict[str, Any]:
    """Two modules have backward passes of their own; at the last step the second one is skipped."""
    both = nn.ModuleDict({"first": model(), "second": model()})
    for part in both.values():
        fully_shard(part)
    hook = gcbench.shard_hook("onebit", on_nonfinite="skip").register(both)
    first, second = sgd(both["first"]), sgd(both["second"])
    for step in range(3):
        train(both["first"], range(step, step + 1), rank, optimizer=first)
        x, y = batch(step, rank)
        second.zero_grad()
        (cross_entropy(both["second"](x), y) * (torch.inf if step == 2 else 1.0)).backward()
        if not hook.skipped:
            second.step()
    hook.state_dict()  # does not warn
    train(both["first"], range(3, STEPS), rank, optimizer=first)
    alone = fully_shard(model())
    gcbench.shard_hook("onebit").register(alone)
    train(alone, range(STEPS), rank)
    equal = torch.equal(ended(both["first"]), ended(alone))
    return {"skipped": hook.skipped, "equal": equal}


@job
def joint_parts(rank: int, size: int) -> dict[str, Any]:
    """Two modules have one backward pass, which skips a step after the first one's exchanges."""
    both = nn.ModuleDict({"first": sharded(), "second": fully_shard(model())})
    hook = gcbench.shard_hook("onebit", on_nonfinite="skip").register(both)
    optimizer = sgd(both)
    for step in range(STEPS):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        second = cross_entropy(both["second"](x), y) * (torch.inf if step == 2 else 1.0)
        (cross_entropy(both["first"](x), y) + second).backward()
        if step != 2:
            optimizer.step()
    alone = sharded()
    gcbench.shard_hook("onebit").register(alone)
    optimizer = train(alone, range(2), rank)
    train(alone, range(3, STEPS), rank, optimizer=optimizer)
    equal = torch.equal(ended(both["first"]), ended(alone))
    return {"skipped": hook.skipped, "equal": equal}


@job
def assigned(rank: int, size: int) -> dict[str, Any]:
    """`load_state_dict(assign=True)` makes new parameters, which the optimizer does not have."""
    result: dict[str, Any] = {}
    for name in ("stale", "later"):
        net = sharded()
        hook = gcbench.shard_hook("onebit")
        if name == "stale":
            hook.register(net, optimizer=sgd(net))
        net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True)
        if name == "later":
            hook.register(net, optimizer=sgd(net))
        result[name] = refused(lambda net=net: train(net, range(2), rank))
    return result


@job
def unfrozen(rank: int, size: int) -> dict[str, Any]:
    """A module is frozen at `register` and unfrozen later: without replicas, it trains in fp32."""
    net = model()
    net.branch.requires_grad_(False)
    sharded(net)
    gcbench.shard_hook("int8").register(net)
    train(net, range(1), rank)
    with torch.no_grad():
        net(batch(0, rank)[0])
    net.branch.requires_grad_(True)
    texts = warned(partial(train, net, range(2), rank))
    return {"warned": [text for text in texts if "branch" in text]}


@job
def swapped(rank: int, size: int) -> dict[str, Any]:
    """Freeze one layer and unfreeze another of the same size: on all ranks, or on one."""
    result: dict[str, Any] = {}
    for name in ("all", "one", "gathered"):
        net = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        net[1].requires_grad_(False)
        fully_shard(net)
        gcbench.shard_hook("topk").register(net)

        def step(net: nn.Module = net) -> None:
            net(torch.ones(2, 8)).sum().backward()

        step()
        if name == "gathered":
            with torch.no_grad():
                net(torch.ones(2, 8))
        if name != "one" or rank:
            net[0].requires_grad_(False)
            net[1].requires_grad_(True)
        result[name] = refused(step)
    return result


@job
def unfrozen_replicas(rank: int, size: int) -> dict[str, Any]:
    """As `unfrozen`, with two replicas of two shards: no rank trains on."""
    result: dict[str, Any] = {}
    shards, replicas = grid(size)
    for name in ("branch", "nothing"):
        net = model()
        net.branch.requires_grad_(False)
        sharded(net, shards)
        gcbench.shard_hook("int8").register(net, replicas=replicas)
        train(net, range(1), rank)
        if name == "branch":
            net.branch.requires_grad_(True)
        result[name] = refused(lambda net=net: train(net, range(2), rank))
    return result


@job
def refused_kinds(rank: int, size: int) -> dict[str, Any]:
    """Models that FSDP2 takes and the hook does not."""
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.fsdp._fully_shard import _fsdp_common
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers "fake"

    hook, result = gcbench.shard_hook, {}
    result["replicated"] = refused(lambda: hook("none").register(replicate(model())))
    both = init_device_mesh("cpu", (1, size), mesh_dim_names=("data", "tensor"))
    parallel = model()
    parallelize_module(parallel.hidden, both["tensor"], ColwiseParallel())
    net = sharded(parallel, both["data"])
    result["tensor parallel"] = refused(lambda: hook("none").register(net))
    hooked_already = sharded()
    hooked_already.hidden.set_all_reduce_hook(lambda shard: None)
    alone = init_device_mesh("cpu", (size, 1), mesh_dim_names=("all", "one"))["one"]
    result["all-reduce hook"] = refused(
        lambda: hook("none").register(hooked_already, replicas=alone)
    )
    fake = DeviceMesh.from_group(dist.new_group(list(range(size)), backend="fake"), "cpu")
    result["backend"] = refused(lambda: hook("none").register(sharded(mesh=fake)))
    result["backend of replicas"] = refused(
        lambda: hook("none").register(sharded(mesh=alone), replicas=fake)
    )
    if not hasattr(_fsdp_common, "ShardPlacementResult"):
        result["several meshes"] = {"skipped": "this torch takes one mesh for a module"}
        return result
    other = _fsdp_common.FSDPMeshInfo(mesh=alone, shard_mesh_dim=0)
    elsewhere = _fsdp_common.ShardPlacementResult(Shard(0), other)
    net = model()
    fully_shard(
        net,
        mesh=init_device_mesh("cpu", (size,)),
        shard_placement_fn=lambda p: elsewhere if p.ndim > 3 else None,
    )
    result["several meshes"] = refused(lambda: hook("none").register(net))
    return result


@job
def differences(rank: int, size: int) -> dict[str, Any]:
    """Ranks that register different things, or nothing; and a gradient that is not finite."""
    hook, odd, result = gcbench.shard_hook, rank == size - 1, {}
    result["method"] = refused(lambda: hook("qsgd" if odd else "terngrad").register(sharded()))
    result["seed"] = refused(lambda: hook("none", seed=int(odd)).register(sharded()))
    net = sharded()
    dist.barrier()
    if not odd:
        result["absent"] = refused(lambda: hook("none", timeout=1.0).register(net))
    dist.barrier()
    if odd:
        result["absent"] = refused(lambda: hook("none", timeout=1.0).register(net))
    dist.barrier()  # otherwise the late rank would meet the others at their next call
    net = sharded()
    with mock.patch.object(handshake, "PATIENCE", 0.1):  # as if a rank prepared data for a minute
        time.sleep(0.5 * odd)
        one = hook("terngrad").register(net)
    x, _ = batch(0, rank)
    result["nan"] = refused(lambda: (net(x).sum() * float("nan")).backward())
    result["after"] = refused(lambda: one._modules[0](x, x, None, None))
    return result


# ---- nothing goes wrong silently -----------------------------------------------------------------


def carried(hook: Any) -> list[Tensor]:
    """Return copies of all that a hook carries on this rank."""
    return [
        value.clone()
        for module in hook._modules
        for level in module.levels
        for state in (*level.exchange.workers[0], *level.exchange.joint)
        for value in state.values()
    ]


def same(before: list[Tensor], after: list[Tensor], factor: float = 1.0) -> bool:
    return all(torch.equal(b * factor, a) for b, a in zip(before, after, strict=True))


def late_nan(module: nn.Module, inputs: Any, out: Tensor) -> None:
    """Make the gradients of a module NaN that ends its backward pass last, and no others."""
    out.register_hook(lambda gradient: gradient * torch.nan)


@job
def silent(rank: int, size: int) -> dict[str, Any]:
    """One rank's gradient is not finite; rates that differ; states; another step after an error."""
    result: dict[str, Any] = {}
    x, y = batch(0, rank)

    def backward(net: nn.Module) -> None:
        cross_entropy(net(x).float(), y).backward()

    for when in ("stop", "skip"):
        net = sharded()
        hook = gcbench.shard_hook("onebit", on_nonfinite=when).register(net)
        train(net, range(2), rank)
        before, bytes_before, names = carried(hook), up(hook), dict(net.named_parameters())
        net.zero_grad()
        # The root module, whose backward ends last, is not finite: the others were exchanged.
        handle = None
        if rank == size - 1:
            handle = net.conv.register_forward_hook(late_nan)
        result[when] = refused(lambda net=net: backward(net))
        if handle is not None:
            handle.remove()
        if when == "skip":
            result["nan"] = bool(names["conv.weight"].grad.to_local().isnan().all())
            result["untouched"] = same(before, carried(hook))
            result["counted"] = [hook.step, hook.skipped]
            result["more bytes"] = up(hook) - bytes_before
            net.zero_grad()
            backward(net)
            result["and on"] = not same(before, carried(hook)) and hook.skipped == 1
        else:
            result["again"] = refused(lambda net=net: backward(net))
            result["again, a part"] = refused(lambda net=net: net.hidden(torch.randn(2, 128)))

    net = sharded()
    hook = gcbench.shard_hook("onebit").register(net)
    hook.lr = 0.1 + rank
    result["rates"] = refused(lambda: backward(net))

    ends = []
    for follows in (True, False):
        net = sharded()
        optimizer = sgd(net)
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 2.0**-step)
        hook = gcbench.shard_hook("onebit", **DENSE)
        hook.register(net, **({"optimizer": optimizer} if follows else {}))
        for step in range(STEPS):
            if not follows:
                hook.lr = optimizer.param_groups[0]["lr"]
            x, y = batch(step, rank)
            optimizer.zero_grad()
            backward(net)
            optimizer.step()
            rate.step()
        ends.append(ended(net))
    result["optimizer"] = torch.equal(*ends)

    net = sharded()
    hook = gcbench.shard_hook("onebit", start_step=2, **DENSE).register(net)
    train(net, range(3), rank)
    state = hook.state_dict()
    ((_, entry),) = state.items()
    before = carried(hook)
    root = entry["modules"]["hidden"]

    def bad(**values: Any) -> dict[str, Any]:
        inner = {**root["levels"][0], **values.pop("level", {})}
        modules = {**entry["modules"], "hidden": {**root, "levels": [sealed.seal(inner)], **values}}
        return changed(state, modules=modules)

    tensors = root["levels"][0]["tensors"]
    name = next(iter(tensors))
    for case, wrong in {
        "shape": bad(level={"tensors": {**tensors, name: tensors[name][:1].clone()}}),
        "dtype": bad(level={"tensors": {**tensors, name: tensors[name].to(torch.int8)}}),
        "step": bad(step=-5),
        "missing": bad(levels=[]),
        "empty": {},
    }.items():
        result[f"state, {case}"] = refused(lambda wrong=wrong: hook.load_state_dict(wrong))
    result["unchanged"] = same(before, carried(hook))
    train(net, range(3, 4), rank)
    hook.load_state_dict(state)
    result["loaded"] = same(before, carried(hook)) and hook.step == 3

    place = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(place)
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"hook": hook.state_dict()}, checkpoint_id=place[0])
        again = gcbench.shard_hook("onebit", start_step=2, **DENSE).register(sharded())
        loaded = {"hook": again.state_dict()}
        dcp.load(loaded, checkpoint_id=place[0])
    again.load_state_dict(loaded["hook"])
    result["dcp"] = [same(before, carried(again)), again.step, loaded["hook"]["rank"]]

    hook = gcbench.shard_hook("topk", ratio="0:0.5/2:0.1")
    end = hooked(rank, hook)
    result["schedule"] = not torch.equal(end, hooked(rank, gcbench.shard_hook("topk", ratio=0.5)))
    whole = 4 * sum(p.numel() for p in model().parameters())
    result["bytes"] = up(hook) / whole / STEPS
    return result


def with_scales(
    rank: int, scales: list[float], mesh: Any = None, replicas: Any = None, **options: Any
) -> Tensor:
    """Train with these loss scales, 0 for no scaler; return the parameters."""
    net = sharded(mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    current = SimpleNamespace()
    scaler = SimpleNamespace(get_scale=lambda: current.scale)
    hook = gcbench.shard_hook(**options, **DENSE, scaler=scaler if scales[0] else None)
    hook.register(net, replicas=replicas, optimizer=optimizer)
    for step, scale in enumerate(scales):
        current.scale = scale
        x, y = batch(step, rank)
        optimizer.zero_grad()
        (cross_entropy(net(x), y) * (scale or 1.0)).backward()
        for parameter in net.parameters():
            parameter.grad /= scale or 1.0
        optimizer.step()
    return ended(net)


SCALES = [2.0**k for k in (10, 10, 11, 9, 9, 16)]


@job
def loss_scales(rank: int, size: int) -> dict[str, Any]:
    """A loss scale that changes, against training without a scaler."""
    result: dict[str, Any] = {}
    clipped = {"memory": "dgc", "memory_options": {"clip": 0.1}, "ratio": 0.1}
    for name, options in (
        *(("onebit", {}), ("signsgd", {}), ("threshold", {})),
        *(("topk", {"memory": "momentum"}), ("topk", clipped)),
    ):
        plain, scaled = (
            with_scales(rank, scales, compressor=name, **options)
            for scales in ([0] * len(SCALES), SCALES)
        )
        result[f"{name} {options}"] = torch.equal(plain, scaled)
    return {"equal": result}


@job
def two_levels_scales(rank: int, size: int) -> dict[str, Any]:
    """The same with a memory of estimates between replicas."""
    shards, replicas = grid(size)
    options = {"compressor": "int8", "between": "topk", "between_memory": "ef21"}
    plain, scaled = (
        with_scales(rank, scales, shards, replicas, **options)
        for scales in ([0] * len(SCALES), SCALES)
    )
    return {"equal": {"ef21": torch.equal(plain, scaled)}}


@job
def skipped_rates(rank: int, size: int) -> dict[str, Any]:
    """The learning rate and a field change at a step that is skipped: residuals follow the rate."""
    net = sharded()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    hook = gcbench.shard_hook("topk", ratio="0:0.5/2:0.25", on_nonfinite="skip")
    hook.register(net, optimizer=optimizer)

    def updates() -> list[Tensor]:
        """Return the update that each residual stands for, by module, for one rate per module."""
        exchanges = [level.exchange for module in hook._modules for level in module.levels]
        return [each.workers[0][0]["residual"] * each.lr for each in exchanges]

    def backward(step: int) -> None:
        x, y = batch(step, rank)
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()

    for step in range(2):
        backward(step)
        optimizer.step()
    before, bytes_before = updates(), up(hook)
    optimizer.param_groups[0]["lr"] = 0.125
    handle = net.conv.register_forward_hook(late_nan)  # the root, whose backward ends last
    backward(2)
    handle.remove()
    return {
        "skipped": hook.skipped,
        "exchanges": [
            [each.exchange.lr, each.exchange.lanes[0].compressor.ratio] for each in hook._levels()
        ],
        "more bytes": up(hook) - bytes_before,
        "equal": same(before, updates()),
        "not zero": all(bool(each.any()) for each in before),
    }


@job
def silent_replicas(rank: int, size: int) -> dict[str, Any]:
    """Two replicas of two shards: what one rank finds, all four raise, or all skip."""
    result: dict[str, Any] = {}
    shards, replicas = grid(size)
    x, y = batch(0, rank)
    for when in ("stop", "skip"):
        net = sharded(mesh=shards)
        hook = gcbench.shard_hook("int8", between="onebit", on_nonfinite=when)
        hook.register(net, replicas=replicas)
        train(net, range(2), rank)
        before = carried(hook)
        net.zero_grad()
        if rank == 1:
            net.conv.register_forward_hook(late_nan)
        result[when] = refused(lambda net=net: cross_entropy(net(x).float(), y).backward())
        if when == "skip":
            result["untouched"] = same(before, carried(hook))
            result["nan"] = bool(net.conv.weight.grad.to_local().isnan().all())
        else:
            result["again"] = refused(lambda net=net: net(x))
    return result
