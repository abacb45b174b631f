"""What encoding and decoding cost: seconds an element of each part of a method, and of a step.

There are three sources, and each row says which one it has: a file of `make bench` (or of `gcbench
kernels --json`, made on the machine in question); a timing on this machine; or the floor, the time
in which the memory of a device can read each input once and write each output once. No kernel is
faster than the floor, and most are slower, so a speedup that assumes it is an upper bound.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from gcbench.core import codec, memory, registry
from gcbench.core.compressor import (
    Compressor,
    Context,
    Key,
    MultiRoundCompressor,
    Segments,
    cuttable,
    requantizes,
)
from gcbench.core.errors import UsageError
from gcbench.report import kernel_timings
from gcbench.studies.scale import traffic
from gcbench.studies.scale.clusters import Device
from gcbench.studies.scale.networks import Shapes
from gcbench.training import configuration

PARTS = ("statistic", "encode", "encode_feedback", "decode", "mean8", "merge8")
MERGED = 8
"""Number of payloads in the timed mean and merge."""
ROUNDS = 7
KEY = Key(0, 0, 0)
UNTIMED = ("reference", "eager")
"""Backends whose timings are not used: the definitions in plain torch, and eager research code."""
FLOAT = 4
"""Bytes of a float32."""
CROWD = 2**26
"""More bytes than a core's own caches hold."""


@dataclass(frozen=True)
class Rates:
    """Seconds an element of the float32 gradient, by part; mean8 and merge8 take eight payloads."""

    parts: dict[str, float]
    source: str
    once: dict[str, float] = field(default_factory=dict)
    """What a part takes however many payloads there are: known of the floor alone."""

    def __getitem__(self, part: str) -> float:
        return self.parts.get(part, 0.0)

    def of(self, part: str, workers: int) -> float:
        """Return the seconds an element of mean8 or merge8, of as many payloads as workers."""
        once = self.once.get(part, 0.0)
        return (self[part] - once) / MERGED * workers + once


def hands_on(method: Compressor) -> bool:
    """Return whether the payload is the gradient itself, so that encoding costs nothing."""
    x = torch.ones(4)
    segments = Segments((0, 4))
    drawn = method.draw_shared(Context(segments, key=KEY))
    shared = codec.prepare(method, x, Context(segments)).statistic if drawn is None else drawn
    payload = codec.encode(method, x, Context(segments, shared, KEY))
    return len(payload.parts) == 1 and payload.parts[0].data_ptr() == x.data_ptr()


def statistic(method: Compressor) -> Tensor:
    """Return the statistic on which workers agree, for one element; empty if there is none."""
    x, segments = torch.ones(1), Segments((0, 1))
    drawn = method.draw_shared(Context(segments, key=KEY))
    return (
        codec.prepare(method, x, Context(segments)).statistic if drawn is None else x.new_empty(0)
    )


def in_one_pass(method: Compressor, carried: memory.Memory) -> bool:
    """Return whether encoding and error feedback are one operation, `encode_feedback`."""
    alone = not isinstance(method, MultiRoundCompressor) and not cuttable(method)
    return carried.fusible and alone and not statistic(method).numel()


def assumed(method: Compressor, device: Device, shapes: Shapes) -> Rates:
    """Return the floors: times of the bytes that must move, at the device's memory bandwidth."""
    numel = max(1, sum(map(math.prod, shapes)))
    sent = merged = traffic.gradient_bytes(method, shapes) / numel
    if "twoshot" in method.legal_collectives():
        merged = traffic.gradient_bytes(method, shapes, MERGED) / numel
    agrees = statistic(method).numel() > 0
    moved = {
        "statistic": FLOAT * agrees,
        "encode": 0 if hands_on(method) else FLOAT + sent,
        "encode_feedback": 3 * FLOAT + sent,  # gradient and residual read, residual written
        "decode": sent + FLOAT,
        "mean8": MERGED * sent + FLOAT,
        "merge8": MERGED * sent + merged,
    }
    speed = device.memory_gbyte * 1e9
    seconds = {part: nbytes / speed for part, nbytes in moved.items()}
    once = {"mean8": FLOAT / speed, "merge8": merged / speed}  # what is written
    return Rates(seconds, f"assumed: floor of {device.memory_gbyte:g} GB/s", once)


def of_file(
    method: Compressor, timings: kernel_timings.Timings, n: int, threads: int
) -> Rates | None:
    """Return a file's timings of this method at the size nearest to n; None if it has no row.

    Files have only default configurations. A method that hands the gradient on unchanged has no
    rows, and costs as much as `copy_` of the same bytes.
    """
    if registry.call(method) != registry.call(registry.compressor(method.name)):
        return None
    rows = [row for row in timings.rows if row.threads == threads and row.backend not in UNTIMED]

    def nearest(op: str) -> kernel_timings.Row | None:
        fitting = [row for row in rows if row.op == op]
        if not fitting:
            return None
        best = min(abs(math.log(row.elements / n)) for row in fitting)
        alike = [row for row in fitting if abs(math.log(row.elements / n)) == best]
        return min(alike, key=lambda row: row.seconds)

    found = {part: nearest(f"{method.name}.{part}") for part in PARTS}
    parts = {part: row.seconds / row.elements for part, row in found.items() if row}
    if not parts and hands_on(method) and (copied := nearest("copy_")):
        each = copied.seconds / copied.elements / (2 * FLOAT)
        parts = {"decode": 2 * FLOAT * each}
        parts |= dict.fromkeys(("mean8", "merge8"), (MERGED + 1) * FLOAT * each)
    if "encode" not in parts and not hands_on(method):
        return None
    device = next((row.device for row in found.values() if row), "cpu")
    return Rates(parts, f"file: {device}, {threads} thread{'s' * (threads > 1)}")


