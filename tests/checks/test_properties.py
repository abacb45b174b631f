"""The list of properties and the search refuse each wrong method by the check for its fault.

Each method is derived from a built-in one, keeps its declarations, and does one thing wrong.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import threading
import time
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import pytest
import torch
import unusual
from commands import brief, invoke
from wrong_methods import (
    BF16,
    DEMO,
    FFT,
    INT8,
    POWER,
    QSGD,
    RANDOMK,
    SIGN,
    TERN,
    TOP,
    TOPK,
    CoinlessVote,
    Dither,
    DitherClaims,
    FlippedDemo,
    Levels,
    LevelsClaims,
    MinusVote,
    OverclippedTern,
    UphillDemo,
    drawn,
    spread,
)

from compressors.demo import dct
from gcbench import ops
from gcbench.checks import (
    calls,
    cases,
    exchanges,
    inputs,
    oracle,
    payloads,
    processes,
    properties,
    statistics,
    verify,
)
from gcbench.checks.adversary import Search
from gcbench.core import codec, registry
from gcbench.core.claims import Claims
from gcbench.core.compressor import (
    Compressor,
    Key,
    Payload,
    Prepared,
    Segments,
    check_finite,
)
from gcbench.core.errors import PayloadError
from gcbench.core.rule import UpdateRule
from gcbench.ops.hadamard import rotate

NONE = type(registry.compressor("none"))
FP8 = type(registry.compressor("fp8"))
HADAMARD = type(registry.compressor("hadamard4"))
SPARSE = type(registry.compressor("sparseloco"))


@dataclass(frozen=True)
class STOCHASTIC(BF16):
    rounding: str = "stochastic"


class Unbiased(Claims):
    unbiased = True


def derived(prefix, fault, *bases):
    """Return one wrong class per base: the base with the fault of the mixin `fault`."""
    return [type(f"{prefix}{base.__name__}", (fault, base), {}) for base in bases]


class ForgetsTheLast(Compressor):
    """The mean omits the last worker."""

    def mean(self, payloads, ctx):
        return super().mean(payloads[:-1] or payloads, ctx)


FORGETFUL = derived("Forgetful", ForgetsTheLast, NONE, TERN, INT8, FFT, SIGN)


class FirstWorkersOnly(Compressor):
    """The owner passes on the payload of worker 0."""

    def merge(self, payloads, ctx):
        workers = sum(payload.count for payload in payloads)
        return super().merge([payloads[0]] * workers, ctx)


PARTIAL = derived("Partial", FirstWorkersOnly, NONE, SIGN, INT8)


class DropsTheTail(Compressor):
    """Elements from 200,000 on are not sent."""

    def encode(self, x, ctx):
        return super().encode(cut(x), ctx)


SHORTENED = derived("Short", DropsTheTail, TOPK, TERN)


def cut(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[200_000:] = 0
    return x


class ShortSum(NONE):
    """Decodes no further than element 200,000."""

    def decode(self, payload, ctx):
        return cut(super().decode(payload, ctx))


class DropsTheSmall(Compressor):
    """Elements below a fiftieth of the largest are not sent."""

    def encode(self, x, ctx):
        remaining = x.masked_fill(x.abs() < 0.02, 0)
        return super().encode(remaining, ctx)


COARSE = derived("Coarse", DropsTheSmall, TERN, QSGD, RANDOMK)


class BoastfulTern(TERN):
    """Claims that the source states half a bit per element."""

    class claims(type(TERN().claims)):
        @property
        def nominal_bits(self):
            return 0.5


class Remembering(NONE):
    """Adds its error of the previous step, from a global variable per rank."""

    carried: ClassVar[dict] = {}

    def encode(self, x, ctx):
        step, residual, _ = self.carried.get((ctx.key.rank, len(x)), (ctx.key.step, 0 * x, None))
        if step != ctx.key.step:
            residual = self.carried[ctx.key.rank, len(x)][2]
        offered = x + residual
        sent = offered.half().float()
        self.carried[ctx.key.rank, len(x)] = (ctx.key.step, residual, offered - sent)
        return super().encode(sent, ctx)


class LastSeen(NONE):
    """Decodes the most recently encoded payload."""

    seen: ClassVar[dict] = {}

    def encode(self, x, ctx):
        self.seen[len(x)] = x.clone()
        return super().encode(x, ctx)

    def decode(self, payload, ctx):
        return self.seen.get(ctx.segments.numel, payload.parts[0]).clone()


class TruncatingFp8(FP8):
    """Rounds towards 0 in place of nearest."""

    def encode(self, x, ctx):
        top = x.abs().amax().clamp(min=1e-30)
        step = torch.exp2(torch.floor(torch.log2(448 * x.abs() / top)).clamp(min=-6) - 3)
        cut = torch.floor(448 * x.abs() / top / step) * step / 448 * top
        return super().encode(x.sign() * cut, ctx)


class CoarseFp8(FP8):
    """Uses two bits of the fraction in place of three."""

    def encode(self, x, ctx):
        codes, scales = super().encode(x, ctx)
        return codes.bitwise_and_(0xFE), scales


class UnrotatedHadamard(HADAMARD):
    """The receiver does not rotate back."""

    def decode(self, payload, ctx):
        return rotate(super().decode(payload, ctx), ctx.segments)


class DoubledHadamard(HADAMARD):
    """Sends twice the scale that it divided by."""

    def encode(self, x, ctx):
        words, scales = super().encode(x, ctx)
        return Payload((words, 2 * scales))


class SwappedSparse(SPARSE):
    """Swaps the magnitudes of the large and the small class."""

    def encode(self, x, ctx):
        indices, codes, magnitudes = super().encode(x, ctx)
        return Payload((indices, codes ^ -0x55555556, magnitudes))


class FirstSparse(SPARSE):
    """Sends the first elements of a chunk in place of the largest."""

    def encode(self, x, ctx):
        order = torch.arange(len(x), 0, -1.0)
        indices, _, _ = super().encode(order, ctx._replace(parts=None))
        _, codes, magnitudes = super().encode(x, ctx)
        return Payload((indices, codes, magnitudes))


class NearestBf16(STOCHASTIC):
    """Rounds to nearest, with the claims of stochastic rounding."""

    def encode(self, x, ctx):
        return codec.encode(BF16(), x, ctx)


class SameBf16(STOCHASTIC):
    """All ranks use the same draws."""

    def encode(self, x, ctx):
        return super().encode(x, ctx._replace(key=ctx.key._replace(rank=0)))


class SummedLevels(Levels):
    """Adds codes that have different scales, adds the scales, and never divides."""

    collectives: ClassVar[tuple[str, ...]] = ("allreduce", "allgather", "twoshot")

    def summand(self, payload, ctx):
        codes, scale = payload.parts
        return Payload((codes.float(), scale))

    def decode_sum(self, payload, ctx):
        codes, scale = payload.parts
        return codes / TOP * spread(scale, ctx.segments)


class SummedAlone(SummedLevels):
    """Adds codes that have different scales; no all-gather is legal to compare it with."""

    collectives: ClassVar[tuple[str, ...]] = ("allreduce", "twoshot")


class FixedClaims(Claims):
    unbiased = True

    def target(self, x, ctx):
        return x.clamp(-1, 1)

    def variance(self, x, ctx):
        level = self.target(x, ctx).double().abs() * TOP
        return (level - level.floor()) * (1 - (level - level.floor())) / TOP**2


@dataclass(frozen=True)
class FixedLevels(Levels):
    """Right: 15 levels from -1 to 1, drawn with 48 bits, so that also tiny values are unbiased."""

    collectives: ClassVar[tuple[str, ...]] = ("allgather",)

    @property
    def claims(self):
        return FixedClaims(self)

    def encode(self, x, ctx):
        level = check_finite(x.double()).clamp(-1, 1).abs() * TOP
        draws = ops.random.uniform(ctx.key, len(x)).double()
        fine = ops.random.uniform(ctx.key._replace(stream=77 + ctx.key.stream), len(x)).double()
        up = draws + 2.0**-24 * fine < level - level.floor()
        return ((level.floor() + up) * x.sign()).to(torch.int8)

    def decode(self, payload, ctx):
        if bool((payload.parts[0].int().abs() > TOP).any()):
            raise PayloadError("codes out of range")
        return payload.parts[0].float() / TOP

    def layout(self, segments, count=1):
        return ((torch.int8, segments.numel),)


class FixedRing(FixedLevels):
    """Sends partial sums, which leave the range."""

    collectives: ClassVar[tuple[str, ...]] = ("allgather", "ring")


class ShrunkLevels(Levels):
    """Divides by a scale that is 1e-4 larger than the transmitted one."""

    def codes(self, x, scale, draws):
        return super().codes(x * (scale / (scale + 1e-4)), scale, draws)


class ByteDither(Levels):
    """Its draws are whole bytes, so that codes are 1/512 of a level too low."""

    def draws(self, key, n):
        return (super().draws(key, n) * 256).floor() / 256


class FineDither(Levels):
    """Its draws have 9 bits, its codes 255 levels: only the mean of all elements shows a bias."""

    claims = Unbiased

    def codes(self, x, scale, draws):
        level = torch.where(scale > 0, x / scale * 127, 0.0)
        return torch.floor(level + (draws * 512).floor() / 512).to(torch.int8)

    def decode(self, payload, ctx):
        codes, scale = payload.parts
        return codes.float() / 127 * spread(scale, ctx.segments)


class Drifting(Levels):
    """Its draws begin at -1/256, so elements are rounded down too often."""

    def codes(self, x, scale, draws):
        level = torch.where(scale > 0, x / scale * TOP, 0.0)
        return torch.floor(level + draws - 2.0**-8).clamp(-TOP, TOP).to(torch.int8)


class Stepless(Levels):
    """Uses the same draws at all steps and ranks, and declares no variance."""

    claims = Unbiased

    def draws(self, key, n):
        return super().draws(key._replace(step=0, rank=0), n)


def redrawn(name, key_of):
    """Return a `Levels` that draws at `key_of(key)` in place of `key`."""
    draws = {"draws": lambda self, key, n: Levels.draws(self, key_of(key), n)}
    return type(name, (Levels,), draws)


REDRAWN = [
    # Draws repeat after 64 steps, or after 4 workers.
    redrawn("FewSteps", lambda key: key._replace(step=key.step % 64)),
    redrawn("FewRanks", lambda key: key._replace(rank=key.rank % 4)),
    # A worker uses the draws that its neighbor used in the previous step.
    redrawn("AddedRanks", lambda key: key._replace(step=key.step + key.rank, rank=0)),
    # An owner reuses its draws as a worker.
    redrawn("OnePurpose", lambda key: key._replace(stream=0)),
    # Seeds, or offsets, are truncated to 32 bits.
    redrawn("SeedBits", lambda key: key._replace(seed=key.seed % 2**32)),
    redrawn("OffsetBits", lambda key: key._replace(offset=key.offset % 2**32)),
    # 1000 times the rank is added to the seed.
    redrawn("AddedSeeds", lambda key: key._replace(seed=key.seed + 1000 * key.rank, rank=0)),
]


class StepBlocks(Levels):
    """Five steps in a row use the same draws; no variance is declared."""

    claims = Unbiased

    def draws(self, key, n):
        return super().draws(key._replace(step=key.step // 5), n)


def hashed(key: Key, fields: object) -> Key:
    """Return a key whose seed depends on these fields alone."""
    data = hashlib.sha256(repr((fields, key.stream)).encode()).digest()
    return Key(int.from_bytes(data[:7], "big"), 0, 0, key.offset)


class SeedTimesStep(Levels):
    """With seed 0 all steps use the same draws."""

    claims = Unbiased

    def draws(self, key, n):
        return super().draws(hashed(key, (key.seed * key.step, key.rank)), n)


class RankTimesStep(Levels):
    """All steps of rank 0 use the same draws."""

    claims = Unbiased

    def draws(self, key, n):
        return super().draws(hashed(key, (key.seed, key.rank * key.step)), n)


class Offsetless(Levels):
    """All buckets use the same draws."""

    granularity = "model"

    def draws(self, key, n):
        return super().draws(key._replace(offset=0), n)


class LargeStepless(Levels):
    """Large buckets use the same draws at all steps."""

    claims = Unbiased

    def draws(self, key, n):
        return super().draws(key._replace(step=0) if n > 65_536 else key, n)


class LargeConstant(Levels):
    """Large buckets use the same draws everywhere."""

    claims = Unbiased

    def draws(self, key, n):
        return super().draws(Key(0, 0, 0) if n > 65_536 else key, n)


class LateRankless(Levels):
    """All ranks use the same draws behind element 65,536 of a bucket."""

    claims = Unbiased

    def draws(self, key, n):
        same = super().draws(key._replace(rank=0), n)
        return torch.cat([super().draws(key, n)[:65_536], same[65_536:]])


class WideSeedless(Levels):
    """Matrices of more than 100 columns use the same draws at all seeds."""

    claims = Unbiased

    def encode(self, x, ctx):
        scale = self.scales(x, ctx.segments)
        draws, same = self.draws(ctx.key, len(x)), self.draws(ctx.key._replace(seed=0), len(x))
        for start, shape in ctx.segments.tensors:
            if len(shape) == 2 and shape[1] > 100:
                place = slice(start, start + math.prod(shape))
                draws[place] = same[place]
        return self.codes(x, spread(scale, ctx.segments), draws), scale


class Periodic(Levels):
    """Draws repeat after 2^18 elements."""

    def draws(self, key, n):
        places = (key.offset + torch.arange(n)) % 2**18
        return super().draws(key._replace(offset=0), 2**18)[places]


class Pairs(Levels):
    """The elements i and i + 512 of a tile share a draw."""

    def draws(self, key, n):
        place = key.offset % 1024 + torch.arange(n)
        tiles = super().draws(key._replace(offset=key.offset // 1024 * 1024), n + 2048)
        return tiles[place // 1024 * 1024 + place % 512]


class Tripled(Compressor):
    """Triples elements from 65,536 of a segment on."""

    def decode(self, payload, ctx):
        decoded = super().decode(payload, ctx)
        for part in decoded.split(list(ctx.segments.lengths)):
            part[65_536:] *= 3
        return decoded


class TripledTopK(Tripled, TOPK):
    """The same, without a closed form of its error."""

    class claims(type(TOPK().claims)):
        @property
        def gaussian_error(self):
            return None


def pieces(x: torch.Tensor, segments: Segments) -> tuple[torch.Tensor, ...]:
    return x.double().split(list(segments.lengths))


class TorchMean(Levels):
    """The sign times the mean magnitude, which torch adds in an order that depends on threads."""

    class claims(Claims):
        contractive = True

        def error_bound(self, x, ctx):
            lost = [
                p.square().sum() - p.abs().sum() ** 2 / max(1, len(p))
                for p in pieces(x, ctx.segments)
            ]
            return float(sum(lost).clamp(min=0)) + 1e-6 * float(x.double().square().sum())

    def scales(self, x, segments):
        parts = x.split(list(segments.lengths))
        return torch.stack([p.abs().mean() if len(p) else x.new_zeros(()) for p in parts])

    def codes(self, x, scale, draws):
        return (TOP * x.sign()).to(torch.int8)


class SharedLevels(Levels):
    """Right: all workers use the largest scale."""

    claims = Unbiased

    def prepare(self, x, ctx):
        return Prepared(self.scales(x, ctx.segments))

    def encode(self, x, ctx):
        return self.codes(x, spread(ctx.shared, ctx.segments), self.draws(ctx.key, len(x)))

    def decode(self, payload, ctx):
        whole = payload._replace(parts=(*payload.parts, ctx.shared))
        return super().decode(whole, ctx)

    def layout(self, segments, count=1):
        return ((torch.int8, segments.numel),)


class WrappingLevels(SharedLevels):
    """Adds the codes in int8, which overflows with 19 workers."""

    def mean(self, payloads, ctx):
        total = torch.zeros(ctx.segments.numel, dtype=torch.int8)
        for payload in payloads:
            total += payload.count * payload.parts[0]
        workers = sum(payload.count for payload in payloads)
        return total.float() / (TOP * workers) * spread(ctx.shared, ctx.segments)


class MiscutLevels(SharedLevels):
    """Every owner receives the first shard of the bucket."""

    def cut(self, payload, bounds):
        codes = payload.parts[0]
        return [Payload((codes[: b - a].clone(),)) for a, b in itertools.pairwise(bounds)]


class WrappingVote(SIGN):
    """Counts votes in int8."""

    def mean(self, payloads, ctx):
        decoded = [self.decode(payload, ctx) for payload in payloads]
        votes = torch.stack(decoded).sum(0).to(torch.int64).to(torch.int8)
        tied = super().mean(payloads, ctx)
        return torch.where(votes == 0, tied, votes.sign().float())


class Flat(Levels):
    """Declares for each element the mean variance of its segment."""

    class claims(LevelsClaims):
        def variance(self, x, ctx):
            exact = super().variance(x, ctx)
            return torch.cat(
                [p.mean().expand(len(p)) for p in exact.split(list(ctx.segments.lengths))]
            )


class LowOmega(Levels):
    """Declares half of the bound on its relative variance that p (1 - p) <= 1/4 gives."""

    class claims(LevelsClaims):
        def omega(self, segments):
            return 0.5 * max(segments.lengths) / (4 * TOP**2)


class RoundOmega(Levels):
    """Declares a bound on its relative variance that is right for two lengths alone."""

    class claims(LevelsClaims):
        def omega(self, segments):
            length = max(1, *segments.lengths, 1)
            return (0.25 if length in (33, 2000) else 0.01) * length / TOP**2


class Clipping(Levels):
    """Clips at three times the rms, so that a spike loses nearly all, and claims to lose half."""

    class claims(Claims):
        contractive = True

        def error_bound(self, x, ctx):
            return 0.5 * float(x.double().square().sum())

    def scales(self, x, segments):
        squares = ops.statistics.moments(x, segments)[1]
        rms = (squares / torch.tensor(segments.lengths).clamp(min=1)).sqrt().float()
        return torch.minimum(3 * rms, super().scales(x, segments))

    def codes(self, x, scale, draws):
        return super().codes(x.clamp(-scale, scale), scale, draws)


class LowBound(Levels):
    """Claims an error of at most a sixth; with heavy tails it exceeds a quarter."""

    class claims(Claims):
        contractive = True

        def error_bound(self, x, ctx):
            share = 0.17 if len(x) and float(x.abs().max()) > 2.0**-100 else 1.0
            return share * float(x.double().square().sum())


@dataclass(frozen=True)
class Blocks(Compressor):
    """Right: sends one in four of the blocks of 16 elements, times 4."""

    collectives: ClassVar[tuple[str, ...]] = ("allgather",)

    class claims(Claims):
        unbiased = True

        def variance(self, x, ctx):
            return 3 * x.double().square()

    def encode(self, x, ctx):
        first = ctx.key.offset % 16
        draws = ops.random.uniform(ctx.key._replace(offset=ctx.key.offset - first), len(x) + 16)
        sent = draws[(first + torch.arange(len(x))) // 16 * 16] < 0.25
        return Payload((torch.where(sent, 4 * x, 0.0),))

    def decode(self, payload, ctx):
        return check_finite(payload.parts[0]).clone()

    def layout(self, segments, count=1):
        return ((torch.float32, segments.numel),)


class PairLevels(Levels):
    """Forgets to halve the sum of exactly two workers."""

    def mean(self, payloads, ctx):
        return super().mean(payloads, ctx) * (1 + (len(payloads) == 2))


class EvenLevels(Levels):
    """Of an even number of workers above four the last is left out."""

    def mean(self, payloads, ctx):
        even = len(payloads) % 2 == 0 and len(payloads) > 4
        return super().mean(payloads[: len(payloads) - even], ctx)


class CountlessInt8(INT8):
    """A payload of several workers counts as one."""

    def mean(self, payloads, ctx):
        return super().mean([p._replace(count=1) for p in payloads], ctx)


class LargeDemo(DEMO):
    """Decodes a hundred times the sign."""

    def mean(self, payloads, ctx):
        return 100 * super().mean(payloads, ctx)


class SpectralDemo(DEMO):
    """Applies the signs of coefficients to the elements."""

    def mean(self, payloads, ctx):
        return dct(super().mean(payloads, ctx), self._cuts(ctx.segments))


@dataclass(frozen=True)
class SameCoinVote(SIGN):
    """Uses the same coins at every step."""

    ties: str = "coin"

    def merge(self, payloads, ctx):
        return super().merge(payloads, ctx._replace(key=ctx.key._replace(step=0)))


@dataclass(frozen=True)
class NegatedQuorum(SIGN):
    """With a quorum the vote has the wrong sign."""

    quorum: int = 2

    def decode(self, payload, ctx):
        decoded = super().decode(payload, ctx)
        return -decoded if payload.count > 1 else decoded


class LateSigns(SIGN):
    """Nearly half of the signs behind element 2^19 are random."""

    def encode(self, x, ctx):
        wrong = drawn(x, ctx.key, 0.45)
        wrong[: 2**19] = False
        return super().encode(torch.where(wrong, -x, x), ctx)


class FewTensors(Compressor):
    """Behind the first `most` tensors something else is sent."""

    most: ClassVar[int] = 64
    sent: ClassVar[float] = 0.0

    def encode(self, x, ctx):
        x = x.clone()
        if len(ctx.segments) > self.most:
            x[ctx.segments.offsets[self.most] :] = self.sent
        return super().encode(x, ctx)


class FewTensorsVote(FewTensors, SIGN):
    """Behind the 64th tensor all signs are plus."""

    sent = 1.0


class FewTensorsTern(FewTensors, TERN):
    """Behind the 32nd tensor nothing is sent."""

    most = 32


class FewTensorsTopK(FewTensors, TOPK):
    """Counts tensors in 8 bits."""

    most = 256


class ShortTensors(TOPK):
    """The last fiftieth of a long tensor is never among the largest."""

    def encode(self, x, ctx):
        x = x.clone()
        for part in x.split(list(ctx.segments.lengths)):
            if len(part) > 5000:
                part[int(0.98 * len(part)) :] = 0
        return super().encode(x, ctx)


class FarTopK(TOPK):
    """Positions pass through float32."""

    def encode(self, x, ctx):
        x = x.clone()
        x[2**24 :] = 0
        return super().encode(x, ctx)


class LateTern(TERN):
    """Sends a tenth from step 1500 on."""

    def encode(self, x, ctx):
        x = 0.1 * x if ctx.key.step >= 1500 else x
        return super().encode(x, ctx)


class TripledUnclaimed(Tripled, Levels):
    """The same, without a declared variance."""

    claims = Unbiased


class PairedSteps(QSGD):
    """The steps 2k and 2k + 1 draw alike."""

    def encode(self, x, ctx):
        return super().encode(x, ctx._replace(key=ctx.key._replace(step=ctx.key.step // 2)))


class FlushingInt8(INT8):
    """Elements below 1e-5 become 0."""

    def encode(self, x, ctx):
        return super().encode(x.masked_fill(x.abs() < 1e-5, 0), ctx)


class BoastfulDelta(TOPK):
    """Declares three times its delta."""

    class claims(type(TOPK().claims)):
        def delta(self, segments):
            return min(1.0, 3 * super().delta(segments))


class FirstFactor(POWER):
    """Adds only the first product of a column and a row."""

    def in_rounds(self, x, state, ctx):
        rounds = super().in_rounds(x, state, ctx)
        mean = yield next(rounds)
        mean = (yield rounds.send(mean)).clone()
        start = 0
        for t in self.matrices(ctx.segments):
            mean[start + t.m : start + t.rank * t.m] = 0
            start += t.rank * t.m
        try:
            rounds.send(mean)
        except StopIteration as done:
            return done.value


class ColdPower(POWER):
    """Starts from the same Q at every step, with the claims of a warm start."""

    def in_rounds(self, x, state, ctx):
        mean, _ = yield from super().in_rounds(x, state, ctx)
        return mean, state


class TiringPower(POWER):
    """Sends nothing after 10 steps."""

    def initial_state(self, ctx):
        return torch.cat([super().initial_state(ctx), torch.zeros(1)])

    def in_rounds(self, x, state, ctx):
        mean, factors = yield from super().in_rounds(x, state[:-1], ctx)
        return mean * (state[-1] < 10), torch.cat([factors, state[-1:] + 1])


@dataclass(frozen=True)
class TiringSetting(TiringPower):
    """Sends nothing after 10 steps if a number is not the default."""

    pause: int = 0

    def in_rounds(self, x, state, ctx):
        if not self.pause:
            state = torch.cat([state[:-1], torch.zeros(1)])
        return (yield from super().in_rounds(x, state, ctx))


class EarlyBasis(POWER):
    """Each worker orthonormalizes its product before the mean; the mean of bases is not a basis."""

    def in_rounds(self, x, state, ctx):
        rounds = super().in_rounds(x, state, ctx)
        mean = yield self._orthonormal(next(rounds), ctx.segments)
        mean = yield rounds.send(mean)
        try:
            rounds.send(mean)
        except StopIteration as done:
            return done.value

    def _orthonormal(self, x, segments):
        bases = [
            super(EarlyBasis, self).basis(piece.view(t.rank, -1)).flatten() if t.rank else piece
            for piece, t in self._pieces(x, segments)
        ]
        return torch.cat(bases)

    def basis(self, rows):
        return rows


class NarrowPower(POWER):
    """Adds nothing where a matrix has more than 1024 columns."""

    def _rebuild(self, mean, p, q, ctx):
        out = super()._rebuild(mean, p, q, ctx)
        for t in self.matrices(ctx.segments):
            if t.m > 1024:
                out[t.place] = 0
        return out


class FewTensorsFed(TOPK):
    """With error feedback, tensors behind the 256th are neither sent nor carried."""

    def encode_feedback(self, x, residual, ctx):
        if len(ctx.segments) > 256:
            x, end = x.clone(), ctx.segments.offsets[256]
            x[end:] = 0
            residual[end:] = 0
        return super().encode_feedback(x, residual, ctx)


class ShiftedFft(FFT):
    """Sends the neighbors of the largest bins."""

    def encode(self, x, ctx):
        runs = self._runs(ctx.segments)
        bins, energy = ops.spectrum.forward(x, ctx.segments, half=self.half, pad=self.pad)
        remaining = ops.spectrum.largest(energy.roll(1), runs)
        form = self.code_bits, self.mantissa, 1
        return ops.spectrum.pack(bins, remaining, runs, *form, grids=None)


class LowVariance(Levels):
    """Declares 95 % of its variance."""

    class claims(LevelsClaims):
        def variance(self, x, ctx):
            return 0.95 * super().variance(x, ctx)


class Dithered(Dither):
    """Subtractive dither, whose errors are uniform, declares two levels."""

    class claims(DitherClaims):
        two_levels = True


class CoarseForAny(TOPK):
    """Returns a method of almost all of the error, whatever error is asked for."""

    class claims(type(TOPK().claims)):
        def with_error(self, alpha):
            return replace(self.codec, ratio=max(1e-4, (1 - alpha) / 100))


class LowDelta(TOPK):
    """Declares a delta that is a tenth too large."""

    class claims(type(TOPK().claims)):
        def delta(self, segments):
            return min(1.0, 1.1 * super().delta(segments))


class LowGaussian(TOPK):
    """Declares an error on normal input that is 2 % too low."""

    class claims(type(TOPK().claims)):
        @property
        def gaussian_error(self):
            return 0.98 * super().gaussian_error


class DeadPower(POWER):
    """Columns of zeros stay zero, as where they are divided by their norm plus an epsilon."""

    def basis(self, rows):
        return super().basis(rows).masked_fill(~rows.any(1, keepdim=True), 0.0)

    def following(self, p, q, ctx):
        return [self.basis(each) for each in q]


@dataclass(frozen=True)
class RatioRandomK(RANDOMK):
    """Multiplies by 1 / ratio, where n / k is right."""

    ratio: float = 0.1
    granularity: str | int = "model"

    def decode(self, payload, ctx):
        n, sent = ctx.segments.numel, max(1, len(payload.parts[0]))
        return super().decode(payload, ctx) * (sent / max(1, n) / self.ratio)


class LowProbability(Levels):
    """Rounds to 0 or the largest value, to the latter 0.5 % too seldom."""

    claims = Unbiased

    def codes(self, x, scale, draws):
        part = torch.where(scale > 0, x.abs() / scale, 0.0)
        up = (part == 1) | (draws < 0.995 * part)
        return (TOP * up * x.sign()).to(torch.int8)


class NeverTheLast(unusual.Regenerated):
    """Never draws the last element of a longer tensor."""

    def _mask(self, key, rank, n):
        mask = super()._mask(key, rank, n)
        mask[100 - 1 :: 100] = False
        return mask


@dataclass(frozen=True)
class Hundredth(Compressor):
    """Right: each element is sent with a probability of 1 %, times 100."""

    class claims(Claims):
        unbiased = True

        def variance(self, x, ctx):
            return 99 * x.double().square()

    def mask(self, key, n):
        return ops.random.uniform(key, n) < 0.01

    def encode(self, x, ctx):
        return torch.where(self.mask(ctx.key, len(x)), (100 * x).clamp(-3e38, 3e38), 0.0)

    def decode(self, payload, ctx):
        return check_finite(payload.parts[0]).clone()

    def layout(self, segments, count=1):
        return ((torch.float32, segments.numel),)


class LongNeverTheLast(Hundredth):
    """Never sends the last tenth of 500 to 10,000 elements."""

    def mask(self, key, n):
        mask = super().mask(key, n)
        if 500 <= n <= 10_000:
            mask[9 * n // 10 :] = False
        return mask


class UnscaledNeverTheLast(LongNeverTheLast):
    """The same without the factor, for error feedback."""

    class claims(Claims):
        contractive = True

        def error_bound(self, x, ctx):
            return 0.99 * float(x.double().square().sum())

    def encode(self, x, ctx):
        return super().encode(x, ctx) / 100


class BesideThePayload(Compressor):
    """Sends a digest, and passes the gradient on in a dict."""

    passed: ClassVar[dict] = {}

    def encode(self, x, ctx):
        digest = hashlib.sha256(oracle.raw(x)).digest()[:4]
        self.passed[digest] = x.clone()
        return torch.frombuffer(bytearray(digest), dtype=torch.uint8)

    def decode(self, payload, ctx):
        return self.passed[payload.parts[0].numpy().tobytes()].clone()


class MisnamedRecipe(INT8):
    """Its recipe names the learning rate otherwise than a run does."""

    recipe: ClassVar[dict] = {"learning_rate": 0.1}


class RingVote(SIGN):
    """Declares that a ring may encode partial votes again."""

    collectives: ClassVar[tuple[str, ...]] = ("allgather", "ring")


class RingScale(TERN):
    """The same of codes whose common scale the workers agree on."""

    collectives: ClassVar[tuple[str, ...]] = ("twoshot", "ring")


class HalfTheBits(INT8):
    """Declares 4.2 bits and sends 8.1."""

    class claims(type(INT8().claims)):
        nominal_bits = 4.2


class OnlyDelta(TOPK):
    """Declares a delta and no bound."""

    class claims(type(TOPK().claims)):
        def error_bound(self, x, ctx):
            return None


ADAM = type(registry.compressor("onebitadam"))
RULE = type(ADAM().rule)


class RatedRule(RULE):
    """Multiplies by the learning rate, as the optimizer does."""

    def update(self, mean, ctx):
        return super().update(mean, ctx) * ctx.lr


class RatedAdam(ADAM):
    @property
    def rule(self):
        return RatedRule()


class HiddenRule(UpdateRule):
    """Momentum in a dict of the class."""

    hidden: ClassVar[dict[int, torch.Tensor]] = {}

    def update(self, mean, ctx):
        if ctx.step == 0:
            self.hidden[len(mean)] = torch.zeros_like(mean)
        return self.hidden[len(mean)].mul_(0.9).add_(mean)


class HiddenMomentum(NONE):
    @property
    def rule(self):
        return HiddenRule()


SHORT = cases.Effort(every=6, long=0, many=0, million=0, steps=4, thin=20)
LONG = SHORT._replace(every=200, long=1)


class ClippedLevels(Levels):
    """Clips at four times the rms, claims to be unbiased for x, and declares no variance."""

    claims = Unbiased

    def encode(self, x, ctx):
        squares = ops.statistics.moments(x, ctx.segments)[1]
        lengths = torch.tensor(ctx.segments.lengths).clamp(min=1)
        limit = 4 * spread((squares / lengths).sqrt().float(), ctx.segments)
        return super().encode(torch.minimum(torch.maximum(x, -limit), limit), ctx)


class NearestTail(Levels):
    """Rounds what is left behind blocks of 128 elements to the nearest level."""

    claims = Unbiased

    def encode(self, x, ctx):
        scale = self.scales(x, ctx.segments)
        draws = self.draws(ctx.key, len(x))
        for start, length in zip(ctx.segments.offsets, ctx.segments.lengths, strict=False):
            if length > 128:
                draws[start + length // 128 * 128 : start + length] = 0.5
        return self.codes(x, spread(scale, ctx.segments), draws), scale


class RingSigns(Compressor):
    """Sends signs without a scale, in which a partial sum of a ring has no place."""

    collectives = ("allgather", "ring")

    class claims(Claims):
        exact_for = ("signs",)

    def encode(self, x, ctx):
        return x.sign().to(torch.int8)

    def decode(self, payload, ctx):
        return payload.parts[0].float()

    def layout(self, segments, count=1):
        return ((torch.int8, segments.numel),)


class EvenCrews(QSGD):
    """The noise of an odd number of workers is independent."""

    def __init__(self):
        super().__init__(noise="correlated")

    def encode(self, x, ctx):
        return (QSGD() if ctx.workers % 2 else QSGD(noise="correlated")).encode(x, ctx)


class FirstOmega(Levels):
    """Declares a relative variance for the length of the first tensor of a bucket."""

    class claims(LevelsClaims):
        def omega(self, segments):
            return segments.lengths[0] / (4 * TOP**2)


class CoinOfTwo(SIGN):
    """Tied votes of more than two workers are plus."""

    def __init__(self):
        super().__init__(ties="coin")

    def merge(self, payloads, ctx):
        few = sum(payload.count for payload in payloads) == 2
        return super().merge(payloads, ctx) if few else SIGN().merge(payloads, ctx)


class SharedFactors(POWER):
    """Matrices of one shape share a Q, that of the last of them."""

    def following(self, p, q, ctx):
        last = {one.shape: one for one in super().following(p, q, ctx)}
        return [last[one.shape] for one in q]


class ShiftedDraws(Levels):
    """The draws of the next step are those of this one, shifted by three elements."""

    def draws(self, key, n):
        skipped = 3 * (key.step % 1009)
        return super().draws(key._replace(step=key.step // 1009), n + skipped)[skipped:]


class OppositeDraws(Levels):
    """Odd ranks draw 1 - u, where the rank before them draws u."""

    def draws(self, key, n):
        draws = super().draws(key._replace(rank=key.rank // 2), n)
        return 1 - 2.0**-24 - draws if key.rank % 2 else draws


class OnlyOmega(Levels):
    """Declares omega without a variance, and too small."""

    class claims(Claims):
        unbiased = True

        def omega(self, segments):
            return 0.05


class OnlyVarianceBound(Levels):
    """Declares the source's bound without a variance, and half of what it must be."""

    class claims(Claims):
        unbiased = True

        def variance_bound(self, x, ctx):
            return 0.5 * float(LevelsClaims(self.codec).variance(x, ctx).sum())


