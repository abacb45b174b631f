"""`gcbench bounds`: the rule of verdicts, what theorems predict, the command.

Wrong methods, and what catches them, are in test_bounds_mutants.py.

Statistical tests have fixed seeds; each says with what probability a right code would fail it.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from commands import ROOT, invoke
from gcbench.compressors.memories.none import NoMemory
from gcbench.compressors.memories.residual import Residual

from gcbench.checks import bounds
from gcbench.checks.bounds import (
    audit,
    claims,
    codec_claims,
    gradient_claims,
    observe,
    quadratic_claims,
    quadratics,
    training,
)
from gcbench.checks.bounds.claims import Claim, judge
from gcbench.core import codec, registry
from gcbench.core.claims import Claims
from gcbench.core.clock import Clock
from gcbench.core.compressor import Compressor, Context, Segments
from gcbench.core.world import Link, SimulatedWorld
from gcbench.report import analysis as measuring
from gcbench.stats.confidence import Interval, always, interval
from gcbench.training.train import Options

QUICK = ("--steps", 20, "--every", 5, "--snapshots", 2, "--batches", 16, "--seed", "0,1,2")

# ---- verdicts ------------------------------------------------------------------------------------


def test_the_rule() -> None:
    result = interval([1.0, 2.0, 3.0], "seeds")  # 2 +- 2.48
    assert judge(result, 5.0) == "holds"
    assert judge(result, 3.0) == "undecided"
    assert judge(result, 1.5) == "undecided"  # the mean is beyond, the interval is not
    assert judge(result._replace(low=1.5), 1.0) == "fails"
    assert judge(always(1 + 1e-7, 9), 1.0) == "holds"
    assert judge(always(1 + 1e-5, 9), 1.0) == "fails"
    assert judge(result._replace(mean=math.nan), 5.0) == "fails"
    assert judge(interval([1.0], "seeds"), 5.0) == "undecided"
    # A bound that is attained: the interval may reach beyond by 2 % of it, and no more.
    near = result._replace(mean=1.0, low=0.985, high=1.015)
    assert judge(near, 1.0) == "holds"
    assert judge(near._replace(high=1.03), 1.0) == "undecided"
    assert result.distance(2.0)[:2] == (0.0, 0.0)
    away = result._replace(low=1.0, high=3.0).distance(4.0)
    assert (away.mean, away.low, away.high) == (2.0, 1.0, 3.0)


def test_an_equality_fails_by_a_deviation_and_holds_if_none_was_missed() -> None:
    """The bound is the deviation that must not be missed."""
    seen = Interval(0.03, 0.0, 0.07, 9, "steps")  # +-.04, 0 included
    assert judge(seen, 0.05, equality=True) == "holds"
    assert judge(seen, 0.03, equality=True) == "undecided"
    assert judge(seen._replace(low=0.001), 0.05, equality=True) == "fails"


def row(kind: str, result, bound: float, **more):
    return claims.row(Claim("a/b", "s", "t", kind, **more), "here", "", result, bound, "", "me")


def test_slack_is_a_column_and_theorems_hold_loosely_above_ten() -> None:
    assert row("theorem", always(0.5, 3), 1.0)["slack"] == 2.0
    assert row("theorem", always(0.2, 3), 1.0)["verdict"] == "holds"
    assert row("theorem", always(0.09, 3), 1.0)["verdict"] == "holds, loosely"
    assert row("assumption", always(0.09, 3), 1.0)["verdict"] == "holds"
    exact = row("theorem", Interval(0.001, 0.0, 0.01, 3, "x"), 0.05, equality=True)
    assert (exact["verdict"], exact["slack"], exact["ran"]) == ("holds", None, "me")
    lost = row("theorem", always(math.nan, 3), 1.0)
    assert (lost["verdict"], lost["measured"], lost["why"]) == ("fails", None, "not finite")


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
        original = observe.Watch.start

        def start(self, trainer):
            original(self, trainer)
            seen.append(self)

        monkeypatch.setattr(observe.Watch, "start", start)
        expected = {"steps": 12, "every": 4, "snapshots": 2, "batches": 16, "seeds": (0,)}
        settings = bounds.make(**{**expected, **changes})
        record = bounds._train(settings, 0, Path(), None, lambda step: None)
        return record, seen[0]

    return make


def test_normal_gradients_show_the_papers_clipping(watched) -> None:
    """-1.13 % and 2.75 degrees at n = 1e6; R 1.985 clipped, all over ||g||^2 of the unclipped."""
    _, watch = watched(claims="terngrad/*", steps=1, every=1)
    watch.segments = Segments.of([(1000, 1000)])
    x = torch.randn(10**6, generator=torch.Generator().manual_seed(0))
    result = watch._ternary(x)
    assert result["length"] == [pytest.approx(0.0113, abs=0.001)]
    assert result["angle"] == [pytest.approx(2.75, abs=0.1)]
    assert result["clip"] / result["square"] == pytest.approx(gradient_claims.GAUSSIAN, rel=0.01)
    assert result["layer"] == pytest.approx(result["whole"])
    assert result["square"] == pytest.approx(float(x.double().square().sum()))


def test_every_fourth_step_is_seen_and_json_holds_it(watched) -> None:
    record, _ = watched()
    assert [one["step"] for one in record["observations"]] == [0, 4, 8]
    assert [one["step"] for one in record["snapshots"]] == [0, 11]
    assert all(one["worst_layer"] <= 1 and one["worst_clip"] <= 1 for one in record["observations"])
    assert json.loads(json.dumps(record, allow_nan=False)) == record


def test_watching_changes_nothing(watched, simulated, tmp_path) -> None:
    from gcbench.training.store import Run
    from gcbench.training.train import Trainer

    _, watch = watched()
    alone = Trainer(bounds.Settings(steps=12).config(0), simulated(4), Run(tmp_path), Options())
    for _ in range(12):
        alone.train_step()
    assert alone.parameter_hash() == watch.trainer.parameter_hash()


def test_drawn_gradients_are_unbiased_with_the_noise_of_a_workers_batch(watched) -> None:
    """The noise of one example is 1 a coordinate, that of a worker's 8 examples 1/8.

    256 coordinates, 100 batches: the mean variance has a relative sd of 0.88 %, so it is off by 5 %
    with probability 1e-8.
    """
    record, watch = watched(task="quadratic", steps=1, snapshots=1, batches=100)
    one = record["snapshots"][0]
    assert one["sigma_l2"] ** 2 / 256 == pytest.approx(1 / 8, rel=0.05)
    model = watch.trainer.model  # the start is +-1 from the minimum
    assert one["gradient_l2"] == pytest.approx(float(model.curvature.norm()), rel=0.02)
    assert one["density_noise"] == pytest.approx(1.0, abs=0.01)
    assert one["noise_share"] == pytest.approx(one["sigma_l2"] ** 2 / 100 / one["gradient_l2"] ** 2)


# ---- what is predicted ---------------------------------------------------------------------------


def test_the_skewed_noise_is_of_mean_0_and_variance_1() -> None:
    """1e6 draws: mean within 5 sd of 0; variance within 1 %; skewness 8/3 over sqrt of batch."""
    x = quadratics.skewed(4)(torch.Generator().manual_seed(0), (10**6,))
    assert abs(float(x.mean())) < 5e-3
    assert float(x.var()) == pytest.approx(1, abs=0.01)
    assert float((x**3).mean()) == pytest.approx(8 / 3 / 2, rel=0.05)


def test_the_chain_is_the_floor_of_signs_and_more_workers_lower_it() -> None:
    """By hand without noise, and against 40,000 plain walks: off by 5 sd with P = 6e-7."""
    torch.manual_seed(0)
    n, w = 40_000, torch.full((40_000,), quadratics.FLOOR_START)
    total = torch.zeros(n)
    for _ in range(quadratics.FLOOR_STEPS):
        votes = torch.sign(w + quadratics.FLOOR_NOISE * torch.randn(3, n)).sum(0).sign()
        w = w - quadratics.FLOOR_STEP * votes
        total += w.abs() / quadratics.FLOOR_STEPS
    assert quadratics.sign_chain(3) == pytest.approx(
        float(total.mean()), abs=5 * float(total.std()) / math.sqrt(n)
    )
    assert quadratics.sign_chain(7) < 0.7 * quadratics.sign_chain(1)


def test_a_vote_fails_as_the_binomial_says() -> None:
    q = scipy.stats.norm.sf(0.5)
    assert codec_claims.failing(0.5, 1) == pytest.approx(q)
    assert codec_claims.failing(0.5, 7) == pytest.approx(scipy.stats.binom.sf(3, 7, q))


def test_bounds_of_the_sign_by_hand() -> None:
    """64 curvatures of 1: sqrt(64) (32 + 1/2) = 260; 2 sigma d = 256, over sqrt 7 for 7 workers."""
    one, seven = (quadratics.Signs(m, 1.0, 400, 2.0) for m in (1, 7))
    assert quadratics.sign_bound(one) == pytest.approx((260 + 256) ** 2 / 400)
    assert quadratics.sign_bound(seven) == pytest.approx((260 + 256 / math.sqrt(7)) ** 2 / 400)


def test_bounds_of_error_feedback_by_hand() -> None:
    """delta = 3/4: sqrt(1 - delta) = 1/2, so the series is 1, and below the paper's constant."""
    (lr, steps), d = quadratics.feedback_plan(0.75), 4
    curvature = [1.5 ** (-i / 3) for i in range(d)]
    second = sum(c**2 for c in curvature) + d * 0.3**2
    descent, residual = quadratics.feedback_bounds((2, 2), 0.75)
    assert residual == pytest.approx(lr**2 * second)
    assert descent == pytest.approx(sum(curvature) / (lr * steps) + lr * second + lr**2 * second)
    for delta in (0.01, 0.25, 0.75, 0.99):
        root = math.sqrt(1 - delta)
        assert (root / (1 - root)) ** 2 <= 4 * (1 - delta) / delta**2


