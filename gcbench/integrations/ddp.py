"""Gradient compression inside DistributedDataParallel: `gcbench.comm_hook(...).register(model)`.

DDP passes its buckets to a hook while backward runs. Here one thread processes them, first in,
first out, in a process group that nothing else uses: a method may need several collectives in a
row, and in DDP's own group they would hang or get mixed up. As soon as all gradients of a lane have
arrived (see `gcbench.integrations.plan`), the thread exchanges it by the same
`gcbench.core.exchange.Exchange` as gcbench's own engines. DDP waits for it at the end of backward.

Nothing depends on DDP's buckets, which change after the first steps and after a restart: random
numbers are addressed by (seed, step, rank, position of the element in the model), states are keyed
by the parameter's name, and a resumed job ends in the same bits as an uninterrupted one.

On a GPU the exchange has its own stream, which waits for the bucket by an event. That path has
never run.
"""

# Not `from __future__ import annotations`: DDP compares the hook's annotations with classes.
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any, NoReturn, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket, Store  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from gcbench.core import rule, sealed
from gcbench.core.clock import Totals
from gcbench.core.compressor import Compressor
from gcbench.core.errors import DivergedError, GcbenchError, UsageError
from gcbench.core.exchange import Lane, checked_rate, classifier, dense_tensors, lane_of
from gcbench.core.resize import redistributed
from gcbench.core.world import Traffic
from gcbench.integrations import agreement, check, handshake, unregistered
from gcbench.integrations import plan as plans
from gcbench.integrations.agreement import Common, digest
from gcbench.integrations.check import Bounds, Comparison
from gcbench.integrations.handshake import Roster
from gcbench.integrations.hook import (
    Copied,
    Hook,
    HookSettings,
    Observer,
    RankState,
    compressed,
    observe_loads,
    traffic_of,
)
from gcbench.integrations.hook_world import HookWorld
from gcbench.integrations.level import Level
from gcbench.integrations.plan import Placed, Plan
from gcbench.integrations.rates import Rates
from gcbench.integrations.worker import Worker

T = TypeVar("T")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of parameters: the exchange works in float32, which represents all three exactly."""
CLOSING = 5.0
"""Maximum seconds that `close` waits for a running collective."""
RECORDS = 10_000
"""Maximum number of comparisons in `CommHook.records`; older ones are dropped."""
CLOSED = (
    "the hook of this model was closed. Wrap the module in a new DistributedDataParallel, and "
    "register a new hook, to continue training"
)


@dataclass(frozen=True, kw_only=True)
class Settings(HookSettings):
    """The arguments of `comm_hook`."""

    dense_last: bool
    check_every: int
    check_error: float | None
    on_check: Callable[[list[Comparison]], None] | None
    bucket_mb: float
    on_resize: str
    agree: bool = True
    """Whether ranks agree before each exchange. gcbench's own engines stop all workers if one
    fails, and their results count the bytes of gradients alone."""

    def lanes(self, plan: Plan, step: int, skipped: int = 0) -> list[Lane]:
        """Return how each lane of the plan is exchanged from `step` on, after `skipped` steps."""
        exact = self.warms_up(step, skipped) or self.at(step)[0].rule.in_fp32(step)
        return [
            lane_of(
                [placed.shape for placed in tensors],
                tensors[0].start,
                *self.at(step),
                exact=dense or exact,
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

    Call `hook.register(model)` on every rank, after DDP has wrapped the module. The optimizer then
    receives the mean of the ranks' payloads, with the same bits on each.

    Args:
        compressor: a registered name (`gcbench list compressors`), a file (./mine.py), or a
            compressor.
        memory: name or file of the memory; default the method's. With `momentum` and `dgc` the
            optimizer must not have a momentum.
        memory_options: fields of the memory.
        collective: one of the method's legal ones; default the first of them.
        dense_below: tensors of fewer elements stay in fp32.
        dense_last: the last layer stays in fp32.
        start_step: steps before it are exchanged in fp32. Skipped steps do not count for methods
            that need such a warm-up (`onebitadam`).
        check_every: at each step that is a multiple of it, compute the plain mean as well and
            compare each tensor's compressed mean with it; 0 for never.
        check_error: warn about tensors whose relative error is larger; default 1.5 for contractive
            methods, no limit for others. The warning also names those whose cosine is 0 or less
            (-0.5 or less for votes).
        on_check: a function that receives the comparisons of a step, in the thread that exchanges.
            It must not call `state_dict`, `load_state_dict` or `close`, which wait for that thread.
        seed: of random numbers; models trained at the same time should have different ones.
        bucket_mb: size of a group of tensors that are exchanged together, in MiB of fp32.
        timeout: seconds that a rank waits for the others in a collective, and in `register`, which
            waits at most 60.
        optimizer: the optimizer of the model's parameters, or a list of them: residuals follow the
            learning rate of their parameter's group. You may pass it to `register` instead. Without
            it set `hook.lr` at each step, if the rate changes.
        scaler: the torch.amp.GradScaler that scales the loss. The exchange divides gradients by
            its scale and multiplies their mean by it, so that training is the same as without one.
        on_nonfinite: what to do if a rank's gradient is not finite. "stop": every rank raises
            DivergedError, which names that rank and the tensor. "skip": no rank exchanges anything
            at this step, residuals do not change, and every rank gets NaN for all gradients, so
            that a GradScaler skips its step on all ranks. The exchange then begins after the last
            gradient and does not overlap with backward. Default: "skip" with an enabled
            scaler, else "stop".
        on_resize: "redistribute": accept a state that was saved with another number of ranks, and
            preserve the mean of all residuals. "refuse" (default): refuse it.
        options: fields of the compressor, each a value or a schedule by step: "0:0.25/100:0.01" or
            {0: 0.25, 100: 0.01}.

    Raises:
        gcbench.core.errors.UsageError: an unknown name, field or value, or an illegal collective.
    """
    settings = Settings.of_call(locals())
    for method in settings.methods.values():
        rule.check_legal(method.rule, settings.memory, settings.start_step, method)
        if check_every and not method.rule.plain:
            raise UsageError(
                f"check_every={check_every} compares means, and the update rule of {method!r} "
                "converts them to directions: leave check_every out"
            )
    return CommHook(settings, Rates(optimizer, scaler, settings.unsuitable))


