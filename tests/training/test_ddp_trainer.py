"""Engine ddp: the numbers of the other engines, torch's own hooks, resuming, what is hidden."""

from __future__ import annotations

import crew
import pytest
import torch

from gcbench.core.errors import DivergedError, GcbenchError, UsageError
from gcbench.training import captures, configuration, engines, launch
from gcbench.training.configuration import Config
from gcbench.training.ddp_trainer import DdpTrainer, _Counting, overlap
from gcbench.training.store import Run
from gcbench.training.train import Options

pytestmark = pytest.mark.usefixtures("forked")

SHORT = {"task": "digits", "workers": 2, "batch": 32, "steps": 12, "threads": 1, "engine": "ddp"}
CASES = {
    "none": {"compressor": "none", "weight_decay": 0.01, "ema": 0.9},
    "none in small buckets": {"compressor": "none", "bucket_mb": 0.004, "momentum": 0.9},
    "topk, with dense tensors": {"compressor": "topk", "dense_below": 200, "schedule": "poly"},
    "efsignsgd after dense steps": {"compressor": "efsignsgd", "start_step": 4},
    "ef21": {"compressor": "topk", "memory": "ef21"},
    "ef21 after dense steps": {"compressor": "topk", "memory": "ef21", "start_step": 4},
    "dgc after dense steps": {"compressor": "topk", "memory": "dgc", "start_step": 4},
    "dgc where all is sent": {"compressor": "topk", "options": {"ratio": 1.0}, "memory": "dgc"},
}


STOPPED = {
    "a residual": {"compressor": "topk", "steps": 20},
    "where compression begins": {"compressor": "topk", "steps": 20, "start_step": 10},
    "torch's hook": {"compressor": "none", "hook": "torch", "momentum": 0.9, "steps": 20},
}
COLLECTIVES = ("terngrad", "powersgd")
TORCHS = {"none": {"compressor": "none"}, "fp16": {"compressor": "fp16"}}
BUCKETS = {"two": 0.004, "one": 25.0}


def fit(folder, **settings) -> dict:
    config = Config.make({**SHORT, **settings})
    run = Run(folder)
    run.create()
    run.start(config.model_dump(mode="json"), configuration.provenance(config))
    engines.ENGINES[config.engine](config, run, Options())
    return run.summary


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict:
    """What two processes train through DDP, started once for all of it: name -> summary."""
    jobs, folder = [], tmp_path_factory.mktemp("ddp")

    def job(name: str, settings: dict, where: str = "", how: str = "whole") -> None:
        run = Run(folder / (where or name))
        run.folder.exists() or run.create()
        jobs.append((name, {**SHORT, **settings}, str(run.folder), how))

    for name, settings in CASES.items():
        job(name, settings)
    for name in COLLECTIVES:
        job(name, {"compressor": name, "steps": 30})
    for name, settings in TORCHS.items():
        job(f"torch's {name}", {**settings, "hook": "torch"})
    for name, settings in STOPPED.items():
        job(f"{name}, whole", settings)
        job(f"{name}, cut", settings, f"{name}, parts", "cut")
        job(f"{name}, resumed", settings, f"{name}, parts")
    for name, size in BUCKETS.items():
        settings = {"compressor": "none", "steps": 6, "bucket_mb": size}
        job(f"{name} slow", settings, how="slow")
    first, second = launch.in_processes(2, 1, crew.train_through_ddp, (jobs,))
    for name in first:
        assert first[name].pop("freed"), "before the process group is destroyed"
        assert first[name].keys() == second[name].keys() - {"freed"}
    return first


@pytest.mark.parametrize("case", CASES)
def test_ddp_ends_in_the_bits_of_the_other_engines(tmp_path, trained, case):
    """Of methods that neither draw nor cut shards, whatever the lanes are; bytes are the same."""
    there = trained[case]
    settings = {key: value for key, value in CASES[case].items() if key != "bucket_mb"}
    here = fit(tmp_path / "simulate", **settings, engine="simulate")
    for key in ("params_sha256", "payload_bytes_up", "payload_bytes_down", "test_loss"):
        assert there[key] == here[key], key
    assert "overlap" not in here
    assert there["phase_seconds"]["exposed"] == there["overlap"]["exposed_seconds"] > 0
    assert there["phase_seconds"]["communicate"] > 0


def test_the_engine_starts_the_processes(tmp_path, trained):
    case = "none in small buckets"
    assert fit(tmp_path, **CASES[case])["params_sha256"] == trained[case]["params_sha256"]


@pytest.mark.parametrize("compressor", COLLECTIVES)
def test_every_collective_trains(trained, compressor):
    """Two-shot, with draws, and in rounds: other bits, as tensors lie in another order."""
    assert trained[compressor]["test_accuracy"] > 0.5


def test_torch_has_hooks_of_its_own(tmp_path, trained):
    """Plain DDP is the exchange with `none`; torch's fp16 sends half, and rounds before it adds."""
    plain, half = trained["torch's none"], trained["torch's fp16"]
    ours = fit(tmp_path, compressor="none", engine="simulate")
    assert plain["params_sha256"] == ours["params_sha256"]  # a sum of two has one order
    size = 4 * plain["params"] * 12
    assert (plain["payload_bytes_up"], half["payload_bytes_up"]) == (size, size / 2)
    assert half["wire_bytes"]["per_worker"] == size / 2
    assert half["params_sha256"] != plain["params_sha256"]
    assert half["collective"] == "allreduce"
    assert half["overlap"]["hidden_share"] is None
    assert half["phase_seconds"]["encode"] is None
    assert half["config"]["hook"] == "torch"


