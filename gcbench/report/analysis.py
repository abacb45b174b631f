"""The result of an analysis: tables with provenance, stored as JSON and Parquet, or as text.

A folder `results/analyses/<kind>-<hash of the settings>/` holds `analysis.json` (everything except
rows), and for each table `<table>.json` and `<table>.parquet`: tidy rows, one observation each, in
plain units (seconds, bytes, fractions). Unfinished work is in `ledger.jsonl`. `--json` prints all
of it as one document, which may leave tables out.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import io
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gcbench.core import files
from gcbench.core.errors import GcbenchError, UsageError, unknown
from gcbench.core.writing import explained, open_own, write_atomically
from gcbench.report import glossary
from gcbench.report.rendering import (
    LINES,
    Column,
    block,
    counted,
    csv_text,
    cut_lines,
    fitted,
    number,
    sentence,
    where,
)
from gcbench.results import sanitize
from gcbench.training import configuration

SCHEMA = 1
FORMATS = ("table", "markdown", "csv", "json", "latex")
HEAD = "analysis.json"
LEDGER = "ledger.jsonl"
PACKAGES = ("gcbench", "compressors", "tasks")
"""Packages in the digest of the code."""
MADE = "made"
"""The key of the ledger's first line."""

Value = str | bool | int | float | None
Row = dict[str, Value]


class MissingTableError(GcbenchError):
    """The file of an analysis does not contain a required table."""


class Shown(BaseModel):
    """How a column shows a field of the rows: its heading, and the factor on its values."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    field: str
    heading: str
    """With its unit; a line break where it may be two lines."""
    scale: float = 1.0
    """1e3 shows seconds as milliseconds."""


def shown(columns: Mapping[str, str | tuple[str, float]]) -> list[Shown]:
    """Return columns from field -> heading, or field -> (heading, factor on the values)."""
    result = []
    for field, column in columns.items():
        heading, scale = (column, 1.0) if isinstance(column, str) else column
        result.append(Shown(field=field, heading=heading, scale=scale))
    return result


class Table(BaseModel):
    """Tidy rows and their presentation.

    Numbers in the rows are finite or None; a failure is described in a text field of its row.
    """

    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=r"^[a-z0-9_]+$")
    title: str
    shown: list[Shown] = []
    """Columns in order. A table without any is not printed; pictures and programs read it."""
    which: int = 1
    """Number of first columns, which name a row and are aligned to the left."""
    by: str | None = None
    """A field with one printed table for each of its values."""
    brief: bool = False
    """Whether the short text shows this table, in place of the others."""
    notes: list[str] = []
    rows: list[Row] = Field(default=[], exclude=True)


class Analysis(BaseModel):
    """One finished analysis."""

    model_config = ConfigDict(extra="forbid")

    version: int = SCHEMA
    kind: str
    settings: dict[str, Any]
    """Everything that determines the result; its hash is in the folder's name."""
    command: str
    """The command line that repeats it."""
    provenance: dict[str, Any]
    answer: list[str] = []
    """Sentences before all tables, which answer the user's question."""
    conclusions: list[str] = []
    """Sentences after the tables."""
    tables: list[Table]
    failed: bool = False
    """Whether a claim that was checked does not hold."""

    @classmethod
    def of(
        cls,
        kind: str,
        settings: BaseModel,
        command: str,
        *,
        tables: Sequence[Table],
        conclusions: Sequence[str] = (),
        answer: Sequence[str] = (),
        failed: bool = False,
    ) -> Analysis:
        """Return an analysis made with these settings, here and now."""
        return cls(
            kind=kind,
            settings=settings.model_dump(mode="json"),
            command=command,
            provenance=provenance(),
            answer=[*answer],
            conclusions=[*conclusions],
            tables=[*tables],
            failed=failed,
        )

    @property
    def name(self) -> str:
        """The folder's name."""
        return f"{self.kind}-{digest(self.settings)}"

    @property
    def elsewhere(self) -> str:
        """Part of a message: the processor that made it, if it is not this machine's, else ""."""
        machine = self.provenance.get("machine") or {}
        if _processor(machine) == _processor(configuration.machine()):
            return ""
        return f", made on another processor ({machine.get('cpu')})"

    def table(self, name: str) -> Table:
        """Return the table of that name.

        Raises:
            MissingTableError: it is not there.
        """
        for table in self.tables:
            if table.name == name:
                return table
        raise MissingTableError(
            f"{self.name}: the table `{name}` is not in its file; repeat the analysis with: "
            f"{self.command}"
        )


