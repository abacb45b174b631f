"""1-bit SGD's provable properties (Seide et al. 2014), its wire format, and its residuals."""

from __future__ import annotations

import itertools
import math
import struct

import pytest
import torch
from builders import encode_shards

import gcbench
from gcbench import ops
from gcbench.core import codec
from gcbench.core.compressor import Context, Key, Payload, Segments, requantizes
from gcbench.core.errors import PayloadError, UsageError

NOTHING = torch.empty(0)
KEY = Key(0, 0, 0)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def onebit(granularity=None):
    fields = {} if granularity is None else {"granularity": granularity}
    return gcbench.get_compressor("onebit", **fields)


def coded(method, x, segments):
    return codec.decode(
        method, codec.encode(method, x, Context(segments, NOTHING, KEY)), Context(segments, NOTHING)
    )


def squared(x: torch.Tensor) -> float:
    return float(x.double().square().sum())


def test_the_example_that_a_wrong_complement_breaks():
    """[-1, 2, -3, 4] has the means -2 and 3; a complement of bytes instead of bits gives 760s."""
    x = torch.tensor([-1.0, 2.0, -3.0, 4.0])
    assert coded(onebit(), x, Segments.of([(4,)])).tolist() == [-2, 3, -2, 3]


def test_zero_belongs_to_the_upper_class():
    """V >= 0 is bit 1, so zeros of either sign pull m1 down, and m0 is the mean of the negative."""
    x = torch.tensor([0.0, -0.0, 6.0, -1.0])
    payload = codec.encode(onebit(), x, Context(Segments.of([(4,)]), NOTHING, KEY))
    assert payload.parts[0].tolist() == [0b0111]
    assert [part.tolist() for part in payload.parts[1:]] == [[-1.0], [2.0]]


def test_empty_classes_have_mean_zero():
    """Columns without a negative, without a positive, and of nothing but -0.0: means of +0."""
    x = torch.tensor([1.0, 3.0, -1.0, -3.0, -0.0, -0.0])
    payload = codec.encode(onebit(), x, Context(Segments.of([(3, 2)], "column"), NOTHING, KEY))
    _, low, high = payload.parts
    assert low.tolist() == [0, -2, 0]
    assert high.tolist() == [2, 0, 0]
    assert not high.signbit().any()
    assert low.signbit().tolist() == [False, True, False]


def test_a_column_is_one_output_unit():
    """Rows of a torch weight, filters of a convolution; a vector is one column."""
    weight, filters, bias = normal(3, 4), normal(2, 2, 3, seed=1), normal(5, seed=2)
    shapes = [(3, 4), (2, 2, 3), (5,)]
    assert onebit().granularity == "column"
    segments = Segments.of(shapes, "column")
    x = torch.cat([t.reshape(-1) for t in (weight, filters, bias)])
    _, low, high = codec.encode(onebit(), x, Context(segments, NOTHING, KEY)).parts
    columns = [*weight, *(f.reshape(-1) for f in filters), bias]
    assert len(columns) == len(segments) == 6
    for i, column in enumerate(columns):
        for value, part in ((low[i], column[column < 0]), (high[i], column[column >= 0])):
            mean = math.fsum(part.tolist()) / max(1, len(part))
            assert float(value) == pytest.approx(mean, rel=2**-23)


def test_payload_by_hand():
    """1,024 + 40 elements: word l of the tile holds elements l + 32 j; of the rest, l + 2 j."""
    x = normal(1064, seed=3)
    segments = Segments.of([(2, 532)], "column")
    words = []
    for start, lanes, n in ((0, 32, 1024), (1024, 2, 40)):
        for lane in range(lanes):
            rows = range(start + lane, start + n, lanes)
            words.append(sum((float(x[i]) >= 0) << j for j, i in enumerate(rows)))
    means: dict[bool, list[float]] = {False: [], True: []}
    for column in (x[:532].tolist(), x[532:].tolist()):
        for upper, values in means.items():
            part = [v for v in column if (v >= 0) == upper]
            values.append(math.fsum(part) / len(part))
    expected = struct.pack("<34I2f2f", *words, *means[False], *means[True])
    payload = codec.encode(onebit(), x, Context(segments, NOTHING, KEY))
    assert bytes(payload.to_bytes().tolist()) == expected
    again = Payload.from_bytes(payload.to_bytes(), onebit().layout(segments, 3), 3)
    assert torch.equal(
        codec.decode(onebit(), again, Context(segments, NOTHING)), coded(onebit(), x, segments)
    )


