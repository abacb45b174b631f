"""Watches steps of optimizers and GradScalers that nobody passed to a hook.

torch has hooks for the steps of all optimizers, but none for those of a GradScaler. So while an
owner watches them, `torch.amp.GradScaler.step` is wrapped; the last owner restores it.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

T = TypeVar("T")
_scaler_calls: WeakKeyDictionary[Any, Callable[..., None]] = WeakKeyDictionary()
"""Owner -> what it calls before each step of a GradScaler."""
_original: Any = None
"""torch's `GradScaler.step` while it is wrapped."""
_STEP = Optimizer.profile_hook_step(lambda optimizer: None).__code__
"""The code around every optimizer's step that calls the hooks."""


@dataclass(frozen=True)
class Handle:
    """Ends a watch."""

    remove: Callable[[], None]


def uncompiled(call: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that torch.compile(optimizer.step) calls without tracing it."""
    disabled: Callable[..., None] = torch.compiler.disable(call)  # type: ignore[no-untyped-call]
    return disabled


def is_part(optimizer: Optimizer) -> bool:
    """Return whether a hook of an optimizer runs for `super().step()`, a part of its step.

    torch wraps `step` of every class that was instantiated, so a subclass may run the hooks twice.
    """
    frame, count = sys._getframe(1), 0
    while frame is not None and count < 2:
        count += frame.f_code is _STEP and frame.f_locals["self"] is optimizer
        frame = frame.f_back  # type: ignore[assignment]
    return count == 2


def after_optimizers(owner: T, call: Callable[[T, Optimizer], None]) -> Handle:
    """Call `call(owner, optimizer)` after each step of any optimizer, while the owner exists."""
    here = weakref.ref(owner)  # an owner that is never closed may still be freed

    def stepped(optimizer: Optimizer, *_: Any) -> None:
        existing = here()
        if existing is not None and not is_part(optimizer):
            call(existing, optimizer)

    handle = register_optimizer_step_post_hook(uncompiled(stepped))
    weakref.finalize(owner, handle.remove)
    return Handle(handle.remove)


def before_scalers(owner: T, call: Callable[[T, Any, Any], None]) -> Handle:
    """Call `call(owner, scaler, optimizer)` before each step of any enabled GradScaler.

    It also ends when the owner is deleted.
    """
    global _original
    weakref.finalize(owner, _restore)  # runs after the removal of the entry, which is added later
    _scaler_calls[owner] = call
    if _original is None:
        _original = GradScaler.step
        GradScaler.step = _wrapped(_original)  # type: ignore[method-assign]
    here = weakref.ref(owner)

    def remove() -> None:
        existing = here()
        if existing is not None:
            _scaler_calls.pop(existing, None)
        _restore()

    return Handle(remove)


def _wrapped(original: Any) -> Any:
    @functools.wraps(original)
    def step(self: GradScaler, optimizer: Any, *args: Any, **options: Any) -> Any:
        if self.is_enabled():
            for owner, call in [*_scaler_calls.items()]:
                call(owner, self, optimizer)
        return original(self, optimizer, *args, **options)

    return step


def _restore() -> None:
    """Restore `GradScaler.step` after the last owner, unless other code has replaced it since."""
    global _original
    if _original is None or _scaler_calls:
        return
    if getattr(GradScaler.step, "__wrapped__", None) is _original:
        GradScaler.step = _original  # type: ignore[method-assign,assignment]
        _original = None