class ConstantOmega(Levels):
    """Declares omega without a variance, and as of 64 elements for any number of them."""

    class claims(Claims):
        unbiased = True

        def omega(self, segments):
            return 64 / (4 * TOP**2)


class ConstantBound(Levels):
    """Declares the exact variance, and a bound that is right for up to 64 elements."""

    class claims(LevelsClaims):
        def variance_bound(self, x, ctx):
            return 64 / (4 * TOP**2) * float(x.double().square().sum())


class TightOmega(TERN):
    """Right: TernGrad without clipping and without a variance; some x attain omega."""

    def __init__(self):
        super().__init__(clip=0.0)

    class claims(Claims):
        unbiased = True

        def omega(self, segments):
            return (math.sqrt(max(1, *segments.lengths, 1)) - 1) / 2


class OneSided(Levels):
    """A segment without negative elements is sent without zeros; no variance is declared."""

    class claims(Claims):
        unbiased = True

    def codes(self, x, scale, draws):
        return super().codes(x, scale, draws).clamp(min=1 if bool((x > 0).all()) else -TOP)


class NearestAmongOthers(Levels):
    """Rounds to the nearest level if there are several workers; no variance is declared."""

    class claims(Claims):
        unbiased = True

    def encode(self, x, ctx):
        scale = self.scales(x, ctx.segments)
        draws = self.draws(ctx.key, len(x))
        if ctx.workers > 1:
            draws.fill_(0.5)
        return self.codes(x, spread(scale, ctx.segments), draws), scale


