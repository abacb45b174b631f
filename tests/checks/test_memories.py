"""The checks of memories refuse wrong memories, and none of ours."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import unusual
from commands import invoke
from wrong_methods import Levels, spread

from gcbench.checks import cases, exchanges, memories, memory_steps, processes, verify
from gcbench.core import memory, registry
from gcbench.core.memory import Memory
from gcbench.core.rule import UpdateRule

Residual = registry.memory_class("residual")
Momentum = registry.memory_class("momentum")
Ef21 = registry.memory_class("ef21")
Dgc = registry.memory_class("dgc")
FrozenAdam = type(registry.compressor("onebitadam").rule)
Signs = type(registry.compressor("dlion").rule)


@pytest.mark.parametrize("name", sorted({*registry.memories()} - {memory.FORCED}))
def test_our_memories_hold(name):
    rows = memories.verify(memory.make(name, {}), registry.compressor("topk"))
    assert [row for row in rows if row.verdict == "fails"] == []
    assert {row.check for row in rows} == {*memories.CHECKS}


class Half(Residual):
    """Keeps half of the error."""

    def keep(self, offered, sent, ctx):
        torch.sub(offered, sent, out=ctx.state["residual"]).mul_(0.5)


class Changing(Residual):
    """Changes the gradient."""

    def offer(self, gradient, ctx):
        return gradient.add_(ctx.state["residual"])


class Hiding(Residual):
    """Carries the error in an attribute, and so loses it at a restart."""

    hidden: ClassVar[dict] = {}

    def offer(self, gradient, ctx):
        return gradient + self.hidden.get(id(ctx.state), 0.0)

    def keep(self, offered, sent, ctx):
        self.hidden[id(ctx.state)] = offered - sent


class Growing(Residual):
    """The residual is half as large again as the error."""

    def keep(self, offered, sent, ctx):
        torch.sub(offered, sent, out=ctx.state["residual"]).mul_(1.5)


class Unscaled(Residual):
    """Does not follow the learning rate."""

    def rescale(self, state, factor):
        pass


class Deaf(Residual):
    """Never receives what was sent."""

    feedback = False


class Wrong(Residual):
    """Starts at one."""

    def state(self, like):
        return {"residual": torch.ones_like(like)}


@dataclass(frozen=True)
class Shared(Memory):
    """All workers have one buffer."""

    buffers: ClassVar[tuple[str, ...]] = ("residual",)
    residuals: ClassVar[tuple[str, ...]] = ("residual",)
    one: ClassVar[dict] = {}

    def state(self, like):
        self.one.setdefault(len(like), torch.zeros_like(like)).zero_()
        return {"residual": self.one[len(like)]}

    def offer(self, gradient, ctx):
        return gradient + ctx.state["residual"]

    def keep(self, offered, sent, ctx):
        torch.sub(offered, sent, out=ctx.state["residual"])


class Long(Residual):
    """The error behind element 65,536 is lost."""

    def keep(self, offered, sent, ctx):
        super().keep(offered, sent, ctx)
        ctx.state["residual"][65_536:] = 0


class Flushing(Momentum):
    """The momentum is reset at every 500th step."""

    def offer(self, gradient, ctx):
        if ctx.step % 500 == 499:
            ctx.state["momentum"].zero_()
        return super().offer(gradient, ctx)


class HighRank(Momentum):
    """Ranks from 1000 on offer the plain gradient."""

    def offer(self, gradient, ctx):
        momentum = super().offer(gradient, ctx)
        return gradient if ctx.rank >= 1000 else momentum


class Crowd(Residual):
    """Beyond 16 workers a tenth of the error is dropped."""

    def keep(self, offered, sent, ctx):
        super().keep(offered, sent, ctx)
        ctx.state["residual"].mul_(0.9 if ctx.workers > 16 else 1.0)


class Clipped(Residual):
    """The residual is clipped at 1000."""

    def keep(self, offered, sent, ctx):
        super().keep(offered, sent, ctx)
        ctx.state["residual"].clamp_(-1000, 1000)


class Idle(Residual):
    """Without a gradient the residual waits and nothing is offered."""

    def offer(self, gradient, ctx):
        return super().offer(gradient, ctx) if bool(gradient.any()) else gradient

    def keep(self, offered, sent, ctx):
        if bool(offered.any()):
            super().keep(offered, sent, ctx)


class IdleMomentum(Momentum):
    """Without a gradient the momentum does not decay."""

    def offer(self, gradient, ctx):
        if not bool(gradient.any()):
            return ctx.state["momentum"]
        return super().offer(gradient, ctx)


class Unsent(Residual):
    """Where nothing was sent the error is not carried."""

    def keep(self, offered, sent, ctx):
        super().keep(offered, sent, ctx)
        if not bool(sent.any()):
            ctx.state["residual"].zero_()


class Tiny(Momentum):
    """Momenta below 1e-15 become zero."""

    def offer(self, gradient, ctx):
        m = super().offer(gradient, ctx)
        return m.masked_fill_(m.abs() < 1e-15, 0.0)


class ScratchResidual(Residual):
    """Offers a buffer that all workers share."""

    scratch: ClassVar[dict] = {}

    def offer(self, gradient, ctx):
        shared = self.scratch.setdefault(len(gradient), torch.empty_like(gradient))
        return torch.add(gradient, ctx.state["residual"], out=shared)


class Scratched(Residual):
    """Adds in a buffer that all workers share, and offers a copy."""

    scratch: ClassVar[dict] = {}

    def offer(self, gradient, ctx):
        shared = self.scratch.setdefault(len(gradient), torch.empty_like(gradient))
        torch.add(gradient, ctx.state["residual"], out=shared)
        return shared.clone()


class ScratchedArray(Residual):
    """The same with an array of numpy."""

    scratch: ClassVar[dict] = {}

    def offer(self, gradient, ctx):
        shared = self.scratch.setdefault(len(gradient), gradient.numpy().copy())
        shared[:] = gradient.numpy()
        shared += ctx.state["residual"].numpy()
        return torch.from_numpy(shared.copy())


class Crowded(Momentum):
    """With more than 32,768 tensors there is no momentum."""

    def offer(self, gradient, ctx):
        momentum = super().offer(gradient, ctx)
        return gradient if len(ctx.segments) > 32_768 else momentum


class Slow(Momentum):
    """At learning rates below 1e-4 the momentum is 0.5."""

    def offer(self, gradient, ctx):
        momentum = ctx.state["momentum"]
        if ctx.lr < 1e-4:
            return momentum.mul_(0.5).add_(gradient, alpha=0.5)
        return super().offer(gradient, ctx)


class Misestimated(Ef21):
    """The estimate of the mean forgets what lies behind element 2^20."""

    def apply(self, mean, ctx):
        total = super().apply(mean, ctx)
        total[2**20 :] = mean[2**20 :]
        return total


class FlippedEstimate(Ef21):
    """The estimate moves away from what was sent."""

    def keep(self, offered, sent, ctx):
        ctx.state["estimate"] -= sent


class FlippedError(type(memory.of(registry.compressor("onebitadam")))):
    """The error has the other sign."""

    def keep(self, offered, sent, ctx):
        torch.sub(sent, offered, out=ctx.state["error"])


class Forgetful(type(memory.of(registry.compressor("onebitadam")))):
    """What was not sent is lost."""

    def keep(self, offered, sent, ctx):
        ctx.state["error"].zero_()


class HalfKept(type(memory.of(registry.compressor("onebitadam")))):
    """Half of the error is lost, beside a momentum that all workers share."""

    def keep(self, offered, sent, ctx):
        super().keep(offered, sent, ctx)
        ctx.state["error"].mul_(0.5)


class CoarseError(type(memory.of(registry.compressor("onebitadam")))):
    """The error is stored in bfloat16."""

    def keep(self, offered, sent, ctx):
        super().keep(offered, sent, ctx)
        ctx.state["error"].copy_(ctx.state["error"].bfloat16())


class ThirdWorker(type(memory.of(registry.compressor("onebitadam")))):
    """Workers behind the second one keep no error."""

    def keep(self, offered, sent, ctx):
        super().keep(offered, sent, ctx)
        if ctx.rank > 1:
            ctx.state["error"].zero_()


class KeptVelocity(Dgc):
    """Clears the velocity where nothing was sent."""

    def keep(self, offered, sent, ctx):
        torch.sub(offered, sent, out=ctx.state["residual"])
        ctx.state["velocity"].masked_fill_(sent == 0, 0.0)


class LateVelocity(Dgc):
    """Adds the velocity of the previous step."""

    def offer(self, gradient, ctx):
        ctx.state["residual"].add_(ctx.state["velocity"])
        ctx.state["velocity"].mul_(self.momentum).add_(gradient)
        return ctx.state["residual"]


class FusedClipping(Residual):
    """Clips the residual, which a method with fused feedback does not."""

    fusible = True
    lossy = True

    def keep(self, offered, sent, ctx):
        super().keep(offered, sent, ctx)
        ctx.state["residual"].clamp_(-1, 1)


class StoredByStep(Memory):
    """Finds the previous gradient in a dict, by rank and step."""

    stored: ClassVar[dict] = {}
    has_momentum = True

    def offer(self, gradient, ctx):
        self.stored[ctx.rank, ctx.step] = gradient.clone()
        return 2 * gradient - self.stored.get((ctx.rank, ctx.step - 1), 0.0)

    def dense(self):
        return self


class FollowsDown(Residual):
    """Residuals follow a rising learning rate, and not a falling one."""

    def rescale(self, state, factor):
        super().rescale(state, min(factor, 1.0))


class Saturating(Residual):
    """Residuals follow a change of the learning rate by a factor of 100 at most."""

    def rescale(self, state, factor):
        super().rescale(state, min(max(factor, 0.01), 100.0))


class Rebinding(Residual):
    """Scales a copy of the residual, and not the residual of which the engine passes a view."""

    def rescale(self, state, factor):
        state["residual"] = state["residual"] * factor


class ExtraState(Residual):
    """Adds a buffer to those of the worker, and does not declare it."""

    def offer(self, gradient, ctx):
        ctx.state["last"] = gradient.clone()
        return super().offer(gradient, ctx)


class ExtraJoint(Ef21):
    """Adds a buffer to those of all workers, and does not declare it."""

    def apply(self, mean, ctx):
        ctx.joint["count"] = torch.ones_like(mean)
        return super().apply(mean, ctx)


class Unmoved(Residual):
    """Declares a momentum, so that the optimizer has none, and has none."""

    has_momentum = True

    def dense(self):
        return self


class OddAxes(unusual.Corrected):
    """Beside a momentum, half of the error of scalars and of tensors of five axes is dropped."""

    def keep(self, offered, sent, ctx):
        super().keep(offered, sent, ctx)
        for start, shape in ctx.segments.tensors:
            if len(shape) in (0, 5):
                ctx.state["error"][start : start + math.prod(shape)] *= 0.5


class SummedMomentum(Momentum):
    """Applies the sum over the workers."""

    def apply(self, mean, ctx):
        return mean * ctx.workers


class Alone(Residual):
    """A single worker keeps no error."""

    def keep(self, offered, sent, ctx):
        super().keep(offered, sent, ctx)
        if ctx.workers == 1:
            ctx.state["residual"].zero_()


class LateAndEven(unusual.Alternating):
    """From step 1000 on the error is halved; what is offered depends on the step at all of them."""

    def keep(self, offered, sent, ctx):
        super().keep(offered, sent, ctx)
        if ctx.step >= 1000:
            ctx.state["residual"].mul_(0.5)


class NoOutliers(Residual):
    """Errors 30 times as large as their mean are dropped."""

    def keep(self, offered, sent, ctx):
        super().keep(offered, sent, ctx)
        sizes = ctx.state["residual"].abs()
        ctx.state["residual"].masked_fill_(sizes > 30 * sizes.mean(), 0.0)


class ForgetfulOwner(Residual):
    """Owners halve their errors, and the memory is not lossy."""

    owner_decay = 0.5


class MaskedDense(Dgc):
    """Masks in exact steps, too, so that no momentum remains."""

    def dense(self):
        return self


class Unlisted(Residual):
    """The residual is not declared, so it does not follow the learning rate."""

    residuals = ()
    feedback = True
    contracting = True


class TwiceScaled(unusual.SelfScaled):
    """Follows the learning rate itself, and the engine rescales it, too."""

    residuals = ("update",)


class NeverDivided(unusual.SelfScaled):
    """Carries the error times the learning rate, and adds it to a gradient."""

    def offer(self, gradient, ctx):
        return gradient + ctx.state["update"]


class KernelsForget(unusual.Corrected):
    """Beside a momentum, half of the error of convolutions is dropped."""

    def keep(self, offered, sent, ctx):
        super().keep(offered, sent, ctx)
        for start, shape in ctx.segments.tensors:
            if len(shape) == 4:
                ctx.state["error"][start : start + math.prod(shape)] *= 0.5


class DelayedScale(Levels):
    """Its scale is at least 0.9 times that of the previous step, from a dict of the class."""

    seen: ClassVar[dict] = {}

    def encode(self, x, ctx):
        scale, place = self.scales(x, ctx.segments), ctx.segments.offsets
        before = self.seen.get((ctx.key._replace(step=ctx.step - 1), place), scale)
        self.seen[ctx.key, place] = scale
        scale = torch.maximum(scale, 0.9 * before)
        return self.codes(x, spread(scale, ctx.segments), self.draws(ctx.key, len(x))), scale


def test_a_codec_that_keeps_a_state_is_refused():
    refused("memory: checkpoint", Memory(), DelayedScale())


class HalfCorrected(unusual.Corrected):
    """Beside a momentum, half of the error is dropped."""

    def offer(self, gradient, ctx):
        ctx.state["error"].mul_(0.5)
        return super().offer(gradient, ctx)


class Undeclared(unusual.Corrected):
    """The optimizer applies a momentum to the momentum."""

    has_momentum = False


class DoubleAverage(Undeclared):
    """An average whose weights add up to 10."""

    averages = True


class ScaledMomentum(unusual.Corrected):
    """When the learning rate falls tenfold, the momentum is multiplied by 10."""

    residuals = ("error", "momentum")


class FastMean(unusual.Differences):
    """The mean estimate learns faster than the workers' estimates."""

    def apply(self, mean, ctx):
        return ctx.joint["mean estimate"].add_(mean)


