"""An exchange whose results are compared, step by step, with what its method declares.

`Audited` is the engine's own exchange. After each step it compares the mean that it returned with
what the method declares about the gradients that went in: expectation and variance of an unbiased
code, the error of a contractive one, the signs and their majority, and, with error feedback, the
residuals. Nothing here depends on which method it is. An `Audit` only collects sums; `codec_claims`
judges them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gcbench.checks import calls
from gcbench.checks.oracle import energy
from gcbench.core import memory, purposes, registry
from gcbench.core.clock import Clock
from gcbench.core.compressor import (
    Compressor,
    Context,
    Key,
    MultiRoundCompressor,
    Segments,
    reencodes,
)
from gcbench.core.exchange import Exchange, Lane
from gcbench.core.values import finite
from gcbench.core.world import World

Record = dict[str, Any]
ENDED = ("stopped", "refused")
"""Fields of the record of a run that ended early: the step, or the method's error."""
DIRECTIONS = 3
"""A bias is tested along three vectors: t, sign(t), and sign(t) where |t| is above its rms."""


AGAIN = "two-shot alone is legal, whose owners encode the mean again"


def once(method: Compressor) -> str:
    """Return a legal collective that encodes only once, if there is one: all-gather first."""
    legal = method.legal_collectives()
    return next((name for name in ("allgather", "allreduce") if name in legal), legal[0])


def again(method: Compressor) -> bool:
    """Return whether even that collective encodes the mean again; no declared error covers this."""
    return reencodes(method, once(method))


def lane_of(method: Compressor, segments: Segments, carried: memory.Memory | None = None) -> Lane:
    """Return a lane that exchanges by the collective of `once`; `carried`: default no memory."""
    return Lane(method, once(method), 0, segments, carried or memory.Memory())


