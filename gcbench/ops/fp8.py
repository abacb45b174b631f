"""Blockwise e4m3 floats of 8 bits, each block scaled by its largest magnitude."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gcbench.core.compressor import Segments
from gcbench.ops.dispatch import operation, output, outputs, part, payload_faults, vector
from gcbench.ops.statistics import coded_in_zeros, scale_, shares, valid_scales

TOP = 448.0
"""The largest value of e4m3, to which the block's largest magnitude is scaled."""
SHARES = (
    torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float().div_(TOP)
)
"""c / 448 of all 256 codes, float32: in plain torch a look-up is faster than a conversion."""

FAULTS = {
    1: "a block's scale must be 0, or finite and at least 2^-100",
    2: "a code is NaN",
    3: "nonzero codes in a block of scale 0",
}

_fault = payload_faults(FAULTS)


@operation()
def _encode(x: Tensor, segments: Segments, codes: Tensor, scales: Tensor) -> None:
    scaled, top = shares(x, segments)
    scaled.mul_(TOP)  # the quotient first: a / a * 448 is 448
    codes.copy_(scaled.to(torch.float8_e4m3fn).view(torch.uint8))
    scales.copy_(top)


def encode(
    x: Tensor, segments: Segments, *, out: Sequence[Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return codes, uint8, shape (n,), and scales, float32, shape (m,).

    Let a be the largest magnitude of a block. The code is (x / a) * 448, each operation rounded to
    float32, rounded to e4m3, ties to even. The scale is a, or 0 if a is below `TINY`. All codes of
    a block are zeros if its scale is 0 or not finite.

    `x`: float32, shape (n,); `out`: output tensors for both.
    """
    n, m = segments.numel, len(segments)
    x = vector(x, torch.float32, n)
    codes, scales = outputs(out, x.device, (torch.uint8, n), (torch.float32, m))
    _encode(x, segments, codes, scales)
    return codes, scales


@operation(_fault)
def _decode(codes: Tensor, scales: Tensor, segments: Segments, name: str, out: Tensor) -> None:
    arguments = {"name": name}
    if not valid_scales(scales):
        raise _fault(1, arguments)
    values = SHARES.to(codes.device).index_select(0, codes.int())
    if values.isnan().any():
        raise _fault(2, arguments)
    if coded_in_zeros(values, scales, segments):
        raise _fault(3, arguments)
    out.copy_(scale_(values, scales, segments))


def decode(
    codes: Tensor, scales: Tensor, segments: Segments, name: str, *, out: Tensor | None = None
) -> Tensor:
    """Return (e4m3 value of the code / 448) * scale, float32, shape (n,).

    `codes`: uint8, shape (n,); `scales`: float32, shape (m,). `out`: the output tensor, undefined
    after an error.

    Raises:
        PayloadError: wrong dtype or shape; a code is NaN, a scale is negative, not finite or below
            `TINY` but not 0, or a block of scale 0 has nonzero codes. The message starts with
            `name`.
    """
    n, m = segments.numel, len(segments)
    codes = part(codes, torch.uint8, n, f"{name}: codes")
    scales = part(scales, torch.float32, m, f"{name}: scales")
    out = output(out, torch.float32, n, codes.device)
    _decode(codes, scales, segments, name, out)
    return out
