"""Comparison tables against hand computation, bad input, and pictures that are what they say."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import BASE, summary, summary_of, write
from commands import ROOT, invoke

import gcbench
from gcbench.core.errors import GcbenchError, UsageError
from gcbench.report import figures, run_plots
from gcbench.report.compare import level, rows, settings_of
from gcbench.report.rendering import Column, fitted
from gcbench.report.tables import largest_budget, render
from gcbench.results import rows as stored
from gcbench.results.reader import load
from gcbench.stats import intervals, seeds
from gcbench.training import suites

NAN = math.nan


def table(folder: Path, *summaries: Any) -> list[Any]:
    return rows(load([write(folder, *summaries)]))


# --- values


def test_mean_sd_difference_band_by_hand(tmp_path: Path) -> None:
    result = table(
        tmp_path,
        *BASE,
        summary("near", 0, 0.91),
        summary("near", 1, 0.90),
        summary("worse", 0, 0.80),
        summary("better", 7, 0.95),
    )
    none, better, near, worse = result
    assert [row.method for row in result] == ["none", "better", "near", "worse"]
    assert none.mean == pytest.approx(0.92)
    assert none.sd == pytest.approx(0.02)  # sqrt((0.02^2 + 0 + 0.02^2) / 2)
    assert (none.difference, none.in_band) == (None, "baseline")
    assert near.mean == pytest.approx(0.905)
    assert near.difference == pytest.approx(-0.005)  # (+0.01 - 0.02) / 2, seeds 0 and 1
    assert near.difference_sd == pytest.approx(0.03 / math.sqrt(2))
    assert (near.pairs, near.band, near.in_band) == (2, (0.90, 0.94), "yes")
    assert worse.sd is None
    assert worse.difference == pytest.approx(-0.10)  # of seed 0 alone, not of the means
    assert worse.in_band == "no: worse"
    assert better.pairs == 0
    assert better.difference == pytest.approx(0.03)  # no common seed: of the means
    assert better.in_band == "no: better"
    text = render(result, "table", 200)
    assert "92.00 ± 2.00" in text
    assert "-10.00" in text
    assert "+3.00 †" in text
    assert "†: no common seeds" in text


def test_band_includes_its_ends(tmp_path: Path) -> None:
    assert table(tmp_path, *BASE, summary("end", 0, 0.90))[1].in_band == "yes"


def test_one_baseline_seed_has_no_band(tmp_path: Path) -> None:
    row = table(tmp_path, BASE[0], summary("x", 0, 0.90))[1]
    assert (row.in_band, row.band) == ("n/a (1 seed)", None)
    assert row.difference == 0


@pytest.mark.parametrize("over", [{"steps": 200}, {"workers": 4}, {"batch": 8}])
def test_another_budget_is_no_baseline(tmp_path: Path, over: dict[str, Any]) -> None:
    row = next(r for r in table(tmp_path, *BASE, summary("x", 0, 0.9, **over)) if r.method == "x")
    assert (row.in_band, row.difference) == ("no baseline", None)
    assert list(row.context) == list(over)


def test_a_method_with_its_own_learning_rate_meets_the_best_baseline(tmp_path: Path) -> None:
    """Signs need another rate than the baseline: compared, and marked; an equal rate wins."""
    worse = [summary("none", seed, 0.2, lr=0.5) for seed in (0, 1)]
    rows = table(tmp_path, *BASE, *worse, summary("x", 0, 0.90, lr=0.001))
    row = next(row for row in rows if row.method == "x")
    assert (row.difference, row.tuned) == (0, ("lr",))
    mine = [summary("none", seed, 0.85, lr=0.001) for seed in (0, 1)]
    rows = table(tmp_path / "own", *BASE, *mine, summary("x", 0, 0.90, lr=0.001))
    row = next(row for row in rows if row.method == "x")
    assert (row.difference, row.tuned) == (pytest.approx(0.05), ())


def test_schedules_are_methods_of_their_own(tmp_path: Path) -> None:
    """The stored repr is of the last step; what came before tells two schedules apart."""
    one = summary("x", 0, 0.8, options={"clip": {"0": 2.0, "50": 1.0}})
    two = summary("x", 0, 0.7, options={"clip": {"0": 3.0, "50": 1.0}})
    labels = [row.method for row in table(tmp_path, *BASE, one, two)]
    assert labels == ["none", "x clip=0:2.0/50:1.0", "x clip=0:3.0/50:1.0"]


def test_rows_from_before_a_setting_was_added_read_as_they_were(tmp_path: Path) -> None:
    old, new = summary("x", 0, 0.8), summary("x", 1, 0.9)
    new["config"] |= {"memory": "none", "memory_options": {}, "start_step": 0, "delay": 0}
    rows = table(tmp_path, *BASE, old, new)
    assert [row.method for row in rows] == ["none", "x"]
    assert rows[1].values == {0: 0.8, 1: 0.9}
    other = summary("x", 0, 0.6)
    other["config"]["memory"] = "residual"
    labels = [row.method for row in table(tmp_path / "two", *BASE, old, other)]
    assert labels == ["none", "x memory=none", "x memory=residual"]


def test_what_is_no_budget_keeps_the_baseline(tmp_path: Path) -> None:
    over = {"engine": "spawn", "collective": "twoshot", "gradients": "batched", "log_every": 5}
    row = table(tmp_path, *BASE, summary("x", 0, 0.90, dense_last=True, **over))[1]
    assert (row.in_band, row.pairs) == ("yes", 1)
    assert row.method == "x dense-last [spawn] [batched] [log_every=5]"


@pytest.mark.parametrize(
    "key",
    [
        *("options", "dense_last", "dense_below", "threads", "device", "backend", "eval_every"),
        *("log_every", "on_nonfinite", "link_gbit", "link_latency_us"),
    ],
)
def test_no_such_key_is_of_the_budget(tmp_path: Path, key: str) -> None:
    row = summary("x", 0, 0.90)
    row["config"][key] = {"a": 1} if key == "options" else "other"
    assert table(tmp_path, *BASE, row)[1].in_band == "yes"


def test_the_baseline_with_most_common_seeds_is_taken(tmp_path: Path) -> None:
    other = [summary("none", seed, 0.1, engine="spawn") for seed in (5, 6, 7, 8)]
    row = table(tmp_path, *BASE, *other, summary("x", 0, 0.90, engine="spawn"))[-1]
    assert row.method == "x [spawn]"
    assert row.difference == 0


@pytest.mark.parametrize("over", [{"local_steps": 15}, {"delay": 1}, {"start_step": 50}])
def test_fp32_with_the_same_local_steps_or_delay_is_the_baseline(
    tmp_path: Path, over: dict[str, Any]
) -> None:
    """However many seeds the others have: these change what fp32 ends with, too."""

    def result(name: str, seed: int, accuracy: float, **mine: Any) -> Any:
        output = summary(name, seed, accuracy)
        output["config"] |= mine
        return output

    others = [result("none", seed, 0.5, **over) for seed in range(5)]
    output = table(tmp_path, *BASE, *others, result("x", 0, 0.9), result("y", 0, 0.4, **over))
    x, y = (row for row in output if not row.is_baseline)
    assert (x.baseline_n, y.baseline_n) == (3, 5)
    assert x.difference == 0
    assert y.difference == pytest.approx(-0.1)


def test_loss_where_there_is_no_accuracy(tmp_path: Path) -> None:
    result = table(
        tmp_path,
        *(summary("none", s, None, test_loss=v) for s, v in enumerate((0.25, 0.5))),
        summary("x", 0, None, test_loss=1.0),
    )
    assert [row.metric for row in result] == ["test_loss"] * 2
    assert result[0].mean == 0.375
    assert result[1].difference == 0.75
    assert result[1].in_band == "no: worse"  # a higher loss
    assert "test loss" in render(result, "table", 200)


@pytest.mark.parametrize(
    ("of_none", "of_x", "shown"),
    [
        ((1.93, 1.93), (1.96, 2.0), ("1.930 ± 0.000", "1.980 ± 0.028", "+0.050 [-0.204, +0.304]")),
        ((0.02, 0.02), (0.03, 0.03), ("0.02000 ± 0", "0.03000 ± 0", "+0.01000 [+0.01000, +0.01")),
        ((0.0, 0.0), (23456.0, 23457.0), ("0.000 ± 0.000", "23456 ± 1", "+23456 [+23450, +23463]")),
        ((1.0, 1.0), (2e30, 4e30), ("3.000e+30 ± 1.414e+30",)),
    ],
)
def test_a_loss_its_spread_and_its_distance_have_equal_decimals(tmp_path, of_none, of_x, shown):
    """As many as give the mean four significant digits, trailing zeros among them."""
    values = [("none", of_none), ("x", of_x)]
    rows = [
        summary(name, seed, None, test_loss=v)
        for name, losses in values
        for seed, v in enumerate(losses)
    ]
    message = render(table(tmp_path, *rows), "table", 200)
    for text in shown:
        assert text in message


def test_bytes_ratios_and_times(tmp_path: Path) -> None:
    slow = summary("x", 1) | {"step_seconds": 0.07, "payload_bytes_up": 60_000_000}
    (row,) = table(tmp_path, summary("x", 0), slow)
    assert row.payload_bytes_step == 600_000  # (50e6 + 70e6) / 2 / 100
    assert row.wire_bytes_step == 750_000
    assert row.step_seconds == pytest.approx(0.06)
    lines = render([row], "markdown").splitlines()
    results = dict(zip(lines[0].split(" | "), lines[2].split(" | "), strict=True))
    assert results["payload MB/step"] == "0.600"
    assert (results["ratio nominal"], results["ratio up"]) == ("16.0", "15.5")
    times = dict(zip(lines[4].split(" | "), lines[6].split(" | "), strict=True))
    assert times["fwd+bwd ms"] == "20.0"
    assert "statistic ms" not in times  # nobody has it


def test_modelled_communication_is_never_measured(tmp_path: Path) -> None:
    measured = summary("x", engine="spawn", communicate_modelled=None)
    measured["phase_seconds"]["communicate"] = 0.004
    result = table(tmp_path, summary("x"), measured)
    text = render(result, "table", 200)
    assert "~1.25" in text
    assert " 4.00" in text
    assert "modelled from a link of 10 Gbit/s and 50 µs" in text
    both = summary("x", engine="spawn")
    both["phase_seconds"]["communicate"] = 0.004
    assert table(tmp_path / "both", both)[0].link is None
    records = {one["engine"]: one for one in json.loads(render(result, "json"))}
    assert records["simulate"]["communicate_seconds"] is None
    assert records["simulate"]["communicate_modelled_seconds"] == 0.00125
    assert records["spawn"]["communicate_seconds"] == 0.004
    assert records["spawn"]["communicate_modelled_seconds"] is None


def test_labels_show_what_differs(tmp_path: Path) -> None:
    result = table(
        tmp_path,
        summary("topk", compressor="TopK(ratio=0.01, ties='low')", collective="allgather"),
        summary("topk", compressor="TopK(ratio=0.1, ties='low')", collective="allgather"),
        summary("topk", compressor="TopK(ratio=0.1, ties='low')", collective="twoshot"),
        summary("x", compressor="X(clip=2.5)", options={"clip": 2.5}),
        summary("y", compressor="not a call"),
        summary("y", compressor="nor this"),
    )
    assert [row.method for row in result] == [
        "nor this",
        "not a call",
        "topk ratio=0.01 allgather",
        "topk ratio=0.1 allgather",
        "topk ratio=0.1 twoshot",
        "x clip=2.5",
    ]


def test_what_follows_from_the_context_is_in_no_label(tmp_path: Path) -> None:
    short, long = {"steps": 24, "eval_every": 2}, {"steps": 2000, "eval_every": 250}
    result = table(tmp_path / "a", *(summary("x", **one) for one in (short, long)))
    assert [row.method for row in result] == ["x", "x"]
    assert [row.context["steps"] for row in result] == [24, 2000]
    engines = [summary("x", engine=one, **long) for one in ("simulate", "spawn")]
    result = table(tmp_path / "b", summary("x", **short), *engines)
    assert [row.method for row in result] == ["x", "x [simulate]", "x [spawn]"]


def test_numbers_sort_as_numbers(tmp_path: Path) -> None:
    result = table(tmp_path, *(summary("none", workers=n) for n in (16, 2, 8)))
    assert [row.context["workers"] for row in result] == [2, 8, 16]


def test_other_machines_are_named(tmp_path: Path) -> None:
    other = summary("x", provenance={"commit": "abc", "machine": {"cpu": "other"}})
    assert "from 2 machines" in render(table(tmp_path, *BASE, other), "table", 200)


def test_skipped_steps_are_shown(tmp_path: Path) -> None:
    assert "skipped" not in render(table(tmp_path / "a", *BASE), "markdown")
    assert "skipped" in render(table(tmp_path / "b", summary(skipped_steps=3)), "markdown")


# --- failed, unfinished, corrupt, twice


@pytest.mark.parametrize(
    "bad", [{"accuracy": None}, {"accuracy": NAN}, {"test_loss": math.inf}, {"test_loss": None}]
)
def test_failed_seeds_are_counted_and_in_no_mean(tmp_path: Path, bad: dict[str, Any]) -> None:
    row = table(tmp_path, *BASE, summary("x", 0, 0.92), summary("x", **({"seed": 1} | bad)))[1]
    assert (row.mean, row.failed, row.in_band) == (0.92, (1,), "no: failed")
    assert "1 (1 failed)" in render([row], "table", 200)


def test_a_seed_that_diverged_is_in_no_top_5_accuracy(tmp_path: Path) -> None:
    """With NaN parameters a run has the accuracies of guessing, and no finite loss."""
    runs = [summary("none", 0, 0.7), summary("none", 1, 0.001, test_loss=None)]
    (row,) = table(
        tmp_path, *({**run, "test_top5": t} for run, t in zip(runs, (0.9, 0.005), strict=True))
    )
    assert (row.mean, row.test_top5) == (0.7, 0.9)


def test_bytes_are_of_the_seeds_that_ended(tmp_path: Path) -> None:
    """One that failed at its third step has sent nearly nothing."""
    failed = summary("x", 2, None) | {
        "failed": {"step": 3, "reason": "not finite"},
        "payload_bytes_up": 0,
        "payload_bytes_down": 0,
        "wire_bytes": {"per_worker": 0, "total": 0},
    }
    row = table(tmp_path / "a", summary("x", 0), summary("x", 1), failed)[0]
    assert (row.n, row.failed) == (2, (2,))
    assert (row.payload_bytes_step, row.wire_bytes_step, row.payload) == (5e5, 7.5e5, 0.5)
    (alone,) = table(tmp_path / "b", failed)
    assert (alone.payload_bytes_step, alone.wire_bytes_step) == (None, None)
    assert math.isnan(alone.payload)


def test_a_loss_that_was_not_measured_is_no_failure(tmp_path: Path) -> None:
    theirs = summary("x", 0, 0.92)
    del theirs["test_loss"]
    assert table(tmp_path, *BASE, theirs)[1].failed == ()


def test_all_seeds_failed(tmp_path: Path) -> None:
    result = table(tmp_path, *BASE, summary("x", 0, NAN), summary("x", 1, None))
    assert result[1].mean is None
    assert "failed" in render(result, "table", 200).splitlines()[4]
    record = json.loads(render(result, "json"))[1]
    assert (record["n"], record["failed"], record["mean"]) == (0, 2, None)
    run_plots.draw([run for row in result for run in row.runs], tmp_path / "x.png")


def test_unfinished_runs_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "deep" / "er", summary())
    (tmp_path / "digits-x-half").mkdir()
    for name in ("config.json", "provenance.json"):
        (tmp_path / "digits-x-half" / name).write_text("{}")
    assert len(load([tmp_path, tmp_path / "digits-x-half"])) == 1
    assert "1 unfinished run left out: digits-x-half" in capsys.readouterr().err
    with pytest.raises(GcbenchError, match="1 unfinished run and no finished one: digits-x-half"):
        load([tmp_path / "digits-x-half"])


def test_runs_below_a_config_of_another_program_are_read(tmp_path: Path) -> None:
    (write(tmp_path, summary()) / "config.json").write_text("{}")
    assert len(load([tmp_path])) == 1


def test_links_to_runs_are_followed_and_end(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere", summary(), summary("x"))
    (tmp_path / "picks").mkdir()
    for run in (tmp_path / "elsewhere").glob("*x*"):
        (tmp_path / "picks" / run.name).symlink_to(run)
    (tmp_path / "picks" / "again").symlink_to(tmp_path / "picks")
    (tmp_path / "picks" / "above").symlink_to(tmp_path)
    (run,) = load([tmp_path / "picks"], repeated=True)
    assert run.summary.compressor_name == "x"


def test_what_may_not_be_read_is_no_empty_folder() -> None:
    """A process of its own gives up the rights of root, if it has them."""
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom gcbench.results.reader import load\n"
        "if not os.geteuid():\n    os.seteuid(65534)\nload([Path(sys.argv[1])])"
    )
    with tempfile.TemporaryDirectory() as top:
        place = write(Path(top) / "runs", summary(), summary("x"))
        first, second = sorted(place.iterdir())
        Path(top).chmod(0o755)
        summary_file = second / "summary.json"
        for one, mode in ((first, 0), (second, 0o444), (summary_file, 0), (Path(top), 0)):
            one.chmod(mode)
            command = [sys.executable, "-c", code, str(place)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            one.chmod(0o755)
            error = done.stderr.splitlines()[-1]
            assert re.search(rf"GcbenchError: {one}\b.* cannot be read", error), error
            assert "delete" not in error


def test_a_run_found_twice_is_taken_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "runs", summary())
    (tmp_path / "rows.json").write_text(json.dumps([summary()]))
    folder = tmp_path / "runs"
    assert len(load([folder, *folder.iterdir(), tmp_path / "rows.json"])) == 1
    assert capsys.readouterr().err == ""
    (tmp_path / "other.json").write_text(json.dumps(summary(accuracy=0.1)))
    (run,) = load([folder, tmp_path / "other.json"])
    assert run.summary.test_accuracy == 0.5
    assert "same config and seed, other results" in capsys.readouterr().err
    (tmp_path / "both.json").write_text(json.dumps([summary(), summary(accuracy=0.1)]))
    load([tmp_path / "both.json"])
    assert "both.json, row 2 left out, " in capsys.readouterr().err


def test_my_copy_of_a_row_of_a_suite_leaves_it_in_the_suite(tmp_path: Path) -> None:
    """And an older version's row leaves the current one: labels are not mixed up."""
    reference = ROOT / "results/reference/terngrad-table1.parquet"
    every = stored.read(reference)
    mine = tmp_path / "mine.json"
    copies = [{**row, "suite": ""} for row in every if row["seed"] == 0]
    mine.write_text(json.dumps([{**row, "test_accuracy": 0.5} for row in copies]))
    older = tmp_path / "older.parquet"
    stored.write(older, [{**row, "suite": "terngrad-table1/0"} for row in every])
    words = ("--details", "--columns", "accuracy,n")
    expected = invoke("compare", reference, "--suite", "terngrad-table1", *words).out
    lines = [line for line in expected.splitlines() if re.search(r"\d ± \d", line)]
    assert len(lines) == 4
    both = invoke("compare", mine, older, reference, *words)
    assert [line for line in both.out.splitlines() if line in lines] == lines
    assert [line.split()[-2:] for line in both.out.splitlines() if " 50.00 " in line] == [
        ["50.00", "1"]
    ] * 4
    assert len(load([mine, reference])) == len(every) + len(copies)
    frame = gcbench.load_results(mine, reference)
    assert len(frame) == len(every)