class StaleMean(unusual.Differences):
    """The mean estimate is updated before it is added."""

    def apply(self, mean, ctx):
        return ctx.joint["mean estimate"].add_(mean, alpha=self.rate) + mean


class LostMean(unusual.Differences):
    """The mean estimate is not added."""

    def apply(self, mean, ctx):
        return mean


class StoredGradient(unusual.TwoSteps):
    """Stores the gradient itself, which its owner overwrites."""

    def offer(self, gradient, ctx):
        offered = super().offer(gradient, ctx)
        ctx.state["previous"] = gradient
        return offered


class StoredMean(unusual.TwoMeans):
    """Stores the mean itself, which the exchange and update rules overwrite."""

    def apply(self, mean, ctx):
        applied = super().apply(mean, ctx)
        ctx.joint["previous"] = mean
        return applied


class SentIsExact(Residual):
    """Wherever something was sent there is no residual."""

    def keep(self, offered, sent, ctx):
        super().keep(offered, sent, ctx)
        ctx.state["residual"].masked_fill_(sent != 0, 0.0)


class SentIsExactBesideMomentum(unusual.Corrected):
    """The same beside a momentum."""

    def keep(self, offered, sent, ctx):
        super().keep(offered, sent, ctx)
        ctx.state["error"].masked_fill_(sent != 0, 0.0)


