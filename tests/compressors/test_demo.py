"""DeMo: the cosine transform, what of each chunk is sent, and the average over its senders."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import scipy.fft  # scikit-learn brings it: an implementation that shares nothing with ours
import scipy.stats
import torch
from gcbench.compressors import demo as code

import gcbench
from gcbench import ops
from gcbench.core import codec
from gcbench.core.compressor import Context, Key, Payload, Segments
from gcbench.core.errors import PayloadError, UsageError

NOTHING = torch.empty(0)
KEY = Key(0, 0, 0)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def encode(x: torch.Tensor, segments: Segments, **fields) -> Payload:
    return codec.encode(
        gcbench.get_compressor("demo", **fields), x, Context(segments, NOTHING, KEY)
    )


def sent(x: torch.Tensor, segments: Segments, **fields) -> torch.Tensor:
    demo = gcbench.get_compressor("demo", **fields)
    return codec.decode(demo, encode(x, segments, **fields), Context(segments, NOTHING))


def relative_error(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x.double() - y).square().sum() / x.double().square().sum())


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 37, 64, 256])
def test_the_transform_is_orthonormal(n):
    matrix = ops.dct.matrix(n)
    assert matrix.dtype == torch.float32
    identity = torch.eye(n, dtype=torch.float64)
    torch.testing.assert_close(matrix.double() @ matrix.double().T, identity, rtol=0, atol=1e-6)
    expected = torch.from_numpy(scipy.fft.dct(np.eye(n), axis=0, norm="ortho"))
    torch.testing.assert_close(matrix, expected.float(), rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("shape", "cut"),
    [
        ((128, 192), (2, 64, 3, 64)),
        ((10, 100), (1, 10, 2, 50)),
        ((6, 4, 3, 3), (1, 6, 1, 36)),  # four dimensions: shape[0] x the rest
        ((512, 512, 3, 3), (8, 64, 72, 64)),
        ((101, 103), (101, 1, 103, 1)),  # primes above 64 leave chunks of one element
        ((67, 64), (67, 1, 1, 64)),
        ((96,), (1, 1, 2, 48)),
        ((61,), (1, 1, 1, 61)),
        ((), (1, 1, 1, 1)),
    ],
)
def test_chunks_have_the_largest_divisors(shape, cut):
    [chunks] = code.cut_chunks(Segments.of([shape]), 64, 32)
    assert (chunks.down, chunks.height, chunks.across, chunks.width) == cut
    assert chunks.number * chunks.size == math.prod(shape)
    assert chunks.keep == min(32, chunks.size)


@pytest.mark.parametrize("shape", [(8, 6), (12, 5, 2), (67, 8), (30,), (5, 7), (1,)])
def test_coefficients_are_those_of_each_block(shape):
    """Every block of the matrix against scipy's transform in two dimensions, and back again."""
    segments, x = Segments.of([(3,), shape]), normal(3 + math.prod(shape))
    cuts = code.cut_chunks(segments, 6, 32)
    cut = cuts[1]
    coefficients = code.dct(x, cuts)
    matrix = x[3:].view(cut.down * cut.height, -1).double().numpy()
    expected = [
        scipy.fft.dctn(block, norm="ortho").ravel()
        for rows in np.split(matrix, cut.down)
        for block in np.split(rows, cut.across, axis=1)
    ]
    received = coefficients[cut.place].double().numpy().reshape(cut.number, cut.size)
    np.testing.assert_allclose(received, np.array(expected), rtol=0, atol=2e-6)
    torch.testing.assert_close(code.inverse_dct(coefficients, cuts), x, rtol=0, atol=2e-6)
    energy = [float(v.double().square().sum()) for v in (x, coefficients)]
    assert energy[0] == pytest.approx(energy[1], rel=1e-6)  # Parseval


def test_four_dimensions_are_a_matrix():
    x = normal(32 * 16 * 9)
    conv, matrix = Segments.of([(32, 16, 3, 3)]), Segments.of([(32, 144)])
    assert torch.equal(sent(x, conv), sent(x, matrix))
    assert 0.5 < relative_error(x, sent(x, conv)) < 1