def test_bounds_of_a_descent_without_feedback_by_hand() -> None:
    """Without noise and with the whole step: 2 (f_0 - f*) / (delta T)."""
    plan = quadratics.biased_plan((2, 2), 0.25, 1, 0.0)
    assert plan.rates[0] == 1.0
    assert plan.bound() == pytest.approx(2 * plan.gap / (0.25 * len(plan.rates)), rel=1e-6)
    noisy = quadratics.Biased(4, 0.5, (0.5,), (0.1,), 4)
    weights, total = noisy.weighted()
    assert weights == [pytest.approx(2 * 0.1 * 0.5 - 0.01 * 2.25)]
    s2 = 0.25 * 4
    assert total == pytest.approx(2 * noisy.gap + 0.1 * 0.5 * s2 + 0.01 * 1.5 * 0.75 * s2)


def test_the_declared_law_has_the_declared_moments() -> None:
    """One step of size 1 from 0 by noise-free gradients: mean and variance of what was declared.

    32 copies x 64 elements of variance v: their mean square is off by 5 sd with P = 6e-7.
    """
    method = registry.compressor("terngrad", clip=0.0)
    problem = quadratics.Quadratic(method, (8, 8), condition=1.5, noise=0.0)
    x = problem.observed()[0]
    variance = method.claims.variance(
        x, Context(problem.segments, codec.prepare(method, x, Context(problem.segments)).statistic)
    )
    before = problem.w.clone()
    problem.declared_step([x], 1.0)
    away = (before - problem.w).view(-1) - x.double()
    ratio = away.square() / variance.clamp(min=1e-12)
    ratio = ratio[variance > 1e-9]
    assert float(ratio.mean()) == pytest.approx(1, abs=5 * math.sqrt(2 / len(ratio)))