class SentIsExactWithMasks(Dgc):
    """The residual is cleared wherever the velocity is."""

    def keep(self, offered, sent, ctx):
        super().keep(offered, sent, ctx)
        ctx.state["residual"].masked_fill_(sent != 0, 0.0)


class UnlistedBesideMomentum(unusual.Corrected):
    """The error is not declared, so codes need not be contractive."""

    residuals = ()
    feedback = True


class GrowingInTwoShot(Residual):
    """Owners multiply their errors by 1.5."""

    lossy = True
    owner_decay = 1.5


class ClippedAndHalved(unusual.Corrected):
    """Clips gradients and halves errors, which are neither declared lossy nor residuals."""

    residuals = ()
    feedback = True
    contracting = True

    def offer(self, gradient, ctx):
        return super().offer(gradient / gradient.norm().clamp(min=1.0), ctx)

    def keep(self, offered, sent, ctx):
        super().keep(offered, sent, ctx)
        ctx.state["error"].mul_(0.5)


class FlippedMomentum(unusual.Corrected):
    """Velocities of the parameters, which the optimizer subtracts again."""

    def offer(self, gradient, ctx):
        return super().offer(-gradient, ctx)


class FlippedAverage(FlippedMomentum):
    """An average with the wrong sign."""

    has_momentum = False
    averages = True

    def offer(self, gradient, ctx):
        return super().offer(0.1 * gradient, ctx)


