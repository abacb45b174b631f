"""Engine ddp: the numbers of the other engines, torch's own hooks, resuming, what is hidden."""

from __future__ import annotations

import crew
import pytest
import torch

from gcbench.core.errors import UsageError
from gcbench.training import captures, configuration, engines, launch
from gcbench.training.configuration import Config
from gcbench.training.overlapped import DdpTrainer, _Counting, overlap
from gcbench.training.store import Run
from gcbench.training.train import Options

SHORT = {"task": "digits", "workers": 2, "batch": 32, "steps": 12, "threads": 1, "engine": "ddp"}
CASES = {
    "none": {"compressor": "none", "weight_decay": 0.01, "ema": 0.9},
    "none in small buckets": {"compressor": "none", "bucket_mb": 0.004, "momentum": 0.9},
    "topk, with dense tensors": {"compressor": "topk", "dense_below": 200, "schedule": "poly"},
    "efsignsgd after dense steps": {"compressor": "efsignsgd", "start_step": 4},
    "ef21": {"compressor": "topk", "memory": "ef21"},
}


def fit(folder, **given) -> dict:
    config = Config.make({**SHORT, **given})
    run = Run(folder)
    run.create()
    run.start(config.model_dump(mode="json"), configuration.provenance(config))
    engines.ENGINES[config.engine](config, run, Options())
    return run.summary


@pytest.mark.parametrize("case", CASES)
def test_ddp_ends_in_the_bits_of_the_other_engines(tmp_path, case):
    """Of methods that neither draw nor cut shards, whatever the lanes are; bytes are the same."""
    there = fit(tmp_path / "ddp", **CASES[case])
    given = {key: value for key, value in CASES[case].items() if key != "bucket_mb"}
    here = fit(tmp_path / "simulate", **given, engine="simulate")
    for key in ("params_sha256", "payload_bytes_up", "payload_bytes_down", "test_loss"):
        assert there[key] == here[key], key
    assert "overlap" not in here
    assert there["phase_seconds"]["exposed"] == there["overlap"]["exposed_seconds"] > 0
    assert there["phase_seconds"]["communicate"] > 0


def test_every_collective_trains(tmp_path):
    """Two-shot, with draws, and in rounds: other bits, as tensors lie in another order."""
    for compressor in ("terngrad", "powersgd"):
        found = fit(tmp_path / compressor, compressor=compressor, steps=30)
        assert found["test_accuracy"] > 0.5


def test_torch_has_hooks_of_its_own(tmp_path):
    """Plain DDP is the exchange with `none`; torch's fp16 sends half, and rounds before it adds."""
    plain = fit(tmp_path / "plain", compressor="none", hook="torch")
    ours = fit(tmp_path / "ours", compressor="none", engine="simulate")
    half = fit(tmp_path / "half", compressor="fp16", hook="torch")
    assert plain["params_sha256"] == ours["params_sha256"]  # a sum of two has one order
    size = 4 * plain["params"] * 12
    assert (plain["payload_bytes_up"], half["payload_bytes_up"]) == (size, size / 2)
    assert half["wire_bytes"]["per_worker"] == size / 2
    assert half["params_sha256"] != plain["params_sha256"]
    assert half["collective"] == "allreduce"
    assert half["overlap"]["hidden_share"] is None
    assert half["phase_seconds"]["encode"] is None
    assert half["config"]["hook"] == "torch"


def in_two(folder, given, cut=0, slow=False) -> dict:
    words = {**SHORT, **given}, str(folder), cut, slow
    first, second = launch.in_processes(2, 1, crew.train_through_ddp, words)
    assert first.keys() == second.keys()
    return first


