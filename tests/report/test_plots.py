"""Where the panels and legends of a picture stand, as fractions of its width."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders import BASE, summary, write
from commands import invoke

from gcbench.report import figures, run_plots
from gcbench.results.reader import Run, load

REFERENCE = Path(__file__).parents[2] / "results" / "reference"
FEW = [*BASE, summary("terngrad", 0, 0.9)]
MANY = [*BASE, *(summary(f"method{i}", 0, 0.8 + i / 100) for i in range(run_plots.MANY + 1))]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function: runs -> the figure of their picture."""

    def of(runs: list[Run]) -> Any:
        figures_of: list[Any] = []
        monkeypatch.setattr(figures, "save", lambda figure, path: figures_of.append(figure))
        run_plots.draw(runs, tmp_path / "x.png")
        (figure,) = figures_of
        return figure

    return of


@pytest.fixture
def panels(drawn: Any) -> Any:
    """Return a function: runs -> (left panel, right panel, legend) of a picture, each (x0, x1)."""

    def of(runs: list[Run]) -> tuple[tuple[float, float], ...]:
        figure = drawn(runs)
        left, right = figure.axes
        legend = right.get_legend().get_window_extent().transformed(figure.transFigure.inverted())
        boxes = left.get_position(), right.get_position(), legend
        return tuple((float(box.x0), float(box.x1)) for box in boxes)

    return of


@pytest.mark.parametrize("rows", [FEW, MANY], ids=["few", "many"])
def test_without_curves_the_points_have_the_room(panels, tmp_path: Path, rows: list) -> None:
    """The legend alone stands in the right panel: 9 to 5 parts, and nothing is cut off."""
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    left, right, legend = panels(load([tmp_path / "rows.json"]))
    assert 0.58 < left[1] - left[0] < 0.64
    assert 0.3 < right[1] - right[0] < 0.36
    assert right[0] <= legend[0] < right[0] + 0.01
    assert legend[1] <= 1


@pytest.mark.parametrize("rows", [FEW, MANY], ids=["few", "many"])
def test_beside_curves_the_legend_is_narrow(panels, tmp_path: Path, rows: list) -> None:
    """Both panels are as wide as each other, and wider than all that the legend takes."""
    left, right, legend = panels(load([write(tmp_path / "runs", *rows)]))
    assert right[1] - right[0] == pytest.approx(left[1] - left[0], abs=1e-6)
    assert right[1] - right[0] > 0.37
    assert right[1] < legend[0] < right[1] + 0.02
    assert legend[1] <= 1
    assert legend[1] - legend[0] < 0.13


def test_one_evaluation_is_no_curve(drawn) -> None:
    """The runs of scale were evaluated once, those of converged every five epochs."""
    assert not any(axes.axison for axes in drawn(load([REFERENCE / "scale.parquet"])).axes[1::2])
    assert all(axes.axison for axes in drawn(load([REFERENCE / "converged.parquet"])).axes[1::2])


def test_one_row_of_panels_with_curves_keeps_the_halves(panels, tmp_path: Path) -> None:
    """Rows of a file beside runs: those have no curve, and the axes stay."""
    (tmp_path / "rows.json").write_text(json.dumps([summary("terngrad", 0, 0.9)]))
    both = load([write(tmp_path / "runs", *BASE), tmp_path / "rows.json"])
    left, right, legend = panels(both)
    assert right[1] - right[0] == pytest.approx(left[1] - left[0], abs=1e-6)
    assert legend[0] > right[1]


