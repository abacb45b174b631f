"""Verdicts on what a paper says of gradients: holds, does not hold, or cannot tell at this budget.

A claim is an inequality. What is measured has an interval, of independent values (seeds); the claim
holds if all of the interval is on its side, does not hold if none is, and cannot be told otherwise.
One value has no interval, and a value that is not finite says nothing: neither tells. What is
counted exactly (bytes) is one value whose limits are itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from gcbench.reporting.analysis import Row, Shown, Table
from gcbench.studies.bounds.claims import Interval, interval
from gcbench.training.configuration import finite

HOLDS, FAILS, OPEN = "holds", "does not hold", "cannot tell"
VERDICTS = (HOLDS, FAILS, OPEN)
SEEDS = "seeds"
LIMITS = "Low, high: 95 % limits by Student's t over the seeds."


class Claim(NamedTuple):
    """One claim: what is said, who says it where, and on which side of `bound` it is true."""

    claim: str
    source: str
    bound: float
    above: bool
    """Whether values of at least `bound` bear it out; otherwise those of at most `bound`."""


def over_seeds(values: Sequence[float]) -> Interval:
    """Return the mean of one value a seed, with its 95 % limits by Student's t."""
    return interval(values, SEEDS)


def geometric(logs: Sequence[float]) -> Interval:
    """Return the geometric mean of one ratio a seed, from their logarithms, with its limits."""
    found = over_seeds(logs)
    return found.exponential() if math.isfinite(found.mean) else found


def by_seed(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each seed, in the order in which seeds come."""
    runs: dict[Any, list[Row]] = {}
    for one in rows:
        runs.setdefault(one["seed"], []).append(one)
    return list(runs.values())


def exactly(value: float, n: int, over: str) -> Interval:
    """Return a value that is counted and not estimated, of `n` cases."""
    return Interval(value, value, value, n, over)


def bracket(lows: Sequence[float], values: Sequence[float], highs: Sequence[float]) -> Interval:
    """Return the mean of `values`, one a seed, each known only to lie between a low and a high.

    Limits are the lower one of the lows and the upper one of the highs, by Student's t.
    """
    low, high = over_seeds(lows).low, over_seeds(highs).high
    return over_seeds(values)._replace(low=low, high=high)


def judge(claim: Claim, found: Interval) -> str:
    """Return one of `VERDICTS`; limits that are no numbers are on neither side."""
    if claim.above:
        inside, outside = found.low >= claim.bound, found.high < claim.bound
    else:
        inside, outside = found.high <= claim.bound, found.low > claim.bound
    return HOLDS if inside else FAILS if outside else OPEN


def row(claim: Claim, found: Interval, **more: str) -> Row:
    """Return the row of a judged claim; `more` are fields that say what it is of."""
    return {
        "claim": claim.claim,
        "source": claim.source,
        **more,
        "holds_if": f"{'at least' if claim.above else 'at most'} {claim.bound:g}",
        "measured": finite(found.mean),
        "low": finite(found.low),
        "high": finite(found.high),
        "n": found.n,
        "over": found.over,
        "verdict": judge(claim, found),
    }


def table(rows: Sequence[Row], of: str = "", notes: Sequence[str] = ()) -> Table:
    """Return the table of verdicts; `of` is a field that says what a row is of, if there is one."""
    which = [Shown(field=of, heading=of)] if of else []
    return Table(
        name="claims",
        title="What the paper says, and what is seen here",
        which=1 + len(which),
        shown=[
            Shown(field="claim", heading="claim"),
            *which,
            Shown(field="holds_if", heading="holds if"),
            Shown(field="measured", heading="measured"),
            Shown(field="low", heading="low"),
            Shown(field="high", heading="high"),
            Shown(field="n", heading="n"),
            Shown(field="over", heading="of"),
            Shown(field="verdict", heading="verdict"),
        ],
        notes=[*([LIMITS] if any(row["over"] == SEEDS for row in rows) else []), *notes],
        rows=[*rows],
    )


def told(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for each verdict."""
    said = []
    for one in rows:
        numbers = [one[field] for field in ("measured", "low", "high")]
        shown = ["-" if value is None else f"{value:.3g}" for value in numbers]
        said.append(
            f"{str(one['verdict']).capitalize()}: {one['claim']} ({one['source']}): {shown[0]} "
            f"({shown[1]} to {shown[2]}), n = {one['n']} {one['over']}; it holds if "
            f"{one['holds_if']}."
        )
    return said
