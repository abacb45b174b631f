"""The picture of a suite with tiers: accuracy against bits, with intervals and names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcbench.core.errors import UsageError
from gcbench.core.values import text
from gcbench.report import figures, tables
from gcbench.report.brief import fewest_fields
from gcbench.report.compare import ComparisonRow
from gcbench.report.figures import Mark
from gcbench.report.rendering import ends
from gcbench.results import sanitize

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SOFT = {True: 2.0, False: 0.02}
"""Distance from fp32 up to which the y axis is nearly linear: points of accuracy, or loss."""
FADED = 0.35
"""Opacity of a point that another one of its tier beats with no more bytes."""
RING: dict[str, Any] = {"mec": "0.1", "mew": 1.6}
"""The edge of the marks that may be the best of their tier."""
LEGEND_RING = "may be the best of its tier"
LEGEND_FADED = "one of its tier is better with no more bytes"
"""Texts of the legend."""


def draw(rows: Sequence[ComparisonRow], title: str, path: Path) -> None:
    """Write the picture to `path`: PNG, SVG or PDF by its ending.

    The x axis has the encoded bits per element that a worker sends, by which tiers are made; the y
    axis the metric after the last step, mean over seeds with its 95 % interval, on a scale that is
    stretched near the uncompressed runs (asinh), where most methods are. Each tier has a colour.
    The rows that may be its best, by their ranks, have a dark edge. Rows that another one of their
    tier with no more bytes beats are faded. Grey is the interval of the best uncompressed row. Rows
    without a finished seed are named below. Of very many rows the best of each tier are drawn, see
    `tables.drawn`.

    Raises:
        UsageError: another ending, no row of a tier, or rows of more than one budget or metric.
        GcbenchError: `path` cannot be written.
    """
    path = figures.check(path)
    candidates = [row for row in rows if row.tier is not None and row.mean is not None]
    drawn = tables.drawn(candidates)
    if not drawn:
        raise UsageError("no finished row of a tier to draw; make the suite's runs first")
    if len({(str(row.context), row.metric) for row in rows}) > 1:
        raise UsageError("rows of several budgets cannot share a picture; choose with --where")
    accuracy = drawn[0].metric == "accuracy"
    scale = 100 if accuracy else 1
    tiers = list(dict.fromkeys(row.tier for row in sorted(drawn, key=_bits)))
    styles = figures.styles(map(str, tiers))
    dots = {name: {**style, "linestyle": ""} for name, style in styles.items()}
    with figures.canvas(11, 7.2) as figure:
        axes = figure.subplots()
        if (best := _center(drawn)).is_baseline:
            middle, half = scale * (best.mean or 0.0), scale * best.half_interval
            axes.axhspan(middle - half, middle + half, color="0.5", alpha=0.2, lw=0)
        marks = []
        for row, label in zip(drawn, _names(drawn), strict=True):
            dot = dots[str(row.tier)]
            edge = RING if row.may_be_best else {"mec": "white", "mew": 0.7}
            look = {**dot, **edge, "ms": 8, "alpha": FADED if row.beaten else 1.0}
            x, y, spread = _bits(row), scale * (row.mean or 0.0), scale * row.half_interval
            axes.errorbar(x, y, spread, capsize=3, capthick=1, **look)
            marks.append(Mark(x, y, spread, label, dot["color"]))
        for tier in tiers:
            axes.plot([], [], **dots[str(tier)], label=sanitize.label(str(tier)))
        if any(row.may_be_best for row in drawn):
            axes.plot([], [], ls="", marker="o", ms=8, mfc="none", **RING, label=LEGEND_RING)
        if any(row.beaten for row in drawn):
            axes.plot([], [], ls="", marker="o", ms=8, color="0.4", alpha=FADED, label=LEGEND_FADED)
        _frame(axes, drawn)
        _stretch(axes, drawn, scale)
        seeds = ends(len(row.values) for row in drawn)
        some = f", {len(drawn)} of {len(candidates):,} rows" if len(drawn) < len(candidates) else ""
        axes.set_title(
            sanitize.label(str(title)) + f": mean and 95 % interval, n = {seeds}{some}", loc="left"
        )
        failed = tables.listed([sanitize.label(row.method) for row in rows if row.failed], 10)
        failures = f"\nfailed seeds: {failed}" if failed else ""
        axes.set_xlabel(f"encoded bits per element that a worker sends (bits up){failures}")
        figure.legend(frameon=False, fontsize="small", loc="outside lower center", ncols=3)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        figures.write_labels(axes, marks)
        figures.save(figure, path)


def _names(drawn: Sequence[ComparisonRow]) -> Iterator[str]:
    """Yield the name of each row; rows of one name have the settings in which they differ."""
    short = fewest_fields([row.words for row in drawn])
    for row, name in zip(drawn, short, strict=True):
        alike = [one.choices for one, other in zip(drawn, short, strict=True) if other == name]
        differing = [
            f"{key}={text(value)}"
            for key, value in row.choices.items()
            if any(choices.get(key) != value for choices in alike)
        ]
        yield " ".join([name, *differing])


def _bits(row: ComparisonRow) -> float:
    """Return the measured bits up of a row that has a tier, and so has bits."""
    assert row.bits_up is not None
    return row.bits_up


def _frame(axes: Axes, drawn: Sequence[ComparisonRow]) -> None:
    """Set the x axis: bits on a logarithmic scale, with room for names on both sides."""
    from matplotlib.ticker import LogLocator, NullFormatter

    sizes = [_bits(row) for row in drawn]
    axes.set_xscale("log")
    axes.set_xlim(min(sizes) / 3, max(sizes) * 2.2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(LogLocator(subs=(2.0, 5.0)))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _center(drawn: Sequence[ComparisonRow]) -> ComparisonRow:
    """Return the best uncompressed row; without one the best row."""
    return min(drawn, key=lambda row: (not row.is_baseline, row.behind))


def _stretch(axes: Axes, drawn: Sequence[ComparisonRow], scale: float) -> None:
    """Set the y axis: the asinh of the distance from the row of `_center`."""
    import numpy as np

    accuracy = drawn[0].metric == "accuracy"
    center = _center(drawn)
    middle, soft = scale * (center.mean or 0.0), SOFT[accuracy]

    def there(y: Any) -> Any:
        return np.arcsinh((np.asarray(y) - middle) / soft)

    def back(v: Any) -> Any:
        return middle + soft * np.sinh(v)

    ends = [
        scale * ((row.mean or 0.0) + sign * row.half_interval) for row in drawn for sign in (-1, 1)
    ]
    low, high = there(min(ends)), there(max(ends))
    room = 0.08 * (high - low) or 1.0
    axes.set_yscale("function", functions=(there, back))
    axes.set_ylim(back(low - room), back(high + room))
    axes.set_yticks(_ticks(there, *axes.get_ylim()))
    axes.yaxis.set_major_formatter("{x:g}")
    what = "test accuracy (%)" if accuracy else "test loss"
    axes.set_ylabel(f"{what}, stretched near {'fp32' if center.is_baseline else 'the best'}")


def _ticks(there: Callable[[float], float], low: float, high: float) -> list[float]:
    """Return round numbers from low to high, the roundest first, that have room for their text."""
    least = (there(high) - there(low)) / 14
    chosen: list[float] = []
    for step in (10, 5, 2, 1, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01):
        if (high - low) / step > 1000:
            break
        for number in range(math.ceil(low / step), math.floor(high / step) + 1):
            tick = round(number * step, 2)
            if all(abs(there(tick) - there(other)) >= least for other in chosen):
                chosen.append(tick)
    return sorted(chosen)
