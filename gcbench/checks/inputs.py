"""The inputs of the search: shapes of buckets, families of values, and how workers differ.

Values come from one pool of normal numbers, so that long inputs are cheap. The same arguments give
the same bits on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from gcbench import ops
from gcbench.core.compressor import TILE, Key, Segments

Shapes = tuple[tuple[int, ...], ...]

LONGEST = 1_100_003
"""Elements of the pool, and so of the longest input."""
MIXED = ((40, 33), (0,), (1,), (33, 40), (8, 3, 3, 3), (), (1030,), (7,))
MODEL: Shapes = tuple(
    shape
    for shape in ((3, 7), (5,), (40,), (), (2, 3, 3, 3), (1,), (33, 4), (64,))
    for _ in range(38)
)
"""304 tensors; those of one shape are neighbours, which many methods handle together."""


def normal(n: int, seed: int = 0) -> Tensor:
    """Return n independent, nearly normal values of variance 1, float32, shape (n,).

    Twelve uniform draws each, added as integers: the same bits on every machine.
    """
    total = torch.zeros(n, dtype=torch.int64)
    for part in range(12):
        total += ops.random.draws24(Key(seed, part, 0, 0, 255), n)
    return (total - 6 * 2**24).float() * 2.0**-24


@cache
def _pool() -> Tensor:
    values = normal(LONGEST)
    return torch.cat([values, values])


def values(n: int, start: int) -> Tensor:
    """Return n values of the pool from `start` on, float32, shape (n,), a new tensor."""
    start %= LONGEST
    return _pool()[start : start + n].clone()


def per_segment(of_segment: Tensor, segments: Segments) -> Tensor:
    """Return each segment's value at all of its elements, shape (n,)."""
    lengths = torch.tensor(segments.lengths, dtype=torch.int64)
    return of_segment.repeat_interleave(lengths, output_size=segments.numel)


# ---- families that methods transmit exactly ------------------------------------------------------


def _refined(segments: Segments) -> Segments:
    """Return the segments, cut also at tiles: every shard of an exchange has whole such pieces."""
    edges = {*segments.offsets, *range(0, segments.numel, TILE)}
    return Segments(tuple(sorted(edges)))


def _with_extreme(segments: Segments, low: int, high: int, seed: int) -> Tensor:
    """Return integers from low to high, with low or high at the start of every segment."""
    n = segments.numel
    draws = ops.random.draws24(Key(seed, 0, 0, 0, 254), n).long()
    values = low + draws % (high - low + 1)
    starts = [s for s, length in zip(segments.offsets, segments.lengths, strict=False) if length]
    values[starts] = torch.where(draws[starts] % 2 == 0, low, high)
    return values.float()


def _signs(segments: Segments, seed: int) -> Tensor:
    return 1.0 - 2.0 * (ops.random.draws24(Key(seed, 0, 0, 0, 254), segments.numel) % 2).float()


def _sparse(segments: Segments, seed: int) -> Tensor:
    out = torch.zeros(segments.numel)
    draws = ops.random.draws24(Key(seed, 1, 0, 0, 254), len(segments)).tolist()
    spans = zip(segments.offsets, segments.lengths, draws, strict=False)
    for start, length, draw in spans:
        if length:
            out[start + draw % length] = (1 + draw % 7) * (1 - 2 * (draw % 2))
    return out


def _of_rank(rank: int) -> Callable[[Segments, int], Tensor]:
    """Return a function that makes matrices of this rank at most, sums of products of signs."""

    def make(segments: Segments, seed: int) -> Tensor:
        out = _signs(segments, seed)
        for start, shape in segments.tensors:
            n, size = shape[0] if shape else 1, math.prod(shape)
            if len(shape) > 1 and size:
                place, m = slice(start, start + size), size // n
                draws = ops.random.draws24(Key(seed, 2, 0, start, 254), rank * (n + m)) % 2
                signs = (1.0 - 2.0 * draws).view(rank, n + m)
                weights = torch.arange(1.0, rank + 1)[:, None]
                product = (weights * signs[:, :n]).T @ signs[:, n:]
                out[place] = product.reshape(-1)
        return out

    return make


