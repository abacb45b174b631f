"""Exchanges of float32 gradients do not depend on `torch.set_default_dtype`."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import pytest
import torch

import gcbench

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
