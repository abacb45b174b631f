"""Every fault at every point of an exchange, in jobs of real gloo processes, and a judge of each.

    python tests/integrations/fault_matrix.py            # all cells; writes results/
    python tests/integrations/fault_matrix.py --only ddp/raise   # cells by a part of their name

A cell is one short training job. One rank or all of them meet a fault; the job catches errors and
retries the step, or ends at the first one. A cell passes if no completed backward pass has a
gradient other than the mean over all ranks, and either every rank finishes, or every rank that
survives stops in bounded time with an error that names the cause. The cells are the product of the
declarations below; results/fault-matrix.json has all of them and results/TRUST.md a summary.

The gradient of the model does not depend on its parameters: the correct mean is known at any step.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch._dynamo  # otherwise each rank would import it
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gcbench
from gcbench.core.world import DistributedWorld
from gcbench.integrations import ddp, fsdp  # noqa: F401 - as above
from gcbench.training import fork_server

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "results" / "fault-matrix.json"
TRUST = ROOT / "results" / "TRUST.md"
BEGIN, END = "<!-- fault matrix: begin -->", "<!-- fault matrix: end -->"

# ---- declarations --------------------------------------------------------------------------------

SIZES = {"ddp": 2, "ddp, buffers": 2, "fsdp": 2, "hsdp": 4}
"""Ranks of each framework's job. `ddp, buffers`: DDP broadcasts a buffer in each forward pass.
`hsdp`: two replicas of two shards."""
KINDS = {
    "raise": "an exception in the user's code or codec",
    "kill": "kill -9",
    "stop": "SIGSTOP",
    "exit": "the process exits at once, with code 0",
    "leave": "the rank closes its hook, destroys its process groups and exits",
    "nonfinite": "a value that is not finite",
    "nonfinite, skip": 'the same, with on_nonfinite="skip"',
    "wrong rate": "another learning rate",
    "wrong state": "a state of an earlier step is loaded",
}
CODEC = ("encode", "owner", "decode")
"""Points in the codec; `owner`: between the two collectives of a two-shot exchange."""
POINTS = {
    "register": "before the hook is registered",
    "connect": "before the rank joins the hook's process groups",
    "start": "before the forward pass",
    "forward": "in the forward pass",
    "backward": "in the backward pass, between two buckets or modules",
    "encode": "in the codec's encode",
    "collective": "between the agreement and the payload's collective",
    "owner": "in the codec, between the two collectives of a two-shot exchange",
    "decode": "in the codec, after the last collective",
    "on_check": "in the on_check function",
    "between encode": "in the encode of the exchange between replicas",
    "between owner": "between the two collectives of that exchange",
    "between decode": "after the last collective of that exchange",
    "tail": "at the end of the backward pass, after the last exchange",
    "step": "after the backward pass, before the optimizer's step",
}
DDP = ("ddp", "ddp, buffers")
ONLY = {"on_check": DDP, "decode": DDP} | {f"between {point}": ("hsdp",) for point in CODEC}
"""Points that some frameworks alone have. With FSDP the owner keeps its mean, which is final."""
IN_CODEC = {*CODEC, *(f"between {point}" for point in CODEC)}
FIRST = {"register", "connect"}
"""Points before the first step: a rank that is absent may be noticed by the timeout alone."""
INSIDE = {*IN_CODEC, *FIRST, "collective", "on_check"}
"""Points at which buffers change nothing."""
OUTSIDE = {"register", "start", "forward", "step"}
"""Points at which the rank itself may set a rate, load a state, or leave the job."""
POINTS_OF = {
    "raise": set(POINTS),
    "kill": set(POINTS),
    "stop": set(POINTS),
    "exit": set(POINTS),
    "leave": {"register", "start", "step"},
    "nonfinite": {"forward", *IN_CODEC},
    "nonfinite, skip": {"forward", *IN_CODEC},
    "wrong rate": OUTSIDE,
    "wrong state": {"start", "forward", "step"},
}
ENDS = ("kill", "exit", "leave", "stop")
"""Kinds after which the rank takes no further part: not tried on all ranks at once."""
SERVES = ", which serves the store"
"""Of rank 0, as without torchrun; otherwise the store outlives every rank, as with torchrun."""
WHEN = {"raise": (0, 2), "kill": (0,), "stop": (0,), "leave": (0,), "nonfinite, skip": (0,)}
"""The steps of the faults; other kinds happen at step 2. DDP rebuilds its buckets before step 1."""
STEPS = 4
RETRIES = 3
"""Consecutive failures after which a job that catches errors gives up."""


@dataclass(frozen=True)
class Limits:
    """Seconds."""

    timeout: float = 8.0
    """Of the hook."""
    prompt: float = 7.0
    """How soon the other ranks stop after a fault that does not silence a rank."""
    bounded: float = 22.0
    """How soon they stop after any fault: two timeouts (of registration in two groups), the roll
    call, and a busy machine."""
    group: float = 60.0
    """Timeout of the job's process groups: no rank may wait in them for one that failed."""


