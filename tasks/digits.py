"""Handwritten digits of 8x8 pixels from scikit-learn: no download, seconds on a CPU.

Data: 1,797 images in 10 classes (the test part of UCI's "Optical Recognition of Handwritten
Digits"), pixels 0..16 scaled to [-1, 1]. Fixed split: examples 0, 5, 10, ... are the 360 test
examples, the other 1,437 are for training. No augmentation.
Networks: `mlp`, 64-hidden-10 (9,610 parameters with 128 hidden units); `conv`, two 3x3
convolutions of 16 and 32 channels, each pooled, then 128-hidden-10 (22,602 parameters). torch's
default initialization.
Recipe, ours: batch 64, 400 steps of SGD with momentum 0.9, lr 0.05 times the square root of the
remaining fraction of steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from gcbench.core.compressor import Key
from gcbench.core.task import Batch, Split, Task

from ._models import check_network, digits_conv, digits_mlp

NETWORKS = {"mlp": digits_mlp, "conv": digits_conv}


def _table() -> np.ndarray:
    """Return 64 pixels and the label of each image, uint8, shape (1797, 65)."""
    # Importing scikit-learn takes as long as importing torch, so its file is read directly.
    spec = find_spec("sklearn")
    folders = (spec and spec.submodule_search_locations) or []
    files = [Path(folder) / "datasets" / "data" / "digits.csv.gz" for folder in folders]
    for file in filter(Path.exists, files):
        return np.loadtxt(file, delimiter=",", dtype=np.uint8)
    from sklearn.datasets import load_digits

    return np.column_stack(load_digits(return_X_y=True)).astype(np.uint8)


@dataclass(frozen=True)
class Digits(Task):
    """scikit-learn's digits."""

    inputs: ClassVar[str] = "images"

    network: str = "mlp"  # mlp or conv
    hidden: int = 128  # units of the hidden layer

    def __post_init__(self) -> None:
        check_network(self.network, NETWORKS)
        if self.hidden < 1:
            raise ValueError(f"hidden {self.hidden}: expected at least 1")

    def defaults(self) -> Mapping[str, Any]:
        """Return our recipe; there is no published one."""
        return {
            "batch": 64,
            "steps": 400,
            "optimizer": "sgd",
            "lr": 0.05,
            "momentum": 0.9,
            "nesterov": False,
            "weight_decay": 0.0,
            "schedule": "poly",
            "schedule_power": 0.5,
            "ema": 0.0,
            "eval_every": 50,
        }

    def load(self, data_dir: Path | None) -> tuple[Split, Split]:
        """Return the splits, uint8 images (n, 1, 8, 8) of 0..16; `data_dir` is ignored."""
        table = torch.from_numpy(_table())
        images, targets = table[:, :-1].reshape(-1, 1, 8, 8), table[:, -1].long()
        test = torch.arange(len(targets)) % 5 == 0
        return Split(images[~test], targets[~test]), Split(images[test], targets[test])

    def model(self) -> nn.Module:
        """Return the network, with torch's default initialization."""
        return NETWORKS[self.network](self.hidden)

    def batch(self, split: Split, indices: Tensor, key: Key | None) -> Batch:
        """Return images scaled to [-1, 1], float32 (b, 1, 8, 8)."""
        return Batch(split.inputs[indices].float() / 8 - 1, split.targets[indices])
