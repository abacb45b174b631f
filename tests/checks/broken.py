"""Methods that are wrong on some inputs only, by kind of input.

Each derives from a right method, inherits its claims, and does one thing wrong. `Levels` of
wrong_methods.py is right.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import torch
from unusual import Nonzeros, SharedRange
from wrong_methods import (
    INT8,
    ONEBIT,
    QSGD,
    SIGN,
    TERN,
    TOP,
    TOPK,
    Levels,
    LevelsClaims,
    spread,
)

from gcbench import ops
from gcbench.checks import inputs
from gcbench.core import registry
from gcbench.core.claims import Claims
from gcbench.core.compressor import TILE, Compressor, Payload, Prepared, check_finite
from gcbench.core.errors import PayloadError

NONE = type(registry.compressor("none"))
FFT = type(registry.compressor("fft"))
POWER = type(registry.compressor("powersgd"))
RANDOMK = type(registry.compressor("randomk"))
SPARSE = type(registry.compressor("sparseloco"))


# ---- several workers, long tensors ---------------------------------------------------------------


class LongMean(TOPK):
    """The mean is that of worker 0 behind element 65,536."""

    def mean(self, payloads, ctx):
        result = super().mean(payloads, ctx)
        result[65_536:] = self.decode(payloads[0], ctx._replace(out=None))[65_536:]
        return result


class VeryLongMean(INT8):
    """The mean forgets the last worker behind element 2^20."""

    def mean(self, payloads, ctx):
        result = super().mean(payloads, ctx)
        if ctx.segments.numel > 2**20 and len(payloads) > 2:
            fewer = super().mean(payloads[:-1], ctx._replace(out=None))
            result[2**20 :] = fewer[2**20 :]
        return result


class FarHalf(INT8):
    """Half arrives behind element 2^22."""

    def decode(self, payload, ctx):
        result = super().decode(payload, ctx)
        result[2**22 :] *= 0.5
        return result


class LongMerge(SIGN):
    """The vote is that of worker 0 behind element 65,536."""

    def merge(self, payloads, ctx):
        merged = super().merge(payloads, ctx)
        merged[65_536 // 32 :] = payloads[0].parts[0][65_536 // 32 :]
        return merged


class LongSum(NONE):
    """The sum is not divided behind element 65,536."""

    def decode_sum(self, payload, ctx):
        result = self.decode(payload, ctx).clone()
        result[65_536:] *= payload.count
        return result


class LongFeedback(TOPK):
    """The residual is cleared behind element 65,536."""

    def encode_feedback(self, x, residual, ctx):
        payload = super().encode_feedback(x, residual, ctx)
        residual[65_536:] = 0
        return payload


class LongOut(QSGD):
    """decode(out=) writes no further than element 65,536."""

    def decode(self, payload, ctx):
        result = super().decode(payload, ctx._replace(out=None))
        ctx.out[:65_536] = result[:65_536]
        return ctx.out


class SixteenWorkers(TERN):
    """The mean includes 16 workers at most."""

    def mean(self, payloads, ctx):
        return super().mean(payloads[:16], ctx)


class ManyShards(TERN):
    """The 33rd shard is cut from the wrong place."""

    def cut(self, payload, bounds):
        pieces = super().cut(payload, bounds)
        if len(pieces) > 32 and pieces[0].parts[0].numel():
            pieces[0] = Payload((pieces[0].parts[0].flip(0),))
        return pieces


class LateShard(SIGN):
    """A shard that begins behind 64 tiles has the codes of the first."""

    def cut(self, payload, bounds):
        pieces = super().cut(payload, bounds)
        for i, (start, piece) in enumerate(zip(bounds, pieces, strict=False)):
            if start >= 64 * TILE and piece.parts[0].shape == pieces[0].parts[0].shape:
                pieces[i] = pieces[0]
        return pieces


class CountedDecode(Nonzeros):
    """Divides a payload of several workers by their number, as if it were their sum."""

    def decode(self, payload, ctx):
        return super().decode(payload, ctx).div_(payload.count)

    def mean(self, payloads, ctx):
        decoded = [self.decode(p._replace(count=1), ctx) * p.count for p in payloads]
        return torch.stack(decoded).sum(0) / sum(p.count for p in payloads)


# ---- workers of different scale ------------------------------------------------------------------


class FirstScale(Levels):
    """The mean decodes all workers by the scale of worker 0."""

    def mean(self, payloads, ctx):
        scale = payloads[0].parts[1]
        return super().mean([p._replace(parts=(p.parts[0], scale)) for p in payloads], ctx)


class OwnLimit(TERN):
    """Rounds by its own largest magnitude, and is decoded by the common one."""

    def encode(self, x, ctx):
        limit, local = self._scales(x, ctx.segments)
        scale = local if self.share else ctx.shared
        if not self.share:
            return super().encode(x, ctx)
        return ops.ternary.encode(x, limit, scale, ctx.segments, ctx.key)


class SmallWorkers(INT8):
    """A worker a thousand times smaller than the first does not count."""

    def mean(self, payloads, ctx):
        top = [float(p.parts[1].abs().amax()) if p.parts[1].numel() else 0.0 for p in payloads]
        mine = [self.decode(p, ctx).clone() for p in payloads]
        for i, size in enumerate(top):
            if size < top[0] / 1000:
                mine[i].zero_()
        return torch.stack(mine).mean(0)


# ---- buffers that were used ----------------------------------------------------------------------


class DirtyZeros(INT8):
    """decode leaves `out` as it is if all codes are zero."""

    def decode(self, payload, ctx):
        if not bool(payload.parts[1].any()):
            return ctx.out
        return super().decode(payload, ctx)


class DirtyMean(TOPK):
    """The mean leaves `out` unchanged where no worker sent anything."""

    def mean(self, payloads, ctx):
        result = super().mean(payloads, ctx._replace(out=None))
        ctx.out[result != 0] = result[result != 0]
        return ctx.out


class DirtySum(NONE):
    """The sum is added to what was in `out` if it is zero."""

    def decode_sum(self, payload, ctx):
        result = self.decode(payload, ctx._replace(out=None))
        return result if bool(result.any()) else ctx.out


class DirtyPayload(Levels):
    """encode leaves the codes of `out` where a segment is zero."""

    def encode(self, x, ctx):
        codes, scale = super().encode(x, ctx._replace(parts=None))
        live = spread(scale, ctx.segments) > 0
        ctx.parts[0][live] = codes[live]
        return ctx.parts[0], scale


# ---- scales --------------------------------------------------------------------------------------


class Eps(Compressor):
    """Adds a small number to the scale that it divides by."""

    eps: ClassVar[float] = 1e-12

    def encode(self, x, ctx):
        small = ops.statistics.absmax(x, ctx.segments) < self.eps
        zero = small.repeat_interleave(torch.tensor(ctx.segments.lengths, dtype=torch.int64))
        return super().encode(x.masked_fill(zero, 0), ctx)


class EpsQsgd(Eps, QSGD):
    """Segments below 1e-12 are sent as zeros."""


class EpsTopK(Eps, TOPK):
    """Segments below 2^-60 are sent as zeros."""

    eps: ClassVar[float] = 2.0**-60
    encode_feedback = Compressor.encode_feedback


class EpsOneBit(Eps, ONEBIT):
    """Segments below 2^-90 are sent as zeros."""

    eps: ClassVar[float] = 2.0**-90
    encode_feedback = Compressor.encode_feedback


class LastOctaves(INT8):
    """Overflows where 127 times the largest element does."""

    def encode(self, x, ctx):
        largest = ops.statistics.absmax(x, ctx.segments)
        beyond = spread(largest, ctx.segments) * 127 == math.inf
        return super().encode(torch.where(beyond, 0.5 * x, x), ctx)


class HugeInt8(INT8):
    """Clips at 2^64."""

    def encode(self, x, ctx):
        return super().encode(x.clamp(-(2.0**64), 2.0**64), ctx)


# ---- segments ------------------------------------------------------------------------------------


class LastOfOne(QSGD):
    """A last group of one element behind whole ones is sent as zero."""

    def encode(self, x, ctx):
        x = x.clone()
        for start, shape in ctx.segments.tensors:
            n = math.prod(shape)
            if n > 512 and n % 512 == 1:
                x[start + n - 1] = 0
        return super().encode(x, ctx)


class ShortIndex(Levels):
    """Segments are numbered in 16 bits with a sign."""

    def decode(self, payload, ctx):
        codes, scale = payload.parts
        if len(scale) > 32_767:
            scale = torch.cat([scale[:32_767], scale[: len(scale) - 32_767]])
        return super().decode(payload._replace(parts=(codes, scale)), ctx)


class SixteenBits(Levels):
    """Segments behind the first 65,536 have one scale."""

    def scales(self, x, segments):
        scales = super().scales(x, segments)
        scales[2**16 :] = scales[2**16 :].amax() if len(scales) > 2**16 else 0.0
        return scales


class LoneConvolution(Levels):
    """A bucket of one convolution has a scale that is too large."""

    def scales(self, x, segments):
        alone = [len(shape) for shape in segments.shapes] == [4]
        return super().scales(x, segments) * (1.5 if alone else 1.0)


class OtherKernels(Levels):
    """Takes convolutions to be of 3x3: of others the last row of weights is lost."""

    def encode(self, x, ctx):
        x = x.clone()
        for start, shape in ctx.segments.tensors:
            if len(shape) == 4 and shape[2:] != (3, 3):
                stop = start + math.prod(shape)
                x[stop - shape[3] : stop] = 0
        return super().encode(x, ctx)


class ThreeAxes(INT8):
    """Of tensors of three axes only the first slice is sent."""

    def encode(self, x, ctx):
        x = x.clone()
        for start, shape in ctx.segments.tensors:
            if len(shape) == 3:
                x[start + math.prod(shape[1:]) : start + math.prod(shape)] = 0
        return super().encode(x, ctx)


class MinusZero(Levels):
    """Sends -0.0 as the level below."""

    def codes(self, x, scale, draws):
        codes = super().codes(x, scale, draws)
        return codes - ((x == 0) & x.signbit() & (scale > 0)).to(codes.dtype)


class OneNorm(Levels):
    """With more than 32,768 segments all have the largest scale of them."""

    def scales(self, x, segments):
        scales = super().scales(x, segments)
        return scales.amax().expand(len(scales)).clone() if len(scales) > 32_768 else scales


# ---- steps, ranks --------------------------------------------------------------------------------


class Flushing(Levels):
    """Nothing is sent at every 500th step."""

    period: ClassVar[int] = 500
    phase: ClassVar[int] = 499

    def encode(self, x, ctx):
        x = x * (ctx.key.step % self.period != self.phase)
        return super().encode(x, ctx)


class Flushing1327(Flushing):
    """Nothing is sent at every 1,327th step."""

    period, phase = 1327, 1000


class Flushing20000(Flushing):
    """Nothing is sent at every 20,000th step."""

    period, phase = 20_000, 0


class LateSteps(TOPK):
    """Behind step 70,000 a tenth is sent."""

    def encode(self, x, ctx):
        return super().encode(x * (0.1 if ctx.key.step > 70_000 else 1.0), ctx)


class PeriodicMerge(INT8):
    """At every 1000th step the owner passes on the payload of worker 0."""

    def merge(self, payloads, ctx):
        if ctx.key.step % 1000 == 0:
            payloads = [payloads[0]._replace(count=sum(p.count for p in payloads))]
        return super().merge(payloads, ctx)


class PeriodicFeedback(TOPK):
    """The residual is dropped at every 100th step."""

    def encode_feedback(self, x, residual, ctx):
        if ctx.key.step % 100 == 99:
            residual.zero_()
        return super().encode_feedback(x, residual, ctx)


class HighRanks(SIGN):
    """Ranks from 1000 on send the opposite."""

    def encode(self, x, ctx):
        return super().encode(-x if ctx.key.rank >= 1000 else x, ctx)


# ---- residuals -----------------------------------------------------------------------------------


class ClippedResidual(TOPK):
    """Residuals are clipped at 1000."""

    def encode_feedback(self, x, residual, ctx):
        payload = super().encode_feedback(x, residual, ctx)
        residual.clamp_(-1000, 1000)
        return payload


class ZeroGradient(ONEBIT):
    """Nothing is sent for a gradient of zeros, and the residual waits."""

    def encode_feedback(self, x, residual, ctx):
        if not bool(x.any()):
            return self.encode(x, ctx)
        return super().encode_feedback(x, residual, ctx)


# ---- values that are not finite ------------------------------------------------------------------


class NanScales(Levels):
    """A NaN in the gradient comes out as NaN."""

    def decode(self, payload, ctx):
        codes, scale = payload.parts
        bad = ~scale.isfinite()
        repaired = payload._replace(parts=(codes, torch.where(bad, 1.0, scale)))
        result = super().decode(repaired, ctx)
        return result.masked_fill(spread(bad, ctx.segments), math.nan)


class NanMean(QSGD):
    """An infinite norm is decoded as it is, in a mean."""

    def mean(self, payloads, ctx):
        if all(bool(p.parts[1].isfinite().all()) for p in payloads):
            return super().mean(payloads, ctx)
        return torch.full((ctx.segments.numel,), math.inf)


# ---- caches --------------------------------------------------------------------------------------


class PlanByLength(Levels):
    """Which element belongs to which segment is cached by the length alone."""

    plans: ClassVar[dict] = {}
    collectives: ClassVar[tuple[str, ...]] = ("allgather",)

    def plan(self, segments):
        return segments.numel

    def encode(self, x, ctx):
        scale = self.scales(x, ctx.segments)
        index = torch.arange(len(ctx.segments))
        at = self.plans.setdefault(self.plan(ctx.segments), spread(index, ctx.segments))
        each = (
            scale[at.clamp(max=max(0, len(scale) - 1))]
            if len(scale)
            else spread(scale, ctx.segments)
        )
        return self.codes(x, each, self.draws(ctx.key, len(x))), scale


class PlanByNumber(PlanByLength):
    """The same, by the length and the number of segments."""

    plans: ClassVar[dict] = {}

    def plan(self, segments):
        return segments.numel, len(segments)


class PlanByPlace(PlanByLength):
    """The same, by where Python stores the segments."""

    plans: ClassVar[dict] = {}

    def plan(self, segments):
        return id(segments), segments.numel


class DrawsByStep(Levels):
    """All ranks use the first rank's draws of a step."""

    seen: ClassVar[dict] = {}

    def draws(self, key, n):
        return self.seen.setdefault((key.step, n), super().draws(key, n))


