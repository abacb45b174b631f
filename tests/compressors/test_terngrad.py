"""TernGrad's provable properties (Wen et al. 2017), its wire format, and its two scale rules."""

from __future__ import annotations

import math

import pytest
import torch
from builders import encode_shards

import gcbench
from gcbench import ops
from gcbench.core import codec
from gcbench.core.compressor import Context, Key, Payload, Segments
from gcbench.core.errors import PayloadError, UsageError


def normal(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def one(n: int) -> Segments:
    return Segments.of([(n,)])


def test_unbiased_towards_the_clipped_gradient():
    """Each coordinate's mean over T draws is f(g) to within 5 sd: error below 3e-5 in all."""
    method = gcbench.get_compressor("terngrad", clip=1.0)
    x, draws = normal(48), 6000
    segments = one(48)
    shared = (
        codec.prepare(method, x, Context(segments)).statistic * 1.3
    )  # another worker has the larger scale
    f = method.claims.target(x, Context(segments, shared))
    assert float((f - x).abs().max()) > 0.1, "clipping must bite for this test to mean anything"
    total = torch.zeros(48, dtype=torch.float64)
    for step in range(draws):
        payload = codec.encode(method, x, Context(segments, shared, Key(1, step, 0)))
        total += codec.decode(method, payload, Context(segments, shared)).double()
    sd = ((shared.double() * f.abs() - f.double() ** 2) / draws).sqrt()
    assert float(((total / draws - f).abs() / sd).max()) < 5


def test_exact_second_moment():
    """E||s t||^2 = s ||f||_1: a sum of Bernoulli variables, whose sd is known too."""
    method = gcbench.get_compressor("terngrad")
    x = normal(200_000, 1)
    segments = one(len(x))
    shared = codec.prepare(method, x, Context(segments)).statistic
    f = method.claims.target(x, Context(segments, shared)).double()
    s = float(shared)
    decoded = codec.decode(
        method,
        codec.encode(method, x, Context(segments, shared, Key(2, 0, 0))),
        Context(segments, shared),
    )
    measured = float((decoded.double() ** 2).sum())
    p = f.abs() / s
    sd = s * s * float((p * (1 - p)).sum().sqrt())
    assert abs(measured - s * float(f.abs().sum())) < 5 * sd  # error probability 6e-7
    error = float(((decoded.double() - f) ** 2).sum())
    variance = s * float(f.abs().sum()) - float((f**2).sum())
    # The error's own sd: each term's fourth moment is below s^4.
    assert abs(error - variance) < 5 * s * s * math.sqrt(len(x)) * 0.5


@pytest.mark.parametrize(
    ("clip", "length", "degrees"), [(2.5, -1.13, 2.75), (2.0, -4.06, 5.82), (3.0, -0.25, 1.15)]
)
def test_gaussian_clip_integrals(clip, length, degrees):
    """Length and angle of a clipped Gaussian: the integrals behind the paper's 1-1.5 %, 2-3 deg."""
    method = gcbench.get_compressor("terngrad", clip=clip)
    x = normal(1_000_000, 2)
    f = method.claims.target(x, Context(one(len(x)), x.new_empty(0))).double()
    x = x.double()
    assert abs(100 * float(f.norm() / x.norm() - 1) - length) < 0.1
    cosine = float(f @ x / (f.norm() * x.norm()))
    assert abs(math.degrees(math.acos(cosine)) - degrees) < 0.15


@pytest.mark.parametrize("clip", [2.0, 2.5, 3.0])
def test_the_declared_error_is_the_integral(clip):
    """E(x - f)^2 + c E|f| - E f^2 for standard normal x, by quadrature in float64."""
    x = torch.linspace(-12, 12, 2_000_001, dtype=torch.float64)
    density = torch.exp(-x * x / 2) / math.sqrt(2 * math.pi) * 12e-6
    f = x.clamp(-clip, clip)
    error = float((density * ((x - f) ** 2 + clip * f.abs() - f * f)).sum())
    method = gcbench.get_compressor("terngrad", clip=clip)
    assert method.claims.gaussian_error == pytest.approx(error, abs=1e-5)
    assert (
        gcbench.get_compressor("terngrad", clip=clip, granularity=64).claims.gaussian_error is None
    )


def test_gaussian_error_is_the_analytic_one():
    """||x - decode||^2 / ||x||^2 = 1.00953 at clip 2.5, for n = 1e6 to within 1 %, both sides."""
    method = gcbench.get_compressor("terngrad")
    x = normal(1_000_000, 3)
    segments = one(len(x))
    shared = codec.prepare(method, x, Context(segments)).statistic
    decoded = codec.decode(
        method,
        codec.encode(method, x, Context(segments, shared, Key(3, 0, 0))),
        Context(segments, shared),
    )
    error = float(((x - decoded).double() ** 2).sum() / (x.double() ** 2).sum())
    assert error == pytest.approx(1.00953, rel=0.01)
    assert float((decoded == 0).double().mean()) == pytest.approx(0.682, abs=0.003)


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8, 64])
def test_at_most_2n_plus_1_levels(workers):
    method = gcbench.get_compressor("terngrad")
    xs = [normal(40_000, seed) for seed in range(workers)]
    segments = one(40_000)
    shared = torch.stack([codec.prepare(method, x, Context(segments)).statistic for x in xs]).amax(
        0
    )
    payloads = [
        codec.encode(method, x, Context(segments, shared, Key(4, 0, r))) for r, x in enumerate(xs)
    ]
    levels = codec.mean(method, payloads, Context(segments, shared)).unique()
    assert 3 <= len(levels) <= 2 * workers + 1
    multiples = levels / (shared / workers)
    torch.testing.assert_close(multiples, multiples.round(), rtol=0, atol=1e-4)
    assert float(multiples.abs().max()) <= workers + 1e-4


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8, 64, 127, 128])
def test_sums_of_known_codes_are_exact_in_every_exchange(workers):
    """Inputs of +-s and 0 have one possible code each: the mean is known exactly."""
    method = gcbench.get_compressor("terngrad", clip=0)
    generator = torch.Generator().manual_seed(workers)
    codes = torch.randint(-1, 2, (workers, 3000), generator=generator)
    codes[:, 0], codes[:, 1] = 1, -1  # the extremes of the sum
    segments = Segments.of([(1000,), (1999,), (1,)])
    scale = torch.tensor([0.5, 2.0, 0.25])
    xs = ops.statistics.scale_(
        codes.float().view(-1), scale.repeat(workers), _tiled(segments, workers)
    )
    payloads = [
        codec.encode(method, x, Context(segments, scale, Key(0, 0, r)))
        for r, x in enumerate(xs.view(workers, 3000))
    ]
    expected = ops.statistics.scale_(codes.sum(0).float(), scale / workers, segments)
    assert torch.equal(codec.mean(method, payloads, Context(segments, scale)), expected)
    merged = codec.merge(method, payloads, Context(segments, scale, Key(0, 0, 0)))
    assert merged.count == workers
    assert torch.equal(codec.decode(method, merged, Context(segments, scale)), expected)
    bits = math.ceil(math.log2(2 * workers + 1))
    assert merged.nbytes == 4 * ops.packing.packed_words(3000, bits)
    widened = [method.summand(p, Context(segments, workers=workers)).parts[0] for p in payloads]
    total = Payload((sum(widened[1:], widened[0]),), workers)
    assert torch.equal(codec.decode_sum(method, total, Context(segments, scale)), expected)


