"""Formats, positions, ternary noise, FFT range and errors: by hand, and shown broken things."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import _paper
import adversaries
import fft_breakeven
import fft_errors
import fft_range
import gradient_claims
import number_formats
import positions
import pytest
import ternary_noise
import terngrad_figure5
import torch
from commands import invoke

import gcbench
from gcbench import ops
from gcbench.commands import derived
from gcbench.core import progress, registry
from gcbench.core.errors import GcbenchError, UsageError
from gcbench.profile.histogram.reconstruction import Gradients
from gcbench.report.analysis import Analysis, Ledger
from gcbench.training.captures import Layer

SHORT = ("--task", "digits", "--steps", 12, "--seed", "0,1,2", "--progress", "none")


def script(study, *words):
    """Run a script of results/papers in this process."""
    return invoke(*words, main=partial(_paper.main, study))


def normal(n: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(n, generator=torch.Generator().manual_seed(seed))


def workers(n: int = 4000, count: int = 4, step: int = 0, seed: int = 0, scale: float = 1.0):
    """Gradients of `count` workers: one vector in common, and as much of their own."""
    common = normal(n, 100 + seed, scale)
    layers = (Layer("a.weight", "fully connected", (n // 40, 40)),)
    mine = [common + normal(n, 1000 * seed + 10 * step + rank, scale) for rank in range(count)]
    return Gradients(layers, mine, step, seed)


def verdict_of(rows, start: str) -> set[str]:
    return {str(row["verdict"]) for row in rows if str(row["claim"]).startswith(start)}


# ---- help ----------------------------------------------------------------------------------------


def test_help_keeps_the_entries_of_a_list_apart(monkeypatch):
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    lines = [line.strip() for line in script(number_formats, "--help").out.split("\n")]
    names = ("range float", "best range", "uniform", "ieee", "ieee scaled")
    assert all(any(line.startswith(f"{name}  ") for line in lines) for name in names)
    assert max(map(len, lines)) <= 80
    lines = script(fft_breakeven, "--help").out.split("\n")
    steps = [line for line in lines if line.strip()[:3] in ("(1)", "(2)", "(3)", "(4)")]
    assert [line.split()[1] for line in steps] == ["compress", "communicate", "saved", "it"]


# ---- formats -------------------------------------------------------------------------------------


def test_uniform_by_hand():
    x = torch.tensor([0.0, 0.1, 0.4, 1.0])
    assert number_formats.uniform(x, 1).tolist() == [0.0, 0.0, 0.0, 1.0]
    assert number_formats.uniform(x, 2).tolist() == pytest.approx([0.0, 0.0, 1 / 3, 1.0])
    assert number_formats.uniform(torch.full((3,), 7.0), 4).tolist() == [7.0] * 3


def test_ten_bits_of_ieee_are_half_precision_with_fewer_bits():
    """Of 16 bits with 5 of exponent, the format is torch's float16."""
    x = torch.cat([normal(5000, 1, s) for s in (1e-8, 1e-6, 1e-3, 1.0, 1e3)] + [torch.zeros(1)])
    assert torch.equal(number_formats.ieee(x, 16).float(), x.half().float())
    assert number_formats.ieee(torch.tensor([1e9, -1e9]), 16).tolist() == [65504.0, -65504.0]
    with_eight = number_formats.ieee(torch.tensor([1.0, 1.06, 1.0625, 300.0, 2.0**-10]), 8)
    assert with_eight.tolist() == [1.0, 1.0, 1.0, 240.0, 0.0]


@pytest.mark.parametrize("bits", [6, 8, 10])
@pytest.mark.parametrize("name", list(number_formats.FORMATS))
def test_a_format_has_no_more_values_than_its_bits(name, bits):
    x = normal(200_000, 2) ** 3
    coded = number_formats.FORMATS[name](x, bits, 2)
    assert len(coded.unique()) <= 2**bits
    assert number_formats.error(x, coded) < 1


def test_a_scale_moves_no_result():
    x = normal(5000, 3)
    for power in (-40, 7):
        moved = number_formats.ieee_scaled(x * 2.0**power, 10) / 2.0**power
        assert torch.equal(moved, number_formats.ieee_scaled(x, 10))


