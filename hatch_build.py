"""Builds the native CPU kernels, `cuda/*.cpp`, into `gcbench/_native/` when the package is built.

Without a C++ compiler the package is built all the same and says that the reference backend serves;
GCBENCH_REQUIRE_NATIVE=1 makes that, and a failed compilation, an error. The compiler is $CXX, or
c++. `python hatch_build.py [flag ...]` builds in place, with further flags for the compiler.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
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


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} does not run: {error}") from None
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr}")
    sys.stderr.write(done.stderr)
    return done.stdout


def folder_of(root: Path) -> Path:
    """Return where the libraries are built."""
    return root / "gcbench" / "_native"


def _digest(paths: Iterable[Path]) -> str:
    total = hashlib.sha256()  # as gcbench.ops.sources.digest
    for path in sorted(paths):
        total.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


def build(root: Path, extra: tuple[str, ...] = ()) -> None:
    """Compile `root/cuda/*.cpp` for each instruction set into `root/gcbench/_native/*.so`.

    Beside each library lies its SHA-256, by which `gcbench.ops.native` recognizes damage.
    `extra`: further flags, such as those of a sanitizer. What is there from the same sources,
    flags and compiler stays.

    Raises:
        BuildError: there is no compiler, or it failed, with what it said.
    """
    target = folder_of(root)
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if not compiler:
        raise BuildError("there is no C++ compiler: neither $CXX nor c++ is one")
    folder = root / "cuda"
    headers = (path for path in folder.iterdir() if path.suffix in (".cpp", ".hpp", ".cuh"))
    sources = _digest(headers)
    recipe = "\n".join([sources, _digest([Path(__file__)]), _run([compiler, "--version"]), *extra])
    stamp = target / "recipe"
    if stamp.is_file() and stamp.read_text() == recipe:
        return
    shutil.rmtree(target, ignore_errors=True)
    define = f'-DGC_SOURCES="{sources}"'
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
        for isa, parts in objects.items():
            link = [compiler, "-shared", "-fopenmp", *extra, *parts, "-o", f"{scratch}/{isa}.so"]
            _run(link)
        target.mkdir()
        for isa in objects:
            digest = hashlib.sha256(Path(f"{scratch}/{isa}.so").read_bytes()).hexdigest()
            shutil.move(f"{scratch}/{isa}.so", target)
            (target / f"{isa}.sha256").write_text(digest)
    stamp.write_text(recipe)


class NativeKernels(BuildHookInterface[Any]):
    """The build hook of hatchling."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the libraries and mark the wheel as one for this platform."""
        try:
            build(Path(self.root))
        except BuildError as error:
            if os.environ.get("GCBENCH_REQUIRE_NATIVE", "0") != "0":
                raise
            shutil.rmtree(
                folder_of(Path(self.root)), ignore_errors=True
            )  # what an earlier build left
            self.app.display_warning(f"gcbench: no native kernels, reference serves: {error}")
            return
        build_data["pure_python"] = False
        platform_tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform_tag}"


if __name__ == "__main__":
    build(Path(__file__).resolve().parent, tuple(sys.argv[1:]))
