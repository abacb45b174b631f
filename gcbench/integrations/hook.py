"""What the hooks for DDP and FSDP2 share: arguments, registration, rates, failures, states."""

# Not `from __future__ import annotations`: DDP compares the hook's annotations with classes.
import dataclasses
import hashlib
import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from gcbench.core import sealed
from gcbench.core.compressor import Compressor
from gcbench.core.errors import GcbenchError, PeerLostError, UsageError
from gcbench.core.exchange import checked_rate
from gcbench.core.memory import Memory
from gcbench.core.world import Traffic
from gcbench.integrations import agreement, arguments, handshake, scheme, steps
from gcbench.integrations.agreement import Common
from gcbench.integrations.hook_world import HookWorld, release
from gcbench.integrations.level import Level
from gcbench.integrations.rates import Rates, checked_policy
from gcbench.integrations.scheme import Scheme

T = TypeVar("T")


class UnknownAttributeError(UsageError, AttributeError):
    """An attribute of a hook that does not exist, or that is read-only."""


@dataclass(frozen=True, kw_only=True)
class HookSettings(Scheme):
    """The arguments that both hooks take."""

    dense_below: int
    start_step: int
    seed: int
    timeout: float
    on_nonfinite: str

    @classmethod
    def of_call(cls, call: Mapping[str, Any], **fields: Any) -> Self:
        """Return the settings for the arguments of a call, by name; `fields`: further settings.

        Raises:
            UsageError: an argument has the wrong type or value.
        """
        values = arguments.checked(call)
        scheme = Scheme.of(
            *(call["compressor"], call["options"], values["memory"], values["memory_options"]),
            collective=values.get("collective"),
        )
        policy = checked_policy(values.get("on_nonfinite"), call.get("scaler"))
        values |= {**vars(scheme), "on_nonfinite": policy, **fields}
        names = [each.name for each in dataclasses.fields(cls) if each.name in values]
        return cls(**{name: values[name] for name in names})

    @property
    def stages(self) -> list[int]:
        """The steps, from 0 on, at which the exchange of a lane may change."""
        return sorted({0, self.start_step, *self.later})

    def warms_up(self, step: int, skipped: int) -> bool:
        """Return whether a step precedes `start_step`, so that it is exchanged in fp32.

        The `skipped` steps before it do not count if the update rule estimates a quantity from the
        fp32 steps.
        """
        done = step - skipped if self.at(step)[0].rule.needs_warm_up else step
        return done < self.start_step

    def unsuitable(self, optimizer: torch.optim.Optimizer) -> str:
        """Return why an optimizer must not apply the exchanged means; "" if it may."""
        plain = getattr(optimizer, "optim", optimizer)  # inside ZeroRedundancyOptimizer
        kind = type(plain).__name__
        groups = optimizer.param_groups
        momentum = any(
            each.get("momentum") or each.get("beta1") or (each.get("betas") or [0])[0]
            for each in groups
        )
        if not self.compressor.rule.plain:
            if momentum or not isinstance(plain, torch.optim.SGD):
                return (
                    f"{kind} would change the directions of {self.compressor!r}, which has its own "
                    "update rule. Train with hook.optimizer(model.parameters(), lr=...), which is "
                    "SGD without momentum"
                )
        elif momentum and self.momentum is not None:
            others = '"residual" or "none"' if self.compressor.claims.contractive else '"none"'
            return (
                f"{kind} and the memory {self.momentum!r} would both apply momentum. Use an "
                f"optimizer without momentum, or memory={others}"
            )
        return ""

    @property
    def momentum(self) -> Memory | None:
        """The memory that applies momentum, if any."""
        return self.memory if self.memory.has_momentum else None