def test_the_best_mantissa_is_no_worse_than_any():
    x = normal(5000, 4)
    best = number_formats.error(x, number_formats.best_range(x, 8))
    every = [number_formats.error(x, number_formats.range_float(x, 8, m)) for m in range(8)]
    assert best == min(every)


def formats(of=workers) -> list[dict]:
    settings = number_formats.Settings(bits=[10], mantissa=[5])
    return [
        {"seed": seed, "step": step, **row}
        for seed in range(3)
        for step in range(2)
        for row in number_formats.measure(of(step=step, seed=seed), settings)
    ]


def test_normal_values_favour_uniform_and_heavy_tails_the_range_float():
    plain = number_formats.judge(formats())
    assert verdict_of(plain, "10 bits: error of range float / ieee scaled") == {"holds"}
    bins = [row for row in plain if row["values"] == "largest bins"]
    assert verdict_of(bins, "10 bits: error of range float / uniform") == {"does not hold"}

    def heavy(step, seed):
        result = workers(step=step, seed=seed)
        return Gradients(result.layers, [x**7 for x in result.buckets], step, seed)

    tails = [row for row in number_formats.judge(formats(heavy)) if row["values"] != "largest bins"]
    assert verdict_of(tails, "10 bits: error of range float / uniform") == {"holds"}


def test_a_broken_range_float_does_not_hold(monkeypatch):
    def coarse(x, bits, mantissa):
        return number_formats.range_float(x, bits, 0)

    monkeypatch.setitem(number_formats.FORMATS, number_formats.RANGE, coarse)
    result = number_formats.judge(formats())
    assert verdict_of(result, "10 bits: error of range float /") == {"does not hold"}
    monkeypatch.setitem(number_formats.FORMATS, number_formats.RANGE, lambda x, n, m: x / 0)
    assert verdict_of(number_formats.judge(formats()), "10 bits: error of range float /") == {
        "cannot tell"
    }


def test_number_formats_command(tmp_path):
    done = script(number_formats, *SHORT, "--results", tmp_path, "--json").json
    claims, errors, steps = (table["rows"] for table in done["tables"])
    assert len(claims) == 3 * 2 * 2 * 2
    assert len(errors) == 3 * 3 * len(number_formats.FORMATS)
    assert all(row["n"] == 15 for row in errors)
    assert len(steps) == 15 * len(errors)
    (folder,) = tmp_path.glob("number-formats-*")
    assert (folder / "number-formats.png").stat().st_size > 10_000
    bad = script(number_formats, "--bits", "8,10", "--mantissa", "3", "--results", tmp_path)
    assert bad.code == 2
    assert "--mantissa: " in bad.err
    assert "[3]" in bad.err


# ---- positions -----------------------------------------------------------------------------------


def test_entropy_by_hand():
    assert positions.entropy_bits(4, 2) == pytest.approx(math.log2(6))
    assert positions.entropy_bits(1000, 1) == pytest.approx(math.log2(1000))
    large = positions.entropy_bits(10**6, 150_000) / 10**6
    assert large == pytest.approx(0.6098, abs=1e-3)  # H(0.15)


def test_positions_command_and_its_verdicts(tmp_path):
    done = script(positions, "--elements", 20_000, "--results", tmp_path, "--json").json
    claims, shares = (table["rows"] for table in done["tables"])
    assert [row["verdict"] for row in claims] == ["holds", "does not hold", "does not hold"]
    for row in shares:
        assert row["bitmap"] == pytest.approx(1, abs=0.05)
        assert row["entropy"] <= min(row[coding] for coding in positions.CODINGS)
        assert row["int32"] == pytest.approx(32 * row["kept"])
    assert {row["cheapest"] for row in shares} == {"bitmap", "gaps"}


def test_verdicts_follow_the_bytes():
    rows = positions.measure(positions.Settings(elements=20_000, shares=[0.15, 0.05]))
    short = [{**row, "bitmap": 40.0 * float(row["kept"])} for row in rows]
    assert positions.judge(short)[0]["verdict"] == "does not hold"
    small = [{**row, "ratio": 22.0} for row in rows]
    assert positions.judge(small)[1]["verdict"] == "holds"
    assert len(positions.judge(rows[1:])) == 1  # no 15 %: nothing about it


def test_positions_that_come_back_wrong_are_an_error(monkeypatch):
    real = ops.selection.unpack_positions
    monkeypatch.setattr(ops.selection, "unpack_positions", lambda *a: real(*a).flip(0))
    with pytest.raises(GcbenchError, match="unpacking changed 300 positions"):
        positions.measure(positions.Settings(elements=2000, shares=[0.15]))


