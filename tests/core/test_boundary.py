"""What the contract refuses at its boundary: the same for every method and both backends."""

from __future__ import annotations

import contextlib
import math
import re
from dataclasses import dataclass

import pytest
import torch

import gcbench
from gcbench import ops
from gcbench.checks import calls, inputs
from gcbench.core import codec, registry
from gcbench.core.compressor import Compressor, Context, Key, Payload, Segments
from gcbench.core.errors import GcbenchError, PayloadError, UsageError
from gcbench.core.exchange import Exchange, Lane, check_legal

SHAPES = [(40, 33), (1030,)]
N = 40 * 33 + 1030
NAMES = sorted(registry.compressors())
backends = pytest.mark.parametrize("backend", ["reference", "cpu"])


@backends
@pytest.mark.parametrize("name", NAMES)
def test_another_length_or_dtype_is_refused_by_every_encoder(name, backend):
    method = registry.compressor(name)
    segments = Segments.of(SHAPES, method.granularity)
    right = inputs.normal(N)
    with ops.using(backend):
        shared = calls.agree(method, [right], segments, calls.KEY)
        for wrong in (inputs.normal(N + 7), inputs.normal(N - 7), right.double()):
            received = rf"{name}: .*{wrong.dtype}, shape \({len(wrong)},\)"
            ctx = Context(segments, shared, calls.KEY)
            with pytest.raises(UsageError, match=rf"{received}.*float32, shape \({N},\)"):
                codec.encode(method, wrong, ctx)
            with pytest.raises(UsageError, match=received):
                codec.feedback(method, wrong, torch.zeros(N), ctx)


@backends
@pytest.mark.parametrize("name", NAMES)
def test_no_method_decodes_a_nan(name, backend):
    """PayloadError or finite values, whatever is put in; `compress` refuses it."""
    method = registry.compressor(name)
    segments = Segments.of(SHAPES, method.granularity)
    for value in (math.nan, math.inf, -math.inf):
        x = inputs.normal(N)
        x[5] = value
        with pytest.raises(UsageError, match="NaN or an infinity"):
            method.compress(x)
        with ops.using(backend):
            shared = calls.agree(method, [x], segments, calls.KEY)
            payload = codec.encode(method, x, Context(segments, shared, calls.KEY))
            with contextlib.suppress(PayloadError):
                decoded = codec.decode(method, payload, Context(segments, shared))
                assert bool(decoded.isfinite().all()), value


@pytest.mark.parametrize("name", NAMES)
def test_a_payload_of_no_workers_is_refused(name):
    """Its mean would be a division by 0."""
    method = registry.compressor(name)
    segments = Segments.of(SHAPES, method.granularity)
    x = inputs.normal(N)
    shared = calls.agree(method, [x], segments, calls.KEY)
    payload = codec.encode(method, x, Context(segments, shared, calls.KEY))._replace(count=0)
    with pytest.raises(PayloadError, match=f"{name}: .*count 0"):
        codec.decode(method, payload, Context(segments, shared))


@backends
def test_decoders_refuse_what_no_encoder_sends(backend):
    segments, key = Segments.of([(300,), (300,)]), Key(0, 0, 0)
    x = inputs.normal(600)
    none = x.new_empty(0)
    with ops.using(backend):
        int8 = registry.compressor("int8", granularity="tensor")
        codes, scales = codec.encode(int8, x, Context(segments, none, key)).parts
        broken = Payload((codes, scales * torch.tensor([1.0, 0.0])))
        for call in (
            lambda: codec.decode(int8, broken, Context(segments, none)),
            lambda: codec.mean(int8, [broken, broken], Context(segments, none)),
        ):
            with pytest.raises(PayloadError, match=r"int8: .*scale 0"):
                call()

        tern = registry.compressor("terngrad", share=False)
        _, scales = codec.encode(tern, x, Context(segments, none, key)).parts
        silent, _ = codec.encode(tern, torch.zeros(600), Context(segments, none, key)).parts
        with pytest.raises(PayloadError, match=r"terngrad: .*scale"):
            codec.decode(tern, Payload((silent, scales)), Context(segments, none))
        loud, _ = codec.encode(tern, x, Context(segments, none, key)).parts
        with pytest.raises(PayloadError, match=r"terngrad: .*scale"):
            codec.decode(tern, Payload((loud, 0 * scales)), Context(segments, none))

        plain = registry.compressor("none")
        for wrong in (x[:-1], x.double()):
            payloads = [Payload((x,)), Payload((wrong,))]
            with pytest.raises(PayloadError, match="none: payload"):
                codec.mean(plain, payloads, Context(segments, none))
            with pytest.raises(PayloadError, match="none: payload"):
                codec.merge(plain, payloads, Context(segments, none, key))


