"""Tuned factors of a suite: the second seed, what is run, and the table of the best found."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from builders import summary_of
from commands import ROOT, invoke

from gcbench.core.errors import UsageError
from gcbench.report import compare, suite_match
from gcbench.results import rows
from gcbench.results.reader import load
from gcbench.training import configuration, suites
from gcbench.training.configuration import Config

SUITE = """
title: factors
source: ours
place: mine
differs: It is short.
tune:
  seed: 9
  second_seed: 10
  noise: 0.01
  ladder: [0.001, 0.01, 0.1, 1.0]
  start: [0.01, 0.1]
  extend: 1
  factors:
    momentum:
      - {}
      - {momentum: 0.0, start: [0.1, 1.0]}
    selection:
      - {}
      - {options: {granularity: model}}
tiers: {"all": [0, 40]}
config:
  {task: digits, batch: 32, steps: 20, workers: 2, holdout: 200, seed: [0, 1], momentum: 0.9,
   threads: 1}
entries:
  - config: {compressor: none}
    factors: [momentum]
  - config: {compressor: topk}
    factors: [momentum, selection]
    as_published: {options: {granularity: model}}
"""


@pytest.fixture
def suite_path(tmp_path: Path) -> Path:
    path = tmp_path / "own.yaml"
    path.write_text(SUITE)
    return path


def follow(
    suite: suites.Suite, judge: Callable[[Config], float], settings: Mapping[str, Any]
) -> tuple[list[Config], list[Config]]:
    """Return the trials and the runs of a suite, where `judge` has the result of each."""
    work, trials, final = suite.runs(settings), [], []
    result: dict[str, Any] | None = None
    while True:
        try:
            config = work.send(result)  # type: ignore[arg-type]
        except StopIteration:
            return trials, final
        (final if config.test else trials).append(config)
        result = {"validation_accuracy": judge(config), "validation_loss": 1.0}


def judged(best: float, momentum: float = 0.0, model: float = 0.0) -> Callable[[Config], float]:
    """Return a judge who prefers the rate `best`, and adds to no momentum and to whole models."""

    def judge(config: Config) -> float:
        plain = momentum * (config.momentum == 0.0)
        return 0.5 + plain + model * ("granularity" in config.options) - abs(config.lr - best)

    return judge


def test_every_value_of_a_factor_has_its_rates_and_the_best_is_run(suite_path: Path) -> None:
    suite = suites.load(str(suite_path))
    trials, final = follow(suite, judged(0.1, momentum=0.1), {"compressor": ["none"]})
    assert {(c.momentum, c.lr) for c in trials} == {
        *((0.9, lr) for lr in (0.01, 0.1, 1.0)),
        *((0.0, lr) for lr in (0.01, 0.1, 1.0)),
    }
    assert {c.seed for c in trials} == {9}, "a clear choice needs no second seed"
    results = sorted((c.momentum, c.lr, c.seed) for c in final)
    assert results == [(m, 0.1, seed) for m in (0.0, 0.9) for seed in (0, 1)]


def test_each_number_of_steps_has_trials_and_a_rate_of_its_own(suite_path: Path) -> None:
    def judge(config: Config) -> float:
        return judged(1.0 if config.steps == 12 else 0.01, momentum=-0.1)(config)

    suite = suites.load(str(suite_path))
    settings = {"compressor": ["none"], "steps": [12, 20], "seed": [0]}
    trials, final = follow(suite, judge, settings)
    assert {c.steps for c in trials} == {12, 20}
    assert {(c.momentum, c.steps, c.lr) for c in final} == {(0.9, 12, 1.0), (0.9, 20, 0.01)}


def test_a_close_choice_is_tried_again_with_the_second_seed(suite_path: Path) -> None:
    """The mean of both seeds decides: what was behind at first may win."""

    def judge(config: Config) -> float:
        lead = 0.005 if config.seed == 9 else -0.02
        return judged(0.1, momentum=lead)(config)

    trials, final = follow(suites.load(str(suite_path)), judge, {"compressor": ["none"]})
    again = [(c.momentum, c.lr) for c in trials if c.seed == 10]
    assert again == [(0.9, 0.1), (0.0, 0.1)]
    assert {c.momentum for c in final} == {0.9}


def test_the_source_s_setting_is_run_beside_the_best(suite_path: Path) -> None:
    best = judged(0.1, momentum=0.2, model=-0.1)
    _, final = follow(suites.load(str(suite_path)), best, {"compressor": ["topk"], "seed": [0]})
    results = {(c.momentum, c.options.get("granularity")) for c in final}
    assert results == {(0.0, None), (0.9, "model")}


def stored(
    suite: suites.Suite,
    judge: Callable[[Config], float],
    path: Path,
    settings: Mapping[str, Any] = MappingProxyType({}),
    included: Callable[[Config], bool] = lambda _: True,
) -> None:
    """Write the rows of the trials and runs of a suite that are `included`."""
    trials, final = follow(suite, judge, settings)
    results = []
    for config in filter(included, (*trials, *final)):
        value = max(0.0, judge(config) + config.seed / 1000)
        split = "test" if config.test else "validation"
        accuracy = {f"{split}_accuracy": value, f"{split}_loss": 1.0, "test_examples": 10**6}
        sizes = {"payload_ratio_up": 2.0, "config_hash": config.hash}
        summary = summary_of(config, **accuracy, **sizes)
        results.append(rows.row(summary, [], ""))
    rows.write(path, results)


def test_the_table_has_the_best_found_beside_as_published(suite_path: Path, tmp_path: Path) -> None:
    suite, path = suites.load(str(suite_path)), tmp_path / "rows.parquet"
    stored(suite, judged(0.1, momentum=0.2, model=-0.1), path)
    beside = suite_match.beside(suite, load([path]))
    assert beside.missing == []
    every = compare.rows(beside.runs, choices=suite.choices, preferred=beside.best)
    shown = {row.first.compressor_name: row for row in beside.rows(every)}
    assert len(every) == 4
    none, topk = shown["none"], shown["topk"]
    assert none.runs[0].config["momentum"] == topk.runs[0].config["momentum"] == 0.0
    assert none.mean == pytest.approx(0.7005)
    assert topk.difference == pytest.approx(0.0), "from the best fp32, not from that of momentum .9"
    assert none.as_published is not None
    assert topk.as_published is not None
    assert none.as_published.mean == pytest.approx(0.5005)
    assert topk.as_published.mean == pytest.approx(0.4005)
    assert topk.record()["as_published"] == topk.as_published.mean
    table = invoke("compare", path, "--suite", suite_path, "--columns", "as published").out
    assert "40.05" in table
    stored(suite, judged(0.1, momentum=-0.1, model=0.05), path)
    alike = suite_match.beside(suite, load([path]))
    rest = alike.rows(compare.rows(alike.runs, choices=suite.choices, preferred=alike.best))
    assert all(row.as_published is None for row in rest)
    words = ("compare", path, "--suite", suite_path, "--format", "markdown")
    assert "published" not in invoke(*words).out.split("\n\n")[0]
    asked = invoke(*words, "--columns", "as published")
    assert (asked.code, asked.out.count("| same |")) == (0, 2)


def test_a_row_stands_beside_its_source_s_settings_at_equal_steps_and_the_tuned_rate(
    suite_path: Path, tmp_path: Path
) -> None:
    suite, paths = suites.load(str(suite_path)), [tmp_path / f"{n}.parquet" for n in (12, 20)]

    def judge(config: Config) -> float:
        return judged(0.1, momentum=0.2, model=-0.1)(config) - 0.05 * (config.steps == 12)

    for steps, path in zip((12, 20), paths, strict=True):
        stored(suite, judge, path, {"compressor": ["none"], "steps": [steps]})
    slow = Config.make({**suite.points()[0].config.model_dump(exclude={"task_version"}), "lr": 1.0})
    accuracy = {"test_accuracy": 0.1, "test_loss": 1.0, "payload_ratio_up": 2.0}
    rows.add(paths[1], rows.row(summary_of(slow, config_hash=slow.hash, **accuracy), [], ""))
    beside = suite_match.beside(suite, load(paths))
    every = compare.rows(beside.runs, choices=suite.choices, preferred=beside.best)
    shown = [row for row in beside.rows(every) if row.rate == "tuned"]
    published = {row.first.steps: row.as_published and row.as_published.mean for row in shown}
    assert published == {12: pytest.approx(0.4505), 20: pytest.approx(0.5005)}


def test_without_runs_of_its_source_s_settings_a_row_is_not_called_the_same(
    suite_path: Path, tmp_path: Path
) -> None:
    """Trials chose top-k without momentum, and its runs with the source's settings are missing."""
    suite, path = suites.load(str(suite_path)), tmp_path / "rows.parquet"
    stored(
        suite,
        judged(0.1, momentum=0.2, model=-0.1),
        path,
        included=lambda config: (
            not config.test or (config.compressor, config.momentum) != ("topk", 0.9)
        ),
    )
    words = ("compare", path, "--suite", suite_path, "--columns", "as published", "--details")
    (line,) = (line for line in invoke(*words).out.splitlines() if line.startswith("topk"))
    assert line.split() == ["topk", "0", "-"]


