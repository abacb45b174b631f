"""A checkpoint that is damaged, or does not fit its records or its run, never becomes a result."""

from __future__ import annotations

import random
from pathlib import Path

import crew
import pytest
import torch

from gcbench.core.errors import GcbenchError
from gcbench.results.run_folder import CHECKPOINTS
from gcbench.training import engines
from gcbench.training.configuration import Config, provenance
from gcbench.training.store import Run
from gcbench.training.train import CHECK_EVERY, Options, Trainer

pytestmark = pytest.mark.usefixtures("forked")

STEPS = 14


class PowerCut(Exception):
    """What ends a run here."""


def config(**settings) -> Config:
    usual = {"task": "quadratic", "compressor": "topk", "memory": "dgc", "workers": 2, "batch": 4}
    return Config.make({**usual, "steps": STEPS, "log_every": 1, "eval_every": 0, **settings})


def trainer(created: Config, folder: Path, simulated, at: int | None = None) -> Trainer:
    """Return a trainer whose power is cut at a step, saving after each."""

    def cut(step, rank, bucket):
        if step == at:
            raise PowerCut

    run = Run(folder)
    run.create()
    options = Options(checkpoint_seconds=0 if at else 1e9, on_bucket=cut)
    return Trainer(created, simulated(created.workers), run, options)


@pytest.fixture
def broken_off(tmp_path, simulated):
    """A run that fell at step 9, and the digest that it has to end with."""
    whole = trainer(config(), tmp_path / "whole", simulated).fit()["params_sha256"]
    with pytest.raises(PowerCut):
        trainer(config(), tmp_path / "run", simulated, at=9).fit()
    return Run(tmp_path / "run"), whole


