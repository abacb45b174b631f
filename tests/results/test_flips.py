"""A bit that flips in a file of results is detected, or changes nothing that is read."""

from __future__ import annotations

import json
from pathlib import Path

import flips
import pytest
from builders import summary, write

from gcbench.core import files
from gcbench.core.errors import GcbenchError
from gcbench.results import rows
from gcbench.results.reader import load
from gcbench.training.store import Run


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return flips.make(tmp_path_factory.mktemp("flips"))


NAMES = (
    *("config.json", "provenance.json", "metrics.jsonl", "metrics.parquet", "summary.json"),
    *("step-000001.safetensors", "rows.parquet"),
)


@pytest.mark.parametrize("name", NAMES)
def test_no_flipped_bit_becomes_another_result(places: tuple[Path, Path], name: str) -> None:
    read = {path.name: (path, calls) for path, calls in flips.readers(*places).items()}
    assert set(read) == set(NAMES)
    path, calls = read[name]
    counts = flips.outcomes(path, calls, flips.sample(path, 60))
    assert set(counts) <= {"detected", "unchanged"}, counts
    assert counts["detected"] > 0


def test_what_the_script_calls_silent(places: tuple[Path, Path], monkeypatch) -> None:
    """Without the digests the script finds changed results: it can say no."""
    monkeypatch.setattr(files, "check_digest", lambda *_: None)
    run, _ = places
    path = run / "summary.json"
    counts = flips.outcomes(path, flips.readers(*places)[path], flips.sample(path, 200))
    assert counts["silent"] > 0


def test_a_row_of_json_is_compared_with_its_digest_if_it_has_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    right = files.sealed(summary("x", 0, 0.5))
    path.write_text(json.dumps([right]))
    assert load([path])[0].summary.test_accuracy == 0.5
    path.write_text(json.dumps([{**right, "test_accuracy": 0.75}]))
    with pytest.raises(GcbenchError, match=r"rows\.json, row 1: .*digest"):
        load([path])
    path.write_text(json.dumps([summary("x", 0, 0.75)]))  # by hand, without a digest
    assert load([path])[0].summary.test_accuracy == 0.75


def test_a_summary_without_a_digest_is_refused_in_a_run_s_folder(tmp_path: Path) -> None:
    write(tmp_path, summary())
    path = next(tmp_path.glob("*/summary.json"))
    bare = {k: v for k, v in json.loads(path.read_text()).items() if k != "digest"}
    path.write_text(json.dumps(bare))
    with pytest.raises(GcbenchError, match=r"summary\.json has no `digest`"):
        load([tmp_path])
    with pytest.raises(GcbenchError, match=r"summary\.json has no `digest`"):
        _ = Run(path.parent).summary


def test_rows_of_another_program_may_have_no_digest(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    path = tmp_path / "theirs.parquet"
    one = rows.row(summary("x", 3, 0.5), [], "")
    texts = {k: json.dumps(v) if isinstance(v, dict | list) else v for k, v in one.items()}
    fields = [
        pa.field(k, pa.infer_type([v]), metadata={"json": "1"} if v != one[k] else None)
        for k, v in texts.items()
    ]
    schema = pa.schema(fields, metadata={rows.MARK: rows.PLAIN})
    parquet.write_table(pa.table([[v] for v in texts.values()], schema=schema), path)
    assert [run.summary.seed for run in load([path])] == [3]
    rows.write(path, rows.read(path))  # gcbench rewrites it with a digest
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(GcbenchError, match=r"theirs\.parquet"):
        load([path])
