"""The list of properties that a method may declare, and the configurations they are checked on.

Each check depends on what the method declares and never on its name, so plug-ins of third parties
are checked in the same way. The contract of the functions themselves is the search's subject, see
`gcbench.checks.adversary`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from gcbench.checks import exchanges, payloads, settings, statistics
from gcbench.checks.outcome import Measurement, NotDeclaredError, Outcome
from gcbench.core import registry
from gcbench.core.compressor import Compressor, Context, Segments

CHECKS: Mapping[str, Callable[[Compressor], Measurement]] = {
    "settings": settings.effective,
    "other settings": settings.untried,
    "workers in threads": payloads.concurrent,
    "number of threads": payloads.threads,
    "nominal bits": payloads.nominal_bits,
    "independent noise": statistics.independent,
    "correlated noise": statistics.correlated,
    "unbiased": statistics.unbiased,
    "variance": statistics.variance,
    "contraction": statistics.contraction,
    "error on normal input": statistics.gaussian_error,
    "fair ties": statistics.fair_ties,
    "exact small integers": exchanges.exact_means,
    "same gradient again": exchanges.settled,
    "same mean in collectives": exchanges.collectives,
    "nothing lost over steps": exchanges.telescoping,
    "buffers": exchanges.buffers,
    "checkpoint": exchanges.resumed,
    "update rule": exchanges.updates,
    "illegal refused": payloads.illegal,
    "corrupt payloads": payloads.corrupt,
}
"""All checks by name, in the order of the table."""


def run(method: Compressor, name: str) -> Outcome:
    """Run one check; an exception in it is a failure, with the exception as the note."""
    try:
        result = CHECKS[name](method)
    except NotDeclaredError as reason:
        return Outcome(name, "-", "-", "not declared", str(reason))
    except Exception as error:
        return Outcome(name, "-", "-", "fails", f"{type(error).__name__}: {error}")
    verdict = "holds" if result.holds else "fails"
    return Outcome(name, str(result.measured), str(result.bound), verdict, result.note)


def configurations(name: str) -> tuple[tuple[str, Compressor], ...]:
    """Return the registered method's variants: their options as text, and the compressor."""
    return tuple(_labelled(name, options) for options in variants(name))


def _labelled(name: str, options: Mapping[str, Any]) -> tuple[str, Compressor]:
    """Return one configuration: its options as text, and the compressor."""
    text = " ".join(f"{key}={value}" for key, value in options.items())
    return text, registry.compressor(name, **options)


def variants(name: str) -> tuple[Mapping[str, Any], ...]:
    """Return the options of a registered method's variants; the default is always among them."""
    declared = registry.compressor(name).variants
    if any(not registry.changed(registry.compressor(name, **options)) for options in declared):
        return declared
    return ({}, *declared)


def chosen(name: str, options: Mapping[str, Any] | None) -> list[tuple[str, Compressor]]:
    """Return (options as text, method) of one configuration, or of each declared variant."""
    return [_labelled(name, options)] if options else list(configurations(name))


def claims_anything(name: str, options: Mapping[str, Any] | None = None) -> bool:
    """Return whether some of what is checked makes a claim about the decoded values."""
    claims = [method.claims for _, method in chosen(name, options)]
    return any(c.unbiased or c.contractive or c.signs or c.exact_for for c in claims)


def unclaimed_rule(name: str, options: Mapping[str, Any] | None = None) -> bool:
    """Return whether a configuration has an update rule and claims no uncompressed optimizer."""
    methods = [method for _, method in chosen(name, options)]
    return any(not m.rule.plain and _lacks_optimizer(m) for m in methods)


def _lacks_optimizer(method: Compressor) -> bool:
    """Return whether `uncompressed` and `synchronized`, which may return lists, are undeclared."""
    gradients, warm_up = [torch.zeros(1)] * (exchanges.WARM_UP + 1), exchanges.WARM_UP
    try:
        return (
            method.claims.uncompressed(gradients, warm_up) is None
            and method.claims.synchronized(gradients, Context(Segments.of([(1,)]))) is None
        )
    except Exception:  # the row "update rule" has it
        return False
