"""Imports run one way through the rooms, so that a room is understood without those above it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ORDER = (
    *("core", "ops", "results", "integrations", "training", "stats", "report", "checks"),
    *("profile", "predict", "netlab", "watch", "commands"),
)
"""The rooms; each may import those before it, if nothing else is said."""
BELOW: dict[str, tuple[str, ...]] = {
    **{room: ORDER[:place] for place, room in enumerate(ORDER)},
    "results": ("core",),
    "adapters": ("core",),
    "integrations": ("core", "ops"),
    "stats": ("core", "results"),
    "netlab": ("core", "report"),
    "watch": ("core", "report"),
}
"""What each room may import besides itself and `gcbench._version`."""
PLUGINS = ("gcbench.ops", "gcbench.core")
"""What files of compressors/ and tasks/ may import besides `gcbench` and each other."""
DOOR = ("gcbench", "gcbench.cli", "gcbench.__main__")
ANYWHERE = "_version"


def modules() -> dict[str, Path]:
    """Return the files of the package, by the module that each is."""
    result = {}
    for path in sorted((ROOT / "gcbench").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        result[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return result


@cache
def imports(path: Path) -> list[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Return the import statements of a file, and whether each runs when the file is imported.

    Imports for type checkers alone are left out: they are not made.
    """
    tree = ast.parse(path.read_text())
    late, never = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            late |= set(ast.walk(node))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            never |= set(ast.walk(node))
    return [
        (node, node not in late)
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom) and node not in never
    ]


def imported(path: Path, package: dict[str, Path]) -> Iterator[tuple[str, bool]]:
    """Yield the modules of gcbench that a file imports, and whether it does so at once."""
    for node, at_once in imports(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in package else (node.module or "") for name in full]
        for name in names:
            if name.partition(".")[0] == "gcbench":
                yield name, at_once


def room(module: str) -> str:
    return module.split(".")[1] if module.count(".") else ""


def wrong_directions(files: dict[str, Path], package: dict[str, Path]) -> list[str]:
    result = []
    for module, path in files.items():
        mine = room(module)
        if module in DOOR or mine == ANYWHERE:
            continue
        for name, _ in imported(path, package):
            other = room(name)
            if other not in ("", ANYWHERE, mine, *BELOW[mine]):
                result.append(f"{module} imports {name}")
    return result


def test_every_module_is_in_a_room():
    rooms = {room(module) for module in modules()} - {"", ANYWHERE, "cli", "__main__"}
    assert rooms == set(BELOW)


def test_imports_run_one_way():
    package = modules()
    assert wrong_directions(package, package) == []


def circle(package: dict[str, Path]) -> list[str]:
    """Return the modules of a circle of imports that are made when modules are read; none: []."""
    graph = {
        module: {name for name, at_once in imported(path, package) if at_once} - {module}
        for module, path in package.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_there_is_no_circle():
    package = modules()
    packages = {module for module, path in package.items() if path.name == "__init__.py"}
    # A package is imported before its modules, and it may import them.
    assert (
        circle({m: p for m, p in package.items() if m not in packages or m == "gcbench.ops"}) == []
    )


@pytest.mark.parametrize("folder", ["compressors", "tasks"])
def test_plugins_import_the_contract_and_operations_alone(folder):
    package = modules()
    for path in sorted((ROOT / folder).rglob("*.py")):
        for name, _ in imported(path, package):
            allowed = name == "gcbench" or name.startswith((*PLUGINS, f"gcbench.{folder}"))
            assert allowed, f"{path.name} imports {name}"
