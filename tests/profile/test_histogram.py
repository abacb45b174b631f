"""Captured gradients, what arrives of them by each method, and the claims about them."""

from __future__ import annotations

import json
import math
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from commands import end, invoke, start, wait_for
from PIL import Image
from safetensors.torch import load_file, save_file

from gcbench.core import codec, registry
from gcbench.core.compressor import Compressor, Payload, Segments
from gcbench.core.errors import UsageError
from gcbench.profile import histogram
from gcbench.profile.histogram import reconstruction
from gcbench.profile.histogram.reconstruction import ALL, Gradients, Sums
from gcbench.report import analysis as measuring
from gcbench.report import kinds
from gcbench.training import captures, engines
from gcbench.training.captures import Capture, Layer, Plan
from gcbench.training.configuration import Config
from gcbench.training.store import Run
from gcbench.training.train import Options

LAYERS = (
    Layer("a.weight", "convolution", (64, 16, 3, 3)),
    Layer("b.weight", "fully connected", (40, 100)),
    Layer("b.bias", "bias", (40,)),
)
N = sum(layer.numel for layer in LAYERS)


def normal(workers: int = 4, layers=LAYERS, seed: int = 0, step: int = 3) -> Gradients:
    generator = torch.Generator().manual_seed(seed)
    n = sum(layer.numel for layer in layers)
    buckets = [torch.randn(n, generator=generator) for _ in range(workers)]
    return Gradients(tuple(layers), buckets, step)


def capture(folder: Path, gradients: Gradients, step: int = 3, **about: str) -> Path:
    path = captures.place(folder, step)
    captures.write(path, step, gradients.layers, gradients.buckets, about)
    return path


# ---- captures ------------------------------------------------------------------------------------


def test_a_capture_is_what_was_written(tmp_path: Path) -> None:
    result = normal(3)
    path = capture(tmp_path, result, task="test", seed="5", config='{"task_options": {"a": 1}}')
    tensors = load_file(path)  # as a third party reads it
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        layer.name: (3, *layer.shape) for layer in LAYERS
    }
    start = LAYERS[0].numel
    rows = result.buckets[2][start : start + 4000].view(40, 100)
    assert torch.equal(tensors["b.weight"][2], rows)
    back = Capture(path)
    assert (back.step, back.seed, back.workers, back.task) == (3, 5, 3, "test a=1")
    assert back.layers == LAYERS
    assert all(map(torch.equal, back.buckets(3), result.buckets))
    assert len(back.buckets(2)) == 2
    assert not list(path.parent.glob("*.part"))


def test_gradients_from_elsewhere_need_few_words(tmp_path: Path) -> None:
    """Half precision, no kinds, a step: enough."""
    tensors = {"w": torch.ones(2, 5, 6).bfloat16(), "b": torch.zeros(2, 5).half()}
    layers = json.dumps([{"name": "w"}, {"name": "b"}])
    about = {"schema": "1", "step": "7", "layers": layers}
    save_file(tensors, tmp_path / "x.safetensors", about)
    (result,) = captures.load([tmp_path])
    assert [layer.kind for layer in result.layers] == ["fully connected", "other"]
    assert result.buckets(2)[0].dtype == torch.float32
    assert result.buckets(2)[1].tolist() == [1.0] * 30 + [0.0] * 5


def test_the_digest_is_of_the_gradients(tmp_path: Path) -> None:
    one = Capture(capture(tmp_path / "a", normal(), gcbench="0"))
    assert one.digest == Capture(capture(tmp_path / "b", normal(), gcbench="1")).digest
    assert one.digest != Capture(capture(tmp_path / "c", normal(seed=1))).digest