class LastSegments(TOPK):
    """decode takes the segments of the last encode."""

    last: ClassVar[list] = []

    def encode(self, x, ctx):
        self.last[:] = [ctx.segments]
        return super().encode(x, ctx)

    def decode(self, payload, ctx):
        same = self.last and self.last[0].numel == ctx.segments.numel
        result = super().decode(payload, ctx)
        return result.flip(0) if same and self.last[0].offsets != ctx.segments.offsets else result

    encode_feedback = Compressor.encode_feedback


# ---- positions -----------------------------------------------------------------------------------


class LostPlace(SPARSE):
    """Element 300 of a tensor is never sent."""

    def encode(self, x, ctx):
        x = x.clone()
        for start, shape in ctx.segments.tensors:
            if math.prod(shape) > 300:
                x[start + 300] = 0
        return super().encode(x, ctx)


# ---- a method in rounds --------------------------------------------------------------------------


class DirtyRounds(POWER):
    """Tensors that are not matrices are added to the output buffer."""

    def in_rounds(self, x, state, ctx):
        before = torch.zeros(len(x)) if ctx.out is None else ctx.out.clone()
        out, final = yield from super().in_rounds(x, state, ctx)
        for t in self.tensors(ctx.segments):
            if not t.rank:
                out[t.place] += before[t.place]
        return out, final


