"""Claims about gradients and codecs, judged by what a `Watch` saw of training runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist

from gcbench.compressor import Compressor
from gcbench.measure.bounds import shape
from gcbench.measure.bounds.claims import (
    Claim,
    Interval,
    Judged,
    always,
    interval,
    mean,
    over,
    ratio,
)
from gcbench.measure.bounds.gradient_tables import each, noise_tests
from gcbench.measure.bounds.observe import CLIP, Record

WEN = "Wen et al. 2017"
BERNSTEIN = "Bernstein et al. 2018"
WANG = "Wang et al. 2020"
_NORMAL = NormalDist()
GAUSSIAN = CLIP * 2 * (_NORMAL.pdf(0) - _NORMAL.pdf(CLIP) + CLIP * _NORMAL.cdf(-CLIP))
"""||f||_inf ||f||_1 / ||g||^2 of long normal gradients clipped at c = 2.5 sigma, 1.985: c E|f|."""
CLIP_LENGTH, CLIP_ANGLE = 0.015, 3.0
"""What clipping at 2.5 sigma changes at most, by the paper: 1.0-1.5 %, 2-3 degrees."""
ORDER = 10.0
"""The same order of magnitude: a factor of at most ten."""
EQUAL = 0.05
"""Relative distance from a declared variance that counts as equal."""
P = 0.05
"""Family-wise error probability of the tests of noise."""

LAYER_WISE = Claim(
    "terngrad/layer-wise",
    "theorem",
    "a scaler a tensor: sum_l ||g_l||_inf ||g_l||_1 / (||g||_inf ||g||_1) of every gradient",
    f"{WEN}, section 3.3",
)
CLIPPED = Claim(
    "terngrad/clipped",
    "theorem",
    "clipping at 2.5 sigma: sum_l ||f_l||_inf ||f_l||_1 / sum_l ||g_l||_inf ||g_l||_1, every one",
    f"{WEN}, section 3.3",
)
BOUND = Claim(
    "terngrad/gradient-bound",
    "observation",
    "with both, E sum_l ||f_l||_inf ||f_l||_1 / E||g||^2 is near that of SGD: at most what normal "
    "gradients have",
    f"{WEN}, section 3.3; 1.985 derived",
)
LENGTH = Claim(
    "terngrad/clip-length",
    "observation",
    "clipping at 2.5 sigma shortens gradients by 1.0-1.5 %; mean over the weight tensors",
    f"{WEN}, section 3.3",
)
ANGLE = Claim(
    "terngrad/clip-angle",
    "observation",
    "clipping at 2.5 sigma turns gradients by 2-3 degrees; mean over the weight tensors",
    f"{WEN}, section 3.3",
)
DENSITIES = Claim(
    "signsgd/densities",
    "observation",
    "densities of gradient and noise are of one order: the factor between phi(g) and phi(sigma)",
    f"{BERNSTEIN}, figure 1",
)
WRONG = Claim(
    "signsgd/wrong-signs",
    "theorem",
    "any noise: sum_i |g_i| P[sign wrong] / ||sigma||_1 over the drawn batches",
    f"{BERNSTEIN}, proof of theorem 1",
)
WRONG_SYMMETRIC = Claim(
    "signsgd/wrong-signs-symmetric",
    "assumption",
    "if noise is unimodal and symmetric: sum_i |g_i| P[sign wrong] / sum_i |g_i| Gauss(S_i)",
    f"{BERNSTEIN}, proof of theorem 2b",
)
UNIMODAL = Claim(
    "signsgd/unimodal",
    "assumption",
    "noise of named weights is unimodal: -log10 of the least p of the dip test, Holm",
    f"{BERNSTEIN}, assumption 4",
)
SYMMETRIC = Claim(
    "signsgd/symmetric",
    "assumption",
    "noise of named weights is symmetric: -log10 of the least p of the triples test, Holm",
    f"{BERNSTEIN}, assumption 4",
)
ALPHA_ONE = Claim(
    "fft/alpha-one",
    "assumption",
    "one worker: ||v' - v|| / ||v||, at most sqrt(theta) where bins drop by their energy",
    f"{WANG}, assumption 3.2",
)
ALPHA = Claim(
    "fft/alpha",
    "assumption",
    "mean of N workers: ||v' - v|| / ||v||, at most sqrt(theta) as for one",
    f"{WANG}, assumption 3.2",
)


def contraction(word: str) -> Claim:
    """Return the claim that a method contracts as it declares."""
    return Claim(
        f"contraction/{word}",
        "theorem",
        "||x - C(x)||^2 / the bound that the method declares (top-k: 1 - k/d of ||x||^2)",
        "the method's card; Stich et al. 2018, lemma A.1",
    )


def variance(word: str) -> Claim:
    """Return the claim that a method has the variance that it declares."""
    return Claim(
        f"variance/{word}",
        "theorem",
        "relative distance of E||Q(x) - E Q(x)||^2 from the exact variance that is declared",
        "the method's card",
    )


def variance_bound(word: str) -> Claim:
    """Return the claim that a variance keeps within its source's bound."""
    return Claim(
        f"variance-bound/{word}",
        "theorem",
        "declared variance / the source's bound on it (QSGD: min(d / s^2, sqrt(d) / s) ||x||^2)",
        "the method's card; Alistarh et al. 2017, theorem 3.2",
    )