@pytest.mark.parametrize("of", ["delta", "omega"])
def test_constants_are_declared_where_their_property_is(of: str) -> None:
    """What has a delta contracts, what has an omega is unbiased, and both are possible numbers."""
    tried = 0
    for word, method in bounds.make().chosen().items():
        for size in quadratics.SHAPES:
            value = getattr(method.claims, of)(quadratics.segments_of(method, size))
            if value is None:
                continue
            tried += 1
            assert method.claims.contractive if of == "delta" else method.claims.unbiased, word
            assert 0 < value <= 1 if of == "delta" else value >= 0, word
            if of == "omega":  # it is about x itself
                segments = quadratics.segments_of(method, size)
                x = torch.randn(segments.numel, generator=torch.Generator().manual_seed(0))
                shared = codec.prepare(method, x, Context(segments)).statistic
                assert torch.equal(method.claims.target(x, Context(segments, shared)), x), word
    assert tried > 10


def test_signs_imply_a_vote() -> None:
    methods = [
        registry.compressor("signsgd", **more) for more in ({}, {"abstain": 0.5}, {"quorum": 2})
    ]
    assert [method.claims.signs for method in methods] == [True, False, False]
    assert all(method.claims.aggregate == "vote" for method in methods if method.claims.signs)


# ---- audits --------------------------------------------------------------------------------------