def test_the_checkpoint_before_serves_where_the_last_is_damaged(broken_off, simulated, capsys):
    run, whole = broken_off
    assert [Run._checkpoint(run, run.folder / name)["step"] for name in CHECKPOINTS] == [9, 8]
    data = bytearray((run.folder / CHECKPOINTS[0]).read_bytes())
    data[len(data) // 2] ^= 1
    (run.folder / CHECKPOINTS[0]).write_bytes(data)
    assert trainer(config(), run.folder, simulated).fit()["params_sha256"] == whole
    message = capsys.readouterr().err
    assert "checkpoint.pt cannot be read (its digest does not match); resuming from the" in message
    assert [r["step"] for r in run.records() if r["kind"] == "train"] == list(range(1, STEPS + 1))


def test_no_flipped_bit_is_read(broken_off):
    """200 bits anywhere in the file, where 196 were read as other values."""
    run, _ = broken_off
    (run.folder / CHECKPOINTS[1]).unlink()
    path = run.folder / CHECKPOINTS[0]
    right, draw = path.read_bytes(), random.Random(0)
    for _ in range(200):
        data = bytearray(right)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        with pytest.raises(GcbenchError, match=r"cannot be read .*; start over with --force"):
            run.checkpoint()
    path.write_bytes(right)
    assert run.checkpoint()["step"] == 9


def test_skipped_steps_are_no_warm_up(tmp_path, simulated):
    """A run that skips steps, and is resumed after each, ends as one with the same gradients and
    without skipped steps. Before, nothing had computed the second moment, and nothing moved."""
    settings = {"compressor": "onebitadam", "memory": None, "schedule": "constant", "start_step": 3}

    def ended(folder: str, bad: tuple[int, ...]) -> str:
        created = config(**settings, on_nonfinite="skip", steps=8 + len(bad))

        def on_bucket(step: int, rank: int, bucket: torch.Tensor) -> None:
            seed = 2 * (step - sum(each < step for each in bad)) + rank
            bucket.copy_(torch.randn(bucket.shape, generator=torch.Generator().manual_seed(seed)))
            if step in bad:
                bucket[0] = torch.nan

        run = Run(tmp_path / folder)
        run.create()
        for _ in range(created.steps):
            options = Options(on_bucket=on_bucket)
            trainer = Trainer(created, simulated(created.workers), run, options)
            trainer.resume()
            trainer.train_step()
            trainer.save()
        return trainer.parameter_hash()

    assert ended("skipping", (0, 1, 4, 5, 8)) == ended("whole", ())


def shrink(state):
    state["parameters"][0] = state["parameters"][0][:1].clone()


def forget(state):
    state["workers"][1]["exchange"]["tensors"].clear()


def narrow(state):
    tensors = state["workers"][0]["exchange"]["tensors"]
    tensors["memory 0 velocity"] = tensors["memory 0 velocity"][:1].clone()


def widen(state):
    state["parameters"][0] = state["parameters"][0].double()


def taint(state):
    state["workers"][0]["exchange"]["tensors"]["memory 0 velocity"][0] = torch.nan


def alter(state):
    """A value that it might have, but for the digest."""
    state["workers"][1]["exchange"]["tensors"]["memory 0 velocity"][0] += 1


def unrate(state):
    state["workers"][0]["exchange"]["rates"][0][0] = -0.5


def lengthen(state):
    state["workers"][0]["exchange"]["tensors"]["memory 0 other"] = torch.zeros(1)


@pytest.mark.parametrize("wrong", [shrink, forget, narrow, widen, lengthen, taint, alter, unrate])
def test_shapes_and_what_is_carried_are_checked(broken_off, simulated, wrong):
    run, whole = broken_off
    state = run.checkpoint()
    wrong(state)
    run.save(state)
    with pytest.raises(GcbenchError, match=r"checkpoint\.pt does not match this run"):
        trainer(config(), run.folder, simulated).fit()
    (run.folder / CHECKPOINTS[1]).replace(run.folder / CHECKPOINTS[0])
    assert trainer(config(), run.folder, simulated).fit()["params_sha256"] == whole


@pytest.mark.parametrize("lost", [1, 2, 5])
def test_records_that_lost_their_tail_are_not_gone_on_from(broken_off, simulated, capsys, lost):
    """One record less than the last checkpoint counts: the one before it serves. More: refused."""
    run, whole = broken_off
    path = run.folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == 9
    path.write_text("".join(lines[:-lost]))
    if lost == 1:
        assert trainer(config(), run.folder, simulated).fit()["params_sha256"] == whole
        assert "lost or changed records up to step 9" in capsys.readouterr().err
        assert [r["step"] for r in run.records() if r["kind"] == "train"] == list(range(1, 15))
    else:
        with pytest.raises(GcbenchError, match=r"metrics\.jsonl lost or changed records up to"):
            trainer(config(), run.folder, simulated).fit()


def test_a_changed_record_is_found(broken_off):
    run, _ = broken_off
    path = run.folder / "metrics.jsonl"
    path.write_text(path.read_text().replace('"step": 3', '"step": 2'))
    with pytest.raises(GcbenchError, match="lost or changed records"):
        run.checkpoint()


def test_a_crash_between_the_two_files_leaves_the_one_before(broken_off, simulated):
    run, whole = broken_off
    (run.folder / CHECKPOINTS[0]).unlink()
    assert trainer(config(), run.folder, simulated).fit()["params_sha256"] == whole


def test_a_stop_where_dense_steps_end_goes_on(tmp_path, simulated):
    """The memory of later steps has buffers that the checkpoint cannot have."""
    created = config(memory="residual", start_step=9)
    whole = trainer(created, tmp_path / "whole", simulated).fit()["params_sha256"]
    with pytest.raises(PowerCut):
        trainer(created, tmp_path / "run", simulated, at=9).fit()
    assert trainer(created, tmp_path / "run", simulated).fit()["params_sha256"] == whole


def test_a_replica_that_drifts_is_named_within_fifty_steps(tmp_path):
    """One bit of worker 1's parameters is flipped at step 3; evaluations are far away."""
    created = config(
        engine="spawn", workers=3, batch=6, compressor="none", memory="none", steps=400
    )
    run = Run(tmp_path / "run")
    run.create()
    run.start(created.model_dump(mode="json"), provenance(created))
    message = rf"differ at step {CHECK_EVERY}: worker\(s\) \[1\] differ from worker 0"
    with pytest.raises(GcbenchError, match=message):
        engines.ENGINES["spawn"](created, run, Options(on_bucket=crew.flip_a_bit))
