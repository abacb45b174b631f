"""`make gpu` on the CPU: the steps, the file that they write, and what the exit status says."""

from __future__ import annotations

import pytest
import torch
from benchmarks import gpu

from gcbench.ops import cuda, native

needs_native = pytest.mark.skipif(not native.status()[0], reason=native.status()[1])
FEW = ["--device", "cpu", "--size", "1e4", "--methods", "terngrad,fp8", "--steps", "3"]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    cases = gpu.kernel_cases.families()
    few = {name: cases[name] for name in ("dct", "fp8", "ternary")}
    monkeypatch.setattr(gpu.kernel_cases, "families", lambda: few)
    monkeypatch.setattr(gpu, "TRIED", (33,))


def run(tmp_path, *more: str) -> tuple[int, gpu.Report]:
    status = gpu.main([*FEW, "--out", str(tmp_path / "there"), "--compiler", "eager", *more])
    return status, gpu.Report.model_validate_json((tmp_path / "there" / "gpu.json").read_text())


@needs_native
def test_one_run_writes_all(tmp_path, capsys):
    status, report = run(tmp_path)
    assert status == 0
    assert report.built[0].kernels >= len(native.ROWS)
    assert {one.op for one in report.tried} >= {"ternary.encode", "fp8.decode", "dct.forward"}
    assert all(one.calls and not one.wrong for one in report.tried)
    backends = {}
    for row in report.timings:
        backends.setdefault(row.op, set()).add(row.backend)
        assert 0 < row.seconds < 10
        assert row.copy_seconds > 0
        assert gpu.FEWEST <= row.rounds <= gpu.ROUNDS
    both = {gpu.KERNELS, gpu.PLAIN}
    assert backends["terngrad.decode"] == both | {gpu.EAGER, gpu.COMPILED}
    assert backends["fp8.encode"] == backends["fp8.decode"] == both
    assert report.trained is not None
    assert 0 <= report.trained.accuracy <= 1
    assert not report.left_out
    out = capsys.readouterr().out
    assert out == (tmp_path / "there" / "gpu.md").read_text()
    assert "| terngrad.decode |" in out


@needs_native
def test_wrong_bytes_are_an_error(tmp_path, monkeypatch, capsys):
    right = native.KERNELS["fp8.decode"]

    def wrong(**settings):
        result = right(**settings)
        settings["out"][:1] += 1
        return result

    monkeypatch.setitem(native.KERNELS, "fp8.decode", wrong)
    status, report = run(tmp_path)
    assert status == gpu.WRONG
    assert [one.op for one in report.tried if one.wrong] == ["fp8.decode"]
    assert "WRONG BYTES: fp8.decode" in capsys.readouterr().out


@needs_native
def test_without_time_all_is_left_out(tmp_path):
    status, report = run(tmp_path, "--minutes", "0")
    assert status == 0
    assert report.trained is None
    assert not report.tried
    assert not report.timings
    left = {one.what for one in report.left_out}
    assert {"training", "fp8.encode by kernels", "bytes of fp8 with 33 elements"} <= left


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_why(tmp_path, capsys):
    assert gpu.main(["--out", str(tmp_path / "there")]) == gpu.NO_GPU
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert cuda.status()[1] in error
    assert not (tmp_path / "there").exists()


def test_what_is_slower_than_the_fastest_torch():
    def row(op: str, backend: str, seconds: float) -> gpu.Timing:
        return gpu.Timing(op=op, backend=backend, seconds=seconds, copy_seconds=1, rounds=9)

    rows = [
        row("a", gpu.KERNELS, 3),
        row("a", gpu.PLAIN, 4),
        row("a", gpu.COMPILED, 1),
        row("a", gpu.EAGER, 2),
        row("b", gpu.KERNELS, 1),
        row("b", gpu.PLAIN, 1),
        row("c", gpu.KERNELS, 1),
        row("d", gpu.PLAIN, 1),
    ]
    (slower,) = gpu.slower_ones(rows)
    assert (slower.op, slower.seconds) == ("a", 3)
    assert (slower.faster, slower.faster_seconds) == (gpu.COMPILED, 1)