def audited(method, gradients, carried=None):
    """Return the record of exchanges of the workers' gradients, a list a step, of one tensor."""
    carried = carried or NoMemory()
    segments = Segments.of([(len(gradients[0][0]),)], method.granularity)
    lane = audit.lane_of(method, segments, carried)
    world = SimulatedWorld(len(gradients[0]), torch.device("cpu"), Link(10.0, 50.0), 1, 1)
    exchange = audit.Audited(world, lane, 0, Clock(world.device))
    for step, xs in enumerate(gradients):
        exchange.mean([torch.tensor(x) for x in xs], step, lr=1.0 / (1 + step))
    return exchange.audit.record()


def test_an_audit_of_error_feedback_by_hand() -> None:
    """The two largest of four are sent; the second step has half the learning rate."""
    x = [4.0, 3.0, 2.0, 1.0]
    result = audited(registry.compressor("topk", ratio=0.5), [[x], [x]], Residual())
    # Left 2, 1 of 30; then 4, 3, 2 + 4, 1 + 2 are offered, and 3, 3 left of 70; delta is 1/2.
    assert result["lost"] == [pytest.approx(5 / 30), pytest.approx(18 / 70)]
    assert result["by_delta"] == [pytest.approx(2 * 5 / 30), pytest.approx(2 * 18 / 70)]
    limits = math.sqrt(0.5 * 30), math.sqrt(0.5) * (2 * math.sqrt(0.5 * 30) + math.sqrt(30))
    share = max(math.sqrt(5) / limits[0], math.sqrt(18) / limits[1])
    assert result["residual"] == pytest.approx(share)
    assert result["identity"] < 1e-7


def test_an_audit_counts_signs_where_they_are_declared() -> None:
    """Zeros are left out, and ties that a coin decides: the last of four elements is tied."""
    xs = [[1.0, -2.0, 0.0, 3.0], [2.0, -1.0, 1.0, -3.0]]
    for ties, sure in (("plus", 3), ("coin", 2)):
        result = audited(registry.compressor("signsgd", ties=ties), [xs])
        assert (result["checked"], result["wrong"]) == (sure, 0)


def test_an_audit_of_an_aggregate_that_is_no_mean() -> None:
    """DeMo's update is the sign of what the workers sent; zeros at the ends are not signs."""
    xs = [[[1.0, 2.0, 3.0, 4.0], [3.0, -1.0, 2.0, 0.5]]]
    result = audited(registry.compressor("demo", topk=2), xs, Residual(0.999))
    assert (result["compared"], result["unlike"]) == (4, 0)


def test_an_audit_of_an_unbiased_code_by_hand() -> None:
    """Scale 2, one worker: the variance of t is |t| (2 - |t|), 0 + 1 + .75 in all."""
    result = audited(registry.compressor("terngrad", clip=0.0), [[[2.0, -1.0, 0.5]]])
    assert result["spread"]["declared"] == pytest.approx(1.75)
    assert result["bias"]["scale"][:2] == [pytest.approx(5.25), pytest.approx(3.5)]
    assert result["bias"]["variance"][1] == pytest.approx(1.75)
    jumps = (2.0, 1.0 + 1.0, 0.5 + 0.75 / 0.5)  # the two levels are 0 and 2
    assert result["spread"]["largest"] == pytest.approx(max(jumps) ** 2)
    assert result["spread"]["variance"] == pytest.approx(jumps[1] ** 2 * 1 + jumps[2] ** 2 * 0.75)


def test_audits_of_seeds_are_added() -> None:
    method = registry.compressor("terngrad", clip=0.0)
    one, two = (audited(method, [[[x, -1.0, 0.5]]]) for x in (2.0, 3.0))
    both = audit.merged([one, two])
    assert both["steps"] == 2
    assert both["spread"]["declared"] == one["spread"]["declared"] + two["spread"]["declared"]
    assert both["spread"]["largest"] == max(one["spread"]["largest"], two["spread"]["largest"])
    assert [len(each) for each in both["bias"]["each"]] == [2, 2, 2]
    assert (both["workers"], both["random"]) == (1, True)