@pytest.mark.parametrize("what", STOPPED)
def test_a_stopped_run_goes_on_in_the_same_bits(trained, what):
    """Residuals and bytes come back from the checkpoint, on both ranks."""
    whole, resumed = trained[f"{what}, whole"], trained[f"{what}, resumed"]
    assert trained[f"{what}, cut"] == {"stopped": 10}
    for key in ("params_sha256", "payload_bytes_up"):
        assert resumed[key] == whole[key]


def test_what_is_hidden_is_seen(trained):
    """Two lanes of 40 ms each, 80 ms of backward between: one is hidden. A single lane never is."""
    two, one = (trained[f"{name} slow"]["overlap"] for name in BUCKETS)
    assert two["exchange_seconds"] > 0.08
    assert 0.2 < two["hidden_share"] < 0.8
    assert one["exchange_seconds"] > 0.04
    assert one["hidden_share"] < 0.2


def test_overlap_by_hand():
    assert overlap([4.0, 5.0, 6.0], [1.0, 2.0, 3.0]) == {
        "exchange_seconds": 5.0,
        "exposed_seconds": 2.0,
        "hidden_share": 0.6,
    }
    assert overlap([1.0], [2.0])["hidden_share"] == 0
    assert overlap(None, [2.0])["hidden_share"] is None


@pytest.mark.parametrize("hook", ["gcbench", "torch"])
def test_a_gradient_that_is_not_finite_stops_a_run_with_either_hook(tmp_path, hook):
    with pytest.raises(DivergedError, match="finite"):
        fit(tmp_path, compressor="none", hook=hook, lr=1e30)


def test_bytes_of_a_hook_that_calls_something_else_are_not_guessed(simulated):
    counting = _Counting(simulated(2))
    with pytest.raises(UsageError, match=r"broadcast_.*cannot be counted"):
        counting.__torch_dispatch__(torch.ops.c10d.broadcast_.default, ())
    with _Counting(simulated(2)):
        assert torch.ones(3).sum() == 3, "other operations are not counted"


ON_CUDA = {"compressor": "powersgd", "hook": "torch", "device": "cuda"}


def test_a_run_with_torchs_powersgd_is_not_resumed_without_its_residuals(tmp_path, simulated):
    settings, run = {**SHORT, **ON_CUDA, "task": "quadratic"}, Run(tmp_path)
    config = Config.make(settings)
    DdpTrainer(config, simulated(1), run, Options()).save()
    with pytest.raises(GcbenchError, match="--force"):
        DdpTrainer(config, simulated(1), run, Options()).resume()
    plain = Config.make({**settings, "compressor": "none"})
    DdpTrainer(plain, simulated(1), run, Options()).resume()


REFUSED = {
    "one worker": ({"workers": 1}, "--workers 2"),
    "skip": ({"on_nonfinite": "skip"}, "on_nonfinite=stop"),
    "delay": ({"delay": 1}, "--engine spawn"),
    "local steps": ({"local_steps": 4}, "--engine spawn"),
    "rebroadcast": ({"rebroadcast_every": 2}, "--engine spawn"),
    "schedule": ({"compressor": "topk", "options": {"ratio": {0: 0.1, 5: 0.01}}}, "a schedule"),
    "batched": ({"gradients": "batched"}, "gradients=loop"),
    "another engine": ({"engine": "spawn", "hook": "torch"}, "--engine ddp"),
    "bucket elsewhere": ({"engine": "simulate", "bucket_mb": 1.0}, "--engine ddp"),
    "no hook": ({"compressor": "bf16", "hook": "torch"}, "no hook for 'bf16'"),
    "powersgd": ({"compressor": "powersgd", "hook": "torch"}, "hangs on gloo"),
    "memory": ({"hook": "torch", "memory": "residual"}, "--hook gcbench"),
    "dense": ({"hook": "torch", "dense_below": 5}, "--hook gcbench"),
    "collective": ({"hook": "torch", "collective": "allgather"}, "collective: .*--hook gcbench"),
    "memory's field": (
        {**ON_CUDA, "memory_options": {"decay": 0.5}},
        "memory_options: .*--hook gcbench",
    ),
    "field": ({**ON_CUDA, "options": {"rank": 1, "warm_start": False}}, "^options.warm_start: "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_ddp_does_not_do_is_refused_with_the_reason(case):
    settings, message = REFUSED[case]
    with pytest.raises(UsageError, match=message):
        Config.make({**SHORT, "compressor": "none", **settings})


def test_nothing_sees_whole_gradients(tmp_path, simulated):
    config = Config.make({**SHORT, "compressor": "none"})
    plan = captures.Plan((1,), None)
    for options in (Options(on_bucket=print), Options(capture=plan)):
        with pytest.raises(UsageError, match="--engine spawn"):
            DdpTrainer(config, simulated(2), Run(tmp_path), options)


def test_the_recorded_command():
    config = Config.make({**SHORT, "compressor": "fp16", "hook": "torch", "bucket_mb": 0.5})
    message = configuration.command(config)
    for words in ("--engine ddp", "--hook torch", "--bucket-mb 0.5"):
        assert words in message
