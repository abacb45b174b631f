"""Runs, results and codecs from Python."""

from __future__ import annotations

import sys

import pytest

import gcbench
from gcbench.core.errors import Interrupted, UsageError
from gcbench.training.runner import Runner


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


def test_an_interrupted_grid_names_the_call_that_continues_it(tmp_path, monkeypatch, capsys):
    """The words of the command line are those of the script."""
    monkeypatch.setattr(sys, "argv", ["sweep.py", "--mine"])

    def stop(self, config, run, threads=None):
        raise Interrupted("stopped after step 1 of 4")

    monkeypatch.setattr(Runner, "_engine", stop)
    for force in (False, True):
        with pytest.raises(Interrupted):
            gcbench.run(task="quadratic", steps=4, results=tmp_path, force=force)
        message = capsys.readouterr().err
        assert "Continue with: the same call of gcbench.run" in message
        assert ("without force" in message) == force
        assert "--mine" not in message


def test_torchrun_is_refused_before_anything_is_trained(tmp_path, monkeypatch):
    """The folder of a run under torchrun has another name, and only worker 0 knows its result."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(UsageError, match="under torchrun"):
        gcbench.run(task="quadratic", steps=4, results=tmp_path)


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