def test_compressed_training_is_that_of_gcbench_run(tmp_path, simulated) -> None:
    """The audit changes nothing: losses and parameters are those of the plain trainer."""
    from gcbench.training.store import Run
    from gcbench.training.train import Trainer

    method, base = registry.compressor("topk"), bounds.Settings(steps=5).config(0)
    record = training.train(base, "topk", method, 5, tmp_path, None, lambda step: None)
    assert (record["steps"], record["workers"]) == (5, 4)
    config = training.config_of(base, "topk", method, 5)
    assert (config.memory, config.collective, config.lr) == ("residual", "allgather", base.lr)
    trainer = Trainer(config, simulated(4), Run(tmp_path), Options())
    lost = []
    for _ in range(5):
        before = trainer.exchange.workers[0][0]["residual"].clone()
        assert before is not None
        trainer.train_step()
        lost.append(float(trainer.exchange.workers[0][0]["residual"].norm()))
    assert lost[-1] > 0
    assert len(record["lost"]) == 5


# ---- the command ---------------------------------------------------------------------------------


@pytest.fixture
def only_small(monkeypatch):
    """Few copies, calls and votes, so that the command is quick."""
    monkeypatch.setattr(codec_claims, "MOST", 100)
    monkeypatch.setattr(quadratics, "ELEMENTS", 256)
    monkeypatch.setattr(quadratics, "PLATEAU_ELEMENTS", 256)
    monkeypatch.setattr(codec_claims, "VOTES", 5_000)


def test_the_command_prints_rows_saves_them_and_draws(tmp_path, only_small) -> None:
    words = ("bounds", "--results", tmp_path, *QUICK, "--methods", "topk,qsgd")
    words += ("--claims", "[!bdfpr]*", "--plot", tmp_path / "p.svg")
    result = invoke(*words, "--json").json
    ran, alone_, *_ = (table["rows"] for table in result["tables"])
    names = {row["claim"] for row in ran}
    assert {"contraction/topk", "identity/topk", "unbiased/qsgd", "variance-bound/qsgd"} <= names
    assert {row["claim"] for row in alone_} >= {"terngrad/layer-wise", "signsgd/densities"}
    assert {row["place"] for row in ran} == {"training of digits", "known inputs"}
    assert {row["ran"] for row in ran} == {"topk", "qsgd"}
    assert {row["place"] for row in alone_} == {"gradients of digits, 20 steps by none"}
    assert not any(row["ran"] or row["kind"] == "theorem" for row in alone_)
    (trained,) = (
        row for row in ran if row["claim"] == "identity/topk" and row["place"].startswith("train")
    )
    assert trained["setting"] == "60 steps, M=4"
    assert all(row["verdict"] in claims.VERDICTS and row["source"] for row in ran + alone_)
    assert all(row["verdict"] != "fails" for row in ran)
    absent = {(row["claim"], row["which"]): row for row in result["tables"][3]["rows"]}
    assert "claim to be unbiased" in absent["variance/", "topk"]["why"]
    (folder,) = tmp_path.glob("bounds-*")
    assert {path.name for path in folder.iterdir()} >= {
        *("analysis.json", "claims.parquet", "clipping.json", "geometry.parquet", "bounds.png")
    }
    svg = (tmp_path / "p.svg").read_text()
    assert "measured / bound" in svg
    again = invoke(*words, "--details")
    assert again.code == 0
    assert "is finished" in again.err
    messages = ("Verdicts on compressors: known inputs", "Properties of gradients", "slack")
    for text in (*messages, "Not applicable", "Clipping at 2.5 sigma", "could not be decided"):
        assert text in again.out


