"""Training jobs of two and three processes, as users write them, for tests of `comm_hook`.

One start of the processes does many jobs, each of which returns what a test looks at.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jobs import PROMPT, collection, digest
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

import gcbench
from gcbench import _version
from gcbench.core import codec, registry, sealed
from gcbench.core.clock import Clock
from gcbench.core.compressor import (
    Compressor,
    Context,
    Key,
    MultiRoundCompressor,
    Payload,
    Segments,
)
from gcbench.core.exchange import Exchange
from gcbench.core.memory import Memory
from gcbench.core.world import Link, SimulatedWorld
from gcbench.integrations import frameworks, scheme
from gcbench.integrations import plan as plans

STEPS = 5
BATCH = 8


class Net(nn.Module):
    """A convolution, norms, two linear layers; and a branch that a step may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.hidden = nn.Linear(8 * 16, 40)
        self.branch = nn.Linear(40, 40)
        self.last = nn.Linear(40, 5)

    def forward(self, x: Tensor, *, branch: bool = True) -> Tensor:
        x = torch.relu(self.norm(self.conv(x))).flatten(1)
        x = torch.relu(self.hidden(x))
        return self.last(x + self.branch(x) if branch else x)


class Zeros(nn.Module):
    """A weight, and a bias that counts `factor` times."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8))

    def forward(self, factor: float) -> Tensor:
        return self.weight.sum() + factor * self.bias.sum()


def model() -> Net:
    torch.manual_seed(1)
    return Net()


def comm_hook(*words: Any, **options: Any) -> Any:
    """Make a hook with a short timeout, so that a test that hangs fails soon."""
    return gcbench.comm_hook(*words, **{"timeout": 60.0, **options})


def up(hook: Any) -> float:
    """Return the bytes of gradients that this rank handed over, without those of agreements."""
    return hook.traffic.payload_up - hook.agreement.payload_up


def changed(state: Any, **values: Any) -> dict[str, Any]:
    """Return a state with other values, with a valid digest, as if a hook had saved it."""
    ((key, entry),) = state.items()
    return {key: sealed.seal({k: v for k, v in {**entry, **values}.items() if k != "digest"})}


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(BATCH, 3, 4, 4, generator=generator)
    return x, torch.randint(0, 5, (BATCH,), generator=generator)


def sgd(net: nn.Module, hook: Any = None) -> torch.optim.Optimizer:
    """Return SGD, with momentum unless the method of the hook has its own."""
    no_momentum = hook and (hook.settings.momentum or not hook.settings.compressor.rule.plain)
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.0 if no_momentum else 0.9)


def train(
    ddp: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    rank: int,
    forward: Callable[..., Tensor] | None = None,
) -> None:
    """Train as a user would; `forward(ddp, x, step)`, if given, computes the output."""
    for step in steps:
        x, y = batch(step, rank)
        optimizer.zero_grad()
        output = ddp(x) if forward is None else forward(ddp, x, step)
        cross_entropy(output.float(), y).backward()
        optimizer.step()


def wrapped(net: nn.Module, **options: Any) -> DDP:
    """Wrap a module in DDP with small buckets: there are several, and DDP rebuilds them."""
    return DDP(net, **{"bucket_cap_mb": 0.01, **options})


def flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1).float() for p in net.parameters()])


Gradients = Callable[[nn.Module, int, int], dict[str, Tensor]]


def gradients(net: nn.Module, step: int, rank: int) -> dict[str, Tensor]:
    """Return one worker's gradients by name; zeros of a parameter that was not used."""
    x, y = batch(step, rank)
    return of_loss(net, cross_entropy(net(x), y))


def of_loss(net: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    named = dict(net.named_parameters())
    result = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(named.items(), result, strict=True)
    }


def alone(
    hook: Any,
    net: nn.Module,
    size: int,
    of: Gradients = gradients,
    *,
    steps: int = STEPS,
    lrs: Callable[[int], float] = lambda step: 1.0,
) -> Tensor:
    """Return the parameters after the same training by gcbench's own exchange, in this process."""
    settings, plan = hook.settings, hook._plan
    named = dict(net.named_parameters())
    world = SimulatedWorld(size, torch.device("cpu"), Link(10.0, 50.0), 1, 1)
    exchange = Exchange(world, settings.lanes(plan, 0), settings.seed, Clock(torch.device("cpu")))
    optimizer = sgd(net, hook)
    for step in range(steps):
        if step in (settings.start_step, *settings.later) and step:
            exchange.change(settings.lanes(plan, step))
        buckets = []
        for rank in range(size):
            each = of(net, step, rank)
            flats = [each[placed.name].reshape(-1).float() for placed in plan.tensors]
            buckets.append(torch.cat(flats))
        mean = exchange.mean(buckets, step, lrs(step))
        for placed in plan.tensors:
            named[placed.name].grad = placed.of(mean).to(named[placed.name].dtype)
        optimizer.step()
    world.close()
    return flat(net)


def hooked(rank: int, hook: Any, *, steps: range = range(STEPS), **options: Any) -> Tensor:
    ddp = wrapped(model(), **options)
    hook.register(ddp)
    train(ddp, sgd(ddp, hook), steps, rank)
    return flat(ddp)


# ---- jobs ----------------------------------------------------------------------------------------


def resumable() -> list[str]:
    """Return the first method of each kind of state: a memory, an update rule, a collective."""
    first: dict[object, str] = {}
    for name in registry.compressors():
        one = registry.compressor(name)
        first.setdefault((one.memory, type(one.rule), resuming(one)), name)
    return [*first.values()]


def resuming(one: Compressor) -> str:
    """Return the collective of a resumed job: owners of a two-shot exchange have residuals, too."""
    legal = one.legal_collectives()
    return "twoshot" if "twoshot" in legal else legal[-1]


def traits(one: Compressor) -> tuple[object, ...]:
    """Return the properties of a method that change how it is exchanged."""
    segments = Segments.of([(64,)])
    return (
        isinstance(one, MultiRoundCompressor),
        one.memory,
        one.draw_shared(Context(segments, key=Key(0, 0, 0))) is not None,
        bool(codec.prepare(one, torch.ones(64), Context(segments)).statistic.numel()),
    )


def representatives(collectives: Collection[str] = ()) -> list[str]:
    """Return the methods that are the first with something by which an exchange differs.

    A hook knows no method by name. `collectives`: of these alone; empty: of all.
    """
    seen: set[Any] = set()
    result = []
    for name in registry.compressors():
        one = registry.compressor(name)
        declared = (
            *traits(one),
            type(one.rule),
            "groups" if isinstance(one.granularity, int) else one.granularity,
            one.layout(Segments.of([(64,)])) is None,
        )
        legal = [each for each in one.legal_collectives() if each in (collectives or (each,))]
        if not seen.issuperset(ways := {(each, *declared) for each in legal}):
            result.append(name)
            seen |= ways
    return result


def method(rank: int, size: int, name: str) -> dict[str, Any]:
    """One method, by each of its collectives, on rank 0 against gcbench's own exchange.

    A method of `resumable` is resumed as well.
    """
    result: dict[str, Any] = {}
    compressor = registry.compressor(name)
    for collective in compressor.legal_collectives():
        options = {"collective": collective, "dense_below": 50, "bucket_mb": 0.015}
        if compressor.rule.needs_warm_up:
            options["start_step"] = 2
        hook = comm_hook(name, **options, check_every=2 if compressor.rule.plain else 0)
        ended = hooked(rank, hook)
        expected = ended if rank else alone(hook, model(), size)
        result[collective] = {
            "end": digest(ended),
            "equal": torch.equal(ended, expected),
            "far": float((ended - expected).abs().max()),
            "lanes": len(hook._plan.lanes),
            "up": up(hook) / hook.plain_bytes,
        }
        hook.close()
        if collective == resuming(compressor) and name in resumable():
            result[collective]["resumed"] = torch.equal(ended, resumed(rank, name, options))
    return result


def resumed(rank: int, name: str, options: dict[str, Any], rates: tuple[float, ...] = ()) -> Tensor:
    """Return the parameters of a job that was saved after step 3 and resumed in new objects.

    `rates`: the learning rate of the first hook, and optionally that of the second.
    """
    ddp = wrapped(model())
    hook = comm_hook(name, **options)
    for rate in rates[:1]:
        hook.lr = rate
    hook.register(ddp)
    optimizer = sgd(ddp, hook)
    train(ddp, optimizer, range(3), rank)
    file = io.BytesIO()
    states = ddp.module.state_dict(), optimizer.state_dict(), hook.state_dict()
    torch.save(states, file)
    hook.close()
    file.seek(0)
    parameters, optimizer_state, hook_state = torch.load(file, weights_only=True)
    net = model()
    net.load_state_dict(parameters)
    ddp = wrapped(net)
    hook = comm_hook(name, **options)
    optimizer = sgd(ddp, hook)
    optimizer.load_state_dict(optimizer_state)
    for rate in rates[1:]:
        hook.lr = rate
    hook.load_state_dict(hook_state)
    hook.register(ddp)
    train(ddp, optimizer, range(3, STEPS), rank)
    hook.close()
    return flat(ddp)


JOBS, job = collection()


@job
def plain(rank: int, size: int) -> dict[str, Any]:
    """Train with the method `none`, and by DDP without a hook."""
    ddp = wrapped(model())
    train(ddp, sgd(ddp), range(STEPS), rank)
    ended = hooked(rank, comm_hook("none"))
    moved = float((ended - flat(model())).norm())
    return {"far": float((flat(ddp) - ended).abs().max()), "moved": moved}


METHOD = {"bucket_mb": 0.015, "dense_below": 50}


