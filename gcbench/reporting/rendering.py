"""Columns of text as terminal tables that fit, Markdown, or LaTeX."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from gcbench.reporting import foreign

if TYPE_CHECKING:
    from rich.table import Table


class Column(NamedTuple):
    """One column of a table: a heading (a line break where it may be two lines) and its cells."""

    heading: str
    cells: list[str]


def number(value: float | None, scale: float = 1.0) -> str:
    """Return about three significant digits, without an exponent where that stays readable."""
    if value is None:
        return "-"
    scaled = value * scale
    if not math.isfinite(scaled) or scaled == 0 or not 1e-4 <= abs(scaled) < 1e7:
        return f"{scaled:.3g}"
    return f"{scaled:.{max(0, 2 - math.floor(math.log10(abs(scaled))))}f}"


# ---- terminal ------------------------------------------------------------------------------------


def _table(columns: Sequence[Column], which: int, wrap: bool) -> Table:
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for place, column in enumerate(columns):
        folds = wrap and place == which - 1
        pieces = [*column.heading.split("\n")]
        pieces += [foreign.cut(cell, foreign.CELL) for cell in column.cells]
        if folds:
            pieces = [word for piece in pieces for word in piece.split()]
        table.add_column(
            Text(column.heading),
            justify="left" if place < which else "right",
            vertical="top",
            no_wrap=not folds,
            min_width=max(map(cell_len, pieces)),  # rich may shrink the rest to make room
        )
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*(Text(foreign.cut(cell, foreign.CELL)) for cell in cells))
    return table


def terminal(which: Sequence[Column], groups: Sequence[Sequence[Column]], width: int) -> str:
    """Return as few tables as fit into `width` columns, none with a word or number cut.

    Each begins with the columns `which`, which say what a row is; their last may fold between
    words. Columns of a group stay together where they can.
    """
    from rich.console import Console
    from rich.measure import Measurement

    wide = Console(width=10_000, color_system=None, file=io.StringIO())

    def needed(columns: Sequence[Column], wrap: bool) -> int:
        table = _table([*which, *columns], len(which), wrap)
        measured = Measurement.get(wide, wide.options, table)
        return measured.minimum if wrap else measured.maximum

    tables: list[list[Column]] = []
    for group in groups:
        if tables and needed([*tables[-1], *group], wrap=False) <= width:
            tables[-1] += group
        elif needed(group, wrap=True) <= width:
            tables.append([*group])
        else:
            tables.append([*group[:1]])
            for column in group[1:]:
                if needed([*tables[-1], column], wrap=True) <= width:
                    tables[-1].append(column)
                else:
                    tables.append([column])
    blocks = []
    for columns in tables or [[]]:
        wrap = needed(columns, wrap=False) > width
        console = Console(
            file=io.StringIO(),
            width=max(width, needed(columns, wrap=True)),
            color_system=None,
            legacy_windows=False,
        )
        with console.capture() as capture:
            console.print(_table([*which, *columns], len(which), wrap))
        blocks.append("\n".join(line.rstrip() for line in capture.get().rstrip().splitlines()))
    return "\n\n".join(blocks)


# ---- documents -----------------------------------------------------------------------------------


def _lines(columns: Sequence[Column]) -> list[list[str]]:
    """Return headings and rows of cells."""
    headings = [column.heading.replace("\n", " ") for column in columns]
    rows = zip(*(column.cells for column in columns), strict=True)
    return [[foreign.cut(cell, foreign.CELL) for cell in line] for line in (headings, *rows)]


def _markdown_cell(cell: str) -> str:
    """Return text with neither tags nor links."""
    escaped = cell.replace("<", "&lt;").replace(">", "&gt;")
    return escaped.replace("|", "\\|").replace("](", "]\\(")


def markdown(columns: Sequence[Column], which: int) -> str:
    """Return a table of GitHub's Markdown; the first `which` columns are aligned to the left."""
    headings, *rows = _lines(columns)
    rule = [":-" if place < which else "-:" for place in range(len(columns))]
    return "\n".join(
        "| " + " | ".join(map(_markdown_cell, line)) + " |" for line in (headings, rule, *rows)
    )


_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "&": r"\&",
        "%": r"\%",
        "$": r"\$",
        "#": r"\#",
        "_": r"\_",
        "{": r"\{",
        "}": r"\}",
        "~": r"$\sim$",
        "^": r"\textasciicircum{}",
        "<": r"$<$",
        ">": r"$>$",
        "±": r"$\pm$",
        "†": r"$\dagger$",
        "‡": r"$\ddagger$",
        "§": r"\S{}",
        "µ": r"$\mu$",
    }
)


def latex_text(text: str) -> str:
    """Return text with LaTeX's own characters escaped."""
    return text.translate(_LATEX)


def _latex_cell(cell: str) -> str:
    if cell == "-":
        return "--"
    return re.sub(r"(?<![^ \[])[+-](?=[0-9])", r"$\g<0>$", latex_text(cell))


def latex(columns: Sequence[Column], which: int) -> str:
    """Return a tabular, which needs the package booktabs."""
    headings, *rows = (" & ".join(map(_latex_cell, line)) + r" \\" for line in _lines(columns))
    return "\n".join(
        [
            rf"\begin{{tabular}}{{{'l' * which}{'r' * (len(columns) - which)}}}",
            r"\toprule",
            headings,
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
        ]
    )
