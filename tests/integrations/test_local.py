"""`gcbench.local_steps` in a user's loop equals `gcbench run --local-steps`, resumes, and stops."""

from __future__ import annotations

import re

import jobs
import local_jobs
import pytest
import torch

import gcbench
from gcbench.core.errors import UsageError
from gcbench.training.configuration import Config
from gcbench.training.store import Run
from gcbench.training.train import Options, Trainer

pytestmark = pytest.mark.usefixtures("forked")

JOBS = jobs.Jobs("local_jobs", [], {2: [*local_jobs.JOBS]})
of = JOBS.of


@pytest.mark.parametrize("name", local_jobs.CASES)
def test_a_loop_equals_a_run_bit_for_bit(name, tmp_path, simulated):
    config = Config.make({**local_jobs.COMMON, **local_jobs.CASES[name]})
    trainer = Trainer(config, simulated(2), Run(tmp_path), Options())
    for _ in range(config.steps):
        trainer.train_step()
    first, second = (result[name] for result in of("equal"))
    assert first["end"] == second["end"] == trainer.parameter_hash()
    assert first["apart"] != second["apart"] or config.local_steps == 2
    assert first["sent"] == trainer.world.traffic[0].payload_up
    assert first["step"] == config.steps


@pytest.mark.parametrize("name", local_jobs.RESUMED)
def test_a_loop_resumed_in_a_round_ends_in_the_same_bits(name):
    for result, whole in zip(of("resumed"), of("equal"), strict=True):
        assert result[name] == whole[name]["end"]
        assert "rank 7" in result[f"{name}, rank"]["text"]
        assert "outer_lr: " in result[f"{name}, settings"]["text"]
        assert "shape (1" in result[f"{name}, shape"]["text"]
        assert "digest" in result[f"{name}, flipped"]["text"]
        for case in ("not loaded", "another job's"):
            assert result[f"{name}, {case}"]["kind"] == "UsageError"
            assert "parameters" in result[f"{name}, {case}"]["text"]
            assert "SHA-256" in result[f"{name}, {case}"]["text"]


def test_a_momentum_that_has_begun_in_part_is_resumed():
    """Also in a template of `torch.distributed.checkpoint`, saved before the momentum began."""
    for result, whole in zip(of("saved_momentum"), of("equal"), strict=True):
        assert result["begun"] == [False, True]
        assert result["dcp"] == result["earlier"] == whole["fragments"]["end"]


def test_the_autocast_of_the_caller_does_not_apply_to_an_exchange():
    assert all(result["equal"] for result in of("autocast"))


def test_a_state_without_momentum_restarts_without_momentum():
    for result, whole in zip(of("rewound"), of("equal"), strict=True):
        assert result["end"] == whole["sparse"]["end"]
        for case in ("early", "another job's"):
            assert result[case]["kind"] == "UsageError"
            assert "parameters" in result[case]["text"]


def test_an_exchange_between_makes_ranks_equal_and_nothing_is_taken_over_twice():
    one, other = of("between")
    assert one["after"] == other["after"]
    assert one["same"], "a second exchange without a step sends no parameters"
    assert one["closed"]["kind"] == "UsageError"
    assert "rank 0: close() after 6 optimizer steps, and the last 1 are not" in one["open"][0]
    for name in ("before", "later"):
        assert all(a != b for a, b in zip(one[name], other[name], strict=True))


def test_faults_stop_all_ranks_with_the_cause():
    for result in of("faults"):
        assert "initial parameters" in result["parameters"]["text"]
        assert "frozen parameters" in result["frozen"]["text"]
        assert "every: rank 0 2, rank 1 3" in result["every"]["text"]
        assert result["late"]["text"] == "", "a rank waits as long as the timeout"
        for name in ("diverged", "again"):
            assert result[name]["kind"] == "DivergedError"
            assert re.match(r"rank 1: \S+ is not finite after 3 opt", result[name]["text"])
        assert result["another step"]["kind"] == "UsageError"
        assert "step: rank 0 0, rank 1 1" in result["another step"]["text"]
        assert result["no open step"]["kind"] == "UsageError"
        assert "open steps: rank 0 0, rank 1 1" in result["no open step"]["text"]
        assert "float32" in result["double"]["text"]
        assert "shard_hook" in result["sharded"]["text"]
        assert "optimizer has none of the model's parameters" in result["optimizer"]["text"]
        assert result["wrapped"] == 1, "the optimizer inside a framework's wrapper is counted"
        assert "at most" in result["blocks"]["text"]
        took = [each["seconds"] for each in result.values() if isinstance(each, dict)]
        assert max(took) < jobs.PROMPT


def test_a_rank_that_does_not_call_it_is_named():
    first, _ = of("faults")
    assert first["absent"]["kind"] == "PeerLostError"
    assert "rank 1 did not call gcbench.local_steps within 1 s" in first["absent"]["text"]


def test_an_optimizer_that_replaces_the_counted_one_is_named_once():
    for rank, result in enumerate(of("other_optimizers")):
        (text,) = result["warnings"]
        assert "another optimizer (Adam) moves " in text
        assert "counts (SGD) has not stepped since step 3" in text
        (text,) = result["close"]
        assert f"rank {rank}: close() after 3 optimizer steps, and the last 1 are" in text
    one, other = of("other_optimizers")
    assert one["apart"] != other["apart"]
    assert one["exchanged"] == other["exchanged"], "exchange() includes steps that do not count"


