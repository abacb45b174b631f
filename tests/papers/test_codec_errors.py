"""papers/codec_errors.py: errors by hand, means of equal gradients, the front of bits and error."""

from __future__ import annotations

import codec_errors as study
import pytest
import torch

import gcbench
from gcbench.core.compressor import Key, Segments
from gcbench.core.errors import UsageError


def test_the_error_by_hand():
    x = torch.tensor([3.0, 4.0])
    assert study.error(torch.tensor([3.0, 2.0]), x) == pytest.approx(4 / 25)
    assert study.error(torch.zeros(2), x) == 1
    assert study.error(x.clone(), x) == study.error(torch.zeros(2), torch.zeros(2)) == 0


@pytest.mark.parametrize(("name", "expected"), [("qsgd", 1 / 16), ("bf16", 1.0)])
def test_errors_of_equal_gradients(name, expected):
    """Independent unbiased errors average out over 16 workers; equal ones do not."""
    method = gcbench.get_compressor(name)
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    segments, key = Segments.of([(1 << 16,)], method.granularity), Key(0, 0, 0)
    one, mean = (study.error(study.aggregated(method, [x] * n, segments, key), x) for n in (1, 16))
    assert mean / one == pytest.approx(expected, rel=0.05)


def test_a_codec_that_another_beats_in_bits_and_error_is_not_on_the_front():
    rows = [
        {"method": "a", "bits": 8.0, "real": 0.01},
        {"method": "b", "bits": 8.1, "real": 0.02},
        {"method": "c", "bits": 4.0, "real": 0.02},
    ]
    assert study.conclusion(rows).endswith(": a (8.00), c (4.00).")


def test_methods_in_rounds_are_refused():
    with pytest.raises(UsageError, match="powersgd"):
        study.Settings(method=["powersgd"]).chosen()
