"""What the hooks for DDP and FSDP2 have in common: rates, failures, states by rank, attributes."""

# Not `from __future__ import annotations`: DDP compares the hook's annotations with classes.
import inspect
import json
import time
import traceback
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket, Store  # type: ignore[attr-defined]

from gcbench.core import sealed
from gcbench.core.errors import PeerLostError, UsageError
from gcbench.core.exchange import checked_rate
from gcbench.core.world import ROLL_CALL_SECONDS, DistributedWorld, Traffic
from gcbench.integrations import chosen, handshake
from gcbench.integrations.agreement import Common
from gcbench.integrations.handshake import Roster
from gcbench.integrations.rates import Rates
from gcbench.integrations.watch import Watch

NONFINITE = ("stop", "skip")
"""What may happen at a gradient that is not finite."""
RESIZE = ("refuse", "redistribute")
"""What may happen to a state of another number of ranks."""


HOLDERS = ("torch.distributed", "typing_extensions")
"""Modules whose functions have a process group among their arguments."""


class UnknownAttributeError(UsageError, AttributeError):
    """An attribute of a hook that does not exist, or that nobody may set."""


class RankState(dict[str, Any]):
    """A hook's state, by the rank that it is of; it reads like that rank's entry.

    `torch.distributed.checkpoint` takes values with the same key on several ranks for copies of one
    another, so each rank has keys of its own. It is saved as an OrderedDict, which `torch.load`
    takes with `weights_only=True`.
    """

    def __missing__(self, key: str) -> Any:
        """Return a value of the only rank's entry."""
        if len(self) == 1:
            return next(iter(self.values()))[key]
        raise KeyError(key)

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.items())


def key_of(rank: int, size: int) -> str:
    """Return the key of a rank's entry in a state."""
    return f"rank {rank} of {size}"


class HookWorld(DistributedWorld):
    """One rank in a process group of a hook; `join` makes the group.

    The group belongs to the hook alone, so that a rank that fails can end it: the collectives of
    the other ranks then fail at once, and they read the cause in the store.
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
        place: Any = _Place(rank, len(members))
        store = dist.HashStore()  # type: ignore[attr-defined]
        super().__init__(device, store, timeout, watched=False, group=place, limit=limit)
        self.members = self.everyone = tuple(members)
        self.store_answers = True

    @property
    def rank(self) -> int:
        """This rank in the job."""
        return self.members[self.ranks[0]]

    def connect(self, store: Store, roster: Roster) -> None:
        """Join a new process group of these ranks, all of which call this.

        `store`: where they find each other. `roster`: all of the hook's ranks, of this group or
        not, among which failures are reported.

        Raises:
            PeerLostError: a rank did not come.
        """
        self.store, self.everyone = roster.store, roster.ranks

        def made() -> dist.ProcessGroup:
            with self.together():
                return own_group(store, self.ranks[0], self.size, self.device, self.timeout)

        # torch asks the store, too.
        seconds = self.timeout.total_seconds() + 2 * handshake.STORE_SECONDS
        self.group = handshake.ask(made, seconds)
        # One that fails later leaves none in `connect`.
        self.collect([None])

    def join(self, other: "HookWorld") -> None:
        """Communicate in the group of another of this rank's worlds."""
        self.store, self.everyone, self.group = other.store, other.everyone, other.group

    def report(self, error: BaseException) -> None:
        """Write this rank's error where the others look for the cause.

        Raises:
            PeerLostError: the store does not answer.
        """
        first = not isinstance(error, PeerLostError)
        entry = {"first": first, "text": f"{type(error).__name__}: {error}"}
        handshake.ask(lambda: self.store.set(_cause(self.rank), json.dumps(entry)))

    def close(self) -> None:
        """Leave the group, which ends with its last reference. A later collective fails."""
        place: Any = _Place(self.ranks[0], self.size)
        self.group = place

    def _lost(self, error: RuntimeError, waited: float) -> PeerLostError:
        said = (str(error).splitlines() or [""])[0]
        limit = f"the limit is {self.timeout.total_seconds():.0f} s ({self.limit})"
        try:
            cause, silent = handshake.ask(self._cause_and_silent)
        except PeerLostError as lost:
            self.store_answers = False
            return PeerLostError(f"{lost}; a collective ended after {waited:.0f} s: {said:.200}")
        if cause:
            why = f"because {cause}"
        elif silent:
            ranks = ", ".join(f"rank {rank}" for rank in silent)
            why = (
                f"without an answer from {ranks}, which has ended or stands still; {limit}. "
                f"torch: {said:.200}"
            )
        else:
            why = f"and every rank answers; {limit}. torch: {said:.200}"
        return PeerLostError(f"rank {self.rank}: a collective ended after {waited:.0f} s {why}")

    def _cause_and_silent(self) -> tuple[str, list[int]]:
        """Return the error of the rank that failed first; or the ranks that do not answer."""
        others = [rank for rank in self.everyone if rank != self.rank]
        self.store.set(_here(self.rank), "")
        patience = time.monotonic() + ROLL_CALL_SECONDS
        while True:
            causes = []
            for rank in others:
                if self.store.check([_cause(rank)]):
                    entry = json.loads(self.store.get(_cause(rank)))
                    causes.append((not entry["first"], f"rank {rank} failed: {entry['text']}"))
            if causes:
                return min(causes)[1], []
            silent = [rank for rank in others if not self.store.check([_here(rank)])]
            if not silent or time.monotonic() > patience:
                return "", silent
            time.sleep(0.01)


