"""Engines: the same bits in every one of them, through kills, stops and faults."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import crew
import pytest
import torch
from commands import PATIENCE, ROOT, end, invoke, members, start, wait_for
from torch import nn
from torch.distributed import HashStore

from gcbench.core import registry
from gcbench.core.clock import Clock
from gcbench.core.compressor import Segments
from gcbench.core.errors import DivergedError, GcbenchError, Interrupted, PeerLostError, UsageError
from gcbench.core.exchange import Exchange, Lane
from gcbench.core.world import DistributedWorld, Link, SimulatedWorld
from gcbench.integrations import hook_world
from gcbench.results import rows
from gcbench.training import engines, launch, rank
from gcbench.training.configuration import Config
from gcbench.training.rank import Rank
from gcbench.training.runner import Runner
from gcbench.training.store import Run
from gcbench.training.train import Options, Trainer
from gcbench.training.updates import clip_factor

pytestmark = pytest.mark.usefixtures("forked")

COLLECTIVES = ("twoshot", "allreduce", "allgather")
SAME = (
    "params_sha256",
    "train_loss",
    "test_loss",
    "test_accuracy",
    "payload_bytes_up",
    "payload_bytes_down",
    "wire_bytes",
    "payload_ratio_up",
    "payload_ratio_down",
)


def config(**settings) -> Config:
    return Config.make({"task": "quadratic", "workers": 2, "steps": 30, "log_every": 1, **settings})


def fit(created: Config, folder: Path, **options) -> dict:
    run = Run(folder / created.run_name)
    run.create()
    run.start(created.model_dump(mode="json"), {})
    engines.ENGINES[created.engine](created, run, Options(**options))
    return run.summary


@pytest.fixture
def trainer(tmp_path):
    """Return a function that makes a simulated trainer on one folder."""
    worlds = []

    def make(created: Config, **options) -> Trainer:
        worlds.append(SimulatedWorld(created.workers, torch.device("cpu"), Link(10, 50), 1, 1))
        run = Run(tmp_path / created.run_name)
        run.create()
        return Trainer(created, worlds[-1], run, Options(**options))

    yield make
    for world in worlds:
        world.close()


@pytest.fixture
def normed(monkeypatch):
    """A task whose model has batch-norm statistics, one set for each worker."""

    class Normed(registry.task_class("digits")):
        def model(self):
            return nn.Sequential(
                nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10)
            )

    entry = registry.Entry("normed", "test", lambda: Normed)
    monkeypatch.setitem(registry.tasks(), "normed", entry)
    return "normed"


# -- the same bits ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


WIDE = ("--task", "quadratic", "--task-set", "dimension=5000")  # five tiles: shards of 2 and 3
TWO = (*WIDE, "--workers", 2, "--steps", 30, "--log-every", 10, "--eval-every", 10)


@pytest.fixture(scope="module")
def two(results):
    """Two workers in both local engines, every collective: summaries by (engine, collective)."""
    grid = ("--engine", "simulate,spawn", "--collective", ",".join(COLLECTIVES))
    result = invoke("run", *TWO, *grid, "--results", results, "--json").json
    return {(summary["engine"], summary["collective"]): summary for summary in result}


@pytest.fixture(scope="module")
def three(results):
    """Three workers, convolutions, two lanes, weight decay, Adam and averages."""
    shape = ("--network", "conv", "--dense-last", "--workers", 3, "--batch", 48)
    train = ("--optimizer", "adam", "--lr", 1e-3, "--ema", 0.9, "--weight-decay", 1e-3)
    grid = ("--steps", 12, "--log-every", 5, "--engine", "simulate,spawn")
    result = invoke("run", *shape, *train, *grid, "--results", results, "--json").json
    return {(summary["engine"], "twoshot"): summary for summary in result}


def check_twins(results, result, collective):
    here, there = result["simulate", collective], result["spawn", collective]
    assert {key: here[key] for key in SAME} == {key: there[key] for key in SAME}
    records = []
    for summary in (here, there):
        name = f"{summary['task']}-terngrad-{summary['config_hash']}"
        lines = (results / name / "metrics.jsonl").read_text().splitlines()
        records.append([{**json.loads(line), "seconds": 0} for line in lines])
    assert records[0] == records[1]
    assert len(records[0]) > 2


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_two_processes_do_what_the_simulation_does(results, two, collective):
    check_twins(results, two, collective)


def test_three_processes_do_what_the_simulation_does(results, three):
    check_twins(results, three, "twoshot")


@pytest.mark.parametrize(("name", "collective"), [("int8", "ring"), ("topk", "sparse")])
def test_partial_sums_of_processes_and_of_a_simulation_have_the_same_bits(
    results, name, collective
):
    """Three workers, shards of unequal size, a residual; replicas are compared at the end."""
    method = ("--compressor", name, "--memory", "residual", "--collective", collective)
    job = (*WIDE, "--workers", 3, "--batch", 48, "--steps", 12, "--log-every", 4)
    grid = ("--engine", "simulate,spawn", "--results", results, "--json")
    here, there = invoke("run", *method, *job, *grid).json
    assert {here["engine"], there["engine"]} == {"simulate", "spawn"}
    assert {key: here[key] for key in SAME} == {key: there[key] for key in SAME}
    assert here["collective"] == collective


def test_bytes_of_a_sparse_all_reduce_are_those_that_processes_send():
    """Weighed at torch.distributed; a simulation has the same mean and the same counts.

    Receives are posted before sends: over gloo the directions of a link otherwise take turns.
    """
    n, k = 20_000, 2000
    ranks = launch.in_processes(3, 1, crew.weigh, ("topk", {"ratio": k / n}, "sparse", n))
    world = SimulatedWorld(3, torch.device("cpu"), Link(10, 50), 1, 1)
    clock = Clock(world.device)
    clock.start_step()
    method = registry.compressor("topk", ratio=k / n)
    running = Exchange(world, [Lane(method, "sparse", 0, Segments.of([(n,)]))], 7, clock)
    xs = [torch.randn(n, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    mean = running.mean(xs, 0).tolist()
    for (same, counted, weighed, first), traffic in zip(ranks, world.traffic, strict=True):
        assert same == mean
        assert 8 * k < counted == traffic.wire < 24 * k
        assert weighed == pytest.approx(counted, rel=1e-12)
        assert first == "receive"


def test_times_are_measured_or_modelled_and_never_mixed(two):
    simulated, spawned = two["simulate", "twoshot"], two["spawn", "twoshot"]
    assert simulated["phase_seconds"]["communicate"] is None
    assert simulated["communicate_modelled"]["seconds"] > 0
    assert spawned["phase_seconds"]["communicate"] > 0
    assert spawned["communicate_modelled"] is None
    for summary in (simulated, spawned):
        phases = summary["phase_seconds"]
        named = ("forward_backward", "statistic", "encode", "communicate", "decode", "update")
        assert tuple(phases) == named
        assert all(seconds is None or seconds > 0 for seconds in phases.values())


def test_torchrun_is_found_and_gives_the_same_bits(two, programs, tmp_path):
    launch = ("--nproc-per-node", 2, "-m", "gcbench", "run", *TWO)
    command = shlex.join(map(str, ("torchrun", *launch, "--results", tmp_path, "--json")))
    done = programs.shell(command, ROOT, PATIENCE, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)  # exactly one document, although there are two processes
    assert summary["engine"] == "torchrun"
    expected = two["simulate", "twoshot"]
    assert {key: summary[key] for key in SAME} == {key: expected[key] for key in SAME}
    assert summary["provenance"]["command"].startswith(
        "torchrun --nproc-per-node 2 -m gcbench run --task quadratic --compressor terngrad"
    )
    assert "--engine" not in summary["provenance"]["command"]


def test_torchrun_with_another_number_of_workers(monkeypatch, tmp_path):
    settings = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}
    settings |= {"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    done = invoke("run", "--workers", 2, "--results", tmp_path)
    assert done.code == 2
    assert "--workers 2 under torchrun with 3 processes" in done.err
    assert "--workers 3" in done.err


@pytest.mark.parametrize(("line", "workers"), [("", 3), ("workers: 2", 2)])
def test_torchrun_gives_the_workers_that_a_file_of_settings_leaves_out(
    monkeypatch, tmp_path, line, workers
):
    settings = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}
    settings |= {"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)

    def show(self, configs, *, json):
        raise UsageError(f"{[config.workers for config in configs]} workers")

    monkeypatch.setattr(Runner, "all", show)
    path = tmp_path / "settings.yaml"
    path.write_text(f"task: quadratic\nbatch: 48\n{line}\n")
    assert f"[{workers}] workers" in invoke("run", "--config", path).err


def test_all_workers_of_torchruns_job_leave_out_a_run_that_worker_0_cannot_start(
    monkeypatch, tmp_path
):
    """Otherwise they would wait for it, and meet it at its next run with other settings."""
    member = Rank(0, 2, 0, 2)
    monkeypatch.setattr(rank, "from_torchrun", lambda: member)
    sent: list = []
    closed: list = []

    class Meeting:
        def collect(self, values):
            sent.extend(values)
            return sent

        def close(self):
            closed.append(True)

    monkeypatch.setattr(engines, "join", lambda *_: Meeting())
    refused, runner = config(engine="torchrun"), Runner(tmp_path, None, 60, "none", force=False)
    run, message = Run(tmp_path / refused.run_name), "another gcbench process"
    run.create()
    with run.locked(), pytest.raises(GcbenchError, match=message) as raised:
        runner.one(refused, "[1/2]", leads=True)
    assert (sent, closed) == ([str(raised.value)], [True])
    member = Rank(1, 2, 1, 2)
    with pytest.raises(GcbenchError, match=message):
        runner.one(refused, "[1/2]", leads=False)
    assert closed == [True, True]


def test_torchrun_cannot_be_asked_for():
    done = invoke("run", "--engine", "torchrun")
    assert done.code == 2
    assert "torchrun --nproc-per-node N -m gcbench run" in done.err


# -- gradients of all workers in one pass ----------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{}, {"task_options": {"network": "conv"}, "weight_decay": 1e-3}]
)
def test_batched_gradients_agree_with_the_loop(trainer, settings):
    """Relative to the largest entry within 1e-6 per step, within 1e-5 after twenty."""
    common = {"task": "digits", "workers": 4, "compressor": "none", "steps": 20, **settings}
    loop, batched = (trainer(config(**common, gradients=how)) for how in ("loop", "batched"))
    (xs, losses), (ys, other) = loop._gradients(), batched._gradients()
    assert losses == pytest.approx(other, rel=1e-6)
    for x, y in zip(xs, ys, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-6 * float(x.abs().max()))
    assert not torch.equal(xs[0], xs[1])
    start = torch.cat([p.detach().flatten() for p in loop.parameters])
    for _ in range(20):
        loop.train_step()
        batched.train_step()
    x, y = (torch.cat([p.detach().flatten() for p in t.parameters]) for t in (loop, batched))
    torch.testing.assert_close(x, y, rtol=0, atol=1e-5 * float(x.abs().max()))
    assert float((x - start).abs().max()) > 0.01


def test_batched_is_recorded_and_refused_where_it_is_wrong(normed, tmp_path):
    quick = ("--steps", 3, "--results", tmp_path)
    assert invoke("run", *quick, "--gradients", "batched", "--json").json["gradients"] == "batched"
    done = invoke("run", *quick, "--gradients", "batched", "--engine", "spawn")
    assert done.code == 2
    assert "use gradients=loop" in done.err
    done = invoke("run", *quick, "--gradients", "batched", "--task", normed)
    assert done.code == 2
    assert "batch-norm" in done.err


def test_each_worker_keeps_its_own_statistics(trainer, normed):
    some = trainer(config(task=normed, workers=2))
    some.train_step()
    first, second = (replica[2].running_mean for replica in some.replicas)
    assert not torch.equal(first, second)
    assert some.replicas[0][1].weight is some.replicas[1][1].weight


# -- going on --------------------------------------------------------------------------------------

RECIPES = {
    "plain": {"task": "quadratic"},
    "adam": {"optimizer": "adam", "lr": 1e-3, "ema": 0.9},
    "muon": {"optimizer": "muon", "lr": 1e-3, "weight_decay": 0.1, "decay": "update"},
    "nesterov": {"momentum": 0.9, "nesterov": True, "schedule": "step", "schedule_steps": [4, 9]},
    "statistics": {"task": "normed", "eval_every": 4},
}


class Crash(Exception):
    """What a fault raises."""


def crash_at_twenty(step, rank, bucket):
    if step == 20:
        raise Crash


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("moments", [[1], [0, 5, 13]])
def test_a_crash_loses_nothing(trainer, normed, tmp_path, recipe, moments):
    created = config(**{"task": "digits", **RECIPES[recipe], "steps": 14, "log_every": 2})
    expected = fit(created, tmp_path / "whole")
    whole = Run(tmp_path / "whole" / created.run_name).records()
    for moment in moments:

        def fault(step, rank, bucket, moment=moment):
            if step == moment:
                raise Crash

        with pytest.raises(Crash):
            trainer(created, checkpoint_seconds=0, on_bucket=fault).fit()
    resumed = trainer(created)
    summary = resumed.fit()
    assert {key: summary[key] for key in SAME} == {key: expected[key] for key in SAME}
    assert len(resumed.clock.steps) == 14
    records = resumed.run.records()
    assert [{**r, "seconds": 0} for r in records] == [{**r, "seconds": 0} for r in whole]


def test_a_stop_saves_and_goes_on(trainer):
    created = config(optimizer="adam", ema=0.5)
    expected = trainer(config(optimizer="adam", ema=0.5, log_every=3)).fit()
    steps = iter(range(100))
    with pytest.raises(Interrupted, match="stopped after step 8 of 30"):
        trainer(created).fit(lambda: next(steps) == 7)
    with pytest.raises(Crash):  # records run ahead of the checkpoint
        trainer(created, on_bucket=crash_at_twenty).fit()
    last = trainer(created)
    assert last.run.records()[-1]["step"] == 20
    assert last.fit()["params_sha256"] == expected["params_sha256"]
    assert [r["step"] for r in last.run.records() if "lr" in r] == list(range(1, 31))


def long_run(results: Path, engine: str, steps: int) -> tuple:
    recipe = ("--optimizer", "adam", "--ema", 0.9, "--lr", 0.01, "--workers", 2, "--steps", steps)
    often = ("--log-every", 1, "--checkpoint-seconds", 0, "--progress", "none", "--json")
    return "run", "--task", "quadratic", *recipe, *often, "--engine", engine, "--results", results


def lines(results: Path, name: str = "metrics.jsonl") -> int:
    """Return the number of lines in that file of the only run; 0 before it is there."""
    result = list(results.glob(f"*/{name}"))
    return len(result[0].read_text().splitlines()) if result else 0


def steps_of(results: Path) -> list[int]:
    (path,) = results.glob("*/metrics.jsonl")
    return [r["step"] for r in map(json.loads, path.read_text().splitlines()) if "lr" in r]


def stop(process, sign: signal.Signals) -> None:
    """End a command as a terminal or batch system does, or its leader alone, as the kernel does."""
    if sign == signal.SIGKILL:
        process.send_signal(sign)
    else:
        os.killpg(process.pid, sign)


def test_a_simulation_survives_kills_and_ctrl_c(tmp_path):
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    command = long_run(parts, "simulate", 200)
    for sign, file, more in (
        (signal.SIGKILL, "config.json", 1),
        (signal.SIGKILL, "metrics.jsonl", 4),
        (signal.SIGINT, "metrics.jsonl", 26),
    ):
        reached = lines(parts, file) + more  # beyond what an earlier part has left
        process = start(*command)
        wait_for(lambda file=file, reached=reached: lines(parts, file) >= reached, process)
        stop(process, sign)
        done = end(process)
        assert not list(parts.glob("*/summary.json")), "the signal came too late to test anything"
        if sign == signal.SIGKILL:
            assert done.code == -sign
    assert done.code == 130
    assert done.out == ""
    assert "Traceback" not in done.err
    assert "Continue with: gcbench run --task quadratic" in done.err
    assert "resuming from checkpoint" in done.err
    last = invoke(*command)
    assert "resuming from checkpoint" in last.err
    expected = invoke(*long_run(whole, "simulate", 200)).json
    assert last.json["params_sha256"] == expected["params_sha256"]
    assert last.json["wire_bytes"] == expected["wire_bytes"]
    assert steps_of(parts) == list(range(1, 201))


def test_processes_survive_a_kill_and_ctrl_c_and_none_is_left(tmp_path):
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    command = long_run(parts, "spawn", 200)
    for sign in (signal.SIGKILL, signal.SIGINT):
        reached = lines(parts) + 25  # beyond what an earlier part has left
        process = start(*command)
        wait_for(lambda reached=reached: lines(parts) >= reached, process)
        assert len(members(process.pid)) >= 3
        stop(process, sign)
        process.wait(PATIENCE)
        wait_for(lambda process=process: not members(process.pid))
        assert not list(parts.glob("*/summary.json")), "the signal came too late to test anything"
        done = end(process)
    assert done.code == 130
    assert "Traceback" not in done.err
    assert "stopped after step" in done.err
    assert "Continue with: gcbench run --task quadratic" in done.err
    (saved,) = parts.glob("*/checkpoint.pt")
    step = Run(saved.parent).checkpoint()["step"]
    assert f"stopped after step {step} of 200" in done.err
    last = invoke(*command)
    expected = invoke(*long_run(whole, "simulate", 200)).json
    assert last.json["params_sha256"] == expected["params_sha256"]
    assert last.json["wire_bytes"] == expected["wire_bytes"]
    assert steps_of(parts) == list(range(1, 201))


NESTED = """
import signal
import sys

