"""Top-k: what is kept, how far it can be off, and the bits of its positions and values."""

from __future__ import annotations

import itertools
import math
import sys

import pytest
import torch
from builders import encode_shards
from hypothesis import given, settings
from hypothesis import strategies as st

import gcbench
from gcbench import ops
from gcbench.core import codec
from gcbench.core.compressor import Context, Key, Payload, Segments
from gcbench.core.errors import PayloadError
from gcbench.ops import selection

KEY = Key(0, 0, 0)
NOTHING = torch.empty(0)
CODINGS = ("int32", "bitmap", "gaps")
COUNTS = ((0, 0), (1, 1), (31, 1), (32, 2), (33, 33), (1000, 10), (1023, 1), (1025, 700))
SPREAD = Segments.of([(100, 7), (0,), (1,), (33,), (1025,), (33,), (33,)])
"""Segments of many lengths, an empty one, neighbours of one length."""


def normal(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def one(n: int) -> Segments:
    return Segments.of([(n,)])


def round_trip(method, x: torch.Tensor, segments: Segments | None = None) -> torch.Tensor:
    segments = segments or one(len(x))
    return codec.decode(
        method, codec.encode(method, x, Context(segments, NOTHING, KEY)), Context(segments, NOTHING)
    )


def by_sorting(x: torch.Tensor, segments: Segments, ratio: float) -> list[int]:
    """The definition, element by element: magnitude first, then the lower index."""
    selected: list[int] = []
    for start, stop in itertools.pairwise(segments.offsets):
        count = max(1, math.ceil(round(ratio * (stop - start), 9))) if stop > start else 0
        order = sorted(range(start, stop), key=lambda i: (-abs(float(x[i])), i))
        selected += sorted(order[:count])
    return selected


# ---- what is kept --------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", CODINGS)
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.15, 0.5, 1.0])
def test_exactly_k_by_magnitude_then_index(positions, ratio):
    """Few distinct magnitudes, so that nearly every limit has ties; zeros of both signs."""
    method = gcbench.get_compressor("topk", ratio=ratio, positions=positions)
    n = SPREAD.numel
    generator = torch.Generator().manual_seed(1)
    few = torch.randint(-3, 4, (n,), generator=generator).float()
    few[::7] = -0.0
    for x in (normal(n), few, torch.zeros(n), -torch.zeros(n), torch.full((n,), -2.0)):
        payload = codec.encode(method, x, Context(SPREAD, NOTHING, KEY))
        selected, values = method._open(payload.parts, SPREAD)
        assert selected.tolist() == by_sorting(x, SPREAD, ratio)
        assert torch.equal(values, x[selected])


def test_equal_rows_with_ties_in_some():
    """Runs of segments of one length are selected together; ties in one row leave others alone."""
    x = torch.cat([normal(64, 1), torch.ones(64), torch.zeros(64), normal(64, 2)])
    segments = Segments.of([(256,)], 64)
    selected = ops.selection.largest(
        ops.selection.magnitude_order(x), ops.selection.kept_runs(segments, 0.1)
    )
    assert selected.tolist() == by_sorting(x, segments, 0.1)
    assert selected[7:21].tolist() == [*range(64, 71), *range(128, 135)]


def test_denormals_and_huge_values_are_ordered():
    x = torch.tensor([1e-45, -2e-45, 0.0, 3e38, -1e-40, 1e30, -3.1e38, 1e-38])
    for count, expected in ((3, [3, 5, 6]), (5, [3, 4, 5, 6, 7]), (7, [0, 1, 3, 4, 5, 6, 7])):
        selected = ops.selection.largest(
            ops.selection.magnitude_order(x), [ops.selection.KeptRun(0, 1, 8, count)]
        )
        assert selected.tolist() == expected
    close = torch.tensor([1.0, 1 + 2.0**-23, -1.0, 1 + 2.0**-22])
    selected = ops.selection.largest(
        ops.selection.magnitude_order(close), [ops.selection.KeptRun(0, 1, 4, 2)]
    )
    assert selected.tolist() == [1, 3], "the last bit decides"


