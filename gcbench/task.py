"""Moved to `gcbench.core.task`; this path works for one more release."""

from __future__ import annotations

import warnings
from typing import Any

from gcbench.core import task as _moved

warnings.warn(
    "gcbench.task has moved: import its names from gcbench, or from gcbench.core.task",
    DeprecationWarning,
    stacklevel=2,
)


def __getattr__(name: str) -> Any:
    if name in ("Dropout", "set_dropout_key"):
        from gcbench.training import dropout

        return getattr(dropout, name)
    return getattr(_moved, name)
