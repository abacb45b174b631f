"""Claims about descent on bowls, judged by what `quadratics` ran."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

from gcbench import registry
from gcbench.compressor import Compressor
from gcbench.measure.bounds import quadratics
from gcbench.measure.bounds.claims import Claim, Judged, always

BERNSTEIN = "Bernstein et al. 2018"
KARIMIREDDY = "Karimireddy et al. 2019"
WANG = "Wang et al. 2020"
SLOPE = 0.25
"""Distance from -1 that an O(1/t) slope may have on a finite stretch of steps."""
PLATEAU = 0.1
"""Relative distance of a plateau from its prediction that counts as equal."""

SIGNS = {
    "theorem-1": Claim(
        "signsgd/theorem-1",
        "theorem",
        "K steps of 1 / sqrt(||L||_1 K), batches of K: [E mean_k ||g_k||_1]^2 <= (1 / K) "
        "[sqrt(||L||_1) (f_0 - f* + 1/2) + 2 ||sigma||_1]^2",
        f"{BERNSTEIN}, theorem 1",
    ),
    "theorem-2a": Claim(
        "signsgd/theorem-2a",
        "theorem",
        "the same for the majority vote of M workers, whatever the noise is (here skewed)",
        f"{BERNSTEIN}, theorem 2a",
    ),
    "theorem-2b": Claim(
        "signsgd/theorem-2b",
        "theorem",
        "vote of M workers, unimodal symmetric noise: 2 ||sigma||_1 / sqrt(M) in its place",
        f"{BERNSTEIN}, theorem 2b",
    ),
}
SIGN_RUNS = (
    ("theorem-1", 1, 1.0, 100),
    ("theorem-1", 1, 100.0, 100),
    ("theorem-1", 1, 100.0, 400),
    ("theorem-2a", 7, 100.0, 100),
    ("theorem-2b", 7, 1.0, 100),
    ("theorem-2b", 7, 100.0, 100),
    ("theorem-2b", 7, 100.0, 400),
)
"""Theorem, workers, condition, K."""
FFT_CONSTANT = Claim(
    "fft/theorem-3.4",
    "theorem",
    "error a = sqrt(theta): mean E||grad f||^2 <= 2 (f_0 - f*) / (eta (1 - a) T) + s^2 (a + L eta "
    "(1 + a)^2) / (1 - a), eta <= (1 - a) / (L (1 + a)^2)",
    f"{WANG}, theorem 3.4, in the form that is proved in gcbench.measure.bounds.quadratics",
)
FFT_FALLING = Claim(
    "fft/theorem-3.5",
    "theorem",
    "eta_t = eta_0 / (1 + t / 50), theta_t = L eta_t: the weighted mean of E||grad f||^2 keeps "
    "within its bound, which goes to 0",
    f"{WANG}, theorem 3.5, in the form that is proved in gcbench.measure.bounds.quadratics",
)
FFT_RUNS = ((0.5, 1), (0.5, 4), (0.85, 1), (0.85, 4))
"""Theta, workers."""
FALL = 50.0
TERNARY_BOUND = Claim(
    "terngrad/theorem-1",
    "theorem",
    "gamma_t = a / (t + t_0): E||w_t - w*||^2 / the bound u_t = O(1/t) that E||g||_inf ||g||_1 <= "
    "A + B ||w - w*||^2 gives, at every t",
    "Wen et al. 2017, theorem 1",
)
TERNARY_END = Claim(
    "terngrad/theorem-1-end",
    "theorem",
    "the same: E||w_T - w*||^2 / ||w_0 - w*||^2 at the last step, against u_T / u_0",
    "Wen et al. 2017, theorem 1",
)
TERNARY_SLOPE = Claim(
    "terngrad/slope",
    "observation",
    "the same: distance from -1 of the slope of log ||w_t - w*||^2 against log t",
    "derived: strongly convex, bounded variance",
)


def descent(word: str) -> Claim:
    """Return the claim of theorem II about a method."""
    return Claim(
        f"descent/{word}",
        "theorem",
        "error feedback: mean E||grad f||^2 <= 2 (f_0 - f*) / (eta T) + eta L s^2 + 4 eta^2 L^2 "
        "s^2 (1 - delta) / delta^2",
        f"{KARIMIREDDY}, theorem II",
    )


def kept(word: str) -> Claim:
    """Return the claim of lemma 3 about a method."""
    return Claim(
        f"residual/{word}",
        "theorem",
        "max_t E||eta e||^2 <= 4 (1 - delta) / delta^2 eta^2 s^2",
        f"{KARIMIREDDY}, lemma 3",
    )


def ends(word: str) -> Claim:
    """Return the claim about a method's plateau."""
    return Claim(
        f"plateau/{word}",
        "theorem",
        "constant step: relative distance of E||w - w*||^2 from sum_i gamma V_i / (L_i (2 - gamma "
        "L_i)), V_i noise and declared variance",
        "Wen et al. 2017, remarks on theorem 1; derived",
    )


FIXED = (*SIGNS.values(), FFT_CONSTANT, FFT_FALLING, TERNARY_BOUND, TERNARY_END, TERNARY_SLOPE)
OF_METHODS = (descent, kept, ends)
PLACE = "bowls"


