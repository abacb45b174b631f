"""The protocol of comparisons: what is held out, how rates are chosen, ranks, rows in files."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import crew
import preloaded
import pytest
import torch
from builders import summary_of
from commands import ROOT, invoke

from gcbench.core import registry
from gcbench.core.errors import GcbenchError, Interrupted, UsageError
from gcbench.core.schema import UPDATE_RULE
from gcbench.core.world import SimulatedWorld
from gcbench.report import compare, suite_match
from gcbench.results import rows, settings, update_rule
from gcbench.results.reader import load
from gcbench.stats import intervals
from gcbench.training import launch, suites
from gcbench.training.configuration import Config, command
from gcbench.training.store import Run
from gcbench.training.suites.tuning import Trial, Tune, quality
from gcbench.training.train import Options, Trainer

LADDER = [0.001, 0.003, 0.01, 0.03, 0.1]
OWN = """
title: mine
version: 3
source: ours
place: mine
differs: It is short.
tune: {seed: 9, ladder: [0.001, 0.01, 0.1, 1.0], start: [0.01, 0.1], extend: 2}
tiers: {"one bit": [0, 1.5], "more": [1.5, 40]}
config: {task: digits, batch: 32, steps: 20, workers: 2, holdout: 200, seed: [0, 1], threads: 1}
entries:
  - config: {compressor: [none, terngrad]}
  - config: {compressor: signsgd, momentum: 0.0}
    start: [0.001, 0.01]