@job
def rebuilt(rank: int, size: int) -> dict[str, Any]:
    """Record in which order DDP hands parameters over, and in which lanes are exchanged."""
    orders: list[list[str]] = []
    lanes: list[list[int]] = []
    hook = comm_hook("onebit", **METHOD)
    take, exchange = hook._take, hook._exchange_lane

    def seen(arrived: Any, *rest: Any) -> None:
        if not hook._seen:
            orders.append([])
            lanes.append([])
        take(arrived, *rest)
        orders[-1] += [placed.name for placed, _ in arrived.parts]

    def exchanged(number: int) -> None:
        lanes[-1].append(number)
        exchange(number)

    hook._take, hook._exchange_lane = seen, exchanged
    one = hooked(rank, hook)
    other = hooked(rank, comm_hook("onebit", **METHOD), bucket_cap_mb=25)
    return {"orders": orders, "lanes": lanes, "equal": torch.equal(one, other)}


@job
def options(rank: int, size: int) -> dict[str, Any]:
    """Train with each option of DDP and of the hook, and by gcbench's own exchange."""
    result = {}
    for method, name, fields, of_ddp in (
        ("onebit", "static graph", {}, {"static_graph": True}),
        ("onebit", "find unused, none is", {}, {"find_unused_parameters": True}),
        ("onebit", "gradient as bucket view", {}, {"gradient_as_bucket_view": True}),
        ("onebit", "start step", {"start_step": 2}, {}),
        ("qsgd", "dense last", {"dense_last": True}, {}),
        ("qsgd", "one lane per tensor", {"bucket_mb": 0}, {}),
        ("onebit", "one lane", {"bucket_mb": 25.0, "dense_below": 0}, {}),
        ("qsgd", "another seed", {"seed": 7}, {}),
        ("topk", "memory", {"memory": "dgc", "memory_options": {"momentum": 0.5}}, {}),
    ):
        hook = comm_hook(method, **{**METHOD, **fields})
        ended = hooked(rank, hook, **of_ddp)
        result[name] = torch.equal(ended, alone(hook, model(), size))
        hook.close()
    return result


@job
def learning_rate(rank: int, size: int) -> dict[str, Any]:
    """Residuals follow the learning rate of the hook."""
    ended = []
    for follows in (True, False):
        hook = comm_hook("onebit", **METHOD)

        def forward(ddp: nn.Module, x: Tensor, step: int, hook=hook, follows=follows) -> Tensor:
            hook.lr = 1 / (1 + step) if follows else 1.0
            return ddp(x)

        ddp = wrapped(model())
        hook.register(ddp)
        train(ddp, sgd(ddp), range(STEPS), rank, forward)
        ended.append(flat(ddp))
    expected = alone(hook, model(), size, lrs=lambda step: 1 / (1 + step))
    return {"equal": torch.equal(ended[0], expected), "matters": not torch.equal(*ended)}


@job
def resumed_rate(rank: int, size: int) -> dict[str, Any]:
    """A job that assigned a rate once resumes with it, or with a newly assigned one."""
    hook = comm_hook("onebit", **METHOD)
    ended = hooked(rank, hook)
    expected = alone(hook, model(), size, lrs=lambda step: 0.01 if step < 3 else 0.04)
    return {
        "kept": torch.equal(resumed(rank, "onebit", METHOD, (0.01,)), ended),
        "set": torch.equal(resumed(rank, "onebit", METHOD, (0.01, 0.04)), expected),
        "matters": not torch.equal(ended, expected),
    }


@job
def resumed_start(rank: int, size: int) -> dict[str, Any]:
    """Resume a job that was saved before, at or after its first compressed step."""
    result = {}
    for name, step in (("onebit", 2), ("powersgd", 3), ("topk", 3), ("onebit", 4)):
        memory = {"memory": "dgc"} if name == "topk" else {}
        options = {**METHOD, **memory, "start_step": step}
        ended = hooked(rank, comm_hook(name, **options))
        result[f"{name}, {step}"] = torch.equal(ended, resumed(rank, name, options))
    return result


@job
def skipped_warm_up(rank: int, size: int) -> dict[str, Any]:
    """Skip steps before, in and after the warm-up, and resume there; on the same data."""

    def trained(bad: Collection[int]) -> Tensor:
        net, good = model(), iter(range(STEPS))
        hook: Any = None
        state: Any = None
        for step in range(STEPS + len(bad)):
            if step in (0, 4, 7, 8):  # before step 7 the first compressed one was skipped
                if hook is not None:
                    state = hook.state_dict()
                    hook.close()
                ddp = wrapped(net)
                hook = comm_hook("onebitadam", start_step=2, on_nonfinite="skip", **METHOD)
                if state is not None:
                    hook.load_state_dict(state)
                hook.register(ddp)
                optimizer = hook.optimizer(net.parameters(), lr=0.01)
            net.zero_grad()
            x, y = batch(0 if step in bad else next(good), rank)
            loss = cross_entropy(ddp(x), y)
            (loss * torch.inf if step in bad else loss).backward()
            if step not in bad:
                optimizer.step()
        hook.close()
        return flat(net)

    ended = trained([])
    moved = not torch.equal(ended, flat(model()))
    return {"moved": moved, "equal": torch.equal(trained([0, 1, 3, 4, 6]), ended)}


@job
def no_sync(rank: int, size: int) -> dict[str, Any]:
    """Two micro-batches a step, of which the first is not exchanged."""
    hook = comm_hook("onebit", **METHOD)
    ddp = wrapped(model())
    hook.register(ddp)
    optimizer = sgd(ddp)
    for step in range(STEPS):
        optimizer.zero_grad()
        with ddp.no_sync():
            x, y = batch(step + 100, rank)
            cross_entropy(ddp(x), y).backward()
        x, y = batch(step, rank)
        cross_entropy(ddp(x), y).backward()
        optimizer.step()

    def both(net: nn.Module, step: int, rank: int) -> dict[str, Tensor]:
        first, second = gradients(net, step + 100, rank), gradients(net, step, rank)
        return {name: first[name] + second[name] for name in first}

    expected = alone(hook, model(), size, both)
    return {"equal": torch.equal(flat(ddp), expected), "steps": hook.step}


@job
def autocast(rank: int, size: int) -> dict[str, Any]:
    hook = comm_hook("onebit", **METHOD)
    ddp = wrapped(model())
    hook.register(ddp)

    def forward(net: nn.Module, x: Tensor, step: int = 0) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return net(x)

    def of(net: nn.Module, step: int, rank: int) -> dict[str, Tensor]:
        x, y = batch(step, rank)
        return of_loss(net, cross_entropy(forward(net, x).float(), y))

    train(ddp, sgd(ddp), range(STEPS), rank, forward)
    return {"equal": torch.equal(flat(ddp), alone(hook, model(), size, of))}


@job
def compiled(rank: int, size: int) -> dict[str, Any]:
    """Train a model that torch.compile wraps after `register`; and one as it is."""
    ends, texts = [], []
    for compiles in (False, True):
        ddp = wrapped(model(), bucket_cap_mb=25)
        hook = comm_hook("onebit").register(ddp)
        called: Any = torch.compile(ddp, backend="eager") if compiles else ddp
        texts = warned(partial(train, called, sgd(ddp), range(STEPS), rank))
        ends.append(flat(ddp))
        hook.close()
    return {"equal": torch.equal(*ends), "texts": texts}


@job
def bfloat16(rank: int, size: int) -> dict[str, Any]:
    """A model whose parameters are bfloat16: exchanged in float32, rounded at the end."""
    hook = comm_hook("onebit", **METHOD)
    ddp = wrapped(model().bfloat16())
    hook.register(ddp)

    def of(net: nn.Module, step: int, rank: int) -> dict[str, Tensor]:
        x, y = batch(step, rank)
        return of_loss(net, cross_entropy(net(x.bfloat16()).float(), y))

    train(ddp, sgd(ddp), range(STEPS), rank, lambda net, x, step: net(x.bfloat16()))
    return {"equal": torch.equal(flat(ddp), alone(hook, model().bfloat16(), size, of))}


@job
def channels_last(rank: int, size: int) -> dict[str, Any]:
    """Segments and shapes are those of the parameter, whatever its strides."""
    result = {}
    for name, fields in (("onebit", {}), ("powersgd", {"rank": 1})):
        hook = comm_hook(name, **METHOD, **fields)
        net = model().to(memory_format=torch.channels_last)
        ddp = wrapped(net)
        hook.register(ddp)
        train(ddp, sgd(ddp), range(STEPS), rank)
        expected = alone(hook, model().to(memory_format=torch.channels_last), size)
        result[name] = torch.equal(flat(ddp), expected)
        result["permuted"] = not net.conv.weight.is_contiguous()
    return result


@job
def unused(rank: int, size: int) -> dict[str, Any]:
    """A branch that no rank uses at step 2, and only rank 0 at step 3."""
    result: dict[str, Any] = {}
    for name in ("onebit", "powersgd", "topk"):
        hook = comm_hook(name, bucket_mb=25.0, check_every=1)
        ddp = wrapped(model(), find_unused_parameters=True)
        hook.register(ddp)
        optimizer = sgd(ddp)
        steps: list[Tensor] = []

        def used(step: int, rank: int) -> bool:
            return step < 2 or (step == 3 and rank == 0) or step > 3

        def forward(net: nn.Module, x: Tensor, step: int, used=used) -> Tensor:
            return net(x, branch=used(step, rank))

        residuals_after: list[Tensor] = []
        owners: list[Any] = []
        for step in range(STEPS):
            train(ddp, optimizer, range(step, step + 1), rank, forward)
            steps.append(ddp.module.branch.weight.grad is None)
            plan = hook._plan
            placed = next(each for each in plan.tensors if each.name == "branch.weight")
            state = plans.state_views(hook._level.exchange, plan, placed)
            residuals_after.append(state["residual"].clone())
            owners.append(state["owner"].clone() if "owner" in state else None)
        same = torch.equal(residuals_after[1], residuals_after[2]) and (
            owners[1] is None or torch.equal(owners[1], owners[2])
        )
        branch = ddp.module.branch.weight
        present = [residuals(hook)["branch.weight"], branch.grad.clone()]
        x, y = batch(0, rank)
        cross_entropy(ddp(x, branch=False), y).backward()  # DDP passes on the earlier gradient
        later = [residuals(hook)["branch.weight"], branch.grad]
        result[name] = {
            "earlier gradient": [torch.equal(*pair) for pair in zip(present, later, strict=True)],
            "none": steps,
            "carried": bool(residuals_after[1].any()),
            "kept": same,
            "moves on": not torch.equal(residuals_after[2], residuals_after[3]),
            "compared at 2": sorted({r.name for r in hook.records if r.step == 2}),
            "sum": float(flat(ddp).double().sum()),
        }
        hook.close()
    return result


