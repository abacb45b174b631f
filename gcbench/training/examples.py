"""The training examples of each worker at each step, and the examples held out for validation."""

from __future__ import annotations

import torch
from torch import Tensor

from gcbench import ops
from gcbench.core import purposes
from gcbench.core.compressor import Key
from gcbench.core.errors import UsageError
from gcbench.core.task import Split, Task
from gcbench.training.configuration import Config


def hold_out(train: Split, count: int, batch: int) -> tuple[Split, Split | None]:
    """Return the training split, and `count` other examples for validation (None for 0).

    They are drawn at random; the draw depends only on the number of examples and on `count`, so it
    is the same for every seed and method.

    Raises:
        UsageError: fewer examples than a batch remain for training.
    """
    left = len(train) - count
    if left < batch:
        held = f" minus {count} held out" if count else ""
        raise UsageError(f"batch {batch} is larger than the {len(train)} training examples{held}")
    if not count:
        return train, None
    if (splits := train.hold_out(count)) is not None:
        return splits
    order = permutation(Key(0, 0, 0, 0, purposes.HOLDOUT), len(train))
    return train.select(order[count:].sort().values), train.select(order[:count].sort().values)


def permutation(key: Key, n: int) -> Tensor:
    """Return a random order of n examples, int64 on the CPU."""
    draws = ops.random.draws24(key, 2 * n).long()
    # Sort by 48 random bits per example; the stable sort resolves the improbable ties.
    return torch.argsort(draws[:n] << 24 | draws[n:], stable=True)


class Batches:
    """The examples of each worker at each step: every epoch has a new random order."""

    def __init__(self, config: Config, task: Task, train: Split, device: torch.device) -> None:
        self.config, self.task, self.train, self.device = config, task, train, device
        self._order: tuple[int, Tensor] = (-1, torch.empty(0))

    def prepare(self, step: int) -> None:
        """Draw the order of a step's epoch, before several threads use it."""
        epoch = step // (len(self.train) // self.config.batch)
        if self._order[0] != epoch:
            order = permutation(Key(self.config.seed, epoch, 0, 0, purposes.ORDER), len(self.train))
            self._order = epoch, order.to(self.device)

    def key(self, step: int, rank: int) -> Key:
        """Return the key of the random numbers for one worker's examples."""
        return Key(self.config.seed, step, rank, 0, purposes.AUGMENT)

    def indices(self, step: int, rank: int) -> Tensor:
        """Return the indices of one worker's examples."""
        self.prepare(step)
        batch = self.config.batch
        share = batch // self.config.workers
        start = step % (len(self.train) // batch) * batch + rank * share
        return self._order[1][start : start + share]

    def of(self, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """Return one worker's inputs and targets."""
        return self.task.batch(self.train, self.indices(step, rank), self.key(step, rank))
