"""Files of rows: many finished runs in one small Parquet file, which can be committed.

A row is a run's summary and its evaluations. Numbers and strings are columns; what is nested
(config, provenance, phases, evaluations, ...) is JSON text in a column of its name.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import filelock

from gcbench.core.errors import GcbenchError
from gcbench.training.store import explained, write_atomically

KIND = b"gcbench rows 1"
"""The value in Parquet's metadata by which files of this module are recognized."""
_MARK = b"gcbench"
_NULLS = "nulls"
"""A column with the names of the row's values that are null, as JSON: a column that the row does
not have is null in Parquet, too. A null test loss was not finite."""
Row = dict[str, Any]


def row(summary: Mapping[str, Any], evaluations: Sequence[Mapping[str, Any]], suite: str) -> Row:
    """Return the row of a finished run.

    `evaluations` are its records of kind "eval", of which null cells are left out, except a loss
    beside an accuracy: it was not finite. `suite` is the suite for which it was made, as
    name/version, or "".
    """
    curve = [
        {k: v for k, v in record.items() if v is not None or _not_finite(record, k)}
        for record in evaluations
    ]
    return {**summary, "suite": suite, "evaluations": curve}


def _not_finite(record: Mapping[str, Any], key: str) -> bool:
    """Return whether a null is a loss that was measured: the accuracy beside it has a value."""
    split, _, kind = key.rpartition("_")
    return kind == "loss" and record.get(f"{split}_accuracy") is not None


def holds(path: Path) -> bool:
    """Return whether a Parquet file holds rows; False for a file that cannot be read."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        schema = parquet.read_schema(path)
    except (OSError, pa.ArrowException):
        return False
    return bool((schema.metadata or {}).get(_MARK) == KIND)


def read(path: Path) -> list[Row]:
    """Return the rows of a file in their order; an empty list if it does not exist.

    Raises:
        GcbenchError: it cannot be read, or holds something else.
    """
    import pyarrow as pa
    from pyarrow import parquet

    if not path.exists():
        return []
    try:
        table = parquet.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise GcbenchError(f"{path} cannot be read as Parquet: {error}") from error
    if (table.schema.metadata or {}).get(_MARK) != KIND:
        raise GcbenchError(
            f"{path} holds no rows of gcbench runs; `gcbench run --rows` writes them"
        )
    nested = {field.name for field in table.schema if field.metadata == {b"json": b"1"}}
    try:
        return [
            {
                **dict.fromkeys(json.loads(record.pop(_NULLS, None) or "[]")),
                **{
                    key: json.loads(value) if key in nested else value
                    for key, value in record.items()
                    if value is not None
                },
            }
            for record in table.to_pylist()
        ]
    except (ValueError, RecursionError) as error:
        raise GcbenchError(f"{path}: a nested column is no JSON ({error})") from error


def write(path: Path, rows: Sequence[Row]) -> None:
    """Replace the file by these rows, atomically.

    Raises:
        GcbenchError: it cannot be written.
    """
    import pyarrow as pa
    from pyarrow import parquet

    fields, arrays = [], []
    nulls = [[key for key, value in one.items() if value is None] for one in rows]
    rows = [{**one, _NULLS: own} if own else one for one, own in zip(rows, nulls, strict=True)]
    for key in dict.fromkeys(key for one in rows for key in one):
        values = [one.get(key) for one in rows]
        if any(isinstance(value, (dict, list)) for value in values):
            values = [None if v is None else json.dumps(v, allow_nan=False) for v in values]
            fields.append(pa.field(key, pa.string(), metadata={"json": "1"}))
        else:
            fields.append(pa.field(key, pa.infer_type(values)))
        arrays.append(pa.array(values, fields[-1].type))
    schema = pa.schema(fields, metadata={_MARK: KIND})
    buffer = io.BytesIO()
    parquet.write_table(pa.table(arrays, schema=schema), buffer, compression="zstd")
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, buffer.getvalue())


def relabel(path: Path, suite: str, belongs: Callable[[Row], bool]) -> int:
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
        found, count = read(path), 0
        for one in found:
            label = str(one.get("suite") or "")
            if label != suite and label.partition("/")[0] == name and belongs(one):
                one["suite"] = suite
                count += 1
        if count:
            write(path, found)
    return count


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other processes from changing the file, whose folder is made if it is missing."""
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path.with_name(f".{path.name}.lock"))
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def add(path: Path, new: Row) -> None:
    """Add a row to a file; a row of the same config is replaced.

    Several processes may add to one file at the same time.

    Raises:
        GcbenchError: the file cannot be read or written.
    """
    with _locked(path):
        kept = [one for one in read(path) if one.get("config_hash") != new.get("config_hash")]
        write(path, [*kept, new])
