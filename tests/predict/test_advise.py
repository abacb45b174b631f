"""`gcbench advise`: gains and losses against a tolerance, and what counts as evidence."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from builders import summary
from builders import write as write_runs
from commands import invoke
from torch import nn

from gcbench.core import registry
from gcbench.core.compressor import requantizes
from gcbench.predict import costs, evidence, networks
from gcbench.report import sections
from gcbench.report.analysis import load
from gcbench.results import reader, rows
from gcbench.training import suites

ROOT = Path(__file__).parents[2]
METHODS = "terngrad,qsgd,topk,int8"
ALONE = ("--compressor", "terngrad")
SLOW = ("--cluster-set", "inter.gbit=1", "--workers", "32")
"""Four nodes whose links are a bottleneck even for reducing in bf16."""
FAST = ("--cluster-set", "inter.gbit=100000", "--cluster-set", "intra.gbit=100000")
FP32 = (0.900, 0.910, 0.905, 0.895)
"""What `none` reaches, by seed."""
UNRULED = "were chosen is unknown"
SUITE = f"main/{suites.load('main').version}"


def run(name: str, seed: int, accuracy: float | None, config: Any = None, **over: Any) -> Any:
    """Return a finished run's summary, of a method as its source has it, with a holdout."""
    method = registry.compressor(name)
    made = summary(name, seed, accuracy, **{"collective": method.legal_collectives()[0], **over})
    made["compressor"] = registry.call(method)
    made["config"] |= {"memory": method.memory, "holdout": 500, **(config or {})}
    return made


def write(path: Path, runs: Iterable[Any], suite: str = SUITE) -> Path:
    """Write a file of rows; each has its own hash, as real runs have."""
    found = [{**one, "config_hash": f"{number}"} for number, one in enumerate(runs)]
    rows.write(path, [rows.row(one, [], suite) for one in found])
    return path


def lost(name: str, losses: Iterable[float | None], **over: Any) -> list[Any]:
    """Return runs that lost so much against `none`, seed by seed; None diverged."""
    return [
        run(name, seed, None if loss is None else FP32[seed] - loss, **over)
        for seed, loss in enumerate(losses)
    ]


def plain(**over: Any) -> list[Any]:
    return lost("none", [0.0] * len(FP32), **over)


@pytest.fixture
def known(tmp_path: Path) -> Path:
    """TernGrad lost .3 to .5 points, QSGD 3 for certain, a seed of int8 diverged; no top-k."""
    return write(
        tmp_path / "known.parquet",
        [
            *plain(),
            *lost("terngrad", (0.003, 0.005, 0.004, 0.004)),
            *lost("qsgd", (0.030, 0.031, 0.029, 0.030)),
            *lost("int8", (0.0, None, 0.0, 0.0), test_loss=0.3),
        ],
    )


def advise(tmp_path: Path, *words: object) -> dict[str, Any]:
    where = ("--results", tmp_path / "analyses", "--progress", "none", "--json")
    slow = () if "--cluster-set" in words else SLOW
    return invoke("advise", "--compressor", METHODS, *where, *slow, *words).json


def methods(found: dict[str, Any]) -> dict[str, Any]:
    return {row["method"]: row for row in found["tables"][0]["rows"]}


def conclusions(found: dict[str, Any]) -> str:
    return " ".join([*found["answer"], *found["conclusions"]])


def test_advice_weighs_gain_against_cost(tmp_path: Path, known: Path) -> None:
    found = advise(tmp_path, "--runs", known)
    rows = methods(found)
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
    said = conclusions(found)
    assert "try terngrad by " in found["answer"][0]
    for value in (rows["terngrad"]["over_fp32"], rows["terngrad"]["over_bf16"]):
        assert value in found["answer"][0]
    for value in ("[0.22, 0.58]", "digits", "100 steps", "26,000 times"):
        assert value in found["answer"][1]
    assert "topk by twoshot" in said
    again = load(next((tmp_path / "analyses").iterdir()))
    assert {row["method"]: row["advice"] for row in again.table("methods").rows} == {
        word: row["advice"] for word, row in rows.items()
    }


