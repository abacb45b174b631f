"""Networks for the performance models: shapes of tensors, multiplications, batch.

The built-in networks have the exact shapes of their sources; tests compare the numbers of
parameters. A multiply-accumulate (MAC) counts once; biases, normalization and pooling are ignored.
Forward and backward of an example take about 6 floating-point operations per MAC.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from gcbench.core.errors import UsageError, unknown

if TYPE_CHECKING:
    from torch import nn

Shapes = tuple[tuple[int, ...], ...]
OPERATIONS = 6
"""Floating-point operations per MAC: two forward, four backward."""


@dataclass(frozen=True)
class Network:
    """The tensors of a model, in order, and the cost of an example."""

    name: str
    title: str
    shapes: Shapes
    last: int
    """Number of tensors, at the end, of the last (classifier) layer."""
    macs: float | None = None
    """Multiply-accumulates of the forward pass of one example; None: unknown."""
    batch: int | None = None
    """Default number of examples per worker and step; None: unknown."""
    family: str | None = None
    """"convolutional" or "transformer": networks that reach similar shares of a device's peak."""
    examples: str = "examples"
    """What its examples are called: "images", ..."""
    frozen: int = 0
    """Number of parameters without a gradient, in addition to `shapes`."""
    inputs: str = ""
    """What it reads, as `Task.inputs`: "images", "text", or "" if unknown."""
    tied: int | None = None
    """Position in `shapes` of a head that shares the embedding's weights."""
    buffers: int = 0
    """Bytes of its buffers, which DDP broadcasts before every forward pass."""

    @property
    def arrival(self) -> Shapes:
        """The shapes in the order in which the backward pass computes gradients.

        The last layer comes first, except for a tied head, whose gradient is complete last.
        """
        order = list(range(len(self.shapes)))[::-1]
        if self.tied is not None:
            order.append(order.pop(order.index(self.tied % len(order))))
        return tuple(self.shapes[position] for position in order)

    @property
    def numel(self) -> int:
        """Number of parameters that have a gradient."""
        return sum(map(math.prod, self.shapes))

    @property
    def last_share(self) -> float:
        """The last layer's share of the parameters."""
        return sum(map(math.prod, self.shapes[len(self.shapes) - self.last :])) / self.numel

    def split(self, *, dense_last: bool = False, dense_below: int = 0) -> tuple[Shapes, Shapes]:
        """Return the shapes that are compressed, and those that are exchanged in fp32."""
        first_of_last = len(self.shapes) - self.last if dense_last else len(self.shapes)
        dense = [
            position >= first_of_last or math.prod(shape) < dense_below
            for position, shape in enumerate(self.shapes)
        ]
        pairs = list(zip(self.shapes, dense, strict=True))
        return tuple(s for s, plain in pairs if not plain), tuple(s for s, plain in pairs if plain)


