"""The position of each tensor of a DDP model in the flat gradient that an exchange works on.

Parameters are assigned to lanes in the reverse of the model's order, in which a backward pass
roughly finishes their gradients. DDP's buckets have no influence: DDP may form others after a step
or a restart without any effect on what is sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from gcbench.core.exchange import Exchange


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
        """Assign tensors, given in the model's order, to lanes of about `most` elements.

        A group of tensors is full once it has `most` elements. Its compressed tensors form one lane
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
                lane = []
                for i in group:
                    if dense[i] == kind:
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
        """Return the range of a lane in the flat gradient."""
        last = self.lanes[lane][-1]
        return slice(self.lanes[lane][0].start, last.start + last.numel)


def state_views(exchange: Exchange, plan: Plan, placed: Placed) -> dict[str, Tensor]:
    """Return the state of one tensor on this process, one worker: 1-D views by name.

    The names are those of the memory's buffers; "owner" for the tensor's part of the residual of
    the shard that this worker owns, if any; "joint NAME" for a buffer that is equal on all workers.
    """
    start = placed.start - plan.stretch(placed.lane).start
    part = slice(start, start + placed.numel)
    views = exchange.views(placed.lane, 0, part)
    for name in exchange.lanes[placed.lane].joint:
        views[f"joint {name}"] = exchange.joint[placed.lane][name][part]
    return views


@contextmanager
def set_aside(exchange: Exchange, plan: Plan, idle: Sequence[Placed]) -> Iterator[None]:
    """Zero the state of some tensors of a lane, and restore it after the exchange.

    For tensors without a gradient: they contribute zeros, and DDP drops their mean, so their
    residuals must wait for the next gradient.
    """
    copies = []
    for placed in idle:
        views = state_views(exchange, plan, placed)
        copies.append({name: view.clone() for name, view in views.items()})
        for view in views.values():
            view.zero_()
    yield
    for placed, saved in zip(idle, copies, strict=True):
        for name, view in state_views(exchange, plan, placed).items():
            if name in saved:
                view.copy_(saved[name])
            else:  # an owner's residual that was created during the exchange
                view.zero_()