@job
def stale(rank: int, size: int) -> dict[str, Any]:
    """A large gradient of an earlier step does not take part in the choice of the largest ones."""
    x, y = batch(0, rank)
    means = []
    for earlier in (None, torch.full((40, 40), 1e3)):
        net = model()
        ddp = wrapped(net, find_unused_parameters=True)
        hook = comm_hook("topk", granularity="model", memory="none", bucket_mb=25.0).register(ddp)
        net.branch.weight.grad = earlier
        cross_entropy(ddp(x, branch=False), y).backward()
        others = {n: p.grad for n, p in net.named_parameters() if "branch" not in n}
        means.append(torch.cat([gradient.flatten() for gradient in others.values()]))
        hook.close()
    return {"equal": torch.equal(*means)}


@job
def one_rank(rank: int, size: int) -> dict[str, Any]:
    """With one rank in the group nothing is compressed; steps are counted, over a restart, too."""
    groups = [dist.new_group([each]) for each in range(size)]
    alone = {"process_group": groups[rank]}
    hook = comm_hook("onebit", check_every=1)
    hook.lr = 0.5
    one = hooked(rank, hook, **alone)
    ddp = wrapped(model(), **alone)
    train(ddp, sgd(ddp), range(STEPS), rank)
    hook.close()
    state = hook.state_dict()
    again = comm_hook("onebit", check_every=1)
    again.load_state_dict(state)
    net = wrapped(model(), **alone)
    again.register(net)
    resumed = again.step, again.lr
    with net.no_sync():
        net(batch(0, rank)[0]).sum().backward()
    train(net, sgd(net), range(2), rank)
    other = comm_hook("onebit", check_every=1)
    other.load_state_dict(state)
    return {
        "equal": torch.equal(one, flat(ddp)),
        "bytes": (hook.traffic.payload_up, hook.plain_bytes, hook.records),
        "state": {key: state[key] for key in ("lr", "step", "rank", "world_size", "exchange")},
        "resumed": resumed,
        "then": again.step,
        "more ranks": refused(lambda: register(other)),
    }


@job
def group_states(rank: int, size: int) -> dict[str, Any]:
    """Data-parallel groups of one rank, as beside a tensor-parallel dimension."""
    groups = [dist.new_group([each]) for each in range(size)]
    alone = {"process_group": groups[rank]}
    hook = comm_hook("none", memory="dgc")
    hooked(rank, hook, **alone)
    state = hook.state_dict()
    hook.close()
    states: list[Any] = [None] * size
    dist.all_gather_object(states, dict(state))

    def loaded(saved: Mapping[str, Any]) -> int:
        again = comm_hook("none", memory="dgc")
        again.load_state_dict(saved)
        again.register(wrapped(model(), **alone))
        again.close()
        return int(again.step)

    merged = {key: entry for each in states for key, entry in each.items()}
    return {
        "keys": sorted(merged),
        "step": loaded(merged),
        "another": refused(lambda: loaded(states[1 - rank])),
    }


@job
def one_rank_momentum(rank: int, size: int) -> dict[str, Any]:
    """With one rank in the group, a momentum of the memory and one of plain DDP's optimizer."""
    groups = [dist.new_group([each]) for each in range(size)]
    plain = wrapped(model(), process_group=groups[rank])
    train(plain, sgd(plain), range(STEPS), rank)
    hook = comm_hook("none", memory="dgc")
    ended = hooked(rank, hook, process_group=groups[rank])
    hook.close()
    return {"far": float((ended - flat(plain)).abs().max())}


@job
def closed(rank: int, size: int) -> dict[str, Any]:
    """A closed hook returns its last state, and is freed before its module."""
    net = model()
    first = comm_hook("onebit").register(wrapped(net))
    first.close()
    freed = weakref.ref(first)
    del first
    gc.collect()
    hook = comm_hook("onebit", **METHOD)
    hooked(rank, hook, steps=range(2))
    before = hook.state_dict()
    hook.close()
    file = io.BytesIO()
    torch.save(hook.state_dict(), file)
    file.seek(0)
    after = torch.load(file, weights_only=True)
    (after,) = after.values()
    tensors = [state["exchange"]["tensors"]["memory 0 residual"] for state in (before, after)]
    return {
        "freed": freed() is None,
        "step": after["step"],
        "keys": next(iter(before.values())).keys() == after.keys(),
        "same": torch.equal(*tensors) and bool(tensors[0].any()),
    }


@job
def two_models(rank: int, size: int) -> dict[str, Any]:
    """Train two hooked models alternately, one of them on some of the ranks."""
    part = [0, size - 1]
    theirs = dist.new_group(part)
    everywhere = comm_hook("qsgd", **METHOD)
    ddp = wrapped(model())
    everywhere.register(ddp)
    both = {}
    if rank in part:
        local = comm_hook("onebit", **METHOD)
        small = wrapped(model(), process_group=theirs)
        local.register(small)
    for step in range(STEPS):
        train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), range(step, step + 1), rank)
        if rank in part:
            index = part.index(rank)
            train(small, torch.optim.SGD(small.parameters(), lr=0.1), range(step, step + 1), index)
    if rank in part:
        again = wrapped(model(), process_group=theirs)
        hook = comm_hook("onebit", **METHOD).register(again)
        for step in range(STEPS):
            index = part.index(rank)
            train(again, torch.optim.SGD(again.parameters(), lr=0.1), range(step, step + 1), index)
        both = {"equal": torch.equal(flat(small), flat(again))}
        hook.close()
    everywhere.close()
    return both


# ---- refusals ------------------------------------------------------------------------------------


def refused(call: Callable[[], object]) -> dict[str, Any]:
    """Return the error of a call that must not succeed, its type, and the seconds that it took."""
    began = time.perf_counter()
    try:
        call()
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    else:
        kind, text = "", ""
    return {"kind": kind, "text": text, "seconds": time.perf_counter() - began}


def register(hook: Any, net: nn.Module | None = None, **options: Any) -> Any:
    return hook.register(wrapped(model() if net is None else net, **options))