def test_rows_of_evidence_have_task_budget_and_distance(tmp_path: Path) -> None:
    told = {"task": "mnist", "steps": 2000, "batch": 64, "workers": 8, "params": 25_557_032 // 5}
    own = {**told, "config": {"task_options": {"network": "lenet"}}}
    path = write(tmp_path / "r.parquet", [*plain(**own), *lost("terngrad", [0.0] * 3, **own)])
    found = advise(tmp_path, *ALONE, "--runs", path)
    (row,) = found["tables"][1]["rows"]
    expected = {"method": "terngrad", "network": "lenet", "task": "mnist", "steps": 2000}
    expected |= {"batch": 64, "workers": 8, "seeds": 3, "parameters": 5_111_406, "lost": 0.0}
    assert expected.items() <= row.items()
    assert row["size"] == pytest.approx(5, rel=1e-6)
    shown = methods(found)["terngrad"]
    for value in ("lenet on mnist", "5.11M", "2,000 steps of 64", "8 workers", "3 seeds"):
        assert value in shown["accuracy_from"]
    assert re.findall(r"[0-9,.]+ times", shown["distance"]) == ["5 times", "130 times"]


def test_equal_means_are_a_loss_of_nothing(tmp_path: Path) -> None:
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


def test_a_wider_tolerance_admits_more(tmp_path: Path, known: Path) -> None:
    """QSGD lost 3 +- .36 points; a diverged seed is never admitted."""
    for points, advice in [("2.6", "loses too much"), ("3.0", "unclear"), ("3.4", "try")]:
        rows = methods(advise(tmp_path, "--runs", known, "--tolerance", points))
        assert rows["qsgd"]["advice"] == advice
        assert rows["int8"]["advice"] == "loses too much"
    rows = methods(advise(tmp_path, *ALONE, "--runs", known, "--tolerance", "0.1"))
    assert rows["terngrad"]["advice"] == "loses too much"


def test_tasks_without_an_accuracy_are_judged_by_their_loss(tmp_path: Path) -> None:
    """Losses of .010 and .016 more: +- .0075 is within .02, and not within .01."""
    base = [run("none", seed, None, task="text", test_loss=2.0) for seed in range(3)]
    more = (0.010, 0.013, 0.016)
    own = [run("terngrad", s, None, task="text", test_loss=2 + m) for s, m in enumerate(more)]
    path = write(tmp_path / "r.parquet", [*base, *own])
    row = methods(advise(tmp_path, *ALONE, "--runs", path, "--tolerance", "0"))["terngrad"]
    assert row["advice"] == "unclear"
    assert row["accuracy"] == "loses 0.013 [0.0055, 0.02] of loss"
    row = methods(advise(tmp_path, *ALONE, "--runs", path, "--tolerance-loss", "0.03"))["terngrad"]
    assert row["advice"] == "try"
    assert row["accuracy"].endswith("] of loss")
    assert row.get("accuracy_difference") is None


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
def test_what_is_not_of_the_protocol_is_no_evidence(tmp_path, change, suite, reason) -> None:
    """One and the same runs count, and do not count with one thing changed."""
    losses = [0.03, 0.03, 0.03]
    path = write(tmp_path / "good.parquet", [*plain(), *lost("terngrad", losses)])
    row = methods(advise(tmp_path, *ALONE, "--runs", path))["terngrad"]
    assert (row["advice"], row["results"]) == ("loses too much", 1)
    base = plain() if "steps" in change else plain(**change)
    path = write(tmp_path / "bad.parquet", [*base, *lost("terngrad", losses, **change)], suite)
    found = advise(tmp_path, *ALONE, "--runs", path)
    row = methods(found)["terngrad"]
    assert (row["advice"], row["results"], row["accuracy"]) == ("untested", 0, "untested")
    assert reason in conclusions(found)


@pytest.mark.parametrize(("seeds", "count"), [(1, 0), (2, 0), (3, 1)])
def test_fewer_than_three_seeds_say_nothing(tmp_path: Path, seeds: int, count: int) -> None:
    """However much they lost: never "too costly" from one seed."""
    path = write(tmp_path / "r.parquet", [*plain(), *lost("terngrad", [0.2] * seeds)])
    found = advise(tmp_path, *ALONE, "--runs", path)
    assert methods(found)["terngrad"]["results"] == count
    assert ("fewer than 3 seeds" in conclusions(found)) == (count == 0)


def test_runs_outside_of_files_of_rows_are_of_no_suite(tmp_path: Path) -> None:
    folder = write_runs(tmp_path / "runs", *plain(), *lost("terngrad", [0.0] * 3))
    found = advise(tmp_path, "--runs", folder)
    assert "7 made for no suite" in conclusions(found)


def test_committed_rows_below_the_folder_are_found(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gcbench.predict.bundled.rows", list)
    found = advise(tmp_path)
    assert "No results were read" in conclusions(found)
    assert {row["advice"] for row in methods(found).values()} == {"untested"}
    assert found["answer"][0].startswith("Do not compress yet")
    write(Path("results/reference/main.parquet"), [*plain(), *lost("qsgd", [0.0] * 3)])
    write(Path("results/reference/other.parquet"), lost("terngrad", [0.0] * 3))
    write_runs(Path("results/runs"), run("topk", 0, 0.9))
    found = advise(tmp_path)
    places = "results/reference/main.parquet, results/reference/other.parquet, results/runs"
    assert f"Read 11 runs from {places}. Not evidence: 1 made for no suite." in conclusions(found)
    assert {w: row["results"] for w, row in methods(found).items() if row["results"]} == {
        "qsgd": 1,
        "terngrad": 1,
    }


def test_the_rate_that_the_suite_chose_is_told(tmp_path: Path) -> None:
    """A run of an entry at the best rate of its trials, and one at another."""
    points = {
        point.config.compressor: point
        for point in suites.load("main").points()
        if point.config.compressor in ("none", "bf16") and point.config.seed == 0
    }

    def made(name: str, seed: int, lr: float, **over: Any) -> Any:
        config = {**points[name].config.model_dump(mode="json"), "seed": seed, "lr": lr}
        one = run(name, seed, 0.7, task="cifar10", workers=4, steps=2000, batch=128)
        one["config"] = {**config, "collective": one["collective"]} | over
        return one

    rule = points["none"].tune
    trials = []
    for name in points:
        for lr in rule.start:
            trial = made(name, rule.seed, lr, test=False)
            trial |= {"seed": rule.seed, "test_accuracy": None}
            found = 0.5 + 0.1 * (lr == rule.start[1])
            trial |= {"validation_accuracy": found, "validation_loss": 1.0}
            trials.append(trial)
    for lr, expected in [(rule.start[1], "tuned"), (rule.start[2], "untuned")]:
        runs = [made("none", seed, rule.start[1]) for seed in range(3)]
        runs += [made("bf16", seed, lr) for seed in range(3)]
        path = write(tmp_path / "r.parquet", [*trials, *runs])
        found = advise(tmp_path, "--runs", path, "--compressor", "bf16")
        (row,) = found["tables"][1]["rows"]
        assert (row["rate"], row["network"], row["lost"]) == (expected, "cifarnet", 0.0)
        assert UNRULED not in conclusions(found)
    for name in points:  # a trial of it is missing: no evidence
        fewer = [t for t in trials if (t["compressor_name"], t["config"]["lr"]) != (name, 0.1)]
        path = write(tmp_path / "r.parquet", [*fewer, *runs])
        found = advise(tmp_path, "--runs", path, "--compressor", "bf16")
        assert found["tables"][1]["rows"] == []
        assert "3 whose learning rates are not chosen yet" in found["conclusions"][0]


def test_suites_share_runs_and_each_is_evidence_once(tmp_path: Path) -> None:
    """`none` and its trials, made for main, serve terngrad-ablation, too, in advice and tables."""

    def rows_of(suite: str, wanted: set[tuple[str, float]]) -> list[Any]:
        found = suites.load(suite)
        made = []
        for point in found.points({"seed": [0]}):
            options = point.config.options.get("clip", 2.5)
            other = point.settings.get("dense_last") or point.settings.get("momentum") == 0
            if (point.config.compressor, options) not in wanted or other:
                continue
            for lr, seed in [
                *((lr, 100) for lr in point.tune.start),
                *((0.03, s) for s in range(3)),
            ]:
                config = point.config.model_dump(mode="json") | {"seed": seed, "lr": lr}
                trial = seed == 100
                one = run(point.config.compressor, seed, None if trial else 0.7, task="cifar10")
                one |= {"compressor": repr(point.config.make_compressor()), "steps": 2000}
                one |= {"validation_accuracy": 0.5 + (lr == 0.03), "validation_loss": 1.0}
                one |= {"batch": 128, "workers": 4}
                one["config"] = config | {"test": not trial, "collective": one["collective"]}
                one["config_hash"] = f"{suite} {len(made)}"
                made.append(rows.row(one, [], f"{suite}/{found.version}"))
        return made

    path = tmp_path / "both.parquet"
    main = rows_of("main", {("none", 2.5), ("terngrad", 2.5)})
    own = rows_of("terngrad-ablation", {("terngrad", 2.0)})
    assert (len(main), len(own)) == (12, 6)
    rows.write(path, [*main, *own])
    words = ("--runs", path, "--compressor", "terngrad,terngrad:clip=2")
    seen = advise(tmp_path, *words)["tables"][1]["rows"]
    told = {(row["method"], row["suite"].partition("/")[0], row["rate"]) for row in seen}
    assert told == {
        ("terngrad", "main", "tuned"),
        ("terngrad:clip=2", "terngrad-ablation", "tuned"),
    }
    assert len(seen) == 2
    assert {"main", "terngrad-ablation"} <= {*invoke("compare", path).out.split()}
    for suite, count in (("main", 2), ("terngrad-ablation", 3)):
        shown = invoke("compare", path, "--suite", suite, "--json").json
        assert len(shown) == count
        assert {(row["pairs"], row["rate"]) for row in shown if row["pairs"]} == {(3, "tuned")}
    sizes = {
        one.title.partition(":")[0]: len(one.rows)
        for one in sections.compared(reader.load([path]), None, [])
    }
    assert sizes == {"main": 2, "terngrad-ablation": 3}, "the report's tables"
    without = tmp_path / "without.parquet"
    rows.write(without, own)
    assert advise(tmp_path, "--runs", without, *words[2:])["tables"][1]["rows"] == []


def test_evidence_without_a_known_rule_for_rates_is_told(tmp_path: Path) -> None:
    """Rows of a suite of one's own count, and the advice says what is not known of them."""
    path = write(tmp_path / "r.parquet", [*plain(), *lost("terngrad", (0.3, 0.5))], "mine/1")
    assert UNRULED not in conclusions(advise(tmp_path, *ALONE, "--runs", path))  # too few seeds
    path = write(tmp_path / "r.parquet", [*plain(), *lost("terngrad", (0.3, 0.5, 0.4))], "mine/1")
    found = advise(tmp_path, *ALONE, "--runs", path)
    (row,) = found["tables"][1]["rows"]
    assert (row["rate"], row["suite"]) == (None, "mine/1")
    assert f"mine/1 {UNRULED}" in conclusions(found)


def test_of_several_results_the_worst_counts(tmp_path: Path, known: Path) -> None:
    own = {"task": "mnist"}
    more = [*plain(**own), *lost("terngrad", (0.1, 0.11, 0.1), **own)]
    path = write(tmp_path / "more.parquet", more)
    row = methods(advise(tmp_path, *ALONE, "--runs", known, "--runs", path))["terngrad"]
    assert (row["advice"], row["results"]) == ("loses too much", 2)
    assert row["accuracy_difference"] == pytest.approx(-0.31 / 3)
    assert row["accuracy_from"].startswith("mnist")


@pytest.fixture
def both(tmp_path: Path) -> Path:
    """TernGrad loses 3 points on images and nothing on text, int8 nothing on either."""

    def language(name: str, losses: Iterable[float]) -> list[Any]:
        made = [run(name, seed, None, task="shakespeare") for seed, _ in enumerate(losses)]
        return [{**one, "test_loss": 2.0 + x} for one, x in zip(made, losses, strict=True)]

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


def test_the_task_that_reads_the_same_decides_and_the_other_warns(
    tmp_path: Path, both: Path
) -> None:
    text = ("--runs", both, "--model", "bert-large", "--cluster", "a100x1-10g", "--workers", 32)
    found = invoke(
        *("advise", "--compressor", "terngrad,int8", "--results", tmp_path, *text),
        *("--progress", "none", "--json"),
    ).json
    row = methods(found)["terngrad"]
    assert (row["advice"], row["accuracy_task"], row["results"]) == ("try", "shakespeare", 2)
    assert row["elsewhere"] == "cifar10: loses 3 [2.6, 3.4] points"
    assert re.findall(r"[0-9,.]+ times", row["distance"]) == ["340,000 times", "32 times"]
    first, second, *_ = found["answer"]
    assert "try terngrad by" in first
    assert row["elsewhere"] in second
    assert "int8 by " in second, "the method without a warning"
    judged = {(row["method"], row["task"]): row["judged_by"] for row in found["tables"][1]["rows"]}
    assert judged["terngrad", "shakespeare"] == judged["int8", "shakespeare"] == "yes"
    assert judged["terngrad", "cifar10"] == judged["int8", "cifar10"] == "no"

    alone = write(
        tmp_path / "alone.parquet",
        [*plain(task="cifar10"), *lost("terngrad", [0.0] * 4, task="cifar10")],
    )
    found = advise(tmp_path, *ALONE, "--runs", alone, "--model", "bert-large")
    assert "terngrad by cifar10 (images)" in conclusions(found)
    assert methods(found)["terngrad"]["accuracy"].startswith("cifar10: no loss above")

    images = methods(advise(tmp_path, "--runs", both, "--compressor", "terngrad,int8"))
    assert images["terngrad"]["advice"] == "loses too much"
    assert images["terngrad"]["accuracy_task"] == images["int8"]["accuracy_task"] == "cifar10"
    assert images["terngrad"]["elsewhere"].startswith("shakespeare: no loss above")
    assert images["int8"]["advice"] == "try"


def test_a_loss_on_other_inputs_says_nothing_of_another_collective(tmp_path: Path) -> None:
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
    # So many workers that all-gather gains nothing.
    words = ("--runs", path, "--compressor", "qsgd", "--cluster-set", "inter.gbit=1")
    words += ("--workers", 512)
    row = methods(advise(tmp_path, *words))["qsgd"]
    assert (row["collective"], row["advice"]) == ("twoshot", "untested")
    assert row["accuracy"] == "allgather alone: no loss above 0.16 points"
    row = methods(advise(tmp_path, *words, "--model", "bert-large"))["qsgd"]
    assert row["advice"] == "loses too much"


def test_a_model_of_no_known_kind_is_judged_by_the_worst_of_all(
    tmp_path: Path, both: Path, monkeypatch
) -> None:
    (tmp_path / "ownmodel.py").write_text(
        "from torch import nn\ndef build(): return nn.Linear(5000, 5000)\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ("--runs", both, "--compressor", "terngrad", "--module", "ownmodel:build")
    found = advise(tmp_path, *words, "--compute-ms", 5)
    row = methods(found)["terngrad"]
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
def test_what_a_module_reads_is_told_by_its_layers(layers, inputs) -> None:
    assert networks.inputs_of(nn.Sequential(*layers)) == inputs


def test_networks_and_tasks_say_what_they_read() -> None:
    """Each built-in network has rows to be judged by, and a task of known inputs says the same."""
    told = {name: registry.task_class(name).inputs for name in registry.tasks()}
    for name in networks.NAMES:
        assert networks.network(name).inputs in set(told.values()) - {""}
    for name in ("cifar10", "mnist", "shakespeare"):
        assert networks.inputs_of(registry.task(name).model()) == told[name]


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
def test_a_file_with_the_class_of_a_built_in_method_has_none_of_its_results(tmp_path: Path) -> None:
    path = write(tmp_path / "r.parquet", [*plain(), *lost("int8", [0.0] * 3)])
    words = ("--runs", path, "--compressor", f"int8,{imitation(tmp_path)}")
    found = advise(tmp_path, *words)
    built_in, mine = (methods(found)[word] for word in words[-1].split(","))
    assert built_in["compressor"] == mine["compressor"]
    assert (built_in["advice"], built_in["results"]) == ("try", 1)
    assert (mine["advice"], mine["results"], mine["accuracy"]) == ("untested", 0, "untested")
    assert (built_in["over_fp32_low"] is None, mine["over_fp32_low"]) == (False, None)
    learn = {line for line in found["conclusions"] if line.startswith("To learn it of")}
    assert [line for line in learn if "--suite main" in line] == []


@pytest.mark.usefixtures("forget")
def test_only_measured_kernels_make_a_method_one_to_use(tmp_path: Path) -> None:
    """A method of one's own, with results and a gain at the memory's floor: times are asked for."""
    name = registry.add_file(str(imitation(tmp_path)))
    runs = lost(name, [0.0] * 3)
    for one in runs:
        one["provenance"] = {
            "plugins": {"compressor": registry.origin(registry.compressors()[name])}
        }
    words = ("--runs", write(tmp_path / "r.parquet", [*plain(), *runs]), "--compressor", name)
    found = advise(tmp_path, *words)
    row = methods(found)[name]
    assert (row["advice"], row["results"], row["gain_low"]) == ("unclear", 1, None)
    assert found["answer"][0].startswith(f"Unclear: {name} by twoshot, predicted up to")
    command = f"gcbench bandwidth --compressor {name} --json > m.json"
    assert command in found["answer"][0]
    measured = json.loads((ROOT / "results/bandwidth.json").read_text())
    measured["settings"]["sources"] = {name: registry.source_digest(name)}
    for table in measured["tables"]:
        for row in table["rows"]:
            if row["method"] == "int8":
                row["method"] = name
                row |= {part: row[part] / 1e3 for part in ("encode", "decode") if row.get(part)}
    (tmp_path / "m.json").write_text(json.dumps(measured))
    found = advise(tmp_path, *words, "--kernels", tmp_path / "m.json")
    row = methods(found)[name]
    assert (row["advice"], row["gain_low"] > 1.05) == ("try", True)
    untested = ("--runs", write(tmp_path / "p.parquet", plain()), "--compressor", f"{name},int8")
    assert f"{name} by twoshot (upper bound)" in conclusions(advise(tmp_path, *untested))


@pytest.mark.usefixtures("forget")
@pytest.mark.parametrize("told", ["same", "other", "nothing"])
def test_results_of_a_file_count_while_its_source_is_the_same(tmp_path: Path, told: str) -> None:
    name = registry.add_file(str(imitation(tmp_path)))
    origin = registry.origin(registry.compressors()[name])
    runs = lost(name, [0.0] * 3)
    digest = "0" * 64 if told == "other" else origin["sha256"]
    for one in runs:
        if told != "nothing":
            one["provenance"] = {"plugins": {"compressor": {**origin, "sha256": digest}}}
    path = write(tmp_path / "r.parquet", [*plain(), *runs])
    found = advise(tmp_path, "--runs", path, "--compressor", name)
    assert methods(found)[name]["results"] == (told == "same")
    said = "3 runs of mycodec used another source"
    assert (said in conclusions(found)) == (told != "same")


@pytest.mark.parametrize(
    ("by", "loss", "expected"),
    [
        ("allgather", 0.0, ("try", "allgather", 1)),  # and not by two-shot, which is faster
        ("twoshot", 0.0, ("try", "twoshot", 1)),
        ("allgather", 0.03, ("loses too much", "twoshot", 1)),  # two-shot loses something more
    ],
)
def test_what_owners_encode_again_is_known_by_its_own_collective(
    tmp_path: Path, by: str, loss: float, expected: tuple[str, str, int]
) -> None:
    runs = lost("qsgd", [loss] * 3, collective=by)
    row = methods(advise(tmp_path, "--runs", write(tmp_path / "r.parquet", [*plain(), *runs])))
    assert (row["qsgd"]["advice"], row["qsgd"]["collective"], row["qsgd"]["results"]) == expected


def test_what_was_seen_by_another_collective_is_told_and_no_evidence(tmp_path: Path) -> None:
    """By two-shot, which alone gains on 64 nodes, QSGD's owners encode the mean again.

    The suite has them by all-gather, so that its command would show nothing new.
    """
    runs = lost("qsgd", [0.002] * 3, collective="allgather")
    path = write(tmp_path / "r.parquet", [*plain(), *runs])
    words = ("--compressor", "qsgd", "--cluster", "a100x1-10g", "--workers", "64", "--runs", path)
    found = advise(tmp_path, *words, "--cluster-set", "inter.gbit=1")
    row = methods(found)["qsgd"]
    assert (row["advice"], row["results"], row["collective"]) == ("untested", 0, "twoshot")
    assert row["accuracy"] == "allgather alone: loses 0.2 [0.11, 0.29] points"
    (said,) = [line for line in found["conclusions"] if line.startswith("To measure")]
    assert "qsgd by twoshot: copy the suite main" in said


def test_where_all_collectives_have_one_mean_any_result_counts(tmp_path: Path) -> None:
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
        {"dense_last": True},
        {"dense_below": 9},
        {"memory_options": {"decay": 0.5}},
    ],
)
def test_results_of_what_is_not_advised_do_not_count(tmp_path: Path, other: dict) -> None:
    path = write(tmp_path / "r.parquet", [*plain(), *lost("terngrad", [0.0] * 3, config=other)])
    row = methods(advise(tmp_path, *ALONE, "--runs", path))["terngrad"]
    assert (row["advice"], row["results"]) == ("untested", 0)


def test_results_with_the_dense_tensors_that_were_asked_for_count(tmp_path: Path) -> None:
    dense = {"dense_last": True, "dense_below": 9}
    path = write(tmp_path / "r.parquet", [*plain(), *lost("terngrad", [0.0] * 3, config=dense)])
    row = methods(advise(tmp_path, *ALONE, "--runs", path, "--dense-last", "--dense-below", 9))
    assert row["terngrad"]["results"] == 1


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("terngrad,int8", "run --suite main --compressor none,terngrad,int8 --rows results/"),
        ("topk:ratio=0.02", "run --suite mine.yaml --rows results/reference/mine.parquet"),
        ("terngrad --dense-last", "run --suite mine.yaml --rows results/reference/mine.parquet"),
    ],
)
def test_the_command_measures_what_is_unknown(tmp_path: Path, words: str, command: str) -> None:
    where = ("--results", tmp_path / "a", "--progress", "none", "--json", "--runs")
    path = write(tmp_path / "r.parquet", plain())
    found = invoke("advise", *SLOW, "--compressor", *words.split(), *where, path).json
    (said,) = [line for line in found["conclusions"] if line.startswith("To measure")]
    assert command in said


