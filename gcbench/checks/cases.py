"""The inputs of the search: one case, and which cases a search tries."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from gcbench.checks import inputs
from gcbench.checks.oracle import Profile
from gcbench.core import purposes
from gcbench.core.compressor import TILE, Compressor, Key, Segments

COMPOSITE = 232_792_560
"""Divisible by every number up to 22."""
STEPS = (0, 1, 7, 499, 500, 1000, 65_535, 10**6, COMPOSITE, 2**31 - 1, 2**31, 2**32 - 1)
SCALES = (0, -20, -40, -60, -80, -95, 10, 40, 95)
HUGE = (123, 124)
"""Scales of a single worker whose largest values come close to the maximum of float32, 2^128."""
WORKERS = (2, 3, 1, 4, 5, 8, 16, 17)
RANKS = (0, 1, 77, 4095, 2**16, 2**24 - 64)
SEEDS = (7, 0, 1, 2**31, 2**32 + 1, 2**63 - 1)
OFFSETS = (0, TILE, 33, 2**20, 2**31, 2**33 + 5)
RATES = (1.0, 0.1, 1e-3, 1e-8, 64.0)
DIRTY = (0xFF, 0x3F, 0x7E)
RESIDUALS = ("normal", "zero", "2000 times", "minus the gradient", "gradient zero", "both zero")
DISTINCT = 5
"""Different gradients in an input of 100 to 10,000 elements; further workers repeat payloads."""
CROWD = 9
"""Workers of one input of each long shape; they share three gradients."""


@dataclass(frozen=True)
class Case:
    """One input of the search."""

    shapes: inputs.Shapes
    values: str = "normal"
    scale: int = 0
    """x is multiplied by 2 to this power."""
    spread: str = "equal scales"
    workers: int = 2
    step: int = 1
    seed: int = 7
    rank: int = 0
    offset: int = 0
    lr: float = 1.0
    dirty: int = 0xFF
    """The byte that output buffers are filled with."""
    residual: str = "normal"
    shard: bool = False
    """Whether the bucket is the part of another one behind its first tiles."""
    light: bool = False
    """Whether each function is called once, with the fewest comparisons."""

    def segments(self, method: Compressor) -> Segments:
        """Return the segments of the bucket."""
        whole = Segments.of(self.shapes, method.granularity)
        start = whole.numel // 3 // TILE * TILE
        return whole.shard(start, whole.numel)[0] if self.shard and start else whole

    def gradients(self, segments: Segments) -> list[Tensor]:
        """Return the gradients of the first workers, whose payloads further ones repeat.

        18 in inputs of fewer than 100 elements, 3 in long ones, `DISTINCT` in others.
        """
        family, factor = inputs.EVERY_FAMILY[self.values], inputs.SPREADS[self.spread]
        n = segments.numel
        count = min(self.workers, 18 if n < 100 else DISTINCT if n < 10_000 else 3)
        scale = 2.0**self.scale
        return [
            family(segments, rank + self.seed % 1000) * (factor(rank) * scale)
            for rank in range(count)
        ]

    def key(self, rank: int = 0, stream: int = purposes.ENCODE) -> Key:
        """Return the key of worker `rank`."""
        return Key(self.seed, self.step, self.rank + rank, self.offset, stream)

    def __str__(self) -> str:
        parts = [
            f"shapes {inputs.describe(self.shapes)}{' behind the first third' * self.shard}",
            f"values: {self.values}" + (f" x 2^{self.scale}" if self.scale else ""),
            f"{self.workers} worker(s)" + (f" of {self.spread}" if self.workers > 1 else ""),
            f"step {self.step}, seed {self.seed}, rank {self.rank}, offset {self.offset}, "
            f"learning rate {self.lr:g}",
            f"output bytes {self.dirty:#x}, residual: {self.residual}",
        ]
        return "; ".join(parts)


class Effort(NamedTuple):
    """How much is tried."""

    every: int
    """1: all pairs of values occur; k: every k-th of these inputs."""
    long: int
    """Inputs per long shape."""
    many: int
    """Inputs of 66,000 tensors; a light one precedes them, also if only `long` is not 0."""
    million: int
    """Inputs of more than 2^20 elements."""
    steps: int
    """Neighbouring steps from 0 on."""
    thin: int = 1
    """1: all keys and numbers of workers of the sweeps; k: every k-th of them."""
    far: int = 0
    """Inputs of more than 2^24 elements."""
    positions: bool = True
    """Whether to sweep one nonzero over all positions of 512 segments."""


FULL = Effort(every=1, long=4, many=4, million=3, steps=2048, far=1)
"""For the defaults of a method."""
VARIANT = Effort(every=2, long=1, many=1, million=0, steps=300)
"""For its other configurations."""
LIBRARY = Effort(every=5, long=1, many=0, million=1, steps=600, far=1)
"""For the defaults of a method whose last bits a library decides: its claims take longest."""
SLOW = Effort(every=16, long=0, many=0, million=0, steps=100)
"""For other configurations of a method that is written in plain torch (`scratch`)."""
QUICK = Effort(every=5, long=1, many=1, million=0, steps=600)
"""For tests."""


def effort_for(method: Compressor, *, first: bool) -> Effort:
    """Return how much is tried of a configuration; `first`: of the method's first one."""
    if first:
        return FULL if method.claims.portable else LIBRARY
    return SLOW if method.scratch else VARIANT