def test_bad_captures_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"no captures .* in .*empty; .*`gcbench run --capture"):
        captures.load([tmp_path / "empty"])
    with pytest.raises(UsageError, match=r"no capture .*nowhere"):
        captures.load([tmp_path / "nowhere"])
    good = capture(tmp_path / "good", normal())
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(good.read_bytes()[:200])
    with pytest.raises(UsageError, match="cannot be read as a capture"):
        captures.load([cut])
    short = tmp_path / "short.safetensors"
    short.write_bytes(good.read_bytes()[:-4])
    with pytest.raises(UsageError, match="cannot be read as a capture"):
        captures.load([short])
    foreign = tmp_path / "foreign.safetensors"
    save_file({"w": torch.ones(3)}, foreign)
    with pytest.raises(UsageError, match="schema None, expected '1'"):
        captures.load([foreign])
    odd = {"schema": "1", "step": "0", "layers": '[{"name": "v"}]'}
    save_file({"w": torch.ones(3)}, foreign, odd)
    with pytest.raises(UsageError, match="metadata or tensors are missing"):
        captures.load([foreign])
    odd["layers"] = '[{"name": "w"}]'
    save_file({"w": torch.ones(3, 2), "v": torch.ones(3, 2)}, foreign, odd)
    with pytest.raises(UsageError, match="do not match its `layers`"):
        captures.load([foreign])
    odd["layers"] = '[{"name": "w"}, {"name": "v"}]'
    save_file({"w": torch.ones(3, 2), "v": torch.ones(2, 2)}, foreign, odd)
    with pytest.raises(UsageError, match="do not match its `layers`"):
        captures.load([foreign])
    smaller = (LAYERS[0], Layer("b.weight", "fully connected", (40, 99)), LAYERS[2])
    other = capture(tmp_path / "other", normal(layers=smaller), step=4)
    with pytest.raises(UsageError, match=r"b.weight \[40, 99\] and b.weight \[40, 100\]"):
        captures.load([good, other])
    fewer = capture(tmp_path / "fewer", normal(2), step=5)
    with pytest.raises(UsageError, match=r"2 workers, .* 4"):
        captures.load([good, fewer])
    twice = capture(tmp_path / "twice", normal(seed=1))
    with pytest.raises(UsageError, match="both step 3 of seed 0"):
        captures.load([good, twice])
    assert len(captures.load([good, good])) == 1


def test_kinds_are_the_modules() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv1d(2, 3, 3),
        torch.nn.BatchNorm1d(3),
        torch.nn.Linear(4, 5),
        torch.nn.Embedding(6, 7),
        torch.nn.LayerNorm(7),
        torch.nn.PReLU(),
    )
    assert captures.kinds(model) == {
        "0.weight": "convolution",
        "0.bias": "bias",
        "1.weight": "normalization",
        "1.bias": "normalization",
        "2.weight": "fully connected",
        "2.bias": "bias",
        "3.weight": "embedding",
        "4.weight": "normalization",
        "4.bias": "normalization",
        "5.weight": "other",
    }


def config(**options) -> Config:
    defaults = {"task": "digits", "workers": 2, "steps": 12, "batch": 16, "eval_every": 0}
    return Config.make({**defaults, "compressor": "terngrad", **options})


def fit(result: Config, folder: Path, **options) -> Run:
    run = Run(folder / result.run_name)
    run.create()
    run.start(result.model_dump(mode="json"), {})
    engines.ENGINES[result.engine](result, run, Options(**options))
    return run


def test_captured_are_the_workers_raw_gradients(tmp_path: Path) -> None:
    """Bit by bit what the engine hands to the exchange, and the result does not change."""
    seen: dict[tuple[int, int], torch.Tensor] = {}

    def watch(step: int, rank: int, bucket: torch.Tensor) -> None:
        seen[step, rank] = bucket.clone()

    built = config(memory="none", dense_below=200)
    run = fit(built, tmp_path / "with", capture=Plan((0, 7)), on_bucket=watch)
    plain = fit(built, tmp_path / "without")
    assert run.summary["params_sha256"] == plain.summary["params_sha256"]
    assert run.folder.name == plain.folder.name
    output = captures.load([run.folder])
    assert [one.step for one in output] == [0, 7]
    for one in output:
        for rank, bucket in enumerate(one.buckets(2)):
            assert torch.equal(bucket, seen[one.step, rank])
    assert output[0].layers[0].name == "1.weight"
    assert not torch.equal(output[0].buckets(2)[0], output[0].buckets(2)[1])
    assert output[0].config["seed"] == 0
    assert output[0].task == "digits mlp"


@pytest.mark.usefixtures("forked")
def test_processes_capture_what_the_simulation_does(tmp_path: Path) -> None:
    plan = Plan((0, 5), "1.*")
    one = fit(config(steps=6), tmp_path, capture=plan)
    other = fit(config(steps=6, engine="spawn"), tmp_path, capture=plan)
    assert one.folder != other.folder
    pairs = zip(captures.load([one.folder]), captures.load([other.folder]), strict=True)
    digests = [(a.digest, b.digest) for a, b in pairs]
    assert len(digests) == 2
    assert all(a == b for a, b in digests)
    assert [layer.name for layer in captures.load([one.folder])[0].layers] == [
        "1.weight",
        "1.bias",
    ]


