from __future__ import annotations

import copy
import importlib
import math
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from gcbench import ops
from gcbench.core import purposes, registry
from gcbench.core.compressor import Key
from gcbench.core.errors import UsageError
from gcbench.core.task import Split, Task

models = importlib.import_module("gcbench.tasks._models")
cifar10 = importlib.import_module("gcbench.tasks.cifar10")
shakespeare = importlib.import_module("gcbench.tasks.shakespeare")

KEY = Key(seed=3, step=11, rank=1)
BUILT_IN = [
    ("quadratic", {}),
    ("digits", {}),
    ("digits", {"network": "conv"}),
    ("mnist", {}),
    ("mnist", {"network": "lenet-caffe"}),
    ("cifar10", {}),
    ("cifar10", {"network": "resnet20"}),
    ("cifar10", {"network": "resnet32", "augment": False}),
    ("shakespeare", {"layers": 2, "width": 32}),
]
SHAPES = {"mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
SETTINGS = {
    *("batch", "steps", "optimizer", "lr", "momentum", "nesterov", "weight_decay", "decay"),
    *("schedule", "schedule_power", "schedule_steps", "schedule_gamma", "ema", "eval_every"),
}


def images(n: int, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (n, *shape), dtype=torch.uint8, generator=generator)


def text(n: int, seed: int = 0) -> Tensor:
    """Return n tokens of noise."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(65, (n,), dtype=torch.uint8, generator=generator)


def split_of(task: Task, n: int = 64) -> Split:
    """Return n training examples; of noise where the real ones are not at hand."""
    if task.name == "shakespeare":
        return shakespeare.blocks(text(n * task.context + 1), task.context)
    if task.name not in SHAPES:
        return task.load(None)[0]
    return Split(images(n, *SHAPES[task.name]), torch.arange(n) % 10)


def fresh(task: Task, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return task.model()


# ---- every task ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), BUILT_IN)
def test_contract(name: str, options: dict[str, Any]) -> None:
    task = registry.task(name, **options)
    assert eval(repr(task), {type(task).__name__: type(task)}) == task
    assert set(task.defaults()) <= SETTINGS
    assert {"batch", "steps", "optimizer", "lr"} <= set(task.defaults())

    split = split_of(task)
    before = torch.get_rng_state()
    indices = torch.tensor([5, 0, 63, 7])
    batch, again = (task.batch(split, indices, KEY) for _ in range(2))
    torch.testing.assert_close(batch, again, rtol=0, atol=0)
    assert batch.inputs.dtype in (torch.float32, torch.int64), "numbers, or indices of tokens"
    assert torch.equal(batch.targets, split.targets[indices])
    assert torch.equal(torch.get_rng_state(), before), "the global generator was touched"

    model, same, other = fresh(task), fresh(task), fresh(task, seed=1)
    outputs = model(batch.inputs)
    assert torch.equal(outputs, same(batch.inputs)), "one seed, one model"
    assert not torch.equal(outputs, other(batch.inputs))
    loss = task.loss(outputs, batch.targets)
    loss.backward()
    assert loss.shape == ()
    for parameter, value in model.named_parameters():
        assert value.grad is not None, parameter
        assert value.grad.abs().max() > 0, parameter
    correct = task.correct(outputs, batch.targets)
    assert correct is None or (correct.shape, correct.dtype) == ((4,), torch.bool)


@pytest.mark.parametrize(("name", "options"), BUILT_IN)
def test_evaluation_is_deterministic_and_ignores_the_neighbours(
    name: str, options: dict[str, Any]
) -> None:
    task = registry.task(name, **options)
    split = split_of(task)
    some = task.batch(split, torch.tensor([4, 9]), None).inputs
    assert torch.equal(some, task.batch(split, torch.tensor([1, 2, 4, 9]), None).inputs[2:])


@pytest.mark.parametrize(("name", "options"), [case for case in BUILT_IN if case[0] != "quadratic"])
def test_threads_with_shared_parameters_compute_what_one_does(
    name: str, options: dict[str, Any]
) -> None:
    task = registry.task(name, **options)
    model, split = fresh(task), split_of(task)
    parameters = list(model.parameters())

    def replica() -> nn.Module:
        return copy.deepcopy(model, {id(p): p for p in parameters})

    def gradients(rank: int, net: nn.Module) -> list[Tensor]:
        batch = task.batch(split, torch.arange(8) + 8 * rank, KEY._replace(rank=rank))
        return list(torch.autograd.grad(task.loss(net(batch.inputs), batch.targets), parameters))

    alone = [gradients(rank, replica()) for rank in range(4)]
    together: dict[int, list[Tensor]] = {}
    nets = [replica() for _ in range(4)]

    def work(rank: int) -> None:
        together[rank] = gradients(rank, nets[rank])

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(4):
        torch.testing.assert_close(together[rank], alone[rank], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "options"), [case for case in BUILT_IN if "resnet" not in str(case[1])]
)
def test_vmap_over_workers(name: str, options: dict[str, Any]) -> None:
    task = registry.task(name, **options)
    model, split = fresh(task), split_of(task)
    parameters = dict(model.named_parameters())
    batches = [task.batch(split, torch.arange(3) + 3 * i, KEY._replace(rank=i)) for i in range(2)]

    def loss(values: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        return task.loss(functional_call(model, values, (inputs,)), targets)

    inputs, targets = (torch.stack(part) for part in zip(*batches, strict=True))
    both = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, inputs, targets)
    for i, batch in enumerate(batches):
        one = grad(loss)(parameters, *batch)
        for parameter, value in one.items():
            torch.testing.assert_close(both[parameter][i], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("digits", {"network": "mpl"}, r"'digits': unknown network 'mpl'. Did .*'mlp'.*conv, mlp"),
        ("digits", {"hidden": 0}, "hidden 0: expected at least 1"),
        ("mnist", {"network": "LeNet"}, "Known: lenet, lenet-caffe"),
        (
            "cifar10",
            {"network": "resnet56"},
            "Did you mean 'resnet..'.*cifarnet, resnet20, resnet32",
        ),
        ("quadratic", {"dimension": 0}, "dimension 0"),
        ("quadratic", {"condition": 0.5}, "condition 0.5"),
        ("quadratic", {"condition": math.nan}, "condition nan"),
        ("quadratic", {"noise": -1.0}, "noise -1.0"),
        ("shakespeare", {"layers": 0}, "layers 0"),
        ("shakespeare", {"context": 0}, "context 0"),
        ("shakespeare", {"width": 130}, "width 130: .*heads 4"),
    ],
)
def test_bad_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        registry.task(name, **options)


@pytest.mark.parametrize(
    ("name", "options", "parameters"),
    [
        ("quadratic", {"dimension": 7}, 7),
        ("digits", {}, 64 * 128 + 128 + 128 * 10 + 10),
        ("digits", {"network": "conv"}, 22_602),
        ("mnist", {}, 1_256_080),
        ("mnist", {"network": "lenet-caffe"}, 431_080),
        ("cifar10", {}, 1_068_298),
        ("cifar10", {"network": "resnet20"}, 269_722),
        ("cifar10", {"network": "resnet32"}, 464_154),
        ("shakespeare", {}, 818_176),
        # Embeddings and logits; a layer's norms, attention and perceptron; the last norm.
        (
            "shakespeare",
            {"layers": 3, "width": 8, "heads": 2, "context": 5},
            (2 * 65 + 5) * 8 + 3 * (4 * 8 + 4 * 8 * 8 + 4 * 8 + 8 * 8 * 8 + 5 * 8) + 2 * 8,
        ),
    ],
)
def test_number_of_parameters(name: str, options: dict[str, Any], parameters: int) -> None:
    model = registry.task(name, **options).model()
    assert sum(p.numel() for p in model.parameters()) == parameters


# ---- quadratic -----------------------------------------------------------------------------------


def test_quadratic_gradient_is_curvature_times_distance_plus_mean_noise() -> None:
    task = registry.task("quadratic", dimension=5, condition=16.0, noise=3.0)
    model, (train, test) = fresh(task), task.load(None)
    curvature = torch.tensor([1.0, 0.5, 0.25, 0.125, 0.0625])
    minimum = torch.tensor([math.sin(i + 1) for i in range(5)])
    point = torch.tensor([3.0, -1.0, 0.0, 2.0, 5.0])
    with torch.no_grad():
        model.x.copy_(point)
    batch = task.batch(train, torch.arange(6), KEY)
    noise = 3 * ops.random.normal(KEY._replace(stream=purposes.NOISE), 30).view(6, 5)
    task.loss(model(batch.inputs), batch.targets).backward()
    torch.testing.assert_close(model.x.grad, curvature * (point - minimum) + noise.mean(0))

    exact = task.batch(test, torch.tensor([0]), None)
    gap = task.loss(model(exact.inputs), exact.targets)
    torch.testing.assert_close(gap, (curvature * (point - minimum) ** 2).sum() / 2)
    with torch.no_grad():
        model.x.copy_(minimum)
    assert task.loss(model(exact.inputs), exact.targets).item() == pytest.approx(0, abs=1e-12)


def test_quadratic_starts_at_distance_one_in_every_coordinate() -> None:
    task = registry.task("quadratic")
    starts = [fresh(task, seed).x.detach() for seed in range(2)]
    minimum = fresh(task).minimum
    for start in starts:
        torch.testing.assert_close((start - minimum).abs(), torch.ones_like(start))
    assert not torch.equal(*starts)


def test_quadratic_noise_has_its_deviation_and_differs_between_workers() -> None:
    task = registry.task("quadratic", dimension=500, noise=0.5)
    train = task.load(None)[0]
    a = task.batch(train, torch.arange(200), KEY).inputs
    b = task.batch(train, torch.arange(200), KEY._replace(rank=2)).inputs
    assert a.std().item() == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(2 * a.numel()))
    assert a.mean().item() == pytest.approx(0, abs=5 * 0.5 / math.sqrt(a.numel()))
    correlation = (a * b).mean().item() / 0.25
    assert correlation == pytest.approx(0, abs=5 / math.sqrt(a.numel()))


def test_quadratic_sgd_ends_at_the_plateau_of_its_card() -> None:
    task = registry.task("quadratic")
    d = task.defaults()
    model, (train, test) = fresh(task), task.load(None)
    exact = task.batch(test, torch.tensor([0]), None)
    gaps = []
    for step in range(900):
        batch = task.batch(train, torch.arange(d["batch"]), Key(0, step, 0))
        loss = task.loss(model(batch.inputs), batch.targets)
        (gradient,) = torch.autograd.grad(loss, [model.x])
        with torch.no_grad():
            model.x -= d["lr"] * gradient
            if step >= 500:
                gaps.append(task.loss(model(exact.inputs), exact.targets).item())
    curvature = model.curvature
    plateau = d["lr"] * task.noise**2 / (2 * d["batch"]) * (1 / (2 - d["lr"] * curvature)).sum()
    assert np.mean(gaps) == pytest.approx(plateau.item(), rel=0.1)


# ---- digits --------------------------------------------------------------------------------------


def test_digits_split_is_fixed_disjoint_and_scaled() -> None:
    task = registry.task("digits")
    train, test = task.load(None)
    assert (len(train), len(test)) == (1437, 360)
    # The file begins 0 1 2 3 4 5 6 7 8 9, twice: every fifth one is 0 or 5.
    assert test.targets[:4].tolist() == [0, 5, 0, 5]
    assert train.targets[:8].tolist() == [1, 2, 3, 4, 6, 7, 8, 9]
    batch = task.batch(train, torch.arange(1437), KEY)
    assert (batch.inputs.min().item(), batch.inputs.max().item()) == (-1, 1)
    assert torch.equal(batch.inputs, train.inputs.float() / 8 - 1)


def test_digits_recipe_learns() -> None:
    task = registry.task("digits")
    d = task.defaults()
    train, test = task.load(None)
    model = fresh(task)
    optimizer = torch.optim.SGD(model.parameters(), d["lr"], d["momentum"])
    generator = torch.Generator().manual_seed(0)
    for step in range(d["steps"]):
        optimizer.param_groups[0]["lr"] = d["lr"] * (1 - step / d["steps"]) ** d["schedule_power"]
        indices = torch.randint(len(train), (d["batch"],), generator=generator)
        batch = task.batch(train, indices, Key(0, step, 0))
        optimizer.zero_grad()
        task.loss(model(batch.inputs), batch.targets).backward()
        optimizer.step()
    batch = task.batch(test, torch.arange(len(test)), None)
    correct = task.correct(model(batch.inputs), batch.targets)
    assert correct is not None
    assert correct.float().mean() > 0.955


# ---- mnist ---------------------------------------------------------------------------------------


def test_mnist_inputs_lie_between_minus_one_and_one() -> None:
    task = registry.task("mnist")
    split = Split(torch.tensor([0, 51, 255], dtype=torch.uint8).view(3, 1, 1, 1), torch.arange(3))
    batch = task.batch(split, torch.tensor([2, 1, 0]), KEY)
    torch.testing.assert_close(batch.inputs.flatten(), torch.tensor([1.0, -0.6, -1.0]))


@pytest.mark.parametrize(
    ("name", "deviations", "biases"),
    [
        ("mnist", (0.05, 0.05, 0.048, 0.0767), (0, 0, 0, 0)),
        ("cifar10", (0.05, 0.05, 0.04, 0.04, 1 / 192), (0, 0.1, 0.1, 0.1, 0)),
    ],
)
def test_terngrad_initialization(
    name: str, deviations: tuple[float, ...], biases: tuple[float, ...]
) -> None:
    values = [p.detach() for p in fresh(registry.task(name)).parameters()]
    for weight, std in zip(values[::2], deviations, strict=True):
        assert weight.abs().max() <= 2 * std
        # A normal cut off at two deviations keeps 0.87962566 of its deviation.
        assert weight.std().item() == pytest.approx(0.8796 * std, rel=5 / math.sqrt(weight.numel()))
    for bias, value in zip(values[1::2], biases, strict=True):
        assert (bias == value).all()


def test_caffe_lenet_is_caffes() -> None:
    model = fresh(registry.task("mnist", network="lenet-caffe"))
    for layer, inputs in ((model.conv1, 25), (model.conv2, 500), (model.fc3, 800)):
        bound = math.sqrt(3 / inputs)
        assert 0.97 * bound < layer.weight.abs().max() <= bound
        assert (layer.bias == 0).all()
    x = torch.randn(2, 1, 28, 28)
    y = F.max_pool2d(F.conv2d(x, model.conv1.weight), 2)
    y = F.max_pool2d(F.conv2d(y, model.conv2.weight), 2).flatten(1)
    y = F.relu(y @ model.fc3.weight.T) @ model.logits.weight.T
    torch.testing.assert_close(model(x), y)


def test_lenet_is_terngrads() -> None:
    model = fresh(registry.task("mnist"))
    x = torch.randn(2, 1, 28, 28)
    y = F.max_pool2d(F.relu(F.conv2d(x, model.conv1.weight, padding="same")), 2)
    y = F.max_pool2d(F.relu(F.conv2d(y, model.conv2.weight, padding="same")), 2).flatten(1)
    y = F.relu(y @ model.fc3.weight.T) @ model.logits.weight.T
    torch.testing.assert_close(model(x), y)


@pytest.mark.parametrize(
    ("name", "options", "decayed"),
    [
        ("mnist", {}, {"conv1.weight", "conv2.weight", "fc3.weight", "logits.weight"}),
        ("cifar10", {}, {"fc3.weight", "fc4.weight"}),
    ],
)
def test_what_decays(name: str, options: dict[str, Any], decayed: set[str]) -> None:
    task = registry.task(name, **options)
    names = [name for name, _ in task.model().named_parameters()]
    assert {name for name in names if task.decayed(name)} == decayed
    resnet = registry.task("cifar10", network="resnet20")
    assert all(resnet.decayed(name) for name, _ in resnet.model().named_parameters())


# ---- cifar10: networks ---------------------------------------------------------------------------


@pytest.mark.parametrize(("channels", "size", "alpha"), [(64, 9, 0.001), (7, 3, 2.0), (3, 9, 1.0)])
def test_local_response_norm_is_torchs(channels: int, size: int, alpha: float) -> None:
    ours = models.LocalResponseNorm(channels, size, alpha)
    theirs = nn.LocalResponseNorm(size, alpha, beta=0.75, k=1.0)
    x = (10 * torch.randn(2, channels, 5, 4, generator=torch.Generator().manual_seed(0))).double()
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [ours.double()(inputs[0]), theirs(inputs[1])]
    weights = torch.linspace(-1, 1, x.numel(), dtype=torch.float64).view_as(x)
    for output in outputs:
        (output * weights).sum().backward()
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-6, atol=1e-6)
    assert list(ours.parameters()) == []
    assert ours.state_dict() == {}


def test_local_response_norm_has_tensorflows_alpha() -> None:
    # TensorFlow: x / (bias + alpha * sum)^beta with alpha = 0.001 / 9 and a radius of 4.
    x = torch.zeros(1, 64, 1, 1)
    x[0, 10], x[0, 14], x[0, 15] = 30.0, 40.0, 1000.0
    y = models.LocalResponseNorm(64, size=9, alpha=0.001)(x)
    expected = 30 / (1 + 0.001 / 9 * (30**2 + 40**2)) ** 0.75
    assert y[0, 10].item() == pytest.approx(expected, rel=1e-6)


def test_cifarnet_is_terngrads() -> None:
    model = fresh(registry.task("cifar10"))
    lrn = nn.LocalResponseNorm(9, 0.001, 0.75, 1.0)
    x = 3 * torch.randn(2, 3, 24, 24)

    def conv(layer: nn.Conv2d, x: Tensor) -> Tensor:
        return F.relu(F.conv2d(x, layer.weight, layer.bias, padding="same"))

    def pool(x: Tensor) -> Tensor:
        # TensorFlow's SAME for an even side, window 3, stride 2: one row and column at the end.
        return F.max_pool2d(F.pad(x, (0, 1, 0, 1), value=-math.inf), 3, 2)

    y = lrn(pool(conv(model.conv1, x)))
    y = pool(lrn(conv(model.conv2, y)))
    assert y.shape == (2, 64, 6, 6)
    for layer in (model.fc3, model.fc4):
        y = F.relu(F.linear(y.flatten(1), layer.weight, layer.bias))
    y = F.linear(y, model.logits.weight, model.logits.bias)
    torch.testing.assert_close(model(x), y, rtol=1e-4, atol=1e-6)


def test_resnet_shortcut_is_option_a() -> None:
    block = models._Block(2, 4)
    nn.init.zeros_(block.conv2.weight)
    x = torch.rand(1, 2, 4, 4)
    out = block(x)
    assert out.shape == (1, 4, 2, 2)
    assert torch.equal(out[:, 1:3], x[:, :, ::2, ::2])
    assert (out[:, [0, 3]] == 0).all()


def test_resnet_weights_are_hes() -> None:
    model = fresh(registry.task("cifar10", network="resnet20"))
    weight = model.body[-1].conv2.weight
    expected = math.sqrt(2 / (64 * 9))
    assert weight.std().item() == pytest.approx(expected, rel=5 / math.sqrt(2 * weight.numel()))


# ---- cifar10: images -----------------------------------------------------------------------------


def test_places_cover_their_range_and_no_more() -> None:
    largest = 1 - 2.0**-24
    draws = torch.tensor([[0.0, largest, 0.0], [largest, 0.0, 0.5], [1 / 9, 0.5, 0.49]])
    top, left, flip = cifar10._places(draws, 9)
    assert top.tolist() == [0, 8, 1]
    assert left.tolist() == [8, 0, 4]
    assert flip.tolist() == [True, False, True]
    draws = ops.random.uniform(KEY, 5 * 20_000).view(-1, 5)
    top, left, flip = cifar10._places(draws, 9)
    for edge in (top, left):
        shares = edge.bincount(minlength=9) / 20_000
        assert shares.tolist() == pytest.approx([1 / 9] * 9, abs=5 * math.sqrt(8 / 81 / 20_000))
    assert flip.float().mean().item() == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(20_000))


def by_hand(image: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Return CifarNet's training input as its description says it, in float64, for one image."""
    top, left = int(draws[0] * 9), int(draws[1] * 9)
    x = image[:, top : top + 24, left : left + 24].astype(np.float64) / 255
    if draws[2] < 0.5:
        x = x[:, :, ::-1]
    x = x + (2 * draws[3] - 1) * 63 / 255
    for channel in x:
        channel[:] = (channel - channel.mean()) * (0.2 + 1.6 * draws[4]) + channel.mean()
    return (x - x.mean()) / max(x.std(), 1 / math.sqrt(x.size))


def test_cifarnet_augmentation_is_the_one_described() -> None:
    task = registry.task("cifar10")
    split = split_of(task)
    split.inputs[3] = split.inputs[3] // 32 + 100  # of little contrast: the floor of std decides
    indices = torch.tensor([9, 3, 60])
    draws = (
        ops.random.uniform(KEY._replace(stream=purposes.AUGMENT), 15).double().view(3, 5).numpy()
    )
    expected = [by_hand(split.inputs[i].numpy(), d) for i, d in zip(indices, draws, strict=True)]
    result = task.batch(split, indices, KEY).inputs
    torch.testing.assert_close(
        result.double(), torch.from_numpy(np.stack(expected)), rtol=1e-4, atol=1e-4
    )
    assert result[1].std() < 0.9


def test_evaluation_takes_the_centre() -> None:
    split = split_of(registry.task("cifar10"))
    centre = split.inputs[:2, :, 4:28, 4:28].double() / 255
    flat = centre.flatten(1)
    expected = ((flat - flat.mean(1, True)) / flat.std(1, correction=0, keepdim=True)).view_as(
        centre
    )
    for task, key in (
        (registry.task("cifar10"), None),
        (registry.task("cifar10", augment=False), KEY),
    ):
        result = task.batch(split, torch.arange(2), key).inputs
        torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-5)