@pytest.mark.parametrize(
    "given", [{"compressor": "topk"}, {"compressor": "none", "hook": "torch", "momentum": 0.9}]
)
def test_a_stopped_run_goes_on_in_the_same_bits(tmp_path, given):
    """Residuals and bytes come back from the checkpoint, on both ranks."""
    for name in ("whole", "parts"):
        Run(tmp_path / name).create()
    given = {**given, "steps": 20}
    whole = in_two(tmp_path / "whole", given)
    assert in_two(tmp_path / "parts", given, cut=5) == {"stopped": 10}
    resumed = in_two(tmp_path / "parts", given)
    for key in ("params_sha256", "payload_bytes_up"):
        assert resumed[key] == whole[key]


def test_what_is_hidden_is_seen(tmp_path):
    """Two lanes of 40 ms each, 80 ms of backward between: one is hidden. A single lane never is."""
    found = {}
    for name, bucket in (("two", 0.004), ("one", 25.0)):
        Run(tmp_path / name).create()
        given = {"compressor": "none", "steps": 6, "bucket_mb": bucket}
        found[name] = in_two(tmp_path / name, given, slow=True)["overlap"]
    assert found["two"]["exchange_seconds"] > 0.08
    assert 0.2 < found["two"]["hidden_share"] < 0.8
    assert found["one"]["exchange_seconds"] > 0.04
    assert found["one"]["hidden_share"] < 0.2


def test_overlap_by_hand():
    assert overlap([4.0, 5.0, 6.0], [1.0, 2.0, 3.0]) == {
        "exchange_seconds": 5.0,
        "exposed_seconds": 2.0,
        "hidden_share": 0.6,
    }
    assert overlap([1.0], [2.0])["hidden_share"] == 0
    assert overlap(None, [2.0])["hidden_share"] is None


def test_bytes_of_a_hook_that_calls_something_else_are_not_guessed(simulated):
    counting = _Counting(simulated(2))
    with pytest.raises(UsageError, match=r"broadcast_.* not counted"):
        counting.__torch_dispatch__(torch.ops.c10d.broadcast_.default, ())
    with _Counting(simulated(2)):
        assert torch.ones(3).sum() == 3, "what is no collective is left alone"


REFUSED = {
    "one worker": ({"workers": 1}, "--workers 2"),
    "skip": ({"on_nonfinite": "skip"}, "before all came"),
    "delay": ({"delay": 1}, "--engine spawn"),
    "local steps": ({"local_steps": 4}, "--engine spawn"),
    "rebroadcast": ({"rebroadcast_every": 2}, "--engine spawn"),
    "schedule": ({"compressor": "topk", "options": {"ratio": {0: 0.1, 5: 0.01}}}, "a schedule"),
    "batched": ({"gradients": "batched"}, "gradients=loop"),
    "another engine": ({"engine": "spawn", "hook": "torch"}, "--engine ddp"),
    "bucket elsewhere": ({"engine": "simulate", "bucket_mb": 1.0}, "--engine ddp"),
    "no hook": ({"compressor": "bf16", "hook": "torch"}, "no hook for 'bf16'"),
    "powersgd": ({"compressor": "powersgd", "hook": "torch"}, "hangs on gloo"),
    "memory": ({"hook": "torch", "memory": "residual"}, "know nothing of it"),
    "dense": ({"hook": "torch", "dense_below": 5}, "know nothing of it"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_ddp_does_not_do_is_refused_with_the_reason(case):
    given, said = REFUSED[case]
    with pytest.raises(UsageError, match=said):
        Config.make({**SHORT, "compressor": "none", **given})


def test_nothing_sees_whole_gradients(tmp_path, simulated):
    config = Config.make({**SHORT, "compressor": "none"})
    plan = captures.Plan((1,), None)
    for options in (Options(on_bucket=print), Options(capture=plan)):
        with pytest.raises(UsageError, match="--engine spawn"):
            DdpTrainer(config, simulated(2), Run(tmp_path), options)


def test_the_recorded_command():
    config = Config.make({**SHORT, "compressor": "fp16", "hook": "torch", "bucket_mb": 0.5})
    said = configuration.command(config)
    for words in ("--engine ddp", "--hook torch", "--bucket-mb 0.5"):
        assert words in said
