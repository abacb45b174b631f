"""Statistics over seeds on frames whose answers are known by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from builders import summary, write
from scipy import stats

from gcbench.report.compare import rows
from gcbench.report.rendering import ends, records
from gcbench.report.tables import render
from gcbench.results.reader import load
from gcbench.stats import intervals, ranks, seeds


def frame(**values: dict[int, float]) -> pd.DataFrame:
    """Return runs of configurations by name: seed -> value; those named none are uncompressed."""
    lines = [
        {
            **dict.fromkeys([*seeds.TARGET, *seeds._MEANS], math.nan),
            **dict.fromkeys(["step_seconds", "communicate_modelled_seconds"], math.nan),
            **{"phase communicate": math.nan, "payload_bytes": 100.0, "wire_bytes": 50.0},
            **{"configuration": name, "seed": seed, "value": value, "steps": 10},
            **{"skipped_steps": 0, "uncompressed": name == "none", "sign": 1},
            **{"examples": math.nan, "eval_every": 0},
        }
        for name, mine in values.items()
        for seed, value in mine.items()
    ]
    return pd.DataFrame(lines)


def against_none(runs: pd.DataFrame) -> pd.DataFrame:
    result = seeds.per_config(runs)
    return seeds.against_baselines(runs, result.assign(baseline="none"))


NONE = {0: 0.50, 1: 0.60, 2: 0.70}


def test_statistics_leave_out_seeds_that_diverged() -> None:
    result = seeds.per_config(frame(none=NONE, x={0: 0.5, 1: math.nan, 2: 0.7}, y={0: math.nan}))
    assert list(result["n"]) == [3, 2, 0]
    assert list(result["diverged"]) == [0, 1, 1]
    assert result["mean"]["x"] == pytest.approx(0.6)
    assert result["sd"]["x"] == pytest.approx(0.02**0.5)  # n - 1 = 1
    assert math.isnan(result["mean"]["y"])
    assert result["half_interval"]["y"] == 0


def test_differences_are_of_common_seeds_and_never_of_a_diverged_one() -> None:
    """Of x and none seeds 1 and 2 are common, and finished by both: +0.1 and +0.2."""
    runs = frame(none=NONE | {3: math.nan}, x={1: 0.70, 2: 0.90, 3: 0.0, 9: 0.0}, y={9: 0.8})
    result = against_none(runs)
    assert list(result["pairs"]) == [0, 2, 0]
    assert result["difference"]["x"] == pytest.approx(0.15)
    assert result["difference_sd"]["x"] == pytest.approx(0.1 / 2**0.5)
    assert result["difference"]["y"] == pytest.approx(0.2)  # of the two means
    assert math.isnan(result["difference_low"]["y"])
    assert math.isnan(result["difference"]["none"])


@pytest.mark.parametrize(
    ("leads", "sign", "above", "below"),
    [
        ((0.01, 0.02, 0.03), 1, False, False),  # 0.02 - 4.303 * 0.01 / sqrt(3) < 0
        ((0.02, 0.02, 0.021), 1, True, False),
        ((0.02, 0.02, 0.021), -1, False, True),
        ((-0.02, -0.02, -0.021), 1, False, True),
        ((-0.02, -0.02, -0.021), -1, True, False),
    ],
)
def test_a_row_is_better_or_worse_by_its_interval_alone(
    leads: tuple[float, ...], sign: int, above: bool, below: bool
) -> None:
    runs = frame(none=NONE, x={seed: NONE[seed] + lead for seed, lead in enumerate(leads)})
    result = against_none(runs.assign(sign=sign)).loc["x"]
    assert (result["above_baseline"], result["below_baseline"]) == (above, below)


def test_in_band_says_on_which_side() -> None:
    values = {"in": 0.6, "high": 0.71, "low": 0.49}
    runs = frame(none=NONE, **{name: {7: value} for name, value in values.items()})
    result = against_none(runs)["in_band"]
    assert list(result) == ["baseline", "yes", "no: better", "no: worse"]
    result = against_none(runs.assign(sign=-1))["in_band"]
    assert list(result) == ["baseline", "yes", "no: worse", "no: better"]


def test_in_band_tells_no_side_where_the_interval_holds_zero() -> None:
    """Below the band's 0.5 by the mean, but from 0.3 below to 0.1 above seed by seed."""
    runs = frame(none={0: 0.5, 1: 0.5, 2: 0.5}, x={0: 0.2, 1: 0.6, 2: 0.5}, y={0: 0.4, 1: 0.4})
    result = against_none(runs)["in_band"]
    assert list(result) == ["baseline", "no: indistinguishable", "no: worse"]


