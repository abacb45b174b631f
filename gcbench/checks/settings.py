"""Do the settings of a method have an effect, and do those that no variant has work?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from gcbench.checks import calls, inputs, oracle, statistics
from gcbench.checks.calls import Calls
from gcbench.checks.cases import Case
from gcbench.checks.oracle import raw
from gcbench.checks.outcome import Measurement, NotDeclaredError
from gcbench.checks.trial import attempt
from gcbench.core import memory, purposes, registry
from gcbench.core.compressor import Compressor, Key, MultiRoundCompressor, Segments
from gcbench.core.errors import UsageError

BUCKETS: tuple[inputs.Shapes, ...] = (inputs.MIXED, ((70, 65), (33,)), ((40_009,), (65,)))
FAMILIES = ("normal", "heavy tails", "elements of different scales", "zeros")
PLACES = ((1, 1, 1.0), (3, 0, 1.0), (3, 1001, 0.1))
"""Workers, step and learning rate."""


def effective(method: Compressor) -> Measurement:
    """Other values than the default of the fields change something that the method does.

    Compared are what it declares beside its claims, and what it sends and decodes for several
    buckets, values, steps and numbers of workers. A field that no function reads changes nothing.
    """
    fields = registry.changed(method)
    if not fields:
        raise NotDeclaredError("all fields are at their defaults")
    try:
        default = registry.make(method.name, type(method), {})
    except UsageError as error:
        raise NotDeclaredError(f"no configuration is the default: {error}") from None
    for actual, want in zip(_observed(method), _observed(default), strict=False):
        if actual != want:
            return Measurement("a difference", "a difference", True, ", ".join(fields))
    note = "remove a field that no function reads, or the variant of one that changes only speed"
    return Measurement(f"{', '.join(fields)}: no difference", "a difference", False, note)


GRANULARITIES = ("tensor", "model", "column", 100, 8192)
TRIED = (
    Case(inputs.MIXED, workers=3),
    Case(inputs.MIXED, values="segments of different norms", workers=2, step=499, rank=77),
    Case(((40, 50), (33,)), values="positive", workers=5, lr=0.1, shard=True),
    Case(((64, 48), (24, 5, 3, 3), ()), values="signs", workers=2, residual="zero"),
    Case(((70, 131), (33,)), workers=2),
)


def untried(method: Compressor) -> Measurement:
    """Values of fields that no variant has work, on a few inputs of the search.

    Random methods and those in rounds are also tested for bias, or against their error bound: a
    decoder may have the default's number in its code. Values that a user cannot set are left out.
    """
    if registry.changed(method):
        raise NotDeclaredError("tried beside the default configuration")
    done = []
    for name, value in _other_values(method):
        try:
            other = registry.make(method.name, type(method), {name: value})
        except UsageError:
            continue
        running, text = Calls(other), f"{name}={value}"
        profile = oracle.profile(running)
        for case in TRIED:
            fault, _ = attempt(running, profile, case)
            if fault is not None:
                return Measurement(f"{text}: {fault}", "as the default", False, str(case))
        checks = [statistics.unbiased] if other.claims.unbiased else []
        rounds = isinstance(other, MultiRoundCompressor)
        if other.claims.contractive and (rounds or profile.random):
            checks.append(statistics.contraction)
        for check in checks:
            drawn = check(other)
            if not drawn.holds:
                return Measurement(f"{text}: {drawn.measured}", drawn.bound, False, drawn.note)
        done.append(text)
    if not done:
        raise NotDeclaredError("no field with a value that no variant has")
    return Measurement(", ".join(done), "as the default", True)


def is_number(value: object) -> bool:
    """Return whether a field has a number; true and false are a switch."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _other_values(method: Compressor) -> Iterator[tuple[str, Any]]:
    """Yield fields, and their values that neither the default nor a variant has."""
    hints = get_type_hints(type(method))
    for name in registry.fields(type(method)):
        value = getattr(method, name)
        seen = [value, *(options.get(name, value) for options in method.variants)]
        choices: tuple[Any, ...] = (False, True) if isinstance(value, bool) else ()
        if get_origin(hints.get(name)) is Literal:
            choices = get_args(hints[name])
        elif name == "granularity":
            choices = GRANULARITIES
        elif is_number(value):
            whole = isinstance(value, int)
            choices = (value - 1, value + 1, 2 * value) if whole else (value / 2, 2 * value)
        yield from ((name, each) for each in dict.fromkeys(choices) if each not in seen)


def _observed(method: Compressor) -> Iterator[Any]:
    """Yield what is declared, then results of each input, in the same order for all methods."""
    carried = memory.of(method)
    yield registry.call(carried), repr(method.rule), dict(method.recipe)
    yield method.legal_collectives(), method.granularity
    running = Calls(method)
    for shapes in BUCKETS:
        segments = calls.segments_of(method, shapes)
        for family in FAMILIES:
            xs = [inputs.EVERY_FAMILY[family](segments, rank) for rank in range(3)]
            for workers, step, running.lr in PLACES:
                running.workers = workers
                yield list(_results(running, xs[:workers], segments, Key(7, step, 0)))


def _results(running: Calls, xs: list[torch.Tensor], segments: Segments, key: Key) -> Iterator[Any]:
    """Yield what the workers send, and what is decoded, as bytes."""
    method = running.method
    if isinstance(method, MultiRoundCompressor):
        state = running.initial_state(segments, key)
        for step in range(2):
            at = key._replace(step=key.step + step)
            ((mean, state), *_) = running.rounds(xs, segments, state, at, torch.zeros(len(xs[0])))
            yield raw(mean), raw(state)
        return
    shared = running.shared(xs, segments, key)
    payloads = [
        running.encode(x, segments, shared, key._replace(rank=rank)) for rank, x in enumerate(xs)
    ]
    yield [(payload.layout, raw(payload.to_bytes())) for payload in payloads]
    yield [raw(running.decode(payload, segments, shared)) for payload in payloads]
    if "allgather" in method.legal_collectives() and len(payloads) > 1:
        yield raw(running.mean(payloads, segments, shared))
    if "twoshot" in method.legal_collectives():
        merged = running.merge(payloads, segments, shared, key._replace(stream=purposes.MERGE))
        yield raw(merged.to_bytes()), raw(running.decode(merged, segments, shared))
