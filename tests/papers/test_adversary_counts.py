"""Accuracy by number of adversaries: the verdicts on rows made by hand, and the command."""

from __future__ import annotations

import adversaries
from test_scripts import script


def rows(**accuracy) -> list[dict]:
    """Return rows of 7 workers, 3 seeds; `accuracy`: by rule, without and with 3 and 4 of 7."""
    return [
        {"seed": seed, "rule": rule, "attack": "flip", "adversaries": count, "accuracy": value}
        for seed in range(3)
        for rule in adversaries.RULES
        for count, value in zip((0, 3, 4), accuracy[rule.replace(" ", "_")], strict=True)
    ]


def test_a_rule_survives_if_it_keeps_half_of_its_accuracy():
    judged = adversaries.judge(
        rows(vote=(0.9, 0.8, 0.1), mean=(0.9, 0.1, 0.1), trimmed_mean=(0.9, 0.9, 0.9)), 7
    )
    assert [(row["claim"].split(":")[0], row["verdict"]) for row in judged] == [
        ("vote survives 3 of 7", "holds"),
        ("vote survives 4 of 7", "does not hold"),
        ("mean survives 3 of 7", "does not hold"),
        ("mean survives 4 of 7", "does not hold"),
        ("trimmed mean survives 3 of 7", "holds"),
        ("trimmed mean survives 4 of 7", "holds"),
    ]


def test_the_command(tmp_path):
    short = ("--task", "digits", "--network", "", "--steps", 40, "--vote-lr", 0.01)
    grid = ("--adversaries", "0,3", "--attack", "scale", "--results", tmp_path)
    done = script(adversaries, *short, *grid, "--json").json
    claims, accuracy = (table["rows"] for table in done["tables"])
    assert [row["verdict"] for row in claims][:2] == ["holds", "does not hold"]
    assert len(accuracy) == 3 * 2
    (folder,) = tmp_path.glob("adversaries-*")
    assert (folder / "adversaries.png").stat().st_size > 10_000
    bad = script(adversaries, "--adversaries", "1,2", "--results", tmp_path)
    assert bad.code == 2
    assert "include 0" in bad.err
    without = ("--task", "quadratic", "--network", "", "--steps", 2, "--results", tmp_path)
    bad = script(adversaries, *without)
    assert bad.code == 2
    assert "--task quadratic" in bad.err
