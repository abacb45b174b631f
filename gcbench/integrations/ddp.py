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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket, Store  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from gcbench.core import rule
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
from gcbench.core.world import DistributedWorld, Traffic
from gcbench.integrations import check, chosen, handshake
from gcbench.integrations import plan as plans
from gcbench.integrations.check import Bounds, Comparison
from gcbench.integrations.plan import Placed, Plan
from gcbench.integrations.worker import Worker

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Types that parameters may have: the exchange works in float32, which holds all three exactly."""
CLOSING = 5.0
"""The most seconds that `close` waits for a collective that is under way."""
FORMAT = 1
"""Version of what `CommHook.state_dict` returns."""
CLOSED = (
    "the hook of this model was closed. Wrap the module in a new DistributedDataParallel, and "
    "register a new hook, to train on"
)
"""Said where a model is trained whose hook was closed."""


@dataclass(frozen=True)
class Settings:
    """What `comm_hook` was asked for."""

    compressor: Compressor
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
    process_group: dist.ProcessGroup | None

    def lanes(self, plan: Plan, step: int) -> list[Lane]:
        """Return how each lane of the plan is exchanged from `step` on."""
        way = (self.compressor, self.collective, self.memory)
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
    process_group: dist.ProcessGroup | None = None,
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
        on_check: a function that gets the comparisons of a step, in the thread that exchanges.
        seed: of random numbers; models trained at the same time should have different ones.
        bucket_mb: tensors of together about this many MiB in fp32 are exchanged together.
        timeout: seconds that a rank waits for the others in a collective.
        process_group: the group in which compressed gradients travel; nothing else may use it,
            and its ranks are those of the model's group, in the same order. Default: a new one.
        options: fields of the compressor.

    Raises:
        gcbench.core.errors.UsageError: an unknown name, field or value, or an illegal collective.
    """
    method = chosen.compressor(compressor, options)
    for name, value, least in (
        ("dense_below", dense_below, 0),
        ("start_step", start_step, 0),
        ("check_every", check_every, 0),
        ("check_error", math.inf if check_error is None else check_error, 0),
        ("bucket_mb", bucket_mb, 0),
        ("timeout", timeout, 0.001),
    ):
        if not value >= least:
            raise UsageError(f"{name}={value!r}: at least {least} allowed")
    if math.isinf(timeout):
        raise UsageError(
            "timeout=inf: a finite number of seconds is expected, or else a rank would wait for a "
            "dead one forever"
        )
    carried = chosen.memory(memory, memory_options, method)
    rule.check_legal(method.rule, carried, start_step, method)
    if check_every and not method.rule.plain:
        raise UsageError(
            f"check_every={check_every} compares means, and the update rule of {method!r} makes "
            "directions of them: leave check_every out"
        )
    return CommHook(
        Settings(
            compressor=method,
            collective=check_legal(method, collective),
            memory=carried,
            dense_below=dense_below,
            dense_last=dense_last,
            start_step=start_step,
            check_every=check_every,
            check_error=check_error,
            on_check=on_check,
            seed=seed,
            bucket_mb=bucket_mb,
            timeout=timeout,
            process_group=process_group,
        )
    )


@dataclass(eq=False)
class _Arrived:
    """A bucket of DDP whose mean is still to come."""

    buffer: Tensor
    parts: list[tuple[Placed, Tensor]]
    """Its tensors, and where each lies in the buffer, in the parameter's strides."""
    done: torch.futures.Future[Any]