@dataclass(frozen=True)
class Cell:
    """One job. `broken` names a deliberate defect of the hook, for tests of the judge."""

    framework: str
    kind: str
    point: str
    caught: bool
    ranks: str
    when: int
    broken: str = ""

    @property
    def name(self) -> str:
        """Return a name such as ddp/raise/encode/caught/rank 0/step 2."""
        caught = "caught" if self.caught else "not caught"
        return f"{self.framework}/{self.kind}/{self.point}/{caught}/{self.ranks}/step {self.when}"

    @property
    def faulty(self) -> set[int]:
        """Return the ranks that meet the fault."""
        size = SIZES[self.framework]
        return set(range(size)) if self.ranks == "all" else {int(self.ranks.split()[1][0])}


def cells() -> list[Cell]:
    """Return the product of all declarations, without combinations that do not exist."""
    result = []
    for framework, kind, point, caught, when in product(
        SIZES, KINDS, POINTS, (False, True), (0, 2)
    ):
        if point not in POINTS_OF[kind] or framework not in ONLY.get(point, SIZES):
            continue
        steps = (0,) if point in FIRST else WHEN.get(kind, (2,))
        if when not in steps:
            continue
        if framework == "ddp, buffers" and point in INSIDE:
            continue
        subsets = ["rank 0", f"rank {SIZES[framework] - 1}"]
        subsets.append(f"rank 0{SERVES}" if kind in ENDS else "all")
        result += [Cell(framework, kind, point, caught, ranks, when) for ranks in subsets]
    return result


# ---- one rank of a job ---------------------------------------------------------------------------


class InjectedError(Exception):
    """The exception of the kind `raise`."""


class Fault:
    """The fault of this process: at which point, how often, and what it does there."""

    def __init__(self, cell: Cell, rank: int, log: Callable[..., None]) -> None:
        self.cell, self.rank, self.log = cell, rank, log
        self.armed = rank in cell.faulty
        self.step = 0
        self.hook: Any = None
        self.early: Any = None
        """The hook's state before the first step."""
        self.collectives = 0
        self.registers = False

    def due(self, point: str) -> bool:
        """Return whether the fault happens now; it happens once."""
        if not (self.armed and point == self.cell.point and self.step == self.cell.when):
            return False
        self.armed = False
        self.log("fault")
        return True

    def at(self, point: str) -> None:
        """Cause the fault, if this is its point; `value` makes the non-finite values."""
        kind = self.cell.kind
        if kind.startswith("nonfinite") or not self.due(point):
            return
        if kind == "raise":
            raise InjectedError(f"injected at {point} of rank {self.rank}")
        if kind in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        elif kind == "exit":
            os._exit(0)
        elif kind == "leave":
            with suppress(AttributeError):
                self.hook.close()
            dist.destroy_process_group()
            os._exit(0)
        elif kind == "wrong rate":
            self.hook.lr = 0.125
        else:
            self.hook.load_state_dict(self.early)

    def value(self, point: str, x: Any) -> Any:
        """Return x, or infinities in its place."""
        if self.cell.kind.startswith("nonfinite") and self.due(point):
            return torch.full_like(x, torch.inf)
        return x


FAULT: Fault


