"""Blockwise 8-bit numbers with 128 levels per sign."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gcbench import ops
from gcbench.core.compressor import Segments
from kernel_cases import Call, nonfinite, segmentations, values


def limits(n: int) -> torch.Tensor:
    """Return the numbers halfway between two levels, and the floats beside them; 1 is among."""
    middle = torch.cat((ops.u8bit.LIMITS, -ops.u8bit.LIMITS))
    x = middle.repeat(n // len(middle) + 1)[:n].clone()
    x[1::3] = x[1::3].nextafter(torch.tensor(0.0))
    x[2::3] = x[2::3].nextafter(x[2::3] * 2)
    x[::97] = 1.0
    return x


def cases(n: int) -> Iterator[Call]:
    blocks = [(f"blocks of {size}", Segments.of([(n,)], size)) for size in (256, 40, 1)]
    for cut, segments in (*segmentations(n), *blocks):
        least = limits(n) * 2.0**-100  # the smallest scale that is not sent as 0
        inputs = [*values(n), *nonfinite(n), ("limits", limits(n)), ("least", least)]
        for what, x in inputs if n <= 5000 else inputs[:1] + inputs[-5:]:
            yield Call("u8bit.encode", f"{what} {cut}", (x, segments))
        yield from payloads(n, cut, segments)


def payloads(n: int, cut: str, segments: Segments) -> Iterator[Call]:
    codes = (torch.arange(n).remainder(255) - 127).to(torch.int8)
    scales = torch.rand(len(segments), generator=torch.Generator().manual_seed(n)) * 3
    scales[1::5] = 2.0**-100

    def decoded(what: str, codes: torch.Tensor, scales: torch.Tensor) -> Call:
        return Call("u8bit.decode", f"{cut} {what}", (codes, scales, segments, ""))

    yield decoded("", codes, scales)
    nothing = torch.zeros(n, dtype=torch.int8)
    yield decoded("zeros", nothing, torch.zeros(len(segments)))
    for place in {0, n // 2, n - 1} if n else ():
        unused = codes.clone()
        unused[place] = -128
        yield decoded(f"-128 at {place}", unused, scales)
        for code in (1, -1):
            coded = nothing.clone()
            coded[place] = code
            yield decoded(f"scale 0, {code} at {place}", coded, torch.zeros(len(segments)))
    for value in (torch.nan, torch.inf, -1.0, -0.0, 2.0**-101):
        wrong = scales.clone()
        wrong[len(wrong) // 2 :] = value
        yield decoded(f"scale {value}", codes, wrong)
