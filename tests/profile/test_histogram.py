"""Captured gradients, what arrives of them by each method, and the claims about them."""

from __future__ import annotations

import json
import math
import re
import signal
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from commands import end, gcbench, invoke, start, wait_for
from PIL import Image
from safetensors.torch import load_file, save_file

from gcbench import studies
from gcbench.core import codec, registry
from gcbench.core.compressor import Compressor, Payload, Segments
from gcbench.core.errors import UsageError
from gcbench.profile import histogram
from gcbench.profile.histogram import reconstruction, tables
from gcbench.profile.histogram.reconstruction import ALL, Gradients, Sums
from gcbench.report import analysis as measuring
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
    made = normal(3)
    path = capture(tmp_path, made, task="test", seed="5", config='{"task_options": {"a": 1}}')
    tensors = load_file(path)  # as a third party reads it
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        layer.name: (3, *layer.shape) for layer in LAYERS
    }
    start = LAYERS[0].numel
    rows = made.buckets[2][start : start + 4000].view(40, 100)
    assert torch.equal(tensors["b.weight"][2], rows)
    back = Capture(path)
    assert (back.step, back.seed, back.workers, back.task) == (3, 5, 3, "test a=1")
    assert back.layers == LAYERS
    assert all(map(torch.equal, back.buckets(3), made.buckets))
    assert len(back.buckets(2)) == 2
    assert not list(path.parent.glob("*.part"))


def test_gradients_from_elsewhere_need_few_words(tmp_path: Path) -> None:
    """Half precision, no kinds, a step: enough."""
    tensors = {"w": torch.ones(2, 5, 6).bfloat16(), "b": torch.zeros(2, 5).half()}
    layers = json.dumps([{"name": "w"}, {"name": "b"}])
    about = {"schema": "1", "step": "7", "layers": layers}
    save_file(tensors, tmp_path / "x.safetensors", about)
    (found,) = captures.load([tmp_path])
    assert [layer.kind for layer in found.layers] == ["fully connected", "other"]
    assert found.buckets(2)[0].dtype == torch.float32
    assert found.buckets(2)[1].tolist() == [1.0] * 30 + [0.0] * 5


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


def config(**given) -> Config:
    known = {"task": "digits", "workers": 2, "steps": 12, "batch": 16, "eval_every": 0}
    return Config.make({**known, "compressor": "terngrad", **given})


def fit(made: Config, folder: Path, **options) -> Run:
    run = Run(folder / made.run_name)
    run.create()
    run.start(made.model_dump(mode="json"), {})
    engines.ENGINES[made.engine](made, run, Options(**options))
    return run


def test_captured_are_the_workers_raw_gradients(tmp_path: Path) -> None:
    """Bit by bit what the engine hands to the exchange, and the result does not change."""
    seen: dict[tuple[int, int], torch.Tensor] = {}

    def watch(step: int, rank: int, bucket: torch.Tensor) -> None:
        seen[step, rank] = bucket.clone()

    made = config(memory="none", dense_below=200)
    run = fit(made, tmp_path / "with", capture=Plan((0, 7)), on_bucket=watch)
    plain = fit(made, tmp_path / "without")
    assert run.summary["params_sha256"] == plain.summary["params_sha256"]
    assert run.folder.name == plain.folder.name
    found = captures.load([run.folder])
    assert [one.step for one in found] == [0, 7]
    for one in found:
        for rank, bucket in enumerate(one.buckets(2)):
            assert torch.equal(bucket, seen[one.step, rank])
    assert found[0].layers[0].name == "1.weight"
    assert not torch.equal(found[0].buckets(2)[0], found[0].buckets(2)[1])
    assert found[0].config["seed"] == 0
    assert found[0].task == "digits mlp"


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
    for wrong, said in [
        ("4", "--capture 4: .* has 4 steps, counted from 0; its last is 3"),
        ("x", "expected steps separated by commas"),
        ("-1", "expected steps separated by commas"),
        ("", "expected steps separated by commas"),
    ]:
        found = invoke(*words, "--capture", wrong)
        assert found.code == 2
        assert re.search(said, found.err)
    assert not list(tmp_path.iterdir())
    found = invoke(*words, "--capture", 1, "--capture-layers", "fc*")
    assert (found.code, "unknown layer 'fc*'" in found.err) == (2, True)
    assert invoke(*words, "--capture", 1).code == 0
    found = invoke(*words, "--capture", "1,2")
    assert found.code == 2
    assert "is past step(s) 2, whose gradients were not captured; use --force" in found.err
    assert invoke(*words, "--capture", "2", "--force").code == 0
    assert [one.step for one in captures.load([tmp_path])] == [2]  # those of the earlier run go


