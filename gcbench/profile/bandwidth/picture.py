"""The picture of `gcbench bandwidth`: plain collectives over size, speeds, where the time goes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcbench.profile.bandwidth.settings import Settings, size_text
from gcbench.profile.bandwidth.transfers import PARTS, YARDSTICK
from gcbench.report import figures
from gcbench.report.rendering import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from gcbench.report.analysis import Analysis

Rows = Sequence[Mapping[str, Any]]
COLUMNS = 9
"""Largest number of sizes in the picture."""
CUT = 4.0
"""Bars are cut at this multiple of the time of the plain all-reduce."""
COLOURS = dict(zip(PARTS, ("#E7B840", "#33658F", "#C9CDD2", "#7FB5DA"), strict=True))


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
    """Draw bandwidths of plain collectives; speeds of exchanges by size; phases at the largest.

    Raises:
        GcbenchError: `path` cannot be written.
    """
    settings = Settings.model_validate(analysis.settings)
    rows, phases = analysis.table("transfers").rows, analysis.table("phases").rows
    names = fastest(rows)
    sizes = settings.sizes[:: -(-len(settings.sizes) // COLUMNS)]
    with figures.canvas(19, max(6.2, 2.4 + 0.37 * len(names))) as figure:
        room = (1.1, 0.25 + 0.13 * len(sizes), 1)
        left, middle, right = figure.subplots(1, 3, width_ratios=room)
        _bandwidths(left, settings, rows, sizes)
        if names:
            _speeds(middle, settings, rows, names, sizes)
            _stacked(right, settings, rows, phases, names)
        else:
            figure.delaxes(middle)
            figure.delaxes(right)
        figure.suptitle(
            f"A float32 gradient among {settings.workers} workers ({settings.engine}, "
            f"{settings.library}, {settings.threads} thread(s) each): medians of "
            f"n = {settings.iterations}; each method with its fastest collective"
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


def _speeds(
    axes: Axes, settings: Settings, rows: Rows, names: Sequence[str], sizes: Sequence[int]
) -> None:
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


def _stacked(
    axes: Axes, settings: Settings, rows: Rows, phases: Rows, names: Sequence[str]
) -> None:
    """Draw the phases of each exchange at the largest size, in milliseconds."""
    largest = settings.sizes[-1]
    total = {
        _name(row): 1e3 * row["p50"] for row in rows if row["size"] == largest and not row["failed"]
    }
    plain = total[f"{settings.library}, {YARDSTICK}"]
    longest = max(total.get(name, 0.0) for name in names)
    limit = max(1.2 * plain, min(1.05 * longest, CUT * plain))
    for place, name in enumerate(names):
        if name not in total:
            axes.text(0.02 * limit, place, "failed", va="center", fontsize="small")
            continue
        row = next(row for row in phases if _name(row) == name and row["size"] == largest)
        start = 0.0
        for part in PARTS:
            label = part if place == 0 else None
            wide = 1e3 * row[part]
            axes.barh(place, wide, left=start, color=COLOURS[part], label=label, height=0.74)
            start += wide
        if max(start, total[name]) > limit:
            axes.annotate(
                f"{number(total[name])} ms ▸",
                (limit, place),
                (-4, 0),
                textcoords="offset points",
                ha="right",
                va="center",
                fontsize="small",
                bbox={"boxstyle": "round,pad=0.15", "color": "white", "alpha": 0.85},
            )
    axes.axvline(plain, color="black", linewidth=3, label=f"plain {YARDSTICK}")
    axes.set_xlim(0, limit)
    axes.set_yticks(range(len(names)), [])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.set_title(f"where the time goes at {size_text(largest)}", fontsize="medium")
    axes.set_xlabel("time (ms): medians of the phases")
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, frameon=False, fontsize="small"
    )
