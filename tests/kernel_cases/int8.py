"""Blockwise 8-bit codes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gcbench import ops
from gcbench.core.compressor import TILE, Segments
from kernel_cases import CORRELATED, KEYS, Call, nonfinite, segmentations, values


def cases(n: int) -> Iterator[Call]:
    blocks = [(f"blocks of {size}", Segments.of([(n,)], size)) for size in (256, 40)]
    for cut, segments in (*segmentations(n), *blocks):
        inputs = [*values(n), *nonfinite(n), ("odd nan", odd_nan(n)), ("halves", halves(n))]
        for what, x in inputs if n <= 5000 else inputs[:1] + inputs[-3:]:
            for rounding in ops.int8.ROUNDINGS:
                keys = (*KEYS, CORRELATED[len(segments) % 4])
                for key in keys if rounding == "stochastic" else keys[:1]:
                    name = f"{what} {cut} {rounding} {key}"
                    yield Call("int8.encode", name, (x, segments, rounding, key))
        yield from payloads(n, cut, segments)
    if n >= TILE:
        # The element of index 8,735,346 draws zero, which rounds no whole number up.
        key = KEYS[0]._replace(offset=8_735_346 - 8_735_346 % TILE)
        x = torch.arange(TILE).remainder(255).sub(127).float()
        arguments = (x, Segments((0, TILE)), "stochastic", key)
        yield Call("int8.encode", "whole numbers, draw 0", arguments)


def odd_nan(n: int) -> torch.Tensor:
    """A NaN whose lowest bits are set, too: its code is 0 as that of all others in its block."""
    x = torch.arange(n).remainder(9).sub(4).float()
    x.view(torch.int32)[n // 2 : n // 2 + 1] = 0x7FC00155
    return x


def halves(n: int) -> torch.Tensor:
    """Ties between two codes, and what is right beside them."""
    x = torch.arange(n).remainder(255).sub(127).sub(0.5)
    x[1::3] = x[1::3].nextafter(torch.tensor(0.0))
    x[2::3] = x[2::3].nextafter(torch.tensor(1e9))
    x[::97] = 127.0
    return x.clamp_(-127, 127)


def payloads(n: int, cut: str, segments: Segments) -> Iterator[Call]:
    codes = torch.arange(n).remainder(255).sub(127).to(torch.int8)
    scales = torch.rand(len(segments), generator=torch.Generator().manual_seed(n)) * 3
    scales[::5] = 0.0
    scales[1::5] = 2.0**-100
    onto = torch.randn(n, generator=torch.Generator().manual_seed(n))
    yield Call("int8.decode", cut, (codes, scales, segments))
    for count in (1, 3):
        more = {"onto": onto, "count": count}
        yield Call("int8.decode", f"{cut} onto {count}", (codes, scales, segments), more)
    for counts in ((1,), (1, 1, 1), (2, 3, 1), (1,) * 8, (3,) * 70):
        if n not in (33, 1025) and len(counts) > (8 if n <= 5000 else 3):
            continue
        parts = [(codes.roll(i), scales.roll(i), count) for i, count in enumerate(counts)]
        name = f"{cut} of {counts[:4]}, {len(counts)}"
        yield Call("int8.mean", name, (parts, segments))
        for place in {0, len(counts) // 2, len(counts) - 1}:
            outside, below = codes.clone(), scales.clone()
            outside[len(counts) * n // 71 :][:1] = -128
            below[len(segments) // 2 :][:1] = -1
            for what, wrong in (("-128", (outside, scales)), ("scale", (codes, below))):
                worse = [*parts[:place], (*wrong, counts[place]), *parts[place + 1 :]]
                yield Call("int8.mean", f"{name} {what} at {place}", (worse, segments))
    for place in (0, n // 2, n - 1) if n else ():
        outside = codes.clone()
        outside[place] = -128
        yield Call("int8.decode", f"{cut} -128 at {place}", (outside, scales, segments))
    for value in (torch.nan, torch.inf, -1.0, -0.0, 2.0**-101):
        wrong = scales.clone()
        wrong[len(wrong) // 2 :] = value
        yield Call("int8.decode", f"{cut} scale {value}", (codes, wrong, segments))
