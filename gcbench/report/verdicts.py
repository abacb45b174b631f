"""Verdicts on what a paper says of gradients: holds, does not hold, or cannot tell at this budget.

A claim is an inequality. What is measured has a 95 % interval, over independent values (seeds). The
claim holds if the whole interval satisfies it, does not hold if no part of it does, and otherwise
the verdict is "cannot tell". So it is for a single value, which has no interval, and for values
that are not finite. What is counted exactly (bytes) has an interval of length 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from gcbench.core.values import finite
from gcbench.report.analysis import Row, Table, shown
from gcbench.stats.confidence import Interval, interval

HOLDS, FAILS, OPEN = "holds", "does not hold", "cannot tell"
VERDICTS = (HOLDS, FAILS, OPEN)
SEEDS = "seeds"
LIMITS = "Low, high: 95 % limits by Student's t over the seeds."


class Claim(NamedTuple):
    """One claim: its text, its source, and on which side of `bound` it is true."""

    claim: str
    source: str
    bound: float
    above: bool
    """True: it holds for values of at least `bound`; False: for values of at most `bound`."""


def over_seeds(values: Sequence[float]) -> Interval:
    """Return the mean of one value per seed, with its 95 % limits by Student's t."""
    return interval(values, SEEDS)


def geometric(logs: Sequence[float]) -> Interval:
    """Return the geometric mean of one ratio per seed, from their logarithms, with its limits."""
    logarithm = over_seeds(logs)
    return logarithm.exponential() if math.isfinite(logarithm.mean) else logarithm


def by_seed(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each seed, in the order in which seeds come."""
    runs: dict[Any, list[Row]] = {}
    for one in rows:
        runs.setdefault(one["seed"], []).append(one)
    return list(runs.values())


def exactly(value: float, n: int, over: str) -> Interval:
    """Return the interval of a value that is counted, not estimated: its limits are the value.

    `n` and `over`: how many cases, and of what, it is about.
    """
    return Interval(value, value, value, n, over)


def bracket(lows: Sequence[float], values: Sequence[float], highs: Sequence[float]) -> Interval:
    """Return the interval of a mean over seeds, where each seed's value is known within bounds.

    `values`, one per seed, lie between `lows` and `highs`. The limits are the lower limit of the
    mean of the lows and the upper limit of the mean of the highs, by Student's t.
    """
    low, high = over_seeds(lows).low, over_seeds(highs).high
    return over_seeds(values)._replace(low=low, high=high)


def judge(claim: Claim, measured: Interval) -> str:
    """Return the verdict on a claim, one of `VERDICTS`; with limits that are NaN, OPEN."""
    if claim.above:
        inside, outside = measured.low >= claim.bound, measured.high < claim.bound
    else:
        inside, outside = measured.high <= claim.bound, measured.low > claim.bound
    return HOLDS if inside else FAILS if outside else OPEN


def row(claim: Claim, measured: Interval, **more: str) -> Row:
    """Return the table row of a claim with its verdict; `more` are further fields of the row."""
    return {
        "claim": claim.claim,
        "source": claim.source,
        **more,
        "holds_if": f"{'at least' if claim.above else 'at most'} {claim.bound:g}",
        "measured": finite(measured.mean),
        "low": finite(measured.low),
        "high": finite(measured.high),
        "n": measured.n,
        "over": measured.over,
        "verdict": judge(claim, measured),
    }


def table(rows: Sequence[Row], of: str = "", notes: Sequence[str] = ()) -> Table:
    """Return the table of verdicts.

    `of`: a field that distinguishes rows of the same claim, e.g. "method"; `notes` follow it.
    """
    which = ["claim", of] if of else ["claim"]
    plain = ("measured", "low", "high", "n")
    return Table(
        name="claims",
        title="What the paper says, and what is seen here",
        which=len(which),
        shown=shown(
            {
                **{field: field for field in which},
                "holds_if": "holds if",
                **{field: field for field in plain},
                "over": "of",
                "verdict": "verdict",
            }
        ),
        notes=[*([LIMITS] if any(row["over"] == SEEDS for row in rows) else []), *notes],
        rows=[*rows],
    )


def sentences(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for each row of `table`, with its verdict and numbers."""
    lines = []
    for one in rows:
        numbers = [one[field] for field in ("measured", "low", "high")]
        mean, low, high = ("-" if value is None else f"{value:.3g}" for value in numbers)
        lines.append(
            f"{str(one['verdict']).capitalize()}: {one['claim']} ({one['source']}): {mean} "
            f"({low} to {high}), n = {one['n']} {one['over']}; it holds if "
            f"{one['holds_if']}."
        )
    return lines