def test_the_suite_has_the_runs_that_the_command_asks_for(tmp_path: Path) -> None:
    """The command of every method that the advice sends to the suite finds its runs there."""
    found = invoke(
        *("advise", *SLOW, "--results", tmp_path / "a", "--progress", "none", "--json", "--runs"),
        write(tmp_path / "r.parquet", plain()),
    ).json
    learn = [line for line in found["conclusions"] if line.startswith("To measure")]
    (said,) = [line for line in learn if "--suite main" in line]
    names = said.partition("--compressor ")[2].split()[0].split(",")
    points = suites.load("main").points({"compressor": names})
    assert {point.config.compressor for point in points} == set(names)
    assert len(names) > 5
    # By the collective that is advised, where collectives have different means; others are told
    # apart, and none is forgotten.
    made = {point.config.compressor: point.config.collective for point in points}
    for name in set(names) - {"none"}:
        if requantizes(registry.compressor(name)):
            assert f"{name} by {made[name]}" in said
    untested = {name for name, row in methods(found).items() if row["advice"] == "untested"}
    assert all(f"{name} by " in " ".join(learn) for name in untested)


def test_on_a_fast_network_it_says_do_not_compress(tmp_path: Path, known: Path) -> None:
    found = advise(tmp_path, "--runs", known, *FAST)
    assert {row["advice"] for row in methods(found).values()} == {"no gain"}
    assert found["answer"][0].startswith("Do not compress")
    assert "1 times as fast as fp32, 1 times as fast as bf16" in found["answer"][0]
    assert not [line for line in found["answer"] if line.startswith("Reduce in bf16")]


