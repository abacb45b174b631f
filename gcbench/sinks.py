"""Moved to `gcbench.training.sinks`; this path works for one more release."""

from __future__ import annotations

import warnings
from typing import Any

from gcbench.training import sinks as _moved

warnings.warn(
    "gcbench.sinks has moved: import its names from gcbench, or from gcbench.training.sinks",
    DeprecationWarning,
    stacklevel=2,
)


def __getattr__(name: str) -> Any:
    return getattr(_moved, name)
