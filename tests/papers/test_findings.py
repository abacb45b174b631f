"""Findings: a verdict follows from the interval alone, and a value from exactly one row."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from gcbench.core.errors import UsageError

PATH = Path(__file__).parents[2] / "results/findings.py"


@pytest.fixture
def findings():
    spec = importlib.util.spec_from_file_location("findings", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("value", "low", "high", "region", "expected"),
    [
        (1.0, 0.5, 1.5, {"at_least": 0.5}, "holds"),
        (1.0, 0.4, 1.5, {"at_least": 0.5}, "cannot tell"),
        (1.0, 0.4, 1.5, {"at_least": 1.6}, "does not hold"),
        (1.0, 0.4, 1.5, {"at_most": 1.5}, "holds"),
        (1.0, 0.4, 1.5, {"at_most": 0.3}, "does not hold"),
        (1.0, 0.4, 1.5, {"at_least": 0, "at_most": 1.4}, "cannot tell"),
        (16.0, math.nan, math.nan, {"at_least": 21.3}, "cannot tell"),
    ],
)
def test_verdict(findings, value, low, high, region, expected):
    assert findings.verdict(findings.Measured(value, low, high), **region) == expected


def table(folder, rows):
    (folder / "a.json").write_text(json.dumps({"tables": [{"name": "claims", "rows": rows}]}))
    return {"file": "a.json", "table": "claims", "where": {"method": "fft"}, "columns": ["value"]}


def test_a_value_is_one_cell(findings, tmp_path, monkeypatch):
    monkeypatch.setattr(findings, "RESULTS", tmp_path)
    spec = table(tmp_path, [{"method": "fft", "value": 2}, {"method": "fft:theta=0", "value": 3}])
    assert findings.value(spec).value == 2


@pytest.mark.parametrize("methods", [[], ["fft", "fft"], ["terngrad"]])
def test_a_value_that_selects_another_number_of_rows_is_refused(
    findings, tmp_path, monkeypatch, methods
):
    monkeypatch.setattr(findings, "RESULTS", tmp_path)
    spec = table(tmp_path, [{"method": name, "value": 2} for name in methods])
    with pytest.raises(UsageError, match=r"a\.json"):
        findings.value(spec)


@pytest.mark.parametrize(("exact", "expected"), [(True, "does not hold"), (False, "cannot tell")])
def test_a_value_without_limits_decides_only_if_it_is_exact(
    findings, tmp_path, monkeypatch, exact, expected
):
    monkeypatch.setattr(findings, "RESULTS", tmp_path)
    spec = table(tmp_path, [{"method": "fft", "value": 16.0}]) | {"exact": exact}
    entry = {"source": "a", "claim": "b", "at": "c", "unit": "d", "value": spec}
    assert f"**{expected}**" in findings.judged(entry | {"holds_if": {"at_least": 21.3}})


def test_the_worst_of_several_rows_may_be_one_without_a_difference(findings, monkeypatch):
    """The baseline itself has no difference and is left out; one of exactly 0 is not."""
    limits = {"difference_low": -1.0, "difference_high": 1.0, "pairs": 3, "metric": "accuracy"}
    rows = [
        SimpleNamespace(method="none", difference=None, **limits),
        SimpleNamespace(method="a", difference=0.0, **limits),
        SimpleNamespace(method="b", difference=0.5, **limits | {"difference_low": 0.4}),
    ]
    monkeypatch.setattr(findings, "_rows", lambda suite, trials: rows)
    spec = {"suite": "s", "where": {}, "several": "worst"}
    assert findings.of_row(spec).value == 0.0
    with pytest.raises(UsageError, match="3 rows"):
        findings.of_row(spec | {"several": None})


def test_a_paired_difference_has_the_interval_of_its_seeds(findings):
    row = SimpleNamespace(method="a", values={0: 0.5, 1: 0.7, 2: 0.6}, examples=None)
    other = SimpleNamespace(method="b", values={0: 0.4, 1: 0.5, 2: 0.3, 3: 0.0})
    result = findings._difference(row, other, 100.0, 2)
    half = 4.302653 * 0.1 / math.sqrt(3)  # t of 2 degrees of freedom; differences .1, .2, .3
    assert result.n == 3
    assert (result.value, result.low, result.high) == pytest.approx(
        (20.0, 20 - 100 * half, 20 + 100 * half), rel=1e-5
    )