# ---- views, guards, and several conditions at once -----------------------------------------------


class ReadsStorage(TOPK):
    """Reads the storage of x from its beginning, where buckets are views."""

    def encode(self, x, ctx):
        whole = torch.empty(0).set_(x.untyped_storage())
        return super().encode(whole[: len(x)].contiguous(), ctx)

    encode_feedback = Compressor.encode_feedback


class WritesBeyond(INT8):
    """Clears the element behind the output buffer."""

    def decode(self, payload, ctx):
        result = super().decode(payload, ctx)
        whole = torch.empty(0).set_(result.untyped_storage())
        whole[result.storage_offset() + len(result) :][:1] = 0
        return result


class PlanByEnds(PlanByLength):
    """Cached by the length, the number of segments, and the first and last boundary."""

    plans: ClassVar[dict] = {}

    def plan(self, segments):
        return segments.numel, len(segments), segments.offsets[1], segments.offsets[-2]


class HalfMean(QSGD):
    """Three workers and more are added in half precision."""

    def mean(self, payloads, ctx):
        if len(payloads) < 3:
            return super().mean(payloads, ctx)
        parts = [self.decode(p, ctx._replace(out=None)).half() for p in payloads]
        return torch.stack(parts).sum(0).float() / len(payloads)


class WaitingSegments(TOPK):
    """Of segments whose gradient is zero the residual waits."""

    def encode_feedback(self, x, residual, ctx):
        parts = x.split(list(ctx.segments.lengths))
        idle = torch.cat([torch.full((len(p),), not bool(p.any())) for p in parts])
        waiting = residual.masked_fill(~idle, 0)
        residual.masked_fill_(idle, 0)
        payload = super().encode_feedback(x, residual, ctx)
        residual.add_(waiting)
        return payload


