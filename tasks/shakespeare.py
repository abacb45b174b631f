"""Character-level language modelling of Shakespeare, with a small transformer.

Data: tinyshakespeare, 1,115,394 characters; its 65 distinct characters are the tokens. The last
tenth of the text is the test split, the rest the training split. An example is a block of `context`
characters, with their successors as targets. Blocks are fixed and do not overlap; an incomplete
block at the end of a split is ignored.
Network: a decoder-only transformer like GPT-2, pre-norm: learned positions; in each layer causal
attention and a perceptron of 4 width units with GELU (tanh form), each after a layer norm and added
to its input; a final layer norm; an output matrix without bias, not tied to the embedding. No
dropout. With 4 layers of width 128, 4 heads and 64 characters of context: 818,176 parameters.
Weights are N(0, 0.02^2), those of the matrices before the residual sum with 0.02 / sqrt(2 layers);
biases 0.
Recipe, ours: batch 32 (2,048 characters) over all workers, 1,000 steps of Adam, lr 0.002 decaying
linearly to 0, no weight decay. The rate was chosen on the last tenth of the training text, without
compression, one seed, 4 workers and 400 steps: 2.245 nats with 0.001, 2.178 with 0.002, 2.464 with
0.004.
Metric: cross-entropy in nats per character, averaged over all characters; there is no accuracy. A
uniform guess has ln 65 = 4.174.
nanoGPT's network has no biases (`bias=False`), shares the embedding's weights with the output
matrix (`tied=True`) and uses the exact GELU (`gelu="erf"`); it trains on windows at random offsets
(`sampling="windows"`), and weight decay excludes vectors, the norms' gains (`decay="matrices"`).
The suite `nanogpt` has these settings.
Source: Karpathy's char-rnn (the text) and Radford et al. 2019 (network and initialization; their
code initializes positions with 0.01, ours with 0.02 like the rest).
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gcbench.core import data
from gcbench.core.compressor import Key
from gcbench.core.errors import UsageError
from gcbench.core.task import Batch, Split, Task

CHARACTERS = "\n !$&',-.3:;?" + string.ascii_uppercase + string.ascii_lowercase
"""The characters of the text in order; a token is an index into it."""
GELUS = {"tanh": "tanh", "erf": "none"}
"""Values of torch's `approximate` by the field `gelu`."""
CHOICES = {
    "gelu": tuple(GELUS),
    "sampling": ("blocks", "windows"),
    "decay": ("all", "matrices"),
}
"""The allowed values of string fields."""


def tokens(text: Tensor) -> Tensor:
    """Return the tokens, uint8 (n,), of a text given as bytes, uint8 (n,).

    Raises:
        ValueError: the text has a character that is not one of `CHARACTERS`.
    """
    table = torch.full((256,), 255, dtype=torch.uint8)
    table[torch.tensor([ord(character) for character in CHARACTERS])] = torch.arange(
        len(CHARACTERS), dtype=torch.uint8
    )
    result = table[text.long()]
    if (strange := result == 255).any():
        place = int(strange.nonzero()[0])
        raise ValueError(
            f"byte {int(text[place])} at {place:,}: expected the {len(CHARACTERS)} characters of "
            "tinyshakespeare"
        )
    return result


def blocks(text: Tensor, context: int) -> Split:
    """Split tokens, (n,), into blocks: inputs uint8, targets int64, ((n - 1) // context, context).

    The targets are the inputs' successors, so a block needs one character after its end.
    """
    rows = (len(text) - 1) // context
    inputs, targets = text[: rows * context], text[1 : rows * context + 1]
    return Split(inputs.view(rows, context), targets.view(rows, context).long())


