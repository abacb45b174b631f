"""The ring: its error grows as (N + 1) / 2, its bytes are counted, every rank has the same bits."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from scipy import stats
from test_exchange import Sparse, integers, run

import gcbench
from gcbench.checks import exchanges
from gcbench.core import codec, memory, registry
from gcbench.core.compressor import Segments, fuses_feedback
from gcbench.core.errors import UsageError
from gcbench.core.exchange import check_legal, shard_bounds

ERROR_PROBABILITY = 1e-6
"""How often a mean error inside the interval would be reported outside of it, per test."""
TRIALS, N = 24, 16384
LEGAL = [
    name
    for name, _ in registry.compressors().items()
    if "ring" in gcbench.get_compressor(name).legal_collectives()
]


def relative_errors(simulated, clock, method, collective, workers) -> list[float]:
    """Return the relative squared error of the mean of independent normal gradients, by trial."""
    errors = []
    for trial in range(TRIALS):
        draw = torch.Generator().manual_seed(100 * trial + workers)
        xs = list(torch.randn(workers, N, generator=draw))
        mean = run(simulated, clock, method, collective, xs, granularity=method.granularity)[0]
        exact = torch.stack(xs).double().mean(0)
        errors.append(float((mean - exact).square().sum() / exact.square().sum()))
    return errors


def interval(ratios: list[float]) -> tuple[float, float]:
    """Return Student's interval of a mean over independent trials, at `ERROR_PROBABILITY`."""
    sample = torch.tensor(ratios, dtype=torch.float64)
    half = stats.t.ppf(1 - ERROR_PROBABILITY / 2, len(ratios) - 1) * sample.std()
    half = float(half) / math.sqrt(len(ratios))
    return float(sample.mean()) - half, float(sample.mean()) + half


def within(measured: tuple[float, float], expected: float, tolerance: float = 0.1) -> bool:
    low, high = measured
    return expected * (1 - tolerance) <= low <= high <= expected * (1 + tolerance)


STOCHASTIC = {"rounding": "stochastic"}


@pytest.mark.parametrize(
    ("name", "fields", "workers"),
    [*(("int8", STOCHASTIC, workers) for workers in (2, 4, 8)), ("bf16", {}, 4), ("bf16", {}, 8)],
)
def test_the_error_of_a_ring_and_of_two_shot(simulated, clock, name, fields, workers):
    """D (N + 1) / 2 against 2 D, each within 10 %."""
    method = gcbench.get_compressor(name, **fields)
    once = sum(relative_errors(simulated, clock, method, "allgather", 1)) / TRIALS
    ring, two = (
        interval([e / once for e in relative_errors(simulated, clock, method, each, workers)])
        for each in ("ring", "twoshot")
    )
    assert within(ring, (workers + 1) / 2)
    assert within(two, 2)
    assert not within(two, (workers + 1) / 2)


def test_none_by_ring_is_exact_up_to_the_rounding_of_sums(simulated, clock):
    errors = relative_errors(simulated, clock, gcbench.get_compressor("none"), "ring", 4)
    assert max(errors) < 2.0**-44


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("name", [name for name in LEGAL if name != "lossless"])
def test_bytes_are_those_of_the_tensors_sent(simulated, clock, name, workers):
    """By hand, from the encoded shards: each is sent once by every worker that does not own it."""
    method, n = gcbench.get_compressor(name), 5000
    segments = Segments.of([(50, 60), (2000,)], method.granularity)
    xs = [torch.randn(n, generator=torch.Generator().manual_seed(i)) for i in range(workers)]
    _, world = run(simulated, clock, method, "ring", xs, [(50, 60), (2000,)], method.granularity)
    bounds = shard_bounds(n, workers)
    sizes = [
        codec.bits(method, segments.shard(a, b)[0]) // 8 for a, b in itertools.pairwise(bounds)
    ]
    for rank, traffic in enumerate(world.traffic):
        assert traffic.payload_up == traffic.payload_down == sum(sizes)
        assert traffic.wire == sum(sizes) - sizes[rank] + (workers - 1) * sizes[rank]