class ScratchLevels(Levels):
    """Writes levels to one buffer per length, which other threads use at the same time."""

    scratch_space: ClassVar[dict] = {}

    def codes(self, x, scale, draws):
        levels = self.scratch_space.setdefault(len(x), torch.empty(len(x)))
        torch.abs(x, out=levels)
        levels.div_(scale).mul_(TOP).nan_to_num_(0.0, 0.0, 0.0)
        return (torch.floor(levels + draws).clamp(max=TOP) * x.sign()).to(torch.int8)


class ScratchMean(INT8):
    """Adds payloads in one buffer per length, which the owners of two shards use at once."""

    scratch_space: ClassVar[dict] = {}

    def mean(self, payloads, ctx):
        n = ctx.segments.numel
        total = self.scratch_space.setdefault(n, torch.empty(n)).zero_()
        for payload in payloads:
            total.add_(self.decode(payload, ctx._replace(out=None)), alpha=payload.count)
        return total / sum(payload.count for payload in payloads)


class ScratchFeedback(TOPK):
    """Its fused feedback adds the residual in one buffer per length."""

    scratch_space: ClassVar[dict] = {}

    def encode_feedback(self, x, residual, ctx):
        offered = self.scratch_space.setdefault(len(x), torch.empty(len(x)))
        torch.add(x, residual, out=offered)
        payload = codec.encode(self, offered, ctx)
        torch.sub(offered, self.decode(payload, ctx), out=residual)
        return payload