def test_resnet_images_are_normalized_then_padded_with_zeros_then_cropped() -> None:
    task = registry.task("cifar10", network="resnet20")
    split = split_of(task)
    mean = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
    std = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)
    plain = (split.inputs.float() / 255 - mean) / std
    indices = torch.arange(64)
    torch.testing.assert_close(task.batch(split, indices, None).inputs, plain)
    draws = ops.random.uniform(KEY._replace(stream=purposes.AUGMENT), 320).view(64, 5)
    result = task.batch(split, indices, KEY).inputs
    padded = F.pad(plain, (4, 4, 4, 4))
    for i, (u, v, w) in enumerate(draws[:, :3].tolist()):
        top, left = int(9 * u), int(9 * v)
        expected = padded[i, :, top : top + 32, left : left + 32]
        torch.testing.assert_close(result[i], expected.flip(2) if w < 0.5 else expected)


@pytest.mark.parametrize("network", ["cifarnet", "resnet20"])
def test_augmentation_differs_between_seeds_steps_workers_and_examples(network: str) -> None:
    task = registry.task("cifar10", network=network)
    split = Split(images(1, 3, 32, 32).expand(8, -1, -1, -1), torch.zeros(8))
    keys = [KEY, KEY._replace(seed=4), KEY._replace(step=12), KEY._replace(rank=0)]
    seen = [task.batch(split, torch.arange(8), key).inputs for key in keys]
    for i, a in enumerate(seen):
        assert len(a.unique(dim=0)) >= 6, "two of 162 crops may agree"
        for b in seen[:i]:
            assert (a - b).abs().amax((1, 2, 3)).count_nonzero() >= 6


