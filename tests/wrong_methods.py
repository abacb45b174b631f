"""Methods that are wrong, derived from ours or made anew: what `gcbench bounds --strict` must find.

`WRONG` says of each what is wrong, which claims are run, and which of them must fail; the tests
install the classes as a third party's package. Each keeps the declarations that it inherits.
`Levels`, `TwoShotLevels` and `Dither` are right.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from gcbench import ops
from gcbench.core import codec, registry
from gcbench.core.claims import Claims
from gcbench.core.compressor import Compressor, Key, Payload, Segments, check_finite
from gcbench.core.errors import PayloadError

BF16 = type(registry.compressor("bf16"))
DEMO = type(registry.compressor("demo"))
EFSIGN = type(registry.compressor("efsignsgd"))
FFT = type(registry.compressor("fft"))
INT8 = type(registry.compressor("int8"))
NATURAL = type(registry.compressor("natural"))
ONEBIT = type(registry.compressor("onebit"))
POWER = type(registry.compressor("powersgd"))
QSGD = type(registry.compressor("qsgd"))
RANDOMK = type(registry.compressor("randomk"))
SIGN = type(registry.compressor("signsgd"))
TERN = type(registry.compressor("terngrad"))
TOPK = type(registry.compressor("topk"))


def drawn(x: Tensor, key: Key, share: float) -> Tensor:
    """Return a random mask of that share, drawn afresh for each key."""
    seed = hash((key.seed, key.step, key.rank, key.offset)) % 2**31
    return torch.rand(len(x), generator=torch.Generator().manual_seed(seed)) < share


class Scaled(Compressor):
    """Whatever arrives is `factor` times what it must be."""

    factor: ClassVar[float] = 1.0

    def decode(self, payload, ctx):
        return super().decode(payload, ctx) * self.factor

    def mean(self, payloads, ctx):
        return super().mean(payloads, ctx) * self.factor

    def encode_feedback(self, x, residual, ctx):
        return Compressor.encode_feedback(self, x, residual, ctx)


class NegatedMean(Compressor):
    """What all apply has the wrong sign; the residual believes that all is well."""

    def mean(self, payloads, ctx):
        return -super().mean(payloads, ctx)


class SameDraws(Compressor):
    """All workers draw the same random numbers."""

    def encode(self, x, ctx):
        return super().encode(x, ctx._replace(key=ctx.key._replace(rank=0)))


class Flipped(SIGN):
    """Half of the signs are flipped at random."""

    share: ClassVar[float] = 0.5

    def encode(self, x, ctx):
        wrong = torch.where(drawn(x, ctx.key, self.share), -x, x)
        return super().encode(wrong, ctx)


class SlightlyFlipped(Flipped):
    """5 % of the signs are flipped at random."""

    share: ClassVar[float] = 0.05


class NegatedSigns(SIGN):
    """Sends the sign of -x."""

    def encode(self, x, ctx):
        return super().encode(-x, ctx)


class FirstWorkersVote(SIGN):
    """The owner hears worker 0 alone."""

    def mean(self, payloads, ctx):
        return self.decode(payloads[0], ctx)

    def merge(self, payloads, ctx):
        return payloads[0]._replace(count=sum(payload.count for payload in payloads))


class HalfTern(Scaled, TERN):
    """Half of it arrives."""

    factor = 0.5


class TripleTern(Scaled, TERN):
    """Three times as much arrives."""

    factor = 3.0


class SlowTern(Scaled, TERN):
    """A tenth of it arrives."""

    factor = 0.1


class DeterministicTern(TERN):
    """Rounds to the nearest of -s, 0, s."""

    def encode(self, x, ctx):
        limit = torch.empty_like(x)
        for i, start in enumerate(ctx.segments.offsets[:-1]):
            limit[start : ctx.segments.offsets[i + 1]] = ctx.shared[i]
        near = torch.where(x.abs() >= limit / 2, x.sign() * limit, torch.zeros_like(x))
        return super().encode(near, ctx)


class DroppingTern(TERN):
    """Forgets 5 % of the elements."""

    def encode(self, x, ctx):
        return super().encode(x.masked_fill(drawn(x, ctx.key, 0.05), 0), ctx)


class SameTern(SameDraws, TERN):
    pass


class BoastfulTern(TERN):
    """Claims half of its variance."""

    @property
    def claims(self):
        return BoastfulTernClaims(self)


class BoastfulTernClaims(type(TERN().claims)):
    def variance(self, x, ctx):
        return super().variance(x, ctx) / 2


class WrongScaleQsgd(Scaled, QSGD):
    """10 % more arrives."""

    factor = 1.1


class NearestQsgd(QSGD):
    """Rounds to the nearest level, and so not at random."""

    def encode(self, x, ctx):
        out = torch.empty_like(x)
        for start, stop in zip(ctx.segments.offsets, ctx.segments.offsets[1:], strict=False):
            part = x[start:stop]
            top = part.abs().amax().clamp(min=1e-30) if len(part) else 1.0
            out[start:stop] = (part / top * self.levels).round() * top / self.levels
        return super().encode(out, ctx)


class CoarseQsgd(QSGD):
    """Unbiased, at a quarter of the levels that it declares."""

    def encode(self, x, ctx):
        few = replace(plain(self), levels=max(1, self.levels // 4))
        apart = ctx._replace(parts=None)
        return codec.decode(few, codec.encode(few, x, apart), apart)

    def decode(self, payload, ctx):
        return payload.parts[0] / payload.count

    def mean(self, payloads, ctx):
        return torch.stack([payload.parts[0] for payload in payloads]).mean(0)

    def layout(self, segments, count=1):
        return ((torch.float32, segments.numel),)


def plain(method: Compressor) -> Compressor:
    """Return the QSGD that a derived one would be if nothing were overridden."""
    return QSGD(method.levels, method.norm, method.granularity, method.coding)


class SameQsgd(SameDraws, QSGD):
    pass


class UpwardNatural(NATURAL):
    """Rounds every mantissa up."""

    def encode(self, x, ctx):
        power = torch.exp2(torch.ceil(torch.log2(x.abs().clamp(min=1e-30))))
        return super().encode(torch.where(x == 0, 0, x.sign() * power), ctx)


class UnscaledRandomK(RANDOMK):
    """Sends values as they are, and still claims to be unbiased."""

    def decode(self, payload, ctx):
        full = super().decode(payload, ctx)
        return full * self.ratio if self.scaled else full


class NegatedTopK(NegatedMean, TOPK):
    pass


class HalfTopK(TOPK):
    """Sends zeros in the place of every second of its k."""

    def encode(self, x, ctx):
        places, _ = self._open(super().encode(x, ctx._replace(parts=None)), ctx.segments)
        selected = x.clone()
        selected[places[::2]] = 0
        rest = torch.zeros_like(x)
        rest[places] = selected[places]
        return super().encode(rest, ctx)


class ForgetfulTopK(TOPK):
    """Clears the residual at every step."""

    def encode_feedback(self, x, residual, ctx):
        payload = super().encode_feedback(x, residual, ctx)
        residual.zero_()
        return payload


class BackwardTopK(Scaled, TOPK):
    """What arrives has the wrong sign."""

    factor = -1.0


class SwappedOneBit(ONEBIT):
    """The magnitude of the one class for that of the other."""

    def encode(self, x, ctx):
        words, low, high = super().encode(x, ctx)
        return Payload((words, -high, -low))

    def encode_feedback(self, x, residual, ctx):
        return Compressor.encode_feedback(self, x, residual, ctx)


class RefusedOneBit(ONEBIT):
    """The mean of the one class for the other, which its own decoder refuses."""

    def encode(self, x, ctx):
        words, low, high = super().encode(x, ctx)
        return Payload((words, high, low))


class UnscaledEFSign(EFSIGN):
    """Signs without the mean magnitude."""

    def encode(self, x, ctx):
        words, scale = super().encode(x, ctx)
        return Payload((words, torch.ones_like(scale)))

    def encode_feedback(self, x, residual, ctx):
        return Compressor.encode_feedback(self, x, residual, ctx)


class NegatedFFT(Scaled, FFT):
    """What arrives has the wrong sign."""

    factor = -1.0


class SummedPower(POWER):
    """Adds what it should average, of four workers."""

    def in_rounds(self, x, state, ctx):
        mean, following = yield from super().in_rounds(x, state, ctx)
        return mean.mul_(4), following


class TruncatingInt8(INT8):
    """Rounds towards 0."""

    def encode(self, x, ctx):
        size, step = self.claims._steps(x, ctx.segments)
        down = torch.where(step.isinf(), 0.0, torch.floor(size / step) * step)
        down = torch.where(size >= 127 * step, size, down)  # the largest stays
        return super().encode((x.sign() * down).float(), ctx)


class TruncatingBf16(BF16):
    """Cuts the lower half of the bits off."""

    def encode(self, x, ctx):
        cut = (x.contiguous().view(torch.int32) & ~0xFFFF).view(torch.float32)
        return super().encode(cut, ctx)


class NegatedDemo(DEMO):
    """Sends the largest coefficients with the wrong sign."""

    def encode(self, x, ctx):
        return super().encode(-x, ctx)


class UphillDemo(NegatedMean, DEMO):
    """What all apply has the wrong sign."""


class FlippedDemo(DEMO):
    """A tenth of the elements changes its sign before the transform."""

    def encode(self, x, ctx):
        wrong = torch.where(drawn(x, ctx.key, 0.1), -x, x)
        return super().encode(wrong, ctx)


class MinusVote(SIGN):
    """Tied votes are minus."""

    def merge(self, payloads, ctx):
        apart, turned = ctx._replace(parts=None, out=None), []
        for payload in payloads:
            words = super().encode(-self.decode(payload, apart), apart)
            turned.append(Payload((words,), payload.count))
        workers = sum(payload.count for payload in payloads)
        won = self.decode(Payload((super().merge(turned, apart),), workers), apart)
        return super().encode(-won, ctx)


@dataclass(frozen=True)
class CoinlessVote(SIGN):
    """Says that a coin decides tied votes, and counts them as plus."""

    ties: str = "coin"

    def merge(self, payloads, ctx):
        return SIGN().merge(payloads, ctx)


@dataclass(frozen=True)
class OverclippedTern(TERN):
    """Declares to clip at 4 standard deviations, and clips at 1.2."""

    clip: float = 4.0

    def _scales(self, x, segments):
        return ops.ternary.scales(x, segments, 1.2)


class FarTern(TERN):
    """One element in a hundred arrives with twice its level."""

    def decode(self, payload, ctx):
        decoded = super().decode(payload, ctx)
        decoded[::100] *= 2
        return decoded

    def mean(self, payloads, ctx):
        return Compressor.mean(self, payloads, ctx)


class Backwards(Compressor):
    """Sends -x, and says that it is meant to."""

    @property
    def claims(self):
        return BackwardsClaims(self)

    def encode(self, x, ctx):
        return -x

    def decode(self, payload, ctx):
        return payload.parts[0].clone()


class BackwardsClaims(Claims):
    unbiased = True

    def target(self, x, ctx):
        return -x

    def variance(self, x, ctx):
        return torch.zeros_like(x).double()


class BrokenLevels(Compressor):
    """Divides by nothing."""

    @property
    def claims(self):
        return AdditiveClaims(self)

    def encode(self, x, ctx):
        raise ZeroDivisionError("a mean of nothing")

    def decode(self, payload, ctx):
        return payload.parts[0].clone()


class AdditiveClaims(Claims):
    unbiased = True


@dataclass(frozen=True)
class Additive(Compressor):
    """No class of ours: adds noise and claims to be unbiased, which it is, but for 10 %."""

    @property
    def claims(self):
        return AdditiveClaims(self)

    def encode(self, x, ctx):
        noise = (drawn(x, ctx.key, 0.5).float() * 2 - 1) * x.square().mean().sqrt()
        return Payload((0.9 * x + noise,))

    def decode(self, payload, ctx):
        return payload.parts[0].clone()


TOP = 7


def spread(values: Tensor, segments: Segments) -> Tensor:
    """Return each segment's value at all of its elements."""
    return torch.repeat_interleave(values, torch.tensor(segments.lengths, dtype=torch.int64))