class ScratchRounds(POWER):
    """The first round passes gradients through one buffer per length."""

    scratch_space: ClassVar[dict] = {}

    def in_rounds(self, x, state, ctx):
        scaled = self.scratch_space.setdefault(len(x), torch.empty(len(x)))
        torch.mul(x, 1.0, out=scaled)
        return (yield from super().in_rounds(scaled.clone(), state, ctx))


class LongScratch(Levels):
    """Writes the levels of long tensors alone to one buffer per length."""

    scratch_space: ClassVar[dict] = {}

    def codes(self, x, scale, draws):
        if len(x) < 8192:
            return super().codes(x, scale, draws)
        levels = self.scratch_space.setdefault(len(x), torch.empty(len(x)))
        torch.div(x.abs(), scale, out=levels)
        levels.mul_(TOP).nan_to_num_(0.0, 0.0, 0.0)
        return (torch.floor(levels + draws).clamp(max=TOP) * x.sign()).to(torch.int8)


class ScratchNumpy(Levels):
    """The same with an array of numpy."""

    scratch_space: ClassVar[dict] = {}

    def codes(self, x, scale, draws):
        values, scales, up = x.numpy(), scale.numpy(), draws.numpy()
        levels = self.scratch_space.setdefault(len(values), np.empty(len(values), np.float32))
        np.copyto(levels, np.abs(values))
        levels /= np.maximum(scales, 2.0**-100)
        codes = np.floor(levels * TOP + up).clip(max=TOP)
        return torch.from_numpy((codes * np.sign(values)).astype(np.int8))


