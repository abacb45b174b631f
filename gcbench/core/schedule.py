"""Schedules of a compressor's fields: a constant, or values that change at given steps.

A schedule maps the first step of each value to the value: {0: 0.25, 100: 0.01} is 0.25 at steps 0
to 99 and 0.01 from step 100 on.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from typing import Any

from gcbench.core.errors import UsageError

Options = Mapping[str, Any]


STAGES = re.compile(r"\d+:[^/:]+(/\d+:[^/:]+)*")
"""The syntax of a schedule on the command line."""
CONSTANTS = {"null": None, "true": True, "false": False}
"""Constants as the command line writes them."""


def parsed(name: str, value: Any) -> Any:
    """Return a schedule given as a mapping or as text, 0:0.25/100:0.01; other values unchanged.

    `name`: the field's name, for errors.

    Raises:
        UsageError: a step is repeated or negative, or there is no value for step 0.
    """
    if isinstance(value, str) and STAGES.fullmatch(value):
        parts = [part.partition(":") for part in value.split("/")]
        stages = {int(step): _literal(text) for step, _, text in parts}
        if len(stages) < len(parts):
            raise UsageError(f"{name}={value!r}: a step is repeated; give each stage another step")
        value = stages
    return normalize(name, value)


def _literal(text: str) -> Any:
    """Return the number or constant that a text denotes, or the text."""
    text = text.strip()
    try:
        return CONSTANTS[text] if text in CONSTANTS else ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def normalize(name: str, value: Any) -> Any:
    """Return a schedule with its steps as sorted integers; any other value unchanged.

    Steps may be strings, as in JSON. `name`: the field's name, for errors.

    Raises:
        UsageError: a step is not an integer, negative or repeated, or there is no value for step 0.
    """
    if not isinstance(value, Mapping):
        return value
    try:
        stages = {int(step): item for step, item in value.items()}
        whole = all(int(step) == float(step) for step in value)
    except (TypeError, ValueError, OverflowError):
        whole = False
    if not whole:
        raise UsageError(
            f"{name}={dict(value)!r}: the keys of a schedule are steps, whole numbers, e.g. "
            "0:0.25/100:0.01"
        )
    if len(stages) < len(value):
        raise UsageError(
            f"{name}={dict(value)!r}: a step is repeated; give each stage another step"
        )
    if 0 not in stages or min(stages) < 0:
        raise UsageError(
            f"{name}={text(stages)}: a schedule starts at step 0 and has no negative steps, e.g. "
            "0:0.25/100:0.01"
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
    """Return the steps at which any field changes, sorted, starting with 0."""
    schedules = (value for value in options.values() if isinstance(value, Mapping))
    return sorted({0, *(start for value in schedules for start in value)})


def last(begin: Iterable[int], steps: Any) -> int:
    """Return the first step of the last stage that a run of this many steps reaches.

    `begin`: the first step of each stage. Without a valid number of steps: of the last one.
    """
    reached = [start for start in begin if not isinstance(steps, int) or start < max(1, steps)]
    return max(reached)


def text(stages: Mapping[int, Any]) -> str:
    """Return a schedule in the syntax of the command line: 0:0.25/100:0.01."""
    return "/".join(
        f"{step}:{'null' if value is None else value}" for step, value in stages.items()
    )
