"""Process groups that can serve; and ranks that compare what they are about to do in them.

That comes before any of them waits in a collective.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from gcbench.core.errors import PeerLostError, UsageError

PATIENCE = 60.0
"""Seconds that a rank waits for the others to register, if the timeout is not shorter."""
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""The backend that a process group needs for tensors on each type of device."""


def check_backend(what: str, group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise UsageError if a process group cannot carry tensors of a device; `what`: whose it is."""
    needed = BACKENDS.get(device.type)
    if needed is None:
        raise UsageError(
            f"parameters are on {device}: {' or '.join(BACKENDS)} is expected. Move the model"
        )
    try:
        backend = group._get_backend(device).name()
    except RuntimeError:
        backend = "none"
    if backend != needed:
        raise UsageError(
            f"{what} process group has the backend {backend!r} for {device.type} tensors, and the "
            f'hook needs {needed!r}: torch.distributed.init_process_group("{needed}")'
        )


def meet(group: dist.ProcessGroup, told: Mapping[str, Any], refused: str, timeout: float) -> Store:
    """Compare what this rank tells with what all other ranks of `group` tell.

    The ranks exchange it through the group's store and not by a collective, so that a rank that
    does not come can be named. Returns a part of that store, the same for all ranks, that nobody
    else writes to.

    Args:
        group: whose ranks meet.
        told: what must be the same on all of them, by a name for people; JSON.
        refused: why this rank cannot go on; "" if it can.
        timeout: seconds to wait for the others, at most `PATIENCE`.

    Raises:
        UsageError: a rank refused, perhaps this one; or the ranks differ, with what in.
        PeerLostError: a rank did not come in time.
    """
    store, rank, size = group.get_group_store(), group.rank(), group.size()
    seconds = min(timeout, PATIENCE)
    try:
        # Counted in the store and not in the process, which may be older or younger than the group.
        number = store.add(f"gcbench/comm_hook/meetings/{rank}", 1) - 1
        place = f"gcbench/comm_hook/{number}"
        keys = [f"{place}/rank/{each}" for each in range(size)]
        store.set(keys[rank], json.dumps({"refused": refused, "told": dict(told)}))
        if refused:
            raise UsageError(refused)
        _await(store, keys, rank, seconds)
        everyone = [json.loads(store.get(key)) for key in keys]
    except RuntimeError as error:
        raise PeerLostError(
            f"rank {dist.get_rank()}: the job's store does not answer: rank 0, or torchrun's "
            f"agent, serves it and has ended or stands still. torch: {error!s:.200}"
        ) from error
    for other, each in enumerate(everyone):
        if each["refused"]:
            raise UsageError(f"rank {other} could not register: {each['refused']}")
    tellings = [each["told"] for each in everyone]
    different = [
        f"{name}: " + ", ".join(f"rank {i} {each.get(name)!r}" for i, each in enumerate(tellings))
        for name in sorted({name for each in tellings for name in each})
        if any(each.get(name) != tellings[0].get(name) for each in tellings)
    ]
    if different:
        raise UsageError(
            f"the ranks registered different things. {'; '.join(different)}. Make the hook with "
            "the same arguments, and load states of the same step, on every rank"
        )
    return PrefixStore(place, store)


def _await(store: Store, keys: list[str], rank: int, seconds: float) -> None:
    """Wait until all ranks have written; PeerLostError names those that have not."""
    deadline = time.monotonic() + seconds
    for key in keys:
        left = max(deadline - time.monotonic(), 0.001)
        try:
            store.wait([key], timedelta(seconds=left))
        except RuntimeError as error:
            missing = [i for i, each in enumerate(keys) if not store.check([each])]
            said = (
                f"rank {', '.join(map(str, missing))} did not register a hook within "
                f"{seconds:.0f} s. Every rank calls register: look for the errors of those"
            )
            with suppress(RuntimeError):  # who comes later hears of it
                store.set(keys[rank], json.dumps({"refused": said, "told": {}}))
            raise PeerLostError(f"rank {rank}: {said}") from error
