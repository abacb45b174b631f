"""Methods and memories that are right and unlike the built-in ones: the checks must accept them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from wrong_methods import TOP, Levels, LevelsClaims, spread

from gcbench import ops
from gcbench.core import registry
from gcbench.core.claims import Claims
from gcbench.core.compressor import Compressor, Key, Prepared, check_finite
from gcbench.core.errors import PayloadError
from gcbench.core.memory import Memory

LARGEST = torch.finfo(torch.float32).max
Residual = registry.memory_class("residual")
Momentum = registry.memory_class("momentum")


@dataclass(frozen=True)
class Regenerated(Compressor):
    """Sends a random quarter, and the rank: the decoder draws the positions again from its key."""

    collectives: ClassVar[tuple[str, ...]] = ("allgather",)

    def _mask(self, key: Key, rank: int, n: int):
        return ops.random.uniform(key._replace(rank=rank, stream=0), n) < 0.25

    def encode(self, x, ctx):
        return x[self._mask(ctx.key, ctx.rank, len(x))], torch.tensor([ctx.rank], dtype=torch.int32)

    def decode(self, payload, ctx):
        if [part.dtype for part in payload.parts] != [torch.float32, torch.int32]:
            raise PayloadError("two parts expected")
        values, rank = payload.parts
        if len(rank) != 1 or not 0 <= int(rank) < 2**24:
            raise PayloadError("one rank expected")
        mask = self._mask(ctx.key, int(rank), ctx.segments.numel)
        if int(mask.sum()) != len(values):
            raise PayloadError("another number of values expected")
        return torch.zeros(ctx.segments.numel).masked_scatter_(mask, check_finite(values))


class RegeneratedClaims(Claims, of=Regenerated):
    contractive = True

    def error_bound(self, x, ctx):
        return 0.75 * float(x.double().square().sum())


@dataclass(frozen=True)
class Nonzeros(Compressor):
    """Sends the nonzero elements, their positions and the length; sizes depend on the data."""

    collectives: ClassVar[tuple[str, ...]] = ("allgather", "twoshot")

    def encode(self, x, ctx):
        places = x.nonzero()[:, 0]
        return places.to(torch.int32), x[places], torch.tensor([len(x)], dtype=torch.int32)

    def decode(self, payload, ctx):
        if [part.dtype for part in payload.parts] != [torch.int32, torch.float32, torch.int32]:
            raise PayloadError("positions, values and a length expected")
        places, values = payload.parts[0].long(), check_finite(payload.parts[1])
        n = ctx.segments.numel
        if payload.parts[2].tolist() != [n]:
            raise PayloadError(f"another length than {n}")
        rising = bool((places.diff() > 0).all()) if len(places) > 1 else True
        if len(places) != len(values) or not rising:
            raise PayloadError("one value for each of rising positions expected")
        if len(places) and not 0 <= int(places[0]) <= int(places[-1]) < n:
            raise PayloadError(f"positions beyond {n} elements")
        return torch.zeros(n).index_put_((places,), values)


class NonzerosClaims(Claims, of=Nonzeros):
    contractive = True
    exact_for = ("signs", "integers", "sparse")

    def error_bound(self, x, ctx):
        return 0.0


class Unsized(Nonzeros):
    """Sends no length: a payload may be legal for a longer bucket, too."""

    def encode(self, x, ctx):
        return super().encode(x, ctx)[:2]

    def decode(self, payload, ctx):
        length = torch.tensor([ctx.segments.numel], dtype=torch.int32)
        return super().decode(payload._replace(parts=(*payload.parts, length)), ctx)


@dataclass(frozen=True)
class SharedRange(Compressor):
    """8-bit codes of the range of all workers, which the declared bound uses."""

    collectives: ClassVar[tuple[str, ...]] = ("allgather",)

    def prepare(self, x, ctx):
        return Prepared(ops.statistics.absmax(x, ctx.segments))

    def steps(self, ctx):
        sizes = torch.tensor(ctx.segments.lengths)
        scales = torch.where(ctx.shared < 2.0**-100, 0.0, check_finite(ctx.shared)).double()
        return (scales / 127).repeat_interleave(sizes)

    def encode(self, x, ctx):
        steps = self.steps(ctx)
        return torch.where(steps > 0, x.double() / steps, 0.0).round().to(torch.int8)

    def decode(self, payload, ctx):
        return (payload.parts[0].double() * self.steps(ctx)).clamp(-LARGEST, LARGEST).float()

    def layout(self, segments, count=1):
        return ((torch.int8 if count == 1 else torch.float32, segments.numel),)


class SharedRangeClaims(Claims, of=SharedRange):
    contractive = True

    def error_bound(self, x, ctx):
        size, steps = x.double().abs(), self.codec.steps(ctx)
        lost = torch.where(size < 0.4999 * steps, size, 0.5001 * steps)
        return float(torch.where(steps > 0, lost, size).square().sum())


@dataclass(frozen=True)
class Rated(Compressor):
    """bfloat16 by truncation; below a learning rate of 0.01 zeros in place of small elements."""

    collectives: ClassVar[tuple[str, ...]] = ("allgather",)

    def encode(self, x, ctx):
        if ctx.lr < 0.01:
            largest = ops.statistics.absmax(x, ctx.segments)
            sizes = torch.tensor(ctx.segments.lengths)
            x = x.masked_fill(x.abs() < 1e-3 * largest.repeat_interleave(sizes), 0.0)
        return (x.contiguous().view(torch.int32) >> 16).to(torch.int16)

    def decode(self, payload, ctx):
        codes = payload.parts[0]
        return check_finite((codes.to(torch.int32) << 16).view(torch.float32))

    def layout(self, segments, count=1):
        return (
            ((torch.int16, segments.numel),) if count == 1 else ((torch.float32, segments.numel),)
        )


class RatedClaims(Claims, of=Rated):
    contractive = True

    def error_bound(self, x, ctx):
        size = float(x.double().square().sum())
        return min(size, 0.05 * size + len(x) * 2.0**-240)


class CoarseSteps(Levels):
    """Rounds at random to 15 levels, at odd steps to 3 of them."""

    class claims(LevelsClaims):
        def variance(self, x, ctx):
            if not ctx.key.step % 2:
                return super().variance(x, ctx)
            scale = spread(ops.statistics.absmax(x, ctx.segments), ctx.segments).double()
            return scale * x.double().abs() - x.double() ** 2

    def encode(self, x, ctx):
        codes, scale = super().encode(x, ctx)
        if ctx.key.step % 2:
            level = x.abs() / spread(scale, ctx.segments).clamp(min=2.0**-126)
            up = self.draws(ctx.key, len(x)) < level
            codes = torch.where(up, TOP * x.sign(), 0.0).to(torch.int8)
        return codes, scale


class Resetting(Residual):
    """Drops the error at every 64th step, and says so."""

    @property
    def lossy(self):
        return True

    def offer(self, gradient, ctx):
        if ctx.step % 64 == 0:
            ctx.state["residual"].zero_()
        return super().offer(gradient, ctx)


@dataclass(frozen=True)
class WarmingMomentum(Memory):
    """A momentum whose decay approaches 0.9 within the first steps."""

    buffers: ClassVar[tuple[str, ...]] = ("momentum",)
    has_momentum: ClassVar[bool] = True

    def offer(self, gradient, ctx):
        beta = min(0.9, 1 - 1 / (2 + ctx.step))
        return ctx.state["momentum"].mul_(beta).add_(gradient)

    def dense(self):
        return self


class Normalized(Momentum):
    """Divides the gradient of this worker by its norm."""

    def offer(self, gradient, ctx):
        norm = gradient.double().norm()
        return super().offer((gradient / norm).float() if norm > 0 else gradient, ctx)


@dataclass(frozen=True)
class SelfScaled(Memory):
    """Carries the error times the learning rate, as in the paper, and follows the rate itself."""

    buffers: ClassVar[tuple[str, ...]] = ("update",)
    feedback: ClassVar[bool] = True
    contracting: ClassVar[bool] = True

    def offer(self, gradient, ctx):
        return gradient + ctx.state["update"] / ctx.lr

    def keep(self, offered, sent, ctx):
        torch.sub(offered, sent, out=ctx.state["update"]).mul_(ctx.lr)


@dataclass(frozen=True)
class Differences(Memory):
    """Sends differences from a running estimate (DIANA)."""

    rate: float = 0.1

    buffers: ClassVar[tuple[str, ...]] = ("estimate",)
    joint: ClassVar[tuple[str, ...]] = ("mean estimate",)
    feedback: ClassVar[bool] = True
    owner: ClassVar[bool] = False

    def offer(self, gradient, ctx):
        return gradient - ctx.state["estimate"]

    def keep(self, offered, sent, ctx):
        ctx.state["estimate"].add_(sent, alpha=self.rate)

    def apply(self, mean, ctx):
        applied = ctx.joint["mean estimate"] + mean
        ctx.joint["mean estimate"].add_(mean, alpha=self.rate)
        return applied


@dataclass(frozen=True)
class Corrected(Memory):
    """A momentum, and the error of compressing it."""

    buffers: ClassVar[tuple[str, ...]] = ("momentum", "error")
    residuals: ClassVar[tuple[str, ...]] = ("error",)
    has_momentum: ClassVar[bool] = True

    def offer(self, gradient, ctx):
        return ctx.state["momentum"].mul_(0.9).add_(gradient) + ctx.state["error"]

    def keep(self, offered, sent, ctx):
        torch.sub(offered, sent, out=ctx.state["error"])

    def dense(self):
        return self


@dataclass(frozen=True)
class TwoSteps(Memory):
    """The sum of this gradient and 0.9 times the previous one."""

    buffers: ClassVar[tuple[str, ...]] = ("previous",)
    has_momentum: ClassVar[bool] = True

    def offer(self, gradient, ctx):
        offered = gradient + 0.9 * ctx.state["previous"]
        ctx.state["previous"] = gradient.clone()
        return offered

    def dense(self):
        return self


@dataclass(frozen=True)
class TwoMeans(Memory):
    """The sum of this mean and 0.9 times the previous one; the result is a buffer."""

    joint: ClassVar[tuple[str, ...]] = ("previous", "applied")
    has_momentum: ClassVar[bool] = True

    def apply(self, mean, ctx):
        torch.add(mean, ctx.joint["previous"], alpha=0.9, out=ctx.joint["applied"])
        ctx.joint["previous"] = mean.clone()
        return ctx.joint["applied"]

    def dense(self):
        return self


class Alternating(Residual):
    """The residual waits at even steps."""

    def offer(self, gradient, ctx):
        return gradient + ctx.state["residual"] if ctx.step % 2 else gradient.clone()

    def keep(self, offered, sent, ctx):
        if ctx.step % 2:
            super().keep(offered, sent, ctx)
        else:
            ctx.state["residual"].add_(offered).sub_(sent)


@dataclass(frozen=True)
class Permuted(Compressor):
    """Worker r sends the r-th part of a common permutation, N times as large (Perm-K).

    A single worker sends everything; errors of several cancel in the mean.
    """

    granularity = "model"

    collectives: ClassVar[tuple[str, ...]] = ("allgather",)

    def encode(self, x, ctx):
        common, place = ctx.key._replace(rank=0), torch.empty(len(x), dtype=torch.int64)
        first = int(ops.random.draws24(common._replace(stream=7), 1)[0]) + ctx.rank
        place[ops.random.uniform(common, len(x)).argsort()] = torch.arange(len(x)) + first
        values = (x * ctx.workers).clamp(-LARGEST, LARGEST)
        return torch.where(place % ctx.workers == 0, values, 0.0)

    def decode(self, payload, ctx):
        return check_finite(payload.parts[0]).clone()

    def layout(self, segments, count=1):
        return ((torch.float32, segments.numel),)


class PermutedClaims(Claims, of=Permuted):
    unbiased = True
    correlated = True


@dataclass(frozen=True)
class SharedDither(SharedRange):
    """Subtractive dither of the shared range, which the decoder draws again: 0 is not a level."""

    def _dither(self, ctx, rank: int):
        key = ctx.key._replace(rank=rank, stream=0)
        return ops.random.uniform(key, ctx.segments.numel).double() - 0.5

    def encode(self, x, ctx):
        steps = self.steps(ctx)
        level = torch.where(steps > 0, x.double() / steps, 0.0) + self._dither(ctx, ctx.rank)
        return level.round().clamp(-127, 127).to(torch.int8), torch.tensor([ctx.rank]).int()

    def decode(self, payload, ctx):
        codes, rank = payload.parts
        if not 0 <= int(rank) < 2**24:
            raise PayloadError("a rank below 2^24 expected")
        values = (codes.double() - self._dither(ctx, int(rank))) * self.steps(ctx)
        return values.clamp(-LARGEST, LARGEST).float()

    def layout(self, segments, count=1):
        return ((torch.int8, segments.numel), (torch.int32, 1))


class SharedDitherClaims(Claims, of=SharedDither):
    unbiased = True


class Numbered(Levels):
    """Numbers the encodings of a run: step times workers plus rank."""

    def encode(self, x, ctx):
        key, number = ctx.key, ctx.step * ctx.workers + ctx.rank
        seed = (key.seed + 0x9E3779B97F4A7C15 * number) % 2**64
        return super().encode(x, ctx._replace(key=key._replace(seed=seed, step=0, rank=0)))


class WidePositions(Nonzeros):
    """Positions and length have 64 bits, as torch returns them."""

    def encode(self, x, ctx):
        places, values, length = super().encode(x, ctx)
        return places.long(), values, length.long()

    def decode(self, payload, ctx):
        if [part.dtype for part in payload.parts] != [torch.int64, torch.float32, torch.int64]:
            raise PayloadError("positions, values and a length expected")
        places, values, length = payload.parts
        if not int(places.sum().clamp(0, 1)) >= 0 or bool((places != places.int()).any()):
            raise PayloadError("positions of 31 bits expected")
        if bool((length != length.int()).any()):
            raise PayloadError("a length of 31 bits expected")
        parts = (places.int(), values, length.int())
        return super().decode(payload._replace(parts=parts), ctx)


@dataclass(frozen=True)
class Sampled(Compressor):
    """Sends each element with a probability of 1e-4, times 10,000; often nothing at all."""

    collectives: ClassVar[tuple[str, ...]] = ("allgather",)
    share: ClassVar[float] = 1e-4

    def encode(self, x, ctx):
        places = (ops.random.uniform(ctx.key, len(x)) < self.share).nonzero()[:, 0]
        return places.to(torch.int32), (x[places] / self.share).clamp(-LARGEST, LARGEST)

    def decode(self, payload, ctx):
        length = torch.tensor([ctx.segments.numel], dtype=torch.int32)
        parts = (*payload.parts, length)
        return Nonzeros().decode(payload._replace(parts=parts), ctx)


class SampledClaims(Claims, of=Sampled):
    unbiased = True

    def variance(self, x, ctx):
        return (1 / self.codec.share - 1) * x.double().square()


@dataclass(frozen=True)
class LongBlock(Compressor):
    """Sends a random eighth of the bucket in one piece, which may begin again at its start."""

    granularity = "model"

    collectives: ClassVar[tuple[str, ...]] = ("allgather",)
    factor: ClassVar[bool] = True

    def sent(self, n):
        return -(-n // 8)

    def places(self, start, n):
        return (start + torch.arange(self.sent(n))) % max(1, n)

    def encode(self, x, ctx):
        high, low = ops.random.draws24(ctx.key, 2).tolist()
        start = (high * 2**24 + low) * len(x) >> 48
        return torch.tensor([start], dtype=torch.int32), x[self.places(start, len(x))]

    def decode(self, payload, ctx):
        (start,), values, n = payload.parts[0].tolist(), payload.parts[1], ctx.segments.numel
        if not 0 <= start < max(1, n):
            raise PayloadError("a start within the bucket expected")
        factor = n / max(1, self.sent(n)) if self.factor else 1.0
        scaled = (check_finite(values) * factor).clamp(-LARGEST, LARGEST)
        return torch.zeros(n).index_put_((self.places(start, n),), scaled)

    def layout(self, segments, count=1):
        return ((torch.int32, 1), (torch.float32, self.sent(segments.numel)))


class LongBlockClaims(Claims, of=LongBlock):
    unbiased = True

    def variance(self, x, ctx):
        return (len(x) / max(1, self.codec.sent(len(x))) - 1) * x.double().square()


class UnscaledBlock(LongBlock):
    """The same for error feedback."""

    factor = False

    class claims(Claims):
        contractive = True

        def error_bound(self, x, ctx):
            left = 1 - self.codec.sent(len(x)) / max(1, len(x))
            return left * float(x.double().square().sum())


class ClippedError(Residual):
    """Clips the error of each element, and says that it loses some."""

    @property
    def lossy(self):
        return True

    def keep(self, offered, sent, ctx):
        super().keep(offered, sent, ctx)
        ctx.state["residual"].clamp_(-10, 10)


METHODS = (
    *(Regenerated, Nonzeros, Unsized, SharedRange, Rated, CoarseSteps, Permuted, SharedDither),
    *(Numbered, WidePositions, Sampled, LongBlock, UnscaledBlock),
)
MEMORIES = (
    ClippedError,
    *(Resetting, WarmingMomentum, Normalized, SelfScaled, Differences, Corrected, Alternating),
    *(TwoSteps, TwoMeans),
)
