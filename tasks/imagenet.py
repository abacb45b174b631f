"""Photographs in class folders like ImageNet (ILSVRC 2012): TernGrad's tables 2 and 3.

Data: DATA/FOLDER/train/CLASS/*.JPEG and DATA/FOLDER/val/CLASS/*.JPEG, where FOLDER is the field
`folder` and DATA is --data-dir or GCBENCH_DATA; nothing is downloaded. Files ending in .jpeg, .jpg
or .png are used. Classes are numbered in the order of their folders' names. ImageNet has 1,281,167
+ 50,000 photographs in 1,000 classes. They are decoded for each batch, which counts as
forward_backward; grayscale and CMYK become RGB, EXIF's orientation is ignored.

Preprocessing: a box is cropped from the photograph and resized to `side` x `side` pixels (224),
bilinear with antialiasing, which TernGrad's code does not use. Training, with a flip of probability
1/2: `alexnet` resizes the whole photograph to 256 x 256 and crops 224 at random; `googlenet` and
`resnet50` use a box with a random fraction of the area (uniform, at least 5 % and 8 %) and a random
aspect ratio (3/4 to 4/3, uniform on a log scale). A box that does not fit is clipped to the
photograph; TernGrad's code draws again. Its random brightness, saturation, hue and contrast for
GoogLeNet are not implemented. Evaluation uses the middle 7/8 of width and height, for `resnet50` of
the shorter side. Values: `alexnet` 0..255 minus (123.68, 116.78, 103.94); `googlenet` -1..1;
`resnet50` 0..1, minus the mean per channel and divided by its standard deviation.

`alexnet`, 60,965,224 parameters: two towers, batch normalization. Recipe: batch 256, SGD with
momentum 0.9, lr 0.01, divided by 10 every 20 of 74 epochs (370,000 steps), weight decay 0.0005,
dropout 0.5.
`googlenet`, 6,617,624 parameters: 3x3 for 5x5, batch normalization, no auxiliary classifiers.
Recipe: batch 128, SGD with momentum 0.9, lr 0.04 times the square root of the remaining fraction of
600,000 steps, weight decay 0.00004, dropout 0.2.
In both, only weights decay, in the loss; the gradient of the last layer stays dense; evaluated on
moving averages of decay 0.9999. In the paper, runs with ternary gradients had less dropout, 0.2 and
0.08: the suites terngrad-table2 and terngrad-table3 set these values.
Source: Wen et al. 2017, tables 2 and 3; details that the paper omits are from the authors' code,
which has an additional, unused class.

`resnet50`, 25,557,032 parameters. Recipe: batch 256, SGD with momentum 0.9, lr 0.1, divided by 10
at a third and two thirds of the steps (in the paper when the error plateaus), weight decay
0.0001 on all parameters, no dropout. Source: He et al. 2016, section 3.4: up to 600,000 steps.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gcbench import ops
from gcbench.core import purposes
from gcbench.core.compressor import Key
from gcbench.core.errors import GcbenchError
from gcbench.core.task import Batch, Split, Task

from ._imagenet_models import AlexNet, GoogLeNet, ResNet50
from ._models import check_network

NETWORKS = {"alexnet": AlexNet, "googlenet": GoogLeNet, "resnet50": ResNet50}
DROPOUT = {"alexnet": 0.5, "googlenet": 0.2, "resnet50": 0.0}
"""As published for gradients in fp32."""
SCALES = {
    "alexnet": ((123.68, 116.78, 103.94), (1.0, 1.0, 1.0)),
    "googlenet": ((127.5, 127.5, 127.5), (127.5, 127.5, 127.5)),
    "resnet50": ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375)),
}
"""Mean and scale of each channel, for values of 0..255."""
LEAST_AREA = {"googlenet": 0.05, "resnet50": 0.08}
"""The minimum fraction of a photograph in a training example."""
ASPECT = 4 / 3
"""The maximum aspect ratio of a training example."""
LEAST_SIDE = 64
ENDINGS = (".jpeg", ".jpg", ".png")

Box = tuple[float, float, float, float]
"""Left, top, right and bottom edge in pixels from a photograph's top left corner."""


@dataclass(frozen=True)
class Photos(Split):
    """Photographs on disk: `inputs`, int64 (n,), are indices into `files`."""

    root: Path
    files: tuple[str, ...]
    """Paths below `root`."""
    classes: tuple[str, ...]
    """Names of the classes, by number."""
    sizes: tuple[int, ...]
    """Sizes of the files, in bytes."""

    def locations(self) -> Sequence[str]:
        """Return the paths of the files below `root`."""
        return self.files


