"""Training through DistributedDataParallel, which overlaps the exchange with the backward pass.

With engine `ddp` each worker is a process whose replica is wrapped by DDP, with the hook of
`gcbench.integrations.ddp` or one of torch's. Everything else is as in `Trainer`. A run differs from
one with engine `spawn` only in the time of the exchange, in the order of tensors, which determines
random numbers and shards, and in its lanes: they end at `bucket_mb`, so a method that looks at the
whole model (granularity "model", DGC's `clip`) looks at each lane of a larger model.

Each step measures how much of the exchange is hidden. Backward returns when the last bucket has
been exchanged. The time between the last gradient and that return is `exposed`; the rest of the
hook thread's time for the exchange was hidden by the backward pass. On few cores the two compete,
and `forward_backward` is slower.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from gcbench.core.errors import DivergedError, UsageError
from gcbench.core.exchange import Exchange
from gcbench.core.payload import all_finite
from gcbench.core.schema import PHASES
from gcbench.core.world import World
from gcbench.integrations.ddp import CommHook, comm_hook
from gcbench.integrations.rates import Rates
from gcbench.training.configuration import Config
from gcbench.training.dropout import set_dropout_key
from gcbench.training.store import Run
from gcbench.training.train import Options, Trainer
from gcbench.training.updates import clip_factor, step_with

EXCHANGED = ("statistic", "encode", "communicate", "decode")
"""The phases of the hook's thread."""


class DdpTrainer(Trainer):
    """One worker of a run with engine `ddp`."""

    def __init__(self, config: Config, world: World, run: Run, options: Options) -> None:
        if options.on_bucket is not None or options.capture is not None:
            raise UsageError(
                "engine ddp sends gradients before all are computed, so it cannot capture them: "
                "use --engine spawn"
            )
        super().__init__(config, world, run, options)
        self.exchange = Exchange(world, [], config.seed, self.clock)  # unused: the hook has one
        self.stages = set()
        self.hook: CommHook | None = None
        self.torch_hook: CountedHook | None = None
        self.exposed: list[float] = []
        """Seconds per step in which backward waited for the exchange."""
        self._hook_state: Mapping[str, Any] | None = None
        """The hook's state in the checkpoint of a resumed run."""

    def _wrap(self) -> None:
        """Wrap the replica in DDP, and register the hook with its state from the checkpoint."""
        config = self.config
        self._decay_in_loss()
        with warnings.catch_warnings():
            # Each worker keeps its buffers, also after a resume. The argument that replaces this
            # one in newer torch would broadcast worker 0's buffers at the start.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            self.wrapped = DistributedDataParallel(
                self.replicas[0], broadcast_buffers=False, bucket_cap_mb=config.bucket_mb
            )
        if config.hook == "torch":
            self.torch_hook = CountedHook(config, self.world)
            self.wrapped.register_comm_hook(None, self.torch_hook.hook())
            return
        hook = comm_hook(
            self.compressor,
            memory=config.memory,
            memory_options=config.memory_options,
            collective=config.collective,
            dense_below=config.dense_below,
            dense_last=config.dense_last,
            start_step=config.start_step,
            seed=config.seed,
            bucket_mb=config.bucket_mb,
        )
        # The launcher ends all workers if one fails, and results count only the bytes of gradients.
        self.hook = CommHook(replace(hook.settings, agree=False), Rates(None, None))
        if self._hook_state is not None:
            self.hook.load_state_dict(self._hook_state)
        self.hook.register(self.wrapped)

    def _decay_in_loss(self) -> None:
        """Add the loss's L2 term to each gradient before DDP, as `finish_bucket` does."""
        rate = self.config.weight_decay
        if self.config.decay != "loss" or not rate:
            return

        def decayed(parameter: Tensor) -> Callable[[Tensor], Tensor]:
            return lambda gradient: gradient.add(parameter.detach(), alpha=rate)

        for parameter, on in zip(self.parameters, self.decayed, strict=True):
            if on:
                parameter.register_hook(decayed(parameter))  # type: ignore[no-untyped-call]

    def train_step(self) -> list[float]:
        """Run one step; return this worker's loss."""
        self.clock.start_step()
        config, rank = self.config, self.world.ranks[0]
        lr = config.lr_at(self.step)
        before = {} if self.hook is None else self.hook.seconds
        if self.hook is not None:
            self.hook.lr = lr
        began = self.clock.read()
        inputs, targets = self.batches.of(self.step, rank)
        set_dropout_key(self.replicas[0], self.batches.key(self.step, rank))
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.task.loss(self.wrapped(inputs), targets)
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        except RuntimeError:
            if self.hook is not None:
                self.hook.raise_failure()
            raise
        ended, last = self.clock.read(), self._ready()
        self.clock.add("forward_backward", last - began)
        self.exposed.append(ended - last)
        if self.hook is not None:
            for phase in EXCHANGED:
                self.clock.add(phase, self.hook.seconds[phase] - before[phase])
            self.world.traffic[0] = self.hook.traffic
        else:
            self._check_mean_gradients()
        with self.clock.phase("update"):
            if config.clip_norm:
                self._clip(config.clip_norm)
            step_with(self.optimizer, lr)
            self.average.update(self.step)
        self.step += 1
        self.clock.end_step()
        return [float(loss.detach())]

    def _check_mean_gradients(self) -> None:
        """Raise DivergedError for a mean that is not finite; torch's hooks do not look at it."""
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if parameter.grad is not None and not all_finite(parameter.grad):
                raise DivergedError(
                    f"non-finite mean gradient in layer {name} at step {self.step}; lower --lr",
                    self.step,
                )

    def _clip(self, limit: float) -> None:
        """Scale the gradients in place to a joint 2-norm of at most `limit`."""
        gradients = [each.grad for each in self.parameters if each.grad is not None]
        factor = clip_factor(gradients, limit)
        for gradient in gradients:
            gradient.mul_(factor)

    def _ready(self) -> float:
        """Return the clock's time at which the last gradient was computed."""
        if self.hook is not None:
            return self.hook.ready
        assert self.torch_hook is not None
        return self.torch_hook.ready

    def _train(self, stop: Callable[[], bool]) -> dict[str, float | None]:
        self._wrap()
        try:
            return super()._train(stop)
        finally:
            if self.hook is not None:
                self.hook.close()
            # Now, while torch refers to the process group. Otherwise DDP's reducer would destroy it
            # with the GIL, and wait for a thread of gloo that may wait for the GIL (torch 2.13).
            del self.wrapped

    def _worker_states(self) -> list[dict[str, Any]]:
        (state,) = super()._worker_states()
        state["exposed"] = self.exposed
        state["hook"] = None if self.hook is None else self.hook.state_dict()
        return [state]

    def _restore(self, state: Mapping[str, Any]) -> None:
        if self.config.hook == "torch" and self.config.compressor == "powersgd":
            raise ValueError("it lacks the residuals of torch's PowerSGD hook")
        super()._restore(state)
        worker = state["workers"][self.world.ranks[0]]
        self._hook_state, self.exposed = worker["hook"], list(worker["exposed"])

    def _summary(self, evaluation: Mapping[str, float | None]) -> dict[str, Any]:
        summary = super()._summary(evaluation)
        busy: list[float] | None = None
        if self.hook is None:
            summary["collective"] = "allreduce"  # the only one of torch's hooks
            for phase in EXCHANGED:
                summary["phase_seconds"][phase] = None  # not measured inside torch's hooks
        else:
            places = [PHASES.index(phase) for phase in EXCHANGED]
            busy = [sum(step[i] for i in places) for step in self.clock.steps]
        summary["overlap"] = overlap(busy, self.exposed)
        summary["phase_seconds"]["exposed"] = summary["overlap"]["exposed_seconds"]
        return summary


