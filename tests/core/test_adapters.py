"""Classes of GRACE's and Horovod's forms, unmodified, in encode, verify and run."""

from __future__ import annotations

import inspect
import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from commands import invoke

import gcbench
from gcbench.adapters import grace, horovod
from gcbench.checks import properties
from gcbench.core import codec
from gcbench.core.compressor import Context, Key, Payload, Segments
from gcbench.core.errors import PayloadError, UsageError

FILE = '''
"""Largest tenth, in the form of GRACE.

Source: a test.
"""

import torch


class Largest:
    def __init__(self, share=0.5):
        self.share = share

    def compress(self, tensor, name):
        flat = tensor.flatten()
        k = max(1, int(flat.numel() * self.share))
        _, indices = torch.topk(flat.abs(), k, sorted=False)
        return [flat[indices], indices], (flat.numel(), tensor.size())

    def decompress(self, tensors, ctx):
        numel, shape = ctx
        values, indices = tensors
        flat = torch.zeros(numel, dtype=values.dtype)
        flat.scatter_(0, indices, values)
        return flat.view(shape)


from gcbench.checks import properties
from gcbench.adapters import grace

Tenth = grace(Largest, share=0.1, contractive=True)
'''


class Coin:
    """A random sign of each element, with the tensor's mean magnitude."""

    def compress(self, tensor, name):
        sign = torch.rand(tensor.shape) < 0.5
        return [sign.to(torch.uint8), tensor.abs().mean().view(1)], tensor.shape

    def decompress(self, tensors, shape):
        sign, size = tensors
        return ((sign.float() * 2 - 1) * size).view(shape)


class Half:
    """fp16, in the form of Horovod."""

    @staticmethod
    def compress(tensor):
        return tensor.half(), tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return tensor.to(ctx)


def context(*shapes: tuple[int, ...], step: int = 0) -> Context:
    return Context(Segments.of(shapes), torch.empty(0), Key(1, step, 0))


@pytest.fixture
def tenth(tmp_path):
    path = tmp_path / "tenth.py"
    path.write_text(FILE)
    return path


def test_a_file_of_graces_form_is_verified_and_run(tenth, tmp_path):
    verified = invoke("verify", tenth, "--no-processes", "--progress", "none")
    assert verified.code == 0, verified.out + verified.err
    words = ("--task", "digits", "--steps", 5, "--compressor", tenth, "--memory", "residual")
    done = invoke("run", *words, "--results", tmp_path / "runs", "--progress", "none")
    assert done.code == 0, done.err


def test_every_tensor_is_compressed_in_its_shape(tenth):
    method = gcbench.get_compressor(str(tenth))
    x = torch.randn(30, generator=torch.Generator().manual_seed(0))
    ctx = context((2, 10), (), (9,))
    x = x[: ctx.segments.numel]
    payload = codec.encode(method, x, ctx)
    assert [part.numel() for part in payload.parts] == [2, 4, 1, 2, 1, 2], "int64 as two int32"
    decoded = codec.decode(method, payload, ctx)
    sent = decoded != 0
    assert torch.equal(decoded[sent], x[sent])
    assert int(sent.sum()) == 4


def test_random_numbers_follow_from_the_key_alone():
    method = grace(Coin)()
    x = torch.ones(1000)
    torch.manual_seed(1)
    first = codec.encode(method, x, context((1000,)))
    state = torch.random.get_rng_state()
    again = codec.encode(method, x, context((1000,)))
    assert torch.equal(first.parts[0], again.parts[0])
    keys = [Key(1, step, rank, stream=n) for step in range(12) for rank in range(8) for n in (0, 1)]
    contexts = (context((1000,))._replace(key=key) for key in keys)
    sent = {bytes(codec.encode(method, x, ctx).parts[0].numpy()) for ctx in contexts}
    assert len(sent) == len(keys)
    assert torch.equal(state, torch.random.get_rng_state())


