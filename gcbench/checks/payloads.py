"""Properties of payloads and refusals: size, threads, corrupt bytes, illegal choices."""

from __future__ import annotations

import inspect
import math
import sys
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor

from gcbench.checks import calls, inputs, oracle
from gcbench.checks.outcome import Measurement, NotDeclaredError
from gcbench.core import codec, exchange, memory, registry
from gcbench.core.compressor import (
    COLLECTIVES,
    Compressor,
    Context,
    MultiRoundCompressor,
    Payload,
    fuses_feedback,
    overrides,
)
from gcbench.core.errors import PayloadError, UsageError
from gcbench.training.configuration import Config

T = TypeVar("T")
PATIENCE = 5.0
"""Longest wait of a worker for its turn, in seconds; then it goes on out of turn, so that a lock
inside a method cannot block the check forever."""
MOST = 5000
"""Turns of a worker; then it goes on without waiting, as slow loops may have many lines."""


def threads(method: Compressor) -> Measurement:
    """Payload and decoded gradient have the same bits with one thread as with two."""
    if not method.claims.portable:
        raise NotDeclaredError("a library decides its last bits")
    segments = calls.segments_of(method, inputs.MILLION)
    x = inputs.values(segments.numel, 0)
    results, before = [], torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            payload, ctx = calls.encode(method, x, segments)
            decoded = codec.decode(method, payload, ctx)
            results.append((oracle.raw(payload.to_bytes()), oracle.raw(decoded)))
    finally:
        torch.set_num_threads(before)
    pairs = zip(("payload", "decoded gradient"), *results, strict=True)
    wrong = [f"{what} differs" for what, one, two in pairs if one != two]
    return Measurement(
        ", ".join(wrong) or f"{segments.numel:,} elements", "the same bits", not wrong
    )


def concurrent(method: Compressor) -> Measurement:
    """Two workers that take turns return the bits of a single one; see `in_turns`.

    A simulation runs its workers in threads. A method that writes intermediate results to a buffer
    of its own mixes the values of the workers.
    """
    faults = [
        f"{function} of worker {rank}, {sum(map(math.prod, shapes)):,} elements"
        for shapes in TURNS
        for function, rank in _mixed(method, shapes)
    ]
    return Measurement("; ".join(faults[:3]) or "0 faults", "0 faults", not faults)


TURNS: tuple[inputs.Shapes, ...] = (((40, 33), (33,)), ((70_001,), (33,)))
"""Buckets of two workers that take turns: some methods share buffers of long tensors alone."""


def _mixed(method: Compressor, shapes: inputs.Shapes) -> Iterator[tuple[str, int]]:
    """Yield what two workers that take turns encode, decode or average otherwise than alone."""
    if isinstance(method, MultiRoundCompressor):
        yield from _mixed_rounds(method, shapes)
        return
    segments = calls.segments_of(method, shapes)
    xs = [inputs.values(segments.numel, 7919 * rank) for rank in range(4)]
    ctx = Context(segments, key=calls.KEY, workers=2)
    ctx = ctx._replace(shared=codec.agree(method, xs, ctx)[0])
    places = [ctx._replace(key=ctx.key._replace(rank=rank % 2)) for rank in range(4)]
    sent = [codec.encode(method, x, at) for x, at in zip(xs, places, strict=True)]
    legal = method.legal_collectives()

    def worker(rank: int) -> dict[str, bytes]:
        x, at, residual = xs[rank], places[rank], xs[rank + 2].clone()
        received = sent[2 * rank : 2 * rank + 2]  # of a shard that this worker owns
        results = {}
        if overrides(method, "prepare"):
            results["prepare"], cached = codec.prepare(method, x, at)
            at = at._replace(prepared=cached)
        payload = codec.encode(method, x, at)
        results["encode"] = payload.to_bytes()
        results["decode"] = codec.decode(method, payload, ctx)
        if fuses_feedback(method):
            fed = codec.feedback(method, x, residual, places[rank])
            results["encode_feedback"] = torch.cat([fed.to_bytes(), residual.view(torch.uint8)])
        if "allgather" in legal:
            results["mean"] = codec.mean(method, received, ctx)
        if "twoshot" in legal:
            results["merge"] = codec.merge(method, received, ctx).to_bytes()
        if "sparse" in legal:
            results["entries"] = codec.entries(method, x, at).pack()
        if "allreduce" in legal:
            results["summand"] = method.summand(payload, ctx).to_bytes()
        return {function: oracle.raw(result) for function, result in results.items()}

    alone = _in_a_thread(worker)
    for rank, results in enumerate(in_turns(method, worker)):
        for function, result in results.items():
            if result != alone[rank][function]:
                yield function, rank