@pytest.mark.parametrize(
    ("ratio", "length", "count"),
    [
        (0.07, 100, 7),
        (5 / 9, 9, 5),
        (0.01, 1, 1),
        (0.01, 100, 1),
        (0.01, 101, 2),
        (1e-9, 10**6, 1),
        (1.0, 9, 9),
    ],
)
def test_k_is_not_raised_by_rounding(ratio, length, count):
    """0.07 * 100 > 7 in floats, and the float 5 / 9 is above 5 / 9: ceilings of 8 and 6."""
    assert ops.selection.kept_runs(one(length), ratio)[0].keep == count


@pytest.mark.parametrize("n", [1, 2, 5, 9])
def test_no_sparse_vector_is_closer(n):
    """Against all supports of k elements: the best k-sparse vector on one keeps x there."""
    x = normal(n, n)
    for count in range(1, n + 1):
        method = gcbench.get_compressor("topk", ratio=count / n)
        error = float((x - round_trip(method, x)).double().square().sum())
        squares = x.double().square()
        best = min(
            float(squares.sum() - squares[list(support)].sum())
            for support in itertools.combinations(range(n), count)
        )
        assert error == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("ratio", [0.01, 0.15, 0.37])
def test_contraction_is_an_equality_for_equal_magnitudes(ratio):
    method = gcbench.get_compressor("topk", ratio=ratio)
    signs = normal(SPREAD.numel).sign() * 0.75
    for x, tight in ((signs, True), (normal(SPREAD.numel, 1), False)):
        error = float((x - round_trip(method, x, SPREAD)).double().square().sum())
        runs = ops.selection.kept_runs(SPREAD, ratio)
        expected = sum(
            (1 - run.keep / run.length) * float(rows.double().square().sum())
            for (_, rows), run in zip(SPREAD.views(x), runs, strict=True)
            if run.length
        )
        assert method.claims.error_bound(x, Context(SPREAD)) == pytest.approx(error, rel=1e-9)
        if tight:
            assert error == pytest.approx(expected, rel=1e-12)
        else:
            assert error < 0.95 * expected
        assert error <= method.claims.error_bound(x, Context(SPREAD))


def test_idempotent_permutation_and_scale_equivariant():
    method = gcbench.get_compressor("topk", ratio=0.05)
    x = normal(1000, 3)
    assert len(x.abs().unique()) == 1000, "distinct magnitudes: no tie depends on the order"
    sent = round_trip(method, x)
    assert torch.equal(round_trip(method, sent), sent)
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(4))
    assert torch.equal(round_trip(method, x[order]), sent[order])
    for factor in (2.0**-90, 0.5, 3.0):
        assert torch.equal(round_trip(method, x * factor), sent * factor)
    assert torch.equal(round_trip(method, -x), -sent)


@pytest.mark.parametrize(
    ("ratio", "selected"), [(0.15, 0.5575), (0.10, 0.4393), (0.01, 0.0845), (0.001, 0.0127)]
)
def test_gaussian_energy(ratio, selected):
    """rho + 2 tau phi(tau), by its published values, and measured on 1e6 normal elements.

    At .001 the sum over 1000 elements scatters by 1.4 %, so only the closed form is compared.
    """
    method = gcbench.get_compressor("topk", ratio=ratio)
    assert 1 - method.claims.gaussian_error == pytest.approx(selected, abs=6e-5)
    x = normal(1_000_000, 5)
    energy = float(round_trip(method, x).double().square().sum() / x.double().square().sum())
    assert energy == pytest.approx(selected, rel=0.01 if ratio > 0.001 else 0.05)
    assert gcbench.get_compressor("topk").claims.gaussian_error == pytest.approx(0.91551, abs=1e-5)
    assert gcbench.get_compressor("topk", ratio=1.0).claims.gaussian_error == 0
    rounded = gcbench.get_compressor("topk", ratio=0.99, values="fp16")
    assert rounded.claims.gaussian_error is None, "what is dropped is less than what is rounded"