def test_rows_of_a_suite_without_a_result_leave_the_others(tmp_path: Path) -> None:
    """Those of another version, and trials: alone they are refused, without a page or table."""
    version = f"terngrad-table1/{suites.load('terngrad-table1').version}"
    tried = summary("x", accuracy=None, validation_accuracy=0.5)
    tried["config"] |= {"test": False, "holdout": 100}
    for name, one, suite in (
        ("older", summary("x"), "terngrad-table1/0"),
        ("tried", tried, version),
    ):
        stored.write(tmp_path / f"{name}.parquet", [stored.row(one, [], suite)])
        alone = invoke("compare", tmp_path / f"{name}.parquet")
        assert (alone.code, alone.out) == (2, "")
        assert "all of " not in alone.err
    write(tmp_path / "runs", summary("mine"))
    both = invoke("compare", tmp_path / "runs", tmp_path / "tried.parquet", "--columns", "accuracy")
    assert (both.code, "mine" in both.out, "only trials" in both.err) == (0, True, True)
    page = invoke("report", tmp_path / "older.parquet", "-o", tmp_path / "x.html")
    assert (page.code, (tmp_path / "x.html").exists()) == (2, False)


def test_the_note_on_the_test_set_has_the_least_difference_with_a_verdict(tmp_path: Path) -> None:
    """Without noise among seeds; six of 360 examples, as in the exact test."""
    for wrong, is_below in ((5, True), (6, False)):
        runs = [
            summary(name, seed, right / 360, test_examples=360)
            for name, right in (("none", 300), ("x", 300 - wrong))
            for seed in range(3)
        ]
        _, row = result = table(tmp_path / str(wrong), *runs)
        text = render(result)
        least = float(re.search(r"Differences below ([\d.]+) points", text)[1])
        assert (100 * wrong / 360 < round(least, 1) - 0.05) == is_below
        assert (row.difference_high >= 0) == is_below