def test_the_front_of_each_budget() -> None:
    runs = frame(a={0: 0.9}, b={0: 0.9}, c={0: 0.8}, d={0: math.nan}, e={0: 0.1})
    result = seeds.per_config(runs)
    result["budget"] = [0, 0, 0, 0, 1]
    assert list(ranks.on_front(runs, result)) == [True, True, False, False, True]
    result.loc["c", "payload_bytes_step"] = 1.0
    assert list(ranks.on_front(runs, result)) == [True, True, True, False, True]
    result.loc["b", "payload_bytes_step"] = 2.0  # as good as a, for fewer bytes
    assert list(ranks.on_front(runs, result)) == [False, True, True, False, True]


def test_the_front_of_several_seeds_is_by_intervals() -> None:
    """b is better than a by its mean alone, c by its interval; both have fewer bytes."""
    a = {0: 0.5, 1: 0.5, 2: 0.5}
    runs = frame(a=a, b={0: 0.4, 1: 0.7, 2: 0.5})
    result = seeds.per_config(runs).assign(budget=0)
    result.loc["b", "payload_bytes_step"] = 1.0
    assert list(ranks.on_front(runs, result)) == [True, True]
    runs = frame(a=a, c={0: 0.6, 1: 0.61, 2: 0.6})
    result = seeds.per_config(runs).assign(budget=0)
    assert list(ranks.on_front(runs, result)) == [False, True]  # for as many bytes
    assert list(ranks.on_front(runs.assign(sign=-1), result.assign(sign=-1))) == [True, False]
    result.loc["c", "payload_bytes_step"] *= 2
    assert list(ranks.on_front(runs, result)) == [True, True]


def test_a_target_met_in_fewer_steps_is_told_by_its_interval() -> None:
    """Always 100 steps sooner; or on average, but not surely; or not met at all by a seed."""
    names = ("none", "sooner", "mixed", "missed")
    runs = frame(**{name: {0: 0.5, 1: 0.6, 2: 0.7} for name in names})
    runs["target_step"] = [
        *(300, 400, 500),
        *(200, 310, 390),
        *(100, 500, 500),
        *(200, math.inf, math.inf),
    ]
    result = against_none(runs)["faster"]
    assert result.to_dict() == {"none": False, "sooner": True, "mixed": False, "missed": False}


def test_a_target_that_a_seed_never_meets_is_not_met_sooner() -> None:
    runs = frame(none={0: 0.5, 1: 0.6, 2: 0.7}, x={0: 0.5, 1: 0.6, 2: 0.7})
    runs["target_step"] = [300, 400, 500, 200, 310, math.inf]
    assert not against_none(runs)["faster"]["x"]


@pytest.mark.parametrize(
    ("n", "evaluations", "expected"), [(3, 1, False), (3, 2, True), (5, 1, True)]
)
def test_steps_to_a_target_are_rounded_to_evaluations(n, evaluations, expected) -> None:
    """All seeds of a method meet it 1 or 2 evaluations sooner: a spread of 0 is not certainty.

    t(0.975; 2) (100 / 6**0.5) / 3**0.5 = 101.4 steps, t(0.975; 4) (100 / 6**0.5) / 5**0.5 = 50.7.
    """
    runs = frame(none=dict.fromkeys(range(n), 0.5), x=dict.fromkeys(range(n), 0.5))
    runs["target_step"] = [500] * n + [500 - 100 * evaluations] * n
    assert not against_none(runs.assign(eval_every=1e9))["faster"]["x"]
    assert against_none(runs.assign(eval_every=100))["faster"]["x"] == expected


def values(**leads: list[float]) -> pd.DataFrame:
    return pd.DataFrame(leads)


