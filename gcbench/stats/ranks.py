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
"""Rows with which one row is compared at a time."""


def on_front(runs: DataFrame, configurations: DataFrame) -> Series[bool]:
    """Return whether no other line of equal `budget` beats this one.

    With two seeds or more in common, another one beats it if it is better, by the 95 % interval of
    the paired difference, for no more bytes. Else there is no interval: it beats it by being as
    good in mean and bytes, and better in one. Lines with a seed that diverged are not on the front,
    and keep no other line from it.
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
    for i, known in enumerate(np.isfinite(values)):
        groups.setdefault(known.tobytes(), []).append(i)
    members = [(np.frombuffer(key, dtype=bool), np.array(own)) for key, own in groups.items()]
    for seeds, rivals in members:
        for others, own in members:
            common = seeds & others
            if common.sum() < 2:
                beaten[own] |= _dominated(means, sizes, own, rivals)
                continue
            columns = np.flatnonzero(common)
            rivals = rivals[
                np.argsort(-values[np.ix_(rivals, columns)].mean(axis=1), kind="stable")
            ]
            theirs = values[np.ix_(rivals, columns)]
            strength, weight = theirs.mean(axis=1), sizes[rivals]
            for i in own[~beaten[own]]:
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


def _dominated(means: Any, sizes: Any, own: Any, rivals: Any) -> Any:
    """Return whether a rival is as good as each row in mean and bytes, and better in one."""
    import numpy as np

    order = rivals[np.lexsort((-means[rivals], sizes[rivals]))]
    weights, best = sizes[order], np.maximum.accumulate(means[order])

    def best_of(place: Any) -> Any:
        return np.where(place > 0, best[np.maximum(place - 1, 0)], -math.inf)

    lighter = best_of(np.searchsorted(weights, sizes[own], side="left"))
    as_light = best_of(np.searchsorted(weights, sizes[own], side="right"))
    return (lighter >= means[own]) | (as_light > means[own])


def pairwise(values: DataFrame, sign: int, examples: float = math.nan) -> DataFrame:
    """Return for each pair of rows of a tier which one is better.

    The result has the rows as lines and as columns: 1 where the line's row is better than the
    column's, -1 where it is worse, 0 where the two are indistinguishable, NaN where fewer than
    `LEAST_SEEDS` seeds are common. Rows with fewer seeds are left out.

    `values`: the metric, a column a row, a line a seed, NaN where a row does not have it. `sign`: 1
    where a higher metric is better, else -1; `examples` as for `resolution`. A row is better if the
    confidence interval of its paired difference over the common seeds excludes zero, at 95 % for
    all pairs of rows together (Bonferroni).
    """
    import pandas as pd

    ranked = values.loc[:, values.count() >= LEAST_SEEDS]
    count = ranked.shape[1]
    level = 0.05 / max(1, count * (count - 1) // 2)
    found = {}
    for own in ranked:
        leads = sign * ranked.sub(ranked[own], axis="index")
        n, lead = leads.count(), leads.mean()
        width = half_interval(leads.std(), n, lead, examples, level)
        better = (lead > width).astype(int) - (lead < -width).astype(int)
        found[own] = better.where(n >= LEAST_SEEDS)
    return pd.DataFrame(found, index=ranked.columns)


def places(values: DataFrame, sign: int, examples: float = math.nan) -> list[str]:
    """Return the places that each column, a row of a tier, may have: "1", or "2-4".

    The first is 1 + how many of the others are better, the last the number of rows less those that
    are worse, by `pairwise`, which takes the same arguments. So two rows whose difference is not
    known have places that overlap. A row with fewer than `LEAST_SEEDS` seeds has "-" and counts for
    no other; so has a row that has fewer in common with one of the others.
    """
    found = pairwise(values, sign, examples)
    found_places = dict.fromkeys(values, "-")
    for own, others in found.items():
        first, last = 1 + (others > 0).sum(), len(found) - (others < 0).sum()
        if len(found) > 1 and others.notna().all():
            found_places[own] = f"{first}" if first == last else f"{first}-{last}"
    return list(found_places.values())
