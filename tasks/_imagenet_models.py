"""The networks of the task imagenet: float32 (b, 3, side, side) -> logits (b, classes).

AlexNet and GoogLeNet are those of TernGrad's code, with TensorFlow's SAME padding. Every
convolution is followed by batch normalization with an offset and without a gain, and has no bias.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gcbench import Dropout

from ._models import LocalResponseNorm, truncated

STATISTICS_MOMENTUM = 0.01
"""Weight of a new batch in the running statistics of `alexnet` and `googlenet`.

TernGrad's code has 0.0003, with which the statistics need about ten thousand steps to converge.
"""


def _same(x: Tensor, kernel: int, stride: int, value: float = 0.0) -> Tensor:
    """Pad (..., h, w) as TensorFlow's SAME: ceil(h / stride) rows; the end gets an odd pixel."""
    pads = []
    for side in (x.shape[-1], x.shape[-2]):
        missing = max((math.ceil(side / stride) - 1) * stride + kernel - side, 0)
        pads += [missing // 2, missing - missing // 2]
    return F.pad(x, pads, value=value) if any(pads) else x


def _same_pool(x: Tensor, kernel: int, stride: int) -> Tensor:
    return F.max_pool2d(_same(x, kernel, stride, -math.inf), kernel, stride)


class _Offset(nn.BatchNorm2d):
    """Batch normalization with an offset and without a gain."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-3, momentum=STATISTICS_MOMENTUM)
        self.register_parameter("weight", None)

    def reset_parameters(self) -> None:
        """Start at an offset of zero."""
        self.reset_running_stats()
        nn.init.zeros_(self.bias)


class _Convolution(nn.Module):
    """Convolution with SAME padding, batch normalization, ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, bias=False)
        self.norm = _Offset(outputs)
        truncated(self.conv, 0.01)

    def forward(self, x: Tensor) -> Tensor:
        (kernel, _), (stride, _) = self.conv.kernel_size, self.conv.stride
        return F.relu(self.norm(self.conv(_same(x, kernel, stride))))


