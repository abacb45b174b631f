"""The picture of `gcbench bandwidth`: plain collectives over size, and speeds of exchanges."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcbench.profile.bandwidth.settings import Settings, size_text
from gcbench.profile.bandwidth.transfers import YARDSTICK
from gcbench.report import figures, rendering

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from gcbench.report.analysis import Analysis

Rows = Sequence[Mapping[str, Any]]
COLUMNS = 9
"""Largest number of sizes in the picture."""


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['method']}, {row['collective']}"


def fastest(rows: Rows) -> list[str]:
    """Return each method's fastest exchange at the largest size, sorted, failed ones last."""
    largest = max(row["size"] for row in rows)
    there = [row for row in rows if row["kind"] == "exchange" and row["size"] == largest]
    best: dict[str, str] = {}
    for row in sorted(there, key=lambda row: math.inf if row["failed"] else row["p50"]):
        best.setdefault(row["method"], _name(row))
    return list(best.values())


def draw(analysis: Analysis, path: Path) -> None:
    """Draw bandwidths of plain collectives, and speeds of exchanges by size.

    Raises:
        GcbenchError: `path` cannot be written.
    """
    settings = Settings.model_validate(analysis.settings)
    rows = analysis.table("transfers").rows
    names = fastest(rows)
    sizes = settings.sizes[:: -(-len(settings.sizes) // COLUMNS)]
    with figures.canvas(14, max(6.2, 2.4 + 0.37 * len(names))) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1.1, 0.25 + 0.13 * len(sizes)))
        _bandwidths(left, settings, rows, sizes)
        if names:
            _speeds(right, rows, names, sizes)
        else:
            figure.delaxes(right)
        figure.suptitle(
            f"A float32 gradient among {settings.workers} workers ({settings.engine}, "
            f"{settings.library}, {rendering.counted(settings.threads, 'thread')} each):\n"
            f"medians of n = {settings.iterations}; each method with its fastest collective"
        )
        figures.save(figure, path)


def _bandwidths(axes: Axes, settings: Settings, rows: Rows, sizes: Sequence[int]) -> None:
    """Draw size / time over size: the bounds, the library's collectives, the best exchange."""
    lines: dict[str, dict[int, float]] = {}
    best: dict[int, float] = {}
    for row in rows:
        if row["failed"] or row["wrong"]:
            continue
        size, value = row["size"], row["algbw"] * 1e-9
        if row["kind"] == "exchange":
            best[size] = max(best.get(size, 0.0), value)
        else:
            label = row["method"] if row["kind"] == "bound" else row["collective"]
            lines.setdefault(label, {})[size] = value
    looks = figures.styles(label for label in lines if label != YARDSTICK)
    looks[YARDSTICK] = {"color": "black", "marker": "o", "linewidth": 3}
    lines["fastest exchange"] = best
    looks["fastest exchange"] = {"color": "#B5179E", "marker": "*", "markersize": 14}
    for label, values in lines.items():
        axes.plot(list(values), list(values.values()), label=label, **looks[label])
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(sizes, [size_text(size) for size in sizes])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_title(f"plain collectives of {settings.library}, and bounds", fontsize="medium")
    axes.set_xlabel("size in bytes (K, M, G: powers of 1024)")
    axes.set_ylabel("algbw = size / time (GB/s)")
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, frameon=False, fontsize="small"
    )


def _speeds(axes: Axes, rows: Rows, names: Sequence[str], sizes: Sequence[int]) -> None:
    """Draw a table of speeds relative to the plain all-reduce, by exchange and size, in colours.

    Speeds are bold where the exchange pays; failed or wrong exchanges are labelled.
    """
    from matplotlib.colors import Normalize

    at = {(_name(row), row["size"]): row for row in rows if row["kind"] == "exchange"}
    table = [
        [
            math.nan if at[name, size]["failed"] else math.log2(at[name, size]["speed"])
            for size in sizes
        ]
        for name in names
    ]
    axes.imshow(table, cmap="PuOr", norm=Normalize(-5, 5), aspect="auto")
    for line, name in enumerate(names):
        for column, size in enumerate(sizes):
            row = at[name, size]
            text = "failed" if row["failed"] else f"{row['speed']:.2g}"
            if row["wrong"]:
                text = "wrong"
            dark = not row["failed"] and abs(table[line][column]) > 3
            axes.text(
                column,
                line,
                text,
                ha="center",
                va="center",
                fontsize="small",
                color="white" if dark else "black",
                weight="bold" if row.get("pays") else "normal",
            )
    axes.set_xticks(range(len(sizes)), [size_text(size) for size in sizes])
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.set_title(f"speed against plain {YARDSTICK}", fontsize="medium")
    axes.set_xlabel("size in bytes\nbold: pays (sign test over pairs, 1 %)")