EXACT: Mapping[str, Callable[[Segments, int], Tensor]] = {
    "signs": _signs,
    "ternary": lambda segments, seed: _with_extreme(_refined(segments), -1, 1, seed),
    "integers": lambda segments, seed: _with_extreme(_refined(segments), -7, 7, seed),
    "bytes": lambda segments, seed: _with_extreme(_refined(segments), -127, 127, seed),
    "sparse": _sparse,
    **{f"rank {rank}": _of_rank(rank) for rank in (1, 2, 4)},
}
"""Families of inputs that a method may declare to transmit exactly (`Claims.exact_for`): +-1; {-1,
0, 1} and integers up to 7 and to 127 in magnitude, with an extreme in every segment; one nonzero
integer in every segment; matrices of integers of a low rank, with vectors of +-1. What is not
portable, whose last bits a library decides, transmits them up to rounding, 1e-5 of the largest."""


# ---- families of values --------------------------------------------------------------------------


def _normal(segments: Segments, seed: int) -> Tensor:
    return values(segments.numel, 7919 * seed)


def _zeros(segments: Segments, seed: int) -> Tensor:
    return torch.zeros(segments.numel)


def _third_zero(segments: Segments, seed: int) -> Tensor:
    """Every third segment is zero."""
    live = (torch.arange(len(segments)) + seed) % 3 != 0
    return _normal(segments, seed) * per_segment(live.float(), segments)


def _norms_differ(segments: Segments, seed: int) -> Tensor:
    """Segments have scales from 2^-20 to 2^20."""
    power = ((torch.arange(len(segments)) + seed) * 29 % 41 - 20).float()
    return _normal(segments, seed) * per_segment(torch.exp2(power), segments)


def _wide(segments: Segments, seed: int) -> Tensor:
    """Elements have scales from 2^-18 to 2^18."""
    power = ((torch.arange(segments.numel) + seed) * 7 % 13 * 3 - 18).float()
    return _normal(segments, seed) * torch.exp2(power)


def _last_alone(segments: Segments, seed: int) -> Tensor:
    """Only the last element of each segment is not zero; others are 0.0 and -0.0 in turn."""
    out = torch.zeros(segments.numel)
    out[1::2] = -0.0
    edges = torch.tensor(segments.offsets, dtype=torch.int64)
    starts, stops = edges[:-1], edges[1:]
    live = starts < stops
    out[stops[live] - 1] = _normal(segments, seed)[starts[live]] + 2
    return out


FAMILIES: Mapping[str, Callable[[Segments, int], Tensor]] = {
    "normal": _normal,
    "zeros": _zeros,
    "every third segment zero": _third_zero,
    "segments of different norms": _norms_differ,
    "elements of different scales": _wide,
    "heavy tails": lambda segments, seed: _normal(segments, seed) ** 3,
    "denormal": lambda segments, seed: _denormal(segments.numel),
    "constant": lambda segments, seed: torch.full((segments.numel,), (0.75, 0.25, -0.5)[seed % 3]),
    "positive": lambda segments, seed: _normal(segments, seed).abs() + 0.01,
    "signs": EXACT["signs"],
    "one nonzero per segment": EXACT["sparse"],
    "last element of each segment": _last_alone,
}
"""Families of values by name; a worker's rank is the seed."""

DIAGONAL = "element i of tensor i alone"


def _diagonal(segments: Segments, seed: int) -> Tensor:
    """Tensor i is zero but for its element i."""
    out = torch.zeros(segments.numel)
    filled = [(start, math.prod(shape)) for start, shape in segments.tensors if math.prod(shape)]
    starts, sizes = torch.tensor(filled, dtype=torch.int64).view(-1, 2).unbind(1)
    out[starts + (torch.arange(len(starts)) + seed) % sizes] = 3.0
    return out


EVERY_FAMILY: Mapping[str, Callable[[Segments, int], Tensor]] = {
    **{f"exact {name}": make for name, make in EXACT.items()},
    **FAMILIES,
    DIAGONAL: _diagonal,
}
"""`FAMILIES`, and those that only some inputs have."""

SPREADS: Mapping[str, Callable[[int], float]] = {
    "equal scales": lambda rank: 1.0,
    "scales 2^0, 2^-10, 2^-20": lambda rank: 2.0 ** -(10 * (rank % 3)),
    "scales 2^0, 2^12, 2^-12": lambda rank: (1.0, 2.0**12, 2.0**-12)[rank % 3],
    "worker 0 alone large": lambda rank: 1.0 if rank == 0 else 2.0**-16,
    "the others zero": lambda rank: 1.0 if rank == 0 else 0.0,
    "alternating signs": lambda rank: 1.0 - 2.0 * (rank % 2),
}
"""How the scales of workers differ: the factor of each rank."""