class FlippedMean(unusual.ClippedError):
    """Says that it loses errors, and applies a third of the mean with the wrong sign."""

    def apply(self, mean, ctx):
        return mean / -3


class UnclippedDense(unusual.Corrected):
    """Clips gradients to a norm of 1000; steps in fp32 do not."""

    def offer(self, gradient, ctx):
        return super().offer(gradient / (gradient.norm() / 1000).clamp(min=1.0), ctx)

    def dense(self):
        return unusual.Corrected()


class ClippedDense(UnclippedDense):
    """Steps in fp32 clip, too."""

    def dense(self):
        return self


class FusibleDecay(Residual):
    """Says that plain error feedback is equivalent, and halves the residual."""

    fusible = True
    lossy = True

    def offer(self, gradient, ctx):
        ctx.state["residual"].mul_(0.5)
        return super().offer(gradient, ctx)


class PlainDense(unusual.Corrected):
    """Steps in fp32 have no momentum at all."""

    def dense(self):
        return Memory()


class OtherDense(unusual.Corrected):
    """Steps in fp32 have a momentum of another size."""

    def dense(self):
        return Momentum(0.9)


@pytest.mark.parametrize(
    ("cls", "check"),
    [
        (MaskedDense, "memory: dense"),
        (Alone, "memory: nothing lost in a step"),
        (LateAndEven, "memory: nothing lost in a step"),
        (NoOutliers, "memory: nothing lost in a step"),
        (ForgetfulOwner, "memory: buffers"),
        (HalfKept, "memory: constant gradient"),
        (CoarseError, "memory: constant gradient"),
        (SentIsExact, "memory: nothing lost in a step"),
        (SentIsExact, "memory: constant gradient"),
        (SentIsExactBesideMomentum, "memory: constant gradient"),
        (SentIsExactWithMasks, "memory: constant gradient"),
        (ClippedAndHalved, "memory: constant gradient"),
        (ThirdWorker, "memory: constant gradient"),
        (KeptVelocity, "memory: constant gradient"),
        (LateVelocity, "memory: dense"),
        (FusedClipping, "memory: what was sent"),
        (StoredByStep, "memory: checkpoint"),
        (FollowsDown, "memory: learning rate"),
        (Saturating, "memory: learning rate"),
        (Rebinding, "memory: learning rate"),
        (ExtraState, "memory: overwritten"),
        (ExtraJoint, "memory: overwritten"),
        (Unmoved, "memory: exact code"),
        (OddAxes, "memory: sent later"),
        (SummedMomentum, "memory: equal gradients"),
        (FlippedEstimate, "memory: constant gradient"),
        (FlippedError, "memory: constant gradient"),
        (Forgetful, "memory: constant gradient"),
        (Long, "memory: large inputs"),
        (Flushing, "memory: large inputs"),
        (HighRank, "memory: large inputs"),
        (Crowd, "memory: large inputs"),
        (Clipped, "memory: nothing lost in a step"),
        (Idle, "memory: large inputs"),
        (IdleMomentum, "memory: large inputs"),
        (Unsent, "memory: nothing lost in a step"),
        (Tiny, "memory: large inputs"),
        (ScratchResidual, "memory: workers apart"),
        (Scratched, "memory: workers apart"),
        (ScratchedArray, "memory: workers apart"),
        (Crowded, "memory: large inputs"),
        (Slow, "memory: large inputs"),
        (Misestimated, "memory: large inputs"),
    ],
)
def test_a_memory_that_is_wrong_on_some_inputs_is_refused(cls, check):
    refused(check, cls(), registry.compressor("topk"))


