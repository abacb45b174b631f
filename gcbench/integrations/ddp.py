"""Gradient compression inside DistributedDataParallel: `gcbench.comm_hook(...).register(model)`.

DDP hands its buckets to a hook while backward runs. Here one thread takes them, first in, first
out. It has a process group that nothing else uses: a method may need several collectives one after
the other, and in DDP's own group they would hang or get mixed up. As soon as all gradients of a
lane have come (see `gcbench.integrations.plan`), the thread exchanges it by the same
`gcbench.core.exchange.Exchange` as gcbench's own engines. DDP waits for it at the end of backward.

Nothing depends on DDP's buckets, which change after the first steps and after a restart: random
numbers are addressed by (seed, step, rank, place of the element in the model), what is carried is
kept by the parameter's name, and a resumed job ends in the bits of an uninterrupted one.

On a GPU the exchange has a stream of its own, which waits for the bucket by an event. That path has
never run.
"""

# Not `from __future__ import annotations`: DDP compares the hook's annotations with classes.
import hashlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, dataclass, field, replace
from datetime import timedelta
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket, Store  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from gcbench.core import rule, sealed
from gcbench.core.clock import Totals
from gcbench.core.compressor import Compressor
from gcbench.core.errors import UsageError
from gcbench.core.exchange import (
    Exchange,
    Lane,
    check_legal,
    checked_rate,
    classifier,
    dense_tensors,
    lane_of,
)
from gcbench.core.memory import Memory
from gcbench.core.resize import redistributed
from gcbench.core.world import Traffic
from gcbench.integrations import agreement, arguments, check, chosen, handshake, unregistered
from gcbench.integrations import plan as plans
from gcbench.integrations.agreement import Common, Fault
from gcbench.integrations.check import Bounds, Comparison
from gcbench.integrations.chosen import Stages
from gcbench.integrations.handshake import Roster
from gcbench.integrations.hook import (
    NONFINITE,
    RESIZE,
    BeforeForward,
    Copied,
    Hook,
    HookWorld,
    RankState,
    compressed,
    key_of,
    traffic_of,
)
from gcbench.integrations.plan import Placed, Plan
from gcbench.integrations.rates import Rates
from gcbench.integrations.worker import Worker

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Types that parameters may have: the exchange works in float32, which holds all three exactly."""
CLOSING = 5.0
"""The most seconds that `close` waits for a collective that is under way."""
RECORDS = 10_000
"""The most comparisons that `CommHook.records` has; older ones are dropped."""
CLOSED = (
    "the hook of this model was closed. Wrap the module in a new DistributedDataParallel, and "
    "register a new hook, to train on"
)
"""Said where a model is trained whose hook was closed."""


@dataclass(frozen=True)
class Settings:
    """What `comm_hook` was asked for."""

    compressor: Compressor
    """The one that holds from step 0 on."""
    collective: str
    memory: Memory
    dense_below: int
    dense_last: bool
    start_step: int
    check_every: int
    check_error: float | None
    on_check: Callable[[list[Comparison]], None] | None
    seed: int
    bucket_mb: float
    timeout: float
    on_nonfinite: str = "stop"
    on_resize: str = "refuse"
    later: Stages = field(default_factory=dict)
    """The compressors that hold from later steps on."""
    agree: bool = True
    """Whether ranks agree before each exchange. gcbench's own engines stop all workers where one
    fails, and their results have the bytes of gradients alone."""

    @property
    def methods(self) -> Stages:
        """The compressor that holds from each step on."""
        return {0: self.compressor, **self.later}

    @property
    def stages(self) -> list[int]:
        """The steps from which lanes are exchanged in another way than before, and 0."""
        return sorted({0, self.start_step, *self.later})

    def lanes(self, plan: Plan, step: int) -> list[Lane]:
        """Return how each lane of the plan is exchanged from `step` on."""
        way = (chosen.at(self.methods, step), self.collective, self.memory)
        return [
            lane_of(
                [placed.shape for placed in tensors],
                tensors[0].start,
                *way,
                exact=dense or step < self.start_step,
            )
            for tensors, dense in zip(plan.lanes, plan.dense, strict=True)
        ]


def comm_hook(
    compressor: str | Compressor,
    *,
    memory: str | None = None,
    memory_options: Mapping[str, Any] | None = None,
    collective: str | None = None,
    dense_below: int = 0,
    dense_last: bool = False,
    start_step: int = 0,
    check_every: int = 0,
    check_error: float | None = None,
    on_check: Callable[[list[Comparison]], None] | None = None,
    seed: int = 0,
    bucket_mb: float = 25.0,
    timeout: float = 1800.0,
    optimizer: Any = None,
    scaler: Any = None,
    on_nonfinite: str | None = None,
    on_resize: str = "refuse",
    **options: Any,
) -> "CommHook":
    """Return a hook that compresses the gradients of a DistributedDataParallel model.

    `hook.register(model)` on every rank, after DDP has wrapped the module. The optimizer then gets
    the mean of what the ranks sent, the same bits on each.

    Args:
        compressor: a registered name (`gcbench list compressors`), a file (./mine.py), or a
            compressor.
        memory: what is carried from step to step, by name; default what the method published. With
            `momentum` and `dgc` the optimizer must have none of its own.
        memory_options: fields of the memory.
        collective: one of the method's legal ones; default the first of them.
        dense_below: tensors of fewer elements stay fp32.
        dense_last: the last layer stays fp32.
        start_step: steps before it are exchanged in fp32.
        check_every: at each step that is a multiple of it the plain mean is taken as well, and
            each tensor's compressed mean is compared with it; 0 for never.
        check_error: a warning names the tensors whose relative error is larger; default 1.5 for
            methods that contract, no limit for others. It also names those whose cosine is 0 or
            less (of votes -0.5 or less).
        on_check: a function that gets the comparisons of a step, in the thread that exchanges. It
            must not call `state_dict`, `load_state_dict` or `close`, which wait for that thread.
        seed: of random numbers; models trained at the same time should have different ones.
        bucket_mb: tensors of together about this many MiB in fp32 are exchanged together.
        timeout: seconds that a rank waits for the others in a collective.
        optimizer: the optimizer of the model's parameters, or a list of them: residuals follow the
            learning rate of their parameter's group. It may be given to `register` instead. Without
            it set `hook.lr` at each step, if the rate changes.
        scaler: the torch.amp.GradScaler that scales the loss: residuals follow its scale.
        on_nonfinite: what to do where a rank's gradient is not finite. "stop": every rank raises
            DivergedError, which names that rank and the tensor. "skip": no rank exchanges anything
            at this step, residuals stay as they are, and every rank gets NaN for all gradients, so
            that a GradScaler skips its step on all ranks. The exchange then begins after the last
            gradient and does not overlap with backward. Default: "skip" with a scaler, else "stop".
        on_resize: "redistribute": a state that was saved with another number of ranks is accepted;
            the sum of all residuals is kept. "refuse" (default): it is refused.
        options: fields of the compressor, each a value or a schedule by step: "0:0.25/100:0.01" or
            {0: 0.25, 100: 0.01}.

    Raises:
        gcbench.core.errors.UsageError: an unknown name, field or value, or an illegal collective.
    """
    arguments.optional_text("memory", memory)
    arguments.optional_text("collective", collective)
    arguments.optional_mapping("memory_options", memory_options)
    arguments.optional_function("on_check", on_check)
    methods = chosen.stages(compressor, options)
    for method in methods.values():
        collective = check_legal(method, collective)
    if check_error is not None:
        arguments.number("check_error", check_error)
    if on_nonfinite is None:
        on_nonfinite = "stop" if scaler is None else "skip"
    carried = chosen.memory(memory, memory_options, methods)
    start_step = arguments.integer("start_step", start_step, sealed.STEPS)
    check_every = arguments.integer("check_every", check_every)
    for method in methods.values():
        rule.check_legal(method.rule, carried, start_step, method)
        if check_every and not method.rule.plain:
            raise UsageError(
                f"check_every={check_every} compares means, and the update rule of {method!r} "
                "makes directions of them: leave check_every out"
            )
    settings = Settings(
        compressor=methods[0],
        later={start: method for start, method in methods.items() if start},
        collective=collective or "",
        memory=carried,
        dense_below=arguments.integer("dense_below", dense_below),
        dense_last=arguments.flag("dense_last", dense_last),
        start_step=start_step,
        check_every=check_every,
        check_error=check_error,
        on_check=on_check,
        seed=arguments.integer("seed", seed, arguments.SEEDS),
        bucket_mb=arguments.number("bucket_mb", bucket_mb),
        timeout=arguments.number("timeout", timeout, 0.001, finite=True),
        on_nonfinite=arguments.choice("on_nonfinite", on_nonfinite, NONFINITE),
        on_resize=arguments.choice("on_resize", on_resize, RESIZE),
    )
    return CommHook(settings, Rates(optimizer, scaler))


@dataclass(eq=False)
class _Arrived:
    """A bucket of DDP whose mean is still to come."""

    buffer: Tensor
    parts: list[tuple[Placed, Tensor]]
    """Its tensors, and where each lies in the buffer, in the parameter's strides."""
    done: torch.futures.Future[Any]


