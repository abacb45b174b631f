"""Photographs in class folders: reading, preparing, the networks, dropout that engines agree on."""

from __future__ import annotations

import importlib
import io
import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from commands import invoke
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from gcbench import ops
from gcbench.core import purposes, registry
from gcbench.core.compressor import Key
from gcbench.core.errors import GcbenchError, UsageError
from gcbench.core.task import Split
from gcbench.results import reader
from gcbench.training import preflight, sinks
from gcbench.training.configuration import Config
from gcbench.training.dropout import Dropout, set_dropout_key
from gcbench.training.store import Run
from gcbench.training.train import Interrupted, Options, Trainer

imagenet = importlib.import_module("gcbench.tasks.imagenet")
models = importlib.import_module("gcbench.tasks._imagenet_models")

KEY = Key(seed=3, step=11, rank=1)
NETWORKS = ("alexnet", "googlenet", "resnet50")
LARGEST = 1 - 2.0**-24
"""The largest uniform draw."""


def task(network: str = "alexnet", **options: Any) -> Any:
    return registry.task("imagenet", network=network, **options)


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return a photograph whose neighbours resemble each other, as those of real ones do."""
    rough = np.random.default_rng(seed).integers(256, size=(7, 9, 3), dtype=np.uint8)
    return Image.fromarray(rough).resize((width, height), Image.Resampling.BICUBIC)


Tree = Callable[..., Path]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Return a function that makes a data folder: photographs, or bytes, by path below imagenet."""

    def make(**more: Image.Image | bytes) -> Path:
        files: dict[str, Image.Image | bytes] = {
            f"{part}/{name}/{place}.JPEG": noise(90, 70, seed=10 * place + len(name))
            for part, count in (("train", 3), ("val", 1))
            for name in ("n2", "n10")
            for place in range(count)
        }
        for path, content in (files | more).items():
            file = tmp_path / "imagenet" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                file.write_bytes(content)
            else:
                content.save(file, quality=95)
        return tmp_path

    return make


# ---- networks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("network", "parameters", "last"),
    [("alexnet", 60_965_224, 4096), ("googlenet", 6_617_624, 1024), ("resnet50", 25_557_032, 2048)],
)
def test_number_of_parameters(network: str, parameters: int, last: int) -> None:
    with torch.device("meta"):
        model = task(network).model()
    sizes = [p.numel() for p in model.parameters()]
    assert sum(sizes) == parameters
    assert sum(sizes[-2:]) == 1000 * last + 1000
    assert [name for name, _ in model.named_parameters()][-2:] == ["logits.weight", "logits.bias"]


def test_two_towers_are_convolutions_in_groups() -> None:
    """AlexNet in evaluation, by torch's grouped convolutions and its local response norm."""
    torch.manual_seed(0)
    model = models.AlexNet(7, 80, 0.5).eval()
    x = 1000 * torch.randn(2, 3, 80, 80)  # local response normalization is of large values

    def layer(towers: nn.ModuleList, x: Tensor, padding: int, groups: int) -> Tensor:
        weight = torch.cat([tower.conv.weight for tower in towers])
        bias = torch.cat([tower.norm.bias for tower in towers])
        y = F.conv2d(x, weight, padding=padding, groups=groups)
        return F.relu(y / math.sqrt(1 + 1e-3) + bias[:, None, None])

    def lrn(x: Tensor) -> Tensor:
        each = nn.LocalResponseNorm(5, alpha=5e-4, beta=0.75, k=2.0)
        return torch.cat([each(part) for part in x.chunk(2, 1)], 1)

    for tower in model.modules():
        if isinstance(tower, nn.BatchNorm2d):
            nn.init.uniform_(tower.bias, -1, 1)
    # TensorFlow's SAME at 80 pixels, window 11, stride 4: 7 pixels in all, 3 of them before.
    weight = torch.cat([tower.conv.weight for tower in model.conv1])
    bias = torch.cat([tower.norm.bias for tower in model.conv1])
    y = F.conv2d(F.pad(x, (3, 4, 3, 4)), weight, stride=4) / math.sqrt(1 + 1e-3)
    y = F.max_pool2d(lrn(F.relu(y + bias[:, None, None])), 3, 2)
    y = F.max_pool2d(lrn(layer(model.conv2, y, 2, 2)), 3, 2)
    y = layer(model.conv3, y, 1, 1)
    y = layer(model.conv5, layer(model.conv4, y, 1, 2), 1, 2)
    y = F.max_pool2d(y, 3, 2).flatten(1)
    for full in (model.fc6, model.fc7):
        y = F.relu(F.linear(y, full.weight, full.bias))
    y = F.linear(y, model.logits.weight, model.logits.bias)
    torch.testing.assert_close(model(x), y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("side", "kernel", "stride", "before", "after"),
    [(224, 11, 4, 3, 4), (224, 7, 2, 2, 3), (112, 3, 2, 0, 1), (7, 3, 2, 1, 1), (27, 5, 1, 2, 2)],
)
def test_same_padding_is_tensorflows(
    side: int, kernel: int, stride: int, before: int, after: int
) -> None:
    x = torch.ones(1, 1, side, side)
    padded = models._same(x, kernel, stride, -1.0)
    assert padded.shape[-1] == padded.shape[-2] == before + side + after
    edges = padded[0, 0, before]
    assert (edges == -1).nonzero().flatten().tolist() == [
        *range(before),
        *range(before + side, before + side + after),
    ]
    assert F.max_pool2d(padded, kernel, stride).shape[-1] == math.ceil(side / stride)