@pytest.mark.parametrize(
    ("shape", "granularity", "bits"),
    [
        ((8, 2048), "column", 1 + 64 / 2048),
        ((4096, 25), "column", 1 + 64 / 25),  # convolutions with one input channel: no 32-fold gain
        ((8, 2048), "tensor", 1 + 64 / 16384),
        ((8, 2048), 512, 1 + 64 / 512),
    ],
)
def test_bits_an_element(shape, granularity, bits):
    method, n = onebit(granularity), math.prod(shape)
    segments = Segments.of([shape], granularity)
    payload = codec.encode(method, normal(n), Context(segments, NOTHING, KEY))
    assert 8 * payload.nbytes / n == bits == codec.bits(method, segments) / n


@pytest.mark.parametrize("granularity", ["column", "tensor", "model", 33])
def test_sums_of_each_class_survive(granularity):
    """sum V^ = sum V over a column's positive and its negative elements: residuals sum to 0.

    A mean is rounded once, by at most 2^-24 of itself, so n1 m1 is as close to the sum.
    """
    method = onebit(granularity)
    segments = Segments.of([(20, 77), (301,), (1,), (0,)], granularity)
    scales = torch.logspace(-6, 6, segments.numel)
    x = normal(segments.numel, seed=4) * scales
    decoded = coded(method, x, segments)
    assert torch.equal(decoded >= 0, x >= 0)
    for start, stop in itertools.pairwise(segments.offsets):
        column, sent = x[start:stop].double(), decoded[start:stop].double()
        for part in (column >= 0, column < 0):
            total = float(column[part].sum())
            assert abs(float(sent[part].sum()) - total) <= abs(total) * (2**-24 + 1e-13)


@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-30])
def test_the_error_is_the_norm_less_the_means(scale):
    """||V - V^||^2 = ||V||^2 - sum_columns (n1 m1^2 + n0 m0^2), whatever the values' scale."""
    method = onebit()
    segments = Segments.of([(30, 41), (5, 3, 3), (7,)], "column")
    x = normal(segments.numel, seed=5) * scale
    x[100:141] = 0
    error = squared(x.double() - coded(method, x, segments).double())
    columns = [x[a:b].double() for a, b in itertools.pairwise(segments.offsets)]
    classes = [part for c in columns for part in (c[c >= 0], c[c < 0]) if len(part)]
    explained = math.fsum(len(part) * float(part.mean()) ** 2 for part in classes)
    assert error == pytest.approx(squared(x) - explained, rel=1e-9)
    bound = method.claims.error_bound(x, Context(segments))
    assert error <= bound <= error * (1 + 1e-9) < squared(x)


@pytest.mark.parametrize(("d", "columns"), [(1, 2000), (2, 100_000), (16, 20_000), (2048, 200)])
def test_gaussian_columns_keep_two_over_pi(d, columns):
    """The explained share of N(0, 1) columns of d is 2/pi + 2 (1 - 2/pi) (1 - 2^-d) / d exactly.

    A class of k > 0 elements has E[k m^2] = Var|v| + k 2/pi, and is empty with probability 2^-d.
    Within 5 standard errors: error probability 6e-7 each.
    """
    x = normal(columns, d, seed=d)
    segments = Segments.of([(columns, d)], "column")
    decoded = coded(onebit(), x.view(-1), segments).view(columns, d).double()
    explained = decoded.square().sum(1) / d
    exact = 2 / math.pi + 2 * (1 - 2 / math.pi) * (1 - 2.0**-d) / d
    sd = float(explained.std() / math.sqrt(columns))
    assert abs(float(explained.mean()) - exact) < 5 * sd
    error = float((x.double() - decoded).square().mean())
    if d == 2048:
        assert error == pytest.approx(1 - 2 / math.pi, rel=0.01)
        assert onebit().claims.gaussian_error == pytest.approx(0.36338, abs=1e-5)