class CommHook(Hook):
    """One model's compressed exchange, made by `comm_hook`."""

    CALL = "gcbench.comm_hook"
    FORMAT = 2
    RESIZE = 'on_resize="redistribute"'

    def __init__(self, settings: Settings, rates: Rates) -> None:
        super().__init__(settings, rates)
        self._step = self._skipped = 0
        self._records: deque[Comparison] = deque(maxlen=RECORDS)
        self._ready = 0.0
        self._in_backward = False
        """Whether a backward pass has handed over a bucket and did not end."""
        unregistered.expect(self)
        self._worker: Worker | None = None
        """None: not registered, or nothing is exchanged, as there is one rank."""

    # -- for the user ------------------------------------------------------------------------------

    def register(
        self, model: DistributedDataParallel, *, optimizer: Any = None, scaler: Any = None
    ) -> Self:
        """Exchange the gradients of `model` from its next backward on. All ranks call it.

        With one rank nothing is sent and nothing changes, but steps are counted; an update rule of
        the method is applied all the same.

        Args:
            model: the wrapped model.
            optimizer: as for `comm_hook`, if it was not given there.
            scaler: as for `comm_hook`, if it was not given there. `on_nonfinite` stays as it is.

        Raises:
            gcbench.core.errors.UsageError: what this model has cannot be compressed, or the ranks
                differ in what they registered: on every rank, with what to do.
            gcbench.core.errors.PeerLostError: another rank did not come.
        """
        unregistered.settle(self)
        if not isinstance(model, DistributedDataParallel):
            raise UsageError(
                f"a {type(model).__name__} came: wrap the module in "
                "torch.nn.parallel.DistributedDataParallel first, and register on that, before "
                "torch.compile"
            )
        refused, summary = "", {}
        self._size = model.process_group.size()
        try:
            self._rates.add(optimizer, scaler)
            named = self._examine(model)
            plan = self._plan(model, named)
            self._summary = summary = self._summarize(model, plan, named)
            self._prepare(model, plan, named)
            if self._loaded is not None:
                self._adopt(self._loaded)
                summary["step"] = self._step
            self._follow_steps(named)
        except UsageError as error:
            refused, summary = str(error), {}
        seconds = min(self.settings.timeout, handshake.PATIENCE)
        alone = Roster.alone()
        store, roster = handshake.meet(model.process_group, summary, refused, seconds, alone)
        self._registered, self._loaded = True, None
        self._frozen = [
            (name, parameter)
            for name, parameter in model.module.named_parameters()
            if name not in named and name not in getattr(model, "parameters_to_ignore", ())
        ]
        if self._exchanges:
            self._begin(model, store, roster)
        model.register_forward_pre_hook(BeforeForward(self))
        model.register_comm_hook(None, self._hook if self._exchanges else self._count)
        # Copies of the model share this list; `compressed` can be copied and pickled.
        model._comm_hooks[-1] = (compressed, None)
        return self

    @property
    def _exchanges(self) -> bool:
        """Whether gradients pass through an exchange: not those of one rank without a rule."""
        return self._size > 1 or not self.settings.compressor.rule.plain

    @property
    def step(self) -> int:
        """Backward passes outside `no_sync` so far, those that were skipped among them."""
        return self._step

    @property
    def skipped(self) -> int:
        """Steps at which a gradient was not finite and nothing was exchanged, since `register`."""
        return self._skipped

    @property
    def records(self) -> list[Comparison]:
        """The comparisons of `check_every`, oldest first: the last `RECORDS`, 10,000."""
        return list(self._records)

    @property
    def ready(self) -> float:
        """When DDP last handed over a bucket, by `time.perf_counter`.

        After the last bucket of a backward pass there is nothing left to compute, and backward
        waits for the exchange.
        """
        return self._ready

    def optimizer(
        self, parameters: Iterable[Any], lr: float, *, weight_decay: float = 0.0
    ) -> torch.optim.SGD:
        """Return the optimizer for a method with an update rule of its own.

        It is plain SGD: theta <- theta - lr (d + weight_decay theta), d being the direction that
        the rule makes of the decoded mean, which the hook delivers as the gradient. The hook
        follows its learning rates, as with `optimizer=`.

        Raises:
            gcbench.core.errors.UsageError: the method has no update rule, so any optimizer will do;
                or the hook has an optimizer already.
        """
        method = self.settings.compressor
        if method.rule.plain:
            raise UsageError(
                f"{method!r} has no update rule of its own: give the parameters to any optimizer"
            )
        made = torch.optim.SGD(
            parameters, lr=checked_rate(lr), momentum=0.0, weight_decay=weight_decay
        )
        self._rates.add(made, None)
        if self._registered:
            self._follow_steps(dict(zip(self._dtypes, self._parameters, strict=True)))
        return made

    @property
    def traffic(self) -> Traffic:
        """Bytes of this rank since the first step, with `agreement`, without `checked`."""
        return replace(self._world.traffic[0]) if self._worker else Traffic()

    @property
    def agreement(self) -> Traffic:
        """The part of `traffic` by which ranks agree before each exchange of a lane."""
        return replace(self._exchange.agreement) if self._worker else Traffic()

    @property
    def checked(self) -> Traffic:
        """Bytes that `check_every` cost this rank."""
        return replace(self._checked_bytes)

    @property
    def plain_bytes(self) -> float:
        """Bytes that this rank would have handed over in fp32."""
        return 4.0 * self._step * self._flat.numel() if self._worker else 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of the exchanging thread by phase: statistic, encode, communicate, decode."""
        return self._clock.seconds if self._worker else {}

    def state_dict(self) -> RankState:
        """Return what this rank carries, under "rank R of N": for `torch.save` and for DCP.

        Numbers, strings and tensors. Every rank has its own and saves its own; between steps, after
        backward. After `close` it is the state at the end.

        Raises:
            gcbench.core.errors.UsageError: `on_check` called it.
        """
        self._outside("state_dict")
        if not self._registered:
            return RankState(self._loaded or {})
        if self._worker is None or self._closed:
            return self._state()
        return self._worker.submit(self._state).result()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Carry on from a `state_dict` of the same rank, before `register` or after it.

        All ranks load theirs, of the same step: they compare it when they register, or at the next
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
        if self._worker is None:
            self._adopt(loaded)
        elif self._closed:
            raise UsageError(CLOSED)
        else:
            self._worker.submit(lambda: self._adopt(loaded)).result()
        self._loads += 1

    def close(self) -> None:
        """End the thread and the process group. The model cannot be trained on after that.

        Raises:
            gcbench.core.errors.UsageError: `on_check` called it.
        """
        self._outside("close")
        if self._closed:
            return
        self._closed = True
        unregistered.settle(self)
        self._rates.close()
        if self._worker is not None:
            self._worker.close(CLOSING)
            self._world.close()

    def _outside(self, what: str) -> None:
        """Raise UsageError in the thread that exchanges, which would wait for itself."""
        if self._worker is not None and self._worker.is_current:
            raise UsageError(
                f"on_check called {what}, which waits for the thread that runs on_check. Note what "
                "is needed there, and call the hook after backward"
            )

    # -- registration ------------------------------------------------------------------------------

    def _examine(self, model: DistributedDataParallel) -> dict[str, nn.Parameter]:
        """Return the parameters that DDP reduces, by name.

        Raises:
            UsageError: the model cannot have this hook, or its gradients cannot be compressed.
        """
        self._check_free(model)
        ignored = getattr(model, "parameters_to_ignore", ())
        named = {
            name: parameter
            for name, parameter in model.module.named_parameters()
            if parameter.requires_grad and name not in ignored
        }
        _check_parameters(model.module, named)
        device = next(iter(named.values())).device
        handshake.check_backend("the model's", model.process_group, device)
        return named

    def _check_free(self, model: DistributedDataParallel) -> None:
        """Raise UsageError if this hook is in use, or the model has no place for a hook."""
        if self._registered:
            raise UsageError("this hook is registered already: make one for each model")
        if self._closed:
            raise UsageError("this hook was closed: make a new one")
        if getattr(model, "mixed_precision", None) is not None:
            raise UsageError(
                "DDP(mixed_precision=...) takes the one place for a hook itself. Leave it out and "
                "use torch.autocast around the forward pass, or parameters in bfloat16"
            )
        if getattr(model, "_use_python_reducer", False):
            raise UsageError(
                'torch._dynamo.config.optimize_ddp is "python_reducer", with which DDP averages '
                "gradients without its hook. Set it to True or False before "
                "DistributedDataParallel wraps the module"
            )
        before = model._forward_pre_hooks
        for key in [key for key, each in before.items() if isinstance(each, Copied)]:
            del before[key]
            model._comm_hooks = [each for each in model._comm_hooks if each[0] is not compressed]
        if getattr(model, "_comm_hooks", ()):
            raise UsageError(
                "the model has a communication hook, and DDP takes one. Wrap the module in a new "
                "DistributedDataParallel to register another"
            )

    def _plan(self, model: DistributedDataParallel, named: Mapping[str, nn.Parameter]) -> Plan:
        settings = self.settings
        names, shapes = list(named), [tuple(p.shape) for p in named.values()]
        last = classifier(model.module) if settings.dense_last else []
        dense = dense_tensors(names, shapes, settings.dense_below, last)
        return Plan.of(names, shapes, dense, settings.bucket_mb * 2**20 / 4)

    def _summarize(
        self, model: DistributedDataParallel, plan: Plan, named: Mapping[str, nn.Parameter]
    ) -> dict[str, Any]:
        """Return what must be the same on all ranks, by a readable name."""
        settings, rates = self.settings, self._rates
        layout = [
            [[placed.name, placed.shape, str(named[placed.name].dtype)] for placed in lane]
            for lane in plan.lanes
        ]
        digest = hashlib.sha256(repr(layout).encode()).hexdigest()[:12]
        count = sum(placed.numel for placed in plan.tensors)
        follows = "optimizer" if rates.optimizers else "hook.lr"
        return {
            **chosen.summary(settings.methods, settings.collective, settings.memory),
            "dense_below": settings.dense_below,
            "dense_last": settings.dense_last,
            "start_step": settings.start_step,
            "check_every": settings.check_every,
            "seed": settings.seed,
            "bucket_mb": settings.bucket_mb,
            "on_nonfinite": settings.on_nonfinite,
            "rates": follows + (" and scaler" if rates.scaler is not None else ""),
            "unused parameters": bool(model.find_unused_parameters or model.static_graph),
            "parameters": f"{len(plan.tensors)} with {count} elements, layout {digest}",
            "step": self._step,
        }

    def _prepare(
        self, model: DistributedDataParallel, plan: Plan, named: Mapping[str, nn.Parameter]
    ) -> None:
        """Make the exchange, but for its process group."""
        device, group = next(iter(named.values())).device, model.process_group
        limit = timedelta(seconds=self.settings.timeout)
        members = dist.get_process_group_ranks(group)
        where = "comm_hook(timeout=...)"
        self._world = HookWorld(device, members, group.rank(), limit, where)
        self._clock = Totals(device)
        self._plan_made = plan
        self._placed = {id(named[placed.name]): placed for placed in plan.tensors}
        self._dtypes = {name: parameter.dtype for name, parameter in named.items()}
        self._parameters = list(named.values())  # so that no other tensor gets their ids
        self._exchange = self._made(0)

    def _made(self, step: int) -> Exchange:
        """Return a new exchange, as it is before that of `step`, at which a stage may begin.

        It passes through all stages first, so that states have the same entries at every step.
        """
        settings, plan, parts = self.settings, self._plan_made, []
        lanes = [settings.lanes(plan, start) for start in settings.stages]
        made = Exchange(self._world, lanes[0], settings.seed, self._clock)
        for number, lane in enumerate(plan.lanes):
            first = plan.stretch(number).start
            parts.append([slice(p.start - first, p.start - first + p.numel) for p in lane])
        made.divide(parts)
        for each in lanes[1:]:
            made.change(each)
        made.change(settings.lanes(plan, max(0, step - 1)))
        return made

    def _begin(self, model: DistributedDataParallel, store: Store, roster: Roster) -> None:
        """Make the process group and the thread."""
        world = self._world
        device = world.device
        try:
            world.connect(store, roster)
        except BaseException as error:
            self._fail(error)
            raise
        self._stepped_since = False
        """Whether a step was exchanged since `register`."""
        self._rebuilds = bool(model.static_graph or not model.find_unused_parameters)
        """Whether DDP forms its buckets anew after its first step."""
        self._partial = bool(model.find_unused_parameters or model.static_graph)
        self._flat = torch.zeros(sum(p.numel for p in self._plan_made.tensors), device=device)
        self._stream = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._waiting: list[_Arrived] = []
        self._new_step()
        self._worker = Worker("gcbench comm_hook")

    # -- state -------------------------------------------------------------------------------------

    def _state(self) -> RankState:
        """Return what is carried; of one rank that is the number of steps."""
        entry = {
            "step": self._step,
            "checked": list(astuple(self._checked_bytes)),
            "exchange": self._exchange.state_dict() if self._exchanges else None,
        }
        return self._sealed(self._world.ranks[0], entry)

    def _adopt(self, state: Mapping[str, Any]) -> None:
        """Carry on from a state, whose every entry is checked before anything changes."""
        rank, size = self._world.ranks[0], self._size
        resized = self.settings.on_resize == "redistribute" and key_of(rank, size) not in state
        entries = self._entries(state) if resized else [self._entry(state, rank, size)]
        entry = entries[min(rank, len(entries) - 1)]
        step = sealed.integer("step", sealed.entry(entry, "step"), 0, sealed.STEPS)
        checked = traffic_of("checked", sealed.entry(entry, "checked"))
        if resized and size == 1:
            raise UsageError(
                "one rank carries no residuals, so those of the state would be lost. Register a "
                "hook without a state to train on without them"
            )
        if self._exchanges:
            made = self._made(step)
            saved = [sealed.entry(each, "exchange") for each in entries]
            if resized and None not in saved:
                memory = self.settings.memory
                saved = [redistributed(saved, made, (*memory.residuals, *memory.dense().residuals))]
            if saved[0] is not None or not resized:  # one rank carried nothing
                made.load_state_dict(saved[0])
            self._exchange = made
        self._step, self._checked_bytes = step, checked

    # -- called by DDP, in its threads -------------------------------------------------------------

    def _before_forward(self, model: nn.Module) -> None:
        """Raise what went wrong, or would, before the model computes anything.

        Raises:
            UsageError: inside `join`, from `on_check`, or for training after `close`.
            GcbenchError: what broke the last exchange off.
        """
        trains = model.training and torch.is_grad_enabled()
        if self._worker is None:
            return
        if not torch.is_grad_enabled():  # an evaluation: DDP may send buffers, and no gradients
            if self._failed is None and not self._closed:
                self._meet(model)
            return
        self._outside("the model")
        self.raise_failure()
        self._warn_unfrozen()
        if self._closed and trains:
            raise UsageError(CLOSED)
        if getattr(getattr(model, "_join_config", None), "enable", False):
            raise UsageError(
                "DDP's join runs the hook on zeros for ranks without data, which would send their "
                "residuals and change the mean. Give all ranks as many batches: "
                "DistributedSampler(..., drop_last=True)"
            )
        if not self._closed:
            self._check_backward(model)

    def _check_backward(self, model: Any) -> None:
        """Raise UsageError, and stop the other ranks, if the last backward pass broke off here."""
        if self._in_backward:
            self._unfinished(None)
        self._meet(model)
        try:
            # DDP makes this call next, and raises here after a pass that it could not finish.
            model._has_rebuilt_buckets |= model.reducer._rebuild_buckets()
        except RuntimeError as error:
            self._unfinished(error)

    def _unfinished(self, cause: RuntimeError | None) -> NoReturn:
        assert self._worker is not None
        error = UsageError(
            f"rank {self._world.rank}: the backward pass of step {self._step} broke off, so the "
            "ranks cannot continue together. Was an error caught there? Then restart from a "
            "checkpoint. Does the model have parameters that the loss does not use? Then "
            "DistributedDataParallel(..., find_unused_parameters=True)"
        )
        self._worker.submit(lambda: self._fail(error)).result()
        raise error from cause

    def _meet(self, model: Any) -> None:
        """Agree with the other ranks if DDP itself is about to communicate in a forward pass.

        DDP synchronizes buffers, and forms its buckets anew after the first backward pass. There a
        rank would wait for one that has failed until the process group's timeout.
        """
        rebuilds = (
            torch.is_grad_enabled()
            and self._rebuilds
            and self._stepped_since
            and not model._has_rebuilt_buckets
        )
        if self.settings.agree and (rebuilds or model.will_sync_module_buffers()):
            self._outside("the model")
            assert self._worker is not None
            self._worker.submit(self._agree_on_forward).result()
            self.raise_failure()

    def _agree_on_forward(self) -> None:
        common = Common.of({"position": "before a forward pass", "step": self._step})
        try:
            fault = agreement.agree(self._exchange, None, common)
        except BaseException as error:
            self._fail(error)
        else:
            if fault is not None:
                self._fail(fault.error, agreed=True)

    def _backward_ended(self) -> None:
        """Wait for the exchanges at the end of a backward pass, and raise what broke them off.

        DDP reports each error as a RuntimeError; this one has its own class.
        """
        assert self._worker is not None
        self._worker.submit(lambda: None).result()
        self._in_backward = False
        self.raise_failure()

    def _hook(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Hand a bucket to the thread; the future ends with its mean, in the same buffer."""
        buffer, parameters, last = bucket.buffer(), bucket.parameters(), bucket.is_last()
        self._ready = time.perf_counter()
        if self._closed or self._worker is None:
            raise UsageError(CLOSED)
        devices: list[int | str | torch.device] = []
        if self._stream is not None:
            devices.append(buffer.device)
        done: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
        ready = torch.cuda.current_stream().record_event() if self._stream is not None else None
        if not self._in_backward:  # or a pass that broke off, after which DDP refuses another
            self._in_backward = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._backward_ended)
        self._worker.submit(lambda: self._arrive(buffer, parameters, last, done, ready))
        return done.then(_result)

    def _count(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Hand a bucket back as it is, which is the mean of one rank; count the step."""
        self._ready = time.perf_counter()
        self._step += bucket.is_last()
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    # -- in the thread -----------------------------------------------------------------------------

    def _new_step(self) -> None:
        self._left = [len(lane) for lane in self._plan_made.lanes]
        self._seen: set[str] = set()
        self._compared: list[Comparison] = []
        self._misfit: Fault | None = None
        """Why a mean of this step cannot be applied; found on this rank."""

    @contextmanager
    def _on_stream(self, ready: Any) -> Iterator[None]:
        with torch.no_grad(), torch.cuda.stream(self._stream) if self._stream else nullcontext():
            if self._stream is not None:
                self._stream.wait_event(ready)
            yield

    def _arrive(
        self,
        buffer: Tensor,
        parameters: Sequence[Tensor],
        last: bool,
        done: torch.futures.Future[Any],
        ready: Any,
    ) -> None:
        """Take a bucket in, exchange the lanes that are complete, and hand buckets back."""
        arrived = _Arrived(buffer, [], done)
        self._waiting.append(arrived)
        try:
            self.raise_failure()
            with self._on_stream(ready):
                self._take(arrived, parameters)
                if self.settings.on_nonfinite == "stop":
                    for number in sorted({placed.lane for placed, _ in arrived.parts}):
                        if self._left[number] == 0:
                            self._agree([number])
                            self._exchange_lane(number)
                elif last:
                    self._exchange_all()
                finished = self._finished(last)
                if last:
                    self._end_step()
                self._waiting = [each for each in self._waiting if each not in finished]
                for each in finished:
                    each.done.set_result(each.buffer)
        except BaseException as error:
            self._break_off(error)

    def _worlds(self) -> list[HookWorld]:
        return [self._world]

    def _break_off(self, error: BaseException) -> None:
        """Fail, and hand the error back in the place of all means that are due."""
        self._fail(error, agreed=self._agreed)
        for waiting in self._waiting:
            waiting.done.set_result(error)
        self._waiting = []

    def _exchange_all(self) -> None:
        """Exchange all lanes of a step, or none: then the means are NaN on every rank."""
        lanes = [number for number, left in enumerate(self._left) if left == 0]
        if self._agree(lanes):
            for number in lanes:
                self._exchange_lane(number)
        else:
            self._flat.fill_(torch.nan)
            self._skipped += 1

    def _agree(self, lanes: Sequence[int]) -> bool:
        """Return whether lanes are exchanged; False: a gradient is not finite, and is skipped.

        Raises:
            DivergedError: a rank's gradient is not finite: on every rank, with its name.
            UsageError: the ranks follow different rates, or loaded states of different steps.
        """
        fault = None
        for number in lanes:
            own = self._flat[self._plan_made.stretch(number)]
            name = self._not_finite(own, self._plan_made.lanes[number])
            if name and fault is None:
                error = check.diverged(self._world.rank, name, self._step)
                fault = Fault.of(error, self._step)
        if self.settings.agree:
            fault = agreement.agree(self._exchange, fault, self._shared)
            self._agreed = fault is not None
        if fault is None:
            return True
        if fault.kind == "diverged" and self.settings.on_nonfinite == "skip":
            self._agreed = False
            return False
        raise fault.error

    def _follow(self) -> None:
        """Begin a step: its stage, its learning rates, and what ranks have in common."""
        settings, plan, exchange = self.settings, self._plan_made, self._exchange
        self._agreed = False
        if self._step in settings.stages and self._step:
            exchange.change(settings.lanes(plan, self._step))
        names = [placed.name for placed in plan.tensors]
        rates = self._rates.of(names)
        self._shared: Common = self._common("exchange of gradients", self._step, names, rates)
        scale = self._rates.scale
        exchange.follow(self._by_lane(rates), scale)
        self._looks = self._watch.due(self._step, dict(zip(names, rates, strict=True)), scale)

    def _by_lane(self, rates: Sequence[float | None]) -> list[list[float | None]]:
        """Return the rates of all tensors, lane by lane."""
        each = iter(rates)
        return [[next(each) for _ in lane] for lane in self._plan_made.lanes]

    def _stepped(self) -> None:
        if self._worker is not None:
            names = [placed.name for placed in self._plan_made.tensors]
            self._exchange.assume(self._by_lane(self._rates.of(names)))

    def _take(self, arrived: _Arrived, parameters: Sequence[Tensor]) -> None:
        """Copy a bucket's gradients to their places in the flat gradient."""
        if not self._seen:
            self._follow()
        if arrived.buffer.is_sparse:
            raise UsageError(
                "a sparse gradient came, which is not compressed here. Make the module that has "
                "it with sparse=False"
            )
        start = 0
        for parameter in parameters:
            placed = self._placed.get(id(parameter))
            if placed is None:
                raise UsageError(
                    f"a gradient of shape {tuple(parameter.shape)} came of a parameter that did "
                    "not require one when the hook was registered. Set requires_grad before "
                    "DistributedDataParallel wraps the module"
                )
            if placed.name in self._seen:
                raise UsageError(
                    f"{placed.name} came twice: the backward pass before ended without all "
                    "gradients. Does the model have parameters that the loss does not use? Then "
                    "DistributedDataParallel(..., find_unused_parameters=True)"
                )
            self._seen.add(placed.name)
            part = _strided(arrived.buffer[start : start + placed.numel], parameter)
            start += placed.numel
            arrived.parts.append((placed, part))
            placed.of(self._flat).copy_(part)
            self._left[placed.lane] -= 1

    def _exchange_lane(self, number: int) -> None:
        """Put the mean of a lane in the place of its gradients."""
        tensors = self._plan_made.lanes[number]
        own = self._flat[self._plan_made.stretch(number)]
        before = replace(self._world.traffic[0])
        idle = self._unused(tensors) if self._partial else []
        if len(idle) == len(tensors):
            return  # zeros, and DDP throws them away
        self._look(tensors, idle)
        with plans.set_aside(self._exchange, self._plan_made, idle):
            every = self.settings.check_every
            plain = self._plain_mean(number, own) if every and self._step % every == 0 else None
            mean = self._exchange.lane_mean(number, [own], self._step)
        own.copy_(mean)
        self._check_mean(number, tensors)
        if plain is not None:
            handed = self._world.traffic[0].payload_up - before.payload_up
            bits = 8 * handed / own.numel() if own.numel() else 0.0
            self._compare([placed for placed in tensors if placed not in idle], plain, bits)

    def _check_mean(self, number: int, tensors: Sequence[Placed]) -> None:
        """Note the first mean that does not fit its parameter's dtype."""
        for placed in tensors:
            dtype, mean = self._dtypes[placed.name], placed.of(self._flat)
            if self._misfit is None and not check.fits(mean, dtype):
                method = self._exchange.lanes[number].compressor
                error = check.overflowed(method, placed.name, mean, dtype, self._step)
                self._misfit = Fault.of(error, self._step)

    def _agree_on_means(self, step: int) -> None:
        """Check that every rank has the same means, bit for bit, and can apply them.

        Raises:
            DivergedError: a mean does not fit its parameter's dtype: on every rank.
            UsageError: the ranks decoded different means.
        """
        fault = self._misfit
        if self.settings.agree:
            digest = agreement.digest(self._flat)
            values = {"position": "end of a step", "step": step, "mean": digest}
            fault = agreement.agree(self._exchange, fault, Common.of(values))
            self._agreed = fault is not None
        if fault is not None:
            raise fault.error

    def _look(self, tensors: Sequence[Placed], idle: Sequence[Placed]) -> None:
        """Warn if a residual is far larger than the gradient that it is about to be added to."""
        if not self._looks:
            return
        for placed in tensors:
            if placed in idle:
                continue
            lane = self._exchange.lanes[placed.lane]
            views = plans.carried(self._exchange, self._plan_made, placed)
            gradient = float(placed.of(self._flat).double().norm())
            for name in lane.memory.residuals:
                self._watch.look(placed.name, float(views[name].double().norm()), gradient)

    def _compare(self, tensors: Sequence[Placed], plain: Tensor, bits: float) -> None:
        """Compare the means of a lane's tensors with the lane's plain mean, 1-D."""
        for placed in tensors:
            start = placed.start - self._exchange.lanes[placed.lane].start
            there = plain[start : start + placed.numel].view(placed.shape)
            applied = placed.of(self._flat)
            found = check.compare(self._step, placed.name, applied, there, bits)
            self._compared.append(found)

    def _not_finite(self, own: Tensor, tensors: Sequence[Placed]) -> str:
        """Return the name of the first tensor whose gradient is not finite; "" if all are."""
        if math.isfinite(float(own.sum())) or own.isfinite().all():
            return ""
        return next(p.name for p in tensors if not p.of(self._flat).isfinite().all())

    def _unused(self, tensors: Sequence[Placed]) -> list[Placed]:
        """Return the tensors whose gradient is zero on every rank: DDP throws their mean away."""
        used = [placed.of(self._flat).any() for placed in tensors]
        flags = torch.stack(used).to(torch.uint8)
        everyone = self._world.all_reduce([flags], "max").tolist()
        return [placed for placed, flag in zip(tensors, everyone, strict=True) if not flag]

    def _plain_mean(self, number: int, own: Tensor) -> Tensor:
        """Return the plain mean that the compressed one is compared with; bytes go to `checked`.

        It is the mean of what the ranks are about to offer to their encoders, residuals included;
        with a memory that makes the mean into something else (`Memory.apply`) of the gradients.
        """
        world, lane = self._world, self._exchange.lanes[number]
        offered = own
        if not lane.memory.joint:
            offered = self._exchange.offered(number, own, self.step)
        before = replace(world.traffic[0])
        mean = world.all_reduce([offered], "sum").div_(world.size)
        spent, now = self._checked_bytes, world.traffic[0]
        spent.payload_up += now.payload_up - before.payload_up
        spent.payload_down += now.payload_down - before.payload_down
        spent.wire += now.wire - before.wire
        world.traffic[0] = before
        return mean

    def _finished(self, last: bool) -> list[_Arrived]:
        """Return the buckets whose lanes are all done, with the means in their buffers."""
        if self.settings.on_nonfinite == "skip" and not last:
            return []
        finished = [
            each
            for each in self._waiting
            if not any(self._left[placed.lane] for placed, _ in each.parts)
        ]
        for each in finished:
            for placed, part in each.parts:
                part.copy_(placed.of(self._flat))
        return finished

    def _end_step(self) -> None:
        """Check the means and what was compared; count the step."""
        missing = [p.name for p in self._plan_made.tensors if p.name not in self._seen]
        if missing:
            raise UsageError(
                f"no gradient came of {', '.join(missing[:3])}, which required one when the hook "
                "was registered. Set requires_grad before DistributedDataParallel wraps the module"
            )
        found, step = self._compared, self._step
        self._step += 1
        if found:
            self._records.extend(found)
            if self.settings.on_check is not None:
                self.settings.on_check(found)
            if self._world.ranks[0] == 0:
                method = self.settings.compressor
                check.warn(method, Bounds.of(method, self.settings.check_error), found)
        self._agree_on_means(step)
        self._stepped_since = True
        self._new_step()


def _check_parameters(module: nn.Module, named: Mapping[str, nn.Parameter]) -> None:
    """Raise UsageError for parameters whose gradients cannot be compressed.

    `named`: those of the module that require a gradient.
    """
    if not named:
        raise UsageError(
            "no parameter of the model requires a gradient: there is nothing to exchange. "
            "Unfreeze it before DistributedDataParallel wraps it, or train without a hook"
        )
    for prefix, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise UsageError(
                f"{prefix or 'the model'} has sparse gradients (sparse=True), which are not "
                "compressed here. Make it with sparse=False"
            )
    wrong = [f"{k} is {p.dtype}" for k, p in named.items() if p.dtype not in DTYPES]
    if wrong:
        raise UsageError(
            f"{', '.join(wrong[:3])}: gradients are exchanged in float32, in which "
            "only float32, bfloat16 and float16 fit exactly. Convert the model"
        )
    devices = sorted({str(parameter.device) for parameter in named.values()})
    if len(devices) > 1 or torch.device(devices[0]).type not in handshake.BACKENDS:
        raise UsageError(
            f"parameters on {', '.join(devices)}: one CPU or one CUDA device a rank expected"
        )


def _result(done: torch.futures.Future[Any]) -> Tensor:
    """Return a bucket's mean, or raise the error that came in its place.

    DDP reports an error that the callback of a future raises, and no other.
    """
    result: Tensor | BaseException = done.value()
    if isinstance(result, BaseException):
        raise result
    return result


def _strided(part: Tensor, parameter: Tensor) -> Tensor:
    """Return a stretch of DDP's bucket, 1-D, as a view of the parameter's shape.

    DDP keeps the strides of a parameter that fills its memory without gaps (channels_last, say).
    """
    strides, sizes = parameter.stride(), parameter.size()
    order = sorted(range(parameter.dim()), key=lambda d: (strides[d], sizes[d]), reverse=True)
    if parameter.permute(order).is_contiguous():
        return part.as_strided(parameter.size(), parameter.stride())
    return part.view(parameter.shape)
