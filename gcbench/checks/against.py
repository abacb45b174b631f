"""Compare a method with an author's reference of a few lines of numpy.

The reference is a Python file that defines `decoded`, and may define `mean` and `TOLERANCE`:

    def decoded(x, segments, ...):  # what x decodes to
    def mean(decoded):              # float64 (workers, n) -> (n,); default: the average
    TOLERANCE = 1e-6                # of the segment's largest magnitude; default 0: bit for bit

`x` is a float32 array of shape (n,), `segments` a list of slices. `decoded` may ask for further
arguments by their names: `uniform`, one draw from [0, 1) per element, float32, the numbers that
`gcbench.ops.random.uniform` gives the method; `shared`, what the workers agreed on; `shapes`,
`seed`, `step`, `rank` and `offset`.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gcbench import ops
from gcbench.checks import exchanges, inputs
from gcbench.checks.calls import Calls
from gcbench.checks.cases import Case
from gcbench.checks.oracle import profile
from gcbench.checks.outcome import Outcome
from gcbench.checks.trial import Trial
from gcbench.core import memory
from gcbench.core.compressor import Compressor, Key, MultiRoundCompressor, Segments
from gcbench.core.errors import GcbenchError, UsageError
from gcbench.core.exchange import Lane

ARGUMENTS = ("uniform", "shared", "shapes", "seed", "step", "rank", "offset")
STEPS = 30
WORKERS = 3


class Reference(NamedTuple):
    """An author's definition of a method."""

    path: Path
    function: Callable[..., Any]
    average: Callable[..., Any]
    tolerance: float
    wanted: tuple[str, ...]

    def decoded(self, x: Tensor, segments: Segments, shared: Tensor, key: Key) -> Tensor:
        """Return what x decodes to, float32, shape (n,).

        Raises:
            GcbenchError: the reference raises, or returns another shape.
        """
        arguments: dict[str, Any] = {
            "shared": shared.numpy(),
            "shapes": segments.shapes,
            **{name: getattr(key, name) for name in ("seed", "step", "rank", "offset")},
        }
        if "uniform" in self.wanted:
            arguments["uniform"] = ops.random.uniform(key, len(x)).numpy()
        places = [slice(a, b) for a, b in itertools.pairwise(segments.offsets)]
        options = {name: arguments[name] for name in self.wanted}
        return self._called(self.function, len(x), x.numpy().copy(), places, **options)

    def mean(self, decoded: Sequence[Tensor]) -> Tensor:
        """Return the mean of the workers, float32, shape (n,)."""
        rows = np.stack([one.numpy() for one in decoded]).astype(np.float64)
        return self._called(self.average, len(decoded[0]), rows)

    def _called(
        self, function: Callable[..., Any], n: int, *arguments: Any, **options: Any
    ) -> Tensor:
        try:
            result = np.asarray(function(*arguments, **options))
        except Exception as error:
            raise GcbenchError(f"{self.path}: {function.__name__} raises {error!r}") from error
        if result.shape != (n,):
            raise GcbenchError(
                f"{self.path}: {function.__name__} returned shape {result.shape}; ({n},) expected"
            )
        return torch.from_numpy(result.astype(np.float32))


def load(path: Path) -> Reference:
    """Return the reference of a file.

    Raises:
        UsageError: the file cannot be read, lacks `decoded`, or asks for an unknown argument.
    """
    spec = importlib.util.spec_from_file_location(f"gcbench_reference_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UsageError(f"--against {path}: a Python file is expected")
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"--against {path} does not load: {error!r}") from error
    function = getattr(module, "decoded", None)
    if not callable(function):
        raise UsageError(f"--against {path}: define decoded(x, segments) -> array of shape (n,)")
    wanted = tuple(inspect.signature(function).parameters)[2:]
    if unknown := [name for name in wanted if name not in ARGUMENTS]:
        raise UsageError(
            f"--against {path}: decoded asks for {', '.join(unknown)}; behind x and segments the "
            f"names {', '.join(ARGUMENTS)} are available"
        )
    stated = getattr(module, "TOLERANCE", 0.0)
    tolerance = float(stated) if isinstance(stated, Real) else math.nan
    if not 0 <= tolerance < 1:
        raise UsageError(f"--against {path}: TOLERANCE = {stated!r}; from 0 to below 1 allowed")
    average = getattr(module, "mean", lambda decoded: decoded.mean(0))
    if not callable(average):
        raise UsageError(f"--against {path}: mean = {average!r}; define mean(decoded) -> (n,)")
    return Reference(path, function, average, tolerance, wanted)


def compare(method: Compressor, reference: Reference) -> Iterator[Outcome]:
    """Yield the rows of the comparison: single calls, means, and a training run.

    Raises:
        UsageError: the method is one that a reference cannot describe.
    """
    if isinstance(method, MultiRoundCompressor):
        raise UsageError(
            f"--against: {method.name} works in rounds, which a reference cannot describe"
        )
    bound = "the same bits" if not reference.tolerance else f"within {reference.tolerance:g}"
    done, faults = _single_calls(method, reference)
    for name, fault in faults.items():
        verdict = "fails" if fault else "holds"
        yield Outcome(f"reference: {name}", f"{done} inputs", bound, verdict, fault)
    if all(faults.values()):
        return
    name = f"reference: {STEPS} steps of training"
    if "allgather" not in method.legal_collectives():
        why = "needs an all-gather, which the method does not list"
        yield Outcome(name, "-", bound, "not declared", why)
        return
    fault = _training(method, reference)
    yield Outcome(name, f"{WORKERS} workers", bound, "fails" if fault else "holds", fault)


