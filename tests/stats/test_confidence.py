"""Intervals of means, compared with scipy and with simulated values."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

from gcbench.stats import confidence
from gcbench.stats.confidence import interval, mean, ratio


def test_independent_values_are_seeds_or_batches_of_steps() -> None:
    series = [[(float(t), 2.0) for t in range(40)] for _ in range(3)]
    assert (ratio(series).n, ratio(series).over) == (3, "seeds")
    few = ratio(series[:1])
    assert (few.n, few.over) == (10, "batches")
    assert few.mean == pytest.approx(19.5 / 2)
    assert mean([[1.0, 3.0]]).n == 2
    # A ratio of sums and no mean of ratios.
    assert ratio([[(1.0, 1.0), (9.0, 3.0)]] * 3).mean == pytest.approx(2.5)


def test_bernstein_holds_for_rare_large_jumps_and_is_close_for_normal_sums() -> None:
    """4,000 sums of 50 terms that are 100 with probability 1/100, less their mean.

    At error 1e-2 at most 1 % may exceed it; more than 60 do with probability 1e-3 if 1 % did.
    """
    draw = np.random.default_rng(0)
    sums = (100.0 * (draw.random((4000, 50)) < 0.01) - 1).sum(1)
    limit = confidence.bernstein(50 * 99.0, 100.0, 1e-2)
    assert (np.abs(sums) > limit).sum() <= 60
    assert limit < 10 * sums.std()
    z = scipy.stats.norm.isf(0.5e-6)
    assert confidence.bernstein(1.0, 0.0, 1e-6) == pytest.approx(z, rel=0.15)


def test_betting_detects_divergence_and_tolerates_rare_large_values() -> None:
    """Of 30 draws of a code that keeps all with probability 1/100 most lose 1 % too much."""
    usual = [1 / 0.99] * 30  # mean 1 with the rare zero that has not come
    assert confidence.nonnegative(usual, "steps").low < 1 < interval(usual, "steps", 0.999).low
    wild = [10.0**k for k in range(1, 13)]  # Student's interval has 0 in it
    assert interval(wild, "copies", confidence.STRICT).low < 0
    assert confidence.bounded(wild, "copies").low > 1
    alike = [2.0 + 0.01 * (-1) ** k for k in range(40)]
    assert confidence.bounded(alike, "copies").low == pytest.approx(1.99, abs=0.005)
    assert confidence.nonnegative([0.0] * 5, "steps").low == 0.0


def test_paired_samples_differ_by_their_own_gap() -> None:
    a = [10.1, 20.3, 29.9, 40.2]
    result = confidence.against(a, [10.0, 20.0, 30.0, 40.0], "copies")
    assert result.mean == pytest.approx(0.5 / 100)
    gaps = np.array([0.1, 0.3, -0.1, 0.2])
    half = scipy.stats.t.isf(0.5e-6, 3) * gaps.std(ddof=1) / 2 / 25
    assert result.high - result.mean == pytest.approx(half)