"""


@pytest.fixture
def suite_path(tmp_path: Path) -> Path:
    path = tmp_path / "own.yaml"
    path.write_text(OWN)
    return path


def trainer(**settings) -> Trainer:
    config = Config.make({"task": "digits", "steps": 4, "workers": 2, **settings})
    world = SimulatedWorld(config.workers, torch.device("cpu"), None, 1, 2)
    return Trainer(config, world, Run(Path("nowhere")), Options())


# ---- what is held out ----------------------------------------------------------------------------


def test_the_examples_held_out_are_the_same_for_every_seed_and_never_trained_on():
    results = [trainer(holdout=300, seed=seed) for seed in (0, 1)]
    whole = trainer().train
    for one in results:
        assert one.validation is not None
        assert (len(one.train), len(one.validation)) == (len(whole) - 300, 300)
        assert torch.equal(one.validation.inputs, results[0].validation.inputs)
        both = torch.cat([one.train.inputs, one.validation.inputs]).flatten(1).long()
        assert torch.equal(  # together they are the training split
            torch.unique(both, dim=0, return_counts=True)[1],
            torch.unique(whole.inputs.flatten(1).long(), dim=0, return_counts=True)[1],
        )
    shares = torch.bincount(results[0].validation.targets).float() / 300
    assert shares.min() > 0.05  # drawn, not a stretch of the file


def test_the_test_split_is_looked_at_after_the_last_step_alone(tmp_path, monkeypatch):
    seen = []
    judge = Trainer._evaluate_split

    def spy(self, split, name):
        seen.append((self.step, name))
        assert split is (self.test if name == "test" else self.validation)
        return judge(self, split, name)

    monkeypatch.setattr(Trainer, "_evaluate_split", spy)
    words = ("run", "--compressor", "none", "--steps", 4, "--eval-every", 2, "--results", tmp_path)
    invoke(*words, "--holdout", 200)
    assert seen == [(2, "validation"), (4, "validation"), (4, "test")]
    seen.clear()
    tried = invoke(*words, "--holdout", 200, "--no-test", "--json").json
    assert seen == [(2, "validation"), (4, "validation")]
    assert tried.get("test_accuracy") is None
    assert tried["validation_accuracy"] > 0
    seen.clear()
    invoke(*words)
    assert seen == [(2, "test"), (4, "test")]


def test_nothing_would_judge_a_run_without_both_splits():
    with pytest.raises(UsageError, match="--holdout N"):
        Config.make({"test": False})
    with pytest.raises(UsageError, match="minus 1400 held out"):
        trainer(holdout=1400, batch=64)


def test_rows_of_another_definition_of_the_task_do_not_meet():
    config = Config.make({"task": "digits"})
    assert config.task_version == 1
    assert config.model_copy(update={"task_version": 2}).hash != config.hash
    with pytest.raises(UsageError, match="has version 1 of task digits"):
        Config.make({"task": "digits", "task_version": 2})


# ---- the optimizer of a method's source ----------------------------------------------------------


def test_signs_take_the_steps_of_their_source_unless_others_are_given():
    config = Config.make({"task": "digits", "compressor": "signsgd"})
    assert (config.optimizer, config.momentum, config.lr) == ("sgd", 0.0, 1e-3)
    assert "--momentum" not in command(config)
    other = Config.make({"task": "digits", "compressor": "signsgd", "momentum": 0.5, "lr": 0.1})
    assert (other.momentum, other.lr) == (0.5, 0.1)
    assert (
        Config.make({"task": "digits", "compressor": "demo", "options": {"sign": False}}).lr > 1e-3
    )


def _declared() -> dict[str, dict[str, object]]:
    """Return what each method declares of its update, {} where it declares nothing."""
    rules = {}
    for name in registry.compressors():
        recipe = registry.compressor(name).recipe
        rules[name] = {key: recipe[key] for key in UPDATE_RULE if key in recipe}
    return rules


@pytest.mark.parametrize("name", registry.compressors())
def test_a_run_is_marked_where_it_leaves_the_rule_that_its_method_declares(name):
    rule = _declared()[name]
    for other in ({"optimizer": "adam"}, {"momentum": 0.7}, {"momentum": 0.7, "nesterov": True}):
        settings = {"task": "digits", "compressor": name, **other}
        if not registry.compressor(name).rule.plain:
            with pytest.raises(UsageError, match="update rule"):
                Config.make(settings)
            continue
        result = update_rule.other(Config.make(settings).model_dump(mode="json"))
        apart = {key for key, value in other.items() if key in rule and rule[key] != value}
        assert (set() if result is None else set(result.actual)) == apart
        if result is not None:  # its flags lead back to the rule, and nothing else changes
            assert result.declared == {key: rule[key] for key in apart}
            back = Config.make({**settings, **result.declared}).model_dump(mode="json")
            assert update_rule.other(back) is None
    assert update_rule.other(Config.make({"compressor": name}).model_dump(mode="json")) is None


def test_some_methods_declare_a_rule_and_others_none():
    assert 0 < sum(map(bool, _declared().values())) < len(_declared())


def test_the_mark_follows_fields_memory_and_local_steps():
    name = next(name for name, rule in _declared().items() if rule.get("optimizer") == "sgd")
    settings = {"task": "digits", "compressor": name, "memory": "none"}

    def marked(**over) -> set[str]:
        result = update_rule.other(Config.make({**settings, **over}).model_dump(mode="json"))
        return set() if result is None else set(result.actual)

    assert marked(memory="momentum") == set()  # Signum: the momentum is the memory's
    rounds = {"local_steps": 2, "outer_lr": 0.01}  # signs go to the outer step, which is SGD
    assert marked(**rounds, optimizer="adam") == set()
    assert marked(**rounds, outer_momentum=0.9) == {"outer_momentum"}
    mean = {"compressor": "demo", "options": {"sign": False}, "optimizer": "adam"}
    assert marked(**mean) == set()  # without the sign it is a mean, for any optimizer
    assert update_rule.other({"compressor": "nobodys", "optimizer": "adam"}) is None


def test_a_momentum_in_the_memory_stands_for_the_one_that_a_method_declares(monkeypatch):
    cls = registry.compressor_class("signsgd")
    monkeypatch.setattr(cls, "recipe", {"optimizer": "sgd", "momentum": 0.9})
    settings = {"task": "digits", "compressor": "signsgd"}
    saved = Config.make({**settings, "memory": "momentum"}).model_dump(mode="json")
    assert saved["momentum"] == 0.0
    assert update_rule.other(saved) is None
    without = Config.make({**settings, "momentum": 0.0}).model_dump(mode="json")
    assert update_rule.other(without) == ({"momentum": 0.0}, {"momentum": 0.9})


def test_a_run_off_its_methods_rule_says_so_and_its_row_is_marked(tmp_path):
    rules = _declared()
    name = next(name for name, rule in rules.items() if rule.get("optimizer") == "sgd")
    free = next(name for name, rule in rules.items() if not rule and name != "none")
    sizes = ("--task", "digits", "--steps", 2, "--workers", 2, "--threads", 1, "--progress", "none")
    grid = (*sizes, "--compressor", f"none,{name},{free}", "--seed", "0,1", "--results", tmp_path)
    adam = invoke("run", *grid, "--optimizer", "adam", "--lr", 0.001)
    assert adam.code == 0, adam.err
    message = [line for line in adam.err.splitlines() if "from its source" in line]
    assert message == [
        f"{name}: the update rule differs from its source: optimizer=adam, not sgd. "
        "`gcbench compare` flags the run; the rule of the source: --optimizer sgd"
    ]
    shown = {row["compressor_name"]: row for row in invoke("compare", tmp_path, "--json").json}
    assert shown[name]["other_rule"] == "optimizer=adam, not sgd"
    assert not shown.keys() - {"none", name, free}
    assert all("other_rule" not in shown[other] for other in ("none", free))
    output = invoke("compare", tmp_path, "--details").out
    assert "optimizer=adam, not sgd" in output
    assert "update: differs from the method's source" in output

    plain = tmp_path / "plain"
    suite_path = invoke("run", *grid[:-1], plain, "--optimizer", "sgd", "--momentum", 0)
    assert suite_path.code == 0
    assert "from its source" not in suite_path.err
    assert "update: differs" not in invoke("compare", plain, "--details").out


def test_no_committed_row_is_marked():
    result = load([Path(__file__).parents[2] / "results" / "reference"])
    assert any(run.config["optimizer"] == "adam" for run in result)
    marked = [run.source for run in result if update_rule.other(run.config)]
    assert marked == []


@pytest.mark.parametrize("carried", ["momentum", "dgc"])
def test_a_memory_with_momentum_leaves_none_to_the_optimizer(carried):
    settings = {"task": "digits", "compressor": "topk", "memory": carried}
    config = Config.make(settings)
    assert config.momentum == 0.0
    assert command(config).count("--momentum") == 0
    with pytest.raises(UsageError, match="--memory-set"):
        Config.make({**settings, "momentum": 0.9})
    with pytest.raises(UsageError, match="--optimizer sgd"):
        Config.make({**settings, "optimizer": "adam"})


# ---- the choice of a rate ------------------------------------------------------------------------


def chosen(results: dict[float, float], **over) -> tuple[float | None, bool, list[float]]:
    """Follow the rule with these results; return the rate, whether it is at an edge, the trials."""
    rule = Tune(**{"seed": 0, "ladder": LADDER, "start": [0.003, 0.01], **over})
    tried: dict[Trial, float] = {}
    while (choice := rule.choose(tried, 20)).lr is None:
        assert choice.trial is not None
        assert choice.trial not in tried
        assert choice.trial.steps == (rule.steps or 20)
        tried[choice.trial] = results[choice.trial.lr]
    return choice.lr, choice.at_edge, [trial.lr for trial in tried]


RISING = dict(zip(LADDER, [0.1, 0.2, 0.3, 0.4, 0.5], strict=True))


def test_the_rate_is_the_best_that_has_a_worse_neighbour_on_either_side():
    peak = {0.001: 0.5, 0.003: 0.6, 0.01: 0.7, 0.03: 0.65, 0.1: 0.0}
    assert chosen(peak, extend=3) == (0.01, False, [0.003, 0.01, 0.03])
    assert chosen(RISING, extend=1) == (0.03, True, [0.003, 0.01, 0.03])
    assert chosen(RISING, extend=3) == (0.1, True, [0.003, 0.01, 0.03, 0.1])
    falling = {lr: -value for lr, value in RISING.items()}
    assert chosen(falling, extend=3) == (0.001, True, [0.003, 0.01, 0.001])
    assert chosen(RISING, extend=0) == (0.01, True, [0.003, 0.01])


@pytest.mark.parametrize(
    ("start", "extend", "expected"),
    [
        (0.001, 2, (0.01, True, [0.001, 0.003, 0.01])),
        (0.1, 2, (0.1, True, [0.1, 0.03])),
        (0.01, 3, (0.1, True, [0.01, 0.003, 0.03, 0.1])),
        (0.001, 0, (0.001, True, [0.001])),
    ],
)
def test_a_single_rate_is_extended_to_both_sides(start, extend, expected):
    assert chosen(RISING, start=[start], extend=extend) == expected


def test_of_equal_rates_the_lower_and_of_diverged_ones_a_lower_still():
    assert chosen(dict.fromkeys(LADDER, 0.5), extend=0)[0] == 0.003
    diverged = {**dict.fromkeys(LADDER, -math.inf), 0.001: 0.2}
    assert chosen(diverged, extend=1) == (0.001, True, [0.003, 0.01, 0.001])


def test_trials_of_other_steps_do_not_choose():
    """A rate that wins a short race may lose the long one: only trials of the rule's steps count.

    Those are all steps of a run, unless the rule says otherwise.
    """
    peak = {0.001: 0.5, 0.003: 0.6, 0.01: 0.7, 0.03: 0.65, 0.1: 0.0}
    assert chosen(peak, extend=3, steps=5) == chosen(peak, extend=3)
    short = {Trial(lr, 5): lr for lr in LADDER}
    long = {Trial(lr, 20): -lr for lr in (0.003, 0.01)}
    settings = {"seed": 0, "ladder": LADDER, "start": [0.003, 0.01], "extend": 0}
    assert Tune(**settings).choose(short | long, 20).lr == 0.003
    assert Tune(**settings).choose(short, 20).trial == Trial(0.003, 20)
    assert Tune(**settings, steps=5).choose(short | long, 20).lr == 0.1
    results = {"seed": 0, "steps": 5}
    assert Tune(**settings).tries(results)
    assert Tune(**settings, steps=5).tries(results)
    assert not Tune(**settings, steps=20).tries(results)
    assert not Tune(**settings).tries({**results, "seed": 1})


@pytest.mark.parametrize("steps", [None, 10])
def test_a_suite_makes_trials_and_then_its_runs(suite_path, steps):
    if steps:
        suite_path.write_text(OWN.replace("tune: {", f"tune: {{steps: {steps}, "))
    work = suites.load(str(suite_path)).runs({"compressor": ["terngrad"]})
    config, seen = next(work), []
    while True:
        seen.append((config.lr, config.steps, config.seed, config.test))
        quality = 0.5 if config.test else -abs(config.lr - 0.02)
        try:
            config = work.send({"validation_accuracy": quality, "validation_loss": 1.0})
        except StopIteration:
            break
    trials = [(lr, steps or 20, 9, False) for lr in (0.01, 0.1, 0.001)]
    assert seen == [*trials, (0.01, 20, 0, True), (0.01, 20, 1, True)]


def test_what_judges_a_trial():
    assert (
        quality({"validation_accuracy": 0.7, "validation_loss": 1.0, "test_accuracy": 0.9}) == 0.7
    )
    assert quality({"validation_accuracy": None, "validation_loss": 2.0}) == -2.0
    assert quality({"validation_accuracy": 0.1, "validation_loss": None}) == -math.inf
    assert quality({"failed": {"step": 3, "reason": "NaN"}}) == -math.inf


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("start: [0.01, 0.1]", "start: [0.01, 1.0]", "consecutive"),
        ("start: [0.001, 0.01]", "start: [0.5]", "entry 2: start .* consecutive"),
        ("holdout: 200, ", "", "holdout"),
        ("compressor: [none, terngrad]", "compressor: none, lr: 0.1", "tune chooses lr"),
        ("ladder: [0.001, 0.01", "ladder: [0.01, 0.001", "increasing order"),
    ],
)
def test_files_whose_rule_is_wrong(suite_path, old, new, message):
    suite_path.write_text(OWN.replace(old, new, 1))
    with pytest.raises(UsageError, match=message):
        list(suites.load(str(suite_path)).runs({}))


# ---- a suite from the trials to the table --------------------------------------------------------


def rates(file: Path, suite: Path) -> list[str]:
    """Return what is said of the rate of each row."""
    return [row["rate"] for row in invoke("compare", file, "--suite", suite, "--json").json]


def test_a_suite_chooses_rates_and_its_rows_say_so(suite_path, tmp_path):
    file, runs = tmp_path / "rows.parquet", tmp_path / "runs"
    words = ("run", "--suite", suite_path, "--rows", file, "--results", runs)
    first = invoke(*words, "--json")
    assert [one["seed"] for one in first.json] == [0, 0, 0, 1, 1, 1]  # seed by seed
    saved = rows.read(file)
    trials = [one for one in saved if not one["config"]["test"]]
    assert all(one.get("test_accuracy") is None and one["seed"] == 9 for one in trials)
    assert {one["suite"] for one in saved} == {"own/3"}
    suite = suites.load(str(suite_path))
    beside = suite_match.beside(suite, load([file]))
    for point in suite.points({"seed": [0]}):
        lr = point.tune.choose(beside.tried[point.identity], point.config.steps).lr
        mine = [o for o in trials if o["compressor_name"] == point.config.compressor]
        best = max(mine, key=lambda o: (o["validation_accuracy"], -o["config"]["lr"]))
        assert best["config"]["lr"] == lr
        finals = [o for o in first.json if o["compressor_name"] == point.config.compressor]
        assert {o["config"]["lr"] for o in finals} == {lr}
    shutil.rmtree(runs)  # the rows alone say what is done
    again = invoke(*words)
    assert again.code == 0
    assert again.err.count("skipped") == len(saved)
    assert f"gcbench compare {file} --suite {suite_path}" in again.err
    output = rates(file, suite_path)
    assert set(output) <= {"tuned", "edge"}
    suite_path.write_text(OWN.replace("tune: {", "tune: {steps: 10, "))
    assert set(rates(file, suite_path)) == {"open"}, "the rule has trials that nobody made"
    suite_path.write_text(OWN)
    assert not runs.exists()
    table = invoke("compare", file, "--suite", suite_path, "--target", "fp32")
    assert "\none bit\n" in table.out
    assert "to " in table.out
    output = invoke("compare", file, "--suite", suite_path, "--json").json
    assert {(r["compressor_name"], r["tier"]) for r in output} == {
        ("none", "more"),
        ("terngrad", "more"),
        ("signsgd", "one bit"),
    }
    assert all(r["rate"] in ("tuned", "edge") and r["rank"] == "-" for r in output)
    assert all(r["pairs"] == 2 for r in output if r["compressor_name"] != "none")
    assert len(invoke("compare", file, "--trials", "--json").json) > len(output)
    begun = tmp_path / "begun.parquet"  # as long as rates are being chosen
    rows.write(begun, trials)
    refused = invoke("compare", begun)
    assert (refused.code, "only trials of learning rates" in refused.err) == (2, True)
    assert len(invoke("compare", begun, "--trials", "--json").json) == len(trials)
    stray = next(o for o in saved if o["compressor_name"] == "terngrad" and o["config"]["test"])
    stray["config"]["lr"] = 0.5
    stray["config_hash"] = "other"
    rows.add(file, stray)
    output = invoke("compare", file, "--suite", suite_path, "--json").json
    assert [r["rate"] for r in output].count("untuned") == 1
    only = invoke("compare", file)
    assert f"{len(trials)} trials of learning rates left out" in only.err


def test_rows_of_several_files_are_not_made_again(tmp_path):
    first, second = tmp_path / "first.parquet", tmp_path / "second.parquet"
    words = ("run", "--steps", "4", "--workers", "2", "--results", tmp_path / "runs")
    assert invoke(*words, "--compressor", "none", "--rows", first).code == 0
    shutil.rmtree(tmp_path / "runs")
    both = ("--rows", second, "--rows", first)
    again = invoke(*words, "--compressor", "none,terngrad", *both)
    assert f"its row is in {first}, skipped" in again.err
    assert f"gcbench compare {second} {first}" in again.err
    names = [[one["compressor_name"] for one in rows.read(path)] for path in (first, second)]
    assert names == [["none"], ["terngrad"]]
    last = invoke(*words, "--compressor", "none,terngrad", *both)
    assert f"its row is in {second}, skipped" in last.err


def test_rows_of_a_suite_that_shares_runs_are_asked_for_before_anything_is_trained(
    suite_path, tmp_path, monkeypatch
):
    from gcbench.training.runner import Runner

    mine = tmp_path / "mine.yaml"
    entry = "  - config: {compressor: none}\n  - config: {compressor: topk}\n"
    mine.write_text(OWN.partition("entries:")[0] + f"shares: [own]\nentries:\n{entry}")
    with pytest.raises(
        UsageError, match=r"shares.*'own' is not a built-in suite: converged, fft-acc"
    ):
        suites.load(str(mine))
    names = suites.names()
    monkeypatch.setattr(suites, "names", lambda: [*names, "own"])
    theirs, first = tmp_path / "own.parquet", tmp_path / "its rows.parquet"
    words = ("run", "--results", tmp_path / "runs", "--progress", "none", "--suite")
    assert invoke(*words, suite_path, "--compressor", "none", "--rows", theirs).code == 0
    results = len(rows.read(theirs))
    assert results >= 3 + 2  # trials, and a run a seed
    shutil.rmtree(tmp_path / "runs")

    def stop(self, config, run, threads=None):
        raise Interrupted("stopped after step 1 of 20")

    monkeypatch.setattr(Runner, "_engine", stop)
    monkeypatch.setattr(suites, "ROWS", tmp_path)
    alone = invoke(*words, mine, "--rows", first)
    assert alone.err.startswith(
        f"suite mine shares runs with suite own, whose rows were not given: "
        f"{results} of its runs and trials ({20 * results} steps) are made again;"
    )
    assert f"--rows {theirs}\n[trial]" in alone.err
    both = invoke(*words, mine, "--rows", first, "--rows", theirs)
    assert "shares runs" not in both.err
    assert "[trial] digits-topk" in both.err, "what the other suite has is not made"
    typed = f"--suite {mine} --rows '{first}' --rows {theirs}\n"
    assert (
        f"Continue with: gcbench run --results {tmp_path}/runs --progress none {typed}" in both.err
    )
    monkeypatch.setattr(suites, "ROWS", tmp_path / "nowhere")
    assert "To reuse its rows" in invoke(*words, mine, "--rows", first).err


def test_rows_of_a_file_never_have_the_label_of_a_built_in_suite(suite_path, tmp_path):
    """compare left them out, or took them for rows of the built-in suite."""
    path = suite_path.rename(tmp_path / "main.yaml")
    words = ("--results", tmp_path / "runs", "--rows", tmp_path / "rows.parquet")
    done = invoke("run", "--suite", path, *words)
    assert (done.code, "rename the file" in done.err) == (2, True)
    assert list(tmp_path.iterdir()) == [path]


def test_suites_say_which_others_share_their_runs():
    """Each run that two tuned suites have is in one that is declared, and no suite in vain."""
    every = [suites.load(name) for name in suites.names()]
    runs = {s.name: {p.identity for p in s.points()} for s in every if s.tunes}
    shares = {suite.name: suite.shares for suite in every}
    assert sum(map(bool, shares.values())) >= 2
    for suite in every:
        for other in suite.shares:
            assert runs[suite.name] & runs[other]
            assert str(suites.ROWS / f"{other}.parquet") in suite.differs
    for one, suite_path in runs.items():
        for other in runs.keys() - {one, *shares[one]}:
            if one not in shares[other]:
                options = set().union(*(runs[third] for third in shares[one]))
                assert suite_path & runs[other] <= options


def test_a_run_that_failed_before_has_its_row_too(tmp_path):
    """A table of the rows counts it, as one of the folder does."""
    file = tmp_path / "rows.parquet"
    words = ("run", "--task", "digits", "--steps", 40, "--workers", 2, "--lr", 1e30)
    words += ("--compressor", "none", "--results", tmp_path / "runs", "--seed")
    assert invoke(*words, 0).code == 1
    assert invoke(*words, "0,1", "--rows", file).code == 1
    assert sorted((one["seed"], "failed" in one) for one in rows.read(file)) == [
        (0, True),
        (1, True),
    ]


@pytest.mark.parametrize("name", ["rows.csv", "rows.json", "rows"])
def test_rows_go_only_to_files_that_compare_reads(tmp_path, name):
    words = ("run", "--task", "quadratic", "--steps", 2, "--results", tmp_path / "runs")
    done = invoke(*words, "--rows", tmp_path / "first.parquet", "--rows", tmp_path / name)
    assert (done.code, "ends in .parquet" in done.err) == (2, True)
    assert not list(tmp_path.iterdir())


def test_a_loss_that_is_not_finite_fails_in_rows_as_in_the_folder(tmp_path):
    """With --on-nonfinite skip such a run ends, with the accuracy of guessing."""
    file, runs = tmp_path / "rows.parquet", tmp_path / "runs"
    words = ("run", "--task", "digits", "--steps", 40, "--workers", 2, "--lr", 1e30)
    words += ("--compressor", "none,terngrad", "--on-nonfinite", "skip", "--eval-every", 10)
    assert invoke(*words, "--results", runs, "--rows", file).code == 0
    output = [invoke("compare", place, "--target", 0.05, "--json").json for place in (runs, file)]
    assert output[0] == output[1]
    compressed = output[0][1]
    assert (compressed["n"], compressed["failed"], compressed["target_reached"]) == (0, 1, 0)


def test_an_interrupted_force_says_which_results_are_of_before(tmp_path, monkeypatch):
    from gcbench.training.runner import Runner

    words = ("run", "--steps", 4, "--workers", 2, "--results", tmp_path, "--seed", "0,1,2")
    assert invoke(*words).code == 0

    def stop(self, config, run, threads=None):
        run.begin()
        raise Interrupted("stopped after step 1 of 4")

    def stop_early(self, config, run, threads=None):
        raise Interrupted("stopped by the user")

    for function, skipped in ((stop_early, 3), (stop, 2)):
        monkeypatch.setattr(Runner, "_engine", function)
        done = invoke(*words, "--force")
        assert done.code == 130
        assert "3 run(s) left" in done.err
        assert f"It skips {skipped} of them" in done.err
    monkeypatch.undo()
    again = invoke(*words)
    assert again.err.count("finished before, skipped") == 2


def test_an_interrupted_force_counts_runs_of_which_only_rows_are_left(tmp_path, monkeypatch):
    """The interrupted one, too: its row stays until a new one replaces it."""
    from gcbench.training.runner import Runner

    runs, file = tmp_path / "runs", tmp_path / "rows.parquet"
    words = ("run", "--steps", 4, "--workers", 2, "--results", runs, "--rows", file)
    assert invoke(*words, "--seed", "0,1,2").code == 0
    shutil.rmtree(runs)
    engine = Runner._engine

    def stop(self, config, run, threads=None):
        if config.seed == 1:
            run.begin()
            raise Interrupted("stopped after step 1 of 4")
        engine(self, config, run, threads)

    monkeypatch.setattr(Runner, "_engine", stop)
    done = invoke(*words, "--seed", "0,1,2", "--force")
    assert "2 run(s) left" in done.err
    assert "It skips 2 of them" in done.err
    assert invoke(*words, "--seed", "0,1,2").err.count("its row is in") == 3


def test_an_interrupted_force_of_a_suite_says_that_earlier_trials_count(
    suite_path, tmp_path, monkeypatch
):
    from gcbench.training.runner import Runner

    words = ("run", "--suite", suite_path, "--compressor", "none", "--results", tmp_path / "runs")
    words += ("--rows", tmp_path / "rows.parquet")
    assert invoke(*words).code == 0

    def stop(self, config, run, threads=None):
        run.begin()
        raise Interrupted("stopped after step 1 of 4")

    monkeypatch.setattr(Runner, "_engine", stop)
    done = invoke(*words, "--force")
    assert done.code == 130
    assert "results from before --force" in done.err
    assert "results from before --force" not in invoke(*words, "--seed", 7).err


def test_a_rate_that_a_suite_chooses_is_not_given(suite_path):
    done = invoke("run", "--suite", suite_path, "--lr", "0.1")
    assert done.code == 2
    assert "chooses the learning rate by trials" in done.err


# ---- ranks ---------------------------------------------------------------------------------------


def table(tmp_path: Path, **accuracies: list[float]) -> dict[str, compare.ComparisonRow]:
    """Return ranked rows of one tier with these accuracies, seed by seed."""
    result = []
    for name, values in accuracies.items():
        config = Config.make({"compressor": name, "workers": 2})
        for seed, value in enumerate(values):
            more = {"seed": seed, "test_accuracy": value, "test_loss": 1.0}
            result.append(summary_of(config, **more))
    (tmp_path / "rows.json").write_text(json.dumps(result))
    suite_path = settings.TUNED_KEYS
    results = compare.rows(load([tmp_path / "rows.json"]), choices=suite_path)
    tier = [compare.replace(row, tier="t") for row in results]
    return {row.first.compressor_name: row for row in compare.ranked(tier)}


def test_a_tier_is_not_ranked_before_all_of_its_methods_have_their_seeds(tmp_path):
    """The worse of two methods with five seeds was "1-2" beside a better one with three."""
    good, bad = [0.8, 0.81, 0.79, 0.8, 0.8], [0.6, 0.61, 0.59, 0.62, 0.6]
    early = table(tmp_path, topk=good[:3], onebit=bad, qsgd=bad[::-1])
    assert {row.rank for row in early.values()} == {"-"}
    complete = table(tmp_path, topk=good, onebit=bad, qsgd=bad[::-1])
    places = {name: row.rank for name, row in complete.items()}
    assert places == {"topk": "1", "onebit": "2-3", "qsgd": "2-3"}


def test_methods_within_each_other_s_interval_are_tied(tmp_path):
    results = table(
        tmp_path,
        terngrad=[0.70, 0.71, 0.72, 0.70, 0.71],
        qsgd=[0.71, 0.70, 0.72, 0.71, 0.70],
        topk=[0.60, 0.61, 0.62, 0.60, 0.61],
    )
    assert {name: row.rank for name, row in results.items()} == {
        "terngrad": "1-2",
        "qsgd": "1-2",
        "topk": "3",
    }


def test_pairs_decide_where_seeds_differ_more_than_methods(tmp_path):
    level = [0.5, 0.6, 0.7, 0.8, 0.9]
    spread = [0.001, -0.001, 0.0, 0.001, -0.001]
    better = [value + 0.02 + e for value, e in zip(level, spread, strict=True)]
    results = table(tmp_path, terngrad=level, qsgd=better)
    assert (results["qsgd"].rank, results["terngrad"].rank) == ("1", "2")


def test_the_more_pairs_the_wider_their_intervals(tmp_path, monkeypatch):
    """t = 3.4 of five seeds: beyond 2.78, the limit of one pair, and not beyond 3.96, of three."""
    monkeypatch.setattr(intervals, "resolution", lambda *_: 0.0)  # seeds alone
    ahead = [0.005, 0.02, 0.03, 0.05, 0.02]
    two = {"terngrad": [0.7] * 5, "qsgd": [0.7 + d for d in ahead]}
    assert {row.rank for row in table(tmp_path, **two).values()} == {"1", "2"}
    results = table(tmp_path, **two, topk=[0.2, 0.21, 0.2, 0.22, 0.2])
    assert (results["qsgd"].rank, results["terngrad"].rank, results["topk"].rank) == (
        "1-2",
        "1-2",
        "3",
    )


def test_four_seeds_are_no_ranking(tmp_path):
    results = table(tmp_path, terngrad=[0.7] * 4, qsgd=[0.5, 0.51, 0.5, 0.51])
    assert {row.rank for row in results.values()} == {"-"}


def test_better_than_uncompressed_is_told(tmp_path):
    results = table(
        tmp_path, none=[0.5, 0.51, 0.52], qsgd=[0.6, 0.612, 0.62], topk=[0.5, 0.52, 0.51]
    )
    assert results["qsgd"].above_baseline
    assert not results["topk"].above_baseline


# ---- rows in files -------------------------------------------------------------------------------

SUMMARY = {
    "config_hash": "a",
    "seed": 3,
    "test_accuracy": 0.25,
    "test_loss": None,
    "config": {"lr": 0.1, "options": {}},
}


def test_a_row_comes_back_as_it_was(tmp_path):
    file = tmp_path / "deep" / "rows.parquet"
    curve = [
        {"kind": "eval", "step": 2, "validation_loss": 0.5, "train_loss": None},
        {"kind": "eval", "step": 4, "validation_accuracy": 0.1, "validation_loss": None},
    ]
    rows.add(file, rows.row(SUMMARY, curve, "own/1"))
    rows.add(file, rows.row({**SUMMARY, "config_hash": "b", "failed": {"step": 1}}, [], ""))
    rows.add(file, rows.row({**SUMMARY, "seed": 4}, curve, "own/1"))  # in place of the first
    second, first = rows.read(file)
    assert first == {
        **SUMMARY,  # the test loss is null: it was not finite
        "seed": 4,
        "suite": "own/1",
        "evaluations": [{"kind": "eval", "step": 2, "validation_loss": 0.5}, curve[1]],
    }
    assert second["test_loss"] is None
    assert "failed" not in first
    assert (second["config_hash"], second["failed"]) == ("b", {"step": 1})


def test_files_that_hold_no_rows(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    (tmp_path / "text.parquet").write_text("no parquet")
    parquet.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    for name, message in (("text", "cannot be read as Parquet"), ("other", "holds no rows")):
        assert rows.holds(tmp_path / f"{name}.parquet") == (name == "text")
        with pytest.raises(GcbenchError, match=message):
            rows.read(tmp_path / f"{name}.parquet")
    assert rows.read(tmp_path / "missing.parquet") == []


def test_processes_that_add_at_once_lose_nothing(tmp_path):
    file = tmp_path / "rows.parquet"
    with preloaded.forking():
        launch.in_processes(2, 1, crew.add_rows, [str(file), SUMMARY])
    assert len(rows.read(file)) == 10


def test_rows_without_settings_at_their_defaults_serve_as_they_are(tmp_path):
    """Such a row was stored before the setting existed; it is known by its config."""
    file = tmp_path / "rows.parquet"
    words = ("run", "--task", "quadratic", "--compressor", "none,terngrad", "--steps", 12)
    words += ("--rows", file, "--results", tmp_path / "runs")
    first = invoke(*words)
    old = rows.read(file)
    for row in old:
        row["config"] = {
            key: value
            for key, value in row["config"].items()
            if key not in ("holdout", "memory", "warmup", "local_steps", "hook")
        }
        row["config_hash"] = "of another rule"
    rows.write(file, old)
    shutil.rmtree(tmp_path / "runs")
    again = invoke(*words)
    assert again.code == 0, again.err
    assert again.out == first.out
    assert again.err.count("skipped") == 2
    assert "runs to make" not in again.err
    assert f"compare them: gcbench compare {file}" in again.err
    assert " ms" in again.out
    for row in old:
        row["provenance"]["times"] = "other work ran beside"
    rows.write(file, old)
    assert " ms" not in invoke(*words).out


def test_a_diverged_run_is_a_result(tmp_path):
    file = tmp_path / "rows.parquet"
    words = (
        "run",
        "--task",
        "quadratic",
        "--compressor",
        "none",
        "--lr",
        "1e30,0.1",
        "--rows",
        file,
    )
    done = invoke(*words, "--steps", 12, "--results", tmp_path / "runs")
    assert done.code == 1
    output = invoke("compare", tmp_path / "runs", "--json").json
    assert sorted((r["n"], r["failed"]) for r in output) == [(0, 1), (1, 0)]
    assert sorted("failed" in one for one in rows.read(file)) == [False, True]
    again = invoke(*words, "--steps", 12, "--results", tmp_path / "elsewhere")
    assert again.code == 1
    assert "non-finite gradient" in again.err
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("format", ["table", "markdown"])
def test_tiers_come_with_the_most_bits_first_and_share_their_notes(tmp_path, format):
    from gcbench.report import tables

    results = table(tmp_path, none=[0.7, 0.71], signsgd=[0.5, 0.52], bf16=[0.7, 0.7])
    bits = {"signsgd": ("few", 1.0), "bf16": ("many", 16.0), "none": ("many", 32.0)}
    tiered = [
        compare.replace(results[name], tier=tier, bits_up=b) for name, (tier, b) in bits.items()
    ]
    output = tables.render(tiered, format, by="tier")
    many, few = output.index("tier=many"), output.index("tier=few")
    assert many < output.index("bf16") < few < output.index("signsgd")
    # Of both tables, once; of the table that it is about, beside it.
    assert output.count("Results are the mean") == 1
    assert few < output.index("Results are the mean")
    alike = tables.alike([row for row in tiered if row.tier == "many"])
    assert alike
    assert many < output.replace("\n", " ").index(alike) < few


# ---- the picture of tiers ------------------------------------------------------------------------


def test_the_picture_of_one_row_and_of_losses(tmp_path, monkeypatch):
    """No spread at all, and a task without an accuracy, whose axis has decimals."""
    from gcbench.report import tier_plot

    drawn = []
    monkeypatch.setattr(tier_plot.figures, "save", lambda figure, path: drawn.append(figure))
    results = table(tmp_path, qsgd=[0.6])
    one = compare.replace(results["qsgd"], tier="one", bits_up=2.0)
    tier_plot.draw([one], "mine", tmp_path / "tiers.png")
    low, high = drawn[0].axes[0].get_ylim()
    assert low < 60 < high
    assert "stretched near the best" in drawn[0].axes[0].get_ylabel()
    losses = [
        compare.replace(one, metric="test_loss", mean=mean, method=str(mean))
        for mean in (1.49, 1.53, 2.4)
    ]
    tier_plot.draw(losses, "mine", tmp_path / "tiers.png")
    (axes,) = drawn[1].axes
    assert {1.5, 2.0} <= set(axes.get_yticks())
    assert len(axes.get_yticks()) > 5
    assert axes.get_ylabel().startswith("test loss")


def test_a_row_with_diverged_seeds_has_no_rank_and_beats_none(tmp_path, monkeypatch):
    """Five lucky seeds of ten would lead the tier."""
    monkeypatch.setattr(intervals, "resolution", lambda *_: 0.0)
    good, nan = [0.70, 0.71, 0.69, 0.70, 0.72] * 2, float("nan")
    results = table(
        tmp_path,
        none=[value + 0.01 for value in good],
        int8=good,
        topk=[value + 0.1 for value in good[:5]] + [nan] * 5,
    )
    sizes = dict.fromkeys(results, 2.0)
    rows = {row.method: row for row in placed(results, sizes, dict.fromkeys(results, "one"))}
    ranks = {name: (row.rank, row.beaten) for name, row in rows.items()}
    assert ranks == {"none": ("1", False), "int8": ("2", True), "topk": ("-", False)}


def test_two_uncompressed_rows_have_names_of_their_own_and_one_band(tmp_path, monkeypatch):
    """A method lay within the grey band of fp32 at an untuned rate."""
    from gcbench.report import tier_plot

    drawn = []
    monkeypatch.setattr(tier_plot.figures, "save", lambda figure, path: drawn.append(figure))
    one = compare.replace(table(tmp_path, none=[0.7, 0.71])["none"], tier="one", bits_up=32.0)
    two = [
        compare.replace(one, choices={"lr": lr}, mean=mean) for lr, mean in ((0.1, 0.5), (0.2, 0.7))
    ]
    tier_plot.draw(two, "mine", tmp_path / "tiers.png")
    (axes,) = drawn[0].axes
    assert {label.get_text() for label in axes.texts} == {"none lr=0.1", "none lr=0.2"}
    (band,) = axes.patches
    assert band.get_y() < 70 < band.get_y() + band.get_height()
    tier_plot.draw(two[::-1], "mine", tmp_path / "tiers.png")
    for figure in drawn:  # the better one is where the axis is stretched, in either order
        assert figure.axes[0].yaxis.get_transform().transform(70.0) == pytest.approx(0)


def placed(results, sizes, tiers):
    """Return rows of these bits, twice as many MB, and tiers, ranked within them."""
    sized = [
        compare.replace(
            row, payload_bytes_step=2e6 * sizes[name], bits_up=sizes[name], tier=tiers[name]
        )
        for name, row in results.items()
    ]
    return compare.ranked(sized)


def test_rows_outside_the_tiers_come_last_under_a_heading_of_their_own(tmp_path):
    rows = placed(
        table(tmp_path, none=[0.7], topk=[0.6]),
        {"none": 32.0, "topk": 30.0},
        {"none": "many", "topk": None},
    )
    groups = compare.by(rows, "tier")
    assert {name: [row.method for row in group] for name, group in groups.items()} == {
        "many": ["none"],
        "outside the tiers": ["topk"],
    }


def test_the_picture_of_tiers(tmp_path, monkeypatch):
    """A tier with a tie, one with a clear best, and one whose ranks are not known."""
    from gcbench.report import tier_plot

    monkeypatch.setattr(intervals, "resolution", lambda *_: 0.0)  # seeds alone
    results = table(
        tmp_path,
        none=[0.70, 0.71, 0.69, 0.70, 0.70],
        bf16=[0.69, 0.72, 0.70, 0.71, 0.70],
        int8=[0.64, 0.66, 0.65, 0.64, 0.64],
        terngrad=[0.66, 0.68, 0.67, 0.66, 0.67],
        qsgd=[0.60, 0.61, 0.60, 0.62, 0.61],
        fft=[0.60, 0.61, 0.60, 0.61, 0.62],
        topk=[0.65, 0.65, 0.66],
        demo=[0.64, 0.65, 0.66],
    )
    sizes = dict(none=32.0, bf16=16.0, int8=8.0, terngrad=2.0, qsgd=2.0, fft=1.9, topk=0.4)
    few = dict.fromkeys(("topk", "demo"), "few")
    tiers = {**dict.fromkeys(results, "two"), **few, "none": "many", "bf16": "many", "int8": "many"}
    rows = placed(results, sizes | {"demo": 0.3}, tiers)
    ranks = {row.method: row.rank for row in rows}
    assert ranks == {
        **{"none": "1-2", "bf16": "1-2", "int8": "3"},
        **{"terngrad": "1", "qsgd": "2-3", "fft": "2-3", "topk": "-", "demo": "-"},
    }
    drawn = []
    monkeypatch.setattr(tier_plot.figures, "save", lambda figure, path: drawn.append(figure))
    tier_plot.draw(rows, "mine", tmp_path / "tiers.png")
    (axes,) = drawn[0].axes
    names = {label.get_text() for label in axes.texts}
    assert names == set(results)
    marks = {
        row.method: container.lines[0] for row, container in zip(rows, axes.containers, strict=True)
    }
    assert {name: mark.get_xdata()[0] for name, mark in marks.items()} == {**sizes, "demo": 0.3}
    # qsgd is beaten by terngrad with as many bytes; fft, as bad, and int8 have fewer than the best.
    assert {name for name, mark in marks.items() if mark.get_alpha() != 1.0} == {"qsgd"}
    ringed = {n for n, m in marks.items() if m.get_markeredgecolor() == tier_plot.RING["mec"]}
    assert ringed == {"none", "bf16", "terngrad"}
    output = {text.get_text() for text in drawn[0].legends[0].get_texts()}
    assert output == {
        *{"few", "two", "many"},
        *{tier_plot.LEGEND_RING, tier_plot.LEGEND_FADED},
    }
    spread = 2.776445 * results["terngrad"].sd / 5**0.5  # Student's t, 4 degrees of freedom
    assert results["terngrad"].half_interval == pytest.approx(spread, rel=1e-6)
    # Stretched near the uncompressed row: a point there has more room than one far below.
    bottom, terngrad, top = axes.transData.transform([(1, 60.8), (1, 66.8), (1, 70.0)])[:, 1]
    assert (top - terngrad) / 3.2 > 1.5 * (terngrad - bottom) / 6
    assert "stretched near fp32" in axes.get_ylabel()
    low, high = axes.get_ylim()
    assert low < 60 < 71 < high
    assert {60, 65, 70} <= set(axes.get_yticks())
    with pytest.raises(UsageError, match="no finished row of a tier"):
        tier_plot.draw([compare.replace(results["none"], tier=None)], "mine", tmp_path / "t.png")


def test_ranks_are_of_the_whole_tier_whatever_is_shown():
    """Of bf16 alone the rank is 1 to 5, as in the table of all five."""
    reference = ROOT / "results" / "reference"
    words = ("compare", reference, "--suite", "main-language", "--json")
    every = {row["method"]: row["rank"] for row in invoke(*words).json}
    (alone,) = invoke(*words, "--where", "compressor=bf16").json
    assert alone["rank"] == every["bf16"] == "1-5"


def test_several_suites_have_an_index_and_tables_that_fit_into_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    folder = ROOT / "results" / "reference"
    index = invoke("compare", folder)
    assert max(map(len, index.out.splitlines())) <= 80
    for path in folder.glob("*.parquet"):
        assert path.stem in index.out.split()
        done = invoke("compare", path, "--suite", path.stem)
        assert done.code == 0, done.err
        assert max(map(len, done.out.splitlines())) <= 80


def test_without_known_ranks_the_picture_singles_out_none(tmp_path, monkeypatch):
    from gcbench.report import tier_plot

    results = table(tmp_path, none=[0.70, 0.71], topk=[0.1, 0.1], qsgd=[0.60, 0.61])
    sizes = {"none": 32.0, "topk": 30.0, "qsgd": 2.0}
    rows = placed(results, sizes, {"none": "many", "topk": "many", "qsgd": "few"})
    drawn = []
    monkeypatch.setattr(tier_plot.figures, "save", lambda figure, path: drawn.append(figure))
    tier_plot.draw(rows, "mine", tmp_path / "tiers.png")
    (axes,) = drawn[0].axes
    assert {container.lines[0].get_alpha() for container in axes.containers} == {1.0}
    output = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert output == ["few", "many"]