@pytest.mark.parametrize(
    ("name", "network"), [("mnist", "lenet"), ("cifar10", "cifarnet"), ("cifar10", "resnet20")]
)
def test_batches_lie_in_channels_last_memory(name: str, network: str) -> None:
    task = registry.task(name, network=network)
    for key in (KEY, None):
        x = task.batch(split_of(task), torch.arange(8), key).inputs
        _, channels, _, width = x.shape
        assert x.stride() == (x[0].numel(), 1, channels * width, channels)


def test_schedules_follow_the_paper() -> None:
    resnet = registry.task("cifar10", network="resnet20").defaults()
    assert resnet["schedule_steps"] == [32 / 64, 48 / 64]
    cifarnet = registry.task("cifar10").defaults()
    assert (cifarnet["lr"], cifarnet["batch"], cifarnet["ema"]) == (2e-4, 128, 0.9999)
    assert (cifarnet["weight_decay"], cifarnet["decay"]) == (0.004, "loss")
    assert "300,000" in registry.task_class("cifar10").paper_steps


# ---- shakespeare ---------------------------------------------------------------------------------


def test_shakespeare_blocks_are_the_text_and_its_successors() -> None:
    split = shakespeare.blocks(torch.arange(3 * 4 + 1, dtype=torch.uint8), 4)
    assert split.inputs.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert torch.equal(split.targets, split.inputs.long() + 1)
    assert len(shakespeare.blocks(torch.arange(3 * 4), 4)) == 2, "the last has no successor"