def test_a_resumed_run_keeps_what_it_captured(tmp_path: Path) -> None:
    """Kill it behind a capture: the file stays, is not written again, and the rest follows."""
    words = ["run", "--task", "digits", "--steps", 300, "--batch", 16, "--workers", 2]
    words += ["--compressor", "none", "--results", tmp_path, "--capture", "5,290"]
    words += ["--eval-every", 0, "--progress", "none", "--checkpoint-seconds", 0]
    process = start(*words)
    wait_for(lambda: list(tmp_path.glob("*/captures/*5.safetensors")), process)
    wait_for(lambda: list(tmp_path.glob("*/checkpoint.pt")), process)
    process.send_signal(signal.SIGINT)
    assert end(process).code == 130
    (first,) = tmp_path.glob("*/captures/*.safetensors")
    before = first.stat().st_mtime_ns
    missed = invoke(*words[:-8], "--capture", "1", "--eval-every", 0, "--progress", "none")
    assert missed.code == 2
    assert "--force" in missed.err
    done = invoke(*words)
    assert done.code == 0, done.err
    assert "resuming from checkpoint" in done.err
    assert first.stat().st_mtime_ns == before
    assert [one.step for one in captures.load([tmp_path])] == [5, 290]
    again = invoke(*words)
    assert (again.code, "finished before, skipped" in again.err) == (0, True)


def test_wishes_that_a_run_cannot_fulfil(tmp_path: Path) -> None:
    words = ["run", "--steps", 4, "--eval-every", 0, "--results", tmp_path, "--progress", "none"]
    for wrong, text in [
        ("4", "--capture 4: .* has 4 steps, counted from 0; its last is 3"),
        ("x", "expected steps separated by commas"),
        ("-1", "expected steps separated by commas"),
        ("", "expected steps separated by commas"),
    ]:
        result = invoke(*words, "--capture", wrong)
        assert result.code == 2
        assert re.search(text, result.err)
    result = invoke(*words, "--capture-layers", "1.*")
    assert (result.code, "add --capture" in result.err) == (2, True)
    assert not list(tmp_path.iterdir())
    result = invoke(*words, "--capture", 1, "--capture-layers", "fc*")
    assert (result.code, "unknown layer 'fc*'" in result.err) == (2, True)
    assert invoke(*words, "--capture", 1).code == 0
    result = invoke(*words, "--capture", "1,2")
    assert result.code == 2
    assert "is past step(s) 2, whose gradients were not captured; use --force" in result.err
    assert invoke(*words, "--capture", "2", "--force").code == 0
    assert [one.step for one in captures.load([tmp_path])] == [2]  # those of the earlier run go


def test_a_run_that_has_a_row_still_needs_its_captures(tmp_path: Path) -> None:
    runs, file = tmp_path / "runs", tmp_path / "rows.parquet"
    words = ["run", "--steps", 4, "--eval-every", 0, "--results", runs, "--progress", "none"]
    words += ["--rows", file]
    assert invoke(*words).code == 0
    missed = invoke(*words, "--capture", 1)
    assert (missed.code, "no gradients of its step(s) 1; use --force" in missed.err) == (2, True)
    assert invoke(*words, "--capture", 1, "--force").code == 0
    assert [one.step for one in captures.load([runs])] == [1]
    assert "its row is in" in invoke(*words, "--capture", 1).err


def test_other_layers_than_before_are_refused(tmp_path: Path) -> None:
    """Whether the run is finished or goes on."""
    words = ["run", "--steps", 4, "--eval-every", 0, "--results", tmp_path, "--progress", "none"]
    assert invoke(*words, "--capture", 1, "--capture-layers", "1.*").code == 0
    assert "finished before" in invoke(*words, "--capture", 1, "--capture-layers", "1.*").err
    for layers in ("*", "3.*"):
        result = invoke(*words, "--capture", 1, "--capture-layers", layers)
        assert result.code == 2
        assert f"was made with --capture-layers '1.*', not '{layers}'; use --force" in result.err
    (folder,) = tmp_path.glob("digits-*")
    with pytest.raises(UsageError, match="was made with"):
        Plan((1,)).missing(Run(folder))


# ---- what arrives --------------------------------------------------------------------------------


