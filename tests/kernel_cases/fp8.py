"""Blockwise e4m3 floats."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gcbench.core.compressor import Segments
from kernel_cases import Call, nonfinite, segmentations, values


def halves(n: int) -> torch.Tensor:
    """Return what lies halfway between two e4m3 values, and the floats beside it; 448 is among."""
    sizes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (sizes[1:] + sizes[:-1]) / 2
    x = torch.cat((middle, -middle, torch.tensor([448.0])))
    x = x.repeat(n // len(x) + 1)[:n].clone()
    x[1::3] = x[1::3].nextafter(torch.tensor(0.0))
    x[2::3] = x[2::3].nextafter(torch.tensor(1e9))
    x[::97] = 448.0
    return x


def cases(n: int) -> Iterator[Call]:
    blocks = [(f"blocks of {size}", Segments.of([(n,)], size)) for size in (256, 40)]
    for cut, segments in (*segmentations(n), *blocks):
        inputs = [*values(n), *nonfinite(n), ("halves", halves(n))]
        for what, x in inputs if n <= 5000 else inputs[:1] + inputs[-4:]:
            yield Call("fp8.encode", f"{what} {cut}", (x, segments))
        yield from payloads(n, cut, segments)


def payloads(n: int, cut: str, segments: Segments) -> Iterator[Call]:
    codes = torch.arange(n).remainder(254)
    codes = torch.where(codes < 127, codes, codes + 1).to(torch.uint8)  # neither of the NaN
    scales = torch.rand(len(segments), generator=torch.Generator().manual_seed(n)) * 3
    scales[1::5] = 2.0**-100

    def decoded(what: str, codes: torch.Tensor, scales: torch.Tensor) -> Call:
        return Call("fp8.decode", f"{cut} {what}", (codes, scales, segments, ""))

    yield decoded("", codes, scales)
    nothing = torch.arange(n).remainder(2).mul(128).to(torch.uint8)
    yield decoded("zeros", nothing, torch.zeros(len(segments)))
    for place in {0, n // 2, n - 1} if n else ():
        for code in (127, 255):
            outside = codes.clone()
            outside[place] = code
            yield decoded(f"{code} at {place}", outside, scales)
        coded = nothing.clone()
        coded[place] = 1
        yield decoded(f"scale 0, code at {place}", coded, torch.zeros(len(segments)))
    for value in (torch.nan, torch.inf, -1.0, -0.0, 2.0**-101):
        wrong = scales.clone()
        wrong[len(wrong) // 2 :] = value
        yield decoded(f"scale {value}", codes, wrong)
