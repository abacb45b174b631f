"""No memory: every gradient is compressed as it is."""

from __future__ import annotations

from dataclasses import dataclass

from gcbench.core.memory import Memory


@dataclass(frozen=True)
class NoMemory(Memory):
    """Nothing is carried."""