class _Layers:
    """Collects the shapes and MACs of layers."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.macs = 0

    def convolution(
        self, out: int, into: int, kernel: int, side: int, groups: int = 1, *, norm: bool = False
    ) -> None:
        """Add a square convolution with `side` x `side` outputs, and its bias or normalization."""
        weight = (out, into // groups, kernel, kernel)
        self.shapes += [weight, (out,), (out,)] if norm else [weight, (out,)]
        self.macs += math.prod(weight) * side**2

    def dense(self, out: int, into: int) -> None:
        """Add a fully connected layer with a bias."""
        self.shapes += [(out, into), (out,)]
        self.macs += out * into

    def network(self, name: str, title: str, batch: int, last: int = 2) -> Network:
        return Network(
            name,
            title,
            tuple(self.shapes),
            last,
            self.macs,
            batch,
            "convolutional",
            "images",
            inputs="images",
        )


def alexnet() -> Network:
    """Return AlexNet as in Caffe and in TernGrad: two groups in layers 2, 4 and 5; 224 crops."""
    layers = _Layers()
    layers.convolution(96, 3, 11, 55)
    layers.convolution(256, 96, 5, 27, groups=2)
    layers.convolution(384, 256, 3, 13)
    layers.convolution(384, 384, 3, 13, groups=2)
    layers.convolution(256, 384, 3, 13, groups=2)
    layers.dense(4096, 9216)
    layers.dense(4096, 4096)
    layers.dense(1000, 4096)
    return layers.network("alexnet", "AlexNet", 128)


_INCEPTION = {
    28: ((192, 64, 96, 128, 16, 32, 32), (256, 128, 128, 192, 32, 96, 64)),
    14: (
        (480, 192, 96, 208, 16, 48, 64),
        (512, 160, 112, 224, 24, 64, 64),
        (512, 128, 128, 256, 24, 64, 64),
        (512, 112, 144, 288, 32, 64, 64),
        (528, 256, 160, 320, 32, 128, 128),
    ),
    7: ((832, 256, 160, 320, 32, 128, 128), (832, 384, 192, 384, 48, 128, 128)),
}
"""Szegedy et al. 2015, table 1, by side: input, 1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5, pool."""


def googlenet(*, slim: bool) -> Network:
    """Return GoogLeNet without auxiliary heads; `slim` has 3x3 in place of 5x5, as TF-slim has."""
    layers, wide = _Layers(), 3 if slim else 5
    layers.convolution(64, 3, 7, 112)
    layers.convolution(64, 64, 1, 56)
    layers.convolution(192, 64, 3, 56)
    for side, blocks in _INCEPTION.items():
        for into, one, reduce3, three, reduce5, five, pool in blocks:
            layers.convolution(one, into, 1, side)
            layers.convolution(reduce3, into, 1, side)
            layers.convolution(three, reduce3, 3, side)
            layers.convolution(reduce5, into, 1, side)
            layers.convolution(five, reduce5, wide, side)
            layers.convolution(pool, into, 1, side)
    layers.dense(1000, 1024)
    name, title = ("googlenet-slim", "GoogLeNet (slim)") if slim else ("googlenet", "GoogLeNet")
    return layers.network(name, title, 64)


def vgg_a() -> Network:
    """Return configuration A of VGG (Simonyan & Zisserman 2015): 11 layers."""
    layers, into = _Layers(), 3
    for side, widths in {224: (64,), 112: (128,), 56: (256,) * 2, 28: (512,) * 2}.items():
        for width in widths:
            layers.convolution(width, into, 3, side)
            into = width
    for _ in range(2):
        layers.convolution(512, 512, 3, 14)
    layers.dense(4096, 512 * 7 * 7)
    layers.dense(4096, 4096)
    layers.dense(1000, 4096)
    return layers.network("vgg-a", "VGG-A", 32)


def cifar_resnet(blocks: int) -> Network:
    """Return He et al.'s CIFAR ResNet of 6 `blocks` + 2 layers, shortcuts without parameters."""
    layers = _Layers()
    layers.convolution(16, 3, 3, 32, norm=True)
    widths = [16] * (blocks + 1) + [32] * blocks + [64] * blocks
    for into, out in pairwise(widths):
        side = 32 * 16 // out
        layers.convolution(out, into, 3, side, norm=True)
        layers.convolution(out, out, 3, side, norm=True)
    layers.dense(10, 64)
    depth = 6 * blocks + 2
    return layers.network(f"resnet{depth}", f"ResNet-{depth}", 128)


def resnet50() -> Network:
    """Return ResNet-50 (He et al. 2015, table 1; order and strides of torchvision).

    Bottlenecks of 1x1, 3x3 and 1x1 convolutions, each followed by batch normalization, with a
    projection where a stage begins; the 3x3 halves the side there.
    """
    layers, into = _Layers(), 64
    layers.convolution(64, 3, 7, 112, norm=True)
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width, side = 64 << stage, 56 >> stage
        for block in range(blocks):
            entering = 2 * side if stage and not block else side
            layers.convolution(width, into, 1, entering, norm=True)
            layers.convolution(width, width, 3, side, norm=True)
            layers.convolution(4 * width, width, 1, side, norm=True)
            if block == 0:
                layers.convolution(4 * width, into, 1, side, norm=True)
            into = 4 * width
    layers.dense(1000, into)
    return layers.network("resnet50", "ResNet-50", 256)