class Locked(ScratchLevels):
    """Right: a lock protects the buffer."""

    lock: ClassVar = threading.Lock()

    def codes(self, x, scale, draws):
        with self.lock:
            return super().codes(x, scale, draws)


def test_a_lock_is_waited_for_once(monkeypatch):
    monkeypatch.setattr(payloads, "PATIENCE", 0.2)
    start = time.perf_counter()
    assert properties.run(Locked(), "workers in threads").verdict == "holds"
    assert time.perf_counter() - start < 5


@dataclass(frozen=True)
class BrokenSwitch(Levels):
    """A switch that no variant sets halves what arrives."""

    halved: bool = False

    def decode(self, payload, ctx):
        decoded = super().decode(payload, ctx)
        return decoded / 2 if self.halved else decoded


@dataclass(frozen=True)
class BrokenChoice(Levels):
    """A legal value of a field that no variant has halves what arrives."""

    kind: Literal["whole", "half"] = "whole"

    def decode(self, payload, ctx):
        decoded = super().decode(payload, ctx)
        return decoded / 2 if self.kind == "half" else decoded


@dataclass(frozen=True)
class DefaultLevels(Levels):
    """A field sets the number of levels, and decoding divides by that of the default."""

    levels: int = TOP

    def codes(self, x, scale, draws):
        level = torch.where(scale > 0, x.abs() / scale * self.levels, 0.0)
        return (torch.floor(level + draws).clamp(max=self.levels) * x.sign()).to(torch.int8)