class LongPlan(PlanByLength):
    """The same, in buckets of more than 4,096 elements."""

    plans: ClassVar[dict] = {}

    def plan(self, segments):
        return segments.numel if segments.numel > 4096 else segments.offsets


class EveryCall(INT8):
    """Every 97th call sends zeros."""

    count: ClassVar[list] = [0]

    def encode(self, x, ctx):
        self.count[0] += 1
        return super().encode(0 * x if self.count[0] % 97 == 0 else x, ctx)


class CoarseResidual(TOPK):
    """A residual above 1000 is stored in bfloat16."""

    def encode_feedback(self, x, residual, ctx):
        payload = super().encode_feedback(x, residual, ctx)
        residual.copy_(torch.where(residual.abs() > 1000, residual.bfloat16().float(), residual))
        return payload


class OtherRanks(TOPK):
    """From rank 1 on, nothing is sent behind element 65,536."""

    def encode(self, x, ctx):
        if ctx.key.rank and len(x) > 65_536:
            x = x.clone()
            x[65_536:] = 0
        return super().encode(x, ctx)


class CrowdedMerge(INT8):
    """With more than eight workers and 4096 elements the last worker does not count."""

    def merge(self, payloads, ctx):
        if len(payloads) > 8 and ctx.segments.numel > 4096:
            payloads = [*payloads[:-2], payloads[-2]._replace(count=2)]
        return super().merge(payloads, ctx)


class InfiniteSum(NONE):
    """An infinite sum is passed on."""

    def decode_sum(self, payload, ctx):
        return payload.parts[0] / payload.count


# ---- the context of an exchange ------------------------------------------------------------------


class DecodedSteps(TERN):
    """Every 250th step decodes to zeros, by the step of the decoder's key."""

    def decode(self, payload, ctx):
        result = super().decode(payload, ctx)
        return result.zero_() if ctx.step % 250 == 249 else result


class MeanOffset(QSGD):
    """The mean of a bucket behind offset 2^31 is negated."""

    def mean(self, payloads, ctx):
        result = super().mean(payloads, ctx)
        return result.neg_() if ctx.key.offset >= 2**31 else result


class ReceiverRank(TOPK):
    """Decodes with the rank in the key, which is the receiver's."""

    def decode(self, payload, ctx):
        return super().decode(payload, ctx).mul_(1 + ctx.rank % 2)

    encode_feedback = Compressor.encode_feedback


