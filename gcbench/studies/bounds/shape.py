"""Tests of the distribution of noise: is it unimodal, and is it symmetric?

Unimodality: Hartigan's dip, the largest distance of the empirical distribution function from the
nearest unimodal one, by the algorithm AS 217 with its later corrections (Hartigan & Hartigan 1985,
Annals of Statistics 13:70; Hartigan 1985, Applied Statistics 34:320; P. M. Hartigan's text as
corrected by Y. Lu and M. Maechler in R's package diptest). Its p-value is computed by simulation
under the uniform distribution, asymptotically the least favourable unimodal one.

Symmetry about an unknown centre: the triples test, which compares the numbers of right-skewed and
left-skewed triples (Randles, Fligner, Policello & Wolfe 1980, JASA 75:168). Its statistic is
asymptotically normal for every symmetric distribution; for samples of 100 or more normal, uniform,
Laplace and t3 values it rejects with about the nominal probability (tests/studies/test_bounds.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

SIMULATIONS = 9999
"""Number of uniform samples under the null hypothesis; p-values are multiples of 1 / 10,000."""


def _minorant(x: Sequence[float]) -> list[int]:
    """Return for each point the next lower corner of the greatest convex minorant up to it."""
    corner = [0] * len(x)
    for j in range(1, len(x)):
        corner[j] = j - 1
        while True:
            a = corner[j]
            b = corner[a]
            if a == 0 or (x[j] - x[a]) * (a - b) < (x[a] - x[b]) * (j - a):
                break
            corner[j] = b
    return corner


def _majorant(x: Sequence[float]) -> list[int]:
    """Return for each point the next higher corner of the least concave majorant from it on."""
    last = len(x) - 1
    corner = [last] * len(x)
    for k in range(last - 1, -1, -1):
        corner[k] = k + 1
        while True:
            a = corner[k]
            b = corner[a]
            if a == last or (x[k] - x[a]) * (a - b) < (x[a] - x[b]) * (k - a):
                break
            corner[k] = b
    return corner


def _touch(x: Sequence[float], gcm: Sequence[int], lcm: Sequence[int]) -> tuple[float, int, int]:
    """Return the largest distance between minorant and majorant, and the corners where it is.

    `gcm` lists corners from the interval's upper end down, `lcm` from its lower end up.
    """
    if len(gcm) == len(lcm) == 2:
        return 1.0, len(gcm) - 1, len(lcm) - 1
    ig, ih = len(gcm) - 1, len(lcm) - 1
    ix, iv, most = ig - 1, 1, 0.0
    while True:
        g, h = gcm[ix], lcm[iv]
        if g > h:
            above = gcm[ix + 1]
            d = (h - above + 1) - (x[h] - x[above]) * (g - above) / (x[g] - x[above])
            iv += 1
            if d >= most:
                most, ig, ih = d, ix + 1, iv - 1
        else:
            below = lcm[iv - 1]
            d = (x[g] - x[below]) * (h - below) / (x[h] - x[below]) - (g - below - 1)
            ix -= 1
            if d >= most:
                most, ig, ih = d, ix + 1, iv
        ix, iv = max(ix, 0), min(iv, len(lcm) - 1)
        if gcm[ix] == lcm[iv]:
            return most, ig, ih


def _steps(x: Sequence[float], low: int, high: int, *, convex: bool) -> float:
    """Return the largest distance of the steps between two corners from the line joining them."""
    if high - low <= 1 or x[high] == x[low]:
        return 1.0
    slope = (high - low) / (x[high] - x[low])
    if convex:
        return max(j - low + 1 - (x[j] - x[low]) * slope for j in range(low, high + 1))
    return max((x[j] - x[low]) * slope - (j - low - 1) for j in range(low, high + 1))


def dip(values: Sequence[float]) -> float:
    """Return Hartigan's dip of a sample of n values, from 1 / (2 n) to 1/4.

    >>> round(dip([0, 0, 0, 1, 1, 1]), 4)
    0.25
    """
    x = sorted(map(float, values))
    n = len(x)
    if n < 2 or x[0] == x[-1]:
        return 0.5 / max(n, 1)
    minorant, majorant = _minorant(x), _majorant(x)
    low, high, most = 0, n - 1, 1.0
    while True:
        gcm, lcm = [high], [low]
        while gcm[-1] > low:
            gcm.append(minorant[gcm[-1]])
        while lcm[-1] < high:
            lcm.append(majorant[lcm[-1]])
        apart, ig, ih = _touch(x, gcm, lcm)
        if apart < most:
            break
        pieces = [_steps(x, gcm[j + 1], gcm[j], convex=True) for j in range(ig, len(gcm) - 1)]
        pieces += [_steps(x, lcm[j], lcm[j + 1], convex=False) for j in range(ih, len(lcm) - 1)]
        most = max([most, *pieces])
        if (low, high) == (gcm[ig], lcm[ih]):
            break
        low, high = gcm[ig], lcm[ih]
    return most / (2 * n)


@lru_cache
def _null(n: int) -> NDArray[np.float64]:
    """Return the dips of `SIMULATIONS` uniform samples of n, sorted; the seed is fixed."""
    draws = np.random.default_rng([n, 1985]).random((SIMULATIONS, n))
    return np.sort([dip(sample) for sample in draws.tolist()])


def dip_p(statistic: float, n: int) -> float:
    """Return the probability that n uniform values have a dip as large as `statistic`."""
    null = _null(n)
    beyond = SIMULATIONS - int(np.searchsorted(null, statistic * (1 - 1e-12)))
    return (1 + beyond) / (1 + SIMULATIONS)


def triples(values: Sequence[float]) -> tuple[float, float]:
    """Return the standardized statistic of the triples test, and its two-sided p-value.

    A positive statistic means skewed to the right. If no triple is skewed the result is (0, 1).

    Raises:
        ValueError: fewer than 4 values.
    """
    x = np.sort(np.asarray(values, dtype=np.float64))
    n = len(x)
    if n < 4:
        raise ValueError(f"{n} values: the triples test needs at least 4")
    # A triple that is symmetric up to the rounding of a sum counts as symmetric.
    rounding = 1e-12 * float(np.abs(x - np.median(x)).max())
    a, b = np.triu_indices(n, 1)  # pairs x_a <= x_b
    low, high = x[a], x[b]

    def below(limit: NDArray[np.float64]) -> NDArray[np.int64]:
        return np.searchsorted(x, limit - rounding, "left")

    def above(limit: NDArray[np.float64]) -> NDArray[np.int64]:
        return n - np.searchsorted(x, limit + rounding, "right")

    # For each pair: number of third values that make a right-skewed triple, less left-skewed ones.
    middle = (low + high) / 2  # the third value lies between the pair
    right, left = below(middle) - (a + 1), above(middle) - (n - b)
    right, left = right.clip(0, b - a - 1), left.clip(0, b - a - 1)
    balance = right - left
    skewed = int((right + left).sum())  # each skewed triple is counted once
    beyond = 2 * high - low  # the third value is the highest
    balance += above(beyond).clip(max=n - 1 - b) - (below(beyond) - (b + 1)).clip(min=0)
    beyond = 2 * low - high  # the third value is the lowest
    balance += (above(beyond) - (n - a)).clip(min=0) - below(beyond).clip(max=a)

    of_pairs = balance / 3  # sums of f, which is 1/3, -1/3 or 0
    of_ones = (np.bincount(a, of_pairs, n) + np.bincount(b, of_pairs, n)) / 2
    all_triples = math.comb(n, 3)
    eta = float(of_ones.sum()) / 3 / all_triples
    first = float(((of_ones / math.comb(n - 1, 2) - eta) ** 2).mean())
    second = float(((of_pairs / (n - 2) - eta) ** 2).mean())
    third = skewed / 9 / all_triples - eta**2
    variance = (3 * math.comb(n - 3, 2) * first + 3 * (n - 3) * second + third) / all_triples
    if variance <= 0:
        return 0.0, 1.0
    z = eta / math.sqrt(variance)
    return z, math.erfc(abs(z) / math.sqrt(2))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for multiple tests (Holm 1979): reject those below the level.

    >>> holm([0.01, 0.5, 0.02])
    [0.03, 0.5, 0.04]
    """
    adjusted = [0.0] * len(p_values)
    worst = 0.0
    for place, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        worst = max(worst, min(1.0, (len(p_values) - place) * p_values[i]))
        adjusted[i] = worst
    return adjusted
