"""Style, colours, markers and labels of all pictures, and writing them to a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from math import hypot
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gcbench.core.errors import GcbenchError, UsageError
from gcbench.results import sanitize

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg", ".pdf")
MARKERS = "osD^vPX<>p*"
LINES: tuple[Any, ...] = (
    "-",
    (0, (5, 1.5)),
    (0, (1, 1.2)),
    (0, (5, 1.5, 1, 1.5)),
    (0, (9, 2)),
    (0, (3, 1, 1, 1, 1, 1)),
    (0, (2, 2)),
)
_METADATA: dict[str, dict[str, Any]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}


def check(path: Path) -> Path:
    """Return `path` if a picture can be written there; to be called before long work.

    Raises:
        UsageError: another ending than `ENDINGS`, or a folder that is not there.
    """
    path = Path(path)
    if path.suffix.lower() not in ENDINGS:
        raise UsageError(f"{path}: unknown picture format; end the name in {', '.join(ENDINGS)}")
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} is not a folder; create it, or name another file")
    return path


def colours(count: int) -> list[Any]:
    """Return `count` different colours: up to ten from a colour-blind safe palette.

    Beyond ten, hues around the circle, dark and light in turn; markers distinguish neighbours.
    """
    import seaborn

    safe = list(seaborn.color_palette("colorblind"))
    if count <= len(safe):
        return safe[:count]
    turns = [seaborn.husl_palette(count, s=0.9, l=light) for light in (0.45, 0.68)]
    return [turns[place % 2][place] for place in range(count)]


def styles(labels: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return a colour, a marker and a line style for each label, in order."""
    names = list(dict.fromkeys(labels))
    return {
        label: {
            "color": colour,
            "marker": MARKERS[place % len(MARKERS)],
            "linestyle": LINES[place % len(LINES)],
        }
        for place, (label, colour) in enumerate(zip(names, colours(len(names)), strict=True))
    }


WIDTHS = {"single": 3.5, "double": 7.16}
"""Inches of a column of a paper, and of a page of two (IEEE's; others differ by a few percent)."""
_EMBEDDED = {"pdf.fonttype": 42, "ps.fonttype": 42}
"""Fonts as TrueType, with their outlines: publishers refuse matplotlib's usual Type 3."""


@contextmanager
def print_canvas(width: str) -> Iterator[Figure]:
    """Yield an empty figure as wide as one of `WIDTHS`, with text of 8 points."""
    look = {
        **dict.fromkeys(("font.size", "axes.labelsize", "axes.titlesize"), 8),
        **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 7),
        **{"grid.linewidth": 0.5, "lines.linewidth": 1.0, "lines.markersize": 4.5},
    }
    inches = WIDTHS[width]
    tall = inches * (0.75 if width == "single" else 0.54)
    with _canvas(inches, tall, 300, look, "paper") as figure:
        yield figure


@contextmanager
def canvas(width: float, height: float) -> Iterator[Figure]:
    """Yield an empty figure of that many inches, styled to be readable at half its size."""
    with _canvas(width, height, 120, {}, "notebook", font_scale=1.2) as figure:
        yield figure