def _tiled(segments: Segments, times: int) -> Segments:
    offsets = [0]
    for _ in range(times):
        offsets += [offsets[-1] + length for length in _sums(segments.lengths)]
    return Segments(tuple(offsets))


def _sums(lengths):
    total = 0
    for length in lengths:
        total += length
        yield total


def test_sums_of_more_workers_than_a_code_holds_are_refused():
    """2 * 32,767 + 1 levels take 16 bits; one worker more takes 17, on every backend."""
    words = torch.zeros(ops.packing.packed_words(5, 16), dtype=torch.int32)
    assert ops.ternary.bits(32_767) == 16
    for backend in ("reference", "auto"):
        with ops.using(backend), pytest.raises(PayloadError, match="32767 workers"):
            ops.ternary.merge([(words, 32_767), (words, 32_767)], 5)


def test_two_bits_an_element():
    method = gcbench.get_compressor("terngrad")
    for n in (1, 31, 32, 33, 1023, 1025, 100_003):
        segments = one(n)
        x = normal(n)
        shared = codec.prepare(method, x, Context(segments)).statistic
        payload = codec.encode(method, x, Context(segments, shared, Key(0, 0, 0)))
        assert 8 * payload.nbytes == codec.bits(method, segments)
        assert 2 * n <= 8 * payload.nbytes < 2 * n + 64
        assert payload.layout == method.layout(segments)