def _cases() -> Iterator[Case]:
    shapes: list[inputs.Shapes] = [inputs.MIXED, ((1537,), (1,), (33,)), ((5000,),), ((0,), (3,))]
    families = ("normal", "zeros", "heavy tails", "segments of different norms", "constant")
    for number, values in enumerate(families):
        for scale in (0, -40, 40):
            yield Case(
                shapes[number % 4],
                values=values,
                scale=scale,
                spread=("equal scales", "scales 2^0, 2^-10, 2^-20")[number % 2],
                workers=3,
                step=number * 500,
                rank=number,
            )
    yield Case(((70_001,),), workers=2)


def _single_calls(method: Compressor, reference: Reference) -> tuple[int, dict[str, str]]:
    calls = Calls(method)
    facts = profile(calls)
    faults = {"decode(encode(x))": "", "mean": ""}
    done = 0
    for case in _cases():
        done += 1
        trial = Trial(calls, facts, case)
        segments, shared = trial.segments, trial.shared
        payloads, wanted = [], []
        for rank, x in enumerate(trial.xs):
            payloads.append(calls.encode(x, segments, shared, case.key(rank)))
            actual = calls.decode(payloads[-1], segments, shared)
            wanted.append(reference.decoded(x, segments, shared, case.key(rank)))
            fault = _apart(actual, wanted[-1], segments, reference.tolerance)
            faults["decode(encode(x))"] = faults["decode(encode(x))"] or (
                f"{fault} [{case}]" if fault else ""
            )
        if trial.has_mean(len(payloads)):
            actual = calls.mean(payloads, segments, shared)
            fault = _apart(actual, reference.mean(wanted), segments, max(reference.tolerance, 1e-6))
            faults["mean"] = faults["mean"] or (f"{fault} [{case}]" if fault else "")
    return done, faults


def _apart(actual: Tensor, want: Tensor, segments: Segments, tolerance: float) -> str:
    """Return the first element that is too far from the reference; "" if there is none."""
    largest = ops.statistics.absmax(torch.maximum(actual.abs(), want.abs()), segments)
    room = tolerance * inputs.per_segment(largest.double(), segments)
    wrong = ~((actual.double() - want.double()).abs() <= room)
    if not bool(wrong.any()):
        return ""
    i = int(wrong.nonzero()[0])
    value, reference = float(actual[i]), float(want[i])
    return f"element {i:,} of {len(actual):,} is {value:.8g}, by the reference {reference:.8g}"


def _training(method: Compressor, reference: Reference) -> str:
    """Train a softmax regression on both sides; return where the parameters part, or ""."""
    features, classes, each, rate = 40, 8, 32, 0.1
    shapes = ((classes, features), (classes,))
    segments = Segments.of(shapes, method.granularity)
    size = classes * features
    x = inputs.values(WORKERS * each * features, 11).view(WORKERS, each, features)
    labels = (x[:, :, :classes] + 0.5 * x[:, :, classes : 2 * classes]).argmax(2)

    def gradient(parameters: Tensor, rank: int, step: int) -> Tensor:
        weight, bias = parameters[:size].view(classes, features), parameters[size:]
        rows = torch.arange(each // 2) * 2 + step % 2
        features_of_step, right = x[rank][rows], labels[rank][rows]
        off = torch.softmax(features_of_step @ weight.T + bias, 1)
        off[torch.arange(len(rows)), right] -= 1
        off /= len(rows)
        return torch.cat([(off.T @ features_of_step).reshape(-1), off.sum(0)])

    feeds = method.memory == "residual"
    carried = memory.make(
        "residual" if feeds else "none", dict(method.memory_options) if feeds else {}
    )
    exchange = exchanges.simulated(Lane(method, "allgather", 0, segments, carried), WORKERS)
    decay = float(getattr(carried, "decay", 0.0))
    ours = torch.zeros(segments.numel)
    theirs = torch.zeros(segments.numel)
    residuals = [torch.zeros(segments.numel) for _ in range(WORKERS)]
    for step in range(STEPS):
        mean = exchange.mean([gradient(ours, rank, step) for rank in range(WORKERS)], step)
        ours = ours - rate * mean
        offered = [
            torch.add(gradient(theirs, rank, step), residuals[rank], alpha=decay)
            for rank in range(WORKERS)
        ]
        shared = Calls(method).shared(offered, segments, Key(7, step, 0))
        sent = [
            reference.decoded(one, segments, shared, Key(7, step, rank))
            for rank, one in enumerate(offered)
        ]
        if feeds:
            residuals = [one - actual for one, actual in zip(offered, sent, strict=True)]
        theirs = theirs - rate * reference.mean(sent)
        off = float(
            (ours.double() - theirs.double()).abs().amax() / ours.abs().amax().clamp(min=1e-30)
        )
        if not off <= max(STEPS * reference.tolerance, 1e-4):
            return f"step {step}: parameters differ by {off:.3g} of the largest"
    return ""
