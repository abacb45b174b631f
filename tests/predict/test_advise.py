"""`gcbench advise`: gains and losses against a tolerance, and what counts as evidence."""

from __future__ import annotations

import ast
import json
import re
import shlex
import statistics
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import summary
from builders import write as write_runs
from commands import PATIENCE, invoke
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import gcbench
from gcbench.core import registry
from gcbench.core.errors import UsageError
from gcbench.predict import advice, clusters, costs, evidence, measuring, networks, traffic
from gcbench.report.analysis import load
from gcbench.results import rows
from gcbench.training import suites

ROOT = Path(__file__).parents[2]
METHODS = "terngrad,qsgd,topk,int8"
ALONE = ("--compressor", "terngrad")
SINGLE = ("--cluster-set", "gpus_per_node=1")
"""One GPU per node. With several, all payloads of a node share its link, and few methods gain."""
SLOW = ("--cluster-set", "inter.gbit=1", *SINGLE, "--workers", "32")
"""Nodes whose links are a bottleneck even for reducing in bf16."""
FAST = ("--cluster-set", "inter.gbit=100000", "--cluster-set", "intra.gbit=100000")
FP32 = (0.900, 0.910, 0.905, 0.895)
"""What `none` reaches, by seed."""
SUITE = f"main/{suites.load('main').version}"


def run(name: str, seed: int, accuracy: float | None, config: Any = None, **over: Any) -> Any:
    """Return a finished run's summary, of a method as its source has it, with a holdout."""
    method = registry.compressor(name)
    row = summary(name, seed, accuracy, **{"collective": method.legal_collectives()[0], **over})
    row["compressor"] = registry.call(method)
    row["config"] |= {"memory": method.memory, "holdout": 500, **(config or {})}
    return row


def write(path: Path, runs: Iterable[Any], suite: str = SUITE) -> Path:
    """Write a file of rows; each has its own hash, as real runs have."""
    result = [{**one, "config_hash": f"{number}"} for number, one in enumerate(runs)]
    rows.write(path, [rows.row(one, [], suite) for one in result])
    return path


def lost(name: str, losses: Iterable[float | None], **over: Any) -> list[Any]:
    """Return runs that lost so much against `none`, seed by seed; None diverged."""
    return [
        run(name, seed, None if loss is None else FP32[seed] - loss, **over)
        for seed, loss in enumerate(losses)
    ]


def plain(**over: Any) -> list[Any]:
    return lost("none", [0.0] * len(FP32), **over)


def stored_rows(**over: Any) -> list[Any]:
    """TernGrad lost .3 to .5 points, QSGD 3 for certain, a seed of int8 diverged; no top-k."""
    return [
        *plain(**over),
        *lost("terngrad", (0.003, 0.005, 0.004, 0.004), **over),
        *lost("qsgd", (0.030, 0.031, 0.029, 0.030), **over),
        *lost("int8", (0.0, None, 0.0, 0.0), test_loss=0.3, **over),
    ]


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    return write(tmp_path / "stored.parquet", stored_rows())


@pytest.fixture
def both_stored(tmp_path: Path) -> Path:
    """The same on images and on text."""
    runs = [*stored_rows(), *stored_rows(task="shakespeare")]
    return write(tmp_path / "both_stored.parquet", runs)


def advise(tmp_path: Path, *words: object) -> dict[str, Any]:
    where = ("--results", tmp_path / "analyses", "--progress", "none", "--json")
    slow = () if "--cluster-set" in words else SLOW
    return invoke("advise", "--compressor", METHODS, *where, *slow, *words).json


def methods(result: dict[str, Any]) -> dict[str, Any]:
    return {row["method"]: row for row in result["tables"][0]["rows"]}


def conclusions(result: dict[str, Any]) -> str:
    return " ".join([*result["answer"], *result["conclusions"]])


def test_advice_weighs_gain_against_cost(tmp_path: Path, stored: Path) -> None:
    result = advise(tmp_path, "--runs", stored)
    rows = methods(result)
    assert {word: row["advice"] for word, row in rows.items()} == {
        "terngrad": "try",
        "topk": "untested",
        "qsgd": "loses too much",
        "int8": "loses too much",
    }
    assert list(rows)[:2] == ["terngrad", "topk"]
    # paired losses of .3, .5, .4, .4 points: mean .4, sd .0816, t(3) = 3.182: +- .13; 40 of 10,000
    # examples changed: 1.96 sqrt((.0042 - .004^2) / 10,002) is +- .127; together +- .18
    assert rows["terngrad"]["accuracy"] == "loses 0.4 [0.22, 0.58] points"
    assert rows["terngrad"]["accuracy_difference"] == pytest.approx(-0.004)
    assert rows["terngrad"]["accuracy_low"] == pytest.approx(-0.0058, abs=1e-4)
    assert rows["int8"]["accuracy"] == "diverged in 1 of 4 seeds"
    assert (rows["topk"]["results"], rows["topk"]["accuracy"]) == (0, "untested")
    assert all(row["speedup"] > 1.05 for row in rows.values())
    assert result["answer"][0].startswith("Try terngrad by ")
    for value in (rows["terngrad"]["over_fp32"], rows["terngrad"]["over_bf16"]):
        assert value in result["answer"][0]
    for value in ("[0.22, 0.58]", "digits", "100 steps", "26,000 times"):
        assert value in result["answer"][1]
    assert "topk by twoshot" in conclusions(result)
    again = load(next((tmp_path / "analyses").iterdir()))
    assert {row["method"]: row["advice"] for row in again.table("methods").rows} == {
        word: row["advice"] for word, row in rows.items()
    }