@pytest.mark.parametrize("network", ["googlenet", "resnet50"])
def test_networks_reduce_the_side_to_a_32nd(network: str) -> None:
    with torch.device("meta"):
        model = task(network).model().eval()
        last = model.stage5 if network == "googlenet" else model.body
        sides = []
        last.register_forward_hook(lambda *result: sides.append(tuple(result[2].shape[1:])))
        assert model(torch.empty(1, 3, 224, 224)).shape == (1, 1000)
    assert sides == [({"googlenet": 1024, "resnet50": 2048}[network], 7, 7)]


def test_recipes_and_what_decays() -> None:
    recipes = {name: task(name).defaults() for name in NETWORKS}
    texts = {n: (r["batch"], r["lr"], r["weight_decay"], r["decay"]) for n, r in recipes.items()}
    assert texts == {
        "alexnet": (256, 0.01, 5e-4, "loss"),
        "googlenet": (128, 0.04, 4e-5, "loss"),
        "resnet50": (256, 0.1, 1e-4, "update"),
    }
    epochs = 370_000 * 256 / 1_281_167
    marks = [epochs * mark for mark in recipes["alexnet"]["schedule_steps"]]
    assert marks == pytest.approx([20, 40, 60], abs=0.01)
    assert Config.make({"task": "imagenet"}).dense_last
    assert not Config.make({"task": "imagenet", "dense_last": False}).dense_last
    for network in NETWORKS:
        with torch.device("meta"):
            model = task(network).model()
            rates = {m.rate for m in model.modules() if isinstance(m, Dropout)}
        assert rates == {{"alexnet": 0.5, "googlenet": 0.2, "resnet50": 0.0}[network]}
        norms = {
            f"{prefix}.{leaf}"
            for prefix, module in model.named_modules()
            for leaf, parameter in module.named_parameters(recurse=False)
            if parameter.ndim == 1
        }
        for name, _ in model.named_parameters():
            assert task(network).decayed(name) == (network == "resnet50" or name not in norms)
    with torch.device("meta"):
        changed = task("googlenet", dropout=0.08).model()
    assert changed.drop.rate == 0.08


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"network": "alexnett"}, "Did you mean 'alexnet'.*googlenet, resnet50"),
        ({"side": 63}, "side 63: expected at least 64"),
        ({"dropout": 1.0}, "dropout 1.0: expected at least 0"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        task(**options)


# ---- dropout -------------------------------------------------------------------------------------


def drop(rate: float, key: Key | None, x: Tensor) -> Tensor:
    layer = Dropout(rate)
    layer.key = key
    return layer(x)


@pytest.mark.parametrize("rate", [0.08, 0.5])
def test_dropout_drops_its_share_and_scales_the_rest(rate: float) -> None:
    before = torch.get_rng_state()
    x = torch.full((100, 20, 10), 3.0)
    y = drop(rate, KEY, x)
    share = (y == 0).float().mean().item()
    # Five standard deviations of the share: wrong in one of 1.7 million seeds.
    assert share == pytest.approx(rate, abs=5 * math.sqrt(rate * (1 - rate) / x.numel()))
    assert torch.equal(y[y != 0], torch.full_like(y[y != 0], 3.0) * (1 / (1 - rate)))
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_changes_nothing_in_evaluation_or_at_rate_zero() -> None:
    x = torch.randn(9)
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0)(x) is x
    with pytest.raises(RuntimeError, match="set_dropout_key"):
        Dropout(0.5)(x)
    with pytest.raises(ValueError, match=r"dropout -0.1"):
        Dropout(-0.1)