class Audit:
    """Collects sums over the steps of one lane, in float64."""

    def __init__(self, lane: Lane, workers: int) -> None:
        self.lane, self.workers = lane, workers
        method, carried = lane.compressor, lane.memory
        residual = isinstance(carried, registry.memory_class("residual"))
        self.decay: float | None = carried.decay if residual else None  # type: ignore[attr-defined]
        comparable = self.decay is not None or not carried.carries
        # Encoding means or partial sums again adds an error that no declaration is about.
        single = comparable and not reencodes(method, lane.collective)
        mean = method.claims.aggregate == "mean"
        self.unbiased = single and mean and method.claims.unbiased and not carried.carries
        self.contractive = single and method.claims.contractive and (mean or self.decay is not None)
        self.identity = single and mean and self.decay is not None
        self.signs = comparable and method.claims.signs and self.decay is None
        # What a worker sent is what it was offered less its residual.
        self.applied = single and method.claims.aggregate == "other" and self.decay is not None
        self.fault = ""
        self.random: bool | None = None
        self.steps = 0
        self.delta: float | None = None
        zeros = [0.0] * DIRECTIONS
        self.bias: dict[str, list[float]] = {
            "sum": [*zeros],
            "scale": [*zeros],
            "variance": [*zeros],
            "largest": [*zeros],
        }
        self.each: list[list[float]] = [[] for _ in range(DIRECTIONS)]
        self.spread = {"error": 0.0, "declared": 0.0, "variance": 0.0, "largest": 0.0, "bound": 0.0}
        self.errors: list[float] = []
        self.excess: list[float] = []
        self.exact = self.bounded = True
        self.lost: list[float] = []
        self.by_delta: list[float] = []
        self.by_bound: list[float] = []
        self.gap = self.residual_ratio = 0.0
        self.limits = [0.0] * workers
        self.wrong = self.checked = self.unlike = self.compared = 0
        self.alpha: list[float] = []

    # -- one step ----------------------------------------------------------------------------------

    def add(
        self,
        gradients: Sequence[Tensor],
        arrived: Tensor,
        before: Sequence[Tensor],
        after: Sequence[Tensor],
        key: Key,
        factor: float = 1.0,
    ) -> None:
        """Add one step.

        `gradients`: each worker's, float32, shape (n,); `arrived`: the mean that the exchange
        returned; `before`, `after`: the workers' residuals before and after it, empty if there are
        none. `before` is already multiplied by `factor` = old / new learning rate.
        """
        lane, method = self.lane, self.lane.compressor
        offered = list(gradients)
        if self.decay is not None:
            offered = [
                torch.add(g, e, alpha=self.decay) for g, e in zip(gradients, before, strict=True)
            ]
        if self.random is None:
            self.random = calls.is_random(method, offered[0], lane.segments)
            self.delta = method.claims.delta(lane.segments)
        self.steps += 1
        mean = torch.stack([x.double() for x in offered]).mean(0)
        decoded = arrived.double()
        if self.unbiased:
            self._moments(offered, mean, decoded, key)
        if self.contractive:
            self._contraction(offered, mean, decoded, after, key)
        if self.identity:
            sent = mean - torch.stack([e.double() for e in after]).mean(0)
            size = float(mean.norm()) + float(sent.norm())
            self.gap = _worst(self.gap, float((decoded - sent).norm()) / size if size else 0.0)
            self._residuals(gradients, after, factor)
        if self.signs:
            self._signs(offered, decoded)
        if self.applied:
            self._applied([x - e for x, e in zip(offered, after, strict=True)], arrived)
        if self.contractive and self.decay is None and energy(mean):
            self.alpha.append(float((decoded - mean).norm() / mean.norm()))

    def _moments(self, offered: Sequence[Tensor], mean: Tensor, decoded: Tensor, key: Key) -> None:
        """Add the deviation from the target along the `DIRECTIONS`, and its squared norm."""
        method, segments = self.lane.compressor, self.lane.segments
        # If all workers draw the same, they are like one worker with their mean.
        alike = method.draw_shared(Context(segments, key=key)) is not None
        xs = [mean.float()] if alike else offered
        shared = calls.agree(method, xs, segments, key)
        targets = [method.claims.target(x, Context(segments, shared)).double() for x in xs]
        target = torch.stack(targets).mean(0)
        if any(float(t @ x.double()) <= 0 < energy(x) for t, x in zip(targets, xs, strict=True)):
            self.fault = "the declared target does not point where the gradient does"
        away = decoded - target
        declared = [method.claims.variance(x, Context(segments, shared)) for x in xs]
        variances = [v.double() for v in declared if v is not None]
        along = directions(target)
        for place, u in enumerate(along):
            self.each[place].append(float(u @ away))
            self.bias["sum"][place] += float(u @ away)
            self.bias["scale"][place] += float(u @ target)
        self.errors.append(energy(away))
        self.spread["error"] += self.errors[-1]
        if len(variances) < len(xs) or (method.claims.correlated and len(xs) > 1):
            self.exact = False  # that of the mean is not the sum of the workers' variances
            return
        variance = torch.stack(variances).sum(0) / len(xs) ** 2
        for place, u in enumerate(along):
            self.bias["variance"][place] += float(u.square() @ variance)
        self.excess.append(self.errors[-1] - float(variance.sum()))
        self.spread["declared"] += float(variance.sum())
        if method.claims.two_levels:
            each = [jumps(t, v) for t, v in zip(targets, variances, strict=True)]
            jump = torch.stack(each).sum(0) / len(xs)
            # A scale may differ by float32's rounding, also between the workers' and the target's.
            if bool((away.abs() > jump * (1 + 1e-4) + 1e-6 * target.abs().max()).any()):
                self.fault = "an element is further from its target than its two levels"
            for place, u in enumerate(along):
                largest = float((u.abs() * jump).max()) if u.numel() else 0.0
                self.bias["largest"][place] = max(self.bias["largest"][place], largest)
            self.spread["variance"] += float(jump.square() @ variance)
            self.spread["largest"] = max(self.spread["largest"], float(jump.square().max()))
        bounds = [method.claims.variance_bound(x, Context(segments, shared)) for x in xs]
        total = [bound for bound in bounds if bound is not None]
        self.bounded &= len(total) == len(xs)
        self.spread["bound"] += sum(total) / len(xs) ** 2

    def _contraction(
        self,
        offered: Sequence[Tensor],
        mean: Tensor,
        decoded: Tensor,
        after: Sequence[Tensor],
        key: Key,
    ) -> None:
        """Add the squared error relative to what was offered, and to both declared bounds.

        With residuals it is the mean over workers of each worker's own error. Without, it is that
        of the mean, which is at most the mean of the workers' errors (Jensen's inequality).
        """
        method, segments = self.lane.compressor, self.lane.segments
        rounds = isinstance(method, MultiRoundCompressor)
        if self.decay is not None and not rounds:
            lost = sum(map(energy, after)) / len(after)
        else:
            lost = float((decoded - mean).square().sum())
        xs = [mean.float()] if rounds else list(offered)
        square = sum(map(energy, xs)) / len(xs)
        self.lost.append(_over(lost, square))
        if self.delta is not None:
            self.by_delta.append(_over(lost, (1 - self.delta) * square, square))
        ctx = Context(segments, key=key)
        if not rounds:
            ctx = ctx._replace(shared=calls.agree(method, offered, segments, key))
        bounds = [method.claims.error_bound(x, ctx) for x in xs]
        bounds_of_workers = [bound for bound in bounds if bound is not None]
        if len(bounds_of_workers) == len(xs):
            self.by_bound.append(_over(lost, sum(bounds_of_workers) / len(xs), square))

    def _residuals(
        self, gradients: Sequence[Tensor], after: Sequence[Tensor], factor: float
    ) -> None:
        """Compare each worker's residual with the bound that follows from delta and its gradients.

        ||e_t|| <= sqrt(1 - delta) (decay ||e_{t-1}|| + ||g_t||), applied from the first step on.
        """
        if self.delta is None or self.random or self.decay is None:
            return
        root = math.sqrt(max(0.0, 1 - self.delta))
        for i, (g, e) in enumerate(zip(gradients, after, strict=True)):
            self.limits[i] = root * (self.decay * factor * self.limits[i] + math.sqrt(energy(g)))
            self.residual_ratio = _worst(
                self.residual_ratio, _over(math.sqrt(energy(e)), self.limits[i])
            )

    def _signs(self, offered: Sequence[Tensor], decoded: Tensor) -> None:
        """Count the elements where the sign that arrived is not that of the majority.

        A tie is decided as the method says; elements where a worker has 0, or where a coin decides,
        are left out.
        """
        signs = [x.sign() for x in offered]
        won = self.lane.compressor.claims.aggregated(signs, Context(self.lane.segments))
        if won is None:
            return
        sure = (torch.stack(signs) != 0).all(0) & ~won.isnan()
        self.checked += int(sure.sum())
        self.wrong += int((decoded[sure] != won[sure]).sum())

    def _applied(self, sent: Sequence[Tensor], arrived: Tensor) -> None:
        """Count the elements that are not what the method says that the aggregate is."""
        defined = self.lane.compressor.claims.aggregated(sent, Context(self.lane.segments))
        if defined is None:
            return
        sure = ~defined.isnan()
        largest = float(defined[sure].abs().max()) if bool(sure.any()) else 0.0
        self.compared += int(sure.sum())
        near = (arrived[sure] - defined[sure]).abs() <= 1e-3 * largest
        self.unlike += int((~near).sum())

    def record(self) -> Record:
        """Return all sums as values that JSON can hold; None for a number that is not finite."""
        record: Record = {"steps": self.steps, "workers": self.workers, "random": bool(self.random)}
        if self.unbiased:
            record["bias"] = {name: [*map(finite, values)] for name, values in self.bias.items()}
            record["bias"]["each"] = [[*map(finite, values)] for values in self.each]
            record["spread"] = {name: finite(value) for name, value in self.spread.items()}
            levels = self.exact and self.lane.compressor.claims.two_levels
            record |= {"exact": self.exact, "bounded": self.bounded, "levels": levels}
            record["excess"] = [*map(finite, self.excess)]
        if self.contractive:
            record["lost"] = [*map(finite, self.lost)]
            record["by_delta"] = [*map(finite, self.by_delta)]
            record["by_bound"] = [*map(finite, self.by_bound)]
        if self.identity:
            record["identity"] = finite(self.gap)
            if self.delta is not None and not self.random:
                record["residual"] = finite(self.residual_ratio)
        if self.signs:
            record |= {"wrong": self.wrong, "checked": self.checked}
        if self.applied:
            record |= {"unlike": self.unlike, "compared": self.compared}
        if self.fault:
            record["refused"] = self.fault
        if self.alpha:
            record["alpha"] = [*map(finite, self.alpha)]
            if self.delta is not None:
                record["limit"] = math.sqrt(max(0.0, 1 - self.delta))
        return record


