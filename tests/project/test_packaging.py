"""What is shipped: the wheel's files, no name of others taken, light imports, true examples."""

from __future__ import annotations

import doctest
import importlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from commands import ROOT

import gcbench

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def python(*words: str, path: Path = ROOT, cwd: Path = ROOT) -> str:
    """Run a fresh interpreter; return what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("dist")
    python("-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT))
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as file:
        yield file


def test_the_wheel_has_one_folder_and_every_module(wheel):
    names = set(wheel.namelist())
    assert {name.split("/")[0] for name in names} == {
        "gcbench",
        f"gcbench-{gcbench.__version__}.dist-info",
    }
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "gcbench").rglob("*.py")}
    for folder in ("compressors", "tasks"):
        expected |= {f"gcbench/{path.relative_to(ROOT)}" for path in ROOT.glob(f"{folder}/**/*.py")}
    assert {name for name in names if name.endswith(".py")} == expected
    assert {"gcbench/compressors/terngrad.py", "gcbench/compressors/memories/ef21.py"} <= expected
    assert any(name.startswith("gcbench/csrc/") for name in names)
    guides = {f"gcbench/docs/{path.name}" for path in ROOT.glob("gcbench/docs/*.md")}
    assert "gcbench/docs/first-comparison.md" in guides <= names
    suites = {
        f"gcbench/training/suites/{path.name}"
        for path in ROOT.glob("gcbench/training/suites/*.yaml")
    }
    assert "gcbench/training/suites/terngrad-table1.yaml" in suites <= names


def test_the_wheel_has_the_reference_rows_and_the_measurement(wheel, tmp_path):
    """What advise reads where there is no checkout: byte for byte, and found there."""
    brought = {name for name in wheel.namelist() if name.startswith("gcbench/results/")}
    paths = [*ROOT.glob("results/reference/*.parquet"), ROOT / "results/bandwidth.json"]
    assert len(paths) > 1
    assert {f"gcbench/{path.relative_to(ROOT)}" for path in paths} <= brought
    for path in paths:
        assert wheel.read(f"gcbench/{path.relative_to(ROOT)}") == path.read_bytes()
    site, empty = tmp_path / "site", tmp_path / "empty"
    wheel.extractall(site)
    empty.mkdir()
    words = ["advise", "--compressor", "terngrad", "--model", "resnet20", "--json"]
    words += ["--progress", "none"]
    result = json.loads(python("-m", "gcbench", *words, path=site, cwd=empty))
    for path in ROOT.glob("results/reference/*.parquet"):
        assert f"gcbench's {path.name}" in result["conclusions"][0]
    assert result["tables"][0]["rows"][0]["over_fp32_low"] > 0  # by the measured kernels
    for path in (site / "gcbench/results").rglob("*.*"):
        if path.suffix != ".py":
            path.unlink()
    again = json.loads(python("-m", "gcbench", *words, "--force", path=site, cwd=empty))
    assert "No results were read" in again["conclusions"][0]
    assert again["tables"][0]["rows"][0]["over_fp32_low"] is None


def copy_of_the_project(folder: Path) -> Path:
    """Copy what a wheel is built from."""
    for name in ("gcbench", "compressors", "tasks", "cuda"):
        leave = shutil.ignore_patterns("__pycache__", "_native")
        shutil.copytree(ROOT / name, folder / name, ignore=leave)
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.mark.skipif(not shutil.which("c++"), reason="there is no C++ compiler")
def test_the_wheel_has_native_kernels_for_this_platform(wheel):
    built = {name for name in wheel.namelist() if name.startswith("gcbench/_native/")}
    assert "gcbench/_native/baseline.so" in built
    libraries = {name for name in built if name.endswith(".so")}
    assert built - libraries == {name.replace(".so", ".sha256") for name in libraries}
    tags = wheel.read(f"gcbench-{gcbench.__version__}.dist-info/WHEEL").decode()
    assert "Root-Is-Purelib: false" in tags
    assert f"Tag: py3-none-{sysconfig.get_platform().replace('-', '_')}" in tags


def test_without_a_compiler_the_reference_serves_and_says_so(tmp_path, monkeypatch):
    root = copy_of_the_project(tmp_path / "project")
    (root / "gcbench" / "_native").mkdir()
    (root / "gcbench" / "_native" / "baseline.so").write_text("of an earlier build")
    monkeypatch.setenv("CXX", "/nowhere/c++")
    monkeypatch.delenv("GCBENCH_REQUIRE_NATIVE", raising=False)
    build = ["-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(root)]
    done = subprocess.run([sys.executable, *build], capture_output=True, text=True, check=True)
    assert "no native kernels, reference serves: /nowhere/c++ does not run" in done.stderr
    (path,) = tmp_path.glob("*-py3-none-any.whl")
    with zipfile.ZipFile(path) as file:
        file.extractall(tmp_path / "site")
    words = ["-m", "gcbench", "list", "backends", "--json"]
    message = python(*words, path=tmp_path / "site", cwd=tmp_path)
    (row,) = (row for row in json.loads(message) if row["name"] == "cpu")
    assert not row["available"]
    assert "the library was not built" in row["detail"]
    monkeypatch.setenv("GCBENCH_REQUIRE_NATIVE", "1")
    done = subprocess.run([sys.executable, *build], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "/nowhere/c++ does not run" in done.stdout + done.stderr


def test_the_wheel_works_beside_a_folder_of_the_same_name(wheel, tmp_path):
    site, empty = tmp_path / "site", tmp_path / "empty"
    wheel.extractall(site)
    empty.mkdir()
    (empty / "tasks.py").write_text("mine = True\n")
    rows = json.loads(
        python("-m", "gcbench", "list", "compressors", "--json", path=site, cwd=empty)
    )
    assert {row["name"] for row in rows} >= {"none", "terngrad"}
    code = "import tasks, gcbench; print(tasks.mine, gcbench.__file__)"
    text = python("-c", code, path=site, cwd=empty)
    assert text.split() == ["True", str(site / "gcbench/__init__.py")]


def test_our_cuda_folder_shadows_nobody(tmp_path):
    """NVIDIA's `cuda` is a namespace of many distributions, of which torch imports some."""
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "pathfinder.py").write_text("value = 'theirs'\n")
    assert (ROOT / "cuda").is_dir()
    for path in (tmp_path, f"{ROOT}{os.pathsep}{tmp_path}"):
        text = python("-c", "import gcbench, cuda.pathfinder as p; print(p.value)", path=path)
        assert text == "theirs\n"


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"]])
def test_help_imports_nothing_heavy(words):
    code = (
        "import sys, atexit\n"
        "atexit.register(lambda: print('modules', *sys.modules))\n"
        f"sys.argv = ['gcbench', *{words}]\n"
        "from gcbench.cli import main; main()\n"
    )
    text = python("-c", code)
    assert "Usage: gcbench" in text
    modules = set(text.rpartition("modules ")[2].split())
    heavy = {"torch", "numpy", "yaml", "pyarrow", "matplotlib", "sklearn", "pooch"}
    assert "gcbench.cli" in modules
    assert modules & heavy == set()
    assert not modules & {
        "gcbench.training.configuration",
        "gcbench.report.listings",
        "gcbench.core.registry",
    }


