"""Measurements on gradients while a task is trained: norms, clipping, noise.

A `Watch` is attached to a trainer and gets each worker's gradient before the exchange; no
compressor affects what it measures. Every k-th step is an observation, of norms and clipping. A few
steps are snapshots: at their parameters many more batches are drawn, which give the mean gradient
and, coordinate by coordinate, the noise of one worker's batch (Welford's streaming moments,
float64).

The variance of the noise is computed about the mean of the B drawn batches, over B - 1, and so is
unbiased; the standard deviation is too low, by a factor of about 1 - 1 / (4 B) for normal noise.
The mean gradient still has noise of sigma / sqrt(B) in each coordinate; `noise_share` is the share
of its squared norm that is this noise.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gcbench import ops
from gcbench.checks.oracle import energy
from gcbench.core import purposes
from gcbench.core.compressor import Key, Segments
from gcbench.core.values import finite
from gcbench.training.train import Trainer

CLIP = 2.5
"""TernGrad's clipping, in standard deviations of a tensor (Wen et al. 2017, section 3.3)."""
APART = 1 << 20
"""Added to the rank in the key of a drawn batch, so that no worker of the run draws the same."""
Record = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What a `Watch` measures, and at which steps."""

    every: int
    snapshots: tuple[int, ...]
    batches: int
    """Batches drawn at a snapshot."""
    wanted: Callable[[str], bool]
    """Whether any claim of a group, e.g. "signsgd/", is to be tested."""


class Welford:
    """Streaming mean and squared deviations of vectors, float64 (Welford 1962)."""

    def __init__(self, like: Tensor) -> None:
        self.n = 0
        self.mean = torch.zeros_like(like, dtype=torch.float64)
        self.squares = torch.zeros_like(self.mean)

    def add(self, x: Tensor) -> None:
        """Add a vector."""
        self.n += 1
        away = x.double() - self.mean
        self.mean.add_(away, alpha=1 / self.n)
        self.squares.addcmul_(away, x.double() - self.mean)

    def variance(self, *, unbiased: bool = True) -> Tensor:
        """Return the variance of each coordinate, over n - 1, or over n without `unbiased`."""
        return self.squares / (self.n - 1 if unbiased else self.n)


class Watch:
    """Measures the gradients of one run; its `on_bucket` is given to the trainer's options."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.observations: list[Record] = []
        self.snapshots: list[Record] = []
        self._buckets: list[Tensor] = []

    def start(self, trainer: Trainer) -> None:
        """Attach to a trainer."""
        self.trainer = trainer
        self.shapes = [s for _, exact, shapes in trainer.groups if not exact for s in shapes]
        self.segments = Segments.of(self.shapes)

    def on_bucket(self, step: int, rank: int, bucket: Tensor) -> None:
        """Take one worker's gradient, float32, shape (n,); at the last worker's, measure all.

        If a gradient is not finite nothing is measured: the trainer stops and names the layer.
        """
        self._buckets.append(bucket)
        if len(self._buckets) < self.trainer.world.size:
            return
        buckets, self._buckets = self._buckets, []
        if not all(bucket.isfinite().all() for bucket in buckets):
            return
        if step % self.plan.every == 0 and self.plan.wanted("terngrad/"):
            seen = _average([self._ternary(bucket) for bucket in buckets])
            self.observations.append({"step": step, **seen})
        if step in self.plan.snapshots and self.plan.wanted("signsgd/"):
            self.snapshots.append({"step": step, **self._noise(step, buckets[0])})

    def record(self) -> Record:
        """Return all measurements, as values that JSON can hold."""
        return {
            "names": self.trainer.names,
            "shapes": [list(shape) for shape in self.shapes],
            "observations": self.observations,
            "snapshots": self.snapshots,
        }

    # -- observations ------------------------------------------------------------------------------

    def _ternary(self, x: Tensor) -> Record:
        """Return ||g||_inf ||g||_1 of the bucket, of its tensors, and clipped; length and angle.

        `whole` is of the bucket, `layer` the sum over its tensors (`raw`), `clip` that of the
        clipped tensors (`cut`); `length` and `angle` (degrees) say how clipping changes a tensor.
        """
        limit, _ = ops.ternary.scales(x, self.segments, CLIP, at_limit=False)
        assert limit is not None
        clipped = ops.statistics.clamp_(x.clone(), limit, self.segments)
        sizes = list(self.segments.lengths)
        raw, cut, length, angle = [], [], [], []
        for g, f in zip(
            torch.split(x.double(), sizes), torch.split(clipped.double(), sizes), strict=True
        ):
            raw.append(float(g.abs().max() * g.abs().sum()) if g.numel() else 0.0)
            cut.append(float(f.abs().max() * f.abs().sum()) if f.numel() else 0.0)
            long, short = float(g.norm()), float(f.norm())
            length.append(1 - short / long if long else None)
            cosine = float(f @ g) / (long * short) if long and short else None
            angle.append(None if cosine is None else math.degrees(math.acos(min(1.0, cosine))))
        square, whole = energy(x), float(x.double().abs().max() * x.double().abs().sum())
        layer, clip = math.fsum(raw), math.fsum(cut)
        return {
            "square": square,
            "whole": whole,
            "layer": layer,
            "clip": clip,
            "worst_layer": layer / whole if whole else 0.0,
            "worst_clip": clip / layer if layer else 0.0,
            "length": length,
            "angle": angle,
            "raw": raw,
            "cut": cut,
            "squares": [energy(g) for g in torch.split(x, sizes)],
        }

    # -- snapshots ---------------------------------------------------------------------------------

    def drawn(self, step: int) -> Iterator[Tensor]:
        """Yield gradients of newly drawn batches at the present parameters, float32, shape (n,).

        Each batch has the size of one worker's, and is drawn with replacement, so that the
        gradients are independent given the parameters. They are computed in training mode, on
        copies of the model, so that the model's own batch-norm statistics do not change.
        """
        trainer = self.trainer
        config, n = trainer.config, len(trainer.train)
        share = config.batch // config.workers
        copies = [copy.deepcopy(replica) for replica in trainer.replicas]

        def gradient(first: int, rank: int) -> Tensor:
            model = copies[rank]
            key = Key(config.seed, step, APART + first + rank, 0, purposes.ORDER)
            indices = (ops.random.draws24(key, share).long() % n).to(trainer.device)
            place = key._replace(stream=purposes.AUGMENT)
            inputs, targets = trainer.task.batch(trainer.train, indices, place)
            named = dict(model.named_parameters())
            loss = trainer.task.loss(model(inputs), targets)
            return trainer.finish_bucket(
                list(torch.autograd.grad(loss, [named[name] for name in trainer.names]))
            )

        for first in range(0, self.plan.batches, len(copies)):
            gradients = trainer.world.map(partial(gradient, first))
            yield from gradients[: self.plan.batches - first]

    def _noise(self, step: int, like: Tensor) -> Record:
        """Return norms and densities of gradient and noise, and wrong signs.

        `like`: a tensor of the bucket's shape.
        """
        seen = Welford(like)
        above = torch.zeros_like(like, dtype=torch.int32)
        below = torch.zeros_like(above)
        for gradient in self.drawn(step):
            seen.add(gradient)
            above += gradient > 0
            below += gradient < 0
        mean, sigma = seen.mean, seen.variance().sqrt()
        population = seen.variance(unbiased=False).sqrt()
        agree = torch.where(mean > 0, above, below).double() / seen.n
        wrong = torch.where(mean == 0, 0.0, 1 - agree)
        noisy = sigma > 0
        strength = mean[noisy].abs() / sigma[noisy]
        return {
            "batches": seen.n,
            "gradient_l1": float(mean.abs().sum()),
            "gradient_l2": float(mean.norm()),
            "sigma_l1": float(sigma.sum()),
            "sigma_l2": float(sigma.norm()),
            "density_gradient": finite(density(mean)),
            "density_noise": finite(density(sigma)),
            "noise_share": finite(energy(sigma) / seen.n / energy(mean)),
            "wrong": float((mean.abs() * wrong).sum()),
            "wrong_any": float(population.sum()),
            "wrong_symmetric": float((mean[noisy].abs() * gauss(strength)).sum()),
        }