def test_fp32_sets_the_target_with_the_settings_that_trials_chose(
    suite_path: Path, tmp_path: Path
) -> None:
    """The runs with its source's momentum are 20 points worse, and in no row of their own."""
    suite, path = suites.load(str(suite_path)), tmp_path / "rows.parquet"
    stored(suite, judged(0.1, momentum=0.2), path, {"compressor": ["none"]})
    curves = [
        {**row, "evaluations": [{"step": 20, "validation_accuracy": row.get("test_accuracy", 0)}]}
        for row in rows.read(path)
    ]
    rows.write(path, curves)
    words = ("--suite", suite_path, "--target", "fp32", "--json")
    (row,) = invoke("compare", path, *words).json
    assert row["target"] == row["mean"] == pytest.approx(0.7005)
    assert row["target_reached"] == 1


def test_a_tier_with_open_settings_has_no_ranks(suite_path: Path, tmp_path: Path) -> None:
    """Without one trial of top-k another momentum may win: neither row of the tier has a rank."""
    suite, path = suites.load(str(suite_path)), tmp_path / "rows.parquet"
    judge = judged(0.1, momentum=0.2, model=-0.1)
    seeds = {"seed": [0, 1, 2, 3, 4]}
    stored(suite, judge, path, seeds)
    words = ("compare", path, "--suite", suite_path)
    complete = invoke(*words, "--json").json
    assert {(row["rank"], row["settings_open"]) for row in complete} == {("1-2", False)}
    note = "No ranks in tiers with open settings. Trials or chosen runs are missing: topk."
    assert note not in " ".join(invoke(*words).out.split())
    stored(
        suite,
        judge,
        path,
        seeds,
        lambda config: config.test or (config.compressor, config.momentum) != ("topk", 0.9),
    )
    rest = invoke(*words, "--json").json
    assert {row["rank"] for row in rest} == {"-"}
    assert {row["settings_open"] for row in rest if row["compressor_name"] == "topk"} == {True}
    assert {row["settings_open"] for row in rest if row["compressor_name"] == "none"} == {False}
    shown = invoke(*words)
    assert note in " ".join(shown.out.split())
    assert " rank " not in shown.out.split("─")[0]
    assert note in " ".join(invoke(*words, "--details").out.split())


