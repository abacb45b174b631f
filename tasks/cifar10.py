"""CIFAR-10 with CifarNet (TernGrad's table 1) and with ResNet-20 and -32.

Data: 50,000 + 10,000 images of 3x32x32 in 10 classes.

`cifarnet`, 1,068,298 parameters: conv 64@5x5, pool 3/2, LRN, conv 64@5x5, LRN, pool 3/2, fc 384,
fc 192, fc 10; ReLU after each but the last; SAME padding. Truncated normal weights with standard
deviation 0.05 (conv), 0.04 (fc), 1/192 (last); biases 0.1, and 0 in the first and last layer. LRN:
x (1 + 0.001/9 sum of x^2 over 4 channels on either side)^(-3/4).
Training images, on a scale of [0, 1]: random crop to 24x24, random flip, brightness
+-63/255, contrast 0.2..1.8 about each channel's mean, no clamping, then (x - mean) / max(std,
1 / sqrt(1728)) over the image. Test images: centre crop and the same standardization. (Without
clamping, the standardization undoes the change of brightness.)
Recipe: batch 128 over all workers, Adam, constant lr 0.0002, 300,000 steps; weight decay 0.004 on
the weights of the two hidden fc layers only, in the loss; evaluated on moving averages of decay
0.9999 with TensorFlow's warm-up min(0.9999, (1 + t) / (10 + t)).
Source: Wen et al. 2017, table 1; details that the paper omits are from the authors' code.

`resnet20` (269,722 parameters), `resnet32` (464,154): option A shortcuts, He initialization; random
32x32 crop after padding by 4 pixels of the mean colour, random flip, channels normalized.
Recipe: batch 128, SGD with momentum 0.9, lr 0.1, divided by 10 at 1/2 and 3/4 of the steps, weight
decay 0.0001 on all parameters. Each worker normalizes by the statistics of its examples.
Source: He et al. 2016, section 4.2: 64,000 steps, lr divided at 32,000 and 48,000. They subtract
the mean per pixel; we subtract the mean per channel and divide by its standard deviation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gcbench import ops
from gcbench.core import data, purposes
from gcbench.core.compressor import Key
from gcbench.core.task import Batch, Split, Task

from ._models import CifarNet, ResNet, check_network

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "cifarnet": CifarNet,
    "resnet20": partial(ResNet, 3),
    "resnet32": partial(ResNet, 5),
}
SIDE, SMALL, PAD = 32, 24, 4
MEAN = (0.4914, 0.4822, 0.4465)
"""Means of the training set's red, green and blue, on a scale of [0, 1]."""
STD = (0.2470, 0.2435, 0.2616)
"""Their standard deviations."""


