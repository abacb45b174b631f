"""Checks of the contract: does a compressor do what it declares?

Each check depends on what the method declares and never on its name, so that plug-ins of third
parties are checked in the same way. `gcbench verify NAME` prints the table; test_contract.py runs
all checks on all registered methods.

Statistical checks have fixed seeds. "unbiased" and "variance" each refuse a correct method with a
probability below 2e-5, over all coordinates: the exact binomial distribution for codes that choose
between two values, the normal one for means over many coordinates.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gcbench import ops
from gcbench.core import codec, exchange, memory, purposes, registry
from gcbench.core.clock import Clock
from gcbench.core.compressor import (
    COLLECTIVES,
    TILE,
    Compressor,
    Context,
    Key,
    MultiRoundCompressor,
    Payload,
    Segments,
    cuttable,
    fuses_feedback,
    layout_bytes,
    requantizes,
)
from gcbench.core.errors import GcbenchError, Interrupted, PayloadError, UsageError
from gcbench.core.exchange import Exchange, Lane
from gcbench.core.rule import UpdateRule
from gcbench.core.world import Link, SimulatedWorld, World
from gcbench.training import launch
from gcbench.training.rank import Rank

SIZES = (0, 1, 31, 32, 33, 1023, 1025, 10_007)
LONG = ((1050, 1000), (33,), (50_001,))
"""More than a million elements, for errors that appear only far from the beginning."""
FAR = ((4201, 4129),)
"""Of 32 stretches the last lies beyond 2^24, where float32 does not hold every position."""
TENSORS = tuple(
    [((3, 7), (5,), (40,), (), (2, 3, 3, 3), (1,), (33, 4), (64,))[i % 8] for i in range(300)]
)
"""A model of 300 tensors, for errors that appear only behind the first few, or the first 256."""
STRETCHES = 32
SHAPES = ((3, 5), (0,), (1,), (), (40, 33), (7,), (2, 3, 3, 3), (1030,), (0, 4))
"""Shapes of a test bucket: empty, of one element, a scalar, matrices, a kernel, vectors."""
WORKERS = (1, 2, 3, 5, 8, 64)
HEARD = (1, 2, 3, 4, 5, 6, 8, 16)
"""Workers whose payloads must count, one by one."""
TOSSES = 20_000
"""Tied votes, at least, whose coin is tested."""
MANY = 401
"""Workers whose codes of up to 127 do not add up in 16 bits, and whose votes change sign in 8."""
KEY = Key(seed=7, step=3, rank=0)
LATE = Key(seed=7, step=1_000_003, rank=77)
"""A key of a step and a rank that few tests reach."""
Z = 5.5
"""Standard deviations: a normal variable lies outside with probability 4e-8, one of 64 with 2e-6"""
DRAWS = 4000
SCALES = (0, -30, 30)
"""Powers of two by which the magnitudes of "unbiased" are multiplied."""
STEPS = 200
FIRST = Key(seed=1, step=1, rank=0)
APART: Mapping[str, tuple[Key, ...]] = {
    "seeds": tuple(Key(2**k, 0, 0) for k in (0, 1, 8, 16, 31)),
    "steps": tuple(Key(0, 2**k, 0) for k in (0, 1, 6, 8, 16, 24)),
    "ranks": tuple(Key(0, 0, 2**k) for k in (0, 1, 2, 6, 8, 16)),
    "offsets": tuple(Key(0, 0, 0, TILE * 2**k) for k in (0, 1, 8, 10, 20)),
    "streams": (Key(0, 0, 0, 0, purposes.MERGE),),
}
"""What is added to a key, by its field, for numbers that must be drawn apart."""
AGAIN = 24
"""Other keys at which two additions must draw alike, too, to be refused."""
ROWS = 0.004
"""Correlation of the draws of neighbouring rows (`ops.random`)."""
UNLIKELY = 30.0
"""By Bernstein's inequality a correlation of independent noise is beyond what is allowed with a
probability of 2 exp(-30), and one of 2^15 with 6e-9."""


PLAIN = UpdateRule()


class Outcome(NamedTuple):
    """The result of one check, a row of the table."""

    check: str
    measured: str
    bound: str
    verdict: str
    """"holds", "fails", or "not declared" with the reason in `note`."""
    note: str = ""


class _NotDeclaredError(Exception):
    """The method does not declare the property that a check is about."""


class _Found(NamedTuple):
    measured: object
    bound: object
    holds: bool
    note: str = ""


# ---- inputs --------------------------------------------------------------------------------------


def normal(n: int, seed: int = 0) -> Tensor:
    """Return n independent, nearly normal values of variance 1, float32, shape (n,).

    Twelve uniform draws each, added as integers: the same bits on every machine.
    """
    total = torch.zeros(n, dtype=torch.int64)
    for part in range(12):
        total += ops.random.draws24(Key(seed, part, 0, 0, 255), n)
    return (total - 6 * 2**24).float() * 2.0**-24


@cache
def _many(shapes: Sequence[Sequence[int]]) -> Tensor:
    """Return normal values of the tensors of `LONG`, or `FAR`; whoever changes them takes a copy.

    Those of `FAR` repeat after a stretch of odd length.
    """
    n, own = sum(map(math.prod, shapes)), sum(map(math.prod, LONG))
    values = normal(min(n, own))
    return values if n <= own else values[: own - 1].repeat(-(-n // (own - 1)))[:n]


def _denormal(n: int) -> Tensor:
    return torch.full((n,), 1e-42) * (1 - 2 * (torch.arange(n) % 2))


def inputs(n: int) -> Iterator[tuple[str, Tensor]]:
    """Yield test inputs with their names, each float32, shape (n,)."""
    x = normal(n)
    spike = torch.zeros(n)
    spike[n // 2 : n // 2 + 1] = -3.0
    yield "normal", x
    yield "zeros", torch.zeros(n)
    yield "one nonzero", spike
    yield "constant", torch.full((n,), 0.7)
    yield "negative constant", torch.full((n,), -2.5)
    yield "denormal", _denormal(n)
    yield "huge", x * 1e30
    yield "small", x * 1e-7
    yield "mixed scales", x * torch.pow(10.0, (torch.arange(n) % 13 - 6).float())
    yield "heavy tails", x**5


def _refined(segments: Segments) -> Segments:
    """Return the segments, cut also at tiles: every shard of an exchange has whole such pieces."""
    edges = {*segments.offsets, *range(0, segments.numel, TILE)}
    return Segments(tuple(sorted(edges)))


def _with_extreme(segments: Segments, low: int, high: int, seed: int) -> Tensor:
    """Return integers from low to high, with low or high at the start of every segment."""
    n = segments.numel
    draws = ops.random.draws24(Key(seed, 0, 0, 0, 254), n).long()
    values = low + draws % (high - low + 1)
    starts = [s for s, length in zip(segments.offsets, segments.lengths, strict=False) if length]
    values[starts] = torch.where(draws[starts] % 2 == 0, low, high)
    return values.float()


def _signs(segments: Segments, seed: int) -> Tensor:
    return 1.0 - 2.0 * (ops.random.draws24(Key(seed, 0, 0, 0, 254), segments.numel) % 2).float()


def _sparse(segments: Segments, seed: int) -> Tensor:
    out = torch.zeros(segments.numel)
    draws = ops.random.draws24(Key(seed, 1, 0, 0, 254), len(segments)).tolist()
    spans = zip(segments.offsets, segments.lengths, draws, strict=False)
    for start, length, draw in spans:
        if length:
            out[start + draw % length] = (1 + draw % 7) * (1 - 2 * (draw % 2))
    return out


def _of_rank(rank: int) -> Callable[[Segments, int], Tensor]:
    """Return a function that makes matrices of this rank at most, sums of products of signs."""

    def make(segments: Segments, seed: int) -> Tensor:
        out = _signs(segments, seed)
        for start, shape in segments.tensors:
            n, size = shape[0] if shape else 1, math.prod(shape)
            if len(shape) > 1 and size:
                place, m = slice(start, start + size), size // n
                draws = ops.random.draws24(Key(seed, 2, 0, start, 254), rank * (n + m)) % 2
                signs = (1.0 - 2.0 * draws).view(rank, n + m)
                weights = torch.arange(1.0, rank + 1)[:, None]
                product = (weights * signs[:, :n]).T @ signs[:, n:]
                out[place] = product.reshape(-1)
        return out

    return make


FAMILIES: Mapping[str, Callable[[Segments, int], Tensor]] = {
    "signs": _signs,
    "ternary": lambda segments, seed: _with_extreme(_refined(segments), -1, 1, seed),
    "integers": lambda segments, seed: _with_extreme(_refined(segments), -7, 7, seed),
    "bytes": lambda segments, seed: _with_extreme(_refined(segments), -127, 127, seed),
    "sparse": _sparse,
    **{f"rank {rank}": _of_rank(rank) for rank in (1, 2, 4)},
}
"""Families of inputs that a method may declare to transmit exactly (`Claims.exact_for`): +-1; {-1,
0, 1} and integers up to 7 and to 127 in magnitude, with an extreme in every segment; one nonzero
integer in every segment; matrices of integers of a low rank, with vectors of +-1. What is not
portable, whose last bits a library decides, transmits them up to rounding, 1e-5 of the largest."""


# ---- running a method ----------------------------------------------------------------------------


def _shared(method: Compressor, xs: Sequence[Tensor], segments: Segments, key: Key) -> Tensor:
    """Return the `shared` tensor on which the engine would agree for these workers."""
    return codec.agree(method, xs, Context(segments, key=key))[0]


def _encode(
    method: Compressor, x: Tensor, segments: Segments, key: Key = KEY
) -> tuple[Payload, Tensor]:
    shared = _shared(method, [x], segments, key)
    return codec.encode(method, x, Context(segments, shared, key)), shared


def _pass(method: Compressor, x: Tensor, segments: Segments, key: Key = KEY) -> Tensor:
    """Return x encoded and decoded."""
    payload, shared = _encode(method, x, segments, key)
    return codec.decode(method, payload, Context(segments, shared))


def _segments(method: Compressor, shapes: Sequence[Sequence[int]]) -> Segments:
    return Segments.of(shapes, method.granularity)


def _mean(
    method: Compressor,
    collective: str,
    xs: Sequence[Tensor],
    shapes: Sequence[Sequence[int]],
) -> Tensor:
    """Return the mean of the workers' gradients as the engine would exchange them."""
    return next(_exchanged(method, collective, [xs], shapes, memory.Memory())[0])


