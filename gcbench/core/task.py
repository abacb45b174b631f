"""The contract of a task: data, model, loss, and the hyper-parameters of its source."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from gcbench.core.compressor import Key


class Batch(NamedTuple):
    """One worker's examples: inputs and targets, whose first axis is the batch."""

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Split:
    """Examples on one device: inputs (n, ...) as stored and targets (n, ...).

    Targets have shape (n,) for one class per example, (n, t) for a token at each of t positions. A
    task whose examples do not fit in memory uses a subclass whose `inputs` are locations that
    `Task.batch` reads from.
    """

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def to(self, device: torch.device) -> Self:
        """Return the split on `device`."""
        return replace(self, inputs=self.inputs.to(device), targets=self.targets.to(device))

    def select(self, indices: Tensor) -> Self:
        """Return the split of the examples at `indices`, int64 (m,), in that order."""
        return replace(self, inputs=self.inputs[indices], targets=self.targets[indices])

    def locations(self) -> Sequence[str]:
        """Return the names of the files that `inputs` are indices of; by default none."""
        return ()

    def hold_out(self, count: int) -> tuple[Split, Split] | None:
        """Return a training split and a disjoint split of `count`, for examples that overlap.

        None: examples do not overlap, so the caller draws `count` of them at random.
        """
        return None


class Task(ABC):
    """One learning problem. Subclasses are frozen dataclasses; their fields are its options.

    A task is stateless: it loads splits, creates models, and maps indices to batches. All its
    random numbers come from a `Key`, so a batch is the same in every engine.
    """

    name: ClassVar[str] = ""
    """The name on the command line; the registry fills it in from the file's name."""
    version: ClassVar[int] = 1
    """The version of the task. Increment it when a change of data, model, loss or preprocessing
    changes results; each run's config has it, so results of different versions are never mixed.
    """
    paper_steps: ClassVar[str] = ""
    """The steps and batch of the source, as text, if the default number of steps is smaller."""
    inputs: ClassVar[str] = ""
    """The kind of the model's inputs, such as "images" or "text"; "" for other numbers.
    `gcbench advise` uses the runs of tasks with the same kind of inputs.
    """
    evaluation_batch: ClassVar[int] = 500
    """Batch size of the evaluation."""

    @abstractmethod
    def defaults(self) -> Mapping[str, Any]:
        """Return hyper-parameters by their names in `gcbench.training.configuration.Config`.

        They are those of the source, if any: batch, steps, optimizer, lr, momentum, weight_decay,
        schedule, ...
        """

    @abstractmethod
    def load(self, data_dir: Path | None) -> tuple[Split, Split]:
        """Return the training and the test split, on the CPU.

        `data_dir` is a folder that holds data sets in their official layout, or None for the
        download cache.

        Raises:
            GcbenchError: files are missing, truncated or have a wrong checksum.
        """

    def fingerprint(self, data_dir: Path | None) -> str:
        """Return a digest of the data that `load` would read, or "" (the default).

        "" is for data that `load` itself checks, such as by a published digest. Runs record the
        digest, and a run with another one is neither resumed nor skipped as finished.

        Raises:
            GcbenchError: see `load`.
        """
        return ""

    @abstractmethod
    def model(self) -> nn.Module:
        """Return a new model, initialized from torch's current CPU generator."""

    def model_for(self, train: Split) -> nn.Module:
        """Return a new model for this training split; by default `model()`."""
        return self.model()

    @abstractmethod
    def batch(self, split: Split, indices: Tensor, key: Key | None) -> Batch:
        """Return the examples at `indices`, shape (b,), prepared on the split's device.

        With a key they are augmented for training, with None prepared for evaluation.
        """

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss over the batch, a scalar; cross-entropy by default."""
        return nn.functional.cross_entropy(outputs, targets)

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Return a boolean tensor (b,): which examples are classified correctly.

        None: the task has no accuracy.
        """
        return outputs.argmax(1) == targets

    def metrics(self, outputs: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        """Return additional metrics per example, boolean or float (b,), by name.

        Their means over the split are recorded as `test_NAME` or `validation_NAME`.
        """
        return {}

    def decayed(self, parameter: str) -> bool:
        """Return whether weight decay applies to the parameter of this name; default: to all."""
        return True
