"""MNIST with LeNet: figure 3 of TernGrad.

Data: 60,000 + 10,000 images of 28x28, scaled to [-1, 1]; no augmentation.
Networks: `lenet`, as in TernGrad's code: 20 and 50 channels of 5x5 with SAME padding, each followed
by ReLU and 2x2 pooling, then 500 and 10 units; 1,256,080 parameters; weights from a truncated
normal with standard deviation 0.05, 0.05, 0.048 and 0.0767, biases zero. `lenet-caffe`, the
original model: VALID padding, a ReLU only after the 500 units, uniform weights; 431,080 parameters.
Both use TernGrad's recipe.
Recipe: batch 64 over all workers, 10,000 steps, SGD with momentum 0.9, lr 0.01 times the square
root of the remaining fraction of steps, weight decay 0.0005 in the loss, on weights but not biases;
evaluated on moving averages of decay 0.9999 with TensorFlow's warm-up, min(0.9999,
(1 + t) / (10 + t)). The second curve of the figure is plain SGD: momentum 0 and lr 0.1.
Source: Wen et al. 2017, section 4.1 and figure 3; initialization, scaling, moving averages and the
choice of decayed parameters are from the authors' code. It draws examples from a shuffling queue,
we use permutations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gcbench.core import data
from gcbench.core.compressor import Key
from gcbench.core.task import Batch, Split, Task

from ._models import CaffeLeNet, LeNet, check_network

NETWORKS: dict[str, Callable[[], nn.Module]] = {"lenet": LeNet, "lenet-caffe": CaffeLeNet}


@dataclass(frozen=True)
class Mnist(Task):
    """Handwritten digits with LeNet."""

    inputs: ClassVar[str] = "images"
    paper_steps: ClassVar[str] = "10,000 steps at batch 64"

    network: str = "lenet"  # lenet or lenet-caffe

    def __post_init__(self) -> None:
        check_network(self.network, NETWORKS)

    def defaults(self) -> Mapping[str, Any]:
        """Return TernGrad's recipe with momentum, at a fifth of its steps."""
        return {
            "batch": 64,
            "steps": 2000,
            "optimizer": "sgd",
            "lr": 0.01,
            "momentum": 0.9,
            "nesterov": False,
            "weight_decay": 5e-4,
            "decay": "loss",
            "schedule": "poly",
            "schedule_power": 0.5,
            "ema": 0.9999,
            "eval_every": 500,
        }

    def load(self, data_dir: Path | None) -> tuple[Split, Split]:
        """Return the splits, uint8 images (n, 1, 28, 28)."""
        train, test = data.mnist(data_dir)
        return Split(*train), Split(*test)

    def model(self) -> nn.Module:
        """Return the network, freshly initialized."""
        return NETWORKS[self.network]()

    def batch(self, split: Split, indices: Tensor, key: Key | None) -> Batch:
        """Return images scaled to [-1, 1], float32 (b, 1, 28, 28).

        They are in channels-last memory format, which is faster on a CPU.
        """
        inputs = split.inputs[indices].float() / 127.5 - 1
        return Batch(inputs.to(memory_format=torch.channels_last), split.targets[indices])

    def decayed(self, parameter: str) -> bool:
        """Return whether the parameter is a weight: biases do not decay."""
        return parameter.endswith("weight")
