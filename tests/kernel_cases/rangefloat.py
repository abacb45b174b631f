"""Range floats."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gcbench import ops
from kernel_cases import Call, segmentations, values

FORMATS = ((10, 6), (10, 5), (2, 0), (16, 7), (8, 4), (13, 10))


def cases(n: int) -> Iterator[Call]:
    for cut, segments in segmentations(n):
        groups = [(which.stop - which.start, size) for which, _, size in segments.runs if size]
        for what, x in (*values(n), *signs(n)):
            if n > 5000 and what in ("heavy", "constant", "zeros", "tiny", "huge", "positive"):
                continue  # nothing that depends on the number of tiles
            for bits, mantissa in FORMATS if what in ("normal", "mixed") else FORMATS[:2]:
                form = (bits, mantissa)
                name = f"{what} {cut} {form}"
                yield Call("rangefloat.pack", name, (x, groups, *form))
                words, grids = ops.rangefloat.pack(x, groups, *form)
                yield Call("rangefloat.unpack", name, (words, grids, groups, *form, "x"))
        words, grids = ops.rangefloat.pack(torch.randn(n), groups, 10, 6)
        for what, pair in corrupt(words, grids):
            yield Call("rangefloat.unpack", f"{cut} {what}", (*pair, groups, 10, 6, "x"))
        out = {"out": torch.full((n,), torch.nan)}
        yield Call("rangefloat.unpack", f"{cut} into", (words, grids, groups, 10, 6, "x"), out)


def signs(n: int) -> Iterator[tuple[str, Tensor]]:
    """Yield ranges on one side of zero, and infinities."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    yield "positive", x.abs()
    yield "negative", -x.abs()
    yield "one sign", torch.where(x > 2, x * 1e-12, -x.abs())
    infinite = x.clone()
    infinite[n // 3 :: 1500] = torch.inf
    infinite[n // 2 :: 1700] = -torch.inf
    yield "infinite", infinite


def corrupt(words: Tensor, grids: Tensor) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Yield grids that no group has, codes beyond the finite floats, bits after the last code."""
    bad = words.clone()
    bad[-1:] |= -(2**31)
    yield "a bit after the last", (bad, grids)
    bad = words.clone()
    bad[len(words) // 2 :] = -1
    yield "all bits", (bad, grids)
    for what, grid in (
        ("no base", 1023),
        ("a negative base", -1),
        ("beyond the floats", (255 << 16) + 1),
        ("up to infinity", ((255 << 6) - 3 << 10) | 3),
    ):
        bad = grids.clone()
        bad[len(grids) // 2 :] = grid
        yield what, (words, bad)