def test_rows_of_a_claim_share_a_line_where_there_are_many(monkeypatch, tmp_path) -> None:
    """302 lines made a picture of 4,560 x 5,280 pixels. Each row is drawn once all the same."""
    path = ROOT / "results/bounds-cifarnet.json"
    analysis = measuring.parse(json.loads(path.read_text()), path)
    rows = [*analysis.table("claims").rows, *analysis.table("gradients").rows]
    drawn = []
    monkeypatch.setattr(bounds.figures, "save", lambda figure, _: drawn.append(figure))

    bounds.draw(analysis, tmp_path / "x.png")
    labels = [[tick.get_text() for tick in axes.get_yticklabels()] for axes in drawn[0].axes]
    assert all(len(of) <= bounds.MANY for of in labels)
    assert sum(int(label.rpartition("(")[2].rstrip(")")) for of in labels for label in of) == len(
        rows
    )
    marks = [
        line.get_xdata()[0]
        for axes in drawn[0].axes
        for line in axes.get_lines()
        if line.get_marker() != "None"
    ]
    assert len(marks) == len(rows)
    assert sum(ratio > 1 for ratio in marks) >= sum(row["verdict"] == "fails" for row in rows) > 0

    analysis.table("claims").rows[:] = few = analysis.table("claims").rows[:5]
    bounds.draw(analysis, tmp_path / "x.png")
    first = [tick.get_text() for tick in drawn[1].axes[0].get_yticklabels()]
    assert [label.partition(",")[0] for label in first] == [row["claim"] for row in few]


SIGNS = """
from dataclasses import dataclass

from gcbench.compressors.signsgd import SignSGD


@dataclass(frozen=True)
class Mine(SignSGD):
    def encode(self, x, ctx):
        return super().encode({sign}x, ctx)
"""


def test_a_file_is_judged_by_the_code_that_it_has_now(tmp_path, only_small, forget) -> None:
    """In all three parts; a verdict on the code before an edit does not outlive it."""
    path = tmp_path / "mine.py"
    quick = ("--steps", 6, "--compressed-steps", 6, "--batches", 8, "--snapshots", 1, "--seed", 0)
    words = ("bounds", "--results", tmp_path, *quick, "--methods", "topk", "--compressor", path)
    words += ("--claims", "sign*/mine", "--strict", "--json")
    result = {}
    for sign in ("-", ""):
        path.write_text(SIGNS.format(sign=sign))
        forget()
        done = invoke(*words)
        result[sign] = json.loads(done.out)["tables"][0]["rows"]
        assert done.code == (1 if sign else 0), done.err
        assert "is finished" not in done.err
    places = {"training of digits", "known inputs", "quadratics"}
    assert {row["place"] for row in result["-"] if row["verdict"] == "fails"} == places
    assert {row["place"] for row in result[""] if row["verdict"].startswith("holds")} == places
    assert "is finished" in invoke(*words).err


class WholeModel(Compressor):
    """Right, no dataclass, and one segment spans all tensors."""

    granularity = "model"

    def encode(self, x, ctx):
        return x.clone()

    def decode(self, payload, ctx):
        return payload.parts[0].clone()


class WholeModelClaims(Claims, of=WholeModel):
    unbiased = True

    def variance(self, x, ctx):
        return torch.zeros_like(x).double()


def test_a_class_that_is_no_dataclass_is_not_at_fault() -> None:
    """Copies cannot be kept apart, so these claims do not apply."""
    units = quadratic_claims.units({"whole": WholeModel()}, (0,))
    rows, absent = [], []
    for unit in units:
        record = bounds._verdicts_of(unit, bounds.Settings()).record()
        rows += record["rows"]
        absent += record["absent"]
    assert not rows
    assert ["plateau", "quadratics", "one segment spans all copies", ["whole"]] in absent


def test_conclusions_count_undecided_and_loose_rows() -> None:
    rows = [
        row("theorem", always(0.5, 3), 1.0),
        row("theorem", always(0.01, 3), 1.0),
        row("theorem", Interval(0.9, 0.0, 2.0, 3, "x"), 1.0),
        row("observation", always(2.0, 3), 1.0),
    ]
    first, undecided, loose, fails, verify = bounds._conclusions(rows)
    assert first == (
        "3 theorem rows: 1 hold, 1 hold loosely, 1 undecided; 1 observation row: 1 fail."
    )
    assert undecided.startswith("1 theorem row could not be decided")
    assert undecided.endswith("a (b).")
    assert loose.startswith("1 theorem row held with a slack above 10")
    assert "gcbench verify" in verify
    assert fails.startswith("a/b, observation, fails on here: 2.00 against 1.00")


@pytest.mark.parametrize("network", ["cifarnet", "resnet20"])
def test_what_the_committed_analyses_say_follows_from_their_rows(network: str) -> None:
    path = Path(__file__).parents[2] / "results" / f"bounds-{network}.json"
    analysis = measuring.parse(json.loads(path.read_text()), path)
    rows = [*analysis.table("claims").rows, *analysis.table("gradients").rows]
    assert analysis.conclusions == bounds._conclusions(rows)
    assert {row["verdict"] for row in rows if row["kind"] == "theorem"} <= {
        "holds",
        "holds, loosely",
        "undecided",
    }


