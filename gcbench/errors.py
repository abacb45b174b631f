"""Moved to `gcbench.core.errors`; this path works for one more release."""

from __future__ import annotations

import warnings
from typing import Any

from gcbench.core import errors as _moved

warnings.warn(
    "gcbench.errors has moved: import its names from gcbench, or from gcbench.core.errors",
    DeprecationWarning,
    stacklevel=2,
)


def __getattr__(name: str) -> Any:
    return getattr(_moved, name)
