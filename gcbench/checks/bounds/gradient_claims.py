"""Claims about gradients themselves, judged by what a `Watch` measured; no compressor runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

from gcbench.checks.bounds.claims import Claim, Judged, over
from gcbench.checks.bounds.observe import CLIP, Record
from gcbench.stats.confidence import mean, number, ratio, worst

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
    "a scaler a tensor: sum_l ||g_l||_inf ||g_l||_1 / (||g||_inf ||g||_1) of every gradient",
    f"{WEN}, section 3.3",
    kind="property",
)
CLIPPED = Claim(
    "terngrad/clipped",
    "clipping at 2.5 sigma: sum_l ||f_l||_inf ||f_l||_1 / sum_l ||g_l||_inf ||g_l||_1, every one",
    f"{WEN}, section 3.3",
    kind="property",
)
BOUND = Claim(
    "terngrad/gradient-bound",
    "with both, E sum_l ||f_l||_inf ||f_l||_1 / E||g||^2 is near that of SGD: at most what normal "
    "gradients have",
    f"{WEN}, section 3.3; 1.985 derived",
    kind="observation",
)
LENGTH = Claim(
    "terngrad/clip-length",
    "clipping at 2.5 sigma shortens gradients by 1.0-1.5 %; mean over the weight tensors",
    f"{WEN}, section 3.3",
    kind="observation",
)
ANGLE = Claim(
    "terngrad/clip-angle",
    "clipping at 2.5 sigma turns gradients by 2-3 degrees; mean over the weight tensors",
    f"{WEN}, section 3.3",
    kind="observation",
)
DENSITIES = Claim(
    "signsgd/densities",
    "densities of gradient and noise are of one order: the factor between phi(g) and phi(sigma)",
    f"{BERNSTEIN}, figure 1",
    kind="observation",
)
WRONG = Claim(
    "signsgd/wrong-signs",
    "any noise: sum_i |g_i| P[sign wrong] / ||sigma||_1 over the drawn batches",
    f"{BERNSTEIN}, proof of theorem 1",
    kind="property",
)
WRONG_SYMMETRIC = Claim(
    "signsgd/wrong-signs-symmetric",
    "if noise is unimodal and symmetric: sum_i |g_i| P[sign wrong] / sum_i |g_i| Gauss(S_i)",
    f"{BERNSTEIN}, proof of theorem 2b",
    kind="assumption",
)
FIXED = (LAYER_WISE, CLIPPED, BOUND, LENGTH, ANGLE, DENSITIES, WRONG, WRONG_SYMMETRIC)


def judge(records: Sequence[Record], judged: Judged, place: str) -> None:
    """Judge all claims of this module; `records`: those of `Watch.record`, one per seed."""
    if judged.wanted("terngrad/"):
        is_weight = [len(shape) > 1 for shape in records[0]["shapes"]]
        _ternary([record["observations"] for record in records], is_weight, judged, place)
    if judged.wanted("signsgd/"):
        _signs([record["snapshots"] for record in records], judged, place)


def _ternary(
    observations: Sequence[Sequence[Record]], is_weight: Sequence[bool], judged: Judged, place: str
) -> None:
    flat = [one for run in observations for one in run]

    def of_weights(values: Sequence[float | None]) -> list[float]:
        pairs = zip(values, is_weight, strict=True)
        return [value for value, chosen in pairs if chosen and value is not None]

    judged.add(LAYER_WISE, place, worst([one["worst_layer"] for one in flat]), 1.0)
    judged.add(CLIPPED, place, worst([one["worst_clip"] for one in flat]), 1.0)
    estimate = ratio([[(one["clip"], one["square"]) for one in run] for run in observations])
    judged.add(BOUND, place, estimate, GAUSSIAN)
    for claim, field, bound in ((LENGTH, "length", CLIP_LENGTH), (ANGLE, "angle", CLIP_ANGLE)):
        series = [
            [math.fsum(values) / len(values) for one in run if (values := of_weights(one[field]))]
            for run in observations
        ]
        if not any(series):
            judged.skip(claim.name, place, "the model has no weight tensors, only vectors")
            continue
        judged.add(claim, place, mean(series), bound)


def _signs(snapshots: Sequence[Sequence[Record]], judged: Judged, place: str) -> None:
    flat = [one for run in snapshots for one in run]
    logs = [
        [math.log(number(one["density_noise"]) / number(one["density_gradient"])) for one in run]
        for run in snapshots
    ]
    estimate = mean(logs).distance().exponential()
    shares = [number(one["noise_share"]) for one in flat]
    why = f"{min(shares):.0%} to {max(shares):.0%} of the estimated ||g||^2 is noise"
    judged.add(DENSITIES, place, estimate, ORDER, why=why)
    for claim, field in ((WRONG, "wrong_any"), (WRONG_SYMMETRIC, "wrong_symmetric")):
        judged.add(claim, place, worst([over(one["wrong"], one[field]) for one in flat]), 1.0)
