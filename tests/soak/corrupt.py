"""Hand corrupt payloads to every method, in processes of their own: nothing but PayloadError.

    python tests/soak/corrupt.py --payloads 1000000 --save results/soak/corrupt.json

Every configuration of every registered method gets its share, in processes of its own. A payload
that the method encoded is changed: bits flipped, bytes drawn, numbers replaced by NaN, infinities
and extremes, parts cut, lengthened, exchanged or dropped. It is handed to `decode`; every fourth
one to `mean`, `merge` or `decode_sum`, too, as the method's collectives would hand it on.

A fault is a process that crashes or stands still, an exception that is no PayloadError, a payload
of another layout that is taken, or a decoded tensor of another shape or with values that are not
finite. Each is told with the number of its payload: `--only METHOD:CONFIGURATION --first NUMBER
--payloads 1` hands over that one again. The exit code is 1 if there was any.

Under AddressSanitizer, after the first line of `make sanitize`, with its LD_PRELOAD:

    LD_PRELOAD="..." ASAN_OPTIONS=detect_leaks=0 python tests/soak/corrupt.py --payloads 100000
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import figures
import numpy as np
import torch

from gcbench import ops
from gcbench.core import codec, registry
from gcbench.core.compressor import (
    Compressor,
    Context,
    Key,
    MultiRoundCompressor,
    Payload,
    Segments,
)
from gcbench.core.errors import PayloadError
from gcbench.studies import conformance

SHAPES = (((13, 11), (1,), (40,)), ((3,),), ((33, 40), (0,), (70,)), ((2100,),))
"""The gradients that are encoded: a few elements, one tile of packing, and a little more."""
KEY = Key(7, 3, 0)
EXTREMES = (np.nan, np.inf, -np.inf, -0.0, 1e-45, -1.0, 3.4028235e38, -3.4028235e38, 65504.0)
FAULTS = 20
"""After so many faults of one configuration its process ends."""


class Sample:
    """A payload that a method encoded of a gradient, as bytes, and what belongs to it."""

    def __init__(self, method: Compressor, shapes: tuple[tuple[int, ...], ...]) -> None:
        self.segments = Segments.of(shapes, method.granularity)
        x = conformance.normal(self.segments.numel)
        self.payload, self.shared = conformance._encode(method, x, self.segments, KEY)
        self.known = method.layout(self.segments) is not None
        self.raw = [
            part.contiguous().view(-1).view(torch.uint8).numpy().copy()
            for part in self.payload.parts
        ]


def _part(raw: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    """Return bytes as a part of that dtype, or as uint8 where they do not fill its elements."""
    if not raw.size:
        return torch.empty(0, dtype=dtype)
    part = torch.from_numpy(raw.copy())
    return part.view(dtype) if raw.size % dtype.itemsize == 0 else part


@cache
def _extremes(dtype: torch.dtype) -> list[np.ndarray[Any, Any]]:
    """Return the bytes of numbers of that dtype that a decoder may not expect."""
    if dtype.is_floating_point:
        values = torch.tensor(EXTREMES, dtype=torch.float64).to(dtype)
    else:
        limits = torch.iinfo(dtype)
        values = torch.tensor([0, -1, 1, limits.max, limits.min], dtype=dtype)
    return list(values.view(torch.uint8).view(-1, dtype.itemsize).numpy())


def _changed(raw: np.ndarray[Any, Any], dtype: torch.dtype, draw: np.random.Generator) -> Any:
    """Return a part's bytes after one change."""
    raw = raw.copy()
    match draw.integers(7):
        case 0 | 1 if raw.size:
            for at in draw.integers(raw.size, size=draw.integers(1, 4)):
                raw[at] ^= 1 << draw.integers(8)
        case 2:
            raw = draw.integers(256, size=raw.size, dtype=np.uint8)
        case 3:
            raw = raw[: draw.integers(raw.size + 1)]
        case 4:
            raw = np.append(raw, draw.integers(256, size=draw.integers(1, 17), dtype=np.uint8))
        case 5 if raw.size >= dtype.itemsize and dtype != torch.uint8:
            start = dtype.itemsize * draw.integers(raw.size // dtype.itemsize)
            values = _extremes(dtype)
            raw[start : start + dtype.itemsize] = values[draw.integers(len(values))]
        case 6:
            start = draw.integers(raw.size + 1)
            raw[start : start + draw.integers(1, 65)] = draw.choice([0, 255])
    return raw


def corrupt(sample: Sample, draw: np.random.Generator) -> Payload:
    """Return the sample's payload after one to three changes."""
    raw, dtypes = list(sample.raw), [part.dtype for part in sample.payload.parts]
    for _ in range(draw.integers(1, 4)):
        at = draw.integers(len(raw))
        raw[at] = _changed(raw[at], dtypes[at], draw)
    parts = [_part(*pair) for pair in zip(raw, dtypes, strict=True)]
    match draw.integers(40):
        case 0:
            parts.pop(draw.integers(len(parts)))
        case 1:
            parts.reverse()
        case 2:
            parts.append(parts[0])
    return Payload(tuple(parts), sample.payload.count)


def judge(method: Compressor, sample: Sample, broken: Payload, number: int) -> str:
    """Return what is wrong with how a corrupt payload is taken, or nothing."""
    segments, shared = sample.segments, sample.shared
    must = sample.known and broken.layout != sample.payload.layout
    said = conformance.judge_corrupt(method, broken, segments, shared, must=must)
    if said or number % 4 or isinstance(method, MultiRoundCompressor):
        return said
    both, doors = [sample.payload, broken], method.legal_collectives()
    door = doors[number // 4 % len(doors)]
    try:
        match door:
            case "allgather":
                codec.mean(method, both, Context(segments, shared))
            case "twoshot":
                codec.merge(method, both, Context(segments, shared, KEY))
            case "allreduce" if not must:
                summand = method.summand(broken, Context(segments, workers=2))
                codec.decode_sum(method, summand._replace(count=2), Context(segments, shared))
    except PayloadError:
        return ""
    except Exception as error:
        return f"by {door}: {type(error).__name__} and no PayloadError: {error}"
    return ""


def configurations(only: str | None = None) -> Iterator[tuple[str, Compressor]]:
    """Yield every registered method in every configuration, as METHOD:CONFIGURATION."""
    for name in registry.compressors():
        for text, method in conformance.configurations(name):
            label = f"{name}:{text or 'default'}"
            if only is None or label == only:
                yield label, method


def child(options: argparse.Namespace) -> int:
    """Hand over the payloads of one configuration; faults go to stdout, the place to a file."""
    ops.use("auto")
    torch.set_num_threads(1)
    ((label, method),) = configurations(options.only)
    samples = [Sample(method, shapes) for shapes in SHAPES]
    place, found = os.open(options.place, os.O_WRONLY | os.O_CREAT), 0
    seed = [options.seed, *label.encode()]
    for number in range(options.first, options.first + options.payloads):
        os.pwrite(place, number.to_bytes(8, "little"), 0)
        draw = np.random.Generator(np.random.Philox(seed=[*seed, number]))
        sample = samples[draw.integers(len(samples))]
        said = judge(method, sample, corrupt(sample, draw), number)
        if said:
            print(f"{label}, payload {number}: {said[:300]}", flush=True)
            found += 1
            if found == FAULTS:
                break
    os.pwrite(place, (number + 1).to_bytes(8, "little"), 0)
    return 0


def hand_over(label: str, first: int, payloads: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run a process for payloads of one configuration; return how many it took, and its faults."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "place")
        words = [sys.executable, __file__, "--child", "--only", label, "--place", str(place)]
        words += ["--seed", str(options.seed), "--first", str(first), "--payloads", str(payloads)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        faults, code = [], 0
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, timeout=options.patience, env=environment
            )
            code, said, err = done.returncode, done.stdout, done.stderr
        except subprocess.TimeoutExpired as error:
            said = (error.stdout or b"").decode()
            err = f"no end after {options.patience:g} s"
            code = -1
        reached = int.from_bytes(place.read_bytes(), "little") if place.exists() else first
    faults += said.splitlines()
    if code:
        last = "; ".join(err.strip().splitlines()[-3:])[-400:]
        faults.append(f"{label}, payload {reached}: the process ended with {code}: {last}")
    return {"payloads": reached - first, "crashes": int(code != 0), "faults": faults}


def main() -> int:
    """Deal the payloads to the configurations, and these to processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--payloads", type=int, default=1_000_000, help="over all configurations")
    parser.add_argument("--each", type=int, default=5000, help="payloads of a process, at most")
    parser.add_argument("--processes", type=int, default=1, help="how many run at once")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds for a process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first payload")
    parser.add_argument("--only", help="METHOD:CONFIGURATION; default: all")
    parser.add_argument("--save", type=Path, help="where the figures go, JSON")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options)
    began, labels = datetime.now(UTC), [label for label, _ in configurations(options.only)]
    if not labels:
        known = ", ".join(label for label, _ in configurations())
        parser.error(f"unknown configuration {options.only!r}. Known: {known}")
    share = -(-options.payloads // len(labels))
    jobs = [
        (label, options.first + start, min(options.each, share - start))
        for start in range(0, share, options.each)
        for label in labels
    ]
    taken: dict[str, int] = dict.fromkeys(labels, 0)
    found: dict[str, Any] = {
        "payloads": 0,
        "processes": 0,
        "crashes": 0,
        "faults": [],
        "sanitizer": "asan" in os.environ.get("LD_PRELOAD", ""),
        "by_configuration": taken,
    }
    with ThreadPoolExecutor(options.processes) as pool:
        handed = pool.map(lambda job: hand_over(*job, options), jobs)
        for number, ((label, _, _), outcome) in enumerate(zip(jobs, handed, strict=True), 1):
            taken[label] += outcome["payloads"]
            found["payloads"] += outcome["payloads"]
            found["processes"] += 1
            found["crashes"] += outcome["crashes"]
            found["faults"] += outcome["faults"]
            for fault in outcome["faults"]:
                print(fault, flush=True)
            if options.save and (number % 20 == 0 or number == len(jobs)):
                figures.save(options.save, began, found)
    print(
        f"{found['payloads']} corrupt payloads over {len(labels)} configurations, in "
        f"{found['processes']} processes: {found['crashes']} crashes, {len(found['faults'])} faults"
    )
    return int(bool(found["faults"]))


if __name__ == "__main__":
    sys.exit(main())