class SlowRate(INT8):
    """Encodes zeros where the learning rate is below 1e-4."""

    def encode(self, x, ctx):
        return super().encode(x * (ctx.lr >= 1e-4), ctx)


class RatedSum(NONE):
    """The sum is multiplied by the learning rate where that is above 10."""

    def decode_sum(self, payload, ctx):
        return super().decode_sum(payload, ctx).mul_(ctx.lr if ctx.lr > 10 else 1.0)


class WorldEncode(ONEBIT):
    """With more than eight workers each encodes half of its gradient."""

    def encode(self, x, ctx):
        return super().encode(x * (0.5 if ctx.workers > 8 else 1.0), ctx)

    encode_feedback = Compressor.encode_feedback


class WorldDecode(TOPK):
    """A payload of one worker among more than four is divided by their number."""

    def decode(self, payload, ctx):
        result = super().decode(payload, ctx)
        return result.div_(ctx.workers) if ctx.workers > 4 else result


class ChangesShared(TERN):
    """Raises tiny scales in the tensor that all functions share."""

    def mean(self, payloads, ctx):
        result = super().mean(payloads, ctx)
        ctx.shared.clamp_(min=1e-30)
        return result


class SeedsNumpy(Levels):
    """Seeds numpy's global generator, and restores torch's."""

    def encode(self, x, ctx):
        np.random.seed(ctx.key.step % 2**32)
        return super().encode(x, ctx)


class FlushesDenormals(Levels):
    """Sets the processor to flush denormal numbers, and leaves it so."""

    def encode(self, x, ctx):
        torch.set_flush_denormal(True)
        return super().encode(x, ctx)


# ---- long inputs, and a second condition ---------------------------------------------------------


def crowded(payloads, ctx, segments=0):
    """Whether there are more than 4 workers, and more elements or segments than 65,536."""
    return len(payloads) > 4 and max(ctx.segments.numel, segments * len(ctx.segments)) > 65_536


class CrowdedMean(INT8):
    """The mean of more than 4 workers forgets the last one behind element 65,536."""

    def mean(self, payloads, ctx):
        result = super().mean(payloads, ctx)
        if crowded(payloads, ctx):
            fewer = super().mean(payloads[:-1], ctx._replace(out=None))
            result[65_536:] = fewer[65_536:]
        return result


class CrowdedSegments(INT8):
    """The mean of more than 4 workers and 32,768 segments forgets the last worker."""

    def mean(self, payloads, ctx):
        forget = crowded(payloads, ctx, segments=2) and len(ctx.segments) > 32_768
        return super().mean(payloads[:-1] if forget else payloads, ctx)