def test_layerwise_bound_is_below_the_global_one():
    """sum_l ||g_l||_inf ||g_l||_1 <= ||g||_inf ||g||_1, and clipping lowers it again (fig. 4)."""
    shapes = [(64, 75), (64,), (384, 500), (10, 192)]
    sizes = [math.prod(shape) for shape in shapes]
    scales = (1.0, 0.1, 0.02, 3.0)
    x = torch.cat([normal(n, i) * s for i, (n, s) in enumerate(zip(sizes, scales, strict=True))])

    def second_moment(granularity: str, clip: float) -> float:
        method = gcbench.get_compressor("terngrad", clip=clip, granularity=granularity)
        segments = Segments.of(shapes, granularity)
        shared = codec.prepare(method, x, Context(segments)).statistic
        decoded = [
            codec.decode(
                method,
                codec.encode(method, x, Context(segments, shared, Key(9, t, 0))),
                Context(segments, shared),
            )
            for t in range(20)
        ]
        return float(torch.stack(decoded).double().square().sum(1).mean())

    clipped, layer, whole = (
        second_moment("tensor", 2.5),
        second_moment("tensor", 0),
        second_moment("model", 0),
    )
    exact = [p.abs().max() * p.abs().sum() for p in x.double().split(sizes)]
    assert layer == pytest.approx(float(sum(exact)), rel=0.02)
    assert whole == pytest.approx(float(x.double().abs().max() * x.double().abs().sum()), rel=0.02)
    assert clipped < layer < whole


def test_scaler_sharing_raises_the_variance():
    """var = s ||f||_1 - ||f||^2 grows with the shared scale."""
    method = gcbench.get_compressor("terngrad")
    x = normal(100_000, 5)
    segments = one(len(x))
    local = codec.prepare(method, x, Context(segments)).statistic
    errors = []
    for factor in (1.0, 1.5, 3.0):
        payload = codec.encode(method, x, Context(segments, local * factor, Key(5, 0, 0)))
        decoded = codec.decode(method, payload, Context(segments, local * factor))
        f = method.claims.target(x, Context(segments, local)).double()
        errors.append(float((decoded.double() - f).square().sum()))
        exact = float(local * factor) * float(f.abs().sum()) - float(f.square().sum())
        assert errors[-1] == pytest.approx(exact, rel=0.02)
    assert errors[0] < errors[1] < errors[2]


def test_c_sigma_scale_is_the_authors_code():
    """s = c sigma, P = min(1, |g| / s) on the unclipped gradient: all beyond s become +-s."""
    method = gcbench.get_compressor("terngrad", scale="c-sigma", clip=1.0)
    x = normal(50_000, 7)
    segments = one(len(x))
    shared = codec.prepare(method, x, Context(segments)).statistic
    assert float(shared) == pytest.approx(float(x.double().std(correction=0)), rel=1e-6)
    decoded = codec.decode(
        method,
        codec.encode(method, x, Context(segments, shared, Key(7, 0, 0))),
        Context(segments, shared),
    )
    beyond = x.abs() >= shared
    assert torch.equal(decoded[beyond], shared * x[beyond].sign())
    assert float(beyond.double().mean()) == pytest.approx(0.3173, abs=0.01)


