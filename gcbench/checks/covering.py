"""Rows of settings in which every pair of values occurs (a covering array of strength two)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any


def pairwise(dimensions: Mapping[str, Sequence[Any]], seed: int) -> list[dict[str, Any]]:
    """Return rows, one value per dimension, that contain every pair of values of two dimensions.

    Greedy: a row starts with a pair that no earlier row contains; each other dimension takes the
    value that adds the most new pairs. The same seed gives the same rows.
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
