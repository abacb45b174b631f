"""What encoding and decoding cost: times measured by `gcbench bandwidth`, and a lower bound.

A measured method takes e seconds per element in statistic and encode, and p seconds per element in
one pass over a payload (`Codec`). It passes N times over a payload by all-gather (every worker's
payload), twice by two-shot (the workers' shards, then the mean) and by a sparse all-reduce, 2 - 1/N
times by a ring, and once by all-reduce. A two-shot exchange that was measured by another collective
adds e / N for the second encoding by the owners, if the method needs one.

The lower bound (`Floor`) is the time in which a device's memory reads each input once and writes
each output once. No kernel is faster, so a speedup computed from it is an upper bound.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from gcbench.core import codec, files, memory, registry
from gcbench.core.compressor import (
    Compressor,
    Context,
    Key,
    MultiRoundCompressor,
    Segments,
    cuttable,
    requantizes,
)
from gcbench.core.errors import GcbenchError, UsageError
from gcbench.predict import bundled, traffic
from gcbench.predict.clusters import Device
from gcbench.predict.networks import Shapes
from gcbench.profile.bandwidth.settings import KIND
from gcbench.profile.breakeven import COPY, FLOAT
from gcbench.report import analysis
from gcbench.training import methods

STORED = "bandwidth.json"
"""File name of the measurement in the package."""
MAKE_ONE = "make one with `gcbench bandwidth --json > m.json`"

# ---- measured ------------------------------------------------------------------------------------


def passes(collective: str, workers: int) -> float:
    """Return how many times a worker passes over a payload of its whole gradient."""
    counts = {"allgather": float(workers), "twoshot": 2.0, "sparse": 2.0, "ring": 2 - 1 / workers}
    return counts.get(collective, 1.0)


@dataclass(frozen=True)
class Codec:
    """Seconds per element of a method, measured inside an exchange."""

    encode: float
    """Statistic and encode."""
    each: float
    """One pass over a payload."""
    collective: str
    """The collective by which it was measured."""
    copy: float
    """Seconds per element of a copy, in the same measurement."""

    def seconds(
        self, method: Compressor, collective: str, n: float, workers: int
    ) -> tuple[float, float]:
        """Return one worker's seconds for encoding and for decoding n elements.

        `collective` may be "reducescatter", the first half of a two-shot exchange.
        """
        decode = self.each * passes(collective, workers)
        if collective == "twoshot" != self.collective and requantizes(method):
            decode += self.encode / workers
        return self.encode * n, decode * n

    def on(self, device: Device) -> Codec:
        """Return the times on another device, scaled by the time of a copy there."""
        factor = COPY / (device.memory_gbyte * 1e9) / self.copy
        return Codec(self.encode * factor, self.each * factor, self.collective, self.copy * factor)


@dataclass(frozen=True)
class Measured:
    """The times in one result of `gcbench bandwidth`."""

    codecs: Mapping[tuple[str, str], Mapping[float, Codec]]
    """(name, `registry.call`) of a compressor -> number of elements -> codec."""
    ignored: Mapping[str, str]
    """Name of a method -> why its times are not used."""
    source: str
    """What was measured and where, for footnotes."""
    analysis: analysis.Analysis

    def of(self, method: Compressor, n: float) -> Codec | None:
        """Return the times of a method at the measured size nearest to n elements.

        None if the method was not measured with exactly these fields: another configuration may
        take ten times as long.
        """
        sizes = self.codecs.get((method.name, registry.call(method)))
        if sizes is None:
            return None
        return sizes[min(sizes, key=lambda elements: abs(math.log(elements / n)))]

    def warnings(self, chosen: Iterable[Compressor]) -> list[str]:
        """Return a sentence for each of these methods whose times are not used."""
        names = dict.fromkeys(method.name for method in chosen)
        return [
            f"The measured times of {name} are not used: {self.ignored[name]}."
            for name in names
            if name in self.ignored
        ]


def _registered(spec: str) -> Compressor | None:
    """Return the registered method of a spec in a measurement; None if there is none.

    The code of a file that the measurement names is never run; the file's compressor must have been
    registered by name.
    """
    start, *fields = spec.split(":")
    name = Path(start).stem if start.endswith(".py") else start
    try:
        return methods.parse(":".join([name, *fields]))
    except GcbenchError:
        return None


def _mismatch(method: Compressor, measured: str | None) -> str | None:
    """Return why times measured with the source digest `measured` are not those of this method.

    None if they are. `measured` is None if the measurement does not record sources.
    """
    if measured is None:
        if registry.origin(registry.compressors()[method.name]) is None:
            return None
        return "the measurement does not record the source of a method that is not built in"
    now = registry.source_digest(method.name)
    return None if measured == now else f"its source was {measured} then and is {now} now"


def of_analysis(result: analysis.Analysis) -> Measured:
    """Return the times in a result of `gcbench bandwidth`, for methods whose source is unchanged.

    Raises:
        GcbenchError: it has no table of phases or of transfers.
    """
    phases, transfers = result.table("phases").rows, result.table("transfers").rows
    copies = {row["size"]: float(row["p50"] or 0) for row in transfers if row["method"] == "memcpy"}
    workers = int(result.settings["workers"])
    sources = result.settings.get("sources") or {}
    codecs: dict[tuple[str, str], dict[float, Codec]] = {}
    ignored: dict[str, str] = {}
    for row in phases:
        method = _registered(str(row["method"]))
        if row["size"] not in copies or method is None:
            continue
        reason = _mismatch(method, sources.get(row["method"]))
        if not result.settings.get("memory", True) and method.memory != "none":
            reason = f"they were measured with --no-memory, without {method.memory}"
        if reason is not None:
            ignored[method.name] = reason
            continue
        key = method.name, registry.call(method)
        n, collective = int(row["size"] or 0) / FLOAT, str(row["collective"])
        seconds = {part: float(row[part] or 0) for part in ("statistic", "encode", "decode")}
        codecs.setdefault(key, {}).setdefault(
            n,
            Codec(
                (seconds["statistic"] + seconds["encode"]) / n,
                seconds["decode"] / n / passes(collective, workers),
                collective,
                copies[row["size"]] / n,
            ),
        )
    machine = result.provenance.get("machine", {})
    threads = result.settings["threads"]
    source = (
        f"in exchanges of {workers} workers on {machine.get('gpu') or machine.get('cpu')}, "
        f"{threads} thread{'s' * (threads > 1)}, medians of {result.settings['iterations']}"
    )
    return Measured(codecs, ignored, source, result)


@cache
def load(path: Path) -> Measured:
    """Read a file that `gcbench bandwidth --json` printed.

    Raises:
        UsageError: the file cannot be read, or is not such a file.
    """
    try:
        data = json.loads(files.read_text(path))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; {MAKE_ONE}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise UsageError(f"{path} is not a bandwidth measurement; {MAKE_ONE}")
    return of_analysis(analysis.parse(data, path))


def stored() -> Measured | None:
    """Return the measurement that is part of the package; None if it is missing."""
    path = bundled.path(STORED)
    return None if path is None else load(path)


def how_to_measure(specs: Iterable[str]) -> str:
    """Return the commands that measure the times of these methods, as text."""
    command = shlex.join(["gcbench", "bandwidth", "--compressor", ",".join(specs), "--json"])
    return f"`{command} > m.json`, then this command with --kernels m.json"


# ---- the floor -----------------------------------------------------------------------------------


def sends_gradient(method: Compressor) -> bool:
    """Return whether the payload is the gradient itself, so that encoding costs nothing."""
    x, ctx = torch.ones(4), Context(Segments((0, 4)), key=Key(0, 0, 0))
    shared, _ = codec.agree(method, [x], ctx)
    payload = codec.encode(method, x, ctx._replace(shared=shared))
    return len(payload.parts) == 1 and payload.parts[0].data_ptr() == x.data_ptr()


@dataclass(frozen=True)
class Floor:
    """The least bytes per element that encoding and decoding move, and the speed of the memory."""

    encode: float
    """Bytes of statistic, encode and error feedback."""
    payload: float
    """Bytes of a payload."""
    merged: float
    """Bytes of a merged payload, which the owner of a shard sends in a two-shot exchange."""
    owner: float
    """Additional bytes of the owner's error feedback."""
    rounds: bool
    """Whether the method exchanges in rounds, and therefore decodes once."""
    speed: float
    """Bytes per second of the device's memory."""

    def seconds(self, collective: str, n: float, workers: int) -> tuple[float, float]:
        """Return one worker's seconds for encoding and for decoding n elements.

        `collective` may be "reducescatter", the first half of a two-shot exchange.
        """
        once, received = self.payload + FLOAT, workers * self.payload
        decode = {
            "allgather": received + FLOAT,
            "reducescatter": (received + FLOAT) / workers,
            "twoshot": once + (received + self.merged + self.owner) / workers,
            # sums of a region, then all that remain
            "sparse": once + (self.payload + FLOAT / workers),
            # N - 1 partial sums, then all shards
            "ring": once + (workers - 1) / workers * once,
        }.get("rounds" if self.rounds else collective, once)
        return self.encode * n / self.speed, decode * n / self.speed


def floor(method: Compressor, device: Device, shapes: Shapes) -> Floor:
    """Return the floor of a method on a device, for tensors of these shapes."""
    numel = max(1, sum(map(math.prod, shapes)))
    payload = merged = traffic.gradient_bytes(method, shapes) / numel
    if "twoshot" in method.legal_collectives():
        merged = traffic.gradient_bytes(method, shapes, 8) / numel
    carried = memory.of(method)
    agrees = bool(traffic.agreement(method, Segments((0, 1))))
    rounds = isinstance(method, MultiRoundCompressor)
    encode = 0.0 if sends_gradient(method) else FLOAT + payload
    fused = 3 * FLOAT + payload  # read gradient and residual, write the residual
    owner = max(0.0, fused - encode) if carried.owner and requantizes(method) else 0.0
    if carried.fusible and not rounds and not cuttable(method) and not agrees:
        total = fused
    else:
        total = FLOAT * agrees + encode + (carried.feedback and payload + FLOAT)
    return Floor(total, payload, merged, owner, rounds, device.memory_gbyte * 1e9)
