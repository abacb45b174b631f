"""A worker of `gcbench bandwidth`: exchanges and their checks, the timing, and the ledger."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gcbench import ops
from gcbench.checks import adversary, exchanges, inputs
from gcbench.core import memory, progress
from gcbench.core.clock import Clock
from gcbench.core.compressor import Compressor, Segments, requantizes
from gcbench.core.errors import GcbenchError, PeerLostError
from gcbench.core.exchange import Exchange, Lane
from gcbench.core.schema import PHASES
from gcbench.core.world import DistributedWorld, Link, SimulatedWorld, World
from gcbench.profile.bandwidth.settings import Settings, items
from gcbench.profile.bandwidth.transfers import BOUNDS, PARTS, PLAIN, YARDSTICK, Item, Probe
from gcbench.report.analysis import Ledger
from gcbench.training import methods

CHECKED = 2
"""Number of steps compared with a simulation; in the second a memory is not empty."""

# ---- exchanges -----------------------------------------------------------------------------------


def shapes(count: int) -> list[tuple[int, ...]]:
    """Return the shapes of a gradient of `count` elements: a matrix, and a vector of the rest.

    The number of rows is a power of two, between a quarter and all of the number of columns. Some
    methods treat matrices and vectors differently; some cut rows into blocks.
    """
    side = 1 << math.isqrt(count).bit_length() - 1
    rest = count % side
    return [(side, count // side), *([(rest,)] if rest else [])]


class Inputs:
    """The workers' gradients at one size: independent, nearly normal, the same on every machine."""

    def __init__(self, world: DistributedWorld, count: int) -> None:
        self.world, self.count = world, count

    @cached_property
    def local(self) -> Tensor:
        """This worker's gradient, float32, shape (n,)."""
        return inputs.normal(self.count, self.world.ranks[0]).to(self.world.device)

    @cached_property
    def all(self) -> list[Tensor]:
        """The gradients of all workers, for a simulation."""
        ranks = range(self.world.size)
        return [inputs.normal(self.count, rank).to(self.world.device) for rank in ranks]


class Failed(Exception):
    """A method cannot be measured, for the reason in the text."""


