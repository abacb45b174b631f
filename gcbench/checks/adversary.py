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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from gcbench.checks import calls as calls_of
from gcbench.checks import inputs, oracle
from gcbench.checks.calls import Calls, Covered
from gcbench.checks.cases import FULL, HUGE, Case, Effort, cases
from gcbench.checks.oracle import FaultError, Profile, same_bits
from gcbench.checks.sweeps import sweep_keys, sweep_positions, sweep_workers
from gcbench.checks.trial import RoundsTrial, Trial, attempt
from gcbench.core import purposes
from gcbench.core.compressor import (
    Compressor,
    Key,
    MultiRoundCompressor,
    Segments,
    fuses_feedback,
    requantizes,
)
from gcbench.core.errors import PayloadError, UsageError

PATIENCE = 5.0
"""Seconds of CPU time of the first input of 66,000 tensors beyond which the others are left out."""
FAR_DRAWS = 9
"""Keys at which the longest input is encoded, if one key of a random method shows a fault."""


class Finding(NamedTuple):
    """A function that breaks the contract, how, and on which input."""

    function: str
    fault: str
    case: str

    def __str__(self) -> str:
        return f"{self.function}: {self.fault} [{self.case}]"


class Search:
    """One search on one method; `covered` and `findings` have the result."""

    def __init__(
        self,
        method: Compressor,
        effort: Effort = FULL,
        seed: int = 0,
        *,
        shrink: int = 40,
        before: Mapping[str, Any] | None = None,
    ) -> None:
        """`before`: the `process_state` before the first call of the method; default: now."""
        self.calls = Calls(method)
        self.effort, self.seed, self.shrink = effort, seed, shrink
        self.findings: list[Finding] = []
        self.inputs = 0
        self.left_out = 0
        """Inputs of 66,000 tensors that were left out, because the first one took long."""
        self.before = before or process_state()

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

    def _start(self) -> None:
        with self._at("shapes [40x50]; normal values"):
            self.profile = oracle.profile(self.calls)

    @contextmanager
    def _at(self, where: str) -> Iterator[None]:
        """Record an exception in the with block as a finding on the input `where`."""
        try:
            yield
        except FaultError as fault:
            self.findings.append(Finding(fault.function, fault.what, where))
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            self.findings.append(Finding(self.calls.last, what, where))

    def _try(self, case: Case) -> Trial | RoundsTrial | None:
        self.inputs += 1
        fault, trial = attempt(self.calls, self.profile, case)
        if fault is not None:
            case, fault = shrunk(self.calls, self.profile, case, fault, self.shrink)
            self.findings.append(Finding(fault.function, fault.what, str(case)))
            return None
        return trial

    def _pairs(self) -> None:
        seen: list[tuple[Case, tuple[bytes, ...]]] = []
        claims = self.calls.method.claims
        exact = claims.exact_for if claims.portable else ()
        slow = False
        for case in cases(self.profile, self.effort, self.seed, exact):
            many, began = case.shapes is inputs.MANY, time.process_time()
            if many and slow:
                self.left_out += 1
                continue
            trial = self._try(case)
            if trial is None:
                return
            slow |= many and time.process_time() - began > PATIENCE
            digest = trial.digest()
            if len(seen) < 30 and sum(map(len, digest)) < 10**6:
                seen.append((case, digest))
        for case, digest in reversed(seen):
            again = self._try(case)
            if again is not None and again.digest() != digest:
                self.findings.append(
                    Finding("encode or decode", "earlier calls change the result", str(case))
                )
            if self.findings:
                return

    def _sweeps(self) -> None:
        for where, look in sweep_keys(self.calls, self.profile, self.effort):
            self.inputs += 1
            with self._at(where):
                look()
            if self.findings:
                return
        for case in (
            *sweep_workers(self.calls, self.profile, self.effort),
            *(sweep_positions(self.calls, self.profile) if self.effort.positions else ()),
        ):
            if self._try(case) is None:
                return

    def _others(self) -> None:
        far = [self._far] * self.effort.far
        for part in (
            self._same_length,
            self._same_place,
            self._huge,
            self._not_finite,
            self._worst_value,
            *far,
        ):
            if not self.findings:
                part()
        changed = changed_since(self.before)
        if changed and not self.findings:
            what = f"changes the process: {', '.join(changed)}"
            self.findings.append(Finding("encode", what, "any input"))

    def _far(self) -> None:
        """Behind element 2^24, where float32 does not hold every position, gradients arrive.

        In each of 32 stretches the product of x and its decoding is positive, and similar. If they
        differ at one key of a random method, those of `FAR_DRAWS` keys must differ by more than
        `oracle.Z` of their standard errors.
        """
        calls, method = self.calls, self.calls.method
        if isinstance(method, MultiRoundCompressor):
            return
        self.inputs += 1
        segments, key = calls_of.segments_of(method, inputs.FAR), Key(7, 1_000_003, 77)
        x = inputs.far_values()
        calls.scale, calls.workers, calls.lr = (0, 0), 1, 1.0
        with self._at(f"shapes {inputs.describe(inputs.FAR)}; normal values"):
            fault = _uneven([self._shares(x, segments, key)])
            if fault and self.profile.random:
                keys = [key._replace(seed=seed) for seed in range(FAR_DRAWS)]
                fault = _uneven([self._shares(x, segments, key) for key in keys])
            if fault:
                raise FaultError("decode(encode(x))", fault)

    def _shares(self, x: Tensor, segments: Segments, key: Key) -> Tensor:
        """Return which share of x arrives in each of 32 stretches, float32, shape (32,)."""
        decoded, _ = self.calls.round_trip(x, segments, key)
        oracle.finite("decode", decoded, segments.numel)
        pairs = zip(x.tensor_split(32), decoded.tensor_split(32), strict=True)
        return torch.stack([part @ actual / part.square().sum() for part, actual in pairs])

    def _same_length(self) -> None:
        """Buckets of one length and other segments, one after the other and mixed."""
        self._mixed(inputs.same_length())
        if self.effort.long and not self.findings:
            self._mixed(inputs.same_length(71_610)[:5])

    def _mixed(self, buckets: Sequence[inputs.Shapes]) -> None:
        trials = []
        for shapes in (*buckets, buckets[0]):
            trial = self._try(Case(shapes, values="segments of different norms", workers=2))
            if trial is None:
                return
            if isinstance(trial, Trial):  # methods in rounds encode together with others
                trials.append(trial)
        for one in trials:
            self.calls.encode(one.xs[0], one.segments, one.shared, one.case.key())
        for one in reversed(trials):
            actual = self.calls.decode(one.payloads[0], one.segments, one.shared)
            if not torch.equal(actual, one.decoded[0]):
                self.findings.append(
                    Finding("decode", "encodings of other segments change it", str(one.case))
                )
                return

    def _huge(self) -> None:
        """Values of one worker near the maximum of float32; sums, as rounds form, overflow."""
        for scale in () if isinstance(self.calls.method, MultiRoundCompressor) else HUGE:
            if not self.findings:
                self._try(Case(inputs.MIXED, workers=1, scale=scale, residual="zero"))

    def _same_place(self) -> None:
        """Segments that Python stores where others were stored are not taken for those."""
        calls, method, key = self.calls, self.calls.method, Key(7, 1, 0)
        calls.scale, calls.workers, calls.lr = (0, 0), 1, 1.0
        _, *buckets = inputs.same_length()[:3]
        x = inputs.EVERY_FAMILY["segments of different norms"](
            calls_of.segments_of(method, buckets[1]), 0
        )

        def result(segments: Segments) -> Tensor:
            if isinstance(method, MultiRoundCompressor):
                state = calls.initial_state(segments, key)
                return calls.rounds([x], segments, state, key, torch.zeros(len(x)))[0][0]
            return calls.round_trip(x, segments, key)[0].clone()

        earlier, later = (calls_of.segments_of(method, shapes) for shapes in buckets)
        first = Segments(earlier.offsets, earlier.shapes)
        result(first)
        place, stored = id(first), [later]
        del first
        while len(stored) < 1000 and id(stored[-1]) != place:
            stored.append(Segments(later.offsets, later.shapes))
        where = f"shapes {inputs.describe(buckets[1])} after {inputs.describe(buckets[0])}"
        with self._at(where):
            what = "of segments that are stored elsewhere, it"
            same_bits("decode(encode(x))", result(stored[-1]), result(stored[0]), what)

    def _not_finite(self) -> None:
        """NaN or infinite elements: an error, or finite values."""
        calls, method = self.calls, self.calls.method
        calls.workers, calls.lr = 3, 1.0
        key, bad_values = Key(7, 1, 0), (math.nan, math.inf, -math.inf)
        buckets: list[inputs.Shapes] = [((40, 33), (1,), (1030,))]
        if self.effort.long:
            buckets.append(((70_001,),))
        for shapes in buckets:
            segments = Segments.of(shapes, method.granularity)
            n = segments.numel
            places: list[Sequence[int]] = [(0,), (n - 1,), range(n)]
            places += [(n // 2,), (1320,)] if n < 10_000 else []
            self._with_bad(bad_values, places, segments, key)

    def _with_bad(
        self,
        bad_values: Sequence[float],
        places: Sequence[Sequence[int]],
        segments: Segments,
        key: Key,
    ) -> None:
        """Search with one of these values at one of these places."""
        n = segments.numel
        for bad, place in itertools.product(bad_values, places):
            if self.findings:
                return
            xs = [inputs.values(n, rank) for rank in range(3)]
            xs[1][list(place)] = bad
            where = f"{bad} in {'all elements' if len(place) > 1 else f'element {place[0]}'}"
            with self._at(where), suppress(PayloadError, UsageError):
                self._handled(xs, segments, key)

    def _handled(self, xs: Sequence[Tensor], segments: Segments, key: Key) -> None:
        calls, method, n = self.calls, self.calls.method, segments.numel
        if isinstance(method, MultiRoundCompressor):
            state = calls.initial_state(segments, key)
            (mean, _), *_ = calls.rounds(xs, segments, state, key, torch.zeros(n))
            oracle.finite("in_rounds", mean, n)
            return
        shared = calls.shared(xs, segments, key)
        payloads = [
            calls.encode(x, segments, shared, key._replace(rank=rank)) for rank, x in enumerate(xs)
        ]

        def refused_or_finite(function: str, call: Callable[[], Tensor]) -> None:
            with suppress(PayloadError, UsageError):
                oracle.finite(function, call(), n)

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
            refused_or_finite(
                "decode_sum",
                lambda: calls.decode_sum(calls.total(payloads, segments, shared), segments, shared),
            )
        if fuses_feedback(method):
            left = torch.zeros(n)
            sent = calls.encode_feedback(xs[1], left, segments, shared, key._replace(rank=1))
            same_bits(
                "encode_feedback", sent.to_bytes(), payloads[1].to_bytes(), "encode(x + residual)"
            )

    def _worst_value(self) -> None:
        """The value beside a larger one that loses most, in all other elements of a segment."""
        calls, method = self.calls, self.calls.method
        key, length = Key(7, 1, 0), self.profile.group
        if not method.claims.contractive or self.profile.random or length < 2:
            return
        calls.scale, calls.workers, calls.lr = (0, 0), 1, 1.0
        segments = calls_of.segments_of(method, ((length,),))

        where, rest = f"{length} elements: 1, then fractions of it", length - 1
        tried, lost = [], []
        with self._at(where):
            for part in torch.split(torch.arange(1, 4097) / 4096.0, rest):
                x = torch.ones(length)
                x[1 : len(part) + 1] = part
                tried.append(x[1:])
                lost.append((calls.round_trip(x, segments, key)[0] - x).double()[1:].square())
        if self.findings:
            return
        values, errors = torch.cat(tried), torch.cat(lost)
        worst = int((rest * errors / (1 + rest * values.double().square())).argmax())
        x = torch.full((length,), float(values[worst]))
        x[0] = 1.0
        with self._at(f"{length} elements: 1, then {float(values[worst]):.6g}"):
            actual, shared = calls.round_trip(x, segments, key)
            energy = oracle.error_energy(x, actual)
            oracle.contraction(calls, x, segments, shared, [energy], random=False)


def _uneven(draws: list[Tensor]) -> str:
    """Return in which stretch another share of x arrives than in others, or ""."""
    shares, chance = torch.stack(draws), 0.0
    if len(draws) > 1:
        chance = oracle.Z * math.sqrt(float(shares.var(0).mean()) / len(draws))
    means = shares.mean(0)
    usual = float(means.median())
    for i, share in enumerate(means.tolist()):
        if not max(0.0, 0.55 * usual) - chance < share < 1.8 * usual + chance:
            return f"{share:.3g} of stretch {i + 1} of 32 arrives, {usual:.3g} of others"
    return ""


def process_state() -> dict[str, Any]:
    """Return the state of the process that no method may change, by name."""
    return {
        "torch's generator": oracle.raw(torch.random.get_rng_state()),
        "Python's generator": random.getstate(),
        "numpy's generator": repr(numpy.random.get_state()),
        "default dtype": torch.get_default_dtype(),
        "number of threads": torch.get_num_threads(),
        "gradients enabled": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "numpy's handling of errors": numpy.geterr(),
        "precision of matmul": torch.get_float32_matmul_precision(),
        "denormal numbers": float(torch.tensor(1e-40) * 1.0) != 0.0,
    }


def changed_since(before: Mapping[str, Any]) -> list[str]:
    """Return the names in an earlier `process_state` whose values are others now."""
    after = process_state()
    return [name for name, value in before.items() if after[name] != value]


def mean_fault(method: Compressor) -> str:
    """Return how `mean`, `merge` or `decode_sum` breaks its definition on short inputs, or ""."""
    calls = Calls(method)
    profile = oracle.profile(calls)
    for count in (1, 2, 3, 5, 8, 16):
        fault, _ = attempt(calls, profile, Case(((40, 33), (0,), (1,), (1030,)), workers=count))
        if fault is not None and fault.function in ("mean", "merge", "decode_sum"):
            return f"{fault} ({count} workers)"
    return ""


# ---- smaller inputs ------------------------------------------------------------------------------


def shrunk(
    calls: Calls, profile: Profile, case: Case, fault: FaultError, tries: int
) -> tuple[Case, FaultError]:
    """Return the smallest input within `tries` steps on which the same function still fails."""
    candidates = simpler(case)
    for _ in range(tries):
        smaller = next(candidates, None)
        if smaller is None:
            break
        other, _ = attempt(calls, profile, smaller)
        if other is not None and other.function == fault.function:
            case, fault, candidates = smaller, other, simpler(smaller)
    return case, fault


def simpler(case: Case) -> Iterator[Case]:
    """Yield inputs that are simpler than this one in one respect, the largest steps first."""
    plain = Case(case.shapes)
    for name in ("offset", "rank", "seed", "step", "lr", "spread", "scale", "values", "residual"):
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
