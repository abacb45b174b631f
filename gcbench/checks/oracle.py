"""What the results of a method must be, in float64, from its declarations alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gcbench import ops
from gcbench.checks import inputs
from gcbench.checks.calls import Calls
from gcbench.core.compressor import Key, MultiRoundCompressor, Segments
from gcbench.stats.confidence import bernstein, nonnegative

UNLIKELY = 2 * math.exp(-36)
"""Probability that one statistic refuses a correct method, at most."""
SELDOM = 2**17
"""Elements of which a random method draws some, if it draws few of them."""
DRAWS = 12
Z = 5.5
"""Standard deviations: a normal variable lies outside with probability 4e-8, one of 64 with 2e-6"""


class FaultError(Exception):
    """A function of the contract returned what its definition excludes."""

    def __init__(self, function: str, what: str) -> None:
        super().__init__(f"{function}: {what}")
        self.function, self.what = function, what


class Profile(NamedTuple):
    """Properties of a method that decide which definitions apply."""

    random: bool
    """Whether results depend on the key."""
    drawn: bool
    """Whether the workers draw `shared` from the common seed."""
    local: bool
    """Whether a tensor's result does not depend on the other tensors of the bucket."""
    group: int
    """Elements of a group; 512 if segments are tensors, columns or the model."""


def profile(calls: Calls) -> Profile:
    """Return the properties of a method, from its declarations and a few encodings.

    A method may be random in a world of several workers only, or send too few elements of a short
    tensor to show it.
    """
    method = calls.method
    segments = Segments.of([(40, 50)], method.granularity)
    x = inputs.values(2000, 1)
    keys = [Key(0, 0, 0), Key(1, 0, 0), Key(0, 1, 0), Key(0, 2, 0), Key(0, 3, 3), Key(9, 9, 9)]
    random = False
    for calls.workers in (3, 1):
        sent = set()
        for key in keys:
            shared = calls.shared([x], segments, key)
            payload = calls.encode(x, segments, shared, key)
            sent.add(raw(calls.decode(payload, segments, shared)))
        random |= len(sent) > 1
    if not random:
        x, segments = inputs.values(SELDOM, 1), Segments.of([(SELDOM,)], method.granularity)
        first, second = (calls.round_trip(x, segments, key)[0] for key in keys[-3:-1])
        random = not torch.equal(first, second)
    size = method.granularity
    return Profile(
        random=random,
        drawn=calls.draws_shared(segments, keys[0]),
        local=size != "model" and not isinstance(method, MultiRoundCompressor),
        group=size if isinstance(size, int) and size <= 1200 else 512,
    )


# ---- comparisons ---------------------------------------------------------------------------------


def raw(x: Tensor) -> bytes:
    """Return the bytes of a tensor."""
    return x.contiguous().numpy().tobytes()


def same_bits(function: str, actual: Tensor, want: Tensor, what: str) -> None:
    """Require equal bits.

    Raises:
        FaultError: shape, dtype or a bit differs.
    """
    if actual.shape != want.shape or actual.dtype != want.dtype:
        raise FaultError(
            function,
            f"{actual.dtype}, shape {tuple(actual.shape)}, where {what} is {want.dtype}, shape "
            f"{tuple(want.shape)}",
        )
    if torch.equal(actual, want) and not (actual == 0).any():
        return
    if raw(actual) == raw(want):
        return
    width = actual.element_size()
    as_bytes = [x.contiguous().view(torch.uint8).view(-1, width) for x in (actual, want)]
    first = int((as_bytes[0] != as_bytes[1]).any(1).nonzero()[0])
    raise FaultError(function, _at(first, actual, want, what))


def near(function: str, actual: Tensor, want: Tensor, allowed: Tensor, what: str) -> None:
    """Require |got - want| <= allowed for each element; NaN in `want` promises nothing.

    Raises:
        FaultError: shape or dtype differ, or an element is too far away.
    """
    if actual.shape != want.shape or actual.dtype != torch.float32:
        raise FaultError(function, f"{actual.dtype}, shape {tuple(actual.shape)}")
    wrong = ~((actual.double() - want.double()).abs() <= allowed) & ~want.isnan()
    if bool(wrong.any()):
        raise FaultError(function, _at(int(wrong.nonzero()[0]), actual, want, what))