def test_masks_differ_between_layers_seeds_steps_and_workers() -> None:
    model = nn.Sequential(Dropout(0.5), nn.Sequential(nn.Identity(), Dropout(0.5)))
    x = torch.ones(1000)
    masks = []
    for key in (KEY, KEY._replace(seed=4), KEY._replace(step=12), KEY._replace(rank=0)):
        set_dropout_key(model, key)
        masks += [model[0](x), model[1](x)]
        set_dropout_key(model, key._replace(stream=purposes.AUGMENT))
        assert torch.equal(model[0](x), masks[-2]), "the purpose of the key is dropout's"
    for place, mask in enumerate(masks):
        for other in masks[:place]:
            # Independent masks agree in half of 1,000 places, within five standard deviations.
            assert abs((mask == other).sum().item() - 500) < 5 * math.sqrt(250)


@pytest.mark.parametrize(
    ("layer", "gradients", "message"),
    [
        (nn.Dropout(0.1), "loop", r"1 of the model is torch's Dropout, .*use gcbench\.Dropout"),
        (nn.Dropout2d(0.1), "loop", "torch's Dropout2d"),
        (Dropout(0.1), "batched", "gradients=loop"),
        (nn.Dropout(0.0), "loop", None),
        (Dropout(0.0), "batched", None),
        (Dropout(0.1), "loop", None),
    ],
)
def test_masks_that_engines_cannot_share_are_refused(
    monkeypatch, simulated, tmp_path, layer, gradients, message
) -> None:
    def model(self):
        return nn.Sequential(nn.Flatten(), layer, nn.Linear(64, 10))

    monkeypatch.setattr(registry.task_class("digits"), "model", model)
    settings = {"task": "digits", "workers": 2, "gradients": gradients}
    created = (Config.make(settings), simulated(2), Run(tmp_path), Options())
    if message is None:
        Trainer(*created).train_step()
    else:
        with pytest.raises(UsageError, match=message):
            Trainer(*created)


# ---- reading -------------------------------------------------------------------------------------


def test_classes_are_numbered_by_name_and_files_sorted(tree: Tree) -> None:
    other = {"train/n10/a.png": noise(80, 80), "train/n2/.hidden.JPEG": b"", "train/n2/x.txt": b"?"}
    train, test = task().load(tree(**other))
    assert train.classes == test.classes == ("n10", "n2")
    assert train.files == (
        *(f"train/n10/{name}" for name in ("0.JPEG", "1.JPEG", "2.JPEG", "a.png")),
        *(f"train/n2/{place}.JPEG" for place in range(3)),
    )
    assert train.targets.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert test.targets.tolist() == [0, 1]
    with torch.device("meta"):
        assert task("googlenet").model_for(train).logits.out_features == 2


def test_selected_photos_are_the_same_photos(tree: Tree) -> None:
    train, _ = task().load(tree())
    some = train.select(torch.tensor([5, 2])).to(torch.device("cpu"))
    assert isinstance(some, imagenet.Photos)
    assert len(some) == 2
    created = task(side=64)
    batch = created.batch(some, torch.tensor([1, 0, 1]), KEY)
    expected = created.batch(train, torch.tensor([2, 5, 2]), KEY)
    torch.testing.assert_close(batch, expected, rtol=0, atol=0)
    plain = Split(torch.arange(6).view(3, 2), torch.tensor([7, 8, 9])).select(torch.tensor([2, 0]))
    assert (plain.inputs.tolist(), plain.targets.tolist()) == ([[4, 5], [0, 1]], [9, 7])


