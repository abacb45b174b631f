"""The training loop: gradients of N workers, one exchange, one update of identical replicas.

Every worker starts from the same parameters and applies the same mean gradient with the same
optimizer, so only gradients are sent (parameter localization), and all workers of a process share
one set of parameters. Examples and the model's buffers differ between workers.

With `--local-steps H` a round consists of H steps of each worker's optimizer on its copy of the
parameters, from the common x to x_i. Then the differences x - x_i are exchanged instead of
gradients, and an outer SGD uses their mean as the gradient at x: with learning rate 1 and no
momentum it averages the workers' parameters (McMahan et al. 2017, arXiv:1602.05629); with 0.7, 0.9
and Nesterov momentum it is DiLoCo (Douillard et al. 2023, arXiv:2311.08105, algorithm 1). All
workers start the next round at the new x and keep their optimizer states. Evaluations, hashes and
comparisons of replicas use x. With `--fragments P` parts of the model are exchanged in turn
(`fragments`).
"""

from __future__ import annotations

import copy
import hashlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gcbench import ops
from gcbench.core import fragments, progress, purposes, registry
from gcbench.core.clock import Clock
from gcbench.core.compressor import Key
from gcbench.core.errors import DivergedError, GcbenchError, Interrupted, UsageError
from gcbench.core.exchange import Exchange, Lane, classifier, dense_tensors, lane_of
from gcbench.core.payload import all_finite
from gcbench.core.schema import PHASES
from gcbench.core.task import Split, Task
from gcbench.core.values import finite as or_none
from gcbench.core.world import World
from gcbench.results.schema import SCHEMA
from gcbench.training import captures, preflight, sinks
from gcbench.training.configuration import Config
from gcbench.training.dropout import Dropout, set_dropout_key
from gcbench.training.examples import Batches, hold_out
from gcbench.training.store import Run
from gcbench.training.updates import (
    Average,
    LocalSteps,
    Muon,
    clip_factor,
    descend,
    fitting,
    restore,
)

THREADS_FROM = 1 << 17
"""Minimum parameters of a model to run simulated workers in threads; for smaller models Python's
interpreter lock prevents a speedup."""
AGREE_EVERY = 10
"""Steps between decisions of several processes on a checkpoint or a stop; each costs a message."""
MODERATE = 2.0**100
"""Sums of gradients below this do not overflow for any number of workers."""
CHECK_EVERY = 50
"""Steps between comparisons of the replicas of several processes."""
MISFITS = (AttributeError, LookupError, TypeError, ValueError, RuntimeError, UsageError)
"""Errors that a checkpoint of another run, or a damaged one, causes when it is restored."""


@dataclass
class Options:
    """Settings that do not change the results: data folder, checkpoints, progress."""

    data_dir: Path | None = None
    checkpoint_seconds: float = 60.0
    progress: progress.Mode = "none"
    on_bucket: Callable[[int, int, Tensor], None] | None = None
    """Called with (step, rank, bucket) before the exchange, in the order of the local ranks, to
    analyze gradients or modify them in tests. The next step overwrites the bucket."""
    capture: captures.Plan | None = None
    sinks: tuple[str, ...] = ()
    """Names of the sinks that receive the records."""
    threads: int | None = None
    """Threads per worker of the original run, for a resumed run; None: those of the config."""
    after: int = 0
    """The total steps of the following runs, to estimate the remaining time."""


def attack(gradient: Tensor, kind: str, key: Key) -> None:
    """Replace what a worker sends, float32, shape (n,), by an attack, in place.

    flip: -x; random: each x_j times a number uniform on [-1, 1), addressed by `key`; scale: -100 x.
    All are blind multiplicative adversaries (Bernstein et al., ICLR 2019, arXiv:1810.05291,
    definition 1): factors do not depend on the gradients.
    """
    if kind == "random":
        gradient *= ops.random.uniform(key, gradient.numel(), gradient.device).mul_(2).sub_(1)
    else:
        gradient *= -100.0 if kind == "scale" else -1.0


def _share_parameters(replica: nn.Module, model: nn.Module) -> nn.Module:
    """Let a copy of the model share the model's parameters; the copy keeps its buffers."""
    originals = dict(model.named_modules())
    for name, module in replica.named_modules():
        module._parameters = originals[name]._parameters
    return replica


