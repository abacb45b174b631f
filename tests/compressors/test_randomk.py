"""Random-k: which positions are drawn, how likely, and what their values stand for."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import gcbench
from gcbench import ops
from gcbench.core import codec
from gcbench.core.compressor import Context, Key, Payload, Segments
from gcbench.core.errors import PayloadError
from gcbench.ops import selection

KEY = Key(7, 0, 0)
SPREAD = Segments.of([(100, 7), (0,), (1,), (33,), (1025,), (33,), (33,)])
"""Segments of many lengths, an empty one, neighbours of one length."""


def normal(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def one(n: int) -> Segments:
    return Segments.of([(n,)])


def sent(method, x: torch.Tensor, segments: Segments, key: Key = KEY) -> torch.Tensor:
    shared = method.draw_shared(Context(segments, key=key))
    return codec.decode(
        method, codec.encode(method, x, Context(segments, shared, key)), Context(segments, shared)
    )


def chi_square_z(statistic: float, degrees: int) -> float:
    """Return the normal score of a chi-square statistic (Wilson and Hilferty's cube root)."""
    spread = 2 / (9 * degrees)
    return ((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


# ---- positions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.3, 1.0])
def test_exactly_k_of_each_segment_in_order(ratio):
    method = gcbench.get_compressor("randomk", ratio=ratio)
    positions = method.draw_shared(Context(SPREAD, key=KEY))
    assert positions.dtype == torch.int64
    assert (positions[1:] > positions[:-1]).all()
    for start, stop in itertools.pairwise(SPREAD.offsets):
        count = int(((positions >= start) & (positions < stop)).sum())
        assert count == (max(1, math.ceil(ratio * (stop - start))) if stop > start else 0)


def test_every_subset_is_equally_likely():
    """All 35 subsets of 3 of 7, 7000 draws: chi-square of 34 degrees, error probability 1e-6."""
    method = gcbench.get_compressor("randomk", ratio=3 / 7)
    draws, counts = 7000, dict.fromkeys(itertools.combinations(range(7), 3), 0)
    segments = Segments.of([(7,)] * 100)
    for step in range(draws // 100):
        positions = method.draw_shared(Context(segments, key=Key(1, step, 0))).view(100, 3)
        for row in positions - 7 * torch.arange(100).unsqueeze(1):
            counts[tuple(row.tolist())] += 1
    expected = draws / 35
    statistic = sum((count - expected) ** 2 / expected for count in counts.values())
    assert abs(chi_square_z(statistic, 34)) < 4.9


def test_every_position_is_equally_likely():
    """500 draws of 41 of 4096 positions. Error probability 1e-6 (4.9 standard deviations).

    Counts add up to T k, so sum (c - T p)^2 / (T p (1 - p)) (d - 1) / d is chi-square with d - 1
    degrees: the count of a draw without replacement.
    """
    method = gcbench.get_compressor("randomk", ratio=0.01)
    d, draws, counts = 4096, 500, torch.zeros(4096, dtype=torch.float64)
    for step in range(draws):
        counts[method.draw_shared(Context(one(d), key=Key(2, step, 0)))] += 1
    p = 41 / d
    assert float(counts.sum()) == draws * 41
    statistic = float(((counts - draws * p) ** 2).sum()) / (draws * p * (1 - p)) * (d - 1) / d
    assert abs(chi_square_z(statistic, d - 1)) < 4.9


def test_neighbours_are_drawn_independently():
    """Pairs at a distance are kept together as often as any: k (k - 1) / (d (d - 1)).

    300 draws of 33 of 65536: 4.8 pairs are expected at each distance, so more than 20 have a
    probability of 1e-7 (Poisson). Elements whose words share two bytes, as neighbouring rows of
    `draws24` do at a distance of 32, would be kept together 8 times as often.
    """
    method = gcbench.get_compressor("randomk", ratio=0.0005)
    d, lags = 65536, (1, 2, 3, 4, 32, 64, 128)
    pairs = dict.fromkeys(lags, 0)
    for step in range(300):
        positions = set(method.draw_shared(Context(one(d), key=Key(3, step, 0))).tolist())
        assert len(positions) == 33
        for lag in lags:
            pairs[lag] += sum(p + lag in positions for p in positions)
    assert max(pairs.values()) <= 20
    assert sum(pairs.values()) > 10, "33.8 are expected in all; 1e-6 (Poisson)"


def test_positions_are_shared_and_fresh():
    """No rank enters; step, seed and place in the bucket do. Encoding ignores its own key."""
    method = gcbench.get_compressor("randomk", ratio=0.1)
    twins = Segments.of([(1024,), (1024,)])
    first = method.draw_shared(Context(twins, key=KEY))
    assert torch.equal(first, method.draw_shared(Context(twins, key=KEY)))
    for other in (KEY._replace(step=1), KEY._replace(seed=8), KEY._replace(offset=4096)):
        common = set(first.tolist()) & set(method.draw_shared(Context(twins, key=other)).tolist())
        assert len(common) < 60, "20 of 206 are expected in common"
    left, right = first[:103], first[103:] - 1024
    assert len(set(left.tolist()) & set(right.tolist())) < 40, "segments differ: 10 expected"
    # Position e of the bucket has one word, whatever the bucket is cut into.
    for start, half in ((0, left), (1024, right)):
        alone = method.draw_shared(Context(one(1024), key=KEY._replace(offset=KEY.offset + start)))
        assert torch.equal(alone, half)
    x = normal(2048)
    payloads = [
        codec.encode(method, x, Context(twins, first, KEY._replace(rank=rank))) for rank in range(3)
    ]
    assert all(torch.equal(p.parts[0], x[first]) for p in payloads)


def test_random_words_by_hand():
    """Element e has word e % 4 of the Philox block of counter (e // 4, 2, step, stream, rank)."""
    key = Key(2**40 + 5, 9, 3, offset=2**35 + 6, stream=1)
    words = ops.selection.random_words(key, 11)
    assert words.dtype == torch.int32
    for i, word in enumerate(words.tolist()):
        block, lane = divmod(key.offset + i, 4)
        counter = (block % 2**32, block // 2**32 << 8 | 2, 9, 1 << 24 | 3)
        seed = (key.seed % 2**32, key.seed >> 32)
        expected = ops.random.philox([torch.tensor([c]) for c in counter], seed)[lane]
        assert word == int(expected) - 2**31


def test_random_words_do_not_depend_on_blocks(monkeypatch):
    whole = ops.selection.random_words(KEY._replace(offset=3), 1000)
    monkeypatch.setattr(selection, "BLOCK", 37)
    assert torch.equal(ops.selection.random_words(KEY._replace(offset=3), 1000), whole)


# ---- bias and variance ---------------------------------------------------------------------------


def test_unbiased_with_the_exact_variance():
    """6000 draws of 12 of 48. E[x'] = x in each coordinate, and E||x' - x||^2 = 3 ||x||^2.

    5 standard deviations: of the coordinates' known ones, error probability 3e-5 in all; of the
    squared error's measured one, 6e-7.
    """
    method = gcbench.get_compressor("randomk", ratio=0.25)
    x, draws = normal(48, 1).double(), 6000
    rows = torch.stack([sent(method, x.float(), one(48), Key(4, t, 0)) for t in range(draws)])
    errors = rows.double() - x.float().double()
    sd = (3 * x.square() / draws).sqrt()
    assert float((errors.mean(0).abs() / sd).max()) < 5
    squares = errors.square().sum(1)
    exact = 3 * float(x.square().sum())
    assert abs(float(squares.mean()) - exact) < 5 * float(squares.std()) / math.sqrt(draws)
    variance = method.claims.variance(x.float(), Context(one(48), torch.empty(0)))
    torch.testing.assert_close(variance, 3 * x.float().double().square(), rtol=1e-15, atol=0)
    measured = errors.square().mean(0)
    # x'_i is 4 x_i or 0: its squared error is 9 x_i^2 or x_i^2, with sd 8 x_i^2 sqrt(3/16).
    limit = 5 * 8 * math.sqrt(3 / 16 / draws) * x.square()
    assert ((measured - variance).abs() < limit).all()


@pytest.mark.parametrize("ratio", [0.1, 0.25])
def test_error_of_equal_magnitudes_is_the_same_in_every_draw(ratio):
    """(d/k - 1) ||x||^2 scaled, (1 - k/d) ||x||^2 unscaled: no expectation is needed here."""
    x = normal(SPREAD.numel, 2).sign() * 0.5
    runs = ops.selection.kept_runs(SPREAD, ratio)
    square = [0.25 * run.rows * run.length for run in runs]
    scaled = sum((run.inverse - 1) * s for run, s in zip(runs, square, strict=True) if s)
    unscaled = sum((1 - 1 / run.inverse) * s for run, s in zip(runs, square, strict=True) if s)
    for step in range(5):
        for factor, expected in ((True, scaled), (False, unscaled)):
            method = gcbench.get_compressor("randomk", ratio=ratio, scaled=factor)
            decoded = sent(method, x, SPREAD, Key(5, step, 0))
            error = float((decoded.double() - x.double()).square().sum())
            assert error == pytest.approx(expected, rel=1e-6)
    assert method.claims.error_bound(x, Context(SPREAD)) == pytest.approx(unscaled, rel=1e-9)
    assert (
        gcbench.get_compressor("randomk", ratio=ratio).claims.error_bound(x, Context(SPREAD))
        is None
    )


def test_unscaled_error_in_expectation():
    """E||x' - x||^2 = (1 - k/d) ||x||^2 over 4000 draws of 5 of 50; 5 measured sd: 6e-7."""
    method = gcbench.get_compressor("randomk", ratio=0.1, scaled=False)
    x, draws = normal(50, 3), 4000
    rows = torch.stack([sent(method, x, one(50), Key(6, t, 0)) for t in range(draws)])
    assert ((rows == x) | (rows == 0)).all()
    errors = (rows.double() - x.double()).square().sum(1)
    exact = 0.9 * float(x.double().square().sum())
    assert abs(float(errors.mean()) - exact) < 5 * float(errors.std()) / math.sqrt(draws)
    assert method.claims.error_bound(x, Context(one(50))) == pytest.approx(exact, rel=1e-9)


def test_declarations_follow_the_fields():
    scaled = gcbench.get_compressor("randomk", ratio=0.02)
    plain = gcbench.get_compressor("randomk", ratio=0.02, scaled=False)
    assert (scaled.claims.unbiased, scaled.claims.contractive) == (True, False)
    assert (plain.claims.unbiased, plain.claims.contractive) == (False, True)
    assert scaled.claims.gaussian_error == pytest.approx(49)
    assert plain.claims.gaussian_error == pytest.approx(0.98)
    assert scaled.claims.nominal_bits == pytest.approx(0.64)
    assert plain.claims.variance(normal(5), Context(one(5), torch.empty(0))) is None
    for ratio in (0.0, -0.1, 1.1, math.nan):
        with pytest.raises(gcbench.core.errors.GcbenchError, match="ratio"):
            gcbench.get_compressor("randomk", ratio=ratio)


# ---- wire and exchanges --------------------------------------------------------------------------


def test_only_the_values_travel():
    """4 k bytes: 100x of nothing else at 1 %, with the segments' k in one float32 tensor."""
    method = gcbench.get_compressor("randomk")
    x, segments = normal(10_000, 4), Segments.of([(60, 100), (4000,)])
    shared = method.draw_shared(Context(segments, key=KEY))
    payload = codec.encode(method, x, Context(segments, shared, KEY))
    assert payload.nbytes == 4 * (60 + 40)
    assert codec.bits(method, segments) == 32 * 100
    assert payload.parts[0].tolist() == [float(x[i]) for i in shared.tolist()]
    decoded = codec.decode(method, payload, Context(segments, shared))
    assert torch.equal(decoded[shared], 100 * x[shared])
    assert int((decoded != 0).sum()) == 100


def test_each_segment_has_its_own_factor():
    """k = 4 of 10, 1 of 1, 2 of 4 and none of 0, by hand."""
    method = gcbench.get_compressor("randomk", ratio=0.4)
    segments = Segments.of([(10,), (1,), (0,), (4,)])
    shared = torch.tensor([0, 3, 8, 9, 10, 11, 14])
    x = torch.arange(1.0, 16.0)
    payload = codec.encode(method, x, Context(segments, shared, KEY))
    assert payload.parts[0].tolist() == [1.0, 4.0, 9.0, 10.0, 11.0, 12.0, 15.0]
    expected = torch.zeros(15)
    expected[shared] = torch.tensor([2.5, 10.0, 22.5, 25.0, 11.0, 24.0, 30.0])
    assert torch.equal(codec.decode(method, payload, Context(segments, shared)), expected)
    assert torch.equal(
        codec.decode(method, payload._replace(count=2), Context(segments, shared)), expected / 2
    )


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("workers", [1, 3, 4, 8])
def test_all_reduce_is_the_mean_of_the_payloads(workers, scaled, simulated):
    """The sum in the order of ranks, divided and scaled once: the bits of all-gather and merge.

    The mean of decoded payloads scales before it adds, ((s_1 f + s_2 f) + ...) / N. With f = d/k
    and N powers of two these are the same bits; else they differ by rounding, and by at most
    (N + 2) 2^-24 of the sum of the magnitudes.
    """
    d = SPREAD.numel
    for segments, ratio, powers in ((one(1024), 1 / 64, True), (SPREAD, 0.03, False)):
        method = gcbench.get_compressor("randomk", ratio=ratio, scaled=scaled)
        shared = method.draw_shared(Context(segments, key=KEY))
        xs = [normal(d, seed)[: segments.numel] for seed in range(workers)]
        payloads = [
            codec.encode(method, x, Context(segments, shared, Key(7, 0, r)))
            for r, x in enumerate(xs)
        ]
        summands = [
            method.summand(p, Context(segments, workers=workers)).parts[0] for p in payloads
        ]
        total = simulated(workers).all_reduce(summands, "sum")
        reduced = codec.decode_sum(method, Payload((total,), workers), Context(segments, shared))
        assert torch.equal(reduced, codec.mean(method, payloads, Context(segments, shared)))
        merged = codec.merge(method, payloads, Context(segments, shared, KEY))
        assert merged.count == workers
        assert torch.equal(reduced, codec.decode(method, merged, Context(segments, shared)))
        decoded = [codec.decode(method, p, Context(segments, shared)) for p in payloads]
        added = sum(decoded[1:], decoded[0]) / workers
        if powers and workers != 3:
            assert torch.equal(reduced, added)
        magnitude = sum(x.abs() for x in decoded) / workers
        assert ((reduced - added).abs() <= (workers + 2) * 2.0**-24 * magnitude).all()


def test_the_mean_of_many_workers_is_no_better():
    """All keep the same positions: the mean of N equal gradients is off by all of (d/k - 1)."""
    method = gcbench.get_compressor("randomk", ratio=0.25)
    x = torch.ones(400)
    shared = method.draw_shared(Context(one(400), key=KEY))
    payloads = [codec.encode(method, x, Context(one(400), shared, Key(7, 0, r))) for r in range(16)]
    error = (codec.mean(method, payloads, Context(one(400), shared)) - x).square().sum()
    assert float(error) == 3 * 400


@pytest.mark.parametrize("scaled", [True, False])
def test_everything_kept_is_the_identity(scaled):
    method = gcbench.get_compressor("randomk", ratio=1.0, scaled=scaled)
    x = normal(SPREAD.numel, 5) * 1e-30
    x[3], x[4] = 3.4e38, -1e-45
    assert torch.equal(method.draw_shared(Context(SPREAD, key=KEY)), torch.arange(SPREAD.numel))
    assert torch.equal(sent(method, x, SPREAD), x)
    assert method.claims.gaussian_error == 0
    assert not method.draw_shared(Context(one(0), key=KEY)).numel()


def test_a_value_beyond_float32_saturates():
    method = gcbench.get_compressor("randomk", ratio=0.01)
    x = torch.full((1000,), -3e38)
    decoded = sent(method, x, one(1000))
    assert decoded.isfinite().all()
    assert float(decoded.min()) == -torch.finfo(torch.float32).max


def test_corrupt_payloads_are_refused():
    method = gcbench.get_compressor("randomk", ratio=0.1)
    segments = one(100)
    shared = method.draw_shared(Context(segments, key=KEY))
    good = codec.encode(method, normal(100), Context(segments, shared, KEY)).parts[0]
    broken = good.clone()
    broken[3] = math.nan
    cases = [(broken, "finite"), (good / 0, "finite"), (good[:-1], "expected")]
    cases += [(good.double(), "expected"), (good.repeat(2), "expected"), (good[:1], "expected")]
    for values, message in cases:
        with pytest.raises(PayloadError, match=f"randomk: .*{message}"):
            codec.decode(method, Payload((values,)), Context(segments, shared))
        with pytest.raises(PayloadError, match=f"randomk: .*{message}"):
            codec.mean(method, [Payload((good,)), Payload((values,))], Context(segments, shared))
    with pytest.raises(PayloadError, match="count 0"):
        codec.decode(method, Payload((good,), 0), Context(segments, shared))
