"""The renderer: columns as terminal tables that fit, Markdown or LaTeX; records as CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from unicodedata import combining, east_asian_width

from gcbench.results import sanitize

if TYPE_CHECKING:
    from pandas import DataFrame, Series


class Column(NamedTuple):
    """One column of a table: a heading (a line break where it may be two lines) and its cells."""

    heading: str
    cells: list[str]
    best: str = ""
    """"high" or "low": which end a reader looks for first; "" where neither is better."""


MB = 1e6
"""Bytes of the unit in which tables and pictures show them."""


def ends(values: Iterable[int]) -> str:
    """Return the least and the largest of some counts in words: "3 to 5", or "3" if all are."""
    counts = sorted(values)
    return " to ".join(f"{value:,}" for value in dict.fromkeys((counts[0], counts[-1])))


def number(value: float | None, scale: float = 1.0) -> str:
    """Return a number in about three digits, without an exponent where that stays readable."""
    if value is None:
        return "-"
    scaled = value * scale
    if not math.isfinite(scaled) or scaled == 0 or not 1e-4 <= abs(scaled) < 1e7:
        return f"{scaled:.3g}"
    return f"{scaled:.{max(0, 2 - math.floor(math.log10(abs(scaled))))}f}"


# ---- terminal ------------------------------------------------------------------------------------


GAP = "  "
"""What stands between two columns."""


def cell_width(text: str) -> int:
    """Return how many columns of a terminal a text takes: wide characters take two."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def _padded(text: str, width: int, left: bool) -> str:
    space = " " * (width - cell_width(text))
    return text + space if left else space + text


class _Measured(NamedTuple):
    """A column with its cells cut to `sanitize.CELL`, and the columns that it takes."""

    heading: list[str]
    cells: list[str]
    width: int
    least: int
    """Where its cells may fold between words."""

    @classmethod
    def of(cls, column: Column) -> _Measured:
        heading = column.heading.split("\n")
        cells = [sanitize.cut(cell, sanitize.CELL) for cell in column.cells]
        words = {word for text in (*heading, *cells) for word in text.split()}
        width = max(map(cell_width, (*heading, *cells)))
        return cls(heading, cells, width, max(map(cell_width, words), default=0))

    def shortened(self, width: int) -> _Measured:
        """Return the column with its cells cut to `width` columns."""
        cells = [_shortened(cell, width) for cell in self.cells]
        heading = [_shortened(text, width) for text in self.heading]
        return _Measured(heading, cells, width, width)


LINES = 23
"""Lines of a command's default answer: with two of messages they are 25. --details has the rest."""


class Fitted(NamedTuple):
    """A table cut to a number of lines and columns."""

    text: str
    rows: int
    """How many rows are shown: the first ones."""
    left_out: list[str]
    """The headings of the columns that do not fit."""
    height: int
    """Lines above the first row, if all columns were shown."""