def test_other_layers_than_before_are_refused(tmp_path: Path) -> None:
    """Whether the run is finished or goes on."""
    words = ["run", "--steps", 4, "--eval-every", 0, "--results", tmp_path, "--progress", "none"]
    assert invoke(*words, "--capture", 1, "--capture-layers", "1.*").code == 0
    assert "finished before" in invoke(*words, "--capture", 1, "--capture-layers", "1.*").err
    for layers in ("*", "3.*"):
        found = invoke(*words, "--capture", 1, "--capture-layers", layers)
        assert found.code == 2
        assert f"was made with --capture-layers '1.*', not '{layers}'; use --force" in found.err
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
        found = [
            Sums.of(gradients, x, y).over(torch.tensor([0]))["relative_error"] or 0
            for x, y in zip(gradients.buckets, arrived.alone, strict=True)
        ]
        assert expected is not None
        mean = sum(error**2 for error in found) / 4
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


def test_the_mean_is_of_what_arrives_alone() -> None:
    """Ternary codes of one shared scale add without loss, and each worker draws its own."""
    one = normal(1).buckets[0]
    gradients = Gradients(LAYERS, [one, 3 * one, one])
    arrived = reconstruction.exchange(registry.compressor("terngrad"), gradients)
    mean = torch.stack(arrived.alone).mean(0)
    torch.testing.assert_close(arrived.averaged, mean, rtol=1e-6, atol=1e-6)
    assert not torch.equal(arrived.alone[0], arrived.alone[2])


def test_workers_agree_and_bytes_are_those_sent() -> None:
    """Ternary codes of all workers share a scale; 2 bits an element and the scales go up."""
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


def test_the_distribution_of_errors_is_relative_to_each_layer() -> None:
    layers = (Layer("a", "other", (4,)), Layer("b", "other", (4,)), Layer("z", "other", (2,)))
    x = torch.tensor([1.0, -1.0, 1.0, -1.0, 100.0, 100.0, -100.0, 100.0, 0.0, 0.0])
    y = torch.tensor([1.0, -1.0, 1.0, -0.5, 50.0, 100.0, -100.0, 110.0, 0.0, 0.0])
    gradients = Gradients(layers, [x])
    shares = reconstruction.error_distribution(gradients, [x], [y])
    table = dict(zip(reconstruction.ERRORS.round(6), shares.tolist(), strict=True))
    assert table[0.01] == 5 / 8  # of the layers that are not zeros
    assert table[0.125893] == 6 / 8
    assert table[0.501187] == 1.0


@pytest.mark.parametrize(
    ("steps", "count", "spread"),
    [(400, 5, (0, 100, 200, 299, 399)), (3, 5, (0, 1, 2)), (10, 1, (0,)), (1, 3, (0,))],
)
def test_steps_are_spread_from_the_first_to_the_last(
    steps: int, count: int, spread: tuple[int, ...]
) -> None:
    assert captures.spread(steps, count) == spread


# ---- clipping, zeros, spectra --------------------------------------------------------------------