@pytest.mark.parametrize(
    ("more", "gone", "message"),
    [
        (
            {},
            "train",
            r"imagenet/train is missing; expected .*/train/CLASS/\*\.JPEG and .*/val",
        ),
        ({}, "val/n2", r"same class folders; only train has n2$"),
        ({"val/n3/0.JPEG": b"?"}, "val/n10", "only train has n10 and only val has n3$"),
        ({f"val/m{i}/0.JPEG": b"?" for i in range(5)}, None, r"val has m0, m1, m2, \.\.\. \(5 in"),
        ({}, "val/n2/0.JPEG", r"val/n2 has no photographs \(\.jpeg, \.jpg"),
        ({"train/n2/1.JPEG": b""}, None, r"train/n2/1\.JPEG is empty"),
    ],
)
def test_what_is_missing_is_said(
    tree: Tree, more: dict[str, bytes], gone: str | None, message: str
) -> None:
    folder = tree(**more)
    if gone is not None:
        path = folder / "imagenet" / gone
        path.unlink() if path.is_file() else path.rename(folder / "elsewhere")
    with pytest.raises(GcbenchError, match=message):
        task().load(folder)


def test_photographs_without_class_folders_and_without_a_data_folder(tmp_path: Path) -> None:
    for part in ("train", "val"):
        (tmp_path / "flat" / part).mkdir(parents=True)
        noise(80, 80).save(tmp_path / "flat" / part / "0.JPEG")
    with pytest.raises(GcbenchError, match=r"flat/train has no class folders"):
        task(folder="flat").load(tmp_path)
    with pytest.raises(GcbenchError, match=r"DATA/flat/train/CLASS.*--data-dir or GCBENCH_DATA"):
        task(folder="flat").load(None)


def damaged(kind: str) -> bytes:
    file = io.BytesIO()
    noise(400, 300).save(file, "PNG" if kind.endswith("png") else "JPEG", quality=95)
    whole = file.getvalue()
    if kind == "no picture":
        return b"<html>not found</html>"
    return whole[: len(whole) // 2]


def test_the_fingerprint_is_that_of_names_and_sizes(tree: Tree, tmp_path: Path) -> None:
    data = tree()
    digests = [task().fingerprint(data)]
    copied = Path(shutil.copytree(data / "imagenet", tmp_path / "copy" / "imagenet"))
    assert task("resnet50").fingerprint(copied.parent) == digests[0]
    renamed = copied / "train" / "n2" / "2.JPEG"
    renamed.rename(renamed.with_name("9.JPEG"))
    digests.append(task().fingerprint(copied.parent))
    with (copied / "val" / "n10" / "0.JPEG").open("ab") as file:
        file.write(b"\0")
    digests.append(task().fingerprint(copied.parent))
    (copied / "train" / "n2" / "1.JPEG").unlink()
    digests.append(task().fingerprint(copied.parent))
    assert len({*digests}) == 4
    assert registry.task("digits").fingerprint(None) == ""
    train, _ = task().load(data)
    other = replace(train, files=tuple(reversed(train.files)))
    assert preflight.digest(train, None) != preflight.digest(other, None)


def test_a_run_is_tied_to_its_photographs(tree: Tree, tmp_path: Path, monkeypatch) -> None:
    """It is neither skipped nor resumed with others, which are other examples or another order."""

    def network(self, classes):
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, classes))

    monkeypatch.setattr(imagenet.ImageNet, "_network", network)
    data, rows = tree(), tmp_path / "rows.parquet"
    other = Path(shutil.copytree(data / "imagenet", tmp_path / "other" / "imagenet"))
    (other / "train" / "n2" / "1.JPEG").unlink()
    words = ("run", "--task", "imagenet", "--task-set", "side=64", "--batch", 2, "--workers", 1)
    words += ("--steps", 2, "--progress", "none", "--results", tmp_path / "runs")

    def run(folder: Path, *more: object) -> Any:
        return invoke(*words, "--data-dir", folder, *more)

    def refused(folder: Path, *more: object) -> None:
        done = run(folder, *more)
        assert done.code == 1
        assert "--data-dir" in done.err
        assert "--force" in done.err

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_pause", lambda *_: "stop")
        assert run(data).code == 130
    refused(other.parent)
    done = run(data, "--rows", rows, "--json")
    assert "resuming from checkpoint" in done.err
    assert done.json["provenance"]["data"] == task().fingerprint(data)
    assert "skipped" in run(data).err
    refused(other.parent)
    refused(other.parent, "--rows", rows, "--results", tmp_path / "elsewhere")
    assert run(other.parent, "--force").code == 0


