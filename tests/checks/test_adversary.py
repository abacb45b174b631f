"""The search refuses methods that are wrong on some inputs only, and no right one."""

from __future__ import annotations

import itertools

import broken
import numpy
import pytest
import torch
import unusual
from wrong_methods import Levels, TwoShotLevels

from gcbench.checks import adversary, cases, inputs, oracle, verify
from gcbench.checks.adversary import Search
from gcbench.checks.calls import Calls
from gcbench.checks.cases import Case, pairwise
from gcbench.checks.trial import attempt
from gcbench.core import registry

BROKEN = [(kind, cls) for kind, several in broken.KINDS.items() for cls in several]


@pytest.mark.parametrize(("kind", "cls"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_method_is_refused(kind, cls):
    """With the function and the input; an exception would be no finding of the search."""
    errors = numpy.geterr()
    try:
        (finding,) = Search(cls(), EFFORTS.get(cls, cases.QUICK), shrink=0).run()
    finally:
        torch.set_flush_denormal(False)
        numpy.seterr(**errors)
    assert finding.function
    assert "Error" not in finding.fault
    assert finding.case


SHORT = cases.Effort(every=12, long=0, many=0, million=0, steps=1, thin=40)
FEW = SHORT._replace(every=200)
EFFORTS = {
    broken.VeryLongMean: FEW._replace(million=1),
    broken.FarHalf: FEW._replace(far=1),
    broken.SixteenWorkers: FEW._replace(thin=4),
    broken.DecodedSteps: FEW._replace(steps=260, thin=1),
    broken.Flushing1327: FEW._replace(steps=2048, thin=1),
    **{
        cls: FEW
        for cls in (
            *(broken.NanScales, broken.NanMean, broken.LastSegments, broken.LostPlace),
            *(broken.PlanByNumber, broken.DrawsByStep, broken.PlanByEnds, broken.InfiniteSum),
            *(
                broken.SeedsNumpy,
                broken.FlushesDenormals,
                broken.PlanByPlace,
                broken.NanFeedback,
                broken.GenerousDelta,
            ),
            *(broken.ReusedDecode, broken.ReusedMean, broken.CachedZeros),
            *(broken.TwoRows, broken.SilencesErrors),
        )
    },
    **{
        cls: FEW._replace(long=1)
        for cls in (
            *(broken.LongMean, broken.LongOut, broken.LongFeedback, broken.CrowdedMean),
            *(broken.CrowdedVote, broken.CrowdedSum, broken.CrowdedShards),
            *(broken.LongLastOfOne, broken.LongZeroGradient, broken.LongNan, broken.LongPlan),
            broken.LateEntries,
        )
    },
    broken.CrowdedSegments: FEW._replace(many=2),
    broken.LongPeriod: FEW._replace(long=1, steps=16 * 60),
    **{
        cls: FEW._replace(steps=260, thin=1)
        for cls in (
            *(broken.PeriodicDecode, broken.PeriodicMean, broken.PeriodicSum, broken.CyclicDraws),
            *(broken.PeriodicResidual, broken.PeriodicRounds),
        )
    },
    broken.FifteenPayloads: FEW._replace(thin=4),
    **{
        cls: SHORT
        for cls in (
            *(broken.LocalRounds, broken.LocalResult, broken.NanRounds),
            *(broken.SummedRounds, broken.FlushingPrepare, broken.EverySecond, broken.LentState),
        )
    },
    broken.ShortTotals: FEW._replace(thin=1),
    broken.ThinMatrices: SHORT._replace(every=8),
    broken.NarrowPositions: SHORT._replace(long=1),
}
"""Where the default for tests takes more than a second: what the fault is about, and less else."""


@pytest.mark.parametrize(
    "method",
    [
        Levels(),
        TwoShotLevels(),
        *(cls() for cls in unusual.METHODS),
        *map(registry.compressor, ("qsgd", "terngrad", "topk", "powersgd")),
    ],
    ids=lambda method: type(method).__name__,
)
def test_a_right_method_is_not_refused(method):
    search = Search(method, cases.Effort(every=16, long=0, many=0, million=0, steps=20, thin=8))
    assert search.run() == []
    assert search.inputs > 40


@pytest.mark.parametrize(
    ("cls", "effort"),
    [
        (unusual.Sampled, FEW._replace(far=1, steps=60, thin=1)),
        (unusual.LongBlock, FEW._replace(long=1, far=1)),
        (unusual.UnscaledBlock, FEW._replace(long=1, far=1)),
    ],
)
def test_chance_in_large_inputs_is_no_fault(cls, effort):
    """A single draw sends nothing of many elements, all of which others send."""
    assert Search(cls(), effort).run() == []


@pytest.mark.parametrize("cls", unusual.METHODS)
def test_an_unusual_method_has_the_properties(cls):
    rows = verify.listed(cls())
    assert [row for row in rows if row.verdict == "fails"] == []


def test_zeros_may_arrive_as_noise_where_other_workers_set_the_range():
    calls = Calls(unusual.SharedDither())
    case = Case(((128,),), values="every third segment zero", seed=6)
    assert attempt(calls, oracle.profile(calls), case)[0] is None


def test_the_same_seed_searches_the_same_inputs():
    first, second = (Search(broken.Flushing(), cases.QUICK, seed=3) for _ in range(2))
    assert first.run() == second.run()
    assert first.inputs == second.inputs


def test_a_finding_is_reduced():
    """The input that is left fails, and has one short tensor and as few workers as that takes."""
    (finding,) = Search(broken.LastOfOne(), cases.QUICK).run()
    assert "1 worker(s)" in finding.case
    (finding,) = Search(broken.FirstScale(), cases.QUICK).run()
    assert "2 worker(s)" in finding.case


def test_every_pair_of_values_occurs():
    dimensions = {"a": range(5), "b": range(4), "c": range(3), "d": range(2)}
    rows = pairwise(dimensions, 1)
    for one, other in itertools.combinations(dimensions, 2):
        pairs = {(row[one], row[other]) for row in rows}
        assert pairs == set(itertools.product(dimensions[one], dimensions[other]))
    assert len(rows) < 30
    assert rows == pairwise(dimensions, 1)


def test_what_was_covered_is_reported():
    search = Search(
        registry.compressor("int8"), cases.Effort(every=20, long=1, many=1, million=1, steps=3)
    )
    assert search.run() == []
    mean = search.covered["mean"]
    assert mean.elements > 2**20
    assert mean.segments > 32_768
    assert mean.workers >= 401
    assert mean.low < -80
    assert mean.high > 80
    assert search.covered["encode"].step == 2**32 - 1
    assert "encode_feedback" not in search.covered


def test_further_inputs_of_many_tensors_are_left_out_where_the_first_takes_long(monkeypatch):
    effort = cases.Effort(every=40, long=1, many=3, million=0, steps=1, thin=40)
    quick = Search(registry.compressor("int8"), effort)
    assert quick.run() == []
    assert quick.left_out == 0
    monkeypatch.setattr(adversary, "PATIENCE", 0.0)
    slow = Search(registry.compressor("int8"), effort)
    assert slow.run() == []
    assert slow.left_out == sum(
        case.shapes is inputs.MANY and not case.light
        for case in cases.cases(slow.profile, effort, 0, slow.calls.method.claims.exact_for)
    )
    assert slow.left_out > 3
    assert slow.inputs < quick.inputs
    assert slow.covered["mean"].segments > 65_536


@pytest.mark.parametrize("family", inputs.EVERY_FAMILY)
def test_a_family_has_finite_values_of_any_segments(family):
    for shapes in (((0,),), ((1,),), inputs.MIXED):
        case = Case(shapes, values=family, workers=3)
        for x in case.gradients(case.segments(registry.compressor("none"))):
            assert x.dtype == torch.float32
            assert x.isfinite().all()
