"""A codec on its own: one worker's encodings, and error feedback that trains nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gcbench import memory
from gcbench.clock import Clock
from gcbench.compressor import Compressor, Key, Segments
from gcbench.exchange import Exchange, Lane
from gcbench.measure.analysis import Row, finite
from gcbench.world import Link, SimulatedWorld, World


def single(seed: int, device: torch.device, lane: Lane, world: World | None = None) -> Exchange:
    """Return an exchange of one lane; without a world, of one worker."""
    world = world or SimulatedWorld(1, device, Link(10.0, 50.0), torch.get_num_threads(), 1)
    return Exchange(world, [lane], seed, Clock(device))


def lane_of(method: Compressor, segments: Segments, kept: memory.Memory | None = None) -> Lane:
    """Return the lane of a method on its own: gathered where that is legal, so encoded once."""
    legal = method.legal_collectives()
    collective = "allgather" if "allgather" in legal else legal[0]
    return Lane(method, collective, 0, segments, kept or memory.NoMemory())


def agreed(method: Compressor, x: Tensor, segments: Segments, key: Key) -> Tensor:
    """Return what a worker that is alone agrees on with itself."""
    drawn = method.draw_shared(segments, key._replace(rank=0))
    return method.statistic(x, segments) if drawn is None else drawn.to(x.device)


def passed(method: Compressor, x: Tensor, segments: Segments, key: Key) -> Tensor:
    """Return what arrives of x."""
    shared = agreed(method, x, segments, key)
    return method.decode(method.encode(x, segments, shared, key), segments, shared)


def energy(x: Tensor) -> float:
    """Return the squared length, summed in float64."""
    return float(x.double().square().sum())


class Shadow:
    """Error feedback along a run's gradients that does not touch the run.

    Lengths are of updates, eta e and eta g, so that steps of any schedule compare: lemma 3 of
    Karimireddy et al. 2019 for the largest eta ||g|| and the smallest delta that were seen.
    """

    def __init__(self, method: Compressor, shapes: Sequence[Sequence[int]], seed: int) -> None:
        self.kept = memory.make("residual", method.memory_options)
        self.segments = Segments.of(shapes, method.granularity)
        self.method, self.seed = method, seed
        self.exchange: Exchange | None = None
        self.delta, self.gradient, self.residual, self.steps = 1.0, 0.0, 0.0, 0

    def step(self, gradient: Tensor, step: int, lr: float) -> None:
        """Feed one gradient."""
        if self.exchange is None:
            lane = lane_of(self.method, self.segments, self.kept)
            self.exchange = single(self.seed, gradient.device, lane)
        state = self.exchange.workers[0][0]
        scale = 1.0 if self.exchange.lr is None else self.exchange.lr / lr
        offered = energy(gradient.double() + scale * state["residual"].double())
        self.exchange.mean([gradient], step, lr)
        left = energy(state["residual"])
        if offered:
            self.delta = min(self.delta, 1 - left / offered)
        self.gradient = max(self.gradient, lr**2 * energy(gradient))
        self.residual = max(self.residual, lr**2 * left)
        self.steps += 1

    def record(self) -> Row:
        """Return the extremes of the run."""
        names = ("delta", "gradient", "residual", "steps")
        return {name: finite(getattr(self, name)) for name in names}