def test_bytes_of_a_chunk():
    """32 (12 + 32) bits for 64 x 64 elements: 0.344 per element, 93 times less than float32.

    With the authors' 64-bit indices it would be 0.75, 42.7 times less.
    """
    segments = Segments.of([(512, 512)])
    payload = encode(normal(512 * 512), segments)
    assert payload.nbytes == 64 * 32 * (12 + 32) // 8
    assert 8 * payload.nbytes / segments.numel == 0.34375
    assert 4 * segments.numel / payload.nbytes == pytest.approx(93.1, abs=0.05)
    assert 64 * 32 * (64 + 32) / segments.numel == 0.75
    # A vector's chunks of 64 keep half of their coefficients, 6 + 32 bits each: little gain.
    vector = Segments.of([(2**15,)])
    assert 8 * encode(normal(2**15), vector).nbytes / vector.numel == 0.5 * 38


def test_the_bytes_on_the_wire():
    """Indices of 1, 2 and 3 bits, each width packed by itself, narrow ones first; then values."""
    segments = Segments.of([(6,), (2,), (2, 2), (5,), (0,), (1,)])
    coefficients = torch.zeros(18)
    places = {5: 1.5, 7: -2.0, 10: 3.0, 16: 0.25, 17: 7.0}
    for place, value in places.items():
        coefficients[place] = value
    x = code.inverse_dct(coefficients, code.cut_chunks(segments, 8, 1))
    payload = encode(x, segments, chunk=8, topk=1)
    # In their chunks: 5 of 6 and 4 of 5 (3 bits), 1 of 2 and 0 of 1 (1 bit), 2 of 4 (2 bits).
    # Up to 32 codes share one lane: code i begins at bit i * width of `width` words.
    assert payload.parts[0].dtype == torch.int32
    assert payload.parts[0].tolist() == [0b1, 0b10, 0, 0b100_101, 0, 0]
    values = struct.pack("<5f", *[float(v) for v in payload.parts[1]])
    assert bytes(payload.to_bytes().tolist())[-20:] == values
    expected = torch.tensor([1.5, -2.0, 3.0, 0.25, 7.0])
    torch.testing.assert_close(payload.parts[1], expected, rtol=1e-6, atol=0)


def test_largest_coefficients_with_ties():
    """Of equal magnitudes, whatever their sign, the lowest indices stay; chunks do not mix."""
    cuts = [code.Chunks(0, 1, 1, 3, 5, 2)]
    coefficients = torch.tensor([1.0, -2, 2, 2, 0, 0, 0, 0, 0, 0, 9, 8, 8, -9, 10])
    places, _ = code.selection.largest_elements(coefficients, code.kept_runs(cuts))
    assert places.tolist() == [1, 2, 5, 6, 10, 14]


def test_the_largest_are_kept():
    """Against a full sort, for every chunk; the rest of the energy is the error."""
    segments = Segments.of([(40, 48), (100,)])
    x = normal(2020)
    cuts = code.cut_chunks(segments, 8, 5)
    coefficients = code.dct(x, cuts)
    selected = torch.zeros_like(coefficients)
    for cut in cuts:
        rows = coefficients[cut.place].view(cut.number, cut.size)
        order = rows.abs().argsort(1, descending=True)[:, : cut.keep]
        selected[cut.place].view_as(rows).scatter_(1, order, rows.gather(1, order))
    assert int((selected != 0).sum()) == (30 + 20) * 5
    received = sent(x, segments, chunk=8, topk=5)
    torch.testing.assert_close(received, code.inverse_dct(selected, cuts), rtol=0, atol=1e-6)
    dropped = float((coefficients - selected).double().square().sum())
    assert float((x - received).double().square().sum()) == pytest.approx(dropped, rel=1e-5)


