"""The networks of the built-in tasks: plain torch modules without random state."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gcbench.core.errors import unknown


def check_network(name: str, choices: Iterable[str]) -> None:
    """Raise ValueError, which lists the choices, unless `name` is one of them."""
    if name not in (names := list(choices)):
        raise ValueError(str(unknown("network", name, names)))


def truncated(layer: nn.Conv2d | nn.Linear, std: float, bias: float = 0.0) -> None:
    """Initialize weights with TensorFlow's truncated normal, and biases with a constant.

    The truncated normal is N(0, std^2) with values beyond 2 std redrawn.
    """
    nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)
    if layer.bias is not None:
        nn.init.constant_(layer.bias, bias)


class LocalResponseNorm(nn.Module):
    """x_c (k + alpha / size sum_{|c - c'| <= size // 2} x_c'^2)^(-3/4) over `channels` channels.

    The same function as torch's `nn.LocalResponseNorm(size, alpha, beta=0.75, k=k)` (TensorFlow's
    `alpha` is `alpha / size` here, its `bias` is k). The window sum is a product with a banded
    matrix, which costs a quarter of torch's padded three-dimensional pooling on a CPU.
    """

    band: Tensor
    k: Tensor

    def __init__(self, channels: int, size: int, alpha: float, k: float = 1.0) -> None:
        super().__init__()
        index = torch.arange(channels)
        band = ((index[:, None] - index).abs() <= size // 2).float().mul_(alpha / size)
        self.register_buffer("band", band[:, :, None, None], persistent=False)
        self.register_buffer("k", torch.full((channels,), k), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized activations; `x` and the result are float32 (b, channels, h, w)."""
        root = F.conv2d(x * x, self.band, self.k).rsqrt()
        return x * (root * root.sqrt())


def _pool(x: Tensor) -> Tensor:
    # With an even side, ceil mode is TensorFlow's SAME: the odd pixel is padded at the end.
    return F.max_pool2d(x, 3, stride=2, ceil_mode=True)


class CifarNet(nn.Module):
    """TernGrad's CifarNet (`cifar10_alexnet` in its code): float32 (b, 3, 24, 24) -> (b, 10).

    1,068,298 parameters. ReLU is applied after pooling, which gives the same values as before it
    and has a quarter of the elements.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 5, padding=2)
        self.norm1 = LocalResponseNorm(64, size=9, alpha=0.001)
        self.conv2 = nn.Conv2d(64, 64, 5, padding=2)
        self.norm2 = LocalResponseNorm(64, size=9, alpha=0.001)
        self.fc3 = nn.Linear(64 * 6 * 6, 384)
        self.fc4 = nn.Linear(384, 192)
        self.logits = nn.Linear(192, 10)
        truncated(self.conv1, 0.05)
        truncated(self.conv2, 0.05, bias=0.1)
        truncated(self.fc3, 0.04, bias=0.1)
        truncated(self.fc4, 0.04, bias=0.1)
        truncated(self.logits, 1 / 192)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, (b, 10)."""
        x = self.norm1(F.relu(_pool(self.conv1(x))))
        x = _pool(self.norm2(F.relu(self.conv2(x))))
        x = F.relu(self.fc3(x.flatten(1)))
        x = F.relu(self.fc4(x))
        logits: Tensor = self.logits(x)
        return logits


class LeNet(nn.Module):
    """TernGrad's LeNet, SAME padding: float32 (b, 1, 28, 28) -> (b, 10). 1,256,080 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, 5, padding=2)
        self.conv2 = nn.Conv2d(20, 50, 5, padding=2)
        self.fc3 = nn.Linear(50 * 7 * 7, 500)
        self.logits = nn.Linear(500, 10)
        truncated(self.conv1, 0.05)
        truncated(self.conv2, 0.05)
        truncated(self.fc3, 0.048)
        truncated(self.logits, 0.0767)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, (b, 10)."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        logits: Tensor = self.logits(F.relu(self.fc3(x.flatten(1))))
        return logits


class CaffeLeNet(nn.Module):
    """Caffe's LeNet, VALID padding and one ReLU: float32 (b, 1, 28, 28) -> (b, 10).

    431,080 parameters. Weights are uniform on +-sqrt(3 / fan_in), Caffe's xavier; biases zero.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.fc3 = nn.Linear(50 * 4 * 4, 500)
        self.logits = nn.Linear(500, 10)
        for name, parameter in self.named_parameters():
            if name.endswith("weight"):
                nn.init.kaiming_uniform_(parameter, nonlinearity="linear")
            else:
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, (b, 10)."""
        x = F.max_pool2d(self.conv1(x), 2)
        x = F.max_pool2d(self.conv2(x), 2)
        logits: Tensor = self.logits(F.relu(self.fc3(x.flatten(1))))
        return logits


class _Block(nn.Module):
    """Two 3x3 convolutions around a shortcut without parameters (option A of He et al.)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.stride = outputs // inputs
        self.conv1 = nn.Conv2d(inputs, outputs, 3, self.stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        if self.stride > 1:
            # Pad the shortcut with channels of zeros, half of them on either side.
            new = (out.shape[1] - x.shape[1]) // 2
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, new, new))
        return F.relu(out + x)


class ResNet(nn.Module):
    """He et al.'s CIFAR ResNet of 6 `blocks` + 2 layers: float32 (b, 3, 32, 32) -> (b, 10).

    269,722 parameters with 3 blocks per stage (ResNet-20), 464,154 with 5 (ResNet-32).
    """

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        widths = [16] * (blocks + 1) + [32] * blocks + [64] * blocks
        self.body = nn.Sequential(*(_Block(a, b) for a, b in pairwise(widths)))
        self.logits = nn.Linear(64, 10)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)
        nn.init.zeros_(self.logits.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, (b, 10)."""
        x = self.body(F.relu(self.norm(self.conv(x))))
        logits: Tensor = self.logits(x.mean((2, 3)))
        return logits


def digits_mlp(hidden: int) -> nn.Module:
    """Return a perceptron with one hidden layer: float32 (b, 1, 8, 8) -> (b, 10)."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def digits_conv(hidden: int) -> nn.Module:
    """Return a small convolutional network: float32 (b, 1, 8, 8) -> (b, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 10),
    )