@dataclass(frozen=True)
class Codec(gcbench.get_compressor("none").__class__):  # type: ignore[misc]
    """No compression, with points for faults."""

    level: str = ""
    collectives: ClassVar[tuple[str, ...]] = ("twoshot",)

    def encode(self, x: Tensor, ctx: Any) -> Any:
        """Return x, which is sent as it is."""
        FAULT.at(f"{self.level}encode")
        return FAULT.value(f"{self.level}encode", x.contiguous())

    def decode(self, payload: Any, ctx: Any) -> Tensor:
        """Return the mean."""
        FAULT.at(f"{self.level}decode")
        return FAULT.value(f"{self.level}decode", payload.parts[0] / payload.count)

    def merge(self, payloads: Sequence[Any], ctx: Any) -> Any:
        """Return the sum of the payloads."""
        FAULT.at(f"{self.level}owner")
        return FAULT.value(f"{self.level}owner", sum(each.parts[0] for each in payloads))

    def mean(self, payloads: Sequence[Any], ctx: Any) -> Tensor:
        """Return the mean of the payloads."""
        FAULT.at(f"{self.level}owner")
        total = sum(each.parts[0] for each in payloads)
        count = sum(each.count for each in payloads)
        return FAULT.value(f"{self.level}owner", total / count)


class _Probe(torch.autograd.Function):
    """The identity, with a point for a fault in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, point: str) -> Tensor:
        ctx.point = point
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        FAULT.at(ctx.point)
        return gradients[0], None


class Part(nn.Module):
    """h + <w, x>: the gradient of w is x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(8, 4))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return h + (self.w * x).sum()