def _here(rank: int) -> str:
    """Return the key by which a rank answers a roll call."""
    return f"gcbench/here/{rank}"


def _cause(rank: int) -> str:
    """Return the key of a rank's error in the store."""
    return f"gcbench/cause/{rank}"


def _release(error: BaseException) -> None:
    """Drop the process groups that the finished frames of an error's traceback refer to."""
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


def own_group(
    store: Store, rank: int, size: int, device: torch.device, timeout: timedelta
) -> dist.ProcessGroup:
    """Return a new process group that torch's list of groups does not contain.

    `torch.distributed.new_group` will not do: all ranks of the job must call it, also those that
    are not in the group. If some do not, ranks count groups differently, and as torch names groups
    by their number, two groups may then share keys of the store, or one group may have two names.
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


class _Place:
    """The rank and the size of a process group that is still to come."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def compressed(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Stand for a hook of this package in DDP's list of hooks, which copies of the model share."""
    raise UsageError("a copy of a model has no hook: register a new one on it")


class BeforeForward:
    """Calls a hook before each forward pass of its model. A copy of the model has no hook."""

    def __init__(self, hook: "Hook") -> None:
        self._hook = hook

    def __call__(self, model: nn.Module, inputs: Any) -> None:
        """Let the hook raise or warn."""
        self._hook._before_forward(model)

    def __deepcopy__(self, memo: Any) -> Any:
        return Copied()

    def __reduce__(self) -> Any:
        return Copied, ()


class AfterForward(BeforeForward):
    """Calls a hook after each forward pass of its model that did not raise."""

    def __call__(self, model: nn.Module, inputs: Any, output: Any = None) -> None:
        """Tell the hook."""
        self._hook._after_forward()

    def __deepcopy__(self, memo: Any) -> Any:
        return ignored

    def __reduce__(self) -> Any:
        return ignored.__name__


def ignored(model: nn.Module, inputs: Any, output: Any) -> None:
    """Stand in a copy of a model where the model has `AfterForward`."""


class Copied:
    """Stands in a copy of a model where the model has `BeforeForward`."""

    def __init__(self) -> None:
        self._warned = False

    def __call__(self, model: nn.Module, inputs: Any) -> None:
        """Warn, once, if the copy is trained."""
        if model.training and torch.is_grad_enabled() and not self._warned:
            self._warned = True
            warnings.warn(
                "this is a copy of a model whose gradients are compressed, and the copy's are "
                "not. Register a new hook on the copy to compress them",
                stacklevel=2,
            )