def test_c_sigma_clips_at_the_shared_scale_only():
    """With a larger scale elsewhere, values beyond the own c sigma keep their mean."""
    method = gcbench.get_compressor("terngrad", scale="c-sigma", clip=1.0)
    x = normal(200_000, 13)
    segments = one(len(x))
    local = codec.prepare(method, x, Context(segments)).statistic
    shared = 2 * local
    decoded = codec.decode(
        method,
        codec.encode(method, x, Context(segments, shared, Key(7, 1, 0))),
        Context(segments, shared),
    )
    between = (x.abs() > 1.2 * local) & (x.abs() < 1.8 * local)
    p = x[between].abs().double() / float(shared)
    sd = float(shared) * float((p * (1 - p)).sum().sqrt())
    received = float((decoded * x.sign())[between].double().sum())
    assert abs(received - float(x[between].abs().double().sum())) < 5 * sd  # error probability 6e-7
    target = method.claims.target(x, Context(segments, shared))
    assert torch.equal(target, x.clamp(-float(shared), float(shared)))


def test_c_sigma_differs_from_the_paper_on_small_tensors():
    """Ten biases rarely reach 2.5 sigma: the authors' scale is larger, and more codes are zero."""
    x = normal(10, 8)
    segments = one(10)
    paper = codec.prepare(gcbench.get_compressor("terngrad"), x, Context(segments)).statistic
    code = codec.prepare(
        gcbench.get_compressor("terngrad", scale="c-sigma"), x, Context(segments)
    ).statistic
    assert float(paper) == float(x.abs().max())
    assert float(code) > float(paper)


@pytest.mark.parametrize("scale", ["clipped-max", "c-sigma"])
@pytest.mark.parametrize("share", [True, False])
def test_segments_without_a_spread_arrive_exactly(scale, share):
    """A single element, and equal values: clipped at c sigma = 0 they would never be trained."""
    method = gcbench.get_compressor("terngrad", scale=scale, share=share)
    segments = Segments.of([(1,), (64,), (8,), (1,)])
    x = torch.cat([torch.tensor([-0.3]), torch.full((64,), 7e-5), normal(8), torch.tensor([2e30])])
    shared = codec.prepare(method, x, Context(segments)).statistic
    arrived = codec.decode(
        method,
        codec.encode(method, x, Context(segments, shared, Key(7, 1, 0))),
        Context(segments, shared),
    )
    even = torch.ones(74, dtype=torch.bool)
    even[65:73] = False
    assert torch.equal(arrived[even], x[even])
    assert torch.equal(method.claims.target(x, Context(segments, shared))[even], x[even])
    assert not method.claims.variance(x, Context(segments, shared))[even].any()


@pytest.mark.parametrize("fields", [{}, {"scale": "c-sigma"}, {"share": False}, {"clip": 1e-9}])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_many_equal_values_are_not_clipped(backend, fields):
    """Their sums are rounded, so that the standard deviation is 1e-8 of them instead of 0."""
    method = gcbench.get_compressor("terngrad", **fields)
    values = torch.tensor([9.04e-5, -0.011726822, 0.0015542606, 0.411345406, -3e30])
    with ops.using(backend):
        for length in (2, 3, 333, 999, 100_003):
            for value in values:
                x = value.expand(length).contiguous()
                assert torch.equal(method.decompress(method.compress(x)), x), (length, value)


def test_other_values_are_clipped_whatever_the_first_is():
    for first in (0.0, 1e-9, 1.0, -1e4):
        x = normal(5000, 6)
        x[0] = first
        limit, scale = ops.ternary.scales(x, one(5000), 2.5)
        assert float(limit) == pytest.approx(2.5 * float(x.double().std(correction=0)))
        assert float(scale) == min(float(limit), float(x.abs().max()))