def _exchanged(
    method: Compressor,
    collective: str,
    steps: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[int]],
    kept: memory.Memory,
    rule: UpdateRule = PLAIN,
) -> tuple[Iterator[Tensor], Exchange]:
    world = SimulatedWorld(len(steps[0]), torch.device("cpu"), Link(10, 50), 1, 1)
    clock = Clock(world.device)
    clock.start_step()
    lane = Lane(method, collective, 0, _segments(method, shapes), kept, rule=rule)
    made = Exchange(world, [lane], 7, clock)
    return (made.mean(list(xs), step) for step, xs in enumerate(steps)), made


WARM_UP = 3
"""Steps in fp32 before those in which memory and update rule are checked."""
RULE_SHAPES = ((40, 33), (7,), (1030,))


def _steps(
    method: Compressor, code: Compressor, steps: Sequence[Sequence[Tensor]], *, resume: bool = False
) -> Iterator[Tensor]:
    """Yield what a method's memory and update rule make of these gradients, step by step.

    After `WARM_UP` steps in fp32, gradients are exchanged by `code`. `resume`: a step later a new
    exchange goes on from copies of all buffers, as after a checkpoint.
    """
    kept, collective = memory.of(method), code.legal_collectives()[0]
    exact = exchange.lane_of(RULE_SHAPES, 0, method, collective, kept, exact=True)
    lossy = Lane(code, collective, 0, _segments(code, RULE_SHAPES), kept, rule=method.rule)

    def make(step: int) -> Exchange:
        world = SimulatedWorld(len(steps[0]), torch.device("cpu"), Link(10, 50), 1, 1)
        clock = Clock(world.device)
        clock.start_step()
        return Exchange(world, [exact if step < WARM_UP else lossy], 7, clock)

    made = make(0)
    for step, xs in enumerate(steps):
        if step == WARM_UP:
            made.change([lossy])
        yield made.mean(list(xs), step).clone()
        if resume and step == WARM_UP:
            later = make(0)
            later.change([lossy])
            for worker in range(len(xs)):
                later.load_state_dict(made.state_dict(worker), worker)
            made = later


