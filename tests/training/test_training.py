"""The training loop: who sees which examples, what is applied, and that it learns."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from gcbench.compressors.memories.dgc import Dgc
from gcbench.compressors.memories.residual import Residual

from gcbench.core.errors import Interrupted
from gcbench.core.memory import Memory
from gcbench.core.world import SimulatedWorld
from gcbench.training.configuration import Config
from gcbench.training.store import Run
from gcbench.training.train import Options, Trainer


@pytest.fixture
def trainer(simulated, tmp_path):
    def make(**settings) -> Trainer:
        config = Config.make({"task": "digits", "compressor": "none", **settings})
        data_dir = settings.get("data_dir")
        return Trainer(config, simulated(config.workers), Run(tmp_path), Options(data_dir))

    return make


def fit(tmp_path: Path, data_dir: Path | None = None, **settings) -> dict:
    config = Config.make(settings)
    world = SimulatedWorld(config.workers, torch.device("cpu"), None, 1, 2)
    run = Run(tmp_path / config.run_name)
    run.create()
    try:
        return Trainer(config, world, run, Options(data_dir)).fit()
    finally:
        world.close()


def test_workers_share_out_every_epoch(trainer):
    """In an epoch no example is seen twice, by any worker; the next epoch has another order."""
    created = trainer(batch=64, workers=4)
    per_epoch = len(created.train) // 64
    epochs = []
    for epoch in range(2):
        seen = []
        for step in range(per_epoch):
            at = epoch * per_epoch + step
            seen += [created.batches.indices(at, rank) for rank in range(4)]
        flat = torch.cat(seen)
        assert len(flat) == per_epoch * 64
        assert len(flat.unique()) == len(flat)
        epochs.append(flat)
    assert not torch.equal(epochs[0], epochs[1])


def test_the_mean_of_workers_is_the_gradient_of_the_batch(trainer):
    """Four workers of 16 and one of 64 take the same step, to rounding."""
    four, alone = trainer(workers=4, batch=64), trainer(workers=1, batch=64)
    for created in (four, alone):
        for _ in range(5):
            created.train_step()
    for a, b in zip(four.parameters, alone.parameters, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_sgd_step_by_hand(trainer):
    created = trainer(lr=0.5, momentum=0.0, schedule="constant", weight_decay=0.0, ema=0.0)
    before = [p.detach().clone() for p in created.parameters]
    buckets, _ = created._gradients()
    created.train_step()
    mean = torch.stack(buckets).mean(0).split(created.sizes)
    for old, gradient, new in zip(before, mean, created.parameters, strict=True):
        torch.testing.assert_close(new.detach(), old - 0.5 * gradient.view_as(old))


def test_decay_in_the_loss_is_compressed_and_in_the_update_is_not(trainer, monkeypatch):
    """The L2 term is part of each worker's bucket, or of the optimizer: never of both."""
    task = type(trainer().task)
    monkeypatch.setattr(task, "decayed", lambda self, name: name.endswith("weight"))
    plain = trainer(weight_decay=0.0)
    loss = trainer(weight_decay=0.1, decay="loss")
    update = trainer(weight_decay=0.1, decay="update")
    buckets = [created._gradients()[0][0] for created in (plain, loss, update)]
    weights = torch.cat(
        [
            p.detach().view(-1) * name.endswith("weight")
            for name, p in zip(plain.names, plain.parameters, strict=True)
        ]
    )
    torch.testing.assert_close(buckets[1], buckets[0] + 0.1 * weights)
    assert torch.equal(buckets[2], buckets[0])
    for created in (loss, update):
        for _ in range(3):
            created.train_step()
    for a, b in zip(loss.parameters, update.parameters, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_moving_average_by_hand(trainer):
    created = trainer(ema=0.9, workers=1)
    average = [p.detach().clone() for p in created.parameters]
    for t in range(30):
        created.train_step()
        decay = min(0.9, (1 + t) / (10 + t))
        average = [
            decay * a + (1 - decay) * p for a, p in zip(average, created.parameters, strict=True)
        ]
    for a, b in zip(average, created.average.values, strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=1e-4, atol=1e-6)


def test_dense_last_layer_keeps_its_bytes(tmp_path):
    """The classifier in fp32, all else at 2 bits: the bytes say which tensors went where."""
    common = {"task": "digits", "compressor": "terngrad", "workers": 2, "steps": 2}
    dense = fit(tmp_path, **common, dense_last=True)
    biases = fit(tmp_path, **common, dense_below=200)
    widths = {"w1": 64 * 128, "b1": 128, "w2": 1280, "b2": 10}

    def bytes_up(compressed: list[str], plain: list[str]) -> int:
        n = sum(widths[name] for name in compressed)
        packed = 2 * 4 * (32 * (n // 1024) + math.ceil(n % 1024 / 32))
        return packed + 4 * len(compressed) + 4 * sum(widths[name] for name in plain)

    assert dense["payload_bytes_up"] == 2 * bytes_up(["w1", "b1"], ["w2", "b2"])
    assert biases["payload_bytes_up"] == 2 * bytes_up(["w1", "w2"], ["b1", "b2"])


def test_everything_dense_is_no_compression(tmp_path):
    common = {"task": "digits", "workers": 2, "steps": 3}
    dense = fit(tmp_path, **common, compressor="terngrad", dense_below=10**9)
    plain = fit(tmp_path, **common, compressor="none")
    assert dense["params_sha256"] == plain["params_sha256"]
    assert dense["payload_ratio_up"] == 1


@pytest.mark.parametrize("compressor", ["none", "terngrad"])
def test_digits_are_learnt(tmp_path, compressor):
    summary = fit(tmp_path, task="digits", compressor=compressor, workers=4, steps=200)
    assert summary["test_accuracy"] > 0.93
    assert summary["skipped_steps"] == 0


def test_quadratic_goes_to_its_known_minimum(tmp_path):
    start = fit(tmp_path, task="quadratic", compressor="terngrad", steps=1)
    end = fit(tmp_path, task="quadratic", compressor="terngrad", steps=300, schedule="poly")
    assert end["test_accuracy"] is None
    assert 0 <= end["test_loss"] < start["test_loss"] / 20


def test_real_mnist_is_learnt(tmp_path, real_data):
    settings = {"task": "mnist", "workers": 2, "steps": 60}
    summary = fit(tmp_path, real_data, compressor="terngrad", **settings)
    assert summary["params"] == 1_256_080
    assert summary["test_accuracy"] > 0.85
    assert summary["payload_ratio_up"] == pytest.approx(16, abs=0.01)
    assert summary["payload_ratio_down"] == pytest.approx(32 / 3, abs=0.01)


# ---- schedules, late and dense steps, broadcasts, memories ---------------------------------------


def parameters(created: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().view(-1) for p in created.parameters])


def take(created: Trainer, steps: int) -> torch.Tensor:
    for _ in range(steps):
        created.train_step()
    return parameters(created)


def test_dense_steps_come_first(trainer):
    """A cold start: until --start-step the bytes and the parameters are those of fp32."""
    plain = trainer(compressor="none", steps=9, workers=2)
    cold = trainer(compressor="terngrad", steps=9, start_step=3, workers=2)
    assert torch.equal(take(plain, 3), take(cold, 3))
    dense = plain.world.traffic[0].payload_up
    assert cold.world.traffic[0].payload_up == dense
    cold.train_step()
    assert cold.world.traffic[0].payload_up - dense < dense / 3 / 15


def test_a_schedule_changes_the_compressor_at_its_step(trainer):
    first = trainer(compressor="terngrad", options={"clip": 1.0}, steps=8, workers=2)
    both = trainer(compressor="terngrad", options={"clip": {0: 1.0, 4: 0}}, steps=8, workers=2)
    assert torch.equal(take(first, 4), take(both, 4))
    assert not torch.equal(take(first, 1), take(both, 1))
    assert repr(both.compressor).startswith("TernGrad(clip=0.0")  # the one that it ends with
    assert both.exchange.lanes[0].compressor.clip == 0.0
    ranks = trainer(compressor="powersgd", options={"rank": {0: 1, 2: 3}}, steps=4, workers=2)
    assert torch.isfinite(take(ranks, 4)).all()  # a state of rank 1 cannot start rank 3
    groups = trainer(compressor="terngrad", options={"granularity": {0: "tensor", 2: 512}}, steps=8)
    take(groups, 2)
    segments = len(groups.exchange.lanes[0].segments)
    take(groups, 1)
    assert len(groups.exchange.lanes[0].segments) > segments


def test_a_late_mean_is_applied_one_step_later(trainer):
    """x_{t+1} = x_t - lr_t mean_{t-1}, with mean_t computed at x_t; the last step applies both."""
    created = trainer(delay=1, steps=4, lr=0.5, schedule="poly", momentum=0.0, weight_decay=0.0)
    means, expected = [], parameters(created)
    for step in range(4):
        torch.testing.assert_close(parameters(created), expected)
        buckets, _ = created._gradients()
        means.append(torch.stack(buckets).mean(0))
        created.train_step()
        due = means[step - 1 : step] + (means[step:] if step == 3 else [])
        for mean in due:
            expected = expected - created.config.lr_at(step) * mean
    torch.testing.assert_close(parameters(created), expected)


def test_residuals_follow_the_rate_that_a_mean_is_applied_with(trainer):
    """With a delay that is the next step's rate; the last step's mean is applied at once."""
    for delay, ahead in ((0, [0, 1, 2]), (1, [1, 2, 2])):
        created = trainer(compressor="onebit", delay=delay, steps=3, schedule="poly")
        for step in ahead:
            created.train_step()
            assert created.exchange.lr == created.config.lr_at(step)


def test_dense_tensors_have_the_memory_of_dense_tensors(trainer):
    created = trainer(compressor="topk", memory="dgc", dense_below=200, steps=3)
    assert [lane.memory for lane in created.exchange.lanes] == [Dgc(), Dgc(masking=False)]
    created = trainer(compressor="topk", dense_below=200, steps=3)
    assert [lane.memory for lane in created.exchange.lanes] == [Residual(), Memory()]


@pytest.mark.parametrize(
    "dense", [{"start_step": 6}, {"options": {"ratio": {0: 1.0, 6: 0.25}}}], ids=["fp32", "ratio 1"]
)
def test_dense_steps_under_dgc_are_momentum(trainer, dense):
    """Until the first sparse step it is SGD with momentum; from then on what is carried goes on."""
    created = trainer(compressor="topk", memory="dgc", steps=8, **dense)
    plain = trainer(compressor="none", momentum=0.9, steps=8)
    torch.testing.assert_close(take(created, 6), take(plain, 6))
    assert created.exchange.lanes[0].memory == Dgc(masking=False)
    velocity = created.exchange.workers[0][0]["velocity"].clone()
    assert bool(velocity.any())
    created.train_step()
    assert created.exchange.lanes[0].memory == Dgc()
    assert bool((created.exchange.workers[0][0]["velocity"] == 0).any())


def test_a_residual_begins_where_dense_steps_end(trainer):
    created = trainer(compressor="topk", start_step=3, steps=5)
    take(created, 3)
    assert not created.exchange.workers[0][0]
    created.train_step()
    assert bool(created.exchange.workers[0][0]["residual"].any())


def test_broadcast_parameters_cost_their_bytes(trainer):
    quiet = trainer(steps=6, workers=2)
    loud = trainer(steps=6, workers=2, rebroadcast_every=3)
    assert torch.equal(take(quiet, 6), take(loud, 6))
    size = 4 * quiet.total
    for rank in range(2):
        extra = {
            name: getattr(loud.world.traffic[rank], name) - getattr(quiet.world.traffic[rank], name)
            for name in ("payload_up", "payload_down", "wire")
        }
        up = 2 * size if rank == 0 else 0
        assert extra == {"payload_up": up, "payload_down": 2 * size, "wire": 2 * size / 2}


RECIPES = {
    "residual in two-shot": {"compressor": "onebit", "schedule": "poly"},
    "dgc with a warm-up": {
        "compressor": "topk",
        "memory": "dgc",
        "options": {"ratio": {0: 0.2, 4: 0.05}},
        "dense_below": 200,
    },
    "signum": {"compressor": "signsgd", "memory": "momentum", "lr": 0.001},
    "low rank": {"compressor": "powersgd"},
    "low rank as the update": {"compressor": "dion"},
    "a second moment that is refreshed": {
        "compressor": "onebitadam",
        "options": {"refresh": 1},
        "start_step": 2,
    },
    "late, after dense steps": {"compressor": "efsignsgd", "delay": 1, "start_step": 3},
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_carried_is_in_the_checkpoint(tmp_path, simulated, recipe):
    """Stopped at step 5 and gone on: the same bits as without a stop."""
    config = Config.make(
        {"task": "digits", "workers": 3, "batch": 66, **RECIPES[recipe], "steps": 9}
    )
    digests = []
    for stops in ([], [5]):
        run = Run(tmp_path / str(len(stops)))
        run.create()
        for at in (*stops, 9):
            created = Trainer(config, simulated(3), run, Options(checkpoint_seconds=1e9))
            if at < 9:
                with pytest.raises(Interrupted):
                    created.fit(lambda trainer=created, at=at: trainer.step == at)
            else:
                created.fit()
        digests.append(created.parameter_hash())
        for states in created.exchange.workers:
            assert all(bool(value.any()) for value in states[0].values())
    assert digests[0] == digests[1]
