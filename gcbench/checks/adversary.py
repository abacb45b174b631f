"""A search for inputs on which a method breaks the contract, against float64 definitions.

Each function of the contract has a plain definition: the mean is the average of the decoded
payloads, `cut` gives the codes of the shards, `encode_feedback` is encode(x + r), and so on. The
search calls every function on inputs that differ in shapes, values, scale, workers, key and the
contents of output buffers. Short inputs form a covering array, in which every pair of values of two
dimensions occurs; long inputs and sweeps over steps, ranks, workers and positions follow.

The same seed gives the same inputs. A failure is reduced to a smaller input that still fails.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gcbench.checks import inputs, oracle
from gcbench.checks.calls import Calls, Covered
from gcbench.checks.covering import pairwise
from gcbench.checks.oracle import FaultError, Profile, raw, same_bits
from gcbench.core import purposes
from gcbench.core.compressor import (
    TILE,
    Compressor,
    Key,
    MultiRoundCompressor,
    Payload,
    Segments,
    cuttable,
    fuses_feedback,
    requantizes,
)
from gcbench.core.errors import PayloadError, UsageError
from gcbench.core.exchange import shard_bounds
from gcbench.studies.conformance import FAMILIES

COMPOSITE = 232_792_560
"""Divisible by every number up to 22."""
STEPS = (0, 1, 7, 499, 500, 1000, 65_535, 10**6, COMPOSITE, 2**31 - 1, 2**31, 2**32 - 1)
SCALES = (0, -20, -40, -60, -80, -95, 10, 40, 95)
WORKERS = (2, 3, 1, 4, 5, 8, 16, 17)
RANKS = (0, 1, 77, 4095, 2**16, 2**24 - 64)
SEEDS = (7, 0, 1, 2**31, 2**32 + 1, 2**63 - 1)
OFFSETS = (0, TILE, 33, 2**20, 2**31, 2**33 + 5)
DIRTY = (0xFF, 0x3F, 0x7E)
RESIDUALS = ("normal", "zero", "2000 times", "minus the gradient", "gradient zero", "both zero")
DISTINCT = 5
"""Gradients of different workers in one input; further workers repeat their payloads."""


@dataclass(frozen=True)
class Case:
    """One input of the search."""

    shapes: inputs.Shapes
    values: str = "normal"
    scale: int = 0
    """x is multiplied by 2 to this power."""
    spread: str = "equal scales"
    workers: int = 2
    step: int = 1
    seed: int = 7
    rank: int = 0
    offset: int = 0
    dirty: int = 0xFF
    """The byte that output buffers are filled with."""
    residual: str = "normal"
    shard: bool = False
    """Whether the bucket is the part of another one behind its first tiles."""

    def segments(self, method: Compressor) -> Segments:
        """Return the segments of the bucket."""
        whole = Segments.of(self.shapes, method.granularity)
        start = whole.numel // 3 // TILE * TILE
        return whole.shard(start, whole.numel)[0] if self.shard and start else whole

    def gradients(self, segments: Segments) -> list[Tensor]:
        """Return the gradients of the first workers, at most `DISTINCT` of them."""
        family, factor = inputs.EVERY_FAMILY[self.values], inputs.SPREADS[self.spread]
        count = min(self.workers, DISTINCT if segments.numel < 10_000 else 3)
        scale = 2.0**self.scale
        return [
            family(segments, rank + self.seed % 1000) * (factor(rank) * scale)
            for rank in range(count)
        ]

    def key(self, rank: int = 0, stream: int = purposes.ENCODE) -> Key:
        """Return the key of worker `rank`."""
        return Key(self.seed, self.step, self.rank + rank, self.offset, stream)

    def __str__(self) -> str:
        parts = [
            f"shapes {inputs.describe(self.shapes)}{' behind the first third' * self.shard}",
            f"values: {self.values}" + (f" x 2^{self.scale}" if self.scale else ""),
            f"{self.workers} worker(s)" + (f" of {self.spread}" if self.workers > 1 else ""),
            f"step {self.step}, seed {self.seed}, rank {self.rank}, offset {self.offset}",
            f"output bytes {self.dirty:#x}, residual: {self.residual}",
        ]
        return "; ".join(parts)


class Finding(NamedTuple):
    """A function that breaks the contract, how, and on which input."""

    function: str
    fault: str
    case: str

    def __str__(self) -> str:
        return f"{self.function}: {self.fault} [{self.case}]"


class Effort(NamedTuple):
    """How much is tried."""

    every: int
    """1: all pairs of values occur; k: every k-th of these inputs."""
    long: int
    """Inputs per long shape."""
    million: int
    """Inputs of more than 2^20 elements."""
    steps: int
    """Neighbouring steps from 0 on."""


FULL = Effort(every=1, long=4, million=3, steps=2048)
"""For the defaults of a method."""
VARIANT = Effort(every=2, long=1, million=0, steps=300)
"""For its other configurations."""
LIBRARY = Effort(every=4, long=1, million=1, steps=600)
"""For the defaults of a method whose last bits a library decides: its claims take longest."""
SLOW = Effort(every=8, long=0, million=0, steps=100)
"""For other configurations of a method that is written in plain torch (`scratch`)."""
QUICK = Effort(every=5, long=1, million=0, steps=600)
"""For tests."""


def effort_for(method: Compressor, *, first: bool) -> Effort:
    """Return how much is tried of a configuration; `first`: of the method's first one."""
    if first:
        return FULL if method.claims.portable else LIBRARY
    return SLOW if method.scratch else VARIANT