def refused(check, carried, method):
    fault = memories.CHECKS[check](carried, method)
    assert fault
    assert not fault.startswith(memories.SKIPPED)


@pytest.mark.parametrize(
    ("cls", "check"),
    [
        (Half, "memory: nothing lost in a step"),
        (Changing, "memory: what was sent"),
        (Hiding, "memory: checkpoint"),
        (Growing, "memory: finite"),
        (Unscaled, "memory: learning rate"),
        (Wrong, "memory: buffers"),
        (Deaf, "memory: buffers"),
        (UnlistedBesideMomentum, "memory: buffers"),
        (Shared, "memory: replicas"),
        (Unlisted, "memory: sent later"),
        (TwiceScaled, "memory: sent later"),
        (NeverDivided, "memory: sent later"),
        (HalfCorrected, "memory: sent later"),
        (KernelsForget, "memory: sent later"),
        (Undeclared, "memory: exact code"),
        (DoubleAverage, "memory: exact code"),
        (FlippedMomentum, "memory: exact code"),
        (FlippedAverage, "memory: exact code"),
        (FlippedMean, "memory: exact code"),
        (ScaledMomentum, "memory: exact code"),
        (FastMean, "memory: exact code"),
        (StaleMean, "memory: exact code"),
        (LostMean, "memory: exact code"),
        (StoredGradient, "memory: overwritten"),
        (StoredMean, "memory: overwritten"),
        (PlainDense, "memory: dense"),
        (UnclippedDense, "memory: dense"),
        (OtherDense, "memory: dense"),
    ],
)
@pytest.mark.parametrize("name", ["topk", "efsignsgd"])
def test_a_wrong_memory_is_refused(cls, check, name):
    """Also beside methods whose feedback is fused, which take over for a plain residual alone."""
    refused(check, cls(), registry.compressor(name))


