"""Warns about residuals that are far larger than the gradients that they are added to."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

LARGE = 10.0
"""A residual is large if its norm exceeds this multiple of its gradient's."""
EVERY = 10
"""Steps between checks of the residuals; they are also checked when a rate fell."""
FELL = 1.5
"""A rate fell if it was this many times as high at the last check."""
GROWN = 2.0
"""After the rate fell, a large residual triggers a warning if it grew by more than this factor."""


class Watch:
    """Warns once about a residual that grew large because of a change of the rate or the gradient.

    Top-k with 1 % of the elements has residuals of 10 to 20 times the gradient in a healthy job. So
    the limit is relative to the largest earlier multiple of the parameter at a steady rate: `LARGE`
    times that, or `GROWN` times after the rate fell, and at least `LARGE`.
    """

    def __init__(self) -> None:
        self.warned = False
        self._rates: dict[str, float] = {}
        """Each parameter's rate at the last check."""
        self._calm: dict[str, float] = {}
        """Each parameter's largest multiple at a steady rate."""

    def due(self, step: int, rates: Mapping[str, float | None]) -> bool:
        """Return whether to check residuals in this step; `rates`: by parameter."""
        if self.warned:
            return False
        self._now = {name: 1.0 if rate is None else rate for name, rate in rates.items()}
        return step % EVERY == 0 or any(self._fell(name) for name in self._now)

    def _fell(self, name: str) -> bool:
        now = self._now[name]
        return 0 < now < self._rates.get(name, 0.0) / FELL

    def look(self, name: str, residual: float, gradient: float, *, decays: bool) -> None:
        """Warn if a residual of this norm is too large for the gradient's norm.

        `decays`: whether the memory has a field "decay".
        """
        calm, fell = max(1.0, self._calm.get(name, 1.0)), self._fell(name)
        self._rates[name] = self._now[name] or self._rates.get(name, 0.0)
        if self.warned or not (residual and gradient):
            return
        times = residual / gradient
        if times > LARGE and times > (GROWN if fell else LARGE) * calm:
            self.warned = True
            remedy = ', or let residuals decay: memory_options={"decay": 0.9}' if decays else ""
            warnings.warn(
                f"the residual of {name} has a norm of {residual:.3g}, {times:.0f} times the "
                f"{gradient:.3g} of its gradient; before it was at most {calm:.1f} times as large. "
                "Did the learning rate fall by much, is hook.lr set to another rate than the "
                "optimizer's, or does a GradScaler change the loss scale? Pass optimizer= and "
                "scaler= instead of hook.lr. If the rate falls to 0 by design, let it end above "
                f"one tenth of its peak{remedy}",
                stacklevel=2,
            )
        if not fell:
            self._calm[name] = max(calm, times)