def test_an_exchange_includes_steps_of_optimizers_of_other_parameters():
    one, other = of("other_optimizers")
    assert one["last, apart"] != other["last, apart"]
    assert one["last"] == other["last"]


@pytest.mark.parametrize("name", ["two optimizers", "inside", "subclass"])
def test_optimizers_that_replace_none_cause_no_warning(name):
    one, other = of("other_optimizers")
    assert one[name] == other[name]


def test_a_step_that_calls_the_step_of_its_base_class_counts_once():
    assert [result["subclass, steps"] for result in of("other_optimizers")] == [6, 6]


def test_parameters_that_are_not_exchanged_are_named():
    for result in of("other_parameters"):
        assert result["replaced"]["kind"] == "UsageError"
        assert re.search(r"rank 1: \S+bias of the model is another", result["replaced"]["text"])
        (text,) = result["unfrozen"]
        assert "did not require a gradient" in text
        (text,) = result["outside"]
        assert "parameters of the optimizer that the model lacks: 1" in text
    one, other = of("other_parameters")
    assert one["renamed"] == other["renamed"]


def test_a_model_loaded_in_a_round_stops_all_ranks():
    """Unless it was restored, as after an evaluation, or the rounds were loaded as well."""
    for result in of("loads"):
        for name in ("all", "one", "compiled", "inside compiled"):
            assert result[name]["kind"] == "UsageError"
            assert "model.load_state_dict changed parameters" in result[name]["text"]
        for name in ("evaluation", "with the rounds", "copy"):
            assert result[name]["text"] == "", name


def test_a_step_that_initializes_an_optimizer_is_not_counted_and_one_at_rate_0_is():
    """As torch.distributed.checkpoint makes it, here on one rank alone."""
    one, other = of("initialized")
    for result in (one, other):
        assert result["steps"] == [2, 3, 6]
        assert result["evaluated"]["text"] == ""
    assert one["end"] == other["end"]
    assert one["exchanged"]["text"] == other["exchanged"]["text"] == ""


def test_closing_in_a_round_warns_unless_its_steps_are_saved_or_exchanged():
    for rank, result in enumerate(of("open_rounds")):
        (text,) = result["open"]
        assert f"rank {rank}: close() after 4 optimizer steps, and the last 1 are" in text
        assert result["saved"] == result["exchanged"] == []


def test_a_rank_with_fewer_steps_is_named():
    waiting, fewer = of("open_rounds")
    for name in ("closes", "waits"):
        assert waiting[name]["kind"] == "PeerLostError"
        assert "last exchange of rank 0: the exchange after 6 optimizer" in waiting[name]["text"]
        assert fewer[name]["kind"] == ""
    assert "rank 1: close() after 5 optimizer steps" in waiting["closes"]["text"]
    assert "rank 1, which" in waiting["waits"]["text"]
    assert "has made fewer optimizer steps" in waiting["waits"]["text"]
    assert len(fewer["warned"]) == 1


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("int8", {"every": 0}, "every=0"),
        ("int8", {"every": 6, "fragments": 4}, "fragments=4"),
        ("int8", {"every": 6, "fragments": 0}, "fragments=0"),
        ("int8", {"every": 6, "fragments": 3, "delay": 2}, "delay=2"),
        ("int8", {"every": 6, "blend": 1.0}, "blend=1"),
        ("int8", {"every": 2, "outer_nesterov": True}, "outer_momentum"),
        ("topk", {"every": 2, "memory": "dgc"}, "outer_momentum"),
        ("dlion", {"every": 2}, "update rule"),
        ("int8", {"every": 2, "outer_lr": -1}, "outer_lr=-1"),
        ("int8", {"every": 2, "outer_lr": 0}, "outer_lr=0"),
        ("int8", {"every": 2, "outer_momentum": 1.0}, "outer_momentum=1"),
        ("signsgd", {"every": 2}, "SignSGD.* pass outer_lr"),
        ("demo", {"every": 2, "chunk": 4, "topk": 2}, "DeMo.* pass outer_lr"),
        ("signsgd", {"every": 2, "outer_lr": 1}, "init_process_group"),  # the next check
    ],
)
def test_invalid_arguments_are_refused(method, options, message):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(UsageError, match=message):
        gcbench.local_steps(model, optimizer, method, **options)


def test_an_optimizer_that_averages_parameters_is_refused():
    """As torch's PostLocalSGDOptimizer."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.averager = None
    with pytest.raises(UsageError, match="averages the parameters itself"):
        gcbench.local_steps(model, optimizer, "int8", every=2)


def test_an_optimizer_that_sends_parameters_at_each_step_is_refused():
    """Each rank would train only a part of the parameters, and none of its steps were local."""
    model = torch.nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), 0.1)

    class ZeroRedundancyOptimizer(torch.optim.SGD):  # torch's needs a process group
        optim = inner

    optimizer = ZeroRedundancyOptimizer(model.parameters(), 0.1)
    with pytest.raises(UsageError, match=r"no step is local.*SGD"):
        gcbench.local_steps(model, optimizer, "int8", every=2)


def test_a_process_without_a_group_is_told_to_create_one():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(UsageError, match="init_process_group"):
        gcbench.local_steps(model, optimizer, "int8", every=2)


def test_one_of_several_optimizers_is_requested():
    model = torch.nn.Linear(2, 2)
    optimizers = [torch.optim.SGD([each], 0.1) for each in model.parameters()]
    with pytest.raises(UsageError, match="the one that steps last"):
        gcbench.local_steps(model, optimizers, "int8", every=2)
