"""A quadratic with noisy gradients and a known minimum; a run needs no data and takes seconds.

Formula: f(x) = 1/2 sum_i L_i (x_i - x*_i)^2, with curvatures L_i that decrease geometrically from 1
to 1 / condition, and x*_i = sin(i + 1). An example's gradient is L (x - x*) + noise, with
independent noise of N(0, noise^2) in every coordinate, so the mean over a batch of b examples has
variance noise^2 / b. The evaluation has no noise: since f(x*) = 0, the test loss is the gap.
Start: x* plus or minus 1 in every coordinate, with random signs, so that the initial gap is
1/2 sum_i L_i for every seed.
Purpose: with step size a, plain SGD converges to a mean gap of
a noise^2 / (2 b) sum_i 1 / (2 - a L_i). A compressor's variance raises that plateau, and its bias
may shift it.
Source: the strongly convex case of the theorems (TernGrad's theorem 1, signSGD's theorem 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gcbench import ops
from gcbench.core import purposes
from gcbench.core.compressor import Key
from gcbench.core.task import Batch, Split, Task

EXAMPLES = 1024


class Point(nn.Module):
    """The point x and the curvature around it; maps an example's noise to the example's loss."""

    curvature: Tensor
    minimum: Tensor

    def __init__(self, dimension: int, condition: float) -> None:
        super().__init__()
        exponent = -torch.arange(dimension, dtype=torch.float64) / max(dimension - 1, 1)
        minimum = torch.arange(1, dimension + 1, dtype=torch.float64).sin().float()
        self.register_buffer("curvature", (condition**exponent).float(), persistent=False)
        self.register_buffer("minimum", minimum, persistent=False)
        self.x = nn.Parameter(minimum + (torch.randint(2, (dimension,)) * 2 - 1))

    def forward(self, noise: Tensor) -> Tensor:
        """Return f(x) + noise (x - x*), shape (b,), for noise of shape (b, dimension)."""
        away = self.x - self.minimum
        return 0.5 * (self.curvature * away * away).sum() + noise @ away


@dataclass(frozen=True)
class Quadratic(Task):
    """f(x) = 1/2 sum_i L_i (x_i - x*_i)^2 with Gaussian gradient noise.

    >>> import torch
    >>> task = Quadratic(dimension=3, condition=4.0)
    >>> model = task.model()
    >>> model.curvature.tolist()
    [1.0, 0.5, 0.25]
    >>> test = task.load(None)[1]
    >>> batch = task.batch(test, torch.tensor([0]), key=None)
    >>> round(task.loss(model(batch.inputs), batch.targets).item(), 6)
    0.875
    """

    dimension: int = 256  # coordinates
    condition: float = 10.0  # largest over smallest curvature
    noise: float = 1.0  # standard deviation of one example's gradient, per coordinate

    def __post_init__(self) -> None:
        if self.dimension < 1:
            raise ValueError(f"dimension {self.dimension}: expected at least 1")
        if not 1 <= self.condition < float("inf"):
            raise ValueError(f"condition {self.condition}: expected a finite number, at least 1")
        if not 0 <= self.noise < float("inf"):
            raise ValueError(f"noise {self.noise}: expected a finite number, at least 0")

    def defaults(self) -> Mapping[str, Any]:
        """Return plain SGD with a constant step."""
        return {
            "batch": 32,
            "steps": 500,
            "optimizer": "sgd",
            "lr": 0.1,
            "momentum": 0.0,
            "nesterov": False,
            "weight_decay": 0.0,
            "schedule": "constant",
            "ema": 0.0,
            "eval_every": 50,
        }

    def load(self, data_dir: Path | None) -> tuple[Split, Split]:
        """Return the indices of 1024 training examples and of one test example."""
        train = torch.arange(EXAMPLES)
        return Split(train, train), Split(train[:1], train[:1])

    def model(self) -> nn.Module:
        """Return a point at distance sqrt(dimension) of the minimum."""
        return Point(self.dimension, self.condition)

    def batch(self, split: Split, indices: Tensor, key: Key | None) -> Batch:
        """Return the noise of each example, float32 (b, dimension); zeros without a key."""
        targets = split.targets[indices]
        shape = (len(targets), self.dimension)
        if key is None:
            return Batch(torch.zeros(shape, device=targets.device), targets)
        key = key._replace(stream=purposes.NOISE)
        draws = ops.random.normal(key, len(targets) * self.dimension, targets.device)
        return Batch(draws.view(shape) * self.noise, targets)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of the examples; without noise it is the gap to the minimum."""
        return outputs.mean()

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Return None: there is no classification."""
        return None
