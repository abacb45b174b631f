"""Process groups that can serve; and ranks that compare what they are about to do in them.

That comes before any of them waits in a collective.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from gcbench.core.errors import PeerLostError, UsageError
from gcbench.integrations.agreement import differences

T = TypeVar("T")
PATIENCE = 60.0
"""Seconds that a rank waits for the others to register, if the timeout is not shorter."""
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""The backend that a process group needs for tensors on each type of device."""


STORE_SECONDS = 3.0
"""The most seconds in which a store answers."""


def ask(call: Callable[[], T], seconds: float = STORE_SECONDS) -> T:
    """Return the result of calls to a job's store.

    Raises:
        PeerLostError: the store fails, or does not answer in time: torch may wait for ever.
    """
    outcome: Future[T] = Future()

    def work() -> None:
        try:
            outcome.set_result(call())
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        return outcome.result(seconds)
    except (RuntimeError, TimeoutError) as error:
        raise PeerLostError(
            f"rank {dist.get_rank()}: the job's store does not answer. It is served by rank 0, or "
            f"by torchrun's agent, which has ended or stands still. torch: {error!s:.200}"
        ) from error


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


@dataclass(frozen=True)
class Roster:
    """The ranks of a hook, in one group or in the rows and columns of a grid.

    They share a part of the job's store, where they report failures.
    """

    name: tuple[int, int]
    """The lowest rank, and its number of hooks so far: no other hook has the same."""
    ranks: tuple[int, ...]

    @classmethod
    def alone(cls) -> Roster:
        """Return the roster of a rank that has met no other; each hook calls it once."""
        rank = dist.get_rank()
        return cls((rank, ask(lambda: _root().add(f"gcbench/hooks/{rank}", 1))), (rank,))

    @property
    def store(self) -> Store:
        """The shared part of the job's store."""
        return PrefixStore("gcbench/hook/{}.{}".format(*self.name), _root())


def _root() -> Store:
    """Return the store of the job's default process group."""
    whole = dist.group.WORLD
    assert whole is not None
    return whole.get_group_store()


def meet(
    group: dist.ProcessGroup,
    summary: Mapping[str, Any],
    refused: str,
    seconds: float,
    roster: Roster,
) -> tuple[Store, Roster]:
    """Check that all ranks of `group` registered with the same settings.

    The ranks exchange it through the group's store and not by a collective, so that a rank that
    does not come can be named. Returns a part of that store, the same for all ranks, that nobody
    else writes to; and the roster of all ranks that they have met.

    Args:
        group: whose ranks meet.
        summary: what must be the same on all of them, by a name for people; JSON.
        refused: why this rank cannot go on; "" if it can.
        seconds: how long to wait for the others.
        roster: the ranks that this one has met.

    Raises:
        UsageError: a rank refused, perhaps this one; or the ranks differ, with what in.
        PeerLostError: a rank did not come in time.
    """
    store, rank, size = group.get_group_store(), group.rank(), group.size()
    members = dist.get_process_group_ranks(group)

    def met() -> tuple[str, list[dict[str, Any]]]:
        # Counted in the store and not in the process, which may be older or younger than the group.
        number = store.add(f"gcbench/comm_hook/meetings/{rank}", 1) - 1
        place = f"gcbench/comm_hook/{number}"
        keys = [f"{place}/rank/{each}" for each in range(size)]
        card = {"refused": refused, "summary": dict(summary), **asdict(roster)}
        store.set(keys[rank], json.dumps(card))
        if refused:
            raise UsageError(refused)
        _await(store, keys, members, rank, seconds)
        return place, [json.loads(store.get(key)) for key in keys]

    place, everyone = ask(met, seconds + STORE_SECONDS)
    for other, each in zip(members, everyone, strict=True):
        if each["refused"]:
            raise UsageError(f"rank {other} could not register: {each['refused']}")
    summaries = [each["summary"] for each in everyone]
    different = differences(dict(zip(members, summaries, strict=True)))
    if different:
        raise UsageError(
            f"the ranks registered different things. {'; '.join(different.values())}. Make the "
            "hook with the same arguments, and load states of the same step, on every rank"
        )
    first, number = min(each["name"] for each in everyone)
    ranks = {rank for each in everyone for rank in each["ranks"]}
    return PrefixStore(place, store), Roster((first, number), tuple(sorted(ranks)))


def _await(store: Store, keys: list[str], members: list[int], rank: int, seconds: float) -> None:
    """Wait until all ranks have written; PeerLostError names those that have not."""
    deadline = time.monotonic() + seconds
    for key in keys:
        left = max(deadline - time.monotonic(), 0.001)
        try:
            store.wait([key], timedelta(seconds=left))
        except RuntimeError as error:
            written = [store.check([each]) for each in keys]
            missing = [member for member, there in zip(members, written, strict=True) if not there]
            text = (
                f"{', '.join(f'rank {each}' for each in missing)} did not register a hook within "
                f"{seconds:.0f} s. Every rank calls register: look for the errors of those"
            )
            with suppress(RuntimeError):  # a rank that comes later reads it
                store.set(keys[rank], json.dumps({"refused": text, "summary": {}}))
            raise PeerLostError(f"rank {members[rank]}: {text}") from error
