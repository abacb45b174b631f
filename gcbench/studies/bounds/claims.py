"""Claims, measurements of them with intervals, and the one rule by which they are judged.

A bound is always an upper bound, so that measured / bound can be compared: at most 1 holds. It is
known before the run: it follows from the theorem, the problem, and the method's declarations, which
are tested by rows of their own.

* Claims about expectations come with an interval over independent values (`over` says which). They
  fail if the whole interval lies beyond the bound, hold if it lies within it, and are undecided
  otherwise. Some bounds are attained, so an interval may reach beyond by `ATTAINED` of the bound.
* Equalities (`Claim.equality`) are judged by the interval of the relative deviation. They fail if
  it excludes 0, and hold if half its width is at most the bound, so that a deviation as large as
  the bound would not have been missed; otherwise they are undecided.
* Inequalities that hold for every single observation are checked at each. They have no interval;
  one violation by more than float rounding (`ROUNDING`) fails them.
* A value that is not finite fails, as does a run that diverged.
* A theorem that holds with bound / measured above `LOOSE` "holds, loosely": a wrong code could
  hide below such a bound.

Error probability: the interval of a theorem misses the truth with probability `ERROR` = 1e-6. By
Bonferroni's inequality, in a run of up to 1,000 theorem rows, all of them true, any fails with
probability 1e-3 at most. Intervals by Bernstein's inequality, and the lower limit of `nonnegative`,
assume only independent draws; those by Student's t also assume that means of many values are
normal. Observations and assumptions have 95 % intervals.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gcbench.core.values import finite
from gcbench.report.analysis import Row

KINDS = {
    "theorem": "proved for what is measured here; only these count under --strict",
    "assumption": "a hypothesis that a proof needs",
    "observation": "what a paper saw, or expects, of gradients",
    "property": "an inequality that every gradient obeys, whatever a compressor does",
}
LOOSELY = "holds, loosely"
VERDICTS = ("holds", LOOSELY, "fails", "undecided")
LOOSE = 10.0
"""Slack, bound / measured, beyond which a theorem holds loosely."""
ATTAINED = 0.02
"""Share of a bound by which an interval may reach beyond it, as some bounds are attained."""
ROUNDING = 1e-6
"""A relative excess up to this over a deterministic bound is taken for float32 rounding."""
LEVEL = 0.95
"""Coverage of the interval of an observation or an assumption."""
ERROR = 1e-6
"""Probability with which a theorem's interval misses the truth."""
STRICT = 1 - ERROR
LEAST_SEEDS = 3
"""With at least so many seeds intervals are over seeds; with fewer Student's t is too wide."""
BATCHES = 10
"""With fewer seeds, so many batches of consecutive observations count as independent values."""
EVERY = "observations"
"""`Interval.over` where every single observation is held to the bound."""


@dataclass(frozen=True)
class Claim:
    """One claim: its name, its kind, what is measured, and its source."""

    name: str
    """Group and member: "signsgd/densities", or "unbiased/terngrad" for a claim on a method."""
    kind: str
    """A key of `KINDS`."""
    statement: str
    source: str
    equality: bool = False
    """Whether a deviation to either side is wrong; the bound is then the largest one allowed."""


class Interval(NamedTuple):
    """A mean and its limits; the number `n` of independent values, and what they are (`over`)."""

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


def interval(values: Sequence[float], over: str, level: float = LEVEL) -> Interval:
    """Return the mean of independent values with limits by Student's t; infinite for one value."""
    n = len(values)
    mean = math.fsum(values) / n if all(map(math.isfinite, values)) else math.nan
    if n == 1 or math.isnan(mean):
        return Interval(mean, -math.inf, math.inf, n, over)
    half = _student(n - 1, level) * _deviation(values, mean) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n, over)


def _student(degrees: int, level: float) -> float:
    from scipy.special import stdtrit

    return -float(stdtrit(degrees, (1 - level) / 2))


def _deviation(values: Sequence[float], mean: float) -> float:
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def against(values: Sequence[float], others: Sequence[float], over: str) -> Interval:
    """Return the relative deviation of the mean of `values` from that of `others`.

    The values are paired, and the pairs independent: limits are by Student's t of the differences,
    with coverage `STRICT`.
    """
    gaps = [a - b for a, b in zip(values, others, strict=True)]
    found, scale = interval(gaps, over, STRICT), interval(others, over).mean
    return found._replace(mean=found.mean / scale, low=found.low / scale, high=found.high / scale)


def nonnegative(values: Sequence[float], over: str) -> Interval:
    """Return the mean of independent, nonnegative values; the lower limit assumes nothing else.

    The lower limit is by betting (e-values). If the mean is at most m, then for each share l in
    [0, 1] the product over t of 1 + l (x_t / m - 1) is nonnegative and has an expectation of at
    most 1, so it exceeds 1 / `ERROR` with probability `ERROR` at most (Markov's inequality),
    however rare large values are. The limit is the largest m for which the average of such products
    over several l exceeds that. The upper limit, by which no claim fails, is Student's.
    """
    found = interval(values, over, STRICT)
    return found._replace(low=_bet(found, values, ERROR))


