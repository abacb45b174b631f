"""What is proved of signSGD with majority vote (Bernstein et al. 2018) and of EF-signSGD
(Karimireddy et al. 2019), run through the codecs, and their wire formats.

Statistical checks have an error probability of 6e-7 each. Independent trials are the elements of
one tensor, so a thousand experiments are one encode.
"""

from __future__ import annotations

import itertools
import math
import struct
from fractions import Fraction

import pytest
import torch
from builders import encode_shards
from gcbench.compressors.memories.momentum import Momentum
from gcbench.compressors.memories.residual import Residual

import gcbench
from gcbench import ops
from gcbench.core import codec, memory
from gcbench.core.compressor import Context, Key, Payload, Segments, requantizes
from gcbench.core.errors import PayloadError, UsageError
from gcbench.core.exchange import Exchange, lane_of

NOTHING = torch.empty(0)


@pytest.mark.parametrize(
    ("name", "fields", "signs"),
    [("signsgd", {}, True), ("demo", {}, True), ("demo", {"sign": False}, False)],
)
def test_dense_tensors_move_as_the_others(simulated, clock, name, fields, signs):
    """They had moved by the mean at the rate of signs, hundreds of times less."""
    method, workers = gcbench.get_compressor(name, **fields), 3
    carried = memory.of(method)
    lanes = [
        lane_of([(64,)], start, method, method.legal_collectives()[0], carried, exact=start > 0)
        for start in (0, 64)
    ]
    created = Exchange(simulated(workers), lanes, 0, clock)
    clock.start_step()
    gradients = [1e-3 * normal(128, seed=seed) for seed in range(workers)]
    mean = created.mean(gradients, 0, 1.0)
    exact = torch.stack([x[64:] for x in gradients]).mean(0)
    assert (mean[:64].abs() == 1).all() == signs
    torch.testing.assert_close(mean[64:], exact.sign() if signs else exact)
    shards = created.lane_shards(1, [x[64:] for x in gradients], 1)  # as with FSDP
    torch.testing.assert_close(torch.cat(shards), exact.sign() if signs else exact)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def uniform(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def one(n: int) -> Segments:
    return Segments.of([(n,)])


def signsgd(**fields):
    return gcbench.get_compressor("signsgd", **fields)


def efsignsgd(granularity=None):
    fields = {} if granularity is None else {"granularity": granularity}
    return gcbench.get_compressor("efsignsgd", **fields)


def coded(method, x, segments):
    return codec.decode(
        method,
        codec.encode(method, x, Context(segments, NOTHING, Key(0, 0, 0))),
        Context(segments, NOTHING),
    )


def vote(method, gradients, step=0):
    """Return the vote over the rows of `gradients` as an owner decides and all decode it."""
    segments = one(gradients.shape[1])
    payloads = [
        codec.encode(method, g, Context(segments, NOTHING, Key(0, step, rank)))
        for rank, g in enumerate(gradients)
    ]
    merged = codec.merge(method, payloads, Context(segments, NOTHING, Key(0, step, 0, 0, 1)))
    assert merged.count == len(payloads)
    return codec.decode(method, merged, Context(segments, NOTHING))


def vote_error(wrong: Fraction | float, workers: int, tie: Fraction | float):
    """Return the probability that a vote is wrong: binomial, a tie being wrong so often."""
    total = 0 * wrong
    for k in range(workers + 1):
        if 2 * k >= workers:
            weight = tie if 2 * k == workers else 1
            total += weight * math.comb(workers, k) * wrong**k * (1 - wrong) ** (workers - k)
    return total


def close(measured: float, p: float, trials: int) -> bool:
    """Say whether a frequency fits its probability: Bernstein's inequality, 2 e^-15 = 6e-7."""
    return abs(measured - p) <= math.sqrt(30 * p * (1 - p) / trials) + 10 / trials


# ---- the codes of signSGD ------------------------------------------------------------------------


def test_payload_by_hand():
    """One bit per element, up and down: bit j of word l is element l + 2 j of 40."""
    x = normal(40)
    words = [sum((float(x[lane + 2 * j]) >= 0) << j for j in range(20)) for lane in (0, 1)]
    method, segments = signsgd(), one(40)
    payload = codec.encode(method, x, Context(segments, NOTHING, Key(0, 0, 0)))
    assert bytes(payload.to_bytes().tolist()) == struct.pack("<2I", *words)
    merged = codec.merge(method, [payload] * 3, Context(segments, NOTHING, Key(0, 0, 0)))
    assert bytes(merged.to_bytes().tolist()) == struct.pack("<2I", *words)
    assert codec.decode(method, merged, Context(segments, NOTHING)).tolist() == x.sign().tolist()


def test_ternary_payload_by_hand():
    """A worker abstains below 1.25, here set in root mean squares, and where the gradient is 0."""
    x = torch.tensor([3.0, -4.0, 1.2, -0.0, 0.0, 1.3, -1.2, -1.3])
    rms = math.sqrt((9 + 16 + 2 * 1.44 + 2 * 1.69) / 8)
    method = signsgd(abstain=1.25 / rms)
    payload = codec.encode(method, x, Context(one(8), NOTHING, Key(0, 0, 0)))
    signs = [1, -1, 0, 0, 0, 1, 0, -1]
    assert codec.decode(method, payload, Context(one(8), NOTHING)).tolist() == signs
    assert payload.layout == method.layout(one(8)) == ((torch.int32, 2),)
    assert payload.parts[0][0].item() == sum((s + 1) << (2 * i) for i, s in enumerate(signs))


def test_bits_up_and_down():
    """1 and 1; with abstention 2 and 2; with a quorum alone 1 and 2, for a 0 must come back."""
    segments = one(10_240)
    for fields, up, down in (
        ({}, 1, 1),
        ({"ties": "coin"}, 1, 1),
        ({"abstain": 0.1}, 2, 2),
        ({"quorum": 3}, 1, 2),
        ({"abstain": 0.1, "quorum": 3}, 2, 2),
    ):
        method = signsgd(**fields)
        payloads = [
            codec.encode(method, normal(10_240, seed=s), Context(segments, NOTHING, Key(0, 0, s)))
            for s in range(4)
        ]
        merged = codec.merge(method, payloads, Context(segments, NOTHING, Key(0, 0, 0)))
        assert 8 * payloads[0].nbytes / 10_240 == up == codec.bits(method, segments) / 10_240
        assert 8 * merged.nbytes / 10_240 == down == codec.bits(method, segments, 4) / 10_240


def test_zeros_and_ties_count_as_plus():
    """sign(0) = sign(-0) = +1 on the worker, and an even split is +1: the wire has no zero."""
    x = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 5.0])
    assert coded(signsgd(), x, one(5)).tolist() == [1, 1, 1, -1, 1]
    rows = torch.tensor([[1.0, -1.0, 1.0, -1.0], [-1.0, 1.0, 1.0, -1.0]])
    assert vote(signsgd(), rows).tolist() == [1, 1, 1, -1]