@pytest.mark.parametrize("kind", ["cut jpeg", "cut png", "no picture"])
def test_a_damaged_photograph_is_named(tree: Tree, kind: str) -> None:
    folder = tree(**{"train/n2/1.JPEG": damaged(kind)})
    train, _ = task().load(folder)
    place = train.files.index("train/n2/1.JPEG")
    message = r"imagenet/train/n2/1\.JPEG cannot be decoded \("
    with pytest.raises(GcbenchError, match=message):
        task(side=64).batch(train, torch.tensor([0, place]), KEY)


def test_a_damaged_photograph_ends_a_run_in_one_line(tree: Tree, tmp_path: Path) -> None:
    folder = tree(**{"train/n2/1.JPEG": damaged("cut jpeg")})
    shape = ("--task-set", "side=64", "--network", "googlenet", "--batch", 6, "--steps", 1)
    text = invoke(
        *("run", "--task", "imagenet", *shape, "--workers", 2, "--data-dir", folder),
        *("--results", tmp_path / "runs"),
    )
    assert text.code == 1
    (line,) = (line for line in text.err.splitlines() if line.startswith("gcbench: "))
    assert "train/n2/1.JPEG cannot be decoded" in line


# ---- preparing -----------------------------------------------------------------------------------


def test_every_kind_of_picture_becomes_rgb(tree: Tree) -> None:
    colour = Image.new("RGB", (80, 90), (10, 200, 30))
    pictures = {
        "train/n2/cmyk.jpg": Image.new("CMYK", (80, 90), (40, 80, 120, 10)),
        "train/n2/gray.JPEG": Image.new("L", (80, 90), 77),
        "train/n2/palette.png": colour.convert("P", palette=Image.Palette.ADAPTIVE),
        "train/n2/rgb.png": colour,
    }
    expected = {
        "cmyk.jpg": pictures["train/n2/cmyk.jpg"].convert("RGB").getpixel((0, 0)),
        "gray.JPEG": (77, 77, 77),
        "palette.png": (10, 200, 30),
        "rgb.png": (10, 200, 30),
    }
    train, _ = task().load(tree(**pictures))
    places = torch.tensor([train.files.index(f"train/n2/{name}") for name in expected])
    pixels = torch.tensor(list(expected.values())).float()[:, :, None, None].expand(-1, -1, 64, 64)
    for network, mean, scale in (
        ("alexnet", (123.68, 116.78, 103.94), (1, 1, 1)),
        ("googlenet", (127.5,) * 3, (127.5,) * 3),
        ("resnet50", (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)),
    ):
        for key in (None, KEY):
            batch = task(network, side=64).batch(train, places, key)
            assert batch.inputs.dtype == torch.float32
            assert batch.inputs.stride() == (3 * 64 * 64, 1, 3 * 64, 3)
            assert batch.targets.tolist() == [1] * 4
            left, scaled = (torch.tensor(v).view(3, 1, 1) for v in (mean, scale))
            result = batch.inputs * scaled + left
            # JPEG moves the values of flat pictures by a level or two.
            torch.testing.assert_close(result, pixels, rtol=0, atol=2.5)


def test_alexnet_crops_what_was_resized(tree: Tree) -> None:
    """Resize to 256 x 256, crop 224 and mirror, as TernGrad's code does, by Pillow's own steps."""
    photo = noise(300, 500)
    train, _ = task().load(tree(**{"train/n2/0.png": photo}))
    index = torch.tensor([train.files.index("train/n2/0.png")])
    whole = photo.resize((256, 256), Image.Resampling.BILINEAR)
    mean = torch.tensor((123.68, 116.78, 103.94)).view(3, 1, 1)
    flips = set()
    for step in range(6):
        key = KEY._replace(step=step)
        left, top, flip = ops.random.uniform(key._replace(stream=purposes.AUGMENT), 5)[:3].tolist()
        x, y = int(33 * left), int(33 * top)
        cut = np.asarray(whole.crop((x, y, x + 224, y + 224)), dtype=np.float32)
        flips.add(flip < 0.5)
        expected = torch.from_numpy(cut[:, ::-1].copy() if flip < 0.5 else cut).permute(2, 0, 1)
        result = task().batch(train, index, key).inputs[0] + mean
        # A box is resized from its own pixels: at its edges it lacks the neighbours.
        inner = (slice(None), slice(3, -3), slice(3, -3))
        torch.testing.assert_close(result[inner], expected[inner], rtol=0, atol=2)
    assert flips == {True, False}