class Dither:
    """Adds noise before it rounds, and subtracts other noise at the receiver."""

    def compress(self, tensor, name):
        return [(tensor + torch.rand_like(tensor)).round()], None

    def decompress(self, tensors, context):
        return tensors[0] - torch.empty_like(tensors[0]).uniform_()


def test_threads_do_not_share_random_numbers():
    """As simulated workers do, and a hook beside the training loop."""
    method = grace(Dither)()
    x = torch.linspace(-1, 1, 1000)
    ranks = [context((1000,))._replace(key=Key(1, 0, rank)) for rank in range(8)]
    method.decompress(method.compress(x))
    stop = threading.Event()

    def loop():
        torch.manual_seed(3)
        numbers = [float(torch.rand(()))]
        while not stop.is_set():
            numbers.append(float(torch.rand(())))
        return numbers

    def worker(ctx):
        payload = codec.encode(method, x, ctx)
        return payload.parts[0].numpy().tobytes(), codec.decode(method, payload, ctx).tolist()

    wanted = [worker(ctx) for ctx in ranks]
    with ThreadPoolExecutor(5) as pool:
        training = pool.submit(loop)
        results = list(pool.map(worker, ranks * 20))
        stop.set()
    assert results == wanted * 20
    numbers = training.result()
    expected = torch.Generator().manual_seed(3)
    assert numbers == [float(torch.rand((), generator=expected)) for _ in numbers]
    replicas = [ctx._replace(key=ctx.key._replace(rank=0)) for ctx in ranks]
    payload = codec.encode(method, x, ranks[0])
    decoded = [codec.decode(method, payload, ctx) for ctx in (*ranks, *replicas)]
    assert all(torch.equal(one, decoded[0]) for one in decoded), "every worker decodes alike"


class Seeds:
    def compress(self, tensor, name):
        torch.manual_seed(5)
        return [tensor * torch.rand_like(tensor)], None

    def decompress(self, tensors, context):
        return tensors[0]


class NoGenerator(Seeds):
    def compress(self, tensor, name):
        return [torch.native_dropout(tensor, 0.5, True)[0]], None


@pytest.mark.parametrize(("cls", "cause"), [(Seeds, "manual_seed"), (NoGenerator, "Generator")])
def test_numbers_that_threads_would_share_are_refused(cls, cause):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    with pytest.raises(UsageError, match=cause):
        grace(cls)().compress(torch.ones(8))
    assert torch.equal(state, torch.get_rng_state())


def test_horovods_form():
    method = horovod(Half, contractive=True)()
    x = torch.randn(100)
    payload = codec.encode(method, x, context((10, 10)))
    assert payload.nbytes == 200
    assert torch.equal(codec.decode(method, payload, context((10, 10))), x.half().float())


def test_a_false_claim_is_refused():
    method = grace(Coin, contractive=True)()
    assert properties.run(method, "contraction").verdict == "fails"
    assert properties.run(method, "unbiased").verdict == "not declared"


def test_what_is_not_of_the_form_is_refused():
    with pytest.raises(UsageError, match="'compress'"):
        grace(dict)
    with pytest.raises(UsageError, match="'compress'"):
        horovod(dict)
    with pytest.raises(UsageError, match="'decompress'"):
        horovod(type("Half", (), {"compress": staticmethod(lambda tensor: (tensor.half(), None))}))


class InstanceHalf:
    """Horovod's functions, but not static."""

    def compress(self, tensor):
        return tensor.half(), tensor.dtype

    def decompress(self, tensor, ctx):
        return tensor.to(ctx)


class NeedsShare:
    def __init__(self, share):
        self.share = share


@pytest.mark.parametrize(
    ("adapter", "value", "cause"),
    [
        (grace, Half, r"compress\(tensor\) .* compress\(tensor, name\).*adapters.horovod"),
        (grace, InstanceHalf, r"compress\(tensor\) .* compress\(tensor, name\)"),
        (grace, NeedsShare, "no arguments.*'share'.*Pass"),
        (grace, Coin(), "not callable.*Pass"),
        (horovod, Coin, r"compress\(self, tensor, name\) .* compress\(tensor\),.*adapters.grace"),
        (horovod, InstanceHalf, r"compress\(self, tensor\) .* compress\(tensor\),.*static"),
        (horovod, Half(), "expected a class.*Pass"),
    ],
)
def test_a_class_of_the_other_form_is_refused_at_once(adapter, value, cause):
    with pytest.raises(UsageError, match=cause):
        adapter(value)