def test_rows_of_evidence_have_task_budget_and_distance(tmp_path: Path) -> None:
    budget = {"task": "mnist", "steps": 2000, "batch": 64, "workers": 8, "params": 25_557_032 // 5}
    fields = {**budget, "config": {"task_options": {"network": "lenet"}}}
    path = write(tmp_path / "r.parquet", [*plain(**fields), *lost("terngrad", [0.0] * 3, **fields)])
    result = advise(tmp_path, *ALONE, "--runs", path)
    (row,) = result["tables"][1]["rows"]
    expected = {"method": "terngrad", "network": "lenet", "task": "mnist", "steps": 2000}
    expected |= {"batch": 64, "workers": 8, "seeds": 3, "parameters": 5_111_406, "lost": 0.0}
    assert expected.items() <= row.items()
    assert row["size"] == pytest.approx(5, rel=1e-6)
    shown = methods(result)["terngrad"]
    for value in ("lenet on mnist", "5.11M", "2,000 steps of 64", "8 workers", "3 seeds"):
        assert value in shown["accuracy_from"]
    assert re.findall(r"[0-9,.]+ times", shown["distance"]) == [
        *("5 times", "130 times", "4 times"),
    ]


@pytest.mark.parametrize(("name", "momentum"), [("topk", 0.0), ("topk", 0.9), ("terngrad", 0.0)])
def test_what_was_trained_without_momentum_is_to_be_used_so(tmp_path, name, momentum) -> None:
    """Only with error feedback; the optimizer of the runs is named in each case."""
    fields = {"config": {"optimizer": "sgd", "momentum": momentum}}
    runs = [*plain(**fields), *lost(name, [0.0] * 3, **fields)]
    path = write(tmp_path / "r.parquet", runs)
    result = advise(tmp_path, *SLOW, "--compressor", name, "--runs", path)
    without = "sgd without momentum" if momentum == 0 else f"sgd with momentum {momentum:g}"
    assert result["answer"][0].startswith(f"Try {name} by ")
    assert without in result["answer"][1]
    assert ("Train without momentum" in result["answer"][1]) == (name == "topk" and momentum == 0)


def test_equal_means_lose_exactly_zero(tmp_path: Path) -> None:
    """.1, -.2 and .1 points, whose mean is 1e-17 as floats have it."""
    path = write(tmp_path / "r.parquet", [*plain(), *lost("terngrad", (0.001, -0.002, 0.001))])
    (row,) = advise(tmp_path, *ALONE, "--runs", path)["tables"][1]["rows"]
    assert str(row["lost"]) == "0.0"


@pytest.mark.parametrize(
    ("losses", "advice", "words"),
    [
        # one bad seed of three, mean 1.3: such a loss may be chance
        ((0.0, 0.04, 0.0), "unclear", "loses 1.3 [-4.4, 7.1] points"),
        ((0.0, -0.04, 0.0), "unclear", "gains 1.3 [-4.4, 7.1] points"),
        ((0.03, 0.031, 0.029), "loses too much", "loses 3 [2.6, 3.4] points"),
        ((0.002, -0.002, 0.0), "try", "no loss above 0.5 points"),
        ((0.0, 0.0, 0.0), "try", "no loss above 0.028 points"),
        ((-0.01, -0.011, -0.012), "try", "gains 1.1 [0.78, 1.4] points"),
        ((0.008, 0.009, 0.012), "unclear", "loses 0.97 [0.41, 1.5] points"),
    ],
)
def test_the_interval_decides_and_not_the_mean(tmp_path: Path, losses, advice, words) -> None:
    """Three seeds, t(2) = 4.303, 10,000 examples, one point of tolerance; limits by hand."""
    path = write(tmp_path / "r.parquet", [*plain(), *lost("terngrad", losses)])
    row = methods(advise(tmp_path, *ALONE, "--runs", path))["terngrad"]
    assert (row["advice"], row["accuracy"]) == (advice, words)
    spread = 4.303 * statistics.stdev(losses) / 3**0.5
    changed = 10_000 * abs(statistics.mean(losses))
    share = ((changed + 2) / 10_002 - (changed / 10_002) ** 2) / 10_002
    half = (spread**2 + 1.96**2 * share) ** 0.5
    assert row["accuracy_high"] - row["accuracy_difference"] == pytest.approx(half, rel=1e-3)


def test_a_wider_tolerance_admits_more(tmp_path: Path, stored: Path) -> None:
    """QSGD lost 3 +- .36 points; a diverged seed is never admitted."""
    for points, verdict in [("2.6", "loses too much"), ("3.0", "unclear"), ("3.4", "try")]:
        words = ("--runs", stored, "--tolerance", points, "--workers", 4)
        rows = methods(advise(tmp_path, *words))
        assert rows["qsgd"]["advice"] == verdict
        assert rows["int8"]["advice"] == "loses too much"
    rows = methods(advise(tmp_path, *ALONE, "--runs", stored, "--tolerance", "0.1"))
    assert rows["terngrad"]["advice"] == "loses too much"


def test_tasks_without_an_accuracy_are_judged_by_their_loss(tmp_path: Path) -> None:
    """Losses of .010 and .016 more: +- .0075 is within .02, and not within .01."""
    base = [run("none", seed, None, task="text", test_loss=2.0) for seed in range(3)]
    more = (0.010, 0.013, 0.016)
    method = [run("terngrad", s, None, task="text", test_loss=2 + m) for s, m in enumerate(more)]
    path = write(tmp_path / "r.parquet", [*base, *method])
    row = methods(advise(tmp_path, *ALONE, "--runs", path, "--tolerance", "0"))["terngrad"]
    assert row["advice"] == "unclear"
    assert row["accuracy"] == "test loss 0.013 [0.0055, 0.02] higher"
    row = methods(advise(tmp_path, *ALONE, "--runs", path, "--tolerance-loss", "0.03"))["terngrad"]
    assert row["advice"] == "try"
    assert row["accuracy"].startswith("test loss ")
    assert row.get("accuracy_difference") is None


def test_an_answer_without_a_method_names_the_two_reasons(tmp_path: Path, stored: Path) -> None:
    """QSGD lost too much, and top-k was not run."""
    answer = advise(tmp_path, "--compressor", "qsgd,topk", "--runs", stored)["answer"][0]
    assert "the methods that gain lose more than" in answer
    assert "or have no accuracy runs on images with their collective" in answer


@pytest.mark.parametrize(
    ("change", "suite", "reason"),
    [
        ({"config": {"holdout": 0}}, SUITE, "7 without a holdout"),
        ({"config": {"test": False}}, SUITE, "7 trials of learning rates"),
        ({}, "", "7 made for no suite"),
        ({}, "main/0", "7 of another version of their suite"),
        ({"steps": 50}, SUITE, "3 without an uncompressed row of equal budget"),
    ],
)
def test_runs_outside_the_protocol_do_not_count(tmp_path, change, suite, reason) -> None:
    """One and the same runs count, and do not count with one thing changed."""
    losses = [0.03, 0.03, 0.03]
    path = write(tmp_path / "good.parquet", [*plain(), *lost("terngrad", losses)])
    row = methods(advise(tmp_path, *ALONE, "--runs", path))["terngrad"]
    assert (row["advice"], row["results"]) == ("loses too much", 1)
    base = plain() if "steps" in change else plain(**change)
    path = write(tmp_path / "bad.parquet", [*base, *lost("terngrad", losses, **change)], suite)
    result = advise(tmp_path, *ALONE, "--runs", path)
    row = methods(result)["terngrad"]
    assert (row["advice"], row["results"], row["accuracy"]) == ("untested", 0, "untested")
    assert reason in conclusions(result)


def test_runs_without_a_holdout_count_if_trials_with_one_chose_their_settings(tmp_path) -> None:
    suite = suites.load("nanogpt")
    assert suite.tune is not None
    assert suite.tune.holdout
    runs = [*plain(), *lost("terngrad", [0.03, 0.03, 0.03])]
    for one in runs:
        one["config"]["holdout"] = 0
    path = write(tmp_path / "r.parquet", runs, suite.label())
    row = methods(advise(tmp_path, *ALONE, "--runs", path))["terngrad"]
    assert (row["advice"], row["results"]) == ("loses too much", 1)


@pytest.mark.parametrize("label", ["terngrad-ablation", "mine"])
def test_copies_under_another_label_are_no_further_seeds(tmp_path: Path, label: str) -> None:
    """Of fp32 and of the method, in a file that is named before or after the suite's."""
    points = entries("none", "bf16")
    stored = []
    for (name, momentum), point in points.items():
        stored += trials_of(point, 0.5 + 0.1 * (momentum > 0))
        losses = (0.01, 0.02, 0.04) if name == "bf16" else (0.0,) * 3
        rate = point.tune.start[1]
        stored += [of_point(point, s, rate, 0.7 - loss) for s, loss in enumerate(losses)]
    version = suites.load(label).version if label in suites.names() else 1
    main = write(tmp_path / "main.parquet", stored)
    copies = [one for one in stored if one["config"]["test"]]
    copy = write(tmp_path / "copy.parquet", copies, f"{label}/{version}")
    (alone,) = evidence.gather([main]).rows
    assert (alone.row.pairs, alone.row.baseline_n) == (3, 3)
    for paths in ([main, copy], [copy, main]):
        (row,) = [one for one in evidence.gather(paths).rows if one.suite == SUITE]
        assert (row.row.pairs, row.row.baseline_n, row.lost) == (3, 3, alone.lost)


@pytest.mark.parametrize(
    ("suite", "trials", "counting"),
    [
        ("mine/1", [], 0),
        ("mine/1", ["none"], 0),
        ("mine/1", ["terngrad"], 0),
        ("mine/1", ["none", "terngrad"], 1),
        (suites.load("terngrad-table1").label(), [], 0),  # it sets the rates
        (SUITE, [], 1),  # its rule tunes every row
    ],
)
def test_fp32_at_another_rate_is_a_baseline_only_if_trials_chose_both(
    tmp_path: Path, suite: str, trials: list[str], counting: int
) -> None:
    stored = [*plain(lr=1e-5), *lost("terngrad", [-0.05] * 3, lr=0.1)]
    stored += [run(name, 100, None, {"test": False}, validation_accuracy=0.9) for name in trials]
    gathered = evidence.gather([write(tmp_path / "r.parquet", stored, suite)])
    assert len(gathered.rows) == counting
    reason = "without an uncompressed row of equal budget"
    assert gathered.excluded.get(reason, 0) == 3 * (1 - counting)
    same = [*plain(), *lost("terngrad", [-0.05] * 3)]
    assert len(evidence.gather([write(tmp_path / "r.parquet", same, suite)]).rows) == 1


@pytest.mark.parametrize(("seeds", "count"), [(1, 0), (2, 0), (3, 1)])
def test_fewer_than_three_seeds_do_not_count(tmp_path: Path, seeds: int, count: int) -> None:
    """However much they lost: never "too costly" from one seed."""
    path = write(tmp_path / "r.parquet", [*plain(), *lost("terngrad", [0.2] * seeds)])
    result = advise(tmp_path, *ALONE, "--runs", path)
    assert methods(result)["terngrad"]["results"] == count
    assert ("fewer than 3 seeds" in conclusions(result)) == (count == 0)


def test_committed_rows_below_the_folder_are_read(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gcbench.predict.bundled.rows", list)
    result = advise(tmp_path, "--workers", 4)
    assert "No results were read" in conclusions(result)
    assert {row["advice"] for row in methods(result).values()} == {"untested"}
    assert "no method that gains has accuracy runs" in result["answer"][0]
    write(Path("results/reference/main.parquet"), [*plain(), *lost("qsgd", [0.0] * 3)])
    write(Path("results/reference/other.parquet"), lost("terngrad", [0.0] * 3))
    write_runs(Path("results/runs"), run("topk", 0, 0.9))
    result = advise(tmp_path, "--workers", 4)
    places = "results/reference/main.parquet, results/reference/other.parquet, results/runs"
    assert f"Read 11 runs from {places}. Not evidence: 1 made for no suite." in conclusions(result)
    assert {w: row["results"] for w, row in methods(result).items() if row["results"]} == {
        "qsgd": 1,
        "terngrad": 1,
    }


def of_point(point: suites.Point, seed: int, lr: float, accuracy: float, *, trial=False) -> Any:
    """Return a run, or a trial, of an entry of a suite."""
    config = point.config.model_dump(mode="json") | {"seed": seed, "lr": lr, "test": not trial}
    budget = {"task": "cifar10", "workers": 4, "steps": 2000, "batch": 128}
    one = run(point.config.compressor, seed, None if trial else accuracy, **budget)
    one |= {"compressor": registry.call(point.config.make_compressor())}
    one |= {"validation_accuracy": accuracy, "validation_loss": 1.0}
    one["config"] = config | {"collective": one["collective"]}
    return one


def trials_of(point: suites.Point, best: float) -> list[Any]:
    """Return the trials of an entry; the middle one of three rates reaches `best`."""
    rule = point.tune
    return [
        of_point(point, rule.seed, lr, best - 0.1 * (lr != rule.start[1]), trial=True)
        for lr in rule.start
    ]


def entries(*names: str) -> dict[tuple[str, float], suites.Point]:
    """Return entries of main by compressor and momentum, of the momenta with and without."""
    return {
        (point.config.compressor, point.config.momentum): point
        for point in suites.load("main").points({"seed": [0]})
        if point.config.compressor in names and point.settings.keys() <= {"compressor", "momentum"}
    }


def test_the_evidence_states_how_the_rate_was_chosen(tmp_path: Path) -> None:
    """A run of an entry at the best rate of its trials, and one at another."""
    points = entries("none", "bf16")
    trials = [one for key, p in points.items() for one in trials_of(p, 0.5 + 0.1 * (key[1] > 0))]
    none, bf16 = points["none", 0.9], points["bf16", 0.9]
    runs = [of_point(none, seed, none.tune.start[1], 0.7) for seed in range(3)]
    for lr, expected in zip(bf16.tune.start[1:], ("tuned", "untuned"), strict=True):
        method = [of_point(bf16, seed, lr, 0.7) for seed in range(3)]
        (one,) = evidence.gather([write(tmp_path / "r.parquet", [*trials, *runs, *method])]).rows
        assert (one.rate, one.lost[0]) == (expected, 0.0)
    fewer = [t for t in trials if (t["compressor_name"], t["config"]["lr"]) != ("none", 0.1)]
    gathered = evidence.gather([write(tmp_path / "r.parquet", [*fewer, *runs, *method])])
    assert not gathered.rows, "a trial of `none` is missing"
    assert gathered.excluded["whose settings trials have not chosen yet"] == 3


@pytest.mark.parametrize(
    ("trials", "counting"),
    [
        ({("bf16", 0.9): 0.6, ("bf16", 0.0): 0.5}, [0.9]),
        ({("bf16", 0.9): 0.5, ("bf16", 0.0): 0.6}, [0.0]),
        ({("bf16", 0.9): 0.6}, []),  # undecided
        ({("bf16", 0.0): 0.6}, []),
    ],
)
def test_settings_that_trials_rejected_are_no_evidence(tmp_path: Path, trials, counting) -> None:
    points = entries("none", "bf16")
    tried = {("none", 0.9): 0.6, ("none", 0.0): 0.5, **trials}
    stored = [one for key, best in tried.items() for one in trials_of(points[key], best)]
    for point in points.values():
        stored += [of_point(point, seed, point.tune.start[1], 0.7) for seed in range(3)]
    gathered = evidence.gather([write(tmp_path / "r.parquet", stored)])
    decided = [one for one in gathered.rows if not one.open]
    assert [one.row.runs[0].config["momentum"] for one in decided] == counting
    assert len(gathered.rows) - len(decided) == (0 if counting else 2)
    left = sum(n for reason, n in gathered.excluded.items() if "settings trials" in reason)
    assert left == 3 * len(counting)


def language(name: str, loss: float) -> list[Any]:
    """Return runs on text under Adam."""
    runs = [run(name, s, None, task="shakespeare", config={"optimizer": "adam"}) for s in range(3)]
    return [{**one, "test_loss": 2.0 + loss} for one in runs]


@pytest.mark.parametrize(("loss", "seen"), [(0.5, "test loss 0.5"), (0.0, "test loss at most 0 ")])
@pytest.mark.parametrize("image_loss", [0.0, 0.1])
def test_open_rows_and_rows_of_another_task_decide_nothing(
    tmp_path: Path, loss: float, seen: str, image_loss: float
) -> None:
    """PowerSGD's trials without momentum are missing; on text, under Adam, all are complete."""
    points = entries("none", "powersgd")
    done = {("none", 0.9): 0.6, ("none", 0.0): 0.5, ("powersgd", 0.9): 0.6}
    images = [one for key, best in done.items() for one in trials_of(points[key], best)]
    for key, reached in ((("none", 0.9), 0.7), (("powersgd", 0.9), 0.7 - image_loss)):
        rate = points[key].tune.start[1]
        images += [of_point(points[key], seed, rate, reached) for seed in range(3)]
    path = write(
        tmp_path / "r.parquet", [*images, *language("none", 0.0), *language("powersgd", loss)]
    )
    words = ("--compressor", "powersgd", "--cluster", "rtx4090x1-1g", "--workers", "8")
    words = (*words, "--cluster-set", "inter.gbit=1")
    result = advise(tmp_path, *words, "--runs", path)
    row = methods(result)["powersgd"]
    assert row["advice"] == ("unclear" if image_loss else "try"), "other settings may lose less"
    assert row["evidence"] == "cifar10"
    assert ("settings open" in row["accuracy"]) == bool(image_loss)

    text = [*language("none", 0.0), *language("powersgd", loss)]
    result = advise(tmp_path, *words, "--runs", write(tmp_path / "t.parquet", text))
    row = methods(result)["powersgd"]
    assert row["advice"] == "untested"
    assert row["accuracy"].startswith(f"not known: only shakespeare under adam ({seen}")
    assert row["accuracy"] in result["answer"][0]
    assert "`gcbench run --suite main --compressor powersgd`" in result["answer"][0]
    where = ("--results", tmp_path / "a", "--progress", "none", "--runs", tmp_path / "t.parquet")
    assert "only shakespeare" in invoke("advise", *words, *where).out.split("hour")[-1]

    others = [
        one
        for one in suites.load("main").points({"seed": [0]})
        if one.config.compressor == "powersgd" and one.config.momentum == 0
    ]
    assert len(others) == 2
    complete = [*images, *(trial for one in others for trial in trials_of(one, 0.5))]
    row = methods(advise(tmp_path, *words, "--runs", write(tmp_path / "c.parquet", complete)))
    assert row["powersgd"]["advice"] == ("loses too much" if image_loss else "try")
    assert row["powersgd"]["evidence"] == "cifar10"


def test_suites_share_runs_and_each_is_evidence_once(tmp_path: Path) -> None:
    """`none` and its trials, made for main, serve terngrad-ablation, too."""

    def rows_of(suite: str, wanted: set[tuple[str, float]]) -> list[Any]:
        result = suites.load(suite)
        table = []
        for point in result.points({"seed": [0]}):
            options = point.config.options.get("clip", 2.5)
            if (point.config.compressor, options) not in wanted or point.settings.get("dense_last"):
                continue
            rejected = point.settings.get("momentum") == 0
            finals = () if rejected else range(3)
            for lr, seed in [*((lr, 100) for lr in point.tune.start), *((0.03, s) for s in finals)]:
                config = point.config.model_dump(mode="json") | {"seed": seed, "lr": lr}
                trial = seed == 100
                one = run(point.config.compressor, seed, None if trial else 0.7, task="cifar10")
                one |= {"compressor": registry.call(point.config.make_compressor()), "steps": 2000}
                quality = 0.5 - 0.2 * rejected + 0.1 * (lr == point.tune.start[1])
                one |= {"validation_accuracy": quality, "validation_loss": 1.0}
                one |= {"batch": 128, "workers": 4}
                one["config"] = config | {"test": not trial, "collective": one["collective"]}
                one["config_hash"] = f"{suite} {len(table)}"
                table.append(rows.row(one, [], f"{suite}/{result.version}"))
        return table

    path = tmp_path / "both.parquet"
    main = rows_of("main", {("none", 2.5), ("terngrad", 2.5)})
    ablation = rows_of("terngrad-ablation", {("terngrad", 2.0)})
    assert (len(main), len(ablation)) == (18, 6)
    rows.write(path, [*main, *ablation])
    words = ("--runs", path, "--compressor", "terngrad,terngrad:clip=2")
    seen = advise(tmp_path, *words)["tables"][1]["rows"]
    shown = {(row["method"], row["suite"].partition("/")[0], row["rate"]) for row in seen}
    assert shown == {
        ("terngrad", "main", "tuned"),
        ("terngrad:clip=2", "terngrad-ablation", "tuned"),
    }
    assert len(seen) == 2
    without = tmp_path / "without.parquet"
    rows.write(without, ablation)
    assert advise(tmp_path, "--runs", without, *words[2:])["tables"][1]["rows"] == []


def test_the_worst_of_several_results_counts(tmp_path: Path, stored: Path) -> None:
    task = {"task": "mnist"}
    more = [*plain(**task), *lost("terngrad", (0.1, 0.11, 0.1), **task)]
    path = write(tmp_path / "more.parquet", more)
    row = methods(advise(tmp_path, *ALONE, "--runs", stored, "--runs", path))["terngrad"]
    assert (row["advice"], row["results"]) == ("loses too much", 2)
    assert row["accuracy_difference"] == pytest.approx(-0.31 / 3)
    assert row["accuracy_from"].startswith("mnist")


@pytest.fixture
def both(tmp_path: Path) -> Path:
    """TernGrad loses 3 points on images and nothing on text, int8 nothing on either."""

    def language(name: str, losses: Iterable[float]) -> list[Any]:
        table = [run(name, seed, None, task="shakespeare") for seed, _ in enumerate(losses)]
        return [{**one, "test_loss": 2.0 + x} for one, x in zip(table, losses, strict=True)]

    return write(
        tmp_path / "both.parquet",
        [
            *plain(task="cifar10"),
            *lost("terngrad", (0.030, 0.031, 0.029, 0.030), task="cifar10"),
            *lost("int8", (0.0, 0.001, 0.0, 0.0), task="cifar10"),
            *language("none", [0.0] * 4),
            *language("terngrad", (0.001, 0.0, 0.002, 0.001)),
            *language("int8", (0.001, 0.0, 0.001, 0.002)),
        ],
    )


def test_the_task_with_the_same_inputs_decides_and_others_warn(tmp_path: Path, both: Path) -> None:
    text = ("--runs", both, "--model", "bert-large", "--cluster", "a100x1-10g", "--workers", 32)
    result = invoke(
        *("advise", "--compressor", "terngrad,int8", "--results", tmp_path, *text),
        *("--progress", "none", "--json"),
    ).json
    row = methods(result)["terngrad"]
    assert (row["advice"], row["accuracy_task"], row["results"]) == ("try", "shakespeare", 2)
    assert row["elsewhere"] == "cifar10: loses 3 [2.6, 3.4] points"
    assert re.findall(r"[0-9,.]+ times", row["distance"]) == [
        "340,000 times",
        "32 times",
        "16 times",
    ]
    first, second, *_ = result["answer"]
    assert first.startswith("Try terngrad by")
    assert row["elsewhere"] in second
    assert "int8 by " in second, "the method without a warning"
    judged = {(row["method"], row["task"]): row["judged_by"] for row in result["tables"][1]["rows"]}
    assert judged["terngrad", "shakespeare"] == judged["int8", "shakespeare"] == "yes"
    assert judged["terngrad", "cifar10"] == judged["int8", "cifar10"] == "no"

    alone = write(
        tmp_path / "alone.parquet",
        [*plain(task="cifar10"), *lost("terngrad", [0.0] * 4, task="cifar10")],
    )
    result = advise(tmp_path, *ALONE, "--runs", alone, "--model", "bert-large")
    row = methods(result)["terngrad"]
    assert (row["advice"], row["evidence"]) == ("untested", "only cifar10")
    assert row["accuracy"].startswith("not known: only cifar10 under sgd (no loss above")

    images = methods(advise(tmp_path, "--runs", both, "--compressor", "terngrad,int8"))
    assert images["terngrad"]["advice"] == "loses too much"
    assert images["terngrad"]["accuracy_task"] == images["int8"]["accuracy_task"] == "cifar10"
    assert images["terngrad"]["elsewhere"].startswith("shakespeare: test loss at most")
    assert images["int8"]["advice"] == "try"


def test_a_loss_on_other_inputs_by_another_collective_does_not_count(tmp_path: Path) -> None:
    gathered = {"collective": "allgather"}
    text = [
        {**run(name, seed, None, task="shakespeare", **over), "test_loss": 2.0 + loss}
        for name, loss, over in (("none", 0.0, {}), ("qsgd", 0.5, gathered))
        for seed in range(4)
    ]
    images = [
        *plain(task="cifar10"),
        *lost("qsgd", (0.0, 0.001, 0.0, 0.001), task="cifar10", **gathered),
    ]
    path = write(tmp_path / "rows.parquet", [*text, *images])
    # With this many workers all-gather gains nothing.
    words = ("--runs", path, "--compressor", "qsgd", "--cluster-set", "inter.gbit=1", *SINGLE)
    words += ("--workers", 512)
    row = methods(advise(tmp_path, *words))["qsgd"]
    assert (row["collective"], row["advice"]) == ("twoshot", "untested")
    assert row["accuracy"] == "allgather alone: no loss above 0.16 points"
    row = methods(advise(tmp_path, *words, "--model", "bert-large"))["qsgd"]
    assert (row["advice"], row["evidence"]) == ("loses too much", "shakespeare")


def test_a_model_of_unknown_inputs_is_judged_by_the_worst_row(
    tmp_path: Path, both: Path, monkeypatch
) -> None:
    (tmp_path / "ownmodel.py").write_text(
        "from torch import nn\ndef build(): return nn.Linear(5000, 5000)\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ("--runs", both, "--compressor", "terngrad", "--module", "ownmodel:build")
    result = advise(tmp_path, *words, "--compute-ms", 5)
    row = methods(result)["terngrad"]
    assert (row["advice"], row["accuracy_task"], row.get("elsewhere")) == (
        *("loses too much", "cifar10"),
        None,
    )
    assert "examples" not in row["distance"], "its batch is unknown"


@pytest.mark.parametrize(
    ("layers", "inputs"),
    [
        ([nn.Embedding(9, 4), nn.Linear(4, 4)], "text"),
        ([nn.Conv2d(3, 4, 3), nn.Linear(4, 4)], "images"),
        ([nn.Embedding(9, 4), nn.Conv2d(3, 4, 3)], ""),
        ([nn.Linear(4, 4)], ""),
    ],
)
def test_the_layers_of_a_module_show_what_it_reads(layers, inputs) -> None:
    assert networks.inputs_of(nn.Sequential(*layers)) == inputs


def test_networks_and_tasks_declare_their_inputs() -> None:
    """Each built-in network has rows to be judged by, and a task of stored inputs says the same."""
    inputs = {name: registry.task_class(name).inputs for name in registry.tasks()}
    for name in networks.NAMES:
        assert networks.network(name).inputs in set(inputs.values()) - {""}
    for name in ("cifar10", "mnist", "shakespeare"):
        assert networks.inputs_of(registry.task(name).model()) == inputs[name]


def test_results_of_another_memory_or_field_do_not_count(tmp_path: Path) -> None:
    other = lost("terngrad", [0.0] * 3, config={"memory": "momentum"})
    field = lost("qsgd", [0.0] * 3)
    for one in field:
        one["compressor"] = one["compressor"].replace("QSGD(", "QSGD(levels=99, ")
    path = write(tmp_path / "r.parquet", [*plain(), *other, *field])
    rows = methods(advise(tmp_path, "--runs", path))
    assert (rows["terngrad"]["results"], rows["qsgd"]["results"]) == (0, 0)


def imitation(tmp_path: Path) -> Path:
    """Return the file of a method that is int8 but for its name and a fault."""
    path = tmp_path / "mycodec.py"
    path.write_text((ROOT / "compressors/int8.py").read_text().replace("TOP = 127", "TOP = 3"))
    return path


@pytest.mark.usefixtures("forget")
def test_a_copy_of_a_built_in_method_has_none_of_its_results(tmp_path: Path) -> None:
    path = write(tmp_path / "r.parquet", [*plain(), *lost("int8", [0.0] * 3)])
    words = ("--runs", path, "--compressor", f"int8,{imitation(tmp_path)}")
    result = advise(tmp_path, *words)
    built_in, mine = (methods(result)[word] for word in words[-1].split(","))
    assert built_in["compressor"] == mine["compressor"]
    assert (built_in["advice"], built_in["results"]) == ("try", 1)
    assert (mine["advice"], mine["results"], mine["accuracy"]) == ("untested", 0, "untested")
    assert (built_in["over_fp32_low"] is None, mine["over_fp32_low"]) == (False, None)


@pytest.mark.usefixtures("forget")
def test_only_measured_kernels_make_a_method_one_to_try(tmp_path: Path) -> None:
    """A user's method with results and a gain at the floor: the answer asks for its times."""
    name = registry.add_file(str(imitation(tmp_path)))
    runs = lost(name, [0.0] * 3)
    for one in runs:
        one["provenance"] = {
            "plugins": {"compressor": registry.origin(registry.compressors()[name])}
        }
    words = ("--runs", write(tmp_path / "r.parquet", [*plain(), *runs]), "--compressor", name)
    result = advise(tmp_path, *words)
    row = methods(result)[name]
    assert (row["advice"], row["results"], row["gain_low"]) == ("unclear", 1, None)
    assert f"unclear whether {name} by twoshot pays" in result["answer"][0]
    command = f"gcbench bandwidth --compressor {name} --json > m.json"
    assert command in result["answer"][0]
    measured = json.loads((ROOT / "results/bandwidth.json").read_text())
    measured["settings"]["sources"] = {name: registry.source_digest(name)}
    for table in measured["tables"]:
        for row in table["rows"]:
            if row["method"] == "int8":
                row["method"] = name
                row |= {part: row[part] / 1e3 for part in ("encode", "decode") if row.get(part)}
    (tmp_path / "m.json").write_text(json.dumps(measured))
    result = advise(tmp_path, *words, "--kernels", tmp_path / "m.json")
    row = methods(result)[name]
    assert (row["advice"], row["gain_low"] > 1.05) == ("try", True)
    untested = ("--runs", write(tmp_path / "p.parquet", plain()), "--compressor", f"{name},int8")
    assert f"{name} by twoshot (upper bound)" in conclusions(advise(tmp_path, *untested))


@pytest.mark.usefixtures("forget")
@pytest.mark.parametrize("digest_of", ["same", "other", "nothing"])
def test_results_of_a_file_count_while_its_source_is_the_same(
    tmp_path: Path, digest_of: str
) -> None:
    name = registry.add_file(str(imitation(tmp_path)))
    origin = registry.origin(registry.compressors()[name])
    runs = lost(name, [0.0] * 3)
    digest = "0" * 64 if digest_of == "other" else origin["sha256"]
    for one in runs:
        if digest_of != "nothing":
            one["provenance"] = {"plugins": {"compressor": {**origin, "sha256": digest}}}
    path = write(tmp_path / "r.parquet", [*plain(), *runs])
    result = advise(tmp_path, "--runs", path, "--compressor", name)
    assert methods(result)[name]["results"] == (digest_of == "same")
    message = "3 runs of mycodec used another source"
    assert (message in conclusions(result)) == (digest_of != "same")


@pytest.mark.parametrize(
    ("by", "loss", "expected"),
    [
        ("allgather", 0.0, ("try", "allgather", 1)),  # and not by two-shot, which is faster
        ("twoshot", 0.0, ("try", "twoshot", 1)),
        ("allgather", 0.03, ("loses too much", "twoshot", 1)),  # two-shot loses something more
    ],
)
def test_re_encoded_means_count_for_their_collective_only(
    tmp_path: Path, by: str, loss: float, expected: tuple[str, str, int]
) -> None:
    runs = lost("qsgd", [loss] * 3, collective=by)
    path = write(tmp_path / "r.parquet", [*plain(), *runs])
    row = methods(advise(tmp_path, "--runs", path, "--workers", 4))
    assert (row["qsgd"]["advice"], row["qsgd"]["collective"], row["qsgd"]["results"]) == expected


@pytest.mark.parametrize(
    ("by", "loss", "expected"),
    [
        ("allgather", 0.0, ("try", 1)),
        ("allgather", 0.03, ("loses too much", 1)),
        ("twoshot", 0.0, ("try", 1)),  # encoding the mean again only adds to the loss
        ("twoshot", 0.03, ("untested", 0)),
    ],
)
def test_sharded_means_are_not_encoded_again(
    tmp_path: Path, by: str, loss: float, expected: tuple[str, int]
) -> None:
    runs = lost("qsgd", [loss] * 3, collective=by)
    path = write(tmp_path / "r.parquet", [*plain(), *runs])
    row = methods(advise(tmp_path, "--runs", path, "--sharded", "--batch", "1"))["qsgd"]
    assert (row["advice"], row["results"]) == expected


def test_results_of_another_collective_are_shown_and_do_not_count(tmp_path: Path) -> None:
    """By two-shot, which alone gains on 64 nodes, QSGD's owners encode the mean again."""
    runs = lost("qsgd", [0.002] * 3, collective="allgather")
    path = write(tmp_path / "r.parquet", [*plain(), *runs])
    words = ("--compressor", "qsgd", "--cluster", "a100x1-10g", "--workers", "64", "--runs", path)
    result = advise(tmp_path, *words, "--cluster-set", "inter.gbit=1")
    row = methods(result)["qsgd"]
    assert (row["advice"], row["results"], row["collective"]) == ("untested", 0, "twoshot")
    assert row["accuracy"] == "allgather alone: loses 0.2 [0.11, 0.29] points"
    (untested,) = [line for line in result["conclusions"] if "without accuracy runs" in line]
    assert "qsgd by twoshot" in untested


@pytest.mark.parametrize(("workers", "collective"), [(64, "twoshot"), (2, "allgather")])
def test_the_suite_is_proposed_only_if_its_runs_would_count(
    tmp_path: Path, workers: int, collective: str
) -> None:
    """The suite's runs of QSGD are by all-gather."""
    path = write(tmp_path / "r.parquet", plain())
    words = ("--compressor", "qsgd", "--cluster", "a100x1-10g", "--workers", workers)
    words += ("--batch", 128, "--runs", path)
    answer = " ".join(advise(tmp_path, *words, "--cluster-set", "inter.gbit=6")["answer"])
    assert f"qsgd by {collective}" in answer
    proposed = "gcbench run --suite main --compressor qsgd" in answer
    assert proposed == (collective == "allgather")


def test_with_one_mean_results_of_any_collective_count(tmp_path: Path) -> None:
    runs = lost("terngrad", [0.0] * 3, collective="allreduce")
    path = write(tmp_path / "r.parquet", [*plain(), *runs])
    row = methods(advise(tmp_path, *ALONE, "--runs", path))["terngrad"]
    assert (row["advice"], row["collective"], row["results"]) == ("try", "twoshot", 1)


@pytest.mark.parametrize(
    "other",
    [
        {"options": {"clip": {"0": 1.0, "50": 2.5}}},
        {"start_step": 50},
        {"delay": 1},
        {"trim": 1},
        {"outer_momentum": 0.5},
        {"dense_last": True},
        {"dense_below": 9},
        {"memory_options": {"decay": 0.5}},
    ],
)
def test_results_of_other_settings_do_not_count(tmp_path: Path, other: dict) -> None:
    path = write(tmp_path / "r.parquet", [*plain(), *lost("terngrad", [0.0] * 3, config=other)])
    row = methods(advise(tmp_path, *ALONE, "--runs", path))["terngrad"]
    assert (row["advice"], row["results"]) == ("untested", 0)


def test_results_under_attack_do_not_count(tmp_path: Path) -> None:
    attacked = {"config": {"adversaries": 1}}
    runs = [*plain(**attacked), *lost("terngrad", [0.0] * 3, **attacked)]
    path = write(tmp_path / "r.parquet", [*plain(), *runs])
    row = methods(advise(tmp_path, *ALONE, "--runs", path))["terngrad"]
    assert (row["advice"], row["results"]) == ("untested", 0)


def test_results_with_the_requested_dense_tensors_count(tmp_path: Path) -> None:
    dense = {"dense_last": True, "dense_below": 9}
    path = write(tmp_path / "r.parquet", [*plain(), *lost("terngrad", [0.0] * 3, config=dense)])
    row = methods(advise(tmp_path, *ALONE, "--runs", path, "--dense-last", "--dense-below", 9))
    assert row["terngrad"]["results"] == 1


def test_on_a_fast_network_the_answer_is_do_not_compress(tmp_path: Path, stored: Path) -> None:
    result = advise(tmp_path, "--runs", stored, *FAST)
    assert {row["advice"] for row in methods(result).values()} == {"no gain"}
    assert result["answer"][0].startswith("Do not compress: the links are not a bottleneck")
    assert "1 times as fast" in result["answer"][0]


def test_packaged_rows_are_read(tmp_path: Path, monkeypatch) -> None:
    """Without a checkout below: its own rows, each by its name; one of the folder replaces one.

    Both files hold the same 4 runs of `none`, which count once.
    """
    monkeypatch.chdir(tmp_path)
    brought = write(tmp_path / "package/main.parquet", [*plain(), *lost("qsgd", [0.0] * 3)])
    other = write(tmp_path / "package/text.parquet", [*plain(), *lost("int8", [0.0] * 3)])
    monkeypatch.setattr("gcbench.predict.bundled.rows", lambda: [brought, other])
    result = advise(tmp_path, "--workers", 4)
    places = "gcbench's main.parquet, gcbench's text.parquet"
    assert f"Read 10 runs from {places}." in conclusions(result)
    assert methods(result)["qsgd"]["results"] == 1
    write(Path("results/reference/main.parquet"), plain())
    result = advise(tmp_path, "--workers", 4)
    assert methods(result)["qsgd"]["results"] == 0
    assert "results/reference/main.parquet, gcbench's text.parquet." in conclusions(result)


def test_reducing_in_bf16_is_the_baseline_that_counts(tmp_path: Path) -> None:
    """Where bf16 is enough, methods gain nothing, and the answer has the accuracy of bf16."""
    text, losses = {"task": "shakespeare"}, (0.003, 0.005, 0.004, 0.004)
    path = write(tmp_path / "r.parquet", [*plain(**text), *lost("bf16", losses, **text)])
    words = ("--runs", path, "--compressor", "bf16,int8,terngrad", "--model", "transformer-1.3b")
    enough = ("--cluster", "a100x1-10g", "--workers", "32", "--cluster-set", "inter.gbit=50")
    result = advise(tmp_path, *words, *enough)
    assert {row["advice"] for row in methods(result).values()} <= {"no gain", "cannot tell"}
    assert all(row["over_fp32_low"] > 1.05 for row in methods(result).values())
    assert result["answer"][0].startswith("Reduce in bf16")
    assert "bf16_compress_hook" in result["answer"][1]
    assert "loses 0.4 [0.22, 0.58] points (shakespeare)" in result["answer"][1]
    alone = conclusions(advise(tmp_path, "--runs", path, *words[4:], *enough, *ALONE))
    slow = ("--cluster", "rtx4090x1-1g", "--workers", 8, "--cluster-set", "inter.gbit=1")
    images = conclusions(advise(tmp_path, "--runs", path, *ALONE, *slow, "--model", "resnet50"))
    assert "Accuracy of bf16: not known: only shakespeare under sgd (loses 0.4" in images
    assert "loses 0.4 [0.22, 0.58] points (shakespeare)" in alone


def test_a_gain_that_depends_on_kernels_is_unclear(tmp_path: Path, monkeypatch) -> None:
    """Tested and within the tolerance, faster at the memory's floor alone: not yet."""
    path = write(tmp_path / "r.parquet", [*plain(), *lost("terngrad", [0.0] * 3)])
    words = (*ALONE, "--runs", path)
    assert methods(advise(tmp_path, *words))["terngrad"]["advice"] == "try"
    slow = costs.Codec(1e-8, 1e-4, "twoshot", 1e-9)
    monkeypatch.setattr(costs.Measured, "of", lambda self, method, n: slow)
    result = advise(tmp_path, *words, "--force")
    row = methods(result)["terngrad"]
    assert row["gain_low"] < 1.05 < row["gain_high"]
    assert row["advice"] == "cannot tell"
    assert "cannot tell whether terngrad by " in result["answer"][0]


def test_the_simplest_of_tied_methods_is_recommended(tmp_path: Path) -> None:
    """Both hide completely; powersgd sends less, int8 is the simpler."""
    none = [0.0] * 3
    text = {"task": "shakespeare"}
    runs = [one for name in ("int8", "powersgd") for one in lost(name, none, **text)]
    path = write(tmp_path / "r.parquet", [*plain(**text), *runs])
    words = ("--runs", path, "--compressor", "powersgd,int8", "--model", "transformer-1.3b")
    cluster = ("--cluster", "a100x1-10g", "--workers", "32", "--cluster-set")
    result = advise(tmp_path, *words, *cluster, "inter.gbit=25")
    assert list(methods(result)) == ["int8", "powersgd"]
    assert result["answer"][0].startswith("Try int8 by twoshot")
    result = advise(tmp_path, *words, *cluster, "inter.gbit=5")
    assert result["answer"][0].startswith("Try powersgd by allreduce")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tolerance", "-1"], "--tolerance"),
        (["--tolerance", "200"], "--tolerance"),
        (["--margin", "-3"], "--margin"),
        (["--tolerance-loss", "-1"], "--tolerance-loss"),
        (["--tolerance-loss", "inf"], "usage: --tolerance-loss: "),
        (["--compute-ms", "0"], "usage: --compute-ms: "),
        (["--compressor", "none"], "usage: --compressor none: "),
        (["--workers", "8,64"], "--workers"),
        (["--workers", "1"], "--workers"),
        (["--workers", "63"], "do not fill nodes"),
        (["--model", "resnet51"], "Did you mean 'resnet50'"),
        (["--cluster", "v100"], "v100x8-25g"),
        (["--overlap", "2"], "--overlap"),
        (["--cluster-set", "inter.gbit=0"], "greater than 0"),
        (["--runs", "gone"], "does not exist"),
        (["--compressor", "topc"], "Did you mean 'topk'"),
        (["--device", "cuda"], "--measure"),
        (["--plot", "x.jpg"], "x.jpg"),
    ],
)
def test_invalid_options_are_refused(tmp_path: Path, monkeypatch, words, message) -> None:
    monkeypatch.chdir(tmp_path)
    refused = invoke("advise", *words)
    assert (refused.code, message in refused.err) == (2, True), refused.err
    assert not list(tmp_path.rglob("analysis.json"))


def test_methods_between_nodes_of_several_gpus_are_flat(tmp_path: Path) -> None:
    """No hook sends one payload per node: all 8 of a node share its link, and bf16 is faster."""
    path = write(tmp_path / "r.parquet", [*plain(), *lost("int8", [0.0] * 3)])
    words = ("--runs", path, "--compressor", "int8", "--model", "transformer-1.3b")
    words += ("--cluster", "a100x8-25g", "--workers", "32", "--cluster-set")
    row = methods(advise(tmp_path, *words, "inter.gbit=25"))["int8"]
    assert (row["topology"], row["advice"]) == ("flat", "no gain")
    assert row["over_bf16_high"] < 0.6
    refused = invoke("advise", *words, "topology=nodes")
    assert (refused.code, "topology=nodes" in refused.err) == (2, True), refused.err
    one = advise(tmp_path, *words, "topology=nodes", *SINGLE)
    assert methods(one)["int8"]["topology"] == "flat"


def test_an_untested_method_that_is_slower_is_not_called_faster() -> None:
    """With measured times it is slower, at the memory's floor it would gain."""
    settings = advice.Settings.model_construct(margin=0.05)
    row = {"method": "m", "collective": "twoshot", "advice": "untested", "gain_low": 0.9}
    slower, equal, faster = ({**row, "gain": gain} for gain in (0.9, 1.05, 1.06))
    assert not list(advice._untested(settings, [slower, equal]))
    assert list(advice._untested(settings, [slower, faster]))
    tried = {**row, "advice": "try", "gain": 1.5}
    assert not list(advice._untested(settings, [tried, faster]))


def test_the_links_are_those_on_which_the_margin_is_gained(tmp_path: Path) -> None:
    """Within them it gains the margin, and beyond them less."""
    path = write(tmp_path / "r.parquet", plain())
    words = ("--runs", path, "--compressor", "int8", "--model", "transformer-1.3b")
    cluster = ("--cluster", "a100x1-10g", "--workers", "32")
    edge = methods(advise(tmp_path, *words, *cluster))["int8"]["pays_to_gbit"]
    for factor, gains in [(0.98, True), (1.02, False)]:
        there = ("--cluster-set", f"inter.gbit={edge * factor}")
        row = methods(advise(tmp_path, *words, *cluster, *there))["int8"]
        assert (row["gain_low"] > 1.05) == gains


def test_sharded_training_reduces_in_bf16_by_its_own_setting(tmp_path: Path) -> None:
    path = write(tmp_path / "r.parquet", plain())
    words = ("--runs", path, "--compressor", "int8,powersgd", "--model", "transformer-1.3b")
    words += ("--cluster", "a100x8-25g", "--workers", "32", "--sharded")
    result = advise(tmp_path, *words, "--cluster-set", "inter.gbit=25")
    assert "reduce_dtype=torch.bfloat16)" in conclusions(result)
    assert list(methods(result)) == ["int8"]


# ---- the plan, by hand ---------------------------------------------------------------------------

NCCL = 0.94
"""Share of a nominal link that NCCL achieves."""


def plan(tmp_path: Path, model: str, cluster: str, workers: int, *more: object) -> Any:
    """Return the answer, and the options of a plan by name."""
    words = ("--model", model, "--cluster", cluster, "--workers", workers, *ALONE)
    where = ("--results", tmp_path / "a", "--progress", "none", "--json")
    result = invoke("advise", *words, *where, *more).json
    tables = {table["name"]: table["rows"] for table in result["tables"]}
    return result["answer"], {row["option"]: row for row in tables["plan"]}


def fewest(wait: float, compute: float, most: int) -> int:
    """Return the least power of 2, up to `most`, with which waiting takes at most 5 %."""
    return next(n for n in (2**k for k in range(20)) if n == most or wait <= 0.05 * n * compute)


@pytest.mark.parametrize(
    ("model", "cluster", "workers", "rate", "latency", "compute", "verdict"),
    [
        # homes: 1776 images/s at batch 256; 0.18 Gbit/s achieved, 20 ms
        ("resnet50", "rtx4090x1-internet", 3, 0.18e9 / 8, 20e-3, 256 / 1776, "Do not distribute"),
        # four workstations; 32 sequences at 64.2 % of 165 TFLOPS, as the A100 reaches
        ("bert-large", "rtx4090x1-1g", 4, NCCL * 1e9 / 8, 50e-6, None, "Do not distribute"),
        # 210 sequences/s at batch 32
        ("bert-large", "a100x1-10g", 32, NCCL * 10e9 / 8, 30e-6, 32 / 210, "Try "),
    ],
)
def test_single_gpu_nodes_on_slow_links(
    tmp_path: Path, both_stored: Path, model, cluster, workers, rate, latency, compute, verdict
) -> None:
    """A ring whose link is busy from the first bucket on: nearly all communication is exposed."""
    answer, options = plan(
        tmp_path, model, cluster, workers, "--runs", both_stored, "--tolerance", 3.4
    )
    network = networks.network(model)
    if compute is None:
        compute = 6 * network.macs * 32 / (165e12 * 0.642)
    rounds, moved = min(workers - 1, (workers - 1).bit_length()), 2 * (workers - 1) / workers
    sizes = traffic.buckets(network.arrival)
    wait = {}
    for name, width in (("fp32", 4), ("bf16", 2)):
        sent = moved * width * network.numel / rate + 2 * rounds * len(sizes) * latency
        casts = 12 * network.numel / (options_memory(cluster) * 1e9) if width == 2 else 0.0
        hidden = 2 / 3 * compute * (1 - sizes[0] / sum(sizes))
        wait[name] = sent - hidden + casts
        expected = workers * compute / (compute + wait[name])
        assert options[name]["over_alone"] == pytest.approx(expected, rel=0.01)
    count = fewest(wait["bf16"], compute, 64)
    total = workers * count * compute / (count * compute + wait["bf16"])
    assert options[f"accumulate {count}"]["over_alone"] == pytest.approx(total, rel=0.01)
    blocking = moved * 4 * network.numel / rate + 2 * rounds * latency
    local = fewest(blocking, compute, 1024)
    total = workers * local * compute / (local * compute + blocking)
    assert options[f"local steps {local}"]["over_alone"] == pytest.approx(total, rel=0.01)
    assert options["one worker"]["over_alone"] == 1
    # two bits per element; an all-gather moves more than this
    ternary = moved * network.numel / 4 / rate
    (name,) = (name for name in options if name.startswith("terngrad by "))
    assert options[name]["over_alone"] <= workers * compute / (
        compute / 3 + max(ternary, 2 / 3 * compute)
    )
    assert answer[0].startswith(verdict)
    if verdict == "Do not distribute":
        assert max(options[name]["over_alone"] for name in ("fp32", "bf16")) < 1
        assert f"every={local}," in answer[1]


def options_memory(cluster: str) -> float:
    """Return the GB/s of the cluster's device, from its data sheet."""
    return 1008 if cluster.startswith("rtx4090") else 2039


@pytest.mark.parametrize(
    ("model", "cluster", "workers", "rate", "inner", "verdict"),
    [
        ("resnet50", "v100x8-25g", 64, NCCL * 25e9 / 8, 1200e9 / 8, "Do not compress"),
        ("transformer-1.3b", "h100x8-100g", 64, NCCL * 100e9 / 8, 476e9, "Reduce in bf16"),
        ("transformer-1.3b", "g5.48xlarge", 16, 60e9 / 8, 96e9 / 8, "Do not compress"),
    ],
)
def test_nodes_of_eight(
    tmp_path: Path, stored: Path, model, cluster, workers, rate, inner, verdict
) -> None:
    """Bounds on bf16: nothing hidden, and everything hidden but the last bucket.

    Nodes add first: a ring among 8 devices, then one among the nodes.
    """
    answer, options = plan(tmp_path, model, cluster, workers, "--runs", stored, "--tolerance", 3.4)
    network, nodes = networks.network(model), workers // 8
    compute = {
        "v100x8-25g": 256 / 1200,
        "h100x8-100g": 14 * 2048 / 45455,
        "g5.48xlarge": 6 * network.macs * 14 / (70e12 * 0.642),
    }[cluster]
    sent = 2 * network.numel * (2 * 7 / 8 / inner + 2 * (nodes - 1) / nodes / rate)
    last = traffic.buckets(network.arrival)[-1] / (4 * network.numel)
    slowest = workers * compute / (compute + sent)
    fastest = workers * compute / (compute + max(last * sent, sent - 2 / 3 * compute))
    assert 0.98 * slowest <= options["bf16"]["over_alone"] <= fastest
    assert answer[0].startswith(verdict)


def test_the_pasted_line_is_valid_python() -> None:
    """It registers a hook with the method's fields and the recommended collective."""
    row = {"method": "topk:ratio=0.02", "collective": "allgather"}
    settings = advice.Settings.model_construct(sharded=False, dense_last=True, dense_below=9)
    line = advice._paste(settings, row, "topk:ratio=0.02 by allgather").split("`")[1]
    (call,) = (node for node in ast.walk(ast.parse(line)) if isinstance(node, ast.keyword)
               and node.arg == "ratio")  # fmt: skip
    assert ast.literal_eval(call.value) == 0.02
    seen: dict[str, Any] = {}
    fake = SimpleNamespace(
        comm_hook=lambda *names, **fields: (
            seen.update(fields, name=names) or SimpleNamespace(register=lambda model: None)
        )
    )
    exec(line, {"gcbench": fake, "optimizer": 1, "model": 2})
    assert seen == {"name": ("topk",), "ratio": 0.02, "collective": "allgather", "optimizer": 1,
                    "dense_last": True, "dense_below": 9}  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "fields"),
    [
        ("terngrad:share=false", {"share": False}),
        ("randomk:scaled=false:ratio=0.1", {"scaled": False, "ratio": 0.1}),
        ("qsgd:norm=max", {"norm": "max"}),
    ],
)
def test_the_pasted_line_has_fields_of_any_type(spec: str, fields: dict[str, Any]) -> None:
    """share='false' had been refused by the hook."""
    settings = advice.Settings.model_construct(sharded=False, dense_last=False, dense_below=0)
    row = {"method": spec, "collective": "allgather"}
    (call,) = (
        node
        for node in ast.walk(ast.parse(advice._paste(settings, row, spec).split("`")[1]))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "comm_hook"
    )
    words = {word.arg: word.value for word in call.keywords}
    assert {name: ast.literal_eval(words[name]) for name in fields} == fields


