"""What the hooks for DDP and FSDP2 have in common: rates, failures, states by rank, attributes."""

# Not `from __future__ import annotations`: DDP compares the hook's annotations with classes.
import inspect
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
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
from gcbench.core.world import DistributedWorld, Traffic
from gcbench.integrations import chosen
from gcbench.integrations.agreement import Common
from gcbench.integrations.rates import Rates
from gcbench.integrations.watch import Watch

NONFINITE = ("stop", "skip")
"""What may happen at a gradient that is not finite."""
RESIZE = ("refuse", "redistribute")
"""What may happen to a state of another number of ranks."""


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
    """One rank in the process group of a hook; the group and the store may come later.

    A rank that fails by itself leaves its error in the store, where the others find the cause of
    the collective that then breaks off.
    """

    def __init__(
        self, device: torch.device, rank: int, size: int, timeout: timedelta, limit: str
    ) -> None:
        place: Any = _Place(rank, size)
        store = dist.HashStore()  # type: ignore[attr-defined]
        super().__init__(device, store, timeout, watched=False, group=place, limit=limit)

    def join(self, store: Store, group: dist.ProcessGroup) -> None:
        """Begin to communicate in a group; `store` is for the causes of failures."""
        self.store, self.group = store, group

    def report(self, error: BaseException) -> None:
        """Leave this rank's error where the others look for the cause."""
        if not isinstance(error, PeerLostError):
            with suppress(RuntimeError):
                said = f"{type(error).__name__}: {error}"
                self.store.set(f"gcbench/broken/{self.ranks[0]}", said)

    def close(self) -> None:
        """Leave the group; the last reference to it ends it. A later collective fails."""
        place: Any = _Place(self.ranks[0], self.size)
        self.group = place

    def _lost(self, error: RuntimeError, waited: float) -> PeerLostError:
        with suppress(RuntimeError):
            for rank in range(self.size):
                key = f"gcbench/broken/{rank}"
                if rank != self.ranks[0] and self.store.check([key]):
                    return PeerLostError(
                        f"worker {self.ranks[0]}: a collective ended after {waited:.0f} s because "
                        f"worker {rank} failed: {self.store.get(key).decode()}"
                    )
        return super()._lost(error, waited)


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

    def __deepcopy__(self, memo: Any) -> "Copied":
        return Copied()

    def __reduce__(self) -> tuple[Any, ...]:
        return Copied, ()


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
        self._told: dict[str, Any] = {}
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

    def _common(self, step: int, names: Sequence[str], rates: Sequence[float | None]) -> Common:
        """Return what must be the same on all ranks at this exchange."""
        values: dict[str, Any] = {"step": step, "states loaded since register": self._loads}
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

    def _before_forward(self, model: nn.Module) -> None:
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
            "told": self._told,
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
        chosen.check_told(sealed.entry(entry, "told"), self._told)
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