@job
def refusals(rank: int, size: int) -> dict[str, Any]:
    """What is refused at registration: on every rank, alike."""
    hook = comm_hook
    result = {}
    result["no ddp"] = refused(lambda: hook("none").register(model()))
    sparse = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    result["sparse"] = refused(lambda: register(hook("none"), sparse))
    result["double"] = refused(lambda: register(hook("none"), model().double()))
    frozen = wrapped(model())
    frozen.requires_grad_(False)
    result["frozen"] = refused(lambda: hook("none").register(frozen))
    part = model()
    part.last.requires_grad_(False)
    result["last is frozen"] = refused(lambda: register(hook("none", dense_last=True), part))
    ddp = wrapped(model())
    one = hook("none").register(ddp)
    result["second hook"] = refused(lambda: hook("none").register(ddp))
    result["same hook"] = refused(lambda: register(one))
    skipping, disabled = hook("none", on_nonfinite="skip"), torch.amp.GradScaler(enabled=False)
    result["disabled scaler"] = refused(
        lambda: skipping.register(wrapped(model()), scaler=disabled)
    )
    partial_ddp = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    result["skips buckets"] = refused(lambda: register(hook("none"), **partial_ddp))
    stepped = model()
    stepped.last.weight._in_backward_optimizers = [sgd(stepped.last)]
    result["steps in backward"] = refused(lambda: register(hook("none"), stepped))
    state = one.state_dict()
    one.close()
    result["closed"] = refused(lambda: ddp(batch(0, rank)[0]))

    from torch.nn.parallel.distributed import _MixedPrecision

    try:
        with warnings.catch_warnings(action="ignore"):
            mixed = wrapped(model(), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    except RuntimeError as error:  # DDP takes a stream, which a build for CUDA lacks without driver
        if torch.cuda.is_available() or not torch.version.cuda:
            raise
        result["mixed precision"] = {"skipped": f"DDP itself: {str(error).splitlines()[0]}"}
    else:
        result["mixed precision"] = refused(lambda: hook("none").register(mixed))

    def loaded(**changes: Any) -> Any:
        hook_of_state = hook("none", **{k: v for k, v in changes.items() if k == "bucket_mb"})
        others = {k: v for k, v in changes.items() if k != "bucket_mb"}
        hook_of_state.load_state_dict(changed(state, **others))
        return register(hook_of_state)

    result["state of another rank"] = refused(lambda: loaded(rank=size))
    result["state of other settings"] = refused(lambda: loaded(bucket_mb=3.0))
    result["state of another step"] = refused(lambda: loaded(step=rank))
    result["state of another format"] = refused(lambda: loaded(format=99))
    return result


@job
def corrected(rank: int, size: int) -> dict[str, Any]:
    """Register again after a refusal: of this rank's model, of another rank's, of a state."""
    result: dict[str, Any] = {}
    before = comm_hook("onebit", **METHOD)
    first = hooked(rank, before)
    for name in ("all", "one", "state"):
        hook = comm_hook("onebit", **METHOD)
        if name == "state":
            hook.load_state_dict(changed(before.state_dict(), rank=size))
        wrong = wrapped(model())
        refused_one = torch.optim.SGD(wrong.parameters(), lr=0.1)
        words = {
            "optimizer": refused_one,
            "scaler": torch.amp.GradScaler("cpu", init_scale=1.0),
        }
        if name == "all" or (name == "one" and rank == 1):
            wrong.requires_grad_(False)
        result[f"{name}, refused"] = refused(partial(hook.register, wrong, **words))
        if name == "state":
            with warnings.catch_warnings(action="ignore"):
                hook.load_state_dict({})
        ddp = wrapped(model())
        optimizer = sgd(ddp)
        words["optimizer"] = optimizer
        result[name] = refused(partial(hook.register, ddp, **words))
        if not result[name]["text"]:
            train(ddp, optimizer, range(STEPS), rank)
        result[name] |= {
            "equal": torch.equal(flat(ddp), first),
            "observers": [len(o._optimizer_step_post_hooks) for o in (refused_one, optimizer)],
        }
        hook.close()
    return result


@job
def gathered(rank: int, size: int) -> dict[str, Any]:
    """Bring all states to rank 0 as a framework's checkpoint does; at last one rank does not."""
    hook = comm_hook("onebit", **METHOD)
    hooked(rank, hook, steps=range(2))
    result: dict[str, Any] = {}
    for name in ("open", "closed"):
        if name == "closed":
            hook.close()
        with mock.patch("torch.distributed.distributed_c10d._object_to_tensor", None):
            states = frameworks.gather(hook)
        for entry in states.values():
            sealed.check_seal(entry)
        result[name] = [*states]
    hook = comm_hook("onebit", timeout=2.0)
    hooked(rank, hook, steps=range(1))
    if rank == 0:
        result["alone"] = refused(lambda: frameworks.gather(hook))
    dist.barrier()
    hook.close()
    return result


@job
def zeros(rank: int, size: int) -> dict[str, Any]:
    """A bias whose gradient is 0 on rank 0 and -0 on the others; it has a lane of its own."""
    net = Zeros()
    ddp = wrapped(net, find_unused_parameters=True)
    hook = comm_hook("int8", dense_below=9).register(ddp)
    result = refused(lambda: ddp(-0.0 if rank else 0.0).backward())
    hook.close()
    return result | {"lanes": len(hook._plan.lanes), "gradient": net.bias.grad.tolist()}


@job
def default_dtype(rank: int, size: int) -> dict[str, Any]:
    """Train a float32 model where torch's default dtype is bfloat16."""
    result: dict[str, Any] = {}
    batches = [batch(step, rank) for step in range(STEPS)]
    for name in ("int8", "onebit", "powersgd"):
        ends = []
        for dtype in (torch.float32, torch.bfloat16):
            ddp = wrapped(model())
            optimizer, hook = sgd(ddp), comm_hook(name, **METHOD)
            torch.set_default_dtype(dtype)
            try:
                hook.register(ddp)
                for x, y in batches:
                    optimizer.zero_grad()
                    cross_entropy(ddp(x), y).backward()
                    optimizer.step()
            finally:
                torch.set_default_dtype(torch.float32)
            ends.append(flat(ddp))
            hook.close()
        result[name] = torch.equal(*ends)
    return result


@job
def differences(rank: int, size: int) -> dict[str, Any]:
    """Ranks that register different things, or nothing."""
    hook = comm_hook
    odd = rank == size - 1
    result = {
        "method": refused(lambda: register(hook("qsgd" if odd else "terngrad"))),
        "field": refused(lambda: register(hook("terngrad", clip=2.0 if odd else 2.5))),
        "memory": refused(lambda: register(hook("topk", memory="dgc" if odd else "residual"))),
        "seed": refused(lambda: register(hook("none", seed=int(odd)))),
        "start": refused(lambda: register(hook("none", start_step=int(odd)))),
    }
    version = _version.__version__
    _version.__version__ = "9.9" if odd else version
    result["version"] = refused(lambda: register(hook("none")))
    _version.__version__ = version
    digest, scheme._code = scheme._code, lambda cls: "changed" if odd else "original"
    result["code"] = refused(lambda: register(hook("none")))
    scheme._code = lambda cls: "changed" if odd and issubclass(cls, Memory) else "original"
    result["code of memory"] = refused(lambda: register(hook("none")))
    scheme._code = digest
    ddp = wrapped(model())
    if odd:  # as after a load on one rank
        nn.init.zeros_(ddp.module.last.bias)
    result["parameters"] = refused(lambda: hook("none").register(ddp))
    if odd:
        ddp.requires_grad_(False)
    result["one refuses"] = refused(lambda: hook("none").register(ddp))
    ddp = wrapped(model())
    dist.barrier()
    if not odd:
        result["absent"] = refused(lambda: hook("none", timeout=1.0).register(ddp))
    dist.barrier()
    if odd:
        result["late"] = refused(lambda: hook("none", timeout=1.0).register(ddp))
    dist.barrier()
    ddp = wrapped(model())
    if not odd:
        refused(lambda: hook("none", timeout=1.0).register(ddp))
    dist.barrier()  # as after a restart by torchrun: the last rank ended before it registered
    result["next attempt"] = refused(lambda: register(hook("none", timeout=5.0)).close())
    ended = hooked(rank, hook("none"))  # and after all that, what all register alike works
    result["after"] = {"finite": bool(ended.isfinite().all())}
    return result


@job
def in_training(rank: int, size: int) -> dict[str, Any]:
    """Faults during training are errors in backward or forward, without a hang."""
    hook = comm_hook
    result = {}

    one = hook("terngrad")
    ddp = wrapped(model())
    one.register(ddp)

    def join() -> None:
        with ddp.join():
            train(ddp, sgd(ddp), range(1), rank)

    result["join"] = refused(join)
    one.close()

    one = hook("terngrad")
    ddp = wrapped(model())
    one.register(ddp)
    x, _ = batch(0, rank)
    backward = ddp(x).sum() * float("nan")
    result["nan, backward"] = refused(backward.backward)
    result["nan, forward"] = refused(lambda: ddp(x))
    one.close()

    one = hook("terngrad", timeout=2.0)
    ddp = wrapped(model())
    one.register(ddp)
    if rank == 0:  # the others wait
        loss = ddp(x).sum()
        result["alone, backward"] = refused(loss.backward)
        result["alone, forward"] = refused(lambda: ddp(x))
    dist.barrier()
    one.close()

    late = model()
    late.branch.requires_grad_(False)
    ddp = wrapped(late)
    late.branch.requires_grad_(True)
    one = hook("none").register(ddp)
    result["thawed"] = refused(ddp(x).sum().backward)
    one.close()

    net = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    ddp = wrapped(net)
    net[0].sparse = False  # what the hook sees when it is registered
    one = hook("none").register(ddp)
    net[0].sparse = True
    result["sparse later"] = refused(ddp(torch.arange(3)).sum().backward)
    one.close()

    ddp = wrapped(model())  # without find_unused_parameters
    one = hook("none").register(ddp)
    ddp(x, branch=False).sum().backward()
    result["unused"] = refused(lambda: ddp(x))
    one.close()
    return result


@job
def backends(rank: int, size: int) -> dict[str, Any]:
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers "fake"

    fake = dist.new_group(list(range(size)), backend="fake")
    return {"model's": refused(lambda: register(comm_hook("none"), process_group=fake))}


# ---- the check -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wrong(Compressor):
    """Half precision, and `how` it is silently wrong."""

    how: str = "right"
    collectives: ClassVar[tuple[str, ...]] = ("allgather",)

    def encode(self, x, ctx):
        return Payload((x.half(),))

    def decode(self, payload, ctx):
        x = payload.parts[0].float()
        match self.how:
            case "sign":
                return -x
            case "nothing":
                return torch.zeros_like(x)
            case "shifted":
                return x.roll(1)
            case "scaled":
                return 3 * x
        return x

    def mean(self, payloads, ctx):
        if self.how == "sum":
            return super().mean(payloads, ctx) * len(payloads)
        if self.how == "first":
            return self.decode(payloads[0], ctx)
        return super().mean(payloads, ctx)

    def layout(self, segments, count=1):
        return ((torch.float16, segments.numel),)


WRONG = ("sign", "nothing", "shifted", "scaled", "sum", "first")


def warned(call: Callable[[], object]) -> list[str]:
    """Return the warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in caught]


@job
def directions(rank: int, size: int) -> dict[str, Any]:
    """Clip what the hook wrote, with methods that return directions and one that does not."""
    result: dict[str, Any] = {}
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for name, options in (
        ("signsgd", {}),
        ("onebitadam", {"start_step": 2}),
        ("dlion", {}),
        ("terngrad", {}),
        ("signsgd", {"start_step": STEPS}),
        ("signsgd", {"scaler": scaler}),
    ):
        for clip in (False, True):
            hook, ddp = comm_hook(name, **options), wrapped(model())
            hook.register(ddp)
            plain = hook.settings.compressor.rule.plain
            optimizer = sgd(ddp, hook) if plain else hook.optimizer(ddp.parameters(), lr=0.01)

            def steps(clip=clip, ddp=ddp, optimizer=optimizer, scaled="scaler" in options) -> None:
                for step in range(STEPS):
                    x, y = batch(step, rank)
                    optimizer.zero_grad()
                    loss = cross_entropy(ddp(x), y)
                    (scaler.scale(loss) if scaled else loss).backward()
                    if scaled:
                        scaler.unscale_(optimizer)
                    if clip:
                        nn.utils.clip_grad_norm_(ddp.parameters(), 0.01)
                    scaler.step(optimizer) if scaled else optimizer.step()
                    scaler.update() if scaled else None

            key = f"{name} {', '.join(options)}"
            result[f"{key}{', clipped' * clip}"] = warned(steps)
            hook.close()
    groups = [dist.new_group([each]) for each in range(size)]
    hook, ddp = comm_hook("signsgd"), wrapped(model(), process_group=groups[rank])
    hook.register(ddp)
    result["one rank"] = warned(partial(train, ddp, sgd(ddp, hook), range(STEPS), rank))
    hook.close()
    return result


@job
def idle_in_warm_up(rank: int, size: int) -> dict[str, Any]:
    """A branch that the warm-up of 1-bit Adam does not always use, or a step after it."""
    result: dict[str, Any] = {}
    for idle in (1, 3):
        hook, ddp = (
            comm_hook("onebitadam", start_step=3),
            wrapped(model(), find_unused_parameters=True),
        )
        hook.register(ddp)
        optimizer = hook.optimizer(ddp.parameters(), lr=0.01)

        def forward(net: nn.Module, x: Tensor, step: int, idle=idle) -> Tensor:
            return net(x, branch=step != idle)

        call = partial(train, ddp, optimizer, range(STEPS), rank, forward)
        result[f"step {idle}"] = warned(call)
        hook.close()
    return result


@job
def bypassed(rank: int, size: int) -> dict[str, Any]:
    """Step the optimizer with gradients that did not pass through the hook, and with others."""
    result: dict[str, Any] = {}

    def module(ddp: Any, x: Tensor, step: int) -> Tensor:
        return ddp.module(x)

    for name, follows in (("module", False), ("module, followed", True), ("late", True)):
        ddp = wrapped(model())
        optimizer = sgd(ddp)
        hook = comm_hook("topk", **METHOD, optimizer=optimizer if follows else None).register(ddp)
        if name == "late":
            train(ddp, optimizer, range(2), rank)
        result[name] = warned(partial(train, ddp, optimizer, range(2, 6), rank, module))
        hook.close()
        result[f"{name}, closed"] = warned(partial(train, ddp, optimizer, range(2), rank, module))

    net = model()
    hook, used = comm_hook("none").register(wrapped(net)), wrapped(net)
    result["other wrapper"] = warned(lambda: train(used, sgd(net), range(3), rank))
    hook.close()

    ddp = wrapped(model())
    hook = comm_hook("onebit", start_step=3, on_nonfinite="skip").register(ddp)
    first, second = (torch.optim.SGD(ddp.parameters(), lr=0.01) for _ in range(2))
    for _ in range(3):
        first.step()  # there are no gradients
    train(ddp, first, range(1), rank)
    second.step()
    first.param_groups[0]["lr"] = 0.0
    for _ in range(3):
        first.step()
    for step in range(1, 5):
        x, y = batch(step, rank)
        (cross_entropy(ddp(x), y) * (torch.inf if rank == 0 else 1.0)).backward()
        second.step()
    result["skipped"] = hook.skipped
    hook.close()
    return result


@job
def added(rank: int, size: int) -> dict[str, Any]:
    """Add to a gradient after its exchange, or before; step the optimizer during backward."""
    result: dict[str, Any] = {}
    for name in (
        *("retained", "other model first", "second graph", "module", "no_sync", "module first"),
        "in backward",
    ):
        ddp = wrapped(model())
        optimizer = sgd(ddp)
        hook = comm_hook("none").register(ddp)

        def step(name: str = name, ddp: Any = ddp, optimizer: Any = optimizer) -> None:
            x, y = batch(0, rank)
            optimizer.zero_grad()
            if name == "module first":
                cross_entropy(ddp.module(x), y).backward()
                optimizer.zero_grad()
            with ddp.no_sync() if name == "no_sync" else nullcontext():
                first, second = cross_entropy(ddp(x), y), None
            if name == "second graph":
                second = cross_entropy(ddp(x + 1), y)
            first.backward(retain_graph=True)
            if name in ("retained", "other model first"):
                second = first
            elif name in ("module", "no_sync"):
                second = cross_entropy((ddp.module if name == "module" else ddp)(x + 1), y)
            if second is not None:
                second.backward()
            if name == "other model first":
                other = nn.Linear(1, 1)
                other(torch.ones(1)).sum().backward()
                torch.optim.SGD(other.parameters(), lr=0.1).step()
            optimizer.step()

        if name == "in backward":
            ddp.module.last.bias.register_post_accumulate_grad_hook(
                lambda _, optimizer=optimizer: optimizer.step()
            )
            result[name] = refused(step)
        else:
            result[name] = warned(lambda step=step: [step() for _ in range(3)])
        result[f"{name}, end"] = flat(ddp.module).tolist()
        hook.close()
    return result


@job
def repeated(rank: int, size: int) -> dict[str, Any]:
    """Exchange several times per optimizer step: accumulated, discarded, in a closure; or once."""
    result: dict[str, Any] = {}

    def backward(ddp: Any, step: int) -> Tensor:
        x, y = batch(step, rank)
        loss = cross_entropy(ddp(x), y)
        loss.backward()
        return loss.detach()

    def act(ddp: Any, optimizer: Any, acts: str) -> None:
        for step, each in enumerate(acts):
            if each == "z":
                optimizer.zero_grad()
            elif each == "s":
                optimizer.step()
            else:
                with ddp.no_sync() if each == "n" else nullcontext():
                    backward(ddp, step)

    for name, acts in {
        "accumulated": "zbbs" * 3,
        "discarded": "zbzbs" * 3,
        "no_sync": "znbs" * 3,
        "left out": "zbszbzbszbs" * 2,
        "every third": "zbzbszbszbs" * 5,
        "no memory": "zbbs" * 3,
    }.items():
        ddp = wrapped(model())
        hook = comm_hook("int8" if name == "no memory" else "topk", **METHOD).register(ddp)
        result[name] = warned(partial(act, ddp, sgd(ddp), acts))
        hook.close()

    for name in ("two optimizers", "two optimizers, frozen"):
        ddp = wrapped(model(), find_unused_parameters=True)
        hook = comm_hook("topk", **METHOD).register(ddp)
        parts = [ddp.module.branch, nn.ModuleList([ddp.module.conv, ddp.module.hidden])]
        pairs = [(part, sgd(part)) for part in parts]

        def alternate(name: str = name, ddp: Any = ddp, pairs: Any = pairs) -> None:
            for step in range(8):
                _, optimizer = pairs[step % 2]
                other, _ = pairs[1 - step % 2]
                other.requires_grad_("frozen" not in name)
                optimizer.zero_grad()
                backward(ddp, step)
                optimizer.step()
                other.requires_grad_(True)

        result[name] = warned(alternate)
        hook.close()

    ddp = wrapped(model())
    hook = comm_hook("topk", **METHOD).register(ddp)
    newton = torch.optim.LBFGS(ddp.parameters(), 0.01, max_iter=3)
    result["closure"] = warned(
        lambda: [newton.step(partial(backward, ddp, step)) for step in range(3)]
    )
    hook.close()
    return result


@job
def unapplied(rank: int, size: int) -> dict[str, Any]:
    """Save a state after the optimizer's step, and between backward and the step."""
    ddp, (x, y) = wrapped(model()), batch(2, rank)
    hook, optimizer = comm_hook("onebit", **METHOD).register(ddp), sgd(ddp)
    train(ddp, optimizer, range(2), rank)
    result = {"after": warned(hook.state_dict)}
    optimizer.zero_grad()
    cross_entropy(ddp(x), y).backward()
    result["before"] = warned(hook.state_dict)
    optimizer.step()
    hook.close()
    return result


@job
def failed_state(rank: int, size: int) -> dict[str, Any]:
    """Save a state after a step whose second lane was not finite on one rank."""
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    ddp = DDP(net, bucket_cap_mb=0.01)
    hook = comm_hook("topk", ratio=0.05, bucket_mb=0.01).register(ddp)
    x = torch.ones(2, 64)
    ddp(x).sum().backward()
    torch.optim.SGD(ddp.parameters(), lr=0.1).step()
    result = {"before": warned(hook.state_dict)}
    if rank == 1:
        net[0].weight.register_hook(lambda gradient: gradient * torch.nan)
    result["error"] = refused(lambda: ddp(x).sum().backward())
    result["after"] = warned(hook.state_dict)
    hook.close()
    return result


@job
def rested(rank: int, size: int) -> dict[str, Any]:
    """Let a model rest while the rate of its optimizer falls; and a part, while it is scheduled."""
    result: dict[str, Any] = {}

    def update(hook: Any, lane: int) -> float:
        ((_, entry),) = hook.state_dict().items()
        exchange = entry["exchange"]
        residual = exchange["tensors"][f"memory {lane} residual"]
        return float(residual.norm() * exchange["rates"][lane][0])

    first, second = DDP(nn.Linear(16, 16, bias=False)), DDP(nn.Linear(16, 16, bias=False))
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    hooks = [
        comm_hook("topk", ratio=0.1, optimizer=optimizer).register(each) for each in (first, second)
    ]
    ends = []
    for step in range(4):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.param_groups[0]["lr"] = 0.1 if step < 2 else 0.05
        optimizer.zero_grad()
        (first(x) + second(x) if step < 2 else first(x)).square().mean().backward()
        optimizer.step()
        ends.append(update(hooks[1], 0))
    result["model"] = ends
    for hook in hooks:
        hook.close()

    parts = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2))
    net = Chosen(parts)
    ddp = DDP(net, find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    hook = comm_hook("topk", ratio=0.1, bucket_mb=0.0001, optimizer=optimizer).register(ddp)
    lane = next(i for i, names in enumerate(hook._level.names) if "parts.1.weight" in names)
    ends = []
    for step in range(4):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        ddp(x, both=step < 2).square().mean().backward()
        if step >= 2:
            optimizer.param_groups[0]["lr"] /= 2
        optimizer.step()
        ends.append(update(hook, lane))
    result["part"] = ends
    hook.close()
    return result


class Chosen(nn.Module):
    """Two layers whose outputs are added, or the first one alone."""

    def __init__(self, parts: nn.ModuleList) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: Tensor, *, both: bool) -> Tensor:
        return self.parts[0](x) + self.parts[1](x) if both else self.parts[0](x)