def _mixed_rounds(method: MultiRoundCompressor, shapes: inputs.Shapes) -> Iterator[tuple[str, int]]:
    """Yield in which rounds two workers that take turns contribute otherwise than alone.

    Both start a round after the mean of the previous one, and neither finishes the step: what they
    compute from means alone is equal.
    """
    segments = calls.segments_of(method, shapes)
    n, xs = segments.numel, [inputs.values(segments.numel, 7919 * rank) for rank in range(2)]
    ctx = Context(segments, key=calls.KEY, out=torch.zeros(n), workers=2)
    state = method.initial_state(ctx)
    taking, single = ([method.in_rounds(x, state, ctx) for x in xs] for _ in range(2))
    mean = None  # starts a generator
    for turn in range(len(method.layout(segments) or ())):
        alone = _in_a_thread(_after(mean, single))
        mixed = in_turns(method, _after(mean, taking))
        for rank, pair in enumerate(zip(alone, mixed, strict=True)):
            if oracle.raw(pair[0]) != oracle.raw(pair[1]):
                yield f"round {turn + 1}", rank
        mean = torch.stack(alone).mean(0)
    for each in (*taking, *single):
        each.close()


def _after(
    mean: Tensor | None, rounds: Sequence[Generator[Tensor, Any, Any]]
) -> Callable[[int], Tensor]:
    """Return a function that returns a worker's summand of the round after this mean."""
    return lambda rank: rounds[rank].send(mean).clone()


def _in_a_thread(worker: Callable[[int], T]) -> list[T]:
    """Return the results of workers 0 and 1, one after the other.

    Not in the main thread, which may have another number of threads of torch.
    """
    with ThreadPoolExecutor(1) as pool:
        return [*pool.map(worker, range(2))]


def in_turns(plugin: object, worker: Callable[[int], T]) -> list[T]:
    """Return the results of workers 0 and 1, whose threads take turns.

    A turn ends after an operation of torch, and before a line of the files of the plug-in's class.
    """
    files = {inspect.getfile(cls) for cls in type(plugin).__mro__ if cls is not object}
    batons = [threading.Semaphore(1), threading.Semaphore(0)]
    turns = [Turns(batons, files), Turns(batons[::-1], files)]

    def in_turn(rank: int) -> T:
        with turns[rank]:
            return worker(rank)

    with ThreadPoolExecutor(2) as pool:
        return [*pool.map(in_turn, range(2))]


class Turns(torch.overrides.TorchFunctionMode):
    """Lets another thread go on at the end of each turn of this one."""

    def __init__(self, batons: Sequence[threading.Semaphore], files: Collection[str]) -> None:
        """`batons`: that of this thread, then that of the other one. `files`: see `in_turns`."""
        super().__init__()
        (self.mine, self.other), self.files = batons, files
        self.left, self.before = MOST, sys.gettrace()

    def __enter__(self) -> Turns:
        """Wait for the first turn."""
        super().__enter__()  # type: ignore[no-untyped-call]
        self.before = sys.gettrace()
        self.mine.acquire(timeout=PATIENCE)
        sys.settrace(self._trace)
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operation of torch, then pass the turn on."""
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._pass_on()

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        """Pass the turn on before each line of the files, as Python's trace function."""
        if frame.f_code.co_filename not in self.files:
            return None
        if event == "line":
            self._pass_on()
        return self._trace

    def _pass_on(self) -> None:
        self.other.release()
        self.left -= 1
        if self.left > 0 and not self.mine.acquire(timeout=PATIENCE):
            self.left = 0  # the other thread waits for a lock

    def __exit__(self, *error: Any) -> None:
        """Leave all further turns to the other thread."""
        sys.settrace(self.before)
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.other.release(2 * MOST)