@dataclass(eq=False)
class _Arrived:
    """A bucket of DDP whose mean is not complete."""

    buffer: Tensor
    parts: list[tuple[Placed, Tensor]]
    """Its tensors with their views of the buffer, in the parameter's strides."""
    done: torch.futures.Future[Any]


class CommHook(Hook):
    """One model's compressed exchange, created by `comm_hook`."""

    CALL = "gcbench.comm_hook"
    FORMAT = 3
    RESIZE = 'on_resize="redistribute"'
    BYPASSED = (
        "not model.module(x), not another wrapper of the same module, and not under no_sync at "
        "every step. Convert the module's dtype before DistributedDataParallel wraps it. "
        "hook.close() discards a hook that is not used"
    )
    REPLACED = "close the hook and register a new one; its state keeps the residuals"

    def __init__(self, settings: Settings, rates: Rates) -> None:
        super().__init__(settings, rates)
        self._step = self._absent = 0
        """Steps so far, and those of them before this rank exchanged anything: of a state that
        another number of ranks saved."""
        self._counted = 0
        """On one rank: parameters whose gradients have arrived in this step."""
        self._checked_bytes = Traffic()
        self._records: deque[Comparison] = deque(maxlen=RECORDS)
        self._ready = 0.0
        self._in_backward = False
        """Whether a backward pass has passed on a bucket and has not ended."""
        self._warned_new = False
        self._warned_idle = False
        self._load_handle: Any = None
        """None: not registered."""
        unregistered.expect(self)
        self._worker: Worker | None = None
        """None: not registered, or nothing is exchanged, as there is one rank."""

    # -- for the user ------------------------------------------------------------------------------

    def register(
        self, model: DistributedDataParallel, *, optimizer: Any = None, scaler: Any = None
    ) -> Self:
        """Exchange the gradients of `model` from its next backward on. All ranks call it.

        With one rank nothing is sent and nothing changes, except that steps are counted. A method
        with an update rule, or a memory with momentum, trains as with several ranks.

        Args:
            model: the wrapped model.
            optimizer: as for `comm_hook`, if not passed there.
            scaler: as for `comm_hook`, if not passed there. `on_nonfinite` does not change.

        Raises:
            gcbench.core.errors.UsageError: this model cannot be compressed, or the ranks registered
                different settings: on every rank, with the remedy.
            gcbench.core.errors.PeerLostError: another rank did not register.
        """
        unregistered.settle(self)
        if not isinstance(model, DistributedDataParallel):
            raise UsageError(
                f"register received a {type(model).__name__}: wrap the module in "
                "torch.nn.parallel.DistributedDataParallel first, and register on that, before "
                "torch.compile"
            )
        self._size = model.process_group.size()
        members = dist.get_process_group_ranks(model.process_group)
        if len(members) < dist.get_world_size():
            self._members = f", global ranks {', '.join(map(str, members))}"

        def meet(refused: str) -> tuple[Store, Roster]:
            summary, group = dict(self._summary), model.process_group
            if not refused:
                summary["parameters (digest)"] = agreement.digest_of(self._watched())
            return handshake.meet(group, summary, refused, self._patience, Roster.alone())

        store, roster = self._prepare_and_meet(
            lambda: self._prepare(model), meet, optimizer, scaler
        )
        if self._exchanges:
            self._begin(model, store, roster)
        model.register_forward_pre_hook(Observer(self._before_forward, warns=True))
        self._load_handle = observe_loads(model.module, self._before_load)
        model.register_comm_hook(None, self._hook if self._exchanges else self._count)
        # Copies of the model share this list; `compressed` can be copied and pickled.
        model._comm_hooks[-1] = (compressed, None)
        return self

    @property
    def _patience(self) -> float:
        """Seconds to wait for the other ranks, which have just met in DDP's constructor."""
        return min(super()._patience, handshake.PATIENCE)

    @property
    def _exchanges(self) -> bool:
        """Whether gradients pass through an exchange: on one rank only if it applies a rule or a
        momentum."""
        settings = self.settings
        applies = not settings.compressor.rule.plain or settings.momentum is not None
        return self._size > 1 or applies

    @property
    def step(self) -> int:
        """Backward passes outside `no_sync` so far, with those that were skipped."""
        return self._step

    @property
    def records(self) -> list[Comparison]:
        """The comparisons of `check_every`, oldest first: the last `RECORDS`, 10,000."""
        return list(self._records)

    @property
    def ready(self) -> float:
        """The time at which DDP last passed on a bucket, by `time.perf_counter`.

        After the last bucket of a backward pass all gradients are computed, and backward waits for
        the exchange.
        """
        return self._ready

    def optimizer(
        self, parameters: Iterable[Any], lr: float, *, weight_decay: float = 0.0
    ) -> torch.optim.SGD:
        """Return the optimizer for a method with its own update rule.

        It is plain SGD: theta <- theta - lr (d + weight_decay theta), where d is the direction that
        the rule computes from the decoded mean; the hook returns it as the gradient. The hook
        follows its learning rates, as with `optimizer=`.

        Raises:
            gcbench.core.errors.UsageError: the method has no update rule, so any optimizer will do;
                or the hook already has an optimizer.
        """
        method = self.settings.compressor
        if method.rule.plain:
            raise UsageError(
                f"{method!r} has no update rule of its own: pass the parameters to any optimizer"
            )
        optimizer = torch.optim.SGD(
            parameters, lr=checked_rate(lr), momentum=0.0, weight_decay=weight_decay
        )
        self._rates.add(optimizer, None)
        if self._registered:
            self._follow_steps(self._named)
        return optimizer

    @property
    def checked(self) -> Traffic:
        """Bytes of this rank for `check_every`, which `traffic` does not contain."""
        return replace(self._checked_bytes)

    @property
    def plain_bytes(self) -> float:
        """Bytes that this rank would have sent in fp32."""
        return 4.0 * (self._step - self._absent) * self._flat.numel() if self._worker else 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of the exchanging thread by phase: statistic, encode, communicate, decode."""
        return self._level.clock.seconds if self._worker else {}

    def close(self) -> None:
        """End the thread and the process group. The model cannot be trained after that.

        Raises:
            gcbench.core.errors.UsageError: `on_check` called it.
        """
        self._outside("close")
        if self._closed:
            return
        self._closed = True
        unregistered.settle(self)
        self._rates.close()
        if self._load_handle is not None:  # the module may outlive the hook
            self._load_handle.remove()
        if self._worker is not None:
            for touch in self._touches:
                touch.remove()
            self._worker.close(CLOSING)
            self._level.world.close()

    def _outside(self, what: str) -> None:
        """Raise UsageError in the thread that exchanges, which would wait for itself."""
        if self._worker is not None and self._worker.is_current:
            raise UsageError(
                f"on_check called {what}, which waits for the thread that runs on_check. Store "
                "what you need there, and call the hook after backward"
            )

    def _serialized(self, call: Callable[[], T]) -> T:
        """Return the result of a call in the thread that exchanges, if it runs."""
        if self._worker is None or self._closed:
            return call()
        return self._worker.submit(call).result()

    # -- registration ------------------------------------------------------------------------------

    def _prepare(self, model: DistributedDataParallel) -> Mapping[str, Tensor]:
        """Make the exchange, without its process group; return the parameters that DDP reduces."""
        if self._closed:
            raise UsageError("this hook was closed: make a new one")
        _check_free(model)
        settings, named = self.settings, _reduced(model)
        _check_parameters(model.module, named)
        device = next(iter(named.values())).device
        handshake.check_backend("the model's", model.process_group, device)
        names, shapes = list(named), [tuple(p.shape) for p in named.values()]
        last = classifier(model.module) if settings.dense_last else []
        dense = dense_tensors(names, shapes, settings.dense_below, last)
        plan = Plan.of(names, shapes, dense, settings.bucket_mb * 2**20 / 4)
        layout = [
            [[placed.name, placed.shape, str(named[placed.name].dtype)] for placed in lane]
            for lane in plan.lanes
        ]
        numel = sum(placed.numel for placed in plan.tensors)
        self._summary = {
            **self._summarize(len(plan.tensors), numel, layout),
            "dense_last": settings.dense_last,
            "check_every": settings.check_every,
            "bucket_mb": settings.bucket_mb,
            "unused parameters": bool(model.find_unused_parameters or model.static_graph),
        }
        self._plan = plan
        self._placed = {id(named[placed.name]): placed for placed in plan.tensors}
        self._named = named  # a reference, so that their ids stay unique
        self._level = Level(
            self._world_of(model.process_group, device),
            partial(settings.lanes, plan),
            settings.stages,
            [[(placed.name, placed.numel) for placed in lane] for lane in plan.lanes],
            settings.seed,
            Totals(device),
        )
        return named

    def _begin(self, model: DistributedDataParallel, store: Store, roster: Roster) -> None:
        """Create the process group and the thread."""
        with self._exchanging():
            self._level.world.connect(store, roster)
        device = self._level.world.device
        self._stepped_since = False
        """Whether a step was exchanged since `register`."""
        self._partial = self._summary["unused parameters"]
        self._flat = torch.zeros(self._level.numel, dtype=torch.float32, device=device)
        self._stream = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._waiting: list[_Arrived] = []
        self._touched: set[str] = set()
        """Names of the parameters whose gradient a backward pass has computed since the last
        exchange."""
        self._touches = [
            parameter.register_post_accumulate_grad_hook(partial(_touch, self._touched, name))
            for name, parameter in self._named.items()
        ]
        self._used = dict.fromkeys(self._named, 0)
        """Name -> exchanges of a parameter since `register`, without those where it is unused."""
        self._new_step()
        self._worker = Worker("gcbench comm_hook")

    def _fresh(self, name: str) -> int:
        return self._used[name]

    def _direction(self, parameter: Tensor) -> tuple[Tensor, Tensor, Compressor] | None:
        if not self._exchanges or parameter.grad is None:  # one rank's gradients stay as they are
            return None
        settings, placed = self.settings, self._placed.get(id(parameter))
        votes = settings.compressor.claims.aggregate == "vote" and not settings.warms_up(
            self._step - 1, self._level.exchange.skipped
        )
        directs = votes or not settings.compressor.rule.plain
        if not directs or placed is None:
            return None
        return parameter.grad, placed.of(self._flat), settings.compressor

    def _local(self, name: str) -> bool:
        in_backward = torch._C._current_graph_task_id() != -1
        return self._worker is not None and (in_backward or name in self._touched)

    def _levels(self) -> list[Level]:
        return [] if self._worker is None else [self._level]

    def _watched(self) -> Iterable[nn.Parameter]:
        return self._named.values()

    def _worlds(self) -> list[HookWorld]:
        return [self._level.world]

    # -- state -------------------------------------------------------------------------------------

    def _state(self) -> RankState:
        """Return the state; without exchanges that is the number of steps."""
        level = self._level
        entry = {
            "step": self._step,
            "absent": self._absent,
            "checked": list(astuple(self._checked_bytes)),
            "exchange": level.exchange.state_dict() if self._exchanges else None,
        }
        return self._sealed(level.world.ranks[0], entry)

    def _adopt(self, state: Mapping[str, Any]) -> None:
        if self._closed:
            raise UsageError(CLOSED)
        rank, size = self._level.world.ranks[0], self._size
        resized = self.settings.on_resize == "redistribute" and self._key(rank) not in state
        entries = self._entries(state) if resized else [self._entry(state, rank, size)]
        entry = entries[min(rank, len(entries) - 1)]
        step = sealed.integer("step", sealed.entry(entry, "step"), 0, sealed.STEPS)
        absent = sealed.integer("absent", entry.get("absent", 0), 0, sealed.STEPS)
        checked = traffic_of("checked", sealed.entry(entry, "checked"))
        if resized and (rank >= len(entries) or sealed.entry(entry, "exchange") is None):
            absent, checked = step, Traffic()
        if resized and size == 1:
            raise UsageError(
                "one rank has no residuals, so those of the state would be lost. Register a hook "
                "without a state to train without them"
            )
        if self._exchanges:
            exchange = self._level.make(step)
            saved = [sealed.entry(each, "exchange") for each in entries]
            if resized and None not in saved:
                memory = self.settings.memory
                names = (*memory.residuals, *memory.dense().residuals)
                saved = [redistributed(saved, exchange, names)]
            if saved[0] is not None or not resized:  # a state of one rank has no exchange
                self._level.load(exchange, step, saved[0])
            self._level.exchange = exchange
        self._step, self._absent, self._checked_bytes = step, absent, checked

    # -- called by DDP, in its threads -------------------------------------------------------------

    def _before_forward(self, model: nn.Module) -> None:
        """Raise past and foreseeable errors before the model computes anything."""
        if self._worker is None:
            return
        if not torch.is_grad_enabled():  # in an evaluation DDP may send buffers, but no gradients
            if self._active:
                self._meet(model)
            return
        self._outside("the model")
        self.raise_failure()
        self._warn_new(model)
        module: Any = model.module
        if not self._closed and module.training:
            self._compare_loaded()
        if self._closed and model.training:
            raise UsageError(CLOSED)
        if getattr(getattr(model, "_join_config", None), "enable", False):
            raise UsageError(
                "DDP's join runs the hook on zeros for ranks without data, which would send their "
                "residuals and change the mean. Give all ranks the same number of batches: "
                "DistributedSampler(..., drop_last=True)"
            )
        if not self._closed:
            self._check_backward(model)

    def _warn_new(self, model: Any) -> None:
        """Warn, once, about parameters that DDP does not average: added, replaced or unfrozen."""
        if self._warned_new:
            return
        names = [
            name
            for name, parameter in model.module.named_parameters(remove_duplicate=False)
            if parameter.requires_grad
            and id(parameter) not in self._placed
            and name not in model.parameters_to_ignore
        ]
        if names:
            self._warned_new = True
            warnings.warn(
                f"{', '.join(names[:3])} did not exist or did not require a gradient when the hook "
                "was registered, and does now. Its gradient is not averaged over ranks, so the "
                "replicas will differ. Make such changes first, then wrap the module, create the "
                "optimizer and register a new hook",
                stacklevel=2,
            )

    def _check_backward(self, model: Any) -> None:
        """Raise UsageError, and stop the other ranks, if the last backward pass did not finish."""
        if self._in_backward:
            self._unfinished(None)
        self._meet(model)
        try:
            # DDP makes this call next, and raises here after a pass that it could not finish.
            model._has_rebuilt_buckets |= model.reducer._rebuild_buckets()
        except RuntimeError as error:
            self._unfinished(error)

    def _unfinished(self, cause: RuntimeError | None) -> NoReturn:
        error = UsageError(
            f"rank {self._level.world.rank}: the backward pass of step {self._step} did not "
            "finish, so the ranks cannot continue together. Was an error caught there? Then "
            "restart from a checkpoint. Does the model have parameters that the loss does not use? "
            "Then DistributedDataParallel(..., find_unused_parameters=True)"
        )
        self._serialized(lambda: self._fail(error))
        raise error from cause

    def _meet(self, model: Any) -> None:
        """Agree with the other ranks if DDP itself is about to communicate in a forward pass.

        DDP synchronizes buffers, and rebuilds its buckets after the first backward pass. There a
        rank would wait for one that has failed until the process group's timeout.
        """
        rebuilds = (
            torch.is_grad_enabled()
            and (model.static_graph or not model.find_unused_parameters)
            and self._stepped_since
            and not model._has_rebuilt_buckets
        )
        if self.settings.agree and (rebuilds or model.will_sync_module_buffers()):
            self._outside("the model")
            kind = "" if torch.is_grad_enabled() else " without gradients"
            position = f"before a forward pass{kind}"
            self._serialized(lambda: self._agree_on_forward(position))
            self.raise_failure()

    def _agree_on_forward(self, position: str) -> None:
        common = Common({"position": position, "step": self._step})
        try:
            error: BaseException | None = self._agree(self._levels(), None, common)
        except BaseException as failed:
            error = failed
        if error is not None:
            self._fail(error)

    def _backward_ended(self) -> None:
        """Wait for the exchanges at the end of a backward pass, and raise their error.

        DDP reports each error as a RuntimeError; this one keeps its class.
        """
        self._serialized(lambda: None)
        self._in_backward = False
        self.raise_failure()

    def _hook(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Pass a bucket to the thread; the future returns its mean, in the same buffer."""
        buffer, parameters, last = bucket.buffer(), bucket.parameters(), bucket.is_last()
        self._ready = time.perf_counter()
        if self._closed or self._worker is None:
            raise UsageError(CLOSED)
        devices: list[int | str | torch.device] = []
        if self._stream is not None:
            devices.append(buffer.device)
        done: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
        ready = torch.cuda.current_stream().record_event() if self._stream is not None else None
        if not self._in_backward:  # true after an unfinished pass, but DDP refuses another one
            self._in_backward = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._backward_ended)
        self._worker.submit(lambda: self._arrive(buffer, parameters, last, done, ready))
        return done.then(_result)

    def _count(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Return a bucket unchanged, which is the mean of one rank; count the step."""
        self._ready = time.perf_counter()
        self._counted += len(bucket.parameters())
        # In the first pass with static_graph no bucket says that it is the last.
        if bucket.is_last() or self._counted == len(self._placed):
            self._step, self._counted = self._step + 1, 0
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    # -- in the thread -----------------------------------------------------------------------------

    def _new_step(self) -> None:
        self._left = [len(lane) for lane in self._plan.lanes]
        self._touched.clear()
        self._idle: set[str] = set()
        """Names of the parameters that no rank used, of the lanes exchanged in this step."""
        self._seen: set[str] = set()
        self._compared: list[Comparison] = []
        self._misfit: GcbenchError | None = None
        """Why a mean of this step cannot be applied, on this rank."""

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
        """Accept a bucket, exchange the lanes that are complete, and return finished buckets."""
        arrived = _Arrived(buffer, [], done)
        self._waiting.append(arrived)
        try:
            self.raise_failure()
            with self._on_stream(ready):
                self._take(arrived, parameters)
                # In the first pass with static_graph no bucket says that it is the last.
                last = last or len(self._seen) == len(self._plan.tensors)
                if self.settings.on_nonfinite == "stop":
                    for number in sorted({placed.lane for placed, _ in arrived.parts}):
                        if self._left[number] == 0:
                            self._agree_on_lanes([number])
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

    def _break_off(self, error: BaseException) -> None:
        """Fail, and return the error instead of each outstanding mean."""
        self._fail(error)
        for waiting in self._waiting:
            waiting.done.set_result(error)
        self._waiting = []

    def _exchange_all(self) -> None:
        """Exchange all lanes of a step, or none: then the means are NaN on every rank."""
        lanes = [number for number, left in enumerate(self._left) if left == 0]
        if self._agree_on_lanes(lanes):
            for number in lanes:
                self._exchange_lane(number)
        else:
            self._flat.fill_(torch.nan)
            self._skipped += 1
            self._level.exchange.skipped += 1

    def _agree_on_lanes(self, lanes: Sequence[int]) -> bool:
        """Return whether to exchange lanes; False: skip the step, as a gradient is not finite."""
        level = self._level
        pairs = ((number, self._flat[self._plan.stretch(number)]) for number in lanes)
        errors = (level.diverged(*pair, self._step) for pair in pairs)
        error: GcbenchError | None = next(filter(None, errors), None)
        if self.settings.agree:
            error = self._agree([level], error, self._shared)
        if error is None:
            return True
        if isinstance(error, DivergedError) and self.settings.on_nonfinite == "skip":
            return False
        raise error

    def _follow(self) -> None:
        """Begin a step: its stage, its learning rates, and the values that ranks share."""
        self._shared = self._common("exchange of gradients", self._step, [self._level])
        self._looks = self._level.begin(self._step, self._rates)

    def _take(self, arrived: _Arrived, parameters: Sequence[Tensor]) -> None:
        """Copy a bucket's gradients to their positions in the flat gradient."""
        if not self._seen:
            self._follow()
        if arrived.buffer.is_sparse:
            raise UsageError(
                "received a sparse gradient, which cannot be compressed. Create its module with "
                "sparse=False"
            )
        start = 0
        for parameter in parameters:
            placed = self._placed.get(id(parameter))
            if placed is None:
                raise UsageError(
                    f"received a gradient of shape {tuple(parameter.shape)} of a parameter that "
                    "did not require one when the hook was registered. Set requires_grad before "
                    "DistributedDataParallel wraps the module"
                )
            if placed.name in self._seen:
                raise UsageError(
                    f"received {placed.name} twice: the last backward pass ended without all "
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
        """Replace a lane's gradients by their mean."""
        level, world, tensors = self._level, self._level.world, self._plan.lanes[number]
        gradient = self._flat[self._plan.stretch(number)]
        before = replace(world.traffic[0])
        idle = self._unused(tensors) if self._partial else []
        if idle:
            self._warn_idle(idle[0].name)
        for placed in idle:
            placed.of(self._flat).zero_()  # DDP passes on what `.grad` holds from an earlier step
        if len(idle) == len(tensors):
            return
        for placed in tensors:
            self._used[placed.name] += placed.name not in self._idle
        self._due.update(placed.name for placed in tensors if placed.name not in self._idle)
        level.unscale(gradient)
        if self._looks:
            self._look(level, number, gradient, self._idle)
        with plans.set_aside(level.exchange, self._plan, idle):
            every = self.settings.check_every
            plain = None
            if every and self._step % every == 0:
                plain = self._plain_mean(number, gradient)
            mean = level.exchange.lane_mean(number, [gradient], self._step)
        gradient.copy_(mean)
        if plain is not None:
            sent = world.traffic[0].payload_up - before.payload_up
            bits = 8 * sent / gradient.numel() if gradient.numel() else 0.0
            self._compare([placed for placed in tensors if placed not in idle], plain, bits)
        level.rescale(gradient)
        self._check_means(number, tensors)

    def _check_means(self, number: int, tensors: Sequence[Placed]) -> None:
        """Record the first mean that its parameter's dtype cannot represent."""
        if self._misfit is None:
            method = self._level.exchange.lanes[number].compressor
            means = ((placed.name, placed.of(self._flat)) for placed in tensors)
            dtypes = {placed.name: [self._named[placed.name].dtype] for placed in tensors}
            self._misfit = check.misfit(method, means, dtypes, self._step)

    def _agree_on_means(self, step: int) -> None:
        """Check that every rank has the same means, bit for bit, and can apply them."""
        error = self._misfit
        if self.settings.agree:
            values = {"position": "end of a step", "step": step, "mean": digest(self._flat)}
            error = self._agree([self._level], error, Common(values))
        if error is not None:
            raise error

    def _compare(self, tensors: Sequence[Placed], plain: Tensor, bits: float) -> None:
        """Compare the means of a lane's tensors with the lane's plain mean, 1-D."""
        for placed in tensors:
            start = placed.start - self._level.exchange.lanes[placed.lane].start
            expected = plain[start : start + placed.numel].view(placed.shape)
            mean = placed.of(self._flat)
            self._compared.append(check.compare(self._step, placed.name, mean, expected, bits))

    def _unused(self, tensors: Sequence[Placed]) -> list[Placed]:
        """Return the tensors that no rank used: DDP drops their mean."""
        world = self._level.world
        used = [placed.name in self._touched for placed in tensors]
        sent = torch.tensor(used, dtype=torch.uint8, device=world.device)
        flags = world.all_reduce([sent], "max").tolist()
        idle = [placed for placed, flag in zip(tensors, flags, strict=True) if not flag]
        self._idle.update(placed.name for placed in idle)
        return idle

    def _warn_idle(self, name: str) -> None:
        """Warn, once, if an update rule estimates from a step in which a parameter is unused."""
        settings, step = self.settings, self._step
        method = settings.at(step)[0]
        estimates = settings.warms_up(step, self._level.exchange.skipped) or method.rule.in_fp32(
            step
        )
        if method.rule.needs_warm_up and estimates and not self._warned_idle:
            self._warned_idle = True
            warnings.warn(
                f"no rank used {name} at step {step}, one of those from whose gradients {method!r} "
                "estimates how far each element moves later: further than with Adam if some of its "
                "gradients are missing, not at all if all are. Use every parameter in the warm-up, "
                "or another method",
                stacklevel=2,
            )

    def _plain_mean(self, number: int, gradient: Tensor) -> Tensor:
        """Return the plain mean to compare the compressed one with; count bytes in `checked`.

        It is the mean of the encoders' inputs, with residuals; if the memory transforms the mean
        (`Memory.apply`), it is the mean of the gradients.
        """
        exchange, world = self._level.exchange, self._level.world
        if not exchange.lanes[number].memory.joint:
            with exchange._resting(number):  # as `Exchange.lane_mean`
                gradient = exchange.offered(number, gradient, self.step)
        before, world.traffic[0] = world.traffic[0], self._checked_bytes
        try:
            return world.all_reduce([gradient], "sum").div_(world.size)
        finally:
            world.traffic[0] = before

    def _finished(self, last: bool) -> list[_Arrived]:
        """Return the buckets whose lanes are all exchanged, with the means in their buffers."""
        if self.settings.on_nonfinite == "skip" and not last:
            return []
        finished = [
            each
            for each in self._waiting
            if not any(self._left[placed.lane] for placed, _ in each.parts)
        ]
        for each in finished:
            for placed, part in each.parts:
                if placed.name not in self._idle:
                    part.copy_(placed.of(self._flat))
        return finished

    def _end_step(self) -> None:
        """Check the means, report comparisons, and count the step."""
        missing = [p.name for p in self._plan.tensors if p.name not in self._seen]
        if missing:
            raise UsageError(
                f"received no gradient of {', '.join(missing[:3])}, which required one when the "
                "hook was registered. Set requires_grad before DistributedDataParallel wraps the "
                "module"
            )
        comparisons, step = self._compared, self._step
        self._step += 1
        if comparisons:
            self._records.extend(comparisons)
            if self.settings.on_check is not None:
                self.settings.on_check(comparisons)
            if self._level.world.ranks[0] == 0:
                settings = self.settings
                method, error = settings.compressor, settings.check_error
                bounds = Bounds.of(method, error, settings.collective)
                check.warn(method, bounds, comparisons)
        self._agree_on_means(step)
        self._stepped_since = True
        self._new_step()


def _reduced(model: DistributedDataParallel) -> dict[str, Any]:
    """Return the parameters that DDP reduces, each by its first name.

    DDP ignores a shared parameter only if all its names are in its list.
    """
    ignored = model.parameters_to_ignore
    every = model.module.named_parameters(remove_duplicate=False)
    reduced = {id(p) for name, p in every if p.requires_grad and name not in ignored}
    return {name: p for name, p in model.module.named_parameters() if id(p) in reduced}


def _check_free(model: DistributedDataParallel) -> None:
    """Raise UsageError if the model has no place for a hook."""
    if getattr(model, "mixed_precision", None) is not None:
        raise UsageError(
            "DDP(mixed_precision=...) uses the only place for a hook. Leave it out and use "
            "torch.autocast around the forward pass, or parameters in bfloat16"
        )
    if getattr(model, "_use_python_reducer", False):
        raise UsageError(
            'torch._dynamo.config.optimize_ddp is "python_reducer", with which DDP averages '
            "gradients without its hook. Set it to True or False before "
            "DistributedDataParallel wraps the module"
        )
    if getattr(model, "skip_all_reduce_unused_params", False):
        raise UsageError(
            "DDP(skip_all_reduce_unused_params=True) does not pass all buckets to a hook, which "
            "would wait for the others. Leave it out; find_unused_parameters=True works"
        )
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in model.parameters()):
        raise UsageError(
            "_apply_optimizer_in_backward uses DDP's only place for a hook. Create an optimizer "
            "of all parameters instead, and call its step after backward"
        )
    before = model._forward_pre_hooks
    for key in [key for key, each in before.items() if isinstance(each, Copied)]:
        del before[key]
        model._comm_hooks = [each for each in model._comm_hooks if each[0] is not compressed]
    if getattr(model, "_comm_hooks", ()):
        raise UsageError(
            "the model already has a communication hook, and DDP allows one. Wrap the module in a "
            "new DistributedDataParallel to register another"
        )


def _check_parameters(module: nn.Module, named: Mapping[str, nn.Parameter]) -> None:
    """Raise UsageError for parameters whose gradients cannot be compressed.

    `named`: those of the module that require a gradient.
    """
    if not named:
        raise UsageError(
            "no parameter of the model requires a gradient, so nothing is exchanged. Unfreeze it "
            "before DistributedDataParallel wraps it, or train without a hook"
        )
    for prefix, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise UsageError(
                f"{prefix or 'the model'} has sparse gradients (sparse=True), which cannot be "
                "compressed. Create it with sparse=False"
            )
    wrong = [f"{k} is {p.dtype}" for k, p in named.items() if p.dtype not in DTYPES]
    if wrong:
        raise UsageError(
            f"{', '.join(wrong[:3])}: gradients are exchanged in float32, which represents only "
            "float32, bfloat16 and float16 exactly. Convert the model"
        )
    devices = sorted({str(parameter.device) for parameter in named.values()})
    if len(devices) > 1 or torch.device(devices[0]).type not in handshake.BACKENDS:
        raise UsageError(
            f"parameters on {', '.join(devices)}: expected one CPU or one CUDA device per rank"
        )


def _touch(touched: set[str], name: str, parameter: Tensor) -> None:
    """Note that a backward pass computed the gradient of a parameter."""
    touched.add(name)


def _result(done: torch.futures.Future[Any]) -> Tensor:
    """Return a bucket's mean, or raise the error that replaced it.

    DDP reports only errors that the callback of a future raises.
    """
    result: Tensor | BaseException = done.value()
    if isinstance(result, BaseException):
        raise result
    return result


def _strided(part: Tensor, parameter: Tensor) -> Tensor:
    """Return a range of DDP's bucket, 1-D, as a view of the parameter's shape.

    DDP preserves the strides of a parameter that is dense in memory (such as channels_last).
    """
    strides, sizes = parameter.stride(), parameter.size()
    order = sorted(range(parameter.dim()), key=lambda d: (strides[d], sizes[d]), reverse=True)
    if parameter.permute(order).is_contiguous():
        return part.as_strided(parameter.size(), parameter.stride())
    return part.view(parameter.shape)
