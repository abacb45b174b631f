"""Files of rows: damaged ones in folders, links to them, their number of rows, wrong numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from builders import BASE, summary
from commands import invoke

from gcbench.core.errors import GcbenchError
from gcbench.results import reader, rows


def stored(path: Path, *summaries: Any, evaluations: list[Any] | None = None) -> Path:
    """Write a file of rows."""
    rows.write(path, [rows.row(one, [], "") | {"evaluations": evaluations} for one in summaries])
    return path


def another_program(path: Path, count: int) -> Path:
    """Write a file of `count` equal rows without a digest."""
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.table({"task": ["digits"] * count})
    parquet.write_table(table.replace_schema_metadata({rows.MARK: rows.PLAIN}), path)
    return path


# ---- files that cannot be read -------------------------------------------------------------------

DAMAGE = {
    "cut": lambda data: data[:-20],
    "empty": lambda data: b"",
    "text": lambda data: b"not Parquet",
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("command", ["compare", "report", "bundle", "advise"])
def test_a_file_in_a_folder_that_cannot_be_read_is_named(
    tmp_path: Path, damage: str, command: str
) -> None:
    folder = tmp_path / "rows"
    stored(folder / "good.parquet", *BASE)
    bad = stored(folder / "bad.parquet", summary("x"))
    bad.write_bytes(DAMAGE[damage](bad.read_bytes()))
    words: dict[str, list[Any]] = {
        "compare": [folder],
        "report": [folder, "-o", tmp_path / "x.html"],
        "bundle": [folder, "-o", tmp_path / "x.zip"],
        "advise": ["--compressor", "int8", "--runs", folder, "--results", tmp_path / "analyses"],
    }
    done = invoke(command, *words[command])
    assert done.code == 1
    assert f"{bad} cannot be read as Parquet" in done.err


def test_parquet_of_another_content_in_a_folder_is_left_alone(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    good = stored(tmp_path / "good.parquet", *BASE)
    parquet.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    assert reader.row_files(tmp_path) == [good]
    assert invoke("compare", tmp_path).code == 0


# ---- symbolic links ------------------------------------------------------------------------------


def test_rows_are_added_to_the_file_that_a_link_leads_to(tmp_path: Path) -> None:
    real, link = tmp_path / "data" / "real.parquet", tmp_path / "link.parquet"
    rows.add(real, {"config_hash": "a", "suite": "own/1"})
    link.symlink_to("data/real.parquet")
    rows.add(link, {"config_hash": "b", "suite": "own/1"})
    assert link.is_symlink()
    assert [one["config_hash"] for one in rows.read(real)] == ["a", "b"]
    assert rows.relabel(link, "own/2", lambda one: one["config_hash"] == "b") == 1
    rows.write(link, rows.read(link))
    assert link.is_symlink()
    assert [one["suite"] for one in rows.read(real)] == ["own/1", "own/2"]


def test_a_file_has_one_lock_by_all_its_names(tmp_path: Path, monkeypatch) -> None:
    locks: list[Path] = []
    lock = rows.filelock.FileLock
    monkeypatch.setattr(rows.filelock, "FileLock", lambda path: locks.append(path) or lock(path))
    real, link = tmp_path / "data" / "real.parquet", tmp_path / "link.parquet"
    link.symlink_to(real)
    for path in (real, link):
        rows.add(path, {"config_hash": str(path)})
    assert len(set(locks)) == 1
    assert len(rows.read(real)) == 2


# ---- the number of rows --------------------------------------------------------------------------


def test_a_file_of_too_many_rows_is_refused_before_they_are_read(
    tmp_path: Path, monkeypatch
) -> None:
    path = another_program(tmp_path / "rows.parquet", 7)
    assert len(rows.read(path)) == 7
    monkeypatch.setattr(rows, "MOST_ROWS", 7)
    assert len(rows.read(path)) == 7
    monkeypatch.setattr(rows, "MOST_ROWS", 6)
    monkeypatch.setattr(rows, "_batches", lambda *_: pytest.fail("rows were read"))
    with pytest.raises(GcbenchError, match=r"rows\.parquet has 7 rows"):
        rows.read(path)


def test_the_number_of_rows_that_the_limit_admits() -> None:
    """Ten times the rows of `tests/scale.py`; 20 million, of a 75 kB file, are refused."""
    assert 1_000_000 <= rows.MOST_ROWS <= 2_000_000


# ---- numbers -------------------------------------------------------------------------------------

ODD: dict[str, dict[str, Any]] = {
    "config.momentum": {"config": {"momentum": math.nan}},
    "config.options.clip": {"config": {"options": {"clip": math.inf}}},
    "provenance.machine.cores": {"provenance": {"machine": {"cores": -math.inf}}},
    "phase_seconds.encode": {"phase_seconds": {"encode": math.nan}},
    "wire_bytes.per_worker": {"wire_bytes": {"per_worker": math.inf}},
    "sweep.2": {"sweep": [1.0, math.nan]},
}


@pytest.mark.parametrize("place", ODD)
def test_a_nested_number_that_is_not_finite_is_refused(tmp_path: Path, place: str) -> None:
    one = summary("x")
    for key, value in ODD[place].items():
        one[key] = {**one[key], **value} if isinstance(value, dict) else value
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([*BASE, one]))
    compared = invoke("compare", path, "--json")
    assert [row["method"] for row in json.loads(compared.out)] == ["none"]
    for done in (compared, invoke("bundle", path, "-o", tmp_path / "x.zip")):
        assert done.code == 1
        assert f"{path}, row 4: `{place}`" in done.err
        assert "Traceback" not in done.err


def test_a_result_that_is_not_finite_is_a_run_that_diverged(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([*BASE, summary("x", 0, math.nan)]))
    rows_of = {row["method"]: row for row in invoke("compare", path, "--json").json}
    assert rows_of["x"]["failed"] == 1
    assert invoke("bundle", path, "-o", tmp_path / "x.zip").code == 0


EVALUATION = {"kind": "eval", "step": 5, "test_accuracy": 0.5, "test_loss": None}


@pytest.mark.parametrize(
    "change",
    [
        {"test_accuracy": "high"},
        {"test_loss": [1]},
        {"payload_bytes_up": True},
        {"seconds": 10**400},
        {"step": "last"},
        {"step": None},
    ],
)
def test_an_evaluation_without_a_number_is_named(tmp_path: Path, change: dict[str, Any]) -> None:
    evaluations = [EVALUATION, {**EVALUATION, **change}]
    path = stored(tmp_path / "rows.parquet", *BASE, evaluations=evaluations)
    done = invoke("compare", path, "--target", "0.4")
    assert done.code == 1
    (key,) = change
    assert f"{path}, row 1, column `evaluations`, record 2: `{key}`" in done.err


@pytest.mark.parametrize("value", ["NaN", "1e999"])
def test_an_evaluation_that_is_not_finite_is_named(tmp_path: Path, value: str) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    path = stored(tmp_path / "rows.parquet", BASE[0], evaluations=[EVALUATION])
    table = parquet.read_table(path)
    place = table.schema.get_field_index("evaluations")
    text = pa.array([f'[{{"step": 5, "test_loss": {value}}}]'])
    table = table.set_column(place, table.schema.field(place), text)
    parquet.write_table(table.replace_schema_metadata({rows.MARK: rows.PLAIN}), path)
    done = invoke("bundle", path, "-o", tmp_path / "x.zip")
    assert done.code == 1
    assert f"{path}, row 1, column `evaluations`, record 1: `test_loss`" in done.err


def test_evaluations_with_numbers_are_read_in_the_order_of_their_steps(tmp_path: Path) -> None:
    evaluations = [{**EVALUATION, "step": 9.0, "mine": "text"}, EVALUATION]
    path = stored(tmp_path / "rows.parquet", BASE[0], evaluations=evaluations)
    assert reader.load([path])[0].evaluations() == evaluations[::-1]
