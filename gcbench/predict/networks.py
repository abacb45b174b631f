"""Networks for the performance models: shapes of tensors, multiplications, batch.

The convolutional networks have the shapes of the models that the built-in tasks train, and VGG-A,
BERT and the transformer those of their sources. A multiply-accumulate (MAC) counts once; biases,
normalization and pooling are ignored.
Forward and backward of an example take about 6 floating-point operations per MAC.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from gcbench.core import registry
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

    @cached_property
    def arrival(self) -> Shapes:
        """The shapes in the order in which the backward pass computes gradients.

        The last layer comes first, except for a tied head, whose gradient is complete last.
        """
        order = list(range(len(self.shapes)))[::-1]
        if self.tied is not None:
            order.append(order.pop(order.index(self.tied % len(order))))
        return tuple(self.shapes[position] for position in order)

    @cached_property
    def numel(self) -> int:
        """Number of parameters that have a gradient."""
        return sum(map(math.prod, self.shapes))

    @property
    def last_share(self) -> float:
        """The last layer's share of the parameters."""
        return sum(map(math.prod, self.shapes[len(self.shapes) - self.last :])) / self.numel

    def split(self, *, dense_last: bool = False, dense_below: int = 0) -> tuple[Shapes, Shapes]:
        """Return the shapes that are compressed, and those that are exchanged in fp32."""
        compressed, dense = list[tuple[int, ...]](), list[tuple[int, ...]]()
        for left, shape in zip(range(len(self.shapes), 0, -1), self.shapes, strict=True):
            plain = math.prod(shape) < dense_below or (dense_last and left <= self.last)
            (dense if plain else compressed).append(shape)
        return tuple(compressed), tuple(dense)


def vgg_a() -> Network:
    """Return configuration A of VGG (Simonyan & Zisserman 2015): 11 layers."""
    widths = (3, 64, 128, 256, 256, 512, 512, 512, 512)
    weights: list[tuple[int, ...]] = [(out, into, 3, 3) for into, out in pairwise(widths)]
    weights += [(4096, 512 * 7 * 7), (4096, 4096), (1000, 4096)]
    shapes = tuple(shape for weight in weights for shape in (weight, weight[:1]))
    kind = "convolutional", "images"
    return Network("vgg-a", "VGG-A", shapes, 2, 7_609_090_048, 32, *kind, inputs="images")


class _WithoutValues(TorchFunctionMode):
    """Replaces random weights by zeros. (On the device "meta" torch would import its compiler.)"""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        random = func in (torch.Tensor.normal_, torch.Tensor.uniform_)
        return args[0].zero_() if random else func(*args, **(kwargs or {}))


def trained(name: str) -> Network:
    """Return a network of the built-in tasks (`_TRAINED`), with the shapes of its model."""
    title, task, variant, batch, macs = _TRAINED[name]
    with _WithoutValues():
        model = registry.task(task, network=variant).model()
    shapes = tuple(tuple(parameter.shape) for parameter in model.parameters())
    kind = "convolutional", "images"
    return Network(name, title, shapes, 2, macs, batch, *kind, inputs="images")


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


_TRAINED = {
    "alexnet": ("AlexNet", "imagenet", "alexnet", 128, 724_406_816),
    "googlenet-slim": ("GoogLeNet (slim)", "imagenet", "googlenet", 64, 1_498_376_192),
    "resnet20": ("ResNet-20", "cifar10", "resnet20", 128, 40_551_040),
    "resnet32": ("ResNet-32", "cifar10", "resnet32", 128, 68_862_592),
    "resnet50": ("ResNet-50", "imagenet", "resnet50", 256, 4_089_184_256),
}
"""Name -> title, task, its `network`, default batch, MACs of the forward pass of an image."""
_PUBLISHED: dict[str, Callable[[], Network]] = {
    "vgg-a": vgg_a,
    "bert-large": bert,
    "transformer-1.3b": transformer,
}
NAMES = (*_TRAINED, *_PUBLISHED)


@cache
def network(name: str) -> Network:
    """Return a built-in network.

    Raises:
        UsageError: an unknown name.
    """
    if name not in NAMES:
        raise unknown("model", name, NAMES, "Any other: --module package:callable.")
    return trained(name) if name in _TRAINED else _PUBLISHED[name]()


def of_module(spec: str) -> Network:
    """Return the network of the `torch.nn.Module` that `package.module:callable` returns.

    The working directory is searched first; output of the import and the call goes to stderr.
    Parameters without `requires_grad` are counted as `frozen`. The last layer is the last module
    with parameters.

    Raises:
        UsageError: the name does not exist, the call fails or ends the program, or the result is
            not a module, has no parameters with a gradient, or has some that are lazy or not in
            float32.
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
    if half := {str(one.dtype).removeprefix("torch.") for one in trained.values()} - {"float32"}:
        raise UsageError(
            f"--module {spec}: parameters in {', '.join(sorted(half))}; predictions are for "
            "gradients of float32 parameters. Return the module in float32; DDP would reduce the "
            "gradients of bfloat16 parameters as in the row bf16"
        )
    last = set(classifier(module)) & trained.keys()
    names = sorted(trained, key=lambda name: name in last)
    shapes = tuple(tuple(trained[name].shape) for name in names)
    *_, head = (
        prefix for prefix, one in module.named_modules() if [*one.parameters(recurse=False)]
    )
    shared = [names.index(name) for name in last if name.rpartition(".")[0] != head]
    return Network(
        spec,
        spec,
        shapes,
        len(last),
        frozen=frozen,
        inputs=inputs_of(module),
        tied=shared[0] if shared else None,
        buffers=sum(one.nbytes for one in module.buffers()),
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
