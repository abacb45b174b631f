"""Gradient compression in an Accelerate job: `compress(accelerator, model, optimizer, "int8")`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

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
        "there is one process, and nothing to exchange. Start the script with "
        "torchrun --nproc-per-node N or accelerate launch --num_processes N"
    ),
    DistributedType.FSDP: (
        "FSDP reduces the gradients. With fsdp_version=2 call "
        "gcbench.shard_hook(...).register(model) after prepare; FSDP1 has no place for a hook"
    ),
    DistributedType.DEEPSPEED: "DeepSpeed reduces the gradients itself and has no place for a hook",
    DistributedType.MEGATRON_LM: "Megatron-LM reduces the gradients itself",
}
"""Why a way to distribute cannot have a hook, and what to call in its place."""
_hooks: WeakKeyDictionary[Accelerator, int] = WeakKeyDictionary()
"""How many hooks an accelerator has; each has its own file in a checkpoint."""


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

    Call it on every process after `prepare` and before `load_state`, once for each model that is
    trained. The hook follows the optimizer's learning rates. `accelerator.save_state` writes the
    state of every rank into the checkpoint's folder, as `gcbench_0_rank0.pt` and so on, and
    `load_state` reads it: the job ends in the bits of an uninterrupted one.

    Args:
        accelerator: the one that prepared the model.
        model: the prepared model.
        optimizer: the prepared optimizer of this model, or a list of them.
        compressor: a registered name, a file (./mine.py), or a compressor.
        log_every: after each such number of optimizer steps, and at each check of `check_every`,
            rank 0's `gcbench/sent_bytes`, `gcbench/fp32_bytes`, `gcbench/bits_per_element` and the
            comparisons go to `accelerator.log`, with the number of exchanges as the step; 0 for
            never.
        options: those of `gcbench.comm_hook`, without `optimizer` and `scaler`.

    Raises:
        gcbench.core.errors.UsageError: the model or the optimizer is not prepared, is not exchanged
            by DistributedDataParallel, or an option is wrong.
    """
    if log_every < 0:
        raise UsageError(f"log_every={log_every}: 0 or more steps expected")
    if optimizer is None:
        raise UsageError("optimizer=None: pass what accelerator.prepare(model, optimizer) returned")
    ddp = checked(accelerator, model)
    hook = frameworks.make(compressor, options, optimizer, accelerator.scaler)
    followed = hook._rates.optimizers
    if any(each.state for each in followed):
        warnings.warn(
            "the optimizer has made steps before compress was called, so residuals start empty. "
            "To resume a job, call compress before load_state",
            stacklevel=2,
        )
    hook.register(ddp)
    number = _hooks.get(accelerator, 0)
    _hooks[accelerator] = number + 1
    _checkpoint(accelerator, hook, f"gcbench_{number}")
    if log_every:
        _log(accelerator, hook, followed[-1], log_every)
    return hook


def checked(accelerator: Accelerator, model: nn.Module) -> DistributedDataParallel:
    """Return the DDP model that `accelerator` made.

    Raises:
        UsageError: the accelerator makes none, or it has not prepared this model.
    """
    kind = accelerator.distributed_type
    if kind in OTHERS:
        raise UsageError(f"distributed_type {kind.value}: {OTHERS[kind]}")
    ddp = frameworks.wrapped(model)
    if ddp is None:
        raise UsageError(
            f"a {type(model).__name__} came, which is not wrapped in DistributedDataParallel. Pass "
            "what accelerator.prepare(model, optimizer) returned"
        )
    return ddp


def _checkpoint(accelerator: Accelerator, hook: CommHook, name: str) -> None:
    """Have `save_state` and `load_state` save and load the hook's state, on every rank."""

    def save(models: Sequence[nn.Module], weights: Sequence[Any], folder: str) -> None:
        frameworks.save(hook, folder, name)

    def load(models: Sequence[nn.Module], folder: str) -> None:
        state = frameworks.load(folder, name)
        if state is None:
            frameworks.warn_missing(folder)
        else:
            hook.load_state_dict(state)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def _log(accelerator: Accelerator, hook: CommHook, optimizer: Optimizer, every: int) -> None:
    """Have the optimizer's steps log what the hook sent and compared."""
    metrics = frameworks.Metrics(hook)

    def log(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if hook.step % every == 0 or metrics.checked:
            accelerator.log(metrics(), step=hook.step)

    optimizer.register_step_post_hook(log)
