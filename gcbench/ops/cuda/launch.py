"""Kernel launches on a CUDA device, or on the emulator of the tests.

The host code of an operation obtains the launcher of its tensors' device from `launcher(device)`
and calls `launch` with the arguments of `cuLaunchKernel`. It does not depend on the kind of
launcher, so tests that put another one into `_launchers` run the same host code as a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import re
import threading
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from gcbench.core.compressor import Key
from gcbench.core.errors import GcbenchError
from gcbench.ops.cuda.compile import cached_cubin
from gcbench.ops.sources import cuda_families

f32 = ctypes.c_float
f64 = ctypes.c_double
i32 = ctypes.c_int32
i64 = ctypes.c_int64
u32 = ctypes.c_uint32
u64 = ctypes.c_uint64
Argument: TypeAlias = Tensor | f32 | f64 | i32 | i64 | u32 | u64 | ctypes.Structure | None
"""A kernel's argument: a tensor or None is passed as a pointer, everything else by value."""
Grid: TypeAlias = int | tuple[int, ...]
Shape: TypeAlias = tuple[int, int, int, int, int, int]

_BY_VALUE = (ctypes.Structure, f32, f64, i32, i64, u32, u64)

MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_THREADS = 1024
MAX_SHARED = 48 * 1024
"""Bytes of dynamic shared memory that every device supports without a function attribute."""


class LaunchError(GcbenchError):
    """A launch with invalid arguments, or one that the driver rejects."""


class KeyArgument(ctypes.Structure):
    """A `Key` in the layout of `gc::Key` in common.cuh."""

    _fields_ = (("seed", u64), ("offset", u64), ("step", u32), ("who", u32), ("workers", u32))

    @classmethod
    def of(cls, key: Key) -> KeyArgument:
        """Convert `key` to a kernel argument.

        Raises:
            ValueError: step, rank or stream out of range.
        """
        (low, high), step, who = key.words()
        return cls(high << 32 | low, key.offset, step, who, key.workers)


class Launcher(Protocol):
    """Runs the kernels of `cuda/*.cu` on tensors of one device."""

    def launch(
        self,
        family: str,
        kernel: str,
        grid: Grid,
        block: Grid,
        args: Sequence[Argument],
        *,
        shared: int = 0,
    ) -> None:
        """Launch `kernel` of `<family>.cu` on `grid` blocks of `block` threads.

        `shared`: bytes of dynamic shared memory. The call neither waits for the device nor
        allocates memory.

        Raises:
            LaunchError: a shape is out of range, the kernel is unknown, or the driver rejects it.
        """

    def warm(self, families: Sequence[str] = ()) -> None:
        """Compile and load `families` (by default all) ahead of their first launch."""


def blocks_for(threads: int, block: int) -> int:
    """Return the number of blocks of `block` threads for `threads` threads."""
    return -(-threads // block)


def packed(args: Sequence[Argument]) -> tuple[ctypes.Array[ctypes.c_void_p], list[Any]]:
    """Return `args` as cuLaunchKernel's array of addresses, and the objects that it points to.

    The objects must stay alive as long as the array is used.

    Raises:
        LaunchError: a tensor is not contiguous, or an argument has no C type.
    """
    values: list[Any] = []
    for place, arg in enumerate(args):
        if isinstance(arg, Tensor):
            if not arg.is_contiguous():
                raise LaunchError(f"kernel argument {place}: the tensor is not contiguous")
            values.append(ctypes.c_void_p(arg.data_ptr()))
        elif arg is None:
            values.append(ctypes.c_void_p())
        elif isinstance(arg, _BY_VALUE):
            values.append(arg)
        else:
            raise LaunchError(
                f"kernel argument {place} is {type(arg).__name__}: expected a tensor, None, a "
                "ctypes structure or one of i32, i64, u32, u64, f32, f64"
            )
    return (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values)), values


def checked_shape(grid: Grid, block: Grid, shared: int) -> Shape:
    """Return grid and block with three dimensions each.

    Raises:
        LaunchError: they, or the shared memory, exceed the limits of every device.
    """
    gx, gy, gz = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1, 1)[:3]
    bx, by, bz = (block, 1, 1) if isinstance(block, int) else (*block, 1, 1)[:3]
    if not (
        1 <= gx <= MAX_GRID[0]
        and 1 <= gy <= MAX_GRID[1]
        and 1 <= gz <= MAX_GRID[2]
        and min(bx, by, bz) >= 1
        and bz <= 64
        and bx * by * bz <= MAX_THREADS
        and 0 <= shared <= MAX_SHARED
    ):
        raise LaunchError(
            f"grid {gx, gy, gz}, block {bx, by, bz}, {shared} bytes of shared memory: expected "
            f"grids up to {MAX_GRID}, blocks of 1 to {MAX_THREADS} threads, at most 64 in the "
            f"third dimension, and at most {MAX_SHARED} bytes"
        )
    return gx, gy, gz, bx, by, bz


