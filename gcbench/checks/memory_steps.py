"""A memory and an update rule on large inputs, compared with the same on small ones.

What a memory computes is its author's choice, so no formula is known here. But its results scale:
if a short tensor gives the same in one piece as in several, or at three neighbouring steps, then so
must a long tensor, and any other step. `Facts` are measured on short inputs, and `faults` holds all
other inputs to them. A memory that depends on the step by intent, say, is not compared over steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gcbench.checks import inputs
from gcbench.checks.sweeps import natural_steps
from gcbench.core.compressor import TILE, Compressor, Context, Key, Segments
from gcbench.core.memory import Memory
from gcbench.core.rule import UpdateRule

SHORT = 2 * TILE + 40
"""Elements of the inputs on which facts are measured."""
PIECE = 8 * TILE
"""Elements of the pieces to which long tensors are compared."""
LONG = (70_001, 2**20 + 33)
STEPS = 4
RANKS = (7, 77, 1000, 4095, 2**16, 2**24 - 1)
WORKERS = (4, 5, 8, 16, 17, 64, 401)
RATES = (0.1, 1e-3, 1e-8, 64.0)
SMALL = 2.0**-20
"""Scale of the gradients of a memory that clips."""
EXPONENTS = (-95, -60, -40, -20, 20, 40, 80)
"""Exponents of the powers of two by which gradients are multiplied."""


class Place(NamedTuple):
    """Where a run takes place, apart from its gradients."""

    step: int = 0
    rank: int = 0
    workers: int = 2
    lr: float = 1.0
    shapes: inputs.Shapes = ()
    """Shapes of the tensors; empty: a single one."""


HERE = Place()


class Steps:
    """Runs a memory and an update rule without a codec: a part of what is offered is sent."""

    def __init__(self, carried: Memory, rule: UpdateRule, method: Compressor) -> None:
        self.carried, self.rule, self.method = carried, rule, method

    def run(
        self, gradients: Sequence[Tensor], sent: Sequence[Tensor], place: Place = HERE
    ) -> list[Tensor]:
        """Return all results and buffers of each step, float32, shape (n,) each.

        `gradients`: one per step, float32, shape (n,). `sent`: the share of each element that is
        sent, of the same shapes. A rule that needs a warm-up gets two steps of it.
        """
        n = len(gradients[0])
        shapes = place.shapes or ((n,),)
        state = self.carried.state(torch.zeros(n))
        joint = {x: torch.zeros(n) for x in (*self.carried.joint, *self.rule.buffers)}
        segments = Segments.of(shapes, self.method.granularity)
        results = []
        for t, (gradient, share) in enumerate(zip(gradients, sent, strict=True)):
            key = Key(7, (place.step + t) % 2**32, place.rank)
            ctx = Context(segments, key=key, workers=place.workers, lr=place.lr)
            ctx = ctx._replace(state=state, joint=joint)
            carried, rule = self.carried, self.rule
            if rule.needs_warm_up and t < 2:
                carried, rule = carried.dense(), rule.dense()
            offered = carried.offer(gradient.clone(), ctx)
            results.append(offered.clone())
            decoded = offered * share
            if carried.feedback:
                carried.keep(offered, decoded.clone(), ctx)
            mean = carried.apply(decoded, ctx).clone()  # a rule may overwrite it
            results.append(rule.update(mean, ctx).clone())
            results += [buffer.clone() for buffer in (*state.values(), *joint.values())]
        return results

    def pieces(
        self, gradients: Sequence[Tensor], sent: Sequence[Tensor], size: int
    ) -> list[Tensor]:
        """Return `run` of consecutive pieces of this size, put together."""
        parts = zip(
            zip(*(torch.split(x, size) for x in gradients), strict=True),
            zip(*(torch.split(x, size) for x in sent), strict=True),
            strict=True,
        )
        return [torch.cat(column) for column in zip(*(self.run(*p) for p in parts), strict=True)]


def series(n: int, count: int = STEPS, scale: float = 1.0) -> tuple[list[Tensor], list[Tensor]]:
    """Return normal gradients of several steps, and the shares of elements that are sent."""
    gradients = [inputs.values(n, 977 * t + 5) * scale for t in range(count)]
    share = ((torch.arange(n) * 7919) % 3 == 0).float()
    return gradients, [share.roll(t) for t in range(count)]


def alike(actual: Sequence[Tensor], want: Sequence[Tensor]) -> bool:
    """Return whether tensors are equal up to rounding; NaN equals NaN."""
    return _first_difference(actual, want) is None


def _first_difference(actual: Sequence[Tensor], want: Sequence[Tensor]) -> str | None:
    for one, other in zip(actual, want, strict=True):
        if torch.equal(one, other):  # most are
            continue
        room = 1e-4 * other.abs() + 1e-6 * other.abs().amax()
        wrong = ~((one - other).abs() <= room) & ~(one.isnan() & other.isnan()) & (one != other)
        if bool(wrong.any()):
            i = int(wrong.nonzero()[0])
            return f"element {i:,} is {float(one[i]):.6g} and not {float(other[i]):.6g}"
    return None


def clips(steps: Steps) -> bool:
    """Return whether a memory, by its declarations, clips gradients or the error above a threshold.

    A gradient of any size is then offered as the same tensor, or, if the memory is lossy, leaves
    the same buffers. Without a momentum, an average or a loss, a memory must not clip.
    """
    carried, (gradients, sent) = steps.carried, series(SHORT, 1)
    if not (carried.lossy or carried.has_momentum or carried.averages):
        return False
    ends = [steps.run([x * 2.0**k for x in gradients], sent) for k in (80, 81)]
    offers_and_state = [0, *range(2, 2 + len(carried.buffers))] if carried.lossy else [0]
    return any(
        bool(ends[0][i].any()) and alike([ends[0][i]], [ends[1][i]]) for i in offers_and_state
    )


class Facts(NamedTuple):
    """What does not matter, on short inputs."""

    scale: float
    """That of the gradients: small for a memory that clips, so that it does not."""
    pieces: bool
    segments: bool
    step: bool
    rank: bool
    workers: bool
    lr: bool
    degrees: tuple[int, ...] | None
    """The power of its scale by which each result is multiplied; None: none."""


def measure(steps: Steps) -> Facts:
    """Return the facts of a memory and an update rule."""
    scale = SMALL if clips(steps) else 1.0
    short = series(SHORT, scale=scale)
    plain = steps.run(*short)

    def same(*places: Place) -> bool:
        return all(alike(steps.run(*short, place), plain) for place in places)

    # Far apart, as a memory may clip by intent.
    small = [steps.run([g * 2.0**-k for g in short[0]], short[1]) for k in (3, 20)]
    degrees: list[int] = []
    for one, other, large in zip(*small, plain, strict=True):
        want = [large, large]
        degrees += [
            d for d in (1, 0, 2) if alike([one * 2.0 ** (3 * d), other * 2.0 ** (20 * d)], want)
        ][:1]
    split = ((TILE,), (TILE // 2, 2), (40,))
    return Facts(
        scale=scale,
        pieces=alike(steps.pieces(*short, TILE), plain),
        segments=same(HERE._replace(shapes=split)),
        # A memory that drops errors on purpose may do so at some steps only.
        step=not steps.carried.lossy and same(*(HERE._replace(step=s) for s in (1, 2, 5))),
        rank=same(HERE._replace(rank=1), HERE._replace(rank=2)),
        workers=same(HERE._replace(workers=1), HERE._replace(workers=3)),
        lr=same(HERE._replace(lr=0.5)),
        degrees=tuple(degrees) if len(degrees) == len(plain) else None,
    )


def faults(steps: Steps) -> Iterator[str]:
    """Yield in which ways the results on other inputs are not those of short ones."""
    halves = HERE._replace(shapes=((20,), (4, 5)))
    for name, n, place, live in (
        ("one worker", 40, HERE._replace(workers=1), 40),
        ("one element", 1, HERE, 1),
        ("zeros", 40, HERE, 0),
        ("a tensor of zeros beside another one", 40, halves, 20),
    ):
        gradients, sent = series(n)
        for gradient in gradients:
            gradient[live:] = 0.0
        if not all(bool(result.isfinite().all()) for result in steps.run(gradients, sent, place)):
            yield f"{name}: values that are not finite"
    facts = measure(steps)
    if facts.pieces:
        for n in LONG:
            gradients, sent = series(n, scale=facts.scale)
            for x in (*gradients[1:3], sent[2]):
                x[PIECE : 2 * PIECE] = 0.0  # nothing arrives in one piece, and nothing is sent
            actual = steps.run(gradients, sent)
            fault = _first_difference(actual, steps.pieces(gradients, sent, PIECE))
            if fault:
                yield f"{n:,} elements: {fault}, as in a tensor of {PIECE:,}"
    if facts.segments:
        n = sum(shape[0] for shape in inputs.MANY)
        many = series(n, scale=facts.scale)
        actual = steps.run(*many, HERE._replace(shapes=inputs.MANY))
        if fault := _first_difference(actual, steps.run(*many)):
            yield f"{len(inputs.MANY):,} tensors: {fault}, as in a single one"
    yield from _elsewhere(steps, facts)
    if facts.degrees is not None:
        # Small constants of a rule, such as the epsilon of Adam, matter where gradients are small.
        exponents = [k for k in EXPONENTS if k > 0 or steps.rule.plain]
        if facts.scale == SMALL:
            exponents = [k for k in exponents if k < 0]
        if 2 in facts.degrees:
            exponents = [k for k in exponents if abs(k) <= 40]
        gradients, sent = series(SHORT, scale=facts.scale)
        plain = steps.run(gradients, sent)
        for k in exponents:
            scaled = steps.run([g * 2.0**k for g in gradients], sent)
            pairs = zip(scaled, facts.degrees, strict=True)
            actual = [x * 2.0 ** (-k * degree) for x, degree in pairs]
            if fault := _first_difference(actual, plain):
                yield f"gradients times 2^{k}: {fault} (divided by the scale)"


def _elsewhere(steps: Steps, facts: Facts) -> Iterator[str]:
    """Yield the first step, rank, number of workers and rate with other results than elsewhere."""
    short = series(40, STEPS if steps.rule.needs_warm_up else 2, facts.scale)
    plain = steps.run(*short)
    sweeps: dict[str, Sequence[Any]] = {
        "step": natural_steps(1400) if facts.step else (),
        "rank": RANKS if facts.rank else (),
        "workers": WORKERS if facts.workers else (),
        "lr": RATES if facts.lr else (),
    }
    for name, values in sweeps.items():
        for value in values:
            actual = steps.run(*short, HERE._replace(**{name: value}))
            if fault := _first_difference(actual, plain):
                yield f"{name} {value:,}: {fault}, as at other values of {name}"
                break
