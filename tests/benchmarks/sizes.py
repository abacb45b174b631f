"""The tensors that are timed, by the name of their size."""

from __future__ import annotations

import math

Shapes = tuple[tuple[int, ...], ...]


def resnet50() -> Shapes:
    """Return the shapes of ResNet-50's parameters (He et al. 2015, table 1; torchvision's order).

    Bottlenecks of 1x1, 3x3 and 1x1 convolutions, each followed by batch normalization, with a
    projection where a stage begins; the last layer has 1,000 classes.
    """

    def convolution(out: int, into: int, side: int) -> list[tuple[int, ...]]:
        return [(out, into, side, side), (out,), (out,)]  # and normalization's weight and bias

    shapes = convolution(64, 3, 7)
    into = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            shapes += convolution(width, into, 1) + convolution(width, width, 3)
            shapes += convolution(4 * width, width, 1)
            if block == 0:
                shapes += convolution(4 * width, into, 1)
            into = 4 * width
    return (*shapes, (1000, into), (1000,))


RESNET50 = resnet50()

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