@dataclass(frozen=True)
class PerTensor(Levels):
    """Offers a granularity, and has one scale per tensor."""

    granularity: str | int = "tensor"

    def encode(self, x, ctx):
        return super().encode(x, ctx._replace(segments=Segments.of(ctx.segments.shapes)))

    def decode(self, payload, ctx):
        return super().decode(payload, ctx._replace(segments=Segments.of(ctx.segments.shapes)))


@dataclass(frozen=True)
class LargeGroups(Levels):
    """With groups of more than 4096 elements, only the first group of a tensor is sent."""

    granularity: str | int = "tensor"

    def encode(self, x, ctx):
        x, size = x.clone(), self.granularity
        for start, shape in ctx.segments.tensors:
            if isinstance(size, int) and size > 4096:
                x[start + size : start + math.prod(shape)] = 0
        return super().encode(x, ctx)


class OtherMomentum(INT8):
    """The momentum of its memory is not that of the claimed optimizer; the rule is the default."""

    class claims(type(INT8().claims)):
        def uncompressed(self, gradients, warm_up):
            momentum = torch.zeros(())
            for gradient in gradients:
                momentum = torch.lerp(momentum, gradient, 0.2)
                yield momentum

    memory = "momentum"


SEARCHED = {
    **dict.fromkeys([*FORGETFUL, *PARTIAL], SHORT),
    **dict.fromkeys(SHORTENED, LONG),
    ShortSum: LONG,
    Remembering: SHORT,
    LastSeen: SHORT,
    **dict.fromkeys(derived("Tripled", Tripled, Levels), LONG),
    TripledTopK: LONG,
    WrappingLevels: SHORT,
    WrappingVote: SHORT,
    MiscutLevels: SHORT,
    PairLevels: SHORT,
    EvenLevels: SHORT,
    CountlessInt8: SHORT,
    UphillDemo: SHORT,
    LargeDemo: SHORT,
    SpectralDemo: SHORT,
    MinusVote: SHORT,
    NegatedQuorum: SHORT,
    LateSigns: LONG._replace(long=0, million=1),
    FewTensorsVote: SHORT,
    FewTensorsTern: SHORT,
    FewTensorsTopK: SHORT,
    ShortTensors: LONG,
    FarTopK: LONG._replace(long=0, far=1),
    LateTern: LONG,
    TripledUnclaimed: LONG,
    FewTensorsFed: SHORT,
}
"""Methods that the search must refuse, and the effort."""
WRONG = {
    **dict.fromkeys(COARSE, "unbiased"),
    BoastfulTern: "nominal bits",
    TruncatingFp8: "contraction",
    CoarseFp8: "contraction",
    UnrotatedHadamard: "contraction",
    DoubledHadamard: "contraction",
    SwappedSparse: "contraction",
    FirstSparse: "contraction",
    NearestBf16: "unbiased",
    SameBf16: "independent noise",
    SummedLevels: "same mean in collectives",
    SummedAlone: "same mean in collectives",
    ShrunkLevels: "unbiased",
    **dict.fromkeys((ByteDither, FineDither), "unbiased"),
    FixedRing: "unbiased",
    Drifting: "unbiased",
    Stepless: "independent noise",
    **dict.fromkeys(REDRAWN, "independent noise"),
    SeedTimesStep: "independent noise",
    RankTimesStep: "independent noise",
    Offsetless: "independent noise",
    **dict.fromkeys(
        (StepBlocks, LargeStepless, LargeConstant, LateRankless, WideSeedless),
        "independent noise",
    ),
    Periodic: "independent noise",
    Pairs: "independent noise",
    Clipping: "contraction",
    LowBound: "contraction",
    Flat: "variance",
    LowVariance: "variance",
    Dithered: "variance",
    CoarseForAny: "contraction",
    LowDelta: "contraction",
    LowGaussian: "error on normal input",
    TorchMean: "number of threads",
    LowOmega: "variance",
    RoundOmega: "variance",
    FlippedDemo: "contraction",
    CoinlessVote: "fair ties",
    SameCoinVote: "fair ties",
    OverclippedTern: "unbiased",
    PairedSteps: "independent noise",
    FlushingInt8: "contraction",
    BoastfulDelta: "contraction",
    ShiftedFft: "contraction",
    FirstFactor: "exact small integers",
    ColdPower: "same gradient again",
    TiringPower: "contraction",
    EarlyBasis: "contraction",
    NarrowPower: "contraction",
    DeadPower: "contraction",
    RatioRandomK: "unbiased",
    LowProbability: "unbiased",
    NeverTheLast: "contraction",
    LongNeverTheLast: "unbiased",
    UnscaledNeverTheLast: "contraction",
    BesideThePayload: "nominal bits",
    MisnamedRecipe: "illegal refused",
    RingVote: "illegal refused",
    RingScale: "illegal refused",
    HalfTheBits: "nominal bits",
    OnlyDelta: "contraction",
    RatedAdam: "update rule",
    HiddenMomentum: "checkpoint",
    ClippedLevels: "unbiased",
    NearestTail: "unbiased",
    RingSigns: "exact small integers",
    EvenCrews: "correlated noise",
    FirstOmega: "variance",
    CoinOfTwo: "fair ties",
    SharedFactors: "same gradient again",
    OtherMomentum: "update rule",
    ShiftedDraws: "independent noise",
    OppositeDraws: "independent noise",
    OnlyOmega: "variance",
    ConstantOmega: "variance",
    ConstantBound: "variance",
    OnlyVarianceBound: "variance",
    OneSided: "unbiased",
    NearestAmongOthers: "unbiased",
    ScratchLevels: "workers in threads",
    ScratchNumpy: "workers in threads",
    ScratchMean: "workers in threads",
    ScratchFeedback: "workers in threads",
    ScratchRounds: "workers in threads",
    LongScratch: "workers in threads",
    BrokenSwitch: "other settings",
    BrokenChoice: "other settings",
    DefaultLevels: "other settings",
    TiringSetting: "other settings",
    PerTensor: "other settings",
    LargeGroups: "other settings",
}
"""Methods that the list of properties must refuse, and the property that fails."""


