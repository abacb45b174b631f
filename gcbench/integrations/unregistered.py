"""Hooks that were made and never registered: a DDP model must not train as if there were none.

A framework that takes a hook as an argument may drop it without a word. Lightning's
`DDPStrategy(ddp_comm_hook=...)` does so on the CPU, and Accelerate's
`DistributedDataParallelKwargs(comm_hook=...)` with every object that is not one of its names. So
while such a hook exists, each DDP model without a communication hook raises at its first forward in
training. Nothing is watched once the hook is registered, closed or deleted.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from gcbench.core.errors import UsageError

PACKAGE = Path(__file__).parents[1]
_made: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""Hook -> the file and line where the user made it."""
_handle: RemovableHandle | None = None


def expect(hook: object) -> None:
    """Watch DDP models until `settle(hook)` is called or the hook is deleted."""
    global _handle
    _made[hook] = _caller()
    if _handle is None:
        _handle = register_module_forward_pre_hook(_before_forward)


def settle(hook: object) -> None:
    """Stop watching for this hook: it is registered or closed, or an error says why not."""
    _made.pop(hook, None)
    _unwatch()


def _unwatch() -> None:
    """Remove the watch if no hook is waiting: it costs each module of the process a call."""
    global _handle
    if _handle is not None and not _made:
        _handle.remove()
        _handle = None


def _before_forward(module: nn.Module, inputs: Any) -> None:
    """Raise UsageError where a DDP model begins to train without the hook that was made."""
    if not isinstance(module, DistributedDataParallel):
        return
    _unwatch()
    places = sorted(set(_made.values()))
    # Lightning leaves the wrapper itself in evaluation mode after its sanity check.
    trains = module.module.training and torch.is_grad_enabled()
    if places and trains and not module._comm_hooks:
        raise UsageError(
            f"the hook made at {', '.join(places)} is not registered, and this model would train "
            "without compression. Call hook.register(model) on the DistributedDataParallel model; "
            "in Lightning, Accelerate and Transformers use gcbench.integrations.lightning, "
            ".accelerate and .transformers, which do. If another model gets the hook later, make "
            "it there; hook.close() gives it up"
        )


def _caller() -> str:
    """Return the file and line outside this package that led here."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and PACKAGE in Path(frame.f_code.co_filename).parents:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
