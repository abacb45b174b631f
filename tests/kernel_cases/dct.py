"""Cosine transforms of chunks."""

from __future__ import annotations

from collections.abc import Iterator

from gcbench.ops.dct import Chunks
from kernel_cases import Call, nonfinite, values

SIDES = ((1, 1, 1, 1), (2, 64, 1, 64), (1, 1, 3, 33), (5, 1, 2, 2), (3, 7, 2, 24), (1, 256, 1, 3))
"""Chunks down and their height, chunks across and their width."""


def covered(n: int) -> tuple[Chunks, ...]:
    """Return chunks of many forms, as many as there is room for, and single elements."""
    chunks, start = [], 0
    for down, height, across, width in SIDES:
        size = down * height * across * width
        if start + size <= n:
            chunks.append(Chunks(start, down, height, across, width))
            start += size
    sides = (70, 1, 1, (n - start) // 70) if n - start > 70 * 256 else (1, 1, n - start, 1)
    rest = sides[0] * sides[2] * sides[3]
    if rest > 0 and sides[3] <= 256:
        chunks.append(Chunks(start, *sides))
        start += rest
    if start < n:
        chunks.append(Chunks(start, 1, 1, n - start, 1))
    return tuple(chunks)


def cases(n: int) -> Iterator[Call]:
    chunks = covered(n)
    for what, x in (*values(n), *nonfinite(n)):
        yield Call("dct.forward", what, (x, chunks))
        yield Call("dct.inverse", what, (x, chunks))