@backends
@pytest.mark.parametrize("granularity", ["model", "tensor"])
def test_an_imaginary_sum_is_refused(backend, granularity):
    """The first bin of a spectrum is the sum of real values: another's code there is refused."""
    method = registry.compressor("fft", granularity=granularity, theta=0.0)
    segments = Segments.of([(300,), (300,)], granularity)
    x, none = inputs.normal(600) + 3, torch.empty(0)
    with ops.using(backend):
        payload = codec.encode(method, x, Context(segments, none, Key(0, 0, 0)))
        selected, values = method._open(payload, segments)
        runs = method._runs(segments)
        spectrum = torch.zeros(ops.spectrum.count_bins(runs), 2)
        spectrum[selected] = values
        spectrum[0, 1] = spectrum[0, 0]
        form = method.code_bits, method.mantissa, 1
        broken = Payload(ops.spectrum.pack(spectrum, selected, runs, *form))
        assert broken.layout == payload.layout
        codec.decode(method, payload, Context(segments, none))
        with pytest.raises(PayloadError, match="fft: the first bin of a segment is not real"):
            codec.decode(method, broken, Context(segments, none))


@pytest.mark.parametrize("declared", ["allgather", ("all-gather",), (), ("twoshot", "twoshot")])
def test_declared_collectives_are_checked_at_registration(declared):
    with pytest.raises(GcbenchError, match=re.escape(repr(declared))):
        type("Theirs", (gcbench.Compressor,), {"collectives": declared})


def test_an_unknown_collective_is_no_twoshot(simulated, clock):
    @dataclass(frozen=True)
    class Narrowed(type(registry.compressor("none"))):
        def legal_collectives(self):
            return ("two-shot",)

    with pytest.raises(GcbenchError, match=r"legal_collectives declares .*'two-shot'"):
        check_legal(Narrowed())
    assert issubclass(Narrowed, Compressor)
    clock.start_step()
    lane = Lane(registry.compressor("none"), "two-shot", 0, Segments.of([(4,)]))
    created = Exchange(simulated(2), [lane], 0, clock)
    with pytest.raises(ValueError, match="collective 'two-shot'"):
        created.mean([torch.ones(4)] * 2, 0)


class Listed(Compressor):
    def encode(self, x, ctx):
        return [x]

    def decode(self, payload, ctx):
        return payload.parts[0]


class Double(Listed):
    def encode(self, x, ctx):
        return Payload((x.clone(),))

    def decode(self, payload, ctx):
        return payload.parts[0].double()

    def mean(self, payloads, ctx):
        return self.decode(payloads[0], ctx)


class Short(Double):
    def decode(self, payload, ctx):
        return payload.parts[0][:1]


class Layout(Double):
    def layout(self, segments, count=1):
        return ((torch.int8, segments.numel),)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (Listed, "encode returned a list"),
        (Double, r"mean returned torch.float64, shape \(4,\); .*float32, shape \(4,\)"),
        (Short, r"mean returned torch.float32, shape \(1,\); .*float32, shape \(4,\)"),
        (Layout, r"encode returned .*float32, 4.*int8, 4"),
    ],
)
def test_errors_name_what_was_returned_and_what_is_expected(simulated, clock, method, message):
    clock.start_step()
    exchange = Exchange(
        simulated(2), [Lane(method(), "allgather", 0, Segments.of([(4,)]))], 0, clock
    )
    with pytest.raises(GcbenchError, match=rf"{method.__name__}.*: {message}"):
        exchange.mean([torch.ones(4)] * 2, 0)


def test_a_nan_of_a_method_is_attributed_to_it(monkeypatch, tmp_path):
    """Not to the learning rate, as a non-finite gradient is."""
    from commands import invoke

    none = type(registry.compressor("none"))

    def spoiled(self, payloads, ctx):
        return torch.full((ctx.segments.numel,), torch.nan)

    words = ("run", "--task", "quadratic", "--compressor", "none", "--collective", "allgather")
    words = (*words, "--steps", 3, "--results", tmp_path, "--progress", "none")
    with monkeypatch.context() as patch:
        patch.setattr(none, "mean", spoiled)
        done = invoke(*words)
    assert done.code == 1
    assert "the mean of none is not finite in layer x at step 0" in done.err
    assert "gcbench verify none" in done.err
    assert "--lr" not in done.err
    assert invoke(*words, "--force").code == 0


@pytest.mark.parametrize("name", ["none", "int8", "natural", "powersgd"])
def test_a_double_beyond_float32_is_refused(name):
    method = registry.compressor(name)
    with pytest.raises(UsageError, match="beyond float32"):
        method.compress(torch.tensor([1e300, 1.0], dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_tensors_of_eight_bits_are_compressed(dtype):
    x = torch.tensor([1.0, -0.5, 3.5, 0.0]).to(dtype)
    method = registry.compressor("int8")
    assert torch.equal(method.decompress(method.compress(x)).float(), x.float())
    with pytest.raises(UsageError, match="NaN"):
        method.compress(torch.tensor([1.0, torch.nan]).to(dtype))


@pytest.mark.parametrize("name", ["randomk", "natural", "eden"])
def test_large_halves_stay_finite(name):
    method = registry.compressor(name)
    x = torch.full((200,), 65504.0, dtype=torch.float16)
    assert method.decompress(method.compress(x)).abs().max() == 65504


def test_a_large_brain_float_stays_finite():
    method, largest = registry.compressor("randomk"), torch.finfo(torch.bfloat16).max
    x = torch.full((200,), largest, dtype=torch.bfloat16)
    assert method.decompress(method.compress(x)).max() == largest
