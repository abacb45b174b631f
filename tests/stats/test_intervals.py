"""Student's t and the front, beside scipy and a plain double loop."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from gcbench.stats import intervals, ranks


@pytest.mark.parametrize("level", [0.5, 0.05, 0.01, 1e-5])
def test_quantiles_are_scipys(level: float) -> None:
    for freedom in (1, 2, 3, 4, 5, 9, 30, 101, 1000):
        expected = stats.t.ppf(1 - level / 2, freedom)
        assert intervals.quantile(freedom, level) == pytest.approx(expected, rel=1e-9)
    assert math.isnan(intervals.quantile(0, level))
    assert math.isnan(intervals.quantile(-1, level))


def plain_front(values: np.ndarray, sizes: np.ndarray) -> list[bool]:
    means, result = np.nanmean(values, axis=1), []
    for i, mine in enumerate(values):
        beaten = False
        for j, theirs in enumerate(values):
            lead = (theirs - mine)[np.isfinite(theirs - mine)]
            if i == j or sizes[j] > sizes[i]:
                continue
            if len(lead) > 1:
                half = intervals.half_interval(lead.std(ddof=1), len(lead), lead.mean(), 1000.0)
                beaten |= bool(lead.mean() > half)
            else:
                beaten |= means[j] >= means[i] and (means[j] > means[i] or sizes[j] < sizes[i])
        result.append(not beaten)
    return result


@pytest.mark.parametrize("missing", [0.0, 0.4])
@pytest.mark.parametrize("seeds", [1, 2, 4])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_front_is_that_of_a_double_loop(missing: float, seeds: int, sign: int) -> None:
    draw = np.random.default_rng(seeds)
    values = draw.normal(0.7, 0.05, (40, 1)) + draw.normal(0, 0.01, (40, seeds))
    values[:, 1:][draw.random((40, seeds - 1)) < missing] = np.nan
    sizes = draw.integers(1, 12, 40).astype(float)
    runs = [
        {"configuration": i, "seed": s, "value": sign * v}
        for i, row in enumerate(values)
        for s, v in enumerate(row)
        if np.isfinite(v)
    ]
    table = pd.DataFrame(
        {
            "diverged": 0,
            "budget": "one",
            "sign": sign,
            "mean": sign * np.nanmean(values, axis=1),
            "payload_bytes_step": sizes,
            "examples": 1000.0,
        }
    )
    expected = plain_front(values, sizes)
    assert ranks.on_front(pd.DataFrame(runs), table).tolist() == expected
    assert 0 < sum(expected) < 40