class TwoDtypes(nn.Module):
    """Float32 and bfloat16 parameters, which DDP reduces in different buckets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).bfloat16()).float()


@job
def static_graph(rank: int, size: int) -> dict[str, Any]:
    """In the first pass DDP calls none of several buckets the last one."""
    result: dict[str, Any] = {}
    groups = [dist.new_group([each]) for each in range(size)]
    for name, policy, group in (
        ("stop", "stop", None),
        ("skip", "skip", None),
        ("one rank", "stop", groups[rank]),
    ):
        ends = []
        for compressed in (False, True):
            ddp = DDP(TwoDtypes(), static_graph=True, process_group=group)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
            if compressed:
                hook = comm_hook("none", on_nonfinite=policy).register(ddp)
            for step in range(3):
                optimizer.zero_grad()
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
                ddp(x).square().mean().backward()
                optimizer.step()
            ends.append(flat(ddp.module))
        result[name] = hook.step, torch.allclose(*ends, atol=1e-3)
        hook.close()
    return result


@job
def rolled_back(rank: int, size: int) -> dict[str, Any]:
    """Return to an earlier step, with the hook's state and without; show other parameters only."""
    result: dict[str, Any] = {}
    for name in ("model", "model, hook", "hook, model", "restored"):
        ddp = wrapped(model())
        hook, optimizer = comm_hook("onebit", **METHOD).register(ddp), sgd(ddp)
        train(ddp, optimizer, range(2), rank)
        saved, state = copy.deepcopy(ddp.module.state_dict()), hook.state_dict()
        train(ddp, optimizer, range(2, 3), rank)
        present = copy.deepcopy(ddp.module.state_dict())
        if name == "hook, model":
            hook.load_state_dict(state)
        ddp.load_state_dict({f"module.{key}": value for key, value in saved.items()})
        if name == "model, hook":
            hook.load_state_dict(state)
        if name == "restored":
            with torch.no_grad():
                ddp(batch(0, rank)[0])
            ddp.module.load_state_dict(present)
        result[name] = warned(partial(train, ddp, optimizer, range(3, 5), rank))
        hook.close()
    return result