def test_ranks_need_intervals_of_all_pairs_together() -> None:
    """A lead of 0.010 +- 0.007 (sd, 5 seeds): t = 3.19; beyond 2.78 of one pair, not of six."""
    zero = [0.0] * 5
    lead = [0.001, 0.006, 0.010, 0.014, 0.019]
    assert ranks.places(values(a=lead, b=zero), 1) == ["1", "2"]
    assert ranks.places(values(a=lead, b=zero), -1) == ["2", "1"]
    many = values(
        a=lead, b=zero, c=[-1.0, -1.1, -1.2, -1.1, -1.0], d=[-9.0, -8.9, -9.1, -9.0, -9.0]
    )
    assert ranks.places(many, 1) == ["1-2", "1-2", "3", "4"]


def test_places_overlap_where_two_rows_are_not_told_apart() -> None:
    """a is better than c; all other pairs are indistinguishable."""
    noise = [0.01, -0.01, 0.0, 0.01, -0.01]
    b = [0.03 + e for e in (0.05, -0.05, 0.0, 0.05, -0.05)]
    result = values(a=[0.06] * 5, b=b, c=noise, d=[-1 + e for e in noise])
    assert ranks.places(result, 1) == ["1-2", "1-3", "2-3", "4"]
    assert ranks.places(-result, -1) == ["1-2", "1-3", "2-3", "4"]


def test_no_rank_from_few_seeds_or_of_one_row() -> None:
    few = values(a=[1.0, 1.0, 1.0, 1.0, math.nan], b=[0.0, 0.1, 0.0, 0.1, 0.0])
    assert ranks.places(few, 1) == ["-", "-"]
    assert ranks.places(values(a=[1.0] * 6), 1) == ["-"]
    assert ranks.places(values(), 1) == []


def test_a_row_of_few_seeds_takes_no_place_from_the_others() -> None:
    """Nor does it make their intervals wider: a leads b in one pair, and would not in three."""
    lead = [0.001, 0.006, 0.010, 0.014, 0.019]
    result = values(a=lead, few=[9.0, 9.0, 9.0, 9.0, math.nan], b=[0.0] * 5)
    assert ranks.places(result, 1) == ["1", "-", "2"]
    # Five seeds each, of which c shares four with the others: nothing is known of it.
    apart = pd.DataFrame(
        {"a": [1.0] * 5 + [math.nan], "b": [0.0] * 5 + [math.nan], "c": [math.nan] + [5.0] * 5}
    )
    assert ranks.places(apart, 1) == ["-", "-", "-"]


# --- what the frames are read with


def test_records_have_none_for_nan_and_plain_numbers() -> None:
    result = records(pd.DataFrame({"n": [1, 2], "x": [0.5, math.nan], "t": ["a", None]}))
    assert result == [{"n": 1, "x": 0.5, "t": "a"}, {"n": 2, "x": None, "t": None}]
    assert [type(value) for value in result[0].values()] == [int, float, str]
    assert records(pd.DataFrame({"x": [math.inf]})) == [{"x": math.inf}]


def test_counts_in_words() -> None:
    assert (ends([3, 5, 4]), ends([3, 3]), ends([2000])) == ("3 to 5", "3", "2,000")


# --- the test set's noise


def test_the_resolution_by_hand() -> None:
    """Bonett and Price: (4 + 2)/(n + 2) discordant, with n = 98 it is 0.06, net 0.04."""
    expected = stats.norm.ppf(0.975) * math.sqrt((0.06 - 0.04**2) / 100)
    assert intervals.resolution(4 / 98, 98.0) == pytest.approx(expected, rel=1e-12)
    assert intervals.resolution(-4 / 98, 98.0) == pytest.approx(expected, rel=1e-12)
    assert intervals.resolution(0.1, math.nan) == 0
    both = math.hypot(expected, intervals.half_width(0.01, 3))
    assert intervals.half_interval(0.01, 3, 4 / 98, 98.0) == pytest.approx(both)
    assert math.isnan(intervals.half_interval(math.nan, 1, 0.1, 98.0))