def test_shakespeare_tokens_are_places_among_the_characters() -> None:
    every = torch.tensor(list(shakespeare.CHARACTERS.encode()), dtype=torch.uint8)
    assert sorted(shakespeare.CHARACTERS) == list(shakespeare.CHARACTERS)
    assert shakespeare.tokens(every).tolist() == list(range(65))
    with pytest.raises(ValueError, match="byte 64 at 1"):
        shakespeare.tokens(torch.tensor(list(b"A@"), dtype=torch.uint8))


def test_shakespeare_splits_are_the_text_in_order_and_share_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    characters = text(1234)
    written = torch.tensor(list(shakespeare.CHARACTERS.encode()), dtype=torch.uint8)
    monkeypatch.setattr(shakespeare.data, "shakespeare", lambda _: written[characters.long()])
    train, test = registry.task("shakespeare", context=10).load(None)
    # The first 1,111 characters and the last 123: a block in each needs one character more.
    assert torch.equal(train.inputs.flatten(), characters[:1110])
    assert torch.equal(train.targets.flatten(), characters[1:1111].long())
    assert torch.equal(test.inputs.flatten(), characters[1111:1231])
    assert torch.equal(test.targets.flatten(), characters[1112:1232].long())


def test_shakespeare_starts_with_a_uniform_guess() -> None:
    task = registry.task("shakespeare")
    batch = task.batch(split_of(task, 8), torch.arange(8), None)
    outputs = fresh(task)(batch.inputs)
    assert outputs.shape == (8, 64, 65)
    loss = task.loss(outputs, batch.targets)
    # Normalized activations times weights of 0.02: logits with the variance 128 * 0.02^2, of which
    # noise as target costs half.
    assert loss.item() == pytest.approx(math.log(65) + 128 * 0.02**2 / 2, abs=0.02)
    each = F.cross_entropy(outputs.movedim(2, 1), batch.targets, reduction="none")
    torch.testing.assert_close(loss, each.mean())
    assert task.correct(outputs, batch.targets) is None


