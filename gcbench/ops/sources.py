"""Where the kernels' sources are, and what they are."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import gcbench


@cache
def folder() -> Path:
    """Return the folder of the kernel sources: `csrc` of an installed package, else `cuda`."""
    package = Path(gcbench.__file__).parent
    inside = package / "csrc"
    return inside if inside.is_dir() else package.parent / "cuda"


def digest(*suffixes: str) -> str:
    """Return the SHA-256 of all sources with these suffixes, names and contents, in hexadecimal."""
    total = hashlib.sha256()
    for path in sorted(folder().iterdir()):
        if path.suffix in suffixes:
            total.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()