def test_rows_that_the_package_brings_are_read(tmp_path: Path, monkeypatch) -> None:
    """Without a checkout below: its own rows, each by its name; one of the folder replaces one.

    Both files hold the same 4 runs of `none`, which count once.
    """
    monkeypatch.chdir(tmp_path)
    brought = write(tmp_path / "package/main.parquet", [*plain(), *lost("qsgd", [0.0] * 3)])
    other = write(tmp_path / "package/text.parquet", [*plain(), *lost("int8", [0.0] * 3)])
    monkeypatch.setattr("gcbench.predict.bundled.rows", lambda: [brought, other])
    found = advise(tmp_path)
    places = "gcbench's main.parquet, gcbench's text.parquet"
    assert f"Read 10 runs from {places}." in conclusions(found)
    assert methods(found)["qsgd"]["results"] == 1
    write(Path("results/reference/main.parquet"), plain())
    found = advise(tmp_path)
    assert methods(found)["qsgd"]["results"] == 0
    assert "results/reference/main.parquet, gcbench's text.parquet." in conclusions(found)


def test_reducing_in_bf16_is_the_baseline_that_counts(tmp_path: Path) -> None:
    """Where bf16 is enough, what saves more is no gain; and bf16's own accuracy is told."""
    path = write(tmp_path / "r.parquet", [*plain(), *lost("bf16", (0.003, 0.005, 0.004, 0.004))])
    words = ("--runs", path, "--compressor", "bf16,int8,terngrad", "--model", "transformer-1.3b")
    enough = ("--cluster", "a100x8-25g", "--workers", "32", "--cluster-set", "inter.gbit=36")
    found = advise(tmp_path, *words, *enough)
    assert {row["advice"] for row in methods(found).values()} == {"no gain"}
    assert all(row["over_fp32_low"] > 1.05 for row in methods(found).values())
    said = conclusions(found)
    assert "Reduce in bf16 (DDP: bf16_compress_hook): predicted 1." in said
    assert "loses 0.4 [0.22, 0.58] points (digits" in said
    alone = conclusions(advise(tmp_path, "--runs", path, *words[4:], *enough, *ALONE))
    assert "loses 0.4 [0.22, 0.58] points (digits" in alone