def test_the_module_runs_like_the_script():
    assert python("-m", "gcbench", "--version") == f"gcbench {gcbench.__version__}\n"
    module, _, function = PYPROJECT["project"]["scripts"]["gcbench"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_versions_agree():
    assert PYPROJECT["project"]["version"] == gcbench.__version__


def sources() -> list[str]:
    """Return the names of the modules whose docstrings have examples."""
    paths = [*(ROOT / "gcbench").rglob("*.py"), *ROOT.glob("compressors/*.py")]
    paths += ROOT.glob("tasks/*.py")
    names = []
    for path in sorted(paths):
        if ">>>" in path.read_text():
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts if parts[0] == "gcbench" else ("gcbench", *parts)
            names.append(".".join(parts).removesuffix(".__init__"))
    return names


@pytest.mark.parametrize("name", sources())
def test_examples_in_docstrings_are_true(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0


def test_some_docstrings_have_examples():
    assert "gcbench" in sources()


def test_imports_start_no_threads():
    """A process that forks afterwards would wait for them: OpenMP's do not survive a fork."""
    code = (
        "import os, torch, numpy, pandas, torch._dynamo\n"
        "torch.set_num_threads(2)\n"
        "def threads(): return len(os.listdir('/proc/self/task'))\n"
        "before = threads()\n"
        "import gcbench.ops, gcbench.cli, gcbench.integrations.ddp\n"
        "from gcbench.core import registry\n"
        "for name in registry.compressors(): registry.compressor(name)\n"
        "print(threads() - before)\n"
    )
    assert python("-c", code) == "0\n"
