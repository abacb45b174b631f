"""Ranks compare what they are about to do, before any of them waits in a collective."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from gcbench.core.errors import PeerLostError, UsageError

PATIENCE = 60.0
"""Seconds that a rank waits for the others to register, if the timeout is not shorter."""
_meetings: dict[str, int] = {}
"""How many meetings of each process group this process has come to."""


def meet(group: dist.ProcessGroup, told: Mapping[str, Any], refused: str, timeout: float) -> Store:
    """Compare what this rank tells, JSON, with what all others of `group` tell.

    Returns a part of the group's store that nobody else writes to, the same for all ranks.

    `refused`: why this rank cannot go on; "" if it can. It goes through the group's store and not
    through collectives, so that a rank that does not come is named in time.

    Raises:
        UsageError: a rank refused, this one perhaps; or what they told differs, with what it is.
        PeerLostError: a rank did not come within `timeout` seconds, or `PATIENCE`.
    """
    store, rank, size = group.get_group_store(), group.rank(), group.size()
    number = _meetings.get(group.group_name, 0)
    place = f"gcbench/comm_hook/{number}"
    keys = [f"{place}/rank/{each}" for each in range(size)]
    store.set(keys[rank], json.dumps({"refused": refused, "told": dict(told)}))
    seconds = min(timeout, PATIENCE)
    _meetings[group.group_name] = number + 1
    if refused:
        raise UsageError(refused)
    _await(store, keys, rank, seconds)
    everyone = [json.loads(store.get(key)) for key in keys]
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
                f"{seconds:.0f} s. Every rank calls register; look for the error of those"
            )
            with suppress(RuntimeError):  # who comes later hears of it
                store.set(keys[rank], json.dumps({"refused": said, "told": {}}))
            raise PeerLostError(f"rank {rank}: {said}") from error