def test_an_accuracy_above_one_is_refused(tmp_path: Path) -> None:
    """It was printed as 170 %."""
    (tmp_path / "rows.json").write_text(json.dumps([summary(accuracy=1.7)]))
    with pytest.raises(GcbenchError, match="`test_accuracy`: a number from 0 to 1 expected"):
        load([tmp_path / "rows.json"])


def test_a_run_made_twice_with_one_result_is_no_contradiction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with a field that is given at its default: times differ, and the hash of the config."""
    again = summary(step_seconds=0.07, config_hash="other", provenance={"started": "later"})
    for number, one in enumerate((summary(), again)):
        (tmp_path / f"{number}.json").write_text(json.dumps(one))
    assert len(load([tmp_path / "0.json", tmp_path / "1.json"])) == 1
    assert capsys.readouterr().err == ""


def test_seeds_of_different_code_are_not_averaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a third party's plug-in; of a file of the package, which may differ by a comment, told."""

    def by(key: str, digest: str, seed: int, accuracy: float) -> Any:
        mine = {"plugins": {"compressor": {"sha256": digest}}, "source": digest}
        return summary("x", seed, accuracy, provenance={key: mine[key]})

    result = [by("plugins", "a1b2c3d4", 0, 0.93), by("plugins", "e5f6a7b8", 1, 0.09)]
    output = table(tmp_path / "theirs", *BASE, *result)[1:]
    assert {row.method: row.mean for row in output} == {
        "x [source a1b2c3]": 0.93,
        "x [source e5f6a7]": 0.09,
    }
    assert capsys.readouterr().err == ""
    built_in = [by("source", "a1b2c3d4", 0, 0.93), by("source", "e5f6a7b8", 1, 0.09)]
    (row,) = table(tmp_path / "ours", *BASE, *built_in)[1:]
    assert row.n == 2
    assert "runs of x by different versions of x.py are in one row: " in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["task source", "data"])
def test_runs_of_another_task_or_other_data_are_not_compared(tmp_path: Path, kind: str) -> None:
    """A method is paired with fp32 of its task's code and data; seeds of two are not averaged."""

    def by(name: str, digest: str, seed: int, accuracy: float) -> Any:
        origin = {"plugins": {"task": {"sha256": digest}}} if kind != "data" else {"data": digest}
        return summary(name, seed, accuracy, provenance=origin)

    new = [by("none", "new", seed, 0.5) for seed in (0, 1)]
    old = [by("none", "old", seed, 0.9) for seed in (0, 1)]
    mine = [by("x", "new", seed, 0.6) for seed in (0, 1)]
    for order, runs in enumerate([[*old, *new, *mine], [*new, *old, *mine]]):
        result = table(tmp_path / f"{order}", *runs)
        assert [(row.context[kind], row.n) for row in result] == [
            ("new", 2),
            ("new", 2),
            ("old", 2),
        ]
        assert result[1].difference == pytest.approx(0.1)
    alone = table(tmp_path / "alone", *old, *mine)
    assert [row.baseline_n for row in alone if row.method == "x"] == [0]
    (same,) = table(tmp_path / "same", *mine)
    assert kind not in same.context


def test_rows_without_equal_uncompressed_ones_prefer_a_baseline_that_did_not_diverge(
    tmp_path: Path,
) -> None:
    """At another rate: neither one lucky seed of three, nor one without common seeds, counts."""
    whole = [summary("none", seed, 0.90 + seed / 1000, lr=0.2) for seed in range(3)]
    lucky = [summary("none", seed, 0.95 if seed == 0 else None, lr=0.8) for seed in range(3)]
    other = [summary("none", seed, 0.95, lr=0.4) for seed in (7, 8, 9)]
    mine = [summary("x", seed, 0.80 + seed / 1000) for seed in range(3)]
    row = next(row for row in table(tmp_path, *whole, *lucky, *other, *mine) if row.method == "x")
    assert (row.tuned, row.pairs, row.difference) == (("lr",), 3, pytest.approx(-0.1))


def test_a_row_with_losses_alone_has_not_diverged(tmp_path: Path) -> None:
    """All rows of the task are compared by their losses."""
    mine = [summary("x", seed, None, test_loss=0.31) for seed in (0, 1)]
    none, row = table(tmp_path, *BASE, *mine)
    assert (row.metric, row.failed, row.mean) == ("test_loss", (), 0.31)
    assert none.mean == 0.25


def test_a_row_with_a_diverged_seed_is_not_better(tmp_path: Path) -> None:
    mine = [summary("x", seed, 0.99 if seed else None) for seed in range(3)]
    none = [summary("none", seed, 0.5 + seed / 1000) for seed in range(3)]
    row = table(tmp_path, *none, *mine)[1]
    assert row.difference_low is not None
    assert row.difference_low > 0
    assert not row.above_baseline


def test_a_record_has_every_setting_and_no_formula(tmp_path: Path) -> None:
    """A task's field that is called as a statistic is renamed; a heading may not be a formula."""
    runs = [
        summary("x", seed, 0.9, task_options={"n": n, "=1+1": n}) for seed in (0, 1) for n in (1, 2)
    ]
    result = table(tmp_path, *runs)
    assert [(row.record()["task.n"], row.record()["n"]) for row in result] == [(1, 2), (2, 2)]
    heading = invoke("compare", tmp_path, "--format", "csv").out.splitlines()[0]
    assert "=1+1" in heading
    assert ",=1+1" not in heading


def test_a_label_of_several_words_stays_whole(tmp_path: Path) -> None:
    name = "gradient dropping with warm-up (ours)"
    write(tmp_path / "runs", *BASE, summary("x", 0, 0.9), summary("x", 1, 0.91))
    assert name in invoke("compare", tmp_path / "runs", "--label", f"{name}=x").out


def test_trials_beside_a_suite_do_not_hide_its_rows(tmp_path: Path) -> None:
    trial = summary("x", 100, None, test_loss=None, validation_accuracy=0.9, validation_loss=0.3)
    trial["config"] |= {"test": False, "holdout": 500}
    (tmp_path / "trial.json").write_text(json.dumps([trial]))
    done = invoke(
        "compare", tmp_path / "trial.json", ROOT / "results/reference/terngrad-table1.parquet"
    )
    assert done.code == 0, done.err
    assert "terngrad" in done.out
    assert "--trials" in done.err


def test_rows_of_a_suite_that_has_changed_stand_beside_others(tmp_path: Path) -> None:
    write(tmp_path / "runs", *BASE)
    mine = [summary("x", seed, 0.9) | {"suite": suites.load("main").label()} for seed in (0, 1)]
    stored.write(tmp_path / "rows.parquet", mine)
    done = invoke("compare", tmp_path / "runs", tmp_path / "rows.parquet")
    assert done.code == 0, done.err
    assert re.search(r"^x +90\.00", done.out, re.MULTILINE)
    assert "suite main" in done.err
    assert invoke("compare", tmp_path / "rows.parquet", "--suite", "main").code == 2


def test_a_report_counts_a_run_once(tmp_path: Path) -> None:
    """It may be in a folder, and in a file with the label of a suite that has changed."""
    from gcbench.report import sections

    runs = [summary(name, seed, 0.5, steps=1000) for name in ("none", "x") for seed in (0, 1)]
    write(tmp_path / "runs", *runs)
    label = {"suite": suites.load("main").label()}
    stored.write(tmp_path / "rows.parquet", [run | label for run in runs])
    loaded = load([tmp_path / "runs", tmp_path / "rows.parquet"])
    (one,), _ = sections.compared(loaded, None, ())
    assert [row.n for row in one.rows] == [2, 2]


def test_third_party_rows_stand_beside_runs(tmp_path: Path) -> None:
    write(tmp_path / "runs", *BASE)
    (tmp_path / "theirs.json").write_text(json.dumps([summary("theirs", 1, 0.93)]))
    result = rows(load([tmp_path / "runs", tmp_path / "theirs.json"]))
    assert [(row.method, row.pairs) for row in result] == [("none", 0), ("theirs", 1)]


