"""Correlated noise: the workers' draws lie in different strata, and errors cancel in the mean."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from kernel_cases import CORRELATED, KEYS

import gcbench
from gcbench import ops
from gcbench.checks import properties
from gcbench.core import codec, purposes, registry
from gcbench.core.clock import Clock
from gcbench.core.compressor import Compressor, Context, Key, Segments
from gcbench.core.errors import UsageError
from gcbench.core.exchange import Exchange, check_legal, lane_of
from gcbench.core.memory import Memory
from gcbench.core.payload import NOISES
from gcbench.core.world import SimulatedWorld

METHODS = {
    "qsgd": {},
    "terngrad": {"clip": 0.0},
    "natural": {},
    "int8": {"rounding": "stochastic"},
    "bf16": {"rounding": "stochastic"},
}


def draws(workers: int, n: int = 40_000, offset: int = 500) -> torch.Tensor:
    """Return all workers' draws, int32, shape (workers, n)."""
    keys = [Key(9, 2, rank, offset, workers=workers) for rank in range(workers)]
    return torch.stack([ops.random.draws24(key, n) for key in keys])


@pytest.mark.parametrize("workers", [2, 3, 4, 6, 16])
def test_workers_draw_from_different_strata(workers):
    strata = draws(workers) // (2**24 // workers)
    assert torch.equal(strata.sort(0).values, torch.arange(workers).expand(40_000, -1).mT.int())


@pytest.mark.parametrize("workers", [3, 4])
def test_each_worker_draws_uniformly_and_elements_independently(workers):
    n = 2**21
    u = draws(workers, n)[-1].double() / 2**24
    edges = torch.linspace(0, 1, 25, dtype=torch.float64)
    for low, high in pairwise(edges.tolist()):
        assert abs(float(((u >= low) & (u < high)).double().mean()) - 1 / 24) < 0.001
    centred = u - 0.5
    for lag in (1, 31, 32, 64, 96, 512, 1024, 8192):  # within a lane of 32, beyond its tile
        assert abs(float((centred[:-lag] * centred[lag:]).mean()) * 12) < 0.008, lag


def test_a_place_draws_the_same_in_any_shard():
    key = Key(1, 2, 1, 0, workers=4)
    whole = ops.random.draws24(key, 20_000)
    for start in (1, 31, 1000, 1024, 8191, 8192, 9000):
        part = ops.random.draws24(key._replace(offset=start), 3000)
        assert torch.equal(part, whole[start : start + 3000])


@pytest.mark.parametrize("key", [*KEYS, *CORRELATED], ids=str)
@pytest.mark.parametrize("n", [1, 1023, 1024, 5000])
def test_kernels_mirror_the_draws_of_negative_elements(key, n):
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)).round()
    with ops.using("reference"):
        want = ops.random.draws_for(x, key)
    assert torch.equal(ops.random.draws_for(x, key), want)
    mirrored = torch.where(torch.signbit(x), 2**24 - 1 - want, want)
    assert torch.equal(mirrored if key.workers > 1 else want, ops.random.draws24(key, n))


@pytest.mark.parametrize("workers", [0, 2**20])
def test_numbers_of_workers_out_of_range(workers):
    with pytest.raises(ValueError, match=f"workers={workers}"):
        ops.random.draws24(Key(1, 2, 0, workers=workers), 3)


def methods(name: str) -> tuple[Compressor, Compressor]:
    """Return a method with independent and with correlated noise."""
    options = METHODS[name]
    plain = gcbench.get_compressor(name, **options)
    return plain, gcbench.get_compressor(name, noise="correlated", **options)


def means(method: Compressor, xs: list[torch.Tensor], step: int = 0) -> torch.Tensor:
    """Return the mean of the workers' decoded gradients."""
    segments = Segments.of([xs[0].shape], method.granularity)
    key = Key(3, step, 0)
    shared, _ = codec.agree(method, xs, Context(segments, key=key))
    ctx = Context(segments, shared, key, workers=len(xs))
    total = torch.zeros(len(xs[0]), dtype=torch.float64)
    for rank, x in enumerate(xs):
        payload = codec.encode(method, x, ctx._replace(key=key._replace(rank=rank)))
        total += codec.decode(method, payload, ctx).double()
    return total / len(xs)


@pytest.mark.parametrize("name", METHODS)
def test_one_worker_sends_the_bytes_of_independent_noise(name):
    x = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    one, other = (method.compress(x, seed=4, step=5).payload for method in methods(name))
    assert torch.equal(one.to_bytes(), other.to_bytes())


@pytest.mark.parametrize("name", METHODS)
def test_an_owner_that_merges_draws_independently(name):
    x = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    plain, correlated = methods(name)
    segments = Segments.of([x.shape], plain.granularity)
    shared, _ = codec.agree(plain, [x], Context(segments))
    key = Key(4, 5, 1, stream=purposes.MERGE)
    ctx = Context(segments, shared, key, workers=4)
    one, other = (codec.encode(method, x, ctx) for method in (plain, correlated))
    assert torch.equal(one.to_bytes(), other.to_bytes())