def pairwise(dimensions: Mapping[str, Sequence[Any]], seed: int) -> list[dict[str, Any]]:
    """Return rows, one value per dimension, that contain every pair of values of two dimensions.

    This is a covering array of strength two. Greedy: a row starts with a pair that no earlier row
    contains; each other dimension takes the value that adds the most new pairs. The same seed gives
    the same rows.
    """
    draw = random.Random(seed)
    names = list(dimensions)
    sizes = [len(dimensions[name]) for name in names]
    missing = {
        (a, i, b, j)
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(sizes[a])
        for j in range(sizes[b])
    }
    order = sorted(missing)
    draw.shuffle(order)
    rows = []
    for pair in order:
        if pair not in missing:
            continue
        a, i, b, j = pair
        row = {a: i, b: j}
        rest = [k for k in range(len(names)) if k not in row]
        draw.shuffle(rest)
        for k in rest:
            start = draw.randrange(sizes[k])
            values = [(start + v) % sizes[k] for v in range(sizes[k])]
            row[k] = max(
                values, key=lambda v: sum(_pair(k, v, *it) in missing for it in row.items())
            )
        for one, other in itertools.combinations(row.items(), 2):
            missing.discard(_pair(*one, *other))
        rows.append({names[k]: dimensions[names[k]][v] for k, v in sorted(row.items())})
    return rows


def _pair(a: int, i: int, b: int, j: int) -> tuple[int, int, int, int]:
    return (a, i, b, j) if a < b else (b, j, a, i)


def cases(profile: Profile, effort: Effort, seed: int, exact: Sequence[str] = ()) -> Iterator[Case]:
    """Yield the inputs of one search; `exact`: families that the method transmits exactly."""
    short = inputs.short_shapes(profile.group)
    dimensions: dict[str, Sequence[Any]] = {
        "shapes": list(short.values()),
        "values": list(inputs.FAMILIES),
        "scale": SCALES,
        "spread": list(inputs.SPREADS),
        "workers": WORKERS,
        "step": STEPS,
        "seed": SEEDS,
        "rank": RANKS,
        "offset": OFFSETS,
        "lr": RATES,
        "dirty": DIRTY,
        "residual": RESIDUALS,
        "shard": (False, False, True),
    }
    rows = [Case(**row) for row in pairwise(dimensions, seed)]
    yield from map(_tamed, rows[:: effort.every])
    for alone in ((48, 64), (16, 8, 3, 3)):  # one tensor, as a large one is in a bucket of DDP
        yield Case((alone,), workers=3)
    draw = random.Random(seed + 1)

    def drawn(shapes: inputs.Shapes) -> Case:
        row = {name: draw.choice(list(options)) for name, options in dimensions.items()}
        row |= {"shapes": shapes, "workers": draw.choice((2, 3, 3, 4))}
        return _tamed(Case(**row))

    if effort.long or effort.many:
        yield Case(inputs.MANY, workers=1, light=True)
    long = inputs.long_shapes(profile.group).values()
    for shapes, count in (*((each, effort.long) for each in long), (inputs.MANY, effort.many)):
        full = count > 1 or (count and shapes is not inputs.MANY)
        if full:
            yield Case(shapes, workers=3)
        if count:
            yield Case(shapes, workers=2, values="signs")
        if full:
            yield Case(shapes, workers=CROWD, residual="gradient zero")
        for family in exact[:count]:
            yield Case(shapes, workers=3, values=f"exact {family}")
        for _ in range(count - 1):
            yield drawn(shapes)
    for i in range(effort.million):
        first = Case(inputs.MILLION, workers=3)
        yield (first, replace(first, values="signs"), drawn(inputs.MILLION))[min(i, 2)]


def _tamed(case: Case) -> Case:
    """Keep the largest scale of workers within 2^95 and the smallest above 2^-95."""
    scale = case.scale
    if case.spread.startswith(("scales", "worker 0")):
        scale = max(-75, min(83, scale))
    if case.values in ("segments of different norms", "elements of different scales"):
        scale = max(-55, min(60, scale))
    return replace(case, scale=scale, rank=min(case.rank, 2**24 - 64))