def test_everything_kept_is_the_identity():
    for values in ("fp32", "fp16", "range"):
        method = gcbench.get_compressor("topk", ratio=1.0, values=values)
        x = torch.randint(-127, 128, (1000,), generator=torch.Generator().manual_seed(6)).float()
        assert torch.equal(round_trip(method, x), x)


# ---- bits on the wire ----------------------------------------------------------------------------


def test_exact_wire_bits_at_one_percent():
    """n = 1e6, k = 1e4: 50x with indices, 24x with a bitmap, 79x with gaps."""
    n, k = 1_024_000, 10_240
    bits = {
        positions: codec.bits(gcbench.get_compressor("topk", positions=positions), one(n))
        for positions in (*CODINGS, "smallest")
    }
    assert bits["int32"] == 64 * k
    assert bits["bitmap"] == 32 * k + n
    low = 6  # of 99 = (n - k) / k: 7 low bits would take 7 + 1 + 0.77, 5 take 5 + 1 + 3.09
    assert bits["gaps"] == 32 * k + low * k + k + (n - k) // 2**low
    assert bits["smallest"] == bits["gaps"]
    assert 32 * n / bits["int32"] == 50
    assert 32 * n / bits["bitmap"] == pytest.approx(24.24, abs=0.01)
    assert 32 * n / bits["gaps"] == pytest.approx(78.9, abs=0.1)
    assert gcbench.get_compressor("topk").claims.nominal_bits == 0.64


@pytest.mark.parametrize("ratio", [0.5, 0.3, 0.15, 0.05, 0.01, 0.003, 0.001, 0.0001])
def test_gaps_are_close_to_the_entropy(ratio):
    """log2 of C(n, k) is the least for k positions of any kind; at most 0.6 bits a position above.

    The promise of 2 + log2(n / k) bits a position holds too. Sizes are rounded up to 32 codes.
    """
    n = 3_000_000
    k = ops.selection.kept_total(ops.selection.kept_runs(one(n), ratio))
    spent = 32 * sum(size for _, size in selection.position_layout("gaps", n, k)) / k
    least = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / k / math.log(2)
    slack = 64 * 32 / k
    assert least <= spent <= least + 0.6 + slack
    assert spent <= 2 + math.log2(n / k) + slack
    if ratio == 0.01:
        assert (spent, least) == (pytest.approx(8.55, abs=0.01), pytest.approx(8.08, abs=0.01))


def test_smallest_is_the_smallest():
    """Bitmap from one half on, gaps below, and int32 where rounding to words decides."""
    for n, ratio in itertools.product((0, 1, 32, 40, 1000, 10**6), (1e-4, 0.01, 0.15, 0.5, 0.8, 1)):
        total = ops.selection.kept_total(ops.selection.kept_runs(one(n), ratio))
        sizes = {c: sum(s for _, s in selection.position_layout(c, n, total)) for c in CODINGS}
        chosen = ops.selection.position_coding("smallest", n, total)
        assert sizes[chosen] == min(sizes.values())
        method = gcbench.get_compressor("topk", ratio=ratio)
        assert codec.bits(method, one(n)) == 32 * (min(sizes.values()) + total)
    assert ops.selection.position_coding("smallest", 40, 1) == "int32"
    assert ops.selection.position_coding("smallest", 1000, 600) == "bitmap"
    assert ops.selection.position_coding("smallest", 1000, 10) == "gaps"


