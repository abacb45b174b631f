"""What a paper claims, what was measured of it, and the one rule by which it is judged.

A bound is always an upper one, so that measured / bound is comparable: at most 1 holds.

* Claims about expectations come with a 95 % interval, Student's t over independent values (`over`
  says which): they hold if the whole interval lies within the bound, fail if the whole interval
  lies beyond it, and are undecided otherwise.
* Inequalities that hold for every single gradient are checked at every observation. They have no
  interval; one violation by more than float rounding (`ROUNDING`) fails them.
* A value that is not finite fails.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gcbench.measure.analysis import Row, finite

KINDS = {
    "theorem": "proved for what is measured here; only these count under --strict",
    "assumption": "a hypothesis that a proof needs",
    "observation": "what a paper saw, or expects, of gradients",
}
VERDICTS = ("holds", "fails", "undecided")
ROUNDING = 1e-6
"""Relative excess of a deterministic bound that is float32 rounding and no violation."""
LEVEL = 0.95
LEAST_SEEDS = 3
"""Seeds from which the interval is over seeds; of fewer, Student's t says next to nothing."""
BATCHES = 10
"""Batches of consecutive observations that serve as independent values where seeds are few."""
EVERY = "observations"
"""What `n` counts where each single one is held to the bound."""


@dataclass(frozen=True)
class Claim:
    """One claim: who says what, and what kind of statement it is."""

    name: str
    """`paper or property/which`, e.g. "signsgd/theorem-1"; for a property the method's word."""
    kind: str
    """A key of `KINDS`."""
    statement: str
    source: str


class Interval(NamedTuple):
    """A mean, its 95 % limits, how many independent values it is of, and of what kind they are."""

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
    """Return the worst of n observations, each of which is held to the bound."""
    return Interval(worst, worst, worst, n, EVERY)


def interval(values: Sequence[float], over: str) -> Interval:
    """Return the mean of independent values with its limits by Student's t; one value has none."""
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return Interval(mean, -math.inf, math.inf, n, over)
    from scipy.special import stdtrit

    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    half = float(stdtrit(n - 1, 0.5 + LEVEL / 2)) * deviation / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n, over)


Pairs = Sequence[tuple[float, float]]
"""Numerator and denominator at each observation, in the order of steps."""


def ratio(series: Sequence[Pairs]) -> Interval:
    """Return the sum of numerators over that of denominators, of one series a seed.

    From `LEAST_SEEDS` seeds on every seed's ratio is one independent value. With fewer, each series
    is cut into up to `BATCHES` batches of consecutive observations, whose ratios are the values:
    batch means, which take what lies further apart than a batch for independent.
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
    """Return the mean over observations, of one series a seed; see `ratio`."""
    return ratio([[(value, 1.0) for value in values] for values in series])


def _ratio(pairs: Pairs) -> float:
    below = math.fsum(pair[1] for pair in pairs)
    return math.fsum(pair[0] for pair in pairs) / below if below else math.nan


def over(a: float, b: float) -> float:
    """Return a / b, where 0 / 0 is 0: nothing keeps within a bound of nothing."""
    return a / b if b else (0.0 if a == 0 else math.inf)


def judge(found: Interval, bound: float) -> str:
    """Return the verdict: see the module's rule."""
    if not (math.isfinite(found.mean) and math.isfinite(bound)):
        return "fails"
    if found.over == EVERY:
        return "holds" if found.mean <= bound * (1 + ROUNDING) else "fails"
    if found.high <= bound:
        return "holds"
    return "fails" if found.low > bound else "undecided"


class Judged:
    """Verdicts as they come, and which claims do not apply to what, with the reason."""

    def __init__(self, wanted: Callable[[str], bool]) -> None:
        self.wanted = wanted
        self.rows: list[Row] = []
        self.absent: dict[tuple[str, str, str], list[str]] = {}

    def add(
        self,
        claim: Claim,
        place: str,
        found: Interval,
        bound: float,
        *,
        setting: str = "",
        why: str = "",
    ) -> None:
        """Judge a claim, if it is asked for."""
        if self.wanted(claim.name):
            self.rows.append(row(claim, place, setting, found, bound, why))

    def skip(self, name: str, place: str, why: str) -> None:
        """Note that a claim says nothing here; those of a group and reason are told together."""
        if self.wanted(name):
            group, _, which = name.partition("/")
            self.absent.setdefault((group, place, why), []).append(which)

    def sort(self) -> None:
        """Put rows of one place and one group of claims together, each where its first one is."""
        first: dict[str, int] = {}
        for row in self.rows:
            first.setdefault(str(row["claim"]).partition("/")[0], len(first))
        places = list(dict.fromkeys(row["place"] for row in self.rows))
        self.rows.sort(
            key=lambda row: (
                places.index(row["place"]),
                first[str(row["claim"]).partition("/")[0]],
            )
        )

    def record(self) -> dict[str, Any]:
        """Return all of it as JSON holds it."""
        absent = [[*key, which] for key, which in self.absent.items()]
        return {"rows": self.rows, "absent": absent}

    def take(self, record: Mapping[str, Any]) -> None:
        """Add what `record` returned."""
        self.rows += record["rows"]
        for group, place, why, which in record["absent"]:
            self.absent.setdefault((group, place, why), []).extend(which)

    def skipped(self) -> list[Row]:
        """Return the rows of what does not apply."""
        return [
            {
                "claim": f"{group}/",
                "place": place,
                "verdict": "not applicable",
                "why": why,
                "which": ", ".join(which),
            }
            for (group, place, why), which in self.absent.items()
        ]


def row(claim: Claim, place: str, setting: str, found: Interval, bound: float, why: str) -> Row:
    """Return the row of a judged claim; `why` is what a reader should know of this verdict."""
    exact = found.low == found.high

    def over_bound(value: float) -> float | None:
        return finite(value / bound) if bound else (0.0 if value == 0 else None)

    verdict = judge(found, bound)
    if verdict == "fails" and not math.isfinite(found.mean):
        why = "not finite" + (f"; {why}" if why else "")
    return {
        "claim": claim.name,
        "kind": claim.kind,
        "place": place,
        "setting": setting or None,
        "statement": claim.statement,
        "source": claim.source,
        "bound": finite(bound),
        "measured": finite(found.mean),
        "low": None if exact else finite(found.low),
        "high": None if exact else finite(found.high),
        "ratio": over_bound(found.mean),
        "ratio_low": None if exact else over_bound(found.low),
        "ratio_high": None if exact else over_bound(found.high),
        "n": found.n,
        "over": found.over,
        "verdict": verdict,
        "why": why or None,
    }
