"""Workers that send an attack instead of their gradient.

flip: x' = -x; random: x'_j = u_j x_j with u_j uniform on [-1, 1); scale: x' = -100 x. All are blind
multiplicative adversaries (Bernstein et al., ICLR 2019, arXiv:1810.05291, definition 1): factors do
not depend on the gradients. Their theorem 2 claims that the majority vote of N workers converges
with fewer than N / 2 of them; one worker that scales moves a mean anywhere.
"""

from __future__ import annotations

from torch import Tensor

from gcbench import ops
from gcbench.core.compressor import Key

SCALE = 100.0


def attack(gradient: Tensor, kind: str, key: Key) -> None:
    """Replace what a worker sends, float32, shape (n,), by an attack, in place.

    `kind`: "flip", "random" or "scale"; `key`: the address of the worker's random numbers.
    """
    if kind == "random":
        gradient *= ops.random.uniform(key, gradient.numel(), gradient.device).mul_(2).sub_(1)
    else:
        gradient *= -SCALE if kind == "scale" else -1.0
