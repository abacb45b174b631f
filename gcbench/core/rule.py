"""Update rules: what a method does with the decoded mean.

By default any optimizer applies the mean as a gradient. A method whose published form steps in
another direction (the sign of the mean, Adam with a frozen second moment) defines its update rule,
`Compressor.rule`. Each step is then

    theta <- theta - lr * (update(mean) + weight_decay * theta)

which plain SGD computes: the engine passes it the direction instead of the gradient. The buffers of
a rule are equal on all workers. The exchange owns them and saves them in checkpoints.
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
    """Names of the buffers in `ctx.joint` that `update` changes, initially zeros of shape (n,)."""
    reads: ClassVar[tuple[str, ...]] = ()
    """Names of the memory's joint buffers that the rule reads."""
    of_factors: ClassVar[bool] = False
    """Whether the rule reads `ctx.joint["state"]`, the factors of the mean that was exchanged."""
    needs_warm_up: ClassVar[bool] = False
    """Whether the rule estimates a quantity during fp32 steps, so that `start_step` must be > 0."""

    @property
    def plain(self) -> bool:
        """Whether the mean is applied as a gradient, by any optimizer."""
        return type(self).update is UpdateRule.update

    def update(self, mean: Tensor, ctx: Context) -> Tensor:
        """Return the direction of the step, float32, (n,), for the mean that the memory returned.

        `mean` may be modified in place. The result may be `mean` or a buffer of `ctx.joint`.
        `ctx.joint["state"]` has the state for the next step of a method in rounds (do not modify
        it); it is absent where tensors are exchanged in fp32.
        `ctx.step` counts from 0; `ctx.lr` is the learning rate of the step.
        """
        return mean

    def in_fp32(self, step: int) -> bool:
        """Return whether a step from `start_step` on is exchanged in fp32, by the `dense` rule."""
        return False

    def switches(self, step: int) -> bool:
        """Return whether `in_fp32` changes between the previous step and this one."""
        return step > 0 and self.in_fp32(step) != self.in_fp32(step - 1)

    def dense(self) -> UpdateRule:
        """Return the rule for exact communication: tensors kept dense, and fp32 steps."""
        return self


class Directions(UpdateRule):
    """For methods whose exchange returns signs: where it is exact, the signs of the mean.

    So tensors that stay dense, and steps in fp32, move at the same rate as the others.
    """

    def dense(self) -> UpdateRule:
        """Return the rule that takes the signs."""
        return _Signs()


class _Signs(UpdateRule):
    def update(self, mean: Tensor, ctx: Context) -> Tensor:
        return mean.sign_()


def check_legal(rule: UpdateRule, memory: Memory, start_step: int, method: object) -> None:
    """Check that an update rule works with this memory and number of fp32 steps.

    Raises:
        UsageError: a buffer that the rule reads is missing, the memory replaces the mean whose
            factors the rule reads, or it needs fp32 steps.
    """
    missing = [name for name in rule.reads if name not in memory.joint]
    if missing:
        raise UsageError(
            f"the update rule of {method!r} reads {', '.join(missing)} from the method's memory, "
            f"which {memory!r} lacks. Remove --memory to use the method's memory"
        )
    from gcbench.core.memory import Memory

    if rule.of_factors and type(memory).apply is not Memory.apply:
        raise UsageError(
            f"the update rule of {method!r} uses the factors that were exchanged, but {memory!r} "
            "applies something other than their product. Remove --memory to use the method's memory"
        )
    if rule.needs_warm_up and not start_step:
        raise UsageError(
            f"start_step=0: the update rule of {method!r} needs estimates from fp32 steps. Set "
            "their number, e.g. --start-step 100, or comm_hook(start_step=100)"
        )