class DeviceLauncher:
    """Launches on a CUDA device, in torch's current stream.

    The kernels of a family are loaded at its first launch, or by `warm`. Call `warm` before
    capturing a CUDA graph, because kernels cannot be loaded during the capture.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda" or device.index is None:
            raise LaunchError(f"device {device}: expected a CUDA device with an index")
        self.device = device
        major, minor = torch.cuda.get_device_capability(device)
        self.arch = f"sm_{major}{minor}"
        self._driver: Any = importlib.import_module("cuda.bindings.driver")
        self._core: Any = importlib.import_module("cuda.core")
        self._functions: dict[str, dict[str, Any]] = {}
        self._streams: dict[int, Any] = {}
        self._thread = threading.local()
        self._lock = threading.Lock()

    def _enter(self) -> None:
        """Make the device's context current in this thread, which torch does lazily."""
        if not getattr(self._thread, "entered", False):
            with torch.cuda.device(self.device):
                self._core.Device(self.device.index).set_current()
            self._thread.entered = True

    def _load(self, family: str) -> dict[str, Any]:
        """Return the functions of a family, loaded into the device's context."""
        with self._lock:
            if family not in self._functions:
                cubin = cached_cubin(family, self.arch)
                module = self._core.ObjectCode.from_cubin(cubin, name=family)
                functions = {}
                for name in kernels_of(cubin):
                    kernel = module.get_kernel(name)
                    # This call loads the function, which would otherwise load at its first launch.
                    error, function = self._driver.cuKernelGetFunction(kernel.handle)
                    self._raise(error, f"{family}.cu: {name} cannot be loaded")
                    functions[name] = function
                functions[""] = module  # keep it alive
                self._functions[family] = functions
            return self._functions[family]

    def _raise(self, error: Any, what: str) -> None:
        if int(error):
            raise LaunchError(f"{what} on {self.device}: {getattr(error, 'name', error)}")

    def warm(self, families: Sequence[str] = ()) -> None:
        """Compile and load `families`, all of them by default."""
        with torch.cuda.device(self.device):
            self._enter()
            for family in families or cuda_families():
                self._load(family)

    def launch(
        self,
        family: str,
        kernel: str,
        grid: Grid,
        block: Grid,
        args: Sequence[Argument],
        *,
        shared: int = 0,
    ) -> None:
        """Launch in torch's current stream of the device; see `Launcher`."""
        for place, arg in enumerate(args):
            if isinstance(arg, Tensor) and arg.device != self.device:
                raise LaunchError(
                    f"{kernel}: argument {place} is on {arg.device}: expected {self.device}"
                )
        shape = checked_shape(grid, block, shared)
        current = torch.cuda.current_device() == self.device.index
        with contextlib.nullcontext() if current else torch.cuda.device(self.device):
            self._enter()
            functions = self._functions.get(family) or self._load(family)
            if kernel not in functions or not kernel:
                choices = ", ".join(sorted(filter(None, functions)))
                raise LaunchError(
                    f"{family}.cu has no kernel {kernel!r}: expected one of {choices}"
                )
            handle = torch.cuda.current_stream(self.device).cuda_stream
            stream = self._streams.get(handle)
            if stream is None:
                stream = self._streams[handle] = self._driver.CUstream(handle)
            pointers, alive = packed(args)
            # The driver copies the arguments before it returns.
            (error,) = self._driver.cuLaunchKernel(
                functions[kernel], *shape, shared, stream, ctypes.addressof(pointers), 0
            )
            del alive
            self._raise(error, f"{family}.cu: {kernel} cannot be launched")


def kernels_of(cubin: bytes) -> list[str]:
    """Return the names of the kernels in a cubin, from the names of its sections."""
    return sorted({name.decode() for name in re.findall(rb"\0\.text\.([A-Za-z_]\w*)(?=\0)", cubin)})


_launchers: dict[torch.device, Launcher] = {}


def launcher(device: torch.device | str) -> Launcher:
    """Return the launcher of `device`, created once per process.

    Raises:
        LaunchError: `device` is not a CUDA device.
    """
    where = torch.device(device)
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    result = _launchers.get(where)
    if result is None:
        result = _launchers[where] = DeviceLauncher(where)
    return result