def transformer() -> Network:
    """Return the 1.3-billion transformer of Brown et al. 2020 (table 2.1, "XL"), GPT-2's layout.

    24 layers of width 2048, contexts of 2048 tokens (one per example), a vocabulary of 50257. The
    last layer shares the embedding's weights; MACs are of all positions, attention not halved.
    """
    depth, width, context, words = 24, 2048, 2048, 50257
    block: list[tuple[int, ...]] = [(width,), (width,)]
    block += [(3 * width, width), (3 * width,), (width, width), (width,), (width,), (width,)]
    block += [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    shapes = [(context, width), *block * depth, (width,), (width,), (words, width)]
    each = depth * (12 * width**2 + 2 * context * width) + words * width
    title = "transformer of 1.3 billion"
    kind = "transformer", f"sequences of {context:,}"
    return Network(
        "transformer-1.3b",
        title,
        tuple(shapes),
        1,
        context * each,
        14,
        *kind,
        inputs="text",
        tied=-1,
    )


def bert() -> Network:
    """Return BERT large with both heads (Devlin et al. 2019; layout of Hugging Face).

    24 layers of width 1024, sequences of 512 tokens (one per example), a vocabulary of 30522. The
    head shares the embedding's weights; pre-training evaluates it only at masked positions, so the
    MACs exclude it.
    """
    depth, width, context, words = 24, 1024, 512, 30522
    norm: list[tuple[int, ...]] = [(width,), (width,)]
    square: list[tuple[int, ...]] = [(width, width), (width,)]
    block = [*square * 4, *norm, (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    shapes = [(context, width), (2, width), *norm, *(block + norm) * depth, *square]
    shapes += [*square, *norm, (2, width), (2,), (words, width), (words,)]
    each = depth * (12 * width**2 + 2 * context * width)
    kind = "transformer", f"sequences of {context}"
    return Network(
        "bert-large",
        "BERT large",
        tuple(shapes),
        2,
        context * each,
        32,
        *kind,
        inputs="text",
        tied=-2,
    )


_MADE: dict[str, Callable[[], Network]] = {
    "alexnet": alexnet,
    "googlenet": lambda: googlenet(slim=False),
    "googlenet-slim": lambda: googlenet(slim=True),
    "vgg-a": vgg_a,
    "resnet20": lambda: cifar_resnet(3),
    "resnet32": lambda: cifar_resnet(5),
    "resnet50": resnet50,
    "bert-large": bert,
    "transformer-1.3b": transformer,
}
NAMES = tuple(_MADE)


@cache
def network(name: str) -> Network:
    """Return a built-in network.

    Raises:
        UsageError: an unknown name.
    """
    if name not in _MADE:
        raise unknown("model", name, NAMES, "Any other: --module package:callable.")
    return _MADE[name]()


def of_module(spec: str) -> Network:
    """Return the network of the `torch.nn.Module` that `package.module:callable` returns.

    The working directory is searched first; output of the import and the call goes to stderr.
    Parameters without `requires_grad` are counted as `frozen`. The last layer is the last module
    with parameters.

    Raises:
        UsageError: the name does not exist, the call fails or ends the program, or the result is
            not a module, has no parameters with a gradient, or has lazy ones.
    """
    from torch import nn

    from gcbench.core.exchange import classifier

    place, colon, attribute = spec.partition(":")
    if not (place and colon and attribute):
        raise UsageError(f"--module {spec}: use PACKAGE:CALLABLE, e.g. mymodels:make_model")
    path = list(sys.path)
    sys.path.insert(0, str(Path.cwd()))
    try:
        with contextlib.redirect_stdout(sys.stderr):
            module = getattr(importlib.import_module(place), attribute)()
    except SystemExit as ended:
        raise UsageError(
            f"--module {spec} ends the program (exit {ended.code}) when imported or called; move "
            'the script part under `if __name__ == "__main__":`'
        ) from ended
    except Exception as error:
        raise UsageError(
            f"--module {spec}: {type(error).__name__}: {error}; it must be importable and callable "
            "without arguments"
        ) from error
    finally:
        sys.path[:] = path
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"--module {spec} returned a {type(module).__name__}, not a torch.nn.Module"
        )
    named = dict(module.named_parameters())
    if not named:
        raise UsageError(f"--module {spec}: the module has no parameters")
    if lazy := [name for name, one in named.items() if nn.parameter.is_lazy(one)]:
        raise UsageError(
            f"--module {spec}: lazy parameters have no shape yet ({', '.join(lazy)}); call the "
            "module on an example before returning it"
        )
    trained = {name: one for name, one in named.items() if one.requires_grad}
    frozen = sum(one.numel() for one in named.values()) - sum(o.numel() for o in trained.values())
    if not any(one.numel() for one in trained.values()):
        raise UsageError(
            f"--module {spec}: no parameter has requires_grad, so there is no gradient to exchange"
        )
    last = set(classifier(module)) & trained.keys()
    names = sorted(trained, key=lambda name: name in last)
    shapes = tuple(tuple(trained[name].shape) for name in names)
    buffers = sum(one.nbytes for one in module.buffers())
    return Network(
        spec, spec, shapes, len(last), frozen=frozen, inputs=inputs_of(module), buffers=buffers
    )


def inputs_of(module: nn.Module) -> str:
    """Return what a module seems to read, as `Task.inputs`; "" if unknown.

    "text" if it has an embedding, "images" if it has two-dimensional convolutions; unknown with
    both or neither.
    """
    from torch import nn

    tokens = any(isinstance(one, nn.Embedding) for one in module.modules())
    pixels = any(isinstance(one, nn.Conv2d) for one in module.modules())
    return "" if tokens == pixels else "text" if tokens else "images"