@job
def evaluated_alone(rank: int, size: int) -> dict[str, Any]:
    """Rank 0 evaluates the DDP model, which sends its buffers, and the others train on."""
    ddp = wrapped(nn.Sequential(nn.Flatten(), nn.Linear(48, 5), nn.BatchNorm1d(5)))
    hook = comm_hook("onebit").register(ddp)
    train(ddp, sgd(ddp), range(1), rank)
    x, _ = batch(1, rank)
    with torch.set_grad_enabled(rank > 0):
        result = refused(lambda: ddp(x))
    hook.close()
    return result


@job
def unsuitable(rank: int, size: int) -> dict[str, Any]:
    """Train with an optimizer that repeats what the method does, and with one that does not."""
    result: dict[str, Any] = {}
    for name, compressor, memory, kind in (
        ("rule", "dlion", None, torch.optim.Adam),
        ("memory", "topk", "dgc", torch.optim.Adam),
        ("right", "dlion", None, partial(torch.optim.SGD, weight_decay=0.1)),
    ):
        ddp = wrapped(model())
        optimizer: Any = kind(ddp.parameters(), lr=0.01)
        hook = comm_hook(compressor, memory=memory).register(ddp)
        result[name] = warned(partial(train, ddp, optimizer, range(3), rank))
        hook.close()
    return result


@job
def other_scalers(rank: int, size: int) -> dict[str, Any]:
    """A GradScaler that the hook follows, or does not, or that scales another model."""
    result: dict[str, Any] = {}
    for name in ("other", "passed", "contained", "disabled", "other model"):
        ddp, foreign = wrapped(model()), model()
        optimizer = sgd(foreign if name == "other model" else ddp)
        scaler: Any = torch.amp.GradScaler(
            "cpu", init_scale=8.0, growth_interval=2, enabled=name != "disabled"
        )
        passed = {
            "passed": scaler,
            "contained": SimpleNamespace(get_scale=lambda scaler=scaler: scaler.get_scale()),
        }
        hook = comm_hook("topk", **METHOD, scaler=passed.get(name), optimizer=None).register(ddp)

        def steps(
            net: Any = foreign if name == "other model" else ddp,
            optimizer: Any = optimizer,
            scaler: Any = scaler,
        ) -> None:
            for step in range(5):
                x, y = batch(step, rank)
                optimizer.zero_grad()
                scaler.scale(cross_entropy(net(x), y)).backward()
                scaler.step(optimizer)
                scaler.update()

        result[name] = warned(steps)
        hook.close()
    return result