class OwnerOfDifferences(unusual.Differences):
    """Owners of two-shot shards feed the error of the mean back."""

    owner = True


@pytest.mark.parametrize("name", ["topk", "int8", "bf16"])
def test_a_fusible_memory_does_what_plain_error_feedback_does(name):
    """Also beside methods that do not fuse it with encoding."""
    method = registry.compressor(name)
    assert memories._received(Residual(at_owner=False), method) == ""
    refused("memory: what was sent", FusibleDecay(), method)


def test_a_memory_may_clip_gradients_if_dense_does():
    assert memories._dense(ClippedDense(), registry.compressor("topk")) == ""


def test_owners_need_a_contractive_code():
    for carried, name, legal in (
        (unusual.Differences(), "qsgd", True),
        (OwnerOfDifferences(), "qsgd", False),
        (OwnerOfDifferences(), "efsignsgd", True),
        (OwnerOfDifferences(), "none", True),
    ):
        fault = memories.CHECKS["memory: buffers"](carried, registry.compressor(name))
        assert bool(fault) is not legal, (carried, name)


def test_buffers_are_finite_with_every_collective():
    method = registry.compressor("efsignsgd")
    assert method.legal_collectives()[1:]
    refused("memory: finite", GrowingInTwoShot(), method)


@pytest.mark.parametrize("name", ["powersgd", "randomk"])
def test_a_changed_gradient_is_refused_beside_methods_of_every_collective(name, monkeypatch):
    method = registry.compressor(name)
    monkeypatch.setattr(type(method), "collectives", ("allreduce",))
    refused("memory: what was sent", Changing(), method)
    assert memories._received(memory.make("residual", {}), method) == ""


SCHEDULES = ("memory: exact code", "memory: sent later", "memory: dense")


@pytest.mark.parametrize("name", sorted(registry.compressors()))
def test_the_memories_of_our_methods_hold_at_changing_learning_rates(name):
    for options in ({}, *registry.compressor(name).variants):
        method = registry.compressor(name, **options)
        for check in SCHEDULES:
            fault = memories.CHECKS[check](memory.of(method), method)
            assert not fault or fault.startswith(memories.SKIPPED), (options, fault)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ef21", {"eta": 0.1}),
        ("dgc", {"masking": False}),
        ("dgc", {"masking": False, "nesterov": True}),
        ("dgc", {"clip": 0.1}),
        ("dgc", {"masking": False, "clip": 0.1}),
        ("dgc", {"clip": 1000.0}),
        ("residual", {"decay": 0.5}),
        ("momentum", {"beta": 0.0}),
    ],
)
def test_our_memories_hold_with_other_settings(name, options):
    rows = memories.verify(memory.make(name, options), registry.compressor("topk"))
    assert [row for row in rows if row.verdict == "fails"] == []


