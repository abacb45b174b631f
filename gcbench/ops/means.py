"""Means over workers, one payload after the other: the order of additions that all kernels keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor


def mean_of(decoded: Iterable[tuple[Tensor, int]]) -> Tensor:
    """Return the mean over all workers, float32, shape (n,), of payloads that are such means.

    `decoded`: the values of each payload, float32, shape (n,), and its number of workers, by which
    they are multiplied; the products are added in this order, and the sum is divided by all.
    """
    total, workers = None, 0
    for values, count in decoded:
        # A product is a tensor of its own; what was decoded may be the payload's.
        total = values * count if total is None else total.add_(values * count)
        workers += count
    if total is None:
        raise ValueError("the mean of no payloads: one at least expected")
    # By a tensor: a device may turn the division by a number into a product.
    return total.div_(total.new_tensor(float(workers)))


def mean_onto(decode: Callable[[int, Tensor | None], Tensor], counts: Sequence[int]) -> Tensor:
    """Return `mean_of`, bit by bit, where decoding and adding is one operation.

    `decode(i, total)`: the values of payload i in a tensor that is then the total's own, or `total`
    plus counts[i] times them, there.
    """
    total = decode(0, None).mul_(counts[0])
    for i in range(1, len(counts)):
        decode(i, total)
    return total.div_(total.new_tensor(float(sum(counts))))