def test_a_worker_without_a_spread_draws_under_the_scale_of_another():
    """Without clipping: P = |g| / s, so that the mean of many draws is g."""
    method, segments = gcbench.get_compressor("terngrad"), Segments.of([(1000,)])
    x = torch.full((1000,), -0.5)
    limit, local = ops.ternary.scales(x, segments, 2.5)
    assert limit.tolist() == [torch.finfo(torch.float32).max]
    assert local.tolist() == [0.5]
    assert ops.ternary.scales(x, segments, 2.5, at_limit=True)[1].tolist() == [0.5]
    shared = torch.tensor([2.0])
    arrived = codec.decode(
        method,
        codec.encode(method, x, Context(segments, shared, Key(7, 1, 0))),
        Context(segments, shared),
    )
    assert set(arrived.tolist()) == {-2.0, 0.0}
    assert abs(float(arrived.mean()) + 0.5) < 5 * math.sqrt(0.75 / 1000)  # error probability 6e-7


def test_clipping_sees_whole_segments_when_shards_are_cut():
    """Two-shot shards carry the codes that the whole bucket would get, wherever the cut falls."""
    method = gcbench.get_compressor("terngrad", clip=1.0)
    x = torch.cat([normal(3000, 9), 10 * normal(3000, 10)])
    segments = one(6000)
    shared = codec.prepare(method, x, Context(segments)).statistic
    key = Key(8, 1, 2)
    whole = codec.decode(
        method, codec.encode(method, x, Context(segments, shared, key)), Context(segments, shared)
    )
    bounds = [0, 2048, 4096, 6000]
    shards = encode_shards(method, x, segments, shared, key, bounds)
    pieces = [
        codec.decode(method, payload, Context(segments.shard(a, b)[0], shared))
        for payload, a, b in zip(shards, bounds, bounds[1:], strict=False)
    ]
    assert torch.equal(torch.cat(pieces), whole)


def test_own_scales_travel_without_sharing():
    method = gcbench.get_compressor("terngrad", share=False, clip=0)
    segments = Segments.of([(100,), (50,)])
    xs = [normal(150, 11), 5 * normal(150, 12)]
    nothing = codec.prepare(method, xs[0], Context(segments)).statistic
    assert nothing.numel() == 0
    payloads = [
        codec.encode(method, x, Context(segments, nothing, Key(0, 0, r))) for r, x in enumerate(xs)
    ]
    assert [p.parts[1].tolist() for p in payloads] == [
        [float(x[:100].abs().max()), float(x[100:].abs().max())] for x in xs
    ]
    expected = sum(codec.decode(method, p, Context(segments, nothing)) for p in payloads) / 2
    torch.testing.assert_close(codec.mean(method, payloads, Context(segments, nothing)), expected)
    assert method.legal_collectives() == ("allgather",)


@pytest.mark.parametrize("granularity", ["tensor", "model", "column", 64])
@pytest.mark.parametrize("scale", ["clipped-max", "c-sigma"])
def test_special_values(granularity, scale):
    """Zeros, one nonzero, constants, huge and tiny values, -0.0: finite, and zeros stay zero."""
    method = gcbench.get_compressor("terngrad", granularity=granularity, scale=scale)
    segments = Segments.of([(8, 25), (100,), (1,)], granularity)
    n = segments.numel
    spike = torch.zeros(n)
    spike[17] = -3.0
    huge = torch.full((n,), 3e38)
    huge[::2] *= -1
    for x in (torch.zeros(n), -torch.zeros(n), spike, torch.ones(n), huge, torch.full((n,), 1e-42)):
        shared = codec.prepare(method, x, Context(segments)).statistic
        decoded = codec.decode(
            method,
            codec.encode(method, x, Context(segments, shared, Key(0, 0, 0))),
            Context(segments, shared),
        )
        assert decoded.isfinite().all()
        assert not decoded[x == 0].any()
        assert (decoded * x >= 0).all()


