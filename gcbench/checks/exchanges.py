"""Properties that only whole exchanges show: exact means, equal collectives, memories, restarts."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gcbench.checks import calls, inputs, memory_steps, oracle
from gcbench.checks.outcome import Measurement, NotDeclaredError
from gcbench.core import memory, registry
from gcbench.core.clock import Clock
from gcbench.core.compressor import (
    Compressor,
    Context,
    Key,
    MultiRoundCompressor,
    Segments,
    reencodes,
    requantizes,
)
from gcbench.core.exchange import Exchange, Lane
from gcbench.core.rule import UpdateRule
from gcbench.core.world import Link, SimulatedWorld

SHAPES = ((40, 33), (0,), (1,), (1030,))
"""A bucket with a matrix, an empty tensor, a tensor of one element and a vector."""
N = sum(map(math.prod, SHAPES))
"""Number of elements of that bucket."""
WORKER_COUNTS = (1, 2, 3, 5, 8)
FEEDBACK_STEPS = 100
PLAIN = UpdateRule()


def simulated(lane: Lane, workers: int, seed: int = 7) -> Exchange:
    """Return an exchange of one lane between simulated workers; sets torch to one thread."""
    world = SimulatedWorld(workers, torch.device("cpu"), Link(10.0, 50.0), 1, 1)
    return Exchange(world, [lane], seed, Clock(world.device))


def exchanged_mean(
    method: Compressor,
    collective: str,
    xs: Sequence[Tensor],
    shapes: Sequence[Sequence[int]],
) -> Tensor:
    """Return the mean of the workers' gradients as the engine would exchange them."""
    return next(exchange_steps(method, collective, [xs], shapes, memory.Memory())[0])


def exchange_steps(
    method: Compressor,
    collective: str,
    steps: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[int]],
    carried: memory.Memory,
    rule: UpdateRule = PLAIN,
    lr: float = 1.0,
) -> tuple[Iterator[Tensor], Exchange]:
    """Return the means of these steps, one list of gradients per step, and their exchange."""
    lane = Lane(method, collective, 0, calls.segments_of(method, shapes), carried, rule=rule)
    exchanging = simulated(lane, len(steps[0]))
    return (exchanging.mean(list(xs), step, lr) for step, xs in enumerate(steps)), exchanging


WARM_UP = 3
"""Steps in fp32 before the steps that check memory and update rule."""
RULE_SHAPES = ((40, 33), (7,), (1030,), (4, 3, 5, 5), (3, 4, 5), (2, 3, 2, 2, 2), ())


def steps_of(
    carried: memory.Memory,
    rule: UpdateRule,
    code: Compressor,
    steps: Sequence[Sequence[Tensor]],
    shapes: inputs.Shapes,
    *,
    resume: bool = False,
    rates: Sequence[float] = (1.0,),
) -> Iterator[Tensor]:
    """Yield the updates that a memory and an update rule compute from these gradients.

    The first `WARM_UP` steps are fp32; then `code` encodes. `resume`: one step later a new exchange
    continues from copies of all buffers, as after a checkpoint. Before that, a run of all steps
    overwrites what may be stored by step and rank, and the old exchange runs on with other
    gradients; neither must change the new one. `rates`: the learning rates, repeated.
    """
    none, collective = registry.compressor("none"), code.legal_collectives()[0]
    whole = calls.segments_of(none, shapes)
    exact = Lane(none, "allreduce", 0, whole, carried.dense(), rule=rule.dense())
    lossy = Lane(code, collective, 0, calls.segments_of(code, shapes), carried, rule=rule)

    current = simulated(exact, len(steps[0]))
    for step, xs in enumerate(steps):
        if step == WARM_UP:
            current.change([lossy])
        yield current.mean(list(xs), step, rates[step % len(rates)]).clone()
        if resume and step == WARM_UP:
            others = [[-3 * x.flip(0) for x in each] for each in steps]
            later = simulated(exact, len(steps[0]))
            later.change([lossy])
            for worker in range(len(xs)):
                later.load_state_dict(current.state_dict(worker), worker)
            current.mean(others[step], step + 1)
            for _ in steps_of(carried, rule, code, others, shapes):
                pass
            current = later


