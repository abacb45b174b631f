"""Files of rows: many finished runs in one small Parquet file, which can be committed.

A row is a run's summary and its evaluations. Numbers and strings are columns; what is nested
(config, provenance, phases, evaluations, ...) is JSON text in a column of its name. A file contains
a digest of all its bytes, which every reader compares.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import sys
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import filelock

from gcbench.core import files
from gcbench.core.errors import GcbenchError
from gcbench.core.writing import explained, write_atomically
from gcbench.results.sanitize import is_plain_text

MARK = "gcbench"
"""The key in Parquet's metadata by which files of this module are recognized."""
SEALED = "gcbench rows 2 sha256 "
"""What stands under `MARK`, before the file's SHA-256 with 64 zeros in place of that digest."""
PLAIN = "gcbench rows 1"
"""What stands under `MARK` in files without a digest, such as those of other programs."""
MOST_ROWS = 1_000_000
"""Rows of a file that are read: equal rows take almost no space in Parquet, but memory here."""
_NONE = "0" * 64
_NULLS = "nulls"
"""A column with the names of the row's values that are null, as JSON: a column that the row does
not have is null in Parquet, too. A null test loss was not finite."""
StoredRun = dict[str, Any]


def row(
    summary: Mapping[str, Any], evaluations: Sequence[Mapping[str, Any]], suite: str
) -> StoredRun:
    """Return the row of a finished run.

    `evaluations` are its records of kind "eval", of which null cells are left out, except a loss
    beside an accuracy: it was not finite. `suite` is the suite for which it was made, as
    name/version, or "".
    """
    curve = [
        {k: v for k, v in record.items() if v is not None or _not_finite(record, k)}
        for record in evaluations
    ]
    fields = {
        key: value for key, value in summary.items() if key not in (files.DIGEST, files.FILES)
    }
    return {**fields, "suite": suite, "evaluations": curve}


def _not_finite(record: Mapping[str, Any], key: str) -> bool:
    """Return whether a null is a loss that was measured: the accuracy beside it has a value."""
    split, _, kind = key.rpartition("_")
    return kind == "loss" and record.get(f"{split}_accuracy") is not None


def holds(path: Path) -> bool:
    """Return whether a file is one of rows, or cannot be read as Parquet.

    Reading the latter raises the error: a damaged file of rows looks like any other file. False for
    Parquet files of other contents, and for a pipe, a socket or a device.
    """
    import pyarrow as pa
    from pyarrow import parquet

    if files.is_special(path):
        return False
    try:
        return _mark(parquet.read_metadata(path)) is not None
    except (OSError, ValueError, pa.ArrowException):
        return True


def _mark(metadata: Any) -> str | None:
    """Return what stands under `MARK`; None if that is not the mark of a file of rows."""
    mark = ((metadata.metadata or {}).get(MARK.encode()) or b"").decode(errors="replace")
    return mark if mark == PLAIN or mark.startswith(SEALED) else None


def _opened(path: Path) -> Any:
    """Return the Parquet file at a path, after its digest was compared."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        data = files.read_bytes(path)
        file = parquet.ParquetFile(pa.BufferReader(data))
        mark = _mark(file.metadata)
        if mark is not None and mark.startswith(SEALED):
            blank = data.replace(mark.encode(), (SEALED + _NONE).encode())
            if hashlib.sha256(blank).hexdigest() != mark.removeprefix(SEALED):
                raise GcbenchError(
                    f"{path} does not match its digest: it was damaged or edited. Restore it from "
                    "a copy, or make its runs again"
                )
    except (OSError, ValueError, pa.ArrowException) as error:
        raise GcbenchError(f"{path} cannot be read as Parquet: {error}") from error
    if mark is None:
        raise GcbenchError(
            f"{path} holds no rows of gcbench runs; `gcbench run --rows` writes them"
        )
    if (count := _row_count(file.metadata)) > MOST_ROWS:
        raise GcbenchError(
            f"{path} has {count:,} rows; at most {MOST_ROWS:,} are read. Split it into several "
            "files"
        )
    return file


def _row_count(metadata: Any) -> int:
    """Return the number of rows that reading a file yields; its own sum may be wrong."""
    groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
    return max(int(metadata.num_rows), sum(int(group.num_rows) for group in groups))


class _Decoder:
    """Decodes JSON text of rows; nothing may change the results, which rows may share.

    Rows repeat most of what they contain: with copies, 100,000 rows took 2.8 GB. `share_seeds`:
    the configs of all seeds of a configuration are one object, without the seed.
    """

    def __init__(self, *, share_seeds: bool) -> None:
        self.share_seeds = share_seeds
        self.seen: dict[tuple[str, str], Any] = {}
        self.decode = json.JSONDecoder(object_pairs_hook=_interned).decode

    def __call__(self, column: str, text: str) -> Any:
        """Return the value of a column's text; ValueError or TypeError if it is not JSON text."""
        seedless = text
        if column == "config" and self.share_seeds and text.count('"seed":') == 1:
            seedless = _SEED.sub("", text, count=1)
        value = self.seen.get((column, seedless), self)
        if value is self:
            value = self.decode(text)
            if seedless != text:
                if not isinstance(value, dict) or type(value.get("seed")) is not int:
                    return value  # that seed is a field of something else
                value = {key: value for key, value in value.items() if key != "seed"}
            if len(self.seen) < _MOST_SEEN:
                self.seen[column, seedless] = value
        return value


