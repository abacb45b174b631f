"""A codec on its own: one tensor encoded and decoded, or an exchange of one lane."""

from __future__ import annotations

import torch
from torch import Tensor

from gcbench.core import codec, memory
from gcbench.core.clock import Clock
from gcbench.core.compressor import (
    Compressor,
    Context,
    Key,
    MultiRoundCompressor,
    Segments,
    requantizes,
)
from gcbench.core.exchange import Exchange, Lane
from gcbench.core.world import Link, SimulatedWorld, World


def single(seed: int, device: torch.device, lane: Lane, world: World | None = None) -> Exchange:
    """Return an exchange of one lane; without `world`, with one simulated worker."""
    world = world or SimulatedWorld(1, device, Link(10.0, 50.0), torch.get_num_threads(), 1)
    return Exchange(world, [lane], seed, Clock(device))


def lane_of(method: Compressor, segments: Segments, kept: memory.Memory | None = None) -> Lane:
    """Return a lane for a method, by the collective of `once`."""
    return Lane(method, once(method), 0, segments, kept or memory.Memory())


def once(method: Compressor) -> str:
    """Return a legal collective that encodes only once, if there is one: all-gather first."""
    legal = method.legal_collectives()
    return next((name for name in ("allgather", "allreduce") if name in legal), legal[0])


AGAIN = "two-shot alone is legal, whose owners encode the mean again"


def again(method: Compressor) -> bool:
    """Return whether what arrives was always encoded twice, which no declared error is about."""
    return once(method) == "twoshot" and requantizes(method)


def agreed(method: Compressor, x: Tensor, segments: Segments, key: Key) -> Tensor:
    """Return the `shared` tensor for `encode` if there is one worker only."""
    return codec.agree(method, [x], Context(segments, key=key))[0]


def passed(method: Compressor, x: Tensor, segments: Segments, key: Key) -> Tensor:
    """Return x encoded and decoded, float32, shape (n,)."""
    ctx = Context(segments, agreed(method, x, segments, key), key)
    return codec.decode(method, codec.encode(method, x, ctx), ctx)


def energy(x: Tensor) -> float:
    """Return the squared Euclidean norm, summed in float64."""
    return float(x.double().square().sum())


def random(method: Compressor, x: Tensor, segments: Segments) -> bool:
    """Return whether the method is random: whether encodings of x at three steps differ."""
    keys = [Key(0, step, 0) for step in range(3)]
    if isinstance(method, MultiRoundCompressor):  # its initial state is drawn
        return True
    first, *others = (
        codec.encode(method, x, Context(segments, agreed(method, x, segments, key), key)).to_bytes()
        for key in keys
    )
    drawn = method.draw_shared(Context(segments, key=keys[0])) is not None
    return drawn or not all(torch.equal(first, other) for other in others)