def test_shakespeare_initialization_is_gpt2s() -> None:
    for name, parameter in fresh(registry.task("shakespeare")).named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            ends = "attended" in name or "contract" in name
            std = 0.02 / math.sqrt(8) if ends else 0.02
            # A sample's deviation has a relative deviation of 1 / sqrt(2 n).
            n = parameter.numel()
            assert parameter.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * n)), name


def test_shakespeare_sees_all_earlier_characters_and_no_later_one() -> None:
    task = registry.task("shakespeare", layers=2, width=32, context=12)
    model, context = fresh(task).double(), text(12).long()[None]
    logits = model(context)
    for place in range(12):
        other = context.clone()
        other[0, place] = (other[0, place] + 1) % 65
        changed = (model(other) - logits).abs().amax(-1)[0]
        assert (changed[:place] == 0).all()
        assert (changed[place:] > 1e-9).all()
    short = model(context[:, :7])
    torch.testing.assert_close(short, logits[:, :7])


def test_shakespeare_attention_is_softmax_of_scaled_products() -> None:
    layer = shakespeare.Layer(width=6, heads=2).double()
    x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mixed = []
    weight, bias = layer.attend.weight, layer.attend.bias
    for head in range(2):
        rows = [slice(6 * part + 3 * head, 6 * part + 3 * head + 3) for part in range(3)]
        q, k, v = (layer.norm1(x) @ weight[some].T + bias[some] for some in rows)
        scores = (q @ k.T / math.sqrt(3)).masked_fill(torch.ones(5, 5).triu(1) > 0, -math.inf)
        mixed.append(scores.softmax(-1) @ v)
    y = x + layer.attended(torch.cat(mixed, -1))
    z = y + layer.contract(F.gelu(layer.expand(layer.norm2(y)), approximate="tanh"))
    torch.testing.assert_close(layer(x[None])[0], z)


def test_shakespeare_learns_which_character_follows() -> None:
    """A text that counts through the characters is learnt in some steps of a small network."""
    task = registry.task("shakespeare", layers=2, width=64, context=16)
    split = shakespeare.blocks(torch.arange(20_000) % 65, task.context)
    model = fresh(task)
    optimizer = torch.optim.Adam(model.parameters(), task.defaults()["lr"])
    for step in range(40):
        batch = task.batch(split, torch.arange(16) + 16 * step, Key(0, step, 0))
        optimizer.zero_grad()
        task.loss(model(batch.inputs), batch.targets).backward()
        optimizer.step()
    batch = task.batch(split, torch.arange(1200, 1240), None)
    assert task.loss(model(batch.inputs), batch.targets) < 0.5
