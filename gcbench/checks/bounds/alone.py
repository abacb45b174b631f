"""An exchange of one lane."""

from __future__ import annotations

import torch

from gcbench.core import memory
from gcbench.core.clock import Clock
from gcbench.core.compressor import Compressor, Segments, reencodes
from gcbench.core.exchange import Exchange, Lane
from gcbench.core.world import Link, SimulatedWorld, World


def single(seed: int, device: torch.device, lane: Lane, world: World | None = None) -> Exchange:
    """Return an exchange of one lane; without `world`, with one simulated worker."""
    world = world or SimulatedWorld(1, device, Link(10.0, 50.0), torch.get_num_threads(), 1)
    return Exchange(world, [lane], seed, Clock(device))


def lane_of(method: Compressor, segments: Segments, carried: memory.Memory | None = None) -> Lane:
    """Return a lane for a method, by the collective of `once`."""
    return Lane(method, once(method), 0, segments, carried or memory.Memory())


def once(method: Compressor) -> str:
    """Return a legal collective that encodes only once, if there is one: all-gather first."""
    legal = method.legal_collectives()
    return next((name for name in ("allgather", "allreduce") if name in legal), legal[0])


AGAIN = "two-shot alone is legal, whose owners encode the mean again"


def again(method: Compressor) -> bool:
    """Return whether what arrives was always encoded twice, which no declared error is about."""
    return reencodes(method, once(method))