# ---- ternary noise -------------------------------------------------------------------------------


def noise_rows(method, of=workers) -> list[dict]:
    return [
        {
            "method": "m",
            "seed": seed,
            "step": step,
            **ternary_noise.measure(method, of(step=step, seed=seed), 16),
        }
        for seed in range(3)
        for step in range(2)
    ]


@pytest.mark.parametrize("options", [{"clip": 0.0}, {"clip": 2.5}, {"granularity": "column"}])
def test_ternary_noise_is_as_equation_20_has_it(options):
    if "granularity" in options and not hasattr(registry.compressor("terngrad"), "granularity"):
        pytest.skip("terngrad has one granularity")
    judged = ternary_noise.judge(noise_rows(registry.compressor("terngrad", **options)))
    assert [row["verdict"] for row in judged][:2] == ["holds", "holds"]


def test_expected_by_hand():
    segments = gcbench.Segments.of([(2,), (3,)])
    x = torch.tensor([1.0, -3.0, 0.5, 0.5, 2.0], dtype=torch.float64)
    assert ternary_noise._expected(x, segments) == 3 * 4 - 10 + 2 * 3 - 4.5


TernGrad = registry.compressor_class("terngrad")


@dataclass(frozen=True)
class Halved(TernGrad):  # type: ignore[misc, valid-type]
    def decode(self, payload, ctx):
        return super().decode(payload, ctx) / 2


@dataclass(frozen=True)
class Tripled(TernGrad):  # type: ignore[misc, valid-type]
    def decode(self, payload, ctx):
        return super().decode(payload, ctx) * 3


@dataclass(frozen=True)
class Nearest(TernGrad):  # type: ignore[misc, valid-type]
    """Rounds to the nearest of the three values, not at random."""

    def encode(self, x, ctx):
        peak = x.abs().max()
        nearest = torch.where(x.abs() > peak / 2, peak * x.sign(), 0.0)
        return super().encode(nearest, ctx)


@dataclass(frozen=True)
class Lost(TernGrad):  # type: ignore[misc, valid-type]
    """Drops 5 % of the codes."""

    def decode(self, payload, ctx):
        arrived = super().decode(payload, ctx).clone()
        arrived[::20] = 0
        return arrived


@pytest.mark.parametrize("broken", [Halved, Tripled, Nearest, Lost])
def test_noise_of_a_broken_method_does_not_hold(broken):
    judged = ternary_noise.judge(noise_rows(broken(clip=0.0)))
    assert judged[1]["verdict"] == "does not hold"
    assert judged[0]["verdict"] in ("does not hold", "cannot tell")


def test_codes_noisier_than_a_batch_do_not_hold():
    """A vector with one peak has codes that are all noise; equal magnitudes have none."""
    judged = ternary_noise.judge(noise_rows(registry.compressor("terngrad", clip=0.0)))
    assert judged[2]["verdict"] == "does not hold"

    def flat(step, seed):
        result = workers(step=step, seed=seed)
        return Gradients(result.layers, [x.sign() for x in result.buckets], step, seed)

    none = noise_rows(registry.compressor("terngrad", clip=0.0), flat)
    assert ternary_noise.judge(none)[2]["verdict"] == "holds"
    alone = [{**row, "own": None} for row in none]
    assert ternary_noise.judge(alone)[2]["verdict"] == "cannot tell"


def test_ternary_noise_command(tmp_path):
    done = script(ternary_noise, *SHORT, "--draws", 2, "--results", tmp_path, "--json").json
    claims, steps = (table["rows"] for table in done["tables"])
    assert len(claims) == 6
    assert len(steps) == 2 * 15
    (folder,) = tmp_path.glob("ternary-noise-*")
    assert (folder / "ternary-noise.png").stat().st_size > 10_000
    bad = script(ternary_noise, "--method", "topk", "--results", tmp_path)
    assert bad.code == 2
    assert "topk" in bad.err


# ---- the range of FFT's codes --------------------------------------------------------------------


