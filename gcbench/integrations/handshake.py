"""Ranks compare their settings before any of them waits in a collective; checks of backends."""

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
"""Seconds that a rank waits for the others to register, unless the timeout is shorter."""
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""Type of device -> the backend that a process group needs for its tensors."""
STORE_SECONDS = 3.0
"""Maximum seconds to wait for a store."""


def ask(call: Callable[[], T], seconds: float = STORE_SECONDS) -> T:
    """Return the result of a function that calls the job's store.

    Raises:
        PeerLostError: the store fails, or does not answer in time. Torch may wait forever.
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
            f"by torchrun's agent, which has ended or stopped. torch: {error!s:.200}"
        ) from error


def check_backend(what: str, group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise UsageError if a group cannot send tensors of a device; `what` names it in errors."""
    needed = BACKENDS.get(device.type)
    if needed is None:
        raise UsageError(
            f"parameters are on {device}: expected {' or '.join(BACKENDS)}. Move the model"
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

    They share a prefix of the job's store, where they report failures.
    """

    name: tuple[int, int]
    """The lowest rank, and its number of hooks so far: unique to this hook."""
    ranks: tuple[int, ...]

    @classmethod
    def alone(cls) -> Roster:
        """Return the roster of a rank before any meeting; each hook calls it once."""
        rank = dist.get_rank()
        return cls((rank, ask(lambda: _root().add(f"gcbench/hooks/{rank}", 1))), (rank,))

    @property
    def store(self) -> Store:
        """The shared prefix of the job's store."""
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

    The ranks use the group's store, not a collective, so that the error can name a missing rank.
    Returns a prefix of that store that only these ranks use, and the roster of all ranks that they
    have met.

    Args:
        group: the ranks that meet.
        summary: what must be the same on all of them, by a readable name; JSON.
        refused: why this rank cannot register; "" if it can.
        seconds: how long to wait for the others.
        roster: the ranks that this one has met.

    Raises:
        UsageError: a rank refused, maybe this one; or the ranks differ, with the values.
        PeerLostError: a rank did not arrive in time.
    """
    store, rank, size = group.get_group_store(), group.rank(), group.size()
    members = dist.get_process_group_ranks(group)

    def exchange() -> tuple[str, list[dict[str, Any]]]:
        # Counted in the store: the process may be older or younger than the group.
        number = store.add(f"gcbench/comm_hook/meetings/{rank}", 1) - 1
        prefix = f"gcbench/comm_hook/{number}"
        keys = [f"{prefix}/rank/{each}" for each in range(size)]
        report = {"refused": refused, "summary": dict(summary), **asdict(roster)}
        store.set(keys[rank], json.dumps(report))
        if refused:
            raise UsageError(refused)
        _await(store, keys, members, rank, seconds)
        return prefix, [json.loads(store.get(key)) for key in keys]

    prefix, reports = ask(exchange, seconds + STORE_SECONDS)
    for other, each in zip(members, reports, strict=True):
        if each["refused"]:
            raise UsageError(f"rank {other} could not register: {each['refused']}")
    summaries = [each["summary"] for each in reports]
    different = differences(dict(zip(members, summaries, strict=True)))
    if different:
        raise UsageError(
            f"the ranks registered different settings. {'; '.join(different.values())}. Make the "
            "hook with the same arguments, and load the same parameters and states of the same "
            "step, on every rank"
        )
    first, number = min(each["name"] for each in reports)
    ranks = {rank for each in reports for rank in each["ranks"]}
    return PrefixStore(prefix, store), Roster((first, number), tuple(sorted(ranks)))


def _await(store: Store, keys: list[str], members: list[int], rank: int, seconds: float) -> None:
    """Wait until all ranks have written; PeerLostError names the missing ones."""
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
                f"{seconds:.0f} s. Every rank must call register: look for errors of those ranks"
            )
            with suppress(RuntimeError):  # a rank that arrives later reads it
                store.set(keys[rank], json.dumps({"refused": text, "summary": {}}))
            raise PeerLostError(f"rank {members[rank]}: {text}") from error
