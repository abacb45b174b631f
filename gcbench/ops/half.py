"""The 16-bit floating-point formats, clipped and rounded to nearest even, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gcbench.core.errors import PayloadError
from gcbench.ops.backend import op
from gcbench.ops.reference import into, mean_of

NOT_FINITE = "a payload's values are not finite"


@op
def half_encode(x: Tensor, dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    """Return `x`, float32, shape (n,), clipped to the largest value of `dtype` and rounded to it.

    `dtype`: torch.float16 or torch.bfloat16. Ties go to even, denormals are kept. `out`: where to
    write.
    """
    largest = torch.finfo(dtype).max
    return into(out, x.clamp(-largest, largest).to(dtype))


@op
def half_decode(codes: Tensor, name: str, *, out: Tensor | None = None) -> Tensor:
    """Return float16 or bfloat16 `codes`, shape (n,), as float32. `out`: where to write.

    Raises:
        PayloadError: one is not finite; the message begins with `name`.
    """
    values = codes.float()
    if not values.isfinite().all():
        raise PayloadError(f"{name}: {NOT_FINITE}")
    return into(out, values)


@op
def half_mean(
    payloads: Sequence[tuple[Tensor, int]], name: str, *, out: Tensor | None = None
) -> Tensor:
    """Return the mean of all workers, float32, shape (n,): see `mean_of`.

    `payloads`: codes of one dtype, as `half_decode` takes them, and how many workers' mean they
    are. `out`: where to write.

    Raises:
        PayloadError: see `half_decode`.
    """
    return into(out, mean_of((half_decode(codes, name), count) for codes, count in payloads))