def range_rows(factor: float) -> list[dict]:
    """Later gradients `factor` times as large as those that gave the range."""
    settings = fft_range.Settings(first=2)
    rows = []
    for seed in range(3):
        options = fft_range.estimate([workers(step=step, seed=seed) for step in range(2)], settings)
        for step in (2, 3):
            later = workers(step=step, seed=seed, scale=factor)
            result = fft_range.measure(later, settings, options)
            rows.append({"seed": seed, "step": step, **result})
    return rows


def test_a_range_that_lasts_holds_and_one_that_does_not_says_no():
    assert fft_range.judge(range_rows(1.0))[0]["verdict"] == "holds"
    for factor in (10.0, 1e-6):  # nearly all values outside, or below eps
        rows = range_rows(factor)
        assert fft_range.judge(rows)[0]["verdict"] == "does not hold"
        assert all((row["outside"] > 0.5) == (factor > 1) for row in rows)


def test_the_range_is_that_of_all_workers_and_steps():
    result = [workers(step=step) for step in range(3)]
    settings = fft_range.Settings(margin=2.0)
    low, high = fft_range.estimate(result, settings)
    segments = result[0].segments(settings.method())
    remaining = [fft_range.kept_values(x, segments, 0.85) for one in result for x in one.buckets]
    assert low == pytest.approx(2 * min(float(values.min()) for values in remaining))
    assert high == pytest.approx(2 * max(float(values.max()) for values in remaining))
    silent = Gradients(result[0].layers, [torch.zeros(4000)] * 2)
    with pytest.raises(GcbenchError, match="from 0 to 0"):
        fft_range.estimate([silent], settings)


def test_fft_range_command_and_a_run_with_what_it_finds(tmp_path):
    done = script(fft_range, *SHORT, "--first", 3, "--results", tmp_path, "--json").json
    claims, steps = (table["rows"] for table in done["tables"])
    assert claims[0]["n"] == 3
    assert {row["step"] for row in steps} == {3, 6, 8, 11}
    (folder,) = tmp_path.glob("fft-range-*")
    assert (folder / "fft-range.png").stat().st_size > 10_000
    low, high = done["conclusions"][-1].removesuffix(".").split("--set ")[1:]
    words = ("run", "--task", "digits", "--steps", 5, "--compressor", "fft", "--results", tmp_path)
    run = invoke(*words, "--set", low.strip(), "--set", high.strip(), "--json").json
    assert run["compressor"].endswith(f"{low.strip()}, {high.strip()})")
    early = script(fft_range, "--capture", "3", "--first", 5, "--results", tmp_path)
    assert early.code == 2
    assert "[3]" in early.err
    short = script(fft_range, *SHORT, "--first", 12, "--results", tmp_path)
    assert short.code == 2
    assert "--steps 12" in short.err


# ---- errors of FFT -------------------------------------------------------------------------------


def test_errors_and_their_distribution_by_hand():
    x = torch.tensor([3.0, 4.0, 0.0, 0.0])
    decoded = torch.tensor([3.0, 1.0, 0.0, 100.0])
    assert fft_errors.error(x, x) == 0
    assert fft_errors.error(x, torch.tensor([3.0, 1.0, 0.0, 0.0])) == pytest.approx(3 / 5)
    assert math.isnan(fft_errors.error(torch.zeros(3), torch.zeros(3)))
    # rms(x) = 2.5: errors 0, -1.2, 0 and beyond the last bin, which are 0.1 wide from -4
    shares = fft_errors.distribution(x, decoded)
    assert {i: float(s) for i, s in enumerate(shares) if s} == {28: 0.25, 40: 0.5, 79: 0.25}
    assert float(fft_errors.distribution(torch.zeros(2), torch.zeros(2)).sum()) == 1


@pytest.mark.parametrize(
    ("ratio", "noise", "verdict"),
    [(0.5, 0.01, "holds"), (2.0, 0.01, "does not hold"), (0.9, 0.5, "cannot tell")],
)
def test_verdicts_on_known_ratios(ratio, noise, verdict):
    settings = fft_errors.Settings(method=["fft", "qsgd"])
    rows = [
        {"seed": seed, "step": step, "method": name, "error": error}
        for seed in range(3)
        for step in range(2)
        for name, error in (("fft", ratio * math.exp(noise * (seed - 1))), ("qsgd", 1.0))
    ]
    row = fft_errors.judge(rows, settings)
    assert row["verdict"] == verdict
    assert row["measured"] == pytest.approx(ratio)