class Subject:
    """An exchange by one compressor and collective at one size, on this worker."""

    def __init__(
        self,
        world: DistributedWorld,
        settings: Settings,
        inputs: Inputs,
        method: Compressor,
        collective: str,
    ) -> None:
        self.world, self.settings, self.inputs = world, settings, inputs
        self.method, self.collective = method, collective
        self.segments = Segments.of(shapes(inputs.count), method.granularity)
        self.memory: memory.Memory = memory.Memory()
        if settings.memory:
            self.memory = memory.of(method)
        self.exchange = self._new_exchange(world, method, collective, self.memory)
        self.step = 0
        self.rounds = 0.0
        self.last = torch.empty(0)

    def _new_exchange(
        self, world: World, method: Compressor, collective: str, carried: memory.Memory
    ) -> Exchange:
        lane = Lane(method, collective, 0, self.segments, carried)
        return Exchange(world, [lane], self.settings.seed, Clock(world.device))

    def _simulation(self, method: Compressor, collective: str, link: Link) -> Exchange:
        """Return an exchange of the same workers in this process."""
        size, threads = self.world.size, self.settings.threads
        world = SimulatedWorld(size, self.world.device, link, threads, 1)
        return self._new_exchange(world, method, collective, self.memory)

    def _unlike_definition(self, mean: Tensor) -> str:
        """Compare the first mean, shape (n,), with its definition; return what is wrong, or "".

        A simulation alone would repeat a method's own errors. The definition is the mean of all
        decoded payloads, encoded again if a merge does so. A distance of 1e-3 of the norm is
        allowed, because means added in another order may be encoded differently.
        """
        try:
            fault = adversary.mean_fault(self.method)
        except Exception:  # at another size: what it raises at this size has a row of its own
            fault = ""
        if fault:
            return f"it is not the definition: {fault}"
        method, collective = exchanges.with_default_mean(self.method), self.collective
        if method is self.method:
            return ""  # its aggregate is not a mean, but defined by the method
        if not requantizes(method) and "allgather" in method.legal_collectives():
            collective = "allgather"
        simulation = self._simulation(method, collective, Link(1, 0))
        defined = simulation.mean(self.inputs.all, 0).double()
        off = float((mean.double() - defined).norm() / defined.norm().clamp(min=1e-30))
        return "" if off <= 1e-3 else f"its mean is {off:.2g} of its norm off the definition"

    def _simulated(self) -> list[Tensor]:
        """Return the first means, each of shape (n,), by a simulation in this process.

        It also counts the messages that an exchange sends one after another (`rounds`).
        """
        link = Link(math.inf, 1e6)  # one second per message: modelled seconds count messages
        exchange = self._simulation(self.method, self.collective, link)
        means = [exchange.mean(self.inputs.all, step).clone() for step in range(CHECKED)]
        self.rounds = exchange.world.modelled_seconds / CHECKED
        return means

    def _expected(self) -> list[Tensor]:
        """Return, on every worker, the first means as simulated by worker 0.

        Raises:
            Failed: the simulation raises an error, its means are not finite float32 tensors of
                shape (n,), or they differ from the definition.
        """
        means: list[Tensor] = []
        problem = ""
        if self.world.ranks[0] == 0:
            try:
                means = self._simulated()
            except Exception as error:  # a finding about the method; the command continues
                problem = f"{type(error).__name__}: {error}"
            like = self.inputs.local
            if any(mean.shape != like.shape or mean.dtype != like.dtype for mean in means):
                problem = f"its mean is {means[0].dtype}, shape {tuple(means[0].shape)}"
            elif not all(bool(mean.isfinite().all()) for mean in means):
                problem = "its mean is not finite"
            elif means:
                problem = self._unlike_definition(means[0])
        problem, self.rounds = self.world.collect([(problem, self.rounds)])[0]
        if problem:
            raise Failed(problem)
        means = means or [torch.empty_like(self.inputs.local) for _ in range(CHECKED)]
        with self.world.together():
            for mean in means:
                dist.broadcast(mean, 0)
        return means

    def advance(self) -> Tensor:
        """Exchange once more and return the mean, float32, shape (n,)."""
        self.last = self.exchange.mean([self.inputs.local], self.step)
        self.step += 1
        return self.last

    def check(self) -> tuple[int, str]:
        """Return how many elements of this worker's results are wrong, and what was compared.

        The first steps must equal the simulation bit for bit, and integers that the method
        transmits exactly must be exact. Where a library adds floats in its own order (all-reduce
        on a GPU) a difference of 1e-3 of the largest element is allowed ("close").

        Raises:
            Failed: see `_expected`.
        """
        close = self.world.device.type != "cpu" and self.collective == "allreduce"
        wrong = 0
        for mean in self._expected():
            mean_here = self.advance()
            if close:
                near = (mean_here - mean).abs() <= 1e-3 * mean.abs().max()
                wrong += int((~near).sum())
            else:
                wrong += differing(mean_here, mean)
        how = "close" if close else "bits"
        method, size = self.method, self.world.size
        if not method.claims.exact_for or method.claims.aggregate == "other":
            return wrong, how
        family = method.claims.exact_for[0]
        xs, mean = exchanges.exact_mean(method, self.collective, family, self.segments, size)
        gradient = xs[self.world.ranks[0]].to(self.world.device)
        exchange = self._new_exchange(self.world, method, self.collective, memory.Memory())
        mean_here = exchange.mean([gradient], 0)
        wrong += exchanges.count_inexact(mean_here.cpu(), mean, method.claims.portable)
        return wrong, f"{how}, exact"

    def unlike(self) -> int:
        """Return how many elements of the last mean have other bits than on worker 0."""
        first = self.last.clone()
        with self.world.together():
            dist.broadcast(first, 0)
        return differing(self.last, first)


def differing(a: Tensor, b: Tensor) -> int:
    """Return how many elements of two float32 tensors have other bits; all, if the shapes do."""
    if a.shape != b.shape:
        return max(a.numel(), b.numel())
    return int((a.view(torch.int32) != b.view(torch.int32)).sum())


# ---- measuring -----------------------------------------------------------------------------------


def timed(
    world: DistributedWorld, subjects: Sequence[tuple[Clock, Probe]], warmup: int, iterations: int
) -> list[list[list[float]]]:
    """Return, by subject, the seconds of each iteration: of its phases, and in all.

    They are the times of the slowest worker of the iteration. Subjects alternate, so that a
    disturbance of the machine affects all of them.
    """
    for turn in range(warmup + iterations):
        for clock, probe in subjects:
            if turn == warmup:
                clock.steps.clear()
            probe.before()
            with world.together():
                dist.barrier()
            clock.start_step()
            probe.call()
            clock.end_step()
    slowest = []
    for clock, _ in subjects:
        everyone = zip(*world.collect([clock.steps]), strict=True)
        slowest.append([max(rows, key=lambda row: row[-1]) for rows in everyone])
    return slowest


