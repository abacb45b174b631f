"""The contract of a task: data, model, loss, and the hyper-parameters that its source used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from gcbench.core.compressor import Key


class Batch(NamedTuple):
    """One worker's examples: inputs, first axis the batch, and targets of the same first axis."""

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Split:
    """Examples on one device: inputs (n, ...) as stored and targets (n, ...).

    Targets have shape (n,) where an example has one class, (n, t) where it has a token at each of t
    positions. A task whose examples do not fit in memory derives a class from this one: its
    `inputs` then say where each example is stored, and `Task.batch` reads it.
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

    def hold_out(self, count: int) -> tuple[Split, Split] | None:
        """Return the examples to train on and `count` others, for examples that overlap.

        None: the examples have nothing in common, and `count` of them are drawn at random.
        """
        return None


class Task(ABC):
    """One learning problem. Subclasses are frozen dataclasses; their fields are its options.

    A task is stateless: it loads splits, makes models, and turns indices into batches. All of its
    random numbers come from a `Key`, so a batch is the same in every engine.
    """

    name: ClassVar[str] = ""
    """The name on the command line; the registry fills it in from the file's name."""
    version: ClassVar[int] = 1
    """The version of the task, raised when a change of data, model, loss or preprocessing changes
    results. The config of every run has it, so results of different versions are never mixed.
    """
    paper_steps: ClassVar[str] = ""
    """The steps and batch of the source, in words, if the default number of steps is smaller."""
    inputs: ClassVar[str] = ""
    """What its model reads: "images", "text", or another word; "" for numbers of no such kind.
    `gcbench advise` judges a model by the runs of tasks that read the same.
    """
    evaluation_batch: ClassVar[int] = 500
    """Batch size of the evaluation."""

    @abstractmethod
    def defaults(self) -> Mapping[str, Any]:
        """Return hyper-parameters by their names in `gcbench.training.configuration.Config`.

        They are the source's if there is one, for this task's options: batch, steps, optimizer, lr,
        momentum, weight_decay, schedule, ...
        """

    @abstractmethod
    def load(self, data_dir: Path | None) -> tuple[Split, Split]:
        """Return the training and the test split, on the CPU.

        `data_dir` is a folder that holds data sets in their official layout, or None for the
        download cache.

        Raises:
            GcbenchError: files are missing, cut short or have a wrong checksum.
        """

    @abstractmethod
    def model(self) -> nn.Module:
        """Return a fresh model, initialized from torch's current CPU generator."""

    def model_for(self, train: Split) -> nn.Module:
        """Return a fresh model for this training split; `model()` if it does not depend on it."""
        return self.model()

    @abstractmethod
    def batch(self, split: Split, indices: Tensor, key: Key | None) -> Batch:
        """Return the examples at `indices`, shape (b,), prepared on the split's device.

        With a key they are augmented for training; with None they are prepared for evaluation.
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
        """Return further metrics of each example, boolean or float (b,), by name; by default none.

        Their means over the split are recorded as `test_NAME`, or `validation_NAME`.
        """
        return {}

    def decayed(self, parameter: str) -> bool:
        """Return whether weight decay applies to the parameter of this name; to all by default."""
        return True