class TensorOnly(Coin):
    """GRACE's arguments with Horovod's results."""

    def compress(self, tensor, name):
        return tensor.half(), tensor.dtype


class ListOfHalf(Half):
    """Horovod's arguments with GRACE's results."""

    @staticmethod
    def compress(tensor):
        return [tensor.half()], tensor.dtype


@pytest.mark.parametrize(
    ("method", "cause"),
    [
        (grace(TensorOnly)(), r"returned \(Tensor, dtype\).*list of tensors"),
        (horovod(ListOfHalf)(), r"returned \(\(\(Tensor\)\), dtype\)"),
    ],
)
def test_results_of_the_other_form_are_refused(method, cause):
    with pytest.raises(UsageError, match=cause):
        method.compress(torch.ones(4, 4))


@pytest.mark.parametrize("parts", [0, 1, 3])
def test_payloads_with_another_number_of_parts_are_refused(parts):
    method = grace(Coin)()
    with pytest.raises(PayloadError):
        method.decode(Payload((torch.zeros(10),) * parts), context((10,)))


class Threshold:
    """Elements from .5 on, as many as there are."""

    def compress(self, tensor, name):
        flat = tensor.flatten()
        (indices,) = torch.where(flat.abs() >= min(0.5, float(flat.abs().max())))
        return [flat[indices], indices.int()], tensor.size()

    def decompress(self, tensors, shape):
        values, indices = tensors
        return torch.zeros(shape.numel()).scatter_(0, indices.long(), values).view(shape)


@pytest.mark.parametrize("n", [1, 2, 3, 8, 40])
def test_sizes_that_agree_by_chance_are_not_fixed(n):
    method = grace(Threshold, contractive=True)()
    for seed in range(50):
        x = torch.randn(n, generator=torch.Generator().manual_seed(seed))
        decoded = method.decompress(method.compress(x))
        assert torch.equal(decoded[decoded != 0], x[decoded != 0])


class RandomPositions:
    """Which elements are sent is random, and part of the context."""

    def compress(self, tensor, name):
        indices = torch.randperm(tensor.numel())[:5]
        return [tensor.flatten()[indices]], (indices, tensor.size())

    def decompress(self, tensors, context):
        indices, shape = context
        return torch.zeros(shape.numel()).scatter_(0, indices, tensors[0]).view(shape)


def test_a_context_that_would_have_to_be_sent_is_refused():
    with pytest.raises(UsageError, match="context"):
        grace(RandomPositions)().compress(torch.ones(100))


class PowerOfTwo:
    """The scale is a power of 2**step, and part of the context."""

    def __init__(self, step):
        self.step = step

    def compress(self, tensor, name):
        largest = math.log2(float(tensor.abs().max()))
        exponent = self.step * math.floor(largest / self.step)
        return [(tensor * 2.0**-exponent * 63).round().to(torch.int32)], exponent

    def decompress(self, tensors, exponent):
        return tensors[0].float() * 2.0**exponent / 63


@pytest.mark.parametrize("n", [1, 2, 16, 64, 100, 196])
@pytest.mark.parametrize("dimensions", [1, 2])
@pytest.mark.parametrize("step", [1, 8])
def test_a_scale_in_the_context_is_refused_for_every_shape(n, dimensions, step):
    with pytest.raises(UsageError, match="context"):
        grace(PowerOfTwo, step=step)().compress(torch.ones((n,) * dimensions))


class Single(Coin):
    """The context contains whether one element alone is not zero."""

    def compress(self, tensor, name):
        return [tensor], bool((tensor != 0).sum() == 1)

    def decompress(self, tensors, single):
        return tensors[0] * (2 if single else 1)


