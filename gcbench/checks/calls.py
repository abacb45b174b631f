"""All calls of the contract that the checks make, and what those calls covered.

The checks call a method only through `Calls`, so a change of the contract's signatures touches this
module alone. `Calls` also records, per function, the largest inputs it was given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gcbench.core import codec, purposes
from gcbench.core.compressor import (
    Compressor,
    Context,
    Key,
    MultiRoundCompressor,
    Payload,
    Segments,
    layout_bytes,
)
from gcbench.core.sparse import Entries

FUNCTIONS = (
    *("prepare", "encode", "encode_feedback", "decode", "mean", "merge"),
    *("summand", "decode_sum", "cut", "entries", "in_rounds"),
)
"""The functions of the contract, in the order of the tables."""
FINISHED = 3
"""Workers that run the rounds of a method to the end; they differ in their gradients alone."""


@dataclass
class Covered:
    """The largest inputs that one function received."""

    calls: int = 0
    elements: int = 0
    segments: int = 0
    workers: int = 0
    step: int = 0
    low: int = 0
    """Base-2 exponent of the smallest scale of a gradient."""
    high: int = 0

    def add(self, other: Covered) -> None:
        """Extend the ranges by those of `other`."""
        self.low = min(self.low, other.low) if self.calls else other.low
        self.high = max(self.high, other.high) if self.calls else other.high
        self.calls += other.calls
        for name in ("elements", "segments", "workers", "step"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))

    def as_row(self, function: str) -> dict[str, Any]:
        """Return one line of the coverage table."""
        return {
            "function": function,
            "elements": self.elements,
            "segments": self.segments,
            "workers": self.workers,
            "step": self.step,
            "scales 2^": f"{self.low} to {self.high}",
        }


class Calls:
    """A method as the checks call it; `covered` has the largest inputs per function."""

    def __init__(self, method: Compressor) -> None:
        self.method = method
        self.covered: dict[str, Covered] = {}
        self.last = "encode"
        """The function that was called last."""
        self.scale = 0, 0
        """Exponents of the smallest and largest scale of the current input."""
        self.workers, self.lr = 1, 1.0
        """World size and learning rate of the current exchange."""
        self.doubts = 0
        """Inputs on which the errors of a single draw proved to be chance."""
        self.key = Key(0, 0, 0)
        """The key of rank 0 in the current exchange, which the last call of `encode` sets."""

    def context(self, segments: Segments, shared: Tensor, workers: int = 0) -> Context:
        """Return the context that the engine passes to functions that decode.

        Claims receive it, too: they may depend on the step, the workers and the learning rate.
        """
        return Context(segments, shared, self.key, workers=workers or self.workers, lr=self.lr)

    def _note(self, function: str, segments: Segments, workers: int = 1, step: int = 0) -> None:
        self.last = function
        one = Covered(1, segments.numel, len(segments), workers, step, *self.scale)
        self.covered.setdefault(function, Covered()).add(one)

    # ---- one worker ------------------------------------------------------------------------------

    def shared(self, xs: Sequence[Tensor], segments: Segments, key: Key) -> Tensor:
        """Return what these workers agree on before they encode."""
        return self.agreed(xs, segments, key)[0]

    def agreed(
        self, xs: Sequence[Tensor], segments: Segments, key: Key
    ) -> tuple[Tensor, list[Any]]:
        """Return what these workers agree on, and what each `prepare` cached for its `encode`."""
        if not self.draws_shared(segments, key):
            self._note("prepare", segments, len(xs), key.step)
        ctx = Context(segments, key=key, workers=max(self.workers, len(xs)), lr=self.lr)
        return codec.agree(self.method, xs, ctx)

    def draws_shared(self, segments: Segments, key: Key) -> bool:
        """Return whether `shared` is drawn from the common seed instead of a statistic."""
        return self.method.draw_shared(Context(segments, key=key._replace(rank=0))) is not None

    def initial_state(self, segments: Segments, key: Key) -> Tensor:
        """Return the first state of a method in rounds."""
        assert isinstance(self.method, MultiRoundCompressor)
        return self.method.initial_state(Context(segments, key=key))

    def encode(
        self,
        x: Tensor,
        segments: Segments,
        shared: Tensor,
        key: Key,
        *,
        prepared: Any = None,
        out: Payload | None = None,
    ) -> Payload:
        """Return one worker's payload."""
        self._note("encode", segments, 1, key.step)
        self.key = key._replace(rank=0, stream=purposes.ENCODE)
        ctx = self.context(segments, shared)
        ctx = ctx._replace(key=key, prepared=prepared, parts=out and out.parts)
        return codec.encode(self.method, x, ctx)

    def encode_feedback(
        self,
        x: Tensor,
        residual: Tensor,
        segments: Segments,
        shared: Tensor,
        key: Key,
        *,
        out: Payload | None = None,
    ) -> Payload:
        """Return the payload of x + residual; `residual` becomes the error."""
        self._note("encode_feedback", segments, 1, key.step)
        ctx = self.context(segments, shared)._replace(key=key, parts=out and out.parts)
        return codec.feedback(self.method, x, residual, ctx)

    def decode(
        self,
        payload: Payload,
        segments: Segments,
        shared: Tensor,
        *,
        out: Tensor | None = None,
        start: int = 0,
        rank: int = 0,
    ) -> Tensor:
        """Return the decoded tensor, float32, shape (n,), in `out` if it is given.

        `start`: the first element of the shard in its bucket; `rank`: that of the key.
        """
        self._note("decode", segments, payload.count, self.key.step)
        key = self.key._replace(rank=rank, offset=self.key.offset + start)
        workers = 0 if payload.count == 1 else payload.count
        ctx = self.context(segments, shared, workers)._replace(key=key, out=out)
        return codec.decode(self.method, payload, ctx)

    def round_trip(self, x: Tensor, segments: Segments, key: Key) -> tuple[Tensor, Tensor]:
        """Encode and decode the gradient of a single worker.

        Returns the decoded tensor, float32, shape (n,), and `shared`.
        """
        shared = self.shared([x], segments, key)
        return self.decode(self.encode(x, segments, shared, key), segments, shared), shared

    def redraws(
        self, x: Tensor, segments: Segments, shared: Tensor, key: Key
    ) -> Callable[[int], Tensor]:
        """Return a function of a number that decodes x, encoded with the draws of that number.

        They are those of another seed, so that a fault at a step or rank remains.
        """

        def again(number: int) -> Tensor:
            other = key._replace(seed=key.seed ^ number)
            drawn = self.draws_shared(segments, other)
            common = self.shared([x], segments, other) if drawn else shared
            return self.decode(self.encode(x, segments, common, other), segments, common)

        return again

    def cut(self, payload: Payload, segments: Segments, bounds: Sequence[int]) -> list[Payload]:
        """Return the payload's shards."""
        self._note("cut", segments, len(bounds) - 1, self.key.step)
        return self.method.cut(payload, bounds)

    def entries(self, x: Tensor, segments: Segments, shared: Tensor, key: Key) -> Entries:
        """Return the elements that one worker sends by collective "sparse"."""
        self._note("entries", segments, 1, key.step)
        return codec.entries(self.method, x, self.context(segments, shared)._replace(key=key))

    # ---- several workers -------------------------------------------------------------------------

    def mean(
        self,
        payloads: Sequence[Payload],
        segments: Segments,
        shared: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the mean over the payloads, float32, shape (n,), in `out` if it is given."""
        self._note("mean", segments, len(payloads), self.key.step)
        ctx = self.context(segments, shared, len(payloads))._replace(out=out)
        return codec.mean(self.method, payloads, ctx)

    def merge(
        self,
        payloads: Sequence[Payload],
        segments: Segments,
        shared: Tensor,
        key: Key,
        *,
        out: Payload | None = None,
    ) -> Payload:
        """Return the payload that stands for the mean of several."""
        self._note("merge", segments, len(payloads), key.step)
        ctx = self.context(segments, shared, len(payloads))
        ctx = ctx._replace(key=key, parts=out and out.parts)
        return codec.merge(self.method, payloads, ctx)

    def summand(
        self, payload: Payload, workers: int, segments: Segments, shared: Tensor
    ) -> Payload:
        """Return the payload in the form that an all-reduce adds."""
        self._note("summand", segments, workers, self.key.step)
        return self.method.summand(payload, self.context(segments, shared, workers))

    def total(self, payloads: Sequence[Payload], segments: Segments, shared: Tensor) -> Payload:
        """Return the sum of the payloads' summands, as an all-reduce adds them: in order."""
        summands = [self.summand(p, len(payloads), segments, shared).parts for p in payloads]
        totals = []
        for column in zip(*summands, strict=True):
            total = column[0].clone()
            for part in column[1:]:
                total += part
            totals.append(total)
        return Payload(tuple(totals), len(payloads))

    def decode_sum(
        self, total: Payload, segments: Segments, shared: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        """Return the mean from the sum of summands, in `out` if it is given."""
        self._note("decode_sum", segments, total.count, self.key.step)
        ctx = self.context(segments, shared, total.count)._replace(out=out)
        return codec.decode_sum(self.method, total, ctx)

    def rounds(
        self, xs: Sequence[Tensor], segments: Segments, state: Tensor, key: Key, out: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """Run one step of a method in rounds for all workers.

        Returns the mean and the final state of each of the first `FINISHED` workers. The mean of
        worker 0 is in `out`.
        """
        method = self.method
        assert isinstance(method, MultiRoundCompressor)
        self._note("in_rounds", segments, len(xs), key.step)
        ctx = Context(segments, key=key, workers=len(xs), lr=self.lr)
        outs = [out, *(torch.full_like(out, math.nan) for _ in xs[1:])]
        running = [
            method.in_rounds(x, state, ctx._replace(out=part))
            for x, part in zip(xs, outs, strict=True)
        ]
        summands = [next(each) for each in running]
        for _ in range(len(method.layout(segments) or ()) - 1):
            mean = torch.stack(summands).sum(0).div_(len(xs))
            summands = [each.send(mean) for each in running]  # all receive one tensor
        mean = torch.stack(summands).sum(0).div_(len(xs))
        results = []
        for each, part in list(zip(running, outs, strict=True))[:FINISHED]:
            received = mean.clone()
            try:
                each.send(received)
            except StopIteration as end:
                approximation, final = end.value
            else:
                raise ValueError("the method has more rounds than parts in its layout")
            results.append((part.copy_(approximation), final))
            received.fill_(math.nan)  # means are valid until the end of the step
        for each in running[FINISHED:]:
            each.close()
        return results

    def slots(self, segments: Segments, byte: int, count: int = 1) -> Payload | None:
        """Return a payload to write to, filled with `byte`; None where sizes depend on the data."""
        layout = self.method.layout(segments, count)
        if layout is None:
            return None
        noise = torch.full((layout_bytes(layout),), byte, dtype=torch.uint8)
        return Payload.over(noise, layout, count)


# ---- without coverage ----------------------------------------------------------------------------

KEY = Key(seed=7, step=3, rank=0)


def segments_of(method: Compressor, shapes: Sequence[Sequence[int]]) -> Segments:
    """Return the segments of a bucket of these tensors."""
    return Segments.of(shapes, method.granularity)


def agree(method: Compressor, xs: Sequence[Tensor], segments: Segments, key: Key = KEY) -> Tensor:
    """Return the `shared` tensor on which the engine would agree for these workers."""
    return codec.agree(method, xs, Context(segments, key=key))[0]


def encode(
    method: Compressor, x: Tensor, segments: Segments, key: Key = KEY, workers: int = 1
) -> tuple[Payload, Context]:
    """Return the payload of a single worker, and the context in which it is decoded."""
    ctx = Context(segments, key=key, workers=workers)
    ctx = ctx._replace(shared=codec.agree(method, [x], ctx)[0])
    return codec.encode(method, x, ctx), ctx


def round_trip(
    method: Compressor, x: Tensor, segments: Segments, key: Key = KEY, workers: int = 1
) -> Tensor:
    """Return x encoded and decoded, float32, shape (n,)."""
    payload, ctx = encode(method, x, segments, key, workers)
    return codec.decode(method, payload, ctx)


def is_random(method: Compressor, x: Tensor, segments: Segments) -> bool:
    """Return whether encodings of x differ between three steps, or a common value is drawn."""
    if isinstance(method, MultiRoundCompressor):  # its initial state is drawn
        return True
    keys = [Key(0, step, 0) for step in range(3)]
    first, *others = (encode(method, x, segments, key)[0].to_bytes() for key in keys)
    drawn = method.draw_shared(Context(segments, key=keys[0])) is not None
    return drawn or not all(torch.equal(first, other) for other in others)
