"""The tensors that are timed, by the name of their size."""

from __future__ import annotations

import math

from gcbench.predict import networks
from gcbench.predict.networks import Shapes

RESNET50 = networks.network("resnet50").shapes

SIZES: dict[str, Shapes] = {
    "1e4": ((10, 1000),),
    "1e6": ((1000, 1000),),
    "resnet50": RESNET50,
    "25e6": ((25_000, 1000),),
}
"""From the fastest to the slowest: a smaller size tells how long a larger one will take."""


def numel(shapes: Shapes) -> int:
    """Return the elements of all tensors."""
    return sum(map(math.prod, shapes))


assert len(RESNET50) == 161
assert numel(RESNET50) == 25_557_032
