"""Runs the kernels of cuda/*.cu on the CPU: builds the shim of tests/cusim and launches like a GPU.

A test module takes the fixture `cuda_device`; tests that use it run on the shim in both orders of
threads, and on a GPU where there is one.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gcbench.ops import dispatch
from gcbench.ops.cuda import launch
from gcbench.ops.sources import kernel_sources

HEADER = Path(__file__).parent / "cusim" / "cusim.h"
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-w")
COLLECTIVES = re.compile(
    r"__(syncthreads\w*|syncwarp|shfl\w*_sync|ballot_sync|any_sync|all_sync|match_\w+_sync|"
    r"reduce_\w+_sync)"
)
_KEYWORDS = {"if", "for", "while", "switch", "__launch_bounds__", "__attribute__", "alignas"}
_KERNEL = re.compile(
    r'extern\s+"C"\s+__global__\s+(?:void\s+)?'
    r"(?:__launch_bounds__\s*\([^()]*(?:\([^()]*\)[^()]*)*\)\s*)?(?:void\s+)?(\w+)\s*\("
)
_DYNAMIC = re.compile(
    r"extern\s+__shared__\s+(?:__align__\s*\(\s*\d+\s*\)\s+)?([\w:\s]+?)\s+(\w+)\s*\[\s*\]\s*;"
)


def bodies(text: str) -> dict[str, str]:
    """Return the functions of preprocessed `text`: name -> bodies (of all of that name)."""
    text = re.sub(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'', '""', text)
    result: dict[str, str] = {}
    stack: list[str | None] = []
    start = head = 0
    name = ""
    for mark in re.finditer(r"[{};]", text):
        inside = any(scope is not None for scope in stack)
        if mark[0] == "{":
            if inside:
                stack.append("")
            else:
                before = text[head : mark.start()]
                calls = [
                    word for word in re.findall(r"(\w+)\s*\(", before) if word not in _KEYWORDS
                ]
                scope = re.search(r"\b(namespace|struct|class|union|enum)\b[^()]*$", before)
                if calls and not scope:
                    name, start = calls[0], mark.start()
                    stack.append(name)
                else:
                    stack.append(None)
        elif mark[0] == "}":
            scope = stack.pop()
            if scope is not None and not any(other is not None for other in stack):
                result[name] = result.get(name, "") + text[start : mark.end()]
        if not any(scope is not None for scope in stack):
            head = mark.end()
    return result


def collective_functions(text: str) -> set[str]:
    """Return the names of the functions of preprocessed `text` that reach a collective."""
    words = {name: set(re.findall(r"\w+", body)) for name, body in bodies(text).items()}
    reach = {
        name for name, used in words.items() if any(COLLECTIVES.fullmatch(word) for word in used)
    }
    while more := {name for name, used in words.items() if used & reach} - reach:
        reach |= more
    return reach


def preprocessed(source: Path) -> str:
    """Return `source` with its own headers and macros expanded, CUDA's keywords left alone."""
    command = ["g++", "-E", "-x", "c++", "-std=c++17", "-nostdinc", "-D__CUDACC_RTC__"]
    done = subprocess.run(
        [*command, f"-I{kernel_sources()}", str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{source.name} cannot be preprocessed:\n{done.stderr}")
    return re.sub(r"^#.*$", "", done.stdout, flags=re.MULTILINE)


def kernels(source: Path) -> dict[str, bool]:
    """Return the kernels of a .cu file: name -> whether it has collectives."""
    text = preprocessed(source)
    collective = collective_functions(text)
    return {name: name in collective for name in _KERNEL.findall(text)}


def translation_unit(source: Path) -> str:
    """Return the C++ that runs `source`: the shim, the file itself, and the table of kernels."""
    text = _DYNAMIC.sub(r"\1* const \2 = (\1*)cusim::dynamic_shared();", source.read_text())
    # With C's linkage a kernel named `index` would be the C library's.
    text = re.sub(r'extern\s+"C"\s+__global__', "__global__", text)
    table = ",\n".join(
        f'    {{"{name}", {str(has).lower()}, cusim::Call<&{name}>::run, '
        f"cusim::Call<&{name}>::sizes()}}"
        for name, has in kernels(source).items()
    )
    return (
        f'#include "{HEADER}"\n'
        # A namespace without a name, so that shared arrays of templates and of kernels can be in
        # one section.
        f'namespace {{\n#line 1 "{source}"\n{text}\n'
        f"const std::vector<cusim::Entry> table = {{\n{table}}};\n}}\n"
        'extern "C" const char* cusim_launch(const char* name, const unsigned* shape, unsigned '
        "shared, int reverse, void** args, const size_t* sizes, unsigned count) {\n"
        "  return cusim::launch_by_name(table, name, shape, shared, reverse, args, sizes, count);\n"
        "}\n"
    )


class Shim:
    """The launcher of tests: kernels of .cu files, built by g++, on tensors of the CPU."""

    def __init__(self, folder: Path, sources: Path | None = None) -> None:
        self.folder, self.sources = folder, sources or kernel_sources()
        self.reverse = False
        """Whether threads run in descending order."""
        self.launches: list[tuple[str, str]] = []
        """What was launched: file and kernel."""
        self._libraries: dict[str, ctypes.CDLL] = {}

    def warm(self, families: Sequence[str] = ()) -> None:
        for family in families or sorted(path.stem for path in self.sources.glob("*.cu")):
            self._library(family)

    def _library(self, family: str) -> ctypes.CDLL:
        if family not in self._libraries:
            library = self.folder / f"{family}.so"
            if not library.exists():
                self._compile(family, library)
            loaded = ctypes.CDLL(str(library))
            loaded.cusim_launch.restype = ctypes.c_char_p
            self._libraries[family] = loaded
        return self._libraries[family]

    def _compile(self, family: str, library: Path) -> None:
        """Write the library of a .cu file; several processes may do so at once."""
        unit = library.with_name(f"{family}-{os.getpid()}.cpp")
        unit.write_text(translation_unit(self.sources / f"{family}.cu"))
        built = unit.with_suffix(".so")
        command = ["g++", *FLAGS, f"-I{kernel_sources()}", "-shared", "-o", built, unit]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{family}.cu does not compile for the CPU:\n{done.stderr}")
        built.replace(library)

    def launch(
        self,
        family: str,
        kernel: str,
        grid: launch.Grid,
        block: launch.Grid,
        args: Sequence[launch.Argument],
        *,
        shared: int = 0,
    ) -> None:
        for arg in args:
            if isinstance(arg, Tensor) and arg.device.type != "cpu":
                raise launch.LaunchError(f"{kernel}: a tensor on {arg.device}")
        shape = launch.checked_shape(grid, block, shared)
        pointers, alive = launch.packed(args)
        error = self._library(family).cusim_launch(
            kernel.encode(),
            (ctypes.c_uint * 6)(*shape),
            shared,
            int(self.reverse),
            pointers,
            (ctypes.c_size_t * len(alive))(*map(ctypes.sizeof, alive)),
            len(alive),
        )
        if error is not None:
            raise launch.LaunchError(f"{family}.cu: {kernel}: {error.decode()}")
        self.launches.append((family, kernel))


def require_compiler() -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++: kernels cannot be built for the CPU")


@contextmanager
def on_shim(stand_in: Shim) -> Iterator[None]:
    """Let the shim's kernels serve operations on tensors of the CPU."""
    before = dispatch._chosen
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(launch._launchers, torch.device("cpu"), stand_in)
        dispatch._take({"cpu": "cuda"})
        try:
            yield
        finally:
            dispatch._take(before)


@pytest.fixture(scope="session")
def shim(tmp_path_factory) -> Shim:
    """The shim over the project's kernels, built file by file when it is used.

    The processes of one pytest run share what they build.
    """
    require_compiler()
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder = folder / "cusim"
    folder.mkdir(exist_ok=True)
    return Shim(folder)


DEVICES = ["shim", "shim-reversed", *(["device"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def cuda_device(request) -> Iterator[torch.device]:
    """The device to put tensors on so that the CUDA operations run: on the shim, or on a GPU."""
    if request.param == "device":
        yield torch.device("cuda", torch.cuda.current_device())
        return
    stand_in = request.getfixturevalue("shim")
    stand_in.reverse = request.param == "shim-reversed"
    with on_shim(stand_in):
        yield torch.device("cpu")