@pytest.mark.parametrize(
    ("cluster", "workers", "choice", "commands"),
    [
        (  # the link's rate, delay and workers
            "rtx4090x1-internet",
            3,
            "int8 by twoshot",
            ["netlab --bandwidth 180mbit --delay 20ms --workers 3 -- run --compressor "
             "none,bf16,int8"],
        ),
        (  # a collective that bf16 does not have
            "a100x8-25g",
            32,
            "terngrad by allreduce",
            ["bandwidth --compressor none,bf16,terngrad --collective allreduce,twoshot"],
        ),
        (
            "rtx4090x1-1g",
            16,
            "terngrad by allreduce",
            ["netlab --bandwidth 1000mbit -- run --compressor none,terngrad --collective allreduce",
             "netlab --bandwidth 1000mbit -- run --compressor bf16"],
        ),
        ("gtx1080x4-1gbe", 4, "bf16", ["bandwidth --compressor none,bf16"]),  # inside a node
    ],
)  # fmt: skip
def test_the_proposed_measurement_is_of_the_option_on_its_link(
    cluster, workers, choice, commands
) -> None:
    there = clusters.load(cluster)
    settings = advice.Settings.model_construct(cluster=there, workers=[workers], sharded=False)
    lines = advice._how_to_know(settings, choice).split("`")[1::2]
    assert [line.partition("gcbench ")[2] for line in lines] == commands