def test_clipping_of_normal_values_is_the_closed_form() -> None:
    """algorithms' integrals: c = 2.5 -1.13 %, 2.75 degrees; 2^18 draws: within 0.1 %, 0.15 deg."""
    for c, length, angle in [(2.0, -0.0406, 5.82), (2.5, -0.01128, 2.75), (3.0, -0.0025, 1.15)]:
        exact = reconstruction.gaussian_clipping(c)
        assert exact.length_change == pytest.approx(length, abs=6e-5)
        assert exact.angle == pytest.approx(angle, abs=0.006)
        layers = (Layer("w", "convolution", (512, 512)),)
        (row,) = reconstruction.clipping(normal(1, layers), c)
        assert row["length_change"] == pytest.approx(length, abs=1e-3)
        assert row["angle"] == pytest.approx(angle, abs=0.15)
        assert row["clipped"] == pytest.approx(exact.clipped, rel=0.1)
        assert row["zeros_sent"] == pytest.approx(exact.zeros, abs=0.006)
        assert row["kurtosis"] == pytest.approx(3, abs=0.05)
    assert reconstruction.gaussian_clipping(2.5).zeros == pytest.approx(0.682, abs=5e-4)
    assert reconstruction.gaussian_clipping(2.5).clipped == pytest.approx(0.0124, abs=5e-5)


def test_heavy_tails_break_the_claim() -> None:
    """Laplace values lose 6.9 % and turn by 9.3 degrees (2^18 draws: within 0.3 % and 0.4)."""
    layers = (Layer("w", "fully connected", (512, 512)),)
    generator = torch.Generator().manual_seed(0)
    u = torch.rand(2**18, generator=generator) - 0.5
    laplace = -u.sign() * torch.log1p(-2 * u.abs())
    (row,) = reconstruction.clipping(Gradients(layers, [laplace]), 2.5)
    assert row["length_change"] == pytest.approx(-0.069, abs=0.003)
    assert row["angle"] == pytest.approx(9.3, abs=0.4)
    table, _ = tables._claims({"clipping": [row], "spectra": []})
    assert [found["inside"] for found in table.rows] == [0, 0, None]
    assert table.rows[0]["mean"] == pytest.approx(-100 * float(row["length_change"]))


def test_the_claim_holds_for_normal_values() -> None:
    layers = (Layer("w", "fully connected", (512, 512)), Layer("b", "bias", (4096,)))
    rows = reconstruction.clipping(normal(1, layers), 2.5)
    table, _ = tables._claims({"clipping": rows, "spectra": []})
    assert [(found["inside"], found["n"]) for found in table.rows] == [(1, 1), (1, 1), (None, 1)]