class Net(nn.Module):
    """Three parts; the last one's gradient is ready first."""

    def __init__(self, *, buffers: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = Part(), Part(), Part()
        if buffers:
            self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(_Probe.apply(torch.zeros(1, requires_grad=True), "tail"), x)
        FAULT.at("forward")
        h = self.b(_Probe.apply(h, "backward"), FAULT.value("forward", x))
        return self.c(h, x)


def batch(rank: int) -> Tensor:
    """Return a rank's batch: small integers, so that means are exact."""
    return (rank + 1.0) * torch.arange(32.0).view(8, 4)


@dataclass
class Job:
    """A model with its hook on one rank."""

    cell: Cell
    limits: Limits
    model: Any = field(init=False)
    register: Callable[[], Any] = field(init=False)

    def __post_init__(self) -> None:
        skip = {"on_nonfinite": "skip"} if "skip" in self.cell.kind else {}
        net = Net(buffers=self.cell.framework == "ddp, buffers")
        if self.cell.framework in DDP:
            self.model = DistributedDataParallel(net, bucket_cap_mb=1e-5)
            hook = gcbench.comm_hook(
                *(Codec(),),
                **skip,
                bucket_mb=0,
                timeout=self.limits.timeout,
                check_every=1,
                on_check=lambda comparisons: FAULT.at("on_check"),
            )
            self.register = lambda: hook.register(self.model)
        else:
            mesh, options, where = None, {}, {}
            if self.cell.framework == "hsdp":
                both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
                mesh, where = both["shard"], {"replicas": both["replicate"]}
                options = {"between": Codec("between ")}
            else:
                mesh = init_device_mesh("cpu", (SIZES["fsdp"],))
            for module in (net.a, net.b, net.c, net):
                fully_shard(module, mesh=mesh)
            self.model = net
            options["timeout"] = self.limits.timeout
            hook = gcbench.shard_hook(Codec(), **skip, **options)
            self.register = lambda: hook.register(self.model, **where)
        FAULT.hook = hook

    def reduced(self) -> str:
        """Return "mean", "nan" or "wrong": what the gradients of this rank are."""
        size = SIZES[self.cell.framework]
        mean = sum(batch(rank) for rank in range(size)) / size
        kinds = set()
        for parameter in self.model.parameters():
            gradient, want = parameter.grad, mean
            if gradient is not None and hasattr(gradient, "to_local"):
                shards = gradient.device_mesh.size()
                want = mean.chunk(shards)[gradient.device_mesh.get_local_rank()]
                gradient = gradient.to_local()
            if gradient is not None and gradient.isnan().all():
                kinds.add("nan")
            else:
                kinds.add(
                    "mean" if gradient is not None and torch.equal(gradient, want) else "wrong"
                )
        if kinds == {"mean", "nan"} and self.cell.framework not in DDP:
            return "nan"  # FSDP has reduced the modules before the non-finite one
        return kinds.pop() if len(kinds) == 1 else "wrong"


@contextmanager
def _collectives() -> Iterator[None]:
    """Give each second collective of a step a point for faults: the first is the agreement."""
    before = DistributedWorld.together

    @contextmanager
    def together(world: DistributedWorld) -> Iterator[None]:
        FAULT.collectives += 1
        if FAULT.collectives == (1 if FAULT.registers else 2):
            FAULT.at("connect" if FAULT.registers else "collective")
        with before(world):
            yield

    DistributedWorld.together = together  # type: ignore[method-assign]
    try:
        yield
    finally:
        DistributedWorld.together = before  # type: ignore[method-assign]


BROKEN = {
    "swallow": (
        "ddp/raise/decode/caught/rank 1/step 0",
        "returns local gradients instead of an error",
    ),
    "mute": (
        "ddp/raise/encode/caught/rank 1/step 0",
        "does not stop the other ranks when this one fails",
    ),
    "apart": (
        "ddp/nonfinite, skip/forward/not caught/rank 1/step 0",
        "does not agree with the other ranks",
    ),
}
"""Deliberate defects of the hook for DDP, each with a cell in which the judge must notice it."""


def _break(hook: Any, broken: str) -> None:
    """Give the hook a defect."""
    if broken == "swallow":

        def hand_back(error: BaseException) -> None:
            for each in hook._waiting:
                each.done.set_result(each.buffer)
            hook._waiting = []

        hook._break_off = hand_back
    elif broken == "mute":
        hook._worlds = list
    elif broken == "apart":
        hook._settings = replace(hook.settings, agree=False)


def rank_job(cell: Cell, rank: int, folder: Path, limits: Limits, parent: int) -> None:
    """Run one rank; its log is folder/RANK.jsonl, one event per line."""
    global FAULT
    fork_server.die_with_parent(parent)  # also one that is stopped
    file = os.open(folder / f"{rank}.jsonl", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def log(event: str, **values: Any) -> None:
        line = json.dumps({"event": event, "at": time.monotonic(), **values})
        os.write(file, line.encode() + b"\n")

    FAULT = Fault(cell, rank, log)
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch's store is verbose about lost peers
    torch.set_num_threads(1)
    size, limit = SIZES[cell.framework], timedelta(seconds=limits.group)
    store = _store(cell, rank, folder, limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    how = "done"
    with _collectives():
        done, failures = 0, 0
        try:
            job = Job(cell, limits)
            FAULT.at("register")
            FAULT.registers = True
            job.register()
            FAULT.registers = False
            _break(FAULT.hook, cell.broken)
            FAULT.early = FAULT.hook.state_dict()
            optimizer = torch.optim.SGD(job.model.parameters(), lr=0.0)
        except Exception as error:
            log("error", text="".join(traceback.format_exception_only(error)))
            done, how = STEPS, "failed"
        while done < STEPS:
            try:
                FAULT.step, FAULT.collectives = done, 0
                optimizer.zero_grad()
                FAULT.at("start")
                job.model(batch(rank)).sum().backward()
                log("reduced", what=job.reduced(), step=done)
                done, failures = done + 1, 0
                FAULT.at("step")
                optimizer.step()
            except Exception as error:
                log("error", text="".join(traceback.format_exception_only(error)))
                failures += 1
                if not cell.caught or failures == RETRIES:
                    how = "failed"
                    break
    log("end", how=how)
    if how == "failed" and not cell.caught:
        os._exit(1)
    # A job that caught its error lives on (a debugger, a last checkpoint): others must not wait.
    _linger(folder, size, rank, limits)
    os._exit(0)


def _store(cell: Cell, rank: int, folder: Path, limit: timedelta) -> Any:
    """Return the store of the job: a file, or served by rank 0."""
    size = SIZES[cell.framework]
    if SERVES not in cell.ranks:
        return dist.FileStore(str(folder / "store"), size)
    place = folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, True, limit, wait_for_workers=False)
        place.with_suffix(".new").write_text(str(store.port))
        place.with_suffix(".new").rename(place)
        return store
    while not place.exists():
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(place.read_text()), size, False, limit)


def _linger(folder: Path, size: int, rank: int, limits: Limits) -> None:
    deadline = time.monotonic() + limits.bounded + 2
    while time.monotonic() < deadline:
        others = [events(folder, each) for each in range(size) if each != rank]
        if all(log and log[-1]["event"] in ("end", "fault") for log in others):
            return
        time.sleep(0.05)


def events(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Return what a rank has logged."""
    path = folder / f"{rank}.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- the judge -----------------------------------------------------------------------------------


def judge(
    cell: Cell, logs: Sequence[Sequence[dict[str, Any]]], limits: Limits
) -> tuple[str, list[str], float]:
    """Return how a cell ended ("equal", "stopped" or "skipped"), what is wrong, and seconds.

    `logs`: each rank's events. The seconds are from the fault to the end of the last rank.
    """
    wrong: list[str] = []
    faults = [e["at"] for log in logs for e in log if e["event"] == "fault"]
    if len(faults) != len(cell.faulty):
        texts = [e["text"].strip()[-200:] for log in logs for e in log if e["event"] == "error"]
        wrong.append(f"{len(faults)} faults happened, {len(cell.faulty)} expected: {texts}")
    survivors = [
        rank for rank in range(len(logs)) if not (cell.kind in ENDS and rank in cell.faulty)
    ]
    began, seconds, how = min(faults, default=0.0), 0.0, set()
    for rank in survivors:
        log = logs[rank]
        wrong += [
            f"rank {rank} has another gradient than the mean at step {each['step']}"
            for each in log
            if each["event"] == "reduced" and each["what"] == "wrong"
        ]
        last = log[-1] if log else {"event": "nothing", "at": 0.0}
        if last["event"] != "end":
            wrong.append(f"rank {rank} did not end: killed after {limits.bounded:.0f} s")
            continue
        how.add(last["how"])
        errors = [each for each in log if each["event"] == "error"]
        if errors:
            seconds = max(seconds, errors[0]["at"] - began)
        if last["how"] == "failed" and not any(_names(cell, each["text"]) for each in errors):
            text = errors[-1]["text"].strip()[-200:] if errors else "no error"
            wrong.append(f"rank {rank} does not name the cause: {text}")
    if len(how) > 1:
        wrong.append("some ranks finished and others stopped")
    nan = [
        {
            each["step"]
            for each in logs[rank]
            if each["event"] == "reduced" and each["what"] == "nan"
        }
        for rank in survivors
    ]
    if any(each != nan[0] for each in nan):
        wrong.append("a step was skipped on some ranks alone")
    if nan[0] and "skip" not in cell.kind:
        wrong.append("gradients are NaN")
    silent = cell.kind == "stop" or cell.point in FIRST
    bound = limits.bounded if silent else limits.prompt
    if seconds > bound:
        wrong.append(f"the first error came after {seconds:.1f} s, {bound:.0f} s allowed")
    result = "stopped" if "failed" in how else "skipped" if nan[0] else "equal"
    return result, wrong, seconds


def _names(cell: Cell, text: str) -> bool:
    """Return whether an error names the fault's rank or text."""
    who = [f"{word} {rank}" for rank in cell.faulty for word in ("rank", "worker")]
    return any(each in text for each in (*who, "injected at", "is not finite"))


# ---- running cells -------------------------------------------------------------------------------


def start(cell: Cell, limits: Limits) -> tuple[Path, list[Any]]:
    """Fork the ranks of a cell."""
    folder = Path(tempfile.mkdtemp(prefix="gcbench-fault-"))
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=rank_job, args=(cell, rank, folder, limits, os.getpid()))
        for rank in range(SIZES[cell.framework])
    ]
    for each in ranks:
        each.start()
    return folder, ranks


