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
    """An input whose result says at one look whether a step, rank or offset is handled."""

    def __init__(self, calls: Calls, profile: Profile, shapes: inputs.Shapes | None = None) -> None:
        self.calls, self.profile = calls, profile
        method, claims = calls.method, calls.method.claims
        self.family = next((f for f in claims.exact_for if claims.portable), None)
        if shapes is None:
            shapes = ((32, 64), (33,)) if profile.random and not self.family else ((8, 16), (33,))
        self.segments = Segments.of(shapes, method.granularity)
        seed = 3
        if self.family:
            self.x = inputs.EXACT[self.family](self.segments, seed)
        elif profile.random and claims.contractive:
            self.x = inputs.EXACT["signs"](self.segments, seed)
        else:
            self.x = inputs.values(self.segments.numel, seed)
        calls.scale, calls.workers, calls.lr = (0, 0), 3, 1.0
        self.first: Tensor | None = None
        self.merged: Tensor | None = None
        self.decoded: Tensor | None = None
        """What a deterministic method sends, merges and decodes; the same at every key."""
        self.sent: dict[Key, bytes] = {}
        """What a random method sent with each key."""
        self.room = 0.0
        """How far above the declared bound the squared error of a single draw may be."""
        if not profile.random:
            payload, shared = self.payload(Key(7, 1, 0))
            self.first = payload.to_bytes().clone()
            self.decoded = calls.decode(payload, self.segments, shared).clone()
        elif self.family is None and claims.contractive:
            errors = [self._error(Key(9, 3 + 1009 * turn, 5)) for turn in range(32)]
            self.room = 8 * statistics.stdev(errors)

    def payload(self, key: Key) -> tuple[Payload, Tensor]:
        """Encode the input with this key."""
        shared = self.calls.shared([self.x], self.segments, key)
        return self.calls.encode(self.x, self.segments, shared, key), shared

    def _error(self, key: Key) -> float:
        return oracle.error_energy(self.x, self.calls.round_trip(self.x, self.segments, key)[0])

    def look(self, key: Key) -> None:
        """Encode and decode at one key, alone, with feedback, in a mean, a sum and a merge.

        Raises:
            FaultError: the result is not that of other keys, or contradicts the claims.
        """
        calls, segments = self.calls, self.segments
        payload, shared = self.payload(key)
        sent = payload.to_bytes().clone()
        decoded = calls.decode(payload, segments, shared).clone()
        if self.first is not None and self.decoded is not None:
            same_bits("encode", sent, self.first, "at step 1 of rank 0 it")
            same_bits("decode", decoded, self.decoded, "at step 1 of rank 0 it")
        else:
            self._value(decoded, shared, key)
            self.sent[key] = raw(sent)
        if fuses_feedback(calls.method):
            self._feedback(key)
        self._of_three(payload, decoded, shared, key)

    def _feedback(self, key: Key) -> None:
        """Half of a gradient and a residual of the same size: as the whole gradient."""
        calls, segments = self.calls, self.segments
        x = inputs.values(segments.numel, 4)
        shared = calls.shared([x], segments, key)
        plain = calls.encode(x, segments, shared, key)
        sent = plain.to_bytes().clone()
        want = x - calls.decode(plain, segments, shared)
        left = x * 0.5
        fed = calls.encode_feedback(x * 0.5, left, segments, shared, key)
        same_bits("encode_feedback", fed.to_bytes(), sent, "encode(x + residual)")
        same_bits("encode_feedback (residual)", left + 0.0, want + 0.0, "x - decode")

    def _of_three(self, payload: Payload, decoded: Tensor, shared: Tensor, key: Key) -> None:
        """Hold `mean`, `decode_sum` and `merge` of three equal payloads to the decoded one."""
        calls, segments, method = self.calls, self.segments, self.calls.method
        payloads, legal = [payload] * 3, method.legal_collectives()
        room = oracle.mean_rounding(calls, [decoded] * 3, segments)
        what = "the payload that all three sent"
        if method.claims.aggregate == "mean":
            if "allgather" in legal or requantizes(method):
                oracle.near("mean", calls.mean(payloads, segments, shared), decoded, room, what)
            if "allreduce" in legal:
                total = calls.total(payloads, segments, shared)
                actual = calls.decode_sum(total, segments, shared)
                oracle.near("decode_sum", actual, decoded, room, what)
        if "twoshot" not in legal:
            return
        merged = calls.merge(payloads, segments, shared, key._replace(stream=1))
        if self.merged is not None:
            same_bits("merge", merged.to_bytes(), self.merged, "at step 1 of rank 0 it")
        elif requantizes(method):
            mean = calls.mean(payloads, segments, shared)
            again = calls.encode(mean, segments, shared, key._replace(stream=1))
            same_bits("merge", merged.to_bytes(), again.to_bytes(), "encode of the mean")
        else:
            oracle.near("merge", calls.decode(merged, segments, shared), decoded, room, what)
        if self.first is not None:
            self.merged = merged.to_bytes().clone()

    def cycle(self) -> None:
        """What a random method sends must not return every p steps.

        Raises:
            FaultError: 20 steps in a row, which differ, are followed by the same 20.
        """
        steps = {key.step: sent for key, sent in self.sent.items() if key[2:4] == (0, 0)}
        run = [steps.get(step, b"") for step in range(20)]
        if len({*run}) < 20 or b"" in run:
            return
        for period in sorted(step for step, sent in steps.items() if step and sent == run[0]):
            if all(steps.get(step + period) == sent for step, sent in enumerate(run)):
                raise FaultError("encode", f"draws the same numbers every {period} steps")

    def _value(self, decoded: Tensor, shared: Tensor, key: Key) -> None:
        calls, segments, x = self.calls, self.segments, self.x
        if self.family:
            same_bits("decode(encode(x))", decoded + 0.0, x + 0.0, f"x ({self.family})")
            return
        redraw = calls.redraws(x, segments, shared, key)
        oracle.value(calls, x, segments, shared, decoded, redraw=redraw)
        if calls.method.claims.contractive:
            error = oracle.error_energy(x, decoded)
            bound = oracle.bound_of(calls, x, segments, shared)
            if error > bound * (1 + 1e-4) + self.room:
                raise FaultError(
                    "decode(encode(x))", f"||x - C(x)||^2 = {error:.6g} is above {bound:.6g}"
                )


