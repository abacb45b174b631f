"""CUDA kernels compiled at run time by NVRTC, through cuda-core, and cached on disk.

The target is a cubin for one architecture, so compiling needs neither driver nor GPU, and loading
compiles nothing. cuda-core is imported when something is compiled.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import os
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from gcbench.core.errors import GcbenchError
from gcbench.ops.sources import cuda_families, kernel_sources

INSTALL = "pip install 'gcbench[cuda]'"
"""How to install cuda-core; NVRTC comes with every CUDA build of torch."""

OPTIONS: dict[str, Any] = {
    "std": "c++17",
    "fma": False,  # no contraction, even if a kernel violates the rules of common.cuh
    "ftz": False,
    "prec_div": True,
    "prec_sqrt": True,
}
"""Arguments of `cuda.core.ProgramOptions`, including all that affect floating-point results."""

_DIGEST = hashlib.sha256().digest_size
_warned = False


class CompileError(GcbenchError):
    """NVRTC rejects a kernel file (the message has its log), or is not installed."""


class Compiled(NamedTuple):
    """The compiler's output."""

    cubin: bytes
    log: str
    """ptxas' report on registers and spills if requested, else empty."""


def _core() -> Any:
    try:
        return importlib.import_module("cuda.core")
    except ImportError as error:
        raise CompileError(f"cuda-core cannot be imported ({error}): {INSTALL}") from error


@cache
def nvrtc_version() -> tuple[int, int]:
    """Return NVRTC's version, (major, minor).

    Raises:
        CompileError: NVRTC is not installed.
    """
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        code, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise CompileError(
            f"NVRTC cannot be loaded ({error}): install a CUDA build of torch, or "
            "pip install cuda-bindings nvidia-cuda-nvrtc"
        ) from error
    if int(code):
        raise CompileError(f"NVRTC does not report its version: {code}")
    return int(major), int(minor)


def _path(family: str) -> Path:
    path = kernel_sources() / f"{family}.cu"
    if not path.is_file():
        choices = ", ".join(cuda_families())
        raise CompileError(
            f"no kernel file {family}.cu in {path.parent}: expected one of {choices}"
        )
    return path


def compile_family(family: str, arch: str, *, verbose: bool = False) -> Compiled:
    """Compile `<family>.cu` for `arch` ("sm_90"), without the cache.

    With `verbose` the log contains the registers and spilled bytes of each kernel.

    Raises:
        CompileError: the family is unknown, the source has an error, this NVRTC does not know the
            architecture, or NVRTC is not installed.
    """
    path, core = _path(family), _core()
    nvrtc_version()
    log = io.StringIO()
    try:
        options = core.ProgramOptions(
            name=path.name,
            arch=arch,
            include_path=str(path.parent),
            ptxas_options="-v" if verbose else None,
            **OPTIONS,
        )
        program = core.Program(path.read_text(), "c++", options)
        cubin = bytes(program.compile("cubin", logs=log).code)
    except Exception as error:  # cuda-core's own exceptions, which contain NVRTC's log
        raise CompileError(f"{path.name} cannot be compiled for {arch}: {error}") from error
    return Compiled(cubin, log.getvalue())


def _key(family: str, arch: str) -> str:
    """Return the file name of a compiled family, with a hash of sources, options and versions."""
    path = _path(family)
    digest = hashlib.sha256()
    for piece in (arch, repr(sorted(OPTIONS.items())), repr(nvrtc_version())):
        digest.update(piece.encode() + b"\0")
    for source in (path, *sorted(path.parent.glob("*.cuh"))):
        text = source.read_bytes()
        digest.update(f"{source.name} {len(text)}\0".encode() + text)
    return f"{family}-{arch}-{digest.hexdigest()[:32]}.cubin"


def cached_cubin(family: str, arch: str) -> bytes:
    """Return `<family>.cu` compiled for `arch`, from the cache on disk if possible.

    A truncated or altered cache entry is compiled again. If the cache cannot be written, there is
    one RuntimeWarning, and every process compiles separately.

    Raises:
        CompileError: see `compile_family`.
    """
    from gcbench.core import data

    folder, name = data.cache() / "kernels", _key(family, arch)
    try:
        entry = (folder / name).read_bytes()
    except OSError:
        entry = b""
    cubin = entry[_DIGEST:]
    if cubin and hashlib.sha256(cubin).digest() == entry[:_DIGEST]:
        return cubin
    cubin = compile_family(family, arch).cubin
    _store(folder, name, hashlib.sha256(cubin).digest() + cubin)
    return cubin


def _store(folder: Path, name: str, entry: bytes) -> None:
    """Write a cache entry atomically, even with concurrent writers."""
    global _warned
    part = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as file:
            part = Path(file.name)
            file.write(entry)
        os.replace(part, folder / name)
    except OSError as error:
        if part is not None:
            part.unlink(missing_ok=True)
        if not _warned:
            _warned = True
            warnings.warn(
                f"compiled kernels cannot be stored in {folder} ({error}), so every process "
                "compiles them again; set another folder with GCBENCH_CACHE",
                RuntimeWarning,
                stacklevel=3,
            )