def by_definition(method: Compressor) -> Compressor:
    """Return the method with the default `mean` and `encode_feedback`.

    The defaults are the definitions of these operations, which a method may override by faster
    ones. Decoding is the method's own, which may use its own mean. If the aggregate is no mean the
    method itself defines it, and is returned as it is.
    """
    if method.claims.aggregate != "mean" or isinstance(method, MultiRoundCompressor):
        return method
    steps = {name: vars(Compressor)[name] for name in ("mean", "encode_feedback")}
    made = copy.copy(method)
    steps["decode"] = staticmethod(method.decode)
    kind = type(type(method).__name__, (type(method),), steps)
    object.__setattr__(made, "__class__", kind)  # the dataclass is frozen
    return made


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same bits: -0.0 and 0.0 differ."""
    return a.shape == b.shape and a.dtype == b.dtype and _raw(a) == _raw(b)


def _raw(x: Tensor) -> bytes:
    return x.contiguous().numpy().tobytes()


# ---- checks --------------------------------------------------------------------------------------


def _pure(method: Compressor) -> _Found:
    """The same arguments give the same bytes; inputs and global generators stay untouched."""
    segments = _segments(method, SHAPES)
    x = normal(segments.numel)
    before, state = x.clone(), torch.random.get_rng_state()
    faults = []
    payload, shared = _encode(method, x, segments)
    again, _ = _encode(method, x, segments)
    kept = payload.to_bytes().clone()
    decoded = codec.decode(method, payload, Context(segments, shared))
    twice = codec.decode(method, payload, Context(segments, shared))
    if not _same(payload.to_bytes(), again.to_bytes()):
        faults.append("two encodings differ")
    if not _same(decoded, twice):
        faults.append("two decodings differ")
    if not _same(kept, payload.to_bytes()):
        faults.append("decode changes the payload")
    codec.mean(method, [payload] * 3, Context(segments, shared))  # three: no tie needs a coin
    if not _same(kept, payload.to_bytes()):
        faults.append("mean changes a payload")
    if not _same(x, before):
        faults.append("x was changed")
    if not torch.equal(state, torch.random.get_rng_state()):
        faults.append("the global generator was used")
    if _remembers(method, segments):
        faults.append("what was encoded or decoded before changes the result")
    faults += [
        f"a part of {part.dtype}, shape {tuple(part.shape)}"
        for part in payload.parts
        if part.ndim != 1 or not part.is_contiguous() or part.element_size() > 4
    ]
    return _Found(", ".join(faults) or "0 faults", "0 faults", not faults)


def _remembers(method: Compressor, segments: Segments) -> bool:
    """Return whether results depend on earlier calls with other steps, ranks and gradients."""
    keys = [Key(7, step, rank) for step in (3, 4) for rank in (0, 1)]
    xs = [normal(segments.numel, 20 + i) for i in range(len(keys))]
    first = []
    for x, key in zip(xs, keys, strict=True):
        payload, shared = _encode(method, x, segments, key)
        decoded = codec.decode(method, payload, Context(segments, shared)).clone()
        first.append((payload.to_bytes().clone(), decoded))
    made = [_encode(method, x, segments, key) for x, key in zip(xs, keys, strict=True)][::-1]
    again = [
        (payload.to_bytes(), codec.decode(method, payload, Context(segments, shared)))
        for payload, shared in made
    ]
    return not all(
        _same(a, c) and _same(b, d) for (a, b), (c, d) in zip(first, reversed(again), strict=True)
    )


def _sizes(method: Compressor) -> _Found:
    """Every size and test input gives finite values, and the declared number of bits."""
    shapes: list[Sequence[Sequence[int]]] = [[(n,)] for n in SIZES]
    shapes += [SHAPES, [(33, 31)]]
    done, faults = 0, []
    for tensors in shapes:
        segments = _segments(method, tensors)
        declared = codec.bits(method, segments)
        for name, x in inputs(segments.numel):
            payload, shared = _encode(method, x, segments)
            decoded = codec.decode(method, payload, Context(segments, shared))
            what = f"{name} of {segments.numel}"
            if decoded.shape != x.shape or decoded.dtype != torch.float32:
                faults.append(f"{what}: {decoded.dtype} {tuple(decoded.shape)}")
            elif not decoded.isfinite().all():
                faults.append(f"{what}: not finite")
            if declared is not None and declared != 8 * payload.nbytes:
                faults.append(f"{what}: {8 * payload.nbytes} bits, {declared} declared")
            done += 1
    return _Found("; ".join(faults[:3]) or f"{done} inputs right", f"{done} inputs", not faults)


def _long(method: Compressor) -> _Found:
    """Of more than a million elements all parts arrive: in each stretch, <decoded, x> is above 0.

    Of an unbiased method <decoded - t, t> is 0 in each stretch within Z standard deviations, t
    being the target: by the declared variance of independent elements, or, if that is more, by the
    scatter of 64 parts of the stretch. What contracts without draws is held to `error_bound`, and
    signs are compared one by one. With its defaults a method gets more than 2^24 elements as well,
    at a late step and of another rank.
    """
    found = _arrived(method, LONG)
    if not found.holds or method != type(method)():
        return found
    return _arrived(method, FAR, LATE)


def _arrived(method: Compressor, shapes: Sequence[Sequence[int]], key: Key = KEY) -> _Found:
    segments, x = _segments(method, shapes), _many(shapes).clone()
    payload, shared = _encode(method, x, segments, key)
    arrived = codec.decode(method, payload, Context(segments, shared))
    along = torch.stack([part.sum() for part in (arrived.double() * x).tensor_split(STRETCHES)])
    wrong, notes = ~(along > 0), []
    if bool(wrong.any()):
        notes.append("nothing arrives")
    if method.claims.unbiased:
        v = method.claims.variance(x, Context(segments, shared))
        v = torch.zeros(len(x)) if v is None else v
        biased = _biased(arrived, method.claims.target(x, Context(segments, shared)), v)
        wrong |= biased
        if bool(biased.any()):
            notes.append("the mean is not the target")
    if method.claims.signs:
        other = torch.stack([p.any() for p in (arrived != x.sign()).tensor_split(STRETCHES)])
        wrong |= other
        if bool(other.any()):
            notes.append("other signs")
    lost = wrong.nonzero().flatten().tolist()
    notes = [f"{', '.join(notes)}: of the stretches {lost}"] if lost else []
    if method.claims.contractive and not _random(method):
        error, bound = (
            _energy(x.double() - arrived),
            method.claims.error_bound(x, Context(segments)),
        )
        if bound is not None and _beyond([error], bound, _energy(x)):
            notes.append(f"||x - C(x)||^2 = {error:.6g} is above {bound:.6g}")
    right = f"{STRETCHES - len(lost)} of {STRETCHES} stretches of {segments.numel:,} elements"
    return _Found(right, "all", not notes, "; ".join(notes))


def _biased(arrived: Tensor, target: Tensor, variance: Tensor) -> Tensor:
    """Return in which stretches <arrived - t, t> is beyond Z standard deviations, shape (32,).

    A correct method is refused with a probability of 1e-6 (normal approximation, 32 stretches).
    """
    t, e = target.double(), arrived.double() - target
    found = []
    for own, off, v in zip(*(y.tensor_split(STRETCHES) for y in (t, e, variance)), strict=True):
        parts = torch.stack([part.sum() for part in (own * off).tensor_split(64)])
        declared = float(own.square() @ v.double())
        sd = math.sqrt(max(declared, 64 * float(parts.var())))
        found.append(abs(float(parts.sum())) > Z * sd + 1e-6 * float(own.square().sum()))
    return torch.tensor(found)


def _threads(method: Compressor) -> _Found:
    """The bytes, and what they decode to, are the same with one thread as with two."""
    if not method.claims.portable:
        raise _NotDeclaredError("a library decides its last bits")
    segments, x = _segments(method, LONG), _many(LONG).clone()
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            payload, shared = _encode(method, x, segments)
            decoded = codec.decode(method, payload, Context(segments, shared))
            found.append((_raw(payload.to_bytes()), _raw(decoded)))
    finally:
        torch.set_num_threads(before)
    pairs = zip(("payload", "decoded values"), *found, strict=True)
    wrong = [f"other {what}" for what, one, two in pairs if one != two]
    return _Found(", ".join(wrong) or f"{segments.numel:,} elements", "the same bits", not wrong)


def _nominal(method: Compressor) -> _Found:
    """The bits that the source quotes are within a factor of two of those that are sent.

    If fields are not at their defaults the factor is four: the source may quote another format.
    """
    nominal = method.claims.nominal_bits
    if nominal is None:
        raise _NotDeclaredError("the source quotes no number of bits")
    segments = _segments(method, LONG)
    payload, _ = _encode(method, _many(LONG).clone(), segments)
    sent = 8 * payload.nbytes / segments.numel
    factor = 2 if method == type(method)() else 4
    low, high = nominal / factor, nominal * factor
    return _Found(f"{sent:.3f} bits an element", f"{low:.3f} to {high:.3f}", low <= sent <= high)


def _bytes(method: Compressor) -> _Found:
    """A payload restored from its bytes decodes to the same bits; merged ones have their size.

    So does each shard of a payload that is cut.
    """
    segments = _segments(method, SHAPES)
    x = normal(segments.numel)
    payload, shared = _encode(method, x, segments)
    moved = Payload.from_bytes(payload.to_bytes(), payload.layout)
    decoded = codec.decode(method, payload, Context(segments, shared))
    same = _same(decoded, codec.decode(method, moved, Context(segments, shared)))
    faults = [] if same else ["other values after bytes"]
    if "twoshot" in method.legal_collectives():
        if cuttable(method) and _miscut(method, payload, segments, shared):
            faults.append("other values after a cut")
        payloads = [
            codec.encode(method, x, Context(segments, shared, Key(7, 3, r))) for r in range(5)
        ]
        merged = codec.merge(method, payloads, Context(segments, shared, Key(7, 3, 0, 0, 1)))
        declared = codec.bits(method, segments, 5)
        if merged.count != 5:
            faults.append(f"merged count {merged.count} of 5")
        if declared is not None and declared != 8 * merged.nbytes:
            faults.append(f"merged: {8 * merged.nbytes} bits, {declared} declared")
    bits = 8 * payload.nbytes / segments.numel
    return _Found(", ".join(faults) or f"{bits:.3f} bits an element", "as declared", not faults)


def _miscut(method: Compressor, payload: Payload, segments: Segments, shared: Tensor) -> bool:
    """Return whether a shard of the payload decodes to other values than the whole has there."""
    decoded = codec.decode(method, payload, Context(segments, shared))
    bounds = [*range(0, segments.numel, TILE), segments.numel]
    wrong = False
    edges = itertools.pairwise(bounds)
    for (start, stop), piece in zip(edges, method.cut(payload, bounds), strict=True):
        inside, which = segments.shard(start, stop)
        own = shared[which.start : which.stop] if shared.numel() else shared
        wrong |= not _same(codec.decode(method, piece, Context(inside, own)), decoded[start:stop])
    return wrong


def _bucketing(method: Compressor) -> _Found:
    """A tensor arrives as the same bits alone (at its place) and in a bucket with others.

    Of two long tensors, and of 300 short ones.
    """
    if method.granularity == "model":
        raise _NotDeclaredError("one segment spans all tensors")
    if isinstance(method, MultiRoundCompressor):
        raise _NotDeclaredError("the state of all tensors is drawn as one")
    wrong = 0
    for shapes in (((2, TILE // 2), (TILE + 206,)), TENSORS):
        segments = _segments(method, shapes)
        x = normal(segments.numel)
        together = _pass(method, x, segments)
        for start, shape in segments.tensors:
            stop, key = start + math.prod(shape), KEY._replace(offset=start)
            alone = _pass(method, x[start:stop], _segments(method, [shape]), key)
            wrong += int((alone != together[start:stop]).sum())
    why = "blocks must start again at each segment" if wrong else ""
    return _Found(f"{wrong} elements differ", "0", wrong == 0, why)


def _independent(method: Compressor) -> _Found:
    """Noise differs between keys, as averaging would not help otherwise, and between elements.

    The keys are of several seeds, steps, ranks, offsets and purposes; if one is ignored, cut short
    or added to another, two of them draw alike. Elements are compared where a variance is declared.
    """
    keys = _keys(method)
    drawn = _drawn_at(method, FIRST, keys)
    if len(set(drawn)) == 1:
        raise _NotDeclaredError("draws no random numbers")
    faults = []
    for i, (what, key) in enumerate(keys):
        other, twin = keys[drawn.index(drawn[i])]
        if twin != key and _always(method, (other, twin), (what, key)):
            faults.append(f"{_told(key)} and {_told(twin)} draw alike")
    found, bound = _correlation(method)
    if found > bound:
        faults.append(f"elements apart have a correlation of {found:.2f}, {bound:.2f} allowed")
    fields = ", ".join(dict.fromkeys(what for what, _ in keys[1:]))
    right = f"{len(keys)} keys differ"
    return _Found("; ".join(faults[:3]) or right, "all differ", not faults, fields)


def _told(added: Key) -> str:
    fields = zip(added._fields, added, strict=True)
    return "the first" if added == NOTHING else ", ".join(f"{n} + {by}" for n, by in fields if by)


NOTHING = Key(0, 0, 0)


def _keys(method: Compressor) -> list[tuple[str, Key]]:
    """Return the additions of `APART` that must draw apart, with their fields; first comes none.

    All workers draw `shared` alike, on purpose; what is in rounds is drawn for the whole bucket;
    and none but an owner that encodes the mean again draws for a second purpose.
    """
    left_out = set()
    if method.draw_shared(Context(_segments(method, [(4,)]), key=FIRST)) is not None:
        left_out = {"ranks", "streams"}
    if isinstance(method, MultiRoundCompressor):
        left_out.add("offsets")
    if "twoshot" not in method.legal_collectives() or not requantizes(method):
        left_out.add("streams")
    return [
        ("", NOTHING),
        *((what, key) for what, keys in APART.items() if what not in left_out for key in keys),
    ]


def _drawn_at(method: Compressor, first: Key, keys: Sequence[tuple[str, Key]]) -> list[bytes]:
    """Return what arrives of the same 2000 values with each of the keys `first` + an addition."""
    segments, x = _segments(method, [(40, 50)]), normal(2000)
    added = [Key(*map(sum, zip(first, key, strict=True))) for _, key in keys]
    return [_raw(_pass(method, x, segments, key)) for key in added]


def _always(method: Compressor, *keys: tuple[str, Key]) -> bool:
    """Return whether two additions draw alike at all of `AGAIN` other keys, even or odd.

    Numbers of few values are alike by chance, too: with the probability p at one key, but p^24 at
    all of these. Even and odd keys are apart, as the steps 2k and 2k + 1 may share a draw where 2k
    + 1 and 2k + 2 do not.
    """
    return any(
        all(
            len(set(_drawn_at(method, Key(11 + i, 7 + 101 * i, 3 * i, 5 * TILE * i), keys))) == 1
            for i in range(odd, 2 * AGAIN, 2)
        )
        for odd in (0, 1)
    )


def _random(method: Compressor) -> bool:
    """Return whether the method draws random numbers: whether any of the keys matters."""
    return len(set(_drawn_at(method, FIRST, _keys(method)))) > 1


def _correlation(method: Compressor) -> tuple[float, float]:
    """Return the largest correlation of the noise of elements apart, and the largest allowed.

    Neighbours may be drawn together, as in blocks: what is allowed then counts fewer draws
    (Bartlett's formula), and lags below the first without correlation are left out.
    """
    n = 1 << 16
    segments, x = _segments(method, [(n,)]), normal(n)
    payload, shared = _encode(method, x, segments, FIRST)
    v = method.claims.variance(x, Context(segments, shared)) if method.claims.unbiased else None
    if v is None or not bool((v > 0).any()):
        return 0.0, 1.0
    away = codec.decode(method, payload, Context(segments, shared)) - method.claims.target(
        x, Context(segments, shared)
    )
    e = torch.where(v > 0, away.double() / v.clamp(min=1e-300).sqrt(), 0.0).clamp(-4, 4) * x.sign()
    e -= e.mean()
    lags = torch.fft.irfft(torch.fft.rfft(e, 2 * n).abs().square())[: n // 2]
    largest = float(e.square().max() / lags[0])
    lags = (lags / lags[0]).abs()

    def allowed(squares: float) -> float:
        return ROWS + math.sqrt(2 * UNLIKELY * squares / n) + 2 / 3 * UNLIKELY * largest

    together = int((lags > allowed(1.0)).int().argmin())
    bound = allowed(2 * float(lags[:together].square().sum()) - 1)
    return float(lags[together:].max()), bound


def _sample() -> Tensor:
    """Return 64 values of magnitude 1/4 to 1, two of them zeros: no random code of them is rare."""
    draws = ops.random.uniform(Key(11, 0, 0, 0, 253), 64)
    x = (0.25 + 0.75 * draws) * _signs(Segments((0, 64)), 5)
    x[7] = x[40] = 0.0
    return x


def _bands() -> tuple[Tensor, Tensor]:
    """Return 256 values of magnitude 1 down to 2^-12, and the band of magnitude of each, 0 to 4.

    Each band has so many values that a code which rounds them to 0 or 1 at random draws at least
    30 ones among them.
    """
    band = torch.repeat_interleave(torch.arange(5), torch.tensor([36, 20, 40, 60, 100]))
    size = torch.exp2(-3.0 * band) * (1 - 0.3 * ops.random.uniform(Key(12, 0, 0, 0, 253), 256))
    return size * _signs(Segments((0, 256)), 6), band


def _drawn(method: Compressor, sample: Tensor) -> tuple[Tensor, Tensor, Tensor, Segments, Tensor]:
    """Return DRAWS decodings of one sample and their targets, both float64, shape (DRAWS, n).

    And the bucket, its segments and `shared`: the copies are tensors of one bucket, so that one
    call draws them all.
    """
    if not method.claims.unbiased:
        raise _NotDeclaredError("biased")
    n = len(sample)
    x = sample.repeat(DRAWS)
    segments = _segments(method, [(n,)] * DRAWS)
    payload, shared = _encode(method, x, segments)
    decoded = codec.decode(method, payload, Context(segments, shared)).double().view(DRAWS, n)
    target = method.claims.target(x, Context(segments, shared)).double().view(DRAWS, n)
    return decoded, target, x, segments, shared


def _unbiased(method: Compressor) -> _Found:
    """Each coordinate's mean over 4000 draws is the target, within what chance allows.

    The same holds for means over coordinates of similar magnitude, from the largest to 2^-12 of it,
    where the largest is about 1, 2^-30 or 2^30: of errors away from 0, and of errors upwards.
    """
    decoded, target, *_ = _drawn(method, _sample())
    worst = _deviations(decoded - target, 1e-7)
    values, band = _bands()
    note = ""
    for power in SCALES:
        decoded, target, *_ = _drawn(method, values * 2.0**power)
        errors = (decoded - target) * 2.0**-power
        gap = float(errors.max() - errors.min())
        for i, turned in itertools.product(range(5), (values.sign(), torch.ones(256))):
            own = (errors * turned)[:, band == i]
            off = _deviations(own.mean(1, keepdim=True), 1e-6 * 2.0 ** (-3 * i), gap / own.shape[1])
            if off > max(worst, Z):
                note = f"of elements of about 2^-{3 * i} of the largest, which is 2^{power}"
            worst = max(worst, off)
    return _Found(f"{worst:.2f} sd", f"{Z} sd", worst <= Z, note)


def _deviations(errors: Tensor, least: float, gap: float = 0.0) -> float:
    """Return the largest |mean over the draws| of errors, (DRAWS, n), in standard errors.

    A code of a probability of about 1 / DRAWS may never be drawn, so that the errors scatter too
    little: a mean may be off by Z^2 gap / (2 DRAWS) besides, where the gap is the range of all
    errors, or what is given if that is more. Of a code that chooses between two values, no further
    apart, a mean is then beyond Z with a probability of 2.4e-7 at most, whatever that of the values
    is.
    """
    rare = Z * max(gap, float(errors.max() - errors.min())) / (2 * DRAWS)
    sd = errors.std(0) / math.sqrt(DRAWS)
    return float((errors.mean(0).abs() / (sd.clamp(min=least) + rare)).max())


def _variance(method: Compressor) -> _Found:
    """The mean squared error is the declared variance, within the source's bound and `omega`.

    So is that of each coordinate, within what chance allows; see `_deviations`.
    """
    decoded, target, x, segments, shared = _drawn(method, _sample())
    declared = method.claims.variance(x, Context(segments, shared))
    if declared is None:
        raise _NotDeclaredError("no exact variance")
    squares = (decoded - target).square()
    errors = squares.sum(1)
    exact = float(declared.view(DRAWS, 64).sum(1).mean())
    z = abs(float(errors.mean()) - exact) / max(float(errors.std()) / math.sqrt(DRAWS), 1e-9)
    each = _deviations(squares - declared.double().view(DRAWS, 64), 1e-9)
    bound = method.claims.variance_bound(x, Context(segments, shared))
    total = float(declared.sum())
    within = bound is None or total <= bound * (1 + 1e-6)
    note = "" if bound is None else f"{total:.4g}, the source's bound {bound:.4g}"
    if z <= Z < each:
        note = f"of single elements; of their sum {z:.2f} sd"
    beyond = _beyond_omega(method)
    holds = max(z, each) <= Z and within and not beyond
    return _Found(f"{max(z, each):.2f} sd off {exact:.4g}", f"{Z} sd", holds, beyond or note)


def _beyond_omega(method: Compressor) -> str:
    """Return where the declared variance is above omega ||x||^2; "" if nowhere.

    Besides `inputs`, on one element among others of 2^-k of it, as for some k a code of levels
    scatters nearly as much as it can.
    """
    for n in (33, 2000):
        segments = _segments(method, [(n,)])
        omega = method.claims.omega(segments)
        if omega is None:
            return ""
        first = torch.arange(n) == 0
        alone = ((f"1 and 2^-{k}", torch.where(first, 1.0, 2.0**-k)) for k in range(1, 13))
        for name, x in itertools.chain(inputs(n), alone):
            v = method.claims.variance(x, Context(segments, _shared(method, [x], segments, KEY)))
            if name == "denormal" or v is None:
                continue
            total, most = float(v.sum()), omega * _energy(x)
            if not total <= most * (1 + 1e-6):
                return (
                    f"{name} of {n}: the variance {total:.4g} is above omega ||x||^2 = {most:.4g}"
                )
    return ""


def _contraction(method: Compressor) -> _Found:
    """||x - C(x)||^2 stays within the declared bound, and the bound below ||x||^2.

    So it does within (1 - delta) ||x||^2, but for denormals, where a delta is declared.
    Of random methods the mean of 48 draws is judged, see `_beyond`; of 12, if that is within it.
    """
    if not method.claims.contractive:
        raise _NotDeclaredError("not contractive")
    worst, faults = 0.0, []
    keys = [Key(7, step, 0) for step in range(48 if _random(method) else 1)]
    for shapes in ([(2000,)], [(40, 50)], list(SHAPES)):
        segments = _segments(method, shapes)
        for name, x in inputs(segments.numel):
            size = _energy(x)
            bound = method.claims.error_bound(x, Context(segments))
            if bound is None:
                faults.append("no error_bound")
                continue
            delta = method.claims.delta(segments)
            if delta is not None and name != "denormal":
                bound = min(bound, (1 - delta) * size * (1 + 1e-6))
            for few in (keys[:12], keys):
                errors = [_energy(x.double() - _pass(method, x, segments, key)) for key in few]
                mean = math.fsum(errors) / len(errors)
                if mean <= bound:
                    break
            if _beyond(errors, bound, size):
                faults.append(f"{name}: {mean:.4g} above {bound:.4g}")
            if bound > size * (1 + 1e-6):
                faults.append(f"{name}: the bound {bound:.4g} is above ||x||^2 = {size:.4g}")
            if size:
                worst = max(worst, mean / size)
    return _Found(f"{worst:.4f} at most", "the declared bound", not faults, "; ".join(faults[:2]))


def _energy(x: Tensor) -> float:
    return float(x.double().square().sum())


def _beyond(errors: Sequence[float], bound: float, size: float) -> bool:
    """Return whether the squared errors of x, with size ||x||^2, refute a bound on their mean.

    One error is held to the bound as it is. Of several draws it is refuted if their mean is beyond
    by Z standard errors, with the deviation that values in [0, size] may have, as few draws may
    show a smaller one by chance; or, with the probability 1e-6 of a mistake whatever the errors,
    by betting (`nonnegative`).
    """
    from gcbench.studies.bounds.claims import nonnegative

    mean, limit = math.fsum(errors) / len(errors), bound * (1 + 1e-6)
    if len(errors) == 1 or size == 0 or mean <= limit:
        return not mean <= limit
    most = math.sqrt(max(0.0, bound * (size - bound)))
    sd = float(torch.tensor(errors, dtype=torch.float64).std())
    bet = nonnegative([error / size for error in errors], "draws")
    return mean > limit + Z * max(sd, most) / math.sqrt(len(errors)) or bet.low > limit / size


def _gaussian(method: Compressor) -> _Found:
    """The relative error on normal input is the analytic one within 1 %; less is wrong, too."""
    expected = method.claims.gaussian_error
    if expected is None:
        raise _NotDeclaredError("no closed form")
    segments = _segments(method, [(1024, 1024)])
    runs = []
    for seed in range(3):
        x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(seed))
        error = (x - _pass(method, x, segments, Key(seed, 3, 0))).double().square().sum()
        runs.append(float(error / x.double().square().sum()))
    measured = torch.tensor(runs, dtype=torch.float64)
    off = abs(float(measured.mean()) - expected)
    # With few kept elements the estimate scatters by more than 1 %: allow four standard errors.
    allowed = max(0.01 * expected, 4 * float(measured.std()) / math.sqrt(3), 1e-12)
    return _Found(
        f"{float(measured.mean()):.5f}", f"{expected:.5f} within {allowed:.2g}", off <= allowed
    )


def _exact(method: Compressor) -> _Found:
    """Small integers of the declared families arrive exactly, from one worker and as a mean."""
    if not method.claims.exact_for:
        raise _NotDeclaredError("no family of inputs arrives exactly")
    shapes = [(40, 33), (0,), (1,), (1030,)]
    segments = _segments(method, shapes)
    done, faults = 0, []
    for family in method.claims.exact_for:
        make = FAMILIES[family]
        x = make(segments, 0)
        if inexact(_pass(method, x, segments), x, method.claims.portable, one=True):
            faults.append(f"{family}, one worker")
        if method.claims.aggregate == "other":
            continue  # its aggregate is no mean, and not defined by the contract
        for workers, collective in itertools.product(WORKERS, method.legal_collectives()):
            default = method.claims.exact_for[0], method.legal_collectives()[0]
            if workers > 8 and (family, collective) != default:
                continue  # many workers only with the defaults, to save time
            xs, expected = exact_mean(method, collective, family, segments, workers)
            done += 1
            if inexact(_mean(method, collective, xs, shapes), expected, method.claims.portable):
                faults.append(f"{family}, {workers} workers, {collective}")
    what = f"{done} means, {len(method.claims.exact_for)} round trips"
    return _Found(", ".join(faults[:3]) or f"{what} exact", what, not faults)


def exact_mean(
    method: Compressor, collective: str, family: str, segments: Segments, workers: int
) -> tuple[list[Tensor], Tensor]:
    """Return the workers' integers of a family that `method` transmits exactly, and their mean.

    All float32, shape (n,). For a vote the mean is the majority's sign, and NaN at ties, where
    nothing is promised.
    """
    alike = (collective == "twoshot" and requantizes(method)) or family.startswith("rank")
    xs = [FAMILIES[family](segments, 0 if alike else rank) for rank in range(workers)]
    total = torch.stack(xs).sum(0)
    if method.claims.aggregate == "vote":
        return xs, torch.where(total != 0, total.sign(), torch.nan)
    return xs, total / workers


def inexact(got: Tensor, expected: Tensor, portable: bool = True, *, one: bool = False) -> int:
    """Return how many elements differ; NaN promises nothing.

    Means of several workers may differ by the rounding of a scale, 1e-6 relative; those of `one`
    not at all. What is not portable may by 1e-5 of the largest.
    """
    promised = ~expected.isnan()
    if not portable:
        near = (got - expected).abs() <= 1e-5 * expected[promised].abs().max()
        return int((promised & ~near).sum())
    same = got == expected if one else torch.isclose(got, expected, rtol=1e-6, atol=0)
    return int((promised & ~same).sum())


def _collectives(method: Compressor) -> _Found:
    """All collectives give the same mean, bit for bit, of workers of unequal scale.

    A two-shot exchange that encodes the mean again is left out. The all-gather's mean, up to
    rounding, is that of the contract, and the others are held to it even if it is not listed.
    """
    legal = method.legal_collectives()
    judged = [name for name in legal if name != "twoshot" or not requantizes(method)]
    own = method.claims.aggregate != "mean" or isinstance(method, MultiRoundCompressor)
    if not judged or (len(judged) == 1 and (own or judged == ["allgather"])):
        raise _NotDeclaredError("one collective, or one that encodes the mean again")
    shapes = [(40, 33), (0,), (1,), (1030,)]
    wrong = 0
    for workers in (2, 3, 4, 5, 8):
        xs = [(1 + rank) * normal(40 * 33 + 1031, rank) for rank in range(workers)]
        means = [_mean(method, collective, xs, shapes) for collective in judged]
        wrong += sum(not _same(means[0], other) for other in means[1:])
        if not own and "allgather" not in judged:
            wrong += not _near(means[0], _mean(method, "allgather", xs, shapes))
    return _Found(f"{wrong} means differ", "0", wrong == 0, ", ".join(judged))


def _alike(method: Compressor) -> _Found:
    """Workers with equal gradients apply what a single worker would: the mean, not the sum."""
    common = method.draw_shared(Context(_segments(method, [(4,)]), key=KEY)) is not None
    if _random(method) and not common:
        raise _NotDeclaredError("every worker draws its own numbers")
    # In a two-shot exchange the shards' bounds depend on the number of workers.
    legal = [name for name in method.legal_collectives() if name != "twoshot"]
    if not legal:
        raise _NotDeclaredError("two-shot alone, which cuts shards by the number of workers")
    shapes = [(40, 33), (0,), (1,), (1030,)]
    x = normal(40 * 33 + 1031)
    worst = 0.0
    for collective, workers in itertools.product(legal, (2, 3, 8)):
        alone = _mean(method, collective, [x], shapes).double()
        together = _mean(method, collective, [x] * workers, shapes).double()
        worst = max(worst, float((together - alone).norm() / alone.norm()))
    return _Found(f"{worst:.1e}", "1e-5", worst < 1e-5, ", ".join(legal))


def _heard(method: Compressor) -> _Found:
    """Every worker's payload counts in the method's mean and merge, as its card says.

    The mean is that of the decoded payloads, up to rounding, a vote their majority, with ties as
    declared, and another aggregate what the method says of itself (`Claims.aggregated`), or else
    it changes with each worker's payload. The merge decodes to the same. With 1 to 16 workers, in
    a model of 300 tensors, too; of 401 workers three have payloads of their own, of nearly equal
    gradients, whose codes add up.
    """
    if isinstance(method, MultiRoundCompressor):
        raise _NotDeclaredError("the engine adds what is sent in rounds")
    own = any(getattr(type(method), f) is not getattr(Compressor, f) for f in ("mean", "merge"))
    shapes = ((40, 33), (0,), (1,), (1030,))
    faults = [fault for count in HEARD for fault in _unheard(method, count, shapes)]
    faults += [f"{fault}, 300 tensors" for fault in _unheard(method, 3, TENSORS)]
    tried = [*HEARD]
    if own and method.claims.aggregate != "other":
        tried.append(MANY)
        faults += _unheard(method, MANY, shapes)
    if method.claims.aggregate == "vote":
        faults += _unfair(method)
    if method.claims.aggregate == "mean":
        faults += _uncounted(method, shapes)
    right = f"{', '.join(map(str, tried))} workers heard"
    return _Found(", ".join(faults) or right, "the definition", not faults)


def _sent(
    method: Compressor, workers: int, shapes: Sequence[Sequence[int]]
) -> tuple[list[Tensor], list[Payload], Segments, Tensor]:
    """Return the gradients of up to 5 workers, and the payloads of all, which repeat theirs."""
    segments, few = _segments(method, shapes), min(workers, 5)
    xs = [normal(segments.numel, 30 + rank) for rank in range(few)]
    if workers == MANY:
        xs = [normal(segments.numel) + 0.1 * x for x in xs[:3]]
    shared = _shared(method, xs, segments, KEY)
    sent = [
        codec.encode(method, x, Context(segments, shared, KEY._replace(rank=rank)))
        for rank, x in enumerate(xs)
    ]
    return xs, [sent[rank % len(sent)] for rank in range(workers)], segments, shared


def _unheard(method: Compressor, workers: int, shapes: Sequence[Sequence[int]]) -> Iterator[str]:
    """Yield what is wrong with the mean and the merge of so many workers."""
    xs, payloads, segments, shared = _sent(method, workers, shapes)
    decoded = [
        codec.decode(method, payload, Context(segments, shared)).clone() for payload in payloads
    ]
    defined = method.claims.aggregated(decoded, Context(segments))

    def right(got: Tensor) -> bool:
        if defined is None:
            return got.shape == decoded[0].shape
        sure = ~defined.isnan()
        if method.claims.aggregate == "vote" and bool((got[~sure].abs() != 1).any()):
            return False
        return got.shape == defined.shape and _near(got[sure], defined[sure])

    legal = method.legal_collectives()
    mean = None
    if "allgather" in legal or requantizes(method) or workers % 2:  # an even vote may need a coin
        mean = codec.mean(method, payloads, Context(segments, shared)).clone()
        heard = right(mean)
        for rank, x in enumerate(xs if defined is None else ()):
            other = list(payloads)
            other[rank] = codec.encode(
                method, -x, Context(segments, shared, KEY._replace(rank=rank))
            )
            heard &= not torch.equal(mean, codec.mean(method, other, Context(segments, shared)))
        if not heard:
            yield f"mean of {workers} workers"
    if "twoshot" in legal:
        key = Key(7, 3, 0, 0, 1)
        merged = codec.merge(method, payloads, Context(segments, shared, key))
        if requantizes(method):
            ctx = Context(segments, shared, key)
            by_contract = codec.encode(method, codec.mean(method, payloads, ctx), ctx)
            heard = _same(merged.to_bytes(), by_contract.to_bytes())
        else:
            got = codec.decode(method, merged, Context(segments, shared))
            heard = right(got) if defined is not None or mean is None else _near(got, mean)
        if not heard:
            yield f"merge of {workers} workers"


def _uncounted(method: Compressor, shapes: Sequence[Sequence[int]]) -> Iterator[str]:
    """Yield whether a payload that stands for three workers counts as one in a mean."""
    _, payloads, segments, shared = _sent(method, 3, shapes)
    merged = payloads[-1]._replace(count=3)
    if method.layout(segments, 3) == merged.layout:
        decoded = [
            codec.decode(method, p, Context(segments, shared)).clone()
            for p in (*payloads[:2], *[merged] * 3)
        ]
        defined = method.claims.aggregated(decoded, Context(segments))
        mean = codec.mean(method, [*payloads[:2], merged], Context(segments, shared))
        if defined is None or not _near(mean, defined):
            yield "mean of a payload of three workers"


def _unfair(method: Compressor) -> Iterator[str]:
    """Yield what is wrong with the coin that decides tied votes; nothing where there is none.

    The vote of two workers, x and -x, is tied everywhere. A fair coin is beyond Z standard
    deviations with a probability of 4e-8.
    """
    segments = _segments(method, [(TOSSES,)])
    x = normal(TOSSES, 40)
    shared = _shared(method, [x, -x], segments, KEY)
    payloads = [
        codec.encode(method, one, Context(segments, shared, KEY._replace(rank=rank)))
        for rank, one in enumerate((x, -x))
    ]
    decoded = [
        codec.decode(method, payload, Context(segments, shared)).clone() for payload in payloads
    ]
    defined = method.claims.aggregated(decoded, Context(segments))
    if defined is None or not bool(defined.isnan().any()):
        return
    tied = defined.isnan()
    tosses = [
        codec.decode(
            method,
            codec.merge(method, payloads, Context(segments, shared, Key(7, step, 0, 0, 1))),
            Context(segments, shared),
        )[tied]
        for step in (3, 4)
    ]
    limit = Z / math.sqrt(int(tied.sum()))
    for what, mean in (
        ("ties are no fair coin", float(tosses[0].mean())),
        ("ties at two steps fall alike", float((tosses[0] * tosses[1]).mean())),
        ("ties follow worker 0", float((tosses[0] * x[tied].sign()).mean())),
    ):
        if abs(mean) > limit:
            yield f"{what}: {mean:+.3f} beyond {limit:.3f}"


def _near(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal up to 1e-5 of the largest element (rounding of sums)."""
    return a.shape == b.shape and bool(((a - b).abs() <= 1e-5 * b.abs().max()).all())


def _settled(method: Compressor) -> _Found:
    """After 50 steps with the same gradient the error is within `Claims.settled_error`.

    The gradient's matrices have singular values that halve.
    """
    shapes = [(24, 36), (33,), (12, 3, 3, 3)]
    segments, x = _segments(method, shapes), normal(24 * 36 + 33 + 12 * 27, 5)
    for start, shape in segments.tensors:
        if len(shape) > 1:
            place = slice(start, start + math.prod(shape))
            u, _, v = torch.linalg.svd(x[place].double().view(shape[0], -1), full_matrices=False)
            sizes = torch.exp2(-torch.arange(len(v), dtype=torch.float64))
            x[place] = (u @ (sizes[:, None] * v)).float().view(-1)
    bound = method.claims.settled_error(x, Context(segments))
    if bound is None:
        raise _NotDeclaredError("a step is like any other")
    means, _ = _exchanged(
        method, method.legal_collectives()[0], [[x]] * 50, shapes, memory.Memory()
    )
    error = [_energy(x.double() - mean) for mean in means][-1]
    return _Found(f"{error:.4g}", f"{bound:.4g}", error <= bound)


def _telescoping(method: Compressor) -> _Found:
    """Means applied + residuals (of workers and owners) = sum of the mean gradients, 200 steps.

    50 steps for collectives and configurations other than the default.
    """
    if not method.claims.contractive:
        raise _NotDeclaredError("not contractive")
    if method.claims.aggregate != "mean":
        raise _NotDeclaredError("what is applied is no mean of what was sent")
    shapes, workers = [(40, 33), (1,), (1030,)], 2
    n = 40 * 33 + 1031
    draw = torch.Generator().manual_seed(1)
    grads = torch.randn(STEPS, workers, n, generator=draw) + torch.randn(n, generator=draw)
    worst, longest = 0.0, 0
    for collective in method.legal_collectives():
        steps = [list(step) for step in grads]
        if collective != method.legal_collectives()[0] or method != type(method)():
            steps = steps[:50]
        longest = max(longest, len(steps))
        means, made = _exchanged(method, collective, steps, shapes, memory.make("residual", {}))
        applied = torch.zeros(n, dtype=torch.float64)
        for mean in means:
            applied += mean.double()
        states = [states[0] for states in made.workers]
        left = torch.stack([state["residual"] for state in states]).double().mean(0)
        if collective == "twoshot" and requantizes(method):
            left = left + torch.cat([state["owner"] for state in states]).double()
        total = grads[: len(steps)].double().mean(1).sum(0)
        worst = max(worst, float((applied + left - total).abs().max()))
    # Each step rounds values as large as the residual by 2^-24; over 200 steps this is below 1e-2.
    return _Found(f"{worst:.1e}, {longest} steps", "1e-2", worst < 1e-2)


def _illegal(method: Compressor) -> _Found:
    """Illegal collectives and memories are refused, with the legal choices in the message."""
    faults = []
    for collective in COLLECTIVES:
        legal = collective in method.legal_collectives()
        try:
            exchange.check_legal(method, collective)
            refused = False
        except UsageError as error:
            refused = all(name in str(error) for name in method.legal_collectives())
        if legal == refused:
            faults.append(collective)
    for name in ("residual", "dgc"):
        try:
            memory.check_legal(name, method)
            refused = False
        except UsageError:
            refused = True
        if refused == method.claims.contractive:
            faults.append(f"memory {name}")
    try:
        memory.check_legal(method.memory, method)
        memory.of(method)
    except UsageError as error:
        faults.append(f"its own memory: {error}")
    return _Found(", ".join(faults) or "0 faults", "0 faults", not faults)


def corruptions(payload: Payload, seed: int) -> Iterator[tuple[str, Payload, bool]]:
    """Yield corrupt versions of a payload: what was done, the payload, whether decoding must raise.

    With the right length random bytes may happen to be a valid payload; then it must decode to
    finite values.
    """
    data = payload.to_bytes()
    for cut in (1, 4):
        if data.numel() >= cut:
            yield f"{cut} bytes cut", _reread(data[:-cut], payload), True
        longer = torch.cat([data, data.new_zeros(cut)])
        yield f"{cut} bytes more", _reread(longer, payload), True
    yield "no worker", payload._replace(count=0), True
    yield "a part missing", payload._replace(parts=payload.parts[1:]), True
    generator = torch.Generator().manual_seed(seed)
    for i, part in enumerate(payload.parts):
        for name, other in (
            ("one element cut", part[:-1]),
            ("one element more", torch.cat([part, part.new_zeros(1)])),
            ("another dtype", part.view(torch.uint8)),
        ):
            if other.numel() != part.numel() or other.dtype != part.dtype:
                parts = (*payload.parts[:i], other, *payload.parts[i + 1 :])
                yield f"part {i}: {name}", payload._replace(parts=parts), True
        noise = torch.randint(0, 256, (part.numel() * part.element_size(),), generator=generator)
        noisy = noise.to(torch.uint8).view(part.dtype)
        parts = (*payload.parts[:i], noisy, *payload.parts[i + 1 :])
        yield f"part {i}: random bytes", payload._replace(parts=parts), False
    for _ in range(8):
        flipped = data.clone()
        at = int(torch.randint(0, max(1, data.numel()), (1,), generator=generator))
        if data.numel():
            flipped[at] ^= 1 << int(torch.randint(0, 8, (1,), generator=generator))
        yield "a bit flipped", _reread(flipped, payload), False


def _reread(data: Tensor, like: Payload) -> Payload:
    """Cut bytes into parts like those of another payload; the last part takes what is left."""
    if not like.parts:
        return Payload((data,), like.count)
    sizes = [part.numel() * part.element_size() for part in like.parts[:-1]]
    head, tail = data[: sum(sizes)], data[sum(sizes) :]
    parts = [head]
    if len(head) == sum(sizes):
        pieces = zip(torch.split(head, sizes), like.parts, strict=False)
        parts = [piece.clone().view(part.dtype) for piece, part in pieces]
    whole = tail.numel() % like.parts[-1].element_size() == 0
    parts.append(tail.clone().view(like.parts[-1].dtype) if whole else tail)
    return Payload(tuple(parts), like.count)


def judge_corrupt(
    method: Compressor, payload: Payload, segments: Segments, shared: Tensor, *, must: bool
) -> str:
    """Decode a corrupt payload; return what is wrong with the outcome, or "".

    `must`: whether decoding must raise a PayloadError.
    """
    try:
        decoded = codec.decode(method, payload, Context(segments, shared))
    except PayloadError:
        return ""
    except Exception as error:
        return f"{type(error).__name__} and no PayloadError: {error}"
    if must:
        return "no error"
    right = decoded.shape == (segments.numel,) and bool(decoded.isfinite().all())
    return "" if right else "values that are not finite, or another shape"


def _corrupt(method: Compressor) -> _Found:
    """A payload cut, too long, of random bytes or for another tensor raises PayloadError.

    If the other tensor's payloads have the same layout, finite values will do.
    """
    segments = _segments(method, [(40, 33), (1,), (70,)])
    other = _segments(method, [(40, 33), (1,), (70,), (33,)])
    faults, done = [], 0
    payload, shared = _encode(method, normal(segments.numel), segments)
    cases = [(*case, segments) for seed in range(4) for case in corruptions(payload, seed)]
    apart = method.layout(other) is None or method.layout(other) != payload.layout
    cases.append(("33 elements more expected", payload, apart, other))
    for name, broken, must, place in cases:
        scales = shared
        if place is other:
            scales = _shared(method, [normal(other.numel)], other, Key(7, 3, 0))
        said = judge_corrupt(method, broken, place, scales, must=must)
        done += 1
        if said:
            faults.append(f"{name}: {said}")
    return _Found("; ".join(faults[:2]) or f"{done} refused", f"{done} cases", not faults)


def _fused(method: Compressor) -> _Found:
    """`encode_feedback` gives the bits of the separate steps."""
    if not fuses_feedback(method):
        raise _NotDeclaredError("no operation of its own for error feedback")
    done = []
    for shapes in (((40, 33), (0,), (1,), (70, 512), (5000,)), TENSORS):
        segments = _segments(method, shapes)
        x, carried = normal(segments.numel), normal(segments.numel, 1)
        payload, shared = _encode(method, x + carried, segments)
        decoded = codec.decode(method, payload, Context(segments, shared))
        residual = carried.clone()
        fed = codec.feedback(method, x, residual, Context(segments, shared, KEY))
        done.append(torch.equal(fed.to_bytes(), payload.to_bytes()))
        done.append(torch.equal(residual, x + carried - decoded))
    return _Found(f"{sum(done)} of {len(done)} equal", "all", all(done), "encode_feedback")


def _outputs(method: Compressor) -> _Found:
    """Results written to a given buffer have the bits of those returned without one."""
    segments = _segments(method, SHAPES)
    x = normal(segments.numel)
    payload, shared = _encode(method, x, segments)
    _, (prepared,) = codec.agree(method, [x], Context(segments, key=KEY))
    ctx = Context(segments, shared, KEY, prepared=prepared)
    faults = []

    def parts(count: int = 1) -> tuple[Tensor, ...] | None:
        layout = codec.layout(method, segments, count)
        if layout is None:
            return None
        noise = torch.full((layout_bytes(layout),), 0xFF, dtype=torch.uint8)
        return Payload.over(noise, layout, count).parts

    def same(what: str, got: Payload, want: Payload) -> None:
        if got.count != want.count or not _same(got.to_bytes(), want.to_bytes()):
            faults.append(f"{what} has other bytes")

    def equal(what: str, call: Callable[[Context], Tensor]) -> None:
        out = torch.full_like(x, math.nan)
        if not _same(call(ctx._replace(out=out)), call(ctx)):
            faults.append(f"{what} has other values")

    same("encode", codec.encode(method, x, ctx._replace(parts=parts())), payload)
    equal("decode", lambda ctx: codec.decode(method, payload, ctx))
    if not isinstance(method, MultiRoundCompressor):
        three = [payload] * 3  # three: no tie needs a coin
        equal("mean", lambda ctx: codec.mean(method, three, ctx))
    if "twoshot" in method.legal_collectives():
        ctx = ctx._replace(key=Key(7, 3, 0, 0, 1), prepared=None)
        merged = codec.merge(method, three, ctx)
        same("merge", codec.merge(method, three, ctx._replace(parts=parts(3))), merged)
    return _Found(", ".join(faults) or "0 faults", "0 faults", not faults)


def _buffers(method: Compressor) -> _Found:
    """Nothing that is kept aliases memory that is written again: buffers, or gradients.

    Two exchanges make the same steps. In one of them the buffers of the exchange and the gradients
    are overwritten after each step; its means and memories must have the same bits.
    """
    shapes, wrong, done = [(40, 33), (0,), (1,), (1030,)], [], 0
    n = 40 * 33 + 1031
    kept = memory.of(method)
    for collective in method.legal_collectives():
        steps = [[normal(n, 10 * step + rank) for rank in range(3)] for step in range(4)]
        copies = [[x.clone() for x in xs] for xs in steps]
        means, left = _exchanged(method, collective, steps, shapes, kept, method.rule)
        others, right = _exchanged(method, collective, copies, shapes, kept, method.rule)
        for step, xs in enumerate(copies):
            mean = next(means)
            other = next(others).clone()
            right.buffers.fill(0xFF)
            for x in xs:
                x.fill_(math.nan)
            done += 1
            if not _same(mean, other):
                wrong.append(f"{collective}, step {step}")
        for a, b in zip(_carried(left), _carried(right), strict=True):
            if not _same(a, b):
                wrong.append(f"{collective}: what is carried")
    return _Found("; ".join(wrong[:3]) or f"{done} means the same", f"{done} means", not wrong)


def _resumed(method: Compressor) -> _Found:
    """A step from copies of all buffers is the step of an uninterrupted run, bit for bit.

    What a memory or an update rule keeps elsewhere is lost in a checkpoint.
    """
    if not (memory.of(method).carries or isinstance(method, MultiRoundCompressor)):
        raise _NotDeclaredError("nothing is carried")
    n = sum(map(math.prod, RULE_SHAPES))
    steps = [[normal(n, 10 * step + rank) for rank in range(2)] for step in range(WARM_UP + 3)]
    whole = _steps(method, method, steps)
    parted = _steps(method, method, steps, resume=True)
    wrong = sum(not _same(a, b) for a, b in zip(whole, parted, strict=True))
    return _Found(f"{wrong} steps differ", "0", wrong == 0)


def _updates(method: Compressor) -> _Found:
    """With one worker and no loss the update is that of the uncompressed optimizer, bit for bit."""
    if method.rule.plain:
        raise _NotDeclaredError("any optimizer applies the mean")
    n = sum(map(math.prod, RULE_SHAPES))
    gradients = [normal(n, 50 + step) for step in range(WARM_UP + 5)]
    declared = method.claims.uncompressed(gradients, WARM_UP)
    if declared is None:
        raise _NotDeclaredError("no uncompressed optimizer is declared")
    made = _steps(method, registry.compressor("none"), [[g] for g in gradients])
    wrong = [t for t, (a, b) in enumerate(zip(made, declared, strict=True)) if not _same(a, b)]
    right = f"{len(gradients)} steps equal"
    return _Found(f"steps {wrong} differ" if wrong else right, "the same bits", not wrong)


def _carried(made: Exchange) -> Iterator[Tensor]:
    """Yield all tensors that an exchange carries to the next step."""
    for states in (*made.workers, made.joint):
        for state in states:
            yield from state.values()


CHECKS: Mapping[str, Callable[[Compressor], _Found]] = {
    "purity": _pure,
    "every size and input": _sizes,
    "long tensors": _long,
    "number of threads": _threads,
    "bytes": _bytes,
    "nominal bits": _nominal,
    "bucketing": _bucketing,
    "independent noise": _independent,
    "unbiased": _unbiased,
    "variance": _variance,
    "contraction": _contraction,
    "error on normal input": _gaussian,
    "exact small integers": _exact,
    "same gradient again": _settled,
    "same mean in collectives": _collectives,
    "equal workers": _alike,
    "every worker heard": _heard,
    "nothing lost over steps": _telescoping,
    "fused operations": _fused,
    "outputs": _outputs,
    "buffers": _buffers,
    "checkpoint": _resumed,
    "update rule": _updates,
    "illegal refused": _illegal,
    "corrupt payloads": _corrupt,
}
"""All checks by name, in the order of the table."""


def run(method: Compressor, name: str) -> Outcome:
    """Run one check; an exception in it is a failure, with the exception as the note."""
    try:
        found = CHECKS[name](method)
    except _NotDeclaredError as reason:
        return Outcome(name, "-", "-", "not declared", str(reason))
    except Exception as error:
        return Outcome(name, "-", "-", "fails", f"{type(error).__name__}: {error}")
    verdict = "holds" if found.holds else "fails"
    return Outcome(name, str(found.measured), str(found.bound), verdict, found.note)


@cache
def configurations(name: str) -> tuple[tuple[str, Compressor], ...]:
    """Return the registered method's variants: their options as text, and the compressor."""
    made = []
    for options in registry.compressor(name).variants:
        text = " ".join(f"{key}={value}" for key, value in options.items())
        made.append((text, registry.compressor(name, **options)))
    return tuple(made)


def verify(
    name: str, options: Mapping[str, Any] | None = None, *, processes: bool = False
) -> Iterator[list[dict[str, Any]]]:
    """Yield a table of all checks for one configuration, or for each declared variant.

    With `processes` three processes are started first, and their exchanges compared with simulated
    ones.
    """
    configured = chosen(name, options)
    there = in_processes([(name, dict(m)) for m in _options(name, options)]) if processes else None
    for i, (text, method) in enumerate(configured):
        outcomes = [run(method, check) for check in CHECKS]
        if there is not None:
            outcomes.append(_compared(_digests(method), there[i]))
        yield [{"configuration": text or "default", **each._asdict()} for each in outcomes]


def chosen(name: str, options: Mapping[str, Any] | None) -> list[tuple[str, Compressor]]:
    """Return what is checked: one configuration, or each declared variant, with its words."""
    if not options:
        return list(configurations(name))
    given = " ".join(f"{key}={value}" for key, value in options.items())
    return [(given, registry.compressor(name, **options))]


def claims_anything(name: str, options: Mapping[str, Any] | None = None) -> bool:
    """Return whether some of what is checked claims something of the values that arrive."""
    claims = [method.claims for _, method in chosen(name, options)]
    return any(c.unbiased or c.contractive or c.signs or c.exact_for for c in claims)


def _options(name: str, options: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    return [options] if options else registry.compressor(name).variants


# ---- simulation and processes --------------------------------------------------------------------

PROCESSES = 3


def _rank_gradient(rank: int, step: int, n: int) -> Tensor:
    return normal(n, 100 * step + rank)


def exchange_digests(method: Compressor, world: World | None = None) -> dict[str, str]:
    """Return, by collective, the SHA-256 of the means and memories of three workers in three steps.

    `world`: that of this worker's process group; without it all workers are simulated.
    """
    found = {}
    shapes = [(40, 33), (0,), (1,), (1030,)]
    kept = memory.of(method)
    for collective in method.legal_collectives():
        here = world or SimulatedWorld(PROCESSES, torch.device("cpu"), Link(10, 50), 1, 1)
        clock = Clock(here.device)
        clock.start_step()
        segments = _segments(method, shapes)
        lane = Lane(method, collective, 0, segments, kept, rule=method.rule)
        made = Exchange(here, [lane], 7, clock)
        digest = hashlib.sha256()
        for step in range(3):
            xs = [_rank_gradient(rank, step, segments.numel) for rank in here.ranks]
            digest.update(_raw(made.mean(xs, step, lr=1.0 / (1 + step))))
        for buffer in ("residual", "momentum", "owner"):
            own = [worker[0][buffer] for worker in made.workers if buffer in worker[0]]
            for tensor in here.collect(own) if own else []:
                digest.update(_raw(tensor))
        digest.update(repr(here.collect_traffic()).encode())
        for traffic in here.traffic:  # the next collective counts from zero
            traffic.payload_up = traffic.payload_down = traffic.wire = 0.0
        found[collective] = digest.hexdigest()
    return found


def _digests(method: Compressor, world: World | None = None) -> dict[str, str]:
    """Return `exchange_digests`, or what the method raised, under "error"."""
    try:
        return exchange_digests(method, world)
    except Exception as error:  # is reported as a finding, and must not end the process
        return {"error": f"{type(error).__name__}: {error}"}


def _worker(member: Rank, methods: Sequence[tuple[str, Mapping[str, Any]]]) -> list[dict[str, str]]:
    """Run one of three processes."""
    from gcbench.training import engines

    world = engines.join(member, "cpu", 1, at_most=timedelta(minutes=2))
    try:
        return [_digests(registry.compressor(name, **options), world) for name, options in methods]
    finally:
        world.close()


def in_processes(methods: Sequence[tuple[str, Mapping[str, Any]]]) -> list[dict[str, str]]:
    """Return `exchange_digests` of the methods (name, options), from three real processes.

    If the processes do not agree, the dict of the method has an "error".

    Raises:
        GcbenchError: a process died.
        Interrupted: the user asked to stop.
    """
    try:
        replicas = launch.in_processes(PROCESSES, 1, _worker, (list(methods),))
    except Interrupted:
        raise
    except GcbenchError as failure:
        raise GcbenchError(f"{failure}; --no-processes leaves the processes out") from failure
    apart = {"error": "the replicas of three processes differ"}
    return [own if own == a == b else apart for own, a, b in zip(*replicas, strict=True)]


def _compared(here: Mapping[str, str], there: Mapping[str, str]) -> Outcome:
    """Return the row of the table that compares simulation and processes."""
    name, bound = "simulation = 3 processes", "the same bits"
    for found in (here, there):
        if "error" in found:
            return Outcome(name, "-", bound, "fails", found["error"])
    wrong = [collective for collective in here if here[collective] != there[collective]]
    if wrong:
        return Outcome(name, f"{', '.join(wrong)} differ", bound, "fails")
    return Outcome(name, f"{len(here)} collectives equal", bound, "holds")
