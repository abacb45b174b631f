"""Training jobs of two and three processes, as users write them, for tests of `comm_hook`.

One start of the processes does many jobs, each of which returns what a test looks at.
"""

from __future__ import annotations

import io
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

import gcbench
from gcbench.core import registry
from gcbench.core.clock import Clock
from gcbench.core.exchange import Exchange
from gcbench.core.world import Link, SimulatedWorld
from gcbench.training import engines

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


def model() -> Net:
    torch.manual_seed(1)
    return Net()


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(BATCH, 3, 4, 4, generator=generator)
    return x, torch.randint(0, 5, (BATCH,), generator=generator)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def train(
    ddp: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    rank: int,
    forward: Callable[..., Tensor] | None = None,
) -> None:
    """Train as anybody does; `forward(ddp, x, step)` may do it in its own way."""
    for step in steps:
        x, y = batch(step, rank)
        optimizer.zero_grad()
        output = ddp(x) if forward is None else forward(ddp, x, step)
        cross_entropy(output.float(), y).backward()
        optimizer.step()


def wrapped(net: nn.Module, **options: Any) -> DDP:
    """Small buckets, so that there are several and they are rebuilt."""
    return DDP(net, **{"bucket_cap_mb": 0.01, **options})


def flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1).float() for p in net.parameters()])


def alone(hook: Any, net: nn.Module, size: int, steps: int = STEPS) -> Tensor:
    """Return the parameters after the same training by gcbench's own exchange, in this process."""
    settings = hook.settings
    named = dict(net.named_parameters())
    plan = hook._plan_made
    world = SimulatedWorld(size, torch.device("cpu"), Link(10.0, 50.0), 1, 1)
    exchange = Exchange(world, settings.lanes(plan, 0), settings.seed, Clock(torch.device("cpu")))
    optimizer = sgd(net)
    for step in range(steps):
        if step == settings.start_step and step:
            exchange.change(settings.lanes(plan, step))
        buckets = []
        for rank in range(size):
            x, y = batch(step, rank)
            loss = cross_entropy(net(x), y)
            gradients = torch.autograd.grad(loss, list(named.values()))
            own = dict(zip(named, gradients, strict=True))
            buckets.append(torch.cat([own[placed.name].reshape(-1) for placed in plan.tensors]))
        mean = exchange.mean(buckets, step)
        for placed in plan.tensors:
            named[placed.name].grad = placed.of(mean).clone()
        optimizer.step()
    world.close()
    return flat(net)


def hooked(rank: int, hook: Any, *, steps: range = range(STEPS), **options: Any) -> Tensor:
    ddp = wrapped(model(), **options)
    hook.register(ddp)
    train(ddp, sgd(ddp), steps, rank)
    return flat(ddp)


# ---- jobs ----------------------------------------------------------------------------------------


def method(rank: int, size: int, name: str) -> dict[str, Any]:
    """One method, by each of its collectives, against gcbench's own exchange; and resumed."""
    found: dict[str, Any] = {}
    for collective in registry.compressor(name).legal_collectives():
        options = {"collective": collective, "dense_below": 50, "bucket_mb": 0.015}
        hook = gcbench.comm_hook(name, **options)
        ended = hooked(rank, hook)
        own = alone(hook, model(), size)
        found[collective] = {
            "equal": torch.equal(ended, own),
            "far": float((ended - own).abs().max()),
            "lanes": len(hook._plan_made.lanes),
            "up": hook.traffic.payload_up / hook.plain_bytes,
            "resumed": torch.equal(ended, resumed(rank, name, options)),
        }
        hook.close()
    return found


def resumed(rank: int, name: str, options: dict[str, Any]) -> Tensor:
    """Return the parameters of a job that ended after step 3 and went on as a new one."""
    ddp = wrapped(model())
    hook = gcbench.comm_hook(name, **options).register(ddp)
    optimizer = sgd(ddp)
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
    optimizer = sgd(ddp)
    optimizer.load_state_dict(optimizer_state)
    hook = gcbench.comm_hook(name, **options)
    hook.load_state_dict(hook_state)
    hook.register(ddp)
    train(ddp, optimizer, range(3, STEPS), rank)
    hook.close()
    return flat(ddp)


JOBS: dict[str, Callable[[int, int], dict[str, Any]]] = {}


def job(function: Callable[[int, int], dict[str, Any]]) -> Callable[[int, int], dict[str, Any]]:
    JOBS[function.__name__] = function
    return function


@job
def plain(rank: int, size: int) -> dict[str, Any]:
    """`none` beside DDP without a hook."""
    ddp = wrapped(model())
    train(ddp, sgd(ddp), range(STEPS), rank)
    ended = hooked(rank, gcbench.comm_hook("none"))
    return {
        "far": float((flat(ddp) - ended).abs().max()),
        "moved": float((ended - flat(model())).norm()),
    }


def main(member: Any, methods: list[str], jobs: list[str]) -> dict[str, Any]:
    """Do jobs in one process group of gloo."""
    engines.join(member, "cpu", 1)
    warnings.simplefilter("error")
    rank, size = member.rank, member.size
    found: dict[str, Any] = {}
    for name in methods:
        found[name] = method(rank, size, name)
    for name in jobs:
        began = time.perf_counter()
        found[name] = JOBS[name](rank, size)
        found[name]["seconds"] = time.perf_counter() - began
    return found
