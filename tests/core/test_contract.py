"""The contract, over every registered compressor and configuration, third parties' too.

Nothing here knows a method by name: gcbench/studies/conformance.py is driven by what is declared.
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
from gcbench.core import registry
from gcbench.core.compressor import Compressor, Key, MultiRoundCompressor, Payload, Segments
from gcbench.core.errors import PayloadError
from gcbench.ops import native
from gcbench.studies import conformance

GOLDEN = Path(__file__).parents[1] / "golden"
ALL = [
    (name, number)
    for name in registry.compressors()
    for number in range(len(conformance.configurations(name)))
]
IDS = [
    f"{name}[{conformance.configurations(name)[number][0] or 'default'}]".replace(" ", ",")
    for name, number in ALL
]
every = pytest.mark.parametrize(("name", "number"), ALL, ids=IDS)


def configured(name: str, number: int) -> Compressor:
    return conformance.configurations(name)[number][1]


@pytest.mark.parametrize("check", conformance.CHECKS)
@every
def test_declared_is_true(name, number, check):
    outcome = conformance.run(configured(name, number), check)
    if outcome.verdict == "not declared":
        pytest.skip(f"not declared: {outcome.note}")
    assert outcome.verdict == "holds", outcome


# ---- simulate = spawn ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spawned():
    """What three real processes exchange, by (name, number)."""
    methods = [(name, dict(registry.compressor(name).variants[number])) for name, number in ALL]
    return dict(zip(ALL, conformance.in_processes(methods), strict=True))


@every
def test_processes_exchange_the_same_bits(spawned, name, number):
    assert conformance.exchange_digests(configured(name, number)) == spawned[name, number]


# ---- golden bytes --------------------------------------------------------------------------------

SMALL, LARGE = ((5, 7), (9,)), ((33, 40), (1025,), (3,))


def sha(*tensors: torch.Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def record(method: Compressor) -> dict:
    """Return what a method's wire format is: bytes, or values where a library decides the bits."""
    found: dict = {}
    for size, shapes in (("small", SMALL), ("large", LARGE)):
        segments = Segments.of(shapes, method.granularity)
        xs = [conformance.normal(segments.numel, rank) for rank in range(3)]
        shared = conformance._shared(method, xs, segments, Key(7, 3, 0))
        payloads = [method.encode(x, segments, shared, Key(7, 3, r)) for r, x in enumerate(xs)]
        found[f"{size} layout"] = [
            f"{dtype} {n}".removeprefix("torch.") for dtype, n in payloads[0].layout
        ]
        mean = method.mean(payloads, segments, shared)
        if not method.claims.portable:
            found[f"{size} norm"] = float(mean.double().norm())
            found[f"{size} values"] = [float(value) for value in mean[:: max(1, len(mean) // 8)]]
            continue
        if size == "small":
            found["small bytes"] = payloads[0].to_bytes().numpy().tobytes().hex()
        found[f"{size} payloads"] = sha(*(payload.to_bytes() for payload in payloads))
        if not isinstance(method, MultiRoundCompressor):
            found[f"{size} mean"] = sha(mean)
        if "twoshot" in method.legal_collectives():
            merged = method.merge(payloads, segments, shared, Key(7, 3, 0, 0, 1))
            found[f"{size} merged"] = sha(merged.to_bytes())
    return found


@every
def test_golden_bytes(name, number, request):
    if registry.compressors()[name].source != "built-in":
        pytest.skip("a third party keeps its own golden bytes")
    method = configured(name, number)
    path = GOLDEN / f"{name}.json"
    known = json.loads(path.read_text()) if path.is_file() else {}
    label = conformance.configurations(name)[number][0] or "default"
    found = record(method)
    if request.config.getoption("--update-golden"):
        path.write_text(json.dumps({**known, label: found}, indent=1, sort_keys=True) + "\n")
        return
    assert label in known, f"no golden record: run pytest with --update-golden, look, commit {path}"
    if method.claims.portable:
        assert found == known[label]
        return
    for key, value in known[label].items():
        if key.endswith("layout"):
            assert found[key] == value
        else:  # a Fourier transform of another library rounds otherwise
            assert found[key] == pytest.approx(value, rel=1e-3, abs=2e-3)


@every
def test_golden_bytes_on_every_backend(name, number):
    """The reference and each instruction set make the bytes that are recorded."""
    method = configured(name, number)
    if not method.claims.portable:
        pytest.skip("not portable: a library decides the last bits, and backends share it")
    with ops.using("reference"):
        known = record(method)
    available, why = native.status()
    if not available:
        pytest.skip(why)
    for isa in native.isas():
        with ops.using("cpu"), native.using_isa(isa):
            assert record(method) == known, isa


def test_no_golden_record_is_left_over():
    labels = {
        name: {text or "default" for text, _ in conformance.configurations(name)} for name, _ in ALL
    }
    for path in GOLDEN.glob("*.json"):
        assert set(json.loads(path.read_text())) == labels[path.stem], path


# ---- corrupt payloads ----------------------------------------------------------------------------


@cache
def sample(name: str, number: int) -> tuple[Compressor, Payload, Segments, torch.Tensor]:
    method = configured(name, number)
    segments = Segments.of([(13, 11), (1,), (40,)], method.granularity)
    payload, shared = conformance._encode(method, conformance.normal(segments.numel), segments)
    return method, payload, segments, shared


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
@every
def test_corrupt_bytes_raise_or_are_finite(name, number, data):
    """Any bytes in any part: PayloadError, or finite values of the right shape."""
    method, payload, segments, shared = sample(name, number)
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
    must = method.layout(segments) is not None and broken.layout != payload.layout
    assert conformance.judge_corrupt(method, broken, segments, shared, must=must) == ""


# ---- the contract test itself --------------------------------------------------------------------


def mutated(name: str, options: dict, **methods) -> Compressor:
    """Return a heir of a registered method with some of its methods broken."""
    cls = type("Broken", (registry.compressor_class(name),), {"name": name, **methods})
    return cls(**options)


def test_a_wrong_method_is_found():
    """Faults that accuracy hides, each found by the check that is about them."""
    terngrad = registry.compressor_class("terngrad")
    onebit = registry.compressor_class("onebit")

    def encode_alike(self, x, segments, shared, key, **how):
        return terngrad.encode(self, x, segments, shared, key._replace(rank=0), **how)

    def encode_ahead(self, x, segments, shared, key, *, prepared=None, out=None):
        limit, own = prepared or (None, shared)
        return terngrad.encode(self, x, segments, shared, key, prepared=(limit, 2 * own), out=out)

    def decode_negated(self, payload, segments, shared, *, out=None):
        return -onebit.decode(self, payload, segments, shared)

    def mean_of_nodes(self, payloads, segments, shared, *, out=None):
        return onebit.mean(self, payloads, segments, shared) * 2

    def adds_to_out(self, payload, segments, shared, *, out=None):
        decoded = onebit.decode(self, payload, segments, shared)
        return decoded if out is None else out.add_(decoded)

    def impure(self, x, segments, shared, key, **how):
        return onebit.encode(self, x.mul_(1.5), segments, shared, key, **how)

    def hoards(self, x, segments, shared, key, *, prepared=None, out=None):
        """Adds what was sent first, of which it kept no copy."""
        payload = onebit.encode(self, x, segments, shared, key, out=out)
        words, *means = payload.parts
        first = self.__dict__.setdefault("first", means)
        return Payload((words, *(own + other for own, other in zip(means, first, strict=True))))

    def uncounted(self, segments, count=1):
        return onebit.layout(self, segments, count)[1:]

    def accepts_anything(self, payload, segments, shared, *, out=None):
        try:
            return onebit.decode(self, payload, segments, shared)
        except PayloadError:
            return torch.zeros(segments.numel)

    def feeds_alone(self, x, residual, segments, shared, key, *, out=None):
        payload = onebit.encode(self, x + residual, segments, shared, key)
        torch.sub(x, self.decode(payload, segments, shared), out=residual)
        return payload

    def adds_once(self, payload, segments, shared, total):
        total += self.decode(payload, segments, shared)

    def adds_in_place(self, payloads, segments, shared, *, out=None):
        total = payloads[0].parts[0]
        for payload in payloads[1:]:
            total += payload.parts[0]
        return total.div_(len(payloads))

    def adds_up(self, payloads, segments, shared, *, out=None):
        return torch.stack([payload.parts[0] for payload in payloads]).sum(0)

    def mean_of_two(self, payloads, segments, shared, *, out=None):
        return terngrad.mean(self, payloads[:2], segments, shared)

    def claiming(name: str, **claims) -> property:
        base = type(registry.compressor(name).claims)
        return property(type("Wrong", (base,), claims))

    cases = [
        (mutated("none", {}, mean=adds_in_place), "purity"),
        (mutated("onebit", {}, encode_feedback=feeds_alone), "fused operations"),
        (mutated("onebit", {}, decode_onto=adds_once), "fused operations"),
        (mutated("onebit", {}, decode=adds_to_out), "outputs"),
        (mutated("terngrad", {"share": False}, encode=encode_ahead), "outputs"),
        (mutated("onebit", {}, encode=hoards, fused_feedback=False), "buffers"),
        (mutated("terngrad", {"clip": 0.0}, encode=encode_alike), "independent noise"),
        (mutated("onebit", {}, decode=decode_negated), "contraction"),
        (mutated("onebit", {}, mean=mean_of_nodes), "exact small integers"),
        (mutated("none", {}, mean=adds_up), "equal workers"),
        (mutated("terngrad", {}, mean=mean_of_two), "same mean in collectives"),
        (mutated("onebit", {}, encode=impure), "purity"),
        (mutated("onebit", {}, layout=uncounted), "every size and input"),
        (mutated("onebit", {}, decode=accepts_anything), "corrupt payloads"),
        (mutated("terngrad", {}, claims=claiming("terngrad", contractive=True)), "contraction"),
        (mutated("onebit", {}, claims=claiming("onebit", unbiased=True)), "unbiased"),
        (mutated("onebit", {}, collectives=("allreduce",)), "exact small integers"),
    ]
    for method, check in cases:
        assert conformance.run(method, check).verdict == "fails", check