@pytest.mark.parametrize("name", METHODS)
def test_errors_of_equal_inputs_cancel(name):
    """By the variance that each method declares, averaged over a step: p (1 - p) / N."""
    x = torch.randn(2**16, generator=torch.Generator().manual_seed(2))
    for workers in (4, 6):
        errors = [float((means(m, [x] * workers) - x).square().sum()) for m in methods(name)]
        # 1 / 6 of a step squared over N for each worker alone, and over N^2 with correlated noise
        assert 0.9 / workers < errors[1] / errors[0] < 1.5 / workers, (workers, errors)


@pytest.mark.parametrize("name", METHODS)
def test_verify_checks_it(name):
    plain, correlated = methods(name)
    assert properties.run(plain, "correlated noise").verdict == "not declared"
    assert properties.run(correlated, "correlated noise").verdict == "holds"


def test_verify_refuses_noise_that_is_not_correlated(monkeypatch):
    monkeypatch.setattr(Context, "draws", lambda ctx, noise: ctx.key)
    result = properties.run(gcbench.get_compressor("qsgd", noise="correlated"), "correlated noise")
    assert result.verdict == "fails"


def test_verify_refuses_a_worker_that_is_biased(monkeypatch):
    """All in one stratum of their own: the mean is right, and each worker wrong."""

    def same(ctx: Context, noise: str) -> Key:
        return ctx.key._replace(seed=ctx.key.rank, rank=0)

    def stratified(x: torch.Tensor, key: Key) -> torch.Tensor:
        return (ops.random.draws24(key, len(x)) >> 2) + (key.seed << 22)

    monkeypatch.setattr(Context, "draws", same)
    monkeypatch.setattr(ops.natural, "draws_for", stratified)
    with ops.using("reference"):
        method = gcbench.get_compressor("natural", noise="correlated")
        result = properties.run(method, "correlated noise")
    assert result.verdict == "fails"
    assert "biased" in result.note


SPECIFIED = {
    (1, 4): (0.58, 0.40, 0.27),
    (1, 16): (0.55, 0.32, 0.07),
    (7, 4): (0.54, 0.53, 0.25),
    (7, 16): (0.51, 0.51, 0.06),
}
"""Levels and workers: the mean's squared error over that with independent noise, where gradients
have correlations of 0, .9 and 1. Two digits: half a unit of the last is allowed besides 5 %."""


@pytest.mark.parametrize(("levels", "workers"), SPECIFIED)
def test_the_error_of_the_mean(levels, workers):
    n, generator = 2**17, torch.Generator().manual_seed(levels)
    options = {"levels": levels, "granularity": 256}
    for rho, want in zip((0.0, 0.9, 1.0), SPECIFIED[levels, workers], strict=True):
        common = torch.randn(n, generator=generator)
        xs = [
            rho**0.5 * common + (1 - rho) ** 0.5 * torch.randn(n, generator=generator)
            for _ in range(workers)
        ]
        true = torch.stack(xs).double().mean(0)
        errors = [
            float(
                (means(gcbench.get_compressor("qsgd", noise=noise, **options), xs) - true)
                .square()
                .sum()
            )
            for noise in ("correlated", "independent")
        ]
        assert abs(errors[0] / errors[1] - want) <= 0.05 * want + 0.005, (rho, errors)


@pytest.mark.parametrize(("name", "options"), [("int8", {}), ("bf16", {})])
def test_rounding_to_nearest_has_no_noise(name, options):
    with pytest.raises(UsageError, match="rounding='stochastic'"):
        gcbench.get_compressor(name, noise="correlated", **options)


@pytest.mark.parametrize("name", METHODS)
def test_an_unknown_noise_is_refused(name):
    with pytest.raises(UsageError, match="noise='white': expected independent or"):
        gcbench.get_compressor(name, noise="white")


@pytest.mark.parametrize("name", ["qsgd", "terngrad", "natural"])
def test_stored_rows_keep_the_name_of_their_method(name):
    """The field was added after rows had been published, whose text of a method lacks it."""
    usual, correlated = (gcbench.get_compressor(name, noise=n) for n in NOISES)
    assert "noise" not in registry.call(usual)
    earlier = {*registry.fields(type(usual))} - {"noise"}
    assert all(f"{field}=" in registry.call(usual) for field in earlier)
    assert "noise='correlated'" in registry.call(correlated)


@pytest.mark.parametrize("name", METHODS)
def test_every_legal_collective_is_unbiased(name):
    """A partial sum of a ring depends on the draws that would round it.

    Five standard errors: a right method fails with probability 6e-7, and the seed is fixed.
    """
    method, device, steps = methods(name)[1], torch.device("cpu"), 30
    x = torch.full((8192,), 10.25 / 127)
    x[::256] = 1.0
    for collective in method.legal_collectives():
        lane = lane_of([x.shape], 0, method, collective, Memory(), exact=False)
        exchange = Exchange(SimulatedWorld(2, device, None, 1, 1), [lane], 0, Clock(device))
        error = torch.zeros(8192, dtype=torch.float64)
        for step in range(steps):
            error += (exchange.mean([x.clone(), x.clone()], step).double() - x) / steps
        error = error[x != 1]
        assert abs(float(error.mean())) < 5 * float(error.std()) / len(error) ** 0.5, collective
    with pytest.raises(UsageError, match="Legal"):
        check_legal(method, "ring")
