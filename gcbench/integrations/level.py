"""One exchange of a hook: its group of ranks, its stages, the rates it follows, its residuals.

A GradScaler multiplies the loss and thus all gradients. The hooks divide by that scale before an
exchange and multiply the result by it. So methods, memories and update rules see the gradient
itself, whose unit does not change from step to step, and a direction without a unit (a vote, an
update rule) remains as large as it is when the scaler divides by the scale.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from gcbench.core import sealed
from gcbench.core.clock import Totals
from gcbench.core.errors import DivergedError
from gcbench.core.exchange import Buffers, Exchange, Lane
from gcbench.integrations import check
from gcbench.integrations.hook_world import HookWorld
from gcbench.integrations.rates import Rates
from gcbench.integrations.watch import Watch


class Level:
    """An exchange in one group of ranks. DDP has one; FSDP2 has one or two per module."""

    def __init__(
        self,
        world: HookWorld,
        lanes: Callable[[int, int], list[Lane]],
        stages: Sequence[int],
        parts: Sequence[Sequence[tuple[str, int]]],
        seed: int,
        clock: Totals,
        *,
        owns_shards: bool = True,
        buffers: Buffers | None = None,
    ) -> None:
        """Make the exchange, as it is before step 0.

        Args:
            world: this rank's place in the group.
            lanes: returns how lanes are exchanged from a step on, after a number of skipped steps.
            stages: the steps, from 0 on, at which that may change, with skipped steps or without.
            parts: per lane the parameter of each part, and its number of elements.
            seed: as for `Exchange`.
            clock: as for `Exchange`.
            owns_shards: as for `Exchange`.
            buffers: shared by exchanges that never run at the same time.
        """
        self.world, self.lanes, self.stages, self.clock = world, lanes, stages, clock
        self.seed, self.owns_shards, self.buffers = seed, owns_shards, buffers
        self.names = [[name for name, _ in lane] for lane in parts]
        self.parts = [
            [slice(*edges) for edges in pairwise(accumulate((n for _, n in lane), initial=0))]
            for lane in parts
        ]
        self.watch = Watch()
        self.scale = 1.0
        """The loss scale of the gradients of the current step."""
        self.exchange = self.make(0)

    def make(self, step: int) -> Exchange:
        """Return a new exchange, as it is before `step`, at which a stage may begin.

        It passes through all stages first, so that states have the same entries at every step.
        """
        first, *later = (self.lanes(start, 0) for start in self.stages)
        exchange = Exchange(self.world, first, self.seed, self.clock, owns_shards=self.owns_shards)
        exchange.divide(self.parts)
        for lanes in [*later, self.lanes(max(0, step - 1), 0)]:
            exchange.change(lanes)
        exchange.buffers = self.buffers or exchange.buffers
        return exchange

    def load(self, exchange: Exchange, step: int, saved: Mapping[str, Any]) -> None:
        """Restore the state of an exchange that `make(step)` returned.

        Raises:
            gcbench.core.errors.UsageError: as `Exchange.load_state_dict`.
        """
        exchange.load_state_dict(saved)
        if exchange.skipped:
            exchange.change(self.lanes(max(0, step - 1), exchange.skipped))

    @property
    def numel(self) -> int:
        """Elements of all lanes."""
        return sum(lane[-1].stop for lane in self.parts if lane)

    @property
    def remembers(self) -> bool:
        """Whether the exchange has a state with a part of each gradient."""
        return any(lane.memory.buffers or lane.joint for lane in self.exchange.lanes)

    def rates(
        self, rates: Rates, stepped: torch.optim.Optimizer | None = None
    ) -> list[list[float | None]]:
        """Return the learning rates of the parts of each lane; `stepped`: as for `Rates.of`."""
        each = iter(rates.of([name for names in self.names for name in names], stepped))
        return [[next(each) for _ in names] for names in self.names]

    def begin(self, step: int, rates: Rates) -> bool:
        """Begin a step: its stage, rates and loss scale; return whether to look at residuals.

        From then on all buffers are consistent with the recorded rates, also if `undo` restores
        them.
        """
        skipped = self.exchange.skipped
        switches = any(lane.rule.switches(step) for lane in self.exchange.lanes)
        if step and (switches or step in self.stages or step - skipped in self.stages):
            self.exchange.change(self.lanes(step, skipped))
        if any(lane.memory.residuals for lane in self.exchange.lanes):
            rates.check_shared([name for names in self.names for name in names])
        current, self.scale = self.rates(rates), rates.scale or 1.0
        self.exchange.follow(current)
        by_name = {
            name: rate
            for lane in zip(self.names, current, strict=True)
            for name, rate in zip(*lane, strict=True)
        }
        return self.watch.due(step, by_name)

    def unscale(self, gradient: Tensor) -> Tensor:
        """Divide gradients by the loss scale, in place, and return them."""
        return gradient if self.scale == 1 else gradient.div_(self.scale)

    def rescale(self, mean: Tensor) -> Tensor:
        """Multiply means by the loss scale, in place, and return them."""
        return mean if self.scale == 1 else mean.mul_(self.scale)

    def look(self, number: int, gradient: Tensor, skip: Collection[str] = ()) -> None:
        """Warn if a residual of a lane is far larger than the gradient that it will be added to.

        `gradient`: of the lane, 1-D. `skip`: parameters to leave out.
        """
        state, memory = self.exchange.workers[0][number], self.exchange.lanes[number].memory
        for buffer in memory.residuals:
            squares: dict[str, Tensor] = {}
            for name, part in zip(self.names[number], self.parts[number], strict=True):
                if name not in skip:
                    pair = state[buffer][part], gradient[part]
                    both = torch.stack([x.double().square().sum() for x in pair])
                    squares[name] = squares[name] + both if name in squares else both
            for name, both in squares.items():
                norms = both.sqrt().tolist()
                self.watch.look(name, *norms, decays=hasattr(memory, "decay"))

    def diverged(
        self,
        number: int,
        gradient: Tensor,
        step: int,
        error: Callable[[int, str, int], DivergedError] = check.diverged,
    ) -> DivergedError | None:
        """Return the error for a lane's gradient, 1-D, that is not finite; else None.

        `error`: returns it for a rank, a parameter's name and a step.
        """
        if check.is_finite(gradient):
            return None
        pairs = zip(self.names[number], self.parts[number], strict=True)
        name = next(name for name, part in pairs if not gradient[part].isfinite().all())
        return error(self.world.rank, name, step)

    def undo(self) -> Callable[[], None]:
        """Return a function that restores the current state of the exchange."""
        states = self.exchange.workers[0], self.exchange.joint
        copies = [sealed.copied(each) for each in states]

        def restore() -> None:
            for lanes, saved in zip(states, copies, strict=True):
                for lane, old in zip(lanes, saved, strict=True):
                    lane.clear()
                    lane.update(old)

        return restore
