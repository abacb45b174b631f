"""Means over workers, one payload after the other: all kernels keep this order of additions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor


def mean_of(decoded: Iterable[tuple[Tensor, int]]) -> Tensor:
    """Return the mean over all workers, float32, shape (n,).

    `decoded`: for each payload its decoding, which is a mean over its workers, float32, shape (n,),
    and their number. Decodings are multiplied by these numbers and added in this order, and the sum
    is divided by the number of all workers.

    Raises:
        ValueError: there are no payloads.
    """
    total, workers = None, 0
    for values, count in decoded:
        # A product is a new tensor, whereas `values` may be a view of the payload.
        total = values * count if total is None else total.add_(values * count)
        workers += count
    if total is None:
        raise ValueError("the mean of no payloads: one at least expected")
    # A divisor that is a plain number may become a product with its reciprocal; a tensor does not.
    return total.div_(total.new_tensor(float(workers)))


def mean_onto(decode: Callable[[int, Tensor | None], Tensor], counts: Sequence[int]) -> Tensor:
    """Return the bits of `mean_of` by an operation that decodes and adds in one pass.

    `decode(i, None)` returns the decoding of payload i in a new tensor, which becomes the total;
    `decode(i, total)` adds counts[i] times the decoding to `total`.
    """
    total = decode(0, None).mul_(counts[0])
    for i in range(1, len(counts)):
        decode(i, total)
    return total.div_(total.new_tensor(float(sum(counts))))
