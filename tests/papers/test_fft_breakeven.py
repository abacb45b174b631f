"""FFT's cost model: the paper's own numbers, given throughputs, and what each link assumes."""

from __future__ import annotations

import math
from functools import partial

import _paper
import fft_breakeven
import pytest
from commands import invoke

from gcbench.profile import breakeven

script = partial(invoke, main=partial(_paper.main, fft_breakeven))


def test_the_cost_model_says_what_the_paper_says() -> None:
    seconds = fft_breakeven.seconds_of(30, 7e9)
    assert seconds * 1e9 == pytest.approx(0.1381, abs=1e-4)
    assert 1e-9 / seconds == pytest.approx(7.24, abs=0.01)
    for gbit, least in [(10, 1.21), (1, 1.018), (40, 3.23), (56, 30)]:
        assert fft_breakeven.least_ratio(gbit / 8 * 1e9, seconds) == pytest.approx(least, rel=5e-3)
    assert fft_breakeven.least_ratio(100 / 8 * 1e9, seconds) is None
    assert fft_breakeven.fastest_link(30, seconds) == pytest.approx(7e9)
    low, high = (fft_breakeven.least_ratio(7e9, seconds * (1 + e)) for e in (-1e-6, 1e-6))
    assert low is not None
    assert high is not None
    assert (math.log(high) - math.log(low)) / 2e-6 == pytest.approx(29, rel=1e-3)
    speed = {"Tm": 300.0, "Tf": 70.0, "Tp": 34.0, "Ts": 55.0}
    forth = fft_breakeven.compress_seconds(speed, fft_breakeven.COMPRESS)
    assert forth == pytest.approx(2 / 300 + 1 / 70 + 1 / 34 + 1 / 55)
    back = fft_breakeven.compress_seconds(speed, fft_breakeven.DECOMPRESS)
    assert forth - back == pytest.approx(1 / 55)


THROUGHPUT = ("--throughput", "300,70,34,55")


def test_given_throughputs_and_a_resumed_timing(tmp_path) -> None:
    words = ["--results", tmp_path, "--elements", 20_000, "--compressor", "signsgd"]
    words += ["--threads", "1", "--progress", "none", "--json", *THROUGHPUT]
    result = script(*words).json
    tables = {table["name"]: table["rows"] for table in result["tables"]}
    symmetric = next(row for row in tables["readings"] if row["reading"] == "symmetric")
    assert symmetric["seconds_per_byte"] == pytest.approx(0.1371e-9, rel=1e-3)
    never = [
        row for row in tables["links"] if row["reading"] == "symmetric" and row["link_gbit"] == 100
    ]
    assert never[0]["least_ratio"] is None
    assert never[0]["pays"] == "never"
    (row,) = tables["methods"]
    assert row["wire_ratio"] == pytest.approx(32, rel=0.02)
    assert (next(tmp_path.iterdir()) / "fft-breakeven.png").exists()


def test_each_link_on_which_fft_pays_says_what_it_assumes(tmp_path, monkeypatch) -> None:
    words = ["--results", tmp_path, "--elements", 20_000, "--compressor", "fft"]
    words += ["--progress", "none", "--threads", "1", "--workers", "8", "--json"]
    result = script(*words, *THROUGHPUT).json
    tables = {table["name"]: table for table in result["tables"]}
    rows = tables["break_even"]["rows"]
    readings = [row["reading"] for row in tables["readings"]["rows"]]
    assert [row["reading"] for row in rows[:-4]] == [f"equation (4), {name}" for name in readings]
    for row, reading in zip(rows, tables["readings"]["rows"], strict=False):
        assert row["links"] == f"below {breakeven.rate_text(1e9 * reading['own_gbit'])}"
        assert (row["workers"], row["against"]) == ("not counted", "fp32, sent once")
    assert [row["times"].partition(";")[0] for row in rows[:3]] == [
        "implied by 30 at 56 Gbit/s (GPU)",
        *["given throughputs"] * 2,
    ]
    exchanges = [(row["workers"], row["against"].rpartition(" of ")[2]) for row in rows[-4:]]
    assert exchanges == [(n, what) for n in ("2", "8") for what in ("fp32", "fp32 and bf16")]
    assert all("encode and decode in exchanges of 2 workers" in r["times"] for r in rows[-4:])
    links = invoke(
        *("predict", "--links", "--compressor", "fft", "--workers", "2,8", "--results", tmp_path),
        *("--progress", "none", "--json"),
    ).json["tables"][0]["rows"]
    both = [row[key] for row in links for key in ("links", "links_better")]
    assert [row["links"] for row in rows[-4:]] == both

    def text(seconds: float) -> tuple[str, str]:
        """Return the times in the table if each stage takes `seconds`, and the conclusions."""
        monkeypatch.setattr(
            fft_breakeven, "stages", lambda _: dict.fromkeys(fft_breakeven.STAGES, seconds)
        )
        built = script(*words, "--force").json
        mine = next(table for table in built["tables"] if table["name"] == "break_even")
        return mine["rows"][1]["times"], " ".join(built["conclusions"])

    disturbed = "the machine was busy"
    times, message = text(1e-6)
    assert times.startswith("stages timed alone here, 1 thread")
    assert disturbed not in message
    assert disturbed in text(1.0)[1]


@pytest.mark.parametrize(("theta", "measured"), [("0.85", True), ("0.5", False)])
def test_only_the_measured_configuration_has_the_time_of_the_whole(tmp_path, theta, measured):
    words = ("--theta", theta, *THROUGHPUT, "--compressor", "fft", "--results", tmp_path, "--json")
    readings = {row["reading"] for row in script(*words).json["tables"][1]["rows"]}
    assert (fft_breakeven.WHOLE in readings) == measured


@pytest.mark.parametrize(
    "words",
    ["--elements 5", "--workers 1", "--link-latency-us inf", "--throughput 0,70,34,55",
     "--throughput 300", "--kernels absent.json"],
)  # fmt: skip
def test_a_wrong_value_is_refused_with_its_flag(tmp_path, words):
    result = script(*words.split(), "--results", tmp_path)
    assert result.code == 2
    assert words.split()[-1] in result.err or words.split()[0] in result.err
