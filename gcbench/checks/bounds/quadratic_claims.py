"""Claims about SGD on quadratics, judged by the descents of `quadratics`.

Which theorems judge a method follows from its declarations: `signs` (Bernstein et al. 2018),
`unbiased` with `omega` or `variance` (Wen et al. 2017), `contractive` with `delta` (Karimireddy et
al. 2019 with error feedback, Wang et al. 2020 without) and `with_error`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from gcbench.checks.bounds import quadratics
from gcbench.checks.bounds.audit import AGAIN, again
from gcbench.checks.bounds.claims import Claim, MethodVerdicts, Unit
from gcbench.checks.bounds.quadratics import Signs
from gcbench.core.compressor import Compressor
from gcbench.stats.confidence import STRICT, against, bounded, interval, magnitude

BERNSTEIN = "Bernstein et al. 2018"
KARIMIREDDY = "Karimireddy et al. 2019"
WANG = "Wang et al. 2020"
PLACE = "quadratics"
PLATEAU = 0.05
"""Relative deviation of a plateau, or of a noise floor, that the tests must be able to detect."""
MODEL = 0.01
"""Relative deviation of a plateau that is allowed because the declared noise is drawn as normal."""

SIGN_RUNS = {
    "1": (Signs(1, 1.0, 400, 2.0), Signs(1, 100.0, 100, 0.25)),
    "2a": (Signs(7, 100.0, 100, 0.25, symmetric=False),),
    "2b": (Signs(7, 1.0, 400, 2.0), Signs(7, 100.0, 100, 0.25)),
}
"""Runs by theorem; the noise is so large that signs of small gradients are often wrong."""
SIGN_STATEMENTS = {
    "1": "K steps of 1 / sqrt(||L||_1 K), batches of K: [E mean_k ||g_k||_1]^2 <= (1 / K) "
    "[sqrt(||L||_1) (f_0 - f* + 1/2) + 2 ||sigma||_1]^2",
    "2a": "the same for the majority vote of M workers, whatever the noise is (here skewed)",
    "2b": "vote of M workers, unimodal symmetric noise: 2 ||sigma||_1 / sqrt(M) in its place",
}
BIASED_RUNS = ((1, 0.0), (4, 0.05))
"""Number of workers, and standard deviation of the noise in each coordinate."""


SIGNS = {
    which: Claim(f"sign-theorem-{which}", statement, f"{BERNSTEIN}, theorem {which}")
    for which, statement in SIGN_STATEMENTS.items()
}
FLOOR = Claim(
    "sign-floor",
    "noise floor of a vote of M workers: mean |w_i| against the exact Markov chain's, relative",
    "derived: a vote's steps are +-eta with binomial probabilities",
    equality=True,
)
ENDS = Claim(
    "plateau",
    "constant step: E||w - w*||^2 against that of the declared target and variance, relative",
    "Wen et al. 2017, remarks on theorem 1; derived",
    equality=True,
)
RATE = Claim(
    "rate",
    "gamma_t = a / (t + t_0): E||w_t - w*||^2 / the bound u_t = O(1/t) that E||Q(g)||^2 <= A + "
    "B ||w - w*||^2 gives with the declared omega, at the worst t",
    "Wen et al. 2017, theorem 1",
)
DESCENT = Claim(
    "descent",
    "error feedback: mean E||grad f||^2 <= 2 (f_0 - f*) / (eta T) + eta L s^2 + eta^2 L^2 s^2 "
    "(1 - delta) / (1 - sqrt(1 - delta))^2",
    f"{KARIMIREDDY}, theorem II",
)
RESIDUAL_BOUND = Claim(
    "residual-bound",
    "error feedback: max_t E||eta e||^2 <= eta^2 s^2 (1 - delta) / (1 - sqrt(1 - delta))^2",
    f"{KARIMIREDDY}, lemma 3, its series summed",
)
BIASED_DESCENT = Claim(
    "biased-descent",
    "no feedback, error a = sqrt(1 - delta), N workers: mean E||grad f||^2 within the bound "
    "that is proved in gcbench.checks.bounds.quadratics; without noise 2 (f_0 - f*) / (eta "
    "(1 - a^2) T)",
    f"{WANG}, theorem 3.4, in a form that needs no assumption 3.2",
)
FALLING_ERROR = Claim(
    "falling-error",
    "eta_t = eta_0 / (1 + t / 50), a_t about sqrt(L eta_t), N = 4: the weighted mean of "
    "E||grad f||^2 keeps within its bound, which goes to 0",
    f"{WANG}, theorem 3.5, in a form that needs no assumption 3.2",
)
OF_METHODS = (
    *SIGNS.values(),
    FLOOR,
    ENDS,
    RATE,
    DESCENT,
    RESIDUAL_BOUND,
    BIASED_DESCENT,
    FALLING_ERROR,
)
"""What is claimed of every method: `Claim.of` names the method."""


def units(methods: Mapping[str, Compressor], seeds: Sequence[int]) -> Iterator[Unit]:
    """Yield all work on quadratics."""
    groups = (
        ("signs", (*SIGNS.values(), FLOOR), _signs),
        ("plateau", (ENDS,), _plateau),
        ("rate", (RATE,), _rate),
        ("feedback", (DESCENT, RESIDUAL_BOUND), _feedback),
        ("biased", (BIASED_DESCENT,), _biased),
        ("falling", (FALLING_ERROR,), _falling),
    )
    for word, method in methods.items():
        for name, claims, work in groups:
            yield Unit(f"{name} {word}", word, PLACE, claims, partial(work, method, seeds))


def _signs(method: Compressor, seeds: Sequence[int], verdicts: MethodVerdicts) -> None:
    if not method.claims.signs:
        verdicts.skip("it does not claim to send signs", *SIGNS.values(), FLOOR)
        return
    for which, runs in SIGN_RUNS.items():
        for signs in runs if verdicts.wanted(SIGNS[which]) else ():
            values = [v for seed in seeds for v in quadratics.sign_descent(method, signs, seed)]
            measured = bounded(values, "copies").squared()
            label = f"M={signs.workers}, cond {signs.condition:g}, K={signs.k}"
            verdicts.add(SIGNS[which], measured, quadratics.sign_bound(signs), setting=label)
    for workers in (1, 7) if verdicts.wanted(FLOOR) else ():
        values = [v for seed in seeds for v in quadratics.sign_floor(method, workers, seed)]
        exact = quadratics.sign_chain(workers)
        seen = interval([v / exact for v in values], "copies", STRICT)
        why = f"mean |w| {seen.mean * exact:.4f}, the chain's {exact:.4f}"
        measured = magnitude(seen.mean - 1, seen.high - seen.mean, seen.n, "copies", 0.0)
        verdicts.add(FLOOR, measured, PLATEAU, setting=f"M={workers}", why=why)


def _plateau(method: Compressor, seeds: Sequence[int], verdicts: MethodVerdicts) -> None:
    codec = quadratics.by_copy(method)
    if not method.claims.unbiased:
        verdicts.skip("it does not claim to be unbiased", ENDS)
    elif again(method):
        verdicts.skip(AGAIN, ENDS)
    elif codec is None:
        verdicts.skip("one segment spans all copies", ENDS)
    elif not quadratics.declares_variance(codec):
        verdicts.skip("it declares no variance", ENDS)
    else:
        for workers in (1, 4):
            runs = [quadratics.plateau(codec, workers, seed) for seed in seeds]
            ran, declared = ([v for run in runs for v in run[k]] for k in (0, 1))
            away = against(ran, declared, "copies")
            half = away.high - away.mean
            measured = magnitude(away.mean, half, away.n, "copies", MODEL)
            why = f"{away.mean:+.2%}"
            verdicts.add(ENDS, measured, PLATEAU, setting=f"M={workers}", why=why)


def _rate(method: Compressor, seeds: Sequence[int], verdicts: MethodVerdicts) -> None:
    codec = quadratics.by_copy(method)
    tight = None if codec is None else quadratics.tight_omega(codec)
    if not method.claims.unbiased:
        verdicts.skip("it does not claim to be unbiased", RATE)
    elif again(method):
        verdicts.skip(AGAIN, RATE)
    elif codec is None or tight is None:
        verdicts.skip("it declares no relative variance for every x", RATE)
    else:
        shape, omega = tight
        runs = [quadratics.rate(codec, shape, omega, seed) for seed in seeds]
        marks = [[v for run in runs for v in run[k]] for k in range(len(runs[0]))]
        seen = [bounded(values, "copies") for values in marks]
        worst = max(seen, key=lambda one: math.inf if math.isnan(one.mean) else one.mean)
        verdicts.add(RATE, worst, 1.0, setting=f"omega={omega:.3g}, d={math.prod(shape)}")


def _tight(method: Compressor) -> tuple[Compressor, quadratics.Shape, float] | str:
    """Return the method with copies independent, shape and delta for it, or why there are none."""
    codec = quadratics.by_copy(method)
    if not method.claims.contractive:
        return "it does not claim to contract"
    if again(method):
        return AGAIN
    if method.claims.aggregate != "mean":
        return "the result is not the mean of what is sent"
    if codec is None:
        return "one segment spans all copies"
    tight = quadratics.tight_delta(codec)
    return (codec, *tight) if tight else "it declares no contraction for every x"


def _feedback(method: Compressor, seeds: Sequence[int], verdicts: MethodVerdicts) -> None:
    tight = _tight(method)
    if isinstance(tight, str):
        verdicts.skip(tight, DESCENT, RESIDUAL_BOUND)
        return
    codec, shape, delta = tight
    runs = [quadratics.feedback(codec, shape, delta, seed) for seed in seeds]
    label = f"delta={delta:.3g}, d={math.prod(shape)}"
    bounds = quadratics.feedback_bounds(shape, delta)
    for claim, k in ((DESCENT, 0), (RESIDUAL_BOUND, 1)):
        if bounds[k]:
            values = bounded([v for run in runs for v in run[k]], "copies")
            verdicts.add(claim, values, bounds[k], setting=label)
        else:
            verdicts.skip("delta = 1: nothing is left, whatever is sent", claim)


def _biased(method: Compressor, seeds: Sequence[int], verdicts: MethodVerdicts) -> None:
    tight = _tight(method)
    if isinstance(tight, str):
        verdicts.skip(tight, BIASED_DESCENT)
        return
    codec, shape, delta = tight
    for workers, noise in BIASED_RUNS:
        plan = quadratics.biased_plan(shape, delta, workers, noise)
        even = [1.0] * len(plan.rates)
        values = [v for seed in seeds for v in quadratics.biased([codec], shape, plan, even, seed)]
        label = f"N={workers}, noise {noise:g}, delta={delta:.3g}, d={math.prod(shape)}"
        verdicts.add(BIASED_DESCENT, bounded(values, "copies"), plan.bound(), setting=label)


def _falling(method: Compressor, seeds: Sequence[int], verdicts: MethodVerdicts) -> None:
    tight = _tight(method)
    if isinstance(tight, str):
        verdicts.skip(tight, FALLING_ERROR)
        return
    codec, shape, _ = tight
    if codec.claims.with_error(0.5) is None:
        verdicts.skip("no field sets its error", FALLING_ERROR)
        return
    plan, methods = quadratics.falling_plan(codec, shape)
    weights, total = plan.weighted()
    values = [v for seed in seeds for v in quadratics.biased(methods, shape, plan, weights, seed)]
    bound = total / sum(weights)
    verdicts.add(FALLING_ERROR, bounded(values, "copies"), bound, setting=f"N={plan.workers}")