FILE = """
from dataclasses import dataclass
from typing import ClassVar
import torch
from gcbench.core.memory import Memory
from gcbench.core.rule import UpdateRule

@dataclass(frozen=True)
class Long(Memory):
    buffers: ClassVar[tuple[str, ...]] = ("residual",)
    residuals: ClassVar[tuple[str, ...]] = ("residual",)

    def offer(self, gradient, ctx):
        return gradient + ctx.state["residual"]

    def keep(self, offered, sent, ctx):
        torch.sub(offered, sent, out=ctx.state["residual"])
        ctx.state["residual"][LAST:] = 0
"""


@pytest.mark.parametrize(("last", "code"), [("65_536", 1), ("2**40", 0)])
def test_the_command_verifies_the_memory_of_a_file(last, code, tmp_path, monkeypatch):
    monkeypatch.setattr(verify.properties, "CHECKS", {})
    monkeypatch.setattr(verify, "effort_for", lambda *_, **__: cases.QUICK._replace(every=99))
    path = tmp_path / f"memory{code}.py"
    path.write_text(FILE.replace("LAST", last))
    words = ("verify", "efsignsgd", "--no-processes", "--set", "granularity=tensor")
    done = invoke(*words, "--memory", path, "--json")
    assert done.code == code, done.err
    failing = {row["check"] for row in json.loads(done.out) if row["verdict"] == "fails"}
    assert failing == ({"memory: large inputs"} if code else set())
    refused = invoke("verify", "terngrad", "--memory", "residual")
    assert refused.code == 2


def test_a_memory_fits_the_configuration_that_is_verified(monkeypatch):
    """Unscaled random-k is contractive, and stochastic mxfp8 is not; their defaults are reverse."""
    monkeypatch.setattr(verify.properties, "CHECKS", {})
    monkeypatch.setattr(memories, "CHECKS", {"memory: replicas": memories._replicas})
    words = ("--no-processes", "--memory", "residual", "--json")
    fits = invoke("verify", "randomk", "--set", "scaled=false", *words)
    assert fits.code == 0, fits.err
    assert any(row["check"] == "memory: replicas" for row in fits.json)
    refused = invoke("verify", "mxfp8", "--set", "rounding=stochastic", *words)
    assert refused.code == 2
    assert "not contractive" in refused.err


def test_processes_exchange_with_the_memory_that_is_verified():
    """They used the method's own beside any --memory."""
    method = registry.compressor("topk", ratio=0.1)
    expected = processes.digests(method)
    assert processes.digests(method, carried=method.memory) == expected
    plain = processes.digests(method, carried="none")
    assert all(plain[collective] != expected[collective] for collective in expected)
    refused = invoke("verify", "onebitadam", "--memory", "momentum")
    assert refused.code == 2
    assert "Remove --memory" in refused.err


SEEDED = """
import torch

from gcbench import Memory


class Seeded(Memory):
    def offer(self, gradient, ctx):
        torch.manual_seed(ctx.step)
        return gradient
"""


def test_a_memory_must_not_seed_the_generator_of_the_training(tmp_path, monkeypatch):
    monkeypatch.setattr(memories, "CHECKS", {"memory: replicas": memories._replicas})
    (tmp_path / "seeded.py").write_text(SEEDED)
    name = registry.add_file(str(tmp_path / "seeded.py"), "memory")
    state = torch.random.get_rng_state()
    try:
        verdicts = [
            {
                row.check: row.verdict
                for row in verify._memory_rows(registry.compressor("int8"), each)
            }
            for each in (name, "none")
        ]
    finally:
        torch.random.set_rng_state(state)
    assert [each["memory: process"] for each in verdicts] == ["fails", "holds"]


@pytest.mark.parametrize("cls", unusual.MEMORIES)
def test_an_unusual_memory_is_accepted(cls):
    rows = memories.verify(cls(), registry.compressor("topk"))
    assert [row for row in rows if row.verdict == "fails"] == []


class LongRule(FrozenAdam):
    """Behind element 65,536 the momentum is not divided."""

    def update(self, mean, ctx):
        out = super().update(mean, ctx)
        momentum = ctx.joint["momentum"]
        return torch.cat([out[:65_536], momentum[65_536:]])


class LateRule(FrozenAdam):
    """The second moment is lost at step 400."""

    def update(self, mean, ctx):
        if ctx.step == 400:
            ctx.joint["variance"].zero_()
        return super().update(mean, ctx)