def test_quorum_by_hand():
    """3 workers win by 1 or 3; the vote stands if that is the quorum, which is 3 at most."""
    rows = torch.tensor([[1.0, 1, 1, -1], [1, 1, -1, -1], [1, -1, -1, -1]])
    outcomes = {1: [1, 1, -1, -1], 2: [1, 0, 0, -1], 3: [1, 0, 0, -1], 9: [1, 0, 0, -1]}
    for quorum, expected in outcomes.items():
        assert vote(signsgd(quorum=quorum), rows).tolist() == expected
    tie = torch.tensor([[1.0, 1.0], [-1.0, 1.0]])
    assert vote(signsgd(quorum=2), tie).tolist() == [0, 1]
    assert vote(signsgd(quorum=5), rows[:1]).tolist() == rows[0].tolist()  # one worker is all


def test_quorum_with_abstention_by_hand():
    """Two for, one abstains: 2 votes. One for, two abstain: 1. One each: a tie is 0."""
    rows = torch.tensor([[9.0, 9, 9, 0, 9], [9, 0, -9, 0, 9], [0, 0, 0, 0, 9]])
    assert vote(signsgd(abstain=0.1), rows).tolist() == [1, 1, 0, 0, 1]
    assert vote(signsgd(abstain=0.1, quorum=2), rows).tolist() == [1, 0, 0, 0, 1]
    assert vote(signsgd(abstain=0.1, quorum=3), rows).tolist() == [0, 0, 0, 0, 1]


def test_abstention_of_normal_values():
    """A share erf(tau / sqrt 2) of N(0, s^2) lies below tau rms and is 0, in each tensor."""
    n, tau = 50_000, 0.5
    segments = Segments.of([(n,), (n,)])
    x = torch.cat([normal(n), 1e-6 * normal(n, seed=1)])
    decoded = coded(signsgd(abstain=tau), x, segments)
    for part, sent in zip(x.split(n), decoded.split(n), strict=True):
        assert close(float((sent == 0).double().mean()), math.erf(tau / math.sqrt(2)), n)
        assert torch.equal(sent[sent != 0], part[sent != 0].sign())
        assert float(part[sent == 0].abs().max()) < float(part[sent != 0].abs().min())


@pytest.mark.parametrize("fields", [{}, {"abstain": 0.7}, {"quorum": 3}])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_shards_vote_as_the_whole_does(fields, workers):
    """Two-shot and all-gather give the same bits, also where a shard cuts an abstainer's tensor."""
    method = signsgd(**fields)
    segments = Segments.of([(1500,), (0,), (2000,)])
    xs = normal(workers, 3500) * torch.logspace(-3, 3, 3500)
    payloads = [
        codec.encode(method, x, Context(segments, NOTHING, Key(0, 0, r))) for r, x in enumerate(xs)
    ]
    mean = codec.mean(method, payloads, Context(segments, NOTHING))
    bounds = [0, 1024, 3072, 3500]
    sent = [
        encode_shards(method, x, segments, NOTHING, Key(0, 0, r), bounds) for r, x in enumerate(xs)
    ]
    pieces = []
    for k, (start, stop) in enumerate(itertools.pairwise(bounds)):
        shard = segments.shard(start, stop)[0]
        merged = codec.merge(
            method, [row[k] for row in sent], Context(shard, NOTHING, Key(0, 0, k, start, 1))
        )
        assert merged.layout == method.layout(shard, workers)
        pieces.append(codec.decode(method, merged, Context(shard, NOTHING)))
    assert torch.equal(torch.cat(pieces), mean)
    whole = codec.merge(method, payloads, Context(segments, NOTHING, Key(0, 0, 0)))
    assert torch.equal(codec.decode(method, whole, Context(segments, NOTHING)), mean)
    assert torch.equal(
        codec.mean(method, [whole], Context(segments, NOTHING)), mean
    )  # it stands for them all
    assert method.claims.aggregate == ("other" if "quorum" in fields else "vote")
    assert not requantizes(method)