class CrowdedVote(SIGN):
    """The vote of more than 4 workers is that of worker 0 behind element 65,536."""

    def merge(self, payloads, ctx):
        merged = super().merge(payloads, ctx)
        if crowded(payloads, ctx):
            merged[65_536 // 32 :] = payloads[0].parts[0][65_536 // 32 :]
        return merged


class CrowdedSum(NONE):
    """The sum is divided by 4 at most behind element 65,536."""

    def decode_sum(self, payload, ctx):
        result = super().decode_sum(payload, ctx).clone()
        result[65_536:] *= max(1.0, payload.count / 4)
        return result


class CrowdedShards(TERN):
    """The last of 5 to 63 shards of a long tensor has its codes in reverse."""

    def cut(self, payload, bounds):
        pieces = super().cut(payload, bounds)
        if 5 <= len(pieces) < 64 and bounds[-1] > 65_536:
            pieces[-1] = Payload((pieces[-1].parts[0].flip(0),))
        return pieces


class FifteenPayloads(QSGD):
    """The mean of more than 15 workers begins again with the first."""

    def mean(self, payloads, ctx):
        return super().mean([payloads[i % 15] for i in range(len(payloads))], ctx)


class LongLastOfOne(INT8):
    """A last group of one element, in a long tensor, is sent as zero."""

    def decode(self, payload, ctx):
        result = super().decode(payload, ctx)
        if ctx.segments.numel > 65_536 and ctx.segments.numel % 256 == 1:
            result[-1] = 0
        return result


class LongZeroGradient(TOPK):
    """In a long tensor the residual waits where the gradient is zero."""

    def encode_feedback(self, x, residual, ctx):
        if len(x) > 65_536 and not x.any():
            return self.encode(x, ctx)
        return super().encode_feedback(x, residual, ctx)


class LongNan(ONEBIT):
    """A long tensor with a NaN arrives as NaN."""

    def decode(self, payload, ctx):
        result = super().decode(payload._replace(parts=self.cleared(payload.parts)), ctx)
        lost = len(result) > 4096 and any(p.isnan().any() for p in payload.parts[1:])
        return result.fill_(math.nan) if lost else result

    @staticmethod
    def cleared(parts):
        return [part.nan_to_num() if part.is_floating_point() else part for part in parts]


class LongPeriod(TOPK):
    """In a long tensor nothing is sent at every 97th step."""

    def encode(self, x, ctx):
        skip = len(x) > 4096 and ctx.key.step % 97 == 50
        return super().encode(torch.zeros_like(x) if skip else x, ctx)


# ---- functions at some steps ---------------------------------------------------------------------


class PeriodicDecode(INT8):
    """Decodes to zeros at every 331st step, also for a mean."""

    collectives: ClassVar[tuple[str, ...]] = ("allgather",)
    mean = Compressor.mean

    def decode(self, payload, ctx):
        result = super().decode(payload, ctx)
        return result.zero_() if ctx.key.step % 331 == 200 else result


class PeriodicMean(QSGD):
    """The mean is the sum at every 97th step."""

    collectives: ClassVar[tuple[str, ...]] = ("allgather",)

    def mean(self, payloads, ctx):
        result = super().mean(payloads, ctx)
        return result.mul_(len(payloads)) if ctx.key.step % 97 == 50 else result


class PeriodicSum(NONE):
    """The sum is not divided at every 97th step."""

    def decode_sum(self, payload, ctx):
        result = super().decode_sum(payload, ctx).clone()
        return result * payload.count if ctx.key.step % 97 == 50 else result


class PeriodicResidual(TOPK):
    """The residual is cleared after every 331st step."""

    def encode_feedback(self, x, residual, ctx):
        parts = super().encode_feedback(x, residual, ctx)
        if ctx.key.step % 331 == 200:
            residual.zero_()
        return parts


class PeriodicRounds(POWER):
    """The mean is doubled at every 331st step."""

    def in_rounds(self, x, state, ctx):
        mean, final = yield from super().in_rounds(x, state, ctx)
        return (mean * 2 if ctx.key.step % 331 == 200 else mean), final


class NarrowRounds(POWER):
    """Nothing is applied where a matrix has more than 1024 columns, though it is decoded."""

    def in_rounds(self, x, state, ctx):
        mean, final = yield from super().in_rounds(x, state, ctx)
        for t in self.matrices(ctx.segments):
            if t.m > 1024:
                mean[t.place] = 0
        return mean, final


class HalvedRounds(POWER):
    """Halves matrices of more than 1024 columns, also when decoded; only exactness is claimed."""

    variants: ClassVar[tuple[dict, ...]] = ({},)

    def _rebuild(self, mean, p, q, ctx):
        out = super()._rebuild(mean, p, q, ctx)
        for t in self.matrices(ctx.segments):
            if t.m > 1024:
                out[t.place] /= 2
        return out


class HalvedRoundsClaims(Claims[HalvedRounds], of=HalvedRounds):
    """Small matrices of rank 1 are exact."""

    portable = False
    exact_for = ("rank 1",)


class CyclicDraws(RANDOMK):
    """The positions repeat every 100 steps."""

    def draw_shared(self, ctx):
        return super().draw_shared(ctx._replace(key=ctx.key._replace(step=ctx.key.step % 100)))


# ---- functions and claims that are easily forgotten ----------------------------------------------


class LateEntries(TOPK):
    """The elements for a sparse all-reduce are zero behind element 65,536."""

    def entries(self, x, ctx):
        positions, values = super().entries(x, ctx)
        return positions, values.masked_fill(positions >= 65_536, 0.0)


class NanFeedback(TOPK):
    """With feedback NaN is sent as zero, and stays in the residual."""

    def encode_feedback(self, x, residual, ctx):
        residual += x
        if not residual.isnan().any():
            return super().encode_feedback(torch.zeros_like(x), residual, ctx)
        return self.encode(residual.nan_to_num(), ctx)


class GenerousDelta(INT8):
    """Claims the mean error of a step, where the largest is meant."""

    class claims(type(INT8().claims)):  # the form of the contract
        def delta(self, segments):
            longest = max(segments.lengths, default=0)
            return super().delta(segments) if longest < 64 else 1 - longest / (10 * 127**2)


# ---- results that later calls change, and rounds -------------------------------------------------


def reused(buffers: dict[int, torch.Tensor], result: torch.Tensor) -> torch.Tensor:
    """Return the result in the buffer of its length."""
    return buffers.setdefault(len(result), torch.empty_like(result)).copy_(result)


class ReusedDecode(INT8):
    """Decodes to a buffer that the next call of `decode` overwrites."""

    buffers: ClassVar[dict[int, torch.Tensor]] = {}

    def decode(self, payload, ctx):
        return reused(self.buffers, super().decode(payload, ctx))


class ReusedMean(QSGD):
    """Returns the mean in a buffer that the next call of `mean` overwrites."""

    buffers: ClassVar[dict[int, torch.Tensor]] = {}

    def mean(self, payloads, ctx):
        return reused(self.buffers, super().mean(payloads, ctx))


class CachedZeros(INT8):
    """Returns the same tensor of zeros each time, though callers may modify it."""

    zeros: ClassVar[dict[int, torch.Tensor]] = {}

    def decode(self, payload, ctx):
        result = super().decode(payload, ctx._replace(out=None))
        return result if result.any() else self.zeros.setdefault(len(result), result)


class ReusedPrepare(TERN):
    """What `prepare` cached for the encoder is overwritten for the next worker."""

    buffers: ClassVar[dict[int, torch.Tensor]] = {}

    def prepare(self, x, ctx):
        shared, (limit, scale) = super().prepare(x, ctx)
        return Prepared(shared, (reused(self.buffers, limit), scale))


class LocalRounds(POWER):
    """The result or the next state depends on the last summand of this worker."""

    result: ClassVar[bool] = False

    def in_rounds(self, x, state, ctx):
        rounds = super().in_rounds(x, state, ctx)
        mean = yield next(rounds)
        summand = rounds.send(mean)
        mean = yield summand
        try:
            rounds.send(mean)
        except StopIteration as end:
            approximation, final = end.value
        if self.result:
            return approximation * (1 - 1e-3 * (summand[:1] < 0).any()), final
        return approximation, torch.where(summand < 0, -final, final)


class LocalResult(LocalRounds):
    """The result depends on this worker's summand."""

    result = True


class LentState(POWER):
    """The next state is the last mean, whose buffer belongs to the engine."""

    variants: ClassVar[tuple[dict, ...]] = ({},)

    def in_rounds(self, x, state, ctx):
        rounds = super().in_rounds(x, state, ctx)
        mean = yield next(rounds)
        mean = yield rounds.send(mean)
        try:
            rounds.send(mean)
        except StopIteration as end:
            approximation, final = end.value
        return approximation, mean.copy_(final)


class OnesForZeros(POWER):
    """After a gradient of zeros, a column of zeros becomes ones, which are not a unit vector."""

    def basis(self, rows):
        return torch.where(rows.any(1, keepdim=True), super().basis(rows), 1.0)

    def following(self, p, q, ctx):
        following = super().following(p, q, ctx)
        return [
            each.masked_fill(~old.any(1, keepdim=True), 0.0)
            for each, old in zip(following, q, strict=True)
        ]


# ---- what the engine relies on ------------------------------------------------------------------


class NarrowPositions(Nonzeros):
    """Positions have 16 bits where all of them fit: the dtype depends on the gradient."""

    claims = Claims

    def encode(self, x, ctx):
        places, *others = super().encode(x, ctx)
        fits = not len(places) or int(places[-1]) < 2**15
        return (places.to(torch.int16) if fits else places), *others

    def decode(self, payload, ctx):
        if not payload.parts or payload.parts[0].dtype != torch.int16:
            return super().decode(payload, ctx)
        places, *others = payload.parts
        return super().decode(Payload((places.to(torch.int32), *others)), ctx)


class TwoRows(Levels):
    """The statistic has the largest values, then the smallest, instead of one row per segment."""

    def prepare(self, x, ctx):
        sides = [ops.statistics.absmax(side, ctx.segments) for side in (x.relu(), (-x).relu())]
        return Prepared(torch.cat(sides))


class SilencesErrors(Levels):
    """Silences numpy's warnings of the whole process."""

    def encode(self, x, ctx):
        np.seterr(all="ignore")
        return super().encode(x, ctx)


# ---- gradients that a call changes, and what never arrives ---------------------------------------


class FlushingPrepare(Levels):
    """Sets small elements of the gradient to zero before it is encoded."""

    def prepare(self, x, ctx):
        sizes = ops.statistics.absmax(x, ctx.segments)
        x.masked_fill_(x.abs() < 0.01 * spread(sizes, ctx.segments), 0.0)
        return super().prepare(x, ctx)


class EverySecond(Compressor):
    """Odd elements of a tensor are never sent."""

    class claims(Claims):
        contractive = True

        def error_bound(self, x, ctx):
            return float(x.double().square().sum())

    def mask(self, segments):
        starts = inputs.per_segment(torch.tensor(segments.offsets[:-1]), segments)
        return (torch.arange(segments.numel) - starts) % 2 == 0

    def encode(self, x, ctx):
        return x[self.mask(ctx.segments)]

    def decode(self, payload, ctx):
        values = check_finite(payload.parts[0])
        mask = self.mask(ctx.segments)
        return torch.zeros(ctx.segments.numel).masked_scatter_(mask, values)

    def layout(self, segments, count=1):
        return ((torch.float32, int(self.mask(segments).sum())),)


class ShortTotals(SharedRange):
    """Adds 8-bit codes in 16 bits, which 259 workers may exceed."""

    def mean(self, payloads, ctx):
        total = torch.stack([payload.parts[0] for payload in payloads]).sum(0, dtype=torch.int16)
        return (total.double() * self.steps(ctx) / len(payloads)).float()


class HighVariance(Levels):
    """Declares twice the variance of elements below the first level."""

    class claims(LevelsClaims):
        def variance(self, x, ctx):
            top = spread(ops.statistics.absmax(x, ctx.segments), ctx.segments)
            variance = super().variance(x, ctx)
            return torch.where(x.abs() * TOP < top, 2 * variance, variance)


class ZeroSigns(Compressor):
    """Sends 0 for 0, in 2 bits, and claims to send +1 or -1."""

    class claims(Claims):
        signs = True
        aggregate = "vote"

        def aggregated(self, decoded, ctx):
            total = torch.stack([one.double() for one in decoded]).sum(0)
            return torch.where(total < 0, -1.0, 1.0).float()

    def encode(self, x, ctx):
        return ops.packing.pack((x.sign() + 1).int(), 2)

    def decode(self, payload, ctx):
        codes = ops.packing.unpack(payload.parts[0], 2, ctx.segments.numel)
        if bool((codes > 2).any()):
            raise PayloadError("a code is 3")
        return (codes - 1).float()

    def mean(self, payloads, ctx):
        apart = ctx._replace(out=None)
        votes = torch.stack([p.count * self.decode(p, apart) for p in payloads]).sum(0)
        return torch.where(votes < 0, -1.0, 1.0)

    def layout(self, segments, count=1):
        return ((torch.int32, ops.packing.packed_words(segments.numel, 2)),)


class SummedRounds(POWER):
    """Applies the sum over the workers, and claims nothing."""

    claims = Claims

    def in_rounds(self, x, state, ctx):
        mean, final = yield from super().in_rounds(x, state, ctx)
        return mean * ctx.workers, final


class NanRounds(POWER):
    """Accepts means that are not finite in the rounds, and refuses them in `decode`."""

    def in_rounds(self, x, state, ctx):
        rounds = super().in_rounds(x, state, ctx)
        first = yield next(rounds) + 0.0 * x.sum()
        mean = yield rounds.send(first.nan_to_num())
        try:
            rounds.send(mean)
        except StopIteration as end:
            approximation, final = end.value
        return approximation + 0.0 * first.sum(), final


class ThinMatrices(POWER):
    """Divides by the number of rows less one."""

    def in_rounds(self, x, state, ctx):
        mean, final = yield from super().in_rounds(x, state, ctx)
        for start, shape in ctx.segments.tensors:
            if len(shape) == 2 and shape[0] == 1:
                mean[start : start + shape[1]] /= 0.0
        return mean, final


KINDS: dict[str, tuple[type[Compressor], ...]] = {
    "several workers, long tensors": (
        *(LongMean, VeryLongMean, LongMerge, LongSum),
        *(CrowdedMean, CrowdedSegments, CrowdedVote, CrowdedSum),
    ),
    "wide matrices": (NarrowRounds, HalvedRounds),
    "long tensors": (
        FarHalf,
        LongFeedback,
        LongOut,
        LongLastOfOne,
        LongZeroGradient,
        LongNan,
        LongPeriod,
    ),
    "merged payloads": (CountedDecode,),
    "many workers": (SixteenWorkers, FifteenPayloads, ShortTotals),
    "many shards": (ManyShards, LateShard, CrowdedShards),
    "workers of different scale": (FirstScale, OwnLimit, SmallWorkers, HalfMean),
    "output buffers that were used": (DirtyZeros, DirtyMean, DirtySum, DirtyPayload, DirtyRounds),
    "small and large scales": (EpsQsgd, EpsTopK, EpsOneBit, HugeInt8, LastOctaves),
    "a last group of one element": (LastOfOne,),
    "more than 32,768 segments": (ShortIndex, SixteenBits, OneNorm),
    "one tensor in a bucket": (LoneConvolution,),
    "shapes of tensors": (OtherKernels, ThreeAxes),
    "negative zeros": (MinusZero,),
    "periodic and late steps": (
        *(Flushing, Flushing1327, Flushing20000, LateSteps, PeriodicMerge, PeriodicFeedback),
        *(PeriodicDecode, PeriodicMean, PeriodicSum, PeriodicResidual, PeriodicRounds),
        CyclicDraws,
    ),
    "ranks": (HighRanks,),
    "residuals": (ClippedResidual, ZeroGradient, CoarseResidual),
    "gradients that are not finite": (NanScales, NanMean, InfiniteSum, NanFeedback),
    "functions of one collective": (LateEntries,),
    "claims": (GenerousDelta, HighVariance, ZeroSigns),
    "caches and the order of calls": (
        PlanByLength,
        PlanByNumber,
        PlanByPlace,
        DrawsByStep,
        LastSegments,
        PlanByEnds,
        LongPlan,
        EveryCall,
    ),
    "results that later calls change": (ReusedDecode, ReusedMean, ReusedPrepare, CachedZeros),
    "rounds": (
        *(LocalRounds, LocalResult, OnesForZeros, SummedRounds, NanRounds, ThinMatrices),
        LentState,
    ),
    "gradients that a call changes": (FlushingPrepare,),
    "elements that never arrive": (EverySecond,),
    "the context of an exchange": (
        *(DecodedSteps, MeanOffset, ReceiverRank, SlowRate, RatedSum, WorldEncode, WorldDecode),
        *(ChangesShared, SeedsNumpy, FlushesDenormals, SilencesErrors),
    ),
    "what the engine relies on": (NarrowPositions, TwoRows),
    "positions": (LostPlace,),
    "views and guards": (ReadsStorage, WritesBeyond),
    "two conditions": (WaitingSegments, OtherRanks, CrowdedMerge),
}
"""Broken methods by the kind of input that shows the fault."""