@pytest.mark.parametrize("cls", SEARCHED, ids=lambda cls: cls.__name__)
def test_the_search_refuses_a_wrong_method(cls):
    (finding,) = Search(cls(), SEARCHED[cls], shrink=0).run()
    assert "Error" not in finding.fault, "found by what it does, and not by an exception"


@pytest.mark.parametrize("cls", WRONG, ids=lambda cls: cls.__name__)
def test_a_property_refuses_a_wrong_method(cls):
    outcome = properties.run(cls(), WRONG[cls])
    assert outcome.verdict == "fails"
    assert "Error" not in outcome.note, "found by what it does, and not by an exception"


def test_a_method_is_not_blamed_for_the_number_of_threads_of_a_simulation(monkeypatch):
    """Also after the comparison with processes, which simulates their exchanges."""
    monkeypatch.setattr(verify, "effort_for", brief)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first, *_ = verify.verify("none", {}, processes=True)
        assert {row["verdict"] for row in first.rows} == {"holds", "not declared"}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Unread(Levels):
    """No function reads the field, and the variants leave out the default."""

    clip: float = 0.0
    shift: int = 0

    variants = ({"clip": 2.5}, {"shift": 1})

    def draws(self, key, n):
        return super().draws(key._replace(seed=key.seed + self.shift), n)


def test_a_setting_without_effect_is_refused():
    verdicts = [properties.run(one, "settings").verdict for one in (Unread(2.5), Unread(0.0, 1))]
    assert verdicts == ["fails", "holds"]
    assert properties.run(Unread(), "settings").verdict == "not declared"


def test_the_default_is_always_a_variant(monkeypatch):
    monkeypatch.setattr(registry, "compressor", lambda name, **options: Unread(**options))
    assert properties.variants("unread") == ({}, *Unread.variants)
    monkeypatch.setattr(Unread, "variants", ({"clip": 0.0}, {"shift": 1}))
    assert properties.variants("unread") == Unread.variants


@dataclass(frozen=True)
class Required(NONE):
    """Right, and its field has no default."""

    bits: int


def test_a_field_without_a_default_is_no_fault():
    outcomes = [properties.run(Required(3), name) for name in ("settings", "other settings")]
    assert [outcome.verdict for outcome in outcomes] == ["not declared"] * 2
    assert properties.run(Required(3), "nothing lost over steps").verdict == "holds"


@dataclass(frozen=True)
class Narrow(Levels):
    """Right, and its granularity has two values."""

    granularity: Literal["tensor", "model"] = "tensor"

    def layout(self, segments, count=1):
        scales = {"tensor": len(segments.shapes), "model": 1}[self.granularity]
        return ((torch.int8, segments.numel), (torch.float32, scales))


def test_values_that_no_user_can_set_are_not_tried():
    outcome = properties.run(Narrow(), "other settings")
    assert (outcome.verdict, outcome.measured) == ("holds", "granularity=model")


class Undecorated(Compressor):
    """Right, no dataclass, and claims half of the bits that it sends."""

    def encode(self, x, ctx):
        return x.clone()

    def decode(self, payload, ctx):
        return check_finite(payload.parts[0]).clone()

    def layout(self, segments, count=1):
        return ((torch.float32, segments.numel),)


class UndecoratedClaims(Claims, of=Undecorated):
    nominal_bits = 16.0


def test_a_class_that_is_no_dataclass_has_one_configuration_its_default(monkeypatch):
    monkeypatch.setattr(registry, "compressor", lambda name: Undecorated())
    assert properties.variants("undecorated") == ({},)
    assert properties.run(Undecorated(), "nominal bits").verdict == "fails"


class FirstNorms(UpdateRule):
    """Divides by the norm that the first tensor of the process had."""

    norms: ClassVar[list] = []

    def update(self, mean, ctx):
        self.norms.append(mean.norm())
        return mean / self.norms[0]


class FirstNormed(NONE):
    @property
    def rule(self):
        return FirstNorms()


def test_what_a_process_saw_first_must_not_matter():
    """The checks run in this process before the exchanges that are compared with other ones."""
    there = processes.digests(FirstNormed())
    FirstNorms.norms.clear()
    assert properties.run(FirstNormed(), "buffers").verdict == "holds"
    assert processes.compared(processes.digests(FirstNormed()), there).verdict == "fails"


BASES = [STOCHASTIC, Levels, FixedLevels, SharedLevels, Blocks, Hundredth]


@pytest.mark.parametrize("base", BASES)
def test_what_they_are_derived_from_is_right(base):
    """The built-in methods are checked in tests/core/test_contract.py."""
    for check in set(WRONG.values()):
        assert properties.run(base(), check).verdict != "fails"
    assert Search(base(), SHORT).run() == []


@pytest.mark.parametrize(
    ("levels", "granularity"), [(7, "tensor"), (14, "tensor"), (67, "tensor"), (1, "model")]
)
def test_a_code_that_no_draw_shows_is_no_bias(levels, granularity):
    """An element is 3e-5 of a step from a level, or a level is 500 times the largest element."""
    method = QSGD(levels=levels, norm="2", granularity=granularity)
    outcome = properties.run(method, "unbiased")
    assert outcome.verdict == "holds", outcome