def residual(word: str) -> Claim:
    """Return the claim that a residual stays bounded."""
    return Claim(
        f"residual/{word}",
        "theorem",
        "max ||eta e||^2 / (4 (1 - delta) / delta^2 max ||eta g||^2), delta the least one seen",
        "Karimireddy et al. 2019, lemma 3",
    )


FIXED = (
    *(LAYER_WISE, CLIPPED, BOUND, LENGTH, ANGLE, DENSITIES, WRONG, WRONG_SYMMETRIC),
    *(UNIMODAL, SYMMETRIC, ALPHA_ONE, ALPHA),
)
OF_METHODS = (contraction, variance, variance_bound, residual)


def catalogue(methods: Mapping[str, Compressor]) -> list[Claim]:
    """Return all claims of this module."""
    return [*FIXED, *(make(word) for make in OF_METHODS for word in methods)]


def judge(
    records: Sequence[Record],
    methods: Mapping[str, Compressor],
    is_weight: Sequence[bool],
    theta: float,
    judged: Judged,
    place: str,
) -> None:
    """Judge all claims of this module; `is_weight` says which tensors are no vectors."""
    observations, snapshots = each(records, "observations"), each(records, "snapshots")
    if judged.wanted("terngrad/"):
        _ternary(observations, is_weight, judged, place)
    if judged.wanted("signsgd/"):
        _signs(snapshots, judged, place)
    if judged.wanted("fft/"):
        for claim, field in ((ALPHA_ONE, "alpha_one"), (ALPHA, "alpha")):
            seen = [_number(one[field]) for run in observations for one in run]
            found = mean([[_number(one[field]) for one in run] for run in observations])
            why = f"mean {found.mean:.3f}"
            judged.add(claim, place, _worst(seen), math.sqrt(theta), why=why)
    for word, method in methods.items():
        _codec(word, method, snapshots, judged, place)
        _feedback(word, method, records, judged, place)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _worst(values: Sequence[float]) -> Interval:
    """Return the largest value, NaN if any is."""
    worst = math.nan if any(math.isnan(value) for value in values) else max(values)
    return always(worst, len(values))


def _ternary(
    observations: Sequence[Sequence[Record]], is_weight: Sequence[bool], judged: Judged, place: str
) -> None:
    flat = [one for run in observations for one in run]
    judged.add(LAYER_WISE, place, _worst([one["worst_layer"] for one in flat]), 1.0)
    judged.add(CLIPPED, place, _worst([one["worst_clip"] for one in flat]), 1.0)
    found = ratio([[(one["clip"], one["square"]) for one in run] for run in observations])
    judged.add(BOUND, place, found, GAUSSIAN)
    for claim, field, bound in ((LENGTH, "length", CLIP_LENGTH), (ANGLE, "angle", CLIP_ANGLE)):
        series = [
            [
                math.fsum(known) / len(known)
                for one in run
                if (known := _of_weights(one[field], is_weight))
            ]
            for run in observations
        ]
        if not any(series):
            judged.skip(claim.name, place, "the model has no weight tensors, only vectors")
            continue
        judged.add(claim, place, mean(series), bound)


def _of_weights(values: Sequence[float | None], is_weight: Sequence[bool]) -> list[float]:
    pairs = zip(values, is_weight, strict=True)
    return [value for value, chosen in pairs if chosen and value is not None]


