"""A method's claims about its bias, error, mean and size.

A claim is a statement that an experiment can refute. `gcbench verify` and `gcbench bounds` test a
method's claims; no engine computes anything from them. A method without claims can be trained, but
less of it can be checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from gcbench.core.errors import unknown

if TYPE_CHECKING:
    from gcbench.core.compressor import Compressor
    from gcbench.core.payload import Context, Segments

C = TypeVar("C", bound="Compressor", covariant=True)


class Claims(Generic[C]):
    """The claims of one configuration; `codec` is the compressor that makes them.

    A method declares them in a subclass: `claims = MyClaims` in the compressor, or
    `class MyClaims(Claims, of=MyCompressor)` below it. A constant claim is an attribute
    (`unbiased = True`, `nominal_bits = 8.0`), a claim that depends on the fields is a property, and
    one that depends on the gradient is a function.

    Below, x is a float32 tensor of shape (n,), `ctx.segments` covers it, and `ctx.shared` is what
    the workers agreed on.
    """

    def __init__(self, codec: C) -> None:
        self.codec = codec

    def __init_subclass__(cls, of: type[Any] | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in vars(cls):
            if not (name.startswith("_") or hasattr(Claims, name) or name == "codec"):
                choices = [each for each in vars(Claims) if not each.startswith("_")]
                raise unknown(f"claim of {cls.__name__}:", name, choices)
        if of is not None:
            of.claims = property(cls)

    # The error of one worker.

    @property
    def unbiased(self) -> bool:
        """Whether the expectation of `decode(encode(x))` is `target(x)`."""
        return False

    @property
    def contractive(self) -> bool:
        """Whether ||x - decode(encode(x))|| < ||x|| unless x = 0; see `error_bound` and `delta`.

        Error feedback converges for such methods and is refused for others.
        """
        return False

    def target(self, x: Tensor, ctx: Context) -> Tensor:
        """Return the expectation of the decoded tensor, shape (n,); by default `x` itself.

        TernGrad with clipping is unbiased for the clipped x.
        """
        return x

    def variance(self, x: Tensor, ctx: Context) -> Tensor | None:
        """Return the exact variance of each decoded element of an unbiased method.

        float64, shape (n,); None: unknown.
        """
        return None

    @property
    def two_levels(self) -> bool:
        """Whether each element is rounded at random to one of the two levels around its target.

        0 is one of the levels, so the error for a target t of variance V is at most |t| + V / |t|.
        `gcbench bounds` then uses intervals that do not assume a normal distribution.
        """
        return False

    @property
    def correlated(self) -> bool:
        """Whether the noise of different workers is correlated so that errors cancel in the mean.

        Of N workers with the same x, an element's mean then takes two values at most, 1 / N of the
        distance between its levels apart. True where a field `noise` is "correlated".
        """
        return getattr(self.codec, "noise", "independent") == "correlated"

    @property
    def smallest(self) -> float:
        """Segments whose `target` has no larger magnitude may be sent as zeros; default 2^-100."""
        return 2.0**-100

    def variance_bound(self, x: Tensor, ctx: Context) -> float | None:
        """Return the published bound on the sum of `variance`; None: the source has none."""
        return None

    def omega(self, segments: Segments) -> float | None:
        """Return a bound omega on the relative variance of a method that is unbiased for x.

        E||decode(encode(x)) - x||^2 <= omega ||x||^2 for every x of these segments, for a single
        worker. None: there is no such constant, or the method is unbiased for another target.
        """
        return None

    def error_bound(self, x: Tensor, ctx: Context) -> float | None:
        """Return a proven bound on ||x - decode(encode(x))||^2 of a contractive method.

        It is below ||x||^2 unless x = 0, and may fail near float32's maximum. For a random method
        it may hold in expectation over the draws; the check then tests the mean of several
        encodings.
        """
        return None

    def delta(self, segments: Segments) -> float | None:
        """Return the contraction constant delta in (0, 1].

        ||x - decode(encode(x))||^2 <= (1 - delta) ||x||^2 for every x of these segments, possibly
        in expectation over the draws, unless x has values that are denormal in float32 or close to
        its maximum. None: there is no such constant.
        """
        return None

    def with_error(self, alpha: float) -> Compressor | None:
        """Return the method configured for a relative error of about `alpha`, in (0, 1).

        For theorems whose error decreases to 0 with the steps; `delta` of the result bounds its
        error. None: no field controls the error.
        """
        return None

    @property
    def gaussian_error(self) -> float | None:
        """Return E||x - decode(encode(x))||^2 / ||x||^2 for long segments of independent N(0, 1).

        None: there is no closed form.
        """
        return None

    @property
    def exact_for(self) -> tuple[str, ...]:
        """Input families that decode without error, by their names in `gcbench verify`."""
        return ()

    def settled_error(self, x: Tensor, ctx: Context) -> float | None:
        """Return a bound on ||x - decoded||^2 after 50 steps with the same x, without feedback.

        For methods that improve an estimate of the gradient from step to step. None: for others.
        """
        return None

    # The mean of several workers.

    @property
    def aggregate(self) -> str:
        """What `mean` computes: "mean" of the decoded payloads, majority "vote", or "other"."""
        return "mean"

    def aggregated(self, decoded: Sequence[Tensor], ctx: Context) -> Tensor | None:
        """Return the expected result of `mean` for the decoded payloads, float32, (n,) each.

        float32, shape (n,): by default their mean, or the sign of their sum for a vote. NaN marks
        a fair coin, +1 or -1, in a vote (a tie), and elsewhere an element that rounding decides.
        None: an "other" aggregate without such a claim.
        """
        if self.aggregate == "other":
            return None
        total = torch.stack([one.double() for one in decoded]).sum(0)
        if self.aggregate == "vote":
            return torch.where(total == 0, torch.nan, total.sign()).float()
        return (total / len(decoded)).float()

    @property
    def signs(self) -> bool:
        """Whether a worker sends sign(x), with +1 or -1 for 0, and `mean` is the majority vote.

        The theorems of signSGD then apply to the method, and `aggregate` is "vote".
        """
        return False

    # The update.

    def uncompressed(self, gradients: Iterable[Tensor], warm_up: int) -> Iterator[Tensor] | None:
        """Yield the directions of the uncompressed optimizer, for the gradients of one worker.

        With one worker and an exact codec, a method with an update rule must match them bit for
        bit; the first `warm_up` steps are in fp32. None: not declared.
        """
        return None

    def synchronized(self, means: Iterable[Tensor], ctx: Context) -> Iterator[Tensor] | None:
        """Yield the float64 directions of the uncompressed optimizer, for averaged gradients.

        For methods in rounds that lose nothing by compression: with any number of workers their
        directions must match these up to rounding. `ctx` is that of the first step. None: not
        declared.
        """
        return None

    # The bytes.

    @property
    def portable(self) -> bool:
        """Whether equal inputs give equal bytes on every machine.

        False if the last bits depend on a library's Fourier transform or matrix product.
        """
        return True

    @property
    def nominal_bits(self) -> float | None:
        """Return the bits per element that the source states for a worker's payload, or None."""
        return None