@pytest.mark.parametrize("fields", [{}, {"topk": 1}, {"chunk": 8, "topk": 7}, {"topk": 5000}])
@pytest.mark.parametrize("kind", ["normal", "flat", "spike", "huge", "tiny"])
def test_energy_bound(fields, kind):
    """The dropped share is at most 1 - topk / size of each chunk; equal coefficients reach it."""
    segments = Segments.of([(64, 128), (96,), (3, 7, 5)])
    demo = gcbench.get_compressor("demo", **fields)
    cuts = code.cut_chunks(segments, demo.chunk, demo.topk)
    x = normal(segments.numel)
    if kind == "flat":
        x = code.inverse_dct(x.sign(), cuts)
    elif kind == "spike":
        x = torch.zeros(segments.numel).index_fill(0, torch.tensor([77]), 2.0)
    elif kind != "normal":
        x = x * {"huge": 1e30, "tiny": 1e-41}[kind]
    error = float((x.double() - sent(x, segments, **fields)).square().sum())
    bound, energy = demo.claims.error_bound(x, Context(segments)), float(x.double().square().sum())
    assert error <= bound < energy
    if kind == "flat":
        assert error >= bound - 1e-5 * energy


def dropped_share(size: int, selected: int) -> float:
    """E[x^2; dropped] for normal values, by the midpoint rule: at least `kept` others are larger.

    The share of a chunk's energy that its `kept` largest of `size` values leave behind, exactly.
    """
    x = (np.arange(4000) + 0.5) / 500
    density = 2 * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    larger = np.array([math.erfc(t / math.sqrt(2)) for t in x])
    dropped = scipy.stats.binom.sf(selected - 1, size - 1, larger)
    return float((x * x * density * dropped).sum() / 500)


@pytest.mark.parametrize(
    ("shape", "size", "share"), [((1024, 1024), 4096, 0.93074), ((2**20,), 64, 0.07546)]
)
def test_gaussian_error_is_that_of_top_k(shape, size, share):
    """32 of 4096: the share of top-k in the limit, 1 - 2 (t phi(t) + Q(t)), 2 Q(t) = 32 / 4096.

    32 of 64 leave 0.0755 behind, 6 % more than that limit's 0.0713: the chunk's size counts.
    """
    x, segments = normal(2**20), Segments.of([shape])
    assert dropped_share(size, 32) == pytest.approx(share, rel=2e-4)
    assert relative_error(x, sent(x, segments)) == pytest.approx(share, rel=0.01)


@pytest.mark.parametrize("shapes", [[(16, 24), (30,), (), (0,)], [(67, 71)], [(8, 2, 3, 3)]])
def test_whole_chunks_are_exact_and_the_update_is_a_sign(shapes):
    """topk = chunk size: nothing is left over, and the update is sign(mean g)."""
    segments = Segments.of(shapes)
    demo = gcbench.get_compressor("demo", chunk=64, topk=64 * 64)
    xs = [normal(segments.numel, seed=i) for i in range(3)]
    payloads = [codec.encode(demo, x, Context(segments, NOTHING, KEY)) for x in xs]
    for x, payload in zip(xs, payloads, strict=True):
        torch.testing.assert_close(
            codec.decode(demo, payload, Context(segments, NOTHING)), x, rtol=0, atol=3e-6
        )
    mean = sum(xs) / 3
    assert float(mean.abs().min()) > 1e-5
    assert torch.equal(codec.mean(demo, payloads, Context(segments, NOTHING)), mean.sign())