def crop(images: Tensor, side: int, top: Tensor, left: Tensor, flip: Tensor) -> Tensor:
    """Crop a square of `side` pixels from each image, mirrored left to right where `flip` is set.

    `images` has shape (b, c, h, w); `top` and `left`, integers, and `flip`, booleans, (b,). The
    result, (b, c, side, side), has channels-last memory format.
    """
    line = torch.arange(side, device=images.device)
    rows = top[:, None] + line
    columns = left[:, None] + torch.where(flip[:, None], side - 1 - line, line)
    which = torch.arange(len(images), device=images.device)
    pixels = images.permute(0, 2, 3, 1)
    return pixels[which[:, None, None], rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def distort(images: Tensor, brightness: Tensor, contrast: Tensor) -> Tensor:
    """Scale each channel of (b, c, h, w) about its mean by `contrast`, and add `brightness`.

    Both have shape (b,).
    """
    factor, delta = contrast.view(-1, 1, 1, 1), brightness.view(-1, 1, 1, 1)
    return images * factor + (images.mean((2, 3), keepdim=True) * (1 - factor) + delta)


def standardize(images: Tensor) -> Tensor:
    """Return each image of (b, c, h, w) with mean 0 and, unless it is constant, variance 1."""
    numel = images[0].numel()
    variance, mean = torch.var_mean(images, (1, 2, 3), correction=0, keepdim=True)
    return (images - mean) / variance.sqrt().clamp_min(numel**-0.5)


def normalize(images: Tensor) -> Tensor:
    """Return uint8 images (b, 3, h, w) as float32, minus `MEAN` and divided by `STD`."""
    mean, std = (images.new_tensor(v, dtype=torch.float32).view(3, 1, 1) for v in (MEAN, STD))
    return (images.float() / 255 - mean) / std


@dataclass(frozen=True)
class Cifar10(Task):
    """Small photographs, with the network of TernGrad or those of He et al."""

    inputs: ClassVar[str] = "images"
    paper_steps: ClassVar[str] = (
        "cifarnet: 300,000 steps at batch 128; resnet20 and resnet32: 64,000 steps at batch 128"
    )

    network: str = "cifarnet"  # cifarnet, resnet20 or resnet32
    augment: bool = True  # distort training images; False: prepare them like test images

    def __post_init__(self) -> None:
        check_network(self.network, NETWORKS)

    def defaults(self) -> Mapping[str, Any]:
        """Return the recipe of the network's source, with fewer steps for a laptop."""
        if self.network == "cifarnet":
            return {
                "batch": 128,
                "steps": 3000,
                "optimizer": "adam",
                "lr": 2e-4,
                "weight_decay": 0.004,
                "decay": "loss",
                "schedule": "constant",
                "ema": 0.9999,
                "eval_every": 500,
            }
        return {
            "batch": 128,
            "steps": 2000,
            "optimizer": "sgd",
            "lr": 0.1,
            "momentum": 0.9,
            "nesterov": False,
            "weight_decay": 1e-4,
            "decay": "update",
            "schedule": "step",
            "schedule_steps": [0.5, 0.75],
            "schedule_gamma": 0.1,
            "ema": 0.0,
            "eval_every": 500,
        }

    def load(self, data_dir: Path | None) -> tuple[Split, Split]:
        """Return the splits, uint8 images (n, 3, 32, 32)."""
        train, test = data.cifar10(data_dir)
        return Split(*train), Split(*test)

    def model(self) -> nn.Module:
        """Return the network, freshly initialized."""
        return NETWORKS[self.network]()

    def batch(self, split: Split, indices: Tensor, key: Key | None) -> Batch:
        """Return float32 images: (b, 3, 24, 24) for `cifarnet`, (b, 3, 32, 32) for the others.

        They are in channels-last memory format, which is faster on a CPU.
        """
        images, targets = split.inputs[indices], split.targets[indices]
        prepare = self._small if self.network == "cifarnet" else self._padded
        draws = None
        if key is not None and self.augment:
            key = key._replace(stream=purposes.AUGMENT)
            draws = ops.random.uniform(key, 5 * len(images), images.device).view(-1, 5)
        inputs = prepare(images, draws).to(memory_format=torch.channels_last)
        return Batch(inputs, targets)

    def _small(self, images: Tensor, draws: Tensor | None) -> Tensor:
        """Return CifarNet's input from uint8 images and five uniform draws for each."""
        if draws is None:
            edge = (SIDE - SMALL) // 2
            centre = images[:, :, edge : edge + SMALL, edge : edge + SMALL]
            return standardize(centre.float() / 255)
        top, left, flip = _places(draws, SIDE - SMALL + 1)
        cut = crop(images, SMALL, top, left, flip).float() / 255
        brightness = (2 * draws[:, 3] - 1) * (63 / 255)
        return standardize(distort(cut, brightness, 0.2 + 1.6 * draws[:, 4]))

    def _padded(self, images: Tensor, draws: Tensor | None) -> Tensor:
        """Return a ResNet's input from uint8 images and the first three draws of each."""
        inputs = normalize(images)
        if draws is None:
            return inputs
        padded = nn.functional.pad(inputs, (PAD, PAD, PAD, PAD))
        return crop(padded, SIDE, *_places(draws, 2 * PAD + 1))

    def decayed(self, parameter: str) -> bool:
        """Return whether weight decay applies: in CifarNet to two weights, else to all."""
        return self.network != "cifarnet" or parameter in ("fc3.weight", "fc4.weight")


def _places(draws: Tensor, places: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return top and left edges in 0 .. places - 1, and flips of probability 1/2, each (b,)."""
    top, left = ((draws[:, i] * places).long() for i in (0, 1))
    return top, left, draws[:, 2] < 0.5