def test_figures_of_known_vectors() -> None:
    layers = (Layer("a", "other", (2,)), Layer("b", "other", (2,)), Layer("c", "other", (1,)))
    gradients = Gradients(layers, [torch.tensor([3.0, 4.0, 0.0, 0.0, 2.0])])
    arrived = Sums.of(gradients, gradients.buckets[0], torch.tensor([0.0, 5.0, 0.0, 1.0, 2.0]))
    first = arrived.over(torch.tensor([0]))
    assert first["relative_error"] == pytest.approx(math.sqrt(10) / 5)
    assert first["cosine"] == pytest.approx(20 / 25)
    assert first["norm_ratio"] == pytest.approx(1.0)
    assert first["zeros"] == 0.5
    dead = arrived.over(torch.tensor([1]))
    assert (dead["relative_error"], dead["cosine"], dead["zeros"]) == (None, None, 0.5)
    whole = arrived.over(torch.tensor([0, 1, 2]))
    assert whole["relative_error"] == pytest.approx(math.sqrt(11 / 29))
    assert whole["norm_ratio"] == pytest.approx(math.sqrt(30 / 29))
    assert gradients.rms.tolist() == pytest.approx([math.sqrt(12.5), 0.0, 2.0])


def test_methods_arrive_as_their_closed_forms_say() -> None:
    """Squared error of normal values; 6 standard errors of a sum of 4 x 2^17 draws."""
    layers = (Layer("w", "fully connected", (256, 512)),)
    gradients = normal(4, layers)
    for name in ("terngrad", "topk", "onebit", "efsignsgd", "fft"):
        method = registry.compressor(
            name, **({"granularity": "tensor"} if name == "onebit" else {})
        )
        expected = method.claims.gaussian_error
        arrived = reconstruction.exchange(method, gradients)
        result = [
            Sums.of(gradients, x, y).over(torch.tensor([0]))["relative_error"] or 0
            for x, y in zip(gradients.buckets, arrived.alone, strict=True)
        ]
        assert expected is not None
        mean = sum(error**2 for error in result) / 4
        assert mean == pytest.approx(expected, rel=0.02), name


def test_averaging_divides_an_unbiased_error() -> None:
    """Of N equal gradients: E||mean - f||^2 = (s ||f||_1 - ||f||^2) / N, within 5 %."""
    layers = (Layer("w", "fully connected", (100, 1000)),)
    one = normal(1, layers).buckets[0]
    for workers in (1, 4):
        gradients = Gradients(layers, [one] * workers)
        arrived = reconstruction.exchange(registry.compressor("terngrad", clip=0.0), gradients)
        variance = float(one.abs().max() * one.abs().sum() - one.square().sum())
        error = float((arrived.averaged - one).square().sum())
        assert error == pytest.approx(variance / workers, rel=0.05)
        if workers == 1:
            assert torch.equal(arrived.averaged, arrived.alone[0])


def test_correlated_errors_of_equal_gradients_cancel() -> None:
    """Of N equal gradients an element's mean is off by at most a step over N."""
    layers = (Layer("w", "fully connected", (100, 1000)),)
    one = normal(1, layers).buckets[0]
    method = registry.compressor("terngrad", clip=0.0, noise="correlated")
    averaged = reconstruction.exchange(method, Gradients(layers, [one] * 4)).averaged
    assert float((averaged - one).abs().max()) < float(one.abs().max()) / 4


@pytest.mark.parametrize("noise", ["independent", "correlated"])
def test_the_mean_is_of_what_arrives_alone(noise: str) -> None:
    """Ternary codes of one shared scale add without loss, and each worker draws its own."""
    one = normal(1).buckets[0]
    gradients = Gradients(LAYERS, [one, 3 * one, one])
    arrived = reconstruction.exchange(registry.compressor("terngrad", noise=noise), gradients)
    mean = torch.stack(arrived.alone).mean(0)
    torch.testing.assert_close(arrived.averaged, mean, rtol=1e-6, atol=1e-6)
    assert not torch.equal(arrived.alone[0], arrived.alone[2])


