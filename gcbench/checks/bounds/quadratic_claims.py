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
from gcbench.checks.bounds.alone import AGAIN, again
from gcbench.checks.bounds.claims import Claim, Judged, Unit
from gcbench.checks.bounds.quadratics import Signs
from gcbench.core.compressor import Compressor
from gcbench.stats.confidence import STRICT, Interval, against, bounded, interval

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
    which: Claim(f"sign-theorem-{which}", "theorem", statement, f"{BERNSTEIN}, theorem {which}")
    for which, statement in SIGN_STATEMENTS.items()
}
FLOOR = Claim(
    "sign-floor",
    "theorem",
    "noise floor of a vote of M workers: mean |w_i| against the exact Markov chain's, relative",
    "derived: a vote's steps are +-eta with binomial probabilities",
    equality=True,
)
ENDS = Claim(
    "plateau",
    "theorem",
    "constant step: E||w - w*||^2 against that of the declared target and variance, relative",
    "Wen et al. 2017, remarks on theorem 1; derived",
    equality=True,
)
RATE = Claim(
    "rate",
    "theorem",
    "gamma_t = a / (t + t_0): E||w_t - w*||^2 / the bound u_t = O(1/t) that E||Q(g)||^2 <= A + "
    "B ||w - w*||^2 gives with the declared omega, at the worst t",
    "Wen et al. 2017, theorem 1",
)
DESCENT = Claim(
    "descent",
    "theorem",
    "error feedback: mean E||grad f||^2 <= 2 (f_0 - f*) / (eta T) + eta L s^2 + eta^2 L^2 s^2 "
    "(1 - delta) / (1 - sqrt(1 - delta))^2",
    f"{KARIMIREDDY}, theorem II",
)
RESIDUAL_BOUND = Claim(
    "residual-bound",
    "theorem",
    "error feedback: max_t E||eta e||^2 <= eta^2 s^2 (1 - delta) / (1 - sqrt(1 - delta))^2",
    f"{KARIMIREDDY}, lemma 3, its series summed",
)
BIASED_DESCENT = Claim(
    "biased-descent",
    "theorem",
    "no feedback, error a = sqrt(1 - delta), N workers: mean E||grad f||^2 within the bound "
    "that is proved in gcbench.checks.bounds.quadratics; without noise 2 (f_0 - f*) / (eta "
    "(1 - a^2) T)",
    f"{WANG}, theorem 3.4, in a form that needs no assumption 3.2",
)
FALLING_ERROR = Claim(
    "falling-error",
    "theorem",
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


def catalogue(methods: Mapping[str, Compressor]) -> list[Claim]:
    """Return all claims of this module."""
    return [claim.of(word) for claim in OF_METHODS for word in methods]


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
        for name, generic, work in groups:
            claims = tuple(claim.of(word).name for claim in generic)
            yield Unit(f"{name} {word}", PLACE, claims, partial(work, word, method, seeds))


def _none(judged: Judged, names: Sequence[str], why: str) -> None:
    for name in names:
        judged.skip(name, PLACE, why)


def _signs(word: str, method: Compressor, seeds: Sequence[int], judged: Judged) -> None:
    if not method.claims.signs:
        names = [claim.of(word).name for claim in (*SIGNS.values(), FLOOR)]
        _none(judged, names, "it does not claim to send signs")
        return
    for which, runs in SIGN_RUNS.items():
        if not judged.wanted(SIGNS[which].of(word).name):
            continue
        for signs in runs:
            values = [v for seed in seeds for v in quadratics.sign_descent(method, signs, seed)]
            measured = bounded(values, "copies").squared()
            label = f"M={signs.workers}, cond {signs.condition:g}, K={signs.k}"
            bound = quadratics.sign_bound(signs)
            judged.add(SIGNS[which].of(word), PLACE, measured, bound, setting=label, ran=word)
    for workers in (1, 7) if judged.wanted(FLOOR.of(word).name) else ():
        values = [v for seed in seeds for v in quadratics.sign_floor(method, workers, seed)]
        exact = quadratics.sign_chain(workers)
        seen = interval([v / exact for v in values], "copies", STRICT)
        why = f"mean |w| {seen.mean * exact:.4f}, the chain's {exact:.4f}"
        measured = _equality(seen.mean - 1, seen.high - seen.mean, seen.n, 0.0)
        judged.add(
            FLOOR.of(word), PLACE, measured, PLATEAU, setting=f"M={workers}", why=why, ran=word
        )


def _equality(away: float, half: float, n: int, allowed: float) -> Interval:
    """Return the interval of the magnitude of a deviation, of which `allowed` is subtracted."""
    size = abs(away)
    return Interval(size, max(0.0, size - half - allowed), size + half, n, "copies")


def _plateau(word: str, method: Compressor, seeds: Sequence[int], judged: Judged) -> None:
    codec, name = quadratics.by_copy(method), ENDS.of(word).name
    why = ""
    if not method.claims.unbiased:
        why = "it does not claim to be unbiased"
    elif again(method):
        why = AGAIN
    elif codec is None:
        why = "one segment spans all copies"
    elif not quadratics.declares_variance(codec):
        why = "it declares no variance"
    if why or codec is None:
        _none(judged, (name,), why)
        return
    for workers in (1, 4):
        runs = [quadratics.plateau(codec, workers, seed) for seed in seeds]
        ran, declared = ([v for run in runs for v in run[k]] for k in (0, 1))
        away = against(ran, declared, "copies")
        measured = _equality(away.mean, away.high - away.mean, away.n, MODEL)
        why = f"{away.mean:+.2%}"
        judged.add(
            ENDS.of(word), PLACE, measured, PLATEAU, setting=f"M={workers}", why=why, ran=word
        )


def _rate(word: str, method: Compressor, seeds: Sequence[int], judged: Judged) -> None:
    codec, name = quadratics.by_copy(method), RATE.of(word).name
    tight = None if codec is None else quadratics.tight_omega(codec)
    if not method.claims.unbiased or again(method) or codec is None or tight is None:
        reason = AGAIN if again(method) else "it declares no relative variance for every x"
        why = reason if method.claims.unbiased else "it does not claim to be unbiased"
        _none(judged, (name,), why)
        return
    shape, omega = tight
    runs = [quadratics.rate(codec, shape, omega, seed) for seed in seeds]
    marks = [[v for run in runs for v in run[k]] for k in range(len(runs[0]))]
    seen = [bounded(values, "copies") for values in marks]
    worst = max(seen, key=lambda one: math.inf if math.isnan(one.mean) else one.mean)
    label = f"omega={omega:.3g}, d={math.prod(shape)}"
    judged.add(RATE.of(word), PLACE, worst, 1.0, setting=label, ran=word)


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


def _feedback(word: str, method: Compressor, seeds: Sequence[int], judged: Judged) -> None:
    tight = _tight(method)
    if isinstance(tight, str):
        _none(judged, (DESCENT.of(word).name, RESIDUAL_BOUND.of(word).name), tight)
        return
    codec, shape, delta = tight
    runs = [quadratics.feedback(codec, shape, delta, seed) for seed in seeds]
    label = f"delta={delta:.3g}, d={math.prod(shape)}"
    for claim, k in ((DESCENT, 0), (RESIDUAL_BOUND, 1)):
        values = bounded([v for run in runs for v in run[k]], "copies")
        bound = quadratics.feedback_bounds(shape, delta)[k]
        if not bound:
            _none(judged, (claim.of(word).name,), "delta = 1: nothing is left, whatever is sent")
            continue
        judged.add(claim.of(word), PLACE, values, bound, setting=label, ran=word)


def _biased(word: str, method: Compressor, seeds: Sequence[int], judged: Judged) -> None:
    tight = _tight(method)
    if isinstance(tight, str):
        _none(judged, (BIASED_DESCENT.of(word).name,), tight)
        return
    codec, shape, delta = tight
    for workers, noise in BIASED_RUNS:
        plan = quadratics.biased_plan(shape, delta, workers, noise)
        even = [1.0] * len(plan.rates)
        values = [v for seed in seeds for v in quadratics.biased([codec], shape, plan, even, seed)]
        seen = bounded(values, "copies")
        label = f"N={workers}, noise {noise:g}, delta={delta:.3g}, d={math.prod(shape)}"
        judged.add(BIASED_DESCENT.of(word), PLACE, seen, plan.bound(), setting=label, ran=word)


def _falling(word: str, method: Compressor, seeds: Sequence[int], judged: Judged) -> None:
    tight = _tight(method)
    if isinstance(tight, str):
        _none(judged, (FALLING_ERROR.of(word).name,), tight)
        return
    codec, shape, _ = tight
    if codec.claims.with_error(0.5) is None:
        _none(judged, (FALLING_ERROR.of(word).name,), "no field sets its error")
        return
    plan, methods = quadratics.falling_plan(codec, shape)
    weights, total = plan.weighted()
    values = [v for seed in seeds for v in quadratics.biased(methods, shape, plan, weights, seed)]
    seen = bounded(values, "copies")
    bound = total / sum(weights)
    judged.add(FALLING_ERROR.of(word), PLACE, seen, bound, setting=f"N={plan.workers}", ran=word)