def with_default_mean(method: Compressor) -> Compressor:
    """Return the method with the default `mean` and `encode_feedback`.

    The defaults define these operations; a method may override them by faster ones. Decoding stays
    the method's, and may call the method's `mean`. A method whose aggregate is not a mean is
    returned unchanged.
    """
    if method.claims.aggregate != "mean" or isinstance(method, MultiRoundCompressor):
        return method
    steps = {name: vars(Compressor)[name] for name in ("mean", "encode_feedback")}
    derived = copy.copy(method)
    steps["decode"] = staticmethod(method.decode)
    kind = type(type(method).__name__, (type(method),), steps)
    object.__setattr__(derived, "__class__", kind)  # the dataclass is frozen
    return derived


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same bits: -0.0 and 0.0 differ."""
    return a.shape == b.shape and a.dtype == b.dtype and oracle.raw(a) == oracle.raw(b)


def near(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal up to 1e-5 of the largest element (rounding of sums)."""
    return a.shape == b.shape and bool(((a - b).abs() <= 1e-5 * b.abs().max()).all())


def exact_means(method: Compressor) -> Measurement:
    """Small integers of the declared families are exact, from one worker and as a mean."""
    if not method.claims.exact_for:
        raise NotDeclaredError("no family of inputs is declared exact")
    segments = calls.segments_of(method, SHAPES)
    done, faults = 0, []
    for family in method.claims.exact_for:
        make = inputs.EXACT[family]
        x = make(segments, 0)
        if count_inexact(
            calls.round_trip(method, x, segments), x, method.claims.portable, one=True
        ):
            faults.append(f"{family}, one worker")
        if method.claims.aggregate == "other":
            continue  # the aggregate is not a mean
        for workers, collective in itertools.product(WORKER_COUNTS, method.legal_collectives()):
            xs, expected = exact_mean(method, collective, family, segments, workers)
            done += 1
            if count_inexact(
                exchanged_mean(method, collective, xs, SHAPES), expected, method.claims.portable
            ):
                faults.append(f"{family}, {workers} workers, {collective}")
    what = f"{done} means, {len(method.claims.exact_for)} round trips"
    return Measurement(", ".join(faults[:3]) or f"{what} exact", what, not faults)