def overlap(busy: Sequence[float] | None, exposed: Sequence[float]) -> dict[str, float | None]:
    """Return the median seconds of the exchange and of waiting for it, and the hidden fraction.

    `busy`: seconds of the exchange per step, None if not measured; `exposed`: seconds that backward
    waited for it. The fraction is 1 - the ratio of the medians, at least 0.
    """
    took, waited = None if busy is None else statistics.median(busy), statistics.median(exposed)
    return {
        "exchange_seconds": took,
        "exposed_seconds": waited,
        "hidden_share": None if not took else max(0.0, 1 - waited / took),
    }


class CountedHook:
    """One of torch's hooks, with a count of the bytes of its collectives."""

    def __init__(self, config: Config, world: World) -> None:
        self.world, self.ready = world, 0.0
        self.state: Any = None
        hooks: dict[str, Any] = {
            "none": default_hooks.allreduce_hook,
            "fp16": default_hooks.fp16_compress_hook,
            "powersgd": powerSGD_hook.powerSGD_hook,
        }
        self.original = hooks[config.compressor]
        if config.compressor == "powersgd":
            rank = getattr(config.make_compressor(), "rank", 1)
            self.state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=rank, start_powerSGD_iter=2
            )

    def hook(self) -> Callable[..., torch.futures.Future[Tensor]]:
        """Return the function to register, with classes as annotations, as DDP requires."""

        def counted(state, bucket):  # type: ignore[no-untyped-def]
            self.ready = time.perf_counter()
            with _Counting(self.world):
                return self.original(self.state, bucket)

        counted.__annotations__ = {
            "bucket": GradBucket,
            "return": torch.futures.Future[torch.Tensor],
        }
        return counted


class _Counting(TorchDispatchMode):
    """Adds the bytes of all-reduces in its context to this worker's traffic."""

    def __init__(self, world: World) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.world = world

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.allreduce_.default:
            size = self.world.size
            traffic = self.world.traffic[0]
            for tensor in args[0]:
                traffic.payload_up += tensor.nbytes
                traffic.payload_down += tensor.nbytes
                traffic.wire += 2 * (size - 1) / size * tensor.nbytes
        elif func.namespace == "c10d":
            raise UsageError(f"a hook called {func}, whose bytes cannot be counted")
        return func(*args, **(kwargs or {}))
