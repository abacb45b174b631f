"""The folder of the kernel sources: `cuda/` in a checkout, `gcbench/csrc/` in a wheel."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from gcbench.core.errors import GcbenchError

_PACKAGE = Path(__file__).parents[1]


@cache
def kernel_sources() -> Path:
    """Return the folder of the `*.cuh`, `*.cu` and `*.cpp` files.

    Raises:
        GcbenchError: neither folder has them; the installation is incomplete.
    """
    places = (_PACKAGE / "csrc", _PACKAGE.parent / "cuda")
    for place in places:
        if (place / "common.cuh").is_file():
            return place
    raise GcbenchError(
        f"kernel sources are missing: common.cuh is in neither {places[0]} nor {places[1]}; "
        "reinstall gcbench"
    )


def cuda_families() -> list[str]:
    """Return the names of the CUDA kernel files, without `.cu`, in alphabetical order."""
    return sorted(path.stem for path in kernel_sources().glob("*.cu"))


def digest(*suffixes: str) -> str:
    """Return the hexadecimal SHA-256 of names and contents of all sources with these suffixes."""
    total = hashlib.sha256()
    for path in sorted(kernel_sources().iterdir()):
        if path.suffix in suffixes:
            total.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()