def _at(i: int, actual: Tensor, want: Tensor, what: str) -> str:
    result, right = actual[i].item(), want[i].item()
    return f"element {i:,} of {len(actual):,} is {result:.6g}; {what} is {right:.6g}"


def finite(function: str, actual: Tensor, n: int) -> None:
    """Require float32, shape (n,), finite.

    Raises:
        FaultError: it is something else.
    """
    if not isinstance(actual, Tensor) or actual.dtype != torch.float32 or actual.shape != (n,):
        received = (
            f"{actual.dtype}, {tuple(actual.shape)}" if isinstance(actual, Tensor) else type(actual)
        )
        raise FaultError(function, f"returned {received}; float32, shape ({n},), is expected")
    if not math.isfinite(float(actual.sum(dtype=torch.float64))):
        raise FaultError(function, "returned values that are not finite")


# ---- the value of one worker's payload -----------------------------------------------------------


def value(
    calls: Calls,
    x: Tensor,
    segments: Segments,
    shared: Tensor,
    decoded: Tensor,
    *,
    even: bool = True,
    redraw: Callable[[int], Tensor] | None = None,
) -> None:
    """Hold a decoded gradient to the claims of the method.

    `even`: whether the elements of all workers have similar magnitudes. Otherwise a single draw
    does not show a bias, unless the method declares its variance. `redraw`: decodes x encoded with
    the draws of this number, see `_confirmed`.

    Raises:
        FaultError: the value contradicts a claim.
    """
    claims = calls.method.claims
    function = "decode(encode(x))"
    if claims.signs:
        either = torch.where(decoded < 0, -1.0, 1.0)
        want = torch.where(x == 0, either, x.sign())
        near(function, decoded, want, torch.zeros_like(want).double(), "its sign")
    if not claims.unbiased:
        return
    target = claims.target(x, calls.context(segments, shared))
    variance = claims.variance(x, calls.context(segments, shared))
    t, e = target.double(), decoded.double() - target.double()
    rounding = 1e-5 * (t.abs() + decoded.double().abs()) + 2.0**-120
    v = None if variance is None else variance.double()
    top = ops.statistics.absmax(target, segments)
    if bool((top < claims.smallest).any()):  # such segments may be zeros
        silent = inputs.per_segment(top < claims.smallest, segments)
        t, e, target, decoded = (y.masked_fill(silent, 0.0) for y in (t, e, target, decoded))
        v = None if v is None else v.masked_fill(silent, 0.0)
    confirmed = partial(_confirmed, calls, redraw)
    if v is None:
        if not even:
            return
        # A code whose levels are g apart has a variance of at most |t| g.
        gap = 2 * float(e.abs().max()) if len(e) else 0.0
        _along(t, e, t.abs() * gap, 1.0, function, exact=False, confirmed=confirmed)
        return
    sure = v <= 1e-12 * t.square()
    exact = torch.where(sure, target, torch.nan)
    near(function, decoded, exact, rounding, "what it encodes, where the declared variance is 0,")
    size = t.abs()
    if claims.two_levels:
        widest = torch.where(size > 0, size + v / size.clamp(min=2.0**-149), torch.inf)
        wrong = e.abs() > widest * 1.00001 + rounding
        if bool(wrong.any()):
            i = int(wrong.nonzero()[0])
            raise FaultError(
                function,
                f"element {i:,} of {len(x):,} is {float(decoded[i]):.6g}; the levels around "
                f"{float(t[i]):.6g} are at most {float(widest[i]):.3g} away",
            )
    _along(t, e, v, 1.0 if claims.two_levels else None, function, confirmed=confirmed)


