"""Deviations of a run's update rule from that of the method's source.

A method declares the rule in `Compressor.recipe`. A run that overrides it is flagged on stderr when
it starts, and in comparisons. Everything follows from the stored config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gcbench.core.errors import GcbenchError
from gcbench.core.schema import UPDATE_RULE
from gcbench.results import declared

OUTER = {"momentum": "outer_momentum", "nesterov": "outer_nesterov"}
"""With local steps the outer step, which is SGD, applies the decoded mean."""


class Other(NamedTuple):
    """Settings of a run that differ from its method's rule, and the values of the rule, by name."""

    actual: dict[str, Any]
    declared: dict[str, Any]

    @property
    def summary(self) -> str:
        """The differences, such as "optimizer=adam, not sgd"."""
        return "; ".join(
            f"{key}={_text(self.actual[key])}, not {_text(self.declared[key])}"
            for key in self.actual
        )

    @property
    def flags(self) -> str:
        """The command-line flags for the rule of the method."""
        flags = []
        for key, value in self.declared.items():
            flag = f"--{key.replace('_', '-')}"
            if isinstance(value, bool):
                flags.append(flag if value else flag.replace("--", "--no-", 1))
            else:
                flags.append(f"{flag} {_text(value)}")
        return " ".join(flags)


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def other(config: Mapping[str, Any]) -> Other | None:
    """Return the settings of a stored config that differ from the method's rule.

    None: there are none, the method declares no rule, or the method is not installed.
    """
    method = declared.of_method(config)
    if method is None:
        return None
    rule = {key: method.recipe[key] for key in UPDATE_RULE if key in method.recipe}
    memory = str(config.get("memory", method.memory))
    try:
        if rule and memory != "none" and declared.has_momentum(memory):
            # It replaces the optimizer's, which is then off.
            rule = {key: value for key, value in rule.items() if key not in OUTER}
    except GcbenchError:
        return None
    if config.get("local_steps"):
        rule = {OUTER[key]: value for key, value in rule.items() if key in OUTER}
    apart = [key for key in rule if key in config and config[key] != rule[key]]
    if not apart:
        return None
    return Other({key: config[key] for key in apart}, {key: rule[key] for key in apart})