def test_flags_of_a_training_are_refused_where_nothing_is_trained(tmp_path) -> None:
    words = ("bounds", "--quadratic-only", "--methods", "topk", "--claims", "identity*")
    for more in (("--steps", 20), ("--task", "mnist"), ("--batches", 8)):
        done = invoke(*words, "--results", tmp_path, *more)
        assert (done.code, more[0] in done.err, list(tmp_path.iterdir())) == (2, True, []), done


def test_an_interrupted_analysis_goes_on(tmp_path, only_small, monkeypatch) -> None:
    words = ("bounds", "--results", tmp_path, "--seed", "0,1", "--quadratic-only")
    words += ("--methods", "signsgd", "--claims", "s*")
    monkeypatch.setattr(quadratics, "FLOOR_STEPS", 10)
    runs_of = quadratic_claims.SIGN_RUNS.items()
    short = {which: tuple(replace(run, k=10) for run in each) for which, each in runs_of}
    monkeypatch.setattr(quadratic_claims, "SIGN_RUNS", short)
    whole = invoke(*words, "--json", "--force").json
    runs = []
    sign_descent = quadratics.sign_descent

    def stopping(*args, **kwargs):
        runs.append(args[1:])
        if len(runs) == 3:
            raise KeyboardInterrupt
        return sign_descent(*args, **kwargs)

    monkeypatch.setattr(quadratics, "sign_descent", stopping)
    assert invoke(*words, "--force").code == 130
    (folder,) = tmp_path.glob("bounds-*")
    done = [
        json.loads(line)["key"] for line in (folder / measuring.LEDGER).read_text().splitlines()
    ]
    assert "inputs signsgd M=4" in done
    assert "signs signsgd" not in done
    (folder / measuring.HEAD).unlink()
    monkeypatch.setattr(codec_claims, "exchange", None)  # what is done is not done again
    resumed = invoke(*words, "--json").json
    assert resumed["tables"][0]["rows"] == whole["tables"][0]["rows"]


def test_what_trains_is_judged_even_if_other_methods_are_named() -> None:
    chosen = bounds.make(compressor="topk:ratio=0.05", methods="none").chosen()
    assert [*chosen] == ["none", "topk:ratio=0.05"]
    assert [*bounds.make(methods="none").chosen()] == ["none"]


def test_strict_counts_theorems_alone(tmp_path, monkeypatch) -> None:
    words = ("bounds", "--results", tmp_path, *QUICK, "--strict", "--methods", "none", "--claims")
    monkeypatch.setattr(gradient_claims, "CLIP_LENGTH", 0.0)
    done = invoke(*words, "terngrad/clip-length")
    assert done.code == 0
    assert "fails" in done.out
    monkeypatch.setattr(codec_claims, "ROUNDING", -1.0)
    done = invoke(*words, "variance/none")
    assert done.code == 0
    monkeypatch.setattr(quadratics, "rate", lambda *args: [[9.0, 9.1] * 40])
    done = invoke(*words, "rate/none", "--details")
    assert done.code == 1
    assert "a theorem's bound is violated" in done.err
    assert "fails on quadratics" in done.out


def test_wrong_flags_say_what_is_allowed(tmp_path) -> None:
    for words, messages in (
        (("--claims", "sginsgd/*"), "unknown claim"),
        (("--seed", "a"), "numbers with commas"),
        (("--seed", "1,1"), "different numbers"),
        (("--methods", "topc"), "Did you mean 'topk'"),
        (("--task", "digit"), "Did you mean 'digits'"),
        (("--lr", "-1"), "greater than 0"),
        (("--plot", "x.gif"), ".png"),
        (("--workers", "3"), "does not divide"),
    ):
        done = invoke("bounds", "--results", tmp_path, *words)
        assert done.code == 2, words
        assert messages in done.err, done.err


def test_a_gradient_that_is_not_finite_stops_with_its_layer(tmp_path) -> None:
    done = invoke("bounds", "--results", tmp_path, *QUICK, "--lr", 1e30, "--claims", "terngrad/*")
    assert done.code == 1
    assert "non-finite gradient in layer" in done.err
