"""The contract of a task: data, model, loss, and the hyper-parameters that its source used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from gcbench.compressor import Key


class Batch(NamedTuple):
    """One worker's examples: inputs, first axis the batch, and targets of the same first axis."""

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Split:
    """Examples in memory, on one device: inputs (n, ...) as stored and targets (n, ...).

    A class an example is targets (n,), a token at each of t places (n, t).
    """

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def select(self, indices: Tensor) -> Split:
        """Return the split of the examples at `indices`, int64 of shape (m,), in that order."""
        return Split(self.inputs[indices], self.targets[indices])

    def to(self, device: torch.device) -> Split:
        """Return the split on `device`."""
        return Split(self.inputs.to(device), self.targets.to(device))


class Task(ABC):
    """One learning problem. Subclasses are frozen dataclasses; their fields are its options.

    A task is stateless: it loads splits, makes models, and turns indices into batches. All of its
    random numbers come from a `Key`, so a batch is the same in every engine.
    """

    name: ClassVar[str] = ""
    """The name on the command line; the registry fills it in from the file's name."""
    version: ClassVar[int] = 1
    """Counts the definitions of data, model, loss and preparation that gave other results.

    It stands in the config of every run, so that results of different definitions never meet.
    """
    paper_steps: ClassVar[str] = ""
    """The budget of the source in words, where the default one is shorter."""

    @abstractmethod
    def defaults(self) -> Mapping[str, Any]:
        """Return hyper-parameters by their names in `gcbench.experiment.Config`.

        Of the source where there is one, and for this task's options: batch, steps, optimizer,
        lr, momentum, weight_decay, schedule, ...
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

    @abstractmethod
    def batch(self, split: Split, indices: Tensor, key: Key | None) -> Batch:
        """Return the examples at `indices`, shape (b,), prepared on the split's device.

        With a key they are augmented for training; with None they are prepared for evaluation.
        """

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss over the batch, a scalar; cross-entropy by default."""
        return nn.functional.cross_entropy(outputs, targets)

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Return a boolean tensor (b,): which examples are right; None where that means nothing."""
        return outputs.argmax(1) == targets

    def decayed(self, parameter: str) -> bool:
        """Return whether weight decay applies to the parameter of this name; to all by default."""
        return True
