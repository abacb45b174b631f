"""Pictures of a comparison: quality against bytes, and training curves, with seeds as spread."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcbench.core.errors import UsageError
from gcbench.core.values import canonical, text
from gcbench.report import figures, tables
from gcbench.report.compare import ComparisonRow, Label, rows
from gcbench.report.figures import Mark
from gcbench.report.rendering import ends
from gcbench.results import sanitize
from gcbench.results.reader import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MANY = 8
LONG = 26
"""With more rows than `MANY`, or a name of more characters than `LONG`, the legend of a panel is
numbered, best first, and a point without room for its name shows the number."""
MOST_SEEDS = 100
"""Runs per row whose evaluations are read for its curve."""
LEAST_POINTS = 1.0
"""The least range of the accuracy axis, in percentage points."""


def _place(run: Run) -> dict[str, Any]:
    """Return the settings that assign a run to a row of panels."""
    return {key: run.config.get(key) for key in ("task", "task_options", "workers")}


def _label(row: ComparisonRow) -> str:
    return " ".join([row.method, *(f"{key}={value}" for key, value in row.context.items())])


def _shown(row: ComparisonRow) -> str:
    return f"{_label(row)} ({len(row.failed)} failed)" if row.failed else _label(row)


def _numbered(panel: Sequence[ComparisonRow]) -> bool:
    """Return whether the legend of a panel is numbered."""
    return len(panel) > MANY or any(len(_shown(row)) > LONG for row in panel)


def curve(run: Run, column: str) -> dict[int, float]:
    """Return the evaluations of a run by step; empty for a row of a .json file without metrics.

    `column`: "accuracy" or "loss", of the split that judged the run on its way.
    """

    column = f"{run.judged_by}_{column}"

    def diverged(record: dict[str, Any]) -> bool:  # NaN parameters still have an accuracy
        loss = f"{run.judged_by}_loss"
        return record.get(column) is None or record.get(loss, 0.0) is None

    return {
        record["step"]: math.nan if diverged(record) else record[column]
        for record in run.evaluations()
    }


def _quality(
    axes: Axes,
    panel: Sequence[ComparisonRow],
    styles: dict[str, dict[str, Any]],
    on_front: Collection[str],
) -> list[Mark]:
    """Draw the final metric against payload bytes and return the marks, to be labelled.

    Rows without a finished seed have no payload per step: they are named below the axis.
    `on_front`: the configurations, by `Run.method`, that a dashed line joins.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    percent = 100 if panel[0].metric == "accuracy" else 1
    bands = {row.band for row in panel if row.is_baseline and row.band}
    band = bands.pop() if len(bands) == 1 else None  # of one budget, or it would mislead
    if band:
        axes.axhspan(percent * band[0], percent * band[1], color="0.5", alpha=0.2, lw=0)
    marks = []
    numbered = _numbered(panel)
    fronts: dict[str, list[tuple[float, float]]] = {}
    for number, row in enumerate(panel, 1):
        if row.mean is None:
            continue
        size, mean, spread = row.payload, percent * row.mean, percent * (row.sd or 0.0)
        look = {**styles[_label(row)], "linestyle": "", "ms": 9, "mec": "white", "mew": 0.7}
        axes.errorbar(size, mean, spread, capsize=4, elinewidth=1.5, **look)
        short = str(number) if numbered else ""
        marks.append(Mark(size, mean, spread, _shown(row), look["color"], short))
        if row.runs[0].method in on_front:
            fronts.setdefault(canonical(row.context), []).append((size, mean))
    for front in fronts.values():
        axes.plot(*zip(*sorted(front), strict=True), color="0.75", lw=1, ls=(0, (4, 2)), zorder=1)
    low, high = axes.get_ylim()
    if percent == 100 and high - low < LEAST_POINTS:  # do not magnify noise
        middle = (low + high) / 2
        low, high = middle - LEAST_POINTS / 2, middle + LEAST_POINTS / 2
    room = 0.12 * (high - low)
    axes.set_ylim(low - room, high + room)
    sizes = [mark.x for mark in marks]
    if sizes and min(sizes) > 0:
        axes.set_xscale("log")
        axes.set_xlim(min(sizes) / 2.5, max(sizes) * 1.8)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(LogLocator(subs=(2.0, 5.0)))
        narrow = max(sizes) / min(sizes) < 10
        axes.xaxis.set_minor_formatter("{x:g}" if narrow else NullFormatter())
    legend = "\ngrey: range of the uncompressed seeds" if band else ""
    if any(len(front) > 1 for front in fronts.values()):
        legend += "\ndashed: nothing is better with fewer bytes"
    if failed := [sanitize.label(_label(row)) for row in panel if row.mean is None]:
        legend += "\n" + textwrap.fill(f"failed: {tables.listed(failed, 10)}", 60)
    fold = "\n" if numbered else " "  # the legend is wide, and this panel narrow
    axes.set_xlabel(f"payload per worker and step,{fold}up + down (MB){legend}")
    axes.set_ylabel(f"{tables.split(panel)} {'accuracy (%)' if percent == 100 else 'loss'}")
    return marks