def _interned(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {sys.intern(key): value for key, value in pairs}


_SEED = re.compile(r'"seed": ?[0-9]+')
_MOST_SEEN = 200_000


def shared(path: Path, faults: list[GcbenchError]) -> Iterator[tuple[int, StoredRun, bool]]:
    """Yield the rows of a file with their numbers, from 1; nothing if the file does not exist.

    For readers that change nothing: rows share what is equal in them, and configs leave the seed
    out. `evaluations` are a `PackedText` of JSON (`decoded` decodes it). The last value is whether
    all text of the row, except the evaluations, is known to be printable. A row with a column that
    cannot be decoded is left out, and its error is appended to `faults`.

    Raises:
        UsageError: the path is a pipe, a socket or a device.
        GcbenchError: the file cannot be read, holds something else, or does not match its digest.
    """
    yield from _each(path, faults, _Decoder(share_seeds=True), encoded=("evaluations",))


def _each(
    path: Path, faults: list[GcbenchError], decode: _Decoder, encoded: Collection[str]
) -> Iterator[tuple[int, StoredRun, bool]]:
    """Yield the rows of a file with their numbers, from 1; nothing if the file does not exist.

    A row with a column that cannot be decoded is left out, and its error is appended to `faults`.
    """
    if not path.exists() and not path.is_symlink():
        return
    file = _opened(path)
    schema = file.schema_arrow
    nested = {field.name for field in schema if (field.metadata or {}).get(b"json") == b"1"}
    nested = (nested | {_NULLS}) - {*encoded}
    first = 1
    for batch in _batches(path, file):
        wrong: dict[int, GcbenchError] = {}
        unprintable: set[int] = set()
        columns: dict[str, list[Any]] = {}
        for name in batch.schema.names:
            values = batch.column(name).to_pylist()
            if name not in encoded:
                texts = {value for value in values if type(value) is str}
                if odd := {text for text in texts if not is_plain_text(text)}:
                    odd_rows = (i for i, v in enumerate(values) if type(v) is str and v in odd)
                    unprintable.update(odd_rows)
            else:
                values = packed(values)
            if name in nested:
                values, errors = _decoded(decode, name, values)
                for i, (value, error) in errors.items():
                    wrong.setdefault(i, _not(path, first + i, name, "JSON text", value, error))
            if any(value is not None for value in values):
                columns[name] = values
        nulls = columns.pop(_NULLS, None)
        lines = zip(*columns.values(), strict=True) if columns else [()] * batch.num_rows
        for i, line in enumerate(lines):
            record: StoredRun = {
                name: value for name, value in zip(columns, line, strict=True) if value is not None
            }
            missing = nulls[i] if nulls is not None and nulls[i] is not None else ()
            if i not in wrong and missing and not _are_names(missing):
                wrong[i] = _not(path, first + i, _NULLS, "a JSON list of names", missing)
            if i in wrong:
                faults.append(wrong[i])
                continue
            row = {**dict.fromkeys(missing), **record} if missing else record
            yield first + i, row, i not in unprintable
        first += batch.num_rows


class PackedText(NamedTuple):
    """One text of a column, which is stored compressed: evaluations are most of a file."""

    column: _PackedColumn
    place: int

    def read(self) -> str:
        """Return the text. Reading texts in their order decompresses each batch once."""
        text, ends = _unpacked(self.column)
        return text[ends[self.place] : ends[self.place + 1]]


@dataclass(frozen=True, eq=False)
class _PackedColumn:
    data: bytes
    size: int
    """Bytes without compression."""
    ends: Sequence[int]
    """Where texts end, in characters; the first value is 0."""


def packed(values: Sequence[Any]) -> list[Any]:
    """Return the values of a column with each text replaced by its `PackedText`."""
    import pyarrow as pa

    texts = [value if type(value) is str else "" for value in values]
    data = "".join(texts).encode("utf-8", "surrogatepass")
    ends = array("Q", accumulate(map(len, texts), initial=0))
    column = _PackedColumn(pa.compress(data, "zstd", asbytes=True), len(data), ends)
    return [
        PackedText(column, place) if type(value) is str else value
        for place, value in enumerate(values)
    ]


@lru_cache(maxsize=4)
def _unpacked(column: _PackedColumn) -> tuple[str, Sequence[int]]:
    import pyarrow as pa

    data = pa.decompress(column.data, column.size, "zstd", asbytes=True)
    return data.decode("utf-8", "surrogatepass"), column.ends


def _decoded(
    decode: _Decoder, column: str, values: list[Any]
) -> tuple[list[Any], dict[int, tuple[Any, Exception]]]:
    """Return the values of a column of JSON text, and of each wrong one its place and error."""
    results: dict[str, Any] = {}
    errors: dict[int, tuple[Any, Exception]] = {}
    for i, value in enumerate(values):
        if value is None or (type(value) is str and value in results):
            continue
        try:
            results[value] = decode(column, value)
        except (TypeError, ValueError, RecursionError) as error:
            errors[i] = value, error
            values[i] = None
    return [None if value is None else results[value] for value in values], errors


def _not(
    path: Path, number: int, column: str, expected: str, value: Any, error: Exception | None = None
) -> GcbenchError:
    """Return the error of a row with another value than expected."""
    why = "" if error is None else f" ({error})"
    return GcbenchError(
        f"{path}, row {number}, column `{column}`: {expected} expected, not {_brief(value)}{why}"
    )


def _batches(path: Path, file: Any) -> Iterator[Any]:
    """Yield the rows of a Parquet file a few thousand at a time: texts take much memory."""
    import pyarrow as pa

    try:
        yield from file.iter_batches(batch_size=2048)
    except (OSError, pa.ArrowException) as error:
        raise GcbenchError(f"{path} cannot be read as Parquet: {error}") from error


def decoded(text: Any, where: str) -> Any:
    """Return the value of a column that `shared` left as JSON text; `where` names its row.

    Raises:
        GcbenchError: it is not JSON text.
    """
    if isinstance(text, PackedText):
        text = text.read()
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GcbenchError(f"{where}: JSON text expected, not {_brief(text)} ({error})") from error


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _brief(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:59] + '…'}"


