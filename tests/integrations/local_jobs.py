"""Training loops of two processes with `gcbench.local_steps`, as users write them."""

from __future__ import annotations

import copy
import tempfile
import time
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.utils.prune
from ddp_jobs import changed, refused, warned
from jobs import collection, digest
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

import gcbench
from gcbench.core import sealed
from gcbench.integrations import handshake
from gcbench.training.configuration import Config
from gcbench.training.examples import Batches

COMMON: dict[str, Any] = {
    "task": "digits",
    "workers": 2,
    "batch": 32,
    "steps": 8,
    "momentum": 0.9,
    "lr": 0.05,
}
COMMON["schedule"] = "constant"
DILOCO = {"outer_lr": 0.7, "outer_momentum": 0.9, "outer_nesterov": True}
CASES: dict[str, dict[str, Any]] = {
    "averaging": {"compressor": "none", "local_steps": 3},
    "sparse": {"compressor": "sparseloco", "local_steps": 4, **DILOCO},
    "int8": {"compressor": "int8", "local_steps": 3, "dense_below": 100, **DILOCO},
    "stages": {"compressor": "topk", "options": {"ratio": {0: 0.5, 3: 0.1}}, "local_steps": 2},
    "start": {"compressor": "onebit", "start_step": 5, "local_steps": 3, "dense_last": True},
    "fragments": {
        **{"compressor": "sparseloco", "local_steps": 6, "fragments": 2, "delay": 2, "blend": 0.5},
        **{"dense_below": 100, **DILOCO},
    },
    "on the way": {"compressor": "int8", "local_steps": 8, "fragments": 2, "delay": 2},
    "blended": {"compressor": "onebit", "local_steps": 2, "blend": 0.25, "outer_lr": 0.5},
}
"""Configs of `gcbench run`, of which `arguments` makes those of `local_steps`."""
RESUMED = ("sparse", "stages", "fragments", "on the way")
JOBS, job = collection()


def arguments(config: Config) -> dict[str, Any]:
    """Return the arguments of `local_steps` for a config."""
    names = ("dense_below", "dense_last", "start_step", "seed", "memory", "memory_options")
    names = (*names, "collective", "outer_lr", "outer_momentum", "outer_nesterov")
    names = (*names, "fragments", "delay", "blend")
    return {name: getattr(config, name) for name in names} | config.options


class Loop:
    """A user's loop on the examples of `gcbench run`."""

    def __init__(self, config: Config, rank: int) -> None:
        self.config, self.rank, self.task = config, rank, config.make_task()
        train, _ = self.task.load(None)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.model = self.task.model_for(train)
        self.batches = Batches(config, self.task, train, torch.device("cpu"))
        self.optimizer = torch.optim.SGD(self.model.parameters(), config.lr, config.momentum)

    def local_steps(self, **more: Any) -> Any:
        config = self.config
        options = {**arguments(config), "every": config.local_steps, "timeout": 60.0, **more}
        return gcbench.local_steps(self.model, self.optimizer, config.compressor, **options)

    def run(self, steps: range) -> None:
        for step in steps:
            inputs, targets = self.batches.of(step, self.rank)
            self.optimizer.zero_grad()
            self.task.loss(self.model(inputs), targets).backward()
            self.optimizer.step()

    def flat(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])


@job
def equal(rank: int, size: int) -> dict[str, Any]:
    """Train each case to the end."""
    result: dict[str, Any] = {}
    for name, case in CASES.items():
        loop = Loop(Config.make({**COMMON, **case}), rank)
        steps = loop.local_steps()
        loop.run(range(2))
        apart = digest(loop.flat())
        loop.run(range(2, 8))
        steps.exchange()  # the last round may be shorter
        end, sent = digest(loop.flat()), steps.traffic.payload_up - steps.agreement.payload_up
        result[name] = {"apart": apart, "end": end, "sent": sent, "step": steps.step}
        steps.close()
    return result


