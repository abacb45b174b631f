"""Does a memory do what it declares? Checks of a memory beside a method."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gcbench.checks import exchanges, inputs, memory_steps, payloads
from gcbench.checks.calls import Calls
from gcbench.checks.oracle import raw
from gcbench.checks.outcome import Outcome
from gcbench.core import registry
from gcbench.core.compressor import (
    Compressor,
    Context,
    Key,
    MultiRoundCompressor,
    Segments,
    reencodes,
)
from gcbench.core.exchange import Exchange, Lane
from gcbench.core.memory import Memory
from gcbench.core.rule import UpdateRule

SHAPES = ((40, 33), (1,), (4, 3, 5, 5), (3, 4, 5), (2, 3, 2, 2, 2), (), (621,))
N = exchanges.N
WORKERS = 3
RATES = (0.5, 0.5, 0.05, 0.2, 2.0, 0.1)
"""Learning rates of the steps in which a schedule must not matter."""


FACTORS = (0.25, 16.0, 2.0**-10, 2.0**10, 2.0**30, 2.0**-30)
"""Factors of residuals, old / new learning rate."""
PLACE = memory_steps.Place(step=3, rank=1, workers=WORKERS)
PLACES = tuple(
    PLACE._replace(step=step, rank=rank, workers=workers, lr=lr)
    for step, rank, workers, lr in (
        *((0, 0, 1, 1.0), (1, 0, 1, 0.1), (2, 1, 2, 1.0), (4, 0, 4, 1e-3), (7, 2, 8, 64.0)),
        *((499, 1, 5, 0.1), (1000, 3, 16, 1.0), (1001, 0, 2, 1.0), (10**6, 64, 65, 1.0)),
    )
)
"""Where nothing is lost in a step: few and many workers, early and late steps."""


class Spy(Memory):
    """A memory that passes all calls on, and remembers what it received and returned."""

    def __init__(self, inner: Memory) -> None:
        self.inner = inner
        self.offered: list[Tensor] = []
        self.sent: list[Tensor] = []
        self.changed = 0

    def __getattribute__(self, name: str) -> Any:
        passed = ("inner", "offered", "sent", "changed", "offer", "keep", "fusible")
        if name in passed or name.startswith("__"):
            return super().__getattribute__(name)
        return getattr(super().__getattribute__("inner"), name)

    fusible = False  # the engine calls `offer` and `keep`

    def offer(self, gradient: Tensor, ctx: Context) -> Tensor:
        """Pass on; the gradient must stay as it is."""
        before = gradient.clone()
        offered = self.inner.offer(gradient, ctx)
        self.changed += raw(before) != raw(gradient)
        self.offered.append(offered.clone())
        return offered

    def keep(self, offered: Tensor, sent: Tensor, ctx: Context) -> None:
        """Pass on."""
        self.sent.append(sent.clone())
        self.inner.keep(offered, sent, ctx)


def gradients(step: int, count: int = WORKERS) -> list[Tensor]:
    """Return the gradients of a step; they have a part in common."""
    common = inputs.values(N, 3)
    return [common + inputs.values(N, 100 * step + rank + 50) for rank in range(count)]


def exchange(method: Compressor, carried: Memory, collective: str | None = None) -> Exchange:
    """Return an exchange of three simulated workers."""
    segments = Segments.of(SHAPES, method.granularity)
    way = collective or method.legal_collectives()[0]
    return exchanges.simulated(Lane(method, way, 0, segments, carried), WORKERS)


def _states(running: Exchange) -> list[dict[str, Tensor]]:
    return [*(worker[0] for worker in running.workers), running.joint[0]]


def _buffers(carried: Memory, method: Compressor) -> str:
    like = torch.zeros(7)
    state = carried.state(like)
    if {*state} != {*carried.buffers}:
        return f"state() has {sorted(state)}; buffers declares {sorted(carried.buffers)}"
    for name, buffer in state.items():
        if buffer.shape != like.shape or buffer.dtype != torch.float32 or bool(buffer.any()):
            return f"buffer {name!r}: {buffer.dtype}, shape {tuple(buffer.shape)}; zeros expected"
    if type(carried).keep is not Memory.keep and not carried.feedback:
        return "`keep` is never called: `feedback` is false"
    if not {*carried.residuals} <= {*carried.buffers}:
        return f"residuals {carried.residuals} are not among the buffers {carried.buffers}"
    if carried.residuals and carried.owner and carried.owner_decay != 1 and not carried.lossy:
        return f"owner_decay is {carried.owner_decay}, but `lossy` is false"
    if not (carried.residuals or carried.contracting) and _accumulates(carried):
        return "an error is fed back, but neither `residuals` nor `contracting` declares it"
    two = "twoshot" in method.legal_collectives() and reencodes(method, "twoshot")
    if two and carried.owner and not (carried.residuals or method.claims.contractive):
        return "`owner` is true, though the code is not contractive: set it to false"
    return ""


def _accumulates(carried: Memory) -> bool:
    """Return whether a gradient of which nothing is sent is offered at all later steps.

    So is an error, for which codes must be contractive. A momentum decays, and the estimate of a
    gradient learns only from what is sent.
    """
    if not carried.feedback:
        return False
    gradient = memory_steps.SMALL * inputs.values(39, 17)
    state, joint = carried.state(gradient), {x: torch.zeros(39) for x in carried.joint}
    offers = []
    for step in range(1000):
        ctx = Context(Segments.of(((39,),)), key=Key(7, step, 0), state=state, joint=joint)
        offered = carried.offer(gradient * (step == 0), ctx).clone()
        carried.keep(offered, torch.zeros(39), ctx)
        offers.append(offered)
    early, late = offers[499], offers[999]
    remains = float(late.abs().amax()) > 1e-6 * float(gradient.abs().amax())
    return remains and memory_steps.alike([late], [early])


def _received(carried: Memory, method: Compressor) -> str:
    """`keep` receives the decoding of the worker's own payload, and gradients stay as they are.

    Methods in rounds, and those without an all-gather, are compared in their gradients alone. With
    any other method, a memory that is fusible must do what plain error feedback does.
    """
    if not carried.carries:
        return SKIPPED + "the gradient is offered as it is"
    spy, rounds = Spy(carried), isinstance(method, MultiRoundCompressor)
    single = "allgather" in method.legal_collectives() and not rounds
    way = "allgather" if single else None
    plain = registry.memory_class("residual")() if carried.fusible and single else carried
    running, fused = (exchange(method, each, way) for each in (spy, plain))
    calls, segments = Calls(method), Segments.of(SHAPES, method.granularity)
    for step in range(4):
        spy.offered.clear()
        spy.sent.clear()
        mean = running.mean(gradients(step), step)
        if raw(fused.mean(gradients(step), step)) != raw(mean):
            return f"step {step}: fusible, but plain error feedback gives other means"
        if spy.changed:
            return f"step {step}: offer changes the gradient"
        if not single:
            continue
        key = Key(7, step, 0)
        shared = calls.shared(spy.offered, segments, key)
        for rank, (offered, sent) in enumerate(zip(spy.offered, spy.sent, strict=False)):
            payload = calls.encode(offered, segments, shared, key._replace(rank=rank))
            if raw(calls.decode(payload, segments, shared)) != raw(sent):
                return f"step {step}, worker {rank}: `sent` is not what the payload decodes to"
    return ""


def _checkpoint(carried: Memory, method: Compressor) -> str:
    """A memory goes on from its saved buffers to the same bits, and has no other state.

    Before that, another run of the same steps overwrites what may be stored by step and rank.
    """
    running = exchange(method, carried)
    for step in range(3):
        running.mean(gradients(step), step, lr=0.1)
    saved = copy.deepcopy((running.workers, running.joint))
    after = [running.mean(gradients(step), step, lr=0.05).clone() for step in range(3, 6)]
    between, other = (exchange(method, copy.deepcopy(carried)) for _ in range(2))
    for step in range(3):
        between.mean([-3 * x.flip(0) for x in gradients(step)], step, lr=0.1)
    other.workers, other.joint = saved
    other.assume(0.1)
    for step, want in enumerate(after, 3):
        if raw(other.mean(gradients(step), step, lr=0.05)) != raw(want):
            return f"step {step}: after a restart from the buffers the mean has other bits"
    return ""


def _finite(carried: Memory, method: Compressor) -> str:
    """50 steps of one gradient, and 50 of zeros, leave finite buffers, by every collective."""
    for way in method.legal_collectives():
        if fault := _unbounded(exchange(method, carried, way)):
            return f"{fault} ({way})"
    return ""


def _unbounded(running: Exchange) -> str:
    largest = float(max(x.abs().amax() for x in gradients(0)))
    for step in range(100):
        xs = gradients(0) if step < 50 else [torch.zeros(N)] * WORKERS
        mean = running.mean(xs, step)
        for state in _states(running):
            for name, buffer in state.items():
                if not bool(buffer.isfinite().all()):
                    return f"step {step}: buffer {name!r} is not finite"
        if not bool(mean.isfinite().all()):
            return f"step {step}: the mean is not finite"
        if float(mean.abs().amax()) > 1e4 * largest:
            return f"step {step}: the mean is 10,000 times the largest gradient"
    return ""


def _identity(carried: Memory, method: Compressor) -> str:
    """In each step, new residual + what was sent = old residual + gradient."""
    if carried.lossy or len(carried.buffers) != 1 or carried.residuals != carried.buffers:
        return SKIPPED + "drops errors on purpose, or carries more than one residual"
    if carried.joint:
        return SKIPPED + "estimates the mean"
    (name,) = carried.buffers
    base, share = inputs.values(N, 17), memory_steps.series(N)[1][0]
    heavy = base.clone()
    heavy[100] = 2.0**10
    cases = [
        *itertools.product(
            (PLACE,),
            (base, torch.zeros(N), 2.0**-60 * base, 2.0**60 * base),
            (0.0, 1.0, -1.0, 2000.0, 2.0**20),
            (share, torch.zeros(N), torch.ones(N), torch.full((N,), 0.5)),
        ),
        *itertools.product((PLACE,), (heavy,), (0.0, 1.0), (share, torch.zeros(N))),
        *itertools.product(PLACES, (base,), (1.0,), (share,)),
    ]
    for place, gradient, factor, sent_share in cases:
        scale = float(gradient.abs().amax()) or 1.0
        residual = factor * (gradient if factor == -1.0 else inputs.values(N, 29) * scale)
        state = {name: residual.clone()}
        segments, key = Segments.of(SHAPES, method.granularity), Key(7, place.step, place.rank)
        ctx = Context(segments, key=key, workers=place.workers, lr=place.lr, state=state)
        offered = carried.offer(gradient.clone(), ctx)
        sent = offered * sent_share
        carried.keep(offered, sent.clone(), ctx)
        want = residual.double() + gradient.double()
        off = float((state[name].double() + sent.double() - want).abs().amax())
        largest = float(want.abs().amax())
        if not off <= 1e-5 * largest:
            where = "" if place is PLACE else f", at {place._asdict()}"
            return (
                f"off by {off:.3g} of {largest:.3g}, with a residual {factor:g} times as large"
                f"{where}"
            )
    return ""


def _summed(
    carried: Memory, xs: Sequence[Tensor], share: Tensor, steps: int = 600, first: int = 0
) -> Tensor:
    """Return the sums of what is applied in the last two quarters of the steps, float64, (2, n).

    `xs`: the gradient of each worker, at every step. `share`: the share of each element that is
    sent; from step to step it is rolled by one element. `first`: the first step.
    """
    segments = Segments.of(((len(share),),))
    states = [carried.state(x) for x in xs]
    joint = {name: torch.zeros_like(share) for name in carried.joint}
    sums = torch.zeros(4, len(share), dtype=torch.float64)
    for step in range(steps):
        sent, part = [], share.roll(step)
        for rank, (x, state) in enumerate(zip(xs, states, strict=True)):
            key = Key(7, first + step, rank)
            ctx = Context(segments, key=key, workers=len(xs), state=state, joint=joint)
            offered = carried.offer(x.clone(), ctx)
            sent.append(offered * part)
            if carried.feedback:
                carried.keep(offered, sent[-1].clone(), ctx)
        sums[4 * step // steps] += carried.apply(torch.stack(sent).mean(0), ctx)
    return sums[2:]


def _constant(carried: Memory, method: Compressor) -> str:
    """Of a constant gradient as much is applied in the end as if every element was sent at once.

    Each element is sent at every third step, or half of it at every step. It holds whatever the
    memory keeps: an error, an estimate of the gradient, or a momentum; but only if what is applied
    is linear in the gradients. These are small, as a memory may clip. A memory that is lossy or
    masks must apply more than the share that arrives without an error.
    """
    if not carried.feedback:
        return SKIPPED + "`keep` is never called"
    one, two, three = (memory_steps.SMALL * inputs.values(39, 17 + rank) for rank in range(3))
    every, half = torch.ones(39), torch.full((39,), 0.5)
    third = (torch.arange(39) % 3 == 0).float()
    rows = ((one, two, three), (two, three, one), (one + two, two + three, three + one))
    first, second, both = (_summed(carried, xs, every, 60) for xs in rows)
    largest = both.abs().amax()
    if bool(((first + second - both).abs() > 1e-3 * largest).any()):
        return SKIPPED + "what is applied is not linear in the gradients"
    for xs, start, share in ((rows[0], 0, third), (rows[0], 0, half), (rows[0][:1], 1000, third)):
        (before, actual), (early, want) = (
            _summed(carried, xs, x, first=start) for x in (share, every)
        )
        applied = float((actual * want).sum() / want.square().sum())
        if carried.lossy or carried.masks:
            holds = applied > 1.002 * float(share.mean())
        else:  # where the sums still change, by as much
            room = 1e-3 * want.abs().amax() + 2 * (actual - before).abs() + 2 * (want - early).abs()
            holds = bool(((actual - want).abs() <= room).all())
        if not holds:
            sent = "half of each element" if share is half else "a third of the elements"
            where = f"{len(xs)} worker(s), from step {start}, which send {sent}"
            return f"of a constant gradient {applied:.3g} times as much is applied ({where})"
    return ""


def _exact_run(
    carried: Memory, rates: Sequence[float], reads: Sequence[str] = (), scale: float = 1.0
) -> Tensor:
    """Return what is applied at each step with an exact code, float64, one row per step.

    `reads`: joint buffers that an update rule reads; if there are any, rows consist of these.
    `scale`: that of the gradients.
    """
    code = registry.compressor("none")
    running, rows = exchange(code, carried), []
    for step, lr in enumerate(rates):
        mean = running.mean([scale * x for x in gradients(step)], step, lr=lr)
        row = [running.joint[0][name] for name in reads] or [mean]
        rows.append(torch.cat(row).double())
    return torch.stack(rows)


def _fitting(rule: UpdateRule, carried: Memory) -> UpdateRule:
    """Return the rule, or the default rule if it reads buffers that the memory lacks."""
    return rule if {*rule.reads} <= {*carried.joint} else UpdateRule()


def _uphill(carried: Memory, rule: UpdateRule) -> bool:
    """Return whether 30 steps with an exact code and one constant gradient go uphill.

    Signs, averages and momenta of a constant gradient all have a positive product with it.
    """
    steps = [gradients(0)] * (exchanges.WARM_UP + 30)
    code = registry.compressor("none")
    updates = exchanges.steps_of(carried, _fitting(rule, carried), code, steps, SHAPES)
    applied = torch.stack([*updates][exchanges.WARM_UP :]).double().sum(0)
    return not float(applied @ torch.stack(steps[0]).double().sum(0)) > 0


def _differs(actual: Tensor, want: Tensor) -> str:
    """Return the first step in which two runs differ by more than rounding, or ""."""
    for step, (one, other) in enumerate(zip(actual, want, strict=True)):
        off, largest = float((one - other).abs().amax()), float(other.abs().amax())
        if not off <= 1e-5 * largest:
            return f"step {step}: off by {off:.3g} of {largest:.3g}"
    return ""


def _exact(carried: Memory, method: Compressor) -> str:
    """With an exact code there is no error, so learning rates do not matter.

    If the memory declares neither momentum, nor an average, nor a loss, then the mean gradient is
    applied at every step. If it declares an average, none is larger than the mean gradients so far.
    If it declares a momentum, then a gradient is applied at the next step, too. Whatever it
    declares, steps with a constant gradient must not go uphill.
    """
    if _uphill(carried, method.rule):
        return "exact code: steps with a constant gradient go uphill"
    adjusted = bool(registry.changed(carried))  # as to a momentum of 0
    if carried.masks:
        carried = carried.dense()
    if carried.has_momentum and method.rule.plain and not adjusted:
        first = [gradients(0), [torch.zeros(N)] * WORKERS]
        applied, _ = exchanges.exchange_steps(
            registry.compressor("none"), "allreduce", first, SHAPES, carried
        )
        if not bool([mean.clone() for mean in applied][1].any()):
            return "has_momentum is true, but a step without gradients applies nothing"
    actual = _exact_run(carried, RATES)
    if carried.has_momentum or carried.averages or carried.lossy:
        fault = _differs(actual, _exact_run(carried, [1.0] * len(RATES)))
        if fault:
            return f"exact code: the applied mean depends on the learning rates: {fault}"
    means = torch.stack([torch.stack(gradients(s)).double().mean(0) for s in range(len(RATES))])
    if carried.averages and not carried.has_momentum:
        limit = means.abs().cummax(0).values
        over = float((actual.abs() - limit).amax())
        if over <= 1e-5 * float(limit.amax()):
            return ""
        return f"exact code: the average exceeds all mean gradients so far by {over:.3g}"
    if carried.has_momentum or carried.lossy:
        return ""
    fault = _differs(actual, means)
    return fault and (
        "exact code: the mean gradient is not applied, though has_momentum, averages and lossy are "
        f"false: {fault}"
    )


def _later(carried: Memory, method: Compressor) -> str:
    """The sum of lr * applied is the same, whether elements are sent at once or steps later.

    In the last step everything is sent. Before, the method's code is used if it can be.
    """
    if carried.lossy or carried.masks or not carried.feedback:
        return SKIPPED + "drops errors on purpose, or `keep` is never called"
    if carried.joint:
        return SKIPPED + "estimates the mean"
    if carried.has_momentum and not carried.residuals:
        return SKIPPED + "what was not sent remains in the momentum"
    usable = method.claims.contractive and method.claims.aggregate == "mean"
    usable = usable and "allgather" in method.legal_collectives()
    usable = usable and not isinstance(method, MultiRoundCompressor)
    code = method if usable else registry.compressor("topk")
    exact = registry.compressor("none")
    lanes = exchange(exact, carried).lanes
    sums = []
    for running in (exchange(code, carried, "allgather"), exchange(exact, carried)):
        total = torch.zeros(N).double()
        for step, lr in enumerate(RATES):
            if step == len(RATES) - 1:
                running.change(lanes)
            xs = gradients(step) if step < 4 else [torch.zeros(N)] * WORKERS
            total += lr * running.mean(xs, step, lr=lr).double()
        sums.append(total)
    fault = _differs(sums[0][None], sums[1][None]).removeprefix("step 0: ")
    return fault and f"the sum of lr * applied depends on when elements are sent: {fault}"


def _dense(carried: Memory, method: Compressor) -> str:
    """`dense()` applies what the memory applies with an exact code, unless it averages.

    A memory that masks clears a momentum after the first step, so only that step is compared.
    Gradients are also so large that a memory that clips them does so.
    """
    dense = carried.dense()
    if dense.masks:
        return "dense() masks: as every element is sent, no momentum remains"
    if dense.has_momentum != carried.has_momentum:
        return f"has_momentum is {carried.has_momentum}, but {dense.has_momentum} of dense()"
    if carried.averages:
        return ""
    reads = [name for name in method.rule.reads if name in carried.joint]
    rates = RATES[:1] if carried.masks else RATES
    for scale in (1.0, 2.0**40):
        actual, want = (_exact_run(each, rates, reads, scale) for each in (dense, carried))
        if fault := _differs(actual, want):
            return (
                "dense() applies something other than the memory with an exact code: "
                f"{fault} (gradients times {scale:g})"
            )
    return ""


def _crowd(carried: Memory, method: Compressor) -> str:
    """With an exact code workers with equal gradients apply what a single one applies.

    The gradients are small, as a clipping threshold may depend on the number of workers. The
    method's update rule takes part, unless it reads buffers that the memory lacks.
    """
    code, rule = registry.compressor("none"), _fitting(method.rule, carried)
    xs = [2.0**-20 * inputs.values(N, 50 + 97 * step) for step in range(6)]
    single, *others = (
        [*exchanges.steps_of(carried, rule, code, [[x] * count for x in xs], SHAPES)]
        for count in (1, 2, 3, 8)
    )
    for means in others:
        if fault := _differs(torch.stack(means).double(), torch.stack(single).double()):
            return f"it depends on the number of workers with equal gradients: {fault}"
    return ""


def _large(carried: Memory, method: Compressor) -> str:
    """Long tensors, many tensors, other steps, ranks, workers and scales change nothing."""
    steps = memory_steps.Steps(carried, UpdateRule(), method)
    return next(memory_steps.faults(steps), "")


def _interleaved(carried: Memory, method: Compressor) -> str:
    """The buffers of two workers are apart, also if their tensors have the same length."""
    segments = Segments.of(((40,),), method.granularity)
    first = memory_steps.series(40)[0]
    series = [first, [-2 * x for x in first]]

    def results(turns: Sequence[tuple[int, int]]) -> list[bytes]:
        """Run the turns, each a (step, worker): its first one offers, its second one keeps.

        Returns the bytes of all offers and buffers.
        """
        shared = copy.deepcopy(carried)
        states = [shared.state(torch.zeros(40)) for _ in series]
        joint = {name: torch.zeros(40) for name in shared.joint}
        offers: dict[tuple[int, int], Tensor] = {}
        for step, worker in turns:
            ctx = Context(segments, key=Key(7, step, worker), workers=2)
            ctx = ctx._replace(state=states[worker], joint=joint)
            if (step, worker) not in offers:
                offers[step, worker] = shared.offer(series[worker][step].clone(), ctx)
                continue
            offered = offers[step, worker]
            offers[step, worker] = offered.clone()
            if shared.feedback:
                sent = torch.where(torch.arange(40) % 3 == 0, offered, 0.0)
                shared.keep(offered, sent, ctx)
        buffers = [buffer for state in states for buffer in state.values()]
        return [raw(x) for x in (*(offers[turn] for turn in sorted(offers)), *buffers)]

    steps = range(memory_steps.STEPS)
    alone = [(step, worker) for worker in (0, 1) for step in steps for _ in ("offer", "keep")]
    mixed = [(step, worker) for step in steps for _ in ("offer", "keep") for worker in (0, 1)]
    if results(alone) != results(mixed):
        return "the results of one worker depend on the calls of another"

    def worker(rank: int) -> list[bytes]:
        state, joint = carried.state(torch.zeros(40)), {x: torch.zeros(40) for x in carried.joint}
        rows = []
        for step in steps:
            ctx = Context(segments, key=Key(7, step, rank), workers=2, state=state, joint=joint)
            offered = carried.offer(series[rank][step].clone(), ctx)
            rows.append(raw(offered))
            if carried.feedback:
                carried.keep(offered, torch.where(torch.arange(40) % 3 == 0, offered, 0.0), ctx)
        return [*rows, *map(raw, state.values())]

    wanted = [worker(rank) for rank in range(2)]
    if payloads.in_turns(carried, worker) != wanted:
        return "workers in threads mix their values"
    return ""


def _rescaled(carried: Memory, method: Compressor) -> str:
    """`rescale` multiplies the residuals in place, as they are views, and nothing else."""
    state = {name: inputs.values(9, i) for i, name in enumerate(carried.buffers)}
    before = {name: buffer.clone() for name, buffer in state.items()}
    buffers = dict(state)  # the engine passes views: a new tensor in `state` is lost
    for by in FACTORS:
        carried.rescale(state, by)
        for name, buffer in buffers.items():
            factor = by if name in carried.residuals else 1.0
            before[name] *= factor
            if not torch.equal(buffer, before[name]):
                return f"buffer {name!r} is not multiplied in place by {factor}"
    return ""


def _replicas(carried: Memory, method: Compressor) -> str:
    """Two runs of the same gradients end in the same bits, and do not share buffers."""
    ends = []
    for _ in range(2):
        running = exchange(method, carried)
        means = [running.mean(gradients(step), step).clone() for step in range(3)]
        ends.append(b"".join(map(raw, means)))
        tensors = [buffer for state in _states(running) for buffer in state.values()]
        if len({tensor.data_ptr() for tensor in tensors}) < len(tensors):
            return "two workers share a buffer"
    return "" if ends[0] == ends[1] else "a second run of the same gradients has other means"


def _overwritten(carried: Memory, method: Compressor) -> str:
    """Buffers do not alias gradients, buffers of the exchange, or the mean that a rule receives."""
    rules = UpdateRule(), exchanges.Overwriting()
    result = exchanges.overwritten(method, carried, *rules)
    return "" if result.holds else f"it aliases memory that is overwritten: {result.measured}"


SKIPPED = "not declared: "
CHECKS: Mapping[str, Callable[[Memory, Compressor], str]] = {
    "memory: buffers": _buffers,
    "memory: what was sent": _received,
    "memory: checkpoint": _checkpoint,
    "memory: finite": _finite,
    "memory: nothing lost in a step": _identity,
    "memory: constant gradient": _constant,
    "memory: exact code": _exact,
    "memory: sent later": _later,
    "memory: dense": _dense,
    "memory: equal gradients": _crowd,
    "memory: large inputs": _large,
    "memory: workers apart": _interleaved,
    "memory: overwritten": _overwritten,
    "memory: learning rate": _rescaled,
    "memory: replicas": _replicas,
}
"""The checks of a memory, by name; each returns what is wrong, or ""."""


def verify(carried: Memory, method: Compressor) -> Sequence[Outcome]:
    """Return one row per check of a memory beside a method."""
    rows = []
    for name, check in CHECKS.items():
        try:
            fault = check(carried, method)
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
        if fault.startswith(SKIPPED):
            rows.append(Outcome(name, "-", "-", "not declared", fault.removeprefix(SKIPPED)))
        else:
            verdict = "fails" if fault else "holds"
            rows.append(Outcome(name, fault or "0 faults", "0 faults", verdict, ""))
    return rows
