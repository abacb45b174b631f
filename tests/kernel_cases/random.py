"""Random numbers: `draws24`."""

from __future__ import annotations

from collections.abc import Iterator

from gcbench.core.compressor import Key
from kernel_cases import CORRELATED, KEYS, Call

OFFSETS = (1, 31, 32, 1023, 1024, 70_001, 2**37 - 700, 2**37)
"""Within and at the ends of lanes and tiles; where a lane's number passes 2^32, as 2^37 / 32."""


def keys() -> Iterator[Key]:
    yield from KEYS
    for offset in OFFSETS:
        yield Key(7, 11, 3, offset, 2)
    yield Key(-1, 0, 2**24 - 1, 5, 255)


def cases(n: int) -> Iterator[Call]:
    for key in keys():
        yield Call("random.draws24", str(key), (key, n), {"device": "cpu"})
    for key in CORRELATED:
        yield Call("random.draws24", str(key), (key, n), {"device": "cpu"})
