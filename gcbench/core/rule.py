"""Update rules: what a method does with the decoded mean.

By default the mean is the gradient that any optimizer applies. A method whose published form moves
the parameters in another direction (the sign of the mean, Adam with a frozen second moment) has an
update rule of its own, `Compressor.rule`. Every step moves the parameters by

    theta <- theta - lr * (update(mean) + weight_decay * theta)

which plain SGD does: the engine hands it the direction in place of the gradient. The buffers of a
rule are equal on all workers, and belong to the exchange, which keeps them beside those of the
memory and saves them in checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from gcbench.core.errors import UsageError
from gcbench.core.payload import Context

if TYPE_CHECKING:
    from gcbench.core.memory import Memory


@dataclass(frozen=True)
class UpdateRule:
    """The default rule: the decoded mean is the gradient that the optimizer applies."""

    buffers: ClassVar[tuple[str, ...]] = ()
    """Names of the buffers that `update` changes, in `ctx.joint`: zeros of the gradient's shape."""
    reads: ClassVar[tuple[str, ...]] = ()
    """Names of the memory's joint buffers that the rule reads."""
    needs_warm_up: ClassVar[bool] = False
    """Whether the rule estimates something in the fp32 steps, so that there must be some."""

    @property
    def plain(self) -> bool:
        """Whether the mean is applied as a gradient, by any optimizer."""
        return type(self).update is UpdateRule.update

    def update(self, mean: Tensor, ctx: Context) -> Tensor:
        """Return the direction of the step, float32, (n,), given the mean that the memory returned.

        The result may be `mean`, which may be changed in place, or one of the buffers in
        `ctx.joint`. `ctx.step` counts from 0; `ctx.lr` is the learning rate of the step.
        """
        return mean

    def dense(self) -> UpdateRule:
        """Return the rule for exact communication: of tensors kept dense, and of fp32 steps."""
        return self


def check_legal(rule: UpdateRule, memory: Memory, start_step: int, method: object) -> None:
    """Refuse a memory or a number of fp32 steps with which an update rule cannot work.

    Raises:
        UsageError: the message says what is missing.
    """
    missing = [name for name in rule.reads if name not in memory.joint]
    if missing:
        raise UsageError(
            f"the update rule of {method!r} reads {', '.join(missing)} of its own memory, and "
            f"{memory!r} does not have it. Leave the memory out"
        )
    if rule.needs_warm_up and not start_step:
        raise UsageError(
            f"the update rule of {method!r} uses what the fp32 steps estimate, and start_step is "
            "0. Give the number of fp32 steps: --start-step 100, or comm_hook(start_step=100)"
        )