class RankState(dict[str, Any]):
    """A hook's state, keyed by rank; with one entry it reads like that entry.

    `torch.distributed.checkpoint` assumes that values with the same key on several ranks are
    copies, so each rank has its own key. It is saved as an OrderedDict, which `torch.load` accepts
    with `weights_only=True`.
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


def traffic_of(name: str, value: Any) -> Traffic:
    """Return the traffic in a state; UsageError if it is malformed."""
    return Traffic(*(sealed.number(name, each) for each in sealed.sequence(name, value, 3)))


def total(traffic: Iterable[Traffic]) -> Traffic:
    """Return the sum of traffic."""
    result = Traffic()
    for each in traffic:
        result.payload_up += each.payload_up
        result.payload_down += each.payload_down
        result.wire += each.wire
    return result


# ---- calls by torch, and copies of a model -------------------------------------------------------


def compressed(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Represent a hook of this package in DDP's list of hooks, which copies of the model share."""
    raise UsageError("a copy of a model has no hook: register a new one on it")


class Observer:
    """Notifies a hook of an event of its model. Copies of the model get a `Copied` instead."""

    def __init__(self, call: Callable[[nn.Module], None], *, warns: bool = False) -> None:
        """`warns`: whether the copy warns if it is trained."""
        self._call, self._warns = steps.uncompiled(call), warns

    def __call__(self, model: nn.Module, *arguments: Any) -> None:
        """Notify the hook."""
        self._call(model)

    def __reduce__(self) -> Any:
        return Copied, (self._warns,)


def observe_loads(model: nn.Module, call: Callable[[nn.Module], None]) -> Any:
    """Call `call(model)` before each `model.load_state_dict`; return the handle that ends it.

    A model from `torch.compile` shares the observer with the module inside it.
    """
    inner: Any = getattr(model, "_orig_mod", model)
    return inner.register_load_state_dict_pre_hook(Observer(call))


class Copied:
    """Replaces an `Observer` in a copy of a model."""

    def __init__(self, warns: bool) -> None:
        self._warns = warns

    def __call__(self, model: nn.Module, *arguments: Any) -> None:
        """Warn, once, if the copy is trained."""
        if self._warns and model.training and torch.is_grad_enabled():
            self._warns = False
            warnings.warn(
                "this is a copy of a model whose gradients are compressed, and the copy's are "
                "not. Register a new hook on the copy to compress them",
                stacklevel=2,
            )