def density(v: Tensor) -> float:
    """Return phi(v) = ||v||_1^2 / (d ||v||_2^2), from 1/d to 1 (Bernstein et al. 2018)."""
    square = energy(v) * v.numel()
    return float(v.double().abs().sum()) ** 2 / square if square else math.nan


def gauss(strength: Tensor) -> Tensor:
    """Return the bound on P[wrong sign] at S = |g| / sigma for unimodal, symmetric noise.

    Gauss 1823, as lemma D.1 of Bernstein et al. 2018 uses it: 2 / (9 S^2) if S > 2 / sqrt 3, else
    1/2 - S / (2 sqrt 3); uniform noise attains the latter.
    """
    far = 2 / (9 * strength.square())
    return torch.where(strength > 2 / math.sqrt(3), far, 0.5 - strength / (2 * math.sqrt(3)))


def _average(records: Sequence[Record]) -> Record:
    """Return the mean over workers of each number; of fields named "worst...", the largest."""

    def mean(values: Sequence[Any]) -> Any:
        if isinstance(values[0], list):
            return [mean(row) for row in zip(*values, strict=True)]
        present = [value for value in values if value is not None]
        return math.fsum(present) / len(present) if present else None

    return {
        name: max(record[name] for record in records)
        if name.startswith("worst")
        else mean([record[name] for record in records])
        for name in records[0]
    }
