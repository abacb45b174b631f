"""Verdicts: the whole interval on one side, or no verdict."""

from __future__ import annotations

import math

import pytest

from gcbench.report import verdicts
from gcbench.report.verdicts import FAILS, HOLDS, OPEN, Claim

ABOVE = Claim("large", "somebody", 1.0, above=True)
BELOW = Claim("small", "somebody", 1.0, above=False)


@pytest.mark.parametrize(
    ("values", "above", "below"),
    [
        ([1.2, 1.21, 1.19], HOLDS, FAILS),
        ([0.8, 0.81, 0.79], FAILS, HOLDS),
        ([0.8, 1.21, 1.0], OPEN, OPEN),
        ([7.0], OPEN, OPEN),  # one seed has no interval
        ([2.0, math.nan, 2.0], OPEN, OPEN),
        ([2.0, math.inf, 2.0], OPEN, OPEN),
    ],
)
def test_the_whole_interval_is_on_one_side_or_nothing_is_told(values, above, below):
    measured = verdicts.over_seeds(values)
    assert verdicts.judge(ABOVE, measured) == above
    assert verdicts.judge(BELOW, measured) == below


def test_an_interval_by_hand():
    """Student's t of two degrees of freedom: 4.3027 standard errors."""
    measured = verdicts.over_seeds([1.0, 2.0, 3.0])
    assert measured.mean == 2.0
    assert measured.high - measured.mean == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)


def test_a_bracket_takes_the_outer_limits():
    measured = verdicts.bracket([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [3.0, 3.0, 3.0])
    assert (measured.low, measured.mean, measured.high) == (1.0, 2.0, 3.0)
    assert verdicts.judge(Claim("", "", 2.5, above=True), measured) == OPEN
    wide = verdicts.bracket([0.0, 0.0, 0.0], [2.0, 2.0, 2.0], [math.inf] * 3)
    assert verdicts.judge(Claim("", "", 9.0, above=False), wide) == OPEN


def test_what_is_counted_is_its_own_interval():
    assert verdicts.judge(ABOVE, verdicts.exactly(1.0, 1, "share")) == HOLDS
    assert verdicts.judge(ABOVE, verdicts.exactly(0.999, 1, "share")) == FAILS
    assert verdicts.judge(ABOVE, verdicts.exactly(math.nan, 0, "shares")) == OPEN


def test_rows_say_what_would_hold_and_sentences_have_the_numbers():
    row = verdicts.row(BELOW, verdicts.over_seeds([0.8, 0.81, 0.79]), method="m")
    assert row["holds_if"] == "at most 1"
    assert row["method"] == "m"
    (sentence,) = verdicts.sentences([row])
    assert sentence.startswith("Holds: small (somebody): 0.8 (0.775 to 0.825), n = 3 seeds")
    nothing = verdicts.row(BELOW, verdicts.over_seeds([7.0]))
    assert nothing["low"] is None
    assert "(- to -)" in verdicts.sentences([nothing])[0]
