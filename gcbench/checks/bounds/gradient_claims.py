"""Claims about gradients themselves, judged by what a `Watch` measured; no compressor runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

from gcbench.checks.bounds.claims import Claim, Judged, over
from gcbench.checks.bounds.gradient_tables import each
from gcbench.checks.bounds.observe import CLIP, Record
from gcbench.stats.confidence import Interval, always, mean, ratio

WEN = "Wen et al. 2017"
BERNSTEIN = "Bernstein et al. 2018"
_NORMAL = NormalDist()
GAUSSIAN = CLIP * 2 * (_NORMAL.pdf(0) - _NORMAL.pdf(CLIP) + CLIP * _NORMAL.cdf(-CLIP))
"""||f||_inf ||f||_1 / ||g||^2 of long normal gradients clipped at c = 2.5 sigma, 1.985: c E|f|."""
CLIP_LENGTH, CLIP_ANGLE = 0.015, 3.0
"""The most that clipping at 2.5 sigma changes according to the paper: 1.0-1.5 %, 2-3 degrees."""
ORDER = 10.0
"""Two values are of the same order of magnitude if they differ by at most this factor."""
LAYER_WISE = Claim(
    "terngrad/layer-wise",
    "property",
    "a scaler a tensor: sum_l ||g_l||_inf ||g_l||_1 / (||g||_inf ||g||_1) of every gradient",
    f"{WEN}, section 3.3",
)
CLIPPED = Claim(
    "terngrad/clipped",
    "property",
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
    "property",
    "any noise: sum_i |g_i| P[sign wrong] / ||sigma||_1 over the drawn batches",
    f"{BERNSTEIN}, proof of theorem 1",
)
WRONG_SYMMETRIC = Claim(
    "signsgd/wrong-signs-symmetric",
    "assumption",
    "if noise is unimodal and symmetric: sum_i |g_i| P[sign wrong] / sum_i |g_i| Gauss(S_i)",
    f"{BERNSTEIN}, proof of theorem 2b",
)
FIXED = (LAYER_WISE, CLIPPED, BOUND, LENGTH, ANGLE, DENSITIES, WRONG, WRONG_SYMMETRIC)


def judge(records: Sequence[Record], is_weight: Sequence[bool], judged: Judged, place: str) -> None:
    """Judge all claims of this module.

    `records`: those of `Watch.record`, one a seed; `is_weight`: for each tensor, whether it has
    more than one dimension.
    """
    observations, snapshots = each(records, "observations"), each(records, "snapshots")
    if judged.wanted("terngrad/"):
        _ternary(observations, is_weight, judged, place)
    if judged.wanted("signsgd/"):
        _signs(snapshots, judged, place)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _worst(values: Sequence[float]) -> Interval:
    """Return the interval for observations that must all obey a bound: NaN if any is NaN."""
    worst = math.nan if any(math.isnan(value) for value in values) else max(values)
    return always(worst, len(values))


def _ternary(
    observations: Sequence[Sequence[Record]], is_weight: Sequence[bool], judged: Judged, place: str
) -> None:
    flat = [one for run in observations for one in run]
    judged.add(LAYER_WISE, place, _worst([one["worst_layer"] for one in flat]), 1.0)
    judged.add(CLIPPED, place, _worst([one["worst_clip"] for one in flat]), 1.0)
    estimate = ratio([[(one["clip"], one["square"]) for one in run] for run in observations])
    judged.add(BOUND, place, estimate, GAUSSIAN)
    for claim, field, bound in ((LENGTH, "length", CLIP_LENGTH), (ANGLE, "angle", CLIP_ANGLE)):
        series = [
            [
                math.fsum(weights) / len(weights)
                for one in run
                if (weights := _of_weights(one[field], is_weight))
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
    estimate = mean(logs).distance().exponential()
    shares = [_number(one["noise_share"]) for one in flat]
    why = f"{min(shares):.0%} to {max(shares):.0%} of the estimated ||g||^2 is noise"
    judged.add(DENSITIES, place, estimate, ORDER, why=why)
    for claim, field in ((WRONG, "wrong_any"), (WRONG_SYMMETRIC, "wrong_symmetric")):
        judged.add(claim, place, _worst([over(one["wrong"], one[field]) for one in flat]), 1.0)
