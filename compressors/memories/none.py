"""No memory: the gradient itself is compressed."""

from __future__ import annotations

from dataclasses import dataclass

from gcbench.core.memory import Memory


@dataclass(frozen=True)
class NoMemory(Memory):
    """No buffers."""