def _towers(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.ModuleList:
    return nn.ModuleList(_Convolution(inputs, outputs, kernel, stride) for _ in range(2))


class AlexNet(nn.Module):
    """AlexNet in two towers, with batch normalization, as TernGrad's code has it.

    60,965,224 parameters at 1,000 classes and a side of 224. The towers meet before the third
    convolution and before the first fully connected layer; each tower's convolution is a tensor of
    its own. Local response normalization follows the first two convolutions.
    """

    def __init__(self, classes: int, side: int, dropout: float) -> None:
        super().__init__()
        self.conv1 = _towers(3, 48, 11, 4)
        self.conv2 = _towers(48, 128, 5)
        self.conv3 = _towers(256, 192, 3)
        self.conv4 = _towers(192, 192, 3)
        self.conv5 = _towers(192, 128, 3)
        self.norms = nn.ModuleList(
            # TensorFlow's alpha is 1e-4 for each of the five channels.
            LocalResponseNorm(channels, size=5, alpha=5e-4, k=2.0)
            for channels in (48, 128)
        )
        left = math.ceil(side / 4)
        for _ in range(3):
            left = (left - 3) // 2 + 1
        self.fc6 = nn.Linear(256 * left**2, 4096)
        self.fc7 = nn.Linear(4096, 4096)
        self.logits = nn.Linear(4096, classes)
        self.drop6, self.drop7 = Dropout(dropout), Dropout(dropout)
        truncated(self.fc6, 0.005, bias=0.1)
        truncated(self.fc7, 0.005, bias=0.1)
        truncated(self.logits, 0.01)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, (b, classes)."""
        towers = [x, x]
        for layer, norm in zip((self.conv1, self.conv2), self.norms, strict=True):
            towers = [
                F.max_pool2d(norm(conv(part)), 3, 2)
                for conv, part in zip(layer, towers, strict=True)
            ]
        joined = torch.cat(towers, 1)
        towers = [joined, joined]
        for layer in (self.conv3, self.conv4, self.conv5):
            towers = [conv(part) for conv, part in zip(layer, towers, strict=True)]
        x = torch.cat([F.max_pool2d(part, 3, 2) for part in towers], 1)
        x = self.drop6(F.relu(self.fc6(x.flatten(1))))
        x = self.drop7(F.relu(self.fc7(x)))
        logits: Tensor = self.logits(x)
        return logits


class _Inception(nn.Module):
    """Four branches side by side: 1x1; 1x1 and 3x3; 1x1 and 3x3; pooling and 1x1.

    `widths` are the channels of the six convolutions in the order of Szegedy et al. 2015, table 1.
    The third branch has 3x3 where the paper has 5x5.
    """

    def __init__(self, inputs: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        one, reduce3, three, reduce5, five, pool = widths
        self.one = _Convolution(inputs, one, 1)
        self.three = nn.Sequential(
            _Convolution(inputs, reduce3, 1), _Convolution(reduce3, three, 3)
        )
        self.five = nn.Sequential(_Convolution(inputs, reduce5, 1), _Convolution(reduce5, five, 3))
        self.pool = _Convolution(inputs, pool, 1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.max_pool2d(x, 3, 1, padding=1)
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(pooled)], 1)


_BLOCKS = (
    ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)),
    (
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
    ),
    ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
)
"""Widths of the inception blocks, by stage; each stage begins with a pooling."""


class GoogLeNet(nn.Module):
    """GoogLeNet without auxiliary classifiers, with batch normalization, as in TF-slim.

    6,617,624 parameters at 1,000 classes, for any side.
    """

    def __init__(self, classes: int, side: int, dropout: float) -> None:
        super().__init__()
        self.conv1 = _Convolution(3, 64, 7, 2)
        self.conv2 = nn.Sequential(_Convolution(64, 64, 1), _Convolution(64, 192, 3))
        stages, inputs = [], 192
        for blocks in _BLOCKS:
            stage = []
            for widths in blocks:
                stage.append(_Inception(inputs, widths))
                inputs = widths[0] + widths[2] + widths[4] + widths[5]
            stages.append(nn.Sequential(*stage))
        self.stage3, self.stage4, self.stage5 = stages
        self.drop = Dropout(dropout)
        self.logits = nn.Linear(inputs, classes)
        truncated(self.logits, 0.01)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, (b, classes)."""
        x = self.conv2(_same_pool(self.conv1(x), 3, 2))
        x = self.stage3(_same_pool(x, 3, 2))
        x = self.stage4(_same_pool(x, 3, 2))
        x = self.stage5(_same_pool(x, 2, 2))
        logits: Tensor = self.logits(self.drop(x.mean((2, 3))))
        return logits


class _Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut, which is projected where shapes differ."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.project = nn.Sequential()
        if stride > 1 or inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.project = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.project(x))


class ResNet50(nn.Module):
    """ResNet-50 of He et al., table 1, with the stride of a stage in its first 3x3 convolution.

    25,557,032 parameters at 1,000 classes, for any side. The paper has the stride in the first 1x1.
    """

    def __init__(self, classes: int, side: int, dropout: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(64)
        blocks, inputs = [], 64
        for stage, count in enumerate((3, 4, 6, 3)):
            width = 64 << stage
            for place in range(count):
                blocks.append(_Bottleneck(inputs, width, 2 if stage and not place else 1))
                inputs = 4 * width
        self.body = nn.Sequential(*blocks)
        self.drop = Dropout(dropout)
        self.logits = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.normal_(self.logits.weight, std=0.01)
        nn.init.zeros_(self.logits.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, (b, classes)."""
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 3, 2, padding=1)
        logits: Tensor = self.logits(self.drop(self.body(x).mean((2, 3))))
        return logits