@dataclass(frozen=True)
class Windows(Split):
    """Windows of a text: `inputs` is the text, uint8 (n,), `targets` their offsets, int64 (m,)."""

    context: int  # characters per window

    def select(self, indices: Tensor) -> Self:
        """Return the windows at `indices`, int64 (m,), of the same text."""
        return replace(self, targets=self.targets[indices])

    def hold_out(self, count: int) -> tuple[Split, Split]:
        """Return the windows of the text without its end, and `count` blocks of the end.

        Windows overlap, so windows drawn at random would share characters with the others.
        """
        end = len(self.inputs) - count * self.context - 1
        if end <= self.context:
            raise UsageError(
                f"holdout {count}: {count} blocks of {self.context} characters leave no window in "
                f"{len(self.inputs):,} characters; hold out fewer"
            )
        return windows(self.inputs[:end], self.context), blocks(self.inputs[end:], self.context)

    def read(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the windows at `indices` and their successors, uint8 (b, context) each."""
        places = self.targets[indices][:, None] + torch.arange(
            self.context + 1, device=self.inputs.device
        )
        text = self.inputs[places]
        return text[:, :-1], text[:, 1:]


def windows(text: Tensor, context: int) -> Windows:
    """Return all windows of `context` characters, each with a successor, of tokens, uint8 (n,)."""
    return Windows(text, torch.arange(len(text) - context, device=text.device), context)


class Layer(nn.Module):
    """One pre-norm layer: x + attention(norm(x)), then x + perceptron(norm(x))."""

    def __init__(self, width: int, heads: int, *, bias: bool = True, gelu: str = "tanh") -> None:
        super().__init__()
        self.heads = heads
        self.gelu = GELUS[gelu]
        self.norm1 = nn.LayerNorm(width, bias=bias)
        self.attend = nn.Linear(width, 3 * width, bias=bias)
        self.attended = nn.Linear(width, width, bias=bias)
        self.norm2 = nn.LayerNorm(width, bias=bias)
        self.expand = nn.Linear(width, 4 * width, bias=bias)
        self.contract = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for float32 (b, t, width), of the same shape."""
        # (b, t, 3 width) -> three times (b, heads, t, width / heads)
        queries, keys, values = (
            part.unflatten(-1, (self.heads, -1)).transpose(-2, -3)
            for part in self.attend(self.norm1(x)).chunk(3, -1)
        )
        # Plain operations, because torch's fused attention on a CPU does not support vmap.
        scores = queries @ keys.transpose(-1, -2) / queries.shape[-1] ** 0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(later, float("-inf")).softmax(-1) @ values
        x = x + self.attended(mixed.transpose(-2, -3).flatten(-2))
        inner = F.gelu(self.expand(self.norm2(x)), approximate=self.gelu)
        out: Tensor = x + self.contract(inner)
        return out


class Transformer(nn.Module):
    """Maps tokens, int64 (b, t) with t <= context, to logits of their successors, (b, t, 65)."""

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        context: int,
        *,
        bias: bool = True,
        tied: bool = False,
        gelu: str = "tanh",
    ) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(CHARACTERS), width)
        self.positions = nn.Embedding(context, width)
        self.layers = nn.Sequential(
            *(Layer(width, heads, bias=bias, gelu=gelu) for _ in range(layers))
        )
        self.norm = nn.LayerNorm(width, bias=bias)
        self.logits = nn.Linear(width, len(CHARACTERS), bias=False)
        if tied:
            self.logits.weight = self.characters.weight
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                ends = name.endswith(("attended", "contract"))
                nn.init.normal_(module.weight, std=0.02 / (2 * layers) ** 0.5 if ends else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, (b, t, 65), which do not depend on later characters."""
        places = self.positions.weight[: x.shape[-1]]
        logits: Tensor = self.logits(self.norm(self.layers(self.characters(x) + places)))
        return logits


@dataclass(frozen=True)
class Shakespeare(Task):
    """Predict the next character of Shakespeare's plays."""

    inputs: ClassVar[str] = "text"

    layers: int = 4
    width: int = 128  # of the residual stream
    heads: int = 4  # attention heads per layer, which share the width
    context: int = 64  # characters per block
    bias: bool = True  # biases in linear layers and layer norms
    tied: bool = False  # use the embedding as the output matrix
    gelu: str = "tanh"  # approximate, or "erf": exact
    sampling: str = "blocks"  # train on fixed blocks, or on "windows" at random offsets
    decay: str = "all"  # parameters with weight decay, or "matrices": without norms and biases

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} {value}: expected at least 1")
        for name, allowed in CHOICES.items():
            if (choice := getattr(self, name)) not in allowed:
                raise ValueError(f"{name} {choice!r}: expected {' or '.join(map(repr, allowed))}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width}: expected a multiple of heads {self.heads}")

    def defaults(self) -> Mapping[str, Any]:
        """Return our recipe; there is no published one for this size."""
        return {
            "batch": 32,
            "steps": 1000,
            "optimizer": "adam",
            "lr": 2e-3,
            "weight_decay": 0.0,
            "schedule": "poly",
            "schedule_power": 1.0,
            "ema": 0.0,
            "eval_every": 250,
        }

    def load(self, data_dir: Path | None) -> tuple[Split, Split]:
        """Return the splits: inputs uint8 and targets int64, both (n, context)."""
        text = tokens(data.shakespeare(data_dir))
        end = len(text) - len(text) // 10
        cut = windows if self.sampling == "windows" else blocks
        return cut(text[:end], self.context), blocks(text[end:], self.context)

    def model(self) -> nn.Module:
        """Return the transformer, freshly initialized."""
        return Transformer(
            self.layers,
            self.width,
            self.heads,
            self.context,
            bias=self.bias,
            tied=self.tied,
            gelu=self.gelu,
        )

    def batch(self, split: Split, indices: Tensor, key: Key | None) -> Batch:
        """Return the blocks at `indices` as tokens, int64 (b, context), without augmentation."""
        if isinstance(split, Windows):
            inputs, targets = split.read(indices)
            return Batch(inputs.long(), targets.long())
        return Batch(split.inputs[indices].long(), split.targets[indices])

    def decayed(self, parameter: str) -> bool:
        """Return whether weight decay applies: to all parameters, or to matrices only."""
        vector = parameter.endswith("bias") or "norm" in parameter
        return self.decay == "all" or not vector

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy over all characters of all blocks, in nats."""
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Return None: language models are compared by their loss."""
        return None
