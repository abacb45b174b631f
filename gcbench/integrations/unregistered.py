"""Refuses to train a DDP model uncompressed while a hook exists that was never registered.

A framework that accepts a hook as an argument may drop it silently. Lightning's
`DDPStrategy(ddp_comm_hook=...)` does so on the CPU, and Accelerate's
`DistributedDataParallelKwargs(comm_hook=...)` for every object that is not one of its names. So
while such a hook exists, each DDP model without a communication hook raises at its first forward in
training. The watch ends when the hook is registered, closed or deleted.
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
_waiting: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""Hook -> the file and line where the user created it."""
_handle: RemovableHandle | None = None


def expect(hook: object) -> None:
    """Watch DDP models until `settle(hook)` is called or the hook is deleted."""
    global _handle
    _waiting[hook] = _caller()
    if _handle is None:
        _handle = register_module_forward_pre_hook(_before_forward)


def settle(hook: object) -> None:
    """Stop the watch for this hook: it is registered, refused or closed."""
    _waiting.pop(hook, None)
    _unwatch()


def _unwatch() -> None:
    """Remove the watch if no hook is waiting: it costs a call per module and forward pass."""
    global _handle
    if _handle is not None and not _waiting:
        _handle.remove()
        _handle = None


def _before_forward(module: nn.Module, inputs: Any) -> None:
    """Raise UsageError if a DDP model is about to train without a waiting hook."""
    if not isinstance(module, DistributedDataParallel):
        return
    _unwatch()
    places = sorted(set(_waiting.values()))
    # Lightning leaves the wrapper itself in evaluation mode after its sanity check.
    trains = module.module.training and torch.is_grad_enabled()
    if places and trains and not module._comm_hooks:
        raise UsageError(
            f"the hook created at {', '.join(places)} is not registered, and this model would "
            "train without compression. Call hook.register(model) on the DistributedDataParallel "
            "model; in Lightning, Accelerate and Transformers use gcbench.integrations.lightning, "
            ".accelerate and .transformers, which do. If the hook is for another model, create it "
            "just before register; hook.close() discards it"
        )


def _caller() -> str:
    """Return the file and line outside this package that called into it."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and PACKAGE in Path(frame.f_code.co_filename).parents:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