def nominal_bits(method: Compressor) -> Measurement:
    """The payload has at most 1.5 times the bits per element that the source quotes.

    It has at least half of them. The factor is 2 where sizes depend on the data, and both are 4
    where fields are not at their defaults: the source may quote another format.

    The relative error of normal values is at least 2^(-2 R) for R bits per element (Shannon 1959);
    where it is less, the receiver knows more than what was sent.
    """
    nominal = method.claims.nominal_bits
    segments = calls.segments_of(method, inputs.MILLION)
    x = inputs.values(segments.numel, 0)
    payload, ctx = calls.encode(method, x, segments)
    sent = 8 * payload.nbytes / segments.numel
    agreed = 32 * ctx.shared.numel() / segments.numel  # if it is a statistic
    least = 0.9 * 4.0 ** -(sent + agreed)
    error = oracle.error_energy(x, codec.decode(method, payload, ctx)) / oracle.energy(x)
    if sent < 20 and error < least:
        what = "values arrive that are not in the payload"
        return Measurement(f"error {error:.3g}", f"at least {least:.3g}", False, what)
    if nominal is None:
        raise NotDeclaredError("the source quotes no number of bits")
    below, above = 4.0, 4.0
    if not registry.changed(method):
        below, above = 2.0, 2.0 if method.layout(segments) is None else 1.5
    low, high = nominal / below, nominal * above
    return Measurement(
        f"{sent:.3f} bits per element", f"{low:.3f} to {high:.3f}", low <= sent <= high
    )


def illegal(method: Compressor) -> Measurement:
    """Illegal collectives and memories are refused, with the legal choices in the message.

    Its own memory and the settings of its recipe are legal, and a ring only if each hop can encode
    a partial sum.
    """
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
    if "ring" in method.legal_collectives() and (why := exchange.no_partial_sums(method)):
        faults.append(f"ring: {why}")
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
    try:
        Config.make(method.recipe)
    except UsageError as error:
        faults.append(f"its recipe: {error}")
    return Measurement(", ".join(faults) or "0 faults", "0 faults", not faults)


def corruptions(payload: Payload, seed: int) -> Iterator[tuple[str, Payload, bool]]:
    """Yield corrupt versions of a payload: the change, the payload, whether decoding must raise.

    Random bytes of the right length may be a valid payload, which must decode to finite values.
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
    """Split bytes into parts like those of another payload; the last part takes the rest."""
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


def corrupt_fault(method: Compressor, payload: Payload, ctx: Context, *, must: bool) -> str:
    """Decode a corrupt payload; return the fault, or "".

    `must`: whether decoding must raise a PayloadError. Where sizes depend on the data, the payload
    is legal if the encoder sends the same one for what was decoded.
    """
    try:
        decoded = codec.decode(method, payload, ctx)
    except PayloadError:
        return ""
    except Exception as error:
        return f"{type(error).__name__} instead of PayloadError: {error}"
    if must and not _sent_again(method, payload, decoded, ctx):
        return "no error"
    right = decoded.shape == (ctx.segments.numel,) and bool(decoded.isfinite().all())
    return "" if right else "values that are not finite, or another shape"


def _sent_again(method: Compressor, payload: Payload, decoded: Tensor, ctx: Context) -> bool:
    """Return whether a method without a layout encodes the decoded tensor as the same payload."""
    if method.layout(ctx.segments) is not None or payload.count != 1:
        return False
    again = codec.encode(method, decoded, ctx)
    return again.layout == payload.layout and oracle.raw(again.to_bytes()) == oracle.raw(
        payload.to_bytes()
    )


def corrupt(method: Compressor) -> Measurement:
    """A payload cut, too long, of random bytes or for another tensor raises PayloadError.

    Where the other tensor's payloads have the same layout, finite values are accepted; so they are
    of a random method whose sizes depend on the data, as another draw may have sent that payload.
    See also `corrupt_fault`.
    """
    segments = calls.segments_of(method, [(40, 33), (1,), (70,)])
    other = calls.segments_of(method, [(40, 33), (1,), (70,), (33,)])
    faults, done = [], 0
    payload, ctx = calls.encode(method, inputs.normal(segments.numel), segments)
    cases = [(*case, ctx) for seed in range(4) for case in corruptions(payload, seed)]
    apart = method.layout(other) != payload.layout
    if method.layout(other) is None:
        apart = not calls.is_random(method, inputs.normal(segments.numel), segments)
    agreed = calls.agree(method, [inputs.normal(other.numel)], other)
    there = ctx._replace(segments=other, shared=agreed)
    cases.append(("33 elements more expected", payload, apart, there))
    for name, broken, must, place in cases:
        fault = corrupt_fault(method, broken, place, must=must)
        done += 1
        if fault:
            faults.append(f"{name}: {fault}")
    return Measurement("; ".join(faults[:2]) or f"{done} refused", f"{done} cases", not faults)
