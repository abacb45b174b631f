"""The picture of `gcbench histogram`, from saved rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcbench.profile.histogram.reconstruction import BINS, EDGE
from gcbench.profile.histogram.tables import GRADIENT
from gcbench.report import figures
from gcbench.report.analysis import Analysis, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 4
"""Number of methods with histograms in the picture; the tables have all."""
LINES = 3
"""Number of layers with histograms in the picture."""
WIDTH = 11.0
"""Width in inches: 12-point type stays legible at a width of 830 pixels."""


def draw(analysis: Analysis, path: Path) -> None:
    """Draw histograms of gradients and of their decoding to `path`.

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
    with figures.canvas(WIDTH, 2.0 * max(1, len(layers)) + 1.9) as figure:
        figure.suptitle(f"Decoded gradients: {subtitle}", fontsize="medium")
        _histograms(figure, [row for row in bins if row["step"] == last], layers, able[:COLUMNS])
        figures.save(figure, path)


def empty(axes: Axes, why: str) -> None:
    """Write the reason into an empty panel."""
    look: dict[str, Any] = dict(ha="center", va="center", color="0.35", fontsize="small")
    axes.text(0.5, 0.5, why, transform=axes.transAxes, **look)


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
    figure: Figure, rows: Sequence[Row], layers: Sequence[str], methods: Sequence[str]
) -> None:
    """Draw one row of panels per layer and one column per method, from the rows of one step."""
    if not layers or not methods:
        axes = figure.subplots()
        axes.set_axis_off()
        empty(axes, "no histogram: " + ("no layer was chosen" if methods else "all methods failed"))
        return
    import seaborn

    orange = seaborn.color_palette("colorblind")[3]
    named: dict[str, dict[str, Any]] = {
        "gradient": {"color": "0.8", "fill": True, "label": "gradients of the workers"},
        "target": {"color": "0.45", "lw": 1.4, "ls": (0, (2, 1)), "label": "clipped"},
        "decoded": {"color": "0.1", "lw": 1.8, "label": "decoded, per worker"},
        "averaged": {"color": orange, "lw": 1.6, "label": "averaged over the workers"},
    }
    grid = figure.subplots(len(layers), len(methods), squeeze=False, sharex=True, sharey=True)
    for line, layer in zip(grid, layers, strict=True):
        for axes, method in zip(line, methods, strict=True):
            drawn = 0
            for values, look in named.items():
                whose = GRADIENT if values == "gradient" else method
                filled = [
                    row
                    for row in rows
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
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize="small",
    )
