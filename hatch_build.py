"""Builds the native CPU kernels, `cuda/*.cpp`, into `gcbench/_native/` when the package is built.

Without a C++ compiler the package is built all the same and says that the reference backend serves;
GCBENCH_REQUIRE_NATIVE=1 makes that, and a failed compilation, an error. The compiler is $CXX, or
c++. `python hatch_build.py` builds in place.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-Wall", "-Wextra"]
# Bytes are equal on all machines only if a product and a sum are rounded one after the other.
FLAGS += ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
ISAS: dict[str, tuple[str, ...]] = {"baseline": ()}
if platform.machine().lower() in ("x86_64", "amd64"):
    ISAS = {
        "baseline": ("-march=x86-64",),
        "avx2": ("-march=x86-64-v3",),
        "avx512": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
    }


class BuildError(Exception):
    """The native kernels could not be built."""


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr}")


def build(root: Path, extra: tuple[str, ...] = ()) -> None:
    """Compile `root/cuda/*.cpp` for each instruction set into `root/gcbench/_native/*.so`.

    `extra`: further flags, such as those of a sanitizer.

    Raises:
        BuildError: there is no compiler, or it failed, with what it said.
    """
    target = root / "gcbench" / "_native"
    shutil.rmtree(target, ignore_errors=True)
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if not compiler:
        raise BuildError("there is no C++ compiler: neither $CXX nor c++ is one")
    folder = root / "cuda"
    total = hashlib.sha256()  # as gcbench.ops.sources.digest
    for path in sorted(folder.iterdir()):
        if path.suffix in (".cpp", ".hpp", ".cuh"):
            total.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    define = f'-DGC_SOURCES="{total.hexdigest()}"'
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = []
        objects: dict[str, list[str]] = {}
        for isa, flags in ISAS.items():
            objects[isa] = []
            for source in sorted(folder.glob("*.cpp")):
                made = f"{scratch}/{isa}-{source.stem}.o"
                objects[isa].append(made)
                compile_ = [compiler, *FLAGS, *flags, *extra, define, "-c", str(source), "-o", made]
                jobs.append(pool.submit(_run, compile_))
        for job in jobs:
            job.result()
        target.mkdir()
        for isa, made in objects.items():
            link = [compiler, "-shared", "-fopenmp", *extra, *made, "-o", str(target / f"{isa}.so")]
            _run(link)


class NativeKernels(BuildHookInterface[Any]):
    """The build hook of hatchling."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the libraries and mark the wheel as one for this platform."""
        try:
            build(Path(self.root))
        except BuildError as error:
            if os.environ.get("GCBENCH_REQUIRE_NATIVE"):
                raise
            self.app.display_warning(f"gcbench: no native kernels, reference serves: {error}")
            return
        build_data["pure_python"] = False
        platform_tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform_tag}"


if __name__ == "__main__":
    build(Path(__file__).parent)
