"""Blockwise 8-bit numbers with 128 levels per sign, each block scaled by its largest magnitude."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gcbench.core.compressor import Segments
from gcbench.ops.dispatch import operation, output, outputs, part, payload_faults, vector
from gcbench.ops.statistics import coded_in_zeros, scale_, shares, valid_scales

_CENTERS = [
    10.0 ** (i - 6) * (0.1 + 0.9 * (j + 0.5) / 2**i) for i in range(1, 7) for j in range(2**i)
]
LEVELS = torch.tensor([0.0, *_CENTERS, 1.0], dtype=torch.float32, device="cpu")
"""The 128 levels, float32, increasing: 0, 1, and per decade (10^(i-7), 10^(i-6)), i = 1..6, the
centers of 2^i equal parts."""
LIMITS = ((LEVELS[1:].double() + LEVELS[:-1]) / 2).float()
"""The 127 numbers halfway between them."""


def _steps() -> Tensor:
    """Return the table `STEPS`.

    Numbers with equal upper bits have at most two codes, as no two limits have the same upper bits.
    """
    # By numpy: torch's search starts threads, and a process forked from this one would wait for
    # them forever.
    uppers = np.arange(0x3F81, dtype=np.int32)
    first = np.searchsorted(LIMITS.numpy(), (uppers << 16).view(np.float32))
    steps, limits = first.astype(np.int32) << 16, LIMITS.numpy().view(np.int32)
    steps[limits >> 16] += 0xFFFF - (limits & 0xFFFF)
    return torch.from_numpy(steps)


STEPS = _steps()
"""Codes of the float32 in [0, 1] by their upper 16 bits u and lower 16 bits v, int32:
(STEPS[u] + v) >> 16."""
VALUES = torch.cat((torch.tensor([torch.nan]), -LEVELS.flip(0), LEVELS[1:]))
"""The values of the codes -128 (unused) to 127, float32."""

FAULTS = {
    1: "a scale must be 0, or finite and at least 2^-100",
    2: "code -128 is not used",
    3: "nonzero codes in a block of scale 0",
}

_fault = payload_faults(FAULTS)


@operation()
def _encode(x: Tensor, segments: Segments, steps: Tensor, codes: Tensor, scales: Tensor) -> None:
    share, top = shares(x, segments)
    bits = share.abs_().view(torch.int32)
    sizes = (steps.index_select(0, bits >> 16) + (bits & 0xFFFF)) >> 16
    torch.mul(sizes.to(torch.int8), x.sign().to(torch.int8), out=codes)
    scales.copy_(top)


def encode(
    x: Tensor, segments: Segments, *, out: Sequence[Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return codes, int8, shape (n,), and scales, float32, shape (m,).

    Let a be the largest magnitude of a block. The code's magnitude is the index of the level that
    is nearest to |x| / a, rounded to float32; the lower one at a limit. Its sign is that of x. The
    scale is a, or 0 if a is below `TINY`. All codes of a block are zeros if its scale is 0 or not
    finite.

    `x`: float32, shape (n,); `out`: output tensors for both.
    """
    n, m = segments.numel, len(segments)
    x = vector(x, torch.float32, n)
    codes, scales = outputs(out, x.device, (torch.int8, n), (torch.float32, m))
    steps = STEPS.to(x.device)
    _encode(x, segments, steps, codes, scales)
    return codes, scales


@operation(_fault)
def _decode(
    codes: Tensor, scales: Tensor, segments: Segments, values: Tensor, name: str, out: Tensor
) -> None:
    arguments = {"name": name}
    if not valid_scales(scales):
        raise _fault(1, arguments)
    if codes.numel() and int(codes.min()) == -128:
        raise _fault(2, arguments)
    torch.index_select(values, 0, codes.int().add_(128), out=out)
    if coded_in_zeros(codes, scales, segments):
        raise _fault(3, arguments)
    scale_(out, scales, segments)


def decode(
    codes: Tensor, scales: Tensor, segments: Segments, name: str, *, out: Tensor | None = None
) -> Tensor:
    """Return sign(code) * level * scale, float32, shape (n,).

    `codes`: int8, shape (n,); `scales`: float32, shape (m,). `out`: the output tensor, undefined
    after an error.

    Raises:
        PayloadError: wrong dtype or shape; a code is -128, a scale is negative, not finite or below
            `TINY` but not 0, or a block of scale 0 has nonzero codes. The message starts with
            `name`.
    """
    n, m = segments.numel, len(segments)
    codes = part(codes, torch.int8, n, f"{name}: codes")
    scales = part(scales, torch.float32, m, f"{name}: scales")
    out, values = output(out, torch.float32, n, codes.device), VALUES.to(codes.device)
    _decode(codes, scales, segments, values, name, out)
    return out