def test_paths_that_are_no_results(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "note.txt").write_text("x")
    (tmp_path / "none.json").write_text("[]")
    for path, words in [
        ("missing", "does not exist"),
        ("empty", "no run in .*gcbench run"),
        ("note.txt", "neither a folder"),
        ("none.json", "empty list"),
    ]:
        with pytest.raises(UsageError, match=words):
            load([tmp_path / path])
    with pytest.raises(UsageError, match="no folder was named"):
        load([])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read"),
        ("[1]", "list found, a summary object expected"),
        (json.dumps(summary() | {"schema": 2}), "schema 2, but this gcbench reads 1"),
        (json.dumps(summary() | {"steps": "many"}), "`steps`: .* integer.*delete it"),
        (json.dumps(summary() | {"wire_bytes": {}}), r"`wire_bytes\.per_worker`: .*required"),
        (json.dumps(summary() | {"payload_bytes_up": -1}), "`payload_bytes_up`: .*greater"),
        (json.dumps(summary() | {"test_loss": 10**400}), "`test_loss`: .*number"),
    ],
)
def test_corrupt_summaries_say_what_to_do(tmp_path: Path, text: str, words: str) -> None:
    write(tmp_path, summary())
    path = next(tmp_path.glob("*/summary.json"))
    path.write_text(text)
    with pytest.raises(GcbenchError, match=words) as caught:
        load([tmp_path])
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


# --- formats


@pytest.fixture
def many(tmp_path: Path) -> list[Any]:
    """Rows with every kind of cell: two tasks, two engines, a failed seed, special characters."""
    quadratic = [
        summary(name, seed, None, task="quadratic", workers=16, engine="spawn", test_loss=loss)
        for name, seed, loss in [("none", 0, 1e-5), ("none", 1, 2e-5), ("fp16", 0, 123.456)]
    ]
    odd = summary("odd_100%", 0, 0.91, options={"rule": "a|b&c"}, compressor="Odd(rule='a|b&c')")
    return table(tmp_path, *BASE, odd, summary("sign", 0, 0.9), summary("sign", 1, NAN), *quadratic)


def test_json_and_csv_parse_back(many: list[Any]) -> None:
    records = json.loads(render(many, "json"))
    cells = list(csv.DictReader(io.StringIO(render(many, "csv"))))
    assert [one["method"] for one in cells] == [one["method"] for one in records]
    assert len(records) == 5
    for record, cell, row in zip(records, cells, many, strict=True):
        assert record["mean"] == row.mean
        assert float(cell["mean"]) == row.mean
        assert json.loads(cell["values"]) == record["values"] == list(row.values.values())
        assert cell["sd"] == ("" if row.sd is None else str(row.sd))
        assert record["task"] == cell["task"] == row.context["task"]


def test_markdown_and_latex_keep_their_columns(many: list[Any]) -> None:
    lines = [line for line in render(many, "markdown").splitlines() if line.startswith("|")]
    counts = [line.replace("\\|", "").count("|") for line in lines]
    assert counts == [counts[0]] * 7 + [counts[7]] * 7
    latex = render(many, "latex")
    body = [line for line in latex.splitlines() if line.endswith(r"\\")]
    counts = [line.replace(r"\&", "").count("&") for line in body]
    assert counts == [counts[0]] * 6 + [counts[6]] * 6
    assert r"odd\_100\% rule=a|b\&c" in latex
    assert latex.count(r"\toprule") == latex.count(r"\end{tabular}") == 2
    assert not set("±~†µ") & set(latex)


@pytest.mark.parametrize("width", [60, 80, 120, 200, 400])
def test_terminal_tables_fit_and_cut_nothing(many: list[Any], width: int) -> None:
    text = render(many, "table", width)
    assert max(map(len, text.splitlines())) <= width
    words = text.split()
    for record in [*render(many, "markdown").split("\n")]:
        for word in record.replace("\\|", "¦").replace(" | ", " ").split():
            if set(word) - set("|:-"):
                assert word.replace("¦", "|") in words, word
    assert "…" not in text


def test_wide_is_one_table_and_narrow_several(tmp_path: Path) -> None:
    result = table(tmp_path, *BASE)
    assert render(result, "table", 400).count("─\n") == 1
    assert render(result, "table", 80).count("─\n") == 3


def test_unknown_format_and_no_rows(many: list[Any]) -> None:
    with pytest.raises(UsageError, match=r"unknown format 'jsn'. Did you mean 'json'\?.*latex"):
        render(many, "jsn")
    with pytest.raises(UsageError, match="no rows"):
        render([])


# --- pictures


@pytest.mark.parametrize(
    ("ending", "magic"), [(".png", b"\x89PNG\r\n"), (".svg", b"<?xml"), (".PDF", b"%PDF-")]
)
def test_pictures_are_what_their_ending_says(tmp_path: Path, ending: str, magic: bytes) -> None:
    path = tmp_path / f"picture{ending}"
    runs = load([write(tmp_path / "runs", *BASE)])
    run_plots.draw(runs, path)
    first = path.read_bytes()
    assert first.startswith(magic)
    run_plots.draw(runs, path)
    assert path.read_bytes() == first  # equal runs, equal file


