"""The pictures of `gcbench histogram`: distributions and errors, from saved rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcbench.profile.histogram.reconstruction import ALL, BINS, EDGE
from gcbench.profile.histogram.tables import GRADIENT
from gcbench.report import figures
from gcbench.report.analysis import Analysis, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

COLUMNS = 4
"""Number of methods with histograms in the picture; the tables have all."""
LINES = 3
"""Number of layers with histograms in the picture."""
CURVES = 10
"""Number of methods with curves; more would be indistinguishable."""


WIDTH = 11.0
"""Width in inches: 12-point type stays legible at a width of 830 pixels."""


def draw(analysis: Analysis, path: Path) -> list[Path]:
    """Draw histograms to `path` and errors to a file beside it; return both files.

    Raises:
        UsageError: an ending that is not a picture's.
        GcbenchError: `path` cannot be written.
    """
    path = figures.check(path)
    methods = list(analysis.settings["methods"])
    failed = {
        str(row["method"])
        for row in analysis.table("errors").rows
        if not row["n"] and row["method"] != GRADIENT
    }
    able = [method for method in methods if method not in failed]
    bins = analysis.table("bins").rows
    binned = list(dict.fromkeys(str(row["layer"]) for row in bins))
    layers = binned[:LINES]
    last = max((int(row["step"] or 0) for row in bins), default=0)
    captures = analysis.settings["captures"]
    steps = sorted({one["step"] for one in captures})
    seeds = len({one["seed"] for one in captures})
    where = f"{captures[0]['task']}, {analysis.settings['workers']} workers"
    setting = (
        f"{where}, {len(steps)} step{'s' * (len(steps) > 1)} from {steps[0]} to {steps[-1]}, "
        f"{seeds} seed{'s' * (seeds > 1)}"
    )
    if failed:
        setting += f"; failed: {', '.join(sorted(failed))}"
    left_out = [
        f"the first {shown} of {have} {what}"
        for shown, have, what in ((LINES, len(binned), "layers"), (COLUMNS, len(able), "methods"))
        if have > shown
    ]
    subtitle = f"{setting}\nstep {last}: share of values in a bin of {2 * EDGE / BINS:.2g} rms"
    if left_out:
        subtitle += f", {' and '.join(left_out)}"
    errors = path.with_stem(f"{path.stem}-errors")
    with figures.canvas(WIDTH, 2.0 * max(1, len(layers)) + 1.9) as figure:
        part: Any = figure.subfigures(1, 1)
        _histograms(part, bins, layers, able[:COLUMNS], last, subtitle)
        figures.save(figure, path)
    with figures.canvas(WIDTH, 5.4) as figure:
        part = figure.subfigures(1, 1)
        part.suptitle(f"Errors: {setting}", fontsize="medium")
        _curves(part, analysis, able[:CURVES], len(able) - len(able[:CURVES]))
        figures.save(figure, errors)
    return [path, errors]


def empty(axes: Axes, why: str) -> None:
    """Write the reason into an empty panel."""
    axes.text(
        0.5,
        0.5,
        why,
        ha="center",
        va="center",
        color="0.35",
        transform=axes.transAxes,
        fontsize="small",
    )


# ---- histograms ----------------------------------------------------------------------------------


def _steps(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    """Return the outline of the filled bins of one histogram: edges and shares of all values."""
    width = 2 * EDGE / BINS
    shares = [0.0] * BINS
    total = sum(float(row["count"] or 0) for row in rows)
    for row in rows:
        middle = (float(row["left"] or 0) + float(row["right"] or 0)) / 2 / float(row["rms"] or 1)
        shares[round((middle + EDGE) / width - 0.5)] += float(row["count"] or 0) / total
    return [-EDGE + i * width for i in range(BINS + 1)], shares


def _histograms(
    part: SubFigure,
    rows: Sequence[Row],
    layers: Sequence[str],
    methods: Sequence[str],
    step: int,
    subtitle: str,
) -> None:
    """Draw one row of panels per layer and one column per method, for the last step."""
    part.suptitle(f"Decoded gradients: {subtitle}", fontsize="medium")
    if not layers or not methods:
        axes = part.subplots()
        axes.set_axis_off()
        empty(axes, "no histogram: " + ("no layer was chosen" if methods else "all methods failed"))
        return
    import seaborn

    orange = seaborn.color_palette("colorblind")[3]
    named: dict[str, dict[str, Any]] = {
        "gradient": {"color": "0.8", "fill": True, "label": "gradients of the workers"},
        "target": {"color": "0.45", "lw": 1.4, "ls": (0, (2, 1)), "label": "clipped"},
        "decoded": {"color": "0.1", "lw": 1.8, "label": "decoded, per worker"},
        "averaged": {
            "color": orange,
            "lw": 1.6,
            "label": "averaged over the workers",
        },
    }
    grid = part.subplots(len(layers), len(methods), squeeze=False, sharex=True, sharey=True)
    here = [row for row in rows if row["step"] == step]
    for line, layer in zip(grid, layers, strict=True):
        for axes, method in zip(line, methods, strict=True):
            drawn = 0
            for values, look in named.items():
                whose = GRADIENT if values == "gradient" else method
                filled = [
                    row
                    for row in here
                    if (row["layer"], row["method"], row["values"]) == (layer, whose, values)
                ]
                if filled:
                    drawn += 1
                    edges, shares = _steps(filled)
                    axes.stairs(shares, edges, **look, baseline=1e-9)
            if not drawn:
                empty(axes, "no values of this layer\nat this step")
            axes.set_yscale("log")
            axes.set_ylim(3e-6, 2)
            axes.set_yticks([1e-5, 1e-3, 1e-1])
            axes.set_xlim(-EDGE, EDGE)
        line[0].set_ylabel(layer, fontsize="small")
    for axes, method in zip(grid[0], methods, strict=True):
        axes.set_title(method, fontsize="medium")
    for axes in grid[-1]:
        axes.set_xlabel("value / rms of the layer\n±6: and beyond", fontsize="small")
    handles = dict[str, Any]()
    for axes in grid.flat:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    part.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize="small",
    )


# ---- errors --------------------------------------------------------------------------------------


def _curves(part: SubFigure, analysis: Analysis, methods: Sequence[str], hidden: int) -> None:
    """Draw the distribution of errors, and error and zeros over training."""
    looks = figures.styles(methods)
    left, middle, right = part.subplots(1, 3)
    rows = analysis.table("distributions").rows
    for method in methods:
        mine = [row for row in rows if row["method"] == method]
        at = sorted({float(row["error"] or 0) for row in mine})
        mean = [_average([row for row in mine if row["error"] == x], "share_alone") for x in at]
        style = {**looks[method], "markevery": (5, 7)}
        left.plot(at, mean, label=method, lw=2, ms=7, mec="white", mew=0.7, **style)
    left.set_xscale("log")
    left.set_xlim(1e-3, 1e1)
    left.set_ylim(0, 1.02)
    left.set_xlabel("|error| / rms of the layer, alone")
    left.set_ylabel("share of elements below")
    if not rows:
        empty(left, "no error was recorded")
    left.set_title("Distribution\nof the error", loc="left", fontsize="medium")
    steps = [row for row in analysis.table("steps").rows if row["group"] == ALL]
    _training(middle, steps, methods, looks, "relative_error_averaged", 1)
    middle.set_ylabel("‖error‖ / ‖mean gradient‖")
    middle.set_title("Error of the average\nover the workers", loc="left", fontsize="medium")
    _training(right, steps, [GRADIENT, *methods], looks, "zeros_alone", 100)
    right.set_ylim(-4, 104)
    right.set_ylabel("zeros (%)")
    right.set_title("Zeros sent\nby one worker", loc="left", fontsize="medium")
    handles, labels = left.get_legend_handles_labels()
    extra, named = right.get_legend_handles_labels()
    handles += [h for h, label in zip(extra, named, strict=True) if label not in labels]
    labels += [label for label in named if label not in labels]
    if hidden and labels:
        labels[-1] += f" ({hidden} more methods in the tables)"
    part.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(4, max(1, len(labels))),
        frameon=False,
        fontsize="small",
        handlelength=3,
    )


def _average(rows: Sequence[Row], field: str) -> float:
    values = [value for row in rows if isinstance(value := row.get(field), int | float)]
    return sum(values) / len(values) if values else float("nan")


def _training(
    axes: Axes,
    rows: Sequence[Row],
    methods: Sequence[str],
    looks: dict[str, dict[str, Any]],
    field: str,
    scale: float,
) -> None:
    """Draw a measure over the steps: mean of the seeds, and their range."""
    drawn: list[float] = []
    for method in methods:
        mine = [row for row in rows if row["method"] == method]
        at = sorted({int(row["step"] or 0) for row in mine})
        table = [[row for row in mine if row["step"] == step] for step in at]
        mean = [scale * _average(alike, field) for alike in table]
        plain: dict[str, Any] = {"color": "0.35", "marker": "", "linestyle": "-"}
        label = "the gradient itself" if method == GRADIENT else method
        style = looks.get(method, plain)
        axes.plot(at, mean, label=label, lw=2, ms=7, mec="white", mew=0.7, **style)
        drawn += [value for value in mean if value == value]
        if len({row["seed"] for row in mine}) > 1:
            sides = [
                [scale * float(value) for row in alike if (value := row.get(field)) is not None]
                or [float("nan")]
                for alike in table
            ]
            low, high = [*map(min, sides)], [*map(max, sides)]
            axes.fill_between(at, low, high, color=style["color"], alpha=0.18, lw=0)
    if not drawn:
        empty(axes, "no such value was recorded")
    positive = [value for value in drawn if value > 0]
    if scale == 1 and positive and max(positive) > 20 * min(positive):
        axes.set_yscale("log")
        axes.set_ylim(bottom=max(1e-4, min(positive) / 2))  # not to the rounding of fp32
    axes.set_xlabel("step")