def exact_mean(
    method: Compressor, collective: str, family: str, segments: Segments, workers: int
) -> tuple[list[Tensor], Tensor]:
    """Return the workers' integers of a family that `method` transmits exactly, and their mean.

    All float32, shape (n,). For a vote the mean is the majority's sign, and NaN at ties, where
    nothing is promised. In a ring of two, both have the same integers, whose sum is twice as large.
    In longer rings one worker has integers and the others have zeros, because partial sums of
    several need not be values that the method transmits exactly.
    """
    alike = reencodes(method, collective) or family.startswith("rank")
    xs = [inputs.EXACT[family](segments, 0 if alike else rank) for rank in range(workers)]
    if collective == "ring" and workers != 2:
        xs = [x if rank == workers // 2 else torch.zeros_like(x) for rank, x in enumerate(xs)]
    total = torch.stack(xs).sum(0)
    if method.claims.aggregate == "vote":
        return xs, torch.where(total != 0, total.sign(), torch.nan)
    return xs, total / workers


def count_inexact(
    actual: Tensor, expected: Tensor, portable: bool = True, *, one: bool = False
) -> int:
    """Return how many elements differ; where `expected` is NaN any value is accepted.

    Means of several workers may differ by the rounding of a scale, 1e-6 relative, those of `one`
    worker not at all, those that are not portable by 2e-5 of the largest element: products of
    matrices of 2,048 rows round by 1e-5.
    """
    promised = ~expected.isnan()
    if not portable:
        close = (actual - expected).abs() <= 2e-5 * expected[promised].abs().max()
        return int((promised & ~close).sum())
    equal = actual == expected if one else torch.isclose(actual, expected, rtol=1e-6, atol=0)
    return int((promised & ~equal).sum())


def collectives(method: Compressor) -> Measurement:
    """All collectives give the same mean, bit for bit, of workers of unequal scale.

    Collectives that encode means or partial sums again are left out. The mean equals that of an
    all-gather, up to rounding, even if the method does not list it.
    """
    legal = method.legal_collectives()
    compared = [name for name in legal if not reencodes(method, name)]
    undefined = method.claims.aggregate != "mean" or isinstance(method, MultiRoundCompressor)
    if not compared or (len(compared) == 1 and (undefined or compared == ["allgather"])):
        raise NotDeclaredError("a single collective, or one that encodes the mean again")
    wrong = 0
    for workers in (2, 3, 4, 5, 8):
        xs = [(1 + rank) * inputs.normal(N, rank) for rank in range(workers)]
        means = [exchanged_mean(method, collective, xs, SHAPES) for collective in compared]
        wrong += sum(not same(means[0], other) for other in means[1:])
        if not undefined and "allgather" not in compared:
            wrong += not near(means[0], exchanged_mean(method, "allgather", xs, SHAPES))
    return Measurement(f"{wrong} means differ", "0", wrong == 0, ", ".join(compared))


def settled(method: Compressor) -> Measurement:
    """After 50 steps with the same gradient the error is within `Claims.settled_error`.

    The gradient's matrices, two of one shape, have singular values that halve.
    """
    shapes = [(24, 36), (33,), (12, 3, 3, 3), (24, 36)]
    segments = calls.segments_of(method, shapes)
    x = inputs.normal(segments.numel, 5)
    for start, shape in segments.tensors:
        if len(shape) > 1:
            place = slice(start, start + math.prod(shape))
            u, _, v = torch.linalg.svd(x[place].double().view(shape[0], -1), full_matrices=False)
            sizes = torch.exp2(-torch.arange(len(v), dtype=torch.float64))
            x[place] = (u @ (sizes[:, None] * v)).float().view(-1)
    bound = method.claims.settled_error(x, Context(segments))
    if bound is None:
        raise NotDeclaredError("no settled error is declared")
    means, _ = exchange_steps(
        method, method.legal_collectives()[0], [[x]] * 50, shapes, memory.Memory()
    )
    error = [oracle.energy(x.double() - mean) for mean in means][-1]
    return Measurement(f"{error:.4g}", f"{bound:.4g}", error <= bound)


def telescoping(method: Compressor) -> Measurement:
    """Means applied + residuals (of workers and owners) = sum of the mean gradients, 100 steps.

    25 steps for collectives and configurations other than the default.
    """
    if not method.claims.contractive:
        raise NotDeclaredError("not contractive")
    if method.claims.aggregate != "mean":
        raise NotDeclaredError("the update is not a mean of the payloads")
    draw = torch.Generator().manual_seed(1)
    grads = torch.randn(FEEDBACK_STEPS, 2, N, generator=draw) + torch.randn(N, generator=draw)
    worst, longest = 0.0, 0
    for collective in method.legal_collectives():
        steps = [list(step) for step in grads]
        if collective != method.legal_collectives()[0] or registry.changed(method):
            steps = steps[:25]
        longest = max(longest, len(steps))
        means, finished = exchange_steps(
            method, collective, steps, [(40, 33), (1,), (1030,)], memory.make("residual", {})
        )
        applied = torch.zeros(N, dtype=torch.float64)
        for mean in means:
            applied += mean.double()
        states = [states[0] for states in finished.workers]
        left = torch.stack([state["residual"] for state in states]).double().mean(0)
        if collective == "twoshot" and requantizes(method):
            left = left + torch.cat([state["owner"] for state in states]).double()
        total = grads[: len(steps)].double().mean(1).sum(0)
        worst = max(worst, float((applied + left - total).abs().max()))
    # Each step rounds values as large as the residual by 2^-24; over 100 steps this is below 1e-2.
    return Measurement(f"{worst:.1e}, {longest} steps", "1e-2", worst < 1e-2)


OVERWRITTEN = -7.0
"""What gradients and means are overwritten with: no encoder refuses it."""


class Overwriting(UpdateRule):
    """The default rule, but it overwrites the mean that it received."""

    def update(self, mean: Tensor, ctx: Context) -> Tensor:
        """Return a copy of the mean."""
        applied = mean.clone()
        mean.fill_(OVERWRITTEN)
        return applied


def buffers(method: Compressor) -> Measurement:
    """State does not alias memory that is overwritten: buffers or gradients."""
    return overwritten(method, memory.of(method), method.rule, method.rule)


def overwritten(
    method: Compressor, carried: memory.Memory, rule: UpdateRule, second: UpdateRule
) -> Measurement:
    """Two exchanges run the same steps, with rules that return the same.

    The second one overwrites its buffers and gradients after each step; its means and memories must
    have the same bits. A buffer that is not declared is not saved in every checkpoint.
    """
    wrong, done = [], 0
    for collective in method.legal_collectives():
        steps = [[inputs.normal(N, 10 * step + rank) for rank in range(3)] for step in range(4)]
        copies = [[x.clone() for x in xs] for xs in steps]
        means, left = exchange_steps(method, collective, steps, SHAPES, carried, rule)
        others, right = exchange_steps(method, collective, copies, SHAPES, carried, second)
        for step, xs in enumerate(copies):
            mean = next(means)
            other = next(others).clone()
            right.buffers.fill(0xFF)
            for x in xs:
                x.fill_(OVERWRITTEN)
            done += 1
            if not same(mean, other):
                wrong.append(f"{collective}, step {step}")
        for a, b in zip(carried_tensors(left), carried_tensors(right), strict=True):
            if not same(a, b):
                wrong.append(f"{collective}: memory differs")
        if names := undeclared(left):
            wrong.append(f"{collective}: undeclared buffers: {', '.join(names)}")
    return Measurement("; ".join(wrong[:3]) or f"{done} means the same", f"{done} means", not wrong)


def resumed(method: Compressor) -> Measurement:
    """A run that continues from copies of all buffers has the bits of an uninterrupted run.

    State that a memory or an update rule keeps elsewhere is lost in a checkpoint.
    """
    rounds = isinstance(method, MultiRoundCompressor)
    if not (memory.of(method).carries or rounds or not method.rule.plain):
        raise NotDeclaredError("no state between steps")
    n = sum(map(math.prod, RULE_SHAPES))
    steps = [
        [inputs.normal(n, 10 * step + rank) for rank in range(2)] for step in range(WARM_UP + 3)
    ]
    whole, parted = (
        steps_of(memory.of(method), method.rule, method, steps, RULE_SHAPES, resume=resume)
        for resume in (False, True)
    )
    wrong = sum(not same(a, b) for a, b in zip(whole, parted, strict=True))
    return Measurement(f"{wrong} steps differ", "0", wrong == 0)


RULE_CASES: Sequence[tuple[inputs.Shapes, int, int, int, Sequence[float]]] = (
    (RULE_SHAPES, WARM_UP + 5, 1, 0, (1.0,)),
    (RULE_SHAPES, WARM_UP + 5, 2, 0, (1.0,)),
    (RULE_SHAPES, WARM_UP + 5, 1, 0, (0.01,)),
    (RULE_SHAPES, WARM_UP + 5, 1, 0, (0.1, 0.3, 0.02)),
    (RULE_SHAPES, WARM_UP + 5, 1, -40, (1.0,)),
    (RULE_SHAPES, WARM_UP + 5, 1, 30, (1.0,)),
    (((300, 250), (33,)), WARM_UP + 3, 1, 0, (1.0,)),
    (((40,),), 600, 1, 0, (1.0,)),
)
"""Shapes, steps, workers with equal gradients, exponent of the scale, and learning rates."""


def updates(method: Compressor) -> Measurement:
    """Without loss the update is that of the uncompressed optimizer, bit for bit.

    Before that, results on large inputs are compared with those on short ones.
    """
    if not method.rule.plain:
        running = memory_steps.Steps(memory.of(method), method.rule, method)
        if fault := next(memory_steps.faults(running), ""):
            return Measurement(fault, "the same as on short inputs", False)
    done = 0
    for shapes, steps, workers, exponent, rates in RULE_CASES:
        n = sum(map(math.prod, shapes))
        gradients = [inputs.values(n, 50 + 97 * step) * 2.0**exponent for step in range(steps)]
        for step, gradient in enumerate(gradients):
            gradient[:3] = 0.0  # as of a parameter that is never used
            if step < WARM_UP:
                gradient[3:6] = 0.0  # or not before the end of the warm-up
        declared = method.claims.uncompressed(gradients, WARM_UP)
        if declared is None:
            break
        each = [[gradient] * workers for gradient in gradients]
        carried, none = memory.of(method), registry.compressor("none")
        applied = steps_of(carried, method.rule, none, each, shapes, rates=rates)
        for step, (actual, want) in enumerate(zip(applied, declared, strict=True)):
            if not same(actual, want):
                where = (
                    f"{workers} worker(s), {n:,} elements, scale 2^{exponent}, learning rates "
                    f"{', '.join(map(str, rates))}"
                )
                return Measurement(f"step {step} differs", "the same bits", False, where)
            done += 1
    apart = unsynchronized(method)
    if apart is None and not done:
        raise NotDeclaredError("no uncompressed optimizer is declared")
    if apart:
        return Measurement(apart, "1e-4", False, "different gradients")
    return Measurement(f"{done} steps equal", "the same bits", True)


def unsynchronized(method: Compressor) -> str | None:
    """Return a step at which workers differ from `Claims.synchronized` on averaged gradients.

    They are small, so that an update rule's epsilon matters. None: it is not declared.
    """
    n, scale = sum(map(math.prod, RULE_SHAPES)), 2.0**-20
    draws = [[inputs.normal(n, 10 * step + rank) for rank in range(3)] for step in range(6)]
    steps = [[scale * x for x in xs] for xs in draws]
    means = [torch.stack(xs).double().mean(0) for xs in steps]
    ctx = Context(calls.segments_of(method, RULE_SHAPES), key=Key(7, 0, 0))
    declared = method.claims.synchronized(means, ctx)
    if declared is None:
        return None
    collective, carried = method.legal_collectives()[0], memory.of(method)
    actual, _ = exchange_steps(method, collective, steps, RULE_SHAPES, carried, method.rule, 0.01)
    for step, (update, want) in enumerate(zip(actual, declared, strict=True)):
        off = float((update - want).abs().max() / want.abs().max())
        if not off <= 1e-4:
            return f"step {step} is off by {off:.2g}"
    return ""


def undeclared(running: Exchange) -> list[str]:
    """Return the names of the buffers that neither the engine nor a declaration added."""
    (lane,) = running.lanes
    names = {name for worker in running.workers for name in worker[0]} - {"owner"}
    joint = {*running.joint[0]} - {"state"}
    return sorted((names - {*lane.memory.buffers}) | (joint - {*lane.joint}))


def carried_tensors(running: Exchange) -> Iterator[Tensor]:
    """Yield all tensors that an exchange carries to the next step."""
    for states in (*running.workers, running.joint):
        for state in states:
            yield from state.values()