def test_a_curve_stops_where_a_run_diverged(tmp_path: Path) -> None:
    (run,) = load([write(tmp_path, summary())])
    records: list[dict[str, Any]]
    records = [{"kind": "eval", "step": s, "test_accuracy": 0.1, "test_loss": 1.0} for s in (1, 2)]
    records[1]["test_loss"] = None  # as the engine writes NaN
    records.append({"kind": "train", "step": 3, "train_loss": 1.0})
    (run.source / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    curve = run_plots.curve(run, "accuracy")
    assert curve[1] == 0.1
    assert math.isnan(curve[2])
    assert list(curve) == [1, 2]


def test_pictures_refuse(tmp_path: Path) -> None:
    runs = load([write(tmp_path / "runs", *BASE)])
    with pytest.raises(UsageError, match=r"\.png, \.svg, \.pdf"):
        run_plots.draw(runs, tmp_path / "x.jpg")
    with pytest.raises(UsageError, match="no runs"):
        run_plots.draw([], tmp_path / "x.png")
    with pytest.raises(UsageError, match="is not a folder"):
        run_plots.draw(runs, tmp_path / "missing" / "x.png")
    (tmp_path / "taken.png").mkdir()
    with pytest.raises(GcbenchError, match="cannot write"):
        run_plots.draw(runs, tmp_path / "taken.png")
    for name in ("metrics.jsonl", "metrics.parquet"):
        (runs[0].source / name).write_text("{")
        with pytest.raises(GcbenchError, match=r"metrics in .* cannot be read"):
            run_plots.draw(runs, tmp_path / "x.png")


def axes_of(width: float, height: float, **options: float) -> Any:
    """Return axes from 0 to 10 in a figure of that many inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), **options)
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set(xlim=(0, 10), ylim=(0, 10))
    return axes


def test_labels_lie_over_no_mark_and_no_label() -> None:
    from matplotlib.text import Text

    axes = axes_of(6, 5)
    marks = [figures.Mark(4 + i / 2, 5 + i / 9, 0.1, f"method number {i}", "C0") for i in range(6)]
    figures.write_labels(axes, marks)
    boxes = [Text.get_window_extent(label) for label in axes.texts]
    assert len(boxes) == 6
    for place, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:place])
        for mark in marks:
            for height in (mark.y - mark.spread, mark.y, mark.y + mark.spread):
                assert not box.contains(*axes.transData.transform((mark.x, height)))


def test_a_wide_label_stays_in_the_frame() -> None:
    """Beside a mark at three quarters of the width it would run over the axis."""
    from matplotlib.text import Text

    axes = axes_of(3, 3)
    figures.write_labels(
        axes, [figures.Mark(7.5, 5, 0.1, "a label nearly as wide as its frame", "C0")]
    )
    (label,) = axes.texts
    frame, box = axes.get_window_extent(), Text.get_window_extent(label)
    assert box.width > 0.8 * frame.width, "else it fits anywhere"
    assert frame.x0 - 1 <= box.x0 <= box.x1 <= frame.x1 + 1


def test_a_line_to_a_mark_crosses_no_label() -> None:
    """Whichever of the two was placed first; 20 layouts of marks that lie close together."""
    import numpy as np
    from matplotlib.text import Text

    crossed, lines = 0, 0
    for seed in range(20):
        places = 5 + np.random.default_rng(seed).normal(size=(7, 2)) * (0.5, 0.4)
        axes = axes_of(8, 6, dpi=72)
        names = ("powersgd", "efsignsgd", "onebit", "signsgd", "topk ratio=0.01", "fft", "demo")
        figures.write_labels(
            axes,
            [
                figures.Mark(x, y, 0.05, name, "C0")
                for name, (x, y) in zip(names, places, strict=True)
            ],
        )
        boxes = [Text.get_window_extent(one) for one in axes.texts]
        for place, label in enumerate(axes.texts):
            if label.arrow_patch is None:
                continue
            lines += 1
            start, end = axes.transData.transform(label.xy), boxes[place]
            near = np.clip(start, end.min, end.max)
            along = [near + share * (start - near) for share in np.linspace(0, 1, 50)]
            others = boxes[:place] + boxes[place + 1 :]
            crossed += sum(any(box.contains(*at) for at in along) for box in others)
    assert lines > 10
    assert crossed == 0


def drawing(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that is filled with the figures that are saved."""
    remaining: list[Any] = []
    save = figures.save

    def keep(figure: Any, path: Path) -> None:
        remaining.append(figure)
        save(figure, path)

    monkeypatch.setattr(figures, "save", keep)
    return remaining


def test_colours_never_repeat() -> None:
    for count in (1, 10, 11, 40):
        looks = figures.styles(f"m{i}" for i in range(count))
        assert len({tuple(look["color"]) for look in looks.values()}) == count
    assert figures.colours(3) == figures.colours(10)[:3]


def test_a_label_without_room_is_its_number() -> None:
    for size, expected in ((9, 0), (1.2, 15)):
        axes = axes_of(size, size)
        marks = [
            figures.Mark(1 + i % 6, 1 + i // 6, 0, f"a long name {i}", "C0", str(i))
            for i in range(15)
        ]
        figures.write_labels(axes, marks)
        short = sum(label.get_text().isdigit() for label in axes.texts)
        assert (short > 0) is (expected > 0)
    crowded = [figures.Mark(5, 5, 0, f"a very long name indeed {i}", "C0") for i in range(8)]
    assert figures.write_labels(axes, crowded) > 0  # and says so where nothing fits


def test_a_short_label_beside_its_mark_is_better_than_a_long_one_far_away() -> None:
    """A long label that fits only at a distance would stand beside another method's mark."""
    axes = axes_of(6, 3)
    bars = [figures.Mark(2.5, 5, 2, "a", "C0"), figures.Mark(4.5, 5, 2, "b", "C0")]
    marks = [figures.Mark(3, 5, 0, "long name of a method", "C0", "short"), *bars]
    assert figures.write_labels(axes, marks) == 0
    (label,) = [one for one in axes.texts if one.get_text() == "short"]
    assert abs(label.get_position()[1]) < figures.FAR
    assert label.arrow_patch is None


def test_a_label_stands_nearest_to_its_own_mark() -> None:
    """Unless a line joins the two, a reader takes a label for that of the nearest mark."""
    import numpy as np
    from matplotlib.text import Text

    axes = axes_of(8, 5, dpi=72)
    places = [(3, 6), (3, 5.3), (3.6, 6), (2.7, 6.7), (3.5, 4.8), (7, 5.0), (8, 5.2), (8.3, 5.2)]
    marks = [figures.Mark(x, y, 0, f"a method at {x}, {y}", "C0", str(x)) for x, y in places]
    assert figures.write_labels(axes, marks) == 0
    points = axes.transData.transform(places)
    for mine, label in enumerate(axes.texts):
        box = Text.get_window_extent(label)
        away = np.hypot(*(np.clip(points, box.min, box.max) - points).T)
        assert label.arrow_patch is not None or away[mine] == away.min()


def test_the_short_label_of_a_method_is_its_first_field_of_its_own() -> None:
    from gcbench.report import brief

    methods = [
        "none",
        "sign ties=coin memory=none",
        "sign ties=coin memory=momentum",
        "sign ties=coin",
    ]
    assert brief.fewest_fields([tuple(method.split()) for method in methods]) == [
        "none",
        "sign memory=none",
        "sign memory=momentum",
        "sign ties=coin",  # nothing of its own
    ]


def test_a_picture_for_a_paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As wide as the column, TrueType fonts, names, 95 % intervals, the band of `none`."""
    remaining = drawing(monkeypatch)
    write(tmp_path / "runs", *BASE, *(summary("x", s, v) for s, v in enumerate((0.9, 0.91, 0.95))))
    for width, inches in figures.WIDTHS.items():
        path = tmp_path / f"{width}.pdf"
        done = invoke("compare", tmp_path / "runs", "--plot", path, "--width", width)
        assert done.code == 0, done.err
        (figure,) = remaining
        remaining.clear()
        assert figure.get_size_inches()[0] == pytest.approx(inches)
        content = path.read_bytes()
        assert b"/Type3" not in content
        assert b"/CIDFontType2" in content or b"/TrueType" in content
        (axes,) = figure.axes
        assert sorted(label.get_text() for label in axes.texts) == ["none", "x"]
        bars = [
            bar.get_segments()[0][:, 1] for bar in axes.collections if hasattr(bar, "get_segments")
        ]
        half = 100 * 4.302653 * 0.02645751 / math.sqrt(3)
        assert bars[1] == pytest.approx([92 - half, 92 + half], abs=1e-3)
        (band,) = axes.patches
        assert (band.get_y(), band.get_y() + band.get_height()) == pytest.approx((90, 94))
    write(tmp_path / "two", *BASE, summary("x", steps=7))
    refused = invoke("compare", tmp_path / "two", "--plot", tmp_path / "y.pdf", "--width", "single")
    assert (refused.code, "--where" in refused.err) == (2, True)
    assert not (tmp_path / "y.pdf").exists()


def test_rows_are_sorted_the_best_first_and_columns_chosen(tmp_path: Path) -> None:
    write(tmp_path, *BASE, summary("x", 0, 0.95, payload_bytes_up=1e6), summary("y", 0, 0.5))
    write(tmp_path / "more", summary("z", 0, None, test_loss=None))

    def order(*words: str) -> list[str]:
        rows = invoke("compare", tmp_path, *words, "--json").json
        return [row["method"] for row in rows]

    assert order("--sort", "accuracy") == ["x", "none", "y", "z"]
    assert order("--sort=-accuracy") == ["y", "none", "x", "z"]  # what has none stays last
    assert order("--sort", "payload")[0] == "x"
    assert set(order("--sort", "target", "--target", "0.9")) == {"x", "y", "z", "none"}
    text = invoke(
        "compare", tmp_path, "--columns", "payload,accuracy,ratio u", "--format", "markdown"
    )
    head = text.out.splitlines()[0].strip("| ").split(" | ")
    assert head == ["method", "payload MB/step", "accuracy %", "ratio up"]
    for words, message in (
        (["--sort", "acuracy"], "unknown --sort 'acuracy'. Did you mean 'accuracy'?"),
        (["--sort=-target"], "add --target"),
        (["--columns", "speed"], "unknown --columns 'speed'"),
        (["--columns", "n", "--json"], "json has every field of a row"),
    ):
        refused = invoke("compare", tmp_path, *words)
        assert (refused.code, message in refused.err) == (2, True), refused.err


def test_columns_in_which_rows_do_not_differ_are_told_once(tmp_path: Path) -> None:
    text = render(table(tmp_path, *BASE, *(summary("x", s, 0.9) for s in range(3))), "markdown")
    assert "collective" not in text.splitlines()[0]
    assert "Equal in all 2 rows: n 3; " in text
    assert "collective allreduce" in text
    other = render(table(tmp_path / "b", *BASE, summary("x", collective="twoshot")), "markdown")
    assert {"n", "collective"} <= set(other.splitlines()[0].strip("| ").split(" | "))


def test_latex_has_a_caption_and_the_best_within_its_interval_is_bold(tmp_path: Path) -> None:
    from gcbench.report.compare import Asked
    from gcbench.report.tables import best_rows

    values = {"best": (0.90, 0.92, 0.94), "near": (0.90, 0.90, 0.90), "far": (0.5, 0.5, 0.5)}
    rows = [summary(name, s, v) for name, mine in values.items() for s, v in enumerate(mine)]
    better = [summary("none", seed, 0.99) for seed in range(3)]
    result = table(tmp_path, *better, *rows)
    assert [result[i].method for i in best_rows(result)] == ["best", "near"]
    text = render(result, "latex", asked=Asked(width="double"))
    assert text.count(r"\textbf{") == 2
    assert r"best & \textbf{92.00 $\pm$ 2.00}" in text
    assert r"near & \textbf{90.00 $\pm$ 0.00}" in text
    for word in (r"\begin{table*}[t]", r"\caption{digits: test accuracy (\%)", r"\toprule"):
        assert word in text
    single = table(tmp_path / "one", BASE[0], summary("a", 0, 0.8), summary("b", 0, 0.79))
    assert [single[i].method for i in best_rows(single)] == ["a"]
    assert r"\begin{table}" in render(single, "latex")


def test_a_suites_picture_has_the_published_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Panels by the paper's rates, numbers of workers across, ours filled, theirs hollow."""
    remaining = drawing(monkeypatch)
    words = [ROOT / "results/reference/terngrad-figure3.parquet", "--suite", "terngrad-figure3"]
    done = invoke("compare", *words, "--plot", tmp_path / "x.png", "--width", "double")
    assert done.code == 0, done.err
    (figure,) = remaining
    assert len(figure.axes) == 2
    rows = invoke("compare", *words, "--json").json
    for axes, momentum in zip(figure.axes, (0.9, 0), strict=True):
        mine = [row for row in rows if row["momentum"] == momentum]
        drawn = {"D": set(), "o": set()}
        for line in axes.lines:
            if line.get_marker() in drawn and len(line.get_ydata()):
                drawn[line.get_marker()] |= {round(float(y), 6) for y in line.get_ydata()}
        assert drawn["D"] == {round(100 * row["published"], 6) for row in mine}
        assert drawn["o"] == {round(100 * row["mean"], 6) for row in mine}
        assert [tick.get_text() for tick in axes.get_xticklabels()] == ["2", "16", "64"]


# --- choices, groups, targets, fronts


def test_a_suites_picture_may_have_the_options_of_a_task_on_its_axis(tmp_path: Path) -> None:
    suite = tmp_path / "mine.yaml"
    suite.write_text(
        "title: mine\nsource: A paper\nplace: Table 9\ndiffers: It is shorter.\npaper_steps: 9\n"
        "config: {task: digits, compressor: [none, topk]}\nentries:\n"
        "  - config: {task_options: {network: mlp}}\n    published: 0.9\n"
        "  - config: {task_options: {network: conv}}\n    published: 0.8\n"
    )
    runs = [
        summary_of(point.config, test_accuracy=0.5) for point in suites.load(str(suite)).points()
    ]
    (tmp_path / "rows.json").write_text(json.dumps(runs))
    picture = tmp_path / "x.svg"
    done = invoke("compare", tmp_path / "rows.json", "--suite", suite, "--plot", picture)
    assert done.code == 0, done.err
    texts = re.findall(r"<!-- (\w+) -->", picture.read_text())
    assert {"network", "mlp", "conv"} <= set(texts)


def test_rows_of_one_method_follow_what_it_chooses(tmp_path: Path) -> None:
    """Not the order of the files: 2, 8 and 16 workers, below each method."""
    write(tmp_path, *(summary(m, 0, 0.5, workers=w) for m in ("x", "none") for w in (16, 2, 8)))
    ordered = rows(load([tmp_path]), choices=frozenset({"workers"}))
    chosen = [(row.runs[0].summary.compressor_name, row.choices["workers"]) for row in ordered]
    assert chosen == [(m, w) for m in ("none", "x") for w in (2, 8, 16)]


def test_the_interval_is_students(tmp_path: Path) -> None:
    """Differences of +0.01, -0.02 and +0.04: t(0.975; 2) = 4.302653."""
    values = (0.91, 0.90, 0.98)
    _, row = table(tmp_path, *BASE, *(summary("near", s, v) for s, v in enumerate(values)))
    half = math.hypot(4.302653 * 0.03 / math.sqrt(3), intervals.resolution(0.01, 10_000.0))
    assert row.difference == pytest.approx(0.01)
    assert row.interval == pytest.approx((0.01 - half, 0.01 + half), rel=1e-6)
    assert f"+1.00 [{100 * (0.01 - half):+.2f}, {100 * (0.01 + half):+.2f}]" in render([row])
    record = row.record()
    assert (record["difference_low"], record["difference_high"]) == row.interval


def test_no_interval_from_one_pair(tmp_path: Path) -> None:
    _, row = table(tmp_path, *BASE, summary("near", 0, 0.91))
    assert row.interval is None
    assert row.record()["difference_low"] is None


def test_the_front_has_what_nothing_beats(tmp_path: Path) -> None:
    """Equal accuracy for more bytes is beaten; equal in both is not; failed seeds never stand."""
    result = table(
        tmp_path,
        summary("none", 0, 0.90, payload_bytes_up=100),
        summary("equal", 0, 0.80, payload_bytes_up=10),
        summary("twin", 0, 0.80, payload_bytes_up=10),
        summary("more", 0, 0.80, payload_bytes_up=11),
        summary("worse", 0, 0.79, payload_bytes_up=10),
        summary("least", 0, 0.10, payload_bytes_up=1),
        summary("failed", 0, None, test_loss=None, payload_bytes_up=0),
        summary("half", 0, 0.99, payload_bytes_up=5),
        summary("half", 1, None, test_loss=None, payload_bytes_up=5),
        summary("elsewhere", 0, 0.01, payload_bytes_up=1000, workers=4),
    )
    front = {row.method for row in result if row.on_front}
    assert front == {"none", "equal", "twin", "least", "elsewhere"}


def spent(step: int) -> dict[str, float]:
    return {
        "payload_bytes_up": 10.0 * step,
        "payload_bytes_down": 1.0 * step,
        "wire_bytes": 7.0 * step,
        "seconds": step / 4,
    }


def evaluated(run: Any, accuracies: dict[int, float | None]) -> None:
    records = [
        {"kind": "eval", "step": step, "test_accuracy": 0.95 if value is None else value}
        | {"test_loss": None if value is None else 1 - value, **spent(step)}
        for step, value in accuracies.items()
    ]
    (run.source / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))


def test_a_number_is_one_budget_however_a_program_writes_it(tmp_path: Path) -> None:
    """The rows of another program have weight decay 0, and ours 0.0."""
    runs = [*BASE, *(summary("theirs", seed, 0.8) for seed in range(3)), summary("none", 0, 0.9)]
    for run, decay in zip(runs, (0.0, 0.0, 0.0, 0, 0, 0, 0.1), strict=True):
        run["config"]["weight_decay"] = decay
    none, theirs, other = table(tmp_path, *runs)
    assert (none.on_front, theirs.on_front, other.on_front) == (True, False, True)
    assert theirs.pairs == 3
    assert len(largest_budget([none, theirs, other])) == 2


def test_what_it_took_to_the_target(tmp_path: Path) -> None:
    """The first evaluation that meets it; the median, a miss infinite; NaN parameters never do."""
    write(tmp_path, *BASE[:2], summary("late", 0), summary("late", 1))
    result = {(run.summary.compressor_name, run.summary.seed): run for run in load([tmp_path])}
    evaluated(result["none", 0], {30: 0.95, 10: 0.5, 20: 0.9})
    evaluated(result["none", 1], {10: 0.5, 20: 0.8, 30: 0.95})
    evaluated(result["late", 0], {10: 0.5, 20: 0.9})
    evaluated(result["late", 1], {10: 0.5, 20: None})
    none, late = rows(list(result.values()), target=0.9)
    assert none.target_step == 25
    assert none.target_payload_bytes == 11 * 25
    assert none.target_wire_bytes == 7 * 25
    assert none.target_seconds == 6.25
    assert late.target_step == math.inf
    lines = seeds.per_run(late.runs, {"digits": "accuracy"}, 0.9)
    assert list(lines["target_step"]) == [20, math.inf]
    text = render([none, late])
    assert "to 90 %:" in text
    assert "2 of 2" in text
    assert "1 of 2" in text
    assert "never" in text
    assert "wall" in text
    late.runs[0].summary.provenance["times"] = "other work ran beside"
    none, late = rows(list(result.values()), target=0.9)
    assert re.search(r"^none .*\b6\.25\b", quiet := render([none, late]), re.MULTILINE)
    assert late.not_quoted in quiet
    none.runs[0].summary.provenance["times"] = "other work ran beside"
    none, late = rows(list(result.values()), target=0.9)
    assert "wall" not in render([none, late])
    record = late.record()
    assert (record["target_reached"], record["target_runs"], record["target_step"]) == (1, 2, None)
    assert "to 90" not in render(rows(list(result.values())))
    for target in ("nan", "inf"):
        with pytest.raises(UsageError, match=f"--target {target}"):
            level(target, [])
        assert invoke("report", tmp_path, "--target", target).code == 2
    with pytest.raises(UsageError, match=r"--target 90: an accuracy in \(0, 1\] expected"):
        rows(list(result.values()), target=90)


def test_modelled_seconds_to_a_target_are_those_of_even_traffic(tmp_path: Path) -> None:
    """A run's mean tells nothing of the first steps if these sent more."""
    link = {"seconds": 2.0, "link_gbit": 1.0, "link_latency_us": 0.0}
    write(tmp_path, summary(communicate_modelled=link, wire_bytes={"per_worker": 700, "total": 0}))
    (run,) = load([tmp_path])
    steps = run.summary.steps
    record = {"kind": "eval", "step": 20, "test_accuracy": 0.95, "test_loss": 0.1}
    even = 700 * 20 / steps
    for measured, seconds in (
        ({"wire_bytes": 4 * even}, None),
        ({"wire_bytes": even}, 40.0),
    ):
        (row,) = rows([replace(run, curve=[{**record, **measured}], number=1)], target=0.9)
        assert row.target_link_seconds == seconds


def test_a_loss_is_met_from_above(tmp_path: Path) -> None:
    (run,) = load([write(tmp_path, summary(accuracy=None))])
    evaluated(run, {10: 0.5, 20: 0.8})  # losses 0.5, 0.2
    (row,) = rows([run], target=0.25)
    assert row.target_step == 20
    assert "loss 0.25" in render([row])
    (row,) = rows([run], target=0.5)
    assert row.target_step == 10


def test_a_target_is_of_the_task_that_is_chosen(tmp_path: Path) -> None:
    """The written runs end at an accuracy of 0.89, and at a loss of 0.01."""
    loss = summary("none", 0, None, task="language")
    folder = write(tmp_path, *BASE, summary("mine", 0, 0.5), loss)
    digits = ("compare", folder, "--where", "task=digits", "--json", "--target")
    assert {row["target"] for row in invoke(*digits, "fp32").json} == {0.89}
    language = ("compare", folder, "--where", "task=language", "--json", "--target")
    assert [row["target_step"] for row in invoke(*language, "0.05").json] == [20]
    (row,) = invoke(*language, "2.5").json
    assert (row["target"], row["target_step"]) == (2.5, 10)
    refused = invoke(*digits, "2.5")
    assert (refused.code, "accuracy in (0, 1]" in refused.err) == (2, True)


def test_a_target_of_accuracies_and_losses_has_one_heading(tmp_path: Path) -> None:
    runs = [*BASE, summary("none", 0, None, task="language")]
    both = rows(load([write(tmp_path, *runs)]), target=0.5)
    assert "to 0.5:" in render(both)
    assert "to 50 %:" not in render(both)
    assert "to 50 %:" in render(both[:1])
    assert "to loss 0.5:" in render(both[1:])


def test_a_diverged_run_sets_no_target(tmp_path: Path) -> None:
    stopped = summary("none", 2, None) | {"failed": {"step": 20, "reason": "not finite"}}
    runs = load([write(tmp_path, summary("none", 0), summary("none", 1), stopped)])
    for run, curve in zip(runs, ({10: 0.97}, {10: 0.5, 20: None}, {10: 0.1}), strict=True):
        evaluated(run, curve)
    assert level("fp32", runs) == 0.97
    with pytest.raises(UsageError, match="--target fp32"):
        level("fp32", runs[1:])


def test_chosen_rows_keep_their_baseline(tmp_path: Path) -> None:
    folder = write(tmp_path, *BASE, summary("near", 0, 0.91), summary("near", 0, 0.5, workers=4))
    shown = invoke(
        "compare", folder, "--where", "compressor=near", "--where", "workers=2", "--json"
    )
    (row,) = shown.json
    assert (row["compressor_name"], row["workers"]) == ("near", 2)
    assert row["difference"] == pytest.approx(0.01)
    (row,) = invoke("compare", folder, "--where", "seed=1,2", "--json").json
    assert (row["compressor_name"], row["seeds"]) == ("none", [1, 2])
    assert "seed=2" in invoke("compare", folder, "--by", "seed", "--where", "seed=2").out
    for words, text in [
        (["--where", "worker=2"], "Did you mean 'workers'"),
        (["--where", "workers=3"], "unknown workers '3'. Known: 2, 4"),
        (["--where", "workers=2,3"], "unknown workers '3'. Known: 2, 4"),
        (["--where", "seed=0,9"], "unknown seed '9'. Known: 0, 1, 2"),
        (["--where", "workers"], "SETTING=VALUE"),
        (["--where", "seed=1", "--where", "seed=2"], "each setting once"),
        (["--where", "workers=4", "--where", "compressor=none"], "no row has all of"),
        (["--by", "wrkers"], "Did you mean 'workers'"),
        (["--by", "seed"], "--where seed="),
    ]:
        refused = invoke("compare", folder, *words)
        assert (refused.code, text in refused.err) == (2, True), refused.err


def test_a_value_of_one_group_alone_shows_the_rows_of_that_group(tmp_path: Path) -> None:
    mine = write(tmp_path, *BASE, summary("mine", 0, 0.91))
    words = ("compare", mine, ROOT / "results/reference/terngrad-table1.parquet", "--where")
    done = invoke(*words, "compressor=mine")
    assert (done.code, done.err) == (0, "")
    assert "mine" in done.out
    assert "Suite" not in done.out
    done = invoke(*words, "compressor=terngrad")
    assert (done.code, done.err) == (0, "")
    assert "62.71" in done.out
    refused = invoke(*words, "compressor=terngrad,other")
    assert refused.code == 2
    assert "unknown compressor 'other'" in refused.err
    assert refused.out == ""


def test_a_width_needs_a_picture_or_latex(tmp_path: Path) -> None:
    words = ("compare", write(tmp_path, *BASE), "--width", "single")
    for more, code in (([], 2), (["--format", "csv"], 2), (["--format", "latex"], 0)):
        done = invoke(*words, *more)
        assert (done.code, "--width single" in done.err) == (code, code == 2), done


def test_a_plug_in_is_selected_and_labelled_by_its_file(tmp_path: Path) -> None:
    one, two = summary("mine", 0, 0.91), summary("mine", 1, 0.92, workers=4)
    one["config"]["memory"], two["config"]["memory"] = "none", "differences"
    folder = write(tmp_path, *BASE, one, two)
    for words in (
        ("--where", "compressor=./mine.py", "--where", "memory=a folder/differences.py"),
        ("--label", "it=./mine.py:memory=./differences.py", "--where", "workers=4"),
    ):
        done = invoke("compare", folder, *words, "--json")
        assert done.code == 0, done.err
        (row,) = done.json
        assert row["mean"] == 0.92
    assert row["method"] == "it"


def recording(memory: str, name: str = "topk", **over: Any) -> Any:
    """Return a summary whose run recorded its memory, a call with every field."""
    run = summary(name, 0, 0.5, **over)
    run["config"] |= {"memory": memory.partition("(")[0].lower(), "memory_options": {}}
    run["provenance"]["objects"] = {"memory": memory}
    return run


def test_a_field_that_no_flag_gave_is_grouped_by_its_recorded_value(tmp_path: Path) -> None:
    half = recording("Residual(decay=0.5, at_owner=True)")
    half["config"]["memory_options"] = {"decay": 0.5}
    runs = [half, recording("Residual(decay=1.0, at_owner=True)"), recording("NoMemory()", "none")]
    folder = write(tmp_path, *runs)
    text = invoke("compare", folder, "--by", "memory.decay").out
    titles = [line.partition("=")[2] for line in text.splitlines() if line.startswith("memory.")]
    assert sorted(titles) == ["-", "0.5", "1"]
    (row,) = invoke("compare", folder, "--where", "memory.decay=1", "--json").json
    assert row["method"] == "topk"


def test_a_field_of_the_method_keeps_its_name_beside_one_of_its_memory(tmp_path: Path) -> None:
    run = recording("Dgc(momentum=0.9, clip=0.0)", "terngrad", options={"clip": 2.5})
    (one,) = load([write(tmp_path, run)])
    settings = settings_of(one)
    assert (settings["clip"], settings["memory.clip"]) == (2.5, 0.0)


def test_a_list_is_one_value_of_a_condition(tmp_path: Path) -> None:
    runs = [summary("none", seed, 0.5) for seed in range(3)]
    for run, betas in zip(runs, ([0.9, 0.95], [0.9, 0.99], [0.8, 0.99]), strict=True):
        run["config"] |= {"betas": betas, "task_options": {"sizes": [1, 2]}}
    folder = write(tmp_path, *runs)

    def seeds_of(condition: str) -> list[int]:
        result = invoke("compare", folder, "--where", condition, "--json").json
        return [seed for row in result for seed in row["seeds"]]

    assert seeds_of("betas=[0.9,0.95]") == [0]
    assert sorted(seeds_of("betas=[0.9,0.99],[0.8,0.99]")) == [1, 2]
    assert sorted(seeds_of("sizes=[1,2]")) == [0, 1, 2]


def of_task(task: str, recorded: str, score: float, /, **options: Any) -> dict[str, Any]:
    """Return the summary of a run of fp32 with these task options, and the recorded fields."""
    run = summary("none", 0, score, task=task)
    run["config"] |= {"task": task, "task_options": options}
    run["provenance"]["objects"] = {"task": f"Net({recorded})"}
    return run


def test_fields_of_a_task_are_columns_where_its_runs_differ(tmp_path: Path) -> None:
    """A default that was not given has its value; what differs between tasks only has no column."""
    runs = [
        of_task("text", "width=8, tied=True, lr=1", 0.7, tied=True, lr=1),
        of_task("text", "width=16, tied=True, lr=2", 0.8, tied=True, width=16, lr=2),
        of_task("images", "network='mlp'", 0.9, network="mlp"),
    ]
    result = table(tmp_path, *runs)
    assert [row.context for row in result] == [
        {"task": "images", "task.lr": "-", "width": "-"},
        {"task": "text", "task.lr": 1, "width": 8},
        {"task": "text", "task.lr": 2, "width": 16},
    ]
    assert [row.mean for row in result] == [0.9, 0.7, 0.8]
    records = invoke("compare", tmp_path, "--json").json
    assert [one["width"] for one in records] == ["-", 8, 16]


def test_task_options_that_their_fields_do_not_tell_apart_are_a_column(tmp_path: Path) -> None:
    explicit = of_task("text", "width=8", 0.7, width=8)
    default, unrecorded = of_task("text", "width=8", 0.8), of_task("text", "", 0.6, width=9)
    assert [row.context for row in table(tmp_path / "one", explicit, default)] == [
        {"task_options": {"width": 8}},
        {"task_options": {}},
    ]
    assert [row.context for row in table(tmp_path / "two", default, unrecorded)] == [
        {"width": 8},
        {"width": 9},
    ]


def test_groups_have_a_table_each(tmp_path: Path) -> None:
    folder = write(tmp_path, *BASE, summary("near", 0, 0.91), summary("near", 0, 0.5, workers=4))
    text = invoke("compare", folder, "--by", "workers").out
    assert text.index("workers=2") < text.index("near") < text.index("workers=4")
    assert "workers  method" not in text
    assert "**workers=4" in invoke("compare", folder, "--by", "workers", "--format", "markdown").out
    assert len(invoke("compare", folder, "--by", "workers", "--json").json) == 3


def test_evaluations_that_cannot_be_read(tmp_path: Path) -> None:
    (run,) = load([write(tmp_path, summary())])
    (run.source / "metrics.jsonl").write_text('{"step": 3}')
    with pytest.raises(GcbenchError, match=r"metrics in .* cannot be read"):
        run.evaluations()


# --- an index, labels, whole bytes


def test_rows_of_several_suites_have_an_index() -> None:
    place = ROOT / "results/reference"
    shown = invoke("compare", place, "--json").json
    names = {path.stem for path in place.glob("*.parquet")}
    assert {one["suite"] for one in shown} == names
    text = invoke("compare", place).out
    assert f"gcbench compare {place} --suite NAME" in text
    assert len(text.splitlines()) <= 25
    assert all(name in text for name in names)


@pytest.mark.parametrize(
    "flags",
    [("--where", "compressor=none"), ("--by", "workers"), ("--sort", "wire"), ("--trials",)],
)
def test_an_index_ignores_no_flag(flags: tuple[str, ...]) -> None:
    place = ROOT / "results/reference"
    refused = invoke("compare", place, *flags)
    assert (refused.code, "choose with --suite" in refused.err) == (2, True)


@pytest.mark.parametrize("flags", [("--json",), ("--format", "json"), ("--format", "csv")])
def test_a_document_has_the_rows_of_one_suite(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Of two groups of rows there were two JSON arrays, one after the other."""
    place = ROOT / "results/reference/terngrad-table1.parquet"
    refused = invoke("compare", write(tmp_path, *BASE), place, *flags)
    assert (refused.code, refused.out) == (2, "")


def test_a_memory_that_is_not_the_methods_is_named(tmp_path: Path) -> None:
    """A Lion built from signsgd printed as `signsgd`."""
    lion = summary("signsgd", 0, 0.5)
    lion["config"] |= {"memory": "momentum", "memory_options": {"decay": 0.99}}
    (label,) = (row.method for row in table(tmp_path / "a", lion))
    assert label == "signsgd memory=momentum decay=0.99"
    plain = summary("signsgd", 0, 0.5)
    (label,) = (row.method for row in table(tmp_path / "b", plain))
    assert label == "signsgd"


def test_rows_without_uncompressed_runs_are_counted(tmp_path: Path) -> None:
    """They had "-" below "vs none" without a reason; those of another batch have none either."""
    place = write(tmp_path / "a", summary("topk", 0), summary("topk", 1))
    alone = invoke("compare", place).out
    assert "1 row without uncompressed runs of equal budget." in alone
    assert "paired difference" not in alone
    place = write(tmp_path / "b", *(summary(name, s) for name in ("topk", "none") for s in (0, 1)))
    both = invoke("compare", place).out
    assert "without uncompressed" not in both
    assert "paired difference" in both
    assert "vs none" not in invoke("compare", place, "--columns", "accuracy").out


def test_bytes_are_whole_in_json(tmp_path: Path) -> None:
    result = [summary("none", s, 0.9, payload_bytes_up=1001 + s) for s in range(2)]
    (record,) = json.loads(render(table(tmp_path, *result), "json"))
    sizes = {key: value for key, value in record.items() if "bytes" in key and value is not None}
    assert len(sizes) >= 2
    assert all(type(value) is int for value in sizes.values())


def test_every_setting_of_a_method_that_is_not_its_default_is_named(tmp_path: Path) -> None:
    """Also where all rows have it; settings of the place are named where they differ."""
    one = summary("topk", 0, 0.5)
    one["config"] |= {"memory": "residual", "start_step": 50, "dense_below": 10, "threads": 3}
    assert [row.method for row in table(tmp_path / "a", one)] == ["topk dense<10 [start_step=50]"]
    adam = summary("onebitadam", 0, 0.5)
    adam["config"] |= {"memory": "onebitadam", "memory_options": {"beta1": 0.9}, "start_step": 100}
    assert [row.method for row in table(tmp_path / "b", adam)] == ["onebitadam"]
    adam["config"]["start_step"] = 0
    assert [row.method for row in table(tmp_path / "c", adam)] == ["onebitadam [start_step=0]"]


def test_rows_have_the_names_that_the_user_gives(tmp_path: Path) -> None:
    lion, plain = summary("signsgd", 0, 0.5), summary("signsgd", 1, 0.5)
    lion["config"] |= {"memory": "momentum", "memory_options": {"decay": 0.99}}
    folder = write(tmp_path, *BASE, lion, plain, summary("mine", 0, 0.5))
    options = ("--label", "lion=signsgd:memory=momentum", "--label", "ours=./somewhere/mine.py")
    result = {row["method"] for row in invoke("compare", folder, *options, "--json").json}
    assert result == {"none", "lion", "signsgd", "ours"}
    assert "--label" not in invoke("compare", folder, *options).err
    for unused in ("x=topk", "x=signsgd:memory=momentun"):
        done = invoke("compare", folder, *options, "--label", unused)
        assert (done.code, done.err.count("--label"), "--label x:" in done.err) == (0, 1, True)
    for wrong in ("lion", "=signsgd", "lion=", "lion=signsgd:momentum"):
        done = invoke("compare", folder, "--label", wrong)
        assert done.code == 2
        assert wrong in done.err


def test_a_label_with_a_memory_leaves_the_memorys_fields(tmp_path: Path) -> None:
    """Rows that differ in them alone had one label, so both got a long one without any memory."""
    half, most = summary("topk", 0, 0.5), summary("topk", 1, 0.5)
    for run, decay in ((half, 0.5), (most, 0.9)):
        run["config"] |= {"memory": "residual", "memory_options": {"decay": decay}}
    folder = write(tmp_path, half, most)

    def labels(label: str) -> set[str]:
        return {row["method"] for row in invoke("compare", folder, "--label", label, "--json").json}

    assert labels("ef=topk:memory=residual") == {"ef decay=0.5", "ef decay=0.9"}
    assert "ef" in labels("ef=topk:memory=residual:memory.decay=0.5")


def test_a_target_without_effect_is_visible(tmp_path: Path) -> None:
    """Columns in which all rows are equal are left out: nobody met the target, or all did."""
    runs = [summary("none", 0, 0.9), summary("x", 0, 0.9)]
    folder = write(tmp_path / "runs", *runs)
    (tmp_path / "rows.json").write_text(json.dumps(runs))
    for place, target, cell in (
        (folder, "0.99", "0 of 1"),
        (folder, "0.1", "1 of 1"),
        (tmp_path / "rows.json", "0.5", "no curve"),
    ):
        for format in ("table", "markdown", "latex"):
            text = invoke("compare", place, "--target", target, "--format", format).out
            of_rows = [line for line in text.splitlines() if re.match(r"\W*(none|x) ", line)]
            assert [cell in line for line in of_rows[:2]] == [True, True], text


# ---- narrow terminals ----------------------------------------------------------------------------


def test_a_column_of_numbers_is_whole_or_left_out() -> None:
    names = [
        Column("lr", ["0.001", "0.3"]),
        Column("method", ["topk ratio=0.01 values=range", "topk ratio=0.05 values=range"]),
    ]
    rest = [
        Column("accuracy %", ["76.25 ± 0.98", "7.25 ± 10.98"]),
        Column("vs none", ["-7.41 [-14.03, -0.79] ‡", "-"]),
        Column("update", ["sign of the mean instead of the mean", "another step"]),
        Column("seeds", ["2 (1 failed)", "3"]),
        Column("loss", ["loses 0.54 [0.52, 0.57] points", "-"]),
        Column("problem", ["1 of 2: the gradient of b.weight is not finite", "-"]),
    ]
    widths = range(30, 200)
    for width in widths:
        table = fitted(names, rest, width, 20)
        assert max(map(len, table.text.splitlines())) <= width
        for column in rest:
            assert (column.heading in table.left_out) != (column.heading in table.text)
            if column.heading not in (*table.left_out, "update", "problem"):
                assert all(cell in table.text for cell in column.cells), (width, column.heading)
    assert fitted(names, rest, widths[-1], 20).left_out == []


@pytest.mark.parametrize("seeds", [(0, 1), (5, 6)], ids=["intervals", "no common seeds"])
def test_80_columns_cut_no_interval_and_no_mark(tmp_path: Path, monkeypatch, seeds) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    results = [summary("none", seed, 0.9) for seed in (0, 1)]
    for workers, lr, ratio in itertools.product((2, 16), (0.1, 0.001), (0.0125, 0.015)):
        over = {"lr": lr, "workers": workers, "options": {"ratio": ratio}}
        over["compressor"] = f"TopK(ratio={ratio})"
        results += [summary("topk", seed, 0.1 + 0.07 * seed, **over) for seed in seeds]
        results += [summary("topk", 9, None, test_loss=None, **over)]
    shown = invoke("compare", write(tmp_path, *results)).out
    assert max(map(len, shown.splitlines())) <= 80
    table, _, notes = shown.partition("\n\n")
    head, _, body = table.partition("─")
    left_out = re.findall(r"Not shown: (.*), other columns", " ".join(notes.split()))
    words = {word for name in left_out for word in name.replace(",", "").split()}
    assert words, "not everything fits"
    for name in ("none", "payload", "n"):
        assert (name in words) != (name in head.split()), name
    assert body.count("[") == body.count("]") == (4 if seeds == (0, 1) else 0)
    for mark in "†‡":
        assert (mark in table) == (f"{mark}:" in notes)
    assert "‡" in table


def test_a_memory_that_is_not_installed_is_of_no_suite(tmp_path: Path) -> None:
    every = stored.read(ROOT / "results/reference/main.parquet")
    plain = [row for row in every if row["compressor_name"] == "none"]
    mine = {**plain[-1], "suite": "", "config": {**plain[-1]["config"], "memory": "mine"}}
    stored.write(tmp_path / "a.parquet", plain)
    stored.write(tmp_path / "b.parquet", [*plain, mine])
    words = ("--suite", "main", "--json")
    without = invoke("compare", tmp_path / "a.parquet", *words).json
    assert invoke("compare", tmp_path / "b.parquet", *words).json == without


def test_longer_runs_of_another_suite_are_no_rows_of_this_one() -> None:
    """The other suite, which shares runs with this one, has the rows of both."""
    main, longer = (ROOT / f"results/reference/{name}.parquet" for name in ("main", "converged"))
    without = invoke("compare", main, "--suite", "main", "--json").json
    assert invoke("compare", main, longer, "--suite", "main", "--json").json == without
    both = invoke("compare", main, longer, "--suite", "converged", "--json").json
    assert {row["steps"] for row in both} == {2000, 21060}


def test_results_of_trials_are_not_called_those_of_the_test_split() -> None:
    """Trials have a validation loss; both kinds together are headed by the metric alone."""
    rows = ROOT / "results/reference/nanogpt.parquet"
    asked = ("compare", rows, "--suite", "nanogpt", "--where", "compressor=none")
    expected = {
        (): "test loss",
        ("--trials",): "loss",
        ("--trials", "--where", "test=false"): "validation loss",
    }
    for flags, name in expected.items():
        assert f"| {name} |" in invoke(*asked, *flags, "--format", "markdown").out
    caption = invoke(*asked, "--trials", "--where", "test=false", "--format", "latex").out
    assert ": validation loss, " in caption


def test_trials_of_a_suite_are_those_of_its_entries(tmp_path: Path) -> None:
    """Runs of other suites and tasks, and trials by another rule, are left out."""
    every = stored.read(ROOT / "results/reference/main.parquet")
    plain = [row for row in every if row["compressor_name"] == "none"]
    of_suite = [row for row in plain if not row["config"]["test"]]
    other = {**of_suite[0], "seed": 77, "config": {**of_suite[0]["config"], "seed": 77}}
    stored.write(tmp_path / "rows.parquet", [*plain, other])
    places = (
        write(tmp_path / "mine", *BASE),
        tmp_path / "rows.parquet",
        ROOT / "results/reference/nanogpt.parquet",
    )
    result = invoke("compare", *places, "--suite", "main", "--trials", "--json").json
    assert {row["task"] for row in result} == {"cifar10"}
    assert sum(row["n"] + row["failed"] for row in result) == len(plain)
    refused = invoke("compare", *places[::2], "--suite", "main", "--trials")
    assert (refused.code, "no run here is one of suite main" in refused.err) == (2, True)


def test_the_user_s_rows_come_before_those_of_a_suite(tmp_path: Path, monkeypatch) -> None:
    """All 8 rows of the user are shown; a mark is explained only where a printed row has it."""
    monkeypatch.setenv("COLUMNS", "80")
    mine = [summary("none", seed, 0.9) for seed in (0, 1)]
    for lr in (0.1, 0.2, 0.3, 0.4):
        mine += [summary("topk", 7, 0.5, lr=lr), summary("qsgd", 0, 0.6, lr=lr)]
    reference = ROOT / "results/reference/main.parquet"
    shown = invoke("compare", write(tmp_path / "mine", *mine), reference)
    assert len([*shown.out.splitlines(), *shown.err.splitlines()]) <= 25
    first, _, rest = shown.out.partition("Add --details.")
    assert first.count("topk") == first.count("qsgd") == 4
    assert "†:" in first
    assert "‡:" in first
    assert re.search(r"\d+ runs of suite main not shown: add --suite main\.", rest)
    few = write(tmp_path / "few", *mine[:2], summary("qsgd", 0, 0.6))
    shown = invoke("compare", few, reference)
    assert len([*shown.out.splitlines(), *shown.err.splitlines()]) <= 25
    first, _, rest = shown.out.partition("Add --details.")
    assert "qsgd" in first
    assert "Suite main:" in rest
    assert not re.search("[†‡]", shown.out)