def _tracks_statistics(model: nn.Module) -> bool:
    return any(
        isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats
        for module in model.modules()
    )


def _check_randomness(model: nn.Module, gradients: str) -> None:
    """Raise UsageError for dropout with masks that depend on the engine, or that workers share."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p:
            raise UsageError(
                f"{name} of the model is torch's {type(module).__name__}, whose masks differ "
                "between engines and after a resume; use gcbench.Dropout"
            )
        if isinstance(module, Dropout) and module.rate and gradients == "batched":
            raise UsageError(
                "gradients=batched would use one dropout mask for all workers; use gradients=loop"
            )


class Trainer:
    """One run, with the state of this process's workers."""

    def __init__(self, config: Config, world: World, run: Run, options: Options) -> None:
        self.config, self.world, self.run, self.options = config, world, run, options
        self.observer: progress.Observer = progress.Observer()
        self.sinks: sinks.Sinks | None = None
        ops.use(config.backend)
        self.device = world.device
        self.task: Task = config.make_task()
        self.compressor = config.make_compressor(config.steps - 1)  # with its fields at the end
        bits = self.compressor.claims.nominal_bits  # a plug-in may raise here: before the training
        self.nominal_ratio = None if bits is None else 32 / bits
        self.clock = Clock(self.device)
        train, test = self.task.load(options.data_dir)
        train, self.validation = hold_out(train, config.holdout, config.batch)
        self.train, self.test = train.to(self.device), test.to(self.device)
        if self.validation is not None:
            self.validation = self.validation.to(self.device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.model = self.task.model_for(train).to(self.device)
        self.replicas = [copy.deepcopy(self.model) for _ in world.ranks]
        if not config.local_steps:
            for replica in self.replicas:
                _share_parameters(replica, self.model)
        if config.gradients == "batched" and _tracks_statistics(self.model):
            raise UsageError(
                "gradients=batched cannot have batch-norm statistics per worker; use "
                "gradients=loop for this model"
            )
        _check_randomness(self.model, config.gradients)
        self.skipped = 0
        self._lay_out()
        self.recorder = self._recorder()
        world.inline = self.total < THREADS_FROM
        self.exchange = Exchange(world, self._lanes(0), config.seed, self.clock)
        self.stages = set(config.stages())
        # Reused for the gradients of every step.
        self.buckets = [torch.empty(self.total, device=self.device) for _ in world.ranks]
        self.late: Tensor | None = None  # with a delay: the mean to apply at the next step
        # Each local worker's parameters: the common ones, or a copy with local steps.
        self.owned = [self._ordered(replica) for replica in self.replicas]
        self.local: list[LocalSteps] = []
        if config.local_steps:
            self.local = [
                LocalSteps(self.parameters, parameters, self._optimizer(parameters))
                for parameters in self.owned
            ]
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
                self.parameters,
                lr=config.outer_lr,
                momentum=config.outer_momentum,
                nesterov=config.outer_nesterov,
            )
        else:
            self.optimizer = self._optimizer(self.parameters)
        self.average = Average(self.parameters, config.ema)
        self.step = 0
        self.longest_delay = 0.0
        self.seconds = 0.0
        self.train_loss = math.nan
        self.batches = Batches(config, self.task, self.train, self.device)

    # -- layout ------------------------------------------------------------------------------------

    def _lay_out(self) -> None:
        """Order the parameters by fragment: compressed ones first, then those exchanged in fp32."""
        config = self.config
        named = dict(self.model.named_parameters())
        shapes = [tuple(p.shape) for p in named.values()]
        last = classifier(self.model) if config.dense_last else []
        dense = dense_tensors(list(named), shapes, config.dense_below, last)
        of = fragments.of_names(list(named), config.fragments)
        kinds = list(zip(of, dense, strict=True))
        order = sorted(range(len(kinds)), key=kinds.__getitem__)  # stable: False before True
        self.names = [list(named)[i] for i in order]
        self.parameters = [named[name] for name in self.names]
        self.sizes = [p.numel() for p in self.parameters]
        self.total = sum(self.sizes)
        self.groups = [
            (fragment, exact, [shapes[i] for i in order if kinds[i] == (fragment, exact)])
            for fragment, exact in sorted(set(kinds))
        ]
        """Parameters of each lane: their fragment, whether they stay in fp32, their shapes."""
        ends = [sum(each <= fragment for each in of) for fragment in range(config.fragments)]
        self.fragments = [slice(*pair) for pair in pairwise([0, *ends])]
        """The range of each fragment's parameters."""
        self.decayed = [self.task.decayed(name) for name in self.names]

    def _ordered(self, replica: nn.Module) -> list[nn.Parameter]:
        """Return a replica's parameters in the order of the bucket."""
        named = dict(replica.named_parameters())
        return [named[name] for name in self.names]

    def _recorder(self) -> captures.Recorder | None:
        plan = self.options.capture
        if plan is None:
            return None
        kinds = captures.kinds(self.model)
        shapes = [shape for _, _, group in self.groups for shape in group]
        layers = [
            captures.Layer(name, kinds[name], shape)
            for name, shape in zip(self.names, shapes, strict=True)
        ]
        config = self.config.model_dump(mode="json")
        network = str(getattr(self.task, "network", type(self.model).__name__))
        return captures.Recorder(plan, self.run, self.world, layers, config, network)

    def _lanes(self, step: int) -> list[Lane]:
        """Return the lanes of the bucket from `step` until the next stage.

        Skipped steps do not count as fp32 steps for an update rule that needs a warm-up.
        """
        config, carried = self.config, self.config.make_memory()
        method, start, lanes = config.make_compressor(step), 0, []
        rule = method.rule
        done = step - self.skipped if rule.needs_warm_up else step
        in_fp32 = done < config.start_step or rule.in_fp32(step)
        for _, dense, shapes in self.groups:
            way = (method, config.collective, carried)
            lanes.append(lane_of(shapes, start, *way, exact=dense or in_fp32, trim=config.trim))
            start += lanes[-1].segments.numel
        return lanes

    def _optimizer(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        config = self.config
        rate = config.weight_decay if config.decay == "update" else 0.0
        groups = []
        for decayed in (True, False):
            chosen = [p for p, on in zip(parameters, self.decayed, strict=True) if on == decayed]
            if chosen:
                groups.append({"params": chosen, "weight_decay": rate if decayed else 0.0})
        if config.optimizer in ("adam", "adamw"):
            adam = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
            return adam(groups, lr=config.lr, betas=config.betas, eps=config.eps)
        if config.optimizer == "muon":
            kinds, last = captures.kinds(self.model), classifier(self.model)
            hidden = {
                p
                for p, name in zip(parameters, self.names, strict=True)
                if kinds[name] == "fully connected" and name not in last
            }
            adjusted = (config.momentum, config.nesterov, config.betas, config.eps)
            return Muon(groups, hidden, config.lr, *adjusted)
        return torch.optim.SGD(
            groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov
        )

    # -- gradients ---------------------------------------------------------------------------------

    def finish_bucket(self, gradients: Sequence[Tensor], worker: int | None = None) -> Tensor:
        """Return the flat gradient with the loss's L2 term, float32, shape (total,).

        `worker`: index of the local worker whose bucket to fill; None: return a new tensor, with
        the L2 term of the common parameters.
        """
        flat = [gradient.reshape(-1) for gradient in gradients]
        bucket = torch.cat(flat, out=None if worker is None else self.buckets[worker])
        if self.config.decay == "loss" and self.config.weight_decay:
            parameters = self.parameters if worker is None else self.owned[worker]
            for piece, parameter, on in zip(
                torch.split(bucket, self.sizes), parameters, self.decayed, strict=True
            ):
                if on:
                    piece.add_(parameter.detach().view(-1), alpha=self.config.weight_decay)
        return bucket

    def _gradient(self, rank: int) -> tuple[Tensor, float]:
        """Return the bucket and the loss of one worker."""
        began = self.clock.read()
        inputs, targets = self.batches.of(self.step, rank)
        worker = rank - self.world.ranks[0]
        replica = self.replicas[worker]
        set_dropout_key(replica, self.batches.key(self.step, rank))
        outputs = replica(inputs)
        loss = self.task.loss(outputs, targets)
        gradients = torch.autograd.grad(loss, self.owned[worker])
        bucket = self.finish_bucket(gradients, worker)
        if rank in self.config.straggler:
            self._wait((self.config.straggler[rank] - 1) * (self.clock.read() - began))
        return bucket, float(loss.detach())

    def _wait(self, seconds: float) -> None:
        """Delay a straggler; a simulation only remembers the longest delay of the step."""
        if self.config.engine == "simulate":
            self.longest_delay = max(self.longest_delay, seconds)
        else:
            time.sleep(seconds)

    def _attack(self) -> None:
        """Replace what the adversaries among the local workers send."""
        config = self.config
        for rank, bucket in zip(self.world.ranks, self.buckets, strict=True):
            if rank >= config.workers - config.adversaries:
                key = Key(config.seed, self.step, rank, stream=purposes.ATTACK)
                attack(bucket, config.attack, key)

    def _gradients(self) -> tuple[list[Tensor], list[float]]:
        """Return the local workers' buckets and losses."""
        self.batches.prepare(self.step)
        if self.config.gradients == "loop":
            timed = self.clock.timed(self._gradient)
            self.longest_delay = 0.0
            results = self.clock.workers("forward_backward", self.world.map(timed))
            self.world.modelled_seconds += self.longest_delay  # the others wait for the slowest
            buckets = [bucket for bucket, _ in results]
            losses = [loss for _, loss in results]
        else:
            started = self.clock.read()
            buckets, losses = self._batched_gradients()
            share = (self.clock.read() - started) / self.world.size
            self.clock.add("forward_backward", share)
        if self.options.on_bucket is not None:
            for rank, bucket in zip(self.world.ranks, buckets, strict=True):
                self.options.on_bucket(self.step, rank, bucket)
        return buckets, losses

    def _batched_gradients(self) -> tuple[list[Tensor], list[float]]:
        """Return all workers' buckets and losses from one pass, vectorized over workers."""
        batches = [self.batches.of(self.step, rank) for rank in self.world.ranks]
        inputs = torch.stack([batch[0] for batch in batches])
        targets = torch.stack([batch[1] for batch in batches])
        buffers = dict(self.model.named_buffers())

        def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return self.task.loss(
                torch.func.functional_call(self.model, (parameters, buffers), (x,)), y
            )

        one = torch.func.grad_and_value(loss)
        parameters = {name: p.detach() for name, p in zip(self.names, self.parameters, strict=True)}
        gradients, losses = torch.func.vmap(one, in_dims=(None, 0, 0))(parameters, inputs, targets)
        buckets = [
            self.finish_bucket([gradients[name][i] for name in self.names], i)
            for i in range(self.world.size)
        ]
        return buckets, losses.tolist()

    # -- faults ------------------------------------------------------------------------------------

    def _all_finite(self, buckets: list[Tensor], what: str = "gradient") -> bool:
        """Return whether the local buckets are finite, with on_nonfinite=skip all workers'.

        With on_nonfinite=stop, a bucket that is not finite raises DivergedError.
        """
        bad = [not all_finite(bucket) for bucket in buckets]
        if self.config.on_nonfinite == "skip":
            flags = [torch.tensor([float(b)], device=self.device) for b in bad]
            return not bool(self.world.all_reduce(flags, "max").item())
        for rank, bucket, is_bad in zip(self.world.ranks, buckets, bad, strict=True):
            if is_bad:
                pieces = zip(self.names, torch.split(bucket, self.sizes), strict=True)
                layer = next(name for name, piece in pieces if not piece.isfinite().all())
                skip = "" if self.config.local_steps else ", or use --on-nonfinite skip"
                raise DivergedError(
                    f"non-finite {what} in layer {layer} of worker {rank} at step {self.step}. "
                    f"Lower --lr{skip}",
                    self.step,
                )
        return True

    def _check_mean(
        self, mean: Tensor, buckets: Sequence[Tensor], which: slice = slice(None)
    ) -> None:
        """Raise DivergedError if the mean of finite gradients of moderate size is not finite.

        `which`: the range of their parameters.
        """
        if all_finite(mean):
            return
        if any(float(bucket.abs().amax()) > MODERATE for bucket in buckets):
            return  # sums of such gradients may overflow; the next step detects it
        pieces = zip(self.names[which], torch.split(mean, self.sizes[which]), strict=True)
        layer = next(name for name, piece in pieces if not piece.isfinite().all())
        name = registry.spec(self.config.compressor)
        raise DivergedError(
            f"the mean of {name} is not finite in layer {layer} at step {self.step}, though every "
            f"gradient is: the method or its memory is faulty. Run gcbench verify {name}",
            self.step,
        )

    def _check_replicas(self, digest: Callable[[], str]) -> None:
        """Raise GcbenchError, which names the minority, if the processes' digests differ."""
        digests = self.world.collect([digest()] * len(self.world.ranks))
        if len(set(digests)) > 1:
            most = max(digests, key=digests.count)  # a tie goes to the lowest rank
            odd = [rank for rank, digest in enumerate(digests) if digest != most]
            raise GcbenchError(
                f"replicas differ at step {self.step}: worker(s) {odd} differ from worker "
                f"{digests.index(most)}. The compressor's decode differs between workers, or a "
                "worker's memory is faulty"
            )

    def _checksum(self) -> str:
        """Return the sum of the parameters' bits read as int32: faster than a hash, and weaker."""
        bits = (parameter.detach().view(torch.int32) for parameter in self.parameters)
        return str(sum(int(each.sum(dtype=torch.int64)) for each in bits))

    def parameter_hash(self) -> str:
        """Return the SHA-256 of the parameters' bytes, in the model's order."""
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    # -- a step ------------------------------------------------------------------------------------

    def train_step(self) -> list[float]:
        """Run one training step; return the losses of the local workers."""
        self.clock.start_step()
        config = self.config
        switches = any(lane.rule.switches(self.step) for lane in self.exchange.lanes)
        if self.step and (switches or {self.step, self.step - self.skipped} & self.stages):
            self.exchange.change(self._lanes(self.step))
        buckets, losses = self._gradients()
        if self.recorder is not None:
            self.recorder.hold(self.step, buckets)
        finite = self._all_finite(buckets)
        if finite and config.local_steps:
            self._local_step(buckets)
        elif finite:
            applied = min(self.step + config.delay, config.steps - 1)
            self._attack()
            mean = self.exchange.mean(buckets, self.step, config.lr_at(applied))
            self._check_mean(mean, buckets)
            with self.clock.phase("update"):
                self._apply(mean)
        else:
            self.skipped += 1
            self.exchange.skipped += 1
            if self.late is not None and self.step == config.steps - 1:
                with self.clock.phase("update"):
                    self._descend([self.late])
        self.step += 1
        if config.rebroadcast_every and self.step % config.rebroadcast_every == 0:
            with self.clock.phase("communicate"):
                self._rebroadcast()
        self.clock.end_step()
        return losses

    def _local_step(self, buckets: list[Tensor]) -> None:
        """Run a step of each local worker's optimizer; at the end of a round, the outer step."""
        config, lr, first = self.config, self.config.lr_at(self.step), self.world.ranks[0]

        def advance(rank: int) -> None:
            local, gradient = self.local[rank - first], self._clipped(buckets[rank - first])
            descend(local.optimizer, local.parameters, gradient, lr)

        self.clock.workers("update", self.world.map(self.clock.timed(advance)))
        rounds, done = config.rounds, self.step + 1
        if sent := rounds.sent(done):
            with self.clock.phase("update"):
                for local, bucket in zip(self.local, self.buckets, strict=True):
                    local.difference(out=bucket)
            self._all_finite(self.buckets, "difference of parameters")
            self._attack()
            lanes = [i for i, (fragment, *_) in enumerate(self.groups) if fragment in sent]
            mean = self.exchange.mean(self.buckets, self.step, config.outer_lr, lanes)
            for fragment in sent:
                self._outer_step(self.fragments[fragment], mean)
            with self.clock.phase("update"):
                self.average.update(self.step, self.step % rounds.apart + 1)
        with self.clock.phase("update"):
            for fragment in rounds.taken(done):
                for local in self.local:
                    local.take_over(self.fragments[fragment], config.blend)

    def _outer_step(self, which: slice, mean: Tensor) -> None:
        """Run the outer optimizer's step of a range of parameters."""
        start = sum(self.sizes[: which.start])
        place = slice(start, start + sum(self.sizes[which]))
        self._check_mean(mean[place], [bucket[place] for bucket in self.buckets], which)
        with self.clock.phase("update"):
            descend(self.optimizer, self.parameters[which], mean[place], self.config.outer_lr)
            for parameter in self.parameters[which]:
                parameter.grad = None

    def _apply(self, mean: Tensor) -> None:
        """Apply this step's mean; with a delay the previous one, and after the last step both."""
        due = [mean]
        if self.config.delay:
            last = self.step == self.config.steps - 1
            due = [] if self.late is None else [self.late]
            self.late = mean.clone()  # the exchange will overwrite its tensor
            due += [mean] if last else []
        self._descend(due)

    def _descend(self, due: Sequence[Tensor]) -> None:
        """Run an optimizer step with each of these means."""
        for each in due:
            lr = self.config.lr_at(self.step)
            descend(self.optimizer, self.parameters, self._clipped(each), lr)
            self.average.update(self.step)

    def _clipped(self, gradient: Tensor) -> Tensor:
        """Return a flat gradient scaled to a 2-norm of at most `clip_norm`, if that is set."""
        limit = self.config.clip_norm
        return gradient * clip_factor([gradient], limit) if limit else gradient

    def _rebroadcast(self) -> None:
        """Broadcast worker 0's parameters, which are equal already, to count the bytes."""
        flat = torch.cat([parameter.detach().view(-1) for parameter in self.parameters])
        pieces = torch.split(self.world.broadcast(flat), self.sizes)
        views = [x.view_as(p) for p, x in zip(self.parameters, pieces, strict=True)]
        restore(self.parameters, views)

    # -- evaluation --------------------------------------------------------------------------------

    def evaluate(self, *, last: bool = True) -> dict[str, float | None]:
        """Return accuracy and loss, at the averaged parameters if there are any.

        Held-out validation examples are evaluated each time, and the test split then only after the
        last step (`last`) and with `Config.test`. Without them the test split is evaluated each
        time. Buffers are those of worker 0, as in DistributedDataParallel.
        """
        results: dict[str, float | None] = {}
        if self.validation is not None:
            results |= self._evaluate_split(self.validation, "validation")
        if self.config.test and (last or self.validation is None):
            results |= self._evaluate_split(self.test, "test")
        return results

    def _evaluate_split(self, split: Split, name: str) -> dict[str, float | None]:
        """Return accuracy (None if the task has none), loss and the task's metrics on a split.

        The model has the common parameters, or their moving average if there is one.
        """
        model = copy.deepcopy(self.replicas[0]).eval()
        if self.average.values or self.local:
            values = self.average.values or [parameter.detach() for parameter in self.parameters]
            by_name = dict(zip(self.names, values, strict=True))
            for parameter_name, parameter in model.named_parameters():
                parameter.data = by_name[parameter_name]
        task, size, count = self.task, self.task.evaluation_batch, len(split)
        right, loss, has_accuracy = 0, 0.0, True
        further: dict[str, float] = {}
        with torch.no_grad():
            for start in range(0, count, size):
                indices = torch.arange(start, min(start + size, count), device=self.device)
                inputs, targets = task.batch(split, indices, None)
                outputs = model(inputs)
                loss += float(task.loss(outputs, targets)) * len(indices)
                correct = task.correct(outputs, targets)
                has_accuracy = has_accuracy and correct is not None
                right += int(correct.sum()) if correct is not None else 0
                for metric, each in task.metrics(outputs, targets).items():
                    further[metric] = further.get(metric, 0.0) + float(each.sum())
        return {
            f"{name}_accuracy": right / count if has_accuracy else None,
            f"{name}_loss": or_none(loss / count),
            **{f"{name}_{metric}": or_none(total / count) for metric, total in further.items()},
        }

    # -- the run -----------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """Whether this process writes the records, as worker 0 does."""
        return self.world.ranks[0] == 0

    def _record(self, kind: str, values: Mapping[str, Any]) -> None:
        traffic = self.world.collect_traffic()
        record = {
            "kind": kind,
            "step": self.step,
            **values,
            "payload_bytes_up": sum(t.payload_up for t in traffic) / len(traffic),
            "payload_bytes_down": sum(t.payload_down for t in traffic) / len(traffic),
            "wire_bytes": sum(t.wire for t in traffic) / len(traffic),
            "seconds": round(self.seconds, 3),
        }
        if self.leads:
            self.run.append(record)
            if self.sinks is not None:
                self.sinks.record(record)
            self.observer.record(record)

    def fit(self, stop: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        """Train to the end, from the checkpoint if there is one; return the summary.

        `stop` is called between steps and returns whether the user interrupted the run.

        Raises:
            Interrupted: the user interrupted the run; a checkpoint is written.
            GcbenchError: a step failed, replicas differ, or a file cannot be read or written;
                records and the last checkpoint remain.
        """
        config = self.config
        self.resume()
        if len(self.world.ranks) < self.world.size:
            facts = {
                "data (SHA-256)": preflight.digest(self.train, self.validation, self.test),
                "step to resume from, in the folder --results": str(self.step),
                "parameters (SHA-256)": self.parameter_hash(),
            }
            preflight.check(self.world, facts)
        if self.recorder is not None:
            self.recorder.begin(self.step, config.run_name)
        if self.leads and self.options.sinks:
            origin = config.model_dump(mode="json"), self.run.read_provenance()
            self.sinks = sinks.Sinks(self.options.sinks, self.run, *origin)
        if self.leads:
            if self.step == 0:
                sinks.forget(self.run, sinks.registered().keys() - self.options.sinks)
            self.run.begin()
            self.observer = progress.observer(
                self.options.progress, config.run_name, config.steps, self.options.after
            )
        try:
            return self._summary(self._train(stop))
        finally:
            self.observer.close()
            if self.sinks is not None:
                self.sinks.close()

    def _train(self, stop: Callable[[], bool]) -> dict[str, float | None]:
        """Run the remaining steps; return the last evaluation."""
        config = self.config
        saved = time.monotonic()
        last_eval: dict[str, float | None] = {}
        while self.step < config.steps:
            losses = self.train_step()
            if self.recorder is not None:
                self.recorder.write()
            self.observer.step(self.step)
            self.seconds += self.clock.steps[-1][-1]
            done = self.step == config.steps
            if self.step % config.log_every == 0 or done:
                self.train_loss = statistics.fmean(self.world.collect(losses))
                loss, lr = or_none(self.train_loss), config.lr_at(self.step - 1)
                self._record("train", {"train_loss": loss, "lr": lr})
            if len(self.world.ranks) < self.world.size and self.step % CHECK_EVERY == 0:
                self._check_replicas(self._checksum)
            if done or (config.eval_every and self.step % config.eval_every == 0):
                self._check_replicas(self.parameter_hash)
                mine = self.evaluate(last=done) if self.leads else {}
                last_eval = self.world.collect([mine] * len(self.world.ranks))[0]
                self._record("eval", last_eval)
            pause = "" if done else self._pause(time.monotonic() - saved, stop())
            if pause:
                self.save()
                saved = time.monotonic()
            if pause == "stop":
                raise Interrupted(f"stopped after step {self.step} of {config.steps}")
        return last_eval

    def _pause(self, since_saved: float, asked: bool) -> str:
        """Return "save", "stop" or "" as worker 0 decides, the same on every worker."""
        if len(self.world.ranks) < self.world.size and self.step % AGREE_EVERY:
            return ""
        late = since_saved > self.options.checkpoint_seconds
        mine = "stop" if asked else "save" if late else ""
        return self.world.collect([mine] * len(self.world.ranks))[0]

    # -- state -------------------------------------------------------------------------------------

    def _worker_states(self) -> list[dict[str, Any]]:
        states: list[dict[str, Any]] = [
            {
                "buffers": {k: v.cpu() for k, v in replica.named_buffers()},
                "exchange": self.exchange.state_dict(worker, copy=False),
            }
            for worker, replica in enumerate(self.replicas)
        ]
        for state, local in zip(states, self.local, strict=False):
            state |= local.state()
        return states

    def save(self) -> None:
        """Write a checkpoint with the state of all workers, from worker 0's process."""
        workers = self.world.collect(self._worker_states())
        if not self.leads:
            return
        self.run.save(
            {
                "step": self.step,
                "parameters": [p.detach().cpu() for p in self.parameters],
                "optimizer": self.optimizer.state_dict(),
                "ema": [average.cpu() for average in self.average.values],
                "workers": workers,
                "late": None if self.late is None else self.late.cpu(),
                "skipped": self.skipped,
                "seconds": self.seconds,
                "modelled_seconds": self.world.modelled_seconds,
                "clock": torch.tensor(self.clock.steps, dtype=torch.float64),
            }
        )

    def resume(self) -> None:
        """Continue from the run's last checkpoint; without one, from the start.

        Raises:
            GcbenchError: the checkpoint cannot be read, or is of another run.
        """
        state = self.run.checkpoint(self._tell)
        if state is None:
            return
        try:
            self._restore(state)
        except MISFITS as error:
            reason = (str(error).splitlines() or [""])[0]
            raise GcbenchError(
                f"{self.run.folder}/checkpoint.pt does not match this run "
                f"({type(error).__name__}: {reason:.100}); start over with --force"
            ) from error
        if self.leads:
            self.run.rewind(self.step)

    def _tell(self, text: str) -> None:
        if self.leads:
            print(f"gcbench: {text}", file=sys.stderr, flush=True)

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.step, self.skipped = state["step"], state["skipped"]
        restore(self.parameters, state["parameters"])
        restore(self.average.values, state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        exchange = self.exchange
        for like, moments in self.optimizer.state.items():
            for moment in moments.values():
                if isinstance(moment, Tensor) and moment.ndim:
                    fitting(moment, like)
        for start in [*sorted(self.stages), self.step - 1]:
            if 0 <= start < self.step and exchange.lanes:
                exchange.change(self._lanes(start))
        late = None if state["late"] is None else state["late"].to(self.device)
        self.late = None if late is None else fitting(late, self.buckets[0])
        if (self.late is None) == (
            self.config.delay > 0 and not self.local and self.step > self.skipped
        ):
            raise ValueError("the delayed mean is missing or unexpected")
        for i, (rank, replica) in enumerate(zip(self.world.ranks, self.replicas, strict=True)):
            worker = state["workers"][rank]
            exchange.load_state_dict(worker["exchange"], i)
            for name, buffer in replica.named_buffers():
                buffer.copy_(fitting(worker["buffers"][name], buffer))
        for rank, local in zip(self.world.ranks, self.local, strict=False):
            local.load_state(state["workers"][rank])
        self.seconds = state["seconds"]
        self.world.modelled_seconds = state["modelled_seconds"]
        self.clock.steps = state["clock"].tolist()

    # -- the result --------------------------------------------------------------------------------

    def _summary(self, evaluation: Mapping[str, float | None]) -> dict[str, Any]:
        config, world = self.config, self.world
        traffic = world.collect_traffic()
        up = sum(t.payload_up for t in traffic) / world.size
        down = sum(t.payload_down for t in traffic) / world.size
        wire = sum(t.wire for t in traffic)
        dense = 4.0 * self.total * (config.steps - self.skipped)
        medians = self.clock.medians(config.local_steps or 1)
        simulated = config.engine == "simulate"
        phases: dict[str, float | None] = {phase: medians[phase] for phase in PHASES}
        modelled = None
        if simulated:
            phases["communicate"] = None  # a simulation cannot measure a network
            modelled = {
                "seconds": world.modelled_seconds / config.steps,
                "link_gbit": config.link_gbit,
                "link_latency_us": config.link_latency_us,
            }
        return {
            "schema": SCHEMA,
            "task": config.task,
            "compressor": registry.call(self.compressor),
            "compressor_name": config.compressor,
            "workers": config.workers,
            "collective": config.collective,
            "engine": config.engine,
            "gradients": config.gradients,
            "seed": config.seed,
            "steps": config.steps,
            "batch": config.batch,
            **evaluation,
            "train_loss": or_none(self.train_loss),
            "test_examples": len(self.test) if config.test else None,
            "params": self.total,
            "payload_bytes_up": round(up),
            "payload_bytes_down": round(down),
            "wire_bytes": {"per_worker": round(wire / world.size), "total": round(wire)},
            "nominal_ratio": self.nominal_ratio,
            "payload_ratio_up": dense / up if up else None,
            "payload_ratio_down": dense / down if down else None,
            "phase_seconds": phases,
            "communicate_modelled": modelled,
            "step_seconds": medians["step"],
            "seconds": self.seconds,
            "skipped_steps": self.skipped,
            "params_sha256": self.parameter_hash(),
            "config_hash": config.hash,
            "config": config.model_dump(mode="json"),
        }