@pytest.mark.parametrize(("n", "k"), COUNTS)
@pytest.mark.parametrize("positions", CODINGS)
def test_positions_survive(n, k, positions):
    """Random sets, the first and the last k, evenly spread ones."""
    generator = torch.Generator().manual_seed(n)
    sets = [torch.randperm(n, generator=generator)[:k].sort().values for _ in range(5)]
    sets += [torch.arange(k), torch.arange(n - k, n), torch.arange(k) * (n // max(k, 1))]
    runs = [ops.selection.KeptRun(0, 1, n, k)] if n else []
    for chosen in sets:
        parts = selection.pack_positions(chosen, n, positions)
        assert tuple((p.dtype, p.numel()) for p in parts) == selection.position_layout(
            positions, n, k
        )
        assert torch.equal(selection.unpack_positions(parts, n, positions, runs, "x"), chosen)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_gaps_by_hand(data):
    """Low bits and unary increments, bit by bit: code i of a short tile lies in lane i % lanes."""
    n = data.draw(st.integers(1, 300))
    chosen = sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1)))
    k = len(chosen)
    low = selection.gaps_low_bits(n, k)
    rest = [p - j for j, p in enumerate(chosen)]
    unary = []
    for before, q in zip([0, *rest], rest, strict=False):
        unary += [0] * ((q >> low) - (before >> low)) + [1]
    unary += [0] * (k + ((n - k) >> low) - len(unary))
    parts = selection.pack_positions(torch.tensor(chosen), n, "gaps")
    assert parts[1].tolist() == words_of(unary, 1)
    assert parts[0].tolist() == (words_of([q & (2**low - 1) for q in rest], low) if low else [])