def fitted(
    which: Sequence[Column],
    rest: Sequence[Column],
    width: int,
    lines: int,
    groups: Mapping[int, str] | None = None,
) -> Fitted:
    """Return as much of a table as fits into `width` columns and `lines` lines.

    The columns `which` are always shown; where they take more than `NAMES` % of the width, the
    cells of the widest are shortened, and further where the first two of `rest` need the room and
    the rows stay distinct. Of `rest`, in order of importance, those that still fit are shown. Of
    sentences the beginning is shown; numbers are never cut. Each row is one line. `groups`: titles
    on lines of their own above the row with that number.
    """
    which, rest = ([c._replace(cells=c.cells[:lines]) for c in some] for some in (which, rest))
    fixed = [_Measured.of(column) for column in which]
    others = [_Measured.of(column) for column in rest]
    needed = _needed([*fixed, *others], len(fixed), wrap=False)
    taken = _needed(fixed, len(fixed), wrap=False)
    if needed > width:
        first = width - (_needed([*fixed, *others[:2]], len(fixed), wrap=False) - taken)
        room = max(NAMES * width // 100, width - needed + taken)
        narrow = _narrowed(fixed, min(first, room))
        fixed = narrow if _distinct(narrow) == _distinct(fixed) else _narrowed(fixed, room)
    shown, left_out = fixed[:], []
    for column, measured in zip(rest, others, strict=True):
        room = width - _needed(shown, len(fixed), wrap=False) - len(GAP)
        if measured.width > room >= WORDS and _has_sentences(column):
            measured = measured.shortened(room)
        if measured.width <= room:
            shown.append(measured)
        else:
            left_out.append(" ".join(column.heading.split()))
    head, body = _cells(shown, len(fixed))
    lines -= len(head) + 1
    texts: list[str] = []
    rows = 0
    for number, line in enumerate(body):
        title = (groups or {}).get(number)
        if len(texts) + 1 + (title is not None) > lines:
            break
        texts += [line] if title is None else [title, line]
        rows += 1
    rule = "─" * _needed(shown, len(fixed), wrap=False)
    height = 1 + max(column.heading.count("\n") + 1 for column in (*which, *rest))
    return Fitted("\n".join([*head, rule, *texts]), rows, left_out, height)


def _narrowed(columns: Sequence[_Measured], room: int) -> list[_Measured]:
    """Return the columns with the cells of the widest shortened so that all take `room` columns."""
    surplus = _needed(columns, len(columns), wrap=False) - room
    widest = max(columns, key=lambda column: column.width)
    shorter = widest.shortened(max(8, widest.width - max(0, surplus)))
    return [shorter if column is widest else column for column in columns]


def _distinct(columns: Sequence[_Measured]) -> int:
    """Return the number of distinct rows."""
    return len(set(zip(*(column.cells for column in columns), strict=True)))


def _has_sentences(column: Column) -> bool:
    """Return whether a cell has at least three words of letters, which may be cut."""
    return any(len(re.findall("[a-z]{2,}", cell.lower())) > 2 for cell in column.cells)


WORDS = 12
"""Least width of a column whose sentences are shortened in a short table."""
NAMES = 55
"""Percent of the width that the columns which name a row may take in a short table."""


def counted(count: int, noun: str) -> str:
    """Return "1 row" or "2 rows", "1 analysis" or "2 analyses"."""
    plural = f"{noun[:-2]}es" if noun.endswith("sis") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


def cut_lines(text: str) -> str:
    """Return a text of at most `LINES` lines: the last one stays, those before it are cut."""
    every = text.splitlines()
    return text if len(every) <= LINES else "\n".join([*every[: LINES - 1], every[-1]])


def _needed(columns: Sequence[_Measured], which: int, wrap: bool) -> int:
    """Return the width of a table; with `wrap` the last of the `which` columns is folded."""
    fold = which - 1 if wrap else -1
    widths = [one.least if place == fold else one.width for place, one in enumerate(columns)]
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _shortened(text: str, width: int) -> str:
    """Return a text that takes at most `width` columns, with an ellipsis where it is cut."""
    if cell_width(text) <= width:
        return text
    while cell_width(text) >= width:
        text = text[:-1]
    return text.rstrip() + "…"


def _aligned(cells: Iterable[str], widths: Sequence[int], which: int) -> str:
    """Return one line of a table; the first `which` cells are aligned to the left."""
    padded = (
        _padded(cell, width, place < which)
        for place, (cell, width) in enumerate(zip(cells, widths, strict=False))
    )
    return GAP.join(padded).rstrip()


def _heads(columns: Sequence[_Measured]) -> list[list[str]]:
    """Return the headings, each with as many lines as the tallest one."""
    height = max(len(column.heading) for column in columns)
    return [[""] * (height - len(column.heading)) + column.heading for column in columns]


def _cells(columns: Sequence[_Measured], which: int) -> tuple[list[str], list[str]]:
    """Return the lines of the headings, and one line per row."""
    widths = [column.width for column in columns]
    rows = zip(*(column.cells for column in columns), strict=True)
    heads = zip(*_heads(columns), strict=True)
    return (
        [_aligned(cells, widths, which) for cells in heads],
        [_aligned(cells, widths, which) for cells in rows],
    )


def _drawn(columns: Sequence[_Measured], which: int, width: int) -> str:
    """Return a table of at most `width` columns; the first `which` are aligned to the left."""
    widths = [one.width for one in columns]
    fold = which - 1
    spare = _needed(columns, which, wrap=False) - width
    folds = spare > 0 and fold >= 0
    if folds:
        widths[fold] -= spare

    def folded(text: str) -> list[str]:
        lines = textwrap.wrap(text, widths[fold], break_long_words=False, break_on_hyphens=False)
        return lines or [""]

    if folds:
        heading = [part for text in columns[fold].heading for part in folded(text)]
        columns = [
            column._replace(heading=heading) if place == fold else column
            for place, column in enumerate(columns)
        ]
    lines = [_aligned(cells, widths, which) for cells in zip(*_heads(columns), strict=True)]
    lines.append("─" * (sum(widths) + len(GAP) * (len(widths) - 1)))
    for cells in zip(*(one.cells for one in columns), strict=True):
        first, *rest = folded(cells[fold]) if folds else [""]
        if folds:
            cells = (*cells[:fold], first, *cells[fold + 1 :])
        lines.append(_aligned(cells, widths, which))
        below = (["" if i != fold else more for i in range(which)] for more in rest)
        lines += [_aligned(cells, widths, which) for cells in below]
    return "\n".join(lines)


def terminal(which: Sequence[Column], groups: Sequence[Sequence[Column]], width: int) -> str:
    """Return as few tables as fit into `width` columns, none with a word or number cut.

    Each begins with the columns `which`, which say what a row is; their last may fold between
    words. Columns of a group stay together where they can.
    """
    names = [_Measured.of(column) for column in which]

    def needed(columns: Sequence[_Measured], wrap: bool) -> int:
        return _needed([*names, *columns], len(names), wrap)

    tables: list[list[_Measured]] = []
    for group in ([_Measured.of(column) for column in group] for group in groups):
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
    return "\n\n".join(
        _drawn([*names, *columns], len(names), max(width, needed(columns, wrap=True)))
        for columns in tables or [[]]
    )


# ---- documents -----------------------------------------------------------------------------------


def _lines(columns: Sequence[Column]) -> list[list[str]]:
    """Return the headings, then the cells of each row."""
    headings = [column.heading.replace("\n", " ") for column in columns]
    rows = zip(*(column.cells for column in columns), strict=True)
    return [[sanitize.cut(cell, sanitize.CELL) for cell in line] for line in (headings, *rows)]


def _markdown_cell(cell: str) -> str:
    """Return a cell in which Markdown finds neither tags nor links."""
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


def latex(
    columns: Sequence[Column],
    which: int,
    caption: str = "",
    bold: Mapping[int, Sequence[int]] | None = None,
    environment: str = "",
) -> str:
    """Return a tabular, which needs the package booktabs; with a caption, a floating table.

    `bold`: place of a column -> the rows that are bold in it. `environment`: of the float, "table",
    or "table*" for the width of two columns.
    """
    import pandas as pd

    lines = [[_latex_cell(cell) for cell in line] for line in _lines(columns)]
    headings, rows = lines[0], lines[1:]
    style = pd.DataFrame(rows, columns=range(len(columns))).style.hide(axis="index")
    style = style.format_index(lambda place: headings[int(str(place))], axis="columns")
    for place, chosen in (bold or {}).items():
        props = ["textbf:--rwrap;" if row in chosen else "" for row in range(len(rows))]
        style = style.apply(lambda column, props=props: props, subset=[place])
    aligned = "l" * which + "r" * (len(columns) - which)
    if not caption:
        return str(style.to_latex(column_format=aligned, hrules=True)).rstrip("\n")
    text = style.to_latex(
        column_format=aligned,
        hrules=True,
        caption=latex_text(caption),
        environment=environment or "table",
        position="t",
        position_float="centering",
    )
    return str(text).rstrip("\n")


# ---- a whole answer ------------------------------------------------------------------------------


def where(provenance: Mapping[str, Any]) -> str:
    """Return the machine and the versions of an analysis' or a run's provenance in one line."""
    machine, versions = provenance.get("machine", {}), provenance.get("versions", {})
    commit = provenance.get("commit")
    cpu = machine.get("cpu")
    facts = [
        machine.get("gpu"),
        cpu and f"{cpu} ({machine.get('isa')}), {machine.get('cores')} cores",
        *(
            f"{name} {versions[name]}"
            for name in ("torch", "gcbench", "python")
            if name in versions
        ),
        commit and f"commit {commit[:10]}{'+' * commit.endswith('+')}",
        str(provenance.get("started", ""))[:10],
    ]
    return ", ".join(fact for fact in facts if fact)


def sentence(text: str, format: str, width: int) -> str:
    """Return a sentence beside tables: wrapped in the terminal, as it is in a document."""
    if format == "table":
        return textwrap.fill(text, width, break_long_words=False)
    return rf"\par {latex_text(text)}" if format == "latex" else text


def block(title: str, columns: Sequence[Column], which: int, format: str, width: int) -> str:
    """Return a table under its title, a line of text; the first `which` columns name a row."""
    if format == "table":
        heading = sentence(title, format, width)
        return f"{heading}\n\n{terminal(columns[:which], [columns[which:]], width)}"
    if format == "markdown":
        return f"**{title}**\n\n{markdown(columns, which)}"
    return f"{latex(columns, which)}\n{sentence(title, format, width)}"


def records(frame: DataFrame) -> list[dict[str, Any]]:
    """Return the lines of a frame as records, None for NaN; the index is left out."""
    columns = [plain_values(frame[name]) for name in frame]
    names = list(map(str, frame))
    return [dict(zip(names, line, strict=True)) for line in zip(*columns, strict=True)]


def plain_values(column: Series[Any]) -> list[Any]:
    """Return the values of a frame's column as Python objects, None for NaN."""
    return [None if value != value else value for value in column.tolist()]


def _plain(value: Any) -> Any:
    """Return `value`, None in place of a number that strict JSON cannot hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def csv_text(records: Sequence[Mapping[str, Any]]) -> str:
    """Return one line a record, lists as JSON and an empty cell for what is not known."""
    stream = io.StringIO()
    fields = list(dict.fromkeys(key for record in records for key in record))
    writer = csv.DictWriter(stream, fields, lineterminator="\n")
    writer.writerow({field: sanitize.csv_cell(field) for field in fields})
    for record in records:
        cells = {
            key: json.dumps(value) if isinstance(value, list | dict) else _plain(value)
            for key, value in record.items()
        }
        writer.writerow({key: sanitize.csv_cell(cell) for key, cell in cells.items()})
    return stream.getvalue().rstrip("\n")


def json_text(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the records as a JSON array: bytes are integers, what is not finite is null."""
    plain = [{key: _whole(key, _plain(value)) for key, value in one.items()} for one in records]
    return json.dumps(plain, indent=2, allow_nan=False)


def _whole(key: str, value: Any) -> Any:
    """Return a number of bytes as an integer; other values as they are."""
    is_bytes = "bytes" in key and isinstance(value, float)
    return round(value) if is_bytes else value