# ---- one input -----------------------------------------------------------------------------------


class Trial:
    """One input on one method: its calls, and the definitions that they are held to."""

    def __init__(self, calls: Calls, known: Profile, case: Case) -> None:
        self.calls, self.known, self.case = calls, known, case
        self.method = calls.method
        self.segments = case.segments(self.method)
        self.xs = case.gradients(self.segments)
        self.n = self.segments.numel
        factors = [inputs.SPREADS[case.spread](rank) or 1.0 for rank in range(len(self.xs))]
        exponents = [math.frexp(factor)[1] - 1 for factor in factors]
        calls.scale = case.scale + min(exponents), case.scale + max(exponents)
        self.shared = calls.shared(self.xs, self.segments, case.key())
        self.payloads: list[Payload] = []
        self.decoded: list[Tensor] = []
        self.bytes: list[Tensor] = []

    @property
    def large(self) -> bool:
        """Whether the input is long, so that only what depends on the length is tried."""
        return self.n >= 10_000

    def out(self, n: int | None = None) -> Tensor:
        """Return an output buffer full of what was there before, float32, shape (n,)."""
        count = self.n if n is None else n
        return torch.full((4 * count,), self.case.dirty, dtype=torch.uint8).view(torch.float32)

    def digest(self) -> tuple[bytes, ...]:
        """Return the payloads and decodings of the workers, as bytes."""
        return tuple(raw(t) for t in (*self.bytes, *self.decoded))

    def run(self) -> None:
        """Call every function that the method has on this input.

        Raises:
            FaultError: a function breaks its definition.
        """
        for rank, x in enumerate(self.xs):
            self.one_worker(rank, x)
        self.several_workers()
        if fuses_feedback(self.method):
            self.feedback()
        if cuttable(self.method):
            self.cut()
        if self.known.local and not self.case.shard:
            self.locality()
        for rank, sent in enumerate(self.bytes):
            same_bits("mean or merge", self.payloads[rank].to_bytes(), sent, "the payload before")

    def one_worker(self, rank: int, x: Tensor) -> None:
        """Encode and decode the gradient of one worker."""
        calls, segments, shared, key = self.calls, self.segments, self.shared, self.case.key(rank)
        before = x.clone()
        payload = calls.encode(x, segments, shared, key)
        if not isinstance(payload, Payload):
            raise FaultError("encode", f"returned {type(payload).__name__}")
        sent = payload.to_bytes().clone()
        layout = calls.layout(segments)
        if layout is not None and layout != payload.layout:
            raise FaultError("encode", f"layout {payload.layout}; declared is {layout}")
        if payload.count != 1:
            raise FaultError("encode", f"count {payload.count} of one worker")
        if rank == 0 or not self.large:
            kept = None if self.known.drawn else calls.prepared(x, segments)
            slots = calls.slots(segments, self.case.dirty)
            again = calls.encode(x, segments, shared, key, prepared=kept, out=slots)
            same_bits("encode", again.to_bytes(), sent, "without `out` and `prepared` it")
        same_bits("encode", x, before, "x before the call")
        decoded = calls.decode(payload, segments, shared).clone()
        oracle.finite("decode", decoded, self.n)
        other = calls.decode(payload, segments, shared, out=self.out())
        same_bits("decode", other, decoded, "without `out` it")
        moved = Payload.from_bytes(payload.to_bytes(), payload.layout)
        if rank == 0:
            other = calls.decode(moved, segments, shared)
            same_bits("decode", other, decoded, "before the payload was sent it")
        same_bits("decode", payload.to_bytes(), sent, "the payload before")
        if x is self.xs[0] and not bool(x.any()):
            self._zeros(decoded)
        oracle.value(calls, x, segments, shared, decoded)
        self.contraction(rank, x, decoded)
        self.exact(x, decoded)
        self.payloads.append(payload)
        self.decoded.append(decoded)
        self.bytes.append(sent)

    def _zeros(self, decoded: Tensor) -> None:
        claims = self.method.claims
        if (claims.unbiased or claims.contractive) and bool(decoded.any()):
            raise FaultError("decode(encode(x))", "zeros are not decoded as zeros")

    def contraction(self, rank: int, x: Tensor, decoded: Tensor) -> None:
        """Hold the error to the declared bound."""
        if not self.method.claims.contractive or rank > (0 if self.large else 1):
            return
        errors = [oracle.error_energy(x, decoded)]
        if self.known.random and rank == 0 and not self.large:
            for turn in range(1, oracle.DRAWS):
                key = self.case.key()
                key = key._replace(step=(key.step + turn * 1009) % 2**32)
                shared = self.calls.shared([x], self.segments, key)
                sent = self.calls.encode(x, self.segments, shared, key)
                got = self.calls.decode(sent, self.segments, shared)
                errors.append(oracle.error_energy(x, got))
        oracle.contraction(self.calls, x, self.segments, errors, random=self.known.random)

    def exact(self, x: Tensor, decoded: Tensor) -> None:
        """Compare with x what the method declares to transmit exactly."""
        families = {
            "signs": "signs",
            "one nonzero per segment": "sparse",
            inputs.DIAGONAL: "sparse",
        }
        values = self.case.values
        declared = families.get(values, values.removeprefix("exact "))
        case, claims = self.case, self.method.claims
        plain = case.spread == "equal scales" and case.scale == 0 and not case.shard
        if plain and claims.portable and declared in claims.exact_for:
            same_bits("decode(encode(x))", decoded + 0.0, x + 0.0, f"x ({declared})")

    # ---- several workers -------------------------------------------------------------------------

    def several_workers(self) -> None:
        """Hold `mean`, `merge` and the sum of summands to the average."""
        calls, segments, shared = self.calls, self.segments, self.shared
        which = [rank % len(self.xs) for rank in range(self.case.workers)]
        payloads = [self.payloads[i] for i in which]
        decoded = [self.decoded[i] for i in which]
        want = oracle.aggregate(calls, decoded, segments)
        room = oracle.mean_rounding(calls, decoded, segments)
        legal = self.method.legal_collectives()
        mean = None
        if self.has_mean(len(payloads)):
            mean = calls.mean(payloads, segments, shared).clone()
            oracle.finite("mean", mean, self.n)
            if want is not None:
                self._is_mean("mean", mean, want, room)
            other = calls.mean(payloads, segments, shared, out=self.out())
            same_bits("mean", other, mean, "without `out` it")
            if len(payloads) > 1:
                self._counted(payloads, want is not None)
        if "twoshot" in legal:
            self._merged(payloads, mean, want, room)
        if "allreduce" in legal:
            self._summed(payloads, mean, want, room)

    def has_mean(self, workers: int) -> bool:
        """Whether `mean` is defined for this number of workers: an even vote may be tied."""
        legal = self.method.legal_collectives()
        return "allgather" in legal or requantizes(self.method) or workers % 2 == 1

    def _is_mean(self, function: str, got: Tensor, want: Tensor, room: Tensor) -> None:
        oracle.near(function, got, want, room, "the average of the decoded payloads")
        if self.method.claims.aggregate == "vote":
            tied = want.isnan()
            if bool((got[tied].abs() != 1).any()):
                raise FaultError(function, "a tied vote is neither +1 nor -1")

    def _counted(self, payloads: Sequence[Payload], defined: bool) -> None:
        """The last payload stands for three workers."""
        calls, segments, shared = self.calls, self.segments, self.shared
        merged = payloads[-1]._replace(count=3)
        if not defined or calls.layout(segments, 3) != merged.layout:
            return
        if self.method.claims.aggregate != "mean":
            return
        last = calls.decode(merged, segments, shared).clone()
        first = self.decoded[0]
        mean = calls.mean([payloads[0], merged], segments, shared)
        all_ = [first, last, last, last]
        want = oracle.aggregate(calls, all_, segments)
        assert want is not None
        room = oracle.mean_rounding(calls, all_, segments)
        oracle.near("mean", mean, want, room, "the average with a payload of 3 workers")

    def _merged(
        self, payloads: Sequence[Payload], mean: Tensor | None, want: Tensor | None, room: Tensor
    ) -> None:
        calls, segments, shared = self.calls, self.segments, self.shared
        key = self.case.key(stream=purposes.MERGE)
        merged = calls.merge(payloads, segments, shared, key)
        sent = merged.to_bytes().clone()
        count = sum(payload.count for payload in payloads)
        if merged.count != count:
            raise FaultError("merge", f"count {merged.count} of {count} workers")
        layout = calls.layout(segments, count)
        if layout is not None and layout != merged.layout:
            raise FaultError("merge", f"layout {merged.layout}; declared is {layout}")
        slots = calls.slots(segments, self.case.dirty, count)
        other = calls.merge(payloads, segments, shared, key, out=slots)
        same_bits("merge", other.to_bytes(), sent, "without `out` it")
        if requantizes(self.method):
            assert mean is not None
            again = calls.encode(mean, segments, shared, key)
            same_bits("merge", sent, again.to_bytes(), "encode of the mean")
            return
        got = calls.decode(merged, segments, shared).clone()
        oracle.finite("merge", got, self.n)
        if want is not None:
            self._is_mean("merge", got, want, room)
        elif mean is not None:
            oracle.near("merge", got, mean, room, "the mean")
        buffered = calls.decode(merged, segments, shared, out=self.out())
        same_bits("decode", buffered, got, "without `out` it (merged payload)")

    def _summed(
        self, payloads: Sequence[Payload], mean: Tensor | None, want: Tensor | None, room: Tensor
    ) -> None:
        calls, segments, shared = self.calls, self.segments, self.shared
        summands = [calls.summand(payload, len(payloads), segments) for payload in payloads]
        totals = []
        for column in zip(*(summand.parts for summand in summands), strict=True):
            total = column[0].clone()
            for part in column[1:]:
                total += part
            totals.append(total)
        total = Payload(tuple(totals), len(payloads))
        got = calls.decode_sum(total, segments, shared).clone()
        oracle.finite("decode_sum", got, self.n)
        if want is not None:
            self._is_mean("decode_sum", got, want, room)
        elif mean is not None:
            oracle.near("decode_sum", got, mean, room, "the mean")
        other = calls.decode_sum(total, segments, shared, out=self.out())
        same_bits("decode_sum", other, got, "without `out` it")

    def feedback(self) -> None:
        """`encode_feedback` is encode(x + r), and leaves what was not sent in r."""
        calls, segments, case = self.calls, self.segments, self.case
        x, n = self.xs[0], self.n
        carried = inputs.values(n, 31 + case.seed % 1000) * 2.0**case.scale
        residual = {
            "normal": carried,
            "zero": torch.zeros(n),
            "2000 times": 2000 * carried,
            "minus the gradient": -x,
            "gradient zero": carried,
            "both zero": torch.zeros(n),
        }[case.residual]
        if case.residual in ("gradient zero", "both zero"):
            x = torch.zeros(n)
        offered, before = residual + x, x.clone()
        key = case.key()
        shared = calls.shared([offered], segments, key)
        plain = calls.encode(offered, segments, shared, key)
        sent = plain.to_bytes().clone()
        left = offered - calls.decode(plain, segments, shared)
        for slots in (None, calls.slots(segments, case.dirty)):
            kept = residual.clone()
            fed = calls.encode_feedback(x, kept, segments, shared, key, out=slots)
            same_bits("encode_feedback", fed.to_bytes(), sent, "encode(x + residual)")
            same_bits("encode_feedback (residual)", kept + 0.0, left + 0.0, "x + residual - decode")
        same_bits("encode_feedback", x, before, "x before the call")

    def cut(self) -> None:
        """`cut` gives the bytes and the values of the shards."""
        calls, segments, shared = self.calls, self.segments, self.shared
        payload, decoded, n = self.payloads[0], self.decoded[0], self.n
        tiles = [*range(0, n, TILE), n] if n else [0, 0]
        for bounds in (
            shard_bounds(n, self.case.workers),
            shard_bounds(n, 64),
            tiles if len(tiles) < 200 else [*tiles[:3], n],
            [0, n],
        ):
            pieces = calls.cut(payload, segments, bounds)
            if len(pieces) != len(bounds) - 1:
                raise FaultError("cut", f"{len(pieces)} shards of {len(bounds) - 1}")
            together = torch.cat([piece.to_bytes() for piece in pieces])
            same_bits("cut", together, payload.to_bytes(), "the payload")
            for (start, stop), piece in zip(itertools.pairwise(bounds), pieces, strict=True):
                inside, which = segments.shard(start, stop)
                layout = calls.layout(inside)
                if layout is not None and piece.layout != layout:
                    raise FaultError("cut", f"layout {piece.layout}; declared is {layout}")
                own = shared[which.start : which.stop] if shared.numel() else shared
                got = calls.decode(piece, inside, own, out=self.out(stop - start))
                same_bits("cut", got, decoded[start:stop], f"the payload in [{start}, {stop})")

    # ---- a part of the bucket --------------------------------------------------------------------

    def locality(self) -> None:
        """Tensors arrive as the same bits in this bucket and in a shorter one."""
        shapes = self.case.shapes
        size = self.method.granularity
        if len(shapes) == 1 and isinstance(size, int) and self.n > 2 * size:
            middle = self.n // size // 2 * size
            shapes = ((middle,), (self.n - middle,))
        if len(shapes) < 2:
            return
        pieces = 5 if self.large else 2 + self.case.seed % 2
        edges = [len(shapes) * k // pieces for k in range(pieces + 1)]
        tensors = [*itertools.accumulate(map(math.prod, shapes), initial=0)]
        for first, last in itertools.pairwise(edges):
            if first < last:
                self._alone(shapes[first:last], tensors[first], tensors[last])

    def _alone(self, shapes: inputs.Shapes, start: int, stop: int) -> None:
        calls = self.calls
        segments = Segments.of(shapes, self.method.granularity)
        key = self.case.key()._replace(offset=self.case.offset + start)
        xs = [x[start:stop].clone() for x in self.xs]
        shared = calls.shared(xs, segments, key)
        got = calls.decode(calls.encode(xs[0], segments, shared, key), segments, shared)
        want = self.decoded[0][start:stop]
        what = f"in the bucket of {len(self.segments):,} segments, from {start:,} on, it"
        if self.method.claims.portable:
            same_bits("decode(encode(x))", got, want, what)
        else:
            self._as_far(xs[0], got, want, what)
        if self.method.claims.contractive and len(shapes) > 1:
            errors = [oracle.error_energy(xs[0], got)]
            oracle.contraction(calls, xs[0], segments, errors, random=self.known.random)

    def _as_far(self, x: Tensor, got: Tensor, want: Tensor, what: str) -> None:
        """Compare distances from x: where a library rounds, other coefficients may be kept."""
        off = oracle.error_energy(x, got) - oracle.error_energy(x, want)
        if not abs(off) <= 1e-4 * oracle.energy(x) + 1e-60:
            raise FaultError(
                "decode(encode(x))",
                f"||x - C(x)||^2 is {off:.4g} more than where {what} is encoded; ||x||^2 is "
                f"{oracle.energy(x):.4g}",
            )


class RoundsTrial:
    """One input on a method in rounds."""

    def __init__(self, calls: Calls, known: Profile, case: Case) -> None:
        self.calls, self.case = calls, case
        self.method = calls.method
        self.segments = case.segments(self.method)
        xs = case.gradients(self.segments)
        count = case.workers if self.segments.numel < 2000 else min(case.workers, 4)
        self.xs = [xs[rank % len(xs)] for rank in range(count)]
        calls.scale = case.scale, case.scale
        self.means: list[Tensor] = []

    def digest(self) -> tuple[bytes, ...]:
        """Return the mean, as bytes."""
        return tuple(raw(t) for t in self.means)

    def _step(self, xs: Sequence[Tensor], dirty: int) -> tuple[Tensor, Tensor]:
        n = self.segments.numel
        method = self.method
        assert isinstance(method, MultiRoundCompressor)
        state = self.calls.initial_state(self.segments, self.case.key())
        out = torch.full((4 * n,), dirty, dtype=torch.uint8).view(torch.float32)
        later = self.case.key()
        later = later._replace(step=(later.step + 1) % 2**32)
        before = state.clone()
        final = self.calls.rounds(xs, self.segments, state, later, out)
        same_bits("in_rounds", state, before, "the state before the step")
        return out, final

    def run(self) -> None:
        """Run one step with clean and with dirty buffers.

        Raises:
            FaultError: a definition is broken.
        """
        n = self.segments.numel
        copies = [x.clone() for x in self.xs]
        mean, final = self._step(self.xs, 0)
        oracle.finite("in_rounds", mean, n)
        for x, copy in zip(self.xs, copies, strict=True):
            same_bits("in_rounds", x, copy, "the gradient before the step")
        other, state = self._step(self.xs, self.case.dirty)
        same_bits("in_rounds", other, mean, "with a clean output buffer it")
        same_bits("in_rounds", state, final, "with a clean output buffer the state")
        average = torch.stack([x.double() for x in self.xs]).mean(0).float()
        errors = [oracle.error_energy(average, mean)]
        if self.method.claims.contractive:
            oracle.contraction(self.calls, average, self.segments, errors, random=True)
        single, _ = self._step([average], 0xFF)
        largest = torch.stack(self.xs).abs().amax() if n else torch.tensor(0.0)
        room = torch.full((n,), 2e-3 * float(largest) + 2.0**-140, dtype=torch.float64)
        if self.case.values == "signs" and len({id(x) for x in self.xs}) == 1:
            oracle.near("in_rounds", mean, single, room, "one worker with the mean gradient")
        self.means = [mean, final]


def trial(calls: Calls, known: Profile, case: Case) -> Trial | RoundsTrial:
    """Return the trial of one input."""
    rounds = isinstance(calls.method, MultiRoundCompressor)
    return (RoundsTrial if rounds else Trial)(calls, known, case)


def attempt(
    calls: Calls, known: Profile, case: Case
) -> tuple[FaultError | None, Trial | RoundsTrial | None]:
    """Run one input; return its fault, or the trial."""
    made = None
    try:
        made = trial(calls, known, case)
        made.run()
    except FaultError as fault:
        return fault, None
    except Exception as error:
        return FaultError(calls.last, f"{type(error).__name__}: {error}"), None
    return None, made


# ---- the inputs ----------------------------------------------------------------------------------


def cases(known: Profile, effort: Effort, seed: int, exact: Sequence[str] = ()) -> Iterator[Case]:
    """Yield the inputs of one search; `exact`: families that the method transmits exactly."""
    short = inputs.short_shapes(known.group)
    dimensions: dict[str, Sequence[Any]] = {
        "shapes": list(short.values()),
        "values": list(inputs.FAMILIES),
        "scale": SCALES,
        "spread": list(inputs.SPREADS),
        "workers": WORKERS,
        "step": STEPS,
        "seed": SEEDS,
        "rank": RANKS,
        "offset": OFFSETS,
        "dirty": DIRTY,
        "residual": RESIDUALS,
        "shard": (False, False, True),
    }
    rows = [Case(**row) for row in pairwise(dimensions, seed)]
    yield from map(_tamed, rows[:: effort.every])
    draw = random.Random(seed + 1)

    def drawn(shapes: inputs.Shapes) -> Case:
        row = {name: draw.choice(list(options)) for name, options in dimensions.items()}
        row |= {"shapes": shapes, "workers": draw.choice((2, 3, 3, 4))}
        return _tamed(Case(**row))

    for shapes in inputs.long_shapes().values():
        yield Case(shapes, workers=3)
        yield Case(shapes, workers=2, values="signs")
        for family in exact[: effort.long]:
            yield Case(shapes, workers=3, values=f"exact {family}")
        for _ in range(effort.long - 1):
            yield drawn(shapes)
    for i in range(effort.million):
        first = Case(inputs.MILLION, workers=3)
        yield (first, replace(first, values="signs"), drawn(inputs.MILLION))[min(i, 2)]


def _tamed(case: Case) -> Case:
    """Keep the largest scale of workers within 2^95 and the smallest above 2^-95."""
    scale = case.scale
    if case.spread.startswith(("scales", "worker 0")):
        scale = max(-75, min(83, scale))
    if case.values in ("segments of different norms", "elements of different scales"):
        scale = max(-55, min(60, scale))
    return replace(case, scale=scale, rank=min(case.rank, 2**24 - 64))


# ---- sweeps --------------------------------------------------------------------------------------


def natural_steps(neighbours: int) -> list[int]:
    """Return the steps of a sweep: 0 to `neighbours`, and both sides of round numbers and powers.

    A fault that occurs every p steps is met if p is at most `neighbours`, whatever its phase; if p
    is a round number (1, 2, 2.5, 5 x 10^k, 2^k, 3 x 2^k) up to 10^9, or has no factor but small
    ones, in the phases -1, 0 and 1.
    """
    tens = [c * 10**k // 2 for k in range(1, 10) for c in (2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 18)]
    twos = [c * 2**k for k in range(31) for c in (1, 3)]
    smooth = [COMPOSITE * k for k in (1, 2, 5, 7, 16)] + [720_720 * k for k in (1, 23, 29, 31)]
    large = [4 * 10**9, 3 * 10**9, 2**32 - 1]
    draw = random.Random(5)
    others = [int(2 ** draw.uniform(11, 32)) for _ in range(100)]
    near = [s + d for s in (*tens, *twos, *smooth, *large) for d in (-1, 0, 1)]
    return sorted({s for s in (*range(neighbours), *near, *others) if 0 <= s < 2**32})


class Witness:
    """A short input whose result says at one look whether a step, rank or offset is handled."""

    def __init__(self, calls: Calls, known: Profile) -> None:
        self.calls, self.known = calls, known
        method, claims = calls.method, calls.method.claims
        self.family = next((f for f in claims.exact_for if claims.portable), None)
        shapes: inputs.Shapes = ((8, 16), (33,))
        if known.random and self.family is None:
            shapes = ((32, 64), (33,))
        self.segments = Segments.of(shapes, method.granularity)
        seed = 3
        if self.family:
            self.x = FAMILIES[self.family](self.segments, seed)
        elif known.random and claims.contractive:
            self.x = FAMILIES["signs"](self.segments, seed)
        else:
            self.x = inputs.values(self.segments.numel, seed)
        calls.scale = 0, 0
        self.first: bytes | None = None
        self.merged: bytes | None = None
        """What a deterministic method sends, and what it merges; the same at every key."""
        if not known.random:
            self.first = raw(self.payload(Key(7, 1, 0))[0].to_bytes())

    def payload(self, key: Key) -> tuple[Payload, Tensor]:
        """Encode the input with this key."""
        shared = self.calls.shared([self.x], self.segments, key)
        return self.calls.encode(self.x, self.segments, shared, key), shared

    def look(self, key: Key) -> None:
        """Encode and decode at one key, alone, with feedback, and in a merge.

        Raises:
            FaultError: the result is not that of other keys, or contradicts the claims.
        """
        calls, segments = self.calls, self.segments
        payload, shared = self.payload(key)
        sent = payload.to_bytes().clone()
        if self.first is not None:
            first = torch.frombuffer(bytearray(self.first), dtype=torch.uint8)
            same_bits("encode", sent, first, "at step 1 of rank 0 it")
        else:
            decoded = calls.decode(payload, segments, shared)
            self._value(decoded, shared)
        if fuses_feedback(calls.method):
            half = self.x * 0.5
            left = half.clone()
            fed = calls.encode_feedback(half, left, segments, shared, key)
            same_bits("encode_feedback", fed.to_bytes(), sent, "encode(x + residual)")
        if "twoshot" in calls.method.legal_collectives():
            merged = calls.merge([payload] * 3, segments, shared, key._replace(stream=1))
            if self.merged is not None:
                first = torch.frombuffer(bytearray(self.merged), dtype=torch.uint8)
                same_bits("merge", merged.to_bytes(), first, "at step 1 of rank 0 it")
            elif requantizes(calls.method):
                mean = calls.mean([payload] * 3, segments, shared)
                again = calls.encode(mean, segments, shared, key._replace(stream=1))
                same_bits("merge", merged.to_bytes(), again.to_bytes(), "encode of the mean")
            else:
                got = calls.decode(merged, segments, shared).clone()
                want = calls.decode(payload, segments, shared)
                room = oracle.mean_rounding(calls, [want] * 3, segments)
                oracle.near("merge", got, want, room, "the payload that all three sent")

            if self.first is not None:
                self.merged = raw(merged.to_bytes())

    def _value(self, decoded: Tensor, shared: Tensor) -> None:
        calls, segments, x = self.calls, self.segments, self.x
        if self.family:
            same_bits("decode(encode(x))", decoded + 0.0, x + 0.0, f"x ({self.family})")
            return
        oracle.value(calls, x, segments, shared, decoded)
        if calls.method.claims.contractive:
            error, bound = oracle.error_energy(x, decoded), oracle.bound_of(calls, x, segments)
            if error > bound * (1 + 1e-4):
                raise FaultError(
                    "decode(encode(x))", f"||x - C(x)||^2 = {error:.6g} is above {bound:.6g}"
                )


def sweep_keys(
    calls: Calls, known: Profile, effort: Effort
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the keys at which a short input is encoded: (text, call)."""
    if isinstance(calls.method, MultiRoundCompressor):
        return
    witness = Witness(calls, known)
    keys = [Key(7, step, 0) for step in natural_steps(effort.steps)]
    few = [*range(130), *(2**k - 1 for k in range(8, 24)), *(2**k for k in range(8, 24))]
    keys += [Key(7, 1, rank) for rank in (*few, 1000, 2**24 - 1)]
    keys += [Key(2**k + d, 2, 1) for k in range(0, 64, 3) for d in (0, 1)]
    keys += [Key(3, 3, 2, 2**k + d) for k in range(40) for d in (-1, 0, 1, TILE)]
    for key in keys:
        text = f"step {key.step}, rank {key.rank}, seed {key.seed}, offset {key.offset}"
        where = f"{inputs.describe(((len(witness.x),),))}; {text}"
        yield where, lambda key=key: witness.look(key)  # type: ignore[misc]


def sweep_workers(calls: Calls, known: Profile) -> Iterator[Case]:
    """Yield short inputs for every number of workers up to 33, and around powers of two."""
    many = () if calls.method.scratch else (401, 1000)
    if isinstance(calls.method, MultiRoundCompressor):
        many = ()
    counts = [*range(1, 34), 63, 64, 65, 100, 127, 128, 129, 255, 256, 257, *many]
    for workers in counts:
        yield Case(((5, 13), (8,)), workers=workers, spread="scales 2^0, 2^-10, 2^-20")


def sweep_positions(calls: Calls, known: Profile) -> Iterator[Case]:
    """Yield inputs with one nonzero at each position of 512 segments of 512 elements."""
    if known.local:
        yield Case(((16, 32),) * 512, values=inputs.DIAGONAL, workers=1)
        yield Case(((512,),) * 512, values=inputs.DIAGONAL, workers=2)


class Search:
    """One search on one method; `covered` and `findings` have the result."""

    def __init__(self, method: Compressor, effort: Effort = FULL, seed: int = 0) -> None:
        self.calls = Calls(method)
        self.effort, self.seed = effort, seed
        self.findings: list[Finding] = []
        self.inputs = 0

    @property
    def covered(self) -> dict[str, Covered]:
        """The largest inputs that each function received."""
        return self.calls.covered

    def run(self) -> list[Finding]:
        """Search until a function fails; return the findings, none for a correct method."""
        for stage in (self._start, self._pairs, self._sweeps, self._others):
            stage()
            if self.findings:
                break
        return self.findings

    @property
    def exact(self) -> Sequence[str]:
        """The families of inputs that the method declares to transmit exactly."""
        claims = self.calls.method.claims
        return claims.exact_for if claims.portable else ()

    def _start(self) -> None:
        try:
            self.known = oracle.profile(self.calls)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            self.findings.append(Finding(self.calls.last, what, "shapes [40x50]; normal values"))

    def _try(self, case: Case) -> tuple[bytes, ...] | None:
        self.inputs += 1
        fault, made = attempt(self.calls, self.known, case)
        if fault is not None:
            case, fault = shrunk(self.calls, self.known, case, fault)
            self.findings.append(Finding(fault.function, fault.what, str(case)))
            return None
        assert made is not None
        return made.digest()

    def _pairs(self) -> None:
        seen: list[tuple[Case, tuple[bytes, ...]]] = []
        for case in cases(self.known, self.effort, self.seed, self.exact):
            digest = self._try(case)
            if digest is None:
                return
            if len(seen) < 30 and sum(map(len, digest)) < 10**6:
                seen.append((case, digest))
        for case, digest in reversed(seen):
            again = self._try(case)
            if again is not None and again != digest:
                self.findings.append(
                    Finding("encode or decode", "earlier calls change the result", str(case))
                )
            if self.findings:
                return

    def _sweeps(self) -> None:
        for where, look in sweep_keys(self.calls, self.known, self.effort):
            self.inputs += 1
            try:
                look()
            except FaultError as fault:
                self.findings.append(Finding(fault.function, fault.what, where))
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
                self.findings.append(Finding(self.calls.last, what, where))
            if self.findings:
                return
        for case in (
            *sweep_workers(self.calls, self.known),
            *sweep_positions(self.calls, self.known),
        ):
            if self._try(case) is None:
                return

    def _others(self) -> None:
        self._same_length()
        if not self.findings:
            self._not_finite()

    def _same_length(self) -> None:
        """Buckets of one length and other segments, one after the other and mixed."""
        made = []
        for turn in range(2):
            for shapes in inputs.same_length()[:: 1 - 2 * turn]:
                case = Case(shapes, values="segments of different norms", workers=2)
                if self._try(case) is None:
                    return
        if isinstance(self.calls.method, MultiRoundCompressor):
            return
        for shapes in inputs.same_length():
            _, one = attempt(self.calls, self.known, Case(shapes))
            if isinstance(one, Trial):
                made.append(one)
        for one in made:
            self.calls.encode(one.xs[0], one.segments, one.shared, one.case.key())
        for one in reversed(made):
            got = self.calls.decode(one.payloads[0], one.segments, one.shared)
            if not torch.equal(got, one.decoded[0]):
                self.findings.append(
                    Finding("decode", "encodings of other segments change it", str(one.case))
                )
                return

    def _not_finite(self) -> None:
        """NaN or infinite elements: an error, or finite values."""
        calls, method = self.calls, self.calls.method
        if isinstance(method, MultiRoundCompressor):
            return
        segments = Segments.of(((40, 33), (1,), (1030,)), method.granularity)
        n, key = segments.numel, Key(7, 1, 0)
        for bad, place in itertools.product(
            (math.nan, math.inf, -math.inf), ((0,), (n - 1,), (n // 2,), (1320,), range(n))
        ):
            xs = [inputs.values(n, rank) for rank in range(3)]
            xs[1][list(place)] = bad
            where = f"{bad} in {'all elements' if len(place) > 1 else f'element {place[0]}'}"
            try:
                self._handled(xs, segments, key)
            except (PayloadError, UsageError):
                continue
            except FaultError as fault:
                self.findings.append(Finding(fault.function, fault.what, where))
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
                self.findings.append(Finding(calls.last, what, where))
            if self.findings:
                return

    def _handled(self, xs: Sequence[Tensor], segments: Segments, key: Key) -> None:
        calls, method, n = self.calls, self.calls.method, segments.numel
        shared = calls.shared(xs, segments, key)
        payloads = [
            calls.encode(x, segments, shared, key._replace(rank=rank)) for rank, x in enumerate(xs)
        ]

        def refused_or_finite(function: str, call: Callable[[], Tensor]) -> None:
            try:
                got = call()
            except (PayloadError, UsageError):
                return
            oracle.finite(function, got, n)

        refused_or_finite("decode", lambda: calls.decode(payloads[1], segments, shared))
        if requantizes(method) or "allgather" in method.legal_collectives():
            refused_or_finite("mean", lambda: calls.mean(payloads, segments, shared))
        if "twoshot" in method.legal_collectives():
            there = key._replace(stream=purposes.MERGE)
            refused_or_finite(
                "merge",
                lambda: calls.decode(
                    calls.merge(payloads, segments, shared, there), segments, shared
                ),
            )
        if "allreduce" in method.legal_collectives():
            refused_or_finite("decode_sum", lambda: self._sum(payloads, segments, shared))

    def _sum(self, payloads: Sequence[Payload], segments: Segments, shared: Tensor) -> Tensor:
        summands = [self.calls.summand(p, len(payloads), segments) for p in payloads]
        columns = zip(*(summand.parts for summand in summands), strict=True)
        total = Payload(
            tuple(torch.stack(column).sum(0, dtype=column[0].dtype) for column in columns),
            len(payloads),
        )
        return self.calls.decode_sum(total, segments, shared)


# ---- smaller inputs ------------------------------------------------------------------------------


def shrunk(
    calls: Calls, known: Profile, case: Case, fault: FaultError, tries: int = 40
) -> tuple[Case, FaultError]:
    """Return the smallest input within `tries` steps on which the same function still fails."""
    left = tries
    progress = True
    while progress and left > 0:
        progress = False
        for smaller in simpler(case):
            if left <= 0:
                break
            left -= 1
            found, _ = attempt(calls, known, smaller)
            if found is not None and found.function == fault.function:
                case, fault, progress = smaller, found, True
                break
    return case, fault


def simpler(case: Case) -> Iterator[Case]:
    """Yield inputs that are simpler than this one in one respect, the largest steps first."""
    plain = Case(case.shapes)
    for name in ("offset", "rank", "seed", "step", "spread", "scale", "values", "residual"):
        if getattr(case, name) != getattr(plain, name):
            yield replace(case, **{name: getattr(plain, name)})
    if case.shard:
        yield replace(case, shard=False)
    for workers in (1, 2, case.workers // 2):
        if 0 < workers < case.workers:
            yield replace(case, workers=workers)
    shapes, half = case.shapes, len(case.shapes) // 2
    if half:
        yield replace(case, shapes=shapes[:half])
        yield replace(case, shapes=shapes[half:])
    for i, shape in enumerate(shapes if len(shapes) < 4 else ()):
        size = math.prod(shape)
        for less in (size // 2, size - 1):
            if 0 < less < size:
                yield replace(case, shapes=(*shapes[:i], (less,), *shapes[i + 1 :]))
