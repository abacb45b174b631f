"""Pictures as wide as a paper's column: accuracy against bytes, and a suite beside its paper."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcbench.core.errors import UsageError
from gcbench.core.values import canonical, text
from gcbench.report import figures, tables
from gcbench.report.compare import ComparisonRow, order
from gcbench.report.figures import Mark
from gcbench.report.rendering import ends
from gcbench.results import sanitize
from gcbench.results.settings import TUNED_KEYS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(rows: Sequence[ComparisonRow], path: Path, width: str) -> None:
    """Write accuracy against bytes to `path`: a point a row, with its 95 % interval and name.

    Grey is the band of the uncompressed seeds. `width`: one of `figures.WIDTHS`. Rows whose runs
    all failed have no point and are named below the axis. Of very many rows the
    best are drawn, see `tables.drawn`.

    Raises:
        UsageError: another ending, rows of more than one budget or metric, or none with a result.
        GcbenchError: `path` cannot be written.
    """
    path = figures.check(path)
    budgets = [{k: v for k, v in row.context.items() if k not in TUNED_KEYS} for row in rows]
    kinds = {(canonical(context), row.metric) for context, row in zip(budgets, rows, strict=True)}
    if len(kinds) > 1 or len({row.first.task for row in rows}) > 1:
        raise UsageError(
            "rows of several tasks or budgets cannot share a picture; choose with --where, e.g. "
            "--where task=digits"
        )
    candidates = [row for row in rows if row.mean is not None]
    drawn = tables.drawn(candidates)
    if not drawn:
        raise UsageError("no row here has a result to draw: all runs failed")
    scale = 100 if drawn[0].metric == "accuracy" else 1
    looks = figures.styles(row.method for row in drawn)
    with figures.print_canvas(width) as figure:
        axes = figure.subplots()
        bands = {row.band for row in drawn if row.is_baseline and row.band}
        if len(bands) == 1:
            low, high = (scale * end for end in bands.pop())
            axes.axhspan(low, high, color="0.5", alpha=0.22, lw=0)
        marks = []
        for number, row in enumerate(drawn, 1):
            x, y = row.payload, scale * (row.mean or 0.0)
            spread, look = scale * row.half_interval, looks[row.method]
            bar = spread or None
            axes.errorbar(x, y, bar, ls="", capsize=2, marker=look["marker"], color=look["color"])
            marks.append(Mark(x, y, spread, row.method, look["color"], str(number)))
        axes.set_xscale("log")
        sizes = [mark.x for mark in marks]
        axes.set_xlim(min(sizes) / 3, max(sizes) * 3)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.margins(y=0.12)
        failed = [sanitize.label(row.method) for row in rows if row.mean is None]
        failures = f"\nfailed: {tables.listed(failed, 10)}" if failed else ""
        if len(drawn) < len(candidates):
            failures += f"\nthe best {len(drawn)} of {len(candidates):,} rows"
        axes.set_xlabel(f"payload per worker and step, up + down (MB){failures}")
        axes.set_ylabel(f"{tables.split(drawn)} {'accuracy (%)' if scale == 100 else 'loss'}")
        _labelled(figure, axes, marks)
        figures.save(figure, path)


def _labelled(figure: Figure, axes: Axes, marks: Sequence[Mark]) -> None:
    """Write names at the points; numbers, explained below, replace those without room."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    figures.write_labels(axes, marks)
    written = {label.get_text() for label in axes.texts}
    short = [mark for mark in marks if mark.short in written]
    if not short:
        return
    for label in list(axes.texts):
        label.remove()
    legend = ", ".join(f"{mark.short}: {sanitize.label(mark.text)}" for mark in short)
    lines = textwrap.wrap(legend, 62 if axes.bbox.width < 900 else 120, break_long_words=False)
    axes.set_xlabel("\n".join([axes.get_xlabel(), *lines]))
    figure.set_layout_engine("constrained")
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    numbers = {mark.short for mark in short}
    figures.write_labels(
        axes, [mark._replace(text=mark.short) if mark.short in numbers else mark for mark in marks]
    )


def has_published(rows: Sequence[ComparisonRow]) -> bool:
    """Whether some row has a published accuracy beside it."""
    return any(row.published is not None and row.published.accuracy is not None for row in rows)