@contextmanager
def _canvas(
    width: float, height: float, dpi: int, look: dict[str, Any], context: str, **scale: float
) -> Iterator[Figure]:
    import matplotlib as mpl
    import seaborn
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style = {
        **seaborn.axes_style("ticks", {"axes.grid": True, "grid.color": "0.9"}),
        **seaborn.plotting_context(context, **scale),
        **look,
        **_EMBEDDED,
        "svg.hashsalt": "gcbench",  # equal runs give equal files
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure


def save(figure: Figure, path: Path) -> None:
    """Remove the upper and right frame of the axes, and write the figure to `path`.

    Raises:
        GcbenchError: the file cannot be written.
    """
    import seaborn

    for axes in figure.axes:
        seaborn.despine(ax=axes)
    try:
        figure.savefig(path, metadata=_METADATA[path.suffix.lower()])
    except OSError as error:
        raise GcbenchError(
            f"cannot write {path} ({error}); name a file in an existing, writable folder"
        ) from error


# ---- labels --------------------------------------------------------------------------------------


class Mark(NamedTuple):
    """A point to be labelled: where, half its error bar (data coordinates), text, colour.

    `short` replaces a text without room, e.g. a number that a legend explains.
    """

    x: float
    y: float
    spread: float
    text: str
    colour: Any
    short: str = ""


FAR = 24  # points between a mark and its label beyond which a line joins them


def _spots() -> list[tuple[int, int]]:
    """Return offsets in points at which a label may stand, the nearest first."""
    across = (9, -9, 0, 30, -30, 60, -60, 100, -100)
    along = (0, 10, -10, 20, -20, 32, -32, 46, -46, 62, -62, 80, -80, 100, -100)
    return sorted(((x, y) for x, y in product(across, along) if x or y), key=lambda at: hypot(*at))


def write_labels(axes: Axes, marks: Sequence[Mark]) -> int:
    """Write a label near each mark and return how many labels overlap something.

    Labels avoid marks, error bars and other labels. A label that is nearer to another mark than to
    its own is joined to it by a line. Where the text does not fit near its mark, the `short` text
    may replace it; where neither fits, the place with fewest overlaps is taken.
    """
    import numpy as np
    from matplotlib.transforms import Bbox

    figure: Any = axes.figure
    points = figure.dpi / 72
    taken: list[tuple[float, ...]] = []
    """Lower left and upper right corners."""
    for mark in marks:
        ends = [(mark.x, mark.y - mark.spread), (mark.x, mark.y + mark.spread)]
        (left, low), (right, high) = axes.transData.transform(ends)
        around = 4 * points if len(marks) > 20 else 5.5 * points
        box = Bbox([[left - around, low - around], [right + around, high + around]])
        taken.append((*box.min, *box.max))
    places = axes.transData.transform([(mark.x, mark.y) for mark in marks])

    def line(index: int, box: Any) -> Any:
        """Return points of the line that joins a label's box and its mark."""
        near = np.clip(places[index], box.min, box.max)
        return np.linspace(near, places[index], 20, endpoint=False)

    def count(index: int, box: Any, joined: bool) -> int:
        """Return how many boxes the label of a mark and the line between them would overlap."""
        away = np.hypot(*(np.clip(places, box.min, box.max) - places).T)
        others = np.array(taken)
        apart = (box.max < others[:, :2]) | (box.min > others[:, 2:])
        overlaps = int((~apart.any(axis=1)).sum())
        if joined:
            labels, along = others[len(marks) :], line(index, box)[:, None]
            crossed = (along > labels[:, :2]) & (along < labels[:, 2:])
            overlaps += int(crossed.all(axis=2).any(axis=0).sum())
        return overlaps + bool(not joined and away[index] > away.min())

    collisions = 0
    for index, mark in enumerate(marks):
        free = partial(count, index)
        (hits, far), label, box = _place(axes, mark, mark.text, free)
        if (hits or far > FAR) and mark.short:
            shorter = _place(axes, mark, mark.short, free)
            if shorter[0] < (hits, far):
                label.remove()
                (hits, _), label, box = shorter
            else:
                shorter[1].remove()
        collisions += bool(hits)
        taken.append((*box.min, *box.max))
        if label.arrow_patch is not None:  # other labels avoid the line, too
            taken += [(*(at - points), *(at + points)) for at in line(index, box)]
    return collisions


def _place(
    axes: Axes, mark: Mark, text: str, count: Callable[[Any, bool], int]
) -> tuple[tuple[int, float], Any, Any]:
    """Write a label at the nearest free spot.

    `count` returns how much a box would overlap, if a line joins it and the mark, and if not.
    Returns how many boxes it overlaps and its distance in points, the label and its box.
    """
    from matplotlib.text import Text

    figure: Any = axes.figure
    renderer = figure.canvas.get_renderer()
    frame = axes.get_window_extent(renderer)
    best: tuple[tuple[int, float], Any, Any] | None = None
    for across, along in _spots():
        distance = hypot(across, along)
        label = axes.annotate(
            sanitize.label(text),
            (mark.x, mark.y),
            (across, along),
            textcoords="offset points",
            ha="center" if not across else "left" if across > 0 else "right",
            va="center" if across else "bottom" if along > 0 else "top",
            color="0.15",
            fontsize="small",
            arrowprops={
                "arrowstyle": "-",
                "color": mark.colour,
                "shrinkA": 0,
                "shrinkB": 4,
                "relpos": (
                    0.0 if across > 0 else 1.0 if across else 0.5,
                    0.5 if across else float(along < 0),
                ),
            }
            if distance > FAR
            else None,
        )
        label.update_positions(renderer)
        box = Text.get_window_extent(label, renderer)  # without the line to the mark
        beyond = max(frame.x0 - box.x0, 0.0) + min(frame.x1 - box.x1, 0.0)
        if beyond and not across:  # above or below the mark it may be moved sideways, if need be
            label.xyann = (72 / figure.dpi * beyond, along)
            box = box.translated(beyond, 0.0)
        hits = count(box, distance > FAR) + bool(beyond)
        inside = frame.x0 <= box.x0 and box.x1 <= frame.x1
        hits += 10 * (not (inside and frame.y0 <= box.y0 and box.y1 <= frame.y1))
        if best is not None and hits >= best[0][0]:
            label.remove()
            continue
        if best is not None:
            best[1].remove()
        best = ((hits, distance), label, box)
        if not hits:
            break
    assert best is not None
    return best