def test_messages_of_a_ring_follow_each_other(simulated, clock):
    """2 (N - 1) messages, one after another, as in an all-reduce."""
    _, world = run(simulated, clock, gcbench.get_compressor("none"), "ring", integers(4, 4096))
    assert world.modelled_seconds == pytest.approx(6 * 50e-6 + 1.5 * 4 * 4096 * 8 / 10e9)


class Ring(Sparse):
    collectives = ("allgather", "ring")


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_sizes_that_depend_on_the_data_are_sent_first(simulated, clock, workers):
    xs = integers(workers, 3000)
    mean, world = run(simulated, clock, Ring(), "ring", xs)
    torch.testing.assert_close(mean, sum(xs) / workers, rtol=1e-6, atol=1e-6)
    shards = shard_bounds(3000, workers)
    sums = [
        sum(
            int((sum(xs[(owner + 1 + k) % workers][a:b] for k in range(hop)) != 0).sum())
            for hop in range(1, workers + 1)
        )
        for owner, (a, b) in enumerate(itertools.pairwise(shards))
    ]
    headers = 2 * 8 * workers
    assert sum(t.payload_up for t in world.traffic) == 8 * sum(sums) + headers * workers


class Fused(type(gcbench.get_compressor("bf16"))):
    """`bf16` that says to encode and update the residual in one operation."""

    name = "fused"

    def encode_feedback(self, x, residual, ctx):
        return super().encode_feedback(x, residual, ctx)


@pytest.mark.parametrize(
    "method",
    [*map(gcbench.get_compressor, ("int8", "bf16", "hadamard4")), Fused()],
    ids=lambda method: method.name,
)
@pytest.mark.parametrize("workers", [1, 3])
def test_residuals_of_all_hops_telescope(method, workers):
    """Applied means + mean residual = sum of the mean gradients; owners have no residual."""
    n = 3500
    steps = [
        list(torch.randn(workers, n, generator=torch.Generator().manual_seed(i))) for i in range(30)
    ]
    means, running = exchanges.exchange_steps(
        method, "ring", steps, [(35, 100)], memory.make("residual", {})
    )
    applied = sum(mean.double() for mean in means)
    left = torch.stack([s[0]["residual"] for s in running.workers]).double().mean(0)
    total = sum(torch.stack(xs).double().mean(0) for xs in steps)
    assert {*running.workers[0][0]} == {"residual"}
    assert float((applied + left - total).abs().max()) < 1e-4
    assert float(left.abs().max()) > 1e-4
    assert fuses_feedback(method) == (method.name == "fused")


@pytest.mark.parametrize("name", sorted({*registry.compressors()} - {*LEGAL}))
def test_other_methods_are_refused_with_a_reason(name):
    method = gcbench.get_compressor(name)
    with pytest.raises(UsageError, match="collective ring: ") as refused:
        check_legal(method, "ring")
    assert "its mean would be wrong" not in str(refused.value)
    assert all(legal in str(refused.value) for legal in method.legal_collectives())


def test_all_workers_apply_what_the_owner_sent(simulated, clock):
    """The mean is in the range of the code: the owner's fp32 sum is not applied anywhere."""
    method = gcbench.get_compressor("bf16")
    xs = [torch.randn(4096, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    mean, _ = run(simulated, clock, method, "ring", xs)
    total = mean * 4
    assert torch.equal(total, total.bfloat16().float())
    assert not torch.equal(total, sum(xs))


class Shared(type(gcbench.get_compressor("terngrad"))):
    """Lists the ring, but has one scale for all workers."""

    collectives = ("ring",)


def test_a_statistic_of_all_workers_is_refused(simulated, clock):
    with pytest.raises(UsageError, match="partial sums exceed"):
        run(simulated, clock, Shared(), "ring", integers(3, 3000))