def test_a_gain_that_depends_on_kernels_is_unclear(tmp_path: Path, monkeypatch) -> None:
    """Tested and within the tolerance, faster at the memory's floor alone: not yet."""
    path = write(tmp_path / "r.parquet", [*plain(), *lost("terngrad", [0.0] * 3)])
    words = (*ALONE, "--runs", path)
    assert methods(advise(tmp_path, *words))["terngrad"]["advice"] == "try"
    slow = costs.Codec(1e-8, 1e-4, "twoshot", 1e-9)
    monkeypatch.setattr(costs.Measured, "of", lambda self, method, n: slow)
    found = advise(tmp_path, *words, "--force")
    row = methods(found)["terngrad"]
    assert row["gain_low"] < 1.05 < row["gain_high"]
    assert row["advice"] == "unclear"
    assert found["answer"][0].startswith("Unclear: terngrad by ")
    assert "less than 5 %" in found["answer"][0]


def test_of_what_ties_the_simplest_is_advised(tmp_path: Path) -> None:
    """Both hide completely; powersgd sends less, int8 is the simpler."""
    none = [0.0] * 3
    path = write(tmp_path / "r.parquet", [*plain(), *lost("int8", none), *lost("powersgd", none)])
    words = ("--runs", path, "--compressor", "powersgd,int8", "--model", "transformer-1.3b")
    cluster = ("--cluster", "a100x8-25g", "--workers", "32", "--cluster-set")
    found = advise(tmp_path, *words, *cluster, "inter.gbit=25")
    assert list(methods(found)) == ["int8", "powersgd"]
    assert "try int8 by twoshot" in conclusions(found)
    found = advise(tmp_path, *words, *cluster, "inter.gbit=5")
    assert "try powersgd by allreduce" in conclusions(found)


