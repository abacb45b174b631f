"""The contract, over every registered compressor and configuration, third parties' too.

Nothing here knows a method by name: gcbench/checks/properties.py is driven by what is declared.
Golden records are tests/golden/<name>.json; `pytest tests/core --update-golden` writes
what is missing or has changed: a changed wire format needs a line in CHANGELOG.md.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gcbench import ops
from gcbench.checks import calls, cases, inputs, payloads, processes, properties
from gcbench.checks.adversary import Search
from gcbench.core import codec, compressor, registry
from gcbench.core.compressor import (
    Compressor,
    Context,
    Key,
    MultiRoundCompressor,
    Payload,
    Segments,
)
from gcbench.core.errors import PayloadError
from gcbench.ops import native

pytestmark = pytest.mark.usefixtures("forked")

GOLDEN = Path(__file__).parents[1] / "golden"
ALL = [
    (name, number)
    for name in registry.compressors()
    for number in range(len(properties.configurations(name)))
]
IDS = [
    f"{name}[{properties.configurations(name)[number][0] or 'default'}]".replace(" ", ",")
    for name, number in ALL
]
every = pytest.mark.parametrize(("name", "number"), ALL, ids=IDS)


def configured(name: str, number: int) -> Compressor:
    return properties.configurations(name)[number][1]


@every
def test_declarations_hold(name, number):
    method = configured(name, number)
    outcomes = {check: properties.run(method, check) for check in properties.CHECKS}
    failed = {
        check: outcome
        for check, outcome in outcomes.items()
        if outcome.verdict not in ("holds", "not declared")
    }
    assert not failed


EFFORT = cases.Effort(every=200, long=0, many=0, million=0, steps=5, thin=200)


@every
def test_the_search_finds_no_fault(name, number):
    effort = EFFORT._replace(positions=number == 0)
    assert Search(configured(name, number), effort).run() == []


# ---- simulate = spawn ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spawned():
    """What three real processes exchange, by (name, number)."""
    methods = [(name, dict(registry.compressor(name).variants[number])) for name, number in ALL]
    return dict(zip(ALL, processes.in_processes(methods), strict=True))


@every
def test_processes_exchange_the_same_bits(spawned, name, number):
    assert processes.digests(configured(name, number)) == spawned[name, number]


# ---- golden bytes --------------------------------------------------------------------------------

SMALL, LARGE = ((5, 7), (9,)), ((33, 40), (1025,), (3,))
CREW = 4
"""Workers of a record whose draws are correlated among all workers."""


def sha(*tensors: torch.Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def record(method: Compressor) -> dict:
    """Return what a method's wire format is: bytes, or values where a library decides the bits."""
    result: dict = {}
    for size, shapes in (("small", SMALL), ("large", LARGE)):
        segments = Segments.of(shapes, method.granularity)
        xs = [inputs.normal(segments.numel, rank) for rank in range(3)]
        shared = calls.agree(method, xs, segments, Key(7, 3, 0))
        payloads = [
            codec.encode(method, x, Context(segments, shared, Key(7, 3, r)))
            for r, x in enumerate(xs)
        ]
        result[f"{size} layout"] = [
            f"{dtype} {n}".removeprefix("torch.") for dtype, n in payloads[0].layout
        ]
        mean = codec.mean(method, payloads, Context(segments, shared))
        if not method.claims.portable:
            result[f"{size} norm"] = float(mean.double().norm())
            result[f"{size} values"] = [float(value) for value in mean[:: max(1, len(mean) // 8)]]
            continue
        if size == "small":
            result["small bytes"] = payloads[0].to_bytes().numpy().tobytes().hex()
        result[f"{size} payloads"] = sha(*(payload.to_bytes() for payload in payloads))
        if not isinstance(method, MultiRoundCompressor):
            result[f"{size} mean"] = sha(mean)
        if "twoshot" in method.legal_collectives():
            merged = codec.merge(method, payloads, Context(segments, shared, Key(7, 3, 0, 0, 1)))
            result[f"{size} merged"] = sha(merged.to_bytes())
        if method.claims.correlated:
            xs = [inputs.normal(segments.numel, rank) for rank in range(CREW)]
            shared = calls.agree(method, xs, segments, Key(7, 3, 0))
            crew = [
                codec.encode(method, x, Context(segments, shared, Key(7, 3, r), CREW))
                for r, x in enumerate(xs)
            ]
            result[f"{size} payloads of {CREW}"] = sha(*(payload.to_bytes() for payload in crew))
    return result


@every
def test_golden_bytes(name, number, request):
    if registry.compressors()[name].source != "built-in":
        pytest.skip("a third party keeps its own golden bytes")
    method = configured(name, number)
    path = GOLDEN / f"{name}.json"
    expected = json.loads(path.read_text()) if path.is_file() else {}
    label = properties.configurations(name)[number][0] or "default"
    result = record(method)
    if request.config.getoption("--update-golden"):
        path.write_text(json.dumps({**expected, label: result}, indent=1, sort_keys=True) + "\n")
        return
    assert label in expected, (
        f"no golden record: run pytest with --update-golden, look, commit {path}"
    )
    if method.claims.portable:
        assert result == expected[label]
        return
    for key, value in expected[label].items():
        if key.endswith("layout"):
            assert result[key] == value
        else:  # a Fourier transform of another library rounds otherwise
            assert result[key] == pytest.approx(value, rel=1e-3, abs=2e-3)


@every
def test_golden_bytes_on_every_backend(name, number):
    """The reference and each instruction set make the bytes that are recorded."""
    method = configured(name, number)
    if not method.claims.portable:
        pytest.skip("not portable: a library decides the last bits, and backends share it")
    with ops.using("reference"):
        expected = record(method)
    available, why = native.status()
    if not available:
        pytest.skip(why)
    for isa in native.isas():
        with ops.using("cpu"), native.using_isa(isa):
            assert record(method) == expected, isa


def test_no_golden_record_is_left_over():
    labels = {
        name: {text or "default" for text, _ in properties.configurations(name)} for name, _ in ALL
    }
    for path in GOLDEN.glob("*.json"):
        assert set(json.loads(path.read_text())) == labels[path.stem], path


# ---- corrupt payloads ----------------------------------------------------------------------------


@cache
def sample(name: str, number: int) -> tuple[Compressor, Payload, Context]:
    method = configured(name, number)
    segments = Segments.of([(13, 11), (1,), (40,)], method.granularity)
    return method, *calls.encode(method, inputs.normal(segments.numel), segments)


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
@every
def test_corrupt_bytes_raise_or_are_finite(name, number, data):
    """Any bytes in any part: PayloadError, or finite values of the right shape."""
    method, payload, ctx = sample(name, number)
    parts = list(payload.parts)
    for _ in range(data.draw(st.integers(1, 3))):
        i = data.draw(st.integers(0, len(parts) - 1))
        raw = bytearray(parts[i].contiguous().view(torch.uint8).numpy().tobytes())
        match data.draw(st.sampled_from(["flip", "random", "cut", "extend"])):
            case "flip" if raw:
                raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
            case "random":
                raw = bytearray(data.draw(st.binary(min_size=len(raw), max_size=len(raw))))
            case "cut":
                raw = raw[: data.draw(st.integers(0, len(raw)))]
            case "extend":
                raw += data.draw(st.binary(min_size=1, max_size=9))
        whole = len(raw) % parts[i].element_size() == 0
        dtype = parts[i].dtype if whole else torch.uint8
        parts[i] = torch.tensor(list(raw), dtype=torch.uint8).view(dtype)
    broken = Payload(tuple(parts), payload.count)
    must = method.layout(ctx.segments) is not None and broken.layout != payload.layout
    assert payloads.corrupt_fault(method, broken, ctx, must=must) == ""


# ---- the contract test itself --------------------------------------------------------------------


def mutated(name: str, options: dict, **methods) -> Compressor:
    """Return a heir of a registered method with some of its methods broken."""
    cls = type("Broken", (registry.compressor_class(name),), {"name": name, **methods})
    return cls(**options)


def test_a_wrong_method_is_found():
    """Faults that accuracy hides, each found by the property that is about them, or the search."""
    terngrad = registry.compressor_class("terngrad")
    onebit = registry.compressor_class("onebit")
    by_steps = Compressor.encode_feedback

    def encode_alike(self, x, ctx):
        return terngrad.encode(self, x, ctx._replace(key=ctx.key._replace(rank=0)))

    def encode_ahead(self, x, ctx):
        limit, local = ctx.prepared or (None, ctx.shared)
        return terngrad.encode(self, x, ctx._replace(prepared=(limit, 2 * local)))

    def decode_negated(self, payload, ctx):
        return -onebit.decode(self, payload, ctx)

    def mean_of_nodes(self, payloads, ctx):
        return onebit.mean(self, payloads, ctx) * 2

    def adds_to_out(self, payload, ctx):
        return ctx.out.add_(onebit.decode(self, payload, ctx._replace(out=None)))

    def impure(self, x, ctx):
        return onebit.encode(self, x.mul_(1.5), ctx)

    def hoards(self, x, ctx):
        """Adds what was sent first, of which it kept no copy."""
        words, *means = onebit.encode(self, x, ctx)
        first = self.__dict__.setdefault("first", means)
        return (words, *(local + other for local, other in zip(means, first, strict=True)))

    def uncounted(self, segments, count=1):
        return onebit.layout(self, segments, count)[1:]

    def refuses_oddly(self, payload, ctx):
        try:
            return onebit.decode(self, payload, ctx)
        except PayloadError as error:
            raise ValueError("corrupt") from error

    def feeds_alone(self, x, residual, ctx):
        payload = codec.encode(self, x + residual, ctx)
        torch.sub(x, self.decode(payload, ctx), out=residual)
        return payload

    def adds_in_place(self, payloads, ctx):
        total = payloads[0].parts[0]
        for payload in payloads[1:]:
            total += payload.parts[0]
        return total.div_(len(payloads))

    def adds_up(self, payloads, ctx):
        return torch.stack([payload.parts[0] for payload in payloads]).sum(0)

    def mean_of_two(self, payloads, ctx):
        return terngrad.mean(self, payloads[:2], ctx)

    def claiming(name: str, **claims) -> property:
        base = type(registry.compressor(name).claims)
        return property(type("Wrong", (base,), claims))

    cases = [
        (mutated("none", {}, mean=adds_in_place), ""),
        (mutated("onebit", {}, encode_feedback=feeds_alone), ""),
        (mutated("onebit", {}, decode=adds_to_out), ""),
        (mutated("terngrad", {"share": False}, encode=encode_ahead), ""),
        (mutated("onebit", {}, encode=hoards, encode_feedback=by_steps), "buffers"),
        (mutated("terngrad", {"clip": 0.0}, encode=encode_alike), "independent noise"),
        (mutated("onebit", {}, decode=decode_negated), "contraction"),
        (mutated("onebit", {}, mean=mean_of_nodes), "exact small integers"),
        (mutated("none", {}, mean=adds_up), ""),
        (mutated("terngrad", {}, mean=mean_of_two), "same mean in collectives"),
        (mutated("onebit", {}, encode=impure), ""),
        (mutated("onebit", {}, layout=uncounted), ""),
        (mutated("onebit", {}, decode=refuses_oddly), "corrupt payloads"),
        (mutated("terngrad", {}, claims=claiming("terngrad", contractive=True)), "contraction"),
        (mutated("onebit", {}, claims=claiming("onebit", unbiased=True)), "unbiased"),
        (mutated("onebit", {}, collectives=("allreduce",)), "exact small integers"),
    ]
    for method, check in cases:
        if check:
            assert properties.run(method, check).verdict == "fails", check
        else:
            assert Search(method, EFFORT, shrink=0).run() != []


def test_compress_computes_segments_once_per_shape_and_group_size(monkeypatch) -> None:
    """In groups of 32 that took six times as long as the encoding of 4 million elements."""
    method, x = registry.compressor("mxfp8"), torch.randn(40, 9)
    first = method.compress(x)
    assert method.compress(2 * x).context.segments is first.context.segments
    for other in (method.compress(x.T), registry.compressor("nvfp4").compress(x)):
        assert other.context.segments is not first.context.segments
    assert torch.equal(method.decompress(first), method.decompress(method.compress(x)))
    monkeypatch.setattr(compressor, "CACHED", x.numel() - 1)
    assert method.compress(x).context.segments is not first.context.segments
