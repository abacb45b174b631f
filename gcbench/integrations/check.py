"""The compressed mean compared with the plain mean, tensor by tensor; gradients that diverge."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gcbench.core import registry
from gcbench.core.compressor import Compressor
from gcbench.core.errors import DivergedError

JUDGED_FROM = 256
"""Tensors of fewer elements are not warned about: a coarse code may lose all of a few numbers."""
CONTRACTED = 1.5
"""The default bound of the relative error of methods that contract, whose error is below 1.

It leaves room for the residuals that owners of a two-shot exchange add, and for random draws.
"""


@dataclass(frozen=True)
class Comparison:
    """One tensor at one step: the mean that was applied, c, beside the plain mean, m."""

    step: int
    name: str
    """The parameter's name in the model."""
    elements: int
    relative_error: float
    """||c - m|| / ||m||; 0 where both are zero, infinite where only m is zero."""
    cosine: float
    """<c, m> / (||c|| ||m||); 1 where both are zero, 0 where one is."""
    zeros: float
    """Share of the elements of c that are exactly zero."""
    bits: float
    """Bits an element that this rank handed over for the tensor's lane at this step.

    What ranks send to agree on scales is included.
    """


def compare(step: int, name: str, applied: Tensor, plain: Tensor, bits: float) -> Comparison:
    """Return the comparison of one tensor; `applied` and `plain`: float32, any shape."""
    c, m = applied.double().view(-1), plain.double().view(-1)
    error, length, other = (float(x.norm()) for x in (c - m, m, c))
    if length == 0:
        relative, cosine = (0.0, 1.0) if other == 0 else (math.inf, 0.0)
    else:
        relative = error / length
        cosine = float(c.dot(m)) / (length * other) if other else 0.0
    zeros = float((c == 0).double().mean()) if c.numel() else 0.0
    return Comparison(step, name, c.numel(), relative, cosine, zeros, bits)


@dataclass(frozen=True)
class Bounds:
    """Limits beyond which a comparison is warned about."""

    error: float
    """The largest relative error without a warning."""
    cosine: float = 0.0
    """A cosine at or below it is warned about: the mean points elsewhere than the plain mean.

    Where the plain mean is zero there is no direction, and the cosine is not judged.
    """

    @classmethod
    def of(cls, method: Compressor, error: float | None) -> Bounds:
        """Return the bounds for a method; `error` is the user's bound of the error, None: by claim.

        By claim it is 1.5 for a method that contracts and takes means, and infinite for others. A
        vote of signs is no mean: it has another length, and where workers disagree another
        direction, so only a vote that points the opposite way is found, by a cosine of -0.5.
        """
        claims = method.claims
        means = claims.aggregate == "mean"
        if error is None:
            error = CONTRACTED if claims.contractive and means else math.inf
        return cls(error, 0.0 if means else -0.5)

    def judge(self, found: Comparison) -> str:
        """Return what is wrong with one tensor, for people; "" if nothing is."""
        if found.elements < JUDGED_FROM or (found.relative_error, found.cosine) == (0, 1):
            return ""
        wrong = []
        # Written so that NaN is wrong.
        if not found.relative_error <= self.error:
            wrong.append(f"relative error {found.relative_error:.3g}, bound {self.error:g}")
        if found.relative_error != math.inf and not found.cosine > self.cosine:
            wrong.append(f"cosine {found.cosine:.3g}, above {self.cosine:g} expected")
        return " and ".join(wrong)


def warn(method: Compressor, bounds: Bounds, found: Sequence[Comparison]) -> None:
    """Issue one UserWarning for all tensors that are beyond the bounds."""
    judged = [(each, bounds.judge(each)) for each in found]
    wrong = [f"{each.name}: {why}" for each, why in judged if why]
    if wrong:
        more = f"; and {len(wrong) - 5} more tensors" if len(wrong) > 5 else ""
        warnings.warn(
            f"step {found[0].step}: the mean by {method!r} is far from the plain mean. "
            f"{'; '.join(wrong[:5])}{more}. If the method is not meant to be so inexact, check it: "
            f"gcbench verify {registry.spec(method.name or type(method).__name__)}",
            stacklevel=2,
        )


def diverged(rank: int, name: str, step: int) -> DivergedError:
    """Return the error for a gradient that is not finite, of the parameter of this name."""
    return DivergedError(
        f"rank {rank}: the gradient of {name} is not finite at step {step}. Lower the learning "
        'rate; or skip such steps on all ranks, as a GradScaler does: on_nonfinite="skip", with '
        "scaler=scaler if there is one",
        step,
    )


def overflowed(
    method: Compressor, name: str, mean: Tensor, dtype: torch.dtype, step: int
) -> DivergedError:
    """Return the error for a decoded mean that its parameter's dtype cannot hold."""
    word = registry.spec(method.name or type(method).__name__)
    if not mean.isfinite().all():
        return DivergedError(
            f"the mean of {name} that {word} decoded is not finite at step {step}, and every "
            f"gradient was: the method or its memory is at fault. Check it: gcbench verify {word}",
            step,
        )
    return DivergedError(
        f"the mean of {name} that {word} decoded reaches {float(mean.abs().max()):.3g} at step "
        f"{step}, and its {dtype} overflows at {torch.finfo(dtype).max:.3g}, though every gradient "
        "was finite. Keep the parameters in float32 with torch.autocast, or in bfloat16; or take a "
        "method that does not enlarge values",
        step,
    )


def fits(mean: Tensor, dtype: torch.dtype) -> bool:
    """Return whether all values of a mean, float32, are finite in its parameter's dtype."""
    cast = mean.to(dtype)
    return math.isfinite(float(cast.float().sum())) or bool(cast.isfinite().all())