def words_of(codes: list[int], bits: int) -> list[int]:
    """Pack fewer than 1024 codes as the layout says: row j of a lane at bit j * bits."""
    assert len(codes) < 1024
    lanes = -(-len(codes) // 32)
    words = [[0] * lanes for _ in range(bits)]
    for i, code in enumerate(codes):
        for bit in range(bits):
            place = (i // lanes) * bits + bit
            words[place // 32][i % lanes] |= (code >> bit & 1) << place % 32
    return [word - 2**32 if word >= 2**31 else word for row in words for word in row]


def test_payloads_by_hand():
    """Two segments of 20 and 4; k = 2 and 1: elements 3 and 17 with -5 and 2, element 21 with 7."""
    x = torch.full((24,), 0.5)
    x[3], x[17], x[21] = -5.0, 2.0, 7.0
    segments = Segments.of([(4, 5), (4,)])
    expected = torch.zeros(24)
    expected[3], expected[17], expected[21] = -5.0, 2.0, 7.0
    wire = {
        "int32": [[3, 17, 21]],
        "bitmap": [[1 << 3 | 1 << 17 | 1 << 21]],
        # n - K = 21 and l = 0: q = 3, 16, 19, unary 0001 0{13}1 0001, a bitmap of 24
        "gaps": [[], [1 << 3 | 1 << 17 | 1 << 21]],
    }
    for positions, parts in wire.items():
        method = gcbench.get_compressor("topk", ratio=0.1, positions=positions)
        payload = codec.encode(method, x, Context(segments, NOTHING, KEY))
        assert [part.tolist() for part in payload.parts] == [*parts, [-5.0, 2.0, 7.0]]
        assert all(part.dtype == torch.int32 for part in payload.parts[:-1]), "no int64 is sent"
        assert torch.equal(codec.decode(method, payload, Context(segments, NOTHING)), expected)
    half = gcbench.get_compressor("topk", ratio=0.1, positions="int32", values="fp16")
    payload = codec.encode(half, x, Context(segments, NOTHING, KEY))
    assert payload.parts[1].view(torch.int16).tolist() == [0xC500 - 2**16, 0x4000, 0x4700]
    assert payload.nbytes == 3 * (4 + 2)


# ---- values --------------------------------------------------------------------------------------


def test_fp16_values_round_to_even_and_saturate():
    method = gcbench.get_compressor("topk", ratio=1.0, values="fp16")
    x = torch.tensor([1e30, -3e38, 65519.0, 65520.0, 2049.0, 2051.0, 1e-8, 2.0**-24, 0.1])
    expected = [65504.0, -65504.0, 65504.0, 65504.0, 2048.0, 2052.0, 0.0, 2.0**-24, 0.0999755859375]
    assert round_trip(method, x).tolist() == expected


@pytest.mark.parametrize("values", ["fp16", "range"])
@pytest.mark.parametrize("scale", [1e-44, 1e-30, 1e-7, 6e-5, 1.0, 3e4, 1e30])
def test_bound_with_rounded_values(values, scale):
    """The stated bound holds at every magnitude, and is never above the energy of the input."""
    method = gcbench.get_compressor("topk", ratio=0.2, values=values)
    n = SPREAD.numel
    for seed in range(5):
        x = normal(n, seed) * normal(n, seed + 50).abs().pow(4 * (seed % 3)) * scale
        error = float((x.double() - round_trip(method, x, SPREAD).double()).square().sum())
        square = float(x.double().square().sum())
        bound = method.claims.error_bound(x, Context(SPREAD))
        assert error * (1 - 1e-12) <= bound <= square * (1 + 1e-12)
        if scale in ((1.0, 6e-5) if values == "fp16" else (1e-30, 1.0, 1e30)):
            exact = gcbench.get_compressor("topk", ratio=0.2).claims.error_bound(x, Context(SPREAD))
            rest = (bound - exact) / square
            assert rest < (1e-3 if values == "fp16" else 0.03), "a bound that says something"


@pytest.mark.parametrize(("values", "magnitude"), [("fp16", 1 + 2.0**-12), ("range", 1 + 1 / 130)])
def test_bound_counts_the_rounding(values, magnitude):
    """Equal magnitudes drop all of (1 - k/d) ||x||^2, so each rounding comes on top of it."""
    method = gcbench.get_compressor("topk", ratio=0.5, values=values)
    x = torch.full((1000,), magnitude)
    error = float((x.double() - round_trip(method, x).double()).square().sum())
    dropped = gcbench.get_compressor("topk", ratio=0.5).claims.error_bound(x, Context(one(1000)))
    assert dropped * (1 + 1e-9) < error <= method.claims.error_bound(x, Context(one(1000)))
    assert error < dropped + 1000 * 2.0**-13


def test_bound_counts_what_lies_below_the_range():
    """One large value: 8 octaves below it the range ends, and what is smaller arrives as 0."""
    method = gcbench.get_compressor("topk", ratio=1.0, values="range")
    x = torch.full((1001,), 1e-3)
    x[500] = -1.0
    x[501] = 1.0
    sent = round_trip(method, x)
    assert sent.nonzero().squeeze(1).tolist() == [500, 501]
    error = float((x - sent).double().square().sum())
    assert error == pytest.approx(999e-6, rel=1e-6)
    assert (
        error <= method.claims.error_bound(x, Context(one(1001))) < float(x.double().square().sum())
    )


def test_range_values_are_within_two_to_the_minus_seven():
    """Of values within 7 octaves each is off by 2^-7 of itself at most; the largest may be, too."""
    method = gcbench.get_compressor("topk", ratio=0.25, values="range")
    x = normal(20_000, 8)
    sent = round_trip(method, x)
    selected = sent != 0
    assert int(selected.sum()) == 5000
    relative = ((sent - x) / x)[selected].abs()
    assert 2.0**-8 < float(relative.max()) <= 2.0**-7
    payload = codec.encode(method, x, Context(one(20_000), NOTHING, KEY))
    assert [p.numel() for p in payload.parts[-2:]] == [ops.packing.packed_words(5000, 10), 1]


def test_range_has_a_grid_for_each_nonempty_segment():
    method = gcbench.get_compressor("topk", values="range", positions="bitmap")
    scales = torch.tensor([1.0, 0.0, 1e-20, 1e10, 1e-3, 5.0, 1e-30])
    x = ops.statistics.scale_(normal(SPREAD.numel, 9), scales, SPREAD)
    payload = codec.encode(method, x, Context(SPREAD, NOTHING, KEY))
    assert payload.parts[-1].numel() == sum(length > 0 for length in SPREAD.lengths) == 6
    exact = round_trip(gcbench.get_compressor("topk"), x, SPREAD)
    torch.testing.assert_close(round_trip(method, x, SPREAD), exact, rtol=2.0**-7, atol=0)


# ---- exchanges -----------------------------------------------------------------------------------


def test_mean_counts_zero_where_a_worker_sent_nothing():
    """The mean is that of three decoded payloads, bit for bit; it has k to N k nonzeros."""
    method = gcbench.get_compressor("topk", ratio=0.05)
    xs = [normal(SPREAD.numel, seed) for seed in range(3)]
    payloads = [
        codec.encode(method, x, Context(SPREAD, NOTHING, Key(0, 0, r))) for r, x in enumerate(xs)
    ]
    mean = codec.mean(method, payloads, Context(SPREAD, NOTHING))
    decoded = [codec.decode(method, payload, Context(SPREAD, NOTHING)) for payload in payloads]
    assert torch.equal(mean, (decoded[0] + decoded[1] + decoded[2]) / 3)
    count = ops.selection.kept_total(ops.selection.kept_runs(SPREAD, 0.05))
    assert count < int((mean != 0).sum()) < 3 * count
    apart = [torch.zeros(SPREAD.numel) for _ in range(3)]
    for r, x in enumerate(apart):
        x[r::3] = 1 + normal(SPREAD.numel, r)[r::3].abs()
    merged = [codec.encode(method, x, Context(one(SPREAD.numel), NOTHING, KEY)) for x in apart]
    nonzero = int((codec.mean(method, merged, Context(one(SPREAD.numel), NOTHING)) != 0).sum())
    assert nonzero == 3 * math.ceil(0.05 * SPREAD.numel), "disjoint supports: N k"
    same = [payloads[0]] * 3
    assert int((codec.mean(method, same, Context(SPREAD, NOTHING)) != 0).sum()) == count, (
        "equal supports: k"
    )


def test_two_shot_shards_have_their_own_k_and_the_owner_selects_again():
    method = gcbench.get_compressor("topk", ratio=0.01)
    x = normal(5000, 10)
    segments = one(5000)
    bounds = [0, 2048, 4096, 5000]
    shards = encode_shards(method, x, segments, NOTHING, KEY, bounds)
    sizes = [shard.parts[-1].numel() for shard in shards]
    assert sizes == [21, 21, 10]
    cut = segments.shard(0, 2048)[0]
    other = codec.encode(method, normal(2048, 11), Context(cut, NOTHING, Key(0, 0, 1)))
    merged = codec.merge(method, [shards[0], other], Context(cut, NOTHING, KEY))
    assert merged.count == 2
    assert merged.layout == method.layout(cut, 2)
    mean = codec.mean(method, [shards[0], other], Context(cut, NOTHING))
    assert torch.equal(
        codec.decode(method, merged, Context(cut, NOTHING)), round_trip(method, mean, cut)
    )


@pytest.mark.parametrize("positions", CODINGS)
@pytest.mark.parametrize("values", ["fp32", "fp16", "range"])
def test_a_gradient_of_zeros(positions, values):
    """All zeros: k zeros are sent, the first of each segment, and zeros come back."""
    method = gcbench.get_compressor("topk", positions=positions, values=values)
    for zero in (torch.zeros(SPREAD.numel), -torch.zeros(SPREAD.numel)):
        payload = codec.encode(method, zero, Context(SPREAD, NOTHING, KEY))
        assert payload.layout == method.layout(SPREAD)
        assert not codec.decode(method, payload, Context(SPREAD, NOTHING)).any()
        starts = [a for a, b in itertools.pairwise(SPREAD.offsets) if b > a]
        assert set(starts) <= set(method._open(payload.parts, SPREAD)[0].tolist())


# ---- refused payloads ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("coding", "positions", "message"),
    [
        ("int32", [3, 3, 21], "increase"),
        ("int32", [17, 3, 21], "increase"),
        ("int32", [-1, 3, 21], "outside its segment"),
        ("int32", [3, 17, 24], "outside its segment"),
        ("int32", [3, 17, 2**31 - 1], "outside its segment"),
        *((coding, [3, 17, 19], "outside its segment") for coding in CODINGS),
        *((coding, [3, 21, 22], "outside its segment") for coding in CODINGS),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_positions_that_no_encoder_sends(coding, positions, message, backend):
    """Out of order, out of range, or one too many of a segment; in as far as the coding can say."""
    method = gcbench.get_compressor("topk", ratio=0.1, positions=coding)
    segments = Segments.of([(20,), (4,)])
    parts = selection.pack_positions(torch.tensor(positions), 24, coding)
    with ops.using(backend), pytest.raises(PayloadError, match=f"topk: .*{message}"):
        codec.decode(method, Payload((*parts, torch.ones(3))), Context(segments, NOTHING))


def test_gaps_that_no_encoder_sends():
    """Low bits that fall while the high ones stay, and a last position beyond the end."""
    method = gcbench.get_compressor("topk", ratio=0.002, positions="gaps")
    chosen = torch.tensor([10, 11, 500, 1999])
    low, high = selection.pack_positions(chosen, 2000, "gaps")
    bits = selection.gaps_low_bits(2000, 4)
    assert ops.packing.unpack(low, bits, 4).tolist() == [q % 2**bits for q in (10, 10, 498, 1996)]
    assert 1996 | 2**bits - 1 > 2000 - 4
    for place, code, message in ((0, 11, "increase"), (3, 2**bits - 1, "outside its segment")):
        codes = ops.packing.unpack(low, bits, 4)
        codes[place] = code
        payload = Payload((ops.packing.pack(codes, bits), high, torch.ones(4)))
        with pytest.raises(PayloadError, match=f"topk: .*{message}"):
            codec.decode(method, payload, Context(one(2000), NOTHING))


def test_other_corrupt_payloads():
    segments = Segments.of([(20,), (4,), (0,)])
    x = normal(24)

    def refused(method, parts, message, count=1):
        with pytest.raises(PayloadError, match=f"topk: .*{message}"):
            codec.decode(method, Payload(tuple(parts), count), Context(segments, NOTHING))

    for positions in CODINGS:
        method = gcbench.get_compressor("topk", ratio=0.1, positions=positions)
        *where, values = codec.encode(method, x, Context(segments, NOTHING, KEY)).parts
        for bad in (math.nan, math.inf, -math.inf):
            broken = values.clone()
            broken[1] = bad
            refused(method, [*where, broken], "finite")
        refused(method, [*where, values[:-1]], "expected")
        refused(method, [*where, values.double()], "expected")
        refused(method, [*where, values, values], "expected")
        refused(method, [*where, values], "count 0", count=0)
        refused(method, [where[0].long(), *where[1:], values], "expected")
        if positions != "int32":
            for bit, message in ((1 << 30, "after the last"), (1 << 1, "bits set")):
                if not int(where[-1][0]) & bit:
                    refused(method, [*where[:-1], where[-1] | bit, values], message)
    method = gcbench.get_compressor("topk", values="range")
    long = one(1000)
    *where, words, grid = codec.encode(method, normal(1000), Context(long, NOTHING, KEY)).parts
    for bad in (0, -1, 2**31 - 1):
        with pytest.raises(PayloadError, match=r"topk: .*grid"):
            codec.decode(
                method, Payload((*where, words, torch.full_like(grid, bad))), Context(long, NOTHING)
            )
    spare = words.clone()
    spare[-1] |= 1 << 20  # 10 values of 10 bits in a lane of 32: codes 10 to 31 are not there
    with pytest.raises(PayloadError, match="topk: a bit is set after the last of 10 codes"):
        codec.decode(method, Payload((*where, spare, grid)), Context(long, NOTHING))


def test_options_are_checked():
    for options in (
        {"ratio": 0.0},
        {"ratio": 1.5},
        {"ratio": math.nan},
        {"positions": "int64"},
        {"values": "bf16"},
    ):
        with pytest.raises(gcbench.core.errors.GcbenchError):
            gcbench.get_compressor("topk", **options)


def test_a_million_elements_are_not_looped_over():
    """Both in one segment and in groups of 512, of which there are 2,000."""
    x = normal(1_000_000, 14)
    for granularity in ("tensor", 512):
        method = gcbench.get_compressor("topk", granularity=granularity)
        segments = Segments.of([(1000, 1000)], granularity)
        calls = 0

        def count(frame: object, event: str, what: object) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(count)
        try:
            round_trip(method, x, segments)
        finally:
            sys.setprofile(None)
        assert calls < 50_000
