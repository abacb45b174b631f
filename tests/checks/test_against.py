"""A method is compared with an author's lines of numpy: bit for bit, in calls and in training."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from commands import invoke
from wrong_methods import INT8, TOPK

from gcbench.checks import against, cases, properties, verify
from gcbench.core import registry
from gcbench.core.compressor import Key, Segments
from gcbench.core.errors import UsageError

NONE = """
def decoded(x, segments):
    return x
"""
TOP = """
import numpy as np

def decoded(x, segments):
    out = np.zeros_like(x)
    for s in segments:
        part = x[s]
        k = max(1, int(np.ceil(0.01 * len(part)))) if len(part) else 0
        order = np.argsort(-np.abs(part), kind="stable")[:k]
        out[s][order] = part[order]
    return out
"""
LEVELS = """
import numpy as np

TOLERANCE = 1e-6

def decoded(x, segments, uniform):
    out = np.zeros_like(x)
    for s in segments:
        top = np.abs(x[s]).max(initial=0)
        if top >= 7 * 2.0**-100:
            level = np.abs(x[s]).astype(np.float64) / top * 7
            out[s] = np.sign(x[s]) * np.floor(level + uniform[s]) / 7 * top
    return out
"""


DATACLASS = """
from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Settings:
    top: float


def decoded(x, segments):
    return x
"""


def verdicts(method, text, tmp_path):
    path = tmp_path / "reference.py"
    path.write_text(text)
    return {row.check: row for row in against.compare(method, against.load(path))}


@pytest.mark.parametrize(
    ("name", "text"), [("none", NONE), ("topk", TOP), ("topk", TOP + "\nTOLERANCE = 1e-6")]
)
def test_a_right_method_equals_its_reference(name, text, tmp_path):
    rows = verdicts(registry.compressor(name), text, tmp_path)
    assert {row.verdict for row in rows.values()} == {"holds"}, rows
    assert len(rows) == 3


class LastStep(TOPK):
    """Sends nothing from step 20 on."""

    def encode(self, x, ctx):
        return super().encode(x * (not 20 <= ctx.key.step < 30), ctx)

    def encode_feedback(self, x, residual, ctx):
        if 20 <= ctx.key.step < 30:
            residual.zero_()
        return super().encode_feedback(x, residual, ctx)


class FirstMean(TOPK):
    """The mean is that of worker 0."""

    def mean(self, payloads, ctx):
        return self.decode(payloads[0], ctx)


@pytest.mark.parametrize(
    ("method", "text", "failing"),
    [
        (registry.compressor("topk", ratio=0.02), TOP, "reference: decode(encode(x))"),
        (FirstMean(), TOP, "reference: mean"),
        (LastStep(), TOP, "reference: 30 steps of training"),
        (INT8(), NONE, "reference: decode(encode(x))"),
    ],
)
def test_a_method_that_differs_is_refused(method, text, failing, tmp_path):
    assert verdicts(method, text, tmp_path)[failing].verdict == "fails"


def test_a_reference_may_define_a_dataclass(tmp_path):
    (tmp_path / "reference.py").write_text(DATACLASS)
    x = torch.ones(3)
    reference = against.load(tmp_path / "reference.py")
    assert torch.equal(reference.decoded(x, Segments((0, 3)), x, Key(0, 0, 0)), x)


def test_the_draws_of_a_method_are_at_hand(tmp_path):
    """`uniform` has one number per element, the ones that the key gives."""
    text = "def decoded(x, segments, uniform, step):\n    return uniform"
    (tmp_path / "r.py").write_text(text)
    reference = against.load(tmp_path / "r.py")
    from gcbench import ops
    from gcbench.core.compressor import Key, Segments

    key, segments = Key(3, 4, 5, 6), Segments((0, 50))
    actual = reference.decoded(torch.zeros(50), segments, torch.empty(0), key)
    assert torch.equal(actual, ops.random.uniform(key, 50))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("x = 1", "decoded"),
        ("def decoded(x, segments, colour): ...", "colour"),
        ("def decoded(x, segments): ...\nTOLERANCE = 2", "TOLERANCE"),
        ("def decoded(x, segments): ...\nTOLERANCE = '1e-6'", "TOLERANCE"),
        ("def decoded(x, segments): ...\nmean = 3", "mean = 3"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_file_that_is_no_reference_is_refused(text, named, tmp_path):
    (tmp_path / "r.py").write_text(text)
    with pytest.raises(UsageError, match=named):
        against.load(tmp_path / "r.py")


def test_verify_has_the_rows_of_the_reference(tmp_path, monkeypatch):
    search = SimpleNamespace(covered={}, findings=[], inputs=0, left_out=0, run=list)
    monkeypatch.setattr(verify, "Search", lambda method, effort, before: search)
    monkeypatch.setattr(properties, "CHECKS", {})
    (tmp_path / "r.py").write_text(NONE)
    words = ("verify", "none", "--no-processes", "--against", tmp_path / "r.py", "--json")
    short = cases.Effort(every=50, long=0, many=0, million=0, steps=1)
    with mock.patch.object(cases, "QUICK", short):
        rows = {row["check"]: row["verdict"] for row in invoke(*words).json}
    assert rows["reference: 30 steps of training"] == "holds"
    assert rows["memory: checkpoint"] == "holds"