def test_boxes_lie_in_the_photograph_and_cover_the_published_range() -> None:
    draws = [[0.0] * 5, [LARGEST] * 5, *ops.random.uniform(KEY, 5 * 2000).view(-1, 5).tolist()]
    for created in map(task, NETWORKS):
        for width, height in ((500, 375), (224, 224), (60, 400), (1, 1)):
            for local in (*draws[:200], None):
                left, top, right, bottom = created._box(width, height, local)
                assert 0 <= left < right <= width
                assert 0 <= top < bottom <= height
    alexnet = task()
    assert alexnet._box(512, 256, [0.0] * 5) == (0, 0, 448, 224)
    assert alexnet._box(512, 256, [LARGEST] * 5) == (64, 32, 512, 256)
    assert alexnet._box(512, 256, [0.5, 0.5, 0, 0, 0]) == (32, 16, 480, 240)
    for created, least in ((task("googlenet"), 0.05), (task("resnet50"), 0.08)):
        boxes = [created._box(1000, 1000, local) for local in draws]
        shares = torch.tensor([(r - x) * (b - y) / 1e6 for x, y, r, b in boxes])
        ratios = torch.tensor([(r - x) / (b - y) for x, y, r, b in boxes])
        assert shares[0].item() == pytest.approx(least)
        assert shares.min() >= least - 1e-6
        # A square fits whole up to 3/4 of the area: there the share is uniform, in every tenth
        # of its range to five standard deviations of a count.
        edges = torch.linspace(least, 0.75, 11)
        counts = torch.histogram(shares[2:], edges).hist
        chance = (0.75 - least) / (1 - least) / 10
        assert counts.tolist() == pytest.approx(
            [2000 * chance] * 10, abs=5 * math.sqrt(2000 * chance)
        )
        small = ratios[2:][shares[2:] < 0.75]
        assert small.min() == pytest.approx(3 / 4, abs=0.01)
        assert small.max() == pytest.approx(4 / 3, abs=0.01)
        assert small.log().mean().item() == pytest.approx(0, abs=5 * 0.166 / math.sqrt(len(small)))


def test_evaluation_takes_the_middle() -> None:
    assert task()._box(512, 256, None) == (32, 16, 480, 240)
    assert task("googlenet")._box(512, 256, None) == (32, 16, 480, 240)
    # The shorter side is 256 then, and the box 224 x 224 in its middle.
    assert task("resnet50")._box(512, 256, None) == (144, 16, 368, 240)


@pytest.mark.parametrize("network", NETWORKS)
def test_augmentation_is_the_keys_alone(tree: Tree, network: str) -> None:
    train, _ = task().load(tree())
    created, some = task(network, side=64), torch.zeros(4, dtype=torch.long)
    before = torch.get_rng_state()
    keys = [KEY, KEY._replace(seed=4), KEY._replace(step=12), KEY._replace(rank=0)]
    seen = [created.batch(train, some, key).inputs for key in keys]
    assert torch.equal(torch.get_rng_state(), before)
    for place, local in enumerate(seen):
        # Of alexnet's 200 crops of this size two may agree.
        assert len(local.unique(dim=0)) >= 3
        for other in seen[:place]:
            assert (local - other).abs().amax((1, 2, 3)).count_nonzero() >= 3
    torch.set_num_threads(3)  # of decoding; undone after every test
    assert torch.equal(created.batch(train, some, KEY).inputs, seen[0])
    plain = task(network, side=64, augment=False).batch(train, some, KEY).inputs
    assert torch.equal(plain, created.batch(train, some, None).inputs)


def test_top_5_by_hand() -> None:
    outputs = torch.tensor(
        [
            [9.0, 8, 7, 6, 5, 4, 3],
            [9.0, 8, 7, 6, 5, 4, 3],
            [9.0, 8, 7, 6, 5, 4, 3],
            [1.0, 1, 1, 1, 1, 1, 1],
            [1.0, 1, 1, 1, 1, 1, 1],
        ]
    )
    targets = torch.tensor([0, 4, 5, 4, 5])
    result = task().metrics(outputs, targets)["top5"]
    assert result.tolist() == [True, True, False, True, False]
    assert task().metrics(outputs[:, :3], targets.clamp_max(2))["top5"].all()


