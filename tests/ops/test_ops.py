"""The reference operations: published vectors, layouts, and statistics against plain formulas."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gcbench import ops
from gcbench.core.compressor import TILE, Key, Segments
from gcbench.core.errors import PayloadError, UsageError
from gcbench.ops import native

# Random123's known-answer file (kat_vectors), philox4x32 with 10 rounds: counter, key, output.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
def test_philox_known_answers(counter, key, output):
    blocks = ops.random.philox([torch.tensor([c]) for c in counter], key)
    assert tuple(int(word) for word in blocks) == output


def test_draws_follow_the_documented_windows():
    """Recompute single draws from the layout's words: tile, lane, row, byte window."""
    key = Key(seed=7 << 32 | 5, step=3, rank=2, stream=1)
    draws = ops.random.draws24(key, 3 * TILE)
    for element in (0, 31, 32, 1023, 1024, 1500, 3071):
        tile, place = divmod(element, TILE)
        row, lane = divmod(place, 32)
        index = tile * 32 + lane
        counter = [index & 0xFFFFFFFF, (index >> 32) << 8 | row // 16, 3, 1 << 24 | 2]
        words = [int(w) for w in ops.random.philox([torch.tensor([c]) for c in counter], (5, 7))]
        block = b"".join(word.to_bytes(4, "big") for word in words) * 2
        assert int(draws[element]) == int.from_bytes(block[row % 16 : row % 16 + 3], "big")


@pytest.mark.parametrize(("offset", "n"), [(0, 1), (1, 5), (1000, 100), (1023, 2), (1024, 2048)])
def test_draws_depend_on_the_index_alone(offset, n):
    whole = ops.random.draws24(Key(1, 2, 3), offset + n)
    assert torch.equal(ops.random.draws24(Key(1, 2, 3, offset), n), whole[offset:])


def test_draws_beyond_32_bit_indices_differ():
    low, high = ops.random.draws24(Key(1, 0, 0, 0), 64), ops.random.draws24(Key(1, 0, 0, 2**37), 64)
    assert not torch.equal(low, high)


def test_streams_of_different_addresses_are_unrelated():
    base = Key(seed=1, step=2, rank=3, stream=4)
    n = 1 << 16
    a = ops.random.uniform(base, n)
    for other in (
        base._replace(seed=2),
        base._replace(seed=1 + (1 << 32)),
        base._replace(step=3),
        base._replace(rank=4),
        base._replace(stream=5),
    ):
        b = ops.random.uniform(other, n)
        correlation = float(torch.corrcoef(torch.stack([a, b]))[0, 1])
        # |r| sqrt(n) is standard normal: 5 is passed with probability 6e-7, per comparison.
        assert abs(correlation) * math.sqrt(n) < 5, other


def test_draws_are_uniform():
    n, bins = 1 << 20, 256
    draws = ops.random.draws24(Key(11, 0, 0), n)
    counts = torch.bincount(draws >> 16, minlength=bins).double()
    chi2 = float(((counts - n / bins) ** 2 / (n / bins)).sum())
    # chi2 with 255 degrees of freedom has sd 22.6: six of them, error probability below 1e-8.
    assert abs(chi2 - 255) < 6 * 22.6
    low = torch.bincount(draws & 0xFF, minlength=bins).double()
    assert abs(float(((low - n / bins) ** 2 / (n / bins)).sum()) - 255) < 6 * 22.6


def test_neighbouring_rows_share_little():
    """Rows of one lane share two bytes; their correlation is at most 2^-8 as the docstring says."""
    draws = ops.random.uniform(Key(5, 0, 0), 1 << 22).view(-1, 32, 32)
    rows = draws.transpose(1, 2).reshape(-1, 32)
    correlation = torch.corrcoef(rows.T)
    off = correlation - torch.diag(correlation.diag())
    # 2^17 lanes: the noise of an entry is 0.0028, times 5 for 496 entries.
    assert float(off.abs().max()) < 2**-8 + 5 * 0.0028


def test_normal_moments():
    z = ops.random.normal(Key(3, 0, 0), 1 << 20).double()
    n = len(z)
    assert abs(float(z.mean())) < 5 / math.sqrt(n)
    assert abs(float((z**2).mean()) - 1) < 5 * math.sqrt(2 / n)
    assert abs(float((z**4).mean()) - 3) < 5 * math.sqrt(96 / n)


def test_key_out_of_range_is_refused():
    for key in (Key(0, 2**32, 0), Key(0, 0, 2**24), Key(0, 0, 0, 0, 256), Key(0, -1, 0)):
        with pytest.raises(ValueError, match=r"2\^32"):
            ops.random.draws24(key, 4)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    ("draw", "offset", "hit", "missed"),
    [(0, 5_344_841, 2.0**-25, (2.0**-26, 0.0)), (2**24 - 1, 33_732_518, 1.0, (1 - 2.0**-24,))],
)
def test_the_extreme_draws_of_a_ternary_code(backend, draw, offset, hit, missed):
    """(u + 1/2) / 2^24 <= |x|: the least draw takes no zero along, the greatest leaves no 1 out."""
    if backend == "cpu" and not native.status()[0]:
        pytest.skip(native.status()[1])
    key, one = Key(0, 0, 0, offset), Segments((0, 1))
    assert ops.random.draws24(key, 1).tolist() == [draw]
    scale = torch.ones(1)
    with ops.using(backend):
        for x, code in ((hit, 1.0), (-hit, -1.0), *((each, 0.0) for each in missed)):
            words = ops.ternary.encode(torch.tensor([x]), None, scale, one, key)
            assert ops.ternary.mean([(words, 1)], scale, one).tolist() == [code]