def catalogue(methods: Mapping[str, Compressor]) -> list[Claim]:
    """Return all claims of this module."""
    return [*FIXED, *(make(word) for make in OF_METHODS for word in methods)]


class Unit(NamedTuple):
    """A piece of work that is done as a whole: its key in the ledger, and how it is judged."""

    key: str
    claims: tuple[str, ...]
    judge: Callable[[Judged], None]


def units(methods: Mapping[str, Compressor]) -> Iterator[Unit]:
    """Yield all work on bowls."""
    signs, ternary = registry.compressor("signsgd"), registry.compressor("terngrad", clip=0.0)
    for name, workers, condition, k in SIGN_RUNS:
        key = f"{name} M={workers} cond={condition:g} K={k}"
        work = partial(_sign, signs, name, workers, condition, k)
        yield Unit(key, (SIGNS[name].name,), work)
    yield Unit(
        "terngrad",
        (TERNARY_BOUND.name, TERNARY_END.name, TERNARY_SLOPE.name),
        partial(_ternary, ternary),
    )
    for theta, workers in FFT_RUNS:
        work = partial(_constant, theta, workers)
        yield Unit(f"fft theta={theta} N={workers}", (FFT_CONSTANT.name,), work)
    yield Unit("fft falling", (FFT_FALLING.name,), _falling)
    for word, method in methods.items():
        claims = descent(word).name, kept(word).name
        yield Unit(f"feedback {word}", claims, partial(_feedback, word, method))
        yield Unit(f"plateau {word}", (ends(word).name,), partial(_plateau, word, method))


def _sign(
    method: Compressor, name: str, workers: int, condition: float, k: int, judged: Judged
) -> None:
    symmetric = name != "theorem-2a"
    found, bound = quadratics.sign_theorem(method, workers, condition, k, symmetric=symmetric)
    setting = f"M={workers}, cond {condition:g}, K={k}"
    judged.add(SIGNS[name], PLACE, found, bound, setting=setting)


def _ternary(method: Compressor, judged: Judged) -> None:
    seen = quadratics.convergence(method)
    judged.add(TERNARY_BOUND, PLACE, always(seen.worst, seen.steps), 1.0)
    judged.add(TERNARY_END, PLACE, seen.last, seen.last_bound)
    why = f"slope {seen.slope.mean:.3f}"
    judged.add(TERNARY_SLOPE, PLACE, seen.slope.distance(-1.0), SLOPE, why=why)


def _spectral(theta: float) -> Compressor:
    return registry.compressor("fft", theta=theta, granularity="tensor")


def _constant(theta: float, workers: int, judged: Judged) -> None:
    a = math.sqrt(theta)
    rate = (1 - a) / (1 + a) ** 2
    seen = quadratics.relative(_spectral(theta), lambda t: theta, lambda t: rate, workers=workers)
    _relative(FFT_CONSTANT, seen, f"theta={theta}, N={workers}", judged)


def _falling(judged: Judged) -> None:
    def rate(t: int) -> float:
        return 0.2 / (1 + t / FALL)  # below (1 - a) / (1 + a)^2 for a = sqrt(0.2)

    seen = quadratics.relative(_spectral(0.2), rate, rate, workers=4, steps=2000)
    _relative(FFT_FALLING, seen, "N=4", judged)


def _relative(claim: Claim, seen: quadratics.Relative, setting: str, judged: Judged) -> None:
    if seen.excess > 1:
        why = f"||v' - v|| / ||v|| reached {seen.excess:.3f} sqrt(theta): assumption 3.2 is not met"
        judged.skip(claim.name, PLACE, f"{setting}: {why}")
        return
    why = f"alpha at most {seen.worst:.3f}"
    judged.add(claim, PLACE, seen.gradient, seen.bound, setting=setting, why=why)


def _feedback(word: str, method: Compressor, judged: Judged) -> None:
    own = quadratics.by_copy(method)
    names = descent(word).name, kept(word).name
    why = ""
    if method.memory != "residual" or not method.contractive:
        why = "its published form carries no residual"
    elif own is None:
        why = "one segment spans all copies"
    else:
        seen = quadratics.feedback(own)
        if math.isinf(seen.gradient_bound):
            why = "a step with delta = 0: the bound is infinite"
    if why or own is None:
        for name in names:
            judged.skip(name, PLACE, why)
        return
    told = f"delta {seen.delta:.3g}"
    judged.add(descent(word), PLACE, seen.gradient, seen.gradient_bound, why=told)
    judged.add(kept(word), PLACE, seen.residual, seen.residual_bound, why=told)


def _plateau(word: str, method: Compressor, judged: Judged) -> None:
    own = quadratics.by_copy(method)
    name = ends(word).name
    if not method.unbiased:
        judged.skip(name, PLACE, "biased")
        return
    seen = None if own is None else quadratics.plateau(own)
    if seen is None:
        judged.skip(name, PLACE, "declares no exact variance, or is unbiased for another target")
        return
    against = seen.over_sgd
    why = f"{against.mean:.3g} times SGD's ({against.low:.3g} to {against.high:.3g})"
    judged.add(ends(word), PLACE, seen.measured.distance(1.0), PLATEAU, why=why)