def test_any_other_pair_of_values_is_worse():
    """The means are the least-squares pair: (a, b) instead adds n0 (a - m0)^2 + n1 (b - m1)^2."""
    x = normal(400, seed=6)
    segments = Segments.of([(400,)])
    _, low, high = (
        part.double() for part in codec.encode(onebit(), x, Context(segments, NOTHING, KEY)).parts
    )
    upper, x = x >= 0, x.double()
    n1 = int(upper.sum())
    best = squared(x - torch.where(upper, high, low))
    generator = torch.Generator().manual_seed(7)
    for step in (1e-4, 1e-2, 0.3, 2.0):
        for a, b in torch.randn(20, 2, generator=generator, dtype=torch.float64) * step:
            worse = squared(x - torch.where(upper, high + b, low + a))
            added = (400 - n1) * float(a) ** 2 + n1 * float(b) ** 2
            # The means are rounded to float32: a first-order term of 2^-24 of them is left.
            slack = 400 * 2**-24 * (abs(float(a)) + abs(float(b))) * 2
            assert abs(worse - best - added) <= slack + 1e-11
            assert worse > best or step < 1e-3


def run_one_stage(carry: bool):
    """Return sum_t G_t, sum_t V^_t and the last residual of 200 steps, float64."""
    method, segments = onebit(), Segments.of([(8, 64)], "column")
    residual = torch.zeros(512)
    settings, applied = torch.zeros(512, dtype=torch.float64), torch.zeros(512, dtype=torch.float64)
    for step in range(200):
        gradient = normal(512, seed=1000 + step)
        offered = gradient + residual
        sent = coded(method, offered, segments)
        residual = (offered if carry else gradient) - sent
        settings += gradient
        applied += sent
    return settings, applied, residual.double()


def test_the_printed_residual_loses_mass():
    """Delta = G - V^, as the paper prints it, forgets what was carried: errors pile up."""
    carried = run_one_stage(carry=True)
    printed = run_one_stage(carry=False)
    gap = [float((settings - applied).std()) for settings, applied, _ in (carried, printed)]
    assert gap[0] == pytest.approx(0.77, abs=0.1)
    assert gap[1] > 6
    settings, applied, residual = printed
    assert float((settings - applied - residual).std()) > 6


def test_merge_encodes_the_mean_again():
    method, segments = onebit("tensor"), Segments.of([(300,)])
    payloads = [
        codec.encode(method, normal(300, seed=s), Context(segments, NOTHING, KEY)) for s in range(3)
    ]
    merged = codec.merge(method, payloads, Context(segments, NOTHING, KEY))
    assert merged.count == 3
    assert requantizes(method)
    mean = sum(codec.decode(method, p, Context(segments, NOTHING)) for p in payloads) / 3
    torch.testing.assert_close(
        codec.decode(method, merged, Context(segments, NOTHING)), coded(method, mean, segments)
    )


def test_a_cut_column_has_means_on_each_side():
    method, segments = onebit("tensor"), Segments.of([(3000,)])
    x = torch.cat([normal(1024), 100 * normal(1976, seed=1)])
    bounds = [0, 1024, 3000]
    shards = encode_shards(method, x, segments, NOTHING, KEY, bounds)
    pieces = []
    for payload, (start, stop) in zip(shards, itertools.pairwise(bounds), strict=True):
        pieces.append(
            codec.decode(method, payload, Context(segments.shard(start, stop)[0], NOTHING))
        )
        exact, magnitude = (float(v.double().sum()) for v in (x[start:stop], x[start:stop].abs()))
        assert abs(float(pieces[-1].double().sum()) - exact) < 2**-24 * magnitude
    assert float(pieces[0].abs().max()) < 1 < 50 < float(pieces[1].abs().max())


def test_columns_of_one_and_of_one_magnitude_are_exact():
    x = normal(1000, seed=8) * torch.logspace(-30, 30, 1000)
    assert torch.equal(coded(onebit(1), x, Segments.of([(1000,)], 1)), x)
    x = torch.where(normal(1000, seed=9) > 0, 0.7, -0.3)
    assert torch.equal(coded(onebit(), x, Segments.of([(1000,)])), x)