class Hook:
    """The part of a hook that does not depend on the framework."""

    _settings: Any
    CALL = ""
    """How the user makes one."""
    FORMAT = 0
    """Version of the states."""
    RESIZE = ""
    """The argument that lets a state of another number of ranks be loaded; "": there is none."""

    def __init__(self, settings: Any, rates: Rates) -> None:
        self._settings, self._rates = settings, rates
        self._registered = self._closed = False
        self._loaded: Mapping[str, Any] | None = None
        self._loads = 0
        """States that were loaded since `register`: the ranks compare it at the next exchange."""
        self._failed: BaseException | None = None
        self._summary: dict[str, Any] = {}
        self._size = 0
        self._watch = Watch()
        self._frozen: list[tuple[str, nn.Parameter]] = []
        self._checked_bytes = Traffic()

    # -- attributes --------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the learning rate; everything else is set when the hook is made.

        Raises:
            UsageError: an attribute that does not exist, or that nobody may set.
        """
        if name == "lr" or name.startswith("_"):
            object.__setattr__(self, name, value)
            return
        what = "is read only" if hasattr(type(self), name) else "does not exist"
        raise UnknownAttributeError(
            f"{type(self).__name__}.{name} = {value!r:.40}: this attribute {what}; only lr can be "
            f"set. Fields of the compressor are arguments, {self.CALL}(..., {name}={value!r:.40}), "
            f'and may change by step: {self.CALL}("topk", ratio="0:0.25/100:0.01")'
        )

    @property
    def settings(self) -> Any:
        """What the hook was made with."""
        return self._settings

    @property
    def __signature__(self) -> inspect.Signature:
        """DDP asks for it in `register_comm_hook`, which is not how this hook is registered."""
        raise UsageError(self._how_to_register())

    def __call__(self, state: Any, bucket: Any) -> NoReturn:
        """Name the right call; a hook is no function of a bucket.

        Raises:
            UsageError: always.
        """
        raise UsageError(self._how_to_register())

    def _how_to_register(self) -> str:
        return (
            f"a {type(self).__name__} needs the whole model and not its buckets alone, so it is "
            f"not passed to register_comm_hook or a wrapper of torch's hooks. Call "
            f"{self.CALL}(...).register(model)"
        )

    def __copy__(self) -> NoReturn:
        raise UsageError(self._no_copy())

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise UsageError(self._no_copy())

    def __reduce__(self) -> NoReturn:
        raise UsageError(self._no_copy())

    def _no_copy(self) -> str:
        return (
            f"a {type(self).__name__} belongs to one model in one process and cannot be copied or "
            f"pickled. Save hook.state_dict(), and load it into a new {self.CALL}(...)"
        )

    # -- rates -------------------------------------------------------------------------------------

    @property
    def lr(self) -> float | None:
        """The learning rate that residuals follow; None until one is set or loaded.

        With `optimizer=` the hook reads it from the optimizer's parameter groups, and this is None.
        Otherwise set it at each step with your schedule, so that residuals stand for the same
        update after a change. The first rate rescales nothing; nor does 0. A state that is loaded
        brings the rate of its residuals, unless one was set before.
        """
        return self._rates.assigned

    @lr.setter
    def lr(self, rate: float) -> None:
        if self._rates.optimizers:
            raise UsageError(
                f"lr={rate!r} with optimizer=: the hook reads the rates of the optimizer's "
                "parameter groups. Leave one of them out"
            )
        self._rates.assigned = checked_rate(rate)

    def _follow_steps(self, parameters: Mapping[str, Tensor]) -> None:
        """Read the rates of these parameters; learn from each step which rate was applied."""
        own = weakref.ref(self)

        def stepped() -> None:
            hook = own()
            if hook is not None and not hook._closed and hook._failed is None:
                hook._stepped()

        self._rates.bind(parameters, stepped)

    def _stepped(self) -> None:
        """Take the optimizer's rates for those of the last mean."""
        raise NotImplementedError

    def _common(
        self, position: str, step: int, names: Sequence[str], rates: Sequence[float | None]
    ) -> Common:
        """Return what must be the same on all ranks at this exchange."""
        values: dict[str, Any] = {
            "position": position,
            "step": step,
            "states loaded since register": self._loads,
        }
        if self._rates.optimizers:
            values |= {f"learning rate of {n}": r for n, r in zip(names, rates, strict=True)}
        else:
            values["hook.lr"] = self._rates.assigned
        values["loss scale"] = self._rates.scale
        return Common.of(values)

    # -- failures ----------------------------------------------------------------------------------

    def raise_failure(self) -> None:
        """Raise what broke the last exchange off, if anything."""
        if self._failed is not None:
            raise self._failed

    def _worlds(self) -> Iterable[HookWorld]:
        """Return this rank's place in each process group of the hook."""
        raise NotImplementedError

    def _fail(self, error: BaseException, *, agreed: bool = False) -> None:
        """Raise an error at every later step; stop the other ranks, unless they `agreed` on it.

        They find the error in the store when their collectives break off.
        """
        if self._failed is not None:
            return
        self._failed = error
        if not agreed:
            worlds = list(self._worlds())
            if all(world.store_answers for world in worlds):
                with suppress(PeerLostError):
                    for world in {id(world.store): world for world in worlds}.values():
                        world.report(error)
            _release(error)
            for world in worlds:
                world.close()

    def _before_forward(self, model: nn.Module) -> None:
        raise NotImplementedError

    def _after_forward(self) -> None:
        raise NotImplementedError

    def _warn_unfrozen(self) -> None:
        """Warn, once, about parameters that began to require a gradient after `register`."""
        thawed = [name for name, parameter in self._frozen if parameter.requires_grad]
        if thawed:
            self._frozen = []
            warnings.warn(
                f"{', '.join(thawed[:3])} did not require a gradient when the hook was registered "
                "and does now. Its gradient is not averaged over ranks, so they train apart. Set "
                "requires_grad first, then wrap the module anew and register a new hook",
                stacklevel=2,
            )

    # -- state -------------------------------------------------------------------------------------

    def _sealed(self, rank: int, entry: Mapping[str, Any]) -> RankState:
        """Return a state of this hook's rank, with what all states have."""
        whole = {
            "format": self.FORMAT,
            "rank": rank,
            "world_size": self._size,
            "lr": self._rates.assigned,
            "told": self._summary,
            **entry,
        }
        return RankState({key_of(rank, self._size): sealed.seal(whole)})

    def _keep(self, state: Mapping[str, Any]) -> None:
        """Keep a state for `register`; its rate holds from now on, unless one was set."""
        self._loaded = None
        for name, entry in state.items():
            found = sealed.entry(entry, "format") if isinstance(entry, Mapping) else None
            if found != self.FORMAT:
                raise UsageError(
                    f"state {name!r} of format {found!r}: {self.FORMAT} expected, as "
                    f"{type(self).__name__}.state_dict returns it"
                )
            rate = sealed.entry(entry, "lr")
            if self._rates.assigned is None and not self._rates.optimizers and rate is not None:
                self._rates.assigned = sealed.number("lr", rate)
            self._loaded = state

    def _entry(self, state: Mapping[str, Any], rank: int, size: int) -> Mapping[str, Any]:
        """Return this rank's entry of a state, checked but for its exchanges.

        Raises:
            UsageError: the state is of another rank, world size or configuration, or is damaged.
        """
        entry = state.get(key_of(rank, size))
        if entry is None:
            way = f" give {self.CALL}(..., {self.RESIZE}) and" if self.RESIZE else ""
            raise UsageError(
                f"the state is that of {', '.join(map(str, state))}, and this is rank {rank} of "
                f"{size}: every rank saves and loads its own. To go on with another number of "
                f"ranks{way or ' register a hook without a state: residuals are then lost'}"
                + (
                    " load the entries of all ranks of the job that saved them, in one dict"
                    if way
                    else ""
                )
            )
        place = sealed.entry(entry, "rank"), sealed.entry(entry, "world_size")
        if place != (rank, size):
            raise UsageError(
                f"the state is that of rank {place[0]} of {place[1]}, and this is rank {rank} of "
                f"{size}: every rank saves and loads its own"
            )
        self._check_entry(entry)
        return entry  # type: ignore[no-any-return]

    def _check_entry(self, entry: Mapping[str, Any]) -> None:
        """Raise UsageError if an entry was saved with other settings, or changed after that."""
        chosen.check_settings(sealed.entry(entry, "told"), self._summary)
        sealed.check_seal(entry)

    def _entries(self, state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return the checked entries of all ranks of the job that saved a state, by rank.

        Raises:
            UsageError: the entry of a rank is missing, or is of another configuration.
        """
        sizes = {sealed.entry(entry, "world_size") for entry in state.values()}
        before = max((size for size in sizes if isinstance(size, int)), default=0)
        missing = [r for r in range(before) if key_of(r, before) not in state]
        if len(sizes) != 1 or missing:
            raise UsageError(
                f"the state has {', '.join(map(repr, state))}: to redistribute it, the entries of "
                "all ranks of one job are expected, in one dict: {**state_0, **state_1, ...}"
            )
        entries = [state[key_of(rank, before)] for rank in range(before)]
        for entry in entries:
            self._check_entry(entry)
        steps = [sealed.entry(entry, "step") for entry in entries]
        if len(set(steps)) > 1:
            raise UsageError(f"the ranks' states are of steps {steps}: one step is expected")
        return entries


def traffic_of(name: str, value: Any) -> Traffic:
    """Return the traffic that a state has; UsageError if it is malformed."""
    return Traffic(*(sealed.number(name, each) for each in sealed.sequence(name, value, 3)))