def test_averages_are_over_the_senders():
    """Chunk of 4, topk 2: coefficient 0 has three senders, 1 two, 2 one, 3 none."""
    segments = Segments.of([(4,)])
    cuts = code.cut_chunks(segments, 4, 2)
    rows = [[9.0, 0.6, 0.1, 0.05], [3.0, 0.8, 0.1, 0.05], [-3.0, 0.1, 5.0, 0.05]]
    xs = [code.inverse_dct(torch.tensor(row), cuts) for row in rows]
    demo = gcbench.get_compressor("demo", chunk=4, topk=2, sign=False)
    payloads = [codec.encode(demo, x, Context(segments, NOTHING, KEY)) for x in xs]
    mean = codec.mean(demo, payloads, Context(segments, NOTHING))
    expected = code.inverse_dct(torch.tensor([9 / 3, 1.4 / 2, 5.0, 0.0]), cuts)
    torch.testing.assert_close(mean, expected, rtol=1e-6, atol=1e-6)
    over_all = code.inverse_dct(torch.tensor([9 / 3, 1.4 / 3, 5 / 3, 0.0]), cuts)
    assert (mean.sign() != over_all.sign()).any(), "the two rules must differ in a sign"
    signed = gcbench.get_compressor("demo", chunk=4, topk=2)
    assert torch.equal(codec.mean(signed, payloads, Context(segments, NOTHING)), expected.sign())


def test_the_sign_of_zero_is_zero():
    segments = Segments.of([(64, 64), (10,)])
    demo = gcbench.get_compressor("demo")
    x = torch.zeros(segments.numel)
    x[-10:] = normal(10)
    payloads = [codec.encode(demo, v, Context(segments, NOTHING, KEY)) for v in (x, x)]
    update = codec.mean(demo, payloads, Context(segments, NOTHING))
    assert not update[:-10].any()
    assert torch.equal(update[-10:], x[-10:].sign())
    opposite = [codec.encode(demo, v, Context(segments, NOTHING, KEY)) for v in (x, -x)]
    assert not codec.mean(demo, opposite, Context(segments, NOTHING)).any()


def test_the_residual_is_theirs_in_units_of_the_gradient():
    """delta <- 0.999 delta + lr g, less what was sent: the same updates at any constant lr.

    Their loop is written out here with scipy's transform in float64, for two workers.
    """
    segments, rate, decay = Segments.of([(16, 16)]), 0.003, 0.999
    demo = gcbench.get_compressor("demo", chunk=8, topk=6)
    assert demo.memory == "residual"
    assert demo.memory_options == {"decay": decay}
    ours, theirs = [torch.zeros(256)] * 2, [np.zeros((16, 16))] * 2
    for step in range(15):
        gradients = [normal(256, seed=2 * step + i) for i in range(2)]
        xs = [decay * r + g for r, g in zip(ours, gradients, strict=True)]
        payloads = [codec.encode(demo, x, Context(segments, NOTHING, KEY)) for x in xs]
        ours = [
            x - codec.decode(demo, payload, Context(segments, NOTHING))
            for x, payload in zip(xs, payloads, strict=True)
        ]
        update = codec.mean(demo, payloads, Context(segments, NOTHING))

        theirs = [
            decay * d + rate * g.view(16, 16).double().numpy()
            for d, g in zip(theirs, gradients, strict=True)
        ]
        expected = np.zeros((16, 16))
        for block in np.ndindex(2, 2):
            place = tuple(slice(8 * b, 8 * b + 8) for b in block)
            total, senders = np.zeros(64), np.zeros(64)
            for delta in theirs:
                c = scipy.fft.dctn(delta[place], norm="ortho").ravel()
                q = np.where(np.arange(64)[:, None] == np.argsort(-abs(c))[:6], 1, 0).sum(1) * c
                delta[place] -= scipy.fft.idctn(q.reshape(8, 8), norm="ortho")
                total, senders = total + q, senders + (q != 0)
            average = (total / np.maximum(senders, 1)).reshape(8, 8)
            expected[place] = scipy.fft.idctn(average, norm="ortho")
        clear = torch.from_numpy(abs(expected) > 1e-6 * rate).view(-1)
        assert clear.double().mean() > 0.99
        assert torch.equal(update[clear], torch.from_numpy(expected).view(-1).sign().float()[clear])