def test_bytes_do_not_depend_on_threads():
    """Class sums have a fixed order; a plain float32 sum of this vector depends on its split."""
    x, segments = normal(300_000, seed=10), Segments.of([(300_000,)])
    words = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        words.append(codec.encode(onebit("tensor"), x, Context(segments, NOTHING, KEY)).to_bytes())
    assert torch.equal(*words)


@pytest.mark.parametrize("granularity", ["column", "tensor", 64])
def test_special_values(granularity):
    """Zeros, a spike, constants, the largest and the smallest floats: finite, signs kept."""
    method = onebit(granularity)
    segments = Segments.of([(8, 25), (0,), (100,), (1,)], granularity)
    n = segments.numel
    spike = torch.zeros(n)
    spike[17] = -3.0
    huge = torch.full((n,), torch.finfo(torch.float32).max)
    huge[::2] *= -1
    tiny = torch.full((n,), 1e-45)
    tiny[::3] = 0
    for x in (torch.zeros(n), -torch.zeros(n), spike, torch.ones(n), huge, tiny, huge / 3):
        selected = x.clone()
        payload = codec.encode(method, x, Context(segments, NOTHING, KEY))
        decoded = codec.decode(method, payload, Context(segments, NOTHING))
        assert decoded.isfinite().all()
        assert (decoded * x >= 0).all()
        assert torch.equal(x, selected)
        bound = method.claims.error_bound(x, Context(segments))
        assert squared(x.double() - decoded.double()) <= bound
    assert torch.equal(coded(method, huge, segments), huge)


def test_means_that_no_encoder_sends_are_refused():
    method, segments = onebit(), Segments.of([(2, 30)], "column")
    x = torch.cat([normal(30), normal(30, seed=1).abs()])  # the second column has no m0
    words, low, high = codec.encode(method, x, Context(segments, NOTHING, KEY)).parts
    bad = [
        (words, torch.tensor([math.nan, 0.0]), high),
        (words, low, torch.tensor([math.inf, 1.0])),
        (words, torch.tensor([0.1, 0.0]), high),  # m0 above 0
        (words, low, torch.tensor([1.0, -0.1])),  # m1 below 0
        (words, torch.tensor([-1.0, -0.1]), high),  # a mean of an empty class
        (words, low, torch.cat([high, high])),
        (words[:-1], low, high),
        (words.float(), low, high),
        (words | (1 << 31), low, high),  # bit 31 of the second lane is element 61 + 2, of 60
        (words, low),
    ]
    for parts in bad:
        with pytest.raises(PayloadError, match=r"^onebit: "):
            codec.decode(method, Payload(parts), Context(segments, NOTHING))
    with pytest.raises(PayloadError, match=r"^onebit: "):
        codec.decode(method, Payload((words, low, high), 0), Context(segments, NOTHING))
    with pytest.raises(PayloadError, match=r"^onebit: "):
        codec.mean(
            method, [Payload((words, low, high)), Payload(bad[0])], Context(segments, NOTHING)
        )


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("n", [1, 31, 33, 100, 1025, 1100])
def test_every_bit_after_the_last_code_is_refused(n, bits):
    """Of the bits of the last, short tile of n zero codes, those of codes can be set, no other."""
    words = ops.packing.pack(torch.zeros(n, dtype=torch.int32), bits)
    last = range(ops.packing.packed_words(n - n % 1024, bits), len(words))
    refused = 0
    for word, bit in itertools.product(last, range(32)):
        wrong = words.clone()
        wrong[word] = -(2**31) if bit == 31 else 1 << bit
        try:
            ops.sign.unpack(wrong, bits, n, "method")
        except PayloadError:
            refused += 1
    assert refused == 32 * len(last) - bits * (n % 1024)


@pytest.mark.parametrize("granularity", ["row", 0, -3])
def test_bad_fields_are_refused(granularity):
    with pytest.raises(UsageError, match="granularity"):
        onebit(granularity)


def test_repr_evaluates_back():
    method = onebit(512)
    assert eval(repr(method), {"OneBit": type(method)}) == method
