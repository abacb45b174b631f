"""Schedules of a compressor's fields: a field has one value, or values that change at given steps.

A schedule is a mapping from the step at which a value begins to hold to the value: {0: 0.25,
100: 0.01} is 0.25 at steps 0 to 99 and 0.01 from step 100 on.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from gcbench.core.errors import UsageError

Options = Mapping[str, Any]


STAGES = re.compile(r"\d+:[^/:]+(/\d+:[^/:]+)*")
"""How the command line writes a schedule."""


def parsed(name: str, value: Any) -> Any:
    """Return a schedule that came as a mapping or as text, 0:0.25/100:0.01; others as they are.

    `name` is the field's, for the error.

    Raises:
        UsageError: a step comes twice, is below 0, or no value holds at step 0.
    """
    if isinstance(value, str) and STAGES.fullmatch(value):
        parts = [part.partition(":") for part in value.split("/")]
        stages = {int(step): _literal(text) for step, _, text in parts}
        if len(stages) < len(parts):
            raise UsageError(f"{name}={value!r}: a step comes twice; give each stage its own step")
        value = stages
    return normalize(name, value)


def _literal(text: str) -> Any:
    """Return the number or constant that a text is, or the text."""
    try:
        return ast.literal_eval(text.strip())
    except (SyntaxError, ValueError):
        return text.strip()


def normalize(name: str, value: Any) -> Any:
    """Return a schedule with its steps as sorted integers; any other value as it is.

    The steps may come as strings, as in JSON. `name` is the field's, for the error.

    Raises:
        UsageError: a step is no integer or below 0, or no value holds at step 0.
    """
    if not isinstance(value, Mapping):
        return value
    try:
        stages = {int(step): item for step, item in value.items()}
    except (TypeError, ValueError):
        raise UsageError(
            f"{name}: a schedule has steps for keys, e.g. 0:0.25/100:0.01, not {dict(value)!r}"
        ) from None
    if 0 not in stages or min(stages) < 0:
        raise UsageError(
            f"{name}: a schedule says what holds from step 0 on, e.g. 0:0.25/100:0.01, "
            f"not {text(stages)}"
        )
    return dict(sorted(stages.items()))


def at(options: Options, step: int) -> dict[str, Any]:
    """Return the value of each field at `step`."""
    return {
        name: value[max(start for start in value if start <= step)]
        if isinstance(value, Mapping)
        else value
        for name, value in options.items()
    }


def starts(options: Options) -> list[int]:
    """Return the steps at which the value of any field changes, sorted, with 0 as the first."""
    schedules = (value for value in options.values() if isinstance(value, Mapping))
    return sorted({0, *(start for value in schedules for start in value)})


def text(stages: Mapping[int, Any]) -> str:
    """Return a schedule as the command line writes it: 0:0.25/100:0.01."""
    return "/".join(f"{step}:{value}" for step, value in stages.items())