def smooth(n: int, correlation: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(n, generator=generator).tolist()
    values = [noise[0]]
    for each in noise[1:]:
        values.append(correlation * values[-1] + math.sqrt(1 - correlation**2) * each)
    return torch.tensor(values)


def test_fft_wins_where_the_gradient_is_smooth_only() -> None:
    """Kept at 15 %: noise .4346 and .5575; AR(1) of .9 .89 and .56 (within .02)."""
    layers = (Layer("w", "fully connected", (256, 128)),)
    noise = reconstruction.spectra(normal(1, layers), 0.15)
    ar = reconstruction.spectra(Gradients(layers, [smooth(2**15, 0.9)]), 0.15)
    for rows, ours, theirs, won in [(noise, 0.4346, 0.5575, 0), (ar, 0.89, 0.56, 8)]:
        share = [row for row in rows if row["rival"] == "equal share"]
        assert len(share) == 4  # a layer and all, over a tensor and the model
        for row in share:
            assert row["energy_fft"] == pytest.approx(ours, abs=0.02)
            assert row["energy_topk"] == pytest.approx(theirs, abs=0.02)
        assert tables.wins(rows) == (won, 8)
    assert ar[0]["neighbours"] == pytest.approx(0.9, abs=0.02)
    assert noise[0]["neighbours"] == pytest.approx(0.0, abs=0.04)


def test_ratios_of_errors_are_paired_by_step_and_seed() -> None:
    """By hand: 2 seeds of 2 steps; a step where one failed counts for neither."""

    def row(seed: int, step: int, method: str, error: float, **more: Any) -> dict[str, Any]:
        both = {"relative_error_alone": error, "relative_error_averaged": 2 * error}
        return {"group": "all layers", "seed": seed, "step": step, "method": method, **both, **more}

    steps = [
        *(row(0, 0, "a", 0.2), row(0, 0, "b", 0.1)),
        *(row(0, 9, "a", 8.0), row(0, 9, "b", 1.0)),
        *(row(1, 0, "a", 0.1), row(1, 0, "b", 0.1)),
        *(row(1, 9, "a", 9.0), row(1, 9, "b", 0.1, failed="of numbers")),
        row(0, 0, "none", 0.0) | {"group": "all layers"},
        row(0, 0, "a", 77.0) | {"group": "bias"},
    ]
    (found,) = tables._ratios(steps).rows
    assert (found["method"], found["other"], found["n"]) == ("a", "b", 2)
    logs = [math.log(4), 0.0]  # sqrt(2 * 8) of seed 0, 1 of seed 1
    half = 12.7062 * statistics.stdev(logs) / math.sqrt(2)
    for how in ("alone", "averaged"):
        assert found[how] == pytest.approx(2)
        assert found[f"{how}_low"] == pytest.approx(math.exp(math.log(2) - half), rel=1e-4)
        assert found[f"{how}_high"] == pytest.approx(math.exp(math.log(2) + half), rel=1e-4)


def test_one_choice_for_the_model_starves_small_layers() -> None:
    """Over the model top-k takes the large layer's elements, tensor by tensor each one's."""
    layers = (Layer("a", "other", (20000,)), Layer("b", "other", (20000,)))
    x = normal(1, layers).buckets[0]
    x[:20000] *= 1000
    rows = reconstruction.spectra(Gradients(layers, [x]), 0.15)
    found = {
        (row["scales"], row["layer"]): row["energy_topk"]
        for row in rows
        if row["rival"] == "equal share"
    }
    assert found["tensor", "a"] == pytest.approx(0.5575, abs=0.02)
    assert found["tensor", "b"] == pytest.approx(0.5575, abs=0.02)
    assert found["model", "b"] == 0
    assert found["model", "a"] == pytest.approx(0.783, abs=0.02)  # rho = .3: rho + 2 tau phi(tau)


def test_wins_and_medians_are_counted() -> None:
    def row(kind: str, scales: str, fft: float | None, topk: float | None) -> dict:
        energy = {"energy_fft": fft, "energy_topk": topk, "neighbours": 0.5, "kept_topk": 0.15}
        named = {"kind": kind, "scales": scales, "kept": 0.15, "rival": "equal share"}
        return {**named, **energy, "bits_fft": 2.0, "bits_topk": 2.2}

    own = [row("bias", "tensor", *pair) for pair in [(0.5, 0.4), (0.2, 0.4), (None, None)]]
    model = [row(ALL, "model", 0.5, 0.6), row(ALL, "model", 0.7, 0.6), row(ALL, "model", 0.9, 1.0)]
    small = [row("bias", "model", -90.0, 0.1), row("bias", "model", 0.1, 0.1)]
    table = tables._spectra([*own, *model, *small])
    found = {(r["setting"], r["kind"]): (r["won"], r["n"], r["energy_fft"]) for r in table.rows}
    assert found == {
        ("15 % kept of a tensor", "bias"): (1, 2, pytest.approx(0.35)),
        ("15 % kept of a model", ALL): (1, 3, 0.7),
        ("15 % kept of a model", "bias"): (0, 2, pytest.approx(-44.95)),
    }
    claim = tables._better({"spectra": [*own, *model, *small]})
    assert claim is not None
    assert (claim["inside"], claim["n"]) == (1, 3)
    assert claim["mean"] == pytest.approx(-100 * 0.1 / 3)
    assert claim["normal"] == pytest.approx(100 * (0.43456 - 0.5575), abs=0.05)
    assert "larger than the gradient in 1 of 2" in str(claim["text"])


def test_equal_bits_are_nearly_used_up() -> None:
    for kept in (0.15, 0.01):
        for granularity in reconstruction.GRANULARITIES:
            found = reconstruction.rivals(kept, granularity, LAYERS)
            segments = Segments.of([layer.shape for layer in LAYERS], granularity)
            bits = {name: codec.bits(method, segments) or 0 for name, (method, _) in found.items()}
            assert 0.9 * bits["fft"] < bits["equal bits"] <= bits["fft"]
            assert found["equal share"][1] == kept


def test_layers_of_zeros_count_nowhere() -> None:
    layers = (Layer("dead", "convolution", (30, 40)), Layer("w", "fully connected", (30, 40)))
    gradients = normal(2, layers)
    for bucket in gradients.buckets:
        bucket[:1200] = 0
    gradients = Gradients(layers, gradients.buckets)
    (dead, alive) = reconstruction.clipping(gradients, 2.5)
    assert (dead["length_change"], dead["angle"], dead["zeros_sent"]) == (None, None, 1.0)
    assert alive["length_change"] is not None
    rows = reconstruction.spectra(gradients, 0.15)
    assert tables.wins([row for row in rows if row["layer"] == "dead"]) == (0, 0)


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
    found = first.json
    assert found["kind"] == "histogram"
    tables = {table["name"]: table["rows"] for table in found["tables"]}
    whole = [row for row in tables["errors"] if row["group"] == ALL]
    assert [row["method"] for row in whole] == ["(gradient)", "third", "terngrad"]
    third_row = whole[1]
    assert third_row["relative_error_alone"] == pytest.approx(0.5)
    assert third_row["relative_error_averaged"] == pytest.approx(0.5)
    assert third_row["norm_ratio_alone"] == pytest.approx(0.5)
    assert third_row["cosine_alone"] == pytest.approx(1)
    assert third_row["n"] == 4
    assert third_row["bits"] is None  # it declares no layout
    told = {row["layer"]: row["bits"] for row in tables["layers"] if row["method"] == "terngrad"}
    assert told["1.weight"] == 2
    assert told["3.bias"] is None  # of 10 elements the packing says nothing
    told = {row["group"]: row["bits"] for row in tables["errors"] if row["method"] == "terngrad"}
    assert told == {ALL: None, "fully connected": pytest.approx(2, abs=0.01), "bias": None}
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
    for name in ("histogram", "histogram-errors", "histogram-claims"):
        with Image.open(folder / f"{name}.png") as picture:
            assert 1200 < picture.width < 1400  # legible at the 830 pixels of a README
        assert f"{name}.png" in first.err
    kept = list(tmp_path.glob("runs/*/captures/*.safetensors"))
    assert len(kept) == 2
    # The same gradients by name are the same analysis, without a training.
    again = invoke(
        *("histogram", *kept, "--compressor", "third,terngrad", "--results", tmp_path),
        *("--progress", "none", "--json"),
    )
    assert again.json["settings"] == found["settings"]
    assert len(list(tmp_path.glob("histogram-*"))) == 1
    ours = {t["name"]: t["rows"] for t in again.json["tables"]}
    assert ours == tables
    # Fewer workers, one step, one layer.
    less = invoke(
        *("histogram", *kept, "--workers", 1, "--capture", 5, "--layers", "3.*"),
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
    said = invoke(*words, "--capture", "0,3")
    assert "finished before, skipped" in said.err
    assert [one["step"] for one in said.json["settings"]["captures"]] == [0, 3]


def test_what_fails_is_shown(tmp_path: Path, third: None) -> None:
    path = capture(tmp_path, normal(2))
    words = ["histogram", path, "--results", tmp_path / "out", "--progress", "none"]
    words += ["--compressor", "none,third:mode=broken,third:mode=infinite"]
    said = invoke(*words, "--json").json
    rows = {r["method"]: r for r in said["tables"][0]["rows"] if r["group"] == ALL}
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
    said = invoke(*words, "--json").json
    rows = {r["method"]: r for r in said["tables"][0]["rows"] if r["group"] == ALL}
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
    found = invoke(*words, "--json").json
    assert [one["seed"] for one in found["settings"]["captures"]] == [0, 1]
    assert found["tables"][0]["rows"][0]["n"] == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--compressor", "topc"], "Did you mean 'topk'"),
        (["--compressor", "topk,topk"], "different methods"),
        (["--capture", "7"], "--capture 7: "),
        (["--workers", "3"], "--workers 3: "),
        (["--layers", "z*"], "unknown layer 'z*'"),
        (["--clip", "0"], "--clip 0.0: "),
        (["--clip", "x"], "--clip 'x'"),
        (["--kept", "1"], "--kept 1.0: "),
        (["--plot", "x.txt"], "the ending says the format"),
    ],
)
def test_invalid_options_are_refused(tmp_path: Path, words: list[str], said: str) -> None:
    path = capture(tmp_path, normal(2))
    found = invoke("histogram", path, "--results", tmp_path / "out", *words, "--progress", "none")
    assert found.code == 2
    assert said in found.err
    assert not (tmp_path / "out").exists()