from gcbench.training import engines

with engines._stop_on_signals(managed=True) as asked:
    handler = signal.getsignal(signal.SIGTERM)
    sys.setprofile(lambda frame, event, arg: handler(signal.SIGTERM, None))
    handler(signal.SIGTERM, None)
    sys.setprofile(None)
    assert asked()
"""


def test_a_signal_may_interrupt_the_handler_of_another():
    """A second signal arrives at each call and return of the first one's handler."""
    done = subprocess.run([sys.executable, "-c", NESTED], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_acts_as_usual(sign):
    before = signal.getsignal(sign)
    with engines._stop_on_signals(managed=False) as asked:
        assert not asked()
        os.kill(os.getpid(), sign)
        assert asked()
        assert signal.getsignal(sign) is before
    with engines._stop_on_signals(managed=True) as asked:
        os.kill(os.getpid(), sign)
        os.kill(os.getpid(), sign)  # the launcher repeats what the terminal sent to all
        assert asked()
    assert signal.getsignal(sign) is before


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_last_evaluation_stops_the_grid(tmp_path, monkeypatch, sign):
    """The run that it interrupts is finished, with its row; the next one does not start."""
    file, runs = tmp_path / "rows.parquet", tmp_path / "runs"
    words = ("run", "--task", "quadratic", "--steps", 2, "--seed", "0,1", "--rows", file)
    words += ("--results", runs, "--progress", "none")
    evaluate = Trainer.evaluate

    def interrupted(self, **options):
        os.kill(os.getpid(), sign)
        return evaluate(self, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "evaluate", interrupted)
        done = invoke(*words)
    assert (done.code, len(list(runs.glob("*/config.json")))) == (130, 1)
    assert "1 run(s) left" in done.err
    assert [one["seed"] for one in rows.read(file)] == [0]
    assert [one["seed"] for one in invoke(*words, "--json").json] == [0, 1]
    assert [one["seed"] for one in rows.read(file)] == [0, 1]


def test_an_ignored_signal_stays_ignored():
    """As in a background job of a script; only a worker's launcher uses SIGTERM itself."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        for managed in (False, True):
            with engines._stop_on_signals(managed=managed) as asked:
                os.kill(os.getpid(), signal.SIGINT)
                assert not asked()
                os.kill(os.getpid(), signal.SIGTERM)
                assert asked() == managed
            assert {signal.getsignal(number) for number in numbers} == {signal.SIG_IGN}
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_a_closed_world_restores_the_number_of_threads():
    before = torch.get_num_threads()
    world = SimulatedWorld(2, torch.device("cpu"), Link(10, 50), before + 1, 1)
    assert torch.get_num_threads() == before + 1
    world.close()
    assert torch.get_num_threads() == before


# -- faults ----------------------------------------------------------------------------------------


def spoil(step, rank, bucket):
    """Break one entry of one worker's gradient, in two steps."""
    if rank == 1 and step in (3, 7):
        bucket[0] = torch.inf if step == 3 else torch.nan


def test_a_non_finite_gradient_names_layer_worker_and_step(tmp_path):
    def last_layer(step, rank, bucket):
        if rank == 2 and step == 4:
            bucket[-1] = torch.nan

    created = config(task="digits", workers=4)
    with pytest.raises(GcbenchError, match=r"layer 3\.bias of worker 2 at step 4"):
        fit(created, tmp_path, on_bucket=last_layer)
    assert len(Run(tmp_path / created.run_name).records()) == 4


def test_a_divergence_ends_every_worker_of_torchruns_job_as_one(tmp_path, monkeypatch):
    """Worker 0, which loses its peer, records the run as diverged; other losses stay what they are.

    Of local workers the launcher does so.
    """
    created, limit = config(), timedelta(seconds=1)
    monkeypatch.setattr(engines, "ROLL_CALL_SECONDS", 0.01)

    def ended_by(error, rank, store, *, watched=False) -> GcbenchError:
        def failing(*_):
            raise error

        monkeypatch.setattr(engines, "Trainer", failing)
        place = hook_world._Pending(rank, 2)
        world = DistributedWorld(torch.device("cpu"), store, limit, watched=watched, group=place)
        with pytest.raises(GcbenchError) as raised:
            engines._fit(created, world, Run(tmp_path), Options(), managed=True)
        return raised.value

    lost, diverged = PeerLostError("a collective failed"), DivergedError("in worker 1", 4)
    store = HashStore()
    assert ended_by(lost, 0, store) is lost
    assert ended_by(diverged, 1, store) is diverged
    there = ended_by(lost, 0, store)
    assert isinstance(there, DivergedError)
    assert (str(there), there.step) == ("in worker 1", 4)
    assert ended_by(lost, 0, store, watched=True) is lost
    usage = UsageError("another fault")
    assert ended_by(usage, 0, store) is usage


def test_all_workers_skip_a_step_together(tmp_path):
    here = fit(config(on_nonfinite="skip"), tmp_path, on_bucket=spoil)
    there = fit(config(on_nonfinite="skip", engine="spawn"), tmp_path, on_bucket=spoil)
    assert here["skipped_steps"] == there["skipped_steps"] == 2
    assert {key: here[key] for key in SAME} == {key: there[key] for key in SAME}
    clean = fit(config(on_nonfinite="skip"), tmp_path / "clean")
    assert clean["skipped_steps"] == 0
    assert clean["params_sha256"] != here["params_sha256"]


def test_a_delayed_mean_is_applied_if_the_last_step_is_skipped(tmp_path):
    """So all means are applied, in a run that ends with a bad step as in one that does not."""

    def after(steps: int, bad: int | None) -> str:
        def on_bucket(step, rank, bucket):
            if step == bad:
                bucket[0] = torch.nan

        settings = config(
            on_nonfinite="skip", delay=1, steps=steps, schedule="constant", lr=0.1, momentum=0.0
        )
        folder = tmp_path / f"{steps} {bad}"
        return fit(settings, folder, on_bucket=on_bucket)["params_sha256"]

    assert after(4, 3) == after(3, None) != after(2, None)


def test_large_gradients_are_clipped_and_not_erased():
    """The sum of squares overflows in float32."""
    for value in (1e18, 1e20, 3e38):
        gradient = torch.full((4,), value)
        assert clip_factor([gradient], 1.0) == pytest.approx(1 / (2 * value), rel=1e-5, abs=0.0)
    assert clip_factor([torch.zeros(4)], 1.0) == 1.0


def test_a_step_that_is_bad_elsewhere_is_skipped_here(trainer, monkeypatch):
    """A worker that went on alone would wait for its peers in the next exchange."""
    created = trainer(config(on_nonfinite="skip"))
    buckets, _ = created._gradients()
    assert created._all_finite(buckets)
    monkeypatch.setattr(created.world, "all_reduce", lambda flags, op: torch.ones(1))
    assert not created._all_finite(buckets)


def test_a_failing_process_is_named_and_its_peers_end(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    created = config(engine="spawn")
    with pytest.raises(GcbenchError, match="layer x of worker 1 at step 3"):
        fit(created, tmp_path, on_bucket=spoil)
    assert len(Run(tmp_path / created.run_name).records()) == 3
    assert signal.getsignal(signal.SIGINT) is before


def test_large_but_finite_gradients_are_no_fault(tmp_path):
    def large(step, rank, bucket):
        bucket.fill_(3e38)  # their sum overflows, they do not

    assert (
        fit(config(steps=1, compressor="terngrad"), tmp_path, on_bucket=large)["skipped_steps"] == 0
    )


def test_replicas_that_drift_apart_stop_the_run(tmp_path, monkeypatch):
    def collect(self, values):
        return [f"{v}{i // 2}" if isinstance(v, str) and v else v for i, v in enumerate(values)]

    monkeypatch.setattr(SimulatedWorld, "collect", collect)
    with pytest.raises(GcbenchError, match=r"differ at step 10: worker\(s\) \[2, 3\]"):
        fit(config(workers=4, eval_every=10), tmp_path)


def test_a_batch_larger_than_the_data_set(tmp_path):
    with pytest.raises(UsageError, match="batch 2000 is larger than the 1437 training examples"):
        fit(config(task="digits", batch=2000), tmp_path)
