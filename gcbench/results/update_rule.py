"""Whether a run applies its update by the rule that the method's source has for it.

A method declares the rule in `Compressor.recipe`. A run may have another one; it is then marked,
on stderr when it starts and in comparisons. All of it follows from the stored config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gcbench.core.errors import GcbenchError
from gcbench.core.schema import UPDATE_RULE
from gcbench.results import declared

OUTER = {"momentum": "outer_momentum", "nesterov": "outer_nesterov"}
"""With local steps it is the outer step that applies what was decoded, and it is SGD."""


class Other(NamedTuple):
    """Settings of a run that are not those of its method's rule, by name: what came, the rule."""

    came: dict[str, Any]
    declared: dict[str, Any]

    @property
    def words(self) -> str:
        """What came and what the source has, such as "optimizer=adam, not sgd"."""
        return "; ".join(
            f"{key}={_word(self.came[key])}, not {_word(self.declared[key])}" for key in self.came
        )

    @property
    def flags(self) -> str:
        """The flags that give the run the rule of its method."""
        words = []
        for key, value in self.declared.items():
            flag = f"--{key.replace('_', '-')}"
            if isinstance(value, bool):
                words.append(flag if value else flag.replace("--", "--no-", 1))
            else:
                words.append(f"{flag} {_word(value)}")
        return " ".join(words)


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def other(config: Mapping[str, Any]) -> Other | None:
    """Return the settings of a stored config that are not those of the method's rule.

    None: the run has the rule that its method declares, or the method declares none, or it cannot
    be made here (a third party's that is not installed).
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