@job
def resumed(rank: int, size: int) -> dict[str, Any]:
    """Save in the middle of a round, and resume in new objects."""
    result: dict[str, Any] = {}
    for name in RESUMED:
        config = Config.make({**COMMON, **CASES[name]})
        loop = Loop(config, rank)
        steps = loop.local_steps()
        loop.run(range(5))  # of "on the way" fragment 1 was sent after step 4
        saved = loop.model.state_dict(), loop.optimizer.state_dict(), steps.state_dict()
        steps.close()
        again = Loop(config, rank)
        again.model.load_state_dict(saved[0])
        again.optimizer.load_state_dict(saved[1])
        steps = again.local_steps(state=saved[2])
        again.run(range(5, 8))
        steps.exchange()
        result[name] = digest(again.flat())
        state = steps.state_dict()
        ((key, entry),) = state.items()
        bad = [*entry["parameters"][:-1], entry["parameters"][-1][:1]]
        wrong = {"rank": changed(state, rank=7), "settings": state}
        wrong["shape"] = changed(state, parameters=bad)
        wrong["flipped"] = {key: {**entry, "step": 3}}
        for case, each in wrong.items():
            more = {"outer_lr": 0.5} if case == "settings" else {}
            call = partial(Loop(config, rank).local_steps, state=each, **more)
            result[f"{name}, {case}"] = refused(call)
        for case, scale in (("not loaded", 1), ("another job's", 1 + rank)):
            loop = Loop(config, rank)
            if rank == 0 or case != "not loaded":
                loop.model.load_state_dict(again.model.state_dict())
            moved = [scale * x for x in entry["parameters"]]
            call = partial(loop.local_steps, state=changed(state, parameters=moved))
            result[f"{name}, {case}"] = refused(call)
        steps.close()
    return result


@job
def saved_momentum(rank: int, size: int) -> dict[str, Any]:
    """Resume where the momentum of one fragment has begun: by DCP, and as earlier versions did."""
    config, result = Config.make({**COMMON, **CASES["fragments"]}), {}
    loop, new = Loop(config, rank), Loop(config, rank)
    rounds = loop.local_steps()
    loop.run(range(5))
    state = rounds.state_dict()
    rounds.close()
    template = new.local_steps()
    loaded = {"rounds": template.state_dict()}
    with tempfile.TemporaryDirectory() as folder:
        place = [folder]
        dist.broadcast_object_list(place)
        dcp.save({"rounds": state}, checkpoint_id=place[0])
        dcp.load(loaded, checkpoint_id=place[0])
        dist.barrier()
    template.close()
    ((key, entry),) = state.items()
    result["begun"] = sorted({*entry["begun"]})
    pairs = zip(entry["momentum"], entry["begun"], strict=True)
    earlier = {**entry, "momentum": [m if begun else None for m, begun in pairs]}
    earlier = sealed.seal({k: v for k, v in earlier.items() if k not in ("begun", "digest")})
    for name, each in (("dcp", loaded["rounds"]), ("earlier", {key: earlier})):
        again = Loop(config, rank)
        again.model.load_state_dict(loop.model.state_dict())
        again.optimizer.load_state_dict(copy.deepcopy(loop.optimizer.state_dict()))
        rounds = again.local_steps(state=each)
        again.run(range(5, 8))
        rounds.exchange()
        result[name] = digest(again.flat())
        rounds.close()
    return result


@job
def autocast(rank: int, size: int) -> dict[str, Any]:
    """Call the optimizer inside autocast, which applies to the products of matrices of a method."""
    ends = []
    for enabled in (False, True):
        loop = Loop(Config.make({**COMMON, "compressor": "powersgd", "local_steps": 2}), rank)
        rounds, step = loop.local_steps(), loop.optimizer.step

        def cast(step: Any = step, enabled: bool = enabled) -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                step()

        loop.optimizer.step = cast
        loop.run(range(4))
        ends.append(loop.flat())
        rounds.close()
    return {"equal": torch.equal(*ends)}