@cache
def _crowd() -> torch.Tensor:
    """Return a float32 tensor so large that writing it evicts all else from a core's caches."""
    return torch.zeros(CROWD // FLOAT)


def median(call: Callable[[], object], before: Callable[[], object] | None = None) -> float:
    """Return the median seconds of `ROUNDS` calls, after one to warm up; `before` is not timed.

    Before each call the caches are filled with other data, as after a step's forward and backward
    pass: the kernels of a small gradient then take several times as long as in a tight loop.
    """
    taken = []
    for _ in range(ROUNDS + 1):
        if before is not None:
            before()
        _crowd().add_(1)
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def measure(method: Compressor, shapes: Shapes, threads: int) -> Rates:
    """Time the parts here, on a normal gradient of at most `traffic.WEIGHED` elements."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        segments = traffic.sample(Segments.of(shapes, method.granularity))
        seconds = _timed(method, segments)
    finally:
        torch.set_num_threads(before)
    n = max(1, segments.numel)
    said = f"measured: {n:,} elements, {threads} thread{'s' * (threads > 1)}, n={ROUNDS}"
    return Rates({part: value / n for part, value in seconds.items()}, said)


def _timed(method: Compressor, segments: Segments) -> dict[str, float]:
    x = torch.randn(segments.numel, generator=torch.Generator().manual_seed(0))
    drawn = method.draw_shared(Context(segments, key=KEY))
    seconds: dict[str, float] = {}
    if drawn is not None:
        if not isinstance(method, MultiRoundCompressor):  # which draws once, before the first step
            seconds["statistic"] = median(lambda: method.draw_shared(Context(segments, key=KEY)))
        shared = drawn
    else:
        shared = codec.prepare(method, x, Context(segments)).statistic
        if shared.numel():
            seconds["statistic"] = median(lambda: codec.prepare(method, x, Context(segments)))
    payload = codec.encode(method, x, Context(segments, shared, KEY))
    seconds["encode"] = median(lambda: codec.encode(method, x, Context(segments, shared, KEY)))
    seconds["decode"] = median(lambda: codec.decode(method, payload, Context(segments, shared)))
    if method.memory == "residual":
        residual = torch.zeros_like(x)
        seconds["encode_feedback"] = median(
            lambda: codec.feedback(method, x, residual, Context(segments, shared, KEY)),
            residual.zero_,
        )
    if isinstance(method, MultiRoundCompressor):
        return seconds
    payloads = [
        codec.encode(method, x.roll(k), Context(segments, shared, KEY)) for k in range(MERGED)
    ]
    legal = method.legal_collectives()
    if "twoshot" in legal:
        seconds["merge8"] = median(
            lambda: codec.merge(method, payloads, Context(segments, shared, KEY))
        )
    if set(legal) & {"allgather", "twoshot"}:
        try:
            seconds["mean8"] = median(
                lambda: codec.mean(method, payloads, Context(segments, shared))
            )
        except UsageError:
            if "allgather" in legal:
                raise
            # Such a method (signsgd, ties="coin") averages nowhere but in the owner's merge.
            seconds["mean8"] = seconds["merge8"]
    return seconds


def check_machine(timings: kernel_timings.Timings, path: object) -> None:
    """Check that methods missing in a file may be timed on this machine.

    Raises:
        UsageError: the file was made on another machine.
    """
    here, there = configuration.machine(), timings.machine
    if (here.get("cpu"), here.get("gpu")) != (there.get("cpu"), there.get("gpu")):
        raise UsageError(
            f"{path} was made on {there.get('gpu') or there.get('cpu')}, and a method without a "
            "row there would be timed on this machine: leave it out, or use --kernels measured"
        )


def step(
    rates: Rates,
    method: Compressor,
    collective: str,
    n: float,
    workers: int,
    carried: memory.Memory | None = None,
) -> tuple[float, float]:
    """Return a worker's seconds in encoding (with statistic and memory) and in decoding.

    `n`: elements of the gradient; `carried`: the memory, the method's own unless given;
    `collective` may be "reducescatter", the first half of a two-shot exchange. A mean of N payloads
    is assumed to cost N / 8 of one of eight, but for what the floor has once. The time by which
    merge8 exceeds mean8 is taken for the encoding of the merged result.
    """
    if carried is None:
        carried = memory.of(method)
    encode = rates["statistic"] + rates["encode"]
    if in_one_pass(method, carried):
        encode = rates["encode_feedback"]
    elif carried.feedback:
        encode += rates["decode"]
    if isinstance(method, MultiRoundCompressor) or collective == "allreduce":
        return encode * n, rates["decode"] * n
    if collective == "allgather":
        return encode * n, rates.of("mean8", workers) * n
    if collective == "reducescatter":  # the owner's mean of its shards
        return encode * n, rates.of("mean8", workers) * n / workers
    again = max(0.0, rates["merge8"] - rates["mean8"])
    merge = min(rates.of(part, workers) for part in ("mean8", "merge8"))
    merge = (merge + again) * n / workers
    if carried.owner and requantizes(method):
        merge += max(0.0, rates["encode_feedback"] - rates["encode"]) * n / workers
    return encode * n, merge + rates["decode"] * n
