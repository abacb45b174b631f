"""Intervals, ranks and tests beside those of statsmodels, an independent implementation."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from builders import summary, write
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.descriptivestats import sign_test
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import DescrStatsW

from gcbench.profile.bandwidth import tables
from gcbench.report.compare import ComparisonRow, rows
from gcbench.results.reader import load
from gcbench.stats import confidence, intervals, ranks

DRAWS = np.random.default_rng(0).normal(0.7, 0.02, (3, 30))


def students(values: np.ndarray, level: float = 0.05) -> tuple[float, float]:
    low, high = DescrStatsW(values).tconfint_mean(alpha=level)
    return float(low), float(high)


@pytest.mark.parametrize("level", [0.05, 0.01, 0.05 / 276, 1e-6])
@pytest.mark.parametrize("n", [2, 3, 5, 30])
def test_an_interval_of_a_mean(n: int, level: float) -> None:
    values = DRAWS[0, :n]
    mean, half = values.mean(), intervals.half_width(values.std(ddof=1), n, level)
    assert (mean - half, mean + half) == pytest.approx(students(values, level))
    result = confidence.interval(values.tolist(), "seeds", 1 - level)
    assert (result.low, result.high) == pytest.approx(students(values, level))


def test_one_value_has_no_interval() -> None:
    assert math.isnan(intervals.half_width(math.nan, 1))
    assert confidence.interval([1.0], "seeds").high == math.inf


def compared(folder: Path, **over: float | None) -> tuple[ComparisonRow, np.ndarray, np.ndarray]:
    """Return the row of five seeds of a method beside five of fp32, and the values of both."""
    metric = "test_loss" if "test_accuracy" in over else "test_accuracy"
    runs = [
        summary(name, seed, **{metric: value, **over})
        for name, values in (("none", DRAWS[1, :5]), ("x", DRAWS[2, :5]))
        for seed, value in enumerate(values)
    ]
    none, row = rows(load([write(folder, *runs)]))
    assert none.is_baseline
    return row, DRAWS[1, :5], DRAWS[2, :5]


def test_losses_in_a_table(tmp_path: Path) -> None:
    """The interval of the mean, and that of the difference, which is paired by seed."""
    row, none, x = compared(tmp_path, test_accuracy=None)
    assert row.mean is not None
    low, high = row.mean - row.half_interval, row.mean + row.half_interval
    assert (low, high) == pytest.approx(students(x))
    assert row.interval == pytest.approx(students(x - none))


def test_accuracies_in_a_table(tmp_path: Path) -> None:
    """The seeds' part of the interval; with the test set's it is wider."""
    row, none, x = compared(tmp_path, test_examples=5000)
    low, high = students(x - none)
    assert row.interval is not None
    noise = intervals.resolution((x - none).mean(), 5000.0)
    assert noise > 0
    assert row.interval[1] - row.interval[0] == pytest.approx(math.hypot(high - low, 2 * noise))
    assert sum(row.interval) == pytest.approx(low + high)


@pytest.mark.parametrize("examples", [360, 5000, 10_000])
def test_the_resolution_has_mcnemars_verdict(examples: int) -> None:
    """`changed` examples that one model alone classifies correctly, and none the other way."""
    verdicts = []
    for changed in range(1, 15):
        counts = [[examples - changed, changed], [0, 0]]
        difference = changed / examples
        verdicts.append(difference > intervals.resolution(difference, float(examples)))
        assert verdicts[-1] == (mcnemar(counts, exact=True).pvalue < 0.05), changed
    assert {*verdicts} == {True, False}


def test_ranks_have_bonferronis_verdicts() -> None:
    """200 tiers of four rows and six seeds: paired t-tests of all pairs together, 5 %."""
    draw = np.random.default_rng(1)
    decided = []
    for _ in range(200):
        values = pd.DataFrame(draw.normal([0.0, 0.5, 1.0, 3.0], 0.4, (6, 4)))
        pairs = [*itertools.combinations(values, 2)]
        tests = [DescrStatsW(values[a] - values[b]).ttest_mean(0.0) for a, b in pairs]
        rejected = multipletests([one[1] for one in tests], 0.05, "bonferroni")[0]
        expected = np.sign([one[0] for one in tests]) * rejected
        result = ranks.pairwise(values, 1)
        assert [result.loc[a, b] for a, b in pairs] == expected.tolist()
        decided.append(rejected.mean())
    assert 0.2 < np.mean(decided) < 0.8


def test_the_sign_test_of_times() -> None:
    """statsmodels' test is two-sided, so it has twice the smaller of the two p-values."""
    draw = np.random.default_rng(2)
    for shift in np.linspace(-1, 1, 21):
        ours, plain = draw.normal(size=20), draw.normal(shift, size=20)
        sides = tables.p_value(ours, plain), tables.p_value(plain, ours)
        _, expected = sign_test(plain - ours)
        assert min(1.0, 2 * min(sides)) == pytest.approx(expected)