@job
def rewound(rank: int, size: int) -> dict[str, Any]:
    """Load the state of step 0 after an exchange, and train again."""
    loop = Loop(Config.make({**COMMON, **CASES["sparse"]}), rank)
    steps = loop.local_steps()
    saved = loop.optimizer.state_dict(), steps.state_dict()
    model = {name: x.clone() for name, x in loop.model.state_dict().items()}
    loop.run(range(4))
    early = refused(lambda: steps.load_state_dict(saved[1]))
    loop.model.load_state_dict(model)
    loop.optimizer.load_state_dict(saved[0])
    steps.load_state_dict(saved[1])
    loop.run(range(8))
    result = {"end": digest(loop.flat()), "early": early}
    moved = [x + rank for x in steps.state_dict()["parameters"]]
    steps.load_state_dict(changed(steps.state_dict(), parameters=moved))
    result["another job's"] = refused(lambda: loop.run(range(4)))
    return result


@job
def between(rank: int, size: int) -> dict[str, Any]:
    """Exchange everything after step 5 while fragment 1 is on its way until step 6."""
    loop = Loop(Config.make({**COMMON, **CASES["on the way"]}), rank)
    steps = loop.local_steps()
    loop.run(range(5))
    before = [digest(p.detach()) for p in loop.model.parameters()]
    steps.exchange()
    after, sent = digest(loop.flat()), steps.traffic.payload_up - steps.agreement.payload_up
    steps.exchange()
    loop.run(range(5, 6))
    later = [digest(p.detach()) for p in loop.model.parameters()]
    same = steps.traffic.payload_up - steps.agreement.payload_up == sent
    result = {"before": before, "after": after, "later": later, "same": same}
    result["open"] = warned(steps.close)
    result["closed"] = refused(steps.exchange)
    return result


