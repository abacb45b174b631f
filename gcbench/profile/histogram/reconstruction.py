"""Errors of a compressor on given gradients: of each worker's payload alone, and of the mean.

Methods run without a memory and without earlier steps. As in training, the workers agree on scales
and each encodes its whole bucket with its own random numbers; errors are then computed by layer.
`alone` is decode(encode(x)) of one worker. `averaged` is the mean that the method's default
collective computes, compared with the true mean. For a method in rounds (PowerSGD) `alone` is an
exchange with a single worker, from the initial state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gcbench.core import codec, purposes, registry
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
ERRORS = np.logspace(-4, 2, 61)
"""Errors, in units of the layer's root mean square, at which their distribution is given."""


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
        return self.rms_of(self.buckets)

    def rms_of(self, buckets: Sequence[Tensor]) -> Tensor:
        """Return the root mean square of each layer in these buckets, float64."""
        squares = [self.sums(bucket.double().square()) for bucket in buckets]
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
        known = [value for one in dicts if (value := one[key]) is not None]
        result[key] = math.fsum(known) / len(known) if known else None
    return result


# ---- running a method ----------------------------------------------------------------------------


def agreed(method: Compressor, gradients: Gradients, segments: Segments, key: Key) -> Tensor:
    """Return the `shared` tensor on which the workers agree before they encode."""
    return codec.agree(method, gradients.buckets, Context(segments, key=key))[0]


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
    shared = agreed(method, gradients, segments, key)
    targets, alone = [], []
    for rank, bucket in enumerate(gradients.buckets):
        payload = codec.encode(method, bucket, Context(segments, shared, key._replace(rank=rank)))
        alone.append(codec.decode(method, payload, Context(segments, shared)).clone())
        targets.append(method.claims.target(bucket, Context(segments, shared)))
    workers, n = len(gradients.buckets), segments.numel
    threads = torch.get_num_threads()
    world = SimulatedWorld(workers, torch.device("cpu"), Link(10, 50), threads, 1)
    clock = Clock(world.device)
    clock.start_step()
    lane = Lane(method, method.legal_collectives()[0], 0, segments)
    engine = Exchange(world, [lane], gradients.seed, clock)
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