@pytest.mark.parametrize("scale", [1e-30, 1 / 3, 1e30])
def test_scale_invariance(scale):
    """sign(c g) = sign(g), c > 0; abstention is relative, so its codes are the same, too."""
    x = normal(3000)
    for method in (signsgd(), signsgd(abstain=0.3)):
        first = codec.encode(method, x, Context(one(3000), NOTHING, Key(0, 0, 0)))
        again = codec.encode(method, x * scale, Context(one(3000), NOTHING, Key(0, 0, 0)))
        assert torch.equal(first.parts[0], again.parts[0])


def test_special_values():
    """Zeros, the largest and the smallest floats, and a constant at the threshold itself."""
    n = 1025
    huge = torch.full((n,), torch.finfo(torch.float32).max)
    huge[::2] *= -1
    for fields in ({}, {"abstain": 0.5}, {"abstain": 1.0}, {"abstain": 1e300}):
        method = signsgd(**fields)
        for x in (huge, torch.full((n,), -1e-45), torch.ones(n)):
            expected = x.sign() if fields.get("abstain", 0) <= 1 else torch.zeros(n)
            assert torch.equal(coded(method, x, one(n)), expected)
        zeros = coded(method, torch.zeros(n), one(n))
        assert torch.equal(zeros, torch.zeros(n) if fields else torch.ones(n))
    assert coded(signsgd(), torch.empty(0), one(0)).shape == (0,)


@pytest.mark.parametrize(
    ("abstain", "families"),
    [(0.0, ("signs",)), (0.5, ("signs", "ternary")), (1.0, ("signs", "ternary")), (1.01, ())],
)
def test_what_arrives_exactly(abstain, families):
    """Signs unless their magnitude, the rms itself, abstains; zeros only where workers may."""
    method = signsgd(abstain=abstain)
    assert method.claims.exact_for == families
    signs = torch.where(normal(500) > 0, 1.0, -1.0)
    for name, x in (("signs", signs), ("ternary", signs * (torch.arange(500) > 0))):
        assert torch.equal(coded(method, x, one(500)), x) == (name in families)


def test_corrupt_payloads_are_refused():
    segments = one(100)
    for method, count in ((signsgd(), 1), (signsgd(abstain=0.5), 1), (signsgd(quorum=2), 4)):
        payload = codec.encode(method, normal(100), Context(segments, NOTHING, Key(0, 0, 0)))
        payload = codec.merge(method, [payload] * count, Context(segments, NOTHING, Key(0, 0, 0)))
        words = payload.parts[0]
        bad = [(words[:-1],), (torch.cat([words, words]),), (words.float(),), (words, words), ()]
        bad.append((torch.full_like(words, -1),))  # code 3, and bits after the last code
        for parts in bad:
            wrong = Payload(parts, count)
            with pytest.raises(PayloadError, match=r"^signsgd: "):
                codec.decode(method, wrong, Context(segments, NOTHING))
            with pytest.raises(PayloadError, match=r"^signsgd: "):
                codec.mean(method, [payload, wrong], Context(segments, NOTHING))
            with pytest.raises(PayloadError, match=r"^signsgd: "):
                codec.merge(method, [wrong], Context(segments, NOTHING, Key(0, 0, 0)))
        with pytest.raises(PayloadError, match=r"^signsgd: "):
            codec.decode(method, Payload((words,), 0), Context(segments, NOTHING))
    code_three = Payload((torch.full((64,), -1, dtype=torch.int32),))
    with pytest.raises(PayloadError, match=r"^signsgd: code 3"):
        codec.decode(signsgd(abstain=0.5), code_three, Context(one(1024), NOTHING))


@pytest.mark.parametrize(
    "fields",
    [
        {"ties": "minus"},
        {"abstain": -0.1},
        {"abstain": math.nan},
        {"abstain": math.inf},
        {"quorum": 0},
        {"ties": "coin", "quorum": 2},
        {"ties": "coin", "abstain": 0.1},
    ],
)
def test_bad_fields_are_refused(fields):
    with pytest.raises(UsageError, match="signsgd"):
        signsgd(**fields)


def test_repr_evaluates_back():
    for method in (signsgd(abstain=0.5, quorum=2), efsignsgd(512)):
        assert eval(repr(method), {type(method).__name__: type(method)}) == method


# ---- the vote's error ----------------------------------------------------------------------------


def gaussian_tail(s: float) -> float:
    return 0.5 * math.erfc(s / math.sqrt(2))


def gauss_bound(s: float) -> float:
    """Bound P(noise < -S sigma) for unimodal symmetric noise (Gauss 1823)."""
    return 2 / (9 * s * s) if s > 2 / math.sqrt(3) else 0.5 - s / (2 * math.sqrt(3))