def test_training_flags_are_checked_first(tmp_path: Path) -> None:
    words = ["histogram", "--results", tmp_path, "--progress", "none"]
    found = invoke(*words, "--steps", 5, "--capture", 5)
    assert (found.code, "has 5 steps, counted from 0" in found.err) == (2, True)
    found = invoke(*words, "--task", "digit")
    assert (found.code, "Did you mean 'digits'" in found.err) == (2, True)
    found = invoke(*words, "--seed", "x")
    assert (found.code, "whole numbers" in found.err) == (2, True)


def test_the_picture_needs_the_saved_rows_alone(tmp_path: Path) -> None:
    capture(tmp_path / "in", normal(2))
    words = ["histogram", tmp_path / "in", "--results", tmp_path, "--progress", "none"]
    assert invoke(*words, "--compressor", "terngrad,topk").code == 0
    (folder,) = tmp_path.glob("histogram-*")
    back = measuring.load(folder)
    studies.draw(back, tmp_path / "again.png")
    assert (tmp_path / "again.png").read_bytes() == (folder / "histogram.png").read_bytes()
    svg = tmp_path / "again.svg"
    studies.draw(back, svg)
    drawn = [svg, *(svg.with_stem(f"again-{part}") for part in ("errors", "claims"))]
    for one, text in zip(drawn, ("terngrad", "Zeros", "FFT keeps more"), strict=True):
        assert text in one.read_text()


