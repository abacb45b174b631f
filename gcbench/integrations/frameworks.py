"""Shared parts of the adapters for Lightning, Accelerate and Transformers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gcbench.core.compressor import Compressor
from gcbench.core.errors import UsageError
from gcbench.core.world import from_bytes, to_bytes
from gcbench.integrations.ddp import CommHook, comm_hook
from gcbench.integrations.hook import key_of
from gcbench.integrations.hook_world import HookWorld


def make(
    compressor: str | Compressor,
    options: Mapping[str, Any],
    optimizer: Any = None,
    scaler: Any = None,
) -> CommHook:
    """Return a hook that follows the framework's optimizers and GradScaler.

    Raises:
        UsageError: an option that the framework sets, or an invalid one.
    """
    if taken := sorted({"optimizer", "scaler"} & set(options)):
        raise UsageError(
            f"{', '.join(taken)}: the hook uses the framework's. Leave {' and '.join(taken)} out"
        )
    return comm_hook(compressor, optimizer=optimizer, scaler=scaler, **options)


def wrapped(model: Any) -> DistributedDataParallel | None:
    """Return the DDP model, also from inside torch.compile's wrapper; None if there is none."""
    model = getattr(model, "_orig_mod", model)
    return model if isinstance(model, DistributedDataParallel) else None


class Metrics:
    """The metrics of one hook for a framework's logger.

    Bytes are those of this rank since the job's first step. With `check_every` there are each
    parameter's relative error and cosine at the last checked step, and the worst of all.
    """

    def __init__(self, hook: CommHook) -> None:
        self.hook = hook
        self._logged = hook.step - 1
        """The last step whose comparisons were returned."""

    @property
    def checked(self) -> bool:
        """Whether there are comparisons that were not returned."""
        return bool(self.hook.records) and self.hook.records[-1].step > self._logged

    def __call__(self) -> dict[str, float]:
        """Return the metrics by name: bytes, and new comparisons."""
        hook = self.hook
        sent, plain = hook.traffic.payload_up, hook.plain_bytes
        values = {"gcbench/sent_bytes": float(sent), "gcbench/fp32_bytes": float(plain)}
        if plain:
            values["gcbench/bits_per_element"] = 32.0 * sent / plain
        if self.checked:
            self._logged = hook.records[-1].step
            records = [each for each in hook.records if each.step == self._logged]
            for each in records:
                values[f"gcbench/relative_error/{each.name}"] = each.relative_error
                values[f"gcbench/cosine/{each.name}"] = each.cosine
            values["gcbench/max_relative_error"] = max(each.relative_error for each in records)
            values["gcbench/min_cosine"] = min(each.cosine for each in records)
        return values


# ---- states --------------------------------------------------------------------------------------


def gather(hook: CommHook) -> dict[str, Any]:
    """Return the states of all ranks in one dict on rank 0, {} elsewhere. All ranks call it.

    They are sent in the hook's process group, which ends if a rank fails; after `close` in the
    default one. Rank 0 receives one after the other.

    Raises:
        PeerLostError: another rank failed or did not answer in time.
        GcbenchError: the error that ended the hook's last exchange.
    """
    hook.raise_failure()
    sent = torch.frombuffer(bytearray(to_bytes(hook.state_dict())), dtype=torch.uint8)
    return hook._serialized(lambda: _gathered(hook._level.world, sent))


def _gathered(world: HookWorld, sent: Tensor) -> dict[str, Any]:
    """Return the states of all ranks on rank 0; `sent`: this rank's, as bytes on the CPU."""
    group, rank, device = world.group if world.connected else None, world.ranks[0], world.device
    result = dict(from_bytes(sent.numpy().tobytes())) if rank == 0 else {}
    with world.together():
        sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world.size)]
        dist.all_gather(sizes, torch.full_like(sizes[0], sent.numel()), group=group)
        if rank:
            on_device = sent.to(device)
            work: Any = dist.isend(on_device, group=group, group_dst=0)
            work.wait()
        for other in range(1, world.size) if rank == 0 else ():
            received = torch.empty(int(sizes[other]), dtype=torch.uint8, device=device)
            work = dist.irecv(received, group=group, group_src=other)
            work.wait()
            result |= from_bytes(received.cpu().numpy().tobytes())
    return result


def save(hook: CommHook, folder: str | Path, name: str) -> None:
    """Write this rank's state to a checkpoint's folder.

    Rank 0 deletes states there of ranks that the job does not have: of one with more ranks, which
    saved in the same folder before.
    """
    folder, rank = Path(folder), dist.get_rank()
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(dict(hook.state_dict()), folder / _file(name, rank))
    present = {_file(name, each) for each in range(dist.get_world_size())}
    for path in folder.glob(_file(name, "*")) if rank == 0 else ():
        if path.name not in present:
            path.unlink()


def load(folder: str | Path, name: str) -> dict[str, Any] | None:
    """Return this rank's state from a checkpoint's folder; None if it has no states.

    If the folder has none for this rank and world size, return those of all ranks in one dict,
    which the hook redistributes or refuses.
    """
    folder, rank = Path(folder), dist.get_rank()
    path = folder / _file(name, rank)
    if path.exists():
        state: dict[str, Any] = torch.load(path, weights_only=True)
        if key_of(rank, dist.get_world_size()) in state:
            return state
    states = [torch.load(path, weights_only=True) for path in folder.glob(_file(name, "*"))]
    return {key: entry for each in states for key, entry in each.items()} or None


def _file(name: str, rank: int | str) -> str:
    return f"{name}_rank{rank}.pt"


def warn_missing(checkpoint: object) -> None:
    """Warn on rank 0 that a checkpoint has no compression state."""
    if dist.get_rank() == 0:
        warnings.warn(
            f"{checkpoint} has no compression state: it was saved without this hook, or after an "
            "exception. Training resumes with empty residuals",
            stacklevel=3,
        )
