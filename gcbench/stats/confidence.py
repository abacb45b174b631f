"""Intervals of means of independent values, and of sums with known variances.

`interval` is Student's: it assumes that means of the values are normal. `bernstein` and the lower
limit of `nonnegative` assume only that the values are independent. The checks of `gcbench verify`
and the claims of `gcbench bounds` use these functions alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from gcbench.stats.intervals import quantile

LEVEL = 0.95
"""Coverage of the interval of an observation or an assumption."""
ERROR = 1e-6
"""Probability with which a theorem's interval misses the truth."""
STRICT = 1 - ERROR
LEAST_SEEDS = 3
"""From this number of seeds on, intervals are over seeds; with fewer, Student's t is too wide."""
BATCHES = 10
"""Batches of consecutive observations that count as independent values, with fewer seeds."""
EVERY = "observations"
"""`Interval.over` where every single observation is held to the bound."""


class Interval(NamedTuple):
    """A mean and its limits, from `n` independent values of the kind `over`."""

    mean: float
    low: float
    high: float
    n: int
    over: str

    def exponential(self) -> Interval:
        """Return the interval of the exponential."""
        low, high = math.exp(self.low), math.exp(self.high) if self.high < 700 else math.inf
        return self._replace(mean=math.exp(self.mean), low=low, high=high)

    def squared(self) -> Interval:
        """Return the interval of the square, of a value that is not negative."""
        low = max(0.0, self.low)
        return self._replace(mean=self.mean**2, low=low**2, high=self.high**2)

    def distance(self, point: float = 0.0) -> Interval:
        """Return the interval of the distance from `point`."""
        low, high = self.low - point, self.high - point
        least = 0.0 if low <= 0 <= high else min(abs(low), abs(high))
        far = max(abs(low), abs(high))
        return self._replace(mean=abs(self.mean - point), low=least, high=far)


def always(worst: float, n: int) -> Interval:
    """Return the interval for n observations that must all obey the bound: the worst of them."""
    return Interval(worst, worst, worst, n, EVERY)


def worst(values: Sequence[float | None]) -> Interval:
    """Return `always` of the largest observation; its values are NaN if any is NaN or None."""
    numbers = [*map(number, values)]
    return always(math.nan if any(map(math.isnan, numbers)) else max(numbers), len(numbers))


def number(value: float | None) -> float:
    """Return a number of a record as a float: records hold None in place of NaN."""
    return math.nan if value is None else value


def magnitude(deviation: float, half: float, n: int, over: str, allowed: float) -> Interval:
    """Return the interval of |deviation|, given the half width of the deviation's own interval.

    The lower limit is reduced by `allowed`, a deviation that counts as none, and is at least 0.
    `n`, `over`: see `Interval`.
    """
    size = abs(deviation)
    return Interval(size, max(0.0, size - half - allowed), size + half, n, over)


def interval(values: Sequence[float], over: str, level: float = LEVEL) -> Interval:
    """Return the mean of independent values with limits by Student's t; infinite for one value."""
    n = len(values)
    mean = math.fsum(values) / n if all(map(math.isfinite, values)) else math.nan
    if n == 1 or math.isnan(mean):
        return Interval(mean, -math.inf, math.inf, n, over)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    half = quantile(n - 1, 1 - level) * deviation / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n, over)


def against(values: Sequence[float], others: Sequence[float], over: str) -> Interval:
    """Return the relative deviation of the mean of `values` from that of `others`.

    The values are paired, and the pairs independent: limits are by Student's t of the differences,
    with coverage `STRICT`.
    """
    gap = interval([a - b for a, b in zip(values, others, strict=True)], over, STRICT)
    scale = interval(others, over).mean
    return gap._replace(mean=gap.mean / scale, low=gap.low / scale, high=gap.high / scale)


def nonnegative(values: Sequence[float], over: str) -> Interval:
    """Return the mean of independent, nonnegative values; the lower limit assumes nothing else.

    The lower limit is by betting (e-values). If the mean is at most m, then for each share l in
    [0, 1] the product over t of 1 + l (x_t / m - 1) is nonnegative and has an expectation of at
    most 1, so it exceeds 1 / `ERROR` with probability `ERROR` at most (Markov's inequality),
    however rare large values are. The limit is the largest m for which the average of such products
    over several l exceeds that. The upper limit, by which no claim fails, is Student's.
    """
    student = interval(values, over, STRICT)
    return student._replace(low=_bet(student, values, ERROR))


def bounded(values: Sequence[float], over: str) -> Interval:
    """Return the mean of independent, nonnegative values, with the larger of two lower limits.

    Student's is tight for values of similar size; that of `nonnegative` detects a run that has
    diverged even if its values are orders of magnitude apart. Each has half of `ERROR`.
    """
    student = interval(values, over, 1 - ERROR / 2)
    return student._replace(low=max(student.low, _bet(student, values, ERROR / 2)))


def _bet(student: Interval, values: Sequence[float], error: float) -> float:
    """Return the lower limit of the mean by betting, as explained in `nonnegative`."""
    if not math.isfinite(student.mean) or student.mean <= 0:
        return student.low
    shares = [k / 16 for k in range(1, 16)]

    def wins(m: float) -> bool:
        gains = [math.fsum(math.log1p(s * (x / m - 1)) for x in values) for s in shares]
        top = max(gains)
        mixture = top + math.log(math.fsum(math.exp(g - top) for g in gains) / len(shares))
        return mixture >= -math.log(error)

    low, high = 0.0, student.mean
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if wins(middle) else (low, middle)
    return low


def bernstein(variance: float, largest: float, error: float) -> float:
    """Return x such that a sum of independent terms of mean 0 is beyond +-x with P <= `error`.

    `variance` is that of the sum, `largest` a bound on the magnitude of a term: Bernstein's
    inequality, P <= 2 exp(-x^2 / (2 (variance + largest x / 3))), solved for x.
    """
    log = math.log(2 / error)
    third = largest * log / 3
    return third + math.hypot(third, math.sqrt(2 * variance * log))


Pairs = Sequence[tuple[float, float]]
"""Numerator and denominator at each observation, in the order of steps."""


def ratio(series: Sequence[Pairs]) -> Interval:
    """Return the ratio of sums, of numerators over denominators, for one series per seed.

    With at least `LEAST_SEEDS` seeds the ratio of each seed is an independent value. With fewer,
    each series is cut into up to `BATCHES` batches of consecutive observations, whose ratios are
    the values (the method of batch means, which takes batches for independent).
    """
    if len(series) >= LEAST_SEEDS:
        return interval([_ratio(pairs) for pairs in series], "seeds")
    values = []
    for pairs in series:
        count = min(BATCHES, len(pairs))
        edges = [len(pairs) * k // count for k in range(count + 1)]
        values += [_ratio(pairs[a:b]) for a, b in itertools.pairwise(edges)]
    return interval(values, "batches")


def mean(series: Sequence[Sequence[float]]) -> Interval:
    """Return the mean over observations, for one series per seed; see `ratio`."""
    return ratio([[(value, 1.0) for value in values] for values in series])


def _ratio(pairs: Pairs) -> float:
    below = math.fsum(pair[1] for pair in pairs)
    return math.fsum(pair[0] for pair in pairs) / below if below else math.nan