def test_a_sink_hears_of_top_5() -> None:
    texts: dict[str, float] = {}
    sink = sinks.TensorBoard()
    sink.started = 0.0
    add = lambda tag, value, *_: texts.update({tag: value})  # noqa: E731
    sink.writer = SimpleNamespace(add_scalar=add, flush=lambda: None)
    result = {"test_accuracy": 0.25, "test_loss": 2.0, "test_top5": 0.5, "validation_top5": 0.75}
    sink.record({"kind": "eval", "step": 3, "seconds": 1.0, "payload_bytes_up": 9.0, **result})
    assert texts == {
        "accuracy/test": 0.25,
        "loss/test": 2.0,
        "top5/test": 0.5,
        "top5/validation": 0.75,
    }


# ---- runs on real photographs --------------------------------------------------------------------


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """A data folder with `few`: of each class of the sample, two photographs and one to test."""
    sample = Path(os.environ.get("GCBENCH_DATA") or "/nowhere") / "imagenet-sample"
    if not sample.is_dir():
        pytest.skip("GCBENCH_DATA has no folder imagenet-sample: no real photographs here")
    data = tmp_path_factory.mktemp("data")
    for part, count in (("train", 2), ("val", 1)):
        for source in sorted((sample / part).iterdir()):
            (data / "few" / part / source.name).mkdir(parents=True)
            for file in sorted(source.iterdir())[:count]:
                (data / "few" / part / source.name / file.name).symlink_to(file)
    return data


QUICK = (
    "--task-set",
    "folder=few",
    "--task-set",
    "side=64",
    "--workers",
    2,
    "--batch",
    4,
    "--holdout",
    5,
)


@pytest.fixture(scope="module")
def run(photos: Path, tmp_path_factory) -> Callable[..., Any]:
    """Return a function that trains a network for two steps: the folder of the run."""

    @cache
    def created(network: str, *words: object) -> Path:
        results = tmp_path_factory.mktemp("runs")
        command = ("run", "--task", "imagenet", "--network", network, *QUICK, "--steps", 2)
        options = ("--log-every", 1, "--threads", 1, "--json", "--progress", "none")
        where = ("--data-dir", photos, "--results", results)
        summary = invoke(*command, *options, *where, *words).json
        return results / f"imagenet-terngrad-{summary['config_hash']}"

    return created


def summary_of(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return result


@pytest.mark.parametrize("network", NETWORKS)
def test_a_run_on_photographs(run, network: str) -> None:
    folder = run(network)
    summary = summary_of(folder)
    assert math.isfinite(summary["train_loss"])
    assert 0 <= summary["test_accuracy"] <= summary["test_top5"] <= 1
    for metric in ("test_accuracy", "test_top5"):
        assert summary[metric] * 10 == pytest.approx(round(summary[metric] * 10)), "of 10 photos"
    assert summary["config"]["dense_last"] == (network != "resnet50")
    (created,) = reader.load([folder])
    (evaluation,) = created.evaluations()
    assert evaluation["test_top5"] == summary["test_top5"]
    assert evaluation["validation_top5"] * 5 == pytest.approx(
        round(5 * evaluation["validation_top5"])
    )


@pytest.mark.usefixtures("forked")
def test_simulated_workers_are_processes(run) -> None:
    """Batch norm, dropout and augmentation: the same bits, in records and parameters."""
    folders = run("googlenet"), run("googlenet", "--engine", "spawn")
    here, there = map(summary_of, folders)
    assert (here["engine"], there["engine"]) == ("simulate", "spawn")
    for key in ("params_sha256", "train_loss", "test_loss", "test_accuracy", "test_top5"):
        assert here[key] == there[key], key
    records = []
    for folder in folders:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        records.append([{**json.loads(line), "seconds": 0} for line in lines])
    assert records[0] == records[1]


def test_a_run_that_was_stopped_ends_in_the_same_bits(
    run, photos: Path, tmp_path: Path, simulated
) -> None:
    whole = summary_of(run("googlenet"))
    config = Config.model_validate(whole["config"])
    stopped = Run(tmp_path)
    first, second = (
        Trainer(config, simulated(2), stopped, Options(photos, checkpoint_seconds=1e9))
        for _ in range(2)
    )
    with pytest.raises(Interrupted):
        first.fit(lambda: first.step == 1)
    second.fit()
    assert second.parameter_hash() == whole["params_sha256"]