def bounded(values: Sequence[float], over: str) -> Interval:
    """Return the mean of independent, nonnegative values, with the larger of two lower limits.

    Student's is tight for values of similar size; that of `nonnegative` detects a run that has
    diverged even if its values are orders of magnitude apart. Each has half of `ERROR`.
    """
    found = interval(values, over, 1 - ERROR / 2)
    return found._replace(low=max(found.low, _bet(found, values, ERROR / 2)))


def _bet(found: Interval, values: Sequence[float], error: float) -> float:
    """Return the lower limit of the mean by betting, as explained in `nonnegative`."""
    if not math.isfinite(found.mean) or found.mean <= 0:
        return found.low
    shares = [k / 16 for k in range(1, 16)]

    def wins(m: float) -> bool:
        gains = [math.fsum(math.log1p(s * (x / m - 1)) for x in values) for s in shares]
        top = max(gains)
        mixture = top + math.log(math.fsum(math.exp(g - top) for g in gains) / len(shares))
        return mixture >= -math.log(error)

    low, high = 0.0, found.mean
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
    """Return the ratio of sums, of numerators over denominators, for one series a seed.

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
    """Return the mean over observations, for one series a seed; see `ratio`."""
    return ratio([[(value, 1.0) for value in values] for values in series])


def _ratio(pairs: Pairs) -> float:
    below = math.fsum(pair[1] for pair in pairs)
    return math.fsum(pair[0] for pair in pairs) / below if below else math.nan


def over(a: float, b: float) -> float:
    """Return a / b, with 0 / 0 = 0: a measured 0 is within a bound of 0."""
    return a / b if b else (0.0 if a == 0 else math.inf)


def judge(found: Interval, bound: float, *, equality: bool = False) -> str:
    """Return "holds", "fails" or "undecided" by the module's rule (`row` tells loose ones)."""
    if not (math.isfinite(found.mean) and math.isfinite(bound)):
        return "fails"
    if found.over == EVERY:
        return "holds" if found.mean <= bound * (1 + ROUNDING) else "fails"
    if equality:
        if found.low > 0:
            return "fails"
        return "holds" if found.high - found.mean <= bound else "undecided"
    if found.low > bound * (1 + ROUNDING):
        return "fails"
    return "holds" if found.high <= bound * (1 + ATTAINED) else "undecided"


class Unit(NamedTuple):
    """A unit of work: its key in the ledger, its place, the claims it judges, and a function."""

    key: str
    place: str
    claims: tuple[str, ...]
    judge: Callable[[Judged], None]


class Judged:
    """Collects verdicts, and which claims do not apply to which methods, with the reason."""

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
        ran: str = "",
    ) -> None:
        """Judge a claim, if it is to be tested; `ran` is the compressor that ran, if any."""
        if self.wanted(claim.name):
            self.rows.append(row(claim, place, setting, found, bound, why, ran))

    def refused(self, claim: Claim, place: str, setting: str, ran: str, error: str) -> None:
        """Record that a method refused a payload of its own: it fails, whatever is to be tested."""
        made = row(claim, place, setting, always(1.0, 1), 0.0, error, ran)
        self.rows.append(made)

    def skip(self, name: str, place: str, why: str) -> None:
        """Record that a claim does not apply; those with one group and reason share a row."""
        if self.wanted(name):
            group, _, which = name.partition("/")
            self.absent.setdefault((group, place, why), []).append(which)

    def sort(self) -> None:
        """Sort rows by place and by group of claims, both in the order of their first rows."""
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
        """Return all rows and reasons, as values that JSON can hold."""
        absent = [[*key, which] for key, which in self.absent.items()]
        return {"rows": self.rows, "absent": absent}

    def take(self, record: Mapping[str, Any]) -> None:
        """Add what `record` returned."""
        self.rows += record["rows"]
        for group, place, why, which in record["absent"]:
            self.absent.setdefault((group, place, why), []).extend(which)

    def skipped(self) -> list[Row]:
        """Return the rows of the claims that do not apply."""
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


def row(
    claim: Claim, place: str, setting: str, found: Interval, bound: float, why: str, ran: str
) -> Row:
    """Return the row of a claim with its verdict; `why` is a note on this verdict."""
    exact = found.low == found.high

    def over_bound(value: float) -> float | None:
        return finite(value / bound) if bound else (0.0 if value == 0 else None)

    verdict = judge(found, bound, equality=claim.equality)
    if not (math.isfinite(found.mean) and math.isfinite(bound)):
        why = "not finite" + (f"; {why}" if why else "")
    slack = None
    if claim.kind in ("theorem", "property") and not claim.equality and found.mean > 0:
        slack = finite(bound / found.mean)
    if verdict == "holds" and slack is not None and slack > LOOSE:
        verdict = LOOSELY
    return {
        "claim": claim.name,
        "kind": claim.kind,
        "place": place,
        "setting": setting or None,
        "ran": ran or None,
        "statement": claim.statement,
        "source": claim.source,
        "bound": finite(bound),
        "measured": finite(found.mean),
        "low": None if exact else finite(found.low),
        "high": None if exact else finite(found.high),
        "slack": slack,
        "ratio": over_bound(found.mean),
        "ratio_low": None if exact else over_bound(found.low),
        "ratio_high": None if exact else over_bound(found.high),
        "n": found.n,
        "over": found.over,
        "verdict": verdict,
        "why": why or None,
    }
