"""Measured bits per element of a method on the gradient of one network."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from gcbench.core.clock import Clock
from gcbench.core.compressor import Compressor, Segments
from gcbench.core.exchange import Exchange, Lane
from gcbench.core.world import Link, SimulatedWorld

WORKERS = 4
BATCH = 2


@cache
def _gradients() -> tuple[tuple[tuple[int, ...], ...], Sequence[Tensor]]:
    """Return the tensors' shapes, and ResNet-20's gradients at its start for random images."""
    models = importlib.import_module("gcbench.tasks._models")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = models.ResNet(blocks=3)
        parameters = list(model.parameters())
        buckets = []
        for _ in range(WORKERS):
            images, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            gradients = torch.autograd.grad(loss, parameters)
            buckets.append(torch.cat([gradient.view(-1) for gradient in gradients]))
    return tuple(tuple(p.shape) for p in parameters), buckets


def bits(method: Compressor) -> tuple[float, float]:
    """Return the bits per element that a worker sends and receives, agreements included.

    ResNet-20, four workers, the method's default collective, one thread.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        shapes, buckets = _gradients()
        world = SimulatedWorld(WORKERS, torch.device("cpu"), Link(10, 50), 1, 1)
        segments = Segments.of(shapes, method.granularity)
        lane = Lane(method, method.legal_collectives()[0], 0, segments)
        clock = Clock(world.device)
        clock.start_step()
        Exchange(world, [lane], 0, clock).mean(buckets, 0)
    finally:
        torch.set_num_threads(before)
    sent, n = world.traffic, len(buckets[0]) * len(world.traffic)
    return 8 * sum(t.payload_up for t in sent) / n, 8 * sum(t.payload_down for t in sent) / n