class DitherClaims(Claims):
    unbiased = True

    def variance(self, x, ctx):
        step = spread(ops.statistics.absmax(x, ctx.segments), ctx.segments).double() / TOP
        return step * step / 12


@dataclass(frozen=True)
class Dither(Compressor):
    """No class of ours, and right: subtractive dither, whose error does not depend on x."""

    @property
    def claims(self):
        return DitherClaims(self)

    def encode(self, x, ctx):
        step = spread(ops.statistics.absmax(x, ctx.segments), ctx.segments) / TOP
        dither = ops.random.uniform(ctx.key, len(x)) - 0.5
        code = torch.where(step > 0, torch.round(x / step + dither), 0.0)
        return torch.where(step > 0, (code - dither) * step, 0.0)

    def decode(self, payload, ctx):
        return check_finite(payload.parts[0]).clone()

    def layout(self, segments, count=1):
        return ((torch.float32, segments.numel),)


class LevelsClaims(Claims):
    unbiased = True
    two_levels = True

    def variance(self, x, ctx):
        step = spread(ops.statistics.absmax(x, ctx.segments), ctx.segments).double() / TOP
        level = torch.where(step > 0, x.double().abs() / step, 0.0)
        part = level - level.floor()
        return step * step * part * (1 - part)


@dataclass(frozen=True)
class Levels(Compressor):
    """Right, and not a built-in class: rounds at random to 15 levels of each segment's largest.

    int8 codes and a float32 scale per segment. Other classes break one of its functions.
    """

    collectives: ClassVar[tuple[str, ...]] = ("allgather", "twoshot")
    scratch = True

    @property
    def claims(self):
        return LevelsClaims(self)

    def draws(self, key, n):
        return ops.random.uniform(key, n)

    def scales(self, x, segments):
        largest = ops.statistics.absmax(x, segments)
        return torch.where(largest < 2.0**-100, 0.0, largest)

    def codes(self, x, scale, draws):
        level = torch.where(scale > 0, x.abs() / scale * TOP, 0.0)
        return (torch.floor(level + draws).clamp(max=TOP) * x.sign()).to(torch.int8)

    def encode(self, x, ctx):
        scale = self.scales(x, ctx.segments)
        return (self.codes(x, spread(scale, ctx.segments), self.draws(ctx.key, len(x))), scale)

    def decode(self, payload, ctx):
        codes, scale = payload.parts
        if bool((codes.int().abs() > TOP).any()) or bool((scale < 0).any()):
            raise PayloadError("codes or scales out of range")
        check_finite(scale.double())
        return codes.float() / TOP * spread(scale, ctx.segments)

    def layout(self, segments, count=1):
        return ((torch.int8, segments.numel), (torch.float32, len(segments)))