def extremal_noise(s: float, *shape: int, seed: int) -> torch.Tensor:
    """Return noise of variance 1 that attains Gauss's bound at S = s: uniform, or with an atom."""
    half = max(math.sqrt(3), 1.5 * s)
    spread = (2 * uniform(*shape, seed=seed) - 1) * half
    return torch.where(uniform(*shape, seed=seed + 1) < 3 / half**2, spread, 0.0)


@pytest.mark.parametrize("s", [0.2, 1.0, 1.5, 3.0])
def test_one_sign_is_wrong_as_gauss_bounds_it(s):
    """P(wrong) <= 2 / (9 S^2), or 1/2 - S / (2 sqrt 3) for S <= 2 / sqrt 3.

    Uniform noise attains it, for large S with an atom at 0. Any noise has 1 / S, three times that.
    """
    n = 100_000
    noise = extremal_noise(s, n, seed=int(10 * s))
    assert float(noise.square().mean()) == pytest.approx(1, rel=0.05)
    signs = coded(signsgd(), s + noise, one(n))
    assert close(float((signs < 0).double().mean()), gauss_bound(s), n)
    assert gauss_bound(s) <= 1 / (3 * s)
    assert gaussian_tail(s) < gauss_bound(s)


@pytest.mark.parametrize("s", [1.0, 2.0, 5.0])
def test_any_noise_is_wrong_less_than_one_over_s(s):
    """P(wrong) <= 1 / S (Markov); two values attain Cantelli's bound, 1 / (1 + S^2)."""
    n, p = 100_000, 1 / (1 + s * s)
    # Mean 0 and variance 1: -s with probability p, else 1/s; slightly more, as 0 counts as right.
    noise = torch.where(uniform(n, seed=int(s)) < p, -s * (1 + 1e-6), 1 / s)
    wrong = float((coded(signsgd(), s + noise, one(n)) < 0).double().mean())
    assert close(wrong, p, n)
    assert p <= 1 / s


@pytest.mark.parametrize("workers", [1, 2, 5, 8, 21])
@pytest.mark.parametrize("s", [0.1, 0.5, 1.0])
def test_a_vote_is_wrong_less_than_one_over_root_m_s(workers, s):
    """Gaussian noise, and the worst unimodal symmetric one, for gradients of either sign.

    A tie is +1: never wrong for a positive gradient, always for a negative one.
    """
    n = 20_000
    for noise, tail in (
        (normal(workers, n, seed=workers), gaussian_tail(s)),
        (extremal_noise(s, workers, n, seed=workers), gauss_bound(s)),
    ):
        for gradient, tie in ((s, 0), (-s, 1)):
            wrong = vote(signsgd(), gradient + noise) != math.copysign(1, gradient)
            exact = vote_error(tail, workers, tie)
            assert close(float(wrong.double().mean()), exact, n)
            assert exact <= 1 / (math.sqrt(workers) * s)


def test_the_vote_bound_holds_everywhere():
    """vote_error <= 1 / (sqrt(M) S) with Gauss's bound for one worker, ties wrong, exactly.

    The proof takes Cantelli's inequality for the binomial; the worst product is below 0.87.
    """
    worst = 0.0
    for workers in (*range(1, 20), 50, 51, 100):
        for s in torch.logspace(-2, 1, 60).tolist():
            p = vote_error(gauss_bound(s), workers, 1)
            worst = max(worst, p * math.sqrt(workers) * s)
    assert 0.2 < worst < 0.87


def test_even_workers_with_coins_are_one_fewer_exactly():
    """P(wrong) of M workers with fair coins is that of M - 1 workers, M even: as fractions."""
    for workers in range(2, 42, 2):
        for wrong in (Fraction(1, 10), Fraction(3, 7), Fraction(1, 2), Fraction(9, 10)):
            fewer = vote_error(wrong, workers - 1, Fraction(1, 2))
            assert vote_error(wrong, workers, Fraction(1, 2)) == fewer


@pytest.mark.parametrize("workers", [2, 4, 10])
@pytest.mark.parametrize("wrong", [0.1, 0.3, 0.45])
def test_even_workers_with_coins_are_one_fewer_in_the_codec(workers, wrong):
    n = 100_000
    method = signsgd(ties="coin")
    right = uniform(workers, n, seed=workers) >= wrong
    exact = vote_error(wrong, workers - 1, 0)
    for gradient in (1.0, -1.0):
        outcome = vote(method, torch.where(right, gradient, -gradient), step=workers)
        assert close(float((outcome != gradient).double().mean()), exact, n)
    fewer = vote(method, torch.where(right[1:], 1.0, -1.0))
    assert close(float((fewer != 1).double().mean()), exact, n)


def test_coins_are_fair_and_tossed_by_the_merge():
    """All ties: half are +1, anew at each step; the elements' own coins whatever the shard."""
    method, n = signsgd(ties="coin"), 100_000
    segments = one(n)
    payloads = [
        codec.encode(method, x, Context(segments, NOTHING, Key(0, 0, 0))) for x in torch.ones(2, n)
    ]
    payloads[1] = codec.encode(method, -torch.ones(n), Context(segments, NOTHING, Key(0, 0, 1)))

    def toss(key):
        merged = codec.merge(method, payloads, Context(segments, NOTHING, key))
        return codec.decode(method, merged, Context(segments, NOTHING))

    first, second = toss(Key(0, 1, 0, 0, 1)), toss(Key(0, 2, 0, 0, 1))
    assert torch.equal(first, toss(Key(0, 1, 0, 0, 1)))
    for outcome in (first, second, first * second):
        assert close(float((outcome > 0).double().mean()), 0.5, n)
    neighbours = first[:-1] * first[1:]
    assert close(float((neighbours > 0).double().mean()), 0.5, n - 1)
    tail = [Payload(tuple(ops.packing.split_words(p.parts[0], 1, [1024, n]))) for p in payloads]
    merged = codec.merge(method, tail, Context(one(n - 1024), NOTHING, Key(0, 1, 0, 1024, 1)))
    assert torch.equal(codec.decode(method, merged, Context(one(n - 1024), NOTHING)), first[1024:])


