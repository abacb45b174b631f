"""What a compressed mean is worth beside the plain one, tensor by tensor."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gcbench.core.compressor import Compressor

JUDGED_FROM = 256
"""Elements from which a tensor is warned about: of a few numbers a rough code may lose all."""
CONTRACTED = 1.5
"""The default bound of the relative error of methods whose error stays below their input.

Above 1: owners of a two-shot exchange add their own residual, and draws scatter.
"""


@dataclass(frozen=True)
class Comparison:
    """One tensor at one step: the mean that was applied, c, beside the plain mean, m."""

    step: int
    name: str
    """The parameter's name in the model."""
    elements: int
    relative_error: float
    """||c - m|| / ||m||; 0 where both are zero, infinite where m alone is."""
    cosine: float
    """<c, m> / (||c|| ||m||); 1 where both are zero, 0 where one is."""
    zeros: float
    """Share of the elements of c that are exactly zero."""
    bits: float
    """Bits handed over an element of the tensor's lane at this step, agreements included."""


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
    """Beyond which a comparison is warned about."""

    error: float
    """The relative error is above it."""
    cosine: float = 0.0
    """The cosine is at most it: what arrives does not point where the plain mean does.

    Without a plain mean to point anywhere it is not judged.
    """

    @classmethod
    def of(cls, method: Compressor, error: float | None) -> Bounds:
        """Return the bounds, of the error the user's or by what the method claims.

        1.5 if it contracts and its mean is one. A vote has a length of its own, and where workers
        disagree it may point elsewhere than their mean: it is found if it is turned round.
        """
        claims = method.claims
        means = claims.aggregate == "mean"
        if error is None:
            error = CONTRACTED if claims.contractive and means else math.inf
        return cls(error, 0.0 if means else -0.5)

    def judge(self, found: Comparison) -> str:
        """Return what is wrong with one tensor; "" for nothing."""
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
            f"step {found[0].step}: what {method!r} makes of the gradient is far from the plain "
            f"mean. {'; '.join(wrong[:5])}{more}. If it was not meant to be so rough, look at it "
            f"by gcbench verify {method.name or type(method).__name__}",
            stacklevel=2,
        )