def draw_suite(rows: Sequence[ComparisonRow], title: str, path: Path, width: str = "") -> None:
    """Write the table or figure that a suite reproduces: ours filled, the published ones hollow.

    The x axis has the setting with most values, such as the number of workers. There is a panel for
    each combination of the other settings in which the entries of a method differ, and a colour for
    each method. Ours have their 95 % intervals. The title has the steps of both.

    Raises:
        UsageError: another ending, or no row with a published accuracy.
        GcbenchError: `path` cannot be written.
    """
    path = figures.check(path)
    if not has_published(rows):
        raise UsageError("no row here has a published accuracy to draw beside")
    settings = [{**row.context, **row.choices} for row in rows]
    telling = [key for key in settings[0] if _tells(rows, key)]
    counts = {key: len({canonical(one[key]) for one in settings}) for key in telling}
    across = max(telling, key=lambda key: counts[key], default="")
    others = [key for key in telling if key != across]
    panels: dict[str, list[ComparisonRow]] = {}
    for row, one in zip(rows, settings, strict=True):
        name = ", ".join(f"{key.replace('_', ' ')} {text(one[key])}" for key in others)
        panels.setdefault(name, []).append(row)
    looks = figures.styles(row.method for row in rows)
    with figures.print_canvas(width) if width else figures.canvas(11, 5.5) as figure:
        grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axes, (name, members) in zip(grid, sorted(panels.items()), strict=True):
            _beside(axes, members, across, looks)
            axes.set_title(sanitize.label(name), loc="left", fontsize="medium")
        grid[0].set_ylabel("test accuracy (%)")
        for method, look in looks.items():
            colour = look["color"]
            grid[-1].plot([], [], marker="s", ls="", color=colour, label=sanitize.label(method))
        grid[-1].plot([], [], marker="o", ls="", color="0.3", label="ours, 95 % interval")
        grid[-1].plot([], [], marker="D", mfc="none", ls="", color="0.3", label="published")
        steps = [row.first.steps for row in rows]
        theirs = [row.published.steps for row in rows if row.published is not None]
        figure.suptitle(
            f"{sanitize.label(title)}\nsteps: ours {ends(steps)}, published {ends(theirs)}",
            fontsize="medium",
        )
        handles, labels = grid[-1].get_legend_handles_labels()
        columns = 2 if width == "single" else 4
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
        figures.save(figure, path)


def _beside(
    axes: Axes, rows: Sequence[ComparisonRow], across: str, looks: dict[str, dict[str, Any]]
) -> None:
    """Draw the rows of a panel, methods side by side at each value of the setting `across`."""
    values = [{**row.context, **row.choices}.get(across) for row in rows]
    places = {canonical(value): text(value) for value in sorted(values, key=order)}
    ticks = list(places)
    for value, row in zip(values, rows, strict=True):
        shift = 0.5 * ((list(looks).index(row.method) + 0.5) / len(looks) - 0.5)
        x, colour = ticks.index(canonical(value)) + shift, looks[row.method]["color"]
        ours = None if row.mean is None else 100 * row.mean
        if ours is not None:
            half = 100 * row.half_interval or None
            axes.errorbar(x, ours, half, marker="o", capsize=2, ls="", zorder=3, color=colour)
        if row.published is not None and row.published.accuracy is not None:
            theirs = 100 * row.published.accuracy
            axes.plot(x, theirs, marker="D", mfc="none", ls="", zorder=3, color=colour)
            if ours is not None:
                axes.plot([x, x], [ours, theirs], ls=":", lw=0.8, color=colour)
    axes.set_xticks(range(len(ticks)), map(sanitize.label, places.values()))
    axes.set_xlim(-0.6, len(ticks) - 0.4)
    axes.set_xlabel(sanitize.label(across.replace("_", " ")))


def _tells(rows: Sequence[ComparisonRow], key: str) -> bool:
    """Whether a setting differs among the rows of one method."""
    values: dict[str, set[str]] = {}
    for row in rows:
        values.setdefault(row.method, set()).add(text({**row.context, **row.choices}.get(key)))
    return any(len(each) > 1 for each in values.values())
