"""Walsh-Hadamard transforms, and rotated blocks in 4 bits."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gcbench.core.compressor import Segments
from gcbench.ops import packing
from gcbench.ops.hadamard import BITS, TOP
from kernel_cases import Call, nonfinite, segmentations, values


def cases(n: int) -> Iterator[Call]:
    blocks = [(f"blocks of {size}", Segments.of([(n,)], size)) for size in (128, 100, 3)]
    for cut, segments in (*segmentations(n), *blocks):
        inputs = [*values(n), *nonfinite(n)]
        for what, x in inputs if n <= 5000 else inputs[:2] + inputs[-3:]:
            yield Call("hadamard.rotate", f"{what} {cut}", (x, segments))
            yield Call("hadamard.encode", f"{what} {cut}", (x, segments))
        yield from payloads(n, cut, segments)


def payloads(n: int, cut: str, segments: Segments) -> Iterator[Call]:
    codes = torch.arange(n).remainder(2 * TOP + 1)
    scales = torch.rand(len(segments), generator=torch.Generator().manual_seed(n)) * 3
    scales[1::5] = 2.0**-100

    def decoded(what: str, codes: torch.Tensor, scales: torch.Tensor) -> Call:
        words = packing.pack(codes, BITS)
        return Call("hadamard.decode", f"{cut} {what}", (words, scales, segments, ""))

    yield decoded("", codes, scales)
    yield decoded("zeros", torch.full((n,), TOP), torch.zeros(len(segments)))
    for place in {0, n // 2, n - 1} if n else ():
        outside, coded = codes.clone(), torch.full((n,), TOP)
        outside[place], coded[place] = 15, TOP + 1
        yield decoded(f"15 at {place}", outside, scales)
        yield decoded(f"scale 0, code at {place}", coded, torch.zeros(len(segments)))
    for value in (torch.nan, torch.inf, -1.0, -0.0, 2.0**-101):
        wrong = scales.clone()
        wrong[len(wrong) // 2 :] = value
        yield decoded(f"scale {value}", codes, wrong)
