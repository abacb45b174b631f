"""The compressed mean compared with the plain mean, per tensor; and gradients that diverge."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gcbench.core import registry
from gcbench.core.compressor import Compressor
from gcbench.core.errors import DivergedError

JUDGED_FROM = 256
"""Minimum elements of a tensor to warn about: a coarse code may lose all of a few numbers."""
CONTRACTED = 1.5
"""The default bound of the relative error of contractive methods, whose error is below 1.

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
    """Fraction of the elements of c that are exactly zero."""
    bits: float
    """Bits per element that this rank sent for the tensor's lane at this step.

    It includes what ranks send to agree on scales.
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
    """Limits of a comparison; beyond them the hook warns."""

    error: float
    """The largest relative error without a warning; the default follows the method's claims."""
    cosine: float = 0.0
    """The hook warns at this cosine or below: the mean has another direction than the plain mean.

    A plain mean of zero has no direction, and its cosine is not judged.
    """
    empty: bool = False
    """Whether a tensor may get nothing, because elements are selected from all tensors together."""

    @classmethod
    def of(cls, method: Compressor, error: float | None, collective: str = "") -> Bounds:
        """Return the bounds for a method by this collective.

        `error`: the bound of the relative error. None: 1.5 for a contractive method that takes
        means, infinite for others. A vote of signs has another length than the mean, and another
        direction where workers disagree, so only a cosine of -0.5 or less is reported.
        """
        claims = method.claims
        means = claims.aggregate == "mean"
        if error is None:
            error = CONTRACTED if claims.contractive and means else math.inf
        together = collective == "sparse" or method.granularity == "model"
        return cls(error, 0.0 if means else -0.5, together)

    def judge(self, comparison: Comparison) -> str:
        """Return a text that says what is wrong with one tensor; "" if nothing is."""
        exact = (comparison.relative_error, comparison.cosine) == (0, 1)
        nothing = self.empty and comparison.zeros == 1
        if exact or nothing or comparison.elements < JUDGED_FROM:
            return ""
        wrong = []
        # NaN fails both comparisons.
        if not comparison.relative_error <= self.error:
            wrong.append(f"relative error {comparison.relative_error:.3g}, bound {self.error:g}")
        if comparison.relative_error != math.inf and not comparison.cosine > self.cosine:
            wrong.append(f"cosine {comparison.cosine:.3g}, above {self.cosine:g} expected")
        return " and ".join(wrong)


def warn(method: Compressor, bounds: Bounds, comparisons: Sequence[Comparison]) -> None:
    """Issue one UserWarning for all tensors of a step that are beyond the bounds."""
    judged = [(each, bounds.judge(each)) for each in comparisons]
    wrong = [f"{each.name}: {why}" for each, why in judged if why]
    if wrong:
        more = f"; and {len(wrong) - 5} more tensors" if len(wrong) > 5 else ""
        warnings.warn(
            f"step {comparisons[0].step}: the mean by {method!r} is far from the plain mean. "
            f"{'; '.join(wrong[:5])}{more}. If the method should be more exact than this, check "
            f"it: gcbench verify {registry.spec(method.name or type(method).__name__)}",
            stacklevel=2,
        )


def is_finite(x: Tensor) -> bool:
    """Return whether all values are finite."""
    return math.isfinite(float(x.sum())) or bool(x.isfinite().all())  # the sum may overflow


def diverged(rank: int, name: str, step: int) -> DivergedError:
    """Return the error for a non-finite gradient of the parameter with this name."""
    return DivergedError(
        f"rank {rank}: the gradient of {name} is not finite at step {step}. Lower the learning "
        'rate; or skip such steps on all ranks: on_nonfinite="skip", with an enabled GradScaler as '
        "scaler, or in a loop that makes no step where gradients are not finite",
        step,
    )


def misfit(
    method: Compressor,
    means: Iterable[tuple[str, Tensor]],
    dtypes: Mapping[str, Sequence[torch.dtype]],
    step: int,
) -> DivergedError | None:
    """Return the error for the first decoded mean that one of its dtypes cannot represent.

    `means`: names and means, float32. `dtypes`: those that a mean will be converted to, by name.
    """
    for name, mean in means:
        for dtype in dtypes[name]:
            if not is_finite(mean.to(dtype).float()):
                return _overflowed(method, name, mean, dtype, step)
    return None


def _overflowed(
    method: Compressor, name: str, mean: Tensor, dtype: torch.dtype, step: int
) -> DivergedError:
    spec = registry.spec(method.name or type(method).__name__)
    if not mean.isfinite().all():
        return DivergedError(
            f"the mean of {name} that {spec} decoded is not finite at step {step}, and every "
            f"gradient was: the method or its memory is faulty. Check it: gcbench verify {spec}",
            step,
        )
    return DivergedError(
        f"the mean of {name} that {spec} decoded reaches {float(mean.abs().max()):.3g} at step "
        f"{step}, and its {dtype} overflows at {torch.finfo(dtype).max:.3g}, though every gradient "
        "was finite. Keep the parameters in float32 with torch.autocast, or in bfloat16; or use a "
        "method that does not enlarge values",
        step,
    )
