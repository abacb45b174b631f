"""Schedules of a compressor's parameters: a value, or values by the step from which they hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gcbench.core.errors import UsageError

Options = Mapping[str, Any]


def normalize(name: str, value: Any) -> Any:
    """Return a schedule with integer steps in their order; any other value as it is.

    A schedule is a mapping from steps to values: {0: 0.25, 100: 0.01}. JSON writes the steps as
    strings.

    Raises:
        UsageError: a step is no number, or none is 0.
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
    """Return the values that hold at `step`."""
    return {
        name: value[max(start for start in value if start <= step)]
        if isinstance(value, Mapping)
        else value
        for name, value in options.items()
    }


def starts(options: Options) -> list[int]:
    """Return the steps from which other values hold, 0 first."""
    schedules = (value for value in options.values() if isinstance(value, Mapping))
    return sorted({0, *(start for value in schedules for start in value)})


def text(stages: Mapping[int, Any]) -> str:
    """Return how the command line writes a schedule."""
    return "/".join(f"{step}:{value}" for step, value in stages.items())
