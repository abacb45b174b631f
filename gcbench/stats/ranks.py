"""Ranks within a tier and the Pareto front, by paired confidence intervals."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from gcbench.stats.intervals import half_interval

if TYPE_CHECKING:
    from pandas import DataFrame, Series

LEAST_SEEDS = 5
"""Common seeds below which no ranking is shown."""


BLOCK = 512
"""Number of rows with which one row is compared at a time."""


STRONGEST = 32
"""Number of the best rows with which many rows are compared at a time: they beat most of them."""


def on_front(runs: DataFrame, configurations: DataFrame) -> Series[bool]:
    """Return whether no other line of equal `budget` beats this one.

    With two or more common seeds, a line beats another one if it is better, by the 95 % interval of
    the paired difference, with no more bytes. Otherwise it must be as good in mean and bytes, and
    better in one of them. Lines with a diverged seed are left out.
    """
    import numpy as np
    import pandas as pd

    front = (configurations["diverged"] == 0).to_numpy(copy=True)
    values = runs.pivot_table(index="configuration", columns="seed", values="value")
    table = values.reindex(configurations.index).to_numpy()
    means, signs = configurations["mean"].to_numpy(), configurations["sign"].to_numpy()
    sizes = configurations["payload_bytes_step"].to_numpy()
    examples = configurations["examples"].to_numpy()
    budgets = configurations["budget"].reset_index(drop=True)[front]
    for positions in budgets.groupby(budgets).groups.values():
        if len(positions) > 1:
            rows = np.asarray(positions)
            sign = float(signs[rows[0]])
            front[rows] = ~_beaten(
                table[rows] * sign, means[rows] * sign, sizes[rows], examples[rows]
            )
    return pd.Series(front, index=configurations.index)


def _beaten(values: Any, means: Any, sizes: Any, examples: Any) -> Any:
    """Return whether another row beats each row; see `on_front`.

    `values`: float64, shape (rows, seeds), higher is better, NaN where a row has not the seed;
    `means`, `sizes` (bytes per step) and `examples`: shape (rows,).

    Rows with the same seeds form a group. The rows of a group that may beat a row have no more
    bytes and a higher mean over the common seeds; they are tried with the highest mean first.
    """
    import numpy as np

    beaten = np.zeros(len(values), dtype=bool)
    groups: dict[bytes, list[int]] = {}
    for i, mask in enumerate(np.isfinite(values)):
        groups.setdefault(mask.tobytes(), []).append(i)
    members = [(np.frombuffer(key, dtype=bool), np.array(shown)) for key, shown in groups.items()]
    for seeds, rivals in members:
        for others, shown in members:
            common = seeds & others
            if common.sum() < 2:
                beaten[shown] |= _dominated(means, sizes, shown, rivals)
                continue
            columns = np.flatnonzero(common)
            rivals = rivals[
                np.argsort(-values[np.ix_(rivals, columns)].mean(axis=1), kind="stable")
            ]
            theirs = values[np.ix_(rivals, columns)]
            strength, weight = theirs.mean(axis=1), sizes[rivals]
            rest, top = shown[~beaten[shown]], slice(0, STRONGEST)
            count = max(1, BLOCK * BLOCK // (STRONGEST * len(columns)))
            for part in (rest[start : start + count] for start in range(0, len(rest), count)):
                leads = theirs[top] - values[np.ix_(part, columns)][:, np.newaxis]
                lead, sd = leads.mean(axis=2), leads.std(axis=2, ddof=1)
                half = half_interval(sd, len(columns), lead, examples[part, np.newaxis])
                lighter = weight[top] <= sizes[part, np.newaxis]
                beaten[part] = ((lead > half) & lighter).any(axis=1)
            for i in shown[~beaten[shown]]:
                mine = values[i, columns]
                ahead = np.searchsorted(-strength, -mine.mean())
                for start in range(0, int(ahead), BLOCK):
                    part = slice(start, min(start + BLOCK, int(ahead)))
                    leads = theirs[part][weight[part] <= sizes[i]] - mine
                    lead, sd = leads.mean(axis=1), leads.std(axis=1, ddof=1)
                    half = half_interval(sd, len(columns), lead, examples[i])
                    if (lead > half).any():
                        beaten[i] = True
                        break
    return beaten


def _dominated(means: Any, sizes: Any, indices: Any, rivals: Any) -> Any:
    """Return whether a rival is as good as each row in mean and bytes, and better in one."""
    import numpy as np

    order = rivals[np.lexsort((-means[rivals], sizes[rivals]))]
    weights, best = sizes[order], np.maximum.accumulate(means[order])

    def best_of(place: Any) -> Any:
        return np.where(place > 0, best[np.maximum(place - 1, 0)], -math.inf)

    lighter = best_of(np.searchsorted(weights, sizes[indices], side="left"))
    as_light = best_of(np.searchsorted(weights, sizes[indices], side="right"))
    return (lighter >= means[indices]) | (as_light > means[indices])


def pairwise(values: DataFrame, sign: int, examples: float = math.nan) -> DataFrame:
    """Return for each pair of rows of a tier which one is better.

    The result has the rows as lines and as columns: 1 where the line's row is better than the
    column's, -1 where it is worse, 0 where the two are indistinguishable, NaN where fewer than
    `LEAST_SEEDS` seeds are common. Rows with fewer seeds are left out.

    `values`: the metric, one column per row and one line per seed, NaN if missing. `sign`: 1
    where a higher metric is better, else -1; `examples` as for `resolution`. A row is better if the
    confidence interval of its paired difference over the common seeds excludes zero, at 95 % for
    all pairs of rows together (Bonferroni).
    """
    import pandas as pd

    ranked = values.loc[:, values.count() >= LEAST_SEEDS]
    count = ranked.shape[1]
    level = 0.05 / max(1, count * (count - 1) // 2)
    result = {}
    for label in ranked:
        leads = sign * ranked.sub(ranked[label], axis="index")
        n, lead = leads.count(), leads.mean()
        width = half_interval(leads.std(), n, lead, examples, level)
        better = (lead > width).astype(int) - (lead < -width).astype(int)
        result[label] = better.where(n >= LEAST_SEEDS)
    return pd.DataFrame(result, index=ranked.columns)


def places(values: DataFrame, sign: int, examples: float = math.nan) -> list[str]:
    """Return the possible places of each column, a row of a tier: "1", or "2-4".

    The first place is 1 + the number of better rows, the last is the number of rows minus the
    number of worse ones, by `pairwise`, which takes the same arguments; so indistinguishable rows
    have overlapping places. "-" if a row has fewer than `LEAST_SEEDS` seeds, in all or in common
    with another row.
    """
    better = pairwise(values, sign, examples)
    result = dict.fromkeys(values, "-")
    for label, others in better.items():
        first, last = 1 + (others > 0).sum(), len(better) - (others < 0).sum()
        if len(better) > 1 and others.notna().all():
            result[label] = f"{first}" if first == last else f"{first}-{last}"
    return list(result.values())