@job
def checks(rank: int, size: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name in ("right", *WRONG, "sign by default", "nothing by default"):
        how, _, default = name.partition(" by ")
        comparisons: list[Any] = []
        error = None if default else 0.5
        hook = comm_hook(
            Wrong(how),
            check_every=2,
            check_error=error,
            on_check=comparisons.append,
            dense_below=50,
        )
        texts = warned(partial(hooked, rank, hook, steps=range(3)))
        hook.close()
        result[name] = {
            "warnings": texts,
            "records": [dataclasses.asdict(record) for record in hook.records],
            "calls": len(comparisons),
            "checked": hook.checked.payload_up,
            "up": up(hook),
            "agreed": hook.agreement.payload_up,
        }
    return result


@job
def checked_at_rest(rank: int, size: int) -> dict[str, Any]:
    """Compare means at the rate 0, at which the exchange sends no residuals."""
    ddp = DDP(nn.Linear(64, 32, bias=False))
    hook = comm_hook("topk", ratio=0.01, check_every=4).register(ddp)
    for step in range(5):
        hook.lr = 0.1 if step < 4 else 0.0
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        ddp.zero_grad()
        ddp(x).square().mean().backward()
    (plain,) = torch.autograd.grad(ddp.module(x).square().mean(), ddp.module.weight)
    apart = float((ddp.module.weight.grad - plain).norm() / plain.norm())
    hook.close()
    return {"record": hook.records[-1].relative_error, "apart": apart}


# ---- nothing goes wrong silently -----------------------------------------------------------------


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@job
def tied(rank: int, size: int) -> dict[str, Any]:
    """Let DDP ignore a shared weight by its first name, by its second one, and by both."""
    result: dict[str, Any] = {}
    both = "first.weight", "second.weight"
    for names in (both[:1], both[1:], both):
        means = []
        for hooked in (False, True):
            torch.manual_seed(1)
            net = Tied()
            DDP._set_params_and_buffers_to_ignore_for_model(net, list(names))
            ddp = DDP(net)
            hook = comm_hook("none").register(ddp) if hooked else None
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
            texts = warned(lambda ddp=ddp, x=x: ddp(x).square().mean().backward())
            means.append(torch.cat([p.grad.view(-1) for p in net.parameters()]))
            if hook is not None:
                hook.close()
        far = float((means[0] - means[1]).abs().max())
        result[", ".join(names)] = {"far": far, "texts": texts, "mean": digest(means[1])}
    return result


def offered(hook: Any) -> list[dict[str, Tensor]]:
    """Return a list that gets, at each step, the residuals just before they are exchanged."""
    seen: list[dict[str, Tensor]] = []
    exchange = hook._exchange_lane

    def looked(number: int) -> None:
        if number == 0:
            seen.append({})
        current = residuals(hook)
        lane = {placed.name for placed in hook._plan.lanes[number]}
        seen[-1] |= {name: value for name, value in current.items() if name in lane}
        exchange(number)

    hook._exchange_lane = looked
    return seen


def residuals(hook: Any) -> dict[str, Tensor]:
    exchange, plan = hook._level.exchange, hook._plan
    carried = {placed.name: plans.state_views(exchange, plan, placed) for placed in plan.tensors}
    return {
        name: current["residual"].clone()
        for name, current in carried.items()
        if "residual" in current
    }


def times(after: dict[str, Tensor], before: dict[str, Tensor], factor: float) -> bool:
    return all(torch.equal(after[name], before[name] * factor) for name in before)


@job
def rates(rank: int, size: int) -> dict[str, Any]:
    """Follow a rate that is set late, read from an optimizer, of groups, or not known in time."""
    result: dict[str, Any] = {}

    def rate(step: int) -> float:
        return 2.0**-step

    hook = comm_hook("onebit", **METHOD)
    ddp = wrapped(model())
    hook.register(ddp)
    optimizer = sgd(ddp)
    for step in range(STEPS):
        train(ddp, optimizer, range(step, step + 1), rank)
        hook.lr = rate(step)
    expected = alone(hook, model(), size, lrs=lambda step: rate(max(0, step - 1)))
    result["set after backward"] = torch.equal(flat(ddp), expected)
    hook.close()

    ends = []
    for follows in (True, False):
        ddp = wrapped(model())
        optimizer = sgd(ddp)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        hook = comm_hook("onebit", **METHOD, **({"optimizer": optimizer} if follows else {}))
        hook.register(ddp)
        for step in range(STEPS):
            if not follows:
                hook.lr = optimizer.param_groups[0]["lr"]
            train(ddp, optimizer, range(step, step + 1), rank)
            schedule.step()
        ends.append(flat(ddp))
        if follows:
            result["set beside"] = refused(lambda hook=hook: setattr(hook, "lr", 0.1))
        hook.close()
    result["optimizer"] = torch.equal(*ends)

    ddp = wrapped(model())
    named = dict(ddp.module.named_parameters())
    last = [p for name, p in named.items() if name.startswith("last")]
    rest = [p for name, p in named.items() if not name.startswith("last")]
    optimizer = torch.optim.SGD([{"params": rest}, {"params": last}], lr=1.0)
    hook = comm_hook("onebit", bucket_mb=0.015).register(ddp, optimizer=optimizer)
    seen = offered(hook)
    x, y = batch(0, rank)
    for now in ((1e-3, 1e-3), (5e-4, 1e-3), (0.0, 4e-3)):
        before = residuals(hook)
        cross_entropy(ddp(x), y).backward()
        # The rates are set after backward, as by hand: what was read before it is not what holds.
        for group, lr in zip(optimizer.param_groups, now, strict=True):
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        result[f"groups {now}"] = times(seen[-1], before, 1.0)
    before = residuals(hook)
    for group, lr in zip(optimizer.param_groups, (2.5e-4, 1e-3), strict=True):
        group["lr"] = lr
    cross_entropy(ddp(x), y).backward()
    rest_before = {k: v for k, v in before.items() if not k.startswith("last")}
    last_before = {k: v for k, v in before.items() if k.startswith("last")}
    result["each group its own"] = times(seen[-1], rest_before, 2.0)
    result["each group its own"] &= times(seen[-1], last_before, 4.0)
    result["carried"] = all(bool(v.any()) for v in before.values())
    hook.close()

    hook = comm_hook("onebit", **METHOD)
    ddp = wrapped(model())
    hook.register(ddp)
    hook.lr = 0.1 * (1 + rank)
    seconds = refused(lambda: ddp(x).sum().backward())["seconds"]
    result["ranks differ"] = refused(lambda: ddp(x))
    result["ranks differ"]["seconds"] += seconds
    hook.close()
    other = torch.optim.SGD(model().parameters(), lr=0.1)
    result["another model's"] = refused(lambda: register(comm_hook("onebit", optimizer=other)))

    result["warnings"] = []
    for name, rates_of in (("topk", [1.0] * 60), ("onebit", [1.0] * 12 + [1e-3] * 3)):
        ddp = wrapped(model())
        hook = comm_hook(name).register(ddp)

        def follow(ddp: Any = ddp, hook: Any = hook, rates_of: Any = rates_of) -> None:
            for step, lr in enumerate(rates_of):
                hook.lr = lr
                train(ddp, torch.optim.SGD(ddp.parameters(), 0.01), range(step, step + 1), rank)

        result["warnings"].append([text for text in warned(follow) if "residual" in text])
        hook.close()
    return result


class Scaled(nn.Module):
    """A linear layer whose output overflows on one rank at one step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def scaled(ddp: nn.Module, rank: int, steps: int, hook: Any = None) -> dict[str, Any]:
    """Train with a GradScaler, whose scale grows at every second step and overflows on rank 1."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    if hook is not None:
        hook.register(ddp, optimizer=optimizer, scaler=scaler)
    scales, states, seen = [], [], offered(hook) if hook is not None else []
    for step in range(8):
        optimizer.zero_grad()
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = ddp(x).square().mean() * (1e38 if rank == 1 and step == 4 else 1)
        before = residuals(hook) if hook is not None else {}
        scaler.scale(loss).backward()
        states.append((before, residuals(hook) if hook is not None else {}))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    finite = bool(flat(ddp).isfinite().all())
    return {"scales": scales, "finite": finite, "kept": states, "seen": seen, "end": flat(ddp)}


@job
def nonfinite(rank: int, size: int) -> dict[str, Any]:
    """One rank's gradient is not finite: all stop at once, or all skip as plain DDP does."""
    result: dict[str, Any] = {}
    for when in ("stop", "skip"):
        hook = comm_hook("onebit", bucket_mb=0.001, on_nonfinite=when)
        ddp = wrapped(model())
        hook.register(ddp)
        train(ddp, sgd(ddp), range(2), rank)
        x, y = batch(2, rank)
        before, bytes_before = residuals(hook), up(hook)
        if rank == 1:
            ddp.module.conv.weight.register_hook(lambda g: g * torch.nan)
        loss = cross_entropy(ddp(x), y)
        ddp.zero_grad()
        result[when] = refused(loss.backward)
        result[f"{when}, forward"] = refused(lambda ddp=ddp, x=x: ddp(x))
        if when == "skip":
            result["all are nan"] = all(bool(p.grad.isnan().all()) for p in ddp.parameters())
            result["untouched"] = times(residuals(hook), before, 1.0) and up(hook) == bytes_before
            result["counted"] = [hook.step, hook.skipped]
        hook.close()

    net = Scaled()
    ddp, optimizer = DDP(net), torch.optim.SGD(net.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    hook = comm_hook("onebit", scaler=scaler, optimizer=optimizer).register(ddp)
    before, factor = flat(net), torch.nan if rank == 1 else 1.0

    def step() -> None:
        scaler.scale(ddp(torch.ones(4, 16)).sum() * factor).backward()
        scaler.step(optimizer)

    result["disabled"] = refused(step)
    result["disabled, unchanged"] = torch.equal(flat(net), before)
    hook.close()

    plain = scaled(DDP(Scaled()), rank, 8)
    none = scaled(DDP(Scaled()), rank, 8, comm_hook("none", on_nonfinite="skip"))
    hook = comm_hook("onebit", bucket_mb=0.0, on_nonfinite="skip")
    ours = scaled(DDP(Scaled()), rank, 8, hook)
    result["scales"] = [each["scales"] for each in (plain, none, ours)]
    result["finite"] = [each["finite"] for each in (plain, none, ours)]
    result["none"] = float((plain["end"] - none["end"]).abs().max())
    result["skipped, untouched"] = times(ours["kept"][4][1], ours["kept"][3][1], 1.0)
    # seen has no entry for the skipped step 4.
    result["unscaled"] = [
        times(ours["seen"][step], ours["kept"][step - 1][1], 1.0) for step in (1, 2, 3)
    ]
    hook.close()

    half = nn.Linear(300, 300, bias=False).half()
    ddp = DDP(half)
    hook = comm_hook("randomk", ratio=0.01).register(ddp)
    x = torch.full((1, 300), 3000.0).half()
    result["overflow"] = refused(ddp(x).sum().backward)
    result["overflow, forward"] = refused(lambda: ddp(x))
    hook.close()
    return result


def by_scale() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return arguments of hooks: methods that apply no mean or have a limit, and every memory."""
    result: dict[str, tuple[str, dict[str, Any]]] = {"threshold": ("threshold", {})}
    for name in registry.compressors():
        method = gcbench.get_compressor(name)
        if method.claims.aggregate != "mean" or not method.rule.plain:
            result[name] = name, {"start_step": 2 if method.rule.needs_warm_up else 0}
    for name in registry.memories():
        options = {"memory": name, "collective": "twoshot"}
        result[f"topk, {name}"] = "topk", options | {"ratio": 0.1}
    options = {"memory": "dgc", "memory_options": {"clip": 0.1}, "ratio": 0.1}
    result["topk, clipped"] = "topk", options
    return result


def with_scales(rank: int, name: str, options: dict[str, Any], scales: list[float]) -> Tensor:
    """Train with these loss scales, 0 for no scaler; return the parameters.

    Where a scaler is added or removed, a new hook resumes from the state of the previous one.
    """
    net, hook, state = model(), None, None
    for step, scale in enumerate(scales):
        if step == 0 or bool(scale) != bool(scales[step - 1]):
            if hook is not None:
                state = hook.state_dict()
                hook.close()
            ddp = wrapped(net)
            current = SimpleNamespace()
            scaler = SimpleNamespace(get_scale=lambda current=current: current.scale)
            hook = comm_hook(name, **options, dense_below=50, scaler=scaler if scale else None)
            if state is not None:
                hook.load_state_dict(state)
            if hook.settings.compressor.rule.plain:
                optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
                hook.register(ddp, optimizer=optimizer)
            else:
                hook.register(ddp)
                optimizer = hook.optimizer(net.parameters(), lr=1e-3)
        current.scale = scale
        x, y = batch(step, rank)
        optimizer.zero_grad()
        (cross_entropy(ddp(x), y) * (scale or 1.0)).backward()
        for parameter in net.parameters():
            parameter.grad /= scale or 1.0
        optimizer.step()
    hook.close()
    return flat(net)


RESUMED = ("topk, residual", "topk, ef21", "onebitadam")
"""Those of `by_scale` that are resumed as well: residuals, joint estimates, an update rule."""


@job
def loss_scales(rank: int, size: int) -> dict[str, Any]:
    """A loss scale that changes, appears or disappears, against training without one."""
    result: dict[str, Any] = {}
    for kind, (name, options) in by_scale().items():
        plain = with_scales(rank, name, options, [0] * 6)
        cases = {"changes": [2.0**k for k in (10, 10, 11, 9, 9, 16)]}
        if kind in RESUMED:
            cases["disappears and appears"] = [2.0**10, 2.0**11, 0, 0, 2.0**16, 2.0**15]
        result[kind] = {
            "moved": float((plain - flat(model())).abs().max()),
            "equal": {
                case: torch.equal(plain, with_scales(rank, name, options, scales))
                for case, scales in cases.items()
            },
        }
    return result


@job
def states(rank: int, size: int) -> dict[str, Any]:
    """Load states after `register`; refuse each kind of invalid one, and change nothing."""
    result: dict[str, Any] = {"refused": {}}
    hook = comm_hook("onebit", **METHOD)
    whole = hooked(rank, hook)
    hook.close()

    ddp = wrapped(model())
    hook = comm_hook("onebit", **METHOD).register(ddp)
    optimizer = sgd(ddp)
    train(ddp, optimizer, range(3), rank)
    state = hook.state_dict()
    saved = copy.deepcopy((ddp.module.state_dict(), optimizer.state_dict()))
    train(ddp, optimizer, range(3, 4), rank)  # away from the state
    ((key, entry),) = state.items()

    def bad(**values: Any) -> dict[str, Any]:
        return changed(state, exchange=sealed.seal({**entry["exchange"], **values}))

    tensors = entry["exchange"]["tensors"]

    def first(value: Tensor) -> dict[str, Tensor]:
        return {**tensors, "memory 0 residual": value}

    tensor = tensors["memory 0 residual"]
    nan, flipped = tensor.clone(), tensor.clone()
    nan[3] = torch.nan
    flipped[3] += 1
    before = residuals(hook)
    unsealed = {key: {**entry, "exchange": {**entry["exchange"], "tensors": first(flipped)}}}
    for name, wrong in {
        "shape": bad(tensors=first(tensor[:1].clone())),
        "dtype": bad(tensors=first(tensor.to(torch.int8))),
        "nan": bad(tensors=first(nan)),
        "missing": bad(tensors={k: v for k, v in tensors.items() if " 0 " not in k}),
        "rate": bad(rates=[[-1.0] * len(lane) for lane in entry["exchange"]["rates"]]),
        "traffic": bad(traffic=[0.0, -1.0, 0.0]),
        "step -5": changed(state, step=-5),
        "step 2^70": changed(state, step=2**70),
        "step True": changed(state, step=True),
        "flipped": unsealed,
        "header": {key: {**entry, "lr": 3.0}},
        "text": {key: "state"},
        "empty": {},
    }.items():
        result["refused"][name] = refused(lambda wrong=wrong: hook.load_state_dict(wrong))
    result["unchanged"] = times(residuals(hook), before, 1.0) and hook.step == 4
    ddp.module.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    hook.load_state_dict(state)
    result["step"] = hook.step
    train(ddp, optimizer, range(3, STEPS), rank)
    result["continues"] = torch.equal(flat(ddp), whole)
    if rank == 0:
        hook.load_state_dict(hook.state_dict())  # alone, and of the same step
    x, _ = batch(0, rank)
    result["alone, backward"] = refused(lambda: ddp(x).sum().backward())
    result["alone"] = refused(lambda: ddp(x))
    hook.close()

    # A distributed checkpoint: each rank gets its own back, in a hook that has exchanged nothing.
    name = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(name)
    for method, options in (
        ("onebit", {"start_step": 2}),
        ("powersgd", {}),
        ("topk", {"memory": "dgc", "collective": "twoshot", "ratio": "0:0.5/2:0.1"}),
    ):
        with warnings.catch_warnings(action="ignore"):
            ddp = wrapped(model())
            hook = comm_hook(method, **METHOD, **options).register(ddp)
            optimizer = sgd(ddp)
            train(ddp, optimizer, range(3), rank)
            place = f"{name[0]}/{method}"
            dcp.save({"hook": hook.state_dict()}, checkpoint_id=place)
            again = comm_hook(method, **METHOD, **options).register(wrapped(model()))
            loaded = {"hook": again.state_dict()}
            dcp.load(loaded, checkpoint_id=place)
        again.load_state_dict(loaded["hook"])
        digests = [each.state_dict()["exchange"]["digest"] for each in (hook, again)]
        result[f"dcp {method}"] = [digests[0] == digests[1], again.step, loaded["hook"]["rank"]]
        hook.close()
        again.close()
    return result


@job
def copies(rank: int, size: int) -> dict[str, Any]:
    """Copy, average, save and evaluate a hooked model as one without a hook."""
    result: dict[str, Any] = {}
    net = model()
    plain, ddp = wrapped(copy.deepcopy(net)), wrapped(net)
    hook = comm_hook("topk", **METHOD).register(ddp)
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    averaged = torch.optim.swa_utils.AveragedModel(ddp)
    x, y = batch(0, rank)
    expected = flat(plain)
    result["averaged"] = torch.equal(flat(averaged.module), expected)
    cross_entropy(plain(x), y).backward()
    for name, copied in (
        ("copy", copy.deepcopy(ddp)),
        ("file", torch.load(file, weights_only=False)),
    ):
        with torch.no_grad():
            result[f"{name}, evaluated"] = torch.equal(copied.eval()(x), plain.module(x))
        copied.train()
        result[f"{name}, warned"] = warned(
            lambda copied=copied: cross_entropy(copied(x), y).backward()
        )
        pairs = zip(copied.parameters(), plain.parameters(), strict=True)
        result[name] = all(torch.equal(a.grad, b.grad) for a, b in pairs)
        other = comm_hook("topk", **METHOD).register(copied)
        cross_entropy(copied(x), y).backward()
        result[f"{name}, hooked again"] = other.step
        other.close()
    for name, call in (
        ("deepcopy", lambda: copy.deepcopy(hook)),
        ("pickle", lambda: torch.save(hook, io.BytesIO())),
        ("direct", lambda: wrapped(model()).register_comm_hook(None, comm_hook("topk"))),
    ):
        result[name] = refused(call)
    hook.close()
    ddp.eval()
    result["after close"] = refused(lambda: ddp(x))["kind"]
    with torch.no_grad():
        result["after close, no grad"] = refused(lambda: ddp.train()(x))["kind"]
    result["trained after close"] = refused(lambda: ddp(x))
    return result


@job
def lives(rank: int, size: int) -> dict[str, Any]:
    """`on_check` that calls back; threads that end; what changes behind the hook."""
    result: dict[str, Any] = {}
    for name in ("state_dict", "close", "model"):
        calls: list[Any] = []
        ddp = wrapped(model())
        hook = comm_hook("none", check_every=1, on_check=lambda seen, calls=calls: calls[0]())
        hook.register(ddp)
        x, _ = batch(0, rank)
        calls.append((lambda ddp=ddp, x=x: ddp(x)) if name == "model" else getattr(hook, name))
        result[f"{name}, backward"] = refused(lambda ddp=ddp, x=x: ddp(x).sum().backward())
        result[name] = refused(lambda ddp=ddp, x=x: ddp(x))
        hook.close()

    # One rank's on_check raises: the others' next collective ends at once, with the cause.
    hook = comm_hook(
        "none", check_every=3, on_check=lambda seen: 1 / (rank == 0 or hook.step < 4), timeout=50.0
    )
    ddp = wrapped(model())
    hook.register(ddp)
    train(ddp, sgd(ddp), range(3), rank)  # DDP forms new buckets at the second step
    for _ in range(2):
        result["one rank"] = refused(lambda: ddp(x).sum().backward())
    result["one rank, forward"] = {"kind": type(hook._failed).__name__, "text": str(hook._failed)}
    hook.close()

    before = threading.enumerate()  # perhaps with those of earlier hooks that are ending
    ddp = wrapped(model())
    hook = comm_hook("none").register(ddp)
    ddp(x).sum().backward()
    begun = set(threading.enumerate()).difference(before)
    started = [thread for thread in begun if "comm_hook" in thread.name]
    del ddp, hook
    gc.collect()
    for thread in started:
        thread.join(PROMPT)
    result["threads"] = [len(started), sum(thread.is_alive() for thread in started)]

    import torch._dynamo

    config = torch._dynamo.config
    setting, config.optimize_ddp = config.optimize_ddp, "python_reducer"
    try:
        result["python reducer"] = refused(lambda: register(comm_hook("none")))
    finally:
        config.optimize_ddp = setting

    part = model()
    part.branch.requires_grad_(False)
    ddp = wrapped(part, find_unused_parameters=True)
    hook = comm_hook("none").register(ddp)
    part.branch.requires_grad_(True)
    texts = warned(partial(train, ddp, sgd(ddp), range(2), rank))
    result["unfrozen"] = [text for text in texts if "branch" in text]
    hook.close()

    def add(net: Any) -> None:
        net.register_parameter("extra", nn.Parameter(torch.ones(1)))

    def assign(net: Any) -> None:
        net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True)

    def parametrize(net: Any) -> None:
        torch.nn.utils.parametrizations.weight_norm(net.branch)

    for change in (add, assign, parametrize):
        part = model()
        ddp = wrapped(part, find_unused_parameters=True)
        hook = comm_hook("none").register(ddp)
        change(part)
        result[change.__name__] = warned(lambda ddp=ddp: [ddp(x) for _ in range(2)])
        hook.close()

    hook = comm_hook("topk", **METHOD, ratio="0:0.25/2:0.01")
    ended = hooked(rank, hook)
    result["schedule"] = torch.equal(ended, alone(hook, model(), size))
    result["stages"] = [hook.settings.compressor.ratio, hook.settings.later[2].ratio]
    hook.close()
    return result


@job
def resized(rank: int, size: int) -> dict[str, Any]:
    """Go on with another number of ranks: refused, or the mean of all residuals is kept."""
    result: dict[str, Any] = {}
    options = {**METHOD, "collective": "twoshot"}
    ddp = wrapped(model())
    hook = comm_hook("onebit", **options).register(ddp)
    train(ddp, sgd(ddp), range(3), rank)
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, dict(hook.state_dict()))
    hook.close()
    merged = {key: entry for each in everyone for key, entry in each.items()}
    names = [*merged]
    part = dist.new_group([0, 2])
    if rank == 1:
        return result
    few = wrapped(model(), process_group=part)
    plain = comm_hook("onebit", **options)
    plain.load_state_dict(merged)
    result["refused"] = refused(lambda: plain.register(few))
    lost = comm_hook("onebit", **options, on_resize="redistribute")
    lost.load_state_dict({key: merged[key] for key in names[:2]})
    result["one is missing"] = refused(lambda: lost.register(wrapped(model(), process_group=part)))
    hook = comm_hook("onebit", **options, on_resize="redistribute")
    hook.load_state_dict(merged)
    hook.register(few)
    now: list[Any] = [None, None]
    dist.all_gather_object(now, hook.state_dict()["exchange"]["tensors"], group=part)
    before = [entry["exchange"]["tensors"] for entry in merged.values()]
    equal, owners, carried = [], [], []
    for name in before[0]:
        old, new = [each[name] for each in before], [each[name] for each in now]
        if name.endswith("residual"):
            equal.append(torch.allclose(sum(new) / 2, sum(old) / 3, rtol=1e-5, atol=1e-7))
            equal[-1] &= torch.equal(new[1], old[1] * (2 / 3))
            carried.append(bool(old[1].any()))
        if name.endswith("owner"):
            owners.append(torch.equal(torch.cat(old), torch.cat(new)))
    result |= {"residuals": equal, "owners": owners, "carried": carried, "step": hook.step}
    with torch.no_grad():
        few.module.load_state_dict(ddp.module.state_dict())
    train(few, sgd(few), range(3, 5), rank)
    result["trains on"] = hook.step
    hook.close()
    return result


@job
def grown(rank: int, size: int) -> dict[str, Any]:
    """Three steps by one or two ranks, then two by all: what this rank sent, per fp32 byte."""
    result: dict[str, Any] = {}
    for few in (1, 2):
        part, state = dist.new_group([*range(few)]), {}
        if rank < few:
            ddp = wrapped(model(), process_group=part)
            hook = comm_hook("topk", check_every=1).register(ddp)
            train(ddp, sgd(ddp), range(3), rank)
            state = dict(hook.state_dict())
            hook.close()
        everyone: list[Any] = [None] * size
        dist.all_gather_object(everyone, state)
        ddp = wrapped(model())
        hook = comm_hook("topk", check_every=1, on_resize="redistribute").register(ddp)
        hook.load_state_dict({key: entry for each in everyone for key, entry in each.items()})
        train(ddp, sgd(ddp), range(3, 5), rank)
        again = comm_hook("topk", check_every=1)
        again.load_state_dict(hook.state_dict())
        again.register(wrapped(model()))
        for name, each in {"": hook, " resumed": again}.items():
            result[f"{few}{name}"] = up(each) / each.plain_bytes
            result[f"{few}{name} checked"] = each.checked.payload_up / each.plain_bytes
            each.close()
    return result