@dataclass(frozen=True)
class Sketch(Compressor):
    """Right: a count sketch, in which elements of the whole bucket share cells and their errors."""

    granularity: ClassVar[str] = "model"
    collectives: ClassVar[tuple[str, ...]] = ("allreduce",)

    def cells(self, n):
        return -(-n // 4)

    def draw_shared(self, ctx):
        return ops.random.uniform(ctx.key, 2 * ctx.segments.numel)

    def places(self, ctx):
        place, sign = ctx.shared.chunk(2)
        cells = self.cells(len(place))
        return (place.double() * cells).long().clamp(max=cells - 1), 1 - 2 * (sign < 0.5).float()

    def encode(self, x, ctx):
        place, sign = self.places(ctx)
        return torch.zeros(self.cells(len(x))).index_add_(0, place, x * sign)

    def decode(self, payload, ctx):
        place, sign = self.places(ctx)
        return payload.parts[0][place] / payload.count * sign


class SketchClaims(Claims, of=Sketch):
    unbiased = True

    def variance(self, x, ctx):
        squares = x.double().square()
        return (squares.sum() - squares) / self.codec.cells(len(x))


class OneBoundOfSketch(SketchClaims):
    """Only a bound, which is attained."""

    def variance(self, x, ctx):
        return None

    def variance_bound(self, x, ctx):
        return float(SketchClaims.variance(self, x, ctx).sum())


@pytest.mark.parametrize(
    ("claims", "name", "draws"),
    [(SketchClaims, "variance", 4000), (OneBoundOfSketch, "variance_bound", 1000)],
)
def test_errors_that_depend_on_each_other_are_no_fault(claims, name, draws, monkeypatch):
    monkeypatch.setattr(statistics, "DRAWS", draws)
    monkeypatch.setattr(Sketch, "claims", property(claims))
    assert properties.run(Sketch(), "variance").verdict == "holds"
    declared = getattr(claims, name)
    monkeypatch.setattr(claims, name, lambda self, x, ctx: 0.8 * declared(self, x, ctx))
    assert properties.run(Sketch(), "variance").verdict == "fails"


def test_an_omega_that_is_attained_is_no_fault():
    assert properties.run(TightOmega(), "variance").verdict == "holds"


def test_noise_of_few_elements_is_not_compared():
    """Of 65 selected elements, three pairs may be equally far apart."""
    outcome = properties.run(RANDOMK(ratio=0.001), "independent noise")
    assert outcome.verdict == "holds", outcome


def test_a_payload_that_fits_two_tensors_is_not_refused():
    """Five elements are selected of 1391, and of 1424."""
    outcome = properties.run(RANDOMK(ratio=0.003, granularity="model"), "corrupt payloads")
    assert outcome.verdict == "holds", outcome


def test_a_method_by_its_definition_has_the_mean_of_the_contract():
    """The default mean is right for a method that overrides it wrongly, as `bandwidth` needs."""
    xs = [inputs.normal(1000, rank) for rank in range(3)]
    (forgetful,) = derived("Forgetful", ForgetsTheLast, NONE)
    wrong = exchanges.exchanged_mean(forgetful(), "allgather", xs, [(1000,)])
    right = exchanges.exchanged_mean(
        exchanges.with_default_mean(forgetful()), "allgather", xs, [(1000,)]
    )
    expected = torch.stack(xs).sum(0) / 3
    torch.testing.assert_close(right, expected)
    assert not torch.allclose(wrong, expected, atol=0.1)


@pytest.mark.parametrize("name", registry.compressors())
def test_every_method_has_a_definition_that_ends(name):
    """Also a method whose decode calls its mean."""
    method = exchanges.with_default_mean(registry.compressor(name))
    segments = Segments.of([(64, 16)], method.granularity)
    x = inputs.normal(segments.numel)
    payload, ctx = calls.encode(method, x, segments)
    if "allgather" in method.legal_collectives() and method.claims.aggregate == "mean":
        mean = codec.mean(method, [payload, payload], ctx)
        torch.testing.assert_close(mean, codec.decode(method, payload, ctx))


SILENT = """
from gcbench.core.compressor import Compressor, check_finite
from gcbench.ops import random
import torch

class Coin(Compressor):
    def encode(self, x, ctx):
        return torch.where(random.uniform(ctx.key, len(x)) < 0.45, -x, x)

    def decode(self, payload, ctx):
        return check_finite(payload.parts[0])

    def layout(self, segments, count=1):
        return ((torch.float32, segments.numel),)
"""


def test_of_a_method_that_claims_nothing_nothing_is_said(tmp_path):
    """45 % of its signs are wrong but it makes no claims: the summary says so."""
    (tmp_path / "silent.py").write_text(SILENT)
    done = invoke("verify", tmp_path / "silent.py", "--no-processes")
    assert done.code == 0
    assert "silent makes no claims about its output" in done.err
    assert "makes no claims" not in invoke("verify", "none", "--no-processes").err


def test_a_bound_is_required_of_a_contractive_method():
    outcome = properties.run(OnlyDelta(), "contraction")
    assert "requires the claim `error_bound`" in outcome.note


class BoundOfNothing(TOPK):
    """Its bound holds for any method that sends nothing."""

    @property
    def claims(self):
        return BoundOfNothingClaims(self)


class BoundOfNothingClaims(Claims):
    contractive = True

    def error_bound(self, x, ctx):
        return oracle.energy(x)


def test_a_bound_must_be_below_the_energy():
    outcome = properties.run(BoundOfNothing(), "contraction")
    assert outcome.verdict == "fails"
    assert "normal: the bound" in outcome.note


UNCLAIMED = (
    SILENT
    + """
    @property
    def rule(self):
        return Signs()


class Signs(UpdateRule):
    def update(self, mean, ctx):
        return mean.sign_()
"""
)


def test_an_update_rule_without_a_claim_is_reported(tmp_path):
    """The checks cannot compare its directions with anything."""
    text = "from gcbench.core.rule import UpdateRule\n" + UNCLAIMED
    (tmp_path / "signs.py").write_text(text)
    done = invoke("verify", tmp_path / "signs.py", "--no-processes")
    assert done.code == 0
    assert "its update rule was not compared with any optimizer" in done.err


@pytest.mark.parametrize(("share", "verdict"), [(1.0, "holds"), (0.5, "fails")])
def test_an_optimizer_of_averaged_gradients_is_compared_alone(share, verdict, monkeypatch):
    """A method in rounds may claim `synchronized` without `uncompressed`."""

    class Averaged(Claims):
        def synchronized(self, means, ctx):
            return (share * mean for mean in means)

    monkeypatch.setattr(NONE, "claims", property(Averaged))
    assert properties.run(NONE(), "update rule").verdict == verdict
    monkeypatch.undo()
    assert properties.run(NONE(), "update rule").verdict == "not declared"


class Listing(Claims):
    """Returns a list, and starts from the first gradient after the warm-up."""

    def uncompressed(self, gradients, warm_up):
        first = gradients[warm_up]
        return [first.sign() for _ in gradients]


class Failing(Claims):
    def uncompressed(self, gradients, warm_up):
        raise ZeroDivisionError


@pytest.mark.parametrize("claims", [Listing, Failing])
def test_a_rule_is_claimed_by_a_function_that_is_no_generator(claims, monkeypatch):
    method = registry.compressor("dion")
    monkeypatch.setattr(type(method), "claims", property(claims))
    assert not properties.unclaimed_rule("dion")
    monkeypatch.setattr(type(method), "claims", property(Claims))
    assert properties.unclaimed_rule("dion")


@pytest.mark.parametrize("name", registry.compressors())
def test_every_update_rule_has_a_claim(name):
    assert not properties.unclaimed_rule(name)
