"""`gcbench advise`: gains and costs against a tolerance, the rule of all-gather, plain words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import invoke
from test_compare import summary, write

from gcbench import registry
from gcbench.measure.analysis import load

METHODS = "terngrad,qsgd,topk,int8"
FAST = ("--cluster-set", "inter.gbit=100000", "--cluster-set", "intra.gbit=100000")


def stored(name: str, seed: int, accuracy: float | None, **over: Any) -> Any:
    method = registry.compressor(name)
    made = summary(name, seed, accuracy, **{"collective": method.legal_collectives()[0], **over})
    made["compressor"] = repr(method)
    made["config"]["memory"] = method.memory
    return made


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """TernGrad loses 0.4 and 0.6 points, QSGD 3, one of int8's seeds diverged; top-k is unknown."""
    return write(
        tmp_path / "runs",
        *(stored("none", seed, 0.9) for seed in (0, 1)),
        *(stored("terngrad", seed, value) for seed, value in enumerate((0.896, 0.894))),
        stored("qsgd", 0, 0.87),
        stored("int8", 0, 0.9),
        stored("int8", 1, None, test_loss=None),
    )


def advise(tmp_path: Path, *words: object) -> dict[str, Any]:
    where = ("--results", tmp_path / "analyses", "--progress", "none", "--json")
    return invoke("advise", "--compressor", METHODS, *where, *words).json


def methods(found: dict[str, Any]) -> dict[str, Any]:
    return {row["method"]: row for row in found["tables"][0]["rows"]}


def test_advice_weighs_gain_against_cost(tmp_path: Path, runs: Path) -> None:
    found = advise(tmp_path, "--runs", runs)
    rows = methods(found)
    assert {word: row["advice"] for word, row in rows.items()} == {
        **{"terngrad": "use", "topk": "measure", "qsgd": "too costly", "int8": "too costly"}
    }
    assert list(rows)[:2] == ["terngrad", "topk"]
    assert rows["terngrad"]["accuracy_difference"] == pytest.approx(-0.005)
    assert rows["terngrad"]["accuracy"].startswith("-0.50 [")
    assert rows["int8"]["accuracy"] == "failed"
    assert rows["topk"]["results"] == 0
    assert all(row["speedup"] > 1.05 for row in rows.values())
    said = found["conclusions"]
    assert said[0].startswith("Use terngrad by twoshot: predicted ")
    assert "-0.50 [" in said[0]
    assert "(digits, 100 steps, n=2)" in said[0]
    assert any("--compressor none,topk" in sentence for sentence in said)
    again = load(next((tmp_path / "analyses").iterdir()))
    assert {row["method"]: row["advice"] for row in again.table("methods").rows} == {
        word: row["advice"] for word, row in rows.items()
    }


def test_a_wider_tolerance_admits_more(tmp_path: Path, runs: Path) -> None:
    """QSGD lost 3 points: 3.1 admit it, 2.9 do not; a diverged seed is never admitted."""
    for points, advice in [("2.9", "too costly"), ("3.1", "use")]:
        rows = methods(advise(tmp_path, "--runs", runs, "--tolerance", points))
        assert rows["qsgd"]["advice"] == advice
        assert rows["int8"]["advice"] == "too costly"
    rows = methods(advise(tmp_path, "--runs", runs, "--tolerance", "0.1"))
    assert rows["terngrad"]["advice"] == "too costly"


def test_of_several_results_the_worst_counts(tmp_path: Path, runs: Path) -> None:
    more = (stored("none", 0, 0.7, task="mnist"), stored("terngrad", 0, 0.6, task="mnist"))
    write(tmp_path / "more", *more)
    row = methods(advise(tmp_path, "--runs", runs, "--runs", tmp_path / "more"))["terngrad"]
    assert (row["advice"], row["results"]) == ("too costly", 2)
    assert row["accuracy_difference"] == pytest.approx(-0.1)
    assert row["accuracy_from"].startswith("mnist")


def test_results_of_another_memory_or_field_do_not_count(tmp_path: Path) -> None:
    other = stored("terngrad", 0, 0.9)
    other["config"]["memory"] = "momentum"
    field = stored("qsgd", 0, 0.9)
    field["compressor"] = field["compressor"].replace("QSGD(", "QSGD(levels=99, ")
    folder = write(tmp_path / "runs", stored("none", 0, 0.9), other, field)
    rows = methods(advise(tmp_path, "--runs", folder))
    assert (rows["terngrad"]["results"], rows["qsgd"]["results"]) == (0, 0)


@pytest.mark.parametrize(
    ("by", "accuracy", "expected"),
    [
        ("allgather", 0.9, ("use", "allgather", 1)),  # and not by two-shot, which is faster
        ("twoshot", 0.9, ("use", "twoshot", 1)),
        ("allgather", 0.87, ("too costly", "twoshot", 1)),  # two-shot loses something more
    ],
)
def test_what_owners_encode_again_is_known_by_its_own_collective(
    tmp_path: Path, by: str, accuracy: float, expected: tuple[str, str, int]
) -> None:
    run = stored("qsgd", 0, accuracy, collective=by)
    folder = write(tmp_path / "runs", stored("none", 0, 0.9), run)
    row = methods(advise(tmp_path, "--runs", folder))["qsgd"]
    assert (row["advice"], row["collective"], row["results"]) == expected


