"""CUDA kernels."""

from __future__ import annotations

from gcbench.ops.backend import Kernels

KERNELS: Kernels = {}


def status() -> tuple[bool, str]:
    """Return whether the kernels can be used here, and what they are or why not."""
    return False, "there are no CUDA kernels yet"
