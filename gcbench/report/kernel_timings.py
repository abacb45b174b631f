"""The table of kernel timings: `make bench` measures and saves them, `gcbench kernels` shows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gcbench.core import files
from gcbench.core.errors import UsageError
from gcbench.report.rendering import (
    LINES,
    Column,
    block,
    counted,
    csv_text,
    fitted,
    number,
    sentence,
    where,
)

COPIED = 8
"""Bytes per element that `copy_` of float32 moves: one read and one written."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class Row(BaseModel):
    """One operation, or one part of a method, timed on one backend."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    op: str
    backend: str
    device: str
    size: str
    elements: Count
    tensors: Count
    threads: Count
    bytes_per_element: Positive
    """Bytes that must be read and written for each element: each input and output once."""
    gb_per_second: Positive
    """10^9 bytes of the float32 gradient a second."""
    copy_seconds: Positive
    """Median of `copy_` of as many elements, timed before each round."""
    around_seconds: Positive | None = None
    """Median of what a short call spends outside of its native functions."""
    seconds: Positive
    """Median."""
    iqr: float
    fastest: Positive
    rounds: Count

    @property
    def where(self) -> tuple[str, str, int]:
        """The fields that all rows of one table share."""
        return self.size, self.device, self.threads

    @property
    def of_copy(self) -> float:
        """How many times as fast as `copy_` of the same elements."""
        return self.copy_seconds / self.seconds

    @property
    def of_floor(self) -> float:
        """Bytes that must move, a second, as a share of those that `copy_` moves a second."""
        return self.of_copy * self.bytes_per_element / COPIED


class Timings(BaseModel):
    """The rows of one run of the benchmarks, in its order, and where it was made."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    machine: dict[str, Any]
    versions: dict[str, str]
    commit: str | None
    date: str
    rows: list[Row]


def load(path: Path) -> Timings:
    """Read what `make bench`, `pytest --benchmark-json` or `gcbench kernels --json` has written.

    Raises:
        UsageError: there is no such file, or it holds something else.
    """
    try:
        document = json.loads(files.read_text(path))
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror}; `make bench` in a checkout writes results/kernels.json"
        ) from None
    except (ValueError, RecursionError):
        raise UsageError(f"{path} is not JSON; name a file that `make bench` wrote") from None
    try:
        flat = _flat(document) if "benchmarks" in document else document
        return Timings.model_validate(flat)
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (KeyError, TypeError) as error:
        reason = repr(error)
    raise UsageError(f"{path} holds no timings of `make bench` ({reason})")