def _along(
    t: Tensor,
    e: Tensor,
    v: Tensor,
    most: float | None,
    function: str,
    *,
    exact: bool = True,
    confirmed: Callable[..., bool],
) -> None:
    """Hold the sum of w e with w = t / (t^2 + v) to Bernstein's bound, in each stretch.

    For a code of two levels |w e| <= 1. Otherwise the largest one observed is taken. In long
    stretches the same holds for w^2 (e^2 - v), unless v is not `exact` but a bound.
    """
    both = t.square() + v
    live = both > 0
    w = torch.where(live, t / torch.where(live, both, 1.0), 0.0)
    errors, spread = w * e, w.square() * v

    def weighted(decoded: Tensor) -> Tensor:
        return w * (decoded.double() - t)

    for name, place in _stretches(len(t)):
        part, var = errors[place], spread[place]
        reach = max(most or 0.0, float(part.abs().max()) if most is None and len(part) else 0.0)
        total, limit = float(part.sum()), _by_chance(part, float(var.sum()), reach)
        if abs(total) > limit and confirmed(weighted, place):
            raise FaultError(
                function,
                f"not unbiased in {name} of {len(t):,} elements: sum of weighted errors "
                f"{total:.4g}, at most {limit:.4g} by chance",
            )
        if not exact or len(part) < ROWS_FROM:
            continue
        squares, reach = part.square(), max(1.0, reach) ** 2
        total = float((squares - var).sum())
        limit = _by_chance(squares, reach * float(var.sum()), reach)
        if abs(total) > limit and confirmed(weighted, place, var):
            raise FaultError(
                function,
                f"the variance is not the declared one in {name} of {len(t):,} elements: weighted "
                f"squares are off by {total:.4g}, at most {limit:.4g} by chance",
            )