def _mean(world: DistributedWorld, value: float) -> float:
    return sum(world.collect([value])) / world.size


def _probed(world: DistributedWorld, settings: Settings, probe: Probe) -> dict[str, Any]:
    with closing(probe):
        (steps,) = timed(
            world, [(Clock(world.device), probe)], settings.warmup, settings.iterations
        )
        wrong = sum(world.collect([probe.wrong()]))
    return {
        "bytes": probe.nbytes,
        "wire": probe.wire,
        "seconds": [step[-1] for step in steps],
        "wrong": wrong,
        "checked": "exact",
    }


def _exchanged(
    world: DistributedWorld, settings: Settings, item: Item, inputs: Inputs
) -> dict[str, Any]:
    """Measure an exchange, alternating with the plain all-reduce of the same size."""
    count, compressor = inputs.count, methods.parse(item.method)
    try:
        subject = Subject(world, settings, inputs, compressor, item.collective)
        wrong, how = subject.check()
    except Failed as failure:
        return {"bytes": 4 * count, "failed": str(failure)}
    (traffic,) = world.traffic
    traffic.payload_up = traffic.payload_down = traffic.wire = 0.0
    probe = Probe(4 * count, math.nan, subject.advance, subject.unlike)
    plain = PLAIN[YARDSTICK](world, count)
    pair = [(subject.exchange.clock, probe), (Clock(world.device), plain)]
    steps, others = timed(world, pair, settings.warmup, settings.iterations)
    each = settings.warmup + settings.iterations
    columns = dict(zip((*PHASES, "step"), zip(*steps, strict=True), strict=True))
    return {
        "bytes": 4 * count,
        "wire": _mean(world, traffic.wire / each),
        "payload_up": _mean(world, traffic.payload_up / each),
        "payload_down": _mean(world, traffic.payload_down / each),
        "rounds": subject.rounds,
        "seconds": columns["step"],
        "phases": {name: columns[name] for name in PARTS},
        "plain": [step[-1] for step in others],
        "plain_wire": plain.wire,
        "wrong": sum(world.collect([wrong + probe.wrong()])),
        "checked": how,
    }


def _record(
    world: DistributedWorld, settings: Settings, item: Item, inputs: Inputs
) -> dict[str, Any]:
    match item.kind:
        case "exchange":
            return _exchanged(world, settings, item, inputs)
        case "library":
            return _probed(world, settings, PLAIN[item.collective](world, inputs.count))
        case _:
            return _probed(world, settings, BOUNDS[item.method](world, inputs.count))


def measure(
    world: DistributedWorld,
    settings: Settings,
    folder: Path,
    mode: progress.Mode,
    *,
    afresh: bool,
    finished: bool,
) -> None:
    """Measure what is missing in the folder's ledger, which worker 0 writes.

    `finished` (on worker 0): everything is measured, and the ledger is deleted.
    """
    ops.use(settings.backend)
    chosen = items(settings)
    keys = [item.key(size) for size in settings.sizes for item in chosen]
    leads = world.ranks[0] == 0 and not finished
    opened = Ledger(folder).open(afresh=afresh) if leads else nullcontext()
    shown = mode if leads else "none"
    with opened as ledger, closing(progress.observer(shown, "bandwidth", len(keys))) as observer:
        left = [key for key in keys if not finished and (ledger is None or key not in ledger)]
        left = world.collect([left])[0]
        done = len(keys) - len(left)
        observer.step(done)
        for size in settings.sizes:
            inputs = Inputs(world, size // 4)
            for item in chosen:
                key = item.key(size)
                if key not in left:
                    continue
                try:
                    record = _record(world, settings, item, inputs)
                except PeerLostError:
                    raise
                except Exception as error:  # other workers may wait for this one: stop all
                    raise GcbenchError(
                        f"worker {world.ranks[0]}, {item.name}, {size:,} bytes: "
                        f"{type(error).__name__}: {error}"
                    ) from error
                if ledger is not None:
                    ledger[key] = record
                done += 1
                observer.step(done, f"{item.name}, {size:,} bytes")
