"""Gradient compression in an Accelerate job: `compress(accelerator, model, optimizer, "int8")`."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gcbench.core.compressor import Compressor
from gcbench.core.errors import UsageError
from gcbench.integrations import frameworks
from gcbench.integrations.ddp import CommHook

OTHERS = {
    DistributedType.NO: (
        "one process has nothing to exchange. Start the script with "
        "torchrun --nproc-per-node N or accelerate launch --num_processes N"
    ),
    DistributedType.FSDP: (
        "FSDP reduces the gradients. With fsdp_version=2 call "
        "gcbench.shard_hook(...).register(model) after prepare; FSDP1 does not support hooks"
    ),
    DistributedType.DEEPSPEED: "DeepSpeed reduces the gradients itself and does not support hooks",
    DistributedType.MEGATRON_LM: "Megatron-LM reduces the gradients itself",
}
"""Kind of distribution -> why it cannot have a hook, and what to call instead."""
_hooks: WeakKeyDictionary[Accelerator, list[tuple[ref[CommHook], list[Any]]]] = WeakKeyDictionary()
"""Accelerator -> its hooks, each with its own file in a checkpoint, and the handles for that."""
_loaded: WeakSet[Accelerator] = WeakSet()
"""Accelerators that loaded a checkpoint without a hook, since this module was imported."""


def compress(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    compressor: str | Compressor,
    *,
    log_every: int = 50,
    **options: Any,
) -> CommHook:
    """Compress the gradients of a model that `accelerator.prepare` returned.

    Call it on every process after `prepare` and before `load_state`, once per trained model. The
    hook follows the optimizer's learning rates. `accelerator.save_state` writes the state of every
    rank to the checkpoint's folder, as `gcbench_0_rank0.pt` and so on, and `load_state` reads it:
    the resumed job ends in the same bits as an uninterrupted one. A hook that was closed is saved
    until another one takes its place.

    Args:
        accelerator: the accelerator that prepared the model.
        model: the prepared model.
        optimizer: the prepared optimizer of this model, or a list of them.
        compressor: a registered name, a file (./mine.py), or a compressor.
        log_every: optimizer steps between calls of `accelerator.log` with rank 0's
            `gcbench/sent_bytes`, `gcbench/fp32_bytes`, `gcbench/bits_per_element` and comparisons;
            the number of exchanges is the step. Each check of `check_every` is also logged. 0 for
            never.
        options: arguments of `gcbench.comm_hook` except `optimizer` and `scaler`.

    Raises:
        gcbench.core.errors.UsageError: the model or the optimizer is not prepared, the model is not
            wrapped by DistributedDataParallel, or an option is invalid.
    """
    if log_every < 0:
        raise UsageError(f"log_every={log_every}: expected 0 or more steps")
    if optimizer is None:
        raise UsageError("optimizer=None: pass what accelerator.prepare(model, optimizer) returned")
    ddp = checked(accelerator, model)
    hook = frameworks.make(compressor, options, optimizer, accelerator.scaler)
    followed = hook._rates.optimizers
    if accelerator in _loaded or any(each.state for each in followed):
        warnings.warn(
            "the optimizer ran steps or loaded a state before compress was called, so residuals "
            "start empty. To resume a job, call compress before load_state",
            stacklevel=2,
        )
    hook.register(ddp)
    _add(accelerator, hook)
    if log_every:
        _log(accelerator, hook, followed[-1], log_every)
    return hook


def _record_loads() -> None:
    """Let `Accelerator.load_state` record the accelerator, which does not show it otherwise."""
    original = Accelerator.load_state

    @functools.wraps(original)
    def load_state(self: Accelerator, *args: Any, **options: Any) -> Any:
        result = original(self, *args, **options)
        if self not in _hooks:
            _loaded.add(self)
        return result

    Accelerator.load_state = load_state


_record_loads()


def checked(accelerator: Accelerator, model: nn.Module) -> DistributedDataParallel:
    """Return the DDP model that `accelerator` created.

    Raises:
        UsageError: the accelerator does not use DDP, or has not prepared this model.
    """
    kind = accelerator.distributed_type
    if kind in OTHERS:
        raise UsageError(f"distributed_type {kind.value}: {OTHERS[kind]}")
    ddp = frameworks.wrapped(model)
    if ddp is None:
        raise UsageError(
            f"compress received a {type(model).__name__} without DistributedDataParallel. Pass "
            "what accelerator.prepare(model, optimizer) returned"
        )
    return ddp


def _add(accelerator: Accelerator, hook: CommHook) -> None:
    """Add a hook to checkpoints, in the place of the first one that was closed, if any."""
    hooks = _hooks.setdefault(accelerator, [])
    present = [old() for old, _ in hooks]  # the accelerator refers to them
    number = next((i for i, old in enumerate(present) if old and old._closed), len(hooks))
    for _, handles in hooks[number : number + 1]:
        for handle in handles:
            handle.remove()
    handles = _checkpoint(accelerator, hook, f"gcbench_{number}")
    hooks[number : number + 1] = [(ref(hook), handles)]


def _checkpoint(accelerator: Accelerator, hook: CommHook, name: str) -> list[Any]:
    """Let `save_state` and `load_state` save and load the hook's state, on every rank.

    Returns the handles that end it.
    """

    def save(models: Sequence[nn.Module], weights: Sequence[Any], folder: str) -> None:
        frameworks.save(hook, folder, name)

    def load(models: Sequence[nn.Module], folder: str) -> None:
        state = frameworks.load(folder, name)
        if state is None:
            frameworks.warn_missing(folder)
        else:
            hook.load_state_dict(state)

    return [
        accelerator.register_save_state_pre_hook(save),
        accelerator.register_load_state_pre_hook(load),
    ]


def _log(accelerator: Accelerator, hook: CommHook, optimizer: Optimizer, every: int) -> None:
    """Let the optimizer's steps log the hook's bytes and comparisons."""
    metrics = frameworks.Metrics(hook)

    def log(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not hook._closed and (hook.step % every == 0 or metrics.checked):
            accelerator.log(metrics(), step=hook.step)

    optimizer.register_step_post_hook(log)
