"""Errors of a compressor on given gradients: of each worker's payload alone, and of the mean.

Methods run without a memory and without earlier steps. As in training, the workers agree on scales
and each encodes its whole bucket with its own random numbers; errors are then computed by layer.
`alone` is decode(encode(x)) of one worker. `averaged` is the mean that the method's default
collective computes, compared with the true mean. For a method in rounds (PowerSGD) `alone` is an
exchange with a single worker, from the initial state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gcbench.core import codec, purposes
from gcbench.core.clock import Clock
from gcbench.core.compressor import Compressor, Context, Key, Segments
from gcbench.core.exchange import Exchange, Lane
from gcbench.core.values import finite
from gcbench.core.world import Link, SimulatedWorld
from gcbench.report.analysis import Row
from gcbench.training.captures import KINDS, Layer

ALL = "all layers"
EDGE = 6.0
"""Histograms reach to this multiple of the layer's root mean square on either side."""
BINS = 121
"""Bins of a histogram; odd, so that one is centred at zero. The outermost include all beyond."""


@dataclass(frozen=True, eq=False)
class Gradients:
    """The buckets of N workers at one step, and their layers."""

    layers: tuple[Layer, ...]
    buckets: Sequence[Tensor]
    """One float32 tensor of shape (n,) for each worker."""
    step: int = 0
    seed: int = 0

    @cached_property
    def lengths(self) -> Tensor:
        """Number of elements of each layer, int64."""
        return torch.tensor([layer.numel for layer in self.layers])

    @cached_property
    def rms(self) -> Tensor:
        """Root mean square of each layer over all workers, float64."""
        squares = [self.sums(bucket.double().square()) for bucket in self.buckets]
        return (torch.stack(squares).mean(0) / self.lengths.clamp(min=1)).sqrt()

    @property
    def mean(self) -> Tensor:
        """The workers' true mean, float64, shape (n,)."""
        return torch.stack([bucket.double() for bucket in self.buckets]).mean(0)

    def segments(self, method: Compressor) -> Segments:
        """Return the segments of the bucket for a method."""
        return Segments.of([layer.shape for layer in self.layers], method.granularity)

    def sums(self, x: Tensor) -> Tensor:
        """Return the sum of `x`, float64, shape (n,), over each layer."""
        return torch.segment_reduce(x, "sum", lengths=self.lengths)

    def place(self, layer: int) -> slice:
        """Return the slice of a layer in the bucket."""
        start = int(self.lengths[:layer].sum())
        return slice(start, start + int(self.lengths[layer]))

    def groups(self) -> dict[str, Tensor]:
        """Return groups of layers as indices, by name: all layers first, then each kind."""
        groups = {ALL: torch.arange(len(self.layers))}
        for kind in dict.fromkeys([*KINDS, *(layer.kind for layer in self.layers)]):
            which = [i for i, layer in enumerate(self.layers) if layer.kind == kind]
            if which:
                groups[kind] = torch.tensor(which)
        return groups

    def problem(self) -> str | None:
        """Return a message about the first gradient that is not finite; None if all are finite."""
        for rank, bucket in enumerate(self.buckets):
            for i, layer in enumerate(self.layers):
                if not bucket[self.place(i)].isfinite().all():
                    return f"the gradient of {layer.name} of worker {rank} is not finite"
        return None


class Sums(NamedTuple):
    """Sums per layer, float64: of x^2, y^2, x y, (x - y)^2, y = 0, and 1."""

    xx: Tensor
    yy: Tensor
    xy: Tensor
    ee: Tensor
    zeros: Tensor
    elements: Tensor

    @classmethod
    def of(cls, gradients: Gradients, x: Tensor, y: Tensor) -> Sums:
        """Return the sums for a vector `x` and its reconstruction `y`, both of shape (n,)."""
        x, y = x.double(), y.double()
        add = gradients.sums
        squares, error = (add(x * x), add(y * y), add(x * y)), add((x - y).square())
        return cls(*squares, error, add((y == 0).double()), gradients.lengths.double())

    def over(self, which: Tensor) -> dict[str, float | None]:
        """Return the measures of the layers `which` as one vector; None where undefined.

        relative_error = ||x - y|| / ||x||; cosine of x and y; norm_ratio = ||y|| / ||x||; zeros,
        the share of zeros in y.
        """
        xx, yy, xy, ee, zeros, elements = (float(part[which].sum()) for part in self)
        return {
            "relative_error": finite(math.sqrt(ee / xx)) if xx else None,
            "cosine": finite(max(-1.0, min(1.0, xy / math.sqrt(xx) / math.sqrt(yy))))
            if xx and yy
            else None,
            "norm_ratio": finite(math.sqrt(yy / xx)) if xx else None,
            "zeros": zeros / elements if elements else None,
        }