def test_coins_need_an_owner():
    """A mean has no key: an even number of workers cannot be gathered, an odd one has no ties."""
    method = signsgd(ties="coin")
    assert method.legal_collectives() == ("twoshot",)
    assert signsgd().legal_collectives() == ("twoshot", "allgather")
    payloads = [
        codec.encode(method, normal(50, seed=s), Context(one(50), NOTHING, Key(0, 0, s)))
        for s in range(3)
    ]
    with pytest.raises(UsageError, match="twoshot"):
        codec.mean(method, payloads[:2], Context(one(50), NOTHING))
    plain = codec.mean(signsgd(), payloads, Context(one(50), NOTHING))
    assert torch.equal(codec.mean(method, payloads, Context(one(50), NOTHING)), plain)


def test_skewed_noise_defeats_the_vote():
    """50 with probability 0.1, else -1: the mean is 4.1, yet more workers err more surely."""
    exact = [vote_error(0.9, workers, 0) for workers in (1, 3, 5, 9, 15, 51)]
    assert exact == sorted(exact)
    assert exact[0] == pytest.approx(0.9)
    assert exact[-1] > 1 - 1e-9
    n = 20_000
    for workers, p in ((1, exact[0]), (5, exact[2]), (15, exact[4])):
        gradients = torch.where(uniform(workers, n, seed=workers) < 0.1, 50.0, -1.0)
        assert float(gradients.mean()) == pytest.approx(4.1, abs=0.5)
        assert close(float((vote(signsgd(), gradients) < 0).double().mean()), p, n)


@pytest.mark.parametrize("workers", [3, 7, 10])
def test_fewer_than_half_flipped_workers_change_nothing(workers):
    """Workers that agree outvote any f < N / 2 that send the opposite, or anything else."""
    honest = normal(5000, seed=workers)
    most = (workers - 1) // 2
    for flipped in range(workers + 1):
        rows = honest.repeat(workers, 1)
        rows[:flipped] *= -1e6
        outcome = vote(signsgd(), rows)
        if flipped <= most:
            assert torch.equal(outcome, honest.sign())
        elif 2 * flipped > workers:
            assert torch.equal(outcome, -honest.sign())
    rows = honest.repeat(workers, 1)
    rows[:most] = 1e9 * normal(most, 5000, seed=1)
    assert torch.equal(vote(signsgd(), rows), honest.sign())


# ---- signSGD's theorems on quadratics ------------------------------------------------------------
# f(x) = 1/2 sum L_i x_i^2, so f* = 0, g = L x, and assumption 2 holds with these L_i. Replicas of
# the experiment lie side by side in one tensor: signs have no scale that could couple them.

DIMENSION, REPLICAS = 20, 100


def skewed(shape, seed):
    """Return noise of mean 0 and variance 1 that is +3 with probability 0.1, else -1/3."""
    return torch.where(uniform(*shape, seed=seed) < 0.1, 3.0, -1 / 3)


@pytest.mark.parametrize("condition", [1, 100])
@pytest.mark.parametrize(
    ("workers", "noise", "steps"),
    [
        (1, "normal", 50),
        (1, "skewed", 50),
        (1, "normal", 200),
        (7, "normal", 50),
        (7, "skewed", 50),
    ],
)
def test_theorems_1_and_2(workers, noise, steps, condition):
    """E[mean_k ||g_k||_1]^2 <= (sqrt(||L||_1) (f_0 - f* + 1/2) + c ||sigma||_1)^2 / sqrt(N).

    After K steps of size 1 / sqrt(||L||_1 K) with batches of K, N = K^2. c = 2 for one worker
    (theorem 1) and for a vote under any noise (2a), 2 / sqrt(M) if unimodal and symmetric (2b).
    """
    curvature = torch.logspace(0, math.log10(condition), DIMENSION) / condition
    sigma = torch.linspace(0.1, 1.0, DIMENSION)
    total = float(curvature.sum())
    rate = 1 / math.sqrt(total * steps)
    x = torch.ones(REPLICAS, DIMENSION)
    start = 0.5 * total
    norms = torch.zeros(REPLICAS, dtype=torch.float64)
    draw = skewed if noise == "skewed" else lambda shape, seed: normal(*shape, seed=seed)
    method = signsgd()
    for step in range(steps):
        gradient = curvature * x
        norms += gradient.abs().sum(1).double() / steps
        z = draw((workers, REPLICAS, DIMENSION), seed=step)
        stochastic = gradient + sigma / math.sqrt(steps) * z
        x = x - rate * vote(method, stochastic.view(workers, -1)).view(REPLICAS, DIMENSION)
    factor = 2 / math.sqrt(workers) if noise == "normal" else 2
    bound = (math.sqrt(total) * (start + 0.5) + factor * float(sigma.sum())) / steps**0.5
    upper = float(norms.mean() + 5 * norms.std() / math.sqrt(REPLICAS))
    assert upper <= bound
    assert upper > 0.25 * bound, "a bound that is far off would test nothing"