class Constant(Single):
    """The context contains whether all elements are equal."""

    def compress(self, tensor, name):
        return [tensor], bool((tensor == tensor.flatten()[0]).all())


@pytest.mark.parametrize("cls", [Single, Constant])
def test_contexts_of_special_tensors_are_compared(cls):
    with pytest.raises(UsageError, match="context"):
        grace(cls)().compress(torch.ones(100))


class Momentum:
    """A momentum per name, as in GRACE's Signum."""

    def __init__(self, beta=0.9):
        self.beta = beta
        self.momenta = {}

    def compress(self, tensor, name):
        shape, tensor = tensor.size(), tensor.flatten()
        if name in self.momenta:
            tensor = (1 - self.beta) * tensor + self.beta * self.momenta[name]
        self.momenta[name] = tensor
        return [(tensor >= 0).to(torch.uint8)], shape

    def decompress(self, tensors, shape):
        return (tensors[0].float() * 2 - 1).view(shape)


class StoredScale:
    """`compress` stores the scale for `decompress` in the object."""

    def compress(self, tensor, name):
        self.scale = tensor.abs().max() / 127
        return [(tensor / self.scale).round().to(torch.int8)], tensor.size()

    def decompress(self, tensors, shape):
        return (tensors[0].float() * self.scale).view(shape)


class StoredShape:
    """`compress` stores the shape for `decompress` in the object."""

    def compress(self, tensor, name):
        self.shape = tensor.size()
        return [tensor.flatten()], None

    def decompress(self, tensors, context):
        return tensors[0].view(self.shape)


class RunningScale:
    """The largest magnitude so far is the scale, and part of the context."""

    def __init__(self):
        self.largest = 0.0

    def compress(self, tensor, name):
        self.largest = max(self.largest, float(tensor.abs().max()))
        return [tensor.clone()], self.largest

    def decompress(self, tensors, largest):
        return tensors[0] * largest


class Delta:
    """The receiver adds up what arrives."""

    def __init__(self):
        self.total = 0.0

    def compress(self, tensor, name):
        return [tensor], None

    def decompress(self, tensors, context):
        self.total = self.total + tensors[0].mean()
        return tensors[0] + self.total


class OtherGenerator:
    """Draws outside torch."""

    def __init__(self):
        self.generator = random.Random(1)

    def compress(self, tensor, name):
        return [tensor * self.generator.random()], None

    def decompress(self, tensors, context):
        return tensors[0]


class StaticScale(Half):
    """Horovod's form, with the scale in the class."""

    @staticmethod
    def compress(tensor):
        StaticScale.scale = tensor.abs().max() / 127
        return (tensor / StaticScale.scale).round().to(torch.int8), None

    @staticmethod
    def decompress(tensor, ctx):
        return tensor.float() * StaticScale.scale


@pytest.mark.parametrize("shape", [(), (1,), (3,), (40, 33)])
@pytest.mark.parametrize(
    ("adapter", "cls"),
    [
        *((grace, cls) for cls in (Momentum, StoredScale, StoredShape, RunningScale, Delta)),
        (grace, OtherGenerator),
        (horovod, StaticScale),
    ],
)
def test_a_class_with_state_is_refused_for_every_shape(adapter, cls, shape):
    method = adapter(cls)()
    with pytest.raises(UsageError, match=r"keeps state in the object.*--memory momentum"):
        codec.encode(method, torch.ones(math.prod(shape)), context(shape))


class FirstShape(Coin):
    """Supports tensors of the shape of the first one only."""

    shape = None

    def compress(self, tensor, name):
        self.shape = self.shape or tensor.size()
        return super().compress(tensor.view(self.shape), name)


def test_an_error_at_the_second_shape_names_state_as_the_likely_cause():
    method = grace(FirstShape)()
    method.compress(torch.ones(4, 5))
    with pytest.raises(
        UsageError, match=r"\(3, 2\) raised RuntimeError .*invalid.*keeps in the obj"
    ):
        method.compress(torch.ones(3, 2))


