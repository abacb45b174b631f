"""Kernel timings: what is measured is what is said, and the table computes from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from benchmarks.cases import CASES, Gradient
from benchmarks.sizes import RESNET50, SIZES, numel
from commands import ROOT, invoke

from gcbench.ops import cuda, native
from gcbench.report import kernel_timings

SMALL = ((3, 1000), (64, 8, 1, 1), (8,), (0,))
MOVED = {
    "copy_": 8,
    "ternary_encode": 4.25,
    "ternary_mean8": 6,
    "terngrad.encode": 4.25,
    "terngrad.agree_encode": 8.25,
    "signsgd.merge8": 1.125,
    "int8.decode": 5 + 4 / 256,
    "topk.encode_feedback": 12,
    "onebit.encode_feedback": 12.125,
}
"""Bytes per element, except for positions, values and scales of 1 % and less."""


def row(**options):
    return {
        "op": "ternary_encode",
        "backend": "cpu avx512",
        "device": "cpu",
        "size": "25e6",
        "elements": 25_000_000,
        "tensors": 1,
        "threads": 1,
        "bytes_per_element": 4.25,
        "gb_per_second": 10.0,
        "copy_seconds": 0.0125,
        "seconds": 0.01,
        "iqr": 0.001,
        "fastest": 0.009,
        "rounds": 7,
        **options,
    }


def document(*rows):
    return {
        "machine": {"cpu": "Example 9000", "isa": "AVX512", "cores": 2, "gpu": None},
        "versions": {"torch": "2.13.0", "gcbench": "0.1.0"},
        "commit": "0123456789abcdef+",
        "date": "2026-01-31",
        "rows": list(rows),
    }


@pytest.fixture
def saved(tmp_path):
    """Write timings; return the path."""

    def write(*rows, **other):
        path = tmp_path / "kernels.json"
        path.write_text(json.dumps(document(*rows) | other))
        return path

    return write


def cells(text: str, op: str, backend: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"{op}  {backend}  ")]
    return line.removeprefix(f"{op}  {backend}").split()


# ---- the table -----------------------------------------------------------------------------------


def test_ratios_are_those_of_the_row_and_its_own_eager_and_copy(saved):
    path = saved(
        row(),
        row(backend="reference", seconds=0.5, copy_seconds=0.02),
        row(backend="eager", seconds=0.8, gb_per_second=0.125),
        row(backend="eager", seconds=7.0, threads=2),
        row(threads=2, seconds=0.005),
        row(op="ternary_merge8"),
    )
    text = invoke("kernels", path, "--details").out
    one, two = text.split("25e6: 25,000,000 elements, 2 threads")
    # 12.5 ms / 10 ms; 800 ms / 10 ms; 1.25 * 4.25 / 8
    assert cells(one, "ternary_encode", "cpu avx512") == ["10.0", "10.0", "1.25", "80.0", "66.4"]
    assert cells(one, "ternary_encode", "reference")[2:4] == ["0.0400", "1.60"]
    assert cells(one, "ternary_encode", "eager     ")[3] == "-"
    assert cells(one, "ternary_merge8", "cpu avx512")[3] == "-"
    assert cells(two, "ternary_encode", "cpu avx512")[3] == "1400"
    assert "Example 9000 (AVX512), 2 cores, torch 2.13.0, gcbench 0.1.0, commit 0123456789+" in text


def test_what_lies_around_short_calls_has_a_column_where_there_are_any(saved):
    path = saved(
        row(),
        row(size="1e4", around_seconds=2.5e-6),
        row(size="1e4", backend="reference"),
    )
    text = invoke("kernels", path, "--details").out
    long, short = text.split("1e4: 25,000,000 elements")
    assert "us around" not in long
    assert "us around" in short.split("Example")[0]
    assert cells(short, "ternary_encode", "cpu avx512")[5] == "2.50"
    assert cells(short, "ternary_encode", "reference ")[5] == "-"
    again = invoke("kernels", path, "--json").json["rows"]
    assert [row.get("around_seconds") for row in again] == [None, 2.5e-6, None]
    assert "around_seconds" not in again[0]


@pytest.mark.parametrize("width", [20, 40, 61, 62, 80, 200])
def test_a_narrow_terminal_cuts_no_cell(saved, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    path = saved(row(), row(op="efsignsgd.encode_feedback", seconds=0.123456))
    text = invoke("kernels", path, "--details").out
    for cell in (
        "10.0",
        "1.25",
        "66.4",
        "123",
        "efsignsgd.encode_feedback",
        "median ms",
        "x copy_",
    ):
        assert cell in text
    assert "…" not in text
    names = len("efsignsgd.encode_feedback  cpu avx512  median ms")
    table = text.split("\n\nExample")[0]
    assert max(map(len, table.splitlines())) <= max(width, names + 1)
    assert table.count("median ms") == 1
    assert (table.count("efsignsgd.encode_feedback") == 1) == (width >= 86)


def test_json_is_read_again(saved, tmp_path):
    path = saved(row(seconds=0.0123456789), row(backend="eager"))
    again = tmp_path / "again.json"
    again.write_text(invoke("kernels", path, "--json").out)
    assert sum(line.startswith('    {"op"') for line in again.read_text().splitlines()) == 2
    first, second = kernel_timings.load(path), kernel_timings.load(again)
    assert second.rows[0] == first.rows[0].model_copy(update={"seconds": 0.012346})
    assert second.model_copy(update={"rows": first.rows}) == first
    assert invoke("kernels", again, "--format", "json").json == json.loads(again.read_text())


def test_markdown(saved):
    text = invoke("kernels", saved(row()), "--format", "markdown").out
    assert "| op | backend | median ms | GB/s | x copy_ | x eager | % of floor |" in text
    assert "| :- | :- | -: | -: | -: | -: | -: |" in text
    assert "| ternary_encode | cpu avx512 | 10.0 | 10.0 | 1.25 | - | 66.4 |" in text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "No such file or directory; `make bench` in a checkout writes"),
        ("no", "is not JSON"),
        ("[]", "holds no timings"),
        ('{"benchmarks": []}', "holds no timings of `make bench` (KeyError('machine_info'))"),
        (json.dumps(document(row(seconds=0))), "(rows.0.seconds: Input should be greater than 0)"),
        (json.dumps(document(row(more=1))), "(rows.0.more: Extra inputs are not permitted)"),
        (json.dumps(document()), "no timings to show"),
    ],
)
def test_other_files_are_refused(tmp_path, content, expected):
    path = tmp_path / "file.json"
    if content is not None:
        path.write_text(content)
    result = invoke("kernels", path)
    assert result.code == 2
    assert expected in result.err
    assert len(result.err.splitlines()) == 1


# ---- what is timed -------------------------------------------------------------------------------


def test_resnet50_is_resnet50():
    assert RESNET50[:3] == ((64, 3, 7, 7), (64,), (64,))
    assert RESNET50[-2:] == ((1000, 2048), (1000,))
    assert sum(len(shape) == 4 for shape in RESNET50) == 53
    assert {name: numel(shapes) for name, shapes in SIZES.items()} == {
        "1e4": 10**4,
        "1e6": 10**6,
        "resnet50": 25_557_032,
        "25e6": 25 * 10**6,
    }


POSITIONS = ("int32", "bitmap", "gaps")


def test_every_kernel_is_timed():
    timed = {case.op for case in CASES.values()}
    alike = {f"selection.{part}_{coding}" for part in ("pack", "unpack") for coding in POSITIONS}
    alike |= {"selection.limits"}  # a part of ops.selection.reaching
    assert set(native.KERNELS) | set(cuda.KERNELS) <= timed | alike


@pytest.fixture(scope="module")
def gradient():
    return Gradient(SMALL)


@pytest.mark.parametrize("name", CASES)
def test_every_case_runs_on_tensors_of_any_size(name, gradient):
    case = CASES[name]
    timed = case.prepare(gradient)
    timed.call()
    moved = timed.moved / gradient.n
    assert moved > 0
    if name in MOVED:
        assert moved == pytest.approx(MOVED[name], rel=0.03)
    if case.eager:
        case.eager(Gradient(SMALL[:3]))()


def test_the_benchmarks_write_what_the_command_reads(tmp_path):
    path = tmp_path / "timings.json"
    options = ["-k", "copy_ or ternary_encode", "--sizes", "1e4", "--threads", "1"]
    alone = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "tests/benchmarks", *options),
            *("--seconds", "1", "--benchmark-json", str(path), "--quiet"),
        ],
        cwd=ROOT,
        env=alone,  # a process of several takes no times
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    timings = kernel_timings.load(path)
    assert timings.machine["cores"] >= 1
    assert timings.versions["torch"] == torch.__version__
    backends = {row.backend for row in timings.rows if row.op == "ternary_encode"}
    assert {"reference", "eager"} <= backends
    for row in timings.rows:
        assert (row.size, row.elements, row.tensors, row.threads) == ("1e4", 10_000, 1, 1)
        assert row.gb_per_second == pytest.approx(4e-5 / row.seconds, rel=0.01)
        assert row.fastest <= row.seconds
        assert 5 <= row.rounds <= 100
        assert (row.around_seconds is not None) == (
            row.backend.startswith("cpu") and row.seconds < 1e-4
        )
    assert "samples" not in path.read_text()
    assert '"data"' not in path.read_text()
    assert "10,000 elements" in invoke("kernels", path, "--details").out


def test_the_suite_does_not_run_the_benchmarks(request):
    benchmarks = "tests/benchmarks"
    assert not [one for one in request.session.items if one.nodeid.startswith(benchmarks)]
