"""The examples of README's section "From Python" run as they stand, one after the other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import gcbench
from gcbench.core.errors import UsageError

ROOT = Path(__file__).parents[2]


def examples() -> list[str]:
    text = (ROOT / "README.md").read_text()
    section = re.search(r"\n## From Python\n(.*?)\n## ", text, re.DOTALL)
    assert section
    return re.findall(r"```python\n(.*?)```", section.group(1), re.DOTALL)


SEEN = """
import json
print(json.dumps({
    "runs": len(runs),
    "accuracy": runs["test_accuracy"].min(),
    "bits": runs.groupby("compressor_name")["bits"].mean().to_dict(),
    "bytes": packed.payload.nbytes,
    "verdicts": sorted(set(verdicts.values())),
}))
"""


def test_the_examples_run_and_show_what_they_promise(tmp_path):
    import json

    found = examples()
    assert len(found) == 4
    script = tmp_path / "examples.py"
    script.write_text("\n".join([*found, SEEN]))
    words = [sys.executable, "-W", "error::DeprecationWarning", str(script)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["runs"] == 6
    assert seen["accuracy"] > 0.8
    assert seen["bits"]["none"] == 32
    assert 2 < seen["bits"]["terngrad"] < 2.2, "two bits an element, and the scales"
    assert seen["bytes"] == (64 * 32 * 4) // 8 + 4 * (64 * 32 // 512), "four bits, a norm a bucket"
    assert seen["verdicts"] == ["holds", "not declared"]


def test_a_grid_is_a_frame_with_a_row_a_run(tmp_path):
    """Finished runs are not made again; the frame is that of the grid, not of the folder."""
    settings = {"task": "digits", "steps": 5, "results": tmp_path}
    first = gcbench.run(compressor=["none", "qsgd"], options={"levels": [1, 7]}, **settings)
    assert first["compressor_name"].tolist() == ["none", "qsgd", "qsgd"]
    assert first["config.options.levels"].tolist()[1:] == [1, 7]
    again = gcbench.run(compressor="qsgd", options={"levels": 7}, **settings)
    assert again["params_sha256"].tolist() == first["params_sha256"].tolist()[2:]
    assert again["provenance.started"].tolist() == first["provenance.started"].tolist()[2:]
    assert len(gcbench.load_results(tmp_path)) == 3
    # a default that is given is another config with the same result
    default = gcbench.run(compressor="qsgd", **settings)
    assert default["params_sha256"].tolist() == again["params_sha256"].tolist()
    assert default["config_hash"].tolist() != again["config_hash"].tolist()
    twice = gcbench.run(compressor="qsgd", options={"levels": [1, 7]}, **settings)
    assert twice["config_hash"].tolist() == first["config_hash"].tolist()[1:]


def test_an_unknown_setting_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(UsageError, match="Did you mean 'compressor'"):
        gcbench.run(compresor="none", results=tmp_path)
    with pytest.raises(AttributeError, match="no attribute 'Compresor'"):
        _ = gcbench.Compresor


def test_a_codec_takes_any_shape_and_refuses_what_is_no_gradient():
    import torch

    codec = gcbench.get_compressor("bf16")
    for shape in ((), (0,), (3, 5, 7)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).double()
        y = codec.decompress(codec.compress(x))
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        assert torch.equal(y.float(), x.bfloat16().float())
    for wrong in (torch.tensor([1]), torch.tensor([float("nan")])):
        with pytest.raises(UsageError, match="x "):
            codec.compress(wrong)
