"""Findings: a verdict follows from the interval alone, and a value from exactly one row."""

from __future__ import annotations

import importlib.util
import json
import math
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from gcbench.core.errors import UsageError
from gcbench.training import configuration

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
    assert [one.value for one in findings.values(spec)] == [2]


@pytest.mark.parametrize("methods", [[], ["fft", "fft"], ["terngrad"]])
def test_a_value_that_selects_another_number_of_rows_is_refused(
    findings, tmp_path, monkeypatch, methods
):
    monkeypatch.setattr(findings, "RESULTS", tmp_path)
    spec = table(tmp_path, [{"method": name, "value": 2} for name in methods])
    with pytest.raises(UsageError, match=r"a\.json"):
        findings.values(spec)


@pytest.mark.parametrize(("exact", "expected"), [(True, "does not hold"), (False, "cannot tell")])
def test_a_value_without_limits_decides_only_if_it_is_exact(
    findings, tmp_path, monkeypatch, exact, expected
):
    monkeypatch.setattr(findings, "RESULTS", tmp_path)
    spec = table(tmp_path, [{"method": "fft", "value": 16.0}]) | {"exact": exact}
    entry = {"source": "a", "claim": "b", "at": "c", "unit": "d", "value": spec}
    assert f"**{expected}**" in findings.judged(entry | {"holds_if": {"at_least": 21.3}})


def line(method, low=None, high=None, failed=()):
    difference = None if low is None else (low + high) / 2
    limits = {"difference": difference, "difference_low": low, "difference_high": high}
    shown = {"method": method, "is_baseline": method == "none", "metric": "accuracy", "pairs": 3}
    return SimpleNamespace(**limits, **shown, failed=failed)


SPEC = {"suite": "main", "where": {}, "several": True}
ENTRY = {"source": "a", "claim": "b", "at": "c", "unit": "d", "value": SPEC}
BROAD, FAILING, FINE = line("a", -0.02, 0.02), line("b", -0.012, -0.010), line("c", 0.0, 0.01)


@pytest.mark.parametrize(
    ("rows", "here", "expected"),
    [
        ([FINE], "0.50 [0.00, 1.00] d, n = 3", "holds"),
        ([FINE, BROAD], "0.00 [-2.00, 2.00] d, n = 3", "cannot tell"),
        ([BROAD, FAILING, FINE], "-1.10 [-1.20, -1.00] d, n = 3", "does not hold"),
        ([FAILING, line("e", 0.0, 0.01, (4,))], "1 of 4 seeds diverged", "does not hold"),
        ([FINE, line("e", failed=(0, 1, 2))], "3 of 6 seeds diverged", "does not hold"),
        ([], "no rows of main/", "cannot tell"),
    ],
)
def test_the_worst_verdict_of_several_rows_counts(findings, monkeypatch, rows, here, expected):
    """The baseline has no difference and is left out."""
    stored = [line("none"), *rows] if rows else []
    monkeypatch.setattr(findings, "_rows", lambda suite: stored)
    shown = findings.judged(ENTRY | {"holds_if": {"at_least": -0.5}})
    assert f"| {here}" in shown
    assert f"**{expected}**" in shown


def test_a_value_is_of_one_row(findings, monkeypatch):
    monkeypatch.setattr(findings, "_rows", lambda suite: [FINE, BROAD])
    with pytest.raises(UsageError, match="2 rows"):
        findings.of_rows(SPEC | {"several": False})


def test_rows_of_another_version_decide_no_claim(findings, monkeypatch, tmp_path):
    main, label = findings.suites.load("main"), "main/1"
    runs = [replace(run, suite=label) for run in findings._runs()["main"]]
    assert len(runs) > 100
    monkeypatch.setattr(findings.reader, "load", lambda *_: runs)
    findings._runs.cache_clear()
    assert findings._rows("main") == []
    runs[:] = [replace(run, suite=main.label()) for run in runs]
    findings._runs.cache_clear()
    findings._rows.cache_clear()
    assert any(row.rate == "tuned" for row in findings._rows("main")), "trials are read"


def test_a_paired_difference_has_the_interval_of_its_seeds(findings):
    row = SimpleNamespace(method="a", values={0: 0.5, 1: 0.7, 2: 0.6}, examples=None, failed=())
    other = SimpleNamespace(method="b", values={0: 0.4, 1: 0.5, 2: 0.3, 3: 0.0})
    result = findings._paired(row, [other.values], 100.0, 2)
    half = 4.302653 * 0.1 / math.sqrt(3)  # t of 2 degrees of freedom; differences .1, .2, .3
    assert result.n == 3
    assert (result.value, result.low, result.high) == pytest.approx(
        (20.0, 20 - 100 * half, 20 + 100 * half), rel=1e-5
    )


def trained(method, width, values):
    """Return a row of losses: seeds by their value, and a budget of one width."""
    shown = {"method": method, "is_baseline": method == "none", "context": {"width": width}}
    run = SimpleNamespace(width=width)
    more = {"metric": "test_loss", "examples": None, "failed": (), "place": f"width={width}"}
    return SimpleNamespace(values=dict(enumerate(values)), runs=[run], **shown, **more)


