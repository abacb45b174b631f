"""`gcbench bounds`: the tests of noise, the rule of verdicts, theorems, and wrong codecs that fail.

Statistical tests have fixed seeds; each says with what probability a right code would fail it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import torch
from commands import invoke

from gcbench import registry
from gcbench.compressor import Key, Payload, Segments
from gcbench.errors import UsageError
from gcbench.measure import analysis as measuring
from gcbench.measure import bounds
from gcbench.measure.bounds import (
    alone,
    claims,
    gradient_claims,
    observe,
    quadratic_claims,
    quadratics,
    shape,
)
from gcbench.measure.bounds.claims import Claim, Judged, always, interval, judge, mean, ratio
from gcbench.train import Options

QUICK = ("--steps", 20, "--every", 5, "--snapshots", 2, "--batches", 16, "--seed", "0,1,2")

# ---- shape of noise ------------------------------------------------------------------------------


def nearest_unimodal(x) -> float:
    """Return the dip by its definition, as a linear programme for each place of the mode.

    The least D with a distribution function, convex up to the mode and concave from it on, that is
    within D of the empirical one at every point, on both sides of each step.
    """
    values, counts = np.unique(x, return_counts=True)
    after = np.cumsum(counts) / len(x)
    before = after - counts / len(x)
    m = len(values)
    best = 1.0
    for mode in range(m):
        # Unknown: F at the values (left limit and value at the mode, where F may jump), and D.
        # Left part: points 0..mode (left limit at the mode); right part: points mode..m-1.
        left, right = mode + 1, m - mode
        size = left + right + 1
        rows, limits = [], []

        def bound(column, sign, value, rows=rows, limits=limits, size=size):
            row = np.zeros(size)
            row[column], row[-1] = sign, -1
            rows.append(row)
            limits.append(sign * value)

        def order(row, rows=rows, limits=limits):
            rows.append(row)
            limits.append(0.0)

        for i in range(left):
            high = after[i] if i < mode else before[i]
            bound(i, -1, high)  # F >= after - D, of the left limit at the mode only before
            bound(i, 1, before[i])
        for i in range(right):
            bound(left + i, -1, after[mode + i])
            bound(left + i, 1, before[mode + i] if i else after[mode])
        for part, start, sign in ((range(left), 0, 1), (range(right), mode, -1)):
            base = 0 if sign == 1 else left
            for i in part[1:-1]:
                a, b, c = values[start + i - 1], values[start + i], values[start + i + 1]
                row = np.zeros(size)
                row[base + i - 1], row[base + i + 1] = -sign / (b - a), -sign / (c - b)
                row[base + i] = sign * (1 / (b - a) + 1 / (c - b))
                order(row)
            for i in part[1:]:
                row = np.zeros(size)
                row[base + i - 1], row[base + i] = 1, -1
                order(row)
        row = np.zeros(size)
        row[left - 1], row[left] = 1, -1
        order(row)
        cost = np.zeros(size)
        cost[-1] = 1
        done = scipy.optimize.linprog(
            cost, np.array(rows), np.array(limits), bounds=[(0, 1)] * (size - 1) + [(0, None)]
        )
        if done.status == 0:
            best = min(best, done.fun)
    return best


@pytest.mark.parametrize("seed", range(12))
def test_the_dip_is_the_distance_from_the_nearest_unimodal_distribution(seed: int) -> None:
    draw = np.random.default_rng(seed)
    n = int(draw.integers(5, 16))
    x = [
        draw.random(n),
        np.concatenate([draw.normal(size=n), draw.normal(9, 1, n)]),
        draw.normal(size=n) ** 3,
    ][seed % 3]
    assert shape.dip(x.tolist()) == pytest.approx(nearest_unimodal(x), abs=1e-9)
    assert shape.dip(x.tolist()) >= 0.5 / len(x)


def test_known_dips() -> None:
    assert shape.dip([0, 1] * 50) == pytest.approx(0.25)  # two atoms: the largest there is
    assert shape.dip(range(100)) == pytest.approx(1 / 200)  # the least
    assert shape.dip([3.0] * 10) == pytest.approx(1 / 20)
    # As R's diptest 0.77 and the C library of the package diptest 0.12 have it.
    x = [30, 33, 35, 36, 37, 37, 39, 39, 39, 39, 39, 40, 40, 40, 40, 41, 42, 43, 43, 43, 44, 44]
    x += [45, 45, 46, 47, 47, 48, 48, 48, 49, 50, 50, 51, 52, 52, 53, 53, 53, 53, 53, 54, 54, 57]
    x += [57, 59, 60, 60, 60, 61, 61, 61, 61, 62, 62, 62, 62, 63, 66, 70, 72, 72]
    assert shape.dip(x) == pytest.approx(0.06048387096774194, abs=1e-15)
    draw = np.random.default_rng(5)
    one = draw.normal(size=300)
    two = np.concatenate([draw.normal(size=150), draw.normal(3, 1, 150)])
    assert shape.dip(one) == pytest.approx(0.014769637510234529, abs=1e-15)
    assert shape.dip(two) == pytest.approx(0.025368333491020086, abs=1e-15)


def test_the_dip_test_keeps_its_level_and_sees_two_modes() -> None:
    """P(more than 27 of 300 uniform samples below 5 %) = 1e-3; normal ones are rejected less."""
    draw = np.random.default_rng(0)
    n = 64

    def rejected(samples) -> int:
        return sum(shape.dip_p(shape.dip(x.tolist()), n) <= 0.05 for x in samples)

    assert 4 <= rejected(draw.random((300, n))) <= 27
    assert rejected(draw.normal(size=(300, n))) <= 10
    two = draw.normal(size=(50, n)) + 6 * (draw.random((50, n)) < 0.5)
    assert rejected(two) >= 48
    # An atom at the mode, as of weights behind a ReLU, is unimodal.
    assert rejected(np.where(draw.random((100, n)) < 0.4, 0, draw.normal(size=(100, n)))) <= 5


@pytest.mark.parametrize("law", ["normal", "uniform", "laplace", "t3", "atom"])
def test_the_triples_test_keeps_its_level(law: str) -> None:
    """At 5 %, 300 samples of 128: outside [3, 30] with probability below 1e-3 at a true 4-6 %."""
    draw = np.random.default_rng(1)
    shaped = {
        "normal": draw.standard_normal,
        "uniform": draw.random,
        "laplace": lambda size: draw.laplace(size=size),
        "t3": lambda size: draw.standard_t(3, size),
        "atom": lambda size: np.where(draw.random(size) < 0.3, 0, draw.standard_normal(size)),
    }[law]
    rejected = sum(shape.triples(x)[1] <= 0.05 for x in shaped((300, 128)) + 3.0)
    assert 3 <= rejected <= 30


def test_the_triples_test_sees_skewness_and_its_side() -> None:
    draw = np.random.default_rng(2)
    found = [shape.triples(x) for x in draw.exponential(size=(40, 128))]
    assert all(z > 0 and p < 0.05 for z, p in found)
    mirrored = [shape.triples(-x)[0] for x in draw.exponential(size=(5, 128))]
    assert all(z < 0 for z in mirrored)
    assert shape.triples([0.1 * k for k in range(-9, 10)]) == (pytest.approx(0, abs=1e-9), 1.0)
    assert shape.triples([2.0] * 9) == (0.0, 1.0)
    with pytest.raises(ValueError, match="at least 4"):
        shape.triples([1, 2, 3])


@pytest.mark.parametrize("ties", [False, True])
def test_triples_by_their_definition(ties: bool) -> None:
    """The statistic and its variance, by loops over triples, pairs and values."""
    x = np.random.default_rng(3).normal(size=14) ** 3
    x = np.round(2 * x) if ties else x
    n = len(x)
    f = {
        (i, j, k): sum(
            np.sign(x[a] + x[b] - 2 * x[c]) for a, b, c in ((i, j, k), (i, k, j), (j, k, i))
        )
        / 3
        for i, j, k in itertools.combinations(range(n), 3)
    }
    eta = np.mean(list(f.values()))

    def of(*fixed):
        return np.mean([value for triple, value in f.items() if set(fixed) <= set(triple)]) - eta

    zeta = [
        np.mean([of(i) ** 2 for i in range(n)]),
        np.mean([of(*pair) ** 2 for pair in itertools.combinations(range(n), 2)]),
        np.mean([value**2 for value in f.values()]) - eta**2,
    ]
    variance = sum(
        math.comb(3, c) * math.comb(n - 3, 3 - c) * zeta[c - 1] for c in (1, 2, 3)
    ) / math.comb(n, 3)
    z, p = shape.triples(x)
    assert z == pytest.approx(eta / math.sqrt(variance))
    assert p == pytest.approx(2 * scipy.stats.norm.sf(abs(z)))


def test_holm_is_the_step_down_procedure() -> None:
    assert shape.holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert shape.holm([0.9, 0.8]) == [1.0, 1.0]
    assert shape.holm([]) == []


# ---- verdicts ------------------------------------------------------------------------------------


def test_intervals_are_students() -> None:
    values = [1.0, 2.0, 4.0, 7.0]
    found = interval(values, "copies")
    low, high = scipy.stats.t.interval(0.95, 3, np.mean(values), scipy.stats.sem(values))
    assert (found.mean, found.low, found.high) == pytest.approx((3.5, low, high))
    assert math.isinf(interval([1.0], "x").high)


def test_independent_values_are_seeds_or_batches_of_steps() -> None:
    series = [[(float(t), 2.0) for t in range(40)] for _ in range(3)]
    assert (ratio(series).n, ratio(series).over) == (3, "seeds")
    few = ratio(series[:1])
    assert (few.n, few.over) == (10, "batches")
    assert few.mean == pytest.approx(19.5 / 2)
    assert mean([[1.0, 3.0]]).n == 2
    # A ratio of sums and no mean of ratios.
    assert ratio([[(1.0, 1.0), (9.0, 3.0)]] * 3).mean == pytest.approx(2.5)


def test_the_rule() -> None:
    found = interval([1.0, 2.0, 3.0], "seeds")  # 2 +- 2.48
    assert judge(found, 5.0) == "holds"
    assert judge(found, 3.0) == "undecided"
    assert judge(found, 1.5) == "undecided"  # the mean is beyond, the interval is not
    assert judge(found._replace(low=1.5), 1.0) == "fails"
    assert judge(always(1 + 1e-7, 9), 1.0) == "holds"
    assert judge(always(1 + 1e-5, 9), 1.0) == "fails"
    assert judge(found._replace(mean=math.nan), 5.0) == "fails"
    assert judge(interval([1.0], "seeds"), 5.0) == "undecided"
    assert found.distance(2.0)[:2] == (0.0, 0.0)
    away = found._replace(low=1.0, high=3.0).distance(4.0)
    assert (away.mean, away.low, away.high) == (2.0, 1.0, 3.0)
    row = claims.row(Claim("a/b", "theorem", "s", "t"), "bowls", "", always(math.nan, 3), 1.0, "")
    assert (row["verdict"], row["measured"], row["why"]) == ("fails", None, "not finite")


# ---- what is seen --------------------------------------------------------------------------------


def test_welford_is_the_two_pass_variance_far_from_zero() -> None:
    x = torch.randn(50, 7, generator=torch.Generator().manual_seed(0)) + 1000.0
    seen = observe.Welford(x[0])
    for row in x:
        seen.add(row)
    torch.testing.assert_close(seen.mean, x.double().mean(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(seen.variance(), x.double().var(0), rtol=1e-9, atol=0)
    torch.testing.assert_close(
        seen.variance(unbiased=False), x.double().var(0, correction=0), rtol=1e-9, atol=0
    )


def test_densities() -> None:
    assert observe.density(torch.tensor([0.0, 3.0, 0.0, 0.0])) == pytest.approx(1 / 4)
    assert observe.density(torch.full((9,), -2.0)) == pytest.approx(1.0)
    x = torch.randn(10**6, generator=torch.Generator().manual_seed(1))
    assert observe.density(x) == pytest.approx(2 / math.pi, abs=2e-3)
    assert math.isnan(observe.density(torch.zeros(3)))


def test_uniform_noise_attains_gauss_bound() -> None:
    s = torch.tensor([0.3, 1.0])  # |g| / sigma; uniform noise of sigma 1 spans +-sqrt 3
    expected = (math.sqrt(3) - s) / (2 * math.sqrt(3))
    torch.testing.assert_close(observe.gauss(s), expected)
    at = torch.tensor([2 / math.sqrt(3) * (1 - 1e-6), 2 / math.sqrt(3) * (1 + 1e-6)])
    assert observe.gauss(at)[0] == pytest.approx(float(observe.gauss(at)[1]), abs=1e-5)  # 1/6


def test_the_gaussian_of_terngrad_is_the_integral() -> None:
    f = np.clip(np.random.default_rng(0).standard_normal(10**6), -2.5, 2.5)
    assert pytest.approx(2.5 * np.abs(f).mean(), rel=3e-3) == gradient_claims.GAUSSIAN
    assert pytest.approx(1.9847, abs=1e-4) == gradient_claims.GAUSSIAN


@pytest.fixture
def watched(monkeypatch):
    """Return a function that trains on digits under a watch, and what it hangs on."""

    def make(**changes):
        seen = []
        own = observe.Watch.start

        def start(self, trainer):
            own(self, trainer)
            seen.append(self)

        monkeypatch.setattr(observe.Watch, "start", start)
        known = {"steps": 12, "every": 4, "snapshots": 2, "batches": 16, "seeds": (0,)}
        settings = bounds.make(**{**known, **changes})
        methods = settings.chosen()
        record = bounds._train(settings, methods, 0, Path(), None, lambda step: None)
        return record, seen[0]

    return make


def test_normal_gradients_show_the_papers_clipping(watched) -> None:
    """-1.13 % and 2.75 degrees at n = 1e6; R 1.985 clipped, all over ||g||^2 of the unclipped."""
    _, watch = watched(claims="terngrad/*", steps=1, every=1)
    watch.segments = Segments.of([(1000, 1000)])
    x = torch.randn(10**6, generator=torch.Generator().manual_seed(0))
    found = watch._ternary(x)
    assert found["length"] == [pytest.approx(0.0113, abs=0.001)]
    assert found["angle"] == [pytest.approx(2.75, abs=0.1)]
    assert found["clip"] / found["square"] == pytest.approx(gradient_claims.GAUSSIAN, rel=0.01)
    assert found["layer"] == pytest.approx(found["whole"])
    assert found["square"] == pytest.approx(float(x.double().square().sum()))


def test_every_step_feeds_the_shadow_and_every_fourth_is_seen(watched) -> None:
    record, _ = watched(methods="topk,efsignsgd", compressor="topk:ratio=0.05")
    assert [one["step"] for one in record["observations"]] == [0, 4, 8]
    assert [one["step"] for one in record["snapshots"]] == [0, 11]
    assert record["residuals"]["topk"]["steps"] == 12
    assert all(one["worst_layer"] <= 1 and one["worst_clip"] <= 1 for one in record["observations"])
    assert json.loads(json.dumps(record, allow_nan=False)) == record


def test_the_shadow_of_what_trains_is_its_residual(watched) -> None:
    _, watch = watched(methods="topk", compressor="topk", claims="residual/*")
    shadow = watch.shadows["topk"].exchange.workers[0][0]["residual"]
    real = watch.trainer.exchange.workers[0][0]["residual"]
    assert torch.equal(shadow, real)
    assert real.norm() > 0


def test_a_shadow_by_hand() -> None:
    """The two largest of four are sent; the second step has half the learning rate."""
    shadow = alone.Shadow(registry.compressor("topk", ratio=0.5), [(4,)], 0)
    gradient = torch.tensor([4.0, 3.0, 2.0, 1.0])
    shadow.step(gradient, 0, 1.0)  # left: 2, 1
    assert shadow.delta == pytest.approx(1 - 5 / 30)
    shadow.step(gradient, 1, 0.5)  # offered: 4, 3, 2 + 4, 1 + 2; left: 3, 3
    assert shadow.delta == pytest.approx(1 - 18 / 70)
    assert shadow.record() == {
        "delta": pytest.approx(52 / 70), "gradient": 30.0, "residual": 5.0, "steps": 2
    }  # fmt: skip


def test_watching_changes_nothing(watched, simulated, tmp_path) -> None:
    from gcbench.store import Run
    from gcbench.train import Trainer

    _, watch = watched()
    alone = Trainer(bounds.Settings(steps=12).config(0), simulated(4), Run(tmp_path), Options())
    for _ in range(12):
        alone.train_step()
    assert alone.parameter_hash() == watch.trainer.parameter_hash()


def test_drawn_gradients_are_unbiased_with_the_noise_of_a_workers_batch(watched) -> None:
    """On the bowl the noise of one example is 1 a coordinate, that of a worker's 8 examples 1/8.

    256 coordinates, 400 batches: the mean variance has a relative sd of 0.44 %, so it is off by 2 %
    with probability 6e-6.
    """
    record, watch = watched(task="quadratic", steps=1, snapshots=1, batches=400)
    one = record["snapshots"][0]
    assert one["sigma_l2"] ** 2 / 256 == pytest.approx(1 / 8, rel=0.02)
    bowl = watch.trainer.model  # the start is +-1 from the minimum
    assert one["gradient_l2"] == pytest.approx(float(bowl.curvature.norm()), rel=0.02)
    assert one["density_noise"] == pytest.approx(1.0, abs=0.01)
    assert one["noise_share"] == pytest.approx(one["sigma_l2"] ** 2 / 400 / one["gradient_l2"] ** 2)


def test_weights_are_named_and_wrong_names_are_told(watched) -> None:
    record, _ = watched(weights=("1.weight[3]", "3.bias[0]"), claims="signsgd/*")
    names = [weight["weight"] for weight in record["snapshots"][0]["weights"]]
    assert names == ["1.weight[3]", "3.bias[0]"]
    for word, said in (
        ("1.wheight[3]", "Did you mean '1.weight'"),
        ("3.bias[10]", "from 0 to 9"),
        ("3.bias", "index"),
    ):
        with pytest.raises(UsageError, match=said):
            watched(weights=(word,), claims="signsgd/*")


# ---- theorems, and wrong codecs ------------------------------------------------------------------


def test_theorems_of_the_sign_hold_and_a_wrong_sign_breaks_them() -> None:
    """Tightest measured: 0.5 of the bound; a coin in the place of the sign stays at the start."""
    method = registry.compressor("signsgd")
    found, bound = quadratics.sign_theorem(method, 7, 100.0, 100, symmetric=True)
    assert judge(found, bound) == "holds"
    assert found.mean > bound / 50  # a bound that says something
    loose = quadratics.sign_theorem(method, 7, 100.0, 100, symmetric=False)[1]
    assert loose > bound

    class Up(type(method)):
        def decode(self, payload, segments, shared):
            return -super().decode(payload, segments, shared)

    found, bound = quadratics.sign_theorem(Up(), 7, 100.0, 100, symmetric=True)
    assert judge(found, bound) == "fails"


def test_the_skewed_noise_is_of_mean_0_and_variance_1() -> None:
    """1e6 draws: mean within 5 sd of 0; variance within 1 %; skewness 8/3 over sqrt of batch."""
    x = quadratics.skewed(4)(torch.Generator().manual_seed(0), (10**6,))
    assert abs(float(x.mean())) < 5e-3
    assert float(x.var()) == pytest.approx(1, abs=0.01)
    assert float((x**3).mean()) == pytest.approx(8 / 3 / 2, rel=0.05)


@pytest.mark.parametrize("name", ["topk", "efsignsgd", "onebit", "powersgd", "demo"])
def test_error_feedback_keeps_within_its_theorems(name: str) -> None:
    seen = quadratics.feedback(registry.compressor(name), steps=100)
    assert judge(seen.gradient, seen.gradient_bound) == "holds"
    assert judge(seen.residual, seen.residual_bound) == "holds"
    assert 0 < seen.delta < 1


def test_error_feedback_with_a_lying_decoder_fails() -> None:
    method = registry.compressor("topk", ratio=0.25)

    class Half(type(method)):
        """What others apply is twice what the residual is told."""

        def mean(self, payloads, segments, shared):
            return -super().mean(payloads, segments, shared)

    seen = quadratics.feedback(Half(ratio=0.25), steps=100)
    assert judge(seen.gradient, seen.gradient_bound) == "fails"


def test_the_proved_form_of_the_fft_theorem_holds_and_an_amplifier_is_noticed() -> None:
    method = registry.compressor("fft", theta=0.5, granularity="tensor")
    rate = (1 - math.sqrt(0.5)) / (1 + math.sqrt(0.5)) ** 2
    run = {"theta": lambda t: 0.5, "rate": lambda t: rate, "workers": 2, "steps": 60}
    seen = quadratics.relative(method, **run)
    assert seen.excess < 1
    a, gap = math.sqrt(0.5), sum(10 ** (-k / 255) for k in range(256)) / 2
    noise = 256 / 16 / 2  # 16 examples, 2 workers
    plateau = noise * (a + rate * (1 + a) ** 2) / (1 - a)
    assert seen.bound == pytest.approx(2 * gap / (rate * (1 - a) * 60) + plateau)
    assert judge(seen.gradient, seen.bound) == "holds"

    @dataclasses.dataclass(frozen=True)
    class Loud(type(method)):
        def mean(self, payloads, segments, shared):
            return 2 * super().mean(payloads, segments, shared)

    seen = quadratics.relative(Loud(theta=0.5, granularity="tensor"), **run)
    assert seen.excess > 1
    judged = Judged(lambda name: True)
    quadratic_claims._relative(quadratic_claims.FFT_CONSTANT, seen, "theta=0.5", judged)
    assert not judged.rows
    assert "assumption 3.2 is not met" in judged.skipped()[0]["why"]


def test_terngrad_converges_within_its_constants_and_wrong_decoders_do_not() -> None:
    method = registry.compressor("terngrad", clip=0.0)
    seen = quadratics.convergence(method, steps=1500)
    assert seen.worst < 1
    assert judge(seen.last, seen.last_bound) == "holds"

    class Misplaced(type(method)):
        def mean(self, payloads, segments, shared):
            return super().mean(payloads, segments, shared).roll(1)

    class Quiet(type(method)):
        def mean(self, payloads, segments, shared):
            return super().mean(payloads, segments, shared) / 10

    for wrong in (Misplaced, Quiet):
        assert not quadratics.convergence(wrong(clip=0.0), steps=300).worst <= 1


@pytest.mark.parametrize("word", ["qsgd", "terngrad:clip=0", "natural"])
def test_a_plateau_is_where_the_declared_variance_puts_it(word: str) -> None:
    """32 copies of 1,600 steps: within 5 % of the prediction, 10 % allowed."""
    from gcbench.measure import methods

    seen = quadratics.plateau(methods.parse(word))
    assert seen.measured.mean == pytest.approx(1, abs=0.05)
    assert judge(seen.measured.distance(1.0), quadratic_claims.PLATEAU) == "holds"
    assert seen.over_sgd.mean > 1


def test_a_wrong_declaration_moves_the_plateau() -> None:
    method = registry.compressor("terngrad", clip=0.0)

    class Modest(type(method)):
        def variance(self, x, segments, shared):
            return super().variance(x, segments, shared) / 2

    seen = quadratics.plateau(Modest(clip=0.0))
    assert judge(seen.measured.distance(1.0), quadratic_claims.PLATEAU) == "fails"


def test_what_has_no_plateau_says_so() -> None:
    assert quadratics.plateau(registry.compressor("terngrad")) is None  # clipped: another x
    assert quadratics.plateau(registry.compressor("none")) is None


def codec_rows(watched, method) -> dict[str, str]:
    """Return verdicts of one codec on gradients of digits."""
    record, watch = watched(methods="topk", claims="contraction/*")
    watch.plan = dataclasses.replace(
        watch.plan, methods={"mine": method}, wanted=lambda name: not name.startswith("signsgd")
    )
    x = torch.randn(watch.segments.numel, generator=torch.Generator().manual_seed(0))
    record["snapshots"] = [{"step": 0, **watch._snapshot(0, x)}] * 2
    judged = Judged(lambda name: True)
    for one in ([record["snapshots"]],):
        gradient_claims._codec("mine", method, one, judged, "here")
    return {row["claim"]: row["verdict"] for row in judged.rows}


def test_codecs_hold_what_they_declare_and_wrong_ones_fail(watched) -> None:
    assert codec_rows(watched, registry.compressor("topk")) == {"contraction/mine": "holds"}
    expected = {"variance/mine": "holds", "variance-bound/mine": "holds"}
    assert codec_rows(watched, registry.compressor("qsgd", norm="2")) == expected
    assert codec_rows(watched, registry.compressor("terngrad")) == {"variance/mine": "holds"}

    class Small(type(registry.compressor("topk"))):
        """Decodes to the wrong places."""

        def decode(self, payload, segments, shared):
            return super().decode(payload, segments, shared).roll(1)

    class Shrunk(type(registry.compressor("qsgd"))):
        def decode(self, payload, segments, shared):
            return super().decode(payload, segments, shared) * 0.9

    assert codec_rows(watched, Small()) == {"contraction/mine": "fails"}
    assert codec_rows(watched, Shrunk(norm="2", levels=64))["variance/mine"] == "fails"


# ---- the command ---------------------------------------------------------------------------------


@pytest.fixture
def only_small(monkeypatch):
    """Bowls with few copies and runs, so that the command is quick."""
    monkeypatch.setattr(quadratics, "COPIES", 8)


def test_the_command_prints_rows_saves_them_and_draws(tmp_path, only_small) -> None:
    words = ("bounds", "--results", tmp_path, *QUICK, "--methods", "topk,qsgd")
    words += ("--claims", "[!dp]*", "--plot", tmp_path / "p.svg")
    found = invoke(*words, "--json").json
    rows = found["tables"][0]["rows"]
    names = {row["claim"] for row in rows}
    assert {"terngrad/layer-wise", "signsgd/densities", "fft/alpha", "contraction/topk"} <= names
    assert {"signsgd/theorem-2b", "residual/topk", "variance-bound/qsgd"} <= names
    assert {row["place"] for row in rows} == {"gradients of digits", "bowls"}
    assert all(row["verdict"] in claims.VERDICTS and row["source"] for row in rows)
    assert all(row["verdict"] != "fails" for row in rows if row["kind"] == "theorem")
    absent = {row["claim"]: row for row in found["tables"][2]["rows"]}
    assert absent["variance/"]["which"] == "topk"
    assert "biased" in absent["variance/"]["why"]
    (folder,) = tmp_path.glob("bounds-*")
    assert {path.name for path in folder.iterdir()} >= {
        *("analysis.json", "claims.parquet", "clipping.json", "noise_bins.parquet", "bounds.png")
    }
    bins = json.loads((folder / "noise_bins.json").read_text())
    first = [row for row in bins if (row["weight"], row["seed"], row["step"]) == (
        bins[0]["weight"], bins[0]["seed"], bins[0]["step"])]  # fmt: skip
    assert sum(row["count"] for row in first) == 16
    svg = (tmp_path / "p.svg").read_text()
    assert "measured / bound" in svg
    again = invoke(*words)
    assert again.code == 0
    assert "is finished" in again.err
    for said in ("Verdicts: bowls", "theorem 2b", "Not applicable", "Clipping at 2.5 sigma"):
        assert said in again.out


def test_an_interrupted_analysis_goes_on(tmp_path, only_small, monkeypatch) -> None:
    words = ("bounds", "--results", tmp_path, *QUICK, "--methods", "topk", "--claims")
    words += ("*/theorem-[12]*",)
    whole = invoke(*words, "--json", "--force").json
    runs = []
    own = quadratics.sign_theorem

    def stopping(*args, **kwargs):
        runs.append(args[1:])
        if len(runs) == 3:
            raise KeyboardInterrupt
        return own(*args, **kwargs)

    monkeypatch.setattr(quadratics, "sign_theorem", stopping)
    assert invoke(*words, "--force").code == 130
    (folder,) = tmp_path.glob("bounds-*")
    assert len((folder / measuring.LEDGER).read_text().splitlines()) == 2
    (folder / measuring.HEAD).unlink()
    resumed = invoke(*words, "--json").json
    assert len(runs) == 3 + len(quadratic_claims.SIGN_RUNS) - 2
    assert resumed["tables"][0]["rows"] == whole["tables"][0]["rows"]


def test_strict_counts_theorems_alone(tmp_path, monkeypatch) -> None:
    words = ("bounds", "--results", tmp_path, "--quadratic-only", "--strict", "--claims")
    monkeypatch.setattr(quadratic_claims, "SLOPE", 0.0)
    monkeypatch.setattr(quadratics, "COPIES", 4)
    done = invoke(*words, "terngrad/slope")
    assert done.code == 0
    assert "fails" in done.out or "undecided" in done.out
    monkeypatch.setattr(
        quadratics, "sign_theorem", lambda *a, **k: (interval([9.0, 9.1], "copies"), 1.0)
    )
    done = invoke(*words, "signsgd/theorem-1")
    assert done.code == 1
    assert "a theorem's bound is violated" in done.err
    assert "fails on bowls" in done.out


def test_wrong_flags_say_what_is_allowed(tmp_path) -> None:
    for words, said in (
        (("--claims", "sginsgd/*"), "unknown claim"),
        (("--seed", "a"), "numbers with commas"),
        (("--seed", "1,1"), "different numbers"),
        (("--methods", "topc"), "Did you mean 'topk'"),
        (("--task", "digit"), "Did you mean 'digits'"),
        (("--lr", "-1"), "greater than 0"),
        (("--plot", "x.gif"), "the ending says the format"),
        (("--workers", "3"), "does not divide"),
        (("--weights", "nothing[0]", "--claims", "signsgd/*"), "unknown tensor"),
    ):
        done = invoke("bounds", "--results", tmp_path, *words)
        assert done.code == 2, words
        assert said in done.err, done.err


def test_a_gradient_that_is_not_finite_stops_with_its_layer(tmp_path) -> None:
    done = invoke("bounds", "--results", tmp_path, *QUICK, "--lr", 1e30, "--claims", "terngrad/*")
    assert done.code == 1
    assert "non-finite gradient in layer" in done.err


def test_payload_types_are_what_codecs_send() -> None:
    """The helper that passes a gradient agrees with the engine's own exchange of one worker."""
    method, x = registry.compressor("terngrad"), torch.linspace(-1, 1, 50)
    segments = Segments.of([(50,)])
    key = Key(0, 3, 0)
    payload = method.encode(x, segments, alone.agreed(method, x, segments, key), key)
    assert isinstance(payload, Payload)
    lane = alone.lane_of(method, segments)
    whole = alone.single(0, torch.device("cpu"), lane).mean([x], 3)
    assert torch.equal(alone.passed(method, x, segments, key), whole)
