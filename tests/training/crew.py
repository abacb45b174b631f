"""What workers do in tests of the launcher; light, so that a worker is there at once."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from pathlib import Path

from gcbench.core.errors import DivergedError, GcbenchError, Interrupted, PeerLostError, UsageError

LONG = 60.0


def tell(member, *words):
    """Return what this worker was given and sees around it."""
    return {
        "words": list(words),
        "member": [member.rank, member.size, member.local_rank, member.local_size],
        "folder": str(member.folder),
        "mode": oct(member.folder.stat().st_mode),
        "environment": {
            name: os.environ.get(name) for name in ("RANK", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
        },
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    }


def fail(member, how, folder):
    """Worker 1 fails, while the others wait.

    late: worker 0 says before that it lost a peer. after: it fails in its own way, as it did.
    """
    ready = Path(folder) / f"ready-{member.rank}"
    ready.write_text("")
    while len(list(Path(folder).glob("ready-*"))) < member.size:
        time.sleep(0.005)
    if member.rank == 0 and how == "late":
        raise PeerLostError("worker 0: a collective broke off")
    if member.rank == 0 and how == "after":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(0.5)
        raise RuntimeError("a connection was closed")
    if member.rank == 1:
        time.sleep(0.3 if how == "late" else 0.0)
        match how:
            case "exit":
                os._exit(7)
            case "kill" | "late" | "after":
                os.kill(os.getpid(), signal.SIGKILL)
            case "known":
                raise GcbenchError("worker 1 has something to say")
            case "usage":
                raise UsageError("worker 1 cannot do this")
            case "diverged":
                raise DivergedError("not finite in worker 1 at step 4", 4)
            case "unknown":
                raise ValueError("not me")
            case "leave":
                sys.exit(3)
            case "interrupted":
                raise Interrupted("stopped after step 5")
    if how == "interrupted":
        time.sleep(0.5)  # a checkpoint that is still being written
        (Path(folder) / f"saved-{member.rank}").write_text("")
        raise Interrupted("stopped after step 5")
    time.sleep(LONG)


def interrupt(member, times, folder, launcher):
    """Worker 0 stands for a user who asks to stop; all others would go on for long."""
    if times > 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (Path(folder) / f"ready-{member.rank}").write_text("")
    while len(list(Path(folder).glob("ready-*"))) < member.size:
        time.sleep(0.005)
    if member.rank == 0:
        for _ in range(times):
            os.kill(launcher, signal.SIGINT)
            time.sleep(0.1)
    time.sleep(LONG)


def stand_still(member):
    """Meet, then worker 1 stops; say what the others say."""
    import torch
    import torch.distributed as dist

    from gcbench.training import engines

    world = engines.join(member, "cpu", 1)
    everyone = world.collect([{"rank": member.rank, "x": torch.full((2,), float(member.rank))}])
    assert [each["x"].tolist() for each in everyone] == [[r, r] for r in range(member.size)]
    if member.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    with world.together():
        dist.barrier()


def meet(member):
    """Return what three workers collect, by their rank."""
    import torch

    from gcbench.training import engines

    world = engines.join(member, "cpu", 1)
    rank = member.rank
    value = {
        "text": "ä" * rank,
        "numbers": [rank, 0.1 * rank, float("inf"), None, True],
        "empty": torch.empty(0, 3),
        "half": torch.full((rank, 2), rank, dtype=torch.bfloat16),
        "scalar": torch.tensor(rank),
    }
    result = world.collect([value])
    for each in result:
        each["empty"] = list(each["empty"].shape)
        each["half"] = [str(each["half"].dtype), *each["half"].tolist()]
        each["scalar"] = each["scalar"].item()
    return result


def add_rows(member, path, summary):
    """Add five rows to a file, as all other workers do."""
    from gcbench.results import rows

    for i in range(5):
        rows.add(Path(path), {**summary, "config_hash": f"{member.rank}-{i}"})


def flip_a_bit(step, rank, bucket):
    """Flip the highest bit of a mantissa of worker 1, once, as a faulty memory does."""
    if (step, rank) != (3, 1):
        return
    import gc

    import torch

    from gcbench.training.train import Trainer

    (trainer,) = (each for each in gc.get_objects() if type(each) is Trainer)
    with torch.no_grad():
        trainer.parameters[0].view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 22)


def agree(member, *apart):
    """Compare what a run needs, of which worker 1 has something else."""
    from dataclasses import replace

    from gcbench.core import registry
    from gcbench.training import engines, preflight
    from gcbench.training.configuration import Config

    settings = {
        "task": "digits",
        "compressor": "terngrad",
        "workers": member.size,
        "batch": 60,
        "lr": 0.1,
    }
    settings |= {"batch": 60, "lr": 0.1}
    train, _ = registry.task("quadratic").load(None)
    if member.rank == 1:
        if "clip" in apart:
            settings["options"] = {"clip": 2.0}
        if "lr" in apart:
            settings["lr"] = 0.5
        if "data" in apart:
            train = replace(train, inputs=train.inputs + 1)
    world = engines.join(member, "cpu", 1)
    try:
        message = preflight.facts(Config.make(settings)) | {"data": preflight.digest(train, None)}
        if member.rank == 1 and "version" in apart:
            message["version of gcbench"] = "0.0.9"
        try:
            preflight.check(world, message)
        except UsageError as error:
            return str(error)
        return "agreed"
    finally:
        world.close()


def train_through_ddp(member, jobs):
    """Be one worker of runs with engine ddp, one after the other; return their summaries by name.

    A job is (name, config, folder, how). how: "whole"; "cut" stops at the first pause after 5
    steps; in "slow" the exchange of a lane takes 40 ms longer, and so does what lies between the
    gradients of the last layer and those of the first, 80 ms.
    """
    import json

    from gcbench.training import engines
    from gcbench.training.configuration import Config
    from gcbench.training.ddp_trainer import DdpTrainer
    from gcbench.training.store import Run
    from gcbench.training.train import Options

    world, result = engines.join(member, "cpu", 1), {}
    try:
        for name, settings, folder, how in jobs:
            world.traffic[0] = type(world.traffic[0])()
            options = Options(checkpoint_seconds=1e9)
            trainer = DdpTrainer(Config.make(settings), world, Run(Path(folder)), options)
            if how == "slow":
                slow_down(trainer)
            try:
                summary = trainer.fit(
                    lambda trainer=trainer, how=how: how == "cut" and trainer.step >= 5
                )
                result[name] = json.loads(json.dumps(summary))
            except Interrupted:
                result[name] = {"stopped": trainer.step}
            alive = [x for x in gc.get_objects() if type(x).__name__ == "DistributedDataParallel"]
            result[name]["freed"] = not alive
            world.collect([name])  # the next one may resume from a checkpoint of worker 0
        return result
    finally:
        world.close()


def slow_down(trainer):
    """Make the exchange of a lane 40 ms longer, and the backward pass 80 ms."""
    import torch

    from gcbench.core import registry

    plain = registry.compressor_class("none")

    def encode(self, x, ctx):
        time.sleep(0.04)
        return plain.encode(self, x, ctx)

    trainer.compressor = type("Slow", (plain,), {"encode": encode})()
    (between,) = (m for m in trainer.replicas[0].modules() if type(m) is torch.nn.ReLU)
    between.register_full_backward_hook(lambda *_: time.sleep(0.08))


def weigh(member, name, options, collective, n):
    """Exchange one gradient; return mean, wire bytes counted, those of torch's calls, first call.

    The latter are the sizes of the tensors that reach torch.distributed for other ranks; a ring
    all-reduce sends 2 (N - 1) / N of its tensor.
    """
    import torch
    import torch.distributed as dist

    from gcbench.core import registry
    from gcbench.core.clock import Clock
    from gcbench.core.compressor import Segments
    from gcbench.core.exchange import Exchange, Lane
    from gcbench.training import engines

    rank, size, sent, order = member.rank, member.size, [], []

    def to_one(tensor, **more):
        order.append("send")
        sent.append(tensor.numel() * tensor.element_size())
        return originals["isend"](tensor, **more)

    def from_one(tensor, **more):
        order.append("receive")
        return originals["irecv"](tensor, **more)

    def gather(pieces, tensor, **more):
        sent.append((size - 1) * tensor.numel() * tensor.element_size())
        return originals["all_gather"](pieces, tensor, **more)

    def reduce(tensor, *how, **more):
        sent.append(2 * (size - 1) / size * tensor.numel() * tensor.element_size())
        return originals["all_reduce"](tensor, *how, **more)

    patches = {"isend": to_one, "irecv": from_one, "all_gather": gather, "all_reduce": reduce}
    originals = {each: getattr(dist, each) for each in patches}
    world = engines.join(member, "cpu", 1)
    try:
        method = registry.compressor(name, **options)
        x = torch.randn(n, generator=torch.Generator().manual_seed(rank))
        clock = Clock(world.device)
        clock.start_step()
        running = Exchange(world, [Lane(method, collective, 0, Segments.of([(n,)]))], 7, clock)
        for each, patch in patches.items():
            setattr(dist, each, patch)
        mean = running.mean([x], 0).tolist()
        for each, original in originals.items():
            setattr(dist, each, original)
        return mean, world.traffic[0].wire, sum(sent), order[0]
    finally:
        world.close()
