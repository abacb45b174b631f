"""Moved to `gcbench.core.memory`; this path works for one more release."""

from __future__ import annotations

import warnings
from typing import Any

from gcbench.core import memory as _moved

warnings.warn(
    "gcbench.memory has moved: import its names from gcbench, or from gcbench.core.memory",
    DeprecationWarning,
    stacklevel=2,
)


def __getattr__(name: str) -> Any:
    return getattr(_moved, name)
