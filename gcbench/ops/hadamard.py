"""The Walsh-Hadamard transform of segments, and 4-bit codes of transformed segments.

H is Sylvester's orthonormal matrix, with entries +-1 / sqrt(d) for d = 2^k elements; H H = 1. A
segment of another length is transformed in parts by the binary digits of its length, the largest
first: 100 elements are 64, 32 and 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gcbench.core.compressor import Segments
from gcbench.ops import packing
from gcbench.ops.dispatch import operation, output, outputs, part, payload_faults, vector
from gcbench.ops.statistics import coded_in_zeros, scale_, shares, valid_scales

TOP = 7
"""The largest level, that of a segment's largest magnitude; codes are levels plus 7."""
BITS = 4


def _butterflies(rows: Tensor) -> Tensor:
    """Return the orthonormal transform of each row, shape (m, d), d a power of two."""
    m, d = rows.shape
    rows = rows * (1 / math.sqrt(d))
    half = 1
    while half < d:
        pairs = rows.view(m, d // (2 * half), 2, half)
        left, right = pairs[:, :, 0], pairs[:, :, 1]
        rows = torch.stack((left + right, left - right), 2).view(m, d)
        half *= 2
    return rows


@operation()
def _rotate(x: Tensor, segments: Segments, out: Tensor) -> None:
    rotated = x.clone()
    for _, rows in segments.views(rotated):
        start, length = 0, rows.shape[1]
        for bit in reversed(range(length.bit_length())):
            size = 1 << bit
            if length & size:
                rows[:, start : start + size] = _butterflies(rows[:, start : start + size])
                start += size
    out.copy_(rotated.nan_to_num_())


def rotate(x: Tensor, segments: Segments, *, out: Tensor | None = None) -> Tensor:
    """Return H x of each segment, float32, shape (n,). NaN becomes 0, infinity the largest float.

    `x`: float32, shape (n,), multiplied by 1 / sqrt(d) before the butterflies (a + b, a - b) of
    elements 1, 2, 4 ... d / 2 apart. `out`: the output tensor, which may be `x`.
    """
    x = vector(x, torch.float32, segments.numel)
    out = output(out, torch.float32, segments.numel, x.device)
    _rotate(x, segments, out)
    return out


# ---- 4 bits --------------------------------------------------------------------------------------

FAULTS = {
    1: "a block's scale must be 0, or finite and at least 2^-100",
    2: "code 15 is not used",
    3: "nonzero codes in a block of scale 0",
}
_fault = payload_faults(FAULTS)


@operation()
def _encode(x: Tensor, segments: Segments, words: Tensor, scales: Tensor) -> None:
    y, top = shares(rotate(x, segments), segments)
    codes = y.mul_(TOP).round_().add_(TOP).to(torch.int32)
    packing.pack(codes, BITS, out=words)
    scales.copy_(top)


def encode(
    x: Tensor, segments: Segments, *, out: Sequence[Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return codes of y = H x, packed in int32 words, and each segment's a = max |y|, float32.

    A code is round(7 y / a) + 7, ties to even, each operation rounded to float32; if a is below
    `TINY`, it is 7, and 0 replaces a. `x`: float32, shape (n,); `out`: output tensors for both.
    """
    n, m = segments.numel, len(segments)
    x = vector(x, torch.float32, n)
    sizes = (torch.int32, packing.packed_words(n, BITS)), (torch.float32, m)
    words, scales = outputs(out, x.device, *sizes)
    _encode(x, segments, words, scales)
    return words, scales


@operation(_fault)
def _decode(words: Tensor, scales: Tensor, segments: Segments, name: str, out: Tensor) -> None:
    arguments = {"name": name}
    if not valid_scales(scales):
        raise _fault(1, arguments)
    codes = packing.unpack(words, BITS, segments.numel)
    if codes.numel() and int(codes.amax()) > 2 * TOP:
        raise _fault(2, arguments)
    # A GPU may replace division by a Python number, but not by a tensor, with a multiplication.
    values = (
        codes.sub_(TOP)
        .float()
        .div_(torch.tensor(float(TOP), dtype=torch.float32, device=codes.device))
    )
    if coded_in_zeros(values, scales, segments):
        raise _fault(3, arguments)
    rotate(scale_(values, scales, segments), segments, out=out)


def decode(
    words: Tensor, scales: Tensor, segments: Segments, name: str, *, out: Tensor | None = None
) -> Tensor:
    """Return H y of each segment, y = (code - 7) / 7 * scale, float32, shape (n,).

    `words`, `scales`: as `encode` returns them. `out`: the output tensor, undefined after an error.

    Raises:
        PayloadError: wrong dtype or shape; a code is 15, a scale is negative, not finite or below
            `TINY` but not 0, or a segment of scale 0 has codes other than 7. The message starts
            with `name`.
    """
    n, m = segments.numel, len(segments)
    words = part(words, torch.int32, packing.packed_words(n, BITS), f"{name}: codes")
    scales = part(scales, torch.float32, m, f"{name}: scales")
    out = output(out, torch.float32, n, words.device)
    _decode(words, scales, segments, name, out)
    return out
