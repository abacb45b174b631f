"""Means over workers, added payload by payload: the order of additions of all kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor


def mean_of(decoded: Iterable[tuple[Tensor, int]]) -> Tensor:
    """Return the mean over all workers, float32, shape (n,).

    `decoded`: per payload its decoded mean over its workers, float32, shape (n,), and their number.
    Decoded tensors are multiplied by these numbers and added in order; the sum is divided by the
    number of all workers.

    Raises:
        ValueError: there are no payloads.
    """
    total, workers = None, 0
    for values, count in decoded:
        # A product is a new tensor, whereas `values` may be a view of the payload.
        total = values * count if total is None else total.add_(values * count)
        workers += count
    if total is None:
        raise ValueError("mean needs at least one payload")
    # A GPU may replace division by a Python number, but not by a tensor, with a multiplication.
    return total.div_(total.new_tensor(float(workers)))


def mean_onto(decode: Callable[[int, Tensor | None], Tensor], counts: Sequence[int]) -> Tensor:
    """Like `mean_of`, with an operation that decodes and adds in one pass.

    `decode(i, None)` decodes payload i to a new tensor, the total; `decode(i, total)` adds
    counts[i] times the decoded payload to `total`.
    """
    total = decode(0, None).mul_(counts[0])
    for i in range(1, len(counts)):
        decode(i, total)
    return total.div_(total.new_tensor(float(sum(counts))))
