"""One rank's place in the process group of a hook: how it connects, fails and names the cause."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from gcbench.core.errors import PeerLostError
from gcbench.core.world import ROLL_CALL_SECONDS, DistributedWorld
from gcbench.integrations import handshake
from gcbench.integrations.handshake import Roster

HOLDERS = ("torch.distributed", "typing_extensions")
"""Modules whose functions take a process group."""


class HookWorld(DistributedWorld):
    """One rank in a process group of a hook; `connect` creates the group.

    Only the hook uses the group, so a rank that fails can end it: the collectives of the other
    ranks then fail at once, and they read the cause from the store.
    """

    def __init__(
        self,
        device: torch.device,
        members: Sequence[int],
        rank: int,
        timeout: timedelta,
        limit: str,
    ) -> None:
        """`members`: the ranks of the group in the job; `rank`: this one's index among them."""
        group: Any = _Pending(rank, len(members))
        store = dist.HashStore()  # type: ignore[attr-defined]
        super().__init__(device, store, timeout, watched=False, group=group, limit=limit)
        self.members = self.everyone = tuple(members)
        self.store_answers = True
        self.hint = ""
        """A further possible cause why a rank does not answer: ", or ..."."""
        self.place = ["no exchange"]
        """This rank's last exchange, and its step, in the one element of a list that worlds which
        joined share; the other ranks read it after a time-out."""

    @property
    def rank(self) -> int:
        """This rank in the job."""
        return self.members[self.ranks[0]]

    @property
    def connected(self) -> bool:
        """Whether the process group exists."""
        return not isinstance(self.group, _Pending)

    def connect(self, store: Store, roster: Roster) -> None:
        """Join a new process group of these ranks, all of which call this.

        `store`: shared by the ranks of the group. `roster`: all of the hook's ranks, to which
        failures are reported.

        Raises:
            PeerLostError: a rank did not connect.
        """
        self.store, self.everyone = roster.store, roster.ranks

        def create() -> dist.ProcessGroup:
            with self.together():
                return _new_group(store, self.ranks[0], self.size, self.device, self.timeout)

        # torch uses the store, too.
        seconds = self.timeout.total_seconds() + 2 * handshake.STORE_SECONDS
        self.group = handshake.ask(create, seconds)
        # After this no rank can be left waiting in `connect`.
        self.collect([None])

    def join(self, other: HookWorld) -> None:
        """Use the process group of another of this rank's worlds."""
        self.store, self.everyone, self.group = other.store, other.everyone, other.group
        self.place = other.place

    def report(self, error: BaseException) -> None:
        """Write this rank's error to the store, where the others look for the cause.

        Raises:
            PeerLostError: the store does not answer.
        """
        first = not isinstance(error, PeerLostError)
        entry = {"first": first, "text": f"{type(error).__name__}: {error}"}
        handshake.ask(lambda: self.store.set(_cause(self.rank), json.dumps(entry)))

    def close(self) -> None:
        """Drop the group, which ends with its last reference. A later collective fails."""
        group: Any = _Pending(self.ranks[0], self.size)
        self.group = group

    def _lost(self, error: RuntimeError, waited: float) -> PeerLostError:
        message = (str(error).splitlines() or [""])[0]
        limit = f"the limit is {self.timeout.total_seconds():.0f} s ({self.limit})"
        try:
            cause, silent, places = handshake.ask(self._roll_call)
        except PeerLostError as lost:
            self.store_answers = False
            return PeerLostError(f"{lost}; a collective ended after {waited:.0f} s: {message:.200}")
        if cause:
            why = f"because {cause} (last exchange of rank {self.rank}: {self.place[0]})"
        elif silent:
            ranks = ", ".join(f"rank {rank}" for rank in silent)
            why = (
                f"without an answer from {ranks}, which has ended or stopped, or waits "
                f"elsewhere{self.hint}; last exchange of rank {self.rank}: {self.place[0]}; "
                f"{limit}. torch: {message:.200}"
            )
        else:
            at = "; ".join(f"rank {rank}: {place}" for rank, place in places.items())
            why = f"and every rank answers; their last exchanges: {at}; {limit}. torch: "
            why += f"{message:.200}"
        return PeerLostError(f"rank {self.rank}: a collective ended after {waited:.0f} s {why}")

    def _roll_call(self) -> tuple[str, list[int], dict[int, str]]:
        """Return the error of the rank that failed first, the ranks without an answer, or places.

        The places are the ranks' last exchanges.
        """
        others = [rank for rank in self.everyone if rank != self.rank]
        self.store.set(_here(self.rank), self.place[0])
        deadline = time.monotonic() + ROLL_CALL_SECONDS
        while True:
            causes = []
            for rank in others:
                if self.store.check([_cause(rank)]):
                    entry = json.loads(self.store.get(_cause(rank)))
                    causes.append((not entry["first"], f"rank {rank} failed: {entry['text']}"))
            if causes:
                return min(causes)[1], [], {}
            silent = [rank for rank in others if not self.store.check([_here(rank)])]
            if not silent:
                every = sorted(self.everyone)
                return "", [], {rank: self.store.get(_here(rank)).decode() for rank in every}
            if time.monotonic() > deadline:
                return "", silent, {}
            time.sleep(0.01)


def _here(rank: int) -> str:
    """Return the key that a rank sets to answer a roll call."""
    return f"gcbench/here/{rank}"


def _cause(rank: int) -> str:
    """Return the key of a rank's error in the store."""
    return f"gcbench/cause/{rank}"


def release(error: BaseException) -> None:
    """Drop the references to process groups in the finished frames of an error's traceback."""
    errors: list[BaseException | None] = [error]
    while errors:
        error_or_none = errors.pop()
        if error_or_none is None:
            continue
        for frame, _ in traceback.walk_tb(error_or_none.__traceback__):
            if frame.f_globals.get("__name__", "").startswith(HOLDERS):
                with suppress(RuntimeError):  # it is still running
                    frame.clear()
        errors += [error_or_none.__cause__, error_or_none.__context__]


def _new_group(
    store: Store, rank: int, size: int, device: torch.device, timeout: timedelta
) -> dist.ProcessGroup:
    """Return a new process group that torch does not register.

    `torch.distributed.new_group` must be called by all ranks of the job, also those outside the
    group. Otherwise ranks count groups differently, and since torch names groups by their number,
    two groups may share keys of the store, or one group may have two names.
    """
    group = dist.ProcessGroup(store, rank, size)
    backend: dist.ProcessGroupGloo | dist.ProcessGroupNCCL
    if device.type == "cuda":
        kind = dist.ProcessGroup.BackendType.NCCL
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        backend = dist.ProcessGroupNCCL(store, rank, size, options)
    else:
        kind = dist.ProcessGroup.BackendType.GLOO
        backend = dist.ProcessGroupGloo(store, rank, size, timeout)
    group._set_default_backend(kind)
    group._register_backend(device, kind, backend)
    return group


class _Pending:
    """The rank and size of a process group that does not exist yet, or not any more."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size