def test_one_step_descends_as_the_proof_says():
    """E[f_1 - f_0] <= -d ||g||_1 + 2 d sum |g_i| P_i + d^2 ||L||_1 / 2, a quadratic with equality.

    P_i, the probability that a sign is wrong, is at most sigma_i / (sqrt(n) |g_i|).
    """
    replicas, rate, batch = 4000, 0.1, 4
    curvature = torch.linspace(0.5, 2, DIMENSION, dtype=torch.float64)
    sigma = torch.linspace(0.2, 3, DIMENSION, dtype=torch.float64)
    x = torch.linspace(-1, 1.2, DIMENSION, dtype=torch.float64)
    gradient = curvature * x
    noisy = gradient + sigma / math.sqrt(batch) * normal(replicas, DIMENSION).double()
    signs = vote(signsgd(), noisy.float().view(1, -1)).view(replicas, DIMENSION).double()
    change = 0.5 * (curvature * ((x - rate * signs).square() - x.square())).sum(1)
    snr = (gradient.abs() * math.sqrt(batch) / sigma).tolist()
    wrong = torch.tensor([gaussian_tail(s) for s in snr], dtype=torch.float64)
    fixed = -rate * gradient.abs().sum() + rate**2 * curvature.sum() / 2
    exact = float(fixed + 2 * rate * (gradient.abs() * wrong).sum())
    sd = float(change.std()) / math.sqrt(replicas)
    assert abs(float(change.mean()) - exact) < 5 * sd
    bound = float(fixed + 2 * rate * (sigma / math.sqrt(batch)).sum())
    assert exact <= bound


def test_signum_warm_up():
    """C(beta) = min{C : (C/2) beta^C <= 1 / ((1 - beta^2)(C + 1)), beta^(C+1) <= 1/2}."""

    def warm_up(beta):
        return next(
            c
            for c in itertools.count(1)
            if c / 2 * beta**c <= 1 / ((1 - beta**2) * (c + 1)) and beta ** (c + 1) <= 0.5
        )

    assert [warm_up(beta) for beta in (0.5, 0.9, 0.95, 0.99)] == [1, 54, 132, 894]


def test_signum_votes_over_momenta():
    """Each worker sends sign(m_i), m_i its own; the factor 1 - beta of m does not matter."""
    gradients = normal(30, 3, 500)
    carried, sums = Momentum(beta=0.5), torch.zeros(3, 500)
    states = [carried.state(sums[0]) for _ in range(3)]
    for gradient in gradients:
        momenta = torch.stack(
            [
                carried.offer(g, Context(one(500), workers=3, state=state))
                for g, state in zip(gradient, states, strict=True)
            ]
        )
        sums = 0.5 * sums + gradient
        assert torch.equal(vote(signsgd(), momenta), vote(signsgd(), sums))
    assert not torch.equal(vote(signsgd(), momenta), vote(signsgd(), gradients[-1]))


def test_adam_without_memory_is_signsgd():
    """Adam with betas of 0 and eps 0 steps by lr g / |g|: learning rates carry over."""
    x = torch.nn.Parameter(normal(400))
    adam = torch.optim.Adam([x], lr=1e-3, betas=(0.0, 0.0), eps=0.0)
    plain = x.detach().clone()
    for step in range(20):
        x.grad = normal(400, seed=step)
        adam.step()
        plain -= 1e-3 * vote(signsgd(), x.grad.unsqueeze(0))
    torch.testing.assert_close(x.detach(), plain, rtol=0, atol=1e-5)


# ---- EF-signSGD ----------------------------------------------------------------------------------


def test_ef_payload_by_hand():
    """C(p) = (||p||_1 / d) sign(p): bits, then one scale per tensor by default."""
    assert efsignsgd().granularity == "tensor"
    x = torch.tensor([3.0, -1.0, 0.0, -4.0, 0.5])
    segments = Segments.of([(4,), (1,), (0,)])
    payload = codec.encode(efsignsgd(), x, Context(segments, NOTHING, Key(0, 0, 0)))
    assert bytes(payload.to_bytes().tolist()) == struct.pack("<I3f", 0b10101, 2.0, 0.5, 0.0)
    assert codec.decode(efsignsgd(), payload, Context(segments, NOTHING)).tolist() == [
        2,
        -2,
        2,
        -2,
        0.5,
    ]
    assert codec.bits(efsignsgd(), segments) == 32 + 3 * 32