def test_methods_that_lose_or_may_lose_are_not_advised(tmp_path: Path, known: Path) -> None:
    words = ("--compressor", "qsgd", "--results", tmp_path / "a", "--progress", "none", "--json")
    words += SLOW
    found = invoke("advise", "--runs", known, *words).json
    assert found["answer"][0].startswith("Do not compress")
    assert "loses more than 1 points" in found["answer"][0]
    found = invoke("advise", "--runs", known, "--tolerance", "3", *words).json
    assert found["answer"][0].startswith("Unclear: qsgd by allgather")


@pytest.mark.parametrize(("method", "least"), [("terngrad", 31), ("int8", 7), ("topk", 150)])
def test_the_rule_of_all_gather(tmp_path: Path, known: Path, method: str, least: int) -> None:
    """64 / b: 2 bits 32 workers; 8.1 bits 7; 0.4 bits above 150. None without an all-gather."""
    row = methods(advise(tmp_path, "--runs", known))[method]
    limit = row["gather_limit"]
    assert limit * row["bits"] < 64 <= (limit + 1) * row["bits"]
    assert limit == pytest.approx(least, abs=10 if least > 100 else 0)


def test_methods_without_an_all_gather_have_no_limit(tmp_path: Path, known: Path) -> None:
    words = ("--compressor", "powersgd", "--results", tmp_path, "--progress", "none", "--json")
    row = methods(invoke("advise", *words, "--runs", known).json)["powersgd"]
    assert row["gather_limit"] is None


