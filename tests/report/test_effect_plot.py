"""The picture of what a setting does: which marks stand where."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from builders import summary, write
from commands import invoke

from gcbench.core.errors import UsageError
from gcbench.report import compare, effect_plot, figures
from gcbench.results.reader import load


def run(name: str, seed: int, accuracy: float, momentum: float, **config: Any) -> dict[str, Any]:
    """Return a run with this momentum; with `test=False` a trial, judged on validation examples."""
    one: dict[str, Any] = summary(name, seed, accuracy if config.get("test", True) else None)
    one["validation_accuracy"] = accuracy
    one["config"] |= {"momentum": momentum, "holdout": 100, **config}
    return one


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function: runs -> {line: {value: (x, half of the interval)}}, in order.

    `rates`: how a suite chose the rate of each row.
    """

    def of(
        runs: list[dict[str, Any]], key: str = "momentum", rates: tuple[str, ...] = ()
    ) -> dict[str, dict[str, Any]]:
        figures_drawn: list[Any] = []
        monkeypatch.setattr(figures, "save", lambda figure, path: figures_drawn.append(figure))
        unique = [{**one, "config_hash": str(place)} for place, one in enumerate(runs)]
        (tmp_path / "rows.json").write_text(json.dumps(unique))
        rows = compare.rows(load([tmp_path / "rows.json"]))
        rows = [replace(row, rate=rate) for row, rate in zip_longest(rows, rates)]
        effect_plot.draw(rows, key, "title", tmp_path / "x.png")
        (figure,) = figures_drawn
        (axes,) = figure.axes
        colours = {text.get_text(): handle.get_color() for text, handle in legend(figure)}
        lines: dict[str, dict[str, Any]] = {tick.get_text(): {} for tick in axes.get_yticklabels()}
        names = list(lines)
        for container in axes.containers:
            mark, _, bars = container.lines
            ((x,), (y,)) = mark.get_data()
            value = next(label for label, one in colours.items() if one == mark.get_color())
            half = 0.0
            if bars:
                (left, _), (right, _) = bars[0].get_segments()[0]
                half = (right - left) / 2
            lines[names[y]][value] = (pytest.approx(x), half)
        return lines

    def legend(figure: Any) -> Any:
        (box,) = figure.legends
        return zip(box.get_texts(), box.legend_handles, strict=True)

    return of


def test_a_field_with_the_name_of_a_setting_is_one_too(drawn: Any) -> None:
    def of(decay: float, ratio: float, accuracy: float) -> dict[str, Any]:
        config = {"memory": "residual", "memory_options": {"decay": decay}, "decay": "loss"}
        one = run("topk", 0, accuracy, 0.9, options={"ratio": ratio}, **config)
        return {**one, "compressor": f"TopK(ratio={ratio})"}

    runs = [of(0.5, 0.05, 0.5), of(0.5, 0.2, 0.6), of(0.9, 0.05, 0.7), of(0.9, 0.2, 0.8)]
    assert [len(marks) for marks in drawn(runs, "ratio").values()] == [2, 2]
    assert [len(marks) for marks in drawn(runs, "memory.decay").values()] == [2, 2]


def test_a_mark_is_the_mean_over_seeds_with_its_interval(drawn: Any) -> None:
    runs = [
        run(name, seed, accuracy + seed / 100, momentum)
        for name, momentum, accuracy in (
            ("topk", 0.0, 0.9),
            ("topk", 0.9, 0.5),
            ("none", 0.0, 0.6),
            ("none", 0.9, 0.8),
            ("int8", 0.9, 0.7),
        )
        for seed in (0, 1, 2)
    ]
    lines = drawn(runs)
    assert list(lines) == ["none", "topk"]  # int8 has one value
    assert {value: x for value, (x, _) in lines["topk"].items()} == {
        "momentum=0": 91.0,
        "momentum=0.9": 51.0,
    }
    # Student's t with two degrees of freedom, standard deviation .01, and the test set's noise
    assert all(2.48 < half < 4 for line in lines.values() for _, half in line.values())


def test_of_trials_the_best_rate_counts_by_its_first_seed(drawn: Any) -> None:
    def trial(seed: int, accuracy: float, momentum: float, lr: float, **more: Any) -> Any:
        return run("topk", seed, accuracy, momentum, lr=lr, test=False, **more)

    runs = [
        trial(100, 0.70, 0.9, 0.01),
        trial(100, 0.75, 0.9, 0.03),
        trial(101, 0.10, 0.9, 0.03),
        trial(100, 0.60, 0.0, 0.1),
        trial(100, 0.65, 0.0, 0.3),
        trial(100, 0.72, 0.0, 0.3, memory="dgc"),
        run("topk", 0, 0.99, 0.9, lr=0.03),
    ]
    lines = drawn(runs)
    best, other = lines.items()
    assert best[1] == {"momentum=0": (65.0, 0.0), "momentum=0.9": (75.0, 0.0)}
    assert other == ("topk memory=dgc", {"momentum=0": (72.0, 0.0)})


def test_rates_that_trials_chose_do_not_divide_a_method(drawn: Any) -> None:
    runs = [run("topk", 0, 0.9, 0.0, lr=0.3), run("topk", 0, 0.8, 0.9, lr=0.03)]
    assert len(drawn(runs, rates=("tuned", "edge"))["topk"]) == 2
    for rate in ("untuned", "open"):
        with pytest.raises(UsageError, match="momentum"):
            drawn(runs, rates=("tuned", rate))


def test_a_setting_with_one_value_is_refused(drawn: Any) -> None:
    with pytest.raises(UsageError, match="momentum"):
        drawn([run("topk", 0, 0.9, 0.9), run("none", 0, 0.9, 0.0)])
    with pytest.raises(UsageError, match="momentun"):
        drawn([run("topk", 0, 0.9, 0.9), run("topk", 0, 0.9, 0.0)], "momentun")
    with pytest.raises(UsageError, match="tasks"):
        drawn([run("topk", 0, 0.9, 0.9), run("topk", 0, 0.9, 0.0) | {"task": "mnist"}])


def test_groups_of_tasks_keep_their_picture_and_no_flag_is_ignored(tmp_path: Path) -> None:
    both = [run("topk", 0, 0.9, momentum) for momentum in (0.0, 0.9)]
    other = summary("topk", 1, 0.9, task="mnist")
    folder, picture = write(tmp_path / "runs", *both, other), tmp_path / "x.png"
    assert invoke("compare", folder, "--by", "task", "--plot", picture).code == 0
    assert picture.exists()
    of_momentum = ("compare", folder, "--where", "task=digits", "--by", "momentum", "--plot")
    assert invoke(*of_momentum, picture).code == 0
    refused = invoke(*of_momentum, picture, "--width", "single")
    assert refused.code == 2
    assert "--width single" in refused.err