def sweep_keys(
    calls: Calls, profile: Profile, effort: Effort
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the keys at which a short input is encoded: (text, call)."""
    if isinstance(calls.method, MultiRoundCompressor):
        yield from _sweep_rounds(calls, effort)
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
    yield "steps of a sweep", witness.cycle
    if effort.long:
        large = Witness(calls, profile, ((130, 130), (33,)))
        for step in range(effort.steps // 16):
            where = f"{inputs.describe(((len(large.x),),))}; step {step}"
            yield where, lambda step=step: large.look(Key(7, step, 0))  # type: ignore[misc]


def _sweep_rounds(calls: Calls, effort: Effort) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield steps of a method in rounds from one state: the same bits, if steps 1 to 3 agree."""
    shapes: inputs.Shapes = ((8, 16), (33,))
    segments = Segments.of(shapes, calls.method.granularity)
    xs = [inputs.values(segments.numel, 3 + rank) for rank in range(2)]
    calls.scale, calls.workers, calls.lr = (0, 0), 2, 1.0
    state = calls.initial_state(segments, Key(7, 1, 0))

    def at(step: int) -> tuple[Tensor, Tensor]:
        out = torch.zeros(segments.numel)
        return calls.rounds(xs, segments, state.clone(), Key(7, step, 0), out)[0]

    wanted = at(1)
    if any(not torch.equal(a, b) for step in (2, 3) for a, b in zip(wanted, at(step), strict=True)):
        return

    def look(step: int) -> None:
        for name, actual, want in zip(("mean", "state"), at(step), wanted, strict=True):
            same_bits("in_rounds", actual, want, f"the {name} at step 1")

    for step in natural_steps(effort.steps)[:: effort.thin]:
        yield f"{inputs.describe(shapes)}; step {step}", lambda step=step: look(step)  # type: ignore[misc]


def sweep_workers(calls: Calls, profile: Profile, effort: Effort) -> Iterator[Case]:
    """Yield short inputs for every number of workers up to 33, and around powers of two.

    With 1500 workers of similar gradients, sums of 8-bit codes do not fit in 16 bits.
    """
    counts = [*range(1, 34), 63, 64, 65, 100, 127, 128, 129, 255, 256, 257]
    for workers in counts[:: effort.thin]:
        yield Case(((5, 13), (8,)), workers=workers, spread="scales 2^0, 2^-10, 2^-20")
    if not (calls.method.scratch or isinstance(calls.method, MultiRoundCompressor)):
        for workers in (401, 1500)[:: effort.thin]:
            yield Case(((5, 13), (8,)), workers=workers, values="constant")


def sweep_positions(calls: Calls, profile: Profile) -> Iterator[Case]:
    """Yield inputs with one nonzero at each position of 512 segments of 512 elements."""
    if profile.local:
        yield Case(((16, 32),) * 512, values=inputs.DIAGONAL, workers=1)
        yield Case(((512,),) * 512, values=inputs.DIAGONAL, workers=2)