@pytest.mark.parametrize(
    ("number", "text"), [(999, "999"), (46_416, "46.4k"), (1_068_298, "1.07M"), (1.3157e9, "1.32B")]
)
def test_counts_in_few_letters(number: float, text: str) -> None:
    assert evidence.count_text(number) == text


@pytest.mark.parametrize(
    ("words", "said"),
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
        (["--plot", "x.jpg"], "allowed: .png"),
    ],
)
def test_what_cannot_be_advised(tmp_path: Path, monkeypatch, words, said) -> None:
    monkeypatch.chdir(tmp_path)
    refused = invoke("advise", *words)
    assert (refused.code, said in refused.err) == (2, True), refused.err
    assert not list(tmp_path.rglob("analysis.json"))


def test_pictures_with_and_without_known_methods(tmp_path: Path, known: Path) -> None:
    """No axes are empty: accuracy has its own only where it was seen."""
    for words in (("--compressor", METHODS), ("--compressor", "topk")):
        path = tmp_path / "x.svg"
        where = ("--results", tmp_path / "a", "--progress", "none", "--plot", path)
        assert invoke("advise", *SLOW, "--runs", known, *where, *words).code == 0
        drawn = path.read_text()
        assert ("the worst result" in drawn) == (METHODS in words)
        assert "to the upper bound" in drawn


