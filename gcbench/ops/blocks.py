"""Blockwise 8-bit codes, each block scaled by its largest magnitude, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gcbench.core.compressor import Key, Segments
from gcbench.core.errors import PayloadError
from gcbench.ops.backend import op
from gcbench.ops.reference import TINY, into, mean_onto, scale_, segment_absmax, uniform

INT8_TOP = 127
"""The largest code: that of the block's largest magnitude."""
INT8_ROUNDINGS = ("nearest", "stochastic")

BAD_SCALE = "a block's scale is 0, or finite and at least 2^-100"
BAD_CODE = "code -128 stands for nothing"


@op
def int8_encode(
    x: Tensor, segments: Segments, rounding: str, key: Key, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return codes in [-127, 127], int8, shape (n,), and scales, float32, shape (m,).

    With a the largest magnitude of a block and y = (x / a) * 127, each operation rounded to
    float32: "nearest" gives y rounded to an integer, ties to even; "stochastic" floor(|y|), and one
    more iff u / 2^24 < |y| - floor(|y|), u uniform on [0, 2^24), with the sign of y. The scale is
    a; 0 for a below `TINY`, and then all codes are zero, as for an a that is not finite.

    `x`: float32, shape (n,); `rounding`: one of `INT8_ROUNDINGS`; `out`: where to write the codes.
    """
    top = segment_absmax(x, segments)
    divisor = torch.where((top >= TINY) & top.isfinite(), top, torch.inf)
    scaled = torch.empty_like(x)
    for (which, rows), (_, part) in zip(segments.views(x), segments.views(scaled), strict=True):
        torch.div(rows, divisor[which].unsqueeze(1), out=part)
    scaled.mul_(INT8_TOP)  # the quotient first: a / a * 127 is 127, and k / 127 * 127 is k
    if not top.isfinite().all():
        scaled.nan_to_num_(nan=0.0)  # infinity over infinity
    if rounding == "nearest":
        codes = scaled.round_()
    else:
        low = scaled.abs().floor_()
        up = uniform(key, len(x), x.device) < scaled.abs().sub_(low)
        codes = low.add_(up).copysign_(scaled)
    return into(out, codes.to(torch.int8)), torch.where(top < TINY, 0.0, top)


@op
def int8_decode(
    codes: Tensor,
    scales: Tensor,
    segments: Segments,
    *,
    onto: Tensor | None = None,
    count: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Return (code / 127) * scale, float32, shape (n,); with `onto` that plus `count` times it.

    `codes`: int8, shape (n,); `scales`: float32, shape (m,). `out`: where to write, which may be
    `onto`; after an error what it holds is not defined.

    Raises:
        PayloadError: a code is -128, or a scale is negative, not finite or below `TINY` but not 0.
    """
    if not (scales.isfinite() & ((scales == 0) | (scales >= TINY))).all():
        raise PayloadError(BAD_SCALE)
    if codes.numel() and int(codes.amin()) < -INT8_TOP:
        raise PayloadError(BAD_CODE)
    # By a tensor: a device may turn the division by a number into a product.
    values = codes.float().div_(torch.tensor(float(INT8_TOP), device=codes.device))
    scale_(values, scales, segments)
    return into(out, values if onto is None else onto + values * count)


@op
def int8_mean(
    payloads: Sequence[tuple[Tensor, Tensor, int]],
    segments: Segments,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return the mean of all workers, float32, shape (n,): see `mean_onto`.

    `payloads`: codes and scales, as `int8_decode` takes them, and how many workers' mean they are.
    `out`: where to write.

    Raises:
        PayloadError: see `int8_decode`.
    """

    def decode(i: int, total: Tensor | None) -> Tensor:
        codes, scales, count = payloads[i]
        return int8_decode(codes, scales, segments, onto=total, count=count, out=total)

    return into(out, mean_onto(decode, [count for *_, count in payloads]))
