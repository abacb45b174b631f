"""Dropout with masks from counter-based random numbers, addressed by a `Key`."""

from __future__ import annotations

from torch import Tensor, nn

from gcbench import ops
from gcbench.core import purposes
from gcbench.core.compressor import Key


class Dropout(nn.Module):
    """Dropout with masks from a `Key`: the same in every engine and after a resume.

    In training an element is zero with probability `rate`, and otherwise divided by 1 - `rate`;
    evaluation changes nothing. The trainer sets `key` before each forward pass. torch's dropout
    draws from a generator of the process, so its masks depend on the order of simulated workers and
    on draws before a resume.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise ValueError(f"dropout {rate}: expected at least 0 and below 1")
        self.rate = rate
        self.key: Key | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, a float tensor of any shape, with elements dropped.

        Raises:
            RuntimeError: in training mode without a key.
        """
        if not self.training or self.rate == 0:
            return x
        if self.key is None:
            raise RuntimeError(
                "Dropout has no key: call gcbench.training.dropout.set_dropout_key first"
            )
        mask = ops.random.uniform(self.key, x.numel(), x.device).view(x.shape) >= self.rate
        return x * (mask.to(x.dtype) / (1 - self.rate))


def set_dropout_key(model: nn.Module, key: Key) -> None:
    """Set the key of each `Dropout` layer of a model.

    `key` has the seed, the step and the rank; the layers have different offsets in its stream.
    """
    layers = (module for module in model.modules() if isinstance(module, Dropout))
    for place, layer in enumerate(layers):
        # 2^40 exceeds the elements of any activation, so layers never share a draw.
        layer.key = key._replace(stream=purposes.DROPOUT, offset=place << 40)