def run(chosen: Sequence[Cell], limits: Limits, parallel: int) -> list[dict[str, Any]]:
    """Run cells, several at a time, and judge them."""
    waiting, running, results = list(chosen), [], []
    while waiting or running:
        while waiting and len(running) < parallel:
            cell = waiting.pop(0)
            running.append((cell, *start(cell, limits), time.monotonic()))
        time.sleep(0.02)
        for item in list(running):
            cell, folder, ranks, began = item
            late = time.monotonic() - began > limits.group + 2 * limits.bounded
            stopped = cell.kind == "stop"
            alive = [
                r
                for r, p in enumerate(ranks)
                if p.is_alive() and not (stopped and r in cell.faulty)
            ]
            if alive and not late:
                continue
            for process in ranks:
                process.kill()
                process.join()
            running.remove(item)
            logs = [events(folder, rank) for rank in range(len(ranks))]
            result, wrong, seconds = judge(cell, logs, limits)
            outcome = {"result": result, "seconds": round(seconds, 2), "wrong": wrong}
            results.append({**asdict(cell), **outcome})
            shutil.rmtree(folder)
            if wrong and not cell.broken:
                print(f"{len(results)}/{len(chosen)} {cell.name}: {'; '.join(wrong)}", flush=True)
    return sorted(results, key=lambda each: chosen.index(named(each)))


