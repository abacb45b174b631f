"""Where each tensor of somebody's model lies in the flat gradient that an exchange works on.

Parameters are dealt to lanes in the reverse of the model's order, which is about the order in
which a backward pass finishes their gradients. DDP's buckets have no part in it: DDP may form
others after a step or a restart without any effect on what is sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from gcbench.core.exchange import Exchange, shard_bounds


@dataclass(frozen=True)
class Placed:
    """One tensor in the flat gradient."""

    name: str
    shape: tuple[int, ...]
    lane: int
    start: int
    """Index of its first element in the flat gradient."""

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    def of(self, flat: Tensor) -> Tensor:
        """Return its part of a flat gradient, in its shape: a view."""
        return flat[self.start : self.start + self.numel].view(self.shape)


@dataclass(frozen=True)
class Plan:
    """The tensors of each lane, and which lanes stay dense."""

    lanes: tuple[tuple[Placed, ...], ...]
    dense: tuple[bool, ...]

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        dense: Sequence[bool],
        most: float,
    ) -> Plan:
        """Deal tensors, given in the model's order, to lanes of about `most` elements.

        A group of tensors is full once it has `most` elements; its compressed tensors are one lane
        and its dense ones another.
        """
        groups: list[list[int]] = [[]]
        count = 0
        for i in reversed(range(len(names))):
            if count >= most:
                groups.append([])
                count = 0
            groups[-1].append(i)
            count += math.prod(shapes[i])
        lanes: list[tuple[Placed, ...]] = []
        kinds: list[bool] = []
        start = 0
        for group in groups:
            for kind in (False, True):
                own = [i for i in group if dense[i] == kind]
                lane = []
                for i in own:
                    lane.append(Placed(names[i], shapes[i], len(lanes), start))
                    start += lane[-1].numel
                if lane:
                    lanes.append(tuple(lane))
                    kinds.append(kind)
        return cls(tuple(lanes), tuple(kinds))

    @property
    def tensors(self) -> tuple[Placed, ...]:
        """All tensors, in the order of the flat gradient."""
        return tuple(placed for lane in self.lanes for placed in lane)

    def stretch(self, lane: int) -> slice:
        """Return where a lane lies in the flat gradient."""
        last = self.lanes[lane][-1]
        return slice(self.lanes[lane][0].start, last.start + last.numel)


def carried(exchange: Exchange, plan: Plan, placed: Placed) -> dict[str, Tensor]:
    """Return what this process, one worker, carries for one tensor: views, 1-D, by their names.

    The names are those of the memory's buffers; "owner" for the part of the tensor that lies in the
    shard that this worker owns, if any does; "joint NAME" for a buffer that all workers keep alike.
    """
    world, stretch = exchange.world, plan.stretch(placed.lane)
    start = placed.start - stretch.start
    stop = start + placed.numel
    found = {}
    for name, buffer in exchange.workers[0][placed.lane].items():
        if name == "owner":
            bounds, rank = shard_bounds(stretch.stop - stretch.start, world.size), world.ranks[0]
            first, last = max(start, bounds[rank]), min(stop, bounds[rank + 1])
            if first < last:
                found[name] = buffer[first - bounds[rank] : last - bounds[rank]]
        else:
            found[name] = buffer[start:stop]
    for name in exchange.lanes[placed.lane].memory.joint:
        found[f"joint {name}"] = exchange.joint[placed.lane][name][start:stop]
    return found


@contextmanager
def set_aside(exchange: Exchange, plan: Plan, idle: Sequence[Placed]) -> Iterator[None]:
    """Take what is carried for some tensors of a lane away, and put it back after the exchange.

    For tensors without a gradient: zeros are offered, and DDP throws their mean away, so their
    residuals must wait for the next gradient.
    """
    before = []
    for placed in idle:
        views = carried(exchange, plan, placed)
        before.append({name: view.clone() for name, view in views.items()})
        for view in views.values():
            view.zero_()
    yield
    for placed, kept in zip(idle, before, strict=True):
        for name, view in carried(exchange, plan, placed).items():
            if name in kept:
                view.copy_(kept[name])
            else:  # an owner's residual that was made meanwhile
                view.zero_()