def test_local_steps_broadcast_no_buffers(tmp_path: Path, monkeypatch) -> None:
    """They run without DDP; the broadcast of 50 MB had made 1,024 steps of 128."""
    (tmp_path / "with_buffers.py").write_text(
        "import torch\n\n\ndef plain():\n    return torch.nn.Linear(2048, 1024)\n\n\n"
        "def make():\n    module = plain()\n"
        "    module.register_buffer('seen', torch.zeros(12_500_000))\n    return module\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    path = write(tmp_path / "r.parquet", plain())

    def local(name: str) -> str:
        words = ("--module", f"with_buffers:{name}", "--compute-ms", 20, "--runs", path, *ALONE)
        where = ("--cluster", "rtx4090x1-1g", "--workers", 8, "--cluster-set", "inter.gbit=1")
        plan = advise(tmp_path, *words, *where)["tables"][2]["rows"]
        (option,) = (row["option"] for row in plan if row["option"].startswith("local steps"))
        return option

    assert local("make") == local("plain")


def policy(line: str) -> Any:
    """Return the precision with which a pasted line shards."""
    names = {"torch": torch, "MixedPrecisionPolicy": MixedPrecisionPolicy, "part": 1}
    return eval(line, {**names, "fully_shard": lambda part, mp_policy: mp_policy})


@pytest.mark.parametrize(("choice", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_fsdp_gathers_and_reduces_in_the_predicted_dtypes(choice, dtype) -> None:
    """Without reduce_dtype it would reduce in the dtype of the gathered parameters."""
    settings = advice.Settings.model_construct(sharded=True)
    line = advice._paste(settings, None, choice).split("`")[1]
    assert policy(line) == MixedPrecisionPolicy(torch.bfloat16, dtype)


def test_the_pasted_line_of_fsdp_has_the_dense_tensors_and_the_optimizer() -> None:
    row = {"method": "qsgd:levels=3", "collective": "twoshot"}
    settings = advice.Settings.model_construct(sharded=True, dense_last=False, dense_below=9)
    shard, line = advice._paste(settings, row, "qsgd:levels=3 by twoshot").split("`")[1:4:2]
    assert policy(shard) == MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = nn.Linear(2, 2)
    hooks: list[Any] = []

    def shard_hook(*names: Any, **fields: Any) -> Any:
        hooks.append(gcbench.shard_hook(*names, **fields))
        return SimpleNamespace(register=lambda model: None)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fake = SimpleNamespace(shard_hook=shard_hook)
    exec(line, {"gcbench": fake, "optimizer": optimizer, "model": model})
    (hook,) = hooks
    assert hook.settings.dense_below == 9
    assert registry.call(hook.settings.compressor).startswith("QSGD(levels=3")
    assert "optimizer=optimizer" in line


def test_workers_that_are_about_as_fast_as_one_cannot_be_ranked(tmp_path, both_stored) -> None:
    """At the rate at which the fastest option equals one worker, within the error band."""
    low, high = 1.2, 2.5
    for _ in range(8):
        middle = (low * high) ** 0.5
        words = ("--runs", both_stored, "--tolerance", 3.4)
        words += ("--cluster-set", f"inter.gbit={middle}")
        answer, options = plan(tmp_path, "bert-large", "rtx4090x1-1g", 4, *words)
        over = max(options[name]["over_alone"] for name in ("bf16", "terngrad by twoshot"))
        if 1 <= over < 1.04:
            break
        low, high = (middle, high) if over < 1 else (low, middle)
    assert answer[0].startswith("Cannot tell whether 4 workers are faster than one")


def test_a_long_answer_leaves_the_choice_in_the_table(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = ("--model", "bert-large", "--cluster", "a100x1-10g", "--workers", 32)
    where = ("--results", tmp_path, "--progress", "none")
    lines = invoke("advise", *words, *where).out.splitlines()
    choice = lines[0].removeprefix("Try ").partition(":")[0]
    assert lines[0].startswith("Try ")
    assert len(lines) <= 25
    assert any(line.startswith(f"{choice}  ") for line in lines), lines


def test_methods_must_gain_more_than_their_band(tmp_path: Path) -> None:
    """Steps of int8 took up to 1.12 times as long as predicted, of powersgd up to 2.06 times."""
    path = write(
        tmp_path / "r.parquet",
        [*plain(), *lost("powersgd", [0.0] * 3), *lost("int8", [0.0] * 3)],
    )
    words = ("--runs", path, "--compressor", "powersgd,int8", "--model", "resnet50")
    cluster = ("--cluster", "a100x1-10g", "--cluster-set", "inter.gbit=10", "--workers", 32)
    result = advise(tmp_path, *words, *cluster)
    rows = methods(result)
    assert {name: row["advice"] for name, row in rows.items()} == {
        "int8": "try",
        "powersgd": "cannot tell",
    }
    assert rows["int8"]["gain"] > 1.12
    where = ("--results", tmp_path / "a", "--progress", "none")
    lines = invoke("advise", *words, *cluster, *where).out.splitlines()
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("──")) + 1 :]
    options = [line.partition("  ")[0] for line in table]
    assert options[:3] == ["int8 by twoshot", "one worker", "bf16"], lines
    assert 1.12 < rows["powersgd"]["gain"] < 2.06
    assert "to 106% (powersgd; 48 tests over gloo" in result["answer"][0]
    slower = ("--cluster-set", "inter.gbit=2", "--workers", 2)
    alone = (*words[:2], "--compressor", "int8", *words[4:])
    two = advise(tmp_path, *alone, *cluster[:2], *slower)
    assert two["answer"][0].startswith("Try int8"), "int8 gains more than its own error over one"
    none = ("--runs", write(tmp_path / "p.parquet", plain()), *words[2:])
    none = (*none, "--cluster", "a100x1-10g", "--cluster-set", "inter.gbit=2")
    verdicts = {row["advice"] for row in methods(advise(tmp_path, *none)).values()}
    assert verdicts == {"untested"}, "of unknown accuracy, whatever the gain"
    inside = advise(tmp_path, *words, "--cluster", "v100x8-25g", "--workers", 8, "--cluster-set",
                    "intra.gbit=1")  # fmt: skip
    assert "Error band" not in conclusions(inside)
    assert {row["advice"] for row in methods(inside).values()} == {"try"}


@pytest.mark.parametrize(
    ("gbit", "fastest", "verdict"),
    [(1.13, "bf16", "Cannot tell"), (0.9, "bf16", "Do not distribute")],
)
def test_a_faster_method_of_unknown_accuracy_is_named(tmp_path, gbit, fastest, verdict) -> None:
    """Slower than one worker by less than the error band is not slower for certain."""
    words = ("--model", "bert-large", "--cluster", "a100x1-10g", "--workers", 64)
    cluster = (
        "--cluster-set",
        f"inter.gbit={gbit}",
        "--runs",
        write(tmp_path / "r.parquet", plain()),
    )
    result = advise(tmp_path, *words, *cluster, "--compressor", "qsgd")
    over = {row["option"]: row["over_alone"] for row in result["tables"][2]["rows"]}
    assert over[fastest] < 1, "below one worker, by more or less than the band"
    assert (over[fastest] < 1 / 1.05) == (verdict == "Do not distribute")
    assert over["qsgd by twoshot"] > 1.05
    first = result["answer"][0]
    assert first.startswith(verdict)
    assert (
        f"qsgd by twoshot (untested) is predicted at {over['qsgd by twoshot']:.2g} times" in first
    )


def test_the_picture_has_every_option(tmp_path: Path, stored: Path) -> None:
    path = tmp_path / "x.svg"
    where = ("--results", tmp_path / "a", "--progress", "none", "--plot", path)
    assert invoke("advise", *SLOW, "--runs", stored, *where, "--compressor", METHODS).code == 0
    text = path.read_text()
    assert "terngrad by" in text
    assert "one worker" in text


# ---- measured here -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "workers", "gbit", "latency_us"),
    [
        ("a100x1-10g", 4, 8.0, 100.0),
        ("a100x1-10g", 32, 10.0, 30.0),
        ("a100x8-25g", 16, 25.0, 25.0),
        ("a100x8-25g", 32, 25.0, 25.0),
        ("rtx4090x1-1g", 3, 1.0, 0.0),
    ],
)
def test_the_cluster_predicts_the_all_reduces_to_which_its_link_is_fitted(
    name, workers, gbit, latency_us
) -> None:
    """A flat ring was fitted, while the prediction took trees, and nodes first."""
    sizes = (65536, 4194304)
    link = {"inter.gbit": gbit, "inter.latency_us": latency_us, "transport": "achieved"}
    seconds = {
        size: clusters.load(name, link).seconds("allreduce", size, workers) for size in sizes
    }
    rows = [{"collective": "all_reduce", "size": size, "p50": p50} for size, p50 in seconds.items()]
    table = SimpleNamespace(rows=[*rows, {"collective": "-", "size": 1, "p50": 9.0}])
    result = SimpleNamespace(settings={"workers": workers}, table=lambda name: table)
    fitted = dict(zip(link, measuring.link(result, clusters.load(name)), strict=False))
    there = clusters.load(name, {**fitted, "transport": "achieved"})
    for size, measured in seconds.items():
        assert there.seconds("allreduce", size, workers) == pytest.approx(measured, rel=1e-6)
    rows[1]["p50"] = rows[0]["p50"] / 2
    with pytest.raises(UsageError, match="4194304"):
        measuring.link(result, clusters.load(name))


@pytest.mark.usefixtures("forked")
def test_measured_kernels_replace_the_assumed_ones(
    tmp_path: Path, stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two local processes: the encoding times are ours, the link is the cluster's.

    A loopback on which no link can be fitted, as on a busy machine, ended the command.
    """
    monkeypatch.setattr(measuring, "link", lambda *_: pytest.fail("no link is asked for"))
    words = ("--measure", "--compressor", "terngrad", "--runs", stored, *SLOW)
    where = ("--results", tmp_path / "a", "--progress", "none", "--json")
    result = invoke("advise", *words, *where)
    row = methods(result.json)["terngrad"]
    assert row["gain_low"] is not None
    assert result.json["settings"]["kernels"].endswith("times.json")
    assert result.json["settings"]["cluster"]["inter"]["gbit"] == 1
    assert "already measured" not in result.err
    again = invoke("advise", *words, *where)
    assert "already measured; --force measures again" in again.err
    refused = invoke("advise", *words, *where, "--kernels", "m.json")
    assert (refused.code, "m.json" in refused.err) == (2, True)


def test_ranks_of_one_machine_measure_no_link_between_nodes(
    programs: Any, tmp_path: Path, stored: Path
) -> None:
    """Their loopback is not a link of the cluster, whose rate remains, also if it is given."""
    words = ("advise", "--measure", "--compressor", "terngrad", "--runs", stored, *SLOW)
    where = ("--results", tmp_path / "a", "--progress", "none", "--json")
    job = ("torchrun", "--standalone", "--nproc-per-node", 2, "-m", "gcbench", *words, *where)
    environment = {"OMP_NUM_THREADS": "1"}
    done = programs.shell(shlex.join(map(str, job)), tmp_path, PATIENCE, **environment)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    (times,) = (tmp_path / "a").glob("*/times.json")
    assert answer["settings"]["cluster"]["inter"]["gbit"] == 1
    assert "not measured" in answer["settings"]["cluster"]["note"]
    assert answer["settings"]["kernels"] == str(times)


@pytest.mark.parametrize(("local", "changes"), [("2", {"note"}), ("1", {"inter.gbit", "note"})])
def test_under_torchrun_the_link_between_machines_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, local: str, changes: set[str]
) -> None:
    """Two ranks on one machine, then on two."""
    for name, value in (("TORCHELASTIC_RUN_ID", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    (tmp_path / "x").mkdir()
    result = SimpleNamespace(name="x", elsewhere="")
    monkeypatch.setattr(measuring.settings, "make", lambda **_: SimpleNamespace(workers=2))
    monkeypatch.setattr(measuring.bandwidth, "run", lambda *_, **__: (result, False))
    monkeypatch.setattr(measuring.analysis, "document", lambda _: {})
    each: list[int] = []
    monkeypatch.setattr(
        measuring, "link", lambda _, cluster: each.append(cluster.gpus_per_node) or (8.0, 100.0)
    )
    cluster = clusters.load("a100x8-25g")
    here = measuring.measure(["int8"], "cpu", tmp_path, None, cluster, force=False)
    assert each == [1] * (local == "1")  # nodes as torchrun has them, not as the cluster has
    assert here is not None
    assert changes <= set(here.changes)
    assert here.changes.get("inter.gbit") == (8.0 if local == "1" else None)


def test_a_link_is_given_or_measured_not_both(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The given one had replaced the measured one under the note that it was measured."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setattr(measuring, "measure", lambda *_, **__: pytest.fail("nothing is measured"))
    for key in ("inter", "inter.gbit", "inter.latency_us", "transport"):
        words = ("--measure", "--cluster-set", f"{key}=10", "--results", tmp_path)
        refused = invoke("advise", *words)
        assert refused.code == 2
        assert f"--cluster-set {key}=10" in refused.err


def test_an_answer_that_no_method_helps_names_the_fastest_that_fits(tmp_path: Path) -> None:
    """Although another, as fast within the error band, is simpler and comes first."""
    runs = [*plain(), *lost("int8", [0.0] * 3), *lost("u8bit", [0.002] * 3)]
    words = ("--runs", write(tmp_path / "r.parquet", runs), "--compressor", "int8,u8bit")
    cluster = ("--cluster", "a100x1-10g", "--cluster-set", "inter.gbit=0.1", "--workers", 32)
    result = advise(tmp_path, *words, "--model", "resnet50", *cluster)
    verdicts = [(name, row["advice"]) for name, row in methods(result).items()]
    assert verdicts == [("int8", "try"), ("u8bit", "try")]
    over = {row["option"]: row["over_alone"] for row in result["tables"][2]["rows"]}
    assert over["int8 by twoshot"] < over["u8bit by twoshot"] < 1 / 1.05
    assert "as one (u8bit by twoshot)" in result["answer"][0]