def read(path: Path) -> list[StoredRun]:
    """Return the rows of a file in their order; an empty list if it does not exist.

    Raises:
        UsageError: the path is a pipe, a socket or a device.
        GcbenchError: it cannot be read, holds something else, does not match its digest, or a row
            of it cannot be decoded.
    """
    faults: list[GcbenchError] = []
    decoder = _Decoder(share_seeds=False)
    records = [row for _, row, _ in _each(path, faults, decoder, encoded=())]
    if faults:
        raise faults[0]
    return records


def write(path: Path, rows: Sequence[StoredRun]) -> None:
    """Replace the file by these rows, atomically. It gets a digest of its bytes.

    A symbolic link stays, and the file that it leads to is replaced.

    Raises:
        GcbenchError: it cannot be written.
    """
    import pyarrow as pa
    from pyarrow import parquet

    fields, arrays = [], []
    nulls = [[key for key, value in one.items() if value is None] for one in rows]
    rows = [
        {**one, _NULLS: missing} if missing else one
        for one, missing in zip(rows, nulls, strict=True)
    ]
    for key in dict.fromkeys(key for one in rows for key in one):
        values = [one.get(key) for one in rows]
        if _fits_a_column(values):
            fields.append(pa.field(key, pa.infer_type(values)))
        else:
            values = [None if v is None else json.dumps(v, allow_nan=False) for v in values]
            fields.append(pa.field(key, pa.string(), metadata={"json": "1"}))
        arrays.append(pa.array(values, fields[-1].type))
    buffer = io.BytesIO()
    schema = pa.schema(fields)
    with parquet.ParquetWriter(buffer, schema, compression="zstd") as file:
        file.write_table(pa.table(arrays, schema=schema))
        file.add_key_value_metadata({MARK: SEALED + _NONE})
    blank = buffer.getvalue()
    sealed = SEALED + hashlib.sha256(blank).hexdigest()
    path = _target(path)
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, blank.replace((SEALED + _NONE).encode(), sealed.encode()))


def _target(path: Path) -> Path:
    """Return the file that a path leads to, through symbolic links: all its names share a lock."""
    return Path(os.path.realpath(path))


_NUMBERS = {int, float}


def _fits_a_column(values: Sequence[Any]) -> bool:
    """Return whether values are numbers, or all of one plain type; others are stored as JSON."""
    kinds = {type(value) for value in values} - {type(None)}
    if kinds <= _NUMBERS:  # a mixed column is float64, which has every integer below 2^53
        return all(type(value) is not int or abs(value) < 2**53 for value in values)
    return len(kinds) == 1 and kinds <= {str, bool}


def relabel(path: Path, suite: str, belongs: Callable[[StoredRun], bool]) -> int:
    """Give rows of other versions of a suite the label `suite`, name/version, if they `belong`.

    Return how many got it. A row of another version belongs if this version would make the same
    run: a new version need not repeat it.

    Raises:
        GcbenchError: the file cannot be read or written.
    """
    name = suite.partition("/")[0]
    if not path.exists():
        return 0
    with _locked(path):
        records, count = read(path), 0
        for one in records:
            label = str(one.get("suite") or "")
            if label != suite and label.partition("/")[0] == name and belongs(one):
                one["suite"] = suite
                count += 1
        if count:
            write(path, records)
    return count


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other processes from changing the file, whose folder is made if it is missing."""
    path = _target(path)
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path.with_name(f".{path.name}.lock"))
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def add(path: Path, new: StoredRun) -> None:
    """Add a row to a file; a row of the same config is replaced.

    Several processes may add to one file at the same time.

    Raises:
        GcbenchError: the file cannot be read or written.
    """
    with _locked(path):
        others = [one for one in read(path) if one.get("config_hash") != new.get("config_hash")]
        write(path, [*others, new])
