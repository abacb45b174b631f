"""Sweeps over steps, ranks, seeds, offsets, workers and positions, on short inputs."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from gcbench.checks import inputs, oracle
from gcbench.checks.calls import Calls
from gcbench.checks.cases import COMPOSITE, Case, Effort
from gcbench.checks.oracle import FaultError, Profile, raw, same_bits
from gcbench.core.compressor import (
    TILE,
    Key,
    MultiRoundCompressor,
    Payload,
    Segments,
    fuses_feedback,
    requantizes,
)


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

    def __init__(self, calls: Calls, profile: Profile) -> None:
        self.calls, self.profile = calls, profile
        method, claims = calls.method, calls.method.claims
        self.family = next((f for f in claims.exact_for if claims.portable), None)
        shapes: inputs.Shapes = ((8, 16), (33,))
        if profile.random and self.family is None:
            shapes = ((32, 64), (33,))
        self.segments = Segments.of(shapes, method.granularity)
        seed = 3
        if self.family:
            self.x = inputs.EXACT[self.family](self.segments, seed)
        elif profile.random and claims.contractive:
            self.x = inputs.EXACT["signs"](self.segments, seed)
        else:
            self.x = inputs.values(self.segments.numel, seed)
        calls.scale, calls.workers, calls.lr = (0, 0), 3, 1.0
        self.first: bytes | None = None
        self.merged: bytes | None = None
        """What a deterministic method sends, and what it merges; the same at every key."""
        self.room = 0.0
        """How far above the declared bound the squared error of a single draw may be."""
        if not profile.random:
            self.first = raw(self.payload(Key(7, 1, 0))[0].to_bytes())
        elif self.family is None and claims.contractive:
            errors = [self._error(Key(9, 3 + 1009 * turn, 5)) for turn in range(32)]
            self.room = 8 * statistics.stdev(errors)

    def payload(self, key: Key) -> tuple[Payload, Tensor]:
        """Encode the input with this key."""
        shared = self.calls.shared([self.x], self.segments, key)
        return self.calls.encode(self.x, self.segments, shared, key), shared

    def _error(self, key: Key) -> float:
        payload, shared = self.payload(key)
        decoded = self.calls.decode(payload, self.segments, shared)
        return oracle.error_energy(self.x, decoded)

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
                actual = calls.decode(merged, segments, shared).clone()
                want = calls.decode(payload, segments, shared)
                room = oracle.mean_rounding(calls, [want] * 3, segments)
                oracle.near("merge", actual, want, room, "the payload that all three sent")

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
            if error > bound * (1 + 1e-4) + self.room:
                raise FaultError(
                    "decode(encode(x))", f"||x - C(x)||^2 = {error:.6g} is above {bound:.6g}"
                )


def sweep_keys(
    calls: Calls, profile: Profile, effort: Effort
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the keys at which a short input is encoded: (text, call)."""
    if isinstance(calls.method, MultiRoundCompressor):
        return
    witness = Witness(calls, profile)
    keys = [Key(7, step, 0) for step in natural_steps(effort.steps)]
    few = [*range(130), *(2**k - 1 for k in range(8, 24)), *(2**k for k in range(8, 24))]
    keys += [Key(7, 1, rank) for rank in (*few, 1000, 2**24 - 1)]
    keys += [Key(2**k + d, 2, 1) for k in range(0, 64, 3) for d in (0, 1)]
    keys += [Key(3, 3, 2, 2**k + d) for k in range(40) for d in (-1, 0, 1, TILE)]
    for key in keys[:: effort.thin]:
        text = f"step {key.step}, rank {key.rank}, seed {key.seed}, offset {key.offset}"
        where = f"{inputs.describe(((len(witness.x),),))}; {text}"
        yield where, lambda key=key: witness.look(key)  # type: ignore[misc]


def sweep_workers(calls: Calls, profile: Profile, effort: Effort) -> Iterator[Case]:
    """Yield short inputs for every number of workers up to 33, and around powers of two."""
    many = () if calls.method.scratch else (401, 1000)
    if isinstance(calls.method, MultiRoundCompressor):
        many = ()
    counts = [*range(1, 34), 63, 64, 65, 100, 127, 128, 129, 255, 256, 257, *many]
    for workers in counts[:: effort.thin]:
        yield Case(((5, 13), (8,)), workers=workers, spread="scales 2^0, 2^-10, 2^-20")


def sweep_positions(calls: Calls, profile: Profile) -> Iterator[Case]:
    """Yield inputs with one nonzero at each position of 512 segments of 512 elements."""
    if profile.local:
        yield Case(((16, 32),) * 512, values=inputs.DIAGONAL, workers=1)
        yield Case(((512,),) * 512, values=inputs.DIAGONAL, workers=2)
