"""Ranks compare their settings before any of them waits in a collective; checks of backends."""

from __future__ import annotations

import json
import secrets
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
"""Seconds that a rank waits for the others to register on a DDP model, unless the timeout is
shorter."""
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""Type of device -> the backend that a process group needs for its tensors."""
STORE_SECONDS = 3.0
"""Maximum seconds to wait for a store."""
MEETING = "gcbench/comm_hook/meeting"
"""Key of a group's store with the name of its last meeting, a part of all keys of that meeting."""
POLL_SECONDS = 0.01
"""Seconds between two looks at a store in which ranks wait for each other."""


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
    *,
    call: str = "register",
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
        call: the function by which a rank registers.

    Raises:
        UsageError: a rank refused, maybe this one; or the ranks differ, with the values.
        PeerLostError: a rank did not arrive in time.
    """
    store, rank, size = group.get_group_store(), group.rank(), group.size()
    members = dist.get_process_group_ranks(group)

    def exchange() -> tuple[Store, list[dict[str, Any]]]:
        deadline = time.monotonic() + seconds
        part = _open(store, rank, size, deadline)
        if part is None:
            if refused:
                raise UsageError(refused)
            raise _without_first(store, members, rank, seconds, call)
        if rank:  # rank 0 may wait longer for others, and then reports it
            deadline = time.monotonic() + seconds
        keys = [f"rank/{each}" for each in range(size)]
        report = {"refused": refused, "summary": dict(summary), **asdict(roster)}
        part.set(keys[rank], json.dumps(report))
        if refused:
            raise UsageError(refused)
        _await(part, keys, members, rank, seconds, deadline, call)
        return part, [json.loads(part.get(key)) for key in keys]

    part, reports = ask(exchange, 2 * seconds + STORE_SECONDS)
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
    return part, Roster((first, number), tuple(sorted(ranks)))


def _open(store: Store, rank: int, size: int, deadline: float) -> Store | None:
    """Return a part of a group's store that only this meeting uses; None if rank 0 does not come.

    The store may have keys of earlier meetings, also of processes that torchrun has restarted. So
    rank 0 draws a random name, and confirms each rank's random reply to it: every rank then knows
    that the name is not an earlier one.
    """
    mine = secrets.token_hex(8)
    if rank == 0:
        part = _part(store, mine)
        store.set(MEETING, mine)
        absent = set(range(1, size))
        while absent and time.monotonic() < deadline:
            for each in [each for each in absent if part.check([f"reply/{each}"])]:
                part.set(f"confirmed/{part.get(f'reply/{each}').decode()}", "")
                absent.remove(each)
            time.sleep(POLL_SECONDS)
        return part
    while time.monotonic() < deadline:
        if store.check([MEETING]):
            part = _part(store, store.get(MEETING).decode())
            part.set(f"reply/{rank}", mine)
            if part.check([f"confirmed/{mine}"]):
                return part
        time.sleep(POLL_SECONDS)
    return None


def _part(store: Store, name: str) -> Store:
    return PrefixStore(f"gcbench/comm_hook/{name}", store)


def _without_first(
    store: Store, members: list[int], rank: int, seconds: float, call: str
) -> UsageError | PeerLostError:
    """Return the error of a rank that the group's first rank did not meet, perhaps any more."""
    if store.check([MEETING]):
        part = _part(store, store.get(MEETING).decode())
        report = json.loads(part.get("rank/0")) if part.check(["rank/0"]) else {}
        if report.get("refused"):
            return UsageError(f"rank {members[0]} could not register: {report['refused']}")
    return PeerLostError(f"rank {members[rank]}: {_absence([members[0]], seconds, call)}")


def _absence(missing: list[int], seconds: float, call: str) -> str:
    return (
        f"{', '.join(f'rank {each}' for each in missing)} did not call {call} within "
        f"{seconds:.0f} s. Every rank must call it: look for errors of those ranks"
    )


def _await(
    store: Store,
    keys: list[str],
    members: list[int],
    rank: int,
    seconds: float,
    deadline: float,
    call: str,
) -> None:
    """Wait until all ranks have written; PeerLostError names the missing ones.

    `seconds`: how long a rank waits, for the error; `call`: what the missing ones did not call.
    """
    for key in keys:
        left = max(deadline - time.monotonic(), 0.001)
        try:
            store.wait([key], timedelta(seconds=left))
        except RuntimeError as error:
            written = [store.check([each]) for each in keys]
            missing = [member for member, there in zip(members, written, strict=True) if not there]
            text = _absence(missing, seconds, call)
            with suppress(RuntimeError):  # a rank that arrives later reads it
                store.set(keys[rank], json.dumps({"refused": text, "summary": {}}))
            raise PeerLostError(f"rank {members[rank]}: {text}") from error
