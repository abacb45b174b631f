"""Runs at the start of every Python process of a watched job; see `gcbench.watch`.

It runs the `sitecustomize` that it hides, and attaches the recorder to torch.distributed when the
process imports it.
"""

import importlib
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
TARGET = "torch.distributed.distributed_c10d"


class Finder:
    """Attaches the recorder after the module TARGET was executed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of TARGET with a loader that attaches the recorder; else None."""
        if name != TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            importlib.import_module("gcbench_recorder").attach(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _run_hidden() -> None:
    """Run the sitecustomize that would have run without this one."""
    others = [entry for entry in sys.path if os.path.abspath(entry or ".") != HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if "GCBENCH_WATCH" in os.environ:
    sys.meta_path.insert(0, Finder())
_run_hidden()