def named(result: dict[str, Any]) -> Cell:
    """Return the cell of a result."""
    return Cell(**{field: result[field] for field in Cell.__dataclass_fields__})


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table: one line per framework and kind, then the failures."""
    lines = [
        "| framework | fault | points | cells | equal | skipped | stopped | slowest, s | failed |",
        "|-|-|-|-|-|-|-|-|-|",
    ]
    for framework, kind in product(SIZES, KINDS):
        rows = [r for r in results if (r["framework"], r["kind"]) == (framework, kind)]
        if not rows:
            continue
        good = [r for r in rows if not r["wrong"]]
        count = {
            how: sum(r["result"] == how for r in good) for how in ("equal", "skipped", "stopped")
        }
        slowest = max((r["seconds"] for r in good if r["result"] == "stopped"), default=0.0)
        lines.append(
            f"| {framework} | {KINDS[kind]} | {len({r['point'] for r in rows})} | {len(rows)} | "
            f"{count['equal']} | {count['skipped']} | {count['stopped']} | {slowest:.1f} | "
            f"{len(rows) - len(good)} |"
        )
    lines += [f"* {named(r).name}: {'; '.join(r['wrong'])}" for r in results if r["wrong"]]
    return "\n".join(lines)


def summary(results: Sequence[dict[str, Any]], head: str) -> str:
    """Return the section of TRUST.md, with its markers."""
    return f"{BEGIN}\n{head}\n\n{table(results)}\n{END}"


def store(results: Sequence[dict[str, Any]]) -> None:
    """Write results, among those of other cells that are stored already; update TRUST.md."""
    before = json.loads(RESULT.read_text())["cells"] if RESULT.exists() else []
    by_name = {named(each): each for each in (*before, *results)}
    merged = [by_name[cell] for cell in cells() if cell in by_name]
    head = f"{len(merged)} jobs, torch {torch.__version__}, gloo on a CPU."
    lines = ",\n".join(json.dumps(each) for each in merged)
    RESULT.write_text(f'{{"head": {json.dumps(head)}, "cells": [\n{lines}\n]}}\n')
    text, _, rest = TRUST.read_text().partition(BEGIN)
    TRUST.write_text(text + summary(merged, head) + rest.partition(END)[2])


def main() -> None:
    """Run the chosen cells, print the table, and store the results, unless a sample was run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[""], help="parts of names of cells")
    parser.add_argument("--every", type=int, default=1, help="run every n-th cell")
    parser.add_argument("--parallel", type=int, default=4, help="jobs at a time")
    parser.add_argument("--broken", action="store_true", help="also run each cell of BROKEN")
    options = parser.parse_args()
    chosen = [cell for cell in cells() if any(part in cell.name for part in options.only)]
    if not chosen:
        parser.error(f"--only {options.only}: no cell has this name")
    chosen = chosen[:: options.every]
    if options.broken:
        by_name = {cell.name: cell for cell in cells()}
        chosen += [replace(by_name[cell], broken=name) for name, (cell, _) in BROKEN.items()]
    began = time.monotonic()
    everything = run(chosen, Limits(), options.parallel)
    spent = time.monotonic() - began
    results = [each for each in everything if not each["broken"]]
    print(table(results))
    missed = False
    for each in everything[len(results) :]:
        print(f"broken: {each['broken']}: {'; '.join(each['wrong']) or 'not noticed'}")
        missed |= not each["wrong"]
    print(f"{len(everything)} cells in {spent:.0f} s")
    if options.every == 1:
        store(results)
    sys.exit(missed or any(each["wrong"] for each in results))


if __name__ == "__main__":
    main()