def _flat(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return pytest-benchmark's document as `gcbench kernels --json` prints it."""
    machine, commit = dict(document["machine_info"]), document["commit_info"]
    rows = [
        {
            **benchmark["extra_info"],
            "seconds": benchmark["stats"]["median"],
            "iqr": benchmark["stats"]["iqr"],
            "fastest": benchmark["stats"]["min"],
            "rounds": benchmark["stats"]["rounds"],
        }
        for benchmark in document["benchmarks"]
    ]
    return {
        "versions": machine.pop("versions"),
        "machine": machine,
        "commit": commit["id"] and commit["id"] + "+" * bool(commit["dirty"]),
        "date": document["datetime"][:10],
        "rows": rows,
    }


# ---- text ----------------------------------------------------------------------------------------

NAMES = ("op", "backend")
NUMBERS = ("median ms", "GB/s", "x copy_", "x eager", "% of floor", "us around")
NOTE = (
    "GB/s: of the float32 gradient, 4 bytes per element. x copy_: times as fast as copy_ of the "
    "same elements, timed before each round. x eager: times as fast as the same in eager torch, "
    "written as in research code. % of floor: 100 where bytes that must move (each input read and "
    "each output written once) move as fast as those of copy_; more is possible, as copy_ reads "
    "what it overwrites. us around: microseconds that a short call spends outside of the native "
    "function."
)


def _cells(row: Row, eager: float | None) -> list[str]:
    return [
        row.op,
        row.backend,
        number(1e3 * row.seconds),
        number(row.gb_per_second),
        number(row.of_copy),
        "-" if eager is None or row.backend == "eager" else number(eager / row.seconds),
        number(100 * row.of_floor),
        "-" if row.around_seconds is None else number(1e6 * row.around_seconds),
    ]


def tables(timings: Timings) -> list[tuple[str, list[Column]]]:
    """Return title and columns of a table for each size, device and number of threads."""
    eager = {(row.op, row.where): row.seconds for row in timings.rows if row.backend == "eager"}
    result = []
    for place in dict.fromkeys(row.where for row in timings.rows):
        alike = [row for row in timings.rows if row.where == place]
        cells = zip(*(_cells(row, eager.get((row.op, place))) for row in alike), strict=True)
        columns = list(zip((*NAMES, *NUMBERS), map(list, cells), strict=True))
        if all(row.around_seconds is None for row in alike):
            del columns[-1]
        result.append((_place(alike[0]), [Column(*column) for column in columns]))
    return result


def notes(timings: Timings) -> list[str]:
    """Return two sentences: machine and versions, and the meaning of the columns."""
    facts = timings.model_dump(include={"machine", "versions", "commit"})
    return [where({**facts, "started": timings.date}) + ".", NOTE]


def _json(timings: Timings) -> str:
    """Return a document that `load` reads, with one row a line and times to five digits."""
    head = timings.model_dump(exclude={"rows"})
    lines = [
        json.dumps(
            {
                key: float(f"{value:.5g}") if isinstance(value, float) else value
                for key, value in row.model_dump(exclude_none=True).items()
            }
        )
        for row in timings.rows
    ]
    begin = json.dumps(head, indent=2).removesuffix("\n}")
    return begin + ',\n  "rows": [\n    ' + ",\n    ".join(lines) + "\n  ]\n}"


OTHERS = ("eager", "reference", "torch")
"""Backends that the short table leaves out: what the kernels are compared with."""


def _brief(rows: Sequence[Row], width: int) -> str:
    """Return the fastest kernel of each method's parts at the largest size, on fewest threads."""
    place = max(rows, key=lambda row: (row.elements, -row.threads)).where
    best: dict[str, Row] = {}
    here = [row for row in rows if row.where == place]
    for row in sorted(here, key=lambda row: (row.backend in OTHERS, row.seconds)):
        best.setdefault(row.op, row)
    names = list(dict.fromkeys(row.op for row in rows if row.op in best))
    methods = [name.removesuffix(".encode") for name in names if name.endswith(".encode")]
    if methods:
        columns = [Column("method", methods)]
        pieces = (name.partition(".") for name in names)
        for part in dict.fromkeys(part for method, _, part in pieces if method in methods):
            kernels = [best.get(f"{method}.{part}") for method in methods]
            columns.append(Column(part.replace("_", "\n"), [_ratio(row) for row in kernels]))
    else:
        columns = [Column("op", names), Column("x copy_", [_ratio(best[name]) for name in names])]
        columns.append(Column("median ms", [number(1e3 * best[name].seconds) for name in names]))
    title = sentence(
        f"Speed as a multiple of copy_ of the same float32 gradient; {_place(best[names[0]])}, "
        "fastest backend.",
        "table",
        width,
    )
    table = fitted(columns[:1], columns[1:], width, LINES - len(title.splitlines()) - 4)
    more = sentence(f"Not shown: other rows ({len(rows):,} in all). Add --details.", "table", width)
    return f"{title}\n\n{table.text}\n\n{more}"


def _ratio(row: Row | None) -> str:
    return "-" if row is None else number(row.of_copy)


def _place(row: Row) -> str:
    """Return the size, device and threads of a row in words."""
    text = f"{row.size}: {row.elements:,} elements"
    text += f" in {row.tensors} tensors" if row.tensors > 1 else ""
    return f"{text}, {counted(row.threads, 'thread') if row.device == 'cpu' else row.device}"


def render(
    timings: Timings, format: str = "table", width: int | None = None, *, details: bool = True
) -> str:
    """Return the timings as text in a format of tables, without a final line break.

    `width`, in columns, limits the format "table"; None takes the width of the terminal, or 100 if
    the output is not a terminal. Wider tables are split, and no cell is cut. Without `details` the
    format "table" has at most `rendering.LINES` lines.

    Raises:
        UsageError: there are no rows.
    """
    if not timings.rows:
        raise UsageError("no timings to show")
    if format == "json":
        return _json(timings)
    if format == "csv":
        return csv_text([row.model_dump() for row in timings.rows])
    width = width or shutil.get_terminal_size((100, 24)).columns
    if format == "table" and not details:
        return _brief(timings.rows, width)
    shown = [block(title, columns, len(NAMES), format, width) for title, columns in tables(timings)]
    return "\n\n".join([*shown, *(sentence(note, format, width) for note in notes(timings))])