def test_a_change_with_size_is_paired_with_fp32_of_each_size(findings, monkeypatch):
    """Beyond the small size: (2.5 - 2.0) - (3.2 - 3.0) = .3, and .1 and .2 for other seeds."""
    rows = [
        trained("none", 1, [3.0, 3.0, 3.0]),
        trained("topk", 1, [3.2, 3.2, 3.2]),
        trained("none", 2, [2.0, 2.1, 2.2]),
        trained("topk", 2, [2.5, 2.4, 2.6]),
    ]
    settings = {id(row.runs[0]): {"method": row.method, **row.context} for row in rows}
    monkeypatch.setattr(findings.compare, "settings_of", lambda run: settings[id(run)])
    monkeypatch.setattr(findings, "_rows", lambda suite: rows)
    spec = {"suite": "scale", "where": {"method": "topk", "width": 2}}
    (one,) = findings.of_rows(spec | {"beyond": {"method": "topk", "width": 1}})
    half = 4.302653 * 0.1 / math.sqrt(3)
    assert (one.value, one.low, one.high) == pytest.approx((0.2, 0.2 - half, 0.2 + half), rel=1e-5)
    rows[0].context["width"] = 3
    with pytest.raises(UsageError, match="0 rows of fp32"):
        findings.of_rows(spec | {"beyond": {"method": "topk", "width": 1}})


# ---- rows that are run again ---------------------------------------------------------------------


@pytest.mark.parametrize("where", ["missing", "elsewhere"])
def test_recheck_refuses_a_file_that_is_not_a_reference(where, tmp_path, monkeypatch, capsys):
    """A misspelled one had 0 rows; the report would mix files of one name."""
    file = tmp_path / "terngrad-table1.parquet"
    if where == "elsewhere":
        file.write_bytes((PATH.parent / "reference" / file.name).read_bytes())
    monkeypatch.setattr(sys, "argv", ["recheck.py", "--count", "--only", str(file)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(PATH.with_name("recheck.py")), run_name="__main__")
    assert ended.value.code == 2
    assert str(file) in capsys.readouterr().err


@pytest.mark.parametrize("now", ["same", "other", "failed"])
def test_recheck_adds_each_row_once_and_names_those_that_differ(now, tmp_path):
    recheck = runpy.run_path(str(PATH.with_name("recheck.py")))
    report = tmp_path / "recheck.json"
    for function in ("read_report", "add"):
        recheck[function].__globals__["REPORT"] = report
    row = {"config_hash": "a", "compressor": "TopK()", "seed": 0, "params_sha256": "same"}
    summary = {"failed": "diverged"} if now == "failed" else {"params_sha256": now}
    assert recheck["checked"]("main.parquet", "cpu") == []
    recheck["add"]("main.parquet", "cpu", {"rows": 9}, row, summary)
    recheck["add"]("main.parquet", "cpu", {"rows": 9}, row | {"config_hash": "b"}, row)
    assert recheck["checked"]("main.parquet", "cpu") == ["a", "b"]
    entry = json.loads(report.read_text())["main.parquet"]["cpu"]
    assert (entry["rows"], entry["checked"]) == (9, 2)
    assert [one["config_hash"] for one in entry["differing"]] == (["a"] if now != "same" else [])
    assert "elsewhere" not in entry
    there = {"provenance": {"machine": {"cpu": "another"}}}
    recheck["add"]("main.parquet", "cpu", {"rows": 9}, row | {"config_hash": "c"}, row | there)
    entry = json.loads(report.read_text())["main.parquet"]["cpu"]
    assert (entry["checked"], entry["elsewhere"]) == (3, {"c": "another"})


def test_recheck_completes_the_fifth_with_rows_that_were_not_run_again(monkeypatch):
    """Of 12 rows 3 are due. Rows that have left the file do not count, those that remain do."""
    recheck = runpy.run_path(str(PATH.with_name("recheck.py")))["selected"]
    monkeypatch.setitem(recheck.__globals__, "current", lambda row: True)
    machine = configuration.machine() | {"cpu": "another"}
    provenance = {"commit": "c0ffee+", "machine": machine, "versions": configuration.versions()}
    rows = [{"config_hash": f"{i:02}", "provenance": provenance} for i in range(12)]
    rows.append({"config_hash": "clean", "provenance": provenance | {"commit": "c0ffee"}})

    def hashes(before):
        assert recheck(rows, before, "a third") == ([], 0, 12)
        again, alike, unclean = recheck(rows, before, "another")
        assert (alike, unclean) == (12, 12)
        return [row["config_hash"] for row in again]

    assert hashes([]) == ["00", "01", "02"]
    assert hashes(["07", "gone"]) == ["00", "01", "07"]
    assert hashes(["01", "05", "07", "11"]) == ["01", "05", "07", "11"]


@pytest.mark.parametrize(
    ("option", "value"),
    [*(("--part", part) for part in ("2", "0/2", "3/2", "1/0", "a/b")), ("--cpu", "Z80")],
)
def test_recheck_refuses_a_value_that_there_is_not(option, value, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["recheck.py", "--count", option, value])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(PATH.with_name("recheck.py")), run_name="__main__")
    assert ended.value.code == 2
    assert f"{option} {value}: " in capsys.readouterr().err
