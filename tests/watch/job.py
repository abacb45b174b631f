# ruff: noqa: E402
"""A job of two or three ranks, as a user would write it; the argument is what is wrong with it.

Without torchrun it forks its ranks, so that they share one import of torch.
"""

import importlib
import os
import socket
import sys
import time

PRELOADED = "torch" in sys.modules
"""A fork of a process that has imported torch, see preloaded.py: no sitecustomize ran here."""

import torch
import torch._dynamo  # optimizers import it
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

kind = sys.argv[1]


class Decayed(torch.optim.SGD):
    """torch calls hooks for its step and for the step of SGD inside it."""

    def step(self, closure: object = None) -> None:
        """Step, then shrink the parameters."""
        super().step()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(0.99)


if PRELOADED:
    sys.path.insert(0, os.environ["PYTHONPATH"].split(os.pathsep)[0])
    importlib.import_module("gcbench_recorder").attach(dist)
if "RANK" not in os.environ:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    size = 3 if kind == "two hooks" else 2
    os.environ |= {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    children = []
    for number in range(size):
        os.environ["RANK"] = str(number)
        child = os.fork()
        if not child:
            break
        children.append(child)
    else:
        sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
dist.init_process_group("gloo")
rank = dist.get_rank()
if kind == "unusual":  # as if no digest of these tensors were possible
    sys.modules["gcbench_recorder"].digest = lambda tensors: memoryview(tensors)
torch.manual_seed(0)
first: nn.Module = nn.Linear(64, 512)
if kind == "sparse":  # rank r has 3 + r rows in its gradient: of 1,000, 512 wide
    first = nn.EmbeddingBag(1000, 512, sparse=True)
ddp = DistributedDataParallel(nn.Sequential(first, nn.ReLU(), nn.Linear(512, 10)))
hook = None
if kind == "fp16":
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
if kind in ("int8", "ring", "rewrapped", "metrics"):
    from gcbench.integrations.ddp import comm_hook

    collective = "ring" if kind == "ring" else None
    hook = comm_hook("int8", collective=collective, check_every=2 if kind == "ring" else 0)
    hook.register(ddp)
if kind == "rewrapped":  # the new wrapper has no hook
    ddp = DistributedDataParallel(ddp.module)
beside = None
if kind == "two hooks":
    from gcbench.integrations.ddp import comm_hook

    beside = DistributedDataParallel(nn.Linear(64, 64))
    hooks = [comm_hook("int8").register(each) for each in (ddp, beside)]
if kind == "second":  # as if DDP were forgotten for one of two models
    beside = nn.Linear(64, 64)
    second = torch.optim.SGD(beside.parameters(), 0.1)
optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
if kind == "subclass":
    optimizer = Decayed(ddp.parameters(), 0.1)
if kind == "zero":  # each rank has an optimizer of its part of the parameters
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
if kind in ("local", "local differ"):
    from gcbench.integrations.local import local_steps

    ddp = ddp.module
    hook = local_steps(ddp, optimizer, "int8", every=3)
for step in range(7):
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * step + rank))
    if kind == "sparse":
        x = torch.tensor([[0, 1, 2], [2, 1, 3 * rank]])
    losses = [model(x).square().mean() for model in (ddp, beside) if model is not None]
    if rank == 0:  # the hook of the second model is first
        sum(losses).backward()
    else:
        for loss in losses:
            loss.backward()
    if kind == "differ" and rank == 1 and step == 3:
        next(ddp.parameters()).grad.mul_(1 + 2.0**-20)
    optimizer.step()
    optimizer.zero_grad()
    if kind == "second":
        second.step()
    if kind == "replaced" and step == 3:  # the second phase has no DDP
        ddp = ddp.module
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    if kind == "functional":
        functional.all_reduce(torch.zeros(100_000), "sum", dist.group.WORLD).sum()
        with torch.inference_mode(), torch._C._AutoDispatchBelowADInplaceOrView():  # as compiled
            name = dist.group.WORLD.group_name
            sum_ = torch.ops._c10d_functional.all_reduce_(torch.zeros(50_000), "sum", name)
            torch.ops._c10d_functional.wait_tensor(sum_)
    if kind == "one sends" and rank == 0:
        dist.send(torch.zeros(100_000), 1)
    if kind == "one sends" and rank == 1:
        dist.recv(torch.zeros(100_000), 0)
    if kind == "metrics":
        dist.all_reduce(torch.zeros(100_000))
    if kind == "one step":
        break
print(kind, "done")
if kind == "fail" and rank == 1:
    sys.exit(3)
if kind in ("local", "local differ"):
    hook.exchange()
if kind == "extra" and rank == 1:
    ddp.module(x).sum().backward()
    optimizer.step()
if kind in ("local differ", "loads") and rank == 1:
    next(ddp.parameters()).data += 1
if hook is not None:
    hook.close()
time.sleep(0.1)  # torch hangs at exit if gloo's thread still holds the last collective
dist.destroy_process_group()