def _signs(snapshots: Sequence[Sequence[Record]], judged: Judged, place: str) -> None:
    flat = [one for run in snapshots for one in run]
    logs = [
        [math.log(_number(one["density_noise"]) / _number(one["density_gradient"])) for one in run]
        for run in snapshots
    ]
    found = mean(logs).distance().exponential()
    shares = [_number(one["noise_share"]) for one in flat]
    why = f"{min(shares):.0%} to {max(shares):.0%} of the estimated ||g||^2 is noise"
    judged.add(DENSITIES, place, found, ORDER, why=why)
    for claim, field in ((WRONG, "wrong_any"), (WRONG_SYMMETRIC, "wrong_symmetric")):
        judged.add(claim, place, _worst([over(one["wrong"], one[field]) for one in flat]), 1.0)
    tested = list(noise_tests(snapshots))
    for claim, field in ((UNIMODAL, "dip_holm"), (SYMMETRIC, "triples_holm")):
        if not tested or len(tested) > P * shape.SIMULATIONS:
            many = f"{len(tested)} tests are too many for p-values from {shape.SIMULATIONS} samples"
            judged.skip(claim.name, place, many if tested else "no named weight has any noise")
            continue
        least = min(float(row[field]) for row in tested)  # type: ignore[arg-type]
        rejected = sum(float(row[field]) <= P for row in tested)  # type: ignore[arg-type]
        found = always(abs(math.log10(max(least, 1e-300))), len(tested))._replace(over="tests")
        size = tested[0]["n"]
        why = f"{rejected} of {len(tested)} rejected at {P:.0%} family-wise, samples of {size}"
        judged.add(claim, place, found, -math.log10(P), why=why)


def _codec(
    word: str,
    method: Compressor,
    snapshots: Sequence[Sequence[Record]],
    judged: Judged,
    place: str,
) -> None:
    claim = contraction(word)
    seen = [
        one["contraction"][word]
        for run in snapshots
        for one in run
        if word in one.get("contraction", ())
    ]
    if not seen:
        why = "declares no error_bound" if method.contractive else "does not declare to contract"
        judged.skip(claim.name, place, why)
    elif all(len(one["errors"]) == 1 for one in seen):
        judged.add(
            claim, place, _worst([over(one["errors"][0], one["bound"]) for one in seen]), 1.0
        )
    else:
        values = [over(error, one["bound"]) for one in seen for error in one["errors"]]
        judged.add(claim, place, interval(values, "draws"), 1.0)
    seen = [
        one["variance"][word] for run in snapshots for one in run if word in one.get("variance", ())
    ]
    if not seen:
        why = "declares no exact variance" if method.unbiased else "biased"
        judged.skip(variance(word).name, place, why)
        judged.skip(variance_bound(word).name, place, why)
        return
    pairs = [pair for one in seen for pair in zip(one["errors"], one["declared"], strict=True)]
    if any(declared for _, declared in pairs):
        found = interval([over(*pair) for pair in pairs], "draws").distance(1.0)
    else:
        found = _worst([over(*pair) for pair in pairs])
    judged.add(variance(word), place, found, EQUAL)
    bounded = [
        over(declared, bound)
        for one in seen
        for declared, bound in zip(one["declared"], one["bounds"], strict=True)
        if bound is not None
    ]
    if bounded:
        judged.add(variance_bound(word), place, _worst(bounded), 1.0)
    else:
        judged.skip(variance_bound(word).name, place, "its source has no bound")


def _feedback(
    word: str, method: Compressor, records: Sequence[Record], judged: Judged, place: str
) -> None:
    claim = residual(word)
    seen = [record["residuals"][word] for record in records if word in record["residuals"]]
    if not seen:
        judged.skip(claim.name, place, "its published form carries no residual")
        return
    if any(_number(one["delta"]) <= 0 for one in seen):
        judged.skip(claim.name, place, "a step with delta = 0: the bound is infinite")
        return
    ratios = []
    for one in seen:
        values = [_number(one[name]) for name in ("delta", "gradient", "residual")]
        delta, gradient, kept = values
        ratios.append(over(kept, 4 * (1 - delta) / delta**2 * gradient))
    least = min(_number(one["delta"]) for one in seen)
    steps = sum(one["steps"] for one in seen)
    found = _worst(ratios)._replace(n=steps)
    judged.add(claim, place, found, 1.0, why=f"least delta {least:.3g}")