@pytest.mark.parametrize("granularity", ["tensor", "model", "column", 7])
@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-30])
def test_ef_error_is_one_minus_the_density(granularity, scale):
    """||C(x) - x||^2 = (1 - phi) ||x||^2, phi = ||x||_1^2 / (d ||x||^2), summed over segments."""
    method = efsignsgd(granularity)
    segments = Segments.of([(20, 33), (100,), (1,), (0,)], granularity)
    x = normal(segments.numel) * scale * torch.logspace(-2, 2, segments.numel)
    x[5:50] = 0
    decoded = coded(method, x, segments)
    error, expected = float((x.double() - decoded.double()).square().sum()), 0.0
    for start, stop in itertools.pairwise(segments.offsets):
        part = x[start:stop].double()
        if part.any():
            norm1, norm2 = float(part.abs().sum()), float(part.square().sum())
            phi = norm1**2 / (len(part) * norm2)
            assert 1 / len(part) * (1 - 1e-12) <= phi <= 1 + 1e-12
            expected += (1 - phi) * norm2
    assert error == pytest.approx(expected, rel=1e-9)
    bound = method.claims.error_bound(x, Context(segments))
    assert error <= bound <= error * (1 + 1e-9) < float(x.double().square().sum())


def test_ef_density_of_a_spike_and_of_normal_values():
    """phi is 1/d for one nonzero, 1 for one magnitude and 2/pi for normal values."""
    for d in (1, 2, 10, 1000):
        spike = torch.zeros(d)
        spike[d // 2] = -5
        bound = efsignsgd().claims.error_bound(spike, Context(one(d)))
        assert bound == pytest.approx(25 * (1 - 1 / d), rel=1e-9, abs=1e-9)
    x = torch.where(normal(999) > 0, 0.3, -0.3)
    assert torch.equal(coded(efsignsgd(), x, one(999)), x)
    x = normal(200_000)
    error = float((x - coded(efsignsgd(), x, one(200_000))).square().sum() / x.square().sum())
    assert error == pytest.approx(efsignsgd().claims.gaussian_error, rel=0.01)
    assert efsignsgd().claims.gaussian_error == pytest.approx(0.36338, abs=1e-5)


def test_ef_special_values():
    method = efsignsgd()
    segments = Segments.of([(200,), (0,), (1,)])
    huge = torch.full((201,), torch.finfo(torch.float32).max)
    huge[::2] *= -1
    assert torch.equal(coded(method, huge, segments), huge)
    for x in (torch.zeros(201), -torch.zeros(201)):
        payload = codec.encode(method, x, Context(segments, NOTHING, Key(0, 0, 0)))
        assert not payload.parts[1].any()
        assert not codec.decode(method, payload, Context(segments, NOTHING)).any()
        assert method.claims.error_bound(x, Context(segments)) == 0
    tiny = torch.full((201,), -1e-45)
    assert torch.equal(coded(method, tiny, segments), tiny)


def test_ef_corrupt_payloads_are_refused():
    method, segments = efsignsgd(), Segments.of([(40,), (0,)])
    words, scale = codec.encode(method, normal(40), Context(segments, NOTHING, Key(0, 0, 0))).parts
    for parts in (
        (words, torch.tensor([math.nan, 0.0])),
        (words, torch.tensor([math.inf, 0.0])),
        (words, torch.tensor([-1.0, 0.0])),
        (words, torch.tensor([1.0, 1.0])),  # the scale of nothing
        (words, scale[:1]),
        (words[:1], scale),
        (words.float(), scale),
        (torch.full_like(words, -1), scale),  # bits after the last code
        (words,),
    ):
        with pytest.raises(PayloadError, match=r"^efsignsgd: "):
            codec.decode(method, Payload(parts), Context(segments, NOTHING))
    with pytest.raises(UsageError, match="granularity"):
        efsignsgd("row")


def ef_descent(curvature, sigma, rate, steps, replicas):
    """Run EF-signSGD on 1/2 sum L_i x_i^2 from x = 1, one segment a replica, float64 outside.

    Yields x, the residual, the stochastic gradient, and what was offered and sent at each step.
    """
    d = len(curvature)
    method = efsignsgd(d)
    segments = Segments.of([(replicas * d,)], d)
    x = torch.ones(replicas, d, dtype=torch.float64)
    residual = torch.zeros_like(x)
    for step in range(steps):
        gradient = curvature * x + sigma * normal(replicas, d, seed=step).double()
        offered = residual + gradient
        sent = coded(method, offered.float().view(-1), segments).view(replicas, d).double()
        yield x, residual, gradient, offered, sent
        x = x - rate * sent
        residual = offered - sent


CURVATURE = torch.logspace(-1, 0.3, 10, dtype=torch.float64)


def test_ef_virtual_iterate_walks_as_sgd():
    """x - eta e steps by -eta g exactly: what is not applied yet is all in the residual."""
    rate, virtual = 0.05, None
    for x, residual, gradient, _, _ in ef_descent(CURVATURE, 0.5, rate, 300, 20):
        if virtual is not None:
            assert float((x - rate * residual - virtual).abs().max()) < 1e-14
        virtual = x - rate * residual - rate * gradient


def test_ef_residual_stays_bounded():
    """||e||^2 <= 4 (1 - delta) s^2 / delta^2 where every ||g||^2 <= s^2 and phi >= delta."""
    squares, delta, largest = [], 1.0, 0.0
    for _, residual, gradient, offered, _ in ef_descent(CURVATURE, 0.5, 0.05, 400, 20):
        squares.append(float(gradient.square().sum(1).max()))
        largest = max(largest, float(residual.square().sum(1).max()))
        density = offered.abs().sum(1).square() / (offered.square().sum(1) * len(CURVATURE))
        delta = min(delta, float(density.min()))
    assert 0.1 <= delta < 0.5  # 1/d is the least that a scaled sign can have
    assert 0.01 * max(squares) < largest <= 4 * (1 - delta) / delta**2 * max(squares)


def test_ef_converges_as_the_nonconvex_theorem_says():
    """mean E||grad||^2 <= 2 f_0 / (eta T) + eta L s^2 + 4 eta^2 L^2 s^2 (1 - delta) / delta^2."""
    rate, steps, sigma = 0.02, 400, 0.2
    norms, second, delta = [], 0.0, 1.0
    for x, _, gradient, offered, _ in ef_descent(CURVATURE, sigma, rate, steps, 50):
        norms.append((CURVATURE * x).square().sum(1))
        second = max(second, float((CURVATURE * x).square().sum(1).max()))
        density = offered.abs().sum(1).square() / (offered.square().sum(1) * len(CURVATURE))
        delta = min(delta, float(density.min()))
        assert gradient.isfinite().all()
    second += sigma**2 * len(CURVATURE)
    smooth, start = float(CURVATURE.max()), 0.5 * float(CURVATURE.sum())
    bound = 2 * start / (rate * steps) + rate * smooth * second
    bound += 4 * rate**2 * smooth**2 * second * (1 - delta) / delta**2
    means = torch.stack(norms).mean(0)
    assert float(means.mean() + 5 * means.std() / math.sqrt(50)) <= bound
    assert float(norms[-1].mean()) < 0.05 * float(norms[0].mean())


def test_one_dimension_where_signs_go_the_wrong_way():
    """g = 4 with probability 1/4, else -1: signs climb to +1, error feedback finds the optimum -1.

    200 walks on [-1, 1] from 0. In one dimension the scaled sign is exact, so error feedback is
    SGD, whose stationary mean lies E[g^2] / (2 E[g]) = 9.5 rates beside the optimum.
    """
    walks, rate = 200, 0.008
    sign, scaled = signsgd(), efsignsgd(1)
    segments = Segments.of([(walks,)], 1)
    x, y, residual = torch.zeros(3, walks)
    for step in range(700):
        gradient = torch.where(uniform(walks, seed=step) < 0.25, 4.0, -1.0)
        x = (x - rate * coded(sign, gradient, segments)).clamp(-1, 1)
        offered = gradient + residual
        sent = coded(scaled, offered, segments)
        residual = offered - sent
        y = (y - rate * sent).clamp(-1, 1)
    assert float(x.min()) > 0.9
    assert float(y.mean()) == pytest.approx(-1 + 9.5 * rate, abs=0.03)  # 5 standard errors
    assert float(y.max()) < -0.2


def test_two_dimensions_where_signs_freeze():
    """f = eps |x1 + x2| + |x1 - x2| from (1, 1): the sign step never changes x1 + x2 = 2.

    The subgradient at a kink is that of sign(0) = +1; steps are powers of 2, so sums are exact.
    """
    epsilon, rate, steps = 0.25, 2.0**-6, 400

    def plus(value: float) -> float:
        return 1.0 if value >= 0 else -1.0

    def run(method, feedback: bool):
        x, residual = torch.ones(2), torch.zeros(2)
        values, sums = [], set()
        for _ in range(steps):
            a, b = plus(float(x[0] + x[1])), plus(float(x[0] - x[1]))
            offered = torch.tensor([epsilon * a + b, epsilon * a - b]) + residual
            sent = coded(method, offered, one(2))
            if feedback:
                residual = offered - sent
            x = x - rate * sent
            sums.add(float(x[0] + x[1]))
            values.append(float(epsilon * (x[0] + x[1]).abs() + (x[0] - x[1]).abs()))
        return sums, values

    sums, values = run(signsgd(), feedback=False)
    assert sums == {2.0}
    assert min(values) >= 2 * epsilon
    sums, values = run(efsignsgd(), feedback=False)  # the scale alone does not help
    assert sums == {2.0}
    _, values = run(efsignsgd(), feedback=True)
    assert min(values) < 0.02
    assert sum(values[-100:]) / 100 < 0.1


def test_ef_first_step_has_the_learning_rate_of_all():
    """Residuals in gradient units that follow the rate give the paper's p = lr g + e, bit by bit.

    Rates are powers of 2: products are exact. The first step moves by lr ||g||_1 / d, not more.
    """
    carried = Residual()
    method, segments = efsignsgd(), one(300)
    x, paper, error = torch.ones(300), torch.ones(300), torch.zeros(300)
    state = carried.state(x)
    rates = [2.0**-4] * 10 + [2.0**-6] * 10
    for step, (before, rate) in enumerate(zip([rates[0], *rates], rates, strict=False)):
        gradient = normal(300, seed=step)
        p = rate * gradient + error
        update = coded(method, p, segments)
        paper, error = paper - update, p - update
        carried.rescale(state, before / rate)
        ctx = Context(segments, state=state)
        offered = carried.offer(gradient, ctx)
        sent = coded(method, offered, segments)
        carried.keep(offered, sent, ctx)
        x = x - rate * sent
        assert torch.equal(x, paper)
        assert torch.equal(rate * state["residual"], error)
        if step == 0:
            moved = float((1 - x).abs().double().mean())
            assert moved == pytest.approx(rate * float(gradient.abs().double().mean()), rel=1e-4)