def test_where_all_collectives_have_one_mean_any_result_counts(tmp_path: Path) -> None:
    run = stored("terngrad", 0, 0.9, collective="allreduce")
    folder = write(tmp_path / "runs", stored("none", 0, 0.9), run)
    row = methods(advise(tmp_path, "--runs", folder))["terngrad"]
    assert (row["advice"], row["collective"], row["results"]) == ("use", "twoshot", 1)


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
    run = stored("terngrad", 0, 0.9)
    run["config"] |= other
    folder = write(tmp_path / "runs", stored("none", 0, 0.9), run)
    row = methods(advise(tmp_path, "--runs", folder))["terngrad"]
    assert (row["advice"], row["results"]) == ("measure", 0)


def test_results_with_the_dense_tensors_that_were_asked_for_count(tmp_path: Path) -> None:
    run, plain = stored("terngrad", 0, 0.9), stored("none", 0, 0.9)
    run["config"] |= {"dense_last": True, "dense_below": 9}
    folder = write(tmp_path / "runs", plain, run)
    row = methods(advise(tmp_path, "--runs", folder, "--dense-last", "--dense-below", 9))
    assert row["terngrad"]["results"] == 1


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("terngrad,int8", "--compressor none,terngrad,int8 --seed"),
        ("qsgd,terngrad", "--compressor none,terngrad,qsgd --collective twoshot --seed"),
        (
            "topk:ratio=0.02,qsgd",
            "--compressor none,topk --set ratio=0.02 --collective twoshot --dense-last --seed",
        ),
    ],
)
def test_the_command_measures_what_is_unknown(tmp_path: Path, words: str, command: str) -> None:
    dense = ("--dense-last",) if "dense-last" in command else ()
    where = ("--results", tmp_path / "a", "--progress", "none", "--json", "--runs", tmp_path / "r")
    write(tmp_path / "r", stored("none", 0, 0.9))
    found = invoke("advise", "--compressor", words, *where, *dense).json
    (said,) = [line for line in found["conclusions"] if line.startswith("To learn")]
    assert f"gcbench run --task cifar10 {command} 0,1,2, then" in said


def test_on_a_fast_network_it_says_do_not_compress(tmp_path: Path, runs: Path) -> None:
    found = advise(tmp_path, "--runs", runs, *FAST)
    assert {row["advice"] for row in methods(found).values()} == {"no gain"}
    assert found["conclusions"][0] == "Do not compress: the links are no bottleneck here."
    assert "would be 1.0" in found["conclusions"][-1]


def test_without_results_nothing_is_advised(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = advise(tmp_path)
    assert {row["advice"] for row in methods(found).values()} == {"measure"}
    assert found["conclusions"][0].startswith("Do not compress yet")


def test_costly_methods_alone_are_not_advised(tmp_path: Path, runs: Path) -> None:
    words = ("--compressor", "qsgd", "--results", tmp_path / "a", "--progress", "none", "--json")
    found = invoke("advise", "--runs", runs, *words).json
    assert found["conclusions"][0].startswith("Do not compress: what gains loses more accuracy")


@pytest.mark.parametrize(("method", "least"), [("terngrad", 31), ("int8", 7), ("topk", 150)])
def test_the_rule_of_all_gather(tmp_path: Path, runs: Path, method: str, least: int) -> None:
    """64 / b: 2 bits 32 workers; 8.1 bits 7; 0.4 bits above 150. None without an all-gather."""
    row = methods(advise(tmp_path, "--runs", runs))[method]
    limit = row["gather_limit"]
    assert limit * row["bits"] < 64 <= (limit + 1) * row["bits"]
    assert limit == pytest.approx(least, abs=10 if least > 100 else 0)


def test_methods_without_an_all_gather_have_no_limit(tmp_path: Path) -> None:
    words = ("--compressor", "powersgd", "--results", tmp_path, "--progress", "none", "--json")
    row = methods(invoke("advise", *words, "--runs", ROWS).json)["powersgd"]
    assert row["gather_limit"] is None


ROWS = Path(__file__).parents[1] / "results/cifar10-methods.json"


def test_the_committed_results_are_known(tmp_path: Path) -> None:
    """The rows in results/ are matched by their methods' reprs."""
    rows = methods(advise(tmp_path, "--runs", ROWS))
    assert all(row["results"] == 1 for row in rows.values())
    told = json.loads(ROWS.read_text())
    accuracy = {row["compressor_name"]: row["test_accuracy"] for row in told}
    expected = accuracy["qsgd"] - accuracy["none"]
    assert rows["qsgd"]["accuracy_difference"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tolerance", "-1"], "--tolerance"),
        (["--tolerance", "200"], "--tolerance"),
        (["--margin", "-3"], "--margin"),
        (["--workers", "8,64"], "--workers"),
        (["--workers", "1"], "--workers"),
        (["--workers", "63"], "do not fill nodes"),
        (["--model", "resnet51"], "Did you mean 'resnet50'"),
        (["--cluster", "v100"], "v100-25g"),
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


def test_pictures_with_and_without_unknown_methods(tmp_path: Path, runs: Path) -> None:
    for words in (("--compressor", METHODS), ("--compressor", "terngrad")):
        path = tmp_path / "x.svg"
        where = ("--results", tmp_path / "a", "--progress", "none", "--plot", path)
        assert invoke("advise", "--runs", runs, *where, *words).code == 0
        assert ("not measured" in path.read_text()) == (METHODS in words)
