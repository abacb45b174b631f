"""Blockwise 8-bit codes, each block scaled by its largest magnitude."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gcbench.core.compressor import Key, Segments
from gcbench.ops.dispatch import operation, output, outputs, part, payload_faults, vector
from gcbench.ops.means import mean_onto
from gcbench.ops.random import draws_for
from gcbench.ops.statistics import scale_, shares, valid_scales

TOP = 127
"""The largest code, that of the block's largest magnitude."""
ROUNDINGS = ("nearest", "stochastic")

FAULTS = {
    1: "a block's scale must be 0, or finite and at least 2^-100",
    2: "code -128 is not used",
}

_fault = payload_faults(FAULTS)


@operation()
def _encode(
    x: Tensor, segments: Segments, stochastic: bool, key: Key, codes: Tensor, scales: Tensor
) -> None:
    scaled, top = shares(x, segments)
    scaled.mul_(TOP)  # the quotient first: a / a * 127 is 127, and k / 127 * 127 is k
    if stochastic:
        low = scaled.abs().floor_()
        up = draws_for(x, key).float().mul_(2.0**-24) < scaled.abs().sub_(low)
        scaled = low.add_(up).copysign_(scaled)
    else:
        scaled.round_()
    codes.copy_(scaled.to(torch.int8))
    scales.copy_(top)


def encode(
    x: Tensor,
    segments: Segments,
    rounding: str,
    key: Key,
    *,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return codes in [-127, 127], int8, shape (n,), and scales, float32, shape (m,).

    Let a be the largest magnitude of a block and y = (x / a) * 127, each operation rounded to
    float32. "nearest" gives y rounded to an integer, ties to even. "stochastic" gives the sign of y
    times floor(|y|), plus 1 iff u / 2^24 < |y| - floor(|y|), u uniform on [0, 2^24). The scale is
    a, or 0 if a is below `TINY`. All codes of a block are zero if its scale is 0 or not finite.

    `x`: float32, shape (n,); `rounding`: one of `ROUNDINGS`; `out`: output tensors for both.
    """
    n, m = segments.numel, len(segments)
    x = vector(x, torch.float32, n)
    codes, scales = outputs(out, x.device, (torch.int8, n), (torch.float32, m))
    _encode(x, segments, rounding == "stochastic", key, codes, scales)
    return codes, scales


@operation(_fault)
def _decode(
    codes: Tensor,
    scales: Tensor,
    segments: Segments,
    onto: Tensor | None,
    count: float,
    out: Tensor,
) -> None:
    if not valid_scales(scales):
        raise _fault(1, {})
    if codes.numel() and int(codes.amin()) < -TOP:
        raise _fault(2, {})
    # A GPU may replace division by a Python number, but not by a tensor, with a multiplication.
    values = codes.float().div_(torch.tensor(float(TOP), dtype=torch.float32, device=codes.device))
    scale_(values, scales, segments)
    out.copy_(values if onto is None else onto + values * count)


def decode(
    codes: Tensor,
    scales: Tensor,
    segments: Segments,
    *,
    onto: Tensor | None = None,
    count: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Return v = (code / 127) * scale, float32, shape (n,), or `onto` + `count` * v.

    `codes`: int8, shape (n,); `scales`: float32, shape (m,). `out`: the output tensor, which may be
    `onto`; undefined after an error.

    Raises:
        PayloadError: wrong dtype or shape; a code is -128, or a scale is negative, not finite or
            below `TINY` but not 0.
    """
    n, m = segments.numel, len(segments)
    codes, scales = part(codes, torch.int8, n, "codes"), part(scales, torch.float32, m, "scales")
    onto = None if onto is None else vector(onto, torch.float32, n, "onto")
    out = output(out, torch.float32, n, codes.device)
    _decode(codes, scales, segments, onto, count, out)
    return out


@operation(_fault)
def _mean(
    codes: Sequence[Tensor],
    scales: Sequence[Tensor],
    counts: Sequence[int],
    segments: Segments,
    out: Tensor,
) -> None:
    def onto(i: int, total: Tensor | None) -> Tensor:
        to = out if total is None else total
        return decode(codes[i], scales[i], segments, onto=total, count=counts[i], out=to)

    mean_onto(onto, counts)


def mean(
    payloads: Sequence[tuple[Tensor, Tensor, int]],
    segments: Segments,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return the mean of all workers, float32, shape (n,): see `means.mean_onto`.

    `payloads`: per payload codes and scales, as for `decode`, and the number of workers whose mean
    they encode. `out`: the output tensor.

    Raises:
        PayloadError: see `decode`.
        ValueError: there are no payloads.
    """
    if not payloads:
        raise ValueError("mean needs at least one payload")
    n, m = segments.numel, len(segments)
    codes = [part(codes, torch.int8, n, "codes") for codes, _, _ in payloads]
    scales = [part(scales, torch.float32, m, "scales") for _, scales, _ in payloads]
    counts, device = [count for *_, count in payloads], codes[0].device
    out = output(out, torch.float32, n, device)
    _mean(codes, scales, counts, segments, out)
    return out