def test_the_interval_covers_the_difference_on_all_images() -> None:
    """A method that loses 1 % of all images, in all seeds alike; 360 of them are drawn."""
    rng = np.random.default_rng(0)
    lost = rng.binomial(360, 0.01, 20_000) / 360
    halves = np.array([intervals.half_interval(0.0, 3, one, 360.0) for one in np.unique(lost)])
    half = dict(zip(np.unique(lost), halves, strict=True))
    covered = np.mean([abs(one - 0.01) <= half[one] for one in lost])
    assert covered > 0.95
    bare = np.mean(lost == 0.01)  # without the test set's part the interval has no width
    assert bare == 0


def summaries(name: str, right: list[int], **over: object) -> list[Any]:
    return [
        summary(name, seed, one / 360, test_examples=None, **over) for seed, one in enumerate(right)
    ]


@pytest.mark.parametrize(("lost", "expected"), [(1, False), (5, False), (6, True)])
def test_a_difference_below_the_resolution_has_no_verdict(
    tmp_path: Path, lost: int, expected: bool
) -> None:
    """Three seeds with one of 360 images each printed "-0.28 [-0.28, -0.28] worse"."""
    none = summaries("none", [347, 344, 341])
    runs = load([write(tmp_path, *none, *summaries("x", [347 - lost, 344 - lost, 341 - lost]))])
    row = next(row for row in rows(runs) if row.method == "x")
    assert row.examples == 360
    assert row.below_baseline == expected
    low, high = row.interval
    assert (low < 0 < high) != expected
    for format in ("table", "latex", "markdown"):
        text = render([row], format)
        assert f"-{100 * lost / 360:.2f} [" in text.replace("$", "").replace("−", "-")
        assert f"[-{100 * lost / 360:.2f}, -{100 * lost / 360:.2f}]" not in text


def test_one_seed_below_the_resolution_has_no_verdict(tmp_path: Path) -> None:
    none = summaries("none", [347, 346])
    runs = load([write(tmp_path, *none, *summaries("x", [344]), *summaries("y", [300]))])
    words = {row.method: row.in_band for row in rows(runs)}
    assert words["x"] == "no: indistinguishable"
    assert words["y"] == "no: worse"


def test_places_need_more_than_the_resolution() -> None:
    values = pd.DataFrame({"a": [347 / 360] * 5, "b": [346 / 360] * 5})
    assert ranks.places(values, 1, 360.0) == ["1-2", "1-2"]
    assert ranks.places(values, 1) == ["1", "2"]  # of unknown resolution


def test_the_size_of_a_test_set_is_recorded_or_seen(tmp_path: Path) -> None:
    options = [summary("x", 0, 0.9), summary("none", 0, 0.5)]
    sizes = seeds.examples(load([write(tmp_path / "a", *options)]))
    assert sizes == [10_000] * 2
    seen = [{**one, "test_examples": None} for one in options]
    seen[0]["test_accuracy"] = 347 / 360
    assert seeds.examples(load([write(tmp_path / "b", *seen)])) == [360] * 2
    seen[0]["test_accuracy"] = math.pi / 4
    assert all(map(math.isnan, seeds.examples(load([write(tmp_path / "c", *seen)]))))


@pytest.mark.parametrize("order", [1, -1])
def test_of_test_sets_that_differ_the_smaller_one_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], order: int
) -> None:
    """The last row's size counted for all rows: intervals were too narrow."""
    two = [summary("x", 0, 0.9, test_examples=10_000), summary("none", 0, 0.5, test_examples=360)]
    runs = load([write(tmp_path / "rows", *two)])
    assert seeds.examples(runs[::order]) == [360] * 2
    assert "test sets differ in size, so results are not comparable: 360 (" in (
        capsys.readouterr().err
    )


def test_trials_have_as_many_examples_as_they_held_out(tmp_path: Path) -> None:
    trials = [summary(f"x{holdout}", 0, None) for holdout in (500, 5000)]
    for trial, holdout in zip(trials, (500, 5000), strict=True):
        trial["config"] |= {"holdout": holdout, "test": False}
    assert sorted(seeds.examples(load([write(tmp_path, *trials)]))) == [500, 5000]