class TwoShotLevels(Levels):
    """Right, too: whatever arrives was encoded twice."""

    collectives: ClassVar[tuple[str, ...]] = ("twoshot",)


class Wrong(NamedTuple):
    """A wrong class, the claims that are run on it, and those that must fail."""

    method: type[Compressor]
    claims: str
    caught: tuple[str, ...]
    options: str = ""


SIGN_THEOREMS = ("sign-theorem-1", "sign-theorem-2a", "sign-theorem-2b")
WRONG = {
    "flipped": Wrong(Flipped, "[sv]*", (*SIGN_THEOREMS, "sign", "vote", "vote-bound")),
    "slightlyflipped": Wrong(SlightlyFlipped, "sign-floor*", ("sign-floor",)),
    "negatedsigns": Wrong(NegatedSigns, "sign", ("sign",)),
    "firstvote": Wrong(FirstWorkersVote, "[sv]*[ner]", ("sign", "vote", "sign-floor")),
    "halftern": Wrong(HalfTern, "[uv]*", ("unbiased", "variance")),
    "tripletern": Wrong(TripleTern, "[puv]*", ("unbiased", "variance", "plateau")),
    "slowtern": Wrong(SlowTern, "rate*", ("rate",), ":clip=0"),
    "deterministictern": Wrong(DeterministicTern, "[uv]*", ("unbiased", "variance")),
    "droppingtern": Wrong(DroppingTern, "[uv]*", ("unbiased",)),
    "sametern": Wrong(SameTern, "variance*", ("variance",)),
    "boastfultern": Wrong(BoastfulTern, "[pv]*", ("variance", "plateau")),
    "wrongscaleqsgd": Wrong(WrongScaleQsgd, "[uv]*", ("unbiased",)),
    "nearestqsgd": Wrong(NearestQsgd, "[uv]*", ("unbiased", "variance")),
    "coarseqsgd": Wrong(CoarseQsgd, "[uv]*", ("variance", "variance-bound"), ":norm=2"),
    "sameqsgd": Wrong(SameQsgd, "variance*", ("variance",)),
    "upwardnatural": Wrong(UpwardNatural, "[ceuv]*", ("unbiased", "contraction")),
    "unscaledrandomk": Wrong(UnscaledRandomK, "[uv]*", ("unbiased", "variance"), ":ratio=0.1"),
    "negatedtopk": Wrong(NegatedTopK, "[dir]*", ("identity", "descent")),
    "halftopk": Wrong(HalfTopK, "[cen]*", ("contraction", "error-bound")),
    "forgetfultopk": Wrong(ForgetfulTopK, "[ir]*", ("identity",)),
    "backwardtopk": Wrong(BackwardTopK, "[rcbd]*", ("residual", "residual-bound", "contraction")),
    "swappedonebit": Wrong(SwappedOneBit, "[cen]*", ("contraction", "error-bound")),
    "refusedonebit": Wrong(RefusedOneBit, "[ce]*", ("contract",)),
    "unscaledefsign": Wrong(UnscaledEFSign, "[cen]*", ("contraction", "normal-loss")),
    "negatedfft": Wrong(NegatedFFT, "[cbf]*", ("contraction", "biased-descent", "falling-error")),
    "summedpower": Wrong(SummedPower, "[cei]*", ("error-bound",)),
    "truncatingint8": Wrong(TruncatingInt8, "[ce]*", ("error-bound",)),
    "truncatingbf16": Wrong(TruncatingBf16, "[cn]*", ("normal-loss",)),
    "negateddemo": Wrong(NegatedDemo, "[ce]*", ("contraction", "error-bound")),
    "additive": Wrong(Additive, "[uv]*", ("unbiased",)),
    "uphilldemo": Wrong(UphillDemo, "[ae]*", ("applied",)),
    "flippeddemo": Wrong(FlippedDemo, "[ae]*", ("error-bound",)),
    "minusvote": Wrong(MinusVote, "vote", ("vote",)),
    "coinlessvote": Wrong(CoinlessVote, "vote", ("vote",)),
    "overclippedtern": Wrong(OverclippedTern, "[uv]*", ("unbiased", "variance")),
    "fartern": Wrong(FarTern, "[cuv]*", ("contract", "unbiased")),
    "backwards": Wrong(Backwards, "[cuv]*", ("contract",)),
    "brokenlevels": Wrong(BrokenLevels, "[cuv]*", ("contract",)),
}
"""By the name under which a class is installed."""