def averages(dicts: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """Return the mean of each measure over the dicts in which it is not None; None if in none."""
    result: dict[str, float | None] = {}
    for key in dicts[0]:
        values = [value for one in dicts if (value := one[key]) is not None]
        result[key] = math.fsum(values) / len(values) if values else None
    return result


# ---- running a method ----------------------------------------------------------------------------


class Decoded(NamedTuple):
    """The reconstructions of one step's gradients."""

    targets: list[Tensor]
    """Each worker's gradient, clipped if the method clips."""
    alone: list[Tensor]
    """Each worker's own payload, decoded."""
    averaged: Tensor
    """The mean that all workers apply."""
    bits_up: float
    """Bits per element that a worker sends, statistics included."""
    bits_down: float
    """Bits per element that a worker receives."""


def exchange(method: Compressor, gradients: Gradients) -> Decoded:
    """Encode and decode each bucket alone, and exchange all by the method's default collective."""
    segments = gradients.segments(method)
    key = Key(gradients.seed, gradients.step, 0, 0, purposes.ENCODE)
    shared, _ = codec.agree(method, gradients.buckets, Context(segments, key=key))
    targets, alone = [], []
    ctx = Context(segments, shared, workers=len(gradients.buckets))
    for rank, bucket in enumerate(gradients.buckets):
        payload = codec.encode(method, bucket, ctx._replace(key=key._replace(rank=rank)))
        alone.append(codec.decode(method, payload, Context(segments, shared)).clone())
        targets.append(method.claims.target(bucket, Context(segments, shared)))
    workers, n = len(gradients.buckets), segments.numel
    threads = torch.get_num_threads()
    world = SimulatedWorld(workers, torch.device("cpu"), Link(10, 50), threads, 1)
    lane = Lane(method, method.legal_collectives()[0], 0, segments)
    engine = Exchange(world, [lane], gradients.seed, Clock(world.device))
    averaged = engine.mean(list(gradients.buckets), gradients.step)
    up = sum(traffic.payload_up for traffic in world.traffic) / workers
    down = sum(traffic.payload_down for traffic in world.traffic) / workers
    return Decoded(targets, alone, averaged, 8 * up / n, 8 * down / n)


def marginal_bits(method: Compressor, layers: Sequence[Layer], which: Sequence[int]) -> int | None:
    """Return the number of bits that a payload saves without the layers `which`.

    None if its size depends on the data.
    """
    shapes = [layer.shape for layer in layers]
    left = [shape for i, shape in enumerate(shapes) if i not in set(which)]
    whole = codec.bits(method, Segments.of(shapes, method.granularity))
    without = codec.bits(method, Segments.of(left, method.granularity)) if left else 0
    return None if whole is None or without is None else whole - without


# ---- distributions -------------------------------------------------------------------------------


def histogram(gradients: Gradients, layer: int, values: Sequence[Tensor]) -> list[Row]:
    """Return the filled bins of a layer's values in these buckets, in the gradient's units."""
    unit = float(gradients.rms[layer])
    if not unit:
        return []
    place = gradients.place(layer)
    piece = torch.cat([value[place] for value in values]).double().numpy() / unit
    edges = np.linspace(-EDGE, EDGE, BINS + 1)
    counts, _ = np.histogram(np.clip(piece, -EDGE, EDGE), edges)
    return [
        {"rms": unit, "left": left * unit, "right": right * unit, "count": int(count)}
        for left, right, count in zip(edges, edges[1:], counts, strict=False)
        if count
    ]
