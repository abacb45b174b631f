"""What a method claims of itself: its bias, its error, its mean, its size.

A claim is a statement that an experiment can refute. `gcbench verify` and `gcbench bounds` hold a
method to what it claims, whoever wrote it; no engine computes anything from a claim. A method
without claims trains all the same; it has less that can be checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from torch import Tensor

if TYPE_CHECKING:
    from gcbench.core.compressor import Compressor, Segments

C = TypeVar("C", bound="Compressor", covariant=True)


class Claims(Generic[C]):
    """The claims of one configuration; `codec` is the compressor that makes them.

    In what follows x is a float32 tensor of shape (n,), `segments` covers it, and `shared` is what
    the workers agreed on. Subclasses override what they claim, by plain attributes or properties.
    """

    def __init__(self, codec: C) -> None:
        self.codec = codec

    # The error of one worker.

    @property
    def unbiased(self) -> bool:
        """Whether the expectation of `decode(encode(x))` is `target(x)`."""
        return False

    @property
    def contractive(self) -> bool:
        """Whether the error stays below the input, see `error_bound`: error feedback converges."""
        return False

    def target(self, x: Tensor, segments: Segments, shared: Tensor) -> Tensor:
        """Return what an unbiased method is unbiased for, shape (n,); `x` itself by default."""
        return x

    def variance(self, x: Tensor, segments: Segments, shared: Tensor) -> Tensor | None:
        """Return the exact variance of each decoded element of an unbiased method.

        float64, shape (n,); None: not known.
        """
        return None

    def variance_bound(self, x: Tensor, segments: Segments, shared: Tensor) -> float | None:
        """Return the source's bound on the sum of `variance`, if it has one."""
        return None

    def omega(self, segments: Segments) -> float | None:
        """Return the relative variance that holds whatever x is, of a method unbiased for x.

        E||decode(encode(x)) - x||^2 <= omega ||x||^2 for every x of these segments, of a worker
        that is alone. None: no such constant, or the method is unbiased for another target.
        """
        return None

    def error_bound(self, x: Tensor, segments: Segments) -> float | None:
        """Return a proven bound on ||x - decode(encode(x))||^2 of a contractive method.

        It is below ||x||^2 unless x = 0. A bound that holds in expectation is tested on a mean.
        """
        return None

    def delta(self, segments: Segments) -> float | None:
        """Return the contraction delta, above 0, that holds whatever x is.

        ||x - decode(encode(x))||^2 <= (1 - delta) ||x||^2 for every x of these segments, or its
        expectation over the draws; values that are denormal in float32 or near its largest are
        excepted. None: the method contracts by no such constant.
        """
        return None

    def with_error(self, alpha: float) -> Compressor | None:
        """Return the method set to a relative error of about `alpha`, in (0, 1).

        For theorems in which the error falls to 0 with the steps; the `delta` of what is returned
        says what the error is at most. None: no field sets it.
        """
        return None

    def gaussian_error(self) -> float | None:
        """Return ||x - decode||^2 / ||x||^2 for long segments of independent normal values.

        None: not known in closed form.
        """
        return None

    @property
    def exact_for(self) -> tuple[str, ...]:
        """Families of inputs that arrive exactly, by their names in `gcbench verify`."""
        return ()

    # The mean of several workers.

    @property
    def aggregate(self) -> str:
        """What `mean` is: "mean" of the decoded payloads, their majority "vote", or "other"."""
        return "mean"

    @property
    def signs(self) -> bool:
        """Whether a worker sends exactly sign(x), with +1 or -1 for 0, and `mean` is the majority.

        The theorems of signSGD are then about this method. It implies `aggregate` "vote".
        """
        return False

    # The bytes.

    @property
    def portable(self) -> bool:
        """Whether the same input gives the same bytes on every machine.

        False where a library's Fourier transform or matrix product decides the last bits.
        """
        return True

    def nominal_bits(self) -> float | None:
        """Return the bits an element that the source quotes for the way up (None: it has none)."""
        return None
