"""Exchanges of float32 gradients do not depend on `torch.set_default_dtype`."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import pytest
import torch

import gcbench
from gcbench.adapters import grace, horovod
from gcbench.core import codec
from gcbench.core.compressor import Context, Key, Segments

PROGRAM = """
import hashlib, json, sys
import torch
from gcbench import get_compressor
from gcbench.core import registry
from gcbench.core.clock import Clock
from gcbench.core.errors import UsageError
from gcbench.core.exchange import Exchange, lane_of
from gcbench.core.world import SimulatedWorld
from gcbench.integrations.scheme import Scheme
from gcbench.ops import dispatch

torch.set_default_dtype(getattr(torch, sys.argv[1]))
dispatch.choose(sys.argv[2])
device, result = torch.device("cpu"), {}
for name in registry.compressors():
    for collective in get_compressor(name).legal_collectives():
        scheme = Scheme.of(name, {}, None, None, collective=collective)
        lane = lane_of([(40, 30), (64,), (7,)], 0, *scheme.at(0), exact=False)
        exchange = Exchange(SimulatedWorld(2, device, None, 1, 1), [lane], 0, Clock(device))
        hashed = hashlib.sha256()
        try:
            for step in range(2):
                generator = torch.Generator().manual_seed(step)
                x = torch.randn(2, lane.segments.numel, generator=generator, dtype=torch.float32)
                mean = exchange.mean([*x], step, 0.1)
                hashed.update(str(mean.dtype).encode() + mean.numpy().tobytes())
            result[f"{name}, {collective}"] = hashed.hexdigest()
        except UsageError as error:
            result[f"{name}, {collective}"] = str(error)
print(json.dumps(result))
"""


@functools.cache
def means(dtype: str, backend: str) -> dict[str, str]:
    """Return the digests of each method's means, from a new process without cached tables."""
    call = [sys.executable, "-c", PROGRAM, dtype, backend]
    text = subprocess.run(call, check=True, capture_output=True, text=True).stdout
    result: dict[str, str] = json.loads(text)
    return result


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_no_mean_depends_on_the_default_dtype(backend):
    """A method may refuse, with the cause. Backends give the same bits."""
    right, other = means("float32", "cpu"), means("bfloat16", backend)
    different = {name for name, value in other.items() if value != right[name]}
    assert len(right) == len(other) > 40
    # `dlion` computes its signs by torch.where of two Python numbers.
    assert {name.split(",")[0] for name in different} <= {"dlion"}
    assert all("set_default_dtype(torch.float32)" in other[name] for name in different)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "fields"),
    [("dion", {}), ("dion", {"orthonormal": True}), ("fft", {"low": -0.5, "high": 2.0})],
)
def test_fields_that_make_tensors_of_their_own(name, fields, dtype):
    x = torch.randn(50, 70, generator=torch.Generator().manual_seed(1))
    method = gcbench.get_compressor(name, **fields)
    want = method.decompress(method.compress(x))
    torch.set_default_dtype(dtype)
    try:
        received = method.decompress(method.compress(x))
    finally:
        torch.set_default_dtype(torch.float32)
    assert received.dtype == torch.float32
    assert torch.equal(received, want)


class Half:
    """fp16, in the form of Horovod."""

    @staticmethod
    def compress(tensor):
        return tensor.half(), tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return tensor.to(ctx)


class Largest:
    """The largest quarter, in the form of GRACE."""

    def compress(self, tensor, name):
        flat = tensor.flatten()
        indices = flat.abs().topk(max(1, flat.numel() // 4)).indices
        return [flat[indices], indices], tensor.size()

    def decompress(self, tensors, shape):
        values, indices = tensors
        flat = torch.zeros(shape.numel(), dtype=values.dtype)
        return flat.scatter_(0, indices, values).view(shape)


class Doubled(Largest):
    """Its aggregate is applied instead of the mean."""

    average = False

    def aggregate(self, tensors):
        return 2 * sum(tensors)


class Noise(Largest):
    """Adds noise, and sends as many elements as are positive."""

    def compress(self, tensor, name):
        flat = tensor.flatten() + torch.rand_like(tensor).flatten()
        (indices,) = torch.where((flat > 0) | (flat == flat.max()))
        return [flat[indices], indices], tensor.size()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("adapter", "cls"),
    [(horovod, Half), (grace, Largest), (grace, Doubled), (grace, Noise)],
)
def test_adapters_give_the_same_bits(adapter, cls, dtype):
    """Of a class that creates no tensor of the default dtype itself."""
    segments = Segments.of([(8, 9), (), (40,)])
    numel = segments.numel
    xs = torch.randn(3, numel, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    contexts = [
        Context(segments, torch.empty(0, dtype=torch.float32), Key(1, 0, rank)) for rank in range(3)
    ]

    def results():
        method = adapter(cls)()  # a new class, without cached templates
        payloads = [codec.encode(method, x, ctx) for x, ctx in zip(xs, contexts, strict=True)]
        decoded = [method.decode(payload, contexts[0]) for payload in payloads]
        aggregated = method.claims.aggregated(decoded, contexts[0])
        parts = [part for payload in payloads for part in payload.parts]
        mean = codec.mean(method, payloads, contexts[0])
        single = method.decompress(method.compress(xs[0]))
        return [*parts, *decoded, method.mean(payloads, contexts[0]), mean, aggregated, single]

    want = results()
    torch.set_default_dtype(dtype)
    try:
        received = results()
    finally:
        torch.set_default_dtype(torch.float32)
    assert [one.dtype for one in received] == [one.dtype for one in want]
    assert all(torch.equal(one, other) for one, other in zip(received, want, strict=True))