def test_a_row_in_place_of_the_chosen_one_has_open_settings(
    suite_path: Path, tmp_path: Path
) -> None:
    """Trials chose top-k without momentum, of which there is no run: that of .9 does not rank."""
    suite, path = suites.load(str(suite_path)), tmp_path / "rows.parquet"
    stored(
        suite,
        judged(0.1, momentum=0.2, model=-0.1),
        path,
        {"seed": [0, 1, 2, 3, 4]},
        lambda config: not config.test or (config.compressor, config.momentum) != ("topk", 0.0),
    )
    rows = invoke("compare", path, "--suite", suite_path, "--json").json
    by_name = {row["compressor_name"]: (row["rank"], row["settings_open"]) for row in rows}
    assert by_name == {"none": ("-", False), "topk": ("-", True)}


def test_the_default_table_shows_the_momentum_where_it_differs(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = ("compare", ROOT / "results/reference/main.parquet", "--suite", "main")
    head, _, rows = invoke(*words).out.partition("─")
    assert "momentum" in head
    (line,) = [line for line in rows.splitlines() if line.startswith("terngrad  ")]
    assert " 0.9 " in line
    (line,) = [line for line in rows.splitlines() if line.startswith("efsignsgd  ")]
    assert " 0 " in line


def close(config: Config) -> float:
    """Momentum leads by less than the noise with the first seed, and loses with the second."""
    return judged(0.1, momentum=-0.005 if config.seed == 9 else 0.02, model=-0.1)(config)


@pytest.mark.parametrize(
    ("judge", "settings"),
    [(close, {}), (judged(0.1, momentum=0.2, model=-0.1), {"steps": [12]})],
    ids=["second-seed", "other-steps"],
)
def test_stored_trials_decide_for_the_runs(suite_path, tmp_path, judge, settings) -> None:
    """Repeated trials add to the first ones, and trials decide at the steps of their runs."""
    suite, path = suites.load(str(suite_path)), tmp_path / "rows.parquet"
    stored(suite, judge, path, settings)
    runs = load([path])
    beside = suite_match.beside(suite, runs)
    assert beside.missing == [], "trials rejected the other alternatives"
    rows = beside.rows(compare.rows(beside.runs, choices=suite.choices, preferred=beside.best))
    by_name = {row.first.compressor_name: row for row in rows}
    assert [row.first.compressor_name for row in rows] == ["none", "topk"]
    assert {row.runs[0].config["momentum"] for row in rows} == {0.0}
    assert {row.rate for row in rows} <= {"tuned", "edge"}
    assert by_name["topk"].difference == pytest.approx(0.0), "from fp32 without momentum"
    repeated = sum(trial.repeat for results in beside.tried.values() for trial in results)
    assert repeated == sum(run.summary.seed == 10 for run in runs)
    rest = [run for run in runs if run.is_trial or run.summary.compressor_name == "none"]
    unmade = suite_match.beside(suite, rest).missing
    assert {(p.config.momentum, p.as_published) for p in unmade} == {(0.0, False), (0.9, True)}


def test_another_suite_takes_its_settings_from_the_choice(tmp_path: Path, monkeypatch) -> None:
    """Its runs have the steps of their own, and its trials those of the suite that chooses."""
    theirs = tmp_path / "first.yaml"
    theirs.write_text(SUITE)
    monkeypatch.setattr(suites, "names", lambda: ["first"])
    monkeypatch.setattr(suites, "FOLDER", tmp_path)
    suites._builtin.cache_clear()
    longer = tmp_path / "longer.yaml"
    longer.write_text(
        "title: longer\nsource: ours\nplace: mine\ndiffers: longer\nsettings_from: first\n"
        "config: {steps: 60, seed: [5]}\nentries:\n  - config: {compressor: topk}\n"
    )
    try:
        trials, final = follow(suites.load(str(longer)), judged(0.1, momentum=0.2), {})
    finally:
        suites._builtin.cache_clear()
    assert {c.steps for c in trials} == {20}
    assert [(c.steps, c.seed, c.momentum, c.lr) for c in final] == [(60, 5, 0.0, 0.1)]


def test_optimizers_and_schedules_of_a_suite_reach_its_runs(suite_path: Path) -> None:
    more = "clip_norm: 1.0, optimizer: adamw, decay: update, schedule: cosine, schedule_floor: 0.1"
    text = SUITE.replace("momentum: 0.9,\n   threads: 1", f"threads: 1, {more}")
    suite_path.write_text(text.replace("{momentum: 0.0, start: [0.1, 1.0]}", "{clip_norm: 0.0}"))
    trials, final = follow(suites.load(str(suite_path)), judged(0.1), {"compressor": ["none"]})
    for config in (*trials, *final):
        assert (config.optimizer, config.schedule, config.schedule_floor) == (
            "adamw",
            "cosine",
            0.1,
        )
    assert {config.clip_norm for config in trials} == {0.0, 1.0}


def test_a_published_loss_stands_beside_ours(tmp_path: Path) -> None:
    nanogpt = suites.load("nanogpt")
    (published,) = {p.published.loss for p in nanogpt.points() if p.published is not None}
    assert published == 1.88
    point = next(p for p in nanogpt.points() if p.published is not None)
    summary = summary_of(point.config, test_loss=1.9)
    path = tmp_path / "row.json"
    path.write_text(json.dumps(summary))
    (row,) = invoke("compare", path, "--suite", "nanogpt", "--json").json
    assert row["published_loss"] == 1.88
    assert row["published_difference"] == pytest.approx(0.02)
    assert "1.88" in invoke("compare", path, "--suite", "nanogpt").out


def test_reference_rows_come_from_a_clean_tree(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(configuration, "CHECKOUT", tmp_path)
    monkeypatch.setattr(configuration, "changed_files", lambda: ["gcbench/cli.py"])
    reference = tmp_path / "results" / "reference"
    reference.mkdir(parents=True)
    with pytest.raises(UsageError, match=r"gcbench/cli\.py"):
        configuration.require_clean(reference / "main.parquet")
    configuration.require_clean(tmp_path / "mine.parquet")
    monkeypatch.setattr(configuration, "changed_files", list)
    configuration.require_clean(reference / "main.parquet")


@pytest.mark.parametrize("fault", ["no git", "no repository"])
def test_reference_rows_need_a_git_that_works(tmp_path: Path, monkeypatch, fault: str) -> None:
    """Without it an ordinary run has no commit, and a dirty tree is not detected."""
    monkeypatch.setattr(configuration, "CHECKOUT", tmp_path)
    (tmp_path / ".git").mkdir()
    if fault == "no git":
        monkeypatch.setenv("PATH", "")
    path = tmp_path / "results" / "reference" / "main.parquet"
    with pytest.raises(UsageError, match=r"git.*main\.parquet|main\.parquet.*git"):
        configuration.require_clean(path)
    configuration.require_clean(tmp_path / "mine.parquet")
    started = configuration.provenance(Config.make({"task": "quadratic"}))
    assert started["commit"] is None
    monkeypatch.setattr(configuration, "changed_files", list)
    with pytest.raises(UsageError, match="commit"):
        configuration.require_clean(path, started)
    configuration.require_clean(path, started | {"commit": "0123456789ab"})


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_of_an_unclean_tree_gives_no_reference_row(
    tmp_path: Path, monkeypatch, finished: bool
) -> None:
    """It was made without --rows, or interrupted; then the changes were committed."""
    monkeypatch.setattr(configuration, "CHECKOUT", tmp_path)
    monkeypatch.setattr(configuration, "changed_files", list)
    path = tmp_path / "results" / "reference" / "mine.parquet"
    path.parent.mkdir(parents=True)
    settings = ["run", "--task", "digits", "--steps", 4, "--results", tmp_path / "runs"]
    with monkeypatch.context() as patch:
        patch.setattr(configuration, "commit", lambda: "0123456789ab+")
        if not finished:
            patch.setattr("gcbench.training.train.Trainer._pause", lambda *_: "stop")
        assert invoke(*settings).code == (0 if finished else 130)
    monkeypatch.setattr(configuration, "commit", lambda: "0123456789ab")
    refused = invoke(*settings, "--rows", path)
    assert refused.code != 0
    assert "0123456789" in refused.err
    assert not path.exists()
    assert invoke(*settings, "--rows", path, "--force").code == 0
    assert path.exists()