def digest(settings: Mapping[str, Any]) -> str:
    """Return the first ten hex digits of the SHA-256 of these settings as sorted JSON."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def code(module: ModuleType) -> str:
    """Return the first ten hex digits of the SHA-256 of this package's code and of a module's.

    It covers the names and contents of all Python files of gcbench, its compressors and tasks, and
    the module's file. Kernels are left out: they give the same bytes as the Python code.
    """
    total = hashlib.sha256()
    folders = [Path(str(importlib.import_module(name).__file__)).parent for name in PACKAGES]
    files = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    for path in (*files, Path(str(module.__file__))):
        total.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:10]


def provenance() -> dict[str, Any]:
    """Return time, commit, versions and machine of an analysis."""
    return {
        "started": now(),
        "commit": configuration.commit(),
        "versions": configuration.versions(),
        "machine": configuration.machine(),
    }


def _processor(machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a machine on which times and bits depend."""
    return {part: machine.get(part) for part in ("cpu", "isa", "gpu")}


# ---- disk ----------------------------------------------------------------------------------------


class Ledger:
    """Finished parts of long work, so that a repeated command continues an interrupted one.

    A record is a JSON object under a key, one line of the file. A crash of the process loses no
    record; a crash of the machine may lose the last seconds, because the file is not synced. The
    first line has the start time, the digest of the code, and the processor.
    """

    def __init__(self, folder: Path, code: str = "") -> None:
        self.path = folder / LEDGER
        self._records: dict[str, Any] = {}
        self._machine = _processor(configuration.machine())
        self._origin: dict[str, Any] = {
            "started": now(),
            "code": code,
            "machine": self._machine,
        }
        self.afresh = False
        """Whether finished work is to be repeated (`--force`)."""

    @contextlib.contextmanager
    def open(self, *, afresh: bool = False) -> Iterator[Ledger]:
        """Lock the ledger for this process; `afresh` deletes its records.

        Raises:
            GcbenchError: another process has it, another processor began it (times and bits depend
                on the processor), or the folder cannot be written.
        """
        self.afresh = afresh
        with explained(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = open_own(self.path, "a+b", 0)
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise GcbenchError(
                    f"{self.path.parent} is being written by another gcbench process; wait for it"
                ) from None
            if afresh:
                file.truncate(0)
            file.seek(0)
            whole = 0
            for line in file:
                try:
                    entry = json.loads(line)
                except ValueError:
                    break  # cut short by a crash
                self._records[entry["key"]] = entry["record"]
                whole += len(line)
            file.truncate(whole)
            self._file = file
            self._origin = self._records.get(MADE, self._origin)
            then = self._origin.get("machine", self._machine)
            if then != self._machine:
                raise GcbenchError(
                    f"{self.path.parent} was begun on {then}, this machine is {self._machine}: "
                    "continue it there, or start over with --force"
                )
            yield self

    @property
    def started(self) -> str:
        """The start time of this work, in UTC."""
        return str(self._origin["started"])

    @property
    def code(self) -> str:
        """The digest of the code that began it, "" for an analysis that is always repeated."""
        return str(self._origin["code"])

    def __contains__(self, key: str) -> bool:
        return key in self._records

    def __getitem__(self, key: str) -> Any:
        return self._records[key]

    def __setitem__(self, key: str, record: Any) -> None:
        """Store a record in the file, or raise GcbenchError."""
        if MADE not in self._records:
            self._records[MADE] = self._origin
            self._write(MADE, self._origin)
        self._records[key] = record
        self._write(key, record)

    def _write(self, key: str, record: Any) -> None:
        line = (json.dumps({"key": key, "record": record}, allow_nan=False) + "\n").encode()
        with explained(self.path):
            while line:  # a full disk may take a part
                line = line[self._file.write(line) :]


def save(analysis: Analysis, results: Path) -> Path:
    """Write the analysis below `results` and return its folder; `analysis.json` is written last.

    It contains digests of itself and of the tables' files (`gcbench.core.files`).

    Raises:
        GcbenchError: the folder cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = results / analysis.name
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for table in analysis.tables:
        fields = dict.fromkeys(field for row in table.rows for field in row)
        columns = {field: [row.get(field) for row in table.rows] for field in fields}
        buffer = io.BytesIO()
        pq.write_table(pa.table(columns), buffer)
        write_atomically(folder / f"{table.name}.parquet", buffer.getvalue())
        lines = ",\n".join(json.dumps(row, allow_nan=False) for row in table.rows)
        write_atomically(folder / f"{table.name}.json", f"[\n{lines}\n]\n".encode())
    names = [f"{table.name}.{kind}" for table in analysis.tables for kind in ("json", "parquet")]
    listed = {name: files.hash_file(folder / name) for name in names}
    sealed = files.sealed({**analysis.model_dump(), files.FILES: listed})
    head = json.dumps(sealed, indent=2, allow_nan=False) + "\n"
    write_atomically(folder / HEAD, head.encode())
    (folder / LEDGER).unlink(missing_ok=True)
    return folder


def finished(folder: Path) -> bool:
    """Return whether a folder has an analysis that no later command began to repeat."""
    begun = folder / LEDGER
    return (folder / HEAD).exists() and not (begun.exists() and begun.stat().st_size)


def load(folder: Path) -> Analysis:
    """Read what `save` wrote.

    Raises:
        UsageError: there is none.
        GcbenchError: it is damaged, or of another schema.
    """
    path = folder / HEAD
    if not path.exists():
        raise UsageError(f"no analysis in {folder} (its folder holds {HEAD} once it is finished)")
    remedy = "delete that folder and run its command again"
    try:
        head = json.loads(files.read_text(path))
        if isinstance(head, dict) and head.get("version") == SCHEMA:
            files.check_folder(path, head, remedy)
            head = {k: v for k, v in head.items() if k not in (files.DIGEST, files.FILES)}
        analysis = _checked(head, path, remedy)
        for table in analysis.tables:
            rows = json.loads(files.read_text(folder / f"{table.name}.json"))
            table.rows = sanitize.plain(rows, f"{folder}, {table.name}", keep="\n")
    except (OSError, ValueError, RecursionError) as error:
        raise GcbenchError(f"{folder} cannot be read ({error}); {remedy}") from None
    return analysis


def parse(data: Mapping[str, Any], source: Path) -> Analysis:
    """Return an analysis from one JSON object, as `document` makes it; tables may be left out.

    `source` is the file that it was read from, for errors.

    Raises:
        GcbenchError: it is damaged, or of another schema, or has tables without rows.
    """
    remedy = "run its command again with --json"
    analysis = _checked(data, source, remedy)
    for table, item in zip(analysis.tables, data["tables"], strict=True):
        if "rows" not in item:
            raise GcbenchError(f"{source}: the table `{table.name}` has no rows; {remedy}")
    return analysis


def _checked(data: Any, source: Path, remedy: str) -> Analysis:
    version = data.get("version") if isinstance(data, Mapping) else None
    if version != SCHEMA:
        raise GcbenchError(
            f"{source}: schema {version!r}, but this gcbench reads {SCHEMA}; {remedy}"
        )
    try:
        return Analysis.model_validate(sanitize.plain(data, str(source), keep="\n"))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise GcbenchError(f"{source} cannot be read ({place}: {first['msg']}); {remedy}") from None


# ---- text ----------------------------------------------------------------------------------------


def cell(value: Value, scale: float = 1.0) -> str:
    """Return a value as text, "-" for None."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if isinstance(value, int) and scale == 1.0:
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    return number(value, scale)


def columns(table: Table, rows: Sequence[Row]) -> list[Column]:
    """Return the printed columns of these rows; columns without any value are left out.

    The first `table.which` columns always stay.
    """
    every = [
        Column(shown.heading, [cell(row.get(shown.field), shown.scale) for row in rows])
        for shown in table.shown
    ]
    return [
        column
        for place, column in enumerate(every)
        if place < table.which or any(text != "-" for text in column.cells)
    ]


def parts(analysis: Analysis, *, brief: bool = False) -> Iterator[tuple[Table, str, list[Row]]]:
    """Yield the printed tables of the short or of the full text as (table, title, rows).

    Tables without columns or rows are left out.
    """
    for table in analysis.tables:
        if table.brief != brief or not table.shown or not table.rows:
            continue
        if table.by is None:
            yield table, table.title, table.rows
            continue
        for value in dict.fromkeys(row.get(table.by) for row in table.rows):
            alike = [row for row in table.rows if row.get(table.by) == value]
            yield table, f"{table.title}: {cell(value)}", alike


def document(analysis: Analysis) -> dict[str, Any]:
    """Return the analysis with its rows as one JSON object, without the short tables."""
    tables = [table for table in analysis.tables if not table.brief]
    head = analysis.model_dump()
    head["tables"] = [
        {**table.model_dump(exclude={"brief"}), "rows": table.rows} for table in tables
    ]
    return head


def render(
    analysis: Analysis,
    format: str = "table",
    width: int | None = None,
    *,
    details: bool = True,
) -> str:
    """Return the analysis as text in one of `FORMATS`, without a final line break.

    `width`, in columns, limits the format "table"; None takes the width of the terminal, or 100 if
    the output is not a terminal. CSV has the rows of the first table, in plain units. Without
    `details` the format "table" has at most `rendering.LINES` lines: the answer, and the short
    table or the beginning of the first one.

    Raises:
        UsageError: an unknown format.
    """
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    if format == "json":
        return json.dumps(document(analysis), indent=2, allow_nan=False)
    if format == "csv":
        return csv_text(analysis.tables[0].rows)
    width = width or shutil.get_terminal_size((100, 24)).columns
    if format == "table" and not details:
        return _brief(analysis, width)

    blocks = [sentence(text, format, width) for text in analysis.answer]
    for table, title, rows in parts(analysis):
        blocks.append(block(title, columns(table, rows), table.which, format, width))
        if rows[-1] is table.rows[-1]:
            blocks += [sentence(note, format, width) for note in table.notes]
    ends = [*analysis.conclusions, where(analysis.provenance) + "."]
    if format == "table" and any(len(rows) > glossary.LONG for _, _, rows in parts(analysis)):
        ends.append(glossary.POINTER)
    return "\n\n".join([*blocks, *(sentence(end, format, width) for end in ends)])


VERDICT = "verdict"
"""The field of a row that says whether a claim holds."""


def _brief(analysis: Analysis, width: int) -> str:
    """Return the answer and one table in at most `LINES` lines, and what was left out.

    Without an answer there are the counts of verdicts, or else the first conclusion. Claims that do
    not hold come first.
    """
    every = [*parts(analysis)]
    counts = Counter(row[VERDICT] for _, _, rows in every for row in rows if row.get(VERDICT))
    verdicts = [
        f"Verdicts: {', '.join(f'{count} {verdict}' for verdict, count in counts.items())}."
    ]
    answer = analysis.answer or (verdicts if counts else analysis.conclusions[:1])
    blocks = [sentence(text, "table", width) for text in answer]
    hidden = ["assumptions", "evidence"]
    for table, title, rows in ([*parts(analysis, brief=True)] or every)[:1]:
        if any(VERDICT in row for row in rows):
            title = table.title
            rows = sorted(table.rows, key=lambda row: str(row.get(VERDICT)).startswith("holds"))
        title = sentence(title, "table", width)
        notes = [sentence(note, "table", width) for note in table.notes if table.brief]
        used = sum(len(text.splitlines()) + 1 for text in (*blocks, title, *notes))
        drawn = columns(table, rows)
        rest = sorted(drawn[table.which :], key=lambda column: column.heading != VERDICT)
        shown = fitted(drawn[: table.which], rest, width, LINES - used - 2)
        blocks += [title, shown.text, *notes]
        if left := len(table.rows) - shown.rows:
            hidden.insert(0, f"{left} of {len(table.rows)} rows")
    hidden.append(counted(len({table.name for table, _, _ in every}), "table"))
    blocks.append(sentence(f"Not shown: {', '.join(hidden)}. Add --details.", "table", width))
    return cut_lines("\n\n".join(blocks))
