"""Confidence intervals of means over seeds, and of differences on one test set."""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist
from typing import Any


def half_width(sd: Any, n: Any, level: float = 0.05) -> Any:
    """Return half the width of a mean's confidence interval, by Student's t: 95 % at level 0.05.

    `sd`: sample standard deviation of `n` values, numbers or series of them; normal values are
    assumed. NaN where n is below two.
    """
    import numpy as np

    if isinstance(n, int | float | np.number):
        return quantile(int(n) - 1, level) * sd / np.sqrt(n)
    return n.map(lambda count: quantile(int(count) - 1, level)) * sd / np.sqrt(n)


@cache
def quantile(freedom: int, level: float) -> float:
    """Return the two-sided quantile t of Student's t: |T| > t with probability `level`.

    `freedom`: degrees of freedom; NaN below one. The probability for an integer number of degrees
    is a finite sum in the angle atan(t / sqrt(freedom)) (Abramowitz and Stegun, Handbook of
    Mathematical Functions, 26.7.3 and 26.7.4), which is solved by bisection. scipy.stats, which
    takes a second to import, gives the same numbers.
    """
    if freedom < 1:
        return math.nan
    low, high = 0.0, math.pi / 2
    while (angle := (low + high) / 2) not in (low, high):
        if _inside(angle, freedom) < 1 - level:
            low = angle
        else:
            high = angle
    return math.sqrt(freedom) * math.tan(angle)


def _inside(angle: float, freedom: int) -> float:
    """Return the probability that |T| is at most sqrt(freedom) tan(angle)."""
    cosine = math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


def resolution(difference: Any, examples: Any, level: float = 0.05) -> Any:
    """Return the half-width that sampling the test set adds to a difference of two accuracies.

    `difference`: of two accuracies on the same test set, fractions; `examples`: how many examples
    that set has, NaN where it is not known. Numbers or series of them. 0 where `examples` is NaN,
    and so for losses, whose variance per example is not stored.

    Both models see the same examples, so the difference is that of two paired proportions. It shows
    by how many examples they differ at least, k = n |difference|, all in one direction. Bonett and
    Price's adjusted Wald interval ("Adjusted Wald confidence interval for a difference of binomial
    proportions based on paired data", J. Educ. Behav. Stat. 37, 2012) has with these counts

        z sqrt((p - d^2) / (n + 2)),  p = (k + 2) / (n + 2),  d = k / (n + 2).

    If all seeds agree, at least six examples must differ for 95 %, as in the exact binomial test.
    Two models may also differ in both directions, which accuracies do not show, so this is a lower
    bound of the test set's noise.
    """
    import numpy as np

    size = examples + 2.0
    changed = abs(difference) * examples
    net = changed / size
    half = NormalDist().inv_cdf(1 - level / 2) * np.sqrt(((changed + 2) / size - net**2) / size)
    return (
        np.nan_to_num(half)
        if np.isscalar(half) or isinstance(half, np.ndarray)
        else half.fillna(0.0)
    )


def half_interval(sd: Any, pairs: Any, difference: Any, examples: Any, level: float = 0.05) -> Any:
    """Return half the width of the confidence interval of a mean paired difference.

    `sd`: sample standard deviation of the differences over `pairs` seeds; `difference`: their mean;
    `examples`: examples of the test set, see `resolution`. NaN where there are fewer than two
    pairs.

    The seeds' part (`half_width`) and the test set's (`resolution`) are independent, and all seeds
    share one test set: h = sqrt(h_seeds^2 + h_test^2). That is the method of variance estimates
    recovery (Zou and Donner, Stat. Med. 27, 2008): h is never below either part.
    """
    import numpy as np

    return np.hypot(half_width(sd, pairs, level), resolution(difference, examples, level))