def _curve(row: ComparisonRow) -> tuple[list[int], list[list[float]]]:
    """Return the steps that all seeds evaluated, until one diverged, and the metric at each."""
    accuracy = row.metric == "accuracy"
    read = [curve(run, "accuracy" if accuracy else "loss") for run in row.runs[:MOST_SEEDS]]
    curves = [points for points in read if points]
    steps, table = [], []
    for step in sorted(set.intersection(*map(set, curves)) if curves else ()):
        values = [(100 if accuracy else 1) * points[step] for points in curves]
        if not all(map(math.isfinite, values)):
            break
        steps.append(step)
        table.append(values)
    return steps, table


def _curves(axes: Axes, panel: Sequence[ComparisonRow], styles: dict[str, dict[str, Any]]) -> None:
    """Draw the mean of the metric over steps, with the range of the seeds around it.

    A line stops where a seed diverged: the mean of the survivors would flatter the method.
    """
    accuracy = panel[0].metric == "accuracy"
    numbered = _numbered(panel)
    drawn: list[float] = []
    late: list[float] = []
    bare = []
    curves = [_curve(row) for row in panel]
    single = all(len(steps) < 2 for steps, _ in curves)
    for number, (row, (steps, table)) in enumerate(zip(panel, curves, strict=True), 1):
        name = f"{number}  {_shown(row)}" if numbered else _shown(row)
        style = styles[_label(row)]
        if single or not steps:
            bare.append(axes.plot([], [], label=sanitize.label(name), **style)[0])
            continue
        mean = [sum(values) / len(values) for values in table]
        every = max(1, len(steps) // 6)
        look = {**style, "markevery": every, "ms": 6, "mec": "white", "mew": 0.7, "lw": 2}
        axes.plot(steps, mean, label=sanitize.label(name), **look)
        axes.fill_between(
            steps, [*map(min, table)], [*map(max, table)], color=style["color"], alpha=0.18, lw=0
        )
        drawn += [value for values in table for value in values]
        third = row.first.steps / 3
        late += [min(values) for step, values in zip(steps, table, strict=True) if step >= third]
    if not accuracy and drawn and min(drawn) > 0 and max(drawn) > 30 * min(drawn):
        axes.set_yscale("log")
    elif accuracy and late:  # the first third would squeeze the differences at the end
        axes.set_ylim(bottom=min(late) - 0.05 * (max(drawn) - min(late)))
    splits = " or ".join(sorted({run.judged_by for row in panel for run in row.runs}))
    axes.set_xlabel("step")
    axes.locator_params(axis="x", nbins=6)  # five digits each would touch
    axes.set_ylabel(f"{splits} accuracy (%)" if accuracy else f"{splits} loss")
    for line in bare if drawn else ():
        line.set_label(f"{line.get_label()} (no curve)")
    if not drawn:  # as where rows have only a result, or one evaluation
        axes.set_axis_off()
        axes.set_title("", loc="left")
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(1.01, 1.02) if drawn else (0, 1.02),
        frameon=False,
        fontsize="small",
        handlelength=3.2,
    )


