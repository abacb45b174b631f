"""Statistical properties that a method declares: bias, variance, contraction, independent noise.

Seeds are fixed. "unbiased" and "variance" each refuse a correct method with a probability below
2e-5, over all coordinates: the exact binomial distribution for codes that choose between two
values, the normal one for means over many coordinates.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from gcbench import ops
from gcbench.checks import calls, exchanges, inputs, oracle
from gcbench.checks.cases import COMPOSITE
from gcbench.checks.oracle import Z, refutes_bound
from gcbench.checks.outcome import Measurement, NotDeclaredError
from gcbench.core import codec, purposes
from gcbench.core.compressor import (
    TILE,
    Compressor,
    Context,
    Key,
    MultiRoundCompressor,
    Segments,
    reencodes,
    requantizes,
)
from gcbench.stats.confidence import bernstein, nonnegative

DRAWS = 4000
BUCKETS = 100
"""Buckets to which the draws of a method that codes whole buckets are divided."""
SCALE_EXPONENTS = (0, -30, 30)
"""Powers of two by which the magnitudes of "unbiased" are multiplied."""
FIRST_KEY = Key(seed=0, step=1, rank=0)
ROUND = (COMPOSITE, 10**9)
"""Numbers with many divisors: a period of draws that divides one of them is seen."""
FACTORS = (31, 100, 1000, 10**4, 10**5, 10**6, 1_000_003)
"""Usual factors in sums such as seed * 1000 + step, in which two fields give the same draws."""
KEY_CHANGES: Mapping[str, tuple[Key, ...]] = {
    "seeds": tuple(Key(by, 0, 0) for by in (*(2**k for k in (0, 1, 8, 16, 31, 32, 62)), *FACTORS)),
    "steps": tuple(
        Key(0, by, 0) for by in (*(2**k for k in (0, 1, 6, 8, 16, 24, 30)), 3, *ROUND, *FACTORS)
    ),
    "ranks": tuple(Key(0, 0, by) for by in (*(2**k for k in (0, 1, 2, 6, 8, 16, 19)), *FACTORS)),
    "offsets": tuple(Key(0, 0, 0, TILE * 2**k) for k in (0, 1, 8, 10, 20, 22, 24)),
    "streams": (Key(0, 0, 0, 0, purposes.MERGE),),
}
"""Increments of each field of a key; the draws at all of these keys must differ."""
ADDED = tuple(name for name in Key._fields if name != "workers")
"""The fields of a key to which increments are added; `workers` is the last one."""
WORLDS = (1009, 2**20 - 1)
"""Numbers of workers: the smaller one for ranks below it, as a key may depend on rank and workers.
With correlated noise there is a single worker: the draws of neighbouring ranks are close."""
REPEATS = 48
"""Further keys at which two increments are compared before the method is refused."""
LARGE = ((513, 130), (70_001,), (12, 8, 3, 3), (260_003,))
"""Tensors of which stretches are compared at several keys."""
STRETCHES, CONFIRMED = 32, 6
"""Stretches of these, and the further keys at which two are compared before a refusal."""
ROW_CORRELATION = 0.004
"""Correlation of the draws of neighbouring rows (`ops.random`)."""
UNLIKELY = 2 * math.exp(-30)
"""Probability that a correlation of independent noise exceeds its limit; of 2^15 of them 6e-9."""
CREWS = (4, 5, 6)
"""Numbers of workers with correlated noise: a power of two, an odd number, and neither."""
ARRIVING: Mapping[int, int] = {505: 300, 2003: 200, 9001: 100}
"""Elements of tensors, and the draws in which each element must arrive."""
OFTEN = 40
"""Draws that must send something of a stretch on average before its absence is a fault."""
COIN_DRAWS = 20_000
"""Elements of the tied vote."""
SHORT_SIZES, SHORT_DRAWS = (1, 5, 19), 1000
"""Elements of short buckets, and the keys at which a method that codes the whole bucket draws."""
LONG_SIZES, LONG_DRAWS = (100, 513, 2000), 200
"""Elements of long inputs, and the keys at which the errors of each are drawn."""
EARLIER = {
    "a step with zero gradients": (1, 0.0),
    "a step with tiny gradients": (1, 2.0**-100),
    "a step with huge gradients": (1, 2.0**100),
    "30 steps with other gradients": (30, 1.0),
}
"""Earlier steps: how many, and the scale of their normal gradients."""
UNLIKE = 32
"""Workers whose gradients are independent."""
SHAPES = ((3, 5), (0,), (1,), (), (40, 33), (7,), (2, 3, 3, 3), (1030,), (0, 4))
"""Shapes of a test bucket: empty, of one element, a scalar, matrices, a kernel, vectors."""


def independent(method: Compressor) -> Measurement:
    """Noise is independent between keys and between elements.

    The keys differ in seed, step, rank, offset or stream. A field that is ignored, truncated or
    added to another one makes two keys give the same draws. Where the method declares a variance,
    the noise of elements is compared, at one key and at neighbouring keys: draws that are those of
    another key for the next element, or 1 less those, are dependent.
    """
    keys = _keys(method)
    drawn = _drawn_at(method, FIRST_KEY, keys)
    if len(set(drawn)) == 1:
        raise NotDeclaredError("draws no random numbers")
    faults = []
    for i, (what, key) in enumerate(keys):
        other, twin = keys[drawn.index(drawn[i])]
        if twin != key and _too_often(method, (other, twin), (what, key)):
            faults.append(f"{_describe(key)} and {_describe(twin)} give the same draws")
    faults += _alike(method, keys)
    for what, correlation, bound in _correlations(method, keys):
        if correlation > bound:
            faults.append(f"{what} correlated: {correlation:.2f}, at most {bound:.2f} is allowed")
    fields = ", ".join(dict.fromkeys(what for what, _ in keys[1:]))
    right = f"{len(keys)} keys differ"
    return Measurement("; ".join(faults[:3]) or right, "all differ", not faults, fields)


def _describe(added: Key) -> str:
    fields = zip(ADDED, added, strict=False)
    return "the first" if added == NOTHING else ", ".join(f"{n} + {by}" for n, by in fields if by)


NOTHING = Key(0, 0, 0)


def _keys(method: Compressor) -> list[tuple[str, Key]]:
    """Return the increments of `KEY_CHANGES` that apply, with their fields, after a zero increment.

    Workers share the draws of `shared`. A method in rounds draws for the whole bucket. Only an
    owner that encodes the mean again draws from a second stream.
    """
    left_out = set()
    if method.draw_shared(Context(calls.segments_of(method, [(4,)]), key=FIRST_KEY)) is not None:
        left_out = {"ranks", "streams"}
    if isinstance(method, MultiRoundCompressor):
        left_out.add("offsets")
    if "twoshot" not in method.legal_collectives() or not requantizes(method):
        left_out.add("streams")
    return [
        ("", NOTHING),
        *(
            (what, key)
            for what, keys in KEY_CHANGES.items()
            if what not in left_out
            for key in keys
        ),
    ]


def _drawn_at(method: Compressor, first: Key, keys: Sequence[tuple[str, Key]]) -> list[bytes]:
    """Return the decoded bytes of the same 2000 values at each key `first` + increment."""
    segments, x = calls.segments_of(method, [(40, 50)]), inputs.normal(2000)
    return [oracle.raw(one) for one in _round_trips(method, x, segments, first, keys)]


def _round_trips(
    method: Compressor, x: Tensor, segments: Segments, first: Key, keys: Sequence[tuple[str, Key]]
) -> Iterator[Tensor]:
    """Yield x encoded and decoded at each key `first` + increment."""
    for _, by in keys:
        key = Key(*(a + b for a, b, _ in zip(first, by, ADDED, strict=False)))
        workers = 1 if method.claims.correlated else WORLDS[key.rank >= WORLDS[0]]
        yield calls.round_trip(method, x, segments, key, workers).clone()


def _unrelated(count: int) -> list[Key]:
    """Return keys that differ in all fields."""
    return [Key(11 + i, 7 + 101 * i, 3 * i, 5 * TILE * i) for i in range(count)]


def _too_often(method: Compressor, *keys: tuple[str, Key]) -> bool:
    """Return whether two increments give the same draws more often than unrelated keys do.

    Draws from few values coincide by chance, with a probability that all pairs of `REPEATS` keys
    show. A correct method is refused with a probability below `UNLIKELY`. Keys of seed or rank 0,
    where a product of fields is 0, are tried separately.
    """
    for zero in ({}, {"seed": 0}, {"rank": 0}):
        firsts = [key._replace(**zero) for key in _unrelated(REPEATS)]
        pairs = [_drawn_at(method, first, keys) for first in firsts]
        together = sum(one == other for one, other in pairs)
        apart = sum(n * (n - 1) / 2 for n in Counter(one for one, _ in pairs).values())
        # What is added bounds the probability if no pair or few coincide.
        most = min(1.0, (apart + 6 * math.sqrt(apart) + 18) / math.comb(REPEATS, 2))
        chance = sum(
            math.comb(REPEATS, k) * most**k * (1 - most) ** (REPEATS - k)
            for k in range(together, REPEATS + 1)
        )
        if chance < UNLIKELY:
            return True
    return False


def _alike(method: Compressor, keys: Sequence[tuple[str, Key]]) -> Iterator[str]:
    """Yield the stretches of large tensors whose draws are the same at two keys.

    Compared are the first key and the first increment of each field. What arrives must differ in
    each stretch that is not exact, unless the method is biased and the stretch never differs.
    """
    segments = calls.segments_of(method, LARGE)
    x, first = inputs.values(segments.numel, 3), ("", NOTHING)
    added = {what: key for what, key in reversed(keys) if what}

    def stretches(base: Key, *increments: tuple[str, Key]) -> list[tuple[bytes, ...]]:
        rows = _round_trips(method, x, segments, base, increments)
        return [tuple(map(oracle.raw, row.tensor_split(STRETCHES))) for row in rows]

    base, *others = stretches(FIRST_KEY, first, *added.items())
    target = method.claims.target(x, calls.encode(method, x, segments, FIRST_KEY)[1])
    exact = [oracle.raw(part) for part in target.tensor_split(STRETCHES)]
    nothing = [oracle.raw(torch.zeros_like(part)) for part in x.tensor_split(STRETCHES)]
    for i, one in enumerate(base):
        same = [what for what, other in zip(added, others, strict=True) if other[i] == one]
        if not same or one in (exact[i], nothing[i]):
            continue
        constant = len(same) == len(added)
        if constant and not method.claims.unbiased:
            continue
        pairs = [stretches(key, first, (same[0], added[same[0]])) for key in _unrelated(CONFIRMED)]
        together = sum(a[i] == b[i] for a, b in pairs)
        apart = len({a[i] for a, _ in pairs})
        if together == CONFIRMED and (constant or apart > CONFIRMED / 2):
            where = f"stretch {i + 1} of {STRETCHES} of {segments.numel:,} elements"
            yield f"{where}: the same draws at other {same[0]}"
            return


def _correlations(
    method: Compressor, keys: Sequence[tuple[str, Key]]
) -> Iterator[tuple[str, float, float]]:
    """Yield the largest correlation of the noise of elements, and the largest allowed.

    First of elements apart at one key. Neighbours may be drawn together, as in blocks: what is
    allowed then counts fewer draws (Bartlett's formula), and lags below the first without
    correlation are left out. Then of elements at any distance, also 0, at two keys: the first one
    and the next seed, step, rank or stream.
    """
    noise = _noise(method, FIRST_KEY)
    if noise is None:
        return
    e = noise[0]
    n = len(e)
    spectrum = torch.fft.rfft(e, 2 * n)
    lags = torch.fft.irfft(spectrum.abs().square())[: n // 2]
    size = float(lags[0])
    largest = float(e.square().max()) / size
    lags = (lags / size).abs()

    def allowed(squares: float, most: float) -> float:
        return ROW_CORRELATION + bernstein(squares / n, most, UNLIKELY)

    together = int((lags > allowed(1.0, largest)).int().argmin())
    squares = max(1.0, 2 * float(lags[:together].square().sum()) - 1)
    yield "elements are", float(lags[together:].max()), allowed(squares, largest)
    added = {what: key for what, key in reversed(keys) if what and what != "offsets"}
    if method.claims.correlated:
        added.pop("ranks", None)
    for what, by in added.items():
        key = Key(*(a + b for a, b, _ in zip(FIRST_KEY, by, ADDED, strict=False)))
        for one, other in zip(noise, _noise(method, key) or noise, strict=True):
            both = torch.fft.rfft(one, 2 * n) * torch.fft.rfft(other, 2 * n).conj()
            scale = float(one.norm() * other.norm())
            most = float(one.abs().max() * other.abs().max()) / scale
            across = float(torch.fft.irfft(both).abs().max()) / scale
            yield f"{what}: draws of neighbours are", across, allowed(squares, most)


def _noise(method: Compressor, key: Key) -> tuple[Tensor, Tensor] | None:
    """Return the noise of 2^16 normal values at a key, in standard deviations, float64.

    First of errors away from 0, then of errors upwards. None: no variance is declared, or it is 0.
    """
    n = 1 << 16
    segments, x = calls.segments_of(method, [(n,)]), inputs.normal(n)
    payload, ctx = calls.encode(method, x, segments, key, workers=2)
    v = method.claims.variance(x, ctx) if method.claims.unbiased else None
    if v is None or not bool((v > 0).any()):
        return None
    errors = codec.decode(method, payload, ctx) - method.claims.target(x, ctx)
    up = torch.where(v > 0, errors.double() / v.clamp(min=1e-300).sqrt(), 0.0).clamp(-4, 4)
    away = up * x.sign()
    return away - away.mean(), up - up.mean()


def _sample() -> Tensor:
    """Return 64 values of magnitude 1/4 to 1, two of them zeros: no random code of them is rare."""
    draws = ops.random.uniform(Key(11, 0, 0, 0, 253), 64)
    x = (0.25 + 0.75 * draws) * inputs.EXACT["signs"](Segments((0, 64)), 5)
    x[7] = x[40] = 0.0
    return x


def _bands() -> tuple[Tensor, Tensor]:
    """Return 420 values of magnitude 1 down to 2^-12, and the band of magnitude of each, 0 to 4.

    Each band has enough values that a code that rounds them to 0 or 1 at random draws at least
    30 ones among them, and the first shows a factor of 0.995 in the probability of a one.
    """
    band = torch.repeat_interleave(torch.arange(5), torch.tensor([200, 20, 40, 60, 100]))
    size = torch.exp2(-3.0 * band) * (1 - 0.3 * ops.random.uniform(Key(12, 0, 0, 0, 253), 420))
    return size * inputs.EXACT["signs"](Segments((0, 420)), 6), band


def _heavy() -> Tensor:
    """Return 331 values, one of magnitude 1 and the others near 2^-5: a heavy tail.

    Blocks of 64, 128 and 256 elements leave a shorter one.
    """
    size = 2.0**-5 * (1 - 0.3 * ops.random.uniform(Key(13, 0, 0, 0, 253), 331))
    size[77] = 1.0
    return size * inputs.EXACT["signs"](Segments((0, 331)), 7)


def _drawn(
    method: Compressor, sample: Tensor, key: Key = calls.KEY, workers: int = 1
) -> tuple[Tensor, Tensor, Tensor, Context]:
    """Return DRAWS decodings of one sample and their targets, both float64, shape (DRAWS, n).

    Also returns a bucket and its context. The copies are tensors of one bucket, so one call draws
    them all. If the whole bucket is a segment, as in a sketch, the errors of its copies may depend
    on each other: then there are `BUCKETS` of them, of different seeds. `key`, `workers`: those of
    the worker; all workers have the same sample.
    """
    n, count = len(sample), BUCKETS if method.granularity == "model" else 1
    x = sample.repeat(DRAWS // count)
    segments = calls.segments_of(method, [(n,)] * (DRAWS // count))
    decoded, targets = [], []
    for number in range(count):
        ctx = Context(segments, key=key._replace(seed=key.seed + number), workers=workers)
        ctx = ctx._replace(shared=codec.agree(method, [x] * workers, ctx)[0])
        decoded.append(codec.decode(method, codec.encode(method, x, ctx), ctx).double())
        targets.append(method.claims.target(x, ctx).double())
    return torch.cat(decoded).view(DRAWS, n), torch.cat(targets).view(DRAWS, n), x, ctx


def _drawn_alone(method: Compressor, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Context]:
    """Return what `_drawn` does, of x as if alone in a bucket.

    It is alone in a segment of `_drawn`, unless the whole bucket is one: it is then encoded at
    `SHORT_DRAWS` keys.
    """
    if method.granularity != "model":
        return _drawn(method, x)
    segments, decoded, targets = calls.segments_of(method, [(len(x),)]), [], []
    for step in range(SHORT_DRAWS):
        payload, ctx = calls.encode(method, x, segments, Key(1, step, 0))
        decoded.append(codec.decode(method, payload, ctx).double())
        targets.append(method.claims.target(x, ctx).double())
    return torch.stack(decoded), torch.stack(targets), x, ctx


def unbiased(method: Compressor) -> Measurement:
    """Each coordinate's mean over 4000 draws is the target, within what chance allows.

    Short buckets are tried too: there a wrong factor is largest, and a code may be deterministic.
    So are a heavy tail, which clipping changes, segments without both signs, equal elements, and a
    worker among several.

    The same holds for means over coordinates of similar magnitude, from the largest to 2^-12 of it,
    where the largest is about 1, 2^-30 or 2^30, and over all of these: of errors away from 0, and
    of errors upwards. A dither of 8 bits is off by 1/512 of a level, 12 standard errors.
    It also holds for the mean of workers by collectives that encode a mean or partial sums again.
    """
    if not method.claims.unbiased:
        raise NotDeclaredError("biased")
    worst, note = 0.0, ""
    tried = {
        "": _sample(),
        "of a heavy tail": _heavy(),
        "of positive elements": _heavy()[60:100].abs(),
        "of negative elements": -_heavy()[60:100].abs(),
        "of equal elements": torch.full((9,), 0.3),
    }
    draws = [(text, *_drawn(method, x)) for text, x in tried.items()]
    draws.append(("of rank 2 of 3", *_drawn(method, _sample(), Key(7, 1001, 2), 3)))
    draws += [(f"of {n} element(s)", *_drawn_alone(method, _sample()[:n])) for n in SHORT_SIZES]
    for text, decoded, target, x, ctx in draws:
        declared = method.claims.variance(x, ctx)
        least = torch.full((1,), 1e-7)
        if declared is not None:  # an element that is sent seldom may never be drawn
            variances = declared.double().view(-1, decoded.shape[1]).mean(0)
            least = (variances / len(decoded)).sqrt().clamp(min=1e-7)
        off = _deviations(decoded - target, least)
        if off > max(worst, Z):
            note = text
        worst = max(worst, off)
    values, band = _bands()
    every: list[tuple[Tensor, Tensor | None]] = []
    for power in SCALE_EXPONENTS:
        key = calls.KEY._replace(step=calls.KEY.step + 100 + power)  # other draws at each scale
        decoded, target, x, ctx = _drawn(method, values * 2.0**power, key)
        errors = (decoded - target) * 2.0**-power
        declared = method.claims.variance(x, ctx)
        sizes = None if declared is None else declared.double().view(-1, 420) * 4.0**-power
        every.append((errors, sizes))
        for i in range(5):
            of_band = None if sizes is None else sizes[:, band == i]
            signs = values.sign()[band == i]
            off = _pooled(errors[:, band == i], of_band, signs, 1e-6 * 2.0 ** (-3 * i))
            if off > max(worst, Z):
                note = f"of elements of about 2^-{3 * i} of the largest, which is 2^{power}"
            worst = max(worst, off)
    all_sizes = [sizes for _, sizes in every if sizes is not None]
    errors, sizes = torch.cat([errors for errors, _ in every]), None
    if all_sizes:
        sizes = torch.stack([each.mean(0) for each in all_sizes])
    off = _pooled(errors, sizes, values.sign(), 1e-6)
    note = "of all elements at all scales" if off > max(worst, Z) else note
    worst = max(worst, off)
    for collective in method.legal_collectives():
        again = _exchanged(method, collective) if reencodes(method, collective) else None
        if again is not None:
            off = _deviations(again, 1e-7)
            if off > max(worst, Z):
                note = f"of the mean of 3 workers by {collective}"
            worst = max(worst, off)
    absent = next(_absent(method), "")
    holds = worst <= Z and not absent
    return Measurement(f"{worst:.2f} sd", f"{Z} sd", holds, note or absent)


def _exchanged(method: Compressor, collective: str) -> Tensor | None:
    """Return the errors of the mean of 3 workers of equal signs in DRAWS tensors, (DRAWS, 64).

    None: the target clips relative to the largest elements, as in the MX formats, so that the mean
    of targets is not that of partial sums.
    """
    xs = [share * _sample().abs().repeat(DRAWS) for share in (1.0, 0.7, 0.4)]
    shapes = [(64,)] * DRAWS
    mean = exchanges.exchanged_mean(method, collective, xs, shapes)
    ctx = Context(calls.segments_of(method, shapes), workers=len(xs))
    ctx = ctx._replace(shared=codec.agree(method, xs, ctx)[0])
    targets = [method.claims.target(x, ctx).double() for x in xs]
    total = sum(xs, torch.zeros_like(xs[0]))
    clipped, doubled = method.claims.target(total, ctx), method.claims.target(2 * total, ctx)
    if not torch.equal(clipped, total) and torch.equal(doubled, 2 * clipped):
        return None
    return (mean.double() - torch.stack(targets).mean(0)).view(DRAWS, -1)


def _pooled(errors: Tensor, variances: Tensor | None, signs: Tensor, least: float) -> float:
    """Return the larger of `_deviations` of two means of coordinates: of errors up, and from 0.

    `errors`, shape (draws, n): of the draws; `signs`, (n,): of the values. `variances`, (k, n):
    what the method declares for k groups of draws, None: nothing. `least`: as for `_deviations`.
    """
    draws, count = errors.shape
    gap = float(errors.max() - errors.min())
    if variances is not None:  # an element that is sent seldom may never be drawn
        deviation = math.sqrt(float(variances.mean(0).sum())) / count
        least = max(least, deviation / math.sqrt(draws))
    means = ((errors * turned).mean(1, keepdim=True) for turned in (signs, torch.ones(count)))
    return max(_deviations(mean, least, gap / count) for mean in means)


def _deviations(errors: Tensor, least: float | Tensor, gap: float = 0.0) -> float:
    """Return the largest |mean over the draws| of errors, (draws, n), in standard errors.

    Standard errors are at least `least`: that of the declared variance, or rounding.
    A code of a probability of about 1 / draws may never be drawn, so that the errors scatter too
    little: a mean may be off by Z^2 gap / (2 draws) besides, where the gap is the range of all
    errors, or what is given if that is more. Of a code that chooses between two values, no further
    apart, a mean is then beyond Z with a probability of 2.4e-7 at most, whatever that of the values
    is.
    """
    draws = len(errors)
    rare = Z * max(gap, float(errors.max() - errors.min())) / (2 * draws)
    sd = torch.maximum(_standard_error(errors), torch.as_tensor(least, dtype=errors.dtype))
    return float((errors.mean(0).abs() / (sd + rare)).max())


def _standard_error(errors: Tensor) -> Tensor:
    """Return the standard error of the mean over the first axis.

    The larger one of two: of independent rows, and of the means of `BUCKETS` groups of rows.
    """
    groups = errors.view(BUCKETS, -1, *errors.shape[1:]).mean(1)
    return torch.maximum(errors.std(0) / math.sqrt(len(errors)), groups.std(0) / math.sqrt(BUCKETS))


def correlated(method: Compressor) -> Measurement:
    """The mean of N workers with the same input has at most two values per element.

    They are 1 / N of the distance between the element's levels apart, so its variance is at most
    1 / (4 N^2) of that distance squared. Each worker is unbiased, and all of the N different.
    """
    if not method.claims.correlated:
        raise NotDeclaredError("independent noise")
    worst, faults = 0.0, []
    for workers in CREWS:
        keys = [calls.KEY._replace(rank=rank) for rank in range(workers)]
        draws = [_drawn(method, _sample(), key, workers) for key in keys]
        decoded, target = torch.stack([draw[0] for draw in draws]), draws[0][1]
        gap = decoded.amax((0, 1)) - decoded.amin((0, 1))
        means = decoded.mean(0)
        spread = (means.amax(0) - means.amin(0)) / gap.clamp(min=1e-30) * workers
        worst = max(worst, float(spread.max()))
        off = max(_deviations(one - target, 1e-7) for one in decoded)
        if off > Z:
            faults.append(f"a worker of {workers} is biased: {off:.2f} sd")
    if worst > 1 + 1e-5:
        faults.append("errors of equal inputs do not cancel")
    bound = "1 / N of a step, each worker unbiased"
    return Measurement(f"{worst:.2f} / N of a step", bound, not faults, "; ".join(faults[:2]))


def variance(method: Compressor) -> Measurement:
    """The mean squared error is the declared variance, within the source's bound and `omega`.

    The same holds per coordinate, within chance; see `_deviations`. An element of a method that
    declares two levels is decoded as one of two values.
    """
    if not method.claims.unbiased:
        raise NotDeclaredError("biased")
    decoded, target, x, ctx = _drawn(method, _sample())
    declared = method.claims.variance(x, ctx)
    if declared is None:
        return _bounded(method)
    most = 1 + int(decoded.sort(0).values.diff(dim=0).ne(0).sum(0).max())
    if method.claims.two_levels and most > 2:
        return Measurement(f"{most} values of one element", "two levels", False)
    squares = (decoded - target).square()
    errors = squares.sum(1)
    of_copies = declared.double().view(-1, 64)
    exact = float(of_copies.sum(1).mean())
    z = abs(float(errors.mean()) - exact) / max(float(_standard_error(errors)), 1e-9)
    each = _deviations(squares - of_copies.repeat(DRAWS // len(of_copies), 1), 1e-9)
    bound = method.claims.variance_bound(x, ctx)
    total = float(declared.sum())
    within = bound is None or total <= bound * (1 + 1e-6)
    note = "" if bound is None else f"{total:.4g}, the source's bound {bound:.4g}"
    if z <= Z < each:
        note = f"of single elements; of their sum {z:.2f} sd"
    beyond = _beyond_bounds(method)
    holds = max(z, each) <= Z and within and not beyond
    return Measurement(f"{max(z, each):.2f} sd off {exact:.4g}", f"{Z} sd", holds, beyond or note)


def _bounded(method: Compressor) -> Measurement:
    """The mean squared error over 4000 draws is within `variance_bound` and `omega`.

    For methods without an exact variance. The inputs are a sample and one element among others
    that are 2^-k of it, see `_beyond_bounds`. Longer inputs have fewer draws, see `_beyond_long`.
    """
    samples = {"normal": inputs.normal(33), "64 values": _sample()}
    for k in (1, 2, 3, 5, 8):
        samples[f"1 and 2^-{k}"] = torch.where(torch.arange(33) == 0, 1.0, 2.0**-k)
    worst, note = 0.0, ""
    for name, sample in samples.items():
        decoded, target, x, ctx = _drawn(method, sample)
        size = oracle.energy(x)
        errors = (decoded - target).square().sum(1)
        copies = len(x) // len(sample)
        chance = Z * float(_standard_error(errors)) * copies + 1e-6 * size
        for what, bound in _bounds(method, x, ctx).items():
            total = float(errors.mean()) * copies
            worst = max(worst, total / max(bound, 1e-300))
            if total > bound + chance:
                note = f"{name}: E||C(x) - x||^2 is {total:.4g}, {what} {bound:.4g}"
    if not worst:
        raise NotDeclaredError("no exact variance, and no bound on it")
    note = note or _beyond_long(method)
    return Measurement(f"{worst:.3f} of the bound", "1", not note, note)


def _bounds(method: Compressor, x: Tensor, ctx: Context) -> Mapping[str, float]:
    """Return the declared bounds on E||decode(encode(x)) - target(x)||^2, by name."""
    omega = method.claims.omega(ctx.segments)
    bounds = {
        "the source's bound": method.claims.variance_bound(x, ctx),
        "omega ||x||^2": None if omega is None else omega * oracle.energy(x),
    }
    return {what: bound for what, bound in bounds.items() if bound is not None}


def _one_large(n: int) -> Tensor:
    """Return 1, and n - 1 elements of 1 / (1 + sqrt(n)): float32, shape (n,).

    No other input has a larger relative variance if all elements are rounded to 0 or +-max |x|, as
    by TernGrad: (sqrt(n) - 1) / 2.
    """
    return torch.where(torch.arange(n) == 0, 1.0, 1 / (1 + math.sqrt(n)))


def _beyond_long(method: Compressor) -> str:
    """Return where the mean squared error of a long input is above a declared bound; "" if nowhere.

    Errors are drawn at `LONG_DRAWS` keys. A bound is tested by betting (`nonnegative`): a correct
    one is refused with a probability of 1e-6 at most, for errors of any distribution.
    """
    for n in LONG_SIZES:
        x, segments = _one_large(n), calls.segments_of(method, [(n,)])
        errors = []
        for step in range(LONG_DRAWS):
            payload, ctx = calls.encode(method, x, segments, Key(1, step, 0))
            decoded = codec.decode(method, payload, ctx)
            errors.append(oracle.error_energy(method.claims.target(x, ctx), decoded))
        mean, low = math.fsum(errors) / LONG_DRAWS, nonnegative(errors, "draws").low
        for what, bound in _bounds(method, x, ctx).items():
            if low > bound * (1 + 1e-6):
                return f"1 and small ones, {n}: E||C(x) - x||^2 is {mean:.4g}, {what} {bound:.4g}"
    return ""


def _beyond_bounds(method: Compressor) -> str:
    """Return where the declared variance is above `variance_bound` or omega ||x||^2, or "".

    The inputs are `inputs.probes`, `_one_large`, and one element among others that are 2^-k of it:
    for some k a code of levels comes close to its largest variance.
    """
    few = [[(n,)] for n in (1, 2, 5, 33, *LONG_SIZES)]
    for shapes in (*few, [(2,), (2000,), (1,)]):
        segments = calls.segments_of(method, shapes)
        n = segments.numel
        first = torch.arange(n) == 0
        alone = ((f"1 and 2^-{k}", torch.where(first, 1.0, 2.0**-k)) for k in range(1, 13))
        largest = ("1 and small ones", _one_large(n))
        for name, x in (*inputs.probes(n), *alone, largest):
            ctx = Context(segments, calls.agree(method, [x], segments))
            bounds = _bounds(method, x, ctx)
            v = method.claims.variance(x, ctx) if bounds else None
            if name == "denormal" or v is None:
                continue
            size, total = oracle.energy(x), float(v.sum())
            for what, most in bounds.items():
                if not total <= most * (1 + 1e-6) + 1e-12 * size:
                    return f"{name} of {n}: the variance {total:.4g} is above {what} = {most:.4g}"
    return ""


def contraction(method: Compressor) -> Measurement:
    """||x - C(x)||^2 stays within the declared bound, and the bound below ||x||^2.

    For unusual values the bound may equal ||x||^2: 16-bit floats round denormal ones to 0.
    Where a delta is declared, (1 - delta) ||x||^2 is a bound, too, except for denormal values.
    For a random method the mean of 48 draws is tested, see `refutes_bound`; 12 draws suffice if
    their mean is within the bound. For further draws see `_seldom`, for methods in rounds `_stuck`.
    """
    if not method.claims.contractive:
        raise NotDeclaredError("not contractive")
    worst, faults = 0.0, []
    probe = calls.segments_of(method, [(2000,)])
    random = calls.is_random(method, inputs.normal(2000), probe)
    keys = [Key(7, step, 0) for step in range(48 if random else 1)]
    shapes_of: list[inputs.Shapes] = [((2000,),), ((40, 50),), SHAPES]
    if isinstance(method, MultiRoundCompressor):
        shapes_of += [(shape,) for shape in inputs.STRETCHED]
    for shapes in shapes_of:
        segments = calls.segments_of(method, shapes)
        for name, x in inputs.probes(segments.numel):
            size = oracle.energy(x)
            shared = calls.agree(method, [x], segments, keys[0])
            bound = method.claims.error_bound(x, Context(segments, shared))
            if bound is None:
                why = "`contractive` requires the claim `error_bound`; `delta` does not replace it"
                return Measurement("no error_bound", "the declared bound", False, why)
            delta = method.claims.delta(segments)
            if delta is not None and name != "denormal":
                bound = min(bound, (1 - delta) * size * (1 + 1e-6))
            for few in (keys[:12], keys):
                errors = [
                    oracle.energy(x.double() - calls.round_trip(method, x, segments, key))
                    for key in few
                ]
                mean = math.fsum(errors) / len(errors)
                if mean <= bound:
                    break
            if refutes_bound(errors, bound, size):
                faults.append(f"{name}: {mean:.4g} above {bound:.4g}")
            if bound > size * (1 + 1e-6) or (name == "normal" and not bound < size):
                faults.append(f"{name}: the bound {bound:.4g} is not below ||x||^2 = {size:.4g}")
            if size:
                worst = max(worst, mean / size)
    if isinstance(method, MultiRoundCompressor):
        faults += _stuck(method)
    elif random:
        faults += [*_seldom(method), *_absent(method)]
    faults += _wrong_errors(method)
    return Measurement(
        f"{worst:.4f} at most", "the declared bound", not faults, "; ".join(faults[:2])
    )


def _seldom(method: Compressor) -> Iterator[str]:
    """Yield where the error of many draws is above the bound, as of an element never drawn."""
    place = torch.arange(100)
    for name, x in (
        ("normal", inputs.normal(100)),
        ("the first element alone", (place == 0).float()),
        ("the last element alone", (place == 99).float()),
    ):
        decoded, target, whole, ctx = _drawn_alone(method, x)
        size, bound = oracle.energy(x), method.claims.error_bound(whole, ctx)
        if bound is not None:
            bound *= size / oracle.energy(whole)
            errors = (decoded - target).square().sum(1)
            if refutes_bound(errors.tolist(), bound, size):
                mean = float(errors.mean())
                yield f"{name}, {len(errors):,} draws: {mean:.4g} above {bound:.4g}"


def _absent(method: Compressor) -> Iterator[str]:
    """Yield where elements of longer tensors never arrive from a random method.

    Each draw has other values. Stretches of 1, 8 and 64 elements are tried, if `OFTEN` draws are
    expected to send something of each: then none does with a probability of exp(-OFTEN).
    """
    for n, count in ARRIVING.items():
        segments, arrived = calls.segments_of(method, [(n,)]), []
        for step in range(count):
            x = inputs.values(n, 7919 * step) + 1e-3
            arrived.append(calls.round_trip(method, x, segments, Key(5, step, 0)) != 0)
        for width in (1, 8, 64):
            hits = torch.stack([each[n % width :].view(-1, width).any(1) for each in arrived])
            never = (~hits.any(0)).nonzero()
            if len(never) and float(hits.double().mean()) * count >= OFTEN:
                first = int(never[0]) * width + n % width
                yield f"of {n:,} elements nothing arrives from {first:,} on, in {count} draws"
                return


def _wrong_errors(method: Compressor) -> Iterator[str]:
    """Yield for which relative errors `with_error` returns a method of a larger one."""
    x = inputs.normal(2000)
    for alpha in (0.3, 0.5, 0.7):
        other = method.claims.with_error(alpha)
        if other is None:
            return
        segments = calls.segments_of(other, [(2000,)])
        actual = math.sqrt(
            oracle.error_energy(x, calls.round_trip(other, x, segments)) / oracle.energy(x)
        )
        if actual > 1.1 * alpha:
            yield f"with_error({alpha}): {other!r} has a relative error of {actual:.3g}"


def _stuck(method: MultiRoundCompressor) -> Iterator[str]:
    """Yield after which steps, or of how many workers, a method in rounds reduces the error little.

    The declared bound is that of the initial state. After steps with other gradients, normal input
    must have at least half of the reduction, in the mean of 12 draws. So must the mean of `UNLIKE`
    workers with independent normal gradients in the first step: a mean of bases is not a basis.

    Of `UNLIKE` workers, PowerSGD is 18 standard errors or more above the limit (below 1e-70).
    """
    cases = {f"after {name}": (steps, scale, 1) for name, (steps, scale) in EARLIER.items()}
    cases[f"of the mean of {UNLIKE} unlike workers"] = (0, 0.0, UNLIKE)
    segments, running = calls.segments_of(method, [(40, 50)]), calls.Calls(method)
    for name, (steps, scale, workers) in cases.items():
        actual = declared = 0.0
        for draw in range(12):
            xs = [inputs.normal(2000, draw + 1000 * rank) for rank in range(workers)]
            key, out = Key(7, draw, 0), torch.zeros(2000)
            state = running.initial_state(segments, key)
            for step in range(steps):
                earlier, at = scale * inputs.normal(2000, 100 + draw + 12 * step), draw + step
                moved = running.rounds([earlier], segments, state, key._replace(step=at), out)
                ((_, state),) = moved
            at = draw + steps
            ((mean, _), *_) = running.rounds(xs, segments, state, key._replace(step=at), out)
            x = torch.stack(xs).mean(0)
            size = oracle.energy(x)
            bound = method.claims.error_bound(x, Context(segments, state)) or 0.0
            actual += (1 - oracle.error_energy(x, mean) / size) / 12
            declared += (1 - bound / size) / 12
        if not actual >= declared / 2:
            yield (
                f"{name} {actual:.4g} of ||x||^2 is sent; at least "
                f"half of the declared {declared:.4g} is expected"
            )


def gaussian_error(method: Compressor) -> Measurement:
    """The relative error on normal input is the analytic one within 1 %, in both directions."""
    expected = method.claims.gaussian_error
    if expected is None:
        raise NotDeclaredError("no closed form")
    segments = calls.segments_of(method, [(1024, 1024)])
    runs = []
    for seed in range(3):
        x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(seed))
        error = (x - calls.round_trip(method, x, segments, Key(seed, 3, 0))).double().square().sum()
        runs.append(float(error / x.double().square().sum()))
    measured = torch.tensor(runs, dtype=torch.float64)
    off = abs(float(measured.mean()) - expected)
    # With few selected elements the estimate scatters by more than 1 %: allow four standard errors.
    allowed = max(0.01 * expected, 4 * float(measured.std()) / math.sqrt(3), 1e-12)
    return Measurement(
        f"{float(measured.mean()):.5f}", f"{expected:.5f} within {allowed:.2g}", off <= allowed
    )


def fair_ties(method: Compressor) -> Measurement:
    """A fair coin decides tied votes, with independent draws at each step.

    The vote of workers with x, -x, x, -x, ... is tied everywhere. A fair coin is beyond Z standard
    deviations with a probability of 4e-8.
    """
    if method.claims.aggregate != "vote":
        raise NotDeclaredError("the aggregate is not a vote")
    faults, counted = [], 0
    for workers in (2, 4):
        coins, signs = _coins(method, workers)
        limit, counted = Z / math.sqrt(len(signs)), counted + len(signs)
        means = (
            ("ties favor one sign", float(coins[0].mean())),
            ("ties at two steps are correlated", float((coins[0] * coins[1]).mean())),
            ("ties follow worker 0", float((coins[0] * signs).mean())),
        )
        faults += [
            f"{workers} workers: {what}: {mean:+.3f}" for what, mean in means if abs(mean) > limit
        ]
    return Measurement("; ".join(faults) or f"{counted:,} ties", f"{limit:.3f}", not faults)


def _coins(method: Compressor, workers: int) -> tuple[list[Tensor], Tensor]:
    """Return the results of tied votes at two steps, and the signs of worker 0, float32, 1-D."""
    segments = calls.segments_of(method, [(COIN_DRAWS,)])
    x = inputs.normal(COIN_DRAWS, 40)
    xs = [x, -x] * (workers // 2)
    ctx = Context(segments, calls.agree(method, xs, segments), calls.KEY, workers=workers)
    payloads = [
        codec.encode(method, one, ctx._replace(key=calls.KEY._replace(rank=rank)))
        for rank, one in enumerate(xs)
    ]
    decoded = [codec.decode(method, payload, ctx).clone() for payload in payloads]
    defined = method.claims.aggregated(decoded, ctx)
    if defined is None or not bool(defined.isnan().any()):
        raise NotDeclaredError("ties are not decided by a coin")
    tied = defined.isnan()
    coins = [
        codec.decode(
            method,
            codec.merge(method, payloads, ctx._replace(key=Key(7, step, 0, 0, 1))),
            ctx._replace(key=Key(7, step, 0)),
        )[tied]
        for step in (3, 4)
    ]
    return coins, x[tied].sign()
