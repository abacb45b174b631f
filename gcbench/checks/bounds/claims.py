"""Claims, and the one rule by which their measurements are judged.

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

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from gcbench.core.values import finite
from gcbench.report.analysis import Row
from gcbench.stats.confidence import EVERY, Interval, always

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


@dataclass(frozen=True)
class Claim:
    """One claim: its name, its kind, what is measured, and its source."""

    name: str
    """Group and member: "signsgd/densities", or "unbiased/terngrad" for a claim about a method."""
    statement: str
    source: str
    kind: str = "theorem"
    """A key of `KINDS`."""
    equality: bool = False
    """Whether a deviation to either side is wrong; the bound is then the largest one allowed."""

    def of(self, method: str) -> Claim:
        """Return this claim about one method, named "group/method"."""
        return replace(self, name=f"{self.name}/{method}")


def over(a: float, b: float) -> float:
    """Return a / b, with 0 / 0 = 0: a measured 0 is within a bound of 0."""
    return a / b if b else (0.0 if a == 0 else math.inf)


def judge(measured: Interval, bound: float, *, equality: bool = False) -> str:
    """Return "holds", "fails" or "undecided" by the module's rule (`row` tells loose ones)."""
    if not (math.isfinite(measured.mean) and math.isfinite(bound)):
        return "fails"
    if measured.over == EVERY:
        return "holds" if measured.mean <= bound * (1 + ROUNDING) else "fails"
    if equality:
        if measured.low > 0:
            return "fails"
        return "holds" if measured.high - measured.mean <= bound else "undecided"
    if measured.low > bound * (1 + ROUNDING):
        return "fails"
    return "holds" if measured.high <= bound * (1 + ATTAINED) else "undecided"


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
        measured: Interval,
        bound: float,
        *,
        setting: str = "",
        why: str = "",
        ran: str = "",
    ) -> None:
        """Judge a claim, if it is to be tested; `ran` is the compressor that ran, if any."""
        if self.wanted(claim.name):
            self.rows.append(row(claim, place, setting, measured, bound, why, ran))

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


class MethodVerdicts(NamedTuple):
    """Adds verdicts on one method at one place."""

    judged: Judged
    word: str
    place: str

    def wanted(self, claim: Claim) -> bool:
        """Return whether the claim is to be tested of this method."""
        return self.judged.wanted(claim.of(self.word).name)

    def add(
        self, claim: Claim, measured: Interval, bound: float, *, setting: str = "", why: str = ""
    ) -> None:
        """Judge a claim about the method; see `Judged.add`."""
        about = claim.of(self.word)
        self.judged.add(about, self.place, measured, bound, setting=setting, why=why, ran=self.word)

    def refused(self, claim: Claim, setting: str, error: str) -> None:
        """Record that a method refused a payload of its own: it fails, whatever is to be tested."""
        about, failure = claim.of(self.word), always(1.0, 1)
        self.judged.rows.append(row(about, self.place, setting, failure, 0.0, error, self.word))

    def skip(self, why: str, *claims: Claim) -> None:
        """Record that claims do not apply to the method."""
        for claim in claims:
            self.judged.skip(claim.of(self.word).name, self.place, why)


class Unit(NamedTuple):
    """A unit of work on one method."""

    key: str
    """The name in the ledger."""
    word: str
    """The method."""
    place: str
    claims: tuple[Claim, ...]
    """The claims that it judges, not yet named after the method; see `Claim.of`."""
    judge: Callable[[MethodVerdicts], None]


def row(
    claim: Claim, place: str, setting: str, measured: Interval, bound: float, why: str, ran: str
) -> Row:
    """Return the row of a claim with its verdict; `why` is a note on this verdict."""
    exact = measured.low == measured.high

    def over_bound(value: float) -> float | None:
        return finite(value / bound) if bound else (0.0 if value == 0 else None)

    verdict = judge(measured, bound, equality=claim.equality)
    if not (math.isfinite(measured.mean) and math.isfinite(bound)):
        why = "not finite" + (f"; {why}" if why else "")
    slack = None
    if claim.kind in ("theorem", "property") and not claim.equality and measured.mean > 0:
        slack = finite(bound / measured.mean)
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
        "measured": finite(measured.mean),
        "low": None if exact else finite(measured.low),
        "high": None if exact else finite(measured.high),
        "slack": slack,
        "ratio": over_bound(measured.mean),
        "ratio_low": None if exact else over_bound(measured.low),
        "ratio_high": None if exact else over_bound(measured.high),
        "n": measured.n,
        "over": measured.over,
        "verdict": verdict,
        "why": why or None,
    }