def _by_chance(part: Tensor, variance: float, reach: float) -> float:
    """Return what the sum of these errors stays below, of this variance and largest magnitude."""
    rows = part[: len(part) // 64 * 64].view(64, -1).sum(1) if len(part) >= ROWS_FROM else None
    scatter = max(variance, 64 * float(rows.var()) if rows is not None else 0.0)
    return bernstein(scatter, reach, UNLIKELY) + 1e-5 * len(part)


ROWS_FROM = 640
"""Elements from which the sums of 64 rows show the scatter of errors that are not independent."""


REDRAWS = 200
"""Draws that decide whether a single one was off by chance."""
DOUBTS = 8
"""Inputs that are drawn again in vain; after these, a single draw is known to show nothing."""


def _confirmed(
    calls: Calls,
    redraw: Callable[[int], Tensor] | None,
    weighted: Callable[[Tensor], Tensor],
    place: slice,
    variance: Tensor | None = None,
) -> bool:
    """Return whether the sum of errors over `REDRAWS` draws is beyond Z standard errors of 0.

    `weighted`: returns the errors of a decoded tensor. `variance`: their squares less this are
    added instead.

    Errors of a random sparsifier may be the same in a long block of elements, so that a single draw
    shows nothing. If a quarter of the draws send the block, a correct method is refused with a
    probability of 1e-6. Of such a method only the first `DOUBTS` inputs are drawn again.
    """
    if redraw is None:
        return True
    if calls.doubts >= DOUBTS:
        return False
    sums = torch.zeros(REDRAWS, dtype=torch.float64)
    for number in range(REDRAWS):
        part = weighted(redraw(number + 1))[place]
        sums[number] = part.sum() if variance is None else (part.square() - variance).sum()
    off = abs(float(sums.mean())) > Z * float(sums.std()) / math.sqrt(REDRAWS)
    calls.doubts += not off
    return off


def _stretches(n: int) -> Iterator[tuple[str, slice]]:
    yield "all", slice(0, n)
    if n >= 8 * ROWS_FROM:
        count = 32 if n >= 60_000 else 8
        for i in range(count):
            yield f"stretch {i + 1} of {count}", slice(n * i // count, n * (i + 1) // count)


def error_energy(x: Tensor, decoded: Tensor) -> float:
    """Return ||x - decoded||^2."""
    return energy(x.double() - decoded.double())


def energy(x: Tensor) -> float:
    """Return ||x||^2."""
    return float(x.double().square().sum())


def bound_of(calls: Calls, x: Tensor, segments: Segments, shared: Tensor) -> float:
    """Return the declared bound on ||x - decode(encode(x))||^2 of a contractive method."""
    claims, size = calls.method.claims, energy(x)
    bound = claims.error_bound(x, calls.context(segments, shared))
    if bound is None:
        bound = size
    delta = claims.delta(segments)
    smallest = float(torch.where(x == 0, torch.inf, x.abs()).amin()) if len(x) else 1.0
    if delta is not None and smallest > claims.smallest:
        bound = min(bound, (1 - delta) * size * (1 + 1e-6))
    return min(bound, size) * (1 + 1e-6) + 1e-290


def contraction(
    calls: Calls,
    x: Tensor,
    segments: Segments,
    shared: Tensor,
    errors: Sequence[float],
    *,
    random: bool,
) -> None:
    """Hold squared errors of one or several encodings of x to the declared bound.

    Raises:
        FaultError: the bound is exceeded; of a random method, beyond what chance explains.
    """
    size = energy(x)
    worst = max(errors)
    if worst > size * (1 + 1e-5) + 1e-290:
        raise FaultError(
            "decode(encode(x))", f"||x - C(x)||^2 = {worst:.6g} is above ||x||^2 = {size:.6g}"
        )
    if random and len(errors) < DRAWS:
        return
    bound = bound_of(calls, x, segments, shared)
    if refutes_bound(errors, bound, size):
        mean = math.fsum(errors) / len(errors)
        raise FaultError(
            "decode(encode(x))",
            f"||x - C(x)||^2 = {mean:.6g} is above the declared bound {bound:.6g}; ||x||^2 is "
            f"{size:.6g}",
        )


def refutes_bound(errors: Sequence[float], bound: float, size: float) -> bool:
    """Return whether the squared errors of x, with size ||x||^2, refute a bound on their mean.

    A single error must be within the bound. The mean of several draws refutes it if it exceeds the
    bound by Z standard errors, with the largest deviation that values in [0, size] can have; or by
    betting (`nonnegative`), with a probability of error of 1e-6 for any distribution.
    """
    mean, limit = math.fsum(errors) / len(errors), bound * (1 + 1e-6)
    if len(errors) == 1 or size == 0 or mean <= limit:
        return not mean <= limit
    most = math.sqrt(max(0.0, bound * (size - bound)))
    sd = float(torch.tensor(errors, dtype=torch.float64).std())
    bet = nonnegative([error / size for error in errors], "draws")
    return mean > limit + Z * max(sd, most) / math.sqrt(len(errors)) or bet.low > limit / size


# ---- the mean of several workers -----------------------------------------------------------------


def aggregate(
    calls: Calls, decoded: Sequence[Tensor], segments: Segments, shared: Tensor
) -> Tensor | None:
    """Return what the mean of payloads that decode to these tensors must be; None: undefined."""
    ctx = calls.context(segments, shared, len(decoded))
    return calls.method.claims.aggregated(decoded, ctx)


def mean_rounding(calls: Calls, decoded: Sequence[Tensor], segments: Segments) -> Tensor:
    """Return by how much a mean of these may differ from the float64 one, float64, (n,).

    A few units in the last place of the mean magnitude; where a library decides the last bits, 2e-5
    of the segment's largest. A factor, as of a random sparsifier, multiplies the rounding of
    denormal numbers.
    """
    size = torch.stack([one.double().abs() for one in decoded])
    if calls.method.claims.portable:
        return (len(decoded) + 8) * 2.0**-24 * size.mean(0) + 2.0**-126
    largest = ops.statistics.absmax(size.amax(0).float(), segments)
    return 2e-5 * inputs.per_segment(largest.double(), segments) + 2.0**-126