@given(st.integers(1, 16), st.integers(0, 3000), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_pack_round_trip(bits, n, seed):
    codes = torch.randint(0, 1 << bits, (n,), generator=torch.Generator().manual_seed(seed))
    words = ops.packing.pack(codes, bits)
    assert words.numel() == ops.packing.packed_words(n, bits)
    assert torch.equal(ops.packing.unpack(words, bits, n), codes.int())


@pytest.mark.parametrize("bits", range(1, 17))
def test_pack_layout(bits):
    """Place one code at a time and find it at its documented word and bit."""
    n = TILE + 100  # a full tile, and a tail of 4 lanes
    for index in (0, 1, 31, 32, 33, 1023, 1024, 1027, 1028, 1123):
        codes = torch.zeros(n, dtype=torch.int64)
        codes[index] = (1 << bits) - 1
        words = [int(w) & 0xFFFFFFFF for w in ops.packing.pack(codes, bits)]
        tile, place = divmod(index, TILE)
        lanes = 32 if tile == 0 else 4
        row, lane = divmod(place, lanes)
        expected = [0] * len(words)
        for bit in range(row * bits, (row + 1) * bits):
            expected[tile * 32 * bits + bit // 32 * lanes + lane] |= 1 << bit % 32
        assert words == expected


def test_packed_size_is_exact_to_a_lane():
    assert ops.packing.packed_words(0, 2) == 0
    assert ops.packing.packed_words(1, 2) == 2
    assert ops.packing.packed_words(32, 2) == 2
    assert ops.packing.packed_words(33, 2) == 4
    assert ops.packing.packed_words(1 << 20, 2) * 32 == 2 << 20


def test_unpack_refuses_other_lengths():
    words = ops.packing.pack(torch.ones(100, dtype=torch.int32), 3)
    for bad in (words[:-1], torch.cat([words, words[:1]]), words.long(), words.float()):
        with pytest.raises(PayloadError, match="expected"):
            ops.packing.unpack(bad, 3, 100)
    with pytest.raises(ValueError, match="17 bits per code"):
        ops.packing.pack(words, 17)


def test_split_words_cuts_at_tiles():
    codes = torch.randint(0, 8, (5000,), generator=torch.Generator().manual_seed(0))
    bounds = [0, 2048, 2048, 4096, 5000]
    pieces = ops.packing.split_words(ops.packing.pack(codes, 3), 3, bounds)
    assert len(pieces) == 4
    for piece, start, stop in zip(pieces, bounds, bounds[1:], strict=False):
        assert torch.equal(piece, ops.packing.pack(codes[start:stop], 3))


SHAPES = [(64, 3, 5, 5), (64,), (10, 700), (0,), (1,), (3, 1025)]


@pytest.mark.parametrize("granularity", ["tensor", "column", "model", 25, 512, 5000])
def test_segment_statistics(granularity):
    segments = Segments.of(SHAPES, granularity)
    x = torch.randn(segments.numel, generator=torch.Generator().manual_seed(1)) + 0.5
    pieces = [x[a:b].double() for a, b in zip(segments.offsets, segments.offsets[1:], strict=False)]
    absmax = torch.tensor([float(p.abs().max()) if len(p) else 0.0 for p in pieces])
    assert torch.equal(ops.statistics.absmax(x, segments), absmax)
    total, square = ops.statistics.moments(x, segments)
    torch.testing.assert_close(total, torch.stack([p.sum() for p in pieces]))
    torch.testing.assert_close(square, torch.stack([(p * p).sum() for p in pieces]))
    std = torch.stack([p.std(correction=0) if len(p) else p.sum() for p in pieces])
    torch.testing.assert_close(ops.statistics.std(x, segments), std.float())
    scaled = ops.statistics.scale_(x.clone(), torch.arange(float(len(segments))), segments)
    expected = torch.cat([p.float() * i for i, p in enumerate(pieces)])
    assert torch.equal(scaled, expected)
    limit = torch.full((len(segments),), 0.3)
    assert torch.equal(ops.statistics.clamp_(x.clone(), limit, segments), x.clamp(-0.3, 0.3))


def test_moments_do_not_depend_on_threads():
    x = torch.randn(300_000, generator=torch.Generator().manual_seed(2))
    segments = Segments.of([(300_000,)])
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(torch.cat(ops.statistics.moments(x, segments)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_moments_follow_the_documented_order():
    """Halve by hand: tiles of 1024, then the tiles' sums."""
    x = torch.randn(2500, generator=torch.Generator().manual_seed(3))

    def halve(values: list[float]) -> float:
        while len(values) > 1:
            half = len(values) // 2
            values = [values[i] + values[i + half] for i in range(half)]
        return values[0]

    tiles = [x[i : i + 1024].double().tolist() for i in (0, 1024, 2048)]
    sums = [halve(tile + [0.0] * (1024 - len(tile))) for tile in tiles]
    total, _ = ops.statistics.moments(x, Segments.of([(2500,)]))
    assert float(total) == halve([*sums, 0.0])


def test_segments_of_shapes():
    assert Segments.of([(4, 3), (5,)], "tensor").offsets == (0, 12, 17)
    assert Segments.of([(4, 3), (5,)], "model").offsets == (0, 17)
    assert Segments.of([(4, 3), (5,)], "column").offsets == (0, 3, 6, 9, 12, 17)
    assert Segments.of([(4, 3), (5,)], 5).offsets == (0, 5, 10, 12, 17)
    for bad in ("row", 0, -3):
        with pytest.raises(UsageError, match="granularity"):
            Segments.of([(4, 3)], bad)


def test_segments_shard():
    segments = Segments((0, 10, 10, 30, 40))
    shard, which = segments.shard(5, 35)
    assert (shard.offsets, which) == ((0, 5, 5, 25, 30), range(0, 4))
    shard, which = segments.shard(10, 30)
    assert (shard.offsets, which) == ((0, 20), range(2, 3))
    shard, which = segments.shard(40, 40)
    assert (shard.offsets, which) == ((0,), range(0))


def test_segments_shard_by_brute_force():
    """Every shard of a layout with empty and cut segments, against the definition."""
    segments = Segments((0, 0, 3, 3, 3, 7, 8, 8))
    pairs = list(pairwise(segments.offsets))
    for start in range(9):
        for stop in range(start, 9):
            shard, which = segments.shard(start, stop)
            if (start, stop) == (0, 8):
                assert (shard, which) == (segments, range(7))
                continue
            inside = [i for i, (a, b) in enumerate(pairs) if a < stop and b > start]
            assert list(which) == inside
            selected = [min(pairs[i][1], stop) - max(pairs[i][0], start) for i in inside]
            assert list(shard.lengths) == selected


def test_the_chosen_backend_serves_where_it_can(monkeypatch):
    """Kernels serve tensors of their device, by name, and only inside their with statement."""
    taken = []
    kernels = {"sign.pack": lambda **options: taken.append(options)}
    x = torch.tensor([1.0, -1.0, 0.0])
    with ops.using("reference"):  # its end chooses real kernels again, so the patch ends before
        words = ops.sign.pack(x)
        assert words.tolist() == [0b101]
        with monkeypatch.context() as patched:
            patched.setattr(native, "status", lambda: (True, ""))
            patched.setattr(native, "KERNELS", kernels)
            with ops.using("cpu"):
                out = ops.sign.pack(x, bits=2)
                assert [(call["bits"], call["out"] is out) for call in taken] == [(2, True)]
                assert ops.sign.pack(x.to("meta")).device.type == "meta"
                assert ops.sign.decode(words, 1, 3, "").tolist() == [1, -1, 1]  # without a kernel
                with ops.using("reference"):
                    assert ops.sign.pack(x).tolist() == words.tolist()
                ops.sign.pack(x)
            assert ops.sign.pack(x).tolist() == words.tolist()
    assert len(taken) == 2
