"""The sparse all-reduce: its mean by hand, its bytes for any N, its residuals."""

from __future__ import annotations

import itertools

import pytest
import torch
from test_exchange import run

import gcbench
from gcbench.checks import exchanges
from gcbench.core import memory, sparse
from gcbench.core.compressor import Context, Segments
from gcbench.core.errors import GcbenchError, PayloadError, UsageError
from gcbench.core.exchange import check_legal

SHAPES = [(60, 50), (0,), (7,), (2000,)]
N = 60 * 50 + 7 + 2000
CONSTANT = 2 * 4 * 1024
"""Bytes of four histograms of 256 int32 in an all-reduce."""


def topk(ratio: float = 0.1, **fields):
    return gcbench.get_compressor("topk", ratio=ratio, **fields)


def gradients(workers: int, n: int = N, seed: int = 0, common: float = 1.0) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return list(torch.randn(workers, n, generator=draw) + common * torch.randn(n, generator=draw))


def by_hand(xs: list[torch.Tensor], method, shapes=SHAPES) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sparse mean, and what each worker contributes to it, in dense tensors."""
    ctx = Context(Segments.of(shapes, method.granularity))
    sent = torch.zeros(len(xs), len(xs[0]))
    touched = torch.zeros(len(xs[0]), dtype=torch.bool)
    for row, x in zip(sent, xs, strict=True):
        places, values = method.entries(x, ctx)
        row[places] = values
        touched[places] = True
    total = torch.zeros(len(xs[0]))
    for row in sent:  # in rank order
        total += row
    order = sorted(touched.nonzero().view(-1).tolist(), key=lambda e: (-abs(float(total[e])), e))
    remained = torch.zeros_like(touched)
    remained[order[: len(places)]] = True
    return torch.where(remained, total, 0.0) / len(xs), torch.where(remained, sent, 0.0)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    "kind", ["normal", "ties", "apart", "equal", "close", "one region", "zeros"]
)
def test_the_mean_is_that_of_the_largest_sums(simulated, clock, workers, kind):
    xs = gradients(workers)
    if kind == "ties":
        xs = [x.sign() for x in xs]
    elif kind in ("apart", "equal", "close"):
        xs = [torch.where(torch.arange(N) % workers == i, x, 0.0) for i, x in enumerate(xs)]
        if kind != "apart":
            xs = [x.sign() for x in xs]
        if kind == "close":
            xs = [x * (1 + 2.0**-23 * (torch.arange(N) % 7)) for x in xs]
    elif kind == "one region":
        xs = [torch.where(torch.arange(N) < N // 20, 100 * x, x) for x in xs]
    elif kind == "zeros":
        xs = [torch.where(torch.arange(N) % 97 == 0, x, 0.0) for x in xs]
    mean, _ = run(simulated, clock, topk(), "sparse", xs, SHAPES)
    assert torch.equal(mean, by_hand(xs, topk())[0])


def test_one_worker_sends_what_an_all_gather_sends(simulated, clock):
    xs = gradients(1)
    whole = [run(simulated, clock, topk(), each, xs, SHAPES)[0] for each in ("sparse", "allgather")]
    assert torch.equal(*whole)


@pytest.mark.parametrize("workers", [2, 4, 8, 16])
@pytest.mark.parametrize("common", [0.0, 1.0, 30.0])
def test_a_worker_sends_at_most_6k_words(simulated, clock, workers, common):
    """For any N, histograms and sizes included; an all-gather sends 2 k (N - 1)."""
    n, ratio = 60_000, 0.1
    xs = gradients(workers, n, common=common)
    k = n * ratio
    _, world = run(simulated, clock, topk(ratio), "sparse", xs)
    for traffic in world.traffic:
        assert 4 * 2 * k < traffic.wire < 4 * 6 * k
    gather = topk(ratio, positions="int32")
    _, world = run(simulated, clock, gather, "allgather", xs)
    assert world.traffic[0].wire == 4 * 2 * k * (workers - 1)


@pytest.mark.parametrize("workers", [2, 4, 8, 16])
@pytest.mark.parametrize("kind", ["first", "last", "own"])
def test_no_gradients_exceed_the_bound(simulated, clock, workers, kind):
    """All large sums in one region, or each worker's entries far from those of the others."""
    n, k = 32_000, 3200
    place = torch.arange(n)
    xs = gradients(workers, n)
    for rank, x in enumerate(xs):
        owner = {"first": 0, "last": workers - 1, "own": (rank + 1) % workers}[kind]
        low = owner * n // workers
        x += 1e4 * ((place >= low) & (place < low + (k // workers if kind != "own" else k)))
    _, world = run(simulated, clock, topk(k / n), "sparse", xs)
    small = CONSTANT + (16 + 8 + 16) * workers
    for traffic in world.traffic:
        assert traffic.wire <= 4 * 6 * k * (workers - 1) / workers + 4 * 2 * k / workers + small


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_residuals_lose_what_was_sent_and_remained(workers):
    """Applied mean + mean residual = mean of the inputs, exactly zero where an entry counted."""
    method, memo = topk(), memory.make("residual", {})
    steps = [gradients(workers, seed=i) for i in range(20)]
    means, running = exchanges.exchange_steps(method, "sparse", steps, SHAPES, memo)
    left = [torch.zeros(N) for _ in range(workers)]
    for xs, mean in zip(steps, means, strict=True):
        inputs = [x + e for x, e in zip(xs, left, strict=True)]
        expected, contributed = by_hand(inputs, method)
        assert torch.equal(mean, expected)
        left = [x - sent for x, sent in zip(inputs, contributed, strict=True)]
        for states, e in zip(running.workers, left, strict=True):
            assert torch.equal(states[0]["residual"], e)
        share = torch.stack(inputs).double().mean(0) - torch.stack(left).double().mean(0)
        assert float((share - mean).abs().max()) < 1e-5
    assert float(left[0].abs().max()) > 0.1


@pytest.mark.parametrize("name", ["dgc", "ef21", "momentum", "none"])
def test_other_memories_receive_the_entries_that_counted(name):
    method, workers = topk(), 3
    memo = memory.make(name, {})
    steps = [gradients(workers, seed=i) for i in range(4)]
    means, running = exchanges.exchange_steps(method, "sparse", steps, SHAPES, memo)
    applied = [mean.clone() for mean in means]
    assert all(bool(mean.isfinite().all()) and bool(mean.any()) for mean in applied)
    if name == "ef21":
        estimates = torch.stack([states[0]["estimate"] for states in running.workers])
        torch.testing.assert_close(estimates.mean(0), applied[-1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fields", [{"values": "fp16"}, {"values": "range"}, {"positions": "gaps"}])
def test_coded_entries_are_refused(fields):
    with pytest.raises(UsageError, match=r"collective sparse: .*Legal: allgather, twoshot"):
        check_legal(topk(**fields), "sparse")
    assert check_legal(topk(positions="int32"), "sparse") == "sparse"


def test_gradients_that_are_not_finite_are_refused(simulated, clock):
    for bad in (float("nan"), float("inf")):
        xs = gradients(3)
        xs[1][5] = bad
        with pytest.raises(PayloadError):
            run(simulated, clock, topk(), "sparse", xs, SHAPES)


def test_entries_outside_of_their_region_are_refused():
    message = sparse.Entries(torch.tensor([3, 9]), torch.ones(2)).pack()
    for start, size in ((4, 10), (0, 9)):
        with pytest.raises(PayloadError):
            sparse.add([message], start, torch.zeros(size), torch.zeros(size, dtype=torch.bool))


TOPK = type(gcbench.get_compressor("topk"))


class Fewer(TOPK):
    def entries(self, x, ctx):
        return tuple(each[:-1] for each in super().entries(x, ctx))


class Backwards(TOPK):
    def entries(self, x, ctx):
        return tuple(each.flip(0) for each in super().entries(x, ctx))


class Narrow(TOPK):
    def entries(self, x, ctx):
        return tuple(each.int() for each in super().entries(x, ctx))


class Sizeless(TOPK):
    def layout(self, segments, count=1):
        return None


@pytest.mark.parametrize("wrong", [Fewer, Backwards, Narrow, Sizeless])
def test_methods_with_wrong_entries_are_refused(simulated, clock, wrong):
    with pytest.raises(GcbenchError):
        run(simulated, clock, wrong(), "sparse", gradients(2), SHAPES)


def test_shares_are_equal_and_in_order():
    for held in ([0, 0, 9], [9, 0, 0], [2, 3, 4], [1, 0, 0], [0, 0, 0], [5, 5, 1, 0, 3]):
        table = sparse.moves(held)
        assert [sum(row) for row in table] == held
        shares = [sum(column) for column in zip(*table, strict=True)]
        assert max(shares) - min(shares) <= 1
        owners = [
            owner
            for rank in range(len(held))
            for owner in itertools.chain.from_iterable(
                [owner] * row[rank] for owner, row in enumerate(table)
            )
        ]
        assert owners == sorted(owners)


def test_regions_have_equally_many_of_a_workers_entries():
    positions = torch.arange(103).square()
    for regions in (2, 3, 7, 103, 200):
        cuts = sparse.quantiles(positions, regions).tolist()
        counts = sparse.Entries(positions, positions.float()).counts(cuts).tolist()
        assert (len(counts), sum(counts)) == (regions, 103)
        assert max(counts) - min(counts) <= 1