@pytest.mark.parametrize("value", [0.0, 1.0, -1e30, 3e38, 1e-42])
def test_special_values(value):
    segments = Segments.of([(64, 64), (67,), (0,), (3, 5, 7)])
    demo = gcbench.get_compressor("demo")
    spike = torch.zeros(segments.numel)
    spike[100] = value
    constant = torch.full((segments.numel,), value)
    for x in (constant, spike):
        payload = codec.encode(demo, x, Context(segments, NOTHING, KEY))
        decoded = codec.decode(demo, payload, Context(segments, NOTHING))
        assert decoded.isfinite().all()
        assert codec.mean(demo, [payload, payload], Context(segments, NOTHING)).isfinite().all()
    if 0 < abs(value) < 1e38:
        torch.testing.assert_close(sent(constant, segments), constant, rtol=1e-5, atol=5e-44)


def test_corrupt_payloads_are_refused():
    segments = Segments.of([(6,), (64, 64)])
    demo = gcbench.get_compressor("demo", topk=4)
    words, values = codec.encode(
        demo, normal(segments.numel), Context(segments, NOTHING, KEY)
    ).parts
    cuts = code.cut_chunks(segments, 64, 4)
    small, large = [0, 2, 3, 5], [6, 7, 2000 + 6, 4095 + 6]
    good = code.pack_places(torch.tensor(small + large), cuts)
    assert code.unpack_places(good, cuts).tolist() == small + large
    assert good.shape == words.shape
    for codes in ([0, 2, 3, 6], [0, 2, 3, 7], [0, 2, 2, 5], [3, 2, 4, 5], [0, 0, 0, 0]):
        split = ops.packing.packed_words(4, 3)
        bad = torch.cat([ops.packing.pack(torch.tensor(codes), 3), good[split:]])
        wrong, ctx = Payload((bad, values)), Context(segments, NOTHING)
        with pytest.raises(PayloadError, match="demo: indices in chunks of 6"):
            codec.decode(demo, wrong, ctx)
        with pytest.raises(PayloadError, match="demo: indices in chunks of 6"):
            codec.mean(demo, [wrong], ctx)
    for value in (math.nan, math.inf):
        wrong = values.clone()
        wrong[5] = value
        with pytest.raises(PayloadError, match="demo"):
            codec.decode(demo, Payload((words, wrong)), Context(segments, NOTHING))
    for parts in [(words,), (words[1:], values), (words, values[1:]), (words, values, values)]:
        with pytest.raises(PayloadError, match="demo"):
            codec.decode(demo, Payload(parts), Context(segments, NOTHING))


def test_what_the_contract_is_told():
    demo = gcbench.get_compressor("demo")
    assert demo.claims.aggregate == "other"
    assert demo.legal_collectives() == ("allgather",)
    segments = Segments.of([(), (0,), (33,), (70, 70)])
    payload = encode(normal(segments.numel), segments)
    assert payload.layout == demo.layout(segments)
    empty = encode(torch.empty(0), Segments.of([]))
    assert empty.layout == ((torch.int32, 0), (torch.float32, 0))
    assert codec.decode(demo, empty, Context(Segments.of([]), NOTHING)).shape == (0,)


@pytest.mark.parametrize("fields", [{"chunk": 0}, {"chunk": 257}, {"topk": 0}])
def test_bad_fields_are_refused(fields):
    with pytest.raises(UsageError, match="demo"):
        gcbench.get_compressor("demo", **fields)


def test_slabs_change_no_bit(monkeypatch):
    """Tensors, and rows of chunks of one tensor, are transformed in groups of 1,000 elements."""
    segments = Segments.of([(300, 96), (70,), (67, 33), (1,), (0,), (5, 5)])
    x = normal(segments.numel)
    whole, restored = encode(x, segments), sent(x, segments)
    monkeypatch.setattr(code, "SLAB", 1000)
    cuts = tuple(code.cut_chunks(segments, 64, 32))
    groups = code.slabs(cuts, 1000)
    assert len(groups) > len(cuts)
    assert [cut.place.start for group in groups for cut in group][1:] == [
        cut.place.stop for group in groups for cut in group
    ][:-1]
    assert torch.equal(encode(x, segments).to_bytes(), whole.to_bytes())
    assert torch.equal(sent(x, segments), restored)