def test_long_names_stay_within_their_panel(drawn, tmp_path: Path) -> None:
    """Numbers replace them, which the legend explains; the titles do not overlap."""
    names = [f"a_method_whose_name_takes_much_room_and_number_{i}" for i in range(4)]
    rows = [summary(name, 0, 0.8 + i / 100) for i, name in enumerate(names)]
    figure = drawn(load([write(tmp_path / "runs", *BASE, *rows)]))
    left, right = figure.axes
    frame = left.get_window_extent()
    boxes = [text.get_window_extent() for text in left.texts]
    assert all(frame.x0 <= box.x0 and box.x1 <= frame.x1 for box in boxes)
    legend = " ".join(text.get_text() for text in right.get_legend().get_texts())
    assert {text.get_text() for text in left.texts} <= set(legend.split())
    titles = [axes._left_title.get_window_extent() for axes in (left, right)]
    assert titles[0].x1 < titles[1].x0


def test_curves_name_the_split_that_judged_the_runs(drawn, tmp_path: Path) -> None:
    """Points are of the test split; with held-out examples the curves are of these."""
    left, right = drawn(load([REFERENCE / "converged.parquet"])).axes
    assert left.get_ylabel() == "test accuracy (%)"
    assert right.get_ylabel() == "validation accuracy (%)"
    assert drawn(load([write(tmp_path / "a", *BASE)])).axes[1].get_ylabel() == "test accuracy (%)"


def test_rows_without_a_finished_seed_are_named_below_the_axis(drawn, tmp_path: Path) -> None:
    """The others keep their places and the logarithmic axis."""
    stopped = {"failed": {"step": 30, "reason": "not finite"}}
    failed = [summary(name, 0, None) | stopped for name in ("none", "broken")]
    axes = drawn(load([write(tmp_path / "a", *failed, summary("fine", 0, 0.9))])).axes[0]
    assert axes.get_xlabel().splitlines()[-1] == "failed: none, broken"
    assert [text.get_text() for text in axes.texts] == ["fine"]
    assert axes.get_xscale() == "log"
    axes = drawn(load([write(tmp_path / "b", *failed)])).axes[0]
    assert axes.get_xlabel().splitlines()[-1] == "failed: none, broken"


def test_panels_of_one_task_are_named_by_the_options_that_differ(drawn, tmp_path: Path) -> None:
    options = [{"network": name, "classes": 10} for name in ("small", "large")]
    places = [{"task_options": one, "workers": workers} for workers in (1, 2) for one in options]
    runs = [summary("none", 0, 0.9, **place) for place in (*places[:1], *places[2:])]
    figure = drawn(load([write(tmp_path / "runs", *runs)]))
    titles = [axes.get_title(loc="left").partition(":")[0] for axes in figure.axes[::2]]
    assert titles == [
        "digits, 1 worker",
        "digits network=small, 2 workers",
        "digits network=large, 2 workers",
    ]


def test_a_picture_has_the_names_that_the_user_gives(tmp_path: Path) -> None:
    folder = write(tmp_path / "runs", *BASE, summary("mine", 0, 0.9))
    picture = tmp_path / "x.svg"
    done = invoke("compare", folder, "--label", "My method=./mine.py", "--plot", picture)
    assert done.code == 0, done.err
    text = picture.read_text()
    assert "<!-- My method -->" in text
    assert "<!-- mine -->" not in text


def test_the_front_of_a_picture_is_that_of_the_table(tmp_path: Path, monkeypatch) -> None:
    """`none` beats `mid`, also where it is not shown."""
    sizes = {"none": 0.9, "mid": 0.8, "low": 0.7}
    runs = [
        summary(name, seed, value, payload_bytes_up=10_000_000 * (1 + (name != "low")))
        for name, value in sizes.items()
        for seed in (0, 1, 2)
    ]
    folder, figures_of = write(tmp_path / "runs", *runs), []
    monkeypatch.setattr(figures, "save", lambda figure, path: figures_of.append(figure))
    words = ("compare", folder, "--plot", tmp_path / "x.png", "--json", "--where")
    rows = invoke(*words, "compressor=mid,low").json
    assert {row["compressor_name"]: row["on_front"] for row in rows} == {"mid": False, "low": True}
    lines = [line for line in figures_of[0].axes[0].lines if line.get_linestyle() == "--"]
    assert [len(line.get_xdata()) for line in lines] == [1]
