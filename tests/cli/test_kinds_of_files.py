"""Files that are not what they should be: pipes, devices, YAML bombs, columns of wrong types."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from builders import BASE, summary, write
from commands import ROOT, Result, end, invoke, start

from gcbench.core.errors import UsageError
from gcbench.results import rows
from gcbench.training import grid

SECONDS = 60.0


def at_once(*words: object) -> Result:
    """Run a command that must not wait for the other end of a pipe."""
    process = start(*words)
    try:
        out, err = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    return Result(process.returncode, out, err)


@pytest.fixture
def special(tmp_path: Path):
    """Return a function that makes a path that is not a regular file."""
    sockets = []

    def make(kind: str, name: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            here = os.getcwd()
            os.chdir(path.parent)  # the name of a socket has at most 108 bytes
            sockets.append(socket.socket(socket.AF_UNIX))
            sockets[-1].bind(path.name)
            os.chdir(here)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        elif kind == "loop":
            path.symlink_to(path)
        return path

    yield make
    for one in sockets:
        one.close()


READERS = {
    "compare": ["compare"],
    "report": ["report"],
    "config": ["run", "--config"],
    "suite": ["run", "--suite"],
    "cluster": ["advise", "--compressor", "topk", "--cluster"],
    "kernels": ["kernels"],
    "rows": ["run", "--task", "quadratic", "--rows"],
}
ENDINGS = {"config": ".yaml", "suite": ".yaml", "cluster": ".yaml", "rows": ".parquet"}


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "loop"])
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_refused_at_once(special, kind: str, reader: str) -> None:
    path = special(kind, f"x{ENDINGS.get(reader, '.json')}")
    if kind == "pipe" and reader in ("compare", "config"):  # once in a process that could hang
        done = at_once(*READERS[reader], path)
    else:
        with_limit = signal.signal(signal.SIGALRM, _hangs)
        signal.alarm(int(SECONDS))
        try:
            done = invoke(*READERS[reader], path)
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, with_limit)
    assert done.code in (1, 2), done
    assert str(path) in done.err
    assert "Traceback" not in done.err
    assert len(done.err.splitlines()) == 1


def _hangs(number: int, frame: Any) -> None:
    raise AssertionError("the command hangs")


@pytest.mark.parametrize("name", ["run/summary.json", "run/metrics.parquet", "rows.parquet"])
def test_a_pipe_inside_a_folder_does_not_hang(special, tmp_path: Path, name: str) -> None:
    write(tmp_path / "good", *BASE)
    special("pipe", f"good/{name}")
    done = at_once("compare", tmp_path / "good")
    assert done.code in (0, 2)
    assert "Traceback" not in done.err


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in pairwise("abcdefghi")
)
YAML = {
    "aliases": (BOMB, "alias"),
    "one alias": ("steps: &n 5\nbatch: *n\n", "alias"),
    "deep list": ("task: " + "[" * 5000 + "]" * 5000, "levels"),
    "deep mapping": ("task: " + "{a: " * 5000 + "}" * 5000, "levels"),
    "a list as a key": ("? [a, b]\n: c\n", "key"),
    "a mapping as a key": ("? {a: b}\n: c\n", "key"),
    "a number as a key": ("5: c\n", "key 5"),
    "null as a key": ("~: c\n", "key None"),
    "twice": ("steps: 5\nsteps: 6\n", "'steps'"),
    "a date": ("task: !!timestamp 2020-01-01\n", "timestamp"),
    "a set": ("task: !!set {a, b}\n", "set"),
    "an object": ("task: !!python/object/apply:os.system [ls]\n", "python/object"),
    "large": ("# " + "x" * 1_100_000, "at most"),
    "not UTF-8": (b"task: \xff\n", "utf-8"),
    "a wrong integer": ("steps: !!int abc\n", "abc"),
}


@pytest.mark.parametrize(
    ("flag", "name"),
    [
        *(("--config", name) for name in YAML),
        *((flag, name) for flag in ("--suite", "--cluster") for name in ("aliases", "not UTF-8")),
    ],
)
def test_yaml_that_is_refused(tmp_path: Path, flag: str, name: str) -> None:
    """By one reader: every fault of a config, and two of the other files."""
    text, word = YAML[name]
    path = tmp_path / "mine.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    before = time.process_time()
    command = ["advise", "--compressor", "topk"] if flag == "--cluster" else ["run"]
    done = invoke(*command, flag, path)
    assert done.code == 2, done
    assert str(path) in done.err
    assert word in done.err
    assert len(done.err.splitlines()) == 1
    assert time.process_time() - before < 30


def test_a_deep_flag_is_a_text() -> None:
    assert grid.value("[" * 3000) == "[" * 3000
    with pytest.raises(UsageError):
        grid.expand({"task": grid.value("[" * 30 + "]" * 30)}, None)


# --- rows


WRONG: dict[str, Any] = {
    "seed": "many",
    "steps": [1, 2],
    "workers": {"a": 1},
    "test_accuracy": "high",
    "config": "text",
    "provenance": 5,
    "payload_bytes_up": None,
    "suite": 7,
}


@pytest.mark.parametrize("column", WRONG)
@pytest.mark.parametrize("ending", ["parquet", "json"])
def test_a_wrong_type_is_named_and_other_rows_are_kept(
    tmp_path: Path, column: str, ending: str
) -> None:
    if column == "suite" and ending == "json":
        pytest.skip("rows of JSON have no suite")
    result = [rows.row(one, [], "") for one in (*BASE, summary("x", 0, 0.8))]
    result[1] = {**result[1], column: WRONG[column]}
    path = tmp_path / f"rows.{ending}"
    if ending == "parquet":
        rows.write(path, result)
    else:
        path.write_text(json.dumps(result))
    done = invoke("compare", path, "--json")
    assert done.code == 1
    assert f"{path}, row 2" in done.err
    assert f"`{column}" in done.err
    assert "Traceback" not in done.err
    shown = {row["method"]: row["seeds"] for row in json.loads(done.out)}
    assert shown == {"none": [0, 2], "x": [0]}


def test_a_column_of_nested_values_that_is_no_json(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    path = tmp_path / "rows.parquet"
    rows.write(path, [rows.row(one, [], "") for one in BASE])
    table = parquet.read_table(path)
    for name, values in {
        "config": pa.array(["{", *table["config"].to_pylist()[1:]]),
        "wire_bytes": pa.array([1, 2, 3]),
        "provenance": pa.array([b"\xff", None, None]),
    }.items():
        place = table.schema.get_field_index(name)
        field = pa.field(name, values.type, metadata={"json": "1"})
        schema = table.schema.set(place, field).with_metadata({rows.MARK: rows.PLAIN})
        columns = [values if i == place else table.column(i) for i in range(table.num_columns)]
        parquet.write_table(pa.table(columns, schema=schema), path)
        done = invoke("compare", path)
        assert done.code == 1
        assert f"{path}, row 1, column `{name}`" in done.err


def test_a_row_is_not_lost_where_its_types_differ_from_the_others(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    result = [{"config_hash": "a", "x": 1}, {"config_hash": "b", "x": "text"}]
    result += [{"config_hash": "c", "x": 1.5}, {"config_hash": "d", "x": 2**70}]
    for one in result:
        rows.add(path, one)
    assert rows.read(path) == result


# --- Ctrl-C


@pytest.mark.parametrize("delay", [0.0, 0.1, 0.3])
def test_ctrl_c_during_imports_is_quiet(tmp_path: Path, delay: float) -> None:
    """The command line is imported for 0.3 s at least; "begun" is printed before."""
    script = (
        "import sys; print('begun', flush=True); from gcbench.__main__ import main; "
        "sys.argv = ['gcbench', 'compare', sys.argv[1]]; main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.05 + delay)  # the handler is installed
    process.send_signal(signal.SIGINT)
    done = end(process)
    assert "Traceback" not in done.err
    # 2, or the signal's own end while Python exits: it was quicker, and found no run.
    quicker = delay > 0 and "no run" in done.err and done.code in (2, -signal.SIGINT)
    assert done.code == 130 or quicker
