"""The picture of a suite with tiers: accuracy against bytes, with intervals and names."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcbench.core.errors import UsageError
from gcbench.reporting import figures, foreign
from gcbench.reporting.compare import Row
from gcbench.reporting.figures import Mark
from gcbench.reporting.rendering import ends

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SOFT = {True: 2.0, False: 0.02}
"""Distance from fp32 up to which the y axis is nearly linear: points of accuracy, or loss."""
FADED = 0.35
"""Opacity of points that are not on the front: another is better for as few bytes."""


def best(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of one tier that may be its best one, by their ranks; none if none has any.

    No interval tells them apart from it, so there is no first among them.
    """
    return [row for row in rows if row.rank and row.rank.partition("-")[0] == "1"]


def line(rows: Sequence[Row], scale: float) -> list[tuple[float, float]]:
    """Return the points of the line through the best rows of each tier, from few bytes to many.

    A tier has the fewest and the most bytes of its best rows, at the mean of their means. Each
    counts by 1 / variance, so that one of which little is known does not move it.
    """
    points = []
    tiers = dict.fromkeys(row.tier for row in rows)
    for first in (best([row for row in rows if row.tier == tier]) for tier in tiers):
        if first:
            known = all(row.half_interval for row in first)
            weights = [1 / row.half_interval**2 if known else 1.0 for row in first]
            pairs = zip(weights, first, strict=True)
            middle = scale * sum(w * (row.mean or 0.0) for w, row in pairs) / sum(weights)
            sizes = [row.payload for row in first]
            points += [(size, middle) for size in dict.fromkeys((min(sizes), max(sizes)))]
    return sorted(points, key=lambda point: point[0])


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Write the picture to `path`: PNG, SVG or PDF by its ending.

    The x axis has the encoded bytes of a worker and step, up and down together; the y axis the
    metric after the last step, mean over seeds with its 95 % interval, on a scale that is stretched
    near the uncompressed runs (asinh), where most methods are. Each tier has a colour. A line joins
    the best of each, see `line`. Grey is the interval of the uncompressed runs. Rows without a
    finished seed are named below.

    Raises:
        UsageError: another ending, no row of a tier, or rows of more than one budget or metric.
        GcbenchError: `path` cannot be written.
    """
    path = figures.check(path)
    drawn = [row for row in rows if row.tier is not None and row.mean is not None]
    if not drawn:
        raise UsageError("no finished row of a tier to draw; make the suite's runs first")
    if len({(str(row.context), row.metric) for row in rows}) > 1:
        raise UsageError("rows of several budgets are no one picture; choose by --where")
    accuracy = drawn[0].metric == "accuracy"
    scale = 100 if accuracy else 1
    tiers = list(dict.fromkeys(row.tier for row in sorted(drawn, key=lambda row: row.payload)))
    styles = figures.styles(map(str, tiers))
    with figures.canvas(11, 6.6) as figure:
        axes = figure.subplots()
        for row in drawn:
            if row.is_baseline:
                middle, half = row.mean or 0.0, row.half_interval
                axes.axhspan(
                    scale * (middle - half), scale * (middle + half), color="0.5", alpha=0.2, lw=0
                )
        marks = []
        for row in drawn:
            style = styles[str(row.tier)]
            opacity = 1.0 if row.on_front else FADED
            x, y, spread = row.payload, scale * (row.mean or 0.0), scale * row.half_interval
            axes.errorbar(
                x,
                y,
                spread,
                ls="",
                capsize=3,
                marker=style["marker"],
                color=style["color"],
                alpha=opacity,
                ms=8,
                mec="white",
                mew=0.7,
            )
            marks.append(Mark(x, y, spread, row.method, style["color"], short=_short(row, drawn)))
        joined = line(drawn, scale)
        if joined:
            axes.plot(*zip(*joined, strict=True), color="0.6", lw=1.2, zorder=1)
        for tier in tiers:
            style = styles[str(tier)]
            axes.plot(
                [],
                [],
                ls="",
                marker=style["marker"],
                color=style["color"],
                label=foreign.label(str(tier)),
            )
        if joined:
            told = (
                "best of each tier: mean, by 1 / variance,\nof those that no interval tells apart"
            )
            axes.plot([], [], color="0.6", lw=1.2, label=told)
        if not all(row.on_front for row in drawn):
            told = "faded: another is better\nfor as few bytes"
            axes.plot([], [], ls="", marker="o", color="0.4", alpha=FADED, label=told)
        _frame(axes, drawn)
        _stretch(axes, drawn, scale)
        seeds = ends(len(row.values) for row in drawn)
        axes.set_title(
            foreign.label(str(title)) + f": mean and 95 % interval, n = {seeds}", loc="left"
        )
        failed = [row.method for row in rows if row.failed]
        told = f"\nfailed seeds: {', '.join(map(foreign.label, failed))}" if failed else ""
        axes.set_xlabel(f"encoded bytes per worker and step, up + down (MB){told}")
        figure.legend(frameon=False, fontsize="small", loc="outside lower center", ncols=3)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        figures.write_labels(axes, marks)
        figures.save(figure, path)


def _short(row: Row, drawn: Sequence[Row]) -> str:
    """Return the method's name with the first field by which it differs from all of that name."""
    name, *fields = row.method.split()
    others = [other.method.split() for other in drawn if other is not row]
    namesakes = [words for words in others if words[0] == name]
    if not namesakes:
        return name
    own = (field for field in fields if not any(field in words for words in namesakes))
    return f"{name} {field}" if (field := next(own, None)) else row.method


def _frame(axes: Axes, drawn: Sequence[Row]) -> None:
    """Set the x axis: bytes on a logarithmic scale, with room for names on both sides."""
    from matplotlib.ticker import LogLocator, NullFormatter

    sizes = [row.payload for row in drawn]
    axes.set_xscale("log")
    axes.set_xlim(min(sizes) / 2, max(sizes) * 2.2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(LogLocator(subs=(2.0, 5.0)))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _stretch(axes: Axes, drawn: Sequence[Row], scale: float) -> None:
    """Set the y axis: the asinh of the distance from the uncompressed row, or from the best one."""
    import numpy as np

    accuracy = drawn[0].metric == "accuracy"
    sign = 1 if accuracy else -1
    first = max(drawn, key=lambda row: sign * (row.mean or 0.0))
    plain = next((row for row in drawn if row.is_baseline), first)
    middle, soft = scale * (plain.mean or 0.0), SOFT[accuracy]

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
    axes.set_ylabel(f"{what}, stretched near {'fp32' if plain.is_baseline else 'the best'}")


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