def _title(config: Mapping[str, Any], panels: Sequence[Mapping[str, Any]]) -> str:
    """Return the task and workers of a row of panels, and the options that others of these vary.

    `panels`: a config of each row of panels.
    """
    task, workers = config["task"], config["workers"]
    alike = [
        one["task_options"] or {}
        for one in panels
        if (one["task"], one["workers"]) == (task, workers)
    ]
    options = [
        f"{key}={text(value)}"
        for key, value in (config["task_options"] or {}).items()
        if any(one.get(key) != value for one in alike)
    ]
    return f"{' '.join([task, *options])}, {workers} worker{'s' * (workers > 1)}"


def draw(
    runs: Sequence[Run],
    path: Path,
    names: Sequence[Label] = (),
    on_front: Collection[str] | None = None,
) -> None:
    """Write a picture of `runs` to `path`: PNG, SVG or PDF by its ending.

    One row of panels for each task with its options, and number of workers. Left: final accuracy
    (loss where the task has none) on the test split, of trials on the validation split, mean ± sd
    over seeds, against payload bytes; grey is the band of the uncompressed seeds. Right: the same
    metric over the steps, on the split that judged the runs on their way, mean and range of the
    seeds. A single seed has neither sd nor range. A panel has the rows of `tables.drawn`.
    `names`: the user's names for rows. `on_front`: the configurations, by `Run.method`, that are on
    the front of all rows, where `runs` are a part of them; None: the front of `runs`.

    Raises:
        UsageError: another ending, or no runs.
        GcbenchError: `path` cannot be written, or the metrics of a run cannot be read.
    """
    path = figures.check(path)
    if not runs:
        raise UsageError("no runs to draw; load at least one finished run")
    places: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run.summary.task, run.summary.workers)):
        places.setdefault(json.dumps(_place(run), sort_keys=True, default=str), []).append(run)
    # Labels are unique within a panel.
    every = [rows(part, labels=names) for part in places.values()]
    if on_front is None:
        on_front = {row.runs[0].method for panel in every for row in panel if row.on_front}
    panels = [tables.drawn(panel) for panel in every]
    panels = [
        sorted(panel, key=lambda row: row.behind) if _numbered(panel) else panel for panel in panels
    ]
    configs = [panel[0].runs[0].config for panel in panels]
    styles = figures.styles(_label(row) for panel in panels for row in panel)
    height = sum(max(5.2, 0.3 * len(panel) + 0.8) for panel in panels)
    width = 17 if any(map(_numbered, panels)) else 14
    with figures.canvas(width, height) as figure:
        labels: list[tuple[Axes, list[Mark]]] = []
        grid = figure.subplots(len(panels), 2, squeeze=False)
        for (left, right), panel, candidates in zip(grid, panels, every, strict=True):
            title = _title(panel[0].runs[0].config, configs)
            counts = [len(row.runs) for row in panel]
            several = max(counts) > 1
            spread = f"mean ± sd, n = {ends(counts)} seeds" if several else "1 seed"
            if len(candidates) > len(panel):
                spread += f", {len(panel)} of {len(candidates):,} rows"
            left.set_title(sanitize.label(title) + f": {spread}", loc="left")
            some = f"first {MOST_SEEDS} " if max(counts) > MOST_SEEDS else ""
            title = f"training: mean and range of the {some}seeds" if several else "training"
            right.set_title(title, loc="left")
            labels.append((left, _quality(left, panel, styles, on_front)))
            _curves(right, panel, styles)
        if not any(right.axison for _, right in grid):  # legends alone
            grid[0, 0].get_gridspec().set_width_ratios((9, 5))
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # the axes stand still now, so labels can be placed
        for axes, marks in labels:
            figures.write_labels(axes, marks)
        figures.save(figure, path)