class Hook:
    """The part of a hook that does not depend on the framework."""

    _settings: Any
    CALL = ""
    """The function that creates one."""
    FORMAT = 0
    """Version of the states."""
    RESIZE = ""
    """The argument that allows a state of another number of ranks to be loaded; "": none."""
    BYPASSED = ""
    """What not to do, as it bypasses the exchange."""
    REPLACED = ""
    """What to do if another optimizer replaces the followed one."""

    def __init__(self, settings: Any, rates: Rates) -> None:
        self._settings, self._rates = settings, rates
        self._registered = self._closed = False
        self._loaded: Mapping[str, Any] | None = None
        self._loads = 0
        """States loaded since `register`: the ranks compare it at the next exchange."""
        self._loads_seen: int | None = None
        """Their number at the last training step; None before the first one."""
        self._unloaded: object = None
        """Digest of the parameters before the model loaded a state, until the next step."""
        self._failed: BaseException | None = None
        self._agreed: BaseException | None = None
        """The last error that all ranks agreed on."""
        self._summary: dict[str, Any] = {}
        self._size = self._skipped = 0
        self._members = ""
        """The ranks of the model's process group as they stand in keys; "" for all ranks."""
        self._due: set[str] = set()
        """Names of the parameters whose gradient was exchanged and not applied yet."""

    # -- attributes --------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the learning rate; everything else is set when the hook is created.

        Raises:
            UsageError: an attribute that does not exist, or that is read-only.
        """
        if name == "lr" or name.startswith("_"):
            object.__setattr__(self, name, value)
            return
        what = "is read-only" if hasattr(type(self), name) else "does not exist"
        raise UnknownAttributeError(
            f"{type(self).__name__}.{name} = {value!r:.40}: this attribute {what}; only lr can be "
            f"set. Fields of the compressor are arguments, {self.CALL}(..., {name}={value!r:.40}), "
            f'and may change by step: {self.CALL}("topk", ratio="0:0.25/100:0.01")'
        )

    @property
    def settings(self) -> Any:
        """The arguments of the hook."""
        return self._settings

    @property
    def step(self) -> int:
        """Exchanges of all gradients so far."""
        raise NotImplementedError

    @property
    def skipped(self) -> int:
        """Steps without an exchange because a gradient was not finite, since `register`."""
        return self._skipped

    @property
    def traffic(self) -> Traffic:
        """Bytes of this rank since the first step, with `agreement`."""
        return total(level.world.traffic[0] for level in self._levels())

    @property
    def agreement(self) -> Traffic:
        """The part of `traffic` by which ranks agree before and after each exchange."""
        return total(level.exchange.agreement for level in self._levels())

    def _fresh(self, name: str) -> int:
        """Return how many gradients of a parameter were exchanged: in FSDP since step 0.

        In DDP it counts since `register`. Exchanges in which the loss did not use the parameter do
        not count, nor do those whose mean FSDP added to the previous one.
        """
        raise NotImplementedError

    def _direction(self, parameter: Tensor) -> tuple[Tensor, Tensor, Compressor] | None:
        """Return this rank's part of a gradient, what the last exchange wrote to it, and by what.

        None if that is not a direction: the length of one does not depend on the gradient's.
        """
        return None

    def _local(self, name: str) -> bool:
        """Return whether a part of a parameter's gradient has not been exchanged."""
        return False

    def _levels(self) -> list[Level]:
        """Return this rank's exchanges."""
        raise NotImplementedError

    @property
    def __signature__(self) -> inspect.Signature:
        """Refuse `register_comm_hook`, which reads it: this hook is registered another way."""
        raise UsageError(self._how_to_register())

    def __call__(self, state: Any, bucket: Any) -> NoReturn:
        """Name the right call: a hook is not a function of a bucket.

        Raises:
            UsageError: always.
        """
        raise UsageError(self._how_to_register())

    def _how_to_register(self) -> str:
        return (
            f"a {type(self).__name__} needs the whole model, not only its buckets, so do not "
            f"pass it to register_comm_hook or a wrapper of torch's hooks. Call "
            f"{self.CALL}(...).register(model)"
        )

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            f"a {type(self).__name__} belongs to one model in one process and cannot be copied or "
            f"pickled. Save hook.state_dict(), and load it into a new {self.CALL}(...)"
        )

    # -- registration ------------------------------------------------------------------------------

    def _prepare_and_meet(
        self,
        prepare: Callable[[], Mapping[str, Tensor]],
        meet: Callable[[str], T],
        optimizer: Any = None,
        scaler: Any = None,
    ) -> T:
        """Prepare and meet the other ranks; if any rank refuses, forget `optimizer` and `scaler`.

        `prepare` examines the model, sets `_summary`, makes the exchanges, needs no other rank, and
        returns the parameters by name. `meet` compares the ranks' settings; it receives why this
        one cannot register, or "".
        """
        restore = self._rates.snapshot()
        try:
            result = meet(self._try_prepare(prepare, optimizer, scaler))
        except BaseException:
            restore()
            raise
        self._registered, self._loaded = True, None
        return result

    def _try_prepare(
        self, prepare: Callable[[], Mapping[str, Tensor]], optimizer: Any, scaler: Any
    ) -> str:
        """Prepare for `register`; return why this rank cannot, or "" if it can."""
        if self._registered:
            return "this hook is registered already: make one for each model"
        try:
            checked_policy(self.settings.on_nonfinite, scaler)
            self._rates.add(optimizer, scaler)
            named = prepare()
            if self._loaded is not None:
                self._adopt(self._loaded)
                self._summary["step"] = self.step
            self._follow_steps(named)
        except UsageError as error:
            return str(error)
        return ""

    @property
    def _patience(self) -> float:
        """Seconds to wait for the other ranks to register."""
        return float(self.settings.timeout)

    def _summarize(self, count: int, numel: int, layout: object) -> dict[str, Any]:
        """Return what must be the same on all ranks, by a readable name; both hooks add to it."""
        settings = self.settings
        digest = hashlib.sha256(repr(layout).encode()).hexdigest()[:12]
        return {
            **settings.summary(),
            "dense_below": settings.dense_below,
            "start_step": settings.start_step,
            "seed": settings.seed,
            "on_nonfinite": settings.on_nonfinite,
            "rates": self._rates.source,
            "parameters": f"{count} with {numel} elements, layout {digest}",
            "step": self.step,
        }

    def _world_of(self, group: dist.ProcessGroup, device: torch.device) -> HookWorld:
        """Return this rank's place in a new group of the ranks of torch's `group`."""
        limit = f"{self.CALL.rpartition('.')[2]}(timeout=...)"
        return HookWorld(
            *(device, dist.get_process_group_ranks(group), group.rank()),
            *(timedelta(seconds=self.settings.timeout), limit),
        )

    # -- rates -------------------------------------------------------------------------------------

    @property
    def lr(self) -> float | None:
        """The learning rate that residuals follow; None until one is set or loaded.

        With `optimizer=` the hook reads the rates from the optimizer's parameter groups, and this
        is None. Otherwise set it at each step with your schedule, so that a residual stands for the
        same update after a change. The first rate rescales nothing, nor does 0. Loading a state
        sets the rate of its residuals, unless one was set before.
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
        """Read the rates of these parameters, and after each optimizer's step those it applied."""
        self._rates.bind(parameters, self)

    @property
    def _active(self) -> bool:
        """Whether gradients are still exchanged."""
        return not self._closed and self._failed is None

    @property
    def _remembers(self) -> bool:
        """Whether a part of each gradient stays in a residual, a momentum or an update rule."""
        return any(level.remembers for level in self._levels())

    def _record_rates(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the rates at which an optimizer has applied the last means."""
        applied: set[str] = set()
        for level in self._levels():
            rates = level.rates(self._rates, optimizer)
            for names, lane in zip(level.names, rates, strict=True):
                for i, name in enumerate(names):
                    if name not in self._due:
                        lane[i] = None  # its residual still has the rate of an earlier step
                    elif lane[i] is not None:
                        applied.add(name)
            level.exchange.assume(rates)
        self._due -= applied

    def _common(self, position: str, step: int, levels: Sequence[Level]) -> Common:
        """Return what must be the same on all ranks at an exchange of these levels."""
        for level in levels:
            level.world.place[0] = f"{position}, step {step}"
        values: dict[str, Any] = {
            "position": position,
            "step": step,
            "states loaded since register": self._loads,
        }
        if self._rates.optimizers:
            names = dict.fromkeys(n for each in levels for lane in each.names for n in lane)
            pairs = zip(names, self._rates.of([*names]), strict=True)
            values |= {f"learning rate of {name}": rate for name, rate in pairs}
        else:
            values["hook.lr"] = self._rates.assigned
        values["loss scale"] = self._rates.scale
        return Common(values)

    def _agree(
        self, levels: Iterable[Level], error: GcbenchError | None, common: Common
    ) -> GcbenchError | None:
        """Return the error of any rank of these levels, the same on all of them; else None."""
        for level in levels:
            error = self._agreed = agreement.agree(level.exchange, error, common)
        return error

    def _look(
        self, level: Level, number: int, gradient: Tensor, skip: Collection[str] = ()
    ) -> None:
        """Warn, once per hook, if a residual of a lane is far larger than its gradient."""
        level.look(number, gradient, skip)
        if level.watch.warned:
            for each in self._levels():
                each.watch.warned = True

    # -- failures ----------------------------------------------------------------------------------

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        """Run what the other ranks also run; after an error in it, refuse all later exchanges.

        The caller's autocast does not apply.
        """
        self.raise_failure()
        try:
            with torch.no_grad(), ExitStack() as stack:
                for device in handshake.BACKENDS:
                    stack.enter_context(torch.autocast(device, enabled=False))
                yield
        except BaseException as error:
            self._fail(error)
            raise

    def raise_failure(self) -> None:
        """Raise the error that ended the last exchange, if any."""
        if self._failed is not None:
            raise self._failed

    def _worlds(self) -> Iterable[HookWorld]:
        """Return this rank's place in each process group of the hook."""
        raise NotImplementedError

    def _fail(self, error: BaseException) -> None:
        """Raise an error at every later step; stop the other ranks, unless they agreed on it.

        They read the error from the store when their collectives fail.
        """
        if self._failed is not None:
            return
        self._failed = error
        if error is not self._agreed:
            worlds = list(self._worlds())
            if all(world.store_answers for world in worlds):
                with suppress(PeerLostError):
                    for world in {id(world.store): world for world in worlds}.values():
                        world.report(error)
            release(error)
            for world in worlds:
                world.close()

    def _watched(self) -> Iterable[Tensor]:
        """Return this rank's parameters, or its shards of them."""
        raise NotImplementedError

    def _before_load(self, model: nn.Module) -> None:
        """Remember the parameters before `model.load_state_dict`."""
        if self._unloaded is None and self._loads_seen is not None and not self._closed:
            self._unloaded = agreement.digest_of(self._watched())

    def _compare_loaded(self) -> None:
        """Warn if the model loaded another state since the last step, and this hook did not."""
        before, self._unloaded = self._unloaded, None
        loaded, self._loads_seen = self._loads != self._loads_seen, self._loads
        if before is None or loaded or not self._remembers:
            return
        if before != agreement.digest_of(self._watched()):
            warnings.warn(
                f"model.load_state_dict changed parameters before step {self.step}, and the hook "
                "still has the residuals or momentum of its earlier steps, which training will "
                "add to the loaded parameters. Load the hook's state of the same checkpoint, too: "
                "hook.load_state_dict(...)",
                stacklevel=4,
            )

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> RankState:
        """Return this rank's state, under "rank R of N": for `torch.save` and for DCP.

        It consists of numbers, strings and tensors. Every rank saves its own, after the optimizer's
        step and before the next backward. After `close` it is the state at the end.

        Raises:
            gcbench.core.errors.UsageError: `on_check` called it.
        """
        self._outside("state_dict")
        if not self._registered:
            return RankState(self._loaded or {})
        if self._failed is not None and self._remembers:
            warnings.warn(
                f"an error ended the exchange of step {self.step}: {self._failed}. This state may "
                "have a part of gradients that were sent and never applied: resume from one that "
                "was saved before that step",
                stacklevel=3,
            )
        self._rates.warn_unapplied()
        return self._serialized(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict` of the same rank, before `register` or after it.

        All ranks load states of the same step: they compare it when they register, or at the next
        exchange.

        Raises:
            gcbench.core.errors.UsageError: not such a state, or of another rank, world size or
                configuration; or `on_check` called it.
        """
        self._outside("load_state_dict")
        self._keep(state)
        if not self._registered or self._loaded is None:
            return
        loaded, self._loaded = self._loaded, None
        self._serialized(lambda: self._adopt(loaded))
        self._rates.returned()
        self._due.clear()
        self._loads += 1

    def _outside(self, what: str) -> None:
        """Raise UsageError in a thread that must not call `what`."""

    def _serialized(self, call: Callable[[], T]) -> T:
        """Return the result of a call that does not overlap with an exchange."""
        return call()

    def _state(self) -> RankState:
        raise NotImplementedError

    def _adopt(self, state: Mapping[str, Any]) -> None:
        """Resume from a state, after all its entries are checked."""
        raise NotImplementedError

    def _sealed(self, rank: int, entry: Mapping[str, Any]) -> RankState:
        """Return the state of this rank with the entries that both hooks have."""
        whole = {
            "format": self.FORMAT,
            "rank": rank,
            "world_size": self._size,
            "lr": self._rates.assigned,
            "settings": {k: v for k, v in self._summary.items() if k not in scheme.UNSAVED},
            **entry,
        }
        return RankState({self._key(rank): sealed.seal(whole)})

    def _key(self, rank: int) -> str:
        """Return the key of a rank's entry, which no rank of another process group has."""
        return key_of(rank, self._size) + self._members

    def _keep(self, state: Mapping[str, Any]) -> None:
        """Hold a state for `register`; its rate applies from now on, unless one was set.

        The state of a hook that was not registered, and loaded none, is empty.
        """
        self._loaded = None
        if not isinstance(state, Mapping):
            raise UsageError(
                f"state {state!r:.40}: expected a dict, as {type(self).__name__}.state_dict "
                "returns it"
            )
        if not state and self._registered:
            raise UsageError(
                f"an empty state for a registered hook at step {self.step}: expected "
                f"{self._key(0)!r} or another rank's entry, as {type(self).__name__}"
                ".state_dict returns it. To forget the residuals, register a new hook"
            )
        if not state:
            warnings.warn(
                "the loaded state is empty, as that of a hook before register: training starts "
                "with empty residuals",
                stacklevel=3,
            )
        for name, entry in state.items():
            version = sealed.entry(entry, "format") if isinstance(entry, Mapping) else None
            if version != self.FORMAT:
                raise UsageError(
                    f"state {name!r} has format {version!r}: expected {self.FORMAT}, as "
                    f"{type(self).__name__}.state_dict returns it"
                )
            rate = sealed.entry(entry, "lr")
            if self._rates.assigned is None and not self._rates.optimizers and rate is not None:
                self._rates.assigned = sealed.number("lr", rate)
            self._loaded = state

    def _entry(self, state: Mapping[str, Any], rank: int, size: int) -> Mapping[str, Any]:
        """Return this rank's entry of a state, checked except for its exchanges."""
        entry = state.get(self._key(rank))
        if entry is None:
            remedy = "register a hook without a state, which loses the residuals"
            if self.RESIZE:
                remedy = (
                    f"pass {self.CALL}(..., {self.RESIZE}) and load the entries of all ranks of "
                    "the job that saved them, in one dict"
                )
            raise UsageError(
                f"the state is that of {'; '.join(map(str, state))}, and this is "
                f"{self._key(rank)}: every rank saves and loads its own. To continue with another "
                f"number of ranks {remedy}"
            )
        saved = sealed.entry(entry, "rank"), sealed.entry(entry, "world_size")
        if saved != (rank, size):
            raise UsageError(
                f"the state is that of rank {saved[0]} of {saved[1]}, and this is rank {rank} of "
                f"{size}: every rank saves and loads its own"
            )
        self._check_entry(entry)
        return entry  # type: ignore[no-any-return]

    def _check_entry(self, entry: Mapping[str, Any]) -> None:
        """Raise UsageError if an entry was saved with other settings, or changed after that."""
        scheme.check_settings(sealed.entry(entry, "settings"), self._summary)
        sealed.check_seal(entry)

    def _entries(self, state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return the checked entries of all ranks of the job that saved a state, by rank."""
        sizes = {sealed.entry(entry, "world_size") for entry in state.values()}
        before = max((size for size in sizes if isinstance(size, int)), default=0)
        by_rank = {sealed.entry(entry, "rank"): entry for entry in state.values()}
        if len(sizes) != 1 or len(state) != before or by_rank.keys() != {*range(before)}:
            raise UsageError(
                f"the state has {', '.join(map(repr, state))}: to redistribute it, pass the "
                "entries of all ranks of one job in one dict: {**state_0, **state_1, ...}"
            )
        entries = [by_rank[rank] for rank in range(before)]
        for entry in entries:
            self._check_entry(entry)
        steps = [sealed.entry(entry, "step") for entry in entries]
        if len(set(steps)) > 1:
            raise UsageError(f"the ranks' states are of steps {steps}: expected one step")
        return entries