class CountedBuffer(Coin):
    """State without influence on results: a counter, and one buffer for all results."""

    def __init__(self):
        self.calls = 0
        self.buffers = {}

    def compress(self, tensor, name):
        self.calls += 1
        buffer = self.buffers.setdefault(tensor.size(), torch.empty_like(tensor))
        return [buffer.copy_(tensor).mul_(torch.rand_like(tensor))], None

    def decompress(self, tensors, context):
        return tensors[0]


class RandomTenth:
    """Random positions, which are sent."""

    def compress(self, tensor, name):
        flat = tensor.flatten()
        indices = torch.randint(flat.numel(), [max(1, flat.numel() // 10)])
        return [flat[indices], indices.int()], tensor.size()

    def decompress(self, tensors, shape):
        values, indices = tensors
        return torch.zeros(shape.numel()).scatter_(0, indices.long(), values).view(shape)


class Ternary:
    """TernGrad as in GRACE; the scale of equal elements is 0."""

    def compress(self, tensor, name):
        flat = tensor.flatten()
        limit = 2.5 * float(flat.std(correction=0))
        flat = flat.clamp(-limit, limit)
        largest = flat.abs().max()
        zero = torch.empty_like(flat).uniform_(0, 1) * largest >= flat.abs()
        return (flat.sign().masked_fill(zero, 0).char(), largest.flatten()), tensor.size()

    def decompress(self, tensors, shape):
        return (tensors[0].float() * tensors[1]).view(shape)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (40, 33)])
@pytest.mark.parametrize("cls", [Coin, CountedBuffer, Dither, RandomTenth, Ternary, Threshold])
def test_random_numbers_and_buffers_do_not_count_as_state(cls, shape):
    method, x = grace(cls)(), torch.ones(math.prod(shape))
    payloads = [codec.encode(method, x, context(shape)) for _ in range(2)]
    assert all(map(torch.equal, *(payload.parts for payload in payloads)))


def test_verify_names_state_as_the_cause(tmp_path):
    source = inspect.getsource(Momentum)
    text = f'"""A momentum.\n\nSource: a test.\n"""\nimport torch\n{source}'
    path = tmp_path / "stateful.py"
    path.write_text(f"{text}\nfrom gcbench.adapters import grace\nStateful = grace(Momentum)\n")
    done = invoke("verify", path, "--no-processes", "--progress", "none", "--details")
    assert done.code == 1
    assert "keeps state in the object" in " ".join(done.out.split())
    assert "RuntimeError" not in done.out


class Signs:
    """The aggregate of signSGD in GRACE: a majority vote, which is not divided by N."""

    average = False

    def compress(self, tensor, name):
        return [(tensor.flatten() >= 0).to(torch.uint8)], tensor.size()

    def decompress(self, tensors, shape):
        return (tensors[0].float() * 2 - 1).view(shape)

    def aggregate(self, tensors):
        return (sum(tensors) >= 0) * 2.0 - 1.0


class Sum(Signs):
    """The aggregate of GRACE's base class."""

    average = True

    def aggregate(self, tensors):
        return sum(tensors)


class Total(Sum):
    average = False


@pytest.mark.parametrize(
    ("cls", "expected", "aggregate"),
    [
        (Signs, [1.0, -1.0, -1.0], "other"),
        (Sum, [1 / 3, -1.0, -1 / 3], "mean"),
        (Total, [1.0, -3.0, -1.0], "other"),
    ],
)
def test_the_aggregate_of_the_class_is_applied(cls, expected, aggregate):
    method, ctx = grace(cls)(), context((2,), (1,))
    inputs = ([1.0, -1, 1], [1.0, -1, -1], [-1.0, -1, -1])
    payloads = [codec.encode(method, torch.tensor(x), ctx) for x in inputs]
    mean = codec.mean(method, payloads, ctx)
    torch.testing.assert_close(mean, torch.tensor(expected))
    assert method.claims.aggregate == aggregate
    for name in ("same mean in collectives", "nothing lost over steps"):
        assert properties.run(method, name).verdict != "fails"
