"""The CUDA kernels: one module per family, the host code of `cuda/<family>.cu`.

To add a family:

1. Write `cuda/<family>.cu` with the element codecs of `cuda/*.cuh`: `extern "C" __global__`
   functions, formula and bytes per element in the header, 64-bit indices; see `random.cu`. Files
   are located by name, here and in the tests.
2. Write its host code in `gcbench/ops/cuda/<family>.py`: per operation a function of the checked
   arguments and allocated outputs. It allocates scratch buffers, computes the grid and calls
   `launcher(x.device).launch("<family>", "<kernel>", grid, block, args)`, once or several times.
   Kernel arguments are contiguous tensors, None (a null pointer), numbers of an explicit C type
   (`i64(n)`), or a `ctypes.Structure` with the kernel's layout (`KeyArgument.of(key)`). The
   function must not wait for the device: a kernel records an error in a flag, which is returned.
   The module ends with its `KERNELS`.
3. Add the module to `FAMILIES` below.
4. Write its test inputs in `tests/kernel_cases/<family>.py`, unless the CPU kernels have them.
   `tests/ops/test_kernels.py` then runs every operation in `KERNELS` on the CPU emulator of
   `tests/cusim` (and on a GPU if there is one) and compares it with plain torch;
   `tests/ops/test_cuda.py` compiles the file for all architectures.

The modules import only torch; cuda-core is imported when the first kernel is launched.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from gcbench.ops.cuda import (
    int8,
    levels,
    packing,
    random,
    sign,
    statistics,
    ternary,
)
from gcbench.ops.cuda.compile import INSTALL
from gcbench.ops.cuda.launch import launcher
from gcbench.ops.dispatch import Kernel

FAMILIES: tuple[Any, ...] = (
    int8,
    levels,
    packing,
    random,
    sign,
    statistics,
    ternary,
)
KERNELS: dict[str, Kernel] = {
    name: call for family in FAMILIES for name, call in family.KERNELS.items()
}

_NVRTC = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")


def _version(*distributions: str) -> str | None:
    """Return the version of the first installed distribution, or None."""
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _driver() -> str:
    """Return the version of NVIDIA's kernel driver, or "of unknown version"."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split("Kernel Module", 1)[1].split()
        return next(word for word in words if word[0].isdigit())
    except (OSError, IndexError, StopIteration):
        return "of unknown version"


def _missing() -> str | None:
    """Return the reason why the kernels cannot run here, or None."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} detects no usable NVIDIA GPU"
    if _version("cuda-core") is None:
        return f"cuda-core is not installed: {INSTALL}"
    if importlib.util.find_spec("cuda.bindings") is None:
        return f"cuda-bindings, a part of CUDA builds of torch, is not installed: {INSTALL}"
    return None


def status() -> tuple[bool, str]:
    """Return whether the kernels can be used here, and a description or the reason.

    It imports only torch, compiles nothing and never raises.
    """
    try:
        missing = _missing()
        if missing is not None:
            return False, missing
        device = torch.cuda.current_device()
        major, minor = torch.cuda.get_device_capability(device)
        nvrtc = _version(*_NVRTC) or f"of CUDA {torch.version.cuda}"
        return True, (
            f"{torch.cuda.get_device_name(device)} (sm_{major}{minor}), driver {_driver()}, "
            f"cuda-core {_version('cuda-core')}, NVRTC {nvrtc}"
        )
    except Exception as error:  # a broken driver must not stop a listing of the backends
        return False, f"CUDA fails on this machine: {type(error).__name__}: {error}"


def warm(device: torch.device | str = "cuda", families: Sequence[str] = ()) -> None:
    """Compile and load the kernels of `families` (file names without `.cu`), by default all.

    Otherwise the first launch of a family loads it, which is impossible while a CUDA graph is
    captured.

    Raises:
        GcbenchError: cuda-core or NVRTC is missing, or a kernel cannot be loaded.
    """
    launcher(device).warm(families)