def test_a_constant_is_exact():
    method = gcbench.get_compressor("terngrad", clip=0)
    x = torch.full((10_000,), -0.7)
    shared = codec.prepare(method, x, Context(one(len(x)))).statistic
    for step in range(20):
        payload = codec.encode(method, x, Context(one(len(x)), shared, Key(0, step, 0)))
        assert torch.equal(codec.decode(method, payload, Context(one(len(x)), shared)), x)


def test_encode_is_pure():
    method = gcbench.get_compressor("terngrad")
    x = normal(5000)
    selected = x.clone()
    segments = one(5000)
    before = torch.get_rng_state()
    shared = codec.prepare(method, x, Context(segments)).statistic
    first = codec.encode(method, x, Context(segments, shared, Key(1, 2, 3)))
    again = codec.encode(method, x, Context(segments, shared, Key(1, 2, 3)))
    assert torch.equal(first.parts[0], again.parts[0])
    assert torch.equal(x, selected)
    assert torch.equal(before, torch.get_rng_state())


def test_corrupt_payloads_are_refused():
    method = gcbench.get_compressor("terngrad")
    segments = one(1000)
    x = normal(1000)
    shared = codec.prepare(method, x, Context(segments)).statistic
    payload = codec.encode(method, x, Context(segments, shared, Key(0, 0, 0)))
    words = payload.parts[0]
    bad = [
        Payload((words[:-1],)),
        Payload((torch.cat([words, words]),)),
        Payload((words.float(),)),
        Payload((words, words)),
        Payload(()),
        payload._replace(count=4),
        Payload((torch.full_like(words, -1),)),  # code 3 stands for nothing
    ]
    for wrong in bad:
        with pytest.raises(PayloadError):
            codec.decode(method, wrong, Context(segments, shared))
        with pytest.raises(PayloadError):
            codec.mean(method, [payload, wrong], Context(segments, shared))


def test_corrupt_scales_are_refused():
    method = gcbench.get_compressor("terngrad", share=False)
    segments = one(100)
    payload = codec.encode(method, normal(100), Context(segments, torch.empty(0), Key(0, 0, 0)))
    for scale in (math.nan, math.inf, -1.0):
        wrong = Payload((payload.parts[0], torch.tensor([scale])))
        with pytest.raises(PayloadError, match="finite"):
            codec.decode(method, wrong, Context(segments, torch.empty(0)))


@pytest.mark.parametrize(
    "fields",
    [{"clip": -1.0}, {"clip": math.nan}, {"scale": "max"}, {"scale": "c-sigma", "clip": 0}],
)
def test_bad_fields_are_refused(fields):
    with pytest.raises(UsageError, match="terngrad"):
        gcbench.get_compressor("terngrad", **fields)


def test_repr_evaluates_back():
    method = gcbench.get_compressor("terngrad", clip=2.0, granularity=512)
    assert eval(repr(method), {"TernGrad": type(method)}) == method


def test_golden_bytes():
    """The wire format: changing it needs a line in CHANGELOG.md."""
    method = gcbench.get_compressor("terngrad")
    x = torch.linspace(-1, 1, 40)
    shared = codec.prepare(method, x, Context(one(40))).statistic
    first = codec.encode(method, x, Context(one(40), shared, Key(1, 2, 3)))
    second = codec.encode(method, -x, Context(one(40), shared, Key(1, 2, 4)))
    merged = codec.merge(method, [first, second], Context(one(40), shared, Key(1, 2, 0)))
    assert bytes(first.to_bytes().tolist()).hex() == GOLDEN_ENCODE
    assert bytes(merged.to_bytes().tolist()).hex() == GOLDEN_MERGE
    again = Payload.from_bytes(merged.to_bytes(), method.layout(one(40), 2), 2)
    assert torch.equal(again.parts[0], merged.parts[0])


GOLDEN_ENCODE = "0055556540449565a9000000a9000000"
GOLDEN_MERGE = "92b2499a92944552a24c9104a62892040000000000000000"