class SmallRule(FrozenAdam):
    """Elements below 1e-12 do not move."""

    def update(self, mean, ctx):
        small = ctx.joint["momentum"].abs() < 1e-12
        return super().update(mean, ctx).masked_fill(small, 0.0)


class PeriodicSigns(Signs):
    """Every 300th step goes uphill."""

    def update(self, mean, ctx):
        out = super().update(mean, ctx)
        return -out if ctx.step % 300 == 299 else out


class KernelSigns(Signs):
    """Weights of convolutions do not move."""

    def update(self, mean, ctx):
        out = super().update(mean, ctx).clone()
        for start, shape in ctx.segments.tensors:
            if len(shape) == 4:
                out[start : start + math.prod(shape)] = 0
        return out


class CrowdedSigns(Signs):
    """With more than 32 workers half a step is made."""

    def update(self, mean, ctx):
        return super().update(mean, ctx) * (0.5 if ctx.workers > 32 else 1.0)


@pytest.mark.parametrize(
    ("base", "cls"),
    [
        ("onebitadam", LongRule),
        ("onebitadam", LateRule),
        ("onebitadam", SmallRule),
        ("dlion", PeriodicSigns),
        ("dlion", CrowdedSigns),
        ("dlion", KernelSigns),
    ],
)
def test_an_update_rule_that_is_wrong_on_some_inputs_is_refused(base, cls):
    right = registry.compressor(base)
    fields = dataclasses.asdict(right.rule)

    @dataclass(frozen=True)
    class Method(type(right)):
        @property
        def rule(self):
            return cls(**fields)

    assert not exchanges.updates(Method()).holds


class Standardized(UpdateRule):
    """Divides by the standard deviation, which one element does not have."""

    def update(self, mean, ctx):
        variance = (mean - mean.mean()).square().sum() / (len(mean) - 1)
        return mean / (variance.sqrt() + 1e-8)


class Normalized(UpdateRule):
    """Divides by the norm of the whole mean."""

    def update(self, mean, ctx):
        return mean / mean.norm()


class NormalizedTensors(UpdateRule):
    """Divides each tensor by its norm."""

    def update(self, mean, ctx):
        for start, shape in ctx.segments.tensors:
            mean[start : start + math.prod(shape)] /= mean[start : start + math.prod(shape)].norm()
        return mean


class HalfNormalized(NormalizedTensors):
    """The same, unless nothing moves."""

    def update(self, mean, ctx):
        return super().update(mean, ctx) if bool(mean.any()) else mean


@pytest.mark.parametrize(
    ("rule", "where"),
    [
        (Standardized, "one element"),
        (Normalized, "zeros"),
        (NormalizedTensors, "zeros"),
        (HalfNormalized, "a tensor of zeros"),
    ],
)
def test_an_update_rule_must_be_finite(rule, where):
    steps = memory_steps.Steps(memory.Memory(), rule(), registry.compressor("topk"))
    assert next(memory_steps.faults(steps)).startswith(where)


def test_large_inputs_are_run_as_the_engine_runs_them():
    """A rule may overwrite the mean, which is EF21's estimate, and must not change the estimate."""
    method, short = registry.compressor("topk"), memory_steps.series(40)
    actual, want = (
        memory_steps.Steps(Ef21(), rule, method).run(*short)
        for rule in (exchanges.Overwriting(), UpdateRule())
    )
    assert memory_steps.alike(actual, want)


class UphillSigns(Signs):
    """The opposite signs."""

    def update(self, mean, ctx):
        return -super().update(mean, ctx)


class OddSigns(Signs):
    """Divides by the number of workers, if that is odd."""

    def update(self, mean, ctx):
        return super().update(mean, ctx) / (ctx.workers if ctx.workers % 2 else 1)


@pytest.mark.parametrize(
    ("cls", "check"), [(OddSigns, "memory: equal gradients"), (UphillSigns, "memory: exact code")]
)
def test_an_update_rule_with_a_wrong_sign_or_factor_is_refused(cls, check):
    @dataclass(frozen=True)
    class Method(type(registry.compressor("dlion"))):
        @property
        def rule(self):
            return cls(vote=True)

    refused(check, memory.of(Method()), Method())