def error_distribution(gradients: Gradients, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
    """Return the share of elements whose error is at most each of `ERRORS`, float64.

    An error is |x - y| / the root mean square of its layer in `xs`; layers of zeros are left out.
    """
    counts, total = np.zeros(len(ERRORS)), 0
    unit = gradients.rms_of(xs).repeat_interleave(gradients.lengths)
    live = unit > 0
    for x, y in zip(xs, ys, strict=True):
        errors = ((x.double() - y.double()).abs()[live] / unit[live]).sort().values
        counts += np.searchsorted(errors.numpy(), ERRORS, side="right")
        total += len(errors)
    return torch.from_numpy(counts / max(total, 1))


# ---- clipping, and the zeros of ternary codes ----------------------------------------------------


class Clipping(NamedTuple):
    """The effect of clipping a vector g at c standard deviations to f(g)."""

    length_change: float
    """||f(g)|| / ||g|| - 1."""
    angle: float
    """Between g and f(g), in degrees."""
    clipped: float
    """Share of the elements that are clipped."""
    zeros: float
    """Expected share of zeros in ternary codes of the clipped values at the scale c sigma."""


def gaussian_clipping(c: float) -> Clipping:
    """Return the effect of clipping at c sigma on a long vector of independent normal values.

    With P = 1 - 2 Q(c): ||f||^2 / ||g||^2 = P - 2 c phi(c) + 2 c^2 Q(c), g . f / ||g||^2 = P, and
    E|f| = 2 (phi(0) - phi(c)) + 2 c Q(c).
    """
    normal = NormalDist()
    tail = normal.cdf(-c)
    inside = 1 - 2 * tail
    length = math.sqrt(inside - 2 * c * normal.pdf(c) + 2 * c * c * tail)
    size = 2 * (normal.pdf(0) - normal.pdf(c)) + 2 * c * tail
    angle = math.degrees(math.acos(min(1.0, inside / length)))
    return Clipping(length - 1, angle, 2 * tail, 1 - size / c)


def clipping(gradients: Gradients, c: float) -> list[Row]:
    """Return, for each layer, the effect of TernGrad's clipping at `c`, and its codes' zeros."""
    method = registry.compressor("terngrad", clip=c)
    segments = gradients.segments(method)
    key = Key(gradients.seed, gradients.step, 0, 0, purposes.ENCODE)
    shared = agreed(method, gradients, segments, key)
    per_worker = []
    for rank, bucket in enumerate(gradients.buckets):
        target = method.claims.target(bucket, Context(segments, shared))
        payload = codec.encode(method, bucket, Context(segments, shared, key._replace(rank=rank)))
        coded = codec.decode(method, payload, Context(segments, shared))
        cut = Sums.of(gradients, bucket, target)
        sent = gradients.sums((coded == 0).double())
        own = gradients.sums((bucket == 0).double())
        clipped = gradients.sums((bucket != target).double())
        per_worker.append((cut, sent, own, clipped))
    rows: list[Row] = []
    for i, layer in enumerate(gradients.layers):
        which, n = torch.tensor([i]), layer.numel
        figures = []
        for cut, sent, own, clipped in per_worker:
            change = cut.over(which)
            ratio, cosine = change["norm_ratio"], change["cosine"]
            figures.append(
                {
                    "length_change": None if ratio is None else ratio - 1,
                    "angle": None if cosine is None else math.degrees(math.acos(cosine)),
                    "clipped": float(clipped[i]) / n if n else None,
                    "zeros_sent": float(sent[i]) / n if n else None,
                    "zeros_gradient": float(own[i]) / n if n else None,
                }
            )
        rows.append({**_named(layer), "clip": c, **averages(figures), **_shape(gradients, i)})
    return rows


def _named(layer: Layer) -> Row:
    return {"layer": layer.name, "kind": layer.kind, "elements": layer.numel}


def _shape(gradients: Gradients, layer: int) -> Row:
    """Return statistics of a layer's gradients, means over workers.

    `peak`: largest magnitude / root mean square; `kurtosis` (3 for normal values); `neighbours`:
    correlation, about zero, of neighbours in the order of the bucket.
    """
    where, per_worker = gradients.place(layer), []
    for bucket in gradients.buckets:
        x = bucket[where].double()
        square = float(x.square().sum())
        n = len(x)
        known = square > 0
        per_worker.append(
            {
                "rms": math.sqrt(square / n) if n else None,
                "peak": float(x.abs().max()) / math.sqrt(square / n) if known else None,
                "kurtosis": float(x.pow(4).sum()) * n / square**2 if known else None,
                "neighbours": float((x[:-1] * x[1:]).sum()) / square if known else None,
            }
        )
    return dict(averages(per_worker))


# ---- spectra against top-k -----------------------------------------------------------------------

GRANULARITIES = ("tensor", "model")
RIVALS = ("equal share", "equal bits")


def rivals(
    kept: float, granularity: str, layers: Sequence[Layer]
) -> dict[str, tuple[Compressor, float]]:
    """Return FFT sparsification and the two forms of top-k it is compared with; shares kept.

    FFT keeps a share of the bins. Top-k codes values in 10 bits too; it keeps an equal share of
    elements, or the largest share whose payload is not larger.
    """
    fft = registry.compressor("fft", theta=1 - kept, granularity=granularity)

    def topk(ratio: float) -> Compressor:
        return registry.compressor("topk", ratio=ratio, values="range", granularity=granularity)

    segments = Segments.of([layer.shape for layer in layers], granularity)
    budget = codec.bits(fft, segments) or 0
    ratio = _largest(lambda share: (codec.bits(topk(share), segments) or 0) <= budget, 1.0)
    return {"fft": (fft, kept), RIVALS[0]: (topk(kept), kept), RIVALS[1]: (topk(ratio), ratio)}


def _largest(holds: Callable[[float], bool], high: float, digits: int = 20) -> float:
    """Return the largest number in [2^-digits, high] for which `holds`, by bisection."""
    if holds(high):
        return high
    low = 2.0**-digits
    for _ in range(digits):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def spectra(gradients: Gradients, kept: float) -> list[Row]:
    """Return the energy that FFT and top-k keep, per layer and in all, mean over workers."""
    rows: list[Row] = []
    everything = torch.arange(len(gradients.layers))
    names: list[Row] = [*map(_named, gradients.layers)]
    names.append({"layer": ALL, "kind": ALL, "elements": int(gradients.lengths.sum())})
    for i, named in enumerate(names[:-1]):
        named["neighbours"] = _shape(gradients, i)["neighbours"]
    for granularity in GRANULARITIES:
        methods = rivals(kept, granularity, gradients.layers)
        energy: dict[str, list[list[float | None]]] = {name: [] for name in methods}
        bits: dict[str, float] = {}
        for name, (method, _) in methods.items():
            segments = gradients.segments(method)
            key = Key(gradients.seed, gradients.step, 0, 0, purposes.ENCODE)
            shared = agreed(method, gradients, segments, key)
            for rank, bucket in enumerate(gradients.buckets):
                payload = codec.encode(
                    method, bucket, Context(segments, shared, key._replace(rank=rank))
                )
                bits[name] = 8 * payload.nbytes / segments.numel
                decoded = Sums.of(
                    gradients, bucket, codec.decode(method, payload, Context(segments, shared))
                )
                lost = [decoded.over(which)["relative_error"] for which in (*everything[:, None],)]
                lost.append(decoded.over(everything)["relative_error"])
                energy[name].append([None if e is None else 1 - e * e for e in lost])
        for rival in RIVALS:
            for i, named in enumerate(names):
                both = zip(energy["fft"], energy[rival], strict=True)
                pairs = [{"energy_fft": a[i], "energy_topk": b[i]} for a, b in both]
                rows.append(
                    {
                        **named,
                        "kept": kept,
                        "scales": granularity,
                        "rival": rival,
                        **averages(pairs),
                        "bits_fft": bits["fft"],
                        "bits_topk": bits[rival],
                        "kept_topk": methods[rival][1],
                    }
                )
    return rows