class CommHook:
    """One model's compressed exchange, made by `comm_hook`.

    `records` has the comparisons of `check_every`, oldest first.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._lr: float | None = None
        """None: nobody has set a learning rate, nor has a state that was loaded."""
        self._optimizer: torch.optim.Optimizer | None = None
        self.step = 0
        """Steps that were exchanged: backward passes outside `no_sync`."""
        self.records: list[Comparison] = []
        self.ready = 0.0
        """When DDP last handed over a bucket, by `time.perf_counter`. After the last bucket of a
        backward pass there is nothing left to compute, and backward waits for the exchange."""
        self._registered = self._closed = False
        self._loaded: dict[str, Any] | None = None
        self._failed: BaseException | None = None
        self._worker: Worker | None = None
        """None: not registered, or nothing is exchanged, as there is one rank."""
        self._checked = Traffic()
        self._told_all: dict[str, Any] = {}
        self._size = 0

    # -- for the user ------------------------------------------------------------------------------

    def register(self, model: DistributedDataParallel) -> Self:
        """Exchange the gradients of `model` from its next backward on. All ranks call it.

        With one rank nothing is sent and nothing changes, but steps are counted; an update rule of
        the method is applied all the same.

        Raises:
            gcbench.core.errors.UsageError: what this model has cannot be compressed, or the ranks
                differ in what they registered: on every rank, with what to do.
            gcbench.core.errors.PeerLostError: another rank did not come.
        """
        if not isinstance(model, DistributedDataParallel):
            raise UsageError(
                f"a {type(model).__name__} came: wrap the module in "
                "torch.nn.parallel.DistributedDataParallel first, and register on that"
            )
        try:
            named = self._examine(model)
            refused, plan = "", self._plan(model, named)
            told = self._told(model, plan, named)
            self._check_state(model, told)
        except UsageError as error:
            refused, told = str(error), {}
        timeout = self.settings.timeout
        store = handshake.meet(model.process_group, told, refused, timeout)
        self._registered = True
        self._told_all, self._size = told, model.process_group.size()
        self.step = told["step"]
        if self._size == 1 and self.settings.compressor.rule.plain:
            self._loaded = None
            model.register_comm_hook(None, self._count)
            return self
        self._begin(model, plan, named, told, store)
        model.register_forward_pre_hook(self._before_forward)
        model.register_comm_hook(None, self._hook)
        return self

    @property
    def lr(self) -> float:
        """The learning rate that the next mean is applied with; 1 at first.

        Set it with your schedule, so that residuals stand for the same update after a change; left
        alone, residuals stay as they are. A state that is loaded brings the rate that its residuals
        were told last, unless one was set before.
        """
        if self._optimizer is not None:
            return checked_rate(self._optimizer.param_groups[0]["lr"])
        return 1.0 if self._lr is None else self._lr

    @lr.setter
    def lr(self, rate: float) -> None:
        self._lr = checked_rate(rate)

    def optimizer(
        self, parameters: Iterable[Any], lr: float, *, weight_decay: float = 0.0
    ) -> torch.optim.SGD:
        """Return the optimizer for a method with an update rule of its own.

        It is plain SGD: theta <- theta - lr (d + weight_decay theta), d being the direction that
        the rule makes of the decoded mean, which the hook delivers as the gradient. The hook reads
        its learning rate, so `lr` need not be set on the hook.

        Raises:
            gcbench.core.errors.UsageError: the method has no update rule: any optimizer will do.
        """
        method = self.settings.compressor
        if method.rule.plain:
            raise UsageError(
                f"{method!r} has no update rule of its own: give the parameters to any optimizer"
            )
        self._optimizer = torch.optim.SGD(
            parameters, lr=checked_rate(lr), momentum=0.0, weight_decay=weight_decay
        )
        return self._optimizer

    @property
    def traffic(self) -> Traffic:
        """Bytes of this rank since the first step, those of `check_every` not among them."""
        return replace(self._world.traffic[0]) if self._worker else Traffic()

    @property
    def checked(self) -> Traffic:
        """Bytes that `check_every` cost this rank."""
        return replace(self._checked)

    @property
    def plain_bytes(self) -> float:
        """Bytes that this rank would have handed over in fp32."""
        return 4.0 * self.step * self._flat.numel() if self._worker else 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of the exchanging thread by phase: statistic, encode, communicate, decode."""
        return self._clock.seconds if self._worker else {}

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank carries: numbers, strings and tensors, for `torch.save`.

        Every rank has its own and saves its own; between steps, after backward. After `close` it is
        the state at the end.
        """
        if not self._registered:
            return {} if self._loaded is None else self._loaded
        if self._worker is None or self._closed:
            return self._state()
        return self._worker.submit(self._state).result()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Carry on from a `state_dict` of the same rank. Before `register`, which compares it.

        Raises:
            gcbench.core.errors.UsageError: the hook is registered, or that is no such state.
        """
        if self._registered:
            raise UsageError(
                "load_state_dict after register: the ranks compare their states when they "
                "register. Make a hook, load the state, then register it on a new DDP model"
            )
        if state and state.get("format") != FORMAT:
            raise UsageError(
                f"state of format {state.get('format')!r}: {FORMAT} expected, as "
                "CommHook.state_dict returns it"
            )
        self._loaded = dict(state) or None
        if self._lr is None and state:
            self._lr = state["lr"]

    def close(self) -> None:
        """End the thread and the process group. The model cannot be trained on after that."""
        if self._closed:
            return
        self._closed = True
        if self._worker is not None:
            self._worker.close(CLOSING)
            self._world.close()

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
        self._check_group(model, next(iter(named.values())).device)
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
        if getattr(model, "_comm_hooks", ()):
            raise UsageError(
                "the model has a communication hook, and DDP takes one. Wrap the module in a new "
                "DistributedDataParallel to register another"
            )

    def _check_group(self, model: DistributedDataParallel, device: torch.device) -> None:
        """Raise UsageError for a process group that cannot serve."""
        theirs, given = model.process_group, self.settings.process_group
        for what, group in (("the model's", theirs), ("the given", given)):
            if group is not None:
                handshake.check_backend(what, group, device)
        ranks = dist.get_process_group_ranks(theirs)
        if given is not None and (
            dist.get_process_group_ranks(given) != ranks or given.rank() != theirs.rank()
        ):
            raise UsageError(
                f"the given process group has the ranks {dist.get_process_group_ranks(given)}, "
                f"the model's {ranks}: they must be the same, in one order"
            )
        if given is theirs:
            raise UsageError(
                "the given process group is the model's own, which DDP uses at the same time. "
                "Leave process_group out, or give one that nothing else uses"
            )

    def _plan(self, model: DistributedDataParallel, named: Mapping[str, nn.Parameter]) -> Plan:
        settings = self.settings
        names, shapes = list(named), [tuple(p.shape) for p in named.values()]
        last = classifier(model.module) if settings.dense_last else []
        dense = dense_tensors(names, shapes, settings.dense_below, last)
        return Plan.of(names, shapes, dense, settings.bucket_mb * 2**20 / 4)

    def _told(
        self, model: DistributedDataParallel, plan: Plan, named: Mapping[str, nn.Parameter]
    ) -> dict[str, Any]:
        """Return what must be the same on all ranks, by a name for people."""
        settings = self.settings
        layout = [
            [[placed.name, placed.shape, str(named[placed.name].dtype)] for placed in lane]
            for lane in plan.lanes
        ]
        digest = hashlib.sha256(repr(layout).encode()).hexdigest()[:12]
        count = sum(placed.numel for placed in plan.tensors)
        return {
            **chosen.told(settings.compressor, settings.collective, settings.memory),
            "dense_below": settings.dense_below,
            "dense_last": settings.dense_last,
            "start_step": settings.start_step,
            "check_every": settings.check_every,
            "seed": settings.seed,
            "bucket_mb": settings.bucket_mb,
            "process_group": "given" if settings.process_group is not None else "own",
            "unused parameters": bool(model.find_unused_parameters or model.static_graph),
            "parameters": f"{len(plan.tensors)} with {count} elements, layout {digest}",
            "step": self._loaded["step"] if self._loaded else 0,
        }

    def _check_state(self, model: DistributedDataParallel, told: Mapping[str, Any]) -> None:
        """Raise UsageError if the state that was loaded is of another rank or configuration."""
        if self._loaded is not None:
            group = model.process_group
            chosen.check_state(self._loaded, group.rank(), group.size(), told)

    def _begin(
        self,
        model: DistributedDataParallel,
        plan: Plan,
        named: Mapping[str, nn.Parameter],
        told: dict[str, Any],
        store: Store,
    ) -> None:
        """Make the process group, the exchange and the thread."""
        settings, group = self.settings, self.settings.process_group
        device, limit = next(iter(named.values())).device, timedelta(seconds=settings.timeout)
        if group is None:
            theirs = model.process_group
            group = _group_of_its_own(store, theirs.rank(), theirs.size(), device, limit)
        self._world = DistributedWorld(
            *(device, store, limit), watched=False, group=group, limit="comm_hook(timeout=...)"
        )
        self._clock = Totals(device)
        self._plan_made = plan
        self._partial = bool(told["unused parameters"])
        self._placed = {id(named[placed.name]): placed for placed in plan.tensors}
        self._parameters = list(named.values())  # so that no other tensor gets their ids
        self._flat = torch.zeros(sum(placed.numel for placed in plan.tensors), device=device)
        state = self._loaded
        # Those of the step before: `_take` changes them at `start_step`, in a resumed job, too.
        lanes = settings.lanes(plan, max(0, self.step - 1))
        self._exchange = Exchange(self._world, lanes, settings.seed, self._clock)
        if state:
            plans.load(self._exchange, plan, state)
            self._exchange.lr = state["lr"]
            self._world.traffic[0] = Traffic(*state["traffic"])
            self._checked = Traffic(*state["checked"])
        self._loaded = None
        self._stream = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._waiting: list[_Arrived] = []
        self._new_step()
        self._worker = Worker("gcbench comm_hook")

    def _state(self) -> dict[str, Any]:
        """Return what is carried; of one rank that is the number of steps."""
        traffic, checked, some = self.traffic, self._checked, self._worker is not None
        carried = plans.save(self._exchange, self._plan_made) if some else plans.nothing()
        return {
            "format": FORMAT,
            "step": self.step,
            "lr": self._exchange.lr if some else self._lr,
            "rank": self._world.ranks[0] if some else 0,
            "world_size": self._size,
            "told": self._told_all,
            "traffic": [traffic.payload_up, traffic.payload_down, traffic.wire],
            "checked": [checked.payload_up, checked.payload_down, checked.wire],
            **carried,
        }

    # -- called by DDP, in its threads -------------------------------------------------------------

    def raise_failure(self) -> None:
        """Raise what broke the last exchange off, if anything."""
        if self._failed is not None:
            raise self._failed

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        """Raise what went wrong, or would, before the model computes anything.

        Raises:
            UsageError: inside `join`, or after `close`.
            GcbenchError: what broke the last exchange off.
        """
        self.raise_failure()
        if self._closed:
            raise UsageError(CLOSED)
        if getattr(getattr(model, "_join_config", None), "enable", False):
            raise UsageError(
                "DDP's join runs the hook on zeros for ranks without data, which would send their "
                "residuals and change the mean. Give all ranks as many batches: "
                "DistributedSampler(..., drop_last=True)"
            )

    def _hook(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Hand a bucket to the thread; the future ends with its mean, in the same buffer."""
        buffer, parameters, last = bucket.buffer(), bucket.parameters(), bucket.is_last()
        self.ready = time.perf_counter()
        if self._closed or self._worker is None:
            raise UsageError(CLOSED)
        devices: list[int | str | torch.device] = []
        if self._stream is not None:
            devices.append(buffer.device)
        done: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
        ready = torch.cuda.current_stream().record_event() if self._stream is not None else None
        lr = self.lr
        self._worker.submit(lambda: self._arrive(buffer, parameters, last, lr, done, ready))
        return done.then(_result)

    def _count(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Hand a bucket back as it is, which is the mean of one rank; count the step."""
        self.ready = time.perf_counter()
        self.step += bucket.is_last()
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    # -- in the thread -----------------------------------------------------------------------------

    def _new_step(self) -> None:
        self._left = [len(lane) for lane in self._plan_made.lanes]
        self._seen: set[str] = set()
        self._compared: list[Comparison] = []

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
        lr: float,
        done: torch.futures.Future[Any],
        ready: Any,
    ) -> None:
        """Take a bucket in, exchange the lanes that are complete, and hand buckets back."""
        arrived = _Arrived(buffer, [], done)
        self._waiting.append(arrived)
        try:
            self.raise_failure()
            with self._on_stream(ready):
                self._take(arrived, parameters, lr)
                for number in sorted({placed.lane for placed, _ in arrived.parts}):
                    if self._left[number] == 0:
                        self._exchange_lane(number)
                finished = self._finished()
                if last:
                    self._end_step()
                self._waiting = [each for each in self._waiting if each not in finished]
                for each in finished:
                    each.done.set_result(each.buffer)
        except BaseException as error:
            self._failed = error
            for waiting in self._waiting:
                waiting.done.set_result(error)
            self._waiting = []

    def _take(self, arrived: _Arrived, parameters: Sequence[Tensor], lr: float) -> None:
        """Copy a bucket's gradients to their places in the flat gradient."""
        if not self._seen:
            if self.step == self.settings.start_step and self.step:
                self._exchange.change(self.settings.lanes(self._plan_made, self.step))
            self._exchange.follow(lr)
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
        self._check_finite(own, tensors)
        before = replace(self._world.traffic[0])
        idle = self._unused(tensors) if self._partial else []
        if len(idle) == len(tensors):
            return  # zeros, and DDP throws them away
        with plans.set_aside(self._exchange, self._plan_made, idle):
            every = self.settings.check_every
            plain = self._plain_mean(number, own) if every and self.step % every == 0 else None
            mean = self._exchange.lane_mean(number, [own], self.step)
        own.copy_(mean)
        if plain is not None:
            handed = self._world.traffic[0].payload_up - before.payload_up
            bits = 8 * handed / own.numel() if own.numel() else 0.0
            self._compare([placed for placed in tensors if placed not in idle], plain, bits)

    def _compare(self, tensors: Sequence[Placed], plain: Tensor, bits: float) -> None:
        """Compare the means of a lane's tensors with the lane's plain mean, 1-D."""
        for placed in tensors:
            start = placed.start - self._exchange.lanes[placed.lane].start
            there = plain[start : start + placed.numel].view(placed.shape)
            applied = placed.of(self._flat)
            found = check.compare(self.step, placed.name, applied, there, bits)
            self._compared.append(found)

    def _check_finite(self, own: Tensor, tensors: Sequence[Placed]) -> None:
        """Raise DivergedError, with the tensor's name, if a gradient is not finite."""
        if math.isfinite(float(own.sum())) or own.isfinite().all():
            return
        name = next(p.name for p in tensors if not p.of(self._flat).isfinite().all())
        raise check.diverged(self._world.ranks[0], name, self.step)

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
        spent, now = self._checked, world.traffic[0]
        spent.payload_up += now.payload_up - before.payload_up
        spent.payload_down += now.payload_down - before.payload_down
        spent.wire += now.wire - before.wire
        world.traffic[0] = before
        return mean

    def _finished(self) -> list[_Arrived]:
        """Return the buckets whose lanes are all done, with the means in their buffers."""
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
        """Count the step, and judge what was compared."""
        missing = [p.name for p in self._plan_made.tensors if p.name not in self._seen]
        if missing:
            raise UsageError(
                f"no gradient came of {', '.join(missing[:3])}, which required one when the hook "
                "was registered. Set requires_grad before DistributedDataParallel wraps the module"
            )
        found = self._compared
        self.step += 1
        self._new_step()
        if found:
            self.records += found
            if self.settings.on_check is not None:
                self.settings.on_check(found)
            if self._world.ranks[0] == 0:
                method = self.settings.compressor
                check.warn(method, Bounds.of(method, self.settings.check_error), found)


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


def _group_of_its_own(
    store: Store, rank: int, size: int, device: torch.device, timeout: timedelta
) -> dist.ProcessGroup:
    """Return a new process group that torch's list of groups does not know.

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