def test_workers_agree_and_bytes_are_those_sent() -> None:
    """Ternary codes of all workers share a scale; 2 bits per element and the scales go up."""
    gradients = normal(3)
    gradients.buckets[1].mul_(10)
    arrived = reconstruction.exchange(registry.compressor("terngrad"), gradients)
    for i in range(3):
        place = gradients.place(i)
        levels = {float(v) for y in arrived.alone for v in y[place].abs().unique()}
        assert len(levels - {0.0}) == 1
    words = 2 * sum(-(-n // 32) for n in (N,))
    assert arrived.bits_up == pytest.approx((32 * words + 3 * 32) / N)
    plain = reconstruction.exchange(registry.compressor("none"), gradients)
    assert (plain.bits_up, plain.bits_down) == (32, 32)
    assert all(map(torch.equal, plain.alone, gradients.buckets))


def test_methods_in_rounds_are_alone_with_themselves() -> None:
    """Rank 1 of a matrix of rank 1 is exact; the bias travels as it is."""
    layers = (Layer("w", "fully connected", (20, 30)), Layer("b", "bias", (20,)))
    generator = torch.Generator().manual_seed(0)
    outer = torch.outer(torch.randn(20, generator=generator), torch.randn(30, generator=generator))
    bucket = torch.cat([outer.view(-1), torch.randn(20, generator=generator)])
    arrived = reconstruction.exchange(
        registry.compressor("powersgd", rank=1), Gradients(layers, [bucket, bucket])
    )
    torch.testing.assert_close(arrived.alone[0], bucket, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(arrived.averaged, bucket, rtol=1e-4, atol=1e-5)


def test_bits_of_layers_add_up() -> None:
    method = registry.compressor("qsgd")
    shares = [reconstruction.marginal_bits(method, LAYERS, [i]) for i in range(3)]
    whole = codec.bits(method, Segments.of([layer.shape for layer in LAYERS], method.granularity))
    assert whole is not None
    assert sum(share or 0 for share in shares) == pytest.approx(whole, abs=3 * 32 * 4)
    assert reconstruction.marginal_bits(method, LAYERS, [0, 1, 2]) == whole
    plain = registry.compressor("none")
    assert reconstruction.marginal_bits(plain, LAYERS, [1]) == 32 * 4000
    sized = registry.compressor("terngrad")
    assert reconstruction.marginal_bits(sized, LAYERS, [1]) == pytest.approx(8000, abs=128)


def test_histograms_hold_every_value() -> None:
    layers = (Layer("w", "other", (1000,)),)
    x = torch.cat([torch.zeros(600), torch.full((300,), 1.0), torch.full((100,), -100.0)])
    gradients = Gradients(layers, [x, x])
    rows = reconstruction.histogram(gradients, 0, gradients.buckets)
    assert [row["count"] for row in rows] == [200, 1800]  # -100 is 3.16 rms, 0 and 1 one bin
    assert rows[0]["left"] <= -100 <= rows[0]["right"]
    rms = math.sqrt((300 + 100 * 1e4) / 1000)
    assert rows[0]["rms"] == pytest.approx(rms)
    spike = Gradients(layers, [torch.cat([torch.zeros(999), torch.ones(1)])])
    rows = reconstruction.histogram(spike, 0, spike.buckets)
    assert [row["count"] for row in rows] == [999, 1]
    assert rows[-1]["right"] == pytest.approx(6 * math.sqrt(1 / 1000))  # 31.6 rms: outermost
    empty = Gradients(layers, [torch.zeros(1000)])
    assert reconstruction.histogram(empty, 0, empty.buckets) == []


@pytest.mark.parametrize(
    ("steps", "count", "spread"),
    [(400, 5, (0, 100, 200, 299, 399)), (3, 5, (0, 1, 2)), (10, 1, (0,)), (1, 3, (0,))],
)
def test_steps_are_spread_from_the_first_to_the_last(
    steps: int, count: int, spread: tuple[int, ...]
) -> None:
    assert captures.spread(steps, count) == spread


# ---- the command ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Third(Compressor):
    """A third party's: halves, or breaks."""

    mode: str = "half"
    collectives: ClassVar[tuple[str, ...]] = ("allgather",)

    def encode(self, x, ctx):
        if self.mode == "broken":
            raise KeyError("no such thing")
        return Payload((x / 2 if self.mode == "half" else x / 0,))

    def decode(self, payload, ctx):
        return payload.parts[0]


@pytest.fixture
def third(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = registry.Entry("third", "elsewhere", lambda: Third)
    everyone = {**registry.compressors(), "third": entry}
    monkeypatch.setattr(registry, "compressors", lambda: everyone)


def test_the_command_end_to_end(tmp_path: Path, third: None) -> None:
    """Train, analyse, save, draw; again from the captures alone; again from the cache."""
    words = ["histogram", "--steps", 6, "--workers", 2, "--batch", 32, "--results", tmp_path]
    words += ["--compressor", "third,terngrad", "--capture", "0,5", "--progress", "none"]
    plot = tmp_path / "own.svg"
    first = invoke(*words, "--json", "--plot", plot)
    result = first.json
    assert result["kind"] == "histogram"
    tables = {table["name"]: table["rows"] for table in result["tables"]}
    whole = [row for row in tables["errors"] if row["group"] == ALL]
    assert [row["method"] for row in whole] == ["(gradient)", "third", "terngrad"]
    third_row = whole[1]
    assert third_row["relative_error_alone"] == pytest.approx(0.5)
    assert third_row["relative_error_averaged"] == pytest.approx(0.5)
    assert third_row["norm_ratio_alone"] == pytest.approx(0.5)
    assert third_row["cosine_alone"] == pytest.approx(1)
    assert third_row["n"] == 4
    assert third_row["bits"] is None  # it declares no layout
    text = {row["layer"]: row["bits"] for row in tables["layers"] if row["method"] == "terngrad"}
    assert text["1.weight"] == 2
    assert text["3.bias"] is None  # of 10 elements the packing says nothing
    text = {row["group"]: row["bits"] for row in tables["errors"] if row["method"] == "terngrad"}
    assert text == {ALL: None, "fully connected": pytest.approx(2, abs=0.01), "bias": None}
    layers = {row["layer"] for row in tables["layers"]}
    assert layers == {"1.weight", "1.bias", "3.weight", "3.bias"}
    assert {row["step"] for row in tables["steps"]} == {0, 5}
    assert {row["values"] for row in tables["bins"] if row["method"] == "terngrad"} == {
        *("target", "decoded", "averaged")
    }
    counted = [row for row in tables["bins"] if row["method"] == "(gradient)"]
    counted = [row for row in counted if (row["step"], row["values"]) == (5, "gradient")]
    assert sum(row["count"] for row in counted if row["layer"] == "1.weight") == 2 * 64 * 128
    assert "<svg" in plot.read_text()
    (folder,) = tmp_path.glob("histogram-*")
    with Image.open(folder / "histogram.png") as picture:
        assert 1200 < picture.width < 1400  # legible at the 830 pixels of a README
    assert "histogram.png" in first.err
    files = list(tmp_path.glob("runs/*/captures/*.safetensors"))
    assert len(files) == 2
    # The same gradients by name are the same analysis, without a training.
    again = invoke(
        *("histogram", *files, "--compressor", "third,terngrad", "--results", tmp_path),
        *("--progress", "none", "--json"),
    )
    assert again.json["settings"] == result["settings"]
    assert len(list(tmp_path.glob("histogram-*"))) == 1
    ours = {t["name"]: t["rows"] for t in again.json["tables"]}
    assert ours == tables
    # Fewer workers, one step, one layer.
    less = invoke(
        *("histogram", *files, "--workers", 1, "--capture", 5, "--layers", "3.*"),
        *("--compressor", "topk", "--results", tmp_path, "--progress", "none", "--json"),
    ).json
    tables = {table["name"]: table["rows"] for table in less["tables"]}
    assert {row["layer"] for row in tables["layers"]} == {"3.weight", "3.bias"}
    assert {row["layer"] for row in tables["bins"]} == {"3.weight", "3.bias"}
    assert [row["n"] for row in tables["errors"] if row["group"] == ALL] == [1, 1]


def test_a_training_that_lacks_steps_is_done_again(tmp_path: Path) -> None:
    words = ["histogram", "--steps", 6, "--workers", 2, "--batch", 32, "--results", tmp_path]
    words += ["--compressor", "none", "--progress", "none", "--json"]
    assert invoke(*words, "--capture", 0).code == 0
    assert invoke(*words, "--capture", 3).code == 0
    names = sorted(path.name for path in tmp_path.glob("runs/*/captures/*"))
    assert names == ["step-000000.safetensors", "step-000003.safetensors"]
    text = invoke(*words, "--capture", "0,3")
    assert "finished before, skipped" in text.err
    assert [one["step"] for one in text.json["settings"]["captures"]] == [0, 3]


def test_what_fails_is_shown(tmp_path: Path, third: None) -> None:
    path = capture(tmp_path, normal(2))
    words = ["histogram", path, "--results", tmp_path / "out", "--progress", "none"]
    words += ["--compressor", "none,third:mode=broken,third:mode=infinite"]
    message = invoke(*words, "--json").json
    rows = {r["method"]: r for r in message["tables"][0]["rows"] if r["group"] == ALL}
    assert rows["none"]["relative_error_alone"] == 0
    assert rows["none"]["failed"] is None
    assert "KeyError" in rows["third:mode=broken"]["failed"]
    assert rows["third:mode=broken"]["n"] == 0
    assert "not finite" in rows["third:mode=infinite"]["failed"]
    broken = normal(2)
    broken.buckets[1][LAYERS[0].numel + 3] = math.nan
    bad = capture(tmp_path / "bad", broken, step=4)
    words[1:2] = [path, bad]
    words[-1] = "none"
    message = invoke(*words, "--json").json
    rows = {r["method"]: r for r in message["tables"][0]["rows"] if r["group"] == ALL}
    assert rows["none"]["n"] == 2
    expected = "1 of 2: step 4: the gradient of b.weight of worker 1 is not finite"
    assert rows["none"]["failed"] == expected
    text = invoke(*words).out
    assert "failed" in text


def test_an_interrupted_analysis_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = capture(tmp_path, normal(2))
    words = ["histogram", path, "--results", tmp_path / "out", "--progress", "none"]
    words += ["--compressor", "none,topk,terngrad"]
    real, calls = histogram.apply, []

    def counted(method, *rest):
        calls.append(method.name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(method, *rest)

    monkeypatch.setattr(histogram, "apply", counted)
    assert invoke(*words).code == 130
    assert not list((tmp_path / "out").glob("*/analysis.json"))
    assert invoke(*words).code == 0
    assert calls == ["none", "topk", "topk", "terngrad"]
    (folder,) = (tmp_path / "out").glob("histogram-*")
    assert not (folder / measuring.LEDGER).exists()


def test_several_seeds_are_several_trainings(tmp_path: Path) -> None:
    words = ["histogram", "--steps", 3, "--workers", 2, "--batch", 32, "--results", tmp_path]
    words += ["--compressor", "none", "--progress", "none", "--capture", "2", "--seed", "0,1"]
    result = invoke(*words, "--json").json
    assert [one["seed"] for one in result["settings"]["captures"]] == [0, 1]
    assert result["tables"][0]["rows"][0]["n"] == 4


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--compressor", "topc"], "Did you mean 'topk'"),
        (["--compressor", "topk,topk"], "different methods"),
        (["--capture", "7"], "--capture 7: "),
        (["--workers", "3"], "--workers 3: "),
        (["--layers", "z*"], "unknown layer 'z*'"),
        (["--plot", "x.txt"], ".png"),
        (["--task", "digits"], "--task has no effect"),
        (["--seed", "0"], "--seed has no effect"),
    ],
)
def test_invalid_options_are_refused(tmp_path: Path, words: list[str], expected: str) -> None:
    path = capture(tmp_path, normal(2))
    result = invoke("histogram", path, "--results", tmp_path / "out", *words, "--progress", "none")
    assert result.code == 2
    assert expected in result.err
    assert not (tmp_path / "out").exists()


def test_training_flags_are_checked_first(tmp_path: Path) -> None:
    words = ["histogram", "--results", tmp_path, "--progress", "none"]
    result = invoke(*words, "--steps", 5, "--capture", 5)
    assert (result.code, "has 5 steps, counted from 0" in result.err) == (2, True)
    result = invoke(*words, "--task", "digit")
    assert (result.code, "Did you mean 'digits'" in result.err) == (2, True)
    result = invoke(*words, "--seed", "x")
    assert (result.code, "whole numbers" in result.err) == (2, True)


def test_the_picture_needs_the_saved_rows_alone(tmp_path: Path) -> None:
    capture(tmp_path / "in", normal(2))
    words = ["histogram", tmp_path / "in", "--results", tmp_path, "--progress", "none"]
    assert invoke(*words, "--compressor", "terngrad,topk", pictures=True).code == 0
    (folder,) = tmp_path.glob("histogram-*")
    back = measuring.load(folder)
    kinds.draw(back, tmp_path / "again.png")
    assert (tmp_path / "again.png").read_bytes() == (folder / "histogram.png").read_bytes()
    svg = tmp_path / "again.svg"
    kinds.draw(back, svg)
    assert "terngrad" in svg.read_text()