def test_a_panel_without_values_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gcbench.report import figures

    capture(tmp_path / "in", normal(2))
    words = ["histogram", tmp_path / "in", "--results", tmp_path, "--progress", "none"]
    assert invoke(*words, "--compressor", "terngrad,topk").code == 0
    analysis = measuring.load(next(tmp_path.glob("histogram-*")))
    said: list[str] = []

    def texts(figure: Any, path: Path) -> None:
        said.extend(text.get_text() for axes in figure.axes for text in axes.texts)

    monkeypatch.setattr(figures, "save", texts)
    studies.draw(analysis, tmp_path / "x.png")
    assert not [text for text in said if "no " in text or text.startswith("not ")]
    whole = {table.name: table.rows for table in analysis.tables}
    for name, expected in (
        ("spectra_layers", "not compared:\nno tensor for both"),
        ("clipping_layers", "no layer was clipped here"),
        ("distributions", "no error was recorded"),
        ("steps", "no such value was recorded"),
        ("bins", "no histogram: no layer was chosen"),
    ):
        said.clear()
        analysis.table(name).rows = []
        studies.draw(analysis, tmp_path / "x.png")
        assert expected in said, name
        analysis.table(name).rows = whole[name]


def test_help_is_light() -> None:
    found = gcbench("histogram", "--help", COLUMNS="60")
    assert found.code == 0
    assert "--capture" in found.out