def _denormal(n: int) -> Tensor:
    """Return denormal values of alternating sign, float32, shape (n,)."""
    return torch.full((n,), 1e-42) * (1 - 2 * (torch.arange(n) % 2))


def probes(n: int) -> Iterator[tuple[str, Tensor]]:
    """Yield test inputs with their names, each float32, shape (n,)."""
    x = normal(n)
    spike = torch.zeros(n)
    spike[n // 2 : n // 2 + 1] = -3.0
    yield "normal", x
    yield "zeros", torch.zeros(n)
    yield "one nonzero", spike
    yield "constant", torch.full((n,), 0.7)
    yield "negative constant", torch.full((n,), -2.5)
    yield "denormal", _denormal(n)
    yield "huge", x * 1e30
    yield "small", x * 1e-7
    yield "mixed scales", x * torch.pow(10.0, (torch.arange(n) % 13 - 6).float())
    yield "heavy tails", x**5


# ---- shapes of buckets ---------------------------------------------------------------------------


def short_shapes(group: int) -> Mapping[str, Shapes]:
    """Return buckets of up to about 8,000 elements; `group`: the method's group size, if any."""
    g = group
    return {
        "empty": ((0,),),
        "one element": ((1,),),
        "three elements": ((3,),),
        "a tile": ((TILE,),),
        "a tile and one": ((TILE + 1,),),
        "a last group of one": ((3 * g + 1,),),
        "groups of one": ((g + 1,), (1,), (2 * g,), (2 * g + 1,), (g - 1,), (g,), (1,)),
        "mixed": MIXED,
        "304 tensors": MODEL,
        "4096 and one": ((4097,),),
        "matrices": ((64, 48), (48,), (24, 5, 3, 3), (24,), (1, 40), (40, 1), (0, 4)),
        "kernels": ((12, 8, 1, 1), (6, 1, 7, 7), (5, 3, 4, 2), (9, 10, 8), (3, 2, 3, 3, 3)),
    }


def long_shapes(group: int) -> Mapping[str, Shapes]:
    """Return buckets of many elements; `group`: as in `short_shapes`."""
    return {
        "a last group of one": ((70_000 // group * group + 1,),),
        "two matrices": ((300, 450), (257, 256), (65,)),
        "stretched matrices": STRETCHED,
    }


STRETCHED: Shapes = ((6, 1500), (1500, 6))
"""Matrices with more columns, or rows, than a tile has elements."""
MANY: Shapes = ((1,),) * 33_000 + ((2,),) * 32_993 + ((5,),) * 7
"""More segments than 16 bits count."""
FAR: Shapes = ((4200, 4130),)
"""The last of 32 stretches begins behind element 2^24."""


def far_values() -> Tensor:
    """Return normal values of `FAR`, float32, shape (17346000,)."""
    n = sum(map(math.prod, FAR))
    return _pool()[:LONGEST].repeat(-(-n // LONGEST))[:n]


MILLION: Shapes = ((1034, 1027), (3,), (33,))
"""More than 2^20 elements."""


def same_length(n: int = 2310) -> list[Shapes]:
    """Return buckets of the same length with other segments: other numbers, and other places."""
    return [
        ((n,),),
        ((n // 2,), (n - n // 2,)),
        ((700,), (n - 700,)),
        ((701,), (n - 701,)),
        ((n - 1,), (1,)),
        ((1,), (n - 1,)),
        ((33, 70),),
        ((70, 33),),
        tuple([(7,)] * (n // 7)),
        ((700,), (n - 1400,), (700,)),
        ((700,), (n - 1405,), (5,), (700,)),
        ((700,), (5,), (n - 1405,), (700,)),
    ]


def describe(shapes: Sequence[Sequence[int]]) -> str:
    """Return shapes as text, at most six of them."""
    few = ", ".join("x".join(map(str, shape)) or "scalar" for shape in shapes[:6])
    more = f", ... ({len(shapes)} tensors)" if len(shapes) > 6 else ""
    return f"[{few}{more}]"