@dataclass(frozen=True)
class ImageNet(Task):
    """Photographs in class folders, with the ImageNet networks of TernGrad and with ResNet-50."""

    inputs: ClassVar[str] = "images"
    paper_steps: ClassVar[str] = (
        "alexnet: 370,000 steps at batch 256; googlenet: 600,000 at batch 128; resnet50: 600,000 "
        "at batch 256"
    )
    evaluation_batch: ClassVar[int] = 100

    network: str = "alexnet"  # alexnet, googlenet or resnet50
    folder: str = "imagenet"  # folder of train and val below the data folder
    side: int = 224  # side of an example, in pixels
    dropout: float | None = None  # None: the network's default, as published for fp32 gradients
    augment: bool = True  # distort training images; False: prepare them like test images

    def __post_init__(self) -> None:
        check_network(self.network, NETWORKS)
        if self.side < LEAST_SIDE:
            raise ValueError(f"side {self.side}: expected at least {LEAST_SIDE} pixels")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ValueError(f"dropout {self.dropout}: expected at least 0 and below 1")

    def defaults(self) -> Mapping[str, Any]:
        """Return the recipe of the network's source, with a small fraction of its steps."""
        common = {"steps": 2000, "optimizer": "sgd", "momentum": 0.9, "nesterov": False}
        common["eval_every"] = 1000
        if self.network == "resnet50":
            return common | {
                "batch": 256,
                "lr": 0.1,
                "weight_decay": 1e-4,
                "decay": "update",
                "schedule": "step",
                "schedule_steps": [0.333, 0.667],
                "schedule_gamma": 0.1,
                "ema": 0.0,
            }
        common |= {"decay": "loss", "ema": 0.9999, "dense_last": True}
        if self.network == "googlenet":
            return common | {
                "batch": 128,
                "lr": 0.04,
                "weight_decay": 4e-5,
                "schedule": "poly",
                "schedule_power": 0.5,
            }
        return common | {
            "batch": 256,
            "lr": 0.01,
            "weight_decay": 5e-4,
            "schedule": "step",
            # 20, 40 and 60 of 73.93 epochs (370,000 steps of 256).
            "schedule_steps": [0.2705, 0.5410, 0.8116],
            "schedule_gamma": 0.1,
        }

    def load(self, data_dir: Path | None) -> tuple[Photos, Photos]:
        """Return the splits, lists of nonempty files, without decoding them.

        Raises:
            GcbenchError: folders or photographs are missing or empty, or train and val have
                different classes.
        """
        if data_dir is None:
            raise GcbenchError(f"imagenet: {_layout(Path('DATA') / self.folder)}")
        root = data_dir / self.folder
        try:
            train, test = (_photos(root, part) for part in ("train", "val"))
        except OSError as error:
            raise GcbenchError(f"imagenet: {error.filename}: {error.strerror}") from error
        if train.classes != test.classes:
            parts = [
                f"only {name} has {_some(set(mine.classes) - set(others.classes))}"
                for name, mine, others in (("train", train, test), ("val", test, train))
                if set(mine.classes) - set(others.classes)
            ]
            raise GcbenchError(
                f"imagenet: {root}: train and val must have the same class folders; "
                f"{' and '.join(parts)}"
            )
        return train, test

    def fingerprint(self, data_dir: Path | None) -> str:
        """Return the SHA-256 of every file's path, which contains its class, and size.

        Raises:
            GcbenchError: see `load`.
        """
        digest = hashlib.sha256()
        for split in self.load(data_dir):
            for name, size in zip(split.files, split.sizes, strict=True):
                digest.update(os.fsencode(name) + f"\0{size}\0".encode())
        return digest.hexdigest()

    def model(self) -> nn.Module:
        """Return the network for ImageNet's 1,000 classes, freshly initialized."""
        return self._network(1000)

    def model_for(self, train: Split) -> nn.Module:
        """Return the network for the classes of these photographs, freshly initialized."""
        assert isinstance(train, Photos)
        return self._network(len(train.classes))

    def _network(self, classes: int) -> nn.Module:
        rate = DROPOUT[self.network] if self.dropout is None else self.dropout
        return NETWORKS[self.network](classes, self.side, rate)

    def batch(self, split: Split, indices: Tensor, key: Key | None) -> Batch:
        """Return float32 images (b, 3, side, side) in channels-last memory.

        They are decoded with torch's number of threads.

        Raises:
            GcbenchError: a file is corrupt, truncated or not an image; the message names it.
        """
        assert isinstance(split, Photos)
        draws: list[list[float]] | list[None] = [None] * len(indices)
        if key is not None and self.augment:
            key = key._replace(stream=purposes.AUGMENT)
            draws = ops.random.uniform(key, 5 * len(indices)).view(-1, 5).tolist()
        paths = [split.root / split.files[place] for place in split.inputs[indices].tolist()]
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            pixels = torch.stack(list(pool.map(self._decode, paths, draws)))
        images = pixels.to(split.targets.device).permute(0, 3, 1, 2).float()
        mean, scale = (images.new_tensor(v).view(3, 1, 1) for v in SCALES[self.network])
        return Batch((images - mean) / scale, split.targets[indices])

    def _decode(self, path: Path, draws: list[float] | None) -> Tensor:
        """Return a photograph, prepared by five uniform draws or by none: uint8 (side, side, 3)."""
        from PIL import Image

        try:
            with Image.open(path) as file:
                photo = file.convert("RGB")
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise GcbenchError(
                f"imagenet: {path} cannot be decoded ({error}): it is corrupt, truncated or not an "
                "image. Download it again, or remove it from its folder; then start over with "
                "--force"
            ) from error
        box = self._box(*photo.size, draws)
        photo = photo.resize((self.side, self.side), Image.Resampling.BILINEAR, box)
        if draws is not None and draws[2] < 0.5:
            photo = photo.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.frombuffer(bytearray(photo.tobytes()), dtype=torch.uint8)
        return pixels.view(self.side, self.side, 3)

    def _box(self, width: int, height: int, draws: list[float] | None) -> Box:
        """Return the box to crop from a photograph of `width` x `height` pixels.

        The five draws, each in [0, 1), determine the horizontal and vertical position, the flip
        (not used here), the fraction of the area, and the aspect ratio. None: evaluation.
        """
        if draws is None:
            whole = (width, height)
            if self.network == "resnet50":
                whole = (min(whole), min(whole))
            w, h = (7 / 8 * side for side in whole)
            return _placed(width, height, w, h, 0.5, 0.5)
        left, top, _, area, aspect = draws
        if self.network == "alexnet":
            resized = round(self.side * 256 / 224)
            places = resized - self.side + 1
            # The fractions of the free space to the left of the crop and above it.
            left, top = (int(draw * places) / (places - 1) for draw in (left, top))
            cut = self.side / resized
            return _placed(width, height, cut * width, cut * height, left, top)
        least = LEAST_AREA[self.network]
        pixels = (least + (1 - least) * area) * width * height
        ratio = ASPECT ** (2 * aspect - 1)
        w, h = min(width, math.sqrt(pixels * ratio)), min(height, math.sqrt(pixels / ratio))
        return _placed(width, height, w, h, left, top)

    def metrics(self, outputs: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        """Return `top5`: whether the correct class is among the five with the largest outputs.

        Ties are broken by the lower class, as in `correct`.
        """
        first = outputs.argsort(stable=True, dim=1, descending=True)[:, :5]
        return {"top5": (first == targets[:, None]).any(1)}

    def decayed(self, parameter: str) -> bool:
        """Return whether weight decay applies: to weights, in `resnet50` to all parameters."""
        return self.network == "resnet50" or parameter.endswith("weight")


def _placed(width: int, height: int, w: float, h: float, left: float, top: float) -> Box:
    """Return a box of w x h pixels; `left`, `top`: its offset as a fraction of the free space."""
    x, y = left * (width - w), top * (height - h)
    return x, y, min(x + w, width), min(y + h, height)


def _layout(root: Path) -> str:
    """Return a description of the expected files, and how to set another folder."""
    return (
        f"expected {root}/train/CLASS/*.JPEG and {root}/val/CLASS/*.JPEG with the same class "
        "folders in both; nothing is downloaded (get the photographs from image-net.org). Set the "
        "parent folder with --data-dir or GCBENCH_DATA, another name with --task-set folder=NAME"
    )


def _some(names: set[str]) -> str:
    """Return up to three names of a set, and their number."""
    few = ", ".join(sorted(names)[:3])
    return few if len(names) <= 3 else f"{few}, ... ({len(names)} in all)"


def _photos(root: Path, part: str) -> Photos:
    """Return the photographs of one part, sorted by name."""
    folder = root / part
    if not folder.is_dir():
        raise GcbenchError(f"imagenet: {folder} is missing; {_layout(root)}")
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    if not classes:
        raise GcbenchError(f"imagenet: {folder} has no class folders; {_layout(root)}")
    photos: list[tuple[str, int]] = []
    targets: list[int] = []
    for number, name in enumerate(classes):
        paths = []
        with os.scandir(folder / name) as entries:
            for entry in entries:
                if entry.name.lower().endswith(ENDINGS) and not entry.name.startswith("."):
                    size = entry.stat().st_size
                    if not size:
                        raise GcbenchError(f"imagenet: {entry.path} is empty; download it again")
                    paths.append((f"{part}/{name}/{entry.name}", size))
        if not paths:
            ends = ", ".join(ENDINGS)
            raise GcbenchError(f"imagenet: {folder / name} has no photographs ({ends})")
        photos += sorted(paths)
        targets += [number] * len(paths)
    files, sizes = zip(*photos, strict=True)
    places = torch.arange(len(files))
    return Photos(places, torch.tensor(targets), root, files, tuple(classes), sizes)