def test_the_script_of_errors(tmp_path):
    picture = tmp_path / "errors.png"
    words = (
        *SHORT,
        "--method",
        "fft, bf16, qsgd:levels=3",
        "--plot",
        picture,
        "--results",
        tmp_path,
    )
    done = script(fft_errors, *words, "--json").json
    tables = {table["name"]: table for table in done["tables"]}
    (claim,) = tables["claims"]["rows"]
    assert claim["verdict"] == "does not hold"
    first, *others = tables["ratios"]["rows"]
    assert first["ratio"] == claim["measured"]
    assert [(row["method"], row["other"]) for row in others] == [
        *(("fft", "qsgd:levels=3"), ("bf16", "qsgd:levels=3")),
    ]
    assert others[0]["ratio"] == pytest.approx(first["ratio"] * others[1]["ratio"])
    bins = tables["distribution"]["rows"]
    assert sum(row["share"] for row in bins if row["method"] == "fft") == pytest.approx(1)
    assert picture.stat().st_size > 0


def test_force_repairs_a_damaged_gradient_as_the_message_says(tmp_path):
    trained = _paper.Trained(task="quadratic", steps=2, capture=[1], workers=1, seed=[0])
    observer = progress.observer("none", "test", 1)

    def energies(force: bool) -> list[dict]:
        with Ledger(tmp_path / "test-0").open(afresh=force) as ledger:
            energy = lambda one: [{"energy": float(one.mean.square().sum())}]  # noqa: E731
            return _paper.measured(energy, trained, observer, ledger, None)

    first = energies(force=False)
    (file,) = tmp_path.glob("runs/*/captures/*.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(GcbenchError, match="--force"):
        energies(force=False)
    assert energies(force=True) == first


def test_an_unknown_codec_is_refused(tmp_path):
    with pytest.raises(UsageError, match="nonsense"):
        fft_errors.run(fft_errors.Settings(method=["fft", "nonsense"]), "", None, None)


# ---- repeated values -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("study", "flag", "values"),
    [
        (adversaries, "--adversaries", "0,1,1"),
        (adversaries, "--attack", "flip,flip"),
        (gradient_claims, "--clip", "2.5,2.50"),
        (gradient_claims, "--shares", "0.1,0.1"),
        (positions, "--shares", "0.15,0.15"),
        (fft_errors, "--seed", "0,0"),
    ],
)
def test_a_value_that_comes_twice_is_refused(study, flag, values, tmp_path):
    """Its cases were counted twice: two seeds were n = 8."""
    done = script(study, flag, values, "--results", tmp_path)
    assert done.code == 2
    assert done.err.startswith(f"gcbench: usage: {flag}")


# ---- edited files --------------------------------------------------------------------------------


class Named(_paper.Choices):
    kernels: str = "assumed"


def reader() -> ModuleType:
    """Return an analysis whose result is the text of the file that its settings name."""
    study = ModuleType("reader", "Read a file.")
    study.__file__, study.KIND, study.Settings = __file__, "reader", Named
    study.draw = lambda analysis, path: None

    def run(settings, command, observer, ledger):
        text = Path(settings.kernels).read_text()
        return Analysis.of("reader", settings, command, tables=[], conclusions=[text])

    study.run = run
    return study


def test_a_result_is_not_reused_after_a_file_that_it_names_changed(tmp_path):
    file, study = tmp_path / "m.json", reader()
    words = ("--kernels", file, "--results", tmp_path, "--json")
    for text, finished in (("one", False), ("one", True), ("two", False), ("one", True)):
        file.write_text(text)
        done = script(study, *words)
        assert done.json["conclusions"] == [text]
        assert ("is finished" in done.err) == finished


def test_a_result_is_not_reused_after_an_edit_of_a_plug_in(tmp_path):
    file = tmp_path / "mine.py"
    settings = terngrad_figure5.Settings(compressor=[f"{file}:share=1", "topk"])
    file.write_text("a = 1")
    first = derived._sources(settings)
    assert [*first] == [f"{file}:share=1"]
    assert derived._sources(settings) == first
    file.write_text("a = 2")
    assert derived._sources(settings) != first


def test_settings_without_files_keep_their_hash():
    assert "sources" not in positions.Settings().model_dump(mode="json")
    assert fft_range.Settings(sources={"a": "b"}).model_dump()["sources"] == {"a": "b"}