def directions(target: Tensor) -> tuple[Tensor, ...]:
    """Return the `DIRECTIONS` along which a bias is tested, each of the target's shape."""
    rms = target.square().mean().sqrt()
    return target, target.sign(), torch.where(target.abs() > rms, target.sign(), 0.0)


def jumps(target: Tensor, variance: Tensor) -> Tensor:
    """Return, element by element, a bound on the distance of a decoded element from its target.

    It holds for codes with `Claims.two_levels`: |t| + V / |t|. The levels 0 and a have the variance
    V = t (a - t), and other neighboring levels are at most as far apart.
    """
    return target.abs() + torch.where(variance > 0, variance / target.abs().clamp(min=1e-300), 0.0)


def _worst(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def _over(a: float, b: float, scale: float = 0.0) -> float:
    """Return a / b; 0 where a is at most the rounding of a float32 number of size `scale`."""
    if a <= scale * 1e-13:
        return 0.0
    return a / b if b else math.inf


class Audited(Exchange):
    """An exchange of one lane that audits its steps."""

    def __init__(self, world: World, lane: Lane, seed: int, clock: Clock) -> None:
        super().__init__(world, [lane], seed, clock)
        self.audit = Audit(lane, world.size)

    def mean(
        self,
        buckets: Sequence[Tensor],
        step: int,
        lr: float = 1.0,
        which: Sequence[int] | None = None,
    ) -> Tensor:
        """Return the mean as `Exchange.mean` does, and add the step to the audit."""
        factor = 1.0 if self.lr is None else self.lr / lr
        before = [factor * state for state in self._residuals()]
        arrived = super().mean(buckets, step, lr, which)
        key = Key(self.seed, step, 0, self.lanes[0].start, purposes.ENCODE)
        self.audit.add(buckets, arrived, before, self._residuals(), key, factor)
        return arrived

    def _residuals(self) -> list[Tensor]:
        """Return copies of the workers' residuals; an empty list if there are none."""
        states = [worker[0] for worker in self.workers]
        return [state["residual"].clone() for state in states if "residual" in state]


def merged(records: Sequence[Mapping[str, Any]]) -> Record:
    """Return the records of several audits of one method, with equal workers, merged into one.

    A field that only some of them have, as of a run that ended early, is taken from the first.
    """
    total: Record = dict(records[0])
    for other in records[1:]:
        shared = {
            name: _plus(name, value, other[name]) for name, value in total.items() if name in other
        }
        total = {**other, **total, **shared}
    return total


def _plus(name: str, a: Any, b: Any) -> Any:
    if a is None or b is None:
        return None
    if isinstance(a, dict):
        return {key: _plus(key, value, b[key]) for key, value in a.items()}
    if isinstance(a, bool):
        return a or b if name == "random" else a and b
    if name in ("largest", "identity", "residual"):
        return [max(pair) for pair in zip(a, b, strict=True)] if isinstance(a, list) else max(a, b)
    if name in ("workers", "limit", *ENDED):
        return a
    if isinstance(a, list) and name in ("sum", "scale", "variance"):
        return [_plus("", *pair) for pair in zip(a, b, strict=True)]
    if name == "each":
        return [x + y for x, y in zip(a, b, strict=True)]
    return a + b
