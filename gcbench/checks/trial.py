"""One input on one method: every function of the contract against its float64 definition."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gcbench import ops
from gcbench.checks import inputs, oracle
from gcbench.checks.calls import Calls
from gcbench.checks.cases import Case
from gcbench.checks.oracle import FaultError, Profile, raw, same_bits
from gcbench.core import purposes
from gcbench.core.compressor import (
    TILE,
    MultiRoundCompressor,
    Payload,
    Segments,
    cuttable,
    fuses_feedback,
    requantizes,
)
from gcbench.core.exchange import shard_bounds

MARGIN = 8
"""Elements on both sides of an output buffer."""


def surrounded(x: Tensor) -> Tensor:
    """Return a copy of x, shape (n,), as a view into a larger tensor, as buckets are."""
    whole = torch.full((len(x) + 5,), 7.0)
    view = whole[3 : 3 + len(x)]
    return view.copy_(x)


class Trial:
    """One input on one method: its calls, and the definitions that they are held to."""

    def __init__(self, calls: Calls, profile: Profile, case: Case) -> None:
        self.calls, self.profile, self.case = calls, profile, case
        self.method = calls.method
        self.segments = case.segments(self.method)
        self.xs = case.gradients(self.segments)
        self.n = self.segments.numel
        factors = [inputs.SPREADS[case.spread](rank) or 1.0 for rank in range(len(self.xs))]
        exponents = [math.frexp(factor)[1] - 1 for factor in factors]
        calls.scale = case.scale + min(exponents), case.scale + max(exponents)
        calls.workers, calls.lr = case.workers, case.lr
        copies = [x.clone() for x in self.xs]
        # As in a simulation: all workers prepare before one encodes.
        self.shared, self.prepared = calls.agreed(self.xs, self.segments, case.key())
        for x, copy in zip(self.xs, copies, strict=True):
            same_bits("prepare", x, copy, "x before the call")
        rows = len(self.shared) if self.shared.numel() and not profile.drawn else len(self.segments)
        if rows != len(self.segments):
            what = f"the statistic has {rows} rows for {len(self.segments)} segments"
            raise FaultError("prepare", what)
        self.lent: list[tuple[Tensor, int]] = []
        """Larger buffers whose middle was lent as an output buffer, and the size of that part."""
        self.payloads: list[Payload] = []
        self.decoded: list[Tensor] = []
        self.bytes: list[Tensor] = []
        self.results: list[tuple[str, Tensor, Tensor]] = []
        """Tensors that functions returned without `out`, the function, and a copy of each."""

    @property
    def large(self) -> bool:
        """Whether the input is long, so that only what depends on the length is tried."""
        return self.n >= 10_000

    def out(self, n: int | None = None) -> Tensor:
        """Return a dirty output buffer, float32, shape (n,), in the middle of a larger one."""
        count = self.n if n is None else n
        whole = torch.full((4 * (count + 2 * MARGIN),), self.case.dirty, dtype=torch.uint8)
        buffer = whole.view(torch.float32)[MARGIN : MARGIN + count]
        self.lent.append((whole, count))
        return buffer

    def within(self) -> None:
        """No function wrote outside its output buffer."""
        for whole, count in self.lent:
            edges = torch.cat([whole[: 4 * MARGIN], whole[4 * (MARGIN + count) :]])
            if bool((edges != self.case.dirty).any()):
                raise FaultError("decode, mean or decode_sum", "writes outside its output buffer")
        self.lent.clear()

    def unchanged(self) -> None:
        """No later call changed the result of an earlier one."""
        for function, result, copy in self.results:
            same_bits(function, result, copy, "before a later call it")

    def digest(self) -> tuple[bytes, ...]:
        """Return the payloads and decodings of the workers, as bytes."""
        return tuple(raw(t) for t in (*self.bytes, *self.decoded))

    def run(self) -> None:
        """Call every function that the method has on this input.

        Raises:
            FaultError: a function breaks its definition.
        """
        shared = self.shared.clone()
        for rank, x in enumerate(self.xs):
            self.one_worker(rank, x)
        self.several_workers()
        if fuses_feedback(self.method):
            self.feedback()
        if cuttable(self.method) and "twoshot" in self.method.legal_collectives():
            self.cut()
        if self.profile.local and not (self.case.shard or self.case.light):
            self.locality()
        self.within()
        same_bits("encode or decode", self.shared, shared, "`shared` before the call")
        self.unchanged()
        for rank, sent in enumerate(self.bytes):
            same_bits("mean or merge", self.payloads[rank].to_bytes(), sent, "the payload before")

    def one_worker(self, rank: int, x: Tensor) -> None:
        """Encode and decode the gradient of one worker."""
        calls, segments, shared, key = self.calls, self.segments, self.shared, self.case.key(rank)
        before = x.clone()
        payload = calls.encode(x, segments, shared, key)
        if not isinstance(payload, Payload):
            raise FaultError("encode", f"returned {type(payload).__name__}")
        for part in payload.parts:
            if part.ndim != 1 or not part.is_contiguous():
                raise FaultError(
                    "encode",
                    f"a part of {part.dtype}, shape {tuple(part.shape)}; contiguous, of one "
                    "dimension expected",
                )
        sent = payload.to_bytes().clone()
        layout = self.method.layout(segments)
        if layout is not None and layout != payload.layout:
            raise FaultError("encode", f"layout {payload.layout}; declared is {layout}")
        if payload.count != 1:
            raise FaultError("encode", f"count {payload.count} of one worker")
        if layout is None:
            self._same_parts(payload, rank)
        if not self.case.light and (rank == 0 or not self.large):
            slots = calls.slots(segments, self.case.dirty)
            view = surrounded(x)
            again = calls.encode(
                view, segments, shared, key, prepared=self.prepared[rank], out=slots
            )
            what = "of x in a tensor of its own, without `out` and `prepared`, it"
            same_bits("encode", again.to_bytes(), sent, what)
        result = calls.decode(payload, segments, shared, rank=key.rank)
        decoded = result.clone()
        if rank == 0:
            self.results.append(("decode", result, decoded))
        oracle.finite("decode", decoded, self.n)
        if rank == 0 and not self.case.light:
            moved = Payload.from_bytes(payload.to_bytes().clone(), payload.layout)
            other = calls.decode(moved, segments, shared)
            same_bits("decode", other, decoded, "before the payload was sent it")
            other.fill_(math.nan)  # the caller may modify it
        if not self.case.light:
            other = calls.decode(payload, segments, shared, out=self.out())
            same_bits("decode", other, decoded, "without `out`, before its result was changed, it")
        same_bits("decode", payload.to_bytes(), sent, "the payload before")
        if x is self.xs[0] and not bool(x.any()):
            self._zeros(decoded)
        even = self.case.values in ("normal", "signs") and self.case.spread == "equal scales"
        redraws = calls.redraws(x, segments, shared, key) if self.profile.random else None
        oracle.value(calls, x, segments, shared, decoded, even=even, redraw=redraws)
        self.contraction(rank, x, decoded)
        self.exact(x, decoded)
        if "sparse" in self.method.legal_collectives():
            dense = torch.zeros(self.n)
            positions, values = calls.entries(x, segments, shared, key)
            dense[positions] = values
            same_bits("entries", dense + 0.0, decoded + 0.0, "decode(encode(x))")
        same_bits("encode or entries", x, before, "x before the call")
        self.payloads.append(payload)
        self.decoded.append(decoded)
        self.bytes.append(sent)

    def _same_parts(self, payload: Payload, rank: int) -> None:
        """Parts have the same dtypes on all workers: a header has only their sizes."""
        first, whose = (self.payloads or [payload])[0], "worker 0 sends"
        if not rank:
            zeros, key = torch.zeros(self.n), self.case.key()
            first = self.calls.encode(zeros, self.segments, self.shared, key)
            whose = "a worker with zeros sends"
        dtypes, others = ([dtype for dtype, _ in each.layout] for each in (payload, first))
        if dtypes != others:
            raise FaultError("encode", f"returned parts of {dtypes}, where {whose} {others}")

    def _zeros(self, decoded: Tensor) -> None:
        claims = self.method.claims
        # With a range of all workers, levels may lie beside 0.
        ranged = bool(self.shared.any()) and not self.profile.drawn
        unbiased = claims.unbiased and not (ranged and claims.omega(self.segments) is None)
        if (unbiased or claims.contractive) and bool(decoded.any()):
            raise FaultError("decode(encode(x))", "zeros are not decoded as zeros")

    def contraction(self, rank: int, x: Tensor, decoded: Tensor) -> None:
        """Hold the error to the declared bound."""
        few = rank > 1 and not self.large  # short inputs are many
        if not self.method.claims.contractive or few:
            return
        errors = [oracle.error_energy(x, decoded)]
        if self.profile.random and rank == 0 and not self.large:
            for turn in range(1, oracle.DRAWS):
                key = self.case.key()
                key = key._replace(step=(key.step + turn * 1009) % 2**32)
                drawn = self.profile.drawn
                shared = self.calls.shared([x], self.segments, key) if drawn else self.shared
                sent = self.calls.encode(x, self.segments, shared, key)
                actual = self.calls.decode(sent, self.segments, shared)
                errors.append(oracle.error_energy(x, actual))
        oracle.contraction(
            self.calls, x, self.segments, self.shared, errors, random=self.profile.random
        )
        if not (self.profile.random or self.shared.numel()):
            self.reduces(x, decoded)

    def reduces(self, x: Tensor, decoded: Tensor) -> None:
        """The error of a segment is below its energy, if 16-bit floats can represent it."""
        lost, size = (ops.statistics.moments(y, self.segments)[1] for y in (x - decoded, x))
        largest = ops.statistics.absmax(x, self.segments)
        tried = (largest > 2.0**-10) & (largest < 2.0**10)
        wrong = (tried & ~(lost < size)).nonzero()
        if len(wrong):
            what = f"not contractive: segment {int(wrong[0]):,} loses {float(lost[wrong[0]]):.4g}"
            raise FaultError("decode(encode(x))", f"{what} of {float(size[wrong[0]]):.4g}")

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
        calls.key = self.case.key()
        which = [rank % len(self.xs) for rank in range(self.case.workers)]
        payloads = [self.payloads[i] for i in which]
        decoded = [self.decoded[i] for i in which]
        want = oracle.aggregate(calls, decoded, segments, shared)
        room = oracle.mean_rounding(calls, decoded, segments)
        legal = self.method.legal_collectives()
        mean = None
        if self.has_mean(len(payloads)):
            result = calls.mean(payloads, segments, shared)
            mean = result.clone()
            self.results.append(("mean", result, mean))
            self._is_mean("mean", mean, want, None, room)
            if not self.case.light:
                other = calls.mean(payloads, segments, shared, out=self.out())
                same_bits("mean", other, mean, "without `out` it")
            if len(payloads) > 1:
                self._counted(payloads, want is not None)
                self.unchanged()
            if want is None and not self.large:
                self._contributes(mean)
        if "twoshot" in legal:
            self._merged(payloads, mean, want, room)
        if "allreduce" in legal:
            self._summed(payloads, mean, want, room)

    def has_mean(self, workers: int) -> bool:
        """Whether `mean` is defined for this number of workers: an even vote may be tied."""
        legal = self.method.legal_collectives()
        return "allgather" in legal or requantizes(self.method) or workers % 2 == 1

    def _is_mean(
        self, function: str, actual: Tensor, want: Tensor | None, mean: Tensor | None, room: Tensor
    ) -> None:
        """Hold a result to the aggregate, or, where that is undefined, to the result of `mean`."""
        oracle.finite(function, actual, self.n)
        if want is None:
            if mean is not None:
                oracle.near(function, actual, mean, room, "the mean")
            return
        oracle.near(function, actual, want, room, "the average of the decoded payloads")
        if self.method.claims.aggregate == "vote":
            tied = want.isnan()
            if bool((actual[tied].abs() != 1).any()):
                raise FaultError(function, "a tied vote is neither +1 nor -1")

    def _counted(self, payloads: Sequence[Payload], defined: bool) -> None:
        """The last payload stands for three workers."""
        calls, segments, shared = self.calls, self.segments, self.shared
        merged = payloads[-1]._replace(count=3)
        if not defined or self.method.layout(segments, 3) != merged.layout:
            return
        if self.method.claims.aggregate != "mean":
            return
        last = calls.decode(merged, segments, shared).clone()
        first = self.decoded[0]
        mean = calls.mean([payloads[0], merged], segments, shared)
        all_ = [first, last, last, last]
        want = oracle.aggregate(calls, all_, segments, shared)
        assert want is not None
        room = oracle.mean_rounding(calls, all_, segments)
        oracle.near("mean", mean, want, room, "the average with a payload of 3 workers")

    def _contributes(self, mean: Tensor) -> None:
        """Where the aggregate is not defined, the payload of each worker must change it."""
        if self.case.values != "normal" or self.case.spread != "equal scales" or self.n < 1000:
            return
        calls, segments, shared = self.calls, self.segments, self.shared
        if self.case.workers > len(self.xs):
            return  # workers repeat payloads
        for rank, x in enumerate(self.xs):
            other = list(self.payloads)
            other[rank] = calls.encode(-x, segments, shared, self.case.key(rank))
            if torch.equal(calls.mean(other, segments, shared), mean):
                raise FaultError("mean", f"the payload of worker {rank} does not change it")

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
        layout = self.method.layout(segments, count)
        if layout is not None and layout != merged.layout:
            raise FaultError("merge", f"layout {merged.layout}; declared is {layout}")
        slots = calls.slots(segments, self.case.dirty, count)
        other = calls.merge(payloads, segments, shared, key, out=slots)
        same_bits("merge", other.to_bytes(), sent, "without `out` it")
        if requantizes(self.method):
            assert mean is not None
            again = calls.encode(mean, segments, shared, key)
            same_bits("merge", sent, again.to_bytes(), "encode of the mean")
            want = calls.decode(again, segments, shared).clone()
            actual = calls.decode(merged, segments, shared)
            same_bits("decode", actual, want, "of one worker's payload with the same parts it")
            return
        actual = calls.decode(merged, segments, shared).clone()
        self._is_mean("merge", actual, want, mean, room)
        buffered = calls.decode(merged, segments, shared, out=self.out())
        same_bits("decode", buffered, actual, "without `out` it (merged payload)")

    def _summed(
        self, payloads: Sequence[Payload], mean: Tensor | None, want: Tensor | None, room: Tensor
    ) -> None:
        calls, segments, shared = self.calls, self.segments, self.shared
        total = calls.total(payloads, segments, shared)
        actual = calls.decode_sum(total, segments, shared).clone()
        self._is_mean("decode_sum", actual, want, mean, room)
        other = calls.decode_sum(total, segments, shared, out=self.out())
        same_bits("decode_sum", other, actual, "without `out` it")

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
        want = offered - calls.decode(plain, segments, shared)
        for slots in (None, calls.slots(segments, case.dirty)):
            left = residual.clone()
            fed = calls.encode_feedback(x, left, segments, shared, key, out=slots)
            same_bits("encode_feedback", fed.to_bytes(), sent, "encode(x + residual)")
            same_bits("encode_feedback (residual)", left + 0.0, want + 0.0, "x + residual - decode")
        same_bits("encode_feedback", x, before, "x before the call")

    def cut(self) -> None:
        """`cut` gives the bytes and the values of the shards."""
        calls, segments, shared = self.calls, self.segments, self.shared
        payload, decoded, n = self.payloads[0], self.decoded[0], self.n
        calls.key = self.case.key()
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
                layout = self.method.layout(inside)
                if layout is not None and piece.layout != layout:
                    raise FaultError("cut", f"layout {piece.layout}; declared is {layout}")
                part = shared[which.start : which.stop] if shared.numel() else shared
                actual = calls.decode(piece, inside, part, out=self.out(stop - start), start=start)
                same_bits("cut", actual, decoded[start:stop], f"the payload in [{start}, {stop})")

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
        actual = calls.decode(calls.encode(xs[0], segments, shared, key), segments, shared)
        want = self.decoded[0][start:stop]
        what = f"in the bucket of {len(self.segments):,} segments, from {start:,} on, it"
        if self.method.claims.portable:
            try:
                same_bits("decode(encode(x))", actual + 0.0, want + 0.0, what)
            except FaultError as fault:
                raise FaultError(
                    fault.function,
                    f"{fault.what}; blocks must start again at each segment, and `ops.random` must "
                    "receive the key and all elements",
                ) from None
        else:
            self._as_far(xs[0], actual, want, what)
        if self.method.claims.contractive and len(shapes) > 1:
            errors = [oracle.error_energy(xs[0], actual)]
            oracle.contraction(calls, xs[0], segments, shared, errors, random=self.profile.random)

    def _as_far(self, x: Tensor, actual: Tensor, want: Tensor, what: str) -> None:
        """Compare distances from x: where a library rounds, it may select other coefficients."""
        off = oracle.error_energy(x, actual) - oracle.error_energy(x, want)
        if not abs(off) <= 1e-4 * oracle.energy(x) + 1e-60:
            raise FaultError(
                "decode(encode(x))",
                f"||x - C(x)||^2 is {off:.4g} more than where {what} is encoded; ||x||^2 is "
                f"{oracle.energy(x):.4g}",
            )


class RoundsTrial:
    """One input on a method in rounds."""

    def __init__(self, calls: Calls, profile: Profile, case: Case) -> None:
        self.calls, self.case = calls, case
        self.method = calls.method
        self.segments = case.segments(self.method)
        xs = case.gradients(self.segments)
        count = case.workers if self.segments.numel < 2000 else min(case.workers, 4)
        self.xs = [xs[rank % len(xs)] for rank in range(count)]
        calls.scale = case.scale, case.scale
        calls.workers, calls.lr = count, case.lr
        self.means: list[Tensor] = []

    def digest(self) -> tuple[bytes, ...]:
        """Return the mean, as bytes."""
        return tuple(raw(t) for t in self.means)

    def _step(
        self, xs: Sequence[Tensor], dirty: int, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the mean and the final state of one step from `state`, or the initial state."""
        n = self.segments.numel
        method = self.method
        assert isinstance(method, MultiRoundCompressor)
        if state is None:
            state = self.calls.initial_state(self.segments, self.case.key())
        out = torch.full((4 * n,), dirty, dtype=torch.uint8).view(torch.float32)
        later = self.case.key()
        later = later._replace(step=(later.step + 1) % 2**32)
        before = state.clone()
        (mean, final), *others = self.calls.rounds(xs, self.segments, state, later, out)
        same_bits("in_rounds", state, before, "the state before the step")
        if not bool(final.isfinite().all()):
            what = "the next state is not finite once the means of the step are overwritten"
            raise FaultError("in_rounds", what)
        for other_mean, other_final in others:
            same_bits("in_rounds", other_mean, mean, "the mean on worker 0")
            same_bits("in_rounds", other_final, final, "the final state on worker 0")
        return mean, final

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
        if n < 2000:
            self._equal(self.xs[0])
        if n < 20_000:
            self._decoded(self.xs[0])
        if 0 < n < 20_000:
            self._exact()
        average = torch.stack([x.double() for x in self.xs]).mean(0).float()
        errors = [oracle.error_energy(average, mean)]
        if self.method.claims.contractive:
            state = self.calls.initial_state(self.segments, self.case.key())
            oracle.contraction(self.calls, average, self.segments, state, errors, random=True)
            self._later(average)
        self.means = [mean, final]

    def _equal(self, x: Tensor) -> None:
        """Four workers with equal gradients apply what one does; sums of four are exact."""
        (single, _), (mean, _) = (self._step([x] * count, 0xFF) for count in (1, 4))
        room = 1e-5 * single.double().abs() + 2.0**-140
        oracle.near("in_rounds", mean, single, room, "with one worker of the same gradient it")

    def _decoded(self, x: Tensor) -> None:
        """One worker applies what its payload is decoded to."""
        calls, segments, key = self.calls, self.segments, self.case.key()
        state = calls.initial_state(segments, key)
        later = key._replace(step=(key.step + 1) % 2**32)
        decoded = calls.decode(calls.encode(x, segments, state, later), segments, state)
        single, _ = self._step([x], 0xFF)
        room = 1e-5 * single.double().abs() + 2.0**-140
        oracle.near("decode", decoded, single, room, "the mean of a step with one worker")

    def _exact(self) -> None:
        """One worker applies the inputs that the method declares to transmit exactly.

        Up to 1e-3 of the largest: random factors may be ill-conditioned.
        """
        for family in self.method.claims.exact_for:
            x = inputs.EXACT[family](self.segments, self.case.seed)
            mean, _ = self._step([x], 0)
            room = 1e-3 * x.double().abs().max().expand_as(x)
            oracle.near("in_rounds", mean, x, room, f"the gradient ({family})")

    def _later(self, x: Tensor) -> None:
        """Hold the error to ||x||^2 also after a step with zero, tiny or huge gradients."""
        factor = (0.0, 2.0**-100, 2.0**100)[self.case.seed % 3]
        _, state = self._step([inputs.values(len(x), 17) * factor], 0)
        mean, _ = self._step([x], 0, state)
        oracle.finite("in_rounds", mean, len(x))
        errors = [oracle.error_energy(x, mean)]
        oracle.contraction(self.calls, x, self.segments, state, errors, random=True)


def attempt(
    calls: Calls, profile: Profile, case: Case
) -> tuple[FaultError | None, Trial | RoundsTrial | None]:
    """Run one input; return its fault, or the trial."""
    rounds = isinstance(calls.method, MultiRoundCompressor)
    try:
        one = (RoundsTrial if rounds else Trial)(calls, profile, case)
        one.run()
    except FaultError as fault:
        return fault, None
    except Exception as error:
        return FaultError(calls.last, f"{type(error).__name__}: {error}"), None
    return None, one