class Outer(torch.optim.Optimizer):
    """An optimizer that steps another one of the same parameters."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([p for g in inner.param_groups for p in g["params"]], {"lr": 1.0})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class Decayed(torch.optim.SGD):
    """torch calls hooks for its step and for the step of SGD inside it."""

    def step(self, closure: Any = None) -> None:
        super().step()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(0.99)


@job
def other_optimizers(rank: int, size: int) -> dict[str, Any]:
    """An optimizer that replaces the counted one; one of other parameters; one inside it."""
    config, result = Config.make({**COMMON, **CASES["averaging"]}), {}
    loop = Loop(config, rank)
    rounds = loop.local_steps()
    loop.run(range(3))  # a round, after which nothing is open
    loop.optimizer = torch.optim.Adam(loop.model.parameters(), 0.01)
    result["warnings"] = warned(lambda: loop.run(range(3, 8)))
    result["apart"] = digest(loop.flat())
    rounds.exchange()
    result["exchanged"] = digest(loop.flat())
    loop.run(range(1))  # no second warning
    result["close"] = warned(rounds.close)

    loop = Loop(config, rank)
    *first, last = loop.model.parameters()
    loop.optimizer = torch.optim.SGD(first, 0.05)
    rounds, second = loop.local_steps(), torch.optim.SGD([last], 0.05)
    loop.optimizer.register_step_pre_hook(lambda *_: second.step())
    loop.run(range(6))
    result["two optimizers"] = digest(loop.flat())
    rounds.close()

    loop = Loop(config, rank)
    *first, last = loop.model.parameters()
    loop.optimizer = torch.optim.SGD(first, 0.05)
    rounds, second = loop.local_steps(), torch.optim.SGD([last], 0.05)
    loop.optimizer.register_step_post_hook(lambda *_: second.step())  # after an exchange
    loop.run(range(6))
    result["last, apart"] = digest(loop.flat())
    rounds.exchange()
    result["last"] = digest(loop.flat())
    rounds.close()

    loop = Loop(config, rank)
    loop.optimizer = Outer(loop.optimizer)
    rounds = loop.local_steps()
    loop.run(range(6))
    result["inside"] = digest(loop.flat())
    rounds.close()

    loop = Loop(config, rank)
    loop.optimizer = Decayed(loop.model.parameters(), 0.05)
    rounds = loop.local_steps()
    loop.run(range(6))
    result["subclass"] = digest(loop.flat())
    result["subclass, steps"] = rounds.step
    rounds.close()
    return result


@job
def other_parameters(rank: int, size: int) -> dict[str, Any]:
    """Rank 1 replaces a parameter; both unfreeze one, rename one, and optimize one more."""
    config, result = Config.make({**COMMON, **CASES["averaging"]}), {}
    loop = Loop(config, rank)
    loop.local_steps()
    loop.run(range(1))
    if rank == 1:
        part = next(m for m in loop.model.modules() if isinstance(m, nn.Linear))
        part.bias = nn.Parameter(part.bias.detach().clone())
        loop.optimizer.add_param_group({"params": [part.bias]})
    result["replaced"] = refused(lambda: loop.run(range(1, 3)))

    loop = Loop(config, rank)
    first = next(loop.model.parameters()).requires_grad_(False)
    rounds = loop.local_steps()
    first.requires_grad_(True)
    result["unfrozen"] = warned(lambda: loop.run(range(6)))
    rounds.close()

    loop = Loop(config, rank)
    rounds = loop.local_steps()
    part = next(m for m in loop.model.modules() if isinstance(m, nn.Linear))
    nn.utils.prune.identity(part, "weight")  # "weight" is now "weight_orig"
    loop.run(range(3))
    result["renamed"] = digest(loop.flat())
    rounds.close()

    loop = Loop(config, rank)
    loop.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    result["outside"] = warned(lambda: loop.local_steps().close())
    return result


@job
def loads(rank: int, size: int) -> dict[str, Any]:
    """Load another model during rounds: on all ranks, on one, and only for an evaluation."""
    config, result = Config.make({**COMMON, **CASES["averaging"]}), {}
    compiled = ("compiled", "inside compiled")
    for name in ("all", "one", *compiled, "evaluation", "with the rounds", "copy"):
        loop = Loop(config, rank)
        net = loop.model
        if name in compiled:
            loop.model = torch.compile(net, backend="eager")
        rounds = loop.local_steps(timeout=60.0)
        if name == "inside compiled":
            loop.model = net
        loop.run(range(1))
        saved = copy.deepcopy(loop.model.state_dict()), rounds.state_dict()
        loop.run(range(1, 3))
        other = copy.deepcopy(loop.model) if name == "copy" else loop.model
        present = copy.deepcopy(loop.model.state_dict())
        if name != "one" or rank:
            other.load_state_dict(saved[0])
        if name == "evaluation":
            other.load_state_dict(present)
        elif name == "with the rounds":
            rounds.load_state_dict(saved[1])
        result[name] = refused(lambda loop=loop: loop.run(range(3, 6)))
        warned(rounds.close)
    return result


@job
def initialized(rank: int, size: int) -> dict[str, Any]:
    """Rank 1 alone saves optimizers whose state is empty; then steps at rate 0."""
    loop = Loop(Config.make({**COMMON, **CASES["averaging"]}), rank)
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), 0.05)
    rounds, steps = loop.local_steps(), []

    def save(*others: torch.optim.Optimizer) -> None:
        loop.optimizer.zero_grad()
        for optimizer in (loop.optimizer, *others) if rank else ():
            get_optimizer_state_dict(loop.model, optimizer)
        steps.append(rounds.step)

    loop.run(range(2))
    present = copy.deepcopy(loop.model.state_dict())
    loop.model.load_state_dict({name: torch.zeros_like(x) for name, x in present.items()})
    save()
    loop.model.load_state_dict(present)
    result = {"evaluated": refused(lambda: loop.run(range(2, 3)))}
    save(torch.optim.AdamW(loop.model.parameters()))
    result["exchanged"] = refused(rounds.exchange)
    loop.optimizer.param_groups[0]["lr"] = 0.0
    loop.run(range(3, 6))
    steps.append(rounds.step)
    rounds.close()
    return {**result, "steps": steps, "end": digest(loop.flat())}


@job
def open_rounds(rank: int, size: int) -> dict[str, Any]:
    """Close in the middle of a round, and make fewer steps on rank 1."""
    config, result = Config.make({**COMMON, **CASES["averaging"]}), {}
    for name in ("open", "saved", "exchanged"):
        loop = Loop(config, rank)
        rounds = loop.local_steps()
        loop.run(range(4))
        if name == "saved":
            rounds.state_dict()
        elif name == "exchanged":
            rounds.exchange()
        result[name] = warned(rounds.close)
        dist.barrier()
    for name in ("closes", "waits"):
        loop = Loop(config, rank)
        rounds = loop.local_steps(timeout=60.0 if name == "closes" else 2.0)
        result[name] = refused(partial(loop.run, range(6 - rank)))
        if rank == 1 and name == "closes":
            result["warned"] = warned(rounds.close)
        dist.barrier()  # rank 1 waits here while rank 0 waits in its second round
        warned(rounds.close)
    return result


@job
def faults(rank: int, size: int) -> dict[str, Any]:
    """Ranks that differ, diverge or stop."""
    config, result = Config.make({**COMMON, **CASES["int8"]}), {}
    other = Loop(config, rank)
    with torch.no_grad():
        next(other.model.parameters()).add_(rank)
    result["parameters"] = refused(other.local_steps)
    other = Loop(config, rank)
    with torch.no_grad():
        next(other.model.parameters()).requires_grad_(False).add_(rank)
    result["frozen"] = refused(other.local_steps)
    result["every"] = refused(lambda: Loop(config, rank).local_steps(every=2 + rank))
    result["blocks"] = refused(lambda: Loop(config, rank).local_steps(every=9, fragments=9))
    if rank == 0:
        result["absent"] = refused(lambda: Loop(config, rank).local_steps(timeout=1.0))
    dist.barrier()
    with mock.patch.object(handshake, "PATIENCE", 0.1):  # as if a rank prepared data for a minute
        time.sleep(0.5 * rank)
        result["late"] = refused(Loop(config, rank).local_steps)
    loop = Loop(config, rank)
    loop.local_steps()
    if rank == 1:
        with torch.no_grad():
            next(loop.model.parameters()).fill_(torch.inf)
    for name in ("diverged", "again"):
        result[name] = refused(lambda: loop.run(range(3)))
    loop = Loop(config, rank)
    steps = loop.local_steps()
    loop.run(range(1 + rank))
    result["another step"] = refused(steps.exchange)
    loop = Loop(config, rank)
    steps = loop.local_steps()
    loop.run(range(3 + rank))  # rank 0 is at the end of a round
    result["no open step"] = refused(steps.exchange)
    half = nn.Linear(4, 2).double()
    optimizer = torch.optim.SGD(half.parameters(), 0.1)
    result["double"] = refused(lambda: gcbench.local_steps(half, optimizer, "int8", every=2))
    shards: Any = fully_shard(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(shards.parameters(), 0.1)
    result["sharded"] = refused(lambda: gcbench.local_steps(shards, optimizer, "int8", every=2))
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    averaged = copy.deepcopy(net)
    result["optimizer"] = refused(lambda: gcbench.local_steps(averaged, optimizer, "int8", every=2))
    prepared: Any = SimpleNamespace(optimizer=optimizer)  # as frameworks wrap it
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(1.0)
    steps = gcbench.local_steps(net, prepared, "int8", every=2)
    optimizer.step()
    result["wrapped"] = steps.step
    warned(steps.close)
    return result