def test_the_links_on_which_it_is_worth_it_are_those_of_the_margin(tmp_path: Path) -> None:
    """Within them it gains the margin, and beyond them less."""
    path = write(tmp_path / "r.parquet", plain())
    words = ("--runs", path, "--compressor", "int8", "--model", "transformer-1.3b")
    cluster = ("--cluster", "a100x8-25g", "--workers", "32")
    edge = methods(advise(tmp_path, *words, *cluster))["int8"]["pays_to_gbit"]
    for factor, gains in [(0.98, True), (1.02, False)]:
        there = ("--cluster-set", f"inter.gbit={edge * factor}")
        row = methods(advise(tmp_path, *words, *cluster, *there))["int8"]
        assert (row["gain_low"] > 1.05) == gains


def test_sharded_training_reduces_in_bf16_by_its_own_setting(tmp_path: Path) -> None:
    path = write(tmp_path / "r.parquet", plain())
    words = ("--runs", path, "--compressor", "int8,powersgd", "--model", "transformer-1.3b")
    found = advise(tmp_path, *words, "--cluster", "a100x8-25g", "--workers", "32", "--sharded")
    assert "Reduce in bf16 (FSDP: reduce_dtype=torch.bfloat16)" in conclusions(found)
    assert list(methods(found)) == ["int8"]
    assert methods(found)["int8"]["gather_limit"] is None
